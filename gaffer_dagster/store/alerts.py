"""`gaffer.watch` and `gaffer.alert`: who looks for silence, and the incidents that were found."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from psycopg.rows import class_row, dict_row
from psycopg.types.json import Jsonb
from typing_extensions import LiteralString

from gaffer_dagster.domain.incident import Alert, Step, Stretch, Watch, Watched
from gaffer_dagster.store import db


def begin_pass(connection: db.Connection, watch: str, every: timedelta | None, jobs: Sequence[str]) -> datetime | None:
    """The time of the pass, which lasts as long as the transaction. None: another pass is going on. Raises
    `WatchHeldError` where one has been for longer than a pass takes."""
    with db.refusals():
        row = connection.execute("select gaffer.begin_pass(%s, %s, %s)", [watch, every, sorted(jobs)]).fetchone()
    return None if row is None else row[0]


def watched(connection: db.Connection, now: datetime, job: str | None = None) -> list[Watched]:
    """The jobs (or this one) with which something may be wrong, or was: by their rows alone, whatever the history."""
    with connection.cursor(row_factory=dict_row) as cursor:
        rows = cursor.execute(
            """
            select j.name as job, j.xmin::text as row, j.spec, j.grace, j.first_seen_at, j.rules_at,
                   j.paused_at, j.paused_until, j.paused_by, j.pause_reason, j.next_due_at, j.late_tick, j.paused,
                   j.worked, j.last_success_at, j.consecutive_failures, j.failed_at, j.consecutive_capped, j.capped_at,
                   j.due_since, j.held_since, j.held_by ->> 'who' as held_by, j.held_by ->> 'cure' as held_cure,
                   j.held_by_since, j.parked, j.parked_at, j.taken_over_at, j.returned_at, j.vanished_at, j.retired_at,
                   r.started_at as at_work_since, r.lease_until as held_until
              from gaffer.job j
              left join lateral (
                  select r.started_at, l.lease_until
                    from gaffer.job_runs r
                    left join gaffer.job_lease l on l.job = r.job and l.slot = r.slot and l.lease_id = r.lease_id
                   where r.job = j.name and r.outcome = 'running'
                   order by r.started_at limit 1) r on true
             where (%(job)s::text is null or j.name = %(job)s)
               and ((j.retired_at is null
                    and (coalesce(j.late_tick, j.next_due_at) + j.grace <= %(now)s or j.paused_at is not null
                         or j.consecutive_failures > 0 or j.consecutive_capped > 0 or j.due_since is not null
                         or j.held_since is not null or j.parked > 0 or j.taken_over_at <> '{}'
                         or j.returned_at <> '{}' or j.vanished_at is not null))
                or exists (select from gaffer.alert a where a.job = j.name and a.resolved_at is null))
             order by j.name
            """,
            {"now": now, "job": job},
        ).fetchall()
    return [_watched(row) for row in rows]


def _watched(row: dict[str, Any]) -> Watched:
    paused, worked = (_stretches(row.pop(name)) for name in ("paused", "worked"))
    return Watched(paused=paused, worked=worked, **row)


def _stretches(ranges: list[Any]) -> list[Stretch]:
    return [Stretch(each.lower, each.upper) for each in ranges]


def watches(connection: db.Connection) -> list[Watch]:
    with connection.cursor(row_factory=class_row(Watch)) as cursor:
        return cursor.execute("select name, every, last_pass_at from gaffer.watch order by name").fetchall()


def gaps(connection: db.Connection) -> list[Stretch]:
    """When nobody looked, in order, as far as it matters for a tick that some job waits for."""
    rows = connection.execute(
        """
        select since_at, until_at from gaffer.watch_gap
         where until_at > (select min(coalesce(late_tick, next_due_at)) from gaffer.job where retired_at is null)
         order by until_at, id
        """
    ).fetchall()
    return [Stretch(since, until) for since, until in rows]


_SELECT: LiteralString = """
    select id, key, job, watch, kind, severity, since_at, opened_at, details, reminders, reminded_at,
           acked_at, acked_by, ack_reason, resolved_at
      from gaffer.alert
"""


def opened(connection: db.Connection) -> list[Alert]:
    """The incidents that are open, in the order in which they became true."""
    with connection.cursor(row_factory=class_row(Alert)) as cursor:
        return cursor.execute(_SELECT + "where resolved_at is null order by since_at, id").fetchall()


def newest(connection: db.Connection, limit: int) -> list[Alert]:
    """Open or not, the newest first."""
    with connection.cursor(row_factory=class_row(Alert)) as cursor:
        return cursor.execute(_SELECT + "order by id desc limit %s", [limit]).fetchall()


def note(connection: db.Connection, now: datetime, steps: Sequence[Step]) -> list[Alert]:
    """Does these, except where a job's row has changed since it was judged; returns what was done."""
    if not steps:
        return []
    given = [
        {
            "alert": step.alert,
            "verb": str(step.verb),
            "job": step.job,
            "watch": step.watch,
            "row": step.row,
            "kind": str(step.kind),
            "severity": str(step.kind.severity),
            "since_at": step.since.isoformat(),
            "details": step.details,
        }
        for step in steps
    ]
    with connection.cursor(row_factory=class_row(Alert)) as cursor:
        return cursor.execute(
            """
            select * from gaffer.note_incidents(%s, array(
                select i from pg_catalog.jsonb_populate_recordset(null::gaffer.incident, %s) i))
            """,
            [now, Jsonb(given)],
        ).fetchall()


def mutes(connection: db.Connection) -> dict[str, datetime]:
    """The jobs that are muted now, and until when."""
    return dict(
        connection.execute("select name, muted_until from gaffer.job where muted_until > gaffer.clock()").fetchall()
    )


def count_jobs(connection: db.Connection) -> int:
    """Of those that are meant to run."""
    row = connection.execute("select count(*) from gaffer.job where retired_at is null").fetchone()
    assert row is not None  # noqa: S101 — one row by construction
    return row[0]
