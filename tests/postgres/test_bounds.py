"""How much one run does, and what becomes of one that would do more."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from typing import Any

import psycopg
import pytest

from gaffer_dagster.domain.run import Outcome
from gaffer_dagster.engine.batch import Batch
from gaffer_dagster.engine.steps import Station
from gaffer_dagster.errors import BadSpecError, DeadlinePassedError
from gaffer_dagster.store import db
from tests.support import jobs, protocol, variants
from tests.support.protocol import Actor, acquire, begin, commit, session, until


def backend_of(batch: Batch) -> int:
    row = batch.execute("select pg_backend_pid()").fetchone()
    assert row is not None
    return row[0]


def is_gone(url: str, pid: int) -> bool:
    return not jobs.query(url, "select 1 from pg_stat_activity where pid = %s", pid)


# ── rows and batches ─────────────────────────────────────────────────────────────────────────────────────────────


def test_a_run_stops_at_its_number_of_batches_and_says_what_is_left(url: str) -> None:
    jobs.make_source(url, 100)
    records = [jobs.run(jobs.spec(batch_rows=10, batches=4), url) for _ in range(3)]
    assert [(r.outcome, r.batches, r.items, r.backlog) for r in records] == [
        (Outcome.CAPPED, 4, 40, 60),
        (Outcome.CAPPED, 4, 40, 20),
        (Outcome.SUCCEEDED, 2, 20, 0),
    ]
    assert records[1].watermark_from == records[0].watermark_to
    assert [r.ticks_covered for r in records][:2] == [None, None]
    assert jobs.query(url, "select count(*), count(distinct id) from target") == [(100, 100)]


def test_bounds_that_are_just_enough_are_enough(url: str) -> None:
    jobs.make_source(url, 40)
    record = jobs.run(jobs.spec(batch_rows=10, batches=4), url)
    assert (record.outcome, record.batches, record.backlog) == (Outcome.SUCCEEDED, 4, 0)


# ── time ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_giant_backlog_is_done_in_bounded_runs(url: str) -> None:
    """B89. Each batch takes a tenth of a second at least, so that a run of three seconds cannot do all forty; the first
    takes long enough that no later one begins too near the deadline, however busy the machine is."""
    jobs.make_source(url, 200_000)

    def slow(batch: Batch) -> None:
        batch.execute(
            "insert into target (id, fence, batch) select unnest(%s::bigint[]), %s, %s",
            [[row["id"] for row in batch.rows], batch.fence, batch.number],
        )
        time.sleep(1 if batch.number == 1 else 0.1)

    job = jobs.spec(batch_rows=5_000, timeout="3s")
    first = jobs.run(job, url, slow)
    second = jobs.run(job, url, slow)
    for record in (first, second):
        assert record.outcome is Outcome.CAPPED
        assert record.batches >= 1
        assert record.items == record.batches * 5_000
        assert record.ended_at is not None
        assert record.ended_at - record.started_at < timedelta(seconds=10)
    assert first.backlog == 200_000 - first.items
    assert second.backlog == first.backlog - second.items
    assert second.watermark_from == first.watermark_to
    rows = first.items + second.items
    assert jobs.query(url, "select count(*), count(distinct id) from target") == [(rows, rows)]


def test_no_batch_begins_when_less_time_is_left_than_the_longest_took(url: str) -> None:
    jobs.make_source(url, 3)
    batches: list[int] = []

    def slow(batch: Batch) -> None:
        batches.append(batch.number)
        time.sleep(1.6)

    record = jobs.run(jobs.spec(batch_rows=1, timeout="3s"), url, slow)
    assert batches == [1]
    assert (record.outcome, record.batches, record.backlog) == (Outcome.CAPPED, 1, 2)


def test_a_deadline_that_passes_between_two_batches_cuts_none(url: str) -> None:
    jobs.make_source(url, 3)

    def dawdle(station: Station) -> None:
        if station is Station.COMMITTED:
            time.sleep(2.5)

    record = jobs.run(jobs.spec(batch_rows=1, timeout="2s"), url, observe=dawdle)
    assert (record.outcome, record.batches, record.backlog) == (Outcome.CAPPED, 1, 2)


def swallow_the_cut(batch: Batch) -> None:
    with suppress(psycopg.Error):
        batch.execute("select pg_sleep(60)")


def never_look_at_the_clock(batch: Batch) -> None:
    end = time.monotonic() + 2
    while time.monotonic() < end:
        sum(range(1000))


def go_on_writing(batch: Batch) -> None:
    with suppress(psycopg.Error):
        batch.execute("select pg_sleep(60)")
    batch.execute("insert into target values (4711)")


def let_it_pass(batch: Batch) -> None:
    batch.execute("select pg_sleep(60)")


@pytest.mark.parametrize("how", [swallow_the_cut, never_look_at_the_clock, go_on_writing, let_it_pass])
def test_nothing_is_committed_after_the_deadline_whatever_the_function_does(url: str, how: Any) -> None:
    """B91."""
    jobs.make_source(url, 2)

    def late(batch: Batch) -> None:
        jobs.copy_rows(batch)
        if batch.number == 2:
            how(batch)

    with pytest.raises(DeadlinePassedError, match=r"batch 2 of job 'copy_rows' was cut.*of 1s.*1 were committed"):
        jobs.run(jobs.spec(batch_rows=1, timeout="1s"), url, late)
    assert jobs.last_run(url)[0] == "timed_out"
    assert jobs.query(url, "select id from target") == [(1,)]
    assert jobs.query(url, "select items, batches from gaffer.job_runs") == [(1, 1)]
    assert jobs.query(url, "select consecutive_failures from gaffer.job") == [(1,)]
    assert jobs.run(jobs.spec(), url).items == 1


def commit_at_the_deadline(url: str, past: str) -> int:
    """How many effects are there after a batch that commits at a run's deadline, which is moved by `past`."""
    job = jobs.spec()
    with session(url) as connection:
        protocol.register(connection, job)
        held = acquire(connection, job)
        jobs.execute(url, f"update gaffer.job_runs set deadline_at = '2027-03-01 12:00Z'::timestamptz {past}")
        protocol.freeze(url, datetime(2027, 3, 1, 12, tzinfo=timezone.utc))
        batch = begin(connection)
        connection.execute("insert into effects values (1)")
        with suppress(DeadlinePassedError):
            commit(connection, held.lease, batch, since=None, until={"n": "1"})
        db.roll_back(connection)
    return jobs.query(url, "select count(*) from effects")[0][0]


