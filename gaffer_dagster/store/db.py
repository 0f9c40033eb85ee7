"""Connections to Postgres.

Every connection is autocommit at rest (transactions are explicit in the SQL that is sent), prepares nothing and
sets nothing for the session, so that PgBouncer in transaction mode works by construction. Both keep-alives and
`tcp_user_timeout` are set, since each alone misses half of the ways in which a peer can vanish.
"""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg import conninfo
from psycopg.rows import TupleRow

from gaffer_dagster.errors import BadInputError, DatabaseUnavailableError

Connection = psycopg.Connection[TupleRow]

_LIVENESS: dict[str, Any] = {
    "connect_timeout": 5,
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 15_000,
}
_SECRETS = ("password", "sslpassword", "passfile")


def parse_url(url: str) -> dict[str, Any]:
    """The parts of a libpq or SQLAlchemy style URL (or a libpq keyword string).

    Raises `BadInputError` without repeating the text: a malformed URL may hold a password anywhere.
    """
    text = url.strip()
    for scheme in ("postgresql+psycopg2://", "postgresql+psycopg://", "postgres+psycopg://"):
        if text.startswith(scheme):
            text = "postgresql://" + text.removeprefix(scheme)
    if not text:
        raise BadInputError("the database URL is empty; give one such as postgresql://user@host:5432/name")
    try:
        parts = conninfo.conninfo_to_dict(text)
    except psycopg.Error:
        raise BadInputError(
            "the database URL cannot be read (not shown, it may hold a password); the form is "
            "postgresql://user:password@host:5432/name, with %-escapes for special characters"
        ) from None
    if "options" in parts:
        raise BadInputError(
            "the database URL sets 'options', which poolers drop or refuse; set them with ALTER ROLE instead"
        )
    return dict(parts)


def describe(url: str) -> str:
    """Where a URL leads, for messages: user, host, port and database, never a secret."""
    parts = {k: v for k, v in parse_url(url).items() if k not in _SECRETS}
    host = parts.get("host") or parts.get("hostaddr") or "localhost"
    return f"{parts.get('user', '')}@{host}:{parts.get('port', 5432)}/{parts.get('dbname', '')}"


def connect(url: str, *, application_name: str) -> Connection:
    """A new connection of its own, never pooled. Raises `DatabaseUnavailableError` when there is none to be had."""
    parts = _LIVENESS | parse_url(url)
    parts["application_name"] = application_name[:63]
    try:
        # ClientCursor binds on the client, so that one message can carry several statements and their parameters.
        return psycopg.connect(
            **parts, autocommit=True, prepare_threshold=None, cursor_factory=psycopg.ClientCursor
        )
    except psycopg.OperationalError as error:
        raise DatabaseUnavailableError(
            f"Postgres cannot be reached at {describe(url)}: {str(error).strip().splitlines()[-1]}; "
            "check that it runs, the URL, and the network in between"
        ) from None
