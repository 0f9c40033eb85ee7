"""`gaffer doctor`: each thing is broken for real, is said, and is well again once its cure was pasted."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest
from psycopg import conninfo, sql

from gaffer_dagster import local
from gaffer_dagster.domain import health, zones
from gaffer_dagster.domain.alert import Alerts
from gaffer_dagster.domain.due import NewRows, PendingRows
from gaffer_dagster.domain.health import Check, Mark
from gaffer_dagster.domain.schedule import Schedule
from gaffer_dagster.domain.spec import JobSpec
from gaffer_dagster.engine import doctor
from gaffer_dagster.engine.registry import Definition, register_all
from gaffer_dagster.store import db
from gaffer_dagster.store import doctor as asked
from gaffer_dagster.testing import Clock, Databases
from tests.postgres.test_migrations import RUNNER
from tests.support import jobs, protocol
from tests.support.pgbouncer import pooled
from tests.support.receivers import HttpReceiver, certificate
from tests.support.servers import server_with
from tests.support.warm import gaffer


@pytest.fixture(scope="module")
def server_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server whose settings are ours, as it would be in earnest: with fsync, and prepared transactions."""
    with server_with(tmp_path_factory.mktemp("doctor"), "max_prepared_transactions = 5") as url:
        yield url


@pytest.fixture(scope="module")
def gaffer_databases(server_url: str) -> Iterator[Databases]:
    with Databases(server_url) as databases:
        yield databases


@pytest.fixture
def shop(url: str) -> str:
    """All is well: a job that works, a watch that looks."""
    jobs.make_source(url, 3)
    jobs.run(jobs.spec(), url)
    jobs.execute(url, "insert into gaffer.watch values ('dagster:x', '30s', now(), now(), 1, '{copy_rows}')")
    return url


HERE = "do $$ begin execute 'alter database ' || quote_ident(current_database()) || $q$ {}$q$; end $$"


def look(url: str) -> list[Check]:
    return list(doctor.of_database(url))


def not_well(url: str) -> dict[str, Check]:
    return {check.name: check for check in look(url) if check.mark is not Mark.OK}


def paste(url: str, cure: str | None) -> None:
    assert cure is not None
    with jobs.connect(url) as connection:
        for statement in cure.split(";"):
            if statement.strip():
                connection.execute(statement)


def reload(url: str) -> None:
    """Until the server goes by what its files say."""
    name = f"gaffer.reloaded_{uuid4().hex[:8]}"
    jobs.execute(url, f"alter system set {name} = 'yes'")
    jobs.execute(url, "select pg_reload_conf()")
    protocol.until(lambda: jobs.query(url, f"select current_setting('{name}', true) = 'yes'") == [(True,)])
    jobs.execute(url, f"alter system reset {name}")


def test_where_all_is_well_nothing_else_is_said(shop: str) -> None:
    assert not_well(shop) == {}
    names = {check.name for check in look(shop)}
    assert len(names) > 25
    assert {"reachable", "copy_rows", "guards", "incidents", "clock"} <= names


# ── settings ─────────────────────────────────────────────────────────────────────────────────────────────────────────

SETTINGS = [
    ("system", "fsync", "off", "durability", Mark.WRONG, "fsync is off"),
    ("system", "full_page_writes", "off", "durability", Mark.WRONG, "full_page_writes is off"),
    ("system", "synchronous_commit", "local", "synchronous commit", Mark.WARNING, "synchronous_commit is local"),
    ("role", "synchronous_commit", "off", "synchronous commit", Mark.WARNING, "synchronous_commit is off"),
    ("database", "synchronous_commit", "off", "synchronous commit", Mark.WARNING, "synchronous_commit is off"),
    ("role in database", "synchronous_commit", "off", "synchronous commit", Mark.WARNING, "is off"),
    ("system", "autovacuum", "off", "vacuum", Mark.WARNING, "autovacuum is off"),
    ("role", "track_counts", "off", "vacuum", Mark.WARNING, "track_counts is off"),
    ("role", "statement_timeout", "1s", "timeouts", Mark.WARNING, "statement_timeout 1 s"),
    ("database", "lock_timeout", "200ms", "timeouts", Mark.WARNING, "lock_timeout 0.2 s"),
    ("database", "idle_in_transaction_session_timeout", "2s", "timeouts", Mark.WARNING, "timeout 2 s"),
    ("role", "idle_session_timeout", "30s", "timeouts", Mark.WARNING, "idle_session_timeout 30 s"),
    ("database", "default_transaction_read_only", "on", "writable", Mark.WRONG, "nothing can be written"),
    ("role", "search_path", "gaffer, public", "search path", Mark.WARNING, "our tables"),
    ("database", "search_path", '"$user", public', "search path", Mark.WARNING, "our tables"),  # Postgres's default
    ("system", "synchronous_standby_names", "nosuch", "replication", Mark.WRONG, "every COMMIT waits"),
]


