"""One interval once more: recorded as such, and the job stays as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gaffer_dagster.domain.due import EachInterval, Elapsed
from gaffer_dagster.domain.run import Outcome
from gaffer_dagster.engine.batch import Batch
from gaffer_dagster.errors import BadInputError, ClockSkewError
from gaffer_dagster.testing import Clock
from tests.postgres.test_command import told
from tests.support import jobs, protocol, ticking, variants
from tests.support.ticking import DAY, MINUTE, SECOND, Ticking, at, hours
from tests.support.warm import gaffer

INTERVALS = EachInterval(settle="1s", start=at(0))
JOB = """
    select spec_hash, covered_until, skipped_until, last_success_at, last_success_tick, consecutive_failures,
           failed_ticks, next_due_at, follow_up_at, position
      from gaffer.job join gaffer.job_watermark on job = name
    """


@pytest.fixture
def job(url: str, clock: Clock) -> Ticking:
    made = Ticking(url, clock, ticking.spec(due=INTERVALS, batches=3))
    assert made.run(0.01).outcome is Outcome.SUCCEEDED
    assert made.run(3.01, trigger="sensor").items == 3
    return made


def state(job: Ticking) -> Any:
    return jobs.query(job.url, JOB)


def redo(job: Ticking, interval: float, when: float = 3.1, **given: Any) -> Any:
    return job.run(when, redo=at(interval), **given)


@pytest.mark.parametrize("time", [1, 1.5, 1.9999])
def test_the_interval_that_a_time_is_in_is_done_again(job: Ticking, time: float) -> None:
    before = state(job)
    seen: list[tuple[Any, ...]] = []

    def work(batch: Batch) -> None:
        seen.append((hours(batch.window.since), hours(batch.window.until), batch.key, batch.number))
        job._take(batch)

    record = redo(job, time, work=work)
    assert seen == [(1, 2, f"job/{at(1).isoformat()}/{at(2).isoformat()}", 1)]
    assert (record.outcome, record.trigger, record.items, record.batches) == (Outcome.SUCCEEDED, "redo", 1, 1)
    assert (record.redo_since, record.redo_until, record.ticks_covered) == (at(1), at(2), None)
    assert record.watermark_from == record.watermark_to == {"until": at(3).isoformat()}
    assert state(job) == before
    assert job.windows() == [0, 1, 2, 1]
    assert [run for *_, run in job.ledger(until=3)] == [1, 2, 2, 2]


def test_a_redo_that_fails_is_no_failure_of_the_job(job: Ticking) -> None:
    job.run(4.01, fails=True)
    before = state(job)
    for _ in range(3):
        record = redo(job, 1, 4.1, fails=True)
    assert (record.outcome, record.trigger, record.error) == (Outcome.FAILED, "redo", "BrokenError: ")
    assert state(job) == before
    assert redo(job, 1, 4.2).outcome is Outcome.SUCCEEDED
    assert state(job) == before  # nor does its success end the streak
    assert job.record.consecutive_failures == 1


def test_the_status_is_of_the_job_and_not_of_a_redo(job: Ticking) -> None:
    capped = job.run(9.01)
    assert (capped.outcome, capped.backlog) == (Outcome.CAPPED, 3)
    redo(job, 1, 9.1)
    assert (job.record.last_outcome, job.record.backlog) == (Outcome.CAPPED, 3)


def test_what_was_to_be_followed_up_still_is(job: Ticking) -> None:
    job.run(9.01)
    before = state(job)
    assert job.wanted() == ["the run before left something to do"]
    for fails in (False, True):
        redo(job, 1, 9.1, fails=fails)
        assert state(job) == before
    assert job.wanted() == ["the run before left something to do"]


def test_a_wake_up_that_met_a_redo_is_followed_up(job: Ticking) -> None:
    def work(batch: Batch) -> None:
        with protocol.session(job.url) as connection:
            assert protocol.acquire(connection, job.spec).grant.outcome == "busy"

    assert redo(job, 1, work=work).outcome is Outcome.SUCCEEDED
    assert job.wanted() == ["the run before left something to do"]
    job.run(3.2)
    assert job.wanted() == []


def test_a_killed_redo_is_found_dead_and_is_no_failure_of_the_job(job: Ticking) -> None:
    before = state(job)
    with protocol.session(job.url) as connection:
        job.clock.set(at(3.1))
        window = job.spec.interval_of(at(1))
        protocol.acquire(connection, job.spec, trigger="redo", redo=window)
    job.clock.advance(61 * SECOND)
    assert redo(job, 2, 3.2).outcome is Outcome.SUCCEEDED
    assert protocol.outcomes(job.url, "job")[-2:] == ["abandoned", "succeeded"]
    assert state(job) == before


def test_what_a_killed_run_left_is_not_done_by_a_redo_that_finds_it(job: Ticking) -> None:
    job.clock.set(at(4.01))
    with protocol.session(job.url) as connection:
        protocol.acquire(connection, job.spec)
    job.clock.advance(61 * SECOND)
    assert redo(job, 1, 4.1).outcome is Outcome.SUCCEEDED
    assert job.record.consecutive_failures == 1
    assert job.wanted() == ["the run before left something to do"]
    assert job.run(4.2).items == 1
    assert job.wanted() == []


@pytest.mark.parametrize("time", [3, 3.05, 30])
def test_an_interval_that_was_not_done_is_refused(job: Ticking, time: float) -> None:
    before = state(job)
    with pytest.raises(BadInputError, match=r"has not been done yet, .* a run without --interval does what is due"):
        redo(job, time)
    assert state(job) == before
    assert job.windows() == [0, 1, 2]


def test_an_interval_before_the_first_is_refused(job: Ticking, url: str, clock: Clock) -> None:
    with pytest.raises(BadInputError, match=r"has no interval at 2027-02-28T23:00:00\+00:00: it goes from 2027-03-01"):
        redo(job, -1)
    job.register(3.2, ticking.spec(due=EachInterval(settle="1s"), name="later"))
    job.run(5.01)
    assert job.windows()[3:] == [4]
    with pytest.raises(BadInputError, match="has not been done yet"):
        redo(job, 1, 5.1)
    assert redo(job, 4, 5.2).outcome is Outcome.SUCCEEDED


@pytest.mark.parametrize("due", [ticking.ROWS, Elapsed("1h", settle="1s")])
def test_a_job_that_is_not_due_by_intervals_is_refused(url: str, clock: Clock, due: Any) -> None:
    job = Ticking(url, clock, ticking.spec(due=due))
    with pytest.raises(BadInputError, match="is not due by intervals"):
        redo(job, 1)
    assert jobs.query(url, "select count(*)::int from gaffer.job_runs") == [(0,)]


def test_a_pause_and_a_holder_keep_a_redo_away_too(job: Ticking) -> None:
    with protocol.session(job.url) as connection:
        attempt = protocol.acquire(connection, job.spec)
        assert redo(job, 1, 3.02).outcome is Outcome.BUSY
        protocol.end(connection, attempt.lease)
    job.gaffer("pause", "job")
    assert redo(job, 1).outcome is Outcome.PAUSED
    assert redo(job, 1, despite_pause=True).outcome is Outcome.SUCCEEDED


def test_a_wrong_clock_is_no_failure_of_the_job_either(job: Ticking) -> None:
    before = state(job)
    with pytest.raises(ClockSkewError):
        redo(job, 1, worker_clock=lambda: job.clock.now() + 10 * MINUTE)
    assert protocol.outcomes(job.url, "job")[-1] == "failed"
    assert state(job) == before


def test_an_interval_of_a_day_that_has_23_hours(url: str, clock: Clock) -> None:
    job = Ticking(url, clock, jobs.daily("job", start="2027-03-13", settle="1s"))
    job.run(15 * 24 + 12)
    windows = jobs.query(url, "select since from windows order by n")
    record = redo(job, 13 * 24 + 12, 15 * 24 + 13)
    assert (record.redo_since, record.redo_until) == (at(13 * 24 + 5), at(14 * 24 + 4))
    assert record.redo_until - record.redo_since == DAY - 60 * MINUTE
    assert len(windows) == 3


MODULE = """
import gaffer_dagster as gd

