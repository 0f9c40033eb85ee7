"""Which database is meant: a URL, or the word `local` for the private server of this folder.

A URL that was given is the only one that is tried; there is no falling back, since a job that quietly works on
another database is the silence that this package is about.
"""

from __future__ import annotations

import os
from pathlib import Path

from gaffer_dagster import local
from gaffer_dagster.errors import BadInputError, DatabaseUnavailableError
from gaffer_dagster.store import db, migrate

VARIABLE = "GAFFER_DATABASE_URL"
LOCAL = "local"
FOLDER = Path(".gaffer")


def resolve(given: str) -> str:
    """The URL that is meant. `local` starts (or joins) the private server and migrates it."""
    if not given:
        raise BadInputError(f"no database is named; set {VARIABLE} to its URL, or to {LOCAL!r} for a private server")
    if given != LOCAL:
        db.parse_url(given)
        return given
    url = local.start(FOLDER)
    with db.connect(url, application_name="gaffer:migrate") as connection:
        migrate.migrate(connection)
    return url


def from_environment() -> str:
    """What GAFFER_DATABASE_URL names; without it, the private server of this folder if there is one."""
    return resolve(_given())


def at_hand(given: str | None = None) -> str:
    """What `from_environment` (or `resolve`) says, and nothing is started or migrated for it. Raises
    `DatabaseUnavailableError` where the private server does not run."""
    given = _given() if given is None else given
    url = local.running(FOLDER) if given == LOCAL else resolve(given)
    if url is None:
        raise DatabaseUnavailableError(f"the private server in {FOLDER} does not run; gaffer db url")
    return url


def _given() -> str:
    given = os.environ.get(VARIABLE, "")
    return LOCAL if not given and (FOLDER / "gaffer-postgres").exists() else given
