"""The pool in which a job's runs wait for each other in Dagster. It is a comfort: whatever its limit, leases decide."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import dagster as dg

from gaffer_dagster.errors import BadInputError

_POOL = "gaffer/{job}"
SETTINGS = "concurrency:\n  pools:\n    granularity: run"
"""What a dagster.yaml must say for limits to be safe."""


def pool_of(job: str) -> str:
    return _POOL.format(job=job)


@dataclass(frozen=True)
class Limits:
    """What the instance lets be at work: each pool's `own` limit, and that of one which has none (None: any number)."""

    own: Mapping[str, int]
    default: int | None

    def of(self, pool: str) -> int | None:
        return self.own.get(pool, self.default)


def limits(instance: dg.DagsterInstance) -> Limits:
    """What the queue writes down of the default is none that somebody has set."""
    found = instance.event_log_storage.get_pool_limits()
    own = {limit.name: limit.limit for limit in found if not limit.from_default}
    return Limits(own, instance.global_op_concurrency_default_limit)


def granularity(instance: dg.DagsterInstance) -> str | None:
    """`run`, `op`, or None where nobody has said (which is `op`)."""
    said = instance.get_concurrency_config().pool_config.pool_granularity
    return None if said is None else said.value


@dataclass(frozen=True)
class Change:
    """Of the limit of a job's pool. None: it has none of its own."""

    job: str
    before: int | None
    after: int | None

    @property
    def pool(self) -> str:
        return pool_of(self.job)


def changes(instance: dg.DagsterInstance, slots: Mapping[str, int], retired: Collection[str]) -> list[Change]:
    """What `change` has to do so that as many runs of a job are at work as it has slots, and the others wait; and that
    nothing is left of retired jobs.

    Raises `BadInputError` where a limit would do harm: with granularity `op` the place of a run that was killed is
    never given back, and no later run would begin.
    """
    if not instance.event_log_storage.supports_global_concurrency_limits:
        raise BadInputError("the storage of this Dagster instance has no pools; run: dagster instance migrate")
    said = granularity(instance)
    if said != "run":
        raise BadInputError(
            f"the pools of this Dagster instance are of granularity {said or 'op (the default)'}, where the place of a "
            "run that was killed is never given back, and its job would wait for ever; nothing was changed. Add to "
            f"its dagster.yaml, and restart the daemon:\n{SETTINGS}"
        )
    now = limits(instance)
    wanted = [Change(job, now.of(pool_of(job)), count) for job, count in sorted(slots.items())]
    gone = [Change(job, now.own.get(pool_of(job)), None) for job in sorted(set(retired) - set(slots))]
    return [each for each in (*wanted, *gone) if each.before != each.after]


def change(instance: dg.DagsterInstance, wanted: Iterable[Change]) -> None:
    for each in wanted:
        if each.after is None:
            instance.event_log_storage.delete_concurrency_limit(each.pool)
        else:
            instance.event_log_storage.set_concurrency_slots(each.pool, each.after)


def make_room(instance: dg.DagsterInstance, slots: Mapping[str, int]) -> list[str]:
    """Lets as many runs of a job be at work as it has slots, where nothing but the instance's default limit is in the
    way. A limit that somebody has set is kept; what to do about one that is lower is returned.

    `slots`: of each job.
    """
    wanted = {job: count for job, count in slots.items() if count > 1}
    if not wanted or not instance.event_log_storage.supports_global_concurrency_limits:
        return []
    now = limits(instance)
    low: list[str] = []
    for job, count in wanted.items():
        pool = pool_of(job)
        limit = now.of(pool)
        if limit is None or limit >= count:  # without a default a pool has no limit
            continue
        if pool in now.own:
            low.append(
                f"pool {pool} lets {limit} of {count} slots work at once; to let all: "
                f"dagster instance concurrency set {pool} {count}"
            )
        else:
            change(instance, [Change(job, limit, count)])
    return low
