"""What several of these files need."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest
from psycopg import conninfo, sql

from gaffer_dagster.domain.run import RunRecord
from gaffer_dagster.engine.batch import Batch
from gaffer_dagster.store import db
from gaffer_dagster.testing import Databases
from tests.support import jobs


@pytest.fixture
def empty_url(gaffer_databases: Databases) -> Iterator[str]:
    """A database without our tables."""
    with gaffer_databases.scratch(migrated=False) as made:
        yield made


@pytest.fixture
def stranger(url: str) -> Iterator[str]:
    """The URL of `url`'s database for a role that was granted nothing."""
    name = f"stranger_{uuid4().hex[:12]}"
    jobs.execute(url, f"create role {name} login password 'secret'")
    yield conninfo.make_conninfo(**(db.parse_url(url) | {"user": name, "password": "secret"}))
    with jobs.connect(url) as connection:
        connection.execute(sql.SQL("drop owned by {0}; drop role {0}").format(sql.Identifier(name)))


@pytest.fixture
def work(url: str) -> Callable[..., RunRecord]:
    """Does something in a batch of a run, in which one row is due."""
    jobs.make_source(url)

    def in_a_batch(what: Callable[[Batch], Any], **bounds: Any) -> RunRecord:
        jobs.add_rows(url, 1)
        return jobs.run(jobs.spec(**bounds), url, what)

    return in_a_batch
