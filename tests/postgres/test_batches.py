"""The guarded connection: what a batch may send, what becomes of errors, and how rows are written."""

from __future__ import annotations

import gc
import inspect
import logging
import os
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID

import psycopg
import pytest
from psycopg import errors as pg
from psycopg import sql
from psycopg.rows import dict_row
from psycopg.types.json import Jsonb

from gaffer_dagster.domain.run import Outcome, RunRecord
from gaffer_dagster.engine import keeper
from gaffer_dagster.engine.batch import Batch
from gaffer_dagster.errors import BadInputError, BatchEndedError, DeadlinePassedError, GafferError
from gaffer_dagster.store import batches, db
from tests.support import jobs, protocol
from tests.support.protocol import Actor, until

SPEC = jobs.spec()


@pytest.fixture
def work(url: str) -> Callable[[Callable[[Batch], Any]], RunRecord]:
    """Does something in a batch of a run, in which one row is due."""
    jobs.make_source(url)

    def in_a_batch(what: Callable[[Batch], Any], **bounds: Any) -> RunRecord:
        jobs.add_rows(url, 1)
        return jobs.run(jobs.spec(**bounds), url, what)

    return in_a_batch


def last_run(url: str) -> tuple[Any, ...]:
    return jobs.query(url, "select outcome, sqlstate, error from gaffer.job_runs order by id desc limit 1")[0]


# ── what may be sent ─────────────────────────────────────────────────────────────────────────────────────────────

CONTROL: list[Any] = [
    "commit",
    "COMMIT WORK",
    "end",
    "rollback",
    "abort",
    "begin",
    "start transaction",
    "savepoint a",
    "release a",
    "rollback to savepoint a",
    "commit and chain",
    "prepare transaction 'x'",
    "PREPARE\n\tTRANSACTION 'x'",
    "commit prepared 'x'",
    "rollback prepared 'x'",
    "set transaction isolation level serializable",
    "set session characteristics as transaction read only",
    "/* x */ commit",
    "/* a /* nested */ b */ commit",
    "/**/commit",
    ";commit",
    " ; ; \n commit;",
    "-- c\ncommit",
    "-- c\rcommit",
    "-- c\n-- d\n/* e */ ; commit",
    b"commit",
    b" /* x */ rollback",
    sql.SQL("commit"),
    sql.SQL("{} {}").format(sql.SQL("rollback to"), sql.Identifier("a")),
]
OUTLIVES: list[Any] = [
    "set search_path = evil",
    "SET statement_timeout TO 0",
    "set session statement_timeout = 0",
    "set role postgres",
    "set time zone 'UTC'",
    "set/**/search_path = evil",
    "set -- c\n search_path = evil",
    "reset all",
    "reset statement_timeout",
    "discard all",
    "deallocate all",
    "listen x",
    "unlisten *",
    "load 'plpgsql'",
    "prepare p as select 1",
    "declare c cursor with hold for select 1",
    "declare c no scroll cursor\nwith hold for select 1",
    "select set_config('search_path', 'evil', false)",
    "SELECT pg_catalog.set_config ('default_transaction_read_only', 'on', is_local => FALSE), 1",
    "select set_config('search_path', current_setting('search_path') || ',evil', 'f'::boolean)",
    "with a as (select set_config('role', 'postgres', false)) select * from a",
]


def test_transaction_control_is_refused_before_it_is_sent(url: str, work: Any) -> None:
    def tries(batch: Batch) -> None:
        jobs.copy_rows(batch)
        for text in CONTROL:
            for send in (batch.execute, batch.cursor().execute, lambda text: batch.executemany(text, [[]])):
                with pytest.raises(BatchEndedError, match=r"was not sent.*gaffer's to end"):
                    send(text)
        jobs.copy_rows(batch)  # and the batch is none the worse for it

    assert work(tries).outcome is Outcome.SUCCEEDED
    assert jobs.query(url, "select count(*) from target") == [(2,)]


def test_what_would_outlive_the_batch_is_refused(work: Any) -> None:
    def tries(batch: Batch) -> None:
        for text in OUTLIVES:
            with pytest.raises(BatchEndedError, match=r"was not sent: it would outlive"):
                batch.execute(text)

    assert work(tries).outcome is Outcome.SUCCEEDED


def test_what_only_looks_like_control_is_sent(url: str, work: Any) -> None:
    def tries(batch: Batch) -> None:
        batch.execute("set local work_mem = '8MB'")
        batch.execute("SET  LOCAL search_path = public")
        batch.execute("set constraints all deferred")
        batch.execute("select set_config('work_mem', '8MB', true), coalesce(null, false)")
        batch.execute("select set_config('my.own', coalesce(current_setting('my.own', true), 'a'), true)")
        batch.execute("select 'commit', /* rollback */ 1 -- end")
        batch.execute("/* begin */ select 1")
        batch.execute("create temp table committed (n int) on commit drop")
        batch.execute('create temp table "end" (begin int)')
        batch.execute("with settings as (select 1) select * from settings")
        batch.execute("declare c cursor for select 1")
        assert batch.execute("fetch all from c").fetchall() == [(1,)]
        batch.execute("do $$ begin perform 1; end $$")

    assert work(tries).outcome is Outcome.SUCCEEDED


def test_two_statements_in_one_text_are_refused_by_the_server(url: str, work: Any) -> None:
    def tries(batch: Batch) -> None:
        jobs.copy_rows(batch)
        for text, params in (
            ("select 1; commit", None),
            ("select 1; commit", []),
            ("select %s; commit", [1]),
            ("select 1; select 2", None),
            ("insert into target values (7); rollback; select 1", None),
        ):
            with pytest.raises(psycopg.Error, match="cannot insert multiple commands"), batch.savepoint():
                batch.execute(text, params)
        with pytest.raises(psycopg.Error, match="cannot insert multiple commands"), batch.savepoint():
            batch.executemany("select %s; commit", [[1], [2]])

    assert work(tries).outcome is Outcome.SUCCEEDED
    assert jobs.query(url, "select count(*) from target") == [(1,)]


def test_procedural_code_cannot_end_the_transaction(url: str, work: Any) -> None:
    jobs.execute(url, "create procedure ends() language plpgsql as $$ begin commit; end $$")

    def tries(batch: Batch) -> None:
        jobs.copy_rows(batch)
        for text in ("do $$ begin commit; end $$", "call ends()", "do $$ begin rollback; end $$"):
            with pytest.raises(pg.InvalidTransactionTermination), batch.savepoint():
                batch.execute(text)

    assert work(tries).outcome is Outcome.SUCCEEDED
    assert jobs.query(url, "select count(*) from target") == [(1,)]


def test_streaming_is_refused(work: Any) -> None:
    def tries(batch: Batch) -> None:
        for send in (batch.cursor().copy, batch.cursor().stream):
            with pytest.raises(BatchEndedError, match="no timeout"):
                send("copy target from stdin")

    assert work(tries).outcome is Outcome.SUCCEEDED


