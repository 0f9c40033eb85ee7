"""The transaction of one batch: marked and bounded at its begin, verified in the message that commits it.

The user's statements go through `BatchCursor`, which sends one statement at a time (the server refuses two in one
message of the extended protocol) and refuses, before it is sent, what would end the transaction or outlive it. Its
connection is a `BatchConnection`, on which nothing else sends.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Any, NoReturn
from uuid import UUID, uuid4
from weakref import WeakMethod

import psycopg
from psycopg import sql
from psycopg.rows import TupleRow, tuple_row
from psycopg.types.json import Jsonb

from gaffer_dagster.domain.item import Settled
from gaffer_dagster.domain.lease import Lease
from gaffer_dagster.domain.watermark import Position
from gaffer_dagster.errors import BatchEndedError
from gaffer_dagster.store import db, pending_rows


def begin(connection: db.Connection, batch: UUID, timeout: timedelta) -> None:
    connection.execute(db.BEGIN + "select gaffer.begin_batch(%s, %s)", [batch, timeout])


def commit(
    connection: db.Connection,
    lease: Lease,
    batch: UUID,
    *,
    since: Position | None,
    until: Position | None,
    cluster: str | None,
    items: int,
    duration: timedelta,
    settled: Settled | None = None,
    table: pending_rows.Source | None = None,
) -> datetime:
    """Verifies, advances, counts, renews and commits, in one message. Returns until when the lease now lasts.

    `settled`: how the rows of `table` went, where they carry their own state. Raises `LeaseLostError`,
    `DeadlinePassedError`, `BatchEndedError` or `BadSpecError`: nothing was committed. Any other error of a connection
    leaves it unknown whether the batch was committed.
    """
    values = [
        lease.job, lease.slot, lease.fence, lease.lease_id, lease.run_id, batch,
        None if since is None else Jsonb(since), None if until is None else Jsonb(until), cluster, items, duration,
        None if settled is None else Jsonb(_as_json(settled)),
    ]  # fmt: skip
    arguments: list[sql.Composable] = [sql.Literal(value) for value in values]
    marked: sql.Composable = sql.SQL("")
    if table is not None and settled is not None and settled.done:
        marked = sql.SQL("{}; ").format(pending_rows.mark_done(table, settled.done))
        arguments.append(pending_rows.still_pending(table, settled.done))
    # The function may have gone on as another role.
    message = sql.SQL("set local role to default; {}select gaffer.commit_batch({}); commit").format(
        marked, sql.SQL(", ").join(arguments)
    )
    with connection.cursor(row_factory=tuple_row) as cursor, db.refusals():
        cursor.execute(message)
        return db.committed(cursor)[0]


def _as_json(settled: Settled) -> dict[str, Any]:
    return {
        "attempts": settled.attempts,
        "backoff": settled.backoff.total_seconds(),
        "forget": [*settled.done, *settled.forget],
        "failed": [asdict(each) for each in settled.failed],
    }


def lock(connection: db.Connection, lease: Lease) -> str | None:
    """Takes the job's advisory lock for this transaction. Who has it, if it cannot be had."""
    row = connection.execute("select gaffer.lock_batch(%s)", [lease.job]).fetchone()
    return None if row is None else row[0]


class BatchConnection(psycopg.Connection[TupleRow]):
    """The batch's session as its function sees it: commit(), another kind of cursor, COPY and so on are refused before
    anything is sent. What they end or keep open would be committed without fence and watermark, or never end.

    `statement`: the batch's own context of a statement that is sent, which raises where none may be.
    """

    def __init__(self, session: db.Connection, statement: Callable[[], AbstractContextManager[None]]) -> None:
        super().__init__(session.pgconn, tuple_row)
        self._adapters = session.adapters  # a type that is registered with one is known to both
        self._autocommit = True
        self.prepare_threshold = None
        self.cursor_factory = BatchCursor
        self._session = session
        self._statement = WeakMethod(statement)  # a batch with its rows is not to stay until cycles are looked for
        self._sends = False

    @contextmanager
    def statement(self) -> Generator[None]:
        """Within it, one statement is sent."""
        statement = self._statement()
        if statement is None:
            raise BatchEndedError("this batch is over; use it only within the function or loop it was handed to")
        with statement():
            self._sends = True
            try:
                yield
            finally:
                self._sends = False

    def wait(self, gen: Any, *args: Any, **kwargs: Any) -> Any:
        # All that psycopg sends goes through here, and has not begun yet.
        if not self._sends:
            self._refuse()
        return self._session.wait(gen, *args, **kwargs)

    def close(self) -> None:
        self._refuse()

    def __enter__(self) -> NoReturn:
        self._refuse()

    def __del__(self, *_: Any) -> None:
        """The session is gaffer's to close."""

    def _refuse(self) -> NoReturn:
        raise BatchEndedError(
            "nothing was sent: the connection of a batch is gaffer's to commit and to close, and only batch.execute() "
            "and a batch.cursor() send on it; use those, batch.savepoint() for a part that may fail, batch.copy() for "
            "COPY, and a connection of your own for anything else, such as TypeInfo.fetch(), whose result may be "
            "registered with this one"
        )


