"""`gaffer pause`, `resume`, `rename`, `release`, `retire`, `register`: what people do to jobs.

Who, when and why is kept.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from gaffer_dagster import database
from gaffer_dagster.cli.command import (
    Change,
    Risky,
    complete_jobs,
    confirm,
    file_option,
    job_argument,
    job_option,
    opened,
    printable,
    show_time,
)
from gaffer_dagster.cli.definitions import jobs_in
from gaffer_dagster.cli.show import ago
from gaffer_dagster.domain.amount import counted
from gaffer_dagster.domain.moment import end_of
from gaffer_dagster.engine.registry import register_all
from gaffer_dagster.errors import BadInputError
from gaffer_dagster.store import db, jobs, leases, operations
from gaffer_dagster.store.operations import Operator


@click.command(cls=Change)
@job_argument()
@click.option("--until", metavar="TIME", help="When it ends by itself: a time, or how long, such as 2h.")
def pause(job: str, until: str | None, operator: Operator) -> None:
    """Let runs of JOB end `paused` from now on. Ticks in a pause are skipped; what is due is done after it.

    A run that is at work is not stopped. It holds whatever Dagster's own switches say.
    """
    with opened() as connection:
        record = jobs.get(connection, job)
        end = None if until is None else end_of(until, "--until", record.seen_at, record.timezone)
        operations.pause(connection, job, end, record.tick_after_pause, operator)
    click.echo(f"{job} is paused " + ("until: gaffer resume" if end is None else f"until {show_time(end)}"))


@click.command(cls=Change)
@job_argument()
def resume(job: str, operator: Operator) -> None:
    """End the pause of JOB. Its next run does everything that has become due meanwhile."""
    with opened() as connection:
        record = jobs.get(connection, job)
        was_paused = operations.resume(connection, job, record.tick_after_pause, operator)
        due = jobs.get(connection, job).next_due_at
    if not was_paused:
        click.echo(f"{job} was not paused")
    else:
        click.echo(f"{job} goes on" + ("" if due is None else f"; due next: {show_time(due)} ({ago(due)})"))


@click.command(cls=Risky)
@click.argument("old", shell_complete=complete_jobs)
@click.argument("new")
def rename(old: str, new: str, operator: Operator) -> None:
    """Let job OLD go on as NEW, with its watermark and history. Deploy the code that calls it NEW next."""
    with opened() as connection:
        jobs.get(connection, old)
        confirm(f"Rename job {old} to {new}?")
        operations.rename(connection, old, new, operator)
    click.echo(f"{old} is called {new} from now on")


@click.command(cls=Risky)
@job_argument()
@click.option("--slot", type=click.IntRange(0, 2**31 - 1), help="Only this one, of a job that has several.")
def release(job: str, slot: int | None, operator: Operator) -> None:
    """Take the lease of JOB away from the run that holds it, so that nothing more of that run is committed.

    For a run that neither ends nor lets go; one that is merely dead is found by the next. Another run is asked for,
    unless programs of its own run JOB.
    """
    with opened() as connection:
        seen_at = jobs.get(connection, job).seen_at
        holders = leases.held(connection, job, slot)
        if holders:
            owners = ", ".join(each.owner for each in holders)
            confirm(f"Take the lease of {job} away from {owners}?")
        # Of those who were asked about: whoever has followed one meanwhile is another run.
        released = [
            each
            for held in holders
            for each in operations.release(connection, job, held.slot, operator, fence=held.fence)
        ]
        after = jobs.get(connection, job).after_release
    for each in released:
        until = f"held until {show_time(each.lease_until)}" if each.lease_until > seen_at else "its lease was over"
        click.echo(
            printable(
                f"{job}: the lease of slot {each.slot} was taken from {each.owner} (fence {each.fence}, {until}); "
                f"nothing more of that run is committed{after}"
            )
        )
    if len(released) < len(holders):
        click.echo(f"{job}: {counted(len(holders) - len(released), 'run')} had ended by then; nothing else was changed")
    if not holders:
        click.echo(f"{job}: nobody holds the lease; nothing was changed")


@click.command(cls=Risky)
@click.argument("name", shell_complete=complete_jobs)
def retire(name: str, operator: Operator) -> None:
    """Miss nothing of NAME any more: a job that was taken out of the code, or a watch that was switched off for good.

    A job's history stays, and a job that is registered again goes on where it was.
    """
    with opened() as connection:
        confirm(f"Retire {name}?")
        operations.retire(connection, name, operator)
    click.echo(f"{name} is retired")


@click.command(cls=Change)
@click.argument("module", required=False)
@file_option(help="A file instead.")
@job_option("--new", metavar="JOB", multiple=True, help="JOB is a new job, though it does the work of a known one.")
def register(module: str | None, file: Path | None, new: tuple[str, ...], operator: Operator) -> None:
    """Make the jobs of MODULE known to their databases; for deployments, before the new code runs.

    A renamed job is told by its work, and refused until `gaffer rename`: under a new name it would begin anew.
    """
    if (file is None) == (module is None):
        raise BadInputError("name where the jobs are defined: either MODULE or -f FILE")
    found = jobs_in(file, module)
    unknown = sorted(set(new) - set(found))
    if unknown:
        raise BadInputError(f"--new {unknown[0]!r} is not defined there; there is {', '.join(sorted(found))}")
    by_url: dict[str, list[Any]] = {}
    for each in found.values():
        url = database.from_environment() if each.resource is None else each.resource.url()
        by_url.setdefault(url, []).append(each.job.definition)
    for url, definitions in by_url.items():
        with db.connect(url, application_name="gaffer:register") as connection:
            changed = register_all(connection, definitions, new=new, operator=operator)
        for definition in definitions:
            click.echo(f"{definition.spec.name}: {'made known' if definition.spec.name in changed else 'as it was'}")
