"""Random histories of many jobs in one database and in moved time, with an oracle (`tests/support/oracle.py`) beside.

Everything that happens goes through the product's own functions; the clock of the database stands still at each
instant, so that every time is exact to the microsecond. After each pass of a watch, what it found and what it left
open is compared with what the oracle says.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from threading import Event
from typing import Any
from unittest import mock

from gaffer_dagster.domain.alert import Alerts, Kind
from gaffer_dagster.domain.bounds import Bounds
from gaffer_dagster.domain.due import EachInterval, NewRows, Window
from gaffer_dagster.domain.held import HeldBy
from gaffer_dagster.domain.run import Outcome
from gaffer_dagster.domain.schedule import Schedule
from gaffer_dagster.domain.spec import JobSpec
from gaffer_dagster.engine import watch as engine_watch
from gaffer_dagster.engine.batch import Batch
from gaffer_dagster.engine.watch import Watcher, look
from gaffer_dagster.engine.zone_data import zone_data
from gaffer_dagster.errors import GafferError, UnknownJobError
from gaffer_dagster.store import db, history, operations
from gaffer_dagster.store import jobs as job_table
from gaffer_dagster.store.jobs import Registration
from gaffer_dagster.store.operations import Operator
from tests.support import jobs, oracle, protocol
from tests.support.protocol import Actor, Attempt

SECOND, MINUTE, HOUR, DAY = timedelta(seconds=1), timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
LEASE = timedelta(seconds=60)
ANN = Operator("ann", None)


class BrokenError(Exception):
    """What the work of a run raises to fail."""


class KilledError(Exception):
    """A watch dies in the middle of its pass."""


def stand_still(url: str) -> None:
    """From now on this database's clock says what `gaffer.testing_now` has."""
    jobs.execute(url, "create table gaffer.testing_now (at timestamptz not null)")
    jobs.execute(url, "insert into gaffer.testing_now values ('2000-01-01Z')")
    jobs.execute(
        url,
        "create or replace function gaffer.clock() returns timestamptz language sql volatile"
        " set search_path = pg_catalog, pg_temp as 'select at from gaffer.testing_now'",
    )


LOST = datetime.min.replace(tzinfo=timezone.utc)


def end(
    connection: db.Connection,
    attempt: Attempt,
    outcome: Outcome,
    now: datetime,
    trigger: str = "schedule",
    reached: datetime | None = None,
    oldest_due_at: datetime | None = None,
    held_by: str | None = None,
) -> datetime | None:
    """Ends a run as `engine/run.py` does, which looks again for a wake-up that met it. `reached`: how far it got, where
    it did not do everything. The ticks up to the answer are covered; `LOST`: another run has taken over."""
    grant = attempt.grant
    looked_at, wanted_at = grant.granted_at, grant.wanted_at
    assert looked_at is not None
    assert grant.first_seen_at is not None
    while True:
        covers = looked_at if outcome in (Outcome.SUCCEEDED, Outcome.PARTIAL) else reached
        next_due_at = None
        if trigger == "redo":
            covers = None
        if covers is not None:
            before = min(covers, grant.covered_until or grant.first_seen_at)
            next_due_at = history.of_job(connection, attempt.job, before, runs=False).next(covers, now)
        try:
            ending = protocol.end(
                connection,
                attempt.lease,
                outcome,
                wanted_at=wanted_at,
                covered_until=covers,
                next_due_at=next_due_at,
                oldest_due_at=oldest_due_at,
                held_by=None if held_by is None else HeldBy(held_by),
            )
        except UnknownJobError:  # its row was deleted since
            db.roll_back(connection)
            return LOST
        if ending.result != "wanted":
            return covers if ending.result == "ended" else LOST
        looked_at, wanted_at = now, ending.wanted_at


# ── what the histories are made of ───────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Tempo:
    """How fast a world lives. `starts`: with clock changes, a weekend or the end of a month soon after."""

    days: float
    starts: Sequence[str]
    crons: Sequence[str]
    graces: Sequence[str | None]
    timeouts: Sequence[str]
    backlogs: Sequence[str | None]
    every: Sequence[timedelta]
    mood: timedelta


