"""How far a job has got: a position that is stored as JSON and compared as a whole.

A position is opaque to everything but the kind of due work that wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import cast

Position = Mapping[str, str]


@dataclass(frozen=True)
class RowPosition:
    """Behind the row with this key, written by the transaction with this number. Text, as Postgres writes it."""

    xid: str
    key: str

    def as_json(self) -> Position:
        return {"xid": self.xid, "key": self.key}

    @staticmethod
    def read(position: Position | None) -> RowPosition | None:
        return None if position is None else RowPosition(position["xid"], position["key"])


@dataclass(frozen=True)
class CursorPosition:
    """Behind the row with this key at this place of the cursor, as Postgres writes it: a time in UTC, or a date."""

    cursor: str
    key: str

    def as_json(self) -> Position:
        return {"cursor": self.cursor, "key": self.key}

    @staticmethod
    def read(position: Position | None) -> CursorPosition | None:
        return None if position is None else CursorPosition(position["cursor"], position["key"])


@dataclass(frozen=True)
class TimePosition:
    """Everything before `until` is done."""

    until: datetime

    def as_json(self) -> Position:
        return {"until": self.until.astimezone(timezone.utc).isoformat()}

    @staticmethod
    def read(position: Position | None) -> TimePosition | None:
        until = TimePosition.until_of(position)
        return None if until is None else TimePosition(until)

    @staticmethod
    def until_of(position: Position | None) -> datetime | None:
        """How far, where the position is one in time."""
        try:
            until = datetime.fromisoformat(position["until"]) if position and "until" in position else None
        except (TypeError, ValueError):
            return None
        return until if until is not None and until.tzinfo is not None else None


def is_readable(position: object) -> bool:
    """One of these wrote it, and no other program."""
    if not isinstance(position, dict):
        return position is None
    texts = {name for name, value in cast("dict[str, object]", position).items() if isinstance(value, str)}
    if "until" in texts:
        return TimePosition.until_of(cast(Position, position)) is not None
    return {"xid", "key"} <= texts or {"cursor", "key"} <= texts