# What psycopg offers on a connection, and what it does with one whose cursor is of another kind.
BESIDE_THE_BATCH: list[Callable[[psycopg.Connection[Any]], Any]] = [
    lambda connection: connection.commit(),
    lambda connection: connection.rollback(),
    lambda connection: connection.close(),
    lambda connection: connection.__enter__(),
    lambda connection: connection.transaction().__enter__(),
    lambda connection: connection.pipeline().__enter__(),
    lambda connection: setattr(connection, "autocommit", False),
    lambda connection: connection.set_read_only(True),
    lambda connection: connection.tpc_begin("x"),
    lambda connection: next(connection.notifies(timeout=0)),
    lambda connection: connection.cursor("named").execute("select 1"),
    lambda connection: psycopg.ClientCursor(connection).execute("commit; begin"),
    lambda connection: psycopg.Cursor(connection).execute("commit; begin"),
    lambda connection: psycopg.RawCursor(connection).executemany("commit", [[]]),
    lambda connection: next(psycopg.Cursor(connection).stream("select generate_series(1, 100000)")),
    lambda connection: psycopg.Cursor(connection).copy("copy target from stdin").__enter__(),
]


def test_nothing_but_a_batchs_cursor_sends_on_its_connection(url: str, work: Any) -> None:
    """What the batch has written before would be committed without it, and come again."""

    def tries(batch: Batch) -> None:
        jobs.copy_rows(batch)
        connection = batch.cursor().connection
        for use in BESIDE_THE_BATCH:
            with pytest.raises(BatchEndedError, match=r"nothing was sent.*use those, batch\.savepoint"):
                use(connection)
        for text in ("commit", "set search_path = evil"):
            with pytest.raises(BatchEndedError, match="was not sent"):
                connection.execute(text)
        for send in (connection.cursor().copy, connection.cursor().stream):
            with pytest.raises(BatchEndedError, match="no timeout"):
                send("copy target from stdin")
        assert connection.execute("select count(*) from target").fetchone() == (1,)
        assert sql.Identifier("a").as_string(connection) == '"a"'

    assert work(tries).outcome is Outcome.SUCCEEDED
    assert jobs.query(url, "select count(*) from target") == [(1,)]


