"""The jobs `gaffer_…`, as the Launchpad launches them."""

from __future__ import annotations

from typing import Any

import dagster as dg
import pytest

import gaffer_dagster as gd
from gaffer_dagster.adapter.assets import job_of
from gaffer_dagster.errors import LeaseLostError
from tests.support import faults, jobs

RESOURCE = gd.GafferResource(dsn=dg.EnvVar("GAFFER_DATABASE_URL"))
ACTIONS = "select job, action, by, reason from gaffer.operator_action order by id"


@gd.gaffer_asset(due=gd.NewRows("source", "id"), schedule=gd.Schedule("0 * * * *"))
def copied(batch: gd.Batch) -> None:
    jobs.copy_rows(batch)


@gd.gaffer_asset(
    due=gd.EachInterval("@daily", start="2024-03-10", until="2024-03-12"),
    schedule=gd.Schedule("0 6 * * *", "America/New_York"),
    required_resource_keys={"label"},
)
def daily(batch: gd.Batch) -> dict[str, str]:
    batch.execute("insert into days values (%s, %s)", [batch.window.since, batch.window.until])
    return {"label": batch.context.resources.label}


@gd.gaffer_asset(
    due=gd.PendingRows("pending", "id", pending="done_at is null", done="done_at = now()", attempts=1),
    bounds=gd.Bounds(timeout="5m"),
)
def sent(batch: gd.Batch) -> None:
    if any(row["bad"] for row in batch.rows):
        raise ValueError("a `bad` row")


DAILY = job_of(daily).spec
DEFS = dg.Definitions.merge(
    gd.build_definitions(copied, daily, sent, resource=RESOURCE), dg.Definitions(resources={"label": "blue"})
)


