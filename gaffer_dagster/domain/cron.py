"""Cron text: what one line means on the calendar. No zone and no clock here; `schedule` has those.

A line has five fields: minute, hour, day of month, month, day of week. Known are numbers, names (`MON`,
`jan`), lists, ranges (also wrapping ones: `22-2`), steps, `7` for Sunday, `L` (the last day of the month),
`L5` (its last Friday), `1#2` (its second Monday), `@daily` and its like, and `H`: a value made from the job's
name, so that a hundred jobs do not all start at minute 0. Where both day fields are given, a day that fits
either one fires.

Text that can never fire, fires at random, or means something else than it says is refused. Text that is
right, but often written by mistake, is taken with a warning.
"""

from __future__ import annotations

import calendar
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple, NoReturn

from gaffer_dagster.errors import BadSpecError

_MACROS = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
_EACH = 0  # beside a weekday: each of the month, not only its n-th
_LAST = -1  # beside a weekday: the last of the month; as a day of the month: the last day
_UNKNOWN = {
    r"R(\(.*\))?": "picks at random in each process, so two daemons would disagree; for a spread write 'H'",
    r"\?": "is Quartz grammar; write '*'",
    r".*#.*": "is no weekday of a month; write it like '1#2', up to '#5', in the field day-of-week",
    r"[0-7]L": "is Quartz grammar; for the last Friday of the month write 'L5'",
    r"L-.*|L?W|[0-9]+W": "is Quartz grammar; of such only 'L', the last day of the month, is known",
    r"-.*": "has no beginning, and no value is negative; write a range such as '1-5'",
    r"": "is empty; leave the comma or sign out",
}


class _Field(NamedTuple):
    name: str
    low: int
    high: int
    unit: str  # what a step counts
    around: str  # where a step starts anew
    once: str  # a line that fires once in that
    names: tuple[str, ...] = ()  # from `low` on

    def all(self) -> list[int]:
        return list(range(self.low, self.high + 1))


_MINUTE = _Field("minute", 0, 59, "minutes", "hour", "0 * * * *")
_HOUR = _Field("hour", 0, 23, "hours", "day", "0 0 * * *")
_DAY = _Field("day-of-month", 1, 31, "days", "month", "0 0 1 * *")
_MONTH_NAMES = ("JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC")
_MONTH = _Field("month", 1, 12, "months", "year", "0 0 1 1 *", _MONTH_NAMES)
_WEEKDAY_NAMES = ("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT")
_WEEKDAY = _Field("day-of-week", 0, 6, "days", "week", "0 0 * * 0", _WEEKDAY_NAMES)
_FIELDS = (_MINUTE, _HOUR, _DAY, _MONTH, _WEEKDAY)


@dataclass(frozen=True)
class CronLine:
    """What one line of cron says. Two lines are equal when their `text` is."""

    text: str
    """In canonical form: single blanks, upper case, `@daily` written out, `H` replaced if a job was given."""
    uses_hash: bool = field(compare=False)
    """Whether `text` still holds an `H`; what else stands here is then only an example."""
    times: tuple[int, ...] = field(compare=False, repr=False)
    """The minutes since midnight, on the wall clock, at which a day that fits fires; rising."""
    every_hour: bool = field(compare=False, repr=False)
    """Whether all 24 hours are listed: each real hour fires then, however the clock is set."""
    warnings: tuple[str, ...] = field(compare=False, repr=False)
    """What may be meant otherwise; empty for most."""
    months: frozenset[int] = field(compare=False, repr=False)
    month_days: frozenset[int] | None = field(compare=False, repr=False)
    """Days of the month, -1 for the last; None for any (`*`)."""
    weekdays: frozenset[tuple[int, int]] | None = field(compare=False, repr=False)
    """Pairs of weekday (0 is Sunday) and which of the month (0 each, 1 to 5, -1 the last); None for any."""

    def fires_on(self, month: int, day: int, length: int, weekday: int) -> bool:
        """Whether a date fits. `length` is the number of days in its month, `weekday` is 0 on Sunday."""
        if month not in self.months:
            return False
        if self.month_days is None and self.weekdays is None:
            return True
        by_date = {day, _LAST} if day == length else {day}
        nth = (day + 6) // 7
        by_weekday = {(weekday, _EACH), (weekday, nth), (weekday, _LAST if day + 7 > length else nth)}
        return not by_date.isdisjoint(self.month_days or ()) or not by_weekday.isdisjoint(self.weekdays or ())


