"""How soon a run takes over from a holder that says no more: one test for each way, with the bound of
`gaffer_dagster/engine/keeper.py`, of leases that are shortened. What was left behind commits nothing afterwards."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any

import psycopg
from psycopg import conninfo

from gaffer_dagster.engine.steps import Station
from gaffer_dagster.store import db
from gaffer_dagster.testing.proxy import cutting
from tests.support import faults, invariants, jobs, protocol
from tests.support.network import network
from tests.support.processes import WORKING, Engine, Engines, Plan

LEASED, APPLIED = str(Station.LEASED), str(Station.APPLIED)
LEASE = 1.5
# Whatever this machine is busy with.
SLACK = 6.0


def _prepare(url: str) -> None:
    jobs.make_source(url, 20)
    jobs.execute(url, "create table ledger (batches int); insert into ledger values (0)")
    invariants.watch(url)
    faults.settle(url)


def _taken_over(engines: Engines, url: str) -> float:
    """How long it took until somebody else had done the work, from now on."""
    began = time.monotonic()
    faults.wait_until(lambda: engines.start(Plan(url)).ends().outcome == "succeeded", "another run takes over")
    took = time.monotonic() - began
    assert protocol.outcomes(url)[0] in ("abandoned", "interrupted")
    assert jobs.query(url, "select max(fence) from gaffer.job_runs where items = 20") == [(2,)]
    return took


def _commits_nothing(engine: Engine, url: str) -> None:
    before = jobs.query(url, "select * from target order by id, fence")
    engine.resume()
    engine.go()
    ending = engine.ends()
    assert ending.error is not None
    assert ending.items == 0
    assert jobs.query(url, "select * from target order by id, fence") == before
    invariants.check(url, complete=True)


def test_a_holder_that_is_stopped_is_followed_when_its_lease_is_over(engines: Engines, url: str) -> None:
    _prepare(url)
    engine = engines.start(Plan(url, stop_at=LEASED, lease=LEASE))
    engine.reaches(LEASED)
    engine.pause()
    took = _taken_over(engines, url)
    faults.say(f"stopped: followed after {took:.1f} s of a lease of {LEASE} s")
    assert took < LEASE + SLACK
    _commits_nothing(engine, url)


def test_what_a_stopped_holder_has_locked_is_free_when_its_batch_timeout_is_over(engines: Engines, url: str) -> None:
    _prepare(url)
    engine = engines.start(Plan(url, stop_at=WORKING, work="copy and sleep", lease=LEASE, batch_timeout="3s"))
    engine.reaches(WORKING)
    engine.pause()
    assert not _is_free(url)
    took = _taken_over(engines, url)
    assert took < LEASE + SLACK
    took += faults.wait_until(lambda: _is_free(url), "the rows are free")
    faults.say(f"stopped in a transaction: its rows are free after {took:.1f} s, with a batch_timeout of 3 s")
    assert took < 3 + SLACK
    _commits_nothing(engine, url)


def _is_free(url: str) -> bool:
    try:
        return bool(jobs.query(url, "select 1 from ledger for update nowait"))
    except psycopg.errors.LockNotAvailable:
        return False


def test_a_holder_that_is_killed_before_it_renewed_is_followed_when_its_lease_is_over(
    engines: Engines, url: str
) -> None:
    """One that has renewed: test_gone.py."""
    _prepare(url)
    engine = engines.start(Plan(url, stop_at=LEASED, lease=LEASE))
    engine.reaches(LEASED)
    engine.kill()
    took = _taken_over(engines, url)
    faults.say(f"killed: followed after {took:.1f} s of a lease of {LEASE} s")
    assert took < LEASE + SLACK
    invariants.check(url, complete=True)


PARENT = """
import os, sys, time
from tests.support import jobs
if os.fork():
    os.wait()
else:
    jobs.run(jobs.spec(), sys.argv[1], lambda batch: batch.execute("select pg_sleep(60)"), parent=os.getppid())
