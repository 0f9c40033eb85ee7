"""However long the history is, whoever works, looks or prunes reads as much of it: buffers and rows, no time is taken.

Long: GAFFER_HISTORY_ROWS=10000000, or ./dev history.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta

import pytest

from gaffer_dagster.store import db, prune
from gaffer_dagster.store.operations import Operator
from gaffer_dagster.testing import Databases
from tests.evidence import history
from tests.support import jobs
from tests.support.faults import say

ROWS = int(os.environ.get("GAFFER_HISTORY_ROWS", "100000"))


@pytest.fixture(scope="module")
def both(gaffer_databases: Databases) -> Iterator[tuple[str, str]]:
    """A database with a fifth of the history, and one with all of it."""
    with ExitStack() as stack:
        small, large = (stack.enter_context(gaffer_databases.scratch()) for _ in range(2))
        for url, rows in ((small, ROWS // 5), (large, ROWS)):
            say(f"{rows:,} runs in {history.fill(url, rows):.0f} s")
        yield small, large


@pytest.mark.parametrize(
    ("missing", "reader"),
    [
        # Only readers that leave in the history what the other test is to find there.
        ("drop index gaffer.job_runs_worked", "gaffer status"),
        ("drop index gaffer.job_runs_ended", "gaffer ticks steady"),
        ("drop index gaffer.job_runs_ended", "gaffer prune --dry-run --older-than 36500d"),
        ("drop index gaffer.operator_action_of_watch", "gaffer audit resting"),
        ("drop index gaffer.operator_action_pause", "a run"),
        ("drop index gaffer.operator_action_rename", "a job that is new"),
        ("drop index gaffer.job_spec_hash", "a spec that changes"),
    ],
)
def test_a_reader_that_goes_through_the_history_is_seen(both: tuple[str, str], missing: str, reader: str) -> None:
    found: list[history.Read] = []
    for url in both:
        with jobs.connect(url) as connection:
            restored = jobs.query(url, "select pg_get_indexdef(%s::regclass)", missing.split()[-1])[0][0]
            connection.execute(missing.encode())
        try:
            found.append(history.measured(url, {reader: history.READERS[reader]})[reader])
        finally:
            with jobs.connect(url) as connection:
                connection.execute(restored.encode())
    assert history.grows(*found), found


@pytest.mark.timeout(3600)
def test_nobody_reads_more_where_the_history_is_longer(both: tuple[str, str]) -> None:
    small, large = (history.measured(url) for url in both)
    for name in small:
        say(f"{name:42} buffers {small[name].buffers:7,} → {large[name].buffers:7,}"
            f"   rows {small[name].rows:7,} → {large[name].rows:7,}")  # fmt: skip
    assert [name for name in small if history.grows(small[name], large[name])] == []


def test_a_planner_that_knows_how_common_a_job_is_is_seen(both: tuple[str, str]) -> None:
    """It finds the newest runs of a job that ran last long ago behind all that are newer."""
    found: list[history.Read] = []
    for url in both:
        jobs.execute(url, "alter table gaffer.job_runs alter column job set statistics 100")
        jobs.execute(url, "analyze gaffer.job_runs")
        found.append(history.measured(url, {"it": history.READERS["gaffer metrics"]})["it"])
    assert history.grows(*found), found


# ── retention ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_history_that_is_pruned_as_it_grows_takes_no_more_room(url: str) -> None:
    """Each cycle writes as many runs as it prunes, and is vacuumed as autovacuum would."""
    history.fill(url, 4_000)
    pages: list[int] = []
    with db.connect(url, application_name="test") as connection:
        for _ in range(8):
            connection.execute(
                """
                insert into gaffer.job_runs (job, slot, owner, trigger, spec_hash, started_at, ended_at, outcome)
                select 'steady', 0, 'x', 'schedule', 'x', at, at, 'busy'
                  from generate_series(1, 2000), (select gaffer.clock() - interval '100 days') as times (at)
                """
            )
            before = prune.before(connection, timedelta(days=90))
            action = prune.begin(connection, before, Operator("ann", None))
            removed = sum(
                sum(prune.remove_runs(connection, action, job, before)) for job in prune.runs(connection, before)
            )
            assert removed >= 1_900
            connection.execute("vacuum gaffer.job_runs")
            pages.append(connection.execute("select pg_total_relation_size('gaffer.job_runs') / 8192").fetchone()[0])  # type: ignore[index]
    say(f"pages after each cycle: {pages}")
    assert pages[-1] <= pages[2]


def test_each_page_of_a_prune_reads_what_it_removes_however_much_stays(url: str) -> None:
    """Nothing but the newest is old enough to stay, and all of it is: the last page does not go through it."""
    history.fill(url, 20_000)
    before = history.so_far(url)
    with db.connect(url, application_name="test") as connection:
        old = prune.before(connection, timedelta(days=30))
        action = prune.begin(connection, old, Operator("ann", None))
        assert [sum(prune.remove_runs(connection, action, each.name, old)) for each in history.JOBS] == [0] * 5
    assert (history.so_far(url) - before).rows < 1_000
