"""The `gaffer` command, as a process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.support import jobs
from tests.support.warm import command, environment, gaffer

MODULE = """
import time
import gaffer_dagster as gd

@gd.gaffer_asset(due=gd.NewRows("source", "id"), schedule=gd.Schedule("0 6 * * *"),
                 bounds=gd.Bounds(batch_rows=10, batches=3))
def copied(batch):
    batch.insert("target", [{"id": row["id"], "fence": batch.fence, "batch": batch.number} for row in batch.rows])

@gd.gaffer_asset(due=gd.NewRows("source", "id"))
def failing(batch):
    raise ValueError("as it was")

@gd.gaffer_asset(due=gd.NewRows("source", "id"))
def sleeping(batch):
    print("asleep", flush=True)
    batch.execute("select pg_sleep(60)")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "jobs.py").write_text(MODULE)
    return tmp_path


def told(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_run_goes_on_after_capped_until_nothing_is_left(url: str, folder: Path) -> None:
    jobs.make_source(url, 65)
    done = gaffer(url, folder, "run", "copied", "-f", "jobs.py", "--json")
    assert done.returncode == 0, done.stderr
    assert [(row["outcome"], row["items"], row["backlog"]) for row in told(done)] == [
        ("capped", 30, 35),
        ("capped", 30, 5),
        ("succeeded", 5, 0),
    ]
    assert {row["trigger"] for row in told(done)} == {"command"}
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [line["event"] for line in lines if line["event"] in ("leased", "ended")] == ["leased", "ended"] * 3


def test_once_is_one_run_and_a_module_serves_as_well(url: str, folder: Path) -> None:
    jobs.make_source(url, 65)
    done = gaffer(url, folder, "run", "copied", "-m", "jobs", "--once", "--json")
    assert (done.returncode, [row["outcome"] for row in told(done)]) == (0, ["capped"]), done.stderr


def test_a_busy_job_is_no_failure(url: str, folder: Path) -> None:
    jobs.make_source(url, 1)
    with jobs.opened(jobs.spec("copied"), url):
        started = time.monotonic()
        done = gaffer(url, folder, "run", "copied", "-f", "jobs.py", "--json")
    assert (done.returncode, [row["outcome"] for row in told(done)]) == (0, ["busy"]), done.stderr
    assert time.monotonic() - started < 60


def test_a_paused_job_runs_only_despite_the_pause(url: str, folder: Path) -> None:
    jobs.make_source(url, 1)
    jobs.run(jobs.spec("copied"), url)
    jobs.execute(url, "update gaffer.job set paused_at = now() where name = 'copied'")
    done = gaffer(url, folder, "run", "copied", "-f", "jobs.py", "--json")
    assert (done.returncode, [row["outcome"] for row in told(done)]) == (0, ["paused"]), done.stderr
    done = gaffer(url, folder, "run", "copied", "-f", "jobs.py", "--json", "--despite-pause")
    assert (done.returncode, [row["outcome"] for row in told(done)]) == (0, ["succeeded"]), done.stderr


def test_a_failure_exits_1_and_shows_the_error(url: str, folder: Path) -> None:
    jobs.make_source(url, 1)
    done = gaffer(url, folder, "run", "failing", "-f", "jobs.py")
    assert done.returncode == 1
    assert "ValueError: as it was" in done.stderr
    assert jobs.query(url, "select outcome, error from gaffer.job_runs") == [("failed", "ValueError: as it was")]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_frees_the_lease_and_exits_128_and_it(url: str, folder: Path, number: signal.Signals) -> None:
    jobs.make_source(url, 1)
    process = subprocess.Popen(
        command("run", "sleeping", "-f", "jobs.py"), cwd=folder, env=environment(url), stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "asleep\n"
        sent = time.monotonic()
        process.send_signal(number)
        assert process.wait(30) == 128 + number
        print(f"ended after {time.monotonic() - sent:.2f} s")
        assert time.monotonic() - sent < 10
    finally:
        process.kill()
    told = f"KeyboardInterrupt: told to stop by {number.name}"
    assert jobs.query(url, "select outcome, error from gaffer.job_runs") == [("interrupted", told)]
    assert jobs.query(url, "select lease_id from gaffer.job_lease") == [(None,)]
    jobs.execute(url, "set lock_timeout = '1s'; lock table source in access exclusive mode nowait")


def test_a_database_that_is_away_exits_75_without_the_password(folder: Path) -> None:
    away = "postgresql://somebody:canary@127.0.0.1:1/nowhere"
    for words in (("status",), ("runs",), ("migrate",), ("run", "copied", "-f", "jobs.py")):
        done = gaffer(away, folder, *words)
        assert done.returncode == 75, done.stderr
        assert "cannot be reached at somebody@127.0.0.1:1/nowhere" in done.stderr
        assert "canary" not in done.stderr + done.stdout
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("run", "copied"), "either -f FILE or -m MODULE"),
        (("run", "nosuch", "-f", "jobs.py"), "no job 'nosuch' is defined there; there is copied, failing, sleeping"),
        (("run", "copied", "-m", "no_such_module"), "there is no module 'no_such_module' here"),
        (("runs", "nosuch"), "no job 'nosuch' is known"),
        (("status", "nosuch"), "no job 'nosuch' is known"),
        (("prepare", "nosuch", "--key", "id"), "there is no table 'nosuch'"),
    ],
)
def test_a_wrong_word_is_told_in_one_line(url: str, folder: Path, words: tuple[str, ...], said: str) -> None:
    done = gaffer(url, folder, *words)
    assert done.returncode == 1
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_without_a_database_the_variable_is_named(folder: Path) -> None:
    done = gaffer(None, folder, "status")
    assert done.returncode == 1
    assert "GAFFER_DATABASE_URL" in done.stderr


