"""Who may write: one holder at a time, by the database's clock, and a wake-up that finds one is not forgotten."""

from __future__ import annotations

import logging
import threading
from datetime import datetime, timedelta, timezone
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from gaffer_dagster.domain.lease import Grant, Lease
from gaffer_dagster.domain.run import Outcome
from gaffer_dagster.engine.batch import Batch
from gaffer_dagster.engine.steps import Station
from gaffer_dagster.errors import LeaseLostError, UnknownJobError
from gaffer_dagster.store import db, leases, runs
from tests.support import invariants, jobs, protocol
from tests.support.protocol import Actor, acquire, all_at_once, begin, commit, end, expire, freeze, session, until

AT = datetime(2027, 3, 1, 12, tzinfo=timezone.utc)


@pytest.fixture
def job(url: str) -> Any:
    """Registered, with nothing to do."""
    spec = jobs.spec()
    with session(url) as connection:
        protocol.register(connection, spec)
    return spec


# ── one winner ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_only_one_of_four_racing_acquirers_wins(url: str, job: Any) -> None:
    """B41: the same owner everywhere, as in containers whose processes all have pid 1."""
    rounds, racers = 50, 4
    turn = threading.Barrier(racers)

    def race(_: int) -> list[protocol.Attempt]:
        found: list[protocol.Attempt] = []
        with session(url) as connection:
            for number in range(rounds):
                turn.wait(60)
                found.append(acquire(connection, job, owner="container:1:x"))
                if turn.wait(60) == 0:  # every second holder ends, the others die
                    expire(url)
                    if number % 2:
                        won = next((a for a in found[-1:] if a.grant.outcome == "granted"), None)
                        if won is not None:
                            end(connection, won.lease)
                turn.wait(60)
        return found

    attempts = [attempt for found in all_at_once(racers, race) for attempt in found]
    granted = sorted(attempt.grant.fence or 0 for attempt in attempts if attempt.grant.outcome == "granted")
    assert granted == list(range(1, rounds + 1))
    assert sum(attempt.grant.outcome == "busy" for attempt in attempts) == rounds * (racers - 1)
    assert len({attempt.lease_id for attempt in attempts}) == rounds * racers
    assert outcomes_of(url)["running"] <= 1
    with session(url) as connection:
        expire(url)
        last = acquire(connection, job)
        assert last.grant.fence == rounds + 1
        assert outcomes_of(url)["running"] == 1
        end(connection, last.lease)
    assert sum(outcomes_of(url).values()) == rounds + 1


def outcomes_of(url: str) -> dict[str, int]:
    found = dict(jobs.query(url, "select outcome, count(*) from gaffer.job_runs group by 1"))
    return {"running": 0} | found


def test_the_same_acquire_again_gives_the_same_grant_and_one_run(url: str, job: Any) -> None:
    lease_id = uuid4()
    with session(url) as connection:
        first = acquire(connection, job, lease_id=lease_id).grant
        expire(url)  # however late the second call comes
        second = acquire(connection, job, lease_id=lease_id).grant
    assert (first.fence, first.run_id, first.deadline_at) == (second.fence, second.run_id, second.deadline_at)
    assert first.outcome == second.outcome == "granted"
    assert protocol.outcomes(url) == ["running"]
    assert protocol.lease_row(url)[:2] == (1, lease_id)


