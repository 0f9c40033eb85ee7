"""`./dev chaos`: a sitting of so many faults, in rounds that are judged one by one."""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
from pathlib import Path

from gaffer_dagster.testing import Databases
from tests.evidence.chaos import ledger, rounds
from tests.evidence.chaos.scene import gear
from tests.support.faults import say

ROUND = 200
"""Faults in a round. What was judged is noted after each."""
EVERY, OF_DAGSTER, SLOWLY = 4, 100, 2.0
"""One in so many rounds has a Dagster at work, which takes its time: with so many faults, so many a second."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="./dev chaos", description=__doc__)
    parser.add_argument("--seed", type=int, help="repeats the choices (not the timing) of an earlier sitting")
    parser.add_argument("--faults", type=int, default=1_000, help="how many (1,000)")
    parser.add_argument("--state", type=Path, help="a file of sittings, to which this one is added, with the next seed")
    parser.add_argument("--no-dagster", action="store_true", help="leave out the rounds with a Dagster at work")
    parser.add_argument("--report", action="store_true", help=f"only write {ledger.REPORT.name} from --state")
    given = parser.parse_args()
    before = ledger.load(given.state)
    if given.report:
        if not before:
            parser.error("--report needs --state FILE, with a sitting in it")
        ledger.REPORT.write_text(ledger.report(before))
        say(f"{ledger.REPORT}: {sum(each.faults.total() for each in before):,} faults")
        return 0
    after = max((each.seed for each in before), default=random.SystemRandom().randrange(1, 1_000_000)) + 1
    return sit(given.seed or after, given.faults, given.state, before, dagster=not given.no_dagster)


def sit(seed: int, faults: int, state: Path | None, before: list[ledger.Sitting], *, dagster: bool) -> int:
    say(f"./dev chaos --seed {seed} --faults {faults}")
    folder = Path(tempfile.mkdtemp(prefix="gaffer-chaos-"))
    with gear(folder) as made, Databases(made.url) as databases:
        if not dagster:
            made.missing["dagster"] = "--no-dagster"
        sitting = ledger.begin(seed, made.url, made.missing)
        for what, why in made.missing.items():
            say(f"without {what}: {why}")
        while (left := faults - sitting.faults.total()) > 0:
            here = folder / f"round-{sitting.rounds}"
            name, of_dagster = f"{seed}/{sitting.rounds}", dagster and sitting.rounds % EVERY == 0
            judged = (
                rounds.play(made, databases, here, name, min(OF_DAGSTER, left), dagster=True, rate=SLOWLY)
                if of_dagster
                else rounds.play(made, databases, here, name, min(ROUND, left))
            )
            sitting.add(judged)
            ledger.save(state, [*before, sitting])
            say(judged.summary())
            if judged.findings:
                for finding in judged.findings[:20]:
                    say(str(finding))
                say(f"{len(judged.findings)} findings; the history is in {here}")
                return 1
            shutil.rmtree(here)
    shutil.rmtree(folder)
    say(
        f"{sitting.faults.total():,} faults in {sitting.seconds:.0f} s, {sitting.acknowledged:,} batches, nothing found"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
