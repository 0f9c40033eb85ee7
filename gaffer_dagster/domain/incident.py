"""What is wrong with a job, and since when: the rules of alerts, as pure functions of the job's row.

Each rule gives the instant from which it has been true without a break, as somebody would have seen it who never looks
away; so it does not matter who looks, how often, or whether the one who looks was down meanwhile. `judge` says what to
open, remind of and resolve. The schedule is the job's own; a watch has none.

Absence: the earliest tick that is not covered, and that no pause skipped (one that was skipped as late counts), has its
grace behind it. Its grace stands still in a pause that began after the tick; begins anew, once, after a stretch in
which nobody looked (the database was away, most likely); ends no earlier than the last change of the job's rules; and
is followed by the run's own timeout if a run was at work when it ended, until that run ends without having covered the
tick.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from enum import Enum
from functools import cached_property
from typing import Any
from uuid import UUID

from gaffer_dagster.domain.alert import Alerts, Kind, Severity
from gaffer_dagster.domain.duration import as_duration
from gaffer_dagster.domain.ledger import Pause, open_tick
from gaffer_dagster.domain.schedule import Schedule
from gaffer_dagster.domain.spec import schedule_from_json

_DAY, _HOUR = timedelta(days=1), timedelta(hours=1)
_SILENT = timedelta(minutes=5)
_UNSEEN = timedelta(minutes=1)
# Two deployments of one name, an old and a new one say, take turns to look: what only one of them defines is there.
_VANISHED = timedelta(minutes=2)
_FAR = datetime(9000, 1, 1, tzinfo=timezone.utc)


@dataclass(frozen=True)
class Stretch:
    """`[since, until)`."""

    since: datetime
    until: datetime


@dataclass(frozen=True)
class Watched:
    """A job's row and lease as far as the rules read them (gaffer.job tells what each is). `row` names its version;
    `held_until`: of a lease that was not given back; `at_work_since`: when the run that has it began."""

    job: str
    row: str
    spec: Mapping[str, Any]
    grace: timedelta
    first_seen_at: datetime
    rules_at: datetime
    paused_at: datetime | None = None
    paused_until: datetime | None = None
    paused_by: str | None = None
    pause_reason: str | None = None
    next_due_at: datetime | None = None
    late_tick: datetime | None = None
    paused: Sequence[Stretch] = ()
    worked: Sequence[Stretch] = ()
    at_work_since: datetime | None = None
    held_until: datetime | None = None
    last_success_at: datetime | None = None
    consecutive_failures: int = 0
    failed_at: Sequence[datetime] = ()
    consecutive_capped: int = 0
    capped_at: Sequence[datetime] = ()
    due_since: datetime | None = None
    held_since: datetime | None = None
    held_by: str | None = None
    held_by_since: datetime | None = None
    held_cure: str | None = None
    parked: int = 0
    parked_at: datetime | None = None
    taken_over_at: Sequence[datetime] = ()
    returned_at: Sequence[datetime] = ()
    vanished_at: datetime | None = None
    retired_at: datetime | None = None

    @cached_property
    def schedule(self) -> Schedule | None:
        return schedule_from_json(self.spec["schedule"])

    @cached_property
    def alerts(self) -> Alerts:
        return Alerts.from_json(self.spec["alerts"])

    @property
    def timeout(self) -> timedelta:
        return as_duration(self.spec["bounds"]["timeout"], f"job {self.job!r}: timeout")

    @property
    def pause(self) -> Pause | None:
        return None if self.paused_at is None else Pause(self.paused_at, self.paused_until)

    @property
    def tick(self) -> datetime | None:
        """The earliest tick that a success is waited for."""
        tick = self.late_tick or self.next_due_at
        # A schedule takes long to read.
        return tick if self.pause is None else open_tick(tick, self.schedule, self.pause)


@dataclass(frozen=True)
class Watch:
    """Somebody who looks. `every`: how often it means to; None: it does not say."""

    name: str
    every: timedelta | None
    last_pass_at: datetime

    @property
    def silent_at(self) -> datetime | None:
        """When it has been silent for too long, if it does not look again before."""
        return None if self.every is None else self.last_pass_at + max(_SILENT, 3 * self.every)


def unseen(every: timedelta) -> timedelta:
    """After how long without a pass somebody who means to look so often calls it a stretch in which nobody looked, as
    gaffer.begin_pass has it. Less than a watch may be silent: a short outage must be told from a job that is late."""
    return max(_UNSEEN, 3 * every)


@dataclass(frozen=True)
class Finding:
    """Something that is wrong with a job, or with a watch (`job` is then None)."""

    kind: Kind
    since: datetime
    details: Mapping[str, Any]
    job: str | None = None
    watch: str | None = None
    row: str | None = None

    @property
    def severity(self) -> Severity:
        return self.kind.severity


def findings(watched: Watched, now: datetime, gaps: Sequence[Stretch] = ()) -> Iterator[Finding]:
    """Everything that is wrong with the job at `now`. `gaps`: the stretches in which nobody looked, in order."""
    if watched.retired_at is not None:
        return
    alerts, rules_at = watched.alerts, watched.rules_at
    rules = {
        Kind.ABSENCE: _absence(watched, now, gaps),
        Kind.FAILURES: _reached(watched.failed_at, alerts.failures, rules_at),
        Kind.CAPPED: _reached(watched.capped_at, alerts.capped, rules_at),
        Kind.BACKLOG: _after(watched.due_since, alerts.backlog, rules_at),
        Kind.STALLED: _after(watched.held_since, alerts.stalled, rules_at),
        Kind.PARKED: watched.parked_at if watched.parked else None,
        Kind.TAKEOVERS: _after(_crowded(watched.taken_over_at, alerts.takeovers, _DAY, now), timedelta(), rules_at),
        Kind.PAUSE: _after(watched.paused_at, alerts.pause, rules_at) if watched.paused_until is None else None,
        Kind.VANISHED: None if watched.vanished_at is None else watched.vanished_at + _VANISHED,
        Kind.VERSIONS: _crowded(watched.returned_at, 2, _HOUR, now),
    }
    for kind, since in rules.items():
        if since is not None and since <= now:
            yield Finding(kind, since, _details(kind, watched, now), job=watched.job, row=watched.row)


def silent(watch: Watch, now: datetime) -> Finding | None:
    """Whether a watch has stopped."""
    since = watch.silent_at
    if since is None or since > now:
        return None
    return Finding(Kind.WATCH, since, {"last_pass_at": _text(watch.last_pass_at)}, watch=watch.name)


# ── absence ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _absence(watched: Watched, now: datetime, gaps: Sequence[Stretch]) -> datetime | None:
    tick = watched.tick
    if tick is None:
        return None
    deadline = _deadline(watched, tick, now, gaps)
    runs = list(watched.worked)
    if watched.at_work_since is not None and watched.held_until is not None:
        runs.append(Stretch(watched.at_work_since, _FAR if watched.held_until > now else watched.held_until))
    ends = [run.until for run in runs if run.since <= deadline < run.until]
    return min(deadline + watched.timeout, max(ends)) if ends else deadline


def _deadline(watched: Watched, tick: datetime, now: datetime, gaps: Sequence[Stretch]) -> datetime:
    """When the grace of the tick ends."""
    grace = watched.grace
    pauses = list(watched.paused)
    if watched.pause is not None:
        pauses.append(Stretch(watched.pause.since, min(now, watched.pause.until or now)))
    deadline = tick + grace
    for pause in pauses:
        if tick < pause.since < deadline:
            deadline += pause.until - pause.since
    # One that ends in the future was noted by a clock that ran ahead for a while.
    gap = next((gap for gap in gaps if gap.since < deadline and tick < gap.until <= now), None)
    if gap is not None:
        deadline = max(deadline, gap.until + grace)
    return max(deadline, watched.rules_at)


# ── the others ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _reached(times: Sequence[datetime], count: int, rules_at: datetime) -> datetime | None:
    return max(times[count - 1], rules_at) if len(times) >= count else None


def _after(since: datetime | None, limit: timedelta | None, rules_at: datetime) -> datetime | None:
    return None if since is None or limit is None else max(since + limit, rules_at)


def _crowded(times: Sequence[datetime], count: int, within: timedelta, now: datetime) -> datetime | None:
    """Since when there have been `count` of the times within the last `within`, without a break up to now."""
    began = ended = None
    for first, last in zip(times, times[count - 1 :], strict=False):
        if last - first < within:
            began = last if ended is None or last > ended else began
            ended = first + within
    return began if ended is not None and ended > now else None


def _details(kind: Kind, watched: Watched, now: datetime) -> Mapping[str, Any]:
    """What there is to say of it: facts, which a notice puts into words."""
    last_success_at = _text(watched.last_success_at)
    if kind is Kind.ABSENCE:
        stored = watched.spec["schedule"]
        zone = None if stored is None else stored["timezone"]
        return {"tick": _text(watched.tick), "timezone": zone, "last_success_at": last_success_at}
    if kind is Kind.FAILURES:
        return {"failures": watched.consecutive_failures, "last_success_at": last_success_at}
    if kind is Kind.CAPPED:
        return {"runs": watched.consecutive_capped, "due_since": _text(watched.due_since)}
    if kind is Kind.BACKLOG:
        return {"due_since": _text(watched.due_since)}
    if kind is Kind.STALLED:
        return {
            "held_since": _text(watched.held_since),
            "held_by": watched.held_by,
            "held_by_since": _text(watched.held_by_since),
            "cure": watched.held_cure,
        }
    if kind is Kind.PARKED:
        return {"rows": watched.parked}
    if kind is Kind.TAKEOVERS:
        return {"runs": sum(now - _DAY < at <= now for at in watched.taken_over_at)}
    if kind is Kind.PAUSE:
        return {"paused_at": _text(watched.paused_at), "by": watched.paused_by, "reason": watched.pause_reason}
    return {}


def _text(at: datetime | None) -> str | None:
    return None if at is None else at.isoformat()


# ── incidents ────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Alert:
    """A row of `gaffer.alert`: an incident. `since`: when it became true; `opened_at`: when that was seen."""

    id: int
    key: UUID
    job: str | None
    watch: str | None
    kind: Kind
    severity: Severity
    since_at: datetime
    opened_at: datetime
    details: Mapping[str, Any]
    reminders: int
    reminded_at: datetime | None
    acked_at: datetime | None
    acked_by: str | None
    ack_reason: str | None
    resolved_at: datetime | None

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", Kind(self.kind))  # the database has them as text
        object.__setattr__(self, "severity", Severity(self.severity))

    @property
    def of(self) -> tuple[str | None, str | None, Kind]:
        return self.job, self.watch, self.kind


class Verb(str, Enum):
    OPEN = "open"
    REMIND = "remind"
    UPDATE = "update"
    RESOLVE = "resolve"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Step:
    """What is to be done about an incident. `row`: the version of the job's row that this was judged by."""

    verb: Verb
    alert: int | None
    job: str | None
    watch: str | None
    row: str | None
    kind: Kind
    since: datetime
    details: Mapping[str, Any]


