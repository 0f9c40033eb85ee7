"""The judge of the chaos tests is judged: a good history passes, and each way in which it can be bad is found."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.evidence.chaos import checker, history
from tests.evidence.chaos.checker import Event, Facts, Item, Kind, RunRow, Written
from tests.evidence.chaos.history import Line, Recorder
from tests.evidence.chaos.jobs import ATTEMPTS, BEGAN_AT

MINUTE = timedelta(minutes=1)


def window(number: int, length: timedelta = MINUTE) -> str:
    since = BEGAN_AT + number * MINUTE
    return f"{since.isoformat()}/{(since + length).isoformat()}"


class Story:
    """Batches that are committed one after another, each by a run of its own, as workers and database would tell it."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self.written: list[Written] = []
        self.events: list[Event] = []
        self.runs: list[RunRow] = []

    def batch(self, job: str, *keys: str, heard: str | None = "acknowledged", is_there: bool = True) -> str:
        """`heard`: what the worker was told; None: nothing."""
        run = len(self.runs) + 1
        attempt, fence, lease_id = f"worker.{run}", run, f"lease {run}"
        told: dict[str, Any] = {
            "job": job, "run": run, "slot": 0, "fence": fence, "lease_id": lease_id, "batch": 1, "attempt": attempt,
            "keys": keys,
        }  # fmt: skip
        self._say("invoked", **told)
        if heard is not None:
            self._say(heard, **told)
        self._happen("acquired", job, None, fence, lease_id)
        if is_there:
            self._happen("committed", job, run, fence, None)
            self.written += [Written(job, key, attempt, run, fence, 1, xid=len(self.events)) for key in keys]
        self._happen("ended", job, run, None, None, "succeeded")
        self._say("ended", job=job, run=run, note="succeeded")
        self.runs.append(RunRow(run, job, 0, "succeeded", fence, len(keys) * is_there, int(is_there)))
        return attempt

    def _say(self, what: str, **told: Any) -> None:
        self.lines.append(Line(float(len(self.lines)), what, who="worker", **told))

    def _happen(
        self, what: str, job: str, run: int | None, fence: int | None, lease_id: str | None, outcome: str | None = None
    ) -> None:
        number = len(self.events) + 1
        self.events.append(Event(number, what, job, 0, run, fence, lease_id, outcome, xid=number))

    def facts(self, kind: Kind, **given: Any) -> Facts:
        return Facts(
            self.lines,
            {line.job: kind for line in self.lines},
            self.written,
            self.events,
            self.runs,
            healed=1.0,
            **given,
        )


def rows() -> Facts:
    story = Story()
    story.batch("copy", "1", "2")
    story.batch("copy", "3", heard=None)
    story.batch("copy", "4", heard=None, is_there=False)
    story.batch("copy", "4", "5")
    source = [(10, "1"), (10, "2"), (11, "3"), (12, "4"), (12, "5")]
    return story.facts(Kind("rows"), source=source, watermarks={"copy": {"xid": "12", "key": "5"}})


def hours(*keys: str) -> Facts:
    story = Story()
    for key in keys:
        story.batch("intervals", key)
    until = keys[-1].split("/")[1]
    return story.facts(Kind("time", MINUTE), watermarks={"intervals": {"until": until}})


def queue() -> Facts:
    story = Story()
    story.batch("queue", "1", "2")
    items = {"1": Item(False), "2": Item(False), "97": Item(True, ATTEMPTS, True, "it is bad")}
    return story.facts(Kind("queue"), items=items)


def found(facts: Facts, bound: float = 100.0) -> dict[str, str]:
    return {finding.rule: finding.text for finding in checker.check(facts, bound=bound)}


@pytest.mark.parametrize("facts", [rows(), hours(window(0), window(1)), queue(), Facts()])
def test_a_good_history_passes(facts: Facts) -> None:
    assert checker.check(facts, bound=100) == []


def test_what_was_not_heard_is_unknown_and_may_be_there_or_not() -> None:
    known = checker.verdicts(rows())
    assert (known.acknowledged, known.unknown) == ({"worker.1", "worker.4"}, {"worker.2", "worker.3"})


# ── what was written ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_acknowledged_write_that_is_lost_is_found_with_its_lines() -> None:
    facts = rows()
    finding = checker.check(replace(facts, written=[row for row in facts.written if row.key != "2"]), bound=100)[0]
    assert (finding.rule, finding.text) == ("writes", "worker.1 of copy was acknowledged; lost are ['2']")
    assert [line.what for line in finding.lines] == ["invoked", "acknowledged"]
    assert "invoked who=worker job=copy run=1" in str(finding)


