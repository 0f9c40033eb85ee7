"""Rows that carry their own state: each is done once, a bad one is found, tried again and parked."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import sys
from dataclasses import replace
from datetime import timedelta
from typing import Any

import dagster as dg
import psycopg
import pytest
from click.testing import CliRunner
from psycopg import sql
from typing_extensions import LiteralString

import gaffer_dagster as gd
from gaffer_dagster.cli import main
from gaffer_dagster.domain.spec import JobSpec
from gaffer_dagster.engine.batch import Batch
from gaffer_dagster.errors import BadInputError, BadSpecError, NotPreparedError
from gaffer_dagster.store import db, pending_rows, prepare
from gaffer_dagster.testing import Clock
from tests.support import faults, jobs, variants

PENDING, DONE = "done_at is null", "done_at = gaffer.clock()"


def make(url: str, rows: int, *, indexed: bool = True) -> None:
    jobs.execute(url, "create table item (id bigint primary key, value text, done_at timestamptz)")
    jobs.execute(url, "create table effect (id bigint, fence bigint, batch int)")
    if indexed:
        with db.connect(url, application_name="test") as connection:
            prepare.apply(connection, prepare.pending_statements(connection, "item", "id", PENDING))
    add(url, 1, rows)


def add(url: str, first: int, last: int) -> None:
    jobs.execute(url, "insert into item select n, 'v' || n from generate_series(%s::int, %s) n", first, last)


def spec(*, schedule: bool = True, bounds: dict[str, Any] | None = None, **due: Any) -> JobSpec:
    due = {"pending": PENDING, "done": DONE, "backoff": "10m", **due}
    return JobSpec(
        "items",
        gd.PendingRows("item", "id", **due),
        gd.Schedule("0 * * * *") if schedule else None,
        gd.Bounds(**{"timeout": "5m", **(bounds or {})}),
    )


def effect(batch: Batch) -> None:
    batch.insert("effect", [{"id": row["id"], "fence": batch.fence, "batch": batch.number} for row in batch.rows])


def failing(*bad: int) -> Any:
    def work(batch: Batch) -> None:
        effect(batch)
        for row in batch.rows:
            if row["id"] in bad:
                raise ValueError(f"row {row['id']} is bad")

    return work


def done(url: str) -> list[int]:
    return [key for (key,) in jobs.query(url, "select id from effect order by id")]


def items(url: str) -> list[tuple[Any, ...]]:
    return jobs.query(url, "select key, attempts, parked_at is not null, error from gaffer.job_item order by key::int")


def test_every_row_is_done_once(url: str) -> None:
    make(url, 250)
    record = jobs.run(spec(), url, effect)
    assert (record.outcome, record.items, record.batches, record.parked) == ("succeeded", 250, 3, 0)
    assert done(url) == list(range(1, 251))
    assert jobs.query(url, "select count(*) from item where done_at is null") == [(0,)]
    assert jobs.run(spec(), url, effect).items == 0
    add(url, 251, 260)
    assert jobs.run(spec(), url, effect).items == 10
    assert jobs.query(url, "select position from gaffer.job_watermark") == [(None,)]


def test_a_bad_row_is_out_of_the_way_of_the_others_and_parked(url: str, clock: Clock) -> None:
    """B83."""
    make(url, 100)
    job = spec(attempts=3, bounds={"batch_rows": 10, "batches": 1})
    outcomes = [jobs.run(job, url, failing(1), worker_clock=clock.now).outcome for _ in range(10)]
    assert outcomes == ["capped"] * 9 + ["succeeded"]
    assert done(url) == list(range(2, 101))
    assert items(url) == [("1", 1, False, "ValueError: row 1 is bad")]
    for attempt in (2, 3):
        clock.advance(timedelta(hours=1))
        record = jobs.run(job, url, failing(1), worker_clock=clock.now)
        assert (record.outcome, record.items, record.parked) == ("partial", 0, attempt // 3)
        assert record.error == "1 row failed; 1: ValueError: row 1 is bad"
    assert items(url) == [("1", 3, True, "ValueError: row 1 is bad")]
    assert jobs.query(url, "select parked, parked_at is not null from gaffer.job") == [(1, True)]
    clock.advance(timedelta(hours=2))
    assert jobs.run(job, url, failing(), worker_clock=clock.now).items == 0


def test_a_bad_row_that_does_not_wait_is_in_the_way_of_the_others(url: str, clock: Clock) -> None:
    """B83, broken: it heads the queue in every run until it is parked."""
    make(url, 100)
    variants.replace(url, "back_off", {"* (0.75 + random() / 2)": "* 0"})
    job = spec(attempts=1_000, bounds={"batch_rows": 10, "batches": 1})
    outcomes = [jobs.run(job, url, failing(1), worker_clock=clock.now).outcome for _ in range(10)]
    assert outcomes == ["capped"] * 10
    assert len(done(url)) < 50


def test_a_row_that_was_mended_by_hand_is_forgotten(url: str, clock: Clock) -> None:
    make(url, 3)
    jobs.run(spec(attempts=1), url, failing(2), worker_clock=clock.now)
    assert jobs.query(url, "select parked from gaffer.job") == [(1,)]
    jobs.execute(url, "update item set done_at = now() where id = 2")
    assert jobs.run(spec(attempts=1), url, failing(2), worker_clock=clock.now).outcome == "succeeded"
    assert items(url) == []
    assert jobs.query(url, "select parked, parked_at from gaffer.job") == [(0, None)]


def test_a_failed_row_is_wanted_when_its_time_has_come(url: str, clock: Clock) -> None:
    make(url, 3)
    assert jobs.run(spec(), url, failing(2), worker_clock=clock.now).outcome == "partial"
    [(at, now)] = jobs.query(url, "select follow_up_at, gaffer.clock() from gaffer.job")
    assert timedelta(minutes=7) < at - now < timedelta(minutes=13)
    clock.advance(timedelta(minutes=14))
    assert jobs.run(spec(), url, effect, worker_clock=clock.now).outcome == "succeeded"
    assert (done(url), items(url)) == ([1, 2, 3], [])
    assert jobs.query(url, "select follow_up_at from gaffer.job") == [(None,)]


def test_a_database_error_is_the_rows_and_no_values_of_it_are_kept(url: str) -> None:
    make(url, 5)
    jobs.execute(url, "create unique index on effect (id)")
    jobs.execute(url, "insert into effect (id) values (3)")
    record = jobs.run(spec(), url, effect)
    assert (record.outcome, record.items) == ("partial", 4)
    assert items(url) == [("3", 1, False, 'duplicate key value violates unique constraint "effect_id_idx"')]
    assert jobs.query(url, "select sqlstate from gaffer.job_item") == [("23505",)]


@pytest.mark.parametrize("code", ["53000", "53100", "53300"])
@pytest.mark.parametrize("swallowed", [False, True])
def test_a_server_without_room_is_no_rows_fault(url: str, clock: Clock, code: str, swallowed: bool) -> None:
    """The statement is the user's own; all at once, and one by one since another row is bad."""
    make(url, 3)
    jobs.execute(
        url,
        "create function f(code text) returns void language plpgsql as $$ begin"
        " raise exception 'no room' using errcode = code; end $$",
    )

    def work(batch: Batch) -> None:
        effect(batch)
        if len(batch.rows) > at_once:
            raise ValueError("not all at once")
        with contextlib.suppress(psycopg.Error) if swallowed else contextlib.nullcontext():
            batch.execute("select f(%s)", [code])

    for at_once in (100, 1):  # noqa: B007 — the function goes by it
        with pytest.raises(psycopg.Error, match="no room"):
            jobs.run(spec(attempts=1), url, work, worker_clock=clock.now)
        ended = "select outcome, sqlstate, parked from gaffer.job_runs order by id desc limit 1"
        assert jobs.query(url, ended) == [("failed", code, 0)]
        assert jobs.query(url, "select follow_up_at is not null, parked from gaffer.job") == [(True, 0)]
        assert (items(url), done(url)) == ([], [])
        clock.advance(timedelta(hours=1))
    assert jobs.run(spec(attempts=1), url, effect, worker_clock=clock.now).outcome == "succeeded"
    assert done(url) == [1, 2, 3]


