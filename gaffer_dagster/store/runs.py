"""`gaffer.job_runs`: one row for each attempt that reached the database."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime

from psycopg.rows import class_row
from psycopg.types.json import Jsonb
from typing_extensions import LiteralString

from gaffer_dagster.domain.held import HeldBy
from gaffer_dagster.domain.lease import Lease
from gaffer_dagster.domain.run import Outcome, RunRecord
from gaffer_dagster.store import db


@dataclass(frozen=True)
class Ending:
    """`result`: ended; wanted (a wake-up came since `wanted_at` was read: look again); lost_lease."""

    result: str
    wanted_at: datetime | None


def end(
    connection: db.Connection,
    lease: Lease,
    outcome: Outcome,
    *,
    wanted_at: datetime | None,
    covered_until: datetime | None,
    success_tick: datetime | None,
    ticks_covered: int | None,
    backlog: int | None,
    next_run_at: datetime | None,
    next_due_at: datetime | None,
    follow_up_at: datetime | None,
    oldest_due_at: datetime | None,
    held_by: HeldBy | None,
    sqlstate: str | None,
    error: str | None,
    batches: int | None = None,
) -> Ending:
    """Ends the run and frees its lease, if its fence is current. Repeating the call is safe.

    `batches`: so many were acknowledged. Raises `LeaseLostError` where the run would end as if all were done, and the
    database has fewer of them.
    """
    with connection.cursor(row_factory=class_row(Ending)) as cursor, db.refusals():
        cursor.execute(
            db.BEGIN + "set local statement_timeout = '10s'; select * from"
            " gaffer.end_run(%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s); commit",
            [
                lease.job, lease.slot, lease.fence, lease.lease_id, lease.run_id, str(outcome), wanted_at,
                covered_until, success_tick, ticks_covered, backlog, next_run_at, next_due_at, follow_up_at,
                oldest_due_at, None if held_by is None else Jsonb(asdict(held_by)), sqlstate, error, batches,
            ],
        )  # fmt: skip
        return db.committed(cursor)


_SELECT: LiteralString = """
    select id, job, slot, outcome, trigger, tick, started_at, deadline_at, ended_at, fence, owner, batches, items,
           parked, watermark_from, watermark_to, ticks_covered, backlog, next_run_at, held_by, held_by_since,
           sqlstate, error, dagster_run_id,
           pg_catalog.lower(redo) as redo_since, pg_catalog.upper(redo) as redo_until
      from gaffer.job_runs
"""


def get(connection: db.Connection, run_id: int) -> RunRecord:
    with connection.cursor(row_factory=class_row(RunRecord)) as cursor:
        row = cursor.execute(_SELECT + "where id = %s", [run_id]).fetchone()
    if row is None:
        raise LookupError(f"run {run_id} is not in gaffer.job_runs")
    return row


@dataclass(frozen=True)
class VersionRun:
    """The newest run of a version of a job's definition on a host. `cron`: of its schedule, as text."""

    spec_hash: str
    cron: str | None
    run_id: int
    started_at: datetime
    owner: str
    dagster_run_id: str | None


def of_versions(connection: db.Connection, job: str) -> list[VersionRun]:
    """Who ran a job, of which two versions have taken turns within the last day; else nothing."""
    with connection.cursor(row_factory=class_row(VersionRun)) as cursor:
        return cursor.execute(
            """
            select distinct on (r.spec_hash, pg_catalog.split_part(r.owner, ':', 1))
                   r.spec_hash, s.cron, r.id as run_id, r.started_at, r.owner, r.dagster_run_id
              from (select * from gaffer.job_runs where job = %(job)s order by id desc limit 200) r
              join gaffer.job j on j.name = r.job
              left join lateral (select spec -> 'schedule' ->> 'cron' as cron from gaffer.job_spec
                                  where job = r.job and spec_hash = r.spec_hash order by id desc limit 1) s on true
             where j.returned_at[pg_catalog.cardinality(j.returned_at)] > gaffer.clock() - interval '1 day'
             order by r.spec_hash, pg_catalog.split_part(r.owner, ':', 1), r.id desc
             limit 10
            """,
            {"job": job},
        ).fetchall()


def history(connection: db.Connection, job: str | None, limit: int) -> list[RunRecord]:
    """The newest runs first, of one job or of all."""
    with connection.cursor(row_factory=class_row(RunRecord)) as cursor:
        return cursor.execute(
            _SELECT + "where %(job)s::text is null or job = %(job)s order by id desc limit %(limit)s",
            {"job": job, "limit": limit},
        ).fetchall()


def at_work(connection: db.Connection, job: str) -> list[RunRecord]:
    """The runs of a job that have not ended, for all that is known."""
    with connection.cursor(row_factory=class_row(RunRecord)) as cursor:
        return cursor.execute(_SELECT + "where job = %s and outcome = 'running' order by slot", [job]).fetchall()


def found_dead_by(connection: db.Connection, record: RunRecord) -> list[RunRecord]:
    """The runs that this one ended when it took their lease, as far as they are among the newest hundred of the job."""
    return [
        each
        for each in history(connection, record.job, 100)
        if each.outcome is Outcome.ABANDONED and each.slot == record.slot and each.id < record.id
        if each.ended_at is not None and each.ended_at >= record.started_at
    ]


def unreported(connection: db.Connection, dagster_run_ids: Sequence[str]) -> list[RunRecord]:
    """Of these runs of Dagster's the ones that committed something and ended well, if nobody else has reported them."""
    with connection.cursor(row_factory=class_row(RunRecord)) as cursor:
        return cursor.execute(
            _SELECT
            + """
             where dagster_run_id = any(%s) and batches > 0 and outcome in ('succeeded', 'partial', 'capped')
               and reported_at is null
             order by id
            """,
            [list(dagster_run_ids)],
        ).fetchall()


def ended_badly(connection: db.Connection, lease: Lease) -> bool:
    """The run before in this slot was cut off in the middle of a batch, for all that is known."""
    row = connection.execute(
        """
        select outcome in ('abandoned', 'timed_out', 'lost_lease') from gaffer.job_runs
         where job = %s and slot = %s and id < %s and outcome not in ('busy', 'paused', 'late') and trigger <> 'redo'
         order by id desc limit 1
        """,
        [lease.job, lease.slot, lease.run_id],
    ).fetchone()
    return bool(row and row[0])
