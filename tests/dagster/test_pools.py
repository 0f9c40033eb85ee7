"""How many runs of a job Dagster lets be at work at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest

from gaffer_dagster.adapter.pools import make_room


@pytest.fixture(params=[1, None], ids=["by default one", "without a default"])
def instance(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    pools = {"granularity": "run", **({} if request.param is None else {"default_limit": request.param})}
    with dg.instance_for_test(overrides={"concurrency": {"pools": pools}}, temp_dir=str(tmp_path)) as made:
        yield made


def limits(instance: dg.DagsterInstance) -> dict[str, int]:
    return {limit.name: limit.limit for limit in instance.event_log_storage.get_pool_limits()}


def test_there_is_room_for_each_slot(instance: dg.DagsterInstance) -> None:
    by_default = instance.global_op_concurrency_default_limit
    assert make_room(instance, {"one": 1, "four": 4}) == []
    # Where nothing limits a pool, none is begun: there is room for more than the slots.
    assert limits(instance) == ({} if by_default is None else {"gaffer/four": 4})


def test_a_default_that_the_queue_wrote_down_is_none_that_was_set(instance: dg.DagsterInstance) -> None:
    by_default = instance.global_op_concurrency_default_limit
    instance.event_log_storage.initialize_concurrency_limit_to_default("gaffer/four")
    assert limits(instance) == ({} if by_default is None else {"gaffer/four": 1})
    assert make_room(instance, {"four": 4}) == []
    assert limits(instance) == ({} if by_default is None else {"gaffer/four": 4})


@pytest.mark.parametrize(("limit", "said"), [(0, True), (2, True), (4, False), (9, False)])
def test_a_limit_that_was_set_is_kept_and_what_to_do_is_said(
    instance: dg.DagsterInstance, limit: int, said: bool
) -> None:
    instance.event_log_storage.set_concurrency_slots("gaffer/four", limit)
    cure = "dagster instance concurrency set gaffer/four 4"
    expected = [f"pool gaffer/four lets {limit} of 4 slots work at once; to let all: {cure}"]
    assert make_room(instance, {"four": 4}) == (expected if said else [])
    assert limits(instance) == {"gaffer/four": limit}
