"""One run: how it can end, and the record that it leaves."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import Enum

from gaffer_dagster.domain.held import HeldBy, held_by_from
from gaffer_dagster.domain.watermark import Position


class Outcome(str, Enum):
    """How a run ended. The docstring of each group says what it does to the streak of failures."""

    RUNNING = "running"
    """Not ended."""

    SUCCEEDED = "succeeded"
    """Nothing due is left. Ends the streak; covers all ticks up to the database's time at its last look."""
    PARTIAL = "partial"
    """The same, but some rows failed. Ends the streak."""
    CAPPED = "capped"
    """Stopped at its bounds with a backlog left. Ends the streak; covers only what it did."""

    BUSY = "busy"
    """Another run holds the lease and will see that this one was wanted. Neutral."""
    PAUSED = "paused"
    """The job is paused. Neutral."""
    LATE = "late"
    """Woken too long after its tick. Neutral."""
    INTERRUPTED = "interrupted"
    """Told to stop. Neutral; what was committed stays."""

    FAILED = "failed"
    """An error. Counts, once for each tick."""
    TIMED_OUT = "timed_out"
    """A batch was cut at the run's deadline. Counts."""
    LOST_LEASE = "lost_lease"
    """Another run took over; nothing was committed after that. Counts."""
    ABANDONED = "abandoned"
    """Found dead by the run that took over. Counts."""

    def __str__(self) -> str:
        return self.value

    @property
    def did_not_work(self) -> bool:
        return self in (Outcome.BUSY, Outcome.PAUSED, Outcome.LATE)

    @property
    def is_failure(self) -> bool:
        return self in (Outcome.FAILED, Outcome.TIMED_OUT, Outcome.LOST_LEASE, Outcome.ABANDONED)


@dataclass(frozen=True)
class RunRecord:
    """A row of `gaffer.job_runs`. `items` are rows or intervals; `backlog` is what was due and is left (counted up
    to a million); `parked` are rows that were given up; `held_by` kept something from being due, and was first seen to
    at `held_by_since`; `redo_since`, `redo_until` are the interval that was done again."""

    id: int
    job: str
    slot: int
    outcome: Outcome
    trigger: str
    tick: datetime | None
    started_at: datetime
    deadline_at: datetime | None
    ended_at: datetime | None
    fence: int | None
    owner: str
    batches: int
    items: int
    parked: int
    watermark_from: Position | None
    watermark_to: Position | None
    ticks_covered: int | None
    backlog: int | None
    next_run_at: datetime | None
    held_by: HeldBy | None
    held_by_since: datetime | None
    sqlstate: str | None
    error: str | None
    dagster_run_id: str | None
    redo_since: datetime | None
    redo_until: datetime | None

    def __post_init__(self) -> None:
        object.__setattr__(self, "outcome", Outcome(self.outcome))  # the database has it as text
        object.__setattr__(self, "held_by", held_by_from(self.held_by))
