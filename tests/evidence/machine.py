"""The public API in any order of calls, beside a small pure model of what must come of it.

One job at a time, with several runs of it open at once in this process: batches are left open in the middle, holders
stand still while others take over, crash, are cut off at their COMMIT, are released by hand; ticks come late, early,
twice or never; the database is put back to an older copy; writers leave transactions open. Time stands still but for
what a step moves, and a run's own waiting moves it too, so that every answer is exact.

The model knows the promises (DESIGN: the fence, the watermark in the batch's own transaction, the table of outcomes)
and none of the SQL. Each step is done to both; then what they answered is compared, and after it the tables.

    python -m tests.evidence.machine --seed 1 --examples 5000 --steps 40
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import logging
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import psycopg
from click.testing import CliRunner
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from psycopg.types.json import Jsonb

from gaffer_dagster.adapter.resource import GafferResource
from gaffer_dagster.cli import main as command
from gaffer_dagster.domain.bounds import Bounds
from gaffer_dagster.domain.due import EachInterval, Elapsed, NewRows
from gaffer_dagster.domain.lease import LARGEST_SKEW, LEASE
from gaffer_dagster.domain.run import Outcome
from gaffer_dagster.domain.schedule import Schedule
from gaffer_dagster.domain.spec import JobSpec
from gaffer_dagster.engine import holding as engine_holding
from gaffer_dagster.engine import run as engine_run
from gaffer_dagster.engine.batch import Batch
from gaffer_dagster.engine.keeper import Keeper, Stop
from gaffer_dagster.engine.registry import Definition, registration_of
from gaffer_dagster.engine.run import Run
from gaffer_dagster.store import batches, db, migrate
from gaffer_dagster.store import jobs as job_table
from gaffer_dagster.testing import Databases
from gaffer_dagster.testing.database import server
from tests.support import histories, jobs, protocol

MIDNIGHT = datetime(2027, 3, 1, tzinfo=timezone.utc)
SECOND, MINUTE, HOUR = timedelta(seconds=1), timedelta(minutes=1), timedelta(hours=1)
TIMEOUT = 15 * MINUTE
GONE = 4 * SECOND  # how long after its connection was seen to be gone a holder may come back
GAP = 1_000_000  # by how much an adopted fence goes ahead
MOST_ATTEMPTS = 5


# ── the model: what the tables must say ──────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Kind:
    """A job as one version of its code defines it. Its ticks: each `every`, at `offset` after midnight."""

    due: str
    cron: str
    every: timedelta
    offset: timedelta
    batches: int
    max_late: timedelta | None = None

    def latest(self, at: datetime) -> datetime:
        return at - (at - MIDNIGHT - self.offset) % self.every

    def ticks(self, after: datetime, until: datetime) -> list[datetime]:
        """Those in `(after, until]`."""
        first = self.latest(after) + self.every
        return [first + number * self.every for number in range(max(0, (until - first) // self.every + 1))]


def versions(due: str, batches_: int, max_late: timedelta | None) -> list[Kind]:
    """What a job becomes with each deployment; none comes back."""
    return [
        Kind(due, "0 * * * *", HOUR, timedelta(), batches_, max_late),
        Kind(due, "30 * * * *", HOUR, 30 * MINUTE, batches_, max_late),
        Kind(due, "*/20 * * * *", 20 * MINUTE, timedelta(), batches_ + 1, max_late),
        Kind(due, "15 */2 * * *", 2 * HOUR, 15 * MINUTE, batches_, None),
    ]


@dataclass
class RunRow:
    """`lease` names the acquisition that it belongs to: None where there was none."""

    id: int
    trigger: str
    tick: datetime
    outcome: Outcome
    lease: int | None = None
    fence: int | None = None
    batches: int = 0
    items: int = 0
    backlog: int | None = None
    covered_until: datetime | None = None
    ticks_covered: int | None = None
    deadline_at: datetime | None = None


@dataclass(frozen=True)
class Pause:
    since: datetime
    until: datetime | None

    def holds(self, at: datetime) -> bool:
        return self.since <= at and (self.until is None or at < self.until)


@dataclass
class Tables:
    """What is stored. `position`: of rows the place of the last one that is done, of time up to when it is."""

    first_seen_at: datetime
    version: Kind
    periods: list[tuple[datetime, Kind]]
    name: str
    fence: int = 0
    lease: int | None = None
    lease_until: datetime = MIDNIGHT
    connection: int | None = None  # the holder whose connection is recorded with the lease
    gone_at: datetime | None = None
    position: Any = None
    applied: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    runs: dict[int, RunRow] = field(default_factory=dict[int, RunRow])
    pauses: list[Pause] = field(default_factory=list[Pause])
    is_paused: bool = False  # until somebody resumes it, also where the pause has run out
    covered_until: datetime | None = None
    skipped_until: datetime | None = None
    last_success_at: datetime | None = None
    failed_ticks: list[datetime] = field(default_factory=list[datetime])
    capped: int = 0
    leases_lost: int = 0
    wanted: int = 0
    follow_up_at: datetime | None = None


@dataclass
class Page:
    """One batch: the keys of what is due in it, and where the watermark is after it."""

    keys: list[str]
    position: Any
    items: int
    began: timedelta


@dataclass
class Holder:
    """A run that was granted, as its process knows it."""

    number: int
    name: str
    kind: Kind
    row: int
    lease: int
    fence: int
    position: Any
    looked_at: datetime
    started_at: datetime
    before: datetime
    wanted: int
    deadline: timedelta
    redo: datetime | None
    horizon: int = 0
    page: Page | None = None
    wrote: list[str] = field(default_factory=list[str])
    serial: int | None = None  # of its open transaction, once that has written
    spoilt: bool = False  # a statement failed, and the error was swallowed
    cut: bool = False  # its connection is gone, which it does not know
    is_lost: bool = False  # its keeper has found so
    batches: int = 0
    items: int = 0
    attempts: int = 0
    longest: timedelta = timedelta()
    held: bool = False


class ModelError(Exception):
    """What the model says is raised; `kind`: lost, deadline, connection, unknown, swallowed, user, interrupt."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


Answer = tuple[str, Any]


