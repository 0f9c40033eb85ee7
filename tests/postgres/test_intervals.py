"""`EachInterval`: each stretch of time once, in order, when it has settled."""

from __future__ import annotations

import logging
from datetime import date, datetime, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

import psycopg
import pytest

from gaffer_dagster.domain.bounds import Bounds
from gaffer_dagster.domain.due import EachInterval
from gaffer_dagster.domain.run import Outcome
from gaffer_dagster.domain.schedule import Schedule
from gaffer_dagster.domain.spec import JobSpec
from gaffer_dagster.engine.batch import Batch
from gaffer_dagster.errors import BadInputError, BadSpecError
from gaffer_dagster.testing import Clock
from tests.support import jobs, protocol
from tests.support.protocol import Actor, until
from tests.support.windows import Windows

NEW_YORK = ZoneInfo("America/New_York")
NINE = datetime(2027, 3, 1, 9, tzinfo=timezone.utc)
HOUR, MINUTE = timedelta(hours=1), timedelta(minutes=1)


def hourly(*, start: Any = NINE, timeout: str = "5m", **due: Any) -> JobSpec:
    return JobSpec("hourly", EachInterval(start=start, **due), Schedule("0 * * * *"), Bounds(timeout=timeout))


@pytest.fixture
def windows(url: str, clock: Clock) -> Windows:
    return Windows(url, clock)


def test_a_year_of_local_days_in_order_over_several_runs(url: str) -> None:
    windows = Windows(url)
    job = jobs.daily(start="2013-01-01", until="2014-01-01")
    records = [windows.run(job) for _ in range(4)]
    assert [(r.outcome, r.items, r.backlog) for r in records] == [
        (Outcome.CAPPED, 100, 265),
        (Outcome.CAPPED, 100, 165),
        (Outcome.CAPPED, 100, 65),
        (Outcome.SUCCEEDED, 65, 0),
    ]
    found = windows.taken()
    local = [since.astimezone(NEW_YORK) for since, _ in found]
    assert [day.date() for day in local] == [date(2013, 1, 1) + timedelta(days=n) for n in range(365)]
    assert {(day.hour, day.minute) for day in local} == {(0, 0)}
    assert [since for since, _ in found[1:]] == [until for _, until in found[:-1]]
    lengths = {day.date().isoformat(): (until - since) / HOUR for day, (since, until) in zip(local, found, strict=True)}
    assert {day: hours for day, hours in lengths.items() if hours != 24} == {"2013-03-10": 23, "2013-11-03": 25}
    last = windows.run(job)
    assert (last.outcome, last.items, last.batches, last.backlog) == (Outcome.SUCCEEDED, 0, 0, 0)


def test_a_second_tick_does_nothing_extra(windows: Windows) -> None:
    first = windows.run(hourly(), at=NINE + 3 * HOUR + 2 * MINUTE)
    second = windows.run(hourly())
    assert (first.outcome, first.items) == (Outcome.SUCCEEDED, 3)
    assert (second.outcome, second.items, second.batches) == (Outcome.SUCCEEDED, 0, 0)
    assert second.watermark_from == second.watermark_to == first.watermark_to
    assert windows.begins() == [NINE, NINE + HOUR, NINE + 2 * HOUR]


def test_a_failed_interval_is_done_again_and_has_the_same_key(windows: Windows) -> None:
    keys, fails = windows.fails_at_the_second()
    with pytest.raises(ValueError, match="no"):
        windows.run(hourly(), at=NINE + 3 * HOUR + 2 * MINUTE, work=fails)
    assert windows.run(hourly(), work=fails).items == 2
    assert keys[1] == keys[2] == "hourly/2027-03-01T10:00:00+00:00/2027-03-01T11:00:00+00:00"
    assert windows.begins() == [NINE, NINE + HOUR, NINE + 2 * HOUR]


def test_batches_of_time_have_no_rows(windows: Windows) -> None:
    def look(batch: Batch) -> None:
        assert batch.rows == []
        with pytest.raises(LookupError, match=r"batch\.key"):
            batch.key_for({})

    assert windows.run(hourly(), at=NINE + HOUR + 2 * MINUTE, work=look).items == 1


