"""A job's life in moved time: when it would have run, what became of each tick, and which alerts it would have raised.

What is given is when Dagster's daemon and the database are away, how long runs take, and how they end. Which tick is
one, what became of it, and what is an incident is asked of the product itself: `Schedule`, `ledger`, `findings`,
`judge`. What runs do to the job's row between two looks is kept by `_Row`, which does what the functions of the store
do (0002_protocol.sql, 0003_operation.sql, 0006_learnt.sql); the tests hold it against them.

The daemon wakes the job at each tick; the ticks of an outage are met by one wake-up, at its end. Dagster's sensor looks
each `every`: it judges, and then asks for a run where one is wanted. At one instant a run ends before another begins,
and the sensor looks last. A run that was met by a wake-up looks again at its end, for which it needs no time. A run at
work when the database goes away is lost, as one that dies; one that is woken meanwhile fails at once, and is learnt of
when the sensor looks again. How much is due is not simulated, so that no run stops at its bounds but for its timeout.
"""

from __future__ import annotations

import heapq
import random
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from itertools import groupby, pairwise
from operator import itemgetter
from uuid import UUID

from gaffer_dagster.domain.duration import as_duration
from gaffer_dagster.domain.incident import Alert, Step, Stretch, Verb, Watched, findings, judge, unseen
from gaffer_dagster.domain.lease import LEASE, RENEW_EVERY
from gaffer_dagster.domain.ledger import History, Pause, Period, Reach, Tick, ledger, tick_from
from gaffer_dagster.domain.moment import as_moment
from gaffer_dagster.domain.run import Outcome
from gaffer_dagster.domain.schedule import Schedule
from gaffer_dagster.domain.spec import JobSpec
from gaffer_dagster.errors import BadInputError, BadSpecError

_INSTANT = timedelta(microseconds=1)
_MOST = 100  # of the times that the job's row keeps
_OUTAGE = timedelta(minutes=5)  # as learn_run has it
MOST_LOOKS = 50_000
"""At which something is wrong: where each run dies and is followed at once, more of the same says nothing new."""

_Event = tuple[datetime, int, Callable[[datetime], None]]
_WHEN = itemgetter(0, 1)


@dataclass(frozen=True)
class Scenario:
    """What is simulated, from `since`, when the job is made known, to `until`.

    `takes`: how long a run takes, at least and at most. `fails`, `dies`: the chance of a run to fail, and to be killed
    on its way. `failing`: whatever begins in it fails. `down`: Dagster's daemon is away; `database_down`: the database.
    `paused`: the job. `every`: how often the sensor looks. Stretches are in order, and none of a kind overlaps another.
    """

    spec: JobSpec
    since: datetime
    until: datetime
    takes: tuple[timedelta, timedelta]
    fails: float = 0.0
    dies: float = 0.0
    failing: Sequence[Stretch] = ()
    down: Sequence[Stretch] = ()
    database_down: Sequence[Stretch] = ()
    paused: Sequence[Pause] = ()
    every: timedelta = timedelta(seconds=30)

    def __post_init__(self) -> None:
        _ = self.schedule
        for pause in self.paused:
            if _stretch_at(self.database_down, pause.since) is not None:
                raise BadInputError(
                    f"paused from {pause.since.isoformat()} on: the database is away then, and nobody can pause a job; "
                    "let the pause begin before or after"
                )

    @property
    def schedule(self) -> Schedule:
        """Raises `BadInputError` where the job has none."""
        if self.spec.schedule is None:
            raise BadInputError(f"job {self.spec.name!r} has no schedule: it never runs by itself; name another job")
        return self.spec.schedule


@dataclass(frozen=True)
class SimulatedRun:
    """One attempt. `trigger`: `schedule`, or `sensor` where it followed up another. `outcome`: `running` where it was
    at work in the end, or dead and not yet found; None where the database was away, and was not told of it. `met`: the
    number of the run that held the lease, where it was `busy`. `learnt_at`: when the database was told."""

    number: int
    trigger: str
    tick: datetime
    started_at: datetime
    ended_at: datetime | None
    outcome: Outcome | None
    met: int | None = None
    learnt_at: datetime | None = None


