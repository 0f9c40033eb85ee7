"""A private server with settings of a test's own."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from gaffer_dagster import local
from gaffer_dagster.testing import database
from gaffer_dagster.testing.waits import wait_until
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


def crash(folder: Path) -> None:
    """Ends the server as a crash does (`immediate`: no checkpoint, what was not flushed is gone), and waits for it."""
    server = local._Server(Path(os.path.realpath(folder)))  # pyright: ignore[reportPrivateUsage]
    postmaster = server.postmaster()
    assert postmaster is not None, "the server does not run"
    os.kill(postmaster, signal.SIGQUIT)
    wait_until(server.is_gone, "no process of the server is left")


@contextmanager
def lasting_server(folder: Path) -> Generator[str]:
    """The URL of one with fsync on, which many short connections ask; it ends with this process, however that ends."""
    url = local.start(folder)
    with database._stopped_whatever_happens(folder):  # pyright: ignore[reportPrivateUsage]
        yield database._with_quick_logins(url)  # pyright: ignore[reportPrivateUsage]
