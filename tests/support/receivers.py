"""Receivers of notices: a real HTTP server and a real SMTP server, each told how to answer; and senders in processes of
their own, which stop where a test wants them to."""

from __future__ import annotations

import json
import socket
import ssl
import subprocess
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.message import EmailMessage
from email.parser import BytesParser
from email.policy import default
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from aiosmtpd.controller import Controller
from aiosmtpd.smtp import AuthResult, LoginPassword

from gaffer_dagster.engine import deliver as engine
from gaffer_dagster.engine.receivers import receivers_from
from gaffer_dagster.store import db, deliveries
from gaffer_dagster.testing.processes import Ending, Engine, Engines, Way
from tests.support import jobs, protocol

Answer = int | str
"""A status, or one of these: `silence` (nothing comes), `drip` (a byte of the header now and then, for ever), `wait`
(nothing comes until `release`), `redirect` (to `/elsewhere` of this server), `garbage`."""


class HttpReceiver:
    """Keeps what it is sent. `answers`: for the next requests, in order; after these, and to begin with, it is 200."""

    def __init__(self, *, certificate: Path | None = None) -> None:
        self.answers: list[Answer] = []
        self.paths: list[str] = []
        self.messages: list[Any] = []
        """The JSON of each POST."""
        self.body = b""
        """Of each answer."""
        self.headers: list[Mapping[str, str]] = []
        self.arrived = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._released = threading.Event()
        self._closed = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.port: int = self._server.server_address[1]
        self.url = f"{'http' if certificate is None else 'https'}://127.0.0.1:{self.port}"

    @property
    def keys(self) -> list[str]:
        """The idempotency key of each message."""
        return [each["Idempotency-Key"] for each in self.headers if "Idempotency-Key" in each]

    def release(self) -> None:
        """Lets go of those that wait."""
        self._released.set()

    def __enter__(self) -> HttpReceiver:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._released.set()
        self._server.shutdown()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer()

            def do_POST(self) -> None:
                self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def _answer(self, message: Any = None) -> None:
                with outer._lock:
                    outer.paths.append(self.path)
                    outer.headers.append(dict(self.headers))
                    if message is not None:
                        outer.messages.append(message)
                    answer = outer.answers.pop(0) if outer.answers else 200
                outer.arrived.release()
                if answer == "silence":
                    outer._closed.wait()
                elif answer == "drip":
                    self.wfile.write(b"HTTP/1.1 200 OK\r\n")
                    while not outer._closed.wait(0.05):
                        self.wfile.write(b"X")
                elif answer == "garbage":
                    self.wfile.write(b"<html>what?</html>\r\n\r\n")
                else:
                    if answer == "wait":
                        outer._released.wait()
                    self.send_response(answer if isinstance(answer, int) else 302 if answer == "redirect" else 200)
                    if answer == "redirect":
                        self.send_header("Location", f"{outer.url}/elsewhere")
                    self.end_headers()
                    self.wfile.write(outer.body)

            def handle(self) -> None:
                try:
                    super().handle()
                except (ConnectionError, ssl.SSLError):
                    self.close_connection = True  # it was left in the middle

            def log_message(self, *_: object) -> None:
                pass

        return Handler


class MailReceiver:
    """Keeps the mails that it is sent by whoever logs in with the password."""

    def __init__(self, password: str) -> None:
        self.mails: list[EmailMessage] = []
        self._password = password
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._controller = Controller(
            self, "127.0.0.1", self.port, authenticator=self._login, auth_required=True, auth_require_tls=False
        )

    def url(self, password: str) -> str:
        """For Apprise."""
        return (
            f"mailto://ada:{password}@127.0.0.1:{self.port}?from=gaffer@example.org&to=oncall@example.org&mode=insecure"
        )

    def _login(self, _server: object, _session: object, _envelope: object, _mechanism: str, given: Any) -> AuthResult:
        return AuthResult(
            success=isinstance(given, LoginPassword) and given.password == self._password.encode(), handled=False
        )

    async def handle_DATA(self, _server: object, _session: object, envelope: Any) -> str:  # noqa: N802 — aiosmtpd's name
        mail = BytesParser(policy=default).parsebytes(envelope.content)
        assert isinstance(mail, EmailMessage)
        self.mails.append(mail)
        return "250 taken"

    def __enter__(self) -> MailReceiver:
        self._controller.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._controller.stop()


def certificate(folder: Path) -> Path:
    """A key and a certificate of its own making, for 127.0.0.1."""
    made = folder / "server.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", made, "-out", folder / "only.pem"],
        check=True, capture_output=True,
    )  # fmt: skip
    with made.open("a") as file:
        file.write((folder / "only.pem").read_text())
    return made


# ── senders ──────────────────────────────────────────────────────────────────────────────────────────────────────────

CLAIMED, SENT = "claimed", "sent"


@dataclass(frozen=True)
class Sender:
    """What a sender is to do: deliver once. It stops at the place `stop_at`: `claimed`, before it sends the first
    message, or `sent`, before it notes that. `marks_first`: the broken one, which notes it before it sends."""

    url: str
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    stop_at: str | None = None
    marks_first: bool = False
    fresh: float = 20.0


@dataclass(frozen=True)
class Tally(Ending):
    """How many messages of a sender were taken, and of how many receivers one was not."""

    counts: dict[str, int] = field(default_factory=dict[str, int])


def send(way: Way, sender: Sender) -> Ending:
    """One call of `deliver`, in a process of its own; ends by telling what it returned."""
    read, note = deliveries.notices, deliveries.note

    def notices(connection: db.Connection, receiver: str, message: Any) -> Any:
        found = read(connection, receiver, message)
        if sender.marks_first:
            note(connection, receiver, message, None)
        way.at(CLAIMED)
        return found

    def noted(*args: Any) -> None:
        way.at(SENT)
        note(*args)

    deliveries.notices, deliveries.note = notices, noted
    engine._FRESH = sender.fresh  # pyright: ignore[reportPrivateUsage]
    with protocol.session(sender.url) as connection:
        # Without the log, so that what is seen is only what goes out.
        receivers = [each for each in receivers_from(sender.environment, jobs.LOG) if each.name != "log"]
        done = engine.deliver(connection, receivers, jobs.LOG)
    return Tally(counts={"sent": done.sent, "failed": len(done.failed)})


class Senders(Engines):
    """Starts senders, and leaves none behind."""

    def start(self, sender: Sender) -> Engine:
        return self.add(send, sender, stops=[] if sender.stop_at is None else [sender.stop_at])
