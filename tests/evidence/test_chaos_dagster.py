"""Chaos with a real Dagster at work. With GAFFER_CHAOS_DAGSTER=1 only, since each of Dagster's processes takes seconds
to start: a round of few faults, and a broken protocol that is put through the same. `./dev chaos` has such rounds among
the others, with two daemons.

GAFFER_CHAOS_DAGSTER_FAULTS sets how many, GAFFER_CHAOS_DAGSTER_DAEMONS how many daemons are at work, to which something
is done as well.
GAFFER_CHAOS_SEED repeats the choices (not the timing) of an earlier run.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path

import pytest

from gaffer_dagster.testing import Databases
from tests.evidence.chaos import broken, faults, rounds, statuses
from tests.evidence.chaos.history import Line
from tests.evidence.chaos.scene import Gear
from tests.evidence.chaos.statuses import DagsterRun, Row
from tests.support.faults import say

SEED = int(os.environ.get("GAFFER_CHAOS_SEED", 0)) or random.SystemRandom().randrange(1, 1_000_000)
FAULTS = int(os.environ.get("GAFFER_CHAOS_DAGSTER_FAULTS", 3))
DAEMONS = int(os.environ.get("GAFFER_CHAOS_DAGSTER_DAEMONS", 0))
long = pytest.mark.skipif("GAFFER_CHAOS_DAGSTER" not in os.environ, reason="takes minutes: GAFFER_CHAOS_DAGSTER=1")
_ORPHANED = "kill the run of a step, stop the step"


@long
@pytest.mark.timeout(900)
def test_whatever_happens_to_dagster_no_promise_is_broken(made: Gear, databases: Databases, tmp_path: Path) -> None:
    say(f"GAFFER_CHAOS_SEED={SEED} GAFFER_CHAOS_DAGSTER_FAULTS={FAULTS} GAFFER_CHAOS_DAGSTER_DAEMONS={DAEMONS}")
    of_dagster = {name: fault.weight for name, fault in faults.TABLE.items() if fault.needs == "dagster"}
    weights = {name: weight for name, weight in of_dagster.items() if DAEMONS or not name.endswith("daemon")}
    judged = rounds.play(
        made, databases, tmp_path / "round", f"{SEED}/dagster", FAULTS, weights=weights, daemons=DAEMONS, rate=2
    )
    say(judged.summary())
    assert judged.faults.total() >= FAULTS
    assert not judged.findings, "\n".join(map(str, judged.findings[:10]))


@long
@pytest.mark.timeout(900)
def test_a_step_that_outlives_its_run_and_its_lease_is_caught_where_only_the_time_is_asked(
    made: Gear, databases: Databases, tmp_path: Path
) -> None:
    judged = rounds.play(
        made, databases, tmp_path / "round", f"{SEED}/orphaned", 20, weights={_ORPHANED: 1}, only="copy",
        variant="time-only lease", enough=broken.is_twice, daemons=0,
    )  # fmt: skip
    say(judged.summary())
    assert "twice" in {finding.rule for finding in judged.findings}, f"the judge does not see it: {judged.findings}"


# ── what is judged of Dagster's statuses ─────────────────────────────────────────────────────────────────────────────

_ACKNOWLEDGED = Line(1.0, "acknowledged", job="copy", run=7, keys=("1", "2"))
_RUN = DagsterRun("a", "SUCCESS", ((7, 2),))
_ROW = Row(7, "copy", "a", "succeeded", 2)


def _judge(line: Line, run: DagsterRun, *rows: Row) -> list[str]:
    return [finding.text for finding in statuses.check([line], [run], rows)]


def test_statuses_that_agree_are_not_found() -> None:
    assert _judge(_ACKNOWLEDGED, _RUN, _ROW) == []
    assert _judge(replace(_ACKNOWLEDGED, what="unknown"), replace(_RUN, status="FAILURE", shown=()), _ROW) == []
    idle = replace(_ROW, outcome="busy", items=0)
    assert _judge(replace(_ACKNOWLEDGED, run=8), replace(_RUN, shown=()), idle) == []


@pytest.mark.parametrize(
    ("line", "run", "row"),
    [
        pytest.param(replace(_ACKNOWLEDGED, what="unknown"), _RUN, _ROW, id="never acknowledged"),
        pytest.param(replace(_ACKNOWLEDGED, keys=("1",)), _RUN, _ROW, id="acknowledged less"),
        pytest.param(_ACKNOWLEDGED, _RUN, replace(_ROW, outcome="lost_lease"), id="a success that was lost"),
        pytest.param(_ACKNOWLEDGED, _RUN, replace(_ROW, dagster_run="b"), id="a success without a row"),
        pytest.param(_ACKNOWLEDGED, replace(_RUN, shown=()), _ROW, id="a success that shows nothing"),
        pytest.param(_ACKNOWLEDGED, replace(_RUN, shown=((7, 3),)), _ROW, id="shows more than there is"),
        pytest.param(_ACKNOWLEDGED, replace(_RUN, status="FAILURE", shown=((7, 3),)), _ROW, id="so does a failure"),
    ],
)
def test_statuses_that_contradict_are_found(line: Line, run: DagsterRun, row: Row) -> None:
    assert _judge(line, run, row)
