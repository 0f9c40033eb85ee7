"""`gaffer.job_watermark`, as people set it."""

from __future__ import annotations

import psycopg
from psycopg import sql
from psycopg.types.json import Jsonb

from gaffer_dagster.domain.watermark import Position
from gaffer_dagster.errors import BadInputError
from gaffer_dagster.store import db, new_rows
from gaffer_dagster.store.operations import Operator
from gaffer_dagster.store.prepare import Source


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


def is_foreign(connection: db.Connection, job: str) -> bool:
    """Another cluster counted it."""
    row = connection.execute(
        """
        select position ? 'xid' and cluster is distinct from gaffer.cluster() from gaffer.job_watermark where job = %s
        """,
        [job],
    ).fetchone()
    return bool(row and row[0])


def after_row(connection: db.Connection, source: Source, horizon: str, key: str) -> new_rows.AnyPosition:
    """Behind the row with this key. Raises `BadInputError` where there is none, or rows may still come before it."""
    try:
        rows = _positions(
            connection,
            source,
            horizon,
            sql.SQL("where {} = {}::{}").format(sql.Identifier(source.key), sql.Literal(key), source.key_type),
        )
    except psycopg.DataError as error:
        raise BadInputError(
            f"position 'after:{key}' names no {source.key} of {source.table}: {db.primary_message(error)}; give the "
            "key of a row, such as it is in the table"
        ) from None
    if not rows:
        raise BadInputError(f"{source.table} has no row with {source.key} = {key}; give the key of one that is there")
    [(position, is_settled)] = rows
    if not is_settled:
        raise BadInputError(
            f"the row of {source.table} with {source.key} = {key} is too new: rows may still be "
            "committed before it; wait until it is due, or give an older row"
        )
    return position


def last_row(connection: db.Connection, source: Source, horizon: str) -> new_rows.AnyPosition | None:
    """Behind every row that is due by now. None: there is none."""
    newest = sql.SQL("where {order} < {horizon} {finite} order by t.{order} desc, t.{key} desc limit 1").format(
        order=sql.Identifier(source.order),
        key=sql.Identifier(source.key),
        horizon=new_rows.read_as(source, horizon),
        finite=sql.SQL("")
        if source.mode != "cursor"
        else sql.SQL("and {} > {}").format(sql.Identifier(source.order), new_rows.read_as(source, "-infinity")),
    )
    rows = _positions(connection, source, horizon, newest)
    return rows[0][0] if rows else None


def _positions(
    connection: db.Connection, source: Source, horizon: str, which: sql.Composed
) -> list[tuple[new_rows.AnyPosition, bool]]:
    """With each whether nobody can commit a row before it any more."""
    found = connection.execute(
        sql.SQL("select {written}, {key}::text, {order} < {horizon} from {table} t {which}").format(
            written=new_rows.written(source, sql.Identifier(source.order)),
            order=sql.Identifier(source.order),
            key=sql.Identifier(source.key),
            horizon=new_rows.read_as(source, horizon),
            table=source.table.identifier,
            which=which,
        )
    )
    return [(new_rows.position_at(source, at, key), is_settled) for at, key, is_settled in found]
