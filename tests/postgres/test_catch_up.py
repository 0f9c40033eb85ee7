"""Ticks that nobody answered: the next run does all that is due, once, within its bounds, and says what it covered.

The letters and numbers are those of the scenarios of missed ticks.
"""

from __future__ import annotations

import sys
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from gaffer_dagster.domain.bounds import Bounds
from gaffer_dagster.domain.due import Due, EachInterval, Elapsed, Intervals, NewRows
from gaffer_dagster.domain.run import Outcome, RunRecord
from gaffer_dagster.domain.schedule import Schedule
from gaffer_dagster.domain.spec import JobSpec
from gaffer_dagster.testing import Clock
from tests.support import jobs, protocol
from tests.support.windows import Windows

NEW_YEAR = datetime(2027, 1, 1, tzinfo=timezone.utc)
DAY, HOUR, MINUTE, SECOND = timedelta(days=1), timedelta(hours=1), timedelta(minutes=1), timedelta(seconds=1)
ROWS = NewRows("source", "id")


class Outage:
    """A job that was up to date at `NEW_YEAR`, and was woken by no tick from then on."""

    def __init__(self, url: str, clock: Clock, cron: str, due: Due = ROWS, **bounds: Any) -> None:
        self.url, self.clock = url, clock
        self.spec = JobSpec("job", due, Schedule(cron), Bounds(**bounds))
        self.windows = Windows(url, clock)
        jobs.make_source(url)
        clock.set(NEW_YEAR + SECOND)
        self.tick()

    def tick(self, tick: datetime | None = None, *, found_at: datetime | None = None) -> RunRecord:
        """The run that a tick wakes when it is found, by default a second later."""
        if tick is not None:
            self.clock.set(found_at or tick + SECOND)
        work = jobs.copy_rows if isinstance(self.spec.due, NewRows) else self.windows.take
        return self.windows.run(self.spec, work=work, trigger="schedule", tick=tick)

    def effects(self) -> list[tuple[int, int]]:
        """Pairs: a number of copies in `target`, and how many rows of `source` have that many."""
        text = """
            select copies, count(*)::int from (
                select count(target.id)::int as copies from source left join target using (id) group by id
            ) as each group by copies order by copies
            """
        return jobs.query(self.url, text)


@pytest.fixture
def outage(url: str, clock: Clock) -> Any:
    return lambda *args, **kwargs: Outage(url, clock, *args, **kwargs)


@pytest.mark.parametrize(
    ("cron", "back", "found_at", "ticks"),
    [
        ("*/5 * * * *", DAY, DAY + 20 * SECOND, 288),
        ("* * * * *", 3 * HOUR, 3 * HOUR + 5 * SECOND, 180),  # B29: more than a hundred
        ("0 * * * *", 10 * HOUR, 10 * HOUR + 5 * MINUTE, 10),  # B30: one run for ten ticks
        ("0 6 * * *", 4 * DAY + 6 * HOUR, 4 * DAY + 7 * HOUR, 5),
        ("* * * * *", MINUTE, 70 * SECOND, 1),  # B33: a short one
    ],
)
def test_one_run_does_it_all_and_says_how_many_ticks_it_covered(
    outage: Any, cron: str, back: timedelta, found_at: timedelta, ticks: int
) -> None:
    down = outage(cron)
    jobs.add_rows(down.url, 2500)
    record = down.tick(NEW_YEAR + back, found_at=NEW_YEAR + found_at)
    assert (record.outcome, record.items, record.batches, record.backlog) == (Outcome.SUCCEEDED, 2500, 3, 0)
    stored = jobs.query(down.url, "select ticks_covered, tick from gaffer.job_runs where id = %s", record.id)
    assert stored == [(ticks, NEW_YEAR + back)]
    assert down.effects() == [(1, 2500)]
    # The watermark is at the horizon of the data.
    assert jobs.query(down.url, "select position ->> 'key' from gaffer.job_watermark") == [("2500",)]
    assert protocol.outcomes(down.url, "job") == ["succeeded", "succeeded"]  # no flood


def test_the_second_of_two_ticks_after_the_return_finds_nothing(outage: Any) -> None:
    """B31."""
    down = outage("0 6 * * *")
    jobs.add_rows(down.url, 40)
    back = NEW_YEAR + 4 * DAY + 6 * HOUR
    first, second = down.tick(back), down.tick(back, found_at=back + 2 * SECOND)
    assert (first.outcome, first.items, first.ticks_covered) == (Outcome.SUCCEEDED, 40, 5)
    assert (second.outcome, second.items, second.batches, second.ticks_covered) == (Outcome.SUCCEEDED, 0, 0, 0)
    assert second.watermark_from == second.watermark_to == first.watermark_to
    assert down.effects() == [(1, 40)]


def test_a_second_tick_without_the_watermark_would_be_caught(outage: Any) -> None:
    """The broken variant of the test above."""
    down = outage("0 6 * * *")
    jobs.add_rows(down.url, 40)
    down.tick(NEW_YEAR + 4 * DAY + 6 * HOUR)
    jobs.execute(down.url, "update gaffer.job_watermark set position = null")
    assert down.tick().items == 40
    assert down.effects() == [(2, 40)]


