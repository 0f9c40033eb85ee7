"""What Dagster is told of a run. The keys are stable, and numbers where a plot helps."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any, cast

import dagster as dg

from gaffer_dagster.adapter.resource import GafferResource
from gaffer_dagster.domain import page
from gaffer_dagster.domain.due import PendingRows
from gaffer_dagster.domain.page import Beside
from gaffer_dagster.domain.progress import Progress
from gaffer_dagster.domain.run import Outcome, RunRecord
from gaffer_dagster.domain.spec import JobSpec
from gaffer_dagster.domain.watermark import Position, TimePosition
from gaffer_dagster.store import db, jobs, runs

_DEEPEST = 50


def of_run(record: RunRecord, spec: JobSpec, beside: Beside | None = None) -> dict[str, Any]:
    """`gaffer/lag_seconds`: how long after its tick the run began. `gaffer/held_seconds`: for how long by then
    `gaffer/held_by` had been seen to keep something from being due. The first one is for people: Dagster's pages show
    them in this order."""
    told: dict[str, Any] = {
        "gaffer/summary": dg.MetadataValue.md(page.summary(record, spec, beside or Beside())),
        "gaffer/outcome": str(record.outcome),
        "gaffer/items": record.items,
        "gaffer/batches": record.batches,
    }
    if record.backlog is not None:
        told["gaffer/backlog"] = record.backlog
    if record.tick is not None:
        told["gaffer/lag_seconds"] = max(0.0, (record.started_at - record.tick).total_seconds())
    if record.ended_at is not None:
        told["gaffer/duration_seconds"] = (record.ended_at - record.started_at).total_seconds()
    if isinstance(spec.due, PendingRows):
        told["gaffer/parked"] = record.parked
    if record.watermark_to is not None:
        told["gaffer/watermark"] = _show_position(record.watermark_to)
        until = TimePosition.until_of(record.watermark_to)
        if until is not None:
            told["gaffer/watermark_at"] = dg.MetadataValue.timestamp(until)
    if record.next_run_at is not None:
        told["gaffer/next_run_at"] = dg.MetadataValue.timestamp(record.next_run_at)
    if record.ticks_covered is not None:
        told["gaffer/ticks_covered"] = record.ticks_covered
    if record.held_by is not None:
        told["gaffer/held_by"] = record.held_by.who
        if record.ended_at is not None and record.held_by_since is not None:
            told["gaffer/held_seconds"] = (record.ended_at - record.held_by_since).total_seconds()
    if record.redo_since is not None and record.redo_until is not None:
        told["gaffer/redo_since"] = dg.MetadataValue.timestamp(record.redo_since)
        told["gaffer/redo_until"] = dg.MetadataValue.timestamp(record.redo_until)
    if record.fence is not None:
        told["gaffer/fence"] = record.fence
    if not record.outcome.did_not_work:  # it held nothing then
        told["gaffer/owner"] = record.owner
    told["gaffer/run_id"] = record.id
    return told


def look(resource: GafferResource, record: RunRecord, log: logging.Logger) -> Beside:
    """What else is known of the job, now that the run is over: nothing may fail it any more."""
    try:
        with db.connect(resource.url(), application_name="gaffer:summary") as connection, db.impatient(connection):
            return Beside(
                jobs.find(connection, record.job),
                runs.at_work(connection, record.job) if record.outcome is Outcome.BUSY else (),
                () if record.fence is None else runs.found_dead_by(connection, record),
            )
    except Exception as error:
        log.warning(f"the summary of {record.job} says less than it could: {db.primary_message(error)}")
        return Beside()


def of_definition(spec: JobSpec) -> dict[str, Any]:
    """What the page of an asset lists, whatever its runs say."""
    told: dict[str, Any] = {"gaffer/job": spec.name}
    if spec.schedule is not None:
        told["gaffer/schedule"] = spec.schedule.canonical
    told["gaffer/commands"] = dg.MetadataValue.md(
        "\n".join(f"- {page.verbatim(command)}" for command in page.commands(spec))
    )
    return told


def of_progress(progress: Progress, spec: JobSpec) -> dict[str, Any]:
    """Of a run that is at work. What is left has the key that tells it at the run's end: a catch-up is one line."""
    told: dict[str, Any] = {
        "gaffer/summary": dg.MetadataValue.md(page.at_work(progress, spec)),
        "gaffer/outcome": str(Outcome.RUNNING),
        "gaffer/items_so_far": progress.items,
        "gaffer/batches_so_far": progress.batches,
        "gaffer/items_per_second": round(progress.items_per_second, 1),
    }
    if progress.left is not None:
        told["gaffer/backlog"] = progress.left
    if progress.caught_up_at is not None:
        told["gaffer/caught_up_at"] = dg.MetadataValue.timestamp(progress.caught_up_at)
    return told


def of_function(told: Mapping[str, Any]) -> dict[str, Any]:
    """What the user's function said. The work is committed, so a value that Dagster does not take is shown as text."""
    return presentable({key: value if _is_taken(value) else _as_text(value) for key, value in told.items()})


def presentable(told: Mapping[Any, Any]) -> dict[Any, Any]:
    """The same metadata without what a page could not show (text that is no text), or should not (passwords)."""
    return {_each_text(key): _presentable(value) for key, value in told.items()}


def _presentable(value: Any) -> Any:
    try:
        packed = json.loads(dg.serialize_value(dg.AssetObservation("probe", metadata={"probe": value})))
        if (shown := _each_text(packed)) == packed:
            return value
        return dg.deserialize_value(json.dumps(shown), dg.AssetObservation).metadata["probe"]
    except Exception:  # Dagster has its own word for it
        return value


def _each_text(value: Any) -> Any:
    if isinstance(value, str):
        return db.presentable(value)
    if isinstance(value, dict):
        pairs = cast("dict[str, Any]", value).items()
        return {db.presentable(key): _each_text(each) for key, each in pairs}
    return [_each_text(each) for each in cast("list[Any]", value)] if isinstance(value, list) else value


def _is_taken(value: Any) -> bool:
    try:
        # It is stored only later, and what cannot be would fail the step; what cannot be read, the asset's page.
        stored = dg.serialize_value(dg.AssetObservation("probe", metadata={"probe": value}))
        dg.deserialize_value(stored, dg.AssetObservation)
    except Exception:  # whatever it does not like about it
        return False
    within = value.data if isinstance(value, dg.JsonMetadataValue) else value
    return (not isinstance(value, int) or abs(value) < 2**63) and not _is_deeper(within, _DEEPEST)


def _is_deeper(value: Any, most: int) -> bool:
    """Whoever stores or reads it goes down one call, or more, for each floor, from wherever he is."""
    if not isinstance(value, (Mapping, list)) and type(value) is not tuple:  # a record of Dagster's is a kind of tuple
        return False
    within = cast("Mapping[Any, Any]", value).values() if isinstance(value, Mapping) else cast("list[Any]", value)
    return most == 0 or any(_is_deeper(each, most - 1) for each in within)


def _as_text(value: Any) -> str:
    try:
        return repr(value)[:1000]
    except Exception:
        return f"a {type(value).__name__}"


def _show_position(position: Position) -> str:
    return ", ".join(f"{name} {value}" for name, value in position.items() if name != "of")
