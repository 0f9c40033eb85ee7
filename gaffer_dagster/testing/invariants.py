"""What must hold of gaffer's tables at any moment, whatever was done to the runs: queries that must return no row.

Some promises are about the order of things, which the tables do not keep; so `watch` has it noted, from before the
first run on. What a job is to have done is not among them: that is the user's own invariant.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from typing_extensions import LiteralString

from gaffer_dagster.errors import BadInputError
from gaffer_dagster.store import db
from gaffer_dagster.testing.database import refuse_unless_scratch

# Notes of what happened to the tables, each made in the transaction that did it. The lease's row is locked by whoever
# acquires and whoever commits a batch, so that the numbers of the notes of a slot are in the order of their commits.
_WATCH: LiteralString = """
create schema gaffer_testing;

create table gaffer_testing.event (
    id bigint generated always as identity primary key, xid xid8 not null default pg_current_xact_id(),
    what text not null, job text not null, slot integer, run_id bigint, fence bigint, lease_id uuid, outcome text,
    ended_at timestamptz, was jsonb, is_now jsonb
);

create function gaffer_testing.note() returns trigger
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    if tg_table_name = 'job_lease' then
        insert into gaffer_testing.event (what, job, slot, fence, lease_id)
        values ('acquired', new.job, new.slot, new.fence, new.lease_id);
    elsif tg_table_name = 'job_watermark' then
        insert into gaffer_testing.event (what, job, was, is_now)
        values ('advanced', new.job, old.position, new.position);
    elsif new.batches <> old.batches then
        insert into gaffer_testing.event (what, job, slot, run_id, fence)
        values ('committed', new.job, new.slot, new.id, new.fence);
    elsif (new.outcome, new.ended_at) is distinct from (old.outcome, old.ended_at) then
        insert into gaffer_testing.event (what, job, slot, run_id, outcome, ended_at)
        values (case old.outcome when 'running' then 'ended' else 'ended again' end,
                new.job, new.slot, new.id, new.outcome, new.ended_at);
    end if;
    return null;
end $$;

create trigger testing after update on gaffer.job_lease
    for each row when (new.fence <> old.fence) execute function gaffer_testing.note();
create trigger testing after update on gaffer.job_watermark
    for each row when (new.position is distinct from old.position) execute function gaffer_testing.note();
