"""The fixtures, as a pytest plugin that comes with the package (an entry point), so that they are there without a word.

An entry point, and not a line `pytest_plugins = ["gaffer_dagster.testing"]`, since that is refused in any conftest.py
but the topmost, and forgotten in it. What speaks against entry points does not hold here: this module imports pytest
and nothing else, does nothing until a fixture is asked for, adds no option, no hook and no autouse fixture, and all its
names begin with `gaffer_`. It is called after its module, so that `pytest_plugins` may name it, too;
`-p no:gaffer_dagster.testing.plugin` leaves it out.

    gaffer_server     (session)  the server: GAFFER_TEST_DATABASE_URL, else a container if GAFFER_TEST_DOCKER=1, else a
                                 private one
    gaffer_databases  (session)  makes scratch databases there
    gaffer_database              the URL of one, migrated and watched, which is GAFFER_DATABASE_URL meanwhile
    gaffer_clock                 its clock, which the test moves
    gaffer_run_due               does what is due there
    gaffer_survives              does faults to a job there
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from gaffer_dagster.testing.clock import Clock
    from gaffer_dagster.testing.database import Databases
    from gaffer_dagster.testing.faults import Survives
    from gaffer_dagster.testing.jobs import RunDue


@pytest.fixture(scope="session")
def gaffer_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of the server: that of GAFFER_TEST_DATABASE_URL (its role needs CREATEDB, no more), else one in a
    container if GAFFER_TEST_DOCKER=1, else a private one. With pytest-xdist, the latter two are each worker's own."""
    from gaffer_dagster.testing.database import server

    with server(tmp_path_factory.mktemp("postgres")) as url:
        yield url


@pytest.fixture(scope="session")
def gaffer_databases(gaffer_server: str) -> Iterator[Databases]:
    """Makes scratch databases: `with gaffer_databases.scratch() as url: …`"""
    from gaffer_dagster.testing.database import Databases

    with Databases(gaffer_server) as databases:
        yield databases


@pytest.fixture
def gaffer_database(gaffer_databases: Databases, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a database of the test's own: migrated, watched for `assert_invariants`, and dropped at the end. It is
    GAFFER_DATABASE_URL meanwhile, so that what the test starts cannot reach another by mistake."""
    from gaffer_dagster.testing.invariants import watch

    with gaffer_databases.scratch() as url:
        watch(url)
        monkeypatch.setenv("GAFFER_DATABASE_URL", url)
        yield url


@pytest.fixture
def gaffer_clock(gaffer_database: str) -> Clock:
    """The clock of `gaffer_database`, and of the runs there: `.now()`, `.set(at)`, `.advance(by)`."""
    from gaffer_dagster.testing.clock import Clock

    return Clock(gaffer_database)


@pytest.fixture
def gaffer_run_due(gaffer_database: str) -> RunDue:
    """`gaffer_run_due(job)` does all that is due right now in `gaffer_database`; the records of the runs. See
    `gaffer_dagster.testing.run_due`."""
    from gaffer_dagster.testing.jobs import run_due

    return partial(run_due, url=gaffer_database)


@pytest.fixture
def gaffer_survives(gaffer_database: str) -> Survives:
    """`gaffer_survives(job, more=…, holds=…)` does faults to a job in `gaffer_database`. See
    `gaffer_dagster.testing.faults.survives`."""
    from gaffer_dagster.testing.faults import survives

    return partial(survives, url=gaffer_database)
