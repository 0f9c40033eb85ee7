"""A run launcher that does what a test says: it is Dagster's own, in this process, unless it is told to fail."""

from __future__ import annotations

from typing import ClassVar

from dagster._core.events import DagsterEvent, DagsterEventType
from dagster._core.launcher import LaunchRunContext
from dagster._core.launcher.sync_in_memory_run_launcher import SyncInMemoryRunLauncher
from dagster._core.storage.dagster_run import DagsterRun

OVERRIDE = {"module": "tests.dagster.launchers", "class": "SteeredLauncher"}
SECRET = "canary"


class SteeredLauncher(SyncInMemoryRunLauncher):
    does: ClassVar[str] = "run"
    """`run`; `raise`: it cannot launch; `die`: the worker is killed before its first word; `hang`: it is not heard of
    any more once it is STARTED; `wait`: nor once it is STARTING."""

    def launch_run(self, context: LaunchRunContext) -> None:
        run, does = context.dagster_run, self.does
        if does == "run":
            super().launch_run(context)
        elif does == "raise":
            raise ValueError(f"no worker for you at https://somebody:{SECRET}@example.com") from KeyError(SECRET)
        elif does != "wait":
            self._started(run)
        if does == "die":
            # As the code server does when it finds the process gone.
            self._instance.report_engine_event(
                f"Run execution process for {run.run_id} was terminated by signal 9", run
            )
            self._instance.report_run_failed(run)

    def _started(self, run: DagsterRun) -> None:
        event = DagsterEvent(DagsterEventType.PIPELINE_START.value, run.job_name, message="Started.")
        self._instance.report_dagster_event(event, run_id=run.run_id)
