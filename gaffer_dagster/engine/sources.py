"""What is due, page by page, for each kind of due work.

A source is asked to `look` once when the run begins (and again when a wake-up came meanwhile): that fixes the upper
bound of the run, by the database. After that it gives one `Page` after another, read in the batch's own transaction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, Protocol

from typing_extensions import assert_never

from gaffer_dagster.domain.amount import shown
from gaffer_dagster.domain.due import EachInterval, Elapsed, NewRows, PendingRows, Window, prepare_command
from gaffer_dagster.domain.duration import show_duration
from gaffer_dagster.domain.held import HeldBy
from gaffer_dagster.domain.item import Failed
from gaffer_dagster.domain.lease import LARGEST_SKEW
from gaffer_dagster.domain.spec import JobSpec
from gaffer_dagster.domain.watermark import CursorPosition, Position, RowPosition, TimePosition, is_readable
from gaffer_dagster.errors import ForeignWatermarkError
from gaffer_dagster.store import db, due_sql, horizon, new_rows, pending_rows, prepare, tables

MOST_SAVEPOINTS = 64
"""Rows of a batch that are done one by one, each in a savepoint: the server remembers so many of a transaction without
a cost for everybody."""
_DIED = (
    "nothing was heard of its last attempts ({} in all): the process that worked on it ended without a word, or lost "
    "the database or its lease"
)


@dataclass(frozen=True)
class Page:
    """What one batch is about. `items` is what the run counts; `key` names the batch, where its bounds repeat.
    `since`: the position that it comes after, where it is of rows."""

    position: Position
    items: int
    rows: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    window: Window | None = None
    key: str | None = None
    claimed: Claimed | None = None
    since: Position | None = None

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
    `alone`: it is one row, which may end the process that works on it; an attempt at it is committed first. `item`:
    what was known of that row before, where it had failed. `failed`: others, of which that is known without any work.
    `forget`: others that need none any more."""

    keys: list[str]
    one_by_one: bool = False
    alone: bool = False
    failed: Sequence[Failed] = ()
    forget: Sequence[str] = ()
    item: pending_rows.Item | None = None


@dataclass(frozen=True)
class Wait:
    """Something will be due within this run, but not yet."""

    at_least: timedelta
    why: str
    held_by: HeldBy | None = None
    """Whose open transaction it waits for, where it does."""


class Source(Protocol):
    cluster: str | None
    """For positions in xids: the cluster that counts them."""

    def look(self, connection: db.Connection, at: datetime, position: Position | None, cluster: str | None) -> None:
        """Fixes what is due in this run: nothing that becomes due after `at`."""
        ...

    def page(
        self, connection: db.Connection, position: Position | None, limit: int, *, stays: bool = False
    ) -> Page | Wait | None:
        """What comes after `position`; None: nothing is due any more. `stays`: the rows are not wanted, for `query`
        reads them where they are."""
        ...

    def query(self, page: Page) -> db.Query:
        """The query for what a page is about: its rows, or one row of `since` and `until`."""
        ...

    def backlog(self, connection: db.Connection, position: Position | None) -> int:
        """What is due after `position`."""
        ...

    def due_since(self, connection: db.Connection, position: Position | None) -> datetime | None:
        """Since when the oldest of what comes after `position` has been due, where that can be told."""
        ...

    def warnings(self, connection: db.Connection) -> Sequence[Mapping[str, str]]:
        """What people should know of what is read, once a run: `event` says what, the others say more."""
        ...

    def held_back_by(self, connection: db.Connection) -> HeldBy | None:
        """Who keeps from being due what is there already, if somebody does."""
        ...

    def key_for(self, row: dict[str, Any]) -> str:
        """Names a row of a page, the same in every attempt."""
        ...


def source_of(spec: JobSpec, first_seen_at: datetime) -> Source:
    due = spec.due
    if isinstance(due, NewRows):
        return _RowsSource(spec.name, due) if due.settle is None else _CursorSource(spec.name, due, due.settle)
    if isinstance(due, PendingRows):
        return PendingSource(spec.name, due)
    if isinstance(due, (EachInterval, Elapsed)):
        return _TimeSource(spec, first_seen_at)
    assert_never(due)


def _other_watermark(job: str, position: Position, wanted: str) -> ForeignWatermarkError:
    return ForeignWatermarkError(
        f"the watermark of job {job!r} ({shown(position)}) was not written for {wanted}: what the job is due for was "
        "changed. Nothing was read, since it would be done twice or not at all; give the changed job its own name, "
        f"or say where it is to go on: gaffer watermark set {job} POSITION"
    )


