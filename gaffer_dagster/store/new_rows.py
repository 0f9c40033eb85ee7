"""Rows in commit order: read by (number of the writing transaction, key), never past what may still commit behind.

The number alone loses ties, the key alone loses rows whose writer took the key early and committed late. A row is due
once its writer's number is below the *horizon*, the oldest transaction that is still open anywhere in the cluster.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql
from psycopg.rows import tuple_row
from typing_extensions import LiteralString

from gaffer_dagster.domain.watermark import RowPosition
from gaffer_dagster.errors import BadInputError, ForeignWatermarkError
from gaffer_dagster.store import db
from gaffer_dagster.store.prepare import XID_COLUMN, Source

# Counting further would cost more than the number is worth; then it means "at least".
BACKLOG_CEILING = 1_000_000


@dataclass(frozen=True)
class Rows:
    rows: list[dict[str, Any]]
    position: RowPosition


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
            f"silence; decide where to go on, then: gaffer watermark set {job} beginning, end or after:KEY"
        )
    return row[0], row[1]


def page(
    connection: db.Connection,
    source: Source,
    where: LiteralString | None,
    position: RowPosition | None,
    horizon: str,
    limit: int,
) -> Rows | None:
    """The next rows below the horizon, at most `limit`; None: there is none. Values are loaded as psycopg does."""
    names = [name for name in source.table.columns if name != XID_COLUMN]
    xid, key = _columns(source)
    query = sql.SQL("select {}, {xid}::text, {key}::text {} order by {xid}, {key} limit {}").format(
        sql.SQL(", ").join(map(sql.Identifier, names)),
        _due(source, where, position, horizon),
        sql.Literal(limit),
        xid=xid,
        key=key,
    )
    rows: list[dict[str, Any]] = []
    last: tuple[Any, ...] = ()
    with connection.cursor(row_factory=tuple_row) as cursor:
        cursor.execute(query)
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
    return Rows(rows, RowPosition(last[-2], last[-1])) if rows else None


def backlog(
    connection: db.Connection,
    source: Source,
    where: LiteralString | None,
    position: RowPosition | None,
    horizon: str,
) -> int:
    """How many rows are due and left, counted up to `BACKLOG_CEILING`."""
    row = connection.execute(
        sql.SQL("select count(*) from (select 1 {} limit {}) as due").format(
            _due(source, where, position, horizon), sql.Literal(BACKLOG_CEILING)
        )
    ).fetchone()
    return row[0] if row else 0


def is_held_back(connection: db.Connection, source: Source, horizon: str) -> bool:
    """There are rows that are not due yet, since somebody may still commit before them."""
    row = connection.execute(
        sql.SQL("select exists (select 1 from {} where {} >= {}::xid8)").format(
            source.table.identifier, _columns(source)[0], sql.Literal(horizon)
        )
    ).fetchone()
    return bool(row and row[0])


def _due(source: Source, where: LiteralString | None, position: RowPosition | None, horizon: str) -> sql.Composed:
    xid, key = _columns(source)
    due = sql.SQL("from {} where {} < {}::xid8").format(source.table.identifier, xid, sql.Literal(horizon))
    if position is not None:
        due += sql.SQL(" and ({}, {}) > ({}::xid8, {}::{})").format(
            xid, key, sql.Literal(position.xid), sql.Literal(position.key), source.key_type
        )
    return due if where is None else due + sql.SQL(" and (\n{}\n)").format(sql.SQL(where))


def _columns(source: Source) -> tuple[sql.Identifier, sql.Identifier]:
    """Qualified, since `order by id` would otherwise mean the text that is selected under that name."""
    table = source.table
    return sql.Identifier(table.schema, table.name, XID_COLUMN), sql.Identifier(table.schema, table.name, source.key)
