"""`NewRows`: every row once, in commit order, whatever its writers do; and what a table needs for that."""

from __future__ import annotations

import random
import re
import threading
import time
from typing import Any

import psycopg
import pytest
from psycopg import sql

from gaffer_dagster.domain.bounds import Bounds
from gaffer_dagster.domain.due import NewRows
from gaffer_dagster.domain.run import Outcome, RunRecord
from gaffer_dagster.domain.schedule import Schedule
from gaffer_dagster.domain.spec import JobSpec
from gaffer_dagster.domain.watermark import RowPosition
from gaffer_dagster.engine.batch import Batch
from gaffer_dagster.errors import BadInputError, ForeignWatermarkError, GafferError, NotPreparedError
from gaffer_dagster.store import new_rows, prepare
from tests.support import invariants, jobs, protocol
from tests.support.protocol import Actor, session


def job(table: str = "source", key: str = "id", *, where: Any = None, **bounds: Any) -> JobSpec:
    return JobSpec("copy_rows", NewRows(table, key, where=where), Schedule("0 * * * *"), Bounds(**bounds))


def ddl(url: str, *texts: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        for text in texts:
            connection.execute(text)  # type: ignore[arg-type] — without parameters, so that a % is one


def prepared(url: str, table: str, key: str = "id", *, changed: bool | None = None) -> list[str]:
    """Prepares a table; what was lacking."""
    with session(url) as connection:
        todo = prepare.statements(connection, table, key, changed=changed)
        prepare.apply(connection, todo)
    return todo


def lacking(url: str, table: str, key: str = "id", *, changed: bool | None = None) -> list[str]:
    with session(url) as connection:
        return prepare.statements(connection, table, key, changed=changed)


class Taken:
    """The keys that runs of a job take, in order."""

    def __init__(self, url: str, key: str = "id") -> None:
        self.url, self.key = url, key
        self.keys: list[Any] = []

    def run(self, spec: JobSpec) -> RunRecord:
        return jobs.run(spec, self.url, lambda batch: self.keys.extend(row[self.key] for row in batch.rows))


@pytest.fixture
def taken(url: str) -> Taken:
    jobs.make_source(url)
    return Taken(url)


# ── late commits, sequences, ties ────────────────────────────────────────────────────────────────────────────────


def test_a_late_commit_behind_the_cursor_is_taken_once(url: str, taken: Taken) -> None:
    """B66. The open transaction hides what came after it; both come in the order of their writers."""
    with psycopg.connect(url) as late:
        late.execute("insert into source (value) values ('09:59:59')")
        jobs.execute(url, "insert into source (value) values ('10:00:00')")
        first = taken.run(job())
        assert (first.outcome, first.items) == (Outcome.SUCCEEDED, 0)
        late.commit()
    second = taken.run(job())
    assert (second.outcome, second.items, taken.keys) == (Outcome.SUCCEEDED, 2, [1, 2])
    assert taken.run(job()).items == 0


def test_numbers_of_a_sequence_may_come_out_of_order_and_not_at_all(url: str, taken: Taken) -> None:
    """B67: two connections that each cache fifty numbers, and numbers that a rollback took."""
    ddl(url, "alter sequence source_id_seq cache 50")
    insert = "insert into source (value) values ('x')"
    with psycopg.connect(url) as one, psycopg.connect(url) as other:
        for turn in range(6):
            for connection in (one, other):
                connection.execute(insert)
                connection.rollback() if turn == 3 else connection.commit()
            assert taken.run(job(batch_rows=1)).outcome is Outcome.SUCCEEDED
    expected = {row[0] for row in jobs.query(url, "select id from source")}
    assert len(expected) == 10
    assert sorted(taken.keys) == sorted(expected)
    assert taken.keys != sorted(taken.keys)  # a low number came after a high one was read, and was taken


def test_a_number_taken_early_and_written_late_is_not_lost(url: str, taken: Taken) -> None:
    """The pair is needed: here the lower key has the higher transaction."""
    ddl(url, "select setval('source_id_seq', 100)")
    jobs.execute(url, "insert into source (id, value) values (50, 'high')")
    assert taken.run(job()).items == 1
    jobs.execute(url, "insert into source (id, value) values (7, 'low')")
    assert taken.run(job()).items == 1
    assert taken.keys == [50, 7]


def test_more_ties_than_a_page_are_all_taken(url: str) -> None:
    """B70."""
    jobs.make_source(url, 10_000)
    assert jobs.query(url, "select count(distinct gaffer_xid) from source") == [(1,)]
    first = jobs.run(job(batch_rows=100, batches=50), url)
    second = jobs.run(job(batch_rows=100, batches=50), url)
    assert (first.outcome, first.items, first.backlog) == (Outcome.CAPPED, 5_000, 5_000)
    assert (second.outcome, second.items, second.backlog) == (Outcome.SUCCEEDED, 5_000, 0)
    assert jobs.query(url, "select count(*), count(distinct id) from target") == [(10_000, 10_000)]


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        ("uuid", "gen_random_uuid()"),
        ("text", "md5(n::text)"),
        ("text collate \"C\"", "chr(33 + n % 90) || '''\"%s\\' || n"),
        ("varchar(40)", "md5(n::text)"),
        ("numeric(20, 3)", "-n * 1.001"),
        ("smallint", "100 - n"),
        ("int", "-n"),
    ],
)  # fmt: skip
def test_keys_of_several_types_page_over_ties(url: str, kind: str, make: str) -> None:
    ddl(url, f"create table things (k {kind} primary key, n int)")
    ddl(url, f"insert into things select {make}, n from generate_series(1, 40) n")
    prepared(url, "things", "k")
    taken = Taken(url, "k")
    assert taken.run(job("things", "k", batch_rows=7)).items == 40
    ddl(url, f"insert into things select {make}, n from generate_series(41, 45) n")
    assert taken.run(job("things", "k", batch_rows=2)).items == 5
    assert len(taken.keys) == len(set(taken.keys)) == 45


