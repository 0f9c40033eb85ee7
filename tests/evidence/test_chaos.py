"""Chaos, in short: about a thousand faults on jobs of every kind, judged by their history; and protocols that are known
to be wrong, put through the same, which the judge must notice. The long form is `./dev chaos`.

GAFFER_CHAOS_FAULTS sets how many, GAFFER_CHAOS_SEED repeats the choices (not the timing) of an earlier run.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path

import pytest

from gaffer_dagster.testing import Databases
from tests.evidence.chaos import broken, rounds
from tests.evidence.chaos.faults import missed
from tests.evidence.chaos.jobs import of_round
from tests.evidence.chaos.rounds import Judged
from tests.evidence.chaos.scene import Gear, Scene
from tests.support import jobs
from tests.support.faults import say

SEED = int(os.environ.get("GAFFER_CHAOS_SEED", 0)) or random.SystemRandom().randrange(1, 1_000_000)
FAULTS = int(os.environ.get("GAFFER_CHAOS_FAULTS", 1_000))
_ROUNDS, _RATE = 3, 30
pytestmark = pytest.mark.timeout(400 + FAULTS)


@pytest.fixture(scope="module")
def judged(made: Gear, databases: Databases, tmp_path_factory: pytest.TempPathFactory) -> list[Judged]:
    say(f"GAFFER_CHAOS_SEED={SEED} GAFFER_CHAOS_FAULTS={FAULTS}; without {made.missing or 'nothing'}")
    found: list[Judged] = []
    for number in range(_ROUNDS):
        count = FAULTS * (number + 1) // _ROUNDS - FAULTS * number // _ROUNDS
        folder = tmp_path_factory.mktemp("rounds") / "round"
        found.append(rounds.play(made, databases, folder, f"{SEED}/{number}", count, rate=_RATE))
        say(found[-1].summary())
    return found


def test_whatever_happens_no_promise_is_broken(judged: list[Judged]) -> None:
    findings = [finding for each in judged for finding in each.findings]
    assert not findings, "\n".join(map(str, findings[:10]))


def test_all_that_can_happen_has_happened_while_every_job_was_at_work(judged: list[Judged]) -> None:
    expected, struck, batches, outcomes = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    for each in judged:
        expected += each.expected
        struck += each.faults
        batches += each.batches
        outcomes += each.outcomes
    assert not missed(expected, struck), f"expected {expected}, struck {struck}"
    assert set(batches) == {spec.name for spec in of_round(str(SEED))}, f"acknowledged: {batches}"
    assert outcomes["abandoned"] + outcomes["lost_lease"] > FAULTS // 20


def test_without_a_fault_no_run_raises_anything_and_every_job_gets_on(
    made: Gear, databases: Databases, tmp_path: Path
) -> None:
    def is_enough(scene: Scene) -> bool:
        at_work = jobs.query(scene.url, "select job from gaffer.job_runs group by job having sum(batches) > 0")
        return {job for (job,) in at_work} == {spec.name for spec in scene.specs}

    judged = rounds.play_quietly(made, databases, tmp_path / "round", f"{SEED}/quiet", is_enough)
    say(judged.summary())
    assert judged.findings == []
    assert set(judged.batches) == {spec.name for spec in of_round(str(SEED))}


@pytest.mark.parametrize("variant", broken.BROKEN)
def test_a_wrong_protocol_is_caught(variant: str, made: Gear, databases: Databases, tmp_path: Path) -> None:
    judged = broken.play(made, databases, tmp_path / "round", str(SEED), variant)
    say(f"{variant}: {judged.summary()}")
    assert broken.caught(variant, judged), f"the judge does not see it: {judged.findings}"


@pytest.mark.parametrize(
    ("variant", "fault"),
    [("bare", "stop before COMMIT"), ("bare", "cut"), ("locking check, then COMMIT", "stop before COMMIT")],
)
def test_what_they_are_made_of_is_sound(
    variant: str, fault: str, made: Gear, databases: Databases, tmp_path: Path
) -> None:
    judged = rounds.play(
        made, databases, tmp_path / "round", f"{SEED}/sound", 5, weights={fault: 1}, only="copy", variant=variant
    )
    say(f"{variant}: {judged.summary()}")
    assert judged.findings == []


def test_a_round_that_cannot_be_played_is_a_finding(made: Gear, databases: Databases, tmp_path: Path) -> None:
    def breaks(scene: Scene) -> bool:
        if scene.counts:
            raise ValueError("the round is broken")
        return False

    judged = rounds.play(made, databases, tmp_path / "round", f"{SEED}/broken", 9, weights={"kill": 1}, enough=breaks)
    assert (judged.faults.total(), [finding.rule for finding in judged.findings]) == (1, ["round"])
    assert "ValueError: the round is broken" in judged.findings[0].text
