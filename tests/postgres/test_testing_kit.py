"""The kit for users' own tests: its databases, clock, runs and invariants, and that each invariant can be broken."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import uuid4

import dagster as dg
import psycopg
import pytest
from psycopg import sql

import gaffer_dagster as gd
from gaffer_dagster.engine.steps import Station
from gaffer_dagster.errors import BadInputError, BadSpecError, MissingRightsError, UnknownJobError
from gaffer_dagster.store import db
from gaffer_dagster.testing import (
    Bench,
    Clock,
    Databases,
    RunDue,
    Survives,
    assert_invariants,
    job_in,
    run_due,
    survives,
    watch,
)
from gaffer_dagster.testing.faults import CutCommit, Kill, Pause
from gaffer_dagster.testing.invariants import AT_REST, INVARIANTS, violations
from gaffer_dagster.testing.jobs import place_of
from gaffer_dagster.testing.processes import Engines
from gaffer_dagster.testing.proxy import Cut
from tests.support import faults, jobs
from tests.support.faults import wait_until
from tests.support.pgbouncer import pooled

HERE = Path(__file__)


@gd.gaffer_asset(
    due=gd.NewRows("source", "id"), bounds=gd.Bounds(batch_rows=10, batches=2), required_resource_keys={"who"}
)
def copied(batch: gd.Batch) -> dict[str, str]:
    jobs.copy_rows(batch)
    return {"who": batch.context.resources.who}


# ── runs ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_is_due_is_done_by_dagster_until_nothing_is_left(gaffer_database: str, gaffer_run_due: RunDue) -> None:
    jobs.make_source(gaffer_database, 50)
    faults.settle(gaffer_database)
    runs = gaffer_run_due(copied, resources={"who": dg.ResourceDefinition.hardcoded_resource("me")})
    assert [(run.outcome, run.items) for run in runs] == [("capped", 20), ("capped", 20), ("succeeded", 10)]
    assert all(run.dagster_run_id for run in runs)
    assert_invariants(gaffer_database, at_rest=True)


def test_a_spec_is_run_with_its_function_and_raises_what_that_raises(
    gaffer_database: str, gaffer_run_due: RunDue
) -> None:
    jobs.make_source(gaffer_database, 5)
    faults.settle(gaffer_database)

    def fails(batch: gd.Batch) -> None:
        raise LookupError(f"{len(batch.rows)} rows")

    with pytest.raises(LookupError, match="5 rows"):
        gaffer_run_due(jobs.spec(), work=fails)
    (run,) = gaffer_run_due(jobs.spec(), work=jobs.copy_rows)
    assert (run.outcome, run.items) == ("succeeded", 5)
    with pytest.raises(BadInputError, match="give it as work="):
        gaffer_run_due(jobs.spec())


def test_time_is_due_when_the_clock_has_moved_further_than_clocks_may_be_apart(
    gaffer_database: str, gaffer_clock: Clock, gaffer_run_due: RunDue
) -> None:
    spec = gd.JobSpec("hours", gd.EachInterval(), gd.Schedule("0 * * * *"))
    assert [run.items for run in gaffer_run_due(spec, work=lambda batch: None)] == [0]
    gaffer_clock.advance(timedelta(hours=3, minutes=2))
    before = gaffer_clock.now()
    (run,) = gaffer_run_due(spec, work=lambda batch: None)
    assert run.batches in (2, 3)
    assert before <= run.started_at <= Clock(gaffer_database).now()


def test_the_clock_takes_durations_as_jobs_do_and_says_what_it_does_not_take(gaffer_clock: Clock) -> None:
    before = gaffer_clock.now()
    gaffer_clock.advance("1d12h")
    assert timedelta(hours=36) <= gaffer_clock.now() - before < timedelta(hours=37)
    gaffer_clock.advance(-timedelta(hours=36))
    assert gaffer_clock.now() - before < timedelta(hours=1)
    with pytest.raises(BadSpecError, match="by='a day' is no duration; write a timedelta, or text such as '20m'"):
        gaffer_clock.advance("a day")
    naive: Any
    for naive in ("2027-03-01", datetime(2027, 3, 1)):  # noqa: DTZ001 — that is the point
        with pytest.raises(BadInputError, match="is no aware datetime; write one such as"):
            gaffer_clock.set(naive)


def test_the_variable_names_the_scratch_database_and_no_other(gaffer_database: str) -> None:
    assert os.environ["GAFFER_DATABASE_URL"] == gaffer_database


# ── finding a job again ──────────────────────────────────────────────────────────────────────────────────────────────


def test_a_job_is_taken_from_a_file_as_gaffer_run_takes_it() -> None:
    found = job_in(HERE, "copied")
    assert found is not copied
    place = place_of(found, None)
    assert (place.file, place.load()) == (str(HERE), (found, None))
    assert place_of(copied, None).module == __name__
    with pytest.raises(UnknownJobError, match="there is copied"):
        job_in(HERE, "gone")


def test_what_another_process_cannot_find_is_refused_with_the_cure() -> None:
    hidden = gd.gaffer_asset(due=gd.NewRows("source", "id"), name="hidden")(jobs.copy_rows)
    with pytest.raises(BadInputError, match=r"'hidden' is run in other processes, .* job_in\('jobs.py', 'NAME'\)"):
        place_of(hidden, None)
    with pytest.raises(BadInputError, match=r"which cannot find '.*<lambda>'; define it at the top of a module"):
        place_of(jobs.spec(), lambda batch: None)


def test_a_station_is_one_or_its_value_and_else_is_refused_with_those_that_there_are() -> None:
    assert Kill("applied") == Kill(Station.APPLIED)
    assert str(Pause("due")) == "pause at due"
    for fault in (Kill, Pause):
        with pytest.raises(BadInputError, match=r"at='APPLIED' is no station.* Station.APPLIED \('applied'\), "):
            fault("APPLIED")


@pytest.mark.parametrize(
    ("given", "said"), [({"holds": True}, "holds=True"), ({"holds": bool, "more": [1]}, r"more=\[1\]")]
)
def test_what_survives_is_to_call_is_a_function(given: dict[str, Any], said: str, gaffer_survives: Survives) -> None:
    with pytest.raises(BadInputError, match=f"{said} is no function; write one that takes nothing"):
        gaffer_survives(copied, **given)


# ── other processes ──────────────────────────────────────────────────────────────────────────────────────────────────

_READS = """
import os
import gaffer_dagster as gd
FIRST = os.environ["MYVAR"]
@gd.gaffer_asset(due=gd.Elapsed("1h"), schedule=gd.Schedule("@hourly"))
def reads(batch):
    raise LookupError(f"{FIRST} {os.environ['MYVAR']} {os.environ.get('ONLY_ONCE')}")