def test_the_size_of_a_batch_may_change_in_between(url: str, taken: Taken) -> None:
    jobs.add_rows(url, 60)
    for rows, batches in ((7, 1), (1, 3), (100, 1), (3, 100), (1, 1)):
        taken.run(job(batch_rows=rows, batches=batches))
        jobs.add_rows(url, 5)
    taken.run(job())
    assert len(taken.keys) == len(set(taken.keys)) == 85
    assert taken.keys == sorted(taken.keys)


def test_a_second_tick_does_nothing_extra(url: str, taken: Taken) -> None:
    jobs.add_rows(url, 10)
    first, second = taken.run(job()), taken.run(job())
    assert (first.items, second.items, second.batches) == (10, 0, 0)
    assert second.watermark_from == second.watermark_to == first.watermark_to
    assert second.outcome is Outcome.SUCCEEDED


def test_a_run_takes_what_was_there_when_it_looked(url: str, taken: Taken) -> None:
    """A busy source would else never end."""
    jobs.add_rows(url, 6)

    def adds(batch: Batch) -> None:
        taken.keys.extend(row["id"] for row in batch.rows)
        jobs.add_rows(url, 3)

    record = jobs.run(job(batch_rows=2), url, adds)
    assert (record.outcome, record.items, record.batches, record.backlog) == (Outcome.SUCCEEDED, 6, 3, 0)
    assert taken.run(job()).items == 9
    assert sorted(taken.keys) == list(range(1, 16))


def test_slow_writers_lose_and_double_nothing_while_the_job_runs(url: str) -> None:
    jobs.make_source(url)
    invariants.watch(url)
    stop = threading.Event()

    def writer(number: int) -> int:
        chance, kept = random.Random(number), 0
        with psycopg.connect(url) as connection:
            while not stop.is_set():
                rows = chance.randint(1, 4)
                connection.execute("insert into source (value) select 'x' from generate_series(1, %s)", [rows])
                time.sleep(chance.choice([0, 0, 0.002, 0.01, 0.15]))
                if chance.random() < 0.1:
                    connection.rollback()
                else:
                    connection.commit()
                    kept += rows
        return kept

    writers = [Actor(lambda number=number: writer(number)) for number in range(5)]
    ends, began = [], time.monotonic()
    try:
        while time.monotonic() - began < 4 or len(ends) < 8:
            ends.append(jobs.run(job(batch_rows=20), url))
    finally:
        stop.set()
    written = sum(actor.result() for actor in writers)
    assert {record.outcome for record in ends} == {Outcome.SUCCEEDED}
    assert sum(record.items > 0 for record in ends) > 3
    last = jobs.run(job(batch_rows=20), url)
    assert last.outcome is Outcome.SUCCEEDED
    assert sum(record.items for record in [*ends, last]) == written
    invariants.check(url, complete=True)


