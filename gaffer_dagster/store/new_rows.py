"""Rows in commit order: read by (number of the writing transaction, key), never past what may still commit behind.

The number alone loses ties, the key alone loses rows whose writer took the key early and committed late. A row is due
once its writer's number is below the *horizon*, the oldest transaction that is still open anywhere in the cluster.

Or by a cursor of the table's own and the key. Then the horizon is a time that is `settle` ago, and what a writer who
lives longer commits behind the position is lost; `longest_writer` tells what the server lets one live.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

import psycopg
from psycopg import errors as pg
from psycopg import sql
from psycopg.rows import TupleRow, tuple_row
from typing_extensions import LiteralString

from gaffer_dagster.domain.progress import BACKLOG_CEILING
from gaffer_dagster.domain.watermark import CursorPosition, RowPosition
from gaffer_dagster.errors import BadInputError, ForeignWatermarkError
from gaffer_dagster.store import db
from gaffer_dagster.store.prepare import XID_COLUMN, Source

AnyPosition = RowPosition | CursorPosition

# How a value of the order is written and read back as the same one, whatever DateStyle and TimeZone say.
_WRITTEN: Mapping[str, LiteralString] = {
    "xid8": "{}::text",
    "timestamp with time zone": "pg_catalog.to_json({} at time zone 'UTC') #>> '{{}}'",
    "date": "pg_catalog.to_json({}) #>> '{{}}'",
}
_READ: Mapping[str, LiteralString] = {
    "xid8": "{}::xid8",
    "timestamp with time zone": "({}::timestamp at time zone 'UTC')",
    "date": "{}::date",
}
# When a row is due at last, but for the lag. A date is over in every zone at noon of the next one, UTC.
_AT: Mapping[str, LiteralString] = {
    "timestamp with time zone": "greatest({}, timestamptz '0001-01-02 00:00:00+00')",
    "date": "((greatest({}, date '0001-01-02') + 1) + time '12:00') at time zone 'UTC'",
}
_A_DAY_IS_OVER = timedelta(hours=12)


@dataclass(frozen=True)
class Rows:
    """`count`: how many rows there are, which is more than `rows` where they were left in the database."""

    rows: list[dict[str, Any]]
    position: AnyPosition
    count: int


@dataclass(frozen=True)
class Writer:
    """A role that may write, and how long its transactions may last (None: for ever)."""

    role: str
    lives: timedelta | None


def horizon(connection: db.Connection, job: str, position: RowPosition | None, cluster: str | None) -> tuple[str, str]:
    """Below which number every transaction is over, and the cluster that counts so.

    Raises `ForeignWatermarkError` for a position that this cluster has not reached, or another one counted.
    """
    row = connection.execute(
        """
        select pg_catalog.pg_snapshot_xmin(snapshot)::text, gaffer.cluster(),
               coalesce(%s::xid8 >= pg_catalog.pg_snapshot_xmax(snapshot), false)
          from pg_catalog.pg_current_snapshot() as snapshot
        """,
        [None if position is None else position.xid],
    ).fetchone()
    assert row is not None  # noqa: S101 — one row by construction
    if position is not None and (row[2] or cluster != row[1]):
        raise ForeignWatermarkError(
            f"the watermark of job {job!r} (transaction {position.xid} of cluster {cluster}) was not counted by this "
            f"database (cluster {row[1]}): it was restored or copied. Nothing was read, since rows could be skipped in "
            + (
                "silence; to go on with this database, run: gaffer watermark adopt --dry-run"
                if cluster != row[1]
                else f"silence; decide where to go on, then: gaffer watermark set {job} beginning, end or after:KEY"
            )
        )
    return row[0], row[1]


def lag(source: Source, at: datetime, settle: timedelta) -> str:
    """Below which value of the cursor rows are due at this time."""
    until = (at - settle).astimezone(timezone.utc).replace(tzinfo=None)
    return (until - _A_DAY_IS_OVER).date().isoformat() if source.order_type == "date" else until.isoformat()


def page(
    connection: db.Connection,
    source: Source,
    where: LiteralString | None,
    position: AnyPosition | None,
    horizon: str,
    limit: int,
) -> Rows | None:
    """The next rows below the horizon, at most `limit`; None: there is none. Values are loaded as psycopg does."""
    names = _names(source)
    order, key = _columns(source)
    query = sql.SQL("select {}, {}, {key}::text {} order by {order}, {key} limit {}").format(
        sql.SQL(", ").join(map(sql.Identifier, names)),
        written(source, order),
        _due(source, where, position, horizon),
        sql.Literal(limit),
        order=order,
        key=key,
    )
    rows: list[dict[str, Any]] = []
    last: tuple[Any, ...] = ()
    with connection.cursor(row_factory=tuple_row) as cursor:
        _execute(cursor, query, source, where)
        for number in range(cursor.rowcount):
            try:
                last = cursor.fetchone() or ()
            except psycopg.DataError as error:
                bad = cursor.pgresult.get_value(number, len(names) + 1) if cursor.pgresult else None
                raise BadInputError(
                    f"the row of {source.table} with {source.key} = {(bad or b'?').decode(errors='replace')} holds a "
                    f"value that Python cannot: {error}; mend it, or leave it out with where="
                ) from None
            rows.append(dict(zip(names, last, strict=False)))
    return Rows(rows, position_at(source, last[-2], last[-1]), len(rows)) if rows else None


def end_of_page(
    connection: db.Connection,
    source: Source,
    where: LiteralString | None,
    position: AnyPosition | None,
    horizon: str,
    limit: int,
) -> Rows | None:
    """As `page`, of which the rows stay where they are; see `between`."""
    order, key = _columns(source)
    row = _execute(
        connection,
        sql.SQL(
            "with page as materialized (select {order} as gaffer_order, {key} as gaffer_key {due}"
            " order by {order}, {key} limit {limit})"
            " select {written}, page.gaffer_key::text, (select pg_catalog.count(*) from page) from page"
            " order by page.gaffer_order desc, page.gaffer_key desc limit 1"
        ).format(
            order=order,
            key=key,
            due=_due(source, where, position, horizon),
            limit=sql.Literal(limit),
            written=written(source, sql.SQL("gaffer_order")),
        ),
        source,
        where,
    ).fetchone()
    return None if row is None else Rows([], position_at(source, row[0], row[1]), row[2])


def between(
    source: Source, where: LiteralString | None, since: AnyPosition | None, until: AnyPosition, horizon: str
) -> db.Query:
    """The query for the due rows after `since`, up to and with `until`.

    It reads what is there when it runs. No row can come in there any more (but behind the back of a lag), and whatever
    has left meanwhile was deleted, is due no more, or comes again, for a change has put it behind `until`.
    """
    return sql.SQL("select {} {} and {}").format(
        sql.SQL(", ").join(map(sql.Identifier, _names(source))),
        _due(source, where, since, horizon),
        _compared(source, sql.SQL("<="), until),
    )


def backlog(
    connection: db.Connection,
    source: Source,
    where: LiteralString | None,
    position: AnyPosition | None,
    horizon: str,
) -> int:
    """How many rows are due and left, counted up to `BACKLOG_CEILING`."""
    row = _execute(
        connection,
        sql.SQL("select count(*) from (select 1 {} limit {}) as due").format(
            _due(source, where, position, horizon), sql.Literal(BACKLOG_CEILING)
        ),
        source,
        where,
    ).fetchone()
    return row[0] if row else 0


def is_held_back(connection: db.Connection, source: Source, where: LiteralString | None, horizon: str) -> bool:
    """There are rows that are not due yet, since the transaction of this number is still open, and the oldest."""
    row = _execute(
        connection,
        sql.SQL(
            "select pg_catalog.pg_snapshot_xmin(pg_catalog.pg_current_snapshot()) = {horizon}::xid8"
            " and exists (select 1 from {table} where {order} >= {horizon}::xid8 {where})"
        ).format(
            table=source.table.identifier,
            order=_columns(source)[0],
            horizon=sql.Literal(horizon),
            where=_and(where),
        ),
        source,
        where,
    ).fetchone()
    return bool(row and row[0])


def due_since(
    connection: db.Connection,
    source: Source,
    where: LiteralString | None,
    position: AnyPosition | None,
    horizon: str,
    settle: timedelta,
) -> datetime | None:
    """Since when the first row after the position has been due, by a cursor."""
    order, key = _columns(source)
    row = _execute(
        connection,
        sql.SQL("select {} + {} {} order by {}, {} limit 1").format(
            sql.SQL(_AT[source.order_type]).format(order),
            sql.Literal(settle),
            _due(source, where, position, horizon),
            order,
            key,
        ),
        source,
        where,
    ).fetchone()
    return None if row is None else row[0]


def never_due(connection: db.Connection, source: Source, where: LiteralString | None) -> tuple[int, str]:
    """How many rows have an infinite cursor, and the key of one of them."""
    order, key = _columns(source)
    row = _execute(
        connection,
        sql.SQL("select pg_catalog.count(*), pg_catalog.min({}::text) from {} where {} in ({}, {}) {}").format(
            key,
            source.table.identifier,
            order,
            read_as(source, "infinity"),
            read_as(source, "-infinity"),
            _and(where),
        ),
        source,
        where,
    ).fetchone()
    return (row[0], row[1]) if row else (0, "")


def longest_writer(connection: db.Connection, source: Source) -> Writer | None:
    """Of the roles that may write into the table, the one whose transactions may last the longest, as the settings of
    the server, the database and the role say. None: nobody may write."""
    row = connection.execute(
        """
        with config as (
            select setdatabase as database, setrole as role, pg_catalog.split_part(each, '=', 2) as value
              from pg_catalog.pg_db_role_setting, pg_catalog.unnest(setconfig) as each
             where each like 'transaction_timeout=%%'
               and setdatabase in (0, (select oid from pg_catalog.pg_database
                                        where datname = pg_catalog.current_database()))
        ), writer as (
            select r.rolname, coalesce(
                       (select value from config where role = r.oid and database <> 0),
                       (select value from config where role = r.oid and database = 0),
                       (select value from config where role = 0 and database <> 0),
                       (select value from config where role = 0 and database = 0),
                       (select setting from pg_catalog.pg_settings
                         where name = 'transaction_timeout' and source not in ('user', 'database', 'database user')),
                       '0') as value
              from pg_catalog.pg_roles r
             where r.rolcanlogin and pg_catalog.has_table_privilege(r.oid, %s::oid, 'insert, update')
        )
        select rolname, extract(epoch from nullif(
                   case when value ~ '^[0-9]+$' then value || 'ms' else value end::interval, '0'))::float8 as lives
          from writer order by lives desc nulls first, rolname limit 1
        """,
        [source.table.oid],
    ).fetchone()
    return None if row is None else Writer(row[0], None if row[1] is None else timedelta(seconds=row[1]))


def _execute(
    connection: db.Connection | psycopg.Cursor[TupleRow],
    query: sql.Composed,
    source: Source,
    where: LiteralString | None,
) -> psycopg.Cursor[TupleRow]:
    try:
        return connection.execute(query)
    except (pg.ProgrammingError, pg.DataError, pg.NotSupportedError) as error:
        if where is None or isinstance(error, pg.InsufficientPrivilege):
            raise
        raise BadInputError(
            f"NewRows on {source.table}: where={where!r} cannot be used: {db.primary_message(error)}; mend it"
        ) from None


def _due(source: Source, where: LiteralString | None, position: AnyPosition | None, horizon: str) -> sql.Composed:
    order, _ = _columns(source)
    due = sql.SQL("from {} where {} < {}").format(source.table.identifier, order, read_as(source, horizon))
    if source.mode == "cursor":
        due += sql.SQL(" and {} > {}").format(order, read_as(source, "-infinity"))
    if position is not None:
        due += sql.SQL(" and {}").format(_compared(source, sql.SQL(">"), position))
    return due + sql.SQL(" {}").format(_and(where))


def _and(where: LiteralString | None) -> sql.Composable:
    return sql.SQL("") if where is None else sql.SQL("and (\n{}\n)").format(sql.SQL(where))


def _compared(source: Source, by: sql.SQL, position: AnyPosition) -> sql.Composed:
    order, key = _columns(source)
    at = position.xid if isinstance(position, RowPosition) else position.cursor
    return sql.SQL("({}, {}) {} ({}, {}::{})").format(
        order, key, by, read_as(source, at), sql.Literal(position.key), source.key_type
    )


def written(source: Source, value: sql.Composable) -> sql.Composed:
    """A value of the order as the text that a position holds."""
    return sql.SQL(_WRITTEN[source.order_type]).format(value)


def read_as(source: Source, value: str) -> sql.Composed:
    """The value that such a text stands for."""
    return sql.SQL(_READ[source.order_type]).format(sql.Literal(value))


def position_at(source: Source, at: str, key: str) -> AnyPosition:
    return CursorPosition(at, key) if source.mode == "cursor" else RowPosition(at, key)


def _names(source: Source) -> list[str]:
    return [name for name in source.table.columns if name != XID_COLUMN]


def _columns(source: Source) -> tuple[sql.Identifier, sql.Identifier]:
    """Qualified, since `order by id` would otherwise mean the text that is selected under that name."""
    table = source.table
    return sql.Identifier(table.schema, table.name, source.order), sql.Identifier(table.schema, table.name, source.key)
