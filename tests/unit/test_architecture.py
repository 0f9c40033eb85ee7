"""The layers, as the design has them, and what may stand where."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

import gaffer_dagster as gd

PACKAGE = Path(gd.__file__).parent
ROOT = PACKAGE.parent
MODULES = sorted(PACKAGE.rglob("*.py"))
MIGRATIONS = sorted((PACKAGE / "store" / "migrations").glob("*.sql"))
STATEMENT = re.compile(
    r"^\s*(select\s.+\sfrom|select\s+[\w.]+\(|insert\s+into|update\s+\S+\s+set|delete\s+from|begin\b\s*;|create\s+\w+\s+\S"
    r"|alter\s+\w+\s+\S|drop\s+\w+\s+\S|truncate\s|with\s+\w+\s+as\s*\(|set\s+local|commit\s*;|lock\s+table)",
    re.IGNORECASE | re.DOTALL,
)


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Every string in a module that is not documentation, with the line it begins at."""
    tree = ast.parse(path.read_text())
    prose = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield node.lineno, node.value


def imported_by(statement: str, *names: str) -> set[str]:
    """Which of these modules an interpreter has after a statement."""
    code = f"import sys; {statement}; print(*[name for name in {names!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_every_import_goes_one_way() -> None:
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("module", ["gaffer_dagster", "gaffer_dagster.cli", "gaffer_dagster.engine.run"])
def test_the_command_and_the_engine_start_without_dagster(module: str) -> None:
    assert imported_by(f"import {module}", "dagster") == set()


def test_the_definition_of_a_job_needs_no_driver() -> None:
    names = ("psycopg", "structlog", "click", "rich")
    assert imported_by("import gaffer_dagster as gd; gd.JobSpec, gd.NewRows, gd.Schedule", *names) == set()


def test_sql_is_only_in_the_store() -> None:
    allowed = PACKAGE / "store"
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: {text.strip()[:60]}"
        for path in MODULES
        if not {allowed, PACKAGE / "testing"} & set(path.parents) and path != PACKAGE / "local.py"
        for line, text in texts(path)
        if STATEMENT.match(text)
    ]
    assert found == []


def test_the_search_for_sql_finds_it() -> None:
    found = {path.name for path in MODULES for _, text in texts(path) if STATEMENT.match(text)}
    assert {"leases.py", "runs.py", "jobs.py", "new_rows.py", "prepare.py", "migrate.py"} <= found


def test_time_comes_from_the_one_clock() -> None:
    """now() is the start of a transaction; gaffer.clock() is what a test can set."""
    other = re.compile(
        r"\bnow\s*\(\s*\)|\bcurrent_timestamp\b|\bcurrent_date\b|\blocaltimestamp\b|\b(transaction|statement)_timestamp\b"
        r"|\btimeofday\b|'now'|\bat time zone\b",
        re.IGNORECASE,
    )
    wall = re.compile(r"\bclock_timestamp\b", re.IGNORECASE)
    in_code = [
        (path, line, text)
        for path in MODULES
        if PACKAGE / "store" in path.parents
        for line, text in texts(path)
        if STATEMENT.match(text) or "gaffer." in text
    ]
    in_sql = [
        (path, number, line.partition("--")[0])
        for path in MIGRATIONS
        for number, line in enumerate(path.read_text().splitlines(), 1)
    ]
    assert [(path.name, line) for path, line, text in in_code + in_sql if other.search(text)] == []
    # The clock's own body, when a migration was applied (before there is a clock), and for how long a transaction has
    # been open, which the server stamps by its own.
    allowed = {"0001_tables.sql", "migrate.py", "horizon.py"}
    assert {path.name for path, _, text in in_code + in_sql if wall.search(text)} <= allowed
    assert sum(len(wall.findall(text)) for _, _, text in in_sql) == 1


def test_every_name_in_sql_of_ours_is_qualified() -> None:
    tables = r"(?:job|job_spec|job_lease|job_watermark|job_runs|migration)"
    bare = re.compile(rf"\b(?:from|join|into|update|on|references|table)\s+{tables}\b", re.IGNORECASE)
    found = [
        f"{path.name}:{line}"
        for path in [*MODULES, *MIGRATIONS]
        for line, text in (texts(path) if path.suffix == ".py" else enumerate(path.read_text().splitlines(), 1))
        if (path.suffix == ".sql" or STATEMENT.match(text)) and bare.search(text.partition("--")[0])
    ]
    assert found == []


def test_the_public_names_are_there() -> None:
    promised = {
        *("gaffer_asset", "build_definitions", "GafferResource"),
        *("Schedule", "EachInterval", "NewRows", "PendingRows", "Bounds", "Alerts", "JobSpec"),
        *("Batch", "RunRecord", "Outcome", "GafferError", "GafferWarning"),
    }
    assert promised <= set(gd.__all__)
    assert set(gd.__all__) <= set(dir(gd))
    for name in gd.__all__:
        assert getattr(gd, name).__name__ == name
    with pytest.raises(AttributeError, match="no_such_name"):
        gd.no_such_name  # noqa: B018


def test_every_error_is_one_of_ours() -> None:
    errors = import_module("gaffer_dagster.errors")
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    assert len(kinds) > 10
    assert all(issubclass(kind, (gd.GafferError, gd.GafferWarning)) for kind in kinds)
    assert all(kind.__doc__ for kind in kinds)


def test_every_module_says_what_it_is_for() -> None:
    code = {path: path.read_text() for path in MODULES if path.name != "__main__.py"}
    silent = [path for path, text in code.items() if text.strip() and not ast.get_docstring(ast.parse(text))]
    assert silent == []
