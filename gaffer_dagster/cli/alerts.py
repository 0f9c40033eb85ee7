"""`gaffer alerts`: the incidents, who knows of them, and whether notices arrive."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Any

import click

from gaffer_dagster import database
from gaffer_dagster.cli.operate import operator_of, whose
from gaffer_dagster.cli.process import log_to_stderr
from gaffer_dagster.cli.show import Table, print_table, printable, show_time
from gaffer_dagster.domain.duration import in_words
from gaffer_dagster.domain.incident import Alert
from gaffer_dagster.domain.moment import end_of
from gaffer_dagster.domain.notice import explained, test_message
from gaffer_dagster.engine.log import wrap
from gaffer_dagster.engine.receivers import receivers_from
from gaffer_dagster.errors import BadInputError
from gaffer_dagster.store import alerts as store
from gaffer_dagster.store import db, deliveries, jobs, migrate, operations

_LONGEST_MUTE = timedelta(days=31)


@click.group()
def alerts() -> None:
    """The incidents of jobs: what is open, who knows of it, who is told."""


@alerts.command("list")
@click.option("--all", "everything", is_flag=True, help="Also those that are over, the newest first.")
@click.option("--limit", default=50, show_default=True, type=click.IntRange(1, 10_000), help="How many with --all.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object for each.")
def list_alerts(everything: bool, limit: int, as_json: bool) -> None:
    """The open incidents, the oldest first, and the receivers that notices do not get through to."""
    with db.connect(database.from_environment(), application_name="gaffer:alerts") as connection:
        migrate.verify(connection)
        found = store.newest(connection, limit) if everything else store.opened(connection)
        receivers = deliveries.receivers(connection)
        mutes = store.mutes(connection)
    if as_json:
        for alert in found:
            click.echo(json.dumps(asdict(alert), default=_plain))
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
        print_table(table)
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


def _plain(value: Any) -> str:
    return value.isoformat() if isinstance(value, datetime) else str(value)


@alerts.command()
@click.argument("number", type=click.IntRange(1, 2**63 - 1))
@whose
def ack(number: int, by: str | None, reason: str | None) -> None:
    """Say that somebody knows of incident NUMBER: it is not reminded of any more."""
    operator = operator_of(by, reason)
    with db.connect(database.from_environment(), application_name="gaffer:alerts") as connection:
        migrate.verify(connection)
        if not operations.ack(connection, number, operator):
            raise BadInputError(f"no incident {number} is open; see: gaffer alerts list")
    click.echo(f"incident {number} is known to {operator.by}; no more reminders")


@alerts.command()
@click.argument("job")
@click.option("--until", required=True, metavar="TIME", help="When it ends: a time, or how long, such as 2h.")
@whose
def mute(job: str, until: str, by: str | None, reason: str | None) -> None:
    """Send nothing of JOB for a while. Incidents are kept, and what is open at the end is told then."""
    operator = operator_of(by, reason)
    with db.connect(database.from_environment(), application_name="gaffer:alerts") as connection:
        migrate.verify(connection)
        record = jobs.get(connection, job)
        end = end_of(until, "--until", record.seen_at, record.timezone)
        if end - record.seen_at > _LONGEST_MUTE:
            raise BadInputError(
                f"--until {until!r} is longer than {in_words(_LONGEST_MUTE)}, and would be forgotten; give an "
                "earlier time, or take the job out of the code and retire it"
            )
        operations.mute(connection, job, end, operator)
    click.echo(f"{job} is muted until {show_time(end)}")


@alerts.command()
@click.argument("job")
@whose
def unmute(job: str, by: str | None, reason: str | None) -> None:
    """Speak of JOB again."""
    operator = operator_of(by, reason)
    with db.connect(database.from_environment(), application_name="gaffer:alerts") as connection:
        migrate.verify(connection)
        jobs.get(connection, job)
        operations.mute(connection, job, None, operator)
    click.echo(f"{job} is not muted")


@alerts.command("test")
@click.argument("receiver", required=False)
def send_test(receiver: str | None) -> None:
    """Send a test message to RECEIVER, or to each that this environment names. Exits 1 if one did not take it."""
    log_to_stderr(as_json=False, level=logging.INFO)
    found = receivers_from(os.environ, wrap(logging.getLogger("gaffer")))
    chosen = [each for each in found if receiver in (None, each.name)]
    if not chosen:
        raise BadInputError(
            f"no receiver {receiver!r} is named in this environment (there is "
            f"{', '.join(each.name for each in found)}); set GAFFER_RECEIVER_{(receiver or '').upper()} to its URL"
        )
    failed = False
    for each in chosen:
        try:
            each.send(test_message())
            click.echo(f"{each.name}: sent")
        except Exception as error:
            failed = True
            click.echo(f"{each.name}: {db.primary_message(error)}", err=True)
    sys.exit(1 if failed else 0)
