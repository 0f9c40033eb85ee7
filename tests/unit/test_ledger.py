"""The ledger of ticks as a pure value: each tick that a schedule named has exactly one disposition."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta, timezone
from itertools import pairwise

import pytest

from gaffer_dagster.domain.ledger import Disposition, History, Pause, Period, Reach, Tick, ledger, open_tick
from gaffer_dagster.domain.run import Outcome
from gaffer_dagster.domain.schedule import Schedule

MIDNIGHT = datetime(2027, 3, 1, tzinfo=timezone.utc)
DAY, HOUR, MINUTE, INSTANT = timedelta(days=1), timedelta(hours=1), timedelta(minutes=1), timedelta(microseconds=1)
HOURLY = Schedule("0 * * * *")
COVERED, PAUSED, MISSED = Disposition.COVERED, Disposition.PAUSED, Disposition.MISSED


def at(hours: float) -> datetime:
    return MIDNIGHT + hours * HOUR


def pause(since: float, until: float | None = None) -> Pause:
    return Pause(at(since), None if until is None else at(until))


def covers(run: int, until: float, *, started: float | None = None, outcome: Outcome = Outcome.SUCCEEDED) -> Reach:
    return Reach(run, outcome, at(until if started is None else started), at(until))


def hourly(*reaches: Reach, pauses: Sequence[Pause] = ()) -> History:
    return History([Period(at(-1), HOURLY)], pauses, reaches)


def kept(history: History, until: float, *, now: float | None = None, grace: timedelta = 5 * MINUTE) -> list[Tick]:
    """The ledger from midnight, exclusive, on."""
    now = until if now is None else now
    return list(ledger(history, MIDNIGHT, at(until), now=at(now), grace=grace))


def told(history: History, until: float, **given: float) -> list[tuple[float, str, int | None]]:
    return [((tick.at - MIDNIGHT) / HOUR, str(tick.disposition), tick.run_id) for tick in kept(history, until, **given)]


def test_every_tick_is_listed_and_what_nobody_noticed_is_missed() -> None:
    assert told(hourly(), 5, now=3.5) == [
        (1, "missed", None),
        (2, "missed", None),
        (3, "missed", None),
        (4, "future", None),
        (5, "future", None),
    ]


def test_the_first_run_that_reached_a_tick_covered_it() -> None:
    history = hourly(covers(1, 1.01), covers(2, 4.01), covers(3, 4.02), covers(4, 5.01))
    assert told(history, 6, now=6) == [
        (1, "covered", 1),
        (2, "covered_late", 2),
        (3, "covered_late", 2),
        (4, "covered", 2),
        (5, "covered", 4),
        (6, "missed", None),
    ]


@pytest.mark.parametrize(("after", "kind"), [(0, COVERED), (5, COVERED), (5.01, Disposition.COVERED_LATE)])
def test_grace_decides_what_is_late(after: float, kind: Disposition) -> None:
    late_by = after * MINUTE
    history = hourly(Reach(7, Outcome.SUCCEEDED, at(1) + late_by, at(1) + late_by))
    assert kept(history, 1, now=9) == [Tick(at(1), kind, 7, late_by)]


def test_a_tick_that_came_while_its_run_was_at_work_is_on_time() -> None:
    """The run looked again for a wake-up that met it."""
    assert kept(hourly(covers(1, 2.1, started=0.9)), 2, now=3)[1] == Tick(at(2), COVERED, 1, timedelta())


def test_a_late_run_skips_what_was_open_and_takes_nothing_from_runs_before_it() -> None:
    history = hourly(
        covers(1, 1.01), covers(2, 3, started=3.5, outcome=Outcome.LATE), covers(3, 4.01), covers(4, 2.5, started=4.2)
    )
    assert told(history, 4) == [(1, "covered", 1), (2, "late", 2), (3, "late", 2), (4, "covered", 3)]


def test_a_run_that_reached_less_far_than_one_before_it_hides_none() -> None:
    """A late tick was skipped, and a run of intervals then ended behind it."""
    history = hourly(covers(1, 3, outcome=Outcome.LATE), covers(2, 1.5, outcome=Outcome.CAPPED), covers(3, 5))
    assert [tick.run_id for tick in kept(history, 5)] == [1, 1, 1, 3, 3]


@pytest.mark.parametrize(
    ("paused", "skipped"),
    [
        ([pause(1.5, 3.5)], [2, 3]),
        ([pause(2, 4)], [2, 3]),  # takes in the tick at its start, and not the one at its end
        ([pause(2.001, 4.001)], [3, 4]),
        ([pause(2, 2)], []),
        ([pause(4.5)], [5]),
        ([pause(1.5, 2.5), pause(2.5, 4)], [2, 3]),  # one that took the place of another
        ([pause(1, 2), pause(2, 3), pause(4, 5)], [1, 2, 4]),
        ([pause(9, 10)], []),
    ],
)
def test_a_tick_in_a_pause_is_skipped(paused: list[Pause], skipped: list[int]) -> None:
    history = hourly(pauses=paused)
    assert [(tick.at - MIDNIGHT) / HOUR for tick in kept(history, 5) if tick.disposition is PAUSED] == skipped
    assert history.count(MIDNIGHT, at(5), started_at=at(0)) == 5 - len(skipped)


def test_a_tick_to_come_is_in_future_though_the_pause_will_skip_it() -> None:
    assert told(hourly(pauses=[pause(0.5)]), 2, now=1.5) == [(1, "paused", None), (2, "future", None)]


def test_a_run_despite_a_pause_covers_the_ticks_of_that_pause_alone() -> None:
    history = hourly(covers(1, 4.2), covers(2, 6.01), pauses=[pause(0.5, 1.5), pause(2.5, 5.5)])
    assert told(history, 6) == [
        (1, "paused", None),  # of the pause before
        (2, "covered_late", 1),
        (3, "covered_late", 1),
        (4, "covered_late", 1),
        (5, "paused", None),
        (6, "covered", 2),
    ]
    assert history.count(MIDNIGHT, at(4.2), started_at=at(4.2)) == 3
    assert history.count(at(4.2), at(6.01), started_at=at(6.01)) == 1


def test_each_tick_is_by_the_schedule_that_was_in_force() -> None:
    halves = Schedule("30 * * * *")
    changes = {-1: HOURLY, 2: halves, 4.25: None, 6: HOURLY}
    history = History([Period(at(since), schedule) for since, schedule in changes.items()], [])
    ticks = [(tick - MIDNIGHT) / HOUR for tick in history.ticks(MIDNIGHT, at(8))]
    # The tick at the very change is the old schedule's, as it was due already.
    assert ticks == [1, 2, 2.5, 3.5, 7, 8]
    assert history.count(MIDNIGHT, at(8), started_at=at(8)) == 6
    assert list(history.ticks(at(2), at(3.5))) == [at(2.5), at(3.5)]
    assert list(history.ticks(at(-9), at(0))) == [at(0)]  # nothing from before it was first seen


@pytest.mark.parametrize(
    ("after", "now", "tick"),
    [
        (0, 1, 1),
        (0.5, 9, 1),
        (1, 9, 4),  # 2 and 3 were skipped
        (2.5, 9, 4),
        (1, 3, 2),  # the pause is not over, and may yet be ended
        (7, 9, 8),  # one without an end
    ],
)
def test_the_tick_after_what_is_covered_was_not_skipped(after: float, now: float, tick: float) -> None:
    history = hourly(pauses=[pause(1.5, 4), pause(7.5)])
    assert history.next(at(after), at(now)) == at(tick)


def test_the_tick_after_what_is_covered_is_one_of_the_schedule_then() -> None:
    history = History([Period(at(-1), HOURLY), Period(at(3.1), Schedule("*/10 * * * *"))], [])
    assert history.next(at(1), at(5)) == at(2)
    assert history.next(at(3), at(5)) == at(3) + 10 * MINUTE
    assert History([Period(at(-1), HOURLY), Period(at(3), None)], []).next(at(3), at(5)) is None


def test_the_open_tick_is_not_one_that_a_pause_skips() -> None:
    assert open_tick(at(1), HOURLY, None) == at(1)
    assert open_tick(at(1), HOURLY, pause(1.5)) == at(1)  # missed before
    assert open_tick(at(2), HOURLY, pause(1.5)) is None
    assert open_tick(at(2), HOURLY, pause(1.5, 4)) == at(4)
    assert open_tick(at(4), HOURLY, pause(1.5, 4)) == at(4)
    assert open_tick(None, HOURLY, pause(1.5, 4)) is None
    assert open_tick(at(2), None, pause(1.5, 4)) == at(2)


# ── any history ──────────────────────────────────────────────────────────────────────────────────────────────────────

_CRONS = ("* * * * *", "*/5 * * * *", "*/7 * * * *", "30 * * * *", "0 */6 * * *", "15 2 * * *", "0 9 * * MON-FRI")
_ZONES = ("UTC", "America/New_York", "Australia/Lord_Howe", "Africa/Casablanca")


def _moments(rng: random.Random, count: int) -> list[datetime]:
    """Rising, and often at a whole hour, where ticks are. Both changes of New York's clock in 2027 are near."""
    begin = rng.choice([datetime(2027, 3, 12, tzinfo=timezone.utc), datetime(2027, 11, 5, tzinfo=timezone.utc)])
    seconds = [rng.choice([3600 * rng.randrange(96), rng.randrange(96 * 3600)]) for _ in range(count)]
    return sorted({begin + timedelta(seconds=each) for each in seconds})


