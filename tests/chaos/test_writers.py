"""Many writers at once, slow ones, with savepoints and rollbacks: a job loses no row of theirs and does none twice,
while a cursor on the key, which reads the same table at the same time, loses some."""

from __future__ import annotations

import os
import random
import threading
import time

import psycopg

from gaffer_dagster.domain.bounds import Bounds
from gaffer_dagster.domain.due import NewRows
from gaffer_dagster.domain.run import Outcome
from gaffer_dagster.domain.spec import JobSpec
from gaffer_dagster.engine.sql_work import SqlWork
from tests.support import jobs
from tests.support.protocol import Actor

WRITERS = int(os.environ.get("GAFFER_CHAOS_WRITERS", "40"))
SECONDS = float(os.environ.get("GAFFER_CHAOS_SECONDS", "6"))
SEED = int(os.environ.get("GAFFER_CHAOS_SEED", "20261130"))
LOST = "select count(*)::int from source s where not exists (select from {} t where t.id = s.id)"


def write(url: str, number: int, stop: threading.Event) -> int:
    """Transactions of one writer until it is told to stop; how many of them were rolled back, in part or whole."""
    chance, undone = random.Random(SEED + number), 0
    with psycopg.connect(url, application_name=f"writer {number}") as connection:
        while not stop.is_set():
            for _ in range(chance.randint(1, 3)):
                connection.execute("savepoint part")
                connection.execute("insert into source (value) values ('x')")
                if chance.random() < 0.2:
                    connection.execute("rollback to savepoint part")
                    undone += 1
                time.sleep(chance.choice([0, 0.002, 0.02]))
            time.sleep(0.5 if chance.random() < 0.05 else 0)
            if chance.random() < 0.1:
                connection.rollback()
                undone += 1
            else:
                connection.commit()
            time.sleep(chance.random() * 0.1)
    return undone


def read_naively(url: str, stop: threading.Event) -> None:
    """The cursor that everybody writes first."""
    with jobs.connect(url) as connection:
        last = 0
        while not stop.is_set():
            connection.execute("insert into naive select id from source where id > %s", [last])
            found = connection.execute("select coalesce(max(id), 0) from naive").fetchone()
            last = found[0] if found else last
            time.sleep(0.01)


def test_no_row_is_lost_or_done_twice_beside_slow_writers_and_a_naive_cursor_loses_some(url: str) -> None:
    jobs.make_source(url)
    jobs.execute(url, "create table naive (id bigint)")
    jobs.execute(url, "create table by_sql (id bigint)")
    # By a function, and by SQL, whose page is found by one statement and read by the next.
    works = {
        JobSpec("copy_rows", NewRows("source", "id"), bounds=Bounds(batch_rows=50)): jobs.copy_rows,
        JobSpec("by_sql", NewRows("source", "id"), bounds=Bounds(batch_rows=50)): SqlWork(
            "insert into by_sql select id from due"
        ),
    }
    stop, written = threading.Event(), threading.Event()
    writers = [Actor(lambda number=number: write(url, number, stop)) for number in range(WRITERS)]
    naive = Actor(lambda: read_naively(url, written))
    began, batches = time.monotonic(), 0
    try:
        while time.monotonic() - began < SECONDS:
            for spec, work in works.items():
                record = jobs.run(spec, url, work)
                assert record.outcome in (Outcome.SUCCEEDED, Outcome.CAPPED)
                batches += record.batches
    finally:
        stop.set()
    undone = sum(writer.result() for writer in writers)
    time.sleep(0.1)
    written.set()
    naive.result()
    for spec, work in works.items():
        while (outcome := jobs.run(spec, url, work).outcome) is Outcome.CAPPED:
            pass
        assert outcome is Outcome.SUCCEEDED
    rows = jobs.query(url, "select count(*)::int from source")[0][0]
    lost = {table: jobs.query(url, LOST.format(table))[0][0] for table in ("target", "by_sql", "naive")}
    print(f"seed {SEED}, {WRITERS} writers, {SECONDS} s: {rows} rows, {undone} undone, {batches} batches, lost {lost}")
    assert (lost["target"], lost["by_sql"]) == (0, 0)
    for table in ("target", "by_sql"):
        assert jobs.query(url, f"select count(*)::int, count(distinct id)::int from {table}") == [(rows, rows)]
    assert lost["naive"] > 0
    assert undone > WRITERS
    assert batches > 4
