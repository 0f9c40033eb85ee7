"""A code location for the tests: what its jobs do is steered by the table `script`, so that tests can hold them."""

import os
import time

import dagster as dg
import psycopg

import gaffer_dagster as gd

URL = os.environ["GAFFER_DATABASE_URL"]


def copy_rows(batch: gd.Batch) -> None:
    job = batch.context.run.tags.get("test/job", "")
    target = "target_" + batch.context.asset_key.path[-1]
    batch.insert(target, [{"id": row["id"], "fence": batch.fence, "batch": batch.number} for row in batch.rows])
    with psycopg.connect(URL, autocommit=True) as aside:
        found = aside.execute("select step from script where job = %s", [job]).fetchone()
        step = found[0] if found else "go"
        aside.execute("insert into seen (job, pid, backend) values (%s, %s, %s)", [job, os.getpid(), _pid(batch)])
        if step == "raise":
            raise ValueError("the test wants it")
        if step == "statement":
            batch.execute("select pg_sleep(120)")
        while step == "hold" and aside.execute("select step from script where job = %s", [job]).fetchone() == ("hold",):
            time.sleep(0.05)


def _pid(batch: gd.Batch) -> int:
    return batch.execute("select pg_backend_pid()").fetchone()[0]


ticking = gd.gaffer_asset(
    name="ticking",
    schedule=gd.Schedule("* * * * *"),
    due=gd.NewRows("source_ticking", "id"),
    bounds=gd.Bounds(timeout="45s"),
)(copy_rows)
asked = gd.gaffer_asset(name="asked", due=gd.NewRows("source_asked", "id"), bounds=gd.Bounds(timeout="5m"))(copy_rows)
backlog = gd.gaffer_asset(
    name="backlog",
    schedule=gd.Schedule("@yearly"),
    due=gd.NewRows("source_backlog", "id"),
    bounds=gd.Bounds(batch_rows=10, batches=2, timeout="5m"),
)(copy_rows)
claimed = gd.gaffer_asset(
    name="claimed",
    due=gd.PendingRows("source_claimed", "id", pending="done_at is null", done="done_at = now()", parallel=2),
    bounds=gd.Bounds(batch_rows=5, batches=1, timeout="5m"),
)(copy_rows)


@dg.asset(deps=[asked])
def downstream() -> None:
    """Woken only by a materialization."""


defs = dg.Definitions.merge(
    gd.build_definitions(
        ticking, asked, backlog, claimed, resource=gd.GafferResource(dsn=dg.EnvVar("GAFFER_DATABASE_URL"))
    ),
    dg.Definitions(assets=[downstream]),
)
