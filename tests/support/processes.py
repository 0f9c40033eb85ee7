"""Engines in processes of their own, which stop where a test wants them to and wait for what it does to them.

A *place* is a station of the line, or one of these between two stations:

    granted     the answer of acquire has arrived, and nobody has looked at it yet
    busy        acquire has answered `busy`, `wanted_at` is set, and it was not asked again yet
    working     in the middle of the user's function, between two of its statements
    superseded  the answer of supersede has arrived, and nobody has looked at it yet
    wanted      the run was told to look again, and has not yet

The processes are forked from a server that has imported everything, which is ten times as fast as starting each anew.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psycopg

from gaffer_dagster.engine.batch import Batch
from gaffer_dagster.engine.run import Run, open_run
from gaffer_dagster.engine.steps import Station
from gaffer_dagster.store import leases, runs
from gaffer_dagster.testing import processes
from gaffer_dagster.testing.processes import Ending, Engine, Way
from tests.support import faults, jobs, network, variants

GRANTED, BUSY, WORKING, SUPERSEDED, WANTED = "granted", "busy", "working", "superseded", "wanted"


class Interrupted(BaseException):
    """What a signal raises here, as Dagster's does: not an `Exception`, and none that psycopg knows."""


@dataclass(frozen=True)
class Plan:
    """What an engine is to do. It stops when it gets to the place `stop_at` for the `nth` time, and at the place `then`
    when it gets there after that."""

    url: str
    stop_at: str | None = None
    nth: int = 1
    then: str | None = None
    work: str = "copy"
    lease: float = 60.0
    batches: int = 100
    variant: str | None = None
    die_at: int | None = None
    """Kills itself before its nth message to the server; `sent`: after sending it, before its answer."""
    sent: bool = False
    timeout: str = "5m"
    batch_timeout: str | None = None
    network: str | None = None
    """The network namespace that it lives in."""


# ── the test's side ──────────────────────────────────────────────────────────────────────────────────────────────

CONTEXT = processes.CONTEXT
CONTEXT.set_forkserver_preload([__name__])


class Engines(processes.Engines):
    """Starts engines, and leaves none behind."""

    def start(self, plan: Plan) -> Engine:
        """One run, in a process of its own."""
        return self.add(_one_run, plan, stops=[stop for stop in (plan.stop_at, plan.then) if stop], nth=plan.nth)

    def finish(self, url: str) -> None:
        """Healthy runs until nothing is left to do; at least one."""

        def done() -> bool:
            ending = self.start(Plan(url)).ends()
            assert ending.outcome in ("succeeded", "capped"), ending
            return not jobs.query(url, "select id from source except select id from target")

        faults.wait_until(done, "a healthy run finishes everything")


# ── the engine's side ────────────────────────────────────────────────────────────────────────────────────────────


def _one_run(way: Way, plan: Plan) -> Ending:
    raise_on_signals()
    if plan.network is not None:
        network.enter(plan.network)
    _announce_answers(way)
    if plan.die_at is not None:
        _die_at(plan.die_at, sent=plan.sent)
    return _run(way, plan)


def _run(way: Way, plan: Plan) -> Ending:
    run: Run | None = None

    def observe(station: Station) -> None:
        if plan.variant is not None and run is not None:
            variants.observe(plan.variant, run, station, way.at)
        way.at(str(station))

    if plan.variant is not None:
        variants.patch(plan.variant)
    error: BaseException | None = None
    job = jobs.spec(batch_rows=10, batches=plan.batches, timeout=plan.timeout, batch_timeout=plan.batch_timeout)
    lease = timedelta(seconds=plan.lease)
    try:
        with open_run(job, plan.url, log=jobs.LOG, observe=observe, lease=lease) as opened:
            run = opened
            run.apply(lambda batch: _WORK[plan.work](batch, way))
        run.reported()
    except BaseException as raised:
        error = raised
    record = None if run is None else run.record
    return Ending(
        error=None if error is None else type(error).__name__,
        text=str(error),
        outcome=None if run is None else str(run.outcome),
        items=0 if record is None else record.items,
        batches=0 if record is None else record.batches,
        fence=None if record is None else record.fence,
    )


def raise_on_signals(heard: Callable[[], object] = lambda: None) -> None:
    def interrupt(number: int, _frame: object) -> None:
        heard()
        raise Interrupted(signal.Signals(number).name)

    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, interrupt)


def _announce_answers(way: Way) -> None:
    acquire, supersede, end = leases.acquire, leases.supersede, runs.end

    def acquired(*args: Any, **kwargs: Any) -> Any:
        grant = acquire(*args, **kwargs)
        if grant.outcome == "granted":
            way.at(GRANTED)
        elif grant.outcome == "busy" and not kwargs["wait"]:
            way.at(BUSY)
        return grant

    def superseded(*args: Any, **kwargs: Any) -> Any:
        grant = supersede(*args, **kwargs)
        way.at(SUPERSEDED)
        return grant

    def ended(*args: Any, **kwargs: Any) -> Any:
        ending = end(*args, **kwargs)
        if ending.result == "wanted":
            way.at(WANTED)
        return ending

    leases.acquire, leases.supersede, runs.end = acquired, superseded, ended


def _die_at(number: int, *, sent: bool) -> None:
    wait = psycopg.Connection.wait
    left = [number]

    def counted(self: Any, generator: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            left[0] -= 1
            if left[0] == 0:
                if sent:
                    next(generator)
                os.kill(os.getpid(), signal.SIGKILL)
        return wait(self, generator, *args, **kwargs)

    psycopg.Connection.wait = counted  # type: ignore[method-assign]


# ── what the user's function does ────────────────────────────────────────────────────────────────────────────────


def _rows(batch: Batch) -> list[dict[str, Any]]:
    return [{"id": row["id"], "fence": batch.fence, "batch": batch.number} for row in batch.rows]


def _copy(batch: Batch, way: Way) -> None:
    rows = _rows(batch)
    middle = len(rows) // 2
    batch.insert("target", rows[:middle])
    way.at(WORKING)
    batch.insert("target", rows[middle:])


def _copy_and_sleep(batch: Batch, way: Way) -> None:
    """Holds a row of the user's, too, and is in a statement that lasts."""
    batch.execute("update ledger set batches = batches + 1")
    batch.insert("target", _rows(batch))
    way.at(WORKING)
    batch.execute("select pg_sleep(60)")


def _swallow(batch: Batch, way: Way) -> None:
    """Takes no error for an answer: tries to write on and on, then returns as if nothing had been."""
    batch.insert("target", _rows(batch))
    with contextlib.suppress(Exception):
        batch.execute("select pg_sleep(60)")
    way.at(WORKING)
    for _ in range(50):
        with contextlib.suppress(Exception):
            batch.insert("target", _rows(batch))


_WORK: dict[str, Callable[[Batch, Way], None]] = {
    "copy": _copy,
    "copy and sleep": _copy_and_sleep,
    "swallow": _swallow,
}
