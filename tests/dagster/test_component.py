"""`GafferComponent`: what may stand in a `defs.yaml`, what is refused, and that `dg` itself takes it."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any
from uuid import uuid4

import dagster as dg
import pytest
from dagster.components.resolved.errors import ResolutionException
from pydantic import ValidationError

import gaffer_dagster as gd
from gaffer_dagster.adapter.component import GafferComponent
from gaffer_dagster.adapter.definitions import find_jobs
from gaffer_dagster.adapter.yaml_models import descriptions, model_of
from gaffer_dagster.cli.definitions import jobs_in
from gaffer_dagster.store import db, prepare
from tests.support import jobs

BIN = Path(sys.executable).parent
EXAMPLE = Path(__file__).parents[2] / "examples" / "dg"
SECRET = "postgresql://me:s3cret@db/x"
SQL = "insert into target (id) select id from due"

JOB = """
type: gaffer_dagster.GafferComponent
attributes:
  name: {name}
  due: {{new_rows: {{table: source, key: id}}}}
  sql: insert into target (id) select id from due
"""


Project = Callable[[Mapping[str, str]], dg.Definitions]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """Loads a project of `dg` with these files in its folder of definitions."""

    def load(files: Mapping[str, str]) -> dg.Definitions:
        name = f"project_{uuid4().hex[:8]}"
        (tmp_path / name / "defs").mkdir(parents=True)
        (tmp_path / name / "__init__.py").touch()
        (tmp_path / "pyproject.toml").write_text(f'[tool.dg.project]\nroot_module = "{name}"\n')
        for path, text in files.items():
            file = tmp_path / name / "defs" / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text.lstrip("\n"))
        monkeypatch.syspath_prepend(str(tmp_path))
        return dg.load_from_defs_folder(path_within_project=tmp_path)

    return load


def root_cause(error: BaseException | None) -> BaseException:
    while error is not None and error.__cause__ is not None:
        error = error.__cause__
    assert error is not None
    return error


def attributes(**options: Any) -> dict[str, Any]:
    return {"name": "copied", "due": {"new_rows": {"table": "source", "key": "id"}}, "sql": SQL, **options}


def load(**options: Any) -> GafferComponent:
    given = {name: value for name, value in attributes(**options).items() if value is not None}
    return GafferComponent.from_attributes_dict(attributes=given)


# What may stand there.


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"new_rows": {"table": "t", "key": "id", "where": "a > 1"}}, gd.NewRows("t", "id", where="a > 1")),
        (
            {"new_rows": {"table": "t", "key": "id", "cursor": "at", "settle": "10m", "start": "beginning"}},
            gd.NewRows("t", "id", cursor="at", settle="10m"),
        ),
        (
            {
                "pending_rows": {
                    "table": "t",
                    "key": "id",
                    "pending": "done_at is null",
                    "done": "done_at = now()",
                    "attempts": 3,
                    "parallel": 2,
                    "backoff": "2m",
                }
            },
            gd.PendingRows(
                "t", "id", pending="done_at is null", done="done_at = now()", attempts=3, parallel=2, backoff="2m"
            ),
        ),
        ({"each_interval": {}}, gd.EachInterval()),
        (
            {"each_interval": {"cron": "@daily", "settle": "5m", "start": "2024-01-01", "until": "2025-01-01"}},
            gd.EachInterval("@daily", settle="5m", start="2024-01-01", until="2025-01-01"),
        ),
        ({"elapsed": {}}, gd.Elapsed()),
        (
            {"elapsed": {"slice": "1h", "settle": "2m", "start": "2024-01-01"}},
            gd.Elapsed("1h", settle="2m", start="2024-01-01"),
        ),
    ],
)
def test_each_kind_of_due_takes_all_its_options(given: dict[str, Any], meant: Any) -> None:
    assert load(due=given, schedule={"cron": "@daily"}).due == meant
    (kind,) = given
    assert set(given[kind]) <= set(inspect.signature(type(meant)).parameters)


def test_everything_else_is_as_in_python() -> None:
    yaml = """
name: copied
key_prefix: [raw, flights]
due: {new_rows: {table: source, key: id}}
sql: insert into target (id) select id from due
schedule: {cron: "0 2 * * *", timezone: Europe/Berlin, missing_hour: skip, repeated_hour: first}
bounds: {batch_rows: 10, batches: 20, timeout: 20m, batch_timeout: 2m}
alerts:
  {grace: 30m, failures: 2, capped: 5, backlog: 6h, stalled: 20m, takeovers: 2, pause: 3d, remind: 12h,
   receivers: [oncall], heartbeat: PING_URL}
