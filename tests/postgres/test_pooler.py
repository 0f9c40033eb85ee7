"""Everything through PgBouncer in transaction mode, with fewer server connections than there are clients."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import psycopg
import pytest

from gaffer_dagster.domain.bounds import Bounds
from gaffer_dagster.domain.due import NewRows
from gaffer_dagster.domain.run import Outcome
from gaffer_dagster.domain.schedule import Schedule
from gaffer_dagster.domain.spec import JobSpec
from gaffer_dagster.engine.batch import Batch
from gaffer_dagster.engine.steps import Station
from gaffer_dagster.errors import BatchEndedError, DatabaseUnavailableError
from gaffer_dagster.store import db, migrate
from gaffer_dagster.testing.proxy import Cut, cutting
from tests.support import faults, invariants, jobs, protocol, variants
from tests.support.pgbouncer import pooled
from tests.support.processes import Engines, Plan

APPLIED = str(Station.APPLIED)


@pytest.fixture(scope="module")
def pooler(server_url: str) -> Iterator[str]:
    """One for all the databases of these tests, with three connections to each."""
    with pooled(server_url) as through:
        yield through


@pytest.fixture
def pool(url: str, pooler: str) -> str:
    return db.with_database(pooler, str(db.parse_url(url)["dbname"]))


@pytest.fixture
def started(url: str) -> Iterator[Engines]:
    with Engines() as made:
        yield made


def _backends(url: str) -> set[int]:
    found = jobs.query(
        url,
        "select pid from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
        " and backend_type = 'client backend'",
    )
    return {pid for (pid,) in found}


def test_the_pooler_gives_clients_each_others_connections(url: str, pool: str) -> None:
    """Else none of these tests would show anything."""
    with jobs.connect(pool) as one, jobs.connect(pool) as other:
        pid = "select pg_backend_pid()"
        assert one.execute(pid).fetchone() == other.execute(pid).fetchone() != (one.info.backend_pid,)
        one.execute("set statement_timeout = '1234s'")
        assert other.execute("show statement_timeout").fetchone() == ("1234s",)  # what B65 is about


# ── whole runs ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_rows_and_intervals_are_done_as_without_it(url: str, pool: str) -> None:
    jobs.make_source(url, 25)
    faults.settle(url)
    record = jobs.run(jobs.spec(batch_rows=10), pool)
    assert (record.outcome, record.items, record.batches) == (Outcome.SUCCEEDED, 25, 3)
    assert jobs.query(url, "select count(*), count(distinct id) from target") == [(25, 25)]

    today = datetime.now(ZoneInfo("America/New_York")).replace(hour=0, minute=0, second=0, microsecond=0)
    start = today - timedelta(days=4)
    days: list[Any] = []
    record = jobs.run(jobs.daily(start=start), pool, lambda batch: days.append(batch.window))
    assert (record.outcome, record.items) == (Outcome.SUCCEEDED, len(days))
    assert len(days) >= 3


def test_more_jobs_than_connections_come_to_their_end(url: str, pool: str) -> None:
    jobs.make_source(url, 40)
    faults.settle(url)
    specs = [jobs.spec(f"job_{number}", batch_rows=10) for number in range(8)]
    records = protocol.all_at_once(len(specs), lambda number: jobs.run(specs[number], pool))
    assert {(record.outcome, record.items) for record in records} == {(Outcome.SUCCEEDED, 40)}
    assert jobs.query(url, "select count(*) from target") == [(320,)]
    assert len(_backends(url)) <= 3


def test_one_job_of_many_processes_has_one_holder_at_a_time(url: str, pool: str) -> None:
    jobs.make_source(url, 40)
    invariants.watch(url)
    faults.settle(url)
    spec = jobs.spec("copy_rows", batch_rows=10)
    records = protocol.all_at_once(6, lambda _: jobs.run(spec, pool))
    assert sum(record.items for record in records) == 40
    assert {record.outcome for record in records} <= {Outcome.SUCCEEDED, Outcome.BUSY}
    invariants.check(url, complete=True)


ADVISORY = JobSpec(
    "copy_rows", NewRows("source", "id"), Schedule("0 * * * *"), Bounds(batch_rows=5, timeout="5m"),
    exclusion="advisory",
)  # fmt: skip
LOCKS = """
    select count(*) from pg_locks
     where locktype = 'advisory' and database = (select oid from pg_database where datname = current_database())
