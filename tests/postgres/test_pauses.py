"""Pauses: checked when a run starts, whatever Dagster's own switches say; who and why is kept."""

from __future__ import annotations

import json

import pytest

from gaffer_dagster.domain.run import Outcome
from gaffer_dagster.store import db, operations
from gaffer_dagster.store.operations import Operator
from gaffer_dagster.testing import Clock
from tests.support import jobs, protocol, ticking, variants
from tests.support.ticking import HOUR, MINUTE, Ticking, at, hours, invoke

ACTIONS = "select action, by, reason, details ->> 'until' from gaffer.operator_action order by id"


@pytest.fixture
def job(url: str, clock: Clock) -> Ticking:
    made = Ticking(url, clock, ticking.spec())
    assert made.run(0.01, 1).outcome is Outcome.SUCCEEDED
    return made


def pause(job: Ticking, when: float, *words: str) -> str:
    job.clock.set(at(when))
    return job.gaffer("pause", job.spec.name, *words)


def resume(job: Ticking, when: float, *words: str) -> str:
    job.clock.set(at(when))
    return job.gaffer("resume", job.spec.name, *words)


def test_who_and_why_is_recorded_and_shown(job: Ticking) -> None:
    assert pause(job, 0.5, "--by", "ann", "--reason", "the source is rebuilt") == "job is paused until: gaffer resume\n"
    assert "paused by ann: the source is rebuilt" in job.gaffer("status")
    told = json.loads(job.gaffer("status", "job", "--json"))
    assert (told["paused_by"], told["pause_reason"], told["paused_until"]) == ("ann", "the source is rebuilt", None)
    said = resume(job, 1.5, "--by", "bob", "--reason", "it is there")
    assert said.startswith("job goes on; due next: 2027-03-01 02:00:00Z (")
    assert "paused" not in job.gaffer("status")
    assert jobs.query(job.url, ACTIONS) == [
        ("pause", "ann", "the source is rebuilt", None),
        ("resume", "bob", "it is there", None),
    ]


def test_without_a_name_it_is_user_and_host(job: Ticking, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "carol")
    pause(job, 0.5)
    assert jobs.query(job.url, "select by from gaffer.operator_action")[0][0].startswith("carol@")
    assert jobs.query(job.url, "select pause_reason from gaffer.job") == [(None,)]


@pytest.mark.parametrize("trigger", ["schedule", "sensor", "manual", "command"])
def test_a_run_is_paused_whatever_asks_for_it(job: Ticking, trigger: str) -> None:
    pause(job, 0.5)
    record = job.run(1.01, 3, trigger=trigger)
    assert (record.outcome, record.fence, record.items, record.ticks_covered) == (Outcome.PAUSED, None, 0, None)
    assert job.record.consecutive_failures == 0
    assert jobs.query(job.url, "select wanted_at from gaffer.job") == [(None,)]


def test_despite_the_pause(job: Ticking) -> None:
    pause(job, 0.5)
    record = job.run(1.01, 3, despite_pause=True)
    assert (record.outcome, record.items) == (Outcome.SUCCEEDED, 3)
    assert job.run(1.02).outcome is Outcome.PAUSED


def test_a_run_at_work_is_not_stopped(job: Ticking) -> None:
    def work(batch: object) -> None:
        job.gaffer("pause", "job")

    assert job.run(1.01, 1, work=work).outcome is Outcome.SUCCEEDED
    assert job.run(2.01, 1).outcome is Outcome.PAUSED


@pytest.mark.parametrize(
    ("until", "end"),
    [
        ("2h", 2.5),
        ("1h30m", 2),
        ("2027-03-01T02:00Z", 2),
        ("2027-03-01T03:30+01:00", 2.5),
        ("2027-03-01T03:00", 3),
        ("2027-03-02", 24),
    ],
)
def test_a_pause_can_expire(job: Ticking, until: str, end: float) -> None:
    said = pause(job, 0.5, "--until", until)
    assert hours(job.record.paused_until) == pytest.approx(end, abs=0.01)
    assert said.startswith("job is paused until 2027-03-0")
    assert jobs.query(job.url, ACTIONS)[0][3] is not None
    assert job.run(end - 0.02, 1).outcome is Outcome.PAUSED
    record = job.run(end + 0.02, 1)
    assert (record.outcome, record.items) == (Outcome.SUCCEEDED, 2)
    assert "paused" not in job.gaffer("status")


