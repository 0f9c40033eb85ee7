"""What a job can be due for."""

from __future__ import annotations

import random
from datetime import date, datetime, timedelta, timezone
from typing import Any

import pytest

from gaffer_dagster.domain.due import EachInterval, Elapsed, Intervals, NewRows, Stretches, Window
from gaffer_dagster.domain.schedule import Schedule
from gaffer_dagster.errors import BadSpecError

UTC = timezone.utc
NEW_YORK = Schedule("0 6 * * *", "America/New_York")


def intervals(schedule: Schedule | None = NEW_YORK, **given: Any) -> Intervals:
    return Intervals.of(EachInterval(**({"cron": "@daily"} | given)), schedule, "job 'a'")


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"table": ""}, "table=''"),
        ({"table": " flights"}, "table=' flights'"),
        ({"table": "fl\0ights"}, "table='fl\\x00ights'"),
        ({"key": ""}, "key=''"),
        ({"key": "\ud800"}, "key='\\ud800'"),
        ({"where": "a = '\ud800'"}, "where="),
        ({"settle": "1m"}, "settle='1m'"),
        ({"cursor": "at", "settle": "soon"}, "NewRows on flights: settle='soon'"),
        ({"cursor": "at", "settle": "1000000d"}, "settle='1000000d' is longer than 3,653 days"),
        ({"cursor": "at"}, "cursor='at' needs settle= as a duration"),
        ({"cursor": ["at", "id"], "settle": "1m"}, "cursor=['at', 'id'] must be one column"),
        ({"cursor": (), "settle": "1m"}, "cursor=() must be one column"),
        ({"cursor": " at", "settle": "1m"}, "NewRows on flights: cursor=' at'"),
        ({"start": "end"}, "start='end'"),
        ({"where": "  "}, "where='  '"),
    ],
)
def test_new_rows_that_cannot_be_meant_are_refused_by_name(given: dict[str, Any], named: str) -> None:
    with pytest.raises(BadSpecError) as raised:
        NewRows(**({"table": "flights", "key": "id"} | given))
    assert named in str(raised.value)


def test_another_way_to_settle_is_refused_with_the_cure() -> None:
    with pytest.raises(BadSpecError, match=r"gaffer prepare flights --key id"):
        NewRows("flights", "id", settle="5m")


def test_a_cursor_is_a_column_and_a_lag_and_changes_no_other_spec() -> None:
    both = [NewRows("flights", "id", cursor=each, settle=timedelta(minutes=5)) for each in ("at", ("at",), ["at"])]
    assert both[0] == both[1] == both[2]
    assert dict(both[0].as_json()) == {
        "kind": "new_rows",
        "table": "flights",
        "key": "id",
        "settle": "5m",
        "cursor": "at",
        "where": None,
    }
    assert dict(NewRows("flights", "id").as_json()) == {
        "kind": "new_rows",
        "table": "flights",
        "key": "id",
        "settle": "snapshot",
        "where": None,
    }


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"cron": "61 * * * *"}, "61"),
        ({"settle": "0s"}, "settle='0s'"),
        ({"settle": "later"}, "settle='later'"),
        ({"start": "soon"}, "start='soon'"),
        ({"until": "2013-02-30"}, "until='2013-02-30'"),
        ({"start": datetime(2013, 1, 1)}, "has no zone"),  # noqa: DTZ001
        ({"start": "2013-01-01T00:00:00"}, "has no zone"),
    ],
)
def test_intervals_that_cannot_be_meant_are_refused_by_name(given: dict[str, Any], named: str) -> None:
    with pytest.raises(BadSpecError) as raised:
        EachInterval(**given)
    assert named in str(raised.value)


def test_a_date_is_the_start_of_the_local_day() -> None:
    for start in ("2013-01-01", date(2013, 1, 1), datetime(2013, 1, 1, 5, tzinfo=UTC), "2013-01-01T00:00:00-05:00"):
        assert intervals(start=start).first(datetime(2020, 1, 1, tzinfo=UTC)) == datetime(2013, 1, 1, 5, tzinfo=UTC)