def judge(
    found: Iterable[Finding], opened: Iterable[Alert], jobs: Mapping[str, Watched], now: datetime
) -> Iterator[Step]:
    """What to open, remind of and resolve, where all that is wrong is `found` and these incidents are open; and of
    which to say something else."""
    wrong = {(each.job, each.watch, each.kind): each for each in found}
    for alert in opened:
        each = wrong.pop(alert.of, None)
        job = None if alert.job is None else jobs.get(alert.job)
        if alert.job is not None and job is None:
            continue  # not looked at this time
        row = None if job is None else job.row
        if each is None:
            details = {**alert.details, "over": str(_over(alert, job))}
            yield Step(Verb.RESOLVE, alert.id, alert.job, alert.watch, row, alert.kind, alert.since_at, details)
        elif _wants_reminder(alert, job, now):
            yield Step(Verb.REMIND, alert.id, alert.job, alert.watch, row, alert.kind, alert.since_at, each.details)
        elif each.details != alert.details:
            yield Step(Verb.UPDATE, alert.id, alert.job, alert.watch, row, alert.kind, alert.since_at, each.details)
    for each in wrong.values():
        yield Step(Verb.OPEN, None, each.job, each.watch, each.row, each.kind, each.since, each.details)


class Over(str, Enum):
    """Why an incident is over: it need not be that all is well."""

    RECOVERED = "recovered"
    CHANGED = "changed"
    """What is wrong is not called so any more: the job's rules were changed, or its ticks skipped."""
    RETIRED = "retired"

    def __str__(self) -> str:
        return self.value


def _over(alert: Alert, job: Watched | None) -> Over:
    if job is None:
        return Over.RECOVERED
    if job.retired_at is not None:
        return Over.RETIRED
    still = {
        Kind.ABSENCE: job.last_success_at is None or job.last_success_at < alert.since_at,
        Kind.FAILURES: job.consecutive_failures > 0,
        Kind.CAPPED: job.consecutive_capped > 0,
        Kind.BACKLOG: job.due_since is not None and job.due_since < alert.since_at,
        Kind.STALLED: job.held_since is not None and job.held_since < alert.since_at,
        Kind.PAUSE: job.paused_at is not None,
    }
    return Over.CHANGED if still.get(alert.kind, False) else Over.RECOVERED


def _wants_reminder(alert: Alert, job: Watched | None, now: datetime) -> bool:
    if alert.acked_at is not None:
        return False
    if job is not None and job.pause is not None and job.pause.holds(now) and alert.kind is not Kind.PAUSE:
        return False
    every = _DAY if job is None else job.alerts.remind
    return now - (alert.reminded_at or alert.opened_at) >= every
