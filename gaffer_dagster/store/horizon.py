"""When a time that has passed is settled: nobody who began before it can still commit a row behind it.

`mark` numbers a transaction that begins after that time; once the oldest open transaction is not older than the mark,
all that were open at that time are over. (`pg_snapshot_xmax` would not do as a mark: it can be an open writer's own
number.)
"""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

from typing_extensions import LiteralString

from gaffer_dagster.domain.held import HeldBy
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


def open_before(connection: db.Connection, mark: str) -> str | None:
    """The oldest open transaction, if it was there before `mark`; None: everybody who was is gone."""
    row = connection.execute(
        """
        select pg_catalog.pg_snapshot_xmin(snapshot)::text from pg_catalog.pg_current_snapshot() as snapshot
         where pg_catalog.pg_snapshot_xmin(snapshot) < %s::xid8
        """,
        [mark],
    ).fetchone()
    return None if row is None else row[0]


# In any database of the server: a backend or a prepared transaction. Its number, its names and what it calls itself
# are for everybody to see; since when it is open is not. (What a replication slot or a standby holds back is only the
# removal of old rows.) It is ended by its number too, since the pid may be another's by then; but a batch of another
# job is healthy as long as it may take, where nobody has set another time.
_A_BATCH = timedelta(minutes=10)
_HOLDER: LiteralString = """
    select a.pid, a.usename, a.datname, nullif(a.application_name, ''), a.xact_start,
           pg_catalog.pg_has_role('pg_read_all_stats', 'usage')
               or coalesce(pg_catalog.pg_has_role(a.usesysid, 'usage'), false),
           pg_catalog.format('%%I', current_user),
           case when a.application_name like 'gaffer:%%'
                     and coalesce(a.xact_start > pg_catalog.clock_timestamp() - %s::interval, true)
                then 'wait for it: a batch of gaffer''s ends with its batch_timeout'
                else pg_catalog.format('select pg_terminate_backend(pid) from pg_stat_activity'
                                       ' where pid = %%s and backend_xid = %%L', a.pid, held.xid) end,
           pg_catalog.format('%%L', p.gid), p.owner, p.database, p.prepared
      from (select %s::xid8::xid as xid) as held
      left join pg_catalog.pg_stat_activity a on a.backend_xid = held.xid
      left join pg_catalog.pg_prepared_xacts p on p.transaction = held.xid
"""


def holder(connection: db.Connection, xid: str) -> HeldBy:
    """Who has this transaction open."""
    row = connection.execute(_HOLDER, [_A_BATCH, xid]).fetchone()
    assert row is not None  # noqa: S101 — one row by construction
    pid, user, database, application, began_at, may_see, role, cure, gid, owner, place, prepared_at = row
    if place is not None:
        who = f"prepared transaction {gid} (user {owner}, database {place}), prepared at {_shown(prepared_at)}"
        cure = f"in database {place}: rollback prepared {gid}, or commit prepared, as its coordinator decided"
        return HeldBy(_printable(who), xid, _printable(cure))
    if pid is None:
        return HeldBy(f"transaction {xid}, which the server does not tell of, or which has just ended", xid)
    named = {"user": user, "database": database, "application": application}
    who = f"backend {pid} ({', '.join(f'{name} {value}' for name, value in named.items() if value is not None)})"
    if began_at is not None:
        who += f", open since {_shown(began_at)}"
    elif not may_see:
        who += f"; to see since when it is open: grant pg_read_all_stats to {role}"
    return HeldBy(_printable(who), xid, cure)


def _shown(at: datetime) -> str:
    return f"{at.astimezone(timezone.utc):%Y-%m-%d %H:%M:%SZ}"


def _printable(text: str) -> str:
    """Names are anybody's text, and end up on terminals."""
    return "".join(char if char.isprintable() else "?" for char in text)
