"""Dagster's own freshness policy for a job, where it says the same as our rule of absence.

Dagster counts materializations only, so there is none for jobs whose ticks may find no row. Of a policy it takes one
cron for the deadlines; where the grace cannot be added to the fields of the schedule's own, there is none. Nor is there
one where a clock change could fall between a tick and its deadline, or Dagster walks a zone wrongly: the deadlines are
exactly the ticks and their grace. A pause is none of Dagster's business, so a paused job turns stale.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

import dagster as dg

from gaffer_dagster.adapter.wakeups import AHEAD, BEHIND, cron_field, wake_up
from gaffer_dagster.domain.cron import CronLine
from gaffer_dagster.domain.due import EachInterval, Elapsed, Intervals
from gaffer_dagster.domain.schedule import ClockChange, Schedule, clock_changes
from gaffer_dagster.domain.spec import JobSpec

_MINUTE = timedelta(minutes=1)
_DAY = 1440  # minutes


def policy_of(spec: JobSpec, now: datetime) -> dg.FreshnessPolicy | None:
    """The policy of a job: each deadline is a tick and its grace, and asks for a materialization since that tick."""
    schedule = spec.schedule
    if schedule is None or not _each_tick_brings_work(spec, schedule):
        return None
    grace = spec.alerts.grace_for(schedule)
    if grace % _MINUTE or not _MINUTE <= grace <= schedule.shortest_interval() or len(schedule.lines) != 1:
        return None
    deadline = _later(schedule.lines[0], grace // _MINUTE)
    changes = clock_changes(schedule.timezone, now - BEHIND, now + AHEAD)
    if deadline is None or _meets(schedule.lines[0], grace // _MINUTE, changes):
        return None
    if not wake_up(schedule, now).is_plain or not wake_up(Schedule(deadline, schedule.timezone), now).is_plain:
        return None
    return dg.FreshnessPolicy.cron(deadline_cron=deadline, lower_bound_delta=grace, timezone=schedule.timezone)


def _each_tick_brings_work(spec: JobSpec, schedule: Schedule) -> bool:
    """Whether something is due at every tick, so that each is followed by a materialization."""
    due, shortest = spec.due, schedule.shortest_interval()
    if isinstance(due, EachInterval) and isinstance(spec.intervals, Intervals):
        grid = spec.intervals.grid
        return due.until is None and (grid == schedule or grid.longest_interval() <= shortest)
    return isinstance(due, Elapsed) and (due.slice is None or 2 * due.slice <= shortest)


def _later(line: CronLine, minutes: int) -> str | None:
    """The cron that fires so much later. None: there is none, of one line."""
    *_, days = line.text.split(" ", 2)
    later = [time + minutes for time in line.times]
    if max(later) >= _DAY and days != "* * *":
        return None  # the deadline's day is not the tick's
    within, hours = sorted({time % 60 for time in later}), sorted({time % _DAY // 60 for time in later})
    if len(later) != len(within) * len(hours):
        return None
    return f"{cron_field(within, 60)} {cron_field(hours, 24)} {days}"


def _meets(line: CronLine, minutes: int, changes: Sequence[ClockChange]) -> bool:
    """Whether the clock may be set between a tick and its deadline, or at one of them. Where each hour is listed, both
    Dagster and we go by real hours."""
    if line.every_hour:
        return False
    for change in changes:
        low, high = sorted(_minute(change.at + offset) for offset in (change.before, change.after))
        for day in (0, _DAY):
            if any(time <= high + day and low + day <= time + minutes for time in line.times):
                return True
    return False


def _minute(wall: datetime) -> int:
    return 60 * wall.hour + wall.minute
