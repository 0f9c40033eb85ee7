"""Postgres's copy of the zone data against ours."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta, timezone

import pytest

from gaffer_dagster.domain.schedule import clock_changes
from gaffer_dagster.domain.zones import probes
from gaffer_dagster.store import db
from gaffer_dagster.store.zones import differing

# Years whose rules are history, so that two copies do agree on them, whichever they are.
NOW, LATER = (datetime(year, 6, 1, tzinfo=timezone.utc) for year in (2016, 2019))
MINUTE = timedelta(minutes=1)


@pytest.fixture
def connection(server_url: str) -> Iterator[db.Connection]:
    with db.connect(server_url, application_name="test") as opened:
        yield opened


@pytest.mark.parametrize(
    "zone",
    [
        *("UTC", "America/New_York", "Europe/Dublin", "Australia/Lord_Howe", "Asia/Kolkata", "Africa/Casablanca"),
        *("CET", "EET"),  # which are abbreviations as well
    ],
)
def test_two_copies_that_agree(connection: db.Connection, zone: str) -> None:
    assert differing(connection, zone, probes(zone, NOW, LATER)) == []


@pytest.mark.parametrize(("zone", "other"), [("Europe/Berlin", "Europe/London"), ("UTC", "Europe/London")])
def test_probes_of_another_zone_are_found_out(connection: db.Connection, zone: str, other: str) -> None:
    """The broken variant: what we believe of the zone is what is true of another."""
    asked = probes(other, NOW, LATER)
    found = differing(connection, zone, asked)
    assert found
    true = dict(probes(zone, NOW, LATER))
    assert [instant for instant, offset in asked if instant in true and true[instant] != offset] == [
        instant for instant in found if instant in true
    ]


def test_a_change_that_is_an_hour_late_here_is_found_at_its_minute(connection: db.Connection) -> None:
    change = clock_changes("America/New_York", NOW, LATER)[0]
    late = [(change.at - MINUTE, change.before), (change.at, change.before), (change.at + 60 * MINUTE, change.after)]
    assert differing(connection, "America/New_York", late) == [change.at]


def test_a_zone_that_postgres_does_not_know(connection: db.Connection) -> None:
    assert differing(connection, "Atlantis/Sunken", [(NOW, timedelta(0))]) is None
    assert differing(connection, "UTC", [(NOW, timedelta(0))]) == []


@pytest.mark.parametrize("setting", ["timezone to 'Asia/Tokyo'", "datestyle to 'SQL, DMY'"])
def test_the_session_is_left_as_it_was(connection: db.Connection, setting: str) -> None:
    connection.execute(f"set {setting}")
    before = connection.execute("show timezone").fetchone()
    asked = probes("America/New_York", NOW, LATER)
    assert differing(connection, "America/New_York", asked) == []
    assert connection.execute("show timezone").fetchone() == before


def test_no_probe_no_difference(connection: db.Connection) -> None:
    assert differing(connection, "UTC", []) == []
