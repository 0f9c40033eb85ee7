"""`gaffer.job_lease`: who may write for a job.

One row for each job and slot. The fence only grows, and with `lease_id` it names one acquisition for ever; whoever
matches both, under a row lock, in the transaction that carries his writes, is the one writer.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from uuid import UUID

from psycopg.rows import class_row
from psycopg.types.range import TimestamptzRange

from gaffer_dagster.domain.due import Window
from gaffer_dagster.domain.lease import Grant, Held, Lease
from gaffer_dagster.errors import UnknownJobError
from gaffer_dagster.store import db

# Bounds the wait for a row that a stopped client may hold; the server's own timeouts free it later.
_PATIENCE = "10s"


def acquire(
    connection: db.Connection,
    *,
    job: str,
    slot: int,
    lease_id: UUID,
    owner: str,
    lease: timedelta,
    timeout: timedelta,
    trigger: str,
    tick: datetime | None,
    next_tick: datetime | None,
    dagster_run_id: str | None,
    spec_hash: str,
    zone_data: str | None,
    wait: timedelta,
    max_late: timedelta | None,
    redo: Window | None,
    despite_pause: bool,
    refusal: str | None,
) -> Grant:
    """Takes the lease, or says why not (and skips the ticks up to `tick`, where that is what it means).

    The same call with the same `lease_id` gives the same answer.
    """
    with connection.cursor(row_factory=class_row(Grant)) as cursor, db.refusals():
        cursor.execute(
            db.BEGIN + "set local statement_timeout = '15s';"  # noqa: S608 — literals
            " select * from gaffer.acquire(%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s);"
            " commit",
            [
                job, slot, lease_id, owner, lease, timeout, trigger, tick, next_tick, dagster_run_id, spec_hash,
                zone_data, wait, max_late, None if redo is None else TimestamptzRange(redo.since, redo.until),
                despite_pause, refusal,
            ],
        )  # fmt: skip
        return db.committed(cursor)


def slots(connection: db.Connection, job: str, lease_id: UUID) -> list[int]:
    """The job's slots, in the order in which to ask for them: one that this lease has already, then those that look
    free. Any of them may be taken meanwhile."""
    found = connection.execute(
        """
        select slot from gaffer.job_lease l join gaffer.job j on j.name = l.job
         where job = %s and slot < j.slots
         order by lease_id is not distinct from %s desc, lease_id is null or lease_until <= gaffer.clock() desc, slot
        """,
        [job, lease_id],
    )
    return [slot for (slot,) in found]


def held(connection: db.Connection, job: str, slot: int | None) -> list[Held]:
    """Who holds the job's lease, in this slot or in any. Raises `UnknownJobError` for a slot that it has not."""
    slots = [
        number
        for (number,) in connection.execute("select slot from gaffer.job_lease where job = %s order by slot", [job])
    ]
    if slot is not None and slot not in slots:
        raise UnknownJobError(f"job {job!r} has no slot {slot}; it has those from 0 to {slots[-1]}")
    with connection.cursor(row_factory=class_row(Held)) as cursor:
        return cursor.execute(
            """
            select slot, fence, owner, lease_until from gaffer.job_lease
             where job = %(job)s and lease_id is not null and (%(slot)s::integer is null or slot = %(slot)s)
             order by slot
            """,
            {"job": job, "slot": slot},
        ).fetchall()


def renew(connection: db.Connection, lease: Lease, duration: timedelta) -> bool:
    """False: another run took over, nothing of this one can be committed any more. While this connection is there,
    nobody takes the holder for dead before its lease is over; once it is gone, somebody may soon."""
    row = connection.execute(
        "select gaffer.renew(%s, %s, %s, %s, %s, %s)",
        [lease.job, lease.slot, lease.fence, lease.lease_id, duration, connection.info.backend_pid],
    ).fetchone()
    return bool(row and row[0])


def lost(connection: db.Connection, lease: Lease) -> str:
    """What to say where the lease is lost: who took it, and what becomes of the work."""
    row = connection.execute(
        "select gaffer.lost_lease(%s, %s, %s, %s)", [lease.job, lease.slot, lease.fence, lease.lease_id]
    ).fetchone()
    return row[0] if row else ""


def supersede(connection: db.Connection, lease: Lease, new_lease_id: UUID, duration: timedelta) -> Grant:
    """Exchanges the fence for the next one, waiting for whatever still holds the row."""
    with connection.cursor(row_factory=class_row(Grant)) as cursor, db.refusals():
        cursor.execute(
            db.BEGIN + f"set local statement_timeout = '{_PATIENCE}';"  # noqa: S608 — literals
            " select * from gaffer.supersede(%s, %s, %s, %s, %s, %s, %s); commit",
            [lease.job, lease.slot, lease.fence, lease.lease_id, lease.run_id, new_lease_id, duration],
        )
        return db.committed(cursor)