def parse(text: str, job: str | None = None) -> CronLine:
    """Read one line. With a job's name, each `H` becomes a number. Raises `BadSpecError`, with the cure."""
    parts = _split(text)
    read = [_read(text, kind, part, job) for kind, part in zip(_FIELDS, parts, strict=True)]
    minutes, hours, days, months, _ = ({value for value, _ in one.values} for one in read)
    line = CronLine(
        text=" ".join(one.text for one in read),
        uses_hash=job is None and any(item[:1] in ("h", "H") for part in parts for item in part.split(",")),
        times=tuple(sorted(60 * hour + minute for hour in hours for minute in minutes)),
        every_hour=len(hours) == len(_HOUR.all()),
        warnings=(
            *(warning for one in read for warning in one.warnings),
            *_lint(parts, minutes, hours),
        ),
        months=frozenset(months),
        month_days=None if parts[2] == "*" else frozenset(days),
        weekdays=None if parts[4] == "*" else frozenset(read[4].values),
    )
    if not line.uses_hash and not _can_fire(line):
        _refuse(
            text,
            f"field day-of-month: {parts[2]!r} comes in no month of {parts[3]!r}, so this never fires; for "
            "the last day of a month write 'L'",
        )
    return line


def _refuse(text: str, problem: str) -> NoReturn:
    raise BadSpecError(f"cron {text!r}: {problem}")


def _split(text: str) -> list[str]:
    line = text.strip(" \t\r\n")
    if not line:
        _refuse(text, "is empty; write five fields, such as '0 6 * * *'")
    if not line.isascii():
        _refuse(text, "has a character outside ASCII, perhaps another script's digit or blank; type it anew")
    if "\n" in line or "\r" in line:
        _refuse(text, "has two lines; give a list of crons, one text each")
    if line.startswith("@"):
        if line.lower() not in _MACROS:
            _refuse(text, f"is no shorthand known here; write five fields or one of {', '.join(_MACROS)}")
        line = _MACROS[line.lower()]
    if "=" in line:
        _refuse(text, "sets a variable; the zone has its own place: write timezone='...' beside the cron")
    parts = line.split()
    if len(parts) != len(_FIELDS):
        too_many = "leave out seconds and years, and in a shell quote it, or each * becomes the names of files"
        cure = too_many if len(parts) > len(_FIELDS) else "write '*' for any"
        _refuse(text, f"has {len(parts)} fields, not 5 (minute hour day-of-month month day-of-week); {cure}")
    return parts


class _Read(NamedTuple):
    text: str
    values: set[tuple[int, int]]  # each with which of the month is meant, which only weekdays have
    warnings: list[str]


def _read(cron: str, kind: _Field, part: str, job: str | None) -> _Read:
    texts: list[str] = []
    chosen: set[tuple[int, int]] = set()
    warnings: list[str] = []
    for item in part.split(","):
        code = item.upper()
        nth = re.fullmatch(r"L([0-7])|([0-7]|[A-Z]{3})#([1-5])", code) if kind is _WEEKDAY else None
        if nth:
            weekday = _number(cron, kind, nth[1] or nth[2]) % 7
            chosen.add((weekday, int(nth[3]) if nth[3] else _LAST))
        elif kind is _DAY and code == "L":
            chosen.add((_LAST, _EACH))
        else:
            values, uneven = _values(cron, kind, item, job)
            chosen.update((value, _EACH) for value in values)
            warnings += uneven if item == part else []
            # Crons disagree on the step of a range that wraps, Dagster's among them; on a list none does.
            wraps = "/" in code and values != sorted(values)
            write_out = job is not None if code.startswith("H") else wraps
            if write_out:
                code = ",".join(map(str, values))
        texts.append(code)
    return _Read(",".join(texts), chosen, warnings)


