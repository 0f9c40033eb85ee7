"""Two engines, and what can happen to the first of them at each place of the line.

A job of 30 rows in batches of 10. The first engine stops at a place, in its second batch where the place is one of a
batch; 10 more rows are added; then the fault, and a second engine. B51 and B76 of the scenarios are among these.
"""

from __future__ import annotations

import signal
from datetime import timedelta

import pytest

from gaffer_dagster.engine.steps import Station
from gaffer_dagster.testing import Clock
from tests.support import faults, invariants, jobs
from tests.support.processes import BUSY, GRANTED, SUPERSEDED, WANTED, WORKING, Ending, Engine, Engines, Plan

# Every station, so that none is added without being killed at.
PLACES = [GRANTED, WORKING, *map(str, Station)]
_OF_A_BATCH = {str(Station.DUE), WORKING, str(Station.APPLIED), str(Station.COMMITTED)}
# Its open transaction has written: rows that are added behind it are not due before it ends.
_HOLDS_BACK = {WORKING, str(Station.APPLIED)}
_OVER = {str(Station.ENDED), str(Station.REPORTED)}
_PAST_THE_LEASE = timedelta(seconds=61)

at_each_place = pytest.mark.parametrize("place", PLACES)


def _batches_done(place: str) -> int:
    if place in _OVER:
        return 3
    if place == str(Station.COMMITTED):
        return 2
    return 1 if place in _OF_A_BATCH else 0


def _stopped_at(place: str, engines: Engines, url: str, then: str | None = None) -> Engine:
    """An engine that stands there; then ten rows more. `then`: where it will stand next."""
    jobs.make_source(url, 30)
    invariants.watch(url)
    faults.settle(url)
    first = engines.start(Plan(url, stop_at=place, nth=2 if place in _OF_A_BATCH else 1, then=then))
    first.reaches(place)
    jobs.add_rows(url, 10)
    if place not in _HOLDS_BACK:
        faults.settle(url)
    return first


def _history(url: str) -> list[tuple[str, int, int]]:
    """Outcome, fence and batches of each run that had the lease, in order."""
    return jobs.query(url, "select outcome, fence, batches from gaffer.job_runs where fence is not null order by id")


def _failures(url: str) -> int:
    return jobs.query(url, "select consecutive_failures from gaffer.job")[0][0]


def _all_is_well(engines: Engines, url: str) -> None:
    engines.finish(url)
    invariants.check(url, complete=True)
    assert _failures(url) == 0


@at_each_place
def test_after_a_kill_the_next_run_goes_on_from_what_was_committed(
    place: str, engines: Engines, url: str, clock: Clock
) -> None:
    first = _stopped_at(place, engines, url)
    first.kill()
    faults.settle(url)  # the server has noticed, and rolled back what was open
    done = _batches_done(place)
    if place in _OVER:
        left_behind = ("succeeded", 1, 3)
    else:
        assert engines.start(Plan(url)).ends().outcome == "busy"  # the lease is still the dead one's
        clock.advance(_PAST_THE_LEASE)
        left_behind = ("abandoned", 1, done)
    second = engines.start(Plan(url)).ends()
    assert (second.outcome, second.items, second.fence) == ("succeeded", 40 - 10 * done, 2)
    assert _history(url)[0] == left_behind
    _all_is_well(engines, url)


@at_each_place
def test_an_engine_that_was_stopped_past_its_lease_commits_nothing_more(
    place: str, engines: Engines, url: str, clock: Clock
) -> None:
    first = _stopped_at(place, engines, url)
    first.pause()
    if place not in _OVER:
        clock.advance(_PAST_THE_LEASE)
    second = engines.start(Plan(url, stop_at=str(Station.COMMITTED)))
    second.reaches(str(Station.COMMITTED))  # in the middle of its own work
    before = jobs.query(url, "select * from target order by id, fence")
    first.resume()
    first.go()
    ending = first.ends()
    assert jobs.query(url, "select * from target order by id, fence") == before
    if place in _OVER:
        assert (ending.error, ending.outcome) == (None, "succeeded")
        assert _history(url)[0] == ("succeeded", 1, 3)
    else:
        assert (ending.error, ending.outcome) == ("LeaseLostError", "lost_lease")
        assert _history(url)[0] == ("lost_lease", 1, _batches_done(place))
        assert _failures(url) == 1
    second.go()
    assert second.ends().outcome == "succeeded"
    _all_is_well(engines, url)


@at_each_place
def test_a_run_whose_connections_are_terminated_goes_on(place: str, engines: Engines, url: str) -> None:
    first = _stopped_at(place, engines, url)
    assert (faults.terminate_backends(url) == 0) == (place in _OVER)  # a run that is over has no connection
    faults.settle(url)
    if place not in _OVER:
        assert engines.start(Plan(url)).ends().outcome == "busy"
    first.go()
    ending = first.ends()
    assert (ending.error, ending.outcome) == (None, "succeeded")
    # At APPLIED the next message is the COMMIT, whose answer is missing: only then the run supersedes itself.
    assert _history(url) == [("succeeded", 2 if place == str(Station.APPLIED) else 1, 3 if place in _OVER else 4)]
    _all_is_well(engines, url)


# Between the answer of acquire and its use there is nothing that could raise an ordinary exception.
@pytest.mark.parametrize("place", [place for place in PLACES if place != GRANTED])
def test_an_exception_fails_the_run_and_frees_the_lease(place: str, engines: Engines, url: str) -> None:
    first = _stopped_at(place, engines, url)
    first.fail()
    ending = first.ends()
    assert (ending.error, ending.text) == ("BoomError", "told to fail")
    outcome = "succeeded" if place in _OVER else "failed"
    assert _history(url) == [(outcome, 1, _batches_done(place))]
    assert _failures(url) == (0 if place in _OVER else 1)
    if place not in _OVER:
        assert jobs.query(url, "select error from gaffer.job_runs") == [("BoomError: told to fail",)]
    second = engines.start(Plan(url)).ends()
    assert (second.outcome, second.fence) == ("succeeded", 2)
    _all_is_well(engines, url)


