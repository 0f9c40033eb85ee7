"""`gaffer preview JOB`: the schedule as the database knows it."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner, Result
from psycopg.types.json import Jsonb

from gaffer_dagster.cli import main
from gaffer_dagster.domain.bounds import Bounds
from gaffer_dagster.domain.due import EachInterval, NewRows
from gaffer_dagster.domain.schedule import Schedule
from gaffer_dagster.domain.spec import JobSpec
from gaffer_dagster.store import db
from gaffer_dagster.store import jobs as store_jobs
from tests.support import jobs

CRONS = ["30 2 * * *", "15 3 * * *"]
SCHEDULES = [
    Schedule("H 6 * * MON-FRI", "America/New_York"),
    Schedule(CRONS, "America/New_York"),
    Schedule("30 2 * * *", "Europe/Berlin", missing_hour="skip", repeated_hour="first"),
    None,
]


def register(url: str, spec: JobSpec) -> None:
    with db.connect(url, application_name="test") as connection:
        store_jobs.register(connection, spec, store_jobs.Registration())


def preview(url: str, *words: str) -> Result:
    return CliRunner().invoke(main, ["preview", *words], env={"GAFFER_DATABASE_URL": url})


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_comes_back_as_it_was(url: str, schedule: Schedule | None) -> None:
    spec = JobSpec("reports/a", NewRows("source", "id"), schedule, Bounds(timeout="40m"))
    register(url, spec)
    with db.connect(url, application_name="test") as connection:
        found = store_jobs.get(connection, "reports/a")
    assert (found.schedule, found.timeout) == (spec.schedule, spec.limits.timeout)


def test_the_newest_schedule_of_a_job_is_shown(url: str) -> None:
    for cron in ("0 5 * * *", "0 6 * * *"):
        register(url, JobSpec("a", EachInterval(), Schedule(cron, "America/New_York")))
    done = preview(url, "a", "--after", "2027-03-13T00:00Z", "--count", "2", "--json")
    assert done.exit_code == 0, done.stderr
    assert [json.loads(line)["utc"] for line in done.stdout.splitlines()] == [
        "2027-03-13T11:00:00+00:00",
        "2027-03-14T10:00:00+00:00",
    ]


def test_the_timeout_of_the_job_is_looked_at(url: str) -> None:
    for name, timeout in (("long", "40m"), ("short", "5m")):
        register(
            url, JobSpec(name, NewRows("source", "id"), Schedule(CRONS, "America/New_York"), Bounds(timeout=timeout))
        )
        done = preview(url, name, "--after", "2027-01-01T00:00Z")
        assert done.stdout.startswith("At 03:15 every day; and at 02:30 every day, in America/New_York\n"), done.stderr
        assert ("warning: " in done.stdout and "timeout=40m" in done.stdout) == (name == "long")


def test_a_job_without_a_schedule_says_so(url: str) -> None:
    register(url, JobSpec("a", NewRows("source", "id")))
    done = preview(url, "a")
    assert (done.exit_code, done.stdout) == (0, "")
    assert "has no schedule" in done.stderr


def test_an_unknown_job_is_an_instruction(url: str, empty_url: str) -> None:
    for where, said in ((url, "no job 'nosuch' is known to this database"), (empty_url, "run: gaffer migrate")):
        done = preview(where, "nosuch")
        assert done.exit_code == 1
        assert said in done.stderr


def test_a_schedule_of_a_newer_version_is_an_instruction(url: str) -> None:
    register(url, JobSpec("a", NewRows("source", "id"), Schedule("0 6 * * *")))
    newer = Jsonb({"cron": "0 6 * * *", "jitter": "5m"})
    jobs.execute(url, "update gaffer.job set spec = jsonb_set(spec, '{schedule}', %s)", newer)
    done = preview(url, "a")
    assert done.exit_code == 1
    assert "upgrade gaffer_dagster" in done.stderr