"""


def test_a_run_has_the_environment_of_the_test_that_starts_it(
    gaffer_database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "reads.py").write_text(_READS)
    monkeypatch.setenv("MYVAR", "none")
    with Engines() as engines:
        bench = Bench(job_in(tmp_path / "reads.py", "reads"), gaffer_database, engines, tmp_path)
        bench.start().ends()
        bench.pass_ticks(2)
        monkeypatch.setenv("MYVAR", "one")
        monkeypatch.setenv("ONLY_ONCE", "there")
        told = [bench.start().ends().text]
        monkeypatch.setenv("MYVAR", "two")
        monkeypatch.delenv("ONLY_ONCE")
        told.append(bench.start().ends().text)
    assert [text.splitlines()[-1] for text in told] == ["one one there", "two two None"]


_PRELOADS = """
import multiprocessing, sys
context = multiprocessing.get_context("forkserver")

def tell(pipe):
    pipe.send([name in sys.modules for name in ("tabnanny", "gaffer_dagster.testing.warm")])

if __name__ == "__main__":
    context.set_forkserver_preload(["tabnanny"])
    from gaffer_dagster.testing.processes import Engines
    for _ in range(2):
        with Engines():
            ours, theirs = context.Pipe()
            context.Process(target=tell, args=(theirs,)).start()
            print(ours.recv())
