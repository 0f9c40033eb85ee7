"""The demo's code location: two jobs over a year of departures from New York (see demo.py for its input).

`dagster dev` in this folder serves it, on the private Postgres of `./dev demo` unless GAFFER_DATABASE_URL names one.
"""

import os
from collections import defaultdict

import dagster as dg

import gaffer_dagster as gd


@gd.gaffer_asset(
    schedule=gd.Schedule("* * * * *", timezone="America/New_York"),
    due=gd.NewRows("flights", key="id"),
    bounds=gd.Bounds(batch_rows=5_000, timeout="45s"),
    alerts=gd.Alerts(grace="30m", failures=3),
    group_name="flights",
)
def carrier_delay(batch: gd.Batch) -> None:
    """Flights per day and carrier, with their mean departure delay, added up as they come in."""
    sums: dict[tuple[object, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    for row in batch.rows:
        flights_cancelled_delay = sums[row["day"], row["carrier"]]
        flights_cancelled_delay[0] += 1
        flights_cancelled_delay[1] += row["dep_time"] is None
        flights_cancelled_delay[2] += row["dep_delay"] or 0
    batch.executemany(
        """
        insert into carrier_delay as old (day, carrier, flights, cancelled, delay_minutes) values (%s, %s, %s, %s, %s)
        on conflict (day, carrier) do update
           set flights = old.flights + excluded.flights, cancelled = old.cancelled + excluded.cancelled,
               delay_minutes = old.delay_minutes + excluded.delay_minutes
        """,
        [(*day_and_carrier, *numbers) for day_and_carrier, numbers in sorted(sums.items())],
    )


@gd.gaffer_asset(
    schedule=gd.Schedule("0 6 * * *", timezone="America/New_York"),
    due=gd.EachInterval("@daily", start="2013-01-01", until="2014-01-01"),
    group_name="flights",
)
def daily_report(batch: gd.Batch) -> None:
    """One row for each local day, 23 to 25 hours long, in order."""
    batch.execute(
        """
        insert into daily_report (day, hours, flights, cancelled)
        select min(day), extract(epoch from %(until)s::timestamptz - %(since)s) / 3600, count(*),
               count(*) filter (where dep_time is null)
          from flights where sched_dep_at >= %(since)s and sched_dep_at < %(until)s
        on conflict (day) do update  -- gaffer run --interval does a day once more
           set hours = excluded.hours, flights = excluded.flights, cancelled = excluded.cancelled
        """,
        {"since": batch.window.since, "until": batch.window.until},
    )


# Named, not read: Dagster stores and shows the variable's name, never what is in it.
dsn = dg.EnvVar("GAFFER_DATABASE_URL") if os.environ.get("GAFFER_DATABASE_URL") else "local"
defs = gd.build_definitions(carrier_delay, daily_report, resource=gd.GafferResource(dsn=dsn))
