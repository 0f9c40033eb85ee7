"""What must be true of rows that carry their own state, told from the promises and from what happened, and nothing else.

Nothing here knows how rows are claimed. It is given what the work saw (`Call`), what people did (`Story`), and what the
tables show (`Row`, `Item`, `Ended`); it says what is wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

LONGEST_BACKOFF = timedelta(hours=1)


@dataclass(frozen=True)
class Row:
    """A row of the table. `effects`: how often its work is there; `done`: how often the table says it was done."""

    key: str
    pending: bool
    done: int
    effects: int


@dataclass(frozen=True)
class Item:
    """A row that failed. `died`: an attempt was committed beforehand, and nothing was heard of it since."""

    key: str
    attempts: int
    failed_at: datetime | None
    next_attempt_at: datetime | None
    parked: bool
    dropped: bool
    died: bool

    def waits(self, now: datetime) -> bool:
        return self.parked or self.dropped or (self.next_attempt_at is not None and self.next_attempt_at > now)


@dataclass(frozen=True)
class Call:
    """The work was handed these rows. `failed`: it raised, or its rows could not be kept; None: its process died."""

    run: int
    batch: int
    keys: tuple[str, ...]
    failed: bool | None


@dataclass(frozen=True)
class Ended:
    outcome: str
    backlog: int | None
    parked: int
    follow_up_at: datetime | None


@dataclass
class Story:
    """`attempts`: of each row. `innocent`: rows that never fail alone nor end their process. `asked`: rows on which an
    operator or somebody by hand began anew, with the number of calls that there were before. `reopened`: how often a
    row that was done was made pending by hand."""

    attempts: int
    backoff: timedelta
    innocent: Collection[str]
    calls: list[Call] = field(default_factory=list)
    asked: dict[str, int] = field(default_factory=dict)
    touched: set[str] = field(default_factory=set)
    reopened: Counter[str] = field(default_factory=Counter)
    dropped: set[str] = field(default_factory=set)
    cut: bool = False

    def tries(self, key: str) -> int:
        """Runs in which this row failed, or died, alone: what it may be charged for at most."""
        return len(
            {
                call.run
                for call in self.calls[self.asked.get(key, 0) :]
                if call.keys == (key,) and call.failed is not False
            }
        )

    def deaths(self, key: str) -> int:
        return sum(key in call.keys and call.failed is None for call in self.calls)


def of_rows(story: Story, rows: Sequence[Row], items: Sequence[Item], parked: int | None) -> Iterator[str]:
    """At any time at which no transaction of a run is open. `parked`: what the job counts; None: a run died since."""
    for row in rows:
        if row.effects != row.done:
            yield f"row {row.key} was done {row.done} times and its work is there {row.effects} times"
        if row.done > 1 + story.reopened[row.key]:
            yield f"row {row.key} was done {row.done} times"
    for item in items:
        if item.attempts and item.key in story.innocent:
            yield f"row {item.key} never failed alone and is charged {item.attempts} attempts"
        if item.attempts > story.attempts:
            yield f"row {item.key} was tried {item.attempts} times of {story.attempts}"
        if item.attempts > story.tries(item.key):
            yield f"row {item.key} failed alone {story.tries(item.key)} times and is charged {item.attempts}"
        if not item.dropped and not item.died and item.parked != (item.attempts == story.attempts):
            yield f"row {item.key} has {item.attempts} attempts of {story.attempts}, and parked is {item.parked}"
        if item.failed_at is not None and item.next_attempt_at is not None and not item.parked:
            longest = min(story.backoff * 2 ** (item.attempts - 1), LONGEST_BACKOFF)
            waits = item.next_attempt_at - item.failed_at
            if not longest / 2 <= waits <= longest * 2:
                yield f"row {item.key} waits {waits} after attempt {item.attempts}; told is about {longest}"
    by_key = {item.key: item for item in items}
    for row in rows:
        item = by_key.get(row.key)
        if not story.cut and row.pending and row.key not in story.touched | story.dropped and not story.deaths(row.key):
            charged = 0 if item is None else item.attempts
            if charged != story.tries(row.key):
                yield f"row {row.key} failed alone {story.tries(row.key)} times and is charged {charged}"
        if row.key in story.dropped and row.pending and (item is None or not item.dropped):
            yield f"row {row.key} was dropped, and that is forgotten"
    counted = sum(item.parked and not item.dropped for item in items)
    if parked is not None and parked != counted:
        yield f"the job counts {parked} parked rows and has {counted}"


def of_call(call: Call, items: Mapping[str, Item], now: datetime) -> Iterator[str]:
    """`items`: as committed when the work was called."""
    for key in call.keys:
        item = items.get(key)
        if item is not None and item.waits(now) and not (call.keys == (key,) and item.died and not item.dropped):
            yield f"row {key} is worked on though it is parked, dropped or waits: {item}"


def of_run(
    ended: Ended,
    rows: Sequence[Row],
    before: Sequence[Item],
    items: Sequence[Item],
    seen: Collection[str],
    now: datetime,
) -> Iterator[str]:
    """After a run that nothing else ran beside, and that raised nothing. `seen`: rows that it worked on."""
    known = {item.key: item for item in before}
    by_key = {item.key: item for item in items}
    failed = [
        item.key
        for item in items
        if not item.died
        and (item.key not in known or known[item.key].died or known[item.key].failed_at != item.failed_at)
    ]
    due = [row.key for row in rows if row.pending and not (row.key in by_key and by_key[row.key].waits(now))]
    if ended.backlog != len(due):
        yield f"the backlog is {ended.backlog}, and due are {due}"
    told = "capped" if due else "partial" if failed else "succeeded"
    if ended.outcome != told:
        yield f"the run is {ended.outcome}, and should be {told}: failed {failed}, due {due}"
    parked = sum(by_key[key].parked for key in failed)
    if ended.parked != parked:
        yield f"the run says it parked {ended.parked} rows, and parked {parked}"
    if due and seen and (ended.follow_up_at is None or ended.follow_up_at > now + timedelta(minutes=1)):
        yield f"rows are due, and another run is wanted only at {ended.follow_up_at}"
    pending = {row.key for row in rows if row.pending}
    waiting = [
        item.next_attempt_at
        for item in items
        if item.key in pending and item.next_attempt_at is not None and not item.parked and not item.dropped
    ]
    if not due and ended.follow_up_at != min(waiting, default=None):
        yield f"another run is wanted at {ended.follow_up_at}, and the next row to try again at {min(waiting, default=None)}"
    if not due:
        stale = [item.key for item in items if item.key not in pending and not item.dropped]
        if stale:
            yield f"failures are kept of rows that are not pending: {stale}"


def of_the_end(rows: Sequence[Row], items: Sequence[Item]) -> Iterator[str]:
    """After as many runs as anybody may ask for, with nothing left that waits."""
    by_key = {item.key: item for item in items}
    for row in rows:
        item = by_key.get(row.key)
        if row.pending and not (item is not None and (item.parked or item.dropped)):
            yield f"row {row.key} is neither done nor parked nor dropped: {item}"
