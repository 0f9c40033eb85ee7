"""Structured log lines: readable where people look, JSON on a handler that asks for it.

structlog is never configured for the process, since Dagster uses it too. Each line is a sentence-like text on an
ordinary logger, and carries its fields as `record.gaffer`, which `JsonFormatter` writes out.
"""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import MutableMapping
from datetime import datetime, timedelta, timezone
from typing import Any, cast

import structlog

from gaffer_dagster.store import db

Log = structlog.stdlib.BoundLogger


def wrap(logger: logging.Logger, **fields: Any) -> Log:
    """A logger of structured lines that end up on `logger`, each with these fields."""
    log = structlog.wrap_logger(
        logger,
        processors=[structlog.contextvars.merge_contextvars, _readable],
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    return cast("Log", log).bind(**fields)


class BriefFormatter(logging.Formatter):
    """Shows an exception as Python does, without passwords, and no part of it that is too long to be read."""

    def formatException(self, ei: Any) -> str:  # noqa: N802 — logging's name
        return "\n".join(db.brief(part.rstrip("\n")) for part in traceback.format_exception(*ei))


class JsonFormatter(BriefFormatter):
    """One JSON object a line: time, level, logger, event and its fields. For any `logging.Handler`, also by name in
    the `dagster_handler_config` of a dagster.yaml."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = getattr(record, "gaffer", None) or {"event": record.getMessage()}
        line = {
            "at": datetime.fromtimestamp(record.created, timezone.utc).isoformat(),
            "level": record.levelname.lower(),
            "logger": record.name,
            **fields,
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=_plain)


def _readable(_logger: Any, _name: str, event: MutableMapping[str, Any]) -> tuple[tuple[str], dict[str, Any]]:
    exc_info = event.pop("exc_info", None)
    fields = dict(event)
    shown = " ".join(
        f"{key}={_show(value, bare=key == 'cure')}" for key, value in fields.items() if key not in ("event", "job")
    )
    text = f"{fields.get('job', 'gaffer')} {fields['event']}" + (f": {shown}" if shown else "")
    return (db.presentable(text),), {"extra": {"gaffer": fields}, "exc_info": exc_info}


def _show(value: Any, *, bare: bool) -> str:
    """`bare`: it is pasted into a shell."""
    text = str(_plain(value)) if not isinstance(value, str) else value
    return repr(text) if (" " in text and not bare) or not text.isprintable() else text


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.astimezone(timezone.utc).isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    return value if value is None or isinstance(value, (int, float)) else str(value)
