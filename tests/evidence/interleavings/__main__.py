"""`./dev interleavings`: the orders in which the statements of runners can reach the server, one after the other."""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

from tests.evidence.interleavings.cases import BROKEN, FEWEST_OF_THREE, SHORT, SOUND, long
from tests.evidence.interleavings.report import HEADER
from tests.evidence.interleavings.walks import explore_alone
from tests.support import faults


def _show(variant: str, seed: int) -> bool:
    """A protocol that is known to be wrong is caught, and how is told."""
    as_they_must_be = True
    for case in (case for case in [*SOUND, *BROKEN] if case.variant == variant):
        found = explore_alone(case, seed, until_broken=True)
        faults.say(f"{HEADER}\n{found.row()}")
        names: dict[str, list[str]] = {}
        for name, how in found.first.items():
            names.setdefault(how, []).append(name)
        for how, broken in names.items():
            faults.say("\n".join(f"BROKEN: {name}" for name in broken))
            faults.say("        " + "\n        ".join(how.split(", ")))
        as_they_must_be &= found.is_caught == (case in BROKEN)
    faults.say(f"{variant}: {'as it must be' if as_they_must_be else 'NOT as it must be'}")
    return as_they_must_be


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="./dev interleavings", description=__doc__)
    parser.add_argument("--long", action="store_true", help="all schedules of two and three runners, some with walks")
    parser.add_argument("--seed", type=int, default=0, help="of the walks at random")
    parser.add_argument("--walks", type=int, default=2_000, help="of each case of three that has too many schedules")
    parser.add_argument("--lanes", type=int, default=2, help="how many servers side by side")
    parser.add_argument("--only", default="", help="cases whose row begins with these words")
    known = sorted({case.variant for case in [*SOUND, *BROKEN]})
    parser.add_argument("--variant", choices=known, help="only this protocol, until it is caught; and how")
    given = parser.parse_args(words)
    seed = given.seed or random.SystemRandom().randrange(1, 1_000_000)
    if given.variant is not None:
        faults.say(f"--seed {seed}")
        sys.exit(not _show(given.variant, seed))
    cases = long(given.walks) if given.long else [*SHORT, *SOUND, *BROKEN]
    cases = [case for case in cases if case.name.startswith(given.only)]
    faults.say(f"--seed {seed} --walks {given.walks}, {len(cases)} cases\n{HEADER}")
    wrong: list[str] = []
    of_three = 0
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(given.lanes, mp_context=context) as lanes:
        for done in as_completed([lanes.submit(explore_alone, case, seed) for case in cases]):
            found = done.result()
            case = found.case
            faults.say(found.row())
            of_three += found.schedules * (len(case.runners) == 3)
            if bool(found.broken) != (case in BROKEN) or found.is_caught != (case in BROKEN):
                wrong += [
                    found.row(),
                    *(f"  {found.broken[name]} × {name}: {how}" for name, how in found.first.items()),
                ]
    faults.say(f"of three: {of_three:,} schedules")
    if wrong:
        faults.say("not as it should be:\n" + "\n".join(wrong))
        sys.exit(1)
    if given.long and not given.only and of_three < FEWEST_OF_THREE:
        sys.exit(f"fewer than {FEWEST_OF_THREE:,} schedules of three were run")


if __name__ == "__main__":
    main()
