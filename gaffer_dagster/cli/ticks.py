"""`gaffer ticks`: what became of each tick."""

from __future__ import annotations

from collections import Counter
from datetime import datetime, timedelta
from itertools import islice
from typing import Any

import click

from gaffer_dagster.cli.command import Read, Table, job_argument, opened, show_time, tell
from gaffer_dagster.domain.duration import in_words
from gaffer_dagster.domain.job import JobRecord
from gaffer_dagster.domain.ledger import Disposition, Tick, ledger
from gaffer_dagster.domain.moment import as_moment
from gaffer_dagster.errors import BadInputError
from gaffer_dagster.store import history, jobs

_PAST, _COMING, _MOST = 20, 3, 10_000
_INSTANT = timedelta(microseconds=1)
_WORDS = {
    Disposition.COVERED: "covered on time",
    Disposition.COVERED_LATE: "covered late",
    Disposition.PAUSED: "skipped: paused",
    Disposition.LATE: "skipped: late",
    Disposition.MISSED: "missed, still due",
    Disposition.FUTURE: "in future",
}


@click.command(cls=Read)
@job_argument()
@click.option("--since", metavar="TIME", help="From then on; left out: the last 20 ticks.")
@click.option("--until", metavar="TIME", help="Up to then; left out: the next 3 ticks.")
def ticks(job: str, since: str | None, until: str | None, as_json: bool) -> None:
    """Every tick of JOB, by the schedule that was in force, and what became of it.

    A time without an offset is one of the job's zone.
    """
    with opened() as connection:
        record = jobs.get(connection, job)
        begin, end = _window(record, since, until)
        if record.pruned_until is not None and begin <= record.pruned_until:
            begin = min(record.pruned_until + _INSTANT, end)
            click.echo(f"what became of ticks up to {show_time(record.pruned_until)} was pruned", err=True)
        past = history.of_job(connection, job, begin)
    entries = ledger(past, begin - _INSTANT, end, now=record.seen_at, grace=record.grace)
    if as_json:
        tell(map(_as_json, entries))
        return
    found = list(islice(entries, _MOST + 1))
    if len(found) > _MOST:
        raise BadInputError(
            f"{job} has more than {_MOST:,} ticks from {show_time(begin)} to {show_time(end)}; give a later --since, "
            "an earlier --until, or --json"
        )
    if found:
        _print(found)
    else:
        why = "; it has no schedule" if record.schedule is None else ""
        click.echo(f"{job} has no tick from {show_time(begin)} to {show_time(end)}{why}.")


def _window(record: JobRecord, since: str | None, until: str | None) -> tuple[datetime, datetime]:
    schedule, zone, now = record.schedule, record.timezone, record.seen_at
    begin = None if since is None else as_moment(since, "--since", zone)
    end = None if until is None else as_moment(until, "--until", zone)
    if begin is not None and end is not None and end < begin:
        raise BadInputError(f"--until {until!r} is before --since {since!r}; give a later time")
    if end is None:
        end = now if begin is None else max(begin, now)
        for _ in range(_COMING):
            end = end if schedule is None else schedule.next(end)
    if begin is None:
        begin = min(end, now)
        for _ in range(_PAST):
            begin = (None if schedule is None else schedule.latest(begin - _INSTANT)) or begin
    return begin, end


def _as_json(tick: Tick) -> dict[str, Any]:
    return {
        "tick": tick.at,
        "disposition": str(tick.disposition),
        "run": tick.run_id,
        "late_seconds": tick.late_by,
    }


def _print(found: list[Tick]) -> None:
    table = Table("tick", "what became of it", "run", "found after")
    for tick in found:
        table.add_row(
            show_time(tick.at),
            _WORDS[tick.disposition],
            "-" if tick.run_id is None else str(tick.run_id),
            "-" if tick.late_by is None else in_words(tick.late_by),
        )
    table.print()
    counts = Counter(tick.disposition for tick in found)
    click.echo(", ".join(f"{counts[kind]} {words}" for kind, words in _WORDS.items() if counts[kind]))
