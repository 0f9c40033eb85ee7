"""`gaffer migrate`, `gaffer prepare`, `gaffer db`: the database itself."""

from __future__ import annotations

import click

from gaffer_dagster import database, local
from gaffer_dagster.errors import BadInputError, SchemaBehindError
from gaffer_dagster.store import db as store_db
from gaffer_dagster.store import migrate as migrations
from gaffer_dagster.store import prepare as preparation


@click.command()
@click.option("--check", is_flag=True, help="Change nothing; exit 1 if something is to be done.")
@click.option("--sql", "as_sql", is_flag=True, help="Print the whole script instead, for someone else to apply.")
def migrate(check: bool, as_sql: bool) -> None:
    """Bring the tables of gaffer_dagster up to date."""
    if as_sql:
        click.echo(migrations.script(), nl=False)
        return
    with store_db.connect(database.from_environment(), application_name="gaffer:migrate") as connection:
        if check:
            todo = migrations.pending(connection)
            if todo:
                names = ", ".join(f"{migration.number} ({migration.name})" for migration in todo)
                raise SchemaBehindError(f"to be applied: {names}; run: gaffer migrate")
            click.echo("The tables are up to date.")
            return
        for migration in migrations.migrate(connection):
            click.echo(f"applied {migration.number} ({migration.name})")
        click.echo("The tables are up to date.")


@click.command()
@click.argument("table")
@click.option("--key", required=True, help="A column that is unique and never null.")
@click.option("--changed/--new", default=None, help="New and changed rows, or new ones only (as it is, else new).")
@click.option("--cursor", metavar="COLUMN", help="For NewRows with cursor=: the column.")
@click.option("--pending", metavar="SQL", help="For PendingRows: the condition of its pending rows.")
@click.option("--apply", "do_apply", is_flag=True, help="Run the statements instead of printing them.")
def prepare(
    table: str, key: str, changed: bool | None, cursor: str | None, pending: str | None, do_apply: bool
) -> None:
    """Print (or apply) what TABLE lacks so that NewRows can read it without losing a row; with --cursor, so that it
    reads fast by that column; with --pending, so that PendingRows claims at the same cost however many rows are done.

    The column is added without rewriting the table, and an index without blocking writers.
    """
    if sum(given is not None for given in (pending, changed, cursor)) > 1:
        raise BadInputError(
            "--pending is for PendingRows, --changed and --new are for NewRows in commit order, and --cursor is for "
            "NewRows by a cursor; give one of them"
        )
    with store_db.connect(database.from_environment(), application_name="gaffer:prepare") as connection:
        migrations.verify(connection)
        if pending is not None:
            todo = preparation.pending_statements(connection, table, key, pending)
        elif cursor is not None:
            todo = preparation.cursor_statements(connection, table, key, cursor)
        else:
            todo = preparation.statements(connection, table, key, changed=changed)
        if not todo:
            click.echo(f"-- {table} lacks nothing", err=True)
        for statement in todo:
            click.echo(f"{statement};")
        if do_apply and todo:
            preparation.apply(connection, todo)
            click.echo(f"-- applied: {table} is prepared", err=True)


@click.group()
def db() -> None:
    """The private Postgres for development, in ./.gaffer."""


@db.command()
def url() -> None:
    """Start it, leave it running until `gaffer db stop`, and print its URL."""
    click.echo(local.keep(database.FOLDER))


@db.command()
def stop() -> None:
    """Stop it, whoever uses it."""
    click.echo("stopped" if local.stop(database.FOLDER) else "it was not running")
