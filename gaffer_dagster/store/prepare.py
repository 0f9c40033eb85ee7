"""What a table needs so that `NewRows` can read it: in commit order without losing a row, or by a cursor of its own.

For commit order, a column of type `xid8` that says which transaction wrote the row, kept by a trigger that nothing
skips, and an index to read in that order. Adding the column to a filled table rewrites nothing: all rows that are there
get one number.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from psycopg import errors as pg
from psycopg import sql

from gaffer_dagster.domain.due import prepare_command
from gaffer_dagster.errors import BadInputError, NotPreparedError
from gaffer_dagster.store import db, tables

XID_COLUMN = "gaffer_xid"
_TRIGGER = "gaffer_stamp_xid"
# Keys that Postgres writes as text and reads back as the same value whatever the session's settings are.
_KEY_TYPES = ("smallint", "integer", "bigint", "uuid", "text", "numeric", "character varying")


# What a cursor can be: times, which a lag can be kept behind.
CURSOR_TYPES = ("timestamp with time zone", "date")


@dataclass(frozen=True)
class Source:
    """A table that can be read, as `NewRows` reads it: by `order`, a column of type `order_type`, then by `key`.
    `mode`: `new` rows, new and `changed` ones, or those that a `cursor` comes to."""

    table: tables.Table
    key: str
    key_type: sql.SQL
    mode: str
    order: str = XID_COLUMN
    order_type: str = "xid8"

    @property
    def of(self) -> str:
        """What a position counts in: the same numbers would skip rows of another table, or order, in silence."""
        by = "" if self.order == XID_COLUMN else f"{self.order}, "
        return f"{self.table}({by}{self.key})"


@dataclass(frozen=True)
class _Index:
    """The index on two columns. `broken`: the name of one whose building failed, where there is no other."""

    is_there: bool
    broken: str | None


@dataclass(frozen=True)
class _State:
    column: bool
    trigger: str | None
    keys: list[str]
    index: _Index
    foreign: bool
    """Rows have numbers that this cluster has not given yet: they were restored, or copied with their column."""


def source(connection: db.Connection, table_name: str, key: str) -> Source:
    """Raises `NotPreparedError`, or `BadInputError` for a table or key that cannot serve."""
    table, key_type = checked(connection, table_name, key)
    state = _state(connection, table, key)
    missing = [
        what
        for what, there in (
            (f"the column {XID_COLUMN}", state.column),
            ("the trigger that keeps it", state.trigger is not None and key in state.keys),
            (f"an index on ({XID_COLUMN}, {key})", state.index.is_there),
            (
                f"in {XID_COLUMN} numbers of this cluster (rows were restored or copied; if the database was, first "
                "of all: gaffer watermark adopt --dry-run)",
                not state.foreign,
            ),
        )
        if not there
    ]
    if missing:
        raise NotPreparedError(
            f"table {table} lacks {', '.join(missing)}; run: {prepare_command(table_name, key, '--apply')}"
        )
    return Source(table, key, key_type, state.trigger or "new")


def cursor_source(connection: db.Connection, table_name: str, key: str, cursor: str) -> Source:
    """Raises `NotPreparedError`, or `BadInputError`, for a table, key or cursor that cannot serve."""
    table, key_type = checked(connection, table_name, key)
    column = table.column(cursor)
    name, quoted = (each.as_string(connection) for each in (table.identifier, sql.Identifier(cursor)))
    if column.base == "timestamp without time zone":
        raise NotPreparedError(
            f"cursor {cursor!r} of table {table} is a timestamp without time zone: which time it means depends on who "
            f"wrote it. Make it one that says so: alter table {name} alter column {quoted} type timestamptz "
            f"using {quoted} at time zone 'UTC' (or the zone that it was written in)"
        )
    if column.base not in CURSOR_TYPES:
        raise NotPreparedError(
            f"cursor {cursor!r} of table {table} is of type {column.type}, which no lag in time can be kept behind; "
            f"use a column of type timestamptz or date, or leave cursor= out and run: "
            + prepare_command(table_name, key, "--apply")
        )
    if not column.not_null:
        raise NotPreparedError(
            f"cursor {cursor!r} of table {table} may be null, and rows without it would never be due; fill it, and "
            f"run: alter table {name} alter column {quoted} set not null"
        )
    return Source(table, key, key_type, "cursor", cursor, column.base)


def cursor_statements(connection: db.Connection, table_name: str, key: str, cursor: str) -> list[str]:
    """The SQL that the table still lacks so that a page by `cursor` is one range of an index."""
    source = cursor_source(connection, table_name, key, cursor)
    _check_owner(source.table)
    todo = _index_statements(source.table, cursor, key, _index(connection, source.table, cursor, key))
    return [statement.as_string(connection) for statement in todo]


def is_indexed(connection: db.Connection, source: Source) -> bool:
    """There is an index to read it by."""
    return _index(connection, source.table, source.order, source.key).is_there


def foreign_jobs(connection: db.Connection, table: tables.Table) -> list[str]:
    """The jobs whose watermark is in this table, and was counted by another cluster."""
    found = connection.execute(
        """
        select job from gaffer.job_watermark
         where position ? 'xid' and cluster is distinct from gaffer.cluster()
           and pg_catalog.starts_with(position ->> 'of', %s)
         order by job
        """,
        [f"{table}("],
    )
    return [job for (job,) in found]


def statements(connection: db.Connection, table_name: str, key: str, *, changed: bool | None) -> list[str]:
    """The SQL that the table still lacks, in order. `changed`: also rows that are updated; None: as it is now.

    Raises `NotPreparedError`, or `BadInputError`, for a table or key that cannot serve.
    """
    table, _ = checked(connection, table_name, key)
    _check_owner(table)
    state = _state(connection, table, key)
    mode = "changed" if changed else "new" if changed is False else state.trigger or "new"
    name, column, trigger = table.identifier, sql.Identifier(XID_COLUMN), sql.Identifier(_TRIGGER)
    todo: list[sql.Composable] = []
    if not state.column:
        todo.append(
            sql.SQL("alter table {} add column {} xid8 not null default pg_catalog.pg_current_xact_id()").format(
                name, column
            )
            if XID_COLUMN not in table.columns
            else sql.SQL("alter table {} alter column {} set not null").format(name, column)
        )
    keys = sorted({*state.keys, key})
    if state.trigger != mode or key not in state.keys:
        watched = sql.SQL(", ").join(map(sql.Identifier, [XID_COLUMN, *keys]))
        events = sql.SQL("insert or update") if mode == "changed" else sql.SQL("insert or update of {}").format(watched)
        arguments = sql.SQL(", ").join(map(sql.Literal, [mode, *keys]))
        todo += [
            sql.SQL("drop trigger if exists {} on {}").format(trigger, name),
            sql.SQL("create trigger {} before {} on {} for each row execute function gaffer.stamp_xid({})").format(
                trigger, events, name, arguments
            ),
            sql.SQL("alter table {} enable always trigger {}").format(name, trigger),
        ]
    if state.foreign:
        foreign = foreign_jobs(connection, table)
        if foreign:
            raise NotPreparedError(
                f"table {table} was restored with the watermarks of {', '.join(foreign)}, which count in the numbers "
                "that its rows have now; with other ones it would be lost which rows are done. Run: gaffer watermark "
                "adopt --dry-run"
            )
        # Else they would be due when the cluster has counted that far. The trigger would leave them as they are.
        todo += [
            sql.SQL("alter table {} disable trigger {}").format(name, trigger),
            sql.SQL(
                "update {} set {column} = pg_catalog.pg_current_xact_id()"
                " where {column} >= pg_catalog.pg_snapshot_xmax(pg_catalog.pg_current_snapshot())"
            ).format(name, column=column),
            sql.SQL("alter table {} enable always trigger {}").format(name, trigger),
        ]
    todo += _index_statements(table, XID_COLUMN, key, state.index)
    return [statement.as_string(connection) for statement in todo]


def pending_statements(connection: db.Connection, table_name: str, key: str, pending: str) -> list[str]:
    """The SQL that the table still lacks so that what `PendingRows` claims costs the same however many rows are done:
    an index of the pending ones only."""
    table, _ = checked(connection, table_name, key, partitions=True)
    _check_owner(table)
    digest = hashlib.sha256(f"{key}\0{pending}".encode()).hexdigest()[:8]
    index = f"gaffer_pending_{table.oid}_{digest}"
    found = connection.execute(
        """
        select i.indisvalid from pg_catalog.pg_index i join pg_catalog.pg_class c on c.oid = i.indexrelid
         where i.indrelid = %s and c.relname = %s
        """,
        [table.oid, index],
    ).fetchone()
    todo: list[sql.Composable] = []
    if found is None or not found[0]:
        _check_predicate(connection, table, key, pending)
    if found is not None and not found[0]:
        todo.append(sql.SQL("drop index concurrently {}").format(sql.Identifier(table.schema, index)))
    if found is None or not found[0]:
        # The server builds no index of a whole partitioned table beside those who write it.
        todo.append(
            sql.SQL("create index {}{} on {} ({}) where {}").format(
                sql.SQL("" if _is_partitioned(connection, table) else "concurrently "),
                sql.Identifier(index),
                table.identifier,
                sql.Identifier(key),
                sql.SQL(pending),  # pyright: ignore[reportArgumentType] — the job's own text
            )
        )
    return [statement.as_string(connection) for statement in todo]


def _check_owner(table: tables.Table) -> None:
    if table.schema in ("gaffer", "information_schema") or table.schema.startswith("pg_"):
        raise BadInputError(
            f"table {table} is none of yours, and cannot be prepared: whoever made it relies on its columns and "
            "triggers; name a table of your own"
        )


def _check_predicate(connection: db.Connection, table: tables.Table, key: str, pending: str) -> None:
    """Raises `BadInputError` where no index can have this condition: told of an empty table that looks like this one,
    so that nobody waits for it."""
    name = sql.Identifier("pg_temp", table.name)
    try:
        with connection.transaction(force_rollback=True):
            connection.execute(sql.SQL("create temporary table {} (like {})").format(name, table.identifier))
            connection.execute(
                sql.SQL("create index on {} ({}) where {}").format(
                    name,
                    sql.Identifier(key),
                    sql.SQL(pending),  # pyright: ignore[reportArgumentType] — the job's own text
                )
            )
    except (pg.InvalidObjectDefinition, pg.FeatureNotSupported) as error:
        rest = prepare_command(table.identifier.as_string(connection), key, "--pending")
        raise BadInputError(
            f"pending={pending!r} cannot be the condition of an index ({db.primary_message(error)}), and works without "
            "one. Leave out the parts of it that depend on the time or on other rows; an index on the rest serves, "
            f"such as: {rest} 'done_at is null'"
        ) from None
    except pg.InsufficientPrivilege:  # it may make no temporary table; CREATE INDEX will tell
        return
    except (pg.SyntaxError, pg.UndefinedColumn, pg.UndefinedFunction, pg.DatatypeMismatch) as error:
        raise BadInputError(f"pending={pending!r} cannot be used: {db.primary_message(error)}; mend it") from None


def is_indexed_partially(connection: db.Connection, table_name: str, key: str) -> bool:
    """There is a partial index by the key, whatever its condition."""
    row = connection.execute(
        """
        select exists (select from pg_catalog.pg_index i
                        where i.indrelid = %s and i.indisvalid and i.indpred is not null
                          and i.indkey[0] = (select attnum from pg_catalog.pg_attribute
                                              where attrelid = i.indrelid and attname = %s))
        """,
        [tables.find(connection, table_name).oid, key],
    ).fetchone()
    return bool(row and row[0])


def apply(connection: db.Connection, todo: list[str]) -> None:
    """Runs `statements`: column and trigger in one transaction that waits for no lock for long, and the index without
    blocking writers, however long it waits for those who read or write the table now."""
    indexes = [text for text in todo if " index concurrently " in text]
    with db.impatient_of_locks(connection):
        for text in todo:
            if text not in indexes:
                connection.execute(sql.SQL(text))  # pyright: ignore[reportArgumentType] — composed by `statements`
    for text in indexes:
        connection.execute(sql.SQL(text))  # pyright: ignore[reportArgumentType]


def checked(
    connection: db.Connection, table_name: str, key: str, *, partitions: bool = False
) -> tuple[tables.Table, sql.SQL]:
    """The table, and its key's type. `partitions`: it may have some, or be one. Raises `NotPreparedError`, or
    `BadInputError`, where it cannot serve."""
    table = tables.find(connection, table_name)
    column = table.column(key)
    type_name = column.type.split("(")[0]
    if type_name not in _KEY_TYPES:
        raise NotPreparedError(
            f"key {key!r} of table {table} is of type {column.type}; use one of {', '.join(_KEY_TYPES)}"
        )
    parent = connection.execute(
        """
        select relkind = 'p' or relispartition,
               relkind <> 'p' and exists (select 1 from pg_catalog.pg_inherits where inhparent = c.oid)
          from pg_catalog.pg_class c where oid = %s
        """,
        [table.oid],
    ).fetchone()
    if parent and partitions and parent[1]:
        raise NotPreparedError(
            f"table {table} has children that inherit from it: no key is unique among them all, so that a row could be "
            "marked done for another; make them partitions, or name one of them"
        )
    if parent and not partitions and any(parent):
        raise NotPreparedError(
            f"table {table} has partitions or children, or is a partition: rows that come in by ATTACH PARTITION or "
            "through a child would be lost in silence; copy them into one table first"
        )
    unique = connection.execute(
        """
        select exists (select 1 from pg_catalog.pg_index i
                        where i.indrelid = %s and i.indisunique and i.indisvalid and i.indpred is null
                          and i.indnkeyatts = 1
                          and i.indkey[0] = (select attnum from pg_catalog.pg_attribute
                                              where attrelid = i.indrelid and attname = %s))
        """,
        [table.oid, key],
    ).fetchone()
    if not (unique and unique[0]) or not column.not_null:
        raise NotPreparedError(
            f"key {key!r} of table {table} must be unique and never null, or rows would be lost between two batches; "
            f"use its primary key, or add: unique ({key}), not null"
        )
    return table, sql.SQL(next(name for name in _KEY_TYPES if name == type_name))


def _state(connection: db.Connection, table: tables.Table, key: str) -> _State:
    column = table.columns.get(XID_COLUMN)
    if column is not None and column.type != "xid8":
        raise NotPreparedError(f"column {XID_COLUMN} of table {table} is {column.type}, not xid8; drop or rename it")
    trigger = connection.execute(
        """
        select t.tgargs
          from pg_catalog.pg_trigger t
          join pg_catalog.pg_proc p on p.oid = t.tgfoid
          join pg_catalog.pg_namespace n on n.oid = p.pronamespace
         where t.tgrelid = %s and t.tgname = %s and t.tgenabled = 'A'
           and n.nspname = 'gaffer' and p.proname = 'stamp_xid'
        """,
        [table.oid, _TRIGGER],
    ).fetchone()
    # Each argument ends with a zero byte.
    arguments = [] if trigger is None else [part.decode() for part in bytes(trigger[0]).split(b"\0")[:-1]]
    return _State(
        column=column is not None and column.not_null,
        trigger=arguments[0] if arguments else None,
        keys=[name for name in arguments[1:] if name in table.columns],
        index=_index(connection, table, XID_COLUMN, key),
        foreign=column is not None and _is_foreign(connection, table),
    )


def _is_partitioned(connection: db.Connection, table: tables.Table) -> bool:
    row = connection.execute("select relkind = 'p' from pg_catalog.pg_class where oid = %s", [table.oid]).fetchone()
    return bool(row and row[0])


def _is_foreign(connection: db.Connection, table: tables.Table) -> bool:
    row = connection.execute(
        sql.SQL(
            "select exists (select from {} where {} >= pg_catalog.pg_snapshot_xmax(pg_catalog.pg_current_snapshot()))"
        ).format(table.identifier, sql.Identifier(XID_COLUMN))
    ).fetchone()
    return bool(row and row[0])


def _index(connection: db.Connection, table: tables.Table, order: str, key: str) -> _Index:
    index = connection.execute(
        """
        select i.indisvalid, c.relname
          from pg_catalog.pg_index i join pg_catalog.pg_class c on c.oid = i.indexrelid
         where i.indrelid = %s and i.indpred is null and i.indnkeyatts >= 2
           and (select attname from pg_catalog.pg_attribute where attrelid = i.indrelid and attnum = i.indkey[0]) = %s
           and (select attname from pg_catalog.pg_attribute where attrelid = i.indrelid and attnum = i.indkey[1]) = %s
         order by i.indisvalid desc
        """,
        [table.oid, order, key],
    ).fetchone()
    return _Index(index is not None and index[0], index[1] if index is not None and not index[0] else None)


def _index_statements(table: tables.Table, order: str, key: str, state: _Index) -> list[sql.Composable]:
    todo: list[sql.Composable] = []
    if state.broken is not None:
        todo.append(sql.SQL("drop index concurrently {}").format(sql.Identifier(table.schema, state.broken)))
    if not state.is_there:
        todo.append(
            # Postgres names it: a name of ours could be taken, by another table's or for another key of this one.
            sql.SQL("create index concurrently on {} ({}, {})").format(
                table.identifier, sql.Identifier(order), sql.Identifier(key)
            )
        )
    return todo
