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
    """As the database has it, whoever wrote it: a newer version may say more of it, and what does not say who it is
    keeps nobody from reading about the run."""
    if not isinstance(stored, Mapping):
        return stored if isinstance(stored, HeldBy) else None
    who, xid, cure = (value if isinstance(value := stored.get(name), str) else None for name in ("who", "xid", "cure"))
    return None if who is None else HeldBy(who, xid, cure)