"""


def test_what_a_suite_wants_preloaded_is_loaded_beside_ours(tmp_path: Path) -> None:
    (tmp_path / "suite.py").write_text(_PRELOADS)
    done = subprocess.run(
        [sys.executable, tmp_path / "suite.py"], capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": str(HERE.parents[2])},
    )  # fmt: skip
    assert done.stdout.splitlines() == ["[True, True]"] * 2, done.stderr


def test_a_cut_names_what_it_needs_where_nothing_is_taken_without_tls(gaffer_database: str, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder, Engines() as engines:
        key, certificate = Path(folder, "key"), Path(folder, "certificate")
        made = ["openssl", "req", "-x509", "-nodes", "-newkey", "rsa:2048", "-subj", "/CN=localhost"]
        subprocess.run([*made, "-keyout", key, "-out", certificate], check=True, capture_output=True)
        for each in (Path(folder), key):
            each.chmod(0o755)
        tls = {"client_tls_sslmode": "require", "client_tls_key_file": key, "client_tls_cert_file": certificate}
        with pooled(gaffer_database, **tls) as url:
            bench = Bench(jobs.spec(), url, engines, tmp_path, work=jobs.copy_rows)
            with pytest.raises(BadInputError, match=r"without TLS: let pg_hba.conf have a `host` line .*SSL required"):
                CutCommit(Cut.BEFORE)(bench)


# ── invariants ───────────────────────────────────────────────────────────────────────────────────────────────────────

_TAKE = "update gaffer.job_lease set fence = fence + 1, lease_id = gen_random_uuid()"
_RUN = """
    insert into gaffer.job_runs (job, slot, fence, lease_id, owner, trigger, spec_hash, started_at, outcome,
                                 watermark_from, watermark_to)
    select job, slot, {fence}, gen_random_uuid(), 'x', 'manual', spec_hash, started_at, 'running', watermark_to,
           watermark_to
      from gaffer.job_runs
