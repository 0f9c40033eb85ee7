"""`build_definitions`: everything that Dagster needs of a code location's jobs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, cast

import dagster as dg
from dagster.components.definitions import LazyDefinitions

from gaffer_dagster.adapter import assets, checks, operate, schedules, sensors
from gaffer_dagster.adapter.assets import GafferJob
from gaffer_dagster.adapter.resource import GafferResource
from gaffer_dagster.database import LOCAL
from gaffer_dagster.errors import BadSpecError

# Dagster's own limit is a backstop for a process that no longer answers; ours comes first.
_BACKSTOP_SECONDS = 60


def build_definitions(
    *jobs: dg.AssetsDefinition,
    resource: GafferResource | None = None,
    resources: Mapping[str, GafferResource] | None = None,
) -> dg.Definitions:
    """The assets with their checks, a job for each (run in one process), a running schedule for each that has one, one
    sensor, and the jobs `gaffer_…` by which people pause, redo, release and so on.

    Call it once for a code location, with all its jobs, and merge the result with `dg.Definitions.merge`. `resource`
    is the database under the key `gaffer`; `resources` are several, each job naming its own with `database=`.
    """
    if (resource is None) == (resources is None):
        raise BadSpecError("build_definitions: give either resource= or resources=")
    databases = dict(resources) if resources is not None else {"gaffer": resource}
    for key, each in databases.items():
        if not isinstance(each, GafferResource):
            raise BadSpecError(
                f"build_definitions: the resource {key!r} is a {type(each).__name__}; give a GafferResource"
            )
    found = [assets.job_of(job) for job in jobs]
    _check(found, databases)
    for job in found:
        job.known.update(other.spec.name for other in found)
    for each in databases.values():
        if each is not None and each.dsn == LOCAL:
            each.url()  # this process lives as long as the code location: the private server must too
    by_name = {job.spec.name: asset for asset, job in zip(jobs, found, strict=True)}
    targets: dict[str, Any] = {}
    dagster_schedules: list[dg.ScheduleDefinition] = []
    for asset, job in zip(jobs, found, strict=True):
        name = dagster_name(job.spec.name)
        dagster_job = dg.define_asset_job(  # pyright: ignore[reportUnknownMemberType] — Dagster's own annotation
            f"{name}_job",
            selection=dg.AssetSelection.assets(asset).without_checks(),
            description=job.description,
            executor_def=dg.in_process_executor,
            run_tags={
                assets.JOB_TAG: job.spec.name,
                dg.MAX_RUNTIME_SECONDS_TAG: str(round(job.spec.limits.timeout.total_seconds()) + _BACKSTOP_SECONDS),
            },
        )
        targets[job.spec.name] = dagster_job
        schedule = schedules.schedule_of(job, dagster_job, f"{name}_schedule", databases[job.database])
        if schedule is not None:
            dagster_schedules.append(schedule)
    return dg.Definitions(
        assets=list(jobs),
        asset_checks=[_checks_of(job) for job in found],
        jobs=[*targets.values(), *operate.operator_jobs(by_name, found)],
        schedules=dagster_schedules,
        sensors=[sensors.watch_of(found, targets, databases)] if found else [],
        resources=databases,
    )


@dataclass(frozen=True)
class Runnable:
    """A job that was found in a module, and the database that it is to run on (None: it does not say)."""

    job: GafferJob
    resource: GafferResource | None


def find_jobs(module: ModuleType) -> dict[str, Runnable]:
    """The jobs that a module defines, by name."""
    values = list(values_in(module))
    resources: dict[str, Any] = {}
    for value in values:
        if isinstance(value, dg.Definitions):
            resources.update(value.resources or {})
    jobs = [assets.job_of(value) for value in values if assets.is_gaffer_asset(value)]
    for job in jobs:
        job.known.update(other.spec.name for other in jobs)
    return {job.spec.name: Runnable(job, resources.get(job.database)) for job in jobs}


def values_in(module: ModuleType) -> Iterator[Any]:
    """What a module has under a name, and in the collections and definitions that it has under one."""
    for found in list(vars(module).values()):
        value: Any = found
        # As `@dg.definitions` makes, which stands in each project of dg; one that wants a context has none here.
        if isinstance(found, LazyDefinitions) and not found.has_context_arg:
            value = cast("dg.Definitions", found())
        yield value
        if isinstance(value, dg.Definitions):
            yield from value.assets or []
        elif type(value) in (list, tuple, set):  # and no kind of one, which may do anything when it is read
            yield from value
        elif type(value) is dict:
            yield from cast("dict[Any, Any]", value).values()


def _check(jobs: list[GafferJob], databases: Mapping[str, GafferResource | None]) -> None:
    names: set[str] = set()
    for job in jobs:
        if job.spec.name in names:
            raise BadSpecError(
                f"job {job.spec.name!r} is given twice, and its watermark would be shared; give one of them another "
                "name or key_prefix"
            )
        names.add(job.spec.name)
        if job.database not in databases:
            raise BadSpecError(
                f"job {job.spec.name!r} wants the resource {job.database!r}; build_definitions was given "
                f"{', '.join(sorted(databases)) or 'none'}"
            )


def _checks_of(job: GafferJob) -> dg.AssetChecksDefinition:
    return checks.checks_of(job.spec.name, job.key, job.database, f"gaffer_checks_of_{dagster_name(job.spec.name)}")


def dagster_name(job: str) -> str:
    """What a job's name becomes in the names of its Dagster job and schedule."""
    return re.sub(r"\W", "_", job.replace("/", "__"))
