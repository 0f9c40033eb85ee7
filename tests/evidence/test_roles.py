"""The four roles: each does its work, and nothing else.

GAFFER_ROLES_SEED repeats what `test_no_function_that_the_runner_may_call_…` calls, GAFFER_ROLES_SIZE is how often it
calls each.
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from click.testing import CliRunner
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder
from psycopg import errors as pg
from psycopg.types.json import Jsonb

import gaffer_dagster as gd
from gaffer_dagster.cli import main
from gaffer_dagster.domain import notice
from gaffer_dagster.domain.health import Check, Mark
from gaffer_dagster.domain.incident import Kind
from gaffer_dagster.domain.run import Outcome
from gaffer_dagster.engine import doctor, watch
from gaffer_dagster.engine.batch import Batch
from gaffer_dagster.engine.registry import Definition, register_all
from gaffer_dagster.engine.watch import Watcher
from gaffer_dagster.errors import (
    BadInputError,
    DatabaseUnavailableError,
    LeaseLostError,
    MissingRightsError,
    ProtectedTableError,
)
from gaffer_dagster.store import db, leases, migrate, protect, roles
from gaffer_dagster.store import doctor as asked
from gaffer_dagster.store.operations import Operator
from gaffer_dagster.testing import Databases
from tests.postgres.test_migrations import catalog
from tests.support import jobs, protocol, variants
from tests.support import roles as support
from tests.support.receivers import HttpReceiver

ROOT = Path(__file__).parents[2]
SEED = int(os.environ.get("GAFFER_ROLES_SEED", random.randrange(1 << 32)))
SIZE = int(os.environ.get("GAFFER_ROLES_SIZE", 12))

ALL = frozenset({"runner", "reader", "operator"})
RUNNER, OPERATOR, BOTH = frozenset({"runner"}), frozenset({"operator"}), frozenset({"runner", "operator"})
NOBODY = frozenset[str]()  # but the owner
# Who may call what. A function that is not named here is one that nobody has thought about.
FUNCTIONS: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(["advisory_key", "clock", "cluster", "is_gone", "require_protection", "until_of"], ALL),
    **dict.fromkeys(
        [
            "acquire", "base_of_spec", "begin_batch", "begin_pass", "charge_item", "claim_notices", "commit_batch",
            "end_run", "learn_run", "lock_batch", "lost_lease", "note_delivery", "note_incidents", "note_learnt",
            "note_ping", "note_reports", "register", "register_external", "renew", "supersede",
        ],
        RUNNER,
    ),
    **dict.fromkeys(
        [
            "ack_alert", "adopt", "allow_writes", "begin_prune", "change_items", "mute", "pause", "prunable_alerts",
            "prunable_runs", "prune_alerts", "prune_runs", "release", "rename", "resume", "retire", "set_watermark",
        ],
        OPERATOR,
    ),
    "note_operation": BOTH,
    # Triggers, parts of others, and what is for those who own tables.
    **dict.fromkeys(
        [
            "abandon", "back_off", "blockers", "check_prune", "check_seal", "check_truncation", "check_ttl",
            "count_failure", "count_parked", "count_takeover", "drop_guards", "family_of", "forget_delay",
            "forget_protection", "guard", "is_holder", "is_plain", "is_told", "keep_idle", "lease_blockers",
            "lock_leases",
            "note_action", "note_or_refuse", "note_parked", "note_pause", "note_protection", "note_pruned", "note_work",
            "protect", "protected_by", "raise_durability", "refuse_move", "refuse_removal", "refuse_smaller_fence",
            "refuse_write", "settle_items",
            "stamp_xid", "unprotect", "was_muted",
        ],
        NOBODY,
    ),
}  # fmt: skip
# Who may read what; nobody may do more with any.
TABLES: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(
        [
            "alert", "alert_delivery", "delivery_status", "job", "job_item", "job_lease", "job_runs", "job_spec",
            "job_status", "job_watermark", "migration", "open_alert", "operator_action", "protected_table", "receiver",
            "watch", "watch_gap", "watch_status",
        ],
        ALL,
    ),
    "truncated_table": NOBODY,
    "watch_turn": NOBODY,
}  # fmt: skip
VIEWS = {"delivery_status", "job_status", "open_alert", "watch_status"}


@pytest.fixture(scope="module")
def home(gaffer_databases: Databases) -> Iterator[tuple[str, dict[str, str]]]:
    """A database with the four roles, and a login of each. Who is no member may make no temporary table."""
    with gaffer_databases.scratch() as url, support.logins(url) as found:
        jobs.execute(url, f"revoke temporary on database {db.parse_url(url)['dbname']} from public")
        yield url, found


@pytest.fixture(scope="module")
def url(home: tuple[str, dict[str, str]]) -> str:
    """As the server's administrator."""
    return home[0]


@pytest.fixture(scope="module")
def runner(home: tuple[str, dict[str, str]]) -> str:
    return home[1]["runner"]


@pytest.fixture(scope="module")
def reader(home: tuple[str, dict[str, str]]) -> str:
    return home[1]["reader"]


@pytest.fixture(scope="module")
def operator(home: tuple[str, dict[str, str]]) -> str:
    return home[1]["operator"]


@pytest.fixture(scope="module")
def owner(home: tuple[str, dict[str, str]]) -> str:
    return home[1]["owner"]


def gaffer(url: str, *words: str, **environment: str) -> str:
    done = CliRunner().invoke(main, list(words), env={"GAFFER_DATABASE_URL": url, **environment})
    assert done.exception is None or isinstance(done.exception, SystemExit), (words, done.exception)
    assert done.exit_code in (0, 1), (words, done.output)
    assert "permission denied" not in done.output, (words, done.output)
    return done.output


def refused(url: str, *texts: str) -> None:
    with jobs.connect(url) as connection:
        for text in texts:
            try:
                connection.execute(text)
            except pg.InsufficientPrivilege:
                connection.rollback()
                continue
            raise AssertionError(f"not refused: {text}")


# ── the file ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_file_in_deploy_is_the_packages_and_goes_into_wheel_and_sdist() -> None:
    assert (ROOT / "deploy" / "roles.sql").read_text() == roles.script()
    for builder, name in ((WheelBuilder, "gaffer_dagster/store/roles.sql"), (SdistBuilder, "deploy/roles.sql")):
        assert name in {each.distribution_path for each in builder(str(ROOT)).recurse_included_files()}


def migrated(url: str) -> tuple[int, bool]:
    """How `gaffer migrate --roles` ended, and whether it said that it was not permitted to."""
    done = CliRunner().invoke(main, ["migrate", "--roles"], env={"GAFFER_DATABASE_URL": url})
    return done.exit_code, "permission denied" in done.output


def test_an_administrator_who_is_no_superuser_can_do_it_all(gaffer_databases: Databases) -> None:
    """The first in this file: the groups, which are the server's, are there after any other."""
    with gaffer_databases.scratch(migrated=False) as url, support.login(url) as admin:
        if jobs.query(url, "select from pg_roles where rolname = 'gaffer_owner'"):
            pytest.skip("another database of this server has the roles")
        name = support.user_of(admin)
        assert migrated(admin) == (1, True)
        jobs.execute(url, f"grant create on database {db.parse_url(url)['dbname']} to {name}")
        assert migrated(admin) == (1, True)
        jobs.execute(url, f"alter role {name} createrole")
        with support.groups(url):
            assert [migrated(admin), migrated(admin)] == [(0, False), (0, False)]
            assert who_may_call(url) == FUNCTIONS


