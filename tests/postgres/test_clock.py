"""A worker's clock may refuse, and never grant."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest

from gaffer_dagster.domain.run import Outcome
from gaffer_dagster.errors import ClockSkewError
from gaffer_dagster.testing import Clock
from tests.support import jobs, protocol

MINUTES = timedelta(minutes=1)


@pytest.mark.parametrize("apart", [timedelta(minutes=10), timedelta(minutes=-10), timedelta(days=400)])
def test_clocks_far_apart_fail_the_run_naming_both(url: str, apart: timedelta) -> None:
    """B53."""
    jobs.make_source(url, 3)
    with pytest.raises(ClockSkewError, match=r"this worker \(2.*\) and the database's \(2.*\) are .* apart") as raised:
        jobs.run(jobs.spec(), url, worker_clock=lambda: datetime.now(timezone.utc) + apart)
    assert protocol.outcomes(url) == ["failed"]
    assert jobs.query(url, "select error from gaffer.job_runs")[0][0].endswith(str(raised.value))
    assert jobs.query(url, "select count(*) from target") == [(0,)]
    assert protocol.lease_row(url)[:2] == (1, None)
    assert jobs.run(jobs.spec(), url).items == 3


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
