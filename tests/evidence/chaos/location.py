"""The code location of a round's Dagster: some of its jobs, whose runs write down what they are told, as engines do.

A run whose tag `chaos/order` says so does something to itself or to its parent, once, when it gets to a place of its
work; it leaves a note before, by which it is known who it was.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dagster as dg

import gaffer_dagster as gd
from gaffer_dagster.engine.run import Run
from gaffer_dagster.engine.steps import Station
from gaffer_dagster.store import pending_rows
from tests.evidence.chaos import jobs
from tests.evidence.chaos.board import Board
from tests.evidence.chaos.history import Recorder
from tests.evidence.chaos.orders import ORDER, REVOKED, TURN, Order, Part, Turn, note_of
from tests.support import jobs as plain

_WAITS = 8.0
"""Seconds, for an interrupt."""


class Worker:
    """The process of a run, or of its step."""

    def __init__(self, part: Part, run: dg.DagsterRun, spec: gd.JobSpec) -> None:
        who = f"dagster-{run.run_id[:8]}-{os.getpid()}"
        folder = Path(part.folder)
        self.board = Board(folder / "board")
        self.attempts = jobs.Attempts(Recorder(folder, who), spec, random.Random(f"{part.seed}/{who}"), at=self.follow)
        self._folder, self._run, self._turn = folder, run, Turn(folder, spec.name)
        order = run.tags.get(ORDER)
        self._order = None if order is None else Order(**json.loads(order))

    def wait_for_its_turn(self, url: str) -> None:
        if self._order is None:
            return
        self._turn.ask()
        until = time.monotonic() + TURN / 2
        with plain.connect(url) as connection:
            free = "select from gaffer.job_lease where job = %s and lease_id is null"
            while not connection.execute(free, [self.attempts.spec.name]).fetchall() and time.monotonic() < until:
                time.sleep(0.02)

    def observe(self, station: Station) -> None:
        self.attempts.observe(station)
        if station is Station.LEASED:
            self._turn.take()
        self.follow(str(station))

    def follow(self, place: str) -> None:
        """It is there."""
        order = self._order
        if order is None or order.place != place or (self._folder / REVOKED).exists():
            return
        self._order = None
        note_of(self._folder, self._run.run_id, os.getpid()).touch()
        if order.kills is not None:
            os.kill(os.getppid() if order.kills == "parent" else os.getpid(), signal.SIGKILL)
        if order.stops:
            os.kill(os.getpid(), signal.SIGSTOP)
        if order.waits:
            threading.Event().wait(_WAITS)


class Resource(gd.GafferResource):
    """The product's, whose runs are looked on at."""

    @contextmanager
    def run(self, spec: gd.JobSpec, **options: Any) -> Generator[Run]:
        global _worker
        worker = _worker = Worker(PART, dg.AssetExecutionContext.get().run, spec)
        worker.wait_for_its_turn(self.url())
        error: BaseException | None = None
        try:
            # What else open_run takes, and `run` passes on.
            watched: dict[str, Any] = {
                "observe": worker.observe, "lease": jobs.LEASE, "worker_clock": worker.board.now,
            }  # fmt: skip
            with super().run(spec, **options, **watched) as run:
                worker.attempts.run = run
                yield run
        except BaseException as raised:
            error = raised
            raise
        finally:
            worker.attempts.over(error)


PART = Part(**json.loads(os.environ["CHAOS"]))
_worker: Worker | None = None  # a process has one run
_charge = pending_rows.charge


def _charged(connection: Any, lease: Any, key: str, backoff: Any) -> None:
    assert _worker is not None
    _worker.attempts.charged(key)
    _charge(connection, lease, key, backoff)


pending_rows.charge = _charged


def _work(batch: gd.Batch) -> None:
    assert _worker is not None
    _worker.attempts.work(batch)


def _asset(spec: gd.JobSpec) -> dg.AssetsDefinition:
    make = gd.gaffer_asset(
        name=spec.name,
        due=spec.due,
        schedule=spec.schedule,
        bounds=spec.bounds,
        exclusion=spec.exclusion,
        protect=spec.protect,
    )
    return make(_work)


defs = gd.build_definitions(
    *(_asset(spec) for spec in jobs.of_round(PART.seed) if spec.name in PART.jobs),
    resource=Resource(dsn=dg.EnvVar("GAFFER_DATABASE_URL")),
)
