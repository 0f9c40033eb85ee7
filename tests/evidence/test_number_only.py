"""A fence that is only a number, on real servers that forget: a promoted asynchronous standby, a restored backup, and a
crash with `synchronous_commit = off`. The number is issued twice, and the stale holder commits by it; the product, in
another database of the same server, is put through the same and refuses it.

The fourth way to be wrong is the run's own: what it did was lost, and it would end as if all were done. The model found
that (spec/lease.pml, COUNTS).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gaffer_dagster import local
from gaffer_dagster.domain.run import Outcome
from gaffer_dagster.domain.watermark import Position
from gaffer_dagster.engine.steps import Station
from gaffer_dagster.errors import LeaseLostError
from gaffer_dagster.store import db, migrate
from tests.support import faults, jobs, protocol, servers, variants
from tests.support.protocol import Attempt

PRODUCT, NUMBER_ONLY = "product", "number_only"
SPEC = jobs.spec()

_RUN_BY_ID = "where id = p_run_id and lease_id = p_lease_id and outcome = 'running'"
_BY_NUMBER = {
    **variants.VARIANTS["number-only fence"].replaced,
    _RUN_BY_ID: "where job = p_job and fence = p_fence and outcome = 'running'",
}
_NOT_RAISED = {"in ('off', 'local')": "in ('local')"}


class Server:
    """A private server with the databases of both. It forgets nothing by itself."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def start(self) -> None:
        local.start(self.folder, fsync=False)

    def stop(self) -> None:
        local.stop(self.folder)

    def url(self, database: str) -> str:
        return db.with_database(local.start(self.folder, fsync=False), database)

    def copy_to(self, folder: Path) -> Server:
        """A server of the same data, while this one is stopped."""
        servers.copy(self.folder, folder)
        return Server(folder)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Server:
    """Stopped, in both databases one run that did row 1 under fence 1."""
    server = Server(tmp_path_factory.mktemp("made"))
    server.start()
    for name in (PRODUCT, NUMBER_ONLY):
        jobs.execute(server.url("gaffer"), f"create database {name}")
        with protocol.session(server.url(name)) as connection:
            migrate.migrate(connection)
            jobs.execute(server.url(name), "create table target (id bigint, fence bigint)")
            protocol.register(connection, SPEC)
            first = protocol.acquire(connection, SPEC)
            assert first.grant.fence == 1
            works(server.url(name), first, row=1)
            protocol.end(connection, first.lease)
    variants.replace(server.url(NUMBER_ONLY), "commit_batch", _BY_NUMBER)
    server.stop()
    return server


@pytest.fixture
def server(made: Server, tmp_path: Path) -> Generator[Server]:
    copy = made.copy_to(tmp_path / "server")
    copy.start()
    yield copy
    copy.stop()


def works(url: str, holder: Attempt, *, row: int) -> None:
    """A batch that does this row, on a new connection, acknowledged."""
    with protocol.session(url) as connection:
        batch = protocol.begin(connection)
        connection.execute("insert into target values (%s, %s)", [row, holder.grant.fence])
        protocol.commit(connection, holder.lease, batch, since=_at(row - 1) if row > 1 else None, until=_at(row))


def _at(row: int) -> Position:
    return {"row": str(row)}


def acquires(url: str) -> Attempt:
    with protocol.session(url) as connection:
        attempt = protocol.acquire(connection, SPEC)
    assert attempt.grant.outcome == "granted"
    return attempt


def done(url: str) -> list[int]:
    return [row for (row,) in jobs.query(url, "select id from target order by id")]


def both(what: Callable[[str], Attempt], server: Server) -> dict[str, Attempt]:
    return {name: what(server.url(name)) for name in (PRODUCT, NUMBER_ONLY)}


def the_stale_holder_comes_back(server: Server, stale: dict[str, Attempt]) -> None:
    """To a server that does not know of it: another run has its number, and has done row 2."""
    for name, holder in stale.items():
        url = server.url(name)
        other = acquires(url)
        assert other.grant.fence == holder.grant.fence == 2, "the number is not issued twice: nothing is shown here"
        works(url, other, row=2)
        if name == NUMBER_ONLY:
            works(url, holder, row=2)
            assert done(url) == [1, 2, 2]
        else:
            with pytest.raises(LeaseLostError, match=r"fence 2 .* no longer current"):
                works(url, holder, row=2)
            assert done(url) == [1, 2]
            works(url, other, row=3)  # the holder goes on


