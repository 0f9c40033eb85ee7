"""B78: the connection dies with a message under way, and nobody can tell whether it took effect.

The first engine reaches the database through a proxy that cuts; the second does not.
"""

from __future__ import annotations

import os
import random

import pytest

from gaffer_dagster.testing.proxy import Cut, cutting
from tests.support import faults, invariants, jobs
from tests.support.processes import Ending, Engines, Plan

CUTS = [Cut.BEFORE, Cut.DURING, Cut.AFTER]


def _prepare(url: str) -> None:
    jobs.make_source(url, 30)
    invariants.watch(url)
    faults.settle(url)


def _slow_commit(url: str, row: int) -> None:
    """The COMMIT of the batch with this row takes a second, so that it is still running when it is asked about."""
    jobs.execute(
        url,
        """
        create function dawdle() returns trigger language plpgsql as
            'begin perform pg_catalog.pg_sleep(1); return null; end';
        create constraint trigger dawdle after insert on target deferrable initially deferred
            for each row when (new.id = """
        + str(row)
        + """) execute function dawdle();
        """,
    )


def _run_through(engines: Engines, url: str, *cuts: tuple[str, Cut]) -> Ending:
    with cutting(url, *cuts) as proxy:
        ending = engines.start(Plan(proxy.url)).ends()
        assert proxy.is_through
    assert (ending.error, ending.outcome) == (None, "succeeded")
    assert (ending.items, ending.batches) == (30, 3)
    return ending


def _all_is_well(engines: Engines, url: str) -> None:
    assert jobs.query(url, "select consecutive_failures, failed_ticks from gaffer.job") == [(0, [])]
    outcomes = jobs.query(url, "select distinct outcome from gaffer.job_runs")
    assert outcomes == [("succeeded",)]
    engines.finish(url)
    invariants.check(url, complete=True)


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_a_batch_whose_commit_is_cut_has_one_effect(cut: Cut, engines: Engines, url: str) -> None:
    _prepare(url)
    if cut is Cut.DURING:
        _slow_commit(url, row=15)
    ending = _run_through(engines, url, ("commit_batch", Cut.NONE), ("commit_batch", cut))
    assert ending.fence == 2  # superseded itself
    # Done again under the new fence where the COMMIT had not arrived; else counted as done, under the old one.
    again = 2 if cut is Cut.BEFORE else 1
    assert jobs.query(url, "select batch, fence, count(*) from target group by 1, 2 order by 1") == [
        (1, 1, 10),
        (2, again, 10),
        (3, 2, 10),
    ]
    _all_is_well(engines, url)


def test_a_run_whose_every_commit_is_cut_comes_to_its_end(engines: Engines, url: str) -> None:
    _prepare(url)
    ending = _run_through(engines, url, *[("commit_batch", cut) for cut in [*CUTS, Cut.BEFORE, Cut.BEFORE, Cut.AFTER]])
    assert ending.fence == 7
    _all_is_well(engines, url)


def test_a_supersede_that_is_cut_too_is_asked_again(engines: Engines, url: str) -> None:
    _prepare(url)
    cuts = [("commit_batch", Cut.AFTER), ("supersede", Cut.AFTER), ("supersede", Cut.BEFORE)]
    assert _run_through(engines, url, *cuts).fence == 2
    _all_is_well(engines, url)


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_an_acquire_that_is_cut_is_granted_once(cut: Cut, engines: Engines, url: str) -> None:
    _prepare(url)
    assert _run_through(engines, url, ("acquire", cut)).fence == 1
    assert jobs.query(url, "select count(*) from gaffer.job_runs") == [(1,)]
    _all_is_well(engines, url)


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_an_end_that_is_cut_is_recorded_once(cut: Cut, engines: Engines, url: str) -> None:
    _prepare(url)
    assert _run_through(engines, url, ("end_run", cut)).fence == 1
    _all_is_well(engines, url)


def test_many_cuts_in_any_order_never_give_a_wrong_verdict(engines: Engines, url: str) -> None:
    """GAFFER_CUTS and GAFFER_CUTS_SEED: how many, and which."""
    size = int(os.environ.get("GAFFER_CUTS", "20"))
    seed = int(os.environ.get("GAFFER_CUTS_SEED", "0")) or random.SystemRandom().randrange(1, 1_000_000)
    faults.say(f"GAFFER_CUTS={size} GAFFER_CUTS_SEED={seed}")
    chance = random.Random(seed)
    _prepare(url)
    for of_run in [min(10, size - done) for done in range(0, size, 10)]:
        commits: list[Cut] = []
        cuts: list[tuple[str, Cut]] = []
        for _ in range(of_run):  # a batch that is not committed is tried five times
            commits.append(chance.choice([Cut.AFTER] if commits[-3:] == [Cut.BEFORE] * 3 else CUTS))
            cuts.append(("commit_batch", commits[-1]))
            if chance.random() < 0.1:
                cuts.append(("supersede", chance.choice(CUTS)))
        rows = 10 * (of_run + 1)
        jobs.add_rows(url, rows)
        faults.settle(url)
        before = jobs.query(url, "select coalesce(sum(items), 0)::int, coalesce(max(fence), 0) from gaffer.job_runs")[0]
        with cutting(url, *cuts) as proxy:
            ending = engines.start(Plan(proxy.url)).ends()
            assert proxy.is_through
        assert (ending.error, ending.outcome) == (None, "succeeded")
        assert ending.items == rows + (0 if before[0] else 30)
        assert ending.fence == before[1] + 1 + of_run  # it superseded itself after each
    _all_is_well(engines, url)


_AWAY = ("connect", Cut.BEFORE)


def test_a_server_that_is_away_for_a_while_is_asked_again_between_two_batches(engines: Engines, url: str) -> None:
    _prepare(url)
    _run_through(engines, url, ("commit_batch", Cut.NONE), ("begin_batch", Cut.BEFORE), _AWAY, _AWAY)
    _all_is_well(engines, url)


def test_a_server_that_is_away_for_a_while_is_asked_again_when_a_commit_is_unknown(engines: Engines, url: str) -> None:
    _prepare(url)
    ending = _run_through(engines, url, ("commit_batch", Cut.AFTER), _AWAY, _AWAY, ("supersede", Cut.AFTER), _AWAY)
    assert ending.fence == 2
    _all_is_well(engines, url)


def test_a_server_that_is_away_for_a_while_is_asked_again_at_the_end(engines: Engines, url: str) -> None:
    _prepare(url)
    assert _run_through(engines, url, ("end_run", Cut.AFTER), _AWAY, _AWAY).fence == 1
    _all_is_well(engines, url)