def test_the_database_refuses_a_commit_after_the_deadline_by_itself(url: str) -> None:
    jobs.execute(url, "create table effects (n int)")
    assert commit_at_the_deadline(url, "- interval '1 microsecond'") == 0


def test_a_commit_at_the_deadline_is_in_time(url: str) -> None:
    jobs.execute(url, "create table effects (n int)")
    assert commit_at_the_deadline(url, "") == 1


def test_a_database_that_does_not_look_at_the_deadline_would_be_caught(url: str) -> None:
    jobs.execute(url, "create table effects (n int)")
    variants.replace(url, "commit_batch", {"if v_now > v_deadline then": "if false then"})
    assert commit_at_the_deadline(url, "- interval '1 microsecond'") == 1


def test_a_batch_that_is_silent_for_too_long_is_ended_by_the_server(url: str) -> None:
    """B63. Which of its limits strikes depends on the server: 25P03, or 25P04 where it has a transaction timeout."""
    jobs.make_source(url, 5)
    job = jobs.spec(batch_timeout="500ms")

    def silent(batch: Batch) -> None:
        jobs.copy_rows(batch)
        pid = backend_of(batch)
        until(lambda: is_gone(url, pid))
        batch.execute("insert into target values (4711)")

    def silent_to_the_end(batch: Batch) -> None:
        jobs.copy_rows(batch)
        pid = backend_of(batch)
        until(lambda: is_gone(url, pid))

    for work in (silent, silent_to_the_end):
        with pytest.raises(psycopg.Error) as raised:
            jobs.run(job, url, work)
        assert raised.value.sqlstate in ("25P03", "25P04")
        outcome, sqlstate, error = jobs.last_run(url)
        assert (outcome, sqlstate) == ("failed", raised.value.sqlstate)
        assert "timeout" in error
        assert jobs.query(url, "select count(*) from target") == [(0,)]
    assert jobs.run(job, url).items == 5


def test_a_statement_longer_than_the_batch_may_take_is_cut(url: str) -> None:
    jobs.make_source(url, 5)

    def long(batch: Batch) -> None:
        jobs.copy_rows(batch)
        batch.execute("select pg_sleep(60)")

    with pytest.raises(psycopg.Error):
        jobs.run(jobs.spec(batch_timeout="300ms"), url, long)
    outcome, sqlstate, _ = jobs.last_run(url)
    assert outcome == "failed"
    assert sqlstate in ("57014", "25P04")
    assert jobs.query(url, "select count(*) from target") == [(0,)]


def test_a_batch_waits_for_a_lock_no_longer_than_it_may_take(url: str) -> None:
    jobs.make_source(url, 5)
    with psycopg.connect(url) as other:
        other.execute("lock table target")
        with pytest.raises(psycopg.Error):
            jobs.run(jobs.spec(batch_timeout="300ms"), url)
        outcome, sqlstate, _ = jobs.last_run(url)
        assert outcome == "failed"
        assert sqlstate in ("55P03", "57014", "25P04")
    assert jobs.run(jobs.spec(), url).items == 5


