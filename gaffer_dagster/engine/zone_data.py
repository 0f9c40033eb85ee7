"""Which copy of the tz database this process uses. Two workers, or a worker and Postgres, may hold different ones."""

from __future__ import annotations

import zoneinfo
from functools import lru_cache
from importlib import import_module
from pathlib import Path

from gaffer_dagster.domain.zones import fingerprint

UNKNOWN = "unknown"


@lru_cache(maxsize=256)
def zone_data(timezone: str) -> str:
    """Such as "2025b:1f2e3d4c": the database's version, or "unknown", and the fingerprint of the zone's offsets.

    Equal fingerprints mean equal ticks, whatever the versions are.
    """
    return f"{_version(timezone)}:{fingerprint(timezone)}"


def _version(timezone: str) -> str:
    """Of where `ZoneInfo` finds the zone: the system's files, and only then the package."""
    for folder in map(Path, zoneinfo.TZPATH):
        if (folder / timezone).is_file():
            return _said(folder / "tzdata.zi") or _said(folder / "+VERSION") or UNKNOWN
    try:
        return str(import_module("tzdata").IANA_VERSION)
    except ImportError:
        return UNKNOWN


def _said(file: Path) -> str | None:
    """The first line of either file: "# version 2025b", or "2025b"."""
    try:
        with file.open(encoding="utf-8", errors="replace") as lines:
            return lines.readline().removeprefix("# version").strip() or None
    except OSError:
        return None
