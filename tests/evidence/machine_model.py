"""What must come of any calls: the pure model of `machine.py`.

Told by the promises (the fence, the watermark that moves with the batch's own writes, the table of outcomes and of what
they do to ticks and to the streak) and by nothing of the SQL.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any

from gaffer_dagster.domain.lease import LARGEST_SKEW, LEASE
from gaffer_dagster.domain.run import Outcome

MIDNIGHT = datetime(2027, 3, 1, tzinfo=timezone.utc)
SECOND, MINUTE, HOUR = timedelta(seconds=1), timedelta(minutes=1), timedelta(hours=1)
TIMEOUT = 15 * MINUTE
GONE = 4 * SECOND  # how long after its connection was seen to be gone a holder may come back
GAP = 1_000_000  # by how much an adopted fence goes ahead
MOST_ATTEMPTS = 5


# ── what is stored ────────────────────────────────────────────────────────────────────────────────────────────────────


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
            return Page([said(holder.redo)], holder.position, 1, self.mono)
        if kind.due == "rows":
            places = self.places(holder.position, holder.horizon)[:2]
            return Page([str(key) for _, key in places], places[-1], len(places), self.mono) if places else None
        windows = self._windows(holder)
        if not windows:
            return None
        since, until = windows[0]
        if until + SECOND > self.now:  # waits until it is settled
            self.move(until + SECOND - self.now)
        return Page([said(since)], until, 1, self.mono)

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
            if tables.lease == holder.lease:  # it ran out, and then the job was renamed
                tables.lease = tables.gone_at = None
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


def said(at: datetime) -> str:
    return at.isoformat()


def _ended(pause: Pause, at: datetime) -> Pause:
    return Pause(pause.since, at if pause.until is None else min(pause.until, at))
