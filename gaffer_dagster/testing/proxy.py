"""A proxy before Postgres that cuts a connection at a message which calls a function of the line.

It knows the wire well enough to tell one message from the next, and when the server has answered.
"""

from __future__ import annotations

import asyncio
import struct
import threading
from collections.abc import Generator
from contextlib import contextmanager
from enum import Enum

from gaffer_dagster.errors import BadInputError, DatabaseUnavailableError
from gaffer_dagster.store import db

# The server is done with a message, and in no transaction, or in one that failed.
_READY = (b"Z\x00\x00\x00\x05I", b"Z\x00\x00\x00\x05E")

_READABLE = {"sslmode": "disable", "gssencmode": "disable"}


class Cut(str, Enum):
    """What is done to a message."""

    NONE = "not at all"
    BEFORE = "before the message is sent"
    DURING = "once it is sent, before it is done"
    AFTER = "once it is done, before the answer arrives"

    def __str__(self) -> str:
        return self.value


class Proxy:
    """Waits for a message that calls the first function of `cuts`, does to it what is said there, then waits for the
    next; when none is left it passes everything. In place of a function, `connect` is a new connection, which is
    refused."""

    def __init__(self, url: str, cuts: list[tuple[str, Cut]]) -> None:
        self._url = url
        self._parts = db.parse_url(url)
        self._cuts = cuts
        self.url = ""

    @property
    def is_through(self) -> bool:
        """Every cut was made."""
        return not self._cuts

    def cut(self, function: str, when: Cut) -> None:
        """One more cut, behind those that are still to be made."""
        self._cuts.append((function, when))

    def take_back(self) -> bool:
        """No cut is made from now on. False: none was left to make."""
        left, self._cuts = self._cuts, []
        return bool(left)

    async def start(self, host: str) -> asyncio.AbstractServer:
        server = await asyncio.start_server(self._serve, host, 0)
        port = server.sockets[0].getsockname()[1]
        self.url = db.with_parts(self._url, host=host, port=port, **_READABLE)
        return server

    async def _serve(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        cuts = self._cuts
        if cuts and cuts[0][0] == "connect":
            cuts.pop(0)
            to_client.transport.abort()
            return
        host, port = self._parts.get("host") or "/tmp", int(self._parts.get("port") or 5432)  # noqa: S108 — as libpq
        try:
            if host.startswith("/"):
                server, to_server = await asyncio.open_unix_connection(f"{host}/.s.PGSQL.{port}")
            else:
                server, to_server = await asyncio.open_connection(host, port)
        except OSError:  # the server is away
            to_client.transport.abort()
            return
        quiet = asyncio.Event()  # answers are swallowed
        done = asyncio.Event()
        back = asyncio.create_task(self._pass_answers(server, to_client, quiet, done))
        try:
            await self._pass_messages(client, to_server, quiet, done)
        except (asyncio.IncompleteReadError, OSError):
            pass  # either side is gone
        finally:
            to_client.transport.abort()
            to_server.close()
            back.cancel()

    async def _pass_messages(
        self, client: asyncio.StreamReader, to_server: asyncio.StreamWriter, quiet: asyncio.Event, done: asyncio.Event
    ) -> None:
        kind = b""  # the first message has none
        while True:
            size = await client.readexactly(4)
            body = await client.readexactly(struct.unpack("!i", size)[0] - 4)
            cut, cuts = Cut.NONE, self._cuts
            if cuts and f"gaffer.{cuts[0][0]}(".encode() in body:
                cut = cuts.pop(0)[1]
            if cut is Cut.BEFORE:
                return
            if cut is not Cut.NONE:
                quiet.set()
            to_server.write(kind + size + body)
            await to_server.drain()
            if cut is Cut.AFTER:
                await done.wait()
            if cut is not Cut.NONE:
                return
            kind = await client.readexactly(1)

    async def _pass_answers(
        self, server: asyncio.StreamReader, to_client: asyncio.StreamWriter, quiet: asyncio.Event, done: asyncio.Event
    ) -> None:
        last = b""
        while chunk := await server.read(65536):
            if quiet.is_set():
                last = (last + chunk)[-len(_READY[0]) :]
                if last in _READY:
                    done.set()
            else:
                to_client.write(chunk)
                await to_client.drain()
        done.set()
        to_client.close()


def refuse_unreadable(url: str) -> None:
    """Raises `BadInputError` where the server cannot be reached without encryption, which no proxy can look into."""
    try:
        db.connect(db.with_parts(url, **_READABLE), application_name="gaffer:testing").close()
    except DatabaseUnavailableError as error:
        raise BadInputError(
            "to cut a connection at a COMMIT, the messages must be readable, so the tests need a server that takes "
            "connections without TLS: let pg_hba.conf have a `host` line for them, not `hostssl` alone; or leave "
            f"CutCommit out, by faults=. Without TLS: {error}"
        ) from None


@contextmanager
def cutting(url: str, *cuts: tuple[str, Cut], host: str = "127.0.0.1") -> Generator[Proxy]:
    """A proxy to the server of `url`, which is to be reached by the proxy's own `url`. `host`: where it listens."""
    loop = asyncio.new_event_loop()
    proxy = Proxy(url, list(cuts))
    server = loop.run_until_complete(proxy.start(host))
    thread = threading.Thread(target=loop.run_forever, name="proxy", daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        server.close()  # while the loop runs, only its own thread may
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left))
        loop.close()