def test_status_and_runs_say_what_happened(url: str, folder: Path) -> None:
    assert "No job has run" in gaffer(url, folder, "status").stdout
    assert "No run is recorded" in gaffer(url, folder, "runs").stdout
    jobs.make_source(url, 5)
    jobs.run(jobs.spec("copied"), url)
    (status,) = told(gaffer(url, folder, "status", "--json"))
    assert (status["name"], status["last_outcome"], status["consecutive_failures"], status["fence"]) == (
        "copied",
        "succeeded",
        0,
        1,
    )
    assert status["next_due_at"].endswith("+00:00")
    (ran,) = told(gaffer(url, folder, "runs", "copied", "--json"))
    assert (ran["job"], ran["outcome"], ran["items"], ran["watermark_to"]["key"]) == ("copied", "succeeded", 5, "5")
    table = gaffer(url, folder, "runs").stdout
    assert all(word in table for word in ("copied", "succeeded", "outcome"))


def test_prepare_prints_then_applies_then_has_nothing_to_do(url: str, folder: Path) -> None:
    jobs.execute(url, "create table plain (id int primary key)")
    printed = gaffer(url, folder, "prepare", "plain", "--key", "id")
    assert "add column" in printed.stdout
    assert "create index concurrently" in printed.stdout
    assert jobs.query(url, "select * from plain") == []
    applied = gaffer(url, folder, "prepare", "plain", "--key", "id", "--apply")
    assert applied.returncode == 0, applied.stderr
    again = gaffer(url, folder, "prepare", "plain", "--key", "id")
    assert (again.stdout, "lacks nothing" in again.stderr) == ("", True)


def test_migrate_checks_prints_and_applies(server_url: str, folder: Path) -> None:
    from gaffer_dagster.store import db

    name = "gaffer_test_migrate_command"
    with db.connect(server_url, application_name="test") as server:
        server.execute(db.drop_database(name))
        server.execute(db.create_database(name))
        empty = db.with_database(server_url, name)
        try:
            check = gaffer(empty, folder, "migrate", "--check")
            assert (check.returncode, "run: gaffer migrate" in check.stderr) == (1, True)
            behind = gaffer(empty, folder, "status")
            assert (behind.returncode, "run: gaffer migrate" in behind.stderr) == (1, True)
            assert "create function gaffer.acquire" in gaffer(empty, folder, "migrate", "--sql").stdout
            assert gaffer(empty, folder, "migrate", "--check").returncode == 1
            assert "applied 1 (tables)" in gaffer(empty, folder, "migrate").stdout
            assert gaffer(empty, folder, "migrate", "--check").returncode == 0
        finally:
            server.execute(db.drop_database(name))


