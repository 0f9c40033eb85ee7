"""What is said of incidents: true, in words that tell what to do, and with nothing in it that could be anything but
text."""

from __future__ import annotations

import json
import unicodedata
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from itertools import pairwise
from typing import Any
from uuid import UUID

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gaffer_dagster.domain import notice
from gaffer_dagster.domain.alert import Kind, Severity
from gaffer_dagster.domain.incident import Alert
from gaffer_dagster.domain.notice import Event, Notice, explained, plain, sentence, what_to_do, write

KEY = UUID("00000000-0000-0000-0000-00000000002a")
TICK = "2027-03-01T02:00:00+00:00"
SINCE = datetime(2027, 3, 1, 2, 30, tzinfo=timezone.utc)
DETAILS: dict[Kind, dict[str, Any]] = {
    Kind.ABSENCE: {"tick": TICK, "timezone": "America/New_York", "last_success_at": "2027-02-28T02:00:31.500000+00:00"},
    Kind.FAILURES: {"failures": 20, "last_success_at": None},
    Kind.CAPPED: {"runs": 10, "due_since": TICK},
    Kind.BACKLOG: {"due_since": TICK},
    Kind.STALLED: {"held_since": TICK, "held_by": "backend 7 (user bob, database x, application <!here>)"},
    Kind.PARKED: {"rows": 1},
    Kind.TAKEOVERS: {"runs": 3},
    Kind.PAUSE: {"paused_at": TICK, "by": "ada", "reason": "see http://evil.example"},
    Kind.WATCH: {"last_pass_at": TICK},
}


def alert(kind: Kind = Kind.ABSENCE, number: int = 42, job: str = "nightly", **given: Any) -> Alert:
    watch = kind is Kind.WATCH
    return replace(
        Alert(
            id=number,
            key=KEY,
            job=None if watch else job,
            watch="check:host" if watch else None,
            kind=kind,
            severity=kind.severity,
            since_at=SINCE,
            opened_at=SINCE + timedelta(seconds=20),
            details=DETAILS.get(kind, {}),
            reminders=0,
            reminded_at=None,
            acked_at=None,
            acked_by=None,
            ack_reason=None,
            resolved_at=None,
        ),
        **given,
    )


def over(kind: Kind = Kind.ABSENCE, **given: Any) -> Alert:
    return alert(kind, resolved_at=SINCE + timedelta(hours=1), **given)


def test_an_absence_is_said_as_it_is() -> None:
    message = write(KEY, [Notice(Event.OPENED, alert())])
    assert message.title == (
        "[error] nightly: no success since 2027-02-28 02:00Z (2027-02-27 21:00 in America/New_York); tick "
        "2027-03-01 02:00Z (2027-02-28 21:00 in America/New_York) is overdue [gaffer 42]"
    )
    assert message.text.splitlines()[1:] == [
        "True since 2027-03-01 02:30Z (2027-02-28 21:30 in America/New_York); seen at 2027-03-01 02:30Z "
        "(2027-02-28 21:30 in America/New_York).",
        "What to do: see `gaffer status nightly` and `gaffer ticks nightly`; is Dagster's daemon alive?",
        "Runbook: docs/runbook.md#absence",
        f"Key: {KEY}",
    ]
    assert (message.severity, message.recovery) == (Severity.ERROR, False)


def test_a_recovery_is_worded_as_one_and_says_from_when_to_when() -> None:
    message = write(KEY, [Notice(Event.RESOLVED, over(details={}))])
    assert message.title == (
        "[resolved] nightly is on time again; it was overdue from 2027-03-01 02:30Z to 2027-03-01 03:30Z [gaffer 42]"
    )
    assert message.recovery
    assert "What to do" not in message.text
    assert message.payload["resolved_at"] == "2027-03-01T03:30:00+00:00"


def test_a_reminder_has_the_numbers_of_now() -> None:
    message = write(KEY, [Notice(Event.REMINDED, alert(Kind.FAILURES), 3)])
    assert message.title == "[error] nightly (reminder 3): 20 ticks in a row failed; no success yet [gaffer 42]"
    assert message.payload["reminder"] == 3


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("event", Event)
def test_each_kind_has_words_for_all_that_happens_to_it(kind: Kind, event: Event) -> None:
    found = over(kind) if event is Event.RESOLVED else alert(kind)
    message = write(KEY, [Notice(event, found, 1 if event is Event.REMINDED else 0)])
    name = "the watch check:host" if kind is Kind.WATCH else "nightly"
    assert message.title.startswith(f"[{'resolved' if event is Event.RESOLVED else kind.severity}] {name}")
    assert message.title.endswith("[gaffer 42]")
    assert ("`gaffer " in message.text) == (event is not Event.RESOLVED)
    assert "None" not in message.text
    assert "?" not in message.title
    assert sentence(kind, found.details) in message.title or event is Event.RESOLVED
    said = json.loads(json.dumps(message.payload))
    assert (said["version"], said["event"], said["key"]) == (notice.VERSION, str(event), str(KEY))
    assert (said["incident"], said["incident_key"], said["kind"]) == (42, str(KEY), str(kind))
    assert said["text"] == message.text
    assert "<!" not in json.dumps(said)
    assert "://evil" not in json.dumps(said)