def test_an_attempt_that_the_server_had_no_room_for_is_taken_back(url: str, clock: Clock) -> None:
    """Of a row that is worked on alone the attempt is committed before."""
    make(url, 1)

    def work(batch: Batch) -> None:
        batch.execute("do $$ begin raise exception 'no room' using errcode = '53100'; end $$")

    for attempts in (0, 1):  # there were before
        if attempts:
            jobs.execute(
                url,
                "insert into gaffer.job_item (job, key, attempts, next_attempt_at, first_failed_at, failed_at, error)"
                " values ('items', '1', 1, gaffer.clock(), gaffer.clock(), gaffer.clock(), 'bad')",
            )
        for _ in range(3):
            with pytest.raises(psycopg.Error, match="no room"):
                jobs.run(spec(attempts=2), url, work, worker_clock=clock.now)
            jobs.execute(url, "update gaffer.job_runs set outcome = 'abandoned'")  # so that the next works on it alone
            assert [row[:3] for row in items(url)] == [("1", attempts, False)][:attempts]
            clock.advance(timedelta(hours=1))
    assert jobs.run(spec(attempts=2), url, effect, worker_clock=clock.now).outcome == "succeeded"
    assert items(url) == []


def test_an_error_that_is_swallowed_fails_its_row(url: str) -> None:
    make(url, 3)

    def work(batch: Batch) -> None:
        effect(batch)
        if any(row["id"] == 2 for row in batch.rows):
            with contextlib.suppress(psycopg.Error):
                batch.execute("select 1 / 0")

    assert jobs.run(spec(), url, work).outcome == "partial"
    assert (done(url), items(url)) == ([1, 3], [("2", 1, False, "division by zero")])


def test_what_strikes_at_commit_is_found_too(url: str) -> None:
    make(url, 5)
    jobs.execute(url, "create table parent (id bigint primary key)")
    jobs.execute(url, "insert into parent values (1), (2), (4), (5)")
    jobs.execute(url, "alter table effect add foreign key (id) references parent deferrable initially deferred")
    record = jobs.run(spec(), url, effect)
    assert (record.outcome, record.items) == ("partial", 4)
    assert (done(url), [row[:3] for row in items(url)]) == ([1, 2, 4, 5], [("3", 1, False)])


