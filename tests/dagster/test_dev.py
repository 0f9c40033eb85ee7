"""A real `dagster dev` with the shipped dagster.yaml."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from psycopg.conninfo import conninfo_to_dict

from gaffer_dagster.engine.batch import Batch
from gaffer_dagster.testing import scratch_database
from tests.dagster.deployment import Deployment, deployment, shipped_yaml, wait_until
from tests.support import jobs

pytestmark = pytest.mark.timeout(600)


def make_tables(url: str) -> None:
    for job in ("ticking", "asked", "backlog"):
        jobs.make_source(url, table=f"source_{job}")
        jobs.execute(url, f"create table target_{job} (like target)")
    jobs.execute(url, "create table source_claimed (id serial primary key, done_at timestamptz)")
    jobs.execute(url, "create table target_claimed (like target)")
    jobs.execute(url, "create table script (job text primary key, step text)")
    jobs.execute(url, "create table seen (at serial, job text, pid int, backend int)")


@pytest.fixture(scope="module")
def database(server_url: str) -> Iterator[str]:
    with scratch_database(server_url) as url:
        make_tables(url)
        jobs.add_rows(url, 30, table="source_ticking")  # for the first tick, which comes while other tests go on
        yield url


@pytest.fixture(scope="module")
def dagster(database: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with deployment(tmp_path_factory.mktemp("dagster") / "home", database, shipped_yaml()) as made:
        made.start("dagster", "dev", "-h", "127.0.0.1", "-p", str(made.port))
        wait_until(made.is_up, 240, "the webserver")
        made.watch(on=False)
        yield made


def step(url: str, job: str, step: str) -> None:
    jobs.execute(
        url, "insert into script values (%s, %s) on conflict (job) do update set step = excluded.step", job, step
    )


def seen(url: str, job: str, seconds: float = 60) -> tuple[int, int]:
    """Process and backend of the run that is inside its function."""
    found = wait_until(
        lambda: jobs.query(url, "select pid, backend from seen where job = %s", job), seconds, f"{job} at work"
    )
    return found[0][0], found[0][1]


def rows_of(url: str, run: str) -> list[tuple[Any, ...]]:
    return jobs.query(url, "select outcome, items, sqlstate, error from gaffer.job_runs where dagster_run_id = %s", run)


def test_the_materialize_button_goes_the_same_line_in_a_step_process(database: str, dagster: Deployment) -> None:
    jobs.add_rows(database, 10, table="source_asked")
    run = dagster.launch("__ASSET_JOB", "asked", "button")
    assert dagster.finish(run, 150) == "SUCCESS", dagster.events(run)  # the queue may be starting still
    assert rows_of(database, run) == [("succeeded", 10, None, None)]
    events = dagster.events(run)
    lines = [event["message"] for event in events if event["__typename"] == "LogMessageEvent"]
    assert any("asked leased: " in line for line in lines), lines
    assert any("asked ended: " in line and "outcome=succeeded" in line and "items=10" in line for line in lines), lines
    assert sum(event["__typename"] == "MaterializationEvent" for event in events) == 1


def test_nothing_due_is_a_success_without_a_materialization(database: str, dagster: Deployment) -> None:
    run = dagster.launch("asked_job", "asked", "idle")
    assert dagster.finish(run) == "SUCCESS"
    assert rows_of(database, run) == [("succeeded", 0, None, None)]
    kinds = [event["__typename"] for event in dagster.events(run)]
    assert "ObservationEvent" in kinds
    assert "MaterializationEvent" not in kinds


def test_a_second_run_of_a_job_queues(database: str, dagster: Deployment) -> None:
    jobs.add_rows(database, 5, table="source_asked")
    step(database, "first", "hold")
    first = dagster.launch("__ASSET_JOB", "asked", "first")
    seen(database, "first")
    second = dagster.launch("asked_job", "asked", "second")
    jobs.add_rows(database, 5, table="source_asked")
    # A run that came later and is of another job is through the queue, so the second one was looked at and held back.
    assert dagster.finish(dagster.launch("__ASSET_JOB", "downstream", "probe")) == "SUCCESS"
    assert dagster.status(second) == "QUEUED"
    step(database, "first", "go")
    assert dagster.finish(first) == "SUCCESS"
    assert dagster.finish(second) == "SUCCESS"
    assert [rows_of(database, run)[0][:2] for run in (first, second)] == [("succeeded", 5), ("succeeded", 5)]


def test_two_slots_are_at_work_at_once_though_the_default_is_one_run(database: str, dagster: Deployment) -> None:
    """The sensor lets them, for no limit of the pool was set by hand."""
    limit = 'query { instance { concurrencyLimit(concurrencyKey: "gaffer/claimed") { slotCount } } }'
    dagster.watch(on=True)
    wait_until(
        lambda: dagster.graphql(limit)["instance"]["concurrencyLimit"]["slotCount"] == 2, 90, "room for two slots"
    )
    dagster.watch(on=False)
    jobs.execute(database, "insert into source_claimed select generate_series(1, 10)")
    step(database, "both", "hold")
    runs = [dagster.launch("__ASSET_JOB", "claimed", "both") for _ in range(2)]
    at_work = "select count(distinct pid) from seen where job = 'both'"
    wait_until(lambda: jobs.query(database, at_work) == [(2,)], 90, "both at work")
    step(database, "both", "go")
    assert [dagster.finish(run) for run in runs] == ["SUCCESS", "SUCCESS"]
    done = "select count(*), count(distinct id), count(distinct fence) from target_claimed"
    assert jobs.query(database, done) == [(10, 10, 1)]
    assert sorted(rows_of(database, run)[0][1] for run in runs) == [5, 5]


@pytest.mark.parametrize("step_name", ["hold", "statement"])
def test_terminating_in_the_page_frees_the_lease_and_the_rows(
    database: str, dagster: Deployment, step_name: str
) -> None:
    name = f"terminated-{step_name}"
    jobs.add_rows(database, 5, table="source_asked")
    step(database, name, step_name)
    run = dagster.launch("asked_job", "asked", name)
    seen(database, name)
    told = dagster.graphql("mutation ($id: String!) { terminateRun(runId: $id) { __typename } }", id=run)
    assert told["terminateRun"]["__typename"] == "TerminateRunSuccess"
    wait_until(lambda: rows_of(database, run)[0][0] == "interrupted", 30, "interrupted")
    assert jobs.query(database, "select lease_id from gaffer.job_lease where job = 'asked'") == [(None,)]
    assert dagster.finish(run) == "CANCELED"
    step(database, name, "go")
    again = dagster.launch("asked_job", "asked", name)
    assert dagster.finish(again) == "SUCCESS"
    assert rows_of(database, again) == [("succeeded", 5, None, None)]


def test_an_exception_reaches_dagster_as_it_was(database: str, dagster: Deployment) -> None:
    jobs.add_rows(database, 5, table="source_asked")
    step(database, "raising", "raise")
    run = dagster.launch("asked_job", "asked", "raising")
    assert dagster.finish(run) == "FAILURE"
    assert rows_of(database, run) == [("failed", 0, None, "ValueError: the test wants it")]
    errors = [event["error"] for event in dagster.events(run) if event.get("error")]
    assert any("the test wants it" in str(error) and "ValueError" in str(error) for error in errors), errors
    assert dagster.finish(dagster.launch("asked_job", "asked", "after-raising")) == "SUCCESS"


def test_a_terminated_backend_is_a_batch_done_again(database: str, dagster: Deployment) -> None:
    jobs.add_rows(database, 5, table="source_asked")
    step(database, "cut", "statement")
    run = dagster.launch("asked_job", "asked", "cut")
    _, backend = seen(database, "cut")
    step(database, "cut", "go")
    jobs.query(database, "select pg_terminate_backend(%s)", backend)
    assert dagster.finish(run) == "SUCCESS"
    assert rows_of(database, run) == [("succeeded", 5, None, None)]


@pytest.mark.parametrize("job", ["asked_job", "__ASSET_JOB"])
def test_a_killed_run_is_taken_over(database: str, dagster: Deployment, job: str) -> None:
    name = f"killed-{job}"
    jobs.add_rows(database, 5, table="source_asked")
    step(database, name, "hold")
    run = dagster.launch(job, "asked", name)
    pid, _ = seen(database, name)
    os.kill(pid, signal.SIGKILL)
    assert dagster.finish(run) == "FAILURE"
    jobs.execute(database, "update gaffer.job_lease set lease_until = 'epoch' where job = 'asked'")  # a minute goes by
    step(database, name, "go")
    again = dagster.launch("asked_job", "asked", name)
    assert dagster.finish(again) == "SUCCESS"
    assert rows_of(database, run)[0][0] == "abandoned"
    assert rows_of(database, again) == [("succeeded", 5, None, None)]


def test_a_step_that_outlives_its_killed_run_stops_by_itself(database: str, dagster: Deployment) -> None:
    jobs.add_rows(database, 5, table="source_asked")
    step(database, "orphan", "statement")
    run = dagster.launch("__ASSET_JOB", "asked", "orphan")
    pid, _ = seen(database, "orphan")
    worker = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    os.kill(worker, signal.SIGKILL)
    assert dagster.finish(run) == "FAILURE"
    wait_until(lambda: rows_of(database, run)[0][0] == "interrupted", 30, "interrupted")
    step(database, "orphan", "go")
    again = dagster.launch("asked_job", "asked", "orphan")
    assert dagster.finish(again) == "SUCCESS"
    assert rows_of(database, again) == [("succeeded", 5, None, None)]


def test_a_paused_run_commits_nothing_after_another_took_over(database: str, dagster: Deployment) -> None:
    jobs.add_rows(database, 5, table="source_asked")
    step(database, "paused", "hold")
    run = dagster.launch("asked_job", "asked", "paused")
    pid, _ = seen(database, "paused")
    os.kill(pid, signal.SIGSTOP)
    try:
        jobs.execute(database, "update gaffer.job_lease set lease_until = 'epoch' where job = 'asked'")
        record = jobs.run(jobs.spec("asked", table="source_asked"), database, do_asked)
        assert (record.outcome, record.items) == ("succeeded", 5)
    finally:
        os.kill(pid, signal.SIGCONT)
    step(database, "paused", "go")
    assert dagster.finish(run) == "FAILURE"
    assert rows_of(database, run)[0][0] == "lost_lease"


def do_asked(batch: Batch) -> None:
    batch.insert("target_asked", [{"id": row["id"], "fence": batch.fence, "batch": batch.number} for row in batch.rows])


def test_a_tick_runs_the_job_and_the_table_changes(database: str, dagster: Deployment) -> None:
    wait_until(
        lambda: jobs.query(database, "select 1 from target_ticking having count(*) = 30"),
        150,
        "a tick that did its work",
    )
    run = wait_until(
        lambda: [r for r in dagster.runs() if r["jobName"] == "ticking_job" and r["status"] == "SUCCESS"],
        60,
        "a success",
    )[-1]
    ran = jobs.query(
        database,
        "select outcome, trigger, tick, started_at - tick < '1 minute' from gaffer.job_runs"
        " where dagster_run_id = %s order by items desc",
        run["runId"],
    )[0]
    assert ran[:2] == ("succeeded", "schedule")
    assert ran[2].second == 0
    tags = {tag["key"]: tag["value"] for tag in run["tags"]}
    assert tags["gaffer/job"] == "ticking"
    assert tags["dagster/max_runtime"] == "105"


def test_a_backlog_is_worked_off_without_another_tick(database: str, dagster: Deployment) -> None:
    """The next tick is up to a year away; the sensor asks for the next run within half a minute."""
    dagster.watch(on=True)
    jobs.add_rows(database, 30, table="source_backlog")
    assert dagster.finish(dagster.launch("backlog_job", "backlog", "by hand")) == "SUCCESS"
    wait_until(lambda: jobs.query(database, "select 1 from target_backlog having count(*) = 30"), 120, "the follow-up")
    wait_until(
        lambda: (
            jobs.query(
                database, "select trigger, outcome, items from gaffer.job_runs where job = 'backlog' order by id"
            )
            == [("manual", "capped", 20), ("sensor", "succeeded", 10)]
        ),
        60,
        "the end of the follow-up",
    )


def test_at_the_end_everything_was_done_once(database: str, dagster: Deployment) -> None:
    for job in ("ticking", "asked", "backlog"):
        wait_until(
            lambda job=job: jobs.query(
                database, f"select 1 where (select max(id) from source_{job}) = (select max(id) from target_{job})"
            ),
            150,
            f"every row of {job} done",
        )
        assert jobs.query(database, f"select id from source_{job} except all select id from target_{job}") == []
        assert jobs.query(database, f"select id from target_{job} except all select id from source_{job}") == []
    assert jobs.query(database, "select 1 from gaffer.job_runs where outcome = 'running' and job = 'asked'") == []
    password = conninfo_to_dict(database).get("password")
    assert password is None or str(password) not in dagster.logs()
