"""How the rows of one batch went, where rows carry their own state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta


@dataclass(frozen=True)
class Failed:
    """A row whose work failed. `charged`: the attempt was committed before the work on it began."""

    key: str
    error: str
    sqlstate: str | None
    charged: bool = False


@dataclass(frozen=True)
class Settled:
    """`done`, `failed`: keys of rows that were worked on. `forget`: rows that are no longer there, or not pending.

    A row that has failed `attempts` times is parked; before that it waits for `backoff`, doubled with each attempt.
    """

    attempts: int
    backoff: timedelta
    done: Sequence[str] = ()
    failed: Sequence[Failed] = ()
    forget: Sequence[str] = ()
