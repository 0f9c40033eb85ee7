"""A Dagster schedule for a job: nothing but a wake-up. What is due is decided under the lease.

Dagster's own tick is the job's where `wakeups` says so. Elsewhere it looks more often than that, and asks for a run
only if a tick is not covered; if that cannot be read it asks, since a run too many finds nothing to do.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import dagster as dg

from gaffer_dagster.adapter.assets import JOB_TAG, GafferJob
from gaffer_dagster.adapter.resource import TICK_TAG, GafferResource
from gaffer_dagster.adapter.wakeups import wake_up
from gaffer_dagster.domain.run import Outcome
from gaffer_dagster.domain.schedule import Schedule
from gaffer_dagster.domain.spec import JobSpec
from gaffer_dagster.domain.words import words
from gaffer_dagster.store import db, jobs

# A queued run that is older may be stuck, and must not keep others away.
_YOUNG = timedelta(minutes=10)
_AT_ONCE = timedelta(minutes=1)
# Not the log of the evaluation: that needs Dagster's storage, which may be what cannot be read.
_LOG = dg.get_dagster_logger("gaffer")


def schedule_of(
    job: GafferJob, target: Any, name: str, resource: GafferResource | None
) -> dg.ScheduleDefinition | None:
    """None for a job that has no schedule."""
    spec, schedule = job.spec, job.spec.schedule
    if schedule is None:
        return None
    wake = wake_up(schedule, datetime.now(timezone.utc))
    instead = "" if wake.is_plain else f" Dagster looks in UTC, at these times and at some more, since {wake.why}."

    def evaluate(context: dg.ScheduleEvaluationContext) -> Iterator[dg.RunRequest | dg.SkipReason]:
        at = context.scheduled_execution_time.astimezone(timezone.utc)
        tick = schedule.latest(at)
        try:
            why_not = None if wake.is_plain else _not_due(resource, spec, schedule, at)
            why_not = why_not or _queued(context.instance, spec.name, at, min(_YOUNG, schedule.shortest_interval()))
        except Exception as error:  # Dagster would drop the tick
            _LOG.warning(f"asks for a run of {spec.name}, as what waits cannot be read: {db.primary_message(error)}")
            why_not = None
        if why_not is not None:
            yield dg.SkipReason(why_not)
            return
        tags = {} if tick is None else {TICK_TAG: tick.isoformat()}
        for slot in range(spec.slots):
            # By its key Dagster tells one slot's run from another's when a tick is evaluated again.
            yield dg.RunRequest(run_key=None if spec.slots == 1 else f"slot {slot}", tags=tags)

    return dg.ScheduleDefinition(
        name=name,
        job=target,
        cron_schedule=wake.cron,
        execution_timezone=wake.timezone,
        execution_fn=evaluate,
        default_status=dg.DefaultScheduleStatus.RUNNING,
        description=f"{words(schedule)} ({schedule.canonical}). Wakes {spec.name}.{instead}",
    )


def _queued(instance: dg.DagsterInstance, job: str, at: datetime, young: timedelta) -> str | None:
    """Why nothing is to be asked for, where a run of the job waits in the queue and will cover this tick too."""
    # QUEUED only: a run that a daemon had made and not yet handed on when it died is submitted by this very tick.
    queued = dg.RunsFilter(tags={JOB_TAG: job}, statuses=[dg.DagsterRunStatus.QUEUED])
    for record in instance.get_run_records(queued, limit=10):
        age = datetime.now(timezone.utc) - record.create_timestamp
        if age < young and record.dagster_run.tags.get(TICK_TAG) != at.isoformat():
            seconds = round(age.total_seconds())
            return f"run {record.dagster_run.run_id} has been in the queue for {seconds} s and will cover this tick"
    return None


def _not_due(resource: GafferResource | None, spec: JobSpec, schedule: Schedule, at: datetime) -> str | None:
    """Why nothing is to be asked for, where no tick up to `at` waits to be covered."""
    tick, coming = schedule.latest(at), schedule.next(at)
    if resource is None:
        return None
    with db.connect(resource.url(), application_name="gaffer:schedule") as connection, db.impatient(connection):
        record = jobs.find(connection, spec.name)
    if record is None or record.spec_hash != spec.hash:
        # What the database knows is not of this schedule: a tick now counts, and so does what was due before.
        if (tick is not None and at - tick < _AT_ONCE) or (record and record.open_tick and record.open_tick <= at):
            return None
        return f"no tick of {spec.name} is due; the next is at {coming.isoformat()}"
    if record.open_tick is None:
        return None if record.pause is None else f"{spec.name} is paused"
    if record.pause is not None and record.pause.holds(at):
        return f"{spec.name} is paused"
    if coming < record.open_tick:  # impossible, but for a clock that ran ahead for a while
        return None
    if record.open_tick > at:
        return f"every tick of {spec.name} is covered; the next is at {record.open_tick.isoformat()}"
    at_work = record.last_outcome is Outcome.RUNNING and record.lease_until and record.lease_until > record.seen_at
    if at_work and tick is not None and record.last_started_at and record.last_started_at >= tick:
        return f"a run that began at {record.last_started_at.isoformat()} is at work on what is due"
    return None