create trigger testing after update on gaffer.job_runs for each row execute function gaffer_testing.note();
"""

# Runs that had the lease and moved the watermark on, each with the one before it, where nobody set it in between.
_CHAIN: LiteralString = """
with run as (
    select id, job, watermark_from, watermark_to, started_at,
           lag(id) over by_job as before, lag(watermark_to) over by_job as stopped,
           lag(started_at) over by_job as since, lead(id) over by_job as next
      from gaffer.job_runs where fence is not null and redo is null
    window by_job as (partition by job order by id)
), moved as (
    select job, at from gaffer.operator_action where action in ('set watermark', 'adopt')
)
"""

INVARIANTS: Mapping[str, LiteralString] = {
    "the watermark only goes forward": """
        select moved.* from gaffer_testing.event as moved
         where what = 'advanced' and was is not null
           and exists (select from gaffer_testing.event as batch
                        where batch.what = 'committed' and (batch.job, batch.xid) = (moved.job, moved.xid))
           and ((was ->> 'xid')::xid8 > (is_now ->> 'xid')::xid8
                or (was ->> 'until')::timestamptz >= (is_now ->> 'until')::timestamptz)
        """,
    "a transaction commits one batch": """
        select job, xid, count(*) from gaffer_testing.event where what = 'committed' group by 1, 2 having count(*) > 1
        """,
    "each run goes on where the one before it stopped": _CHAIN
    + """
        select id, job, watermark_from, stopped from run
         where before is not null and watermark_from is distinct from stopped
           and not exists (select from moved where moved.job = run.job and at between since and started_at)
        """,
    "the newest run's watermark is the job's": _CHAIN
    + """
        select id, run.job, watermark_to, mark.position from run join gaffer.job_watermark as mark using (job)
         where next is null and watermark_to is distinct from mark.position
           and not exists (select from moved where moved.job = run.job and at >= started_at)
        """,
    "the fence grows with each acquisition": """
        select * from (select id, job, slot, fence, lag(fence) over (partition by job, slot order by id) as fence_before
                         from gaffer.job_runs where fence is not null) as runs
         where fence <= fence_before
        """,
    "a fence is handed out once": """
        select job, slot, fence, count(*) from gaffer_testing.event where what = 'acquired'
         group by 1, 2, 3 having count(*) > 1
        """,
    "nothing is committed under a fence once a later one was granted": """
        select batch.* from gaffer_testing.event as batch
         where what = 'committed'
           and exists (select from gaffer_testing.event as acquired
                        where acquired.what = 'acquired' and (acquired.job, acquired.slot) = (batch.job, batch.slot)
                          and acquired.fence > batch.fence and acquired.id < batch.id)
        """,
    "the lease has the highest fence": """
        select job, slot, fence from gaffer.job_lease as lease
         where fence < (select max(fence) from gaffer.job_runs as run
                         where (run.job, run.slot) = (lease.job, lease.slot))
        """,
    "at most one run of a slot is running": """
        select job, slot, count(*) from gaffer.job_runs where outcome = 'running' group by job, slot having count(*) > 1
        """,
    "a running run has the lease": """
        select run.id, run.job, run.fence from gaffer.job_runs as run
         where run.outcome = 'running'
           and not exists (select from gaffer.job_lease as lease
                            where (lease.job, lease.slot, lease.fence, lease.lease_id)
                                = (run.job, run.slot, run.fence, run.lease_id))
        """,
    "a taken lease has its running run": """
        select lease.job, lease.fence, lease.owner from gaffer.job_lease as lease
         where lease.lease_id is not null
           and not exists (select from gaffer.job_runs as run
                            where run.lease_id = lease.lease_id and run.outcome = 'running')
        """,
    "an ended run has ended once": """
        select run_id, outcome from gaffer_testing.event as event
         where (what = 'ended again'
                and (outcome <> 'lost_lease'
                     or not exists (select from gaffer_testing.event as first
                                     where first.run_id = event.run_id and first.what = 'ended'
                                       and first.outcome = 'abandoned' and first.ended_at = event.ended_at)))
            or (what = 'ended' and exists (select from gaffer_testing.event as first
                                            where first.run_id = event.run_id and first.what = 'ended'
                                              and first.id < event.id))
        """,
    "a run's batches are those that it committed": """
        select run.id, run.job, run.batches, count(event.id) from gaffer.job_runs as run
          left join gaffer_testing.event as event on event.run_id = run.id and what = 'committed'
         group by run.id having run.batches <> count(event.id)
        """,
}

AT_REST: Mapping[str, LiteralString] = {
    "nothing is running": "select id, job, fence, owner from gaffer.job_runs where outcome = 'running'",
    "no lease is taken": "select job, slot, fence, owner from gaffer.job_lease where lease_id is not null",
}


def watch(url: str) -> None:
    """From here on, notes what the invariants about order need, in a schema `gaffer_testing` of this database. Once,
    before the first run. Raises `BadInputError` for one that is no scratch database."""
    with db.connect(url, application_name="gaffer:testing") as connection:
        refuse_unless_scratch(connection, url)
        connection.execute(_WATCH)


def is_watched(url: str) -> bool:
    with db.connect(url, application_name="gaffer:testing") as connection:
        return connection.execute("select to_regclass('gaffer_testing.event')").fetchone() != (None,)


def violations(url: str, invariants: Mapping[str, LiteralString] = INVARIANTS) -> dict[str, list[tuple[Any, ...]]]:
    """Every invariant that does not hold, with the rows that say so (the first ten), as of one moment."""
    if not is_watched(url):
        raise BadInputError(
            "this database is not watched, so nobody knows the order of what happened in it; take the fixture "
            "gaffer_database, or call gaffer_dagster.testing.watch(url) before the first run"
        )
    with db.connect(url, application_name="gaffer:testing") as connection:
        connection.execute("begin isolation level repeatable read read only")
        found = {name: connection.execute(query).fetchmany(10) for name, query in invariants.items()}
        return {name: rows for name, rows in found.items() if rows}


def assert_invariants(url: str, *, at_rest: bool = False) -> None:
    """Raises `AssertionError` naming what does not hold of any job in this database: fences grow, nothing is committed
    under one after a later one was granted, runs go on where the one before stopped and end once, …

    At any moment, also while runs are at work; `at_rest`: none is, and none was left for dead, either. Raises
    `BadInputError` for a database that is not watched.
    """
    report(violations(url, {**INVARIANTS, **AT_REST} if at_rest else INVARIANTS))


def report(broken: Mapping[str, list[tuple[Any, ...]]]) -> None:
    """Raises `AssertionError` if anything is."""
    if broken:
        raise AssertionError(
            "\n".join(["invariants that do not hold:", *(f"  {name}: {rows}" for name, rows in broken.items())])
        )
