"""How much one run may do, as it is written and as it applies."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from gaffer_dagster.domain.bounds import Bounds, limits
from gaffer_dagster.errors import BadSpecError

HOUR, MINUTE = timedelta(hours=1), timedelta(minutes=1)


def test_what_is_left_out_is_what_the_docs_say() -> None:
    found = limits(Bounds(), timedelta(days=1), "job 'a'")
    assert (found.batch_rows, found.batches) == (1_000, 100)
    assert (found.timeout, found.batch_timeout) == (HOUR, 10 * MINUTE)


@pytest.mark.parametrize(
    ("interval", "timeout", "batch_timeout"),
    [
        (None, HOUR, 10 * MINUTE),
        (10 * MINUTE, 8 * MINUTE, 8 * MINUTE),
        (MINUTE, timedelta(seconds=48), timedelta(seconds=48)),
        (75 * MINUTE, HOUR, 10 * MINUTE),
        (70 * MINUTE, 56 * MINUTE, 10 * MINUTE),
    ],
)
def test_the_timeout_follows_the_interval(interval: Any, timeout: timedelta, batch_timeout: timedelta) -> None:
    found = limits(Bounds(), interval, "job 'a'")
    assert (found.timeout, found.batch_timeout) == (timeout, batch_timeout)


def test_what_is_given_applies() -> None:
    found = limits(Bounds(7, 3, "20m", "30s"), HOUR, "job 'a'")
    assert (found.batch_rows, found.batches) == (7, 3)
    assert (found.timeout, found.batch_timeout) == (20 * MINUTE, timedelta(seconds=30))
    assert Bounds(timeout="20m") == Bounds(timeout=20 * MINUTE)


def test_a_timeout_not_shorter_than_the_interval_is_refused_naming_both() -> None:
    with pytest.raises(BadSpecError, match=r"job 'a': bounds: timeout=1h is not shorter .* interval of 1h; .*shorten"):
        limits(Bounds(timeout="1h"), HOUR, "job 'a'")
    with pytest.raises(BadSpecError, match=r"timeout=1h30m .* interval of 20m"):
        limits(Bounds(timeout="90m"), 20 * MINUTE, "job 'a'")


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"batch_rows": 0}, "batch_rows=0"),
        ({"batch_rows": -1}, "batch_rows=-1"),
        ({"batch_rows": 1_000_001}, "batch_rows=1000001"),
        ({"batch_rows": 2.0}, "batch_rows=2.0"),
        ({"batch_rows": True}, "batch_rows=True"),
        ({"batches": "5"}, "batches='5'"),
        ({"timeout": "0s"}, "timeout='0s'"),
        ({"timeout": "25h"}, "timeout=1d1h"),
        ({"timeout": 60}, "timeout=60"),
        ({"batch_timeout": "x"}, "batch_timeout='x'"),
        ({"timeout": "1m", "batch_timeout": "2m"}, "batch_timeout=2m"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(given: dict[str, Any], named: str) -> None:
    with pytest.raises(BadSpecError) as raised:
        Bounds(**given)
    assert named in str(raised.value)


def test_a_batch_may_not_take_longer_than_the_run_that_follows_from_the_schedule() -> None:
    with pytest.raises(BadSpecError, match=r"job 'a'.*batch_timeout=5m is longer than the run's timeout of 48s"):
        limits(Bounds(batch_timeout="5m"), MINUTE, "job 'a'")


@pytest.mark.parametrize("value", ["1ms", "999ms", timedelta(microseconds=1), timedelta(milliseconds=999)])
def test_a_run_of_less_than_a_second_is_refused(value: Any) -> None:
    with pytest.raises(BadSpecError, match="timeout="):
        Bounds(timeout=value)
    assert Bounds(timeout="1s").timeout == timedelta(seconds=1)
