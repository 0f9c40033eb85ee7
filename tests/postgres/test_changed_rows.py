"""New and changed rows (`gaffer prepare --changed`), and sources that are emptied, restored, or copied."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import psycopg
import pytest

from gaffer_dagster import local
from gaffer_dagster.domain.bounds import Bounds
from gaffer_dagster.domain.due import NewRows
from gaffer_dagster.domain.run import Outcome, RunRecord
from gaffer_dagster.domain.spec import JobSpec
from gaffer_dagster.engine.batch import Batch
from gaffer_dagster.errors import ForeignWatermarkError, NotPreparedError
from gaffer_dagster.store import db, prepare
from tests.support import jobs, protocol, ticking
from tests.support.tools import of_postgres


def job(table: str = "source", **bounds: Any) -> JobSpec:
    return JobSpec("copy_rows", NewRows(table, "id"), bounds=Bounds(**bounds))


class Seen:
    """What runs of a job over a table of changed rows are handed: key and value, in order."""

    def __init__(self, url: str, rows: int = 0) -> None:
        self.url = url
        jobs.make_source(url, rows, changed=True)
        self.rows: list[tuple[int, str]] = []

    def write(self, text: str, *params: Any) -> None:
        jobs.execute(self.url, text, *params)

    def run(self, spec: JobSpec | None = None) -> list[tuple[int, str]]:
        before = len(self.rows)

        def work(batch: Batch) -> None:
            self.rows.extend((row["id"], row["value"]) for row in batch.rows)

        assert jobs.run(spec or job(), self.url, work).outcome is Outcome.SUCCEEDED
        return self.rows[before:]


@pytest.fixture
def seen(url: str) -> Seen:
    made = Seen(url, 4)
    assert len(made.run()) == 4
    return made


def test_a_changed_row_comes_once_more_with_its_newest_values(seen: Seen) -> None:
    for value in "abc":
        seen.write("update source set value = %s where id = 2", value)
    assert seen.run() == [(2, "c")]
    assert seen.run() == []


def test_changes_come_in_the_order_of_their_writers(seen: Seen) -> None:
    """Not of their keys, nor of their commits: whoever wrote first comes first, and nobody is passed."""
    with psycopg.connect(seen.url) as slow:
        slow.execute("update source set value = 'slow' where id = 4")
        seen.write("update source set value = 'quick' where id = 1")
        seen.write("insert into source (value) values ('new')")
        assert seen.run() == []
        slow.commit()
    seen.write("update source set value = 'last' where id = 3")
    assert seen.run(job(batch_rows=1)) == [(4, "slow"), (1, "quick"), (5, "new"), (3, "last")]


def test_a_change_within_the_transaction_of_another_comes_with_it(seen: Seen) -> None:
    with psycopg.connect(seen.url) as writer:
        writer.execute("update source set value = 'one' where id = 3")
        writer.execute("savepoint part")
        writer.execute("update source set value = 'undone' where id = 1")
        writer.execute("rollback to savepoint part")
        writer.execute("update source set value = 'two' where id = 2")
    assert seen.run() == [(2, "two"), (3, "one")]


def test_a_change_that_comes_while_a_run_is_at_work_comes_again(seen: Seen) -> None:
    seen.write("update source set value = 'first'")

    def work(batch: Batch) -> None:
        for row in batch.rows:
            seen.rows.append((row["id"], row["value"]))
        if len(seen.rows) == 6:
            seen.write("update source set value = 'second' where id in (1, 4)")

    record: RunRecord = jobs.run(job(batch_rows=2), seen.url, work)
    # 1 was handed out before it changed, 4 was not; each comes once with its newest values, after this run's look.
    assert record.items == 3
    assert seen.rows[4:] == [(1, "first"), (2, "first"), (3, "first")]
    assert seen.run() == [(1, "second"), (4, "second")]


def test_a_row_that_the_job_itself_changes_comes_again(seen: Seen) -> None:
    """A change is a change: a job that writes what it reads is never done."""

    def work(batch: Batch) -> None:
        batch.execute("update source set value = 'mine' where id = 1")

    seen.write("update source set value = 'x' where id = 1")
    jobs.run(job(), seen.url, work)
    assert seen.run() == [(1, "mine")]


@pytest.mark.parametrize("emptied", ["delete from source", "truncate source", "truncate source restart identity"])
def test_a_source_that_was_emptied_goes_on(seen: Seen, emptied: str) -> None:
    before = jobs.query(seen.url, "select position from gaffer.job_watermark")
    seen.write("update source set value = 'gone'")
    seen.write(emptied)
    assert seen.run() == []
    assert jobs.query(seen.url, "select position from gaffer.job_watermark") == before
    seen.write("insert into source (value) values ('a'), ('b')")
    seen.write("update source set value = value || '!'")
    assert [value for _, value in seen.run()] == ["a!", "b!"]


def test_an_upsert_is_a_change(seen: Seen) -> None:
    seen.write("insert into source (id, value) values (2, 'up') on conflict (id) do update set value = excluded.value")
    seen.write("insert into source (id, value) values (3, 'no') on conflict (id) do nothing")
    assert seen.run() == [(2, "up")]


def test_what_was_new_rows_only_becomes_changed_ones_too(url: str) -> None:
    jobs.make_source(url, 3)
    assert jobs.run(job(), url).items == 3
    jobs.execute(url, "update source set value = 'unseen' where id = 1")
    done = ticking.invoke(url, "prepare", "source", "--key", "id", "--changed", "--apply")
    assert done.exit_code == 0, done.output
    jobs.execute(url, "update source set value = 'seen' where id = 2")
    assert jobs.run(job(), url).items == 1
    assert ticking.invoke(url, "prepare", "source", "--key", "id", "--new", "--apply").exit_code == 0
    jobs.execute(url, "update source set value = 'unseen' where id = 3")
    assert jobs.run(job(), url).items == 0


def test_a_trigger_that_saw_no_updates_would_be_caught(seen: Seen) -> None:
    """The broken variant: prepared for new rows only."""
    with db.connect(seen.url, application_name="test") as connection:
        prepare.apply(connection, prepare.statements(connection, "source", "id", changed=False))
    with pytest.raises(AssertionError):
        test_a_changed_row_comes_once_more_with_its_newest_values(seen)


# ── other databases, and other tables ────────────────────────────────────────────────────────────────────────────


BURN = """
    do $$ begin for n in 1..5000 loop
        begin create temporary table burnt (); raise division_by_zero; exception when division_by_zero then null; end;
    end loop; end $$
