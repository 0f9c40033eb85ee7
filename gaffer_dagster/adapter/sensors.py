"""The one sensor of a code location. At each tick it makes its jobs known, learns of runs that could not write, looks
for what is overdue or failing (one pass of the watch), asks for runs that no tick will ask for soon, and delivers what
is to be said."""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import dagster as dg

from gaffer_dagster.adapter import checks, learnt
from gaffer_dagster.adapter.assets import JOB_TAG, GafferJob
from gaffer_dagster.adapter.pools import make_room
from gaffer_dagster.adapter.resource import GafferResource
from gaffer_dagster.domain.alert import Kind
from gaffer_dagster.domain.amount import counted, few
from gaffer_dagster.domain.incident import Alert
from gaffer_dagster.engine import heartbeat
from gaffer_dagster.engine.log import wrap
from gaffer_dagster.engine.registry import register_all
from gaffer_dagster.engine.watch import HEARTBEAT, Report, Watcher, look, speak
from gaffer_dagster.errors import WatchHeldError
from gaffer_dagster.store import alerts, db, jobs, migrate

NAME = "gaffer_watch"
_EVERY = timedelta(seconds=30)
# A run that was asked for and has not begun after this is asked for again; Dagster takes each key once.
_AGAIN = timedelta(minutes=10)
# Dagster cuts an evaluation after 60 s, and what is sent last may take another twenty. What is left is delivered by the
# next evaluation, or by another watch.
_BUDGET = timedelta(seconds=30)
_WORDS = {
    Kind.ABSENCE: "overdue",
    Kind.FAILURES: "failing",
    Kind.CAPPED: "short of their backlog",
    Kind.BACKLOG: "behind",
    Kind.STALLED: "held up by an open transaction",
    Kind.PARKED: "with parked rows",
    Kind.TAKEOVERS: "often found dead",
    Kind.PAUSE: "forgotten in a pause",
    Kind.VANISHED: "vanished",
    Kind.VERSIONS: "in two versions",
    Kind.WATCH: "silent",
}


@dataclass
class _Tick:
    """What one evaluation found, and asks Dagster for."""

    shown: dict[str, checks.Shown]
    requests: list[dg.RunRequest] = field(default_factory=list[dg.RunRequest])
    reports: list[dg.AssetMaterialization] = field(default_factory=list[dg.AssetMaterialization])
    checks: list[dg.AssetCheckEvaluation] = field(default_factory=list[dg.AssetCheckEvaluation])
    opened: list[Alert] = field(default_factory=list[Alert])
    learnt: list[str] = field(default_factory=list[str])
    sent: int = 0
    problems: list[str] = field(default_factory=list[str])
    failed: list[Exception] = field(default_factory=list[Exception])


