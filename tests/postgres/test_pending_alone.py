"""Rows that are worked on alone, each with an attempt that is committed first: what passes is no failure of theirs, and
no run calls itself done while such a row is not."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psycopg
import pytest

import gaffer_dagster as gd
from gaffer_dagster.domain.spec import JobSpec
from gaffer_dagster.engine.batch import Batch
from gaffer_dagster.engine.run import Run
from gaffer_dagster.errors import BadInputError, DatabaseUnavailableError, DeadlinePassedError, LeaseLostError
from gaffer_dagster.store import pending_rows
from gaffer_dagster.testing import Clock
from tests.support import faults, jobs, variants

Deed = Callable[[Batch], Any]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done again is done without a pause."""
    monkeypatch.setattr(random, "uniform", lambda *_: 0.0)  # pyright: ignore[reportUnknownLambdaType]


@pytest.fixture
def three(url: str) -> str:
    jobs.execute(url, "create table item (id int primary key, done_at timestamptz)")
    jobs.execute(url, "create table effect (id int)")
    jobs.run(spec(), url, lambda _: None)  # makes the job known
    jobs.execute(url, "insert into item select generate_series(1, 3)")
    return url


def spec(attempts: int = 3, timeout: str = "1m", **due: Any) -> JobSpec:
    source = gd.PendingRows(
        "item",
        "id",
        pending="done_at is null",
        done="done_at = gaffer.clock()",
        attempts=attempts,
        backoff="10m",
        **due,
    )
    return JobSpec("items", source, bounds=gd.Bounds(timeout=timeout))


class Work:
    """Is too slow for a page, so that its rows go alone; row 2 does its deed so often. `calls`: at each row alone."""

    def __init__(self, deed: Deed, times: int = 1_000) -> None:
        self.deed, self.left = deed, times
        self.calls: Counter[int] = Counter()

    def __call__(self, batch: Batch) -> Any:
        if len(batch.rows) > 1:
            batch.execute("do $$ begin raise exception 'too slow' using errcode = '57014'; end $$")
        for row in batch.rows:
            self.calls[row["id"]] += 1
            batch.insert("effect", [{"id": row["id"]}])
            if row["id"] == 2 and self.left:
                self.left -= 1
                return self.deed(batch)
        return None


def deadlocks(batch: Batch) -> None:
    batch.execute("do $$ begin raise exception 'deadlock detected' using errcode = '40P01'; end $$")


def loses_its_connection(batch: Batch) -> None:
    batch.execute("select pg_terminate_backend(pg_backend_pid())")


def is_told_to_stop(_: Batch) -> None:
    raise KeyboardInterrupt


def says_nonsense(_: Batch) -> str:
    return "done"


def has_no_room(batch: Batch) -> None:
    batch.execute("do $$ begin raise exception 'no room' using errcode = '53100'; end $$")


def done(url: str) -> list[int]:
    return [key for (key,) in jobs.query(url, "select id from effect order by id")]


def item(url: str) -> tuple[Any, ...] | None:
    found = jobs.query(
        url, "select attempts, sqlstate, error, next_attempt_at, failed_at, parked_at from gaffer.job_item"
    )
    return found[0] if found else None


def failed_before(url: str, error: str | None = "bad") -> tuple[Any, ...] | None:
    """Row 2 has failed once, long ago."""
    jobs.execute(
        url,
        "insert into gaffer.job_item (job, key, attempts, next_attempt_at, first_failed_at, failed_at, error)"
        " select 'items', '2', 1, at + interval '10 minutes', at, at, %s"
        " from (select gaffer.clock() - interval '1 day' as at) as ago",
        error,
    )
    return item(url)


def goes_alone(url: str) -> None:
    """The next run works on rows alone: the one before was cut off."""
    jobs.execute(url, "update gaffer.job_runs set outcome = 'abandoned'")


@pytest.mark.parametrize("deed", [deadlocks, loses_its_connection])
@pytest.mark.parametrize("times", [1, 4])
def test_what_passes_is_done_again_in_the_same_run_and_is_not_charged(three: str, deed: Deed, times: int) -> None:
    work = Work(deed, times)
    record = jobs.run(spec(attempts=1), three, work)
    assert (record.outcome, record.items, record.error, record.parked) == ("succeeded", 3, None, 0)
    assert (done(three), item(three)) == ([1, 2, 3], None)
    assert work.calls == {1: 1, 2: times + 1, 3: 1}


