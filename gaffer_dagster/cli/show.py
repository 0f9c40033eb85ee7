"""`gaffer status`, `gaffer runs`: what the tables say, for people and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta, timezone

import click

from gaffer_dagster.cli.command import Read, Table, job_argument, limit_option, opened, printable, show_time, tell
from gaffer_dagster.domain.duration import in_words
from gaffer_dagster.domain.held import HeldBy
from gaffer_dagster.domain.incident import Watch
from gaffer_dagster.domain.job import JobRecord
from gaffer_dagster.domain.run import RunRecord
from gaffer_dagster.store import alerts, horizon, jobs
from gaffer_dagster.store import runs as store_runs
from gaffer_dagster.store.runs import VersionRun


@click.command(cls=Read)
@job_argument(required=False)
def status(job: str | None, as_json: bool) -> None:
    """Each job: how it went, what is left, when it is due next, and who holds its lease.

    It says also which watch has stopped looking; Dagster's own is among them.
    """
    with opened() as connection:
        found = jobs.status(connection) if job is None else [jobs.get(connection, job)]
        versions = [] if job is None else store_runs.of_versions(connection, job)
        watches, now = alerts.watches(connection), horizon.now(connection)
    if as_json:
        tell(found)
        return
    if found:
        print_jobs(found)
    else:
        click.echo("No job has run on this database yet.")
    for line in _versions(versions):
        click.echo(printable(line))
    if job is None:
        for line in who_watches(watches, now):
            click.echo(printable(line))


@click.command(cls=Read)
@job_argument(required=False)
@limit_option(20)
def runs(job: str | None, limit: int, as_json: bool) -> None:
    """The newest runs first, of JOB or of all jobs."""
    with opened() as connection:
        if job is not None:
            jobs.get(connection, job)
        found = store_runs.history(connection, job, limit)
    if as_json:
        tell(found)
    elif found:
        print_runs(found)
    else:
        click.echo("No run is recorded yet.")


def who_watches(watches: Sequence[Watch], now: datetime) -> list[str]:
    """What is to be said of those that look; nothing where each looks as often as it means to."""
    silent = [
        f"{each.name} has not looked since {show_time(each.last_pass_at)} ({in_words(now - each.last_pass_at)} ago), "
        f"and means to every {in_words(each.every)}: {_runner(each)} may be down; see: gaffer check"
        for each in watches
        if each.every is not None and each.silent_at is not None and each.silent_at <= now
    ]
    if not any(each.every is not None for each in watches):
        silent.append(
            "Nobody watches this database all the time: turn on Dagster's sensor gaffer_watch, or: gaffer watch"
        )
    return silent


def _runner(watch: Watch) -> str:
    """What a watch is run by, going by its name (`check:HOST`, `watch:HOST`, `dagster:LOCATION`)."""
    driver, _, host = watch.name.partition(":")
    of_command = {"check": "whatever runs gaffer check", "watch": "gaffer watch"}
    return (
        f"{of_command[driver]} on {host}" if driver in of_command else "Dagster's daemon, or its sensor gaffer_watch,"
    )


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
            _holder(record),
        )
    table.print()
    for record in records:
        if record.cure_of_watermark is not None:
            click.echo(
                f"{record.name}: its watermark is gone, and with it how far it has got, so that its runs fail; say "
                f"where it is to go on: {record.cure_of_watermark}"
            )
        if record.held_by is not None:
            click.echo(printable(_held(record, record.held_by)))


def _holder(record: JobRecord) -> str:
    if record.owner is None or record.lease_until is None:
        return "-"
    until = "lease until" if record.lease_until > record.seen_at else "lease over since"
    return f"{record.owner} ({until} {show_time(record.lease_until)})"


def _versions(found: Sequence[VersionRun]) -> Iterator[str]:
    if found:
        yield (
            "Two versions of it have taken turns within the last day; what is due is shared out between them. The "
            "newest runs of each:"
        )
    for each in found:
        of_dagster = "" if each.dagster_run_id is None else f", Dagster's run {each.dagster_run_id}"
        schedule = "no schedule" if each.cron is None else f"schedule {each.cron}"
        yield (
            f"  version {each.spec_hash} ({schedule}): run {each.run_id} at {show_time(each.started_at)}, by "
            f"{each.owner}{of_dagster}"
        )


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
    table.print()


def ago(time: datetime | None) -> str:
    """Such as "3 hours 20 minutes ago" or "in 5 minutes"."""
    if time is None:
        return "-"
    away = time - datetime.now(timezone.utc)
    return f"in {in_words(away)}" if away > timedelta() else f"{in_words(-away)} ago"
