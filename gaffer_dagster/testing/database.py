"""A migrated database that is thrown away."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from uuid import uuid4

from gaffer_dagster.store import db, migrate


@contextmanager
def scratch_database(server_url: str) -> Generator[str]:
    """The URL of a new, migrated database on the server of `server_url`; it is dropped at the end."""
    name = f"gaffer_test_{uuid4().hex[:12]}"
    with db.connect(server_url, application_name="gaffer:testing") as connection:
        connection.execute(db.create_database(name))
    try:
        url = db.with_database(server_url, name)
        with db.connect(url, application_name="gaffer:testing") as connection:
            migrate.migrate(connection)
        yield url
    finally:
        with db.connect(server_url, application_name="gaffer:testing") as connection:
            connection.execute(db.drop_database(name))
