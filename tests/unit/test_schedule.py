"""Ticks against tables of known answers, reported faults of other schedulers, and a walk minute by minute."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import date, datetime, timedelta, timezone
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from zlib import crc32
from zoneinfo import ZoneInfo, available_timezones

import pytest
import time_machine
from hypothesis import given, settings
from hypothesis import strategies as st

from gaffer_dagster.domain import schedule as module
from gaffer_dagster.domain.schedule import Schedule, clock_changes
from gaffer_dagster.errors import BadSpecError

UTC = timezone.utc
MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
MOMENT = timedelta(microseconds=1)


def at(text: str) -> datetime:
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


def rows(name: str) -> list[dict[str, str]]:
    with (Path(__file__).parent / "cases" / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


TICKS = rows("ticks.csv")
TEXTS = rows("bad_schedules.csv")


def schedule_of(row: dict[str, str]) -> Schedule:
    return Schedule(row["cron"], row["zone"], missing_hour=row["missing_hour"], repeated_hour=row["repeated_hour"])


def expected(row: dict[str, str]) -> list[datetime]:
    return [at(text) for text in row["ticks_utc"].split()]


# Tables


@pytest.mark.parametrize("row", TICKS, ids=lambda row: row["id"])
def test_ticks_of_the_table(row: dict[str, str]) -> None:
    schedule, after, until = schedule_of(row), at(row["after_utc"]), at(row["until_utc"])
    want = expected(row)
    assert list(schedule.ticks(after, until)) == want
    check_answers(schedule, after, until)


@pytest.mark.parametrize("row", TEXTS, ids=lambda row: f"{row['cron']!r} {row['timezone']!r}")
def test_cron_text_and_zones_of_the_table(row: dict[str, str]) -> None:
    if row["expect"] == "refuse":
        with pytest.raises(BadSpecError) as refusal:
            Schedule(row["cron"], row["timezone"])
        message = str(refusal.value)
        assert repr(row["cron"]) in message or repr(row["timezone"]) in message
        assert ";" in message, "the cure comes after a semicolon"
    else:
        assert bool(Schedule(row["cron"], row["timezone"]).warnings) == (row["expect"] == "warn")


def check_answers(schedule: Schedule, after: datetime, until: datetime) -> None:
    """What holds for every schedule: each method tells of the same ticks, wherever it starts."""
    ticks = list(schedule.ticks(after, until))
    assert all(earlier < later for earlier, later in pairwise(ticks))
    assert all(after < tick <= until and tick.tzinfo is UTC for tick in ticks)
    assert schedule.count(after, until) == len(ticks)
    span = until - after
    for start in (after, after + span / 7, after + span / 2, until - MOMENT, *ticks[:5], *ticks[-5:]):
        later = [tick for tick in ticks if tick > start]
        assert list(schedule.ticks(start, until)) == later
        if later:
            assert schedule.next(start) == later[0]
        assert schedule.next(start) > start
        latest = schedule.latest(start)
        assert latest is not None
        assert latest <= start
        assert schedule.next(latest - MOMENT) == latest
        assert schedule.next(latest) == schedule.next(start) > start
        if latest > after:
            assert latest in ticks


# The text


@pytest.mark.parametrize(
    ("cron", "field", "cure"),
    [
        ("*/90 * * * *", "field minute", "'0 * * * *'"),
        ("0 */30 * * *", "field hour", "'0 0 * * *'"),
        ("0-10/20 * * * *", "field minute", "list of values"),
        ("50/15 * * * *", "field minute", "list of values"),
        ("1-1 * * * *", "field minute", "'1'"),
        ("0 0 * jan-jan *", "field month", "'jan'"),
        ("0 0 * * 7-0", "field day-of-week", "'*'"),
        ("0 0 31 4 *", "field day-of-month", "'L'"),
        ("0 0 * * 5L", "field day-of-week", "'L5'"),
        ("0 0 ? * *", "field day-of-month", "'*'"),
        ("0 0 15W * *", "field day-of-month", "'L'"),
        ("0 0 1#2 * *", "field day-of-month", "day-of-week"),
        ("R(0-5) 3 * * *", "field minute", "'H'"),
        ("1,,2 * * * *", "field minute", "comma"),
        ("60 * * * *", "field minute", "0 to 59"),
        ("0 6 README.md docs tests dev", "has 6 fields", "in a shell quote it"),
        ("0 0 0 * *", "field day-of-month", "1 to 31"),
        ("0 0 * * 8", "field day-of-week", "0 to 7"),
        ("0 0 * MON *", "field month", "JAN"),
        ("*/x * * * *", "field minute", "'*/5'"),
        ("H(9-9) * * * *", "field minute", "'9'"),
        ("H(0-70) * * * *", "field minute", "0 to 59"),
        ("H/90 * * * *", "field minute", "'0 * * * *'"),
        ("0 0 * * *\u00a0", "ASCII", "type it anew"),
    ],
)
def test_a_refusal_names_cron_and_field_and_ends_with_the_cure(cron: str, field: str, cure: str) -> None:
    with pytest.raises(BadSpecError) as refusal:
        Schedule(cron)
    message = str(refusal.value)
    assert message.startswith(f"cron {cron!r}: ")
    assert field in message
    assert cure in message.rpartition(";")[2]


@pytest.mark.parametrize("cron", [None, 5, [], [None], ["0 6 * * *", 5], b"0 6 * * *"])
def test_a_cron_that_is_no_text_is_refused(cron: object) -> None:
    with pytest.raises(BadSpecError, match="cron"):
        Schedule(cron)


def test_a_zone_that_is_no_text_is_refused() -> None:
    with pytest.raises(BadSpecError, match="timezone None"):
        Schedule("0 6 * * *", None)


def test_unknown_choices_are_refused() -> None:
    with pytest.raises(BadSpecError, match=r"missing_hour 'start'.*'end' or 'skip'"):
        Schedule("0 6 * * *", missing_hour="start")
    with pytest.raises(BadSpecError, match=r"repeated_hour 'both'.*'second' or 'first'"):
        Schedule("0 6 * * *", repeated_hour="both")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("0  0 * * *", "0 0 * * *"),
        (" 0\t0 * * *\n", "0 0 * * *"),
        ("@daily", "0 0 * * *"),
        ("@Weekly", "0 0 * * 0"),
        ("0 0 * jan mon", "0 0 * JAN MON"),
        ("0 20-4/3 * * *", "0 20,23,2 * * *"),
        (["0 6 * * *", "0 5 * * *"], ("0 5 * * *", "0  6 * * *", "0 6 * * *")),
        (["0 6 * * *"], "0 6 * * *"),
    ],
)
def test_two_ways_to_write_a_line_are_one_schedule(one: str, other: str) -> None:
    assert Schedule(one) == Schedule(other)
    assert hash(Schedule(one)) == hash(Schedule(other))
    assert Schedule(one).canonical == Schedule(other).canonical


def test_what_decides_about_ticks_tells_schedules_apart() -> None:
    schedule = Schedule("0 6 * * *", "Europe/Berlin")
    others = [
        replace(schedule, cron="1 6 * * *"),
        replace(schedule, timezone="Europe/Paris"),
        replace(schedule, missing_hour="skip"),
        replace(schedule, repeated_hour="first"),
    ]
    assert len({schedule, *others}) == len({one.canonical for one in (schedule, *others)}) == 5


@pytest.mark.parametrize(
    ("cron", "words"),
    [
        ("* */6 * * *", "240 times a day"),
        ("30 0 1 * 1", "30 0 * * 1#1"),
        ("0 0 1-7 * FRI", "0 0 * * FRI#1"),
        ("*/45 * * * *", "15 to 45 minutes"),
        ("*/7 * * * *", "4 to 7 minutes"),
        ("H/7 * * * *", "minutes"),
        ("0 */5 * * *", "4 to 5 hours"),
        ("0 0 */2 * *", "1 to 2 days"),
        ("0 0 1 */5 *", "2 to 5 months"),
        ("0 0 * * */3", "1 to 3 days"),
    ],
)
def test_warnings_say_what_the_text_means(cron: str, words: str) -> None:
    (warning,) = Schedule(cron).warnings
    assert words in warning
    assert repr(Schedule(cron).cron) in warning


@pytest.mark.parametrize("cron", ["5/15 * * * *", "*/60 * * * *", "0 0 * * 0-7", "0 0 1,L * *", "0 8-18/3 * * *"])
def test_even_text_has_no_warning(cron: str) -> None:
    assert Schedule(cron).warnings == ()


def test_gmt_is_taken_with_a_word_about_summer() -> None:
    (warning,) = Schedule("0 6 * * *", "GMT").warnings
    assert "Europe/London" in warning


# H


def test_h_is_stable_for_a_job_and_differs_between_jobs_and_fields() -> None:
    # These numbers must never change: each would move a job that runs somewhere.
    assert Schedule("H H * * *").resolved("carrier_delay").cron == "43 8 * * *"
    minutes = {Schedule("H * * * *").resolved(f"job_{n}").cron for n in range(300)}
    assert len(minutes) > 55
    twice = [Schedule("H(0-23) H * * *").resolved(f"job_{n}").cron for n in range(300)]
    assert sum(cron.split()[0] == cron.split()[1] for cron in twice) < 40, "the fields go their own ways"


@pytest.mark.parametrize(
    ("cron", "field", "allowed"),
    [
        ("H(0-15) * * * *", 0, range(16)),
        ("0 H(22-2) * * *", 1, (22, 23, 0, 1, 2)),
        ("0 0 H * *", 2, range(1, 29)),
        ("0 0 1 H *", 3, range(1, 13)),
        ("0 0 * * H", 4, range(7)),
        ("0 0 * * H(MON-FRI)", 4, range(1, 6)),
    ],
)
def test_h_stays_in_its_range(cron: str, field: int, allowed: range) -> None:
    found = {int(Schedule(cron).resolved(f"job_{n}").crons[0].split()[field]) for n in range(400)}
    assert found == set(allowed)


def test_h_with_a_step_is_spread_evenly() -> None:
    schedule = Schedule("H/15 H(0-11)/6 * * *").resolved("nightly")
    minutes, hours = ([int(value) for value in part.split(",")] for part in schedule.crons[0].split()[:2])
    assert [value - minutes[0] for value in minutes] == [0, 15, 30, 45]
    assert minutes[0] < 15
    assert [value - hours[0] for value in hours] == [0, 6]
    assert schedule.shortest_interval() == 15 * MINUTE


def test_h_without_a_job_has_no_ticks_and_says_so() -> None:
    schedule, moment = Schedule("H 6 * * *"), at("2027-01-01T00:00Z")
    assert schedule.uses_hash
    for ask in (
        lambda: schedule.ticks(moment, moment + DAY),
        lambda: schedule.next(moment),
        lambda: schedule.latest(moment),
        lambda: schedule.count(moment, moment + DAY),
        lambda: schedule.preview(moment, 3),
        schedule.shortest_interval,
        schedule.longest_interval,
    ):
        with pytest.raises(BadSpecError, match=r"'H 6 \* \* \*'.*resolved\(job\)"):
            ask()
    with pytest.raises(BadSpecError, match="job ''"):
        schedule.resolved("")
    resolved = schedule.resolved("nightly")
    assert not resolved.uses_hash
    assert resolved.next(moment).hour == 6
    assert resolved.resolved("other") is resolved
    assert Schedule("H/7 * * * *").resolved("nightly").warnings == Schedule("H/7 * * * *").warnings


def test_an_h_that_can_never_fire_is_refused_for_the_job() -> None:
    with pytest.raises(BadSpecError, match="never fires"):
        Schedule("0 0 H(30-31) 2 *").resolved("nightly")


# Times given


@pytest.mark.parametrize("name", ["after", "until", "at"])
def test_a_time_without_a_zone_is_refused_by_name(name: str) -> None:
    schedule, naive, aware = Schedule("0 6 * * *"), datetime(2027, 1, 1), at("2027-01-01T00:00Z")  # noqa: DTZ001
    asks: dict[str, list[Callable[[], object]]] = {
        "after": [
            lambda: schedule.ticks(naive, aware),
            lambda: schedule.count(naive, aware),
            lambda: schedule.next(naive),
            lambda: schedule.preview(naive, 1),
            lambda: clock_changes("UTC", naive, aware),
        ],
        "until": [lambda: schedule.ticks(aware, naive), lambda: schedule.count(aware, naive)],
        "at": [lambda: schedule.latest(naive)],
    }
    for ask in asks[name]:
        with pytest.raises(BadSpecError, match=f"{name} 2027-01-01.*time zone; give an aware"):
            ask()


def test_times_may_be_given_in_any_zone_and_in_either_pass() -> None:
    zone = ZoneInfo("America/New_York")
    schedule = Schedule("30 1 * * *", "America/New_York")
    first = datetime(2027, 11, 7, 1, 30, tzinfo=zone)
    assert schedule.latest(first) == at("2027-11-06T05:30Z")
    assert schedule.next(first) == schedule.latest(first.replace(fold=1)) == at("2027-11-07T06:30Z")
    assert schedule.next(first.replace(fold=1)) == at("2027-11-08T06:30Z")


def test_the_supported_range() -> None:
    schedule = Schedule("0 6 * * *", "Europe/Berlin")
    ages = datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)
    assert schedule.next(ages[0]) == at("1970-01-01T05:00Z")
    assert schedule.latest(at("1970-01-01T04:59Z")) is None
    assert schedule.latest(ages[0]) is None
    assert schedule.latest(ages[1]) == at("9998-12-30T05:00Z")
    with pytest.raises(BadSpecError, match="after 9999"):
        schedule.next(ages[1])
    assert list(schedule.ticks(at("2027-01-03T00:00Z"), at("2027-01-01T00:00Z"))) == []
    assert schedule.count(at("2027-01-03T00:00Z"), at("2027-01-01T00:00Z")) == 0


# Intervals and cost


@pytest.mark.parametrize(
    ("cron", "shortest", "longest"),
    [
        ("* * * * *", MINUTE, MINUTE),
        ("*/45 * * * *", 15 * MINUTE, 45 * MINUTE),
        ("0 */5 * * *", 4 * HOUR, 5 * HOUR),
        ("30 2 * * *", DAY, DAY),
        ("0 0 */2 * *", DAY, 2 * DAY),
        ("0 9 31 * *", 31 * DAY, 61 * DAY),
        ("0 6 * * MON-FRI", DAY, 3 * DAY),
        ("0 6,18 * * SUN", 12 * HOUR, 6 * DAY + 12 * HOUR),
        ("0 0 29 2 *", 1461 * DAY, 1461 * DAY),
        ("0 0 * 2 1#5", 28 * 1461 * DAY / 4, 28 * 1461 * DAY / 4),
        (["0 6 * * *", "0 7 * * MON"], HOUR, DAY),
    ],
)
def test_intervals_are_those_of_the_wall_clock(cron: str, shortest: timedelta, longest: timedelta) -> None:
    schedule = Schedule(cron, "America/New_York")
    assert schedule.shortest_interval() == shortest
    assert schedule.longest_interval() == longest


def test_counting_a_year_of_minutes_is_not_done_one_by_one() -> None:
    schedule, start = Schedule("* * * * *", "America/New_York"), at("2027-01-01T00:00Z")
    schedule.count(start, start + DAY)
    best = min(timed(lambda: schedule.count(start, start + 365 * DAY)) for _ in range(5))
    assert schedule.count(start, start + 365 * DAY) == 365 * 24 * 60
    assert best < 0.05


@pytest.mark.parametrize("cron", ["0 0 29 2 *", "0 0 * 2 1#5", "0 0 1 1 *"])
def test_a_tick_that_is_years_away_is_found_soon(cron: str) -> None:
    schedule = Schedule(cron, "Europe/Berlin")
    for year in (1999, 2027, 2073, 2099):
        moment = datetime(year, 6, 1, tzinfo=UTC)
        assert timed(lambda moment=moment: (schedule.next(moment), schedule.latest(moment))) < 0.5


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


# Preview


def test_preview_notes_a_moved_tick() -> None:
    schedule = Schedule("30 2 * * *", "America/New_York")
    plain, moved, after = schedule.preview(at("2027-03-13T00:00Z"), 3)
    assert (plain.note, after.note) == ("", "")
    assert moved.utc == at("2027-03-14T07:00Z")
    assert moved.local.isoformat() == "2027-03-14T03:00:00-04:00"
    assert "2027-03-14 02:30 does not exist: moved here; the clock goes from 02:00 to 03:00" in moved.note


def test_preview_notes_dropped_ticks() -> None:
    schedule = Schedule("*/30 2 * * *", "America/New_York", missing_hour="skip")
    (tick,) = schedule.preview(at("2027-03-13T08:00Z"), 1)
    assert tick.utc == at("2027-03-15T06:00Z")
    assert "2027-03-14 02:00 (and 1 more) does not exist: left out" in tick.note
    (tick,) = Schedule("30 2 * * *", "Pacific/Apia").preview(at("2011-12-29T13:00Z"), 1)
    assert tick.note == "2011-12-30 does not exist here and has no tick"


def test_preview_notes_doubled_ticks() -> None:
    start = at("2027-11-07T04:00Z")
    (named,) = Schedule("30 1 * * *", "America/New_York").preview(start, 1)
    assert "only this one fires, the second" in named.note
    (named,) = Schedule("30 1 * * *", "America/New_York", repeated_hour="first").preview(start, 1)
    assert "only this one fires, the first" in named.note
    hourly = Schedule("30 * * * *", "America/New_York").preview(start, 4)
    assert ["first" in tick.note for tick in hourly] == [False, True, False, False]
    assert ["second" in tick.note for tick in hourly] == [False, False, True, False]
    assert all("each time fires" in tick.note for tick in hourly[1:3])


def test_clock_changes() -> None:
    changes = clock_changes("Australia/Lord_Howe", at("2027-01-01T00:00Z"), at("2027-12-31T00:00Z"))
    assert [(change.at, change.after - change.before) for change in changes] == [
        (at("2027-04-03T15:00Z"), -30 * MINUTE),
        (at("2027-10-02T15:30Z"), 30 * MINUTE),
    ]
    (spring, autumn) = (change.at for change in changes)
    assert clock_changes("Australia/Lord_Howe", spring, autumn) == changes[1:]
    assert clock_changes("Asia/Kathmandu", at("2027-01-01T00:00Z"), at("2030-12-31T00:00Z")) == []


# Reported faults of other schedulers (the ids are those of the scenarios the project was built from)


def test_b02_a_line_that_never_touches_the_gap() -> None:
    schedule = Schedule("20 */4 * * *", "America/Los_Angeles")
    start = at("2023-03-12T08:00Z")
    answers = {schedule.next(start + n * MINUTE) for n in range(241)}
    assert answers == {at("2023-03-12T08:20Z"), at("2023-03-12T11:20Z"), at("2023-03-12T15:20Z")}


@pytest.mark.parametrize("around", ["2024-03-10T07:00Z", "2024-11-03T06:00Z"])
@pytest.mark.parametrize("choice", ["second", "first"])
def test_b04_the_latest_tick_is_never_in_the_future(around: str, choice: str) -> None:
    schedule = Schedule("0 1 * * *", "America/New_York", repeated_hour=choice)
    for n in range(-180, 181):
        moment = at(around) + n * MINUTE
        assert schedule.latest(moment) <= moment
    want = "2024-11-02T05:00Z" if choice == "second" else "2024-11-03T05:00Z"
    assert schedule.latest(at("2024-11-03T05:30Z")) == at(want)


def test_b06_planning_again_after_the_change_adds_nothing() -> None:
    schedule = Schedule("0 3 * * *", "Europe/London")
    before, after = at("2022-10-20T12:00Z"), at("2022-10-31T12:00Z")
    plan = list(schedule.ticks(before, before + 14 * DAY))
    again = list(schedule.ticks(after, after + 14 * DAY))
    assert plan[8:12] == [at(f"2022-{day}Z") for day in ("10-29T02:00", "10-30T03:00", "10-31T03:00", "11-01T03:00")]
    assert [tick for tick in again if tick <= plan[-1]] == [tick for tick in plan if tick > after]


ASK = """
from datetime import datetime, timedelta, timezone
from gaffer_dagster.domain.schedule import Schedule
for cron, zone, start in [
    ("0 3 * * *", "Europe/London", "2022-10-20"), ("0 * * * *", "Australia/Lord_Howe", "2027-03-28"),
    ("30 23 * * *", "Africa/Cairo", "2027-10-20"), ("H H * * *", "Europe/Dublin", "2027-03-20"),
]:
    after = datetime.fromisoformat(start).replace(tzinfo=timezone.utc)
    print(*Schedule(cron, zone).resolved("nightly").ticks(after, after + timedelta(days=14)))
