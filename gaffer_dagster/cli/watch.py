"""`gaffer check`, `gaffer watch`: the pass that Dagster's sensor makes, from where Dagster's end is no end of it."""

from __future__ import annotations

import logging
import os
import re
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, NoReturn

import click

from gaffer_dagster import database
from gaffer_dagster.cli.command import Read, Table, opened, printable, show_time, tell
from gaffer_dagster.cli.process import log_to_stderr, signals
from gaffer_dagster.cli.show import who_watches
from gaffer_dagster.domain.alert import Severity
from gaffer_dagster.domain.amount import counted
from gaffer_dagster.domain.duration import as_duration, in_words
from gaffer_dagster.domain.incident import Finding, Watch
from gaffer_dagster.domain.notice import explained
from gaffer_dagster.engine.log import wrap
from gaffer_dagster.engine.watch import Report, Watcher, attend, examine
from gaffer_dagster.errors import BadInputError, GafferError, UnknownJobError
from gaffer_dagster.store import alerts, db, migrate

WRONG, CANNOT_TELL = 1, 2


@click.command(cls=Read)
@click.option("--notify", is_flag=True, help="Make it a pass of the watch: open and resolve incidents, send notices.")
@click.option("--every", metavar="DURATION", help="How often it is run, such as 5m; others then say when it is not.")
@click.option("--name", metavar="NAME", help="What this watch is called, instead of by its host.")
def check(notify: bool, every: str | None, name: str | None, as_json: bool) -> None:
    """Say what is overdue or failing, and when each watch looked last.

    For plain cron, systemd or a probe, so that a dead Dagster is noticed. Exits 0 when all is well (or there are
    only warnings), 1 when something is wrong, 2 when it cannot tell: the database is away or not as it should be, or no
    job is known to it.
    """
    if not notify and (every is not None or name is not None):
        raise click.UsageError("--every and --name are of a watch; add --notify")
    try:
        watcher = Watcher(_name("check", name), None if every is None else _often(every, timedelta(days=31)))
    except GafferError as error:
        raise click.UsageError(str(error)) from None
    log_to_stderr(as_json=as_json, level=logging.WARNING)
    with signals():
        try:
            with opened() as connection:
                jobs = alerts.count_jobs(connection)
                if not jobs:
                    raise UnknownJobError(
                        "no job that is meant to run is known to this database: it may be the wrong one "
                        "(GAFFER_DATABASE_URL); a job is made known by its first run, by Dagster's sensor, or by: "
                        "gaffer register"
                    )
                done = attend(connection, watcher, os.environ, wrap(logging.getLogger("gaffer"))) if notify else None
                report = done.report if done is not None and done.report is not None else examine(connection)
        except Exception as error:
            _cannot_tell(error, as_json=as_json)
    problems = report.problems if done is None else done.problems
    (_print_json if as_json else _print)(report, jobs, problems, None if done is None else done.sent)
    sys.exit(WRONG if problems or any(each.severity is Severity.ERROR for each in report.findings) else 0)


def _cannot_tell(error: Exception, *, as_json: bool) -> NoReturn:
    said = str(error) if isinstance(error, GafferError) else db.primary_message(error)
    if as_json:
        tell([{"error": said}])
    if not isinstance(error, GafferError) and not db.is_database_error(error):
        traceback.print_exception(error)  # a fault of ours, and still one that leaves a probe without an answer
    click.echo(f"gaffer: cannot tell: {printable(said)}", err=True)
    sys.exit(CANNOT_TELL)


def _often(every: str, most: timedelta) -> timedelta:
    often = as_duration(every, "--every")
    if not timedelta(seconds=1) <= often <= most:
        raise BadInputError(f"--every {every!r} is too short or too long; give a duration from 1s to {in_words(most)}")
    return often


@click.command()
@click.option("--every", default="30s", show_default=True, metavar="DURATION", help="How often to look.")
@click.option("--name", metavar="NAME", help="What this watch is called, instead of by its host.")
@click.option("--json", "as_json", is_flag=True, help="Log as JSON.")
def watch(every: str, name: str | None, as_json: bool) -> None:
    """Look again and again, like Dagster's sensor: open and resolve incidents, send notices, log what is found.

    Beside Dagster, on another host if possible. It goes on while the database is away, and ends by a signal.
    """
    pause = _often(every, timedelta(hours=1))
    watcher = Watcher(_name("watch", name), pause)
    log_to_stderr(as_json=as_json, level=logging.INFO)
    log = wrap(logging.getLogger("gaffer"), watch=watcher.name)
    with signals():
        url = database.from_environment()
        while True:
            began = time.monotonic()
            try:
                with db.connect(url, application_name="gaffer:watch") as connection:
                    migrate.verify(connection)
                    done = attend(connection, watcher, os.environ, log)
                if done.report is not None:
                    log.info("looked", wrong=len(done.report.findings), sent=done.sent)
            except Exception as error:  # whatever it is, the next pass may find it mended
                log.error("cannot tell", error=db.primary_message(error))
            time.sleep(max(0.0, pause.total_seconds() - (time.monotonic() - began)))


def _name(driver: str, name: str | None) -> str:
    called = socket.gethostname() if name is None else name
    if not re.fullmatch(r"[\w.-]{1,100}", called):
        raise BadInputError(f"--name {called!r}: use letters, digits and _ . -, at most 100")
    return f"{driver}:{called}"


def _print(report: Report, jobs: int, problems: Sequence[str], sent: int | None) -> None:
    of = sorted({each.job for each in report.findings if each.job is not None})
    click.echo(f"{counted(jobs, 'job')}: " + ("all is well" if not of else f"something is to be said of {len(of):,}"))
    if report.findings:
        table = Table("of", "what", "severity", "since", "in words")
        for each in report.findings:
            table.add_row(
                each.job or f"watch {each.watch}",
                str(each.kind),
                str(each.severity),
                show_time(each.since),
                explained(each.kind, each.details),
            )
        table.print()
    for each in report.watches:
        click.echo(printable(_of_watch(each, report.at)))
    for line in who_watches(report.watches, report.at):
        click.echo(printable(line))
    for problem in problems:
        click.echo(f"gaffer: {printable(problem)}", err=True)
    if sent is not None:
        click.echo(f"{counted(sent, 'message')} sent")


def _of_watch(watch: Watch, now: datetime) -> str:
    often = "" if watch.every is None else f" (means to every {in_words(watch.every)})"
    return f"{watch.name} looked {in_words(now - watch.last_pass_at)} ago{often}"


def _print_json(report: Report, jobs: int, problems: Sequence[str], sent: int | None) -> None:
    told = {
        "at": report.at,
        "jobs": jobs,
        "findings": [_finding(each) for each in report.findings],
        "watches": [
            {"name": each.name, "every_seconds": each.every, "last_pass_at": each.last_pass_at}
            for each in report.watches
        ],
        "problems": list(problems),
        "sent": sent,
    }
    tell([told])


def _finding(found: Finding) -> dict[str, Any]:
    return {
        "job": found.job,
        "watch": found.watch,
        "kind": str(found.kind),
        "severity": str(found.severity),
        "since": found.since,
        "details": found.details,
    }
