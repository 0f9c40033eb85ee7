"""Each public name as a user would use it. Checked by the type checker, never run."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import suppress
from datetime import date, datetime, timedelta, timezone
from pathlib import Path

import dagster as dg
from typing_extensions import assert_type

import gaffer_dagster as gd
from gaffer_dagster.engine.steps import Station
from gaffer_dagster.testing import (
    Bench,
    Clock,
    Databases,
    RunDue,
    Survives,
    assert_invariants,
    faults,
    job_in,
    prepare,
    run_due,
    scratch_database,
    settle,
    survives,
    wait_until,
    watch,
)


@gd.gaffer_asset(
    schedule=gd.Schedule("H 6 * * *", timezone="America/New_York"),
    due=gd.NewRows("flights", key="id", where="carrier <> 'XX'"),
    bounds=gd.Bounds(batch_rows=1_000, batches=100, timeout="20m", batch_timeout=timedelta(minutes=2)),
    alerts=gd.Alerts(grace="30m", failures=3),
    protect=["carrier_delay_part"],
    group_name="reports",
    database="crm",
)
def with_rows(batch: gd.Batch) -> None:
    assert_type(batch.fence, int)
    assert_type(batch.run_id, int)
    assert_type(batch.number, int)
    for row in batch.rows:
        assert_type(batch.key_for(row), str)
    assert_type(batch.insert("t", [{"a": 1}]), int)
    assert_type(batch.copy("t", ({"a": n} for n in range(3))), int)
    batch.executemany("insert into t values (%s)", [(1,), (2,)])
    with batch.savepoint():
        batch.execute("update t set a = %(a)s", {"a": 1}).fetchone()
    batch.log.info("said", rows=len(batch.rows))


@gd.gaffer_asset(
    due=gd.EachInterval("@daily", settle="5m", start=date(2024, 1, 1)),
    schedule=gd.Schedule("@daily"),
    alerts=gd.Alerts(
        timedelta(minutes=30),
        2,
        capped=5,
        backlog="6h",
        stalled=timedelta(minutes=20),
        takeovers=2,
        pause="3d",
        remind="12h",
        receivers=["oncall", "mail"],
        heartbeat="DAILY_PING_URL",
    ),
)
def with_window(batch: gd.Batch) -> dict[str, object]:
    assert_type(batch.window.since, datetime)
    assert_type(batch.key, str)
    return {"days": 1}


@gd.gaffer_asset(due=gd.Elapsed(settle=timedelta(minutes=5), start="2024-01-01"), schedule=gd.Schedule("@hourly"))
def with_all_the_time(batch: gd.Batch) -> None:
    assert_type(batch.window.until - batch.window.since, timedelta)


@gd.gaffer_asset(due=gd.Elapsed("15m"), schedule=gd.Schedule("@hourly"))
def with_slices(batch: gd.Batch) -> None:
    assert_type(batch.key, str)


assert_type(with_rows, dg.AssetsDefinition)

defs: dg.Definitions = gd.build_definitions(
    with_rows,
    with_window,
    with_all_the_time,
    with_slices,
    resources={
        "gaffer": gd.GafferResource(dsn=dg.EnvVar("GAFFER_DATABASE_URL")),
        "crm": gd.GafferResource(dsn=dg.EnvVar("CRM_DATABASE_URL")),
    },
)

spec = gd.JobSpec("by_hand", gd.NewRows("flights", key="id"))


@dg.op
def by_hand(gaffer: gd.GafferResource) -> None:
    with gaffer.run(spec) as run:
        for batch in run:
            assert_type(batch, gd.Batch)
    assert_type(run.outcome, gd.Outcome)
    assert_type(run.record, gd.RunRecord | None)


now = datetime.now(timezone.utc)
assert_type(gd.Schedule("@hourly").next(now), datetime)
assert_type(gd.Schedule("@hourly").latest(now), datetime | None)
assert_type(gd.Schedule("@hourly").ticks(now, now), Iterator[datetime])

with suppress(gd.GafferError):
    gd.Schedule("61 * * * *")

warnings.simplefilter("error", gd.GafferWarning)


@gd.gaffer_asset(
    due=gd.PendingRows(
        "outbox",
        key="id",
        pending="sent_at is null",
        done="sent_at = now()",
        attempts=5,
        parallel=4,
        backoff="1m",
    ),
    exclusion="advisory",
)
def send(batch: gd.Batch) -> None:
    for row in batch.rows:
        batch.log.info("sends", key=batch.key_for(row))


in_sql = gd.gaffer_asset(
    due=gd.NewRows("flights", key="id", cursor="updated_at", settle=timedelta(minutes=10)),
    sql="insert into carriers select carrier, count(*) from due group by carrier",
    name="carriers",
    schedule=gd.Schedule("@hourly"),
)
assert_type(in_sql, dg.AssetsDefinition)


class Slack(dg.ConfigurableResource[None]):
    channel: str


@gd.gaffer_asset(
    due=gd.NewRows("flights", key="id"),
    automation_condition=dg.AutomationCondition.eager(),
    required_resource_keys={"mail"},
    deps=["raw"],
)
def with_resources(batch: gd.Batch, slack: Slack, plain: dg.ResourceParam[str]) -> None:
    batch.log.info("told", channel=slack.channel, plain=plain)


assert_type(with_resources, dg.AssetsDefinition)


def by_itself(batch: gd.Batch) -> None:
    batch.log.info("works")


component = gd.GafferComponent(
    name="carriers",
    due=gd.NewRows("flights", key="id"),
    sql="insert into carriers select carrier, count(*) from due group by carrier",
    schedule=gd.Schedule("@hourly"),
    bounds=gd.Bounds(timeout="20m"),
    alerts=gd.Alerts(grace="30m"),
    database_url_variable="CRM_DATABASE_URL",
    kinds={"sql"},
)
assert_type(component.asset, dg.AssetsDefinition)
assert_type(component.resource, gd.GafferResource)
of_function = gd.GafferComponent(name="told", due=gd.Elapsed(), function=by_itself)


# ── the tests of a user ──────────────────────────────────────────────────────────────────────────────────────────────


def two_runs(bench: Bench) -> None:
    assert_type(bench.clock.now(), datetime)
    bench.do_what_is_due()


def test_it(gaffer_database: str, gaffer_clock: Clock, gaffer_run_due: RunDue, gaffer_survives: Survives) -> None:
    prepare(gaffer_database, "flights", key="id", changed=True)
    gaffer_clock.set(now)
    gaffer_clock.advance(timedelta(hours=1))
    assert_type(gaffer_run_due(with_rows), list[gd.RunRecord])
    assert_type(gaffer_run_due(spec, work=by_itself), list[gd.RunRecord])
    assert_type(gaffer_run_due(with_resources, resources={"mail": "none"})[0].items, int)
    gaffer_survives(
        with_rows,
        more=lambda: settle(gaffer_database),
        holds=lambda: wait_until(lambda: True, "it is so") < 1,
        faults=[
            *faults.all(),
            faults.Kill(at=Station.APPLIED),
            faults.DoubleTick(),
            faults.MissedTicks(2),
            two_runs,
        ],
        patience=30,
    )
    gaffer_survives(spec, work=by_itself, holds=lambda: None)
    assert_invariants(gaffer_database, at_rest=True)


def test_without_the_fixtures(gaffer_databases: Databases) -> None:
    with gaffer_databases.scratch() as url:
        watch(url)
        assert_type(run_due(job_in(Path("jobs.py"), "flights"), url), list[gd.RunRecord])
    with scratch_database("postgresql://localhost/postgres") as url:
        survives(with_rows, url, holds=lambda: True)