@gd.gaffer_asset(due=gd.EachInterval("@daily", start="2026-01-01", until="2026-01-04"),
                 schedule=gd.Schedule("0 6 * * *", timezone="America/New_York"))
def days(batch):
    batch.execute("insert into windows (since) values (%s)", [batch.window.since])

@gd.gaffer_asset(due=gd.NewRows("source", "id"))
def rows(batch):
    pass
"""


def test_gaffer_run_interval(url: str, tmp_path: Path) -> None:
    jobs.make_source(url)
    jobs.execute(url, "create table windows (since timestamptz)")
    (tmp_path / "defined.py").write_text(MODULE)

    def run(job: str, *words: str) -> Any:
        return gaffer(url, tmp_path, "run", job, "-m", "defined", "--json", *words)

    refused = run("days", "--interval", "2026-01-02")
    assert (refused.returncode, "has not been done yet" in refused.stderr) == (1, True)
    assert told(run("days"))[0]["items"] == 3
    done = run("days", "--interval", "2026-01-02", "--by", "ann", "--reason", "a late row")  # the local day
    assert done.returncode == 0, done.stderr
    kept = jobs.query(url, "select by, reason, details ->> 'since' from gaffer.operator_action where action = 'redo'")
    assert kept == [("ann", "a late row", "2026-01-02T05:00:00+00:00")]
    assert {key: told(done)[0][key] for key in ("trigger", "items", "redo_since", "redo_until", "outcome")} == {
        "trigger": "redo",
        "items": 1,
        "redo_since": "2026-01-02T05:00:00+00:00",
        "redo_until": "2026-01-03T05:00:00+00:00",
        "outcome": "succeeded",
    }
    assert jobs.query(url, "select max(n)::int from (select count(*) n from windows group by since) each") == [(2,)]
    gaffer(url, tmp_path, "pause", "days")
    paused = run("days", "--interval", "2026-01-02")
    assert (paused.returncode, "the interval was not done, since the job is paused" in paused.stderr) == (75, True)
    for job, time, said in (
        ("days", "2026-01-04", "to 2026-01-04T00:00:00-05:00; give a time in between"),
        ("days", "the second", "--interval 'the second' is no time"),
        ("rows", "2026-01-02", "is not due by intervals"),
    ):
        refused = run(job, "--interval", time)
        assert (refused.returncode, said in refused.stderr) == (1, True), refused.stderr


BROKEN = {
    "a redo resets the streak": (
        "end_run",
        {"    if v_run.trigger <> 'redo' then\n        if p_outcome": "    if true then\n        if p_outcome"},
        test_a_redo_that_fails_is_no_failure_of_the_job,
    ),
    "a redo clears what is to be followed up": (
        "acquire",
        {"    if p_redo is null then\n        update gaffer.job": "    if true then\n        update gaffer.job"},
        test_what_was_to_be_followed_up_still_is,
    ),
    "a redo forgets the wake-up that met it": (
        "end_run",
        {"case when wanted_at is distinct from p_wanted_at then v_now\n": "case when false then v_now\n"},
        test_a_wake_up_that_met_a_redo_is_followed_up,
    ),
    "a redo takes the place of a dead run": (
        "acquire",
        {"set follow_up_at = gaffer.clock() where name = p_job and p_redo is not null": "set follow_up_at = null"},
        test_what_a_killed_run_left_is_not_done_by_a_redo_that_finds_it,
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_redo_would_be_caught(job: Ticking, name: str) -> None:
    function, replaced, test = BROKEN[name]
    variants.replace(job.url, function, replaced)
    with pytest.raises(AssertionError):
        test(job)
