"""Where the database is full, out of connections, read-only, or of another version: what is said, that nothing is lost
or done twice, and that it goes on by itself once that is over. Real servers, really full.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner, Result
from psycopg import errors as pg

from gaffer_dagster import local
from gaffer_dagster.cli import main
from gaffer_dagster.domain.run import Outcome
from gaffer_dagster.engine.batch import Batch
from gaffer_dagster.engine.steps import Station
from gaffer_dagster.errors import GafferError, OutOfRoomError
from gaffer_dagster.store import db, migrate
from tests.support import jobs
from tests.support.faults import say, wait_until
from tests.support.protocol import Actor
from tests.support.servers import server_with

_MEGABYTE = 1 << 20
SPEC = jobs.spec(batch_rows=10)
JOBS = """
import dagster as dg
import gaffer_dagster as gd

copy_rows = gd.gaffer_asset(
    name="copy_rows", schedule=gd.Schedule("0 * * * *"), due=gd.NewRows("source", key="id"),
    bounds=gd.Bounds(batch_rows=10, timeout="5m"), sql="insert into target select id, 0, 0 from due",
)
defs = gd.build_definitions(copy_rows, resource=gd.GafferResource(dsn=dg.EnvVar("GAFFER_DATABASE_URL")))
"""


def gaffer(url: str, *words: str) -> Result:
    done = CliRunner().invoke(main, list(words), env={"GAFFER_DATABASE_URL": url})
    assert "Traceback" not in done.stderr or "psycopg.errors" in done.stderr, done.stderr
    return done


def done_once(url: str, rows: int) -> bool:
    return jobs.query(url, "select count(*), count(distinct id) from target") == [(rows, rows)]


def last(url: str) -> tuple[Any, ...]:
    return jobs.query(url, "select outcome, sqlstate, error, batches from gaffer.job_runs order by id desc limit 1")[0]


FILL = "insert into public.ballast select repeat('x', 1900) from generate_series(1, {})"

# ── the disk is full ─────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Disk:
    """A server whose data is on a small disk. `url` names a database there."""

    place: Path
    url: str

    def fill(self) -> None:
        """To the last page."""
        left = os.statvfs(self.place)
        with open(self.place / "ballast", "wb") as ballast:
            os.posix_fallocate(ballast.fileno(), 0, left.f_bavail * left.f_frsize)

    def free(self) -> None:
        (self.place / "ballast").unlink(missing_ok=True)

    def fill_with(self, what: str) -> None:
        """Once `what` (such as "insert on gaffer.job_runs") needs more room: from its first row on there is none."""
        jobs.execute(self.url, f"create trigger a_full before {what} for each row execute function fill()")
        self.fill()

    def free_of(self, table: str) -> None:
        self.free()
        jobs.execute(self.url, f"drop trigger a_full on {table}")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Disk]:
    place = Path(tempfile.mkdtemp(prefix="gaffer-disk-"))
    if (
        os.geteuid()
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=160m", "tmpfs", str(place)], check=False).returncode
    ):
        place.rmdir()
        pytest.skip("a small disk is mounted by root only, and where mounting is allowed")
    try:
        place.chmod(0o755)
        wal = ("max_wal_size = '64MB'", "min_wal_size = '32MB'", "autovacuum = off")
        with server_with(place / "server", *wal, fsync=False) as url:
            yield Disk(place, url)
    finally:
        local.release(place / "server")
        subprocess.run(["umount", "-l", str(place)], check=True)
        place.rmdir()


@pytest.fixture
def disk(server: Disk) -> Iterator[Disk]:
    """With a database of its own, and a fresh piece of the log, which is on that disk too."""
    name = f"full_{time.monotonic_ns()}"
    jobs.execute(server.url, f"create database {name}")
    url = db.with_database(server.url, name)
    with db.connect(url, application_name="test") as connection:
        migrate.migrate(connection)
    jobs.make_source(url, 30)
    jobs.execute(
        url,
        f"""
        create table ballast (fill text);
        create table waits (rows int);
        create function fill() returns trigger language plpgsql as
            $$ begin {FILL.format(2_000)}; return new; end $$;
        create constraint trigger fill after insert on waits deferrable initially deferred
            for each row execute function fill();
        """,
    )
    jobs.execute(url, "select pg_switch_wal()")
    jobs.execute(url, "checkpoint")
    try:
        yield Disk(server.place, url)
    finally:
        server.free()
        jobs.execute(server.url, f"drop database {name} with (force)")


def full_in_the_middle(disk: Disk, batch: Batch) -> None:
    jobs.copy_rows(batch)
    if batch.number == 2:
        disk.fill()
        batch.execute(FILL.format(2_000))


def full_at_commit(disk: Disk, batch: Batch) -> None:
    """What COMMIT itself does has no room: a trigger that waits for it."""
    jobs.copy_rows(batch)
    if batch.number == 2:
        disk.fill()
        batch.execute("insert into waits values (2000)")


@pytest.mark.parametrize("work", [full_in_the_middle, full_at_commit])
def test_a_batch_that_finds_the_disk_full_is_undone_and_done_later(disk: Disk, work: Any) -> None:
    with pytest.raises((pg.DiskFull, OutOfRoomError)):
        jobs.run(SPEC, disk.url, lambda batch: work(disk, batch))
    assert done_once(disk.url, 10)  # what was acknowledged
    outcome, code, error, batches = last(disk.url)
    assert (outcome, code, batches) == ("failed", "53100", 1)
    assert "the disk of the database is full: make room there" in error
    # It does not wait for the next tick, which may be a day away.
    assert jobs.query(disk.url, "select follow_up_at < gaffer.clock() + interval '2 minutes' from gaffer.job") == [
        (True,)
    ]
    # An outside look needs no room.
    done = gaffer(disk.url, "runs")
    assert (done.exit_code, "disk of the database is full" in done.stdout, "53100" in done.stdout) == (0, True, True)
    disk.free()
    assert jobs.run(SPEC, disk.url).items == 20
    assert done_once(disk.url, 30)


def test_work_that_is_done_past_its_batch_is_seen_to_be_done_twice(disk: Disk) -> None:
    def past(batch: Batch) -> None:
        for row in batch.rows:
            jobs.execute(disk.url, "insert into target values (%s, 0, 0)", row["id"])
        full_in_the_middle(disk, batch) if batch.number == 2 else None

    with pytest.raises(pg.DiskFull):
        jobs.run(SPEC, disk.url, past)
    disk.free()
    jobs.run(SPEC, disk.url)
    assert not done_once(disk.url, 30)


def test_a_run_that_cannot_be_recorded_does_not_begin(disk: Disk, tmp_path: Path) -> None:
    jobs.run(SPEC, disk.url)
    jobs.add_rows(disk.url, 10)
    disk.fill_with("insert on gaffer.job_runs")
    before = jobs.query(disk.url, "select count(*) from gaffer.job_runs")
    (tmp_path / "jobs.py").write_text(JOBS)
    done = gaffer(disk.url, "run", "copy_rows", "-f", str(tmp_path / "jobs.py"))
    assert (done.exit_code, "the disk of the database is full" in done.stderr) == (1, True), done.stderr
    assert jobs.query(disk.url, "select count(*) from gaffer.job_runs") == before
    assert done_once(disk.url, 30)
    disk.free_of("gaffer.job_runs")
    assert jobs.run(SPEC, disk.url).items == 10
    assert done_once(disk.url, 40)


def test_a_run_that_cannot_be_counted_commits_nothing_and_is_followed_by_another(disk: Disk) -> None:
    """Its row has no room for another version: neither its batch nor its end can be noted."""
    filled = False

    def observe(station: Station) -> None:
        nonlocal filled
        if station is Station.APPLIED and not filled:
            filled = True
            disk.fill_with("update on gaffer.job_runs")

    with pytest.raises(OutOfRoomError, match="is full: make room there"):
        jobs.run(SPEC, disk.url, observe=observe, lease=_lease(2))
    assert done_once(disk.url, 0)
    assert jobs.query(disk.url, "select outcome from gaffer.job_runs where fence = 1") == [("running",)]
    disk.free_of("gaffer.job_runs")

    def takes_over() -> bool:
        return jobs.run(SPEC, disk.url).outcome is Outcome.SUCCEEDED

    wait_until(takes_over, "the lease of the run that could not end is over")
    assert done_once(disk.url, 30)
    assert jobs.query(disk.url, "select outcome from gaffer.job_runs where fence = 1") == [("abandoned",)]


def test_what_is_wrong_is_said_while_nothing_can_be_noted(disk: Disk) -> None:
    jobs.run(SPEC, disk.url)
    jobs.execute(
        disk.url,
        "update gaffer.job set next_due_at = now() - interval '1 day', rules_at = 'epoch', first_seen_at = 'epoch'",
    )
    disk.fill_with("insert on gaffer.alert")
    looked = gaffer(disk.url, "check", "--json")
    (told,) = map(json.loads, looked.stdout.splitlines())
    assert (looked.exit_code, [each["kind"] for each in told["findings"]]) == (1, ["absence"]), looked.output
    noted = gaffer(disk.url, "check", "--notify")
    assert (noted.exit_code, "cannot tell" in noted.stderr) == (2, True), noted.output
    assert "the disk of the database is full" in noted.stderr
    assert gaffer(disk.url, "metrics").exit_code == 0
    disk.free_of("gaffer.alert")
    assert gaffer(disk.url, "check", "--notify").exit_code == 1
    assert jobs.query(disk.url, "select kind from gaffer.alert where resolved_at is null") == [("absence",)]


@pytest.mark.timeout(120)
def test_a_log_without_room_stops_the_server_and_loses_nothing(disk: Disk) -> None:
    """The server gives up (PANIC) and does not come back before there is room. The run waits for it: what it had
    committed was kept, and what it had not is done."""
    stopped = threading.Event()

    def work(batch: Batch) -> None:
        jobs.copy_rows(batch)
        if batch.number == 2 and not stopped.is_set():
            stopped.set()
            disk.fill()
            with suppress(psycopg.OperationalError), jobs.connect(disk.url) as other:
                while True:
                    other.execute("select pg_logical_emit_message(false, 'x', repeat('x', 1000000))")

    run = Actor(lambda: jobs.run(SPEC, disk.url, work))
    wait_until(stopped.is_set, "the log is being filled")
    folder = disk.place / "server"
    wait_until(lambda: local.running(folder) is None, "the server is gone")
    time.sleep(1)
    disk.free()
    local.start(folder, fsync=False)
    try:
        record = run.result()
        say(f"the run went on: {record.outcome}, {record.batches} batches")
    except (GafferError, psycopg.OperationalError) as error:
        say(f"the run gave up: {db.primary_message(error)}")
        wait_until(lambda: jobs.run(SPEC, disk.url).outcome is Outcome.SUCCEEDED, "another takes over", timeout=70)
    assert done_once(disk.url, 30)


def _lease(seconds: float) -> Any:
    from datetime import timedelta

    return timedelta(seconds=seconds)