exclusion: advisory
max_late: 2h
protect: [target]
deps: [raw/source]
description: Copies.
group_name: reports
owners: ["team:data"]
tags: {one: "1"}
kinds: [postgres, report]
metadata: {answer: 42}
code_version: "7"
"""
    component = GafferComponent.resolve_from_yaml(yaml)
    meant = gd.gaffer_asset(
        name="copied",
        key_prefix=["raw", "flights"],
        due=gd.NewRows("source", "id"),
        sql=SQL,
        schedule=gd.Schedule("0 2 * * *", "Europe/Berlin", missing_hour="skip", repeated_hour="first"),
        bounds=gd.Bounds(10, 20, "20m", "2m"),
        alerts=gd.Alerts(
            "30m",
            2,
            capped=5,
            backlog="6h",
            stalled="20m",
            takeovers=2,
            pause="3d",
            remind="12h",
            receivers=["oncall"],
            heartbeat="PING_URL",
        ),
        exclusion="advisory",
        max_late="2h",
        protect=["target"],
        deps=[dg.AssetKey(["raw", "source"])],
        description="Copies.",
        group_name="reports",
        owners=["team:data"],
        tags={"one": "1"},
        kinds={"postgres", "report"},
        metadata={"answer": 42},
        code_version="7",
    )
    made, expected = (next(iter(find_jobs_of(asset).values())).job for asset in (component.asset, meant))
    assert made.spec == expected.spec
    assert made.definition.work_hash == expected.definition.work_hash
    (spec,), (wanted,) = component.asset.specs, meant.specs
    assert spec == wanted
    # All that there is to be given was given.
    given = GafferComponent.model().model_fields.keys() - {"function", "database_url_variable"}
    assert {line.partition(":")[0] for line in yaml.splitlines() if line[:1].isalpha()} == given


def find_jobs_of(asset: dg.AssetsDefinition) -> dict[str, Any]:
    module = type(sys)("a_module")
    module.asset = asset  # type: ignore[attr-defined]
    return find_jobs(module)


def test_no_default_is_written_twice_with_two_values() -> None:
    in_python = inspect.signature(gd.gaffer_asset).parameters
    own = {"function", "database_url_variable", "name", "due", "sql"}
    for each in fields(GafferComponent):
        if each.name not in own:
            assert each.default is not MISSING
            assert each.default == in_python[each.name].default, each.name
    assert set(in_python) - {each.name for each in fields(GafferComponent)} == {
        *("positional", "others", "database", "op_tags", "required_resource_keys", "hooks", "automation_condition")
    }


def test_each_field_says_what_it_is_for_and_its_default() -> None:
    schema = GafferComponent.model().model_json_schema()
    assert set(schema["$defs"]) == {
        *("Due", "NewRows", "PendingRows", "EachInterval", "Elapsed", "Schedule", "Bounds", "Alerts")
    }
    for model in (schema, *schema["$defs"].values()):
        assert model["additionalProperties"] is False
        for name, field in model["properties"].items():
            said = field if "description" in field else schema["$defs"][field["$ref"].rpartition("/")[2]]
            assert len(said["description"]) > 10, (model["title"], name)
            assert "default" in field or name in model["required"], (model["title"], name)
    assert schema["$defs"]["Bounds"]["properties"]["batches"]["default"] == 100
    assert schema["$defs"]["EachInterval"]["properties"]["settle"]["default"] == "1m"
    assert descriptions(gd.Bounds)["batches"] == "Batches in one run at most (100)."


def test_an_option_that_its_docstring_is_silent_about_is_noticed() -> None:
    class Silent:
        """Says nothing of it."""

        def __init__(self, option: int = 1) -> None: ...

    with pytest.raises(KeyError, match="option"):
        model_of(Silent)


def test_templates_are_filled_in_and_other_text_stays_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE", "flights")
    component = load(due={"new_rows": {"table": "{{ env.SOURCE }}", "key": "id", "where": "True"}}, code_version="1")
    assert component.due == gd.NewRows("flights", "id", where="True")
    assert component.code_version == "1"


# What is refused.


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"due": {"new_rows": {"table": "t", "key": "id", "settle": "1h"}}},
            "due.new_rows.settle: .*settle='1h' is not",
        ),
        ({"due": {}}, "attributes.due: nothing is given; give one of new_rows, pending_rows, each_interval, elapsed"),
        (
            {"due": {"elapsed": {}, "each_interval": {}}},
            "attributes.due: each_interval and elapsed is given; give one of",
        ),
        ({"schedule": {"cron": "61 * * * *"}}, "attributes.schedule.* minute: 61 is out of range; write 0 to 59"),
        ({"schedule": {"cron": "@daily", "timezone": "Berlin"}}, "attributes.schedule.*'Berlin'"),
        ({"bounds": {"timeout": "20 minutes"}}, "attributes.bounds.timeout: .*'20 minutes' is no duration; write"),
        ({"bounds": {"batches": 0}}, "attributes.bounds.batches: .*batches=0 must be"),
        ({"alerts": {"receivers": ["On Call"]}}, "attributes.alerts.receivers: .*'On Call' is no name; use"),
        ({"exclusion": "lock"}, "exclusion\n  Input should be 'fence' or 'advisory'"),
        ({"max_late": "soon"}, "attributes.max_late: .*'soon' is no duration"),
        ({"name": "Copied"}, "attributes: job name 'Copied': use a-z"),
        ({"sql": "drop table source"}, "attributes.sql: sql= begins with 'drop'; write one insert"),
        ({"sql": "select 1"}, "attributes.sql: sql= does not read due"),
        ({"sql": None}, "attributes: job 'copied': give its work as either sql= or function="),
        ({"function": "tests.support.jobs.copy_rows"}, "give its work as either sql= or function="),
        ({"due": {"elapsed": {}}}, "attributes: job 'copied': Elapsed needs a schedule"),
        (
            {"schedule": {"cron": "*/5 * * * *"}, "bounds": {"timeout": "5m"}},
            "attributes.bounds: .*timeout=5m is not shorter than the schedule's smallest interval",
        ),
        ({"owners": ["me"]}, "attributes: Invalid owner 'me'"),
    ],
)
def test_a_bad_value_is_refused_with_its_field_and_the_cure(options: dict[str, Any], told: str) -> None:
    with pytest.raises(Exception, match=told) as refusal:
        load(**options)
    assert "Traceback" not in str(refusal.value)


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("nothing", "'nothing' is no dotted path of a function; write such as"),
        ("a b.c", "is no dotted path"),
        ("no_such_module.work", "there is no module 'no_such_module'; write the whole path"),
        ("tests.no_such_module.work", "there is no module 'tests.no_such_module'"),
        ("tests.support.jobs.no_such", r"jobs.py has no 'no_such'; write a function of that name there"),
        ("tests.support.jobs.LOG", "put on a function that takes a Batch"),
        ("tests.support.jobs.execute", "'execute' takes 'text', which is no resource"),
    ],
)
def test_a_function_is_looked_for_when_the_file_is_loaded(path: str, told: str) -> None:
    with pytest.raises(Exception, match=told):
        load(sql=None, function=path)


@pytest.mark.parametrize(
    "given",
    [SECRET, "{{ env.GAFFER_DATABASE_URL }}", f"{{{{ env('NO_SUCH', '{SECRET}') }}}}", "local", "gaffer_database_url"],
)
def test_a_url_in_place_of_its_name_is_refused_and_not_shown(
    project: Project, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GAFFER_DATABASE_URL", SECRET)
    text = JOB.format(name="copied") + f'  database_url_variable: "{given}"\n'
    with pytest.raises(Exception, match="Error while loading component") as refusal:
        project({"copied/defs.yaml": text})
    cause = root_cause(refusal.value)
    assert "no name of an environment variable" in str(cause)
    assert "defs.yaml:6 - attributes.database_url_variable" in str(cause)
    assert "s3cret" not in str(cause) + str(refusal.value)


def test_a_heartbeat_is_no_url_either(project: Project) -> None:
    text = JOB.format(name="copied") + "  alerts:\n    heartbeat: https://ping.example/s3cret\n"
    with pytest.raises(Exception, match="Error while loading component") as refusal:
        project({"copied/defs.yaml": text})
    assert "defs.yaml:7 - attributes.alerts.heartbeat: " in str(root_cause(refusal.value))
    assert "s3cret" not in str(root_cause(refusal.value))


@pytest.mark.parametrize(
    "given",
    [
        {"database_url_variable": {"password": "s3cret"}},
        {"database_url_variable": ["host=db password=s3cret"]},
        {"alerts": {"heartbeat": ["https://ping.example/s3cret"]}},
        {"alerts": {"receivers": [{"url": "https://hooks.example/s3cret"}]}},
        {"alerts": {"receivers": "https://hooks.example/s3cret"}},
        {"alerts": "https://hooks.example/s3cret"},
        {"name": None, "alerts": {"dsn": "host=db password=s3cret"}},
        {"name": None, "database_url_variable": "host=db password=s3cret"},
    ],
)
def test_a_secret_of_the_wrong_form_or_place_is_not_shown(given: dict[str, Any]) -> None:
    with pytest.raises((ValidationError, ResolutionException)) as refusal:
        load(**given)
    assert "s3cret" not in str(refusal.value)


@pytest.mark.parametrize("given", [["postgresql://me:s3cret@db/x"], {"url": "s3cret"}])
def test_a_resource_of_the_wrong_form_does_not_show_it(given: Any) -> None:
    with pytest.raises(ValidationError, match="dsn") as refusal:
        gd.GafferResource(dsn=given)
    assert "s3cret" not in str(refusal.value)


# One code location.


def names(found: Any) -> list[str]:
    return sorted(each.name for each in found or [])


def test_the_components_of_a_location_share_one_sensor_and_know_each_other(project: Project) -> None:
    other = JOB.format(name="other") + "  database_url_variable: CRM_URL\n  schedule: {cron: '@daily'}\n"
    defs = project(
        {
            "b/defs.yaml": JOB.format(name="one") + "---" + JOB.format(name="two"),
            "a/deep/defs.yaml": other,
            "theirs.py": "import dagster as dg\n\n\n@dg.asset(deps=['one'])\ndef theirs() -> None: ...\n",
        }
    )
    dg.Definitions.validate_loadable(defs)
    assert names(defs.sensors) == ["gaffer_watch"]
    operator = {name for name in names(defs.jobs) if name.startswith("gaffer_")}
    assert operator  # one of each for all of them, and no name twice
    assert sorted({*names(defs.jobs)} - operator) == ["one_job", "other_job", "two_job"]
    assert names(defs.schedules) == ["other_schedule"]
    assert set(defs.resources or {}) == {"gaffer", "gaffer_crm_url"}
    keys = {key.to_user_string() for key in defs.resolve_asset_graph().get_all_asset_keys()}
    assert keys == {"one", "two", "other", "theirs"}
    assert len(defs.resolve_asset_graph().asset_check_keys) == 6
    module = type(sys)("a_module")
    module.defs = defs  # type: ignore[attr-defined]
    found = find_jobs(module)
    assert {name: job.job.known for name, job in found.items()} == {key: {"one", "two", "other"} for key in found}
    assert [name for name, job in found.items() if job.job.database != "gaffer"] == ["other"]


def test_what_dagster_changes_in_an_asset_leaves_the_job_known(project: Project) -> None:
    text = JOB.format(name="copied") + "post_processing:\n  assets:\n    - attributes: {group_name: posted}\n"
    defs = project({"a/defs.yaml": text})
    (spec,) = defs.resolve_all_asset_specs()
    assert spec.group_name == "posted"
    module = type(sys)("a_module")
    module.defs = defs  # type: ignore[attr-defined]
    assert set(find_jobs(module)) == {"copied"}


def test_two_components_of_one_name_are_refused(project: Project) -> None:
    with pytest.raises(Exception, match="Error while building definitions") as refusal:
        project({"a/defs.yaml": JOB.format(name="same"), "b/defs.yaml": JOB.format(name="same")})
    assert "job 'same' is given twice" in str(root_cause(refusal.value))


PYTHON = """
import dagster as dg
import gaffer_dagster as gd


