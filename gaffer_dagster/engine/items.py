"""The work on one page of claimed rows: all at once, and where that fails one by one, so that a bad row is found.

The page is done within one savepoint. Where its work raises, that is undone (the rows stay claimed, for their locks
are older than the savepoint), and each row is done in a savepoint of its own: good rows pay for a bad one only where
there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gaffer_dagster.domain.item import Failed
from gaffer_dagster.engine.sources import MOST_SAVEPOINTS, Page
from gaffer_dagster.errors import BatchEndedError
from gaffer_dagster.store import batches, db


@dataclass(frozen=True)
class Result:
    """What came of a page: what the function said, which rows it did, and which failed. `page`: the rows that were
    worked on, all of them or the first."""

    page: Page
    told: Mapping[str, Any]
    done: Sequence[str]
    failed: Sequence[Failed]


def work_on(
    page: Page,
    connection: db.Connection,
    work: Callable[[Page], Mapping[str, Any]],
    is_of_rows: Callable[[Exception], bool],
) -> Result:
    """`work` does a page and says what the function said. Raises what is not the fault of a row, and, of a page of one
    row that is worked on alone, what is."""
    claimed = page.claimed
    assert claimed is not None  # noqa: S101 — asked for claimed rows only
    if not page.rows:
        return Result(page, {}, (), claimed.failed)
    # A page of one row, unless it is worked on alone, has nobody to be told apart from: its work is not done twice.
    if claimed.alone or (not claimed.one_by_one and len(page.rows) > 1):
        name = batches.set_savepoint(connection)
        try:
            return Result(page, work(page), claimed.keys, claimed.failed)
        except Exception as error:
            if claimed.alone or not is_of_rows(error) or not batches.roll_back_to(connection, name):
                raise
    page = page.first(MOST_SAVEPOINTS)
    told: dict[str, Any] = {}
    done: list[str] = []
    failed = list(claimed.failed)
    for key, row in zip(claimed.keys, page.rows, strict=False):
        name = batches.set_savepoint(connection)
        try:
            told.update(work(replace(page, rows=[row], items=1, claimed=replace(claimed, keys=[key]))))
            done.append(key)
        except Exception as error:
            if not is_of_rows(error) or not batches.roll_back_to(connection, name):
                raise
            failed.append(failure(key, error))
        else:
            batches.release(connection, name)
    return Result(page, told, done, failed)


def failure(key: str, error: BaseException, *, charged: bool = False) -> Failed:
    # An error that was swallowed, and came back when the batch was used again, is the one to record.
    first = error.__cause__ if isinstance(error, BatchEndedError) and error.__cause__ is not None else error
    return Failed(key, db.primary_message(first), db.sqlstate(first), charged)
