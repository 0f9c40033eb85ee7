"""Real Dagster processes for a test: started from Python, so that they heed their signals, and stopped for good."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import requests

ROOT = Path(__file__).parents[2]
PROJECT = Path(__file__).parent / "project" / "definitions.py"
BIN = Path(sys.executable).parent
T = TypeVar("T")

LAUNCH = """
mutation ($params: ExecutionParams!) {
  launchRun(executionParams: $params) {
    __typename
    ... on LaunchRunSuccess { run { runId } }
    ... on PythonError { message }
    ... on InvalidSubsetError { message }
    ... on RunConfigValidationInvalid { errors { message } }
  }
}
"""
RUN = """
query ($id: ID!) {
  runOrError(runId: $id) {
    ... on Run { status startTime endTime tags { key value } }
  }
}
"""
RUNS = "query { runsOrError(limit: 100) { ... on Runs { results { runId status jobName tags { key value } } } } }"
_WATCH = '{repositoryLocationName: "location", repositoryName: "__repository__", sensorName: "gaffer_watch"}'
WATCH = f"query {{ sensorOrError(sensorSelector: {_WATCH}) {{ ... on Sensor {{ sensorState {{ id status }} }} }} }}"
WATCH_ON = f"mutation {{ startSensor(sensorSelector: {_WATCH}) {{ __typename }} }}"
WATCH_OFF = "mutation ($id: String!) { stopSensor(id: $id) { __typename } }"
EVENTS = """
query ($id: ID!) {
  logsForRun(runId: $id, limit: 1000) {
    ... on EventConnection {
      events {
        __typename
        ... on MessageEvent { message level }
        ... on ErrorEvent { error { message cause { message } } }
      }
    }
  }
}
"""


def wait_until(ask: Callable[[], T | None], seconds: float, what: str) -> T:
    """Polls until `ask` says something that counts as true."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        answer = ask()
        if answer:
            return answer
        time.sleep(0.1)
    raise AssertionError(f"not within {seconds} s: {what}")


class Deployment:
    """A folder as DAGSTER_HOME, the processes started in it, and the GraphQL of its webserver."""

    def __init__(self, home: Path, url: str) -> None:
        self.home = home
        self.environment = {
            **os.environ,
            "DAGSTER_HOME": str(home),
            "GAFFER_DATABASE_URL": url,
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "DAGSTER_DISABLE_TELEMETRY": "yes",
        }
        self.port = _free_port()
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        log = (self.home / f"{len(self._processes)}-{command[0]}.log").open("wb")
        process = subprocess.Popen(
            [str(BIN / command[0]), *command[1:]],
            cwd=self.home,
            env=self.environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._processes.append(process)
        return process

    def stop(self) -> None:
        for process in reversed(self._processes):
            process.send_signal(signal.SIGTERM)
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # whatever it has left behind

    def graphql(self, query: str, **variables: Any) -> dict[str, Any]:
        answer = requests.post(
            f"http://127.0.0.1:{self.port}/graphql", json={"query": query, "variables": variables}, timeout=30
        ).json()
        assert "errors" not in answer, answer
        return answer["data"]

    def is_up(self) -> bool:
        try:
            found = self.graphql("query { repositoriesOrError { ... on RepositoryConnection { nodes { name } } } }")
        except (requests.RequestException, ValueError):
            return False
        return bool(found["repositoriesOrError"].get("nodes"))

    def launch(self, job: str, asset: str, name: str) -> str:
        """Launches a job (`__ASSET_JOB` is what the "Materialize" button launches); returns the run's id."""
        selector = {
            "repositoryLocationName": "location",
            "repositoryName": "__repository__",
            "jobName": job,
            "assetSelection": [{"path": [asset]}],
            "assetCheckSelection": [],
        }
        params = {
            "selector": selector,
            "mode": "default",
            "runConfigData": {},
            "executionMetadata": {"tags": [{"key": "test/job", "value": name}]},
        }
        told = self.graphql(LAUNCH, params=params)["launchRun"]
        assert told["__typename"] == "LaunchRunSuccess", told
        return told["run"]["runId"]

    def watch(self, *, on: bool) -> None:
        """Switches the sensor, as its toggle in the page does: where it is on, it follows up what a test has killed."""
        state = self.graphql(WATCH)["sensorOrError"]["sensorState"]
        told = self.graphql(WATCH_ON) if on else self.graphql(WATCH_OFF, id=state["id"])
        wanted = "RUNNING" if on else "STOPPED"
        assert self.graphql(WATCH)["sensorOrError"]["sensorState"]["status"] == wanted, told

    def status(self, run: str) -> str:
        return self.graphql(RUN, id=run)["runOrError"]["status"]

    def finish(self, run: str, seconds: float = 60) -> str:
        """Waits for the run's end; returns its status."""
        ends = ("SUCCESS", "FAILURE", "CANCELED")

        def ended() -> str | None:
            status = self.status(run)
            return status if status in ends else None

        return wait_until(ended, seconds, f"the end of run {run}")

    def events(self, run: str) -> list[dict[str, Any]]:
        return self.graphql(EVENTS, id=run)["logsForRun"]["events"]

    def runs(self) -> list[dict[str, Any]]:
        return self.graphql(RUNS)["runsOrError"]["results"]

    def logs(self) -> str:
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.home.glob("*.log")))


@contextmanager
def deployment(home: Path, url: str, yaml: str, project: Path = PROJECT) -> Generator[Deployment]:
    """An empty DAGSTER_HOME with this dagster.yaml and a code location; its processes end with the block."""
    home.mkdir(parents=True, exist_ok=True)
    (home / "dagster.yaml").write_text(yaml)
    shutil.copy(project, home / "definitions.py")
    (home / "workspace.yaml").write_text(
        "load_from:\n  - python_file: {relative_path: definitions.py, location_name: location}\n"
    )
    made = Deployment(home, url)
    try:
        yield made
    finally:
        made.stop()


def shipped_yaml() -> str:
    return (ROOT / "dagster.yaml").read_text()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