@pytest.mark.parametrize(
    ("of", "setting", "value", "name", "mark", "said"), SETTINGS, ids=[f"{row[0]} {row[1]}" for row in SETTINGS]
)
def test_a_setting_that_does_harm_is_said_until_its_cure_is_pasted(
    shop: str, of: str, setting: str, value: str, name: str, mark: Mark, said: str
) -> None:
    parts = db.parse_url(shop)
    role, database = parts["user"], parts["dbname"]
    whose = {
        "system": "system",
        "role": f"role {role}",
        "database": f"database {database}",
        "role in database": f"role {role} in database {database}",
    }[of]
    before = jobs.query(shop, "select unnest(setconfig) from pg_db_role_setting where setdatabase = 0")
    written = f"'{value}'" if of == "system" else value if setting == "search_path" else f"'{value}'"
    try:
        jobs.execute(shop, f"alter {whose} set {setting} = {written}")
        reload(shop)
        found = not_well(shop)
        assert set(found) == {name}, found
        assert (found[name].mark, said in found[name].found) == (mark, True), found[name]
        paste(shop, found[name].cure)
        reload(shop)
        assert not_well(shop) == {}
    finally:
        with closing(psycopg.connect(shop, autocommit=True)) as connection:
            connection.execute("set default_transaction_read_only = off")
            for each in (f"role {role} in database {database}", f"database {database}", "system"):
                connection.execute(f"alter {each} reset {setting}")
            connection.execute(f"alter role {role} reset {setting}")
            for (line,) in before:
                key, _, kept = line.partition("=")
                connection.execute(f"alter role {role} set {key} = {kept}")
        reload(shop)


def test_a_limit_of_the_role_is_counted(shop: str, stranger: str) -> None:
    role = db.parse_url(stranger)["user"]
    paste(shop, f"grant usage on schema gaffer to {role}; grant all on all tables in schema gaffer to {role};"
          f"grant execute on all functions in schema gaffer to {role}; grant all on source to {role}")  # fmt: skip
    jobs.execute(shop, f"alter role {role} connection limit 2")
    found = not_well(stranger)
    assert set(found) == {"connections", "rights"}, found
    # As an older page on deploying had it.
    assert "what people do (ack_alert, adopt, allow_writes and 13 more): more than a runner" in found["rights"].found
    paste(shop, found["rights"].cure)
    assert "1 of 2 that the role may have" in found["connections"].found
    paste(shop, found["connections"].cure)
    assert not_well(stranger) == {}


def test_a_database_of_another_encoding(server_url: str) -> None:
    with jobs.connect(server_url) as connection:
        connection.execute("create database latin encoding 'LATIN1' locale 'C' template template0")
    try:
        assert "LATIN1" in not_well(db.with_database(server_url, "latin"))["encoding"].found
    finally:
        jobs.execute(server_url, "drop database latin with (force)")


# ── the schema, and what a role may ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "said", "cure"),
    [
        ("delete from gaffer.migration where number = (select max(number) from gaffer.migration)", "this package needs",
         "gaffer migrate"),
        ("insert into gaffer.migration values (999, 'later', 'x', now())", "knows only", "pip install --upgrade"),
        ("update gaffer.migration set checksum = 'x' where number = 1", "edited", "put its file back"),
        ("drop schema gaffer cascade", "no tables", "gaffer migrate"),
        (HERE.format("set datestyle = 'SQL, DMY'"), "is not ISO", "set datestyle to 'ISO'"),
    ],
)  # fmt: skip
def test_a_schema_that_is_not_what_it_must_be(shop: str, text: str, said: str, cure: str) -> None:
    jobs.execute(shop, text)
    found = look(shop)
    (schema,) = [check for check in found if check.name == "schema"]
    assert (schema.mark, said in schema.found, cure in (schema.cure or "")) == (Mark.WRONG, True, True), schema
    # The server is looked at all the same, and what was left out is said.
    assert {check.name for check in found} >= {"reachable", "version", "pooler", "open transactions"}
    assert [check.part for check in found if check.mark is Mark.SKIPPED] == ["jobs", "tables"]
    assert (doctor.heartbeats(shop), doctor.slots(shop)) in [([], {}), ([], {"copy_rows": 1})]
    if schema.cure is not None and schema.cure.startswith("alter role"):
        try:
            paste(shop, schema.cure)
            assert not_well(shop) == {}
        finally:
            jobs.execute(shop, "alter role current_user reset datestyle")


