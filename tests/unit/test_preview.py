"""`gaffer preview CRON`, which needs no database."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import time_machine
from click.testing import CliRunner, Result

from gaffer_dagster.cli import main


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No database is named, and none is in this folder."""
    monkeypatch.delenv("GAFFER_DATABASE_URL", raising=False)
    monkeypatch.chdir(tmp_path)


def preview(*words: str) -> Result:
    return CliRunner().invoke(main, ["preview", *words])


def told(*words: str) -> list[dict[str, Any]]:
    done = preview(*words, "--json")
    assert done.exit_code == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_ticks_in_utc_and_local_with_what_the_clock_does() -> None:
    found = told("30 2 * * *", "America/New_York", "--after", "2027-03-13T08:00Z", "--count", "2")
    assert found == [
        {
            "utc": "2027-03-14T07:00:00+00:00",
            "local": "2027-03-14T03:00:00-04:00",
            "note": "2027-03-14 02:30 does not exist: moved here; the clock goes from 02:00 to 03:00",
        },
        {"utc": "2027-03-15T06:30:00+00:00", "local": "2027-03-15T02:30:00-04:00", "note": ""},
    ]


def test_the_policies() -> None:
    words = ("30 1,2 * * *", "America/New_York", "--count", "1", "--after")
    assert told(*words, "2027-03-14T06:30Z", "--missing-hour", "skip")[0]["utc"] == "2027-03-15T05:30:00+00:00"
    assert told(*words, "2027-11-07T00:00Z")[0]["utc"] == "2027-11-07T06:30:00+00:00"
    assert told(*words, "2027-11-07T00:00Z", "--repeated-hour", "first")[0]["utc"] == "2027-11-07T05:30:00+00:00"


def test_the_zone_is_utc_unless_it_is_given_and_ten_ticks_are_shown() -> None:
    found = told("@daily", "--after", "2027-01-01T00:00+01:00")
    assert [tick["utc"] for tick in found] == [f"2027-01-{day:02}T00:00:00+00:00" for day in range(1, 11)]
    assert [tick["local"] for tick in found] == [tick["utc"] for tick in found]


def test_an_h_is_the_jobs_own() -> None:
    minutes = {told("H 6 * * *", "--job", job, "--count", "1")[0]["utc"][14:16] for job in ("a", "b", "c", "d")}
    assert len(minutes) > 1
    assert told("H 6 * * *", "--job", "a", "--count", "1") == told("H 6 * * *", "--job", "a", "--count", "1")


def test_people_read_what_it_means_and_how_far_away_a_tick_is() -> None:
    with time_machine.travel("2027-03-12T00:00:00Z", tick=False):
        done = preview("0 0,3 13-15 3 5", "America/New_York", "--count", "3", "--missing-hour", "skip")
    assert done.exit_code == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("At 00:00 and 03:00 on days 13 to 15 of March or on Friday in March, in America/")
    assert lines[1].startswith("Fires twice a day, on about ")
    said = [line.split(": ")[0] for line in lines if line.startswith(("warning", "note", "clock"))]
    assert said == ["warning", "note", *["clock"] * said.count("clock")]
    first, second, _ = (line for line in lines if "2027-03-1" in line and "│" in line)
    assert all(part in first for part in ("Fri 2027-03-12 00:00 -0500", "2027-03-12 05:00Z", "in 5 hours"))
    assert "in 8 hours" in second


def test_the_coming_changes_of_the_clock_are_told() -> None:
    done = preview("30 2 * * *", "America/New_York", "--after", "2027-01-01T00:00Z", "--count", "1")
    told = [line for line in done.stdout.splitlines() if line.startswith("clock: ")]
    assert [line.split()[1] for line in told] == ["2027-03-14", "2028-03-12", "2029-03-11"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["61 * * * *"], "write 0 to 59"),
        (["0 6 * *"], "has 4 fields, not 5"),
        (["@sometimes"], "is no shorthand known here"),
        (["0 6 * * *", "Mars/Olympus"], "write an IANA name"),
        (["H 6 * * *"], "give it with --job NAME"),
        (["0 6 * * *", "--after", "soon"], "write it like"),
        (["0 6 * * *", "--after", "9999-12-31T00:00Z"], "1970 to 9000"),
        (["a_job", "Europe/Berlin"], "leave out all but"),
        (["a_job", "--missing-hour", "skip"], "leave out all but"),
        (["a_job"], "GAFFER_DATABASE_URL"),
    ],
)
def test_a_wrong_word_is_an_instruction(words: list[str], said: str) -> None:
    done = preview(*words)
    assert done.exit_code == 1
    assert done.stderr.startswith("gaffer: ")
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("words", [["0 6 * * *", "--count", "0"], ["0 6 * * *", "--missing-hour", "x"], []])
def test_a_word_that_no_option_has_exits_2(words: list[str]) -> None:
    assert preview(*words).exit_code == 2


def test_the_command_starts_without_pendulum() -> None:
    code = "import sys, gaffer_dagster.cli; print('pendulum' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n", done.stderr
