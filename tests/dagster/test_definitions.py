"""What `build_definitions` and `gaffer_asset` give to Dagster, without its daemons."""

from __future__ import annotations

import logging
from types import ModuleType
from typing import Any

import dagster as dg
import pytest

import gaffer_dagster as gd
from gaffer_dagster.adapter.definitions import find_jobs
from gaffer_dagster.adapter.resource import trigger_of
from gaffer_dagster.engine.log import JsonFormatter
from tests.support import jobs

RESOURCE = gd.GafferResource(dsn=dg.EnvVar("GAFFER_DATABASE_URL"))


def make(name: str = "copied", **options: Any) -> dg.AssetsDefinition:
    options.setdefault("due", gd.NewRows("source", "id"))
    return gd.gaffer_asset(name=name, **options)(jobs.copy_rows)


def materialize(url: str, asset: dg.AssetsDefinition, **options: Any) -> dg.ExecuteInProcessResult:
    return dg.materialize([asset], resources={"gaffer": gd.GafferResource(dsn=url)}, **options)


def metadata_of(result: dg.ExecuteInProcessResult) -> dict[str, Any]:
    (event,) = result.get_asset_materialization_events()
    return {key: value.value for key, value in event.materialization.metadata.items()}


def test_a_job_and_a_running_schedule_for_each_asset() -> None:
    asset = make(schedule=gd.Schedule("H 6 * * *", timezone="America/New_York"), bounds=gd.Bounds(timeout="20m"))
    defs = gd.build_definitions(asset, make("unscheduled"), resource=RESOURCE)
    schedule = defs.resolve_schedule_def("copied_schedule")
    assert schedule.execution_timezone == "America/New_York"
    assert schedule.default_status is dg.DefaultScheduleStatus.RUNNING
    minute, rest = str(schedule.cron_schedule).split(" ", 1)
    assert 0 <= int(minute) <= 59
    assert rest == "6 * * *"
    job = defs.resolve_job_def("copied_job")
    assert job.executor_def is dg.in_process_executor
    assert job.run_tags == {"gaffer/job": "copied", "dagster/max_runtime": "1260"}
    assert asset.op.pools == {"gaffer/copied"}
    assert asset.op.retry_policy is None
    assert [found.name for found in defs.schedules or []] == ["copied_schedule"]


def test_a_schedule_that_dagster_gets_wrong_is_driven_by_wake_ups_in_utc() -> None:
    defs = gd.build_definitions(
        make("several", schedule=gd.Schedule(["0 6 * * *", "30 7 * * 1-5"], "Asia/Tokyo")),
        make("hard", schedule=gd.Schedule(["0 6 * * *", "0 18 * * *"], "Europe/Dublin")),
        resource=RESOURCE,
    )
    plain, woken = (defs.resolve_schedule_def(f"{name}_schedule") for name in ("several", "hard"))
    assert (plain.cron_schedule, plain.execution_timezone) == (["0 6 * * *", "30 7 * * 1-5"], "Asia/Tokyo")
    assert (woken.cron_schedule, woken.execution_timezone) == ("0 5,6,17,18 * * *", "UTC")
    assert plain.description == (
        "At 06:00 every day; and at 07:30 on Monday to Friday, in Asia/Tokyo (0 6 * * * | 30 7 * * 1-5 | Asia/Tokyo |"
        " end | second). Wakes several."
    )
    assert str(woken.description).startswith("At 18:00 every day; and at 06:00 every day, in Europe/Dublin (")
    assert "several crons" in str(woken.description)


