"""The two checks on each job's page: red with the reason, green again, and never in the way of a run."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import dagster as dg
import pytest

import gaffer_dagster as gd
from gaffer_dagster.adapter import checks
from gaffer_dagster.domain.alert import Kind
from gaffer_dagster.domain.incident import Alert
from gaffer_dagster.engine.watch import Watcher, look
from gaffer_dagster.testing import Clock
from tests.dagster.launchers import SteeredLauncher
from tests.dagster.moved import MINUTE, Location, at, location
from tests.support import jobs, protocol

# Dagster's database dates evaluations by its own clock, which is not moved: for it everything here was long ago.
NOON = at("2025-01-01T12:00Z")
EVERY = timedelta(seconds=31)  # the sensor is evaluated not more often than each 30 s

SHOWN = """
query ($key: AssetKeyInput!) {
  assetNodeOrError(assetKey: $key) {
    ... on AssetNode {
      assetChecksOrError {
        ... on AssetChecks {
          checks {
            name
            blocking
            canExecuteIndividually
            jobNames
            executionForLatestMaterialization {
              status
              runId
              evaluation { success severity description metadataEntries { label } }
            }
          }
        }
      }
    }
  }
}
"""


def make(name: str, work: Any = jobs.copy_rows, **options: Any) -> dg.AssetsDefinition:
    options.setdefault("schedule", gd.Schedule("0 * * * *"))
    options.setdefault("alerts", gd.Alerts(grace="5m", failures=1))
    due = gd.NewRows(f"source_{name}", "id")
    return gd.gaffer_asset(name=name, due=due, bounds=gd.Bounds(timeout="10m"), **options)(work)


def defined(url: str, *assets: dg.AssetsDefinition) -> dg.Definitions:
    """What "Materialize" starts runs in this process too, where the tests' code location is."""
    ours = gd.build_definitions(*assets, resource=gd.GafferResource(dsn=url))
    return dg.Definitions.merge(ours, dg.Definitions(executor=dg.in_process_executor))


def page(daemons: Location, asset: str) -> dict[str, Any]:
    """What the asset's page shows of each check: nothing, or its status, and the evaluation."""
    told = daemons.graphql(SHOWN, key={"path": asset.split("/")})["assetNodeOrError"]
    return {each["name"]: each for each in told["assetChecksOrError"]["checks"]}


def shown(daemons: Location, asset: str) -> list[str | None]:
    """The status of `on_time` and of `healthy`."""
    found = page(daemons, asset)
    executions = [found[name]["executionForLatestMaterialization"] for name in ("on_time", "healthy")]
    return [None if each is None else each["status"] for each in executions]


def fail(batch: gd.Batch) -> None:
    raise ValueError("the test wants it")


# ── what is shown ────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_overdue_job_is_red_until_a_run_covers_it_and_green_at_its_end(
    url: str, clock: Clock, instance: dg.DagsterInstance
) -> None:
    jobs.make_source(url, 3, table="source_overdue")
    with location(instance, clock, defined(url, make("overdue"))) as daemons:
        daemons.watch(NOON - MINUTE)
        assert shown(daemons, "overdue") == ["SUCCEEDED", "SUCCEEDED"]
        for minutes in range(6):
            daemons.watch(NOON + minutes * MINUTE)
        assert shown(daemons, "overdue") == ["FAILED", "SUCCEEDED"]
        on_time = page(daemons, "overdue")["on_time"]
        assert on_time["blocking"] is False
        evaluation = on_time["executionForLatestMaterialization"]["evaluation"]
        assert evaluation["severity"] == "ERROR"
        assert "2025-01-01" in evaluation["description"]
        assert {entry["label"] for entry in evaluation["metadataEntries"]} == {
            "gaffer/kind",
            "gaffer/since",
            "gaffer/why",
            "gaffer/what_to_do",
        }
        daemons.launch(NOON + 7 * MINUTE, "overdue_job")
        assert shown(daemons, "overdue") == ["SUCCEEDED", "SUCCEEDED"]  # at once
        daemons.watch(NOON + 8 * MINUTE)
        assert shown(daemons, "overdue") == ["SUCCEEDED", "SUCCEEDED"]


def test_a_job_that_fails_is_red_at_the_end_of_its_run(url: str, clock: Clock, instance: dg.DagsterInstance) -> None:
    jobs.make_source(url, 3, table="source_failing")
    with location(instance, clock, defined(url, make("failing", fail))) as daemons:
        daemons.watch(NOON - MINUTE)
        run = instance.get_run_by_id(daemons.launch(NOON + MINUTE, "failing_job"))
        assert run is not None
        assert run.status is dg.DagsterRunStatus.FAILURE
        assert shown(daemons, "failing") == ["SUCCEEDED", "FAILED"]
        daemons.watch(NOON + 2 * MINUTE)
        assert shown(daemons, "failing") == ["SUCCEEDED", "FAILED"]


