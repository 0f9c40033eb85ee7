"""What people do to jobs, launched from Dagster's Launchpad: one Dagster job for each action, `gaffer_…`.

They call what the command calls, are refused where it is, and are noted in `gaffer.operator_action`. What was done is
also an observation of the asset, so that its page shows it. A run of Dagster's that is refused fails with one sentence.
"""

# No postponed annotations here: Dagster reads those of the function below as objects.

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import dagster as dg

from gaffer_dagster.adapter import metadata
from gaffer_dagster.adapter.assets import GafferJob
from gaffer_dagster.adapter.resource import GafferResource, resource_of
from gaffer_dagster.domain import page
from gaffer_dagster.domain.due import EachInterval, PendingRows
from gaffer_dagster.domain.moment import as_moment, end_of
from gaffer_dagster.domain.page import both_clocks, verbatim
from gaffer_dagster.domain.run import Outcome
from gaffer_dagster.engine import redo
from gaffer_dagster.engine.run import Run
from gaffer_dagster.engine.watermark import plan_move, said, where
from gaffer_dagster.errors import BadInputError, GafferError, JobHeldError
from gaffer_dagster.store import db, jobs, migrate, operations, watermarks
from gaffer_dagster.store.operations import Operator

_TAG = "gaffer/operate"
# A process that does not answer any more is Dagster's to find: ours are done, or cut, before.
_SHORT = timedelta(minutes=1)
# Dagster+ puts the one who launched a run on it; the open source webserver knows nobody.
_USER_TAG = "user"


@dataclass(frozen=True)
class _Asked:
    """What somebody wants done to a job, with the config as he gave it."""

    job: GafferJob
    resource: GafferResource
    config: Mapping[str, Any]
    operator: Operator
    context: dg.OpExecutionContext

    @property
    def name(self) -> str:
        return self.job.spec.name


@dataclass(frozen=True)
class _Action:
    """`do` returns what was done, in Markdown. `fields`: of the config beside `job`, `reason` and `by`. `needs_reason`:
    it can lose work, or do it twice."""

    name: str
    description: str
    do: Callable[[_Asked, db.Connection], str]
    fields: Mapping[str, dg.Field]
    is_for: Callable[[GafferJob], bool] = lambda job: True
    needs_reason: bool = False


def operator_jobs(assets: Mapping[str, dg.AssetsDefinition], found: Sequence[GafferJob]) -> list[dg.JobDefinition]:
    """Those that one of the jobs has a use for. `assets`: by the name of the job."""
    made: list[dg.JobDefinition] = []
    for action in _ACTIONS:
        known = {job.spec.name: job for job in found if action.is_for(job)}
        if known:
            keys = {job.database for job in known.values()}
            if action.do is _redo:  # it does what the asset does
                keys = keys.union(*(assets[name].op.required_resource_keys for name in known))
            longest = max(job.spec.limits.timeout for job in known.values()) if action.do is _redo else _SHORT
            made.append(_job_of(action, known, keys, longest))
    return made


def _job_of(
    action: _Action, known: Mapping[str, GafferJob], resource_keys: set[str], longest: timedelta
) -> dg.JobDefinition:
    is_asked_why = action.needs_reason and "dry_run" not in action.fields  # which changes nothing
    names = dg.Enum(f"{action.name}_job", [dg.EnumValue(name) for name in sorted(known)])
    config = {
        "job": dg.Field(names, description="The job's name."),
        **action.fields,
        "reason": _text("Why, for those who come after.", is_required=is_asked_why),
        "by": _text("Who does it, where Dagster does not know its user."),
    }

    op_name = f"{action.name}_op"  # no two nodes have one name, and the job's graph is one

    @dg.op(
        name=op_name,
        description=action.description,
        config_schema=dict,
        required_resource_keys=resource_keys,
        out=dg.Out(dg.Nothing),
    )
    def operate(context: dg.OpExecutionContext) -> None:
        given: dict[str, Any] = {**context.op_config}
        job = known[given["job"]]
        by = context.run.tags.get(_USER_TAG) or given["by"].strip() or f"dagster run {context.run.run_id}"
        operator = Operator(by, given["reason"].strip() or None)
        try:
            asked = _Asked(job, resource_of(context.resources, job.database, job.spec.name), given, operator, context)
            if action.needs_reason and operator.reason is None and not given.get("dry_run"):
                raise BadInputError("reason is empty; say why, since this can lose work or do it twice")
            with db.connect(asked.resource.url(), application_name="gaffer:operate") as connection:
                migrate.verify(connection)
                told = action.do(asked, connection)
        except GafferError as error:
            raise dg.Failure(description=str(error), allow_retries=False) from None
        why = "" if operator.reason is None else f": {verbatim(operator.reason)}"
        context.log.info(f"{asked.name}: {told.replace('**', '')}")
        context.log_event(
            dg.AssetObservation(
                job.key,
                description=f"{action.name}, launched by hand",
                metadata={"gaffer/operator": dg.MetadataValue.md(f"{told}\n\nBy {verbatim(by)}{why}")},
            )
        )

    def configure(given: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"ops": {op_name: {"config": {**given}}}}

    @dg.job(  # pyright: ignore[reportUnknownMemberType] — Dagster's own annotation
        name=action.name,
        description=action.description,
        # So that the Launchpad shows the fields, and not the op that they are of.
        config=dg.ConfigMapping(config_fn=configure, config_schema=config),
        executor_def=dg.in_process_executor,
        tags={_TAG: action.name, dg.MAX_RUNTIME_SECONDS_TAG: str(round((longest + _SHORT).total_seconds()))},
    )
    def launched() -> None:
        operate()

    return launched