def _hidden_rows(connection: db.Connection, table: tables.Table) -> list[Mapping[str, str]]:
    cure = tables.row_security_cure(connection, table)
    if cure is None:
        return []
    why = f"row-level security of {table} decides which rows {connection.info.user} sees; the others are passed over"
    return [{"event": "rows can be hidden", "why": why, "cure": cure}]


class _NewRowsSource:
    """Of both kinds of order that `NewRows` can be read in."""

    cluster: str | None = None
    _table: prepare.Source
    _horizon: str
    _kind: type[RowPosition | CursorPosition]

    def __init__(self, job: str, due: NewRows) -> None:
        self._job = job
        self._due = due

    def page(
        self, connection: db.Connection, position: Position | None, limit: int, *, stays: bool = False
    ) -> Page | Wait | None:
        read = new_rows.end_of_page if stays else new_rows.page
        found = read(connection, self._table, self._due.where, self._kind.read(position), self._horizon, limit)
        if found is None:
            return None
        return Page({**found.position.as_json(), "of": self._table.of}, found.count, rows=found.rows, since=position)

    def query(self, page: Page) -> db.Query:
        since, until = self._kind.read(page.since), self._kind.read(page.position)
        assert until is not None  # noqa: S101 — what was read has an end
        return new_rows.between(self._table, self._due.where, since, until, self._horizon)

    def backlog(self, connection: db.Connection, position: Position | None) -> int:
        return new_rows.backlog(connection, self._table, self._due.where, self._kind.read(position), self._horizon)

    def key_for(self, row: dict[str, Any]) -> str:
        return f"{self._job}/{row[self._due.key]}"

    def _check(self, position: Position | None) -> None:
        if position is not None and not (is_readable(position) and position.get("of") == self._table.of):
            raise _other_watermark(self._job, position, f"rows of {self._table.of}")


class _RowsSource(_NewRowsSource):
    """In commit order."""

    cluster: str | None = None
    _kind = RowPosition

    def look(self, connection: db.Connection, at: datetime, position: Position | None, cluster: str | None) -> None:
        self._table = prepare.source(connection, self._due.table, self._due.key)
        self._check(position)
        self._horizon, self.cluster = new_rows.horizon(connection, self._job, RowPosition.read(position), cluster)

    def due_since(self, connection: db.Connection, position: Position | None) -> datetime | None:
        return None  # rows carry no time

    def held_back_by(self, connection: db.Connection) -> HeldBy | None:
        held = new_rows.is_held_back(connection, self._table, self._due.where, self._horizon)
        return horizon.holder(connection, self._horizon) if held else None

    def warnings(self, connection: db.Connection) -> Sequence[Mapping[str, str]]:
        return _hidden_rows(connection, self._table.table)