def _exits(_batch: Batch) -> None:
    sys.exit("no more")


def _sends_commit(batch: Batch) -> None:
    batch.execute("commit")


def _commits(batch: Batch) -> None:
    batch._connection.commit()  # past the guarded one


def _begins_anew(batch: Batch) -> None:
    batch._connection.commit()
    batch._connection.execute("begin")


def _closes(batch: Batch) -> None:
    batch._connection.close()


_OPEN: list[Any] = []


def _leaves_a_stream(batch: Batch) -> None:
    _OPEN.append(batch._connection.cursor().stream("select generate_series(1, 1000000)"))
    next(_OPEN[-1])


@pytest.mark.parametrize(
    ("ends", "says"),
    [
        (_exits, "BadInputError: .* raised SystemExit .no more.; let it return"),
        (_sends_commit, "BatchEndedError: 'commit' was not sent"),
        (_commits, "BatchEndedError: .* ended by its own code"),
        (_begins_anew, "ended by its own code"),
        (_closes, "BatchEndedError: .* closed by its own code"),
        (_leaves_a_stream, "BatchEndedError: .* is still under way"),
    ],
)
def test_a_row_whose_work_exits_or_ends_the_transaction_is_parked_and_the_others_are_done(
    url: str, clock: Clock, ends: Any, says: str
) -> None:
    make(url, 5)

    def work(batch: Batch) -> None:
        if any(row["id"] == 2 for row in batch.rows):
            ends(batch)
        else:
            effect(batch)

    for attempts in (1, 2):
        record = jobs.run(spec(attempts=2), url, work, worker_clock=clock.now)
        assert record.outcome == "partial"
        assert done(url) == [1, 3, 4, 5]
        [(key, *found, error)] = items(url)
        assert (key, found) == ("2", [attempts, attempts == 2])
        assert re.search(says, error)
        clock.advance(timedelta(hours=2))


@pytest.mark.parametrize("kind", [KeyboardInterrupt, dg.DagsterExecutionInterruptedError])
def test_an_interrupt_is_no_rows_failure(url: str, kind: type[BaseException]) -> None:
    make(url, 3)

    class _Told(kind):
        pass

    def work(batch: Batch) -> None:
        effect(batch)
        raise _Told("told to stop")

    with pytest.raises(_Told):
        jobs.run(spec(), url, work)
    assert (done(url), items(url)) == ([], [])
    assert jobs.query(url, "select outcome, error from gaffer.job_runs") == [
        ("interrupted", f"{kind.__name__}: told to stop")
    ]


def test_a_row_that_takes_too_long_is_found_too(url: str) -> None:
    make(url, 5)

    def work(batch: Batch) -> None:
        effect(batch)
        if any(row["id"] == 2 for row in batch.rows):
            batch.execute("select pg_sleep(60)")

    record = jobs.run(spec(bounds={"batch_timeout": "1s", "timeout": "1m"}), url, work)
    assert (record.outcome, record.items) == ("partial", 4)
    assert (done(url), [row[:3] for row in items(url)]) == ([1, 3, 4, 5], [("2", 1, False)])


def test_a_row_that_ends_its_process_is_parked_and_those_beside_it_are_not_charged(url: str, clock: Clock) -> None:
    make(url, 20)

    def work(batch: Batch) -> None:
        effect(batch)
        if any(row["id"] == 7 for row in batch.rows):
            os.kill(os.getpid(), signal.SIGKILL)

    ends = []
    for _ in range(12):
        pid = os.fork()
        if pid == 0:
            try:
                jobs.run(spec(attempts=3), url, work, worker_clock=clock.now)
            finally:
                os._exit(0)
        ends.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        clock.advance(timedelta(hours=2))
    assert ends[:4] == [-signal.SIGKILL] * 4, "once unknown, then three attempts"
    assert ends[4:] == [0] * 8
    assert done(url) == [n for n in range(1, 21) if n != 7]
    assert [row[:3] for row in items(url)] == [("7", 3, True)]
    assert jobs.query(url, "select parked from gaffer.job") == [(1,)]


def test_a_row_that_is_parked_since_fewer_attempts_are_allowed_keeps_its_error(url: str, clock: Clock) -> None:
    make(url, 3)
    jobs.run(spec(attempts=5), url, lambda batch: batch.execute("select 1 / 0"), worker_clock=clock.now)
    jobs.execute(url, "update gaffer.job_item set sqlstate = null, error = null where key = '3'")  # its process died
    clock.advance(timedelta(hours=2))
    assert jobs.run(spec(attempts=1), url, effect, worker_clock=clock.now).parked == 3
    assert [row[1:] for row in items(url)] == [
        (1, True, "division by zero"),
        (1, True, "division by zero"),
        (
            1,
            True,
            "nothing was heard of its last attempts (1 in all): the process that worked on it ended without a word, or "
            "lost the database or its lease",
        ),
    ]
    assert jobs.query(url, "select sqlstate from gaffer.job_item order by key") == [("22012",), ("22012",), (None,)]


