"""`gaffer ticks`: the ledger from real runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from gaffer_dagster.domain.due import EachInterval
from gaffer_dagster.domain.ledger import History
from gaffer_dagster.domain.run import Outcome
from gaffer_dagster.domain.spec import JobSpec
from gaffer_dagster.engine.batch import Batch
from gaffer_dagster.testing import Clock
from tests.support import protocol, ticking, variants
from tests.support.ticking import HOURS, BrokenError, Ticking, at, invoke

Make = Callable[[JobSpec], Ticking]


@pytest.fixture
def ticks(url: str, clock: Clock) -> Make:
    return lambda spec: Ticking(url, clock, spec)


def covered(entries: list[tuple[float, str, int | None]]) -> int:
    return sum(disposition.startswith("covered") for _, disposition, _ in entries)


def test_on_time_late_missed_and_to_come(ticks: Make) -> None:
    job = ticks(ticking.spec())
    first = job.run(0.01, 2)
    assert [first.ticks_covered, job.run(1.01, 1, fails=True).outcome] == [1, Outcome.FAILED]
    third = job.run(4.2, 2)  # after an outage
    job.clock.set(at(6.5))
    entries = job.ledger(until=8)
    assert entries == [
        (0, "covered", first.id),
        (1, "covered_late", third.id),  # the failed one covered nothing
        (2, "covered_late", third.id),
        (3, "covered_late", third.id),
        (4, "covered", third.id),  # 12 minutes, and half an hour is its grace
        (5, "missed", None),
        (6, "missed", None),
        (7, "future", None),
        (8, "future", None),
    ]
    assert third.ticks_covered == 4
    assert job.counted() == covered(entries) == 5
    assert job.due == 5


def test_a_day_without_a_daemon_is_one_run(ticks: Make) -> None:
    job = ticks(ticking.spec("*/5 * * * *"))
    job.run(0.01)
    record = job.run(24.01, 3)
    assert (record.outcome, record.items, record.ticks_covered) == (Outcome.SUCCEEDED, 3, 288)
    assert {run for _, _, run in job.ledger(0.001, 24.01)} == {record.id}


def test_a_capped_run_of_rows_covers_nothing_and_the_next_goes_on(ticks: Make) -> None:
    job = ticks(ticking.spec(batch_rows=10, batches=1))
    job.run(0.01)
    capped = job.run(3.01, 25)
    assert (capped.outcome, capped.backlog, capped.ticks_covered) == (Outcome.CAPPED, 15, None)
    assert job.dispositions(until=3) == ["covered", "missed", "missed", "missed"]
    assert job.due == 1
    assert job.wanted() == ["the run before left something to do"]
    assert job.run(3.02).outcome is Outcome.CAPPED
    last = job.run(3.03)
    assert (last.outcome, last.ticks_covered) == (Outcome.SUCCEEDED, 3)
    assert [run for *_, run in job.ledger(0.5, 3)] == [last.id] * 3
    assert job.counted() == covered(job.ledger(until=3)) == 4


def test_a_capped_run_of_intervals_covers_those_that_it_did(ticks: Make) -> None:
    job = ticks(ticking.spec(due=EachInterval(settle="1s", start=at(0)), batches=2))
    job.run(0.01)
    capped = job.run(5.01)
    assert (capped.outcome, capped.items, capped.ticks_covered, job.due) == (Outcome.CAPPED, 2, 2, 3)
    assert job.dispositions(until=5)[1:] == ["covered_late"] * 2 + ["missed"] * 3
    failed = job.run(5.1, work=fail_at(job, 4))
    assert (failed.outcome, failed.items, failed.ticks_covered, job.due) == (Outcome.FAILED, 1, 1, 4)
    last = job.run(5.2)
    assert job.ledger(0.5, 5) == [
        (1, "covered_late", capped.id),
        (2, "covered_late", capped.id),
        (3, "covered_late", failed.id),
        (4, "covered_late", last.id),
        (5, "covered", last.id),
    ]
    assert job.ledger(3, 5) == job.ledger(0.5, 5)[2:]  # a reach that ends at --since is none of those before it
    assert job.counted() == covered(job.ledger(until=5))
    assert job.windows() == [0, 1, 2, 3, 4]


def fail_at(job: Ticking, interval: float) -> Callable[[Batch], None]:
    def work(batch: Batch) -> None:
        if batch.window.until == at(interval):
            raise BrokenError
        job._take(batch)

    return work


def test_what_a_killed_run_committed_is_its_own_in_the_ledger(ticks: Make) -> None:
    job = ticks(ticking.spec(due=EachInterval(settle="1s", start=at(0))))
    job.run(0.01)
    job.clock.set(at(3.01))
    with protocol.session(job.url) as connection:
        dead = protocol.acquire(connection, job.spec)
        batch = protocol.begin(connection)
        protocol.commit(connection, dead.lease, batch, since=dead.grant.position, until={"until": at(2).isoformat()})
    alive = job.run(3.2)
    assert [run for *_, run in job.ledger(0.5, 3)] == [dead.grant.run_id, dead.grant.run_id, alive.id]
    assert job.counted() == covered(job.ledger(until=3)) == 4


def test_paused_late_and_despite_the_pause(ticks: Make) -> None:
    job = ticks(ticking.spec(max_late="10m"))
    job.run(0.01)
    late = job.run(2.5, 1)
    assert (late.outcome, late.ticks_covered, job.due) == (Outcome.LATE, None, 3)
    third = job.run(3.01)
    assert (third.items, third.ticks_covered) == (1, 1)  # what was due at a late tick is done at the next
    job.clock.set(at(3.5))
    job.gaffer("pause", "job", "--until", "5h")
    assert job.run(4.01).outcome is Outcome.PAUSED
    despite = job.run(6.01, 1, despite_pause=True)
    assert (despite.outcome, despite.ticks_covered) == (Outcome.SUCCEEDED, 3)
    assert job.run(7.01, 1).outcome is Outcome.PAUSED
    last = job.run(9.01)
    assert (last.items, last.ticks_covered) == (1, 1)
    entries = job.ledger(until=10)
    assert entries == [
        (0, "covered", 1),
        (1, "late", late.id),
        (2, "late", late.id),
        (3, "covered", third.id),
        (4, "covered_late", despite.id),
        (5, "covered_late", despite.id),
        (6, "covered", despite.id),
        (7, "paused", None),
        (8, "paused", None),
        (9, "covered", last.id),
        (10, "future", None),
    ]
    assert job.counted() == covered(entries) == 6


@pytest.mark.parametrize(
    ("trigger", "outcome"), [("schedule", Outcome.LATE), ("manual", Outcome.SUCCEEDED), ("sensor", Outcome.SUCCEEDED)]
)
def test_only_a_tick_can_be_too_late(ticks: Make, trigger: str, outcome: Outcome) -> None:
    job = ticks(ticking.spec(max_late="10m"))
    assert job.run(1.2, trigger=trigger).outcome is outcome
    # Of what is covered there is nothing to be late for, and what was skipped is skipped once more.
    assert job.run(1.3).outcome is outcome
    assert job.due == 2
    assert job.run(2.1).outcome is Outcome.SUCCEEDED


def test_a_late_tick_that_is_asked_for_again_would_be_caught(ticks: Make, url: str) -> None:
    variants.replace(
        url, "acquire", {"next_due_at <= p_tick then p_next_tick": "next_due_at <= p_tick then next_due_at"}
    )
    with pytest.raises(AssertionError):
        test_only_a_tick_can_be_too_late(ticks, "schedule", Outcome.LATE)


def test_a_late_tick_that_meets_a_holder_is_busy(ticks: Make) -> None:
    """The holder may still do it; it will look again."""
    job = ticks(ticking.spec(max_late="1m"))
    job.clock.set(at(0.01))
    with protocol.session(job.url) as connection:
        protocol.acquire(connection, job.spec, lease=600)
        job.run(0.1)
    assert protocol.outcomes(job.url, "job") == ["running", "busy"]
    assert job.due == 0


def test_a_run_that_ends_behind_a_skipped_tick_does_not_ask_for_it_again(ticks: Make) -> None:
    job = ticks(ticking.spec(due=HOURS, max_late="10m"))
    job.run(0.01)
    assert job.run(5.5).outcome is Outcome.LATE
    failed = job.run(5.6, trigger="manual", work=fail_at(job, 3))
    assert (failed.outcome, failed.items, failed.ticks_covered) == (Outcome.FAILED, 2, 0)
    assert job.due == 6
    assert job.dispositions(until=5) == ["covered", *["late"] * 5]
    job.run(6.01)
    assert job.windows() == [0, 1, 2, 3, 4, 5]
    assert job.counted() == covered(job.ledger(until=6)) == 2


def test_a_run_that_ends_before_a_pause_does_not_ask_for_what_that_skipped(ticks: Make) -> None:
    job = ticks(ticking.spec(due=HOURS))
    job.run(0.01)
    job.clock.set(at(2.5))
    job.gaffer("pause", "job")
    job.clock.set(at(4.5))
    job.gaffer("resume", "job")
    assert job.due == 1  # missed before the pause
    assert job.run(5.1, work=fail_at(job, 3)).ticks_covered == 2
    assert job.due == 5
    assert job.run(5.2).ticks_covered == 1
    assert job.dispositions(until=5) == ["covered", "covered_late", "covered_late", "paused", "paused", "covered"]


def test_a_count_that_ignores_pauses_would_be_caught(ticks: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(History, "count", lambda self, after, until, **_: sum(1 for _ in self.ticks(after, until)))
    with pytest.raises(AssertionError):
        test_paused_late_and_despite_the_pause(ticks)


def test_for_people_and_as_json(ticks: Make) -> None:
    job = ticks(ticking.spec("0 6 * * *", zone="America/New_York"))
    job.run(11.5, 1)
    shown = job.gaffer("ticks", "job")
    lines = [line for line in shown.splitlines() if "2027-" in line]
    assert [line.split()[1:3] for line in lines] == [["2027-03-01", "11:00:00Z"]] + [
        [f"2027-03-0{day}", "11:00:00Z"] for day in (2, 3, 4)
    ]
    assert "covered on time" in lines[0]
    assert "30 minutes" in lines[0]
    assert shown.splitlines()[-1] == "1 covered on time, 3 in future"
    # A time without an offset is one of the job's zone.
    first = json.loads(job.gaffer("ticks", "job", "--json", "--since", "2027-03-01T06:00").splitlines()[0])
    assert first | {"late_seconds": round(first["late_seconds"])} == {
        "tick": "2027-03-01T11:00:00+00:00",
        "disposition": "covered",
        "run": 1,
        "late_seconds": 1800,
    }
    assert "no tick from 2027-03-01 11:00:01Z" in job.gaffer(
        "ticks", "job", "--since", "2027-03-01T06:00:01", "--until", "2027-03-02T05:59"
    )


def test_the_window_is_the_newest_ticks_where_it_is_not_given(ticks: Make) -> None:
    job = ticks(ticking.spec())
    job.clock.set(at(30.5))
    assert sum("2027" in line for line in job.gaffer("ticks", "job").splitlines()) == 23
    assert sum("2027" in line for line in job.gaffer("ticks", "job", "--until", str(at(5))).splitlines()) == 6
    assert "3 in future" in job.gaffer("ticks", "job", "--since", str(at(40.5)))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["job", "--since", "2027-03-02", "--until", "2027-03-01"], "--until '2027-03-01' is before --since"),
        (["job", "--since", "yesterday"], "--since 'yesterday' is no time"),
        (["job", "--since", "1969-12-31"], "in no year from 1970 to 9000"),
        (["job", "--until", ""], "--until '' is no time"),
        (["job", "--until", "2030-01-01"], "has more than 10,000 ticks"),
        (["nosuch"], "no job 'nosuch' is known"),
        (["no/such'; drop table"], "is known to this database"),
        (["\udcff"], "write it in UTF-8"),
    ],
)
def test_what_cannot_be_meant_is_an_instruction(ticks: Make, words: list[str], said: str) -> None:
    job = ticks(ticking.spec())
    done = invoke(job.url, "ticks", *words)
    assert (done.exit_code, done.stdout) == (1, "")
    assert said in done.stderr


def test_a_large_window_comes_line_by_line(ticks: Make) -> None:
    job = ticks(ticking.spec("* * * * *"))
    lines = job.gaffer("ticks", "job", "--json", "--until", "2027-03-11").splitlines()
    assert len({json.loads(line)["tick"] for line in lines}) == len(lines) == 10 * 24 * 60 + 30


def test_a_job_without_a_schedule_has_no_ticks(ticks: Make, url: str) -> None:
    job = ticks(JobSpec("job", ticking.ROWS))
    record = job.run(5, 3)
    assert (record.outcome, record.ticks_covered, record.next_run_at, job.due) == (Outcome.SUCCEEDED, None, None, None)
    assert job.gaffer("ticks", "job").endswith("; it has no schedule.\n")


def test_a_database_that_is_away_is_to_be_tried_again() -> None:
    done = invoke("postgresql://nobody@127.0.0.1:1/nowhere", "ticks", "job")
    assert done.exit_code == 75


def test_the_ticks_of_a_night_of_clock_change(ticks: Make) -> None:
    job: Any = ticks(ticking.spec("30 2 * * *", name="reports/nightly", zone="America/New_York"))
    for day, hour in ((12, 7.6), (13, 7.1)):  # the clock is set on 14 March 2027
        job.run(24 * day + hour)
    told = job.gaffer("ticks", "reports/nightly", "--json", "--since", "2027-03-13").splitlines()
    assert [json.loads(line)["tick"][5:16] for line in told][:3] == ["03-13T07:30", "03-14T07:00", "03-15T06:30"]
    assert [json.loads(line)["disposition"] for line in told][:3] == ["covered", "covered", "future"]


def test_an_h_in_a_cron_is_the_same_minute_in_the_ledger(ticks: Make) -> None:
    job = ticks(ticking.spec("H * * * *", name="a/b-c.d"))
    assert job.spec.schedule is not None
    expected = [ticking.hours(tick) for tick in job.spec.schedule.ticks(at(-0.5), at(4))]
    assert job.run(4).ticks_covered == len(expected)
    assert [hour for hour, *_ in job.ledger(-0.5, 4)] == expected