# ── which rows ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_condition_may_have_percent_signs_and_comments(url: str, taken: Taken) -> None:
    jobs.add_rows(url, 12)
    ddl(url, "update source set value = '5%' where id = 5", "insert into source (value) values (null), ('v%s')")
    where = "value like 'v1%' /* not %s */ or value in ('5%', 'v%s') or id = 3 -- only these"
    record = taken.run(job(where=where, batch_rows=2))
    assert (record.outcome, record.items) == (Outcome.SUCCEEDED, 7)
    assert sorted(taken.keys) == [1, 3, 5, 10, 11, 12, 14]
    jobs.add_rows(url, 3)
    assert taken.run(job(where=where)).items == 1


def test_a_backlog_is_of_rows_that_fulfil_the_condition(url: str, taken: Taken) -> None:
    jobs.add_rows(url, 100)
    record = taken.run(job(where="id % 2 = 0", batch_rows=10, batches=1))
    assert (record.outcome, record.items, record.backlog) == (Outcome.CAPPED, 10, 40)


def test_a_condition_that_cannot_be_read_fails_the_run(url: str, taken: Taken) -> None:
    jobs.add_rows(url, 1)
    wrong = ("nonsense >", "no_such_column = 1", "1 = 1; select 1", "1 / (id - id) = 1", "sum(id) > 1")
    for where in wrong:
        with pytest.raises(
            BadInputError, match=rf"NewRows on public.source: where='{re.escape(where)}' cannot be used"
        ):
            taken.run(job(where=where))
    assert taken.keys == []
    assert protocol.outcomes(url) == ["failed"] * len(wrong)


def test_a_source_whose_done_rows_were_deleted_goes_on(url: str, taken: Taken) -> None:
    jobs.add_rows(url, 10)
    taken.run(job())
    ddl(url, "delete from source", "vacuum source")
    assert taken.run(job()).items == 0
    jobs.add_rows(url, 3)
    assert taken.run(job()).items == 3
    assert len(set(taken.keys)) == 13


def test_rows_have_every_column_but_ours(url: str) -> None:
    ddl(url, 'create table odd ("order" int primary key, "100%" text, "Key" jsonb, xid int)')
    prepared(url, "odd", "order")
    ddl(url, """insert into odd values (1, 'a%s', '{"b": [1]}', 7)""")
    rows: list[Any] = []
    jobs.run(job("odd", "order"), url, lambda batch: rows.extend(batch.rows))
    assert rows == [{"order": 1, "100%": "a%s", "Key": {"b": [1]}, "xid": 7}]


@pytest.mark.parametrize(
    "value", ["'infinity'", "'-infinity'", "'15000-01-01'", "'0044-03-15 BC'"], ids=["ahead", "behind", "15000", "BC"]
)
def test_a_value_that_python_cannot_hold_is_refused_by_the_rows_key(url: str, value: str) -> None:
    """B74: the watermark never becomes infinite, and nothing is skipped in silence."""
    ddl(url, "create table events (id int primary key, at timestamptz)")
    prepared(url, "events")
    ddl(url, f"insert into events values (1, now()), (2, now()), (3, {value}), (4, now())")
    taken = Taken(url)
    with pytest.raises(BadInputError, match=r"row of public\.events with id = 3 holds a value"):
        taken.run(job("events", batch_rows=2))
    assert taken.keys == [1, 2]
    assert jobs.query(url, "select outcome, items from gaffer.job_runs") == [("failed", 2)]
    assert jobs.query(url, "select error like '%id = 3%' from gaffer.job_runs".replace("%", "%%")) == [(True,)]
    with pytest.raises(BadInputError, match="id = 3"):
        taken.run(job("events", batch_rows=2))
    assert taken.run(job("events", where="isfinite(at) and at < '9999-01-01' and at > '0001-01-02'")).items == 1
    assert taken.keys == [1, 2, 4]


# ── positions that this database did not count ───────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "restored",
    [
        "update gaffer.job_watermark set cluster = '7123456789012345678'",
        "update gaffer.job_watermark set cluster = null",
        "update gaffer.job_watermark set position = jsonb_set(position, '{xid}', '\"900000000000\"')",
    ],
    ids=["another cluster", "no cluster", "the future"],
)
def test_a_foreign_position_stops_the_job_loudly(url: str, taken: Taken, restored: str) -> None:
    jobs.add_rows(url, 3)
    taken.run(job())
    jobs.add_rows(url, 3)
    ddl(url, restored)
    before = jobs.query(url, "select position, cluster from gaffer.job_watermark")
    with pytest.raises(ForeignWatermarkError, match=r"copy_rows.*restored or copied.*Nothing was read") as raised:
        taken.run(job())
    assert taken.keys == [1, 2, 3]
    assert protocol.outcomes(url) == ["succeeded", "failed"]
    assert jobs.query(url, "select position, cluster from gaffer.job_watermark") == before
    assert str(before[0][0]["xid"]) in str(raised.value)