@gd.gaffer_asset(due=gd.NewRows("source", "id"))
def in_python(batch: gd.Batch) -> None: ...

"""


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ("", "jobs.py has a @gaffer_asset"),
        (
            "defs = gd.build_definitions(in_python, resource=gd.GafferResource(dsn=dg.EnvVar('GAFFER_DATABASE_URL')))",
            "jobs.py calls build_definitions",
        ),
        (
            "@dg.definitions\ndef defs() -> dg.Definitions:\n"
            "    return gd.build_definitions(in_python, resource=gd.GafferResource(dsn=dg.EnvVar('URL')))",
            "jobs.py calls build_definitions",
        ),
    ],
)
@pytest.mark.parametrize("folder", ["a", "z"])
def test_jobs_of_python_files_beside_components_are_refused(
    project: Project, more: str, told: str, folder: str
) -> None:
    with pytest.raises(Exception, match="Error while building definitions") as refusal:
        project({"m/defs.yaml": JOB.format(name="copied"), f"{folder}/jobs.py": PYTHON + more})
    cause = str(root_cause(refusal.value))
    assert told in cause
    assert "write the job as a GafferComponent too" in cause


def test_build_definitions_alone_is_as_good(project: Project) -> None:
    more = "defs = gd.build_definitions(in_python, resource=gd.GafferResource(dsn=dg.EnvVar('GAFFER_DATABASE_URL')))"
    assert names(project({"jobs.py": PYTHON + more}).sensors) == ["gaffer_watch"]


def test_a_file_may_ask_for_what_a_component_defines(project: Project) -> None:
    asking = """
