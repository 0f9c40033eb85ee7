"""`gaffer watermark`: where a job goes on is set by people, said beforehand, and never under a run."""

from __future__ import annotations

import contextlib
from datetime import datetime, timedelta
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner

from gaffer_dagster.cli import main
from gaffer_dagster.domain.due import PendingRows
from gaffer_dagster.domain.health import Mark
from gaffer_dagster.domain.job import JobRecord
from gaffer_dagster.domain.spec import JobSpec
from gaffer_dagster.engine import doctor
from gaffer_dagster.errors import ForeignWatermarkError, LeaseLostError, NotPreparedError, UnknownJobError
from gaffer_dagster.store import db, prepare
from gaffer_dagster.store import jobs as job_table
from tests.support import faults, jobs, protocol


def gaffer(url: str, *words: str) -> Any:
    return CliRunner().invoke(main, ["watermark", *words], env={"GAFFER_DATABASE_URL": url})


def said(url: str, *words: str) -> str:
    found = gaffer(url, *words)
    assert found.exit_code == 0, found.output
    return found.stdout


@pytest.fixture
def done(url: str) -> str:
    """A job that has done ten rows."""
    jobs.make_source(url, 10)
    faults.settle(url)
    assert jobs.run(jobs.spec(), url).items == 10
    return url


def test_it_says_what_it_would_do_and_does_nothing_in_a_dry_run(done: str) -> None:
    before = jobs.query(done, "select position from gaffer.job_watermark")
    assert "10 rows will be processed again" in said(done, "set", "copy_rows", "beginning", "--dry-run")
    assert "4 rows will be processed again" in said(done, "set", "copy_rows", "after:6", "--dry-run")
    assert "the same is due" in said(done, "set", "copy_rows", "end", "--dry-run")
    assert jobs.query(done, "select position from gaffer.job_watermark") == before


def test_a_job_goes_on_where_it_was_set_to(done: str) -> None:
    said(done, "set", "copy_rows", "after:6", "--yes", "--by", "ann", "--reason", "bad code")
    shown = said(done, "show", "copy_rows")
    assert "just after row 6 " in shown
    assert shown.endswith("; 4 rows due after it\n")
    assert jobs.run(jobs.spec(), done).items == 4
    assert jobs.query(done, "select id, count(*) from target group by id having count(*) > 1 order by id") == [
        (n, 2) for n in (7, 8, 9, 10)
    ]
    assert jobs.query(
        done,
        "select action, by, reason, details -> 'from' ->> 'key', details -> 'to' ->> 'key' from gaffer.operator_action",
    ) == [("set watermark", "ann", "bad code", "10", "6")]
    jobs.add_rows(done, 3)
    faults.settle(done)
    assert "3 rows will be skipped for good" in said(done, "set", "copy_rows", "end", "--yes")
    assert jobs.run(jobs.spec(), done).items == 0
    said(done, "set", "copy_rows", "beginning", "--yes")
    assert said(done, "show", "copy_rows") == "copy_rows is at the beginning; 13 rows due after it\n"
    assert jobs.run(jobs.spec(), done).items == 13


def test_nobody_can_commit_over_it(done: str) -> None:
    jobs.add_rows(done, 3)
    faults.settle(done)
    with contextlib.ExitStack() as stack:
        run = stack.enter_context(jobs.opened(jobs.spec(), done))
        batches = iter(run)
        jobs.copy_rows(next(batches))
        refused = gaffer(done, "set", "copy_rows", "beginning", "--yes")
        assert (refused.exit_code, "is at work" in refused.stderr) == (1, True)
        jobs.execute(done, "update gaffer.job_lease set lease_until = 'epoch'")  # paused for long
        said(done, "set", "copy_rows", "beginning", "--yes")
        with pytest.raises(LeaseLostError):
            stack.close()
    assert jobs.query(done, "select count(*) from target") == [(10,)]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["set", "nobody", "end"], "no job 'nobody'"),
        (["set", "copy_rows", "2027-01-01"], "beginning, end or after:KEY"),
        (["set", "copy_rows", "after:99"], "no row with id = 99"),
        (["set", "copy_rows", "after:x"], "position 'after:x' names no id of public.source"),
        (["set", "copy_rows", "end", "--by", " "], "--by"),
    ],
)
def test_what_cannot_be_meant_is_refused(done: str, words: list[str], told: str) -> None:
    found = gaffer(done, *words, "--yes")
    assert found.exit_code == 1
    assert told in found.stderr


def test_a_row_that_others_may_still_come_before_is_refused(done: str) -> None:
    with protocol.session(done) as writer:
        writer.execute("begin; insert into source (value) values ('late')")
        jobs.add_rows(done, 1)
        found = gaffer(done, "set", "copy_rows", "after:12", "--yes")
        assert (found.exit_code, "too new" in found.stderr) == (1, True)
        writer.execute("rollback")