def test_what_a_materialization_leaves_wrong_stays_red(url: str, clock: Clock, instance: dg.DagsterInstance) -> None:
    """It outdates all evaluations before it."""
    jobs.make_source(url, 3, table="source_parked")
    with location(instance, clock, defined(url, make("parked"))) as daemons:
        daemons.watch(NOON - MINUTE)
        jobs.execute(url, "update gaffer.job set parked = 2, parked_at = gaffer.clock()")
        daemons.watch(NOON)
        assert shown(daemons, "parked") == ["SUCCEEDED", "FAILED"]
        evaluation = page(daemons, "parked")["healthy"]["executionForLatestMaterialization"]["evaluation"]
        assert evaluation["severity"] == "WARN"
        run = daemons.launch(NOON + MINUTE, "parked_job")
        assert instance.get_latest_materialization_event(dg.AssetKey("parked")) is not None
        assert shown(daemons, "parked") == ["SUCCEEDED", "FAILED"]
        told_by = {each["executionForLatestMaterialization"]["runId"] for each in page(daemons, "parked").values()}
        assert told_by == {run}


def test_a_run_that_waits_or_hangs_does_not_hide_what_is_red(
    url: str, clock: Clock, instance: dg.DagsterInstance
) -> None:
    with location(instance, clock, defined(url, make("hanging"))) as daemons:
        daemons.watch(NOON - MINUTE)
        for minutes in range(6):
            daemons.watch(NOON + minutes * MINUTE)
        assert shown(daemons, "hanging") == ["FAILED", "SUCCEEDED"]
        for does in ("wait", "hang", "raise"):
            SteeredLauncher.does = does
            daemons.launch(NOON + 7 * MINUTE, "hanging_job")
            assert shown(daemons, "hanging") == ["FAILED", "SUCCEEDED"]


def test_the_tick_says_what_it_found(url: str, clock: Clock, instance: dg.DagsterInstance) -> None:
    from dagster._core.definitions.run_request import InstigatorType

    found = [make("a"), make("b"), make("c", schedule=gd.Schedule("@yearly")), make("d", alerts=gd.Alerts(grace="1h"))]
    with location(instance, clock, defined(url, *found)) as daemons:

        def said() -> str:
            return str(daemons.ticks(InstigatorType.SENSOR)[0].skip_reason)

        daemons.watch(NOON - MINUTE)
        assert said() == "4 jobs, nothing is wrong"
        SteeredLauncher.does = "raise"
        daemons.launch(NOON - 0.5 * MINUTE, "c_job")
        daemons.watch(NOON)
        assert said() == "4 jobs: 1 failing (c); 1 run that wrote nothing (c); 1 message sent"
        for minutes in range(1, 6):
            daemons.watch(NOON + minutes * MINUTE)
        assert said() == "4 jobs: 2 overdue (a, b), 1 failing (c); 2 messages sent"


# ── which steps there are ────────────────────────────────────────────────────────────────────────────────────────


def steps(instance: dg.DagsterInstance, run: str) -> list[str | None]:
    kind = dg.DagsterEventType.STEP_START
    return [entry.step_key for entry in instance.all_logs(run, of_type=kind)]


def planned(instance: dg.DagsterInstance, run: str) -> int:
    return len(instance.all_logs(run, of_type=dg.DagsterEventType.ASSET_CHECK_EVALUATION_PLANNED))


def test_a_run_of_our_job_has_one_step_and_plans_no_check(url: str, clock: Clock, instance: dg.DagsterInstance) -> None:
    jobs.make_source(url, 3, table="source_single")
    with location(instance, clock, defined(url, make("single"))) as daemons:
        run = daemons.launch(NOON, "single_job")
        assert steps(instance, run) == ["single"]
        assert planned(instance, run) == 0
        assert shown(daemons, "single") == ["SUCCEEDED", "SUCCEEDED"]


@pytest.mark.parametrize(("rows", "work"), [(3, jobs.copy_rows), (0, jobs.copy_rows), (3, fail)])
def test_materialize_may_do_the_checks_too_and_shows_what_is_so(
    url: str, clock: Clock, instance: dg.DagsterInstance, rows: int, work: Any
) -> None:
    """The button selects the checks. Where nothing was due, or the run failed, Dagster skips their step."""
    name = f"by_hand_{rows}_{work.__name__}"
    jobs.make_source(url, rows, table=f"source_{name}")
    with location(instance, clock, defined(url, make(name, work))) as daemons:
        daemons.watch(NOON - MINUTE)
        run = daemons.launch(NOON, "__ASSET_JOB", [name])
        assert planned(instance, run) == 2
        did = rows > 0 and work is not fail
        assert steps(instance, run) == [name, *([f"gaffer_checks_of_{name}"] if did else [])]
        assert shown(daemons, name) == ["SUCCEEDED", "FAILED" if work is fail else "SUCCEEDED"]


