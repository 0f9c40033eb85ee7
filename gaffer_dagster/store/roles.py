"""`roles.sql`: the roles owner, runner, reader and operator, and what each may do with gaffer's tables."""

from __future__ import annotations

from importlib import resources

from psycopg import errors as pg
from psycopg import sql

from gaffer_dagster.errors import BadInputError, MissingRightsError
from gaffer_dagster.store import db, operations
from gaffer_dagster.store.operations import Operator


def script() -> str:
    """The one statement that makes the roles and sets their rights; the same again changes nothing."""
    return resources.files("gaffer_dagster.store").joinpath("roles.sql").read_text(encoding="utf-8")


def apply(connection: db.Connection, operator: Operator) -> None:
    """Makes the roles where they are not there, and sets their rights as this package needs them.

    Raises `BadInputError` for a role of the same name that is another, and `MissingRightsError`.
    """
    try:
        with connection.transaction():
            connection.execute("set local lock_timeout = '10s'")
            connection.execute(sql.SQL(script()))  # pyright: ignore[reportArgumentType] — our own file
            operations.note(connection, None, "roles", operator, {})
    except pg.DuplicateObject as error:
        raise BadInputError(db.primary_message(error)) from None
    except pg.InsufficientPrivilege as error:
        raise MissingRightsError(
            f'the role "{connection.info.user}" may not set the rights of the four roles: {db.primary_message(error)}; '
            "let an administrator run what `gaffer migrate --roles --sql` prints"
        ) from None