def test_a_time_without_an_offset_is_one_of_the_jobs_zone(url: str, clock: Clock) -> None:
    job = Ticking(url, clock, ticking.spec(name="eu/job", zone="America/New_York"))
    pause(job, 0.5, "--until", "2027-03-01T00:00")
    assert hours(job.record.paused_until) == 5


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--until", "2027-02-28"], "--until '2027-02-28' is over already (it is 2027-03-01 00:30:0"),
        (["--until", "2027-03-01T00:30Z"], "is over already"),
        (["--until", "0s"], "--until '0s' is no time"),
        (["--until=-2h"], "--until '-2h' is no time"),
        (["--until", "tomorrow"], "or how long, such as 2h"),
        (["--until", "99999999d"], "is too long; leave it out"),
        (["--until", "9999999999999d"], "--until '9999999999999d' is no time"),
        (["--until", "2800000d"], "is too long; leave it out"),
        (["--until", "9999-12-31T23:59-12:00"], "--until '9999-12-31T23:59-12:00' is"),
        (["--by", " "], "--by ' ' is empty; say who does it"),
        (["--reason", "\udcff"], "write it in UTF-8"),
    ],
)
def test_what_cannot_be_meant_is_an_instruction(job: Ticking, words: list[str], said: str) -> None:
    job.clock.set(at(0.5))
    done = invoke(job.url, "pause", "job", *words)
    assert (done.exit_code, done.stdout) == (1, ""), done.output
    assert said in done.stderr
    assert jobs.query(job.url, "select paused_at from gaffer.job") == [(None,)]
    assert jobs.query(job.url, ACTIONS) == []


@pytest.mark.parametrize("words", [["pause", "nosuch"], ["resume", "nosuch"], ["rename", "nosuch", "b", "--yes"]])
def test_an_unknown_job_is_an_instruction(job: Ticking, words: list[str]) -> None:
    done = invoke(job.url, *words)
    assert (done.exit_code, done.stdout) == (1, "")
    assert "no job 'nosuch' is known to this database" in done.stderr


def test_a_job_that_was_not_paused_says_so(job: Ticking) -> None:
    assert resume(job, 0.5) == "job was not paused\n"
    assert jobs.query(job.url, ACTIONS) == []


# ── what becomes of the ticks ────────────────────────────────────────────────────────────────────────────────────────


def test_the_ticks_of_a_pause_are_not_asked_for_again(job: Ticking) -> None:
    pause(job, 0.5, "--until", "3h")
    assert job.due == 4
    job.clock.set(at(2.5))
    assert job.due == 4
    assert job.run(2.6).outcome is Outcome.PAUSED
    assert job.due == 4
    record = job.run(4.01, 5)
    assert (record.outcome, record.items, record.ticks_covered) == (Outcome.SUCCEEDED, 5, 1)
    assert job.dispositions(until=4) == ["covered", "paused", "paused", "paused", "covered"]


def test_without_an_end_no_tick_is_waited_for(job: Ticking) -> None:
    pause(job, 0.5)
    assert job.due is None
    assert job.run(1.01).outcome is Outcome.PAUSED
    assert job.due is None
    resume(job, 2.5)
    assert job.due == 3
    assert job.run(3.01).ticks_covered == 1


@pytest.mark.parametrize("wakes", [False, True])
def test_what_was_missed_before_a_pause_stays_due(job: Ticking, wakes: bool) -> None:
    pause(job, 2.5)
    assert job.due == 1
    if wakes:
        assert job.run(3.01).outcome is Outcome.PAUSED
        assert job.due == 1
    resume(job, 4.5)
    assert job.due == 1
    record = job.run(5.01, 4)
    assert (record.items, record.ticks_covered) == (4, 3)
    assert job.dispositions(until=5) == ["covered", "covered_late", "covered_late", "paused", "paused", "covered"]


def test_one_run_after_it(job: Ticking) -> None:
    """B38: never one for each tick."""
    pause(job, 0.5)
    jobs.add_rows(job.url, 9)
    resume(job, 100.5)
    assert [job.run(101.01).items, job.run(101.02).items] == [9, 0]
    assert protocol.outcomes(job.url, "job") == ["succeeded"] * 3


