"""One interval that was done before, once more; the watermark stays where it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from gaffer_dagster.domain.due import Window
from gaffer_dagster.domain.held import HeldBy
from gaffer_dagster.domain.spec import JobSpec
from gaffer_dagster.domain.watermark import Position, TimePosition
from gaffer_dagster.engine.sources import Page, Wait
from gaffer_dagster.errors import BadInputError
from gaffer_dagster.store import db, due_sql, operations
from gaffer_dagster.store.operations import Operator


def note(connection: db.Connection, spec: JobSpec, at: datetime, operator: Operator) -> None:
    """Who lets the interval that `at` is in be done once more; how it went is said by its run."""
    window = spec.interval_of(at)
    span = {"since": window.since.isoformat(), "until": window.until.isoformat()}
    operations.note(connection, spec.name, "redo", operator, span)


class RedoSource:
    """A source of one page. That it is not given twice is the run's business, which has one batch only."""

    cluster: str | None = None

    def __init__(self, spec: JobSpec, window: Window, first_seen_at: datetime) -> None:
        self._job = spec.name
        self._window = window
        self._first = spec.intervals.first(first_seen_at)

    def look(self, connection: db.Connection, at: datetime, position: Position | None, cluster: str | None) -> None:
        done = TimePosition.until_of(position)
        if done is None or done < self._window.until or self._window.since < self._first:
            raise BadInputError(
                f"the interval from {self._window.since.isoformat()} to {self._window.until.isoformat()} of job "
                f"{self._job!r} has not been done yet, so it cannot be done again; a run without --interval does what "
                "is due"
            )

    def page(
        self, connection: db.Connection, position: Position | None, limit: int, *, stays: bool = False
    ) -> Page | Wait | None:
        since, until = self._window.since.isoformat(), self._window.until.isoformat()
        return Page(position or {}, 1, window=self._window, key=f"{self._job}/{since}/{until}")

    def query(self, page: Page) -> db.Query:
        return due_sql.window(self._window)

    def warnings(self, connection: db.Connection) -> Sequence[Mapping[str, str]]:
        return ()

    def backlog(self, connection: db.Connection, position: Position | None) -> int:
        return 0

    def due_since(self, connection: db.Connection, position: Position | None) -> datetime | None:
        return None

    def held_back_by(self, connection: db.Connection) -> HeldBy | None:
        return None

    def key_for(self, row: dict[str, Any]) -> str:
        raise LookupError(f"the batches of job {self._job!r} have no rows of their own; use batch.key")
