"""Where the database is full, out of connections, read-only, or of another version: what is said, that nothing is lost
or done twice, and that it goes on by itself once that is over. Real servers, really full.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import psycopg
import pytest
from click.testing import CliRunner, Result
from psycopg import errors as pg

import gaffer_dagster as gd
from gaffer_dagster import local
from gaffer_dagster.cli import main
from gaffer_dagster.domain.run import Outcome
from gaffer_dagster.engine.batch import Batch
from gaffer_dagster.engine.steps import Station
from gaffer_dagster.errors import DatabaseUnavailableError, GafferError, OutOfRoomError
from gaffer_dagster.store import db, migrate
from gaffer_dagster.store.doctor import RUNNER_FUNCTIONS, RUNNER_TABLES
from tests.support import jobs, servers
from tests.support.faults import say, wait_until
from tests.support.pgbouncer import pooled
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
        jobs.run(SPEC, disk.url, observe=observe, lease=timedelta(seconds=2))
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


# ── out of connections ───────────────────────────────────────────────────────────────────────────────────────────────

RUNNER = f"""
    grant usage on schema gaffer to {{0}};
    grant execute on function {", ".join(f"gaffer.{name}" for name in RUNNER_FUNCTIONS)} to {{0}};
    grant select on {", ".join(f"gaffer.{name}" for name in RUNNER_TABLES)} to {{0}};
    grant select on source to {{0}}; grant insert, select on target to {{0}};
"""


@pytest.fixture(scope="module")
def primary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """A server of their own for those who use it up."""
    folder = tmp_path_factory.mktemp("primary") / "server"
    with server_with(folder, "autovacuum = off", fsync=False) as url:
        with db.connect(url, application_name="test") as connection:
            migrate.migrate(connection)
            connection.execute("create role worker login password 'secret'")
        jobs.make_source(url)
        jobs.execute(url, RUNNER.format("worker"))
        yield folder, url


@pytest.fixture
def worker(primary: tuple[Path, str]) -> Iterator[str]:
    """A role without privileges, which limits apply to; thirty rows are due."""
    url = primary[1]
    jobs.execute(url, "truncate source, target")
    jobs.add_rows(url, 30)
    connected = "select from pg_stat_activity where usename = 'worker'"  # a server may take a moment to end a session
    wait_until(lambda: not jobs.query(url, connected), "nobody of the test before is connected")
    try:
        yield db.with_parts(url, user="worker", password="secret")
    finally:
        jobs.execute(url, "alter role worker connection limit -1")
        jobs.execute(url, "alter database gaffer connection limit -1")


LEFT = "no connection is left: end idle ones, raise the limit"


@pytest.fixture
def defined(tmp_path: Path) -> str:
    (tmp_path / "jobs.py").write_text(JOBS)
    return str(tmp_path / "jobs.py")


@pytest.mark.parametrize("limit", ["alter role worker connection limit 0", "alter database gaffer connection limit 0"])
def test_a_limit_is_named_and_nothing_is_begun(
    primary: tuple[Path, str], worker: str, limit: str, defined: str
) -> None:
    before = jobs.query(primary[1], "select count(*) from gaffer.job_runs")
    jobs.execute(primary[1], limit)
    with pytest.raises(DatabaseUnavailableError, match=LEFT):
        jobs.run(SPEC, worker)
    for words, code in ((["run", "copy_rows", "-f", defined], 75), (["status"], 75), (["check"], 2), (["doctor"], 75)):
        done = gaffer(worker, *words)
        assert (done.exit_code, LEFT in " ".join(done.output.split())) == (code, True), done.output
    assert jobs.query(primary[1], "select count(*) from gaffer.job_runs") == before
    jobs.execute(primary[1], limit.replace(" 0", " -1"))
    assert jobs.run(SPEC, worker).items == 30
    assert done_once(primary[1], 30)


def test_all_connections_of_the_server_are_used_and_one_is_lost_in_the_middle_of_a_run(
    primary: tuple[Path, str], worker: str
) -> None:
    """The run asks again, and goes on under the same fence once somebody has let one go."""
    url = primary[1]
    idle = ExitStack()

    def work(batch: Batch) -> None:
        jobs.copy_rows(batch)
        if batch.number == 2 and not idle_until.is_set():
            idle_until.set()
            with jobs.connect(url) as connection:
                with suppress(psycopg.OperationalError):
                    while True:
                        idle.enter_context(psycopg.connect(worker))
                with pytest.raises(DatabaseUnavailableError, match=LEFT):
                    db.connect(worker, application_name="test")
                connection.execute(
                    "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'gaffer:copy_rows'"
                )
                # Whoever comes first takes the place that was just let go.
                with suppress(psycopg.OperationalError):
                    while True:
                        idle.enter_context(psycopg.connect(worker))
            threading.Timer(0.7, idle.close).start()

    idle_until = threading.Event()
    record = jobs.run(SPEC, worker, work)
    assert (record.outcome, record.items, record.batches) == (Outcome.SUCCEEDED, 30, 3)
    assert done_once(url, 30)


def test_a_run_goes_on_while_its_keeper_is_refused(
    primary: tuple[Path, str], worker: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Each batch renews the lease itself."""
    jobs.execute(primary[1], "alter role worker connection limit 1")

    def work(batch: Batch) -> None:
        jobs.copy_rows(batch)
        time.sleep(0.6)

    assert jobs.run(SPEC, worker, work, lease=timedelta(seconds=1.5)).outcome is Outcome.SUCCEEDED
    assert done_once(primary[1], 30)
    assert "not renewed" in caplog.text
    assert LEFT in caplog.text