def test_without_that_what_it_wrote_is_kept_and_comes_again(
    url: str, work: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def commits(batch: Batch) -> None:
        jobs.copy_rows(batch)
        batch.cursor().connection.commit()

    with pytest.raises(BatchEndedError, match="nothing was sent"):
        work(commits)
    monkeypatch.setattr(batches.BatchConnection, "wait", psycopg.Connection.wait)
    with pytest.raises(BatchEndedError, match="ended by its own code"):
        jobs.run(SPEC, url, commits)
    assert jobs.run(SPEC, url).items == 1
    assert jobs.query(url, "select count(*) from target") == [(2,)]


def test_a_batch_that_was_used_is_gone_with_its_rows_once_nobody_has_it(url: str, work: Any) -> None:
    """Not when somebody looks for cycles: there are many batches, of many rows."""
    kept: list[weakref.ref[Batch]] = []

    def uses(batch: Batch) -> None:
        jobs.copy_rows(batch)
        kept.append(weakref.ref(batch))

    gc.disable()
    try:
        work(uses)
    finally:
        gc.enable()
    assert kept[0]() is None


def test_a_type_that_is_registered_with_the_batchs_connection_is_known_to_its_rows(url: str, work: Any) -> None:
    class Amount(int):
        pass

    class AmountDumper(psycopg.adapt.Dumper):
        def dump(self, obj: Amount) -> bytes:
            return str(obj + 1).encode()

    def registers(batch: Batch) -> None:
        batch.cursor().connection.adapters.register_dumper(Amount, AmountDumper)
        assert batch.execute("select %s::int", [Amount(1)]).fetchone() == (2,)

    assert work(registers).outcome is Outcome.SUCCEEDED


def send(batch: Batch, statement: bytes) -> None:
    """Past everything that gaffer and psycopg look at."""
    batch.cursor().connection.pgconn.exec_(statement)


@pytest.mark.parametrize("statement", [b"commit", b"commit; begin"])
def test_a_commit_past_the_batchs_connection_is_found_out(url: str, work: Any, statement: bytes) -> None:
    """GF004. What it committed stays committed, and unfenced; it is said, not prevented."""

    def ends(batch: Batch) -> None:
        jobs.copy_rows(batch)
        send(batch, statement)
        if b"begin" in statement:
            jobs.copy_rows(batch)

    with pytest.raises(BatchEndedError, match="ended by its own code"):
        work(ends)
    outcome, sqlstate, error = last_run(url)
    assert (outcome, sqlstate) == ("failed", None)
    assert "ended by its own code. What it had written before a COMMIT of its own is kept" in error
    assert "and comes again: leave the transaction to gaffer, and protect= the tables, so that nothing is kept" in error
    assert jobs.query(url, "select position from gaffer.job_watermark") == [(None,)]
    assert jobs.query(url, "select count(*) from target") == [(1,)]


def test_a_connection_that_is_closed_by_the_batch_is_not_taken_for_a_lost_one(url: str, work: Any) -> None:
    """It would be done again, and again unfenced."""

    def closes(batch: Batch) -> None:
        jobs.copy_rows(batch)
        send(batch, b"commit")
        psycopg.Connection.close(batch._connection)

    with pytest.raises(BatchEndedError, match="closed by its own code"):
        work(closes)
    assert last_run(url)[0] == "failed"
    assert jobs.query(url, "select count(*) from target") == [(1,)]


ENDLESS = [b"copy target from stdin", b"select repeat('x', 1000) from generate_series(1, 1000000)"]


@pytest.mark.parametrize("statement", ENDLESS)
@pytest.mark.parametrize("goes_on", [False, True])
def test_a_statement_that_was_left_open_fails_the_batch_at_once(
    url: str, work: Any, statement: bytes, goes_on: bool
) -> None:
    """Whatever is sent then would wait for it, and no timeout reaches a server that waits for its client."""

    def leaves(batch: Batch) -> None:
        batch.cursor().connection.pgconn.send_query(statement)
        if goes_on:
            jobs.copy_rows(batch)

    with pytest.raises(BatchEndedError, match=r"is still under way.*use batch\.copy"):
        work(leaves)
    assert last_run(url)[0] == "failed"
    assert jobs.query(url, "select count(*) from target") == [(0,)]


def fails(*_: Any) -> Any:
    raise OSError("not now")


@pytest.mark.parametrize("statement", ENDLESS)
@pytest.mark.parametrize("without", ["the server's help", "shutting the socket down", "either"])
def test_a_statement_that_takes_no_cancel_loses_its_connection(
    url: str, work: Any, statement: bytes, without: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The function is busy with something else, while its transaction holds up everybody."""
    monkeypatch.setattr(keeper, "_CUT_AFTER", 0.5)
    if without != "the server's help":
        monkeypatch.setattr(os, "dup", fails)
    if without != "shutting the socket down":
        monkeypatch.setattr(keeper.Keeper, "_own", fails)
    is_open = "select 1 from pg_stat_activity where application_name = 'gaffer:copy_rows' and backend_xid is not null"

    def leaves(batch: Batch) -> None:
        jobs.copy_rows(batch)
        batch.cursor().connection.pgconn.send_query(statement)
        assert jobs.query(url, is_open)
        if without == "either":
            time.sleep(4)
            assert jobs.query(url, is_open)
        else:
            until(lambda: not jobs.query(url, is_open))

    with pytest.raises(DeadlinePassedError, match="cut at the run's deadline of 2s"):
        work(leaves, timeout="2s")
    assert last_run(url)[0] == "timed_out"
    assert jobs.query(url, "select count(*) from target") == [(0,)]


def test_a_commit_whose_answer_another_process_took_is_looked_for(
    url: str, work: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child of a fork has the connection, too. Only ROLLBACK says that nothing was kept."""

    def forks(batch: Batch) -> None:
        jobs.copy_rows(batch)
        child = os.fork()
        if not child:
            with suppress(BaseException):
                batch.cursor().connection.pgconn.send_query(b"select 1")  # its answer is for whoever reads
            os._exit(0)
        os.waitpid(child, 0)

    record = work(forks)
    assert (record.outcome, record.items, record.batches, record.fence) == (Outcome.SUCCEEDED, 1, 1, 2)
    assert jobs.query(url, "select count(*) from target") == [(1,)]
    # What is taken for a failure is not looked for, and was kept.
    monkeypatch.setattr(db, "lost_connection", lambda error: False)
    with pytest.raises(psycopg.OperationalError, match="answered SELECT 1 to COMMIT: another process"):
        work(forks)
    assert jobs.query(url, "select count(*) from target") == [(2,)]


def test_a_forked_child_may_not_use_the_batch(url: str, work: Any) -> None:
    def forks(batch: Batch) -> None:
        child = os.fork()
        if not child:
            try:
                jobs.copy_rows(batch)
            except BatchEndedError as error:
                os._exit(7 if "belongs to the process" in str(error) else 1)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        jobs.copy_rows(batch)

    assert work(forks).fence == 1
    assert jobs.query(url, "select count(*) from target") == [(1,)]


def test_copy_through_execute_fails_the_batch(url: str, work: Any) -> None:
    for text in ("copy target from stdin", "copy target to stdout"):
        with pytest.raises(psycopg.ProgrammingError, match="COPY cannot be used"):
            work(lambda batch, text=text: batch.execute(text))
    assert protocol.outcomes(url) == ["failed", "failed"]


def test_a_statement_after_such_an_end_is_refused(url: str, work: Any) -> None:
    def goes_on(batch: Batch) -> None:
        send(batch, b"rollback")
        jobs.copy_rows(batch)

    with pytest.raises(BatchEndedError, match="ended by its own code"):
        work(goes_on)
    assert jobs.query(url, "select count(*) from target") == [(0,)]


def test_a_batch_cannot_be_used_when_it_is_over(url: str, work: Any) -> None:
    kept: list[Batch] = []
    cursors: list[Any] = []

    def keep(batch: Batch) -> None:
        kept.append(batch)
        cursors.append(batch.cursor())

    work(keep)
    for use in (
        lambda: kept[0].execute("select 1"),
        lambda: kept[0].executemany("select %s", [[1]]),
        lambda: kept[0].insert("target", [{"id": 1}]),
        lambda: kept[0].copy("target", [{"id": 1}]),
        lambda: kept[0].savepoint().__enter__(),
        lambda: cursors[0].execute("select 1"),
    ):
        with pytest.raises(BatchEndedError, match="batch 1 is over"):
            use()
    assert jobs.query(url, "select count(*) from target") == [(0,)]


def test_a_batch_of_a_loop_is_over_when_the_next_one_is_asked_for(url: str) -> None:
    jobs.make_source(url, 3)
    with jobs.opened(jobs.spec(batch_rows=1), url) as run:
        before: Batch | None = None
        for batch in run:
            if before is not None:
                with pytest.raises(BatchEndedError, match="is over"):
                    before.execute("select 1")
            jobs.copy_rows(batch)
            before = batch
    assert run.outcome is Outcome.SUCCEEDED
    assert jobs.query(url, "select count(*), max(batch) from target") == [(3, 3)]


def test_a_loop_left_early_leaves_its_batch_undone(url: str) -> None:
    jobs.make_source(url, 30)
    with jobs.opened(jobs.spec(batch_rows=10), url) as run:
        for batch in run:
            jobs.copy_rows(batch)
            if batch.number == 2:
                break
    assert run.record is not None
    assert (run.outcome, run.record.items, run.record.backlog) == (Outcome.CAPPED, 10, 20)
    with pytest.raises(BatchEndedError):
        batch.execute("select 1")
    assert jobs.query(url, "select count(*) from target") == [(10,)]


def test_a_batch_tells_what_it_is(url: str) -> None:
    jobs.make_source(url, 3)
    told: list[Any] = []

    def look(batch: Batch) -> dict[str, Any]:
        told.append((batch.number, batch.fence, batch.run_id, [batch.key_for(row) for row in batch.rows], batch.rows))
        with pytest.raises(BadInputError, match=r"use batch\.rows"):
            _ = batch.window
        with pytest.raises(BadInputError, match=r"key_for\(row\)"):
            _ = batch.key
        return {f"batch {batch.number}": len(batch.rows)}

    with jobs.opened(jobs.spec(batch_rows=2), url) as run:
        run.apply(look)
    assert [entry[:2] for entry in told] == [(1, 1), (2, 1)]
    assert told[0][2] == told[1][2] == run.record.id
    assert told[0][3] == ["copy_rows/1", "copy_rows/2"]
    assert told[0][4] == [{"id": 1, "value": "v1"}, {"id": 2, "value": "v2"}]
    assert run.metadata == {"batch 1": 2, "batch 2": 1}


# ── errors ───────────────────────────────────────────────────────────────────────────────────────────────────────

CANARY = "canary-4711"


def violate(batch: Batch) -> None:
    batch.execute("insert into unique_values values (%s)", [CANARY])


def violate_and_swallow(batch: Batch) -> None:
    with suppress(psycopg.Error):
        violate(batch)


def violate_swallow_and_go_on(batch: Batch) -> None:
    violate_and_swallow(batch)
    batch.execute("insert into target values (1)")


@pytest.mark.parametrize("how", [violate, violate_and_swallow, violate_swallow_and_go_on])
def test_an_error_that_is_swallowed_fails_the_run_as_one_that_is_not(
    url: str, work: Any, how: Callable[[Batch], None], caplog: pytest.LogCaptureFixture
) -> None:
    """B79. The record has the original error, written on another connection, and no values of rows."""
    caplog.set_level(logging.DEBUG, "gaffer")
    jobs.execute(url, f"create table unique_values (v text unique); insert into unique_values values ('{CANARY}')")

    def writes(batch: Batch) -> None:
        jobs.copy_rows(batch)
        how(batch)

    with pytest.raises(BatchEndedError if how is violate_swallow_and_go_on else pg.UniqueViolation) as raised:
        work(writes)
    original = raised.value.__cause__ if how is violate_swallow_and_go_on else raised.value
    assert isinstance(original, pg.UniqueViolation)
    assert CANARY in str(original)  # the user sees it all; what is kept and logged does not have it
    outcome, sqlstate, error = last_run(url)
    assert (outcome, sqlstate) == ("failed", "23505")
    assert "duplicate key value violates unique constraint" in error
    kept = jobs.query(url, "select r::text from gaffer.job_runs r union all select j::text from gaffer.job j")
    assert CANARY not in str(kept) + caplog.text + str([vars(record) for record in caplog.records])
    assert jobs.query(url, "select count(*) from target") == [(0,)]
    assert jobs.run(SPEC, url).items == 1


def test_the_users_exception_arrives_as_it_was(url: str, work: Any) -> None:
    class OwnError(Exception):
        pass

    error = OwnError("the tariff table is empty")

    def fails(batch: Batch) -> None:
        jobs.copy_rows(batch)
        raise error

    with pytest.raises(OwnError) as raised:
        work(fails)
    assert raised.value is error
    assert last_run(url) == ("failed", None, "OwnError: the tariff table is empty")
    assert jobs.query(url, "select count(*) from target") == [(0,)]


def test_batches_before_a_failed_one_stay(url: str) -> None:
    jobs.make_source(url, 30)

    def fails(batch: Batch) -> None:
        jobs.copy_rows(batch)
        if batch.number == 3:
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        jobs.run(jobs.spec(batch_rows=10), url, fails)
    assert jobs.query(url, "select outcome, items, batches from gaffer.job_runs") == [("failed", 20, 2)]
    assert jobs.run(SPEC, url).items == 10
    assert jobs.query(url, "select count(*), count(distinct id) from target") == [(30, 30)]


def test_an_interrupt_frees_the_lease_and_the_rows_at_once(url: str, work: Any) -> None:
    class Interrupt(BaseException):
        """As Dagster's: neither KeyboardInterrupt nor SystemExit."""

    def interrupted(batch: Batch) -> None:
        jobs.copy_rows(batch)
        batch.execute("select 1 from source for update")
        raise Interrupt

    with pytest.raises(Interrupt):
        work(interrupted)
    with jobs.connect(url) as connection:
        connection.execute("select 1 from source for update nowait")
    assert protocol.lease_row(url)[1] is None
    assert protocol.outcomes(url) == ["interrupted"]
    assert jobs.query(url, "select consecutive_failures from gaffer.job") == [(0,)]
    assert jobs.run(SPEC, url).items == 1


def test_a_savepoint_undoes_the_part_that_failed(url: str, work: Any) -> None:
    jobs.execute(url, "create table unique_values (v text unique); insert into unique_values values ('a')")

    def partly(batch: Batch) -> None:
        for value in ("b", "a", "c"):
            with suppress(pg.UniqueViolation), batch.savepoint():
                batch.execute("insert into target values (%s)", [ord(value)])
                batch.execute("insert into unique_values values (%s)", [value])
        with suppress(ValueError), batch.savepoint():
            batch.execute("insert into unique_values values ('d')")
            with suppress(pg.UniqueViolation), batch.savepoint():
                batch.execute("insert into unique_values values ('a')")
            raise ValueError

    assert work(partly).outcome is Outcome.SUCCEEDED
    assert jobs.query(url, "select v from unique_values order by 1") == [("a",), ("b",), ("c",)]
    assert jobs.query(url, "select chr(id::int) from target order by 1") == [("b",), ("c",)]


def test_an_error_swallowed_within_a_savepoint_is_not_lost(url: str, work: Any) -> None:
    jobs.execute(url, "create table unique_values (v text unique); insert into unique_values values ('a')")

    def swallows(batch: Batch) -> None:
        with batch.savepoint(), suppress(pg.UniqueViolation):
            batch.execute("insert into unique_values values ('a')")

    with pytest.raises(BatchEndedError, match="duplicate key"):
        work(swallows)
    assert last_run(url)[0] == "failed"


def test_a_table_name_that_cannot_be_read_fails_the_batch_by_name(url: str, work: Any) -> None:
    """The look-up may spoil the transaction, and the name must not be lost behind that."""

    def swallows(batch: Batch) -> None:
        with suppress(BadInputError):
            batch.insert("no such. table", [{"id": 1}])

    if jobs.query(url, "select current_setting('server_version_num')::int >= 160000") == [(True,)]:
        assert work(swallows).outcome is Outcome.SUCCEEDED  # the look-up finds nothing, and spoils nothing
    else:
        with pytest.raises(BadInputError, match=r"no such\. table"):
            work(swallows)
        assert "no such. table" in last_run(url)[2]


@pytest.mark.parametrize("how", ["insert", "copy"])
@pytest.mark.parametrize(
    ("column", "value"),
    [("about", object()), ("about", {"a": object()}), ("id", object()), ("name", "a\0b"), ("name", "\ud800")],
)
def test_a_value_that_cannot_be_sent_is_named_by_its_row_and_column(
    url: str, work: Any, how: str, column: str, value: Any
) -> None:
    jobs.execute(url, "create table things (id int, name text, about jsonb)")
    good = {"id": 1, "name": "a", "about": {}}
    with pytest.raises(BadInputError, match=rf"row 1, column '{column}' \(a \w+\) for table public\.things"):
        work(lambda batch: getattr(batch, how)("things", [good, good | {column: value}]))
    assert last_run(url)[0] == "failed"
    assert jobs.query(url, "select count(*) from things") == [(0,)]


def test_a_constraint_that_waited_for_the_commit_is_a_known_failure(url: str, work: Any) -> None:
    jobs.execute(
        url,
        "create table parents (id int primary key);"
        " create table children (parent int references parents deferrable initially deferred)",
    )

    def orphan(batch: Batch) -> None:
        jobs.copy_rows(batch)
        batch.execute("insert into children values (7)")

    with pytest.raises(pg.ForeignKeyViolation):
        work(orphan)
    outcome, sqlstate, error = last_run(url)
    assert (outcome, sqlstate) == ("failed", "23503")
    assert "violates foreign key constraint" in error
    assert "(7)" not in error
    assert jobs.query(url, "select count(*) from target") == [(0,)]
    assert jobs.query(url, "select position from gaffer.job_watermark") == [(None,)]
    assert jobs.query(url, "select items, batches from gaffer.job_runs") == [(0, 0)]
    assert jobs.run(SPEC, url).items == 1


def test_a_deadlock_is_done_again_under_the_same_fence(url: str, work: Any) -> None:
    jobs.execute(url, "create table pair (n int primary key, by text); insert into pair values (1), (2)")
    tries: list[int] = []
    others: list[Actor] = []
    with psycopg.connect(url) as other:
        other.execute("set deadlock_timeout = '10min'")  # so that the batch is the one that is told

        def crosses() -> None:
            other.execute("update pair set by = 'other' where n = 1")
            other.commit()

        def cross(batch: Batch) -> None:
            tries.append(batch.fence)
            jobs.copy_rows(batch)
            batch.execute("update pair set by = 'batch' where n = 1")
            if len(tries) == 1:
                other.execute("update pair set by = 'other' where n = 2")
                others.append(Actor(crosses))
                until(lambda: protocol.waits_for_a_lock(url))
            batch.execute("update pair set by = 'batch' where n = 2")

        record = work(cross)
        others[0].result()
    assert (record.outcome, record.items, record.batches, record.fence) == (Outcome.SUCCEEDED, 1, 1, 1)
    assert tries == [1, 1]
    assert jobs.query(url, "select count(*) from target") == [(1,)]
    assert jobs.query(url, "select by from pair") == [("batch",), ("batch",)]


@pytest.mark.parametrize("sqlstate", ["40001", "40P01"])
def test_what_may_succeed_when_done_again_is(url: str, work: Any, sqlstate: str) -> None:
    tries: list[int] = []

    def twice(batch: Batch) -> None:
        tries.append(batch.fence)
        jobs.copy_rows(batch)
        if len(tries) < 3:
            batch.execute(f"do $$ begin raise exception 'try again' using errcode = '{sqlstate}'; end $$")

    assert work(twice).outcome is Outcome.SUCCEEDED
    assert tries == [1, 1, 1]
    assert jobs.query(url, "select count(*) from target") == [(1,)]


def test_it_is_done_again_only_so_often(url: str, work: Any) -> None:
    tries: list[int] = []

    def never(batch: Batch) -> None:
        tries.append(batch.fence)
        batch.execute("do $$ begin raise exception 'never' using errcode = '40001'; end $$")

    with pytest.raises(pg.SerializationFailure):
        work(never)
    assert len(tries) == 5
    assert last_run(url) == ("failed", "40001", "never")


def test_a_backend_that_is_ended_is_replaced_and_the_batch_done_again(url: str, work: Any) -> None:
    tries: list[int] = []

    def cut(batch: Batch) -> None:
        tries.append(batch.fence)
        jobs.copy_rows(batch)
        if len(tries) == 1:
            row = batch.execute("select pg_backend_pid()").fetchone()
            jobs.query(url, "select pg_terminate_backend(%s, 10000)", row[0])

    assert work(cut).outcome is Outcome.SUCCEEDED
    assert len(tries) == 2
    assert jobs.query(url, "select count(*) from target") == [(1,)]


@pytest.mark.parametrize("noticed_by", ["a statement", "the commit"])
def test_a_database_that_is_away_for_a_moment_is_waited_for(url: str, work: Any, noticed_by: str) -> None:
    tries: list[int] = []
    elsewhere = psycopg.conninfo.make_conninfo(url, dbname="postgres")
    database = psycopg.conninfo.conninfo_to_dict(url)["dbname"]

    def restarts(batch: Batch) -> None:
        tries.append(batch.fence)
        jobs.copy_rows(batch)
        if len(tries) == 1:
            jobs.execute(elsewhere, f"alter database {database} allow_connections false")
            ended = "select pg_terminate_backend(pid, 10000) from pg_stat_activity where datname = %s"
            jobs.query(elsewhere, ended, database)

            def back() -> None:
                until(lambda: "cannot be reached" in caught.text)
                jobs.execute(elsewhere, f"alter database {database} allow_connections true")

            back_again.append(Actor(back))
            if noticed_by == "a statement":
                batch.execute("select 1")

    back_again: list[Actor] = []
    caught = Caught()
    logging.getLogger("gaffer").addHandler(caught)
    try:
        record = work(restarts)
    finally:
        logging.getLogger("gaffer").removeHandler(caught)
        jobs.execute(elsewhere, f"alter database {database} allow_connections true")
    # A COMMIT that was sent may have arrived: that takes the next fence to find out.
    assert (record.outcome, record.items, record.fence) == (
        Outcome.SUCCEEDED,
        1,
        1 if noticed_by == "a statement" else 2,
    )
    assert jobs.query(url, "select count(*) from target") == [(1,)]


class Caught(logging.Handler):
    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += record.getMessage()


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_the_isolation_that_a_role_or_database_prefers_does_not_hinder(url: str, work: Any, level: str) -> None:
    """A renewal in the middle of a batch would be a concurrent update that such a batch could never commit after."""
    database = psycopg.conninfo.conninfo_to_dict(url)["dbname"]
    jobs.execute(url, f"alter database {database} set default_transaction_isolation = '{level}'")
    tries: list[int] = []

    def renewed(batch: Batch) -> None:
        tries.append(batch.fence)
        jobs.copy_rows(batch)
        before = protocol.lease_row(url)[3]
        until(lambda: protocol.lease_row(url)[3] > before)

    jobs.add_rows(url, 1)
    record = jobs.run(SPEC, url, renewed, lease=timedelta(seconds=1))
    assert (record.outcome, record.items, len(tries)) == (Outcome.SUCCEEDED, 1, 1)


# ── rows ─────────────────────────────────────────────────────────────────────────────────────────────────────────

COLUMNS = """
    id bigint generated by default as identity primary key, name varchar(10), fixed char(3), amount numeric(12, 2),
    score real, flag boolean, day date, at timestamptz(0), ident uuid, raw bytea, payload jsonb, plain json,
    tags text[], grid int[], small smallint, mood mood, span interval, bits bit(3)
"""
FULL: dict[str, Any] = {
    "name": "täglich%s",
    "fixed": "abc",
    "amount": Decimal("12.34"),
    "score": 1.5,
    "flag": True,
    "day": date(2027, 3, 1),
    "at": datetime(2027, 3, 1, 12, tzinfo=timezone.utc),
    "ident": UUID(int=7),
    "raw": b"\x00\xff%",
    "payload": {"a": [1, None, "x%s"], "b": {"c": 1.5}},
    "plain": [1, 2],
    "tags": ["a", "b,c", 'd"e', None],
    "grid": [[1, 2], [3, 4]],
    "small": 7,
    "mood": "glad",
    "bits": "101",
}
WRITERS = ["insert", "copy"]


def write(batch: Batch, how: str, table: str, rows: list[dict[str, Any]]) -> int:
    return (batch.insert if how == "insert" else batch.copy)(table, rows)


def ddl(url: str, text: str) -> None:
    with psycopg.connect(url) as connection:
        connection.execute(text)  # type: ignore[arg-type] — without parameters, so that a % is one


@pytest.fixture
def things(url: str, work: Any) -> Any:
    """Writes rows in a batch, and gives what the table then holds."""
    jobs.execute(url, "create type mood as enum ('glad', 'sad')")
    jobs.execute(url, f"create table things ({COLUMNS})")

    def written(how: str, rows: list[dict[str, Any]], table: str = "things") -> list[dict[str, Any]]:
        counts: list[int] = []
        assert work(lambda batch: counts.append(write(batch, how, table, rows))).outcome is Outcome.SUCCEEDED
        assert counts == [len(rows)]
        with psycopg.connect(url, row_factory=dict_row) as connection:
            found = connection.execute(f"select * from {table} order by id").fetchall()
            connection.execute(f"delete from {table}")
        return found

    return written


@pytest.mark.parametrize("how", WRITERS)
def test_rows_arrive_as_they_were_given(things: Any, how: str) -> None:
    without_arrays = {name: value for name, value in FULL.items() if name not in ("tags", "grid")}
    for given in (FULL, without_arrays):
        nothing = dict.fromkeys(given)
        found = things(how, [given, nothing, given])
        assert [{name: row[name] for name in given} for row in found] == [given, nothing, given]


@pytest.mark.parametrize("how", WRITERS)
def test_a_column_of_numbers_of_several_kinds_arrives(things: Any, how: str) -> None:
    given = [1, 2.5, Decimal("3.25"), None, True and 4, 10**9]
    found = things(how, [{"amount": amount} for amount in given])
    assert [row["amount"] for row in found] == [1, Decimal("2.50"), Decimal("3.25"), None, 4, 10**9]
    large = [2**40, 1, None, -(2**62)]
    assert [row["id"] for row in things(how, [{"id": n} for n in large if n is not None])] == sorted(
        n for n in large if n is not None
    )


@pytest.mark.parametrize("how", WRITERS)
def test_json_of_several_kinds_arrives(things: Any, how: str) -> None:
    given = [{"a": 1}, [1], "text", 7, 1.5, True, None, Jsonb({"b": 2})]
    found = things(how, [{"payload": value} for value in given])
    assert [row["payload"] for row in found] == [{"a": 1}, [1], "text", 7, 1.5, True, None, {"b": 2}]


@pytest.mark.parametrize("how", WRITERS)
def test_a_value_that_does_not_fit_is_an_error_and_never_cut(url: str, things: Any, how: str) -> None:
    for row, error in (
        ({"name": "a" * 11}, "22001"),
        ({"fixed": "abcd"}, "22001"),
        ({"bits": "1010"}, "22026"),
        ({"amount": Decimal("12345678901.5")}, "22003"),
        ({"small": 70_000}, "22003"),
        ({"mood": "angry"}, "22P02"),
        ({"id": None}, "23502"),
    ):
        with pytest.raises(psycopg.Error) as raised:
            things(how, [row])
        assert raised.value.sqlstate == error, row
        assert last_run(url)[:2] == ("failed", error)
        assert jobs.query(url, "select count(*) from things") == [(0,)]


@pytest.mark.parametrize("how", WRITERS)
def test_odd_names_are_names(url: str, things: Any, how: str) -> None:
    ddl(url, """create schema "My %s" """)
    ddl(
        url,
        """create table "My %s"."Odd ""%table;--" (id int, "Select" text, "with ""quote" int, "100%" int, "%s" text,
           "%(x)s" text)""",
    )
    row = {"id": 1, "Select": "a", 'with "quote': 2, "100%": 3, "%s": "b%s", "%(x)s": "%%"}
    table = '"My %s"."Odd ""%table;--"'
    assert things(how, [row, row | {"id": 2}], table) == [row, row | {"id": 2}]
    jobs.execute(url, 'create table public."Case" (id int)')
    assert things(how, [{"id": 1}], '"Case"') == [{"id": 1}]
    assert things(how, [{"id": 1}], 'public."Case"') == [{"id": 1}]
    with pytest.raises(BadInputError, match="there is no table 'Case'"):
        things(how, [{"id": 1}], "Case")


@pytest.mark.parametrize("how", WRITERS)
def test_types_with_odd_names_are_types(url: str, things: Any, how: str) -> None:
    ddl(url, """create type "Mood %s" as enum ('so "so"'); create table moods (id int, m "Mood %s")""")
    assert things(how, [{"id": 1, "m": 'so "so"'}], "moods") == [{"id": 1, "m": 'so "so"'}]


@pytest.mark.parametrize("how", WRITERS)
def test_generated_columns_are_left_to_the_server(url: str, things: Any, how: str) -> None:
    jobs.execute(
        url,
        "create table made (id int generated always as identity, n int, twice int generated always as (n * 2) stored,"
        " word text default 'given')",
    )
    assert things(how, [{"n": 1}, {"n": 2}], "made") == [
        {"id": 1, "n": 1, "twice": 2, "word": "given"},
        {"id": 2, "n": 2, "twice": 4, "word": "given"},
    ]
    with pytest.raises(psycopg.Error, match="twice"):
        things(how, [{"n": 1, "twice": 3}], "made")


@pytest.mark.parametrize("how", WRITERS)
def test_rows_that_do_not_fit_the_table_or_each_other_are_refused_by_name(things: Any, how: str) -> None:
    for rows, error in (
        ([{"nmae": "x"}], r"things has no column 'nmae'; it has .*name"),
        ([{"name": "x"}, {"name": "y", "score": 1.0}], r"row 1 for table public\.things.*score"),
        ([{"name": "x", "score": 1.0}, {"name": "y"}], r"row 1 .*score"),
        ([{"name": "x"}, {"score": 1.0}], r"row 1 .*name, score"),
    ):
        with pytest.raises(BadInputError, match=error):
            things(how, rows)
    with pytest.raises(BadInputError, match="there is no table 'thinsg'"):
        things(how, [{"name": "x"}], "thinsg")


@pytest.mark.parametrize("how", WRITERS)
def test_no_rows_are_no_statement(things: Any, how: str) -> None:
    assert things(how, []) == []


def test_fifty_thousand_rows_by_copy(url: str, work: Any) -> None:
    def many(batch: Batch) -> None:
        assert batch.copy("target", ({"id": n, "fence": batch.fence} for n in range(50_000))) == 50_000

    assert work(many).outcome is Outcome.SUCCEEDED
    assert jobs.query(url, "select count(*), count(distinct id) from target") == [(50_000, 50_000)]


def test_rows_come_as_tuples_or_as_asked(work: Any) -> None:
    def asks(batch: Batch) -> None:
        assert batch.execute("select 1 as a, %s::text as b", ["x"]).fetchall() == [(1, "x")]
        assert batch.execute("select %(b)s::text as b", {"b": "x"}).fetchone() == ("x",)
        cursor = batch.cursor(row_factory=dict_row)
        assert cursor.execute("select 1 as a, '100%' as b").fetchall() == [{"a": 1, "b": "100%"}]
        batch.executemany("insert into target values (%s)", [[1], [2]])
        assert batch.execute("delete from target").rowcount == 2

    assert work(asks).outcome is Outcome.SUCCEEDED


# ── what the function returns, or raises ─────────────────────────────────────────────────────────────────────────


async def wrote_later(batch: Batch) -> None:
    jobs.copy_rows(batch)


def wrote_lazily(batch: Batch) -> Any:
    jobs.copy_rows(batch)
    yield batch.number


RETURNED: list[Callable[[Batch], Any]] = [
    wrote_lazily,
    wrote_later,
    lambda batch: 7,
    lambda batch: 0,
    lambda batch: False,
    lambda batch: [],
    lambda batch: ["rows"],
    lambda batch: "rows",
    lambda batch: {1: "one"},
    lambda batch: {"mine": 1, None: 2},
    lambda batch: object(),
]


def test_what_is_no_metadata_fails_the_run_before_its_batch_is_committed(url: str) -> None:
    """Of a generator, say, nothing has run yet: the rows would be passed over for good."""
    jobs.make_source(url, 2)
    for returns in RETURNED:
        given: list[Any] = []

        def writes(batch: Batch, returns: Callable[[Batch], Any] = returns, given: list[Any] = given) -> Any:
            batch.insert("target", [{"id": row["id"]} for row in batch.rows])
            given.append(returns(batch))
            return given[0]

        with pytest.raises(GafferError, match=r"copy_rows.*returned"):
            jobs.run(SPEC, url, writes)
        if inspect.iscoroutine(given[0]):
            given[0].close()  # Python would warn of it
        outcome, _, error = last_run(url)
        assert (outcome, "returned" in error) == ("failed", True)
        assert jobs.query(url, "select count(*) from target") == [(0,)]
        assert jobs.query(url, "select position from gaffer.job_watermark") == [(None,)]
    assert jobs.run(SPEC, url, lambda batch: {"rows": len(batch.rows)}).items == 2


def test_batches_before_one_that_returned_nonsense_stay(url: str) -> None:
    jobs.make_source(url, 3)

    def returns(batch: Batch) -> Any:
        jobs.copy_rows(batch)
        return {"number": batch.number} if batch.number < 3 else [batch.number]

    with pytest.raises(GafferError, match="returned"):
        jobs.run(jobs.spec(batch_rows=1), url, returns)
    assert jobs.query(url, "select outcome, items from gaffer.job_runs") == [("failed", 2)]
    assert jobs.run(SPEC, url).items == 1
    assert jobs.query(url, "select count(*), count(distinct id) from target") == [(3, 3)]


@pytest.mark.parametrize(
    "error",
    [SystemExit(), SystemExit(0), SystemExit(3), GeneratorExit(), StopIteration(), StopIteration("x")],
    ids=repr,
)
def test_an_exit_that_the_function_raised_is_a_failure_that_counts(url: str, work: Any, error: BaseException) -> None:
    """Nobody told the process to stop, so that nothing would ever say that the job does not work."""

    def exits(batch: Batch) -> None:
        jobs.copy_rows(batch)
        raise error

    with pytest.raises(Exception) as raised:  # noqa: PT011 — whatever it is, it is no BaseException
        work(exits)
    assert isinstance(raised.value, Exception)
    outcome, _, told = last_run(url)
    assert (outcome, type(error).__name__ in told) == ("failed", True)
    assert jobs.query(url, "select consecutive_failures from gaffer.job") == [(1,)]
    assert jobs.query(url, "select count(*) from target") == [(0,)]
    assert protocol.lease_row(url)[1] is None
    assert jobs.run(SPEC, url).items == 1


def test_a_keyboard_interrupt_in_the_function_is_an_interrupt(url: str, work: Any) -> None:
    def interrupted(batch: Batch) -> None:
        jobs.copy_rows(batch)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work(interrupted)
    assert protocol.outcomes(url) == ["interrupted"]
    assert jobs.query(url, "select consecutive_failures from gaffer.job") == [(0,)]
    assert jobs.query(url, "select count(*) from target") == [(0,)]


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even this")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("a\0b"), "ValueError: a"),
        (ValueError("a\ud800b"), "ValueError: a"),
        (ValueError("\0"), "ValueError"),
        (ValueError("täglich"), "ValueError: täglich"),
        (UnspeakableError(), "UnspeakableError"),
    ],
    ids=["NUL", "lone surrogate", "only NUL", "umlaut", "no text"],
)
def test_an_error_whose_text_cannot_be_stored_is_recorded_all_the_same(
    url: str, work: Any, error: Exception, told: str
) -> None:
    def fails(batch: Batch) -> None:
        jobs.copy_rows(batch)
        raise error

    with pytest.raises(type(error)) as raised:
        work(fails)
    assert raised.value is error
    outcome, _, kept = last_run(url)
    assert (outcome, kept[: len(told)]) == ("failed", told)
    assert protocol.lease_row(url)[1] is None
    assert jobs.query(url, "select consecutive_failures from gaffer.job") == [(1,)]
    assert jobs.run(SPEC, url).items == 1