def test_an_interval_that_ended_before_the_run_is_waited_for_while_it_settles(windows: Windows) -> None:
    record = windows.run(hourly(settle="1500ms"), at=NINE + HOUR)
    assert (record.outcome, record.items) == (Outcome.SUCCEEDED, 1)
    assert record.ended_at is not None
    assert record.ended_at >= NINE + HOUR + timedelta(milliseconds=1500)
    assert windows.begins() == [NINE]


def test_an_interval_that_ends_while_the_run_waits_belongs_to_the_next(windows: Windows) -> None:
    record = windows.run(hourly(settle="2s"), at=NINE + HOUR - timedelta(milliseconds=300))
    assert (record.outcome, record.items, record.ticks_covered) == (Outcome.SUCCEEDED, 0, 0)


def test_an_interval_that_settles_later_than_a_run_may_last_is_left_to_the_next_tick(windows: Windows) -> None:
    job = hourly(settle="10m", timeout="5m")
    record = windows.run(job, at=NINE + HOUR + MINUTE)
    assert (record.outcome, record.items, record.backlog) == (Outcome.SUCCEEDED, 0, 0)
    assert windows.run(job, at=NINE + HOUR + 10 * MINUTE - timedelta(seconds=30)).items == 0
    assert windows.run(job, at=NINE + HOUR + 10 * MINUTE).items == 1
    assert windows.run(job, at=NINE + 3 * HOUR + 5 * MINUTE).items == 1
    assert windows.begins() == [NINE, NINE + HOUR]


def test_a_run_that_cannot_wait_so_long_ends_capped(windows: Windows) -> None:
    def slow(batch: Batch) -> None:
        windows.take(batch)
        batch.execute("select pg_sleep(1.2)")

    job = hourly(settle="1900ms", timeout="2s")
    windows.run(job, at=NINE + HOUR - MINUTE)
    jobs.execute(windows.url, "update gaffer.job_watermark set position = null")
    record = windows.run(hourly(settle="1900ms", timeout="2s", start=NINE - HOUR), at=NINE + HOUR, work=slow)
    assert (record.outcome, record.items, record.backlog) == (Outcome.CAPPED, 1, 1)
    assert windows.run(hourly(settle="1900ms", timeout="2s", start=NINE - HOUR)).items == 1
    assert windows.begins() == [NINE - HOUR, NINE]


def test_a_transaction_from_before_the_bound_holds_it(windows: Windows) -> None:
    """It may still commit a row that belongs into the interval. A run that cannot wait so long ends capped."""
    with psycopg.connect(windows.url) as writer:
        writer.execute("create table stamped (at timestamptz)")
        record = windows.run(hourly(settle="1ms", timeout="2s"), at=NINE + HOUR + MINUTE)
        assert (record.outcome, record.items, record.backlog) == (Outcome.CAPPED, 0, 1)
        assert jobs.query(windows.url, "select last_success_at, covered_until from gaffer.job") == [(None, None)]
        writer.commit()
    assert windows.run(hourly(settle="1ms", timeout="2s")).items == 1


def test_a_row_that_is_committed_late_is_seen_in_its_interval(
    windows: Windows, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "gaffer")
    jobs.execute(windows.url, "create table stamped (at timestamptz)")
    counts: list[int] = []

    def count(batch: Batch) -> None:
        text = "select count(*) from stamped where at >= %s and at < %s"
        row = batch.execute(text, [batch.window.since, batch.window.until]).fetchone()
        counts.append(row[0])

    with psycopg.connect(windows.url) as writer:
        writer.execute("insert into stamped values (%s)", [NINE + HOUR - timedelta(seconds=1)])
        run = Actor(lambda: windows.run(hourly(settle="1ms"), at=NINE + HOUR, work=count))
        until(lambda: "still open" in caplog.text)
        assert counts == []
        writer.commit()
    assert run.result().items == 1
    assert counts == [1]


def test_a_reader_or_a_writer_from_after_the_bound_does_not_hold_it(windows: Windows) -> None:
    jobs.execute(windows.url, "create table stamped (at timestamptz)")
    writers: list[Any] = []

    def later(batch: Batch) -> None:
        windows.take(batch)
        if batch.number == 1:
            writer = psycopg.connect(windows.url)
            writer.execute("insert into stamped values (now())")
            writers.append(writer)

    with psycopg.connect(windows.url) as reader:
        reader.execute("begin isolation level repeatable read")
        reader.execute("select * from stamped")
        record = windows.run(hourly(settle="1ms"), at=NINE + 3 * HOUR, work=later)
    assert (record.outcome, record.items) == (Outcome.SUCCEEDED, 3)
    writers[0].close()