DAYS = Tempo(
    days=3,
    starts=[
        "2027-03-13T11:00", "2026-10-31T13:00", "2027-03-27T09:00", "2026-10-24T16:30", "2027-04-03T08:00",
        "2027-10-02T07:10", "2024-02-28T12:00", "2026-12-30T20:00", "2027-06-29T00:00",
    ],
    crons=[
        "0 * * * *", "30 * * * *", "*/20 * * * *", "15 */2 * * *", "0 */6 * * *", "30 1 * * *", "30 2 * * *",
        "0 3,15 * * *", "0 0 * * *", "5 9-17 * * 1-5", "0 12 31 * *", "0 4 * * 6,7", "45 23 28-31 * *",
    ],
    graces=[None, "1m", "5m", "10m", "17m", "30m", "1h", "90m", "3h"],
    timeouts=["2m", "10m", "15m"],
    backlogs=[None, "20m", "1h", "5h"],
    every=[MINUTE, 2 * MINUTE, 5 * MINUTE, 10 * MINUTE],
    mood=10 * HOUR,
)  # fmt: skip
MONTHS = Tempo(
    days=60,
    starts=["2027-01-20T10:00", "2026-10-05T10:00", "2027-03-01T10:00", "2028-02-10T00:00"],
    crons=[
        "0 9 31 * *", "0 2 * * 2-6", "30 2 * * *", "30 1 * * *", "0 9 29 2 *", "0 0 1 * *", "0 6 * * 1",
        "0 */12 * * *", "0 0 1,15 * *", "10 3 * * 6,7",
    ],
    graces=[None, "5m", "30m", "1h", "6h", "2d"],
    timeouts=["15m", "1h", "6h"],
    backlogs=[None, "6h", "2d"],
    every=[HOUR, 2 * HOUR],
    mood=8 * DAY,
)  # fmt: skip
ZONES = [
    "UTC", "America/New_York", "Europe/Berlin", "Europe/London", "Australia/Lord_Howe", "Africa/Casablanca",
    "America/Santiago", "Europe/Dublin", "Asia/Kolkata", "Pacific/Chatham",
]  # fmt: skip

# How a job fares for a while: the chance that a tick wakes a run at all, that the run is late, long, dies, is done
# again at once, and how it ends.
MOODS: dict[str, dict[str, Any]] = {
    "healthy": {"ends": {"succeeded": 20, "partial": 1}},
    "early": {"late": 0.1, "extra": 0.5, "ends": {"succeeded": 9, "partial": 1}},
    "late": {"late": 0.7, "ends": {"succeeded": 9, "failed": 1}},
    "silent": {"wakes": 0.03, "ends": {"succeeded": 1}},
    "failing": {"extra": 0.5, "ends": {"failed": 8, "timed_out": 2, "interrupted": 1, "capped": 0.3}},
    "flapping": {"extra": 0.2, "ends": {"failed": 5, "succeeded": 2, "interrupted": 1}},
    "slow": {"long": 0.7, "late": 0.2, "ends": {"succeeded": 5, "failed": 2, "capped": 1}},
    "capping": {"long": 0.2, "extra": 0.4, "ends": {"capped": 8, "failed": 1, "succeeded": 0.4, "interrupted": 0.5}},
    "held": {"extra": 0.2, "ends": {"succeeded": 6, "capped": 2, "failed": 1}, "held": 0.9},
    "dying": {"dies": 0.6, "extra": 0.4, "long": 0.4, "ends": {"succeeded": 3, "failed": 2, "capped": 1}},
    "wild": {
        "wakes": 0.8, "late": 0.3, "long": 0.3, "dies": 0.15, "extra": 0.5, "held": 0.2,
        "ends": {"succeeded": 4, "partial": 1, "capped": 2, "failed": 3, "timed_out": 1, "interrupted": 1},
    },
}  # fmt: skip


@dataclass(frozen=True)
class Version:
    """A job as one code version defines it."""

    spec: JobSpec
    work: str
    zone_data: str

    @property
    def name(self) -> str:
        return f"{self.spec.hash}/{self.work}/{self.zone_data}"


@dataclass
class Held:
    """A run that has the lease, or had it when its process was last heard of."""

    attempt: Attempt
    run: oracle.Run
    is_cut_off: bool = False  # its lease is not renewed any more


