"""Attackers: what somebody who may write in the database, name things, squat, or give an address, cannot make of it.

Beside these: shadow objects and temporary tables (tests/postgres/test_migrations.py), policies on a job's table
(test_doctor.py), redirects, certificates, proxies, markup in Slack and Discord, and what errors tell of an address
(test_receivers.py), control characters on the terminal (test_command_line.py), foreign folders (test_local.py).
"""

from __future__ import annotations

import ast
import inspect
import logging
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner
from psycopg import errors as pg
from psycopg import sql

import gaffer_dagster as gd
from gaffer_dagster import local
from gaffer_dagster.cli import main
from gaffer_dagster.domain import notice
from gaffer_dagster.domain.alert import is_receiver
from gaffer_dagster.domain.health import Check, Mark
from gaffer_dagster.engine import doctor, watch, web
from gaffer_dagster.engine.batch import Batch
from gaffer_dagster.engine.watch import Watcher
from gaffer_dagster.errors import (
    BadInputError,
    BatchEndedError,
    LeaseLostError,
    LocalPostgresError,
    NotDeliveredError,
)
from gaffer_dagster.store import db, deliveries, horizon, migrate, prepare, protect, tables
from gaffer_dagster.store import doctor as asked
from gaffer_dagster.store.operations import Operator
from gaffer_dagster.testing import Databases
from tests.support import jobs, protocol, variants
from tests.support import roles as support
from tests.support.receivers import HttpReceiver, MailReceiver

ROOT = Path(__file__).parents[2]
WHO = Operator("ann", None)


@pytest.fixture(scope="module")
def home(gaffer_databases: Databases) -> Iterator[tuple[str, dict[str, str]]]:
    """A database with the four roles, a login of each, and the tables of a job."""
    with gaffer_databases.scratch() as url, support.logins(url) as found:
        jobs.make_source(url, 25)
        jobs.execute(url, "create table item (id int primary key, done_at timestamptz)")
        name = support.user_of(found["runner"])
        jobs.execute(url, f"grant select on source to {name}; grant insert on target to {name}")
        jobs.execute(url, f"grant select, update on item to {name}")
        yield url, found


@pytest.fixture
def url(home: tuple[str, dict[str, str]]) -> str:
    return home[0]


@pytest.fixture
def runner(home: tuple[str, dict[str, str]]) -> str:
    return home[1]["runner"]


@pytest.fixture
def owner(home: tuple[str, dict[str, str]]) -> str:
    return home[1]["owner"]


def gaffer(url: str, *words: str) -> str:
    done = CliRunner().invoke(main, list(words), env={"GAFFER_DATABASE_URL": url})
    assert done.exception is None or isinstance(done.exception, SystemExit), (words, done.exception)
    return done.output


def look(url: str) -> dict[str, Check]:
    """What the doctor finds not to be well."""
    return {each.name: each for each in doctor.of_database(url) if each.mark in (Mark.WRONG, Mark.WARNING)}


# ── search_path ──────────────────────────────────────────────────────────────────────────────────────────────────────

# What is not in pg_catalog with just these types: by the default search path, too, the better match is taken.
TRAPS = {
    "public.upper(tstzrange) returns timestamptz": "select pg_catalog.upper(redo) from gaffer.job_runs",
    "public.lower(tstzrange) returns timestamptz": "select pg_catalog.lower(redo) from gaffer.job_runs",
    "public.unnest(text[]) returns setof text": "select pg_catalog.unnest('{a}'::text[])",
    "public.unnest(bigint[]) returns setof bigint": "select pg_catalog.unnest('{1}'::bigint[])",
    "public.unnest(integer[]) returns setof integer": "select pg_catalog.unnest('{1}'::integer[])",
    "public.array_append(name[], name) returns name[]": "select pg_catalog.array_append('{}'::name[], 'a'::name)",
    "public.format(text, name) returns text": "select pg_catalog.format('%s'::text, 'a'::name)",
    "public.format(text, text) returns text": "select pg_catalog.format('%s'::text, 'a'::text)",
}
OPERATORS = {
    "oid = regclass": "select from pg_catalog.pg_class where oid = 'gaffer.job'::pg_catalog.regclass::oid",
    "oid = regnamespace": "select from pg_catalog.pg_class where relnamespace = 'gaffer'::pg_catalog.regnamespace::oid",
    "name || name": "select 'gaffer.'::name::text || relname::text from pg_catalog.pg_class limit 1",
    "text || name": "select 'gaffer.'::text || relname::text from pg_catalog.pg_class limit 1",
}


@pytest.fixture(scope="module")
def trapped(home: tuple[str, dict[str, str]]) -> str:
    """A database in which somebody may create in `public`, and has: each trap counts by a sequence, which no rollback
    takes back."""
    url = home[0]
    with support.login(url) as mallory:
        jobs.execute(url, f"grant create on schema public to {support.user_of(mallory)}")
        jobs.execute(mallory, "create sequence public.fallen; grant usage, select on public.fallen to public")
        jobs.execute(mallory, "create function public.fall(bigint, bigint) returns bigint language sql"
                              " as $$ select nextval('public.fallen') $$")  # fmt: skip
        jobs.execute(mallory, "create aggregate public.count(bigint) (sfunc = public.fall, stype = bigint)")
        for head in TRAPS:
            of = head.rpartition(" ")[2]
            jobs.execute(mallory, f"create function {head} language sql"
                                  f" as $$ select null::{of} from nextval('public.fallen') $$")  # fmt: skip
        for number, (operator, _) in enumerate(OPERATORS.items()):
            left, name, right = operator.split()
            of = "boolean" if name == "=" else "text"
            jobs.execute(mallory, f"create function public.trap{number}({left}, {right}) returns {of} language sql"
                                  f" as $$ select null::{of} from nextval('public.fallen') $$")  # fmt: skip
            jobs.execute(mallory, f"create operator public.{name} (leftarg = {left}, rightarg = {right},"
                                  f" function = public.trap{number})")  # fmt: skip
        yield url


