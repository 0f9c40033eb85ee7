"""The settings of alerts: what is refused, and that they read back as they were stored."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaffer_dagster.domain.alert import Alerts, Kind, Severity
from gaffer_dagster.domain.schedule import Schedule
from gaffer_dagster.errors import BadSpecError

MINUTE = timedelta(minutes=1)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"grace": "soon"}, "grace"),
        ({"grace": "0s"}, "grace"),
        ({"grace": 5}, "grace"),
        ({"grace": "200000000d"}, "grace"),
        *(({name: timedelta.max}, name) for name in ("grace", "backlog", "stalled", "pause", "remind")),
        ({"receivers": ["a" * 64]}, "receivers"),
        ({"failures": 0}, "failures"),
        ({"failures": 101}, "failures"),
        ({"failures": True}, "failures"),
        ({"capped": 1.5}, "capped"),
        ({"takeovers": "3"}, "takeovers"),
        ({"backlog": "-1h"}, "backlog"),
        ({"stalled": None}, "stalled"),
        ({"pause": ""}, "pause"),
        ({"remind": timedelta()}, "remind"),
        ({"receivers": []}, "receivers"),
        ({"receivers": ["On Call"]}, "receivers"),
        ({"receivers": ["https://hooks.example/secret"]}, "receivers"),
        ({"receivers": [3]}, "receivers"),
        ({"receivers": 3}, "receivers"),
        ({"receivers": ["mailto:secret@example.org"]}, "receivers"),
        ({"receivers": [{"url": "secret"}]}, "receivers"),
        ({"heartbeat": "ping.example/secret"}, "heartbeat"),
        ({"heartbeat": ["https://ping.example/secret"]}, "heartbeat"),
        ({"heartbeat": "https://ping.example/secret"}, "heartbeat"),
        ({"heartbeat": ""}, "heartbeat"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_its_name(settings: dict[str, object], field: str) -> None:
    with pytest.raises(BadSpecError, match=field) as refused:
        Alerts(**settings)  # pyright: ignore[reportArgumentType]
    assert "secret" not in str(refused.value)


def test_the_order_of_a_set_of_receivers_is_the_same_in_every_process() -> None:
    assert Alerts(receivers={"c", "a", "b"}).receivers == ("a", "b", "c")
    assert Alerts(receivers=["c", "a"]).receivers == ("c", "a")


durations = st.timedeltas(min_value=timedelta(seconds=1), max_value=timedelta(days=400)).map(
    lambda each: timedelta(seconds=round(each.total_seconds()))
)
names = st.from_regex(r"[a-z_][a-z0-9_]{0,9}", fullmatch=True)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "grace": durations,
            "failures": st.integers(1, 100),
            "capped": st.integers(1, 100),
            "backlog": durations,
            "stalled": durations,
            "takeovers": st.integers(1, 100),
            "pause": durations,
            "remind": durations,
            "receivers": st.lists(names, min_size=1),
            "heartbeat": st.from_regex(r"[A-Z_][A-Z0-9_]{0,9}", fullmatch=True),
        },
    )
)
def test_settings_read_back_as_they_were_stored(settings: dict[str, object]) -> None:
    made = Alerts(**settings)  # pyright: ignore[reportArgumentType]
    assert Alerts.from_json(json.loads(json.dumps(made.as_json()))) == made


def test_settings_of_a_newer_version_are_refused_with_the_cure() -> None:
    with pytest.raises(BadSpecError, match="upgrade"):
        Alerts.from_json({"grace": None, "telepathy": "1h"})


@pytest.mark.parametrize(
    ("cron", "grace"),
    [("* * * * *", 5), ("*/20 * * * *", 10), ("0 * * * *", 30), ("0 6 * * *", 60), ("@yearly", 60)],
)
def test_grace_is_half_the_shortest_interval_within_five_minutes_and_an_hour(cron: str, grace: int) -> None:
    assert Alerts().grace_for(Schedule(cron)) == grace * MINUTE


def test_what_is_not_done_is_an_error_and_what_may_come_to_that_a_warning() -> None:
    errors = {kind for kind in Kind if kind.severity is Severity.ERROR}
    assert errors == {Kind.ABSENCE, Kind.FAILURES, Kind.BACKLOG, Kind.STALLED, Kind.VANISHED, Kind.WATCH}
