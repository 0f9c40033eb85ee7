"""Orders are added up in the database, and each one is told to a service over HTTP, at least once, with one key.

    create table orders (id bigint generated always as identity primary key, amount integer not null);
    create table booked (order_id bigint primary key, amount integer not null);
    create table outbox (id bigint generated always as identity primary key, body text not null, sent_at timestamptz);

Once: gaffer prepare orders --key id --apply; gaffer prepare outbox --key id --pending 'sent_at is null' --apply
"""

import json
import os

import dagster as dg
import requests

import gaffer_dagster as gd


@gd.gaffer_asset(schedule=gd.Schedule("* * * * *"), due=gd.NewRows("orders", key="id"))
def book(batch: gd.Batch) -> None:
    """The booking and the intent to tell of it commit together, or not at all."""
    batch.insert("booked", [{"order_id": row["id"], "amount": row["amount"]} for row in batch.rows])
    messages = [{"order": row["id"], "amount": row["amount"]} for row in batch.rows]
    batch.insert("outbox", [{"body": json.dumps(message)} for message in messages])


@gd.gaffer_asset(
    schedule=gd.Schedule("* * * * *"),
    due=gd.PendingRows("outbox", "id", pending="sent_at is null", done="sent_at = now()", attempts=8),
    bounds=gd.Bounds(batch_rows=1, batches=1_000, timeout="45s", batch_timeout="20s"),
)
def tell(batch: gd.Batch) -> None:
    """One request for each row; its COMMIT notes that it was taken."""
    for row in batch.rows:
        answer = requests.post(
            os.environ["OUTBOX_URL"],
            data=row["body"].encode(),
            headers={"Content-Type": "application/json", "Idempotency-Key": batch.key_for(row)},
            timeout=(3, 10),  # seconds to connect, and between two bytes: shorter than batch_timeout
            allow_redirects=False,
        )
        if not 200 <= answer.status_code < 300:
            raise RuntimeError(f"the service answered {answer.status_code}")


defs = gd.build_definitions(book, tell, resource=gd.GafferResource(dsn=dg.EnvVar("GAFFER_DATABASE_URL")))
