"""The resource: where the tables of gaffer_dagster are, and a run of any job inside any op.

It holds no connection and opens no transaction of its own: a resource never sees the exception of the op that uses
it, so everything that must be undone lives in the op's body.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any, TypedDict

import dagster as dg
from pydantic import ConfigDict, Field
from typing_extensions import Unpack

from gaffer_dagster import database
from gaffer_dagster.domain.progress import Progress
from gaffer_dagster.domain.spec import JobSpec
from gaffer_dagster.engine.log import wrap
from gaffer_dagster.engine.run import Run, open_run
from gaffer_dagster.errors import BadInputError, BadSpecError

TICK_TAG = "gaffer/tick"
_SCHEDULE_TAG = "dagster/schedule_name"
_SENSOR_TAG = "dagster/sensor_name"
_PARENT_TAG = "dagster/parent_run_id"
_RETRY_TAG = "dagster/retry_number"


class RunOptions(TypedDict, total=False):
    """Of `gaffer_dagster.engine.run.open_run`, as far as Dagster does not know them."""

    despite_pause: bool
    redo: datetime | None
    work_hash: str | None
    known: Collection[str]
    on_progress: Callable[[Progress], None]
    progress_every: timedelta


class GafferResource(dg.ConfigurableResource[Any]):
    """The Postgres database that holds the leases, watermarks and run records, and that the jobs write to.

    Give `dsn` as `dg.EnvVar("GAFFER_DATABASE_URL")`: Dagster stores and shows a literal value in clear. `"local"`
    stands for a private server for development, kept in `.gaffer/` of the current folder.
    """

    model_config = ConfigDict(hide_input_in_errors=True)

    dsn: str = Field(
        repr=False, description="The database's URL; name a variable with dg.EnvVar, since a literal is shown in clear."
    )

    def url(self) -> str:
        """The URL itself; starts the private server where that is meant."""
        return database.resolve(self._given())

    def at_hand(self) -> str:
        """The URL itself, and nothing is started for it. Raises where the private server does not run."""
        return database.at_hand(self._given())

    def _given(self) -> str:
        given = self.dsn
        if isinstance(given, dg.EnvVar):
            variable, given = given.env_var_name, given.get_value()
            if not given:
                raise BadInputError(
                    f"{variable} is not set; set it to the database's URL, or to {database.LOCAL!r} for a private one"
                )
        return given

    @contextmanager
    def run(self, spec: JobSpec, **options: Unpack[RunOptions]) -> Generator[Run]:
        """A run of `spec` within the current op or asset: `with gaffer.run(spec) as run: for batch in run: ...`

        Each batch commits when the next one is asked for. When another run has the lease, `run.outcome` says `busy`
        and there are no batches. `options` are those of `gaffer_dagster.engine.run.open_run`.
        """
        context = _current_context()
        with open_run(
            spec,
            self.url(),
            log=wrap(dg.get_dagster_logger("gaffer")),
            **({} if context is None else _from_dagster(context)),
            **options,
        ) as run:
            yield run


def resource_of(resources: Any, database: str, job: str) -> GafferResource:
    """The resource that a job is to use. Raises `BadSpecError` where another one has its key."""
    found = getattr(resources, database)
    if not isinstance(found, GafferResource):
        raise BadSpecError(f"job {job!r}: the resource {database!r} is a {type(found).__name__}, not a GafferResource")
    return found


def _current_context() -> dg.OpExecutionContext | dg.AssetExecutionContext | None:
    try:
        return dg.AssetExecutionContext.get()
    except dg.DagsterInvariantViolationError:
        return None


def trigger_of(tags: Mapping[str, str]) -> str:
    """What started a run of Dagster's, by its tags."""
    if _PARENT_TAG in tags and _RETRY_TAG not in tags:  # somebody runs it again, and it has the first one's tags
        return "manual"
    return "schedule" if _SCHEDULE_TAG in tags else "sensor" if _SENSOR_TAG in tags else "manual"


def _from_dagster(context: dg.OpExecutionContext | dg.AssetExecutionContext) -> dict[str, Any]:
    tags = context.run.tags
    tick = tags.get(TICK_TAG)
    return {
        "trigger": trigger_of(tags),
        "tick": None if tick is None else datetime.fromisoformat(tick),
        "dagster_run_id": context.run.run_id,
        # A step process outlives its killed run; whoever lost his parent must not go on. An ephemeral instance
        # belongs to this very process (dg.materialize), which may outlive the shell that started it.
        "parent": None if context.instance.is_ephemeral else os.getppid(),
        "context": context,
    }
