"""Durations as people write them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaffer_dagster.domain.duration import LONGEST, as_duration, show_duration
from gaffer_dagster.errors import BadSpecError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90),
        ("20m", 1200),
        ("1h30m", 5400),
        ("2d", 172_800),
        ("250ms", 0.25),
        ("1.5h", 5400),
        ("1h1ms", 3600.001),
    ],
)
def test_it_is_read_as_written(text: str, seconds: float) -> None:
    assert as_duration(text, "f") == timedelta(seconds=seconds)
    assert as_duration(timedelta(seconds=seconds), "f") == timedelta(seconds=seconds)


@pytest.mark.parametrize(
    "value",
    ["", "20", "m", "20 m", " 20m", "20M", "1y", "-5m", "+5m", "0s", "0m", "1e3s", "٣m", "20m\n", "1m;", "1.m", ".5m",
     timedelta(), timedelta(seconds=-1), 20, 1.5, None, True, b"20m", ["20m"], "9" * 400 + "d", "999999999d24h",
     "3654d", timedelta.max],
)  # fmt: skip
def test_what_is_no_duration_is_refused_by_field_and_value(value: Any) -> None:
    with pytest.raises(BadSpecError) as raised:
        as_duration(value, "bounds: timeout")
    assert f"bounds: timeout={value!r}" in str(raised.value)


@pytest.mark.parametrize(
    ("duration", "text"),
    [
        (timedelta(hours=1, minutes=30), "1h30m"),
        (timedelta(days=2), "2d"),
        (timedelta(seconds=90), "1m30s"),
        (timedelta(milliseconds=1), "1ms"),
        (timedelta(), "0s"),
    ],
)
def test_it_is_shown_as_short_as_can_be(duration: timedelta, text: str) -> None:
    assert show_duration(duration) == text


@given(st.integers(min_value=1, max_value=LONGEST // timedelta(milliseconds=1)))
def test_what_is_shown_is_read_back(milliseconds: int) -> None:
    duration = timedelta(milliseconds=milliseconds)
    assert as_duration(show_duration(duration), "f") == duration
