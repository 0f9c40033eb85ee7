"""What the catalog says of a user's table: the one place where a table's name from outside becomes an identifier."""

from __future__ import annotations

from dataclasses import dataclass

import psycopg
from psycopg import sql

from gaffer_dagster.errors import BadInputError
from gaffer_dagster.store import db


@dataclass(frozen=True)
class Column:
    """`type` is as SQL writes it (`character varying(10)`), `base` the same without its length (which a cast would
    cut to); `category` is pg_type's (`A` is an array)."""

    name: str
    type: str
    base: str
    category: str
    not_null: bool


@dataclass(frozen=True)
class Table:
    oid: int
    schema: str
    name: str
    columns: dict[str, Column]

    @property
    def identifier(self) -> sql.Identifier:
        return sql.Identifier(self.schema, self.name)

    def __str__(self) -> str:
        return f"{self.schema}.{self.name}"

    def column(self, name: str) -> Column:
        if name not in self.columns:
            raise BadInputError(f"table {self} has no column {name!r}; it has {', '.join(sorted(self.columns))}")
        return self.columns[name]


def find(connection: db.Connection, name: str) -> Table:
    """The table that SQL would find under this name. Raises `BadInputError`."""
    try:
        row = connection.execute(
            """
            select c.oid, n.nspname, c.relname, c.relkind
              from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace
             where c.oid = pg_catalog.to_regclass(%s)::oid
            """,
            [name],
        ).fetchone()
    except psycopg.Error as error:
        if db.worth_repeating(error) or db.was_cut(error):
            raise
        raise BadInputError(
            f"table name {name!r} cannot be read: {db.primary_message(error)}; write it as in SQL"
        ) from None
    if row is None:
        raise BadInputError(
            f"there is no table {name!r} here (as seen by {connection.info.user}); qualify it, or create it"
        )
    if row[3] not in ("r", "p"):
        raise BadInputError(f"{name!r} is no table; views and foreign tables cannot be used here")
    columns = connection.execute(
        """
        select a.attname, pg_catalog.format_type(a.atttypid, a.atttypmod),
               pg_catalog.format_type(a.atttypid, -1), t.typcategory, a.attnotnull
          from pg_catalog.pg_attribute a join pg_catalog.pg_type t on t.oid = a.atttypid
         where a.attrelid = %s and a.attnum > 0 and not a.attisdropped
         order by a.attnum
        """,
        [row[0]],
    ).fetchall()
    return Table(row[0], row[1], row[2], {c[0]: Column(*c) for c in columns})


def row_security_cure(connection: db.Connection, table: Table) -> str | None:
    """Where policies decide which of the table's rows this role sees: the SQL by which it sees them all."""
    row = connection.execute(
        """
        select case when pg_catalog.pg_has_role(c.relowner, 'usage')
                    then pg_catalog.format('alter table %%s no force row level security', c.oid::regclass)
                    else pg_catalog.format('alter role %%I bypassrls', current_user) end
          from pg_catalog.pg_class c where c.oid = %s and pg_catalog.row_security_active(c.oid)
        """,
        [table.oid],
    ).fetchone()
    return None if row is None else row[0]
