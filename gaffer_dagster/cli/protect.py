"""`gaffer protect`, `gaffer unprotect`: which tables the database lets only batches write."""

from __future__ import annotations

import click

from gaffer_dagster.cli.command import Risky, confirm, job_option, opened
from gaffer_dagster.store import protect as protection
from gaffer_dagster.store import tables
from gaffer_dagster.store.operations import Operator


@click.command(cls=Risky)
@click.argument("table")
@job_option("--job", "jobs", metavar="JOB", multiple=True, help="Whose batches may write; left out: any job's.")
def protect(table: str, jobs: tuple[str, ...], operator: Operator) -> None:
    """Let the database refuse every write to TABLE outside a fenced batch, and a COMMIT without the fence's check.

    Its partitions are guarded too. Once more: the jobs are added to those that may write, and partitions that came
    later are guarded against TRUNCATE as well.
    """
    with opened() as connection:
        found = tables.find(connection, table)
        whom = f"batches of {', '.join(sorted(jobs))}" if jobs else "batches"
        confirm(f"Refuse whatever writes {found} outside {whom}?")
        count = protection.protect(connection, found, jobs, operator)
    click.echo(f"{found} is protected" + (f", and {count - 1} tables below it" if count > 1 else ""))


@click.command(cls=Risky)
@click.argument("table")
def unprotect(table: str, operator: Operator) -> None:
    """Let anybody write TABLE again who has the right to."""
    with opened() as connection:
        found = tables.find(connection, table)
        confirm(f"Let {found} be written outside batches?")
        was_protected = protection.unprotect(connection, found, operator)
    click.echo(f"{found} is not protected any more" if was_protected else f"{found} was not protected")
