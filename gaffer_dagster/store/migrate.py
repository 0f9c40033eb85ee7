"""Numbered `.sql` files in `migrations/`, each applied once, all pending ones in one transaction.

A run only *verifies*; `gaffer migrate` (and the private Postgres for development) migrates. The lock is
transaction-scoped, so that a migration that is killed leaves nothing behind.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from datetime import datetime
from importlib import resources

from psycopg import errors as pg
from psycopg import sql
from psycopg.rows import class_row

from gaffer_dagster.domain.amount import few
from gaffer_dagster.errors import (
    BadInputError,
    DatabaseUnavailableError,
    MigrationEditedError,
    MissingRightsError,
    SchemaAheadError,
    SchemaBehindError,
)
from gaffer_dagster.store import db, operations
from gaffer_dagster.store.operations import Operator

_LOCK = 0x6761666665720001  # "gaffer", 1


@dataclass(frozen=True)
class Migration:
    number: int
    name: str
    checksum: str
    text: str


@dataclass(frozen=True)
class _Applied:
    number: int
    name: str
    checksum: str


def migrations() -> list[Migration]:
    """Every migration that this package carries, in order."""
    found: list[Migration] = []
    for entry in sorted(
        resources.files("gaffer_dagster.store").joinpath("migrations").iterdir(), key=lambda entry: entry.name
    ):
        if entry.name.endswith(".sql"):
            text = entry.read_text(encoding="utf-8")
            number, _, name = entry.name.removesuffix(".sql").partition("_")
            found.append(Migration(int(number), name, hashlib.sha256(text.encode()).hexdigest(), text))
    return found


def verify(connection: db.Connection) -> datetime:
    """Checks that the tables are what this package needs; returns the database's time.

    Raises `SchemaBehindError`, `SchemaAheadError`, `MigrationEditedError` or `BadInputError` (the schema is somebody
    else's, or hides rows), each with its cure.
    """
    known = migrations()
    newest = known[-1].number
    try:
        row = connection.execute(
            """
            select (select max(number) from gaffer.migration), gaffer.clock(),
                   (select count(*) from gaffer.migration), array(
                       select m.number from gaffer.migration m
                         join rows from (pg_catalog.unnest(%s::integer[]), pg_catalog.unnest(%s::text[]))
                              as known (number, checksum) using (number)
                        where m.checksum <> known.checksum order by m.number),
                   (select pg_catalog.string_agg(
                               pg_catalog.format('alter table gaffer.%%I disable row level security;', relname),
                               e'\\n' order by relname)
                      from pg_catalog.pg_class
                     where relnamespace = 'gaffer'::pg_catalog.regnamespace::oid and relrowsecurity)
            """,
            [[each.number for each in known], [each.checksum for each in known]],
        ).fetchone()
    except (pg.UndefinedTable, pg.InvalidSchemaName, pg.UndefinedFunction):
        row = None
    except pg.UndefinedColumn:
        raise _another_schema() from None
    except NotImplementedError:  # the driver reads times in ISO form only
        raise BadInputError(
            f'the DateStyle of the role "{connection.info.user}", or of the database, is not ISO, and times cannot be '
            f"read; run: alter role \"{connection.info.user}\" set datestyle to 'ISO'"
        ) from None
    except pg.InsufficientPrivilege:
        raise MissingRightsError(
            f'the role "{connection.info.user}" may not use the schema gaffer; make it a member of gaffer_runner (to '
            "work), gaffer_operator (what people do) or gaffer_reader (to look); `gaffer migrate --roles` makes them"
        ) from None
    if row is None or row[0] is None:
        raise SchemaBehindError("the database has no tables of gaffer_dagster yet; run: gaffer migrate")
    if row[0] < newest:
        raise SchemaBehindError(
            f"the tables of gaffer_dagster are at migration {row[0]}, this package needs {newest}; run: gaffer migrate"
        )
    if row[0] > newest:
        raise SchemaAheadError(
            f"the tables of gaffer_dagster are at migration {row[0]}, this package knows only {newest}; upgrade "
            "gaffer_dagster where this process runs"
        )
    if row[2] < len(known):
        raise SchemaBehindError(
            f"of the {len(known)} migrations that this package needs the database has {row[2]}; run: gaffer migrate"
        )
    if row[3]:
        raise _edited(*next((each.number, each.name) for each in known if each.number == row[3][0]))
    if row[4] is not None:  # what a policy hides looks like a lease that was lost, a run that is not recorded
        raise BadInputError(
            f"row-level security is on for tables of the schema gaffer, and none of them works with it; run: {row[4]}"
        )
    return row[1]


def _another_schema() -> BadInputError:
    return BadInputError(
        "the schema gaffer of this database is not that of gaffer_dagster; name another database, or let its owner "
        "rename it: alter schema gaffer rename to NAME"
    )


def _edited(number: int, name: str) -> MigrationEditedError:
    return MigrationEditedError(
        f"migration {number} ({name}) was edited after it was applied; put its file back as it was and write the "
        "change as a new migration"
    )


def pending(connection: db.Connection) -> list[Migration]:
    """What `migrate` would apply. Raises `MigrationEditedError`, `SchemaAheadError`, and `BadInputError` where it was
    applied, and its row is missing."""
    exists = connection.execute("select pg_catalog.to_regclass('gaffer.migration') is not null").fetchone()
    applied: list[_Applied] = []
    if exists and exists[0]:
        with connection.cursor(row_factory=class_row(_Applied)) as cursor:
            try:
                applied = cursor.execute(
                    "select number, name, checksum from gaffer.migration order by number"
                ).fetchall()
            except pg.UndefinedColumn:
                raise _another_schema() from None
    known = {migration.number: migration for migration in migrations()}
    for row in applied:
        if row.number not in known:
            raise SchemaAheadError(
                f"the database has migration {row.number} ({row.name}), which this package does not know; upgrade "
                "gaffer_dagster where this command runs"
            )
        if row.checksum != known[row.number].checksum:
            raise _edited(row.number, row.name)
    done = {row.number for row in applied}
    todo = [migration for migration in known.values() if migration.number not in done]
    there = [migration for migration in todo if _is_there(connection, migration)]
    if there:
        names = few([f"{migration.number} ({migration.name})" for migration in there])
        raise BadInputError(
            f"what the migrations {names} make is there already, and gaffer.migration does not say so: rows of it were "
            "removed; if by hand, let its owner put them back"
            + (f": {' '.join(map(_noted, there))}" if exists and exists[0] else ", with the table, from a backup")
        )
    return todo


_CREATED = re.compile(r"^create (?:table|view|type|function) gaffer\.(\w+)", re.MULTILINE)


def _is_there(connection: db.Connection, migration: Migration) -> bool:
    """All that it makes."""
    row = connection.execute(
        """
        select pg_catalog.bool_and(
                   exists (select from pg_catalog.pg_class where relname = name
                              and relnamespace = pg_catalog.to_regnamespace('gaffer')::oid)
                   or exists (select from pg_catalog.pg_proc where proname = name
                                 and pronamespace = pg_catalog.to_regnamespace('gaffer')::oid))
          from pg_catalog.unnest(%s::text[]) as name
        """,
        [_CREATED.findall(migration.text)],
    ).fetchone()
    return bool(row and row[0])


def _noted(migration: Migration) -> str:
    return (
        "insert into gaffer.migration (number, name, checksum, applied_at)"  # noqa: S608 — our own files' names
        f" values ({migration.number}, '{migration.name}', '{migration.checksum}', pg_catalog.clock_timestamp());"
    )


def lock(connection: db.Connection) -> None:
    """Until the transaction ends: nobody else migrates this database, or sets the rights of its roles."""
    connection.execute("select pg_catalog.pg_advisory_xact_lock(%s)", [_LOCK])


def lockers(connection: db.Connection) -> list[tuple[str, str]]:
    """Who has that lock, as anybody may who can connect, and how to end that."""
    return connection.execute(
        """
        select pg_catalog.format('backend %%s (user %%s, database %%s, application %%s)', l.pid, a.usename, a.datname,
                                 nullif(a.application_name, '')),
               pg_catalog.format('select pg_terminate_backend(%%s);', l.pid)
          from (select %s::bigint as key) k
          join pg_catalog.pg_locks l
            on l.locktype = 'advisory' and l.granted and l.objsubid = 1
           and l.classid = ((k.key >> 32) & 4294967295)::oid and l.objid = (k.key & 4294967295)::oid
          join pg_catalog.pg_stat_activity a on a.pid = l.pid and a.datname = pg_catalog.current_database()
         order by l.pid
        """,
        [_LOCK],
    ).fetchall()  # type: ignore[return-value]


def migrate(connection: db.Connection, operator: Operator | None = None) -> list[Migration]:
    """Applies what is pending, once, however many do it at the same time. Returns what was applied here. `operator`:
    who asked for it, where somebody did."""
    try:
        with connection.transaction():
            connection.execute("set transaction isolation level read committed")  # to see what was done while we waited
            connection.execute("set local lock_timeout = '10s'")
            lock(connection)
            todo = pending(connection)
            if todo:
                connection.execute(_PREAMBLE)
            for migration in todo:
                connection.execute(sql.SQL(migration.text))  # pyright: ignore[reportArgumentType] — our own file
                connection.execute(
                    "insert into gaffer.migration (number, name, checksum, applied_at)"
                    " values (%s, %s, %s, pg_catalog.clock_timestamp())",
                    [migration.number, migration.name, migration.checksum],
                )
            if todo:
                connection.execute(_NOTHING_FOR_PUBLIC)
            if todo and operator is not None:
                numbers = [migration.number for migration in todo]
                operations.note(connection, None, "migrate", operator, {"migrations": numbers})
            return todo
    except pg.LockNotAvailable:
        held = lockers(connection)
        cure = "" if not held else f"; it is {held[0][0]}; if that is no migration: {held[0][1]}"
        raise DatabaseUnavailableError(
            f"another migration has been running for 10 s; wait for it and try again{cure}"
        ) from None
    except (pg.DuplicateTable, pg.DuplicateObject, pg.DuplicateFunction) as error:  # of a name that we need
        noted = connection.execute("select pg_catalog.to_regclass('gaffer.migration') is not null").fetchone()
        if noted and noted[0]:
            raise BadInputError(
                f"nothing was changed: {db.primary_message(error)}, though the migration that makes it is not noted as "
                "applied; compare the schema with: gaffer migrate --sql, and drop what is left of that migration"
            ) from None
        raise _another_schema() from None
    except pg.InsufficientPrivilege as error:
        raise MissingRightsError(
            f'the role "{connection.info.user}" may not migrate: {db.primary_message(error)}; '
            f"{owners_cure(connection) or 'use a role that owns the schema gaffer, or may create it'}"
        ) from None


def owners_cure(connection: db.Connection) -> str | None:
    """Where something in the schema belongs to somebody else than the role owner: how this administrator becomes a
    member of him."""
    row = connection.execute(
        """
        select pg_catalog.format('some of it belongs to %s: let him, a superuser, or whoever made him run: %s',
                                 pg_catalog.string_agg(pg_catalog.format('%I', r.rolname), ', ' order by r.rolname),
                                 pg_catalog.string_agg(pg_catalog.format('grant %I to %I;', r.rolname, current_user),
                                                       ' ' order by r.rolname))
          from pg_catalog.pg_roles r
         where r.rolname <> 'gaffer_owner' and not pg_catalog.pg_has_role(r.oid, 'usage')
           and exists (select from pg_catalog.pg_roles me
                        where me.rolname = current_user
                          and (me.rolcreaterole
                               or pg_catalog.pg_has_role(pg_catalog.to_regrole('gaffer_owner'), 'usage')))
           and r.oid in (select n.nspowner from pg_catalog.pg_namespace n where n.nspname = 'gaffer'
                         union select c.relowner from pg_catalog.pg_class c
                                 join pg_catalog.pg_namespace n on n.oid = c.relnamespace where n.nspname = 'gaffer'
                         union select p.proowner from pg_catalog.pg_proc p
                                 join pg_catalog.pg_namespace n on n.oid = p.pronamespace where n.nspname = 'gaffer')
        having count(*) > 0
        """
    ).fetchone()
    return None if row is None else row[0]


def script() -> str:
    """All migrations as one script, for a database administrator who applies them by hand."""
    parts = ["begin;", _PREAMBLE.strip()]
    for migration in migrations():
        parts.append(f"-- migration {migration.number}: {migration.name}\n{migration.text.strip()}")
        parts.append(_noted(migration))
    return "\n\n".join([*parts, _NOTHING_FOR_PUBLIC.strip(), "commit;", ""])


_PREAMBLE = """
do $$ begin  -- "if not exists" asks for the right to create one, even where it is there
    if pg_catalog.to_regnamespace('gaffer') is null then
        create schema gaffer;
    end if;
end $$;
create table if not exists gaffer.migration (
    number     integer primary key,
    name       text not null,
    checksum   text not null,
    applied_at timestamptz not null
);
"""

_NOTHING_FOR_PUBLIC = """
revoke all on schema gaffer from public;
revoke all on all tables in schema gaffer from public;
revoke all on all functions in schema gaffer from public;
"""
