"""What must hold of the job of `tests.support.jobs`, which copies rows of `source` into `target`, at any moment; beside
what holds of any job (`gaffer_dagster.testing.invariants`)."""

from __future__ import annotations

from typing import Any

from typing_extensions import LiteralString

from gaffer_dagster.testing import invariants
from gaffer_dagster.testing.invariants import watch
from tests.support import jobs

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
    **invariants.INVARIANTS,
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
    # Stricter than of any job, whose keys may be of any type.
    "the watermark only goes forward": """
        select * from gaffer_testing.event
         where what = 'advanced' and was is not null
           and ((was ->> 'xid')::xid8, (was ->> 'key')::bigint)
            >= ((is_now ->> 'xid')::xid8, (is_now ->> 'key')::bigint)
        """,
    "the fence grows with each commit": """
        select * from (select id, fence, lag(fence) over (order by source.gaffer_xid, id, fence) as fence_before
                         from target join source using (id)) as rows
         where fence < fence_before
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


def violations(url: str) -> dict[str, list[tuple[Any, ...]]]:
    """Every invariant that does not hold, with the rows that say so (the first ten), as of one moment."""
    return invariants.violations(url, INVARIANTS)


def check(url: str, *, complete: bool = False) -> None:
    """Raises `AssertionError` naming the invariants that do not hold. `complete`: nothing is left to do, either."""
    invariants.report(violations(url))
    if complete:
        left = jobs.query(url, "select id from source except select id from target")
        assert not left, f"{len(left)} rows were not done: {left[:10]}"


__all__ = ["check", "violations", "watch"]
