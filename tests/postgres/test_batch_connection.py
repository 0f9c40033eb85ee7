"""The guarded connection: what a batch may send, and what becomes of one that hangs, is ended or is closed."""

from __future__ import annotations

import gc
import os
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psycopg
import pytest
from psycopg import errors as pg
from psycopg import sql
from psycopg.types.composite import CompositeInfo, register_composite

from gaffer_dagster.domain.run import Outcome
from gaffer_dagster.engine import keeper
from gaffer_dagster.engine.batch import Batch
from gaffer_dagster.errors import BatchEndedError, DeadlinePassedError
from gaffer_dagster.store import batches, db
from tests.support import jobs, protocol
from tests.support.protocol import until

SPEC = jobs.spec()


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
    "select pg_advisory_lock(7)",
    "select pg_catalog.pg_try_advisory_lock_shared (7, 8)",
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
        batch.execute("select pg_advisory_xact_lock(7), pg_try_advisory_xact_lock_shared(8), pg_advisory_unlock(9)")
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


STAGES = [
    "create temp table if not exists stage (id bigint)",
    "create temp table stage (id bigint) on commit drop",
    "create temp table stage (id bigint) on commit delete rows",
    "do $$ begin create temp table if not exists stage (id bigint); end $$",
    "select 0::bigint as id into temp stage where false",
]


def stages(batch: Batch, how: str) -> None:
    batch.execute(how)
    batch.insert("stage", [{"id": row["id"]} for row in batch.rows])
    batch.execute("declare c cursor for select * from stage")
    batch.execute("insert into target select id, %s, %s from stage", [batch.fence, batch.number])


@pytest.mark.parametrize("how", STAGES)
def test_a_temporary_table_lasts_for_its_batch(url: str, how: str) -> None:
    jobs.make_source(url, 6)
    assert jobs.run(jobs.spec(batch_rows=2), url, lambda batch: stages(batch, how)).items == 6
    assert jobs.query(url, "select count(*), count(distinct id) from target") == [(6, 6)]


def test_one_that_stayed_would_bring_its_rows_again(url: str) -> None:
    jobs.make_source(url, 6)
    ((text,),) = jobs.query(
        url, "select pg_get_functiondef(oid) from pg_proc where oid::regproc = 'gaffer.commit_batch'::regproc"
    )
    assert text.count("discard temp;") == 1
    jobs.execute(url, text.replace("discard temp;", ""))
    assert jobs.run(jobs.spec(batch_rows=2), url, lambda batch: stages(batch, STAGES[0])).items == 6
    assert jobs.query(url, "select count(*), count(distinct id) from target") == [(12, 6)]


def test_a_batch_that_went_on_as_another_role_is_committed_as_its_own(url: str, work: Any) -> None:
    jobs.execute(url, "grant insert on target to pg_monitor")

    def writes(batch: Batch) -> None:
        batch.execute("set local role pg_monitor")
        batch.execute("insert into target values (7)")

    assert work(writes).outcome is Outcome.SUCCEEDED
    assert jobs.query(url, "select id from target") == [(7,)]


def test_parameters_may_be_made_by_the_batch_before_they_are_sent_but_not_meanwhile(url: str, work: Any) -> None:
    """Two users of one connection that is being sent to would wait for each other for ever."""

    class Reads(dict[str, Any]):
        def __init__(self, read: Callable[[str], Any]) -> None:
            super().__init__(a=1)
            self.read = read

        def __getitem__(self, name: str) -> Any:
            return self.read("select 5").fetchone()[0]

    def makes(batch: Batch) -> None:
        cursor = batch.cursor()
        insert = "insert into target values (%s)"
        batch.executemany(insert, ([batch.execute("select 5").fetchone()[0]] for _ in range(3)))  # type: ignore[index]
        cursor.executemany(insert, ([cursor.connection.execute("select 6").fetchone()[0]] for _ in range(3)))  # type: ignore[index]
        for read in (batch.execute, cursor.connection.execute, batch.cursor().execute):
            with pytest.raises(BatchEndedError, match=r"is sending a statement.*make them first"):
                batch.execute("insert into target values (%(a)s)", Reads(read))

    assert work(makes).outcome is Outcome.SUCCEEDED
    assert jobs.query(url, "select id, count(*) from target group by id order by id") == [(5, 3), (6, 3)]


def test_who_asked_for_the_batchs_notices_hears_all_of_them(work: Any) -> None:
    heard: list[Any] = []

    def tells(batch: Batch) -> None:
        batch.cursor().connection.add_notice_handler(lambda notice: heard.append(notice.message_primary))
        for text in ("a", "b"):
            batch.execute(f"do $$ begin raise notice '{text}'; end $$")
        batch.cursor().execute("do $$ begin raise notice 'c'; end $$")

    assert work(tells).outcome is Outcome.SUCCEEDED
    assert heard == ["a", "b", "c"]


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
    jobs.execute(url, "create type point_of_sale as (shop int, till int)")
    with jobs.connect(url) as connection:  # not the batch's
        info = CompositeInfo.fetch(connection, "point_of_sale")
    assert info is not None

    class Amount(int):
        pass

    class AmountDumper(psycopg.adapt.Dumper):
        def dump(self, obj: Amount) -> bytes:
            return str(obj + 1).encode()

    def registers(batch: Batch) -> None:
        batch.cursor().connection.adapters.register_dumper(Amount, AmountDumper)
        assert batch.execute("select %s::int", [Amount(1)]).fetchone() == (2,)
        with pytest.raises(BatchEndedError, match=r"a connection of your own .*TypeInfo\.fetch"):
            CompositeInfo.fetch(batch.cursor().connection, "point_of_sale")
        register_composite(info, batch.cursor().connection)
        assert batch.execute("select row(1, 2)::point_of_sale").fetchone() == ((1, 2),)

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
    outcome, sqlstate, error = jobs.last_run(url)
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
    assert jobs.last_run(url)[0] == "failed"
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
    assert jobs.last_run(url)[0] == "failed"
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
    assert jobs.last_run(url)[0] == "timed_out"
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