def test_an_administrator_is_told_whose_the_tables_are_and_who_owned_them_goes_on(gaffer_databases: Databases) -> None:
    """Before the groups are there, too."""
    with gaffer_databases.scratch(migrated=False) as url, support.login(url) as admin, support.login(url) as former:
        if jobs.query(url, "select from pg_roles where rolname = 'gaffer_owner'"):
            pytest.skip("another database of this server has the roles")
        name, old = support.user_of(admin), support.user_of(former)
        database = db.parse_url(url)["dbname"]
        jobs.execute(url, f"alter role {name} createrole; grant create on database {database} to {name}, {old}")
        assert gaffer(former, "migrate").startswith("applied 1 ")
        done = CliRunner().invoke(main, ["migrate", "--roles"], env={"GAFFER_DATABASE_URL": admin})
        assert (done.exit_code, f"grant {old} to {name};" in done.output) == (1, True), done.output
        with protocol.session(admin) as connection, pytest.raises(MissingRightsError, match=f"grant {old} to {name};"):
            roles.apply(connection, Operator("ann", None))
        jobs.execute(url, f"grant {old} to {name}")
        with support.groups(url):
            assert migrated(admin) == (0, False)
            hours = gd.JobSpec("hours", gd.Elapsed("1h", start="2024-01-01"), gd.Schedule("0 * * * *"))
            assert jobs.run(hours, former, lambda batch: None).batches
            assert gaffer(former, "pause", "hours", "--until", "2h", "--yes")
            assert migrated(former) == (0, False)


def test_two_databases_of_a_server_that_make_the_roles_at_once(gaffer_databases: Databases) -> None:
    """Before the groups are there, too."""
    with gaffer_databases.scratch() as one, gaffer_databases.scratch() as two:
        if jobs.query(one, "select from pg_roles where rolname = 'gaffer_owner'"):
            pytest.skip("another database of this server has the roles")
        with support.groups(one), support.groups(two):
            with protocol.session(one) as connection:
                connection.execute("begin")
                roles.apply(connection, Operator("ann", None))
                other = protocol.Actor(lambda: support.apply(two))
                protocol.until(lambda: jobs.query(two, "select from pg_stat_activity where wait_event_type = 'Lock'"))
                connection.execute("commit")
            with pytest.raises(DatabaseUnavailableError, match="another is setting the roles"):
                other.result()
            support.apply(two)
            assert who_may_call(two) == who_may_call(one) == FUNCTIONS


def test_of_eight_at_once_all_do_it_and_one_is_noted(gaffer_databases: Databases) -> None:
    with gaffer_databases.scratch() as url, support.groups(url):
        protocol.all_at_once(8, lambda _: support.apply(url))
        assert who_may_call(url) == FUNCTIONS
        assert jobs.query(url, "select count(*) from gaffer.operator_action where action = 'roles'") == [(1,)]


def test_an_error_of_the_server_itself_is_no_other_who_does_the_same(
    gaffer_databases: Databases, monkeypatch: pytest.MonkeyPatch
) -> None:
    raising = "do $$ begin raise exception '{}' using errcode = 'XX000'; end $$"
    with gaffer_databases.scratch() as url, protocol.session(url) as connection:
        for text, error in (("tuple concurrently updated", DatabaseUnavailableError), ("broken", pg.InternalError_)):
            monkeypatch.setattr(roles, "script", lambda text=text: raising.format(text))
            with pytest.raises(error):
                roles.apply(connection, Operator("ann", None))


def test_what_a_migration_brings_is_the_roles_without_the_option(
    gaffer_databases: Databases, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = migrate.migrations()
    with gaffer_databases.scratch() as url, support.logins(url) as found:
        text = jobs.query(url, "select pg_get_functiondef('gaffer.resume'::regproc)")[0][0]
        more = replace(known[0], number=99, name="more", text=f"drop function gaffer.resume; {text};")
        monkeypatch.setattr(migrate, "migrations", lambda: [*known, more])
        assert not jobs.query(found["owner"], "select has_database_privilege(current_database(), 'create')")[0][0]
        assert gaffer(found["owner"], "migrate").startswith("applied 99 (more)\n")
        assert who_may_call(url) == FUNCTIONS
        assert jobs.query(url, "select proowner::regrole::text from pg_proc where proname = 'resume'") == [
            ("gaffer_owner",)
        ]


def test_the_check_looks_at_the_rights_and_changes_none(gaffer_databases: Databases) -> None:
    def check(of: str) -> tuple[int, str]:
        done = CliRunner().invoke(main, ["migrate", "--check", "--roles"], env={"GAFFER_DATABASE_URL": of})
        return done.exit_code, done.output

    with gaffer_databases.scratch() as url, support.logins(url) as found:
        assert check(found["owner"]) == (0, "The tables are up to date.\n")
        jobs.execute(url, "revoke execute on function gaffer.renew from gaffer_runner")
        before = catalog(url)
        code, said = check(found["owner"])
        assert (code, "run: gaffer migrate --roles" in said) == (1, True)
        assert catalog(url) == before
        assert check(found["reader"])[0] == 1


def test_the_command_prints_it_and_applies_it(url: str, owner: str) -> None:
    assert gaffer(url, "migrate", "--roles", "--sql") == roles.script()
    noted = "select count(*) from gaffer.operator_action where action = 'roles'"
    before = jobs.query(url, noted)
    gaffer(owner, "migrate", "--roles", "--by", "ann")
    assert jobs.query(url, noted) == before  # nothing was to be done
    # Once the roles are there, any member of the owner may, with no right to make roles.
    jobs.execute(url, "revoke execute on function gaffer.pause from gaffer_operator")
    assert gaffer(owner, "migrate", "--roles", "--by", "ann") == "The tables are up to date.\n"
    (newest,) = gaffer(owner, "audit", "--limit", "1", "--json").splitlines()
    told = json.loads(newest)
    assert (told["action"], told["by"], told["role"]) == ("roles", "ann", support.user_of(owner))


def test_a_second_time_changes_nothing(url: str) -> None:
    before = catalog(url)
    support.apply(url)
    assert catalog(url) == before


def test_what_was_granted_otherwise_is_taken_back(url: str) -> None:
    before = catalog(url)
    jobs.execute(url, "grant update on gaffer.job_lease to gaffer_reader, public")
    jobs.execute(url, "grant execute on function gaffer.pause to gaffer_runner, public")
    assert catalog(url) != before
    support.apply(url)
    assert catalog(url) == before


def test_all_belongs_to_the_owner_whoever_migrated(url: str) -> None:
    def owners() -> set[str]:
        found = jobs.query(
            url,
            """
            select nspowner::regrole::text from pg_namespace where nspname = 'gaffer'
            union select relowner::regrole::text from pg_class where relnamespace = 'gaffer'::regnamespace
            union select proowner::regrole::text from pg_proc where pronamespace = 'gaffer'::regnamespace
            union select typowner::regrole::text from pg_type where typnamespace = 'gaffer'::regnamespace
            """,
        )
        return {name for (name,) in found}

    assert owners() == {"gaffer_owner"}
    jobs.execute(url, "create table gaffer.of_a_later_migration (id bigint generated always as identity)")
    assert len(owners()) == 2
    support.apply(url)
    assert owners() == {"gaffer_owner"}
    jobs.execute(url, "drop table gaffer.of_a_later_migration")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("comment on role gaffer_reader is null", "was not made here"),
        ("alter role gaffer_reader login", "may log in"),
        ("alter role gaffer_reader superuser", "is a superuser"),
        ("alter role gaffer_reader createrole", "may make roles"),
        ("alter role gaffer_reader createdb", "may make databases"),
        ("alter role gaffer_reader replication", "may replicate"),
        ("alter role gaffer_reader bypassrls", "is above row-level security"),
        ("grant pg_write_all_data to gaffer_reader", "is a member of pg_write_all_data"),
    ],
)
def test_a_role_that_is_another_is_refused_and_not_widened(url: str, change: str, said: str) -> None:
    rights = "select relname, relacl::text from pg_class where relnamespace = 'gaffer'::regnamespace order by 1"
    with protocol.session(url) as connection:
        connection.execute("begin")
        connection.execute("revoke select on gaffer.job from gaffer_reader")
        connection.execute(change.encode())
        before = connection.execute(rights).fetchall()
        with pytest.raises(BadInputError, match=f"gaffer_reader exists already, and {said}; nothing was changed"):
            roles.apply(connection, Operator("ann", None))
        assert connection.execute(rights).fetchall() == before
        connection.execute("rollback")