"""


def test_an_advisory_lock_is_free_after_each_batch(url: str, pool: str) -> None:
    """B57: it belongs to the transaction, on whichever server connection."""
    jobs.make_source(url, 10)
    faults.settle(url)
    seen: list[int] = []

    def work(batch: Batch) -> None:
        seen.append(jobs.query(url, LOCKS)[0][0])
        jobs.copy_rows(batch)

    assert jobs.run(ADVISORY, pool, work).items == 10
    assert seen == [1, 1]
    assert jobs.query(url, LOCKS) == [(0,)]


def test_a_sessions_advisory_lock_would_be_left_behind(url: str, pool: str) -> None:
    """B57, broken: nobody holds it any more, and it is held; who comes upon that connection has it at once."""
    variants.replace(url, "lock_batch", {"pg_try_advisory_xact_lock(c_key)": "pg_try_advisory_lock(c_key)"})
    with pytest.raises(AssertionError):
        test_an_advisory_lock_is_free_after_each_batch(url, pool)
    assert jobs.query(url, LOCKS) != [(0,)]
    lock = "select pg_try_advisory_lock(4711)"
    with jobs.connect(pool) as one, jobs.connect(pool) as other:
        assert one.execute(lock).fetchone() == other.execute(lock).fetchone() == (True,)


# ── the keeper, and limits ───────────────────────────────────────────────────────────────────────────────────────────


def test_the_lease_is_kept_and_no_backend_recorded_as_the_holders(url: str, pool: str) -> None:
    """B54, B60: the backend that renewed is somebody else's by now, and says nothing of the holder."""
    jobs.make_source(url, 1)
    faults.settle(url)
    seen: set[tuple[Any, ...]] = set()

    def work(batch: Batch) -> None:
        ends = "select lease_until, holder_pid from gaffer.job_lease"
        before = jobs.query(url, ends)
        for _ in range(2):
            faults.wait_until(lambda before=before: jobs.query(url, ends) != before, "the lease is renewed")
            before = jobs.query(url, ends)
            seen.update(before)
        jobs.copy_rows(batch)

    record = jobs.run(jobs.spec(), pool, work, lease=timedelta(seconds=1.5))
    assert (record.outcome, record.fence, record.items) == (Outcome.SUCCEEDED, 1, 1)
    assert {pid for _, pid in seen} == {None}


@pytest.mark.parametrize("limited", [True, False])
def test_a_batch_that_takes_too_long_is_ended_by_the_server(url: str, pool: str, limited: bool) -> None:
    """B63. Without the limits that begin_batch sets, what it has locked would stay so."""
    if not limited:
        variants.replace(
            url,
            "begin_batch",
            {
                "set_config('idle_in_transaction_session_timeout', v_ms::text, true)": "null",
                "perform set_config('transaction_timeout', (v_ms + 1)::text, true)": "null",
            },
        )
    jobs.make_source(url, 5)
    faults.settle(url)
    idle: list[bool] = []

    def work(batch: Batch) -> None:
        jobs.copy_rows(batch)
        threading.Event().wait(1)
        state = "select state from pg_stat_activity where datname = current_database()"
        idle.append(("idle in transaction",) in jobs.query(url, state))
        batch.execute("select 1")

    with pytest.raises((psycopg.Error, BatchEndedError)):
        jobs.run(jobs.spec(batch_timeout="500ms"), pool, work)
    assert idle == [not limited]
    assert protocol.outcomes(url) == ["failed"]
    assert jobs.query(url, "select count(*) from target") == [(0,)]
    assert jobs.run(jobs.spec(), pool).items == 5


