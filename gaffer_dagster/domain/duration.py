"""Durations as people write them: `"90s"`, `"20m"`, `"1h30m"`, `"2d"`, or a `timedelta`."""

from __future__ import annotations

import re
from datetime import timedelta

from gaffer_dagster.errors import BadSpecError

LONGEST = timedelta(days=3653)
"""Ten years: a time that is longer ago, or ahead, may be none that can be counted."""
_UNITS = {"d": "days", "h": "hours", "m": "minutes", "s": "seconds", "ms": "milliseconds"}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|[dhms])", re.ASCII)
_WHOLE = re.compile(rf"(?:{_PART.pattern})+", re.ASCII)


def as_duration(value: timedelta | str | None, field: str, longest: timedelta = LONGEST) -> timedelta:
    """A positive duration, of `longest` at most. Raises `BadSpecError` naming `field` and the value."""
    if isinstance(value, timedelta):
        duration = value
    elif isinstance(value, str) and _WHOLE.fullmatch(value):
        try:
            duration = sum(
                (timedelta(**{_UNITS[unit]: float(number)}) for number, unit in _PART.findall(value)),
                timedelta(),
            )
        except OverflowError:
            raise BadSpecError(f"{field}={value!r} is longer than can be counted; write a shorter one") from None
    else:
        raise BadSpecError(
            f"{field}={value!r} is no duration; write a timedelta, or text such as '20m', '90s', '1h30m'"
        )
    if duration <= timedelta():
        raise BadSpecError(f"{field}={value!r} is not longer than nothing; write a positive duration")
    if duration > longest:
        raise BadSpecError(f"{field}={value!r} is longer than {longest.days:,} days; write a shorter one")
    return duration


def in_words(duration: timedelta) -> str:
    """Such as "3 hours 20 minutes" (only the two largest units), or "0.45 second"."""
    import pendulum  # takes longer to load than all the rest

    return " ".join(pendulum.duration(seconds=duration.total_seconds()).in_words().split(" ")[:4])


def show_duration(duration: timedelta) -> str:
    """The shortest text that `as_duration` reads back: `"1h30m"`."""
    rest = round(duration.total_seconds() * 1000)
    text = ""
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1)):
        count, rest = divmod(rest, size)
        if count:
            text += f"{count}{unit}"
    return text or "0s"
