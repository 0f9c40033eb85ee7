"""The lease: who may write for a job, and until when nobody else may take over.

The *fence* decides who may commit; the clock only decides who may take. `lease_id` is made for each acquisition and
makes the pair unrepeatable even where a fail-over or a restored backup hands out the same number again.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

from gaffer_dagster.domain.duration import in_words
from gaffer_dagster.domain.watermark import Position

LEASE = timedelta(seconds=60)
RENEW_EVERY = LEASE / 3
# Two machines whose clocks differ by more are not to be trusted with "due by now".
LARGEST_SKEW = timedelta(minutes=5)


def clocks_apart(database: datetime, worker: datetime) -> str | None:
    """Why a worker whose clock says this must not work, if so."""
    apart = abs(worker - database)
    if apart <= LARGEST_SKEW:
        return None
    return (
        f"the clock of this worker ({worker.isoformat()}) and the database's ({database.isoformat()}) are "
        f"{in_words(apart)} apart, more than {in_words(LARGEST_SKEW)}; set them right (NTP)"
    )


@dataclass(frozen=True)
class Grant:
    """What acquire and supersede answer. `free_at`: where nothing is left of the holder's connection, when its lease
    may be taken unless it comes back."""

    outcome: str
    run_id: int | None
    fence: int | None
    granted_at: datetime
    lease_until: datetime | None
    deadline_at: datetime | None
    position: Position | None
    cluster: str | None
    batches: int | None
    first_seen_at: datetime | None
    covered_until: datetime | None
    wanted_at: datetime | None
    holder: str | None
    free_at: datetime | None


@dataclass(frozen=True)
class Held:
    """A lease that somebody holds, or held when he was last heard of."""

    slot: int
    fence: int
    owner: str
    lease_until: datetime


@dataclass(frozen=True)
class Lease:
    """The identity of a granted lease, as every statement of its run matches it."""

    job: str
    slot: int
    run_id: int
    fence: int
    lease_id: UUID
