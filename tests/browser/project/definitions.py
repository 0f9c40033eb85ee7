"""A small shop: its orders are summed up as they come in, each day has a report, and letters are sent."""

import dagster as dg

import gaffer_dagster as gd


@gd.gaffer_asset(
    schedule=gd.Schedule("15 * * * *", timezone="America/New_York"),
    due=gd.NewRows("orders", key="id"),
    bounds=gd.Bounds(batch_rows=200, batches=5, timeout="20m"),
    alerts=gd.Alerts(grace="30m", failures=3),
    group_name="shop",
)
def revenue(batch: gd.Batch) -> None:
    """Revenue by region, added up as orders come in.

    Finance reads it each morning; see the *wiki*.
    """
    batch.executemany(
        "insert into revenue (order_id, amount) values (%s, %s)", [(row["id"], row["amount"]) for row in batch.rows]
    )


@gd.gaffer_asset(
    schedule=gd.Schedule("0 6 * * *", timezone="America/New_York"),
    due=gd.EachInterval("@daily", start="2026-03-07", until="2026-03-10"),
    group_name="shop",
)
def daily_report(batch: gd.Batch) -> None:
    """One row for each local day."""
    batch.execute("insert into daily_report (since, until) values (%s, %s)", [batch.window.since, batch.window.until])


@gd.gaffer_asset(
    due=gd.PendingRows("letters", "id", pending="sent_at is null", done="sent_at = now()", attempts=1),
    group_name="shop",
)
def mailing(batch: gd.Batch) -> None:
    """Letters to customers."""
    for row in batch.rows:
        if row["address"] is None:
            raise ValueError("no address | `none` <b>bold</b> [click](https://example.com) **loud**\n# heading")


defs = gd.build_definitions(
    revenue, daily_report, mailing, resource=gd.GafferResource(dsn=dg.EnvVar("GAFFER_DATABASE_URL"))
)
