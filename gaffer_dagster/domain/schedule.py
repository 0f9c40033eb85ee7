"""When to wake: lines of cron in a time zone, turned into UTC instants. It reads no clock.

Time is cut into *stretches* between the changes of a zone's clock. Within one, local time is UTC plus a
constant, so that its ticks are plain calendar work. What a change does is decided in one place, `_stretches`:

- the clock goes forward: a tick of a named hour that is missing comes once, at the end of the gap (or, with
  `missing_hour="skip"`, not at all); a date that is missing as a whole has no tick;
- the clock goes back: ticks of named hours are left out of the first pass (or, with `repeated_hour="first"`,
  of the second);
- a line that lists all 24 hours fires by the local minute in every real hour: nothing is moved or left out.

Stretches follow one another in UTC, and so do ticks, whatever the local dates do. Instants here are aware and
in UTC, wall times are naive; two datetimes of one zone are never compared, since Python takes 01:30 and its
second pass, an hour later, for the same.
"""

from __future__ import annotations

import calendar
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, datetime, time, timedelta, timezone
from functools import lru_cache
from itertools import chain, islice, pairwise
from typing import Literal, NamedTuple, cast
from zoneinfo import ZoneInfo, available_timezones

from gaffer_dagster.domain.cron import CronLine, parse
from gaffer_dagster.errors import BadSpecError

_UTC = timezone.utc  # `timezone` alone is a name of the public API below
_FIRST = datetime(1970, 1, 1, tzinfo=_UTC)
_LAST = datetime(9998, 12, 31, tzinfo=_UTC)
_INSTANT = timedelta(microseconds=1)
_SECOND = timedelta(seconds=1)
_MINUTE = timedelta(minutes=1)
_DAY = timedelta(days=1)
_FIXED_OFFSET = re.compile(r"EST|MST|HST|Factory|localtime|(Etc/)?GMT[+-]?\d+")


class ClockChange(NamedTuple):
    """A zone's clock is set forward (`before < after`) or back."""

    at: datetime
    """The first instant, in UTC, of the new offset."""
    before: timedelta
    """The offset from UTC until then."""
    after: timedelta
    """The offset from then on."""


@dataclass(frozen=True)
class Preview:
    """One tick, for people to look at."""

    utc: datetime
    """The instant: what a tick is known by, and what may be compared."""
    local: datetime
    """The same on the wall clock of the zone."""
    note: str
    """What a change of the clock did to this tick, or to one since the tick before; empty for most."""