def test_time_is_set_to_the_end_of_an_interval(url: str) -> None:
    start = (datetime.now().astimezone() - timedelta(days=5)).date()
    job = jobs.daily(start=start.isoformat())
    ran = jobs.run(job, url, lambda batch: None)
    assert ran.items >= 4
    third = (start + timedelta(days=3)).isoformat()
    again = said(url, "set", "daily", third, "--dry-run")
    assert f"{ran.items - 3} interval" in again
    assert "processed again" in again
    said(url, "set", "daily", third, "--yes")
    assert f"; {ran.items - 3} interval" in said(url, "show", "daily")
    assert jobs.run(job, url, lambda batch: None).items == ran.items - 3
    assert said(url, "show", "daily").endswith("; 0 intervals due after it\n")
    between = gaffer(url, "set", "daily", f"{third}T11:00", "--yes")
    assert (between.exit_code, f"give {third}T00:00:00" in between.stderr) == (1, True)
    assert "has not come yet" in gaffer(url, "set", "daily", "2999-01-01", "--yes").stderr


@pytest.mark.parametrize("changed", [False, True])
def test_rows_with_numbers_of_another_cluster_are_refused_until_they_are_mended(url: str, changed: bool) -> None:
    """A restored table: they would be due when the cluster has counted that far, which may be never."""
    jobs.make_source(url, 3, changed=changed)
    faults.settle(url)
    assert jobs.run(jobs.spec(), url).items == 3
    jobs.execute(url, "alter table source disable trigger gaffer_stamp_xid")
    jobs.execute(url, "insert into source (id, value, gaffer_xid) values (7, 'restored', '900000000000')")
    jobs.execute(url, "alter table source enable always trigger gaffer_stamp_xid")
    with pytest.raises(NotPreparedError, match="run: gaffer prepare source --key id --apply"):
        jobs.run(jobs.spec(), url)
    assert "gaffer prepare source" in gaffer(url, "set", "copy_rows", "beginning", "--yes").stderr
    assert "cannot be told: table public.source lacks" in said(url, "show", "copy_rows")
    with db.connect(url, application_name="test") as connection:
        prepare.apply(connection, prepare.statements(connection, "source", "id", changed=None))
        assert prepare.statements(connection, "source", "id", changed=None) == []
    faults.settle(url)
    assert jobs.run(jobs.spec(), url).items == 1
    assert jobs.query(url, "select tgenabled from pg_trigger where tgname = 'gaffer_stamp_xid'") == [("A",)]


# ── a watermark that is gone ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_job_whose_watermark_is_gone_does_nothing_twice_is_seen_and_is_set_again(done: str) -> None:
    with pytest.raises(psycopg.Error, match="is never removed: what its job has done"):
        jobs.execute(done, "delete from gaffer.job_watermark")
    jobs.execute(done, "alter table gaffer.job_watermark disable trigger user; delete from gaffer.job_watermark")
    # Neither a run nor a changed definition begins anew.
    for spec in (jobs.spec(), jobs.spec(batch_rows=7)):
        with pytest.raises(UnknownJobError, match="is gone, and with it how far it has got; gaffer status copy_rows"):
            jobs.run(spec, done)
    assert jobs.query(done, "select count(*) from target") == [(10,)]
    cure = "gaffer watermark set copy_rows POSITION"
    shown = CliRunner().invoke(main, ["status"], env={"GAFFER_DATABASE_URL": done}).stdout
    assert "failed" in shown
    assert cure in shown
    (check,) = [each for each in doctor.of_database(done) if each.name == "watermarks"]
    assert (check.mark, check.cure) == (Mark.WRONG, cure)
    assert (
        f"nowhere (its watermark is gone); what has been done is not known; say where it is to go on: {cure}"
        in said(done, "show", "copy_rows")
    )
    said(done, "adopt", "--yes")
    said(done, "set", "copy_rows", "after:6", "--yes")
    assert jobs.run(jobs.spec(), done).items == 4
    assert "gone" not in CliRunner().invoke(main, ["status"], env={"GAFFER_DATABASE_URL": done}).stdout


def test_rows_that_carry_their_state_need_no_watermark(url: str) -> None:
    jobs.execute(url, "create table queue (id int primary key, done_at timestamptz); insert into queue values (1), (2)")
    spec = JobSpec("claim", PendingRows("queue", "id", pending="done_at is null", done="done_at = now()"))
    jobs.run(spec, url, lambda batch: None)
    jobs.execute(url, "alter table gaffer.job_watermark disable trigger user; delete from gaffer.job_watermark")
    jobs.execute(url, "insert into queue values (3)")
    assert jobs.run(spec, url, lambda batch: None).items == 1
    assert "gone" not in CliRunner().invoke(main, ["status"], env={"GAFFER_DATABASE_URL": url}).stdout


