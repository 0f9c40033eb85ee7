"""What is due, page by page, for each kind of due work.

A source is asked to `look` once when the run begins (and again when a wake-up came meanwhile): that fixes the upper
bound of the run, by the database. After that it gives one `Page` after another, read in the batch's own transaction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, Protocol

from typing_extensions import assert_never

from gaffer_dagster.domain.due import EachInterval, Elapsed, NewRows, PendingRows, Window
from gaffer_dagster.domain.item import Failed
from gaffer_dagster.domain.lease import LARGEST_SKEW
from gaffer_dagster.domain.spec import JobSpec
from gaffer_dagster.domain.watermark import Position, RowPosition, TimePosition
from gaffer_dagster.errors import ForeignWatermarkError
from gaffer_dagster.store import db, horizon, new_rows, pending_rows, prepare

MOST_SAVEPOINTS = 64
"""Rows of a batch that are done one by one, each in a savepoint: the server remembers so many of a transaction without
a cost for everybody."""
_DIED = "the process that worked on it ended without a word, in each of its last attempts ({} in all)"


@dataclass(frozen=True)
class Page:
    """What one batch is about. `items` is what the run counts; `key` names the batch, where its bounds repeat."""

    position: Position
    items: int
    rows: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    window: Window | None = None
    key: str | None = None
    claimed: Claimed | None = None

    def first(self, rows: int) -> Page:
        """The page with its first rows only. Those that are left are claimed again later."""
        if len(self.rows) <= rows or self.claimed is None:
            return self
        return replace(
            self,
            position=self.position
            if self.claimed.one_by_one
            else {"after": self.claimed.keys[rows - 1], "turn": self.position["turn"]},
            items=rows,
            rows=self.rows[:rows],
            claimed=replace(self.claimed, keys=self.claimed.keys[:rows]),
        )


@dataclass(frozen=True)
class Claimed:
    """The rows of a page carry their own state. `keys`: theirs, in order. `one_by_one`: some of them failed before.
    `alone`: it is one row, which may end the process that works on it; an attempt at it is committed first. `failed`:
    others, of which that is known without any work. `forget`: others that need none any more."""

    keys: list[str]
    one_by_one: bool = False
    alone: bool = False
    failed: Sequence[Failed] = ()
    forget: Sequence[str] = ()


@dataclass(frozen=True)
class Wait:
    """Something will be due within this run, but not yet."""

    at_least: timedelta
    why: str
    held_by: str | None = None
    """Whose open transaction it waits for, where it does."""


class Source(Protocol):
    cluster: str | None
    """For positions in xids: the cluster that counts them."""

    def look(self, connection: db.Connection, at: datetime, position: Position | None, cluster: str | None) -> None:
        """Fixes what is due in this run: nothing that becomes due after `at`."""
        ...

    def page(self, connection: db.Connection, position: Position | None, limit: int) -> Page | Wait | None:
        """What comes after `position`; None: nothing is due any more."""
        ...

    def backlog(self, connection: db.Connection, position: Position | None) -> int:
        """What is due after `position`."""
        ...

    def due_since(self, position: Position | None) -> datetime | None:
        """Since when the oldest of what comes after `position` has been due, where that can be told."""
        ...

    def held_back_by(self, connection: db.Connection) -> str | None:
        """Who keeps from being due what is there already, if somebody does."""
        ...

    def key_for(self, row: dict[str, Any]) -> str:
        """Names a row of a page, the same in every attempt."""
        ...


def source_of(spec: JobSpec, first_seen_at: datetime) -> Source:
    due = spec.due
    if isinstance(due, NewRows):
        return _NewRowsSource(spec.name, due)
    if isinstance(due, PendingRows):
        return PendingSource(spec.name, due)
    if isinstance(due, (EachInterval, Elapsed)):
        return _TimeSource(spec, first_seen_at)
    assert_never(due)


def _other_watermark(job: str, position: Position, wanted: str) -> ForeignWatermarkError:
    return ForeignWatermarkError(
        f"the watermark of job {job!r} ({dict(position)}) was not written for {wanted}: what the job is due for was "
        "changed. Nothing was read, since it would be done twice or not at all; give the changed job its own name, "
        f"or say where it is to go on: gaffer watermark set {job} POSITION"
    )


class _NewRowsSource:
    cluster: str | None = None
    _table: prepare.Source
    _horizon: str
    _of: str

    def __init__(self, job: str, due: NewRows) -> None:
        self._job = job
        self._due = due

    def look(self, connection: db.Connection, at: datetime, position: Position | None, cluster: str | None) -> None:
        self._table = prepare.source(connection, self._due.table, self._due.key)
        self._of = f"{self._table.table}({self._due.key})"
        if position is not None and position.get("of") != self._of:
            raise _other_watermark(self._job, position, f"rows of {self._of}")
        self._horizon, self.cluster = new_rows.horizon(connection, self._job, RowPosition.read(position), cluster)

    def page(self, connection: db.Connection, position: Position | None, limit: int) -> Page | Wait | None:
        found = new_rows.page(
            connection, self._table, self._due.where, RowPosition.read(position), self._horizon, limit
        )
        if found is None:
            return None
        # With what it counts in: on another table the same numbers would skip rows in silence.
        return Page({**found.position.as_json(), "of": self._of}, len(found.rows), rows=found.rows)

    def backlog(self, connection: db.Connection, position: Position | None) -> int:
        return new_rows.backlog(connection, self._table, self._due.where, RowPosition.read(position), self._horizon)

    def due_since(self, position: Position | None) -> datetime | None:
        return None  # rows carry no time

    def held_back_by(self, connection: db.Connection) -> str | None:
        held = new_rows.is_held_back(connection, self._table, self._horizon)
        return horizon.holder(connection) if held else None

    def key_for(self, row: dict[str, Any]) -> str:
        return f"{self._job}/{row[self._due.key]}"


class PendingSource:
    """Rows that carry their own state. Its position is this run's own, and is not stored: `after` which key the rows
    that never failed go on (`end`: there are no more), and whose `turn` it is: of `new` ones, or of those that are
    tried `again`."""

    cluster: str | None = None
    table: pending_rows.Source
    _until: datetime

    def __init__(self, job: str, due: PendingRows) -> None:
        self.due = due
        self.alone = 0
        """How many of the rows that come next are to be worked on alone: one of them may end the process."""
        self._job = job

    def look(self, connection: db.Connection, at: datetime, position: Position | None, cluster: str | None) -> None:
        self.table = pending_rows.source(connection, self.due)
        self._until = at

    def page(self, connection: db.Connection, position: Position | None, limit: int) -> Page | Wait | None:
        if position is None:
            position = {"turn": "again"}
            gone = pending_rows.gone(connection, self.table, pending_rows.given_up(connection, self._job))
            if gone:
                return Page(position, 0, claimed=Claimed([], forget=gone))
        turns = (self._again, self._new) if position["turn"] == "again" else (self._new, self._again)
        for turn in turns:
            page = turn(connection, position, limit)
            if page is not None:
                return page
        return None

    def backlog(self, connection: db.Connection, position: Position | None) -> int:
        return pending_rows.backlog(connection, self.table, self._job, self._until)

    def due_since(self, position: Position | None) -> datetime | None:
        return None  # rows carry no time

    def held_back_by(self, connection: db.Connection) -> str | None:
        return None  # see locked_elsewhere

    def locked_elsewhere(self, connection: db.Connection) -> int:
        """How many rows are due that somebody else has locked, who is no slot of this job."""
        return pending_rows.locked_elsewhere(connection, self.table, self._job, self._until)

    def key_for(self, row: dict[str, Any]) -> str:
        return f"{self._job}/{row[self.due.key]}"

    def _new(self, connection: db.Connection, position: Position, limit: int) -> Page | None:
        if "end" in position:
            return None
        most = 1 if self.alone else limit
        rows = pending_rows.claim_new(connection, self.table, self._job, position.get("after"), most)
        if not rows:
            return None
        then = {"after": rows[-1].key, "turn": "again", **({"end": "yes"} if len(rows) < most else {})}
        return self._page(then, rows, alone=self.alone > 0)

    def _again(self, connection: db.Connection, position: Position, limit: int) -> Page | None:
        items = {item.key: item for item in pending_rows.to_retry(connection, self._job, self._until, limit)}
        if not items:
            return None
        rows = {row.key: row for row in pending_rows.claim(connection, self.table, list(items))}
        forget = pending_rows.gone(connection, self.table, [key for key in items if key not in rows])
        # What is neither claimed nor gone is in somebody else's hands.
        spent = [key for key in rows if items[key].attempts >= self.due.attempts]
        failed = [Failed(key, _DIED.format(items[key].attempts), None, charged=True) for key in spent]
        suspects = [key for key in rows if key not in spent and (self.alone or items[key].died)]
        then = {**position, "turn": "new"}
        tame = [row for key, row in rows.items() if key not in spent and key not in suspects]
        if tame or forget or failed:
            return self._page(then, tame, one_by_one=True, failed=failed, forget=forget).first(MOST_SAVEPOINTS)
        return self._page(then, [rows[suspects[0]]], alone=True) if suspects else None

    def _page(
        self,
        position: Position,
        rows: Sequence[pending_rows.Row],
        *,
        one_by_one: bool = False,
        alone: bool = False,
        failed: Sequence[Failed] = (),
        forget: Sequence[str] = (),
    ) -> Page:
        readable = [row for row in rows if row.error is None]
        unreadable = [Failed(row.key, row.error, None) for row in rows if row.error is not None]
        return Page(
            position,
            len(readable),
            rows=[row.values for row in readable],
            claimed=Claimed([row.key for row in readable], one_by_one, alone, [*failed, *unreadable], forget),
        )


class _TimeSource:
    """Of both kinds that are due by time; `spec.intervals` is what they differ in."""

    cluster: str | None = None
    _bound: datetime
    _mark: str

    def __init__(self, spec: JobSpec, first_seen_at: datetime) -> None:
        self._job = spec.name
        self._intervals = spec.intervals
        self._first = self._intervals.first(first_seen_at)
        # A bound that is not settled within the run's time belongs to the next tick.
        self._waits = self._intervals.settle < spec.limits.timeout

    def look(self, connection: db.Connection, at: datetime, position: Position | None, cluster: str | None) -> None:
        if position is not None and "until" not in position:
            raise _other_watermark(self._job, position, "intervals of time")
        done = TimePosition.until_of(position)
        if done is not None and done - at > LARGEST_SKEW:
            raise ForeignWatermarkError(
                f"the watermark of job {self._job!r} is at {done.isoformat()}, and it is {at.isoformat()}: a clock ran "
                "ahead for a while, and nothing would be due until then. Say where it is to go on "
                f"(gaffer watermark set {self._job} {at.isoformat(timespec='seconds')}), and clean up what it did for "
                "times that had not come"
            )
        self._bound = at if self._waits else at - self._intervals.settle
        self._mark = horizon.mark(connection)

    def page(self, connection: db.Connection, position: Position | None, limit: int) -> Page | Wait | None:
        window = self._intervals.after(self._since(position), self._bound)
        if window is None:
            return None
        unsettled = window.until + self._intervals.settle - horizon.now(connection)
        if unsettled > timedelta():
            return Wait(unsettled, f"the time up to {window.until.isoformat()} settles")
        if not horizon.is_behind(connection, self._mark):
            held_by = horizon.holder(connection)
            return Wait(timedelta(), f"a transaction from before is still open: {held_by}", held_by)
        key = f"{self._job}/{window.since.isoformat()}/{window.until.isoformat()}" if self._intervals.repeat else None
        return Page(TimePosition(window.until).as_json(), 1, window=window, key=key)

    def backlog(self, connection: db.Connection, position: Position | None) -> int:
        return self._intervals.left(self._since(position), self._bound)

    def due_since(self, position: Position | None) -> datetime | None:
        window = self._intervals.after(self._since(position), self._bound)
        return None if window is None else window.until + self._intervals.settle

    def held_back_by(self, connection: db.Connection) -> str | None:
        return None  # a run waits for it, and says so

    def key_for(self, row: dict[str, Any]) -> str:
        cure = "use batch.key" if self._intervals.repeat else "give Elapsed a slice, whose batches have a batch.key"
        raise LookupError(f"the batches of job {self._job!r} have no rows of their own; {cure}")

    def _since(self, position: Position | None) -> datetime:
        done = TimePosition.read(position)
        return self._first if done is None else done.until