@pytest.mark.parametrize("late", [5 * SECOND, 5 * MINUTE, 5 * HOUR])
def test_a_tick_that_is_found_late_runs_and_the_record_says_how_late(outage: Any, late: timedelta) -> None:
    """B35."""
    down = outage("0 6 * * *")
    jobs.add_rows(down.url, 3)
    tick = NEW_YEAR + 6 * HOUR
    record = down.tick(tick, found_at=tick + late)
    assert (record.outcome, record.items, record.ticks_covered) == (Outcome.SUCCEEDED, 3, 1)
    stored = jobs.query(down.url, "select started_at - tick from gaffer.job_runs where id = %s", record.id)
    assert late <= stored[0][0] == record.started_at - tick < late + MINUTE


def calls_in(what: Any) -> tuple[int, Any]:
    """How many Python functions and generators were entered, and what came of it. Counts what a timer would guess."""
    count = 0

    def entered(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(entered)
    try:
        answer = what()
    finally:
        sys.setprofile(None)
    return count, answer


A_YEAR_OF_MINUTES = 365 * 24 * 60


@pytest.mark.parametrize(
    ("due", "outcome", "items", "backlog", "ticks"),
    [
        (ROWS, Outcome.SUCCEEDED, 2500, 0, A_YEAR_OF_MINUTES),
        (Elapsed(settle="1s"), Outcome.SUCCEEDED, 1, 0, A_YEAR_OF_MINUTES),
        (Elapsed("1h", settle="1s"), Outcome.CAPPED, 20, 365 * 24 - 20, 20 * 60),
        (EachInterval(settle="1s"), Outcome.CAPPED, 20, A_YEAR_OF_MINUTES - 1 - 20, 21),
    ],
)
def test_a_year_of_minutes_is_one_bounded_run_that_does_not_walk_it(
    outage: Any, due: Due, outcome: Outcome, items: int, backlog: int, ticks: int
) -> None:
    """B33."""
    down = outage("* * * * *", due, batches=20)
    jobs.add_rows(down.url, 2500)
    calls, record = calls_in(lambda: down.tick(NEW_YEAR + 365 * DAY, found_at=NEW_YEAR + 365 * DAY + 5 * SECOND))
    assert (record.outcome, record.items, record.backlog) == (outcome, items, backlog)
    assert record.ticks_covered == ticks
    print(f"{calls} calls")
    assert calls < A_YEAR_OF_MINUTES / 5


def test_a_walk_from_tick_to_tick_would_be_caught(outage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken variant of the test above."""
    monkeypatch.setattr(Schedule, "count", lambda self, after, until: sum(1 for _ in self.ticks(after, until)))
    down = outage("* * * * *")
    calls, record = calls_in(lambda: down.tick(NEW_YEAR + 365 * DAY, found_at=NEW_YEAR + 365 * DAY + 5 * SECOND))
    assert record.ticks_covered == A_YEAR_OF_MINUTES
    assert calls > A_YEAR_OF_MINUTES


def test_each_missed_interval_is_a_batch_in_order_over_several_runs(outage: Any) -> None:
    down = outage("0 * * * *", EachInterval(start=NEW_YEAR), batches=10)
    back = NEW_YEAR + DAY
    records = [down.tick(back, found_at=back + 2 * MINUTE)] + [down.tick() for _ in range(3)]
    assert [(one.outcome, one.items, one.batches, one.backlog, one.ticks_covered) for one in records] == [
        (Outcome.CAPPED, 10, 10, 14, 10),
        (Outcome.CAPPED, 10, 10, 4, 10),
        (Outcome.SUCCEEDED, 4, 4, 0, 4),
        (Outcome.SUCCEEDED, 0, 0, 0, 0),
    ]
    assert down.windows.lengths() == [HOUR] * 24
    assert down.windows.are_all_of(NEW_YEAR, back)


def test_a_run_for_the_newest_interval_alone_would_be_caught(outage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken variant of the test above: what many schedulers do."""
    after = Intervals.after

    def newest(self: Intervals, since: datetime, bound: datetime) -> Any:
        return after(self, max(since, bound.replace(minute=0, second=0, microsecond=0) - HOUR), bound)

    down = outage("0 * * * *", EachInterval(start=NEW_YEAR))
    monkeypatch.setattr(Intervals, "after", newest)
    assert down.tick(NEW_YEAR + DAY, found_at=NEW_YEAR + DAY + 2 * MINUTE).items == 1
    assert not down.windows.are_all_of(NEW_YEAR, NEW_YEAR + DAY)


@pytest.mark.parametrize(("length", "batches"), [(None, 1), ("1h", 24)])
def test_all_the_time_of_an_outage_is_one_batch_or_one_for_each_slice(
    outage: Any, length: str | None, batches: int
) -> None:
    down = outage("*/5 * * * *", Elapsed(length))
    back = NEW_YEAR + DAY
    first = down.tick(back, found_at=back + 70 * SECOND)
    second = down.tick(back, found_at=back + 72 * SECOND)
    assert [(one.outcome, one.items, one.batches, one.ticks_covered) for one in (first, second)] == [
        (Outcome.SUCCEEDED, batches, batches, 288),
        (Outcome.SUCCEEDED, 0, 0, 0),
    ]
    assert down.windows.lengths() == [DAY / batches] * batches
    assert down.windows.are_all_of(NEW_YEAR, back)
