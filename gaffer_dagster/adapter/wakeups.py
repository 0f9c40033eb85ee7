"""How Dagster drives a schedule: by its own cron where that is right, else by sparse wake-ups in UTC.

Dagster walks on the wall clock of a zone. What it answers there depends on where it starts, which is wherever
its daemon left off, so a look at a few ticks proves nothing. In its place stands a rule, `_fault`. A schedule
taken for plain though it is not loses ticks; one driven by wake-ups though it need not be only skips some. So
the rule is short and strict, and the tests prove it with dense starts around the clock changes of all zones. It
supposes that Dagster's daemon has the same zone data as the process that loads the schedules.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from zoneinfo import ZoneInfo

from gaffer_dagster.domain.schedule import ClockChange, Schedule, clock_changes

AHEAD = timedelta(days=3653)
# The daemon walks on from where it stopped: over changes that are past, if it was down for long.
BEHIND = timedelta(days=366)
_MINUTE = timedelta(minutes=1)
_HOUR = timedelta(hours=1)


@dataclass(frozen=True)
class WakeUp:
    """What Dagster is given for a schedule."""

    cron: str | list[str]
    """Its `cron_schedule`."""
    timezone: str
    """Its `execution_timezone`; UTC for wake-ups."""
    is_plain: bool
    """Whether Dagster's ticks are those of the schedule, one for one. Else they are wake-ups: one at each tick of
    the schedule, and some where there is none, so that whoever is woken has to ask whether a tick is not covered."""
    why: str
    """What Dagster would get wrong, in words; empty where it is plain."""


def wake_up(schedule: Schedule, now: datetime) -> WakeUp:
    """How Dagster drives a resolved schedule, from `now` on for ten years of clock changes that are known.

    A code location is loaded anew at each deployment, and this is asked again. In a process that outlives the ten
    years, a tick at an offset from UTC that its zone did not have before is met by the wake-up after it.
    """
    changes = clock_changes(schedule.timezone, now - BEHIND, now + AHEAD)
    why = _fault(schedule, changes)
    if why:
        return WakeUp(_crons(_minutes(schedule, now, changes)), "UTC", is_plain=False, why=why)
    return WakeUp(_one_or_list(schedule.crons), schedule.timezone, is_plain=True, why="")


def _fault(schedule: Schedule, changes: Sequence[ClockChange]) -> str:
    """What Dagster 1.13 would get wrong, or might; empty where it is right."""
    for line in schedule.lines:
        if line.month_days is not None and line.weekdays is not None:
            return f"Dagster may read the two day fields of {line.text!r} in another way"
        if len({nth == 0 for _, nth in line.weekdays or ()}) > 1:
            return f"Dagster does not know {line.text!r}, which has both weekdays and numbered weekdays"
        if 2 in line.months and 29 in (line.month_days or ()):
            return f"Dagster misses 29 February, or ends at it, in lines such as {line.text!r}"
    if not changes:
        return ""
    if len(schedule.lines) > 1:
        return f"Dagster confuses the ticks of several crons when the clock of {schedule.timezone} is set back"
    if (schedule.missing_hour, schedule.repeated_hour) != ("end", "second"):
        return "Dagster does not know missing_hour='skip' and repeated_hour='first'"
    for change in changes:
        if not _is_common(schedule.timezone, change):
            old, new = change.at + change.before, change.at + change.after
            return f"the clock of {schedule.timezone} is set from {old:%H:%M} to {new:%H:%M}, which Dagster gets wrong"
    return ""


def _is_common(timezone: str, change: ClockChange) -> bool:
    """Whether a change is of the kind that Dagster is written for: the clock leaps over, or repeats, one of the
    hours 1, 2 and 3, and where it leaps the zone calls it one hour of summer time."""
    low, high = sorted((change.at + offset).replace(tzinfo=None) for offset in (change.before, change.after))
    if high - low != _HOUR or low.hour not in (1, 2, 3) or low.minute != 0:
        return False
    # Dagster finds the end of a gap by adding this. Where winter time is the marked one, as in Dublin, it is 0.
    return change.before > change.after or ZoneInfo(timezone).dst(high) == _HOUR


def _minutes(schedule: Schedule, now: datetime, changes: Sequence[ClockChange]) -> set[int]:
    """The minutes of the UTC day at which a tick can be: each time of day at each offset that the zone has now or
    will have, and the ends of gaps to which a tick moves. In no zone of today more than twice the times of day, and
    one."""
    coming = [change for change in changes if change.at > now]
    offset = now.astimezone(ZoneInfo(schedule.timezone)).utcoffset() or timedelta(0)
    offsets = {offset, *(change.after for change in coming)}
    times = {time for line in schedule.lines for time in line.times}
    minutes = {(time - offset // _MINUTE) % 1440 for time in times for offset in offsets}
    gaps = (change for change in coming if change.before < change.after)
    ends = {gap.at for gap in gaps if schedule.count(gap.at - _MINUTE, gap.at)}
    return minutes | {60 * end.hour + end.minute for end in ends}


def _crons(minutes: Collection[int]) -> str | list[str]:
    """Lines of cron that fire at these minutes of each day and at no other."""
    by_hour: defaultdict[int, list[int]] = defaultdict(list)
    for minute in sorted(minutes):
        by_hour[minute // 60].append(minute % 60)
    alike: defaultdict[str, list[int]] = defaultdict(list)
    for hour, within in by_hour.items():
        alike[cron_field(within, 60)].append(hour)
    return _one_or_list([f"{within} {cron_field(hours, 24)} * * *" for within, hours in alike.items()])


def cron_field(values: Sequence[int], size: int) -> str:
    """The field of a cron that lists these values, rising, of `size` that there are."""
    for step in range(1, size // 2 + 1):
        if values == list(range(0, size, step)):
            return "*" if step == 1 else f"*/{step}"
    return ",".join(map(str, values))


def _one_or_list(crons: Sequence[str]) -> str | list[str]:
    return crons[0] if len(crons) == 1 else list(crons)
