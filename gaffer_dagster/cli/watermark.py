"""`gaffer watermark`: how far a job has got, and where it is to go on."""

from __future__ import annotations

import click

from gaffer_dagster.cli.command import (
    Read,
    Risky,
    complete_jobs,
    confirm,
    job_argument,
    opened,
    printable,
    tell,
)
from gaffer_dagster.domain.amount import counted
from gaffer_dagster.engine.watermark import due_after, kind_of, plan_move, rows_said, said, where
from gaffer_dagster.store import adopt, jobs, watermarks
from gaffer_dagster.store.operations import Operator


@click.group()
def watermark() -> None:
    """How far a job has got."""


@watermark.command(cls=Read)
@job_argument()
def show(job: str, as_json: bool) -> None:
    """Where JOB will go on, and what is due after that."""
    with opened() as connection:
        record = jobs.get(connection, job)
        kind_of(record)
        if as_json:
            tell([{"job": job, "position": record.watermark}])
            return
        click.echo(printable(f"{job} is {where(record)}; {due_after(connection, record)}"))


@watermark.command("set", cls=Risky)
@job_argument()
@click.argument("position")
@click.option("--dry-run", is_flag=True, help="Only say what would be done again, or skipped.")
def set_watermark(job: str, position: str, dry_run: bool, operator: Operator) -> None:
    """Let JOB go on at POSITION.

    Of a job that is due by time it is a time. Of NewRows it is `beginning`, `end` (all that is there is skipped), or
    `after:KEY` (the rows up to the one with that key are done). It is refused while a run is at work.
    """
    with opened() as connection:
        record = jobs.get(connection, job)
        move = plan_move(connection, record, position)
        since, to = where(record), said(move.to, record.timezone)
        click.echo(printable(f"{job} is {since}, and will be {to}: {move.means}"))
        if dry_run:
            return
        confirm("Set it?")
        watermarks.set_position(connection, job, record.watermark, move.to, move.cluster, operator)
    click.echo(f"{job} goes on there")


@watermark.command("adopt", cls=Risky)
@click.argument("names", metavar="[JOB]...", nargs=-1, shell_complete=complete_jobs)
@click.option("--dry-run", is_flag=True, help="Only say what would become of each job.")
def adopt_database(names: tuple[str, ...], dry_run: bool, operator: Operator) -> None:
    """Go on with a database that was restored, or copied: all its jobs, or these.

    Run it after the restore, before anybody writes. What was done when the backup was made stays done, and what was
    due is due, in the order of the key. Fences go ahead of any that were given since the backup. Watermarks that
    another cluster counted are moved to numbers of this one, and so are the rows of their tables, which are rewritten.
    It is refused while a run is at work, and where it cannot be known which rows are done.
    """
    with opened() as connection:
        plan = adopt.plan(connection, names)
        for each in plan.jobs:
            click.echo(f"{each.job}: {_adopted(each)}")
        for table, rows in plan.rewritten:
            click.echo(
                f"{table}: {counted(rows, 'row')} {'is' if rows == 1 else 'are'} rewritten, and nobody can write to it "
                "meanwhile"
            )
        if dry_run:
            return
        confirm("Adopt this database?")
        adopt.adopt(connection, names, operator)
    click.echo(f"adopted: {counted(len(plan.jobs), 'job')}")


def _adopted(job: adopt.Adoption) -> str:
    fences = "fence " + ", ".join(f"{fence:,} to {fence + adopt.FENCE_GAP:,}" for fence in job.fences)
    if job.move is None:
        return f"{fences}; the watermark stays as it is"
    return f"{fences}; from {rows_said(job.move.since)} to {rows_said(job.move.to)}; rows due: {job.move.due:,}"
