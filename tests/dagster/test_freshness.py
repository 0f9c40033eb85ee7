"""Dagster's freshness policy says of each tick what our rule of absence says, or there is none.

GAFFER_FRESHNESS_CASES sets how many schedules are tried, GAFFER_FRESHNESS_SEED repeats those of an earlier run.
"""

from __future__ import annotations

import os
import random
from datetime import date, datetime, timedelta, timezone
from typing import Any

import dagster as dg
import pytest
import time_machine
from dagster._core.definitions.freshness import CronFreshnessPolicy
from dagster._utils.schedules import get_latest_completed_cron_tick

import gaffer_dagster as gd
from gaffer_dagster.adapter import freshness
from gaffer_dagster.adapter.freshness import policy_of
from gaffer_dagster.domain.schedule import Schedule
from gaffer_dagster.domain.spec import JobSpec
from gaffer_dagster.errors import BadSpecError
from tests.dagster.test_wakeups import NOW, Zone, some_cron, some_starts, zone_of, zones
from tests.support import jobs

SEED = int(os.environ.get("GAFFER_FRESHNESS_SEED", 0)) or random.SystemRandom().randrange(1, 1_000_000)
CASES = int(os.environ.get("GAFFER_FRESHNESS_CASES", 100))
SECOND, MINUTE = timedelta(seconds=1), timedelta(minutes=1)


def spec(cron: str | list[str] = "30 6 * * *", zone: str = "UTC", grace: str = "30m", due: Any = None) -> JobSpec:
    schedule = gd.Schedule(cron, zone)
    bounds = gd.Bounds(timeout=min(5 * MINUTE, schedule.shortest_interval() / 2))
    return JobSpec("job", due or gd.Elapsed(), schedule, bounds, gd.Alerts(grace=grace))


def deadline(job: JobSpec) -> str | None:
    found = policy_of(job, NOW)
    assert found is None or isinstance(found, CronFreshnessPolicy)
    return None if found is None else found.deadline_cron


# ── the deadlines ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("cron", "grace", "expected"),
    [
        ("30 6 * * *", "30m", "0 7 * * *"),
        ("30 6 * * 1-5", "90m", "0 8 * * 1-5"),
        ("0,30 * * * *", "10m", "10,40 * * * *"),
        ("50 * * * *", "20m", "10 * * * *"),
        ("*/5 * * * *", "5m", "*/5 * * * *"),
        ("*/15 9-17 * * 1-5", "5m", "5,20,35,50 9,10,11,12,13,14,15,16,17 * * 1-5"),
        ("45 23 * * *", "30m", "15 0 * * *"),
        ("0 12 L * *", "1h", "0 13 L * *"),
        ("0 */6 * * *", "1h", "0 1,7,13,19 * * *"),
        # There is none:
        ("45 23 * * 1-5", "30m", None),  # a deadline on Saturday
        ("0,40 6 * * *", "30m", None),  # 06:30 and 07:10
        (["30 6 * * *", "45 7 * * *"], "30m", None),
        ("*/10 * * * *", "11m", None),  # longer than the interval
        ("30 6 * * *", "90s", None),
        ("0 0 29 2 *", "1h", None),
    ],
)
def test_the_deadline_is_the_tick_and_its_grace(cron: str | list[str], grace: str, expected: str | None) -> None:
    job = spec(cron, grace=grace)
    assert deadline(job) == expected
    if expected is not None:
        found = policy_of(job, NOW)
        assert isinstance(found, CronFreshnessPolicy)
        assert found.lower_bound_delta == job.alerts.grace_for(job.schedule)
        assert found.timezone == "UTC"


@pytest.mark.parametrize(
    ("cron", "zone", "grace", "is_there"),
    [
        ("30 6 * * *", "America/New_York", "30m", True),
        ("0 0 * * *", "America/New_York", "30m", True),
        ("30 0 * * *", "America/New_York", "90m", False),  # reaches 02:00
        ("30 2 * * *", "America/New_York", "30m", False),
        ("0 1 * * *", "America/New_York", "30m", False),  # comes twice
        ("30 3 * * *", "America/New_York", "30m", True),
        ("30 22 * * *", "America/New_York", "4h", False),  # reaches 02:30 of the next day
        ("30 22 * * *", "America/New_York", "2h", True),
        ("30 2 * * *", "Asia/Tokyo", "30m", True),
        ("0 * * * *", "Europe/Berlin", "30m", True),
        ("0 * * * *", "Australia/Lord_Howe", "30m", False),
        ("30 6 * * *", "Europe/Dublin", "30m", False),
    ],
)
def test_there_is_none_where_the_clock_may_be_set_before_the_deadline_or_dagster_walks_wrongly(
    cron: str, zone: str, grace: str, is_there: bool
) -> None:
    assert (deadline(spec(cron, zone, grace)) is not None) is is_there


