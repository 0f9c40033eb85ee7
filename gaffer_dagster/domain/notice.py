"""What is said of an incident, and how: titles, text and JSON, the same for every receiver.

What people or databases wrote (why a job is paused, which application holds a transaction) is said as nothing but
text: see `plain`. No error's text and no row's value is ever said.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from enum import Enum
from typing import Any, cast
from uuid import UUID, uuid4
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from gaffer_dagster.domain.alert import Kind, Severity
from gaffer_dagster.domain.amount import counted
from gaffer_dagster.domain.incident import Alert, Over

VERSION = 1
"""Of the JSON: it is raised when a field changes its meaning, not when one is added."""

_MOST_TEXT = 200
_MOST_JOBS = 20


class Event(str, Enum):
    """What happened to an incident."""

    OPENED = "opened"
    REMINDED = "reminded"
    RESOLVED = "resolved"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Notice:
    """That something happened to an incident. `number`: of the reminder; `newer`: the incident of the same kind that is
    open now, if there is one."""

    event: Event
    alert: Alert
    number: int = 0
    newer: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "event", Event(self.event))  # the database has it as text


@dataclass(frozen=True)
class Message:
    """What a receiver is sent. `key`: the same in every attempt, so that one that came twice can be told; `recovery`:
    all that it tells of is over; `payload`: everything, for programs."""

    key: str
    title: str
    text: str
    severity: Severity
    recovery: bool = False
    payload: Mapping[str, Any] = field(default_factory=dict[str, Any])


def write(key: UUID, notices: Sequence[Notice]) -> Message:
    """The message that says these, at least one."""
    return _single(str(key), notices[0]) if len(notices) == 1 else _group(str(key), notices)


def test_message() -> Message:
    """A message of no incident, to try a receiver with."""
    key = str(uuid4())
    title = "[test] gaffer: this is a test, nothing is wrong"
    text = f"{title}\nWhoever reads this is told of incidents.\nKey: {key}"
    said = {"version": VERSION, "event": "test", "key": key, "severity": "warning", "title": title, "text": text}
    return Message(key, title, text, Severity.WARNING, payload=said)


# ── one notice ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _single(key: str, notice: Notice) -> Message:
    text = "\n".join([_title(notice), *_lines(notice), f"Key: {key}"])
    said = {"version": VERSION, "key": key, **_said(notice), "text": text}
    return Message(key, _title(notice), text, notice.alert.severity, notice.event is Event.RESOLVED, said)


def _said(notice: Notice) -> Mapping[str, Any]:
    alert = notice.alert
    return {
        "event": str(notice.event),
        "reminder": notice.number or None,
        "incident": alert.id,
        "incident_key": str(alert.key),
        "job": alert.job,
        "watch": None if alert.watch is None else plain(alert.watch),
        "kind": str(alert.kind),
        "severity": str(alert.severity),
        "since_at": alert.since_at.isoformat(),
        "opened_at": alert.opened_at.isoformat(),
        "resolved_at": None if alert.resolved_at is None else alert.resolved_at.isoformat(),
        "details": _bare("details", alert.details),
        "title": _title(notice),
    }


def _title(notice: Notice) -> str:
    alert, name = notice.alert, _name(notice.alert)
    number = f"[gaffer {alert.id}]"
    if notice.event is Event.RESOLVED:
        words = _WORDS[alert.kind]
        since, until = _at(alert.details, alert.since_at), _at(alert.details, alert.resolved_at)
        return f"[resolved] {name} {_ended(notice)}; {words.was} from {since} to {until} {number}"
    still = f" (reminder {notice.number})" if notice.event is Event.REMINDED else ""
    return f"[{alert.severity}] {name}{still}: {sentence(alert.kind, alert.details)} {number}"


def _ended(notice: Notice) -> str:
    """Only what is so: that an incident is over need not mean that all is well."""
    if notice.newer is not None:
        return f"has another incident of the same kind since, [gaffer {notice.newer}]"
    told = notice.alert.details.get("over")
    over = Over(told) if told in tuple(Over) else Over.RECOVERED
    if over is Over.RETIRED:
        return "was retired"
    return _WORDS[notice.alert.kind].over if over is Over.RECOVERED else "goes by other rules now, or skipped the tick"


def _lines(notice: Notice) -> list[str]:
    alert = notice.alert
    asides = {"by": "By", "reason": "Why", "held_by": "Held by"}
    lines = [f"{said}: {plain(str(alert.details[name]))}" for name, said in asides.items() if alert.details.get(name)]
    if lines and alert.details.get("held_by_since"):
        lines[-1] += f" (seen to stand since {_at(alert.details, alert.details['held_by_since'])})"
    if notice.event is Event.RESOLVED:
        return lines
    lines.append(f"True since {_at(alert.details, alert.since_at)}; seen at {_at(alert.details, alert.opened_at)}.")
    if alert.resolved_at is not None:
        lines.append(f"It was over at {_at(alert.details, alert.resolved_at)}, before this could be sent.")
    else:
        lines.append(f"What to do: {what_to_do(alert.kind, alert.job, alert.details)}")
        lines.append(f"Runbook: docs/runbook.md#{alert.kind}")
    return lines


def _name(alert: Alert) -> str:
    return alert.job or f"the watch {plain(alert.watch or '')}"


def sentence(kind: Kind, details: Mapping[str, Any]) -> str:
    """What is wrong, in words."""
    return _WORDS[kind].wrong(details)


def explained(kind: Kind, details: Mapping[str, Any]) -> str:
    """The sentence, and what people or the database gave as its reason."""
    asides = [plain(str(details[name])) for name in ("reason", "held_by") if details.get(name)]
    return "; ".join([sentence(kind, details), *asides])


def what_to_do(kind: Kind, job: str | None, details: Mapping[str, Any]) -> str:
    """About an incident."""
    return f"{_cure(details)}{_WORDS[kind].cure.format(name=job)}"


def _cure(details: Mapping[str, Any]) -> str:
    """A statement to run is only of use as it is: where it holds what may not be said, the command line says it."""
    cure = details.get("cure")
    return f"{cure}; " if isinstance(cure, str) and cure and cure == plain(cure) else ""


def _at(details: Mapping[str, Any], at: Any) -> str:
    """In UTC, and on the clock of the job's zone where the details name one; what is no time, as somebody's text."""
    if at is None:
        return "?"
    try:
        moment = at if isinstance(at, datetime) else datetime.fromisoformat(at)
        shown = f"{moment.astimezone(timezone.utc):%Y-%m-%d %H:%M}Z"
    except (TypeError, ValueError, OverflowError):
        return plain(str(at))
    zone = details.get("timezone")
    if zone in (None, "UTC"):
        return shown
    try:
        return f"{shown} ({moment.astimezone(ZoneInfo(zone)):%Y-%m-%d %H:%M} in {zone})"
    except (ZoneInfoNotFoundError, TypeError, ValueError, OSError):  # its data may be newer where the job runs
        return shown


@dataclass(frozen=True)
class _Words:
    """How a kind is said. `wrong`: what is wrong; `over`: that it is not so any more; `was`: that it was, from some
    time to another; `cure`: what to do."""

    wrong: Callable[[Mapping[str, Any]], str]
    over: str
    was: str
    cure: str


def _absence(details: Mapping[str, Any]) -> str:
    last = details.get("last_success_at")
    since = "no success yet" if last is None else f"no success since {_at(details, last)}"
    return f"{since}; tick {_at(details, details.get('tick'))} is overdue"


def _failures(details: Mapping[str, Any]) -> str:
    last, ticks = details.get("last_success_at"), _count(details, "failures", "tick")
    return f"{ticks} in a row failed; {'no success yet' if last is None else f'last success {_at(details, last)}'}"


def _count(details: Mapping[str, Any], name: str, noun: str) -> str:
    count = details.get(name)
    return counted(count if isinstance(count, int) else 0, noun)


_WORDS: Mapping[Kind, _Words] = {
    Kind.ABSENCE: _Words(
        _absence,
        "is on time again",
        "it was overdue",
        "see `gaffer status {name}` and `gaffer ticks {name}`; is Dagster's daemon alive?",
    ),
    Kind.FAILURES: _Words(_failures, "works again", "it kept failing", "see the errors with `gaffer runs {name}`"),
    Kind.CAPPED: _Words(
        lambda details: f"{_count(details, 'runs', 'run')} in a row stopped at their bounds with something left",
        "gets through what is due again",
        "it fell short",
        "see `gaffer runs {name}`; give it larger Bounds, or run it more often",
    ),
    Kind.BACKLOG: _Words(
        lambda details: f"what was due at {_at(details, details.get('due_since'))} is still not done",
        "has caught up",
        "it was behind",
        "see `gaffer status {name}` and `gaffer runs {name}`",
    ),
    Kind.STALLED: _Words(
        lambda details: (
            f"since {_at(details, details.get('held_since'))} what is new waits for a transaction that is open "
            "elsewhere"
        ),
        "waits for no transaction any more",
        "it waited too long",
        "nothing is lost: what is new waits until that transaction ends; `gaffer status {name}` says how to end it",
    ),
    Kind.PARKED: _Words(
        lambda details: (
            f"{_count(details, 'rows', 'row')} failed too often and {'was' if details.get('rows') == 1 else 'were'} "
            "given up"
        ),
        "has no parked rows any more",
        "it had some",
        "see `gaffer items list {name}`; mend the rows, then `gaffer items retry {name} --parked`",
    ),
    Kind.TAKEOVERS: _Words(
        lambda details: f"{_count(details, 'runs', 'run')} within a day were found dead, or lost their lease",
        "keeps its lease again",
        "it lost too many runs",
        "see `gaffer runs {name}`; look for workers that are killed (memory) or stand still",
    ),
    Kind.PAUSE: _Words(
        lambda details: f"has been paused, without an end, since {_at(details, details.get('paused_at'))}",
        "is not forgotten in a pause any more",
        "it was",
        "`gaffer resume {name}`, or give the pause an end with `gaffer pause {name} --until`",
    ),
    Kind.VANISHED: _Words(
        lambda _: "the code location that defined it does not define it any more",
        "is defined again",
        "nobody defined it",
        "put it back, or `gaffer retire {name}` if it is not meant to run any more",
    ),
    Kind.VERSIONS: _Words(
        lambda _: (
            "two versions of it (its schedule or definition, its code, or its zone's data) take turns, and what is due "
            "is shared out between them"
        ),
        "is defined by one version again",
        "two took turns",
        "`gaffer status {name}` has who ran each of them last: bring the two places that register it to one version, "
        "or give one of the two jobs another name; a value in its function's module that comes from the environment "
        "makes two versions, too",
    ),
    Kind.WATCH: _Words(
        lambda details: f"has not looked since {_at(details, details.get('last_pass_at'))}",
        "looks again",
        "it was silent",
        "start it again, or retire it (`gaffer retire`) if it is not meant to look any more",
    ),
}


# ── many notices ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _group(key: str, notices: Sequence[Notice]) -> Message:
    wrong = [each for each in notices if each.event is not Event.RESOLVED]
    severity = Severity.ERROR if any(each.alert.severity is Severity.ERROR for each in wrong) else Severity.WARNING
    said = {Event.OPENED: "opened", Event.REMINDED: "still open", Event.RESOLVED: "resolved"}
    counts = {event: Counter(str(each.alert.kind) for each in notices if each.event == event) for event in said}
    title = f"[{severity if wrong else 'resolved'}] gaffer: " + ", ".join(
        f"{counted(kinds.total(), 'incident')} {said[event]}" for event, kinds in counts.items() if kinds
    )
    lines = [
        f"{said[event]}: ".capitalize() + ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        for event, kinds in counts.items()
        if kinds
    ]
    names = list(dict.fromkeys(_name(each.alert) for each in notices))
    named = set(names[:_MOST_JOBS])
    shown = [each for each in notices if _name(each.alert) in named]
    lines += [f"- {_title(each)}" for each in shown]
    if len(names) > _MOST_JOBS:
        lines.append(f"… and {len(notices) - len(shown)} more, of {len(names) - _MOST_JOBS} other jobs")
    text = "\n".join([title, *lines, "What to do: see `gaffer status` and `gaffer alerts list`", f"Key: {key}"])
    payload = {
        "version": VERSION,
        "event": "grouped",
        "key": key,
        "severity": str(severity),
        "counts": {event: dict(kinds) for event, kinds in counts.items() if kinds},
        "title": title,
        "text": text,
        "notices": [_said(each) for each in notices],
    }
    return Message(key, title, text, severity, not wrong, payload)


# ── what others wrote ────────────────────────────────────────────────────────────────────────────────────────────────

_HARMLESS = str.maketrans({"<": "‹", ">": "›", "@": "＠", "[": "(", "]": ")", "`": "'", "|": "¦", "\\": "⧵", "&": "＆"})


def plain(text: str) -> str:
    """`text` on one line, of 200 characters at most, of which no receiver's markup can make a link, a mention or
    anything else: without control, bidi and invisible characters, and with look-alikes of those that mean something
    to Slack, HTML or Markdown, or in an address."""
    seen = "".join(
        "" if unicodedata.category(char) == "Cf" else char if char.isprintable() else " " for char in text
    ).translate(_HARMLESS)
    seen = re.sub(r"\.(?=\w)", "\N{ONE DOT LEADER}", seen.replace("://", ": //"))
    seen = " ".join(seen.split())
    return seen if len(seen) <= _MOST_TEXT else seen[: _MOST_TEXT - 1] + "…"


def _bare(name: str, value: Any) -> Any:
    """A detail as it may be said: what is neither a time nor a zone is somebody's text."""
    if isinstance(value, list):
        return [_bare(name, each) for each in cast("list[Any]", value)]
    if isinstance(value, dict):
        return {plain(each): _bare(each, of) for each, of in cast("dict[str, Any]", value).items()}
    if not isinstance(value, str) or name == "timezone":
        return value
    try:
        return datetime.fromisoformat(value).isoformat()
    except ValueError:
        return plain(value)
