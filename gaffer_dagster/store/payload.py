"""Many rows in one statement: `insert` by arrays, `copy` by COPY.

An array for each column, unnested on the server, costs a fraction of one INSERT for each row; COPY wins from
thousands of rows on.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from psycopg import sql
from psycopg.types.json import Json, Jsonb

from gaffer_dagster.errors import BadInputError, GafferError
from gaffer_dagster.store import db
from gaffer_dagster.store.tables import Table

Rows = Sequence[Mapping[str, Any]]


def insert_by_arrays(table: Table, rows: Rows) -> tuple[sql.Composed, list[list[Any]]] | None:
    """The statement that inserts `rows` and its parameters; None where arrays cannot carry the values: unnest
    flattens arrays of arrays, and the driver refuses one array of several types."""
    names = _columns(table, rows)
    arrays = [[_value(table, name, row[name]) for row in rows] for name in names]
    if any(table.columns[name].category == "A" for name in names) or any(map(_is_mixed, arrays)):
        return None
    statement = sql.SQL("insert into {} ({}) select * from rows from ({})").format(
        _doubled(table.schema, table.name),
        sql.SQL(", ").join(map(_doubled, names)),
        sql.SQL(", ").join(
            sql.SQL("pg_catalog.unnest(%s::{}[])").format(sql.SQL(table.columns[name].base.replace("%", "%%")))  # pyright: ignore[reportArgumentType]
            for name in names  # the catalog's own name of the type, without a length that a cast would cut to
        ),
    )
    return statement, arrays


def insert_one_by_one(table: Table, rows: Rows) -> tuple[sql.Composed, list[list[Any]]]:
    """The statement for one row, and the parameters of each."""
    names = _columns(table, rows)
    statement = sql.SQL("insert into {} ({}) values ({})").format(
        _doubled(table.schema, table.name),
        sql.SQL(", ").join(map(_doubled, names)),
        sql.SQL(", ").join([sql.Placeholder()] * len(names)),
    )
    return statement, [[_value(table, name, row[name]) for name in names] for row in rows]


def copy(table: Table, rows: Rows) -> tuple[sql.Composed, list[list[Any]]]:
    """The COPY statement, and all the rows that it will be sent."""
    names = _columns(table, rows)
    statement = sql.SQL("copy {} ({}) from stdin").format(
        table.identifier, sql.SQL(", ").join(map(sql.Identifier, names))
    )
    return statement, [[_value(table, name, row[name]) for name in names] for row in rows]


@contextmanager
def unsendable(connection: db.Connection, table: Table, rows: Rows) -> Generator[None]:
    """A value that cannot be made into what is sent (of an unknown type, too deep, no text for a database) is said with
    its row and column, as a `BadInputError`: the driver's own error names neither."""
    try:
        yield
    except GafferError:
        raise
    except Exception as error:
        if db.is_database_error(error) and (db.sqlstate(error) is not None or db.lost_connection(error)):
            raise  # the server's own word
        where = _culprit(connection, table, rows)
        raise BadInputError(
            f"{where} for table {table} cannot be sent: {db.primary_message(error)}; give a value that psycopg, or for "
            "a column of JSON the json module, takes"
        ) from error


def _culprit(connection: db.Connection, table: Table, rows: Rows) -> str:
    for number, row in enumerate(rows):
        for name, value in row.items():
            try:
                sql.Literal(_value(table, name, value)).as_bytes(connection)
            except Exception:
                return f"row {number}, column {name!r} (a {type(value).__name__})"
    return "a value"


def _doubled(*names: str) -> sql.Identifier:
    """A name in a statement that has parameters, where a % of its own is written twice."""
    return sql.Identifier(*(name.replace("%", "%%") for name in names))


def _columns(table: Table, rows: Rows) -> list[str]:
    names = list(rows[0])
    if not names:
        raise BadInputError(f"row 0 for table {table} has no columns; give a dict with at least one")
    for name in names:
        table.column(name)
    wanted = set(names)
    for number, row in enumerate(rows):
        if set(row) != wanted:
            odd = ", ".join(sorted(map(str, set(row) ^ wanted)))
            raise BadInputError(
                f"row {number} for table {table} has other columns than row 0 (see {odd}); give each row the same"
            )
    return names


def _value(table: Table, name: str, value: Any) -> Any:
    kind = table.columns[name].base
    if value is None or isinstance(value, (Json, Jsonb)):
        return value
    return Jsonb(value) if kind == "jsonb" else Json(value) if kind == "json" else value


def _is_mixed(values: list[Any]) -> bool:
    kinds: set[type[object]] = {type(value) for value in values if value is not None}
    return len(kinds) > 1
