"""Two copies of the tz database: a run says so (B15)."""

from __future__ import annotations

from datetime import timedelta

import pytest

from gaffer_dagster.domain import zones
from gaffer_dagster.domain.due import NewRows
from gaffer_dagster.domain.schedule import Schedule
from gaffer_dagster.domain.spec import JobSpec
from gaffer_dagster.engine.zone_data import zone_data
from tests.support import jobs

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