def test_an_acquire_whose_answer_was_lost_is_asked_again_by_the_engine(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs.make_source(url, 3)
    real, lost = leases.acquire, []

    def acquire_and_lose(connection: db.Connection, **fields: Any) -> Grant:
        grant = real(connection, **fields)
        if not lost:
            lost.append(grant)
            connection.close()
            raise psycopg.OperationalError("the connection is lost")
        return grant

    monkeypatch.setattr(leases, "acquire", acquire_and_lose)
    record = jobs.run(jobs.spec(), url)
    assert (record.outcome, record.items, record.fence, record.id) == (Outcome.SUCCEEDED, 3, 1, lost[0].run_id)
    assert protocol.outcomes(url) == ["succeeded"]


def test_a_job_that_nobody_registered_is_refused_by_name(url: str) -> None:
    with session(url) as connection, pytest.raises(UnknownJobError, match="copy_rows"):
        acquire(connection, jobs.spec())


def test_a_lease_shorter_than_a_second_or_longer_than_any_is_refused(url: str, job: Any) -> None:
    with session(url) as connection:
        for seconds in (0.5, 601):
            with pytest.raises(psycopg.Error, match=r"copy_rows.*between 1 second and"):
                acquire(connection, job, lease=seconds)
            db.roll_back(connection)


# ── whose clock, and when ────────────────────────────────────────────────────────────────────────────────────────


def test_a_lease_is_free_at_its_end_and_busy_a_microsecond_before(url: str, job: Any) -> None:
    with session(url) as connection:
        freeze(url, AT)
        first = acquire(connection, job, lease=10)
        assert first.grant.lease_until == AT + timedelta(seconds=10)
        freeze(url, AT + timedelta(seconds=10, microseconds=-1))
        assert acquire(connection, job).grant.outcome == "busy"
        freeze(url, AT + timedelta(seconds=10))
        second = acquire(connection, job)
        assert (second.grant.outcome, second.grant.fence) == ("granted", 2)


def test_expiry_is_judged_by_the_holders_own_lease(url: str, job: Any) -> None:
    """B53: a holder of 10 s and a contender of 30 s, and the other way round."""
    with session(url) as connection:
        for number, (holders, contenders) in enumerate([(10, 30), (30, 10)]):
            start = AT + timedelta(hours=number)
            freeze(url, start)
            assert acquire(connection, job, lease=holders).grant.outcome == "granted"
            freeze(url, start + timedelta(seconds=holders - 1))
            assert acquire(connection, job, lease=contenders).grant.outcome == "busy"
            freeze(url, start + timedelta(seconds=holders + 1))
            won = acquire(connection, job, lease=contenders)
            assert won.grant.outcome == "granted"
            end(connection, won.lease)


def test_a_lease_absurdly_far_ahead_does_not_block(url: str, job: Any) -> None:
    with session(url) as connection:
        freeze(url, AT + timedelta(days=1))  # the clock ran ahead, and is then set right
        held = acquire(connection, job)
        freeze(url, AT)
        taken = acquire(connection, job)
        assert (taken.grant.outcome, taken.grant.fence) == ("granted", 2)
        assert taken.grant.lease_until == AT + timedelta(seconds=60)
        assert not leases.renew(connection, held.lease, timedelta(seconds=60))
        freeze(url, AT - timedelta(minutes=5))  # a clock that steps back a little costs patience only
        assert acquire(connection, job).grant.outcome == "busy"


@pytest.mark.parametrize("what", ["acquire", "supersede"])
def test_a_lease_granted_after_a_wait_is_not_over_already(url: str, job: Any, what: str) -> None:
    """B52: with now(), or a clock read before the lock, it would have begun before the wait."""
    with session(url) as connection, psycopg.connect(url) as blocker:
        held = acquire(connection, job, lease=1)
        blocker.execute("select * from gaffer.job_lease for no key update")

        def wait() -> Grant:
            with session(url) as other:
                if what == "supersede":
                    return leases.supersede(other, held.lease, uuid4(), timedelta(seconds=1))
                return acquire(other, job, lease=1, wait=8).grant

        waiting = Actor(wait)
        until(lambda: protocol.waits_for_a_lock(url))
        until(lambda: jobs.query(url, "select lease_until < clock_timestamp() from gaffer.job_lease") == [(True,)])
        row = blocker.execute("select clock_timestamp()").fetchone()
        assert row is not None
        blocker.commit()
    grant = waiting.result()
    assert grant.outcome == "granted"
    assert grant.fence == 2
    assert grant.granted_at >= row[0]
    assert grant.lease_until is not None
    assert grant.lease_until >= row[0] + timedelta(seconds=1)


def test_a_stall_before_the_statement_does_not_age_the_lease(url: str, job: Any) -> None:
    """B55: what counts is the time at which the statement runs, not that at which its transaction began."""
    with jobs.connect(url) as connection:
        connection.execute("begin")
        row = connection.execute("select clock_timestamp() from pg_sleep(1.2)").fetchone()
        assert row is not None
        found = connection.execute(
            "select granted_at, lease_until from gaffer.acquire('copy_rows', 0, %s, 'x', '1s', '1m', 'manual', null,"
            " null, null, '', null, '0', null, null, false, null)",
            [uuid4()],
        ).fetchone()
        connection.execute("commit")
    assert found is not None
    assert found[0] >= row[0]
    assert found[1] >= row[0] + timedelta(seconds=1)


# ── holders that are holders no more ─────────────────────────────────────────────────────────────────────────────


def test_a_late_attempt_of_the_same_process_touches_nothing(url: str, job: Any) -> None:
    """B48: the owner is not what is compared."""
    jobs.execute(url, "create table effects (who text)")
    with session(url) as connection, session(url) as thread:
        first = acquire(connection, job, owner="host:1:same")
        batch = begin(connection)
        connection.execute("insert into effects values ('first')")
        expire(url)
        second = acquire(thread, job, owner="host:1:same")
        before = protocol.lease_row(url)
        with pytest.raises(LeaseLostError, match='fence 1 of job "copy_rows" is no longer current'):
            commit(connection, first.lease, batch, since=None, until={"n": "1"})
        db.roll_back(connection)
        assert not leases.renew(connection, first.lease, timedelta(seconds=60))
        assert end(connection, first.lease).result == "lost_lease"
        assert protocol.lease_row(url) == before
        assert before[:3] == (2, second.lease_id, "host:1:same")
        assert jobs.query(url, "select * from effects") == []
        assert protocol.outcomes(url) == ["lost_lease", "running"]
        commit(thread, second.lease, begin(thread), since=None, until={"n": "1"})


def test_the_right_fence_with_another_lease_id_is_refused(url: str, job: Any) -> None:
    """A fail-over or a restored backup can hand out a number twice."""
    with session(url) as connection:
        held = acquire(connection, job)
        twin = protocol.Attempt(held.grant, uuid4(), job.name).lease
        assert not leases.renew(connection, twin, timedelta(seconds=60))
        with pytest.raises(LeaseLostError, match='fence 1 of job "copy_rows" is no longer current'):
            commit(connection, twin, begin(connection), since=None, until={"n": "1"})
        db.roll_back(connection)
        with pytest.raises(LeaseLostError):
            leases.supersede(connection, twin, uuid4(), timedelta(seconds=60))
        db.roll_back(connection)
        with pytest.raises(UnknownJobError):
            end(connection, twin)
        db.roll_back(connection)
        commit(connection, held.lease, begin(connection), since=None, until={"n": "1"})


def test_a_batch_that_finds_the_watermark_elsewhere_commits_nothing(url: str, job: Any) -> None:
    """Somebody set it by hand, under a run that holds the lease."""
    jobs.execute(url, "create table effects (n int)")
    with session(url) as connection:
        held = acquire(connection, job)
        commit(connection, held.lease, begin(connection), since=None, until={"n": "1"})
        for since in (None, {"n": "0"}, {"n": "1", "m": "1"}):
            batch = begin(connection)
            connection.execute("insert into effects values (1)")
            with pytest.raises(LeaseLostError, match='watermark of job "copy_rows" is not where'):
                commit(connection, held.lease, batch, since=since, until={"n": "2"})
            db.roll_back(connection)
        commit(connection, held.lease, begin(connection), since={"n": "1"}, until={"n": "2"})
    assert jobs.query(url, "select * from effects") == []
    assert jobs.query(url, "select batches, watermark_to from gaffer.job_runs") == [(2, {"n": "2"})]


def test_release_clears_the_lease_id_and_keeps_the_fence(url: str, job: Any) -> None:
    with session(url) as connection:
        held = acquire(connection, job)
        batch = begin(connection)
        with session(url) as other:
            assert end(other, held.lease).result == "ended"
        with pytest.raises(LeaseLostError):
            commit(connection, held.lease, batch, since=None, until={"n": "1"})
        db.roll_back(connection)
        assert not leases.renew(connection, held.lease, timedelta(seconds=60))
        with pytest.raises(LeaseLostError):
            leases.supersede(connection, held.lease, uuid4(), timedelta(seconds=60))
        db.roll_back(connection)
        fence, lease_id, _, lease_until = protocol.lease_row(url)
        assert (fence, lease_id, lease_until.year) == (1, None, 1970)
        assert acquire(connection, job).grant.fence == 2


def test_the_database_refuses_a_fence_that_does_not_grow(url: str, job: Any) -> None:
    with session(url) as connection:
        acquire(connection, job)
        acquire(connection, job, lease_id=UUID(int=0))
    for text in (
        "delete from gaffer.job_lease",
        "truncate gaffer.job_lease",
        "update gaffer.job_lease set fence = fence - 1",
        "update gaffer.job_lease set fence = 0",
        "update gaffer.job_lease set lease_id = gen_random_uuid()",
        "delete from gaffer.job",
        "delete from gaffer.job_watermark",
        "truncate gaffer.job_watermark",
        "update gaffer.job_watermark set job = 'copy_rows'",
    ):
        before = protocol.lease_row(url)
        with pytest.raises(psycopg.Error):
            jobs.execute(url, text)
        assert protocol.lease_row(url) == before
    jobs.execute(url, "update gaffer.job_lease set fence = fence + 1, lease_id = null")
    jobs.execute(url, "update gaffer.job set name = 'renamed'")
    assert protocol.lease_row(url, "renamed")[:2] == (2, None)


def _updates(url: str, lease: Lease) -> tuple[int, int]:
    """How many of twenty renewals were written, and how many of these in place (HOT)."""
    seen = "select n_tup_upd, n_tup_hot_upd from pg_stat_user_tables where relid = 'gaffer.job_lease'::regclass"
    with jobs.connect(url) as connection:
        connection.execute("vacuum full gaffer.job_lease")
    with session(url) as connection:
        [before] = jobs.query(url, seen)
        for _ in range(20):
            assert leases.renew(connection, lease, timedelta(minutes=1))
        connection.execute("select pg_stat_force_next_flush()")
        until(lambda: jobs.query(url, seen)[0][0] >= before[0] + 20)
        [after] = jobs.query(url, seen)
    return after[0] - before[0], after[1] - before[1]


def test_a_renewal_is_written_in_place(url: str, job: Any) -> None:
    with session(url) as connection:
        held = acquire(connection, job).lease
    assert _updates(url, held) == (20, 20)
    jobs.execute(url, "create index on gaffer.job_lease (lease_until)")  # and that would be seen
    assert _updates(url, held) == (20, 0)


def test_a_lease_cut_off_from_renewal_is_lost_to_the_next_run(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """B51 (b)."""
    jobs.make_source(url, 20)
    invariants.watch(url)

    def cut_off(*_: Any) -> bool:
        raise psycopg.OperationalError("no route to host")

    other: list[Any] = []

    def slow(batch: Batch) -> None:
        jobs.copy_rows(batch)
        if batch.number == 2:
            until(lambda: jobs.query(url, "select lease_until < clock_timestamp() from gaffer.job_lease") == [(True,)])
            other.append(jobs.run(jobs.spec(batch_rows=5), url))

    with monkeypatch.context() as patch:
        patch.setattr(leases, "renew", cut_off)
        with pytest.raises(LeaseLostError):
            jobs.run(jobs.spec(batch_rows=5), url, slow, lease=timedelta(seconds=1))
    assert protocol.outcomes(url) == ["lost_lease", "succeeded"]
    assert (other[0].items, other[0].fence) == (15, 2)
    assert jobs.query(url, "select fence, count(*) from target group by 1 order by 1") == [(1, 5), (2, 15)]
    invariants.check(url, complete=True)


def test_a_run_stops_within_a_second_once_its_fence_is_gone(url: str) -> None:
    jobs.make_source(url, 5)
    taken: list[Any] = []

    def stuck(batch: Batch) -> None:
        jobs.copy_rows(batch)
        jobs.execute(url, "update gaffer.job_lease set fence = fence + 1, lease_id = null, lease_until = 'epoch'")
        taken.append(datetime.now(timezone.utc))
        batch.execute("select pg_sleep(600)")

    with pytest.raises(LeaseLostError):
        jobs.run(jobs.spec(), url, stuck, lease=timedelta(seconds=1))
    # A third of the lease until it is noticed; the rest is the load of the machine.
    assert datetime.now(timezone.utc) - taken[0] < timedelta(seconds=10)
    assert jobs.query(url, "select count(*) from target") == [(0,)]
    assert jobs.query(
        url,
        "select count(*) from pg_stat_activity where state = 'active' and pid <> pg_backend_pid()"
        " and datname = current_database() and backend_type = 'client backend'",
    ) == [(0,)]
    assert protocol.outcomes(url) == ["lost_lease"]


def test_a_lock_timeout_of_the_renewal_is_no_lost_lease(url: str, caplog: pytest.LogCaptureFixture) -> None:
    """B54: a batch that itself locks the lease's row, for longer than the lease."""
    jobs.make_source(url, 5)
    caplog.set_level(logging.DEBUG, "gaffer")
    contenders: list[Any] = []

    def slow(batch: Batch) -> None:
        if contenders:  # the run was wanted, and looks again
            return
        batch.execute("select 1 from gaffer.job_lease for no key update")
        jobs.copy_rows(batch)
        until(lambda: "not renewed" in caplog.text and "55P03" in caplog.text)
        contenders.append(jobs.run(jobs.spec(), url))

    record = jobs.run(jobs.spec(), url, slow, lease=timedelta(seconds=1))
    assert (record.outcome, record.items, record.fence) == (Outcome.SUCCEEDED, 5, 1)
    assert [found.outcome for found in contenders] == [Outcome.BUSY]
    after = jobs.run(jobs.spec(), url)
    assert (after.fence, after.items) == (2, 0)
    assert jobs.query(url, "select count(*), count(distinct id) from target") == [(5, 5)]


# ── busy, paused ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("locked", [False, True])
def test_busy_comes_soon_is_recorded_once_and_leaves_a_wish(
    url: str, job: Any, locked: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """B47: the loser does not say that it started anything."""
    caplog.set_level(logging.INFO, "gaffer")
    with session(url) as connection, psycopg.connect(url) as blocker:
        held = acquire(connection, job, owner="the-holder:1:x")
        if locked:  # as a batch does while it commits
            blocker.execute("select 1 from gaffer.job_lease for no key update")
        began = datetime.now(timezone.utc)
        record = jobs.run(job, url)
        assert datetime.now(timezone.utc) - began < timedelta(seconds=10)
        assert record.ended_at is not None
        assert record.ended_at - record.started_at < timedelta(seconds=2)
        assert (record.outcome, record.fence, record.items) == (Outcome.BUSY, None, 0)
        assert protocol.outcomes(url) == ["running", "busy"]
        assert jobs.query(url, "select wanted_at is not null from gaffer.job") == [(True,)]
        assert ("busy: holder=the-holder:1:x" in caplog.text) is not locked
        blocked_by = f"backend {blocker.info.backend_pid} (user " if locked else ""
        assert f"the-holder:1:x; the lease is locked by {blocked_by}" in caplog.text or not locked
        assert "leased" not in caplog.text
        blocker.rollback()
        assert end(connection, held.lease).result == "wanted"


def test_one_run_id_in_two_processes_for_twenty_ticks_has_twenty_effects(url: str, job: Any) -> None:
    """B46: Dagster's run id is no owner."""
    jobs.make_source(url)
    for tick in range(20):
        jobs.add_rows(url, 1)
        pair = all_at_once(2, lambda _, tick=tick: jobs.run(job, url, dagster_run_id=f"run {tick}"))
        assert sum(record.items for record in pair) == 1
        assert len({record.owner for record in pair}) == 2
    assert jobs.query(url, "select count(*), count(distinct id), count(distinct fence) from target") == [(20, 20, 20)]


def test_each_wish_is_another_one_even_at_the_same_instant(url: str, job: Any) -> None:
    with session(url) as connection:
        freeze(url, AT)
        acquire(connection, job)
        wishes = []
        for _ in range(3):
            acquire(connection, job)
            wishes += jobs.query(url, "select wanted_at from gaffer.job")
        assert len(set(wishes)) == 3
        assert wishes == sorted(wishes)


def test_a_paused_job_does_not_run_unless_told_to(url: str) -> None:
    jobs.make_source(url, 3)
    jobs.run(jobs.spec(), url, lambda batch: None)
    jobs.add_rows(url, 4)
    jobs.execute(
        url, "update gaffer.job set paused_at = gaffer.clock(), paused_by = 'ann', pause_reason = 'books are closed'"
    )
    record = jobs.run(jobs.spec(), url)
    assert (record.outcome, record.fence, record.items) == (Outcome.PAUSED, None, 0)
    assert record.ended_at == record.started_at
    assert jobs.query(url, "select wanted_at, consecutive_failures from gaffer.job") == [(None, 0)]
    assert jobs.run(jobs.spec(), url, despite_pause=True).items == 4
    assert jobs.run(jobs.spec(), url).outcome is Outcome.PAUSED
    jobs.execute(url, "update gaffer.job set paused_until = gaffer.clock() + interval '1 hour'")
    assert jobs.run(jobs.spec(), url).outcome is Outcome.PAUSED
    jobs.execute(url, "update gaffer.job set paused_until = gaffer.clock()")
    assert jobs.run(jobs.spec(), url).outcome is Outcome.SUCCEEDED
    assert protocol.outcomes(url) == ["succeeded", "paused", "succeeded", "paused", "paused", "succeeded"]


# ── a wake-up that meets a run which is just ending ──────────────────────────────────────────────────────────────


def test_a_wish_before_the_end_makes_the_run_look_again(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs.make_source(url, 3)
    real, woken = runs.end, []

    def end_later(connection: db.Connection, *given: Any, **fields: Any) -> runs.Ending:
        if not woken:
            woken.append(None)
            jobs.add_rows(url, 4)
            woken[0] = jobs.run(jobs.spec(), url)
        return real(connection, *given, **fields)

    monkeypatch.setattr(runs, "end", end_later)
    record = jobs.run(jobs.spec(), url)
    assert woken[0].outcome is Outcome.BUSY
    assert (record.outcome, record.items, record.batches, record.fence) == (Outcome.SUCCEEDED, 7, 2, 1)
    assert jobs.query(url, "select count(*), count(distinct id) from target") == [(7, 7)]
    assert protocol.outcomes(url) == ["succeeded", "busy"]


def test_a_wish_that_waits_for_the_ending_run_is_seen_by_it_or_runs_itself(url: str, job: Any) -> None:
    """The row of the job orders the two: whoever is second sees what the first one did."""
    with session(url) as connection, psycopg.connect(url) as blocker:
        held = acquire(connection, job)
        blocker.execute("select 1 from gaffer.job for no key update")
        blocker.execute("update gaffer.job set wanted_at = gaffer.clock()")

        def ending() -> runs.Ending:
            return end(connection, held.lease)

        actor = Actor(ending)
        until(lambda: protocol.waits_for_a_lock(url))
        blocker.commit()
        answer = actor.result()
        assert answer.result == "wanted"
        assert protocol.outcomes(url) == ["running"]
        assert end(connection, held.lease, wanted_at=answer.wanted_at).result == "ended"


def test_a_wake_up_whose_second_try_comes_after_the_end_runs(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs.make_source(url, 3)
    real, tries = leases.acquire, []
    freed = threading.Event()

    def slow(batch: Batch) -> None:
        jobs.copy_rows(batch)
        freed.wait(60)

    def acquire_slowly(connection: db.Connection, **fields: Any) -> Grant:
        grant = real(connection, **fields)
        if threading.current_thread() is threading.main_thread():
            tries.append(grant.outcome)
            if len(tries) == 1:  # and only now the other one ends
                freed.set()
                first.result()
                jobs.add_rows(url, 4)
        return grant

    first = Actor(lambda: jobs.run(jobs.spec(), url, slow))
    until(lambda: jobs.query(url, "select 1 from gaffer.job_runs where outcome = 'running'"))
    monkeypatch.setattr(leases, "acquire", acquire_slowly)
    record = jobs.run(jobs.spec(), url)
    assert tries == ["busy", "granted"]
    assert (record.outcome, record.items, record.fence) == (Outcome.SUCCEEDED, 4, 2)
    assert first.result().items == 3


def test_a_run_that_ends_capped_or_failed_does_not_look_again(url: str, job: Any) -> None:
    with session(url) as connection:
        for outcome in (Outcome.CAPPED, Outcome.FAILED, Outcome.INTERRUPTED):
            held = acquire(connection, job)
            assert acquire(connection, job).grant.outcome == "busy"
            assert end(connection, held.lease, outcome, wanted_at=held.grant.wanted_at).result == "ended"


def test_no_wake_up_of_many_is_forgotten(url: str, job: Any) -> None:
    """Each writer commits a row and then wakes the job, once. Afterwards nothing is left, without a further tick.

    The work is done by the protocol alone, on rows that are due as soon as they are visible: what is due has a
    horizon of its own with `NewRows`, and would hide whether a wake-up was forgotten.
    """
    jobs.execute(url, "create table todo (id int primary key); create table done (id int primary key, fence bigint)")
    wakers, each = 6, 25

    def wake(connection: db.Connection) -> str:
        lease_id = uuid4()
        for wait in (0, 1):
            attempt = acquire(connection, job, lease_id=lease_id, wait=wait)
            if attempt.grant.outcome == "granted":
                break
        else:
            return attempt.grant.outcome
        wanted_at, position = attempt.grant.wanted_at, attempt.grant.position
        number = int(position["n"]) if position else 0
        while True:
            batch = begin(connection)
            connection.execute(
                "insert into done select id, %s from todo where id not in (select id from done)", [attempt.grant.fence]
            )
            number += 1
            reached = {"n": str(number)}
            commit(connection, attempt.lease, batch, since=position, until=reached)
            position = reached
            ending = end(connection, attempt.lease, wanted_at=wanted_at)
            if ending.result == "ended":
                return "succeeded"
            assert ending.result == "wanted"
            wanted_at = ending.wanted_at

    def waker(number: int) -> list[str]:
        with session(url) as connection:
            found = []
            for turn in range(each):
                connection.execute("insert into todo values (%s)", [number * each + turn])
                found.append(wake(connection))
            return found

    ends = [end for found in all_at_once(wakers, waker) for end in found]
    assert jobs.query(url, "select count(*) from todo") == [(wakers * each,)]
    assert jobs.query(url, "select id from todo except select id from done") == []
    assert "busy" in ends
    assert jobs.query(url, "select count(*) from gaffer.job_runs where outcome = 'running'") == [(0,)]


def test_many_engines_at_once_lose_and_double_nothing(url: str) -> None:
    """Rows whose number was still open when the last run looked wait for the next tick; nothing else does."""
    jobs.make_source(url)
    invariants.watch(url)

    def waker(number: int) -> list[Outcome]:
        found = []
        for turn in range(6):
            jobs.add_rows(url, 1 + (number + turn) % 4)
            found.append(jobs.run(jobs.spec(batch_rows=3), url).outcome)
        return found

    ends = {end for found in all_at_once(4, waker) for end in found}
    assert ends <= {Outcome.SUCCEEDED, Outcome.BUSY}
    invariants.check(url)
    assert jobs.run(jobs.spec(), url).outcome is Outcome.SUCCEEDED
    invariants.check(url, complete=True)


def test_the_observer_sees_the_stations_in_order(url: str) -> None:
    jobs.make_source(url, 3)
    seen: list[Station] = []
    with jobs.opened(jobs.spec(batch_rows=2), url, observe=seen.append) as run:
        run.apply(jobs.copy_rows)
    run.reported()
    batch = [Station.DUE, Station.APPLIED, Station.COMMITTED]
    assert seen == [Station.LEASED, *batch, *batch, Station.ENDED, Station.REPORTED]
    assert set(seen) == set(Station)


def test_a_run_knows_whom_it_found_dead_and_nobody_else_does(url: str, job: Any) -> None:
    """For the summary on the asset's page."""
    with session(url) as connection:
        dead = acquire(connection, job).lease
        expire(url)
        heir = acquire(connection, job).lease
        found = runs.found_dead_by(connection, runs.get(connection, heir.run_id))
        assert [(each.id, each.outcome, each.fence) for each in found] == [(dead.run_id, Outcome.ABANDONED, dead.fence)]
        end(connection, heir)
        next_one = acquire(connection, job).lease
        assert runs.found_dead_by(connection, runs.get(connection, next_one.run_id)) == []
