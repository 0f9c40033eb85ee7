"""What a user of Dagster expects of `gaffer_asset` and `GafferResource`, and what he is told where it cannot be."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from click.testing import CliRunner

import gaffer_dagster as gd
from gaffer_dagster.adapter.assets import _REFUSED
from gaffer_dagster.adapter.definitions import find_jobs
from gaffer_dagster.cli import main
from gaffer_dagster.testing import scratch_database
from tests.support import jobs

BIN = Path(sys.executable).parent
DUE = gd.NewRows("source", "id")


class Slack(dg.ConfigurableResource[Any]):
    channel: str

    def say(self, text: str) -> str:
        return f"{self.channel}: {text}"


class Attached(dg.ConfigurableResource[Any], dg.IAttachDifferentObjectToOpContext):
    def get_object_to_set_on_execution_context(self) -> str:
        return "another object"


# Resources.


def test_resources_are_parameters_as_in_any_asset(url: str) -> None:
    jobs.make_source(url, 2)

    @gd.gaffer_asset(due=DUE, required_resource_keys={"by_key"})
    def telling(
        batch: gd.Batch, slack: Slack, attached: Attached, plain: dg.ResourceParam[str], again: int = 1
    ) -> dict[str, Any]:
        assert isinstance(attached, Attached)
        return {"said": slack.say(plain), "by_key": batch.context.resources.by_key, "again": again}

    resources = {
        "gaffer": gd.GafferResource(dsn=url),
        "slack": Slack(channel="#ops"),
        "attached": Attached(),
        "plain": "hello",
        "by_key": "key",
    }
    (event,) = dg.materialize([telling], resources=resources).get_asset_materialization_events()
    said = {key: value.value for key, value in event.materialization.metadata.items() if "/" not in key}
    assert said == {"said": "#ops: hello", "by_key": "key", "again": 1}


def test_without_dagster_a_function_that_wants_its_resources_says_so(url: str) -> None:
    jobs.make_source(url, 2)

    @gd.gaffer_asset(due=DUE)
    def telling(batch: gd.Batch, slack: Slack) -> None: ...

    module = type(sys)("a_module")
    module.telling = telling  # type: ignore[attr-defined]
    job = find_jobs(module)["telling"].job
    with pytest.raises(gd.GafferError, match=r"telling takes resources of Dagster \(slack\), which are not there"):
        jobs.run(job.spec, url, job.work)


def test_a_function_with_resources_is_known_by_what_it_does() -> None:
    def make(text: str) -> str | None:
        def does(batch: gd.Batch, slack: Slack) -> None:
            slack.say(text)

        module = type(sys)("a_module")
        module.asset = gd.gaffer_asset(due=DUE)(does)  # type: ignore[attr-defined]
        return find_jobs(module)["does"].job.definition.work_hash

    assert make("a") is not None
    assert make("a") == make("a") != make("b")


def test_several_databases_in_one_location(url: str, server_url: str) -> None:
    with scratch_database(server_url) as other:
        for database in (url, other):
            jobs.make_source(database, 3)

        @gd.gaffer_asset(due=DUE)
        def here(batch: gd.Batch) -> None:
            batch.insert("target", [{"id": row["id"]} for row in batch.rows])

        @gd.gaffer_asset(due=DUE, database="crm")
        def there(batch: gd.Batch) -> None:
            batch.insert("target", [{"id": -row["id"]} for row in batch.rows])

        resources = {"gaffer": gd.GafferResource(dsn=url), "crm": gd.GafferResource(dsn=other)}
        defs = gd.build_definitions(here, there, resources=resources)
        for name in ("here_job", "there_job"):
            assert defs.resolve_job_def(name).execute_in_process().success
        assert jobs.query(url, "select min(id), max(id) from target") == [(1, 3)]
        assert jobs.query(other, "select min(id), max(id) from target") == [(-3, -1)]
        assert jobs.query(url, "select distinct job from gaffer.job_runs") == [("here",)]
        assert jobs.query(other, "select distinct job from gaffer.job_runs") == [("there",)]


def test_the_resource_by_hand_in_an_op_an_asset_and_a_sensor(url: str) -> None:
    jobs.make_source(url, 2)
    gaffer = gd.GafferResource(dsn=url)

    def work(resource: gd.GafferResource, name: str) -> int:
        with resource.run(gd.JobSpec(name, DUE)) as run:
            for batch in run:
                batch.insert("target", [{"id": row["id"]} for row in batch.rows])
        assert run.record is not None
        return run.record.items

    @dg.op
    def in_op(gaffer: gd.GafferResource) -> int:
        return work(gaffer, "in_op")

    @dg.job
    def a_job() -> None:
        in_op()

    @dg.asset
    def in_asset(gaffer: gd.GafferResource) -> int:
        return work(gaffer, "in_asset")

    @dg.sensor(target=[in_asset])
    def in_sensor(gaffer: gd.GafferResource) -> dg.SkipReason:
        return dg.SkipReason(str(work(gaffer, "in_sensor")))

    assert a_job.execute_in_process(resources={"gaffer": gaffer}).output_for_node("in_op") == 2
    assert dg.materialize([in_asset], resources={"gaffer": gaffer}).output_for_node("in_asset") == 2
    with dg.instance_for_test() as instance:
        context = dg.build_sensor_context(instance=instance, resources={"gaffer": gaffer})
        assert in_sensor(context) == dg.SkipReason("2")
    told = jobs.query(url, "select job, trigger, dagster_run_id is not null from gaffer.job_runs order by id")
    assert [row[0] for row in told] == ["in_op", "in_asset", "in_sensor"]
    assert [row[2] for row in told] == [True, True, False]


# What is downstream.


def test_an_eager_asset_downstream_is_asked_for_after_work_and_not_after_idleness(url: str) -> None:
    jobs.make_source(url, 2)
    upstream = gd.gaffer_asset(due=DUE, name="upstream")(jobs.copy_rows)

    @dg.asset(deps=[upstream], automation_condition=dg.AutomationCondition.eager())
    def downstream() -> None: ...

    defs = dg.Definitions(assets=[upstream, downstream], resources={"gaffer": gd.GafferResource(dsn=url)})
    with dg.instance_for_test() as instance:
        cursor = None

        def asked() -> int:
            nonlocal cursor
            result = dg.evaluate_automation_conditions(defs=defs, instance=instance, cursor=cursor)
            cursor = result.cursor
            return result.total_requested

        def run() -> None:
            job = defs.resolve_implicit_global_asset_job_def()
            assert job.execute_in_process(instance=instance, asset_selection=[upstream.key]).success

        asked()
        run()  # two rows
        assert asked() == 1
        dg.materialize([downstream], instance=instance, selection=[downstream])
        asked()
        run()  # nothing
        assert instance.get_latest_materialization_event(upstream.key) is not None
        assert asked() == 0
        jobs.add_rows(url, 1)
        run()
        assert asked() == 1


def test_a_condition_of_its_own_and_hooks_are_dagsters() -> None:
    @dg.success_hook
    def said(context: dg.HookContext) -> None: ...

    condition = dg.AutomationCondition.on_missing()
    asset = gd.gaffer_asset(due=DUE, automation_condition=condition, hooks={said})(jobs.copy_rows)
    assert asset.automation_conditions_by_key == {asset.key: condition}
    assert asset.hook_defs == {said}


# What is refused.


def test_each_option_of_dg_asset_is_taken_or_refused_with_a_reason() -> None:
    theirs = {name for name, each in inspect.signature(dg.asset).parameters.items() if each.kind is each.KEYWORD_ONLY}
    ours = set(inspect.signature(gd.gaffer_asset).parameters)
    assert theirs - ours - set(_REFUSED) == set()
    assert not ours & set(_REFUSED)
    for name, reason in _REFUSED.items():
        with pytest.raises(gd.GafferError, match=rf"gaffer_asset: {name}= is not taken: ") as refusal:
            gd.gaffer_asset(due=DUE, **{name: None})  # type: ignore[call-overload]
        assert reason in str(refusal.value)


MISTAKES = """
import dagster as dg
import gaffer_dagster as gd