class Job:
    """One job: its mood, its versions, and the run that is at work."""

    def __init__(self, life: Life, number: int) -> None:
        self.life, self.rng = life, random.Random(f"{life.seed}/{number}")
        self.name = f"job{number}"
        self.told = oracle.Job(self.name)
        self.held: Held | None = None
        self.is_rows = self.rng.random() < 0.6
        self.mood = life.moods[0]
        self.max_late = self.rng.choice([None, None, None, "10m", "45m"])
        self.version = self._new_version()
        self.others: list[Version] = []  # code that still runs somewhere
        self.listed_by = {watcher.name for watcher in life.watchers if self.rng.random() < 0.7}
        self.is_retired = False

    @property
    def is_alive(self) -> bool:
        """Its run is at work, and renews its lease."""
        return self.held is not None and not self.held.is_cut_off

    # ── its definition ──

    def _new_version(self, **given: Any) -> Version:
        tempo, rng = self.life.tempo, self.rng
        settings: dict[str, Any] = {
            "cron": rng.choice(tempo.crons),
            "zone": rng.choice(ZONES),
            "grace": rng.choice(tempo.graces),
            "failures": rng.choice([1, 2, 3, 5]),
            "capped": rng.choice([1, 2, 4]),
            "takeovers": rng.choice([1, 2, 3]),
            "backlog": rng.choice(tempo.backlogs),
            "stalled": rng.choice(["10m", "1h", "6h"]),
            "pause": rng.choice(["1h", "8h", "2d"]),
            "remind": rng.choice(["45m", "6h", "24h"]),
            "timeout": rng.choice(tempo.timeouts),
            "max_late": self.max_late,
            "due": "source",
            "work": "w1",
            "zone_data": "2026a",
        } | given
        self.settings = settings
        alerts = {key: settings[key] for key in ("capped", "takeovers", "backlog", "stalled", "pause", "remind")}
        return Version(
            JobSpec(
                self.name,
                NewRows(settings["due"], "id") if self.is_rows else EachInterval(settle="1s"),
                Schedule(settings["cron"], settings["zone"]),
                Bounds(timeout=settings["timeout"]),
                Alerts(settings["grace"], settings["failures"], **alerts),
                max_late=settings["max_late"],
            ),
            f"{self.name}/{settings['work']}",
            settings["zone_data"],
        )

    def register(self, version: Version) -> None:
        self.version = version
        registration = Registration(version.work, frozenset(), version.zone_data)
        job_table.register(self.life.connection, version.spec, registration)
        if not self.told.versions or self.told.versions[-1].name != version.name:
            self.told.versions.append(oracle.Version(self.life.now, version.spec, version.name))
            self.life.note(self, "registered", version.spec.schedule, version.spec.alerts, version.name)

    def edit(self) -> None:
        """What a deployment may change; the version before may run on elsewhere."""
        tempo, rng, before = self.life.tempo, self.rng, self.version
        changes: list[dict[str, Any]] = [
            {"cron": rng.choice(tempo.crons)},
            {"zone": rng.choice(ZONES)},
            {"cron": rng.choice(tempo.crons), "zone": rng.choice(ZONES)},
            {"grace": rng.choice(tempo.graces)},
            {"failures": rng.choice([1, 2, 3]), "capped": rng.choice([1, 2, 4]), "takeovers": rng.choice([1, 2])},
            {"backlog": rng.choice(tempo.backlogs), "stalled": rng.choice(["10m", "1h"])},
            {"timeout": rng.choice(tempo.timeouts)},
            {"due": f"source_{rng.randrange(1000)}"},
            {"work": f"w{rng.randrange(1000)}"},
            {"zone_data": f"2026{rng.choice('bcdef')}"},
            {"max_late": rng.choice([None, "10m", "45m"])},
        ]
        with suppress(GafferError):  # a timeout that is longer than the new interval
            self.register(self._new_version(**(self.settings | rng.choice(changes))))
            self.others.append(before)

    def alternate(self) -> None:
        """The version before comes back, as where two deployments take turns."""
        if self.others and not self.is_retired:
            other = self.others[-1]
            self.others[-1] = self.version
            self.register(other)

    # ── its runs ──

    def wake(self, trigger: str = "schedule", *, despite_pause: bool = False) -> None:
        if self.is_retired:
            return
        now, spec = self.life.now, self.version.spec
        assert spec.schedule is not None
        tick = spec.schedule.latest(now)
        given: dict[str, Any] = {
            "tick": tick,
            "next_tick": spec.schedule.next(now),
            "trigger": trigger,
            "max_late": spec.tolerance if trigger == "schedule" else None,
            "timeout": spec.limits.timeout.total_seconds(),
            "despite_pause": despite_pause,
            "redo": Window(now - HOUR, now) if trigger == "redo" else None,
        }
        if self.rng.random() < 0.01:
            given["refusal"] = "the clocks are apart"
        attempt = protocol.acquire(self.life.connection, spec, lease=LEASE.total_seconds(), **given)
        if attempt.grant.outcome == "busy":
            attempt = protocol.acquire(
                self.life.connection, spec, lease_id=attempt.lease_id, wait=1, lease=LEASE.total_seconds(), **given
            )
        self.life.note(self, "woken", trigger, tick, attempt.grant.outcome)
        if attempt.grant.outcome == "granted":
            run = oracle.Run(now, trigger, tick)
            if self.held is not None:
                self.held.run.found_dead_at, self.held.run.outcome = now, Outcome.ABANDONED
                self._is_over(self.held.run)
            self.told.runs.append(run)
            self.held = Held(attempt, run)
            if self.rng.random() < 0.004:  # its first batch does
                run.parked = 3
                self.life.control.execute(protocol.PARK, [3, attempt.lease_id])
            self._go_on(self.held)
        elif attempt.grant.outcome == "failed":
            run = oracle.Run(now, trigger, tick, now, Outcome.FAILED)
            self.told.runs.append(run)
            self._is_over(run)

    def _is_over(self, run: oracle.Run) -> None:
        run.passes_before = len(self.life.told.passes)
        if run.counts:
            self.told.over.append(run)

    def _go_on(self, held: Held) -> None:
        rng, mood, timeout = self.rng, MOODS[self.mood], self.version.spec.limits.timeout
        if rng.random() < mood.get("long", 0.03):
            length = rng.choice([0.5, 1, 1, 1.4]) * rng.random() * timeout + 10 * SECOND
        else:
            length = rng.choice([timedelta(), rng.random() * 90 * SECOND, rng.random() * 3 * MINUTE])
        at = self.life.near(self, self.life.now + length)
        if rng.random() < mood.get("dies", 0.005):
            self.life.at(at, lambda: self._die(held))
        else:
            ends = mood["ends"]
            outcome = Outcome(rng.choices(list(ends), list(ends.values()))[0])
            self.life.at(at, lambda: self._end(held, outcome), survives=True)

    def _die(self, held: Held) -> None:
        """Its process is gone; the lease that it renewed last runs out."""
        if self.held is held and self.is_alive:
            self.cut_off(self.rng.choice([LEASE, self.rng.random() * LEASE]))

    def cut_off(self, left: timedelta) -> None:
        assert self.held is not None
        self.held.is_cut_off, self.held.run.dies_at = True, self.life.now + left
        jobs_sql = "update gaffer.job_lease set lease_until = %s where job = %s and lease_id = %s"
        self.life.control.execute(jobs_sql, [self.held.run.dies_at, self.name, self.held.attempt.lease_id])
        self.life.note(self, "is not heard of any more; its lease ends", self.held.run.dies_at)

    def _end(self, held: Held, outcome: Outcome) -> None:
        rng, run, life = self.rng, held.run, self.life
        reached, oldest = None, None
        if not self.is_rows:  # of intervals, those that were done are covered however the run ended
            before = max((each.covers for each in self.told.runs if each.covers), default=self.told.versions[0].at)
            reached = rng.choice([None, before + rng.random() * max(run.started_at - before, timedelta())])
            oldest = (reached or before) if outcome is Outcome.CAPPED else None
        held_by = "pid 7" if rng.random() < MOODS[self.mood].get("held", 0) else None
        covers = end(life.connection, held.attempt, outcome, life.now, run.trigger, reached, oldest, held_by)
        life.note(self, "ended", outcome, "covers", covers, "held by", held_by)
        if covers is not LOST:
            self.held = None
            run.ended_at, run.outcome, run.covers = life.now, outcome, covers
            run.oldest_due_at, run.held_by = oldest, held_by
            self._is_over(run)

    # ── what people do ──

    def pause(self, until: datetime | None) -> None:
        record = job_table.get(self.life.connection, self.name)
        operations.pause(self.life.connection, self.name, until, record.tick_after_pause, ANN)
        self._cut_pause()
        self.told.pauses.append(oracle.Pause(self.life.now, until))
        self.life.note(self, "paused until", until)

    def resume(self) -> None:
        record = job_table.get(self.life.connection, self.name)
        if operations.resume(self.life.connection, self.name, record.tick_after_pause, ANN):
            self._cut_pause()
            self.life.note(self, "resumed")

    def _cut_pause(self) -> None:
        if self.told.pauses and self.told.pauses[-1].cut_at is None:
            self.told.pauses[-1].cut_at = self.life.now

    # ── its life ──

    def follow(self) -> None:
        """What the next tick will bring, and the one after it."""
        rng, mood = self.rng, MOODS[self.mood]
        assert self.version.spec.schedule is not None
        tick = self.version.spec.schedule.next(self.life.now)
        if rng.random() < mood.get("wakes", 0.95):
            late = rng.random() < mood.get("late", 0.05)
            by = rng.choice([timedelta(), rng.random() * 40 * SECOND])
            if late:
                by = rng.choice([0.2, 1, 1, 2.5]) * rng.random() * self.version.spec.alerts.grace_for(None)
            self.life.at(self.life.near(self, tick + by), self.wake)
            while rng.random() < mood.get("extra", 0.08):
                by += rng.random() * 10 * MINUTE
                trigger = rng.choice(["schedule", "sensor", "manual", "command"])
                self.life.at(self.life.near(self, tick + by), lambda trigger=trigger: self.wake(trigger))
        self.life.at(max(tick, self.life.now + MINUTE), self.follow, survives=True)

    def change_mood(self) -> None:
        self.mood = self.rng.choice(self.life.moods)
        self.life.at(self.life.now + self.rng.random() * 2 * self.life.tempo.mood, self.change_mood, survives=True)

    def live(self) -> None:
        """Now and then somebody does something."""
        rng, life = self.rng, self.life
        deed = rng.choices(
            ["pause", "resume", "edit", "alternate", "take turns", "redo", "despite", "list", "ack"],
            [4, 4, 3, 1, 0.7, 1, 1, 1, 1],
        )[0]
        if self.is_retired:
            return
        if deed == "pause":
            scale = rng.choice([HOUR / 4, HOUR, life.tempo.mood])
            until = rng.choice([None, life.now + rng.random() * 2 * scale, life.near(self, life.now + scale)])
            self.pause(until if until is None or until > life.now else None)
            if until is None or rng.random() < 0.4:
                life.at(life.near(self, life.now + rng.random() * 2 * scale), self.resume, survives=True)
        elif deed == "resume":
            self.resume()
        elif deed == "edit":
            self.edit()
        elif deed == "alternate":
            self.alternate()
        elif deed == "take turns":
            self.edit()
            at = life.now
            for _ in range(rng.randrange(1, 6)):
                at += rng.choice([1, 5, 20, 65]) * rng.random() * MINUTE
                life.at(at, self.alternate)
        elif deed in ("redo", "despite"):
            self.wake("redo" if deed == "redo" else "manual", despite_pause=deed == "despite")
        elif deed == "list":
            self.listed_by = {watcher.name for watcher in life.watchers if rng.random() < 0.5}
        elif deed == "ack":
            life.ack(self)
        life.at(life.near(self, life.now + rng.random() * life.tempo.mood), self.live, survives=True)


