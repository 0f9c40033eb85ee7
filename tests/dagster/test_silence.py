"""End to end, with real processes: Dagster's daemon is killed, and somebody hears that nothing happens any more."""

from __future__ import annotations

import json
import os
import signal
import time
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.dagster.deployment import Deployment, deployment, shipped_yaml, wait_until
from tests.support import jobs, warm
from tests.support.receivers import HttpReceiver

pytestmark = pytest.mark.timeout(600)

GRACE = timedelta(seconds=40)
DEFINITIONS = """
import dagster as dg
import gaffer_dagster as gd


@gd.gaffer_asset(
    schedule=gd.Schedule("* * * * *"),
    due=gd.NewRows("source", "id"),
    bounds=gd.Bounds(timeout="20s"),
    alerts=gd.Alerts(grace="40s"),
)
def heard(batch: gd.Batch) -> None:
    batch.insert("target", [{"id": row["id"], "fence": batch.fence, "batch": batch.number} for row in batch.rows])


defs = gd.build_definitions(heard, resource=gd.GafferResource(dsn=dg.EnvVar("GAFFER_DATABASE_URL")))
"""


def check(made: Deployment, *words: str) -> tuple[int, dict[str, Any]]:
    """What `gaffer check` of another host's cron says."""
    done = warm.gaffer(None, made.home, "check", "--json", *words, **made.environment)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, json.loads(done.stdout)


def overdue(told: dict[str, Any]) -> list[dict[str, Any]]:
    return [each for each in told["findings"] if each["kind"] == "absence"]


def test_a_daemon_that_is_killed_is_heard_of_once_and_its_return_too(url: str, tmp_path: Path) -> None:
    jobs.make_source(url, 3)
    with HttpReceiver() as receiver, deployment(tmp_path / "home", url, shipped_yaml()) as made:
        (made.home / "definitions.py").write_text(DEFINITIONS)
        made.environment |= {"GAFFER_RECEIVER_ONCALL": receiver.url, "GAFFER_RECEIVER_ONCALL_PRIVATE": "1"}
        daemon = made.start("dagster-daemon", "run", "-w", "workspace.yaml")
        succeeded = "select 1 from gaffer.job where last_success_at is not null"
        wait_until(lambda: jobs.query(url, succeeded), 240, "a success")
        wait_until(lambda: jobs.query(url, "select 1 from gaffer.watch where name like 'dagster:%%'"), 90, "a pass")
        code, told = check(made, "--notify", "--every=10s", "--name=elsewhere")
        assert (code, overdue(told), receiver.messages) == (0, [], [])

        os.killpg(daemon.pid, signal.SIGKILL)
        killed = time.monotonic()
        (due,) = jobs.query(url, "select next_due_at from gaffer.job")[0]
        while code == 0 and time.monotonic() - killed < 60 + GRACE.total_seconds() + 30:
            soon = datetime.now(due.tzinfo) > due + GRACE - timedelta(seconds=15)
            time.sleep(2 if soon else 8)  # each look is a process
            code, told = check(made, "--notify", "--every=10s", "--name=elsewhere")
        assert code == 1, "nobody heard it"
        (found,) = overdue(told)
        # A run that was under way may have covered the tick that was waited for as the daemon was killed.
        since = datetime.fromisoformat(found["since"])
        assert since in (due + GRACE, due + GRACE + timedelta(minutes=1))
        assert datetime.fromisoformat(told["at"]) - since < timedelta(seconds=15)
        for _ in range(3):
            assert check(made, "--notify", "--every=10s", "--name=elsewhere")[0] == 1
        (opened,) = receiver.messages
        assert (opened["event"], opened["job"], opened["kind"]) == ("opened", "heard", "absence")
        assert datetime.fromisoformat(opened["since_at"]) == since

        made.start("dagster-daemon", "run", "-w", "workspace.yaml")
        wait_until(lambda: check(made)[0] == 0, 240, "all is well again")
        check(made, "--notify", "--every=10s", "--name=elsewhere")
        wait_until(lambda: len(receiver.messages) >= 2, 60, "the notice of recovery")
        resolved = receiver.messages[1]
        assert (resolved["event"], resolved["incident"]) == ("resolved", opened["incident"])
        assert len(receiver.messages) == 2
    assert jobs.query(url, "select count(*), count(resolved_at) from gaffer.alert where kind = 'absence'") == [(1, 1)]
