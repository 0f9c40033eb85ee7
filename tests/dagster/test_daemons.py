"""Two daemons on one instance, and an instance that nobody configured."""

from __future__ import annotations

import time
from pathlib import Path
from urllib.parse import quote

import pytest
from psycopg.conninfo import conninfo_to_dict

from tests.dagster.deployment import deployment, wait_until
from tests.dagster.test_dev import make_tables, seen, step
from tests.support import jobs

pytestmark = pytest.mark.timeout(800)

OTHER = "Another SCHEDULER daemon is still sending heartbeats"
# In Dagster's own tables.
RUNS = """
select (select count(*) >= 2 from runs where status = 'SUCCESS'),
       (select count(distinct value) >= 2 from run_tags where key = 'dagster/tick')
"""


def test_two_daemons_on_one_instance_do_every_effect_once(url: str, tmp_path: Path) -> None:
    make_tables(url)
    yaml = "storage: {postgres: {postgres_url: {env: STORAGE_URL}}}\ntelemetry: {enabled: false}\n"
    with deployment(tmp_path / "home", url, yaml) as made:
        made.environment["STORAGE_URL"] = storage_url(url)
        made.start("dagster", "instance", "migrate").wait(60)
        for _ in range(2):
            made.start("dagster-daemon", "run", "-w", "workspace.yaml")
        rows, deadline = 0, time.monotonic() + 300
        while time.monotonic() < deadline:
            jobs.add_rows(url, 3, table="source_ticking")
            rows += 3
            # Both are up, too: the second one says so.
            if jobs.query(url, RUNS) == [(True, True)] and OTHER in made.logs():
                break
            time.sleep(0.5)
        wait_until(
            lambda: jobs.query(url, "select 1 where (select count(*) from target_ticking) >= %s", rows), 150, "all done"
        )
        assert OTHER in made.logs()  # there were two indeed
    assert jobs.query(url, "select id from source_ticking except all select id from target_ticking") == []
    assert jobs.query(url, "select id from target_ticking except all select id from source_ticking") == []


def storage_url(url: str) -> str:
    """The same database for Dagster's own storage, with the driver named (else SQLAlchemy 2.1 takes psycopg 3)."""
    parts = conninfo_to_dict(url)
    host = quote(str(parts.get("host", "localhost")), safe="")
    return (
        f"postgresql+psycopg2://{parts['user']}:{quote(str(parts.get('password', '')), safe='')}@/{parts['dbname']}"
        f"?host={host}&port={parts.get('port', 5432)}"
    )


def test_without_configuration_a_second_run_ends_busy_at_once(url: str, tmp_path: Path) -> None:
    make_tables(url)
    with deployment(tmp_path / "home", url, "telemetry: {enabled: false}\n") as made:
        made.start("dagster", "dev", "-h", "127.0.0.1", "-p", str(made.port))
        wait_until(made.is_up, 240, "the webserver")
        jobs.add_rows(url, 5, table="source_asked")
        step(url, "holder", "hold")
        holder = made.launch("asked_job", "asked", "holder")
        seen(url, "holder")
        second = made.launch("asked_job", "asked", "second")
        assert made.finish(second) == "SUCCESS"
        events = [event["__typename"] for event in made.events(second)]
        assert "ObservationEvent" in events
        assert "MaterializationEvent" not in events
        assert jobs.query(url, "select outcome, items from gaffer.job_runs where dagster_run_id = %s", second) == [
            ("busy", 0)
        ]
        step(url, "holder", "go")
        assert made.finish(holder) == "SUCCESS"
        # The holder was told that it was wanted, looked again, and ended with nothing left.
        assert jobs.query(
            url, "select outcome, items, backlog from gaffer.job_runs where dagster_run_id = %s", holder
        ) == [("succeeded", 5, 0)]