"""


def test_a_holder_whose_parent_is_killed_ends_by_itself(engines: Engines, url: str) -> None:
    _prepare(url)
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, url], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        faults.wait_until(lambda: faults.statement_runs(url, "pg_sleep(60)"), "the orphan-to-be works")
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        took = faults.wait_until(lambda: protocol.lease_row(url)[1] is None, "the lease is free")
    finally:
        parent.kill()
    faults.say(f"orphaned: the lease is free after {took:.1f} s of one of 60 s")
    assert took < 1 + SLACK
    assert "is gone; nothing more is written" in jobs.query(url, "select error from gaffer.job_runs")[0][0]
    _taken_over(engines, url)
    invariants.check(url, complete=True)


# ── networks ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _patience(connection: psycopg.Connection[Any]) -> tuple[bool, int, int]:
    """Whether it is asked if its peer is there; after how many seconds of silence it gives up, and of no receipt."""
    with socket.socket(fileno=os.dup(connection.fileno())) as of:
        alive = of.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
        idle, every, count, unheard = (of.getsockopt(socket.IPPROTO_TCP, option) for option in options)
    return bool(alive), idle + every * count, unheard // 1000


def test_a_connection_whose_peer_has_vanished_is_given_up(url: str) -> None:
    """B60: after 25 s where it waits, and 15 s where it sends; one that is not told so waits for two hours."""
    with cutting(url) as proxy:
        with db.connect(proxy.url, application_name="test") as ours:
            assert _patience(ours) == (True, 25, 15)
        with psycopg.connect(proxy.url) as careless:
            alive, waiting, sending = _patience(careless)
    assert not alive or waiting > 7200
    assert sending == 0


def test_a_holder_whose_packets_are_dropped_stops_and_is_followed_when_its_lease_is_over(
    engines: Engines, url: str
) -> None:
    """B60. The holder hears of nothing: it stops because its own connection says so, here after three seconds (else
    after 25), although its function takes no error for an answer."""
    _prepare(url)
    with network() as net, cutting(url, host=net.here) as proxy:
        impatient = conninfo.make_conninfo(
            proxy.url, connect_timeout=2, keepalives_idle=1, keepalives_interval=1, keepalives_count=2,
            tcp_user_timeout=2000,
        )  # fmt: skip
        engine = engines.start(Plan(impatient, work="swallow", lease=LEASE, network=net.name, stop_at=WORKING))
        faults.wait_until(lambda: faults.statement_runs(url, "pg_sleep(60)"), "the holder is in a statement")
        net.cut()
        began = time.monotonic()
        took = _taken_over(engines, url)
        faults.say(f"cut off: followed after {took:.1f} s of a lease of {LEASE} s")
        assert took < LEASE + SLACK
        engine.reaches(WORKING)
        noticed = time.monotonic() - began
        faults.say(f"cut off: stopped by itself {noticed:.1f} s after the cut")
        assert noticed < 4 + SLACK
        net.heal()
        _commits_nothing(engine, url)


def test_a_holder_that_is_reached_again_commits_nothing_after_another_took_over(engines: Engines, url: str) -> None:
    _prepare(url)
    with network() as net, cutting(url, host=net.here) as proxy:
        engine = engines.start(Plan(proxy.url, stop_at=APPLIED, lease=LEASE, network=net.name))
        engine.reaches(APPLIED)
        net.cut()
        took = _taken_over(engines, url)
        faults.say(f"cut off: followed after {took:.1f} s of a lease of {LEASE} s")
        net.heal()
        _commits_nothing(engine, url)
        assert protocol.outcomes(url)[0] in ("lost_lease", "abandoned")


def test_a_holder_that_is_cut_off_for_less_than_its_lease_goes_on(engines: Engines, url: str) -> None:
    _prepare(url)
    with network() as net, cutting(url, host=net.here) as proxy:
        engine = engines.start(Plan(proxy.url, stop_at=APPLIED, lease=15, network=net.name))
        engine.reaches(APPLIED)
        net.cut()
        assert engines.start(Plan(url)).ends().outcome == "busy"
        net.heal()
        engine.go()
        ending = engine.ends()
        assert (ending.error, ending.outcome, ending.fence) == (None, "succeeded", 1)
        invariants.check(url, complete=True)
