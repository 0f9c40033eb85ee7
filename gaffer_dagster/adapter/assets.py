"""`gaffer_asset`: an asset whose function is handed what is due, batch by batch, under a fenced lease.

Whatever starts it (a schedule's tick, the "Materialize" button with whichever executor, `dg.materialize` in a test)
goes the same line. There is no retry policy on the op: the next tick is the retry, and Dagster would also retry a
run that it has already called failed.
"""

# No postponed annotations here: Dagster reads those of the function below as objects.

import inspect
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import Any, TypedDict, overload
from weakref import WeakKeyDictionary

import dagster as dg
from typing_extensions import LiteralString, Unpack

from gaffer_dagster.adapter import checks, metadata
from gaffer_dagster.adapter.freshness import policy_of
from gaffer_dagster.adapter.metadata import of_definition
from gaffer_dagster.adapter.pools import pool_of
from gaffer_dagster.adapter.resource import GafferResource, resource_of
from gaffer_dagster.domain import page
from gaffer_dagster.domain.alert import Alerts
from gaffer_dagster.domain.bounds import Bounds
from gaffer_dagster.domain.due import Due
from gaffer_dagster.domain.lint import lint
from gaffer_dagster.domain.progress import Progress
from gaffer_dagster.domain.run import RunRecord
from gaffer_dagster.domain.schedule import Schedule
from gaffer_dagster.domain.spec import JobSpec, work_hash
from gaffer_dagster.engine.registry import Definition
from gaffer_dagster.engine.run import Work
from gaffer_dagster.engine.sql_work import SqlWork
from gaffer_dagster.errors import BadSpecError, GafferWarning
from gaffer_dagster.store import db

JOB_TAG = "gaffer/job"

# Each is a row in Dagster's storage, and a point of a plot.
_PROGRESS_EVERY = timedelta(seconds=30)


@dataclass(frozen=True)
class GafferJob:
    """A job as it was defined: its spec, the function that does a batch, and the resource that it uses."""

    spec: JobSpec
    work: Work
    database: str
    description: str | None
    known: set[str] = field(default_factory=set[str])
    """The jobs that it is defined together with, filled in by `build_definitions`."""

    @property
    def key(self) -> dg.AssetKey:
        return dg.AssetKey(self.spec.name.split("/"))

    @property
    def definition(self) -> Definition:
        work = self.work.sql if isinstance(self.work, SqlWork) else self.work
        return Definition(self.spec, work_hash(self.spec.due, work))


_jobs: WeakKeyDictionary[dg.AssetsDefinition, GafferJob] = WeakKeyDictionary()


def job_of(asset: dg.AssetsDefinition) -> GafferJob:
    """Raises `BadSpecError` for an asset that `gaffer_asset` did not make."""
    if not isinstance(asset, dg.AssetsDefinition):
        raise BadSpecError(f"a {type(asset).__name__} is no asset; give what @gaffer_asset has made")
    found = _jobs.get(asset)
    if found is None:
        raise BadSpecError(
            f"asset {asset.key.to_user_string()!r} was not made by @gaffer_asset; pass it to dg.Definitions"
        )
    return found


def is_gaffer_asset(value: object) -> bool:
    return isinstance(value, dg.AssetsDefinition) and value in _jobs


class _Options(TypedDict, total=False):
    """What `gaffer_asset` takes beside what is due and what is done."""

    schedule: Schedule | None
    bounds: Bounds | None
    alerts: Alerts | None
    exclusion: str
    max_late: timedelta | str | None
    protect: Sequence[str]
    database: str
    key_prefix: str | Sequence[str] | None
    deps: Iterable[Any] | None
    description: str | None
    group_name: str | None
    owners: Sequence[str] | None
    tags: Mapping[str, str] | None
    metadata: Mapping[str, Any] | None
    kinds: Set[str] | None
    code_version: str | None
    op_tags: Mapping[str, Any] | None
    required_resource_keys: Set[str] | None


@overload
def gaffer_asset(*, due: Due, sql: LiteralString, name: str, **options: Unpack[_Options]) -> dg.AssetsDefinition: ...


@overload
def gaffer_asset(
    *, due: Due, sql: None = None, name: str | None = None, **options: Unpack[_Options]
) -> Callable[[Work], dg.AssetsDefinition]: ...


