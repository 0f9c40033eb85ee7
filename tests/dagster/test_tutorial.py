"""The last part of docs/tutorial.md, which serves until it is stopped: a run in `dagster dev`, killed in mid-batch."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from gaffer_dagster.store import db, prepare
from tests.dagster.deployment import Deployment, wait_until
from tests.support import jobs, pages

pytestmark = pytest.mark.timeout(420)
TUTORIAL = list(pages.blocks((pages.ROOT / "docs" / "tutorial.md").read_text()))


@pytest.fixture
def tutorial(url: str, tmp_path: Path) -> Iterator[Deployment]:
    """Its tables and its `jobs.py`, in `dagster dev` as it says to start it."""
    (tmp_path / "jobs.py").write_text(next(block.text for block in TUTORIAL if block.file == "jobs.py"))
    tables = next(block.text for block in TUTORIAL if block.text.startswith("create table orders"))
    jobs.execute(url, tables)
    with db.connect(url, application_name="test") as connection:
        prepare.apply(connection, prepare.statements(connection, "orders", "id", changed=None))
    started = Deployment(tmp_path, url)
    (tmp_path / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
    (serve,) = [block.text.split() for block in TUTORIAL if block.text.startswith("dagster dev")]
    started.start(*serve, "-h", "127.0.0.1", "-p", str(started.port))
    yield started
    started.stop()


def holder(url: str) -> int | None:
    """The process of the run at work, once it has committed a batch and is in another."""
    found = jobs.query(
        url,
        """
        select split_part(lease.owner, ':', 2)::int
          from gaffer.job_lease lease join gaffer.job_runs run using (lease_id)
         where run.batches between 1 and 6
        """,
    )
    return found[0][0] if found else None


def test_a_run_that_is_killed_in_dagster_dev_loses_nothing(tutorial: Deployment, url: str) -> None:
    pid = wait_until(lambda: holder(url), 240, "a run at work in its second batch")
    os.kill(pid, signal.SIGKILL)
    invoices = "select count(*), count(distinct order_id) from invoices"
    wait_until(lambda: jobs.query(url, "select from gaffer.job_runs where outcome = 'succeeded'"), 240, "the next run")
    assert jobs.query(url, invoices) == [(5000, 5000)]
    outcomes = [row[0] for row in jobs.query(url, "select outcome from gaffer.job_runs order by id")]
    assert "abandoned" in outcomes
