"""Which database is meant: a URL, or the word `local` for the private server of this folder.

A URL that was given is the only one that is tried; there is no falling back, since a job that quietly works on
another database is the silence that this package is about.
"""

from __future__ import annotations

import os
from pathlib import Path

from gaffer_dagster import local
from gaffer_dagster.errors import BadInputError
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


def at_hand() -> str | None:
    """The same, where nothing has to be started or migrated for it."""
    given = _given()
    return local.running(FOLDER) if given == LOCAL else given or None


def _given() -> str:
    given = os.environ.get(VARIABLE, "")
    return LOCAL if not given and (FOLDER / "gaffer-postgres").exists() else given
