"""`gaffer prune`: old history is removed, while everybody is at work."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta

import click

from gaffer_dagster.cli.command import Risky, confirm, opened, show_time
from gaffer_dagster.cli.process import signals
from gaffer_dagster.domain.amount import counted
from gaffer_dagster.domain.duration import as_duration, in_words
from gaffer_dagster.errors import BadInputError
from gaffer_dagster.store import prune as store
from gaffer_dagster.store.operations import Operator

_LEAST, _MOST = timedelta(days=1), timedelta(days=36_500)


@click.command(cls=Risky)
@click.option("--older-than", default="90d", show_default=True, metavar="DURATION", help="What is kept at least.")
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
def prune(older_than: str, dry_run: bool, operator: Operator) -> None:
    """Remove old runs, and incidents that are over, with the notices of them that were delivered.

    What stays, whatever its age: runs at work; the newest hundred of each job; everything since the oldest incident
    that is open; incidents that somebody is still to be told of; who did what (gaffer audit); and every schedule that a
    job had. It may be ended at any moment, and goes on when it is called again.
    """
    age = as_duration(older_than, "--older-than", timedelta.max)
    if not _LEAST <= age <= _MOST:
        raise BadInputError(
            f"--older-than {older_than!r} is too short or too long; give a duration from {in_words(_LEAST)} to 36500d"
        )
    with signals(), opened() as connection:
        before = store.before(connection, age)
        runs, alerts = store.runs(connection, before), store.alerts(connection, before)
        for job, count in runs.items():
            click.echo(f"{job}: {counted(count, 'run')} of before {show_time(before)}")
        click.echo(f"{counted(sum(runs.values()), 'run')} and {counted(alerts, 'incident')} can be removed")
        if dry_run or not (runs or alerts):
            return
        confirm("Remove them for good?")
        action = store.begin(connection, before, operator)
        gone = over = 0
        with _bar(sum(runs.values()) + alerts) as advance:
            for job in runs:
                removed = 0
                for page in store.remove_runs(connection, action, job, before):
                    removed += page
                    advance(page)
                gone += removed
                if not sys.stderr.isatty():
                    click.echo(f"{job}: {counted(removed, 'run')} removed")
            for page, _ in store.remove_alerts(connection, action, before):
                over += page
                advance(page)
    click.echo(f"removed: {counted(gone, 'run')} and {counted(over, 'incident')}")


@contextmanager
def _bar(total: int) -> Generator[Callable[[int], None]]:
    """How far it is, where somebody looks at it as it comes."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console  # takes long to load
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task("removing", total=total)
        yield lambda more: shown.advance(task, more)