DUE = gd.NewRows("source", "id")
RESOURCE = gd.GafferResource(dsn=dg.EnvVar("GAFFER_DATABASE_URL"))


def work(batch: gd.Batch) -> None: ...


def no_batch() -> None: ...


def with_context(context, batch) -> None: ...


async def later(batch: gd.Batch) -> None: ...


def decorated_with_both() -> None:
    @gd.gaffer_asset(due=DUE, sql="select * from due", name="in_sql")
    def in_python(batch: gd.Batch) -> None: ...


MISTAKES = [
    lambda: gd.Schedule("61 * * * *"),  # minute: 61 is out of range; write 0 to 59
    lambda: gd.Schedule("@daily", "Berlin"),  # 'Berlin'
    lambda: gd.Bounds(timeout="20 minutes"),  # timeout='20 minutes' is no duration; write
    lambda: gd.Alerts(failures=0),  # failures=0 must be a whole number from 1
    lambda: gd.NewRows("", "id"),  # table='' is no name; write
    lambda: gd.PendingRows("t", "id", pending="", done="x"),  # pending='' is no SQL; write
    lambda: gd.EachInterval(start="soon"),  # start='soon' is no date; write
    lambda: gd.Elapsed("1ms"),  # slice='1ms' is shorter than 1s; write
    lambda: gd.JobSpec("Name", DUE),  # job name 'Name': use
    lambda: gd.gaffer_asset(due=DUE, max_late="soon")(work),  # max_late='soon' is no duration; write
    lambda: gd.gaffer_asset(due=DUE, exclusion="lock")(work),  # exclusion='lock' is not offered; use
    lambda: gd.gaffer_asset(due=gd.Elapsed())(work),  # Elapsed needs a schedule.*; give
    lambda: gd.gaffer_asset(due="source")(work),  # due is a str; give
    lambda: gd.gaffer_asset(work),  # give due= by its name
    lambda: gd.gaffer_asset(due=DUE, shedule=None),  # shedule= is unknown; did you mean schedule=
    lambda: gd.gaffer_asset(due=DUE, parallel=2),  # parallel= belongs in due=gd.PendingRows.…, parallel=….; write
    lambda: gd.gaffer_asset(due=gd.Elapsed(), settle="1h"),  # settle= belongs in due=gd.Elapsed.…, settle=
    lambda: gd.gaffer_asset(due=DUE, batch_rows=5),  # batch_rows= belongs in bounds=gd.Bounds
    lambda: gd.gaffer_asset(due=DUE, grace="5m"),  # grace= belongs in alerts=gd.Alerts
    lambda: gd.gaffer_asset(due=DUE, timezone="UTC"),  # timezone= belongs in schedule=gd.Schedule
    lambda: gd.gaffer_asset(due=DUE, retry_policy=dg.RetryPolicy()),  # retry_policy= is not taken: the next tick
    lambda: gd.gaffer_asset(due=DUE)(no_batch),  # 'no_batch' takes no Batch; write
    lambda: gd.gaffer_asset(due=DUE)(with_context),  # 'with_context' takes 'batch', which is no resource
    lambda: gd.gaffer_asset(due=DUE)(later),  # 'later' is a generator or async function.*; write
    lambda: gd.gaffer_asset(due=DUE)(gd.gaffer_asset(due=DUE)(work)),  # 'work' is an asset already; put
    lambda: gd.gaffer_asset(due=DUE, sql="select * from due"),  # sql= has no function to be named after; give
    lambda: gd.gaffer_asset(due=DUE, sql="drop table t", name="x"),  # sql= begins with 'drop'; write
    lambda: gd.build_definitions(resource=None),  # give either resource= or resources=
    lambda: gd.build_definitions(work, resource=RESOURCE),  # function is no asset; give
]
"""


def test_each_mistake_is_told_with_its_field_its_cure_and_its_line(tmp_path: Path) -> None:
    file = tmp_path / "mistakes.py"
    file.write_text(MISTAKES)
    module = type(sys)("mistakes")
    exec(compile(MISTAKES, str(file), "exec"), vars(module))
    lines = {n: line for n, line in enumerate(MISTAKES.splitlines(), 1) if "lambda: " in line}
    assert len(lines) == len(module.MISTAKES)
    for mistake, (number, line) in zip(module.MISTAKES, lines.items(), strict=True):
        with pytest.raises(gd.GafferError) as refusal:
            mistake()
        told = str(refusal.value)
        assert re.search(line.partition("  # ")[2], told), told
        assert told.endswith(f" ({file}:{number})"), told
        assert [each for each in refusal.traceback if str(each.path) == str(file)][-1].lineno + 1 == number
    with pytest.raises(
        gd.GafferError, match="'in_sql' is done by sql=, and is put on the function 'in_python'"
    ) as both:
        module.decorated_with_both()
    first = MISTAKES.splitlines().index("def decorated_with_both() -> None:") + 1
    assert str(both.value).endswith(f" ({file}:{first + 1})")


def test_what_dagster_checks_itself_points_at_the_line_too(tmp_path: Path) -> None:
    with pytest.raises(dg.DagsterInvalidDefinitionError, match="Invalid owner 'me'"):
        gd.gaffer_asset(due=DUE, owners=["me"])(jobs.copy_rows)


def test_a_place_in_a_library_is_not_said() -> None:
    told = CliRunner().invoke(main, ["preview", "61 * * * *"]).output
    assert told.strip().endswith("write 0 to 59")


def test_dagster_shows_the_mistake_and_where_it_is(tmp_path: Path) -> None:
    file = tmp_path / "definitions.py"
    file.write_text('import gaffer_dagster as gd\n\ndue = gd.NewRows("t", "id")\n\nwhen = gd.Schedule("61 * * * *")\n')
    done = subprocess.run(
        [str(BIN / "dagster"), "definitions", "validate", "-f", str(file)],
        cwd=tmp_path,
        env={**os.environ, "DAGSTER_HOME": str(tmp_path), "DAGSTER_DISABLE_TELEMETRY": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    told = " ".join((done.stdout + done.stderr).split())
    assert done.returncode != 0
    assert f"field minute: 61 is out of range; write 0 to 59 ({file}:5)" in told


# Types.


WRONG = """
import gaffer_dagster as gd