def test_a_script_that_does_not_look_whose_role_it_is_widens_it(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = roles.script().replace("if v_is <> '' then", "if false then")
    assert broken != roles.script()
    monkeypatch.setattr(roles, "script", lambda: broken)
    with protocol.session(url) as connection:
        connection.execute("begin")
        connection.execute("revoke select on gaffer.job from gaffer_reader; alter role gaffer_reader bypassrls")
        roles.apply(connection, Operator("ann", None))
        widened = connection.execute("select has_table_privilege('gaffer_reader', 'gaffer.job', 'select')").fetchone()
        assert widened == (True,)
        connection.execute("rollback")


def test_who_may_not_set_rights_is_told_who_may(reader: str) -> None:
    with protocol.session(reader) as connection, pytest.raises(MissingRightsError, match="migrate --roles --sql"):
        roles.apply(connection, Operator("ann", None))


# ── who may do what ──────────────────────────────────────────────────────────────────────────────────────────────────


def by_role(url: str, text: str) -> dict[str, Any]:
    """Names, and what each of our roles (or PUBLIC, or somebody else) was granted there, but for the owner."""
    found: dict[str, Any] = {}
    for name, role, right in jobs.query(url, text):
        given = found.setdefault(name, {})
        if role is not None:
            given.setdefault(role.removeprefix("gaffer_"), set()).add(right)
    return found


def who_may_call(url: str) -> dict[str, frozenset[str]]:
    found = by_role(
        url,
        """
        select p.proname, case when acl.grantee = 0 then 'PUBLIC' else pg_get_userbyid(acl.grantee) end,
               acl.privilege_type
          from pg_proc p
          left join lateral aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) acl
            on acl.grantee <> p.proowner
         where p.pronamespace = 'gaffer'::regnamespace
        """,
    )
    return {name: frozenset(given) for name, given in found.items()}


def who_may_use(url: str) -> dict[str, dict[str, set[str]]]:
    return by_role(
        url,
        """
        select c.relname, case when acl.grantee = 0 then 'PUBLIC' else pg_get_userbyid(acl.grantee) end,
               acl.privilege_type
          from pg_class c
          left join lateral (
               select * from aclexplode(coalesce(c.relacl, acldefault('r', c.relowner)))
               union all
               select x.* from pg_attribute a, aclexplode(a.attacl) x where a.attrelid = c.oid) acl
            on acl.grantee <> c.relowner
         where c.relnamespace = 'gaffer'::regnamespace and c.relkind in ('r', 'p', 'v', 'm', 'f')
        """,
    )


def expected() -> dict[str, dict[str, set[str]]]:
    return {name: {role: {"SELECT"} for role in given} for name, given in TABLES.items()}


def test_each_function_and_table_is_for_those_whom_it_is_meant_for(url: str) -> None:
    assert who_may_call(url) == FUNCTIONS
    assert who_may_use(url) == expected()
    schema = by_role(
        url,
        """
        select nspname, pg_get_userbyid(acl.grantee), acl.privilege_type
          from pg_namespace, aclexplode(nspacl) acl where nspname = 'gaffer' and acl.grantee <> nspowner
        """,
    )
    assert schema == {"gaffer": {role: {"USAGE"} for role in ALL}}
    assert not {name for name, _ in jobs.query(url, "select relname, relkind from pg_class where relkind = 'S' and "
                "relnamespace = 'gaffer'::regnamespace and relacl is not null")}  # fmt: skip


def test_names_of_functions_are_enough_to_tell_them_apart(url: str) -> None:
    assert jobs.query(url, "select proname from pg_proc where pronamespace = 'gaffer'::regnamespace"
                           " group by proname having count(*) > 1") == []  # fmt: skip


def test_what_nobody_has_thought_about_is_found(url: str) -> None:
    for text, found in (
        ("create function gaffer.fresh() returns int language sql as 'select 1'", {"fresh": {"PUBLIC"}}),
        ("grant execute on function gaffer.pause to gaffer_runner", {"pause": {"operator", "runner"}}),
    ):
        jobs.execute(url, text)
        now = who_may_call(url)
        jobs.execute(url, "drop function if exists gaffer.fresh")
        support.apply(url)
        assert {name: now[name] for name in now if now[name] != FUNCTIONS.get(name)} == found
    jobs.execute(url, "grant update (lease_until) on gaffer.job_lease to gaffer_runner")
    now = who_may_use(url)
    support.apply(url)
    assert now["job_lease"]["runner"] == {"SELECT", "UPDATE"}
    assert (who_may_call(url), who_may_use(url)) == (FUNCTIONS, expected())


def test_what_the_doctor_asks_of_a_runner_is_part_of_what_he_gets(url: str) -> None:
    assert {name for name in asked.RUNNER_FUNCTIONS if "runner" not in FUNCTIONS[name]} == set()
    assert sorted(name for name, given in FUNCTIONS.items() if given == OPERATOR) == asked.OPERATOR_FUNCTIONS
    assert {name for name in asked.RUNNER_TABLES if "runner" not in TABLES[name]} == set()


# ── the runner ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def shop(url: str, runner: str, owner: str) -> str:
    """Tables of an owner's, prepared and protected by him, and what the runner needs of them."""
    who = support.user_of(owner)
    jobs.execute(url, f"grant create on schema public to {who}")
    jobs.make_source(owner, 25)
    jobs.execute(owner, "create table item (id int primary key, done_at timestamptz)")
    jobs.execute(owner, "insert into item select generate_series(1, 6)")
    jobs.execute(owner, "create table effect (id int); create table days (since timestamptz)")
    jobs.execute(owner, "create table ours (id bigint, fence bigint, batch int)")
    jobs.execute(owner, "create table payroll (salary int)")
    name = support.user_of(runner)
    jobs.execute(owner, f"grant select on source to {name}; grant insert on target, effect, days, ours to {name}")
    jobs.execute(owner, f"grant select, update on item to {name}")
    return url


def claim() -> Any:
    due = gd.PendingRows("item", "id", pending="done_at is null", done="done_at = clock_timestamp()", attempts=1)
    return gd.JobSpec("items", due, gd.Schedule("0 * * * *"), gd.Bounds(timeout="5m"))


def bad_four(batch: Batch) -> None:
    batch.insert("effect", [{"id": row["id"]} for row in batch.rows])
    if any(row["id"] == 4 for row in batch.rows):
        raise ValueError("row 4 is bad")


def by_day(batch: Batch) -> None:
    assert batch.window is not None
    batch.insert("days", [{"since": batch.window.since}])


def into_ours(batch: Batch) -> None:
    batch.insert("ours", [{"id": row["id"]} for row in batch.rows])


def test_the_runner_does_a_jobs_whole_life_and_needs_no_ddl(shop: str, runner: str, owner: str) -> None:
    assert jobs.query(
        runner,
        """
        select has_database_privilege(current_database(), 'create, temporary'),
               has_schema_privilege('public', 'create'), has_schema_privilege('gaffer', 'create')
        """,
    ) == [(False, False, False)]
    copied = jobs.spec(batch_rows=10)
    with protocol.session(runner) as connection:  # as the sensor and `gaffer register` do
        defined = [Definition(each, None) for each in (copied, claim(), jobs.daily(start="2026-11-01"))]
        assert len(register_all(connection, defined, operator=Operator("ann", None))) == 3
    record = jobs.run(copied, runner)
    assert (record.outcome, record.items, record.fence) == (Outcome.SUCCEEDED, 25, 1)
    locked = gd.JobSpec(
        "locked", gd.NewRows("source", "id"), gd.Schedule("0 * * * *"), gd.Bounds(timeout="5m"), exclusion="advisory"
    )
    assert jobs.run(locked, runner, lambda batch: None).items == 25
    record = jobs.run(claim(), runner, bad_four)
    assert (record.outcome, record.items, record.parked) == (Outcome.PARTIAL, 5, 1)
    assert jobs.run(jobs.daily(start="2026-11-01"), runner, by_day).outcome is Outcome.SUCCEEDED
    with pytest.raises(ZeroDivisionError):
        jobs.run(jobs.spec("fails"), runner, lambda batch: 1 // 0)
    assert protocol.outcomes(shop, "fails") == ["failed"]

    jobs.execute(owner, "select gaffer.protect('ours', '{copy_rows}')")
    jobs.add_rows(owner, 5)
    guarded = gd.JobSpec(
        "copy_rows", gd.NewRows("source", "id"), gd.Schedule("0 * * * *"), gd.Bounds(timeout="5m"), protect=["ours"]
    )
    assert jobs.run(guarded, runner, into_ours).items == 5
    with pytest.raises(psycopg.Error, match="no batch is open"):
        jobs.execute(runner, "insert into ours values (1)")
    with protocol.session(runner) as connection, pytest.raises(ProtectedTableError):
        protect.require(connection, ["ours"], "items")


def test_the_runner_renews_supersedes_and_is_taken_over(shop: str, runner: str) -> None:
    job = jobs.spec("stepwise")
    with protocol.session(runner) as connection, protocol.session(runner) as other:
        protocol.register(connection, job)
        first = protocol.acquire(connection, job)
        assert leases.renew(connection, first.lease, protocol.timedelta(seconds=60))
        batch = protocol.begin(connection)
        protocol.commit(connection, first.lease, batch, since=None, until={"xid": 1, "key": "1"})
        new_id = uuid4()
        second = leases.supersede(connection, first.lease, new_id, protocol.timedelta(seconds=60))
        assert (second.fence, second.batches) == (2, 1)
        assert protocol.acquire(other, job).grant.outcome == "busy"
        protocol.expire(shop, "stepwise")
        third = protocol.acquire(other, job)
        assert third.grant.fence == 3
        batch = protocol.begin(connection)
        lost = protocol.Lease("stepwise", 0, first.lease.run_id, 2, new_id)
        with pytest.raises(LeaseLostError, match="found dead by the run of fence 3"):
            protocol.commit(connection, lost, batch, since={"xid": 1, "key": "1"}, until={"xid": 2, "key": "2"})
        protocol.db.roll_back(connection)
        assert "found dead by" in leases.lost(connection, lost)
        assert protocol.end(other, third.lease, wanted_at=third.grant.wanted_at).result == "ended"


def test_the_runner_watches_and_delivers(shop: str, runner: str) -> None:
    job = gd.JobSpec("quiet", gd.NewRows("source", "id"), gd.Schedule("0 * * * *"), alerts=gd.Alerts(failures=1))
    with protocol.session(runner) as connection, HttpReceiver() as server:
        register_all(connection, [Definition(job, None)])
        with pytest.raises(ZeroDivisionError):
            jobs.run(job, runner, lambda batch: 1 // 0)
        told = {"GAFFER_RECEIVER_ONCALL": server.url, "GAFFER_RECEIVER_ONCALL_PRIVATE": "1"}
        attended = watch.attend(connection, Watcher("sensor", None, ["quiet"]), told, jobs.LOG)
        assert attended.sent >= 1
        assert not attended.problems
        assert "quiet" in json.dumps(server.messages)
    assert gaffer(runner, "check", "--notify", "--name", "cron")


def test_the_doctor_is_content_with_a_runner_and_tells_who_is_more(
    shop: str, runner: str, owner: str, url: str, home: tuple[str, dict[str, str]]
) -> None:
    def role(of: str) -> str:
        (found,) = [each for each in doctor.of_database(of) if each.name == "role"]
        return found.found

    def look(of: str) -> dict[str, Check]:
        return {each.name: each for each in doctor.of_database(of) if each.part == "database"}

    found = look(runner)
    assert found["rights"].mark is Mark.OK
    assert role(runner) == support.user_of(runner)
    assert "owns the schema gaffer: more than a runner needs" in role(owner)
    assert "is a superuser" in role(url)
    jobs.execute(url, f"grant insert on gaffer.job_lease to {support.user_of(runner)}")
    assert "may write gaffer's tables past its functions: more than a runner needs" in role(runner)
    jobs.execute(url, f"revoke insert on gaffer.job_lease from {support.user_of(runner)}")
    with support.login(url) as stranger:
        cure = look(stranger)["schema"].cure
        assert cure == f"grant gaffer_runner to {support.user_of(stranger)};"
        jobs.execute(url, cure)
        assert {look(stranger)[name].mark for name in ("schema", "rights")} == {Mark.OK}
        assert look(stranger)["rights"].found == "this role may do what a runner must"
        # One who was left behind by a migration is not given it himself.
        jobs.execute(url, "revoke execute on function gaffer.renew from gaffer_runner")
        assert look(stranger)["rights"].cure == "gaffer migrate --roles"
        support.apply(url)
        jobs.execute(url, f"grant gaffer_operator to {support.user_of(stranger)}")
        found = look(stranger)["rights"]
        assert (found.mark, found.cure) == (Mark.OK, None)
        assert "what people do (ack_alert, adopt, allow_writes and 13 more)" in found.found
        jobs.execute(url, f"revoke gaffer_operator from {support.user_of(stranger)}")
        granted = f"function gaffer.set_watermark from {support.user_of(stranger)};"
        jobs.execute(url, "grant execute on " + granted.replace(" from ", " to "))
        assert (look(stranger)["rights"].mark, look(stranger)["rights"].cure) == (
            Mark.WARNING, f"revoke execute on {granted}"
        )  # fmt: skip
        jobs.execute(url, f"revoke execute on {granted}")
    for name in ("reader", "operator"):  # who look are not made runners
        found = look(home[1][name])["rights"]
        assert (found.mark, found.found) == (Mark.OK, f"this role is a member of gaffer_{name}, and runs no job")


def test_who_may_not_look_is_told_the_group_that_may(shop: str, runner: str) -> None:
    def unknown(of: str) -> set[str | None]:
        return {each.cure for each in doctor.of_database(of) if each.found.startswith("this role may not look: ")}

    functions = ", ".join(f"gaffer.{name}" for name in asked.RUNNER_FUNCTIONS)
    tables = ", ".join(f"gaffer.{name}" for name in asked.RUNNER_TABLES)
    with support.login(shop) as stranger:
        name = support.user_of(stranger)
        jobs.execute(shop, f"grant usage on schema gaffer to {name}; grant execute on function {functions} to {name}")
        jobs.execute(shop, f"grant select on {tables} to {name}")
        assert unknown(stranger) == {f"grant gaffer_reader to {name};"}
        jobs.execute(shop, f"grant gaffer_reader to {name};")
        assert unknown(stranger) == set()
    jobs.execute(shop, "revoke select on gaffer.alert from gaffer_runner")
    assert unknown(runner) == {"gaffer migrate --roles"}
    support.apply(shop)
    assert unknown(runner) == set()


@pytest.mark.parametrize("role", ["runner", "reader", "operator"])
def test_none_of_them_changes_a_row_but_through_functions(
    shop: str, home: tuple[str, dict[str, str]], role: str
) -> None:
    mine = home[1][role]
    for name in TABLES:
        if name in VIEWS:
            refused(mine, f"drop view gaffer.{name}")
            continue
        refused(
            mine,
            f"insert into gaffer.{name} default values",
            f"delete from gaffer.{name}",
            f"truncate gaffer.{name}",
            f"begin; lock table gaffer.{name} in exclusive mode",
            f"alter table gaffer.{name} add column mine int",
            f"drop table gaffer.{name}"
            if "status" not in name and name != "open_alert"
            else f"drop view gaffer.{name}",
            f"create trigger mine before insert on gaffer.{name} for each row execute function gaffer.guard()",
            f"alter table gaffer.{name} disable trigger all",
            f"alter table gaffer.{name} enable row level security",
            f"create policy mine on gaffer.{name}",
            f"create rule mine as on insert to gaffer.{name} do instead nothing",
            f"create index on gaffer.{name} ((1))",
        )
    refused(
        mine,
        "update gaffer.job_lease set fence = 0",
        "update gaffer.job_watermark set position = null",
        "update gaffer.job_runs set outcome = 'succeeded'",
        "update gaffer.operator_action set by = 'me'",
        "select * from gaffer.truncated_table",
        "select * from payroll",
        "delete from target",
        "begin; lock table source in share mode",
        "create or replace function gaffer.clock() returns timestamptz language sql as 'select now()'",
        "alter function gaffer.clock() owner to current_user",
        "drop schema gaffer cascade",
        "create table gaffer.mine ()",
        "create table public.mine ()",
        "create temporary table mine ()",
        "set role gaffer_owner",
        *(f"set role gaffer_{other}" for other in ALL - {role}),
        "set session authorization gaffer_owner",
        "set session_replication_role = replica",
        f"grant gaffer_owner to {support.user_of(mine)}",
    )
    assert who_may_use(shop) == expected()


def calls(url: str) -> dict[str, str]:
    """A call of each function, with nothing but nulls. Triggers, which nobody calls, are left out."""
    found = jobs.query(
        url,
        """
        select p.proname,
               (select coalesce(string_agg(format('null::%%s', format_type(t, null)), ', ' order by n), '')
                  from unnest(p.proargtypes::oid[]) with ordinality as of (t, n))
          from pg_proc p where p.pronamespace = 'gaffer'::regnamespace and p.prorettype <> 'trigger'::regtype
        """,
    )
    return {name: f"select gaffer.{name}({arguments})" for name, arguments in found}


def test_nobody_calls_what_is_not_meant_for_him(shop: str, home: tuple[str, dict[str, str]]) -> None:
    all_calls = calls(shop)
    assert len(all_calls) > 60
    for role in sorted(ALL):
        refused(home[1][role], *(all_calls[name] for name in all_calls if role not in FUNCTIONS[name]))


VICTIM = "victim"
# By the parameter's name, what somebody would like to give there; else by its type.
WISHES: Mapping[str, list[str]] = {
    "text": ["'victim'", "'victim'", "'pause'", "'log'", "null"],
    "integer": ["0", "0", "1", "-1", "2147483647", "null"],
    "bigint": ["0", "1", "2", "-1", "9223372036854775807", "1000000", "null"],
    "uuid": ["gen_random_uuid()", "'00000000-0000-0000-0000-000000000000'", "null"],
    "jsonb": [
        "'{\"xid\": 1, \"key\": \"0\"}'", "null", "'{}'", "'null'",
        "select position from gaffer.job_watermark where job = 'victim'",
    ],
    "interval": ["'60 s'", "'0'", "'-1 day'", "'100 years'", "null"],
    "timestamp with time zone": ["'epoch'", "now()", "'infinity'", "'2999-01-01'", "null"],
    "boolean": ["true", "false", "null"],
    "text[]": ["'{}'", "'{victim}'", "null"],
    "bigint[]": ["'{}'", "'{1,2,3,4,5,6,7,8,9}'"],
    "regclass": ["'gaffer.job_lease'", "'target'", "null"],
    "tstzrange": ["null", "'[2020-01-01,2020-01-02)'", "'empty'"],
    "gaffer.incident[]": ["'{}'", "null"],
}  # fmt: skip
NAMED: Mapping[str, list[str]] = {
    "p_job": ["'victim'"],
    "p_trigger": ["'command'", "'redo'", "'schedule'"],
    "p_lease_id": ["gen_random_uuid()", "'00000000-0000-0000-0000-000000000000'", "null"],
    "p_spec": ["select spec from gaffer.job where name = 'victim'", "'{}'"],
    "p_slots": ["1", "2"],
    "p_base": ["now()", "'epoch'"],
    "p_grace": ["'5 min'"],
    "p_slot": ["0", "0", "0", "1", "-1", "null"],
    "p_ttl": ["'60 s'", "'60 s'", "'0'", "'100 years'"],
    "p_timeout": ["'1 h'", "'1 h'", "'-1 day'"],
    "p_owner": ["'me'"],
    "p_refusal": ["null", "null", "'no'"],
    "p_action": ["'redo'", "'pause'", "'pause'", "null"],
    "p_redo": ["null", "null", "'[2020-01-01,2020-01-02)'"],
}
# What must stay, whatever is called.
STAYS = """
    select 'lease ' || slot, row(fence, lease_id, owner)::text from gaffer.job_lease where job = 'victim' and slot = 0
    union all
    select 'watermark', position::text from gaffer.job_watermark where job = 'victim'
    union all
    select 'run ' || id, row(job, slot, fence, lease_id, owner, trigger, started_at, ended_at, outcome, batches, items,
                             watermark_from, watermark_to, error)::text
      from gaffer.job_runs where id <= (select max(id) from gaffer.job_runs where lease_id = '{lease_id}')
    union all
    select 'paused', paused_at::text from gaffer.job where name = 'victim'
    union all
    select 'did ' || id, row(a)::text from gaffer.operator_action a where role <> '{runner}'
    union all
    select 'forged', a::text from gaffer.operator_action a
     where role = '{runner}' and action in ('pause', 'resume', 'mute', 'set watermark', 'adopt', 'rename', 'release')
    union all
    select 'migration', count(*)::text from gaffer.migration
    union all
    select 'row', t::text from target t
    order by 1, 2
"""


def held(url: str, runner: str) -> str:
    """The victim: another runner is at work on it, and it has a history. What must stay, as a query."""
    if not jobs.query(url, "select from gaffer.job where name = 'victim'"):
        job = jobs.spec(VICTIM, batch_rows=10)
        jobs.run(job, url, lambda batch: None)
        with protocol.session(url) as connection:
            protocol.acquire(connection, job, lease=600, timeout=3_000)
    ((lease_id,),) = jobs.query(url, "select lease_id from gaffer.job_lease where job = 'victim' and slot = 0")
    return STAYS.format(lease_id=lease_id, runner=support.user_of(runner))


def attack(
    url: str, runner: str, chance: random.Random, size: int, only: str | None = None
) -> tuple[Counter[str], list[tuple[Any, ...]]]:
    """Calls every function that the runner may call with all kinds of arguments, so often and until one call went
    through, but not for ever; how many did of each, and what changed that must stay."""
    stays = held(url, runner)
    before = jobs.query(url, stays)
    allowed = jobs.query(
        runner,
        """
        select p.proname, array(select n || ' ' || format_type(t, null)
                                  from unnest(p.proargtypes::oid[], p.proargnames[:p.pronargs]) as of (t, n))
          from pg_proc p
         where p.pronamespace = 'gaffer'::regnamespace and p.prorettype <> 'trigger'::regtype
           and has_function_privilege(p.oid, 'execute') order by 1
        """,
    )
    assert {name for name, _ in allowed} == {name for name, given in FUNCTIONS.items() if "runner" in given}
    went: Counter[str] = Counter()
    with jobs.connect(runner) as connection:
        connection.execute("set statement_timeout = '2s'")
        for name, parameters in allowed:
            for number in range(25 * size if only in (None, name) else 0):
                if number >= size and went[name]:
                    break
                values: list[str] = []
                for parameter in parameters:
                    called, _, of = parameter.partition(" ")
                    values.append(f"({chance.choice(NAMED.get(called) or WISHES[of])})::{of}")
                try:
                    connection.execute(f"select gaffer.{name}({', '.join(values)})".encode())
                    went[name] += 1
                except (pg.UndefinedFunction, pg.SyntaxError, pg.InsufficientPrivilege):
                    raise  # it was not called
                except psycopg.Error:
                    pass  # it refused
    after = jobs.query(url, stays)
    return went, [each for each in before if each not in after] + [each for each in after if each not in before]


# These refuse whoever does not name the lease of a run that is at work.
REFUSING = {"charge_item", "commit_batch", "end_run", "supersede"}


def test_no_function_that_the_runner_may_call_lowers_a_fence_moves_a_watermark_or_changes_what_was_done(
    shop: str, runner: str
) -> None:
    print(f"seed {SEED}, {SIZE} calls of each function")
    went, changed = attack(shop, runner, random.Random(SEED), SIZE)
    print("calls that went through:", dict(went))
    refusing = {name for name, given in FUNCTIONS.items() if "runner" in given and not went[name]}
    assert refusing == REFUSING
    assert changed == []


TIMES = ["timestamp with time zone", "interval", "tstzrange", "gaffer.incident[]"]
# What is no time that everybody can read, or that can be counted with.
FAR: Mapping[str, list[str]] = {
    "timestamp with time zone": ["'infinity'", "'-infinity'", "'290000-01-01'", "'4000-01-01 BC'", "'0001-01-01'"],
    "interval": ["'500000 years'", "'-500000 years'", "'-500000 years 180003000 days'", "'20000 years'", "'4000 days'"],
    "tstzrange": ["'[290000-01-01,290000-01-02)'", "'(,2020-01-02)'", "'[4000-01-01 BC,2020-01-02)'"],
    "gaffer.incident[]": [
        f"array[row(null, 'open', null, 'w', '', 'watch', 'error', {at}, '{{}}')::gaffer.incident]"
        for at in ("now()", "'290000-01-01'", "'4000-01-01 BC'")
    ]
    + [
        f"array[row(null, 'open', null, md5(random()::text), '', '{kind}', 'error', now(), '{said}')::gaffer.incident]"
        for kind in (*map(str, Kind), "of a newer version")
        for said in ("1", "[]", "{}", '{"tick": 5, "failures": "x", "rows": [], "held_by": {"who": 1}, "cure": 1}')
    ],
    # Another shape than what is read there has, in all of it or in one part.
    "jsonb": [
        "'1'",
        "'\"x\"'",
        "'[]'",
        "'[1]'",
        "'{}'",
        "'null'",
        "'{\"who\": null}'",
        "'{\"who\": {}}'",
        "'{\"who\": 1}'",
        '\'{"who": "x", "xid": [1]}\'',
        '\'{"who": "x", "cure": {}}\'',
        '\'{"who": "x", "of_a_newer_version": 1}\'',
        "'{\"until\": 12345}'",
        '\'{"until": "infinity"}\'',
        '\'{"until": "-5000-01-01"}\'',
        '\'{"xid": 1, "key": []}\'',
        '\'{"cursor": {}, "key": "x"}\'',
    ],
    # By the parameter's name, beside what goes by its type.
    "p_spec": [
        f"select jsonb_set(spec, '{{{part}}}', '{value}') from gaffer.job where name = 'near'"
        for part in (
            "schedule",
            "schedule,cron",
            "schedule,timezone",
            "max_late",
            "due",
            "due,kind",
            "due,table",
            "bounds",
            "bounds,timeout",
            "alerts",
            "alerts,failures",
            "alerts,receivers",
            "exclusion",
            "protect",
            "later",
            "schedule,later",
            "due,later",
            "bounds,later",
            "alerts,later",
        )
        for value in ("1", "{}")
    ],
}
# Else the first of what somebody would like to give, and where that would not get far:
NEAR: Mapping[str, str] = {
    "p_job": "'far'", "p_jobs": "'{}'", "p_spec": "select spec from gaffer.job where name = 'near'",
    "p_spec_hash": "md5(random()::text)", "p_work_hash": "md5(random()::text)",
    "p_as_new": "true", "p_dagster_run_id": "md5(random()::text)",
    "p_incidents": FAR["gaffer.incident[]"][0], "p_key": "'1'", "p_receiver": "'oncall'", "p_least": "'warning'",
    "p_watch": "'far'", "p_now": "now()", "p_known": "'{}'", "p_started_at": "now()", "p_ended_at": "now()",
    "p_every": "'1 min'", "p_until": "now()", "p_before": "now()", "p_action": "'redo'", "p_outcome": "'succeeded'",
    "p_wanted_at": "null", "p_settled": "null", "p_still_pending": "0", "p_refusal": "null", "p_charged": "null",
    "p_entry": "null",
    "p_cluster": "null", "p_redo": "null", "p_held_by": "null",
}  # fmt: skip
LOOKS = [
    "status", "status --json", "runs", "runs --json", "ticks far", "check", "metrics", "alerts list --all", "audit",
    "items list far --all",
]  # fmt: skip
QUICK = ["status", "runs", "check"]


def blinded(url: str, logins: Mapping[str, str], *types: str) -> list[str]:
    """Which calls of what a runner or operator may call keep somebody from looking. Each argument of these types, in
    turn, is one that is far off."""
    for words in ("far", "near", "held"):
        with protocol.session(logins["runner"]) as connection:
            protocol.register(connection, jobs.spec(words))
            gaffer(logins["runner"], "check", "--notify")
    found: list[str] = []
    for role in ("runner", "operator"):
        allowed = jobs.query(
            logins[role],
            """
            select p.proname, array(select n || ' ' || format_type(t, null)
                                      from unnest(p.proargtypes::oid[], p.proargnames[:p.pronargs]) as of (t, n))
              from pg_proc p
             where p.pronamespace = 'gaffer'::regnamespace and p.prorettype <> 'trigger'::regtype
               and has_function_privilege(p.oid, 'execute') and p.proname <> 'rename' order by 1
            """,
        )
        with jobs.connect(logins[role]) as connection:
            for name, parameters in allowed:
                taken: list[str] = []
                split = [each.partition(" ")[::2] for each in parameters]
                for place, (given, of) in enumerate(split):
                    for far in [*FAR.get(of, ()), *FAR.get(given, ())] if of in types else ():
                        near = NEAR if name not in REFUSING else {**NEAR, **at_work(url, connection)}
                        values = [
                            f"({far if each == place else near.get(called) or NAMED.get(called, WISHES[of])[0]})::{of}"
                            for each, (called, of) in enumerate(split)
                        ]
                        call = f"select gaffer.{name}({', '.join(values)})"
                        with suppress(psycopg.Error), connection.transaction():
                            connection.execute(f"select gaffer.begin_batch({near.get('p_batch', 'gen_random_uuid()')})")
                            connection.execute(call.encode())
                            taken.append(call)
                        if taken[-1:] == [call]:  # the next call may write over it
                            blind = [words for words in QUICK if not sees(logins["reader"], *words.split())]
                            found += [f"{words} after {call}" for words in blind]
                blind = [words for words in LOOKS if taken and not sees(logins["reader"], *words.split())]
                found += [f"{words} after one of {taken}" for words in blind]
                assert taken or name not in REFUSING or "jsonb" not in {of for _, of in split} & {*types}, name
    return found


def at_work(url: str, connection: db.Connection) -> dict[str, str]:
    """What a run that has just got its lease gives to what only such a run may call."""
    jobs.execute(url, "update gaffer.job_lease set lease_until = 'epoch' where job = 'held'")
    lease_id = uuid4()
    row = connection.execute("select run_id, fence from gaffer.acquire('held', 0, %s)", [lease_id]).fetchone()
    assert row is not None
    run, fence = row
    return {
        "p_job": "'held'", "p_slot": "0", "p_run_id": str(run), "p_fence": str(fence), "p_lease_id": f"'{lease_id}'",
        "p_batch": f"'{uuid4()}'", "p_from": "select position from gaffer.job_watermark where job = 'held'",
        "p_new_lease_id": "gen_random_uuid()",
    }  # fmt: skip


def sees(url: str, *words: str) -> bool:
    done = CliRunner().invoke(main, list(words), env={"GAFFER_DATABASE_URL": url})
    known = done.exception is None or isinstance(done.exception, SystemExit)
    # A job whose spec is no spec keeps who asks for its own ticks from an answer.
    return known and (done.exit_code == 0 or (words[0] in ("check", "ticks") and done.exit_code == 1))


def test_no_time_that_somebody_gives_keeps_others_from_looking(gaffer_databases: Databases) -> None:
    with gaffer_databases.scratch() as url, support.logins(url) as logins:
        assert blinded(url, logins, *TIMES) == []


@pytest.mark.timeout(600)
def test_no_json_that_somebody_gives_keeps_others_from_looking(gaffer_databases: Databases) -> None:
    with gaffer_databases.scratch() as url, support.logins(url) as logins:
        assert blinded(url, logins, "jsonb", "gaffer.incident[]") == []


def test_a_reader_that_expects_its_own_shape_is_found(
    gaffer_databases: Databases, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notice, "_at", lambda _, at: "?" if at is None else str(datetime.fromisoformat(at)))
    with gaffer_databases.scratch() as url, support.logins(url) as logins:
        found = blinded(url, logins, "gaffer.incident[]")
    assert any(each.startswith("alerts list --all") for each in found), found


@pytest.mark.parametrize(
    ("name", "change", "constraint"),
    [
        ("register", {"if p_grace is null or p_grace not between": "if false and p_grace not between",
                      "v_grace := make_interval(secs => extract(epoch from p_grace)::double precision);":
                      "v_grace := p_grace;"},
         "gaffer.job drop constraint job_grace_check"),
        ("note_incidents", {"if p_now is null or p_now not between": "if false and p_now not between"},
         "gaffer.alert drop constraint alert_check1, drop constraint alert_check2"),
    ],
)  # fmt: skip
def test_a_time_that_does_is_found(
    gaffer_databases: Databases, name: str, change: dict[str, str], constraint: str
) -> None:
    with gaffer_databases.scratch() as url, support.logins(url) as logins:
        variants.replace(url, name, change)
        jobs.execute(url, f"alter table {constraint}")
        assert any(f"gaffer.{name}(" in each for each in blinded(url, logins, *TIMES))


def test_a_runner_that_reads_the_id_of_a_lease_may_work_under_it(shop: str, runner: str) -> None:
    """So runners trust each other: whoever reads the id, as each of them may, can renew the lease and commit under it.
    The id keeps those apart who do not know that they meet, such as a run and the one that took over from it, or what
    was restored; it is no password."""
    held(shop, runner)
    given = """
        select l.fence, l.lease_id, r.id, w.position, w.cluster
          from gaffer.job_lease l join gaffer.job_runs r using (lease_id) join gaffer.job_watermark w on w.job = l.job
         where l.job = 'victim' and l.slot = 0
        """
    ((fence, lease_id, run, position, cluster),) = jobs.query(runner, given)
    lease = [fence, lease_id]
    with jobs.connect(runner) as connection, connection.transaction(force_rollback=True):
        renewed = connection.execute("select gaffer.renew('victim', 0, %s, %s, '60 s')", lease).fetchall()
        assert renewed == [(True,)]
        batch = uuid4()
        connection.execute("select gaffer.begin_batch(%s)", [batch])
        connection.execute(
            "select gaffer.commit_batch('victim', 0, %s, %s, %s, %s, %s, %s, %s, 1)",
            [*lease, run, batch, Jsonb(position), Jsonb(position), cluster],
        )
        assert connection.execute("select batches from gaffer.job_runs where id = %s", [run]).fetchall() == [(1,)]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("acquire", {"and (lease_until <= gaffer.clock() or": "and (true or"}),
        ("note_operation", {"if p_action is null\n": "if false\n", "or p_action <> all": "and p_action <> all"}),
        ("note_ping", {"update gaffer.job set": "update gaffer.job_watermark set position = '{}' where job = p_job;"
                                                " update gaffer.job set"}),
    ],
)  # fmt: skip
def test_a_function_that_lets_him_is_found(shop: str, runner: str, name: str, change: dict[str, str]) -> None:
    variants.replace(shop, name, change)
    try:
        _, changed = attack(shop, runner, random.Random(1), 200, only=name)
    finally:
        variants.replace(shop, name, {})
    assert changed


def test_whatever_name_the_runner_gives_it_is_his_that_is_kept(shop: str, runner: str) -> None:
    with jobs.connect(runner) as connection:
        connection.execute("select gaffer.note_operation('copy_rows', 'redo', 'ann@host', 'she said so')")
        for action in ("pause", "resume", "mute", "rename", "set watermark", "release", "unretire", None):
            with pytest.raises(pg.InvalidParameterValue, match="is noted by the function that does it"):
                connection.execute("select gaffer.note_operation('copy_rows', %s, 'ann@host', null)", [action])
    kept = "select by, role from gaffer.operator_action where reason = 'she said so'"
    assert jobs.query(shop, kept) == [("ann@host", support.user_of(runner))]
    shown = gaffer(runner, "audit", "copy_rows", "--limit", "100", COLUMNS="400")
    assert f"ann@host ({support.user_of(runner)})" in shown  # whose details cannot be told in words


# ── the reader, the operator ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def lived_in(shop: str, runner: str, reader: str, operator: str) -> str:
    """Of each thing that an operator does there is one to do it to."""
    # Where a watermark is in a table is told by the table.
    jobs.execute(shop, f"grant select on source to {support.user_of(reader)}, {support.user_of(operator)}")
    work = jobs.spec("worked")
    jobs.run(work, runner, lambda batch: None)
    failing = gd.JobSpec("failing", gd.NewRows("source", "id"), gd.Schedule("0 * * * *"), alerts=gd.Alerts(failures=1))
    with pytest.raises(ZeroDivisionError):
        jobs.run(failing, runner, lambda batch: 1 // 0)
    with protocol.session(runner) as connection:
        protocol.register(connection, claim())
        watch.look(connection, Watcher("here"))
        protocol.acquire(connection, work)
    jobs.execute(
        shop,
        "insert into gaffer.job_item (job, key, attempts, next_attempt_at, first_failed_at, failed_at, parked_at)"
        " select 'items', key, 5, now(), now(), now(), now() from unnest('{a,b}'::text[]) key on conflict do nothing",
    )
    jobs.execute(
        shop,
        "insert into gaffer.alert (job, kind, severity, since_at, opened_at, resolved_at, details)"
        " select 'worked', 'absence', 'error', day, day, day, '{}' from (select now() - interval '9 days') old (day)",
    )
    return shop


READS = [
    "status", "runs", "runs worked", "ticks worked", "check", "alerts list --all", "audit", "metrics",
    "items list items --all", "watermark show worked",
]  # fmt: skip


@pytest.mark.parametrize("role", ["reader", "operator", "runner"])
def test_each_of_them_may_look(lived_in: str, home: tuple[str, dict[str, str]], role: str) -> None:
    for words in READS:
        assert gaffer(home[1][role], *words.split())
    assert "worked" in gaffer(home[1][role], "status")
    found = [each for each in doctor.of_database(home[1][role]) if each.part in ("database", "jobs")]
    assert [each for each in found if "permission denied" in each.found] == []


CHANGES = [
    "pause worked --until 2h", "resume worked", "alerts mute worked --until 1h", "alerts unmute worked",
    "alerts ack 1", "alerts test log", "release worked", "watermark set worked beginning", "watermark adopt worked",
    "items retry items a", "items drop items b", "rename worked other", "retire here", "retire other",
    "prune --older-than 1d",
]  # fmt: skip


def test_the_reader_and_the_runner_change_nothing_by_command(lived_in: str, reader: str, runner: str) -> None:
    before = jobs.query(lived_in, "select * from gaffer.job j, gaffer.job_lease l where l.job = j.name")
    for of in (reader, runner):
        for words in CHANGES:
            if words == "alerts test log" and of is runner:  # it is he who delivers
                continue
            done = CliRunner().invoke(main, [*words.split(), "--yes"], env={"GAFFER_DATABASE_URL": of})
            assert (done.exit_code, "permission denied" in done.output) == (1, True), (words, done.output)
            assert "a member of gaffer_operator (what people do)" in done.output
    assert jobs.query(lived_in, "select * from gaffer.job j, gaffer.job_lease l where l.job = j.name") == before


def test_the_operator_does_what_people_do_and_is_named(lived_in: str, operator: str) -> None:
    for words in CHANGES:
        gaffer(operator, *words.split(), "--yes", "--by", "mallory", "--reason", "why not")
    done = jobs.query(lived_in, "select distinct action, role from gaffer.operator_action where by = 'mallory'")
    assert {action for action, _ in done} == {
        "pause", "resume", "mute", "unmute", "ack", "test receivers", "release", "set watermark", "adopt",
        "retry items", "drop items", "rename", "retire", "prune",
    }  # fmt: skip
    assert {role for _, role in done} == {support.user_of(operator)}


def prune_unnoted(url: str, operator: str) -> None:
    """As whoever would remove history without a trace, in another's name, or more than he said."""
    begin = "select gaffer.begin_prune(%s, 'ann', null)"
    with jobs.connect(url) as admin:
        ((others,),) = admin.execute(begin, ["2000-01-01"]).fetchall()
    with jobs.connect(operator) as connection:
        ((mine,),) = connection.execute(begin, ["2000-01-01"]).fetchall()
        ((paused,),) = connection.execute(
            "select max(id) from gaffer.operator_action where action <> 'prune' and role = session_user"
        ).fetchall()
        for action, before in (
            (None, "9000-01-01"), (others, "2000-01-01"), (mine, "9000-01-01"), (mine, None), (paused, "2000-01-01"),
            (-1, "2000-01-01"),
        ):  # fmt: skip
            for steps in (
                "select gaffer.prune_runs(%s, 'worked', %s, '-infinity', 0, 1000)",
                "select gaffer.prune_alerts(%s, %s, 1000)",
            ):
                with pytest.raises(pg.InvalidParameterValue, match="is no prune of"):
                    connection.execute(steps.encode(), [action, before])
        connection.execute("select gaffer.prune_runs(%s, 'worked', '2000-01-01', '-infinity', 0, 1000)", [mine])
        connection.execute("select gaffer.prune_alerts(%s, '2000-01-01', 1000)", [mine])


def test_the_operator_removes_no_history_but_under_a_row_of_his_own(lived_in: str, operator: str) -> None:
    gaffer(operator, "alerts", "mute", "failing", "--until", "1h", "--yes")
    prune_unnoted(lived_in, operator)


@pytest.mark.parametrize("part", ["and role = session_user", "and (details ->> 'before')::timestamptz = p_before"])
def test_a_prune_that_does_not_ask_whose_the_row_is_or_up_to_when_is_found(
    lived_in: str, operator: str, part: str
) -> None:
    variants.replace(lived_in, "check_prune", {part: ""})
    try:
        with pytest.raises(pytest.fail.Exception):
            prune_unnoted(lived_in, operator)
    finally:
        variants.replace(lived_in, "check_prune", {})


def test_rows_that_failed_are_retried_or_dropped_and_nothing_else(lived_in: str, operator: str) -> None:
    before = jobs.query(lived_in, "select * from gaffer.job_item")
    with jobs.connect(operator) as connection:
        for action in ("pause", "Retry", "", None):
            with pytest.raises(pg.InvalidParameterValue, match="is retry or drop, not"):
                connection.execute("select gaffer.change_items('items', %s, null, 'ann', null)", [action])
    assert jobs.query(lived_in, "select * from gaffer.job_item") == before


def test_the_operator_mends_a_protected_table_only_as_far_as_its_owner_lets_him(
    lived_in: str, operator: str, owner: str
) -> None:
    jobs.execute(owner, "create table if not exists mended (id int); select gaffer.protect('mended')")
    name = support.user_of(operator)
    with jobs.connect(operator) as connection:
        for granted in (False, True):
            if granted:
                jobs.execute(owner, f"grant insert on mended to {name}")
            try:
                with connection.transaction():
                    connection.execute("select gaffer.allow_writes('a typo')")
                    connection.execute("insert into mended values (1)")
            except pg.InsufficientPrivilege:
                assert not granted
    kept = "select by, role, reason from gaffer.operator_action where action = 'write'"
    assert jobs.query(lived_in, kept) == [(name, name, "a typo")]
