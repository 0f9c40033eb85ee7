"""When a time that has passed is settled: nobody who began before it can still commit a row behind it.

`mark` numbers a transaction that begins after that time; once the oldest open transaction is not older than the mark,
all that were open at that time are over. (`pg_snapshot_xmax` would not do as a mark: it can be an open writer's own
number.)
"""

from __future__ import annotations

from datetime import datetime

from gaffer_dagster.store import db


def now(connection: db.Connection) -> datetime:
    """The one clock, of the database."""
    row = connection.execute("select gaffer.clock()").fetchone()
    assert row is not None  # noqa: S101 — one row by construction
    return row[0]


def mark(connection: db.Connection) -> str:
    row = connection.execute("select pg_catalog.pg_current_xact_id()::text").fetchone()
    assert row is not None  # noqa: S101 — one row by construction
    return row[0]


def is_behind(connection: db.Connection, mark: str) -> bool:
    """Everybody who was there before `mark` is gone."""
    row = connection.execute(
        "select pg_catalog.pg_snapshot_xmin(pg_catalog.pg_current_snapshot()) >= %s::xid8", [mark]
    ).fetchone()
    return bool(row and row[0])


def holder(connection: db.Connection) -> str:
    """Who has been open the longest with something written, in words: a backend or a prepared transaction, of any
    database of the cluster. Of other roles' backends a role sees that only with pg_read_all_stats."""
    row = connection.execute(
        """
        select who from (
            select pg_catalog.age(backend_xid) as age,
                   pg_catalog.format('backend %%s (user %%s, database %%s, application %%s)', pid, usename, datname,
                                     nullif(application_name, '')) as who
              from pg_catalog.pg_stat_activity
             where backend_xid is not null and pid <> pg_catalog.pg_backend_pid()
            union all
            select pg_catalog.age(transaction),
                   pg_catalog.format('prepared transaction %%L (user %%s, database %%s)', gid, owner, database)
              from pg_catalog.pg_prepared_xacts
        ) as open order by age desc limit 1
        """,
        [],
    ).fetchone()
    return row[0] if row else "a transaction that this role may not see (grant it pg_read_all_stats)"