def test_details_keep_their_times_and_numbers() -> None:
    said = write(KEY, [Notice(Event.OPENED, alert())]).payload["details"]
    assert said == {**DETAILS[Kind.ABSENCE], "last_success_at": "2027-02-28T02:00:31.500000+00:00"}
    assert write(KEY, [Notice(Event.OPENED, alert(Kind.PARKED))]).payload["details"] == {"rows": 1}


def test_a_zone_that_is_not_known_here_costs_the_local_time_only() -> None:
    message = write(KEY, [Notice(Event.OPENED, alert(details={"tick": TICK, "timezone": "Mars/Olympus"}))])
    assert "tick 2027-03-01 02:00Z is overdue" in message.title


def test_many_are_one_message_with_counts_twenty_names_and_all_for_programs() -> None:
    notices = [Notice(Event.OPENED, alert(number=n, job=f"job_{n:02}")) for n in range(30)]
    notices += [Notice(Event.OPENED, alert(Kind.FAILURES, 30 + n, f"job_{n:02}")) for n in range(3)]
    notices += [Notice(Event.REMINDED, alert(Kind.PARKED, 40, "job_00"), 2), Notice(Event.RESOLVED, over(number=41))]
    message = write(KEY, notices)
    assert message.title == "[error] gaffer: 33 incidents opened, 1 incident still open, 1 incident resolved"
    lines = message.text.splitlines()
    assert lines[1:4] == ["Opened: 30 absence, 3 failures", "Still open: 1 parked", "Resolved: 1 absence"]
    assert sum(line.startswith("- ") for line in lines) == 24
    assert "… and 11 more, of 11 other jobs" in lines
    assert len(message.payload["notices"]) == 35
    assert message.payload["counts"]["opened"] == {"absence": 30, "failures": 3}
    assert not message.recovery


def test_many_that_are_all_over_are_a_recovery_and_no_error() -> None:
    message = write(KEY, [Notice(Event.RESOLVED, over(number=n, job=f"job_{n}")) for n in range(6)])
    assert message.title == "[resolved] gaffer: 6 incidents resolved"
    assert (message.recovery, message.severity) == (True, Severity.WARNING)


def test_warnings_alone_are_a_warning() -> None:
    message = write(KEY, [Notice(Event.OPENED, alert(Kind.PARKED, n)) for n in range(6)])
    assert message.severity is Severity.WARNING


def test_each_test_message_is_another() -> None:
    first, second = notice.test_message(), notice.test_message()
    assert first.key != second.key
    assert first.payload["event"] == "test"


@given(st.text(max_size=400))
@example("<!channel> <http://evil.example|x> @everyone [x](http://evil.example) &lt;b&gt; `x` \\")
@example("a\r\nBcc: all@example.org\x00\x1b[31m\u202e\u2066\u200b\u200d\ufeff\u00ad\u2028\x85")
@example("https" + ":" * 3 + "///" + "." * 9 + "a")
def test_somebodys_text_is_one_short_line_of_nothing_but_text(text: str) -> None:
    said = plain(text)
    assert len(said) <= 200
    assert not set("<>@[]`|\\&") & set(said)
    assert "://" not in said
    assert all(unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Zl", "Zp") for char in said)
    assert not any(before == "." and after.isalnum() for before, after in pairwise(said))
    assert plain(said) == said


@given(st.from_regex(r"[a-zA-Z0-9 ,;:_+*/='()-]{0,150}", fullmatch=True))
def test_plain_words_stay_what_they_are(text: str) -> None:
    if "://" not in text:
        assert plain(text) == " ".join(text.split())


def test_a_long_text_is_cut_where_it_shows() -> None:
    assert plain("x" * 201) == "x" * 199 + "…"
    assert plain("x" * 200) == "x" * 200


@pytest.mark.parametrize(
    ("why", "newer", "words"),
    [
        ("recovered", None, "is on time again"),
        ("retired", None, "was retired"),
        ("changed", None, "goes by other rules now"),
        ("recovered", 17, "has another incident of the same kind since, [gaffer 17]"),
    ],
)
def test_an_end_is_called_a_recovery_only_where_it_is_one(why: str, newer: int | None, words: str) -> None:
    title = write(KEY, [Notice(Event.RESOLVED, over(details={"over": why}), newer=newer)]).title
    assert words in title
    assert (why, newer) == ("recovered", None) or "on time again" not in title


NAMES = [
    "timezone", "over", "cure", "held_by", "held_by_since", "reason", "by", "tick", "failures", "runs", "rows",
    "due_since", "held_since", "paused_at", "last_pass_at", "last_success_at", "another",
]  # fmt: skip
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=40)
    | st.just("9999-12-31T23:59:59+00:00"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(kind=st.sampled_from(Kind), event=st.sampled_from(Event), details=st.dictionaries(st.sampled_from(NAMES), JSON))
@example(kind=Kind.ABSENCE, event=Event.OPENED, details={"timezone": "a" * 5000, "tick": "2027-03-01T12:00:00+00:00"})
@example(kind=Kind.ABSENCE, event=Event.OPENED, details={"timezone": 5, "tick": "0001-01-01T00:00:00+14:00"})
def test_details_of_any_shape_are_said(kind: Kind, event: Event, details: dict[str, Any]) -> None:
    """Whoever runs jobs may write them, and must not keep the others from being told."""
    message = write(KEY, [Notice(event, alert(kind, details=details))])
    assert "42" in message.title
    said = json.dumps(message.payload)
    assert "<" not in said
    assert explained(kind, details)
    assert what_to_do(kind, "nightly", details)
