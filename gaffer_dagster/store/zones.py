"""What Postgres believes of a zone's clock. It has its own copy of the tz database, or the system's of its host."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

import psycopg

from gaffer_dagster.store import db


def differing(
    connection: db.Connection, timezone: str, probes: Sequence[tuple[datetime, timedelta]]
) -> list[datetime] | None:
    """The instants at which Postgres's offset from UTC is not the one beside them; None if it does not know the zone.

    `connection` is in no transaction, so that the zone is set for this statement only. (Functions that take a zone's
    name would take CET and its like for abbreviations, which have no summer time.)
    """
    try:
        offsets = connection.execute(
            """
            with zone as materialized (select pg_catalog.set_config('TimeZone', %s, true) as name)
            select case when zone.name is not null
                        then pg_catalog.date_part('timezone', probe.at) end  -- so that the zone is set before
              from zone, pg_catalog.unnest(%s::timestamptz[]) with ordinality as probe (at, number)
             order by probe.number
            """,
            [timezone, [instant for instant, _ in probes]],
        ).fetchall()
    except psycopg.errors.InvalidParameterValue:
        return None
    return [
        instant for (instant, offset), (found,) in zip(probes, offsets, strict=True) if found != offset.total_seconds()
    ]
