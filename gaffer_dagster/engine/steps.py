"""The stations of one run. They are the diagram, the vocabulary of the log, and where the crash tests kill.

LEASED ─► ( DUE ─► APPLIED ─► COMMITTED )* ─► ENDED ─► REPORTED
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum


class Station(str, Enum):
    LEASED = "leased"
    """The lease is held and the run's row is there."""
    DUE = "due"
    """A batch's transaction is open and what is due has been read; nothing is written yet."""
    APPLIED = "applied"
    """The user's function has returned; nothing is committed yet."""
    COMMITTED = "committed"
    """The batch's writes, the watermark and the counters are committed."""
    ENDED = "ended"
    """The run's row says how it ended; the lease is free."""
    REPORTED = "reported"
    """Dagster (or the terminal) was told."""

    def __str__(self) -> str:
        return self.value


Observer = Callable[[Station], None]