def test_what_the_function_says_of_a_row_stands(url: str) -> None:
    make(url, 3)
    jobs.execute(url, "alter table item add state text")

    def work(batch: Batch) -> None:
        batch.execute("update item set done_at = 'epoch', state = 'refused' where id = 2")

    assert jobs.run(spec(done="done_at = now(), state = 'done'"), url, work).items == 3
    assert jobs.query(url, "select state from item order by id") == [("done",), ("refused",), ("done",)]


def test_rows_that_stay_pending_are_no_success(url: str) -> None:
    make(url, 3)
    with pytest.raises(BadSpecError, match="still pending after what done= sets"):
        jobs.run(spec(done="value = 'x'"), url, effect)
    assert (done(url), items(url)) == ([], [])


@pytest.mark.parametrize(
    ("when", "does"),
    [
        ("before", "return case when new.id = 2 then null else new end;"),
        ("before", "if new.id = 2 then new.done_at = null; end if; return new;"),
        ("after", "update item set done_at = null where id = 2; return null;"),
    ],
)
def test_a_row_that_a_trigger_keeps_pending_is_no_success(url: str, when: LiteralString, does: LiteralString) -> None:
    make(url, 3)
    jobs.execute(url, f"create function undo() returns trigger language plpgsql as $$ begin {does} end $$")
    jobs.execute(
        url,
        f"create trigger undo {when} update on item for each row when (pg_trigger_depth() = 0) execute function undo()",
    )
    with pytest.raises(BadSpecError, match=r"1 rows of a batch .* still pending after what done= sets"):
        jobs.run(spec(), url, effect)
    assert (done(url), items(url)) == ([], [])


def test_rows_that_their_own_work_ends_or_deletes_are_done(url: str) -> None:
    make(url, 3)

    def work(batch: Batch) -> None:
        batch.execute("delete from item where id = 1")
        batch.execute("update item set done_at = now() where id = 2")

    assert jobs.run(spec(), url, work).items == 3
    assert jobs.run(spec(), url, work).items == 0


@pytest.mark.parametrize(
    ("due", "says"),
    [({"pending": "nothing is"}, "pending="), ({"done": "nothing = 1"}, "done=")],
)
def test_sql_that_cannot_be_used_is_said_before_anything_is_claimed(url: str, due: dict[str, Any], says: str) -> None:
    make(url, 3)
    with pytest.raises(BadInputError, match=says):
        jobs.run(spec(**due), url, effect)


@pytest.mark.parametrize("bad", [[2], [3], [1, 4, 6], [1, 2, 3], [1, 2, 3, 4, 5, 6]])
@pytest.mark.parametrize("value", ["at = 'infinity'", "at = '0044-03-15 BC'", "doc = repeat('9', 5000)::jsonb"])
def test_a_value_that_python_cannot_hold_fails_its_row_only(
    url: str, clock: Clock, bad: list[int], value: LiteralString
) -> None:
    make(url, 6)
    jobs.execute(url, "alter table item add at timestamptz, add doc jsonb")
    jobs.execute(url, f"update item set {value} where id = any(%s)", bad)
    good = [n for n in range(1, 7) if n not in bad]
    job = spec(attempts=2, bounds={"batch_rows": 3})
    record = jobs.run(job, url, effect, worker_clock=clock.now)
    assert (record.outcome, record.items, done(url)) == ("partial", len(good), good)
    assert [row[:3] for row in items(url)] == [(str(n), 1, False) for n in bad]
    clock.advance(timedelta(hours=2))
    jobs.run(job, url, effect, worker_clock=clock.now)
    assert [row[:3] for row in items(url)] == [(str(n), 2, True) for n in bad]
    assert all("value that Python cannot" in row[3] for row in items(url))


def _claim_within_the_condition(connection: Any, source: Any, wanted: Any, limit: int) -> list[pending_rows.Row]:
    """The claim whose LIMIT a nested loop runs anew for each row."""
    found = connection.execute(
        sql.SQL(
            "update {table} set value = value where {key} in (select {key} from {table} where {wanted} limit {limit}"
            " for update skip locked) returning id::text, id"
        ).format(table=source.table.identifier, key=source.key, wanted=wanted, limit=sql.Literal(limit))
    )
    return [pending_rows.Row(key, {"id": number}) for key, number in found]