def test_nothing_is_left_set_for_the_session(url: str) -> None:
    """B65: through a pooler the next client on that backend would have it."""
    names = (
        "statement_timeout",
        "lock_timeout",
        "idle_in_transaction_session_timeout",
        "synchronous_commit",
        "gaffer.batch",
    )
    with session(url) as connection:

        def settings() -> list[Any]:
            return [connection.execute("select current_setting(%s, true)", [name]).fetchone() for name in names]

        before = settings()
        protocol.register(connection, jobs.spec())
        held = acquire(connection, jobs.spec())
        commit(connection, held.lease, begin(connection), since=None, until={"n": "1"})
        connection.execute("select gaffer.renew('copy_rows', 0, 1, %s, '1m')", [held.lease_id])
        protocol.end(connection, held.lease)
        assert settings()[:-1] == before[:-1]
        assert settings()[-1] in ((None,), ("",))
        assert connection.execute("select count(*) from pg_prepared_statements").fetchone() == (0,)
        locks = "select count(*) from pg_locks where locktype = 'advisory' and pid = pg_backend_pid()"
        assert connection.execute(locks).fetchone() == (0,)


@pytest.mark.parametrize(
    ("given", "raised"), [("off", "on"), ("local", "on"), ("on", "on"), ("remote_write", "remote_write")]
)
def test_durability_is_raised_and_never_lowered(url: str, given: str, raised: str) -> None:
    jobs.make_source(url, 3)
    database = db.parse_url(url)["dbname"]
    jobs.execute(url, f"alter database {database} set synchronous_commit = '{given}'")
    seen: list[Any] = []

    def look(batch: Batch) -> None:
        seen.append(batch.execute("select current_setting('synchronous_commit')").fetchone())

    jobs.run(jobs.spec(), url, look)
    assert seen == [(raised,)]


# ── runs that overlap ────────────────────────────────────────────────────────────────────────────────────────────


def test_wake_ups_during_a_long_run_are_busy_and_never_two_work(url: str) -> None:
    """B85."""
    jobs.make_source(url, 8)
    working = threading.Semaphore(1)
    done = threading.Event()

    def long(batch: Batch) -> None:
        assert working.acquire(blocking=False), "two at a time"
        try:
            jobs.copy_rows(batch)
            done.wait(60)
        finally:
            working.release()

    first = Actor(lambda: jobs.run(jobs.spec(batch_rows=4), url, long))
    until(lambda: jobs.query(url, "select 1 from gaffer.job_runs where outcome = 'running'"))
    found = [jobs.run(jobs.spec(batch_rows=4), url, long).outcome for _ in range(5)]
    done.set()
    record = first.result()
    assert found == [Outcome.BUSY] * 5
    assert (record.outcome, record.items) == (Outcome.SUCCEEDED, 8)
    assert protocol.outcomes(url) == ["succeeded"] + ["busy"] * 5


def test_a_run_of_several_leases_is_judged_by_nobody(url: str) -> None:
    """B87."""
    jobs.make_source(url, 2)
    found: list[Outcome] = []

    def long(batch: Batch) -> None:
        if batch.number > 1:
            return
        jobs.copy_rows(batch)
        began = time.monotonic()
        while time.monotonic() - began < 3.3:
            found.append(jobs.run(jobs.spec(), url).outcome)
            time.sleep(0.3)

    record = jobs.run(jobs.spec(), url, long, lease=timedelta(seconds=1))
    assert set(found) == {Outcome.BUSY}
    assert (record.outcome, record.items, record.fence) == (Outcome.SUCCEEDED, 2, 1)
    assert record.ended_at is not None
    assert record.ended_at - record.started_at > timedelta(seconds=3)


def test_a_run_that_is_killed_is_replaced_when_its_lease_is_over(url: str) -> None:
    """B86; the processes that are really killed are in tests/chaos."""
    jobs.make_source(url, 5)
    with session(url) as connection:
        protocol.register(connection, jobs.spec())
        acquire(connection, jobs.spec(), lease=1)
    found = until(lambda: [r for r in [jobs.run(jobs.spec(), url)] if r.outcome is not Outcome.BUSY], pause=0.2)
    assert (found[0].outcome, found[0].items, found[0].fence) == (Outcome.SUCCEEDED, 5, 2)
    assert protocol.outcomes(url)[0] == "abandoned"
    assert jobs.query(url, "select count(*) from gaffer.job_runs where ended_at is null") == [(0,)]


def test_a_timeout_not_shorter_than_the_interval_is_refused_naming_both() -> None:
    for timeout in ("1h", "90m"):
        with pytest.raises(
            BadSpecError, match=rf"job 'copy_rows'.*timeout={timeout.replace('90m', '1h30m')}.*interval of 1h"
        ):
            jobs.spec(timeout=timeout)
    assert jobs.spec(timeout="59m59s").limits.timeout == timedelta(minutes=59, seconds=59)
    assert jobs.spec(timeout=None).limits.timeout == timedelta(minutes=48)