def test_on_a_promoted_standby_a_number_admits_the_stale_holder_and_the_product_does_not(
    server: Server, tmp_path: Path
) -> None:
    with _standby_of(server, tmp_path / "standby") as standby:
        with protocol.session(server.url(PRODUCT)) as connection:
            other_job = jobs.spec("other_job")
            protocol.register(connection, other_job)
            survives = protocol.acquire(connection, other_job)
        _wait_for_all(server, standby)
        _cut_off(standby)
        stale = both(acquires, server)  # acknowledged, and lost
        with protocol.session(server.url(PRODUCT)) as connection:
            protocol.commit(connection, survives.lease, protocol.begin(connection), since=None, until=_at(1))
        servers.crash(server.folder)
        jobs.execute(standby.url(PRODUCT), "select pg_promote(true, 60)")
        the_stale_holder_comes_back(standby, stale)
        # A run that lives through it, of whose batch the standby does not know, must not end as if all were done.
        with protocol.session(standby.url(PRODUCT)) as connection:
            with pytest.raises(LeaseLostError, match="the database has 0 of them: it was set back"):
                protocol.end(connection, survives.lease, batches=1)
            connection.rollback()
            assert protocol.end(connection, survives.lease, Outcome.FAILED, batches=1).result == "ended"


def test_on_a_restored_backup_a_number_admits_the_stale_holder_and_the_product_does_not(
    server: Server, tmp_path: Path
) -> None:
    server.stop()
    backup = server.copy_to(tmp_path / "backup")
    server.start()
    stale = both(acquires, server)
    server.stop()
    backup.start()
    try:
        the_stale_holder_comes_back(backup, stale)
    finally:
        backup.stop()


def test_a_crash_without_synchronous_commit_loses_what_was_acknowledged_unless_the_product_raises_it(
    server: Server,
) -> None:
    jobs.execute(server.url("gaffer"), "alter system set synchronous_commit = off")
    variants.replace(server.url(NUMBER_ONLY), "raise_durability", _NOT_RAISED)
    server.stop()
    server.start()
    # The process that writes what no COMMIT has waited for is late.
    ((writer,),) = jobs.query(server.url("gaffer"), "select pid from pg_stat_activity where backend_type = 'walwriter'")
    os.kill(writer, signal.SIGSTOP)
    # The product first: what it writes through writes all before it.
    stale = both(_acquires_and_does_ten, server)
    os.kill(writer, signal.SIGKILL)
    servers.crash(server.folder)
    server.start()
    assert done(server.url(PRODUCT)) == list(range(1, 12))
    left = done(server.url(NUMBER_ONLY))
    print(f"acknowledged: 11 rows; after the crash: {len(left)}, of the product's 11")
    assert left == [1]
    protocol.expire(server.url(PRODUCT))
    assert acquires(server.url(PRODUCT)).grant.fence == 3
    assert acquires(server.url(NUMBER_ONLY)).grant.fence == 2 == stale[NUMBER_ONLY].grant.fence
    works(server.url(NUMBER_ONLY), stale[NUMBER_ONLY], row=2)
    with pytest.raises(LeaseLostError):
        works(server.url(PRODUCT), stale[PRODUCT], row=12)


def test_a_run_whose_newest_batch_is_lost_does_not_end_as_if_all_were_done(url: str) -> None:
    jobs.make_source(url, 5)
    faults.settle(url)

    def set_back(station: Station) -> None:
        if station is Station.COMMITTED:
            jobs.execute(
                url,
                "truncate target; update gaffer.job_watermark set position = null;"
                " update gaffer.job_runs set batches = 0, items = 0, watermark_to = null",
            )

    with pytest.raises(LeaseLostError, match="it was set back"):
        jobs.run(SPEC, url, observe=set_back)
    assert jobs.query(url, "select outcome, batches from gaffer.job_runs") == [("lost_lease", 0)]
    assert jobs.query(url, "select follow_up_at is not null, covered_until from gaffer.job") == [(True, None)]
    assert jobs.run(SPEC, url).outcome == "succeeded"
    assert done(url) == [1, 2, 3, 4, 5]


def _acquires_and_does_ten(url: str) -> Attempt:
    holder = acquires(url)
    for row in range(2, 12):
        works(url, holder, row=row)
    return holder


@contextmanager
def _standby_of(server: Server, folder: Path) -> Generator[Server]:
    """An asynchronous one, that streams."""
    server.stop()
    standby = server.copy_to(folder)
    server.start()
    servers.follow(folder, server.url("gaffer"))
    standby.start()
    try:
        yield standby
    finally:
        standby.stop()


def _wait_for_all(server: Server, standby: Server) -> None:
    ((written,),) = jobs.query(server.url("gaffer"), "select pg_current_wal_insert_lsn()::text")
    replayed = "select pg_last_wal_replay_lsn() >= %s::pg_lsn"
    faults.wait_until(lambda: jobs.query(standby.url("gaffer"), replayed, written) == [(True,)], "the standby has all")


def _cut_off(standby: Server) -> None:
    url = standby.url("gaffer")
    jobs.execute(url, "alter system set primary_conninfo = ''")
    jobs.execute(url, "select pg_reload_conf()")
    faults.wait_until(lambda: jobs.query(url, "select * from pg_stat_wal_receiver") == [], "the standby is cut off")
