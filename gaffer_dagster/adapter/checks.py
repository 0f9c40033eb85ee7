"""Two asset checks for each job, `on_time` and `healthy`, so that its page in Dagster shows red with the reason.

They are no part of the asset's own step: Dagster would show them as in progress from the moment at which a run is asked
for, so that a run which waits in a queue, or is STARTED for ever, would hide what is red. They are a step of their own,
which only the "Materialize" button and "Execute" start; in the jobs that we define there is none. What is shown comes
from the asset's own step at its end, since a materialization outdates what other runs evaluated before it, and from the
sensor whenever a verdict changes.
"""

# No postponed annotations here: Dagster reads those of the function below as objects.

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import dagster as dg

from gaffer_dagster.adapter.resource import GafferResource, resource_of
from gaffer_dagster.domain.alert import Kind, Severity
from gaffer_dagster.domain.incident import Alert, Finding
from gaffer_dagster.domain.notice import explained, what_to_do
from gaffer_dagster.engine.watch import examine_job
from gaffer_dagster.store import db

ON_TIME, HEALTHY = "on_time", "healthy"
_ON_TIME = frozenset({Kind.ABSENCE, Kind.BACKLOG, Kind.STALLED, Kind.VANISHED})
_DESCRIPTIONS = {
    ON_TIME: "No tick is overdue, and nothing due is left for longer than it may.",
    HEALTHY: "It does not keep failing, stopping at its bounds or dying, has given up no rows, and is not paused and "
    "forgotten.",
}
# Dagster's daemon stores the evaluations of a tick one by one.
_MOST_JOBS = 200


def evaluations(key: dg.AssetKey, found: Sequence[Alert | Finding]) -> Iterator[dg.AssetCheckEvaluation]:
    """Both checks of a job, of which `found` is all that is wrong."""
    for name, description in _DESCRIPTIONS.items():
        here = sorted((each for each in found if (each.kind in _ON_TIME) is (name == ON_TIME)), key=_since)
        is_error = any(each.severity is Severity.ERROR for each in here)
        yield dg.AssetCheckEvaluation(
            key,
            name,
            passed=not here,
            severity=dg.AssetCheckSeverity.ERROR if is_error or not here else dg.AssetCheckSeverity.WARN,
            description="; ".join(explained(each.kind, each.details) for each in here) or description,
            metadata=_metadata(here, "/".join(key.path)),
            blocking=False,
        )


def _metadata(found: Sequence[Alert | Finding], job: str) -> Mapping[str, Any]:
    if not found:
        return {}
    return {
        "gaffer/kind": ", ".join(str(each.kind) for each in found),
        "gaffer/since": dg.MetadataValue.timestamp(_since(found[0])),
        "gaffer/why": "; ".join(explained(each.kind, each.details) for each in found),
        "gaffer/what_to_do": "; ".join(what_to_do(each.kind, job, each.details) for each in found),
    }


def _since(found: Alert | Finding) -> Any:
    return found.since_at if isinstance(found, Alert) else found.since


def look(resource: GafferResource, job: str, key: dg.AssetKey) -> list[dg.AssetCheckEvaluation]:
    """Both checks of a job as they are now."""
    with db.connect(resource.url(), application_name="gaffer:checks") as connection:
        return list(evaluations(key, examine_job(connection, job)))


def checks_of(job: str, key: dg.AssetKey, database: str, name: str) -> dg.AssetChecksDefinition:
    """The checks of a job as a step of their own, by the name `name`."""
    specs = [dg.AssetCheckSpec(check, asset=key, description=told) for check, told in _DESCRIPTIONS.items()]

    @dg.multi_asset_check(name=name, specs=specs, can_subset=True, required_resource_keys={database})
    def execute(context: dg.AssetCheckExecutionContext) -> Iterator[dg.AssetCheckResult]:
        resource = resource_of(context.resources, database, job)
        for each in look(resource, job, key):
            if each.asset_check_key in context.selected_asset_check_keys:
                yield dg.AssetCheckResult(
                    passed=each.passed,
                    asset_key=key,
                    check_name=each.check_name,
                    metadata=each.metadata,
                    severity=each.severity,
                    description=each.description,
                )

    return execute


@dataclass
class Shown:
    """What the sensor has shown of the jobs of one database: kept in its cursor, so only what is red.

    `of`: names the set of jobs; `red`: by job its open incidents, and how often each was reminded of; `swept`: where
    all are shown again, the last that was.
    """

    of: str = ""
    red: dict[str, str] = field(default_factory=dict[str, str])
    swept: str | None = None


def read(cursor: str | None) -> dict[str, Shown]:
    """By database. Empty where an older version wrote the cursor, or nobody has."""
    try:
        return {name: Shown(**stored) for name, stored in json.loads(cursor or "{}").items()}
    except (ValueError, TypeError, AttributeError):
        return {}


def write(shown: Mapping[str, Shown]) -> str:
    return json.dumps({name: vars(each) for name, each in shown.items()}, separators=(",", ":"))


def changes(
    shown: Shown, jobs: Mapping[str, dg.AssetKey], opened: Sequence[Alert], anew: Collection[str]
) -> list[dg.AssetCheckEvaluation]:
    """The checks whose verdict is another one than what was shown, and those of the jobs `anew`; all of them where the
    set of jobs is another one. Of so many jobs at a time as are shown in short order; notes it in `shown`."""
    found: dict[str, list[Alert]] = {}
    for alert in opened:
        if alert.job is not None and alert.job in jobs:
            found.setdefault(alert.job, []).append(alert)
    red = {job: ",".join(f"{each.id}.{each.reminders}" for each in found[job]) for job in sorted(found)}
    names = sorted(jobs)
    of = hashlib.sha256("\n".join(names).encode()).hexdigest()[:8]
    if of != shown.of:
        shown.of, shown.swept = of, ""
        shown.red = {job: text for job, text in shown.red.items() if job in jobs}
    todo = [name for name in names if name in anew]
    todo += [name for name in names if name not in anew and red.get(name) != shown.red.get(name)]
    if shown.swept is not None:
        left = [name for name in names if name > shown.swept]
        part = left[: max(0, _MOST_JOBS - len(todo))]
        shown.swept = None if part == left else part[-1] if part else shown.swept
        todo += [name for name in part if name not in todo]
    told: list[dg.AssetCheckEvaluation] = []
    for name in todo[:_MOST_JOBS]:
        told += evaluations(jobs[name], found.get(name, ()))
        shown.red.pop(name, None)
        if name in red:
            shown.red[name] = red[name]
    return told