class BatchCursor(psycopg.Cursor[TupleRow]):
    """A psycopg cursor within a batch."""

    _conn: BatchConnection

    def execute(
        self, query: Any, params: Any = None, *, prepare: bool | None = None, binary: bool | None = None
    ) -> Any:
        self._refuse_control(query)
        with self._conn.statement():
            return super().execute(query, params, prepare=prepare, binary=binary)

    def executemany(self, query: Any, params_seq: Any, *, returning: bool = False) -> None:
        self._refuse_control(query)
        given = list(params_seq)  # what yields them may use the batch, before anything is sent
        with self._conn.statement():
            super().executemany(query, given, returning=returning)

    def copy(self, *_: Any, **__: Any) -> NoReturn:
        raise BatchEndedError(
            "a client that is stopped within COPY is reached by no timeout; write by batch.copy(table, rows), and read "
            "by execute() with a LIMIT"
        )

    def stream(self, *_: Any, **__: Any) -> NoReturn:
        raise BatchEndedError(
            "a client that is stopped while it streams is reached by no timeout; use execute() with a LIMIT"
        )

    def _execute_send(self, query: Any, *, force_extended: bool = True, binary: bool | None = None) -> None:
        # Without parameters psycopg would choose the simple protocol, in which one message may carry a COMMIT too.
        super()._execute_send(query, force_extended=True, binary=binary)

    def _refuse_control(self, query: Any) -> None:
        text = query.as_string(self.connection) if isinstance(query, sql.Composable) else query
        refuse_control(text.decode(errors="replace") if isinstance(text, bytes) else text)


_BLANK = re.compile(r"(?:\s|;|--[^\n\r]*)+")
_WORD = re.compile(r"\w+")
_CONTROL = re.compile(
    r"(?:abort|begin|commit|end|prepare\s+transaction|release|rollback|savepoint|start\s+transaction"
    r"|set\s+(?:session\s+characteristics|transaction))\b",
    re.IGNORECASE,
)
_OUTLIVES = re.compile(
    r"(?:deallocate|discard|listen|load|prepare|reset|unlisten|set(?!\s+(?:local|constraints)\b)|declare\b.*\bwith\s+hold)\b",
    re.IGNORECASE | re.DOTALL,
)
_LOCKS_SESSION = re.compile(r"\bpg_(?:try_)?advisory_lock(?:_shared)?\s*\(", re.IGNORECASE)
# As it is usually written; what a function does within is not seen.
_FOR_THE_SESSION = re.compile(
    r"\bset_config\s*\((?:[^()]|\([^()]*\))*,\s*(?:is_local\s*(?:=>|:=)\s*)?(?:false|'f(?:alse)?'|'off'|'no?'|'0')"
    r"(?:\s*::\s*bool(?:ean)?)?\s*\)",
    re.IGNORECASE,
)


def refuse_control(text: str) -> None:
    """Raises `BatchEndedError` for a statement that would end the batch's transaction, or outlive it."""
    rest = skip_comments(text)
    word = _WORD.match(rest)
    if word:  # what the statement is can be told by its first two words, which a comment may part
        rest = f"{word[0]} {skip_comments(rest[word.end() :])}"
    first = " ".join(rest.split()[:2])
    if _CONTROL.match(rest):
        raise BatchEndedError(
            f"{first!r} was not sent: the batch's transaction is gaffer's to end; return to commit it, raise to "
            "roll it back, and use batch.savepoint() for a part that may fail"
        )
    if _OUTLIVES.match(rest):
        raise BatchEndedError(
            f"{first!r} was not sent: it would outlive the batch and leak through a pooler; use SET LOCAL, or none"
        )
    found = _LOCKS_SESSION.search(text)
    if found:
        raise BatchEndedError(
            f"{found[0]}…) was not sent: it would outlive the batch and leak through a pooler; take one of the "
            "transaction (…_xact_lock), which lasts as long as the batch"
        )
    if _FOR_THE_SESSION.search(text):
        raise BatchEndedError(
            "set_config(…, false) was not sent: it would outlive the batch and leak through a pooler; write true, "
            "which is for this batch only"
        )


def skip_comments(text: str) -> str:
    """What is left of a statement once leading blanks, semicolons and (nested) comments are gone."""
    while True:
        blank = _BLANK.match(text)
        if blank:
            text = text[blank.end() :]
        if not text.startswith("/*"):
            return text
        depth, at = 1, 2
        while depth and at < len(text):
            if text.startswith("/*", at):
                depth, at = depth + 1, at + 2
            elif text.startswith("*/", at):
                depth, at = depth - 1, at + 2
            else:
                at += 1
        text = text[at:]


def copy(connection: db.Connection, statement: sql.Composed, rows: list[list[Any]]) -> None:
    try:
        with connection.cursor() as cursor, cursor.copy(statement) as stream:
            for row in rows:
                stream.write_row(row)
    except (ValueError, psycopg.ProgrammingError):
        # psycopg expects one answer, and PgBouncer adds an error of its own to that of a server that goes.
        if connection.info.status == psycopg.pq.ConnStatus.OK:
            raise
        raise psycopg.OperationalError("the server closed the connection in the middle of COPY") from None


def set_savepoint(connection: db.Connection) -> sql.Identifier:
    name = sql.Identifier(f"gaffer_{uuid4().hex}")
    connection.execute(sql.SQL("savepoint {}").format(name))
    return name


def roll_back_to(connection: db.Connection, name: sql.Identifier) -> bool:
    """False: the whole transaction is gone, or will be: a statement is still under way in it."""
    if db.is_busy(connection):
        return False
    try:
        connection.execute(sql.SQL("rollback to {0}; release {0}").format(name))
    except psycopg.Error:
        return False
    return True


def release(connection: db.Connection, name: sql.Identifier) -> None:
    connection.execute(sql.SQL("release {}").format(name))