def _random_history(rng: random.Random) -> History:
    changes = _moments(rng, rng.randint(1, 4))
    schedules = [rng.choice([None, *(Schedule(cron, rng.choice(_ZONES)) for cron in _CRONS)]) for _ in changes]
    bounds = [moment for moment in _moments(rng, rng.randint(0, 8)) if moment >= changes[0] - DAY]
    pauses = [Pause(since, until) for since, until in pairwise(bounds) if rng.random() < 0.5]
    if bounds and rng.random() < 0.3:
        pauses.append(Pause(bounds[-1], None))
    reaches = [
        Reach(number, rng.choice(list(Outcome)), until + rng.choice([timedelta(), MINUTE, HOUR]), until)
        for number, until in enumerate(_moments(rng, rng.randint(0, 6)))
    ]
    return History([Period(*pair) for pair in zip(changes, schedules, strict=True)], pauses, reaches)


def _expected(history: History, after: datetime, until: datetime) -> list[datetime]:
    """Asked anew for each tick which schedule was in force: the last that began before it."""
    found: set[datetime] = set()
    for schedule in {period.schedule for period in history.periods} - {None}:
        assert schedule is not None
        for tick in schedule.ticks(after, until):
            in_force = [period for period in history.periods if period.since < tick]
            if in_force and in_force[-1].schedule == schedule:
                found.add(tick)
    return sorted(found)