def gaffer_asset(
    *,
    due: Due,
    sql: LiteralString | None = None,
    name: str | None = None,
    schedule: Schedule | None = None,
    bounds: Bounds | None = None,
    alerts: Alerts | None = None,
    exclusion: str = "fence",
    max_late: timedelta | str | None = None,
    protect: Sequence[str] = (),
    database: str = "gaffer",
    key_prefix: str | Sequence[str] | None = None,
    deps: Iterable[Any] | None = None,
    description: str | None = None,
    group_name: str | None = None,
    owners: Sequence[str] | None = None,
    tags: Mapping[str, str] | None = None,
    metadata: Mapping[str, Any] | None = None,
    kinds: Set[str] | None = None,
    code_version: str | None = None,
    op_tags: Mapping[str, Any] | None = None,
    required_resource_keys: Set[str] | None = None,
) -> Callable[[Work], dg.AssetsDefinition] | dg.AssetsDefinition:
    """Makes an asset of a function that does one `Batch` and returns nothing, or a dict of metadata.

    Or of work that stays in the database: with `sql` (and `name`) it is no decorator and returns the asset. `sql` is
    one statement that reads what is due as `due`, such as `insert into t select … from due`: all columns of the
    source's rows, or one row of `since` and `until`. It may have CTEs of its own; a `%` in it is one. What the run
    counts is the rows that were due when the batch began.

    `schedule`: when to wake; without one the asset runs only when asked to. `due`, `bounds`, `alerts`: see the classes.
    `max_late`: a tick found later than this is skipped and recorded (off: it is made up for); see `JobSpec`.
    `protect`: tables that nothing but this job's batches may write; see `gaffer protect`.
    `database`: the key of the `GafferResource` to use. The job's name is the asset's key, joined by `/`; it is the
    identity of its watermark. Everything else is `dg.asset`'s. Raises `BadSpecError` for what cannot be meant, and
    warns (`GafferWarning`) of a schedule that is perhaps not meant so.
    """

    def make(work: Work) -> dg.AssetsDefinition:
        if not isinstance(work, SqlWork):
            _check_function(work)
        prefix = [key_prefix] if isinstance(key_prefix, str) else list(key_prefix or [])
        asset_name = name or getattr(work, "__name__", None) or ""
        if not isinstance(asset_name, str) or not all(isinstance(part, str) for part in prefix):
            raise BadSpecError(f"gaffer_asset: name={name!r}, key_prefix={key_prefix!r}: both are made of text")
        if not re.fullmatch(r"\w+", asset_name, re.ASCII):
            raise BadSpecError(
                f"gaffer_asset: name={asset_name!r} is no name for an asset; use letters, digits and _, and key_prefix "
                "for what comes before a /"
            )
        spec = JobSpec(
            "/".join([*prefix, asset_name]),
            due,
            schedule,
            bounds or Bounds(),
            alerts or Alerts(),
            exclusion,
            max_late,
            protect,
        )
        now = datetime.now(timezone.utc)
        if schedule is not None:
            said = lint(schedule, now, job=spec.name, timeout=spec.limits.timeout)
            for warning in said.warnings:
                warnings.warn(f"job {spec.name!r}: {warning}", GafferWarning, stacklevel=2)
        doc = None if isinstance(work, SqlWork) else getattr(work, "__doc__", None)
        job = GafferJob(spec, work, database, page.description(spec, description or doc))

        @dg.asset(
            name=asset_name,
            key_prefix=prefix or None,
            deps=deps,
            description=job.description,
            group_name=group_name,
            owners=owners,
            tags=tags,
            metadata={**of_definition(spec), **(metadata or {})},
            kinds=set(kinds) if kinds is not None else {"postgres"},
            code_version=code_version,
            freshness_policy=policy_of(spec, now),
            op_tags=op_tags,
            required_resource_keys={database, *(required_resource_keys or ())},
            pool=pool_of(spec.name),
            output_required=False,
        )
        def materialize(context: dg.AssetExecutionContext) -> Iterator[Any]:
            yield from _materialize(context, job)

        _jobs[materialize] = job
        return materialize

    if sql is None:
        return make
    if name is None:
        raise BadSpecError("gaffer_asset: sql= has no function to be named after; give name= as well")
    return make(SqlWork(sql))


def _check_function(work: object) -> None:
    """A generator or a coroutine has done nothing when it returns, and its batch would be committed all the same."""
    if not callable(work):
        raise BadSpecError(f"@gaffer_asset is put on a function that takes a Batch, not on a {type(work).__name__}")
    kinds = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    if any(is_kind(work) for is_kind in kinds):
        raise BadSpecError(
            f"{getattr(work, '__name__', work)!r} is a generator or async function, whose work comes after it returns; "
            "write a plain function that does one batch, and returns nothing or a dict of metadata"
        )


def _materialize(
    context: dg.AssetExecutionContext, job: GafferJob
) -> Iterator[dg.MaterializeResult[Any] | dg.AssetObservation | dg.AssetCheckEvaluation]:
    resource = resource_of(context.resources, job.database, job.spec.name)
    run = None
    try:
        with resource.run(
            job.spec,
            work_hash=job.definition.work_hash,
            known=job.known,
            on_progress=partial(_tell_progress, context),
            progress_every=_PROGRESS_EVERY,
        ) as run:
            run.apply(job.work)
    except Exception:
        if run is not None and run.record is not None:
            yield _observation(context, job, resource, run.record)
            yield from _checks(context, job, resource)
        raise
    if run.record is not None and run.record.items:
        told = metadata.of_run(run.record, job.spec, metadata.look(resource, run.record, context.log))
        # What the function said comes behind on the page, and takes the place of nothing.
        yield dg.MaterializeResult(metadata={**told, **metadata.of_function(run.metadata), **told})
    elif run.record is not None:
        # Nothing new is there, so nothing downstream may be woken; an observation says why.
        yield _observation(context, job, resource, run.record)
    else:
        yield dg.AssetObservation(context.asset_key, metadata={"gaffer/outcome": str(run.outcome)})
    run.reported()
    if not run.outcome.did_not_work:
        yield from _checks(context, job, resource)


def _tell_progress(context: dg.AssetExecutionContext, progress: Progress) -> None:
    try:
        context.log_event(dg.AssetObservation(context.asset_key, metadata=metadata.of_progress(progress)))
    except Exception as error:  # Dagster's storage is no reason to stop
        context.log.warning(f"progress is not shown: {db.primary_message(error)}")


def _observation(
    context: dg.AssetExecutionContext, job: GafferJob, resource: GafferResource, record: RunRecord
) -> dg.AssetObservation:
    told = metadata.of_run(record, job.spec, metadata.look(resource, record, context.log))
    return dg.AssetObservation(context.asset_key, description=page.headline(record, job.spec), metadata=told)


def _checks(
    context: dg.AssetExecutionContext, job: GafferJob, resource: GafferResource
) -> Sequence[dg.AssetCheckEvaluation]:
    """The checks of the job as they are after this run, which is over: nothing may fail it any more."""
    try:
        return checks.look(resource, job.spec.name, job.key)
    except Exception as error:
        context.log.warning(f"the checks of {job.spec.name} are not shown anew: {db.primary_message(error)}")
        return ()