def test_a_tick_at_the_very_end_of_a_pause_is_due(job: Ticking) -> None:
    pause(job, 0.5, "--until", "2027-03-01T03:00Z")
    assert job.due == 3
    job.clock.set(at(5.5))  # nobody was there
    assert job.due == 3
    assert job.dispositions(until=5) == ["covered", "paused", "paused", "missed", "missed", "missed"]
    assert "due next: 2027-03-01 03:00:00Z" in resume(job, 5.6)
    assert job.due == 3
    assert job.run(5.7).ticks_covered == 3


@pytest.mark.parametrize("wakes", [False, True])
def test_a_pause_in_place_of_another_forgets_nothing_that_was_skipped(job: Ticking, wakes: bool) -> None:
    pause(job, 0.5, "--until", "10h")
    if wakes:
        job.run(1.01)
    pause(job, 1.5, "--until", "3h")
    assert job.due == 5
    assert job.dispositions(until=6)[1:] == ["paused"] + ["future"] * 5
    job.clock.set(at(6.5))
    assert job.dispositions(until=6) == ["covered", *["paused"] * 4, "missed", "missed"]
    pause(job, 6.6)  # the one before has run out, and nobody has seen it
    assert job.due == 5
    resume(job, 8.5)
    assert job.due == 5
    assert job.run(9.01).ticks_covered == 3
    assert job.counted() == job.dispositions(until=9).count("covered") + 2
    assert job.dispositions(until=9)[5:] == ["covered_late", "covered_late", "paused", "paused", "covered"]


def test_a_pause_that_covers_the_change_of_a_schedule(job: Ticking) -> None:
    pause(job, 0.5)
    job.register(2.5, ticking.spec("30 * * * *"))
    resume(job, 4.75)
    assert job.due == 5.5
    assert job.run(5.51).ticks_covered == 1


def test_a_resume_during_a_run_that_worked_despite_the_pause(job: Ticking) -> None:
    """What it looked at is covered; the tick after the resume is due."""
    pause(job, 0.5)
    job.run(2.5, 2, despite_pause=True)
    resume(job, 2.6)
    assert job.due == 3


def test_the_database_refuses_what_it_does_not_know(job: Ticking) -> None:
    with db.connect(job.url, application_name="test") as connection:
        for ask in (
            lambda: operations.pause(connection, "nosuch", None, None, Operator("ann", None)),
            lambda: operations.resume(connection, "nosuch", None, Operator("ann", None)),
        ):
            with pytest.raises(Exception, match='job "nosuch" is not registered'):
                ask()


def test_a_pause_at_a_night_of_clock_change(url: str, clock: Clock) -> None:
    """02:30 is leapt over on 14 March 2027, and 03:30 may be meant, or 01:30."""
    job = Ticking(url, clock, ticking.spec("30 2 * * *", zone="America/New_York"))
    clock.set(at(13 * 24))
    refused = invoke(url, "pause", job.spec.name, "--until", "2027-03-14T02:30")
    assert (refused.exit_code, "does not exist in America/New_York" in refused.stderr) == (1, True)
    pause(job, 13 * 24, "--until", "2027-03-14T02:30-05:00")
    assert job.record.paused_until == at(13 * 24) + 7 * HOUR + 30 * MINUTE


BROKEN = {
    "a resume that forgets what was skipped": (
        "resume",
        {"then p_next_tick else next_due_at end": "then next_due_at else next_due_at end"},
        test_without_an_end_no_tick_is_waited_for,
    ),
    "a pause that forgets what the one before skipped": (
        "pause",
        {"then p_next_tick else next_due_at end": "then next_due_at else next_due_at end"},
        lambda job: test_a_pause_in_place_of_another_forgets_nothing_that_was_skipped(job, wakes=True),
    ),
    "a paused run that skips what was missed before": (
        "acquire",
        {"next_due_at >= paused_at and next_due_at < p_next_tick": "next_due_at < p_next_tick"},
        lambda job: test_what_was_missed_before_a_pause_stays_due(job, wakes=True),
    ),
    "a pause that does not expire": (
        "acquire",
        {"v_job.paused_until is null or v_job.paused_until > gaffer.clock()": "true"},
        lambda job: test_a_pause_can_expire(job, "2h", 2.5),
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_pause_would_be_caught(job: Ticking, name: str) -> None:
    function, replaced, test = BROKEN[name]
    variants.replace(job.url, function, replaced)
    with pytest.raises(AssertionError):
        test(job)
