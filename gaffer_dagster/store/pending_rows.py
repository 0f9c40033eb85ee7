"""Rows that carry their own state: claimed with FOR UPDATE SKIP LOCKED, and done in the transaction that claimed them.

A claim is a materialized CTE whose locking statement gives the columns: `update … where key in (select … limit …)` may
run its subquery again for each row and claim them all, and a join back to the table would read what a row was before
it was locked. Claims go up by key and never back within a run, which also passes the entries of done rows in the index
once at most, however long a snapshot elsewhere keeps them there.

Rows that failed have an entry in `gaffer.job_item`, and are claimed by it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import psycopg
from psycopg import sql
from psycopg.rows import class_row, tuple_row
from psycopg.types.json import Jsonb

from gaffer_dagster.domain.due import PendingRows, prepare_command
from gaffer_dagster.domain.item import Failed
from gaffer_dagster.domain.lease import Lease
from gaffer_dagster.domain.progress import BACKLOG_CEILING
from gaffer_dagster.errors import BadInputError
from gaffer_dagster.store import db, prepare, tables

_AT_ONCE = 1_000


@dataclass(frozen=True)
class Source:
    """A table as `PendingRows` reads it. `columns`: those that a claim brings, besides the key as text."""

    table: tables.Table
    key: sql.Identifier
    key_type: sql.SQL
    pending: sql.Composed
    done: sql.SQL
    columns: Sequence[str]


@dataclass(frozen=True)
class Row:
    """A claimed row. `key` is as Postgres writes it. `error`: it holds a value that Python cannot."""

    key: str
    values: dict[str, Any]
    error: str | None = None


@dataclass(frozen=True)
class Item:
    """A row that failed and is to be tried again. `error`: None where nothing was heard of its last attempt."""

    key: str
    attempts: int
    next_attempt_at: datetime
    failed_at: datetime
    sqlstate: str | None
    error: str | None


@dataclass(frozen=True)
class ItemRecord:
    """A row of `gaffer.job_item`, for people."""

    key: str
    attempts: int
    first_failed_at: datetime
    failed_at: datetime
    next_attempt_at: datetime
    parked_at: datetime | None
    dropped_at: datetime | None
    sqlstate: str | None
    error: str | None


def source(connection: db.Connection, due: PendingRows) -> Source:
    """Raises `BadInputError` or `NotPreparedError` for a table, key or condition that cannot serve."""
    table, key_type = prepare.checked(connection, due.table, due.key, partitions=True)
    found = Source(
        table,
        sql.Identifier(table.schema, table.name, due.key),
        key_type,
        sql.SQL("(\n{}\n)").format(sql.SQL(due.pending)),
        sql.SQL(due.done),
        list(table.columns),
    )
    try:
        # Planned, not run: what is wrong with either text is said before any row is claimed.
        connection.execute(sql.SQL("explain {}").format(mark_done(found, [])))
    except psycopg.Error as error:
        if db.worth_repeating(error) or db.was_cut(error):
            raise
        raise BadInputError(
            f"PendingRows on {table}: pending={due.pending!r} or done={due.done!r} cannot be used: "
            f"{db.primary_message(error)}; mend it"
        ) from None
    return found


def is_indexed(connection: db.Connection, due: PendingRows) -> bool:
    """The table has a partial index by key, by which a claim costs the same however many are done. Whether its
    condition follows from the job's is not told."""
    return prepare.is_indexed_partially(connection, due.table, due.key)


def cure(due: PendingRows) -> str:
    return prepare_command(due.table, due.key, "--pending", due.pending, "--apply")


def claim_new(connection: db.Connection, source: Source, job: str, after: str | None, limit: int) -> list[Row]:
    """Claims rows that have not failed so far, in the order of their keys."""
    behind = (
        sql.SQL("")
        if after is None
        else sql.SQL(" and {} > {}::{}").format(source.key, sql.Literal(after), source.key_type)
    )
    # A scalar subquery is looked up row by row, and only where there are failed rows at all; an anti-join may read all
    # of them for each row.
    return _claim(
        connection,
        source,
        sql.SQL(
            "{pending}{behind} and (not exists (select from gaffer.job_item where job = {job})"
            " or (select true from gaffer.job_item where job = {job} and key = {key}::text) is null)"
        ).format(pending=source.pending, behind=behind, job=sql.Literal(job), key=source.key),
        limit,
    )


