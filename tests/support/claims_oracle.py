"""What must be true of rows that carry their own state, told from the promises and from what happened.

Nothing here knows how rows are claimed. It is given what the work was handed (`Call`), and what the tables show; it
says what is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

LONGEST_BACKOFF = timedelta(hours=1)


@dataclass(frozen=True)
class Row:
    """A row of the table. `done`: how often the table says that it was; `effects`: how often its work is there;
    `reopened`: how often somebody made it pending again; `is_innocent`: alone it never fails, and ends no process;
    `is_dropped`: an operator gave it up; `asked_at`: the number of the last call before an operator had it tried anew.
    """

    key: str
    is_pending: bool
    done: int
    effects: int
    reopened: int
    is_innocent: bool
    is_dropped: bool
    asked_at: int


@dataclass(frozen=True)
class Item:
    """What is kept of a row that failed. `died`: nothing was heard of an attempt that was committed beforehand."""

    key: str
    attempts: int
    failed_at: datetime
    next_attempt_at: datetime
    is_parked: bool
    is_dropped: bool
    died: bool

    def waits(self, now: datetime) -> bool:
        return self.is_parked or self.is_dropped or self.next_attempt_at > now


@dataclass(frozen=True)
class Call:
    """The work was handed these rows. `is_well`: it did them, as far as the process lived to tell. `untimely`: of these
    rows, those that were parked, dropped, or waiting since before the run began."""

    number: int
    run: int
    keys: Sequence[str]
    is_well: bool
    untimely: Sequence[str]


@dataclass(frozen=True)
class Ended:
    outcome: str
    backlog: int
    parked: int
    batches: int
    follow_up_at: datetime | None


def of_rows(
    rows: Sequence[Row], items: Sequence[Item], calls: Sequence[Call], attempts: int, backoff: timedelta
) -> Iterator[str]:
    """At any time at which no run is at work."""
    by_key, known = {item.key: item for item in items}, {row.key: row for row in rows}
    for row in rows:
        if row.effects != row.done or row.done > 1 + row.reopened:
            yield f"{row.key} was done {row.done} times, reopened {row.reopened}; its work is there {row.effects} times"
        item = by_key.get(row.key)
        if row.is_innocent and item is not None and item.attempts:
            yield f"{row.key} never failed alone, and is charged {item.attempts} attempts"
        if row.is_dropped and row.is_pending and (item is None or not item.is_dropped):
            yield f"{row.key} was dropped, and that is forgotten"
    for item in items:
        asked_at = known[item.key].asked_at if item.key in known else 0
        tried = {call.run for call in calls if call.number > asked_at and call.keys == [item.key] and not call.is_well}
        if item.attempts > len(tried):
            yield f"{item.key} failed alone in {len(tried)} runs, and is charged {item.attempts} attempts"
        # Whether it is parked is told with its error; until then nothing was heard of its last attempt.
        if not item.died and not item.is_dropped and item.is_parked != (item.attempts >= attempts):
            yield f"{item.key} has {item.attempts} attempts of {attempts}, and parked is {item.is_parked}"
        if item.attempts:
            waits = item.next_attempt_at - item.failed_at
            told = min(backoff * 2 ** (item.attempts - 1), LONGEST_BACKOFF)
            if not told * 0.75 <= waits <= told * 1.25:
                yield f"{item.key} waits {waits} after attempt {item.attempts}; told is {told}, spread by a quarter"
    for call in calls:
        if call.untimely:
            yield f"{call.untimely} were parked, dropped or waited, and run {call.run} worked on them"


def of_run(
    ended: Ended, rows: Sequence[Row], before: Sequence[Item], items: Sequence[Item], now: datetime
) -> Iterator[str]:
    """After a run beside which nobody did anything, and that raised nothing."""
    by_key, seen = {item.key: item for item in items}, {item.key: item.failed_at for item in before}
    pending = {row.key for row in rows if row.is_pending}
    failed = [item for item in items if not item.died and item.failed_at != seen.get(item.key)]
    failed += [item for item in items if not item.died and item.key in {old.key for old in before if old.died}]
    due = [key for key in pending if key not in by_key or not by_key[key].waits(now)]
    told = "capped" if due else "partial" if failed else "succeeded"
    if (ended.outcome, ended.backlog) != (told, len(due)):
        yield f"it ended {ended.outcome} with a backlog of {ended.backlog}: due are {due}, failed {failed}"
    parked = {item.key for item in failed if item.is_parked}
    if ended.parked != len(parked):
        yield f"it says that it parked {ended.parked} rows, and parked {parked}"
    waiting = [item.next_attempt_at for item in items if not item.is_parked and not item.is_dropped]
    if not due and ended.follow_up_at != min(waiting, default=None):
        yield f"another run is wanted at {ended.follow_up_at}, and rows are to be tried again at {waiting}"
    if due and (ended.follow_up_at is None or ended.follow_up_at > now + timedelta(minutes=1)):
        yield f"rows are due, and another run is wanted at {ended.follow_up_at}"


def of_the_end(rows: Sequence[Row], items: Sequence[Item]) -> Iterator[str]:
    """After more runs than are needed, each after everything that waits has waited enough."""
    given_up = {item.key for item in items if item.is_parked or item.is_dropped}
    for row in rows:
        if row.is_pending and (row.is_innocent or row.key not in given_up):
            yield f"{row.key} is neither done nor, if it is bad, given up"
    pending = {row.key for row in rows if row.is_pending}
    for item in items:
        if item.key not in pending:
            yield f"a failure of {item.key} is kept, which is not pending any more: {item}"