# ── loops and threads ────────────────────────────────────────────────────────────────────────────────────────────


def counts(url: str) -> tuple[int, int]:
    return jobs.query(url, "select count(*), count(distinct id) from target")[0]


def test_a_run_that_is_iterated_again_has_nothing_left(url: str) -> None:
    jobs.make_source(url, 5)
    with jobs.opened(jobs.spec(batch_rows=2), url) as run:
        for _ in range(3):
            for batch in run:
                jobs.copy_rows(batch)
        run.apply(jobs.copy_rows)
    assert (run.outcome, run.record.items, counts(url)) == (Outcome.SUCCEEDED, 5, (5, 5))


@pytest.mark.parametrize("goes_on", ["by a loop", "by apply"])
@pytest.mark.parametrize("kept", [False, True], ids=["forgotten", "kept"])
def test_a_batch_that_a_loop_left_by_break_is_undone_before_the_next(url: str, goes_on: str, kept: bool) -> None:
    """Its writes are not the next batch's to commit."""
    jobs.make_source(url, 5)
    with jobs.opened(jobs.spec(batch_rows=2), url) as run:
        loop = iter(run)
        for left in loop:
            jobs.copy_rows(left)
            if left.number == 2:
                break
        if not kept:
            del loop
        if goes_on == "by apply":
            run.apply(jobs.copy_rows)
        else:
            for number, batch in enumerate(run):
                if number == 0:
                    assert batch.rows == left.rows
                    with pytest.raises(BatchEndedError):
                        left.execute("insert into target values (4711)")
                jobs.copy_rows(batch)
        with pytest.raises(BatchEndedError):
            left.execute("insert into target values (4711)")
    assert (run.outcome, run.record.items, counts(url)) == (Outcome.SUCCEEDED, 5, (5, 5))