def claim(connection: db.Connection, source: Source, keys: Sequence[str]) -> list[Row]:
    """Claims these rows, as far as they are pending and nobody else works on them."""
    return _claim(connection, source, _pending_of(source, keys), len(keys))


def claimed(source: Source, keys: Sequence[str]) -> db.Query:
    """The query for rows that were claimed."""
    return sql.SQL("select {} from {} where {} = any({}::{}[])").format(
        sql.SQL(", ").join(map(sql.Identifier, source.table.columns)),
        source.table.identifier,
        source.key,
        sql.Literal(list(keys)),
        source.key_type,
    )


def gone(connection: db.Connection, source: Source, keys: Sequence[str]) -> list[str]:
    """Of these rows, those that are not there, or not pending, any more."""
    return [
        key
        for (key,) in connection.execute(
            sql.SQL(
                "select wanted.gaffer_key from pg_catalog.unnest({}::text[]) as wanted (gaffer_key)"
                " where not exists (select from {} where {} = wanted.gaffer_key::{} and {})"
            ).format(sql.Literal(list(keys)), source.table.identifier, source.key, source.key_type, source.pending)
        )
    ]


def to_retry(connection: db.Connection, job: str, due_until: datetime, limit: int) -> list[Item]:
    """The rows that failed and are to be tried again, those that have waited longest first."""
    with connection.cursor(row_factory=class_row(Item)) as cursor:
        return cursor.execute(
            """
            select key, attempts, next_attempt_at, failed_at, sqlstate, error from gaffer.job_item
             where job = %s and parked_at is null and dropped_at is null and next_attempt_at <= %s
             order by next_attempt_at, key limit %s
            """,
            [job, due_until, limit],
        ).fetchall()


def given_up(connection: db.Connection, job: str) -> list[str]:
    """Rows that wait for somebody, at most a thousand: they may have been mended by hand."""
    found = connection.execute(
        "select key from gaffer.job_item where job = %s and (parked_at is not null or dropped_at is not null)"
        " order by key limit %s",
        [job, _AT_ONCE],
    )
    return [key for (key,) in found]


def again_at(connection: db.Connection, job: str) -> datetime | None:
    """When the next of the failed rows is to be tried again."""
    row = connection.execute(
        "select min(next_attempt_at) from gaffer.job_item where job = %s and parked_at is null and dropped_at is null",
        [job],
    ).fetchone()
    return None if row is None else row[0]


def backlog(connection: db.Connection, source: Source, job: str, due_until: datetime) -> int:
    """How many rows are pending and not to be left alone, counted up to `BACKLOG_CEILING`."""
    row = connection.execute(
        sql.SQL("select count(*) from (select 1 {} limit {}) as due").format(
            _due(source, job, due_until), sql.Literal(BACKLOG_CEILING)
        )
    ).fetchone()
    return row[0] if row else 0


def locked_elsewhere(connection: db.Connection, source: Source, job: str, due_until: datetime) -> int:
    """How many due rows a transaction that is no slot's of this job has locked, so that no claim saw them. 0 where
    another slot is at work: they may be its own. Counted up to a thousand; locks those that are free."""
    row = connection.execute(
        sql.SQL(
            "with due as materialized (select {key} as key {due} limit {most}),"
            " free as materialized (select {key} as key from {table} where {key} in (select key from due)"
            " for update skip locked)"
            " select count(*) from due where key not in (select key from free) and not exists (select"
            " from gaffer.job_lease where job = {job} and lease_id is not null and lease_until > gaffer.clock()"
            " having count(*) > 1)"
        ).format(
            key=source.key,
            due=_due(source, job, due_until),
            most=sql.Literal(_AT_ONCE),
            table=source.table.identifier,
            job=sql.Literal(job),
        )
    ).fetchone()
    return row[0] if row else 0


def charge(connection: db.Connection, lease: Lease, key: str, backoff: timedelta) -> None:
    """Commits an attempt at a row before it is worked on."""
    _charge_item(connection, lease, key, backoff, None, None)


def take_back(connection: db.Connection, lease: Lease, key: str, before: Item | None) -> None:
    """That attempt is none of the row's: it is as it was `before`. Does nothing where that was not committed."""
    entry: dict[str, Any] = {}
    if before is not None:
        entry = {
            "attempts": before.attempts,
            "next_attempt_at": before.next_attempt_at.isoformat(),
            "failed_at": before.failed_at.isoformat(),
            "sqlstate": before.sqlstate,
            "error": before.error,
        }
    _charge_item(connection, lease, key, timedelta(), before, entry)


