"""What other programs write through the SQL functions keeps nobody from looking, whatever shape it has."""

from __future__ import annotations

from datetime import datetime, timezone

import psycopg
import pytest

from gaffer_dagster.domain.due import MOST_SLOTS
from gaffer_dagster.domain.held import HeldBy, held_by_from
from gaffer_dagster.store import history
from tests.postgres.test_prune import add_idle, pruned, said
from tests.support import jobs, protocol, ticking, variants

RUN = """
    create function {name}(p_job text, p_to jsonb, p_held_by jsonb default null, p_error text default null) returns void
    language plpgsql as $$
    declare
        v_id uuid := gen_random_uuid();
        v gaffer.lease_grant;
    begin
        perform gaffer.register_external(p_job);
        v := gaffer.acquire(p_job, 0, v_id);
        perform gaffer.begin_batch(v_id);
        perform gaffer.commit_batch(p_job, 0, v.fence, v_id, v.run_id, v_id, v.position, p_to);
        perform gaffer.end_run(p_job, 0, v.fence, v_id, v.run_id, p_held_by => p_held_by, p_error => p_error);
    end $$
"""


@pytest.fixture
def program(url: str) -> str:
    """A database in which a job's whole line is one function, `a_run`."""
    jobs.execute(url, RUN.format(name="a_run"))
    return url


ODD = [
    "1", '"x"', "[]", "{}", "null", '{"who": 1}', '{"who": null}', '{"who": {"a": 1}, "xid": [1]}',
    '{"who": "x", "xid": 5}', '{"who": "x", "cure": []}',
]  # fmt: skip


@pytest.mark.parametrize("held_by", ODD)
def test_who_holds_something_back_is_said_in_the_shape_that_is_read(program: str, held_by: str) -> None:
    with pytest.raises(psycopg.DataError, match="is an object with a text who, and xid and cure that are texts"):
        jobs.execute(program, "select a_run('job', '1', %s::jsonb)", held_by)
    # Where nobody looks it is read all the same, as nobody where it does not say who.
    variants.replace(program, "end_run", {"if not gaffer.is_holder(p_held_by) then": "if false then"})
    with pytest.raises(psycopg.errors.CheckViolation):
        jobs.execute(program, "select a_run('job', '1', %s::jsonb)", held_by)
    variants.replace(program, "is_holder", {"select p_json is null\n": "select true\n"})
    jobs.execute(program, "select a_run('job', '1', %s::jsonb)", held_by)
    assert said(program)


def test_what_a_newer_version_says_of_a_holder_is_read_as_far_as_it_is_known(program: str) -> None:
    jobs.execute(program, """select a_run('job', '1', '{"who": "ann", "xid": "5", "until": "noon"}')""")
    (job,) = [each for each in said(program) if each.get("name") == "job" and "held_by" in each]
    assert job["held_by"] == {"who": "ann", "xid": "5", "cure": None}


def test_what_does_not_say_who_it_is_is_nobody() -> None:
    assert held_by_from({"who": "x", "later": [datetime.now(timezone.utc)]}) == HeldBy("x")
    for odd in ({}, {"who": 1}, {"who": None}):
        assert held_by_from(odd) is None


@pytest.mark.parametrize(
    "position",
    ['{"until": 12345}', '{"until": "2027-01x"}', '{"until": []}', '{"until": "infinity"}', '{"until": "now"}',
     '{"until": "2027-02-31T00:00:00+00:00"}', '{"until": "0000-01-01T00:00:00Z"}', '[1]', '"x"'],
)  # fmt: skip
def test_a_position_of_another_program_keeps_nobody_from_pruning(program: str, position: str) -> None:
    jobs.execute(program, "select a_run('job', %s::jsonb)", position)
    jobs.execute(program, "update gaffer.job_runs set started_at = now() - interval '9 days', ended_at = started_at")
    jobs.execute(program, "update gaffer.job_runs set ended_at = now() - interval '9 days'")
    jobs.execute(program, "select a_run('job', '1')")
    add_idle(program, 120, 9)
    with protocol.session(program) as connection:
        assert history.of_job(connection, "job", datetime(2020, 1, 1, tzinfo=timezone.utc))
    assert "21 runs" in pruned(program, "--older-than", "1d")


def test_how_far_a_job_has_got_in_time_is_read_as_before(program: str) -> None:
    read = "select gaffer.until_of(%s::jsonb)"
    assert jobs.query(program, read, '{"until": "2027-01-02T03:04:05.000006+00:00"}') == [
        (datetime(2027, 1, 2, 3, 4, 5, 6, timezone.utc),)
    ]
    assert jobs.query(program, read, None) == [(None,)]


def durability(url: str) -> str:
    """With which a batch commits that has lowered it for itself."""
    with jobs.connect(url) as connection, connection.transaction():
        connection.execute("select gaffer.register_external('job')")
        connection.execute("set local synchronous_commit = off")
        connection.execute("select a_run('job', '1')")
        ((found,),) = connection.execute("show synchronous_commit").fetchall()
    return found


def test_a_batch_that_lowers_durability_commits_with_it_all_the_same(program: str) -> None:
    lowered = "perform gaffer.commit_batch("
    text = RUN.replace(lowered, f"perform set_config('synchronous_commit', 'off', true); {lowered}")
    text = text.replace("perform gaffer.end_run(", "return; perform gaffer.end_run(")
    jobs.execute(program, text.format(name="a_run").replace("create function", "create or replace function"))
    assert durability(program) == "on"
    variants.replace(
        program, "commit_batch", {"perform gaffer.raise_durability();  -- the batch's own code may have lowered it": ""}
    )
    protocol.expire(program, "job")
    assert durability(program) == "off"


@pytest.mark.parametrize("slots", [0, -1, 65, 1_000_000, None])
def test_a_job_has_no_more_slots_than_a_definition_may_ask_for(program: str, slots: int | None) -> None:
    assert MOST_SLOTS == 64
    jobs.execute(program, "select gaffer.register_external('job')")
    with pytest.raises(psycopg.DataError, match="slots: from 1 to 64 are allowed"):
        jobs.execute(
            program,
            "select gaffer.register('odd', spec, '', '', '', '1s', %s, now(), null, null, '{}', true) from gaffer.job",
            slots,
        )


def test_the_watermark_of_another_program_is_shown_as_it_is(program: str) -> None:
    jobs.execute(program, """select a_run('job', '{"until": 12345}')""")
    done = ticking.invoke(program, "watermark", "show", "job")
    assert "12345" in done.output
    assert "its rows carry their state" not in done.output


def test_an_error_without_end_is_cut_and_a_name_without_end_is_refused(url: str) -> None:
    """What a run says of itself is read by everybody."""
    jobs.make_source(url)
    with protocol.session(url) as connection:
        job = jobs.spec()
        protocol.register(connection, job)
        attempt = protocol.acquire(connection, job)
        long = "x" * 5_000_000
        connection.execute(
            "select gaffer.end_run(%s, 0, %s, %s, %s, 'failed', p_error => %s)",
            [job.name, attempt.lease.fence, attempt.lease.lease_id, attempt.lease.run_id, long],
        )
        assert jobs.query(url, "select length(error) from gaffer.job_runs") == [(20_000,)]
        for given in ("p_owner", "p_spec_hash", "p_zone_data"):
            with pytest.raises(psycopg.errors.CheckViolation):
                connection.execute(
                    f"select gaffer.acquire(%s, 0, gen_random_uuid(), p_trigger => 'command', {given} => %s)",
                    [job.name, long],
                )
