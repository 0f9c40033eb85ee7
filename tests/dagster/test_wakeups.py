"""Where Dagster's own walk is trusted, it is right from every start; elsewhere each tick has its wake-up.

Dagster's answer depends on where its walk begins, and its daemon begins wherever it left off. So the proof begins
every five minutes around clock changes, of all zones that differ in anything a walk can see.

GAFFER_WAKEUP_STARTS sets how many starts, GAFFER_WAKEUP_SEED repeats the choices of an earlier run.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from functools import lru_cache
from itertools import islice
from typing import Any
from zoneinfo import ZoneInfo, available_timezones

import pytest
import time_machine
from dagster._utils.schedules import has_nonzero_minute_offset, schedule_execution_time_iterator

from gaffer_dagster.adapter import wakeups
from gaffer_dagster.adapter.wakeups import WakeUp, wake_up
from gaffer_dagster.domain import schedule as domain
from gaffer_dagster.domain.schedule import ClockChange, Schedule, clock_changes
from gaffer_dagster.errors import BadSpecError

SEED = int(os.environ.get("GAFFER_WAKEUP_SEED", 0)) or random.SystemRandom().randrange(1, 1_000_000)
STARTS = int(os.environ.get("GAFFER_WAKEUP_STARTS", 3_000))
SEASONS = ["2027-01-15T12:00Z", "2027-07-15T12:00Z"]

UTC = timezone.utc
NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)
YEARS_ON = datetime(2036, 11, 1, tzinfo=UTC)
FAR = datetime(2500, 1, 1, tzinfo=UTC)
MOMENT = timedelta(microseconds=1)
SECOND, MINUTE, HOUR, DAY = timedelta(seconds=1), timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
TICKS = 6  # that are compared from each start: all that come within the five minutes to the next start
MANY = 40  # from the first start of a walk: the daemon goes over all that it missed

Rule = Callable[[Schedule], bool]


def is_plain(schedule: Schedule) -> bool:
    return wake_up(schedule, NOW).is_plain


def at(text: str) -> datetime:
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


# ── the zones, the crons, and the starts ─────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Zone:
    name: str
    changes: tuple[ClockChange, ...]


@lru_cache(maxsize=1)
def zones() -> tuple[Zone, ...]:
    """One zone for all that are the same in what a walk over the coming years can see: offsets and `dst()`."""
    found: dict[object, Zone] = {}
    for name in sorted(available_timezones()):
        try:
            Schedule("0 6 * * *", name)
        except BadSpecError:
            continue
        zone = zone_of(name)
        local = [moment.astimezone(ZoneInfo(name)) for moment in (NOW, *(change.at for change in zone.changes))]
        found.setdefault((zone.changes, tuple((each.utcoffset(), each.dst()) for each in local)), zone)
    return tuple(found.values())


def zone_of(name: str) -> Zone:
    return Zone(name, tuple(clock_changes(name, NOW - 366 * DAY, YEARS_ON)))


MINUTES = ["0", "30", "30", "59", "7", "*", "*/5", "*/20", "0,30", "45,15", "10-50/7", "55-5", "1-59/2", "0-59"]
HOURS = ["*", "*", "0", "1", "2", "3", "4", "23", "2,3", "1,2", "1-4", "0-22", "22-3", "*/2", "*/1", "6", "12", "5,17"]
DAYS = ["* * *"] * 12
DAYS += ["* * 0", "* * SUN", "* * 7", "* * 1-5", "* * SAT,SUN", "* * FRI-MON", "* * L0", "* * 0#2", "* * SAT#5,L6"]
DAYS += ["1 * *", "28 * *", "30,31 * *", "31 * *", "L * *", "15,L * *", "1,15 * *", "25-4 3,10 *", "27,28 * *"]
DAYS += ["* 3,10 *", "* MAR-NOV *", "* nov-feb 6", "* 2 *", "1 1 *", "28 2 *", "1 3 *", "L 2 *", "29 1,3 *"]
# These are never plain.
DAYS += ["29 2 *", "29 FEB *", "29 * *", "*/2 * *", "1 * 1", "1-7 * 0", "L * 5#1", "1,* * 1", "* * 1#2,3"]


def some_cron(chance: random.Random, moment: datetime) -> str:
    """Often with the date of the moment, on which the clock may be set."""
    days = [*DAYS, *[f"{moment.day} * *", f"{moment.day} {moment.month} *", f"* * {moment.isoweekday()}"] * 3]
    return " ".join(chance.choice(part) for part in (MINUTES, HOURS, days))


def some_starts(chance: random.Random, zone: Zone) -> list[datetime]:
    """Six hours and a bit, in steps of five minutes, most often around a change of the clock."""
    coming = [change.at for change in zone.changes if change.at > NOW]
    quiet = [
        datetime(chance.choice([2028, 2032]), 2, 29, tzinfo=UTC) + chance.choice([-1, 0, 1, 1]) * DAY,
        datetime(chance.randint(2027, 2035), chance.randint(1, 12), 1, tzinfo=UTC),
        NOW + chance.randint(0, 3000) * DAY,
    ]
    middle = chance.choice(coming) if coming and chance.random() < 0.8 else chance.choice(quiet)
    # The daemon begins at a tick, a second after one, a millisecond after a minute, or at a restart.
    middle += chance.choice([0 * SECOND, SECOND, SECOND / 1000, 59 * SECOND, 61 * SECOND, 120 * SECOND])
    return [middle + number * 5 * MINUTE for number in range(-37, 38)]


# ── the proof ────────────────────────────────────────────────────────────────────────────────────────────────────


class StartedIn:
    """A process that was started in a season: Dagster keeps the offset that a zone had then."""

    def __init__(self, season: str) -> None:
        self._travel = time_machine.travel(at(season), tick=False)

    def __enter__(self) -> None:
        has_nonzero_minute_offset.cache_clear()
        self._travel.start()

    def __exit__(self, *_: object) -> None:
        self._travel.stop()
        has_nonzero_minute_offset.cache_clear()


def dagsters(schedule: Schedule, start: datetime, count: int) -> list[datetime]:
    cron = schedule.cron if isinstance(schedule.cron, str) else list(schedule.cron)
    found = islice(schedule_execution_time_iterator(start.timestamp(), cron, schedule.timezone), count)
    return [tick.astimezone(UTC) for tick in found]


def fault_of(schedule: Schedule, start: datetime, count: int = TICKS) -> str:
    """How Dagster's ticks from a start on differ from the schedule's; empty where they do not."""
    right = list(islice(schedule.ticks(start - MOMENT, FAR), count))
    try:
        found = dagsters(schedule, start, count)
    except Exception as error:
        return f"{schedule.canonical} from {start}: {type(error).__name__} {error}"
    differ = [f"{one} where {other} is right" for one, other in zip(found, right, strict=True) if one != other]
    return f"{schedule.canonical} from {start}: {differ[0]}" if differ else ""


def faults_of(schedule: Schedule, walk: Sequence[datetime]) -> list[str]:
    found = [fault_of(schedule, walk[0], MANY), *(fault_of(schedule, start) for start in walk)]
    return [fault for fault in found if fault]


def search(
    rule: Rule, among: Sequence[Zone], seed: str, starts: int, cron: str | list[str] | None = None
) -> tuple[list[str], str]:
    """Faults of Dagster in schedules (of this cron, or any) that the rule takes for plain, and what was tried."""
    chance, faults, tried, schedules = random.Random(seed), list[str](), 0, set[str]()
    while tried < starts:
        for zone in chance.sample(among, len(among)):
            walk = some_starts(chance, zone)
            day = walk[len(walk) // 2].astimezone(ZoneInfo(zone.name))
            schedule = Schedule(some_cron(chance, day) if cron is None else cron, zone.name)
            if tried < starts and rule(schedule):
                faults += faults_of(schedule, walk)
                schedules.add(schedule.canonical)
                tried += len(walk)
    return faults, f"GAFFER_WAKEUP_SEED={SEED}: {tried} starts, {len(schedules)} schedules, {len(set(among))} zones"


@pytest.mark.timeout(180 + STARTS // 50)
@pytest.mark.parametrize("season", SEASONS)
def test_where_the_rule_says_plain_dagster_is_right_from_every_start(season: str) -> None:
    taken = [zone for zone in zones() if is_plain(Schedule("0 6 * * *", zone.name))]
    among = [zone for zone in taken for _ in range(5 if zone.changes else 1)]
    with StartedIn(season):
        faults, told = search(is_plain, among, f"{SEED} {season}", STARTS // 2)
    print(told)
    assert not faults, "\n".join([told, *faults[:20]])
    assert sum(bool(zone.changes) for zone in taken) > 15


FAULTY: list[tuple[str, str | list[str], str, str]] = [
    ("D01", "30 23 * * *", "Africa/Cairo", "from 00:00 to 01:00"),
    ("D01", "30 0 * * *", "Atlantic/Azores", "from 00:00 to 01:00"),
    ("D02", "30 1 * * *", "Europe/Dublin", "from 01:00 to 02:00"),
    ("D02", "30 2 * * *", "Africa/Casablanca", "from 0"),
    ("D02", "30 2 * * *", "America/Inuvik", "from 02:00 to 03:00"),
    ("D03", "30 1 * * *", "Antarctica/Troll", "from 01:00 to 03:00"),
    ("D04", "50 2 * * *", "Pacific/Chatham", "from 03:45 to 02:45"),
    ("D05", "30 0 * * *", "America/Santiago", "from 00:00 to 23:00"),
    ("D06", "0 * * * *", "Australia/Lord_Howe", "from 02:00 to 01:30"),
    ("D07", "0 0 29 2 *", "UTC", "29 February"),
    ("D07", "0 0 29 * *", "UTC", "29 February"),
    ("D09", ["45 * * * *", "15 * * * *"], "America/New_York", "several crons"),
    ("D10", "0 0 1,* * 1", "UTC", "two day fields"),
    ("D10", "0 0 * * 1#2,3", "UTC", "numbered weekdays"),
]


@pytest.mark.parametrize(("cron", "zone", "why"), [row[1:] for row in FAULTY], ids=lambda value: str(value))
def test_a_known_fault_is_driven_by_wake_ups_and_a_rule_without_it_is_caught(
    cron: str | list[str], zone: str, why: str
) -> None:
    wake = wake_up(Schedule(cron, zone), NOW)
    assert not wake.is_plain
    assert wake.timezone == "UTC"
    assert why in wake.why

    def everything(_: Schedule) -> bool:
        return True

    assert any(search(everything, [zone_of(zone)], f"broken {number}", 1, cron)[0] for number in range(12))


@pytest.mark.parametrize(("before", "after"), [(2, 0), (1, 0.5)])
def test_a_clock_that_is_set_back_by_another_time_than_an_hour_is_not_common(before: float, after: float) -> None:
    """Today each zone that has such a change has one forward too, that is refused for more than its length."""
    moment = at("2027-10-31T02:00Z") - after * HOUR  # 02:00 on the new wall clock
    assert not wakeups._is_common("Antarctica/Troll", ClockChange(moment, before * HOUR, after * HOUR))
    assert wakeups._is_common("Antarctica/Troll", ClockChange(at("2027-10-31T01:00Z"), 2 * HOUR, HOUR))


@pytest.mark.parametrize("choice", [{"missing_hour": "skip"}, {"repeated_hour": "first"}])
def test_another_choice_for_nights_of_change_is_none_of_dagsters(choice: dict[str, Any]) -> None:
    wake = wake_up(Schedule("30 2 * * *", "Europe/Berlin", **choice), NOW)
    assert not wake.is_plain
    assert "missing_hour='skip'" in wake.why
    assert wake_up(Schedule("30 2 * * *", "Asia/Tokyo", **choice), NOW).is_plain


ZONES = ["America/New_York", "Europe/Berlin", "Europe/London", "UTC", "Asia/Tokyo", "Asia/Kolkata"]
EVERYDAY = ["@hourly", "@weekly", "@monthly", "@yearly", "*/5 * * * *", "* * * * *", "0 */2 * * *", "0 0 * * *"]
EVERYDAY += ["0 6 * * *", "30 2 * * *", "30 1 * * *", "0 9 * * MON-FRI", "15 8-18 * * 1-5", "0 6 L * *", "0 9 * * 1#1"]


@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize("cron", EVERYDAY)
def test_everyday_schedules_are_plain(cron: str, zone: str) -> None:
    schedule = Schedule(cron, zone)
    assert wake_up(schedule, NOW) == WakeUp(schedule.crons[0], zone, is_plain=True, why="")


def test_several_crons_are_plain_where_no_clock_is_set() -> None:
    schedule = Schedule(["0 6 * * *", "30 7 * * 1-5"], "Asia/Tokyo")
    assert wake_up(schedule, NOW) == WakeUp(list(schedule.crons), "Asia/Tokyo", is_plain=True, why="")
    assert not any(fault_of(schedule, NOW + number * 7 * HOUR) for number in range(50))


# ── wake-ups ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("cron", "zone", "wakes"),
    [
        ("*/5 * * * *", "Australia/Lord_Howe", "*/5 * * * *"),
        ("* * * * *", "Europe/Dublin", "* * * * *"),
        ("0 6 * * MON", "Europe/Dublin", "0 5,6 * * *"),
        ("17 2 * * *", "Australia/Lord_Howe", "17,30,47 15 * * *"),
        ("30 0 * * *", "Africa/Cairo", ["30 21 * * *", "*/30 22 * * *"]),
        ("0 0 29 2 *", "Asia/Kolkata", "30 18 * * *"),
        (["0 6 * * *", "30 7 * * 1-5"], "America/New_York", ["0 10 * * *", "*/30 11 * * *", "30 12 * * *"]),
    ],
)
def test_wake_ups_are_few(cron: str | list[str], zone: str, wakes: str | list[str]) -> None:
    wake = wake_up(Schedule(cron, zone), NOW)
    assert (wake.cron, wake.timezone, wake.is_plain) == (wakes, "UTC", False)


@pytest.mark.timeout(180 + STARTS // 50)
def test_each_tick_has_its_wake_up_and_a_day_has_few_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wakeups, "_fault", lambda *_: "forced")
    chance = random.Random(f"{SEED} wake-ups")
    print(f"GAFFER_WAKEUP_SEED={SEED}")
    for zone in zones():
        for _ in range(max(4, STARTS // 1500)):
            schedule = some_schedule(chance, zone)
            wakes = Schedule(wake_up(schedule, NOW).cron)
            changes = chance.sample(zone.changes, min(len(zone.changes), 8))
            for middle in [*(change.at for change in changes), some_starts(chance, zone)[0]]:
                start, end = max(NOW, middle - 2 * DAY), middle + 2 * DAY
                missed = set(schedule.ticks(start, end)) - set(wakes.ticks(start, end))
                assert not missed, (schedule.canonical, wakes.canonical, sorted(missed))
            times = {time for line in schedule.lines for time in line.times}
            assert wakes.count(NOW, NOW + DAY) <= 2 * len(times) + 1, (schedule.canonical, wakes.canonical)
            for start in some_starts(chance, zone)[:3]:
                assert not fault_of(wakes, start), "Dagster reads the wake-ups otherwise"


def some_schedule(chance: random.Random, zone: Zone) -> Schedule:
    return Schedule(
        [some_cron(chance, NOW) for _ in range(chance.choice([1, 1, 2, 3]))],
        zone.name,
        missing_hour=chance.choice(["end", "skip"]),
        repeated_hour=chance.choice(["second", "first"]),
    )


@pytest.mark.parametrize("forgotten", ["the other offset", "ends of gaps"])
def test_a_forgotten_wake_up_is_caught(forgotten: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if forgotten == "ends of gaps":
        monkeypatch.setattr(Schedule, "count", lambda *_: 0)
    schedule, gap = Schedule("30 0 * * *", "Africa/Cairo"), at("2027-04-29T22:00Z")
    changes = [] if forgotten == "the other offset" else clock_changes(schedule.timezone, NOW, YEARS_ON)
    wakes = Schedule(wakeups._crons(wakeups._minutes(schedule, NOW, changes)))
    assert set(schedule.ticks(gap - 2 * DAY, gap + 2 * DAY)) - set(wakes.ticks(gap - 2 * DAY, gap + 2 * DAY))


def test_a_hundred_schedules_look_each_zone_up_once() -> None:
    names = ["America/New_York", "Europe/Berlin", "Europe/Dublin", "Africa/Cairo", "Asia/Tokyo"]
    domain._changes.cache_clear()
    for number in range(100):
        wake_up(Schedule(f"{number % 60} {number % 24} * * *", names[number % len(names)]), NOW)
    assert domain._changes.cache_info().misses == len(names) * len(range(2025, 2037))