def test_two_loops_at_once_double_no_row(url: str) -> None:
    jobs.make_source(url, 6)
    with suppress(GafferError), jobs.opened(jobs.spec(batch_rows=1), url) as run:
        one, other = iter(run), iter(run)
        jobs.copy_rows(next(one))
        for batch in other:
            jobs.copy_rows(batch)
            if batch.number == 3:
                break
        for batch in one:
            jobs.copy_rows(batch)
    assert counts(url)[0] == counts(url)[1]
    committed = jobs.query(url, "select items from gaffer.job_runs")[0][0]
    assert committed == counts(url)[0]
    assert jobs.run(SPEC, url).items == 6 - committed
    assert counts(url) == (6, 6)


def test_two_loops_in_turn_double_no_row(url: str) -> None:
    jobs.make_source(url, 6)
    with suppress(GafferError), jobs.opened(jobs.spec(batch_rows=1), url) as run:
        one, other = iter(run), iter(run)
        for _ in range(6):
            for loop in (one, other):
                batch = next(loop, None)
                if batch is not None:
                    jobs.copy_rows(batch)
    assert counts(url)[0] == counts(url)[1] == jobs.query(url, "select items from gaffer.job_runs")[0][0]
    jobs.run(SPEC, url)
    assert counts(url) == (6, 6)


