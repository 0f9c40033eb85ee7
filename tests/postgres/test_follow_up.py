"""What is wanted without waiting for a tick: the sensor asks for it soon."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta

import psycopg
import pytest

from gaffer_dagster.domain.run import Outcome
from gaffer_dagster.engine.batch import Batch
from gaffer_dagster.store import db
from gaffer_dagster.store import jobs as job_table
from gaffer_dagster.testing import Clock
from tests.support import jobs, protocol, ticking, variants
from tests.support.ticking import MINUTE, SECOND, BrokenError, Ticking, at

LEFT, DEAD = ["the run before left something to do"], ["the run before is dead"]


@pytest.fixture
def job(url: str, clock: Clock) -> Ticking:
    made = Ticking(url, clock, ticking.spec(batch_rows=10, batches=1))
    assert made.run(0.01).outcome is Outcome.SUCCEEDED
    assert made.wanted() == []
    return made


def follow_up(job: Ticking) -> datetime | None:
    return job.record.follow_up_at


def test_after_a_capped_run_at_once_until_one_succeeds(job: Ticking) -> None:
    assert [job.run(1.01, 25).outcome, job.wanted()] == [Outcome.CAPPED, LEFT]
    assert [job.run(1.02).outcome, job.wanted()] == [Outcome.CAPPED, LEFT]
    assert [job.run(1.03).outcome, job.wanted()] == [Outcome.SUCCEEDED, []]
    assert follow_up(job) is None


def test_after_a_capped_run_that_did_nothing_in_a_minute(url: str, clock: Clock) -> None:
    """Who held it up is at work still; a run for each look of the sensor would be a storm."""
    job = Ticking(url, clock, ticking.spec(due=ticking.HOURS, timeout="3s"))
    with jobs.connect(url) as connection, connection.transaction():
        connection.execute("select pg_current_xact_id()")
        capped = job.run(1.01)
    assert (capped.outcome, capped.items, capped.backlog) == (Outcome.CAPPED, 0, 1)
    assert job.wanted() == []
    job.clock.advance(61 * SECOND)
    assert job.wanted() == LEFT
    assert job.run(1.1).items == 1


def raising(error: Exception) -> Callable[[Batch], None]:
    def work(batch: Batch) -> None:
        raise error

    return work


def test_after_a_failure_that_may_pass_in_a_minute(job: Ticking, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gaffer_dagster.engine.run._ATTEMPTS", 1)
    with pytest.raises(psycopg.errors.DeadlockDetected):
        job.run(1.01, 1, work=raising(psycopg.errors.DeadlockDetected("deadlock")))
    assert (job.record.last_outcome, job.wanted()) == (Outcome.FAILED, [])
    since = follow_up(job)
    assert since is not None
    assert timedelta(seconds=50) < since - job.clock.now() <= MINUTE
    job.clock.advance(61 * SECOND)
    assert job.wanted() == LEFT


def test_not_after_a_failure_that_will_not_pass(job: Ticking) -> None:
    assert job.run(1.01, 1, fails=True).outcome is Outcome.FAILED
    job.clock.set(at(5))
    assert (job.wanted(), follow_up(job)) == ([], None)


def meets(job: Ticking, then: Callable[[Batch], None]) -> Callable[[Batch], None]:
    """Work during which a wake-up comes, and goes away."""

    def work(batch: Batch) -> None:
        if batch.number == 1:
            with protocol.session(job.url) as connection:
                assert protocol.acquire(connection, job.spec).grant.outcome == "busy"
        then(batch)

    return work


def test_a_wake_up_that_met_a_failing_run_is_followed_up(job: Ticking) -> None:
    failed = job.run(1.01, 1, work=meets(job, raising(BrokenError())))
    assert (failed.outcome, job.wanted()) == (Outcome.FAILED, LEFT)
    assert job.run(1.02).outcome is Outcome.SUCCEEDED
    assert job.wanted() == []


def test_a_wake_up_that_met_a_run_which_succeeds_was_looked_for(job: Ticking) -> None:
    assert job.run(1.01, 1, work=meets(job, jobs.copy_rows)).outcome is Outcome.SUCCEEDED
    assert (job.wanted(), follow_up(job)) == ([], None)


def test_after_a_holder_died_once_its_lease_is_over(job: Ticking) -> None:
    job.clock.set(at(1.01))
    with protocol.session(job.url) as connection:
        protocol.acquire(connection, job.spec, lease=60)
        assert job.wanted() == []
        job.clock.advance(61 * SECOND)
        assert job.wanted() == DEAD
    assert job.run(1.1).outcome is Outcome.SUCCEEDED
    assert job.wanted() == []


def test_each_cause_has_one_name(job: Ticking) -> None:
    """Dagster takes each run key once: the same as long as nothing happened, and another after the next run."""

    def keys() -> list[str]:
        with db.connect(job.url, application_name="test") as connection:
            return [each.key for each in job_table.wanted(connection, ["job"])]

    job.run(1.01, 35)
    first = keys()
    job.clock.advance(30 * SECOND)
    assert keys() == first
    job.run(1.1)
    assert len({*first, *keys()}) == 2


def test_not_while_it_is_held_or_paused(job: Ticking) -> None:
    job.run(1.01, 25)
    job.gaffer("pause", "job", "--until", "1h")
    assert job.wanted() == []
    job.clock.set(at(2.5))
    assert job.wanted() == LEFT
    with protocol.session(job.url) as connection:
        attempt = protocol.acquire(connection, job.spec)
        assert (job.wanted(), follow_up(job)) == ([], None)  # the next acquire has taken it up
        protocol.end(connection, attempt.lease)
    assert job.wanted() == []


def test_only_of_the_jobs_that_are_asked_for(job: Ticking) -> None:
    job.run(1.01, 25)
    with db.connect(job.url, application_name="test") as connection:
        assert job_table.wanted(connection, ["another"]) == []
        assert job_table.wanted(connection, []) == []


BROKEN = {
    "a wish is forgotten": (
        "end_run",
        {"case when wanted_at is distinct from p_wanted_at then v_now\n": "case when false then v_now\n"},
        test_a_wake_up_that_met_a_failing_run_is_followed_up,
    ),
    "a follow-up outlives the next run": (
        "acquire",
        {"set follow_up_at = null where name = p_job and follow_up_at is not null": "set follow_up_at = follow_up_at"},
        test_not_while_it_is_held_or_paused,
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_follow_up_would_be_caught(job: Ticking, name: str) -> None:
    function, replaced, test = BROKEN[name]
    variants.replace(job.url, function, replaced)
    with pytest.raises(AssertionError):
        test(job)
