"""Who is told: the receivers of this process's environment, each of which takes a message or raises.

`GAFFER_RECEIVER_<NAME>=URL` makes one, `…_SEVERITY=error` spares it warnings, and `…_PRIVATE=1` lets a webhook go to
private addresses and in clear. A URL of http or https is a webhook; anything else is Apprise's. The log is always told.
A receiver that is set up wrongly is one that fails, each time, with the reason: it must not silence the others.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol
from urllib.parse import unquote, unquote_plus

from gaffer_dagster.domain.alert import Severity, is_receiver, shown
from gaffer_dagster.domain.notice import Message
from gaffer_dagster.engine import web
from gaffer_dagster.engine.log import Log
from gaffer_dagster.errors import BadInputError, NotDeliveredError

PREFIX = "GAFFER_RECEIVER_"
LOG = "log"

_WEBHOOK_LIMIT = timedelta(seconds=10)
_APPRISE_LIMIT = timedelta(seconds=15)  # with the two that it takes to load
_MOST_SAID = 300  # of what Apprise says
_LEAST_SECRET = 4


class Receiver(Protocol):
    """`severity`: the least that it is told of."""

    @property
    def name(self) -> str: ...
    @property
    def severity(self) -> Severity: ...
    def send(self, message: Message) -> None:
        """Returns once it was taken; raises `NotDeliveredError`, whose text holds no secret."""
        ...


def receivers_from(environment: Mapping[str, str], log: Log) -> list[Receiver]:
    """The log, and those that the environment names."""
    return [ToLog(log), *(_receiver(name, environment) for name in _names(environment, log))]


def _names(environment: Mapping[str, str], log: Log) -> Iterator[str]:
    """Also those of which only a setting is there: their URL is missing."""
    given = {name.removeprefix(PREFIX) for name in environment if name.startswith(PREFIX)}
    for name in sorted({re.sub(r"_(SEVERITY|PRIVATE)$", "", each) for each in given}):
        if name.lower() == LOG:
            log.error("receiver left out", variable=PREFIX + name, why="log is the log's own name; give another")
        else:
            yield name


def _receiver(name: str, environment: Mapping[str, str]) -> Receiver:
    variable = PREFIX + name
    try:
        severity = _severity(f"{variable}_SEVERITY", environment)
        url = environment.get(variable, "").strip()
        if not (is_receiver(name.lower()) and name.upper() == name):
            raise BadInputError(f"{variable}: a receiver's name is of A-Z, 0-9 and _, at most 63")
        if not url:
            raise BadInputError(f"{variable} is empty, or not set; put the receiver's URL into it")
        scheme = re.match(r"([a-z][a-z0-9+.-]*)://", url, re.IGNORECASE)
        if scheme is None:
            raise BadInputError(f"{variable}: no URL (not shown, it may hold a secret); write https://… or Apprise's")
        if scheme[1].lower() in ("http", "https"):
            return Webhook(name.lower(), severity, web.target(variable, environment))
        if importlib.util.find_spec("apprise") is None:
            raise BadInputError(f"{variable}: a URL of Apprise's; install it: pip install 'gaffer_dagster[alerts]'")
        return Apprise(name.lower(), severity, variable, url)
    except BadInputError as error:
        return Unusable(name.lower(), Severity.WARNING, str(error))


def _severity(variable: str, environment: Mapping[str, str]) -> Severity:
    try:
        return Severity(environment.get(variable, "warning"))
    except ValueError:
        raise BadInputError(
            f"{variable}={shown(environment[variable])} is no severity; write error or warning"
        ) from None


@dataclass(frozen=True)
class ToLog:
    """A line of the log for each message."""

    log: Log
    name: str = LOG
    severity: Severity = Severity.WARNING

    def send(self, message: Message) -> None:
        fields = {
            name: message.payload[name]
            for name in ("job", "watch", "kind", "incident", "counts")
            if message.payload.get(name) is not None
        }
        tell = self.log.error if message.severity is Severity.ERROR else self.log.warning
        (self.log.info if message.recovery else tell)(f"alert {message.payload['event']}", **fields, text=message.text)


@dataclass(frozen=True)
class Webhook:
    """A POST of the message's payload as JSON, with its key as `Idempotency-Key`."""

    name: str
    severity: Severity
    target: web.Target

    def send(self, message: Message) -> None:
        web.ask(
            self.target,
            "POST",
            limit=_WEBHOOK_LIMIT,
            body=json.dumps(message.payload).encode(),
            headers={"Content-Type": "application/json", "Idempotency-Key": message.key},
        )


