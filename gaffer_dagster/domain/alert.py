"""When a job's silence or failure is worth speaking about."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from gaffer_dagster.domain.duration import as_duration
from gaffer_dagster.domain.schedule import Schedule
from gaffer_dagster.errors import BadSpecError


@dataclass(frozen=True, init=False)
class Alerts:
    """`grace`: how late after a tick a success may come; left out, half the schedule's shortest interval, but at
    least five minutes and at most an hour. `failures`: how many ticks in a row may fail before it is said (3)."""

    grace: timedelta | None
    failures: int

    def __init__(self, grace: timedelta | str | None = None, failures: int = 3) -> None:
        if type(failures) is not int or failures < 1:
            raise BadSpecError(f"alerts: failures={failures!r} must be a whole number of at least 1")
        object.__setattr__(self, "grace", None if grace is None else as_duration(grace, "alerts: grace"))
        object.__setattr__(self, "failures", failures)

    def grace_for(self, schedule: Schedule | None) -> timedelta:
        if self.grace is not None:
            return self.grace
        half = timedelta(hours=1) if schedule is None else schedule.shortest_interval() / 2
        return max(timedelta(minutes=5), min(timedelta(hours=1), half))
