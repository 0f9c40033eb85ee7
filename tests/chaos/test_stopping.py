"""How soon a run lets go: when it is told to stop, and when it has lost its lease."""

from __future__ import annotations

import re
import signal
import time
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest

from gaffer_dagster.engine.steps import Station
from gaffer_dagster.testing import Clock, Databases
from tests.support import faults, invariants, jobs
from tests.support.processes import Engine, Engines, Plan
from tests.support.servers import server_by_tcp

# The promise is one second; this machine may be busy with something else.
AT_ONCE = 3.0


def _in_a_long_statement(engines: Engines, url: str, work: str, lease: float = 60) -> Engine:
    """An engine within `pg_sleep(60)`, with rows written, and another one locked."""
    jobs.make_source(url, 10)
    jobs.execute(url, "create table ledger (batches int); insert into ledger values (0)")
    invariants.watch(url)
    faults.settle(url)
    engine = engines.start(Plan(url, work=work, lease=lease))
    faults.wait_until(lambda: faults.statement_runs(url, "pg_sleep(60)"), "the statement runs")
    return engine


def _is_free(url: str) -> bool:
    """The lease is free, and so is the user's row."""
    try:
        jobs.query(url, "select 1 from ledger for update nowait")
    except psycopg.errors.LockNotAvailable:
        return False
    return jobs.query(url, "select lease_id is null and lease_until <= gaffer.clock() from gaffer.job_lease") == [
        (True,)
    ]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_an_interrupt_within_a_statement_frees_the_lease_and_the_rows_at_once(
    number: signal.Signals, engines: Engines, url: str
) -> None:
    engine = _in_a_long_statement(engines, url, "copy and sleep")
    engine.signal(number)
    took = faults.wait_until(lambda: _is_free(url), "lease and rows are free")
    faults.say(f"{number.name} within a statement: free after {took:.2f} s")
    assert took < AT_ONCE
    assert engine.ends().error == "Interrupted"
    assert jobs.query(url, "select outcome, items from gaffer.job_runs") == [("interrupted", 0)]
    assert jobs.query(url, "select count(*) from target") == [(0,)]
    engines.finish(url)
    invariants.check(url, complete=True)


@pytest.mark.parametrize("work", ["copy and sleep", "swallow"])
def test_a_run_that_has_lost_its_lease_is_cut_within_its_statement_and_writes_nothing_more(
    work: str, engines: Engines, url: str, clock: Clock
) -> None:
    """B51 b. `swallow` is a function that takes no error for an answer."""
    engine = _in_a_long_statement(engines, url, work, lease=1.5)
    engine.pause()  # else it would renew
    clock.advance(timedelta(seconds=5))
    other = engines.start(Plan(url, stop_at=str(Station.DUE)))
    other.reaches(str(Station.DUE))
    engine.resume()
    took = faults.wait_until(lambda: not faults.statement_runs(url, "pg_sleep(60)"), "the statement is cut")
    faults.say(f"the lease was lost: statement cut after {took:.2f} s")
    assert took < AT_ONCE
    ending = engine.ends()
    assert (ending.error, ending.outcome, ending.items) == ("LeaseLostError", "lost_lease", 0)
    assert jobs.query(url, "select count(*) from target") == [(0,)]
    other.go()
    assert other.ends().outcome == "succeeded"
    engines.finish(url)
    invariants.check(url, complete=True)


def test_a_keeper_whose_connection_is_terminated_keeps_the_lease(engines: Engines, url: str) -> None:
    jobs.make_source(url, 10)
    invariants.watch(url)
    faults.settle(url)
    engine = engines.start(Plan(url, stop_at=str(Station.APPLIED), lease=4))
    engine.reaches(str(Station.APPLIED))
    until = "select lease_until from gaffer.job_lease"
    for _ in range(2):
        before = jobs.query(url, until)
        faults.wait_until(lambda before=before: jobs.query(url, until) != before, "the lease is renewed")
        jobs.query(
            url,
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where datname = current_database() and application_name = 'gaffer:copy_rows:keeper'",
        )
    before = jobs.query(url, until)
    faults.wait_until(lambda: jobs.query(url, until) != before, "the lease is renewed on another connection")
    engine.go()
    ending = engine.ends()
    assert (ending.error, ending.outcome, ending.fence) == (None, "succeeded", 1)
    invariants.check(url, complete=True)


def test_a_run_that_was_stopped_past_its_lease_goes_on_if_nobody_took_it(
    engines: Engines, url: str, clock: Clock
) -> None:
    jobs.make_source(url, 30)
    invariants.watch(url)
    faults.settle(url)
    engine = engines.start(Plan(url, stop_at=str(Station.APPLIED), nth=2))
    engine.reaches(str(Station.APPLIED))
    engine.pause()
    clock.advance(timedelta(seconds=61))
    engine.resume()
    engine.go()
    ending = engine.ends()
    assert (ending.error, ending.outcome, ending.items, ending.fence) == (None, "succeeded", 30, 1)
    invariants.check(url, complete=True)


def test_a_run_that_was_stopped_past_its_deadline_says_so(engines: Engines, url: str) -> None:
    """Nobody is to make batches smaller for it."""
    jobs.make_source(url, 30)
    invariants.watch(url)
    faults.settle(url)
    engine = engines.start(Plan(url, stop_at=str(Station.APPLIED), nth=2, timeout="5s"))
    engine.reaches(str(Station.APPLIED))
    engine.pause()
    time.sleep(8)
    engine.resume()
    engine.go()
    assert engine.ends().error == "DeadlinePassedError"
    [(outcome, error)] = jobs.query(url, "select outcome, error from gaffer.job_runs")
    assert outcome == "timed_out"
    assert re.search(
        r"batch 2 of job 'copy_rows' was cut at .* 1 were committed\. This process stood still for ", error
    )
    assert "no bound needs to be changed" in error
    assert "smaller" not in error
    engines.finish(url)
    invariants.check(url, complete=True)


def test_who_was_stopped_while_it_reads_a_large_answer_is_cut_by_the_server(tmp_path: Path) -> None:
    """No time limit of a statement or a transaction reaches a server that waits to send; the one of TCP does. How long
    it sends into buffers, and can be reached, is the network's: so nobody is shown here who is not cut."""
    with server_by_tcp(tmp_path) as server_url, Databases(server_url) as databases, databases.scratch() as url:
        jobs.execute(url, "create table held (who text); insert into held values ('cut')")
        client = psycopg.pq.PGconn.connect(url.encode())
        begin = b"begin; select gaffer.begin_batch(gen_random_uuid(), '16s'); select from held for update"
        assert client.exec_(begin).status == psycopg.pq.ExecStatus.TUPLES_OK
        assert client.exec_(b"show tcp_user_timeout").get_value(0, 0) == b"16000"  # ms; of the socket itself
        client.send_query(b"select repeat('x', 1000), generate_series(1, 3000000)")
        client.flush()  # and nothing of it is ever read
        free = "select who from held for update skip locked"
        assert jobs.query(url, free) == []
        took = faults.wait_until(lambda: jobs.query(url, free), "the row is free")
        faults.say(f"stopped while it reads: cut after {took:.0f} s")
        client.finish()