@dataclass(frozen=True)
class Apprise:
    """Slack, Teams, PagerDuty, mail and a hundred others, by a URL of Apprise's.

    Apprise runs in a process of its own: it can be ended at a given time, whatever it waits for, and what it and its
    libraries log (a path with a token, at DEBUG) goes nowhere.
    """

    name: str
    severity: Severity
    variable: str
    url: str = field(repr=False)

    def read(self) -> None:
        """Raises `NotDeliveredError` where Apprise cannot read the URL. Sends nothing."""
        self._ask(None)

    def send(self, message: Message) -> None:
        kind = "success" if message.recovery else "failure" if message.severity is Severity.ERROR else "warning"
        body = message.text.removeprefix(message.title).strip()
        self._ask({"title": message.title, "body": body, "notify_type": kind})

    def _ask(self, message: Mapping[str, str] | None) -> None:
        given = {"path": sys.path, "url": self.url, "message": message}
        try:
            ended = subprocess.run(  # noqa: S603 — our own words, no shell
                [sys.executable, "-I", "-X", "utf8", "-c", _CHILD],
                input=json.dumps(given).encode(),
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                timeout=_APPRISE_LIMIT.total_seconds(),
                # Whatever Apprise may read of its own in the environment is not this receiver's.
                env={name: value for name, value in os.environ.items() if not name.startswith("APPRISE_")},
            )
        except subprocess.TimeoutExpired:
            raise NotDeliveredError(f"no answer within {_APPRISE_LIMIT.total_seconds():g} s") from None
        except OSError as error:
            raise NotDeliveredError(f"Python could not be started for Apprise ({type(error).__name__})") from None
        if ended.returncode == _UNREADABLE:
            raise NotDeliveredError(f"Apprise cannot read the URL in {self.variable}; mend it")
        if ended.returncode != 0:
            said = ended.stdout.decode(errors="replace").splitlines() if ended.returncode == _REFUSED else []
            raise NotDeliveredError(
                f"Apprise failed{_hide(self.url, said[-1])[:_MOST_SAID]}"
                if said
                else "Apprise failed, and does not say why; look at the token and the network, and see more by: "
                f'apprise -vv -b test "${self.variable}"'
            )


def _hide(url: str, text: str) -> str:
    """`text` without any part of the URL that may be a secret, as it is written there or meant by it. Apprise has
    tokens wherever others have a host, a path or a name, so that is all of it but the scheme."""
    given = url.partition("://")[2]
    parts = {given}
    for signs in (r"[/?#&]", r"[/?#&=@]", r"[/?#&=@:]", r"[/?#&=@:,;+.\s]"):
        for form in (given, unquote(given), unquote_plus(given)):
            parts.update(re.split(signs, form))
    password = given.rpartition("@")[0].partition(":")[2]  # any sign may be in it
    parts |= {password, unquote(password)}
    parts |= {re.sub(r"[\W_]", "", part) for part in parts}  # telephone numbers
    known = sorted((part for part in parts if len(part) >= _LEAST_SECRET), key=len, reverse=True)
    if known:
        text = re.sub("|".join(map(re.escape, known)), "***", text, flags=re.IGNORECASE)
    return re.sub(r"(?=[\w+/=-]*\d)[\w+/=-]{20,}", "***", text)  # what was made of one: base64, a digest


@dataclass(frozen=True)
class Unusable:
    """One that is set up wrongly."""

    name: str
    severity: Severity
    reason: str

    def send(self, message: Message) -> None:
        raise NotDeliveredError(self.reason)


# ── in the process of Apprise ────────────────────────────────────────────────────────────────────────────────────────

_CHILD = """
import json, sys
given = json.load(sys.stdin)
sys.path[:] = given.pop("path")
from gaffer_dagster.engine.receivers import notify
sys.exit(notify(**given))
"""
_UNREADABLE, _REFUSED = 3, 4


def notify(url: str, message: Mapping[str, str] | None) -> int:
    """The exit status: 0 if it was delivered; without a message, if the URL can be read. Says what Apprise tells only
    its log: a status of HTTP or SMTP, and its last two warnings, with whatever secrets are in them."""
    apprise: Any = importlib.import_module("apprise")  # of its types some are not known
    lines: list[str] = []
    warnings: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())
            if record.levelno >= logging.WARNING:
                warnings.append(" ".join("".join(char if char.isprintable() else " " for char in lines[-1]).split()))

    apprise.logger.addHandler(Lines())
    apprise.logger.setLevel(logging.DEBUG)
    # Nothing is kept on disk, no key is made, no redirect is followed.
    asset = apprise.AppriseAsset(storage_mode="memory", pgp_autogen=False, pem_autogen=False, http_redirects=False)
    service = apprise.Apprise.instantiate(url, asset=asset)
    if service is None:
        return _UNREADABLE
    if message is None or apprise.Apprise(service, asset=asset).notify(
        **message, body_format=apprise.NotifyFormat.TEXT
    ):
        return 0
    statuses = [found[1] for line in lines for found in re.finditer(r"(?:\berror=|\()([1-5]\d\d)\b", line)]
    status = f" with status {statuses[-1]}" if statuses else ""
    why = f": {'; '.join(warnings[-2:])}" if warnings else ""
    if status or why:
        print(status + why)  # noqa: T201 — to the process that asked
    return _REFUSED