def test_a_workers_rights_are_those_that_the_documents_name() -> None:
    functions = re.search(r"grant execute on function (.*?) to", RUNNER, re.DOTALL)
    tables = re.search(r"grant select on (.*?) to", RUNNER, re.DOTALL)
    assert functions is not None
    assert tables is not None
    assert sorted(re.findall(r"gaffer\.(\w+)", functions[1])) == asked.RUNNER_FUNCTIONS
    assert sorted(re.findall(r"gaffer\.(\w+)", tables[1])) == asked.RUNNER_TABLES


def test_a_role_that_lacks_rights_is_given_what_to_grant(shop: str, stranger: str) -> None:
    role = db.parse_url(stranger)["user"]
    found = {check.name: check for check in look(stranger)}
    assert found["schema"].mark is Mark.WRONG
    paste(shop, found["schema"].cure)
    worker = not_well(stranger)
    # A worker may not look at other jobs, and what cannot be looked at is not called well.
    assert {check.mark for check in worker.values()} == {Mark.UNKNOWN}, worker
    assert {"known", "incidents", "sources"} <= set(worker)
    assert worker["known"].cure == f"grant select on all tables in schema gaffer to {role};"
    jobs.execute(shop, f"grant select on source to {role}; grant insert on target to {role}")
    assert jobs.run(jobs.spec(), stranger).outcome.value == "succeeded"
    jobs.execute(
        shop, f"revoke execute on function gaffer.renew from {role}; revoke select on gaffer.job_runs from {role}"
    )
    rights = not_well(stranger)["rights"]
    assert rights.mark is Mark.WRONG
    assert (
        rights.cure == f"grant execute on function gaffer.renew to {role}; grant select on gaffer.job_runs to {role};"
    )
    paste(shop, rights.cure)
    assert "rights" not in not_well(stranger)


# ── clocks and zones ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("seconds", "mark", "said"),
    [(-10, Mark.WARNING, "10.0 s ahead"), (10, Mark.WARNING, "10.0 s behind"), (600, Mark.WRONG, "600.0 s behind")],
)
def test_a_clock_that_is_apart(url: str, seconds: int, mark: Mark, said: str) -> None:
    jobs.make_source(url)
    jobs.run(jobs.spec(), url)
    Clock(url).advance(timedelta(seconds=seconds))
    found = not_well(url)["clock"]
    assert (found.mark, said in found.found) == (mark, True), found


