"""What a job is: one immutable value, checked where it is defined, and hashed so that edits are seen."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from gaffer_dagster.domain.alert import Alerts
from gaffer_dagster.domain.bounds import Bounds, Limits, limits
from gaffer_dagster.domain.due import Due, EachInterval, Intervals, NewRows
from gaffer_dagster.domain.duration import show_duration
from gaffer_dagster.domain.schedule import Schedule
from gaffer_dagster.errors import BadSpecError

_NAME = re.compile(r"[a-z0-9][a-z0-9_./-]{0,127}", re.ASCII)

_KINDS: Mapping[str, tuple[type, ...]] = {
    "due": (NewRows, EachInterval),
    "schedule": (Schedule, type(None)),
    "bounds": (Bounds,),
    "alerts": (Alerts,),
}


@dataclass(frozen=True)
class JobSpec:
    """When a job wakes, what is due, and how much one run may do.

    `name` is the job's identity in the database: lower case letters, digits and `_ . / -`, at most 128. A job without
    a schedule runs only when asked to. Raises `BadSpecError` for anything that cannot be meant.
    """

    name: str
    due: Due
    schedule: Schedule | None = None
    bounds: Bounds = field(default_factory=Bounds)
    alerts: Alerts = field(default_factory=Alerts)
    exclusion: str = "fence"

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise BadSpecError(
                f"job name {self.name!r}: use a-z, 0-9 and _ . / -, beginning with a letter or digit; at most 128"
            )
        for field_name, kinds in _KINDS.items():
            value = getattr(self, field_name)
            if not isinstance(value, kinds):
                names = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
                raise BadSpecError(f"job {self.name!r}: {field_name} is a {type(value).__name__}; give {names}")
        if self.exclusion != "fence":
            raise BadSpecError(f"job {self.name!r}: exclusion={self.exclusion!r} is not offered; use exclusion='fence'")
        if self.schedule is not None:
            object.__setattr__(self, "schedule", self.schedule.resolved(self.name))
        _ = self.limits
        if isinstance(self.due, EachInterval):
            _ = self.intervals

    @property
    def slots(self) -> int:
        """How many runs may work side by side, each with a lease of its own."""
        return 1

    @cached_property
    def limits(self) -> Limits:
        interval = None if self.schedule is None else self.schedule.shortest_interval()
        return limits(self.bounds, interval, f"job {self.name!r}")

    @cached_property
    def intervals(self) -> Intervals:
        if not isinstance(self.due, EachInterval):
            raise TypeError(f"job {self.name!r} is not due by intervals")
        return Intervals.of(self.due, self.schedule, self.name)

    def as_json(self) -> Mapping[str, object]:
        """The whole spec, as it is stored and hashed."""
        schedule = self.schedule
        return {
            "schedule": None
            if schedule is None
            else {
                "cron": schedule.cron,
                "timezone": schedule.timezone,
                "missing_hour": schedule.missing_hour,
                "repeated_hour": schedule.repeated_hour,
            },
            "due": self.due.as_json(),
            "bounds": {
                "batch_rows": self.limits.batch_rows,
                "batches": self.limits.batches,
                "timeout": show_duration(self.limits.timeout),
                "batch_timeout": show_duration(self.limits.batch_timeout),
            },
            "alerts": {
                "grace": None if self.alerts.grace is None else show_duration(self.alerts.grace),
                "failures": self.alerts.failures,
            },
            "exclusion": self.exclusion,
        }

    @cached_property
    def hash(self) -> str:
        """Names this spec in the history of the job; the same in every process."""
        text = json.dumps(self.as_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def schedule_from_json(stored: Mapping[str, Any] | None) -> Schedule | None:
    """The schedule of a spec as `as_json` gives it. Raises `BadSpecError` for one that a newer version wrote."""
    if stored is None:
        return None
    try:
        return Schedule(**stored)
    except TypeError as error:
        raise BadSpecError(f"schedule {stored!r}: is not known here ({error}); upgrade gaffer_dagster") from None