@pytest.mark.parametrize("deed", [deadlocks, loses_its_connection])
def test_a_row_that_failed_before_is_done_again_in_the_same_run_too(three: str, deed: Deed) -> None:
    failed_before(three, None)
    record = jobs.run(spec(attempts=2), three, Work(deed, 1))
    assert (record.outcome, record.items) == ("succeeded", 3)
    assert (done(three), item(three)) == ([1, 2, 3], None)


@pytest.mark.parametrize(
    ("deed", "code", "says"),
    [(deadlocks, "40P01", "deadlock detected"), (loses_its_connection, "57P01", "terminating connection")],
)
def test_what_does_not_pass_in_five_times_is_the_rows_and_counts_once(
    three: str, clock: Clock, deed: Deed, code: str, says: str
) -> None:
    for attempt in (1, 2, 3):
        work = Work(deed)
        record = jobs.run(spec(), three, work, worker_clock=clock.now)
        assert (record.outcome, record.items, record.parked) == ("partial", 2 if attempt == 1 else 0, attempt // 3)
        assert says in (record.error or "")
        assert work.calls[2] == 5
        found = item(three)
        assert found is not None
        assert (found[0], found[1], found[5] is not None) == (attempt, code, attempt == 3)
        assert says in found[2]
        assert done(three) == [1, 3]
        clock.advance(timedelta(hours=2))
        goes_alone(three)


@pytest.mark.parametrize("before", ["nothing", "bad", None])
@pytest.mark.parametrize(
    ("deed", "raises"),
    [(is_told_to_stop, KeyboardInterrupt), (says_nonsense, BadInputError), (has_no_room, psycopg.Error)],
)
def test_a_run_that_ends_for_another_reason_leaves_the_row_as_it_was(
    three: str, deed: Deed, raises: type[BaseException], before: str | None
) -> None:
    was = None if before == "nothing" else failed_before(three, before)
    jobs.execute(three, "delete from item where id <> 2")
    goes_alone(three)
    with pytest.raises(raises):
        jobs.run(spec(), three, Work(deed))
    assert (item(three), done(three)) == (was, [])


def test_who_swallows_the_error_of_a_run_does_not_make_it_a_success(three: str) -> None:
    with jobs.opened(spec(), three) as run, pytest.raises(BadInputError):
        run.apply(Work(says_nonsense))
    assert (run.record.outcome, run.record.backlog) == ("capped", 2)
    assert (item(three), done(three)) == (None, [1])


def test_a_row_that_takes_the_whole_run_counts_and_says_so(three: str, clock: Clock) -> None:
    def sleeps(batch: Batch) -> None:
        batch.execute("select pg_sleep(60)")

    with pytest.raises(DeadlinePassedError):
        jobs.run(spec(timeout="3s"), three, Work(sleeps), worker_clock=clock.now)
    found = item(three)
    assert found is not None
    assert (found[0], found[5]) == (1, None)
    assert "was cut at the run's deadline of 3s" in found[2]
    clock.advance(timedelta(hours=2))
    assert jobs.run(spec(timeout="1m"), three, Work(deadlocks, 0), worker_clock=clock.now).outcome == "succeeded"
    assert (done(three), item(three)) == ([1, 2, 3], None)


def test_who_has_lost_the_lease_says_nothing_more_of_its_row(three: str) -> None:
    def loses(batch: Batch) -> None:
        jobs.execute(three, "update gaffer.job_lease set fence = fence + 1, lease_id = gen_random_uuid()")
        deadlocks(batch)

    with pytest.raises(LeaseLostError):
        jobs.run(spec(), three, Work(loses))
    found = item(three)
    assert found is not None
    assert found[:3] == (1, None, None)


def test_a_charge_whose_answer_is_lost_is_not_charged_twice(three: str, monkeypatch: pytest.MonkeyPatch) -> None:
    charge, lost = pending_rows.charge, ["2"]

    def unanswered(connection: Any, lease: Any, key: str, backoff: timedelta) -> None:
        charge(connection, lease, key, backoff)
        if key in lost:
            lost.remove(key)
            raise psycopg.OperationalError("the connection is lost")

    monkeypatch.setattr(pending_rows, "charge", unanswered)
    record = jobs.run(spec(attempts=1), three, Work(deadlocks, 0))
    assert (record.outcome, record.items, done(three), item(three)) == ("succeeded", 3, [1, 2, 3], None)


def test_a_row_that_somebody_takes_meanwhile_is_left_and_said(three: str) -> None:
    with psycopg.connect(three) as stranger:

        def is_taken(batch: Batch) -> None:
            batch._connection.execute("rollback")  # frees the row
            stranger.execute("select from item where id = 2 for update")
            raise psycopg.errors.DeadlockDetected("deadlock detected")

        record = jobs.run(spec(), three, Work(is_taken, 1))
    assert (record.outcome, record.items, record.backlog) == ("capped", 2, 1)
    assert (done(three), item(three)) == ([1, 3], None)


def test_a_server_that_stays_away_after_the_row_leaves_it_its_error(
    three: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be the row that ends the server: it is out of the way of the others for a while."""
    take_back = pending_rows.take_back

    def away(*_: Any) -> None:
        raise DatabaseUnavailableError("nobody listens")

    monkeypatch.setattr(pending_rows, "take_back", away)
    with pytest.raises(DatabaseUnavailableError):
        jobs.run(spec(), three, Work(loses_its_connection))
    found = item(three)
    assert found is not None
    assert found[:2] == (1, "57P01")
    monkeypatch.setattr(pending_rows, "take_back", take_back)
    assert jobs.run(spec(), three, Work(deadlocks, 0)).items == 1
    assert done(three) == [1, 3]


def test_a_process_that_is_killed_is_charged_once_however_often_its_row_was_done_again(
    three: str, clock: Clock
) -> None:
    def then_kills(batch: Batch) -> None:
        if work.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        deadlocks(batch)

    for attempt in (1, 2, 3):
        work = Work(then_kills, 3)
        pid = os.fork()
        if pid == 0:
            try:
                jobs.run(spec(), three, work, worker_clock=clock.now)
            finally:
                os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        faults.wait_until(lambda: not faults.backends(three, "items"), "the killed process is gone")
        found = item(three)
        assert found is not None
        assert found[:3] == (attempt, None, None)
        clock.advance(timedelta(hours=2))
    record = jobs.run(spec(), three, Work(deadlocks), worker_clock=clock.now)
    assert (record.outcome, record.items, record.parked, done(three)) == ("partial", 1, 1, [1, 3])
    found = item(three)
    assert found is not None
    assert (found[0], "nothing was heard of its last attempts (3 in all)" in found[2]) == (3, True)


@pytest.mark.parametrize("deed", [deadlocks, loses_its_connection])
def test_rows_that_are_done_again_one_by_one_in_savepoints_are_not_charged_for_what_passes(
    three: str, deed: Deed
) -> None:
    failed_before(three)
    jobs.execute(three, "insert into gaffer.job_item select job, '3', attempts, next_attempt_at, first_failed_at,"
                        " failed_at, sqlstate, error from gaffer.job_item")  # fmt: skip
    record = jobs.run(spec(attempts=2), three, Work(deed, 1))
    assert (record.outcome, record.items, done(three), item(three)) == ("succeeded", 3, [1, 2, 3], None)


# ── broken ways to do it ─────────────────────────────────────────────────────────────────────────────────────────


def _leaves_it_charged(_: str, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Run, "_take_back", lambda _: None)  # pyright: ignore[reportUnknownLambdaType]


def _gives_it_back_for_later(url: str, _: pytest.MonkeyPatch) -> None:
    variants.replace(url, "charge_item", {"coalesce(v_entry.next_attempt_at, next_attempt_at)": "v_now"})


@pytest.mark.parametrize("broken", [_leaves_it_charged, _gives_it_back_for_later])
def test_a_broken_way_says_that_all_is_done_and_leaves_a_row(
    three: str, monkeypatch: pytest.MonkeyPatch, broken: Any
) -> None:
    failed_before(three, None)
    broken(three, monkeypatch)
    record = jobs.run(spec(), three, Work(deadlocks, 1))
    assert (record.outcome, done(three)) == ("succeeded", [1, 3])