@gd.gaffer_asset(due=gd.NewRows("t", key="id"))
def wrong_parameter(batch: int) -> None: ...  # the decorator's line is told


@gd.gaffer_asset(due=gd.NewRows("t", key="id"))
def wrong_result(batch: gd.Batch) -> int:
    return 1


gd.gaffer_asset(due="t")
gd.gaffer_asset(due=gd.NewRows("t", key="id"), partitions_def=None)
gd.gaffer_asset(due=gd.NewRows("t", key="id"), sql="select * from due")
gd.NewRows("t", key=1)
gd.Bounds(timeout=20)
gd.build_definitions("t")
gd.GafferComponent(due=gd.Elapsed())
gd.no_such_name
"""


def test_a_wrong_use_is_a_type_error(tmp_path: Path) -> None:
    file = tmp_path / "wrong.py"
    file.write_text(WRONG)
    done = subprocess.run(
        [str(BIN / "basedpyright"), "--pythonpath", sys.executable, str(file)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=150,
    )
    found = {int(line) for line in re.findall(r"wrong\.py:(\d+):\d+ - error", done.stdout)}
    lines = WRONG.splitlines()
    meant = {n for n, line in enumerate(lines, 1) if line.startswith(("@gd", "gd."))}
    assert found == meant, done.stdout


def test_an_asset_whose_key_was_changed_afterwards_is_refused() -> None:
    @gd.gaffer_asset(due=gd.NewRows("source", "id"))
    def copied(batch: gd.Batch) -> None: ...

    changed = copied.with_attributes(asset_key_replacements={dg.AssetKey("copied"): dg.AssetKey(["x", "copied"])})
    with pytest.raises(gd.GafferError, match=r"'x/copied' is job 'copied', whose key was changed .* key_prefix="):
        gd.build_definitions(changed, resource=gd.GafferResource(dsn=dg.EnvVar("GAFFER_DATABASE_URL")))
