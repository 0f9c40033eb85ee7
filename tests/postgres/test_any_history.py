"""Whatever is done to a job and in whichever order: its row, its runs and the ledger tell one story."""

from __future__ import annotations

import random
from datetime import datetime

import pytest

from gaffer_dagster.domain.due import EachInterval
from gaffer_dagster.domain.ledger import Disposition, Tick, ledger
from gaffer_dagster.domain.spec import JobSpec
from gaffer_dagster.engine.batch import Batch
from gaffer_dagster.store import db, history, operations
from gaffer_dagster.store.operations import Operator
from gaffer_dagster.testing import Clock
from tests.support import ticking, variants
from tests.support.ticking import DAY, HOUR, MIDNIGHT, MINUTE, BrokenError, Ticking, at, hours

ANN = Operator("ann", None)
INTERVALS = EachInterval("0 * * * *", settle="1s", start=at(0))


def specs(due: object) -> list[JobSpec]:
    """Versions of one job that follow one another, and come back."""
    given = {"due": due, "batches": 3, "batch_rows": 2, "timeout": "4m"}
    return [
        ticking.spec("0 * * * *", **given),
        ticking.spec("30 * * * *", **given),
        ticking.spec("*/20 * * * *", zone="America/New_York", **given),
        ticking.spec("0 * * * *", max_late="10m", **given),
    ]


def check(job: Ticking) -> None:
    with db.connect(job.url, application_name="test") as connection:
        record, past = job.record, history.of_job(connection, "job", MIDNIGHT - DAY)
    now = record.seen_at
    told = list(ledger(past, MIDNIGHT - DAY, now + DAY, now=now, grace=record.grace))
    covered = [tick for tick in told if tick.disposition in (Disposition.COVERED, Disposition.COVERED_LATE)]
    assert job.counted() == len(covered)
    assert record.open_tick == _open(told, record.pause), [(hours(tick.at), str(tick.disposition)) for tick in told]


def _open(told: list[Tick], pause: object) -> datetime | None:
    """The first tick that is missed; else the first to come that the pause of now will not skip."""
    missed = [tick.at for tick in told if tick.disposition is Disposition.MISSED]
    coming = [tick.at for tick in told if tick.disposition is Disposition.FUTURE]
    if pause is not None:
        coming = [tick for tick in coming if not pause.holds(tick)]  # type: ignore[attr-defined]
    return next(iter(missed or coming), None)


_DEEDS = [*["run"] * 5, "fail", "despite", "manual", *["pause", "resume", "register"] * 2, "nothing"]


def live(job: Ticking, seed: int, steps: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    versions = specs(job.spec.due)
    when = 0.0
    for step in range(steps):
        when += rng.choice([0.02, 0.1, 0.4, 1, 1, 3, 7])
        job.clock.set(at(when))
        what = rng.choice(_DEEDS)
        print(step, round(when, 2), what)
        if what in ("run", "fail", "despite", "manual"):
            trigger = "manual" if what in ("manual", "despite") else "schedule"
            fails_at = rng.choice([1, 2, 3]) if what == "fail" else 99

            def work(batch: Batch, fails_at: int = fails_at) -> None:
                if batch.number == fails_at:
                    raise BrokenError

            job.run(when, rng.choice([0, 0, 1, 9]), work=work, trigger=trigger, despite_pause=what == "despite")
        elif what in ("pause", "resume"):
            record = job.record
            with db.connect(job.url, application_name="test") as connection:
                if what == "pause":
                    hour = record.seen_at.replace(minute=0, second=0, microsecond=0)
                    until = rng.choice([None, record.seen_at + 10 * MINUTE, hour + 5 * HOUR])
                    operations.pause(connection, "job", until, record.tick_after_pause, ANN)
                else:
                    operations.resume(connection, "job", record.tick_after_pause, ANN)
        elif what == "register":
            job.register(when, rng.choice(versions))
        check(job)


@pytest.mark.parametrize("due", [ticking.ROWS, INTERVALS])
@pytest.mark.parametrize("seed", range(2))
def test_row_runs_and_ledger_agree(url: str, clock: Clock, due: object, seed: int) -> None:
    job = Ticking(url, clock, specs(due)[0])
    live(job, seed, 60)


BROKEN = {
    "each change re-bases": ("register", {"when p_still_due_at <= v_now then": "when false then"}),
    "a resume forgets": ("resume", {"then p_next_tick else": "then next_due_at else"}),
    "a pause in place of another forgets": ("pause", {"then p_next_tick else": "then next_due_at else"}),
    "a run covers, and what is due next stays": (
        "end_run",
        {"then next_due_at else p_next_due_at end": "then next_due_at else next_due_at end"},
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_protocol_would_be_caught(url: str, clock: Clock, name: str) -> None:
    variants.replace(url, *BROKEN[name])
    job = Ticking(url, clock, specs(ticking.ROWS)[0])
    with pytest.raises(AssertionError):
        live(job, 0, 60)
