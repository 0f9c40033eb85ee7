"""A job as the database knows it, whether or not its code is at hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any

from gaffer_dagster.domain.alert import Alerts
from gaffer_dagster.domain.duration import as_duration
from gaffer_dagster.domain.held import HeldBy, held_by_from
from gaffer_dagster.domain.ledger import Pause, open_tick, tick_from
from gaffer_dagster.domain.run import Outcome
from gaffer_dagster.domain.schedule import Schedule
from gaffer_dagster.domain.spec import schedule_from_json
from gaffer_dagster.domain.watermark import Position


@dataclass(frozen=True)
class JobRecord:
    """A row of `gaffer.job` with the live lease beside it, as it was at `seen_at` of the database's clock.

    `held_since`: since when something waits for what is open elsewhere; `held_by_since`: since when that is `held_by`.
    `pruned_until`: what became of ticks up to here is not known any more. `watermark_lost`: there is no row of it,
    which is another thing than a job that is at the beginning.
    """

    name: str
    spec: Mapping[str, Any]
    spec_hash: str
    seen_at: datetime
    first_seen_at: datetime
    paused_at: datetime | None
    paused_until: datetime | None
    paused_by: str | None
    pause_reason: str | None
    muted_until: datetime | None
    retired_at: datetime | None
    covered_until: datetime | None
    last_success_at: datetime | None
    last_success_tick: datetime | None
    consecutive_failures: int
    next_due_at: datetime | None
    follow_up_at: datetime | None
    fence: int
    owner: str | None
    lease_until: datetime | None
    last_outcome: Outcome | None
    last_started_at: datetime | None
    backlog: int | None
    held_since: datetime | None
    held_by: HeldBy | None
    held_by_since: datetime | None
    watermark: Position | None
    watermark_lost: bool
    pruned_until: datetime | None

    @cached_property
    def schedule(self) -> Schedule | None:
        return schedule_from_json(self.spec["schedule"])

    @property
    def timezone(self) -> str:
        """The schedule's zone, in which times without an offset are meant."""
        return "UTC" if self.schedule is None else self.schedule.timezone

    @property
    def timeout(self) -> timedelta:
        return as_duration(self.spec["bounds"]["timeout"], f"job {self.name!r}: timeout")

    @property
    def grace(self) -> timedelta:
        """How late a success may come after its tick."""
        return Alerts.from_json(self.spec["alerts"]).grace_for(self.schedule)

    @property
    def pause(self) -> Pause | None:
        """The pause that the job is in, or was in when it ran out."""
        return None if self.paused_at is None else Pause(self.paused_at, self.paused_until)

    @property
    def open_tick(self) -> datetime | None:
        """The earliest tick that is neither covered nor skipped."""
        # A schedule takes long to read.
        return self.next_due_at if self.pause is None else open_tick(self.next_due_at, self.schedule, self.pause)

    @property
    def tick_after_pause(self) -> datetime | None:
        """The first tick that the pause would not skip if it ended now (or did not skip, where it has run out)."""
        if self.schedule is None or self.paused_at is None:
            return None
        over_at = self.seen_at if self.paused_until is None else min(self.seen_at, self.paused_until)
        return tick_from(over_at, self.schedule)

    @property
    def cure_of_watermark(self) -> str | None:
        """By which a watermark that is gone is set again. None: it is there, or the job works without."""
        if not self.watermark_lost or self.spec["due"]["kind"] == "pending_rows":
            return None
        if self.spec["due"]["kind"] == "external":
            return f"by SQL: select gaffer.set_watermark('{self.name}', null, POSITION, CLUSTER, 'WHO', 'WHY');"
        return f"gaffer watermark set {self.name} POSITION"

    @property
    def after_release(self) -> str:
        """Whether another run comes once the lease was taken away: the end of a sentence that says so."""
        if self.spec["due"]["kind"] == "external":
            return "; whoever runs it has to start it again"
        if self.follow_up_at is None:
            return ""
        is_paused = self.pause is not None and self.pause.holds(self.seen_at)
        return ", and another one comes once its pause is over" if is_paused else ", and another one is asked for"

    def __post_init__(self) -> None:
        if self.last_outcome is not None:
            object.__setattr__(self, "last_outcome", Outcome(self.last_outcome))
        object.__setattr__(self, "held_by", held_by_from(self.held_by))