def test_a_batch_is_of_the_thread_that_it_was_handed_to(url: str, work: Any) -> None:
    """psycopg lets threads share a connection, and their statements would fall into whatever batch is open."""
    row = [{"id": 4711}]

    def shares(batch: Batch) -> None:
        jobs.copy_rows(batch)
        cursor = batch.cursor()
        for use in (
            lambda: batch.execute("insert into target values (4711)"),
            lambda: batch.executemany("insert into target values (%s)", [[4711]]),
            lambda: batch.insert("target", row),
            lambda: batch.copy("target", row),
            lambda: batch.savepoint().__enter__(),
            lambda: cursor.execute("insert into target values (4711)"),
        ):
            with pytest.raises(BatchEndedError, match="thread"):
                Actor(use).result()
        jobs.copy_rows(batch)  # and the batch is none the worse for it

    assert work(shares).outcome is Outcome.SUCCEEDED
    assert jobs.query(url, "select id from target") == [(1,), (1,)]


def test_a_row_without_columns_is_refused(url: str, things: Any) -> None:
    for how in WRITERS:
        for rows in ([{}], [{"name": "x"}, {}], [{}, {}]):
            with pytest.raises(BadInputError):
                things(how, rows)
    assert jobs.query(url, "select count(*) from things") == [(0,)]