@dataclass(frozen=True)
class Simulation:
    """What came of a scenario, which ends before its time where too much goes wrong."""

    scenario: Scenario
    runs: Sequence[SimulatedRun]
    incidents: Sequence[Alert]
    history: History

    def ticks(self) -> Iterator[Tick]:
        """Every tick, and what has become of it in the end."""
        given = self.scenario
        grace = given.spec.alerts.grace_for(given.schedule)
        return ledger(self.history, given.since, given.until, now=given.until, grace=grace)


def simulate(scenario: Scenario, rng: random.Random) -> Simulation:
    """Lives through it; `rng` decides how long runs take, and which fail and die."""
    life = _Life(scenario, rng)
    life.live()
    return Simulation(life.given, life.runs, life.incidents, replace(life.row.history, reaches=life.reaches))


# ── the job's row and lease ──────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class _Holder:
    """The run that has the lease. At `lives_until` it ends, or is killed (`ends` is then `abandoned`)."""

    number: int
    tick: datetime
    started_at: datetime
    wanted_at: datetime | None
    lives_until: datetime
    ends: Outcome

    @property
    def ends_at(self) -> datetime | None:
        return None if self.ends is Outcome.ABANDONED else self.lives_until

    @property
    def lease_until(self) -> datetime:
        """Of a run that is killed, as it has renewed it last; of another, later than it ends."""
        lived = self.lives_until - self.started_at
        return self.started_at + (lived // RENEW_EVERY * RENEW_EVERY if self.ends_at is None else lived) + LEASE


class _Row:
    """As `gaffer.job` and `gaffer.job_lease` have it; a method does what the function of its name does there."""

    def __init__(self, spec: JobSpec, schedule: Schedule, at: datetime, ticks: Sequence[datetime]) -> None:
        self._spec, self._stored, self._schedule, self._ticks = spec, spec.as_json(), schedule, ticks
        self._grace = spec.alerts.grace_for(schedule)
        self._pauses: list[Pause] = []
        self.history = History([Period(at, schedule)], self._pauses)
        self.first_seen_at = at
        self.covered_until: datetime | None = None
        self.skipped_until: datetime | None = None
        self.wanted_at: datetime | None = None
        self.follow_up_at: datetime | None = None
        self.next_due_at: datetime | None = ticks[0]
        self.late_tick: datetime | None = None
        self.paused: Pause | None = None
        self.paused_before: list[Stretch] = []
        self.worked: list[Stretch] = []
        self.last_success_at: datetime | None = None
        self.consecutive_failures = 0
        self.failed_ticks: list[datetime] = []
        self.failed_at: list[datetime] = []
        self.taken_over_at: list[datetime] = []
        self.faults = 0  # failures and take-overs that were counted
        self.holder: _Holder | None = None

    def watched(self) -> Watched:
        pause, holder = self.paused, self.holder
        watched = Watched(
            job=self._spec.name,
            row="",
            spec=self._stored,
            grace=self._grace,
            first_seen_at=self.first_seen_at,
            rules_at=self.first_seen_at,
            paused_at=None if pause is None else pause.since,
            paused_until=None if pause is None else pause.until,
            next_due_at=self.next_due_at,
            late_tick=self.late_tick,
            paused=self.paused_before,
            worked=self.worked,
            at_work_since=None if holder is None else holder.started_at,
            held_until=None if holder is None else holder.lease_until,
            last_success_at=self.last_success_at,
            consecutive_failures=self.consecutive_failures,
            failed_at=self.failed_at,
            taken_over_at=self.taken_over_at,
        )
        # To read these from the stored text at each look would take nearly all the time.
        vars(watched).update(schedule=self._schedule, alerts=self._spec.alerts)
        return watched

    def acquire(self, at: datetime, tick: datetime, max_late: timedelta | None) -> Outcome:
        """`running`: the lease is free, and to be taken."""
        if self.paused is not None and self.paused.holds(at):
            following = self._schedule.next(at)
            if self.next_due_at is not None and self.paused.since <= self.next_due_at < following:
                self._wait_for(self.late_tick, following)
            return Outcome.PAUSED
        if self.holder is not None and self.holder.lease_until > at:
            self.wanted_at = at
            return Outcome.BUSY
        if max_late is not None and at > tick + max_late and tick > (self.covered_until or self.first_seen_at):
            self.skipped_until = tick
            if self.next_due_at is not None and self.next_due_at <= tick:
                self._wait_for(self.late_tick or self.next_due_at, self._schedule.next(at))
            return Outcome.LATE
        return Outcome.RUNNING

    def take(self, holder: _Holder) -> _Holder | None:
        """Returns the run that was found dead."""
        dead, at = self.holder, holder.started_at
        self.follow_up_at = None
        if dead is not None:
            self._note_work(dead.started_at, min(at, dead.lease_until))
            self._count_failure(dead.tick, at)
            self.faults += 1
            self.taken_over_at = [*self.taken_over_at, at][-_MOST:]
        self.holder = holder
        return dead

    def end_run(self, holder: _Holder, at: datetime) -> datetime | None:
        """Up to when ticks are covered."""
        covered: datetime | None = None
        if holder.ends is Outcome.SUCCEEDED:
            # One that was met by a wake-up has just looked again.
            covered = holder.started_at if self.wanted_at == holder.wanted_at else at
            holder.wanted_at = self.wanted_at
            self.consecutive_failures, self.failed_ticks, self.failed_at = 0, [], []
            self.last_success_at = at
            if self.covered_until is None or covered > self.covered_until:
                self.covered_until = covered
                following = self._next(covered, at)
                if self._is_skipped(following):
                    self._wait_for(following, self.next_due_at)
                else:
                    self._wait_for(None, following)
        else:
            self._count_failure(holder.tick, at)
        self._note_work(holder.started_at, at)
        self.follow_up_at = None if self.wanted_at == holder.wanted_at else at
        self.holder = None
        return covered

    def pause(self, until: datetime | None, at: datetime) -> None:
        if self.paused is not None:
            since, over_at = self.paused.since, min(at, self.paused.until or at)
            tick, following = self._waited_for, tick_from(over_at, self._schedule)
            if tick is not None and tick < over_at:
                self.paused_before = [*self.paused_before, Stretch(since, over_at)][-_MOST:]
            late_tick, next_due_at = self.late_tick, self.next_due_at
            if late_tick is not None and since <= late_tick < over_at:
                late_tick = following if self._is_skipped(following) else None
            if next_due_at is not None and since <= next_due_at < over_at:
                next_due_at = following
            self._wait_for(late_tick, next_due_at)
        self.paused = Pause(at, until)
        self._pauses.append(self.paused)

    def learn_run(self, run: SimulatedRun, at: datetime, looked_at: datetime, gaps: Sequence[Stretch]) -> None:
        """`looked_at`: the last pass."""
        ended_at = run.started_at
        if self.last_success_at is not None and ended_at <= self.last_success_at:
            return
        if self.paused is not None and self.paused.holds(run.started_at):
            return
        gap = _stretch_at([gap for gap in gaps if gap.until > gap.since + _OUTAGE], ended_at)
        if gap is not None or (looked_at <= ended_at and looked_at < at - _OUTAGE):
            if self.next_due_at is not None and self.next_due_at <= at:
                self.follow_up_at = self.follow_up_at or at
            return
        self._count_failure(run.tick, ended_at)
        self.failed_at.sort()

    @property
    def grace_until(self) -> datetime | None:
        """No sooner is the tick that is waited for missed."""
        return None if self._waited_for is None else self._waited_for + self._grace

    @property
    def _waited_for(self) -> datetime | None:
        return self.late_tick or self.next_due_at

    def _is_skipped(self, tick: datetime | None) -> bool:
        return tick is not None and self.skipped_until is not None and tick <= self.skipped_until

    @property
    def wanted_since(self) -> datetime | None:
        """From when on a run is wanted without waiting for a tick, if nothing else happens."""
        since = self.follow_up_at if self.holder is None else self.holder.lease_until
        if since is None or self.paused is None:
            return since
        return None if self.paused.until is None else max(since, self.paused.until)

    def _next(self, after: datetime, now: datetime) -> datetime | None:
        tick = self._ticks[bisect_right(self._ticks, after)]
        # A tenth of the time that the history takes, which is asked only where a pause may skip the tick.
        return self.history.next(after, now) if any(pause.holds(tick) for pause in self._pauses) else tick

    def _wait_for(self, late_tick: datetime | None, next_due_at: datetime | None) -> None:
        before, tick = self._waited_for, late_tick or next_due_at
        self.late_tick, self.next_due_at = late_tick, next_due_at
        if tick != before:
            self.paused_before, self.worked = _later(self.paused_before, tick), _later(self.worked, tick)

    def _note_work(self, since: datetime, until: datetime) -> None:
        if self._waited_for is not None and self._waited_for < until and since < until:
            self.worked = [*self.worked, Stretch(since, until)][-_MOST:]

    def _count_failure(self, tick: datetime, at: datetime) -> None:
        if tick not in self.failed_ticks:
            self.faults += 1
            self.consecutive_failures += 1
            self.failed_ticks = [*self.failed_ticks, tick][-_MOST:]
            self.failed_at = [*self.failed_at, at][:_MOST]


# ── what happens to it ───────────────────────────────────────────────────────────────────────────────────────────────


class _Life:
    def __init__(self, scenario: Scenario, rng: random.Random) -> None:
        schedule = scenario.schedule
        self._ticks = [*schedule.ticks(scenario.since, scenario.until), schedule.next(scenario.until)]
        self.row = _Row(scenario.spec, schedule, scenario.since, self._ticks)
        self.runs: list[SimulatedRun] = []
        self.reaches: list[Reach] = []
        self.incidents: list[Alert] = []
        self.given, self._rng = scenario, rng
        self._looks = 0  # at which something was wrong
        self._open: list[int] = []  # which of the incidents
        self._gaps: list[Stretch] = []
        self._unwritten: list[SimulatedRun] = []  # that the database does not know of
        self._blind = sorted([*scenario.down, *scenario.database_down], key=lambda stretch: stretch.since)
        self._faults = 0  # that the newest pass knew of
        self._looked_at: datetime | None = None
        self._looks_from = scenario.since  # passes from here on are to come

    def live(self) -> None:
        """Everything in order; what happens at one instant, in the order of the numbers."""
        given, row = self.given, self.row
        planned: Iterator[_Event] = heapq.merge(
            [(stretch.since, 1, self._lose) for stretch in given.database_down],
            [(max(pause.since, given.since), 2, partial(row.pause, pause.until)) for pause in given.paused],
            ((at, 3, partial(self._wake, "schedule", tick)) for at, tick in self._wake_ups()),
            key=_WHEN,
        )
        coming = next(planned, None)
        while True:
            events: list[_Event] = [] if coming is None else [coming]
            if row.holder is not None and row.holder.ends_at is not None:
                events.append((row.holder.ends_at, 0, partial(self._end, row.holder)))
            if row.wanted_since is not None:
                at = self._pass_from(max(row.wanted_since, self._looks_from))
                events.append((at, 5, self._follow_up))
            if self._unwritten:
                events.append((self._pass_from(self._looks_from), 4, self._learn))
            event = min(events, key=_WHEN, default=None)
            if event is None or event[0] > given.until:
                break
            at, order, happen = event
            if self._looks > MOST_LOOKS:
                self.given = given = replace(given, until=at)
                break
            # The sensor learns, judges, and then asks for a run.
            self._look(at + _INSTANT if order == 5 else at)
            happen(at)
            if event is coming:
                coming = next(planned, None)
        self._look(given.until + _INSTANT)

    def _wake_ups(self) -> Iterator[tuple[datetime, datetime]]:
        """When the daemon wakes the job, and the newest tick then."""
        for at, met in groupby(self._ticks, partial(_after, self.given.down)):
            *_, newest = met
            yield at, newest

    def _follow_up(self, at: datetime) -> None:
        self._wake("sensor", self.given.schedule.latest(at) or at, at)

    def _wake(self, trigger: str, tick: datetime, at: datetime) -> None:
        given, row = self.given, self.row
        run = SimulatedRun(len(self.runs) + 1, trigger, tick, at, at, None)
        self.runs.append(run)
        if _stretch_at(given.database_down, at) is not None:
            self._unwritten.append(run)
            return
        outcome = row.acquire(at, tick, given.spec.tolerance if trigger == "schedule" else None)
        if outcome is not Outcome.RUNNING:
            met = row.holder.number if row.holder is not None and outcome is Outcome.BUSY else None
            self.runs[-1] = replace(run, outcome=outcome, met=met)
            if outcome is Outcome.LATE:
                self.reaches.append(Reach(run.number, outcome, at, tick))
            return
        self.runs[-1] = replace(run, outcome=outcome, ended_at=None)
        lives, ends = self._fate(at)
        holder = _Holder(
            number=run.number,
            tick=tick,
            started_at=at,
            wanted_at=row.wanted_at,
            lives_until=at + lives,
            ends=ends,
        )
        dead = row.take(holder)
        if dead is not None:
            self._note_end(dead, at, Outcome.ABANDONED)

    def _learn(self, at: datetime) -> None:
        for run in self._unwritten:
            if self._looked_at is not None:  # else it ended before the watch was there
                self.row.learn_run(run, at, self._looked_at, self._gaps)
                self.runs[run.number - 1] = replace(run, outcome=Outcome.FAILED, learnt_at=at)
        self._unwritten.clear()

    def _fate(self, at: datetime) -> tuple[timedelta, Outcome]:
        """How long a run lives, and how it ends. The same numbers are drawn for each run, so that another chance of one
        thing leaves the others as they are."""
        given = self.given
        length, failure, death, when = (self._rng.random() for _ in range(4))
        least, most = given.takes
        takes, timeout = least + (most - least) * length, given.spec.limits.timeout
        if death < given.dies:
            return min(takes, timeout) * when, Outcome.ABANDONED
        if takes > timeout:
            return timeout, Outcome.TIMED_OUT
        fails = failure < given.fails or _stretch_at(given.failing, at) is not None
        return takes, Outcome.FAILED if fails else Outcome.SUCCEEDED

    def _end(self, holder: _Holder, at: datetime) -> None:
        covered = self.row.end_run(holder, at)
        self._note_end(holder, at, holder.ends)
        if covered is not None:
            self.reaches.append(Reach(holder.number, holder.ends, holder.started_at, covered))

    def _lose(self, at: datetime) -> None:
        """The database goes away."""
        holder = self.row.holder
        if holder is not None and holder.lives_until > at:
            holder.lives_until, holder.ends = at, Outcome.ABANDONED

    def _note_end(self, holder: _Holder, at: datetime, outcome: Outcome) -> None:
        number = holder.number - 1
        self.runs[number] = replace(self.runs[number], ended_at=at, outcome=outcome)

    # ── the watch ────────────────────────────────────────────────────────────────────────────────────────────────

    def _look(self, before: datetime) -> None:
        """The passes from the last one to `before`. What the first of them finds may pass by itself (so many within a
        day). What it does not find becomes true later, if at all, and then stays so, as long as nothing else happens:
        so the first that has something to note is found by halving."""
        every = self.given.every
        while self._looks_from < before and (first := self._pass_from(self._looks_from)) < before:
            if self._looked_at is not None and self._looked_at < first - unseen(every):
                self._gaps.append(Stretch(self._looked_at, first))
            end = min([before, *(stretch.since for stretch in self._blind if stretch.since > first)])
            last = -((first - end) // every) - 1
            steps: list[Step] = []
            if not self._is_quiet(first + last * every):
                self._looks += 1
                notes = partial(self._notes, self.row.watched(), first)
                if notes(0):
                    last = 0
                elif notes(last):
                    last = bisect_left(range(last), True, key=lambda number: bool(notes(number)))
                steps = notes(last)
            self._faults = self.row.faults
            self._looked_at = first + last * every
            self._looks_from = self._looked_at + every
            for step in steps:
                self._note(step, self._looked_at)

    def _is_quiet(self, at: datetime) -> bool:
        """Nothing is wrong, nor has anything happened that could be: so that a year has not to be judged run by run."""
        row = self.row
        is_new = row.faults != self._faults or (row.paused is not None and row.paused.until is None)
        return not is_new and not self._open and row.grace_until is not None and at < row.grace_until

    def _pass_from(self, at: datetime) -> datetime:
        """The first pass at `at` or later."""
        since, every = self.given.since, self.given.every
        while True:
            at = since - (since - at) // every * every
            seeing = _after(self._blind, at)
            if seeing == at:
                return at
            at = seeing

    def _notes(self, watched: Watched, first: datetime, number: int) -> list[Step]:
        """What is to be noted so many passes after the first one."""
        at = first + number * self.given.every
        opened = [self.incidents[number] for number in self._open]
        return list(judge(findings(watched, at, self._gaps), opened, {watched.job: watched}, at))

    def _note(self, step: Step, at: datetime) -> None:
        if step.alert is None:
            number = len(self.incidents)
            self._open.append(number)
            self.incidents.append(
                Alert(
                    id=number,
                    key=UUID(int=number),
                    job=step.job,
                    watch=step.watch,
                    kind=step.kind,
                    severity=step.kind.severity,
                    since_at=step.since,
                    opened_at=at,
                    details=step.details,
                    reminders=0,
                    reminded_at=None,
                    acked_at=None,
                    acked_by=None,
                    ack_reason=None,
                    resolved_at=None,
                )
            )
            return
        alert = replace(self.incidents[step.alert], details=step.details)
        if step.verb is Verb.REMIND:
            alert = replace(alert, reminders=alert.reminders + 1, reminded_at=at)
        elif step.verb is Verb.RESOLVE:
            alert = replace(alert, resolved_at=at)
            self._open.remove(step.alert)
        self.incidents[step.alert] = alert


def _later(stretches: Sequence[Stretch], tick: datetime | None) -> list[Stretch]:
    return [each for each in stretches if tick is not None and each.until > tick]


def _stretch_at(stretches: Sequence[Stretch], at: datetime) -> Stretch | None:
    return next((stretch for stretch in stretches if stretch.since <= at < stretch.until), None)


def _after(stretches: Sequence[Stretch], at: datetime) -> datetime:
    """The first instant at `at` or later that is in none of them."""
    while (stretch := _stretch_at(stretches, at)) is not None:
        at = stretch.until
    return at


# ── as people write it ───────────────────────────────────────────────────────────────────────────────────────────────


def as_chance(text: str, field: str) -> float:
    """`"5%"` is 0.05. Raises `BadInputError`."""
    number, percent, rest = text.strip().partition("%")
    try:
        chance = float(number) / 100 if percent and not rest else -1.0
    except ValueError:
        chance = -1.0
    if not 0 <= chance <= 1:
        raise BadInputError(f"{field} {text!r} is no chance; write a percentage from 0% to 100%, such as 5%")
    return chance


def as_lengths(text: str, field: str) -> tuple[timedelta, timedelta]:
    """`"20m"`, or from least to most: `"5m..50m"`. Raises `BadSpecError`, or `BadInputError`."""
    least, dots, most = text.partition("..")
    first = as_duration(least, field)
    last = as_duration(most, field) if dots else first
    if last < first:
        raise BadInputError(f"{field} {text!r} is the wrong way round; write the shorter one first: {most}..{least}")
    return first, last


def as_stretches(texts: Iterable[str], field: str, zone: str, within: Stretch) -> list[Stretch]:
    """Each `SINCE/UNTIL`, UNTIL a time or how long; in order. Raises `BadInputError`."""
    found: list[Stretch] = []
    for text, pause in _in_order(texts, field, zone, within):
        if pause.until is None:
            raise BadInputError(f"{field} {text!r} has no end; write SINCE/UNTIL, such as {text}6h")
        found.append(Stretch(pause.since, pause.until))
    return found


def as_pauses(texts: Iterable[str], field: str, zone: str, within: Stretch) -> list[Pause]:
    """The same; where UNTIL is left out (`SINCE/`) a pause has no end."""
    return [pause for _, pause in _in_order(texts, field, zone, within)]


def _in_order(texts: Iterable[str], field: str, zone: str, within: Stretch) -> list[tuple[str, Pause]]:
    found = sorted(((text, _between(text, field, zone, within)) for text in texts), key=lambda pair: pair[1].since)
    for (earlier, first), (later, second) in pairwise(found):
        if first.until is None or second.since < first.until:
            raise BadInputError(f"{field} {earlier!r} and {field} {later!r} overlap; write one stretch for both")
    return found


def _between(text: str, field: str, zone: str, within: Stretch) -> Pause:
    start, slash, end = text.partition("/")
    if not slash:
        raise BadInputError(f"{field} {text!r} is no stretch; write SINCE/UNTIL, such as 2027-03-01T06:00/6h")
    since = as_moment(start, field, zone)
    until = _until(since, end.strip(), field, zone)
    if until is not None and until <= since:
        raise BadInputError(f"{field} {text!r} ends before it begins; write the earlier time first")
    if since >= within.until or (until is not None and until <= within.since):
        raise BadInputError(
            f"{field} {text!r} is outside of what is simulated, {within.since.isoformat()} to "
            f"{within.until.isoformat()}; give a time within, or another --since and --until"
        )
    return Pause(since, until)


def _until(since: datetime, text: str, field: str, zone: str) -> datetime | None:
    if not text:
        return None
    try:
        return since + as_duration(text, field, timedelta.max)
    except BadSpecError:
        return as_moment(text, field, zone)