def test_a_write_that_was_told_to_have_failed_and_is_there_is_found() -> None:
    story = Story()
    story.batch("copy", "1", heard="failed")
    facts = story.facts(Kind("rows"), source=[(1, "1")], watermarks={"copy": {"xid": "1", "key": "1"}})
    assert found(facts) == {"writes": "worker.1 of copy was told that it failed, and is there with ['1']"}


def test_a_write_that_nobody_invoked_is_found() -> None:
    facts = rows()
    lines = [line for line in facts.history if line.attempt != "worker.2"]
    assert found(replace(facts, history=lines)) == {"writes": "worker.2 was never invoked, and is there with ['3']"}


def test_a_write_that_is_there_in_part_is_found_though_nothing_was_heard_of_it() -> None:
    story = Story()
    story.batch("copy", "1", "2", heard=None)
    story.written.pop()
    facts = story.facts(Kind("rows"), source=[(1, "1")], watermarks={"copy": {"xid": "1", "key": "1"}})
    assert found(facts)["writes"] == "worker.1 of copy is there in part: ['2'] are not"


def test_what_is_done_twice_is_found() -> None:
    story = Story()
    story.batch("copy", "1", heard=None)
    story.batch("copy", "1")
    facts = story.facts(Kind("rows"), source=[(1, "1")], watermarks={"copy": {"xid": "1", "key": "1"}})
    told = "copy: 1 was done 2 times: worker.1 (run 1, fence 1), worker.2 (run 2, fence 2)"
    assert found(facts) == {"twice": told}


# ── order, fences, runs ──────────────────────────────────────────────────────────────────────────────────────────────


def test_a_commit_under_an_older_fence_is_found() -> None:
    facts = rows()
    events = [
        replace(event, fence=5) if (event.what, event.run) == ("committed", 1) else event for event in facts.events
    ]
    written = [replace(row, fence=5) if row.run == 1 else row for row in facts.written]
    assert found(replace(facts, events=events, written=written)) == {
        "commits": "copy, slot 0: fence 2 committed after fence 5"
    }


def test_a_write_outside_of_a_batch_is_found() -> None:
    facts = rows()
    written = [replace(row, xid=99) if row.key == "3" else row for row in facts.written]
    assert found(replace(facts, written=written)) == {
        "commits": "copy: 3 was written by a transaction that committed no batch"
    }


def test_a_batch_that_another_run_committed_is_found() -> None:
    facts = rows()
    written = [replace(row, fence=9) if row.key == "3" else row for row in facts.written]
    told = "copy: 3 was handed out to run 2 with fence 9, and committed by run 2 with fence 2"
    assert found(replace(facts, written=written)) == {"commits": told}


def test_a_fence_and_a_lease_id_that_are_granted_twice_are_found() -> None:
    facts = rows()
    again = [
        replace(event, fence=1) if event.fence == 2 and event.what == "acquired" else event for event in facts.events
    ]
    assert found(replace(facts, events=again)) == {"fences": "copy, slot 0: fence 1 was handed out 2 times"}
    again = [replace(event, lease_id="lease 1") if event.lease_id == "lease 2" else event for event in facts.events]
    assert found(replace(facts, events=again)) == {"fences": "the lease id lease 1 was granted 2 times"}


def test_a_fence_that_two_runs_were_handed_is_found() -> None:
    facts = rows()
    lines = [replace(line, fence=1) if line.run == 2 else line for line in facts.history]
    assert found(replace(facts, history=lines)) == {"fences": "copy, slot 0: fence 1 was handed to the runs ['1', '2']"}


def test_a_run_that_never_ended_and_one_that_ended_twice_are_found() -> None:
    facts = rows()
    runs = [replace(run, outcome="running") if run.id == 2 else run for run in facts.runs]
    told = "run 2 of copy is running, and ended so: [('ended', 'succeeded')]"
    assert found(replace(facts, runs=runs))["runs"] == told
    again = replace(facts.events[-1], what="ended again")
    assert "runs" in found(replace(facts, events=[*facts.events, again]))


def test_a_run_that_was_found_dead_may_add_that_it_lost_its_lease() -> None:
    facts = rows()
    dead = [
        replace(event, outcome="abandoned") if (event.what, event.run) == ("ended", 2) else event
        for event in facts.events
    ]
    heard = replace(dead[-1], what="ended again", run=2, outcome="lost_lease")
    assert found(replace(facts, events=[*dead, heard])) == {}


def test_items_that_are_not_the_rows_are_found() -> None:
    facts = rows()
    runs = [replace(run, items=7) if run.id == 1 else run for run in facts.runs]
    told = "run 1 of copy counts 7 items in 1 batches; there are 2 rows of it, and 1 batches were committed"
    assert found(replace(facts, runs=runs)) == {"runs": told}