# ── the time of a batch as a whole, and what a role or database prefers ──────────────────────────────────────────


@pytest.mark.parametrize("server", ["as it is", "before 17"])
@pytest.mark.parametrize("how", ["apply", "loop"])
def test_a_batch_of_many_short_statements_may_take_no_longer_as_a_whole(url: str, server: str, how: str) -> None:
    jobs.make_source(url, 5)
    if server == "before 17":  # which have no limit for a whole transaction
        (text,) = jobs.query(url, "select pg_get_functiondef('gaffer.begin_batch(uuid, interval)'::regprocedure)")[0]
        assert "'transaction_timeout', (v_ms + 1)::text" in text
        ddl(url, text.replace("'transaction_timeout', (v_ms + 1)::text", "'transaction_timeout', '0'"))

    def many(batch: Batch) -> None:
        jobs.copy_rows(batch)
        for _ in range(6):
            batch.execute("select pg_sleep(0.4)")

    with (  # noqa: PT012
        pytest.raises((GafferError, psycopg.Error)) as raised,
        jobs.opened(jobs.spec(batch_timeout="1s"), url) as run,
    ):
        if how == "apply":
            run.apply(many)
        else:
            for batch in run:
                many(batch)
    outcome, sqlstate, error = last_run(url)
    assert outcome == "failed"
    by_server = isinstance(raised.value, psycopg.Error) and sqlstate in ("25P04", "57014")
    assert by_server or ("batch_timeout" in str(raised.value) and "batch_timeout" in error)
    assert server == "as it is" or "batch_timeout" in error
    assert jobs.query(url, "select count(*) from target") == [(0,)]
    assert jobs.query(url, "select position from gaffer.job_watermark") == [(None,)]
    assert jobs.run(SPEC, url).items == 5


