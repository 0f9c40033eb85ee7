"""How far a job has got: a position that is stored as JSON and compared as a whole.

A position is opaque to everything but the kind of due work that wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone

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
        return None if position is None else TimePosition(datetime.fromisoformat(position["until"]))

    @staticmethod
    def until_of(position: Position | None) -> datetime | None:
        """How far, where the position is one in time."""
        return datetime.fromisoformat(position["until"]) if position and "until" in position else None
