"""`sql=`: work that is one statement, for every kind of due work, without a row that leaves the database."""

from __future__ import annotations

import itertools
import re
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import dagster as dg
import psycopg
import pytest

import gaffer_dagster as gd
from gaffer_dagster.adapter.assets import job_of
from gaffer_dagster.domain.bounds import Bounds
from gaffer_dagster.domain.due import Due, EachInterval, Elapsed, NewRows, PendingRows
from gaffer_dagster.domain.run import Outcome, RunRecord
from gaffer_dagster.domain.schedule import Schedule
from gaffer_dagster.domain.spec import JobSpec, work_hash
from gaffer_dagster.engine.sql_work import SqlWork
from gaffer_dagster.engine.steps import Station
from gaffer_dagster.errors import BadSpecError
from gaffer_dagster.store import batches, pending_rows
from gaffer_dagster.testing import Clock
from tests.support import jobs, protocol
from tests.support.ticking import DAY, HOUR

COPY = "insert into target (id, batch) select id, 0 from due"
ROWS = NewRows("source", "id")
DOCUMENT = Path(__file__).parents[2] / "docs" / "due.md"


def job(due: Due = ROWS, name: str = "by_sql", **bounds: Any) -> JobSpec:
    return JobSpec(name, due, Schedule("0 * * * *"), Bounds(**({"timeout": "5m"} | bounds)))


def run(url: str, sql: Any, due: Due = ROWS, name: str = "by_sql", **bounds: Any) -> RunRecord:
    return jobs.run(job(due, name, **bounds), url, SqlWork(sql))


def copied(url: str) -> list[int]:
    return [row[0] for row in jobs.query(url, "select id from target order by id")]


@pytest.fixture
def source(url: str) -> str:
    jobs.make_source(url, 25)
    return url


# ── every kind ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_new_rows_are_worked_on_page_by_page(source: str) -> None:
    record = run(source, COPY, batch_rows=10)
    assert (record.outcome, record.items, record.batches) == (Outcome.SUCCEEDED, 25, 3)
    assert copied(source) == list(range(1, 26))
    assert run(source, COPY).batches == 0
    jobs.add_rows(source, 3)
    first = run(source, COPY, batch_rows=2, batches=1)
    assert (first.outcome, first.items, first.backlog) == (Outcome.CAPPED, 2, 1)
    assert run(source, COPY).items == 1
    assert copied(source) == list(range(1, 29))


def test_a_function_and_sql_leave_the_same_watermark(source: str) -> None:
    run(source, COPY, batch_rows=10, batches=1)
    jobs.run(job(name="by_function", batch_rows=10, batches=1), source, lambda batch: None)
    (one,), (other,) = jobs.query(source, "select position from gaffer.job_watermark")
    assert one == other
    jobs.run(job(), source, jobs.copy_rows)  # goes on where the SQL stopped
    assert copied(source) == list(range(1, 26))


def test_due_has_every_column_but_ours_and_fulfils_the_condition(source: str) -> None:
    due = NewRows("source", "id", where="value like 'v1%'")
    jobs.execute(source, "create table kept (row jsonb)")
    assert run(source, "insert into kept select to_jsonb(due) from due", due, batch_rows=4).items == 11
    rows = [row for (row,) in jobs.query(source, "select row from kept order by (row ->> 'id')::int")]
    assert rows[0] == {"id": 1, "value": "v1"}
    assert len(rows) == 11


def test_rows_by_a_cursor(url: str) -> None:
    jobs.execute(url, "create table events (id int primary key, at timestamptz not null)")
    jobs.execute(url, "create table target (id int, batch int)")
    jobs.execute(url, "insert into events select n, now() - interval '1 hour' from generate_series(1, 25) n")
    jobs.execute(url, "insert into events values (30, now()), (31, '-infinity'), (32, 'infinity')")
    record = run(url, COPY, NewRows("events", "id", cursor="at", settle="10m"), batch_rows=10)
    assert (record.outcome, record.items, record.batches) == (Outcome.SUCCEEDED, 25, 3)
    assert copied(url) == list(range(1, 26))


@pytest.mark.parametrize("due", [EachInterval("0 * * * *", settle="1s"), Elapsed("1h", settle="1s")])
def test_windows_are_one_row_each(url: str, clock: Clock, due: Due) -> None:
    jobs.execute(url, "create table windows (since timestamptz, until timestamptz)")
    sql = "insert into windows select since, until from due"
    spec = job(due)
    clock.set(datetime(2027, 3, 1, 0, 30, tzinfo=timezone.utc))
    jobs.run(spec, url, SqlWork(sql), worker_clock=clock.now)
    clock.advance(3 * HOUR)
    record = jobs.run(spec, url, SqlWork(sql), worker_clock=clock.now)
    found = jobs.query(url, "select since, until from windows order by since")
    assert record.items == record.batches == len(found) == 2
    assert all(until - since == HOUR for since, until in found)
    assert found[1][0] == found[0][1]