def test_the_private_server_is_kept_until_it_is_stopped(folder: Path) -> None:
    given = gaffer(None, folder, "db", "url")
    try:
        assert given.returncode == 0, given.stderr
        assert jobs.query(given.stdout.strip(), "select 1") == [(1,)]
        assert gaffer(None, folder, "status").returncode == 0  # the folder is found without the variable
    finally:
        assert "stopped" in gaffer(None, folder, "db", "stop").stdout
    assert "not running" in gaffer(None, folder, "db", "stop").stdout


def test_the_command_starts_without_dagster(folder: Path) -> None:
    code = "import sys; import gaffer_dagster.cli; sys.exit('dagster' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=folder, timeout=60).returncode == 0


# ── whatever the shell, the operator and the file are like ───────────────────────────────────────────────────────

ENDS = """
import gaffer_dagster as gd

@gd.gaffer_asset(due=gd.NewRows("source", "id"))
def copied(batch):
    batch.insert("target", [{{"id": row["id"]}} for row in batch.rows])
    {ends}
"""


@pytest.mark.parametrize("ends", ["import sys; sys.exit(0)", "raise StopIteration"])
def test_an_exit_that_the_function_raised_exits_1(url: str, tmp_path: Path, ends: str) -> None:
    jobs.make_source(url, 1)
    (tmp_path / "jobs.py").write_text(ENDS.format(ends=ends))
    done = gaffer(url, tmp_path, "run", "copied", "-f", "jobs.py")
    assert done.returncode == 1
    assert ("SystemExit" if "sys" in ends else ends.split()[1]) in done.stderr
    assert jobs.query(url, "select outcome from gaffer.job_runs") == [("failed",)]
    assert jobs.query(url, "select consecutive_failures from gaffer.job") == [(1,)]
    assert jobs.query(url, "select count(*) from target") == [(0,)]


def test_a_keyboard_interrupt_that_the_function_raised_exits_130(url: str, tmp_path: Path) -> None:
    jobs.make_source(url, 1)
    (tmp_path / "jobs.py").write_text(ENDS.format(ends="raise KeyboardInterrupt"))
    done = gaffer(url, tmp_path, "run", "copied", "-f", "jobs.py")
    assert done.returncode == 130
    assert "Traceback" not in done.stderr
    assert jobs.query(url, "select outcome from gaffer.job_runs") == [("interrupted",)]
    assert jobs.query(url, "select lease_id from gaffer.job_lease") == [(None,)]


def test_an_error_of_odd_text_exits_1(url: str, tmp_path: Path) -> None:
    jobs.make_source(url, 1)
    (tmp_path / "jobs.py").write_text(ENDS.format(ends=r"raise ValueError('a\ud800\0b')"))
    for more in ((), ("--json",)):
        done = gaffer(url, tmp_path, "run", "copied", "-f", "jobs.py", *more)
        assert (done.returncode, "ValueError: a" in done.stderr) == (1, True)
    assert jobs.query(url, "select distinct outcome, left(error, 13) from gaffer.job_runs") == [
        ("failed", "ValueError: a")
    ]


