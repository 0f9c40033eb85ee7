"""The rules of alerts, each alone: from a job's row to what is wrong, and since when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any
from uuid import UUID

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gaffer_dagster.domain import incident
from gaffer_dagster.domain.alert import Alerts, Kind, Severity
from gaffer_dagster.domain.bounds import Bounds
from gaffer_dagster.domain.due import NewRows
from gaffer_dagster.domain.incident import Alert, Finding, Stretch, Verb, Watch, Watched, findings, judge, silent
from gaffer_dagster.domain.schedule import Schedule
from gaffer_dagster.domain.spec import JobSpec
from tests.support.oracle import crowded_since

MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
INSTANT = timedelta(microseconds=1)
MIDNIGHT = datetime(2027, 3, 1, tzinfo=timezone.utc)


def at(hours: float) -> datetime:
    return MIDNIGHT + hours * HOUR


def watched(alerts: Alerts | None = None, **row: Any) -> Watched:
    """A job with a tick each hour, half an hour of grace and twenty minutes of timeout, of which 01:00 is due."""
    alerts = alerts or Alerts("30m")
    spec = JobSpec("job", NewRows("source", "id"), Schedule("0 * * * *"), Bounds(timeout="20m"), alerts)
    given: dict[str, Any] = {"grace": alerts.grace_for(spec.schedule), "first_seen_at": at(0), "rules_at": at(0)}
    return Watched(job="job", row="7", spec=spec.as_json(), **(given | {"next_due_at": at(1)} | row))


def stretch(since: float, until: float) -> Stretch:
    return Stretch(at(since), at(until))


def since(kind: Kind, job: Watched, now: float | datetime = 100, gaps: list[Stretch] | None = None) -> float | None:
    """From which hour on it is true, as somebody says who looks then."""
    now = now if isinstance(now, datetime) else at(now)
    found = [each.since for each in findings(job, now, gaps or []) if each.kind is kind]
    assert len(found) <= 1
    return (found[0] - MIDNIGHT) / HOUR if found else None


# ── absence ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def absence(now: float | datetime = 100, gaps: list[Stretch] | None = None, **row: Any) -> float | None:
    return since(Kind.ABSENCE, watched(**row), now, gaps)


def test_it_is_true_from_the_end_of_the_grace_on() -> None:
    assert absence(at(1.5) - INSTANT) is None
    assert [absence(now) for now in (1.5, 1.6, 1000)] == [1.5, 1.5, 1.5]


def test_a_job_that_waits_for_nothing_is_never_absent() -> None:
    assert absence(next_due_at=None) is None
    assert absence(retired_at=at(2)) is None


def test_a_tick_that_was_skipped_as_late_counts() -> None:
    assert absence(next_due_at=at(7), late_tick=at(3)) == 3.5


@pytest.mark.parametrize(
    ("until", "tick"),
    [(2.0, 2.0), (1.9, 2.0), (2.1, 3.0), (1.0, 1.0), (None, None)],  # it takes in its start, and leaves out its end
)
@pytest.mark.parametrize("is_late", [False, True])
def test_a_pause_skips_what_is_within(until: float | None, tick: float | None, is_late: bool) -> None:
    row = {"next_due_at": at(7), "late_tick": at(1)} if is_late else {}
    paused_at = at(1) if until != 1 else at(0.5)
    until_at = None if until is None else at(until)
    assert absence(paused_at=paused_at, paused_until=until_at, **row) == (None if tick is None else tick + 0.5)


def test_grace_stands_still_in_a_pause_that_began_before_its_end() -> None:
    """Ten minutes of it are left."""
    pause = {"paused_at": at(1) + 20 * MINUTE, "paused_until": at(4)}
    ends = (at(4) + 10 * MINUTE - MIDNIGHT) / HOUR
    assert absence(3.99, **pause) is None
    assert absence(**pause) == ends
    assert absence(paused=[Stretch(pause["paused_at"], at(4))]) == ends
    assert absence(1.6, paused_at=at(1.4)) is None
    assert absence(99, paused_at=at(1.4)) is None


def test_a_pause_after_the_end_changes_nothing() -> None:
    assert absence(1.6, paused_at=at(1.5)) == 1.5
    assert absence(paused=[stretch(1.5, 3)]) == 1.5


def test_pauses_follow_one_another() -> None:
    assert absence(paused=[stretch(1.2, 2.2), stretch(2.4, 3.4)]) == 3.5
    assert absence(paused=[stretch(1.2, 2.2), stretch(2.5, 3.5)]) == 2.5
    assert absence(paused=[stretch(0.5, 0.9), stretch(1.2, 2.2)], paused_at=at(2.4), paused_until=at(2.5)) == 2.6


def test_grace_begins_anew_once_where_nobody_looked() -> None:
    assert absence(gaps=[stretch(1.2, 3)]) == 3.5
    assert absence(gaps=[stretch(1.5, 3)]) == 1.5  # it had been over when the last one looked
    assert absence(gaps=[stretch(0.2, 1)]) == 1.5  # over by the tick
    assert absence(gaps=[stretch(0.2, 1.1)]) == pytest.approx(1.6)
    assert absence(gaps=[stretch(0, 0.5), stretch(1.2, 3), stretch(3.1, 9)]) == 3.5
    assert absence(gaps=[stretch(1.1, 1.2)], paused=[stretch(1.3, 4.3)]) == 4.5  # never sooner


def test_an_edit_sets_the_earliest_date() -> None:
    assert absence(rules_at=at(2)) == 2
    assert absence(1.9, rules_at=at(2)) is None


def test_a_run_at_work_delays_it_until_its_end_or_its_timeout() -> None:
    third = 1.5 + 20 / 60
    assert absence(worked=[stretch(1.4, 1.6)]) == pytest.approx(1.6)
    assert absence(worked=[stretch(1.4, 9)]) == pytest.approx(third)
    assert absence(worked=[stretch(1.5, 1.6)]) == pytest.approx(1.6)
    assert absence(worked=[stretch(1.2, 1.5)]) == 1.5  # over by then
    assert absence(worked=[stretch(1.51, 1.6)]) == 1.5  # too late
    live = {"at_work_since": at(1.4), "held_until": at(1.55)}
    assert absence(1.54, **live) is None
    assert absence(1.55, **live) == pytest.approx(1.55)  # it is dead
    assert absence(9, at_work_since=at(1.4), held_until=at(9.01)) == pytest.approx(third)


# ── the others ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("kind", "column"), [(Kind.FAILURES, "failed_at"), (Kind.CAPPED, "capped_at")])
def test_so_many_in_a_row_from_the_last_of_them_on(kind: Kind, column: str) -> None:
    alerts = Alerts(failures=3, capped=3)
    times = [at(2), at(3), at(4), at(5)]
    assert since(kind, watched(alerts, **{column: times[:2]})) is None
    assert since(kind, watched(alerts, **{column: times})) == 4
    assert since(kind, watched(alerts, **{column: times}, rules_at=at(4.5))) == 4.5


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        (Kind.BACKLOG, {"due_since": at(2)}),
        (Kind.STALLED, {"held_since": at(2)}),
        (Kind.PAUSE, {"paused_at": at(2)}),
    ],
)
def test_for_longer_than_a_limit(kind: Kind, row: dict[str, Any]) -> None:
    alerts = Alerts(backlog="3h", stalled="3h", pause="3h")
    assert since(kind, watched(alerts, **row), at(5) - INSTANT) is None
    assert [since(kind, watched(alerts, **row), now) for now in (5, 50)] == [5, 5]
    assert since(kind, watched(alerts, **row, rules_at=at(6))) == 6
    assert since(kind, watched(alerts)) is None


def test_what_has_no_limit_or_an_end_is_not_said() -> None:
    assert since(Kind.BACKLOG, watched(Alerts(), due_since=at(2))) is None
    assert since(Kind.PAUSE, watched(paused_at=at(2), paused_until=at(5000)), 4000) is None


def test_rows_that_were_given_up_and_a_job_that_vanished() -> None:
    assert since(Kind.PARKED, watched(parked=2, parked_at=at(3))) == 3
    assert since(Kind.PARKED, watched(parked=0, parked_at=at(3))) is None
    assert since(Kind.VANISHED, watched(vanished_at=at(3)), 3 + 2 / 60) == 3 + 2 / 60
    assert since(Kind.VANISHED, watched(vanished_at=at(3)), 3 + 1 / 60) is None  # another of its name may define it


def test_versions_that_take_turns() -> None:
    assert since(Kind.VERSIONS, watched(returned_at=[at(2), at(2.5)]), 2.6) == 2.5
    assert since(Kind.VERSIONS, watched(returned_at=[at(2), at(2.5)]), 3) is None  # an hour, without its start
    assert since(Kind.VERSIONS, watched(returned_at=[at(2)]), 2.6) is None


def test_an_edit_that_allows_fewer_take_overs_dates_them() -> None:
    row = {"taken_over_at": [at(2), at(3)]}
    assert since(Kind.TAKEOVERS, watched(Alerts(takeovers=2), **row), 5) == 3
    assert since(Kind.TAKEOVERS, watched(Alerts(takeovers=2), rules_at=at(4), **row), 5) == 4


@given(
    times=st.lists(st.integers(0, 60), max_size=12).map(sorted),
    count=st.integers(1, 4),
    within=st.integers(1, 20),
    now=st.integers(0, 80),
)
@example(times=[0, 5, 10], count=2, within=5, now=10)  # the second pair begins as the first ends
@example(times=[0, 4, 5], count=2, within=5, now=8)
def test_crowded_as_the_oracle_has_it(times: list[int], count: int, within: int, now: int) -> None:
    """Instant by instant, over all of them."""
    instants = [at(0) + number * MINUTE for number in times if number <= now]
    given = (instants, count, within * MINUTE, at(0) + now * MINUTE)
    assert incident._crowded(*given) == crowded_since(*given)


# ── a watch ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("every", "after"),
    [(MINUTE, 5 * MINUTE), (2 * MINUTE, 6 * MINUTE), (timedelta(seconds=100), 5 * MINUTE), (HOUR, 3 * HOUR)],
)
def test_a_watch_is_silent_after_three_of_its_rounds_and_five_minutes(every: timedelta, after: timedelta) -> None:
    watch = Watch("dagster", every, at(1))
    assert silent(watch, at(1) + after - INSTANT) is None
    found = silent(watch, at(9))
    assert found is not None
    assert (found.kind, found.since, found.watch, found.job) == (Kind.WATCH, at(1) + after, "dagster", None)


def test_one_that_does_not_say_how_often_it_looks_is_never_silent() -> None:
    assert silent(Watch("cron", None, at(1)), at(1000)) is None


# ── incidents ────────────────────────────────────────────────────────────────────────────────────────────────────────


def finding(kind: Kind = Kind.ABSENCE, job: str | None = "job", **given: Any) -> Finding:
    return Finding(kind, at(2), {"failures": 5}, job=job, row="7", **given)


def alert(kind: Kind = Kind.ABSENCE, job: str | None = "job", **given: Any) -> Alert:
    fields: dict[str, Any] = {
        "id": 3, "key": UUID(int=1), "job": job, "watch": None, "kind": kind, "severity": kind.severity,
        "since_at": at(2), "opened_at": at(3), "details": {"failures": 5}, "reminders": 0, "reminded_at": None,
        "acked_at": None, "acked_by": None, "ack_reason": None, "resolved_at": None,
    }  # fmt: skip
    return Alert(**(fields | given))


def steps(found: list[Finding], opened: list[Alert], job: Watched | None = None, now: float = 4) -> list[str]:
    rows = {"job": job or watched()}
    return [
        f"{step.verb} {step.kind} {step.job or step.watch} {step.row}" for step in judge(found, opened, rows, at(now))
    ]


def test_what_is_new_is_opened_and_what_is_over_is_resolved() -> None:
    assert steps([finding()], []) == ["open absence job 7"]
    assert steps([finding()], [alert()]) == []
    assert steps([], [alert()]) == ["resolve absence job 7"]
    assert steps([finding(Kind.FAILURES)], [alert()]) == ["resolve absence job 7", "open failures job 7"]


def test_a_watch_has_no_row() -> None:
    wrong = Finding(Kind.WATCH, at(2), {}, watch="dagster")
    assert steps([wrong], []) == ["open watch dagster None"]
    assert steps([], [alert(Kind.WATCH, None, watch="dagster")]) == ["resolve watch dagster None"]


def test_a_job_that_was_not_looked_at_is_left_alone() -> None:
    assert steps([], [alert(job="another")]) == []


def test_a_reminder_comes_when_its_time_is_over() -> None:
    job = watched(Alerts(remind="6h"))
    assert steps([finding()], [alert()], job, 8.9) == []
    assert steps([finding()], [alert()], job, 9) == ["remind absence job 7"]
    assert steps([finding()], [alert(reminded_at=at(9))], job, 14.9) == []
    assert steps([finding()], [alert(reminded_at=at(9))], job, 15) == ["remind absence job 7"]


def test_nobody_is_reminded_of_what_he_knows_nor_in_a_pause() -> None:
    job = watched(Alerts(remind="6h"))
    assert steps([finding()], [alert(acked_at=at(4))], job, 50) == []
    paused = replace(job, paused_at=at(5), paused_until=at(60))
    assert steps([finding()], [alert()], paused, 59.9) == []
    assert steps([finding()], [alert()], paused, 60) == ["remind absence job 7"]
    assert steps([finding(Kind.PAUSE)], [alert(Kind.PAUSE)], paused, 50) == ["remind pause job 7"]


def test_what_is_noted_has_the_numbers_of_now_and_the_date_of_its_beginning() -> None:
    job = watched(Alerts(remind="6h"), last_success_at=at(8))
    later = replace(finding(), since=at(5))
    reminded, resolved = (next(iter(judge(found, [alert()], {"job": job}, at(9)))) for found in ([later], []))
    assert (reminded.verb, reminded.details, reminded.since) == (Verb.REMIND, {"failures": 5}, at(2))
    assert (resolved.verb, resolved.details, resolved.since) == (
        Verb.RESOLVE,
        {"failures": 5, "over": "recovered"},
        at(2),
    )
    (updated,) = judge([finding()], [alert(details={"failures": 4})], {"job": job}, at(4))
    assert (updated.verb, updated.details) == (Verb.UPDATE, {"failures": 5})


@pytest.mark.parametrize(
    ("kind", "row", "over"),
    [
        (Kind.ABSENCE, {"last_success_at": at(3)}, "recovered"),
        (Kind.ABSENCE, {"last_success_at": at(1)}, "changed"),
        (Kind.ABSENCE, {}, "changed"),
        (Kind.ABSENCE, {"last_success_at": at(3), "retired_at": at(4)}, "retired"),
        (Kind.FAILURES, {}, "recovered"),
        (Kind.FAILURES, {"consecutive_failures": 2}, "changed"),
        (Kind.CAPPED, {"consecutive_capped": 2}, "changed"),
        (Kind.BACKLOG, {"due_since": at(1)}, "changed"),
        (Kind.BACKLOG, {"due_since": at(3)}, "recovered"),
        (Kind.STALLED, {"held_since": None}, "recovered"),
        (Kind.PAUSE, {"paused_at": at(1), "paused_until": at(9)}, "changed"),
        (Kind.VANISHED, {}, "recovered"),
    ],
)
def test_why_it_is_over(kind: Kind, row: dict[str, Any], over: str) -> None:
    (step,) = judge([], [alert(kind)], {"job": replace(watched(), **row)}, at(4))
    assert step.details["over"] == over


def test_severities() -> None:
    assert {kind for kind in Kind if kind.severity is Severity.ERROR} == {
        Kind.ABSENCE, Kind.FAILURES, Kind.BACKLOG, Kind.STALLED, Kind.VANISHED, Kind.WATCH,
    }  # fmt: skip


# ── what would be caught ─────────────────────────────────────────────────────────────────────────────────────────────

_deadline, _after = incident._deadline, incident._after


def _every_gap(job: Watched, tick: datetime, now: datetime, gaps: list[Stretch]) -> datetime:
    ends = _deadline(job, tick, now, [])
    for gap in gaps:
        ends = max(ends, gap.until + job.grace) if gap.since < ends and tick < gap.until else ends
    return ends


BROKEN: dict[str, tuple[str, Callable[..., Any], Callable[[], None]]] = {
    "paused time counts": (
        "_deadline",
        lambda job, *given: _deadline(replace(job, paused=[], paused_at=None), *given),
        test_grace_stands_still_in_a_pause_that_began_before_its_end,
    ),
    "every gap counts": (
        "_deadline",
        _every_gap,
        test_grace_begins_anew_once_where_nobody_looked,
    ),
    "an edit dates nothing": (
        "_after",
        lambda since, limit, _rules_at: _after(since, limit, at(0)),
        lambda: test_for_longer_than_a_limit(Kind.BACKLOG, {"due_since": at(2)}),
    ),
    "the newest of them dates it": (
        "_reached",
        lambda times, count, _rules_at: times[-1] if len(times) >= count else None,
        lambda: test_so_many_in_a_row_from_the_last_of_them_on(Kind.FAILURES, "failed_at"),
    ),
    "a stretch takes in its start": (
        "_crowded",
        lambda times, count, within, now: times[-1] if len([t for t in times if now - within <= t]) >= count else None,
        test_versions_that_take_turns,
    ),
    "everybody is reminded": (
        "_wants_reminder",
        lambda *_: True,
        test_nobody_is_reminded_of_what_he_knows_nor_in_a_pause,
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_would_be_caught(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    rule, broken, test = BROKEN[name]
    monkeypatch.setattr(incident, rule, broken)
    with pytest.raises(AssertionError):
        test()