def test_zone_data_that_differ(shop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if Berlin's next change had been put off by a day here."""
    with protocol.session(shop) as connection:
        spec = JobSpec("berlin", NewRows("source", "id"), Schedule("0 6 * * *", "Europe/Berlin"))
        register_all(connection, [Definition(spec, None)])
    assert "tz data" not in not_well(shop)
    probes = zones.probes
    later = timedelta(days=1)
    monkeypatch.setattr(
        zones, "probes", lambda zone, now, until: [(at + later, offset) for at, offset in probes(zone, now, until)]
    )
    found = not_well(shop)["tz data"]
    assert (found.mark, "another clock for Europe/Berlin" in found.found) == (Mark.WARNING, True), found


# ── what stays open ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stays open for a second is called old."""
    monkeypatch.setattr(health, "_MINUTES", timedelta(seconds=1))


@pytest.mark.usefixtures("soon")
def test_an_open_transaction_is_named_and_ended_by_its_cure(shop: str) -> None:
    with closing(psycopg.connect(shop, application_name="forgotten")) as other:
        other.execute("insert into source (value) values ('x')")
        found = protocol.until(lambda: not_well(shop).get("open transactions"))
        assert (found.mark, "forgotten" in found.found) == (Mark.WARNING, True), found
        paste(shop, found.cure)
        protocol.until(lambda: "open transactions" not in not_well(shop))


def test_whose_age_a_role_may_not_see_it_is_told_what_to_grant(shop: str, stranger: str) -> None:
    with closing(psycopg.connect(shop, application_name="forgotten")) as other:
        other.execute("insert into source (value) values ('x')")
        found = not_well(stranger)["open transactions"]
        assert (found.mark, "forgotten" in found.found) == (Mark.UNKNOWN, True), found
        paste(shop, found.cure)
        assert "open transactions" not in not_well(stranger)  # it is young


def test_a_reader_holds_nothing_up(shop: str) -> None:
    with closing(psycopg.connect(shop)) as other:
        other.execute("select * from source")
        assert not_well(shop) == {}


@pytest.mark.usefixtures("soon")
def test_a_forgotten_prepared_transaction_is_rolled_back_by_its_cure(shop: str) -> None:
    with jobs.connect(shop) as connection:
        connection.execute("begin; insert into source (value) values ('x'); prepare transaction 'it''s'")
    young = {check.name: check for check in look(shop)}["prepared transactions"]
    assert (young.mark, young.found) == (Mark.OK, "1 of 5 that there may be")
    protocol.until(lambda: set(not_well(shop)) == {"prepared transactions", "open transactions"})
    found = not_well(shop)
    assert "'it''s'" in found["prepared transactions"].found
    paste(shop, found["prepared transactions"].cure)
    assert not_well(shop) == {}


# ── poolers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("mode", "mark"), [("session", Mark.OK), ("transaction", Mark.OK), ("statement", Mark.WRONG)])
def test_the_mode_of_a_pooler_is_told(shop: str, mode: str, mark: Mark) -> None:
    with pooled(shop, pool_mode=mode) as through:
        found = {check.name: check for check in look(through)}
    assert found["pooler"].mark is mark, found["pooler"]
    assert f"in {mode} mode" in found["pooler"].found
    if mark is Mark.OK:
        assert {name for name, check in found.items() if check.mark is not Mark.OK} == set()
    else:
        assert {"reachable", "version", "guards", "schema"} <= set(found)


# ── jobs ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

JOBS = [
    ("update gaffer.job set vanished_at = now() - interval '1 h'", "vanished", Mark.WRONG, "gaffer retire copy_rows"),
    ("update gaffer.job set returned_at = array[now(), now(), now()]", "versions", Mark.WARNING, ""),
    ("update gaffer.job set paused_at = now() - interval '8 days'", "pauses", Mark.WARNING, "gaffer resume copy_rows"),
    ("update gaffer.watch set last_pass_at = now() - interval '1 hour'", "watch", Mark.WRONG, ""),
    ("update gaffer.watch set every = null", "watch", Mark.WARNING, "gaffer watch"),
    (
        "update gaffer.job set consecutive_failures = 3, failed_at = array_fill(now() - interval '1 s', array[3]),"
        " rules_at = rules_at - interval '1 day'",
        "incidents", Mark.WRONG, "gaffer check",
    ),
    ("update gaffer.job set parked = 1, parked_at = now()", "incidents", Mark.WARNING, "gaffer check"),
    ("update gaffer.job set retired_at = now()", "known", Mark.UNKNOWN, "gaffer register MODULE"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "name", "mark", "cure"), JOBS, ids=[f"{row[1]} {row[2]}" for row in JOBS])
def test_what_is_the_matter_with_jobs_is_told(shop: str, text: str, name: str, mark: Mark, cure: str) -> None:
    jobs.execute(shop, text)
    found = not_well(shop)
    assert set(found) == {name}, found
    assert (found[name].mark, cure in (found[name].cure or "")) == (mark, True), found[name]
    assert ("no watch has opened" in found[name].found) == (name == "incidents")


def test_a_job_without_schedule_that_never_ran_is_told_after_a_week(shop: str) -> None:
    with protocol.session(shop) as connection:
        register_all(connection, [Definition(JobSpec("idle", NewRows("source", "id")), None)])
    assert not_well(shop) == {}
    jobs.execute(shop, "update gaffer.job set first_seen_at = now() - interval '8 days' where name = 'idle'")
    found = not_well(shop)
    assert set(found) == {"never run"}, found
    assert "idle" in found["never run"].found


def test_what_the_code_at_hand_has_and_the_database_does_not_is_told(shop: str) -> None:
    definition = Definition(jobs.spec(batch_rows=7), None)
    (found,) = [check for check in doctor.of_database(shop, [definition]) if check.name == "registered"]
    assert (found.mark, "copy_rows" in found.found) == (Mark.WARNING, True), found
    with protocol.session(shop) as connection:
        register_all(connection, [definition])
    (found,) = [check for check in doctor.of_database(shop, [definition]) if check.name == "registered"]
    assert found.mark is Mark.OK


def test_a_receiver_that_nobody_knows_is_told(shop: str) -> None:
    spec = JobSpec("heard", NewRows("source", "id"), alerts=Alerts(receivers=["oncall"], heartbeat="NIGHTLY_URL"))
    with protocol.session(shop) as connection:
        register_all(connection, [Definition(spec, None)])
    found = not_well(shop)
    assert set(found) == {"receivers"}, found
    assert found["receivers"].cure == "set GAFFER_RECEIVER_ONCALL where one runs"
    assert doctor.heartbeats(shop) == ["NIGHTLY_URL"]


# ── tables ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_right_that_a_role_lacks_on_a_jobs_table_is_what_it_is_told_to_grant(shop: str, stranger: str) -> None:
    role = db.parse_url(stranger)["user"]
    jobs.execute(shop, RUNNER.format(role=role))
    jobs.execute(shop, f"grant select on all tables in schema gaffer to {role}")
    jobs.execute(shop, "create schema other; create table other.queue (id int primary key, done_at timestamptz)")
    jobs.execute(shop, "create index on other.queue (id) where done_at is null")
    due = PendingRows("other.queue", "id", pending="done_at is null", done="done_at = now()")
    with protocol.session(shop) as connection:
        register_all(connection, [Definition(JobSpec("claim", due), None)])
    found = not_well(stranger)
    assert set(found) == {"claim", "copy_rows"}, found
    assert found["copy_rows"].cure == f"grant select on public.source to {role};"
    assert (found["claim"].cure or "").startswith(f"grant usage on schema other to {role}; grant select, update on")
    for each in found.values():
        paste(shop, each.cure)
    assert not_well(stranger) == {}


def test_a_search_path_that_hides_a_jobs_table_is_wrong_and_is_its_cure(shop: str) -> None:
    jobs.execute(shop, HERE.format("set search_path = gaffer"))
    found = not_well(shop)
    assert set(found) == {"search path", "copy_rows"}, found
    assert {check.mark for check in found.values()} == {Mark.WRONG}
    assert found["search path"].cure == found["copy_rows"].cure
    paste(shop, found["copy_rows"].cure)
    assert not_well(shop) == {}


@pytest.mark.parametrize(
    ("due", "said"),
    [
        (NewRows("source", "id", where="amont > 3"), 'column "amont" does not exist'),
        (NewRows("source", "id", cursor="at", settle="1h", where="value +"), "syntax error"),
        (PendingRows("source", "id", pending="amont > 3", done="value = ''"), 'column "amont" does not exist'),
        (PendingRows("source", "id", pending="value = 'x'", done="valeu = ''"), 'column "valeu"'),
    ],
)
def test_a_condition_that_cannot_be_used_is_told_before_a_run_meets_it(
    shop: str, due: NewRows | PendingRows, said: str
) -> None:
    jobs.execute(shop, "alter table source add column at timestamptz not null default now()")
    with protocol.session(shop) as connection:
        register_all(connection, [Definition(JobSpec("picky", due), None)])
    found = not_well(shop)
    assert set(found) == {"picky"}, found
    assert (found["picky"].mark, said in found["picky"].found) == (Mark.WRONG, True), found
    assert found["picky"].cure == "mend it"


INDEX = "(select indexrelid::regclass::text from pg_index where indrelid = 'source'::regclass and not indisprimary)"
TABLES = [
    ("alter table source disable trigger gaffer_stamp_xid", Mark.WRONG, "the trigger that keeps it"),
    ("alter table source enable trigger gaffer_stamp_xid", Mark.WRONG, "the trigger that keeps it"),
    ("drop trigger gaffer_stamp_xid on source", Mark.WRONG, "the trigger that keeps it"),
    (f"do $$ begin execute 'drop index ' || {INDEX}; end $$", Mark.WRONG, "an index on"),
    ("alter table source drop column gaffer_xid cascade", Mark.WRONG, "the column gaffer_xid"),
    ("drop table source", Mark.WRONG, "there is no table 'source' here"),
    ("update gaffer.job_watermark set cluster = '1'", Mark.WRONG, "was not counted by this database"),
]


@pytest.mark.parametrize(("text", "mark", "said"), TABLES, ids=[row[0][:40] for row in TABLES])
def test_a_table_that_lacks_something_is_told_and_prepared_by_its_cure(
    shop: str, tmp_path: Path, text: str, mark: Mark, said: str
) -> None:
    jobs.execute(shop, text)
    found = not_well(shop)
    assert set(found) == {"copy_rows"}, found
    assert (found["copy_rows"].mark, said in found["copy_rows"].found) == (mark, True), found["copy_rows"]
    cure = found["copy_rows"].cure
    if cure is not None and cure.startswith("gaffer prepare"):
        assert gaffer(shop, tmp_path, *shlex.split(cure)[1:]).returncode == 0
        assert not_well(shop) == {}
    else:
        assert cure in ("qualify it, or create it", "gaffer watermark adopt --dry-run")


def test_a_pending_table_without_its_index_is_told_and_prepared_by_its_cure(shop: str, tmp_path: Path) -> None:
    jobs.execute(shop, "create table queue (id int primary key, done_at timestamptz)")
    due = PendingRows("queue", "id", pending="done_at is null", done="done_at = now()")
    with protocol.session(shop) as connection:
        register_all(connection, [Definition(JobSpec("claim", due), None)])
    found = not_well(shop)
    assert (set(found), found["claim"].mark) == ({"claim"}, Mark.WARNING), found
    assert gaffer(shop, tmp_path, *shlex.split(found["claim"].cure or "")[1:]).returncode == 0
    assert not_well(shop) == {}
    jobs.execute(shop, "alter table queue drop column done_at")
    assert not_well(shop)["claim"].mark is Mark.WRONG


def test_a_table_that_is_not_protected_as_its_job_demands(shop: str, tmp_path: Path) -> None:
    spec = JobSpec("guarded", NewRows("source", "id"), protect=["target"])
    with protocol.session(shop) as connection:
        register_all(connection, [Definition(spec, None)])
    found = not_well(shop)
    assert (set(found), found["guarded"].mark) == ({"guarded"}, Mark.WRONG), found
    assert gaffer(shop, tmp_path, *shlex.split(found["guarded"].cure or "")[1:], "--yes").returncode == 0
    assert not_well(shop) == {}
    jobs.execute(shop, "alter table target disable trigger gaffer_seal; create table late () inherits (target)")
    found = not_well(shop)
    assert set(found) == {"guarded", "guards"}, found
    assert "by way of late, target" in found["guards"].found
    assert gaffer(shop, tmp_path, *shlex.split(found["guards"].cure or "")[1:], "--yes").returncode == 0
    assert not_well(shop) == {}


def test_rows_that_a_policy_hides_are_told_by_the_doctor_and_by_the_run(
    shop: str, stranger: str, caplog: pytest.LogCaptureFixture
) -> None:
    role = db.parse_url(stranger)["user"]
    jobs.execute(shop, RUNNER.format(role=role))
    paste(shop, f"grant select on all tables in schema gaffer to {role}; grant select, update on source to {role};"
          f"grant insert on target to {role}; create policy few on source using (id < 2)")  # fmt: skip
    jobs.execute(shop, "alter table source add column done_at timestamptz")
    due = PendingRows("source", "id", pending="done_at is null", done="done_at = now()")
    with protocol.session(shop) as connection:
        register_all(connection, [Definition(JobSpec("claim", due), None)])

    def said() -> list[Check]:
        return [check for check in look(stranger) if "row-level security" in check.found]

    assert said() == []
    jobs.execute(shop, "alter table source enable row level security")
    assert not_well(shop).keys() == {"claim"}  # a superuser sees all, and it has no index
    found = said()
    assert [(check.name, check.mark) for check in found] == [("claim", Mark.WARNING), ("copy_rows", Mark.WARNING)]
    jobs.run(jobs.spec(), stranger)
    assert len([record for record in caplog.records if "rows can be hidden" in record.message]) == 1
    paste(shop, found[0].cure)
    assert said() == []


def test_a_locked_table_is_what_cannot_be_told(shop: str) -> None:
    with closing(psycopg.connect(shop)) as other:
        other.execute("lock table source in access exclusive mode")
        found = not_well(shop)
    assert found["copy_rows"].mark is Mark.UNKNOWN
    assert "somebody has locked" in found["copy_rows"].found


# ── receivers ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_receivers_are_reached_and_sent_nothing(tmp_path: Path) -> None:
    with HttpReceiver() as plain, HttpReceiver(certificate=certificate(tmp_path)) as secure, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nowhere = f"http://127.0.0.1:{closed.getsockname()[1]}/canary"
        environment = {
            "GAFFER_RECEIVER_PLAIN": f"{plain.url}/canary",
            "GAFFER_RECEIVER_PLAIN_PRIVATE": "1",
            "GAFFER_RECEIVER_INNER": f"{secure.url}/canary",
            "GAFFER_RECEIVER_UNTRUSTED": f"{secure.url}/canary",
            "GAFFER_RECEIVER_UNTRUSTED_PRIVATE": "1",
            "GAFFER_RECEIVER_CLEAR": f"{plain.url}/canary",
            "GAFFER_RECEIVER_DOWN": nowhere,
            "GAFFER_RECEIVER_DOWN_PRIVATE": "1",
            "GAFFER_RECEIVER_NAMELESS": "https://canary.invalid/canary",
            "GAFFER_RECEIVER_EMPTY": "",
            "GAFFER_RECEIVER_BROKEN": "canary",
            "GAFFER_RECEIVER_UNKNOWN": "nosuchscheme://canary",
            "GAFFER_RECEIVER_HARSH": "https://canary.invalid/canary",
            "GAFFER_RECEIVER_HARSH_SEVERITY": "garbage",
            "GAFFER_RECEIVER_MAIL": "mailto://somebody:canary@example.org",
            "GAFFER_HEARTBEAT_URL": f"{plain.url}/canary",
            "GAFFER_HEARTBEAT_URL_PRIVATE": "1",
            "NIGHTLY_URL": f"{plain.url}/canary",
        }
        found = {check.name: check for check in doctor.of_receivers(environment, ["NIGHTLY_URL", "OTHER_URL"])}
        assert plain.headers == secure.headers == []
    assert "canary" not in repr(found)
    assert {name: (check.mark, check.found) for name, check in found.items()} == {
        "plain": (Mark.OK, "answers (nothing was sent)"),
        "inner": (Mark.WRONG, "its name leads to an address that is not public; set GAFFER_RECEIVER_INNER_PRIVATE=1 if "
                  "that is meant"),
        "untrusted": (Mark.WRONG, "its certificate is not valid: self-signed certificate"),
        "clear": (Mark.WRONG, "GAFFER_RECEIVER_CLEAR: what is sent would go in clear"),
        "down": (Mark.WRONG, "no connection: ECONNREFUSED"),
        "nameless": (Mark.WRONG, "its name cannot be resolved"),
        "empty": (Mark.WRONG, "GAFFER_RECEIVER_EMPTY is empty, or not set"),
        "broken": (Mark.WRONG, "GAFFER_RECEIVER_BROKEN: no URL (not shown, it may hold a secret)"),
        "unknown": (Mark.WRONG, "Apprise cannot read the URL in GAFFER_RECEIVER_UNKNOWN"),
        "harsh": (Mark.WRONG, "GAFFER_RECEIVER_HARSH_SEVERITY='garbage' is no severity"),
        "mail": (Mark.SKIPPED, "a URL of Apprise's, which cannot be asked without sending"),
        "GAFFER_HEARTBEAT_URL": (Mark.OK, "answers (nothing was sent)"),
        "NIGHTLY_URL": (Mark.WRONG, "NIGHTLY_URL: what is sent would go in clear"),
        "OTHER_URL": (Mark.SKIPPED, "it is not set in this environment, and sent only where a watch has it"),
    }  # fmt: skip


def test_without_a_receiver_only_the_log_is_told() -> None:
    (found,) = doctor.of_receivers({})
    assert (found.mark, "only the log is told" in found.found) == (Mark.WARNING, True)


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "code", "verdict"),
    [
        ("select 1", 0, "ok"),
        ("update gaffer.watch set every = null", 0, "ok"),
        ("drop table source", 1, "wrong"),
        ("update gaffer.job set retired_at = now()", 2, "cannot tell"),
    ],
)
def test_the_exit_code_is_the_verdict(shop: str, tmp_path: Path, text: str, code: int, verdict: str) -> None:
    jobs.execute(shop, text)
    done = gaffer(shop, tmp_path, "doctor", "--json")
    assert done.returncode == code, done.stdout + done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert {"part", "name", "mark", "found", "cure"} == told[0].keys()
    assert [each["name"] for each in told if each["part"] == "dagster"] == ["instance"]
    assert verdict in {each["mark"] for each in told}
    shown = gaffer(shop, tmp_path, "doctor")
    assert (shown.returncode, shown.stderr) == (code, "")
    assert f"{len(told)} checks: " in shown.stdout
    for each in told:
        assert each["found"] in shown.stdout
        assert each["cure"] is None or each["mark"] == "ok" or each["cure"] in shown.stdout


