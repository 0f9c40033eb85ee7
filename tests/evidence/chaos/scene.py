"""What a round is played on: a server of its own and the ways to it (`Gear`, for a whole sitting), and for each round a
database, its clock, who is at work in it (`Scene`), and what is to be undone."""

from __future__ import annotations

import heapq
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import psycopg
import pytest

import gaffer_dagster as gd
from gaffer_dagster import local
from gaffer_dagster.errors import DatabaseUnavailableError
from gaffer_dagster.store import db
from gaffer_dagster.testing import Clock, Databases, invariants
from gaffer_dagster.testing.proxy import Proxy, cutting
from tests.evidence.chaos import jobs
from tests.evidence.chaos.actors import Engines, Writers
from tests.evidence.chaos.board import Board
from tests.evidence.chaos.dagsters import Dagster
from tests.evidence.chaos.history import MOVED, Recorder
from tests.support import jobs as plain
from tests.support import processes, servers, variants
from tests.support.network import Network, network
from tests.support.pgbouncer import Pooler, pooler


class Actor(Protocol):
    """Whoever is at work in a round."""

    def start(self) -> None: ...

    def mend(self) -> None:
        """Starts again what has died."""

    def stop(self) -> None:
        """No new work; what is at work may end. Waits for it."""


@dataclass
class Gear:
    """A sitting's server, and the ways to it. `missing`: what is not there, and why not."""

    folder: Path
    url: str
    proxy: Proxy
    pooler: Pooler | None = None
    network: Network | None = None
    far_proxy: Proxy | None = None
    missing: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def namespace(self) -> str | None:
        return None if self.network is None else self.network.name

    def ways(self, name: str) -> dict[str, str]:
        """The URLs of the database of this name, by how one gets there."""
        found = {"direct": self.url, "proxy": self.proxy.url}
        if self.pooler is not None:
            found["pooler"] = self.pooler.url
        if self.far_proxy is not None:
            found["network"] = self.far_proxy.url
        return {way: db.with_database(url, name) for way, url in found.items()}

    def crash(self) -> None:
        servers.crash(self.folder)
        local.start(self.folder)


@contextmanager
def gear(folder: Path) -> Generator[Gear]:
    """A private server in `folder`, with fsync on, and what else is there on this machine."""
    with ExitStack() as stack:
        url = stack.enter_context(servers.lasting_server(folder / "server"))
        # What is not waited for is not on disk soon, either.
        plain.execute(url, "alter system set wal_writer_delay = '10s'")
        plain.execute(url, "select pg_reload_conf()")
        made = Gear(folder / "server", url, stack.enter_context(cutting(url)))
        try:
            made.pooler = stack.enter_context(pooler(url, size=8, server_login_retry=1))
        except pytest.skip.Exception as skipped:
            made.missing["pooler"] = str(skipped)
        try:
            made.network = stack.enter_context(network())
            made.far_proxy = stack.enter_context(cutting(url, host=made.network.here))
        except pytest.skip.Exception as skipped:
            made.missing["network"] = str(skipped)
        yield made