@pytest.mark.parametrize("own", [False, True])
def test_a_batch_whose_backend_is_ended_commits_nothing(url: str, pool: str, own: bool) -> None:
    """B58, B59: nobody believes to hold what is gone; the writes were on the same connection. `own`: a function that
    brings one of its own, which is outside of what is promised."""
    jobs.make_source(url, 5)
    faults.settle(url)
    tries: list[int] = []

    def work(batch: Batch) -> None:
        if own:
            jobs.execute(url, "insert into target select id, %s, %s from source", batch.fence, batch.number)
        else:
            jobs.copy_rows(batch)
        tries.append(batch.number)
        if len(tries) == 1:
            pid = batch.execute("select pg_backend_pid()").fetchone()
            jobs.query(url, "select pg_terminate_backend(%s)", *(pid or ()))
            batch.execute("select 1")

    assert jobs.run(jobs.spec(), pool, work).items == 5
    assert len(tries) == 2
    assert jobs.query(url, "select count(*) from target") == [(10 if own else 5,)]


def test_server_connections_that_are_retired_all_the_time_do_no_harm(url: str) -> None:
    """B58. A lock lasts as long as its batch, and the batch as long as its connection."""
    jobs.make_source(url, 40)
    faults.settle(url)
    seen: list[tuple[Any, ...]] = []

    def work(batch: Batch) -> None:
        pid = "select pg_backend_pid()"
        before = batch.execute(pid).fetchone()
        assert jobs.query(url, LOCKS) == [(1,)]
        jobs.copy_rows(batch)
        assert batch.execute(pid).fetchone() == before
        seen.append(before or ())

    with pooled(url, size=2, server_lifetime=0) as pool:
        assert jobs.run(ADVISORY, pool, work).items == 40
        assert jobs.query(url, LOCKS) == [(0,)]
    assert len(set(seen)) == len(seen) == 8
    assert jobs.query(url, "select count(*), count(distinct id) from target") == [(40, 40)]


# ── ends that nobody asked for ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("cut", [Cut.BEFORE, Cut.DURING, Cut.AFTER], ids=str)
def test_a_commit_whose_answer_is_lost_has_one_effect(url: str, pool: str, started: Engines, cut: Cut) -> None:
    jobs.make_source(url, 30)
    invariants.watch(url)
    faults.settle(url)
    with cutting(pool, ("commit_batch", Cut.NONE), ("commit_batch", cut)) as proxy:
        ending = started.start(Plan(proxy.url)).ends()
        assert proxy.is_through
    assert (ending.error, ending.outcome, ending.items, ending.fence) == (None, "succeeded", 30, 2)
    invariants.check(url, complete=True)


def test_an_interrupt_frees_lease_and_rows(url: str, pool: str, started: Engines) -> None:
    jobs.make_source(url, 10)
    jobs.execute(url, "create table ledger (batches int); insert into ledger values (0)")
    faults.settle(url)
    engine = started.start(Plan(pool, work="copy and sleep"))
    faults.wait_until(lambda: faults.statement_runs(url, "pg_sleep(60)"), "the statement runs")
    engine.signal(signal.SIGTERM)
    assert engine.ends().error == "Interrupted"
    assert not faults.statement_runs(url, "pg_sleep(60)")
    jobs.query(url, "select 1 from ledger for update nowait")
    assert jobs.query(url, "select lease_id from gaffer.job_lease") == [(None,)]
    assert protocol.outcomes(url) == ["interrupted"]


def test_a_killed_client_leaves_nothing_behind(url: str, pool: str, started: Engines) -> None:
    """B86. Its backend is no proof of its death here: the next run waits for the end of the lease."""
    jobs.make_source(url, 20)
    invariants.watch(url)
    faults.settle(url)
    engine = started.start(Plan(pool, stop_at=APPLIED, lease=2))
    engine.reaches(APPLIED)
    engine.kill()
    assert jobs.query(url, "select holder_pid from gaffer.job_lease") == [(None,)]
    faults.wait_until(lambda: started.start(Plan(pool)).ends().outcome == "succeeded", "another run takes over")
    assert protocol.outcomes(url)[0] == "abandoned"
    invariants.check(url, complete=True)


