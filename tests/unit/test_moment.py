from __future__ import annotations

from datetime import datetime, timezone

import pytest

from gaffer_dagster.domain.moment import as_moment
from gaffer_dagster.errors import BadInputError


@pytest.mark.parametrize(
    ("text", "zone", "utc"),
    [
        ("2027-03-01", "UTC", "2027-03-01T00:00"),
        ("2027-03-01T06:00", "America/New_York", "2027-03-01T11:00"),
        ("2027-03-01T06:00Z", "America/New_York", "2027-03-01T06:00"),
        ("2027-03-01T06:00+01:00", "America/New_York", "2027-03-01T05:00"),
        # A day that begins with a gap, and one whose midnight comes twice, begin at their first instant.
        ("2027-04-30", "Africa/Cairo", "2027-04-29T22:00"),
        ("2025-11-02", "America/Havana", "2025-11-02T04:00"),
        ("2027-11-07T01:30-04:00", "America/New_York", "2027-11-07T05:30"),
    ],
)
def test_times_as_people_write_them(text: str, zone: str, utc: str) -> None:
    assert as_moment(text, "--at", zone) == datetime.fromisoformat(utc).replace(tzinfo=timezone.utc)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("2027-11-07T01:30", "comes twice in America/New_York; write its offset too: 2027-11-07T01:30-04:00 or"),
        ("2027-03-14T02:30", "does not exist in America/New_York; write its offset too"),
        ("soon", "is no time; write it like 2027-03-01"),
        ("", "is no time"),
        ("9999-01-01", "is in no year from 1970 to 9000"),
    ],
)
def test_what_is_no_time_or_two_is_refused(text: str, said: str) -> None:
    with pytest.raises(BadInputError, match=f"--at '{text}'") as refused:
        as_moment(text, "--at", "America/New_York")
    assert said in str(refused.value)