def test_a_position_is_foreign_from_the_first_number_on_that_was_not_given(url: str) -> None:
    with session(url) as connection:
        connection.execute("begin isolation level repeatable read")
        row = connection.execute(
            "select pg_snapshot_xmax(pg_current_snapshot())::text::bigint, gaffer.cluster()"
        ).fetchone()
        assert row is not None
        given = RowPosition(str(row[0] - 1), "1")
        assert new_rows.horizon(connection, "copy_rows", given, row[1])[1] == row[1]
        with pytest.raises(ForeignWatermarkError, match=f"transaction {row[0]} of"):
            new_rows.horizon(connection, "copy_rows", RowPosition(str(row[0]), "1"), row[1])


def test_the_position_names_its_cluster(url: str, taken: Taken) -> None:
    jobs.add_rows(url, 1)
    taken.run(job())
    found = jobs.query(
        url, "select w.cluster, system_identifier::text from gaffer.job_watermark w, pg_control_system()"
    )[0]
    assert found[0] == found[1]
    assert jobs.query(url, "select cluster from gaffer.job_runs") == [(found[1],)]


# ── what a table needs ───────────────────────────────────────────────────────────────────────────────────────────


def test_a_table_that_is_not_prepared_is_refused_with_the_command(url: str) -> None:
    ddl(url, "create table plain (id int primary key)", "insert into plain values (1)")
    missing = r"public\.plain lacks the column gaffer_xid, the trigger that keeps it, an index.*"
    with pytest.raises(NotPreparedError, match=missing + r"run: gaffer prepare plain --key id --apply"):
        jobs.run(job("plain"), url)
    assert protocol.outcomes(url) == ["failed"]
    prepared(url, "plain")
    assert jobs.run(job("plain"), url, lambda batch: None).items == 1


def test_preparing_is_repeatable_and_says_nothing_when_complete(url: str) -> None:
    ddl(url, "create table plain (id int primary key)")
    assert len(lacking(url, "plain")) == 5
    prepared(url, "plain")
    assert lacking(url, "plain") == lacking(url, "public.plain") == lacking(url, "plain", changed=False) == []
    assert len(lacking(url, "plain", changed=True)) == 3
    prepared(url, "plain", changed=True)
    assert lacking(url, "plain") == lacking(url, "plain", changed=True) == []


def test_what_was_damaged_is_found_and_mended(url: str) -> None:
    for number, (damage, named) in enumerate(
        [
            ("alter table {} disable trigger gaffer_stamp_xid", "the trigger"),
            ("alter table {} enable trigger gaffer_stamp_xid", "the trigger"),
            ("drop trigger gaffer_stamp_xid on {}", "the trigger"),
            ("alter table {} alter gaffer_xid drop not null", "the column"),
            ("alter table {} drop gaffer_xid cascade", "the column"),
            ("update pg_index set indisvalid = false where indrelid = '{}'::regclass and not indisprimary", "an index"),
        ]
    ):
        table = f"plain_{number}"
        ddl(url, f"create table {table} (id int primary key)")
        prepared(url, table)
        ddl(url, f"insert into {table} values (1)", damage.format(table))
        spec = JobSpec(f"job_{number}", NewRows(table, "id"))
        with pytest.raises(NotPreparedError, match=named):
            jobs.run(spec, url)
        assert prepared(url, table) != []
        assert lacking(url, table) == []
        ddl(url, f"insert into {table} values (2)")
        assert jobs.run(spec, url, lambda batch: None).items == 2


def test_an_index_whose_building_failed_is_built_anew(url: str) -> None:
    """As `create index concurrently` leaves it when it is killed."""
    ddl(url, "create table plain (id int primary key)")
    prepared(url, "plain")
    ddl(
        url,
        "update pg_index set indisvalid = false where indrelid = 'plain'::regclass and not indisprimary",
    )
    todo = lacking(url, "plain")
    assert [text.split()[0] for text in todo] == ["drop", "create"]
    prepared(url, "plain")
    found = "select count(*), bool_and(indisvalid) from pg_index where indrelid = 'plain'::regclass"
    assert jobs.query(url, found) == [(2, True)]