@pytest.mark.parametrize("variant", ["the product", "a subquery"])
def test_a_claim_takes_no_more_than_it_says_whatever_the_plan(
    url: str, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    """B80."""
    if variant == "a subquery":
        monkeypatch.setattr(pending_rows, "_claim", _claim_within_the_condition)
    make(url, 20, indexed=False)
    for off in ("hashjoin", "mergejoin", "sort", "hashagg", "material", "memoize"):
        jobs.execute(url, f"alter role current_user set enable_{off} = off")
    seen: list[int] = []

    def work(batch: Batch) -> None:
        seen.append(len(jobs.query(url, "select 1 from item for update skip locked")))

    try:
        jobs.run(spec(bounds={"batch_rows": 3, "batches": 1}), url, work)
    finally:
        jobs.execute(url, "alter role current_user reset all")
    assert seen == [17 if variant == "the product" else 0]


def test_slots_work_side_by_side_each_with_a_lease_of_its_own(url: str) -> None:
    make(url, 10)
    job = spec(parallel=2, bounds={"batch_rows": 3, "batches": 1})
    with jobs.opened(job, url) as first, jobs.opened(job, url) as second, jobs.opened(job, url) as third:
        assert third.outcome == "busy"
        second.apply(effect)
        first.apply(effect)
    assert jobs.query(url, "select slot, outcome, items from gaffer.job_runs order by id") == [
        (0, "capped", 3), (1, "capped", 3), (1, "busy", 0),
    ]  # fmt: skip
    assert jobs.query(url, "select slot, fence from gaffer.job_lease order by slot") == [(0, 1), (1, 1)]


def test_a_loop_is_refused(url: str) -> None:
    make(url, 1)
    with pytest.raises(BadInputError, match=r"run\.apply"), jobs.opened(spec(), url) as run:
        next(iter(run))


def test_people_see_the_parked_rows_and_try_them_again_or_drop_them(url: str, clock: Clock) -> None:
    make(url, 5)
    job = spec(attempts=1)
    jobs.run(job, url, failing(2, 4), worker_clock=clock.now)
    assert [json.loads(line)["key"] for line in gaffer(url, "items", "list", "items", "--json").splitlines()] == [
        "2",
        "4",
    ]
    assert "ValueError: row 4 is bad" in gaffer(url, "items", "list", "items")
    assert gaffer(url, "items", "drop", "items", "4", "--yes") == "1 row of items is dropped\n"
    assert jobs.query(url, "select parked from gaffer.job") == [(1,)]
    assert gaffer(url, "items", "retry", "items", "--parked", "--yes", "--reason", "mended") == (
        "1 row of items is tried again\n"
    )
    assert jobs.query(url, "select parked, parked_at, follow_up_at is not null from gaffer.job") == [(0, None, True)]
    assert jobs.query(url, "select action, details ->> 'rows' from gaffer.operator_action order by id") == [
        ("drop items", "1"), ("retry items", "1"),
    ]  # fmt: skip
    record = jobs.run(job, url, effect, worker_clock=clock.now)
    assert (record.outcome, record.items, done(url)) == ("succeeded", 1, [1, 2, 3, 5])
    assert gaffer(url, "items", "list", "items") == "items has no parked rows (all failed ones: --all)\n"
    assert "dropped" in gaffer(url, "items", "list", "items", "--all")


def test_what_data_says_is_no_markup_and_moves_no_cursor(url: str, clock: Clock) -> None:
    jobs.execute(url, "create table item (id text primary key, done_at timestamptz)")
    keys = ["[/x]", "[emea]", ":smile:", "a\x1b[2Jb\nc"]
    jobs.execute(url, "insert into item select unnest(%s::text[])", keys)

    def work(batch: Batch) -> None:
        raise ValueError(f"[/red] {batch.rows[0]['id']} is [bold]bad")

    jobs.run(spec(attempts=1), url, work, worker_clock=clock.now)
    shown = gaffer(url, "items", "list", "items")
    for key in [*keys[:3], r"a\x1b[2Jb\nc"]:
        assert f"ValueError: [/red] {key} is [bold]bad" in shown
    assert "\x1b" not in shown

    def whole(batch: Batch) -> None:
        raise ValueError("[/red] all of [emea]\x1b[2J")

    jobs.make_source(url, 1)
    faults.settle(url)
    with pytest.raises(ValueError, match="emea"):
        jobs.run(jobs.spec(), url, whole)
    shown = gaffer(url, "runs", "copy_rows")
    assert r"[/red] all of [emea]\x1b[2J" in shown
    found = CliRunner().invoke(main, ["items", "list", "a\x1b[2J"], env={"GAFFER_DATABASE_URL": url})
    assert (found.exit_code, "\x1b" in found.stderr) == (1, False)


@pytest.mark.parametrize("given", [[], ["1", "--parked"], ["9", "--yes"]])
def test_rows_that_are_not_named_right_are_said(url: str, given: list[str]) -> None:
    make(url, 1)
    jobs.run(spec(), url, failing(1))
    found = CliRunner().invoke(main, ["items", "retry", "items", *given], env={"GAFFER_DATABASE_URL": url})
    assert found.exit_code == 1
    assert "key" in found.stderr


def test_a_key_may_be_a_negative_number_and_a_misspelt_option_is_none(url: str) -> None:
    make(url, 0)
    add(url, -11, -10)
    jobs.run(spec(attempts=1), url, failing(-11, -10))

    def drop(*words: str) -> Any:
        return CliRunner().invoke(main, ["items", "drop", "items", *words], env={"GAFFER_DATABASE_URL": url})

    for words in (["-10", "--yess"], ["-x", "--yes"]):
        refused = drop(*words)
        assert (refused.exit_code, "No such option" in refused.stderr) == (2, True)
    assert "key -x" in drop("--yes", "--", "-x").stderr
    nobody = drop("-10")
    assert (nobody.exit_code, "give --yes" in nobody.stderr) == (1, True)
    assert drop("-10", "-11", "--yes").stdout == "2 rows of items are dropped\n"


def gaffer(url: str, *arguments: str) -> str:
    found = CliRunner().invoke(main, arguments, env={"GAFFER_DATABASE_URL": url}, catch_exceptions=False)
    assert found.exit_code == 0, found.output
    return found.stdout


# ── exclusion="advisory" ─────────────────────────────────────────────────────────────────────────────────────────


def advisory(job: JobSpec) -> JobSpec:
    return replace(job, exclusion="advisory")


def locks(url: str) -> list[tuple[Any, ...]]:
    return jobs.query(
        url,
        "select classid, objid from pg_locks where locktype = 'advisory' and database ="
        " (select oid from pg_database where datname = current_database())",
    )


@pytest.mark.parametrize("kind", ["new", "pending"])
def test_a_batch_holds_the_jobs_advisory_lock_from_its_begin_to_its_commit(url: str, kind: str) -> None:
    make(url, 3)
    jobs.make_source(url, 3)
    job = advisory(spec() if kind == "pending" else jobs.spec("items"))
    seen: list[Any] = []

    def work(batch: Batch) -> None:
        seen.append(jobs.query(url, "select pg_try_advisory_xact_lock(gaffer.advisory_key('items'))"))
        seen.append(len(locks(url)))

    record = jobs.run(job, url, work)
    assert (record.outcome, record.items, record.fence) == ("succeeded", 3, 1)
    assert seen == [[(False,)], 1]
    assert locks(url) == []


def test_who_holds_the_advisory_lock_is_waited_for_and_said(url: str) -> None:
    jobs.make_source(url, 3)
    job = advisory(jobs.spec("items", timeout="3s"))
    with psycopg.connect(url, application_name="stranger") as stranger:
        stranger.execute("select pg_advisory_xact_lock(gaffer.advisory_key('items'))")
        record = jobs.run(job, url)
        assert (record.outcome, record.backlog) == ("capped", 3)
        pid = stranger.info.backend_pid
        [(held_by,)] = jobs.query(url, "select held_by ->> 'who' from gaffer.job")
        assert (
            held_by
            == f"backend {pid} (user {stranger.info.user}, database {stranger.info.dbname}, application stranger)"
        )
    assert jobs.run(job, url).outcome == "succeeded"


def test_a_broken_connection_writes_nothing_more_and_leaves_no_lock(url: str) -> None:
    jobs.make_source(url, 3)
    cut: list[int] = []

    def work(batch: Batch) -> None:
        jobs.copy_rows(batch)
        if not cut:
            cut.append(batch.execute("select pg_backend_pid()").fetchone()[0])
            jobs.query(url, "select pg_terminate_backend(%s)", cut[0])
        batch.execute("select 1")

    assert jobs.run(advisory(jobs.spec("items")), url, work).outcome == "succeeded"
    assert jobs.query(url, "select count(*), count(distinct id) from target") == [(3, 3)]
    assert locks(url) == []


def test_keys_of_names_that_a_short_hash_mixes_up_differ(url: str) -> None:
    jobs.make_source(url)
    [(keys,)] = jobs.query(
        url,
        "select array_agg(gaffer.advisory_key(name)) from unnest(array['job_65398', 'job_134517', 'job_16670',"
        " 'job_121428']) as name",
    )
    assert len(set(keys)) == 4


# ── what others do meanwhile, and what it costs ──────────────────────────────────────────────────────────────────


def test_a_row_that_a_stranger_has_locked_is_left_and_said(url: str) -> None:
    make(url, 5)
    with psycopg.connect(url) as stranger:
        stranger.execute("select from item where id = 3 for update")
        record = jobs.run(spec(), url, effect)
        assert (record.outcome, record.items, record.backlog) == ("capped", 4, 1)
        [(held_by, again_in)] = jobs.query(
            url, "select held_by ->> 'who', follow_up_at - gaffer.clock() from gaffer.job"
        )
        assert held_by == "a transaction that has locked 1 of the rows"
        assert timedelta(seconds=30) < again_in < timedelta(minutes=1)
    assert jobs.run(spec(), url, effect).outcome == "succeeded"
    assert done(url) == [1, 2, 3, 4, 5]


def test_what_another_slot_works_on_is_not_left(url: str) -> None:
    make(url, 4)
    job = spec(parallel=2, bounds={"batch_rows": 2, "batches": 1})
    inner: list[Any] = []

    def work(batch: Batch) -> None:
        effect(batch)
        if not inner:
            inner.append(None)
            inner[0] = jobs.run(spec(parallel=2), url, effect)

    assert jobs.run(job, url, work).items == 2
    assert (inner[0].outcome, inner[0].items, inner[0].slot) == ("succeeded", 2, 1)
    assert done(url) == [1, 2, 3, 4]


def test_prepare_prints_the_index_that_claims_need_and_checks_it(url: str, caplog: pytest.LogCaptureFixture) -> None:
    make(url, 1, indexed=False)
    jobs.run(spec(), url, effect)
    assert "gaffer prepare item --key id --pending 'done_at is null' --apply" in caplog.text
    arguments = ["prepare", "item", "--key", "id", "--pending", PENDING]
    assert "where done_at is null;" in gaffer(url, *arguments)
    assert "where done_at is null;" in gaffer(url, *arguments, "--apply")
    assert gaffer(url, *arguments) == ""
    caplog.clear()
    jobs.run(spec(), url, effect)
    assert "gaffer prepare" not in caplog.text


def test_a_cure_can_be_pasted_into_a_shell_whatever_the_names(url: str, caplog: pytest.LogCaptureFixture) -> None:
    table, pending = """ "Odd Schema"."Q ""x"" '%" """.strip(), """done_at is null and "a 'key'" <> 'it''s'"""
    jobs.execute(url, 'create schema "Odd Schema"')
    with db.connect(url, application_name="test") as connection:
        connection.execute(
            sql.SQL("create table {} (id bigint primary key, \"a 'key'\" text, done_at timestamptz)").format(
                sql.Identifier("Odd Schema", 'Q "x" \'%')
            )
        )
    job = JobSpec("items", gd.PendingRows(table, "id", pending=pending, done=DONE), None)  # type: ignore[arg-type]
    jobs.run(job, url, effect)
    [cure] = re.findall("cure=(gaffer prepare .*)", caplog.text)
    assert "create index" in gaffer(url, *shlex.split(cure)[1:])
    caplog.clear()
    jobs.run(job, url, effect)
    assert "gaffer prepare" not in caplog.text
    with pytest.raises(NotPreparedError, match="run: gaffer prepare") as raised:
        jobs.run(JobSpec("copied", gd.NewRows(table, "id"), None), url, effect)
    gaffer(url, *shlex.split(str(raised.value).partition("run: gaffer ")[2]))
    assert jobs.run(JobSpec("copied", gd.NewRows(table, "id"), None), url, effect).outcome == "succeeded"


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ("run_at <= now()", "must be marked IMMUTABLE"),
        ("exists (select from effect)", "cannot use subquery"),
    ],
)
def test_what_no_index_can_have_is_said_and_one_on_the_rest_serves(
    url: str, caplog: pytest.LogCaptureFixture, more: str, why: str
) -> None:
    make(url, 1, indexed=False)
    jobs.execute(url, "alter table item add run_at timestamptz default '2020-01-01'")
    pending = f"{PENDING} and {more}"
    arguments = ["prepare", "item", "--key", "id", "--pending"]
    for apply in ([], ["--apply"]):
        refused = CliRunner().invoke(main, [*arguments, pending, *apply], env={"GAFFER_DATABASE_URL": url})
        assert (refused.exit_code, why in refused.stderr, "an index on the rest serves" in refused.stderr) == (
            1,
            True,
            True,
        )
    jobs.run(spec(pending=pending), url, effect)
    assert "gaffer prepare" in caplog.text
    caplog.clear()
    gaffer(url, *arguments, PENDING, "--apply")
    jobs.run(spec(pending=pending), url, effect)
    assert "gaffer prepare" not in caplog.text
    refused = CliRunner().invoke(main, [*arguments, "nosuch > 1"], env={"GAFFER_DATABASE_URL": url})
    assert "pending='nosuch > 1' cannot be used: column" in refused.stderr


