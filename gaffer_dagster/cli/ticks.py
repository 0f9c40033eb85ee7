"""`gaffer ticks`: what became of each tick."""

from __future__ import annotations

import json
from collections import Counter
from datetime import datetime, timedelta

import click
from rich.table import Table

from gaffer_dagster import database
from gaffer_dagster.cli.show import in_words, print_table
from gaffer_dagster.domain.job import JobRecord
from gaffer_dagster.domain.ledger import Disposition, Tick, ledger
from gaffer_dagster.domain.moment import as_moment
from gaffer_dagster.store import db, history, jobs, migrate

_PAST, _COMING = 20, 3
_INSTANT = timedelta(microseconds=1)
_WORDS = {
    Disposition.COVERED: "covered on time",
    Disposition.COVERED_LATE: "covered late",
    Disposition.PAUSED: "skipped: paused",
    Disposition.LATE: "skipped: late",
    Disposition.MISSED: "missed, still due",
    Disposition.FUTURE: "in future",
}


@click.command()
@click.argument("job")
@click.option("--since", metavar="TIME", help="From then on; left out: the last 20 ticks.")
@click.option("--until", metavar="TIME", help="Up to then; left out: the next 3 ticks.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object for each tick.")
def ticks(job: str, since: str | None, until: str | None, as_json: bool) -> None:
    """Every tick of JOB, by the schedule that was in force, and what became of it.

    A time without an offset is one of the job's zone.
    """
    with db.connect(database.from_environment(), application_name="gaffer:ticks") as connection:
        migrate.verify(connection)
        record = jobs.get(connection, job)
        begin, end = _window(record, since, until)
        past = history.of_job(connection, job, runs_since=begin)
    found = list(ledger(past, begin - _INSTANT, end, now=record.seen_at, grace=record.grace))
    if as_json:
        for tick in found:
            click.echo(json.dumps(_as_json(tick)))
    elif not found:
        click.echo(f"{job} has no tick from {begin:%Y-%m-%d %H:%M:%SZ} to {end:%Y-%m-%d %H:%M:%SZ}.")
    else:
        _print(found)


def _window(record: JobRecord, since: str | None, until: str | None) -> tuple[datetime, datetime]:
    schedule, zone = record.schedule, record.timezone
    begin = end = record.seen_at
    if since is not None:
        begin = as_moment(since, "--since", zone)
    elif schedule is not None:
        for _ in range(_PAST):
            begin = schedule.latest(begin - _INSTANT) or begin
    if until is not None:
        end = as_moment(until, "--until", zone)
    elif schedule is not None:
        for _ in range(_COMING):
            end = schedule.next(end)
    return begin, end


def _as_json(tick: Tick) -> dict[str, str | int | float | None]:
    return {
        "tick": tick.at.isoformat(),
        "disposition": str(tick.disposition),
        "run": tick.run_id,
        "late_seconds": None if tick.late_by is None else tick.late_by.total_seconds(),
    }


def _print(found: list[Tick]) -> None:
    table = Table("tick", "what became of it", "run", "found after")
    for tick in found:
        table.add_row(
            f"{tick.at:%Y-%m-%d %H:%M:%SZ}",
            _WORDS[tick.disposition],
            "-" if tick.run_id is None else str(tick.run_id),
            "-" if tick.late_by is None else in_words(tick.late_by),
        )
    print_table(table)
    counts = Counter(tick.disposition for tick in found)
    click.echo(", ".join(f"{counts[kind]} {words}" for kind, words in _WORDS.items() if counts[kind]))