ODD_NAMES = [
    '"Odd ""table; --"',
    '"100% %s"',
    '"with (parenthesis"',
    '"an index table"',
    '"tàble"',
    f'"{"é" * 31}"',
    f'"{"a" * 63}"',
    f'"{"a" * 62}b"',
    '"select"',
]


def test_tables_with_odd_names_are_tables(url: str) -> None:
    ddl(url, 'create schema "Odd %s"')
    for number, name in enumerate([*ODD_NAMES, *(f'"Odd %s".{name}' for name in ODD_NAMES)]):
        ddl(url, f"""create table {name} ("The ""key %s" int primary key)""")
        prepared(url, name, 'The "key %s')
        assert lacking(url, name, 'The "key %s') == []
        ddl(url, f"insert into {name} values (1), (2), (3)")
        spec = JobSpec(f"odd_{number}", NewRows(name, 'The "key %s'), bounds=Bounds(batch_rows=2))
        assert jobs.run(spec, url, lambda batch: None).items == 3


def test_two_jobs_may_read_one_table_by_different_keys(url: str) -> None:
    ddl(url, "create table plain (id int primary key, other uuid not null unique default gen_random_uuid())")
    assert len(prepared(url, "plain", "id")) == 5
    assert len(prepared(url, "plain", "other")) == 4  # the trigger watches both keys now, and an index of its own
    assert lacking(url, "plain", "id") == lacking(url, "plain", "other") == []
    ddl(url, "insert into plain (id) values (1), (2)")
    assert jobs.run(job("plain", "id"), url, lambda batch: None).items == 2
    spec = JobSpec("by_other", NewRows("plain", "other"))
    assert jobs.run(spec, url, lambda batch: None).items == 2


def test_a_key_that_could_lose_rows_is_refused(url: str) -> None:
    for number, (columns, key, why) in enumerate(
        [
            ("id int not null", "id", "must be unique and never null"),
            ("id int unique", "id", "must be unique and never null"),
            ("id int, b int, primary key (id, b)", "id", "must be unique"),
            ("id timestamptz primary key", "id", r"of type timestamp with time zone; use one of .*bigint.*uuid"),
            ("id int primary key", "nmae", r"no column 'nmae'; it has id"),
            ("id int primary key, gaffer_xid bigint", "id", r"gaffer_xid.*is bigint, not xid8"),
        ]
    ):
        table = f"plain_{number}"
        ddl(url, f"create table {table} ({columns})")
        with pytest.raises((NotPreparedError, BadInputError), match=why):
            lacking(url, table, key)
        with pytest.raises((NotPreparedError, BadInputError), match=why):
            jobs.run(job(table, key), url)


def test_a_unique_index_on_some_rows_only_is_no_unique_key(url: str) -> None:
    ddl(url, "create table plain (id int not null, b int)", "create unique index on plain (id) where b > 0")
    ddl(url, "create unique index on plain (id, b)", "create unique index on plain ((id + 0))")
    with pytest.raises(NotPreparedError, match="must be unique"):
        lacking(url, "plain")
    ddl(url, "create unique index on plain (id) include (b)")
    assert lacking(url, "plain") != []


def test_what_is_no_table_is_refused_by_name(url: str) -> None:
    ddl(url, "create view v as select 1 as id")
    for name in ("nowhere", "no.such.table.at.all", "a b c", '"unclosed', "pg_catalog.pg_tables", "v"):
        with pytest.raises(BadInputError) as raised:
            lacking(url, name)
        assert repr(name) in str(raised.value)


def test_the_stamp_is_ours_whatever_is_given(url: str) -> None:
    jobs.make_source(url)
    jobs.execute(url, "insert into source (id, value, gaffer_xid) values (1, 'given', '1')")
    with psycopg.connect(url) as connection:
        with connection.cursor().copy("copy source (id, value, gaffer_xid) from stdin") as stream:
            stream.write_row((2, "copied", "1"))
        connection.execute("set local session_replication_role = replica")
        connection.execute("insert into source (id, value, gaffer_xid) values (3, 'replicated', '1')")
    jobs.execute(url, "insert into source (id, value) values (4, null) on conflict (id) do update set gaffer_xid = '1'")
    jobs.execute(url, "insert into source (id, value) values (4, null) on conflict (id) do update set gaffer_xid = '1'")
    # `xmin` is of the transaction that wrote this version of the row; an update has kept the number of the first one.
    rows = jobs.query(url, "select id, gaffer_xid::text::bigint = xmin::text::bigint from source order by id")
    assert rows == [(1, True), (2, True), (3, True), (4, False)]
    assert jobs.query(url, "select min(gaffer_xid::text::bigint) > 1 from source") == [(True,)]