def test_an_interval_is_done_again_by_sql(url: str) -> None:
    jobs.execute(url, "create table windows (since timestamptz, until timestamptz)")
    spec, work = jobs.daily(start="2026-01-01", until="2026-01-03"), SqlWork("insert into windows select * from due")
    assert jobs.run(spec, url, work).items == 2
    assert jobs.run(spec, url, work, redo=datetime(2026, 1, 1, 12, tzinfo=timezone.utc)).items == 1
    found = jobs.query(url, "select count(*), count(distinct since), max(until) - min(since) from windows")
    assert found == [(3, 2, 2 * DAY)]


def test_pending_rows_are_done_and_a_bad_one_is_told_apart(url: str) -> None:
    jobs.execute(url, "create table queue (id int primary key, n int, done_at timestamptz)")
    jobs.execute(url, "create table target (id int, batch int)")
    jobs.execute(url, "insert into queue select n, n - 3 from generate_series(1, 10) n")
    due = PendingRows("queue", "id", pending="done_at is null", done="done_at = now()", attempts=1)
    record = run(url, "insert into target select id, 10 / n from due", due)
    assert (record.outcome, record.items) == (Outcome.PARTIAL, 9)
    assert jobs.query(url, "select id from queue where done_at is null") == [(3,)]
    assert copied(url) == [1, 2, 4, 5, 6, 7, 8, 9, 10]


