"""`gaffer items`: rows of `PendingRows` jobs that failed."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import click

from gaffer_dagster.cli.command import (
    Read,
    Risky,
    Table,
    confirm,
    job_argument,
    limit_option,
    opened,
    show_time,
    tell,
)
from gaffer_dagster.domain.amount import counted
from gaffer_dagster.errors import BadInputError
from gaffer_dagster.store import jobs, operations, pending_rows
from gaffer_dagster.store.operations import Operator


@click.group()
def items() -> None:
    """Rows that failed: those that were parked wait for somebody."""


@items.command("list", cls=Read)
@job_argument()
@click.option("--all", "everything", is_flag=True, help="Also those that are to be tried again, and dropped ones.")
@limit_option(100, 1_000_000)
def list_items(job: str, everything: bool, limit: int, as_json: bool) -> None:
    """The rows of JOB that were parked, newest failure first."""
    with opened() as connection:
        jobs.get(connection, job)
        found = pending_rows.items(connection, job, everything=everything, limit=limit)
    if as_json:
        tell(found)
        return
    if not found:
        click.echo(f"{job} has no failed rows" if everything else f"{job} has no parked rows (all failed ones: --all)")
        return
    table = Table("key", "attempts", "failed", "state", "error")
    for record in found:
        state = (
            f"dropped {show_time(record.dropped_at)}"
            if record.dropped_at is not None
            else f"parked {show_time(record.parked_at)}"
            if record.parked_at is not None
            else f"again {show_time(record.next_attempt_at)}"
        )
        error = record.error or "the process that worked on it has not said how it went"
        shown = f"{error} ({record.sqlstate})" if record.sqlstate else error
        table.add_row(record.key, str(record.attempts), show_time(record.failed_at), state, shown)
    table.print()


class _OfRows(Risky):
    """A key that is a negative number needs no `--` before it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        options = args[: args.index("--")] if "--" in args else list(args)
        ctx.ignore_unknown_options = True
        rest = super().parse_args(ctx, args)
        for key in ctx.params["keys"]:
            if key in options and re.match(r"-[^\d.]", key):
                raise click.NoSuchOption(key, ctx=ctx)
        return rest


def _of_rows(command: Callable[..., Any]) -> Callable[..., Any]:
    command = click.option("--parked", is_flag=True, help="All that are parked.")(command)
    return job_argument()(click.argument("keys", nargs=-1, metavar="[KEY]...")(command))


@items.command(cls=_OfRows)
@_of_rows
def retry(**given: Any) -> None:
    """Try rows of JOB again, with all their attempts anew; a run is asked for."""
    _change("retry", "tried again", **given)


@items.command(cls=_OfRows)
@_of_rows
def drop(**given: Any) -> None:
    """Give rows of JOB up: they stay as they are in their table, are left alone, and nobody is told any more."""
    _change("drop", "dropped", **given)


def _change(
    action: str,
    what: str,
    *,
    job: str,
    keys: tuple[str, ...],
    parked: bool,
    operator: Operator,
) -> None:
    if bool(keys) == parked:
        raise BadInputError("name the rows by their keys, or give --parked for all that are parked")
    with opened() as connection:
        jobs.get(connection, job)
        confirm(f"Rows of {job} ({', '.join(keys) or 'all that are parked'}): to be {what}?")
        found = operations.change_items(connection, job, action, list(keys) or None, operator)
    missing = [key for key in keys if key not in found]
    if found or not missing:
        click.echo(f"{counted(len(found), 'row')} of {job} {'is' if len(found) == 1 else 'are'} {what}")
    if missing:
        raise BadInputError(
            f"job {job!r} has no failed rows with key {', '.join(missing)}; see: gaffer items list {job} --all"
        )
