"""A job is killed with kill -9 in the middle of a batch, and nothing is lost or done twice.

    GAFFER_DATABASE_URL=local python examples/kill_in_mid_batch.py

It makes the tables `kill_orders` and `kill_invoices`, and this file is run a second time as the one that dies.
"""

# ruff: noqa: S603, T201 — it tells a story
import os
import signal
import subprocess
import sys

import dagster as dg
import psycopg

import gaffer_dagster as gd
from gaffer_dagster.database import from_environment

TABLES = """
    drop table if exists kill_orders, kill_invoices;
    create table kill_orders (id bigint generated always as identity primary key);
    create table kill_invoices (order_id bigint not null);  -- no key: a second invoice would be taken
    insert into kill_orders select from generate_series(1, 1000);
"""
INVOICES = "select count(*), count(distinct order_id) from kill_invoices"


@gd.gaffer_asset(
    schedule=gd.Schedule("* * * * *"), due=gd.NewRows("kill_orders", key="id"), bounds=gd.Bounds(batch_rows=100)
)
def kill_invoices(batch: gd.Batch) -> None:
    """An invoice for each order. The victim dies in its third batch, with half of it written."""
    for number, row in enumerate(batch.rows):
        if "--die" in sys.argv and batch.number == 3 and number == 50:
            os.kill(os.getpid(), signal.SIGKILL)
        batch.insert("kill_invoices", [{"order_id": row["id"]}])


def main() -> None:
    url = from_environment()
    gaffer = [sys.executable, "-m", "gaffer_dagster.cli"]
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(TABLES)
        subprocess.run([*gaffer, "prepare", "kill_orders", "--key", "id", "--apply"], check=True, capture_output=True)
        victim = subprocess.run([sys.executable, __file__, "--die"])
        print(f"the victim ended with {signal.Signals(-victim.returncode).name}")
        print("invoices, orders that have one:", connection.execute(INVOICES).fetchone())
        # Who waits for a minute needs no release: the dead run's lease is over then.
        subprocess.run([*gaffer, "release", "kill_invoices", "--yes", "--reason", "it is dead"], check=True)
        dg.materialize([kill_invoices], resources={"gaffer": gd.GafferResource(dsn=url)})
        print("invoices, orders that have one:", connection.execute(INVOICES).fetchone())


if __name__ == "__main__":
    if "--die" in sys.argv:
        dg.materialize([kill_invoices], resources={"gaffer": gd.GafferResource(dsn=from_environment())})
    else:
        main()