"""


def test_a_dump_restored_into_another_cluster_stops_the_job_loudly(seen: Seen, tmp_path: Path) -> None:
    """The old cluster has counted further than the new one."""
    seen.write(BURN)
    seen.write("insert into source (value) values ('far ahead')")
    assert len(seen.run()) == 1
    dumped = tmp_path / "dump"
    subprocess.run([of_postgres("pg_dump"), "-Fc", "-f", dumped, "-d", seen.url], check=True, timeout=120)
    elsewhere = local.start(tmp_path / "elsewhere", fsync=False)
    try:
        with db.connect(elsewhere, application_name="test") as connection:
            connection.execute(db.create_database("restored"))
        url = db.with_database(elsewhere, "restored")
        restore = [of_postgres("pg_restore"), "--no-owner", "--exit-on-error", "-d", url, dumped]
        subprocess.run(restore, check=True, timeout=120)
        jobs.add_rows(url, 3)
        before = jobs.query(url, "select position, cluster from gaffer.job_watermark")
        with pytest.raises(
            NotPreparedError, match=r"lacks in gaffer_xid numbers of this cluster.*gaffer prepare source"
        ):
            jobs.run(job(), url)
        with db.connect(url, application_name="test") as connection:
            with pytest.raises(NotPreparedError, match="gaffer watermark adopt --dry-run"):
                prepare.statements(connection, "source", "id", changed=None)
            assert protocol.outcomes(url)[-1] == "failed"
            assert jobs.query(url, "select position, cluster from gaffer.job_watermark") == before
            # From the beginning, where that was decided: what the dump held, and what has come since.
            assert ticking.invoke(url, "watermark", "set", "copy_rows", "beginning", "--yes").exit_code == 0
            prepare.apply(connection, prepare.statements(connection, "source", "id", changed=None))
        assert jobs.run(job(), url).items == 8
        jobs.execute(url, "update source set value = 'x' where id = 1")
        assert jobs.run(job(), url).items == 1
        assert jobs.run(job(), url).items == 0
    finally:
        local.stop(tmp_path / "elsewhere")


@pytest.mark.parametrize("changed", [False, True])
def test_rows_with_numbers_that_were_not_given_yet_are_refused_and_mended(url: str, changed: bool) -> None:
    """Else they would be due when the cluster has counted that far, which may be never."""
    jobs.make_source(url, 3, changed=changed)
    assert jobs.run(job(), url).items == 3
    jobs.execute(url, "alter table source disable trigger gaffer_stamp_xid")
    jobs.execute(url, "insert into source (id, value, gaffer_xid) values (7, 'copied', '900000000000')")
    jobs.execute(url, "alter table source enable always trigger gaffer_stamp_xid")
    with pytest.raises(NotPreparedError, match=r"run: gaffer prepare source --key id --apply"):
        jobs.run(job(), url)
    done = ticking.invoke(url, "prepare", "source", "--key", "id", "--apply")
    assert done.exit_code == 0, done.output
    with db.connect(url, application_name="test") as connection:
        assert prepare.statements(connection, "source", "id", changed=None) == []
    assert jobs.run(job(), url).items == 1
    assert jobs.query(url, "select tgenabled from pg_trigger where tgname = 'gaffer_stamp_xid'") == [("A",)]


def test_a_source_that_was_copied_to_another_table_is_another_source(seen: Seen) -> None:
    seen.write("create table other (like source including all)")
    seen.write("insert into other select * from source")
    with pytest.raises(NotPreparedError, match="lacks the trigger"):  # which `like` does not copy
        seen.run(job("other"))
    with db.connect(seen.url, application_name="test") as connection:
        prepare.apply(connection, prepare.statements(connection, "other", "id", changed=True))
    with pytest.raises(ForeignWatermarkError, match=r"not written for rows of public\.other\(id\)"):
        seen.run(job("other"))
    assert len(seen.rows) == 4
    spec = JobSpec("of_other", NewRows("other", "id"))
    assert jobs.run(spec, seen.url, lambda batch: None).items == 4
