"""`./dev chaos`: a sitting."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path

from gaffer_dagster.testing import Databases
from tests.evidence.chaos import rounds
from tests.evidence.chaos.scene import gear
from tests.support.faults import say

ROUND = 200


def main() -> int:
    parser = argparse.ArgumentParser(prog="./dev chaos", description=__doc__)
    parser.add_argument("--seed", type=int, help="repeats the choices (not the timing) of an earlier sitting")
    parser.add_argument("--faults", type=int, default=1_000, help="how many (1,000)")
    given = parser.parse_args()
    seed = given.seed or random.SystemRandom().randrange(1, 1_000_000)
    say(f"seed {seed}, {given.faults} faults")
    folder = Path(tempfile.mkdtemp(prefix="gaffer-chaos-"))
    done, failed = 0, False
    with gear(folder) as made, Databases(made.url) as databases:
        for what, why in made.missing.items():
            say(f"without {what}: {why}")
        number = 0
        while done < given.faults and not failed:
            judged = rounds.play(
                made, databases, folder / f"round-{number}", f"{seed}/{number}", min(ROUND, given.faults - done)
            )
            say(
                f"round {number}: {judged.seconds:.1f} s, {dict(judged.faults)}, {dict(judged.lines)}, "
                f"{dict(judged.outcomes)}, {judged.rows} rows, {judged.unknown_done} of {judged.unknown} unknown done, "
                f"got on {judged.resumed:.1f} s after, longest gap {judged.slowest:.1f}; {len(judged.findings)} findings"
            )
            for finding in judged.findings[:10]:
                say(str(finding))
            done += judged.faults.total()
            number += 1
            failed = bool(judged.findings)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
