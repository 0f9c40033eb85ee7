"""The lease as one run holds it: its connection, its keeper, and the four things that are asked of the database.

Acquire, supersede and end are made so that asking again is safe. That is what this module does when an answer is
lost: the connection broke, or an interrupt came while the answer was on its way.
"""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import TypeVar
from uuid import uuid4

from gaffer_dagster.domain import zones
from gaffer_dagster.domain.due import Window
from gaffer_dagster.domain.duration import in_words
from gaffer_dagster.domain.lease import LARGEST_SKEW, Grant, Lease, clocks_apart
from gaffer_dagster.domain.spec import JobSpec
from gaffer_dagster.engine.keeper import Keeper, Stop
from gaffer_dagster.engine.log import Log
from gaffer_dagster.errors import ClockSkewError, DatabaseUnavailableError, LeaseLostError, UnknownJobError
from gaffer_dagster.store import db, horizon, jobs, leases, migrate
from gaffer_dagster.store import zones as zone_store

Answer = TypeVar("Answer")

_ATTEMPTS = 5
# A holder that is just ending frees the lease within this; a holder at work is seen at once.
_BUSY_WAIT = timedelta(seconds=1)
_ZONE_YEARS = timedelta(days=3 * 365)  # as far ahead as a schedule's lint looks


@dataclass(frozen=True)
class Wish:
    """What a run is to be. `tick`: what woke it, if anything did. `redo`: the interval to do once more."""

    trigger: str
    tick: datetime | None = None
    dagster_run_id: str | None = None
    despite_pause: bool = False
    redo: Window | None = None
    registration: jobs.Registration = field(default_factory=jobs.Registration)


