"""Points in time as people write them: `2027-03-01`, `2027-03-01T06:00`, with an offset or in a zone that is given."""

from __future__ import annotations

from datetime import datetime, timezone
from zoneinfo import ZoneInfo

from gaffer_dagster.errors import BadInputError


def as_moment(text: str, field: str, zone: str = "UTC") -> datetime:
    """An instant in UTC; without an offset of its own the text is a time of `zone`. Raises `BadInputError`."""
    try:
        # Python 3.10 does not read the Z.
        moment = datetime.fromisoformat(text.strip().replace("Z", "+00:00"))
        if moment.utcoffset() is None:
            moment = moment.replace(tzinfo=ZoneInfo(zone))
        moment = moment.astimezone(timezone.utc)
    except (ValueError, OverflowError):
        raise BadInputError(
            f"{field} {text!r} is no time; write it like 2027-03-01, 2027-03-01T06:00 or 2027-03-01T06:00+01:00"
        ) from None
    if not 1970 <= moment.year <= 9000:
        raise BadInputError(f"{field} {text!r} is in no year from 1970 to 9000; give a time within")
    return moment
