"""Work that is one SQL statement: what is due is there as `due`, and its rows never leave the database."""

from __future__ import annotations

import re
from dataclasses import dataclass

from typing_extensions import LiteralString

from gaffer_dagster.domain.due import is_text
from gaffer_dagster.engine.batch import Batch
from gaffer_dagster.errors import BadSpecError
from gaffer_dagster.store import batches, db

_STATEMENT = re.compile(r"(?:delete|insert|merge|select|table|update|values|with)\b", re.IGNORECASE)
# A syntax error, which several statements are too; and a name that is given twice.
_UNREADABLE = ("42601", "42712")
_DUE = re.compile(r"\bdue\b", re.IGNORECASE)


@dataclass(frozen=True)
class SqlWork:
    """One statement that does a batch, such as `insert into t select … from due`: an insert, update, delete, merge or
    select, which may have CTEs of its own. A `%` in it is one. Raises `BadSpecError` for what cannot be that."""

    sql: LiteralString

    def __post_init__(self) -> None:
        if not is_text(self.sql):
            raise BadSpecError(f"sql={self.sql!r} is no SQL; write one statement that reads due")
        begins = batches.skip_comments(self.sql)
        if not _STATEMENT.match(begins):
            raise BadSpecError(
                f"sql= begins with {(begins.split() or [''])[0]!r}; write one insert, update, delete, merge or select. "
                "The transaction is gaffer's, and what more than that is to be done takes a function"
            )
        if not _DUE.search(self.sql):
            raise BadSpecError("sql= does not read due, so no row would be worked on; write such as … from due")

    def __call__(self, batch: Batch) -> None:
        try:
            batch.execute(batch.with_due(self.sql))
        except Exception as error:
            if db.sqlstate(error) not in _UNREADABLE:
                raise
            raise BadSpecError(
                f"sql= cannot be read by the database: {db.primary_message(error)}; write one statement, whose own "
                "CTEs are not called due"
            ) from error
