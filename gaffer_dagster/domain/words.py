"""A schedule as a sentence. It is made from what the cron means, not from how it is written.

Libraries that describe cron text say "every 7 minutes" of `*/7` and "every 2 days" of `*/2`, which start anew each hour
and month. Here each part says exactly one set of values, so that two schedules that differ never read the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from gaffer_dagster.domain.cron import CronLine
from gaffer_dagster.domain.schedule import Schedule

_FEW_TIMES = 6
# Not the calendar module's names, which follow the process's locale.
_MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
_WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_ORDINALS = {1: "first", 2: "second", 3: "third", 4: "fourth", 5: "fifth", -1: "last"}


def words(schedule: Schedule) -> str:
    """Such as "At 06:00 on Monday to Friday, in America/New_York". The cron has no `H` that is not resolved."""
    sentence = "; and ".join(_line(line) for line in schedule.lines)
    policy = ""
    if schedule.missing_hour == "skip":
        policy += "; what a change of the clock leaps over is left out"
    if schedule.repeated_hour == "first":
        policy += "; of an hour that comes twice the first counts"
    return f"{sentence[0].upper()}{sentence[1:]}, in {schedule.timezone}{policy}"


def _line(line: CronLine) -> str:
    whole_year = len(line.months) == 12
    months = "the month" if whole_year else _series(sorted(line.months), lambda month: _MONTHS[month - 1])
    days: list[str] = []
    if line.month_days is not None:
        days.append(f"on {_month_days(line.month_days)} of {months}")
    if line.weekdays is not None:
        days += _weekdays(line.weekdays, months, whole_year=whole_year)
    if not days and not whole_year:
        days.append(f"every day of {months}")
    if not days and not line.every_hour:
        days.append("every day")
    return " ".join([_times(line), " or ".join(days)]).rstrip()


def _times(line: CronLine) -> str:
    """The minutes of a day, which pair each of some hours with each of some minutes."""
    times = line.times
    hours, minutes = sorted({time // 60 for time in times}), sorted({time % 60 for time in times})
    step = _step(times)
    if step and line.every_hour:
        at = "" if minutes[0] == 0 else f", at minute {minutes[0]}" if step == 60 else f" from minute {minutes[0]} on"
        return f"every {_every(step)}{at}"
    if step and len(times) > 2:
        return f"every {_every(step)} from {_clock(times[0])} to {_clock(times[-1])}"
    if len(times) <= _FEW_TIMES:
        return f"at {_series(times, _clock)}"
    of_hours = "every hour" if line.every_hour else f"the hours {_series(hours, str)}"
    if len(minutes) == 60:
        return f"every minute of {of_hours}"
    return f"at minute{'s' if minutes[1:] else ''} {_series(minutes, str)} of {of_hours}"


def _every(step: int) -> str:
    unit, count = ("hour", step // 60) if step % 60 == 0 else ("minute", step)
    return unit if count == 1 else f"{count} {unit}s"


def _clock(time: int) -> str:
    return f"{time // 60:02}:{time % 60:02}"


def _month_days(days: frozenset[int]) -> str:
    numbers = sorted(day for day in days if day > 0)
    named = [f"day{'s' if numbers[1:] else ''} {_series(numbers, str)}"] if numbers else []
    return " and ".join(named + (["the last day"] if -1 in days else []))


def _weekdays(weekdays: frozenset[tuple[int, int]], months: str, *, whole_year: bool) -> list[str]:
    # Sunday, which is 0 there, ends the week, so that a week-end is in one piece.
    ordered = sorted(((weekday + 6) % 7, nth) for weekday, nth in weekdays)
    each = [weekday for weekday, nth in ordered if not nth]
    some = [f"the {_ORDINALS[nth]} {_WEEKDAYS[weekday]}" for weekday, nth in ordered if nth]
    found: list[str] = []
    if each:
        found.append(f"on {_series(each, lambda day: _WEEKDAYS[day])}{'' if whole_year else f' in {months}'}")
    if some:
        found.append(f"on {_joined(some)} of {months}")
    return found


def _step(values: Sequence[int]) -> int | None:
    steps = {after - before for before, after in pairwise(values)}
    return steps.pop() if len(steps) == 1 else None


def _series(values: Sequence[int], name: Callable[[int], str]) -> str:
    """Rising values: "1, 3 and 5 to 9"; from five of an even step on, "0, 7, 14, … 56"."""
    step = _step(values)
    if step and step > 1 and len(values) > 4:
        return f"{', '.join(map(name, values[:3]))}, … {name(values[-1])}"
    runs: list[list[int]] = []
    for value in values:
        if runs and runs[-1][-1] == value - 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    items = [
        item
        for run in runs
        for item in ([f"{name(run[0])} to {name(run[-1])}"] if len(run) > 2 else [name(value) for value in run])
    ]
    return _joined(items)


def _joined(items: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(items[:-1]), items[-1]]))