class Model:
    """`now` is the database's time; `mono` that of the processes, which may be suspended."""

    def __init__(self, kind: Kind, name: str, now: datetime) -> None:
        self.now, self.mono = now, timedelta()
        self.tables = Tables(now, kind, [(now, kind)], name)
        self.rows: dict[int, tuple[int, int]] = {}  # what is committed: key and place, by transaction and key
        self.open: dict[int, list[int]] = {}  # transactions that are open and have written: rows by serial
        self.gone: set[int] = set()  # holders whose connections are gone
        self._serials = itertools.count(1)
        self._leases = itertools.count(1)
        self._wishes = itertools.count(1)
        self.holders: list[Holder] = []

    # ── time and transactions ──

    def move(self, by: timedelta, *, suspended: bool = False) -> None:
        self.now += by
        if not suspended:
            self.mono += by

    def serial(self) -> int:
        return next(self._serials)

    def horizon(self) -> int:
        """Below it every transaction is over."""
        return min(self.open, default=self.serial())

    def open_one(self, rows: list[int]) -> int:
        """A transaction that writes, and stays open."""
        serial = self.serial()
        self.open[serial] = rows
        return serial

    def end_one(self, serial: int, *, commits: bool) -> None:
        rows = self.open.pop(serial)
        if commits:
            self.rows |= {key: (serial, key) for key in rows}

    def places(self, after: Any, horizon: int) -> list[tuple[int, int]]:
        return sorted(place for place in self.rows.values() if place[0] < horizon and (after is None or place > after))

    # ── who holds it ──

    def is_current(self, holder: Holder) -> bool:
        tables = self.tables
        return (tables.name, tables.lease, tables.fence) == (holder.name, holder.lease, holder.fence)

    def is_at_work(self) -> bool:
        return self.tables.lease is not None and self.tables.lease_until > self.now

    def left(self, holder: Holder) -> timedelta:
        return holder.deadline - self.mono

    def pause(self) -> Pause | None:
        tables = self.tables
        if not tables.is_paused:
            return None
        last = tables.pauses[-1]
        return last if last.until is None or last.until > self.now else None

    # ── a run begins ──

    def register(self, kind: Kind) -> None:
        if self.tables.version != kind:
            self.tables.version = kind
            self.tables.periods.append((self.now, kind))

    def wake(
        self,
        kind: Kind,
        trigger: str,
        *,
        ahead: timedelta | None,
        despite_pause: bool,
        redo: datetime | None,
        next_id: int,
    ) -> Answer:
        """`ahead`: the tick that it was started for is so far in the future."""
        tables = self.tables
        started = self.mono
        if ahead is not None and ahead > LARGEST_SKEW:
            self._row(next_id, kind, trigger, Outcome.FAILED)
            self._count_failure(kind.latest(self.now), trigger)
            return "raised", ("ClockSkewError", str(Outcome.FAILED))
        if ahead is not None:
            self.move(ahead)
        self.register(kind)
        answer = self._ask(kind, trigger, despite_pause)
        if answer is Outcome.BUSY:
            tables.wanted = next(self._wishes)
            if self._is_gone():
                free_at = (tables.gone_at or self.now) + GONE
                tables.gone_at = tables.gone_at or self.now
                self.move(max(timedelta(), free_at - self.now))
            answer = self._ask(kind, trigger, despite_pause)
        tick = kind.latest(self.now)
        if answer is not None:
            self._row(next_id, kind, trigger, answer)
            if answer is Outcome.LATE:
                tables.skipped_until = max(tables.skipped_until or tick, tick)
            return "outcome", str(answer)
        tables.fence += 1
        tables.lease, tables.lease_until = next(self._leases), self.now + LEASE
        tables.connection = tables.gone_at = None
        if trigger != "redo":
            tables.follow_up_at = None
        if self._abandon() and trigger == "redo":
            tables.follow_up_at = self.now
        row = self._row(next_id, kind, trigger, Outcome.RUNNING)
        row.lease, row.fence, row.deadline_at = tables.lease, tables.fence, self.now + TIMEOUT
        reached = [at for at in (tables.covered_until, tables.skipped_until) if at is not None]
        holder = Holder(
            number=tables.lease,
            name=tables.name,
            kind=kind,
            row=next_id,
            lease=tables.lease,
            fence=tables.fence,
            position=tables.position,
            looked_at=self.now,
            started_at=self.now,
            before=max(reached, default=tables.first_seen_at),
            wanted=tables.wanted,
            deadline=started + TIMEOUT,
            redo=redo,
            horizon=self.horizon(),
        )
        if redo is not None and (holder.position is None or holder.position < redo + HOUR):
            return self._fail(holder, ModelError("user"), "BadInputError")
        self.holders.append(holder)
        return "granted", holder.fence

    def _ask(self, kind: Kind, trigger: str, despite_pause: bool) -> Outcome | None:
        """Why it may not work; None: it may."""
        tables, tick = self.tables, kind.latest(self.now)
        if self.pause() is not None and not despite_pause:
            return Outcome.PAUSED
        late_at = None if kind.max_late is None or trigger != "schedule" else tick + kind.max_late
        is_late = late_at is not None and self.now > late_at and tick > (tables.covered_until or tables.first_seen_at)
        if is_late and not self.is_at_work():
            return Outcome.LATE
        if self.is_at_work() and not (self._is_gone() and tables.gone_at and self.now >= tables.gone_at + GONE):
            return Outcome.BUSY
        return None

    def _is_gone(self) -> bool:
        return self.is_at_work() and self.tables.connection in self.gone

    def _row(self, number: int, kind: Kind, trigger: str, outcome: Outcome) -> RunRow:
        row = self.tables.runs[number] = RunRow(number, trigger, kind.latest(self.now), outcome)
        return row

    def _abandon(self) -> bool:
        """Whoever is said to be at work is dead. True: it was no redo."""
        owed = False
        for row in self.tables.runs.values():
            if row.outcome is Outcome.RUNNING:
                row.outcome = Outcome.ABANDONED
                if row.trigger != "redo":
                    self._count_failure(row.tick, row.trigger)
                    self.tables.leases_lost += 1
                    owed = True
        return owed

    def _count_failure(self, tick: datetime, trigger: str) -> None:
        if trigger != "redo" and tick not in self.tables.failed_ticks:
            self.tables.failed_ticks.append(tick)

    # ── a batch ──

    def go_on(self, holder: Holder, cut: str | None) -> Answer:
        """Commits the batch that is open, if one is, and takes the next one."""
        if holder.page is not None:
            try:
                self._commit(holder, cut)
            except ModelError as error:
                if not self._does_again(holder, error):
                    return self._fail(holder, error)
        return self._next(holder)

    def _does_again(self, holder: Holder, error: ModelError) -> bool:
        holder.attempts += 1
        self._roll_back(holder)
        stopped = holder.is_lost or self.left(holder) <= timedelta()
        return error.kind == "connection" and not stopped and holder.attempts < MOST_ATTEMPTS

    def _check(self, holder: Holder) -> None:
        if holder.is_lost:
            raise ModelError("lost")
        if self.left(holder) <= timedelta():
            raise ModelError("deadline")

    def _commit(self, holder: Holder, cut: str | None) -> None:
        page, tables = holder.page, self.tables
        assert page is not None
        if holder.spoilt:
            raise ModelError("swallowed")
        self._check(holder)
        if holder.cut or cut == "before":
            self._supersede(holder)
            raise ModelError("connection")
        if not self.is_current(holder) or tables.position != holder.position:
            raise ModelError("lost")
        row = self._row_of(holder)
        if row is None or row.outcome is not Outcome.RUNNING:
            raise ModelError("lost")
        assert row.deadline_at is not None
        if self.now > row.deadline_at:
            raise ModelError("deadline")
        tables.lease_until, tables.gone_at = self.now + LEASE, None
        holder.position = tables.position = page.position
        row.batches += 1
        row.items += page.items
        tables.applied += [(key, holder.fence) for key in holder.wrote]
        holder.batches += 1
        holder.items += page.items
        if cut == "after":
            self._supersede(holder)
        holder.attempts = 0
        holder.longest = max(holder.longest, self.mono - page.began)
        self._roll_back(holder)

    def _supersede(self, holder: Holder) -> None:
        """The next fence, after a COMMIT whose answer was lost."""
        row = self._row_of(holder)
        if not self.is_current(holder) or row is None or row.outcome is not Outcome.RUNNING:
            raise ModelError("lost")
        self.tables.fence += 1
        self.tables.lease = next(self._leases)
        self.tables.lease_until, self.tables.gone_at = self.now + LEASE, None
        holder.fence, holder.lease = self.tables.fence, self.tables.lease
        row.fence, row.lease = holder.fence, holder.lease

    def _roll_back(self, holder: Holder) -> None:
        """Its transaction is over, one way or the other."""
        self._undo(holder)
        holder.page, holder.spoilt, holder.cut = None, False, False

    def _undo(self, holder: Holder) -> None:
        if holder.serial is not None:
            self.end_one(holder.serial, commits=False)
        holder.serial, holder.wrote = None, []

    def _row_of(self, holder: Holder) -> RunRow | None:
        row = self.tables.runs.get(holder.row)
        return row if row is not None and row.lease == holder.lease else None

    def _next(self, holder: Holder) -> Answer:
        while True:
            if holder.is_lost:
                return self._fail(holder, ModelError("lost"))
            most = 1 if holder.redo is not None else holder.kind.batches
            bounded = holder.batches >= most or self.left(holder) <= holder.longest
            if holder.cut and not self._does_again(holder, ModelError("connection")):
                return self._fail(holder, ModelError("connection"))
            if not bounded:
                page = holder.page = self._page(holder)
                if page is not None:
                    holder.held = False
                    return "batch", page.keys
                if not holder.items:
                    held = holder.horizon in self.open and any(at[0] >= holder.horizon for at in self.rows.values())
                    holder.held = holder.kind.due == "rows" and held
            ended = self._ends(holder, exhausted=not bounded)
            if ended is not None:
                return ended

    def _page(self, holder: Holder) -> Page | None:
        kind = holder.kind
        if holder.redo is not None:
            return Page([_said(holder.redo)], holder.position, 1, self.mono)
        if kind.due == "rows":
            places = self.places(holder.position, holder.horizon)[:2]
            return Page([str(key) for _, key in places], places[-1], len(places), self.mono) if places else None
        windows = self._windows(holder)
        if not windows:
            return None
        since, until = windows[0]
        if until + SECOND > self.now:  # waits until it is settled
            self.move(until + SECOND - self.now)
        return Page([_said(since)], until, 1, self.mono)

    def _windows(self, holder: Holder) -> list[tuple[datetime, datetime]]:
        """The stretches of time that are due in this run."""
        since = holder.position or MIDNIGHT
        if holder.kind.due == "elapsed":
            until = holder.kind.latest(holder.looked_at)
            return [(since, until)] if since < until else []
        hours = max(0, (holder.looked_at - since) // HOUR)
        return [(since + hour * HOUR, since + (hour + 1) * HOUR) for hour in range(hours)]

    def _left(self, holder: Holder) -> int:
        if holder.redo is not None:
            return 0
        if holder.kind.due == "rows":
            return len(self.places(holder.position, holder.horizon))
        return len(self._windows(holder))

    # ── a run ends ──

    def _ends(self, holder: Holder, *, exhausted: bool) -> Answer | None:
        """None: a wake-up met it, so it looks again."""
        backlog = 0 if exhausted else self._left(holder)
        try:
            if self._end(holder, Outcome.CAPPED if backlog else Outcome.SUCCEEDED, backlog=backlog):
                return "outcome", str(Outcome.CAPPED if backlog else Outcome.SUCCEEDED)
        except ModelError as error:
            return self._fail(holder, error, ended=error.kind == "lost")
        holder.looked_at, holder.horizon, holder.wanted = self.now, self.horizon(), self.tables.wanted
        return None

    def leave(self, holder: Holder, how: str) -> Answer:
        """The block is left early, or by an exception: its batch is undone."""
        if how != "leave":
            return self._fail(holder, ModelError(how))
        if holder.page is None and holder.cut:
            return self._fail(holder, ModelError("connection"))
        self._roll_back(holder)
        ended = self._ends(holder, exhausted=False)
        if ended is not None:
            return ended
        self._end(holder, Outcome.CAPPED, backlog=self._left(holder))
        return "outcome", str(Outcome.CAPPED)

    def _fail(self, holder: Holder, error: ModelError, raised: str | None = None, *, ended: bool = False) -> Answer:
        self._roll_back(holder)
        names = {
            "lost": "LeaseLostError",
            "deadline": "DeadlinePassedError",
            "connection": "OperationalError",
            "unknown": "UnknownJobError",
            "interrupt": "KeyboardInterrupt",
            "swallowed": "DivisionByZero",
            "user": "BrokenError",
        }
        name = raised or names[error.kind]
        if ended:
            self._over(holder)
            return "raised", (name, str(Outcome.LOST_LEASE))
        is_late = self.left(holder) <= timedelta()
        outcome = Outcome.FAILED
        if error.kind == "lost" or (error.kind == "connection" and holder.is_lost):
            outcome, name = Outcome.LOST_LEASE, names["lost"]
        elif error.kind == "deadline" or (error.kind == "connection" and is_late):
            outcome, name = Outcome.TIMED_OUT, names["deadline"]
        elif error.kind == "interrupt":
            outcome = Outcome.INTERRUPTED
        follow_up = MINUTE if error.kind == "connection" and outcome is not Outcome.LOST_LEASE else None
        if name == names["deadline"]:
            follow_up = None
        try:
            self._end(holder, outcome, backlog=None, follow_up=follow_up)
        except ModelError as second:
            if second.kind == "lost":
                outcome = Outcome.LOST_LEASE
        self._over(holder)
        return "raised", (name, str(outcome))

    def _over(self, holder: Holder) -> None:
        self._roll_back(holder)
        if holder in self.holders:
            self.holders.remove(holder)

    def _end(
        self, holder: Holder, outcome: Outcome, *, backlog: int | None, follow_up: timedelta | None = None
    ) -> bool:
        """False: look again. Raises: the lease is lost, or nobody knows of this run."""
        tables, row = self.tables, self._row_of(holder)
        is_redo = holder.redo is not None
        done = outcome is Outcome.SUCCEEDED
        if not self.is_current(holder):
            if row is None:
                raise ModelError("unknown")
            if row.outcome is Outcome.RUNNING and not is_redo:
                self._count_failure(row.tick, row.trigger)
                tables.leases_lost += 1
            row.outcome = Outcome.LOST_LEASE
            raise ModelError("lost")
        if row is None or row.outcome is not Outcome.RUNNING:
            raise ModelError("unknown")
        if done and not is_redo and tables.wanted != holder.wanted:
            return False
        covered = self._covers(holder, outcome)
        row.outcome, row.backlog, row.covered_until = outcome, backlog, covered
        row.ticks_covered = None if covered is None else self._count(holder, covered)
        if not is_redo:
            if done or outcome is Outcome.CAPPED:
                tables.failed_ticks = []
                tables.capped = 0 if done else tables.capped + 1
                tables.last_success_at = self.now if done else tables.last_success_at
            elif outcome is not Outcome.INTERRUPTED:
                self._count_failure(row.tick, row.trigger)
            if covered is not None and (tables.covered_until is None or covered > tables.covered_until):
                tables.covered_until = covered
        if outcome is Outcome.CAPPED:
            follow_up = timedelta() if holder.batches and not holder.held else MINUTE
        elif follow_up is None and holder.held:
            follow_up = 5 * MINUTE
        if tables.wanted != holder.wanted:
            tables.follow_up_at = self.now
        elif not is_redo:
            tables.follow_up_at = None if follow_up is None else self.now + follow_up
        tables.lease, tables.connection, tables.gone_at = None, None, None
        self._over(holder)
        return True

    def _covers(self, holder: Holder, outcome: Outcome) -> datetime | None:
        if holder.redo is not None:
            return None
        if outcome is Outcome.SUCCEEDED:
            return holder.looked_at
        if holder.kind.due == "rows" or not holder.items:
            return None
        return min(holder.position, holder.looked_at)

    def _count(self, holder: Holder, until: datetime) -> int:
        """The ticks that it covers: those that no pause skipped."""
        periods = self.tables.periods
        ends = [*(since for since, _ in periods[1:]), until]
        ticks = [
            tick
            for (since, kind), end in zip(periods, ends, strict=True)
            for tick in kind.ticks(max(since, holder.before), min(end, until))
        ]
        skips = [pause for pause in self.tables.pauses if not pause.holds(holder.started_at)]
        return sum(not any(pause.holds(tick) for pause in skips) for tick in ticks)

    # ── what people do ──

    def renew(self, holder: Holder) -> None:
        if self.is_current(holder):
            self.tables.lease_until, self.tables.gone_at = self.now + LEASE, None
            self.tables.connection = holder.number
        else:
            holder.is_lost = True

    def spoil(self, holder: Holder) -> None:
        """A statement of its batch has failed: the server has undone what it wrote."""
        self._undo(holder)
        holder.spoilt = True

    def cut_off(self, holder: Holder) -> None:
        self._undo(holder)
        holder.cut = True

    def crash(self, holder: Holder) -> None:
        self._over(holder)
        self.gone.add(holder.number)

    def stop(self, until: datetime | None) -> None:
        pauses = self.tables.pauses
        if pauses and self.tables.is_paused:
            pauses[-1] = _ended(pauses[-1], self.now)
        pauses.append(Pause(self.now, until))
        self.tables.is_paused = True

    def resume(self) -> None:
        if self.tables.is_paused:
            self.tables.pauses[-1] = _ended(self.tables.pauses[-1], self.now)
            self.tables.is_paused = False

    def release(self) -> None:
        tables = self.tables
        if tables.lease is not None:
            tables.fence += 1
            tables.lease = tables.connection = tables.gone_at = None
            if self._abandon():
                tables.follow_up_at = self.now

    def set_aside(self, by: int) -> bool:
        """Somebody moves the fence: False, refused while a run is at work."""
        if self.is_at_work():
            return False
        self.tables.fence += by
        self.tables.lease = None
        self.tables.follow_up_at = self.now
        return True

    def rename(self, name: str) -> bool:
        if self.is_at_work():
            return False
        self.tables.name = name
        return True


def _said(at: datetime) -> str:
    return at.isoformat()


def _ended(pause: Pause, at: datetime) -> Pause:
    return Pause(pause.since, at if pause.until is None else min(pause.until, at))


# ── the product, beside it ───────────────────────────────────────────────────────────────────────────────────────────


class BrokenError(Exception):
    """What the work of a run raises to fail."""


class Moved:
    """Stands in for the module `time` in the engine: what a run waits for comes at once, and moves the clock."""

    def __init__(self, passed: Callable[[], timedelta], sleep: Callable[[timedelta], None]) -> None:
        self._passed, self._sleep = passed, sleep
        self._began = time.monotonic()

    def monotonic(self) -> float:
        return self._began + self._passed().total_seconds()

    def sleep(self, seconds: float) -> None:
        assert seconds != 0.05, "a run waits for an open transaction, which no step of this machine ends"
        self._sleep(timedelta(seconds=seconds))


class AtOnce:
    """Stands in for `random` where it spreads a load."""

    @staticmethod
    def uniform(_least: float, _most: float) -> float:
        return 0.0


class World:
    """A database for all examples. Each has a job of its own; its rows are removed after it."""

    def __init__(self, url: str) -> None:
        self.url, self.resource = url, GafferResource(dsn=url)
        self._files = mock.patch.object(migrate, "migrations", lru_cache(migrate.migrations))
        self._files.start()  # each connection compares all of them
        if not jobs.query(url, "select from pg_class where relname = 'source'"):
            self._make(url)
        self.control = jobs.connect(url)
        self.examples = 0
        self.answers: Counter[str] = Counter()

    @staticmethod
    def _make(url: str) -> None:
        histories.stand_still(url)
        jobs.execute(url, "create table source (id bigint generated always as identity primary key, job text)")
        jobs.prepare(url, "source", "id")
        jobs.execute(url, "create table target (job text, key text, fence bigint)")
        jobs.execute(url, "create index on target (job)")
        for table in _OWN:
            # Whoever analyzes has a transaction open, which would hold back what is new.
            jobs.execute(url, f"alter table {table} set (autovacuum_enabled = false)")

    def set(self, at: datetime) -> None:
        self.control.execute("update gaffer.testing_now set at = %s", [at])

    def next_run(self) -> int:
        found = self.control.execute("select coalesce(pg_sequence_last_value('gaffer.job_runs_id_seq'), 0)").fetchone()
        assert found is not None
        return found[0] + 1

    def terminate(self, pid: int) -> None:
        self.control.execute("select pg_terminate_backend(%s, 10000)", [pid])

    def use_up_a_number(self) -> None:
        """Whoever begins to write from now on is younger than what was looked at before."""
        self.control.execute("select pg_current_xact_id()")

    def clean(self) -> None:
        self.control.execute("delete from source")
        self.control.execute("delete from target")
        if self.examples % 200 == 0:
            for table in _OWN:
                self.control.execute(f"vacuum {table}")

    def close(self) -> None:
        self._files.stop()
        self.control.close()

    # ── an older copy ──

    def copy(self, job: str, label: str) -> dict[str, Any]:
        """All that is stored of a job, and how many rows of `target` are."""
        kept: dict[str, Any] = {"runs": self.next_run() - 1}
        for table, column in _TABLES.items():
            found = self.control.execute(
                f"select coalesce(jsonb_agg(to_jsonb(t)), '[]') from gaffer.{table} t where {column} = %s", [job]
            ).fetchone()
            assert found is not None
            kept[table] = found[0]
        kept["target"] = self.control.execute("select job, key, fence from target where job = %s", [label]).fetchall()
        return kept

    def put_back(self, job: str, label: str, kept: dict[str, Any]) -> None:
        with self.control.transaction():
            # As a restore has it: the triggers come after the rows.
            self.control.execute("alter table gaffer.job_lease disable trigger user")
            for table, column in reversed(_TABLES.items()):
                self.control.execute(f"delete from gaffer.{table} where {column} = %s", [job])
            for table in _TABLES:
                self.control.execute(
                    f"insert into gaffer.{table} overriding system value"
                    f" select * from jsonb_populate_recordset(null::gaffer.{table}, %s)",
                    [Jsonb(kept[table])],
                )
            self.control.execute("alter table gaffer.job_lease enable trigger user")
            self.control.execute("delete from target where job = %s", [label])
            for row in kept["target"]:
                self.control.execute("insert into target values (%s, %s, %s)", row)
            self.control.execute(
                "select setval('gaffer.job_runs_id_seq', %s, %s)", [max(1, kept["runs"]), kept["runs"] > 0]
            )


_TABLES = {
    "job": "name",
    "job_spec": "job",
    "job_lease": "job",
    "job_watermark": "job",
    "job_runs": "job",
    "operator_action": "job",
}
_OWN = ("source", "target", "gaffer.testing_now", *(f"gaffer.{table}" for table in _TABLES))
_STATE = """
    select name, consecutive_failures, covered_until, skipped_until, last_success_at, consecutive_capped, leases_lost,
           follow_up_at, paused_at is not null, fence, lease_id is not null, nullif(lease_until, 'epoch'), position
      from gaffer.job join gaffer.job_lease l on l.job = name join gaffer.job_watermark w on w.job = name
     where name = %(job)s;
    select id, trigger, tick, outcome, fence, batches, items, backlog, covered_until, ticks_covered, deadline_at
      from gaffer.job_runs where job = %(job)s order by id;
    select key, fence from target where job = %(label)s order by key, fence
"""


@dataclass
class Opened:
    """A run of the product's that is open, beside what the model knows of it."""

    context: Any
    run: Run
    batches: Iterator[Batch]
    batch: Batch | None = None
    told: Holder = field(init=False)

    @property
    def keeper(self) -> Keeper:
        keeper = self.run._holding._keeper
        assert keeper is not None
        return keeper

    def close_keeper(self) -> int | None:
        """Closes the connection that renews were sent on, as the keeper does at its end; which it was."""
        connection = self.keeper._connection
        if connection is None or connection.closed:
            return None
        pid = connection.info.backend_pid
        connection.close()
        return pid


class Machine(RuleBasedStateMachine):
    """`world` is set by `machine_on`."""

    world: ClassVar[World]

    def __init__(self) -> None:
        super().__init__()
        self.holders: list[Opened] = []
        self.writers: list[tuple[int, psycopg.Connection[tuple[Any, ...]]]] = []
        self.kept: tuple[Tables, dict[str, Any]] | None = None
        self.world.examples += 1
        self.label = self.name = f"job{self.world.next_run()}.{self.world.examples}"
        self.renamed = 0
        self.model: Model
        self.patches: list[Any] = []

    # ── what the steps are made of ──

    @initialize(
        due=st.sampled_from(["rows", "rows", "hours", "elapsed"]),
        batches=st.sampled_from([1, 2, 3]),
        max_late=st.sampled_from([None, None, 10 * MINUTE]),
    )
    def define(self, due: str = "rows", batches: int = 3, max_late: timedelta | None = None) -> None:
        now = MIDNIGHT + 5 * HOUR + 30 * SECOND
        self.versions = versions(due, batches, max_late)
        self.version = 0
        self.model = Model(self.versions[0], self.name, now)
        self.world.set(now)
        self.waited = timedelta()
        moved = Moved(lambda: self.model.mono + self.waited, self._wait)
        for module in (engine_run, engine_holding):
            self.patches += [mock.patch.object(module, "time", moved), mock.patch.object(module, "random", AtOnce)]
        for patch in self.patches:
            patch.start()
        job_table.register(self.world.control, self._spec(), self._registration())

    def _spec(self) -> JobSpec:
        kind = self.versions[self.version]
        due = {
            "rows": NewRows("source", "id", where=f"job = '{self.label}'"),  # type: ignore[arg-type]
            "hours": EachInterval("0 * * * *", settle=SECOND, start=MIDNIGHT),
            "elapsed": Elapsed(settle=SECOND, start=MIDNIGHT),
        }[kind.due]
        bounds = Bounds(batch_rows=2, batches=kind.batches, timeout=TIMEOUT, batch_timeout=TIMEOUT)
        return JobSpec(self.name, due, Schedule(kind.cron), bounds, max_late=kind.max_late)

    def _registration(self) -> job_table.Registration:
        return registration_of(Definition(self._spec(), None), ())

    def _now(self) -> datetime:
        return self.model.now + self.waited

    def _wait(self, by: timedelta) -> None:
        """A run waits, in the middle of a step: the model has yet to hear of it."""
        self.waited += by
        self.world.set(self._now())

    def _same(self, told: Any, answer: Any) -> None:
        """What the product said is what the model says, which has moved its own clock by what the product waited."""
        assert answer == told, f"the product says {answer}, the model {told}"

    def _step(self, product: Callable[[], Answer], model: Callable[[], Answer]) -> Answer:
        """One step of both."""
        answer = product()
        after, self.waited = self._now(), timedelta()
        told = model()
        self._same(told, answer)
        self._same(self.model.now, after)
        self.world.answers[" ".join(answer[1]) if answer[0] == "raised" else answer[answer[0] == "outcome"]] += 1
        return answer

    @property
    def kind(self) -> Kind:
        return self.versions[self.version]

    def _may_look(self, own: int | None = None) -> bool:
        """Of time that is due, what is open elsewhere would be waited for."""
        return self.kind.due == "rows" or not (set(self.model.open) - {own})

    # ── runs ──

    @precondition(lambda self: len(self.holders) < 3 and self._may_look())
    @rule(
        trigger=st.sampled_from(["schedule", "schedule", "manual", "sensor"]),
        ahead=st.sampled_from([None] * 6 + [3 * SECOND, 4 * MINUTE, 6 * MINUTE]),
        despite_pause=st.booleans(),
        redo=st.sampled_from([None] * 4 + list(range(6))),
    )
    def wake(
        self,
        trigger: str = "schedule",
        ahead: timedelta | None = None,
        despite_pause: bool = False,
        redo: int | None = None,
    ) -> None:
        """A tick, or somebody, asks for a run. `ahead`: the tick is so far ahead of the database's clock. `redo`: this
        hour once more, of a job that is due by the hour."""
        if redo is not None and self.kind.due == "hours":
            self._wake("redo", despite_pause=despite_pause, redo=MIDNIGHT + redo * HOUR)
        else:
            self._wake(trigger, ahead=ahead, despite_pause=despite_pause)

    @precondition(lambda self: len(self.holders) < 3 and self._may_look())
    @rule()
    def whole_run(self) -> None:
        """A tick, and all that a healthy run does."""
        opened = self._wake("schedule")
        while opened is not None and self._go_on(opened, None, True):
            pass

    def _wake(
        self,
        trigger: str,
        *,
        ahead: timedelta | None = None,
        despite_pause: bool = False,
        redo: datetime | None = None,
    ) -> Opened | None:
        number = self.world.next_run()
        # What Dagster's context would say.
        given = {"trigger": trigger, "worker_clock": self._now}
        given |= {} if ahead is None else {"tick": self._now() + ahead}
        context = self.world.resource.run(
            self._spec(),
            despite_pause=despite_pause,
            redo=redo,
            **given,
        )
        made: list[Run] = []

        def begin() -> Answer:
            try:
                run = context.__enter__()
            except Exception as error:
                return "raised", (type(error).__name__, str(Outcome.FAILED))
            if run.outcome is not Outcome.RUNNING:
                return self._leave(context, run, None)
            made.append(run)
            return "granted", run._holding.lease.fence

        def told() -> Answer:
            return self.model.wake(
                self.kind, trigger, ahead=ahead, despite_pause=despite_pause, redo=redo, next_id=number
            )

        opened = None
        try:
            self._step(begin, told)
        finally:
            if made:
                opened = Opened(context, made[0], iter(made[0]))
                opened.keeper.end()  # this machine is the keeper
                self.holders.append(opened)
        if opened is not None:
            opened.told = self.model.holders[-1]
        return opened

    def _leave(self, context: Any, run: Run, error: BaseException | None) -> Answer:
        """Leaves the block of the run; how it ended, and what was raised."""
        raised = error
        try:
            context.__exit__(None if error is None else type(error), error, error and error.__traceback__)
        except BaseException as other:
            raised = other
        if raised is None:
            return "outcome", str(run.outcome)
        return "raised", (type(raised).__name__, str(run.outcome))

    def _close(self, opened: Opened, error: BaseException | None) -> Answer:
        answer = self._leave(opened.context, opened.run, error)
        opened.close_keeper()
        self.holders.remove(opened)
        return answer

    @precondition(lambda self: self.holders)
    @rule(
        who=st.integers(0, 2),
        cut=st.sampled_from([None] * 6 + ["before", "after"]),
        writes=st.sampled_from([True, True, True, False]),
    )
    def go_on(self, who: int = 0, cut: str | None = None, writes: bool = True) -> None:
        """Commits the batch that is open, and takes the next one. `cut`: its connection is, just before or after the
        COMMIT. `writes`: into the next one, at once."""
        opened = self.holders[who % len(self.holders)]
        if self._may_look(opened.told.serial):
            self._go_on(opened, cut, writes)

    def _go_on(self, opened: Opened, cut: str | None, writes: bool) -> bool:
        if opened.batch is None or opened.told.cut:
            cut = None

        def take() -> Answer:
            try:
                with self._cutting(cut):
                    opened.batch = next(opened.batches, None)
            except Exception as error:
                return self._close(opened, error)
            if opened.batch is None:
                return self._close(opened, None)
            if opened.batch.rows:
                return "batch", [str(row["id"]) for row in opened.batch.rows]
            return "batch", [_said(opened.batch.window.since)]

        answer, _ = self._step(take, lambda: self.model.go_on(opened.told, cut))
        if answer == "batch" and writes:
            self._write(opened)
        return answer == "batch"

    @contextmanager
    def _cutting(self, cut: str | None) -> Generator[None]:
        real = batches.commit

        def commit(connection: db.Connection, *given: Any, **named: Any) -> datetime:
            if cut == "before":
                self.world.terminate(connection.info.backend_pid)
                return real(connection, *given, **named)
            done = real(connection, *given, **named)
            self.world.terminate(connection.info.backend_pid)
            connection.execute("select")  # raises: the answer does not arrive
            return done

        if cut is None:
            yield
        else:
            with mock.patch.object(batches, "commit", commit):
                yield

    @precondition(lambda self: self.holders)
    @rule(
        who=st.integers(0, 2),
        what=st.sampled_from(
            ["finish", "finish", "renew", "fail", "write", "crash", "leave", "interrupt", "undo a part", "swallow",
             "cut off"]
        ),
    )  # fmt: skip
    def one(self, what: str, who: int = 0) -> None:
        """One of the runs that are open does this."""
        opened = self.holders[who % len(self.holders)]
        {
            "write": self._write,
            "finish": self._finish,
            "renew": self._renew,
            "crash": self._crash,
            "leave": lambda opened: self._end(opened, what, None),
            "fail": lambda opened: self._end(opened, "user", BrokenError()),
            "interrupt": lambda opened: self._end(opened, what, KeyboardInterrupt()),
            "undo a part": self._undo_a_part,
            "swallow": self._swallow_an_error,
            "cut off": self._cut_off,
        }[what](opened)

    def _may_write(self, opened: Opened) -> bool:
        holder = opened.told
        stopped = holder.is_lost or self.model.left(holder) <= timedelta()
        return holder.page is not None and not (holder.cut or holder.spoilt or stopped)

    def _write(self, opened: Opened) -> None:
        """The work writes what it was handed, if it has not yet."""
        holder, batch = opened.told, opened.batch
        if self._may_write(opened) and not holder.wrote:
            assert batch is not None
            assert holder.page is not None
            self._begin_to_write(holder)
            holder.wrote = list(holder.page.keys)
            batch.insert("target", [{"job": self.label, "key": key, "fence": batch.fence} for key in holder.wrote])

    def _begin_to_write(self, holder: Holder) -> None:
        if holder.serial is None:
            self.world.use_up_a_number()
            holder.serial = self.model.open_one([])

    def _undo_a_part(self, opened: Opened) -> None:
        """A part of the work fails in a savepoint, and the work goes on."""
        if self._may_write(opened):
            assert opened.batch is not None
            self._begin_to_write(opened.told)
            with suppress(psycopg.errors.DivisionByZero), opened.batch.savepoint():
                opened.batch.insert("target", [{"job": self.label, "key": "undone", "fence": 0}])
                opened.batch.execute("select 1 / 0")

    def _swallow_an_error(self, opened: Opened) -> None:
        """A statement of the work fails, and the work does not say so."""
        if self._may_write(opened):
            assert opened.batch is not None
            with suppress(psycopg.errors.DivisionByZero):
                opened.batch.execute("select 1 / 0")
            self.model.spoil(opened.told)

    def _finish(self, opened: Opened) -> None:
        """The rest of a run, in one go."""
        if self._may_look(opened.told.serial):
            self._write(opened)
            while self._go_on(opened, None, True):
                pass

    def _end(self, opened: Opened, how: str, error: BaseException | None) -> None:
        """The block is left: early, or by an exception."""
        self._step(lambda: self._close(opened, error), lambda: self.model.leave(opened.told, how))

    def _crash(self, opened: Opened) -> None:
        """The process is gone: its connections end, and nothing is said."""
        self._kill(opened)
        self.model.crash(opened.told)

    def _kill(self, opened: Opened) -> None:
        holding = opened.run._holding
        pid = opened.close_keeper()
        holding.drop()
        holding._held = None
        opened.context.gen.close()
        self.holders.remove(opened)
        if pid is not None:
            gone = "select not exists (select from pg_stat_activity where pid = %s)"
            protocol.until(lambda: self.world.control.execute(gone, [pid]).fetchone() == (True,), pause=0.001)

    def _cut_off(self, opened: Opened) -> None:
        """The server ends the connection of a run, which does not know it yet."""
        if not opened.told.cut and not opened.told.spoilt:
            self.world.terminate(opened.run._holding.connection().info.backend_pid)
            self.model.cut_off(opened.told)

    def _renew(self, opened: Opened) -> None:
        """The keeper renews the lease; one that is lost stops the work."""
        stop, _ = opened.keeper._renew()
        if stop is not None:
            opened.keeper.stopped = stop
        self.model.renew(opened.told)
        self._same(opened.told.is_lost, opened.keeper.stopped is Stop.LOST)

    # ── time, rows, people ──

    @rule(
        by=st.sampled_from([20 * SECOND, 61 * SECOND, 61 * SECOND, 4 * MINUTE, 16 * MINUTE, HOUR, 3 * HOUR]),
        suspended=st.sampled_from([False, False, True]),
    )
    def advance(self, by: timedelta, suspended: bool = False) -> None:
        """Time passes. `suspended`: the machine of all that are at work stands still, its clocks too."""
        self.model.move(by, suspended=suspended)
        self.world.set(self.model.now)

    @precondition(lambda self: self.kind.due == "rows")
    @rule(count=st.integers(1, 5), how=st.sampled_from(["at once", "at once", "slowly", "commit", "roll back"]))
    def add_rows(self, count: int, how: str = "at once") -> None:
        """A writer adds some; or leaves his transaction open; or one who has done so ends it."""
        if how in ("commit", "roll back"):
            if self.writers:
                serial, connection = self.writers.pop(count % len(self.writers))
                connection.execute("rollback" if how == "roll back" else how)
                connection.close()
                self.model.end_one(serial, commits=how == "commit")
            return
        connection = jobs.connect(self.world.url) if how == "slowly" else self.world.control
        if how == "slowly":
            connection.execute("begin")
        self.world.use_up_a_number()
        found = connection.execute(
            "insert into source (job) select %s from generate_series(1, %s) returning id", [self.label, count]
        ).fetchall()
        serial = self.model.open_one([key for (key,) in found])
        if how == "slowly":
            self.writers.append((serial, connection))
        else:
            self.model.end_one(serial, commits=True)

    @rule(
        what=st.sampled_from(
            ["release", "release", "pause", "pause 10m", "resume", "adopt", "rename", "deploy", "keep a copy",
             "put the copy back", "put the copy back", "status", "set the watermark"]
        ),
        where=st.integers(0, 9),
    )  # fmt: skip
    def operate(self, what: str, where: int = 0) -> None:
        """Somebody does this to the job."""
        {
            "release": self._release,
            "pause": lambda: self._pause(None),
            "pause 10m": lambda: self._pause("10m"),
            "resume": self._resume,
            "adopt": self._adopt,
            "rename": self._rename,
            "deploy": self._deploy,
            "keep a copy": self._keep_a_copy,
            "put the copy back": self._put_the_copy_back,
            "status": self._status_agrees,
            "set the watermark": lambda: self._set_the_watermark(where),
        }[what]()

    def _set_the_watermark(self, where: int) -> None:
        """An operator moves the watermark, forward or back."""
        model, position = self.model, None
        if self.kind.due == "rows":
            settled = model.places(None, model.horizon())
            if where % 3 == 0 or not settled:
                text = "beginning"
            elif where % 3 == 1:
                text, position = "end", settled[-1]
            else:
                position = settled[where % len(settled)]
                text = f"after:{position[1]}"
        else:
            position = MIDNIGHT + where % 5 * HOUR
            if self.kind.due == "elapsed":
                position += 7 * MINUTE
            text = position.isoformat()
        self._same(model.set_aside(1), self._gaffer("watermark", "set", self.name, text, "--yes"))
        if model.tables.lease is None:
            model.tables.position = position

    def _gaffer(self, *words: str) -> bool:
        """The command. False: it was refused."""
        done = CliRunner().invoke(command, list(words), env={"GAFFER_DATABASE_URL": self.world.url})
        assert done.exit_code in (0, 1), done.output
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        return done.exit_code == 0

    def _pause(self, until: str | None) -> None:
        assert self._gaffer("pause", self.name, *(() if until is None else ("--until", until)))
        self.model.stop(None if until is None else self.model.now + 10 * MINUTE)

    def _resume(self) -> None:
        assert self._gaffer("resume", self.name)
        self.model.resume()

    def _release(self) -> None:
        assert self._gaffer("release", self.name, "--yes")
        self.model.release()

    def _adopt(self) -> None:
        self._same(self.model.set_aside(GAP), self._gaffer("watermark", "adopt", self.name, "--yes"))

    def _rename(self) -> None:
        self.renamed += 1
        name = f"{self.label}.{self.renamed}"
        told = self.model.rename(name)
        self._same(told, self._gaffer("rename", self.name, name, "--yes"))
        if told:
            self.name = name

    def _deploy(self) -> None:
        """The job's code is changed; its next run makes that known."""
        self.version = min(self.version + 1, len(self.versions) - 1)

    def _keep_a_copy(self) -> None:
        self.kept = copy.deepcopy(self.model.tables), self.world.copy(self.name, self.label)

    def _put_the_copy_back(self) -> None:
        """The database is restored to what it was, while runs are at work that do not know it."""
        if self.kept is not None:
            tables, rows = self.kept
            self.world.put_back(self.name, self.label, rows)
            self.model.tables = copy.deepcopy(tables)
            self.name = tables.name

    # ── what must be so after each step ──

    @invariant()
    def the_tables_say_what_the_model_says(self) -> None:
        if not self.patches:
            return
        tables = self.model.tables
        cursor = psycopg.ClientCursor(self.world.control)
        cursor.execute(_STATE, {"job": self.name, "label": self.label})
        [state] = cursor.fetchall()
        cursor.nextset()
        runs = cursor.fetchall()
        cursor.nextset()
        applied = cursor.fetchall()
        self._same(sorted(tables.applied), applied)
        told = (
            tables.name,
            len(tables.failed_ticks),
            tables.covered_until,
            tables.skipped_until,
            tables.last_success_at,
            tables.capped,
            tables.leases_lost,
            tables.follow_up_at,
            tables.is_paused,
            tables.fence,
            tables.lease is not None,
            tables.lease_until if tables.lease is not None else None,
            _stored(tables.position),
        )
        self._same(told, (*state[:-1], _read(state[-1])))
        expected = [
            (
                row.id, row.trigger, row.tick, str(row.outcome), row.fence, row.batches, row.items, row.backlog,
                row.covered_until, row.ticks_covered, row.deadline_at,
            )
            for _, row in sorted(tables.runs.items())
        ]  # fmt: skip
        self._same(expected, runs)

    def teardown(self) -> None:
        for opened in list(self.holders):
            self._kill(opened)
        for _, connection in self.writers:
            connection.close()
        for patch in self.patches:
            patch.stop()
        self.world.clean()

    def _status_agrees(self) -> None:
        """`gaffer status --json` says the same."""
        done = CliRunner().invoke(command, ["status", self.name, "--json"], env={"GAFFER_DATABASE_URL": self.world.url})
        said, tables = json.loads(done.stdout), self.model.tables
        worked = [row for row in tables.runs.values() if not row.outcome.did_not_work and row.trigger != "redo"]
        last = max(worked, key=lambda row: row.id, default=None)
        told = {
            "consecutive_failures": len(tables.failed_ticks),
            "fence": tables.fence,
            "last_outcome": None if last is None else str(last.outcome),
            "backlog": None if last is None else last.backlog,
            "covered_until": None if tables.covered_until is None else tables.covered_until.isoformat(),
            "lease_until": tables.lease_until.isoformat() if tables.lease is not None else None,
        }
        self._same(told, {name: said[name] for name in told})


def _stored(position: Any) -> Any:
    return str(position[1]) if isinstance(position, tuple) else position


def _read(position: Any) -> Any:
    if position is None:
        return None
    return position["key"] if "key" in position else datetime.fromisoformat(position["until"])


# ── how it is run ────────────────────────────────────────────────────────────────────────────────────────────────────


def told(url: str, steps: Sequence[Callable[[Machine], Any]], **job: Any) -> None:
    """One example whose steps are given. Raises where the product does not do what the model says."""
    world = World(url)

    class Told(Machine):
        pass

    Told.world = world
    machine = Told()
    try:
        machine.define(**job)
        for step in steps:
            step(machine)
            machine.the_tables_say_what_the_model_says()
    finally:
        machine.teardown()
        world.close()


def live(url: str, number: int, examples: int, steps: int, *, shrinks: bool = True) -> int:
    """So many examples of at most so many steps; how many there were. Raises what the first one that fails raises,
    which Hypothesis has made as short as it can, and prints as steps."""
    world = World(url)

    @seed(number)
    class Seeded(Machine):
        pass

    Seeded.world = world
    phases = [Phase.generate, Phase.shrink] if shrinks else [Phase.generate]
    try:
        run_state_machine_as_test(
            Seeded,
            settings=settings(
                max_examples=examples,
                stateful_step_count=steps,
                phases=phases,
                deadline=None,
                database=None,
                print_blob=False,
                report_multiple_bugs=False,
                suppress_health_check=list(HealthCheck),
            ),
        )
    finally:
        world.close()
    print(f"{world.examples} examples, in which runs answered: {dict(world.answers.most_common())}")
    return world.examples


def main() -> None:
    parser = argparse.ArgumentParser(prog="./dev machine", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1, 1_000_000))
    parser.add_argument("--examples", type=int, default=5_000)
    parser.add_argument("--steps", type=int, default=40)
    given = parser.parse_args()
    logging.disable()
    print(f"seed {given.seed}, {given.examples} examples of at most {given.steps} steps", flush=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        server(Path(folder)) as at,
        Databases(at) as made,
        made.scratch() as url,
    ):
        live(url, given.seed, given.examples, given.steps)


if __name__ == "__main__":
    main()
