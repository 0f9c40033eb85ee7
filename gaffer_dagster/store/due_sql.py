"""Work that is one SQL statement, which reads what is due as `due`: a materialized CTE put in front of it."""

from __future__ import annotations

import re

from psycopg import sql
from typing_extensions import LiteralString

from gaffer_dagster.domain.due import Window
from gaffer_dagster.store import db
from gaffer_dagster.store.batches import skip_comments

_WITH = re.compile(r"with\b", re.IGNORECASE)
_RECURSIVE = re.compile(r"recursive\b", re.IGNORECASE)


def window(due: Window) -> db.Query:
    """One row of `since` and `until`."""
    return sql.SQL("select {}::timestamptz as since, {}::timestamptz as until").format(
        sql.Literal(due.since), sql.Literal(due.until)
    )


def with_due(due: db.Query, statement: LiteralString) -> db.Query:
    """The statement with `due` at hand, before the CTEs that it has of its own: what changes data may stand nowhere
    but on the outermost level, so it cannot be wrapped."""
    begins: LiteralString = "with due"
    rest = skip_comments(statement)
    own = _WITH.match(rest)
    if own:
        rest = skip_comments(rest[own.end() :])
        recursive = _RECURSIVE.match(rest)
        if recursive:
            begins, rest = "with recursive due", rest[recursive.end() :]
    return sql.SQL("{} as materialized (\n{}\n){}\n{}").format(
        sql.SQL(begins),
        due,
        sql.SQL("," if own else ""),
        sql.SQL(rest),  # pyright: ignore[reportArgumentType] — the job's own text
    )