@dataclass(frozen=True)
class Schedule:
    """When a job wakes: one line of cron, or several whose ticks are merged, in an IANA time zone.

    `cron`: one line of five fields, or a list of them; `H` is a number made from the job's name, and `@hourly`,
    `@daily`, … are known. `timezone`: an IANA name, such as `Europe/Berlin`.

    On a night of clock change a tick whose hour is named fires once, and where the hour is `*` each real hour fires.
    `missing_hour`: a tick in the hour that the clock leaps over fires at its end (`"end"`), or not (`"skip"`).
    `repeated_hour`: in the hour that comes twice it fires in the second pass (`"second"`), or in the `"first"`.

    Ticks are aware datetimes in UTC, from 1970 on. `cron` is kept in canonical form, so that two ways to
    write one line are equal. Raises `BadSpecError` where the text cannot be meant as written; the methods
    raise it for a datetime without a zone, and while the cron has an `H` that `resolved` has not replaced.
    """

    cron: str | Sequence[str]
    timezone: str = "UTC"
    missing_hour: Literal["end", "skip"] = field(default="end", kw_only=True)
    repeated_hour: Literal["second", "first"] = field(default="second", kw_only=True)
    warnings: tuple[str, ...] = field(default=(), init=False, compare=False, repr=False)
    """What the text says and perhaps does not mean; empty for most."""
    lines: tuple[CronLine, ...] = field(default=(), init=False, compare=False, repr=False)
    """What `cron` says, line by line, in the order of their text."""

    def __post_init__(self) -> None:
        _check_choice("missing_hour", self.missing_hour, ("end", "skip"))
        _check_choice("repeated_hour", self.repeated_hour, ("second", "first"))
        found = _check_zone(self.timezone)
        lines = sorted({parse(text) for text in _texts(self.cron)}, key=lambda line: line.text)
        found += [f"cron {line.text!r}: {warning}" for line in lines for warning in line.warnings]
        # A frozen dataclass is set up in no other way.
        object.__setattr__(self, "lines", tuple(lines))
        object.__setattr__(self, "cron", lines[0].text if len(lines) == 1 else self.crons)
        object.__setattr__(self, "warnings", tuple(found))

    @property
    def crons(self) -> tuple[str, ...]:
        """The same as `cron`, a tuple also where it is one line."""
        return tuple(line.text for line in self.lines)

    @property
    def uses_hash(self) -> bool:
        """Whether the cron has an `H` that `resolved` has not replaced."""
        return any(line.uses_hash for line in self.lines)

    @property
    def canonical(self) -> str:
        """All that decides about ticks, in one line of text; the same for schedules that are equal."""
        return " | ".join([*self.crons, self.timezone, self.missing_hour, self.repeated_hour])

    def resolved(self, job: str) -> Schedule:
        """The job's own: each `H` is a number made from the job's name, the same in every process."""
        if not self.uses_hash:
            return self
        if not job:
            raise BadSpecError(f"job {job!r}: is empty, and the H in cron {self.cron!r} is made from it; name it")
        schedule = replace(self, cron=[parse(text, job).text for text in self.crons])
        # The numbers no longer show that a step of H is uneven.
        object.__setattr__(schedule, "warnings", self.warnings)
        return schedule

    def ticks(self, after: datetime, until: datetime) -> Iterator[datetime]:
        """The ticks in `(after, until]`, strictly rising."""
        runs = self._runs(_bound("after", after), _bound("until", until))
        return (run.base + minute * _MINUTE for run in runs for minute in run.minutes)

    def next(self, after: datetime) -> datetime:
        """The first tick later than `after`."""
        for run in self._runs(_bound("after", after), _LAST):
            return run.base + run.minutes[0] * _MINUTE
        raise BadSpecError(f"after {after}: no tick before {_LAST:%Y-%m-%d} is later; give an earlier time")

    def latest(self, at: datetime) -> datetime | None:
        """The last tick not later than `at`; None where that would be before 1970."""
        for run in self._runs(_FIRST, _bound("at", at), step=-1):
            return run.base + run.minutes[-1] * _MINUTE
        return None

    def count(self, after: datetime, until: datetime) -> int:
        """How many ticks are in `(after, until]`, at a cost for each day in between, not for each tick."""
        return sum(len(run.minutes) for run in self._runs(_bound("after", after), _bound("until", until)))

    def preview(self, after: datetime, count: int) -> list[Preview]:
        """The first `count` ticks later than `after`, with notes on what changes of the clock did."""
        ticks = list(islice(self.ticks(after, _LAST), max(count, 0)))
        zone = ZoneInfo(self.timezone)
        return [
            Preview(tick, tick.astimezone(zone), "; ".join(_notes(self, before, tick)))
            for before, tick in pairwise([_bound("after", after) - _INSTANT, *ticks])
        ]

    def shortest_interval(self) -> timedelta:
        """The shortest regular interval: on the wall clock, as if that was never set."""
        self._check_resolved()
        return _intervals(self.lines)[0]

    def longest_interval(self) -> timedelta:
        """The longest regular interval: on the wall clock, as if that was never set, 1901 to 2099."""
        self._check_resolved()
        return _intervals(self.lines)[1]

    def firing_days(self) -> list[Counter[int]]:
        """How many days of a year fire how many times, on the wall clock, for 28 years: then the calendar repeats."""
        self._check_resolved()
        return [
            Counter(
                len(minutes)
                for month in range(1, 13)
                for _, minutes in _month(self.lines, month, *calendar.monthrange(year, month))
            )
            for year in range(2001, 2029)
        ]

    def clock_effects(self, after: datetime, until: datetime) -> list[str]:
        """What each setting of the clock in `(after, until]` does to ticks: moved, left out or doubled, with its date.

        It looks only around the changes: a schedule of each minute costs no more than a daily one.
        """
        self._check_resolved()
        changes = clock_changes(self.timezone, after, until)
        return [effect for change in changes for effect in _effects(self, change)]

    def _runs(self, start: datetime, end: datetime, step: Literal[1, -1] = 1) -> Iterator[_Run]:
        self._check_resolved()
        return _walk(self, start, end, step)

    def _check_resolved(self) -> None:
        if self.uses_hash:
            raise BadSpecError(
                f"cron {self.cron!r}: H stands for a number made from a job's name, and none is given yet; "
                "ask .resolved(job) instead"
            )


