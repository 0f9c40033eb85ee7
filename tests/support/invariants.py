"""What must hold of a database at any moment, whatever was done to the engines: queries that must return no row.

They are about the job of `tests.support.jobs`, which copies rows of `source` into `target`. `watch` must have been
called before the first run: some promises are about the order of things, which the tables do not keep.
"""

from __future__ import annotations

from typing import Any

from typing_extensions import LiteralString

from tests.support import jobs

# Notes of what happened to the tables, each made in the transaction that did it. The lease's row is locked by whoever
# acquires and whoever commits a batch, so that the numbers of the notes are in the order of their commits.
_AUDIT = """
create schema audit;

create table audit.event (
    id bigint generated always as identity primary key, what text not null,
    run_id bigint, fence bigint, lease_id uuid, outcome text, ended_at timestamptz, was jsonb, is_now jsonb
);

create function audit.note() returns trigger language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
    if tg_table_name = 'job_lease' then
        insert into audit.event (what, fence, lease_id) values ('acquired', new.fence, new.lease_id);
    elsif tg_table_name = 'job_watermark' then
        insert into audit.event (what, was, is_now) values ('advanced', old.position, new.position);
    elsif tg_op = 'UPDATE' and new.batches <> old.batches then
        insert into audit.event (what, run_id, fence) values ('committed', new.id, new.fence);
    elsif tg_op = 'UPDATE' and (new.outcome, new.ended_at) is distinct from (old.outcome, old.ended_at) then
        insert into audit.event (what, run_id, outcome, ended_at) values (
            case old.outcome when 'running' then 'ended' else 'ended again' end, new.id, new.outcome, new.ended_at);
    end if;
    return null;
end $$;

create trigger audit after update on gaffer.job_lease
    for each row when (new.fence <> old.fence) execute function audit.note();
create trigger audit after update on gaffer.job_watermark
    for each row when (new.position is distinct from old.position) execute function audit.note();
create trigger audit after update on gaffer.job_runs for each row execute function audit.note();
"""

# A run that superseded its own fence has applied rows under each of the fences since the run before it.
_BY_RUN: LiteralString = """
with owned as (
    select id, items, batches, fence, coalesce(lag(fence) over (order by id), 0) as fence_before
      from gaffer.job_runs where fence is not null
), by_run as (
    select owned.id, owned.items, owned.batches, count(target.id) as applied,
           count(distinct (target.fence, target.batch)) filter (where target.id is not null) as applied_batches
      from owned
      left join target on target.fence > owned.fence_before and target.fence <= owned.fence
     group by owned.id, owned.items, owned.batches
)
"""

_POSITION: LiteralString = """
with reached as (
    select (position ->> 'xid')::xid8 as xid, (position ->> 'key')::bigint as key from gaffer.job_watermark
)
"""

