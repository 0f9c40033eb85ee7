"""`gaffer.job`: a job as last seen, and `gaffer.job_spec`: each spec it ever had."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime

from psycopg.rows import class_row
from psycopg.types.json import Jsonb

from gaffer_dagster.domain.close import meant
from gaffer_dagster.domain.job import JobRecord
from gaffer_dagster.domain.ledger import History, Pause, Period, open_tick
from gaffer_dagster.domain.spec import JobSpec, schedule_from_json
from gaffer_dagster.errors import UnknownJobError
from gaffer_dagster.store import db, history


@dataclass(frozen=True)
class Registration:
    """What is registered beside a job's spec. `work_hash`: see `domain.spec.work_hash`. `known`: the jobs that are
    defined together with it. `zone_data`: the version and the rules of its zone, as this process has them. `as_new`:
    though it does the work of a known job."""

    work_hash: str | None = None
    known: Collection[str] = ()
    zone_data: str | None = None
    as_new: bool = False


def register(connection: db.Connection, spec: JobSpec, registration: Registration) -> str | None:
    """Makes the job known as it is now; writes nothing when nothing changed. Returns the zone data of whoever
    registered it before, if they differ. Raises `RenamedJobError`."""
    with db.refusals():
        found = connection.execute(
            "select base_at, gaffer.clock(), next_due_at, schedule, paused_at, paused_until"
            " from gaffer.base_of_spec(%s, %s)",
            [spec.name, spec.hash],
        ).fetchone()
        assert found is not None  # noqa: S101 — one row by construction
        base, now, next_due_at, schedule, paused_at, paused_until = found
        # A tick that was due stays so; which one that is after a pause is told by the schedule that it is of.
        pause = None if paused_at is None else Pause(paused_at, paused_until)
        still_due_at = open_tick(next_due_at, schedule_from_json(schedule), pause)
        # What was skipped in a pause stays so, though the ticks since then are looked at anew.
        past = History([Period(base, spec.schedule)], history.pauses(connection, spec.name, base))
        next_due_at = past.next(base, now)
        row = connection.execute(
            "select gaffer.register(%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s)",
            [
                spec.name, Jsonb(spec.as_json()), spec.hash, registration.work_hash, registration.zone_data,
                spec.alerts.grace_for(spec.schedule), spec.slots, base, next_due_at, still_due_at,
                [spec.name, *registration.known], registration.as_new,
            ],
        ).fetchone()  # fmt: skip
    return None if row is None else row[0]


def hashes(connection: db.Connection, names: list[str]) -> dict[str, tuple[str, str | None, str | None]]:
    """The hashes of spec and work, and the zone data, under which each of these jobs is known and not retired."""
    rows = connection.execute(
        "select name, spec_hash, work_hash, zone_data from gaffer.job where name = any(%s) and retired_at is null",
        [names],
    ).fetchall()
    return {name: (spec_hash, work_hash, zone_data) for name, spec_hash, work_hash, zone_data in rows}


@dataclass(frozen=True)
class Wanted:
    """A job whose next run is wanted without waiting for a tick. `since`: from when on; `key`: names the cause."""

    job: str
    why: str
    since: datetime
    now: datetime
    key: str


def wanted(connection: db.Connection, names: list[str]) -> list[Wanted]:
    """Of these jobs, the ones that asked to be followed up, or whose holder is dead; nobody is at work on them."""
    with connection.cursor(row_factory=class_row(Wanted)) as cursor:
        return cursor.execute(
            """
            select job, why, least(since, now) as since, now, pg_catalog.format('%%s:%%s:%%s', job, fence, since) as key
              from (select j.name as job, l.fence, gaffer.clock() as now,
                           coalesce(l.dead_since, j.follow_up_at) as since,
                           case when l.dead_since is not null then 'the run before is dead'
                                else 'the run before left something to do' end as why,
                           l.is_held
                      from gaffer.job j
                      join lateral (
                          select sum(fence) as fence,
                                 min(lease_until) filter (where is_dead) as dead_since,
                                 pg_catalog.bool_and(lease_id is not null and not is_dead) as is_held
                            from (select *, lease_id is not null
                                            and (lease_until <= gaffer.clock()
                                                 or gaffer.is_gone(holder_pid, holder_began_at)) as is_dead
                                    from gaffer.job_lease where job = j.name and slot < j.slots) as each_slot) l on true
                     where j.name = any(%s)
                       and (j.paused_at is null or j.paused_until <= gaffer.clock())) as each_job
             where (since <= now or why = 'the run before is dead') and not is_held
             order by since, job
            """,
            [names],
        ).fetchall()


def status(connection: db.Connection, job: str | None = None) -> list[JobRecord]:
    """Every job (or this one), with its lease and what its newest run said."""
    with connection.cursor(row_factory=class_row(JobRecord)) as cursor:
        return cursor.execute(
            """
            select j.name, j.spec, j.spec_hash, j.first_seen_at,
                   j.paused_at, j.paused_until, j.paused_by, j.pause_reason, j.muted_until, j.retired_at,
                   j.covered_until, j.last_success_at, j.last_success_tick, j.consecutive_failures, j.next_due_at,
                   j.follow_up_at, l.fence, gaffer.clock() as seen_at,
                   case when l.lease_id is not null then l.owner end as owner,
                   case when l.lease_id is not null then l.lease_until end as lease_until,
                   r.outcome as last_outcome, r.started_at as last_started_at, r.backlog,
                   w.position as watermark, w.job is null as watermark_lost,
                   j.held_since, j.held_by, j.held_by_since, j.pruned_until
              from gaffer.job j
              join lateral (select * from gaffer.job_lease where job = j.name
                             order by lease_id is null, lease_until desc, slot limit 1) l on true
              left join gaffer.job_watermark w on w.job = j.name
              left join lateral (
                  select newest.*
                    from gaffer.job_lease s
                   cross join lateral (
                         select id, outcome, started_at, backlog from gaffer.job_runs
                          where job = s.job and slot = s.slot and outcome not in ('busy', 'paused', 'late')
                            and trigger <> 'redo'
                          order by id desc limit 1) newest
                   where s.job = j.name
                   order by newest.id desc limit 1) r on true
             where %(job)s::text is null or j.name = %(job)s
             order by j.name
            """,
            {"job": job},
        ).fetchall()


def names(connection: db.Connection) -> list[str]:
    """Of every job that is known."""
    return [name for (name,) in connection.execute("select name from gaffer.job order by name")]


def find(connection: db.Connection, job: str) -> JobRecord | None:
    found = status(connection, job)
    return found[0] if found else None


def get(connection: db.Connection, job: str) -> JobRecord:
    """Raises `UnknownJobError`."""
    found = find(connection, job)
    if found is None:
        raise UnknownJobError(
            f"no job {job!r} is known to this database{meant(job, names(connection))} (see: gaffer status); a job is "
            "made known by its first run, by Dagster's sensor, or by: gaffer register"
        )
    return found


def cluster(connection: db.Connection, job: str) -> str | None:
    """Which cluster counted the job's watermark, where it is in numbers of transactions."""
    row = connection.execute("select cluster from gaffer.job_watermark where job = %s", [job]).fetchone()
    return None if row is None else row[0]


def slots(connection: db.Connection) -> tuple[dict[str, int], list[str]]:
    """How many runs of each job may be at work side by side; and the jobs that are retired."""
    rows = connection.execute("select name, slots, retired_at is null from gaffer.job order by name").fetchall()
    return {name: count for name, count, is_meant in rows if is_meant}, [
        name for name, _, is_meant in rows if not is_meant
    ]
