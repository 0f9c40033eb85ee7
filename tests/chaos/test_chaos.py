"""Three engines on one job, writers that are sometimes slow, and faults at random.

GAFFER_CHAOS_FAULTS sets how many, GAFFER_CHAOS_SEED repeats the choices (not the timing) of an earlier run.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections import Counter
from datetime import timedelta

import pytest

from gaffer_dagster.testing import Clock
from tests.support import faults, invariants, jobs
from tests.support.processes import Engine, Engines, Plan

SEED = int(os.environ.get("GAFFER_CHAOS_SEED", 0)) or random.SystemRandom().randrange(1, 1_000_000)
FAULTS = int(os.environ.get("GAFFER_CHAOS_FAULTS", 40))
_LEASE = 1.0
# The engines' clocks stand still where the database's is moved, and may not be further apart than five minutes.
_MOVES = 100


class _Writers:
    """Adds rows, in transactions of which some stay open for 50 to 300 ms and some are rolled back."""

    def __init__(self, url: str, seed: int) -> None:
        self._url = url
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._write, args=[random.Random(f"{seed}/{n}")]) for n in range(3)]

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _write(self, chance: random.Random) -> None:
        with jobs.connect(self._url) as connection:
            while not self._stop.is_set():
                connection.execute("begin")
                connection.execute(
                    "insert into source (value) select 'v' from generate_series(1, %s)", [chance.randint(1, 10)]
                )
                if chance.random() < 0.3:
                    self._stop.wait(chance.uniform(0.05, 0.3))
                connection.execute("rollback" if chance.random() < 0.1 else "commit")
                self._stop.wait(chance.uniform(0, 0.1))


class _Chaos:
    def __init__(self, engines: Engines, url: str, clock: Clock) -> None:
        self.done: Counter[str] = Counter()
        self.heard: Counter[str] = Counter()
        self._engines = engines
        self._url = url
        self._clock = clock
        self._chance = random.Random(SEED)
        self._started = 0
        self._at_work = [self._start() for _ in range(3)]

    def _start(self) -> Engine:
        self._started += 1
        return self._engines.keep_running(
            Plan(self._url, work="copy slowly", lease=_LEASE, batches=10, seed=SEED + self._started)
        )

    def strike(self) -> None:
        """One fault; then waits until the work goes on."""
        fault = self._chance.choice(["kill", "stop", "stop", "terminate"])
        engine = self._victim()
        if fault == "kill":
            engine.kill()
            self._at_work[self._at_work.index(engine)] = self._start()
        elif fault == "stop":
            self._stop_past_its_lease(engine)
        else:
            self._terminate()
        self.done[fault] += 1
        self._goes_on()

    def end(self) -> None:
        for engine in self._at_work:
            engine.signal(signal.SIGTERM)
        for engine in self._at_work:
            self.heard.update(engine.ends().counts)
        self._clock.advance(timedelta(seconds=2 * _LEASE))

    def _victim(self) -> Engine:
        """Mostly the one that has the lease."""
        if self._chance.random() < 0.7:
            owner = jobs.query(self._url, "select owner from gaffer.job_lease where lease_id is not null")
            for engine in self._at_work:
                if owner and engine.pid == int(owner[0][0].split(":")[1]):
                    return engine
        return self._chance.choice(self._at_work)

    def _stop_past_its_lease(self, engine: Engine) -> None:
        fence = self._fence()
        engine.pause()
        if self.done["stop"] < _MOVES:
            self._clock.advance(timedelta(seconds=2 * _LEASE))
        faults.wait_until(lambda: self._fence() > fence, "another run takes over")
        engine.resume()

    def _terminate(self) -> None:
        found = faults.backends(self._url)
        if found:
            jobs.query(self._url, "select pg_terminate_backend(%s)", self._chance.choice(found))

    def _goes_on(self) -> None:
        more = self._batches() + self._chance.randint(1, 3)
        faults.wait_until(lambda: self._batches() >= more, "batches are committed again")

    def _fence(self) -> int:
        return jobs.query(self._url, "select max(fence) from gaffer.job_lease")[0][0] or 0

    def _batches(self) -> int:
        return jobs.query(self._url, "select coalesce(sum(batches), 0) from gaffer.job_runs")[0][0]


@pytest.mark.timeout(120 + 5 * FAULTS)
def test_whatever_happens_every_row_is_applied_once(engines: Engines, url: str, clock: Clock) -> None:
    faults.say(f"GAFFER_CHAOS_SEED={SEED} GAFFER_CHAOS_FAULTS={FAULTS}")
    jobs.make_source(url, 10)
    invariants.watch(url)
    with _Writers(url, SEED):
        chaos = _Chaos(engines, url, clock)
        for number in range(FAULTS):
            chaos.strike()
            if number % 10 == 0:
                invariants.check(url)  # at any moment
        chaos.end()
    faults.settle(url)
    engines.finish(url)
    outcomes = dict(jobs.query(url, "select outcome, count(*) from gaffer.job_runs group by 1 order by 2 desc"))
    rows = jobs.query(url, "select count(*) from target")[0][0]
    faults.say(f"faults {dict(chaos.done)}, runs {outcomes}, engines heard {dict(chaos.heard)}, {rows} rows")
    invariants.check(url, complete=True)
    assert outcomes.get("abandoned", 0) + outcomes.get("lost_lease", 0) > FAULTS // 5  # the faults struck
