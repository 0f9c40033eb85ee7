"""A Dagster schedule for a job: nothing but a wake-up. What is due is decided under the lease."""

from __future__ import annotations

from typing import Any

import dagster as dg

from gaffer_dagster.adapter.assets import GafferJob
from gaffer_dagster.domain.schedule import Schedule
from gaffer_dagster.errors import BadSpecError


def schedule_of(job: GafferJob, target: Any, name: str) -> dg.ScheduleDefinition | None:
    """None for a job that has no schedule."""
    schedule = job.spec.schedule
    if schedule is None:
        return None
    return dg.ScheduleDefinition(
        name=name,
        job=target,
        cron_schedule=_one_cron(schedule, job.spec.name),
        execution_timezone=schedule.timezone,
        default_status=dg.DefaultScheduleStatus.RUNNING,
        description=f"Wakes {job.spec.name} at {schedule.canonical}.",
    )


def _one_cron(schedule: Schedule, job: str) -> str:
    if len(schedule.crons) != 1:
        raise BadSpecError(f"job {job!r}: several crons in one schedule cannot be driven yet; give one")
    return schedule.crons[0]
