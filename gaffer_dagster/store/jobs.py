"""`gaffer.job`: a job as last seen, and `gaffer.job_spec`: each spec it ever had."""

from __future__ import annotations

from datetime import datetime

from psycopg.rows import class_row
from psycopg.types.json import Jsonb

from gaffer_dagster.domain.run import JobRecord
from gaffer_dagster.domain.spec import JobSpec
from gaffer_dagster.store import db


def register(connection: db.Connection, spec: JobSpec, *, next_due_at: datetime | None) -> None:
    """Makes the job known as it is now; writes nothing when nothing changed."""
    with db.refusals():
        connection.execute(
            "select gaffer.register(%s, %s, %s, %s, %s)",
            [spec.name, Jsonb(spec.as_json()), spec.hash, spec.slots, next_due_at],
        )


def status(connection: db.Connection, job: str | None = None) -> list[JobRecord]:
    """Every job (or this one), with its lease and what its newest run said."""
    with connection.cursor(row_factory=class_row(JobRecord)) as cursor:
        return cursor.execute(
            """
            select j.name, j.first_seen_at, j.paused_at, j.paused_until, j.paused_by, j.last_success_at,
                   j.last_success_tick, j.consecutive_failures, j.next_due_at, l.fence,
                   case when l.lease_id is not null then l.owner end as owner,
                   case when l.lease_id is not null then l.lease_until end as lease_until,
                   r.outcome as last_outcome, r.backlog, w.position as watermark
              from gaffer.job j
              join gaffer.job_lease l on l.job = j.name and l.slot = 0
              join gaffer.job_watermark w on w.job = j.name
              left join lateral (select outcome, backlog from gaffer.job_runs
                                  where job = j.name and outcome not in ('busy', 'paused', 'late')
                                  order by started_at desc limit 1) r on true
             where %(job)s::text is null or j.name = %(job)s
             order by j.name
            """,
            {"job": job},
        ).fetchall()