def clock_changes(timezone: str, after: datetime, until: datetime) -> list[ClockChange]:
    """Each time in `(after, until]` that the clock of a zone is set, in order."""
    start, end = _bound("after", after), _bound("until", until)
    years = range(start.year, end.year + 1)
    return sorted({change for year in years for change in _changes(timezone, year) if start <= change.at < end})


class _Run(NamedTuple):
    """The ticks of one local day, or a part of them: minutes, at least one, after an instant."""

    base: datetime
    minutes: tuple[int, ...]


class _Stretch(NamedTuple):
    """From `start` until before `end` the offset is constant, and these lines fire."""

    start: datetime
    end: datetime
    offset: timedelta
    lines: tuple[CronLine, ...]
    moved: bool  # what was missing just before comes at the start, as one tick


def _walk(schedule: Schedule, start: datetime, end: datetime, step: Literal[1, -1]) -> Iterator[_Run]:
    """The ticks in `[start, end)`, from the last run to the first where `step` is -1."""
    for year in range(start.year, end.year + 1)[::step]:
        for stretch in _stretches(schedule, year)[::step]:
            since, until = max(start, stretch.start), min(end, stretch.end)
            if since >= until:
                continue
            days = _days(stretch.lines, _wall(since, stretch.offset), _wall(until, stretch.offset), step)
            runs = (_Run((day - stretch.offset).replace(tzinfo=_UTC), minutes) for day, minutes in days)
            moved = [_Run(since, (0,))] if stretch.moved and since == stretch.start else []
            yield from chain(moved, runs) if step == 1 else chain(runs, moved)


@lru_cache(maxsize=1024)
def _stretches(schedule: Schedule, year: int) -> tuple[_Stretch, ...]:
    """The stretches of one UTC year: all that the clock changes of a zone do to a schedule."""
    start, end = datetime(year, 1, 1, tzinfo=_UTC), datetime(year + 1, 1, 1, tzinfo=_UTC)
    changes = {change.at: change for change in _changes(schedule.timezone, year)}
    passes = [_passes(change) for change in changes.values() if change.before > change.after]
    unused = [second if schedule.repeated_hour == "first" else first for first, second in passes]
    every_hour = tuple(line for line in schedule.lines if line.every_hour)
    stretches: list[_Stretch] = []
    for since, until in pairwise(sorted({start, end, *changes, *chain.from_iterable(unused)})):
        if not start <= since < end:
            continue
        offset = offset_at(ZoneInfo(schedule.timezone), since)
        in_unused = any(begin <= since < finish for begin, finish in unused)
        moved = (
            schedule.missing_hour == "end"
            and since in changes
            and bool(_missing_times(schedule.lines, changes[since]))
            # Where a tick is at the end of the gap anyway, the two are one.
            and not _fires_at(schedule.lines, _wall(since, offset))
        )
        stretches.append(_Stretch(since, until, offset, every_hour if in_unused else schedule.lines, moved))
    return tuple(stretches)


def _passes(change: ClockChange) -> tuple[tuple[datetime, datetime], tuple[datetime, datetime]]:
    """The two times, in UTC, that a clock which is set back shows the same."""
    length = change.before - change.after
    return (change.at - length, change.at), (change.at, change.at + length)


def _missing_times(lines: tuple[CronLine, ...], change: ClockChange) -> list[datetime]:
    """The wall times of named hours that the clock leaps over, on dates that exist."""
    named = tuple(line for line in lines if not line.every_hour)
    gone = _missing_dates(lines, change)
    days = _days(named, _wall(change.at, change.before), _wall(change.at, change.after), 1)
    return [day + minute * _MINUTE for day, minutes in days if day not in gone for minute in minutes]


def _missing_dates(lines: tuple[CronLine, ...], change: ClockChange) -> list[datetime]:
    """The dates with ticks that the clock leaps over as a whole, as at the date line."""
    begin, finish = _wall(change.at, change.before), _wall(change.at, change.after)
    return [day for day, _ in _days(lines, begin, finish, 1) if begin <= day and day + _DAY <= finish]


def _fires_at(lines: tuple[CronLine, ...], wall: datetime) -> bool:
    return any(True for _ in _days(lines, wall, wall + _INSTANT, 1))


