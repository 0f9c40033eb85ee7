"""`gaffer alerts`: the incidents, who knows of them, and whether notices arrive."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from datetime import datetime, timedelta

import click

from gaffer_dagster.cli.command import (
    Change,
    Read,
    Table,
    job_argument,
    limit_option,
    opened,
    printable,
    show_time,
    tell,
)
from gaffer_dagster.cli.process import log_to_stderr
from gaffer_dagster.domain.duration import in_words
from gaffer_dagster.domain.incident import Alert
from gaffer_dagster.domain.moment import end_of
from gaffer_dagster.domain.notice import explained, test_message
from gaffer_dagster.engine.log import wrap
from gaffer_dagster.engine.receivers import receivers_from
from gaffer_dagster.errors import BadInputError, GafferError
from gaffer_dagster.store import alerts as store
from gaffer_dagster.store import db, deliveries, jobs, operations
from gaffer_dagster.store.operations import Operator

_LONGEST_MUTE = timedelta(days=31)


@click.group()
def alerts() -> None:
    """The incidents of jobs: what is open, who knows of it, who is told."""


@alerts.command("list", cls=Read)
@click.option("--all", "everything", is_flag=True, help="Also those that are over, the newest first.")
@limit_option(50)
def list_alerts(everything: bool, limit: int, as_json: bool) -> None:
    """The open incidents, the oldest first, and the receivers that notices do not get through to."""
    with opened() as connection:
        found = store.newest(connection, limit) if everything else store.opened(connection)[:limit]
        receivers = deliveries.receivers(connection)
        mutes = store.mutes(connection)
    if as_json:
        tell(found)
        return
    if found:
        table = Table("number", "of", "what", "severity", "since", "opened", "state", "in words")
        for alert in found:
            table.add_row(
                str(alert.id),
                alert.job or f"watch {alert.watch}",
                str(alert.kind),
                str(alert.severity),
                show_time(alert.since_at),
                show_time(alert.opened_at),
                _state(alert, mutes),
                explained(alert.kind, alert.details),
            )
        table.print()
    else:
        click.echo("No incident is recorded yet." if everything else "No incident is open.")
    for receiver in receivers:
        if receiver.failing_since is not None:
            click.echo(
                f"receiver {receiver.name}: {receiver.waiting:,} wait; it has been failing since "
                f"{show_time(receiver.failing_since)}: {printable(receiver.error or '')}"
            )


def _state(alert: Alert, mutes: Mapping[str, datetime]) -> str:
    if alert.resolved_at is not None:
        return f"resolved {show_time(alert.resolved_at)}"
    if alert.job is not None and alert.job in mutes:
        return f"open, muted until {show_time(mutes[alert.job])}"
    if alert.acked_at is not None:
        return f"known to {alert.acked_by}" + (f": {alert.ack_reason}" if alert.ack_reason else "")
    return "open"


@alerts.command(cls=Change)
@click.argument("number", type=click.IntRange(1, 2**63 - 1))
def ack(number: int, operator: Operator) -> None:
    """Say that somebody knows of incident NUMBER: it is not reminded of any more."""
    with opened() as connection:
        if not operations.ack(connection, number, operator):
            raise BadInputError(f"no incident {number} is open; see: gaffer alerts list")
    click.echo(f"incident {number} is known to {operator.by}; no more reminders")


@alerts.command(cls=Change)
@job_argument()
@click.option("--until", required=True, metavar="TIME", help="When it ends: a time, or how long, such as 2h.")
def mute(job: str, until: str, operator: Operator) -> None:
    """Send nothing of JOB for a while. Incidents are kept, and what is open at the end is told then."""
    with opened() as connection:
        record = jobs.get(connection, job)
        end = end_of(until, "--until", record.seen_at, record.timezone)
        if end - record.seen_at > _LONGEST_MUTE:
            raise BadInputError(
                f"--until {until!r} is longer than {in_words(_LONGEST_MUTE)}, and would be forgotten; give an "
                "earlier time, or take the job out of the code and retire it"
            )
        operations.mute(connection, job, end, operator)
    click.echo(f"{job} is muted until {show_time(end)}")


@alerts.command(cls=Change)
@job_argument()
def unmute(job: str, operator: Operator) -> None:
    """Speak of JOB again."""
    with opened() as connection:
        jobs.get(connection, job)
        operations.mute(connection, job, None, operator)
    click.echo(f"{job} is not muted")


@alerts.command("test", cls=Change)
@click.argument("receiver", required=False)
def send_test(receiver: str | None, operator: Operator) -> None:
    """Send a test message to RECEIVER, or to each that this environment names. Exits 1 if one did not take it."""
    log_to_stderr(as_json=False, level=logging.INFO)
    found = receivers_from(os.environ, wrap(logging.getLogger("gaffer")))
    chosen = [each for each in found if receiver in (None, each.name)]
    if not chosen:
        raise BadInputError(
            f"no receiver {receiver!r} is named in this environment (there is "
            f"{', '.join(each.name for each in found)}); set GAFFER_RECEIVER_{(receiver or '').upper()} to its URL"
        )
    failed: list[str] = []
    for each in chosen:
        try:
            each.send(test_message())
            click.echo(f"{each.name}: sent")
        except Exception as error:
            failed.append(each.name)
            click.echo(f"{each.name}: {printable(db.primary_message(error))}", err=True)
    try:
        with opened() as connection:
            told = {"receivers": [each.name for each in chosen], "failed": failed}
            operations.note(connection, None, "test receivers", operator, told)
    except GafferError as error:  # receivers are tested also where the database is what is broken
        click.echo(f"not kept for gaffer audit: {printable(str(error))}", err=True)
    sys.exit(1 if failed else 0)
