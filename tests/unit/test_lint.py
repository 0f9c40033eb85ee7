"""What is said of a schedule at its definition."""

from __future__ import annotations

import warnings
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

import gaffer_dagster as gd
from gaffer_dagster.domain import lint as module
from gaffer_dagster.domain import schedule as schedules
from gaffer_dagster.domain.lint import Lint, lint
from gaffer_dagster.domain.schedule import Schedule
from gaffer_dagster.errors import BadSpecError

NOW = datetime(2026, 7, 1, tzinfo=timezone.utc)
FORWARD = "the clock goes from 02:00 to 03:00"
BACK = "the clock goes from 02:00 to 01:00"
SPRINGS = ("2027-03-14", "2028-03-12", "2029-03-11")
AUTUMNS = ("2026-11-01", "2027-11-07", "2028-11-05")


def of(cron: str | list[str], zone: str = "America/New_York", **given: Any) -> Lint:
    timeout = given.pop("timeout", None)
    return lint(Schedule(cron, zone, **given), NOW, timeout=timeout)


@pytest.mark.parametrize(
    ("cron", "fires"),
    [
        ("0 6 * * *", "once a day"),
        ("0 6,18 * * *", "twice a day"),
        ("@hourly", "24 times a day"),
        ("* * * * *", "1,440 times a day"),
        (["0 6 * * *", "0 12 * * 1-5"], "1 to 2 times a day"),
        ("0 6 * * 1-5", "once a day, on about 261 days a year"),
        ("0 0 L * *", "once a day, on 12 days a year"),
        ("@yearly", "once a day, on 1 day a year"),
        ("0 6 29 2 *", "once a day, on 7 days in 28 years"),
        ("0 6 13-15 3 5", "once a day, on about 7 days a year"),
        ("0 6 29 2 0", "once a day, on about 4 days a year"),
        ("0 6 * 2 0#5", "once a day, on 1 day in 28 years"),
        ("*/30 8-9 1 * *", "4 times a day, on 12 days a year"),
    ],
)
def test_how_often_it_fires(cron: str | list[str], fires: str) -> None:
    assert of(cron).fires_a_day == fires


@pytest.mark.parametrize(("cron", "cure"), [("0 6 * * *", "H 6 * * *"), ("@hourly", "H * * * *")])
def test_minute_0_is_noted_and_no_warning(cron: str, cure: str) -> None:
    said = of(cron)
    assert [f"'{cure}'" in note for note in said.notes] == [True]
    assert said.warnings == ()


@pytest.mark.parametrize("cron", ["5 6 * * *", "*/15 * * * *", "0,30 * * * *", "* * * * *"])
def test_another_minute_is_not_noted(cron: str) -> None:
    assert of(cron).notes == ()


def test_where_h_would_be_minute_0_as_well_it_is_not_noted() -> None:
    names = [f"job{number}" for number in range(400)]
    zero = [name for name in names if Schedule("H 6 * * *").resolved(name).cron == "0 6 * * *"]
    assert zero
    for name in (zero[0], next(name for name in names if name not in zero)):
        assert bool(lint(Schedule("0 6 * * *"), NOW, job=name).notes) == (name not in zero)
        assert lint(Schedule("H 6 * * *"), NOW, job=name).notes == ()


def test_an_h_needs_a_job() -> None:
    with pytest.raises(BadSpecError, match="H stands for a number made from a job's name"):
        of("H 6 * * *")
    assert lint(Schedule("H 6 * * *"), NOW, job="a").words.startswith("At 06:")


def test_the_texts_own_warnings_are_there() -> None:
    (warning,) = of("30 0 1 * 1").warnings
    assert "OR" in warning


# ── changes of the clock ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("cron", "given", "effects"),
    [
        ("0 6 * * *", {}, []),
        ("0 * * * *", {"zone": "Asia/Kolkata"}, []),
        (
            "30 2 * * *", {},
            [f"{day} 02:30 does not exist: moved to 03:00; {FORWARD}" for day in SPRINGS],
        ),
        (
            "*/20 2 * * *", {"missing_hour": "skip"},
            [
                f"{day} 02:00 (and 2 more) does not exist: left out; {FORWARD}"
                for day in SPRINGS
            ],
        ),
        (
            "30 1 * * *", {},
            [
                f"{day} 01:30 comes twice: only the second fires; {BACK}"
                for day in AUTUMNS
            ],
        ),
        (
            "30 1 * NOV *", {"repeated_hour": "first"},
            [
                f"{day} 01:30 comes twice: only the first fires; {BACK}"
                for day in AUTUMNS
            ],
        ),
        (
            "* * * * *", {},
            [
                f"{day} 01:00 (and 59 more) comes twice: each time fires; {BACK}"
                for day in AUTUMNS
            ],
        ),
        (["30 1 * * *", "0 * * * *"], {"zone": "Europe/London"}, [
            effect
            for day in ("2026-10-25", "2027-03-28", "2027-10-31", "2028-03-26", "2028-10-29", "2029-03-25")
            for effect in (
                [f"{day} 01:30 does not exist: moved to 02:00; the clock goes from 01:00 to 02:00"]
                if "-03-" in day
                else [
                    f"{day} 01:30 comes twice: only the second fires; {BACK}",
                    f"{day} 01:00 comes twice: each time fires; {BACK}",
                ]
            )
        ]),
    ],
)  # fmt: skip
def test_what_changes_of_the_clock_do(cron: str | list[str], given: dict[str, str], effects: list[str]) -> None:
    assert list(of(cron, **given).clock) == effects