def test_a_check_can_be_executed_by_itself(url: str, clock: Clock, instance: dg.DagsterInstance) -> None:
    with location(instance, clock, defined(url, make("looked_at"))) as daemons:
        daemons.watch(NOON - MINUTE)
        assert {each["canExecuteIndividually"] for each in page(daemons, "looked_at").values()} == {"CAN_EXECUTE"}
        both = [{"assetKey": {"path": ["looked_at"]}, "name": name} for name in ("on_time", "healthy")]
        for chosen in (both, both[:1]):
            run = daemons.launch(NOON + 10 * MINUTE, "__ASSET_JOB", checks=chosen)
            found = instance.get_run_by_id(run)
            assert found is not None
            assert found.is_success
            assert steps(instance, run) == ["gaffer_checks_of_looked_at"]
            assert shown(daemons, "looked_at") == ["FAILED", "SUCCEEDED"]  # before the sensor looked


def test_a_plain_materialize_and_a_job_of_ones_own_still_work(url: str) -> None:
    jobs.make_source(url, 3, table="source_plain")
    asset = make("plain")
    result = dg.materialize([asset], resources={"gaffer": gd.GafferResource(dsn=url)})
    assert result.success
    assert [event.step_key for event in result.all_events if event.is_step_start] == ["plain"]
    theirs = dg.define_asset_job("theirs", selection=[asset])
    merged = dg.Definitions.merge(defined(url, asset), dg.Definitions(jobs=[theirs]))
    jobs.add_rows(url, 3, "source_plain")
    result = merged.resolve_job_def("theirs").execute_in_process()
    assert result.success
    started = [event.step_key for event in result.all_events if event.is_step_start]
    assert started == ["plain", "gaffer_checks_of_plain"]
    assert {each.check_name for each in result.get_asset_check_evaluations()} == {"on_time", "healthy"}


def test_checks_that_cannot_be_shown_fail_no_run(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs.make_source(url, 3, table="source_unseen")

    def away(*_: Any) -> None:
        raise OSError("the test wants it")

    monkeypatch.setattr(checks, "look", away)
    result = dg.materialize([make("unseen")], resources={"gaffer": gd.GafferResource(dsn=url)})
    assert result.success
    assert len(result.get_asset_materialization_events()) == 1


# ── what the sensor remembers ────────────────────────────────────────────────────────────────────────────────────


def keys(count: int) -> dict[str, dg.AssetKey]:
    return {f"job_{number:05}": dg.AssetKey(f"job_{number:05}") for number in range(count)}


@pytest.fixture
def overdue(url: str, clock: Clock) -> list[Alert]:
    """An incident of job_00001."""
    clock.set(NOON)
    with protocol.session(url) as connection:
        protocol.register(connection, jobs.spec("job_00001"))
        clock.advance(timedelta(hours=2))
        report = look(connection, Watcher("test"))
    assert report is not None
    (alert,) = report.changed
    assert alert.kind is Kind.ABSENCE
    return [alert]


def names(told: list[dg.AssetCheckEvaluation]) -> list[str]:
    assert [each.check_name for each in told] == ["on_time", "healthy"] * (len(told) // 2)
    return [each.asset_key.path[-1] for each in told[::2]]


def again(shown: checks.Shown) -> checks.Shown:
    """As the next evaluation reads it."""
    return checks.read(checks.write({"gaffer": shown}))["gaffer"]


def test_only_a_verdict_that_changed_is_shown(overdue: list[Alert]) -> None:
    jobs_here = keys(3)
    shown = checks.Shown()
    assert names(checks.changes(shown, jobs_here, [], ())) == ["job_00000", "job_00001", "job_00002"]
    shown = again(shown)
    assert checks.changes(shown, jobs_here, [], ()) == []
    (red, green) = checks.changes(shown, jobs_here, overdue, ())
    assert (red.check_name, red.passed, green.check_name, green.passed) == ("on_time", False, "healthy", True)
    shown = again(shown)
    assert checks.changes(shown, jobs_here, overdue, ()) == []
    assert names(checks.changes(shown, jobs_here, overdue, ["job_00002"])) == ["job_00002"]
    assert [each.passed for each in checks.changes(shown, jobs_here, [], ())] == [True, True]
    assert checks.changes(again(shown), jobs_here, [], ()) == []
    assert names(checks.changes(again(shown), keys(4), [], ())) == sorted(keys(4))


def test_thousands_of_jobs_are_shown_in_parts_and_their_cursor_is_short(overdue: list[Alert]) -> None:
    many, shown, seen = keys(1000), checks.Shown(), list[str]()
    evaluations = 0
    while told := checks.changes(shown, many, overdue, ()):
        assert len(told) <= 400
        evaluations += len(told)
        seen += names(told)
        shown = again(shown)
    assert sorted(seen) == sorted(many)
    assert evaluations == 2000
    assert len(checks.write({"gaffer": shown})) < 200


@pytest.mark.parametrize("cursor", [None, "", "nonsense", "[]", "{}", '{"gaffer": 3}', '{"gaffer": {"newer": 1}}'])
def test_a_cursor_of_something_else_is_begun_anew(cursor: str | None) -> None:
    assert checks.read(cursor) == {}


def test_what_is_kept_is_read_back() -> None:
    kept = {"gaffer": checks.Shown("abc", {"a": "1.0,2.1"}, "b"), "crm": checks.Shown()}
    assert checks.read(checks.write(kept)) == kept
    json.loads(checks.write(kept))
