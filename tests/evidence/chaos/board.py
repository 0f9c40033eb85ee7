"""A page of memory that the processes of a round share, as a file: how far the workers' clock was moved, and for each
seat (an engine's) an order to stop or to die at a place, and what the engine is at."""

from __future__ import annotations

import mmap
import os
import signal
import struct
from datetime import datetime, timedelta, timezone
from pathlib import Path

from gaffer_dagster.engine.steps import Station
from tests.support.processes import WORKING
from tests.support.variants import CHECKED

PLACES = [*map(str, Station), WORKING, CHECKED]
_AHEAD = struct.Struct("d")
_SEATS, _SIZE = 64, 4096
_ORDERS, _JOBS = 64, 128
_KILL, _STANDS = 64, 255


class Board:
    def __init__(self, file: Path) -> None:
        if not file.exists():
            file.write_bytes(bytes(_SIZE))
        with file.open("r+b") as opened:
            self._memory = mmap.mmap(opened.fileno(), _SIZE)

    # ── the workers' clock ───────────────────────────────────────────────────────────────────────────────────────────

    @property
    def ahead(self) -> timedelta:
        return timedelta(seconds=_AHEAD.unpack_from(self._memory)[0])

    @ahead.setter
    def ahead(self, by: timedelta) -> None:
        _AHEAD.pack_into(self._memory, 0, by.total_seconds())

    def now(self) -> datetime:
        return datetime.now(timezone.utc) + self.ahead

    # ── orders ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def order(self, seat: int, place: str, *, kill: bool = False) -> None:
        """The engine stops itself (SIGSTOP) when it gets there next, or ends itself (SIGKILL)."""
        self._memory[_ORDERS + seat] = 1 + PLACES.index(place) + (_KILL if kill else 0)

    def take_back(self, seat: int) -> None:
        self._memory[_ORDERS + seat] = 0

    def stands(self, seat: int) -> bool:
        """It has done as it was told."""
        return self._memory[_ORDERS + seat] == _STANDS

    def at(self, seat: int, place: str) -> None:
        """The engine is there."""
        order = self._memory[_ORDERS + seat]
        if order not in (0, _STANDS) and PLACES[(order & (_KILL - 1)) - 1] == place:
            self._memory[_ORDERS + seat] = _STANDS
            os.kill(os.getpid(), signal.SIGKILL if order & _KILL else signal.SIGSTOP)

    # ── what it is at ────────────────────────────────────────────────────────────────────────────────────────────────

    def works_on(self, seat: int, job: int | None) -> None:
        """The number of the job whose lease it has."""
        self._memory[_JOBS + seat] = 0 if job is None else 1 + job

    def job(self, seat: int) -> int | None:
        return self._memory[_JOBS + seat] - 1 if self._memory[_JOBS + seat] else None
