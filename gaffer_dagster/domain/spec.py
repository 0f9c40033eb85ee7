"""What a job is: one immutable value, checked where it is defined, and hashed so that edits are seen."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cached_property
from types import CellType, CodeType, FunctionType
from typing import Any, cast

from gaffer_dagster.domain.alert import Alerts
from gaffer_dagster.domain.bounds import BATCH_ROWS, CLAIMED_ROWS, Bounds, Limits, limits
from gaffer_dagster.domain.due import (
    Due,
    EachInterval,
    Elapsed,
    Intervals,
    NewRows,
    PendingRows,
    Stretches,
    Window,
    is_text,
)
from gaffer_dagster.domain.duration import as_duration, show_duration
from gaffer_dagster.domain.moment import show_local
from gaffer_dagster.domain.schedule import Schedule
from gaffer_dagster.errors import BadInputError, BadSpecError

_NAME = re.compile(r"[a-z0-9][a-z0-9_./-]{0,127}", re.ASCII)

_EXCLUSIONS = ("fence", "advisory")
_KINDS: Mapping[str, tuple[type, ...]] = {
    "due": (NewRows, PendingRows, EachInterval, Elapsed),
    "schedule": (Schedule, type(None)),
    "bounds": (Bounds,),
    "alerts": (Alerts,),
}


@dataclass(frozen=True)
class JobSpec:
    """When a job wakes, what is due, and how much one run may do.

    `name` is the job's identity in the database: lower case letters, digits and `_ . / -`, at most 128. A job without a
    schedule runs only when asked to. `max_late`: a tick that a schedule's run finds older than this is skipped and
    recorded as `late`, and what was due waits for the next tick (what Kubernetes calls startingDeadlineSeconds); left
    out, a late tick is always made up for. `exclusion`: `"fence"`, which decides at COMMIT; with `"advisory"` each
    batch holds a transaction's advisory lock beside it from its begin on (`gaffer.advisory_key`), which other programs
    can take too. `protect`: tables that must be protected for this job (`gaffer protect`), or its runs refuse to work.
    Raises `BadSpecError` for anything that cannot be meant.
    """

    name: str
    due: Due
    schedule: Schedule | None = None
    bounds: Bounds = field(default_factory=Bounds)
    alerts: Alerts = field(default_factory=Alerts)
    exclusion: str = "fence"
    max_late: timedelta | str | None = None
    protect: Sequence[str] = ()

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
        if self.exclusion not in _EXCLUSIONS:
            raise BadSpecError(
                f"job {self.name!r}: exclusion={self.exclusion!r} is not offered; use "
                f"{' or '.join(map(repr, _EXCLUSIONS))}"
            )
        if self.exclusion == "advisory" and self.slots > 1:
            raise BadSpecError(
                f"job {self.name!r}: exclusion='advisory' lets one batch be at work at a time, and "
                f"parallel={self.slots} several; leave one of them out"
            )
        if self.max_late is not None:
            object.__setattr__(self, "max_late", as_duration(self.max_late, f"job {self.name!r}: max_late"))
        if not isinstance(self.protect, (list, tuple)) or not all(is_text(table) and table for table in self.protect):
            raise BadSpecError(f"job {self.name!r}: protect={self.protect!r} is no list of tables' names; give one")
        object.__setattr__(self, "protect", tuple(self.protect))
        if self.schedule is not None:
            object.__setattr__(self, "schedule", self.schedule.resolved(self.name))
        _ = self.limits
        if isinstance(self.due, (EachInterval, Elapsed)):
            _ = self.intervals

    @property
    def slots(self) -> int:
        """How many runs may work side by side, each with a lease of its own."""
        return self.due.parallel if isinstance(self.due, PendingRows) else 1

    @cached_property
    def limits(self) -> Limits:
        interval = None if self.schedule is None else self.schedule.shortest_interval()
        rows = CLAIMED_ROWS if isinstance(self.due, PendingRows) else BATCH_ROWS
        return limits(self.bounds, interval, f"job {self.name!r}", rows)

    @property
    def timezone(self) -> str:
        """The schedule's zone, in which times without an offset are meant."""
        return "UTC" if self.schedule is None else self.schedule.timezone

    @property
    def tolerance(self) -> timedelta | None:
        """`max_late` as a duration."""
        return self.max_late if isinstance(self.max_late, timedelta) else None

    @cached_property
    def intervals(self) -> Intervals | Stretches:
        if isinstance(self.due, EachInterval):
            return Intervals.of(self.due, self.schedule, self.name)
        if isinstance(self.due, Elapsed):
            return Stretches.of(self.due, self.schedule, self.name)
        raise TypeError(f"job {self.name!r} is not due by intervals")

    def interval_of(self, at: datetime) -> Window:
        """The interval that a time is in. Raises `BadInputError` where the job has none, or none there."""
        intervals = self.intervals if isinstance(self.due, EachInterval) else None
        if not isinstance(intervals, Intervals):
            raise BadInputError(f"job {self.name!r} is not due by intervals (EachInterval), so none can be done again")
        grid, start, until = intervals.grid, intervals.start, intervals.until
        since = grid.latest(at)
        if since is None or (start is not None and since < start) or (until is not None and until <= since):
            raise BadInputError(
                f"job {self.name!r} has no interval at {show_local(at, self.timezone)}: it goes "
                f"from {'its first run' if start is None else show_local(start, self.timezone)} "
                f"to {'no end' if until is None else show_local(until, self.timezone)}; give a time in between"
            )
        return Window(since, grid.next(since))

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
            "max_late": None if self.tolerance is None else show_duration(self.tolerance),
            "due": self.due.as_json(),
            "bounds": {
                "batch_rows": self.limits.batch_rows,
                "batches": self.limits.batches,
                "timeout": show_duration(self.limits.timeout),
                "batch_timeout": show_duration(self.limits.batch_timeout),
            },
            "alerts": self.alerts.as_json(),
            "exclusion": self.exclusion,
            **({"protect": sorted(self.protect)} if self.protect else {}),  # the hash of those without stays
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


