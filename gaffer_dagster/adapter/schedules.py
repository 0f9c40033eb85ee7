"""A Dagster schedule for a job: nothing but a wake-up. What is due is decided under the lease."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import dagster as dg

from gaffer_dagster.adapter.assets import GafferJob
from gaffer_dagster.adapter.wakeups import wake_up


def schedule_of(job: GafferJob, target: Any, name: str) -> dg.ScheduleDefinition | None:
    """None for a job that has no schedule."""
    schedule = job.spec.schedule
    if schedule is None:
        return None
    wake = wake_up(schedule, datetime.now(timezone.utc))
    instead = "" if wake.is_plain else f" Dagster looks in UTC, at these times and at some more, since {wake.why}."
    return dg.ScheduleDefinition(
        name=name,
        job=target,
        cron_schedule=wake.cron,
        execution_timezone=wake.timezone,
        default_status=dg.DefaultScheduleStatus.RUNNING,
        description=f"Wakes {job.spec.name} at {schedule.canonical}.{instead}",
    )
