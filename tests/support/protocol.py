"""The protocol of the line, spoken step by step: what the engine does in one go, a test does between two others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

from gaffer_dagster.domain.lease import Grant, Lease
from gaffer_dagster.domain.run import Outcome
from gaffer_dagster.domain.spec import JobSpec
from gaffer_dagster.domain.watermark import Position
from gaffer_dagster.store import batches, db, leases, runs
from gaffer_dagster.store import jobs as job_table
from tests.support import jobs

PARK = """
    with of as (select %s::bigint as rows, %s::uuid as lease_id),
    parked as (
        insert into gaffer.job_item
        select job, id || '/' || n, 5, gaffer.clock(), gaffer.clock(), gaffer.clock(), null, 'bad', gaffer.clock()
          from gaffer.job_runs r, of, generate_series(1, of.rows) as n
         where outcome = 'running' and r.lease_id = coalesce(of.lease_id, r.lease_id))
    update gaffer.job_runs r set parked = of.rows
      from of where outcome = 'running' and r.lease_id = coalesce(of.lease_id, r.lease_id)
"""
"""A batch of the run that is at work gave up so many rows."""


def until(what: Callable[[], Any], *, within: float = 30, pause: float = 0.02) -> Any:
    """Polls until `what` is true; what it then is."""
    deadline = time.monotonic() + within
    while not (found := what()):
        assert time.monotonic() < deadline, f"not within {within} s"
        time.sleep(pause)
    return found


class Actor(threading.Thread):
    """Does something beside the test; `result()` waits for it, and raises what it raised."""

    def __init__(self, what: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._what = what
        self._answer: Any = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._answer = self._what()
        except BaseException as error:
            self._error = error

    def result(self, within: float = 60) -> Any:
        self.join(within)
        assert not self.is_alive(), f"not done within {within} s"
        if self._error is not None:
            raise self._error
        return self._answer


def all_at_once(count: int, what: Callable[[int], Any]) -> list[Any]:
    """`what(0)`, `what(1)`, … in threads that start together."""
    together = threading.Barrier(count)

    def one(number: int) -> Any:
        together.wait(60)
        return what(number)

    return [actor.result() for actor in [Actor(lambda number=number: one(number)) for number in range(count)]]


@contextmanager
def session(url: str) -> Iterator[db.Connection]:
    """A connection as the engine has it."""
    connection = db.connect(url, application_name="test")
    try:
        yield connection
    finally:
        connection.close()


def register(connection: db.Connection, spec: JobSpec) -> None:
    job_table.register(connection, spec, job_table.Registration())


@dataclass(frozen=True)
class Attempt:
    """What became of one acquire."""

    grant: Grant
    lease_id: UUID
    job: str

    @property
    def lease(self) -> Lease:
        assert self.grant.run_id is not None
        assert self.grant.fence is not None
        return Lease(self.job, 0, self.grant.run_id, self.grant.fence, self.lease_id)


def acquire(
    connection: db.Connection,
    spec: JobSpec,
    *,
    lease_id: UUID | None = None,
    lease: float = 60,
    wait: float = 0,
    timeout: float = 300,
    tick: datetime | None = None,
    owner: str = "host:1:owner",
    despite_pause: bool = False,
    **given: Any,
) -> Attempt:
    lease_id = lease_id or uuid4()
    grant = leases.acquire(
        connection,
        job=spec.name,
        slot=0,
        lease_id=lease_id,
        owner=owner,
        lease=timedelta(seconds=lease),
        timeout=timedelta(seconds=timeout),
        tick=tick,
        dagster_run_id=None,
        spec_hash=spec.hash,
        wait=timedelta(seconds=wait),
        despite_pause=despite_pause,
        **({"trigger": "schedule"} | dict.fromkeys(("next_tick", "zone_data", "max_late", "redo", "refusal")) | given),
    )
    return Attempt(grant, lease_id, spec.name)


def begin(connection: db.Connection, *, timeout: float = 60) -> UUID:
    batch = uuid4()
    batches.begin(connection, batch, timedelta(seconds=timeout))
    return batch


def commit(
    connection: db.Connection, lease: Lease, batch: UUID, *, since: Position | None, until: Position, items: int = 1
) -> datetime:
    return batches.commit(
        connection,
        lease,
        batch,
        since=since,
        until=until,
        cluster=None,
        items=items,
        duration=timedelta(seconds=60),
    )


def end(connection: db.Connection, lease: Lease, outcome: Outcome = Outcome.SUCCEEDED, **given: Any) -> runs.Ending:
    fields: dict[str, Any] = {
        "wanted_at": None,
        "covered_until": None,
        "success_tick": None,
        "ticks_covered": None,
        "backlog": None,
        "next_run_at": None,
        "next_due_at": None,
        "follow_up_at": None,
        "oldest_due_at": None,
        "held_by": None,
        "sqlstate": None,
        "error": None,
    }
    return runs.end(connection, lease, outcome, **(fields | given))


def expire(url: str, job: str = "copy_rows") -> None:
    """As if the holder had been silent for the length of its lease."""
    jobs.execute(url, "update gaffer.job_lease set lease_until = 'epoch' where job = %s", job)


def freeze(url: str, at: datetime | str) -> None:
    """From now on it is `at` in this database, to the microsecond, for ever."""
    jobs.execute(
        url,
        "create or replace function gaffer.clock() returns timestamptz language sql volatile"
        f" set search_path = pg_catalog, pg_temp as $$ select timestamptz '{at}' $$",
    )


def lease_row(url: str, job: str = "copy_rows") -> tuple[Any, ...]:
    """Fence, lease_id, owner, lease_until."""
    return jobs.query(url, "select fence, lease_id, owner, lease_until from gaffer.job_lease where job = %s", job)[0]


def outcomes(url: str, job: str = "copy_rows") -> list[str]:
    """How each run ended, the oldest first."""
    return [row[0] for row in jobs.query(url, "select outcome from gaffer.job_runs where job = %s order by id", job)]


def waits_for_a_lock(url: str, count: int = 1) -> bool:
    found = jobs.query(
        url,
        "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'",
    )
    return found[0][0] >= count
