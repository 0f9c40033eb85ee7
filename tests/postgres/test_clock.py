"""A worker's clock may refuse, and never grant."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest

from gaffer_dagster.domain.ledger import Disposition, ledger
from gaffer_dagster.domain.run import Outcome
from gaffer_dagster.engine.batch import Batch
from gaffer_dagster.engine.holding import Holding
from gaffer_dagster.errors import ClockSkewError, ForeignWatermarkError
from gaffer_dagster.store import history
from gaffer_dagster.store import jobs as job_table
from gaffer_dagster.testing import Clock
from tests.support import jobs, protocol

MINUTES, HOUR = timedelta(minutes=1), timedelta(hours=1)


@pytest.mark.parametrize("apart", [timedelta(minutes=10), timedelta(minutes=-10), timedelta(days=400)])
def test_clocks_far_apart_fail_the_run_naming_both(url: str, apart: timedelta) -> None:
    """B53."""
    jobs.make_source(url, 3)
    with protocol.session(url) as connection:
        protocol.register(connection, jobs.spec())
    with pytest.raises(ClockSkewError, match=r"this worker \(2.*\) and the database's \(2.*\) are .* apart") as raised:
        jobs.run(jobs.spec(), url, worker_clock=lambda: datetime.now(timezone.utc) + apart)
    assert protocol.outcomes(url) == ["failed"]
    assert jobs.query(url, "select error from gaffer.job_runs")[0][0].endswith(str(raised.value))
    assert jobs.query(url, "select count(*) from target") == [(0,)]
    assert protocol.lease_row(url)[:2] == (0, None)
    assert jobs.run(jobs.spec(), url).items == 3


def test_a_job_is_not_made_known_by_a_wrong_clock(url: str) -> None:
    """It would be first seen then, and its time would begin then."""
    jobs.make_source(url, 3)
    with pytest.raises(ClockSkewError):
        jobs.run(jobs.spec(), url, worker_clock=lambda: datetime.now(timezone.utc) - timedelta(days=3650))
    assert jobs.query(url, "select count(*) from gaffer.job") == [(0,)]


def test_a_clock_that_is_ten_years_ahead_for_a_while_leaves_nothing_behind(url: str, clock: Clock) -> None:
    """Neither the holder at work then, nor the job afterwards, is the worse for it."""
    now = datetime.now(timezone.utc)
    jobs.make_source(url, 2)
    rows, days = jobs.spec(batch_rows=1), jobs.daily("daily", start=(now - timedelta(days=3)).date().isoformat())
    work = {"copy_rows": jobs.copy_rows, "daily": lambda batch: None}
    jobs.run(days, url, work["daily"])
    before = jobs.query(url, "select position from gaffer.job_watermark order by job")

    def jumps(batch: Batch) -> None:
        jobs.copy_rows(batch)
        if batch.number == 1:
            clock.advance(timedelta(days=3650))
            for job in (rows, days):
                with pytest.raises(ClockSkewError):
                    jobs.run(job, url, work[job.name])
            clock.advance(timedelta(days=-3650))

    record = jobs.run(rows, url, jumps)
    assert (record.outcome, record.items, record.fence) == (Outcome.SUCCEEDED, 2, 1)
    assert jobs.query(url, "select position from gaffer.job_watermark where job = 'daily'") == before
    jobs.add_rows(url, 1)
    assert jobs.run(rows, url).items == 1
    assert jobs.run(days, url, work["daily"]).outcome is Outcome.SUCCEEDED
    with protocol.session(url) as connection:
        for status in job_table.status(connection):
            assert status.last_outcome is Outcome.SUCCEEDED
            assert status.next_due_at is not None
            assert status.next_due_at < now + timedelta(days=2)


def test_a_success_in_the_future_does_not_cover_the_ticks_until_then(url: str, clock: Clock) -> None:
    """The worker's clock ran ahead too."""
    jobs.make_source(url, 1)
    for days in (3650, -3650):
        clock.advance(timedelta(days=days))
        assert jobs.run(jobs.spec(), url, worker_clock=clock.now).outcome is Outcome.SUCCEEDED
    clock.advance(timedelta(hours=3))
    record = jobs.run(jobs.spec(), url, worker_clock=clock.now)
    assert record.ticks_covered == 3
    with protocol.session(url) as connection:
        status = job_table.get(connection, "copy_rows")
        past = history.of_job(connection, "copy_rows", record.started_at - timedelta(days=1))
    assert status.open_tick is not None
    assert record.started_at < status.open_tick <= record.started_at + timedelta(hours=1)
    found = list(ledger(past, record.started_at, record.started_at + timedelta(hours=2), now=clock.now(), grace=HOUR))
    assert {tick.disposition for tick in found} == {Disposition.FUTURE}