@pytest.mark.parametrize("how", ["2>&-", ">&- 2>&-", ">/dev/full", "--json >/dev/full 2>&1"])
def test_nobody_who_listens_is_no_failure(url: str, folder: Path, how: str) -> None:
    jobs.make_source(url, 35)
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" run copied -f jobs.py {how}', "sh", *command()],
        cwd=folder, env=environment(url), capture_output=True, text=True, timeout=90,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    assert jobs.query(url, "select outcome, items from gaffer.job_runs order by id") == [
        ("capped", 30),
        ("succeeded", 5),
    ]
    assert jobs.query(url, "select count(*), count(distinct id) from target") == [(35, 35)]


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_listener_who_went_away_is_no_failure(url: str, folder: Path, stream: str) -> None:
    jobs.make_source(url, 35)
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            command("run", "copied", "-f", "jobs.py"), cwd=folder, env=environment(url), timeout=90,
            **({"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL} | {stream: write}),
        )  # fmt: skip
    finally:
        os.close(write)
    assert done.returncode == 0
    assert jobs.query(url, "select count(*), count(distinct id) from target") == [(35, 35)]


@pytest.mark.parametrize("ignored", [True, False], ids=["nohup", "a terminal"])
def test_a_hangup_ends_only_who_did_not_ask_to_ignore_it(url: str, tmp_path: Path, ignored: bool) -> None:
    jobs.make_source(url, 1)
    (tmp_path / "jobs.py").write_text(
        ENDS.format(ends="print('asleep', flush=True); batch.execute('select pg_sleep(1.5)')")
    )
    process = subprocess.Popen(
        command("run", "copied", "-f", "jobs.py"),
        cwd=tmp_path,
        env=environment(url),
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL),
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "asleep\n"
        process.send_signal(signal.SIGHUP)
        assert process.wait(30) == (0 if ignored else 128 + signal.SIGHUP)
    finally:
        process.kill()
    assert jobs.query(url, "select outcome from gaffer.job_runs") == [("succeeded" if ignored else "interrupted",)]


def test_missing_grants_are_a_failure_and_nothing_to_try_again(url: str, folder: Path, stranger: str) -> None:
    jobs.make_source(url, 1)
    done = gaffer(stranger, folder, "run", "copied", "-f", "jobs.py")
    assert done.returncode == 1, done.stderr
    assert "make it a member of gaffer_runner" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_file_that_exits_while_it_is_read_exits_1_and_says_so(url: str, tmp_path: Path) -> None:
    (tmp_path / "jobs.py").write_text("raise SystemExit(0)")
    for given in (("-f", "jobs.py"), ("-m", "jobs")):
        done = gaffer(url, tmp_path, "run", "copied", *given)
        assert done.returncode == 1, given
        assert "jobs" in done.stderr, given


def test_a_file_may_be_named_as_a_module_of_python(url: str, tmp_path: Path) -> None:
    jobs.make_source(url, 1)
    folder = tmp_path / "jobs"  # Python itself takes the current one first
    folder.mkdir()
    checked = "import json; assert json.loads('[1]') == [1]; import beside; assert beside.here"
    (folder / "json.py").write_text(ENDS.format(ends=checked))
    (folder / "beside.py").write_text("here = True")
    done = gaffer(url, tmp_path, "run", "copied", "-f", "jobs/json.py", "--json")
    assert done.returncode == 0, done.stderr
    assert [row["outcome"] for row in told(done)] == ["succeeded"]
    assert jobs.query(url, "select count(*) from target") == [(1,)]


def test_jobs_that_have_no_name_in_the_module_are_found(url: str, tmp_path: Path) -> None:
    jobs.make_source(url, 2)
    (tmp_path / "jobs.py").write_text(
        "import dagster as dg\nimport gaffer_dagster as gd\n"
        "resource = gd.GafferResource(dsn=dg.EnvVar('GAFFER_DATABASE_URL'))\n"
        "def make(name):\n"
        "    def work(batch):\n"
        "        batch.insert('target', [{'id': row['id']} for row in batch.rows])\n"
        "    return gd.gaffer_asset(name=name, due=gd.NewRows('source', 'id'))(work)\n"
        "made = gd.build_definitions(*[make(name) for name in ('a', 'copied')], resource=resource)\n"
        "defs = dg.Definitions.merge(made, dg.Definitions())\n"
        "del made\n"
    )
    done = gaffer(url, tmp_path, "run", "copied", "-f", "jobs.py", "--json")
    assert (done.returncode, [row["items"] for row in told(done)]) == (0, [2]), done.stderr


@pytest.mark.parametrize(
    ("setting", "named"), [("default_transaction_read_only = on", "read-only"), ("datestyle = SQL, DMY", "DateStyle")]
)
def test_a_setting_that_hinders_is_told_in_one_line(url: str, folder: Path, setting: str, named: str) -> None:
    jobs.make_source(url, 1)
    jobs.execute(url, f"alter database {psycopg.conninfo.conninfo_to_dict(url)['dbname']} set {setting}")
    done = gaffer(url, folder, "run", "copied", "-f", "jobs.py")
    if named == "DateStyle" and done.returncode == 0:
        return
    assert done.returncode == 1
    assert named in done.stderr
    assert "Traceback" not in done.stderr
    assert "CONTEXT" not in done.stderr
    assert "PL/pgSQL" not in done.stderr
