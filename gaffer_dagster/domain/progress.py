"""How far a run that is at work has got, and when it will have caught up at its pace."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

BACKLOG_CEILING = 1_000_000
"""What is left is counted up to here: further would cost more than the number is worth."""


@dataclass(frozen=True)
class Progress:
    """`batches` and `items` (rows or intervals) were committed by `at`, in the `took` since the run began. `left`: what
    is due and left, counted up to a million; None where the count would have taken too long."""

    batches: int
    items: int
    at: datetime
    took: timedelta
    left: int | None

    @property
    def items_per_second(self) -> float:
        return self.items / max(self.took.total_seconds(), 0.001)

    @property
    def caught_up_at(self) -> datetime | None:
        """When nothing of what is due now will be left at this pace. None where that cannot be told."""
        if self.left is None or self.left >= BACKLOG_CEILING or not self.items:
            return None
        try:
            return self.at + timedelta(seconds=self.left / self.items_per_second)
        except OverflowError:
            return None