def _days(
    lines: tuple[CronLine, ...], start: datetime, end: datetime, step: Literal[1, -1]
) -> Iterator[tuple[datetime, tuple[int, ...]]]:
    """Midnights, and the minutes after them that fire, in `[start, end)` of the wall clock."""
    if not lines or start >= end:
        return
    for months in range(12 * start.year + start.month - 1, 12 * end.year + end.month)[::step]:
        year, month = months // 12, months % 12 + 1
        for day, minutes in _month(lines, month, *calendar.monthrange(year, month))[::step]:
            midnight = datetime.combine(date(year, month, day), time.min)
            # Minus of floor of minus: rounded up to whole minutes.
            low = bisect_left(minutes, -((midnight - start) // _MINUTE))
            high = bisect_left(minutes, -((midnight - end) // _MINUTE))
            if low < high:
                yield midnight, minutes[low:high]


@lru_cache(maxsize=8192)
def _month(
    lines: tuple[CronLine, ...], month: int, weekday: int, length: int
) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """The days that fire, with their minutes; `weekday` is that of the month's first, 0 on Monday."""
    days: list[tuple[int, tuple[int, ...]]] = []
    for day in range(1, length + 1):
        firing = tuple(line for line in lines if line.fires_on(month, day, length, (weekday + day) % 7))
        if firing:
            days.append((day, _times(firing)))
    return tuple(days)


@lru_cache(maxsize=1024)
def _times(lines: tuple[CronLine, ...]) -> tuple[int, ...]:
    return tuple(sorted({minute for line in lines for minute in line.times}))


@lru_cache(maxsize=1024)
def _intervals(lines: tuple[CronLine, ...]) -> tuple[timedelta, timedelta]:
    weekly = all(
        line.month_days is None and len(line.months) == 12 and all(nth == 0 for _, nth in line.weekdays or ())
        for line in lines
    )
    start = datetime.combine(date(2000, 1, 1), time.min)
    # The calendar repeats after 28 years; twice that, so that each interval lies within.
    runs = list(_days(lines, start, start + (14 if weekly else 56 * 365.25) * _DAY, 1))
    within = {after - before for minutes in {run[1] for run in runs} for before, after in pairwise(minutes)}
    between = {
        (next_day - day) // _MINUTE + next_minutes[0] - minutes[-1]
        for (day, minutes), (next_day, next_minutes) in pairwise(runs)
    }
    return min(within | between) * _MINUTE, max(within | between) * _MINUTE


@lru_cache(maxsize=4096)
def _changes(timezone: str, year: int) -> tuple[ClockChange, ...]:
    """The clock changes of a UTC year and of two days around it, for what they do may reach over its ends."""
    zone = ZoneInfo(timezone)
    start = datetime(year, 1, 1, tzinfo=_UTC) - 2 * _DAY
    # A look at each day finds all: no zone's clock was set twice in less than six days since 1970.
    looks = [(day, offset_at(zone, day)) for day in (start + number * _DAY for number in range(371))]
    changes: list[ClockChange] = []
    for (low, before), (high, after) in pairwise(looks):
        if before != after:
            while high - low > _SECOND:
                middle = low + (high - low) // (2 * _SECOND) * _SECOND
                low, high = (middle, high) if offset_at(zone, middle) == before else (low, middle)
            changes.append(ClockChange(high, before, after))
    return tuple(changes)


def offset_at(zone: ZoneInfo, instant: datetime) -> timedelta:
    """What a clock there is ahead of UTC. The one place where offsets come from."""
    return instant.astimezone(zone).utcoffset() or timedelta(0)


def _wall(instant: datetime, offset: timedelta) -> datetime:
    return (instant + offset).replace(tzinfo=None)


def _effects(schedule: Schedule, change: ClockChange) -> Iterator[str]:
    """What a change of the clock does to ticks."""
    for day in _missing_dates(schedule.lines, change):
        yield f"{day:%Y-%m-%d} does not exist and has no tick"
    missing = _missing_times(schedule.lines, change)
    if missing:
        moved = f"moved to {_wall(change.at, change.after):%H:%M}"
        yield _missing_note(change, missing, moved if schedule.missing_hour == "end" else "left out")
    begin, finish = _wall(change.at, change.after), _wall(change.at, change.before)
    times = [day + minute * _MINUTE for day, minutes in _days(schedule.lines, begin, finish, 1) for minute in minutes]
    every_hour = tuple(line for line in schedule.lines if line.every_hour)
    twice = [time for time in times if _fires_at(every_hour, time)]
    once = [time for time in times if time not in twice]
    if once:
        yield f"{_first(once)} comes twice: only the {schedule.repeated_hour} fires; {_clock(change)}"
    if twice:
        yield f"{_first(twice)} comes twice: each time fires; {_clock(change)}"


def _notes(schedule: Schedule, before: datetime, tick: datetime) -> Iterator[str]:
    """What the clock did to `tick`, or to ticks between it and the one before."""
    every_hour = tuple(line for line in schedule.lines if line.every_hour)
    for change in clock_changes(schedule.timezone, before - 2 * _DAY, tick + 2 * _DAY):
        if change.before < change.after and before < change.at <= tick:
            for day in _missing_dates(schedule.lines, change):
                yield f"{day:%Y-%m-%d} does not exist here and has no tick"
            times = _missing_times(schedule.lines, change)
            if times:
                yield _missing_note(change, times, "moved here" if change.at == tick else "left out")
        elif change.before > change.after:
            for number, (begin, finish) in enumerate(_passes(change)):
                if begin <= tick < finish:
                    both = _fires_at(every_hour, _wall(tick, change.before if number == 0 else change.after))
                    what = "each time fires, this is" if both else "only this one fires,"
                    yield f"comes twice: {what} the {('first', 'second')[number]}; {_clock(change)}"


def _missing_note(change: ClockChange, times: Sequence[datetime], fate: str) -> str:
    return f"{_first(times)} does not exist: {fate}; {_clock(change)}"


def _first(times: Sequence[datetime]) -> str:
    return f"{times[0]:%Y-%m-%d %H:%M}" + (f" (and {len(times) - 1} more)" if times[1:] else "")


def _clock(change: ClockChange) -> str:
    return f"the clock goes from {_wall(change.at, change.before):%H:%M} to {_wall(change.at, change.after):%H:%M}"


def _bound(name: str, moment: datetime) -> datetime:
    """The instant just after `moment`, in UTC; ticks up to `moment`, itself included, are before that."""
    if moment.utcoffset() is None:
        raise BadSpecError(f"{name} {moment}: has no time zone; give an aware datetime, such as one in UTC")
    if not _FIRST <= moment < _LAST:
        return _FIRST if moment < _FIRST else _LAST
    return moment.astimezone(_UTC) + _INSTANT


def _texts(cron: object) -> list[str]:
    many = list(cast("Sequence[object]", cron)) if isinstance(cron, Sequence) else []
    texts = [cron] if isinstance(cron, str) else many
    found = [text for text in texts if isinstance(text, str)]
    if not found or len(found) < len(texts):
        raise BadSpecError(f"cron {cron!r}: is no text, nor a list of texts; write one such as '0 6 * * *'")
    return found


def _check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise BadSpecError(f"{name} {value!r}: is not known; write {' or '.join(map(repr, choices))}")


@lru_cache(maxsize=1)
def _zones() -> frozenset[str]:
    return frozenset(available_timezones())  # reads folders: tens of milliseconds


def _check_zone(name: object) -> list[str]:
    """Warnings about the zone. Refuses what is no name of a place's time, or of UTC."""
    if not isinstance(name, str) or not name:
        raise BadSpecError(f"timezone {name!r}: is no name; write an IANA name such as 'Europe/Berlin', or 'UTC'")
    if _FIXED_OFFSET.fullmatch(name):
        raise BadSpecError(
            f"timezone {name!r}: is a fixed offset or a machine's setting, no place's time; write an IANA "
            "name such as 'America/New_York', or 'UTC'"
        )
    if name not in _zones():
        alike = sorted(known for known in _zones() if known.casefold() == name.strip().casefold())
        cure = f"{alike[0]!r}" if alike else "an IANA name such as 'America/New_York', or 'UTC'"
        raise BadSpecError(f"timezone {name!r}: is no name in the tz database; write {cure}")
    if name in ("GMT", "Etc/GMT", "Greenwich", "Etc/Greenwich"):
        return [f"timezone {name!r}: has no summer time; if London is meant write 'Europe/London', else 'UTC'"]
    return []