def test_a_date_that_does_not_exist() -> None:
    schedule = Schedule("0 6 * * *", "Pacific/Apia")
    after, until = (datetime(2011, month, 1, tzinfo=timezone.utc) for month in (11, 12))
    assert schedule.clock_effects(after, until) == []
    assert schedule.clock_effects(until, until + timedelta(days=40)) == ["2011-12-30 does not exist and has no tick"]


@pytest.mark.parametrize("zone", ["America/New_York", "Australia/Lord_Howe", "Africa/Casablanca", "Africa/Cairo"])
@pytest.mark.parametrize(
    "cron", ["30 1 * * *", "40 * * * *", "15 0-3 * * *", "0 0 * * *", ["45 1,2 * * *", "0 * * * *"], "30 2 14 3 *"]
)
@pytest.mark.parametrize("policy", [{}, {"missing_hour": "skip", "repeated_hour": "first"}])
def test_the_dates_are_those_that_a_preview_notes(zone: str, cron: Any, policy: dict[str, Any]) -> None:
    schedule, until = Schedule(cron, zone, **policy), NOW + timedelta(days=3 * 365)
    ticks = schedule.preview(NOW, schedule.count(NOW, until))
    noted = {
        note.split(" ")[0] if "does not exist" in note else f"{tick.local:%Y-%m-%d}"
        for tick in ticks
        for note in tick.note.split("; ")
        if "does not exist" in note or "comes twice" in note
    }
    assert {effect.split(" ")[0] for effect in schedule.clock_effects(NOW, until)} == noted


# ── the timeout ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_night_that_is_shorter_than_the_timeout_is_a_warning() -> None:
    crons = ["30 2 * * *", "15 3 * * *"]
    (warning,) = of(crons, timeout=timedelta(minutes=20)).warnings
    assert "timeout=20m" in warning
    assert "3 nights" in warning
    assert "15m from 2027-03-14 07:00Z to 07:15Z" in warning
    assert of(crons, timeout=timedelta(minutes=15)).warnings != ()
    assert of(crons, timeout=timedelta(minutes=14)).warnings == ()
    assert of(crons, timeout=timedelta(minutes=20), missing_hour="skip").warnings == ()


def test_half_an_hour_at_lord_howe() -> None:
    (warning,) = of("30 * * * *", "Australia/Lord_Howe", timeout=timedelta(minutes=45)).warnings
    assert "30m from 2026-10-03 15:00Z to 15:30Z" in warning
    assert of("0 * * * *", "Australia/Lord_Howe", timeout=timedelta(minutes=45)).warnings == ()


def test_a_schedule_of_each_minute_is_not_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only around the changes: the walk gives few of the 1.6 million ticks of three years."""
    walked = [0]
    walk = schedules._walk

    def counting(*given: Any) -> Any:
        for run in walk(*given):
            walked[0] += len(run.minutes)
            yield run

    monkeypatch.setattr(schedules, "_walk", counting)
    of("* * * * *", timeout=timedelta(seconds=45))
    assert 0 < walked[0] < 60_000


def test_what_looks_at_regular_days_only_misses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken variant: with no change of the clock to look at, the short night is not found."""
    monkeypatch.setattr(module, "clock_changes", lambda *_: [])
    assert of(["30 2 * * *", "15 3 * * *"], timeout=timedelta(minutes=20)).warnings == ()


# ── where it is said ─────────────────────────────────────────────────────────────────────────────────────────────


def define(**given: Any) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")

        @gd.gaffer_asset(due=gd.NewRows("source", "id"), **given)
        def a_job(batch: gd.Batch) -> None: ...

    return [one for one in said if issubclass(one.category, gd.GafferWarning)]


def test_a_definition_warns_once_at_its_own_line() -> None:
    (one,) = define(schedule=gd.Schedule("* */6 * * *"))
    assert "job 'a_job'" in str(one.message)
    assert "'* */6 * * *'" in str(one.message)
    assert one.filename == __file__
    assert Path(__file__).read_text().splitlines()[one.lineno - 1].strip().startswith("@gd.gaffer_asset")


def test_a_definition_knows_its_timeout() -> None:
    schedule = gd.Schedule(["30 2 * * *", "15 3 * * *"], "America/New_York")
    (one,) = define(schedule=schedule, bounds=gd.Bounds(timeout="40m"))
    assert "timeout=40m" in str(one.message)
    assert define(schedule=schedule, bounds=gd.Bounds(timeout="5m")) == []


def test_notes_are_no_warning() -> None:
    assert define(schedule=gd.Schedule("0 6 * * *", "America/New_York")) == []
    assert define() == []