def fell(url: str) -> bool:
    """Whether somebody has fallen into a trap since this was asked last."""
    (((last, called),),) = [jobs.query(url, "select last_value, is_called from public.fallen")]
    jobs.execute(url, "alter sequence public.fallen restart")
    return called or last > 1


def failing(batch: Batch) -> None:
    raise ValueError("bad")


def test_no_statement_takes_a_better_match_of_somebodys(trapped: str, runner: str) -> None:
    fell(trapped)
    due = gd.PendingRows("item", "id", pending="done_at is null", done="done_at = clock_timestamp()", attempts=1)
    claim = gd.JobSpec("claim", due, gd.Schedule("0 * * * *"), gd.Bounds(timeout="5m"), exclusion="advisory")
    jobs.execute(trapped, "insert into item select generate_series(1, 3) on conflict do nothing")
    for of in (runner, trapped):
        assert jobs.run(jobs.spec(f"copy_{support.user_of(of)[:6]}", batch_rows=10), of).items == 25
        jobs.run(claim, of, failing)
        with protocol.session(of) as connection:
            watch.attend(connection, Watcher("here", None, ["claim"]), {}, jobs.LOG)
        for words in ("status", "runs", "audit", "check", "metrics", "ticks claim", "alerts list", "items list claim"):
            gaffer(of, *words.split())
        list(doctor.of_database(of))
    assert not fell(trapped)


@pytest.mark.parametrize(
    "text", [*TRAPS.values(), *OPERATORS.values(), "select pg_catalog.count(id) from gaffer.job_runs"]
)
def test_what_is_not_qualified_falls(trapped: str, text: str) -> None:
    fell(trapped)
    jobs.query(trapped, text.replace("%", "%%"))
    assert not fell(trapped)
    broken = re.sub(r"pg_catalog\.(?=\w+\()|::oid|::text(?= \|\| )|(?<=relname)::text", "", text)
    assert broken != text
    jobs.query(trapped, broken.replace("%", "%%"))
    assert fell(trapped)


# Without a schema: what is no function but a part of the grammar, and aggregates that have just these types.
GRAMMAR = {
    "all", "and", "any", "array", "as", "case", "cast", "coalesce", "exists", "extract", "filter", "from", "greatest",
    "in", "lateral", "least", "materialized", "not", "nullif", "on", "or", "over", "row", "select", "then", "union",
    "using", "values", "when", "where", "with",
}  # fmt: skip
EXACT = {"count", "max", "min", "sum"}


BEGINNINGS = "select|insert|update|delete|with|from|where|and|lock|alter"


def unqualified(text: str) -> set[str]:
    """The functions that a statement calls without saying of which schema."""
    bare = re.sub(r"'(?:[^']|'')*'|--[^\n]*", "''", text)
    named = set(re.findall(r"(\w+)\s*(?:\([\w, ]+\)\s*)?as\s+(?:materialized\s+)?\(", bare))  # with … as ( and as x (…)
    named |= set(re.findall(r"\bas\s+(\w+)\s*\(", bare)) | set(re.findall(r"\binto\s+(\w+)\s*\(", bare))
    return set(re.findall(r"(?<![.\w\"])([a-z_]+)\(", bare)) - GRAMMAR - EXACT - named


def statements() -> Iterator[tuple[str, str]]:
    """Every literal of the store that reads like SQL."""
    for path in sorted((ROOT / "gaffer_dagster" / "store").glob("*.py")):
        tree = ast.parse(path.read_text())
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
        told = {id(each.body[0].value) for each in ast.walk(tree)
                if isinstance(each, kinds) and each.body and isinstance(each.body[0], ast.Expr)}  # fmt: skip
        texts = [each.value for each in ast.walk(tree) if isinstance(each, ast.Constant) and id(each) not in told]
        for text in texts:
            if isinstance(text, str) and re.match(rf"\s*({BEGINNINGS})\b", text):
                yield path.name, text


def test_every_statement_of_the_store_says_of_which_schema_a_function_is() -> None:
    found = {(name, each) for name, text in statements() for each in unqualified(text)}
    assert found == set()
    assert len(list(statements())) > 80
    assert unqualified("select a.b, lower(redo) from x where pg_catalog.upper(y) > 'z(1)'") == {"lower"}


