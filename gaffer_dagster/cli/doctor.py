"""`gaffer doctor`: one page of what is well and what is not, each with its cure."""

from __future__ import annotations

import importlib
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import click

from gaffer_dagster import database
from gaffer_dagster.cli.command import Read, file_option, printable, tell
from gaffer_dagster.cli.definitions import jobs_in
from gaffer_dagster.domain.amount import counted
from gaffer_dagster.domain.health import Check, Mark, told, worst
from gaffer_dagster.engine import doctor as engine
from gaffer_dagster.errors import BadInputError, DatabaseUnavailableError, GafferError
from gaffer_dagster.store import db

HOME = "DAGSTER_HOME"
_CODES = {Mark.OK: 0, Mark.WRONG: 1, Mark.UNKNOWN: 2}
_AWAY = 75
_CURE = "pip install --upgrade gaffer_dagster   # and see: python -c 'import dagster'"
_COLOURS = {Mark.OK: "green", Mark.WARNING: "yellow", Mark.WRONG: "red", Mark.UNKNOWN: "magenta", Mark.SKIPPED: None}


def of_code(command: Any) -> Any:
    command = click.option("-m", "--module", help="The module that defines the jobs.")(command)
    return file_option(help="The file that defines the jobs.")(command)


@click.command(cls=Read)
@of_code
def doctor(file: Path | None, module: str | None, as_json: bool) -> None:
    """Look at the database, the jobs and their tables, the receivers, and Dagster, and say what to do.

    Dagster is looked at where DAGSTER_HOME is set. With -f or -m the jobs there are compared with those that are known.
    Nothing is changed, started or sent. Exits 0 when all is well (or there are only warnings), 1 when something is
    wrong, 2 when it cannot tell, 75 when there is no database to ask.
    """
    checks = list(_look(file, module))
    show(checks, as_json=as_json)
    sys.exit(code_of(checks))


def _look(file: Path | None, module: str | None) -> Iterator[Check]:
    found, failed = _defined(file, module)
    yield from failed
    urls: dict[str, list[Any]] = {}
    try:
        urls[database.at_hand()] = []
    except GafferError as error:
        if not found:
            yield _nowhere(error)
    for each in found.values():
        try:
            url = database.at_hand() if each.resource is None else each.resource.at_hand()
        except GafferError as error:
            yield _nowhere(error)
        else:
            urls.setdefault(url, []).append(each.job.definition)
    for url, definitions in urls.items():
        yield from engine.of_database(url, definitions)
    yield from engine.of_receivers(os.environ, sorted({name for url in urls for name in engine.heartbeats(url)}))
    if os.environ.get(HOME):
        slots = {name: count for url in urls for name, count in engine.slots(url).items()}
        yield from of_dagster(slots | {name: each.job.spec.slots for name, each in found.items()})
    else:
        cure = f"export {HOME}=…   # the folder of its dagster.yaml"
        yield Check("dagster", "instance", Mark.SKIPPED, f"{HOME} is not set", cure)


def _nowhere(error: GafferError) -> Check:
    if isinstance(error, DatabaseUnavailableError):
        return Check("database", engine.UNREACHABLE, Mark.WRONG, *told(error))
    return Check("database", "address", Mark.UNKNOWN, *told(error))


def _defined(file: Path | None, module: str | None) -> tuple[dict[str, Any], list[Check]]:
    """The jobs in the code; and where it cannot be loaded, that this is wrong: the rest is looked at all the same."""
    if file is None and module is None:
        return {}, []
    try:
        return jobs_in(file, module), []
    except Exception as error:
        found = str(error) if isinstance(error, GafferError) else db.primary_message(error)
        return {}, [Check("jobs", "definitions", Mark.WRONG, f"{file or module} cannot be loaded: {found}", "mend it")]


def adapter(name: str) -> Any:
    """Only now is Dagster needed. Raises `BadInputError` where it cannot be imported, or is another than we know."""
    try:
        return importlib.import_module(f"gaffer_dagster.adapter.{name}")
    except Exception as error:
        raise BadInputError(f"Dagster cannot be used here: {db.primary_message(error)}; {_CURE}") from None


def of_dagster(slots: dict[str, int]) -> Sequence[Check]:
    """Whatever is the matter with Dagster, it is one check, and the others are shown."""
    try:
        return adapter("instance").examine(slots)
    except BadInputError as error:
        return [Check("dagster", "installed", Mark.WRONG, *told(error))]
    except Exception as error:
        found = f"it cannot be looked at: {db.primary_message(error)}"
        return [Check("dagster", "installed", Mark.WRONG, found, _CURE)]


def code_of(checks: Sequence[Check]) -> int:
    away = any(each.name == engine.UNREACHABLE and each.mark is Mark.WRONG for each in checks)
    return _AWAY if away else _CODES[worst(checks)]


def show(checks: Iterable[Check], *, as_json: bool) -> None:
    found = list(checks)
    counts = Counter(check.mark for check in found)
    if as_json:
        tell(found)
        return
    width = max((len(check.name) for check in found), default=0)
    for part, each in groupby(found, key=lambda check: check.part):
        click.echo(click.style(part, bold=True))
        for check in each:
            mark = click.style(f"{check.mark!s:13}", fg=_COLOURS[check.mark])
            click.echo(f"  {mark} {printable(check.name):{width}}  {printable(check.found)}")
            if check.cure is not None and check.mark is not Mark.OK:
                lines = [printable(line) for line in check.cure.splitlines()]
                arrow = f"  {'':13} {'':{width}}  →"
                # Several are to be pasted as they are.
                click.echo(f"{arrow} {lines[0]}" if len(lines) == 1 else "\n".join([arrow, *lines]))
    click.echo(
        f"{counted(len(found), 'check')}: " + ", ".join(f"{counts[mark]} {mark}" for mark in Mark if counts[mark])
    )
