"""How a run ends, what it leaves on the job, and which ticks it covered."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import psycopg
import pytest
import structlog

from gaffer_dagster.domain.bounds import Bounds
from gaffer_dagster.domain.due import NewRows
from gaffer_dagster.domain.job import JobRecord
from gaffer_dagster.domain.run import Outcome, RunRecord
from gaffer_dagster.domain.schedule import Schedule
from gaffer_dagster.domain.spec import JobSpec
from gaffer_dagster.engine.batch import Batch
from gaffer_dagster.errors import UnknownJobError
from gaffer_dagster.store import db, leases, runs
from gaffer_dagster.store import jobs as job_table
from gaffer_dagster.testing import Clock
from tests.support import jobs, protocol
from tests.support.protocol import acquire, begin, commit, end, expire, session

SPEC = jobs.spec()
MIDNIGHT = datetime(2027, 3, 1, tzinfo=timezone.utc)
HOUR, DAY = timedelta(hours=1), timedelta(days=1)
A_MOMENT = timedelta(seconds=5)


@pytest.fixture
def connection(url: str) -> Iterator[db.Connection]:
    with session(url) as connection:
        protocol.register(connection, SPEC)
        yield connection


def status(url: str, job: str = "copy_rows") -> JobRecord:
    with session(url) as connection:
        return job_table.status(connection, job)[0]


def failures(url: str) -> int:
    return jobs.query(url, "select consecutive_failures from gaffer.job")[0][0]


# ── ended once, by its holder ────────────────────────────────────────────────────────────────────────────────────


def test_ending_again_is_done_and_changes_nothing(url: str, connection: db.Connection) -> None:
    held = acquire(connection, SPEC).lease
    commit(connection, held, begin(connection), since=None, until={"n": "1"}, items=7)
    assert end(connection, held, backlog=0).result == "ended"
    before = jobs.query(url, "select * from gaffer.job_runs"), jobs.query(url, "select * from gaffer.job")
    for outcome in (Outcome.SUCCEEDED, Outcome.FAILED, Outcome.LOST_LEASE):
        assert end(connection, held, outcome, error="late").result == "ended"
    assert (jobs.query(url, "select * from gaffer.job_runs"), jobs.query(url, "select * from gaffer.job")) == before
    next_one = acquire(connection, SPEC).lease
    assert end(connection, held).result == "ended"
    assert leases.renew(connection, next_one, timedelta(seconds=60))


def test_a_stale_holder_may_only_refine_abandoned_to_lost_lease(url: str, connection: db.Connection) -> None:
    held = acquire(connection, SPEC).lease
    expire(url)
    acquire(connection, SPEC)
    assert protocol.outcomes(url) == ["abandoned", "running"]
    ended_at = jobs.query(url, "select ended_at from gaffer.job_runs where id = %s", held.run_id)
    lease, job = protocol.lease_row(url), jobs.query(url, "select * from gaffer.job")
    for _ in range(2):
        answer = end(connection, held, Outcome.SUCCEEDED, error="stalled", ticks_covered=5, backlog=0)
        assert answer.result == "lost_lease"
    assert jobs.query(
        url, "select outcome, error, ticks_covered, backlog, items from gaffer.job_runs where id = %s", held.run_id
    ) == [("lost_lease", "stalled; found dead by the run of fence 2", None, None, 0)]
    assert jobs.query(url, "select ended_at from gaffer.job_runs where id = %s", held.run_id) == ended_at
    assert (protocol.lease_row(url), jobs.query(url, "select * from gaffer.job")) == (lease, job)


def test_an_end_of_nobodys_run_is_refused(url: str, connection: db.Connection) -> None:
    held = acquire(connection, SPEC)
    other = acquire(connection, SPEC)
    assert other.grant.run_id is None
    with pytest.raises(UnknownJobError, match="not under this lease"):
        end(connection, protocol.Attempt(held.grant, other.lease_id, SPEC.name).lease)
    assert protocol.outcomes(url) == ["running"]


@pytest.mark.parametrize("outcome", [Outcome.CAPPED, Outcome.FAILED, Outcome.INTERRUPTED, Outcome.TIMED_OUT])
@pytest.mark.parametrize("batches", [None, 1, 2])
def test_an_end_covers_nothing_by_batches_that_a_fail_over_lost(
    url: str, connection: db.Connection, outcome: Outcome, batches: int | None
) -> None:
    held = acquire(connection, SPEC).lease
    commit(connection, held, begin(connection), since=None, until={"n": "1"}, items=7)
    end(
        connection, held, outcome, covered_until=MIDNIGHT, ticks_covered=3, next_due_at=MIDNIGHT + HOUR, batches=batches
    )
    lost = batches == 2
    assert jobs.query(url, "select outcome, covered_until, ticks_covered from gaffer.job_runs") == [
        (str(outcome), None if lost else MIDNIGHT, None if lost else 3)
    ]
    assert jobs.query(url, "select covered_until from gaffer.job") == [(None if lost else MIDNIGHT,)]
    assert jobs.query(url, "select next_due_at = %s from gaffer.job", MIDNIGHT + HOUR) != [(lost,)]


def test_a_run_whose_lease_was_taken_away_by_hand_is_no_success(url: str, connection: db.Connection) -> None:
    held = acquire(connection, SPEC).lease
    jobs.execute(url, "update gaffer.job_lease set fence = fence + 1, lease_id = null, lease_until = 'epoch'")
    assert end(connection, held, Outcome.SUCCEEDED).result == "lost_lease"
    assert protocol.outcomes(url) == ["lost_lease"]
    assert failures(url) == 1


def test_an_end_whose_answer_was_lost_is_no_lost_lease(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs.make_source(url, 3)
    real, lost = runs.end, []

    def end_and_lose(connection: db.Connection, *given: Any, **fields: Any) -> runs.Ending:
        answer = real(connection, *given, **fields)
        if not lost:
            lost.append(answer)
            connection.close()
            raise psycopg.OperationalError("server closed the connection unexpectedly")
        return answer

    monkeypatch.setattr(runs, "end", end_and_lose)
    record = jobs.run(SPEC, url)
    assert (record.outcome, record.items) == (Outcome.SUCCEEDED, 3)
    assert len(lost) == 1


def test_an_end_that_a_late_cancel_hits_is_tried_again(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs.make_source(url, 3)
    real, hits = runs.end, []

    def hit(connection: db.Connection, *given: Any, **fields: Any) -> runs.Ending:
        if not hits:
            hits.append(None)
            connection.execute("set statement_timeout = 20")
            connection.execute("select pg_sleep(60)")
        return real(connection, *given, **fields)

    monkeypatch.setattr(runs, "end", hit)
    assert jobs.run(SPEC, url).outcome is Outcome.SUCCEEDED
    assert protocol.outcomes(url) == ["succeeded"]


# ── the streak of failures ───────────────────────────────────────────────────────────────────────────────────────

# Each word is one attempt: an outcome, and the tick that woke it.
STREAKS = {
    "F1 F2 S3 F4 F5": 2,
    "F1 F2 b3 F4": 3,
    "F1 F1 F1": 1,
    "F1 F1 F2 F2": 2,
    "F1 F2 p3 i4 F5": 3,
    "F1 S1 F1": 1,
    "F1 F2 C3": 0,
    "F1 P2 F3": 1,
    "F1 T2 L3 F4": 4,
    "F1 a2 F3": 3,
    "i1 b2 p3": 0,
    "F- F- F-": 3,
    "F1 F2 F3 F4 F5 F6 F7 F8 F9": 9,
}
OUTCOMES = {
    "F": Outcome.FAILED,
    "T": Outcome.TIMED_OUT,
    "L": Outcome.LOST_LEASE,
    "S": Outcome.SUCCEEDED,
    "P": Outcome.PARTIAL,
    "C": Outcome.CAPPED,
    "i": Outcome.INTERRUPTED,
}


def test_failures_count_once_for_each_tick_as_the_table_says(url: str, connection: db.Connection) -> None:
    """B99."""
    for number, (sequence, expected) in enumerate(STREAKS.items()):
        job = jobs.spec(f"streak_{number}")
        protocol.register(connection, job)
        for kind, digit in sequence.split():
            tick = None if digit == "-" else MIDNIGHT + int(digit) * HOUR
            if kind == "p":
                jobs.execute(url, "update gaffer.job set paused_at = gaffer.clock() where name = %s", job.name)
                assert acquire(connection, job, tick=tick).grant.outcome == "paused"
                jobs.execute(url, "update gaffer.job set paused_at = null where name = %s", job.name)
                continue
            held = acquire(connection, job, tick=tick)
            if kind == "b":
                assert acquire(connection, job, tick=tick).grant.outcome == "busy"
                assert acquire(connection, job, tick=tick, wait=1).grant.outcome == "busy"
                end(connection, held.lease, Outcome.INTERRUPTED)
            elif kind == "a":
                expire(url, job.name)  # found dead by the next attempt
            else:
                end(connection, held.lease, OUTCOMES[kind])
        assert status(url, job.name).consecutive_failures == expected, sequence


def test_failed_runs_of_the_engine_count_and_a_success_ends_the_streak(url: str, clock: Clock) -> None:
    jobs.make_source(url, 3)

    def broken(batch: Batch) -> None:
        raise ValueError("no")

    def wake(work: Any) -> None:
        if work is broken:
            with pytest.raises(ValueError, match="no"):
                jobs.run(SPEC, url, work, worker_clock=clock.now)
        else:
            jobs.run(SPEC, url, work, worker_clock=clock.now)

    clock.set(MIDNIGHT + A_MOMENT)
    found = []
    for later, work in ((HOUR, broken), (A_MOMENT, broken), (HOUR, broken), (HOUR, jobs.copy_rows), (HOUR, broken)):
        clock.advance(later)
        if work is broken:
            jobs.add_rows(url, 1)
        wake(work)
        found.append(failures(url))
    assert found == [1, 1, 2, 0, 1]


# ── ticks ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Hours:
    """A job in a database whose time the test sets."""

    def __init__(self, url: str, clock: Clock, cron: str, timeout: str) -> None:
        self.url, self.clock = url, clock
        self.spec = JobSpec("copy_rows", NewRows("source", "id"), Schedule(cron), Bounds(timeout=timeout))

    def at(self, when: datetime, rows: int = 0, work: Any = jobs.copy_rows) -> RunRecord:
        self.clock.set(when)
        jobs.add_rows(self.url, rows)
        return jobs.run(self.spec, self.url, work, worker_clock=self.clock.now)


@pytest.fixture
def hours(url: str, clock: Clock) -> Any:
    jobs.make_source(url)
    return lambda cron, timeout="50s": Hours(url, clock, cron, timeout)


def test_one_run_covers_ten_ticks(url: str, hours: Any) -> None:
    """B30, D11."""
    hourly = hours("0 * * * *")
    first = hourly.at(MIDNIGHT + A_MOMENT, 2)
    assert (first.ticks_covered, first.tick) == (0, MIDNIGHT)
    back = MIDNIGHT + 10 * HOUR + timedelta(minutes=5)
    record = hourly.at(back, 3)
    assert (record.outcome, record.items, record.ticks_covered) == (Outcome.SUCCEEDED, 3, 10)
    assert (record.tick, record.next_run_at) == (MIDNIGHT + 10 * HOUR, MIDNIGHT + 11 * HOUR)
    job = status(url)
    assert (job.last_success_tick, job.next_due_at) == (MIDNIGHT + 10 * HOUR, MIDNIGHT + 11 * HOUR)
    assert job.last_success_at is not None
    assert back <= job.last_success_at < back + timedelta(minutes=1)
    assert job.last_outcome is Outcome.SUCCEEDED
    assert hourly.at(MIDNIGHT + 10 * HOUR + timedelta(minutes=6)).ticks_covered == 0
    assert hourly.at(MIDNIGHT + 11 * HOUR).ticks_covered == 1


def test_a_hundred_and_eighty_ticks_are_counted(hours: Any) -> None:
    """B29."""
    minutely = hours("* * * * *")
    minutely.at(MIDNIGHT)
    record = minutely.at(MIDNIGHT + 3 * HOUR, 250)
    assert (record.outcome, record.items, record.ticks_covered) == (Outcome.SUCCEEDED, 250, 180)


def test_a_year_of_minutes_is_one_run_and_not_slow(hours: Any) -> None:
    """B33."""
    minutely = hours("* * * * *")
    minutely.at(MIDNIGHT)
    assert minutely.at(MIDNIGHT + timedelta(seconds=70)).ticks_covered == 1
    began = time.process_time()
    record = minutely.at(MIDNIGHT + 365 * DAY, 3)
    assert record.ticks_covered == 365 * 24 * 60 - 1
    assert time.process_time() - began < 5
    assert record.items == 3


def test_a_second_tick_after_days_of_outage_does_nothing_extra(url: str, hours: Any) -> None:
    """B31."""
    daily = hours("0 6 * * *")
    daily.at(MIDNIGHT + 6 * HOUR)
    record = daily.at(MIDNIGHT + 4 * DAY + 6 * HOUR + A_MOMENT, 40)
    assert (record.outcome, record.items, record.ticks_covered) == (Outcome.SUCCEEDED, 40, 4)
    second = daily.at(MIDNIGHT + 4 * DAY + 6 * HOUR + 2 * A_MOMENT)
    assert (second.outcome, second.items, second.batches, second.ticks_covered) == (Outcome.SUCCEEDED, 0, 0, 0)
    assert second.watermark_from == second.watermark_to == record.watermark_to
    assert jobs.query(url, "select count(*), count(distinct id) from target") == [(40, 40)]


@pytest.mark.parametrize("late", [timedelta(seconds=5), timedelta(minutes=5), timedelta(hours=5)])
def test_a_late_tick_runs_and_shows_how_late(hours: Any, late: timedelta) -> None:
    """B35."""
    record = hours("0 6 * * *").at(MIDNIGHT + 6 * HOUR + late, 2)
    assert (record.outcome, record.items, record.tick) == (Outcome.SUCCEEDED, 2, MIDNIGHT + 6 * HOUR)
    assert late <= record.started_at - record.tick < late + timedelta(minutes=1)


def test_after_a_pause_one_run_does_it_all(url: str, hours: Any) -> None:
    """B38."""
    daily = hours("0 6 * * *")
    daily.at(MIDNIGHT + 6 * HOUR)
    jobs.execute(url, "select gaffer.pause('copy_rows', null, null, 'ann', 'the source is rebuilt')")
    for day in range(1, 4):
        assert daily.at(MIDNIGHT + day * DAY + 6 * HOUR, 2).outcome is Outcome.PAUSED
    jobs.execute(url, "select gaffer.resume('copy_rows', %s, 'ann', null)", MIDNIGHT + 4 * DAY + 6 * HOUR)
    record = daily.at(MIDNIGHT + 9 * DAY + 6 * HOUR, 2)
    assert (record.outcome, record.items, record.ticks_covered) == (Outcome.SUCCEEDED, 8, 6)
    assert daily.at(MIDNIGHT + 9 * DAY + 6 * HOUR + A_MOMENT).items == 0


def test_a_run_that_did_not_work_or_failed_covers_no_tick(url: str, hours: Any) -> None:
    hourly = hours("0 * * * *")
    hourly.at(MIDNIGHT)

    def broken(batch: Batch) -> None:
        raise ValueError("no")

    before = jobs.query(url, "select covered_until, last_success_at, last_success_tick, next_due_at from gaffer.job")
    with pytest.raises(ValueError, match="no"):
        hourly.at(MIDNIGHT + HOUR, 3, broken)
    assert jobs.query(
        url, "select outcome, ticks_covered, next_run_at from gaffer.job_runs order by id desc limit 1"
    ) == [("failed", None, MIDNIGHT + 2 * HOUR)]
    state = "select covered_until, last_success_at, last_success_tick, next_due_at from gaffer.job"
    assert jobs.query(url, state) == before
    with session(url) as connection:
        hourly.clock.set(MIDNIGHT + 2 * HOUR)
        for outcome in (Outcome.CAPPED, Outcome.INTERRUPTED, Outcome.TIMED_OUT, Outcome.LOST_LEASE):
            now = {"success_tick": MIDNIGHT, "next_due_at": MIDNIGHT + 9 * HOUR}
            end(connection, acquire(connection, hourly.spec).lease, outcome, **now)
            assert jobs.query(url, state) == before, outcome
    assert hourly.at(MIDNIGHT + 2 * HOUR + A_MOMENT).ticks_covered == 2


def test_a_run_killed_before_its_first_statement_is_due_again(url: str, hours: Any, clock: Clock) -> None:
    """B40."""
    hourly = hours("0 * * * *")
    clock.set(MIDNIGHT + A_MOMENT)
    jobs.add_rows(url, 5)
    with session(url) as connection:
        protocol.register(connection, hourly.spec)
        acquire(connection, hourly.spec)
    assert hourly.at(MIDNIGHT + 2 * A_MOMENT).outcome is Outcome.BUSY
    record = hourly.at(MIDNIGHT + timedelta(seconds=70))
    assert (record.outcome, record.items, record.fence) == (Outcome.SUCCEEDED, 5, 2)
    assert protocol.outcomes(url) == ["abandoned", "busy", "succeeded"]
    assert jobs.query(url, "select error from gaffer.job_runs where outcome = 'abandoned'") == [
        ("found dead by the run of fence 2",)
    ]
    assert jobs.query(url, "select count(*), count(distinct id) from target") == [(5, 5)]


def test_a_stale_look_at_what_is_due_finds_nothing(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """B44: B knows that something is due, and stalls; meanwhile A does it all."""
    jobs.make_source(url, 5)
    real, stalls = leases.acquire, []

    def stall(connection: db.Connection, **fields: Any) -> Any:
        if not stalls:
            stalls.append(None)
            stalls[0] = jobs.run(SPEC, url)
        return real(connection, **fields)

    monkeypatch.setattr(leases, "acquire", stall)
    record = jobs.run(SPEC, url)
    assert (stalls[0].items, stalls[0].fence) == (5, 1)
    assert (record.outcome, record.items, record.batches, record.fence) == (Outcome.SUCCEEDED, 0, 0, 2)
    assert jobs.query(url, "select count(*), count(distinct id) from target") == [(5, 5)]


def test_a_job_without_a_schedule_runs_when_asked(url: str) -> None:
    jobs.make_source(url, 3)
    record = jobs.run(JobSpec("copy_rows", NewRows("source", "id")), url)
    assert (record.outcome, record.items, record.tick, record.next_run_at) == (Outcome.SUCCEEDED, 3, None, None)
    assert record.ticks_covered is None
    assert status(url).last_success_tick is None


def test_a_run_leaves_the_processs_logging_alone(url: str) -> None:
    def state() -> Any:
        loggers = [logging.getLogger(name) for name in (None, "gaffer", "gaffer_dagster", "psycopg")]
        return structlog.is_configured(), [(list(each.handlers), each.level, each.propagate) for each in loggers]

    jobs.make_source(url, 3)
    before = state()
    jobs.run(SPEC, url)
    assert state() == before
    assert not structlog.is_configured()


def test_an_edited_spec_is_kept_beside_the_older_ones(url: str) -> None:
    jobs.make_source(url)
    for rows in (10, 20, 10):
        jobs.run(jobs.spec(batch_rows=rows), url)
    assert jobs.query(url, "select (spec #>> '{bounds,batch_rows}')::int from gaffer.job_spec order by 1") == [
        (10,),
        (20,),
    ]
    assert jobs.query(url, "select (spec #>> '{bounds,batch_rows}')::int from gaffer.job") == [(10,)]
    assert jobs.query(url, "select count(distinct spec_hash) from gaffer.job_runs") == [(2,)]
