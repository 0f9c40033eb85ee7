"""Points in time as people write them: `2027-03-01`, `2027-03-01T06:00`, with an offset or in a zone that is given."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from zoneinfo import ZoneInfo

from gaffer_dagster.domain.duration import as_duration
from gaffer_dagster.errors import BadInputError, BadSpecError

_LAST_YEAR = 9000


def as_moment(text: str, field: str, zone: str = "UTC") -> datetime:
    """An instant in UTC; without an offset of its own the text is a time of `zone`. Raises `BadInputError`."""
    try:
        # Python 3.10 does not read the Z.
        moment = datetime.fromisoformat(text.strip().replace("Z", "+00:00"))
    except ValueError:
        raise BadInputError(
            f"{field} {text!r} is no time; write it like 2027-03-01, 2027-03-01T06:00 or 2027-03-01T06:00+01:00"
        ) from None
    if not 1970 <= moment.year <= _LAST_YEAR:
        raise BadInputError(f"{field} {text!r} is in no year from 1970 to 9000; give a time within")
    if moment.utcoffset() is None:
        moment = _placed(moment, zone, field, text)
    return moment.astimezone(timezone.utc)


def end_of(text: str, field: str, now: datetime, zone: str) -> datetime:
    """When something ends that begins now: at a time, or after a duration. Raises `BadInputError`."""
    try:
        end = now + as_duration(text, field, timedelta.max)
    except BadSpecError:
        try:
            end = as_moment(text, field, zone)
        except BadInputError as error:
            raise BadInputError(f"{error}; or how long, such as 2h") from None
    except OverflowError:
        end = datetime.max.replace(tzinfo=now.tzinfo)
    if end.year > _LAST_YEAR:
        raise BadInputError(f"{field} {text!r} is too long; leave it out if there is to be no end")
    if end <= now:
        raise BadInputError(
            f"{field} {text!r} is over already (it is {now.astimezone(timezone.utc):%Y-%m-%d %H:%M:%SZ}); give a later "
            "time"
        )
    return end


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
