"""The one sensor of a code location: it makes its jobs known, and asks for runs that no tick will ask for soon."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import dagster as dg

from gaffer_dagster.adapter.assets import JOB_TAG, GafferJob
from gaffer_dagster.adapter.resource import GafferResource
from gaffer_dagster.engine.registry import register_all
from gaffer_dagster.errors import RenamedJobError
from gaffer_dagster.store import db, jobs

NAME = "gaffer_watch"
_EVERY_SECONDS = 30
# A run that was asked for and has not begun after this is asked for again; Dagster takes each key once.
_AGAIN = timedelta(minutes=10)


def watch_of(
    found: Sequence[GafferJob], targets: Mapping[str, Any], databases: Mapping[str, GafferResource | None]
) -> dg.SensorDefinition:
    """`targets`: the Dagster job for each job's name."""

    def evaluate(context: dg.SensorEvaluationContext) -> dg.SensorResult | dg.SkipReason:
        requests: list[dg.RunRequest] = []
        failed: list[Exception] = []
        for name, resource in databases.items():
            here = [job for job in found if job.database == name]
            if here and resource is not None:
                try:
                    with db.connect(resource.url(), application_name="gaffer:watch") as connection:
                        refused = _make_known(context, connection, here)
                        requests += _follow_up(context, connection, here, targets)
                    if refused is not None:
                        raise refused
                except Exception as error:  # one database that is away must not silence the others
                    context.log.error(f"database {name!r}: {db.primary_message(error)}")
                    failed.append(error)
        if requests:
            return dg.SensorResult(run_requests=requests)
        if failed:
            raise failed[0]
        return dg.SkipReason("nothing is left to do but to wait for ticks")

    return dg.SensorDefinition(
        name=NAME,
        evaluation_fn=evaluate,
        jobs=list(targets.values()),
        minimum_interval_seconds=_EVERY_SECONDS,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Makes the jobs known to the database, and asks for the next run where the last one left "
        "something to do, or is dead.",
    )


def _make_known(
    context: dg.SensorEvaluationContext, connection: db.Connection, found: Sequence[GafferJob]
) -> RenamedJobError | None:
    """Returns why some of the jobs were refused; the others are known, and go on."""
    try:
        changed = register_all(connection, [job.definition for job in found])
    except RenamedJobError as error:
        return error
    if changed:
        context.log.info(f"made known: {', '.join(changed)}")
    return None


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