"""


def test_the_answer_is_the_same_in_every_process() -> None:
    def ask(**env: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", ASK], env={**os.environ, **env}, check=True, capture_output=True, text=True
        )
        return done.stdout

    # An empty path: the zone data of the package `tzdata` instead of the system's (B06: newer data).
    here = ask(TZ="UTC", PYTHONHASHSEED="1")
    assert here.count("+00:00") > 14 * 24
    assert ask(TZ="Australia/Lord_Howe", PYTHONHASHSEED="2", PYTHONTZPATH="") == here


def test_b21_offsets_not_the_summer_time_mark() -> None:
    dublin = Schedule("30 1 * * *", "Europe/Dublin")
    assert dublin.next(at("2027-03-27T12:00Z")) == at("2027-03-28T01:00Z")
    casablanca = Schedule("30 2 * * *", "Africa/Casablanca")
    assert casablanca.next(at("2026-03-21T12:00Z")) == at("2026-03-22T02:00Z")
    apia = Schedule("30 2 * * *", "Pacific/Apia")
    assert apia.next(at("2011-12-29T12:30Z")) == at("2011-12-30T12:30Z")


def test_b24_the_largest_distance_counts() -> None:
    schedule = Schedule("0 9 31 * *")
    assert schedule.next(at("2027-01-31T09:00Z")) == at("2027-03-31T09:00Z")
    for cron in ("*/45 * * * *", "0 */5 * * *", "0 0 */2 * *", "0 9 31 * *"):
        schedule = Schedule(cron)
        ticks = list(schedule.ticks(at("2027-01-01T00:00Z"), at("2028-06-01T00:00Z")))
        gaps = {later - earlier for earlier, later in pairwise(ticks)}
        assert (min(gaps), max(gaps)) == (schedule.shortest_interval(), schedule.longest_interval())


def test_d01_an_overlap_at_midnight_does_not_end_the_schedule() -> None:
    schedule = Schedule("30 23 * * *", "Africa/Cairo")
    start, first, second = at("2027-10-28T06:00Z"), at("2027-10-28T21:30Z"), at("2027-10-29T21:30Z")
    for n in range(36 * 60):
        moment = start + n * MINUTE
        assert schedule.next(moment) == (first if moment < first else second)


def test_d06_the_answer_does_not_depend_on_the_season() -> None:
    answers = []
    for season in (datetime(2027, 1, 15, tzinfo=UTC), datetime(2027, 7, 15, tzinfo=UTC)):
        module._changes.cache_clear()
        module._stretches.cache_clear()
        with time_machine.travel(season):
            schedule = Schedule("0 * * * *", "Australia/Lord_Howe")
            answers.append([*days_ticks(schedule, "2027-04-03"), *days_ticks(schedule, "2027-10-02")])
    assert answers[0] == answers[1]
    zone = ZoneInfo("Australia/Lord_Howe")
    assert {tick.astimezone(zone).minute for tick in answers[0]} == {0}
    assert at("2027-04-03T15:30Z") in answers[0]


def days_ticks(schedule: Schedule, day: str) -> list[datetime]:
    start = at(f"{day}T00:00Z")
    return list(schedule.ticks(start, start + DAY))


@pytest.mark.parametrize("every", [7, 60])
def test_d07_the_29th_of_february_on_a_live_daemon(every: int) -> None:
    schedule = Schedule("0 0 29 2 *")
    moment, found = at("2028-02-26T12:00Z"), []
    while moment < at("2028-03-02T00:00Z"):
        found += schedule.ticks(moment, moment + every * MINUTE)
        moment += every * MINUTE
    assert found == [at("2028-02-29T00:00Z")]
    assert schedule.latest(at("2028-02-28T12:00Z")) == at("2024-02-29T00:00Z")
    assert schedule.next(at("2096-03-01T00:00Z")) == at("2104-02-29T00:00Z"), "2100 has no leap day"


def test_d09_several_crons_are_merged_by_instant() -> None:
    schedule = Schedule(["45 * * * *", "15 * * * *"], "America/New_York")
    ticks = list(schedule.ticks(at("2027-11-07T04:00Z"), at("2027-11-07T07:00Z")))
    assert [f"{tick:%H:%M}" for tick in ticks] == ["04:15", "04:45", "05:15", "05:45", "06:15", "06:45"]


def test_several_crons_keep_their_own_rules_and_count_an_instant_once() -> None:
    schedule = Schedule(["30 * * * *", "30 1 * * *", "0 1 * * *"], "America/New_York")
    ticks = list(schedule.ticks(at("2027-11-07T04:59Z"), at("2027-11-07T07:00Z")))
    assert [f"{tick:%H:%M}" for tick in ticks] == ["05:30", "06:00", "06:30"]
    gap = Schedule(["0 3 * * *", "30 2 * * *", "0 * * * *"], "America/New_York")
    assert gap.count(at("2027-03-14T06:30Z"), at("2027-03-14T07:30Z")) == 1
    check_answers(gap, at("2027-03-13T00:00Z"), at("2027-03-16T00:00Z"))


def test_an_offset_with_seconds() -> None:
    # Liberia was 44 min 30 s behind until 7 January 1972, when the clock went from 00:00:00 to 00:44:30.
    schedule = Schedule("20 0 * * *", "Africa/Monrovia")
    ticks = list(schedule.ticks(at("1972-01-05T00:00Z"), at("1972-01-09T00:00Z")))
    assert ticks == [
        at("1972-01-05T01:04:30Z"),
        at("1972-01-06T01:04:30Z"),
        at("1972-01-07T00:44:30Z"),
        at("1972-01-08T00:20:00Z"),
    ]
    check_answers(schedule, at("1972-01-05T00:00Z"), at("1972-01-09T00:00Z"))


def test_an_overlap_that_begins_just_after_midnight() -> None:
    # In Newfoundland the clock went from 00:01 back to 23:01 of the day before: dates come out of order.
    schedule = Schedule("0,30 * * * *", "America/St_Johns")
    ticks = list(schedule.ticks(at("2006-10-29T01:00Z"), at("2006-10-29T04:00Z")))
    local = [tick.astimezone(ZoneInfo("America/St_Johns")).strftime("%d %H:%M") for tick in ticks]
    assert local == ["28 23:00", "28 23:30", "29 00:00", "28 23:30", "29 00:00", "29 00:30"]


# Against a walk minute by minute


@dataclass(frozen=True)
class Line:
    """A cron line, and the same said again without cron: which wall times fire."""

    text: str
    fires: Callable[[datetime], bool]
    every_hour: bool
    comes: bool = True
    """Whether it fires at all."""


@dataclass(frozen=True)
class Walk:
    """Some days of a zone, minute by minute: at which instants a wall time comes, and what is leapt over."""

    instants: dict[datetime, list[datetime]]
    leapt: dict[datetime, datetime]  # to the instant at the end of the gap


@lru_cache(maxsize=8)
def walk(zone: str, start: datetime, end: datetime, step: timedelta) -> Walk:
    instants: dict[datetime, list[datetime]] = {}
    leapt: dict[datetime, datetime] = {}
    tz, moment, before = ZoneInfo(zone), start, None
    while moment < end:
        wall = moment.astimezone(tz).replace(tzinfo=None)
        instants.setdefault(wall, []).append(moment)
        while before is not None and before + step < wall:
            before += step
            leapt[before] = moment
        before, moment = wall, moment + step
    return Walk(instants, leapt)


def brute_force(
    line: Line, schedule: Schedule, start: datetime, end: datetime, step: timedelta = MINUTE
) -> list[datetime]:
    """The ticks, decided from the wall clock alone. More than a day on both sides is walked as well."""
    missing, repeated = schedule.missing_hour, schedule.repeated_hour
    walked = walk(schedule.timezone, start - 26 * HOUR, end + 26 * HOUR, step)
    dates = {wall.date() for wall in walked.instants}
    found: set[datetime] = set()
    for wall, instants in walked.instants.items():
        if line.fires(wall):
            found |= set(instants) if line.every_hour else {instants[-1 if repeated == "second" else 0]}
    for wall, end_of_gap in walked.leapt.items():
        if missing == "end" and not line.every_hour and wall.date() in dates and line.fires(wall):
            found.add(end_of_gap)
    return sorted(tick for tick in found if start < tick <= end)


NAMES = ["SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT"]


def numbers(low: int, high: int, usual: list[int]) -> st.SearchStrategy[tuple[str, frozenset[int]]]:
    """A cron field and the set that it lists."""
    whole = list(range(low, high + 1))
    value = st.sampled_from(usual) | st.integers(low, high)
    lists = st.lists(value, min_size=1, max_size=4, unique=True)
    pair = st.tuples(value, value).filter(lambda pair: pair[0] != pair[1])
    return st.one_of(
        st.just(("*", frozenset(whole))),
        st.integers(2, len(whole)).map(lambda step: (f"*/{step}", frozenset(whole[::step]))),
        lists.map(lambda values: (",".join(map(str, values)), frozenset(values))),
        pair.map(
            lambda pair: (
                f"{pair[0]}-{pair[1]}",
                frozenset(n for n in whole if (pair[0] <= n) + (n <= pair[1]) + (pair[1] < pair[0]) >= 2),
            )
        ),
    )


def last_day(day: date) -> bool:
    return (day + DAY).month != day.month


DAYS_OF_MONTH: st.SearchStrategy[tuple[str, Callable[[date], bool]]] = st.one_of(
    st.just(("L", last_day)),
    numbers(1, 31, [1, 15, 28]).map(lambda given: (given[0], lambda day: day.day in given[1])),
)
DAYS_OF_WEEK: st.SearchStrategy[tuple[str, Callable[[date], bool]]] = st.one_of(
    numbers(0, 6, [0, 1, 6]).map(lambda given: (given[0], lambda day: day.isoweekday() % 7 in given[1])),
    st.integers(0, 7).map(lambda n: (str(n), lambda day: day.isoweekday() % 7 == n % 7)),
    st.integers(0, 6).map(lambda n: (NAMES[n], lambda day: day.isoweekday() % 7 == n)),
    st.integers(0, 6).map(
        lambda n: (f"L{n}", lambda day: day.isoweekday() % 7 == n and (day + 7 * DAY).month != day.month)
    ),
    st.tuples(st.integers(0, 6), st.integers(1, 5)).map(
        lambda nth: (
            f"{nth[0]}#{nth[1]}",
            lambda day: day.isoweekday() % 7 == nth[0] and (day.day - 1) // 7 + 1 == nth[1],
        )
    ),
)


@st.composite
def cron_lines(draw: st.DrawFn) -> Line:
    minute, minutes = draw(numbers(0, 59, [0, 15, 30, 45]))
    hour, hours = draw(numbers(0, 23, [0, 1, 2, 3, 22, 23]))
    month, months = draw(st.just(("*", frozenset(range(1, 13)))) | numbers(1, 12, [3, 4, 10, 11]))
    any_day: tuple[str, Callable[[date], bool]] = ("*", lambda _: True)
    day_text, day = draw(st.just(any_day) | DAYS_OF_MONTH)
    weekday_text, weekday = draw(st.just(any_day) | DAYS_OF_WEEK)

    def fires(wall: datetime) -> bool:
        if wall.second or wall.minute not in minutes or wall.hour not in hours or wall.month not in months:
            return False
        if day_text == "*" or weekday_text == "*":
            return day(wall.date()) and weekday(wall.date())
        return day(wall.date()) or weekday(wall.date())

    # A leap year has each day of the year; each weekday comes to each of them in time.
    leap_year = [date(2024, 1, 1) + n * DAY for n in range(366)]
    comes = weekday_text != "*" or any(day(one) for one in leap_year if one.month in months)
    return Line(f"{minute} {hour} {day_text} {month} {weekday_text}", fires, len(hours) == 24, comes)


ZONES = sorted(
    zone
    for zone in available_timezones()
    if "/" in zone and not zone.startswith("Etc/") and zone != "Africa/Monrovia"  # seconds: has its own test
)
# Where the clock was once set at 00:01; all others were set at a multiple of 5 minutes.
ODD_MINUTES = {
    "America/St_Johns", "America/Goose_Bay", "America/Moncton", "Canada/Newfoundland", "Asia/Gaza", "Asia/Hebron",
    "Antarctica/Casey",
}  # fmt: skip
HARD = [
    "America/New_York", "Europe/Dublin", "Africa/Casablanca", "Africa/Cairo", "Asia/Beirut", "America/Santiago",
    "America/Havana", "Atlantic/Azores", "America/St_Johns", "Australia/Lord_Howe", "Pacific/Chatham",
    "Antarctica/Troll", "Pacific/Apia", "Pacific/Kwajalein", "Pacific/Kiritimati", "Antarctica/Vostok",
    "Asia/Kathmandu", "America/Nuuk", "America/Scoresbysund", "Asia/Gaza",
]  # fmt: skip


def change_days(zone: str, year: int) -> list[datetime]:
    """The UTC days of a year, at midnight, within which the offset changes; found without the code under test."""
    tz, start = ZoneInfo(zone), datetime(year, 1, 1, tzinfo=UTC)
    offsets = [(start + n * DAY).astimezone(tz).utcoffset() for n in range(367)]
    return [start + n * DAY for n in range(366) if offsets[n] != offsets[n + 1]]


@st.composite
def days_of_zones(draw: st.DrawFn) -> tuple[str, datetime]:
    zone = draw(st.sampled_from(HARD) | st.sampled_from(ZONES))
    year = draw(st.integers(1970, 2100))
    days = change_days(zone, year)
    return zone, draw(st.sampled_from(days)) if days else datetime(year, draw(st.integers(1, 12)), 28, tzinfo=UTC)


@settings(max_examples=100, deadline=None)
@given(
    line=cron_lines(),
    place=days_of_zones(),
    missing=st.sampled_from(["end", "skip"]),
    repeated=st.sampled_from(["second", "first"]),
)
def test_random_crons_agree_with_a_walk_minute_by_minute(
    line: Line, place: tuple[str, datetime], missing: str, repeated: str
) -> None:
    zone, day = place
    if not line.comes:
        with pytest.raises(BadSpecError, match="never fires"):
            Schedule(line.text, zone)
        return
    schedule = Schedule(line.text, zone, missing_hour=missing, repeated_hour=repeated)
    start, end = day - DAY, day + 2 * DAY
    assert list(schedule.ticks(start, end)) == brute_force(line, schedule, start, end)
    if start.year > 1999:
        check_answers(schedule, start, end)


def test_each_zone_agrees_with_a_walk() -> None:
    named = Line(
        "*/15 0-3,22,23 * * *", lambda wall: wall.minute % 15 == 0 and wall.hour in (0, 1, 2, 3, 22, 23), False
    )
    hourly = Line("0 * * * *", lambda wall: wall.minute == 0, True)
    tried = 0
    for zone in ZONES:
        # The changes of one year for each zone, not the same year in all, but in every run.
        for day in change_days(zone, 1970 + crc32(zone.encode()) % 131):
            for line, missing, repeated in [
                (named, "end", "second"),
                (named, "skip", "first"),
                (hourly, "end", "first"),
            ]:
                schedule = Schedule(line.text, zone, missing_hour=missing, repeated_hour=repeated)
                start, end = day - HOUR, day + DAY
                step = MINUTE if zone in ODD_MINUTES else 5 * MINUTE
                want = brute_force(line, schedule, start, end, step)
                assert list(schedule.ticks(start, end)) == want, (zone, day, line.text)
            tried += 1
    assert tried > 200


# That these cases can fail


def wall_clock(row: dict[str, str]) -> list[datetime]:
    """The usual mistake: name local times one day after another, and let Python find the instant."""
    schedule, zone = schedule_of(row), ZoneInfo(row["zone"])
    after, until = at(row["after_utc"]), at(row["until_utc"])
    (line,) = schedule.lines
    day, found = after.astimezone(zone).date(), []
    while day <= until.astimezone(zone).date():
        if line.fires_on(day.month, day.day, 31 - last_day(day), day.isoweekday() % 7):
            midnight = datetime(day.year, day.month, day.day, tzinfo=zone)
            found += [(midnight + minute * MINUTE).astimezone(UTC) for minute in line.times]
        day += DAY
    return [tick for tick in found if after < tick <= until]


def plus_24_hours(row: dict[str, str]) -> list[datetime]:
    """Another one: from the first tick on, the next day's is 24 hours later."""
    schedule, until = schedule_of(row), at(row["until_utc"])
    ticks = list(schedule.ticks(at(row["after_utc"]), at(row["after_utc"]) + DAY))
    while ticks and ticks[-1] < until:
        ticks += [tick + DAY for tick in ticks[-len(schedule.lines[0].times) :]]
    return [tick for tick in ticks if tick <= until]