class _CursorSource(_NewRowsSource):
    """In the order of a cursor of the table's own, behind a lag."""

    _kind = CursorPosition

    def __init__(self, job: str, due: NewRows, settle: timedelta) -> None:
        super().__init__(job, due)
        self._settle = settle

    def look(self, connection: db.Connection, at: datetime, position: Position | None, cluster: str | None) -> None:
        cursor = self._due.cursor or ""
        self._table = prepare.cursor_source(connection, self._due.table, self._due.key, cursor)
        self._check(position)
        self._horizon = new_rows.lag(self._table, at, self._settle)

    def due_since(self, connection: db.Connection, position: Position | None) -> datetime | None:
        after = CursorPosition.read(position)
        return new_rows.due_since(connection, self._table, self._due.where, after, self._horizon, self._settle)

    def held_back_by(self, connection: db.Connection) -> HeldBy | None:
        return None  # a lag waits for nobody

    def warnings(self, connection: db.Connection) -> Sequence[Mapping[str, str]]:
        due, found = self._due, _hidden_rows(connection, self._table.table)
        writer = new_rows.longest_writer(connection, self._table)
        if writer is not None and (writer.lives is None or writer.lives > self._settle):
            settle = show_duration(self._settle)
            lives = "without end" if writer.lives is None else f"for {show_duration(writer.lives)}"
            found.append(
                {
                    "event": "rows can be missed",
                    "why": f"a transaction of {writer.role} may last {lives}, and what it commits to {due.table} more "
                    f"than settle={settle} after it began is never seen",
                    "cure": f"alter role {writer.role} set transaction_timeout = "
                    f"'{self._settle // timedelta(milliseconds=1)}ms' (PostgreSQL 17 and later), or leave cursor= out "
                    f"and run: {prepare_command(due.table, due.key, '--apply')}",
                }
            )
        if not prepare.is_indexed(connection, self._table):
            cure = prepare_command(due.table, due.key, "--cursor", due.cursor or "", "--apply")
            found.append({"event": "not indexed", "table": due.table, "cure": cure})
        count, key = new_rows.never_due(connection, self._table, due.where)
        if count:
            why = f"{due.cursor} is infinite in {count:,} of them, such as {due.key} = {key}"
            found.append({"event": "rows are never due", "why": why, "cure": "mend them"})
        return found


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

    def page(
        self, connection: db.Connection, position: Position | None, limit: int, *, stays: bool = False
    ) -> Page | Wait | None:
        if stays:
            self.table = replace(self.table, columns=())
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

    def query(self, page: Page) -> db.Query:
        assert page.claimed is not None  # noqa: S101 — this source's pages are
        return pending_rows.claimed(self.table, page.claimed.keys)

    def backlog(self, connection: db.Connection, position: Position | None) -> int:
        return pending_rows.backlog(connection, self.table, self._job, self._until)

    def due_since(self, connection: db.Connection, position: Position | None) -> datetime | None:
        return None  # rows carry no time

    def warnings(self, connection: db.Connection) -> Sequence[Mapping[str, str]]:
        found = _hidden_rows(connection, self.table.table)
        if not pending_rows.is_indexed(connection, self.due):
            found.append({"event": "not indexed", "table": self.due.table, "cure": pending_rows.cure(self.due)})
        return found

    def held_back_by(self, connection: db.Connection) -> HeldBy | None:
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
        failed = [
            Failed(key, items[key].error or _DIED.format(items[key].attempts), items[key].sqlstate, charged=True)
            for key in spent
        ]
        suspects = [key for key in rows if key not in spent and (self.alone or items[key].error is None)]
        then = {**position, "turn": "new"}
        tame = [row for key, row in rows.items() if key not in spent and key not in suspects]
        if tame or forget or failed:
            return self._page(then, tame, one_by_one=True, failed=failed, forget=forget).first(MOST_SAVEPOINTS)
        return self._page(then, [rows[suspects[0]]], alone=True, item=items[suspects[0]]) if suspects else None

    def _page(
        self,
        position: Position,
        rows: Sequence[pending_rows.Row],
        *,
        one_by_one: bool = False,
        alone: bool = False,
        failed: Sequence[Failed] = (),
        forget: Sequence[str] = (),
        item: pending_rows.Item | None = None,
    ) -> Page:
        readable = [row for row in rows if row.error is None]
        unreadable = [Failed(row.key, row.error, None) for row in rows if row.error is not None]
        return Page(
            position,
            len(readable),
            rows=[row.values for row in readable],
            claimed=Claimed([row.key for row in readable], one_by_one, alone, [*failed, *unreadable], forget, item),
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
        if position is not None and TimePosition.until_of(position) is None:
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

    def page(
        self, connection: db.Connection, position: Position | None, limit: int, *, stays: bool = False
    ) -> Page | Wait | None:
        window = self._intervals.after(self._since(position), self._bound)
        if window is None:
            return None
        unsettled = window.until + self._intervals.settle - horizon.now(connection)
        if unsettled > timedelta():
            return Wait(unsettled, f"the time up to {window.until.isoformat()} settles")
        oldest = horizon.open_before(connection, self._mark)
        if oldest is not None:
            held_by = horizon.holder(connection, oldest)
            return Wait(timedelta(), f"a transaction from before is still open: {held_by.who}", held_by)
        key = f"{self._job}/{window.since.isoformat()}/{window.until.isoformat()}" if self._intervals.repeat else None
        return Page(TimePosition(window.until).as_json(), 1, window=window, key=key)

    def query(self, page: Page) -> db.Query:
        assert page.window is not None  # noqa: S101 — as above
        return due_sql.window(page.window)

    def warnings(self, connection: db.Connection) -> Sequence[Mapping[str, str]]:
        return ()

    def backlog(self, connection: db.Connection, position: Position | None) -> int:
        return self._intervals.left(self._since(position), self._bound)

    def due_since(self, connection: db.Connection, position: Position | None) -> datetime | None:
        window = self._intervals.after(self._since(position), self._bound)
        return None if window is None else window.until + self._intervals.settle

    def held_back_by(self, connection: db.Connection) -> HeldBy | None:
        return None  # a run waits for it, and says so

    def key_for(self, row: dict[str, Any]) -> str:
        cure = "use batch.key" if self._intervals.repeat else "give Elapsed a slice, whose batches have a batch.key"
        raise LookupError(f"the batches of job {self._job!r} have no rows of their own; {cure}")

    def _since(self, position: Position | None) -> datetime:
        done = TimePosition.read(position)
        return self._first if done is None else done.until