_DEEPEST = 50


def work_hash(due: Due, work: Callable[..., Any] | str) -> str | None:
    """Names what a job does (a function, or its SQL), whatever the job and its function are called: a renamed job is
    known by it. None where it cannot be told, as for an object that can be called."""
    if not isinstance(work, (FunctionType, str)):
        return None
    said = [work] if isinstance(work, str) else _function(work)
    text = "\n".join([json.dumps(due.as_json(), sort_keys=True), *said])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _function(work: FunctionType, within: tuple[FunctionType, ...] = ()) -> Iterator[str]:
    """All that its code says, and what it was made with: a decorator's function is told by the one that it wraps.
    `within`: those that led here, since a function may have itself at hand."""
    yield from _code(work.__code__, work.__doc__)
    given = [*(work.__defaults__ or ()), *sorted((work.__kwdefaults__ or {}).items())]
    bound = [_content(cell) for cell in work.__closure__ or ()]
    for name in work.__code__.co_names:
        value = work.__globals__.get(name)
        if isinstance(value, (str, int, float)):
            yield repr(value)
    for value in (*given, *bound):
        if not isinstance(value, FunctionType):
            yield _plain(value)
        elif value is not work and value not in within:
            yield from _function(value, (*within, work))


def _code(code: CodeType, doc: str | None = None) -> Iterator[str]:
    yield code.co_code.hex()
    yield repr((code.co_names, code.co_varnames, code.co_freevars))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _code(constant)
        elif constant != doc and not (isinstance(constant, str) and "<locals>" in constant):  # Python 3.10: a name
            # The order within a set differs from process to process.
            is_set = isinstance(constant, frozenset)
            yield repr(sorted(map(repr, cast("frozenset[object]", constant))) if is_set else constant)


_GONE_THROUGH = [getattr(kind, "__iter__", None) for kind in cast("tuple[type, ...]", (list, tuple))]


def _plain(value: object, above: tuple[object, ...] = ()) -> str:
    """What a value says in every process; nothing of objects, whose text may hold an address. `above`: what it is in,
    which it may hold itself, on however many floors."""
    gone_through = getattr(type(value), "__iter__", None) in _GONE_THROUGH  # which a record of Dagster's may not be
    if value is None or isinstance(value, (str, int, float)):
        return repr(value)
    if len(above) < _DEEPEST and not any(each is value for each in above):
        above = (*above, value)
        if gone_through:
            return f"[{','.join(_plain(each, above) for each in cast('list[object]', value))}]"
        if isinstance(value, dict):
            pairs = cast("dict[object, object]", value).items()
            return f"{{{','.join(sorted(f'{_plain(key, above)}:{_plain(each, above)}' for key, each in pairs))}}}"
    return type(value).__name__


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet
        return None