def let_count(connection: db.Connection, lease: Lease, key: str, before: Item | None, failed: Failed) -> None:
    """That attempt is the row's, and this is how it went."""
    _charge_item(connection, lease, key, timedelta(), before, {"sqlstate": failed.sqlstate, "error": failed.error})


def _charge_item(
    connection: db.Connection,
    lease: Lease,
    key: str,
    backoff: timedelta,
    before: Item | None,
    entry: Mapping[str, Any] | None,
) -> None:
    charged = 1 if before is None else before.attempts + 1
    with connection.cursor(row_factory=tuple_row) as cursor, db.refusals():
        cursor.execute(
            db.BEGIN + "set local statement_timeout = '10s';"
            " select gaffer.charge_item(%s, %s, %s, %s, %s, %s, %s, %s); commit",
            [
                lease.job,
                lease.slot,
                lease.fence,
                lease.lease_id,
                key,
                backoff,
                charged,
                None if entry is None else Jsonb(entry),
            ],
        )
        db.committed(cursor)


def mark_done(source: Source, keys: Sequence[str]) -> sql.Composed:
    """The rows with these keys are done, as far as their own work has not said otherwise already."""
    return sql.SQL("update {} set {}\n where {}").format(
        source.table.identifier, source.done, _pending_of(source, keys)
    )


def still_pending(source: Source, keys: Sequence[str]) -> sql.Composed:
    """How many of these rows are pending, for a statement after `mark_done`: a trigger may have kept it from a row, or
    undone it."""
    return sql.SQL("(select pg_catalog.count(*) from {} where {})").format(
        source.table.identifier, _pending_of(source, keys)
    )


def items(connection: db.Connection, job: str, *, everything: bool, limit: int) -> list[ItemRecord]:
    """The rows that were parked; with `everything` also those that are to be tried again, or were dropped."""
    with connection.cursor(row_factory=class_row(ItemRecord)) as cursor:
        return cursor.execute(
            """
            select key, attempts, first_failed_at, failed_at, next_attempt_at, parked_at, dropped_at, sqlstate, error
              from gaffer.job_item
             where job = %s and (%s or (parked_at is not null and dropped_at is null))
             order by failed_at desc, key limit %s
            """,
            [job, everything, limit],
        ).fetchall()


def _due(source: Source, job: str, due_until: datetime) -> sql.Composed:
    return sql.SQL(
        "from {} where {} and not exists (select from gaffer.job_item where job = {} and key = {}::text"
        " and (parked_at is not null or dropped_at is not null or next_attempt_at > {}))"
    ).format(source.table.identifier, source.pending, sql.Literal(job), source.key, sql.Literal(due_until))


def _pending_of(source: Source, keys: Sequence[str]) -> sql.Composed:
    return sql.SQL("{} = any({}::{}[]) and {}").format(
        source.key, sql.Literal(list(keys)), source.key_type, source.pending
    )


def _claim(connection: db.Connection, source: Source, wanted: sql.Composed, limit: int) -> list[Row]:
    query = sql.SQL(
        "with due as materialized (select {} from {} where {} order by {} limit {} for update of {} skip locked)"
        " select * from due"
    ).format(
        sql.SQL(", ").join(
            [*map(sql.Identifier, source.columns), sql.SQL("{}::text as gaffer_key").format(source.key)]
        ),
        source.table.identifier,
        wanted,
        source.key,
        sql.Literal(limit),
        sql.Identifier(source.table.name),
    )
    rows: list[Row] = []
    with connection.cursor(row_factory=tuple_row) as cursor:
        cursor.execute(query)
        for number in range(cursor.rowcount):
            cursor.scroll(number, mode="absolute")  # a row that cannot be read is not passed by reading it
            try:
                values = cursor.fetchone()
            except Exception as error:  # whatever a type's loader raises: nothing is sent here
                found = cursor.pgresult.get_value(number, len(source.columns)) if cursor.pgresult else None
                rows.append(Row((found or b"").decode(), {}, f"it holds a value that Python cannot: {error}"))
            else:
                assert values is not None  # noqa: S101 — rowcount says so
                rows.append(Row(values[-1], dict(zip(source.columns, values, strict=False))))
    return rows
