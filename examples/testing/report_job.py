"""A job as a project has it: new orders are added up by customer."""

import dagster as dg

import gaffer_dagster as gd


@gd.gaffer_asset(
    schedule=gd.Schedule("0 * * * *"),
    due=gd.NewRows("orders", key="id"),
    bounds=gd.Bounds(batch_rows=10),
)
def spent(batch: gd.Batch) -> None:
    """What each customer has spent."""
    for row in batch.rows:
        batch.execute(
            "insert into spent (customer, cents) values (%(customer)s, %(cents)s)"
            " on conflict (customer) do update set cents = spent.cents + excluded.cents",
            row,
        )


defs = gd.build_definitions(spent, resource=gd.GafferResource(dsn=dg.EnvVar("GAFFER_DATABASE_URL")))
