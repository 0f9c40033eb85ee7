"""Databases that are thrown away, and the server that they are on.

Each test run has a name, and so have all its databases: `gaffer_test_` and the run's eight digits. A connection of that
name says that the run lives. What the databases of a run without one are is left-overs of a run that was killed; the
next one drops them.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any
from uuid import uuid4

from gaffer_dagster import local
from gaffer_dagster.errors import BadInputError, MissingPackageError, MissingRightsError
from gaffer_dagster.store import db, migrate
from gaffer_dagster.store import prepare as store_prepare

SERVER, DOCKER = "GAFFER_TEST_DATABASE_URL", "GAFFER_TEST_DOCKER"
_APPLICATION = "gaffer:testing"
_MARK = "a scratch database of gaffer_dagster.testing"


class Databases:
    """The scratch databases of one test run, on the server of `server_url`, while it is entered.

    The role needs CREATEDB, and may be no superuser; entering raises `MissingRightsError` without. The URL leads to any
    database of that server, straight and not through a pooler; nothing is written there.
    """

    def __init__(self, server_url: str) -> None:
        self._url = server_url
        self._run = f"gaffer_test_{uuid4().hex[:8]}"
        self._template: str | None = None
        self._sign: db.Connection | None = None

    def __enter__(self) -> Databases:
        self._sign = db.connect(self._url, application_name=self._run)
        row = self._sign.execute(
            "select rolname, rolcreatedb or rolsuper from pg_roles where rolname = current_user"
        ).fetchone()
        if row is not None and not row[1]:
            self._sign.close()
            raise MissingRightsError(
                f"the role {row[0]!r} may create no databases, as the tests need at {db.describe(self._url)}: "
                f"alter role {row[0]} createdb (it need not be a superuser); or name another server in {SERVER}"
            )
        for name in self._left_over(self._sign):
            # Another run that starts now may be dropping the same.
            with contextlib.suppress(Exception):
                self._sign.execute(db.drop_database(name))
        return self

    def __exit__(self, *_: object) -> None:
        if self._template is not None:
            self._drop(self._template)
        if self._sign is not None:
            self._sign.close()

    @contextmanager
    def scratch(self, *, migrated: bool = True) -> Generator[str]:
        """The URL of a new database, which is dropped at the end, whoever is connected. `migrated`: with the tables of
        this package, by a copy of one that has them: for a quarter of the work of the migrations."""
        name = self._name()
        template = None if not migrated else self._migrated()
        with db.connect(self._url, application_name=_APPLICATION) as connection:
            if template is None:
                connection.execute(db.create_database(name))
            else:
                version = connection.info.server_version
                connection.execute(db.copy_database(name, template, version=version))
            connection.execute(db.comment_on_database(name, _MARK))
        try:
            yield db.with_database(self._url, name)
        finally:
            self._drop(name)

    def _migrated(self) -> str:
        """The name of a migrated database that nobody uses."""
        if self._template is None:
            name = self._name()
            with db.connect(self._url, application_name=_APPLICATION) as connection:
                connection.execute(db.create_database(name))
            self._template = name
            with db.connect(db.with_database(self._url, name), application_name=_APPLICATION) as connection:
                migrate.migrate(connection)
        return self._template

    def _name(self) -> str:
        return f"{self._run}_{uuid4().hex[:8]}"

    def _drop(self, name: str) -> None:
        with db.connect(self._url, application_name=_APPLICATION) as connection:
            connection.execute(db.drop_database(name))

    def _left_over(self, connection: db.Connection) -> list[str]:
        """The databases of runs that are dead, as far as this role may drop them."""
        found = connection.execute(
            """
            select datname from pg_database as made
             where datname ~ '^gaffer_test_[0-9a-f]{8}_[0-9a-f]{8}$' and pg_has_role(datdba, 'usage')
               and not exists (select from pg_stat_activity as other
                                where other.datname = made.datname
                                   or other.application_name = left(made.datname, 20))
            """
        ).fetchall()
        return [name for (name,) in found]


@contextmanager
def scratch_database(server_url: str) -> Generator[str]:
    """The URL of a new, migrated database on the server of `server_url`; it is dropped at the end."""
    with Databases(server_url) as databases, databases.scratch() as url:
        yield url


def refuse_unless_scratch(connection: db.Connection, url: str) -> None:
    """Raises `BadInputError` for a database that was not made to be thrown away, by `Databases`."""
    made = connection.execute(
        "select shobj_description(oid, 'pg_database') from pg_database where datname = current_database()"
    ).fetchone()
    if made != (_MARK,):
        raise BadInputError(
            f"{db.describe(url)} is no scratch database, and this would change its clock, or its tables, for everybody "
            "who works there; take the fixture gaffer_database, or gaffer_dagster.testing.scratch_database(server_url)"
        )


def prepare(url: str, table: str, key: str, *, changed: bool = False) -> None:
    """Adds to a source of `NewRows` what it lacks, as `gaffer prepare TABLE --key KEY --apply` does (`changed`: with
    --changed). Raises `NotPreparedError`, or `BadInputError`, for what cannot serve."""
    with db.connect(url, application_name=_APPLICATION) as connection:
        store_prepare.apply(connection, store_prepare.statements(connection, table, key, changed=changed))


@contextmanager
def server(folder: Path, environment: Mapping[str, str] = os.environ) -> Generator[str]:
    """The URL of the server for tests: that of GAFFER_TEST_DATABASE_URL, else one in a container if
    GAFFER_TEST_DOCKER=1, else a private one in `folder`, which ends with this process, however that ends."""
    if environment.get(SERVER):
        yield environment[SERVER]
    elif environment.get(DOCKER) == "1":
        with _postgres_container() as container:
            yield container.get_connection_url()
    else:
        url = local.start(folder, fsync=False)
        with _stopped_whatever_happens(folder):
            yield _with_quick_logins(url)


def _postgres_container() -> Any:
    try:
        containers = import_module("testcontainers.community.postgres")
    except ImportError:
        raise MissingPackageError(
            f"{DOCKER}=1 needs testcontainers: pip install 'testcontainers[postgres]>=4'"
        ) from None
    return containers.PostgresContainer("postgres:16-alpine", driver=None)


_STOP_WITH_ME = "import sys; sys.stdin.read(); from gaffer_dagster import local; local.stop(sys.argv[1])"


@contextmanager
def _stopped_whatever_happens(folder: Path) -> Generator[None]:
    """A process that waits for the end of this one stops the server, where a kill -9 left this one no time to."""
    guard = subprocess.Popen(  # noqa: S603 — our own words, no shell
        [sys.executable, "-c", _STOP_WITH_ME, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        start_new_session=True,
    )
    try:
        yield
    finally:
        local.stop(folder)
        guard.communicate()


def _with_quick_logins(url: str) -> str:
    """Tests log in for each query that they ask aside, else by hashing the password 4096 times over."""
    parts = db.parse_url(url)
    with db.connect(url, application_name=_APPLICATION) as connection:
        if connection.info.server_version >= 160000:
            connection.execute("set scram_iterations = 1")
            connection.execute(db.set_password(parts["user"], parts["password"]))
    return url
