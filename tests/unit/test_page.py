"""What a page says of a job and of a run."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gaffer_dagster as gd
from gaffer_dagster.domain.held import HeldBy
from gaffer_dagster.domain.page import MOST, Beside, both_clocks, description, headline, summary, verbatim
from gaffer_dagster.domain.run import Outcome, RunRecord
from gaffer_dagster.domain.spec import JobSpec

AT = datetime(2027, 3, 1, 11, 0, 5, tzinfo=timezone.utc)
SPEC = JobSpec("daily", gd.EachInterval("@daily"), gd.Schedule("0 6 * * *", "America/New_York"))
RECORD = RunRecord(
    id=7, job="daily", slot=0, outcome=Outcome.SUCCEEDED, trigger="schedule", tick=AT.replace(second=0), started_at=AT,
    deadline_at=None, ended_at=AT + timedelta(seconds=3), fence=4, owner="host:12:abc", batches=2, items=2, parked=0,
    watermark_from={"until": "2027-02-27T05:00:00+00:00"}, watermark_to={"until": "2027-03-01T05:00:00+00:00"},
    ticks_covered=1, backlog=0, next_run_at=datetime(2027, 3, 2, 11, tzinfo=timezone.utc), held_by=None,
    held_by_since=None, sqlstate=None, error=None, dagster_run_id=None, redo_since=None, redo_until=None,
)  # fmt: skip
ROWS = JobSpec("rows", gd.NewRows("source", "id", where="a = 'x`y'"), gd.Schedule("0 * * * *"))


def test_a_summary_says_all_that_is_asked() -> None:
    assert summary(RECORD, SPEC, Beside()) == (
        "**Succeeded:** 2 intervals in 2 batches; nothing due is left\n"
        "- Window: 2027-02-27 00:00 America/New_York (05:00Z) to 2027-03-01 00:00 America/New_York (05:00Z)\n"
        "- Next tick 2027-03-02 06:00 America/New_York (11:00Z)\n"
        "- Lease: fence 4, held by `host:12:abc`\n"
        "- Woken by its schedule; newest tick 2027-03-01 06:00 America/New_York (11:00Z)"
    )


def test_a_summary_says_whom_it_took_over_from_and_whom_it_waits_for() -> None:
    dead = replace(RECORD, id=6, fence=3, owner="other:1:x", dagster_run_id="0f639db0-bf52-40e2-8b5e-c51e80b420e9")
    held = HeldBy("backend 4711 (user `ann`)", "99", "select pg_terminate_backend(4711)")
    told = summary(replace(RECORD, held_by=held, held_by_since=AT), SPEC, Beside(dead=[dead]))
    assert (
        "Took over from run 6 (fence 3, `other:1:x`), found dead; it began 2027-03-01 06:00:05 America/New_York" in told
    )
    assert "([Dagster run 0f639db0](/runs/0f639db0-bf52-40e2-8b5e-c51e80b420e9))" in told
    assert "Waits for ``backend 4711 (user `ann`)``, seen since 2027-03-01 06:00:05 America/New_York" in told
    assert "to end it: `select pg_terminate_backend(4711)`. Nothing is lost" in told


@pytest.mark.parametrize("outcome", list(Outcome))
def test_each_outcome_has_words(outcome: Outcome) -> None:
    first, _, rest = headline(replace(RECORD, outcome=outcome, backlog=3), SPEC).partition(": ")
    words = {Outcome.TIMED_OUT: "Timed out", Outcome.LOST_LEASE: "Lost its lease", Outcome.ABANDONED: "Found dead"}
    assert first == words.get(outcome, str(outcome).capitalize())
    assert rest


def test_a_redo_is_told_apart() -> None:
    redo = replace(RECORD, redo_since=AT - timedelta(days=1), redo_until=AT)
    assert headline(redo, SPEC).startswith("Redo succeeded: the interval from 2027-02-28 06:00:05 America/New_York")
    assert "Window:" not in summary(redo, SPEC, Beside())


def test_both_clocks_name_the_day_where_it_is_another() -> None:
    assert both_clocks(AT, "UTC") == "2027-03-01 11:00:05Z"
    assert both_clocks(AT, "America/New_York") == "2027-03-01 06:00:05 America/New_York (11:00:05Z)"
    late = datetime(2027, 3, 1, 3, 30, tzinfo=timezone.utc)
    assert both_clocks(late, "America/New_York") == "2027-02-28 22:30 America/New_York (2027-03-01 03:30Z)"


def test_a_description_begins_with_its_authors() -> None:
    told = description(ROWS, "Copies rows.\n\n    Indented by the *code*.\n    ")
    assert told.startswith("Copies rows.\n\nIndented by the *code*.\n\n- **Wakes:** Every hour, in UTC (`0 * * * *`)")
    assert "rows of `source` where ``a = 'x`y'`` that are new, each once, in commit order" in told
    assert description(ROWS, None).startswith("- **Wakes:**")


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=400))
def test_whatever_was_written_stays_within_its_code_span_on_one_line(text: str) -> None:
    shown = verbatim(text)
    assert "\n" not in shown
    assert shown.isprintable()
    fence = shown[: len(shown) - len(shown.lstrip("`"))]
    inner = shown[len(fence) : -len(fence)]
    assert shown == f"{fence}{inner}{fence}"
    assert fence not in inner.strip("` ") or fence == ""
    assert inner.strip("`") == inner


@settings(max_examples=100, deadline=None)
@given(st.text(min_size=1, max_size=2_000), st.text(min_size=1, max_size=500))
def test_a_summary_is_never_longer_than_what_is_shown_at_once(error: str, who: str) -> None:
    record = replace(RECORD, outcome=Outcome.FAILED, error=error, held_by=HeldBy(who, "1", who), owner=who)
    told = summary(record, SPEC, Beside(dead=[record, record]))
    assert len(told.encode("utf-16-le")) // 2 <= MOST
    assert told.startswith("**Failed:** 2 intervals in 2 batches had been committed and stay")