def test_a_claim_reads_the_pending_rows_only_however_many_are_done(url: str) -> None:
    make(url, 20_000)
    jobs.execute(url, "update item set done_at = now() where id <= 19900")
    jobs.execute(url, "vacuum analyze item")
    with db.connect(url, application_name="test") as connection:
        source = pending_rows.source(connection, spec().due)  # pyright: ignore[reportArgumentType]
        connection.execute("begin")
        before = reads(connection)
        assert len(pending_rows.claim_new(connection, source, "items", None, 100)) == 100
        assert reads(connection) - before < 110


def reads(connection: Any) -> int:
    """Rows of the table that this transaction has read, by whatever way."""
    row = connection.execute(
        "select seq_tup_read + coalesce(idx_tup_fetch, 0) from pg_stat_xact_user_tables where relname = 'item'"
    ).fetchone()
    return row[0]


def test_odd_names_and_texts_are_taken_as_they_are(url: str) -> None:
    with jobs.connect(url) as connection:
        connection.execute('create schema "we%ird"')
        connection.execute(
            'create table "we%ird"."ta ""ble" (key text primary key, job text, attempts int, parked_at timestamptz,'
            ' "odd %s" text, pending boolean default true, due int)'
        )
        connection.execute(
            'insert into "we%ird"."ta ""ble" (key, attempts, "odd %s")'
            " select 'k%''s\\' || n, n, 'a%b' from generate_series(1, 7) n"
        )

    def work(batch: Batch) -> None:
        if any(row["attempts"] == 4 for row in batch.rows):
            raise ValueError("100% bad %s \0 \ud800")

    due = gd.PendingRows(
        '"we%ird"."ta ""ble"',
        "key",
        pending="\"odd %s\" like 'a%b' and pending -- that is it %s",
        done="pending = false -- done",
    )
    record = jobs.run(JobSpec("odd", due, None, gd.Bounds(batch_rows=3)), url, work)
    assert (record.outcome, record.items) == ("partial", 6)
    assert items_of(url, "odd") == [("k%'s\\4", "ValueError: 100% bad %s \N{REPLACEMENT CHARACTER} ?")]


