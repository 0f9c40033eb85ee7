"""`gaffer run`: a job from the shell, so that plain cron or a Kubernetes CronJob drives it with the same promises."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from gaffer_dagster import database
from gaffer_dagster.cli import TRY_AGAIN, show
from gaffer_dagster.cli.command import BY, REASON, job_argument, operator_of, tell
from gaffer_dagster.cli.definitions import jobs_in
from gaffer_dagster.cli.process import log_to_stderr, signals
from gaffer_dagster.domain.close import meant
from gaffer_dagster.domain.moment import as_moment
from gaffer_dagster.domain.progress import BACKLOG_CEILING
from gaffer_dagster.domain.run import Outcome, RunRecord
from gaffer_dagster.engine.log import wrap
from gaffer_dagster.engine.redo import note
from gaffer_dagster.engine.run import Run, open_run
from gaffer_dagster.engine.steps import Station
from gaffer_dagster.errors import DatabaseUnavailableError, GafferError, UnknownJobError
from gaffer_dagster.store import db
from gaffer_dagster.store.operations import Operator


@click.command()
@job_argument()
@click.option("-f", "--file", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="The Python file.")
@click.option("-m", "--module", help="The Python module, as `import` knows it.")
@click.option("--once", is_flag=True, help="One run; without it, a run that was capped is followed by the next.")
@click.option("--despite-pause", is_flag=True, help="Also while the job is paused.")
@click.option("--interval", "redo", metavar="TIME", help="Do the interval that TIME is in once more; nothing else.")
@click.option("--by", **BY)
@click.option("--reason", **REASON)
@click.option("--json", "as_json", is_flag=True, help="Print each run's record, and log, as JSON.")
@click.option("-q", "--quiet", is_flag=True, help="Log errors only.")
def run(
    job: str,
    file: Path | None,
    module: str | None,
    once: bool,
    despite_pause: bool,
    redo: str | None,
    by: str | None,
    reason: str | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Run JOB, as -f FILE or -m MODULE defines it, until nothing due is left.

    Exits 0 also when another run has the lease, or the job is paused; 1 when it failed; 75 when the database cannot
    be reached, or an --interval was not done for one of those reasons; 128 + n when signal n interrupted it. --by and
    --reason are kept of an --interval.
    """
    # On a terminal a bar says what each batch's line says elsewhere.
    level = logging.ERROR if quiet else logging.WARNING if _has_bar(as_json) else logging.INFO
    log_to_stderr(as_json=as_json, level=level)
    with signals():
        jobs = jobs_in(file, module)
        if job not in jobs:
            raise UnknownJobError(
                f"no job {job!r} is defined there; there is {', '.join(sorted(jobs))}{meant(job, jobs)}"
            )
        found = jobs[job]
        again = None if redo is None else as_moment(redo, "--interval", found.job.spec.timezone)
        operator = operator_of(by, reason)
        url = database.from_environment() if found.resource is None else found.resource.url()
        records: list[RunRecord] = []
        try:
            while True:
                outcome = _run_once(
                    found.job, url, records, despite_pause=despite_pause, redo=again, operator=operator, as_json=as_json
                )
                # A run that was capped without doing anything waits for something: the next wake-up will see.
                if once or outcome is not Outcome.CAPPED or not records[-1].items:
                    break
        finally:
            if records and not as_json:
                _show(lambda: show.print_runs(records))
        if again is not None and outcome.did_not_work:  # no tick makes up for it
            click.echo(f"gaffer: the interval was not done, since the job is {outcome}; try again", err=True)
            sys.exit(TRY_AGAIN)


def _show(show: Callable[[], None]) -> None:
    """The work is done and recorded, whether or not somebody reads what is said of it."""
    with suppress(OSError, SystemExit):  # rich turns a broken pipe into an exit of its own
        show()
        sys.stdout.flush()


def _run_once(
    job: Any,
    url: str,
    records: list[RunRecord],
    *,
    despite_pause: bool,
    redo: datetime | None,
    operator: Operator,
    as_json: bool,
) -> Outcome:
    """One run, whose record is added to the others."""
    log = wrap(logging.getLogger("gaffer"))
    bar = _progress() if _has_bar(as_json) else None
    opened: Run | None = None
    try:
        with (
            bar or nullcontext(),
            open_run(
                job.spec,
                url,
                log=log,
                trigger="command",
                despite_pause=despite_pause,
                redo=redo,
                work_hash=job.definition.work_hash,
                known=job.known,
                observe=lambda station: _advance(bar, opened, station),
            ) as opened,
        ):
            if bar is not None and opened.outcome is Outcome.RUNNING:
                left = opened.glance()
                bar.add_task(job.spec.name, total=None if left == BACKLOG_CEILING else left, pace="")
            if redo is not None and opened.outcome is Outcome.RUNNING:
                with db.connect(url, application_name="gaffer:run") as connection:
                    note(connection, job.spec, redo, operator)
            opened.apply(job.work)
    except Exception as error:
        if isinstance(error, GafferError):
            raise
        if db.lost_connection(error):
            raise DatabaseUnavailableError(f"Postgres went away: {db.primary_message(error)}; try again") from None
        logging.getLogger("gaffer").error("%s failed", job.spec.name, exc_info=error)
        sys.exit(1)
    record = opened.record
    if record is not None:
        records.append(record)
        if as_json:
            _show(lambda: tell([record]))
    opened.reported()
    return opened.outcome


def _has_bar(as_json: bool) -> bool:
    return not as_json and sys.stderr.isatty()


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[pace]}"),
        TimeRemainingColumn(elapsed_when_finished=True),
        console=Console(stderr=True),
    )


def _advance(bar: Progress | None, opened: Run | None, station: Station) -> None:
    if bar is not None and opened is not None and bar.task_ids and station is Station.COMMITTED:
        (task,) = bar.tasks
        pace = opened.items / max(task.elapsed or 0, 0.001)
        bar.update(task.id, completed=opened.items, pace=f"{pace:,.0f}/s")
