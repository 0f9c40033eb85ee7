"""Long work says how far it has got."""

from __future__ import annotations

import os
import pty
import re
import subprocess
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

import gaffer_dagster as gd
from gaffer_dagster.adapter import assets
from gaffer_dagster.domain.bounds import Bounds
from gaffer_dagster.domain.due import NewRows, PendingRows
from gaffer_dagster.domain.progress import BACKLOG_CEILING, Progress
from gaffer_dagster.domain.run import Outcome
from gaffer_dagster.domain.spec import JobSpec
from gaffer_dagster.testing import Clock
from tests.support import jobs, warm

NOW = datetime(2027, 1, 1, tzinfo=timezone.utc)
AT_ONCE = timedelta(0)
FILE = """
import gaffer_dagster as gd


@gd.gaffer_asset(due=gd.NewRows("source", "id"), bounds=gd.Bounds(batch_rows=10, timeout="5m"))
def copy_rows(batch: gd.Batch) -> None:
    batch.insert("target", [{"id": row["id"]} for row in batch.rows])
    batch.log.warning("seen", batch=batch.number)
"""


def test_what_is_left_gives_the_time_at_which_it_has_caught_up() -> None:
    progress = Progress(batches=3, items=300, at=NOW, took=timedelta(seconds=10), left=600)
    assert (progress.items_per_second, progress.caught_up_at) == (30, NOW + timedelta(seconds=20))


@pytest.mark.parametrize(("items", "left"), [(300, None), (300, BACKLOG_CEILING), (0, 5), (1, BACKLOG_CEILING - 1)])
def test_what_cannot_be_told_is_not(items: int, left: int | None) -> None:
    took = timedelta(days=4_000_000)
    assert Progress(batches=3, items=items, at=NOW, took=took, left=left).caught_up_at is None


def test_a_run_tells_after_its_batches_what_is_left(url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "gaffer")
    jobs.make_source(url, 95)
    told: list[Progress] = []
    jobs.run(jobs.spec(batch_rows=20), url, on_progress=told.append, progress_every=AT_ONCE)
    assert [(each.batches, each.items, each.left) for each in told] == [
        (1, 20, 75), (2, 40, 55), (3, 60, 35), (4, 80, 15), (5, 95, 0),
    ]  # fmt: skip
    for each in told:
        assert each.caught_up_at is not None
        waits = timedelta(seconds=each.left or 0) / each.items_per_second
        assert abs(each.caught_up_at - each.at - waits) < timedelta(milliseconds=1)
    lines = [getattr(record, "gaffer") for record in caplog.records]  # noqa: B009 — an extra of the record
    left = [line["left"] for line in lines if line["event"] == "progress"]
    assert left == [75, 55, 35, 15, 0]


def test_a_short_run_says_nothing_of_it(url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "gaffer")
    jobs.make_source(url, 30)
    jobs.run(jobs.spec(batch_rows=10), url)
    assert "progress" not in {getattr(record, "gaffer")["event"] for record in caplog.records}  # noqa: B009


def test_intervals_and_rows_that_carry_their_state_are_counted_too(url: str, clock: Clock) -> None:
    clock.set(NOW)
    told: list[Progress] = []
    options: dict[str, Any] = {"on_progress": told.append, "progress_every": AT_ONCE, "worker_clock": clock.now}
    jobs.run(jobs.daily(start="2026-12-28"), url, lambda batch: None, **options)
    assert [each.left for each in told] == [2, 1, 0]
    jobs.execute(url, "create table todo (id int primary key, at timestamptz)")
    jobs.execute(url, "insert into todo select generate_series(1, 25)")
    due = PendingRows("todo", "id", pending="at is null", done="at = now()")
    told.clear()
    jobs.run(JobSpec("todo", due, None, Bounds(batch_rows=10, timeout="5m")), url, lambda batch: None, **options)
    assert [each.left for each in told] == [15, 5, 0]


def test_a_count_that_takes_long_is_given_up_and_the_work_goes_on(url: str) -> None:
    """The function is slow for whoever has a second only."""
    jobs.make_source(url, 50)
    jobs.execute(url, "create sequence asked")
    jobs.execute(
        url,
        """
        create function slow(id bigint) returns boolean language plpgsql volatile as $$
        begin
            if current_setting('statement_timeout') = '1s' then
                perform nextval('asked'), pg_sleep(5);
            end if;
            return true;
        end $$
        """,
    )
    job = JobSpec("copy_rows", NewRows("source", "id", where="slow(id)"), None, Bounds(batch_rows=10, timeout="5m"))
    told: list[Progress] = []
    record = jobs.run(job, url, on_progress=told.append, progress_every=AT_ONCE)
    assert (record.outcome, record.items, record.batches) == (Outcome.SUCCEEDED, 50, 5)
    assert [(each.items, each.left) for each in told] == [(10, None), (20, None), (30, None), (40, None), (50, None)]
    assert jobs.query(url, "select last_value from asked") == [(1,)]  # sequences keep what is rolled back


