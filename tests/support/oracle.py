"""What is wrong with jobs, told from all that ever happened to them: slow, and plain enough to be believed.

It shares nothing with the rules that it judges (`domain/incident.py` and the SQL that feeds them) but what a job is:
its `JobSpec` and the ticks of its `Schedule`. It keeps every event for ever, and answers each question from the start
of time on. A test tells it what happens as it happens; `World.look` says which incidents a pass must leave open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import lru_cache

from gaffer_dagster.domain.alert import Kind
from gaffer_dagster.domain.run import Outcome
from gaffer_dagster.domain.schedule import Schedule
from gaffer_dagster.domain.spec import JobSpec

Subject = tuple[str, str]
"""`("job", name)` or `("watch", name)`."""

_MINUTE, _HOUR, _DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
_DONE = (Outcome.SUCCEEDED, Outcome.PARTIAL)
_WORKED = (*_DONE, Outcome.CAPPED)


# ── what happened ────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Version:
    """A registration that changed something. `name`: what tells this definition from others."""

    at: datetime
    spec: JobSpec
    name: str


@dataclass
class Pause:
    """In force in `[at, end)`, as far as is known. `cut_at`: resumed, or replaced by another one."""

    at: datetime
    until: datetime | None
    cut_at: datetime | None = None

    @property
    def end(self) -> datetime | None:
        ends = [end for end in (self.until, self.cut_at) if end is not None]
        return min(ends, default=None)

    def holds(self, at: datetime) -> bool:
        return self.at <= at and (self.end is None or at < self.end)


@dataclass
class Run:
    """A run that got the lease (or was refused outright: `ended_at` is then `started_at`).

    `dies_at`: when its lease runs out, if its process is gone; `found_dead_at`: when another run took over.
    `covers`: ticks up to there are covered by it. `passes_before`: how many passes there had been when it ended.
    """

    started_at: datetime
    trigger: str = "schedule"
    tick: datetime | None = None
    ended_at: datetime | None = None
    outcome: Outcome | None = None
    covers: datetime | None = None
    oldest_due_at: datetime | None = None
    held_by: str | None = None
    parked: int = 0
    dies_at: datetime | None = None
    found_dead_at: datetime | None = None
    passes_before: int | None = None

    @property
    def counts(self) -> bool:
        """What it leaves at the job. A redo leaves nothing."""
        return self.trigger != "redo"

    @property
    def over_at(self) -> datetime | None:
        """When the others learn how it ended."""
        return self.ended_at or self.found_dead_at

    def at_work_until(self, now: datetime) -> datetime | None:
        """None: it still is."""
        if self.ended_at is not None:
            return self.ended_at
        ends = [end for end in (self.dies_at, self.found_dead_at) if end is not None and end <= now]
        return min(ends, default=None)


@dataclass(frozen=True)
class Pass:
    """That a watch looked, with what it said of itself."""

    at: datetime
    watch: str
    every: timedelta | None
    jobs: frozenset[str]


# ── one job ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Job:
    """All that ever happened to a job, in the order in which it happened. `over`: the runs whose end is known and which
    count."""

    name: str
    versions: list[Version] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    over: list[Run] = field(default_factory=list)
    pauses: list[Pause] = field(default_factory=list)
    retired_at: datetime | None = None

    @property
    def spec(self) -> JobSpec:
        return self.versions[-1].spec

    @property
    def rules_at(self) -> datetime:
        """The last time that something other than what is due for it was changed."""
        at = self.versions[0].at
        for before, after in zip(self.versions, self.versions[1:], strict=False):
            if _rules(before.spec) != _rules(after.spec):
                at = after.at
        return at

    def is_paused(self, at: datetime) -> bool:
        return any(pause.holds(at) for pause in self.pauses)

    # ── absence ──

    def ticks(self, now: datetime) -> list[datetime]:
        """Every tick up to now of the schedules that the job went by, each while it did."""
        found: set[datetime] = set()
        for number, version in enumerate(self.versions):
            until = self.versions[number + 1].at if number + 1 < len(self.versions) else now
            since = version.at
            if number and any(version.spec.hash == before.spec.hash for before in self.versions[:number]):
                replaced_at = self._replaced_at(number)
                if replaced_at > version.at - _HOUR:  # one of two that take turns: the ticks of both count
                    since = replaced_at
            if version.spec.schedule is not None:
                found.update(ticks_between(version.spec.schedule, since, until))
        return sorted(found)

    def _replaced_at(self, number: int) -> datetime:
        """When the spec that is replaced by this version had itself taken the place of another."""
        at = self.versions[0].at
        for before, after in zip(self.versions[:number], self.versions[1:number], strict=False):
            if before.spec.hash != after.spec.hash:
                at = after.at
        return at

    def waited_for(self, now: datetime) -> datetime | None:
        """The earliest tick that came, that no run has covered and no pause skipped."""
        if self.spec.schedule is None:
            return None
        covered = max((run.covers for run in self.runs if run.covers is not None), default=None)
        for tick in self.ticks(now):
            is_covered = covered is not None and tick <= covered
            if not is_covered and not any(pause.holds(tick) for pause in self.pauses):
                return tick
        return None

    def deadline(self, tick: datetime, gaps: Sequence[tuple[datetime, datetime]]) -> datetime | None:
        """When the grace of this tick is over. None: not before a pause is, whose end nobody knows."""
        grace = self.spec.alerts.grace_for(self.spec.schedule)
        deadline = tick + grace
        for pause in self.pauses:
            if tick < pause.at < deadline:
                if pause.end is None:
                    return None
                deadline += pause.end - pause.at
        for since, until in gaps:
            if since < deadline and tick < until:
                deadline = max(deadline, until + grace)
                break
        return max(deadline, self.rules_at)

    def absence(self, now: datetime, gaps: Sequence[tuple[datetime, datetime]]) -> datetime | None:
        tick = self.waited_for(now)
        if tick is None:
            return None
        deadline = self.deadline(tick, gaps)
        if deadline is None or deadline > now:
            return None
        for run in self.runs:
            end = run.at_work_until(now)
            if run.started_at <= deadline and (end is None or deadline < end):
                longest = deadline + self.spec.limits.timeout
                return longest if end is None else min(longest, end)
        return deadline

    # ── what runs left ──

    def failures(self) -> datetime | None:
        times: list[datetime] = []
        ticks: set[datetime] = set()
        for run in self.over:
            assert run.over_at is not None
            if run.outcome in _WORKED:
                times, ticks = [], set()
            elif run.outcome is not None and run.outcome.is_failure and (run.tick is None or run.tick not in ticks):
                times.append(run.over_at)
                ticks |= set() if run.tick is None else {run.tick}
        count = self.spec.alerts.failures
        return max(times[count - 1], self.rules_at) if len(times) >= count else None

    def capped(self) -> datetime | None:
        times: list[datetime] = []
        for run in self.over:
            assert run.over_at is not None
            if run.outcome is Outcome.CAPPED:
                times.append(run.over_at)
            elif run.outcome in _DONE:
                times = []
        count = self.spec.alerts.capped
        return max(times[count - 1], self.rules_at) if len(times) >= count else None

    def backlog(self) -> datetime | None:
        since: datetime | None = None
        for run in self.over:
            if run.outcome in _DONE:
                since = None
            elif run.outcome is Outcome.CAPPED:
                since = run.oldest_due_at or since or run.started_at
        limit = self.spec.alerts.backlog
        return None if since is None or limit is None else max(since + limit, self.rules_at)

    def stalled(self) -> datetime | None:
        since: datetime | None = None
        for run in self.over:
            if run.outcome in _WORKED:
                since = None if run.held_by is None else since or run.started_at
        return None if since is None else max(since + self.spec.alerts.stalled, self.rules_at)

    def parked(self) -> datetime | None:
        return min((run.over_at for run in self.runs if run.parked and run.over_at is not None), default=None)

    def takeovers(self, now: datetime) -> datetime | None:
        found = [run.found_dead_at for run in self.runs if run.counts and run.found_dead_at is not None]
        since = crowded_since(found, self.spec.alerts.takeovers, _DAY, now)
        return None if since is None else max(since, self.rules_at)

    def versions_disagree(self, now: datetime) -> datetime | None:
        names = [version.name for version in self.versions]
        returned = [
            version.at
            for number, version in enumerate(self.versions)
            if number >= 2 and names[number] == names[number - 2]
        ]
        return crowded_since(returned, 2, _HOUR, now)

    def forgotten(self, now: datetime) -> datetime | None:
        for pause in self.pauses:
            if pause.until is None and pause.holds(now):
                return max(pause.at + self.spec.alerts.pause, self.rules_at)
        return None

    def truth(self, now: datetime, gaps: Sequence[tuple[datetime, datetime]]) -> Iterator[tuple[Kind, datetime]]:
        """What is wrong now, and since when; but for what only the watches can tell."""
        if self.retired_at is not None or not self.versions:
            return
        rules: list[tuple[Kind, Callable[[], datetime | None]]] = [
            (Kind.ABSENCE, lambda: self.absence(now, gaps)),
            (Kind.FAILURES, self.failures),
            (Kind.CAPPED, self.capped),
            (Kind.BACKLOG, self.backlog),
            (Kind.STALLED, self.stalled),
            (Kind.PARKED, self.parked),
            (Kind.TAKEOVERS, lambda: self.takeovers(now)),
            (Kind.VERSIONS, lambda: self.versions_disagree(now)),
            (Kind.PAUSE, lambda: self.forgotten(now)),
        ]
        for kind, rule in rules:
            since = rule()
            if since is not None and since <= now:
                yield kind, since


def ticks_between(schedule: Schedule, since: datetime, until: datetime) -> Iterator[datetime]:
    """Those in `(since, until]`."""
    day = since.replace(hour=0, minute=0, second=0, microsecond=0)
    while day <= until:
        yield from (tick for tick in _ticks_of_day(schedule, day) if since < tick <= until)
        day += _DAY


@lru_cache(maxsize=100_000)
def _ticks_of_day(schedule: Schedule, day: datetime) -> tuple[datetime, ...]:
    instant = timedelta(microseconds=1)
    return tuple(schedule.ticks(day - instant, day + _DAY - instant))


@lru_cache(maxsize=10_000)
def _rules(spec: JobSpec) -> dict[str, object]:
    return {key: value for key, value in spec.as_json().items() if key != "due"}


def crowded_since(times: Sequence[datetime], count: int, within: timedelta, now: datetime) -> datetime | None:
    """Since when there have been, at each instant, so many of these times in the stretch that ends with it (and that
    does not take in its own start). None: there are not now."""
    since: datetime | None = None
    for at in sorted({change for time in times for change in (time, time + within) if change <= now}):
        if sum(1 for time in times if at - within < time <= at) < count:
            since = None
        elif since is None:
            since = at
    return since


# ── all jobs, and who looks at them ──────────────────────────────────────────────────────────────────────────────────


@dataclass
class Incident:
    """As a pass must have noted it."""

    subject: Subject
    kind: Kind
    since_at: datetime
    opened_at: datetime
    resolved_at: datetime | None = None
    reminders: int = 0
    reminded_at: datetime | None = None
    acked_at: datetime | None = None


@dataclass
class World:
    jobs: dict[str, Job] = field(default_factory=dict)
    passes: list[Pass] = field(default_factory=list)
    incidents: list[Incident] = field(default_factory=list)
    truth: dict[tuple[Subject, Kind], datetime] = field(default_factory=dict)
    """What was wrong at the last pass, and since when."""
    _lists: list[tuple[int, Pass]] = field(default_factory=list)

    def look(self, watch: str, at: datetime, every: timedelta | None, jobs: Iterable[str]) -> list[Incident]:
        """A pass: what is open once it is over."""
        seen = Pass(at, watch, every, frozenset(jobs))
        last = [each for each in self.passes if each.watch == watch][-1:]
        if not last or last[0].jobs != seen.jobs:  # one that says the same as before makes none appear or vanish
            self._lists.append((len(self.passes), seen))
        self.passes.append(seen)
        truth = self.truth = self._truth(at)
        for incident in self.opened:
            if (incident.subject, incident.kind) not in truth:
                incident.resolved_at = at
            elif self._wants_reminder(incident, at):
                incident.reminders += 1
                incident.reminded_at = at
        known = {(incident.subject, incident.kind) for incident in self.opened}
        for (subject, kind), since in truth.items():
            if (subject, kind) not in known:
                self.incidents.append(Incident(subject, kind, since, at))
        return self.opened

    @property
    def opened(self) -> list[Incident]:
        return [incident for incident in self.incidents if incident.resolved_at is None]

    def _truth(self, now: datetime) -> dict[tuple[Subject, Kind], datetime]:
        found: dict[tuple[Subject, Kind], datetime] = {}
        gaps = list(self.gaps())
        for job in self.jobs.values():
            found.update({(("job", job.name), kind): since for kind, since in job.truth(now, gaps)})
            vanished_at = self.vanished_at(job)
            if vanished_at is not None and job.retired_at is None and vanished_at + 2 * _MINUTE <= now:
                found[("job", job.name), Kind.VANISHED] = vanished_at + 2 * _MINUTE
        for watch in {each.watch for each in self.passes}:
            last = [each for each in self.passes if each.watch == watch][-1]
            if last.every is not None and last.at + patience(last.every) <= now:
                found[("watch", watch), Kind.WATCH] = last.at + patience(last.every)
        return found

    def gaps(self) -> Iterator[tuple[datetime, datetime]]:
        """From one pass to the next, where the one that comes next says that this is too long."""
        for before, after in zip(self.passes, self.passes[1:], strict=False):
            if after.every is not None and after.at - before.at > max(_MINUTE, 3 * after.every):
                yield before.at, after.at

    def vanished_at(self, job: Job) -> datetime | None:
        lists: dict[str, bool] = {}  # who listed it when they looked last
        at: datetime | None = None
        worked = [run.passes_before for run in job.runs if run.counts and run.outcome in _WORKED]
        for number, seen in self._lists:
            before, lists[seen.watch] = lists.get(seen.watch, False), job.name in seen.jobs
            if lists[seen.watch]:
                at = None
            elif before and not any(lists.values()):
                at = None if any(later is not None and later > number for later in worked) else seen.at
        return at

    def _wants_reminder(self, incident: Incident, at: datetime) -> bool:
        kind, name = incident.subject
        remind = _DAY if kind == "watch" else self.jobs[name].spec.alerts.remind
        paused = kind == "job" and incident.kind is not Kind.PAUSE and self.jobs[name].is_paused(at)
        return incident.acked_at is None and not paused and at >= (incident.reminded_at or incident.opened_at) + remind


def patience(every: timedelta) -> timedelta:
    return max(5 * _MINUTE, 3 * every)