@pytest.mark.parametrize(
    ("due", "cron", "is_there"),
    [
        (gd.NewRows("source", "id"), "30 6 * * *", False),
        (gd.Elapsed(), "30 6 * * *", True),
        (gd.Elapsed("12h"), "30 6 * * *", True),
        (gd.Elapsed("24h"), "30 6 * * *", False),  # a day of 23 hours has none
        (gd.EachInterval(), "30 6 * * *", True),
        (gd.EachInterval("@daily"), "30 6 * * 1-5", True),
        (gd.EachInterval("@hourly"), "30 6 * * *", True),
        (gd.EachInterval("@daily"), "30 * * * *", False),
        (gd.EachInterval("@daily", start=date(2020, 1, 1), until=date(2030, 1, 1)), "30 6 * * *", False),
    ],
)
def test_there_is_one_only_where_each_tick_brings_a_materialization(due: Any, cron: str, is_there: bool) -> None:
    assert (deadline(spec(cron, due=due)) is not None) is is_there


def test_a_job_without_a_schedule_has_none() -> None:
    assert policy_of(JobSpec("job", gd.NewRows("source", "id")), NOW) is None


def test_the_asset_has_it_and_a_yearly_schedule_too() -> None:
    for cron in ("30 6 * * *", "H 6 * * *", "0 12 1 1 *"):
        asset = gd.gaffer_asset(name="timed", schedule=gd.Schedule(cron), due=gd.Elapsed())(jobs.copy_rows)
        (found,) = [each.freshness_policy for each in asset.specs]
        assert isinstance(found, CronFreshnessPolicy)
        dg.Definitions.validate_loadable(gd.build_definitions(asset, resource=gd.GafferResource(dsn="x")))
    rows = gd.gaffer_asset(name="rows", schedule=gd.Schedule("@daily"), due=gd.NewRows("source", "id"))(jobs.copy_rows)
    assert [each.freshness_policy for each in rows.specs] == [None]


# ── what Dagster makes of them ───────────────────────────────────────────────────────────────────────────────────


def some_job(chance: random.Random, zone: Zone) -> JobSpec | None:
    cron = some_cron(chance, chance.choice(some_starts(chance, zone)))
    schedule = Schedule(cron, zone.name)
    shortest = schedule.shortest_interval() // MINUTE
    grace = min(shortest, chance.choice([1, 5, 7, 15, 30, 45, 60, 90, 180, 300]))
    try:
        return spec(cron, zone.name, f"{grace}m")
    except BadSpecError:
        return None


def fault_of(job: JobSpec, found: CronFreshnessPolicy, at: datetime) -> str | None:
    """Where the latest deadline at that time is none of a tick."""
    assert job.schedule is not None
    grace = job.alerts.grace_for(job.schedule)
    tick = job.schedule.latest(at - grace)
    theirs = get_latest_completed_cron_tick(found.deadline_cron, at, found.timezone).astimezone(timezone.utc)
    if tick is None or theirs == tick + grace:
        return None
    return f"{job.schedule.canonical} + {grace} at {at}: {theirs} is not {tick + grace} ({found.deadline_cron})"


def search(chance: random.Random, cases: int) -> tuple[list[str], int]:
    faults: list[str] = []
    tried = 0
    among = zones()
    for _ in range(cases):
        zone = chance.choice(among)
        job = some_job(chance, zone)
        found = None if job is None else policy_of(job, NOW)
        if job is not None and isinstance(found, CronFreshnessPolicy):
            tried += 1
            times = [
                max(NOW, each) + chance.choice([0, 1, 59]) * timedelta(seconds=1) for each in some_starts(chance, zone)
            ]
            faults += [fault for each in times if (fault := fault_of(job, found, each)) is not None]
    return faults, tried


@pytest.mark.timeout(120 + CASES)
def test_every_deadline_is_a_tick_and_its_grace_also_where_the_clock_is_set() -> None:
    with time_machine.travel(NOW):
        faults, tried = search(random.Random(f"{SEED}"), CASES)
    print(f"GAFFER_FRESHNESS_SEED={SEED}: {tried} policies of {CASES} schedules")
    assert not faults, "\n".join(faults[:20])
    assert tried > CASES // 20


@pytest.mark.parametrize("forgotten", ["clock changes", "Dagster's faults"])
def test_a_rule_that_forgets_one_of_its_parts_is_caught(forgotten: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = {
        "clock changes": spec("30 1 * * *", "Europe/Berlin", "90m"),
        "Dagster's faults": spec("0 * * * *", "Australia/Lord_Howe", "20m"),
    }[forgotten]
    assert policy_of(job, NOW) is None
    if forgotten == "clock changes":
        monkeypatch.setattr(freshness, "_meets", lambda *_: False)
    else:
        plain = freshness.wake_up(Schedule("@daily"), NOW)
        monkeypatch.setattr(freshness, "wake_up", lambda *_: plain)
    assert job.schedule is not None
    with time_machine.travel(NOW):
        found = policy_of(job, NOW)
        assert isinstance(found, CronFreshnessPolicy)
        chance, zone = random.Random(f"{SEED} broken"), zone_of(job.schedule.timezone)
        starts = [max(NOW, each) for _ in range(200) for each in some_starts(chance, zone)]
        assert any(fault_of(job, found, each) for each in starts)