def test_local_days_are_as_long_as_they_are() -> None:
    days = intervals(start="2013-03-09")
    bound = datetime(2013, 3, 12, tzinfo=UTC)
    found, since = [], days.first(bound)
    while (window := days.after(since, bound)) is not None:
        found.append((window.until - window.since) / timedelta(hours=1))
        since = window.until
    assert found == [24, 23]
    november = intervals(start="2013-11-03")
    window = november.after(november.first(bound), datetime(2013, 11, 5, tzinfo=UTC))
    assert window == Window(datetime(2013, 11, 3, 4, tzinfo=UTC), datetime(2013, 11, 4, 5, tzinfo=UTC))


def test_an_interval_is_due_when_it_has_ended() -> None:
    days = intervals(start="2013-01-01", until="2013-01-03")
    first, second = datetime(2013, 1, 1, 5, tzinfo=UTC), datetime(2013, 1, 2, 5, tzinfo=UTC)
    instant = timedelta(microseconds=1)
    assert days.after(first, second - instant) is None
    assert days.after(first, second) == Window(first, second)
    assert days.left(first, second - instant) == 0
    assert days.left(first, second) == 1
    late = datetime(2020, 1, 1, tzinfo=UTC)
    assert days.left(first, late) == 2
    assert days.after(second + timedelta(days=1), late) is None
    assert days.left(late, late) == 0


def test_without_a_start_it_begins_at_the_first_tick_after_it_was_seen() -> None:
    assert intervals().first(datetime(2013, 1, 1, 5, tzinfo=UTC)) == datetime(2013, 1, 2, 5, tzinfo=UTC)
    assert intervals().first(datetime(2013, 1, 1, 4, 59, tzinfo=UTC)) == datetime(2013, 1, 1, 5, tzinfo=UTC)


def test_the_grid_is_the_schedules_own_where_no_other_is_given() -> None:
    own = intervals(cron=None, start="2013-01-01T06:00:00-05:00")
    window = own.after(own.first(datetime(2013, 1, 1, tzinfo=UTC)), datetime(2013, 1, 2, 12, tzinfo=UTC))
    assert window == Window(datetime(2013, 1, 1, 11, tzinfo=UTC), datetime(2013, 1, 2, 11, tzinfo=UTC))


def test_a_bound_before_all_ticks_is_refused_by_that_name() -> None:
    """In 1970 London was an hour ahead of UTC all winter, and its first midnight is in 1969 there."""
    due, london = EachInterval("@daily", start="1970-01-01"), Schedule("@daily", "Europe/London")
    with pytest.raises(
        BadSpecError, match=r"is before all ticks, which begin with 1970 in UTC; the next is 1970-01-02T"
    ):
        Intervals.of(due, london, "a")


def test_bounds_off_the_grid_are_refused_naming_the_next() -> None:
    with pytest.raises(BadSpecError, match=r"job 'a'.*start=2012-12-31T19:00:00-05:00 is not.*2013-01-01T00:00:00-05"):
        intervals(start=datetime(2013, 1, 1, tzinfo=UTC))
    with pytest.raises(BadSpecError, match=r"until=.*is not the end of an interval"):
        intervals(until="2013-01-01T00:00:01-05:00")
    with pytest.raises(BadSpecError, match="is not before until"):
        intervals(start="2013-01-02", until="2013-01-01")
    with pytest.raises(BadSpecError, match="needs a schedule"):
        intervals(schedule=None)


def elapsed(length: str | None = None, schedule: Schedule | None = NEW_YORK, **given: Any) -> Stretches:
    return Stretches.of(Elapsed(length, **given), schedule, "a")


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"slice": "soon"}, "slice='soon'"),
        ({"slice": "0s"}, "slice='0s'"),
        ({"slice": "3654d"}, "slice='3654d' is longer than 3,653 days"),
        ({"slice": "999ms"}, "slice='999ms' is shorter than 1s"),
        ({"slice": timedelta(milliseconds=999, microseconds=999)}, "is shorter than 1s"),
        ({"settle": "0s"}, "settle='0s'"),
        ({"start": "soon"}, "Elapsed: start='soon'"),
        ({"start": datetime(2013, 1, 1)}, "has no zone"),  # noqa: DTZ001
    ],
)
def test_elapsed_that_cannot_be_meant_is_refused_by_name(given: dict[str, Any], named: str) -> None:
    with pytest.raises(BadSpecError) as raised:
        Elapsed(**given)
    assert named in str(raised.value)


def test_elapsed_without_a_schedule_is_refused_with_the_cure() -> None:
    with pytest.raises(BadSpecError, match=r"job 'a': Elapsed needs a schedule.*give schedule="):
        elapsed(schedule=None)