def test_an_error_that_no_fault_explains_is_found() -> None:
    facts = rows()
    ended = Line(9.0, "ended", job="copy", note="failed", error="ValueError: too many values to unpack")
    assert found(replace(facts, history=[*facts.history, ended])) == {
        "endings": "a run of copy raised ValueError: too many values to unpack"
    }
    for told, fault in (
        ("AdminShutdown: terminating connection", "terminate backend 7"),
        ("GafferError: the process that started this run is gone", "kill the run of a step working"),
        ("BatchEndedError: took too long", "stop engine-1"),
        ("ClockSkewError: 11 minutes apart", "database's clock 0:11:00"),
        ("LeaseLostError: the answer of the lease was lost", "cut before the message is sent acquire"),
    ):
        lines = [*facts.history, replace(ended, error=told)]
        assert found(replace(facts, history=lines)) == {"endings": f"a run of copy raised {told}"}
        assert found(replace(facts, history=[Line(0.0, "fault", note=fault), *lines])) == {}
        late = Line(60.0, "fault", note=fault)
        assert "endings" in found(replace(facts, history=[*lines, late]))


def test_a_signal_is_explained_by_the_end_of_the_round() -> None:
    facts = rows()
    ended = Line(9.0, "ended", job="copy", error="Interrupted: signal 15")
    assert found(replace(facts, history=[*facts.history, ended])) == {}
    early = replace(facts, history=[*facts.history, ended], healed=9.5)
    assert found(early)["endings"] == "a run of copy raised Interrupted: signal 15"


def lost(outcome: str, *, fence: int, before: bool = True) -> Facts:
    """A run of fence 5 was told that its lease is lost; fence 6 was handed out in its slot, before its end or after."""
    facts = rows()
    error = "LeaseLostError: fence 5 is no longer current"
    taken, ended = (
        Event(100, "acquired", "copy", 0, None, fence, "lease 6", None, 100),
        Event(101, "ended", "copy", 0, 5, None, None, outcome, 101),
    )
    return replace(
        facts,
        history=[
            Line(0.0, "fault", note="release fence 5"),
            *facts.history,
            Line(9.0, "ended", job="copy", run=5, note="lost_lease", error=error),
            Line(9.5, "ended", job="copy", note="succeeded"),
        ],
        runs=[*facts.runs, RunRow(5, "copy", 0, outcome, 5, 0, 0)],
        events=[*facts.events, taken if before else replace(taken, id=102), ended],
    )


def test_a_lease_that_is_lost_though_nobody_took_it_is_found() -> None:
    assert found(lost("abandoned", fence=6)) == {}
    told = "run 5 of copy lost its lease, which nobody had taken: LeaseLostError: fence 5 is no longer current"
    assert found(lost("lost_lease", fence=5)) == {"endings": told}
    assert found(lost("lost_lease", fence=6, before=False)) == {"endings": told}


def test_a_run_that_was_told_to_have_lost_its_lease_and_has_succeeded_is_found() -> None:
    assert found(lost("succeeded", fence=6)) == {
        "endings": "run 5 of copy was told that it ended lost_lease, and is succeeded"
    }


def test_an_end_whose_answer_was_lost_may_be_better_than_was_told() -> None:
    facts = rows()
    lines = [
        replace(line, note="failed", error="AdminShutdown: the end") if (line.what, line.run) == ("ended", 2) else line
        for line in facts.history
    ]
    assert found(replace(facts, history=[Line(0.0, "fault", note="terminate"), *lines])) == {}


def test_an_ending_that_is_lost_is_found() -> None:
    facts = rows()
    runs = [replace(run, outcome="abandoned") if run.id == 1 else run for run in facts.runs]
    told = "run 1 of copy was told that it ended succeeded, and is abandoned"
    assert found(replace(facts, runs=runs)) == {"endings": told}


# ── what is done ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_row_behind_the_watermark_that_was_not_done_is_found() -> None:
    facts = rows()
    assert found(replace(facts, source=[*facts.source, (9, "7")])) == {
        "watermark": "copy: 7 is lost, the watermark is past it"
    }


def test_a_row_beyond_the_watermark_is_found_whether_it_is_done_or_not() -> None:
    facts = rows()
    assert found(replace(facts, source=[*facts.source, (13, "6")])) == {
        "watermark": "copy: 1 rows were left undone in the end, from 6 on"
    }
    behind = replace(facts, watermarks={"copy": {"xid": "12", "key": "4"}})
    assert "the watermark at" in found(behind)["watermark"]


