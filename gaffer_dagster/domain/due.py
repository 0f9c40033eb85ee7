"""What a job can be due for. Which of it is due now is decided by the database (`gaffer_dagster.store`)."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from typing import Any, ClassVar, TypeGuard
from zoneinfo import ZoneInfo

from typing_extensions import LiteralString

from gaffer_dagster.domain.duration import as_duration, show_duration
from gaffer_dagster.domain.moment import show_local
from gaffer_dagster.domain.schedule import Schedule
from gaffer_dagster.errors import BadSpecError

SHORTEST_SLICE = timedelta(seconds=1)
MOST_SLOTS = 64


@dataclass(frozen=True, init=False)
class NewRows:
    """The rows that were added to `table` (or changed, if it was prepared so), each once, in commit order.

    `table`: its name, qualified or not, as in SQL. `key`: a column that is unique and never null. `settle`: with
    `"snapshot"` (the default) a row is due once nobody can commit a row before it any more, which takes the column that
    `gaffer prepare` adds; beside `cursor` it is a duration. `where`: an SQL condition on the row; rows that do not
    fulfil it when they are due are passed over for good. `start`: `"beginning"` is the only one so far.

    `cursor`: where the table cannot have that column, a column of type `timestamptz` or `date` that is never null, and
    `settle` a duration: rows come in the order of the cursor, then the key, and are due once their cursor is `settle`
    ago (a `date` once that day is over everywhere on earth as well). This is safe only where writers set the cursor
    to the time at which they begin (`default now()`) or later, and none of them lives longer than `settle`: a row that
    is committed behind the watermark is never seen. `transaction_timeout` (PostgreSQL 17 and later) of the roles that
    write makes the server see to that, but for prepared transactions; each run warns where it does not. A row whose
    cursor an update moves ahead comes again. Rows at `infinity` are never due, at `-infinity` neither; each run warns
    of them. A `timestamp` is refused, for what time it means depends on who wrote it.
    """

    table: str
    key: str
    cursor: str | None
    settle: timedelta | None
    where: LiteralString | None

    def __init__(
        self,
        table: str,
        key: str,
        *,
        settle: timedelta | str = "snapshot",
        cursor: str | Sequence[str] | None = None,
        where: LiteralString | None = None,
        start: str = "beginning",
    ) -> None:
        _check_names("NewRows", table=table, key=key)
        if isinstance(cursor, (list, tuple)):
            if len(cursor) != 1:
                raise BadSpecError(
                    f"NewRows on {table}: cursor={cursor!r} must be one column; rows that are equal there come in the "
                    "order of the key"
                )
            cursor = cursor[0]
        lag = None
        if cursor is None:
            if settle != "snapshot":
                raise BadSpecError(
                    f"NewRows on {table}: settle={settle!r} is not offered; use settle='snapshot' and prepare the "
                    f"table with: {prepare_command(table, key)}"
                )
        else:
            _check_names(f"NewRows on {table}", cursor=cursor)
            if settle == "snapshot":
                raise BadSpecError(
                    f"NewRows on {table}: cursor={cursor!r} needs settle= as a duration that is longer than any writer "
                    "lives, such as '10m'; or leave cursor= out, so that no row can be missed, and prepare the table "
                    f"with: {prepare_command(table, key)}"
                )
            lag = as_duration(settle, f"NewRows on {table}: settle")
        if start != "beginning":
            raise BadSpecError(f"NewRows on {table}: start={start!r} is not offered; use start='beginning'")
        if where is not None and (not is_text(where) or not where.strip()):
            raise BadSpecError(f"NewRows on {table}: where={where!r} is no SQL condition; write one, or leave it out")
        object.__setattr__(self, "table", table)
        object.__setattr__(self, "key", key)
        object.__setattr__(self, "cursor", cursor)
        object.__setattr__(self, "settle", lag)
        object.__setattr__(self, "where", where)

    def as_json(self) -> Mapping[str, object]:
        return {
            "kind": "new_rows",
            "table": self.table,
            "key": self.key,
            "settle": "snapshot" if self.settle is None else show_duration(self.settle),
            **({} if self.cursor is None else {"cursor": self.cursor}),  # the hash of those without stays
            "where": self.where,
        }


@dataclass(frozen=True, init=False)
class PendingRows:
    """The rows of `table` that say themselves that they are pending, each worked on until it is done or parked.

    `table`: its name, as in SQL. `key`: a column that is unique and never null. `pending`: an SQL condition on the row
    alone, such as `"done_at is null"`. `done`: what a row's columns are set to once it is done, such as `"done_at =
    now()"`, after which it must not be pending any more; it commits with the work. A row that the function itself took
    out of `pending` is left as it is.

    A row whose work raises is tried again, and neither fails the rows beside it nor waits in front of them. `backoff`:
    how long after its first attempt a row is tried again (doubled with each up to an hour, and spread). `attempts`: how
    often it is tried in all; then it is parked: reported, and left alone until `gaffer items retry`. A row whose
    process died with it is worked on alone from then on, so that it is parked too.

    Order: by `key`; a run that has rows to try again takes a page of them and a page of others in turn. `parallel`: how
    many runs may work side by side, each in a slot with its own lease; between them rows come in any order.
    """

    table: str
    key: str
    pending: LiteralString
    done: LiteralString
    attempts: int
    parallel: int
    backoff: timedelta

    def __init__(
        self,
        table: str,
        key: str,
        *,
        pending: LiteralString,
        done: LiteralString,
        attempts: int = 5,
        parallel: int = 1,
        backoff: timedelta | str = timedelta(minutes=1),
    ) -> None:
        _check_names("PendingRows", table=table, key=key)
        for field, value, example in (("pending", pending, "done_at is null"), ("done", done, "done_at = now()")):
            if not is_text(value) or not value.strip():
                raise BadSpecError(f"PendingRows on {table}: {field}={value!r} is no SQL; write such as {example!r}")
        for field, value, most in (("attempts", attempts, 1_000), ("parallel", parallel, MOST_SLOTS)):
            if type(value) is not int or not 1 <= value <= most:
                raise BadSpecError(
                    f"PendingRows on {table}: {field}={value!r} must be a whole number from 1 to {most:,}"
                )
        object.__setattr__(self, "table", table)
        object.__setattr__(self, "key", key)
        object.__setattr__(self, "pending", pending)
        object.__setattr__(self, "done", done)
        object.__setattr__(self, "attempts", attempts)
        object.__setattr__(self, "parallel", parallel)
        object.__setattr__(self, "backoff", as_duration(backoff, f"PendingRows on {table}: backoff"))

    def as_json(self) -> Mapping[str, object]:
        return {
            "kind": "pending_rows",
            "table": self.table,
            "key": self.key,
            "pending": self.pending,
            "done": self.done,
            "attempts": self.attempts,
            "parallel": self.parallel,
            "backoff": show_duration(self.backoff),
        }


@dataclass(frozen=True, init=False)
class EachInterval:
    """One batch for each interval between two ticks, in order: of `cron` in the schedule's zone, or of the schedule.

    `cron`: when intervals end; left out: at the schedule's ticks. `settle`: how long after its end an interval `[since,
    until)` is due (1 min), once every transaction that was open when it ended is over. `start`, `until`: the bounds of
    the first and last interval (a date means the start of the local day); left out: from the first tick after the job
    was first seen, and without end. A row that a transaction stamps with an earlier time than the one at which it first
    wrote, and after `settle`, is outside.
    """

    cron: str | None
    settle: timedelta
    start: datetime | date | None
    until: datetime | date | None

    def __init__(
        self,
        cron: str | None = None,
        *,
        settle: timedelta | str = timedelta(minutes=1),
        start: datetime | date | str | None = None,
        until: datetime | date | str | None = None,
    ) -> None:
        object.__setattr__(self, "cron", None if cron is None else Schedule(cron).cron)
        object.__setattr__(self, "settle", as_duration(settle, "EachInterval: settle"))
        object.__setattr__(self, "start", _as_bound(start, "EachInterval: start"))
        object.__setattr__(self, "until", _as_bound(until, "EachInterval: until"))

    def as_json(self) -> Mapping[str, object]:
        return {
            "kind": "each_interval",
            "cron": self.cron,
            "settle": show_duration(self.settle),
            "start": None if self.start is None else self.start.isoformat(),
            "until": None if self.until is None else self.until.isoformat(),
        }


@dataclass(frozen=True, init=False)
class Elapsed:
    """One batch for all the time since the watermark, or one for each `slice` of it, in order.

    Time is due up to the newest tick of the job's schedule, not up to the instant, so that a second wake-up finds
    nothing. `settle`: how long after its end it is handed out (1 min), once every transaction that was open then is
    over. `start`: the instant to begin at (a date means the start of the local day); left out: the minute in which the
    job was first seen. Before `start` nothing is due; once there is a watermark, that is where to go on.

    `slice`: how long each batch is (a second at least); left out: one batch of `[since, newest tick)`, however long
    that is. After a failure the next tick makes that longer, so it has no `batch.key`. With a slice, each whole
    `[since, since + slice)` that ended by the newest tick is a batch, with the same bounds and `batch.key` in every
    attempt; what is less than a slice waits for a later tick. A slice is real elapsed time, not the wall clock's: where
    that is set, slices of 24 hours leave midnight. For local days take `EachInterval("@daily")`.
    """

    slice: timedelta | None
    settle: timedelta
    start: datetime | date | None

    def __init__(
        self,
        slice: timedelta | str | None = None,  # noqa: A002 — what users call it
        *,
        settle: timedelta | str = timedelta(minutes=1),
        start: datetime | date | str | None = None,
    ) -> None:
        length = None if slice is None else as_duration(slice, "Elapsed: slice")
        if length is not None and length < SHORTEST_SLICE:
            raise BadSpecError(
                f"Elapsed: slice={slice!r} is shorter than {show_duration(SHORTEST_SLICE)}; write a longer one, or "
                "leave it out for one batch"
            )
        object.__setattr__(self, "slice", length)
        object.__setattr__(self, "settle", as_duration(settle, "Elapsed: settle"))
        object.__setattr__(self, "start", _as_bound(start, "Elapsed: start"))

    def as_json(self) -> Mapping[str, object]:
        return {
            "kind": "elapsed",
            "slice": None if self.slice is None else show_duration(self.slice),
            "settle": show_duration(self.settle),
            "start": None if self.start is None else self.start.isoformat(),
        }


Due = NewRows | PendingRows | EachInterval | Elapsed


def due_from_json(stored: Mapping[str, Any]) -> NewRows | EachInterval | Elapsed | None:
    """What `as_json` of a kind that has a watermark gave. None: it has none."""
    given = {name: value for name, value in stored.items() if name != "kind"}
    kinds = {"new_rows": NewRows, "each_interval": EachInterval, "elapsed": Elapsed}
    kind = kinds.get(stored["kind"])
    return None if kind is None else kind(**given)


@dataclass(frozen=True)
class Window:
    """A half-open stretch of time `[since, until)`, in UTC."""

    since: datetime
    until: datetime


@dataclass(frozen=True)
class Intervals:
    """The windows of one `EachInterval` job: `grid` says where they end, `start` and `until` where they stop."""

    grid: Schedule
    settle: timedelta
    start: datetime | None
    until: datetime | None
    repeat: ClassVar[bool] = True
    """Whether a window has the same bounds in every attempt."""

    @staticmethod
    def of(due: EachInterval, schedule: Schedule | None, job: str) -> Intervals:
        """Raises `BadSpecError` where there is no grid to go by, or a bound does not lie on it."""
        where = f"job {job!r}"
        if schedule is None:
            raise BadSpecError(f"{where}: EachInterval needs a schedule, whose zone its intervals are in")
        # Resolved by the job's name, as its schedule is.
        grid = (schedule if due.cron is None else Schedule(due.cron, schedule.timezone)).resolved(job)
        zone = ZoneInfo(schedule.timezone)
        start = _in_zone(due.start, zone, f"{where}: EachInterval: start")
        until = _in_zone(due.until, zone, f"{where}: EachInterval: until")
        for field, value in (("start", start), ("until", until)):
            if value is None or (tick := grid.latest(value)) == value:
                continue
            if tick is None:
                raise BadSpecError(
                    f"{where}: EachInterval: {field}={show_local(value, schedule.timezone)} is before all ticks, which "
                    f"begin with 1970 in UTC; the next is {show_local(grid.next(value), schedule.timezone)}"
                )
            raise BadSpecError(
                f"{where}: EachInterval: {field}={show_local(value, schedule.timezone)} is not the end of an "
                f"interval; the next is {show_local(grid.next(value), schedule.timezone)}"
            )
        if start is not None and until is not None and start >= until:
            raise BadSpecError(
                f"{where}: EachInterval: start={show_local(start, schedule.timezone)} is not before "
                f"until={show_local(until, schedule.timezone)}"
            )
        return Intervals(grid, due.settle, start, until)

    def first(self, first_seen_at: datetime) -> datetime:
        """Where a job without a watermark begins."""
        return self.start or self.grid.next(first_seen_at)

    def after(self, since: datetime, bound: datetime) -> Window | None:
        """The interval that begins at `since`, if it ends by `bound`."""
        until = self.grid.next(since)
        return None if until > self.end(bound) else Window(since, until)

    def left(self, since: datetime, bound: datetime) -> int:
        """How many intervals begin at `since` or later and end by `bound`."""
        return self.grid.count(since, self.end(bound)) if since < self.end(bound) else 0

    def end(self, bound: datetime) -> datetime:
        return bound if self.until is None else min(bound, self.until)


@dataclass(frozen=True)
class Stretches:
    """The windows of one `Elapsed` job: `grid` says up to where, `slice` how long each is (None: one up to there)."""

    grid: Schedule
    settle: timedelta
    start: datetime | None
    slice: timedelta | None

    @staticmethod
    def of(due: Elapsed, schedule: Schedule | None, job: str) -> Stretches:
        """Raises `BadSpecError` where there is no schedule to go by."""
        where = f"job {job!r}: Elapsed"
        if schedule is None:
            raise BadSpecError(f"{where} needs a schedule, up to whose newest tick time is due; give schedule=")
        start = _in_zone(due.start, ZoneInfo(schedule.timezone), f"{where}: start")
        return Stretches(schedule, due.settle, start, due.slice)

    @property
    def repeat(self) -> bool:
        """Whether a window has the same bounds in every attempt."""
        return self.slice is not None

    def first(self, first_seen_at: datetime) -> datetime:
        """Where a job without a watermark begins."""
        return self.start or first_seen_at.replace(second=0, microsecond=0)

    def after(self, since: datetime, bound: datetime) -> Window | None:
        """The window that begins at `since`, if it ends by the newest tick at `bound`."""
        time_left = self._time(since, bound)
        length = self.slice or time_left
        return Window(since, since + length) if timedelta() < length <= time_left else None

    def left(self, since: datetime, bound: datetime) -> int:
        """How many windows begin at `since` or later and end by the newest tick at `bound`."""
        time_left = self._time(since, bound)
        return int(bool(time_left)) if self.slice is None else time_left // self.slice

    def _time(self, since: datetime, bound: datetime) -> timedelta:
        """What elapsed from `since` to the newest tick at `bound`."""
        return max((self.grid.latest(bound) or since) - since, timedelta())


def prepare_command(table: str, key: str, *options: str) -> str:
    """`gaffer prepare`, as it can be pasted into a shell."""
    return shlex.join(["gaffer", "prepare", table, "--key", key, *options])


def is_text(value: object) -> TypeGuard[str]:
    """Whether it is text that a database can keep."""
    return isinstance(value, str) and "\0" not in value and not any("\ud800" <= char <= "\udfff" for char in value)


def _check_names(kind: str, **names: object) -> None:
    for field, value in names.items():
        if not is_text(value) or not value or value != value.strip():
            raise BadSpecError(f"{kind}: {field}={value!r} is no name; write it as in SQL, without blanks around")


def _as_bound(value: datetime | date | str | None, field: str) -> datetime | date | None:
    if isinstance(value, str):
        try:
            value = date.fromisoformat(value) if len(value) == len("2013-01-01") else datetime.fromisoformat(value)
        except ValueError:
            raise BadSpecError(f"{field}={value!r} is no date; write '2013-01-01', or a time with its offset") from None
    if value is not None and not isinstance(value, date):
        raise BadSpecError(f"{field}={value!r} is no date; write '2013-01-01', or a time with its offset")
    if isinstance(value, datetime) and value.utcoffset() is None:
        raise BadSpecError(f"{field}={value.isoformat()} has no zone; write a date, or add the offset")
    return value


def _in_zone(value: datetime | date | None, zone: ZoneInfo, field: str) -> datetime | None:
    if value is None:
        return None
    try:
        local = value if isinstance(value, datetime) else datetime.combine(value, time(), zone)
        return local.astimezone(timezone.utc)
    except OverflowError:
        raise BadSpecError(f"{field}={value.isoformat()} is outside of what can be counted; write another") from None
