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
    except ValueError:
        raise BadInputError(
            f"{field} {text!r} is no time; write it like 2027-03-01, 2027-03-01T06:00 or 2027-03-01T06:00+01:00"
        ) from None
    if not 1970 <= moment.year <= 9000:
        raise BadInputError(f"{field} {text!r} is in no year from 1970 to 9000; give a time within")
    if moment.utcoffset() is None:
        moment = _placed(moment, zone, field, text)
    return moment.astimezone(timezone.utc)


def show_local(moment: datetime, zone: str) -> str:
    """As `as_moment` reads it, on the clock of a zone and with its offset."""
    return moment.astimezone(ZoneInfo(zone)).isoformat()


def _placed(moment: datetime, zone: str, field: str, text: str) -> datetime:
    """A wall time on the clock of a zone. A day begins at its first instant; a time that there is twice, or not at all,
    is refused."""
    first, second = (moment.replace(tzinfo=ZoneInfo(zone), fold=fold) for fold in (0, 1))
    if first.utcoffset() == second.utcoffset() or len(text.strip()) == len("2027-03-01"):
        return first
    exists = first.astimezone(timezone.utc).astimezone(first.tzinfo).replace(tzinfo=None) == moment
    raise BadInputError(
        f"{field} {text!r} {'comes twice' if exists else 'does not exist'} in {zone}; write its offset too: "
        f"{first.isoformat(timespec='minutes')} or {second.isoformat(timespec='minutes')}"
    )
