"""What all commands share: their options, the connection, the question before what cannot be taken back, and JSON.

A command reads (`Read`, has --json), changes something (`Change`, notes who and why, which `gaffer audit` shows), or
changes what no other command takes back (`Risky`, asks first). A test that walks all commands holds them to it.
"""

from __future__ import annotations

import getpass
import json
import socket
import sys
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import Any

import click

from gaffer_dagster import database
from gaffer_dagster.errors import BadInputError
from gaffer_dagster.store import db, jobs, migrate
from gaffer_dagster.store.operations import Operator

_YES = "gaffer_dagster.yes"


class Read(click.Command):
    """Changes nothing, and prints for people or, with --json (`as_json`), for programs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.append(
            click.Option(
                ["--json", "as_json"],
                is_flag=True,
                help="One JSON object a line, and nothing else on stdout; times in UTC, durations in seconds.",
            )
        )


BY: dict[str, Any] = {"metavar": "WHO", "help": "Who does it; left out: user and host."}
REASON: dict[str, Any] = {"metavar": "TEXT", "help": "Why, for those who come after; see: gaffer audit."}


class Change(click.Command):
    """Gets an `operator`, and its row in `gaffer.operator_action`. Never asks; --yes is accepted for evenness."""

    yes_help = "Accepted by every change; this one never asks."

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params += [
            click.Option(["--yes"], is_flag=True, help=self.yes_help),
            click.Option(["--by"], **BY),
            click.Option(["--reason"], **REASON),
        ]

    def invoke(self, ctx: click.Context) -> Any:
        ctx.meta[_YES] = ctx.params.pop("yes")
        ctx.params["operator"] = operator_of(ctx.params.pop("by"), ctx.params.pop("reason"))
        return super().invoke(ctx)


class Risky(Change):
    """A change that no other command takes back: it calls `confirm` before."""

    yes_help = "Do not ask."


def operator_of(by: str | None, reason: str | None) -> Operator:
    if by is None:
        try:
            by = f"{getpass.getuser()}@{socket.gethostname()}"
        except (KeyError, OSError):  # a container's user has no name
            by = f"somebody@{socket.gethostname()}"
    if not by.strip():
        raise BadInputError(f"--by {by!r} is empty; say who does it")
    return Operator(by, reason)


def confirm(question: str, *, yes: bool = False) -> None:
    """Goes on only if somebody says yes, or --yes was given. Raises `BadInputError` where there is nobody to ask."""
    if yes or click.get_current_context().meta.get(_YES):
        return
    try:
        said_yes = click.confirm(printable(question))
    except click.Abort:
        if sys.stdin.isatty():
            raise
        click.echo()
        raise BadInputError("there is nobody to ask, and nothing was changed; where that is so, give --yes") from None
    if not said_yes:
        raise click.Abort


@contextmanager
def opened(*, verified: bool = True) -> Generator[db.Connection]:
    """A connection to the database that is meant, which has our tables (unless not `verified`)."""
    name = click.get_current_context().command_path.split()[1]
    with db.connect(database.from_environment(), application_name=f"gaffer:{name}") as connection:
        if verified:
            migrate.verify(connection)
        yield connection


def complete_jobs(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """The jobs of the database, if it can be reached at once; a server is not started for it."""
    try:
        url = database.at_hand()
        with db.connect(url, application_name="gaffer:completion", patience=2) as connection, db.impatient(connection):
            return [name for name in jobs.names(connection) if name.startswith(incomplete)]
    except Exception:  # whatever it is, the shell's line is no place to tell it
        return []


job_argument = partial(click.argument, "job", shell_complete=complete_jobs)
job_option = partial(click.option, shell_complete=complete_jobs)
file_option = partial(click.option, "-f", "--file", type=click.Path(exists=True, dir_okay=False, path_type=Path))


def limit_option(default: int, most: int = 10_000) -> Any:
    return click.option(
        "--limit", default=default, show_default=True, type=click.IntRange(1, most), help="How many at most."
    )


def tell(records: Iterable[Any]) -> None:
    """One JSON object a line, of dataclasses or mappings."""
    for record in records:
        fields = asdict(record) if is_dataclass(record) and not isinstance(record, type) else record
        click.echo(json.dumps(fields, default=_plain))


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.astimezone(timezone.utc).isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    return str(value)


def printable(text: str) -> str:
    """`text` on one line, in which no character can do anything to a terminal."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def show_time(time: datetime | None) -> str:
    return "-" if time is None else f"{time.astimezone(timezone.utc):%Y-%m-%d %H:%M:%SZ}"


_LAST_COLUMN = 30
"""The narrowest in which a text that is wrapped can be read."""


class Table:
    """For people. Cells are what somebody wrote (keys, errors, reasons), and never markup."""

    def __init__(self, *names: str) -> None:
        self._names = names
        self._rows: list[list[str]] = []

    def add_row(self, *cells: str) -> None:
        self._rows.append([printable(each) for each in cells])

    def print(self) -> None:
        from rich.cells import cell_len  # takes long to load
        from rich.console import Console
        from rich.table import Table as RichTable
        from rich.text import Text

        terminal = Console()
        if not terminal.is_terminal:  # nobody looks at it as it comes: a row is a line
            terminal = Console(width=250)
        widths = [max(map(cell_len, column)) + 3 for column in zip(self._names, *self._rows, strict=True)]
        if sum(widths[:-1]) + min(widths[-1], _LAST_COLUMN) > terminal.width:
            for row in self._rows:
                told = [f"{name} {cell}" for name, cell in zip(self._names, row, strict=True) if cell not in ("", "-")]
                terminal.print(Text(" · ".join(told)))
            return
        table = RichTable()
        for name in self._names:
            table.add_column(name, no_wrap=name is not self._names[-1])
        for row in self._rows:
            table.add_row(*map(Text, row))
        terminal.print(table)