class Holding:
    """`grant` is what acquire answered; `lease` is the identity that is held now, and changes with supersede."""

    def __init__(self, spec: JobSpec, url: str, duration: timedelta, log: Log) -> None:
        self.owner = f"{socket.gethostname()}:{os.getpid()}:{uuid4().hex[:8]}"
        self.duration = duration
        self.grant: Grant | None = None
        self.may_cancel = False  # what runs on the connection is a batch's, and may be cancelled
        self._spec = spec
        self._url = url
        self._log = log
        self._deadline = 0.0
        self._connection: db.Connection | None = None
        self._aside: db.Connection | None = None
        self._held: Lease | None = None
        self._keeper: Keeper | None = None
        # Asks again what was asked, as long as its answer has not been taken note of.
        self._unanswered: Callable[[], object] | None = None

    # ── the connection ───────────────────────────────────────────────────────────────────────────────────────────

    def connection(self) -> db.Connection:
        """The run's own, never pooled; made anew after `drop`."""
        if self._connection is None:
            self._connection = db.connect(self._url, application_name=f"gaffer:{self._spec.name}")
        return self._connection

    def aside(self) -> db.Connection:
        """A second one, for what is to be committed while a batch is open."""
        if self._aside is not None:
            db.roll_back(self._aside)  # what failed on it is over
        if self._aside is None or self._aside.closed:
            self._aside = db.connect(self._url, application_name=f"gaffer:{self._spec.name}:aside")
        return self._aside

    def roll_back(self) -> None:
        if self._connection is not None:
            db.roll_back(self._connection)
            if self._connection.closed:
                self._connection = None

    def drop(self) -> None:
        """Cancels what runs, so that its rows are free at once, and closes."""
        dropped = (self._connection, self._aside)
        self._connection = self._aside = None
        for connection in dropped:
            if connection is not None:
                db.give_up(connection)

    def _cancel(self) -> None:
        connection = self._connection
        if connection is not None and self.may_cancel:
            db.cancel_running(connection)

    def _cut(self, other: Callable[[], db.Connection]) -> None:
        connection = self._connection
        if connection is not None and self.may_cancel and db.is_busy(connection):
            self._log.warning("cuts its connection", why="what runs on it was cancelled in vain")
            try:
                db.cut(connection, other)
            except Exception as error:  # tried again
                self._log.warning("not cut", error=db.primary_message(error))

    # ── what is held ─────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def lease(self) -> Lease:
        assert self._held is not None  # noqa: S101 — asked for only while it is held
        return self._held

    @property
    def is_held(self) -> bool:
        return self._held is not None

    def keep(self, deadline: float, parent: int | None, log: Log) -> None:
        """Renews the lease from now on, and stops the work at `deadline` (of `time.monotonic()`)."""
        self._log, self._deadline = log, deadline
        self._keeper = Keeper(
            lambda: db.connect(self._url, application_name=f"gaffer:{self._spec.name}:keeper"),
            self.lease,
            self.duration,
            deadline=deadline,
            parent=parent,
            cancel=self._cancel,
            cut=self._cut,
            log=log,
        )
        self._keeper.start()

    def let_go(self) -> None:
        """No renewal and no cancel from here on."""
        self.may_cancel = False
        if self._keeper is not None:
            self._keeper.end()

    @property
    def left(self) -> timedelta:
        """How much of the run's time is left."""
        return timedelta(seconds=self._deadline - time.monotonic())

    @property
    def stopped(self) -> Stop | None:
        if self._keeper is None:
            return None
        # The keeper looks only now and then; what the server cuts at its own limit meanwhile is cut at the deadline.
        past = Stop.DEADLINE if self.left <= timedelta() else None
        return self._keeper.stopped or past

    @property
    def stood_still(self) -> timedelta:
        """For how long, in all, this process was kept from running."""
        return timedelta() if self._keeper is None else self._keeper.stood_still

    def lost(self) -> LeaseLostError:
        """What to raise where the keeper has found that the lease is lost."""
        told = None if self._keeper is None else self._keeper.lost
        return LeaseLostError(told or f"the lease of job {self._spec.name!r} is lost")

    # ── asking ───────────────────────────────────────────────────────────────────────────────────────────────────

    def acquire(self, ask_for: Wish, worker_clock: Callable[[], datetime]) -> Grant:
        """What the database answers. Also makes the job known as it is defined now."""
        lease_id = uuid4()
        spec, schedule = self._spec, self._spec.schedule
        tick: datetime | None = None
        next_tick: datetime | None = None
        refusal: str | None = None

        slot = 0

        def ask(wait: timedelta = _BUSY_WAIT) -> Grant:
            self._unanswered = ask
            grant = leases.acquire(
                self.connection(),
                job=spec.name,
                slot=slot,
                lease_id=lease_id,
                owner=self.owner,
                lease=self.duration,
                timeout=spec.limits.timeout,
                trigger=ask_for.trigger,
                tick=tick,
                next_tick=next_tick,
                dagster_run_id=ask_for.dagster_run_id,
                spec_hash=spec.hash,
                zone_data=ask_for.registration.zone_data,
                wait=wait,
                max_late=spec.tolerance if ask_for.trigger == "schedule" else None,
                redo=ask_for.redo,
                despite_pause=ask_for.despite_pause,
                refusal=refusal,
            )
            if grant.run_id is not None and grant.fence is not None:
                self.grant = grant
                self._held = Lease(spec.name, slot, grant.run_id, grant.fence, lease_id)
            self._unanswered = None
            return grant

        def whole() -> Grant:
            nonlocal tick, next_tick, refusal, slot
            now = migrate.verify(self.connection())
            refusal = clocks_apart(now, worker_clock()) or _too_early(now, ask_for.tick)
            if refusal is None:
                now = self._wait_for(ask_for.tick, now)
            if schedule is not None:
                tick, next_tick = schedule.latest(now), schedule.next(now)
            if refusal is None:  # a job that is new would be dated by the wrong clock, and wait for that time
                self._register(ask_for.registration, now)
            gone: tuple[int, timedelta] | None = None
            for each in leases.slots(self.connection(), spec.name, lease_id) if spec.slots > 1 else [0]:
                slot = each  # which `ask` asks for
                grant = ask(timedelta())
                if grant.outcome != "busy":
                    return grant
                if grant.free_at is not None:
                    gone = slot, grant.free_at - grant.granted_at
            if gone is not None:
                slot, left = gone
                self._log.info("waits", why="nothing is left of the holder's connection; it may come back")
                time.sleep(max(0.0, left.total_seconds()))
            return ask()

        try:
            return self._repeat(whole, 3, db.worth_repeating)
        except UnknownJobError:
            if refusal is None:
                raise
            raise ClockSkewError(refusal) from None

    def _wait_for(self, tick: datetime | None, now: datetime) -> datetime:
        """The time at which the database's clock, which is the one that counts, has reached the tick."""
        if tick is not None and tick > now:
            away = in_words(tick - now)
            self._log.info("waits", why=f"the database's clock is {away} from the tick at {tick.isoformat()}")
            while now < tick:
                time.sleep(min(1.0, (tick - now).total_seconds()))
                now = horizon.now(self.connection())
        return now

    def _register(self, registration: jobs.Registration, now: datetime) -> None:
        """Says so where others have other data of the schedule's zone: their ticks are not ours."""
        before = jobs.register(self.connection(), self._spec, registration)
        cure = "install one version of the tz database wherever jobs run"
        if before is not None:
            self._log.warning("zone data differ", here=registration.zone_data, last_worker=before, cure=cure)
        zone = self._spec.timezone
        probes = zones.probes(zone, now, now + _ZONE_YEARS) if zone != "UTC" else []
        found = zone_store.differing(self.connection(), zone, probes) if probes else []
        if found is None or found:
            postgres = "does not know the zone" if found is None else f"differs from {found[0].isoformat()} on"
            self._log.warning("zone data differ", here=registration.zone_data, postgres=postgres, cure=cure)

    def supersede(self) -> int:
        """How many batches of this run are committed, once that can no longer change: takes the next fence, which
        waits for a COMMIT that may still be under way."""
        assert self._keeper is not None  # noqa: S101 — it lives as long as the lease
        self._keeper.hold_still()
        old, new_id = self.lease, uuid4()

        def ask() -> Grant:
            self._unanswered = ask
            grant = leases.supersede(self.connection(), old, new_id, self.duration)
            assert grant.fence is not None  # noqa: S101 — granted
            self._held = replace(old, fence=grant.fence, lease_id=new_id)
            self._unanswered = None
            return grant

        self.drop()
        while True:
            try:
                grant = ask()
                break
            except Exception as error:
                if not _passes(error) or self.left <= timedelta():
                    raise
                self._log.warning("commit is unknown", error=db.primary_message(error))
                self.drop()
                time.sleep(random.uniform(0.1, 0.5))  # noqa: S311 — spreads the load, nothing secret
        self._keeper.go_on(self.lease)
        self._log.info("superseded", fence=grant.fence, committed=grant.batches)
        return grant.batches or 0

    def end(self, ask: Callable[[db.Connection, Lease], Answer]) -> Answer:
        """What `ask` is told. Repeated where its answer is lost, or a late cancel hits it."""
        self.may_cancel = False
        return self._repeat(lambda: ask(self.connection(), self.lease), _ATTEMPTS, _passes)

    def hear_answer(self) -> None:
        """Told to stop while the answer of acquire or supersede was on its way: asked again, the database says what is
        held, so that it can be given back."""
        if self._unanswered is None:
            return
        self.drop()
        try:
            self._unanswered()
        except Exception as error:  # what may be held runs out by itself
            self._log.warning("not known what is held", error=db.primary_message(error))

    def _repeat(self, ask: Callable[[], Answer], attempts: int, passes: Callable[[BaseException], bool]) -> Answer:
        attempt = 0
        while True:
            try:
                return ask()
            except Exception as error:
                attempt += 1
                if attempt == attempts or not passes(error):
                    raise
                self.drop()
                time.sleep(random.uniform(0.05, 0.2) * 2**attempt)  # noqa: S311


def _passes(error: BaseException) -> bool:
    return db.worth_repeating(error) or db.was_cut(error) or isinstance(error, DatabaseUnavailableError)


def _too_early(database: datetime, tick: datetime | None) -> str | None:
    """Why a run must not work that was started for a tick which the database's clock will not reach soon."""
    if tick is None or tick - database <= LARGEST_SKEW:
        return None
    return (
        f"this run was started for the tick at {tick.isoformat()}, and the database's clock says "
        f"{database.isoformat()}; set the clock of Dagster's daemon right (NTP)"
    )
