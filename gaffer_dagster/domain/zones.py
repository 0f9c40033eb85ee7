"""What this process believes of a zone's clock, in a form that others can be compared with."""

from __future__ import annotations

import hashlib
from datetime import datetime, timedelta
from datetime import timezone as tz
from functools import lru_cache
from zoneinfo import ZoneInfo

from gaffer_dagster.domain.schedule import clock_changes, offset_at

_FROM, _TO = datetime(2020, 1, 1, tzinfo=tz.utc), datetime(2041, 1, 1, tzinfo=tz.utc)
_WEEK = timedelta(weeks=1)
_MINUTE = timedelta(minutes=1)


@lru_cache(maxsize=256)
def fingerprint(timezone: str) -> str:
    """Eight hex digits for the zone's offsets from 2020 to 2040: the same wherever they are."""
    text = str(offset_at(ZoneInfo(timezone), _FROM))
    for change in clock_changes(timezone, _FROM, _TO):
        text += f" {change.at.isoformat()} {change.after}"
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def probes(timezone: str, now: datetime, until: datetime) -> list[tuple[datetime, timedelta]]:
    """Instants in order, with the offset from UTC, at which another copy of the zone data would show that it differs.

    Each change of the clock from both sides; and each week, for changes that only the other copy has: none is taken
    back within one.
    """
    weeks = (until - now) // _WEEK
    instants = {now + number * _WEEK for number in range(weeks + 1)}
    for change in clock_changes(timezone, now, until):
        instants |= {change.at - _MINUTE, change.at}
    zone = ZoneInfo(timezone)
    return [(instant, offset_at(zone, instant)) for instant in sorted(instants)]
