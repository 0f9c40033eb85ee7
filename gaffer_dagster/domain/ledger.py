"""The ledger of ticks: what became of each tick that a job's schedules named.

Nothing is written for a tick. What became of it follows from three histories that are: which schedule the job went by
and since when, when it was paused, and how far each run covered. So a tick that nobody noticed is in the ledger too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from enum import Enum
from itertools import pairwise

from gaffer_dagster.domain.lease import LARGEST_SKEW
from gaffer_dagster.domain.run import Outcome
from gaffer_dagster.domain.schedule import Schedule


class Disposition(str, Enum):
    """What became of a tick; each has exactly one."""

    COVERED = "covered"
    """A run that began within the job's grace did what was due."""
    COVERED_LATE = "covered_late"
    """A run that began later did it."""
    PAUSED = "paused"
    """Skipped: the job was paused."""
    LATE = "late"
    """Skipped: found later than `max_late` allows."""
    MISSED = "missed"
    """Past and still due: no run has covered it yet."""
    FUTURE = "future"
    """Not yet."""

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Period:
    """In `(since, until]` the job went by this schedule (None: by none); no `until`: to the start of the next one, if
    there is one. Where two overlap, two code versions alternated, and the ticks of both count."""

    since: datetime
    schedule: Schedule | None
    until: datetime | None = None


@dataclass(frozen=True)
class Pause:
    """`[since, until)`; no `until`: it goes on. No two of a job overlap: a later one ends the one before."""

    since: datetime
    until: datetime | None

    def holds(self, at: datetime) -> bool:
        return self.since <= at and (self.until is None or at < self.until)


@dataclass(frozen=True)
class Reach:
    """A run that covered the ticks up to `until` that were open by then, or (outcome `late`) skipped them."""

    run_id: int
    outcome: Outcome
    started_at: datetime
    until: datetime


@dataclass(frozen=True)
class History:
    """Of one job. Each list in the order in which it happened."""

    periods: Sequence[Period]
    pauses: Sequence[Pause]
    reaches: Sequence[Reach] = ()

    def ticks(self, after: datetime, until: datetime) -> Iterator[datetime]:
        """The ticks in `(after, until]`, each by the schedule that was in force."""
        for schedules, since, end in self._spans(after, until):
            yield from _ticks(schedules, since, end)

    def count(self, after: datetime, until: datetime, *, started_at: datetime) -> int:
        """How many ticks in `(after, until]` a run that began at `started_at` covers: those that no pause skipped, and
        those of the pause that it worked despite. At a cost for each day in between, not for each tick."""
        total = 0
        for schedules, since, end in self._spans(after, until):
            total += _count(schedules, since, end)
            for pause in self.pauses:
                # A pause takes in the tick at its very start, and leaves out the one at its end.
                first = max(since, pause.since - _INSTANT)
                last = end if pause.until is None else min(end, pause.until - _INSTANT)
                if first < last and not pause.holds(started_at):
                    total -= _count(schedules, first, last)
        return total

    def next(self, after: datetime, now: datetime) -> datetime | None:
        """The first tick later than `after` that was not skipped by a pause which is over at `now`. None: the job goes
        by no schedule any more."""
        for schedules, since, end in self._spans(after, _END):
            tick = min(schedule.next(since) for schedule in schedules)
            while tick <= end:
                pause = next((pause for pause in self.pauses if pause.holds(tick)), None)
                if pause is None or pause.until is None or pause.until > now:
                    return tick
                tick = min(tick_from(pause.until, schedule) for schedule in schedules)
        return None

    def _spans(self, after: datetime, until: datetime) -> Iterator[tuple[tuple[Schedule, ...], datetime, datetime]]:
        """The stretches of `(after, until]` and the schedules in force in each; without those that have none."""
        following = [*(period.since for period in self.periods[1:]), _END]
        ends = [period.until or end for period, end in zip(self.periods, following, strict=True)]
        bounds = {after, until, *(period.since for period in self.periods), *ends}
        for begin, finish in pairwise(sorted(bound for bound in bounds if after <= bound <= until)):
            both = zip(self.periods, ends, strict=True)
            schedules = [each.schedule for each, end in both if each.since <= begin and finish <= end]
            found = tuple({schedule: None for schedule in schedules if schedule is not None})
            if found:
                yield found, begin, finish


def _ticks(schedules: tuple[Schedule, ...], after: datetime, until: datetime) -> Iterator[datetime]:
    if len(schedules) == 1:
        return schedules[0].ticks(after, until)
    return iter(sorted({tick for schedule in schedules for tick in schedule.ticks(after, until)}))


def _count(schedules: tuple[Schedule, ...], after: datetime, until: datetime) -> int:
    if len(schedules) == 1:
        return schedules[0].count(after, until)
    return sum(1 for _ in _ticks(schedules, after, until))


@dataclass(frozen=True)
class Tick:
    """One tick and what became of it. `late_by`: from the tick to the start of the run that covered it."""

    at: datetime
    disposition: Disposition
    run_id: int | None = None
    late_by: timedelta | None = None


_INSTANT = timedelta(microseconds=1)
_END = datetime(9000, 1, 1, tzinfo=timezone.utc)


def ledger(history: History, after: datetime, until: datetime, *, now: datetime, grace: timedelta) -> Iterator[Tick]:
    """Every tick in `(after, until]` with what became of it, as things stand at `now`."""
    # One that lies in the future was dated by a clock that ran ahead for a while.
    reaches = iter([reach for reach in history.reaches if reach.until <= now + LARGEST_SKEW])
    reach = next(reaches, None)
    for tick in history.ticks(after, until):
        while reach is not None and reach.until < tick:
            reach = next(reaches, None)
        yield _dispose(tick, reach, history.pauses, now, grace)


def _dispose(tick: datetime, reach: Reach | None, pauses: Sequence[Pause], now: datetime, grace: timedelta) -> Tick:
    pause = next((pause for pause in pauses if pause.holds(tick)), None)
    # A run in the middle of a pause was told to work despite it; one after it has nothing to do with it.
    if pause is not None and tick <= now and not (reach is not None and pause.holds(reach.started_at)):
        return Tick(tick, Disposition.PAUSED)
    if tick > now:
        return Tick(tick, Disposition.FUTURE)
    if reach is None:
        return Tick(tick, Disposition.MISSED)
    if reach.outcome is Outcome.LATE:
        return Tick(tick, Disposition.LATE, reach.run_id)
    late_by = max(timedelta(), reach.started_at - tick)
    kind = Disposition.COVERED if late_by <= grace else Disposition.COVERED_LATE
    return Tick(tick, kind, reach.run_id, late_by)


def open_tick(next_due_at: datetime | None, schedule: Schedule | None, pause: Pause | None) -> datetime | None:
    """The earliest tick that is due or will be: `next_due_at`, unless a pause skips it. None: there is none to wait
    for."""
    if next_due_at is None or schedule is None or pause is None or not pause.holds(next_due_at):
        return next_due_at
    return None if pause.until is None else tick_from(pause.until, schedule)


def tick_from(at: datetime, schedule: Schedule) -> datetime:
    """The first tick at `at` or later."""
    return schedule.next(at - _INSTANT)