def test_it_merges_with_the_users_own_definitions() -> None:
    @dg.asset
    def theirs() -> None: ...

    merged = dg.Definitions.merge(
        gd.build_definitions(make(schedule=gd.Schedule("@daily")), resource=RESOURCE),
        dg.Definitions(assets=[theirs], resources={"other": "x"}, executor=dg.multiprocess_executor),
    )
    dg.Definitions.validate_loadable(merged)
    assert {key.to_user_string() for key in merged.resolve_asset_graph().get_all_asset_keys()} == {"copied", "theirs"}


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: gd.build_definitions(make()), "either resource= or resources="),
        (lambda: gd.build_definitions(make(), make(), resource=RESOURCE), "'copied' is given twice"),
        (lambda: gd.build_definitions(make(database="crm"), resource=RESOURCE), "wants the resource 'crm'"),
        (lambda: make("Copied"), "use a-z, 0-9"),
        (lambda: make(exclusion="lock"), "exclusion='lock'"),
        (
            lambda: make(schedule=gd.Schedule("*/5 * * * *"), bounds=gd.Bounds(timeout="5m")),
            r"timeout=5m is not shorter than the schedule's smallest interval of 5m",
        ),
        (lambda: make(due=gd.NewRows("source", "id", settle="1h")), "settle='1h' is not offered"),
    ],
)
def test_a_definition_that_cannot_be_meant_is_refused(call: Any, told: str) -> None:
    with pytest.raises(gd.GafferError, match=told):
        call()


def test_a_foreign_asset_is_refused() -> None:
    @dg.asset
    def theirs() -> None: ...

    with pytest.raises(gd.GafferError, match="was not made by @gaffer_asset"):
        gd.build_definitions(theirs, resource=RESOURCE)


def test_what_dagster_is_told_has_stable_keys_and_numbers(url: str) -> None:
    jobs.make_source(url, 25)
    found = metadata_of(materialize(url, make(schedule=gd.Schedule("@hourly"), bounds=gd.Bounds(batch_rows=10))))
    numbers = {key: found[f"gaffer/{key}"] for key in ("items", "batches", "backlog", "fence", "ticks_covered")}
    assert numbers == {"items": 25, "batches": 3, "backlog": 0, "fence": 1, "ticks_covered": 0}
    assert found["gaffer/outcome"] == "succeeded"
    assert isinstance(found["gaffer/lag_seconds"], float)
    assert isinstance(found["gaffer/duration_seconds"], float)
    assert found["gaffer/watermark"].startswith("key 25")
    assert isinstance(found["gaffer/run_id"], int)
    assert found["gaffer/next_run_at"] > 1_700_000_000


def test_the_functions_own_metadata_is_added(url: str) -> None:
    jobs.make_source(url, 1)

    @gd.gaffer_asset(due=gd.NewRows("source", "id"))
    def telling(batch: gd.Batch) -> dict[str, Any]:
        return {"mine": len(batch.rows)}

    assert metadata_of(materialize(url, telling))["mine"] == 1


def test_downstream_is_not_woken_when_nothing_was_due(url: str) -> None:
    jobs.make_source(url)
    asset = make()

    @dg.asset(deps=[asset])
    def downstream() -> None: ...

    result = dg.materialize([asset, downstream], resources={"gaffer": gd.GafferResource(dsn=url)})
    assert result.success
    assert result.get_asset_materialization_events() == []
    (observation,) = result.get_asset_observation_events()
    told = observation.asset_observation_data.asset_observation.metadata
    assert told["gaffer/outcome"].value == "succeeded"
    assert "gaffer/owner" in told


def test_a_busy_run_says_so_and_succeeds(url: str) -> None:
    jobs.make_source(url, 1)
    with jobs.opened(jobs.spec("copied"), url):
        result = materialize(url, make())
    assert result.success
    (observation,) = result.get_asset_observation_events()
    told = observation.asset_observation_data.asset_observation.metadata
    assert told["gaffer/outcome"].value == "busy"
    assert "gaffer/owner" not in told, "it held nothing"


def test_the_users_exception_is_the_one_that_dagster_shows(url: str) -> None:
    jobs.make_source(url, 1)

    class OwnError(Exception):
        pass

    @gd.gaffer_asset(due=gd.NewRows("source", "id"))
    def failing(batch: gd.Batch) -> None:
        raise OwnError("as it was")

    with pytest.raises(OwnError, match="as it was"):
        materialize(url, failing)
    result = materialize(url, failing, raise_on_error=False)
    (failure,) = [event for event in result.all_events if event.is_step_failure]
    cause = failure.step_failure_data.error.cause
    assert cause is not None
    assert cause.cls_name == "OwnError"
    (observation,) = result.get_asset_observation_events()
    assert observation.asset_observation_data.asset_observation.metadata["gaffer/outcome"].value == "failed"


