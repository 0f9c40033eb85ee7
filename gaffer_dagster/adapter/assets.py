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
from difflib import get_close_matches
from functools import partial, wraps
from typing import Any, Protocol, TypedDict, cast, get_type_hints, overload
from weakref import WeakKeyDictionary

import dagster as dg
from typing_extensions import LiteralString, Unpack

from gaffer_dagster.adapter import checks, metadata
from gaffer_dagster.adapter.freshness import policy_of
from gaffer_dagster.adapter.metadata import of_definition, presentable
from gaffer_dagster.adapter.pools import pool_of
from gaffer_dagster.adapter.resource import GafferResource, resource_of
from gaffer_dagster.domain import page
from gaffer_dagster.domain.alert import Alerts
from gaffer_dagster.domain.bounds import Bounds
from gaffer_dagster.domain.due import Due, EachInterval, Elapsed, NewRows, PendingRows
from gaffer_dagster.domain.lint import lint
from gaffer_dagster.domain.progress import Progress
from gaffer_dagster.domain.run import RunRecord
from gaffer_dagster.domain.schedule import Schedule
from gaffer_dagster.domain.spec import JobSpec, work_hash
from gaffer_dagster.engine.batch import Batch
from gaffer_dagster.engine.registry import Definition
from gaffer_dagster.engine.run import Work
from gaffer_dagster.engine.sql_work import SqlWork
from gaffer_dagster.errors import BadInputError, BadSpecError, GafferWarning
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


# By the op, which is the same in each copy that Dagster makes of an asset (with other metadata, tags, a group).
_jobs: WeakKeyDictionary[object, GafferJob] = WeakKeyDictionary()


def job_of(asset: dg.AssetsDefinition) -> GafferJob:
    """Raises `BadSpecError` for an asset that `gaffer_asset` did not make."""
    if not isinstance(asset, dg.AssetsDefinition):
        raise BadSpecError(f"a {type(asset).__name__} is no asset; give what @gaffer_asset has made")
    found = _jobs.get(asset.node_def) if asset.is_executable else None
    if found is None:
        raise BadSpecError(
            f"asset {asset.key.to_user_string()!r} was not made by @gaffer_asset; pass it to dg.Definitions"
        )
    if asset.key != found.key:
        raise BadSpecError(
            f"asset {asset.key.to_user_string()!r} is job {found.spec.name!r}, whose key was changed afterwards, and "
            "whose watermark goes by its name; give @gaffer_asset its key_prefix= or name= instead"
        )
    return found


def is_gaffer_asset(value: object) -> bool:
    return isinstance(value, dg.AssetsDefinition) and value.is_executable and value.node_def in _jobs


class Function(Protocol):
    """Does one batch; what it takes beside it are Dagster's resources."""

    def __call__(self, batch: Batch, /, *args: Any, **resources: Any) -> Mapping[str, Any] | None: ...


_REFUSED = {
    "auto_materialize_policy": "use automation_condition=",
    "backfill_policy": "an interval is done again with `gaffer run JOB --interval`",
    "check_specs": "write the check beside it, with @dg.asset_check(asset=…)",
    "compute_fn": "put @gaffer_asset(due=…) on the function",
    "compute_kind": "use kinds=",
    "config_schema": "a batch is the same whoever asks for it; use a resource for what differs between deployments",
    "dagster_type": "the function returns nothing, or a dict of metadata",
    "freshness_policy": "it comes from the schedule; use alerts=gd.Alerts(grace=…) to say how late it may be",
    "ins": "a batch reads the database; use deps= to say what it depends on",
    "io_manager_def": "a batch writes to the database itself, in the transaction that moves the watermark",
    "io_manager_key": "a batch writes to the database itself, in the transaction that moves the watermark",
    "is_virtual": "the asset is what the job's batches wrote",
    "key": "use name= and key_prefix=, which make the job's name too",
    "output_required": "an output is only there when something was done",
    "partitions_def": "what is due is decided in the database; use due=gd.EachInterval('@daily') for one batch a day",
    "pool": "a job has a pool of its own, so that its runs queue",
    "resource_defs": "give resources to dg.Definitions, and take them as parameters of the function",
    "retry_policy": "the next tick, or the sensor before it, is the retry, and what was committed is not done again",
}
"""What `dg.asset` takes and this does not, and what to do."""


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
    hooks: Set[dg.HookDefinition] | None
    automation_condition: dg.AutomationCondition[Any] | None