@pytest.mark.parametrize(
    ("naive", "caught"),
    [
        (wall_clock, {"newyork-0130-overlap", "newyork-0230-gap", "newyork-hourly-overlap", "apia-0230-skipped"}),
        (plus_24_hours, {"berlin-0800-spring", "cairo-0030-gap", "santiago-0030-gap", "london-0300-autumn"}),
    ],
)
def test_the_usual_mistakes_are_caught_by_the_table(
    naive: Callable[[dict[str, str]], list[datetime]], caught: set[str]
) -> None:
    failed = {row["id"] for row in TICKS if naive(row) != expected(row)}
    assert caught <= failed
    quiet = {row["id"] for row in TICKS if row["id"].endswith("-quiet")}
    assert len(quiet - failed) > len(quiet) / 2, "a mistake that fails on quiet days too would prove nothing"


def test_a_wrong_offset_is_caught_by_the_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The walk minute by minute finds a change that is taken an hour too late."""
    offset = module.offset_at
    monkeypatch.setattr(module, "offset_at", lambda zone, instant: offset(zone, instant - HOUR))
    module._changes.cache_clear()
    module._stretches.cache_clear()
    try:
        line = Line("30 2 * * *", lambda wall: (wall.hour, wall.minute) == (2, 30), False)
        schedule, start = Schedule(line.text, "America/New_York"), at("2027-03-13T00:00Z")
        assert list(schedule.ticks(start, start + 3 * DAY)) != brute_force(line, schedule, start, start + 3 * DAY)
    finally:
        module._changes.cache_clear()
        module._stretches.cache_clear()
