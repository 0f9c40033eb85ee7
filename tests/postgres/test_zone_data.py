"""Two copies of the tz database: a run says so (B15)."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from gaffer_dagster.domain import zones
from gaffer_dagster.domain.due import NewRows
from gaffer_dagster.domain.run import RunRecord
from gaffer_dagster.domain.schedule import Schedule
from gaffer_dagster.domain.spec import JobSpec
from gaffer_dagster.engine.registry import Definition, register_all
from gaffer_dagster.engine.zone_data import zone_data
from gaffer_dagster.store import jobs as job_table
from gaffer_dagster.testing import Clock
from tests.support import jobs
from tests.support.protocol import session
from tests.support.zone_files import used, write

JOB = JobSpec("copy_rows", NewRows("source", "id"), Schedule("0 6 * * *", "Europe/Berlin"))
HERE = zone_data("Europe/Berlin")


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if "zone data differ" in record.message]


def test_each_run_records_its_zone_data_and_says_nothing_where_all_agree(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    jobs.make_source(url)
    for _ in range(2):
        jobs.run(JOB, url)
    assert jobs.query(url, "select zone_data from gaffer.job_runs") == [(HERE,), (HERE,)]
    assert said(caplog) == []


def test_a_worker_with_another_copy_is_reported_each_time_they_alternate(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    jobs.make_source(url)
    jobs.run(JOB, url)
    for _ in range(2):
        jobs.execute(url, "update gaffer.job set zone_data = '2026f:ffffffff'")
        jobs.run(JOB, url)
        jobs.run(JOB, url)
    assert len(said(caplog)) == 2
    assert all(f"here={HERE}" in line and "last_worker=2026f:ffffffff" in line for line in said(caplog))


def test_a_postgres_with_another_copy_is_reported(
    url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if Berlin's next change had been put off by a day here."""
    probes = zones.probes
    later = timedelta(days=1)
    monkeypatch.setattr(
        zones, "probes", lambda zone, now, until: [(at + later, offset) for at, offset in probes(zone, now, until)]
    )
    jobs.make_source(url)
    jobs.run(JOB, url)
    assert len(said(caplog)) == 1
    assert "postgres='differs from 20" in said(caplog)[0]
    assert "install one version of the tz database" in said(caplog)[0]


def test_a_zone_that_postgres_does_not_know_is_reported(
    url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(JobSpec, "timezone", property(lambda self: "Europe/Atlantis"))
    monkeypatch.setattr(zones, "probes", lambda zone, now, until: [(now, timedelta(hours=1))])
    jobs.make_source(url)
    jobs.run(JOB, url)
    assert "postgres='does not know the zone'" in said(caplog)[0]


BEIRUT = JobSpec("copy_rows", NewRows("source", "id"), Schedule("0 8 * * *", "Asia/Beirut"))
HOUR, DAY = timedelta(hours=1), timedelta(days=1)


def utc(day: int, hour: int) -> datetime:
    return datetime(2023, 3, day, hour, tzinfo=timezone.utc)


def test_b16_the_law_changes_twice_in_a_week(url: str, clock: Clock, tmp_path: Path) -> None:
    """First the summer time of 26 March was put off by a month, then it was not."""
    summer = [(datetime(2023, 10, 28, 21, tzinfo=timezone.utc), 2 * HOUR)]
    put_off = write(tmp_path / "b", "Asia/Beirut", "2023b", 2 * HOUR, [(utc(20, 22) + 31 * DAY, 3 * HOUR), *summer])
    after_all = write(tmp_path / "c", "Asia/Beirut", "2023c", 2 * HOUR, [(utc(25, 22), 3 * HOUR), *summer])
    jobs.make_source(url, 1)

    def run(at: datetime) -> RunRecord:
        clock.set(at)
        return jobs.run(BEIRUT, url, worker_clock=clock.now)

    def open_tick() -> datetime | None:
        with session(url) as connection:
            return job_table.get(connection, "copy_rows").open_tick

    with used(put_off):
        run(utc(25, 12))
        assert open_tick() == utc(26, 6)
        assert run(utc(26, 6)).tick == utc(26, 6)
        assert open_tick() == utc(27, 6)
    with used(after_all):
        with session(url) as connection:
            assert register_all(connection, [Definition(BEIRUT, None)], worker_clock=clock.now) == ["copy_rows"]
        assert open_tick() == utc(27, 5), "only ticks after the last one covered are computed anew"
        record = run(utc(27, 5))
        assert (record.tick, record.ticks_covered) == (utc(27, 5), 1)
        versions = jobs.query(url, "select split_part(zone_data, ':', 1) from gaffer.job_runs order by id")
    assert versions == [("2023b",), ("2023b",), ("2023c",)]