class EngineJob(Job):
    """One whose runs are the engine's own (`engine/run.py`), each in a thread that stands still while it is at work."""

    def __init__(self, life: Life, number: int) -> None:
        self.table = f"source{number}"
        jobs.make_source(life.url, table=self.table)
        super().__init__(life, number)
        self._going: tuple[Actor, Event, oracle.Run] | None = None
        self._was_wanted = False

    @property
    def is_alive(self) -> bool:
        return self._going is not None

    def _new_version(self, **given: Any) -> Version:
        self.is_rows = True
        version = super()._new_version(**(given | {"due": self.table}))
        spec = replace(version.spec, bounds=Bounds(batch_rows=3, batches=2, timeout=self.settings["timeout"]))
        return Version(spec, version.work, zone_data(spec.timezone))

    def wake(self, trigger: str = "schedule", *, despite_pause: bool = False) -> None:
        rng, life, spec, ends = self.rng, self.life, self.version.spec, MOODS[self.mood]["ends"]
        if trigger == "redo":  # only intervals are done once more
            return
        wish = rng.choices(list(ends), list(ends.values()))[0]
        jobs.add_rows(life.url, 9 if wish == "capped" else rng.choice([0, 0, 1, 5]), self.table)
        arrived, leave = Event(), Event()

        def work(batch: Batch) -> None:
            arrived.set()
            assert leave.wait(300)
            if wish in ("failed", "timed_out"):
                raise BrokenError
            if wish == "interrupted":
                raise KeyboardInterrupt
            jobs.copy_rows(batch)

        given: dict[str, Any] = {"trigger": trigger, "despite_pause": despite_pause, "work_hash": self.version.work}
        actor = Actor(lambda: jobs.run(spec, life.url, work, worker_clock=lambda: life.now, **given))
        protocol.until(lambda: arrived.is_set() or not actor.is_alive(), pause=0.002)
        assert spec.schedule is not None
        going = actor, leave, oracle.Run(life.now, trigger, spec.schedule.latest(life.now))
        if not arrived.is_set():  # nothing was due, or it was sent away
            self._close(*going)
            return
        life.note(self, "the engine is at work", trigger)
        self.told.runs.append(going[2])
        self._going, self._was_wanted = going, False
        length = rng.choice([0.02, 0.02, 1.2]) * rng.random() * spec.limits.timeout
        life.at(life.near(self, life.now + length), self.finish, survives=True)

    def finish(self) -> None:
        if self._going is not None:
            self._close(*self._going)
            self._going = None

    def _close(self, actor: Actor, leave: Event, run: oracle.Run) -> None:
        leave.set()
        with suppress(BrokenError, KeyboardInterrupt, GafferError):
            actor.result()
        row = self.life.control.execute(
            "select outcome from gaffer.job_runs where job = %s and started_at = %s", [self.name, run.started_at]
        ).fetchone()
        assert row is not None
        outcome = Outcome(row[0])
        self.life.note(self, "the engine's run", run.trigger, "of", run.started_at, "is over:", outcome)
        if outcome.did_not_work:
            self._was_wanted |= outcome is Outcome.BUSY
            return
        if run not in self.told.runs:
            self.told.runs.append(run)
            self._was_wanted = False
        run.ended_at, run.outcome = self.life.now, outcome
        if outcome is Outcome.SUCCEEDED:  # it looks again for a wake-up that met it
            run.covers = self.life.now if self._was_wanted else run.started_at
        self._is_over(run)

    def abort(self) -> None:
        if self._going is not None:
            self._going[1].set()


