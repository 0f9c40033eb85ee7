"""Who keeps something from being due."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class HeldBy:
    """`who`: in words. `xid`: the number of its open transaction, which tells it from every other one (a backend's pid
    does not); None: unknown. `cure`: how to end it."""

    who: str
    xid: str | None = None
    cure: str | None = None


def held_by_from(stored: Mapping[str, Any] | HeldBy | None) -> HeldBy | None:
    """As the database has it."""
    return HeldBy(**stored) if isinstance(stored, Mapping) else stored
