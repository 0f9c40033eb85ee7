"""What the runs of a round's Dagster are told by whoever launches them, and what they leave behind when they obey."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

ORDER = "chaos/order"
"""The tag of a run that an order is in."""
REVOKED = "revoked"
"""A file in the round's folder; where it is, no order is followed any more."""
TURN = 8.0
"""So many seconds a run that has an order is waited for."""


@dataclass(frozen=True)
class Order:
    """What a run is to do when it gets to `place`, once: `kills` itself, or its `parent`, which is the run
    of a step; `stops` (SIGSTOP), also after its parent's end; `waits` until it is interrupted."""

    place: str
    kills: str | None = None
    stops: bool = False
    waits: bool = False


@dataclass(frozen=True)
class Part:
    """What a code location is told, in the variable CHAOS. `jobs`: of the round's, these."""

    folder: str
    seed: str
    jobs: list[str]


def note_of(folder: Path, run_id: str, pid: int | str) -> Path:
    """What a process leaves that does as it was told."""
    return folder / f"told-{run_id}-{pid}"


class Turn:
    """While it is asked for, others leave the job alone: a process of Dagster's takes too long to start for ending as
    `busy`. Who asks and dies is forgotten."""

    def __init__(self, folder: Path, job: str) -> None:
        self._file = folder / f"turn-{job}"

    def ask(self) -> None:
        self._file.touch()

    def take(self) -> None:
        self._file.unlink(missing_ok=True)

    def is_asked_for(self) -> bool:
        try:
            return time.time() - self._file.stat().st_mtime < TURN
        except FileNotFoundError:
            return False
