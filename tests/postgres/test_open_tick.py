"""The tick that a job is waited for: by its own schedule and zone, as the watch will read it."""

from __future__ import annotations

import inspect
from datetime import datetime, timedelta, timezone

import pytest

from gaffer_dagster.domain.alert import Alerts
from gaffer_dagster.domain.due import NewRows
from gaffer_dagster.domain.job import JobRecord
from gaffer_dagster.domain.schedule import Schedule
from gaffer_dagster.domain.spec import JobSpec
from gaffer_dagster.store import jobs as job_table
from gaffer_dagster.testing import Clock
from tests.support import jobs
from tests.support.protocol import session

MINUTE = timedelta(minutes=1)


def utc(day: int, hour: int, minute: int = 0, second: int = 0) -> datetime:
    return datetime(2024, 3, day, hour, minute, second, tzinfo=timezone.utc)


def record(url: str) -> JobRecord:
    with session(url) as connection:
        return job_table.get(connection, "copy_rows")


@pytest.mark.parametrize("succeeds", [False, True])
def test_b09_expected_on_the_day_of_the_gap(url: str, clock: Clock, succeeds: bool) -> None:
    """05:00 in New York is 09:00Z on the day on which the clock goes forward, and not 08:00Z nor 10:00Z."""
    job = JobSpec("copy_rows", NewRows("source", "id"), Schedule("0 5 * * *", "America/New_York"), alerts=Alerts("5m"))
    jobs.make_source(url)
    for at in [utc(9, 10, 0, 5)] + [utc(10, 9, 0, 5)] * succeeds:
        clock.set(at)
        jobs.run(job, url, worker_clock=clock.now)
    found = record(url)
    assert found.open_tick == (utc(11, 9) if succeeds else utc(10, 9))
    overdue = [now for now in (utc(10, 8, 1) + number * MINUTE for number in range(90)) if _is_overdue(found, now)]
    assert overdue[:1] == ([] if succeeds else [utc(10, 9, 5)])


def _is_overdue(found: JobRecord, now: datetime) -> bool:
    return found.open_tick is not None and found.open_tick + found.grace <= now


def test_b20_the_watch_has_no_schedule_of_its_own(url: str, clock: Clock) -> None:
    job = JobSpec("copy_rows", NewRows("source", "id"), Schedule("0 8 * * *", "Europe/Berlin"))
    jobs.make_source(url)
    clock.set(utc(30, 12))
    jobs.run(job, url, worker_clock=clock.now)
    assert record(url).schedule == job.schedule
    assert record(url).open_tick == utc(31, 6)  # summer time began that night
    assert not {"cron", "timezone", "schedule"} & set(inspect.signature(Alerts).parameters)
