"""One round, from an empty database to the findings."""

from __future__ import annotations

import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from typing_extensions import LiteralString

import gaffer_dagster as gd
from gaffer_dagster.domain.lease import LEASE
from gaffer_dagster.engine.run import open_run
from gaffer_dagster.testing import Databases, invariants
from tests.evidence.chaos import checker, dagsters, faults, history, jobs, statuses
from tests.evidence.chaos.checker import Facts, Finding
from tests.evidence.chaos.scene import Gear, Scene, scene
from tests.support import jobs as plain

RATE = 20.0
"""Faults a second, as far as they find a victim."""
BOUND = 30.0
"""Seconds in which every job must have got on, whatever was done to it."""
BOUND_WITH_DAGSTER = 2 * BOUND
"""The same where Dagster's processes take the processors from those that are judged."""
_PATIENCE, _PATIENCE_WITH_DAGSTER = 120.0, 300.0


@dataclass
class Judged:
    """What came of a round. `expected`: how many faults of a kind were to be expected; `batches`: that were
    acknowledged, of each job; `resumed`: how many seconds after the last fault every job had got on."""

    seed: str
    findings: list[Finding]
    faults: Counter[str]
    expected: Counter[str] = field(default_factory=Counter[str])
    batches: Counter[str] = field(default_factory=Counter[str])
    is_of_dagster: bool = False
    lines: Counter[str] = field(default_factory=Counter[str])
    outcomes: Counter[str] = field(default_factory=Counter[str])
    rows: int = 0
    unknown: int = 0
    unknown_done: int = 0
    resumed: float = 0.0
    slowest: float = 0.0
    seconds: float = 0.0

    def summary(self) -> str:
        faults = ", ".join(f"{count} {name}" for name, count in self.faults.most_common())
        runs = ", ".join(f"{count} {name}" for name, count in self.outcomes.most_common())
        return (
            f"round {self.seed}: {self.faults.total()} faults in {self.seconds:.1f} s ({faults}); {self.rows} rows in "
            f"{self.lines['acknowledged']} batches that were acknowledged, {self.lines['failed']} that failed and "
            f"{self.unknown} unknown, of which {self.unknown_done} were done; {runs}; on again after "
            f"{self.resumed:.1f} s, longest gap {self.slowest:.1f} s; {len(self.findings)} findings"
        )


def play(
    gear: Gear,
    databases: Databases,
    folder: Path,
    seed: str,
    count: int,
    *,
    weights: Mapping[str, float] | None = None,
    only: str | None = None,
    variant: str | None = None,
    enough: Callable[[Scene], bool] = lambda made: False,
    daemons: int | None = None,
    rate: float = RATE,
) -> Judged:
    """A round of so many faults, or until it is `enough`. `weights`: in place of those of the table; `daemons`: of a
    Dagster that is at work, so many; with none, whatever is launched is run at once, and nothing else is. A round that
    cannot be played to its end is judged, too: by what came in between."""
    judged = Judged(seed, [], Counter(), is_of_dagster=daemons is not None)
    try:
        with scene(gear, databases, folder, seed, only=only, variant=variant, daemons=daemons) as made:
            judged.faults = made.counts
            return _play(made, count, faults.possible(made.ways) if weights is None else weights, rate, enough)
    except Exception:
        judged.findings.append(Finding("round", traceback.format_exc()))
        return judged


def play_quietly(gear: Gear, databases: Databases, folder: Path, seed: str, enough: Callable[[Scene], bool]) -> Judged:
    """A round without any fault, until it is `enough`. The lease is as long as it is at work: here nobody is to lose
    it because the processors are busy."""
    with scene(gear, databases, folder, seed, lease=LEASE) as made:
        # No row of the queue is bad (`jobs.is_bad`), so that none waits to be tried again.
        plain.execute(made.url, "alter table item alter id set increment by 97 restart with 1")
        return _play(made, 1, {}, RATE, enough)


def _play(
    made: Scene, count: int, weights: Mapping[str, float], rate: float, enough: Callable[[Scene], bool]
) -> Judged:
    began = time.monotonic()
    for actor in made.cast:
        actor.start()
    _strike(made, count, weights, rate, enough)
    made.undo_all()
    healed_at = time.monotonic()
    patience = _PATIENCE if made.dagster is None else _PATIENCE_WITH_DAGSTER
    is_drained = _drain(made, patience)
    for actor in reversed(made.cast):
        actor.stop()
    _close(made)
    facts = _facts(made, healed_at)
    found = checker.check(facts, bound=BOUND if made.dagster is None else BOUND_WITH_DAGSTER)
    found += [Finding("actors", text) for text in made.broken]
    if not is_drained:
        found.append(Finding("progress", f"not every job did what was due within {patience:g} s after the end", ()))
    if made.dagster is not None:
        found += statuses.check(facts.history, made.dagster.runs, dagsters.rows(made.url))
    known, total = checker.verdicts(facts), sum(weights.values())
    return Judged(
        made.seed,
        found,
        made.counts,
        Counter({name: made.counts.total() * weight / total for name, weight in weights.items()}),
        Counter(line.job for line in facts.history if line.what == "acknowledged"),
        made.dagster is not None,
        Counter(line.what for line in facts.history),
        Counter(run.outcome for run in facts.runs),
        len(facts.written),
        len(known.unknown),
        len(known.unknown & {row.attempt for row in facts.written}),
        checker.resumed(facts),
        checker.longest_gap(facts),
        time.monotonic() - began,
    )