def test_a_failure_is_recorded_though_there_is_one_connection_only(primary: tuple[Path, str], worker: str) -> None:
    jobs.execute(primary[1], "alter role worker connection limit 1")
    with pytest.raises(pg.DivisionByZero):
        jobs.run(SPEC, worker, lambda batch: batch.execute("select 1/0"))
    assert last(primary[1])[:2] == ("failed", "22012")


def test_a_pooler_without_room_is_named_and_its_one_connection_is_enough(
    primary: tuple[Path, str], worker: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pooled(worker, size=1, max_client_conn=1) as url:
        record = None

        def runs() -> bool:
            """A place is free a moment after it was let go."""
            nonlocal record
            with suppress(DatabaseUnavailableError):
                record = jobs.run(SPEC, url, work, lease=timedelta(seconds=1.5))
            return record is not None

        def work(batch: Batch) -> None:
            jobs.copy_rows(batch)
            with pytest.raises(DatabaseUnavailableError, match=LEFT):
                db.connect(url, application_name="test")
            time.sleep(0.6)

        wait_until(runs, "the pooler lets the run in")
    assert done_once(primary[1], 30)
    assert "not renewed" in caplog.text


# ── a standby ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def standby(primary: tuple[Path, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A hot standby of that server, which follows it."""
    folder, url = primary
    jobs.run(SPEC, url)
    copy = tmp_path_factory.mktemp("standby") / "server"
    with jobs.connect(url) as connection:
        connection.execute("select pg_backup_start('standby', true)")
        servers.copy(folder, copy)
        (found,) = connection.execute("select labelfile from pg_backup_stop(false)").fetchall()
    servers.follow(copy, url, backup_label=found[0])
    try:
        yield local.start(copy, fsync=False)
    finally:
        local.stop(copy)


READ_ONLY = "is read-only: a standby, .* is on; name the primary .target_session_attrs=read-write."


def test_a_standby_is_named_by_whoever_wants_to_write_and_read_by_whoever_looks(
    standby: str, primary: tuple[Path, str], defined: str
) -> None:
    assert jobs.query(standby, "select pg_is_in_recovery()") == [(True,)]
    with pytest.raises(GafferError, match=READ_ONLY):
        jobs.run(SPEC, standby)
    for words, code in (
        (["run", "copy_rows", "-f", defined], 1),
        (["check", "--notify"], 2),
        (["pause", "copy_rows"], 1),
        (["register", "-f", defined], 1),
        (["prune", "--yes", "--older-than", "1d"], 1),
        (["retire", "copy_rows", "--yes"], 1),
        (["rename", "copy_rows", "other", "--yes"], 1),
        (["watermark", "set", "copy_rows", "beginning", "--yes"], 1),
        (["prepare", "source", "--key", "id", "--apply"], 1),
        (["alerts", "ack", "1"], 1),
    ):
        done = gaffer(standby, *words)
        said = " ".join(done.output.split())
        if words[0] in ("prune", "prepare") and done.exit_code == 0:
            continue  # there is nothing to do
        assert (done.exit_code, re.search(READ_ONLY, said) is not None) == (code, True), (words, done.output)
    for words in ("status", "runs", "runs copy_rows", "check", "ticks copy_rows", "metrics", "alerts list", "audit"):
        done = gaffer(standby, *words.split())
        assert (done.exit_code in (0, 1), done.stderr) == (True, ""), (words, done.output)
    done = gaffer(standby, "doctor", "--json")
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert "standby" in next(each for each in told if each["name"] == "writable")["found"]
    assert done.exit_code == 1


def test_the_sensor_says_that_it_looks_at_a_standby(standby: str) -> None:
    asset = gd.gaffer_asset(name="copy_rows", due=SPEC.due, schedule=gd.Schedule("0 * * * *"), sql="select from due")
    defs = gd.build_definitions(asset, resource=gd.GafferResource(dsn=standby))
    sensor = defs.get_sensor_def("gaffer_watch")
    with dg.DagsterInstance.ephemeral() as instance, pytest.raises(GafferError, match=READ_ONLY):
        sensor(dg.build_sensor_context(instance, definitions=defs))


@pytest.mark.parametrize("wanted", ["read-only", "standby"])
def test_a_url_that_wants_a_standby_is_not_told_to_name_the_primary(url: str, wanted: str) -> None:
    with pytest.raises(DatabaseUnavailableError, match="check that it runs, the URL") as raised:
        db.connect(db.with_parts(url, target_session_attrs=wanted), application_name="test")
    assert "can be written" not in str(raised.value)


def test_a_url_that_names_both_finds_the_one_that_can_be_written(standby: str, primary: tuple[Path, str]) -> None:
    there = [db.parse_url(each) for each in (standby, primary[1])]
    both = db.with_parts(
        primary[1], host=",".join(each["host"] for each in there), port="5432,5432", target_session_attrs="read-write"
    )
    jobs.execute(primary[1], "truncate source, target")
    jobs.add_rows(primary[1], 30)
    assert jobs.run(SPEC, both).items == 30
    only = db.with_parts(standby, target_session_attrs="read-write")
    with pytest.raises(DatabaseUnavailableError, match="no server that the URL names can be written"):
        jobs.run(SPEC, only)


def test_a_standby_that_is_promoted_is_worked_on_by_the_next_run(standby: str, primary: tuple[Path, str]) -> None:
    """Last of those who use it. What had been copied is not done again."""
    rows = jobs.query(primary[1], "select count(*) from target")[0][0]
    wait_until(lambda: jobs.query(standby, "select count(*) from target") == [(rows,)], "it has followed")
    jobs.query(standby, "select pg_promote()")
    jobs.add_rows(standby, 5)
    assert jobs.run(SPEC, standby).items == 5
    assert done_once(standby, rows + 5)
