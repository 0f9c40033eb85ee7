"""What the user's function is handed: the rows or the window that are due, and one guarded connection.

Everything written through a batch commits with the job's watermark and the run's counters, or not at all. Whatever
is written elsewhere (another connection, a file, a service) does not; pass `fence` and `key` or `key_for(row)` on.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from typing_extensions import LiteralString

from gaffer_dagster.domain.due import Window
from gaffer_dagster.engine.log import Log
from gaffer_dagster.engine.sources import Page, Source
from gaffer_dagster.errors import BadInputError, BatchEndedError
from gaffer_dagster.store import batches, db, due_sql, payload, tables

# Past the guarded connection, as through psycopg's `pgconn` or in a child process, such code is only found out.
_LEAVE = (
    "What it had written before a COMMIT of its own is kept, unless the table is protected, and comes again: leave the "
    "transaction to gaffer, and protect= the tables, so that nothing is kept"
)


class Batch:
    """One batch of due work.

    `rows`: the due rows, as dicts (empty where the batch is a window of time). `number`: 1, 2, … within the run.
    `fence`: only grows with each take-over; pass it to systems that can refuse an older one. `run_id`: the row of
    `gaffer.job_runs`. `log`: a structured logger with the job's fields. `context`: Dagster's, or None.
    """

    def __init__(
        self,
        connection: db.Connection,
        page: Page,
        source: Source,
        *,
        number: int,
        fence: int,
        run_id: int,
        check: Callable[[], None],
        log: Log,
        context: Any,
    ) -> None:
        self.rows = page.rows
        self.number = number
        self.fence = fence
        self.run_id = run_id
        self.log = log
        self.context = context
        self._page = page
        self._source = source
        self._connection = connection
        self._check = check
        self._open = True
        self._sends = False
        self._thread = os.getpid(), threading.get_ident()
        self._error: BaseException | None = None
        self._tables: dict[str, tables.Table] = {}

    @property
    def window(self) -> Window:
        """The stretch of time `[since, until)` that is due. Only where the due work is time."""
        if self._page.window is None:
            raise BadInputError("this batch is of rows and has no window; use batch.rows")
        return self._page.window

    @property
    def key(self) -> str:
        """Names this batch, the same in every attempt. Only where the bounds of a batch repeat."""
        if self._page.key is None:
            raise BadInputError(
                "the bounds of this batch need not repeat after a failure; use batch.key_for(row), or give "
                "Elapsed a slice"
            )
        return self._page.key

    def key_for(self, row: Mapping[str, Any]) -> str:
        """Names a row of `rows`, the same in every attempt: an idempotency key for what is outside the database."""
        return self._source.key_for(dict(row))

    def with_due(self, statement: LiteralString) -> db.Query:
        """A statement to `execute` without parameters, in which what is due can be read as `due`: the rows, or one row
        of `since` and `until`."""
        return due_sql.with_due(self._source.query(self._page), statement)

    def execute(self, query: Any, params: Sequence[Any] | Mapping[str, Any] | None = None) -> batches.BatchCursor:
        """Runs one statement, as psycopg's `execute`. Transaction control is refused."""
        return self.cursor().execute(query, params)

    def executemany(self, query: Any, params: Iterable[Sequence[Any] | Mapping[str, Any]]) -> None:
        """Runs one statement for each parameter set, as psycopg's `executemany`; `insert` and `copy` are faster."""
        self.cursor().executemany(query, params)

    def cursor(self, *, row_factory: Any = None) -> batches.BatchCursor:
        """A psycopg cursor on the batch's connection, for several results or another `row_factory`. Nothing else sends
        on that connection: its commit(), close() and so on are refused, and so is a cursor of another class."""
        cursor = batches.BatchCursor(self._guarded)
        if row_factory is not None:
            cursor.row_factory = row_factory
        return cursor

    def insert(self, table: str, rows: Iterable[Mapping[str, Any]]) -> int:
        """Inserts dicts that all have the same keys, in one statement. Returns how many."""
        given = list(rows)
        if given:
            target = self._table(table)
            with payload.unsendable(self._connection, target, given):
                whole = payload.insert_by_arrays(target, given)
                if whole is not None:
                    self.execute(*whole)
                else:
                    self.executemany(*payload.insert_one_by_one(target, given))
        return len(given)

    def copy(self, table: str, rows: Iterable[Mapping[str, Any]]) -> int:
        """The same as `insert` by COPY, which is faster from thousands of rows on. `rows` is read to its end first."""
        given = list(rows)
        if given:
            target = self._table(table)
            statement, values = payload.copy(target, given)
            with self._statement(), payload.unsendable(self._connection, target, given):
                batches.copy(self._connection, statement, values)
        return len(given)

    @contextmanager
    def savepoint(self) -> Generator[None]:
        """A part that may fail: an error in it undoes this part only, and the batch can go on."""
        self._before()
        name = batches.set_savepoint(self._connection)
        try:
            yield
        except Exception:
            self._check()
            if self._open and batches.roll_back_to(self._connection, name):
                self._error = None
            raise
        else:
            self._before()
            batches.release(self._connection, name)

    @cached_property
    def _guarded(self) -> batches.BatchConnection:
        return batches.BatchConnection(self._connection, self._statement)

    @contextmanager
    def _statement(self) -> Generator[None]:
        """Within it, one statement is sent. Raises where none may be."""
        self._before()
        self._sends = True
        try:
            yield
        except BaseException as error:
            self._after(error)
            raise
        finally:
            self._sends = False

    def _table(self, name: str) -> tables.Table:
        if name not in self._tables:
            self._before()
            try:
                self._tables[name] = tables.find(self._connection, name)
            except BadInputError as error:
                self._after(error)  # older servers spoil the transaction over a name that they cannot read
                raise
        return self._tables[name]

    def _before(self) -> None:
        """Raises where no further statement may be sent."""
        if (os.getpid(), threading.get_ident()) != self._thread:  # a forked child has the thread's number, too
            raise BatchEndedError(
                f"batch {self.number} belongs to the process and thread that it was handed to; let that one write"
            )
        if not self._open:
            raise BatchEndedError(
                f"batch {self.number} is over; use it only within the function or loop it was handed to"
            )
        if self._sends:
            raise BatchEndedError(
                f"batch {self.number} is sending a statement, whose parameters are being made by code that uses the "
                "batch; make them first"
            )
        self._check()
        if self._error is not None:
            raise BatchEndedError(
                f"an earlier statement of this batch failed ({db.primary_message(self._error)}), so nothing of it "
                "will be kept; let the error pass, and use batch.savepoint() for a part that may fail"
            ) from self._error
        if db.is_busy(self._connection):
            raise self._busy()
        if not db.in_transaction(self._connection):
            raise BatchEndedError(f"the transaction of this batch was ended by its own code. {_LEAVE}")

    def _after(self, error: BaseException) -> None:
        if self._error is None and not db.in_transaction(self._connection):
            self._error = error

    def close(self) -> BaseException | None:
        """The function has returned: nothing more may be sent. Gives the error that it may have swallowed."""
        self._open = False
        if self._error is None and db.was_closed(self._connection):
            return BatchEndedError(f"the connection of this batch was closed by its own code. {_LEAVE}")
        if self._error is None and db.is_busy(self._connection):
            return self._busy()
        return self._error

    def _busy(self) -> BatchEndedError:
        """What is sent now would wait for that statement, and no timeout reaches a server that waits for its client."""
        return BatchEndedError(
            f"a statement that batch {self.number} sent past gaffer is still under way (a COPY or a stream that was "
            "not taken to its end), so nothing of the batch is kept; use batch.copy(), and batch.execute() with a LIMIT"
        )
