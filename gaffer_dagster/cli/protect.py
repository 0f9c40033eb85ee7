"""`gaffer protect`, `gaffer unprotect`: which tables the database lets only batches write."""

from __future__ import annotations

import click

from gaffer_dagster import database
from gaffer_dagster.cli.operate import confirm, operator_of, whose
from gaffer_dagster.store import db, migrate, tables
from gaffer_dagster.store import protect as protection


@click.command()
@click.argument("table")
@click.option("--job", "jobs", metavar="JOB", multiple=True, help="Whose batches may write; left out: any job's.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@whose
def protect(table: str, jobs: tuple[str, ...], yes: bool, by: str | None, reason: str | None) -> None:
    """Let the database refuse every write to TABLE outside a fenced batch, and a COMMIT without the fence's check.

    Its partitions are guarded too. Once more: the jobs are added to those that may write, and partitions that came
    later are guarded against TRUNCATE as well.
    """
    operator = operator_of(by, reason)
    with db.connect(database.from_environment(), application_name="gaffer:protect") as connection:
        migrate.verify(connection)
        found = tables.find(connection, table)
        whom = f"batches of {', '.join(sorted(jobs))}" if jobs else "batches"
        if not yes:
            confirm(f"Refuse whatever writes {found} outside {whom}?")
        count = protection.protect(connection, found, jobs, operator)
    click.echo(f"{found} is protected" + (f", and {count - 1} tables below it" if count > 1 else ""))


@click.command()
@click.argument("table")
@click.option("--yes", is_flag=True, help="Do not ask.")
@whose
def unprotect(table: str, yes: bool, by: str | None, reason: str | None) -> None:
    """Let anybody write TABLE again who has the right to."""
    operator = operator_of(by, reason)
    with db.connect(database.from_environment(), application_name="gaffer:unprotect") as connection:
        migrate.verify(connection)
        found = tables.find(connection, table)
        if not yes:
            confirm(f"Let {found} be written outside batches?")
        was_protected = protection.unprotect(connection, found, operator)
    click.echo(f"{found} is not protected any more" if was_protected else f"{found} was not protected")