def test_a_first_run_without_a_start_begins_at_the_first_tick_after_it_was_seen(windows: Windows) -> None:
    job = hourly(start=None)
    first = windows.run(job, at=NINE + 20 * MINUTE)
    assert (first.outcome, first.items, first.backlog) == (Outcome.SUCCEEDED, 0, 0)
    assert windows.run(job, at=NINE + HOUR + 2 * MINUTE).items == 0
    assert windows.run(job, at=NINE + 2 * HOUR + 2 * MINUTE).items == 1
    assert windows.begins() == [NINE + HOUR]


def test_nothing_is_due_before_the_start_nor_after_the_end(windows: Windows) -> None:
    job = hourly(start=NINE, until=NINE + 2 * HOUR)
    assert windows.run(job, at=NINE - 5 * HOUR).items == 0
    assert windows.run(job, at=NINE + HOUR + 2 * MINUTE).items == 1
    assert windows.run(job, at=NINE + 20 * HOUR).items == 1
    assert windows.run(job, at=NINE + 30 * HOUR).items == 0
    assert windows.begins() == [NINE, NINE + HOUR]


def test_a_long_outage_is_made_up_for_interval_by_interval(windows: Windows) -> None:
    """B30 and B31 for intervals: none is skipped, none comes twice, and a run is bounded."""
    job = hourly()
    assert windows.run(job, at=NINE + HOUR + 2 * MINUTE).items == 1
    back = NINE + 200 * HOUR + 2 * MINUTE
    first = windows.run(job, at=back)
    assert (first.outcome, first.items, first.backlog, first.ticks_covered) == (Outcome.CAPPED, 100, 99, 100)
    second = windows.run(job)
    assert (second.outcome, second.items, second.ticks_covered) == (Outcome.SUCCEEDED, 99, 99)
    assert windows.run(job).items == 0
    assert windows.begins() == [NINE + n * HOUR for n in range(200)]


def test_a_wish_in_the_middle_brings_intervals_that_ended_meanwhile(windows: Windows) -> None:
    job = hourly(settle="1ms")

    def wakes(batch: Batch) -> None:
        windows.take(batch)
        if batch.number == 1:
            assert windows.clock is not None
            windows.clock.set(NINE + 2 * HOUR)
            assert jobs.run(job, windows.url, worker_clock=windows.clock.now).outcome is Outcome.BUSY

    record = windows.run(job, at=NINE + 2 * HOUR - timedelta(seconds=20), work=wakes)
    assert (record.outcome, record.items) == (Outcome.SUCCEEDED, 2)
    assert windows.begins() == [NINE, NINE + HOUR]


def test_a_bound_that_is_not_on_the_grid_is_refused_naming_the_next() -> None:
    for field, given, named in (
        ("start", "2027-03-01T09:30:00+00:00", "2027-03-01T10:00:00"),
        ("until", "2027-03-02T09:00:01+00:00", "2027-03-02T10:00:00"),
    ):
        with pytest.raises(BadSpecError, match=rf"job 'hourly'.*{field}=.*is not the end.*{named}"):
            hourly(**{"start": NINE, field: datetime.fromisoformat(given)})
    with pytest.raises(BadSpecError, match="is not before until"):
        hourly(until=NINE)
    with pytest.raises(BadSpecError, match="has no zone"):
        hourly(start="2027-03-01T09:00:00")
    with pytest.raises(BadSpecError, match="needs a schedule"):
        JobSpec("hourly", EachInterval())


def test_a_window_is_only_of_batches_of_time(url: str) -> None:
    jobs.make_source(url, 1)

    def asks(batch: Batch) -> None:
        with pytest.raises(BadInputError):
            _ = batch.window

    assert jobs.run(jobs.spec(), url, asks).outcome is Outcome.SUCCEEDED
    assert protocol.outcomes(url) == ["succeeded"]
