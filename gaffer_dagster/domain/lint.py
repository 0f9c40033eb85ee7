"""What is said of a schedule when it is defined: what it means, what is perhaps not meant, what the clock will do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise

from gaffer_dagster.domain.amount import counted
from gaffer_dagster.domain.cron import parse
from gaffer_dagster.domain.duration import show_duration
from gaffer_dagster.domain.schedule import Schedule, clock_changes
from gaffer_dagster.domain.words import words

_COMING = timedelta(days=3 * 365)


@dataclass(frozen=True)
class Lint:
    """What is to be said of a schedule."""

    words: str
    """What it means, as a sentence."""
    fires_a_day: str
    """How often it fires on a day, and on how many days, as the calendar has it."""
    warnings: tuple[str, ...]
    """What is perhaps not meant. What cannot be meant is refused where it is written."""
    notes: tuple[str, ...]
    """What is good to know."""
    clock: tuple[str, ...]
    """Ticks that changes of the clock move, leave out or double in the three years to come, each with its date."""


def lint(schedule: Schedule, now: datetime, *, job: str | None = None, timeout: timedelta | None = None) -> Lint:
    """Raises `BadSpecError` where the cron has an `H` and no job is named.

    `timeout`: of the job's runs, already shorter than the shortest regular interval (see `bounds.limits`).
    """
    resolved = schedule if job is None else schedule.resolved(job)
    until = now + _COMING
    nights = () if timeout is None else _short_nights(resolved, timeout, now, until)
    return Lint(
        words=words(resolved),
        fires_a_day=_fires_a_day(resolved),
        warnings=(*resolved.warnings, *nights),
        notes=tuple(_round_starts(schedule, job)),
        clock=tuple(resolved.clock_effects(now, until)),
    )


def _fires_a_day(schedule: Schedule) -> str:
    years = schedule.firing_days()
    counts = {count for year in years for count in year}
    least, most = min(counts), max(counts)
    times = {1: "once", 2: "twice"}.get(most, f"{most:,} times") if least == most else f"{least:,} to {most:,} times"
    days = [sum(year.values()) for year in years]
    if min(days) >= 365:
        return f"{times} a day"
    if min(days) == 0:
        return f"{times} a day, on {counted(sum(days), 'day')} in {len(days)} years"
    about = "" if min(days) == max(days) else "about "
    return f"{times} a day, on {about}{counted(round(sum(days) / len(days)), 'day')} a year"


def _round_starts(schedule: Schedule, job: str | None) -> Iterator[str]:
    """Where minute 0 was written, and the job's own would be another."""
    for cron in schedule.crons:
        minute, rest = cron.split(" ", 1)
        if set(minute) == {"0"} and (job is None or parse(f"H {rest}", job).text != cron):
            yield (
                f"cron {cron!r}: starts at minute 0, as many jobs do; where the minute does not matter write "
                f"'H {rest}', a minute made from the job's name"
            )


def _short_nights(schedule: Schedule, timeout: timedelta, now: datetime, until: datetime) -> Iterator[str]:
    """Where a change of the clock brings two ticks so near that a run may take longer than from one to the other."""
    shortest = schedule.shortest_interval()
    found: list[tuple[timedelta, datetime, datetime]] = []
    for change in clock_changes(schedule.timezone, now, until):
        length = abs(change.after - change.before)
        before = schedule.latest(change.at - length)
        if before is not None:
            last = schedule.next(change.at + length)
            near = [before, *schedule.ticks(before, last)]
            interval, tick, following = min((after - tick, tick, after) for tick, after in pairwise(near))
            if interval <= timeout and interval < shortest:
                found.append((interval, tick, following))
    if found:
        interval, tick, following = min(found)
        nights = counted(len(found), "night")
        yield (
            f"cron {schedule.cron!r} in {schedule.timezone}: timeout={show_duration(timeout)} is shorter than each "
            f"regular interval, but not than one on {nights} of clock change in the coming years: "
            f"{show_duration(interval)} from {tick:%Y-%m-%d %H:%M}Z to {following:%H:%M}Z; shorten the timeout, or the "
            "second wake-up may meet the first run still at work"
        )