def test_a_run_inside_an_op_of_ones_own(url: str) -> None:
    jobs.make_source(url, 5)
    seen: list[tuple[str, int]] = []

    @dg.op
    def own(gaffer: gd.GafferResource) -> None:
        with gaffer.run(jobs.spec("own", batch_rows=2)) as run:
            for batch in run:
                jobs.copy_rows(batch)
        assert run.record is not None
        seen.append((run.record.dagster_run_id or "", run.record.items))

    @dg.job
    def own_job() -> None:
        own()

    result = own_job.execute_in_process(resources={"gaffer": gd.GafferResource(dsn=url)})
    assert seen == [(result.run_id, 5)]


def test_the_lines_of_a_run_are_readable_and_json_on_a_handler(url: str) -> None:
    jobs.make_source(url, 1)
    lines: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(self.format(record))

    handler = Kept()
    handler.setFormatter(JsonFormatter())
    logger = logging.getLogger("dagster.builtin.gaffer")
    logger.addHandler(handler)
    try:
        with dg.instance_for_test() as instance:
            result = materialize(url, make(), instance=instance)
            texts = [entry.user_message for entry in instance.all_logs(result.run_id) if entry.dagster_event is None]
    finally:
        logger.removeHandler(handler)
    (ended,) = [text for text in texts if text.startswith("copied ended: ")]
    for field in ("started_at=", "ended_at=", "items=1", "outcome=succeeded", "fence=1", "owner=", "backlog=0"):
        assert field in ended
    assert any('"event": "ended"' in line and '"items": 1' in line for line in lines), lines


def test_a_missing_variable_is_named_and_the_location_still_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GAFFER_DATABASE_URL", raising=False)
    asset = make()
    dg.Definitions.validate_loadable(gd.build_definitions(asset, resource=RESOURCE))
    with pytest.raises(dg.DagsterInvalidConfigError, match="GAFFER_DATABASE_URL"):
        dg.materialize([asset], resources={"gaffer": RESOURCE})


def test_two_databases_in_one_code_location(url: str, server_url: str) -> None:
    from gaffer_dagster.testing import scratch_database

    with scratch_database(server_url) as other:
        for each in (url, other):
            jobs.make_source(each, 3)
        first, second = make("first"), make("second", database="crm")
        result = dg.materialize(
            [first, second], resources={"gaffer": gd.GafferResource(dsn=url), "crm": gd.GafferResource(dsn=other)}
        )
        assert result.success
        assert jobs.query(url, "select job from gaffer.job_runs") == [("first",)]
        assert jobs.query(other, "select job from gaffer.job_runs") == [("second",)]


def test_a_database_that_is_away_or_not_migrated_is_a_clear_error(server_url: str) -> None:
    from gaffer_dagster.store import db

    away = "postgresql://somebody:canary@127.0.0.1:1/nowhere"
    with pytest.raises(gd.GafferError, match=r"cannot be reached at somebody@127.0.0.1:1/nowhere") as caught:
        materialize(away, make())
    assert "canary" not in str(caught.value)
    bare = db.with_database(server_url, "postgres")
    with pytest.raises(gd.GafferError, match="run: gaffer migrate"):
        materialize(bare, make())


def test_a_daemon_that_was_down_for_ticks_loses_nothing(url: str) -> None:
    jobs.make_source(url, 3)
    asset = make(schedule=gd.Schedule("* * * * *"), bounds=gd.Bounds(timeout="45s"))
    materialize(url, asset)
    for column in ("job set covered_until", "job_spec set first_seen_at", "job_spec set since_at"):
        jobs.execute(url, f"update gaffer.{column} = {column.split()[-1]} - interval '3 hours'")
    jobs.add_rows(url, 4)
    found = metadata_of(materialize(url, asset))
    assert found["gaffer/items"] == 4
    assert found["gaffer/ticks_covered"] in (180, 181)