import dagster as dg


@dg.definitions
def defs(context: dg.ComponentLoadContext) -> dg.Definitions:
    found = context.build_defs(context.defs_module_path / "m")
    return dg.Definitions(metadata={"assets": len(list(found.assets or []))})
"""
    defs = project({"a.py": asking, "m/defs.yaml": JOB.format(name="copied")})
    dg.Definitions.validate_loadable(defs)
    assert names(defs.sensors) == ["gaffer_watch"]


IN_PYTHON = """
import dagster as dg
import gaffer_dagster as gd


@dg.component_instance
def load(context: dg.ComponentLoadContext) -> gd.GafferComponent:
    return gd.GafferComponent(
        name="in_python", due=gd.NewRows("source", "id"), sql="select * from due", key_prefix="raw", kinds={"sql"}
    )
"""


def test_a_component_can_be_made_in_python(project: Project) -> None:
    defs = project({"a/component.py": IN_PYTHON, "b/defs.yaml": JOB.format(name="copied")})
    dg.Definitions.validate_loadable(defs)
    assert names(defs.sensors) == ["gaffer_watch"]
    assert {"copied_job", "raw__in_python_job"} <= {*names(defs.jobs)}


def test_one_that_dagster_does_not_count_is_refused(project: Project) -> None:
    hidden = "from __future__ import annotations\n" + IN_PYTHON
    with pytest.raises(Exception, match="Error while building definitions") as refusal:
        project({"a/component.py": hidden, "b/defs.yaml": JOB.format(name="copied")})
    assert "without `from __future__ import annotations`" in str(root_cause(refusal.value))


def test_it_works_outside_of_any_folder(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs.make_source(url, 3)
    monkeypatch.setenv("GAFFER_DATABASE_URL", url)
    defs = dg.build_defs_for_component(load())
    assert names(defs.sensors) == ["gaffer_watch"]
    assert defs.resolve_job_def("copied_job").execute_in_process().success
    assert jobs.query(url, "select count(*) from target") == [(3,)]


# What dg does with it.


def run_dg(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    home = folder / ".home"
    home.mkdir(exist_ok=True)
    (home / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
    return subprocess.run(
        [str(BIN / "dg"), *arguments],
        cwd=folder,
        env={
            **os.environ,
            "DAGSTER_HOME": str(home),
            "HOME": str(home),
            "DAGSTER_DG_UPDATE_CHECK_ENABLED": "0",
            "NO_COLOR": "1",
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=150,
    )


def accepted(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def example(tmp_path: Path) -> Path:
    return Path(shutil.copytree(EXAMPLE, tmp_path / "flights"))


def test_dg_lists_it_and_accepts_the_example(example: Path) -> None:
    listed = json.loads(accepted(run_dg(example, "list", "components", "--json")))["items"]
    (ours,) = [each for each in listed if each["key"].startswith("gaffer_dagster.")]
    assert ours["key"] == "gaffer_dagster.GafferComponent"
    assert ours["summary"].startswith("A scheduled job")
    told = accepted(run_dg(example, "check", "defs"))
    assert "All component YAML validated successfully." in told
    assert "All definitions loaded successfully." in told


def test_the_jobs_of_the_example_run(example: Path, url: str) -> None:
    jobs.execute(url, (example / "tables.sql").read_text())
    with db.connect(url, application_name="test") as connection:
        prepare.apply(connection, prepare.statements(connection, "flights", "id", changed=False))
    jobs.execute(url, "insert into flights select n, 'C' || n %% 3, n from generate_series(1, %s) n", 30)
    for job in ("carriers_job", "delays_job"):
        accepted(run_dg(example, "launch", "--job", job, GAFFER_DATABASE_URL=url))
    assert jobs.query(url, "select carrier, flights from carriers order by 1") == [("C0", 10), ("C1", 10), ("C2", 10)]
    assert jobs.query(url, "select count(*), min(minutes) from delays") == [(15, 16)]
    assert jobs.query(url, "select job, outcome, items from gaffer.job_runs order by id") == [
        ("carriers", "succeeded", 30),
        ("delays", "succeeded", 15),
    ]


def test_the_command_finds_the_jobs_of_a_project(example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(example)
    monkeypatch.syspath_prepend(str(example))
    try:
        assert set(jobs_in(None, "flights.definitions")) == {"carriers", "delays"}
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "flights"]:
            del sys.modules[name]


def test_dg_names_the_word_that_is_wrong(example: Path) -> None:
    file = example / "flights" / "defs" / "carriers" / "defs.yaml"
    file.write_text(file.read_text().replace("timezone:", "timezon:") + "  bounds:\n    timeout: 20\n")
    done = run_dg(example, "check", "yaml", str(file.parent))  # without a path it looks at one file of each type
    assert done.returncode != 0
    assert "defs.yaml:7 - gaffer_dagster.GafferComponent attributes.schedule.timezon " in done.stdout
    assert "('timezon' was unexpected)" in done.stdout
    assert "attributes.bounds.timeout 20 is not of type 'string'" in done.stdout


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            f"database_url_variable: {SECRET}",
            "defs.yaml:16 - attributes.database_url_variable: what is there is no name",
        ),
        (f"database_url_variable: [{SECRET}]", "database_url_variable"),
        (f"dsn: {SECRET}", "Extra inputs are not permitted"),
        (f"group_name: {{a: {SECRET}}}", "Input should be a valid string"),
    ],
)
def test_dg_says_the_line_and_the_cure_and_keeps_a_secret(example: Path, line: str, said: str) -> None:
    folder = example / "flights" / "defs"
    with (folder / "carriers" / "defs.yaml").open("a") as file:
        file.write(f"  {line}\n")
    done = run_dg(example, "check", "defs")
    assert done.returncode != 0
    told = " ".join((done.stdout + done.stderr).split())
    assert said in told
    assert "s3cret" not in told


def test_what_is_scaffolded_loads(example: Path) -> None:
    ours = "gaffer_dagster.GafferComponent"
    accepted(run_dg(example, "scaffold", "defs", ours, "nightly", "--table", "flights", "--cron", "0 2 * * *"))
    accepted(run_dg(example, "scaffold", "defs", ours, "by_hand", "--work", "python"))
    accepted(run_dg(example, "scaffold", "defs", ours, "all_python", "--work", "python", "--format", "python"))
    accepted(run_dg(example, "scaffold", "defs", ours, "Other-Sql", "--format", "python"))
    listed = json.loads(accepted(run_dg(example, "list", "defs", "--json")))
    assert {"nightly", "by_hand", "all_python", "other_sql"} <= {each["asset_key"] for each in listed["assets"]}
    assert [each["name"] for each in listed["sensors"]] == ["gaffer_watch"]
    assert {"nightly_schedule": "0 2 * * *"}.items() <= {
        each["name"]: each["cron_schedule"] for each in listed["schedules"]
    }.items()


def test_a_broken_installation_of_ours_leaves_dg_working(example: Path, tmp_path: Path) -> None:
    """psycopg without a libpq, say: `dg` would stop for every package of the environment."""
    broken = tmp_path / "broken" / "psycopg"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('no pq wrapper available')\n")
    path = os.pathsep.join([str(broken.parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    done = run_dg(example, "list", "components", "--json", PYTHONPATH=path)
    listed = {each["key"] for each in json.loads(accepted(done))["items"]}
    assert "dagster.FunctionComponent" in listed
    assert "gaffer_dagster.GafferComponent" not in listed
    assert "GafferComponent cannot be loaded: no pq wrapper available" in done.stderr