def test_the_stamp_is_of_the_whole_transaction_and_not_of_its_part(url: str) -> None:
    jobs.make_source(url)
    with psycopg.connect(url) as connection:
        connection.execute("insert into source (id) values (1)")
        with connection.transaction():
            connection.execute("insert into source (id) values (2)")
    assert jobs.query(url, "select count(distinct gaffer_xid), count(distinct xmin::text) from source") == [(1, 2)]


@pytest.mark.parametrize("changed", [False, True])
def test_an_update_makes_a_row_new_only_where_it_was_asked_for(url: str, changed: bool) -> None:
    jobs.make_source(url, 4, changed=changed)
    taken = Taken(url)
    taken.run(job(batch_rows=3))
    before = jobs.query(url, "select id, gaffer_xid from source order by id")
    jobs.execute(url, "update source set value = 'new' where id = 2")
    jobs.execute(url, "update source set gaffer_xid = '1' where id = 3")
    jobs.execute(url, "update source set gaffer_xid = default where id = 4")
    after = jobs.query(url, "select id, gaffer_xid from source order by id")
    assert (before == after) is not changed
    assert before[0] == after[0]
    record = taken.run(job(batch_rows=1))
    assert record.items == (3 if changed else 0)
    assert taken.keys == [1, 2, 3, 4] + ([2, 3, 4] if changed else [])


def test_rows_from_before_the_preparation_are_due_once(url: str) -> None:
    ddl(url, "create table plain (id int primary key)", "insert into plain select generate_series(1, 25)")
    prepared(url, "plain")
    taken = Taken(url)
    assert taken.run(job("plain", batch_rows=10)).items == 25
    ddl(url, "insert into plain select generate_series(26, 30)")
    assert taken.run(job("plain", batch_rows=10)).items == 5
    assert taken.keys == list(range(1, 31))


def test_the_page_is_one_range_of_the_index(url: str) -> None:
    jobs.make_source(url, 3_000)
    jobs.run(job(batches=1), url)
    with session(url) as connection:
        source = prepare.source(connection, "source", "id")
        position = RowPosition.read(jobs.query(url, "select position from gaffer.job_watermark")[0][0])
        horizon = jobs.query(url, "select pg_snapshot_xmin(pg_current_snapshot())::text")[0][0]
        query = sql.SQL("explain (costs off) select * {} order by source.gaffer_xid, source.id limit 10").format(
            new_rows._due(source, None, position, horizon)
        )
        connection.execute("analyze source")
        connection.execute("set enable_seqscan = off")
        plan = "\n".join(row[0] for row in connection.execute(query).fetchall())
    assert "Index" in plan
    assert "Sort" not in plan


def test_a_watermark_of_another_table_or_kind_of_due_work_is_refused(url: str) -> None:
    jobs.make_source(url, 3)
    jobs.make_source(url, 3, table="other")
    jobs.run(jobs.spec(), url)
    with pytest.raises(ForeignWatermarkError, match=r"was not written for rows of public\.other\(id\)"):
        jobs.run(jobs.spec(table="other"), url)
    with pytest.raises(ForeignWatermarkError, match="was not written for intervals of time"):
        jobs.run(jobs.daily("copy_rows", start="2024-01-01"), url)
    assert jobs.query(url, "select count(*) from target") == [(3,)]
    jobs.run(jobs.daily(start="2026-01-01", until="2026-01-02"), url, lambda batch: None)
    with pytest.raises(ForeignWatermarkError, match=r"was not written for rows of public\.source\(id\)"):
        jobs.run(jobs.spec("daily"), url)


# ── keys that change, tables with children, and repairs that wait for nobody for ever ────────────────────────────


def test_a_pending_row_whose_key_changes_is_still_seen(url: str) -> None:
    """Behind the position under its new key, and of the same transaction, it would never be due."""
    for mode in (False, True):
        table = f"plain_{mode}".lower()
        ddl(url, f"create table {table} (id int primary key, value text)")
        prepared(url, table, changed=mode)
        ddl(url, f"insert into {table} select n * 10 from generate_series(1, 4) n")
        taken = Taken(url)
        spec = JobSpec(f"job_{mode}".lower(), NewRows(table, "id"), bounds=Bounds(batch_rows=2, batches=1))
        assert taken.run(spec).items == 2
        ddl(url, f"update {table} set id = 5 where id = 30")
        taken.run(spec)
        taken.run(spec)
        assert taken.keys == [10, 20, 40, 5]


