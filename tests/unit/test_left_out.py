"""Where GAFFER_TEST_WHOLE is set, what is left out has failed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = """
import pytest
@pytest.mark.skipif(True, reason="a program is missing")
def test_by_mark(): ...
@pytest.fixture
def program(): pytest.skip("a program is missing")
def test_by_fixture(program): ...
def test_by_call(): pytest.skip("a program is missing")
def test_long(): pytest.skip("takes minutes: SOMETHING=1")
@pytest.mark.xfail
def test_wrong(): assert False
def test_right(): ...
"""


@pytest.mark.parametrize(
    ("variables", "counts"),
    [
        ({}, {"passed": 1, "skipped": 4, "xfailed": 1}),
        ({"GAFFER_TEST_WHOLE": "1"}, {"passed": 1, "skipped": 1, "xfailed": 1, "failed": 1, "error": 2}),
    ],
)
def test_a_skip_fails_where_nothing_may_be_left_out(
    tmp_path: Path, variables: dict[str, str], counts: dict[str, int]
) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-p", "no:cacheprovider", str(tmp_path)],
        env={key: value for key, value in os.environ.items() if key != "GAFFER_TEST_WHOLE"} | variables,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    found = {
        what: int(count) for count, what in re.findall(r"(\d+) (passed|skipped|xfailed|failed|error)", done.stdout)
    }
    assert found == counts, done.stdout
    assert ("a program is missing; and with GAFFER_TEST_WHOLE" in done.stdout) is bool(variables)
