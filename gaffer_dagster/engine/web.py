"""One HTTP request to where it is meant to go, in the time that it may take.

A URL of a configuration is somebody's text: without PRIVATE the connection goes to public addresses only, over TLS, and
to the very address that was checked; no redirect is followed and no proxy of the environment is asked. The time limit
is of the whole, whatever the name server, the handshake or a server that drips its answer takes of it.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import http.client
import ipaddress
import re
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar
from urllib.parse import SplitResult, unquote, urlsplit

from gaffer_dagster.domain.alert import shown
from gaffer_dagster.engine.limit import within
from gaffer_dagster.errors import BadInputError, NotDeliveredError

T = TypeVar("T")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


@dataclass(frozen=True)
class Target:
    """Where a URL leads. `variable`: of the environment, which has it; the rest is not shown."""

    variable: str
    secure: bool
    private: bool
    host: str = field(repr=False)
    port: int = field(repr=False)
    netloc: str = field(repr=False)
    path: str = field(repr=False)
    authorization: str | None = field(repr=False)


def target(variable: str, environment: Mapping[str, str]) -> Target:
    """What the variable's URL means. Raises `BadInputError`, which names the variable and never its value."""
    private = is_set(f"{variable}_PRIVATE", environment)
    parts = _parts(variable, environment[variable].strip())
    if parts.scheme not in ("https", "http"):
        raise BadInputError(f"{variable}: not a URL of http or https; write https://…")
    if parts.scheme == "http" and not private:
        raise BadInputError(f"{variable}: what is sent would go in clear; use https://, or set {variable}_PRIVATE=1")
    login = None
    if parts.username is not None:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        login = "Basic " + base64.b64encode(pair.encode()).decode()
    secure = parts.scheme == "https"
    return Target(
        variable=variable,
        secure=secure,
        private=private,
        host=parts.hostname or "",
        port=parts.port or (443 if secure else 80),
        netloc=parts.netloc.rpartition("@")[2],
        path=(parts.path or "/") + (f"?{parts.query}" if parts.query else ""),
        authorization=login,
    )


def is_set(variable: str, environment: Mapping[str, str]) -> bool:
    """Whether a switch is on: 1, or off: 0, empty or left out. Raises `BadInputError`."""
    value = environment.get(variable, "")
    if value not in ("", "0", "1"):
        raise BadInputError(f"{variable}={shown(value)}: write 1, or leave it out")
    return value == "1"


def _parts(variable: str, url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        if parts.hostname and parts.port != 0 and re.fullmatch(r"[!-~]+", url):
            return parts
    except ValueError:
        pass
    raise BadInputError(
        f"{variable}: cannot be read as a URL (not shown, it may hold a password); the form is https://host/path, "
        "with %-escapes for special characters"
    )


def ask(
    where: Target, method: str, *, limit: timedelta, body: bytes | None = None, headers: Mapping[str, str] | None = None
) -> None:
    """Returns once the server has said that it took it (2xx). Raises `NotDeliveredError`."""
    answer = _within(limit, lambda line: _exchange(line, where, method, body, headers or {}))
    if 300 <= answer < 400:
        raise NotDeliveredError(
            f"status {answer}: a redirect, which is not followed; {where.variable} must name its end"
        )
    if not 200 <= answer < 300:
        raise NotDeliveredError(f"status {answer}")


def reach(where: Target, *, limit: timedelta) -> None:
    """Connects, with TLS where that is meant, asks for nothing and hangs up. Raises `NotDeliveredError`."""
    _within(limit, lambda line: _connect(line, where))


def _within(limit: timedelta, talk: Callable[[_Line], T]) -> T:
    line = _Line(time.monotonic() + limit.total_seconds())

    def run() -> T:
        try:
            return talk(line)
        finally:
            line.close()

    try:
        return within(limit, run, "gaffer request")
    except Exception as error:
        line.cut()  # where it was left to itself
        raise NotDeliveredError(_what(error, limit)) from None


class _Line:
    """The connection of one request, and its deadline: after that nothing is begun on it, and it can be cut."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._socket: socket.socket | None = None

    def take(self, opened: socket.socket) -> None:
        self._socket = opened
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        opened.settimeout(left)

    def cut(self) -> None:
        """From another thread than the one that works with it."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)  # that of an SSLSocket is not for two threads

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()


def _exchange(line: _Line, where: Target, method: str, body: bytes | None, given: Mapping[str, str]) -> int:
    headers = {"Host": where.netloc, "User-Agent": "gaffer_dagster", "Connection": "close", **given}
    if where.authorization is not None:
        headers["Authorization"] = where.authorization
    connection = http.client.HTTPConnection(where.host, where.port)
    connection.sock = _connect(line, where)
    connection.request(method, where.path, body, headers)
    return connection.getresponse().status  # what else it has to say is not read


def _connect(line: _Line, where: Target) -> socket.socket:
    found = socket.getaddrinfo(where.host, where.port, type=socket.SOCK_STREAM)
    if not where.private and not all(is_public(str(address[0])) for *_, address in found):
        raise NotDeliveredError(
            f"its name leads to an address that is not public; set {where.variable}_PRIVATE=1 if that is meant"
        )
    failure: OSError = OSError("no address")
    for family, *_, address in found:
        opened = socket.socket(family, socket.SOCK_STREAM)
        try:
            line.take(opened)
            opened.connect(address)
        except OSError as error:
            opened.close()
            failure = error
            continue
        if not where.secure:
            return opened
        wrapped = ssl.create_default_context().wrap_socket(
            opened, server_hostname=where.host, do_handshake_on_connect=False
        )
        line.take(wrapped)
        wrapped.do_handshake()
        return wrapped
    raise failure


def is_public(address: str) -> bool:
    """Whether it is an address of the open internet, itself and what it stands for."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if ip in _NAT64:
            ip = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        elif ip.ipv4_mapped is not None:
            ip = ip.ipv4_mapped
        elif ip.sixtofour is not None or ip.is_site_local:
            return False
    return ip.is_global and not ip.is_multicast and not ip.is_reserved


def _what(error: Exception, limit: timedelta) -> str:
    """What happened, in words that do not tell where: the text of an error may."""
    if isinstance(error, NotDeliveredError):
        return str(error)
    if isinstance(error, TimeoutError):
        return f"no answer within {limit.total_seconds():g} s"
    if isinstance(error, (socket.gaierror, UnicodeError)):  # the latter of a part that is empty, or too long
        return "its name cannot be resolved"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not valid: {error.verify_message.partition(',')[0]}"
    if isinstance(error, ssl.SSLError):
        return "no TLS is spoken there"
    if isinstance(error, OSError):
        return f"no connection: {errno.errorcode.get(error.errno or 0, type(error).__name__)}"
    return f"no answer in HTTP ({type(error).__name__})"
