"""What is tried: who is at work, which fault meets them, under which protocol, and how much of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any

from tests.evidence.interleavings.gate import Runner
from tests.evidence.interleavings.runners import one_run, release, whole_run


class Fault(str, Enum):
    NONE = "none"
    KILL = "kill"
    TERMINATE = "terminate"
    LOSE = "lose"
    RESTORE = "restore"

    def __str__(self) -> str:
        return self.value


_SHARED = frozenset(
    {"acquire", "commit_batch", "check_batch", "end_run", "supersede", "renew", "release"}
    | {"select n from", "update total set"}
)
_ENGINES = _SHARED | {"look", "insert into source"}
_FINISHES = partial(one_run, most=9, limit=9)


@dataclass(frozen=True)
class Case:
    """`expiry` of the leases: `expired`, `live`, or `once` (at any one moment). `walks`: not all schedules, but so many
    at random. `inside`: with the stops within messages. `every_message`: also before those that commute with all
    others."""

    name: str
    runners: tuple[Callable[[Runner], object], ...]
    fault: Fault = Fault.NONE
    expiry: str = "expired"
    variant: str = "the product"
    inside: bool = False
    every_message: bool = False
    stops: frozenset[str] = _SHARED
    after: Callable[[Runner], object] = _FINISHES
    counts: bool = False
    walks: int = 0

    @property
    def is_peaceful(self) -> bool:
        """Nothing is there by which anybody could lose the lease."""
        return self.expiry == "live" and self.fault is Fault.NONE and release not in self.runners


_COUNTING = partial(one_run, counts=True)
_COUNTS: dict[str, Any] = {"counts": True, "after": partial(one_run, most=9, limit=9, counts=True)}
_ENGINE: dict[str, Any] = {"stops": _ENGINES, "after": whole_run, "expiry": "live"}
_WAKES_UP = partial(whole_run, adds=True)
HITS = (Fault.KILL, Fault.TERMINATE, Fault.LOSE)

TWO = Case("two runs", (one_run, one_run))
COUNTING = Case("two runs that count", (_COUNTING, _COUNTING), **_COUNTS)
KEPT = Case("a run, its keeper, and a run", (partial(one_run, keeper=3), one_run))
RELEASED = Case("a run, and gaffer release", (one_run, release), expiry="live")
WOKEN = Case("an engine, and one that wakes up for a new row", (whole_run, _WAKES_UP), **_ENGINE)
# A run that has begun no batch does not know that it was overtaken, and goes on under its number.
RESTORED = replace(TWO, fault=Fault.RESTORE, stops=_SHARED | {"begin_batch"})
THREE = Case("three runs", (one_run, one_run, one_run))

BROKEN = [
    *(
        replace(COUNTING, variant=variant)
        for variant in (
            "no check",
            "time-only lease",
            "plain SELECT, then the writes",
            "plain SELECT, then COMMIT",
            "key share, then the writes",
            "locking check, then autocommit",
        )
    ),
    replace(TWO, variant="error means not committed", fault=Fault.LOSE),
    replace(RESTORED, variant="number-only fence", walks=300),
    replace(WOKEN, variant="a busy wake-up notes nothing"),
    replace(WOKEN, variant="the end looks at no wish"),
    replace(KEPT, variant="renewal that takes the lease back"),
    replace(KEPT, variant="renewal that matches nothing"),
    replace(TWO, variant="a busy wake-up moves the fence", expiry="live"),
]
"""Protocols that are known to be wrong, each where it shows."""
SOUND = [
    replace(COUNTING, variant="bare"),
    replace(COUNTING, variant="locking check, then the writes"),
    replace(COUNTING, variant="locking check, then COMMIT"),
]
"""Their nearest relatives that are not."""
SHORT = [
    TWO,
    replace(TWO, expiry="live"),
    COUNTING,
    KEPT,
    replace(KEPT, expiry="live"),
    replace(RELEASED, inside=True),
    replace(TWO, inside=True, walks=40),
    replace(TWO, fault=Fault.KILL),
    replace(TWO, fault=Fault.LOSE),
    replace(TWO, fault=Fault.TERMINATE, walks=50),
    replace(RESTORED, walks=30),
    replace(WOKEN, walks=30),
]
"""All schedules of two, but where there are too many for seconds: there `walks` says how many."""
SHORT_SOUND = [replace(case, walks=40) for case in SOUND]
FEWEST_OF_THREE = 50_000
"""Schedules of three runners that the long form must have run."""


def long(walks: int) -> list[Case]:
    """All that two can do in `shared` steps, and all that three can, each with every fault; and what is too much for
    that, `walks` at random of each: two runs that a fault meets within a statement, and three runners with stops before
    every message or within them."""
    either = (Fault.NONE, *HITS)
    batches_of_two = replace(TWO, name="two runs of two batches", runners=(partial(one_run, most=2),) * 2)
    released_and_followed = replace(
        RELEASED, name="a run, gaffer release, and a run", runners=(one_run, release, one_run)
    )
    return [
        *SHORT,
        replace(TWO, every_message=True),
        *(replace(batches_of_two, fault=fault) for fault in either),
        *(replace(case, fault=fault) for case in (COUNTING, KEPT, RELEASED) for fault in HITS),
        *(replace(case, expiry="once") for case in (COUNTING, KEPT, RELEASED)),
        *(replace(TWO, expiry="once", fault=fault) for fault in either),
        RELEASED,
        replace(TWO, inside=True),
        RESTORED,
        replace(TWO, fault=Fault.TERMINATE),
        *(replace(case, inside=True, walks=walks) for case in (COUNTING, KEPT)),
        *(replace(RELEASED, inside=True, fault=fault) for fault in (Fault.KILL, Fault.TERMINATE)),
        replace(RELEASED, inside=True, fault=Fault.LOSE, walks=walks),
        *(replace(TWO, inside=True, fault=fault, walks=walks) for fault in HITS),
        *(replace(WOKEN, fault=fault) for fault in either),
        replace(WOKEN, expiry="expired"),
        *(replace(released_and_followed, fault=fault) for fault in either),
        *(replace(THREE, fault=fault) for fault in either),
        replace(THREE, expiry="live"),
        *(replace(THREE, every_message=True, fault=fault, walks=walks) for fault in either),
        *(replace(THREE, inside=True, fault=fault, walks=walks) for fault in either),
        *SOUND,
        *BROKEN,
    ]
