"""The command as a shell, a terminal and a person in a hurry meet it."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from gaffer_dagster.cli import main
from gaffer_dagster.testing import Clock
from tests.support import jobs, ticking, warm
from tests.support.ticking import Ticking, at
from tests.support.warm import command, environment, gaffer

# ── it starts fast ───────────────────────────────────────────────────────────────────────────────────────────────────

HEAVY = ("dagster", "pendulum", "rich", "structlog", "psycopg", "prometheus_client", "apprise")


def loaded(url: str | None, folder: Path, *words: str) -> set[str]:
    code = (
        "import sys; from gaffer_dagster.cli import main; main(sys.argv[1:], standalone_mode=False);"
        f"print(*[name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=folder, env=environment(url), capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return set(done.stderr.splitlines()[-1].split())


def test_only_what_a_command_needs_is_loaded(url: str, tmp_path: Path) -> None:
    assert loaded(None, tmp_path, "--help") == set()
    assert loaded(None, tmp_path, "completion", "zsh") == set()
    assert loaded(url, tmp_path, "status") == {"psycopg"}  # no job, no table
    jobs.make_source(url, 1)
    jobs.run(jobs.spec("copied"), url)
    for words in (["status"], ["runs"], ["audit"], ["ticks", "copied"]):
        assert loaded(url, tmp_path, *words, "--json") == {"psycopg"}, words
    assert loaded(url, tmp_path, "status") == {"psycopg", "rich", "pendulum"}  # "5 minutes ago"
    assert loaded(url, tmp_path, "pause", "copied") == {"psycopg"}


def test_a_module_that_is_loaded_too_early_is_seen(tmp_path: Path) -> None:
    code = "import gaffer_dagster.cli.run, sys; sys.exit('rich' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, timeout=60).returncode == 1


# ── completion ───────────────────────────────────────────────────────────────────────────────────────────────────────


def completed(words: list[str], incomplete: str) -> list[str]:
    shell = ShellComplete(main, {}, "gaffer", "_GAFFER_COMPLETE")
    return [each.value for each in shell.get_completions(words, incomplete)]


def test_commands_options_and_jobs_are_completed(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GAFFER_DATABASE_URL", url)
    for name in ("flights", "fleet", "other"):
        jobs.execute(url, "select gaffer.register_external(%s)", name)
    assert completed([], "re") == ["resume", "release", "rename", "retire", "register"]
    assert "--reason" in completed(["pause"], "--r")
    for words in (
        ["status"],
        ["pause"],
        ["items", "list"],
        ["watermark", "set"],
        ["rename"],
        ["audit"],
        ["retire"],
        ["run"],
    ):
        assert completed(words, "fl") == ["fleet", "flights"], words


@pytest.mark.parametrize("where", ["", "nonsense://", "postgresql://nobody@127.0.0.1:1/x", "local"])
def test_a_database_that_is_not_there_completes_nothing_silently(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GAFFER_DATABASE_URL", where)
    assert completed(["status"], "") == []
    assert capfd.readouterr() == ("", "")
    assert not (tmp_path / ".gaffer").exists()  # no server is started for it


def test_bash_takes_the_script_and_completes_by_it(url: str, tmp_path: Path) -> None:
    jobs.execute(url, "select gaffer.register_external('flights')")
    script = (
        'eval "$(gaffer completion bash)"; COMP_WORDS=(gaffer status fl); COMP_CWORD=2;'
        " _gaffer_completion gaffer; echo ${COMPREPLY[@]}"
    )
    path = f"{warm.folder()}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script], env=environment(url, PATH=path), capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("flights\n", "")
    for shell in ("bash", "zsh", "fish"):
        assert "_GAFFER_COMPLETE" in CliRunner().invoke(main, ["completion", shell]).output


# ── whatever is wrong ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("raise ValueError('a\\x1b[2J')", r"jobs.py cannot be loaded: ValueError: a\x1b[2J ("),
        ("def f(:", "jobs.py cannot be loaded: SyntaxError: "),
        (
            "import no_such_package",
            "jobs.py cannot be loaded: ModuleNotFoundError: No module named 'no_such_package' (",
        ),
        ("import gaffer_dagster as gd\ngd.Schedule('bad')", "cron 'bad'"),
        ("", "no job is defined in jobs.py; name the file or module"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_told_in_one_line(url: str, tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "jobs.py").write_text(text)
    for given in (["-f", "jobs.py"], ["-m", "jobs"]):
        done = gaffer(url, tmp_path, "run", "copied", *given)
        assert done.returncode == 1, given
        assert said.replace("jobs.py", "jobs.py" if given[0] == "-f" else "jobs") in done.stderr, given
        assert len(done.stderr.splitlines()) == 1, done.stderr
        assert "\x1b" not in done.stderr


def test_what_a_function_raised_does_nothing_to_the_terminal(url: str, tmp_path: Path) -> None:
    jobs.make_source(url, 1)
    (tmp_path / "jobs.py").write_text(
        "import gaffer_dagster as gd\n"
        "@gd.gaffer_asset(due=gd.NewRows('source', 'id'))\n"
        "def copied(batch):\n    raise ValueError('red: \\x1b[31m\\x07 ' + 'long ' * 10_000)\n"
    )
    done = gaffer(url, tmp_path, "run", "copied", "-f", "jobs.py")
    assert (done.returncode, "Traceback" in done.stderr) == (1, True)
    assert r"red: \x1b[31m\x07 long" in done.stderr
    assert not {"\x1b", "\x07"} & set(done.stderr + done.stdout)
    shown = gaffer(url, tmp_path, "runs", "copied")
    assert r"red: \x1b[31m\x07 long" in shown.stdout
    assert not {"\x1b", "\x07"} & set(shown.stdout)


@pytest.mark.parametrize("limit", ["0", "-1", "many", "100000000000000000000"])
def test_a_bad_limit_is_a_wrong_word(url: str, tmp_path: Path, limit: str) -> None:
    for words in (["runs"], ["audit"], ["alerts", "list"], ["items", "list", "a"]):
        done = gaffer(url, tmp_path, *words, "--limit", limit)
        assert (done.returncode, "--limit" in done.stderr, "Traceback" in done.stderr) == (2, True, False), words


def test_letters_that_the_locale_does_not_have_and_closed_streams_are_no_error(url: str, tmp_path: Path) -> None:
    jobs.execute(url, "select gaffer.register_external('flights')")
    poor = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    assert gaffer(url, tmp_path, "pause", "flights", "--reason", "für Günther").returncode == 0
    for words in (["status"], ["audit"], ["audit", "--json"], ["runs"]):
        done = gaffer(url, tmp_path, *words, **poor)
        assert (done.returncode, done.stderr) == (0, ""), words
    assert r"f\xfcr G\xfcnther" in gaffer(url, tmp_path, "audit", **poor).stdout
    for how in (">&-", "2>&- >&-", ">/dev/full", "| true"):
        done = subprocess.run(
            ["bash", "-c", f'"$@" audit {how}', "sh", *command()],
            cwd=tmp_path, env=environment(url), capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert "Traceback" not in done.stderr, how


@pytest.mark.parametrize("columns", ["1", "20", "200"])
def test_a_narrow_terminal_and_one_without_colour_are_served(url: str, tmp_path: Path, columns: str) -> None:
    jobs.execute(url, "select gaffer.register_external('flights')")
    gaffer(url, tmp_path, "pause", "flights", "--reason", "x" * 5_000)
    here, there = pty.openpty()
    process = subprocess.Popen(
        command("audit"), cwd=tmp_path, stdout=there, stderr=subprocess.PIPE,
        env=environment(url, COLUMNS=columns, NO_COLOR="1", TERM="xterm"),
    )  # fmt: skip
    os.close(there)
    shown = b""
    try:
        while more := os.read(here, 100_000):
            shown += more
    except OSError:  # the other end is closed
        pass
    os.close(here)
    assert process.stderr is not None
    assert (process.stderr.read(), process.wait(30)) == (b"", 0)
    assert b"\x1b[3" not in shown  # no colour


def test_a_schema_that_the_role_may_enter_and_no_more_is_told(url: str, stranger: str, tmp_path: Path) -> None:
    role = jobs.query(stranger, "select current_user")[0][0]
    jobs.execute(url, f"grant usage on schema gaffer to {role}")
    jobs.execute(url, f"grant select on gaffer.migration to {role}; grant execute on function gaffer.clock to {role}")
    for words in (["status"], ["runs"], ["audit"], ["prune", "--yes"], ["pause", "a"], ["items", "list", "a"]):
        done = gaffer(stranger, tmp_path, *words)
        assert done.returncode == 1, words
        assert "permission denied" in done.stderr, words
        assert "a member of gaffer_operator (what people do)" in done.stderr, words


# ── who is down ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_status_says_which_watch_has_stopped_looking(url: str, clock: Clock) -> None:
    job = Ticking(url, clock, ticking.spec())
    job.run(0.01, 1)
    assert "Nobody watches this database all the time" in job.gaffer("status")
    jobs.execute(
        url,
        "insert into gaffer.watch (name, every, first_seen_at, last_pass_at) "
        " select 'dagster:flights', '30 seconds', t, t from gaffer.clock() t",
    )
    assert "dagster:flights" not in job.gaffer("status")
    job.clock.set(at(3))
    line = "dagster:flights has not looked since "
    said = job.gaffer("status")
    assert line in said
    assert "Dagster's daemon, or its sensor gaffer_watch, may be down; see: gaffer check" in said
    assert line in ticking.invoke(url, "check").stdout
    assert line not in job.gaffer("status", "--json")


# ── words that are not meant ─────────────────────────────────────────────────────────────────────────────────────────

LONG = "x" * 100_000


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["register", "os"], "no job is defined in os; name the file or module"),
        (["run", "copied", "-m", "os"], "no job is defined in os; name the file or module"),
        (["dagster", "sync", "-m", "os"], "no job is defined in os; name the file or module"),
        (["register", ".."], "'..' is no module's name; write it from its top on"),
        (["run", "copied", "-m", ""], "'' is no module's name; write it from its top on"),
        (["register", LONG], "… (100,"),
        (["status", LONG], "… (100,"),
        (["watermark", "set", "copied", LONG], "… (100,"),
        (["preview", "copied", "--after", LONG], "… (100,"),
        (["runs", "--limit", LONG], "… (100,"),
        (["migrate", "--check", "--sql"], "give one of them"),
        (["release", "copied", "--slot", "99"], "job 'copied' has no slot 99; it has those from 0 to 0"),
        (["release", "copied", "--slot", "9" * 20], "is not in the range"),
        (["prepare", "gaffer.job", "--key", "name", "--apply"], "table gaffer.job is none of yours"),
        (["prepare", "gaffer.job", "--key", "name", "--pending", "true"], "table gaffer.job is none of yours"),
        (["prepare", "gaffer.alert", "--key", "id", "--cursor", "opened_at"], "table gaffer.alert is none of yours"),
        (["prepare", "pg_class", "--key", "oid"], "pg_catalog.pg_class"),
        (["protect", "gaffer.job", "--yes"], "gaffer: table gaffer.job cannot be protected: name a table of your own"),
        (["protect", "pg_class", "--yes"], "gaffer: table pg_class cannot be protected: name a table of your own"),
    ],
)
def test_what_cannot_be_meant_is_told_with_what_can(url: str, words: list[str], said: str) -> None:
    jobs.make_source(url, 1)
    jobs.run(jobs.spec("copied"), url)
    found = CliRunner().invoke(main, words, env={"GAFFER_DATABASE_URL": url})
    assert (found.exit_code in (1, 2), said in found.stderr) == (True, True), (found.exit_code, found.stderr[:500])
    assert len(found.stderr) < 1_000
    assert "(22023)" not in found.stderr
    assert found.stdout == ""


def test_rows_that_did_not_fail_are_told_once(url: str) -> None:
    jobs.execute(url, "select gaffer.register_external('theirs')")
    found = CliRunner().invoke(main, ["items", "retry", "theirs", "k1", "--yes"], env={"GAFFER_DATABASE_URL": url})
    assert (found.exit_code, found.stdout) == (1, "")
    assert found.stderr.startswith("gaffer: job 'theirs' has no failed rows with key k1; see: gaffer items list")