# ── what other programs write ────────────────────────────────────────────────────────────────────────────────────────

DEEP = "(repeat('[', 3000) || repeat(']', 3000))::jsonb"
LONG = "to_jsonb(repeat('x', 5000000))"
LARGE = "jsonb_build_object('xid', -('1' || repeat('0', 5000))::numeric)"


def as_program(url: str, position: str) -> None:
    """One batch of a job that is no Python."""
    jobs.execute(
        url,
        f"""
        select gaffer.register_external('theirs');
        do $$
        declare
            v_id uuid := gen_random_uuid();
            v_batch uuid := gen_random_uuid();
            v_lease gaffer.lease_grant;
        begin
            v_lease := gaffer.acquire('theirs', 0, v_id);
            perform gaffer.begin_batch(v_batch);
            perform gaffer.commit_batch('theirs', 0, v_lease.fence, v_id, v_lease.run_id, v_batch, null, {position});
            perform gaffer.end_run('theirs', 0, v_lease.fence, v_id, v_lease.run_id);
        end $$
        """,
    )


@pytest.mark.parametrize("json", [DEEP, LONG, LARGE])
def test_no_job_can_be_kept_from_being_read_by_what_another_program_writes(done: str, json: str) -> None:
    spec = f"""'{{"schedule": null, "due": {{"kind": "external"}}, "bounds": {{"timeout": "1h"}}, "alerts": {{}}}}'
        || jsonb_build_object('more', {json})"""
    for text in (
        f"select gaffer.register('odd', {spec}, '', '', '', '1s', 1, now(), null, null, '{{}}', true)",
        f"select gaffer.set_watermark('copy_rows', position, {json}, null, 'me', 'why') from gaffer.job_watermark",
        f"select gaffer.adopt('copy_rows', position, {json}, 'me', 'why') from gaffer.job_watermark",
        f"select gaffer.note_operation('copy_rows', 'redo', 'me', 'why', jsonb_build_object('of', {json}))",
        f"update gaffer.job_runs set held_by = {json}",
        "insert into gaffer.alert (job, kind, severity, since_at, opened_at, details)"
        f" values ('copy_rows', 'late', 'error', now(), now(), {json})",
    ):
        with pytest.raises(psycopg.DataError, match=r"is JSON that not everybody could read.*let it be plainer"):
            jobs.execute(done, text)
    with pytest.raises(psycopg.DataError, match="the position is JSON that not everybody could read"):
        as_program(done, json)
    assert [each.name for each in read_all(done)] == ["copy_rows"]
    # And without that check the other job could not be read either.
    jobs.execute(done, "alter table gaffer.job_watermark drop constraint job_watermark_position_check")
    as_program(done, json)
    if json != LONG:
        with pytest.raises((RecursionError, ValueError)):
            read_all(done)


def read_all(url: str) -> list[JobRecord]:
    with protocol.session(url) as connection:
        return job_table.status(connection)


@pytest.mark.parametrize("position", ["[7]", '"x"', "7", '{"xid": 5, "key": "1"}', '{"until": "soon"}', '{"key": "1"}'])
def test_a_position_that_no_job_of_its_kind_has_is_said_refused_and_can_be_set(done: str, position: str) -> None:
    jobs.execute(done, "update gaffer.job_watermark set position = %s::jsonb", position)
    assert "copy_rows is where no job of this kind can be (" in said(done, "show", "copy_rows")
    with pytest.raises(ForeignWatermarkError, match="to go on: gaffer watermark set copy_rows POSITION"):
        jobs.run(jobs.spec(), done)
    for words in (["status"], ["status", "--json"], ["runs"], ["audit"], ["watermark", "show", "copy_rows", "--json"]):
        found = CliRunner().invoke(main, words, env={"GAFFER_DATABASE_URL": done})
        assert not found.exception or isinstance(found.exception, SystemExit), (words, found.exception)
    assert "what of it has been done is not known" in said(done, "set", "copy_rows", "after:6", "--yes")
    assert jobs.run(jobs.spec(), done).items == 4


def test_a_kind_that_is_no_word_is_refused(done: str) -> None:
    spec = '{"schedule": null, "due": {"kind": ["new_rows"]}, "bounds": {"timeout": "1h"}, "alerts": {}}'
    with pytest.raises(psycopg.DataError, match="lacks what each has"):
        jobs.execute(
            done,
            "select gaffer.register('odd', %s::jsonb, '', '', '', '1s', 1, now(), null, null, '{}', true)",
            spec,
        )
