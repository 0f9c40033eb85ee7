"""A real Dagster at work in a round: an instance of its own, a code location, and two daemons at once.

Its schedules wake each minute, and its sensor follows up. Runs are launched by hand as well, each with an order for
what is to happen to it (`orders.Order`).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import dagster as dg
import yaml
from dagster._core.workspace.context import WorkspaceProcessContext
from dagster._core.workspace.load_target import WorkspaceFileTarget
from dagster_graphql.test.utils import execute_dagster_graphql

from gaffer_dagster.adapter.definitions import dagster_name
from tests.dagster.deployment import LAUNCH, ROOT, Deployment, wait_until
from tests.evidence.chaos.jobs import LEASE
from tests.evidence.chaos.orders import ORDER, REVOKED, Order, Part, note_of
from tests.evidence.chaos.statuses import DagsterRun, Row
from tests.support import jobs as plain

if TYPE_CHECKING:
    from tests.evidence.chaos.scene import Scene

_NAME = "location"
_COORDINATOR = {"module": "dagster.core.run_coordinator", "class": "QueuedRunCoordinator"}
_AT_ONCE = 3
"""So many runs with an order are under way, at most."""
_PATIENCE = 120.0
_DAEMON_LIVES = 30.0
"""So many seconds nothing is done to a daemon after something was done to one: they take long to start."""
_TERMINATE = "mutation ($id: String!) { terminateRun(runId: $id) { __typename } }"
_ENDED = (dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED)


@dataclass(frozen=True)
class Launched:
    """A run that was launched for a fault, which strikes once the run has come to the place of its order."""

    fault: str
    job: str
    order: Order
    run: Future[str | None]
    """Its id; None: Dagster could not launch it."""


class Dagster:
    """`daemons`: so many at once; none: whatever is launched is run at once, and nothing else is."""

    def __init__(self, scene: Scene, names: list[str], daemons: int = 2) -> None:
        self._scene, self._names, self._count = scene, names, daemons
        self._home = scene.folder / "dagster"
        self._stack = ExitStack()
        self._launched: list[Launched] = []
        self._pool = ThreadPoolExecutor(_AT_ONCE)  # Dagster takes seconds to answer, and a fault may not wait
        self._looks_at = self._daemons_rest_until = 0.0
        self._is_over = False
        self.daemons: list[subprocess.Popen[bytes]] = []
        self.runs: list[DagsterRun] = []
        """How the runs ended, once it has stopped."""

    # ── an actor ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        self._home.mkdir()
        self._deployment = Deployment(self._home, self._scene.url)
        self._stack.callback(self._deployment.stop)
        port = str(self._deployment.port)
        part = Part(str(self._scene.folder), self._scene.seed, self._names)
        self._deployment.environment |= {"PYTHONPATH": str(ROOT), "CHAOS": json.dumps(asdict(part))}
        settings: dict[str, Any] = {"telemetry": {"enabled": False}, "run_coordinator": dict(_COORDINATOR)}
        if self._count:
            settings["run_coordinator"]["config"] = {"max_concurrent_runs": 6, "dequeue_interval_seconds": 1}
        else:
            settings["run_coordinator"]["class"] = "DefaultRunCoordinator"
        (self._home / "dagster.yaml").write_text(yaml.safe_dump(settings))
        server = {"host": "127.0.0.1", "port": self._deployment.port, "location_name": _NAME}
        (self._home / "workspace.yaml").write_text(yaml.safe_dump({"load_from": [{"grpc_server": server}]}))
        # Its storage is made here, once: two processes that make it at once spoil it.
        self._instance = self._stack.enter_context(dg.DagsterInstance.from_config(str(self._home)))
        module = ["-m", "tests.evidence.chaos.location", "--location-name", _NAME]
        self._server = self._deployment.start("dagster", "api", "grpc", "-h", "127.0.0.1", "-p", port, *module)
        wait_until(self._is_up, _PATIENCE, "Dagster's code server")
        target = WorkspaceFileTarget([str(self._home / "workspace.yaml")])
        self._workspace = self._stack.enter_context(WorkspaceProcessContext(self._instance, target))
        self.daemons = [self._start_daemon() for _ in range(self._count)]
        if self.daemons:
            wait_until(self._has_a_daemon, _PATIENCE, "a daemon that launches runs")

    def mend(self) -> None:
        """Hears which runs have done as they were told."""
        if time.monotonic() < self._looks_at:
            return
        self._looks_at = time.monotonic() + 0.2
        assert all(process.poll() is None for process in [self._server, *self.daemons]), self._deployment.logs()
        for launched in [each for each in self._launched if each.run.done()]:
            run_id = launched.run.result()
            notes = list(self._scene.folder.glob(note_of(self._scene.folder, run_id or "", "*").name))
            if notes:
                self._struck(launched, {int(note.name.rsplit("-", 1)[1]) for note in notes})
            elif run_id is not None and self._status(run_id) not in _ENDED:
                continue  # else it was busy, or had too little to do
            self._launched.remove(launched)

    def stop(self) -> None:
        """Runs end as they are; nothing is launched any more."""
        while self.daemons:
            self.daemons.pop().kill()
        self._pool.shutdown()
        self.no_more()
        wait_until(lambda: not self._at_work(), _PATIENCE, "the end of all runs")
        self.runs = list(self._found())
        self.destroy()

    def destroy(self) -> None:
        self._pool.shutdown()
        self._stack.close()

    # ── what faults do ───────────────────────────────────────────────────────────────────────────────────────────────

    def launch(self, fault: str, order: Order, *, by_button: bool) -> None:
        """As a job's run, or as what the "Materialize" button launches: its work is then in a step's process."""
        if len(self._launched) >= _AT_ONCE or self._is_over:
            return
        job = self._scene.chance.choice(self._names)
        selector = {
            "repositoryLocationName": _NAME,
            "repositoryName": "__repository__",
            "jobName": "__ASSET_JOB" if by_button else f"{dagster_name(job)}_job",
            "assetSelection": [{"path": [job]}],
            "assetCheckSelection": [],
        }
        tags = [{"key": ORDER, "value": json.dumps(asdict(order))}]
        params = {
            "selector": selector, "mode": "default", "runConfigData": {}, "executionMetadata": {"tags": tags},
        }  # fmt: skip
        self._launched.append(Launched(fault, job, order, self._pool.submit(self._launch, params)))

    def _launch(self, params: dict[str, Any]) -> str | None:
        told = self._graphql(LAUNCH, params=params)["launchRun"]
        return told["run"]["runId"] if told["__typename"] == "LaunchRunSuccess" else None

    def a_daemon(self) -> subprocess.Popen[bytes] | None:
        """One to which something may be done now."""
        if time.monotonic() < self._daemons_rest_until or not self.daemons:
            return None
        self._daemons_rest_until = time.monotonic() + _DAEMON_LIVES
        return self._scene.chance.choice(self.daemons)

    def kill_daemon(self, daemon: subprocess.Popen[bytes], seconds: float) -> None:
        """Another one takes its place in so many seconds."""
        self.daemons.remove(daemon)
        daemon.kill()

        def again() -> None:
            if not self._is_over:
                self.daemons.append(self._start_daemon())

        self._scene.later(seconds, again)

    def no_more(self) -> None:
        """No order is followed from now on, and who was stopped goes on."""
        self._is_over = True
        (self._scene.folder / REVOKED).touch()
        self._launched.clear()
        for pid in self._at_work():
            self._resume(pid)

    def _struck(self, launched: Launched, pids: set[int]) -> None:
        scene, run_id = self._scene, launched.run.result()
        scene.struck(launched.fault, f"{launched.order.place} {run_id}", launched.job)
        if launched.order.stops:
            for pid in pids:
                scene.later(LEASE.total_seconds() * scene.chance.uniform(1.05, 1.6), lambda pid=pid: self._resume(pid))
        if launched.order.waits:
            self._pool.submit(self._graphql, _TERMINATE, id=run_id)

    def _resume(self, pid: int) -> None:
        if pid in self._at_work():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    # ── what it is ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _start_daemon(self) -> subprocess.Popen[bytes]:
        return self._deployment.start("dagster-daemon", "run", "-w", "workspace.yaml")

    def _is_up(self) -> bool:
        assert self._server.poll() is None, self._deployment.logs()
        with suppress(OSError), socket.create_connection(("127.0.0.1", self._deployment.port), timeout=1):
            return True
        return False

    def _has_a_daemon(self) -> bool:
        return self._instance.get_daemon_statuses()["QUEUED_RUN_COORDINATOR"].healthy is True

    def _graphql(self, query: str, **variables: Any) -> dict[str, Any]:
        answer = execute_dagster_graphql(self._workspace.create_request_context(), query, variables)
        assert not answer.errors, answer.errors
        return dict(answer.data)

    def _status(self, run_id: str) -> dg.DagsterRunStatus | None:
        run = self._instance.get_run_by_id(run_id)
        return None if run is None else run.status

    def _at_work(self) -> list[int]:
        """The processes of runs and of steps, also those whose run is no more: all are of the code server's group."""
        return [pid for pid in _group(self._server.pid) if pid != self._server.pid]

    def _found(self) -> Iterator[DagsterRun]:
        for run in self._instance.get_runs():
            shown: list[tuple[int, int]] = []
            of_type = dg.DagsterEventType.ASSET_MATERIALIZATION
            for record in self._instance.get_records_for_run(run.run_id, of_type=of_type).records:
                event = record.event_log_entry.asset_materialization
                assert event is not None
                told: dict[str, Any] = {key: value.value for key, value in event.metadata.items()}
                shown.append((told["gaffer/run_id"], told["gaffer/items"]))
            yield DagsterRun(run.run_id, run.status.value, tuple(shown))


def rows(url: str) -> list[Row]:
    return [
        Row(*row)
        for row in plain.query(
            url, "select id, job, dagster_run_id, outcome, items from gaffer.job_runs where dagster_run_id is not null"
        )
    ]


def _group(leader: int) -> Iterator[int]:
    for file in os.listdir("/proc"):
        with suppress(OSError, ValueError):
            pid = int(file)
            with open(f"/proc/{pid}/stat") as stat, open(f"/proc/{pid}/cmdline") as command:
                state, _, group = stat.read().rsplit(")", 1)[1].split()[:3]
                if int(group) == leader and state != "Z" and "resource_tracker" not in command.read():
                    yield pid
