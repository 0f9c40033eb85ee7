"""Runs that could not write are learnt from Dagster's records, and counted; runs that could not report are reported.

Dagster's real scheduler, sensor and webserver, in moved time; only what launches runs is told to fail.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import dagster as dg
import pytest

import gaffer_dagster as gd
from gaffer_dagster.adapter import learnt as adapter
from gaffer_dagster.adapter.assets import job_of
from gaffer_dagster.engine.watch import Watcher, look
from gaffer_dagster.store import learnt, operations
from gaffer_dagster.store.learnt import Dead
from gaffer_dagster.testing import Clock
from tests.dagster.launchers import SECRET, SteeredLauncher
from tests.dagster.moved import AWAKE, MINUTE, Location, at, location
from tests.support import jobs, protocol, variants

NOON = at("2027-01-01T12:00Z")
EVERY = timedelta(seconds=31)  # the sensor is evaluated not more often than each 30 s
TIMEOUT = timedelta(minutes=10)
BACKSTOP = timedelta(minutes=5)


def make(name: str = "copied", **options: Any) -> dg.AssetsDefinition:
    options.setdefault("schedule", gd.Schedule("@yearly"))
    options.setdefault("bounds", gd.Bounds(timeout=TIMEOUT))
    return gd.gaffer_asset(name=name, due=gd.NewRows(f"source_{name}", "id"), **options)(jobs.copy_rows)


def each_minute(name: str = "copied", **options: Any) -> dg.AssetsDefinition:
    return make(name, schedule=gd.Schedule("* * * * *"), bounds=gd.Bounds(timeout="45s"), **options)


def defined(url: str, *assets: dg.AssetsDefinition) -> dg.Definitions:
    return gd.build_definitions(*assets, resource=gd.GafferResource(dsn=url))


def rows(url: str, job: str = "copied") -> list[tuple[Any, ...]]:
    return jobs.query(url, "select outcome, owner, trigger, tick from gaffer.job_runs where job = %s order by id", job)


def streak(url: str, job: str = "copied") -> int:
    return jobs.query(url, "select consecutive_failures from gaffer.job where name = %s", job)[0][0]


def incidents(url: str) -> list[tuple[Any, ...]]:
    return jobs.query(url, "select kind, since_at from gaffer.alert where resolved_at is null order by id")


def watched(daemons: Location, since: datetime, until: datetime, every: timedelta = 4 * MINUTE) -> None:
    """The sensor looks, often enough that there is no gap, the last time at `until`."""
    while since < until:
        daemons.watch(since)
        since += every
    daemons.watch(until)


# ── launches that failed, workers that were killed ───────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("does", "told"), [("raise", "KeyError"), ("die", "was terminated by signal 9")])
def test_three_runs_that_wrote_nothing_are_three_failures(
    url: str, clock: Clock, instance: dg.DagsterInstance, does: str, told: str
) -> None:
    jobs.make_source(url, 3, table="source_copied")
    with location(instance, clock, defined(url, each_minute())) as daemons:
        daemons.watch(NOON)
        daemons.evaluate(NOON + EVERY)  # the schedule is switched on
        SteeredLauncher.does = does
        for number in (1, 2, 3):
            daemons.evaluate(NOON + number * MINUTE + AWAKE)
            daemons.watch(NOON + number * MINUTE + EVERY)
            assert streak(url) == number
        assert rows(url) == [("failed", "dagster", "schedule", NOON + number * MINUTE) for number in (1, 2, 3)]
        ((kind, since),) = incidents(url)
        assert kind == "failures"
        assert NOON + 3 * MINUTE < since < NOON + 3 * MINUTE + timedelta(seconds=20)
        for (error,) in jobs.query(url, "select error from gaffer.job_runs"):
            assert "FAILURE" in error
            assert told in error
            assert SECRET not in error
            assert len(error.splitlines()) == 1
        SteeredLauncher.does = "run"
        daemons.evaluate(NOON + 4 * MINUTE + AWAKE)
        daemons.watch(NOON + 4 * MINUTE + EVERY)
        assert streak(url) == 0
        assert incidents(url) == []
        daemons.watch(NOON + 5 * MINUTE + EVERY)
        assert len(rows(url)) == 4  # nothing is learnt again


@pytest.mark.parametrize("does", ["hang", "wait"])
def test_a_run_that_says_nothing_for_longer_than_its_job_may_take_is_a_failure_from_then_on(
    url: str, clock: Clock, instance: dg.DagsterInstance, does: str
) -> None:
    with location(instance, clock, defined(url, make())) as daemons:
        daemons.watch(NOON)
        SteeredLauncher.does = does
        daemons.launch(NOON + MINUTE, "copied_job")
        over = NOON + MINUTE + TIMEOUT + BACKSTOP
        watched(daemons, NOON + 2 * MINUTE, over - MINUTE)
        assert rows(url) == []
        daemons.watch(over + MINUTE)
        (learnt_at,) = jobs.query(url, "select ended_at from gaffer.job_runs")[0]
        assert timedelta() <= learnt_at - over < timedelta(seconds=20)
        assert streak(url) == 1
        watched(daemons, over + 2 * MINUTE, over + 60 * MINUTE)
        assert len(rows(url)) == 1


def test_a_run_that_is_at_work_or_was_found_dead_here_is_not_learnt(
    url: str, clock: Clock, instance: dg.DagsterInstance
) -> None:
    with location(instance, clock, defined(url, make())) as daemons:
        daemons.watch(NOON)
        SteeredLauncher.does = "hang"
        run = daemons.launch(NOON + MINUTE, "copied_job")
        with daemons.it_is(NOON + MINUTE), protocol.session(url) as connection:
            protocol.acquire(connection, job_of(make()).spec, lease=60)
            jobs.execute(url, "update gaffer.job_runs set dagster_run_id = %s", run)
        SteeredLauncher.does = "raise"  # whoever is to take over
        watched(daemons, NOON + 90 * timedelta(seconds=1), NOON + 30 * MINUTE)
        assert ("running", "dagster") not in [row[:2] for row in rows(url)]
        assert jobs.query(url, "select count(*) from gaffer.job_runs where dagster_run_id = %s", run) == [(1,)]


def test_a_run_that_was_canceled_is_not_learnt(url: str, clock: Clock, instance: dg.DagsterInstance) -> None:
    with location(instance, clock, defined(url, make())) as daemons:
        daemons.watch(NOON)
        SteeredLauncher.does = "hang"
        run = instance.get_run_by_id(daemons.launch(NOON + MINUTE, "copied_job"))
        assert run is not None
        with daemons.it_is(NOON + 2 * MINUTE):
            instance.report_run_canceled(run)
        watched(daemons, NOON + 3 * MINUTE, NOON + 30 * MINUTE)
        assert rows(url) == []


# ── whose run it was ─────────────────────────────────────────────────────────────────────────────────────────────


def test_runs_without_a_tag_of_ours_are_known_by_their_assets(
    url: str, clock: Clock, instance: dg.DagsterInstance
) -> None:
    one, two = make("one"), make("sub", key_prefix="pre")
    theirs = dg.define_asset_job("theirs", selection=[one, two])
    with location(
        instance, clock, dg.Definitions.merge(defined(url, one, two), dg.Definitions(jobs=[theirs]))
    ) as daemons:
        daemons.watch(NOON)
        SteeredLauncher.does = "raise"
        materialized = daemons.launch(NOON + MINUTE, "__ASSET_JOB", ["pre/sub"])
        both = daemons.launch(NOON + 2 * MINUTE, "theirs")
        run = instance.get_run_by_id(both)
        assert run is not None
        assert run.asset_selection is None
        assert "gaffer/job" not in run.tags
        daemons.watch(NOON + 3 * MINUTE)
        told = "select job, dagster_run_id, trigger from gaffer.job_runs order by job, id"
        assert jobs.query(url, told) == [
            ("one", both, "manual"),
            ("pre/sub", materialized, "manual"),
            ("pre/sub", both, "manual"),
        ]


def test_among_several_assets_a_run_that_is_started_is_given_time(
    url: str, clock: Clock, instance: dg.DagsterInstance
) -> None:
    one, two = make("one"), make("two")
    theirs = dg.define_asset_job("theirs", selection=[one, two])
    with location(
        instance, clock, dg.Definitions.merge(defined(url, one, two), dg.Definitions(jobs=[theirs]))
    ) as daemons:
        daemons.watch(NOON)
        SteeredLauncher.does = "hang"
        run = instance.get_run_by_id(daemons.launch(NOON + MINUTE, "theirs"))
        assert run is not None
        watched(daemons, NOON + 2 * MINUTE, NOON + 40 * MINUTE)
        assert rows(url, "one") + rows(url, "two") == []
        with daemons.it_is(NOON + 41 * MINUTE):
            instance.report_run_failed(run)
        daemons.watch(NOON + 42 * MINUTE)
        assert [row[0] for row in rows(url, "one") + rows(url, "two")] == ["failed", "failed"]


def test_a_job_of_the_same_name_in_another_code_location_is_another_job(
    url: str, clock: Clock, instance: dg.DagsterInstance
) -> None:
    with location(instance, clock, defined(url, make())) as daemons:
        daemons.watch(NOON)
        with location(instance, clock, defined("postgresql://nobody@127.0.0.1:1/nowhere", make())) as others:
            SteeredLauncher.does = "raise"
            others.launch(NOON + MINUTE, "copied_job")
        daemons.watch(NOON + 2 * MINUTE)
        assert rows(url) == []
        daemons.launch(NOON + 3 * MINUTE, "copied_job")
        daemons.watch(NOON + 4 * MINUTE)
        assert len(rows(url)) == 1


def test_what_was_before_the_watch_is_not_asked_for(url: str, clock: Clock, instance: dg.DagsterInstance) -> None:
    with location(instance, clock, defined(url, make())) as daemons:
        SteeredLauncher.does = "raise"
        daemons.launch(NOON - MINUTE, "copied_job")
        watched(daemons, NOON, NOON + 8 * MINUTE)
        assert rows(url) == []


# ── what is counted ──────────────────────────────────────────────────────────────────────────────────────────────


def test_a_failure_that_is_learnt_after_a_later_success_does_not_count(
    url: str, clock: Clock, instance: dg.DagsterInstance
) -> None:
    jobs.make_source(url, 3, table="source_copied")
    with location(instance, clock, defined(url, make())) as daemons:
        daemons.watch(NOON)
        SteeredLauncher.does = "raise"
        for number in (1, 2, 3):
            daemons.launch(NOON + number * timedelta(seconds=30), "copied_job")
        SteeredLauncher.does = "run"
        daemons.launch(NOON + 2 * MINUTE, "copied_job")
        daemons.watch(NOON + 3 * MINUTE)
        assert [row[0] for row in rows(url)] == ["succeeded", "failed", "failed", "failed"]
        assert streak(url) == 0
        assert incidents(url) == []


def test_a_failure_while_nobody_looked_is_recorded_and_not_counted(
    url: str, clock: Clock, instance: dg.DagsterInstance
) -> None:
    with location(instance, clock, defined(url, make())) as daemons:
        daemons.watch(NOON)
        SteeredLauncher.does = "raise"
        daemons.launch(NOON + 10 * MINUTE, "copied_job")
        daemons.watch(NOON + 20 * MINUTE)  # the database was away meanwhile
        assert len(rows(url)) == 1
        assert streak(url) == 0
        daemons.launch(NOON + 21 * MINUTE, "copied_job")
        daemons.watch(NOON + 22 * MINUTE)
        assert streak(url) == 1


def dead(run: str, ended_at: datetime, tick: datetime | None = None, job: str = "copied") -> Dead:
    return Dead(job, run, "schedule", tick, ended_at, ended_at, job_of(make()).spec.hash, "it is dead")


@pytest.fixture
def ready(url: str, clock: Clock) -> str:
    """The job is known, and somebody looks."""
    clock.set(NOON - MINUTE)
    with protocol.session(url) as connection:
        protocol.register(connection, job_of(make()).spec)
        assert look(connection, Watcher("test"))
    clock.set(NOON)
    return url


def learn(url: str, *runs: Dead) -> list[str | None]:
    with protocol.session(url) as connection:
        return [learnt.learn(connection, run) for run in runs]


def test_a_failure_in_a_gap_that_was_noted_before_is_not_counted(ready: str, clock: Clock) -> None:
    clock.set(NOON + 20 * MINUTE)
    with protocol.session(ready) as connection:
        look(connection, Watcher("test", 30 * timedelta(seconds=1)))
    within, after = dead("within", NOON + 19 * MINUTE), dead("after", NOON + 21 * MINUTE)
    clock.set(NOON + 22 * MINUTE)
    assert learn(ready, within, after) == ["recorded", "counted"]


def test_a_failure_of_a_run_that_began_in_a_pause_is_not_counted(ready: str, clock: Clock) -> None:
    with protocol.session(ready) as connection:
        operations.pause(connection, "copied", None, None, operations.Operator("tester", "the test wants it"))
    clock.set(NOON + 2 * MINUTE)
    assert learn(ready, dead("a", NOON - 2 * MINUTE), dead("b", NOON + MINUTE)) == [None, "recorded"]


def test_a_tick_counts_once_in_whatever_order_it_is_learnt(ready: str, clock: Clock) -> None:
    ticks = [NOON + number * MINUTE for number in range(4)]
    clock.set(NOON + 3 * MINUTE)
    first, second = dead("1", NOON + 10 * timedelta(seconds=1), ticks[0]), dead("2", NOON + 2 * MINUTE, ticks[2])
    again, between = dead("3", NOON + 2.5 * MINUTE, ticks[0]), dead("4", NOON + MINUTE, ticks[1])
    assert learn(ready, first, second, again, between) == ["counted", "counted", "recorded", "counted"]
    assert learn(ready, dead("5", NOON + 3 * MINUTE, ticks[2])) == ["recorded"]
    ((count, failed_at),) = jobs.query(ready, "select consecutive_failures, failed_at from gaffer.job")
    assert count == 3
    assert failed_at == sorted([first.ended_at, second.ended_at, between.ended_at])


def test_an_unknown_job_is_passed_over(ready: str) -> None:
    assert learn(ready, dead("1", NOON, job="unheard_of")) == [None]


SLOW = {"    insert into gaffer.job_runs": "    perform pg_sleep(0.5);\n    insert into gaffer.job_runs"}
BROKEN = {"where name = p_job for no key update;": "where name = p_job;"}


@pytest.mark.parametrize(("replaced", "learnt_once"), [(SLOW, True), ({**SLOW, **BROKEN}, False)])
def test_two_watches_at_once_learn_once_and_without_the_lock_they_do_not(
    ready: str, replaced: dict[str, str], learnt_once: bool
) -> None:
    variants.replace(ready, "learn_run", replaced)
    answers = protocol.all_at_once(2, lambda _: learn(ready, dead("1", NOON))[0])
    assert (sorted(map(str, answers)) == ["None", "counted"]) is learnt_once
    assert (streak(ready) == 1) is learnt_once


GUARDS = {
    "a success": (
        "v_ended_at <= greatest(v_job.last_success_at, v_job.capped_at[cardinality(v_job.capped_at)])",
        "false",
    ),
    "a gap": ("(v_last_pass <= v_ended_at and v_last_pass < v_now - c_outage)", "false"),
}


@pytest.mark.parametrize("guard", GUARDS)
def test_a_rule_that_forgets_a_guard_is_caught(ready: str, clock: Clock, guard: str) -> None:
    def counts() -> list[str | None]:
        jobs.execute(ready, "update gaffer.job set last_success_at = null")
        clock.set(NOON + 20 * MINUTE)
        if guard == "a success":
            with protocol.session(ready) as connection:
                look(connection, Watcher("test"))
            clock.set(NOON + 22 * MINUTE)
            jobs.execute(ready, "update gaffer.job set last_success_at = %s", NOON + 22 * MINUTE)
        return learn(ready, dead(str(len(rows(ready))), NOON + (21 if guard == "a success" else 19) * MINUTE))

    assert counts() == ["recorded"]
    old, new = GUARDS[guard]
    variants.replace(ready, "learn_run", {old: new})
    assert counts() == ["counted"]


# ── many ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_more_than_are_looked_at_in_one_go_are_learnt_in_the_next(
    url: str, clock: Clock, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter, "_PAGE", 3)
    monkeypatch.setattr(adapter, "_PAGES", 2)
    with location(instance, clock, defined(url, make())) as daemons:
        daemons.watch(NOON)
        SteeredLauncher.does = "raise"
        for number in range(12):
            daemons.launch(NOON + MINUTE + number * timedelta(seconds=1), "copied_job")
        counts: list[int] = []
        for number in range(2, 12):  # runs of other tests are between
            daemons.watch(NOON + number * MINUTE)
            counts.append(len(rows(url)))
        assert counts[0] < 12
        assert counts[-1] == 12
        assert counts == sorted(counts)
        order = jobs.query(url, "select ended_at from gaffer.job_runs order by id")
        assert order == sorted(order)


def test_dagster_is_asked_as_often_for_many_jobs_as_for_one(
    url: str, clock: Clock, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dg.RunsFilter] = []
    ask = dg.DagsterInstance.get_run_records

    def counted(self: dg.DagsterInstance, filters: dg.RunsFilter, *args: Any, **kwargs: Any) -> Any:
        asked.append(filters)
        return ask(self, filters, *args, **kwargs)

    counts: list[int] = []
    for many in (1, 20):
        found = [job_of(make(f"job_{number}")) for number in range(many)]
        clock.set(NOON)
        with protocol.session(url) as connection, monkeypatch.context() as patch:
            look(connection, Watcher(f"watch {many}"))
            patch.setattr(dg.DagsterInstance, "get_run_records", counted)
            asked.clear()
            adapter.learn(instance, connection, found, f"watch {many}", "nowhere")
            counts.append(len(asked))
    assert counts == [2, 2]


# ── runs that could not report ───────────────────────────────────────────────────────────────────────────────────


def materializations(instance: dg.DagsterInstance, since: datetime, asset: str = "copied") -> list[Any]:
    found = instance.fetch_materializations(
        dg.AssetRecordsFilter(dg.AssetKey(asset), after_timestamp=since.timestamp()), limit=10
    )
    return [record.asset_materialization for record in found.records]


def test_a_run_that_died_before_its_report_is_reported_once(
    url: str, clock: Clock, instance: dg.DagsterInstance
) -> None:
    name = "died_late"
    jobs.make_source(url, 3, table=f"source_{name}")
    with location(instance, clock, defined(url, make(name))) as daemons:
        daemons.watch(NOON)
        SteeredLauncher.does = "hang"
        for number, has_work in ((1, True), (2, False)):
            run = instance.get_run_by_id(daemons.launch(NOON + number * MINUTE, f"{name}_job"))
            assert run is not None
            with daemons.it_is(NOON + number * MINUTE):
                spec = job_of(make(name)).spec
                record = jobs.run(spec, url, dagster_run_id=run.run_id)
                assert (record.outcome.value, record.batches) == ("succeeded", int(has_work))
                instance.report_run_failed(run)
        watched(daemons, NOON + 3 * MINUTE, NOON + 20 * MINUTE)
        (event,) = materializations(instance, NOON, name)
        assert event.metadata["gaffer/items"].value == 3
        assert [row[0] for row in rows(url, name)] == ["succeeded", "succeeded"]
        assert streak(url, name) == 0
        told = "select reported_at is not null from gaffer.job_runs order by id"
        assert jobs.query(url, told) == [(True,), (False,)]


def test_a_run_that_reported_and_failed_of_something_else_is_not_reported_again(
    url: str, clock: Clock, instance: dg.DagsterInstance
) -> None:
    name = "beside"
    jobs.make_source(url, 3, table=f"source_{name}")
    asset = make(name)

    @dg.asset(deps=[asset])
    def falling() -> None:
        raise ValueError("the test wants it")

    theirs = dg.define_asset_job("theirs", selection=[asset, falling], executor_def=dg.in_process_executor)
    ours = defined(url, asset)
    with location(
        instance, clock, dg.Definitions.merge(ours, dg.Definitions(assets=[falling], jobs=[theirs]))
    ) as daemons:
        daemons.watch(NOON)
        run = instance.get_run_by_id(daemons.launch(NOON + MINUTE, "theirs"))
        assert run is not None
        assert run.status is dg.DagsterRunStatus.FAILURE
        watched(daemons, NOON + 2 * MINUTE, NOON + 10 * MINUTE)
        assert len(materializations(instance, NOON, name)) == 1
        assert [row[0] for row in rows(url, name)] == ["succeeded"]


def test_of_two_who_would_report_a_run_one_does(ready: str) -> None:
    learn(ready, dead("1", NOON))

    def claim(_: int) -> set[int]:
        with protocol.session(ready) as connection:
            return learnt.claim_reports(connection, [1])

    assert sorted(map(len, protocol.all_at_once(2, claim))) == [0, 1]