@pytest.fixture
def known(url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A database whose jobs have run."""
    monkeypatch.setenv("GAFFER_DATABASE_URL", url)
    jobs.make_source(url, 10)
    jobs.execute(url, "create table days (since timestamptz, until timestamptz)")
    jobs.execute(url, "create table pending (id int primary key, bad bool, done_at timestamptz)")
    jobs.execute(url, "insert into pending values (1, false), (2, true), (3, true)")
    faults.settle(url)
    for name in ("copied", "sent"):
        assert run_asset(name).success
    return url


def run_asset(name: str) -> dg.ExecuteInProcessResult:
    return DEFS.resolve_job_def(f"{name}_job").execute_in_process(raise_on_error=False)


def launch(
    action: str, instance: dg.DagsterInstance | None = None, *, tags: dict[str, str] | None = None, **config: Any
) -> dg.ExecuteInProcessResult:
    job = DEFS.resolve_job_def(action)
    return job.execute_in_process(run_config=config, raise_on_error=False, tags=tags, instance=instance)


def told(result: dg.ExecuteInProcessResult) -> str:
    """What it says on its page: of what was done, or why it was refused."""
    if result.success:
        (event,) = result.get_asset_observation_events()
        return str(event.asset_observation_data.asset_observation.metadata["gaffer/operator"].value)
    (failure,) = [event for event in result.all_events if event.event_type_value == "STEP_FAILURE"]
    return failure.step_failure_data.error_display_string


def test_one_job_for_each_action_that_a_job_has_a_use_for() -> None:
    def names(*assets: dg.AssetsDefinition) -> set[str]:
        found = gd.build_definitions(*assets, resource=RESOURCE).jobs or []
        return {job.name for job in found if job.name.startswith("gaffer_")}

    everywhere = {"gaffer_pause", "gaffer_resume", "gaffer_release"}
    assert names() == set()
    assert names(copied) == everywhere | {"gaffer_set_watermark"}
    assert names(sent) == everywhere | {"gaffer_retry_rows", "gaffer_drop_rows"}
    assert names(daily) == everywhere | {"gaffer_set_watermark", "gaffer_redo_interval"}


def test_they_go_with_the_users_own_definitions() -> None:
    dg.Definitions.validate_loadable(DEFS)


def test_a_job_that_it_is_not_for_is_refused_by_the_config() -> None:
    for action, job in (("gaffer_pause", "nope"), ("gaffer_redo_interval", "copied"), ("gaffer_drop_rows", "daily")):
        with pytest.raises(dg.DagsterInvalidConfigError, match=f"not in enum type {action}_job"):
            launch(action, job=job, interval="2027-03-01", reason="x")


def test_pause_and_resume_are_noted_with_whoever_dagster_knows(known: str) -> None:
    paused = launch(
        "gaffer_pause", job="copied", until="2h", reason="the `source` is | rebuilt", tags={"user": "ann@example.com"}
    )
    assert told(paused).startswith("**Paused** until 20")
    assert told(paused).endswith("By `ann@example.com`: ``the `source` is | rebuilt``")
    observed = run_asset("copied").get_asset_observation_events()[0].asset_observation_data.asset_observation
    summary = str(observed.metadata["gaffer/summary"].value)
    assert summary.startswith("**Paused:** nothing was done")
    assert "Paused by `ann@example.com` at 20" in summary
    assert "``the `source` is | rebuilt``" in summary
    resumed = launch("gaffer_resume", job="copied", by="bob")
    assert told(resumed).startswith("**Resumed**; next tick 20")
    again = launch("gaffer_resume", job="copied")
    assert told(again).startswith("It was not paused; nothing was changed")
    nobody = launch("gaffer_pause", job="daily")
    assert not nobody.success  # its first run, or the sensor, makes it known
    assert "no job 'daily' is known to this database" in told(nobody)
    launch("gaffer_pause", job="sent")
    assert jobs.query(known, ACTIONS)[:2] == [
        ("copied", "pause", "ann@example.com", "the `source` is | rebuilt"),
        ("copied", "resume", "bob", None),
    ]
    ((by,),) = jobs.query(known, "select by from gaffer.operator_action where job = 'sent'")
    assert by.startswith("dagster run ")


@pytest.mark.parametrize(
    ("until", "why"),
    [
        ("tomorrow", "until 'tomorrow' is no time"),
        ("2020-03-01T00:00", "is over already"),
        ("99999999d", "is too long"),
    ],
)
def test_a_pause_that_cannot_be_meant_is_one_clear_line(known: str, until: str, why: str) -> None:
    result = launch("gaffer_pause", job="copied", until=until)
    assert not result.success
    assert why in told(result)
    assert jobs.query(known, ACTIONS) == []


def test_the_watermark_is_set_only_where_it_is_said_to_be_no_dry_run(known: str) -> None:
    dry = launch("gaffer_set_watermark", job="copied", position="after:6")
    assert told(dry).startswith("**Dry run:** the watermark would be moved from `just after row 10 of transaction")
    assert "4 rows will be processed again" in told(dry)
    assert jobs.query(known, ACTIONS) == []
    refused = launch("gaffer_set_watermark", job="copied", position="after:6", dry_run=False)
    assert not refused.success
    assert "reason is empty" in told(refused)
    done = launch("gaffer_set_watermark", job="copied", position="after:6", dry_run=False, reason="bad code", by="ann")
    assert told(done).startswith("**Watermark set** from")
    assert jobs.query(known, ACTIONS) == [("copied", "set watermark", "ann", "bad code")]
    run_asset("copied")
    assert jobs.query(known, "select count(*) from target") == [(14,)]
    wrong = launch("gaffer_set_watermark", job="copied", position="2027-03-01")
    assert "position '2027-03-01' is none of NewRows" in told(wrong)


def test_what_a_live_run_makes_unsafe_is_refused(known: str) -> None:
    with jobs.opened(jobs.spec("copied"), known) as run:
        result = launch("gaffer_set_watermark", job="copied", position="beginning", dry_run=False, reason="again")
        assert not result.success
        assert 'job "copied" is at work' in told(result)
        busy = run_asset("copied").get_asset_observation_events()[0].asset_observation_data.asset_observation
        summary = str(busy.metadata["gaffer/summary"].value)
        assert summary.startswith("**Busy:** another run holds the lease")
        assert f"Held by `{run._holding.owner}` (fence 2), run " in summary
        assert not jobs.query(known, ACTIONS)


def test_a_release_ends_the_run_that_holds_the_lease(known: str) -> None:
    def hang(_batch: gd.Batch) -> None:
        released.append(told(launch("gaffer_release", job="copied", reason="it hangs")))

    released: list[str] = []
    jobs.add_rows(known, 1)
    faults.settle(known)
    with pytest.raises(LeaseLostError):
        jobs.run(jobs.spec("copied"), known, hang)
    assert released[0].startswith("**Released:** the lease was taken from `")
    assert "(fence 2, slot 0)" in released[0]
    assert told(launch("gaffer_release", job="copied", reason="it hangs")).startswith("Nobody holds the lease")
    assert [row[1] for row in jobs.query(known, ACTIONS)] == ["release"]


def test_parked_rows_are_tried_again_or_given_up(known: str) -> None:
    assert jobs.query(known, "select key from gaffer.job_item where parked_at is not null order by 1") == [
        ("2",),
        ("3",),
    ]
    both = launch("gaffer_retry_rows", job="sent")
    assert "name the rows by their keys, or give all_parked: true" in told(both)
    retried = launch("gaffer_retry_rows", job="sent", keys=["2", "9"])
    assert told(retried).startswith("**1 row** is tried again")
    assert "job 'sent' has no failed rows with key 9" in told(retried)
    assert "no failed rows with key 9" in told(launch("gaffer_retry_rows", job="sent", keys=["9"]))
    dropped = launch("gaffer_drop_rows", job="sent", all_parked=True, reason="they are tests")
    assert told(dropped).startswith("**1 row** is given up for good")
    assert [row[1] for row in jobs.query(known, ACTIONS)] == ["retry items", "drop items"]


def test_an_interval_is_done_once_more_on_the_same_line(known: str) -> None:
    too_early = launch("gaffer_redo_interval", job="daily", interval="2024-03-10", reason="late rows")
    assert "has not been done yet" in told(too_early)
    assert run_asset("daily").success
    before = jobs.query(known, "select position from gaffer.job_watermark where job = 'daily'")
    again = launch("gaffer_redo_interval", job="daily", interval="2024-03-10T12:00", reason="late rows", by="ann")
    span = "from 2024-03-10 00:00 America/New_York (05:00Z) to 2024-03-11 00:00 America/New_York (04:00Z)"
    assert told(again).startswith(f"**Done once more:** Redo succeeded: the interval {span}, once more")
    (event,) = again.get_asset_materialization_events()
    found = {key: value.value for key, value in event.materialization.metadata.items()}
    assert (found["label"], found["gaffer/items"], found["gaffer/fence"]) == ("blue", 1, 3)
    assert found["gaffer/redo_since"] == 1710046800
    assert str(found["gaffer/summary"]).startswith("**Redo succeeded:** the interval from 2024-03-10")
    assert jobs.query(known, "select count(*) from days where until - since = '23 h'") == [(2,)]
    assert jobs.query(known, "select position from gaffer.job_watermark where job = 'daily'") == before
    assert jobs.query(known, ACTIONS) == [("daily", "redo", "ann", "late rows")]


def test_a_redo_waits_for_nobody_and_says_why_it_was_not_done(known: str) -> None:
    assert run_asset("daily").success
    redo = {"job": "daily", "interval": "2024-03-10", "reason": "late rows"}
    with jobs.opened(DAILY, known) as run:
        told_busy = told(launch("gaffer_redo_interval", **redo))
        assert f"job 'daily' is at work ({run._holding.owner}): launch this again" in told_busy
    launch("gaffer_pause", job="daily")
    assert "job 'daily' is paused; resume it, or launch this with despite_pause: true" in told(
        launch("gaffer_redo_interval", **redo)
    )
    assert launch("gaffer_redo_interval", **redo, despite_pause=True).success
    jobs.execute(known, "drop table days")
    with dg.DagsterInstance.ephemeral() as instance:
        failed = launch("gaffer_redo_interval", instance, **redo, despite_pause=True)
        assert not failed.success
        (entry,) = instance.all_logs(failed.run_id, of_type=dg.DagsterEventType.ASSET_OBSERVATION)
    observed = entry.get_dagster_event().asset_observation_data.asset_observation.metadata
    assert 'Error: `relation "days" does not exist` (42P01)' in str(observed["gaffer/summary"].value)
    assert [row[1] for row in jobs.query(known, ACTIONS)] == ["pause", "redo", "redo"]