def test_of_pending_rows_only_the_keys_leave_the_database(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs.execute(url, "create table queue (id int primary key, at timestamptz, done_at timestamptz)")
    jobs.execute(url, "create table target (id int, at timestamptz)")
    jobs.execute(url, "insert into queue select n, 'infinity' from generate_series(1, 9) n")
    jobs.execute(url, "insert into queue values (10, '0044-03-15 BC')")
    claimed: list[pending_rows.Row] = []
    claim = pending_rows._claim  # pyright: ignore[reportPrivateUsage]

    def seen(*args: Any) -> list[pending_rows.Row]:
        found = claim(*args)
        claimed.extend(found)
        return found

    monkeypatch.setattr(pending_rows, "_claim", seen)
    due = PendingRows("queue", "id", pending="done_at is null", done="done_at = now()", attempts=1)
    record = run(url, "insert into target select id + 0 / (id - 3), at from due", due)
    assert (record.outcome, record.items) == (Outcome.PARTIAL, 9)
    assert jobs.query(url, "select id from queue where done_at is null") == [(3,)]
    assert copied(url) == [1, 2, 4, 5, 6, 7, 8, 9, 10]
    assert {row.key for row in claimed} == {str(n) for n in range(1, 11)}
    assert all(row.values == {} and row.error is None for row in claimed)


# ── what the statement may be ────────────────────────────────────────────────────────────────────────────────────

SHAPES = [
    "insert into target (id) select id from due",
    "  ;; INSERT into target (id) select id from DUE ; -- that's all",
    "-- with a comment; commit\ninsert into target (id) select id from due",
    "/* one /* in */ another */ insert into target (id) select id from due",
    "with odd as (select id from due where id % 2 = 1), even as (select id from due where id % 2 = 0)"
    " insert into target (id) select id from odd union all select id from even",
    "/* x */ WITH/* y */taken as materialized (select id from due) insert into target (id) select id from taken",
    "with recursive up (id) as (select min(id) from due union all select id + 1 from up where id < 25)"
    " insert into target (id) select up.id from up join due using (id)",
    "with -- a comment\n/* and */ RECURSIVE -- another\n n (id) as (select 1 where exists (select from due) union all"
    " select id + 1 from n where id < 25) insert into target (id) select id from n",
    'with"odd" as (select id from due) insert into target (id) select id from "odd"',
    "with ins as (insert into target (id) select id from due returning id) select count(*) from ins",
    "merge into target using due on target.id = due.id when not matched then insert (id) values (due.id)",
    "with d as (select id from due) merge into target using d on false when not matched then insert (id) values (d.id)",
    "insert into target (id) select id from due where value like 'v%' and 7 % 4 = 3 and '%s %(a)s' <> '%%'",
]


@pytest.mark.parametrize("sql", SHAPES)
def test_a_statement_may_have_comments_percent_signs_and_ctes_of_its_own(source: str, sql: str) -> None:
    record = run(source, sql)
    assert (record.outcome, record.items, copied(source)) == (Outcome.SUCCEEDED, 25, list(range(1, 26)))


def test_a_statement_may_change_what_is_due_from(source: str) -> None:
    assert run(source, "update source set value = 'x' from due where source.id = due.id", batch_rows=10).items == 25
    assert jobs.query(source, "select count(*) from source where value = 'x'") == [(25,)]
    assert run(source, "delete from source using due where source.id = due.id").items == 0


@pytest.mark.parametrize(
    ("sql", "said"),
    [
        ("", "sql= begins with ''"),
        ("commit; select from due", "sql= begins with 'commit;'"),
        ("-- only\ntruncate due", "sql= begins with 'truncate'"),
        ("call work_on_due()", "sql= begins with 'call'.*takes a function"),
        ("copy due to stdout", "sql= begins with 'copy'"),
        ("insert into target values (1)", "does not read due"),
        ("select 1 from dues", "does not read due"),
        ("select '\0' from due", "is no SQL"),
        (7, "sql=7 is no SQL"),
        (b"select from due", "is no SQL"),
    ],
)
def test_what_cannot_be_done_is_refused_where_it_is_defined(sql: Any, said: str) -> None:
    with pytest.raises(BadSpecError, match=said):
        gd.gaffer_asset(due=ROWS, sql=sql, name="a")


@pytest.mark.parametrize(
    "sql",
    [
        f"{COPY}; {COPY}",
        f"{COPY}; commit",
        "with due as (select 1 as id) insert into target (id) select id from due",
        "insert into target (id) select id fromm due",
        "with commit select due",
    ],
)
def test_what_the_database_cannot_read_fails_the_run_with_an_instruction(source: str, sql: str) -> None:
    with pytest.raises((BadSpecError, psycopg.Error), match="due") as raised:
        run(source, sql)
    assert isinstance(raised.value, BadSpecError) is True
    assert "write one statement" in str(raised.value)
    assert (protocol.outcomes(source, "by_sql"), copied(source)) == (["failed"], [])
    assert jobs.query(source, "select position from gaffer.job_watermark") == [(None,)]


def test_an_error_of_the_statement_fails_the_run_and_keeps_the_batches_before(source: str) -> None:
    with pytest.raises(psycopg.errors.DivisionByZero):
        run(source, "insert into target (id) select id + 0 / (id - 15) from due", batch_rows=10)
    assert protocol.outcomes(source, "by_sql") == ["failed"]
    assert copied(source) == list(range(1, 11))
    assert run(source, COPY).items == 15
    assert copied(source) == list(range(1, 26))


# ── the page and what is due are read one after the other ────────────────────────────────────────────────────────


def test_what_comes_in_between_the_two_reads_is_not_due_yet(source: str) -> None:
    """The page is found by one statement, and read by the next: rows that others write in between come later."""

    def between(station: Station) -> None:
        if station is Station.DUE:
            jobs.add_rows(source, 2)

    record = jobs.run(job(batch_rows=10), source, SqlWork(COPY), observe=between)
    assert (record.items, record.batches, copied(source)) == (25, 3, list(range(1, 26)))
    assert run(source, COPY).items == 6
    assert copied(source) == list(range(1, 32))


@pytest.mark.parametrize("changed", [False, True])
def test_what_changes_in_between_the_two_reads_is_neither_lost_nor_done_twice(url: str, changed: bool) -> None:
    jobs.make_source(url, 10, changed=changed)
    once = itertools.count()

    def between(station: Station) -> None:
        if station is Station.DUE and not next(once):
            jobs.execute(url, "update source set value = 'new' where id = 2")
            jobs.execute(url, "delete from source where id = 3")

    sql = "insert into target (id, batch) select id, (value = 'new')::int from due"
    jobs.run(job(batch_rows=5), url, SqlWork(sql), observe=between)
    jobs.run(job(batch_rows=5), url, SqlWork(sql))
    assert copied(url) == [1, 2, 4, 5, 6, 7, 8, 9, 10]
    assert jobs.query(url, "select batch from target where id = 2") == [(1,)]


def test_a_due_that_had_no_upper_end_would_be_caught(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken variant: each batch takes all that is due."""
    from gaffer_dagster.store import new_rows

    monkeypatch.setattr(new_rows, "_compared", _only_after(new_rows._compared))
    run(source, COPY, batch_rows=10)
    assert copied(source) != list(range(1, 26))


def _only_after(compared: Any) -> Any:
    def made(source: Any, by: Any, position: Any) -> Any:
        return psycopg.sql.SQL("true") if by == psycopg.sql.SQL("<=") else compared(source, by, position)

    return made


# ── the same line ────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_batch_is_done_again_after_a_deadlock_and_commits_once(source: str) -> None:
    jobs.execute(source, "create sequence tries")
    jobs.execute(
        source,
        "create function fails_twice(id bigint) returns bigint language plpgsql as $$ begin"
        " if nextval('tries') <= 2 then raise exception using errcode = '40P01'; end if; return id; end $$",
    )
    record = run(source, "insert into target (id) select fails_twice(id) from due")
    assert (record.outcome, record.items, copied(source)) == (Outcome.SUCCEEDED, 25, list(range(1, 26)))


def test_a_slow_statement_is_cut(source: str) -> None:
    with pytest.raises(psycopg.Error, match="timeout"):
        run(source, "insert into target (id) select id from due, pg_sleep(30)", batch_timeout="1s")
    assert copied(source) == []


def test_a_changed_statement_is_changed_work() -> None:
    hashes = {work_hash(due, sql) for due in (ROWS, NewRows("other", "id")) for sql in (COPY, COPY + " where true")}
    assert len(hashes) == 4
    one, again = (gd.gaffer_asset(due=ROWS, sql=COPY, name=name) for name in ("one", "again"))
    assert job_of(one).definition.work_hash == job_of(again).definition.work_hash == work_hash(ROWS, COPY)


def test_an_asset_of_sql_is_materialized(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asset = gd.gaffer_asset(due=ROWS, sql=COPY, name="copied", key_prefix="lake", description="Copies.")
    assert isinstance(asset, dg.AssetsDefinition)
    assert asset.key == dg.AssetKey(["lake", "copied"])
    assert asset.descriptions_by_key[asset.key].startswith("Copies.\n\n- **Wakes:** ")
    done = dg.materialize([asset], resources={"gaffer": gd.GafferResource(dsn=source)})
    (event,) = done.asset_materializations_for_node(asset.op.name)
    assert event.metadata["gaffer/items"].value == 25
    assert copied(source) == list(range(1, 26))
    plain = gd.gaffer_asset(due=ROWS, sql=COPY, name="plain")
    assert plain.descriptions_by_key[plain.key].startswith("- **Wakes:** ")


def test_the_example_of_the_documents_makes_a_row_for_each_day(url: str, clock: Clock) -> None:
    (code,) = re.findall(
        r"```python\n(import gaffer_dagster as gd\n\ndaily_totals.*?)```", DOCUMENT.read_text(), re.DOTALL
    )
    space: dict[str, Any] = {}
    exec(code, space)
    found = job_of(space["daily_totals"])
    jobs.execute(url, "create table orders (paid_at timestamptz, amount numeric)")
    jobs.execute(url, "create table totals (day timestamptz, amount numeric)")
    jobs.execute(
        url, "insert into orders values ('2027-03-27 23:30Z', 3), ('2027-03-28 21:59Z', 4), ('2027-03-28 22:00Z', 5)"
    )
    clock.set(datetime(2027, 3, 27, 12, tzinfo=timezone.utc))
    jobs.run(found.spec, url, found.work, worker_clock=clock.now)
    clock.set(datetime(2027, 3, 29, 12, tzinfo=timezone.utc))
    jobs.run(found.spec, url, found.work, worker_clock=clock.now)
    totals = jobs.query(url, "select amount, day from totals order by day")
    assert [amount for amount, _ in totals][-1] == 7
    assert totals[-1][1] == datetime(2027, 3, 27, 23, tzinfo=timezone.utc)


def test_sql_needs_a_name() -> None:
    with pytest.raises(BadSpecError, match=r"give name="):
        gd.gaffer_asset(due=ROWS, sql=COPY)  # type: ignore[call-overload]


def test_rows_stay_where_they_are(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the work is handed holds no row."""
    seen: list[Any] = []
    call = SqlWork.__call__
    monkeypatch.setattr(SqlWork, "__call__", lambda work, batch: (seen.append(batch.rows), call(work, batch))[1])
    run(source, COPY, batch_rows=10)
    assert seen == [[], [], []]


def test_leading_comments_are_found_by_the_one_rule() -> None:
    assert batches.skip_comments(" ; -- a\n /* b /* c */ */ ; with x") == "with x"
