"""Where the tests' Postgres comes from, and a database for each test.

An explicit GAFFER_TEST_DATABASE_URL, else testcontainers if GAFFER_TEST_DOCKER=1, else a private server. The horizon
of `NewRows` is one for a whole server, so each worker of pytest-xdist has a server of its own where it can.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from uuid import uuid4

import pytest
from psycopg import sql

from gaffer_dagster import local
from gaffer_dagster.store import db
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
        yield _with_quick_logins(local.start(folder, fsync=False))
        local.stop(folder)


def _with_quick_logins(url: str) -> str:
    """The tests log in for each query that they ask aside, else by hashing the password 4096 times over."""
    parts = db.parse_url(url)
    with db.connect(url, application_name="test") as connection:
        if connection.info.server_version >= 160000:
            connection.execute("set scram_iterations = 1")
            role, password = sql.Identifier(parts["user"]), sql.Literal(parts["password"])
            connection.execute(sql.SQL("alter role {} password {}").format(role, password))
    return url


@pytest.fixture(scope="session")
def migrated(server_url: str) -> Iterator[str]:
    """The name of a migrated database that nobody uses: a copy takes a quarter of the work of the migrations."""
    with scratch_database(server_url) as url:
        yield db.parse_url(url)["dbname"]


@pytest.fixture
def url(server_url: str, migrated: str) -> Iterator[str]:
    """A migrated database of its own."""
    name = f"gaffer_test_{uuid4().hex[:12]}"
    copy = "create database {} template {} strategy file_copy"  # for half of the work of the default
    with db.connect(server_url, application_name="test") as connection:
        connection.execute(sql.SQL(copy).format(sql.Identifier(name), sql.Identifier(migrated)))
    yield db.with_database(server_url, name)
    with db.connect(server_url, application_name="test") as connection:
        connection.execute(db.drop_database(name))


@pytest.fixture
def clock(url: str) -> Clock:
    """The clock of that database, which the test moves."""
    return Clock(url)
