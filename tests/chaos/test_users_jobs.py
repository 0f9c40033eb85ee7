"""Jobs as users write them, wrong in ways that nothing but a fault shows: the kit catches each, and passes the right
ones."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest

import gaffer_dagster as gd
from gaffer_dagster.engine.steps import Station
from gaffer_dagster.testing import Bench, faults
from gaffer_dagster.testing.proxy import Cut
from tests.support import jobs, variants

ROWS = jobs.spec("copied", batch_rows=10)
HOURS = gd.JobSpec("counted", gd.EachInterval(settle="1s"), gd.Schedule("0 * * * *"))
Survives = Callable[..., None]


# ── what they do ─────────────────────────────────────────────────────────────────────────────────────────────────────


def right(batch: gd.Batch) -> None:
    batch.insert("target", [{"id": row["id"]} for row in batch.rows])


def writes_through_a_connection_of_its_own(batch: gd.Batch) -> None:
    with psycopg.connect(os.environ["GAFFER_DATABASE_URL"], autocommit=True) as connection:
        connection.cursor().executemany("insert into target (id) values (%s)", [[row["id"]] for row in batch.rows])


def swallows_an_error(batch: gd.Batch) -> None:
    for row in batch.rows:
        try:
            batch.insert("target", [{"id": row["id"], "batch": 1 // (row["id"] % 7)}])
        except ZeroDivisionError:
            batch.log.warning("left out", id=row["id"])


def keeps_a_watermark_in_a_file(batch: gd.Batch) -> None:
    file = Path(tempfile.gettempdir(), "watermark")
    done = int(file.read_text()) if file.exists() else 0
    found = batch.execute("select id from source where id > %s order by id limit 10", [done]).fetchall()
    batch.insert("target", [{"id": id_} for (id_,) in found])
    file.write_text(str(max([done, *(id_ for (id_,) in found)])))


def counts_the_hour(batch: gd.Batch) -> None:
    batch.execute(
        "insert into hours select count(*) from events where at >= %s and at < %s",
        [batch.window.since, batch.window.until],
    )


def counts_the_hour_before_now(batch: gd.Batch) -> None:
    batch.execute(
        "with hour as (select date_trunc('hour', gaffer.clock()) as until) insert into hours"
        " select count(*) from events, hour where at >= until - interval '1 hour' and at < until"
    )


# ── what must come of it ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def copies(gaffer_database: str, gaffer_survives: Survives) -> Survives:
    """`copies(work, faults)` does these to a job that is to copy `source` into `target`, 15 rows at a time."""
    jobs.make_source(gaffer_database)

    def target_is_source() -> bool:
        source, target = (jobs.query(gaffer_database, f"select id from {table} order by 1") for table in TABLES)
        return source == target

    return lambda work, these: gaffer_survives(
        ROWS, work=work, more=lambda: jobs.add_rows(gaffer_database, 15), holds=target_is_source, faults=these
    )


TABLES = ("source", "target")
APPLIED = faults.Kill(Station.APPLIED)


def test_a_right_job_survives_everything(copies: Survives) -> None:
    copies(right, faults.all())


@pytest.mark.parametrize("fault", [APPLIED, faults.Pause(Station.DUE), faults.CutCommit(Cut.BEFORE)], ids=str)
def test_writes_past_the_batch_are_caught(fault: faults.Fault, copies: Survives) -> None:
    asks = r"\(is something written outside of the batch's own connection, or kept outside of the database\?\)"
    with pytest.raises(AssertionError, match=f"after {fault}: your own invariant does not hold {asks}: it returned"):
        copies(writes_through_a_connection_of_its_own, [fault])


def test_a_watermark_outside_of_the_database_is_caught(copies: Survives) -> None:
    with pytest.raises(AssertionError, match=f"after {APPLIED}: your own invariant does not hold"):
        copies(keeps_a_watermark_in_a_file, [faults.DoubleTick(), APPLIED])


def test_a_swallowed_error_is_caught_without_any_fault(copies: Survives) -> None:
    with pytest.raises(AssertionError, match="after no fault at all: your own invariant does not hold: it"):
        copies(swallows_an_error, [])


@pytest.mark.parametrize("work", [counts_the_hour, counts_the_hour_before_now])
def test_now_in_place_of_the_window_is_caught_when_ticks_were_missed(
    work: Callable[[gd.Batch], None], gaffer_database: str, gaffer_survives: Survives
) -> None:
    jobs.execute(gaffer_database, "create table events (at timestamptz); create table hours (n int)")

    def more() -> None:
        jobs.execute(gaffer_database, "insert into events select gaffer.clock() from generate_series(1, 5)")

    def adds_up() -> bool:
        return jobs.query(gaffer_database, "select sum(n) = (select count(*) from events) from hours") == [(True,)]

    def sweep() -> None:
        these = [faults.Kill(Station.COMMITTED), faults.MissedTicks(3)]
        gaffer_survives(HOURS, work=work, more=more, holds=adds_up, faults=these)

    if work is counts_the_hour:
        sweep()
    else:
        with pytest.raises(AssertionError, match="after 3 missed ticks: your own invariant does not hold"):
            sweep()


@pytest.mark.parametrize("variant", ["bare", "time-only lease"])
def test_a_lease_that_is_only_a_time_is_caught_by_our_own_invariants(
    variant: str, gaffer_database: str, copies: Survives
) -> None:
    variants.install(gaffer_database, variant)
    fault = faults.Pause(Station.APPLIED)
    if variant == "bare":
        copies(right, [fault])
    else:
        told = f"after {fault}: invariants that do not hold:\n(.*\n)*.*nothing is committed under a fence once a later"
        with pytest.raises(AssertionError, match=told):
            copies(right, [fault])


# ── faults that cannot strike ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("fault", [APPLIED, faults.Pause(Station.DUE), faults.CutCommit(Cut.AFTER)], ids=str)
def test_a_fault_that_finds_nothing_due_says_so(
    fault: faults.Fault, gaffer_database: str, gaffer_survives: Survives
) -> None:
    jobs.make_source(gaffer_database)
    with pytest.raises(AssertionError, match=f"after {fault}: .*nothing was due.* Let more= add what is"):
        gaffer_survives(ROWS, work=right, holds=lambda: True, faults=[fault])


@pytest.mark.parametrize("fault", [APPLIED, faults.CutCommit(Cut.AFTER)], ids=str)
def test_a_fault_that_finds_a_paused_job_does_not_say_that_nothing_was_due(
    fault: faults.Fault, gaffer_database: str, gaffer_survives: Survives
) -> None:
    jobs.make_source(gaffer_database)

    def paused(bench: Bench) -> None:
        jobs.execute(gaffer_database, "update gaffer.job set paused_at = gaffer.clock(), paused_by = 'me'")
        fault(bench)

    with pytest.raises(AssertionError, match="it ended paused, with 0 items in 0 batches") as told:
        gaffer_survives(ROWS, work=right, holds=lambda: True, faults=[paused])
    assert "more=" not in str(told.value)


def test_a_run_that_hangs_is_given_up(gaffer_database: str, gaffer_survives: Survives) -> None:
    jobs.make_source(gaffer_database, 1)
    with pytest.raises(AssertionError, match="nothing was heard of the run for 3 s"):
        gaffer_survives(ROWS, work=hangs, holds=lambda: True, faults=[], patience=3)


def hangs(batch: gd.Batch) -> None:
    batch.execute("select pg_sleep(120)")


def test_a_fault_of_the_users_own_stands_beside_ours(copies: Survives) -> None:
    seen: list[str] = []

    def two_runs(bench: Bench) -> None:
        seen.extend(bench.start().ends().outcome or "" for _ in range(2))

    copies(right, [two_runs])
    assert seen == ["succeeded", "succeeded"]


def test_every_station_is_killed_and_paused_at() -> None:
    told = {str(fault) for fault in faults.all()}
    assert {f"{deed} at {station}" for deed in ("kill", "pause") for station in Station} <= told
    assert len(told) == 2 * len(Station) + 3 + 2