@at_each_place
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_an_interrupt_ends_the_run_and_frees_the_lease(
    place: str, number: signal.Signals, engines: Engines, url: str
) -> None:
    first = _stopped_at(place, engines, url)
    first.signal(number)
    ending = first.ends()
    assert (ending.error, ending.text) == ("Interrupted", number.name)
    outcome = "succeeded" if place in _OVER else "interrupted"
    assert _history(url) == [(outcome, 1, _batches_done(place))]
    assert _failures(url) == 0
    assert faults.backends(url) == []
    second = engines.start(Plan(url)).ends()
    assert (second.outcome, second.fence) == ("succeeded", 2)
    _all_is_well(engines, url)


# ── between the stations ─────────────────────────────────────────────────────────────────────────────────────────


def test_an_interrupt_while_the_commit_is_unknown_ends_the_run_under_its_new_fence(engines: Engines, url: str) -> None:
    jobs.make_source(url, 30)
    invariants.watch(url)
    faults.settle(url)
    first = engines.start(Plan(url, stop_at=str(Station.APPLIED), then=SUPERSEDED))
    first.reaches(str(Station.APPLIED))
    faults.terminate_backends(url)
    first.go()
    first.reaches(SUPERSEDED)
    first.signal(signal.SIGTERM)
    assert first.ends().error == "Interrupted"
    assert _history(url) == [("interrupted", 2, 0)]
    assert jobs.query(url, "select lease_id from gaffer.job_lease") == [(None,)]
    _all_is_well(engines, url)


def test_a_run_that_loses_its_connection_when_it_is_to_look_again_still_looks(engines: Engines, url: str) -> None:
    first = _stopped_at(str(Station.COMMITTED), engines, url, then=WANTED)
    assert engines.start(Plan(url)).ends().outcome == "busy"
    first.go()
    first.reaches(WANTED)
    faults.terminate_backends(url)
    first.go()
    ending = first.ends()
    assert (ending.error, ending.outcome, ending.items) == (None, "succeeded", 40)
    _all_is_well(engines, url)


# ── the engine that meets a holder ───────────────────────────────────────────────────────────────────────────────


def _holder_and_one_who_meets_it(engines: Engines, url: str) -> tuple[Engine, Engine]:
    holder = _stopped_at(str(Station.COMMITTED), engines, url)
    late = engines.start(Plan(url, stop_at=BUSY))
    late.reaches(BUSY)
    return holder, late


def _holder_ends(holder: Engine) -> Ending:
    """Its wish was noted before it was harmed: the holder looks again, and takes the ten rows too."""
    holder.go()
    ending = holder.ends()
    assert (ending.outcome, ending.items, ending.fence) == ("succeeded", 40, 1)
    return ending


@pytest.mark.parametrize("fault", ["kill", "exception", "interrupt"])
def test_one_who_dies_when_it_meets_a_holder_has_left_its_wish(fault: str, engines: Engines, url: str) -> None:
    holder, late = _holder_and_one_who_meets_it(engines, url)
    if fault == "kill":
        late.kill()
    elif fault == "exception":
        late.fail()
        assert late.ends().error == "BoomError"
    else:
        late.signal(signal.SIGTERM)
        assert late.ends().error == "Interrupted"
    _holder_ends(holder)
    assert _history(url) == [("succeeded", 1, 4)]
    _all_is_well(engines, url)


def test_one_who_is_stopped_when_it_meets_a_holder_takes_over_once_the_holder_is_gone(
    engines: Engines, url: str
) -> None:
    holder, late = _holder_and_one_who_meets_it(engines, url)
    late.pause()
    _holder_ends(holder)
    late.resume()
    late.go()
    ending = late.ends()
    assert (ending.outcome, ending.items, ending.fence) == ("succeeded", 0, 2)
    _all_is_well(engines, url)


def test_one_whose_connection_is_terminated_when_it_meets_a_holder_asks_again(engines: Engines, url: str) -> None:
    holder, late = _holder_and_one_who_meets_it(engines, url)
    faults.terminate_backends(url)  # the holder's too
    late.go()
    assert late.ends().outcome == "busy"
    assert jobs.query(url, "select count(*) from gaffer.job_runs where outcome = 'busy'") == [(1,)]
    _holder_ends(holder)
    _all_is_well(engines, url)


# ── between any two statements ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("sent", [False, True], ids=["before it is sent", "before its answer"])
def test_a_run_that_is_killed_at_any_message_loses_and_doubles_nothing(
    sent: bool, engines: Engines, url: str, clock: Clock
) -> None:
    """B76: killed at the first message to the server, the next time at the second, until it lives to its end."""
    jobs.make_source(url)
    invariants.watch(url)
    number = 0
    survived = False
    while not survived:
        number += 1
        jobs.add_rows(url, 25)
        faults.settle(url)
        doomed = engines.start(Plan(url, lease=2, die_at=number, sent=sent))
        survived = doomed.died_or_ended() is not None
        faults.wait_until(lambda: not faults.backends(url), "the server has noticed")
        faults.settle(url)
        invariants.check(url)
        clock.advance(timedelta(seconds=3))
        assert jobs.run(jobs.spec(batch_rows=10), url).outcome == "succeeded"
        invariants.check(url, complete=True)
    faults.say(f"killed at each of {number - 1} messages")
    assert number > 20
