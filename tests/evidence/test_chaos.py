"""Chaos, in short: about a thousand faults on jobs of every kind, judged by their history; and protocols that are known
to be wrong, put through the same, which the judge must notice. The long form is `./dev chaos`.

GAFFER_CHAOS_FAULTS sets how many, GAFFER_CHAOS_SEED repeats the choices (not the timing) of an earlier run.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from gaffer_dagster.testing import Databases
from tests.evidence.chaos import rounds
from tests.evidence.chaos.scene import Gear, Scene, gear
from tests.support import jobs
from tests.support.faults import say

SEED = int(os.environ.get("GAFFER_CHAOS_SEED", 0)) or random.SystemRandom().randrange(1, 1_000_000)
FAULTS = int(os.environ.get("GAFFER_CHAOS_FAULTS", 1_000))
_ROUNDS = 4
pytestmark = pytest.mark.timeout(400 + FAULTS)

BROKEN = {
    "time-only lease": "stop before COMMIT",
    "plain SELECT, then COMMIT": "stop before COMMIT",
    "plain SELECT, then the writes": "stop before COMMIT",
    "key share, then the writes": "stop before COMMIT",
    "renewal that takes the lease back": "stop before COMMIT",
    "error means not committed": "cut",
}
"""Each with the fault that finds it soonest."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gear]:
    with gear(tmp_path_factory.mktemp("chaos")) as made:
        yield made


@pytest.fixture(scope="module")
def databases(made: Gear) -> Iterator[Databases]:
    with Databases(made.url) as databases:
        yield databases


@pytest.mark.parametrize("number", range(_ROUNDS))
def test_whatever_happens_no_promise_is_broken(number: int, made: Gear, databases: Databases, tmp_path: Path) -> None:
    say(f"GAFFER_CHAOS_SEED={SEED} GAFFER_CHAOS_FAULTS={FAULTS}; without {made.missing or 'nothing'}")
    count = FAULTS * (number + 1) // _ROUNDS - FAULTS * number // _ROUNDS
    judged = rounds.play(made, databases, tmp_path / "round", f"{SEED}/{number}", count)
    say(judged.summary())
    assert not judged.findings, "\n".join(map(str, judged.findings[:10]))
    assert judged.outcomes["abandoned"] + judged.outcomes["lost_lease"] > count // 20  # the faults struck


@pytest.mark.parametrize("variant", BROKEN)
def test_a_wrong_protocol_is_caught(variant: str, made: Gear, databases: Databases, tmp_path: Path) -> None:
    judged = _break(variant, {BROKEN[variant]: 1}, 60, made, databases, tmp_path)
    assert "twice" in {finding.rule for finding in judged.findings}, f"the judge does not see it: {judged.findings}"


def test_an_answer_before_it_is_on_disk_is_caught(made: Gear, databases: Databases, tmp_path: Path) -> None:
    judged = _break("durability is not raised", {"server crash": 1, "release": 12}, 40, made, databases, tmp_path)
    assert any("lost are" in finding.text for finding in judged.findings), f"the judge does not see it: {judged}"


@pytest.mark.parametrize("fault", sorted(set(BROKEN.values())))
def test_what_they_are_made_of_is_sound(fault: str, made: Gear, databases: Databases, tmp_path: Path) -> None:
    assert _break("bare", {fault: 1}, 10, made, databases, tmp_path).findings == []


def _break(
    variant: str, weights: dict[str, float], count: int, made: Gear, databases: Databases, tmp_path: Path
) -> rounds.Judged:
    def is_caught(scene: Scene) -> bool:
        return bool(jobs.query(scene.url, "select from t_copy group by key having count(*) > 1 limit 1"))

    judged = rounds.play(
        made, databases, tmp_path / "round", f"{SEED}/{variant}", count,
        weights=weights, only="copy", variant=variant, enough=is_caught,
    )  # fmt: skip
    say(f"{variant}: {judged.summary()}")
    return judged