def _values(cron: str, kind: _Field, item: str, job: str | None) -> tuple[list[int], list[str]]:
    """What one item lists, and a warning where its step does not come out even."""
    base, slash, step = item.partition("/")
    hashed = re.fullmatch(r"[hH](\((.*)\))?", base)
    whole = base == "*" or (hashed is not None and not hashed[1])
    if whole:
        # `H` picks a day that every month has, as in Jenkins.
        values = kind.all()[:28] if hashed and kind is _DAY else kind.all()
    else:
        values = _range(cron, kind, hashed[2] if hashed else base, to_the_end=bool(slash))
        whole = len(values) == len(kind.all())
    spread = _hash(job, kind) if hashed and job is not None else 0
    if not slash:
        return [values[spread % len(values)]] if hashed else values, []
    if not re.fullmatch(r"0*[1-9][0-9]{0,3}", step):
        _refuse(cron, f"field {kind.name}: step {step!r} is no number from 1 up; write it like '*/5'")
    every = int(step)
    if every > len(values) or (every == len(values) and not whole):
        _refuse(
            cron,
            f"field {kind.name}: step {every} is larger than the {'field' if whole else 'range'} and would "
            f"fire once each {kind.around}, not every {every} {kind.unit}; write {kind.once!r} if that is "
            "meant, else a list of values or of crons",
        )
    stepped = values[spread % every :: every]
    return stepped, _uneven(kind, item, stepped) if whole else []


def _range(cron: str, kind: _Field, base: str, *, to_the_end: bool) -> list[int]:
    for known, cure in _UNKNOWN.items():
        if re.fullmatch(known, base.upper()):
            _refuse(cron, f"field {kind.name}: {base!r} {cure}")
    first, dash, last = base.partition("-")
    low = _number(cron, kind, first)
    if not dash:
        low = low % 7 if kind is _WEEKDAY else low
        return list(range(low, kind.high + 1)) if to_the_end else [low]
    high = _number(cron, kind, last)
    if kind is _WEEKDAY and (low, high) == (0, 7):
        return kind.all()
    if kind is _WEEKDAY:
        low, high = low % 7, high % 7
    if low == high:
        _refuse(
            cron,
            f"field {kind.name}: range {base!r} has a single value, which some crons take for the whole "
            f"field; write {first!r}, or '*' for all",
        )
    if low < high:
        return list(range(low, high + 1))
    return [*range(low, kind.high + 1), *range(kind.low, high + 1)]


def _number(cron: str, kind: _Field, token: str) -> int:
    if token.upper() in kind.names:
        return kind.low + kind.names.index(token.upper())
    if not re.fullmatch(r"[0-9]{1,4}", token):
        names = f" or a name such as {kind.names[0]}" if kind.names else ""
        _refuse(cron, f"field {kind.name}: {token!r} is no number; write one{names}, or '*' for any")
    high = 7 if kind is _WEEKDAY else kind.high
    if not kind.low <= int(token) <= high:
        _refuse(cron, f"field {kind.name}: {token} is out of range; write {kind.low} to {high}")
    return int(token)


def _hash(job: str, kind: _Field) -> int:
    return int.from_bytes(hashlib.sha256(f"{kind.name} {job}".encode()).digest()[:8], "big")


def _can_fire(line: CronLine) -> bool:
    # A month has one of 28 shapes, and each of them comes within 28 years.
    return any(
        line.fires_on(month, day, length, (first + day) % 7)
        for month in line.months
        for length in {calendar.monthrange(year, month)[1] for year in (2023, 2024)}
        for day in range(1, length + 1)
        for first in range(7)
    )


def _uneven(kind: _Field, item: str, values: Sequence[int]) -> list[str]:
    sizes = (28, 29, 30, 31) if kind is _DAY else (len(kind.all()),)
    gaps = {after - before for before, after in pairwise(values)}
    gaps |= {values[0] + size - max(value for value in values if value <= size) for size in sizes}
    if len(gaps) == 1:
        return []
    return [
        f"field {kind.name}: {item!r} starts anew each {kind.around}, so its intervals are {min(gaps)} "
        f"to {max(gaps)} {kind.unit}"
    ]


def _lint(parts: Sequence[str], minutes: set[int], hours: set[int]) -> list[str]:
    found: list[str] = []
    if len(minutes) == len(_MINUTE.all()) and len(hours) < len(_HOUR.all()):
        found.append(
            f"fires {len(minutes) * len(hours)} times a day: every minute of {len(hours)} "
            f"hour{'s'[: len(hours) > 1]}; for once in "
            f"each write '0 {' '.join(parts[1:])}'"
        )
    day, weekday = parts[2], parts[4]
    first = weekday if re.fullmatch(r"[0-7]|[a-zA-Z]{3}", weekday) else "1"
    if day != "*" and weekday != "*":
        found.append(
            f"fires on each day that fits day-of-month {day!r} OR day-of-week {weekday!r} (some crons take "
            f"a step there for AND); for one of them write '*' in the other, for the first such weekday of a "
            f"month '{' '.join(parts[:2])} * {parts[3]} {first}#1'"
        )
    return found
