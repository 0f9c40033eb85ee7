"""Whether what Dagster says of its runs agrees with what their workers were told, and with their rows. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.evidence.chaos.checker import Finding
from tests.evidence.chaos.history import Line

WELL = {"succeeded", "partial", "capped", "busy", "paused", "late"}
"""How a run ends that Dagster calls a success."""


@dataclass(frozen=True)
class DagsterRun:
    """`shown`: the items of each run's row that a materialization in its log tells of."""

    id: str
    status: str
    shown: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Row:
    """A row of `job_runs` that a run of Dagster's has."""

    id: int
    job: str
    dagster_run: str
    outcome: str
    items: int


def check(history: Sequence[Line], runs: Sequence[DagsterRun], rows: Sequence[Row]) -> Iterator[Finding]:
    """A success acknowledged what its row says, and shows it; what was shown is there."""
    acknowledged: Counter[int | None] = Counter()
    lines: dict[int | None, list[Line]] = defaultdict(list)
    for line in history:
        lines[line.run].append(line)
        if line.what == "acknowledged":
            acknowledged[line.run] += len(line.keys)
    rows_of: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        rows_of[row.dagster_run].append(row)
    for run in runs:
        there = {row.id: row for row in rows_of[run.id]}
        for row_id, items in run.shown:
            row = there.get(row_id)
            if row is None or row.items != items or acknowledged[row_id] != items:
                text = f"run {run.id} shows {items} items of run {row_id}; acknowledged {acknowledged[row_id]}, {row}"
                yield Finding("dagster", text, lines[row_id])
        if run.status != "SUCCESS":
            continue
        # One run of Dagster's may be at work in two processes, each with a row of its own.
        well = [row for row in there.values() if row.outcome in WELL]
        if not well:
            about = [line for row_id in there for line in lines[row_id]]
            yield Finding("dagster", f"run {run.id} is a success; its rows are {list(there.values())}", about)
        shown = {row_id for row_id, _ in run.shown}
        for row in well:
            if acknowledged[row.id] != row.items:
                text = f"run {run.id} is a success with {acknowledged[row.id]} items acknowledged; its row is {row}"
                yield Finding("dagster", text, lines[row.id])
            if row.items and len(there) == 1 and row.id not in shown:
                yield Finding(
                    "dagster", f"run {run.id} is a success that shows nothing of its row {row}", lines[row.id]
                )