# ── the whole of it ──────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class WatchLoop:
    """One who looks. `every`: what it says of itself; `interval`: how often it does."""

    name: str
    interval: timedelta
    every: timedelta | None
    down_until: datetime | None = None


@dataclass
class Tally:
    """What happened, to see that histories are worth living."""

    passes: int = 0
    killed: int = 0
    outages: int = 0
    events: int = 0
    incidents: dict[str, int] = field(default_factory=dict)


class Life:
    """A world of jobs from its start to its end."""

    def __init__(
        self,
        url: str,
        seed: object,
        tempo: Tempo,
        size: int,
        *,
        engines: int = 0,
        forgets: bool = False,
        moods: Sequence[str] = tuple(MOODS),
    ) -> None:
        self.seed, self.tempo, self.forgets, self.moods = seed, tempo, forgets, moods
        self.rng = random.Random(f"{seed}")
        self.told = oracle.World()
        self.tally = Tally()
        self.notes: dict[str, list[str]] = {}
        stand_still(url)
        self.url = url
        self.connection = db.connect(url, application_name="gaffer:histories")
        self.control = jobs.connect(url)
        self.now = datetime.fromisoformat(self.rng.choice(tempo.starts)).replace(tzinfo=timezone.utc)
        self.until = self.now + tempo.days * DAY
        self.down_until = self.now
        self._coming: list[tuple[datetime, float, int, Callable[[], object], bool]] = []
        self._numbers = itertools.count()
        every = self.rng.choice(tempo.every)
        self.watchers = [
            WatchLoop("dagster", every, every),
            WatchLoop("cron", self.rng.choice(tempo.every), self.rng.choice([None, None, every])),
        ]
        self.jobs = [(EngineJob if number < engines else Job)(self, number) for number in range(size)]
        self.told.jobs = {job.name: job.told for job in self.jobs}

    def at(self, at: datetime, deed: Callable[[], object], *, survives: bool = False) -> None:
        """`survives`: an outage only delays it."""
        heapq.heappush(self._coming, (max(at, self.now), self.rng.random(), next(self._numbers), deed, survives))

    def note(self, job: Job, *what: object) -> None:
        self.notes.setdefault(job.name, []).append(f"{self.now.isoformat()} {' '.join(map(str, what))}")
        self.tally.events += 1

    def near(self, job: Job, at: datetime) -> datetime:
        """Now and then an instant at which something changes, which is soon after this one, or just beside it."""
        if self.rng.random() > 0.15 or not job.told.versions:
            return at
        spec = job.version.spec
        assert spec.schedule is not None
        tick = self.rng.choice([spec.schedule.latest(at) or at, spec.schedule.next(at)])
        found = [tick, tick + spec.alerts.grace_for(spec.schedule)]
        found += [found[1] + spec.limits.timeout]
        found += [job.told.deadline(tick, list(self.told.gaps())) or at]
        instant = self.rng.choice(found) + self.rng.choice([-1, 0, 0, 0, 1]) * timedelta(microseconds=1)
        return instant if self.now <= instant < at + DAY else at

    def _set(self, at: datetime) -> None:
        self.now = at
        self.control.execute("update gaffer.testing_now set at = %s", [at])
        alive = [job.name for job in self.jobs if job.is_alive]
        if alive:  # their keepers have done so all the time
            self.control.execute(
                "update gaffer.job_lease set lease_until = %s where job = any(%s)", [at + LEASE, alive]
            )

    def live(self) -> None:
        for job in self.jobs:
            first = self.now + self.rng.choice([0, 0, 0, 0.2]) * self.rng.random() * self.tempo.days * DAY
            self.at(first, lambda job=job: self._begin(job), survives=True)
        for watcher in self.watchers:
            self.at(self.now + self.rng.random() * watcher.interval, _Watching(self, watcher))
        self.at(self.now + self.rng.random() * self.tempo.days * DAY, self._outage)
        while self._coming and self._coming[0][0] <= self.until:
            at, _, _, deed, survives = heapq.heappop(self._coming)
            if at < self.down_until:
                if survives:
                    self.at(
                        self.down_until + self.rng.choice([0, 0, 20]) * self.rng.random() * SECOND, deed, survives=True
                    )
                elif isinstance(deed, _Watching):
                    self.at(self.down_until + self.rng.random() * deed.watcher.interval, deed)
                continue
            # A pass may be at the very instant of something else; two deeds are not.
            self._set(at if at > self.now or isinstance(deed, _Watching) else self.now + timedelta(microseconds=1))
            deed()
        self._compare_all()

    def _begin(self, job: Job) -> None:
        job.register(job.version)
        job.follow()
        self.at(self.now + job.rng.random() * self.tempo.mood, job.change_mood, survives=True)
        self.at(self.now + job.rng.random() * self.tempo.mood, job.live, survives=True)

    def _outage(self) -> None:
        """The database is away: nobody looks, nobody works, and who worked is cut off."""
        length = self.rng.choice([0.02, 0.1, 1, 1]) * self.rng.random() * self.tempo.mood
        self.tally.outages += 1
        for job in self.jobs:
            if isinstance(job, EngineJob):
                job.finish()
            elif job.is_alive:
                job.cut_off(self.rng.random() * LEASE)
        self.down_until = self.now + length
        self.at(self.down_until + self.rng.random() * self.tempo.days * DAY, self._outage, survives=True)

    # ── the watch ──

    def _watch(self, watcher: WatchLoop) -> None:
        following = self.now + watcher.interval * self.rng.choice([1, 1, 1, 0.5 + self.rng.random(), 3, 3.5])
        if self.rng.random() < 0.02:  # it crashes, and comes back later
            following += self.rng.choice([0.05, 0.3, 1]) * self.rng.random() * self.tempo.mood
        if self.rng.random() < 0.1:
            job = self.rng.choice(self.jobs)
            following = max(self.now + SECOND, self.near(job, following))
        self.at(following, _Watching(self, watcher))
        if self.rng.random() < 0.3 and self.forgets:
            self.control.execute("delete from gaffer.job_runs where ended_at is not null")
        jobs_here = [job.name for job in self.jobs if watcher.name in job.listed_by and job.told.versions]
        if self.rng.random() < 0.02:
            self._killed_pass(watcher, jobs_here)
            return
        report = look(self.connection, Watcher(watcher.name, watcher.every, jobs_here))
        assert report is not None
        assert (report.at, list(report.problems)) == (self.now, [])
        self.tally.passes += 1
        opened = self.told.look(watcher.name, self.now, watcher.every, jobs_here)
        found = {
            (("job", finding.job) if finding.watch is None else ("watch", finding.watch), finding.kind): finding.since
            for finding in report.findings
        }
        self._same(found, self._known_by_row(found), "found")
        self._same(self._opened(), {_row(incident) for incident in opened}, "left open")

    def _known_by_row(self, found: Mapping[Any, datetime]) -> dict[Any, datetime]:
        """What is true, but for what the job's row forgets: of runs at work it keeps the newest hundred."""
        truth = dict(self.told.truth)
        for job in self.jobs:
            of = (("job", job.name), Kind.ABSENCE)
            if of in truth and sum(run.started_at > truth[of] for run in job.told.runs) > 90:
                truth[of] = found.get(of, truth[of])
        return truth

    def _killed_pass(self, watcher: WatchLoop, jobs_here: list[str]) -> None:
        """Dies before its COMMIT, having done everything else."""
        real = engine_watch.alerts.note

        def note(*given: Any) -> None:
            real(*given)
            raise KilledError

        self.tally.killed += 1
        with mock.patch.object(engine_watch.alerts, "note", note), suppress(KilledError):
            look(self.connection, Watcher(watcher.name, watcher.every, jobs_here))

    def _opened(self) -> set[tuple[Any, ...]]:
        return set(
            self.control.execute(
                "select job, watch, kind, since_at, opened_at, resolved_at, reminders, reminded_at from gaffer.alert"
                " where resolved_at is null"
            ).fetchall()
        )

    def noted(self) -> list[tuple[Any, ...]]:
        """Every incident, in the order in which they were opened."""
        return self.control.execute(
            "select job, watch, kind, since_at, opened_at, resolved_at, reminders, reminded_at from gaffer.alert"
            " order by opened_at, job, watch, kind"
        ).fetchall()

    def _compare_all(self) -> None:
        expected = sorted(str(_row(each)) for each in self.told.incidents)
        self._same(sorted(map(str, self.noted())), expected, "noted in the end")
        for incident in self.told.incidents:
            kind = str(incident.kind)
            self.tally.incidents[kind] = self.tally.incidents.get(kind, 0) + 1

    def _same(self, is_so: Any, should_be: Any, what: str) -> None:
        if is_so == should_be:
            return
        pairs = [each.items() if isinstance(each, dict) else each for each in (is_so, should_be)]
        extra, missing = ([each for each in one if each not in set(other)] for one, other in (pairs, reversed(pairs)))
        names = {name for each in [*extra, *missing] for name in self.notes if f"'{name}'" in str(each)}
        lines = [f"seed {self.seed}, {self.now.isoformat()}: {what}, but should not be: {extra}"]
        lines += [f"not {what}, but should be: {missing}"]
        lines += [f"gaps: {[(a.isoformat(), b.isoformat()) for a, b in self.told.gaps()]}"]
        for name in sorted(names):
            lines += [name, *self.notes[name][-60:]]
        raise AssertionError("\n".join(lines))

    def ack(self, job: Job) -> None:
        opened = [each for each in self.told.opened if each.subject == ("job", job.name) and each.acked_at is None]
        for incident in opened[:1]:
            self.control.execute(
                "select gaffer.ack_alert(id, 'ann', null) from gaffer.alert"
                " where job = %s and kind = %s and resolved_at is null",
                [job.name, str(incident.kind)],
            )
            incident.acked_at = self.now

    def close(self) -> None:
        for job in self.jobs:
            if isinstance(job, EngineJob):
                job.abort()
        self.connection.close()
        self.control.close()


@dataclass(frozen=True)
class _Watching:
    """A deed: a pass of this watch."""

    life: Life
    watcher: WatchLoop

    def __call__(self) -> None:
        self.life._watch(self.watcher)


def _row(incident: oracle.Incident) -> tuple[Any, ...]:
    kind, name = incident.subject
    return (
        name if kind == "job" else None,
        name if kind == "watch" else None,
        str(incident.kind),
        incident.since_at,
        incident.opened_at,
        incident.resolved_at,
        incident.reminders,
        incident.reminded_at,
    )
