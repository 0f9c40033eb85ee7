"""`./dev chaos`: a sitting of so many faults, in rounds that are judged one by one."""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

from gaffer_dagster.testing import Databases
from tests.evidence.chaos import broken, ledger, rounds
from tests.evidence.chaos.faults import missed
from tests.evidence.chaos.scene import gear
from tests.support.faults import say

ROUND = 200
"""Faults in a round. What was judged is noted after each."""
EVERY, OF_DAGSTER, SLOWLY = 4, 40, 1.0
"""One in so many rounds has a Dagster at work, which takes its time: with so many faults, so many a second."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="./dev chaos", description=__doc__)
    parser.add_argument("--seed", type=int, help="repeats the choices (not the timing) of an earlier sitting")
    parser.add_argument("--faults", type=int, default=1_000, help="how many (1,000)")
    parser.add_argument("--state", type=Path, help="a file of sittings, to which this one is added, with the next seed")
    parser.add_argument("--no-dagster", action="store_true", help="leave out the rounds with a Dagster at work")
    parser.add_argument("--variant", choices=broken.BROKEN, help="a broken protocol instead: it is to be found")
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
    seed = given.seed or after
    if given.variant:
        return show(seed, given.variant)
    if (seed, ledger.commit()) in [(each.seed, each.commit) for each in before]:
        parser.error(f"seed {seed} was judged at this commit before, and is in {given.state}; leave --seed out")
    return sit(seed, given.faults, given.state, before, dagster=not given.no_dagster)


def show(seed: int, variant: str) -> int:
    say(
        f"./dev chaos --seed {seed} --variant {variant!r}: a protocol that is known to be wrong; the judge must find it"
    )
    with tempfile.TemporaryDirectory(prefix="gaffer-chaos-") as folder, gear(Path(folder)) as made:
        with Databases(made.url) as databases:
            judged = broken.play(made, databases, Path(folder, "round"), str(seed), variant)
        found = broken.caught(variant, judged)
        say(judged.summary())
        for finding in found[:3]:
            say(str(finding))
    say(f"{variant}: {'found, as it must be' if found else 'NOT found: the judge is blind, or nothing struck'}")
    return 0 if found else 1


def sit(seed: int, faults: int, state: Path | None, before: list[ledger.Sitting], *, dagster: bool) -> int:
    say(f"./dev chaos --seed {seed} --faults {faults}")
    folder = Path(tempfile.mkdtemp(prefix="gaffer-chaos-"))
    with gear(folder) as made, Databases(made.url) as databases:
        if not dagster:
            made.missing["dagster"] = "--no-dagster"
        sitting, expected = ledger.begin(seed, made.url, made.missing), Counter[str]()
        for what, why in made.missing.items():
            say(f"without {what}: {why}")
        while (left := faults - sitting.faults.total()) > 0:
            here = folder / f"round-{sitting.rounds}"
            name, of_dagster = f"{seed}/{sitting.rounds}", dagster and sitting.rounds % EVERY == 0
            judged = (
                rounds.play(made, databases, here, name, min(OF_DAGSTER, left), daemons=2, rate=SLOWLY)
                if of_dagster
                else rounds.play(made, databases, here, name, min(ROUND, left))
            )
            sitting.add(judged)
            expected += judged.expected
            ledger.save(state, [*before, sitting])
            say(judged.summary())
            if judged.findings:
                for finding in judged.findings[:20]:
                    say(str(finding))
                say(f"{len(judged.findings)} findings; the history is in {here}")
                return 1
            shutil.rmtree(here)
    shutil.rmtree(folder)
    if never := missed(expected, sitting.faults):
        say(f"so nothing is known of what never struck: {', '.join(never)}")
        return 1
    say(
        f"{sitting.faults.total():,} faults in {sitting.seconds:.0f} s, {sitting.acknowledged:,} batches, nothing found"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
