"""`Elapsed`: all the time since the watermark, up to the newest tick and no further, when it has settled."""

from __future__ import annotations

import logging
from datetime import datetime, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

import psycopg
import pytest

from gaffer_dagster.domain.bounds import Bounds
from gaffer_dagster.domain.due import EachInterval, Elapsed, NewRows, Stretches
from gaffer_dagster.domain.run import Outcome
from gaffer_dagster.domain.schedule import Schedule
from gaffer_dagster.domain.spec import JobSpec
from gaffer_dagster.engine.batch import Batch
from gaffer_dagster.errors import BadInputError, ForeignWatermarkError
from gaffer_dagster.store import horizon
from gaffer_dagster.testing import Clock
from tests.support import jobs
from tests.support.protocol import Actor, until
from tests.support.windows import Windows

NEW_YORK = ZoneInfo("America/New_York")
NINE = datetime(2027, 3, 1, 9, tzinfo=timezone.utc)
HOUR, MINUTE, SECOND = timedelta(hours=1), timedelta(minutes=1), timedelta(seconds=1)


def hourly(length: str | None = None, *, start: Any = NINE, timeout: str = "5m", **given: Any) -> JobSpec:
    bounds = Bounds(timeout=timeout, batches=given.pop("batches", 100))
    return JobSpec("hourly", Elapsed(length, start=start, **given), Schedule("0 * * * *"), bounds)


@pytest.fixture
def windows(url: str, clock: Clock) -> Windows:
    return Windows(url, clock)


def test_all_the_time_is_one_batch_up_to_the_newest_tick(windows: Windows) -> None:
    record = windows.run(hourly(), at=NINE + 5 * HOUR + 20 * MINUTE)
    assert (record.outcome, record.batches, record.items, record.backlog) == (Outcome.SUCCEEDED, 1, 1, 0)
    assert record.watermark_to == {"until": (NINE + 5 * HOUR).isoformat()}
    assert windows.taken() == [(NINE, NINE + 5 * HOUR)]


@pytest.mark.parametrize("length", [None, "20m"])
def test_a_second_tick_finds_nothing(windows: Windows, length: str | None) -> None:
    windows.run(hourly(length), at=NINE + 3 * HOUR + 2 * MINUTE)
    for later in (timedelta(), 57 * MINUTE):
        windows.clock.advance(later)
        second = windows.run(hourly(length))
        assert (second.outcome, second.items, second.batches, second.backlog) == (Outcome.SUCCEEDED, 0, 0, 0)
    assert windows.are_all_of(NINE, NINE + 3 * HOUR)


