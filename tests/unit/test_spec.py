"""A job as one value."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from gaffer_dagster.domain.alert import Alerts
from gaffer_dagster.domain.bounds import Bounds
from gaffer_dagster.domain.due import EachInterval, Elapsed, NewRows, PendingRows
from gaffer_dagster.domain.schedule import Schedule
from gaffer_dagster.domain.spec import JobSpec
from gaffer_dagster.errors import BadSpecError

DUE = NewRows("flights", "id")


@pytest.mark.parametrize("name", ["a", "0", "carrier_delay", "reports/daily.v2-x", "a" * 128])
def test_names_that_can_be(name: str) -> None:
    assert JobSpec(name, DUE).name == name


@pytest.mark.parametrize(
    "name",
    ["", "A", "_a", ".a", "-a", "/a", "a b", "a\n", "a\0", "é", "ß", "а", "١", "a" * 129, "a\u202e", "a'; --", "\ud800",
     None, 7, b"a"],
)  # fmt: skip
def test_names_that_cannot_be_are_refused_by_name(name: Any) -> None:
    with pytest.raises(BadSpecError) as raised:
        JobSpec(name, DUE)
    assert f"job name {name!r}" in str(raised.value)


def test_exclusion_that_is_not_offered_is_refused() -> None:
    with pytest.raises(BadSpecError, match=r"'a'.*exclusion='lock'"):
        JobSpec("a", DUE, exclusion="lock")


def test_one_batch_at_a_time_and_several_runs_side_by_side_are_refused_together() -> None:
    due = PendingRows("q", "id", pending="done_at is null", done="done_at = now()", parallel=2)
    with pytest.raises(BadSpecError, match=r"exclusion='advisory'.*parallel=2.*leave one of them out"):
        JobSpec("a", due, exclusion="advisory")


def test_an_h_is_made_from_the_name() -> None:
    one, same, other = (JobSpec(name, DUE, Schedule("H 6 * * *")).schedule for name in ("a", "a", "b"))
    assert one == same
    assert one != other
    assert one is not None
    assert not one.uses_hash


def test_bounds_are_checked_against_the_schedule() -> None:
    with pytest.raises(BadSpecError, match=r"job 'a'.*timeout=20m.*interval of 10m"):
        JobSpec("a", DUE, Schedule("*/10 * * * *"), Bounds(timeout="20m"))
    assert JobSpec("a", DUE, Schedule("*/10 * * * *")).limits.timeout == timedelta(minutes=8)
    assert JobSpec("a", DUE, bounds=Bounds(timeout="20m")).limits.timeout == timedelta(minutes=20)


def spec(**given: Any) -> JobSpec:
    fields: dict[str, Any] = {"name": "a", "due": DUE, "schedule": Schedule("0 6 * * *", "Europe/Berlin")}
    return JobSpec(**(fields | given))


def test_the_hash_changes_with_whatever_changes_the_job() -> None:
    others = [
        spec(due=NewRows("flights", "id", where="id > 7")),
        spec(due=NewRows("flights", "key")),
        spec(due=EachInterval("@daily")),
        spec(due=Elapsed()),
        spec(due=Elapsed("1h")),
        spec(due=Elapsed("2h")),
        spec(due=Elapsed(settle="7m")),
        spec(due=Elapsed(start="2013-01-01")),
        spec(schedule=None),
        spec(schedule=Schedule("0 7 * * *", "Europe/Berlin")),
        spec(schedule=Schedule("0 6 * * *", "Europe/Paris")),
        spec(schedule=Schedule("0 6 * * *", "Europe/Berlin", missing_hour="skip")),
        spec(bounds=Bounds(batch_rows=7)),
        spec(bounds=Bounds(timeout="7m")),
        spec(alerts=Alerts(grace="7m")),
        spec(alerts=Alerts(failures=7)),
    ]
    assert len({each.hash for each in [spec(), *others]}) == len(others) + 1
    assert spec().hash == spec().hash
    assert spec(bounds=Bounds(timeout="1h")).hash == spec().hash  # said, or left out: the same job


def test_the_hash_is_the_same_in_every_process() -> None:
    code = (
        "from gaffer_dagster.domain.due import NewRows; from gaffer_dagster.domain.schedule import Schedule;"
        "from gaffer_dagster.domain.spec import JobSpec;"
        "print(JobSpec('a', NewRows('flights', 'id'), Schedule('0 6 * * *', 'Europe/Berlin')).hash)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONHASHSEED": "7"}, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == spec().hash, done.stderr


def test_the_whole_spec_is_plain_json() -> None:
    days = EachInterval("@daily", start="2013-01-01", until="2014-01-01")
    hours = Elapsed("1h", settle="5m", start=datetime(2013, 1, 1, tzinfo=timezone.utc))
    for each in (spec(), spec(due=days), spec(due=hours), spec(due=Elapsed()), spec(schedule=None)):
        assert json.loads(json.dumps(each.as_json())) == each.as_json()


def test_elapsed_goes_by_the_jobs_own_ticks_and_needs_them() -> None:
    one = spec(due=Elapsed(), schedule=Schedule("H H * * *", "Europe/Berlin"))
    assert one.intervals.grid == one.schedule
    assert not one.intervals.grid.uses_hash
    with pytest.raises(BadSpecError, match=r"job 'a': Elapsed needs a schedule"):
        spec(due=Elapsed("1h"), schedule=None)


@pytest.mark.parametrize("failures", [0, -1, 1.0, True, "3"])
def test_alerts_that_cannot_be_meant_are_refused(failures: Any) -> None:
    with pytest.raises(BadSpecError, match="alerts: failures"):
        Alerts(failures=failures)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"due": object()}, "due"),
        ({"due": None}, "due"),
        ({"due": "flights"}, "due"),
        ({"bounds": None}, "bounds"),
        ({"bounds": 5}, "bounds"),
        ({"schedule": 1}, "schedule"),
        ({"schedule": "0 6 * * *"}, "schedule"),
        ({"alerts": 1}, "alerts"),
        ({"alerts": None}, "alerts"),
    ],
)
def test_a_field_of_another_type_is_refused_by_its_name(given: dict[str, Any], named: str) -> None:
    with pytest.raises(BadSpecError, match=named) as raised:
        spec(**given)
    assert "'a'" in str(raised.value)


def test_an_h_of_the_intervals_is_made_from_the_jobs_name() -> None:
    """Else each process would cut time its own way, and every watermark would be off the grid."""
    at = datetime(2027, 3, 1, tzinfo=timezone.utc)
    one, same, other = (spec(name=name, due=EachInterval("H H * * *")) for name in ("a", "a", "b"))
    assert one.intervals.grid == same.intervals.grid
    assert one.intervals.grid.next(at) == same.intervals.grid.next(at) != other.intervals.grid.next(at)
    assert not one.intervals.grid.uses_hash
    assert one.hash == same.hash
    code = (
        "from datetime import datetime, timezone; from gaffer_dagster.domain.due import EachInterval;"
        "from gaffer_dagster.domain.schedule import Schedule; from gaffer_dagster.domain.spec import JobSpec;"
        "spec = JobSpec('a', EachInterval('H H * * *'), Schedule('0 6 * * *', 'Europe/Berlin'));"
        "print(spec.intervals.grid.next(datetime(2027, 3, 1, tzinfo=timezone.utc)), spec.hash)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONHASHSEED": "7"}, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == f"{one.intervals.grid.next(at)} {one.hash}", done.stderr
