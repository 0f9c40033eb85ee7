"""A database for each test, from the kit that users test their own jobs with.

The horizon of `NewRows` is one for a whole server, so each worker of pytest-xdist has a server of its own where it can.

Where GAFFER_TEST_WHOLE is set, as in CI, a test that skips has failed, unless it is of those that `MAY_SKIP` names: a
program that is missing must not take evidence away in silence.
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator, Iterator

import pytest

from gaffer_dagster.testing import Clock, Databases

pytest_plugins = ["gaffer_dagster.testing.plugin"]  # also where the package is not installed


MAY_SKIP = re.compile(
    # What is run by hand, and what Debian has not.
    "takes minutes|there is no dbt"
    # What a machine may not allow, or has in another way.
    "|no network namespace can be made|where mounting is allowed|psycopg2 does not load"
    "|another database of this server|no transaction_timeout|the data was in the folder|no interpreter here"
)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and isinstance(report.longrepr, tuple) and "GAFFER_TEST_WHOLE" in os.environ:
        reason = report.longrepr[2]
        if not MAY_SKIP.search(reason):
            report.outcome, report.longrepr = "failed", f"{reason}; and with GAFFER_TEST_WHOLE nothing may be left out"
    return report


@pytest.fixture(scope="session")
def server_url(gaffer_server: str) -> str:
    return gaffer_server


@pytest.fixture
def url(gaffer_databases: Databases) -> Iterator[str]:
    """A migrated database of its own; unlike `gaffer_database` it is not watched, and no variable names it."""
    with gaffer_databases.scratch() as made:
        yield made


@pytest.fixture
def clock(url: str) -> Clock:
    """The clock of that database, which the test moves."""
    return Clock(url)
