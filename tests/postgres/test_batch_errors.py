"""What becomes of a batch that fails: by its statements, its connection, its function or what that returns."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from psycopg import errors as pg

from gaffer_dagster.domain.run import Outcome
from gaffer_dagster.engine.batch import Batch
from gaffer_dagster.errors import BatchEndedError, GafferError
from tests.support import jobs, protocol
from tests.support.protocol import Actor, until

SPEC = jobs.spec()


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
    outcome, sqlstate, error = jobs.last_run(url)
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
    assert jobs.last_run(url) == ("failed", None, "OwnError: the tariff table is empty")
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
    assert jobs.last_run(url)[0] == "failed"


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
    outcome, sqlstate, error = jobs.last_run(url)
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
    assert jobs.last_run(url) == ("failed", "40001", "never")


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
        outcome, _, error = jobs.last_run(url)
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
    outcome, _, told = jobs.last_run(url)
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
    outcome, _, kept = jobs.last_run(url)
    assert (outcome, kept[: len(told)]) == ("failed", told)
    assert protocol.lease_row(url)[1] is None
    assert jobs.query(url, "select consecutive_failures from gaffer.job") == [(1,)]
    assert jobs.run(SPEC, url).items == 1
