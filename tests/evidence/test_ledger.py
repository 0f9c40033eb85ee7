"""What sittings have found is kept, added to, and told as it is."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.evidence.chaos import ledger
from tests.evidence.chaos.__main__ import main
from tests.evidence.chaos.checker import Finding
from tests.evidence.chaos.ledger import Sitting
from tests.evidence.chaos.rounds import Judged


def judged(*findings: Finding, is_of_dagster: bool = False) -> Judged:
    return Judged(
        "7/0",
        list(findings),
        Counter({"kill": 150, "stop": 50}),
        is_of_dagster=is_of_dagster,
        lines=Counter({"acknowledged": 600, "failed": 3}),
        outcomes=Counter({"succeeded": 40}),
        rows=6_000,
        unknown=5,
        unknown_done=2,
        slowest=4.5,
        seconds=30.0,
    )


def sitting(*rounds: Judged) -> Sitting:
    made = Sitting(7, "2026-11-30 12:00Z", {"PostgreSQL": "18.1"}, "0123456789abcdef and changes", {"network": "none"})
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
    assert "- seed 7, network: none" in told
    assert "| 7 | 2026-11-30 12:00Z | `0123456789ab` and changes |" in told
    assert "## Findings" not in told


def test_what_never_struck_is_told_too_and_where_nothing_was_done_to_dagster() -> None:
    told = ledger.report([sitting(judged())])
    assert "| cut before the message is sent | 0 |" in told
    assert "| kill a daemon | 0 |" in told
    assert "- seed 7, dagster: nothing was done to its processes" in told


def test_rounds_with_a_dagster_have_a_bound_of_their_own() -> None:
    told = ledger.report([sitting(judged(), judged(is_of_dagster=True))])
    assert "| 2, of which 1 had a Dagster at work |" in told
    assert "(allowed: 30 s) | 4.5 s |" in told
    assert "(allowed: 60 s) | 4.5 s |" in told
    assert "dagster: nothing" not in told


def test_a_seed_is_not_judged_twice_at_one_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "chaos.json"
    monkeypatch.setattr(ledger, "commit", lambda: "0123456789abcdef and changes")
    ledger.save(file, [sitting(judged())])
    monkeypatch.setattr(sys, "argv", ["chaos", "--seed", "7", "--state", str(file)])
    with pytest.raises(SystemExit):
        main()
    assert "seed 7 was judged at this commit before" in capsys.readouterr().err


def test_the_report_of_a_loss_has_no_bound() -> None:
    lost = Finding("writes", "worker.1 of copy was acknowledged; lost are ['2']")
    told = ledger.report([sitting(judged(lost, Finding("twice", "copy: 1 was done 2 times")))])
    assert "| **acknowledged writes lost** | **1** |" in told
    assert "| **done twice** | **1** |" in told
    assert "95 %" not in told
    assert "round 7/0: writes: worker.1 of copy was acknowledged; lost are ['2']" in told