# ── what they do ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _pause(asked: _Asked, connection: db.Connection) -> str:
    record = jobs.get(connection, asked.name)
    until = asked.config["until"].strip()
    end = end_of(until, "until", record.seen_at, record.timezone) if until else None
    operations.pause(connection, asked.name, end, record.tick_after_pause, asked.operator)
    shown = "somebody resumes it" if end is None else both_clocks(end, record.timezone)
    return f"**Paused** until {shown}; a run that is at work is not stopped"


def _resume(asked: _Asked, connection: db.Connection) -> str:
    record = jobs.get(connection, asked.name)
    if not operations.resume(connection, asked.name, record.tick_after_pause, asked.operator):
        return "It was not paused; nothing was changed"
    due = jobs.get(connection, asked.name).open_tick
    return "**Resumed**" + ("" if due is None else f"; next tick {both_clocks(due, record.timezone)}")


def _release(asked: _Asked, connection: db.Connection) -> str:
    jobs.get(connection, asked.name)
    slot = asked.config.get("slot")
    if slot is not None and not 0 <= slot < 2**31:
        raise BadInputError(f"slot {slot}: is none; give the number of one, from 0, or leave it out")
    released = operations.release(connection, asked.name, slot, asked.operator)
    if not released:
        return "Nobody holds the lease; nothing was changed"
    owners = ", ".join(f"{verbatim(each.owner)} (fence {each.fence}, slot {each.slot})" for each in released)
    after = jobs.get(connection, asked.name).after_release
    return f"**Released:** the lease was taken from {owners}; nothing more of that run is committed{after}"


def _set_watermark(asked: _Asked, connection: db.Connection) -> str:
    record = jobs.get(connection, asked.name)
    move = plan_move(connection, record, asked.config["position"].strip())
    since, to = map(verbatim, (where(record), said(move.to, record.timezone)))
    told = f"{since}, to {to}: {move.means}"
    if asked.config["dry_run"]:
        return f"**Dry run:** the watermark would be moved from {told}. To do it, launch with `dry_run: false`"
    watermarks.set_position(connection, asked.name, record.watermark, move.to, move.cluster, asked.operator)
    return f"**Watermark set** from {told}"


def _change_items(asked: _Asked, connection: db.Connection, action: str, what: str) -> str:
    keys = list(asked.config["keys"])
    if bool(keys) == asked.config["all_parked"]:
        raise BadInputError("name the rows by their keys, or give all_parked: true for all that are parked")
    found = operations.change_items(connection, asked.name, action, keys or None, asked.operator)
    missing = [key for key in keys if key not in found]
    told = f"**{len(found):,} {'row' if len(found) == 1 else 'rows'}** {'is' if len(found) == 1 else 'are'} {what}"
    if missing:
        no_such = f"job {asked.name!r} has no failed rows with key {', '.join(missing)}"
        if not found:
            raise BadInputError(f"{no_such}; see: gaffer items list {asked.name} --all")
        told += f"; {verbatim(no_such)}"
    return told


def _retry_rows(asked: _Asked, connection: db.Connection) -> str:
    return _change_items(asked, connection, "retry", "tried again, with all attempts anew; a run is asked for")


def _drop_rows(asked: _Asked, connection: db.Connection) -> str:
    return _change_items(asked, connection, "drop", "given up for good; they stay as they are in their table")


