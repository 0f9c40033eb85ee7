"""How much one run may do. What is left over is reported as backlog and taken up by the next run."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from gaffer_dagster.domain.duration import as_duration, show_duration
from gaffer_dagster.errors import BadSpecError

SHORTEST_TIMEOUT = timedelta(seconds=1)
LONGEST_TIMEOUT = timedelta(days=1)
BATCH_ROWS = 1_000
# Rows that are claimed stay locked until their batch commits, and are done one by one when one of them fails.
CLAIMED_ROWS = 100


@dataclass(frozen=True, init=False)
class Bounds:
    """The bounds of a run.

    `batch_rows`: rows in one batch at most (1,000; of `PendingRows` 100). `batches`: batches in one run at most (100).
    `timeout`: how long a run may take from the moment it has the lease; must be shorter than the schedule's smallest
    regular interval; left out: 0.8 of that, at most an hour. `batch_timeout`: how long one batch may take, and how long
    the database waits for a silent client before it ends the batch's transaction; left out: the timeout, at most ten
    minutes.
    """

    batch_rows: int | None
    batches: int
    timeout: timedelta | None
    batch_timeout: timedelta | None

    def __init__(
        self,
        batch_rows: int | None = None,
        batches: int = 100,
        timeout: timedelta | str | None = None,
        batch_timeout: timedelta | str | None = None,
    ) -> None:
        for field, value, most in (("batch_rows", batch_rows, 1_000_000), ("batches", batches, 1_000_000)):
            is_left_out = value is None and field == "batch_rows"
            if not is_left_out and (type(value) is not int or not 1 <= value <= most):
                raise BadSpecError(f"bounds: {field}={value!r} must be a whole number from 1 to {most:,}")
        longest = as_duration(timeout, "bounds: timeout") if timeout is not None else None
        one = as_duration(batch_timeout, "bounds: batch_timeout") if batch_timeout is not None else None
        if longest is not None and longest < SHORTEST_TIMEOUT:
            raise BadSpecError(
                f"bounds: timeout={show_duration(longest)} is shorter than {show_duration(SHORTEST_TIMEOUT)}: no batch "
                "would begin; give it more"
            )
        if longest is not None and longest > LONGEST_TIMEOUT:
            raise BadSpecError(
                f"bounds: timeout={show_duration(longest)} is longer than {show_duration(LONGEST_TIMEOUT)}; "
                "let shorter runs share the work"
            )
        if longest is not None and one is not None and one > longest:
            raise BadSpecError(
                f"bounds: batch_timeout={show_duration(one)} is longer than timeout={show_duration(longest)}; "
                "make it shorter, or leave it out"
            )
        object.__setattr__(self, "batch_rows", batch_rows)
        object.__setattr__(self, "batches", batches)
        object.__setattr__(self, "timeout", longest)
        object.__setattr__(self, "batch_timeout", one)


@dataclass(frozen=True)
class Limits:
    """The bounds of a job as they apply, with everything that was left out filled in."""

    batch_rows: int
    batches: int
    timeout: timedelta
    batch_timeout: timedelta


def limits(bounds: Bounds, smallest_interval: timedelta | None, where: str, batch_rows: int = BATCH_ROWS) -> Limits:
    """What `bounds` means for a job woken every `smallest_interval`, with `batch_rows` where it says nothing of them.

    Raises `BadSpecError`.
    """
    timeout = bounds.timeout
    if timeout is None:
        timeout = timedelta(hours=1)
        if smallest_interval is not None:
            timeout = min(timeout, smallest_interval * 0.8)
    elif smallest_interval is not None and timeout >= smallest_interval:
        raise BadSpecError(
            f"{where}: bounds: timeout={show_duration(timeout)} is not shorter than the schedule's smallest "
            f"interval of {show_duration(smallest_interval)}; a run would meet the next one: shorten the timeout "
            "or wake less often"
        )
    batch_timeout = bounds.batch_timeout or min(timeout, timedelta(minutes=10))
    if batch_timeout > timeout:
        raise BadSpecError(
            f"{where}: bounds: batch_timeout={show_duration(batch_timeout)} is longer than the run's timeout of "
            f"{show_duration(timeout)}; make it shorter, or leave it out"
        )
    return Limits(bounds.batch_rows or batch_rows, bounds.batches, timeout, batch_timeout)
