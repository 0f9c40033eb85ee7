"""The tables and functions: applied once, seen by nobody who was granted nothing, misled by nobody's shadow objects."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import psycopg
import pytest
from psycopg import errors as pg
from psycopg import sql

from gaffer_dagster.domain.run import Outcome
from gaffer_dagster.errors import (
    BadInputError,
    MigrationEditedError,
    MissingRightsError,
    SchemaAheadError,
    SchemaBehindError,
)
from gaffer_dagster.store import db, migrate
from tests.support import jobs, protocol
from tests.support.protocol import Actor, until

# What a worker's role needs of the schema; everything else is reached through functions that run as their owner.
RUNNER = """
    grant usage on schema gaffer to {role};
    grant execute on function gaffer.clock, gaffer.cluster, gaffer.base_of_spec, gaffer.register, gaffer.acquire,
        gaffer.renew, gaffer.begin_batch, gaffer.commit_batch, gaffer.supersede, gaffer.end_run to {role};
    grant select on gaffer.migration, gaffer.job_runs, gaffer.job_spec, gaffer.operator_action to {role};
"""


@pytest.fixture
def connection(empty_url: str) -> Iterator[db.Connection]:
    with protocol.session(empty_url) as connection:
        yield connection


def numbers(found: list[migrate.Migration]) -> list[int]:
    return [migration.number for migration in found]


def has_schema(url: str) -> bool:
    return jobs.query(url, "select to_regnamespace('gaffer') is not null")[0][0]


def user_of(url: str) -> str:
    return str(db.parse_url(url)["user"])


def test_a_fresh_database_gets_every_migration_in_order(connection: db.Connection) -> None:
    assert numbers(migrate.pending(connection)) == numbers(migrate.migrations())
    applied = migrate.migrate(connection)
    assert numbers(applied) == numbers(migrate.migrations()) == list(range(1, len(applied) + 1))
    assert migrate.pending(connection) == []
    assert migrate.verify(connection).utcoffset() is not None


def test_a_second_time_changes_nothing(connection: db.Connection, empty_url: str) -> None:
    migrate.migrate(connection)
    before = catalog(empty_url)
    assert migrate.migrate(connection) == []
    assert catalog(empty_url) == before


def test_of_eight_at_once_one_applies(empty_url: str) -> None:
    def one(_: int) -> list[migrate.Migration]:
        with protocol.session(empty_url) as connection:
            return migrate.migrate(connection)

    applied = [found for found in protocol.all_at_once(8, one) if found]
    assert [numbers(found) for found in applied] == [numbers(migrate.migrations())]


def test_a_database_without_tables_is_refused_with_the_cure(connection: db.Connection, empty_url: str) -> None:
    with pytest.raises(SchemaBehindError, match=r"no tables.*gaffer migrate$"):
        migrate.verify(connection)
    with pytest.raises(SchemaBehindError, match="gaffer migrate"):
        jobs.run(jobs.spec(), empty_url)
    assert not has_schema(empty_url)


def test_an_older_schema_is_refused_with_the_cure(url: str) -> None:
    newest = migrate.migrations()[-1].number
    jobs.execute(url, "delete from gaffer.migration where number = %s", newest)
    with pytest.raises(SchemaBehindError, match=rf"at migration {newest - 1}.*needs {newest}.*gaffer migrate$"):
        jobs.run(jobs.spec(), url)
    assert jobs.query(url, "select count(*) from gaffer.job") == [(0,)]


@pytest.mark.parametrize("which", ["number = 12", "number in (3, 5)", "true"])
def test_what_is_there_and_not_noted_is_told_and_noted_by_the_cure(url: str, which: str) -> None:
    jobs.execute(url, f"delete from gaffer.migration where {which}")
    for step in (migrate.pending, migrate.migrate):
        with protocol.session(url) as connection, pytest.raises(BadInputError, match="make is there already") as told:
            step(connection)
    _, colon, cure = str(told.value).partition("back: ")
    assert colon
    jobs.execute(url, cure)
    with protocol.session(url) as connection:
        assert migrate.pending(connection) == []
        migrate.verify(connection)


def test_a_table_of_migrations_that_is_gone_is_told(url: str) -> None:
    jobs.execute(url, "drop table gaffer.migration")
    with protocol.session(url) as connection, pytest.raises(BadInputError, match=r"with the table, from a backup$"):
        migrate.migrate(connection)


def test_a_migration_of_which_some_is_there_is_told(url: str) -> None:
    jobs.execute(url, "delete from gaffer.migration where number = 8; drop function gaffer.advisory_key")
    with protocol.session(url) as connection, pytest.raises(BadInputError, match=r"nothing was changed: .*job_item"):
        migrate.migrate(connection)
    # Of somebody else's schema nothing of the kind is said.
    jobs.execute(url, "drop schema gaffer cascade; create schema gaffer; create table gaffer.job (id int)")
    with protocol.session(url) as connection, pytest.raises(BadInputError, match="is not that of gaffer_dagster"):
        migrate.migrate(connection)


def test_a_newer_schema_is_refused_with_the_cure(url: str) -> None:
    jobs.execute(url, "insert into gaffer.migration values (999, 'later', 'x', now())")
    with pytest.raises(SchemaAheadError, match=r"999.*upgrade"):
        jobs.run(jobs.spec(), url)
    assert jobs.query(url, "select count(*) from gaffer.job") == [(0,)]
    with protocol.session(url) as connection, pytest.raises(SchemaAheadError, match=r"999 \(later\)"):
        migrate.migrate(connection)


def test_an_edited_migration_is_refused(url: str) -> None:
    jobs.execute(url, "update gaffer.migration set checksum = 'other' where number = 1")
    with protocol.session(url) as connection:
        for attempt in (migrate.pending, migrate.migrate):
            with pytest.raises(MigrationEditedError, match=r"migration 1 \(tables\)"):
                attempt(connection)


def test_the_script_does_the_same_by_hand(url: str, empty_url: str) -> None:
    with jobs.connect(empty_url) as connection:
        connection.execute(sql.SQL(migrate.script()))
    assert catalog(empty_url) == catalog(url)
    with protocol.session(empty_url) as connection:
        assert migrate.pending(connection) == []


def test_a_migration_that_fails_midway_leaves_nothing(
    connection: db.Connection, empty_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = migrate.migrations()[0]
    broken = replace(first, number=99, name="broken", text="create table gaffer.half (); select 1/0")
    known = migrate.migrations()
    monkeypatch.setattr(migrate, "migrations", lambda: [*known, broken])
    with pytest.raises(pg.DivisionByZero):
        migrate.migrate(connection)
    assert not has_schema(empty_url)
    monkeypatch.undo()
    assert numbers(migrate.migrate(connection)) == numbers(known)


def test_a_migration_that_is_killed_midway_leaves_nothing(empty_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known = migrate.migrations()
    slow = replace(known[0], number=99, name="slow", text="select pg_sleep(600)")
    monkeypatch.setattr(migrate, "migrations", lambda: [*known, slow])

    def one() -> None:
        with protocol.session(empty_url) as connection:
            migrate.migrate(connection)

    migration = Actor(one)
    asleep = "from pg_stat_activity where wait_event = 'PgSleep' and datname = current_database()"
    until(lambda: jobs.query(empty_url, f"select pid {asleep}"))
    assert not has_schema(empty_url)
    jobs.query(empty_url, f"select pg_terminate_backend(pid) {asleep}")
    with pytest.raises(psycopg.OperationalError):
        migration.result()
    assert not has_schema(empty_url)
    monkeypatch.undo()
    with protocol.session(empty_url) as connection:
        assert numbers(migrate.migrate(connection)) == numbers(known)


def test_a_migration_waits_for_another_one(empty_url: str) -> None:
    def one() -> list[migrate.Migration]:
        with protocol.session(empty_url) as connection:
            return migrate.migrate(connection)

    with psycopg.connect(empty_url) as other:
        other.execute("select pg_advisory_xact_lock(%s)", [migrate._LOCK])
        migration = Actor(one)
        until(lambda: protocol.waits_for_a_lock(empty_url))
        assert not has_schema(empty_url)
    assert numbers(migration.result()) == numbers(migrate.migrations())


def test_a_role_that_may_not_migrate_is_told_so(url: str, stranger: str, empty_url: str) -> None:
    there = psycopg.conninfo.make_conninfo(stranger, dbname=str(db.parse_url(empty_url)["dbname"]))
    with protocol.session(there) as connection, pytest.raises(MissingRightsError, match=user_of(stranger)):
        migrate.migrate(connection)
    assert not has_schema(empty_url)


# ── safe by default ──────────────────────────────────────────────────────────────────────────────────────────────


def test_nothing_is_put_into_public(url: str, empty_url: str) -> None:
    counted = """
        select (select count(*) from pg_class where relnamespace = 'public'::regnamespace),
               (select count(*) from pg_proc where pronamespace = 'public'::regnamespace),
               (select count(*) from pg_type where typnamespace = 'public'::regnamespace),
               (select count(*) from pg_extension), (select count(*) from pg_roles)
    """
    assert jobs.query(url, counted) == jobs.query(empty_url, counted)


def test_every_function_pins_its_search_path(url: str) -> None:
    found = jobs.query(url, "select proname, proconfig from pg_proc where pronamespace = 'gaffer'::regnamespace")
    assert len(found) > 10
    pinned = "search_path=pg_catalog, pg_temp"
    assert {name for name, settings in found if pinned not in (settings or ())} == set()


def test_public_may_do_nothing(url: str, stranger: str) -> None:
    role = user_of(stranger)
    functions = jobs.query(
        url,
        "select oid::regprocedure::text, has_function_privilege(%s, oid, 'execute') from pg_proc"
        " where pronamespace = 'gaffer'::regnamespace",
        role,
    )
    relations = jobs.query(
        url,
        f"""
        select oid::regclass::text,
               case when relkind = 'S' then has_sequence_privilege('{role}', oid, 'usage,select,update')
                    else has_table_privilege('{role}', oid, 'select,insert,update,delete,truncate,references,trigger')
                      or has_any_column_privilege('{role}', oid, 'select,insert,update,references') end
          from pg_class where relnamespace = 'gaffer'::regnamespace and relkind in ('r', 'p', 'v', 'S')
        """,
    )
    assert len(functions) > 10
    assert len(relations) > 6
    assert [name for name, allowed in functions + relations if allowed] == []
    assert jobs.query(url, "select has_schema_privilege(%s, 'gaffer', 'usage,create')", role) == [(False,)]
    for text in ("select gaffer.clock()", "select * from gaffer.job", "create table gaffer.mine ()"):
        with pytest.raises(pg.InsufficientPrivilege):
            jobs.execute(stranger, text)


def test_a_role_that_was_granted_nothing_is_told_what_to_grant(url: str, stranger: str) -> None:
    with pytest.raises(MissingRightsError, match=f"{user_of(stranger)}.*gaffer_runner.*operator.*reader"):
        jobs.run(jobs.spec(), stranger)


def test_a_workers_role_needs_functions_and_a_few_tables_to_read(url: str, stranger: str) -> None:
    jobs.make_source(url, 25)
    role = user_of(stranger)
    jobs.execute(url, f"grant select on source to {role}; grant insert on target to {role}")
    jobs.execute(url, RUNNER.format(role=role))
    record = jobs.run(jobs.spec(batch_rows=10), stranger)
    assert (record.outcome, record.items) == (Outcome.SUCCEEDED, 25)
    assert jobs.query(url, "select count(*), count(distinct id) from target") == [(25, 25)]
    for table in ("job", "job_lease", "job_runs", "job_spec", "job_watermark", "migration"):
        for text in (f"delete from gaffer.{table}", f"truncate gaffer.{table} cascade"):
            with pytest.raises(pg.InsufficientPrivilege):
                jobs.execute(stranger, text)
    with pytest.raises(pg.InsufficientPrivilege):
        jobs.execute(stranger, "update gaffer.job_lease set fence = fence + 1")


def test_shadow_objects_change_nothing(url: str) -> None:
    jobs.make_source(url, 25)
    jobs.execute(
        url,
        """
        create table public.job_lease
               (job text, slot int, fence bigint, lease_id uuid, owner text, lease_until timestamptz);
        insert into public.job_lease values ('copy_rows', 0, 7, null, 'mallory', 'epoch');
        create table public.job as table public.job_lease;
        create table public.job_runs as table public.job_lease;
        create table public.migration (number int);
        insert into public.migration values (999);
        create schema evil;
        """,
    )
    shadows = (
        ("clock_timestamp", "", "timestamptz", "2000-01-01"),
        ("clock", "", "timestamptz", "2000-01-01"),
        ("now", "", "timestamptz", "2000-01-01"),
        ("set_config", "text, text, boolean", "text", ""),
        ("current_setting", "text", "text", "off"),
        ("pg_current_xact_id", "", "xid8", "1"),
        ("pg_current_snapshot", "", "pg_snapshot", "1:1:"),
        ("pg_snapshot_xmin", "pg_snapshot", "xid8", "1"),
        ("to_regclass", "text", "regclass", "pg_class"),
        ("format_type", "oid, integer", "text", "xml"),
    )
    for name, arguments, returned, value in shadows:
        jobs.execute(
            url,
            f"create function evil.{name}({arguments}) returns {returned}"
            f" language sql as $$ select '{value}'::{returned} $$",
        )
    database = db.parse_url(url)["dbname"]
    jobs.execute(url, f"alter database {database} set search_path = evil, public, pg_catalog")
    assert str(jobs.query(url, "select clock_timestamp()")[0][0])[:4] == "2000"
    record = jobs.run(jobs.spec(batch_rows=10), url)
    assert (record.outcome, record.items, record.fence) == (Outcome.SUCCEEDED, 25, 1)
    assert record.started_at.year > 2020
    assert jobs.query(url, "select count(*), count(distinct id) from target") == [(25, 25)]
    assert jobs.query(url, "select fence from public.job_lease") == [(7,)]


def test_a_temporary_table_shadows_nothing(url: str) -> None:
    with protocol.session(url) as connection:
        connection.execute("create temp table job_lease (job text, slot int, fence bigint, lease_id uuid)")
        connection.execute("create temp table job (name text)")
        protocol.register(connection, jobs.spec())
        assert protocol.acquire(connection, jobs.spec()).grant.fence == 1


def catalog(url: str) -> dict[str, list[tuple[Any, ...]]]:
    """All that is in the schema, as the catalog tells it."""
    texts = {
        "schema": "select nspacl::text from pg_namespace where nspname = 'gaffer'",
        "relations": "select relname, relkind, relacl::text from pg_class where relnamespace = 'gaffer'::regnamespace",
        "columns": """
            select c.relname, a.attname, a.attnum, format_type(a.atttypid, a.atttypmod), a.attnotnull, a.attidentity,
                   pg_get_expr(d.adbin, d.adrelid)
              from pg_attribute a join pg_class c on c.oid = a.attrelid
              left join pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum
             where c.relnamespace = 'gaffer'::regnamespace and a.attnum > 0""",
        "constraints": """
            select conrelid::regclass::text, conname, pg_get_constraintdef(oid) from pg_constraint
             where connamespace = 'gaffer'::regnamespace""",
        "indexes": "select indexname, indexdef from pg_indexes where schemaname = 'gaffer'",
        "triggers": """
            select tgname, tgenabled, pg_get_triggerdef(t.oid) from pg_trigger t join pg_class c on c.oid = t.tgrelid
             where c.relnamespace = 'gaffer'::regnamespace and not tgisinternal""",
        "functions": """
            select oid::regprocedure::text, pg_get_functiondef(oid), proacl::text, obj_description(oid, 'pg_proc')
              from pg_proc where pronamespace = 'gaffer'::regnamespace""",
        "migrations": "select number, name, checksum from gaffer.migration",
    }
    return {name: sorted(jobs.query(url, text), key=repr) for name, text in texts.items()}
