"""What `gaffer doctor` and `gaffer dagster sync|check` say of a Dagster instance, and do to it."""

from __future__ import annotations

import json
import shlex
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import sqlalchemy
import time_machine
from dagster._core.remote_origin import InProcessCodeLocationOrigin, RemoteInstigatorOrigin, RemoteRepositoryOrigin
from dagster._core.scheduler.instigation import InstigatorState, InstigatorStatus, ScheduleInstigatorData
from dagster._core.test_utils import create_run_for_test
from dagster._core.types.loadable_target_origin import LoadableTargetOrigin
from dagster._daemon.types import DaemonHeartbeat
from dagster._scheduler import scheduler

import gaffer_dagster as gd
from gaffer_dagster.adapter import instance as adapter
from gaffer_dagster.adapter import pools
from gaffer_dagster.cli.doctor import show
from gaffer_dagster.domain.health import Check, Mark
from gaffer_dagster.errors import BadInputError
from gaffer_dagster.testing import Clock
from tests.dagster.deployment import deployment, shipped_yaml, wait_until
from tests.dagster.moved import AWAKE, Location, at, instance_in, location
from tests.dagster.test_daemons import storage_url
from tests.dagster.test_dev import make_tables
from tests.support import jobs, warm

SLOTS = {"one": 1, "four": 4}
WELL = """
telemetry: {enabled: false}
run_monitoring: {enabled: true}
concurrency: {pools: {granularity: run}}
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As if a daemon were alive, and all was as it should be."""
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "dagster.yaml").write_text(WELL)
    monkeypatch.setenv("DAGSTER_HOME", str(folder))
    with dg.DagsterInstance.get() as instance:
        pools.change(instance, [pools.Change(job, None, count) for job, count in SLOTS.items()])
        beat(instance)
        switch(instance, "gaffer_watch", InstigatorStatus.DECLARED_IN_CODE, sensor=True)
        switch(instance, "one_schedule", InstigatorStatus.DECLARED_IN_CODE)
    return folder


@pytest.fixture
def instance(home: Path) -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.get() as opened:
        yield opened


def beat(instance: dg.DagsterInstance, *, ago: float = 0, who: str = "one", of: str | None = None) -> None:
    for name in instance.get_required_daemon_types() if of is None else [of]:
        instance.add_daemon_heartbeat(DaemonHeartbeat(time.time() - ago, name, who, []))


def switch(
    instance: dg.DagsterInstance,
    name: str,
    status: InstigatorStatus,
    *,
    sensor: bool = False,
    where: str = "shop",
    ago: float | None = None,
) -> None:
    """`ago`: since when a daemon has last noted that it has it, in seconds."""
    from dagster._core.definitions.run_request import InstigatorType
    from dagster._core.scheduler.instigation import SensorInstigatorData

    target = LoadableTargetOrigin(module_name="shop", executable_path=sys.executable)
    location = InProcessCodeLocationOrigin(target, location_name=where)
    origin = RemoteInstigatorOrigin(RemoteRepositoryOrigin(location, "__repository__"), name)
    kind = InstigatorType.SENSOR if sensor else InstigatorType.SCHEDULE
    at = None if ago is None else time.time() - ago
    data = (
        SensorInstigatorData(last_tick_start_timestamp=at)
        if sensor
        else ScheduleInstigatorData("* * * * *", last_iteration_timestamp=at)
    )
    state = InstigatorState(origin, kind, status, data)
    known = instance.get_instigator_state(state.instigator_origin_id, state.selector_id)
    (instance.add_instigator_state if known is None else instance.update_instigator_state)(state)


def run_of(instance: dg.DagsterInstance, status: dg.DagsterRunStatus, **tags: str) -> str:
    with_job = {"gaffer/job": "one", **{name.replace("__", "/"): value for name, value in tags.items()}}
    return create_run_for_test(instance, job_name="one_job", status=status, tags=with_job).run_id


