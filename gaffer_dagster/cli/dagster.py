"""`gaffer dagster sync`, `gaffer dagster check`: what Dagster's instance has to do with our jobs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from gaffer_dagster import database
from gaffer_dagster.cli.command import Read, Risky, confirm, tell
from gaffer_dagster.cli.definitions import jobs_in
from gaffer_dagster.cli.doctor import adapter, code_of, of_code, of_dagster, show
from gaffer_dagster.domain.amount import counted
from gaffer_dagster.domain.health import Check, Mark
from gaffer_dagster.errors import GafferError
from gaffer_dagster.store import db, jobs, migrate, operations
from gaffer_dagster.store.operations import Operator


@click.group()
def dagster() -> None:
    """Dagster's instance, which DAGSTER_HOME names."""


@dagster.command(cls=Read)
@of_code
def check(file: Path | None, module: str | None, as_json: bool) -> None:
    """What `gaffer doctor` says of Dagster, alone: storage, daemons, pools, switches, runs. Changes nothing.

    Exits 0 when all is well (or there are only warnings), 1 when something is wrong, 2 when it cannot tell.
    """
    try:
        slots, _, _ = _slots(file, module)
        checks: list[Check] = []
    except Exception as error:  # what can be told without knowing the jobs is told all the same
        said = str(error) if isinstance(error, GafferError) else db.primary_message(error)
        slots, checks = {}, [Check("dagster", "jobs", Mark.UNKNOWN, f"which there are cannot be told: {said}")]
    checks += of_dagster(slots)
    show(checks, as_json=as_json)
    sys.exit(code_of(checks))


@dagster.command(cls=Risky)
@of_code
@click.option("--json", "as_json", is_flag=True, help="One JSON object for each change.")
def sync(file: Path | None, module: str | None, as_json: bool, operator: Operator) -> None:
    """Let as many runs of each job work at once as it has slots, and the others wait: the limits of Dagster's pools.

    Of the jobs that the database knows, or of those that -f or -m defines. The pools of retired jobs lose their limit.
    Limits that are right are left alone, and it refuses where a limit would do harm (granularity other than `run`).
    """
    slots, retired, where = _slots(file, module)
    pools, instance = adapter("pools"), adapter("instance").open_instance()
    changes: list[Any] = pools.changes(instance, slots, retired)
    if changes:
        confirm(f"Change {', '.join(f'{each.pool} ({_shown(each)})' for each in changes)}?")
        _change(where, lambda: pools.change(instance, changes), changes, operator)
    if as_json:
        tell({"pool": each.pool, "before": each.before, "after": each.after} for each in changes)
        return
    for each in changes:
        click.echo(f"{each.pool}: {_shown(each)}")
    if not changes:
        click.echo(f"the pools of {counted(len(slots), 'job')} are as they should be")


def _change(where: str | GafferError, do: Callable[[], None], changes: Sequence[Any], operator: Operator) -> None:
    """What cannot be noted is not done, where there is a database to note it in."""
    if isinstance(where, GafferError):
        do()
        click.echo(f"gaffer: it is not noted who did it: {where}", err=True)
        return
    with db.connect(where, application_name="gaffer:dagster") as connection, connection.transaction():
        known = jobs.names(connection)
        for each in changes:
            details = {"pool": each.pool, "from": each.before, "to": each.after}
            operations.note(connection, each.job if each.job in known else None, "pool", operator, details)
        do()


def _shown(change: Any) -> str:
    before, after = ("no limit" if limit is None else str(limit) for limit in (change.before, change.after))
    return f"{before} → {after}"


def _slots(file: Path | None, module: str | None) -> tuple[dict[str, int], list[str], str | GafferError]:
    """How many runs of each job may be at work, the jobs that are retired, and the database, or why it cannot be asked.
    Raises where neither the code nor the database is there to say."""
    is_given = file is not None or module is not None
    found = {name: each.job.spec.slots for name, each in jobs_in(file, module).items()} if is_given else {}
    try:
        url = database.at_hand()
        with db.connect(url, application_name="gaffer:dagster") as connection:
            migrate.verify(connection)
            slots, retired = jobs.slots(connection)
    except GafferError as error:
        if not is_given:
            raise
        return found, [], error
    return (found, [], url) if is_given else (slots, retired, url)