class Scene:
    """One round. `only`: of the jobs, this one; `variant`: a broken protocol in place of the product's; `daemons`: of a
    Dagster that is at work, so many."""

    def __init__(
        self,
        gear: Gear,
        url: str,
        folder: Path,
        seed: str,
        started: processes.Engines,
        *,
        only: str | None = None,
        variant: str | None = None,
        daemons: int | None = None,
        lease: timedelta = jobs.LEASE,
    ) -> None:
        self.gear, self.url, self.folder, self.seed = gear, url, folder, seed
        self.processes, self.only, self.variant, self.lease = started, only, variant, lease
        self.chance = random.Random(f"{seed}/faults")
        self.specs = jobs.of_round(seed, only)
        self.clock = Clock(url)
        self.board = Board(folder / "board")
        self.ways = gear.ways(str(db.parse_url(url)["dbname"]))
        self.counts: Counter[str] = Counter()
        self.impaired: list[tuple[float, float]] = []
        self.broken: list[str] = []
        """What no fault explains of those at work."""
        self._recorder = Recorder(folder, "faults")
        self._connection: db.Connection | None = None
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self.engines = Engines(self, self._seats(daemons is not None))
        self.writers = Writers(self)
        self.cast: list[Actor] = [self.engines, self.writers]
        self.dagster = None if daemons is None else Dagster(self, self._of_dagster(), daemons)
        if self.dagster is not None:
            self.ways["dagster"] = url
            self.cast.append(self.dagster)

    def _of_dagster(self) -> list[str]:
        """Two of the jobs that have something to do most of the time."""
        names = [spec.name for spec in self.specs if jobs.is_endless(spec) or not isinstance(spec.due, gd.Elapsed)]
        return self.chance.sample(names, min(2, len(names)))

    def _seats(self, dagster: bool) -> list[str]:
        if self.variant is not None:
            return ["direct"] * 2 + ["proxy"]
        if dagster:  # whose processes need the processors
            return ["direct", "proxy", *(way for way in ("pooler", "network") if way in self.ways)]
        return ["direct", "direct", *("pooler" for _ in range(2) if "pooler" in self.ways), "proxy", "proxy"] + [
            "network"
        ] * ("network" in self.ways)

    # ── what faults say ──────────────────────────────────────────────────────────────────────────────────────────────

    def struck(self, fault: str, detail: str = "", job: str = "") -> None:
        """It has: counted, and written into the history."""
        self.counts[fault] += 1
        self._recorder.write("fault", note=f"{fault} {detail}".strip(), job=job)

    def later(self, seconds: float, undo: Callable[[], None]) -> None:
        """In so many seconds, or when the round is over, whichever comes first."""
        heapq.heappush(self._later, (time.monotonic() + seconds, next(self._numbers), undo))

    def impairs(self, seconds: float) -> None:
        """Until then jobs need not work, whatever they do."""
        self.impaired.append((time.monotonic(), time.monotonic() + seconds))

    # ── the course of time ───────────────────────────────────────────────────────────────────────────────────────────

    def wait(self, until: float) -> None:
        """Does what was to come later; starts again who has died."""
        while True:
            self.mend()
            now = time.monotonic()
            if self._later and self._later[0][0] <= now:
                heapq.heappop(self._later)[2]()
            elif now >= until:
                return
            else:
                time.sleep(max(0.0, min(until, now + 0.05, self._later[0][0] if self._later else until) - now))

    def move_on(self, by: timedelta) -> None:
        """Time passes, for everybody."""
        self._recorder.write("fault", note=f"{MOVED} {by}")
        self.clock.advance(by)
        self.board.ahead += by

    def undo_all(self) -> None:
        while self._later:
            heapq.heappop(self._later)[2]()
        self.engines.resume()
        if self.dagster is not None:
            self.dagster.no_more()
        self.mend()

    def mend(self) -> None:
        for actor in self.cast:
            actor.mend()

    # ── the operator's connection ────────────────────────────────────────────────────────────────────────────────────

    def connection(self) -> db.Connection:
        if self._connection is None or self._connection.closed:
            self._connection = db.connect(self.url, application_name="chaos")
        return self._connection

    @contextmanager
    def attempt(self) -> Generator[None]:
        """A fault that finds the server away does not strike."""
        try:
            yield
        except (psycopg.Error, DatabaseUnavailableError) as error:
            if isinstance(error, psycopg.Error) and not db.lost_connection(error):
                raise
            self.disconnect()

    def disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None


@contextmanager
def scene(
    gear: Gear,
    databases: Databases,
    folder: Path,
    seed: str,
    *,
    only: str | None = None,
    variant: str | None = None,
    daemons: int | None = None,
    lease: timedelta = jobs.LEASE,
) -> Generator[Scene]:
    """A round's scene, with its tables, before anybody is at work."""
    folder.mkdir(parents=True)
    with databases.scratch() as url:
        specs = jobs.of_round(seed, only)
        jobs.make_tables(url, specs)
        invariants.watch(url)
        for columns in ("what, job, slot, fence", "run_id", "xid"):  # what is asked of thousands of events at the end
            plain.execute(url, f"create index on gaffer_testing.event ({columns})")
        jobs.register(url, specs)
        if variant is not None:
            variants.install(url, variant)
        with processes.Engines() as started:
            made = Scene(gear, url, folder, seed, started, only=only, variant=variant, daemons=daemons, lease=lease)
            # On the database's own durability no promise depends.
            if variant == "durability is not raised" or random.Random(f"{seed}/durability").random() < 0.5:
                name = db.parse_url(url)["dbname"]
                plain.execute(url, f'alter database "{name}" set synchronous_commit = off')
            try:
                yield made
            finally:
                if made.dagster is not None:
                    made.dagster.destroy()
                made.disconnect()
