"""Other copies of the tz database: zone files with the changes that a test wants, put in the place of the system's."""

from __future__ import annotations

import struct
import zoneinfo
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

from gaffer_dagster.domain import schedule, zones
from gaffer_dagster.engine import zone_data


def write(
    folder: Path, zone: str, version: str, offset: timedelta, changes: Sequence[tuple[datetime, timedelta]]
) -> Path:
    """A copy with this one zone, whose offset from UTC is `offset` until the first change."""
    offsets = sorted({offset, *(after for _, after in changes)})
    kinds = b"".join(struct.pack(">lbB", round(each.total_seconds()), each > offset, 0) for each in offsets)
    times = b"".join(struct.pack(">q", round(at.timestamp())) for at, _ in changes)
    which = bytes(offsets.index(after) for _, after in changes)
    header = struct.pack(">4sc15x6l", b"TZif", b"2", 0, 0, 0, 0, 1, 1)
    first = header + struct.pack(">lbB", round(offset.total_seconds()), 0, 0) + b"\0"
    whole = struct.pack(">4sc15x6l", b"TZif", b"2", 0, 0, 0, len(changes), len(offsets), 1)
    file = folder / zone
    file.parent.mkdir(parents=True)
    file.write_bytes(first + whole + times + which + kinds + b"\0" + b"\n\n")
    (folder / "tzdata.zi").write_text(f"# version {version}\n")
    return folder


@contextmanager
def used(folder: Path) -> Iterator[None]:
    """As if the process had started with this copy."""
    before = zoneinfo.TZPATH
    try:
        _use([str(folder), *before])
        yield
    finally:
        _use(before)


def _use(path: Sequence[str]) -> None:
    zoneinfo.reset_tzpath(path)
    ZoneInfo.clear_cache()
    for cached in (schedule._changes, schedule._stretches, zones.fingerprint, zone_data.zone_data):
        cached.cache_clear()