def watch_of(
    found: Sequence[GafferJob], targets: Mapping[str, Any], databases: Mapping[str, GafferResource | None]
) -> dg.SensorDefinition:
    """`targets`: the Dagster job for each job's name."""

    def evaluate(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        ends = time.monotonic() + _BUDGET.total_seconds()
        tick = _Tick(checks.read(context.cursor))
        with ExitStack() as stack:
            passes: dict[str, tuple[db.Connection, Report | None]] = {}
            for name, resource in databases.items():
                here = [job for job in found if job.database == name]
                if here and resource is not None:
                    with _heard(context, f"database {name!r}", tick):
                        connection = stack.enter_context(db.connect(resource.url(), application_name="gaffer:watch"))
                        passes[name] = connection, _pass(context, name, connection, here, targets, tick)
            with _heard(context, "pools", tick):
                tick.problems += make_room(context.instance, {job.spec.name: job.spec.slots for job in found})
            for name, (connection, report) in passes.items():  # a slow receiver must not hold up a pass
                with _heard(context, f"database {name!r}", tick):
                    left = timedelta(seconds=max(0.0, ends - time.monotonic()))
                    attended = speak(connection, report, os.environ, wrap(context.log), budget=left)
                    tick.sent += attended.sent
                    tick.problems += attended.problems
            if not tick.failed and all(report is not None for _, report in passes.values()):
                heartbeat.beat(HEARTBEAT, os.environ, wrap(context.log))
        events = [*tick.reports, *tick.checks]
        if tick.failed and not (tick.requests or events):  # which would be lost
            raise tick.failed[0]
        told = _words(tick, len(found))
        context.log.info(told)
        return dg.SensorResult(
            run_requests=tick.requests,
            skip_reason=None if tick.requests else told,
            asset_events=events,
            cursor=checks.write(tick.shown),
        )

    return dg.SensorDefinition(
        name=NAME,
        evaluation_fn=evaluate,
        jobs=list(targets.values()),
        minimum_interval_seconds=round(_EVERY.total_seconds()),
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Makes the jobs known to the database, looks for those that are overdue or failing and says so, "
        "and asks for the next run where the last one left something to do, or is dead.",
    )


@contextmanager
def _heard(context: dg.SensorEvaluationContext, where: str, tick: _Tick) -> Generator[None]:
    """What fails here is heard, and does not silence the rest."""
    try:
        yield
    except Exception as error:
        context.log.error(f"{where}: {db.primary_message(error)}")
        tick.failed.append(error)


def _pass(
    context: dg.SensorEvaluationContext,
    database: str,
    connection: db.Connection,
    found: Sequence[GafferJob],
    targets: Mapping[str, Any],
    tick: _Tick,
) -> Report | None:
    with db.impatient(connection):
        now = migrate.verify(connection)  # what another version of the tables says is not judged
    with _heard(
        context, f"database {database!r}", tick
    ):  # whatever keeps a job from being registered, the others are looked at
        _make_known(context, connection, found, now)
    origin = context.code_location_origin
    location = None if origin is None else origin.location_name
    watcher = Watcher(_name(location, context.repository_name), _EVERY, [job.spec.name for job in found])
    told = learnt.Learnt()
    with _heard(context, f"database {database!r}", tick):  # Dagster's storage
        told = learnt.learn(context.instance, connection, found, watcher.name, location)
        tick.learnt += [dead.job for dead in told.dead]
        tick.reports += [event for events in told.reports.values() for event in events]
        if told.failed:
            raise told.failed[0]
    report = None
    try:
        report = look(connection, watcher)
        if report is None:
            context.log.info(f"database {database!r}: another pass is going on")
    except WatchHeldError as error:  # runs are asked for all the same
        context.log.error(f"database {database!r}: {error}")
        tick.failed.append(error)
    with db.impatient(connection):
        opened = alerts.opened(connection)
    names = set(watcher.jobs)
    tick.opened += [alert for alert in opened if alert.job is None or alert.job in names]
    shown = tick.shown.setdefault(database, checks.Shown())
    keys = {job.spec.name: job.key for job in found}
    tick.checks += checks.changes(shown, keys, opened, {*told.reports, *(dead.job for dead in told.dead)})
    tick.requests += _follow_up(context, connection, found, targets)
    return report


def _name(location: str | None, repository: str | None) -> str:
    """Of the watch: the same after each restart."""
    parts = [location, None if repository == "__repository__" else repository]  # the only one has this name
    return f"dagster:{'/'.join(part for part in parts if part)}"


def _words(tick: _Tick, count: int) -> str:
    """Such as "37 jobs: 2 overdue (a, b), 1 failing (c); 1 message sent"."""
    wrong: list[str] = []
    for kind, words in _WORDS.items():
        names = sorted({alert.job or alert.watch or "" for alert in tick.opened if alert.kind is kind})
        if names:
            wrong.append(f"{len(names)} {words} ({few(names)})")
    if wrong:
        said = [f"{counted(count, 'job')}: {', '.join(wrong)}"]
    else:
        said = [f"{counted(count, 'job')}, {'not all could be looked at' if tick.failed else 'nothing is wrong'}"]
    if tick.learnt:
        said.append(f"{counted(len(tick.learnt), 'run')} that wrote nothing ({few(sorted(set(tick.learnt)))})")
    if tick.reports:
        said.append(f"{counted(len(tick.reports), 'run')} reported late")
    if tick.sent:
        said.append(f"{counted(tick.sent, 'message')} sent")
    said += tick.problems
    said += [db.primary_message(error) for error in tick.failed]
    return "; ".join(said)


def _make_known(
    context: dg.SensorEvaluationContext, connection: db.Connection, found: Sequence[GafferJob], now: datetime
) -> None:
    changed = register_all(connection, [job.definition for job in found], now=now)
    if changed:
        context.log.info(f"made known: {', '.join(changed)}")


def _follow_up(
    context: dg.SensorEvaluationContext,
    connection: db.Connection,
    found: Sequence[GafferJob],
    targets: Mapping[str, Any],
) -> list[dg.RunRequest]:
    requests: list[dg.RunRequest] = []
    with db.impatient(connection):
        wanted = jobs.wanted(connection, [job.spec.name for job in found])
    for each in wanted:
        waiting = dg.RunsFilter(tags={JOB_TAG: each.job}, statuses=[dg.DagsterRunStatus.QUEUED])
        if not context.instance.get_run_records(waiting, limit=1):
            attempt = (each.now - each.since) // _AGAIN
            requests.append(
                dg.RunRequest(
                    run_key=f"{each.key}:{attempt}",
                    job_name=targets[each.job].name,
                    tags={"gaffer/follow_up": each.why},
                )
            )
    return requests
