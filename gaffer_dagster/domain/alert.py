"""When a job's silence or failure is worth speaking about: its settings, and the kinds of what can be said."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from enum import Enum
from typing import Any, cast

from gaffer_dagster.domain.duration import as_duration, show_duration
from gaffer_dagster.domain.schedule import Schedule
from gaffer_dagster.errors import BadSpecError

_MOST = 100  # of the times that the job's row keeps


class Severity(str, Enum):
    """`error`: work that is due is not done. `warning`: it may soon be so."""

    WARNING = "warning"
    ERROR = "error"

    def __str__(self) -> str:
        return self.value


class Kind(str, Enum):
    """What an incident is about. At most one of a kind is open for a job at a time."""

    ABSENCE = "absence"
    """A tick is not covered, and its grace is over."""
    FAILURES = "failures"
    """So many ticks in a row failed."""
    CAPPED = "capped"
    """So many runs in a row stopped at their bounds, with something left."""
    BACKLOG = "backlog"
    """Something due has been left for longer than it may."""
    STALLED = "stalled"
    """A transaction that stays open elsewhere keeps new rows, or a past interval, from being due."""
    PARKED = "parked"
    """Rows were given up."""
    TAKEOVERS = "takeovers"
    """So many runs of a day were found dead, or lost their lease."""
    PAUSE = "pause"
    """The job was paused without an end, long ago."""
    VANISHED = "vanished"
    """Its code location looked, and does not define it any more."""
    VERSIONS = "versions"
    """Two versions of its definition, its code, or its zone's data take turns."""
    WATCH = "watch"
    """One of those who look for all this has stopped."""

    def __str__(self) -> str:
        return self.value

    @property
    def severity(self) -> Severity:
        warnings = (Kind.CAPPED, Kind.PARKED, Kind.TAKEOVERS, Kind.PAUSE, Kind.VERSIONS)
        return Severity.WARNING if self in warnings else Severity.ERROR


@dataclass(frozen=True, init=False)
class Alerts:
    """When to speak about a job, and to whom. Durations are a `timedelta` or text such as `"30m"`.

    `grace`: how late after a tick a success may come; left out, half the schedule's shortest interval, but at least
    five minutes and at most an hour. `failures`: how many ticks in a row may fail before it is said (3). `capped`: how
    many runs in a row may stop at their bounds (10). `backlog`: how long something due may be left (left out: any
    time). `stalled`: how long something may wait for a transaction that is open elsewhere (1 h). `takeovers`: how many
    runs within a day may be found dead (3). `pause`: when a pause without an end is called forgotten (7 d). `remind`:
    how often an open incident is said again (24 h). `receivers`: the names of those who are told; left out: all.
    `heartbeat`: the environment variable with a URL that is asked for after each success (as Healthchecks wants it).
    Raises `BadSpecError`.
    """

    grace: timedelta | None
    failures: int
    capped: int
    backlog: timedelta | None
    stalled: timedelta
    takeovers: int
    pause: timedelta
    remind: timedelta
    receivers: tuple[str, ...] | None
    heartbeat: str | None

    def __init__(
        self,
        grace: timedelta | str | None = None,
        failures: int = 3,
        *,
        capped: int = 10,
        backlog: timedelta | str | None = None,
        stalled: timedelta | str = "1h",
        takeovers: int = 3,
        pause: timedelta | str = "7d",
        remind: timedelta | str = "24h",
        receivers: Iterable[str] | None = None,
        heartbeat: str | None = None,
    ) -> None:
        for name, count in (("failures", failures), ("capped", capped), ("takeovers", takeovers)):
            if type(count) is not int or not 1 <= count <= _MOST:
                raise BadSpecError(f"alerts: {name}={count!r} must be a whole number from 1 to {_MOST}")
            object.__setattr__(self, name, count)
        durations = {"grace": grace, "backlog": backlog, "stalled": stalled, "pause": pause, "remind": remind}
        for name, duration in durations.items():
            if name in ("grace", "backlog") and duration is None:
                object.__setattr__(self, name, None)
            else:
                object.__setattr__(self, name, as_duration(duration, f"alerts: {name}"))
        object.__setattr__(self, "receivers", None if receivers is None else _names(receivers))
        if heartbeat is not None and not is_variable(heartbeat):
            raise BadSpecError(
                f"alerts: heartbeat={shown(heartbeat)} is no name of an environment variable; put the URL into one, "
                "such as NIGHTLY_PING_URL, and give its name (a URL that is written here would be stored and shown)"
            )
        object.__setattr__(self, "heartbeat", heartbeat)

    def grace_for(self, schedule: Schedule | None) -> timedelta:
        if self.grace is not None:
            return self.grace
        half = timedelta(hours=1) if schedule is None else schedule.shortest_interval() / 2
        return max(timedelta(minutes=5), min(timedelta(hours=1), half))

    def as_json(self) -> Mapping[str, object]:
        """As it is stored with the job; `from_json` reads it back."""
        return {field.name: _as_json(getattr(self, field.name)) for field in fields(self)}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Alerts:
        """Raises `BadSpecError` for settings that a newer version wrote."""
        try:
            return cls(**stored)
        except TypeError as error:
            raise BadSpecError(f"alerts {stored!r}: not known here ({error}); upgrade gaffer_dagster") from None


def _as_json(value: Any) -> object:
    if isinstance(value, tuple):
        return list(cast("tuple[str, ...]", value))
    return show_duration(value) if isinstance(value, timedelta) else value


def shown(value: object) -> str:
    """What stands where a URL may have got by mistake: an error is shown and stored, so that only a short word is."""
    is_word = isinstance(value, str) and re.fullmatch(r"[\w .-]{0,12}", value, re.ASCII)
    return repr(value) if is_word else "(not shown, it may be a URL)"


def is_variable(name: object) -> bool:
    return isinstance(name, str) and name.isascii() and name.isidentifier() and name.upper() == name


def is_receiver(name: object) -> bool:
    """Whether it can be a receiver's name: `gaffer.receiver` takes no other."""
    return isinstance(name, str) and re.fullmatch(r"[a-z_][a-z0-9_]{0,62}", name) is not None


def _names(receivers: Iterable[str]) -> tuple[str, ...]:
    if not isinstance(receivers, Iterable):
        raise BadSpecError(f"alerts: receivers: a {type(receivers).__name__} is no list of names; give one")
    found = (receivers,) if isinstance(receivers, str) else tuple(receivers)
    for name in found:
        if not is_receiver(name):
            raise BadSpecError(
                f"alerts: receivers: {shown(name)} is no name; use a-z, 0-9 and _, at most 63, such as "
                "'oncall', whose address is in GAFFER_RECEIVER_ONCALL"
            )
    if not found:
        raise BadSpecError("alerts: receivers is empty; name at least one, or leave it out to tell all")
    return found if isinstance(receivers, Sequence) else tuple(sorted(found))  # a set's order differs by the process