def test_a_function_of_ours_calls_nothing_of_the_callers(url: str, runner: str) -> None:
    """Functions work with the rights of their owner: whatever of the caller's they called would have them, too."""
    name = support.user_of(runner)
    jobs.execute(url, f"create schema evil; grant all on schema evil to {name}")
    jobs.execute(runner, "create sequence evil.loot; grant usage on sequence evil.loot to public")
    jobs.execute(url, "grant usage on schema evil to public")
    rob = "begin if current_user = 'gaffer_owner' then perform nextval('evil.loot'); end if; return"
    traps = {
        "current_setting(text) returns text": "'180000'::text",
        "current_setting(text, boolean) returns text": "''::text",
        "set_config(text, text, boolean) returns text": "''::text",
        "strpos(text, text) returns integer": "0",
        "hashtextextended(text, bigint) returns bigint": "0::bigint",
        "pg_backend_pid() returns integer": "0",
        "gen_random_uuid() returns uuid": "null::uuid",
        "jsonb_typeof(jsonb) returns text": "''::text",
        "md5(text) returns text": "''::text",
    }
    for head, value in traps.items():
        jobs.execute(runner, f"create function evil.{head} language plpgsql as $$ {rob} {value}; end $$")
    jobs.execute(
        runner,
        "create function evil.later(timestamptz, timestamptz) returns boolean language plpgsql as"
        f" $$ {rob} false; end $$",
    )
    jobs.execute(
        runner, "create operator evil.<= (leftarg = timestamptz, rightarg = timestamptz, function = evil.later)"
    )
    job = jobs.spec("lured")
    with protocol.session(runner) as connection:
        protocol.register(connection, job)

        def lure() -> bool:
            """Whether anything of the caller's worked as the owner."""
            connection.execute("set search_path = evil, pg_catalog")
            lease = protocol.acquire(connection, job).lease
            batch = protocol.begin(connection)
            with suppress(BatchEndedError):  # its mark was made by set_config
                protocol.commit(connection, lease, batch, since=None, until={"xid": 1, "key": "1"})
            db.roll_back(connection)
            connection.execute("set search_path = evil, pg_catalog")
            connection.execute("select gaffer.lock_batch('lured')")
            connection.execute("select gaffer.renew(%s, 0, %s, %s)", [lease.job, lease.fence, lease.lease_id])
            protocol.end(connection, lease)
            connection.execute("select gaffer.begin_pass('lured', null, '{}')")
            connection.execute("select gaffer.claim_notices('lured', 'warning')")
            connection.execute("reset search_path")
            return jobs.query(url, "select is_called from evil.loot") == [(True,)]

        assert not lure()
        jobs.execute(url, "alter function gaffer.begin_batch reset search_path")
        try:
            assert lure()
        finally:
            variants.replace(url, "begin_batch", {})
            jobs.execute(url, "drop schema evil cascade")


# ── identifiers ──────────────────────────────────────────────────────────────────────────────────────────────────────

