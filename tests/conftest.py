"""Where the tests' Postgres comes from, and a database for each test.

An explicit GAFFER_TEST_DATABASE_URL, else testcontainers if GAFFER_TEST_DOCKER=1, else a private server. The horizon
of `NewRows` is one for a whole server, so each worker of pytest-xdist has a server of its own where it can.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from gaffer_dagster import local
from gaffer_dagster.testing import Clock, scratch_database


@pytest.fixture(scope="session")
def server_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    given = os.environ.get("GAFFER_TEST_DATABASE_URL")
    if given:
        yield given
    elif os.environ.get("GAFFER_TEST_DOCKER") == "1":
        from testcontainers.community.postgres import PostgresContainer

        with PostgresContainer("postgres:16-alpine", driver=None) as container:
            yield container.get_connection_url()
    else:
        folder = tmp_path_factory.mktemp("postgres")
        yield local.start(folder, fsync=False)
        local.stop(folder)


@pytest.fixture
def url(server_url: str) -> Iterator[str]:
    """A migrated database of its own."""
    with scratch_database(server_url) as made:
        yield made


@pytest.fixture
def clock(url: str) -> Clock:
    """The clock of that database, which the test moves."""
    return Clock(url)
