"""After a COMMIT whose answer was lost: the next fence for the same run, and only then a look at what became of it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from gaffer_dagster.domain.lease import Grant, Lease
from gaffer_dagster.domain.run import Outcome
from gaffer_dagster.errors import LeaseLostError
from gaffer_dagster.store import batches, db, leases
from tests.support import invariants, jobs, protocol
from tests.support.protocol import Actor, acquire, begin, commit, end, expire, session, until

SPEC = jobs.spec()
MINUTE = timedelta(seconds=60)


@pytest.fixture
def connection(url: str) -> Iterator[db.Connection]:
    with session(url) as connection:
        protocol.register(connection, SPEC)
        yield connection


def superseded(held: Lease, grant: Grant, new_id: UUID) -> Lease:
    assert grant.fence is not None
    return Lease(held.job, held.slot, held.run_id, grant.fence, new_id)


def test_it_moves_the_run_to_the_new_pair_and_abandons_nothing(url: str, connection: db.Connection) -> None:
    held, new_id = acquire(connection, SPEC).lease, uuid4()
    commit(connection, held, begin(connection), since=None, until={"n": "1"})
    grant = leases.supersede(connection, held, new_id, MINUTE)
    assert (grant.outcome, grant.fence, grant.run_id, grant.batches) == ("granted", 2, held.run_id, 1)
    assert (grant.position, grant.deadline_at is not None) == ({"n": "1"}, True)
    assert jobs.query(url, "select id, fence, lease_id, outcome, error from gaffer.job_runs") == [
        (held.run_id, 2, new_id, "running", None)
    ]
    assert protocol.lease_row(url)[:2] == (2, new_id)
    assert jobs.query(url, "select consecutive_failures from gaffer.job") == [(0,)]
    commit(connection, superseded(held, grant, new_id), begin(connection), since={"n": "1"}, until={"n": "2"})


def test_the_same_call_again_gives_the_same_grant(connection: db.Connection) -> None:
    held, new_id = acquire(connection, SPEC).lease, uuid4()
    first, second, third = (leases.supersede(connection, held, new_id, MINUTE) for _ in range(3))
    assert first.fence == second.fence == third.fence == 2
    assert first.run_id == second.run_id == third.run_id == held.run_id
    again = leases.supersede(connection, superseded(held, first, new_id), uuid4(), MINUTE)
    assert again.fence == 3


def test_the_old_pair_can_do_nothing_any_more(url: str, connection: db.Connection) -> None:
    held, new_id = acquire(connection, SPEC).lease, uuid4()
    jobs.execute(url, "create table effects (n int)")
    with session(url) as late:
        batch = begin(late)
        late.execute("insert into effects values (1)")
        grant = leases.supersede(connection, held, new_id, MINUTE)
        with pytest.raises(LeaseLostError, match="fence 1"):
            commit(late, held, batch, since=None, until={"n": "1"})
    assert not leases.renew(connection, held, MINUTE)
    assert leases.renew(connection, superseded(held, grant, new_id), MINUTE)
    assert jobs.query(url, "select * from effects") == []


def test_it_waits_for_a_commit_that_is_still_on_its_way(url: str, connection: db.Connection) -> None:
    """Looked for at once, the batch would be missing; after the wait it is counted."""
    held, new_id = acquire(connection, SPEC).lease, uuid4()
    with session(url) as slow:
        batch = begin(slow)
        slow.execute(
            "select gaffer.commit_batch(%s, 0, %s, %s, %s, %s, null, '{\"n\": \"1\"}', null, 1, '1m')",
            [held.job, held.fence, held.lease_id, held.run_id, batch],
        )  # and the COMMIT takes its time

        def asked() -> Grant:
            with session(url) as other:
                return leases.supersede(other, held, new_id, MINUTE)

        answer = Actor(asked)
        until(lambda: protocol.waits_for_a_lock(url))
        assert jobs.query(url, "select batches from gaffer.job_runs") == [(0,)]
        slow.execute("commit")
        grant = answer.result()
    assert (grant.fence, grant.batches, grant.position) == (2, 1, {"n": "1"})


def test_it_is_refused_once_another_run_took_over(url: str, connection: db.Connection) -> None:
    held = acquire(connection, SPEC).lease
    expire(url)
    other = acquire(connection, SPEC)
    before = protocol.lease_row(url)
    with pytest.raises(LeaseLostError, match=r"does what is left\. This one was found dead by the run of fence 2$"):
        leases.supersede(connection, held, uuid4(), MINUTE)
    db.roll_back(connection)
    assert protocol.lease_row(url) == before
    assert protocol.outcomes(url) == ["abandoned", "running"]
    end(connection, other.lease)


def test_a_take_over_that_commits_while_it_waits_has_won(url: str, connection: db.Connection) -> None:
    held, lease_id = acquire(connection, SPEC).lease, uuid4()
    expire(url)
    with psycopg.connect(url) as other:
        taken = (
            "select (gaffer.acquire(%s, 0, %s, 'x', '1m', '5m', 'manual', null, null, null, '', null, '0', null, null,"
            " false, null)).fence"
        )
        assert other.execute(taken, [SPEC.name, lease_id]).fetchone() == (2,)

        def asked() -> Grant:
            with session(url) as late:
                return leases.supersede(late, held, uuid4(), MINUTE)

        answer = Actor(asked)
        until(lambda: protocol.waits_for_a_lock(url))
        other.commit()
        with pytest.raises(LeaseLostError):
            answer.result()
    assert protocol.lease_row(url)[:2] == (2, lease_id)
    assert protocol.outcomes(url) == ["abandoned", "running"]


def test_it_is_refused_once_the_run_has_ended(connection: db.Connection) -> None:
    held = acquire(connection, SPEC).lease
    end(connection, held)
    with pytest.raises(LeaseLostError):
        leases.supersede(connection, held, uuid4(), MINUTE)


@pytest.mark.parametrize("arrived", [True, False])
def test_a_run_whose_commit_got_no_answer_goes_on_with_one_effect(
    url: str, arrived: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B78 with the cut in the client; the proxy in tests/chaos cuts the wire. A lost answer is no failure."""
    jobs.make_source(url, 10)
    invariants.watch(url)
    real, cuts = batches.commit, []

    def cut(connection: db.Connection, *given: Any, **fields: Any) -> Any:
        if len(cuts) != 1:
            cuts.append(None)
            return real(connection, *given, **fields)
        cuts.append(connection.info.backend_pid)
        if arrived:
            real(connection, *given, **fields)
        connection.close()
        raise psycopg.OperationalError("server closed the connection unexpectedly")

    monkeypatch.setattr(batches, "commit", cut)
    record = jobs.run(jobs.spec(batch_rows=4), url)
    assert (record.outcome, record.items, record.batches, record.fence) == (Outcome.SUCCEEDED, 10, 3, 2)
    assert jobs.query(url, "select consecutive_failures from gaffer.job") == [(0,)]
    assert len(cuts) == (3 if arrived else 4)
    invariants.check(url, complete=True)