def _strike(
    made: Scene, count: int, weights: Mapping[str, float], rate: float, enough: Callable[[Scene], bool]
) -> None:
    deadline = time.monotonic() + (120 if made.dagster is None else 300) + 2 * count
    while made.counts.total() < count and not enough(made):
        assert time.monotonic() < deadline, f"only {made.counts} struck"
        if weights:
            with made.attempt():
                faults.draw(made, weights).strike(made)
        made.wait(time.monotonic() + made.chance.expovariate(rate))


def _drain(made: Scene, patience: float) -> bool:
    """Writers stop; then every job is run until it has nothing to do, also what waits to be tried again. False: that
    takes too long."""
    until = time.monotonic() + patience
    made.writers.stop()
    mark, passes = _mark(made), 0
    while time.monotonic() < until:
        made.wait(time.monotonic() + 0.1)
        if all(_has_got_on(made, spec, mark) for spec in made.specs):
            waits = _ask(made, "select from gaffer.job_item where parked_at is null limit 1")
            if passes > jobs.ATTEMPTS or not waits:
                return True
            made.move_on(timedelta(minutes=2))
            mark, passes = _mark(made), passes + 1
    return False


def _mark(made: Scene) -> dict[str, tuple[int, int]]:
    """The newest run and the number of batches of each job."""
    found = _ask(made, "select job, max(id), sum(batches)::bigint from gaffer.job_runs group by job")
    return {job: (newest, batches) for job, newest, batches in found}


def _has_got_on(made: Scene, spec: gd.JobSpec, mark: Mapping[str, tuple[int, int]]) -> bool:
    """A run that began after the mark found nothing left to do; of a job that always has more to do: it did some. Where
    runs work side by side, nobody is at it any more: one finds nothing where another has it in hand."""
    newest, batches = mark.get(spec.name, (0, 0))
    if spec.slots > 1 and _ask(
        made, "select from gaffer.job_lease where job = %s and lease_until > gaffer.clock() limit 1", spec.name
    ):
        return False
    if jobs.is_endless(spec):
        return _mark(made).get(spec.name, (0, 0))[1] > batches
    return bool(
        _ask(
            made,
            "select from gaffer.job_runs where job = %s and id > %s and outcome in ('succeeded', 'partial') limit 1",
            spec.name,
            newest,
        )
    )


def _ask(made: Scene, text: LiteralString, *params: Any) -> list[tuple[Any, ...]]:
    return made.connection().execute(text, params).fetchall()


def _close(made: Scene) -> None:
    """After the last lease is over, one run in each slot, so that whoever died is found dead."""
    made.move_on(2 * jobs.LEASE)
    for spec in made.specs:
        with ExitStack() as stack:
            for _ in range(spec.slots):
                stack.enter_context(open_run(spec, made.url, log=plain.LOG, worker_clock=made.board.now))


def _facts(made: Scene, healed_at: float) -> Facts:
    url, names = made.url, [spec.name for spec in made.specs]
    rows = [
        checker.Written(job, *row)
        for job in names
        for row in plain.query(url, f"select key, attempt, run, fence, batch, xid::text::bigint from t_{job}")
    ]
    events = plain.query(
        url, "select id, what, job, slot, run_id, fence, lease_id::text, outcome, xid::text::bigint"
        " from gaffer_testing.event order by id",
    )  # fmt: skip
    return Facts(
        history=history.read(made.folder),
        kinds={spec.name: checker.kind_of(spec) for spec in made.specs},
        written=rows,
        events=[checker.Event(*event) for event in events],
        runs=[
            checker.RunRow(*row)
            for row in plain.query(url, "select id, job, slot, outcome, fence, items, batches from gaffer.job_runs")
        ],
        watermarks=dict(plain.query(url, "select job, position from gaffer.job_watermark")),
        source=plain.query(url, "select gaffer_xid::text::bigint, id::text from source order by gaffer_xid, id"),
        items={
            key: checker.Item(is_pending, attempts, is_parked, error)
            for key, is_pending, attempts, is_parked, error in plain.query(
                url, "select item.id::text, done_at is null, coalesce(attempts, 0), parked_at is not null, error"
                " from item left join gaffer.job_item on key = item.id::text",
            )
        },
        broken=invariants.violations(url, {**invariants.INVARIANTS, **invariants.AT_REST}),
        impaired=made.impaired,
        healed=healed_at,
    )  # fmt: skip