@pytest.mark.parametrize("one_for_all", [False, True])
def test_an_error_that_a_savepoint_undid_leaves_the_time_limit(url: str, one_for_all: bool) -> None:
    """The server forgets `transaction_timeout` then, and leaves out the others where they are not shorter."""
    if one_for_all:
        (text,) = jobs.query(url, "select pg_get_functiondef('gaffer.begin_batch(uuid, interval)'::regprocedure)")[0]
        ddl(url, text.replace("v_ms + 1", "v_ms"))
    with jobs.connect(url) as connection:
        forgets = connection.info.server_version >= 170000
        connection.execute(f"begin; select gaffer.begin_batch('{UUID(int=1)}', '0.2s'); savepoint a")
        with pytest.raises(pg.DivisionByZero):
            connection.execute("select 1 / 0")
        connection.execute("rollback to a")
        if one_for_all and forgets:
            connection.execute("select pg_sleep(1)")
        else:
            with pytest.raises(pg.QueryCanceled):
                connection.execute("select pg_sleep(10)")


def prefers(url: str, setting: str) -> None:
    database = psycopg.conninfo.conninfo_to_dict(url)["dbname"]
    jobs.execute(url, f"alter database {database} set {setting}")


@pytest.mark.parametrize("style", ["SQL, DMY", "German", "Postgres, MDY"])
def test_a_date_style_that_a_database_prefers_is_named_or_does_not_hinder(url: str, style: str) -> None:
    jobs.make_source(url, 2)
    prefers(url, f"datestyle = {style}")
    told: GafferError | None = None
    try:
        assert jobs.run(SPEC, url).items == 2
    except GafferError as error:
        told = error
    assert told is None or ("DateStyle" in str(told) and "ISO" in str(told))
    assert counts(url) == ((2, 2) if told is None else (0, 0))


@pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN1"])
def test_an_encoding_that_a_database_prefers_does_not_hinder(url: str, encoding: str) -> None:
    jobs.make_source(url)
    jobs.execute(url, "insert into source (value) values ('täglich €')")
    prefers(url, f"client_encoding = '{encoding}'")
    seen: list[Any] = []

    def fails_first(batch: Batch) -> None:
        seen.extend(batch.rows)
        jobs.copy_rows(batch)
        batch.execute("update source set value = %s", ["Größe €"])
        if len(seen) == 1:
            raise ValueError("täglich")

    with pytest.raises(ValueError, match="täglich"):
        jobs.run(SPEC, url, fails_first)
    assert jobs.run(SPEC, url, fails_first).outcome is Outcome.SUCCEEDED
    assert [row["value"] for row in seen] == ["täglich €"] * 2
    prefers(url, "client_encoding = 'UTF8'")
    assert jobs.query(url, "select value from source") == [("Größe €",)]
    assert jobs.query(url, "select error from gaffer.job_runs order by id limit 1") == [("ValueError: täglich",)]


def test_a_database_that_only_reads_is_told_as_that(url: str) -> None:
    jobs.make_source(url, 2)
    prefers(url, "default_transaction_read_only = on")
    with pytest.raises(GafferError, match="read-only") as raised:
        jobs.run(SPEC, url)
    assert "CONTEXT" not in str(raised.value)
    assert "PL/pgSQL" not in str(raised.value)
    assert jobs.query(url, "select count(*) from target") == [(0,)]
