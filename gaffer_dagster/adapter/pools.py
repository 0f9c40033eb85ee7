"""The pool in which a job's runs wait for each other in Dagster. It is a comfort: whatever its limit, leases decide."""

from __future__ import annotations

from collections.abc import Mapping

import dagster as dg

_POOL = "gaffer/{job}"


def pool_of(job: str) -> str:
    return _POOL.format(job=job)


def make_room(instance: dg.DagsterInstance, slots: Mapping[str, int]) -> list[str]:
    """Lets as many runs of a job be at work as it has slots, where nothing but the instance's default limit is in the
    way. A limit that somebody has set is kept; what to do about one that is lower is returned.

    `slots`: of each job.
    """
    wanted = {pool_of(job): count for job, count in slots.items() if count > 1}
    storage = instance.event_log_storage
    if not wanted or not storage.supports_global_concurrency_limits:
        return []
    default = instance.global_op_concurrency_default_limit
    limits = {limit.name: limit for limit in storage.get_pool_limits()}
    low: list[str] = []
    for pool, count in wanted.items():
        limit = limits.get(pool)
        if limit is not None and not limit.from_default:
            if limit.limit < count:
                low.append(
                    f"pool {pool} lets {limit.limit} of {count} slots work at once; to let all: "
                    f"dagster instance concurrency set {pool} {count}"
                )
        elif default is not None and default < count:  # without a default a pool has no limit
            storage.set_concurrency_slots(pool, count)
    return low
