"""`gaffer migrate`, `gaffer prepare`, `gaffer db`: the database itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import click

from gaffer_dagster import database, local
from gaffer_dagster.cli.command import Change, Read, Risky, confirm, opened, tell
from gaffer_dagster.errors import BadInputError, MissingPackageError, SchemaBehindError
from gaffer_dagster.store import db as store_db
from gaffer_dagster.store import migrate as migrations
from gaffer_dagster.store import operations, roles, tables
from gaffer_dagster.store import prepare as preparation
from gaffer_dagster.store.operations import Operator


@click.command(cls=Change)
@click.option("--check", is_flag=True, help="Change nothing; exit 1 if something is to be done.")
@click.option("--sql", "as_sql", is_flag=True, help="Print the whole script instead, for someone else to apply.")
@click.option(
    "--roles", "with_roles", is_flag=True, help="Set the rights of the four roles, too; with --sql: their script."
)
def migrate(check: bool, as_sql: bool, with_roles: bool, operator: Operator) -> None:
    """Bring the tables of gaffer_dagster up to date.

    With --roles the roles gaffer_owner, gaffer_runner, gaffer_reader and gaffer_operator are made where they are not
    there, and each gets what it needs and no more. Whoever is to be one is made a member: grant gaffer_runner to NAME.
    Where they are there already, what a migration brings is theirs without the option.
    """
    if check and as_sql:
        raise BadInputError("--check asks what is to be done, and --sql prints all that there is; give one of them")
    if as_sql:
        click.echo(roles.script() if with_roles else migrations.script(), nl=False)
        return
    with opened(verified=False) as connection:
        if check:
            todo = migrations.pending(connection)
            if todo:
                names = ", ".join(f"{migration.number} ({migration.name})" for migration in todo)
                raise SchemaBehindError(f"to be applied: {names}; run: gaffer migrate")
            if with_roles and roles.apply(connection, None, try_only=True):
                raise SchemaBehindError("the rights of the four roles are to be set; run: gaffer migrate --roles")
        else:
            applied = migrations.migrate(connection, operator)
            for migration in applied:
                click.echo(f"applied {migration.number} ({migration.name})")
            if with_roles or (applied and roles.are_set(connection)):
                roles.apply(connection, operator)
    click.echo("The tables are up to date.")


@click.command(cls=Change)
@click.argument("table")
@click.option("--key", required=True, metavar="COLUMN", help="A column that is unique and never null.")
@click.option("--changed/--new", default=None, help="New and changed rows, or new ones only (as it is, else new).")
@click.option("--cursor", metavar="COLUMN", help="For NewRows with cursor=: the column.")
@click.option("--pending", metavar="SQL", help="For PendingRows: the condition of its pending rows.")
@click.option("--apply", "do_apply", is_flag=True, help="Run the statements instead of printing them.")
def prepare(
    table: str,
    key: str,
    changed: bool | None,
    cursor: str | None,
    pending: str | None,
    do_apply: bool,
    operator: Operator,
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
    with opened() as connection:
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
            found = str(tables.find(connection, table))
            operations.note(connection, None, "prepare", operator, {"table": found, "statements": todo})
            click.echo(f"-- applied: {table} is prepared", err=True)


@click.group()
def db() -> None:
    """The database: the private Postgres for development, in ./.gaffer, and psql."""


@db.command(cls=Read)
def url(as_json: bool) -> None:
    """Start the private Postgres, leave it running until `gaffer db stop`, and print its URL."""
    found = local.keep(database.FOLDER)
    if as_json:
        tell([{"url": found}])
    else:
        click.echo(found)


@db.command()
@click.argument("words", metavar="[WORD]...", nargs=-1, type=click.UNPROCESSED)
def psql(words: tuple[str, ...]) -> None:
    """Open psql on the database that every command works with: what GAFFER_DATABASE_URL names, or the private one.

    WORDs go to psql, after `--` where they begin with a dash: gaffer db psql -- -c 'select 1'. No password is on its
    command line.
    """
    where, secrets = store_db.for_psql(database.from_environment())
    program = local.psql()
    if program is None:
        raise MissingPackageError("psql is not here; install the client of Postgres (postgresql-client)")
    process = subprocess.Popen([program, where, *words], env=os.environ | secrets)  # noqa: S603 — no shell
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # what interrupts a query of psql's is no end of psql
    sys.exit(process.wait())


@db.command()
@click.option("--yes", is_flag=True, help=Change.yes_help)
def stop(yes: bool) -> None:
    """Stop the private Postgres, whoever uses it."""
    click.echo("stopped" if local.stop(database.FOLDER) else "it was not running")


@db.command()
@click.option("--yes", is_flag=True, help=Risky.yes_help)
@click.option("--force", is_flag=True, help="Also while somebody uses it.")
def reset(yes: bool, force: bool) -> None:
    """Remove the private Postgres with all its data; the next start makes a new one.

    A database that GAFFER_DATABASE_URL names is never reset.
    """
    given = os.environ.get(database.VARIABLE, "")
    if given not in ("", database.LOCAL):
        raise BadInputError(
            f"{database.VARIABLE} names {store_db.describe(given)}, which is never reset; to reset the private "
            f"Postgres in {database.FOLDER.resolve()}, unset the variable"
        )
    confirm(f"Remove the private Postgres in {database.FOLDER.resolve()} with all its data?", yes=yes)
    click.echo("removed" if local.reset(database.FOLDER, force=force) else "there was none")