def _redo(asked: _Asked, connection: db.Connection) -> str:
    job, config = asked.job, asked.config
    at = as_moment(config["interval"], "interval", job.spec.timezone)
    run: Run | None = None
    try:
        with asked.resource.run(
            job.spec,
            work_hash=job.definition.work_hash,
            known=job.known,
            redo=at,
            despite_pause=config["despite_pause"],
        ) as run:
            if not run.outcome.did_not_work:
                redo.note(connection, job.spec, at, asked.operator)
            run.apply(job.work)
    except Exception:
        if run is not None and run.record is not None:
            told = metadata.of_run(run.record, job.spec, metadata.look(asked.resource, run.record, asked.context.log))
            asked.context.log_event(dg.AssetObservation(job.key, metadata=told))
        raise
    record = run.record
    assert record is not None  # noqa: S101 — it has ended
    beside = metadata.look(asked.resource, record, asked.context.log)
    if run.outcome is Outcome.BUSY:
        owner = record.owner if beside.job is None else beside.job.owner
        raise JobHeldError(f"job {asked.name!r} is at work ({owner}): launch this again when that run has ended")
    if run.outcome.did_not_work:
        raise GafferError(f"job {asked.name!r} is {run.outcome}; resume it, or launch this with despite_pause: true")
    told = {**metadata.of_function(run.metadata), **metadata.of_run(record, job.spec, beside)}
    asked.context.log_event(dg.AssetMaterialization(job.key, metadata=told))
    run.reported()
    return f"**Done once more:** {page.headline(record, job.spec)}"


def _text(description: str, *, is_required: bool = False) -> dg.Field:
    """Text that is empty where it is left out."""
    if is_required:
        return dg.Field(str, description=description)
    return dg.Field(str, is_required=False, default_value="", description=description)


def _switch(description: str, *, on: bool) -> dg.Field:
    return dg.Field(bool, is_required=False, default_value=on, description=description)


_ROWS: Mapping[str, dg.Field] = {
    "keys": dg.Field(
        [str], is_required=False, default_value=[], description="The keys of the rows; or give all_parked: true."
    ),
    "all_parked": _switch("All rows that are parked.", on=False),
}
_ACTIONS = (
    _Action(
        "gaffer_pause",
        "Let runs of a job end `paused` from now on. Its ticks are skipped; what is due is done after the pause. A run "
        "that is at work is not stopped. It holds whatever Dagster's own switches say.",
        _pause,
        {
            "until": _text(
                "When it ends by itself: how long, such as 2h, or a time, such as 2027-03-01T06:00 (on "
                "the clock of the job's zone) or 2027-03-01T06:00+01:00. Empty: until gaffer_resume."
            )
        },
    ),
    _Action(
        "gaffer_resume",
        "End the pause of a job. Its next run does everything that has become due meanwhile.",
        _resume,
        {},
    ),
    _Action(
        "gaffer_release",
        "Take the lease of a job away from the run that holds it, so that nothing more of that run is committed. For a "
        "run that neither ends nor lets go; one that is merely dead is found by the next.",
        _release,
        {
            "slot": dg.Field(
                dg.Noneable(int),
                is_required=False,
                default_value=None,
                description="Only this one, of a job that has several.",
            )
        },
        needs_reason=True,
    ),
    _Action(
        "gaffer_set_watermark",
        "Let a job go on at another position: what is due after it is done again, or skipped. A dry run unless "
        "`dry_run: false`. Refused while a run is at work.",
        _set_watermark,
        {
            "position": _text(
                "Of a job that is due by time: a time, such as 2027-03-01 (on the clock of the job's "
                "zone) or 2027-03-01T06:00+01:00. Of new rows: `beginning`, `end` (all that is there is skipped) "
                "or `after:KEY`.",
                is_required=True,
            ),
            "dry_run": _switch("Only say what would be done again, or skipped.", on=True),
        },
        is_for=lambda job: not isinstance(job.spec.due, PendingRows),
        needs_reason=True,
    ),
    _Action(
        "gaffer_redo_interval",
        "Do one interval of a job once more, under its lease; the watermark stays where it is. Refused for an interval "
        "that was not done yet, and while a run is at work.",
        _redo,
        {
            "interval": _text(
                "A time within it, such as 2027-03-01 (on the clock of the job's zone) or 2027-03-01T06:00+01:00.",
                is_required=True,
            ),
            "despite_pause": _switch("Also while the job is paused.", on=False),
        },
        is_for=lambda job: isinstance(job.spec.due, EachInterval),
        needs_reason=True,
    ),
    _Action(
        "gaffer_retry_rows",
        "Try rows that failed again, with all their attempts anew; a run is asked for.",
        _retry_rows,
        _ROWS,
        is_for=lambda job: isinstance(job.spec.due, PendingRows),
    ),
    _Action(
        "gaffer_drop_rows",
        "Give rows that failed up for good: they stay as they are in their table, and nobody is told any more.",
        _drop_rows,
        _ROWS,
        is_for=lambda job: isinstance(job.spec.due, PendingRows),
        needs_reason=True,
    ),
)
