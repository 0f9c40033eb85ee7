"""One pass of the watch: what is wrong is read, judged and noted, in one transaction.

The same pass runs in Dagster's sensor, in `gaffer check --notify` and in `gaffer watch`. A pass that finds another one
going on leaves it to that. What it opened, reminded of or resolved is then delivered (`engine/deliver.py`), also by
whoever passes next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from gaffer_dagster.domain.incident import Alert, Finding, Stretch, Watch, Watched, findings, judge, silent
from gaffer_dagster.store import alerts, db, horizon


@dataclass(frozen=True)
class Watcher:
    """Who looks. `every`: how often it means to (None: it does not say); `jobs`: those defined where it looks."""

    name: str
    every: timedelta | None = None
    jobs: Sequence[str] = ()


@dataclass(frozen=True)
class Report:
    """What a pass found. `changed`: the incidents that it opened, reminded of or resolved."""

    at: datetime
    findings: Sequence[Finding]
    watches: Sequence[Watch]
    changed: Sequence[Alert] = field(default=())


def look(connection: db.Connection, watcher: Watcher) -> Report | None:
    """A pass. None: another one is going on."""
    with db.impatient(connection):
        now = alerts.begin_pass(connection, watcher.name, watcher.every, watcher.jobs)
        if now is None:
            return None
        jobs, report = _find(connection, now)
        steps = list(judge(report.findings, alerts.opened(connection), jobs, now))
        changed = alerts.note(connection, now, steps)
    return Report(now, report.findings, report.watches, changed)


def examine(connection: db.Connection) -> Report:
    """What a pass would find; leaves no trace."""
    with db.impatient(connection):
        return _find(connection, horizon.now(connection))[1]


def _find(connection: db.Connection, now: datetime) -> tuple[dict[str, Watched], Report]:
    gaps: list[Stretch] = alerts.gaps(connection)
    watches = alerts.watches(connection)
    jobs = {each.job: each for each in alerts.watched(connection, now)}
    found = [finding for each in jobs.values() for finding in findings(each, now, gaps)]
    found += [finding for watch in watches if (finding := silent(watch, now)) is not None]
    return jobs, Report(now, found, watches)