def test_a_pause_that_was_set_by_a_clock_far_ahead_is_as_long_as_it_was_meant(url: str, clock: Clock) -> None:
    jobs.make_source(url, 1)
    jobs.run(jobs.spec(), url)
    clock.advance(timedelta(days=3650))
    jobs.execute(url, "select gaffer.pause('copy_rows', gaffer.clock() + interval '1 hour', null, 'ann', null)")
    clock.advance(timedelta(days=-3650))
    jobs.add_rows(url, 1)
    assert jobs.run(jobs.spec(), url).outcome is Outcome.PAUSED
    with protocol.session(url) as connection:
        status = job_table.get(connection, "copy_rows")
        past = history.of_job(connection, "copy_rows", status.seen_at)
    assert status.pause is not None
    assert status.pause.holds(status.seen_at)
    assert list(past.pauses) == [status.pause]
    clock.advance(HOUR)
    assert jobs.run(jobs.spec(), url, worker_clock=clock.now).items == 1


def test_a_watermark_in_the_future_is_said_and_not_waited_for(url: str, clock: Clock) -> None:
    """Where the worker's clock ran ahead too, nobody could tell; afterwards, a job that idles would be silence."""
    start = (datetime.now(timezone.utc) - timedelta(days=3)).date().isoformat()
    job = jobs.daily("daily", start=start)
    clock.advance(timedelta(days=90))
    assert jobs.run(job, url, lambda batch: None, worker_clock=clock.now).items >= 90
    clock.advance(timedelta(days=-90))
    with pytest.raises(ForeignWatermarkError, match="a clock ran ahead for a while"):
        jobs.run(job, url, lambda batch: None)


def test_a_run_waits_for_the_tick_that_woke_it(url: str) -> None:
    """The daemon's clock is ahead of the database's: going by what that says, the tick would not be covered, and what
    is due at it would wait for the next."""
    jobs.make_source(url, 1)
    tick = datetime.now(timezone.utc) + timedelta(seconds=2)
    record = jobs.run(jobs.spec(), url, trigger="schedule", tick=tick)
    assert record.started_at >= tick


def test_a_run_that_does_not_wait_for_its_tick_would_be_caught(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Holding, "_wait_for", lambda self, tick, now: now)
    with pytest.raises(AssertionError):
        test_a_run_waits_for_the_tick_that_woke_it(url)


def test_a_tick_far_ahead_of_the_database_is_refused(url: str) -> None:
    jobs.make_source(url, 1)
    with pytest.raises(ClockSkewError, match="set the clock of Dagster's daemon right"):
        jobs.run(jobs.spec(), url, trigger="schedule", tick=datetime.now(timezone.utc) + timedelta(minutes=6))


@pytest.mark.parametrize("apart", [timedelta(minutes=4), timedelta(minutes=-4)])
def test_clocks_a_little_apart_do_no_harm(url: str, apart: timedelta) -> None:
    jobs.make_source(url, 3)
    before = datetime.now(timezone.utc)
    record = jobs.run(jobs.spec(), url, worker_clock=lambda: datetime.now(timezone.utc) + apart)
    assert (record.outcome, record.items) == (Outcome.SUCCEEDED, 3)
    assert abs(record.started_at - before) < timedelta(minutes=2)  # the database's time, not the worker's


def test_the_worker_cannot_hurry_a_take_over(url: str) -> None:
    """Four minutes ahead, a lease of a minute looks long over to this worker, and to nobody else."""
    jobs.make_source(url, 3)
    with protocol.session(url) as connection:
        protocol.register(connection, jobs.spec())
        protocol.acquire(connection, jobs.spec())
    ahead = jobs.run(jobs.spec(), url, worker_clock=lambda: datetime.now(timezone.utc) + 4 * MINUTES)
    assert ahead.outcome is Outcome.BUSY


def test_a_test_moves_the_one_clock_of_database_and_engine(url: str, clock: Clock) -> None:
    jobs.make_source(url, 1)
    at = datetime(2031, 5, 1, 12, 30, tzinfo=timezone.utc)
    clock.set(at)
    record = jobs.run(jobs.spec(), url, worker_clock=clock.now)
    assert record.outcome is Outcome.SUCCEEDED
    assert record.tick == datetime(2031, 5, 1, 12, tzinfo=timezone.utc)
    for moment in (record.started_at, record.ended_at, clock.now()):
        assert moment is not None
        assert at <= moment < at + 2 * MINUTES
    clock.advance(-365 * 24 * 60 * MINUTES)
    assert clock.now().year == 2030
    with pytest.raises(ClockSkewError):
        jobs.run(jobs.spec(), url)
