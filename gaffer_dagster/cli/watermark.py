"""`gaffer watermark`: how far a job has got, and where it is to go on."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

import click

from gaffer_dagster.cli.command import (
    Read,
    Risky,
    complete_jobs,
    confirm,
    counted,
    job_argument,
    opened,
    printable,
    tell,
)
from gaffer_dagster.domain.due import EachInterval, Elapsed, Intervals, NewRows, Stretches, due_from_json
from gaffer_dagster.domain.job import JobRecord
from gaffer_dagster.domain.moment import as_moment, show_local
from gaffer_dagster.domain.watermark import CursorPosition, Position, RowPosition, TimePosition
from gaffer_dagster.errors import BadInputError, GafferError
from gaffer_dagster.store import adopt, db, horizon, jobs, new_rows, prepare, watermarks
from gaffer_dagster.store.operations import Operator


@click.group()
def watermark() -> None:
    """How far a job has got."""


@watermark.command(cls=Read)
@job_argument()
def show(job: str, as_json: bool) -> None:
    """Where JOB will go on, and what is due after that."""
    with opened() as connection:
        record = jobs.get(connection, job)
        due = _kind(record)
        if as_json:
            tell([{"job": job, "position": record.watermark}])
            return
        click.echo(printable(f"{job} is {_said(record, record.watermark)}; {_due_after(connection, record, due)}"))


@watermark.command("set", cls=Risky)
@job_argument()
@click.argument("position")
@click.option("--dry-run", is_flag=True, help="Only say what would be done again, or skipped.")
def set_watermark(job: str, position: str, dry_run: bool, operator: Operator) -> None:
    """Let JOB go on at POSITION.

    Of a job that is due by time it is a time. Of NewRows it is `beginning`, `end` (all that is there is skipped), or
    `after:KEY` (the rows up to the one with that key are done). It is refused while a run is at work.
    """
    with opened() as connection:
        record = jobs.get(connection, job)
        move = _move(connection, record, position)
        since, to = _said(record, record.watermark), _said(record, move.to)
        click.echo(printable(f"{job} is {since}, and will be {to}: {move.means}"))
        if dry_run:
            return
        confirm("Set it?")
        watermarks.set_position(connection, job, record.watermark, move.to, move.cluster, operator)
    click.echo(f"{job} goes on there")


@watermark.command("adopt", cls=Risky)
@click.argument("names", metavar="[JOB]...", nargs=-1, shell_complete=complete_jobs)
@click.option("--dry-run", is_flag=True, help="Only say what would become of each job.")
def adopt_database(names: tuple[str, ...], dry_run: bool, operator: Operator) -> None:
    """Go on with a database that was restored, or copied: all its jobs, or these.

    Run it after the restore, before anybody writes. What was done when the backup was made stays done, and what was
    due is due, in the order of the key. Fences go ahead of any that were given since the backup. Watermarks that
    another cluster counted are moved to numbers of this one, and so are the rows of their tables, which are rewritten.
    It is refused while a run is at work, and where it cannot be known which rows are done.
    """
    with opened() as connection:
        plan = adopt.plan(connection, names)
        for each in plan.jobs:
            click.echo(f"{each.job}: {_adopted(each)}")
        for table, rows in plan.rewritten:
            click.echo(
                f"{table}: {counted(rows, 'row')} {'is' if rows == 1 else 'are'} rewritten, and nobody can write to it "
                "meanwhile"
            )
        if dry_run:
            return
        confirm("Adopt this database?")
        adopt.adopt(connection, names, operator)
    click.echo(f"adopted: {counted(len(plan.jobs), 'job')}")


def _adopted(job: adopt.Adoption) -> str:
    fences = "fence " + ", ".join(f"{fence:,} to {fence + adopt.FENCE_GAP:,}" for fence in job.fences)
    if job.move is None:
        return f"{fences}; the watermark stays as it is"
    return f"{fences}; from {_rows_said(job.move.since)} to {_rows_said(job.move.to)}; rows due: {job.move.due:,}"


def _rows_said(position: Position) -> str:
    return f"just after row {position['key']} of transaction {position['xid']}"


@dataclass(frozen=True)
class _Move:
    """Where to, and what that means in words."""

    to: Position | None
    cluster: str | None
    means: str


def _kind(record: JobRecord) -> NewRows | EachInterval | Elapsed:
    due = due_from_json(record.spec["due"])
    if due is None:
        raise BadInputError(
            f"job {record.name!r} has no watermark, its rows carry their state; see: gaffer items list {record.name}"
        )
    return due


def _said(record: JobRecord, position: Position | None) -> str:
    return said(position, record.timezone)


def said(position: Position | None, timezone: str) -> str:
    """In words, such as "at …" or "just after row …"."""
    if position is None:
        return "at the beginning"
    until = TimePosition.until_of(position)
    if until is not None:
        return f"at {show_local(until, timezone)}"
    if "cursor" in position:
        return f"just after row {position['key']} of {position['cursor']} (UTC)"
    return _rows_said(position)


def _move(connection: db.Connection, record: JobRecord, text: str) -> _Move:
    due = _kind(record)
    if isinstance(due, NewRows):
        return _move_rows(connection, record, due, text)
    return _move_time(connection, record, due, text)


def _due_after(connection: db.Connection, record: JobRecord, due: NewRows | EachInterval | Elapsed) -> str:
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
    return f"{'at least ' if rows == new_rows.BACKLOG_CEILING else ''}{counted(rows, 'row')} due after it"


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
        return _Reader(source, settled, cluster, RowPosition.read(record.watermark))
    source = prepare.cursor_source(connection, due.table, due.key, due.cursor)
    settled = new_rows.lag(source, horizon.now(connection), due.settle)
    return _Reader(source, settled, None, CursorPosition.read(record.watermark))


def _move_rows(connection: db.Connection, record: JobRecord, due: NewRows, text: str) -> _Move:
    if text == "beginning" and watermarks.is_foreign(connection, record.name):
        # Its rows may have numbers of another cluster as well, and those cannot be mended as long as it counts in them.
        return _Move(None, None, "all rows will be processed again")
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
    return _Move(stored, at.cluster if to is not None else None, _meaning(after - before, "row"))


def _move_time(connection: db.Connection, record: JobRecord, due: EachInterval | Elapsed, text: str) -> _Move:
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
    return _Move(
        TimePosition(at).as_json(), None, _meaning(intervals.left(at, now) - intervals.left(since, now), "interval")
    )


def _intervals(record: JobRecord, due: EachInterval | Elapsed) -> Intervals | Stretches:
    if isinstance(due, EachInterval):
        return Intervals.of(due, record.schedule, record.name)
    return Stretches.of(due, record.schedule, record.name)


def _since(record: JobRecord, intervals: Intervals | Stretches) -> datetime:
    return TimePosition.until_of(record.watermark) or intervals.first(record.first_seen_at)


def _meaning(more: int, thing: str) -> str:
    if more == 0:
        return "the same is due"
    count = counted(abs(more), thing)
    return f"{count} will be processed again" if more > 0 else f"{count} will be skipped for good"
