"""`NewRows` by a cursor of the table's own, behind a lag: what it takes, refuses, and cannot promise."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import psycopg
import psycopg.conninfo
import pytest

from gaffer_dagster.domain.bounds import Bounds
from gaffer_dagster.domain.due import NewRows
from gaffer_dagster.domain.run import Outcome, RunRecord
from gaffer_dagster.domain.schedule import Schedule
from gaffer_dagster.domain.spec import JobSpec
from gaffer_dagster.engine.batch import Batch
from gaffer_dagster.engine.sources import source_of
from gaffer_dagster.errors import BadInputError, ForeignWatermarkError, NotPreparedError
from gaffer_dagster.store import new_rows, prepare
from gaffer_dagster.testing import Clock
from tests.support import jobs, protocol, ticking
from tests.support.protocol import session

NOON = datetime(2027, 3, 1, 12, tzinfo=timezone.utc)
MINUTE = timedelta(minutes=1)


def job(settle: str = "10m", key: str = "id", *, name: str = "by_cursor", where: Any = None, **bounds: Any) -> JobSpec:
    due = NewRows("events", key, cursor="at", settle=settle, where=where)
    return JobSpec(name, due, Schedule("0 * * * *"), Bounds(**({"timeout": "5m"} | bounds)))


class Events:
    """A table that a job reads by its column `at`. The clock stands still at noon until it is moved."""

    def __init__(self, url: str, kind: str = "timestamptz not null default now()", key: str = "int") -> None:
        self.url = url
        self.keys: list[Any] = []
        self.batches: list[int] = []
        jobs.execute(url, f"create table events (id {key} primary key, at {kind})")
        self.prepare()
        self.now = NOON
        self.set(NOON)

    def prepare(self) -> list[str]:
        with session(self.url) as connection:
            todo = prepare.cursor_statements(connection, "events", "id", "at")
            prepare.apply(connection, todo)
        return todo

    def set(self, at: datetime) -> None:
        self.now = at
        protocol.freeze(self.url, at)

    def add(self, key: Any, at: datetime | str) -> None:
        jobs.execute(self.url, "insert into events values (%s, %s)", key, at)

    def run(self, spec: JobSpec | None = None) -> RunRecord:
        def work(batch: Batch) -> None:
            self.keys.extend(row["id"] for row in batch.rows)
            self.batches.append(len(batch.rows))

        return jobs.run(spec or job(), self.url, work, worker_clock=lambda: self.now)

    @property
    def position(self) -> dict[str, str]:
        return jobs.query(self.url, "select position from gaffer.job_watermark")[0][0]


@pytest.fixture
def events(url: str) -> Events:
    return Events(url)


# ── what is due ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_row_is_due_once_its_cursor_is_settle_ago(events: Events) -> None:
    for key, ago in ((1, 10 * MINUTE), (2, 10 * MINUTE + timedelta(microseconds=1)), (3, MINUTE), (4, -MINUTE)):
        events.add(key, NOON - ago)
    assert (events.run().items, events.keys) == (1, [2])
    events.set(NOON + timedelta(microseconds=1))
    assert (events.run().items, events.keys) == (1, [2, 1])
    events.set(NOON + 30 * MINUTE)
    record = events.run()
    assert (record.outcome, record.items, events.keys) == (Outcome.SUCCEEDED, 2, [2, 1, 3, 4])
    assert events.run().items == 0


def test_a_writer_faster_than_the_lag_loses_nothing_and_a_slower_one_does(events: Events) -> None:
    """B66, by a lag: safe only for writers that live less long than `settle`."""
    with psycopg.connect(events.url) as late:
        late.execute("insert into events values (1, %s)", [NOON - MINUTE])
        events.add(2, NOON)
        assert events.run().items == 0
        late.commit()
    events.set(NOON + 11 * MINUTE)
    assert (events.run().items, events.keys) == (2, [1, 2])
    with psycopg.connect(events.url) as late:
        late.execute("insert into events values (3, %s)", [NOON + 11 * MINUTE])
        events.add(4, NOON + 12 * MINUTE)
        events.set(NOON + 30 * MINUTE)
        assert events.run().items == 1
        late.commit()
    assert events.run().items == 0
    assert events.keys == [1, 2, 4]  # 3 is lost: what the warning and the docstring are about


def test_equal_times_at_the_boundary_are_taken_in_the_order_of_the_key(url: str) -> None:
    """B68. A fourth row with a smaller key comes while its time is not due yet; the pair loses none of the others."""
    events = Events(url, key="uuid")
    keys = [f"{n}0000000-0000-4000-8000-000000000000" for n in (1, 5, 7, 9)]
    for key in keys[1:]:
        events.add(key, NOON)
    assert events.run(job(batch_rows=2, batches=1)).items == 0
    events.add(keys[0], NOON)
    events.set(NOON + 11 * MINUTE)
    first = events.run(job(batch_rows=2, batches=1))
    assert (first.outcome, first.backlog) == (Outcome.CAPPED, 2)
    events.run(job(batch_rows=2))
    assert [str(key) for key in events.keys] == keys


def test_more_ties_than_a_page_are_all_taken(events: Events) -> None:
    """B70."""
    jobs.execute(events.url, "insert into events select n, %s from generate_series(1, 1000) n", NOON - 60 * MINUTE)
    first = events.run(job(batch_rows=10, batches=50))
    assert (first.outcome, first.items, first.backlog) == (Outcome.CAPPED, 500, 500)
    assert events.run(job(batch_rows=10, batches=50)).items == 500
    assert events.keys == list(range(1, 1001))


@pytest.mark.parametrize(
    "setting", ["DateStyle to 'ISO, DMY'", "TimeZone to 'Asia/Kolkata'", "extra_float_digits to '-10'", None]
)
def test_a_position_is_exact_to_the_microsecond_whatever_the_session_says(events: Events, setting: str | None) -> None:
    """B71."""
    if setting is not None:
        name = jobs.query(events.url, "select current_database()")[0][0]
        jobs.execute(events.url, f'alter database "{name}" set {setting}')
    for key, micro in ((1, 123456), (2, 123999), (3, 500000), (4, 0)):
        events.add(key, f"2027-02-03 11:00:07.{micro:06}+00")
        events.add(key + 10, f"2027-02-03 11:00:07.{micro:06}+00")
    assert events.run(job(batch_rows=1, batches=3)).items == 3
    assert events.position == {"cursor": "2027-02-03T11:00:07.123456", "key": "1", "of": "public.events(at, id)"}
    events.run(job(batch_rows=1))
    assert events.keys == [4, 14, 1, 11, 2, 12, 3, 13]
    assert events.position["cursor"] == "2027-02-03T11:00:07.5"


@pytest.mark.parametrize("zone", ["Pacific/Kiritimati", "Etc/GMT+12", "Asia/Kolkata"])
def test_a_date_is_due_once_it_is_over_everywhere_on_earth(url: str, zone: str) -> None:
    events = Events(url, "date not null")
    name = jobs.query(url, "select current_database()")[0][0]
    jobs.execute(url, f"alter database \"{name}\" set timezone to '{zone}'")
    events.add(1, "2027-03-01")
    over = datetime(2027, 3, 2, 12, 10, tzinfo=timezone.utc)
    events.set(over - timedelta(microseconds=1))
    assert events.run().items == 0
    events.set(over)
    assert events.run().items == 1
    assert events.position == {"cursor": "2027-03-01", "key": "1", "of": "public.events(at, id)"}
    assert events.run().items == 0


def test_a_condition_and_an_update_of_the_cursor(events: Events) -> None:
    for key in range(1, 7):
        events.add(key, NOON - 30 * MINUTE + key * MINUTE)
    assert events.run(job(where="id % 2 = 0")).items == 3
    jobs.execute(events.url, "update events set at = %s where id in (1, 2)", NOON)
    events.set(NOON + 30 * MINUTE)
    assert events.run(job(where="id % 2 = 0")).items == 1
    assert events.keys == [2, 4, 6, 2]


def test_an_upper_bound_is_fixed_at_the_look(url: str, clock: Clock) -> None:
    """A busy source would else never end."""
    jobs.execute(url, "create table events (id int generated always as identity primary key, at timestamptz not null)")
    add = "insert into events (at) values (gaffer.clock() - interval '1 second')"
    jobs.execute(url, add)

    def adds(_: Batch) -> None:
        clock.advance(timedelta(seconds=2))
        jobs.execute(url, add)

    clock.advance(timedelta(seconds=5))
    record = jobs.run(job("2s", batch_rows=1), url, adds, worker_clock=clock.now)
    assert (record.outcome, record.batches) == (Outcome.SUCCEEDED, 1)


def test_what_is_left_is_dated_by_its_oldest_row(events: Events) -> None:
    for key in range(1, 5):
        events.add(key, NOON - 60 * MINUTE + key * MINUTE)
    record = events.run(job(batch_rows=1, batches=2))
    assert (record.outcome, record.backlog) == (Outcome.CAPPED, 2)
    found = jobs.query(events.url, "select due_since from gaffer.job where name = 'by_cursor'")
    assert found == [(NOON - 60 * MINUTE + 3 * MINUTE + 10 * MINUTE,)]


def test_a_date_that_is_left_is_dated_by_when_it_became_due(url: str) -> None:
    events = Events(url, "date not null")
    events.add(1, "2027-02-01")
    events.add(2, "2027-02-02")
    events.run(job(batch_rows=1, batches=1))
    found = jobs.query(url, "select due_since from gaffer.job where name = 'by_cursor'")
    assert found == [(datetime(2027, 2, 3, 12, 10, tzinfo=timezone.utc),)]


def test_a_source_that_is_emptied_keeps_the_position(events: Events) -> None:
    events.add(1, NOON - 60 * MINUTE)
    events.run()
    before = events.position
    jobs.execute(events.url, "truncate events")
    assert events.run().items == 0
    assert events.position == before
    events.add(2, NOON - 20 * MINUTE)
    assert events.run().items == 1


# ── values that are no times ─────────────────────────────────────────────────────────────────────────────────────


def test_infinite_times_are_never_due_and_are_said(events: Events, caplog: pytest.LogCaptureFixture) -> None:
    """B74: the others go on, and the position never becomes infinite."""
    for key, at in ((1, "infinity"), (2, "-infinity"), (3, NOON - 60 * MINUTE), (4, "15000-01-01"), (5, "infinity")):
        events.add(key, at)
    record = events.run()
    assert (record.outcome, events.keys, events.position["cursor"]) == (Outcome.SUCCEEDED, [3], "2027-03-01T11:00:00")
    (line,) = [each.message for each in caplog.records if "rows are never due" in each.message]
    assert "at is infinite in 3 of them, such as id = 1" in line
    caplog.clear()
    jobs.execute(events.url, "delete from events where not isfinite(at)")
    events.run()
    assert "never due" not in caplog.text


def test_a_time_that_python_cannot_hold_is_refused_by_its_key(events: Events) -> None:
    events.add(1, "0044-03-15 BC")
    events.add(2, NOON - 60 * MINUTE)
    with pytest.raises(BadInputError, match=r"row of public\.events with id = 1 holds a value .*where="):
        events.run()
    assert events.run(job(where="at > '0001-01-02'")).items == 1


def test_a_time_before_christ_is_kept_exactly_where_nobody_reads_it(events: Events) -> None:
    with session(events.url) as connection:
        events.add(1, "0044-03-15 12:00:00.25+00 BC")
        events.add(2, "0043-03-15 12:00:00.25+00 BC")
        source = prepare.cursor_source(connection, "events", "id", "at")
        position, seen = None, list[str]()
        while (found := new_rows.end_of_page(connection, source, None, position, "2027-01-01", 1)) is not None:
            position = found.position
            seen.append(position.key)
        assert seen == ["1", "2"]
        assert "BC" in str(position)
        assert new_rows.due_since(connection, source, None, None, "2027-01-01", MINUTE) is not None


# ── what cannot serve ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("timestamptz", r"cursor 'at' of table public\.events may be null.*alter column \"at\" set not null"),
        ("timestamp not null", r"without time zone: .*alter column \"at\" type timestamptz using \"at\" at time zone"),
        ("int not null", r"of type integer, which no lag.*gaffer prepare events --key id --apply"),
        ("uuid not null", "of type uuid"),
        ("text not null", "of type text"),
    ],
)
def test_a_cursor_that_could_lose_rows_is_refused_with_the_cure(url: str, kind: str, said: str) -> None:
    """B73, and a timestamp that means another time to each session."""
    jobs.execute(url, f"create table events (id int primary key, at {kind})")
    with pytest.raises(NotPreparedError, match=said):
        jobs.run(job(), url)
    with session(url) as connection, pytest.raises(NotPreparedError, match=said):
        prepare.cursor_statements(connection, "events", "id", "at")
    assert protocol.outcomes(url, "by_cursor") == ["failed"]


def test_the_cure_for_a_timestamp_works(url: str) -> None:
    jobs.execute(url, "create table events (id int primary key, at timestamp not null)")
    jobs.execute(url, "insert into events values (1, '2020-01-01')")
    with pytest.raises(NotPreparedError) as raised:
        jobs.run(job(), url)
    jobs.execute(url, str(raised.value).split("so: ")[1].split(" (or")[0])
    assert jobs.run(job(), url, lambda batch: None).items == 1


def test_a_column_that_is_not_there_is_refused_by_name(url: str) -> None:
    jobs.execute(url, "create table events (id int primary key)")
    with pytest.raises(BadInputError, match=r"public\.events has no column 'at'"):
        jobs.run(job(), url)


def test_a_watermark_of_the_other_order_is_refused(events: Events) -> None:
    events.add(1, NOON - 60 * MINUTE)
    events.run()
    with session(events.url) as connection:
        prepare.apply(connection, prepare.statements(connection, "events", "id", changed=None))
    snapshot = JobSpec("by_cursor", NewRows("events", "id"))
    with pytest.raises(ForeignWatermarkError, match=r"not written for rows of public\.events\(id\)"):
        events.run(snapshot)
    jobs.execute(events.url, "update gaffer.job_watermark set position = null, cluster = null")
    events.run(snapshot)
    with pytest.raises(ForeignWatermarkError, match=r"not written for rows of public\.events\(at, id\)"):
        events.run()
    assert events.keys == [1, 1]


# ── what makes a lag safe, and fast ──────────────────────────────────────────────────────────────────────────────


def warned(caplog: pytest.LogCaptureFixture, what: str) -> list[str]:
    return [record.message for record in caplog.records if what in record.message]


def timeouts(url: str) -> bool:
    return bool(jobs.query(url, "select from pg_settings where name = 'transaction_timeout'"))


def test_a_run_warns_once_where_a_writer_may_outlive_the_lag(events: Events, caplog: pytest.LogCaptureFixture) -> None:
    for key in range(5):
        events.add(key, NOON - 60 * MINUTE)
    events.run(job(batch_rows=1))
    (line,) = warned(caplog, "rows can be missed")
    assert "may last without end" in line
    assert "settle=10m" in line
    assert "transaction_timeout = '600000ms'" in line
    assert warned(caplog, "not indexed") == []


def test_a_bound_on_every_writer_is_believed(url: str, stranger: str, caplog: pytest.LogCaptureFixture) -> None:
    events = Events(url)
    if not timeouts(url):
        pytest.skip("this server has no transaction_timeout")
    name, role = jobs.query(url, "select current_database()")[0][0], psycopg.conninfo.conninfo_to_dict(stranger)["user"]
    jobs.execute(url, f"alter database \"{name}\" set transaction_timeout = '5min'")
    events.run()
    assert warned(caplog, "rows can be missed") == []
    # A role of which that is not true, once it may write.
    jobs.execute(url, f"alter role {role} set transaction_timeout = '1h'")
    events.run()
    assert warned(caplog, "rows can be missed") == []
    jobs.execute(url, f"grant insert on events to {role}")
    events.run()
    (line,) = warned(caplog, "rows can be missed")
    assert f"a transaction of {role} may last for 1h" in line
    caplog.clear()
    jobs.execute(url, f"alter role {role} in database \"{name}\" set transaction_timeout = '600000'")
    events.run()
    assert warned(caplog, "rows can be missed") == []
    jobs.execute(url, f'alter role {role} in database "{name}" set transaction_timeout = 0')
    events.run()
    assert "may last without end" in warned(caplog, "rows can be missed")[0]


def test_without_its_index_a_run_warns_with_the_command(url: str, caplog: pytest.LogCaptureFixture) -> None:
    jobs.execute(url, "create table events (id int primary key, at timestamptz not null)")
    jobs.run(job(), url)
    (line,) = warned(caplog, "not indexed")
    assert "gaffer prepare events --key id --cursor at --apply" in line
    done = ticking.invoke(url, "prepare", "events", "--key", "id", "--cursor", "at", "--apply")
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("create index concurrently on ")
    caplog.clear()
    jobs.run(job(), url)
    assert warned(caplog, "not indexed") == []
    done = ticking.invoke(url, "prepare", "events", "--key", "id", "--cursor", "at", "--changed")
    assert (done.exit_code, "give one of them" in done.stderr) == (1, True)


def test_the_page_is_one_range_of_the_index(events: Events) -> None:
    jobs.execute(events.url, "insert into events select n, %s from generate_series(1, 3000) n", NOON - 60 * MINUTE)
    events.run(job(batches=1))
    source = source_of(job(), NOON)
    with session(events.url) as connection:
        source.look(connection, NOON, events.position, None)
        page = source.page(connection, events.position, 10, stays=True)
        assert page is not None
        connection.execute("analyze events")
        connection.execute("set enable_seqscan = off")
        query = source.query(page) + psycopg.sql.SQL(" order by at, id")
        plan = connection.execute(psycopg.sql.SQL("explain {}").format(query)).fetchall()
    text = "\n".join(row[0] for row in plan)
    assert "Index" in text
    assert "Sort" not in text


def test_gaffer_watermark_shows_and_sets_a_cursor(events: Events) -> None:
    for key in range(1, 6):
        events.add(key, NOON - 60 * MINUTE + key * MINUTE)
    events.add(6, "-infinity")
    events.add(7, NOON)
    events.run()

    def said(*words: str) -> str:
        done = ticking.invoke(events.url, "watermark", *words)
        assert done.exit_code == 0, done.output
        return done.stdout

    shown = "by_cursor is just after row {} of 2027-03-01T11:0{}:00 (UTC); {} due after it"
    assert said("show", "by_cursor").strip() == shown.format(5, 5, "0 rows")
    assert "3 rows will be processed again" in said("set", "by_cursor", "after:2", "--yes")
    assert said("show", "by_cursor").strip() == shown.format(2, 2, "3 rows")
    assert events.run().items == 3
    assert "5 rows will be processed again" in said("set", "by_cursor", "beginning", "--yes")
    assert "5 rows will be skipped for good" in said("set", "by_cursor", "end", "--yes")
    assert events.run().items == 0
    assert events.keys == [1, 2, 3, 4, 5, 3, 4, 5]
    refused = ticking.invoke(events.url, "watermark", "set", "by_cursor", "after:7", "--yes")
    assert (refused.exit_code, "id = 7 is too new" in refused.stderr) == (1, True)
