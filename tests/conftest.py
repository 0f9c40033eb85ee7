"""A database for each test, from the kit that users test their own jobs with.

The horizon of `NewRows` is one for a whole server, so each worker of pytest-xdist has a server of its own where it can.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gaffer_dagster.testing import Clock, Databases

pytest_plugins = ["gaffer_dagster.testing.plugin"]  # also where the package is not installed


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
