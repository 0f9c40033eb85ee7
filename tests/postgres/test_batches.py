"""Which batch is at work: what it tells of itself, loops, threads, its time, and what a database prefers."""

from __future__ import annotations

from contextlib import suppress
from typing import Any
from uuid import UUID

import psycopg
import pytest
from psycopg import errors as pg

from gaffer_dagster.domain.run import Outcome
from gaffer_dagster.engine.batch import Batch
from gaffer_dagster.errors import BadInputError, BatchEndedError, GafferError
from tests.support import jobs
from tests.support.protocol import Actor

SPEC = jobs.spec()


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


# ── the time of a batch as a whole, and what a role or database prefers ──────────────────────────────────────────


@pytest.mark.parametrize("server", ["as it is", "before 17"])
@pytest.mark.parametrize("how", ["apply", "loop"])
def test_a_batch_of_many_short_statements_may_take_no_longer_as_a_whole(url: str, server: str, how: str) -> None:
    jobs.make_source(url, 5)
    if server == "before 17":  # which have no limit for a whole transaction
        (text,) = jobs.query(url, "select pg_get_functiondef('gaffer.begin_batch(uuid, interval)'::regprocedure)")[0]
        assert "'transaction_timeout', (v_ms + 1)::text" in text
        jobs.execute(url, text.replace("'transaction_timeout', (v_ms + 1)::text", "'transaction_timeout', '0'"))

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
    outcome, sqlstate, error = jobs.last_run(url)
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
        jobs.execute(url, text.replace("v_ms + 1", "v_ms"))
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