def test_a_start_that_no_zone_can_hold_is_refused_by_name() -> None:
    berlin = Schedule("0 6 * * *", "Europe/Berlin")
    with pytest.raises(BadSpecError, match="Elapsed: start=0001-01-01"):
        elapsed(start="0001-01-01", schedule=berlin)
    with pytest.raises(BadSpecError, match="EachInterval: start=0001-01-01"):
        intervals(schedule=berlin, start="0001-01-01")


def test_elapsed_begins_at_its_start_on_no_grid_or_in_the_minute_it_was_seen() -> None:
    seen = datetime(2013, 1, 1, 12, 34, 56, 789, tzinfo=UTC)
    assert elapsed().first(seen) == datetime(2013, 1, 1, 12, 34, tzinfo=UTC)
    assert elapsed(start="2013-01-01").first(seen) == datetime(2013, 1, 1, 5, tzinfo=UTC)
    assert elapsed(start="2013-01-01T00:00:07-05:00").first(seen) == datetime(2013, 1, 1, 5, 0, 7, tzinfo=UTC)


def test_elapsed_is_due_up_to_the_newest_tick() -> None:
    tick, instant = datetime(2013, 1, 3, 11, tzinfo=UTC), timedelta(microseconds=1)
    since = tick - timedelta(hours=50)
    for at in (tick, tick + timedelta(hours=24) - instant):
        assert elapsed().after(since, at) == Window(since, tick)
        assert elapsed().left(since, at) == 1
        assert elapsed("20h").after(since, at) == Window(since, since + timedelta(hours=20))
        assert elapsed("20h").left(since, at) == 2
    for one in (elapsed(), elapsed("20h")):
        for later in (tick, tick + instant, tick + timedelta(days=400)):  # also a clock that was set back
            assert one.after(later, tick) is None
            assert one.left(later, tick) == 0
    assert elapsed("50h").after(since, tick) == Window(since, tick)
    assert elapsed("51h").after(since, tick) is None
    assert elapsed("3653d").after(since, tick) is None


def test_only_bounds_that_are_the_same_in_every_attempt_repeat() -> None:
    assert (intervals().repeat, elapsed("1h").repeat, elapsed().repeat) == (True, True, False)


def test_slices_are_whole_and_in_order_up_to_the_newest_tick() -> None:
    seed = 2027
    print(f"seed {seed}")
    dice = random.Random(seed)
    for _ in range(200):
        length = timedelta(seconds=dice.randint(1800, 200_000))
        schedule = Schedule(dice.choice(["*/7 * * * *", "0 6 * * 1"]))
        one = elapsed(f"{length // timedelta(seconds=1)}s", schedule)
        since = begin = datetime(2027, 3, 1, tzinfo=UTC) + timedelta(seconds=dice.randint(0, 10**6))
        bound = begin + timedelta(seconds=dice.randint(-(10**6), 10**6))
        left = one.left(since, bound)
        tick = one.grid.latest(bound)
        assert tick is not None
        for number in range(left):
            window = one.after(since, bound)
            assert window == Window(begin + number * length, begin + (number + 1) * length)
            since = window.until
            assert one.left(since, bound) == left - number - 1
        assert one.after(since, bound) is None
        assert tick < since + length
        assert since == begin or since <= tick


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: NewRows(1, "id"), "table"),  # pyright: ignore
        (lambda: NewRows("t", 1), "key"),  # pyright: ignore
        (lambda: NewRows(None, "id"), "table"),  # pyright: ignore
        (lambda: NewRows("t", b"id"), "key"),  # pyright: ignore
        (lambda: NewRows("t", "id", where=1), "where"),  # pyright: ignore
        (lambda: NewRows("t", "id", where="a\0b"), "where"),
        (lambda: EachInterval(start=1), "start"),  # pyright: ignore
        (lambda: EachInterval(until=1.5), "until"),  # pyright: ignore
        (lambda: EachInterval(cron=1), "cron"),  # pyright: ignore
        (lambda: Elapsed(1), "Elapsed: slice=1"),  # pyright: ignore
        (lambda: Elapsed(0), "Elapsed: slice=0"),  # pyright: ignore
        (lambda: Elapsed(start=1), "Elapsed: start"),  # pyright: ignore
    ],
)
def test_a_value_of_another_type_is_refused_by_its_field(call: Any, named: str) -> None:
    with pytest.raises(BadSpecError, match=named):
        call()
