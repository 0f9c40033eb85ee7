"""A private server with settings of a test's own."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from gaffer_dagster import local
from tests.support import jobs


@contextmanager
def server_with(folder: Path, *settings: str, fsync: bool = True) -> Generator[str]:
    """Its URL. `settings`: such as "wal_level = logical", also those for which it has to be started anew."""
    for setting in settings:
        jobs.execute(local.start(folder, fsync=fsync), f"alter system set {setting}")
    local.stop(folder)
    try:
        yield local.start(folder, fsync=fsync)
    finally:
        local.stop(folder)
