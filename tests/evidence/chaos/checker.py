"""What must be true of a round: of what its workers were told, and of what the database says in the end.

Pure: it is given `Facts`, and knows nothing of how a job is run. Each rule is a function that yields findings in words,
with the lines of the history that they are about.

    writes      no acknowledged write is lost, none that failed is there, none was never invoked, none is there in part
    twice       no key is done twice
    commits     the order of the commits agrees with the fences, and everything that is there was committed by a batch
    fences      a fence is handed out once, and so is a lease id
    runs        every run ended once, and its items are the rows that it wrote
    endings     no run raised anything but what the faults explain, and each ended as it was told
    watermark   agrees with what is there: of rows, everything up to it; of time, an unbroken chain up to it
    queue       each row is done once, or parked for cause
    progress    each job gets on within the bound after whatever was done to it
    invariants  what holds of any job (`gaffer_dagster.testing.invariants`)
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

import gaffer_dagster as gd
from tests.evidence.chaos.history import MOVED, Line
from tests.evidence.chaos.jobs import ATTEMPTS, BEGAN_AT, is_bad

_SHOWN = 12
"""Lines of the history with a finding."""

_STOPS = ("stop", "kill the run of a step, stop the step")
_CONNECTIONS = ("terminate", "cut", "pooler restart", "network drop", "server crash")
_CLOCKS = ("clock", "database's clock", "server crash", MOVED)
_LOST = dict.fromkeys(
    # The last one: so PgBouncer says that it cannot reach the server.
    ("DatabaseUnavailableError", "OperationalError", "AdminShutdown", "CrashShutdown", "CannotConnectNow",
     "ProtocolViolation"), (*_STOPS, *_CONNECTIONS),
)  # fmt: skip
_SIGNALS = ("Interrupted", "DagsterExecutionInterruptedError")
EXPLAINED: Mapping[str, Sequence[str]] = {
    # Somebody else took over, or the lease was released; of which more is asked.
    "LeaseLostError": ("",),
    "DeadlinePassedError": (*_STOPS, *_CLOCKS),
    "ClockSkewError": _CLOCKS,
    **dict.fromkeys(_SIGNALS, ("terminate a run of Dagster's",)),
    # The run of a step is gone, and its step hears of it.
    "GafferError": ("kill the run of a step",),
    # A batch that took too long, or whose statement the keeper cancelled, since the run has lost its lease.
    "BatchEndedError": (*_STOPS, *_CONNECTIONS),
    "IdleInTransactionSessionTimeout": (*_STOPS, *_CONNECTIONS),
    "TransactionTimeout": (*_STOPS, *_CONNECTIONS),
    "QueryCanceled": (*_STOPS, *_CONNECTIONS, *_CLOCKS, "release"),
    # A connection that was lost more often than a batch is tried.
    **_LOST,
}
"""What a run may raise, and how the notes begin of the faults that explain it."""
_SEEN_LATE = 10.0
"""Seconds after a fault in which it was noted."""
_WELL = {"succeeded", "partial", "capped"}


@dataclass(frozen=True)
class Kind:
    """What a job is due for: `rows`, `queue`, or `time`, in windows of this `length` where they have one."""

    of: str
    length: timedelta | None = None


def kind_of(spec: gd.JobSpec) -> Kind:
    if isinstance(spec.due, gd.NewRows):
        return Kind("rows")
    if isinstance(spec.due, gd.PendingRows):
        return Kind("queue")
    return Kind("time", timedelta(minutes=1) if isinstance(spec.due, gd.EachInterval) else spec.due.slice)


@dataclass(frozen=True)
class Written:
    """A row that is there in the end. `xid`: of the transaction that wrote it."""

    job: str
    key: str
    attempt: str
    run: int
    fence: int
    batch: int
    xid: int


@dataclass(frozen=True)
class Event:
    """What the tables went through; of one slot, in the order of the commits."""

    id: int
    what: str
    job: str
    slot: int | None
    run: int | None
    fence: int | None
    lease_id: str | None
    outcome: str | None
    xid: int


@dataclass(frozen=True)
class RunRow:
    id: int
    job: str
    slot: int
    outcome: str
    fence: int | None
    items: int
    batches: int


@dataclass(frozen=True)
class Item:
    """A row of the queue, and what is kept of its failures."""

    is_pending: bool
    attempts: int = 0
    is_parked: bool = False
    error: str | None = None


@dataclass(frozen=True)
class Facts:
    """`source`: the rows of the source, each as the number of its transaction and its key, in that order. `impaired`:
    when jobs could not work. `healed`: when the last fault was undone."""

    history: Sequence[Line] = ()
    kinds: Mapping[str, Kind] = field(default_factory=dict[str, Kind])
    written: Sequence[Written] = ()
    events: Sequence[Event] = ()
    runs: Sequence[RunRow] = ()
    watermarks: Mapping[str, Mapping[str, str] | None] = field(default_factory=dict[str, Any])
    source: Sequence[tuple[int, str]] = ()
    items: Mapping[str, Item] = field(default_factory=dict[str, Item])
    broken: Mapping[str, Sequence[Any]] = field(default_factory=dict[str, Any])
    impaired: Sequence[tuple[float, float]] = ()
    healed: float = 0.0


@dataclass(frozen=True)
class Finding:
    rule: str
    text: str
    lines: Sequence[Line] = ()

    def __str__(self) -> str:
        return "\n".join([f"{self.rule}: {self.text}", *(f"    {line}" for line in self.lines)])


@dataclass(frozen=True)
class Verdicts:
    """What the workers heard of each attempt; `unknown`: nothing."""

    invoked: Mapping[str, Line]
    acknowledged: frozenset[str]
    failed: frozenset[str]

    @property
    def unknown(self) -> frozenset[str]:
        return frozenset(self.invoked) - self.acknowledged - self.failed


def verdicts(facts: Facts) -> Verdicts:
    told: dict[str, set[str]] = defaultdict(set)
    invoked: dict[str, Line] = {}
    for line in facts.history:
        if line.attempt is not None:
            told[line.what].add(line.attempt)
            if line.what == "invoked":
                invoked[line.attempt] = line
    return Verdicts(invoked, frozenset(told["acknowledged"]), frozenset(told["failed"]))


def check(facts: Facts, *, bound: float) -> list[Finding]:
    """Everything that is wrong."""
    return [
        *_writes(facts), *_twice(facts), *_commits(facts), *_fences(facts), *_runs(facts),
        *_endings(facts), *_watermarks(facts),
        *_queue(facts), *_progress(facts, bound), *_invariants(facts),
    ]  # fmt: skip


def _about(facts: Facts, *attempts: str | None, job: str = "", key: str = "") -> list[Line]:
    """The lines about these attempts, or about this key."""
    found = [
        line
        for line in facts.history
        if (line.attempt is not None and line.attempt in attempts) or (key and line.job == job and key in line.keys)
    ]
    return found[:_SHOWN]


def _of_run(facts: Facts, run: int) -> list[Line]:
    return [line for line in facts.history if line.run == run][-_SHOWN:]


# ── what was written ─────────────────────────────────────────────────────────────────────────────────────────────────


def _writes(facts: Facts) -> Iterator[Finding]:
    known = verdicts(facts)
    there: dict[str, set[str]] = defaultdict(set)
    for row in facts.written:
        there[row.attempt].add(row.key)
    for attempt in sorted(set(there) - set(known.invoked)):
        yield Finding("writes", f"{attempt} was never invoked, and is there with {sorted(there[attempt])}")
    for attempt, line in known.invoked.items():
        found, wanted = there.get(attempt, set()), set(line.keys)
        if attempt in known.acknowledged and found != wanted:
            text = f"{attempt} of {line.job} was acknowledged; lost are {sorted(wanted - found)}"
        elif attempt in known.failed and found:
            text = f"{attempt} of {line.job} was told that it failed, and is there with {sorted(found)}"
        elif found and found != wanted:
            text = f"{attempt} of {line.job} is there in part: {sorted(wanted - found)} are not"
        else:
            continue
        yield Finding("writes", text, _about(facts, attempt))


def _twice(facts: Facts) -> Iterator[Finding]:
    by_key: dict[tuple[str, str], list[Written]] = defaultdict(list)
    for row in facts.written:
        by_key[row.job, row.key].append(row)
    for (job, key), rows in by_key.items():
        if len(rows) > 1:
            told = ", ".join(f"{row.attempt} (run {row.run}, fence {row.fence})" for row in rows)
            yield Finding("twice", f"{job}: {key} was done {len(rows)} times: {told}", _about(facts, job=job, key=key))


# ── in which order, and by whom ──────────────────────────────────────────────────────────────────────────────────────


def _commits(facts: Facts) -> Iterator[Finding]:
    commits = [event for event in facts.events if event.what == "committed"]
    by_xid = {(event.job, event.xid): event for event in commits}
    by_slot: dict[tuple[str, int | None], list[Event]] = defaultdict(list)
    for event in commits:
        by_slot[event.job, event.slot].append(event)
    attempts: dict[tuple[str, int], set[str]] = defaultdict(set)
    for row in facts.written:
        attempts[row.job, row.xid].add(row.attempt)
    for (job, slot), events in by_slot.items():
        for before, after in pairwise(events):
            if (after.fence or 0) < (before.fence or 0):
                text = f"{job}, slot {slot}: fence {after.fence} committed after fence {before.fence}"
                about = attempts[job, before.xid] | attempts[job, after.xid]
                yield Finding("commits", text, _about(facts, *about))
    for row in facts.written:
        event = by_xid.get((row.job, row.xid))
        if event is None:
            text = f"{row.job}: {row.key} was written by a transaction that committed no batch"
            yield Finding("commits", text, _about(facts, row.attempt))
        elif (event.run, event.fence) != (row.run, row.fence):
            text = (
                f"{row.job}: {row.key} was handed out to run {row.run} with fence {row.fence}, and committed by run "
                f"{event.run} with fence {event.fence}"
            )
            yield Finding("commits", text, _about(facts, row.attempt))


def _fences(facts: Facts) -> Iterator[Finding]:
    acquired = [event for event in facts.events if event.what == "acquired"]
    fences = Counter((event.job, event.slot, event.fence) for event in acquired)
    ids = Counter(event.lease_id for event in acquired if event.lease_id is not None)
    for (job, slot, fence), count in fences.items():
        if count > 1:
            lines = [line for line in facts.history if (line.job, line.slot, line.fence) == (job, slot, fence)]
            yield Finding("fences", f"{job}, slot {slot}: fence {fence} was handed out {count} times", lines[:_SHOWN])
    for lease_id, count in ids.items():
        if count > 1:
            lines = [line for line in facts.history if line.lease_id == lease_id]
            yield Finding("fences", f"the lease id {lease_id} was granted {count} times", lines[:_SHOWN])
    # Within what the workers were handed as well: two runs never had the same pair.
    holders: dict[tuple[str, int | None, int | None], set[int | None]] = defaultdict(set)
    for line in facts.history:
        if line.what == "invoked" and line.fence is not None:
            holders[line.job, line.slot, line.fence].add(line.run)
    for (job, slot, fence), runs in holders.items():
        if len(runs) > 1:
            lines = [line for line in facts.history if (line.job, line.slot, line.fence) == (job, slot, fence)]
            text = f"{job}, slot {slot}: fence {fence} was handed to the runs {sorted(map(str, runs))}"
            yield Finding("fences", text, lines[:_SHOWN])


def _runs(facts: Facts) -> Iterator[Finding]:
    endings: dict[int | None, list[Event]] = defaultdict(list)
    for event in facts.events:
        if event.what in ("ended", "ended again"):
            endings[event.run].append(event)
    rows = Counter(row.run for row in facts.written)
    commits = Counter(event.run for event in facts.events if event.what == "committed")
    for run in facts.runs:
        ended = [(event.what, event.outcome) for event in endings[run.id]]
        # One that was found dead may add that it was not, when it hears of it.
        once = len(ended) == 1 or ended == [("ended", "abandoned"), ("ended again", "lost_lease")]
        if run.outcome == "running" or (run.fence is not None and not once):
            text = f"run {run.id} of {run.job} is {run.outcome}, and ended so: {ended}"
            yield Finding("runs", text, _of_run(facts, run.id))
        if run.items != rows[run.id] or run.batches != commits[run.id]:
            text = (
                f"run {run.id} of {run.job} counts {run.items} items in {run.batches} batches; there are "
                f"{rows[run.id]} rows of it, and {commits[run.id]} batches were committed"
            )
            yield Finding("runs", text, _of_run(facts, run.id))
    for run_id in sorted(set(rows) - {run.id for run in facts.runs}):
        yield Finding("runs", f"{rows[run_id]} rows are of run {run_id}, which is not there")


def _endings(facts: Facts) -> Iterator[Finding]:
    faults = [line for line in facts.history if line.what == "fault"]
    runs = {run.id: run for run in facts.runs}
    taken = _taken(facts)
    for line in [line for line in facts.history if line.what == "ended"]:
        run = None if line.run is None else runs.get(line.run)
        error = None if line.error is None else line.error.split(":")[0]
        told = (
            [f"a run of {line.job} raised {line.error}"]
            if error and not _is_explained(line, error, faults, facts)
            else []
        )
        if error == "LeaseLostError" and run is not None and run.id not in taken:
            told.append(f"run {run.id} of {line.job} lost its lease, which nobody had taken: {line.error}")
        outcome = "not there" if run is None else run.outcome
        if line.run is not None and not _fits(line.note, error, outcome):
            told.append(f"run {line.run} of {line.job} was told that it ended {line.note}, and is {outcome}")
        for text in told:
            about = [each for each in facts.history if (each.run and each.run == line.run) or each is line]
            yield Finding("endings", text, about[-_SHOWN:])


def _is_explained(line: Line, error: str, faults: Sequence[Line], facts: Facts) -> bool:
    if error in _SIGNALS and line.at > facts.healed:
        return True  # the round is over
    beginnings = tuple(EXPLAINED.get(error, ()))
    return any(fault.note.startswith(beginnings) for fault in faults if fault.at <= line.at + _SEEN_LATE)


def _taken(facts: Facts) -> set[int]:
    """The runs before whose end somebody got a higher fence of their slot, or released it, which raises the fence."""
    ends: dict[int | None, int] = {}
    raised: dict[tuple[str, int | None], list[Event]] = defaultdict(list)
    for event in facts.events:
        if event.what in ("ended", "ended again"):
            ends[event.run] = event.id
        elif event.what == "acquired":
            raised[event.job, event.slot].append(event)
    return {
        run.id
        for run in facts.runs
        if any(
            each.id < ends.get(run.id, 0) and (each.fence or 0) > (run.fence or 0) for each in raised[run.job, run.slot]
        )
    }


def _fits(told: str, error: str | None, outcome: str) -> bool:
    """What a run was told of its end, and what its row says. Who was taken for dead need not have been told."""
    if told in _WELL or told == "busy":
        return outcome == told
    if outcome in ("abandoned", "lost_lease") or (told == "running" and error in _SIGNALS):
        return True
    # It had ended otherwise before, and the answer was lost.
    return told == outcome or (outcome in _WELL and (error in _LOST or error in _SIGNALS))


# ── what is done ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _watermarks(facts: Facts) -> Iterator[Finding]:
    for job, kind in facts.kinds.items():
        keys = {row.key for row in facts.written if row.job == job}
        position = facts.watermarks.get(job)
        if kind.of == "rows":
            yield from _of_rows(facts, job, keys, position)
        elif kind.of == "time":
            yield from _of_time(facts, job, kind, keys, position)


def _of_rows(facts: Facts, job: str, keys: set[str], position: Mapping[str, str] | None) -> Iterator[Finding]:
    reached = (-1, -1) if position is None else (int(position["xid"]), int(position["key"]))
    left = [key for xid, key in facts.source if (xid, int(key)) > reached and key not in keys]
    if left:
        text = f"{job}: {len(left)} rows were left undone in the end, from {left[0]} on"
        yield Finding("watermark", text, _about(facts, job=job, key=left[0]))
    for xid, key in facts.source:
        is_before = (xid, int(key)) <= reached
        if is_before and key not in keys:
            yield Finding(
                "watermark", f"{job}: {key} is lost, the watermark is past it", _about(facts, job=job, key=key)
            )
        elif key in keys and not is_before:
            text = f"{job}: {key} is done, and the watermark at {position} is not past it"
            yield Finding("watermark", text, _about(facts, job=job, key=key))
    for key in sorted(keys - {key for _, key in facts.source}):
        yield Finding(
            "watermark", f"{job}: {key} is done, and was never in the source", _about(facts, job=job, key=key)
        )


def _of_time(
    facts: Facts, job: str, kind: Kind, keys: set[str], position: Mapping[str, str] | None
) -> Iterator[Finding]:
    windows = sorted((*map(datetime.fromisoformat, key.split("/")), key) for key in keys)
    reached = BEGAN_AT
    for since, until, key in windows:
        if since != reached:
            fault = "begins before the one before it ends" if since < reached else "leaves a gap"
            text = f"{job}: the window {key} {fault}, at {reached.isoformat()}"
            yield Finding("watermark", text, _about(facts, job=job, key=key))
        if kind.length is not None and until - since != kind.length:
            text = f"{job}: the window {key} is {until - since} long, and not {kind.length}"
            yield Finding("watermark", text, _about(facts, job=job, key=key))
        reached = until
    at = BEGAN_AT if position is None else datetime.fromisoformat(position["until"])
    if at != reached:
        yield Finding("watermark", f"{job}: the watermark is at {at.isoformat()}, done is up to {reached.isoformat()}")
    # In order, too: in that of the transactions, of which one follows the other.
    order = [row for row in sorted(facts.written, key=lambda row: row.xid) if row.job == job]
    for before, after in pairwise(order):
        if after.key <= before.key:
            yield Finding(
                "watermark",
                f"{job}: {after.key} was done after {before.key}",
                _about(facts, before.attempt, after.attempt),
            )


def _queue(facts: Facts) -> Iterator[Finding]:
    for job in [job for job, kind in facts.kinds.items() if kind.of == "queue"]:
        charged: Counter[str] = Counter()
        for line in [line for line in facts.history if line.job == job]:
            if line.what == "charged":
                charged[line.keys[0]] += 1
            elif line.what == "acknowledged" and len(line.keys) == 1:
                charged[line.keys[0]] -= 1
        done = {row.key for row in facts.written if row.job == job}
        for key, item in facts.items.items():
            told = _of_item(key, item, key in done, charged[key])
            if told is not None:
                yield Finding("queue", f"{job}: {key} {told}", _about(facts, job=job, key=key))
        for key in sorted(done - set(facts.items)):
            yield Finding("queue", f"{job}: {key} is done, and was never in the queue", _about(facts, job=job, key=key))


def _of_item(key: str, item: Item, is_done: bool, charged: int) -> str | None:
    """`charged`: attempts at it alone that were committed beforehand, and not followed by a word."""
    if item.is_pending and is_done:
        return "is done, and says that it is pending"
    if not item.is_pending and not is_done:
        return "says that it is done, and its work is not there"
    if item.is_pending and not item.is_parked:
        return f"was left undone, and is not parked ({item})"
    if item.is_pending and not is_bad(key) and charged < ATTEMPTS:
        return f"is parked, and was worked on alone without an answer {charged} times ({item})"
    if not item.is_pending and is_bad(key):
        return "always fails, and is done"
    return None


# ── whether it gets on ───────────────────────────────────────────────────────────────────────────────────────────────


def _gaps(facts: Facts) -> Iterator[tuple[str, float, float]]:
    """Job, and from when to when it did not get on though it could have."""
    began = facts.history[0].at if facts.history else 0.0
    steps = {job: [began] for job in facts.kinds}
    for line in facts.history:
        if _is_well(line) and line.job in steps:
            steps[line.job].append(line.at)
    for job, times in steps.items():
        for since, until in pairwise([*times, *(line.at for line in facts.history[-1:])]):
            # Counted anew from the end of whatever kept it from working.
            ends = [end for start, end in facts.impaired if start < until and since < end]
            since = min(until, max([since, *ends]))
            yield job, since, until


def resumed(facts: Facts) -> float:
    """Seconds after the last fault was undone until every job had got on."""
    firsts = dict.fromkeys(facts.kinds, facts.history[-1].at) if facts.history else {}
    for line in reversed(facts.history):
        if line.at > facts.healed and _is_well(line):
            firsts[line.job] = line.at
    return max(firsts.values(), default=facts.healed) - facts.healed


def _is_well(line: Line) -> bool:
    return line.what == "acknowledged" or (line.what == "ended" and line.note in ("succeeded", "partial"))


def longest_gap(facts: Facts) -> float:
    return max((until - since for _, since, until in _gaps(facts)), default=0.0)


def _progress(facts: Facts, bound: float) -> Iterator[Finding]:
    for job, since, until in _gaps(facts):
        if until - since > bound:
            lines = [line for line in facts.history if line.at <= until and line.at >= since and line.job == job]
            text = f"{job} did not get on for {until - since:.1f} s from {since:.3f} on; the bound is {bound:g} s"
            yield Finding("progress", text, lines[-3 * _SHOWN :])
    for job in facts.kinds:
        if facts.history and not any(
            line.job == job and line.at > facts.healed and _is_well(line) for line in facts.history
        ):
            yield Finding("progress", f"{job} did not get on any more after the last fault")


def _invariants(facts: Facts) -> Iterator[Finding]:
    for name, rows in facts.broken.items():
        yield Finding("invariants", f"{name} does not hold: {list(rows)[:3]}")