@overload
def gaffer_asset(*, due: Due, sql: LiteralString, name: str, **options: Unpack[_Options]) -> dg.AssetsDefinition: ...


@overload
def gaffer_asset(
    *, due: Due, sql: None = None, name: str | None = None, **options: Unpack[_Options]
) -> Callable[[Function], dg.AssetsDefinition]: ...


def gaffer_asset(
    *positional: object,
    due: Due | None = None,
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
    hooks: Set[dg.HookDefinition] | None = None,
    automation_condition: dg.AutomationCondition[Any] | None = None,
    **others: object,
) -> Callable[[Function], dg.AssetsDefinition] | dg.AssetsDefinition:
    """Makes an asset of a function that does one `Batch` and returns nothing, or a dict of metadata.

    Further parameters of the function are Dagster's resources, by their keys, as in `def seen(batch: gd.Batch, slack:
    SlackResource)`; those that are named in `required_resource_keys` are in `batch.context.resources`.

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

    if positional or due is None:
        raise BadSpecError("gaffer_asset: give due= by its name, as in @gd.gaffer_asset(due=gd.NewRows('t', key='id'))")
    _refuse(others, due)
    _check_kind("metadata", metadata, "a dict", isinstance(metadata, Mapping))
    _check_kind("description", description, "text", isinstance(description, str))
    _check_kind("kinds", kinds, "a set of text", _is_of_text(kinds))
    _check_kind("required_resource_keys", required_resource_keys, "a set of text", _is_of_text(required_resource_keys))
    _check_kind("key_prefix", key_prefix, "a list of text", isinstance(key_prefix, str) or _is_of_text(key_prefix))

    def make(function: Function | SqlWork) -> dg.AssetsDefinition:
        resource_keys, work = (set[str](), function) if isinstance(function, SqlWork) else _work_of(function)
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
                warnings.warn(f"job {spec.name!r}: {warning}", GafferWarning, stacklevel=2 if sql is None else 3)
        doc = None if isinstance(work, SqlWork) else getattr(work, "__doc__", None)
        job = GafferJob(spec, work, database, db.presentable(page.description(spec, description or doc)))

        @dg.asset(
            name=asset_name,
            key_prefix=prefix or None,
            deps=deps,
            description=job.description,
            group_name=group_name,
            owners=owners,
            tags=tags,
            metadata={**of_definition(spec), **presentable(metadata or {})},
            kinds=set(kinds) if kinds is not None else {"postgres"},
            code_version=code_version,
            freshness_policy=policy_of(spec, now),
            op_tags=op_tags,
            required_resource_keys={database, *resource_keys, *(required_resource_keys or ())},
            hooks=hooks,
            automation_condition=automation_condition,
            pool=pool_of(spec.name),
            output_required=False,
        )
        def materialize(context: dg.AssetExecutionContext) -> Iterator[Any]:
            yield from _materialize(context, job)

        _jobs[materialize.node_def] = job
        return materialize

    if sql is None:
        return make
    if name is None:
        raise BadSpecError("gaffer_asset: sql= has no function to be named after; give name= as well")
    asset = make(SqlWork(sql))
    asset.__class__ = _InSql
    return asset


class _InSql(dg.AssetsDefinition):
    def __call__(self, *args: Any, **options: Any) -> Any:
        if args and inspect.isfunction(args[0]):
            raise BadSpecError(
                f"{self.key.to_user_string()!r} is done by sql=, and is put on the function {args[0].__name__!r} too; "
                "leave one of them out"
            )
        return super().__call__(*args, **options)


# What has options of its own, and by which of ours it is given.
_ELSEWHERE: Mapping[type, str] = {
    NewRows: "due",
    PendingRows: "due",
    EachInterval: "due",
    Elapsed: "due",
    Bounds: "bounds",
    Alerts: "alerts",
    Schedule: "schedule",
}


def _refuse(others: Mapping[str, object], due: Due) -> None:
    for name in others:
        if name in _REFUSED:
            raise BadSpecError(f"gaffer_asset: {name}= is not taken: {_REFUSED[name]}; leave it out")
        for kind, option in sorted(_ELSEWHERE.items(), key=lambda each: not isinstance(due, each[0])):
            if name in inspect.signature(kind).parameters:
                raise BadSpecError(
                    f"gaffer_asset: {name}= belongs in {option}=gd.{kind.__name__}(…, {name}=…); write it there"
                )
        near = get_close_matches(name, _Options.__annotations__, 1)
        raise BadSpecError(
            f"gaffer_asset: {name}= is unknown; " + (f"did you mean {near[0]}=?" if near else "leave it out")
        )


def _check_kind(name: str, value: object, wanted: str, is_right: bool) -> None:
    if value is not None and not is_right:
        raise BadSpecError(f"gaffer_asset: {name}= is a {type(value).__name__}, or not made of text; give {wanted}")


def _is_of_text(value: object) -> bool:
    return isinstance(value, (Set, list, tuple)) and all(
        isinstance(each, str) for each in cast("Iterable[object]", value)
    )


def _work_of(function: Function) -> tuple[set[str], Work]:
    """The keys of the resources that a function wants, and what does a batch with them."""
    _check_function(function)
    name, keys = getattr(function, "__name__", str(function)), _resource_keys(function)
    if not keys:
        return set(), function

    @wraps(function)
    def with_resources(batch: Batch) -> Mapping[str, Any] | None:
        if batch.context is None:
            raise BadInputError(
                f"{name} takes resources of Dagster ({', '.join(sorted(keys))}), which are not there "
                "without it; let Dagster run the job"
            )
        given = batch.context.resources.original_resource_dict
        return function(batch, **{key: given[key] for key in keys})

    return keys, with_resources


def _check_function(work: object) -> None:
    """A generator or a coroutine has done nothing when it returns, and its batch would be committed all the same."""
    if isinstance(work, dg.AssetsDefinition):
        raise BadSpecError(
            f"{work.key.to_user_string()!r} is an asset already; put @gaffer_asset alone on the function"
        )
    if not callable(work):
        raise BadSpecError(f"@gaffer_asset is put on a function that takes a Batch, not on a {type(work).__name__}")
    kinds = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    if any(is_kind(work) for is_kind in kinds):
        raise BadSpecError(
            f"{getattr(work, '__name__', work)!r} is a generator or async function, whose work comes after it returns; "
            "write a plain function that does one batch, and returns nothing or a dict of metadata"
        )


def _resource_keys(function: Callable[..., Any]) -> set[str]:
    """The parameters after the first. Raises `BadSpecError` for one that nobody would fill in."""
    name = getattr(function, "__name__", str(function))
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = list(inspect.signature(function).parameters.values())
    if not parameters or parameters[0].kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD):
        raise BadSpecError(f"{name!r} takes no Batch; write def {name}(batch: gd.Batch) -> None")
    rest = [each for each in parameters[1:] if each.kind not in several]
    if not rest:
        return set()
    hints = get_type_hints(function, include_extras=True)
    keys = {each.name for each in rest if _is_resource(hints.get(each.name))}
    for each in rest:
        if each.name not in keys and each.default is inspect.Parameter.empty:
            raise BadSpecError(
                f"{name!r} takes {each.name!r}, which is no resource: what is due comes as the first parameter, and "
                "each other one is annotated with a dg.ConfigurableResource or dg.ResourceParam[…]; Dagster's context "
                "is batch.context"
            )
    return keys


def _is_resource(hint: Any) -> bool:
    is_marked = getattr(hint, "__metadata__", None) == getattr(dg.ResourceParam[Any], "__metadata__", ())
    return is_marked or (isinstance(hint, type) and issubclass(hint, (dg.ConfigurableResource, dg.ResourceDefinition)))


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
            on_progress=partial(_tell_progress, context, job.spec),
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


def _tell_progress(context: dg.AssetExecutionContext, spec: JobSpec, progress: Progress) -> None:
    try:
        context.log_event(dg.AssetObservation(context.asset_key, metadata=metadata.of_progress(progress, spec)))
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