def test_time_up_to_the_instant_would_be_caught(windows: Windows, monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken variant of the test above: each wake-up takes the crumbs since the last."""
    monkeypatch.setattr(Stretches, "_time", lambda self, since, bound: bound - since)
    windows.run(hourly(settle="1ms"), at=NINE + 3 * HOUR + 2 * MINUTE)
    assert windows.run(hourly(settle="1ms")).items == 1
    assert not windows.are_all_of(NINE, NINE + 3 * HOUR)


def test_slices_are_whole_and_what_is_less_waits_for_a_later_tick(windows: Windows) -> None:
    job = hourly("40m")
    assert [windows.run(job, at=NINE + n * HOUR + 2 * MINUTE).items for n in (1, 2, 3)] == [1, 2, 1]
    assert windows.lengths() == [40 * MINUTE] * 4
    assert windows.are_all_of(NINE, NINE + 160 * MINUTE)


def test_a_failed_slice_is_done_again_with_its_bounds_and_key(windows: Windows) -> None:
    keys, fails = windows.fails_at_the_second()
    with pytest.raises(ValueError, match="no"):
        windows.run(hourly("1h"), at=NINE + 2 * HOUR + 2 * MINUTE, work=fails)
    assert windows.run(hourly("1h"), at=NINE + 3 * HOUR + 2 * MINUTE, work=fails).items == 2
    assert keys[1] == keys[2] == "hourly/2027-03-01T10:00:00+00:00/2027-03-01T11:00:00+00:00"
    assert windows.are_all_of(NINE, NINE + 3 * HOUR)


def test_all_the_time_is_more_after_a_failure_and_has_no_key(windows: Windows) -> None:
    def fails(batch: Batch) -> None:
        windows.take(batch)
        with pytest.raises(BadInputError, match="need not repeat"):
            _ = batch.key
        with pytest.raises(LookupError, match="give Elapsed a slice"):
            batch.key_for({})
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        windows.run(hourly(), at=NINE + 2 * HOUR + 2 * MINUTE, work=fails)
    assert windows.run(hourly(), at=NINE + 3 * HOUR + 2 * MINUTE).items == 1
    assert windows.taken() == [(NINE, NINE + 3 * HOUR)]


def test_a_run_stops_at_its_bounds_and_the_next_goes_on(windows: Windows) -> None:
    job = hourly("1h", batches=10)
    records = [windows.run(job, at=NINE + 24 * HOUR + 2 * MINUTE)] + [windows.run(job) for _ in range(2)]
    assert [(one.outcome, one.items, one.backlog) for one in records] == [
        (Outcome.CAPPED, 10, 14),
        (Outcome.CAPPED, 10, 4),
        (Outcome.SUCCEEDED, 4, 0),
    ]
    assert windows.are_all_of(NINE, NINE + 24 * HOUR)


def test_a_first_run_without_a_start_begins_in_the_minute_it_was_seen(windows: Windows) -> None:
    job = hourly(start=None)
    assert windows.run(job, at=NINE + 20 * MINUTE + 31 * SECOND).items == 0
    assert windows.run(job, at=NINE + HOUR + 2 * MINUTE).items == 1
    assert windows.taken() == [(NINE + 20 * MINUTE, NINE + HOUR)]


def test_nothing_is_due_before_a_start_that_may_be_any_instant(windows: Windows) -> None:
    start = NINE + 30 * MINUTE + 7 * SECOND
    for at in (NINE - 5 * HOUR, NINE + 2 * MINUTE, NINE + 59 * MINUTE):
        record = windows.run(hourly(start=start), at=at)
        assert (record.outcome, record.items, record.backlog) == (Outcome.SUCCEEDED, 0, 0)
    assert windows.run(hourly(start=start), at=NINE + HOUR + 2 * MINUTE).items == 1
    assert windows.taken() == [(start, NINE + HOUR)]


def test_a_tick_that_passed_before_the_run_is_waited_for_while_it_settles(windows: Windows) -> None:
    record = windows.run(hourly(settle="1500ms"), at=NINE + HOUR)
    assert (record.outcome, record.items) == (Outcome.SUCCEEDED, 1)
    assert record.ended_at is not None
    assert record.ended_at >= NINE + HOUR + timedelta(milliseconds=1500)


def test_a_tick_that_passes_while_the_run_waits_belongs_to_the_next(windows: Windows) -> None:
    record = windows.run(hourly(settle="2s"), at=NINE + HOUR - timedelta(milliseconds=300))
    assert (record.outcome, record.items, record.ticks_covered) == (Outcome.SUCCEEDED, 0, 0)


@pytest.mark.parametrize("length", [None, "30m"])
def test_what_settles_later_than_a_run_may_last_is_left_to_a_later_tick(windows: Windows, length: str | None) -> None:
    job = hourly(length, settle="90m", timeout="5m")
    for at, end in ((2 * HOUR + 29 * MINUTE, None), (2 * HOUR + 31 * MINUTE, HOUR), (5 * HOUR, 3 * HOUR)):
        record = windows.run(job, at=NINE + at)
        assert (record.outcome, record.backlog) == (Outcome.SUCCEEDED, 0)
        if end is None:
            assert windows.taken() == []
        else:
            assert windows.are_all_of(NINE, NINE + end)


@pytest.mark.parametrize(("length", "left"), [(None, 1), ("15m", 4)])
def test_a_transaction_from_before_the_tick_holds_it(windows: Windows, length: str | None, left: int) -> None:
    job = hourly(length, settle="1ms", timeout="2s")
    with psycopg.connect(windows.url) as writer:
        writer.execute("create table stamped (at timestamptz)")
        record = windows.run(job, at=NINE + HOUR + MINUTE)
        assert (record.outcome, record.items, record.backlog) == (Outcome.CAPPED, 0, left)
        writer.commit()
    assert windows.run(job).items == left
    assert windows.are_all_of(NINE, NINE + HOUR)


@pytest.mark.parametrize("holds", [True, False])
def test_a_row_that_is_committed_late_is_seen_unless_nothing_waits_for_it(
    windows: Windows, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, holds: bool
) -> None:
    if not holds:  # the broken variant, that would lose it
        monkeypatch.setattr(horizon, "open_before", lambda connection, mark: None)
    caplog.set_level(logging.DEBUG, "gaffer")
    jobs.execute(windows.url, "create table stamped (at timestamptz)")
    counts: list[int] = []

    def count(batch: Batch) -> None:
        text = "select count(*) from stamped where at >= %s and at < %s"
        row = batch.execute(text, [batch.window.since, batch.window.until]).fetchone()
        counts.append(row[0])

    with psycopg.connect(windows.url) as writer:
        writer.execute("insert into stamped values (%s)", [NINE + HOUR - SECOND])
        run = Actor(lambda: windows.run(hourly(settle="1ms"), at=NINE + HOUR, work=count))
        until(lambda: "still open" in caplog.text if holds else counts)
        writer.commit()
    assert run.result().items == 1
    assert counts == [int(holds)]


def test_a_wish_in_the_middle_brings_the_ticks_that_passed_meanwhile(windows: Windows) -> None:
    job = hourly(settle="1ms")

    def wakes(batch: Batch) -> None:
        windows.take(batch)
        if batch.number == 1:
            windows.clock.set(NINE + 2 * HOUR)
            assert jobs.run(job, windows.url, worker_clock=windows.clock.now).outcome is Outcome.BUSY

    record = windows.run(job, at=NINE + 2 * HOUR - 20 * SECOND, work=wakes)
    assert (record.outcome, record.items) == (Outcome.SUCCEEDED, 2)
    assert windows.taken() == [(NINE, NINE + HOUR), (NINE + HOUR, NINE + 2 * HOUR)]


@pytest.mark.parametrize(("month", "day", "hours"), [(3, 14, 23), (11, 7, 25)])
def test_a_night_of_clock_change_is_as_long_as_it_is(windows: Windows, month: int, day: int, hours: int) -> None:
    eve, tick = (datetime(2027, month, one, 6, tzinfo=NEW_YORK).astimezone(timezone.utc) for one in (day - 1, day))
    job = JobSpec("daily", Elapsed(start=eve), Schedule("0 6 * * *", "America/New_York"))
    assert windows.run(job, at=tick + 2 * MINUTE).items == 1
    assert windows.taken() == [(eve, tick)]
    assert windows.lengths() == [hours * HOUR]


def test_a_slice_is_real_time_and_no_local_day(windows: Windows) -> None:
    """24 hours from midnight on: on the day of 23 hours there is none yet; from then on they end at one o'clock."""
    days = [datetime(2027, 3, day, 6, 2, tzinfo=NEW_YORK).astimezone(timezone.utc) for day in range(13, 17)]
    job = JobSpec("daily", Elapsed("1d", start="2027-03-13"), Schedule("0 0 * * *", "America/New_York"))
    assert [windows.run(job, at=at).items for at in days] == [0, 1, 0, 1]
    assert set(windows.lengths()) == {24 * HOUR}
    assert [end.astimezone(NEW_YORK).hour for _, end in windows.taken()] == [0, 1]


def test_a_job_that_goes_over_to_another_kind_of_time_goes_on_from_the_same_instant(windows: Windows) -> None:
    kinds = [
        EachInterval(start=NINE),
        Elapsed(start=NINE - HOUR),
        Elapsed("40m"),
        EachInterval(start=NINE),
        Elapsed("1h"),
        EachInterval(),
    ]
    items = [
        windows.run(JobSpec("hourly", due, Schedule("0 * * * *"), Bounds(timeout="5m")), at=at).items
        for due, at in zip(kinds, (NINE + n * HOUR + 2 * MINUTE for n in (2, 4, 6, 7, 9, 10)), strict=True)
    ]
    assert items == [2, 1, 3, 1, 2, 1]
    assert windows.are_all_of(NINE, NINE + 10 * HOUR)


def test_a_job_that_was_due_by_rows_does_not_go_on_by_time(url: str) -> None:
    jobs.make_source(url, 1)
    schedule = Schedule("0 * * * *")
    jobs.run(JobSpec("a", NewRows("source", "id"), schedule), url)
    with pytest.raises(ForeignWatermarkError, match="intervals of time"):
        jobs.run(JobSpec("a", Elapsed(), schedule), url)
