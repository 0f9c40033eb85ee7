"""Dagster's own scheduler, sensor and queue, over a code location in this process, at whatever time a test says.

The clocks move together: that of this process, where Dagster evaluates, launches and executes, and that of the
database. Between two evaluations no time goes by but what the test lets go by.
"""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import uuid4

import dagster as dg
import pytest
import time_machine
from alembic.config import Config
from alembic.script import ScriptDirectory
from dagster._core.definitions.run_request import InstigatorType
from dagster._core.remote_origin import InProcessCodeLocationOrigin
from dagster._core.scheduler.instigation import InstigatorTick
from dagster._core.test_utils import InProcessTestWorkspaceLoadTarget
from dagster._core.types.loadable_target_origin import LoadableTargetOrigin
from dagster._core.workspace.context import WorkspaceProcessContext
from dagster._daemon.run_coordinator.queued_run_coordinator_daemon import QueuedRunCoordinatorDaemon
from dagster._daemon.sensor import execute_sensor_iteration
from dagster._scheduler.scheduler import ScheduleIterationTimes, launch_scheduled_runs
from dagster._utils.schedules import has_nonzero_minute_offset
from dagster_graphql.test.utils import execute_dagster_graphql

import gaffer_dagster as gd
from gaffer_dagster.testing import Clock
from tests.dagster.deployment import LAUNCH

SEED = 4711
MINUTE = timedelta(minutes=1)
# The daemon sleeps until a minute has begun, and this much longer.
AWAKE = timedelta(milliseconds=1)
_LOG = logging.getLogger("tests.dagster.moved")


def at(text: str) -> datetime:
    """An instant, written like 2027-10-28T06:00Z."""
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


@contextmanager
def instance_in(
    folder: Path, *, queued: bool = False, launcher: dict[str, Any] | None = None
) -> Iterator[dg.DagsterInstance]:
    """An instance that executes runs in this process, at once or when they come out of the queue, or has `launcher`."""
    # One file for the events of all runs: making one for each takes longer than a run.
    events = {
        "module": "dagster._core.storage.event_log",
        "class": "ConsolidatedSqliteEventLogStorage",
        "config": {"base_dir": str(folder)},
    }
    with (
        _migrations_kept(),
        dg.instance_for_test(
            overrides={"event_log_storage": events, **({} if launcher is None else {"run_launcher": launcher})},
            temp_dir=str(folder),
            synchronous_run_coordinator=not queued,
            synchronous_run_launcher=launcher is None,
        ) as instance,
    ):
        yield instance


@contextmanager
def _migrations_kept() -> Iterator[None]:
    """Dagster makes an instance for each evaluation, and for each instance loads the text of all its migrations."""
    load, kept = ScriptDirectory.from_config, dict[str | None, ScriptDirectory]()

    def from_config(config: Config) -> ScriptDirectory:
        where = config.get_main_option("script_location")
        kept[where] = kept.get(where) or load(config)
        return kept[where]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ScriptDirectory, "from_config", from_config)
        yield


