"""`gaffer db`: the private server, and psql on whatever database is meant."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gaffer_dagster import local
from gaffer_dagster.errors import LocalPostgresError
from gaffer_dagster.store import db
from tests.support import jobs, warm


def gaffer(
    folder: Path, *words: str, url: str | None = None, given: str = "", **more: str
) -> subprocess.CompletedProcess[str]:
    return warm.gaffer(url, folder, *words, given=given, **more)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    local.stop(tmp_path / ".gaffer")


def test_psql_works_on_the_database_that_is_meant_and_shows_no_password(url: str, folder: Path) -> None:
    password = db.parse_url(url)["password"]
    shown = "select current_database(), inet_client_addr()"
    done = gaffer(folder, "db", "psql", "--", "-Atc", shown, url=url)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{db.parse_url(url)['dbname']}|")
    assert "\n       42\n" in gaffer(folder, "db", "psql", url=url, given="\\conninfo\nselect 40 + 2;\n").stdout
    assert gaffer(folder, "db", "psql", "--", "-c", "select 1/0", url=url).returncode == 1
    # What others see of it, in ps.
    seen = gaffer(folder, "db", "psql", url=url, given="\\! tr '\\0' ' ' < /proc/$PPID/cmdline\n").stdout
    assert ("/psql " in seen, password in seen) == (True, False), seen
    where, secrets = db.for_psql(url)
    assert (password in where, secrets["PGPASSWORD"]) == (False, password)


def test_without_psql_the_package_is_named(url: str, folder: Path) -> None:
    (folder / "bin").mkdir()
    for name in ("initdb", "pg_ctl", "postgres"):
        (folder / "bin" / name).touch()
    done = gaffer(folder, "db", "psql", url=url, GAFFER_PG_BIN=str(folder / "bin"), PATH=str(folder))
    assert (done.returncode, "install the client of Postgres" in done.stderr) == (1, True), done.stderr


def test_a_reset_asks_refuses_while_it_is_used_and_begins_anew(folder: Path) -> None:
    assert gaffer(folder, "db", "reset", "--yes").stdout == "there was none\n"
    given = json.loads(gaffer(folder, "db", "url", "--json").stdout)["url"]
    jobs.execute(given, "create table mine (id int)")
    asked = gaffer(folder, "db", "reset")
    assert (asked.returncode, "nobody to ask" in asked.stderr) == (1, True)
    with jobs.connect(given):  # by a URL that it was given; it holds no lock of ours
        used = gaffer(folder, "db", "reset", "--yes")
        assert (used.returncode, "somebody uses the private Postgres" in used.stderr) == (1, True), used.stderr
    used_by = subprocess.Popen(
        [sys.executable, "-c", "from gaffer_dagster import local; local.start(); print(flush=True); input()"],
        cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert used_by.stdout is not None
        used_by.stdout.readline()
        assert gaffer(folder, "db", "reset", "--yes").returncode == 1
        assert jobs.query(given, "select count(*) from mine") == [(0,)]
        assert gaffer(folder, "db", "reset", "--yes", "--force").stdout == "removed\n"
    finally:
        used_by.communicate("\n")
    anew = gaffer(folder, "db", "url").stdout.strip()
    assert anew != given
    assert jobs.query(anew, "select to_regclass('public.mine') is null") == [(True,)]
    assert gaffer(folder, "db", "stop", "--yes").stdout == "stopped\n"
    assert gaffer(folder, "db", "reset", "--yes").stdout == "removed\n"


def test_a_reset_that_does_not_look_who_is_logged_in_would_remove_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = local.keep(folder / ".gaffer")
    local.release(folder / ".gaffer")
    with jobs.connect(given):
        with pytest.raises(LocalPostgresError, match="somebody uses"):
            local.reset(folder / ".gaffer")
        monkeypatch.setattr(local._Server, "is_unused", lambda _: True)
        assert local.reset(folder / ".gaffer")


def test_what_the_variable_names_and_what_is_not_ours_is_never_reset(url: str, folder: Path) -> None:
    named = gaffer(folder, "db", "reset", "--yes", "--force", url=url)
    assert (named.returncode, "which is never reset" in named.stderr) == (1, True)
    assert str(db.parse_url(url)["password"]) not in named.stderr
    (folder / ".gaffer").mkdir()
    (folder / ".gaffer" / "mine").write_text("mine")
    done = gaffer(folder, "db", "reset", "--yes", "--force")
    assert (done.returncode, "is not one of ours" in done.stderr) == (1, True)
    assert (folder / ".gaffer" / "mine").read_text() == "mine"
    assert jobs.query(url, "select 1") == [(1,)]
    shutil.rmtree(folder / ".gaffer")