def not_well(slots: dict[str, int] = SLOTS) -> dict[str, Check]:
    return {check.name: check for check in adapter.examine(slots) if check.mark is not Mark.OK}


@pytest.mark.usefixtures("home")
def test_where_all_is_well_nothing_else_is_said() -> None:
    assert not_well() == {}
    assert len(adapter.examine(SLOTS)) > 12


# ── how it is set up ─────────────────────────────────────────────────────────────────────────────────────────────────

YAML = [
    ("telemetry: {enabled: false}\nconcurrency: {pools: {granularity: run}}\n", "run monitoring", Mark.WARNING, "off"),
    ("telemetry: {enabled: false}\nrun_monitoring: {enabled: true}\n", "granularity", Mark.WARNING, "op (the default)"),
    (WELL.replace("granularity: run", "granularity: op"), "granularity", Mark.WARNING, "op: a run that is killed"),
    (WELL.replace("{pools", "{runs: {max_concurrent_runs: 0}, pools"), "run queue", Mark.WRONG, "no run ever begins"),
    (WELL + "python_logs: {python_log_level: ERROR}\n", "logs", Mark.WARNING, "python_log_level is ERROR"),
    (WELL + "run_monitorin: {enabled: true}\n", "instance", Mark.WRONG, 'config entry "run_monitorin" at the root.'),
    (WELL.replace("enabled: true", "enabled: maybe"), "instance", Mark.WRONG, "cannot be opened"),
    (WELL + "storage: {postgres: {postgres_url: {env: NO_SUCH}}}\n", "instance", Mark.WRONG, "NO_SUCH"),
    (
        WELL + "storage: {postgres: {postgres_url: 'postgresql+psycopg2://u:canary@127.0.0.1:1/x'}}\n",
        "instance", Mark.WRONG, "refused",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("yaml", "name", "mark", "said"), YAML, ids=[f"{row[1]} {row[3]}" for row in YAML])
def test_a_dagster_yaml_that_does_harm_is_told_what_to_add(
    home: Path, yaml: str, name: str, mark: Mark, said: str
) -> None:
    (home / "dagster.yaml").write_text(yaml)
    found = not_well()
    assert set(found) == {name}, found
    assert (found[name].mark, said in found[name].found) == (mark, True), found[name]
    assert "canary" not in repr(found)
    assert len(found[name].found) < 400
    cure = found[name].cure or ""
    if cure.startswith(("concurrency:", "run_monitoring:", "python_logs:")):  # paste it in the place of what is there
        kept = [line for line in WELL.splitlines() if not line.startswith(cure.partition(":")[0])]
        (home / "dagster.yaml").write_text("\n".join([*kept, cure, ""]))
        assert name not in not_well()


@pytest.mark.parametrize(
    "given",
    [
        "storage: {postgres: {postgres_url: 'postgresql://u:canary@127.0.0.1:1/x'}}",
        "storage: {postgres: {postgres_url: {env: STORAGE_URL}}}",
        "storage: {postgres: {postgres_db: {username: u, password: canary, hostname: h, db_name: x}}}",
        "run_storage: {module: dagster_postgres.run_storage, class: PostgresRunStorage, config: {postgres_url: "
        "'postgresql://u:canary@127.0.0.1:1/x'}}",
    ],
)
def test_the_driver_by_which_no_event_can_be_stored_is_told(
    home: Path, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tuple(map(int, sqlalchemy.__version__.split(".")[:2])) >= (2, 1), "there is no trap with this version"
    monkeypatch.setenv("STORAGE_URL", "postgresql://u:canary@127.0.0.1:1/x")
    (home / "dagster.yaml").write_text(f"{WELL}{given}\n")
    found = not_well()
    assert set(found) == {"storage driver"}, found
    assert found["storage driver"].mark is Mark.WRONG
    assert "postgresql+psycopg2" in (found["storage driver"].cure or "")
    assert "canary" not in repr(found)
    with pytest.raises(BadInputError, match="psycopg 3") as refused:
        adapter.open_instance()
    assert "canary" not in str(refused.value)


@pytest.mark.parametrize(
    ("given", "mark", "said"),
    [
        (None, Mark.UNKNOWN, "not set"),
        ("relative", Mark.WRONG, "not absolute"),
        ("/no/such/folder", Mark.WRONG, "is no folder"),
    ],
)
def test_a_home_that_is_none(given: str | None, mark: Mark, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if given is None:
        monkeypatch.delenv("DAGSTER_HOME", raising=False)
    else:
        monkeypatch.setenv("DAGSTER_HOME", given)
    (found,) = adapter.examine(SLOTS)
    assert (found.name, found.mark, said in found.found) == ("home", mark, True), found


def test_a_home_without_configuration_is_told_what_to_write(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "dagster.yaml").unlink()
    found = not_well()
    assert set(found) == {"home", "run monitoring", "granularity"}, found
    show(found.values(), as_json=False)
    shown = capsys.readouterr().out
    pasted = shown[shown.index("cat > ") : shown.index("\nEND\n") + 5]  # the lines as they are on the screen
    subprocess.run(["sh", "-c", pasted], check=True)
    assert not_well() == {}
    assert pools.limits(dg.DagsterInstance.get()).default == 1


# ── pools ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("job", "limit", "mark", "said"),
    [
        ("four", 2, Mark.WARNING, "gaffer/four lets 2 of 4 work"),
        ("one", 2, Mark.WARNING, "gaffer/one lets 2 of 1 work"),
        ("one", 0, Mark.WRONG, "no run of one can begin"),
        ("one", None, Mark.WARNING, "gaffer/one lets any number of 1 work"),
    ],
)
def test_a_pool_whose_limit_is_not_the_slots_is_told(
    instance: dg.DagsterInstance, job: str, limit: int | None, mark: Mark, said: str
) -> None:
    pools.change(instance, [pools.Change(job, None, limit)])
    found = not_well()
    assert (set(found), found["pools"].mark) == ({"pools"}, mark), found
    assert said in found["pools"].found
    assert found["pools"].cure == "gaffer dagster sync"
    pools.change(instance, pools.changes(instance, SLOTS, ()))  # what sync does
    assert not_well() == {}


def test_a_slot_of_a_run_that_is_over_is_told_and_given_back_by_its_cure(instance: dg.DagsterInstance) -> None:
    alive = run_of(instance, dg.DagsterRunStatus.STARTED)
    run = run_of(instance, dg.DagsterRunStatus.FAILURE)
    for each, pool in ((alive, "gaffer/four"), (run, "gaffer/one")):
        assert instance.event_log_storage.claim_concurrency_slot(pool, each, "step").is_claimed
    found = not_well()
    assert (set(found), found["places"].mark) == ({"places"}, Mark.WRONG), found
    assert run in found["places"].found
    paste(found["places"].cure)
    assert not_well() == {}
    assert instance.event_log_storage.get_concurrency_run_ids() == {alive}


def paste(cure: str | None) -> None:
    words = shlex.split(cure or "")
    subprocess.run([warm.folder() / words[0], *words[1:]], check=True, timeout=60)


# ── who runs it ──────────────────────────────────────────────────────────────────────────────────────────────────────

DAEMONS: list[tuple[Callable[[dg.DagsterInstance], None], str, Mark, str]] = [
    (lambda instance: instance.wipe_daemon_heartbeats(), "daemon", Mark.WRONG, "none has ever run"),
    (lambda instance: beat(instance, ago=180), "daemon", Mark.WARNING, "SCHEDULER last 3 minutes"),
    (lambda instance: beat(instance, ago=3600), "daemon", Mark.WRONG, "MONITORING last 1 hour"),
    (lambda instance: beat(instance, ago=3600, of="SENSOR"), "daemon", Mark.WRONG, "SENSOR last 1 hour"),
    (lambda instance: beat(instance, who="two", of="SENSOR"), "two daemons", Mark.WARNING, "2 are alive"),
]


@pytest.mark.parametrize(("do", "name", "mark", "said"), DAEMONS, ids=[row[3] for row in DAEMONS])
def test_daemons_that_are_not_as_they_should_be(
    instance: dg.DagsterInstance, do: Callable[[dg.DagsterInstance], None], name: str, mark: Mark, said: str
) -> None:
    do(instance)
    found = not_well()
    assert (set(found), found[name].mark) == ({name}, mark), found
    assert said in found[name].found


def test_two_daemons_that_raced_are_known_by_the_runs_of_their_ticks(
    url: str, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dagster's own scheduler, twice. A tick of a job with four slots has four runs; where two daemons look for what
    there is before either has made it, it has eight, and two rows."""
    due = gd.PendingRows("source", "id", pending="done_at is null", done="done_at = now()", parallel=4)
    began = at("2027-03-01T05:30Z")
    with time_machine.travel(began):
        asset = gd.gaffer_asset(due=due, name="four", schedule=gd.Schedule("0 * * * *"))(lambda batch: None)
        definitions = gd.build_definitions(asset, resource=gd.GafferResource(dsn=url))

    def told() -> Check:
        return {check.name: check for check in adapter.examine(SLOTS)}["two daemons"]

    def iterated(daemon: Location) -> None:
        list(daemon.iteration())

    with instance_in(tmp_path, queued=True) as instance, location(instance, clock, definitions) as one:
        two = Location(instance, one.workspace, clock)
        one.evaluate(began)
        two.evaluate(began)
        one.evaluate(at("2027-03-01T06:00Z") + AWAKE)
        two.evaluate(at("2027-03-01T06:00Z") + AWAKE)
        assert len(one.runs("four")) == 4
        assert told().mark is Mark.OK
        for run in one.runs("four"):  # or it says that they will cover the next tick
            instance.report_run_canceled(run)
        both = threading.Barrier(2, timeout=60)

        def meet(name: str, whose: Any) -> None:
            asks = getattr(whose, name)

            def asked(*given: Any, **named: Any) -> Any:
                answer = asks(*given, **named)
                both.wait()
                return answer

            monkeypatch.setattr(whose, name, asked)

        meet("get_ticks", instance)
        meet("_get_existing_run_for_request", scheduler)
        with one.it_is(at("2027-03-01T07:00Z") + AWAKE), ThreadPoolExecutor(2) as threads:
            list(threads.map(iterated, (one, two)))
        monkeypatch.undo()
        assert (one.errors, two.errors) == ([], [])
        late = one.runs("four")[4:]
        assert (len(late), len({run.tags["dagster/tick"] for run in late})) == (8, 2)
        found = told()
    assert found.mark is Mark.WARNING
    assert "two runs for one tick, such as four_schedule at 2027-03-01T07:00:00+00:00" in found.found


@pytest.mark.parametrize(("name", "kind"), [("gaffer_watch", "sensor"), ("one_schedule", "schedule")])
def test_what_is_switched_off_is_told(instance: dg.DagsterInstance, name: str, kind: str) -> None:
    switch(instance, "somebody_elses", InstigatorStatus.STOPPED)
    assert not_well() == {}
    switch(instance, name, InstigatorStatus.STOPPED, sensor=kind == "sensor")
    found = not_well()
    assert (set(found), found["switches"].mark) == ({"switches"}, Mark.WRONG), found
    assert f"the {kind} {name} of shop is switched off" in found["switches"].found
    switch(instance, name, InstigatorStatus.RUNNING, sensor=kind == "sensor")
    assert not_well() == {}


@pytest.mark.parametrize(("name", "kind"), [("gaffer_watch", "sensor"), ("one_schedule", "schedule")])
def test_what_is_off_where_no_code_is_any_more_is_a_warning_that_can_be_ended(
    instance: dg.DagsterInstance, name: str, kind: str
) -> None:
    day = 86_400
    switch(instance, name, InstigatorStatus.STOPPED, sensor=kind == "sensor", where="old shop", ago=day)
    assert not_well()["switches"].mark is Mark.WRONG, "no daemon has looked at any other for a while"
    switch(instance, "gaffer_watch", InstigatorStatus.RUNNING, sensor=True, ago=30)
    found = not_well()
    assert (set(found), found["switches"].mark) == ({"switches"}, Mark.WARNING), found
    assert "the code location old shop is perhaps gone" in found["switches"].found
    switch(instance, "another_schedule", InstigatorStatus.RUNNING, where="old shop", ago=3600)
    assert not_well()["switches"].mark is Mark.WRONG, "its code is there"
    switch(instance, "another_schedule", InstigatorStatus.RUNNING, where="old shop", ago=day)
    paste((not_well()["switches"].cure or "").partition("   #")[0])
    assert not_well() == {}


def test_a_sensor_that_nobody_has_seen_is_told(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    (fresh / "dagster.yaml").write_text((home / "dagster.yaml").read_text())
    monkeypatch.setenv("DAGSTER_HOME", str(fresh))
    assert "no daemon has seen the sensor gaffer_watch yet" in not_well()["switches"].found


def test_a_run_that_is_started_for_ever_is_told_and_ended_by_its_cure(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(instance, dg.DagsterRunStatus.STARTED, dagster__max_runtime="1")
    run_of(instance, dg.DagsterRunStatus.STARTED, dagster__max_runtime="3600")
    assert not_well() == {}
    monkeypatch.setattr(adapter, "_BACKSTOP", timedelta())
    found = wait_until(not_well, 30, "the run has lasted for a second")
    assert (set(found), found["runs"].mark) == ({"runs"}, Mark.WRONG), found
    assert f"{run} of one, STARTED" in found["runs"].found
    paste(found["runs"].cure)
    assert not_well() == {}


def test_a_run_that_does_not_begin_is_told(instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(instance, dg.DagsterRunStatus.NOT_STARTED)
    assert not_well() == {}
    monkeypatch.setattr(adapter, "_QUEUED", timedelta())
    found = not_well()
    assert (set(found), found["runs"].mark, run in found["runs"].found) == ({"runs"}, Mark.WARNING, True), found


@pytest.mark.usefixtures("home")
def test_a_dagster_without_a_name_that_is_private_to_it_is_what_cannot_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("dagster._core.instance.ref.InstanceRef")
    found = not_well()
    assert found["storage driver"].mark is Mark.UNKNOWN
    assert "InstanceRef" in found["storage driver"].found


def test_a_question_that_fails_leaves_the_others(home: Path) -> None:
    """A storage that is broken in one place."""
    with closing(sqlite3.connect(home / "schedules" / "schedules.db")) as connection:
        connection.executescript("drop table instigators; drop table jobs")
    found = not_well()
    assert (found["switches"].mark, set(found)) == (Mark.UNKNOWN, {"switches"}), found


# ── sync ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

MODULE = """
import gaffer_dagster as gd

one = gd.gaffer_asset(due=gd.NewRows("source", "id"), name="one")(lambda batch: None)
due = gd.PendingRows("source", "id", pending="done_at is null", done="done_at = now()", parallel=4)
four = gd.gaffer_asset(due=due, name="four")(lambda batch: None)
"""


def gaffer(url: str | None, home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return warm.gaffer(url, home, *words, DAGSTER_HOME=str(home))


def lines(done: subprocess.CompletedProcess[Any]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in done.stdout.splitlines()]


def limits(home: Path) -> dict[str, int]:
    with dg.DagsterInstance.from_config(str(home)) as instance:
        return dict(pools.limits(instance).own)


@pytest.fixture
def shop(url: str, home: Path) -> str:
    (home / "shop.py").write_text(MODULE)
    assert gaffer(url, home, "register", "shop").returncode == 0
    return url


def test_sync_sets_what_is_not_right_and_notes_who_did(shop: str, home: Path, instance: dg.DagsterInstance) -> None:
    pools.change(instance, [pools.Change("four", 4, 2), pools.Change("stranger", None, 7)])
    asked = gaffer(shop, home, "dagster", "sync")
    assert asked.returncode == 1
    assert "Change gaffer/four (2 → 4)?" in asked.stdout
    assert "give --yes" in asked.stderr
    assert limits(home) == {"gaffer/one": 1, "gaffer/four": 2, "gaffer/stranger": 7}
    done = gaffer(shop, home, "dagster", "sync", "--yes", "--by", "ann", "--reason", "new slots")
    assert (done.returncode, done.stdout) == (0, "gaffer/four: 2 → 4\n"), done.stderr
    assert limits(home) == {"gaffer/one": 1, "gaffer/four": 4, "gaffer/stranger": 7}
    noted = "select job, by, reason, details from gaffer.operator_action where action = 'pool'"
    assert jobs.query(shop, noted) == [("four", "ann", "new slots", {"pool": "gaffer/four", "from": 2, "to": 4})]
    assert "Dagster's pool gaffer/four limited to 4" in gaffer(shop, home, "audit").stdout
    again = gaffer(shop, home, "dagster", "sync", "--yes")
    assert (again.returncode, again.stdout) == (0, "the pools of 2 jobs are as they should be\n")
    assert len(jobs.query(shop, noted)) == 1


def test_sync_takes_away_the_limits_of_retired_jobs_only(shop: str, home: Path) -> None:
    jobs.execute(shop, "update gaffer.job set retired_at = now() where name = 'one'")
    done = gaffer(shop, home, "dagster", "sync", "--yes", "--json")
    assert done.returncode == 0, done.stderr
    assert lines(done) == [{"pool": "gaffer/one", "before": 1, "after": None}]
    assert limits(home) == {"gaffer/four": 4}


@pytest.mark.parametrize("default", [1, None])
def test_what_the_default_says_rightly_is_left_alone(shop: str, home: Path, default: int | None) -> None:
    given = "run" if default is None else f"run, default_limit: {default}"
    (home / "dagster.yaml").write_text(WELL.replace("granularity: run", f"granularity: {given}"))
    with dg.DagsterInstance.from_config(str(home)) as instance:
        pools.change(instance, [pools.Change(job, count, None) for job, count in SLOTS.items()])
        instance.event_log_storage.initialize_concurrency_limit_to_default("gaffer/one")
        instance.event_log_storage.initialize_concurrency_limit_to_default("gaffer/four")
    assert gaffer(shop, home, "dagster", "sync", "--yes").returncode == 0
    assert limits(home) == {"gaffer/four": 4, **({} if default == 1 else {"gaffer/one": 1})}
    assert "pools" not in not_well()


@pytest.mark.parametrize("given", ["{granularity: op}", "{default_limit: 1}"])
def test_sync_refuses_where_a_limit_would_mute_a_job(shop: str, home: Path, given: str) -> None:
    (home / "dagster.yaml").write_text(f"telemetry: {{enabled: false}}\nconcurrency: {{pools: {given}}}\n")
    before = limits(home)
    jobs.execute(shop, "update gaffer.job set slots = 2")
    done = gaffer(shop, home, "dagster", "sync", "--yes")
    assert done.returncode == 1
    assert "granularity: run" in done.stderr
    assert "Traceback" not in done.stderr
    assert limits(home) == before


def test_sync_goes_by_the_code_where_there_is_no_database(shop: str, home: Path, instance: dg.DagsterInstance) -> None:
    pools.change(instance, [pools.Change("four", 4, 2)])
    away = "postgresql://somebody:canary@127.0.0.1:1/nowhere"
    refused = gaffer(away, home, "dagster", "sync", "--yes")
    assert refused.returncode == 75
    done = gaffer(away, home, "dagster", "sync", "--yes", "-m", "shop")
    assert (done.returncode, done.stdout) == (0, "gaffer/four: 2 → 4\n"), done.stderr
    assert "not noted" in done.stderr
    assert "canary" not in done.stdout + done.stderr + refused.stderr
    assert jobs.query(shop, "select count(*) from gaffer.operator_action where action = 'pool'") == [(0,)]


def test_sync_says_why_it_is_not_noted_who_did_it(shop: str, home: Path, instance: dg.DagsterInstance) -> None:
    pools.change(instance, [pools.Change("four", 4, 2)])
    jobs.execute(shop, "delete from gaffer.migration where number = (select max(number) from gaffer.migration)")
    done = gaffer(shop, home, "dagster", "sync", "--yes", "-m", "shop")
    assert (done.returncode, done.stdout) == (0, "gaffer/four: 2 → 4\n"), done.stderr
    assert "not noted who did it" in done.stderr
    assert "gaffer migrate" in done.stderr


def test_the_check_goes_on_where_there_is_no_database(home: Path) -> None:
    done = gaffer("postgresql://somebody:canary@127.0.0.1:1/nowhere", home, "dagster", "check", "--json")
    assert done.returncode == 2, done.stderr
    told = {each["name"]: each for each in lines(done)}
    assert told["jobs"]["mark"] == "cannot tell"
    assert told["daemon"]["mark"] == "ok"
    assert "canary" not in done.stdout + done.stderr


def test_the_doctor_looks_at_both(shop: str, home: Path, instance: dg.DagsterInstance) -> None:
    jobs.execute(shop, "create table source (id int primary key, done_at timestamptz)")
    well = lines(gaffer(shop, home, "doctor", "--json"))
    assert [each for each in well if each["part"] == "dagster" and each["mark"] != "ok"] == []
    instance.wipe_daemon_heartbeats()
    done = gaffer("postgresql://somebody:canary@127.0.0.1:1/nowhere", home, "doctor", "--json", "-m", "shop")
    assert done.returncode == 75, done.stderr
    found = {(each["part"], each["name"]): each["mark"] for each in lines(done)}
    assert found["dagster", "daemon"] == "wrong"
    assert found["dagster", "pools"] == "ok"
    assert found["database", "reachable"] == "wrong"


# ── in earnest ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.timeout(600)
def test_real_daemons(url: str, tmp_path: Path) -> None:
    """What is shipped is well once a daemon runs; a second one, and a sensor that is switched off, are told."""
    make_tables(url)
    yaml = shipped_yaml() + "storage: {postgres: {postgres_url: {env: STORAGE_URL}}}\n"
    with deployment(tmp_path / "home", url, yaml) as made:
        made.environment["STORAGE_URL"] = storage_url(url)

        def found() -> dict[str, Any]:
            done = warm.gaffer(url, made.home, "dagster", "check", "--json", "-f", "definitions.py", **made.environment)
            assert done.returncode in (0, 1), done.stderr
            return {each["name"]: each for each in lines(done) if each["mark"] != "ok"}

        def run(cure: str) -> None:
            subprocess.run(shlex.split(cure), cwd=made.home, env=made.environment, check=True, timeout=120)

        run("dagster instance migrate")
        assert {"daemon", "switches"} <= set(found())
        made.start("dagster-daemon", "run", "-w", "workspace.yaml")
        wait_until(lambda: not {"daemon", "switches"} & set(found()), 120, "the daemon is seen")
        run("dagster sensor stop gaffer_watch -l location -w workspace.yaml")
        off = found()
        print(off)
        assert set(off) <= {"switches", "pools"}
        run(off["switches"]["cure"])
        assert "switches" not in found()
        made.start("dagster-daemon", "run", "-w", "workspace.yaml")
        told = wait_until(lambda: found().get("two daemons"), 120, "two are seen")
        assert "2 are alive" in told["found"]