NAMES = [
    'we"ird\'; drop table canary; --',
    "%s %(x)s {} {0} $1 \\",
    "schöne Zeilen 世界 \N{RIGHT-TO-LEFT OVERRIDE}",
    "x" * 63,
    "é" * 31,  # 62 bytes
    'select',
    'x" add column y int; drop table canary; commit; --',
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_a_name_whatever_is_in_it(url: str, name: str) -> None:
    quoted = '"' + name.replace('"', '""') + '"'
    jobs.execute(url, "create table if not exists canary (id int)")
    with jobs.connect(url) as connection:
        made = sql.SQL("drop table if exists {0}; drop table if exists {1}").format(
            sql.Identifier(name), sql.Identifier("out", name))  # fmt: skip
        connection.execute("create schema if not exists out")
        connection.execute(made)
        column = sql.Identifier(name)
        connection.execute(sql.SQL("create table {0} ({0} bigint primary key, {1} timestamptz)").format(
            column, sql.Identifier(name[:-1])))  # fmt: skip
        connection.execute(sql.SQL("create table out.{0} ({0} bigint)").format(column))
        connection.execute(sql.SQL("insert into {0} select generate_series(1, 5)").format(column))
    with protocol.session(url) as connection:
        prepare.apply(connection, prepare.statements(connection, quoted, name, changed=False))
        claims = f'"{name[:-1].replace(chr(34), chr(34) * 2)}" is null'
        prepare.apply(connection, prepare.pending_statements(connection, quoted, name, claims))
    number = NAMES.index(name)
    new = gd.JobSpec(f"new{number}", gd.NewRows(quoted, name), gd.Schedule("0 * * * *"), gd.Bounds(timeout="5m"))
    due = gd.PendingRows(quoted, name, pending=claims, done=claims.replace(" is null", " = now()"))
    claim = gd.JobSpec(f"claim{number}", due, gd.Schedule("0 * * * *"), gd.Bounds(timeout="5m"))

    def write(batch: Batch) -> None:
        batch.insert(f"out.{quoted}", [{name: row[name]} for row in batch.rows])
        batch.copy(f"out.{quoted}", [{name: row[name]} for row in batch.rows])

    for job in (new, claim):
        record = jobs.run(job, url, write)
        assert (record.outcome, record.items) == ("succeeded", 5)
    with protocol.session(url) as connection:
        protect.protect(connection, tables.find(connection, f"out.{quoted}"), [new.name], WHO)
        protect.require(connection, [f"out.{quoted}"], new.name)
    assert f"new{number}" in gaffer(url, "status")
    counted = sql.SQL("select count(*), pg_catalog.count(distinct {0}) from out.{0}").format(sql.Identifier(name))
    with jobs.connect(url) as connection:
        assert connection.execute(counted).fetchone() == (20, 5)
    assert jobs.query(url, "select to_regclass('canary')::text") == [("canary",)]


def test_a_name_that_is_only_put_between_quotes_does_what_is_in_it(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = NAMES[-1]
    quoted = '"' + name.replace('"', '""') + '"'
    jobs.execute(url, "create table if not exists canary (id int); create table x (id int)")
    jobs.execute(url, f"drop table if exists {quoted}; create table {quoted} (id bigint primary key)")
    naive = property(lambda table: sql.SQL(f'"{table.schema}"."{table.name}"'))
    monkeypatch.setattr(tables.Table, "identifier", naive)
    try:
        with protocol.session(url) as connection, pytest.raises(pg.SyntaxError):
            prepare.apply(connection, prepare.statements(connection, quoted, "id", changed=False))
        assert jobs.query(url, "select to_regclass('canary')::text") == [(None,)]
    finally:
        jobs.execute(url, f"drop table x, {quoted}")


@pytest.mark.parametrize(
    "name", ["canary; drop table canary", "canary --", "(select 1)", "canary c", "a.b.c.d", "", '"', "\0"]
)
def test_what_is_no_name_is_refused(url: str, name: str) -> None:
    with protocol.session(url) as connection:
        for what in (
            lambda: tables.find(connection, name),
            lambda: prepare.statements(connection, name, "id", changed=False),
            lambda: prepare.pending_statements(connection, name, "id", "true"),
            lambda: prepare.statements(connection, "source", name, changed=False),
        ):
            with pytest.raises(BadInputError):
                what()


def test_tables_that_differ_in_their_last_byte_are_both_prepared(url: str) -> None:
    for name in ("y" * 62 + "1", "y" * 62 + "2"):
        jobs.make_source(url, 3, table=name)
        assert jobs.run(jobs.spec(f"of{name[-1]}", table=name), url, lambda batch: None).items == 3


# ── the fence ────────────────────────────────────────────────────────────────────────────────────────────────────────

RESETS = [
    "delete from gaffer.job_lease where job = 'fenced'",
    "truncate gaffer.job_lease",
    "truncate gaffer.job cascade",
    "delete from gaffer.job where name = 'fenced'",
    "update gaffer.job_lease set fence = fence - 1 where job = 'fenced'",
    "update gaffer.job_lease set lease_id = gen_random_uuid() where job = 'fenced'",
    "update gaffer.job_lease set job = 'other' where job = 'fenced'",
    "update gaffer.job_lease set slot = 7 where job = 'fenced'",
    "insert into gaffer.job_lease (job, slot) values ('fenced', 0) on conflict (job, slot) do update set fence = 0",
    "merge into gaffer.job_lease l using (values (0)) v (f) on l.job = 'fenced' when matched then update set fence = f",
]


def test_a_fence_is_not_reset_by_its_owner_either(url: str, owner: str) -> None:
    with protocol.session(url) as connection:
        for name in ("fenced", "other"):
            protocol.register(connection, jobs.spec(name))
        protocol.acquire(connection, jobs.spec("fenced"))
    before = protocol.lease_row(url, "fenced")
    assert before[0] == 1
    for text in RESETS:
        with pytest.raises((pg.RaiseException, pg.ForeignKeyViolation)):
            jobs.execute(owner, text)
    assert protocol.lease_row(url, "fenced") == before


def test_a_fence_whose_guards_are_gone_is_handed_out_twice(url: str, owner: str) -> None:
    job = jobs.spec("twice")
    with protocol.session(url) as connection:
        protocol.register(connection, job)
        first = protocol.acquire(connection, job)
        jobs.execute(owner, "alter table gaffer.job_lease disable trigger user")
        try:
            jobs.execute(owner, "delete from gaffer.job_lease where job = 'twice'")
            jobs.execute(owner, "insert into gaffer.job_lease (job, slot) values ('twice', 0)")
        finally:
            jobs.execute(owner, "alter table gaffer.job_lease enable trigger user")
        again = protocol.acquire(connection, job)
        assert (first.grant.fence, again.grant.fence) == (1, 1)
        # And still the first one commits nothing: the lease's id is part of what is verified.
        batch = protocol.begin(connection)
        with pytest.raises(LeaseLostError):
            protocol.commit(connection, first.lease, batch, since=None, until={"xid": 1, "key": "1"})
        db.roll_back(connection)


def test_a_lease_that_goes_with_its_jobs_name_is_no_reset(url: str) -> None:
    with protocol.session(url) as connection:
        protocol.register(connection, jobs.spec("before"))
        lease = protocol.acquire(connection, jobs.spec("before")).lease
        protocol.end(connection, lease)
    gaffer(url, "rename", "before", "after", "--yes")
    assert protocol.lease_row(url, "after")[0] == 1


# ── row-level security ───────────────────────────────────────────────────────────────────────────────────────────────


def test_a_lease_that_a_policy_hides_is_not_called_lost_to_another(url: str, runner: str, owner: str) -> None:
    job = jobs.spec("hidden")
    with protocol.session(runner) as connection:
        protocol.register(connection, job)
        lease = protocol.acquire(connection, job).lease
        assert "row-level" not in protocol.leases.lost(connection, lease)
        jobs.execute(owner, "alter table gaffer.job_lease enable row level security, force row level security")
        try:
            batch = protocol.begin(connection)
            with pytest.raises(LeaseLostError, match="Row-level security may hide it"):
                protocol.commit(connection, lease, batch, since=None, until={"xid": 1, "key": "1"})
            db.roll_back(connection)
            with pytest.raises(BadInputError, match="row-level security is on for tables of the schema gaffer"):
                jobs.run(job, runner)
            found = look(runner)["schema"]
            assert (found.mark, found.cure) == (Mark.WRONG, "alter table gaffer.job_lease disable row level security;")
            jobs.execute(owner, found.cure or "")
            assert "schema" not in look(runner)
            assert leases_renewed(connection, lease)  # it was not lost
        finally:
            jobs.execute(owner, "alter table gaffer.job_lease disable row level security, no force row level security")


def test_without_the_check_a_hidden_lease_looks_like_one_that_was_taken(
    url: str, runner: str, owner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = jobs.spec("unseen")
    with protocol.session(runner) as connection:
        protocol.register(connection, job)
        lease = protocol.acquire(connection, job).lease
        variants.replace(url, "lost_lease", {"::regclass and relrowsecurity)": "::regclass and false)"})
        jobs.execute(owner, "alter table gaffer.job_lease enable row level security, force row level security")
        try:
            batch = protocol.begin(connection)
            with pytest.raises(LeaseLostError, match="The lease was taken by another run, or by hand"):
                protocol.commit(connection, lease, batch, since=None, until={"xid": 1, "key": "1"})
            db.roll_back(connection)
            monkeypatch.setattr(migrate, "verify", horizon.now)
            assert "schema" not in look(runner)
            with pytest.raises(pg.InsufficientPrivilege):
                jobs.run(job, runner)
        finally:
            jobs.execute(owner, "alter table gaffer.job_lease disable row level security, no force row level security")
            variants.replace(url, "lost_lease", {})
        assert leases_renewed(connection, lease)  # nobody has taken it


def leases_renewed(connection: db.Connection, lease: protocol.Lease) -> bool:
    return protocol.leases.renew(connection, lease, timedelta(seconds=60))


# ── advisory locks ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["session", "transaction", "posing"])
def test_who_squats_on_an_advisory_lock_is_named_by_the_doctor_and_by_the_run(url: str, runner: str, kind: str) -> None:
    job = gd.JobSpec(
        "squatted", gd.NewRows("source", "id"), gd.Schedule("0 * * * *"), gd.Bounds(timeout="2s"), exclusion="advisory"
    )
    with protocol.session(runner) as connection:
        protocol.register(connection, job)
    with support.login(url) as mallory:
        name = "gaffer:squatted" if kind == "posing" else "mallory"
        with psycopg.connect(mallory, application_name=name, autocommit=kind == "session") as squatter:
            key = jobs.query(runner, "select gaffer.advisory_key('squatted')")[0][0]
            squatter.execute(f"select pg_advisory{'_xact' * (kind != 'session')}_lock({key})")
            pid = squatter.info.backend_pid
            who = f"backend {pid} (user {support.user_of(mallory)}, "
            found = look(runner)["advisory locks"]
            assert who in found.found
            assert found.cure == f"select pg_terminate_backend({pid});"
            record = jobs.run(job, runner, lambda batch: None)
            assert record.outcome == "capped"
            assert record.held_by is not None
            assert who in record.held_by.who
    assert "advisory locks" not in look(runner)


def blamed(url: str, runner: str, name: str) -> list[str]:
    """Who is said to squat on the lock of a batch that holds it itself."""
    job = gd.JobSpec(
        name, gd.NewRows("source", "id"), gd.Schedule("0 * * * *"), gd.Bounds(timeout="1m"), exclusion="advisory"
    )
    seen: list[list[str]] = []

    def work(batch: Batch) -> None:
        with protocol.session(url) as connection:
            seen.append([each.who for each in asked.squatters(connection) if each.job == name])
            assert jobs.query(url, "select count(*) from pg_locks where locktype = 'advisory' and granted") == [(1,)]

    jobs.run(job, runner, work)
    (found,) = seen
    return found


def test_a_batch_that_holds_its_own_lock_is_nobody_who_squats(url: str, runner: str) -> None:
    assert blamed(url, runner, "holding") == []


def look_less_closely(monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    text = inspect.getsource(asked.squatters)
    assert text.count(old) == 1
    broken = dict(vars(asked))
    exec(text.replace(old, new), broken)
    monkeypatch.setattr(asked, "squatters", broken["squatters"])


def test_a_doctor_that_believes_a_name_misses_who_poses_as_the_run(
    url: str, runner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_less_closely(monkeypatch, "or not exists (select from", "or false and not exists (select from")
    with pytest.raises(KeyError, match="advisory locks"):
        test_who_squats_on_an_advisory_lock_is_named_by_the_doctor_and_by_the_run(url, runner, "posing")


def test_a_doctor_that_does_not_ask_whose_the_lock_is_blames_the_batch(
    url: str, runner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_less_closely(monkeypatch, "where a.application_name <>", "where true or a.application_name <>")
    (who,) = blamed(url, runner, "blamed")
    assert "application gaffer:blamed" in who


# ── whose turn it is to look ─────────────────────────────────────────────────────────────────────────────────────────


def test_whoever_may_connect_keeps_nobody_from_looking(url: str, runner: str) -> None:
    with support.login(url) as mallory, psycopg.connect(mallory) as squatter, protocol.session(runner) as connection:
        squatter.execute("select pg_advisory_lock(hashtextextended('gaffer.begin_pass', 0))")
        with squatter.transaction(), pytest.raises(pg.InsufficientPrivilege), squatter.transaction():
            squatter.execute("select from gaffer.watch_turn for update")
        assert watch.look(connection, Watcher("here")) is not None


def test_a_turn_that_is_an_advisory_lock_is_anybodys(url: str, runner: str) -> None:
    ours = "perform from gaffer.watch_turn for update skip locked;"
    theirs = "perform where pg_try_advisory_xact_lock(hashtextextended('gaffer.begin_pass', 0));"
    variants.replace(url, "begin_pass", {ours: theirs})
    try:
        with pytest.raises(AssertionError):
            test_whoever_may_connect_keeps_nobody_from_looking(url, runner)
    finally:
        variants.replace(url, "begin_pass", {})


def test_only_where_it_is_said_does_a_function_take_an_advisory_lock(url: str) -> None:
    """Each of them is named by the doctor, with the one of migrations."""
    taking = (
        "select proname from pg_proc where pronamespace::regnamespace::text = 'gaffer' and prosrc ~ 'advisory_\\w*lock'"
    )
    assert jobs.query(url, taking) == [("lock_batch",)]


def test_who_squats_on_the_lock_of_migrations_is_named(url: str, runner: str) -> None:
    with support.login(url) as mallory, psycopg.connect(mallory, autocommit=True) as squatter:
        squatter.execute("select pg_advisory_lock(%s)", [migrate._LOCK])
        pid = squatter.info.backend_pid
        found = look(runner)["advisory locks"]
        assert f"the lock of migrations is held by backend {pid} (user {support.user_of(mallory)}, " in found.found
        assert found.cure == f"select pg_terminate_backend({pid});"
    assert "advisory locks" not in look(runner)


def test_a_pass_that_goes_on_for_long_is_no_silence(url: str, runner: str) -> None:
    jobs.execute(url, "alter function gaffer.begin_pass set lock_timeout = '200ms'")
    try:
        with psycopg.connect(runner, application_name="stuck") as stuck, protocol.session(runner) as connection:
            stuck.execute("select gaffer.begin_pass('stuck', null, '{}')")
            jobs.execute(url, "update gaffer.watch set last_pass_at = gaffer.clock()")
            assert watch.look(connection, Watcher("here")) is None
            jobs.execute(url, "update gaffer.watch set last_pass_at = gaffer.clock() - interval '61 s'")
            # As if it had gone on for longer than a pass takes.
            variants.replace(
                url,
                "begin_pass",
                {"c_pass constant interval := '1 minute'": "c_pass constant interval := '1 ms'",
                 "set lock_timeout = '5s'": "set lock_timeout = '200ms'"},
            )  # fmt: skip
            who = f"the turn to do so is held by backend {stuck.info.backend_pid} (user {support.user_of(runner)}, "
            told = watch.attend(connection, Watcher("here"), {}, jobs.LOG).problems
            assert [who in each for each in told] == [True], told
            assert told[0].endswith(f"select pg_terminate_backend({stuck.info.backend_pid})")
            checked = CliRunner().invoke(main, ["check", "--notify"], env={"GAFFER_DATABASE_URL": runner})
            assert (checked.exit_code, who in checked.output) == (1, True)
            stuck.rollback()
            assert watch.look(connection, Watcher("here")) is not None
    finally:
        variants.replace(url, "begin_pass", {})


@pytest.mark.parametrize(
    "name", ["on\ncall", "oncall\N{RIGHT-TO-LEFT OVERRIDE}", "a" * 64, "x" * 2_000_000, "OnCall", "", "1st", "a b"]
)  # fmt: skip
def test_a_receiver_is_called_by_a_name_only(url: str, runner: str, name: str) -> None:
    with jobs.connect(runner) as connection, pytest.raises(pg.CheckViolation):
        connection.execute("select gaffer.claim_notices(%s, 'warning')", [name])
    assert not is_receiver(name)


def test_who_is_called_by_no_name_does_not_keep_the_others_from_being_told(url: str, runner: str) -> None:
    with protocol.session(runner) as connection:
        environment = {"GAFFER_RECEIVER_ON-CALL": "https://hooks.example.org", "GAFFER_RECEIVER_" + "A" * 64: "x"}
        told = watch.attend(connection, Watcher("here"), environment, jobs.LOG).problems
        assert len([each for each in told if "a receiver's name is of A-Z, 0-9 and _" in each]) == 2
        names = [each.name for each in deliveries.receivers(connection)]
        assert set(names) >= {"log"}
        assert all(map(is_receiver, names))


# ── what is told ─────────────────────────────────────────────────────────────────────────────────────────────────────

HOSTILE = (
    "<!channel> <@U1> <http://evil.example|click> [x](http://evil.example) <b>b</b> <img src=x onerror=alert(1)>"
    "\r\nBcc: all@example.org\r\n\r\n\x1b[31mred\x1b[0m \x07\N{RIGHT-TO-LEFT OVERRIDE}gnp.exe\N{ZERO WIDTH SPACE}"
    "\N{ZERO WIDTH JOINER} @everyone"
)
UNSEEN = ["\r", "\x1b", "\x07", "\N{RIGHT-TO-LEFT OVERRIDE}", "\N{ZERO WIDTH SPACE}", "\N{ZERO WIDTH JOINER}"]
EVIL = [*UNSEEN, "<!", "<@", "<http", "<b>", "<img", "](http", "://evil", "evil.example", "@everyone"]


def hostile(url: str) -> None:
    """Of a watch, of who paused, and of who holds back what is new: the three texts of others' that are told."""
    job = jobs.spec("nightly")
    with protocol.session(url) as connection:
        protocol.register(connection, job)
    jobs.execute(url, "insert into gaffer.watch (name, every, first_seen_at, last_pass_at) values"
                      " (%s, '1 min', now() - interval '2 d', now() - interval '1 d')", HOSTILE)  # fmt: skip
    jobs.execute(url, "update gaffer.job set paused_at = now() - interval '30 d', paused_by = %s, pause_reason = %s,"
                      " held_since = now() - interval '9 h', held_by_since = now() - interval '9 h',"
                      " held_by = jsonb_build_object('who', %s::text, 'xid', '7', 'cure', %s::text)"
                      " where name = 'nightly'", HOSTILE, HOSTILE, HOSTILE, HOSTILE)  # fmt: skip


def told(url: str, caplog: pytest.LogCaptureFixture, *, mails: bool) -> dict[str, str]:
    """What each kind of sink was told."""
    with HttpReceiver() as hook, MailReceiver("pw") as mail, protocol.session(url) as connection:
        environment = {
            "GAFFER_RECEIVER_HOOK": hook.url,
            "GAFFER_RECEIVER_HOOK_PRIVATE": "1",
        }
        if mails:  # by Apprise, whose process takes a second for each
            environment["GAFFER_RECEIVER_MAIL"] = f"{mail.url('pw')}&format=html"
        with caplog.at_level(logging.INFO, "gaffer"):
            report = watch.look(connection, Watcher("here"))
            watch.speak(connection, report, environment, jobs.LOG, budget=timedelta(minutes=2))
        assert bool(mail.mails) is mails
        assert all(each["To"] == "oncall@example.org" for each in mail.mails)
        assert all(each["Bcc"] is None for each in mail.mails)
        bodies = [each.get_body() for each in mail.mails]
        return {
            "webhook": " ".join(_texts(hook.messages)),
            "subject": " ".join(str(each["Subject"]) for each in mail.mails),
            "mail": " ".join(each.get_content() for each in bodies if each is not None).replace("\r\n", "\n"),
            "log": "\n".join(each.getMessage() for each in caplog.records),
        }


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _texts(each)


def evil(said: dict[str, str]) -> set[tuple[str, str]]:
    """By sink, what of it got there as it was. A log's line has escapes of its own."""
    return {(sink, each) for sink, text in said.items() for each in EVIL if each in text}


def test_what_others_wrote_is_only_text_wherever_it_is_told(
    gaffer_databases: Databases, caplog: pytest.LogCaptureFixture
) -> None:
    with gaffer_databases.scratch() as url:
        hostile(url)
        said = told(url, caplog, mails=True)
        assert all("nightly" in said[sink] for sink in ("webhook", "subject", "mail", "log"))
        assert "red" in said["webhook"]  # it was told
        assert evil(said) == set()
        shown = gaffer(url, "check") + gaffer(url, "status") + gaffer(url, "alerts", "list")
        assert set(UNSEEN) & set(shown) == set()


def test_what_is_told_as_it_was_written_is_found(
    gaffer_databases: Databases, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(notice, "plain", lambda text: text)
    with gaffer_databases.scratch() as url:
        hostile(url)
        found = evil(told(url, caplog, mails=False))
    assert {each for sink, each in found if sink == "webhook"} == set(EVIL)
    assert "log" in {sink for sink, _ in found}


# ── where it is told ─────────────────────────────────────────────────────────────────────────────────────────────────

METADATA = [
    "169.254.169.254", "2852039166", "0xa9fea9fe", "0xA9.0xFE.0xA9.0xFE", "0251.0376.0251.0376", "025177524776",
    "169.254.43518", "169.16689662", "[::ffff:169.254.169.254]", "[::ffff:a9fe:a9fe]", "[0:0:0:0:0:ffff:a9fe:a9fe]",
    "[64:ff9b::169.254.169.254]", "[fd00:ec2::254]", "[fe80::a9fe:a9fe]",
]  # fmt: skip
OURSELVES = [
    "localhost", "LOCALHOST", "localhost.", "127.1", "127.0.0.1", "127.255.255.254", "0177.0.0.1", "0x7f.1",
    "0x7f000001", "017700000001", "2130706433", "0", "0.0.0.0", "[::]", "[::1]", "[0000:0000::0001]", "[::ffff:7f00:1]",
    "[::7f00:1]", "[2002:7f00:1::]", "%6c%6f%63alhost",
]  # fmt: skip
WITHIN = [
    "10.0.0.1",
    "0x0a000001",
    "172.16.0.1",
    "192.168.0.1",
    "0300.0250.0.1",
    "100.64.0.1",
    "[fc00::1]",
    "[fec0::1]",
]


@pytest.mark.parametrize("host", [*METADATA, *OURSELVES, *WITHIN])
def test_no_spelling_of_an_address_that_is_not_public_is_gone_to(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(*_: Any) -> None:
        raise AssertionError("it connects")

    monkeypatch.setattr(socket.socket, "connect", connect)
    for at in (host, f"{host}:443", f"user:secret@{host}", f"hooks.example.org@{host}"):
        where = web.target("X", {"X": f"https://{at}/latest/meta-data/"})
        with pytest.raises(NotDeliveredError) as refused:
            web.ask(where, "POST", limit=timedelta(seconds=5), body=b"{}")
        assert "secret" not in str(refused.value)
        assert "it connects" not in str(refused.value)


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd", "FILE:///etc/passwd", "gopher://127.0.0.1:6379/_x", "ftp://127.0.0.1/",
        "dict://127.0.0.1/", "https:///etc/passwd", "https://exa mple.org", "https://example.org\r\nX: y",
        "https://１２７.0.0.1/", "https://example.org:0/", "https://example.org:99999/", "https://[::1",
        "//example.org",
    ],
)  # fmt: skip
def test_what_is_no_address_of_the_web_is_refused(url: str) -> None:
    with pytest.raises(BadInputError):
        web.target("X", {"X": url})


class Rebinding:
    """A name server of somebody's: the first answer is a public address, and every later one is this host's."""

    def __init__(self) -> None:
        self.asked = 0
        self._real = socket.getaddrinfo

    def __call__(self, host: str, port: int, *args: Any, **kwargs: Any) -> Any:
        self.asked += 1
        return self._real("192.0.2.7" if self.asked == 1 else "127.0.0.1", port, *args, **kwargs)


def naive(line: Any, where: web.Target) -> socket.socket:
    """Checks the name, and connects to the name."""
    found = socket.getaddrinfo(where.host, where.port, type=socket.SOCK_STREAM)
    assert all(str(address[0]) != "127.0.0.1" for *_, address in found)
    return socket.create_connection((where.host, where.port), timeout=2)


@pytest.mark.parametrize("is_pinned", [True, False])
def test_a_name_that_is_bound_anew_leads_nowhere_else(is_pinned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    names = Rebinding()
    monkeypatch.setattr(socket, "getaddrinfo", names)
    monkeypatch.setattr(web, "is_public", lambda address: address != "127.0.0.1")  # 192.0.2.7 leads nowhere
    if not is_pinned:
        monkeypatch.setattr(web, "_connect", naive)
    with HttpReceiver() as metadata:
        where = web.target("X", {"X": f"http://rebound.example.org:{metadata.port}/", "X_PRIVATE": "1"})
        where = web.Target(**{**vars(where), "private": False})
        if is_pinned:
            with pytest.raises(NotDeliveredError):
                web.ask(where, "POST", limit=timedelta(seconds=1), body=b"{}")
        else:
            web.ask(where, "POST", limit=timedelta(seconds=5), body=b"{}")
        assert (names.asked, len(metadata.paths)) == ((1, 0) if is_pinned else (2, 1))


# ── the folder of the private server ─────────────────────────────────────────────────────────────────────────────────

SOMEBODY = 65534


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / ".gaffer"


def untouched(path: Path) -> dict[str, tuple[int, int, bytes]]:
    return {
        str(each.relative_to(path)): (info.st_mode, info.st_uid, each.read_bytes() if each.is_file() else b"")
        for each in sorted(path.rglob("*"))
        if (info := each.lstat())
    }


REFUSED = r"belongs to another user|can be written by anybody"


def use(folder: Path) -> None:
    for what in (local.start, local.keep, local.running, local.stop, local.reset):
        with (
            pytest.raises(LocalPostgresError, match=REFUSED)
            if what in (local.start, local.keep)
            else suppress(
                LocalPostgresError  # or it finds none
            )
        ):
            what(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to somebody else")
@pytest.mark.parametrize("kind", ["empty", "link", "home", "server"])
def test_a_folder_that_somebody_made_before_is_not_used(folder: Path, tmp_path: Path, kind: str) -> None:
    valuable = tmp_path / "valuable"
    valuable.mkdir()
    (valuable / "log").write_text("x" * 11_000_000)  # what a log of ours would be cut to
    (valuable / "keep").write_text("mine")
    folder.mkdir()
    marker = folder / "gaffer-postgres"
    if kind == "link":
        marker.symlink_to(valuable)
        os.lchown(marker, SOMEBODY, SOMEBODY)
    elif kind in ("home", "server"):
        marker.mkdir(0o755)
        if kind == "server":
            (marker / "cluster" / "data").mkdir(parents=True)
            (marker / "cluster" / "password").write_text("known to him")
        for each in [marker, *marker.rglob("*")]:
            os.chown(each, SOMEBODY, SOMEBODY)
    if kind == "empty":
        os.chown(folder, SOMEBODY, SOMEBODY)
    before = untouched(tmp_path)
    use(folder)
    assert untouched(tmp_path) == before


@pytest.mark.parametrize("of", ["folder", "home"])
def test_a_folder_that_anybody_may_write_is_not_used(folder: Path, of: str) -> None:
    (folder / "gaffer-postgres").mkdir(parents=True)
    loose = folder if of == "folder" else folder / "gaffer-postgres"
    loose.chmod(0o777)
    before = untouched(folder)
    use(folder)
    assert untouched(folder) == before
    with pytest.raises(LocalPostgresError, match=f"run: chmod o-w .*{loose.name}"):
        local.start(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to somebody else")
def test_a_folder_that_is_not_looked_at_leads_to_other_files(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_refuse_foreign", lambda *_: None)
    valuable = tmp_path / "valuable"
    valuable.mkdir()
    (valuable / "keep").write_text("mine")
    folder.mkdir()
    (folder / "gaffer-postgres").symlink_to(valuable)
    os.lchown(folder / "gaffer-postgres", SOMEBODY, SOMEBODY)
    local.stop(folder)
    assert not (valuable / "keep").exists()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with data, whose server is stopped."""
    path = tmp_path_factory.mktemp("served") / ".gaffer"
    local.start(path, fsync=False)
    local.release(path)
    yield path
    local.stop(path)
    local.reset(path, force=True)


def test_a_new_folder_is_nobody_elses(served: Path) -> None:
    home = Path(os.path.realpath(served / "gaffer-postgres"))
    assert not stat.S_IMODE(served.stat().st_mode) & stat.S_IWOTH
    assert stat.S_IMODE(home.stat().st_mode) in (0o700, 0o711)
    assert stat.S_IMODE((home / "cluster").stat().st_mode) == 0o700
    assert stat.S_IMODE((home / "log").stat().st_mode) == 0o600


@pytest.mark.parametrize("kind", ["link", "file", "somebody's"])
def test_who_squats_on_the_sockets_is_not_talked_to_nor_cleaned_up_after(
    served: Path, tmp_path: Path, kind: str
) -> None:
    sockets = local._Server(served).sockets
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "kept").touch()
    with ExitStack() as stack:
        if kind == "link":
            sockets.symlink_to(victim)
            stack.callback(sockets.unlink)
        elif kind == "file":
            sockets.touch()
            stack.callback(sockets.unlink)
        elif os.geteuid():
            pytest.skip("only root can give a file to somebody else")
        else:
            sockets.mkdir(0o777)
            os.chown(sockets, 1, 1)
            stack.callback(sockets.rmdir)
        with pytest.raises(LocalPostgresError, match="belongs to somebody else; have it removed"):
            local.start(served, fsync=False)
        assert (victim / "kept").exists()
    local.release(served)


@pytest.mark.parametrize("is_looked_at", [True, False])
def test_a_pid_file_that_names_another_process_ends_nobody(
    served: Path, is_looked_at: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = Path(os.path.realpath(served / "gaffer-postgres")) / "cluster" / "data" / "postmaster.pid"
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    if not is_looked_at:
        monkeypatch.setattr(local._Server, "postmaster", lambda self: int(file.read_text().split()[0]))
        monkeypatch.setattr(local._Server, "is_gone", lambda self: bystander.poll() is not None)
    try:
        file.write_text(f"{bystander.pid}\n")
        local.stop(served)
        time.sleep(0.05)
        assert (bystander.poll() is None) is is_looked_at
    finally:
        bystander.send_signal(signal.SIGKILL)
        bystander.wait()
        file.unlink(missing_ok=True)
