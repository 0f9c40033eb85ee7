"""Who goes through the gate: a run by the functions of `store` alone, one of the whole engine, and an operator."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from functools import partial
from uuid import uuid4

from gaffer_dagster.domain.lease import Lease
from gaffer_dagster.domain.run import Outcome
from gaffer_dagster.domain.watermark import Position, RowPosition
from gaffer_dagster.engine.batch import Batch
from gaffer_dagster.engine.run import open_run
from gaffer_dagster.engine.steps import Station
from gaffer_dagster.errors import GafferError, LeaseLostError
from gaffer_dagster.store import batches, db, leases, new_rows, operations
from tests.evidence.interleavings.database import JOB
from tests.evidence.interleavings.gate import Runner
from tests.support import jobs, protocol, variants


def one_run(
    runner: Runner, *, most: int = 1, limit: int = 1, keeper: int | None = None, counts: bool = False
) -> object:
    """A run as the engine does it, by the functions of `store` alone: `most` batches of `limit` rows. `keeper`: the
    number of one more runner, which renews its lease once. `counts`: what is written into `total` follows from what was
    read there, and no lock is taken in between."""
    lease_id = uuid4()

    def acquire(wait: float) -> protocol.Attempt:
        return runner.ask(
            lambda connection: protocol.acquire(connection, JOB, lease_id=lease_id, timeout=3000, wait=wait)
        )

    attempt = acquire(0)
    if attempt.grant.outcome == "busy":
        attempt = acquire(1)
    if attempt.grant.outcome != "granted":
        return attempt.grant.outcome
    lease, position, number = attempt.lease, attempt.grant.position, 0
    outcome, error = Outcome.CAPPED, None
    if keeper is not None:
        runner.gate.starts(keeper, partial(_renew, lease=lease))
    try:
        while number < most:
            try:
                done = _one_batch(runner, lease, position, number, limit, counts)
            except Exception as failed:
                if not db.worth_repeating(failed):
                    raise
                runner.drop()
                continue
            if done is None:
                outcome = Outcome.SUCCEEDED
                break
            lease, position, number = done
    except LeaseLostError as lost:
        outcome, error = Outcome.LOST_LEASE, str(lost)
        runner.drop()
    try:
        return runner.ask(
            lambda connection: protocol.end(
                connection,
                lease,
                outcome,
                wanted_at=attempt.grant.wanted_at,
                follow_up_at=attempt.grant.granted_at if outcome is Outcome.CAPPED else None,
                error=error,
            )
        ).result
    except GafferError:
        if error is None:
            raise
        return "not recorded"


def _renew(runner: Runner, *, lease: Lease) -> bool:
    renewed = runner.ask(lambda connection: leases.renew(connection, lease, timedelta(seconds=60)))
    if not renewed:  # nobody else goes on until this was looked at
        held = runner.database.monitor.execute(
            "select from gaffer.job_lease where fence = %s and lease_id = %s", [lease.fence, lease.lease_id]
        )
        runner.is_refused_its_own = held.rowcount > 0
    return renewed


def _one_batch(
    runner: Runner, lease: Lease, position: Position | None, number: int, limit: int, counts: bool
) -> tuple[Lease, Position | None, int] | None:
    database, connection = runner.database, runner.connection()
    variant = database.variant
    batch = protocol.begin(connection)
    page = new_rows.page(connection, database.table, None, RowPosition.read(position), database.horizon, limit)
    if page is None:
        db.roll_back(connection)
        return None
    if variant.check_at is Station.DUE:
        variants.check(connection, lease, batch)
    total = connection.execute("select n from total").fetchone() if counts else None
    if variant.autocommits:
        connection.execute("commit")
    for row in page.rows:
        connection.execute("insert into target values (%s, %s, %s)", [row["id"], lease.fence, number + 1])
    if total is not None:
        connection.execute("update total set n = %s", [total[0] + len(page.rows)])
    if variant.autocommits:
        batch = protocol.begin(connection)
    if variant.check_at is Station.APPLIED:
        variants.check(connection, lease, batch)
    until = {**page.position.as_json(), "of": database.table.of}
    fence, kept = lease.fence, True
    try:
        batches.commit(
            connection,
            lease,
            batch,
            since=position,
            until=until,
            cluster=database.cluster,
            items=len(page.rows),
            duration=timedelta(seconds=60),
        )
    except Exception as error:
        if not db.lost_connection(error) or variant.believes_errors:
            raise
        runner.drop()
        new_id, old = uuid4(), lease
        grant = runner.ask(lambda again: leases.supersede(again, old, new_id, timedelta(seconds=60)))
        assert grant.fence is not None
        lease = replace(old, fence=grant.fence, lease_id=new_id)
        kept = (grant.batches or 0) > number
        runner.verdicts += [(row["id"], fence, kept) for row in page.rows]
    if not kept:
        return lease, position, number
    runner.acked += [(row["id"], fence) for row in page.rows]
    return lease, until, number + 1


def release(runner: Runner) -> object:
    """An operator takes the lease away from whoever has it."""
    return runner.ask(
        lambda connection: operations.release(connection, JOB.name, None, operations.Operator("operator", None))
    )


def whole_run(runner: Runner, *, adds: bool = False) -> object:
    """A run of the engine, from its first message to its last. `adds`: something is due because of it."""
    database = runner.database
    if adds:
        runner.ask(lambda connection: connection.execute("insert into source (value) values ('added')"))
        runner.drop()
    written: list[tuple[int, int]] = []

    def work(batch: Batch) -> None:
        written[:] = [(row["id"], batch.fence) for row in batch.rows]
        jobs.copy_rows(batch)

    def observe(station: Station) -> None:
        if station is Station.COMMITTED:
            runner.acked += written

    with open_run(JOB, database.url, log=jobs.LOG, observe=observe, worker_clock=database.now) as opened:
        opened.apply(work)
    return opened.outcome
