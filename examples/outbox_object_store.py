"""Each row of an outbox becomes an object of a store that honours `If-None-Match: *` (S3 and its like): once.

    create table outbox (id bigint generated always as identity primary key, body text not null, sent_at timestamptz);

Once: gaffer prepare outbox --key id --pending 'sent_at is null' --apply. The rows are written as in outbox_http.py.
BUCKET_URL is what the objects' names are added to; a real store also wants its signature, which its own client makes
(boto3: `put_object(..., IfNoneMatch="*")`).
"""

import os
from urllib.parse import quote

import dagster as dg
import requests

import gaffer_dagster as gd


@gd.gaffer_asset(
    schedule=gd.Schedule("* * * * *"),
    due=gd.PendingRows("outbox", "id", pending="sent_at is null", done="sent_at = now()", attempts=8),
    bounds=gd.Bounds(batch_rows=1, batches=1_000, timeout="45s", batch_timeout="20s"),
)
def upload(batch: gd.Batch) -> None:
    """The name is made from the key and the content from the row alone, so whoever was first wrote the same."""
    for row in batch.rows:
        answer = requests.put(
            f"{os.environ['BUCKET_URL']}/{quote(batch.key_for(row))}",
            data=row["body"].encode(),
            headers={"If-None-Match": "*", "x-amz-meta-gaffer-fence": str(batch.fence)},
            timeout=(3, 10),  # seconds to connect, and between two bytes: shorter than batch_timeout
            allow_redirects=False,
        )
        if answer.status_code != requests.codes.precondition_failed and not 200 <= answer.status_code < 300:
            raise RuntimeError(f"the store answered {answer.status_code}")  # 412: it is there already


defs = gd.build_definitions(upload, resource=gd.GafferResource(dsn=dg.EnvVar("GAFFER_DATABASE_URL")))
