"""The pass of the watch in Dagster's sensor: who looks, what is heard of it, and that nothing silences the rest."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import dagster as dg
import pytest
from dagster._core.definitions.run_request import InstigatorType
from dagster._core.scheduler.instigation import InstigatorTick, TickStatus

import gaffer_dagster as gd
from gaffer_dagster.adapter import learnt, sensors
from gaffer_dagster.testing import Clock, scratch_database
from tests.dagster.moved import MINUTE, Location, at, location
from tests.support import jobs
from tests.support.receivers import HttpReceiver

NOON = at("2027-01-01T12:00Z")
EVERY = timedelta(seconds=31)  # the sensor is evaluated not more often than each 30 s
NOBODY = "postgresql://somebody:canary@127.0.0.1:1/nowhere"


@pytest.fixture(autouse=True)
def _nobody_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GAFFER_HEARTBEAT_URL", raising=False)


def make(name: str, **options: Any) -> dg.AssetsDefinition:
    options.setdefault("schedule", gd.Schedule("0 * * * *"))
    due, alerts = gd.NewRows(f"source_{name}", "id"), gd.Alerts(grace="5m")
    return gd.gaffer_asset(name=name, due=due, alerts=alerts, **options)(jobs.copy_rows)


def defined(url: str, *assets: dg.AssetsDefinition) -> dg.Definitions:
    return gd.build_definitions(*assets, resource=gd.GafferResource(dsn=url))


def incidents(url: str) -> list[tuple[Any, ...]]:
    return jobs.query(url, "select job, watch, kind from gaffer.alert where resolved_at is null order by id")


def newest(daemons: Location) -> InstigatorTick:
    return daemons.ticks(InstigatorType.SENSOR)[0]


def said(daemons: Location) -> str:
    tick = newest(daemons)
    assert tick.status is TickStatus.SKIPPED, tick.error
    return str(tick.skip_reason)


def overdue(daemons: Location) -> None:
    """The jobs are known, and those of each hour are just overdue. Somebody looked all the time."""
    for minutes in range(-1, 6):
        daemons.watch(NOON + minutes * MINUTE)


# ── who looks ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_code_location_looks_under_its_own_name_and_says_when_it_did(
    url: str, clock: Clock, instance: dg.DagsterInstance
) -> None:
    with location(instance, clock, defined(url, make("a"), make("b"))) as daemons:
        for minutes in (0, 1, 2):
            daemons.watch(NOON + minutes * MINUTE)
            daemons.restarted()
        row = "select name, every, jobs, passes::int, last_pass_at >= %s from gaffer.watch"
        every = timedelta(seconds=30)
        assert jobs.query(url, row, NOON + 2 * MINUTE) == [(f"dagster:{daemons.name}", every, ["a", "b"], 3, True)]


def test_a_watch_that_stopped_is_told_by_the_other_and_its_jobs_have_not_vanished(
    url: str, clock: Clock, instance: dg.DagsterInstance
) -> None:
    with location(instance, clock, defined(url, make("a", schedule=None))) as first:
        first.watch(NOON)
        silent = f"dagster:{first.name}"
    with location(instance, clock, defined(url, make("b", schedule=None))) as second:
        second.watch(NOON + MINUTE)
        assert said(second) == "1 job, nothing is wrong"
        second.watch(NOON + 4 * MINUTE)
        second.watch(NOON + 6 * MINUTE)
        assert incidents(url) == [(None, silent, "watch")]
        assert said(second) == f"1 job: 1 silent ({silent}); 1 message sent"


def test_a_job_that_is_taken_out_of_its_code_location_has_vanished(
    url: str, clock: Clock, instance: dg.DagsterInstance
) -> None:
    both = ("a", "b")
    turns = {0: both, 1: ("a",), 2: both, 3: ("a",), 4: both, 5: ("a",), 7: ("a",), 8: both}
    for minutes, found in turns.items():
        assets = [make(name, schedule=None) for name in found]
        with location(instance, clock, defined(url, *assets), name="location_kept") as daemons:
            daemons.watch(NOON + minutes * MINUTE)
            assert incidents(url) == ([("b", None, "vanished")] if minutes == 7 else [])


@pytest.mark.parametrize(
    ("location_name", "repository", "name"),
    [
        ("place", "__repository__", "dagster:place"),
        ("place", "own", "dagster:place/own"),
        (None, "own", "dagster:own"),
    ],
)
def test_each_repository_has_a_watch_of_its_own(location_name: str | None, repository: str, name: str) -> None:
    assert sensors._name(location_name, repository) == name


# ── what silences nothing ────────────────────────────────────────────────────────────────────────────────────────


def test_a_database_that_is_away_is_heard_and_the_others_are_watched(
    url: str, clock: Clock, instance: dg.DagsterInstance
) -> None:
    resources = {"crm": gd.GafferResource(dsn=NOBODY), "gaffer": gd.GafferResource(dsn=url)}
    definitions = gd.build_definitions(make("late"), make("away", database="crm"), resources=resources)
    with location(instance, clock, definitions) as daemons:
        overdue(daemons)
        assert incidents(url) == [("late", None, "absence")]
        assert said(daemons).startswith("2 jobs: 1 overdue (late); 1 message sent; DatabaseUnavailableError: ")
        daemons.watch(NOON + 6 * MINUTE)
        assert newest(daemons).status is TickStatus.FAILURE
        assert "cannot be reached at somebody@127.0.0.1:1/nowhere" in str(newest(daemons).error)
        assert "canary" not in str(newest(daemons).error)


def test_each_database_has_its_own_pass(url: str, clock: Clock, server_url: str, instance: dg.DagsterInstance) -> None:
    with scratch_database(server_url) as other:
        moved = Clock(other)
        resources = {"crm": gd.GafferResource(dsn=other), "gaffer": gd.GafferResource(dsn=url)}
        definitions = gd.build_definitions(make("one"), make("two", database="crm"), resources=resources)
        with location(instance, clock, definitions) as daemons:
            for minutes in range(-1, 6):
                moved.set(NOON + minutes * MINUTE)
                daemons.watch(NOON + minutes * MINUTE)
            assert said(daemons) == "2 jobs: 2 overdue (one, two); 2 messages sent"
            assert incidents(url) == [("one", None, "absence")]
            assert incidents(other) == [("two", None, "absence")]


def test_dagsters_own_storage_that_fails_is_heard_and_the_pass_is_made(
    url: str, clock: Clock, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: Any) -> None:
        raise OSError("the test wants it")

    monkeypatch.setattr(learnt, "_page_through", away)
    with location(instance, clock, defined(url, make("late"))) as daemons:
        overdue(daemons)
        assert incidents(url) == [("late", None, "absence")]
        assert "the test wants it" in said(daemons)


def test_a_receiver_that_fails_fails_no_tick(
    url: str, clock: Clock, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    with HttpReceiver() as server:
        monkeypatch.setenv("GAFFER_RECEIVER_GOOD", f"{server.url}/hook")
        monkeypatch.setenv("GAFFER_RECEIVER_GOOD_PRIVATE", "1")
        monkeypatch.setenv("GAFFER_RECEIVER_DEAD", "https://canary@127.0.0.1:1/hook")
        monkeypatch.setenv("GAFFER_RECEIVER_DEAD_PRIVATE", "1")
        with location(instance, clock, defined(url, make("late"))) as daemons:
            overdue(daemons)
            assert said(daemons).startswith(
                "1 job: 1 overdue (late); 2 messages sent; receiver dead has taken no message"
            )
            assert "canary" not in said(daemons)
            (message,) = server.messages
            assert (message["job"], message["kind"], message["event"]) == ("late", "absence", "opened")
            daemons.watch(NOON + 6 * MINUTE)
            assert len(server.messages) == 1


def test_what_there_was_no_time_for_is_sent_by_the_next_tick(
    url: str, clock: Clock, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    with location(instance, clock, defined(url, make("late"))) as daemons, monkeypatch.context() as patch:
        patch.setattr(sensors, "_BUDGET", timedelta())
        overdue(daemons)
        assert said(daemons) == "1 job: 1 overdue (late)"
        patch.undo()
        daemons.watch(NOON + 6 * MINUTE)
        assert said(daemons) == "1 job: 1 overdue (late); 1 message sent"


def test_the_watchs_own_sign_of_life_needs_every_database(
    url: str, clock: Clock, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    with HttpReceiver() as server:
        monkeypatch.setenv("GAFFER_HEARTBEAT_URL", f"{server.url}/alive")
        monkeypatch.setenv("GAFFER_HEARTBEAT_URL_PRIVATE", "1")
        resources = {"crm": gd.GafferResource(dsn=NOBODY), "gaffer": gd.GafferResource(dsn=url)}
        broken = gd.build_definitions(make("a"), make("away", database="crm"), resources=resources)
        with location(instance, clock, broken) as daemons:
            daemons.watch(NOON)
            assert server.paths == []
        with location(instance, clock, defined(url, make("a"))) as daemons:
            for number in (1, 2):
                daemons.watch(NOON + number * MINUTE)
            assert server.paths == ["/alive", "/alive"]


# ── what it says ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_of_many_jobs_it_names_a_few(url: str, clock: Clock, instance: dg.DagsterInstance) -> None:
    found = [make(f"job_{number:02}") for number in range(12)]
    with location(instance, clock, defined(url, *found)) as daemons:
        overdue(daemons)
        assert said(daemons).startswith("12 jobs: 12 overdue (job_00, job_01, job_02 and 9 more); ")


def test_a_tick_that_asks_for_runs_logs_what_it_found(
    url: str, clock: Clock, instance: dg.DagsterInstance, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs.make_source(url, 1, table="source_late")
    with location(instance, clock, defined(url, make("late"))) as daemons:
        daemons.watch(NOON)
        jobs.execute(url, "update gaffer.job set follow_up_at = gaffer.clock()")
        capsys.readouterr()
        daemons.watch(NOON + MINUTE)
        assert newest(daemons).status is TickStatus.SUCCESS
        assert "1 job, nothing is wrong" in capsys.readouterr().err
        assert len(daemons.runs("late")) == 1
