"""`gaffer pause`, `resume`, `rename`, `release`, `retire`, `register`: what people do to jobs.

Who, when and why is kept.
"""

from __future__ import annotations

import getpass
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from gaffer_dagster import database
from gaffer_dagster.cli.definitions import jobs_in
from gaffer_dagster.cli.show import ago, printable, show_time
from gaffer_dagster.domain.moment import end_of
from gaffer_dagster.engine.registry import register_all
from gaffer_dagster.errors import BadInputError
from gaffer_dagster.store import db, jobs, leases, migrate, operations
from gaffer_dagster.store.operations import Operator


def whose(command: Callable[..., Any]) -> Callable[..., Any]:
    command = click.option("--by", help="Who does it; left out: user and host.")(command)
    return click.option("--reason", help="Why, for those who come after.")(command)


def operator_of(by: str | None, reason: str | None) -> Operator:
    if by is None:
        try:
            by = f"{getpass.getuser()}@{socket.gethostname()}"
        except (KeyError, OSError):  # a container's user has no name
            by = f"somebody@{socket.gethostname()}"
    if not by.strip():
        raise BadInputError(f"--by {by!r} is empty; say who does it")
    return Operator(by, reason)


def confirm(question: str) -> None:
    """Goes on only if somebody says yes. Raises `BadInputError` where there is nobody to ask."""
    try:
        said_yes = click.confirm(printable(question))
    except click.Abort:
        if sys.stdin.isatty():
            raise
        click.echo()
        raise BadInputError("there is nobody to ask, and nothing was changed; where that is so, give --yes") from None
    if not said_yes:
        raise click.Abort


@click.command()
@click.argument("job")
@click.option("--until", metavar="TIME", help="When it ends by itself: a time, or how long, such as 2h.")
@whose
def pause(job: str, until: str | None, by: str | None, reason: str | None) -> None:
    """Let runs of JOB end `paused` from now on. Ticks in a pause are skipped; what is due is done after it.

    A run that is at work is not stopped. It holds whatever Dagster's own switches say.
    """
    operator = operator_of(by, reason)
    with db.connect(database.from_environment(), application_name="gaffer:pause") as connection:
        migrate.verify(connection)
        record = jobs.get(connection, job)
        end = None if until is None else end_of(until, "--until", record.seen_at, record.timezone)
        operations.pause(connection, job, end, record.tick_after_pause, operator)
    click.echo(f"{job} is paused " + ("until: gaffer resume" if end is None else f"until {show_time(end)}"))


@click.command()
@click.argument("job")
@whose
def resume(job: str, by: str | None, reason: str | None) -> None:
    """End the pause of JOB. Its next run does everything that has become due meanwhile."""
    operator = operator_of(by, reason)
    with db.connect(database.from_environment(), application_name="gaffer:resume") as connection:
        migrate.verify(connection)
        record = jobs.get(connection, job)
        was_paused = operations.resume(connection, job, record.tick_after_pause, operator)
        due = jobs.get(connection, job).next_due_at
    if not was_paused:
        click.echo(f"{job} was not paused")
    else:
        click.echo(f"{job} goes on" + ("" if due is None else f"; due next: {show_time(due)} ({ago(due)})"))


@click.command()
@click.argument("old")
@click.argument("new")
@click.option("--yes", is_flag=True, help="Do not ask.")
@whose
def rename(old: str, new: str, yes: bool, by: str | None, reason: str | None) -> None:
    """Let job OLD go on as NEW, with its watermark and history. Deploy the code that calls it NEW next."""
    operator = operator_of(by, reason)
    with db.connect(database.from_environment(), application_name="gaffer:rename") as connection:
        migrate.verify(connection)
        jobs.get(connection, old)
        if not yes:
            confirm(f"Rename job {old} to {new}?")
        operations.rename(connection, old, new, operator)
    click.echo(f"{old} is called {new} from now on")


@click.command()
@click.argument("job")
@click.option("--slot", type=click.IntRange(min=0), help="Only this one, of a job that has several.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@whose
def release(job: str, slot: int | None, yes: bool, by: str | None, reason: str | None) -> None:
    """Take the lease of JOB away from the run that holds it, so that nothing more of that run is committed.

    For a run that neither ends nor lets go; one that is merely dead is found by the next. Another run is asked for,
    unless programs of its own run JOB.
    """
    operator = operator_of(by, reason)
    with db.connect(database.from_environment(), application_name="gaffer:release") as connection:
        migrate.verify(connection)
        seen_at = jobs.get(connection, job).seen_at
        holders = leases.held(connection, job, slot)
        if holders and not yes:
            owners = ", ".join(each.owner for each in holders)
            confirm(f"Take the lease of {job} away from {owners}?")
        released = operations.release(connection, job, slot, operator)
        after = jobs.get(connection, job).after_release
    for each in released:
        until = f"held until {show_time(each.lease_until)}" if each.lease_until > seen_at else "its lease was over"
        click.echo(
            f"{job}: the lease of slot {each.slot} was taken from {each.owner} (fence {each.fence}, {until}); "
            f"nothing more of that run is committed{after}"
        )
    if not released:
        click.echo(f"{job}: nobody holds the lease; nothing was changed")


@click.command()
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask.")
@whose
def retire(name: str, yes: bool, by: str | None, reason: str | None) -> None:
    """Miss nothing of NAME any more: a job that was taken out of the code, or a watch that was switched off for good.

    A job's history stays, and a job that is registered again goes on where it was.
    """
    operator = operator_of(by, reason)
    with db.connect(database.from_environment(), application_name="gaffer:retire") as connection:
        migrate.verify(connection)
        if not yes:
            confirm(f"Retire {name}?")
        operations.retire(connection, name, operator)
    click.echo(f"{name} is retired")


@click.command()
@click.argument("module", required=False)
@click.option("-f", "--file", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="A file instead.")
@click.option("--new", metavar="JOB", multiple=True, help="JOB is a new job, though it does the work of a known one.")
def register(module: str | None, file: Path | None, new: tuple[str, ...]) -> None:
    """Make the jobs of MODULE known to their databases; for deployments, before the new code runs.

    A renamed job is told by its work, and refused until `gaffer rename`: under a new name it would begin anew.
    """
    if (file is None) == (module is None):
        raise BadInputError("name where the jobs are defined: either MODULE or -f FILE")
    found = jobs_in(file, module)
    unknown = sorted(set(new) - set(found))
    if unknown:
        raise BadInputError(f"--new {unknown[0]!r} is not defined there; there is {', '.join(sorted(found)) or 'none'}")
    by_url: dict[str, list[Any]] = {}
    for each in found.values():
        url = database.from_environment() if each.resource is None else each.resource.url()
        by_url.setdefault(url, []).append(each.job.definition)
    for url, definitions in by_url.items():
        with db.connect(url, application_name="gaffer:register") as connection:
            changed = register_all(connection, definitions, new=new)
        for definition in definitions:
            click.echo(f"{definition.spec.name}: {'made known' if definition.spec.name in changed else 'as it was'}")