class Location:
    """A code location, and the daemon that looks at it: what it remembers is lost when it is `restarted`."""

    def __init__(self, instance: dg.DagsterInstance, workspace: WorkspaceProcessContext, clock: Clock) -> None:
        self.instance, self.workspace, self.clock = instance, workspace, clock
        self.errors: list[str] = []
        """What Dagster's daemons said went wrong."""
        self._memory: dict[str, ScheduleIterationTimes] = {}

    @contextmanager
    def it_is(self, when: datetime) -> Iterator[None]:
        self.clock.set(when)
        with time_machine.travel(when, tick=True):
            yield

    def restarted(self) -> None:
        self._memory.clear()

    def iteration(self) -> Iterator[Any]:
        """One iteration of the scheduler, now, as it goes along."""
        for error in launch_scheduled_runs(self.workspace, _LOG, datetime.now(timezone.utc), self._memory):
            if error is not None:
                self.errors.append(str(error))
            yield error

    def evaluate(self, when: datetime) -> None:
        with self.it_is(when):
            list(self.iteration())

    def go(self, since: datetime, until: datetime, every: timedelta = MINUTE) -> None:
        """The scheduler from `since` to `until`, each minute or `every` so often.

        It is not called where it would only find that there is nothing to do yet, which it keeps in its memory.
        """
        when = since
        while when <= until:
            self.evaluate(when + AWAKE)
            sleeps_until = min((times.next_iteration_timestamp for times in self._memory.values()), default=0.0)
            when += every
            if sleeps_until > when.timestamp():
                when += -(-(datetime.fromtimestamp(sleeps_until, timezone.utc) - when) // every) * every

    def watch(self, when: datetime) -> None:
        """One iteration of the sensors."""
        with self.it_is(when):
            for error in execute_sensor_iteration(self.workspace, _LOG, None, None):
                if error is not None:
                    self.errors.append(str(error))

    def dequeue(self, when: datetime) -> None:
        with self.it_is(when):
            list(QueuedRunCoordinatorDaemon(interval_seconds=5).run_iteration(self.workspace))

    def launch(
        self, when: datetime, job: str, assets: Sequence[str] = (), *, checks: Sequence[dict[str, Any]] = ()
    ) -> str:
        """Launches a job as the webserver does (`__ASSET_JOB` is the "Materialize" button's); the run's id."""
        selector = {
            "repositoryLocationName": self.name,
            "repositoryName": "__repository__",
            "jobName": job,
            **({"assetSelection": [{"path": asset.split("/")} for asset in assets]} if assets else {}),
            **({"assetSelection": [], "assetCheckSelection": list(checks)} if checks else {}),
        }
        params = {"selector": selector, "mode": "default", "runConfigData": {}}
        with self.it_is(when):
            before = {run.run_id for run in self.instance.get_runs()}
            told = self.graphql(LAUNCH, params=params)["launchRun"]
            if told["__typename"] == "LaunchRunSuccess":
                return told["run"]["runId"]
            (failed,) = [run.run_id for run in self.instance.get_runs() if run.run_id not in before]
            return failed  # it could not be launched, and is on record

    def graphql(self, query: str, **variables: Any) -> dict[str, Any]:
        """What the webserver answers."""
        answer = execute_dagster_graphql(self.workspace.create_request_context(), query, variables)
        assert not answer.errors, answer.errors
        return answer.data

    @property
    def name(self) -> str:
        (name,) = self.workspace.create_request_context().code_location_names
        return name

    def ticks(self, kind: InstigatorType) -> list[InstigatorTick]:
        """The ticks of schedules or sensors, the newest first."""
        return [
            tick
            for state in self.instance.all_instigator_state(instigator_type=kind)
            if _location_of(state.origin) == self.name
            for tick in self.instance.get_ticks(state.instigator_origin_id, state.selector_id)
        ]

    def runs(self, job: str) -> list[dg.DagsterRun]:
        """The runs of a job, the oldest first."""
        found = self.instance.get_runs(dg.RunsFilter(tags={"gaffer/job": job}))[::-1]
        return [run for run in found if _location_of(run.remote_job_origin) == self.name]


def _location_of(origin: Any) -> str:
    return origin.repository_origin.code_location_origin.location_name


@contextmanager
def location(
    instance: dg.DagsterInstance, clock: Clock, definitions: dg.Definitions, *, name: str | None = None
) -> Iterator[Location]:
    """`definitions` as a code location of the instance."""
    module = ModuleType(name or f"location_{uuid4().hex[:12]}")
    vars(module)["defs"] = definitions
    sys.modules[module.__name__] = module
    has_nonzero_minute_offset.cache_clear()  # Dagster keeps the offsets of the day on which it was started
    random.seed(SEED)  # of the jitter of its checkpoints
    print(f"seed {SEED}")
    origin = LoadableTargetOrigin(module_name=module.__name__, attribute="defs")
    target = InProcessTestWorkspaceLoadTarget(InProcessCodeLocationOrigin(origin, location_name=module.__name__))
    try:
        with WorkspaceProcessContext(instance, target) as workspace:
            yield Location(instance, workspace, clock)
    finally:
        del sys.modules[module.__name__]
        has_nonzero_minute_offset.cache_clear()


def stock(definitions: dg.Definitions, schedule: gd.Schedule) -> dg.Definitions:
    """The same location with Dagster's own schedule in the place of ours."""
    (ours,) = definitions.schedules or []
    theirs = dg.ScheduleDefinition(
        name=ours.name,
        job_name=ours.job_name,
        cron_schedule=schedule.cron if isinstance(schedule.cron, str) else list(schedule.cron),
        execution_timezone=schedule.timezone,
        default_status=dg.DefaultScheduleStatus.RUNNING,
    )
    return dg.Definitions(
        assets=definitions.assets,
        jobs=definitions.jobs,
        schedules=[theirs],
        sensors=definitions.sensors,
        resources=definitions.resources,
    )