def test_only_a_key_that_changes_makes_a_row_new_again(url: str, taken: Taken) -> None:
    jobs.add_rows(url, 3)
    taken.run(job())
    stamps = "select id, gaffer_xid::text from source order by id"
    before = jobs.query(url, stamps)
    ddl(url, "update source set value = 'x'", "update source set id = id, value = 'y'")
    ddl(url, "update source set gaffer_xid = default")
    assert jobs.query(url, stamps) == before
    assert taken.run(job()).items == 0
    ddl(url, "update source set id = 7 where id = 1")
    assert jobs.query(url, stamps)[:2] == before[1:]
    assert taken.run(job()).items == 1
    assert taken.keys == [1, 2, 3, 7]


def test_each_key_of_two_jobs_over_a_table_is_watched(url: str) -> None:
    ddl(url, "create table plain (id int primary key, other int not null unique)")
    for key in ("id", "other"):
        prepared(url, "plain", key)
    assert lacking(url, "plain", "id") == lacking(url, "plain", "other") == []
    ddl(url, "insert into plain values (10, 10), (20, 20), (30, 30), (40, 40)")
    for key in ("id", "other"):
        taken = Taken(url, key)
        spec = JobSpec(f"by_{key}", NewRows("plain", key), bounds=Bounds(batch_rows=2, batches=1))
        assert taken.run(spec).items == 2
        ddl(url, f"update plain set {key} = 5 where {key} = 30")
        taken.run(spec)
        taken.run(spec)
        assert sorted(taken.keys) == [5, 10, 20, 40]


def test_a_trigger_that_does_not_watch_the_key_is_found_and_mended(url: str) -> None:
    """As older releases made it."""
    ddl(url, "create table plain (id int primary key, value text)")
    prepared(url, "plain")
    ddl(
        url,
        "drop trigger gaffer_stamp_xid on plain",
        "create trigger gaffer_stamp_xid before insert or update of gaffer_xid on plain for each row"
        " execute function gaffer.stamp_xid('new')",
        "alter table plain enable always trigger gaffer_stamp_xid",
        "insert into plain values (1)",
    )
    with pytest.raises(NotPreparedError, match=r"lacks the trigger .*gaffer prepare plain --key id --apply"):
        jobs.run(job("plain"), url)
    todo = prepared(url, "plain")
    assert any(text.startswith("create trigger") for text in todo)
    assert not any("index" in text.split("(")[0] for text in todo)
    assert lacking(url, "plain") == []
    ddl(url, "update plain set id = 2")
    assert jobs.run(job("plain"), url, lambda batch: None).items == 1


def test_a_table_with_children_is_refused(url: str) -> None:
    """A trigger is not inherited: rows of the children would have no stamp of their own."""
    ddl(url, "create table parent (id int primary key)", "create table child (extra int) inherits (parent)")
    with pytest.raises((NotPreparedError, BadInputError), match=r"public\.parent.*(inherit|child)"):
        lacking(url, "parent")
    ddl(url, "create table plain (id int primary key)")
    prepared(url, "plain")
    ddl(url, "create table late_child () inherits (plain)", "insert into plain values (1)")
    with pytest.raises((NotPreparedError, BadInputError), match=r"public\.plain.*(inherit|child)"):
        jobs.run(job("plain"), url)
    assert protocol.outcomes(url) == ["failed"]


def test_an_invalid_index_is_dropped_without_blocking_writers(url: str) -> None:
    ddl(url, "create table plain (id int primary key)")
    prepared(url, "plain")
    ddl(url, "update pg_index set indisvalid = false where indrelid = 'plain'::regclass and not indisprimary")
    first, second = lacking(url, "plain")
    assert first.startswith("drop index concurrently")
    assert second.startswith("create index concurrently")
    assert prepared(url, "plain") == [first, second]
    assert lacking(url, "plain") == []


@pytest.mark.parametrize("lacks", ["everything", "the trigger"])
def test_preparing_waits_for_a_lock_only_so_long(url: str, lacks: str) -> None:
    """Whoever waits for such a lock lets everyone else wait behind him."""
    ddl(url, "create table plain (id int primary key)")
    if lacks != "everything":
        prepared(url, "plain")
        ddl(url, "drop trigger gaffer_stamp_xid on plain")
    with psycopg.connect(url) as other:
        other.execute("insert into plain values (1)")
        began = time.monotonic()
        with pytest.raises((psycopg.errors.LockNotAvailable, GafferError)):
            Actor(lambda: prepared(url, "plain")).result(30)
        assert time.monotonic() - began < 20
    prepared(url, "plain")
    assert lacking(url, "plain") == []
    with session(url) as connection:
        assert connection.execute("show lock_timeout").fetchone() == ("0",)