def test_dagster_is_told_while_the_run_is_at_work(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assets, "_PROGRESS_EVERY", AT_ONCE)
    jobs.make_source(url, 30)
    seen: list[list[Any]] = []

    with dg.DagsterInstance.ephemeral() as instance:

        def backlogs() -> list[Any]:
            found = instance.fetch_observations(dg.AssetKey("copy_rows"), limit=100).records
            told = [record.asset_observation for record in found]
            return [each.metadata["gaffer/backlog"].value for each in told if each is not None]

        @gd.gaffer_asset(due=gd.NewRows("source", "id"), bounds=gd.Bounds(batch_rows=10, timeout="5m"))
        def copy_rows(batch: gd.Batch) -> None:
            seen.append(backlogs())

        result = dg.materialize([copy_rows], instance=instance, resources={"gaffer": gd.GafferResource(dsn=url)})
        assert result.success
        assert seen == [[], [20], [10, 20]]
        (last, *_) = instance.fetch_observations(dg.AssetKey("copy_rows"), limit=1).records
        assert last.asset_observation is not None
        told = last.asset_observation.metadata
        assert (told["gaffer/items_so_far"].value, told["gaffer/batches_so_far"].value) == (30, 3)
        assert told["gaffer/items_per_second"].value > 0
        assert told["gaffer/summary"].value.startswith("**At work:** 30 rows in 3 batches so far, ")
        assert "; 0 rows left; at this pace done by 20" in told["gaffer/summary"].value
        (materialized,) = instance.fetch_materializations(dg.AssetKey("copy_rows"), limit=10).records
        assert materialized.asset_materialization is not None
        assert materialized.asset_materialization.metadata["gaffer/backlog"].value == 0


def test_a_run_that_is_capped_and_cannot_count_what_is_left_is_capped(url: str) -> None:
    jobs.make_source(url, 300)
    due = NewRows("source", "id", where="pg_sleep(0.01) is not null")
    bounds = Bounds(batch_rows=10, batches=1, batch_timeout="1s", timeout="5m")
    record = jobs.run(JobSpec("copy_rows", due, None, bounds), url)
    assert (record.outcome, record.items, record.backlog, record.error) == (Outcome.CAPPED, 10, None, None)


def _gaffer_run(url: str, folder: Path, where: str = "true", **streams: Any) -> subprocess.Popen[bytes]:
    (folder / "defs.py").write_text(FILE.replace('"id")', f'"id", where="{where}")'))
    return subprocess.Popen(
        warm.command("run", "copy_rows", "-f", "defs.py"),
        cwd=folder,
        env={**os.environ, "GAFFER_DATABASE_URL": url, "TERM": "xterm", "COLUMNS": "120"},
        **streams,
    )


def _on_terminal(url: str, folder: Path, where: str = "true") -> tuple[int, str]:
    """The exit code, and what was to be seen."""
    terminal, stderr = pty.openpty()
    shown = b""
    with _gaffer_run(url, folder, where, stdout=subprocess.DEVNULL, stderr=stderr) as process:
        os.close(stderr)
        try:
            while chunk := os.read(terminal, 65536):
                shown += chunk
        except OSError:  # its other end is closed
            pass
        finally:
            os.close(terminal)
    return process.returncode, re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", shown).decode()


def test_the_command_draws_a_bar_on_a_terminal(url: str, tmp_path: Path) -> None:
    jobs.make_source(url, 45)
    code, plain = _on_terminal(url, tmp_path)
    assert code == 0
    assert "45/45" in plain
    assert "/s" in plain
    assert plain.count("copy_rows seen:") == 5  # warnings stay, above the bar
    assert "committed" not in plain


def test_a_bar_that_cannot_tell_how_long_it_gets_does_not_stop_the_run(url: str, tmp_path: Path) -> None:
    jobs.make_source(url, 150)
    code, plain = _on_terminal(url, tmp_path, "pg_sleep(0.01) is not null")
    assert code == 0
    assert "150/?" in plain
    assert jobs.query(url, "select outcome, items from gaffer.job_runs") == [("succeeded", 150)]


def test_elsewhere_it_writes_plain_lines(url: str, tmp_path: Path) -> None:
    jobs.make_source(url, 45)
    with _gaffer_run(url, tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        _, said = process.communicate(timeout=120)
    assert process.returncode == 0
    assert b"\x1b" not in said
    assert b"\r" not in said
    assert said.count(b"copy_rows committed:") == 5