def items_of(url: str, job: str) -> list[tuple[Any, ...]]:
    return jobs.query(url, "select key, error from gaffer.job_item where job = %s order by key", job)


@pytest.mark.parametrize(
    ("due", "error"),
    [
        ({"pending": "true; select 1"}, BadInputError),
        ({"done": "value = 'x'; drop table effect"}, BadInputError),
        ({"pending": "done_at is null /*"}, BadInputError),
        ({"pending": "done_at is null) or (true"}, BadSpecError),
    ],
)
def test_texts_that_would_be_more_than_a_condition_do_nothing(url: str, due: dict[str, Any], error: Any) -> None:
    make(url, 3)
    with pytest.raises(error):
        jobs.run(spec(**due), url, effect)
    assert (done(url), items(url)) == ([], [])


class Explaining(psycopg.Cursor[Any]):
    def execute(self, query: Any, *args: Any, **kwargs: Any) -> Any:
        return super().execute(sql.SQL("explain (analyze, buffers, format json) {}").format(query), *args, **kwargs)


def claimed(connection: Any, after: str | None = None) -> tuple[bool, int, int]:
    """Whether a page of a hundred rows is claimed by the index of pending ones, how many pages that reads, and how many
    rows in one step at most."""
    source = pending_rows.source(connection, spec().due)  # pyright: ignore[reportArgumentType]
    connection.execute("begin")
    usual, connection.cursor_factory = connection.cursor_factory, Explaining
    [explained] = pending_rows.claim_new(connection, source, "items", after, 100)
    connection.cursor_factory = usual
    connection.execute("rollback")
    plan: Any = explained.key
    read = plan[0]["Plan"]["Shared Hit Blocks"] + plan[0]["Plan"]["Shared Read Blocks"]
    text = json.dumps(plan)
    rows = max(map(int, re.findall(r'"(?:Actual Rows|Rows Removed by Filter)": (\d+)', text)))
    return '"Index Name": "gaffer_pending_' in text, read, rows


