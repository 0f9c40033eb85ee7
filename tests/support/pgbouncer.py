"""A PgBouncer in transaction mode before the tests' Postgres."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from psycopg import conninfo

from gaffer_dagster.store.db import parse_url

_PATIENCE = 10.0
_NOBODY = 65534


class Pooler:
    """`url`: of the database that it was made for, through it."""

    def __init__(self, command: list[str], url: str, user: int | None, group: int | None) -> None:
        self.url = url
        self._command, self._user, self._group = command, user, group

    def start(self) -> None:
        self._process = subprocess.Popen(
            self._command, stderr=subprocess.PIPE, text=True, user=self._user, group=self._group
        )
        _wait_until_it_answers(self._process, self.url)

    def kill(self) -> None:
        """At once: whoever is connected through it is cut off."""
        self._process.kill()
        self._process.communicate(timeout=_PATIENCE)

    def stop(self) -> None:
        self._process.terminate()
        self._process.communicate(timeout=_PATIENCE)


@contextmanager
def pooled(url: str, *, size: int = 3, **settings: object) -> Generator[str]:
    """The URL of `url`'s database through a pooler that has `size` connections to each database at most."""
    with pooler(url, size=size, **settings) as made:
        yield made.url


@contextmanager
def pooler(url: str, *, size: int = 3, **settings: object) -> Generator[Pooler]:
    """The pooler itself, which can be killed and started again."""
    binary = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if binary is None:
        pytest.skip("pgbouncer is not installed (Debian: apt-get install pgbouncer)")
    parts = parse_url(url)
    given = {name: parts[name] for name in ("host", "port", "user", "password", "dbname") if name in parts}
    server = " ".join(f"{name}={value}" for name, value in given.items() if name != "dbname")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = {
        "listen_addr": "127.0.0.1",
        "listen_port": port,
        "unix_socket_dir": "",
        "auth_type": "any",
        "pool_mode": "transaction",
        "default_pool_size": size,
        "max_client_conn": 200,
    } | settings
    with tempfile.TemporaryDirectory(prefix="pgbouncer-") as folder:
        file = Path(folder) / "pgbouncer.ini"
        lines = [f"{name} = {value}" for name, value in config.items()]
        file.write_text("\n".join(["[databases]", f"* = {server}", "[pgbouncer]", *lines, ""]))
        owner = os.stat(given["host"]) if str(given.get("host", "")).startswith("/") else os.stat(tempfile.gettempdir())
        # It refuses to run as root: as whoever may use the server's socket, then.
        user, group = (owner.st_uid or _NOBODY, owner.st_gid or _NOBODY) if os.getuid() == 0 else (None, None)
        for each in (Path(folder), file):
            each.chmod(0o755)
        through = conninfo.make_conninfo(
            host="127.0.0.1", port=port, user=given["user"], dbname=given["dbname"], gssencmode="disable",
            sslmode=config.get("client_tls_sslmode", "disable"),
        )  # fmt: skip
        made = Pooler([binary, "-q", str(file)], through, user, group)
        made.start()
        try:
            yield made
        finally:
            made.stop()


def _wait_until_it_answers(process: subprocess.Popen[str], url: str) -> None:
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            psycopg.connect(url).close()
            return
        except psycopg.OperationalError as error:
            if process.poll() is not None or time.monotonic() > deadline:
                process.kill()
                raise AssertionError(f"pgbouncer does not answer: {error}; {process.communicate()[1]}") from None
            time.sleep(0.05)
