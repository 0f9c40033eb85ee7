"""What sittings have found is kept, added to, and told as it is."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tests.evidence.chaos import ledger
from tests.evidence.chaos.checker import Finding
from tests.evidence.chaos.ledger import Sitting
from tests.evidence.chaos.rounds import Judged


def judged(*findings: Finding) -> Judged:
    return Judged(
        "7/0",
        list(findings),
        Counter({"kill": 150, "stop": 50}),
        Counter({"acknowledged": 600, "failed": 3}),
        Counter({"succeeded": 40}),
        rows=6_000,
        unknown=5,
        unknown_done=2,
        slowest=4.5,
        seconds=30.0,
    )


def sitting(*rounds: Judged) -> Sitting:
    made = Sitting(7, "2026-11-30 12:00Z", {"PostgreSQL": "18.1"}, {"network": "needs root"})
    for each in rounds:
        made.add(each)
    return made


def test_sittings_are_kept_and_read_again(tmp_path: Path) -> None:
    file = tmp_path / "chaos.json"
    assert ledger.load(file) == []
    ledger.save(file, [sitting(judged()), sitting(judged(), judged())])
    assert ledger.load(file) == [sitting(judged()), sitting(judged(), judged())]


def test_the_report_adds_up_and_bounds_what_was_not_found() -> None:
    told = ledger.report([sitting(judged()), sitting(judged(), judged())])
    assert "| faults | 600 |" in told
    assert "| batches of which nothing was heard | 15, of which 6 were done |" in told
    assert "| kill | 450 |" in told
    assert "below 5.0e-03, and that an acknowledged batch is lost or done twice below 1.7e-03" in told  # 3/600, 3/1800
    assert "- seed 7, network: needs root" in told
    assert "## Findings" not in told


def test_the_report_of_a_loss_has_no_bound() -> None:
    lost = Finding("writes", "worker.1 of copy was acknowledged; lost are ['2']")
    told = ledger.report([sitting(judged(lost, Finding("twice", "copy: 1 was done 2 times")))])
    assert "| **acknowledged writes lost** | **1** |" in told
    assert "| **done twice** | **1** |" in told
    assert "95 %" not in told
    assert "round 7/0: writes: worker.1 of copy was acknowledged; lost are ['2']" in told