# ── what the function is, and what it says ───────────────────────────────────────────────────────────────────────


def lazily(batch: gd.Batch) -> Any:
    yield batch.number


async def later(batch: gd.Batch) -> None: ...


async def lazily_later(batch: gd.Batch) -> Any:
    yield batch.number


@pytest.mark.parametrize(
    ("work", "told"),
    [
        (lazily, "generator|yield"),
        (later, "async|coroutine"),
        (lazily_later, "async|generator|yield"),
        (None, "function"),
        (7, "function"),
        ("copied", "function"),
    ],
)
def test_what_cannot_do_a_batch_is_refused_where_it_is_defined(work: Any, told: str) -> None:
    with pytest.raises(gd.GafferError, match=told):
        gd.gaffer_asset(due=gd.NewRows("source", "id"), name="copied")(work)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: make(name=1), "name"),  # pyright: ignore
        (lambda: make(schedule=1), "schedule"),
        (lambda: make(schedule="@daily"), "schedule"),
        (lambda: make(bounds=1), "bounds"),
        (lambda: make(alerts=1), "alerts"),
        (lambda: make(due=None), "due"),
        (lambda: gd.build_definitions(None, resource=RESOURCE), "gaffer_asset"),  # pyright: ignore
        (lambda: gd.build_definitions([make()], resource=RESOURCE), "gaffer_asset"),  # pyright: ignore
        (lambda: gd.build_definitions(jobs.copy_rows, resource=RESOURCE), "gaffer_asset"),  # pyright: ignore
    ],
)
def test_a_value_of_another_type_is_refused_by_its_name(call: Any, told: str) -> None:
    with pytest.raises(gd.GafferError, match=told):
        call()


def test_a_result_of_dagsters_own_is_refused_before_the_batch_is_committed(url: str) -> None:
    jobs.make_source(url, 1)

    @gd.gaffer_asset(due=gd.NewRows("source", "id"))
    def telling(batch: gd.Batch) -> Any:
        jobs.copy_rows(batch)
        return dg.MaterializeResult(metadata={"mine": 1})

    with pytest.raises(gd.GafferError, match="MaterializeResult"):
        materialize(url, telling)
    assert jobs.query(url, "select outcome from gaffer.job_runs") == [("failed",)]
    assert jobs.query(url, "select count(*) from target") == [(0,)]
    assert jobs.query(url, "select position from gaffer.job_watermark") == [(None,)]


class Number(int):
    pass


class Odd:
    def __repr__(self) -> str:
        return "<something odd>"


def test_metadata_that_dagster_cannot_take_is_shown_as_text_and_fails_nothing(url: str) -> None:
    """The work is committed by then: a failed step would say that it is not."""
    jobs.make_source(url, 2)
    deep: list[Any] = []
    for _ in range(900):
        deep = [deep]

    @gd.gaffer_asset(due=gd.NewRows("source", "id"))
    def telling(batch: gd.Batch) -> dict[str, Any]:
        jobs.copy_rows(batch)
        return {
            "odd": Odd(),
            "huge": 10**40,
            "not a number": float("nan"),
            "nested": {"odd": Odd()},
            "listed": [Odd()],
            "number": Number(3),
            "deep": deep,
            "": 1,
            "mine": 3,
            "text": "as it is",
            "markdown": dg.MetadataValue.md("*so*"),
            "no \udce9 text": "\ud800",
            "paths": {"\udce9": ["a\udce9", {"b": "\ud800"}]},
            "about": dg.MetadataValue.md("caf\udce9 at postgresql://bob:SECRET@h/db"),
            "url": "postgresql://bob:SECRET@h/db",
            "listed urls": [{"url": "postgresql://bob:SECRET@h/db"}],
            "class": {"__class__": "postgresql://bob:SECRET@h/db"},  # which Dagster would read back as an object
            "gaffer/items": 4711,
            "gaffer/outcome": "mine",
        }

    with dg.instance_for_test() as instance:
        result = materialize(url, telling, instance=instance)
        assert result.success
        found = metadata_of(result)
        (stored,) = instance.fetch_materializations(dg.AssetKey("telling"), limit=10).records
        assert stored.asset_materialization is not None
    assert found["odd"] == "<something odd>"
    assert str(found["huge"]) == str(10**40)
    assert (found["mine"], found["text"], found["markdown"]) == (3, "as it is", "*so*")
    assert "something odd" in str(found["nested"])
    assert "something odd" in str(found["listed"])
    assert (found["gaffer/items"], found["gaffer/outcome"]) == (2, "succeeded")
    assert (found["no ? text"], found["paths"]) == ("?", {"?": ["a?", {"b": "?"}]})
    assert found["class"] == "{'__class__': 'postgresql://bob:***@h/db'}"
    assert found["about"] == "caf? at postgresql://bob:***@h/db"
    assert (found["url"], found["listed urls"]) == ("postgresql://bob:***@h/db", [{"url": "postgresql://bob:***@h/db"}])
    assert jobs.query(url, "select outcome from gaffer.job_runs") == [("succeeded",)]
    assert jobs.query(url, "select count(*) from target") == [(2,)]


