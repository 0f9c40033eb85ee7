"""`gaffer.protected_table`: tables whose writes the database refuses outside a fenced batch (0009_guard.sql)."""

from __future__ import annotations

from collections.abc import Collection

from psycopg import errors as pg

from gaffer_dagster.errors import BadInputError
from gaffer_dagster.store import db, tables
from gaffer_dagster.store.operations import Operator


def protect(connection: db.Connection, table: tables.Table, jobs: Collection[str], operator: Operator) -> int:
    """Lets only batches write the table, its partitions and children: those of `jobs` (added to those that may), or
    of any job where none is named. Returns how many tables are guarded now. Raises `UnknownJobError`, and
    `BadInputError` for a table that cannot be guarded.

    Waits for no lock for long."""
    try:
        with db.refusals(), db.impatient_of_locks(connection):
            row = connection.execute(
                "select gaffer.protect(%s, %s, %s, %s)", [table.oid, sorted(jobs) or None, operator.by, operator.reason]
            ).fetchone()
    except pg.InvalidParameterValue as error:
        raise BadInputError(db.primary_message(error)) from None
    return 0 if row is None else row[0]


def unprotect(connection: db.Connection, table: tables.Table, operator: Operator) -> bool:
    """Anybody may write again. False: the table was not protected."""
    with db.refusals(), db.impatient_of_locks(connection):
        row = connection.execute(
            "select gaffer.unprotect(%s, %s, %s)", [table.oid, operator.by, operator.reason]
        ).fetchone()
    return bool(row and row[0])


def require(connection: db.Connection, names: Collection[str], job: str) -> None:
    """Raises `ProtectedTableError` unless each of these tables is guarded, with all its partitions, for this job."""
    for name in names:
        table = tables.find(connection, name)
        with db.refusals():
            connection.execute("select gaffer.require_protection(%s, %s)", [table.oid, job])