INVARIANTS: dict[str, LiteralString] = {
    "nothing is applied twice": "select id, count(*), array_agg(fence) from target group by id having count(*) > 1",
    "nothing up to the watermark is missing": _POSITION
    + """
        select source.id, source.gaffer_xid from source, reached
         where (source.gaffer_xid, source.id) <= (reached.xid, reached.key)
           and not exists (select 1 from target where target.id = source.id)
        """,
    "nothing beyond the watermark is applied": _POSITION
    + """
        select target.* from target left join source using (id), reached
         where ((source.gaffer_xid, source.id) <= (reached.xid, reached.key)) is not true
        """,
    "the watermark is what was applied last": _POSITION
    + """
        select reached.* from reached
         where (reached.xid, reached.key) is distinct from (
               select (source.gaffer_xid, source.id) from source join target using (id)
                order by source.gaffer_xid desc, source.id desc limit 1)
           and (reached.xid is not null or exists (select 1 from target))
        """,
    "the watermark only goes forward": """
        select * from audit.event
         where what = 'advanced' and was is not null
           and ((was ->> 'xid')::xid8, (was ->> 'key')::bigint)
            >= ((is_now ->> 'xid')::xid8, (is_now ->> 'key')::bigint)
        """,
    "each run goes on where the one before it stopped": """
        select * from (select id, watermark_from, lag(watermark_to) over (order by id) as stopped,
                              lag(id) over (order by id) as previous
                         from gaffer.job_runs where fence is not null) as chain
         where previous is not null and watermark_from is distinct from stopped
        """,
    "the fence grows with each acquisition": """
        select * from (select id, fence, lag(fence) over (order by id) as fence_before
                         from gaffer.job_runs where fence is not null) as runs
         where fence <= fence_before
        """,
    "the fence grows with each commit": """
        select * from (select id, fence, lag(fence) over (order by source.gaffer_xid, id) as fence_before
                         from target join source using (id)) as rows
         where fence < fence_before
        """,
    "a fence is handed out once": """
        select fence, count(*) from audit.event where what = 'acquired' group by fence having count(*) > 1
        """,
    "nothing is committed under a fence once a later one was granted": """
        select committed.* from audit.event as committed
         where what = 'committed'
           and exists (select 1 from audit.event as acquired
                        where acquired.what = 'acquired' and acquired.fence > committed.fence
                          and acquired.id < committed.id)
        """,
    "the lease has the highest fence": """
        select fence from gaffer.job_lease where fence < (select max(fence) from gaffer.job_runs)
        """,
    "at most one run of a slot is running": """
        select job, slot, count(*) from gaffer.job_runs where outcome = 'running' group by job, slot having count(*) > 1
        """,
    "a running run has the lease": """
        select run.id, run.fence from gaffer.job_runs as run
         where run.outcome = 'running'
           and not exists (select 1 from gaffer.job_lease as lease
                            where (lease.job, lease.slot, lease.fence, lease.lease_id)
                                = (run.job, run.slot, run.fence, run.lease_id))
        """,
    "a taken lease has its running run": """
        select lease.fence, lease.owner from gaffer.job_lease as lease
         where lease.lease_id is not null
           and not exists (select 1 from gaffer.job_runs as run
                            where run.lease_id = lease.lease_id and run.outcome = 'running')
        """,
    "an ended run has ended once": """
        select run_id, outcome from audit.event as event
         where (what = 'ended again'
                and (outcome <> 'lost_lease'
                     or not exists (select 1 from audit.event as first
                                     where first.run_id = event.run_id and first.what = 'ended'
                                       and first.outcome = 'abandoned' and first.ended_at = event.ended_at)))
            or (what = 'ended' and exists (select 1 from audit.event as first
                                            where first.run_id = event.run_id and first.what = 'ended'
                                              and first.id < event.id))
        """,
    "a run's items are the rows that it applied": _BY_RUN + "select * from by_run where items <> applied",
    "a run's batches are those that it applied": _BY_RUN + "select * from by_run where batches <> applied_batches",
    "the items of all runs are the rows of all batches": """
        select items, applied from (select coalesce(sum(items), 0) as items from gaffer.job_runs) as counted,
                                   (select count(*) as applied from target) as found
         where items <> applied
        """,
    "every row was applied by a run": """
        select * from target where fence > (select max(fence) from gaffer.job_runs)
                                or not exists (select 1 from gaffer.job_runs where fence >= target.fence)
        """,
}


def watch(url: str) -> None:
    """From here on, notes what the invariants about order need."""
    jobs.execute(url, _AUDIT)


def violations(url: str) -> dict[str, list[tuple[Any, ...]]]:
    """Every invariant that does not hold, with the rows that say so (the first ten), as of one moment."""
    with jobs.connect(url) as connection:
        connection.execute("begin isolation level repeatable read read only")
        found = {name: connection.execute(query).fetchmany(10) for name, query in INVARIANTS.items()}
        return {name: rows for name, rows in found.items() if rows}


def check(url: str, *, complete: bool = False) -> None:
    """Raises `AssertionError` naming the invariants that do not hold. `complete`: nothing is left to do, either."""
    broken = violations(url)
    assert not broken, "\n".join(
        ["invariants that do not hold:", *(f"  {name}: {rows}" for name, rows in broken.items())]
    )
    if complete:
        left = jobs.query(url, "select id from source except select id from target")
        assert not left, f"{len(left)} rows were not done: {left[:10]}"