def test_what_a_definition_says_can_be_shown_too() -> None:
    shown = gd.gaffer_asset(
        due=gd.NewRows("source", "id"),
        name="described",
        description="caf\udce9",
        metadata={"from": "postgresql://bob:SECRET@h/db", "\ud800": dg.MetadataValue.path("a\udce9"), "three": 3},
    )(jobs.copy_rows)
    spec = shown.get_asset_spec()
    assert (spec.description or "").startswith("caf?\n")
    told = {key: getattr(value, "value", value) for key, value in spec.metadata.items()}
    assert (told["from"], told["?"], told["three"]) == ("postgresql://bob:***@h/db", "a?", 3)


# ── which jobs a module defines ──────────────────────────────────────────────────────────────────────────────────


def module(**values: Any) -> ModuleType:
    made = ModuleType("made")
    vars(made).update(values)
    return made


def test_jobs_of_a_factory_are_found_through_the_definitions(url: str) -> None:
    defs = gd.build_definitions(*[make(name) for name in ("a", "b")], resource=gd.GafferResource(dsn=url))
    merged = dg.Definitions.merge(
        gd.build_definitions(make("c"), resource=gd.GafferResource(dsn=url)),
        dg.Definitions(assets=[dg.AssetSpec("theirs")], resources={"other": "x"}),
    )
    for given, names in ((defs, ["a", "b"]), (merged, ["c"])):
        found = find_jobs(module(defs=given))
        assert sorted(found) == names
        for name in names:
            assert found[name].job.spec.name == name
            assert found[name].resource is not None
            assert found[name].resource.url() == url


def test_jobs_in_a_list_are_found() -> None:
    assert sorted(find_jobs(module(listed=[make("a"), make("b")]))) == ["a", "b"]
    assert sorted(find_jobs(module(listed=(make("a"), "other", 7), single=make("b"), none=[]))) == ["a", "b"]


def test_a_job_that_is_found_in_several_places_is_one_job() -> None:
    asset = make("a")
    defs = gd.build_definitions(asset, resource=RESOURCE)
    found = find_jobs(module(a=asset, listed=[asset], defs=defs, merged=dg.Definitions.merge(defs)))
    assert list(found) == ["a"]
    assert found["a"].resource is not None


def test_a_module_that_holds_itself_is_read_to_its_end() -> None:
    circle: list[Any] = [make("a")]
    circle.append(circle)
    made = module(circle=circle, by_name={"b": make("b")})
    vars(made)["everything"] = vars(made)
    assert sorted(find_jobs(made)) == ["a", "b"]


def test_a_run_that_somebody_starts_again_was_started_by_hand() -> None:
    by_schedule = {"dagster/schedule_name": "daily"}
    again = {**by_schedule, "dagster/parent_run_id": "1", "dagster/root_run_id": "1"}
    assert (trigger_of(by_schedule), trigger_of(again)) == ("schedule", "manual")
    assert trigger_of({**again, "dagster/retry_number": "1"}) == "schedule"  # Dagster's own retry