def test_a_pooler_that_is_away_is_said_so(url: str) -> None:
    with pooled(url) as pool:
        pass
    with pytest.raises(DatabaseUnavailableError):
        jobs.run(jobs.spec(), pool)


# ── what the next client finds ───────────────────────────────────────────────────────────────────────────────────────

_LEFT = """
    select pg_backend_pid(),
           (select jsonb_object_agg(name, setting) from pg_settings where source = 'session'
             and name not in ('application_name', 'client_encoding', 'transaction_isolation', 'transaction_read_only',
                              'transaction_deferrable')),
           coalesce(current_setting('gaffer.batch', true), ''), coalesce(current_setting('gaffer.seal', true), ''),
           (select count(*) from pg_prepared_statements), (select count(*) from pg_cursors),
           (select count(*) from pg_locks where locktype = 'advisory' and pid = pg_backend_pid()),
           (select count(*) from pg_listening_channels())
"""


def _what_is_left(pool: str) -> tuple[Any, ...]:
    with jobs.connect(pool) as connection:
        row = connection.execute(_LEFT).fetchone()
    assert row is not None
    return row


def test_nothing_is_left_for_the_next_client(url: str) -> None:
    """B65: what begin_batch sets, and all else, on the very server connection that runs were on."""
    jobs.make_source(url, 25)
    faults.settle(url)
    inside: list[tuple[Any, ...]] = []

    def work(batch: Batch) -> None:
        row = batch.execute("select pg_backend_pid(), current_setting('statement_timeout')").fetchone()
        inside.append(row or ())
        jobs.copy_rows(batch)

    def fails(batch: Batch) -> None:
        work(batch)
        batch.execute("select 1 / 0")

    with pooled(url, size=1) as pool:
        before = _what_is_left(pool)
        jobs.run(jobs.spec(batch_rows=10), pool, work)
        assert _what_is_left(pool) == before
        jobs.add_rows(url, 1)
        faults.settle(url)
        with pytest.raises(psycopg.errors.DivisionByZero):
            jobs.run(jobs.spec(batch_rows=10), pool, fails)
        assert _what_is_left(pool)[1:] == before[1:]  # PgBouncer gives up a connection that is left in a transaction
        assert {pid for pid, _ in inside} == {before[0]}
        assert all(limit not in ("0", "") for _, limit in inside)

        with jobs.connect(pool) as careless:  # and that would be seen
            careless.execute("set statement_timeout = '1234s'")
        assert _what_is_left(pool) != before


def test_a_setting_of_the_session_would_be_left(url: str) -> None:
    """B65, broken."""
    setting = "set_config('statement_timeout', v_ms::text, {})"
    variants.replace(url, "begin_batch", {setting.format("true"): setting.format("false")})
    with pytest.raises(AssertionError):
        test_nothing_is_left_for_the_next_client(url)


# ── how locks are asked for ──────────────────────────────────────────────────────────────────────────────────────────


def test_no_lock_function_stands_in_a_query_of_rows(url: str) -> None:
    """B61: there it locks for rows that are not returned, as many as the plan has it look at."""
    with jobs.connect(url) as connection:
        connection.execute("create temp table job as select n as id from generate_series(1, 50) n")
        connection.execute("select id from job where pg_try_advisory_lock(id) order by id desc limit 1")
        assert connection.execute(LOCKS).fetchone() == (50,)
    store = Path(migrate.__file__).parent
    calls = [
        line.strip()
        for file in sorted([*store.rglob("*.sql"), *store.rglob("*.py")])
        for line in file.read_text().splitlines()
        if re.search(r"pg_(try_)?advisory_", line) and not line.strip().startswith(("--", "#"))
    ]
    alone = re.compile(r"(if (not )?|.*\"select (pg_catalog\.)?)pg_(try_)?advisory_xact_lock\(.*\)( then|\", \[.*)")
    assert calls
    assert [line for line in calls if not alone.fullmatch(line)] == []
