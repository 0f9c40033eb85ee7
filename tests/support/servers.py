"""A private server with settings of a test's own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from psycopg import conninfo

from gaffer_dagster import local
from gaffer_dagster.store import db
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


@contextmanager
def server_by_tcp(folder: Path) -> Generator[str]:
    """The URL of a private server that listens on a port of this machine."""
    parts = db.parse_url(local.start(folder, fsync=False))
    local.stop(folder)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    data = data_of(folder)
    account = local._account(data)  # pyright: ignore[reportPrivateUsage]
    tools, _ = local._tools(account)  # pyright: ignore[reportPrivateUsage]

    def control(*words: str) -> None:
        assert not local._run(account, str(tools / "pg_ctl"), *words, "-s", "-w", PGDATA=str(data))  # pyright: ignore[reportPrivateUsage]

    control("start", "-o", f"-clisten_addresses=127.0.0.1 -cport={port} -cunix_socket_directories=")
    try:
        yield conninfo.make_conninfo(**(parts | {"host": "127.0.0.1", "port": port}))
    finally:
        control("stop", "-m", "fast")


def crash(folder: Path) -> None:
    """Ends the server as a crash does (`immediate`: no checkpoint, what was not flushed is gone), and waits for it."""
    server = local._Server(Path(os.path.realpath(folder)))  # pyright: ignore[reportPrivateUsage]
    postmaster = server.postmaster()
    assert postmaster is not None, "the server does not run"
    os.kill(postmaster, signal.SIGQUIT)
    wait_until(server.is_gone, "no process of the server is left")


def data_of(folder: Path) -> Path:
    """Where the server of this folder has its data."""
    return Path(os.path.realpath(folder / "gaffer-postgres")) / "cluster" / "data"


def copy(folder: Path, to: Path) -> None:
    """Makes a server of the same data in another folder; this one is stopped, or in a backup."""
    local._make_home(to, lasting=False)  # pyright: ignore[reportPrivateUsage]
    subprocess.run(["cp", "-a", str(data_of(folder).parent), str(data_of(to).parent.parent)], check=True)


def follow(folder: Path, primary: str, *, backup_label: str = "") -> None:
    """Makes a copy a hot standby of the server of this URL, asynchronous, once it is started. `backup_label`: of the
    backup in which it was copied; else the server was stopped."""
    data = data_of(folder)
    quoted = conninfo.make_conninfo(**db.parse_url(primary)).replace("'", "''")
    with (data / "postgresql.auto.conf").open("a") as settings:
        settings.write(f"primary_conninfo = '{quoted}'\n")
    owner = data.stat()
    for name, text in {"standby.signal": "", **({"backup_label": backup_label} if backup_label else {})}.items():
        (data / name).write_text(text)
        os.chown(data / name, owner.st_uid, owner.st_gid)
    (data / "postmaster.pid").unlink(missing_ok=True)


@contextmanager
def lasting_server(folder: Path) -> Generator[str]:
    """The URL of one with fsync on, which many short connections ask; it ends with this process, however that ends."""
    url = local.start(folder)
    with database._stopped_whatever_happens(folder):  # pyright: ignore[reportPrivateUsage]
        yield database._with_quick_logins(url)  # pyright: ignore[reportPrivateUsage]
