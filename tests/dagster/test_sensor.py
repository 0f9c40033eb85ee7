"""The sensor, evaluated by Dagster's real sensor daemon: it makes jobs known, and asks for runs that no tick will ask
for soon. The ticks of these jobs are a year apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import dagster as dg
import pytest
from dagster._core.definitions.run_request import InstigatorType
from dagster._core.scheduler.instigation import TickStatus

import gaffer_dagster as gd
from gaffer_dagster.store import operations
from gaffer_dagster.testing import Clock
from tests.dagster.moved import AWAKE, MINUTE, Location, at, instance_in, location
from tests.support import jobs, protocol

NEW_YEAR = at("2027-01-01T00:00Z")
EVERY = timedelta(seconds=31)  # the sensor is evaluated not more often than each 30 s
NOBODY = "postgresql://somebody:canary@127.0.0.1:1/nowhere"
OPERATOR = operations.Operator("tester", "the test wants it")


@pytest.fixture(scope="module")
def queueing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dg.DagsterInstance]:
    """Runs wait in a queue until a test lets them out."""
    with instance_in(tmp_path_factory.mktemp("home"), queued=True) as made:
        yield made


def make(name: str, work: Callable[[gd.Batch], Any] = jobs.copy_rows, **options: Any) -> dg.AssetsDefinition:
    options.setdefault("schedule", gd.Schedule("@yearly"))
    options.setdefault("due", gd.NewRows("source", "id"))
    return gd.gaffer_asset(name=name, bounds=gd.Bounds(batch_rows=5, batches=2, timeout="10m"), **options)(work)


def defined(url: str, *assets: dg.AssetsDefinition) -> dg.Definitions:
    return gd.build_definitions(*assets, resource=gd.GafferResource(dsn=url))


def ended(url: str, job: str = "copied") -> list[tuple[Any, ...]]:
    return jobs.query(url, "select trigger, outcome, items from gaffer.job_runs where job = %s order by id", job)


def error_of(daemons: Location) -> str:
    """What the newest tick of the sensor failed with; empty if it did not."""
    tick = daemons.ticks(InstigatorType.SENSOR)[0]
    return str(tick.error) if tick.status is TickStatus.FAILURE else ""


def said_by(daemons: Location) -> str:
    """What the newest tick of the sensor, which asked for no run, says."""
    tick = daemons.ticks(InstigatorType.SENSOR)[0]
    return str(tick.error) if tick.status is TickStatus.FAILURE else str(tick.skip_reason)


def test_jobs_are_known_before_their_first_run_and_anew_when_they_change(
    url: str, clock: Clock, instance: dg.DagsterInstance
) -> None:
    known = "select name, spec_hash, xmin::text from gaffer.job order by name"
    with location(instance, clock, defined(url, make("a"), make("b", due=gd.NewRows("other", "id")))) as daemons:
        daemons.watch(NEW_YEAR)
        before = jobs.query(url, known)
        assert [row[0] for row in before] == ["a", "b"]
        daemons.watch(NEW_YEAR + EVERY)
        assert jobs.query(url, known) == before  # not written
        assert daemons.errors == []
    changed = make("a", schedule=gd.Schedule("@monthly"))
    with location(instance, clock, defined(url, changed, make("b", due=gd.NewRows("other", "id")))) as daemons:
        daemons.watch(NEW_YEAR + 2 * EVERY)
        after = jobs.query(url, known)
        assert after[0][1] != before[0][1]
        assert after[1] == before[1]
        assert daemons.errors == []
    assert jobs.query(url, "select job, count(*)::int from gaffer.job_spec group by job order by job") == [
        ("a", 2),
        ("b", 1),
    ]
    assert jobs.query(url, "select 1 from gaffer.job_runs") == []


def test_a_table_of_versions_that_is_locked_holds_up_nobody_for_long(
    url: str, clock: Clock, instance: dg.DagsterInstance
) -> None:
    with protocol.session(url) as connection, location(instance, clock, defined(url, make("a"))) as daemons:
        connection.execute("begin; lock table gaffer.migration in access exclusive mode")
        daemons.watch(NEW_YEAR)
        assert "statement timeout" in error_of(daemons)
        connection.execute("rollback")
        daemons.watch(NEW_YEAR + EVERY)
        assert error_of(daemons) == ""


def test_a_renamed_job_is_refused_with_the_cure_and_the_others_go_on(
    url: str, clock: Clock, instance: dg.DagsterInstance
) -> None:
    jobs.make_source(url, 12, table="other")
    other = make("other_job", due=gd.NewRows("other", "id"))
    with location(instance, clock, defined(url, make("old"), other)) as daemons:
        daemons.watch(NEW_YEAR - 2 * EVERY)
    third = make("third", due=gd.NewRows("third", "id"))
    with location(instance, clock, defined(url, make("new"), other, third)) as daemons:
        daemons.watch(NEW_YEAR - EVERY)
        assert "gaffer rename old new" in said_by(daemons)
        daemons.watch(NEW_YEAR)
        assert "gaffer rename old new" in error_of(daemons)
        assert jobs.query(url, "select name from gaffer.job order by name") == [("old",), ("other_job",), ("third",)]
        with protocol.session(url) as connection:  # the other one has something to do
            jobs.execute(url, "update gaffer.job set follow_up_at = gaffer.clock() where name = 'other_job'")
            daemons.watch(NEW_YEAR + EVERY)
            assert ended(url, "other_job") == [("sensor", "capped", 10)]
            operations.rename(connection, "old", "new", OPERATOR)
        daemons.watch(NEW_YEAR + 20 * MINUTE)
        assert error_of(daemons) == ""
        assert jobs.query(url, "select name from gaffer.job order by name") == [("new",), ("other_job",), ("third",)]


def test_a_run_that_was_capped_is_followed_up_until_nothing_is_left(
    url: str, clock: Clock, instance: dg.DagsterInstance
) -> None:
    jobs.make_source(url, 25)
    with location(instance, clock, defined(url, make("copied"))) as daemons:
        daemons.watch(NEW_YEAR - EVERY)
        daemons.evaluate(NEW_YEAR - EVERY)
        daemons.evaluate(NEW_YEAR + AWAKE)
        for number in range(1, 8):
            daemons.watch(NEW_YEAR + number * EVERY)
        assert ended(url) == [("schedule", "capped", 10), ("sensor", "capped", 10), ("sensor", "succeeded", 5)]
        runs = daemons.runs("copied")
        why = "the run before left something to do"
        assert [run.tags.get("gaffer/follow_up") for run in runs] == [None, why, why]
        assert all(run.is_success for run in runs)
        assert daemons.errors == []
    assert jobs.query(url, "select count(*)::int, count(distinct id)::int from target") == [(25, 25)]
    (took,) = jobs.query(url, "select max(started_at) - min(started_at) from gaffer.job_runs")[0]
    assert took < 2 * MINUTE  # and the next tick is a year away


def test_nothing_is_asked_for_twice(url: str, clock: Clock, queueing: dg.DagsterInstance) -> None:
    jobs.make_source(url, 25)
    with location(queueing, clock, defined(url, make("copied"))) as daemons:
        daemons.watch(NEW_YEAR - EVERY)
        daemons.evaluate(NEW_YEAR - EVERY)
        daemons.evaluate(NEW_YEAR + AWAKE)
        daemons.dequeue(NEW_YEAR + 2 * AWAKE)
        assert ended(url) == [("schedule", "capped", 10)]

        def asked_by(when: timedelta) -> int:
            daemons.watch(NEW_YEAR + when)
            return len(daemons.runs("copied")) - 1

        assert asked_by(1 * EVERY) == 1
        assert asked_by(2 * EVERY) == 1
        assert asked_by(25 * MINUTE) == 1  # while it waits, though it would be asked for again by now
        queueing.report_run_canceled(daemons.runs("copied")[1])
        assert asked_by(26 * MINUTE) == 2  # somebody took it away
        queueing.report_run_canceled(daemons.runs("copied")[2])
        assert asked_by(27 * MINUTE) == 2  # the same cause, asked for just now
        assert asked_by(31 * MINUTE) == 3
        daemons.dequeue(NEW_YEAR + 32 * MINUTE)
        assert ended(url)[1:] == [("sensor", "capped", 10)]
        assert asked_by(33 * MINUTE) == 4  # the next cause
        assert daemons.errors == []


def test_a_dead_holder_is_followed_up_when_its_lease_is_over(
    url: str, clock: Clock, instance: dg.DagsterInstance
) -> None:
    jobs.make_source(url, 3)
    with location(instance, clock, defined(url, make("copied"))) as daemons:
        daemons.watch(NEW_YEAR)
        with daemons.it_is(NEW_YEAR), protocol.session(url) as connection:
            protocol.acquire(connection, jobs.spec("copied"), lease=60)
        daemons.watch(NEW_YEAR + EVERY)
        assert daemons.runs("copied") == []
        daemons.watch(NEW_YEAR + 2 * EVERY)
        assert [run.tags["gaffer/follow_up"] for run in daemons.runs("copied")] == ["the run before is dead"]
        assert ended(url) == [("schedule", "abandoned", 0), ("sensor", "succeeded", 3)]
        daemons.watch(NEW_YEAR + 3 * EVERY)
        assert len(daemons.runs("copied")) == 1


def test_a_paused_job_is_not_followed_up(url: str, clock: Clock, instance: dg.DagsterInstance) -> None:
    jobs.make_source(url, 12)
    with location(instance, clock, defined(url, make("copied"))) as daemons:
        daemons.watch(NEW_YEAR - EVERY)
        daemons.evaluate(NEW_YEAR - EVERY)
        daemons.evaluate(NEW_YEAR + AWAKE)
        with protocol.session(url) as connection:
            operations.pause(connection, "copied", None, None, OPERATOR)
            daemons.watch(NEW_YEAR + EVERY)
            assert len(daemons.runs("copied")) == 1
            operations.resume(connection, "copied", None, OPERATOR)
        daemons.watch(NEW_YEAR + 2 * EVERY)
        assert ended(url) == [("schedule", "capped", 10), ("sensor", "succeeded", 2)]


def test_a_database_that_is_away_does_not_silence_another(url: str, clock: Clock, instance: dg.DagsterInstance) -> None:
    jobs.make_source(url, 12)
    resources = {"crm": gd.GafferResource(dsn=NOBODY), "gaffer": gd.GafferResource(dsn=url)}
    definitions = gd.build_definitions(make("copied"), make("away", database="crm"), resources=resources)
    with location(instance, clock, definitions) as daemons:
        daemons.watch(NEW_YEAR - EVERY)
        assert "cannot be reached at somebody@127.0.0.1:1/nowhere" in said_by(daemons)  # and the checks are shown
        assert "canary" not in said_by(daemons)
        daemons.watch(NEW_YEAR)
        failed = error_of(daemons)  # nothing else to say
        assert "cannot be reached at somebody@127.0.0.1:1/nowhere" in failed
        assert "check that it runs" in failed
        assert "canary" not in failed
        jobs.execute(url, "update gaffer.job set follow_up_at = gaffer.clock() where name = 'copied'")
        daemons.watch(NEW_YEAR + EVERY)
        assert ended(url) == [("sensor", "capped", 10)]


@pytest.mark.parametrize(
    ("dsn", "told"),
    [
        (NOBODY, "cannot be reached at somebody@127.0.0.1:1/nowhere"),
        (dg.EnvVar("NOT_SET_ANYWHERE"), "NOT_SET_ANYWHERE is not set"),
        ("the tables are missing", "run: gaffer migrate"),
    ],
)
def test_where_every_database_is_away_the_sensor_fails_with_the_cure(
    url: str, clock: Clock, server_url: str, instance: dg.DagsterInstance, dsn: str, told: str
) -> None:
    if dsn == "the tables are missing":
        dsn = server_url
    with location(instance, clock, defined(dsn, make("copied"))) as daemons:
        daemons.watch(NEW_YEAR)
        assert told in error_of(daemons)
        assert "canary" not in error_of(daemons)
