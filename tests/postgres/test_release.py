"""`gaffer release`, and what is said of whoever is in the way of a lease."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from click.testing import CliRunner

from gaffer_dagster import local
from gaffer_dagster.cli import main
from gaffer_dagster.domain.run import Outcome
from gaffer_dagster.engine.batch import Batch
from gaffer_dagster.errors import JobHeldError, LeaseLostError, UnknownJobError
from gaffer_dagster.store import db, horizon, leases, operations
from gaffer_dagster.store.operations import Operator
from gaffer_dagster.testing import scratch_database
from tests.support import jobs, protocol, variants
from tests.support.protocol import acquire, begin, commit, end, register, session

MAY = Operator("may", "it hangs")


@pytest.fixture
def job(url: str) -> Any:
    spec = jobs.spec()
    with session(url) as connection:
        register(connection, spec)
    return spec


def release(url: str, slot: int | None = None) -> list[tuple[int, int, str]]:
    with session(url) as connection:
        return [(each.slot, each.fence, each.owner) for each in operations.release(connection, "copy_rows", slot, MAY)]


def be_quick(url: str) -> None:
    """Whoever has locked a lease is waited for, but not for as long as else."""
    variants.replace(url, "lock_leases", {"set lock_timeout = '3s'": "set lock_timeout = '200ms'"})


def test_only_the_run_that_was_looked_at_loses_its_lease(url: str, job: Any) -> None:
    """Who has followed it while somebody made up his mind is another run."""
    with session(url) as holder:
        lease = acquire(holder, job, owner="the-follower:1:x").lease
        assert operations.release(holder, "copy_rows", 0, MAY, fence=lease.fence - 1) == []
        assert protocol.lease_row(url)[0] == lease.fence
        assert [each.fence for each in operations.release(holder, "copy_rows", 0, MAY, fence=lease.fence)] == [
            lease.fence
        ]


def test_a_release_takes_the_lease_from_a_run_in_the_middle_of_a_batch(url: str, job: Any) -> None:
    with session(url) as holder:
        held = acquire(holder, job, owner="the-holder:1:x").lease
        batch = begin(holder)
        assert release(url) == [(0, 1, "the-holder:1:x")]
        with pytest.raises(LeaseLostError):
            commit(holder, held, batch, since=None, until={"n": "1"})
        holder.execute("rollback")
        assert not leases.renew(holder, held, timedelta(minutes=1))
        assert protocol.lease_row(url)[:2] == (2, None)
        assert jobs.query(url, "select outcome, error, batches from gaffer.job_runs") == [
            ("abandoned", "released by may: it hangs", 0)
        ]
        assert jobs.query(
            url,
            "select consecutive_failures, leases_lost::int, follow_up_at <= gaffer.clock() from gaffer.job",
        ) == [(1, 1, True)]
        assert jobs.query(url, "select action, by, reason, details from gaffer.operator_action") == [
            ("release", "may", "it hangs", {"slot": 0, "fence": 1, "owner": "the-holder:1:x"})
        ]
        # What the holder says of its end, once it has noticed, does not hide who did it.
        assert end(holder, held, Outcome.LOST_LEASE, error="stopped").result == "lost_lease"
        assert jobs.query(url, "select outcome, error from gaffer.job_runs") == [
            ("lost_lease", "stopped; released by may: it hangs")
        ]
        assert acquire(holder, job).grant.fence == 3


def test_where_nobody_holds_it_nothing_is_changed(url: str, job: Any) -> None:
    before = protocol.lease_row(url), jobs.query(url, "select * from gaffer.job")
    assert release(url) == []
    assert (protocol.lease_row(url), jobs.query(url, "select * from gaffer.job")) == before
    assert jobs.query(url, "select count(*) from gaffer.operator_action") == [(0,)]


def test_a_redo_that_is_released_is_no_failure_and_asks_for_nothing(url: str) -> None:
    daily = jobs.daily("copy_rows")
    with session(url) as connection:
        register(connection, daily)
        acquire(connection, daily, trigger="redo", redo=daily.interval_of(horizon.now(connection)))
        release(url)
    assert protocol.outcomes(url) == ["abandoned"]
    assert jobs.query(url, "select consecutive_failures, follow_up_at from gaffer.job") == [(0, None)]


def test_only_the_named_slot_is_released(url: str, job: Any) -> None:
    jobs.execute(
        url,
        "insert into gaffer.job_lease (job, slot, fence, lease_id, owner) select 'copy_rows', n, 7, gen_random_uuid(),"
        " 'slot ' || n from generate_series(1, 2) n",
    )
    assert release(url, 1) == [(1, 7, "slot 1")]
    assert release(url) == [(2, 7, "slot 2")]
    with pytest.raises(UnknownJobError, match="no slot 3; it has those up to 2"):
        release(url, 3)


def test_a_run_that_lost_its_lease_to_a_release_says_who_did_it(url: str) -> None:
    jobs.make_source(url, 5)

    def hangs(batch: Batch) -> None:
        jobs.copy_rows(batch)
        release(url)
        batch.execute("select pg_sleep(60)")

    told = (
        'fence 1 of job "copy_rows" is no longer current, so that nothing more of this run is committed; let it stop, '
        "the next one does what is left. This one was released by may: it hangs"
    )
    with pytest.raises(LeaseLostError) as raised:
        jobs.run(jobs.spec(), url, hangs, lease=timedelta(seconds=1))
    assert str(raised.value) == told
    assert jobs.query(url, "select outcome, error from gaffer.job_runs") == [("lost_lease", f"LeaseLostError: {told}")]
    assert jobs.query(url, "select count(*) from target") == [(0,)]


def test_what_is_said_of_a_lost_lease_is_who_took_it(url: str, job: Any) -> None:
    """To a batch, a renewal and an end alike."""
    with session(url) as holder:
        held = acquire(holder, job).lease
        assert leases.lost(holder, held).endswith('It is the lease of slot 0 of job "copy_rows" by fence 1')
        assert leases.lost(holder, replace(held, lease_id=uuid4())).endswith("taken by another run, or by hand")
        protocol.expire(url)
        acquire(holder, job)
        assert leases.lost(holder, held).endswith("This one was found dead by the run of fence 2")
        with pytest.raises(LeaseLostError, match=r"found dead by the run of fence 2$"):
            commit(holder, held, begin(holder), since=None, until={"n": "1"})


def test_whoever_is_in_the_way_of_a_rename_is_named_too(url: str, job: Any) -> None:
    be_quick(url)
    with psycopg.connect(url) as blocker, session(url) as connection:
        lock(blocker)
        with pytest.raises(JobHeldError, match=rf"is locked by backend {blocker.info.backend_pid} .*terminate"):
            operations.rename(connection, "copy_rows", "other", MAY)


# ── who is in the way ────────────────────────────────────────────────────────────────────────────────────────────────


def lock(connection: psycopg.Connection[Any]) -> None:
    connection.execute("select 1 from gaffer.job_lease where job = 'copy_rows' for no key update")


def lock_in_a_savepoint(connection: psycopg.Connection[Any]) -> None:
    connection.execute("savepoint one")
    lock(connection)
    connection.execute("release one")


def share(connection: psycopg.Connection[Any]) -> None:
    connection.execute("select 1 from gaffer.job_lease where job = 'copy_rows' for share")
    connection.execute("savepoint one")
    lock(connection)


@pytest.mark.parametrize("how", [lock, lock_in_a_savepoint, share])
def test_a_lease_that_somebody_has_locked_names_him(url: str, job: Any, how: Any) -> None:
    """An open transaction on another lease is not taken for the one in the way."""
    be_quick(url)
    register_other = jobs.spec("other")
    with session(url) as connection:
        register(connection, register_other)
    with psycopg.connect(url, application_name="left-open") as blocker, psycopg.connect(url) as elsewhere:
        if how is lock:
            elsewhere.execute("select 1 from gaffer.job_lease where job = 'other' for no key update")
        how(blocker)
        pid = blocker.info.backend_pid
        told = f"the lease is locked by backend {pid} (user gaffer, application left-open, idle in transaction since 2"
        record = jobs.run(job, url)
        assert record.outcome is Outcome.BUSY
        assert record.error is not None
        assert record.error.startswith(told)
        assert str(elsewhere.info.backend_pid) not in record.error
        with pytest.raises(JobHeldError) as refused:
            release(url)
        assert told.replace("the lease", 'the lease of job "copy_rows"') in str(refused.value)
        assert str(refused.value).endswith(f"select pg_terminate_backend({pid})")
    assert jobs.query(url, "select count(*) from gaffer.operator_action") == [(0,)]


def test_a_blocker_of_another_role_is_named_as_far_as_it_may_be_seen(url: str, stranger: str, job: Any) -> None:
    """The functions run as their owner: here one that may see nothing of others."""
    role = db.parse_url(stranger)["user"]
    jobs.execute(url, f"grant usage on schema gaffer to {role}; grant select on gaffer.job_lease to {role}")
    jobs.execute(url, f"grant create on schema gaffer to {role}; alter function gaffer.lease_blockers owner to {role}")
    jobs.execute(url, f"grant execute on function gaffer.blockers to {role}")
    with psycopg.connect(url, application_name="left-open") as blocker:
        lock(blocker)
        assert jobs.run(job, url).error == (
            f"the lease is locked by backend {blocker.info.backend_pid} (user gaffer, application left-open, state not "
            "visible: grant pg_read_all_stats)"
        )


def test_a_prepared_transaction_in_the_way_is_named(tmp_path: Path) -> None:
    """It has no process that could be ended. Servers allow none unless they are told to."""
    jobs.execute(local.start(tmp_path, fsync=False), "alter system set max_prepared_transactions = 1")
    local.stop(tmp_path)
    try:
        with scratch_database(local.start(tmp_path, fsync=False)) as url:
            with session(url) as connection:
                register(connection, jobs.spec())
            with psycopg.connect(url, autocommit=True) as blocker:
                blocker.execute("begin")
                lock(blocker)
                blocker.execute("prepare transaction 'left over'")
            found = jobs.query(url, "select who, cure from gaffer.lease_blockers('copy_rows', 0)")
            assert [cure for _, cure in found] == ["rollback prepared 'left over'"]
            assert found[0][0].startswith("prepared transaction 'left over' (user ")
            jobs.execute(url, found[0][1])
            assert jobs.query(url, "select who from gaffer.lease_blockers('copy_rows', 0)") == []
    finally:
        local.stop(tmp_path)


def test_a_process_that_may_not_be_looked_into_counts_as_alive(url: str, stranger: str) -> None:
    role = db.parse_url(stranger)["user"]
    jobs.execute(url, f"grant create, usage on schema gaffer to {role}; alter function gaffer.is_gone owner to {role}")
    with jobs.connect(url) as other:
        seen = "select gaffer.is_gone(%s, now())"
        assert jobs.query(url, seen, other.info.backend_pid) == [(False,)]
        assert jobs.query(url, seen, 2147483647) == [(True,)]


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────────


def command(url: str, *words: str) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["release", *words], env={"GAFFER_DATABASE_URL": url})
    return done.exit_code, done.output


def test_the_command_says_whom_it_took_the_lease_from(url: str, job: Any) -> None:
    nothing = (0, "copy_rows: nobody holds the lease; nothing was changed\n")
    assert command(url, "copy_rows", "--yes") == nothing
    with session(url) as connection:
        acquire(connection, job, owner="the-holder:1:x")
    status, text = command(url, "copy_rows")
    assert (status, "away from the-holder:1:x?" in text) == (1, True)
    assert protocol.lease_row(url)[0] == 1
    status, text = command(url, "copy_rows", "--yes", "--by", "may", "--reason", "it hangs")
    assert status == 0
    assert "the lease of slot 0 was taken from the-holder:1:x (fence 1, held until" in text
    assert text.endswith("nothing more of that run is committed, and another one is asked for\n")
    assert command(url, "copy_rows") == nothing
    assert command(url, "nobody", "--yes")[0] == 1


def test_the_command_says_that_another_run_is_asked_for_only_where_one_comes(url: str, job: Any) -> None:
    with session(url) as connection:
        acquire(connection, job)
        operations.pause(connection, "copy_rows", None, None, MAY)
        connection.execute("select gaffer.register_external('elsewhere')")
        connection.execute("select gaffer.acquire('elsewhere', 0, gen_random_uuid())")
    status, text = command(url, "copy_rows", "--yes")
    assert (status, "asked for" in text, "once its pause is over" in text) == (0, False, True)
    status, text = command(url, "elsewhere", "--yes")
    assert (status, "asked for" in text, "has to start it again" in text) == (0, False, True)


BROKEN = {
    "the fence stays": ("release", {"set fence = fence + 1, lease_id = null": "set lease_id = lease_id"}),
    "the run is not ended": (
        "release",
        {"if gaffer.abandon(p_job, v_lease.slot, null,": "if gaffer.abandon(p_job, -1, null,"},
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_release_would_be_caught(url: str, job: Any, name: str) -> None:
    variants.replace(url, *BROKEN[name])
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        test_a_release_takes_the_lease_from_a_run_in_the_middle_of_a_batch(url, job)