def test_no_secret_is_shown_and_no_database_exits_75_after_the_rest_was_looked_at(shop: str, tmp_path: Path) -> None:
    away = "postgresql://somebody:canary@127.0.0.1:1/nowhere"
    done = gaffer(away, tmp_path, "doctor", GAFFER_RECEIVER_ONCALL="https://canary.invalid/canary")
    assert done.returncode == 75, done.stdout + done.stderr
    assert "somebody@127.0.0.1:1/nowhere" in done.stdout
    assert "its name cannot be resolved" in done.stdout
    assert "DAGSTER_HOME is not set" in done.stdout
    secret = str(conninfo.conninfo_to_dict(shop)["password"])
    well = gaffer(shop, tmp_path, "doctor")
    for text in (done.stdout, done.stderr, well.stdout, well.stderr):
        assert "canary" not in text
        assert secret not in text
        assert "Traceback" not in text


@pytest.mark.parametrize("given", [None, "", "postgresql://u:canary@h@x/db", "nonsense canary"])
def test_no_database_that_is_named_is_what_cannot_be_told(tmp_path: Path, given: str | None) -> None:
    done = gaffer(given, tmp_path, "doctor")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "cannot tell   address" in done.stdout
    assert "canary" not in done.stdout + done.stderr


def test_code_that_cannot_be_loaded_hides_nothing_else(shop: str, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("raise ValueError('as it was')\n")
    done = gaffer(shop, tmp_path, "doctor", "-f", "broken.py")
    assert done.returncode == 1
    assert "ValueError: as it was" in done.stdout
    assert "copy_rows" in done.stdout


def test_it_starts_without_dagster(shop: str, tmp_path: Path) -> None:
    code = (
        "import sys; from gaffer_dagster.cli import main\n"
        "try: main(['doctor'])\n"
        "except SystemExit as error: assert not error.code, error.code\n"
        "assert 'dagster' not in sys.modules"
    )
    kept = {"GAFFER_DATABASE_URL": shop, "PATH": os.environ["PATH"], "PYTHONPATH": str(Path(db.__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=kept, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", ["doctor", "doctor --json", "dagster check", "dagster sync --yes"])
def test_where_dagster_cannot_be_imported_that_is_one_thing_that_is_wrong(
    shop: str, tmp_path: Path, command: str
) -> None:
    code = f"import sys; sys.modules['dagster'] = None; from gaffer_dagster.cli import main; main({command.split()})"
    kept = {"GAFFER_DATABASE_URL": shop, "PATH": os.environ["PATH"], "PYTHONPATH": str(Path(db.__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=kept | {"DAGSTER_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    said = done.stdout + done.stderr
    assert said.count("import of dagster") == 1
    assert "pip install --upgrade gaffer_dagster" in said
    assert "copy_rows" in said or command.startswith("dagster")  # the other parts are looked at


def test_a_private_server_is_neither_started_nor_migrated(tmp_path: Path) -> None:
    assert gaffer("local", tmp_path, "doctor").returncode == 75
    assert list(tmp_path.iterdir()) == []
    url = local.start(tmp_path / ".gaffer")
    try:
        done = gaffer("local", tmp_path, "doctor", "--json")
        told = {each["name"]: each for each in map(json.loads, done.stdout.splitlines())}
        assert (done.returncode, told["schema"]["cure"]) == (1, "gaffer migrate"), done.stderr
        assert jobs.query(url, "select to_regnamespace('gaffer')") == [(None,)]
    finally:
        local.stop(tmp_path / ".gaffer")


def test_a_database_without_our_tables_is_looked_at(server_url: str) -> None:
    name = f"empty_{uuid4().hex[:12]}"
    with db.connect(server_url, application_name="test") as connection:
        connection.execute(db.create_database(name))
    try:
        found = not_well(db.with_database(server_url, name))
        assert found["schema"].cure == "gaffer migrate"
    finally:
        with jobs.connect(server_url) as connection:
            connection.execute(sql.SQL("drop database {}").format(sql.Identifier(name)))
