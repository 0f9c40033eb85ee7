"""`gaffer.job_watermark`, as people set it."""

from __future__ import annotations

from psycopg import sql
from psycopg.types.json import Jsonb

from gaffer_dagster.domain.watermark import Position, RowPosition
from gaffer_dagster.errors import BadInputError
from gaffer_dagster.store import db, new_rows
from gaffer_dagster.store.operations import Operator
from gaffer_dagster.store.prepare import XID_COLUMN, Source


def set_position(
    connection: db.Connection,
    job: str,
    since: Position | None,
    to: Position | None,
    cluster: str | None,
    operator: Operator,
) -> None:
    """Moves the watermark from `since` to `to`.

    Raises `JobHeldError` while a run is at work, and `LeaseLostError` where it is not at `since` any more.
    """
    with db.refusals():
        connection.execute(
            "select gaffer.set_watermark(%s, %s, %s, %s, %s, %s)",
            [
                job,
                None if since is None else Jsonb(since),
                None if to is None else Jsonb(to),
                cluster,
                operator.by,
                operator.reason,
            ],
        )


def after_row(connection: db.Connection, source: Source, key: str) -> RowPosition:
    """Behind the row with this key. Raises `BadInputError` where there is none, or rows may still come before it."""
    rows = _positions(
        connection,
        source,
        sql.SQL("where {} = {}::{}").format(sql.Identifier(source.key), sql.Literal(key), source.key_type),
    )
    if not rows:
        raise BadInputError(f"{source.table} has no row with {source.key} = {key}; give the key of one that is there")
    [(position, is_settled)] = rows
    if not is_settled:
        raise BadInputError(
            f"the row of {source.table} with {source.key} = {key} is too new: a transaction that is still open may "
            "commit rows before it; wait until that is over, or give an older row"
        )
    return position


def last_row(connection: db.Connection, source: Source) -> RowPosition | None:
    """Behind every row that is due by now. None: there is none."""
    newest = sql.SQL("where {xid} < {horizon} order by t.{xid} desc, t.{key} desc limit 1").format(
        xid=sql.Identifier(XID_COLUMN), key=sql.Identifier(source.key), horizon=_HORIZON
    )
    rows = _positions(connection, source, newest)
    return rows[0][0] if rows else None


def _positions(connection: db.Connection, source: Source, which: sql.Composed) -> list[tuple[RowPosition, bool]]:
    """With each whether nobody can commit a row before it any more."""
    found = connection.execute(
        sql.SQL("select {xid}::text, {key}::text, {xid} < {horizon} from {table} t {which}").format(
            xid=sql.Identifier(XID_COLUMN),
            key=sql.Identifier(source.key),
            horizon=_HORIZON,
            table=source.table.identifier,
            which=which,
        )
    )
    return [(RowPosition(xid, key), is_settled) for xid, key, is_settled in found]


def rows_after(connection: db.Connection, source: Source, where: str | None, position: RowPosition | None) -> int:
    """How many rows are due behind a position, counted up to `new_rows.BACKLOG_CEILING`."""
    horizon = connection.execute(
        "select pg_catalog.pg_snapshot_xmin(pg_catalog.pg_current_snapshot())::text"
    ).fetchone()
    assert horizon is not None  # noqa: S101 — one row by construction
    return new_rows.backlog(connection, source, where, position, horizon[0])  # pyright: ignore[reportArgumentType] — the job's own text


_HORIZON = sql.SQL("pg_catalog.pg_snapshot_xmin(pg_catalog.pg_current_snapshot())")
