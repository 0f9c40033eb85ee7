"""One pass of the watch: what is wrong is read, judged and noted, in one transaction.

The same pass runs in Dagster's sensor, in `gaffer check --notify` and in `gaffer watch`. A pass that finds another one
going on leaves it to that; one that goes on for longer than a pass takes is a problem. What it opened, reminded of or
resolved is then delivered (`engine/deliver.py`), also by whoever passes next.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from gaffer_dagster.domain.incident import Alert, Finding, Watch, Watched, findings, judge, silent
from gaffer_dagster.engine import heartbeat
from gaffer_dagster.engine.deliver import deliver
from gaffer_dagster.engine.log import Log
from gaffer_dagster.engine.receivers import Unusable, receivers_from
from gaffer_dagster.errors import GafferError, WatchHeldError
from gaffer_dagster.store import alerts, db, deliveries, horizon

HEARTBEAT = "GAFFER_HEARTBEAT_URL"


@dataclass(frozen=True)
class Watcher:
    """Who looks. `every`: how often it means to (None: it does not say); `jobs`: those defined where it looks."""

    name: str
    every: timedelta | None = None
    jobs: Sequence[str] = ()


@dataclass(frozen=True)
class Report:
    """What a pass found. `changed`: the incidents that it opened, reminded of or resolved; `problems`: what it could
    not judge, as instructions."""

    at: datetime
    findings: Sequence[Finding]
    watches: Sequence[Watch]
    problems: Sequence[str]
    changed: Sequence[Alert] = ()


def look(connection: db.Connection, watcher: Watcher) -> Report | None:
    """A pass. None: another one is going on. Raises `WatchHeldError`."""
    with db.impatient(connection):
        now = alerts.begin_pass(connection, watcher.name, watcher.every, watcher.jobs)
        if now is None:
            return None
        jobs, report = _find(connection, now)
        steps = list(judge(report.findings, alerts.opened(connection), jobs, now))
        changed = alerts.note(connection, now, steps)
    return replace(report, changed=changed)


def examine(connection: db.Connection) -> Report:
    """What a pass would find; leaves no trace."""
    with db.impatient(connection):
        report = _find(connection, horizon.now(connection))[1]
        return replace(report, problems=[*report.problems, *deliveries.failing(connection)])


def examine_job(connection: db.Connection, job: str) -> Sequence[Finding]:
    """What a pass would find of this job; leaves no trace."""
    with db.impatient(connection):
        now, gaps = horizon.now(connection), alerts.gaps(connection)
        return [found for each in alerts.watched(connection, now, job) for found in findings(each, now, gaps)]


def _find(connection: db.Connection, now: datetime) -> tuple[dict[str, Watched], Report]:
    """The jobs that were judged, and what is wrong."""
    gaps = alerts.gaps(connection)
    watches = alerts.watches(connection)
    jobs: dict[str, Watched] = {}
    found: list[Finding] = []
    problems: list[str] = []
    for each in alerts.watched(connection, now):
        try:
            found += findings(each, now, gaps)
        # A newer version wrote it, or who else may; the others are judged all the same.
        except (GafferError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            why = str(error) if isinstance(error, GafferError) else db.primary_message(error)
            problems.append(f"job {each.job!r} cannot be judged here: {why}")
        else:
            jobs[each.job] = each
    found += [finding for watch in watches if (finding := silent(watch, now)) is not None]
    return jobs, Report(now, found, watches, problems)


@dataclass(frozen=True)
class Attended:
    """What became of a pass. `report`: None where another pass was going on. `problems`: why nobody could look, or
    a receiver is not told, as instructions."""

    report: Report | None
    sent: int
    problems: Sequence[str]


def attend(connection: db.Connection, watcher: Watcher, environment: Mapping[str, str], log: Log) -> Attended:
    """A pass, and what follows from it: the notices are sent (also those that others have left), and heartbeats."""
    try:
        report, held = look(connection, watcher), None
    except WatchHeldError as error:
        report, held = None, str(error)
        log.error("not looked", why=held)
    attended = speak(connection, report, environment, log)
    if report is not None:
        heartbeat.beat(HEARTBEAT, environment, log)
    return attended if held is None else replace(attended, problems=[held, *attended.problems])


def speak(
    connection: db.Connection,
    report: Report | None,
    environment: Mapping[str, str],
    log: Log,
    *,
    budget: timedelta = timedelta(seconds=30),
) -> Attended:
    """What follows from a pass, but for the watch's own heartbeat. The last of what is sent may outlast the budget."""
    ends = time.monotonic() + budget.total_seconds()
    receivers = receivers_from(environment, log)
    delivered = deliver(connection, receivers, log, budget=2 * budget / 3)
    problems = list(() if report is None else report.problems)
    problems += [each.reason for each in receivers if isinstance(each, Unusable)]
    problems += deliveries.failing(connection) + deliveries.unserved(connection)
    if report is not None:
        left = timedelta(seconds=max(0.0, ends - time.monotonic()))
        heartbeat.beat_for_jobs(connection, environment, log, budget=left)
    for problem in problems:
        log.error("not told", why=problem)
    return Attended(report, delivered.sent, problems)
