"""Many processes over the pending rows of one table, killed at random: each row is done once.

GAFFER_CHAOS_ROWS, GAFFER_CHAOS_WORKERS and GAFFER_CHAOS_KILLS set the size, GAFFER_CHAOS_SEED repeats the choices (not
the timing) of an earlier run.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from psycopg import sql

import gaffer_dagster as gd
from gaffer_dagster.domain.spec import JobSpec
from gaffer_dagster.engine.batch import Batch
from gaffer_dagster.engine.run import open_run
from gaffer_dagster.store import db, pending_rows, prepare
from tests.support import jobs
from tests.support.faults import say

ROWS = int(os.environ.get("GAFFER_CHAOS_ROWS", 3_000))
WORKERS = int(os.environ.get("GAFFER_CHAOS_WORKERS", 4))
KILLS = int(os.environ.get("GAFFER_CHAOS_KILLS", 12))
SEED = int(os.environ.get("GAFFER_CHAOS_SEED", 0)) or random.SystemRandom().randrange(1, 1_000_000)
PENDING = "done_at is null"
pytestmark = pytest.mark.timeout(120 + ROWS / 100)

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([__name__])


def spec() -> JobSpec:
    # A killed process holds its slot until its lease is over.
    due = gd.PendingRows(
        "item", "id", pending=PENDING, done="done_at = now()", parallel=2 * WORKERS, attempts=1_000, backoff="1s"
    )
    return JobSpec("items", due, bounds=gd.Bounds(batch_rows=50, timeout="5m"))


def effect(batch: Batch) -> None:
    time.sleep(0.001 * len(batch.rows))
    batch.insert("effect", [{"id": row["id"], "slot": batch.run_id} for row in batch.rows])


def _claim_unlocked(connection: db.Connection, source: Any, wanted: Any, limit: int) -> list[pending_rows.Row]:
    """The claim that everybody writes first."""
    found = connection.execute(
        sql.SQL("select {}::text, id from {} where {} order by {} limit {}").format(
            source.key, source.table.identifier, wanted, source.key, sql.Literal(limit)
        )
    )
    return [pending_rows.Row(key, {"id": number}) for key, number in found]


def _claim_elsewhere(connection: db.Connection, source: Any, wanted: Any, limit: int) -> list[pending_rows.Row]:
    """A claim that is committed before the work, as a state that nobody takes back when its process is killed."""
    with db.connect(os.environ["GAFFER_CHAOS_URL"], application_name="test") as other:
        found = other.execute(
            sql.SQL(
                "with due as materialized (select id from {} where {} order by {} limit {} for update skip locked)"
                " update item set done_at = now() from due where item.id = due.id returning item.id::text, item.id"
            ).format(source.table.identifier, wanted, source.key, sql.Literal(limit))
        ).fetchall()
    return [pending_rows.Row(key, {"id": number}) for key, number in found]


_claim = pending_rows._claim  # pyright: ignore[reportPrivateUsage]
VARIANTS: dict[str, Callable[..., Any]] = {
    "the product": _claim,
    "claims without a lock": _claim_unlocked,
    "claims in a transaction before": _claim_elsewhere,
}


def _work(url: str, variant: str) -> None:
    os.environ["GAFFER_CHAOS_URL"] = url
    pending_rows._claim = VARIANTS[variant]  # pyright: ignore[reportPrivateUsage]
    while jobs.query(url, "select exists (select from item where done_at is null)")[0][0]:
        with (
            contextlib.suppress(gd.GafferError),
            open_run(spec(), url, log=jobs.LOG, lease=timedelta(seconds=1)) as run,
        ):
            run.apply(effect)
        if run.outcome != "capped":
            time.sleep(0.05)


def is_at_work(url: str, pid: int) -> bool:
    return bool(
        jobs.query(
            url,
            "select from gaffer.job_lease where lease_id is not null and split_part(owner, ':', 2) = %s",
            str(pid),
        )
    )


def chaos(url: str, variant: str, rows: int, kills: int) -> None:
    """As many rows again come in while processes are killed."""
    portion, total = rows // kills, rows
    chance = random.Random(f"{SEED}/{variant}")
    say(f"{variant}: seed {SEED}, {rows} rows, {WORKERS} workers, {kills} kills")
    jobs.execute(url, "create table item (id bigint primary key, done_at timestamptz)")
    jobs.execute(url, "create table effect (id bigint, slot int)")
    jobs.execute(url, "insert into item select generate_series(1, %s::int)", rows)
    with db.connect(url, application_name="test") as connection:
        prepare.apply(connection, prepare.pending_statements(connection, "item", "id", PENDING))

    def start() -> Any:
        process = _CONTEXT.Process(target=_work, args=[url, variant], daemon=True)
        process.start()
        return process

    workers = [start() for _ in range(WORKERS)]
    killed = 0
    while killed < kills:
        # As many again come in on the way, so that there is work to kill however fast it goes.
        jobs.execute(url, "insert into item select generate_series(%s::int + 1, %s::int)", total, total + portion)
        total += portion
        number = chance.randrange(WORKERS)
        if not workers[number].is_alive():
            workers[number] = start()
        while workers[number].is_alive() and not is_at_work(url, workers[number].pid):
            time.sleep(0.01)
        time.sleep(chance.uniform(0, 0.2))
        if workers[number].is_alive():
            workers[number].kill()
            killed += 1
    for worker in [*workers, start()]:
        worker.join()
    outcomes = jobs.query(url, "select outcome, count(*), sum(items) from gaffer.job_runs group by 1 order by 1")
    say(f"{killed} killed; {outcomes}")
    assert jobs.query(url, "select count(*) from item where done_at is null") == [(0,)]
    assert jobs.query(url, "select count(*), count(distinct id) from effect") == [(total, total)], "each row once"
    assert jobs.query(url, "select sum(items) from gaffer.job_runs") == [(total,)]
    assert jobs.query(url, "select count(*) from gaffer.job_item") == [(0,)]


def test_each_row_is_done_once_whoever_is_killed(url: str) -> None:
    """B82."""
    chaos(url, "the product", ROWS, KILLS)


@pytest.mark.parametrize("variant", ["claims without a lock", "claims in a transaction before"])
def test_a_broken_claim_is_found(url: str, variant: str) -> None:
    """B82, broken."""
    with pytest.raises(AssertionError, match="each row once"):
        chaos(url, variant, 1_500, 6)