def fill(connection: Any, finished: int, pending: int) -> None:
    connection.execute("truncate item")
    connection.execute("insert into item select n, 'v', now() from generate_series(1, %s::int) n", [finished])
    connection.execute("insert into item select %s::int + n, 'v' from generate_series(1, %s) n", [finished, pending])
    connection.execute("vacuum analyze item")


def _in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    claim = pending_rows._claim  # pyright: ignore[reportPrivateUsage]

    def by_another(connection: Any, source: Any, wanted: Any, limit: int) -> Any:
        return claim(connection, replace(source, key=sql.SQL("(item.id + 0)")), wanted, limit)

    monkeypatch.setattr(pending_rows, "_claim", by_another)


@pytest.mark.parametrize("variant", ["the product", "without its index", "in another order"])
def test_a_claim_goes_by_the_index_of_pending_rows_and_reads_no_more_whatever_is_done(
    url: str, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    make(url, 0, indexed=variant != "without its index")
    if variant == "in another order":
        _in_another_order(monkeypatch)
    with db.connect(url, application_name="test") as connection:
        fill(connection, 0, 1_000)
        _, few, _ = claimed(connection)
        fill(connection, 30_000, 1_000)
        by_index, many, rows = claimed(connection)
    if variant == "the product":
        assert by_index
        assert many <= few + 10 < 500
        assert rows == 100
    else:
        assert rows >= 1_000


def test_under_a_snapshot_only_the_first_claim_of_a_run_passes_what_was_done_since(url: str) -> None:
    """No index lets go of entries that a snapshot may still need: whoever begins from the start goes through them."""
    make(url, 0)
    with db.connect(url, application_name="test") as connection, db.connect(url, application_name="test") as other:
        fill(connection, 0, 31_000)
        _, alone, _ = claimed(connection)
        other.execute("begin isolation level repeatable read; select pg_current_snapshot()")
        connection.execute("update item set done_at = now() where id <= 30000")
        connection.execute("vacuum analyze item")
        first, following = claimed(connection), claimed(connection, "30000")
        other.execute("rollback")
    assert following[0]
    assert following[1] <= alone + 10
    assert first[1] > following[1] + 100, "the snapshot does not show: this test would see nothing"


def test_rows_of_a_partitioned_table_and_of_one_partition_are_done(url: str) -> None:
    jobs.execute(url, "create table item (id bigint primary key, done_at timestamptz) partition by range (id)")
    jobs.execute(url, "create table item_1 partition of item for values from (0) to (11)")
    jobs.execute(url, "create table item_2 partition of item default")
    jobs.execute(url, "create table effect (id bigint, fence bigint, batch int)")
    jobs.execute(url, "insert into item select generate_series(1, 20)")
    gaffer(url, "prepare", "item", "--key", "id", "--pending", PENDING, "--apply")
    assert gaffer(url, "prepare", "item", "--key", "id", "--pending", PENDING) == ""
    record = jobs.run(spec(bounds={"batch_rows": 7}), url, failing(5, 15))
    assert (record.outcome, record.items) == ("partial", 18)
    jobs.execute(url, "delete from gaffer.job_item; delete from effect")
    part = replace(spec(), name="part", due=gd.PendingRows("item_2", "id", pending=PENDING, done=DONE))
    assert (jobs.run(part, url, effect).items, done(url)) == (1, [15])


def test_a_table_with_children_is_refused_for_its_own_reason(url: str) -> None:
    make(url, 1)
    jobs.execute(url, "create table child () inherits (item)")
    with pytest.raises(NotPreparedError, match="no key is unique among them all"):
        jobs.run(spec(), url, effect)