def test_a_row_that_was_never_there_is_found() -> None:
    facts = rows()
    assert found(replace(facts, source=facts.source[:-1])) == {
        "watermark": "copy: 5 is done, and was never in the source"
    }


def test_a_gap_and_an_overlap_of_windows_are_found() -> None:
    assert "leaves a gap" in found(hours(window(0), window(2)))["watermark"]
    assert "begins before the one before it ends" in found(hours(window(0, 2 * MINUTE), window(1)))["watermark"]
    assert "0:02:00 long" in found(hours(window(0, 2 * MINUTE), window(2)))["watermark"]


def test_windows_out_of_order_and_a_watermark_elsewhere_are_found() -> None:
    facts = hours(window(0), window(1))
    assert "was done after" in found(replace(hours(window(1), window(0)), watermarks=facts.watermarks))["watermark"]
    assert "the watermark is at" in found(replace(facts, watermarks={"intervals": None}))["watermark"]


@pytest.mark.parametrize(
    ("key", "item", "told"),
    [
        ("1", Item(True), "1 is done, and says that it is pending"),
        ("3", Item(False), "3 says that it is done, and its work is not there"),
        ("3", Item(True), "3 was left undone, and is not parked"),
        ("3", Item(True, ATTEMPTS, True), "3 is parked, and was worked on alone without an answer 0 times"),
    ],
)
def test_a_row_of_the_queue_that_is_not_what_it_says_is_found(key: str, item: Item, told: str) -> None:
    facts = queue()
    assert told in found(replace(facts, items={**facts.items, key: item}))["queue"]


def test_a_row_is_parked_for_cause_where_its_process_died_each_time() -> None:
    facts = queue()
    charged = [Line(0.5, "charged", job="queue", keys=("3",)) for _ in range(ATTEMPTS)]
    parked = replace(facts, items={**facts.items, "3": Item(True, 3, True)})
    assert found(replace(parked, history=[*facts.history, *charged])) == {}
    # The rows of another job have the same numbers.
    heard = [Line(0.6, "acknowledged", job="copy", keys=("3",))]
    assert found(replace(parked, history=[*facts.history, *charged, *heard])) == {}
    elsewhere = [replace(line, job="copy") for line in charged]
    assert "queue" in found(replace(parked, history=[*facts.history, *elsewhere]))


# ── progress, and the rest ───────────────────────────────────────────────────────────────────────────────────────────


def test_a_job_that_does_not_get_on_is_found_unless_it_could_not() -> None:
    facts = rows()
    lines = [replace(line, at=line.at + (50 if line.run == 4 else 0)) for line in facts.history]
    late = replace(facts, history=lines)
    assert "copy did not get on for 5" in found(late, bound=20)["progress"]
    assert found(replace(late, impaired=[(6.0, 50.0)]), bound=20) == {}
    assert checker.longest_gap(replace(late, impaired=[(6.0, 50.0)])) < 10


def test_a_job_that_does_not_get_on_up_to_the_end_is_found() -> None:
    facts = rows()
    busy = replace(facts, history=[*facts.history, Line(60.0, "ended", job="copy", note="busy")])
    assert "copy did not get on for 5" in found(busy, bound=20)["progress"]


def test_a_job_that_gets_nothing_done_any_more_is_found() -> None:
    told = {"progress": "copy did not get on any more after the last fault"}
    assert found(replace(rows(), healed=1_000.0)) == told
    facts = rows()
    failing = Line(11.5, "ended", job="copy", note="busy")
    assert found(replace(facts, history=[*facts.history, failing], healed=11.2)) == told


def test_how_soon_every_job_got_on_is_told() -> None:
    facts = rows()
    assert checker.resumed(replace(facts, healed=0.5)) == pytest.approx(0.5)


def test_an_invariant_that_does_not_hold_is_found() -> None:
    facts = replace(rows(), broken={"no lease is taken": [("copy", 0)]})
    assert found(facts) == {"invariants": "no lease is taken does not hold: [('copy', 0)]"}


def test_what_a_worker_wrote_is_read_again_in_the_order_of_time(tmp_path: Path) -> None:
    one, other = Recorder(tmp_path, "one"), Recorder(tmp_path, "other")
    one.write("invoked", job="copy", keys=["1", "2"], attempt="one.1")
    other.write("invoked", job="copy", keys=["3"], attempt="other.1")
    one.write("acknowledged", job="copy", keys=["1", "2"], attempt="one.1")
    read = history.read(tmp_path)
    assert [(line.who, line.what, line.keys) for line in read] == [
        ("one", "invoked", ("1", "2")),
        ("other", "invoked", ("3",)),
        ("one", "acknowledged", ("1", "2")),
    ]
