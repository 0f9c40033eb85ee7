"""What is removed of old history, and what stays (migrations/0012_prune.sql)."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta

from gaffer_dagster.store import db
from gaffer_dagster.store.operations import Operator

_PAGE = 1_000


def before(connection: db.Connection, older_than: timedelta) -> datetime:
    """So long ago, by the database's clock."""
    row = connection.execute("select gaffer.clock() - %s::interval", [older_than]).fetchone()
    assert row is not None  # noqa: S101 — one row by construction
    return row[0]


def runs(connection: db.Connection, before: datetime) -> dict[str, int]:
    """How many runs of each job can go; without the jobs that have none."""
    rows = connection.execute(
        """
        select j.name, old.runs
          from gaffer.job j
         cross join lateral (select count(*) as runs from gaffer.prunable_runs(j.name, %s)) old
         where old.runs > 0
         order by j.name
        """,
        [before],
    ).fetchall()
    return dict(rows)


def alerts(connection: db.Connection, before: datetime) -> int:
    """How many incidents can go."""
    row = connection.execute("select count(*) from gaffer.prunable_alerts(%s)", [before]).fetchone()
    assert row is not None  # noqa: S101 — one row by construction
    return row[0]


def begin(connection: db.Connection, before: datetime, operator: Operator) -> int:
    """Notes it for `gaffer audit`; the number of that row, which each step adds to."""
    with db.refusals():
        row = connection.execute(
            "select gaffer.begin_prune(%s, %s, %s)", [before, operator.by, operator.reason]
        ).fetchone()
    assert row is not None  # noqa: S101 — one row by construction
    return row[0]


def remove_runs(connection: db.Connection, action: int, job: str, before: datetime) -> Iterator[int]:
    """Removes them page by page, each in a transaction of its own; how many there were in each."""
    after_at, after = "-infinity", 0
    while after is not None:
        with db.impatient(connection):
            removed, after_at, after = connection.execute(
                "select removed, last_at::text, last from gaffer.prune_runs(%s, %s, %s, %s, %s, %s)",
                [action, job, before, after_at, after, _PAGE],
            ).fetchone() or (0, None, None)
        yield removed


def remove_alerts(connection: db.Connection, action: int, before: datetime) -> Iterator[tuple[int, int]]:
    """The same with incidents and their notices; how many of each there were in each page."""
    while True:
        with db.impatient(connection):
            found = connection.execute(
                "select alerts, deliveries from gaffer.prune_alerts(%s, %s, %s)", [action, before, _PAGE]
            ).fetchone() or (0, 0)
        if not found[0]:
            return
        yield found
