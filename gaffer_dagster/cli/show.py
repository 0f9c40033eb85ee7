"""`gaffer status`, `gaffer runs`: what the tables say, for people and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timedelta, timezone
from typing import Any

import click
from rich.console import Console, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from gaffer_dagster import database
from gaffer_dagster.domain.duration import in_words
from gaffer_dagster.domain.held import HeldBy
from gaffer_dagster.domain.job import JobRecord
from gaffer_dagster.domain.run import RunRecord
from gaffer_dagster.store import db, jobs, migrate
from gaffer_dagster.store import runs as store_runs


@click.command()
@click.argument("job", required=False)
@click.option("--json", "as_json", is_flag=True, help="One JSON object for each job.")
def status(job: str | None, as_json: bool) -> None:
    """Each job: how it went, what is left, when it is due next, and who holds its lease."""
    with db.connect(database.from_environment(), application_name="gaffer:status") as connection:
        migrate.verify(connection)
        found = jobs.status(connection) if job is None else [jobs.get(connection, job)]
    if as_json:
        print_json(found)
    elif not found:
        click.echo("No job has run on this database yet.")
    else:
        print_jobs(found)


@click.command()
@click.argument("job", required=False)
@click.option("--limit", default=20, show_default=True, type=click.IntRange(1, 10_000), help="How many at most.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object for each run.")
def runs(job: str | None, limit: int, as_json: bool) -> None:
    """The newest runs first, of JOB or of all jobs."""
    with db.connect(database.from_environment(), application_name="gaffer:runs") as connection:
        migrate.verify(connection)
        if job is not None:
            jobs.get(connection, job)
        found = store_runs.history(connection, job, limit)
    if as_json:
        print_json(found)
    elif not found:
        click.echo("No run is recorded yet.")
    else:
        print_runs(found)


def print_json(records: Sequence[RunRecord | JobRecord]) -> None:
    for record in records:
        click.echo(json.dumps(asdict(record), default=plain))


def print_jobs(records: Sequence[JobRecord]) -> None:
    table = Table("job", "last outcome", "last success", "failures", "backlog", "next due", "held by")
    for record in records:
        table.add_row(
            record.name,
            "-" if record.last_outcome is None else str(record.last_outcome),
            ago(record.last_success_at),
            str(record.consecutive_failures),
            "-" if record.backlog is None else f"{record.backlog:,}",
            _next_due(record),
            record.owner or "-",
        )
    print_table(table)
    for record in records:
        if record.held_by is not None:
            click.echo(printable(_held(record, record.held_by)))


def _held(record: JobRecord, held_by: HeldBy) -> str:
    cure = "end that transaction" if held_by.cure is None else held_by.cure
    return (
        f"{record.name}: since {show_time(record.held_since)} something waits for {held_by.who}; seen to stand since "
        f"{show_time(record.held_by_since)} ({ago(record.held_by_since)}), as of the last run. Nothing is lost, and it "
        f"waits until that is over. To end it: {cure}"
    )


def _next_due(record: JobRecord) -> str:
    if record.retired_at is not None:
        return f"retired {show_time(record.retired_at)}"
    if record.muted_until is not None and record.muted_until > record.seen_at:
        return f"{_unmuted(record)}; muted until {show_time(record.muted_until)}"
    return _unmuted(record)


def _unmuted(record: JobRecord) -> str:
    if record.pause is not None and record.pause.holds(record.seen_at):
        until = "" if record.paused_until is None else f" until {show_time(record.paused_until)}"
        return f"paused{until} by {record.paused_by}" + (f": {record.pause_reason}" if record.pause_reason else "")
    return "-" if record.open_tick is None else f"{show_time(record.open_tick)} ({ago(record.open_tick)})"


def print_runs(records: Sequence[RunRecord]) -> None:
    names = ("run", "job", "woken by", "started", "took", "outcome", "items", "batches", "backlog", "fence", "error")
    table = Table(*names)
    for record in records:
        took = "-" if record.ended_at is None else in_words(record.ended_at - record.started_at)
        table.add_row(
            str(record.id),
            record.job,
            record.trigger if record.redo_since is None else f"redo of {show_time(record.redo_since)}",
            show_time(record.started_at),
            took,
            str(record.outcome),
            f"{record.items:,}",
            f"{record.batches:,}",
            "-" if record.backlog is None else f"{record.backlog:,}",
            "-" if record.fence is None else str(record.fence),
            f"{record.error} ({record.sqlstate})" if record.error and record.sqlstate else record.error or "",
        )
    print_table(table)


def show_time(time: datetime | None) -> str:
    return "-" if time is None else f"{time:%Y-%m-%d %H:%M:%SZ}"


def ago(time: datetime | None) -> str:
    """Such as "3 hours 20 minutes ago" or "in 5 minutes"."""
    if time is None:
        return "-"
    away = time - datetime.now(timezone.utc)
    return f"in {in_words(away)}" if away > timedelta() else f"{in_words(-away)} ago"


class Table(RichTable):
    """Cells are what somebody wrote (keys, errors, reasons), and never markup."""

    def add_row(self, *renderables: RenderableType | None, **kept: Any) -> None:
        super().add_row(*(Text(printable(each)) if isinstance(each, str) else each for each in renderables), **kept)


def printable(text: str) -> str:
    """`text` on one line, in which no character can do anything to a terminal."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def print_table(table: Table) -> None:
    terminal = Console()
    # Where nobody looks at it as it comes, a row is a line, whatever the width of the window.
    (terminal if terminal.is_terminal else Console(width=250)).print(table)


def plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    return str(value)
