"""`gaffer audit`: who did what, when, and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

import click

from gaffer_dagster.cli.command import (
    Read,
    Table,
    complete_jobs,
    limit_option,
    opened,
    show_time,
    tell,
)
from gaffer_dagster.domain.amount import counted
from gaffer_dagster.engine.watermark import said
from gaffer_dagster.store import jobs, operations
from gaffer_dagster.store.operations import Action


@click.command(cls=Read)
@click.argument("of", metavar="[JOB]", required=False, shell_complete=complete_jobs)
@limit_option(20)
def audit(of: str | None, limit: int, as_json: bool) -> None:
    """Who did what to JOB (or a table, or a watch), or to anything, when, and why; the newest first.

    Each change of this command is kept, and whatever was written to a protected table by hand.
    """
    with opened() as connection:
        found = operations.actions(connection, of, limit)
        if of is not None and not found:
            jobs.get(connection, of)
    if as_json:
        tell(found)
    elif found:
        table = Table("when", "who", "of", "what", "why")
        for action in found:
            who = f"{action.by} ({action.role})"
            table.add_row(show_time(action.at), who, _of(action), in_plain_words(action), action.reason or "-")
        table.print()
    else:
        click.echo("Nobody has changed anything yet." if of is None else f"Nobody has changed {of} yet.")


def _of(action: Action) -> str:
    if action.job is not None:
        return action.job
    told = next(
        (f"{kind} {action.details[kind]}" for kind in ("table", "watch", "pool") if kind in action.details), None
    )
    return told or "-"


def in_plain_words(action: Action) -> str:
    """What was done, in words; an action of a newer version, or whose details are not ours, by its name."""
    words = _WORDS.get(action.action)
    try:
        return action.action if words is None else words(action.details)
    except (KeyError, TypeError, ValueError):  # whoever runs jobs may note what he likes, and must not hide the others
        return action.action


def _time(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)


def _paused(of: Mapping[str, Any]) -> str:
    return "paused" if of.get("until") is None else f"paused until {show_time(_time(of['until']))}"


def _items(done: str) -> Callable[[Mapping[str, Any]], str]:
    def words(of: Mapping[str, Any]) -> str:
        keys = ", ".join(of["keys"][:5])
        return f"{counted(of['rows'], 'row')} {done}: {keys}{', …' if of['rows'] > 5 else ''}"

    return words


def _acked(of: Mapping[str, Any]) -> str:
    return f"knows of incident {of['alert']}" + (f" ({of['kind']})" if "kind" in of else "")


def _tested(of: Mapping[str, Any]) -> str:
    return f"sent a test message to {', '.join(of['receivers'])}" + (
        f"; it was not taken by {', '.join(of['failed'])}" if of["failed"] else ""
    )


def _moved(of: Mapping[str, Any]) -> str:
    return f"watermark moved: it was {said(of['from'], 'UTC')}, and then {said(of['to'], 'UTC')}"


def _adopted(of: Mapping[str, Any]) -> str:
    moved = "" if of["from"] == of["to"] else f", {_moved(of)}"
    return f"adopted after a restore, fences {of['gap']:,} ahead{moved}"


def _pruned(of: Mapping[str, Any]) -> str:
    return (
        f"pruned {counted(of['runs'], 'run')} and {counted(of['alerts'], 'incident')} of before "
        f"{show_time(_time(of['before']))}"
    )


_WORDS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "pause": _paused,
    "resume": lambda _: "resumed",
    "rename": lambda of: f"renamed; it was {of['from']}",
    "release": lambda of: f"lease of slot {of['slot']} taken from {of['owner']} (fence {of['fence']})",
    "retire": lambda _: "retired",
    "unretire": lambda _: "not retired any more, since it was registered again",
    "register": lambda of: "registered" + (" as a new job" if of.get("as_new") else ""),
    "ack": _acked,
    "mute": lambda of: f"muted until {show_time(_time(of['until']))}",
    "unmute": lambda _: "not muted any more",
    "test receivers": _tested,
    "retry items": _items("to be tried again"),
    "drop items": _items("dropped"),
    "set watermark": _moved,
    "adopt": _adopted,
    "protect": lambda of: f"table {of['table']} protected",
    "unprotect": lambda of: f"table {of['table']} not protected any more",
    "write": lambda of: f"protected table {of['table']} written outside a batch",
    "roles": lambda _: "rights of gaffer's roles set",
    "prepare": lambda of: f"table {of['table']} prepared",
    "migrate": lambda of: f"tables migrated to {max(of['migrations'])}",
    "prune": _pruned,
    "redo": lambda of: f"interval from {of['since']} to {of['until']} to be done once more",
    "pool": lambda of: (
        f"Dagster's pool {of['pool']} limited to {of['to']}"
        if of["to"] is not None
        else f"Dagster's pool {of['pool']} not limited any more"
    ),
}
