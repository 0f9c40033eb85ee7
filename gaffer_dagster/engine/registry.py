"""Making jobs known, all of a code location at once: before their first run, and whenever their definition changes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from datetime import datetime, timezone

from gaffer_dagster.domain.lease import clocks_apart
from gaffer_dagster.domain.spec import JobSpec
from gaffer_dagster.engine.zone_data import zone_data
from gaffer_dagster.errors import ClockSkewError, RenamedJobError
from gaffer_dagster.store import db, jobs, migrate, operations
from gaffer_dagster.store.jobs import Registration
from gaffer_dagster.store.operations import Operator


@dataclass(frozen=True)
class Definition:
    """A job as it is defined here. `work_hash`: see `domain.spec.work_hash`."""

    spec: JobSpec
    work_hash: str | None


def registration_of(definition: Definition, known: Collection[str], *, as_new: bool = False) -> Registration:
    schedule = definition.spec.schedule
    return Registration(
        definition.work_hash,
        frozenset(known),
        zone_data=None if schedule is None else zone_data(schedule.timezone),
        as_new=as_new,
    )


def register_all(
    connection: db.Connection,
    definitions: Iterable[Definition],
    *,
    new: Collection[str] = (),
    operator: Operator | None = None,
    now: datetime | None = None,
    worker_clock: Callable[[], datetime] = lambda: datetime.now(timezone.utc),
) -> list[str]:
    """Makes the jobs known, and returns the names of those that were not, or not so. `new`: jobs that are no renamed
    ones though they do the work of others; `operator`: who asked for it, where somebody did; `now`: the database's
    time, where the tables were just verified. Raises `ClockSkewError`, and `RenamedJobError` once all others are known.
    """
    found = {definition.spec.name: definition for definition in definitions}
    apart = clocks_apart(now or migrate.verify(connection), worker_clock())
    if apart is not None:
        raise ClockSkewError(apart)
    before = jobs.hashes(connection, list(found))
    changed: list[str] = []
    refused: list[RenamedJobError] = []
    for name, definition in found.items():
        wanted = registration_of(definition, found, as_new=name in new)
        if before.get(name) != (definition.spec.hash, wanted.work_hash, wanted.zone_data):
            try:
                with db.impatient(connection):
                    jobs.register(connection, definition.spec, wanted)
                    if operator is not None:
                        operations.note(connection, name, "register", operator, {"as_new": name in new})
            except RenamedJobError as error:
                refused.append(error)
            else:
                changed.append(name)
    if refused:
        raise RenamedJobError("\n".join(str(error) for error in refused))
    return changed