@pytest.mark.parametrize("index", ["broken", "missing"])
def test_an_index_that_waits_for_a_writer_lets_all_others_write(url: str, index: str) -> None:
    ddl(url, "create table plain (id int primary key)")
    prepared(url, "plain")
    ddl(url, "drop index plain_gaffer_xid_id_idx")
    if index == "broken":
        ddl(url, "create index concurrently on plain (gaffer_xid, id)")
        ddl(url, "update pg_index set indisvalid = false where indrelid = 'plain'::regclass and not indisprimary")
    with psycopg.connect(url) as writer:
        writer.execute("insert into plain values (1)")
        waits = Actor(lambda: prepared(url, "plain"))
        protocol.until(lambda: protocol.waits_for_a_lock(url))
        ddl(url, "set lock_timeout = '2s'", "insert into plain values (2)", "update plain set id = 3 where id = 2")
        assert waits.is_alive()
    waits.result()
    assert lacking(url, "plain") == []
    assert jobs.run(job("plain"), url, lambda batch: None).items == 2


@pytest.mark.parametrize("name", ["it's", "a,b", 'quo"te', "%s", "xid 1"])
def test_a_key_of_odd_name_is_watched_by_the_trigger(url: str, name: str) -> None:
    quoted = '"' + name.replace('"', '""') + '"'
    ddl(url, f"create table plain ({quoted} int primary key)")
    prepared(url, "plain", name)
    assert lacking(url, "plain", name) == []
    ddl(url, "insert into plain values (10), (20), (30), (40)")
    taken = Taken(url, name)
    assert taken.run(job("plain", name, batch_rows=2, batches=1)).items == 2
    ddl(url, f"update plain set {quoted} = 5 where {quoted} = 30")
    taken.run(job("plain", name))
    taken.run(job("plain", name))
    assert taken.keys == [10, 20, 40, 5]


def test_a_partitioned_table_is_refused(url: str) -> None:
    """ATTACH PARTITION brings rows in that no trigger has stamped."""
    ddl(
        url,
        "create table parts (id int primary key, value text) partition by range (id)",
        "create table parts_1 partition of parts for values from (0) to (10)",
        "insert into parts values (1)",
    )
    for ask in (lambda: lacking(url, "parts"), lambda: jobs.run(job("parts"), url)):
        with pytest.raises(NotPreparedError, match=r"public\.parts has partitions"):
            ask()


@pytest.mark.parametrize("changed", [False, True])
def test_a_key_that_was_renamed_or_dropped_is_mended(url: str, changed: bool) -> None:
    ddl(url, "create table plain (id int primary key, other int not null unique)")
    for key in ("id", "other"):
        prepared(url, "plain", key, changed=changed)
    ddl(url, "alter table plain rename id to ident", "insert into plain values (1, 1)")
    prepared(url, "plain", "ident")
    assert lacking(url, "plain", "ident") == lacking(url, "plain", "other") == []
    ddl(url, "update plain set ident = 2", "alter table plain drop column other cascade")
    prepared(url, "plain", "ident")
    assert lacking(url, "plain", "ident") == []
    ddl(url, "insert into plain values (3)", "update plain set ident = 4 where ident = 3")
    assert jobs.run(job("plain", "ident"), url, lambda batch: None).items == 2


def test_a_run_says_who_holds_its_rows_back(url: str, server_url: str, caplog: pytest.LogCaptureFixture) -> None:
    jobs.make_source(url, 1)
    jobs.run(jobs.spec(), url)
    elsewhere = psycopg.connect(server_url, application_name="a slow writer")  # another database, the same horizon
    with elsewhere:
        elsewhere.execute("create temporary table written (id int)")
        jobs.add_rows(url, 3)
        assert jobs.run(jobs.spec(), url).items == 0
        (line,) = [record.message for record in caplog.records if "held back" in record.message]
        assert f"backend {elsewhere.info.backend_pid} (" in line
        assert "application a slow writer" in line
    caplog.clear()
    assert jobs.run(jobs.spec(), url).items == 3
    assert jobs.run(jobs.spec(), url).items == 0
    assert "held back" not in caplog.text
