"""Where a job goes on when people say so, and what that means: for the command and for Dagster's pages alike."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime

from gaffer_dagster.domain.amount import counted, shown
from gaffer_dagster.domain.due import EachInterval, Elapsed, Intervals, NewRows, Stretches, due_from_json
from gaffer_dagster.domain.duration import show_duration
from gaffer_dagster.domain.job import JobRecord
from gaffer_dagster.domain.moment import as_moment, show_local
from gaffer_dagster.domain.progress import BACKLOG_CEILING
from gaffer_dagster.domain.watermark import CursorPosition, Position, RowPosition, TimePosition, is_readable
from gaffer_dagster.errors import BadInputError, GafferError
from gaffer_dagster.store import db, horizon, new_rows, prepare, watermarks


@dataclass(frozen=True)
class Move:
    """Where to, and what that means in words."""

    to: Position | None
    cluster: str | None
    means: str


def kind_of(record: JobRecord) -> NewRows | EachInterval | Elapsed:
    """Raises `BadInputError` for a job whose rows carry their state: it has no watermark."""
    due = due_from_json(record.spec["due"])
    if record.spec["due"]["kind"] == "external":
        at = "gone" if record.watermark_lost else shown(record.watermark)
        raise BadInputError(
            f"the watermark of job {record.name!r} is {at}: its own program reads and moves it; "
            f"to set it by SQL: select gaffer.set_watermark('{record.name}', FROM, TO, CLUSTER, 'WHO', 'WHY')"
        )
    if due is None:
        raise BadInputError(
            f"job {record.name!r} has no watermark, its rows carry their state; see: gaffer items list {record.name}"
        )
    return due


def said(position: Position | None, timezone: str) -> str:
    """A position in words, such as "at 2027-03-01T00:00:00+01:00"."""
    if position is None:
        return "at the beginning"
    if not is_readable(position):
        return f"where no job of this kind can be ({shown(position)})"
    until = TimePosition.until_of(position)
    if until is not None:
        return f"at {show_local(until, timezone)}"
    if "cursor" in position:
        return f"just after row {position['key']} of {position['cursor']} (UTC)"
    return rows_said(position)


def where(record: JobRecord) -> str:
    """A job's position in words."""
    return "nowhere (its watermark is gone)" if record.watermark_lost else said(record.watermark, record.timezone)


def plan_move(connection: db.Connection, record: JobRecord, text: str) -> Move:
    """What `text` says. Raises `BadInputError` for what cannot be a position of this job, or is none yet."""
    due = kind_of(record)
    if isinstance(due, NewRows):
        move = _move_rows(connection, record, due, text)
    else:
        move = _move_time(connection, record, due, text)
    return move if _is_known(record) else replace(move, means="what of it has been done is not known")


def _is_known(record: JobRecord) -> bool:
    return not record.watermark_lost and is_readable(record.watermark)


def _position(record: JobRecord) -> Position | None:
    return record.watermark if _is_known(record) else None


def due_after(connection: db.Connection, record: JobRecord) -> str:
    """How much is due after its watermark, in words."""
    due = kind_of(record)
    if not _is_known(record):
        cure = record.cure_of_watermark or f"gaffer watermark set {record.name} POSITION"
        return f"what has been done is not known; say where it is to go on: {cure}"
    if not isinstance(due, NewRows):
        intervals = _intervals(record, due)
        since = _since(record, intervals)
        return f"{counted(intervals.left(since, horizon.now(connection) - intervals.settle), 'interval')} due after it"
    if watermarks.is_foreign(connection, record.name):
        return "another cluster counted it; run: gaffer watermark adopt --dry-run"
    try:
        at = _reader(connection, record, due)
    except GafferError as error:
        return f"what is due after it cannot be told: {error}"
    rows = new_rows.backlog(connection, at.source, due.where, at.position, at.settled)
    return f"{'at least ' if rows == BACKLOG_CEILING else ''}{counted(rows, 'row')} due after it"


@dataclass(frozen=True)
class _Reader:
    """A table as the job reads it, up to what is settled, and its position there."""

    source: prepare.Source
    settled: str
    cluster: str | None
    position: RowPosition | CursorPosition | None


def _reader(connection: db.Connection, record: JobRecord, due: NewRows) -> _Reader:
    if due.cursor is None or due.settle is None:
        source = prepare.source(connection, due.table, due.key)
        settled, cluster = new_rows.horizon(connection, record.name, None, None)
        return _Reader(source, settled, cluster, RowPosition.read(_position(record)))
    source = prepare.cursor_source(connection, due.table, due.key, due.cursor)
    settled = new_rows.lag(source, horizon.now(connection), due.settle)
    return _Reader(source, settled, None, CursorPosition.read(_position(record)))


def _move_rows(connection: db.Connection, record: JobRecord, due: NewRows, text: str) -> Move:
    if text == "beginning" and watermarks.is_foreign(connection, record.name):
        # Its rows may have numbers of another cluster as well, and those cannot be mended as long as it counts in them.
        return Move(None, None, "all rows will be processed again")
    at = _reader(connection, record, due)
    if text == "beginning":
        to = None
    elif text == "end":
        to = watermarks.last_row(connection, at.source, at.settled)
    elif text.startswith("after:"):
        to = watermarks.after_row(connection, at.source, at.settled, text.removeprefix("after:"))
    else:
        raise BadInputError(f"position {text!r} is none of NewRows; give beginning, end or after:KEY")
    before, after = (new_rows.backlog(connection, at.source, due.where, each, at.settled) for each in (at.position, to))
    stored = None if to is None else {**to.as_json(), "of": at.source.of}
    return Move(stored, at.cluster if to is not None else None, _meaning(after - before, "row"))


def _move_time(connection: db.Connection, record: JobRecord, due: EachInterval | Elapsed, text: str) -> Move:
    at = as_moment(text, "position", record.timezone)
    now = horizon.now(connection)
    intervals = _intervals(record, due)
    if isinstance(intervals, Intervals):
        before = intervals.grid.latest(at)
        if before != at:
            raise BadInputError(
                f"position {text!r} is not the end of an interval of job {record.name!r}; give "
                f"{'' if before is None else show_local(before, record.timezone) + ' or '}"
                f"{show_local(intervals.grid.next(at), record.timezone)}"
            )
    if at > now:
        raise BadInputError(
            f"position {text!r} has not come yet (it is {show_local(now, record.timezone)}); give an earlier one"
        )
    since = _since(record, intervals)
    means = _meaning(intervals.left(at, now) - intervals.left(since, now), "interval")
    if isinstance(due, Elapsed) and due.slice is not None and (at - since) % due.slice:
        means += f"; its slices of {show_duration(due.slice)} begin at other times than before, from this one on"
    return Move(TimePosition(at).as_json(), None, means)


def _intervals(record: JobRecord, due: EachInterval | Elapsed) -> Intervals | Stretches:
    if isinstance(due, EachInterval):
        return Intervals.of(due, record.schedule, record.name)
    return Stretches.of(due, record.schedule, record.name)


def _since(record: JobRecord, intervals: Intervals | Stretches) -> datetime:
    return TimePosition.until_of(record.watermark) or intervals.first(record.first_seen_at)


def rows_said(position: Position) -> str:
    return f"just after row {position['key']} of transaction {position['xid']}"


def _meaning(more: int, thing: str) -> str:
    if more == 0:
        return "the same is due"
    number = counted(abs(more), thing)
    return f"{number} will be processed again" if more > 0 else f"{number} will be skipped for good"
