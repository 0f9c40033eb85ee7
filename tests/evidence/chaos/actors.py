"""Who is at work in a round: engines that run one job after another, and writers that add what is due."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import signal
import threading
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg

from gaffer_dagster.engine.run import Run, open_run
from gaffer_dagster.engine.steps import Station
from gaffer_dagster.store import db, pending_rows
from gaffer_dagster.testing.processes import Ending, Engine, Way
from gaffer_dagster.testing.waits import PATIENCE
from tests.evidence.chaos import jobs
from tests.evidence.chaos.board import Board
from tests.evidence.chaos.history import Recorder
from tests.evidence.chaos.orders import Turn
from tests.support import jobs as plain
from tests.support import network, processes, variants
from tests.support.processes import Interrupted, raise_on_signals

if TYPE_CHECKING:
    from tests.evidence.chaos.scene import Scene

processes.CONTEXT.set_forkserver_preload([__name__])


@dataclass(frozen=True)
class Part:
    """What an engine process is told. `job` and `tick`: to run this one, once, woken by this tick."""

    url: str
    folder: Path
    who: str
    seat: int
    seed: str
    only: str | None = None
    variant: str | None = None
    network: str | None = None
    job: str | None = None
    tick: Any = None
    lease: timedelta = jobs.LEASE
    pause: float = 0.2
    """Seconds between two runs, at most. Who knocks without a pause keeps the holder from ending."""


def perform(_way: Way, part: Part) -> Ending:
    """One run after another, each of a job at random, until a signal comes."""
    stopping = threading.Event()  # where what the signal raises is swallowed
    raise_on_signals(stopping.set)
    parent = os.getppid()
    if part.network is not None:
        network.enter(part.network)
    _log_to(part.folder / f"{part.who}.log")
    board, recorder = Board(part.folder / "board"), Recorder(part.folder, part.who)
    chance = random.Random(f"{part.seed}/{part.who}")
    specs = jobs.of_round(part.seed, part.only)
    if part.variant is not None:
        variants.patch(part.variant)
    charge = pending_rows.charge
    attempts: jobs.Attempts | None = None

    def charged(connection: Any, lease: Any, key: str, backoff: Any) -> None:
        if attempts is not None:
            attempts.charged(key)
        charge(connection, lease, key, backoff)

    pending_rows.charge = charged
    with contextlib.suppress(Interrupted):
        while not stopping.is_set() and os.getppid() == parent:
            number = chance.randrange(len(specs))
            if part.job is not None:
                number = [spec.name for spec in specs].index(part.job)
            spec = specs[number]
            if Turn(part.folder, spec.name).is_asked_for():
                threading.Event().wait(0.05)
                continue
            attempts = jobs.Attempts(recorder, spec, chance, at=lambda place: board.at(part.seat, place))
            error = _run(part, board, attempts, number)
            if part.job is not None or isinstance(error, Interrupted):
                break
            threading.Event().wait(chance.uniform(0, part.pause))
    return Ending()


def _log_to(file: Path) -> None:
    logger = logging.getLogger("gaffer")
    logger.addHandler(logging.FileHandler(file))
    logger.propagate = False


def _run(part: Part, board: Board, attempts: jobs.Attempts, number: int) -> BaseException | None:
    run: Run | None = None

    def observe(station: Station) -> None:
        if station is Station.LEASED:
            board.works_on(part.seat, number)
        attempts.observe(station)
        if part.variant is not None and run is not None:
            variants.observe(part.variant, run, station, lambda place: board.at(part.seat, place))
        board.at(part.seat, str(station))

    error: BaseException | None = None
    try:
        with open_run(
            attempts.spec, part.url, log=plain.LOG, observe=observe, lease=part.lease, worker_clock=board.now,
            trigger="manual" if part.tick is None else "schedule", tick=part.tick,
        ) as run:  # fmt: skip
            attempts.run = run
            run.apply(attempts.work)
        run.reported()
    except BaseException as raised:
        error = raised
    board.works_on(part.seat, None)
    attempts.over(error)
    return error


class Worker:
    """One engine process. `is_ordered`: it is to stop, or to die, at a place; `may_die`: somebody wants it to."""

    def __init__(self, engine: Engine, part: Part, way: str) -> None:
        self.engine, self.part, self.way = engine, part, way
        self.is_stopped = self.is_ordered = self.may_die = False

    @property
    def is_alive(self) -> bool:
        return self.engine.is_alive


class Engines:
    """One in each seat, which gets to the database by the way that is named there."""

    def __init__(self, scene: Scene, ways: list[str]) -> None:
        self._scene = scene
        self._ways = ways
        self._started = 0
        self._guests: list[Worker] = []
        self.workers: list[Worker] = []

    def start(self) -> None:
        self.workers = [self._start(seat, way) for seat, way in enumerate(self._ways)]

    def mend(self) -> None:
        for number, worker in enumerate(self.workers):
            if not worker.is_alive:
                if not worker.may_die:
                    self._scene.broken.append(f"{worker.part.who} died, and nobody had killed it")
                self.workers[number] = self._start(number, worker.way)
        for guest in [guest for guest in self._guests if not guest.is_alive]:
            self._guests.remove(guest)
            try:
                guest.engine.ends()
            except EOFError:
                self._scene.broken.append(f"{guest.part.who} died, and nobody had killed it")

    def invite(self, job: str, tick: Any) -> None:
        """One more, which runs this job once."""
        self._guests.append(self._start(len(self._ways) + self._started % 16, "direct", job=job, tick=tick))

    def resume(self) -> None:
        """Whoever has stopped itself without being seen to."""
        for worker in [*self.workers, *self._guests]:
            if worker.is_alive:
                worker.engine.resume()

    def stop(self) -> None:
        for worker in [*self.workers, *self._guests]:
            if worker.is_alive:
                worker.engine.signal(signal.SIGTERM)
        for worker in [*self.workers, *self._guests]:
            try:
                worker.engine.ends()
            except EOFError:  # it was hardly born
                worker.engine.destroy()

    def _start(self, seat: int, way: str, **given: Any) -> Worker:
        self._started += 1
        scene = self._scene
        scene.board.take_back(seat)
        scene.board.works_on(seat, None)
        part = Part(
            scene.ways[way], scene.folder, f"engine-{self._started}", seat, scene.seed, scene.only, scene.variant,
            scene.gear.namespace if way == "network" else None, lease=scene.lease,
            pause=0.2 if scene.dagster is None else 1.0, **given,
        )  # fmt: skip
        return Worker(scene.processes.add(perform, part), part, way)


class Writers:
    """Add rows, in transactions of which some stay open for 50 to 300 ms and some are rolled back."""

    def __init__(self, scene: Scene, count: int = 3) -> None:
        self._scene = scene
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._live, args=[random.Random(f"{scene.seed}/writer {number}")], daemon=True)
            for number in range(count)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def mend(self) -> None:
        """Each connects again by itself."""

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(PATIENCE)
            assert not thread.is_alive(), "a writer hangs"

    def _live(self, chance: random.Random) -> None:
        while not self._stop.is_set():
            try:
                with plain.connect(self._scene.url) as connection:
                    while not self._stop.is_set():
                        self._write(connection, chance)
            except psycopg.Error as error:
                if not db.lost_connection(error):
                    self._scene.broken.append(f"a writer ended with {error!r}")
                    return
            self._stop.wait(0.1)

    def _write(self, connection: psycopg.Connection[Any], chance: random.Random) -> None:
        connection.execute("begin")
        connection.execute("insert into source (value) select 'v' from generate_series(1, %s)", [chance.randint(1, 6)])
        if chance.random() < 0.3:
            self._stop.wait(chance.uniform(0.05, 0.3))
        connection.execute("insert into item select from generate_series(1, %s)", [chance.randint(0, 2)])
        connection.execute("rollback" if chance.random() < 0.1 else "commit")
        self._stop.wait(chance.uniform(0.05, 0.4))
