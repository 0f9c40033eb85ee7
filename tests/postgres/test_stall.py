"""What a run, `gaffer status` and the alert say when the horizon of `NewRows` stands still: who holds it, in whatever
database of the server, since when we saw that one stand, and how to end it."""

from __future__ import annotations

import json
import logging
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg import conninfo, sql

from gaffer_dagster.adapter import metadata
from gaffer_dagster.domain.due import EachInterval, NewRows
from gaffer_dagster.domain.held import HeldBy
from gaffer_dagster.domain.notice import Event, Notice, write
from gaffer_dagster.domain.run import RunRecord
from gaffer_dagster.engine import watch
from gaffer_dagster.store import alerts, db, horizon, new_rows
from gaffer_dagster.testing import Clock, Databases
from tests.postgres.test_migrations import RUNNER
from tests.support import jobs, variants
from tests.support.servers import server_with
from tests.support.ticking import invoke

HOUR = timedelta(hours=1)
WRITES = "create temporary table written ()"
Session = psycopg.Connection[tuple[Any, ...]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server that takes prepared transactions and logical replication slots, whose horizon is nobody else's."""
    settings = ("max_prepared_transactions = 5", "wal_level = logical")
    with server_with(tmp_path_factory.mktemp("postgres"), *settings, fsync=False) as url:
        yield url


@pytest.fixture(scope="module")
def databases(server: str) -> Iterator[Databases]:
    with Databases(server) as made:
        yield made


@pytest.fixture
def url(server: str, databases: Databases) -> Iterator[str]:
    """A job's database in which everything was read."""
    with databases.scratch() as made:
        jobs.make_source(made, 1)
        jobs.run(jobs.spec(), made)
        yield made
        for gid, database in jobs.query(server, "select gid, database from pg_prepared_xacts"):
            with jobs.connect(db.with_database(server, database)) as connection:
                connection.execute(sql.SQL("rollback prepared {}").format(gid))


@contextmanager
def opened(url: str, *statements: str, application: str = "etl") -> Generator[Session]:
    """A session with a transaction in which these were done."""
    with psycopg.connect(url, application_name=application) as session:
        for statement in statements:
            session.execute(statement)
        yield session
        if not session.closed:
            session.rollback()


def standing(url: str, clock: Clock | None = None) -> RunRecord:
    """A run that finds a new row, which it may not read."""
    jobs.add_rows(url, 1)
    record = jobs.run(jobs.spec(), url, **({} if clock is None else {"worker_clock": clock.now}))
    assert (record.outcome, record.items) == ("succeeded", 0)
    return record


def held_by(url: str) -> HeldBy:
    found = standing(url).held_by
    assert found is not None
    return found


def xid_of(session: Session) -> str:
    found = session.execute("select pg_current_xact_id()::text").fetchone()
    assert found is not None
    return found[0]


def status(url: str) -> dict[str, Any]:
    return json.loads(invoke(url, "status", "copy_rows", "--json").stdout)


# ── who ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize(
    "statements",
    [[WRITES], ["select from pg_class where oid = 'pg_class'::regclass for update"], ["savepoint one", WRITES]],
)
def test_the_backend_that_holds_is_named_and_ended_by_what_is_said(
    url: str, server: str, elsewhere: bool, statements: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    place = server if elsewhere else url
    with opened(place, *statements) as holder, opened(server, WRITES, application="a later one") as later:
        record = standing(url)
        pid, info = holder.info.backend_pid, holder.info
        assert record.held_by is not None
        assert record.held_by.xid == xid_of(holder) != xid_of(later)
        assert record.held_by.who.startswith(
            f"backend {pid} (user {info.user}, database {info.dbname}, application etl), open since 20"
        )
        (line,) = [each.message for each in caplog.records if "held back" in each.message]
        assert f"backend {pid} (user" in line
        assert str(record.held_by_since) in line.replace("T", " ")
        assert record.held_by.cure is not None
        assert record.held_by.cure in line
        assert jobs.query(url, record.held_by.cure) == [(True,)]
        later.rollback()
        assert jobs.run(jobs.spec(), url).items == 1
        holder.close()


def test_a_batch_of_another_job_is_waited_for_and_only_an_old_one_is_to_be_ended(
    url: str, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(server, WRITES, application="gaffer:other_job") as holder:
        record = standing(url)
        assert record.held_by is not None
        assert "application gaffer:other_job" in record.held_by.who
        assert record.held_by.cure == "wait for it: a batch of gaffer's ends with its batch_timeout"
        assert "To end it: wait for it" in invoke(url, "status").stdout
        monkeypatch.setattr(horizon, "_A_BATCH", timedelta(microseconds=1))
        old = jobs.run(jobs.spec(), url).held_by
        assert old is not None
        assert old.cure is not None
        assert jobs.query(url, old.cure) == [(True,)]
        holder.close()


@pytest.mark.parametrize(
    "statement",
    [
        "select from pg_class",
        "select pg_advisory_xact_lock(7)",
        "set transaction isolation level repeatable read, read only; select from pg_class",
    ],
)
def test_who_only_reads_holds_nothing(url: str, server: str, statement: str) -> None:
    with opened(url, statement), opened(server, statement):
        jobs.add_rows(url, 1)
        record = jobs.run(jobs.spec(), url)
        assert (record.items, record.held_by) == (1, None)
        assert jobs.run(jobs.spec(), url).held_by is None


def test_a_replication_slot_holds_nothing(url: str, server: str) -> None:
    jobs.execute(server, "select pg_create_logical_replication_slot('slot', 'pgoutput')")
    try:
        assert jobs.query(server, "select catalog_xmin from pg_replication_slots where catalog_xmin is not null")
        jobs.add_rows(url, 1)
        assert jobs.run(jobs.spec(), url).items == 1
    finally:
        jobs.execute(server, "select pg_drop_replication_slot('slot')")


@pytest.mark.parametrize("gid", ["invoice 7", "it's\\odd"])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_prepared_transaction_is_named_and_ended_where_it_belongs(
    url: str, server: str, elsewhere: bool, gid: str
) -> None:
    place = server if elsewhere else url
    with psycopg.connect(place) as session:
        number = xid_of(session)
        session.execute(sql.SQL("prepare transaction {}").format(gid))
        name, user = session.info.dbname, session.info.user
    found = held_by(url)
    quoted = jobs.query(url, "select format('%%L', %s::text)", gid)[0][0]
    assert found.xid == number
    assert found.who.startswith(f"prepared transaction {quoted} (user {user}, database {name}), prepared at 20")
    assert found.cure == (
        f"in database {name}: rollback prepared {quoted}, or commit prepared, as its coordinator decided"
    )
    jobs.execute(place, f"rollback prepared {quoted}")
    assert jobs.run(jobs.spec(), url).items == 1


@pytest.mark.parametrize("is_prepared", [False, True])
def test_one_who_looks_in_its_own_database_only_would_be_found_out(
    url: str, server: str, is_prepared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = horizon._HOLDER
    for ours, column in (("a.backend_xid = held.xid", "a.datname"), ("p.transaction = held.xid", "p.database")):
        text = text.replace(ours, f"{ours} and {column} = current_database()")
    assert text.count("current_database()") == 2
    monkeypatch.setattr(horizon, "_HOLDER", text)
    with opened(server, WRITES) as holder:
        if is_prepared:
            holder.rollback()
            holder.execute("select pg_current_xact_id()")
            holder.execute("prepare transaction 'one'")
        assert "does not tell of" in held_by(url).who


def test_what_an_application_calls_itself_is_no_markup(url: str) -> None:
    with opened(url, WRITES, application="a [/red] b"):
        found = held_by(url)
        assert "application a [/red] b)" in found.who
        assert f"waits for {found.who}; seen to stand" in invoke(url, "status").stdout


def test_no_name_writes_on_a_terminal(url: str) -> None:
    gid = "red \x1b[31m"
    with psycopg.connect(url) as session:
        xid_of(session)
        session.execute(sql.SQL("prepare transaction {}").format(gid))
    assert "'red ?[31m'" in held_by(url).who
    assert "\x1b" not in invoke(url, "status").stdout


# ── what a role may see ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def worker(url: str) -> Iterator[str]:
    """The URL for a role that may do the job, and no more."""
    role = f"worker_{uuid4().hex[:12]}"
    grants = f"grant select on source to {role}; grant insert on target to {role}; " + RUNNER.format(role=role)
    jobs.execute(url, f"create role {role} login password 'secret'")
    with jobs.connect(url) as connection:
        connection.execute(grants)
    yield conninfo.make_conninfo(**(db.parse_url(url) | {"user": role, "password": "secret"}))
    with jobs.connect(url) as connection:
        connection.execute(f"drop owned by {role}; drop role {role}")


def test_a_role_without_the_right_names_the_holder_and_says_what_its_age_needs(
    url: str, worker: str, server: str
) -> None:
    role = conninfo.conninfo_to_dict(worker)["user"]
    with opened(server, WRITES) as holder:
        found = held_by_of(url, worker)
        named = f"user {holder.info.user}, database {holder.info.dbname}, application etl"
        grant = f"grant pg_read_all_stats to {role}"
        assert found.xid == xid_of(holder)
        assert found.who == f"backend {holder.info.backend_pid} ({named}); to see since when it is open: {grant}"
        jobs.execute(url, grant)
        began = holder.execute("select date_trunc('second', now())").fetchone()
        assert began is not None
        assert held_by_of(url, worker).who == (
            f"backend {holder.info.backend_pid} ({named}), open since {began[0]:%Y-%m-%d %H:%M:%SZ}"
        )


def test_of_its_own_role_it_sees_the_age_without_any_right(url: str, worker: str) -> None:
    with opened(worker, "select pg_current_xact_id()"):
        who = held_by_of(url, worker).who
        assert ", open since 20" in who
        assert "grant" not in who


def held_by_of(url: str, worker: str) -> HeldBy:
    jobs.add_rows(url, 1)
    found = jobs.run(jobs.spec(), worker).held_by
    assert found is not None
    return found


# ── since when ───────────────────────────────────────────────────────────────────────────────────────────────────


def seen(url: str, clock: Clock) -> list[datetime]:
    """Of two runs, an hour apart, with another holder in the second one: since when each saw its own, and since when
    something waits."""
    with opened(url, WRITES) as first, opened(url, WRITES) as second:
        begun = standing(url, clock).held_by_since
        clock.advance(HOUR)
        again = standing(url, clock).held_by_since
        first.rollback()
        clock.advance(HOUR)
        record = standing(url, clock)
        assert record.held_by is not None
        assert record.held_by.xid == xid_of(second)
        found = status(url)
        assert found["held_by_since"] == str(record.held_by_since).replace(" ", "T")
        assert begun is not None
        assert again is not None
        assert record.held_by_since is not None
        return [begun, again, record.held_by_since, datetime.fromisoformat(found["held_since"])]


def test_one_who_holds_for_a_moment_is_forgotten_before_the_next_tick(url: str) -> None:
    """Which may be a day away: the rows would wait for it, and the alert speak of somebody who is gone."""
    with opened(url, WRITES):
        standing(url)
    soon = "select follow_up_at - gaffer.clock() between '1 second' and '5 minutes' from gaffer.job"
    assert jobs.query(url, soon) == [(True,)]
    assert jobs.run(jobs.spec(), url).items == 1
    assert jobs.query(url, "select held_since, held_by, follow_up_at from gaffer.job") == [(None, None, None)]


def test_the_time_is_of_the_same_holder_and_begins_anew_with_another(url: str) -> None:
    clock = Clock(url)
    first, again, second, waits = seen(url, clock)
    assert first == again
    assert second - first >= 2 * HOUR
    assert waits < first, "the rows have waited since the first of them, whoever held them"
    record = jobs.run(jobs.spec(), url, worker_clock=clock.now)
    assert (record.items, record.held_by, record.held_by_since) == (3, None, None)
    assert [status(url)[name] for name in ("held_since", "held_by", "held_by_since")] == [None] * 3


def test_a_time_that_is_kept_over_a_change_of_holder_would_be_found_out(url: str) -> None:
    ours = (
        "coalesce(p_held_by ->> 'xid', p_held_by ->> 'who')"
        " = coalesce(v_job.held_by ->> 'xid', v_job.held_by ->> 'who')"
    )
    variants.replace(url, "end_run", {ours: "p_held_by is not null and v_job.held_by is not null"})
    first, _, second, _ = seen(url, Clock(url))
    assert first == second


@pytest.mark.parametrize("by_pid", [False, True])
def test_the_next_transaction_of_the_same_backend_is_another_holder(
    url: str, by_pid: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, ours = Clock(url), horizon.holder
    with opened(url, WRITES) as holder:
        pid = holder.info.backend_pid
        if by_pid:  # the broken variant
            monkeypatch.setattr(horizon, "holder", lambda *asked: replace(ours(*asked), xid=str(pid)))
        first = standing(url, clock)
        clock.advance(HOUR)
        holder.rollback()
        jobs.execute(url, "delete from source")  # else the next run would have something to do, and nobody be blamed
        holder.execute(WRITES)
        second = standing(url, clock)
        assert (first.held_by_since == second.held_by_since) == by_pid
        assert first.held_by is not None
        assert first.held_by.cure is not None
        assert jobs.query(url, first.held_by.cure) == [], "whoever has the pid now is left alone"
        holder.execute("select 1")


def test_one_that_is_prepared_meanwhile_is_still_the_same(url: str) -> None:
    clock = Clock(url)
    with psycopg.connect(url) as session:
        number = xid_of(session)
        before = standing(url, clock)
        clock.advance(HOUR)
        session.execute("prepare transaction 'later'")
    after = standing(url, clock)
    assert before.held_by is not None
    assert after.held_by is not None
    assert [before.held_by.xid, after.held_by.xid] == [number, number]
    assert before.held_by_since == after.held_by_since
    assert after.held_by.who.startswith("prepared transaction 'later'")


# ── where it is said ─────────────────────────────────────────────────────────────────────────────────────────────


def test_status_says_who_and_what_to_do(url: str) -> None:
    clock = Clock(url)
    assert "waits for" not in invoke(url, "status").stdout
    with opened(url, WRITES):
        record = standing(url)
        clock.advance(3 * HOUR)
        found, shown = status(url), invoke(url, "status").stdout
        assert record.held_by is not None
        assert found["held_by"] == {
            "who": record.held_by.who, "xid": record.held_by.xid, "cure": record.held_by.cure,
        }  # fmt: skip
        (line,) = [each for each in shown.splitlines() if each.startswith("copy_rows: since 20")]
        assert f"something waits for {record.held_by.who}; seen to stand since 20" in line
        assert line.endswith(f"Nothing is lost, and it waits until that is over. To end it: {record.held_by.cure}")
        told = json.loads(invoke(url, "runs", "--json").stdout.splitlines()[0])
        assert told["held_by"] == found["held_by"]


def test_dagster_is_told(url: str) -> None:
    clock = Clock(url)
    with opened(url, WRITES):
        standing(url, clock)
        clock.advance(HOUR)
        record = standing(url, clock)
    told = metadata.of_run(record, jobs.spec())
    assert record.held_by is not None
    assert told["gaffer/held_by"] == record.held_by.who
    assert HOUR.total_seconds() <= told["gaffer/held_seconds"] < HOUR.total_seconds() + 60
    assert not any(
        "held" in key for key in metadata.of_run(jobs.run(jobs.spec(), url, worker_clock=clock.now), jobs.spec())
    )


def alert_of(url: str) -> str:
    with db.connect(url, application_name="test") as connection:
        watch.look(connection, watch.Watcher("test:here"))
        (found,) = [each for each in alerts.opened(connection) if each.kind == "stalled"]
    return write(uuid4(), [Notice(Event.OPENED, found)]).text


@pytest.mark.parametrize("gid", [None, "invoice 7", "invoice.7"])
def test_the_alert_is_an_instruction(url: str, gid: str | None) -> None:
    clock = Clock(url)
    with psycopg.connect(url, application_name="etl") as session:
        xid_of(session)
        pid, name, user = session.info.backend_pid, session.info.dbname, session.info.user
        if gid is not None:
            session.execute(sql.SQL("prepare transaction {}").format(gid))
        record = standing(url)
        clock.advance(HOUR + timedelta(minutes=1))
        text = alert_of(url)
        lines = dict(line.split(": ", 1) for line in text.splitlines() if ": " in line)
        cure = lines["What to do"]
        assert "what is new waits for a transaction that is open elsewhere" in text
        assert f"(seen to stand since {record.held_by_since:%Y-%m-%d %H:%M}Z" in lines["Held by"]
        assert cure.endswith(
            "nothing is lost: what is new waits until that transaction ends; `gaffer status copy_rows` says how to end "
            "it"
        )
        if gid is None:
            assert lines["Held by"].startswith(f"backend {pid} (user {user}, database {name}, application etl)")
            assert cure.startswith("select pg_terminate_backend(pid) from pg_stat_activity where pid = ")
            statement = cure.split("; nothing")[0]
            assert jobs.query(url, statement) == [(True,)]
            session.close()
        elif gid == "invoice 7":
            assert lines["Held by"].startswith(f"prepared transaction 'invoice 7' (user {user}, database {name})")
            assert cure.startswith(f"in database {name}: rollback prepared 'invoice 7', or commit prepared")
        else:  # what would be altered to be said is no instruction any more
            assert cure.startswith("nothing is lost")
            assert "rollback prepared 'invoice.7'" in invoke(url, "status").stdout


def test_intervals_name_the_holder_and_its_time_as_well(url: str, server: str) -> None:
    job = replace(jobs.spec("daily", timeout="1s"), due=EachInterval("@hourly", settle="1ms", start=_hour()))
    with opened(server, WRITES) as holder:
        record = jobs.run(job, url, lambda batch: None)
        assert record.outcome == "capped"
        assert record.held_by is not None
        assert record.held_by.xid == xid_of(holder)
        assert record.held_by_since == record.ended_at
    assert jobs.run(job, url, lambda batch: None).held_by is None


def _hour() -> datetime:
    return datetime.now(timezone.utc).replace(minute=0, second=0, microsecond=0) - HOUR


# ── what it costs, and what it does not say ──────────────────────────────────────────────────────────────────────


def test_runs_whose_horizon_moves_ask_for_no_holder(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    for module, name in ((horizon, "holder"), (new_rows, "is_held_back")):
        monkeypatch.setattr(module, name, _noted(getattr(module, name), name, asked))
    jobs.add_rows(url, 3)
    jobs.run(jobs.spec(batch_rows=1), url)
    assert asked == []
    with opened(url, "select 1"):
        jobs.run(jobs.spec(), url)
        assert asked == ["is_held_back"], "only when idle: as the one question whether anything waits"
    asked.clear()
    with opened(url, WRITES):
        standing(url)
    assert asked == ["is_held_back", "holder"]


def _noted(function: Any, name: str, asked: list[str]) -> Any:
    def note(*given: Any) -> Any:
        asked.append(name)
        return function(*given)

    return note


def test_rows_that_will_never_be_due_do_not_wait(url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "gaffer")
    job = replace(jobs.spec(), due=NewRows("source", "id", where="value <> 'v1'"))
    with opened(url, WRITES):
        jobs.add_rows(url, 1)
        assert jobs.run(job, url).held_by is None
        jobs.add_rows(url, 2)
        assert jobs.run(job, url).held_by is not None


def test_one_that_is_over_by_then_is_not_blamed(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = new_rows.is_held_back
    with opened(url, WRITES) as holder:
        jobs.add_rows(url, 1)

        def ends_first(*asked: Any) -> bool:
            holder.rollback()
            return ours(*asked)

        monkeypatch.setattr(new_rows, "is_held_back", ends_first)
        record = jobs.run(jobs.spec(), url)
    assert (record.items, record.held_by) == (0, None)