"""
_BATCH = "update gaffer.job_runs set batches = batches + 1"
TAMPERED = {
    "the watermark only goes forward": "update gaffer.job_watermark"
    f" set position = jsonb_build_object('xid', '3', 'key', '1'); {_BATCH}",
    "a transaction commits one batch": f"{_BATCH}; {_BATCH}",
    "each run goes on where the one before it stopped": f"{_RUN.format(fence='fence + 1')}; "
    "update gaffer.job_runs set watermark_from = null where outcome = 'running'",
    "the newest run's watermark is the job's": "update gaffer.job_watermark set position = null",
    "the fence grows with each acquisition": _RUN.format(fence="fence"),
    "a fence is handed out once": f"{_TAKE}; insert into gaffer_testing.event (what, job, slot, fence)"
    " select what, job, slot, fence from gaffer_testing.event where what = 'acquired'",
    "nothing is committed under a fence once a later one was granted": f"{_TAKE}; {_BATCH}",
    "the lease has the highest fence": "update gaffer.job_runs set fence = fence + 1",
    "at most one run of a slot is running": f"drop index gaffer.job_runs_running; {_RUN.format(fence='fence')};"
    + _RUN.format(fence="fence"),
    "a running run has the lease": _RUN.format(fence="fence"),
    "a taken lease has its running run": _TAKE,
    "an ended run has ended once": "update gaffer.job_runs set outcome = 'failed'",
    "a run's batches are those that it committed": "alter table gaffer.job_runs disable trigger testing; " + _BATCH,
    "nothing is running": _RUN.format(fence="fence"),
    "no lease is taken": _TAKE,
}


def test_each_invariant_is_tampered_with() -> None:
    assert set(TAMPERED) == {*INVARIANTS, *AT_REST}


@pytest.mark.parametrize("name", TAMPERED)
def test_an_invariant_that_is_broken_is_named(name: str, gaffer_database: str) -> None:
    jobs.make_source(gaffer_database, 5)
    faults.settle(gaffer_database)
    run_due(jobs.spec(), gaffer_database, work=jobs.copy_rows)
    assert_invariants(gaffer_database, at_rest=True)
    with db.connect(gaffer_database, application_name="test") as connection, connection.transaction():
        connection.execute(sql.SQL(TAMPERED[name]))
    assert name in violations(gaffer_database, {**INVARIANTS, **AT_REST})
    with pytest.raises(AssertionError, match=f"do not hold:(\n.*)*{name}"):
        assert_invariants(gaffer_database, at_rest=True)


def test_a_watermark_that_an_operator_sets_breaks_nothing(gaffer_database: str) -> None:
    from tests.support.ticking import invoke

    jobs.make_source(gaffer_database, 5)
    faults.settle(gaffer_database)
    run_due(jobs.spec(), gaffer_database, work=jobs.copy_rows)
    told = invoke(gaffer_database, "watermark", "set", "copy_rows", "beginning", "--reason", "again", "--yes")
    assert told.exit_code == 0, told.output
    assert_invariants(gaffer_database, at_rest=True)
    assert run_due(jobs.spec(), gaffer_database, work=jobs.copy_rows)[0].items == 5
    assert_invariants(gaffer_database, at_rest=True)


def test_a_database_that_is_not_watched_is_refused(url: str) -> None:
    with pytest.raises(BadInputError, match="take the fixture gaffer_database"):
        assert_invariants(url)


# ── databases ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def kept(url: str, server_url: str) -> Iterator[str]:
    """The URL of a migrated database that nobody made to be thrown away: a copy of one, which has no mark of it."""
    name = f"kept_{uuid4().hex[:8]}"
    with db.connect(server_url, application_name="test") as server:
        template = db.parse_url(url)["dbname"]
        server.execute(db.copy_database(name, template, version=server.info.server_version))
        try:
            yield db.with_database(server_url, name)
        finally:
            server.execute(db.drop_database(name))


@pytest.mark.parametrize("deed", [Clock, watch, lambda url: survives(copied, url, holds=lambda: True)])
def test_a_database_that_is_not_to_be_thrown_away_is_refused_and_left_as_it_was(
    deed: Callable[[str], object], kept: str
) -> None:
    state = "select prosrc, to_regnamespace('gaffer_testing') from pg_proc where oid = 'gaffer.clock'::regproc"
    before = jobs.query(kept, state)
    with pytest.raises(
        BadInputError, match=r"kept_\w+ is no scratch database.* take the fixture gaffer_database"
    ) as told:
        deed(kept)
    assert "scratch_database(server_url)" in str(told.value)
    assert jobs.query(kept, state) == before


def test_a_copy_is_made_as_the_server_s_version_can() -> None:
    old, new = (db.copy_database("a", "b", version=version).as_string() for version in (140015, 150000))
    assert (old, new) == ('create database "a" template "b"', 'create database "a" template "b" strategy file_copy')


@pytest.fixture
def role(server_url: str) -> Iterator[tuple[str, str]]:
    """A role that may nothing, and the URL by which it logs in."""
    name = f"tester_{uuid4().hex[:8]}"
    jobs.execute(server_url, f"create role {name} login password 'secret'")
    yield name, db.with_parts(server_url, user=name, password="secret")
    jobs.execute(server_url, f"drop role {name}")


def test_a_role_without_createdb_is_told_what_it_needs_and_needs_no_more(
    role: tuple[str, str], server_url: str
) -> None:
    name, url = role
    with pytest.raises(MissingRightsError, match=f"alter role {name} createdb") as error, Databases(url):
        pass
    assert "secret" not in str(error.value)
    jobs.execute(server_url, f"alter role {name} createdb")
    with Databases(url) as databases, databases.scratch() as made:
        Clock(made).advance(timedelta(days=1))
        jobs.make_source(made, 3)
        faults.settle(made)
        assert run_due(jobs.spec(), made, work=jobs.copy_rows)[0].items == 3
    assert jobs.query(server_url, "select datname from pg_database where datdba = %s::regrole", name) == []


_DIES = """
import os, signal, sys
from gaffer_dagster.testing import Databases
with Databases(sys.argv[1]) as databases, databases.scratch() as url:
    print(url.partition("dbname=")[2].split()[0], flush=True)
    if sys.argv[2] == "waits":
        sys.stdin.read()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_run_has_left_the_next_one_drops_and_nothing_of_one_that_lives(server_url: str) -> None:
    def start(how: str) -> tuple[subprocess.Popen[str], str]:
        process = subprocess.Popen(
            [sys.executable, "-c", _DIES, server_url, how], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
        assert process.stdout is not None
        return process, process.stdout.readline().strip()

    living, its = start("waits")
    dead, left = start("dies")
    dead.wait(60)
    try:
        assert {its, left} <= _databases(server_url)
        wait_until(lambda: not _is_alive(server_url, left[:20]), "the server has noticed")
        with Databases(server_url):
            assert left not in _databases(server_url)
            assert its in _databases(server_url)
    finally:
        living.communicate(timeout=60)
    wait_until(lambda: not _is_alive(server_url, its[:20]), "the server has noticed")
    with Databases(server_url):
        assert not {name for name in _databases(server_url) if name[:20] in (its[:20], left[:20])}


def _databases(url: str) -> set[str]:
    return {name for (name,) in jobs.query(url, "select datname from pg_database")}


def _is_alive(url: str, run: str) -> bool:
    return bool(jobs.query(url, "select 1 from pg_stat_activity where application_name = %s", run))


_SERVES = """
import os, signal, sys
from pathlib import Path
from gaffer_dagster.testing.database import server
with server(Path(sys.argv[1]), {}) as url:
    print(url, flush=True)
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_private_server_of_a_killed_run_ends(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVES, str(tmp_path / "server")], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert process.stdout is not None
    url = process.stdout.readline().strip()
    assert jobs.query(url, "select 1") == [(1,)]
    process.communicate(timeout=60)

    def is_gone() -> bool:
        try:
            psycopg.connect(url).close()
        except psycopg.OperationalError:
            return True
        return False

    wait_until(is_gone, "the server has ended")


# ── from outside ─────────────────────────────────────────────────────────────────────────────────────────────────────


def outside(folder: Path, server_url: str, *words: str, timeout: float = 170) -> str:
    """What pytest says in a folder that knows nothing of this repository."""
    plugin = ["-p", "gaffer_dagster.testing.plugin"]  # by its entry point, where the package is installed
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--rootdir", str(folder), *plugin, *words], cwd=folder,
        capture_output=True, text=True, timeout=timeout,
        env={**os.environ, "PYTHONPATH": str(HERE.parents[2]), "GAFFER_TEST_DATABASE_URL": server_url},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_plugin_is_light_and_may_be_named_twice(tmp_path: Path, server_url: str) -> None:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["gaffer_dagster.testing.plugin"]')
    (tmp_path / "test_light.py").write_text(
        "import sys\n"
        "def test_light():\n"
        "    import gaffer_dagster.testing\n"
        "    assert not {'dagster', 'psycopg', 'structlog', 'multiprocessing'} & set(sys.modules)\n"
    )
    assert "1 passed" in outside(tmp_path, server_url)


def test_the_fixtures_are_a_worker_s_own_and_need_no_cache(tmp_path: Path, server_url: str) -> None:
    (tmp_path / "test_many.py").write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('n', range(4))\n"
        "def test_own(n, gaffer_database, gaffer_clock):\n"
        "    import psycopg\n"
        "    psycopg.connect(gaffer_database, autocommit=True).execute('create table only_here ()')\n"
    )
    before = _databases(server_url)
    assert "4 passed" in outside(tmp_path, server_url, "-n", "2", "-p", "no:cacheprovider")
    assert _databases(server_url) == before


@pytest.mark.timeout(600)
def test_the_example_tests_its_job_from_outside_with_public_names_only(tmp_path: Path, server_url: str) -> None:
    example = HERE.parents[2] / "examples" / "testing"
    for file in example.glob("*.py"):
        shutil.copy(file, tmp_path)
        assert len(file.read_text().splitlines()) <= 60
        assert not re.search(r"gaffer_dagster\.(?!testing import )|\b_[a-z]", file.read_text())
    said = outside(tmp_path, server_url, "-p", "no:cacheprovider", timeout=590)
    assert "2 passed" in said


def test_every_name_of_the_kit_says_what_it_is() -> None:
    from gaffer_dagster import testing

    assert set(testing.__all__) <= set(dir(testing))
    for name in testing.__all__:
        value = getattr(testing, name)
        assert value.__doc__, name
        assert isinstance(value, ModuleType) or value.__name__ == name