def check(keep: Callable[[History, datetime, datetime], int], seed: int, rounds: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(rounds):
        history = _random_history(rng)
        after, until, now = rng.choices(_moments(rng, 20), k=3)
        after, until = min(after, until), max(after, until)
        ticks = list(ledger(history, after, until, now=now, grace=rng.choice([timedelta(), 5 * MINUTE])))
        assert [tick.at for tick in ticks] == _expected(history, after, until)
        assert all((tick.disposition is Disposition.FUTURE) == (tick.at > now) for tick in ticks)
        by_no_run = (PAUSED, MISSED, Disposition.FUTURE)
        assert all((tick.run_id is None) == (tick.disposition in by_no_run) for tick in ticks)
        paused = {tick.at for tick in ticks if any(one.holds(tick.at) for one in history.pauses)}
        assert {tick.at for tick in ticks if tick.disposition is PAUSED} <= paused
        # No run worked despite a pause: then exactly those are skipped.
        alone = ledger(History(history.periods, history.pauses), after, until, now=until, grace=HOUR)
        assert {tick.at for tick in alone if tick.disposition is PAUSED} == paused
        assert keep(history, after, until) == len(ticks) - len(paused)
        coming = history.next(after, now=_EVER)
        open_ticks = [tick.at for tick in ticks if tick.at not in paused]
        if open_ticks:
            assert coming == open_ticks[0] or any(one.until is None and one.holds(coming) for one in history.pauses)


_EVER = datetime(2100, 1, 1, tzinfo=timezone.utc)
_NEVER = datetime(1990, 1, 1, tzinfo=timezone.utc)


@pytest.mark.parametrize("seed", range(5))
def test_any_history_lists_exactly_the_ticks_there_were(seed: int) -> None:
    check(lambda history, after, until: history.count(after, until, started_at=_NEVER), seed, 60)


@pytest.mark.parametrize("broken", ["ignores pauses", "takes in the end of a pause", "goes by the newest schedule"])
def test_a_broken_count_would_be_caught(broken: str) -> None:
    def count(history: History, after: datetime, until: datetime) -> int:
        if broken == "ignores pauses":
            history = History(history.periods, [])
        elif broken == "takes in the end of a pause":
            ends = [Pause(each.since, each.until and each.until + 2 * INSTANT) for each in history.pauses]
            history = History(history.periods, ends)
        else:
            history = History([Period(history.periods[0].since, history.periods[-1].schedule)], history.pauses)
        return history.count(after, until, started_at=_NEVER)

    with pytest.raises(AssertionError):
        check(count, 0, 60)
