"""Which copy of the zone data is in use, and what it says."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zoneinfo
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from importlib.resources import as_file, files
from itertools import pairwise
from pathlib import Path

import pytest
import tzdata

from gaffer_dagster.domain import schedule, zones
from gaffer_dagster.engine import zone_data as module
from gaffer_dagster.engine.zone_data import zone_data

NOW = datetime(2026, 7, 1, tzinfo=timezone.utc)
LATER = NOW + timedelta(days=3 * 365)
CACHES = (schedule._changes, schedule._stretches, zones.fingerprint, module.zone_data)


@pytest.fixture
def copy(tmp_path: Path) -> Iterator[Path]:
    """A copy of the zone data that `ZoneInfo` prefers to any other, and that holds what a test puts there."""
    before = zoneinfo.TZPATH
    zoneinfo.reset_tzpath([str(tmp_path)])
    forget()
    yield tmp_path
    zoneinfo.reset_tzpath(before)
    forget()


def forget() -> None:
    zoneinfo.ZoneInfo.clear_cache()
    for cache in CACHES:
        cache.cache_clear()


def put(copy: Path, zone: str, of: str) -> None:
    """The zone, as this copy has it, is what the package has of another."""
    (copy / zone).parent.mkdir(parents=True, exist_ok=True)
    with as_file(files("tzdata") / "zoneinfo" / of) as file:
        shutil.copy(file, copy / zone)
    forget()


def test_a_fingerprint_tells_zones_apart_and_not_their_names() -> None:
    names = ("UTC", "Asia/Kolkata", "Europe/Berlin", "Europe/London", "America/New_York", "Africa/Casablanca")
    assert len({zones.fingerprint(name) for name in names}) == len(names)
    assert zones.fingerprint("Asia/Kolkata") == zones.fingerprint("Asia/Calcutta")


def test_it_is_the_same_in_every_process() -> None:
    code = "from gaffer_dagster.engine.zone_data import zone_data; print(zone_data('Europe/Berlin'))"
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment)
        assert done.stdout.strip() == zone_data("Europe/Berlin"), done.stderr


@pytest.mark.parametrize(
    ("file", "text", "version"),
    [
        ("tzdata.zi", "# version 2025b\n# This zic input file is in the public domain.\n", "2025b"),
        ("+VERSION", "2026f\n", "2026f"),
        ("tzdata.zi", "", "unknown"),
        ("other", "2026f\n", "unknown"),
    ],
)
def test_the_version_is_that_of_the_files_in_use(copy: Path, file: str, text: str, version: str) -> None:
    put(copy, "Europe/Berlin", "Europe/Berlin")
    (copy / file).write_text(text)
    assert zone_data("Europe/Berlin") == f"{version}:{zones.fingerprint('Europe/Berlin')}"


def test_a_zone_that_the_files_lack_is_the_packages(copy: Path) -> None:
    (copy / "tzdata.zi").write_text("# version 2025b\n")
    assert zone_data("Europe/Berlin").split(":")[0] == tzdata.IANA_VERSION


def test_two_copies_that_disagree_differ_in_the_fingerprint(copy: Path) -> None:
    """As 2025b and 2026f do of Vancouver: the version may be unknown, or wrong, and the difference is seen."""
    put(copy, "America/Vancouver", "America/Vancouver")
    ours = zone_data("America/Vancouver")
    put(copy, "America/Vancouver", "America/Phoenix")
    assert zone_data("America/Vancouver") != ours
    assert zone_data("America/Vancouver") == zone_data("America/Vancouver")


@pytest.mark.parametrize("zone", ["America/New_York", "Africa/Casablanca", "Australia/Lord_Howe", "Asia/Kolkata"])
def test_probes_show_each_change_from_both_sides_and_no_week_is_left_out(zone: str) -> None:
    found = zones.probes(zone, NOW, LATER)
    instants = [instant for instant, _ in found]
    assert instants == sorted(set(instants))
    assert instants[0] == NOW
    assert all(later - earlier <= timedelta(weeks=1) for earlier, later in pairwise(instants))
    offsets = dict(found)
    for change in schedule.clock_changes(zone, NOW, LATER):
        assert offsets[change.at - timedelta(minutes=1)] == change.before
        assert offsets[change.at] == change.after
