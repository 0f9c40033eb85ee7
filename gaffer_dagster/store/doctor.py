"""What `gaffer doctor` asks a server. It only reads; `domain/health.py` judges."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Sequence
from dataclasses import dataclass

import psycopg
from psycopg.rows import class_row

from gaffer_dagster.domain.health import Link, OpenTransaction, Server, Setting, Vacuum
from gaffer_dagster.store import db, horizon

_SETTINGS = [
    "autovacuum", "data_checksums", "default_transaction_read_only", "fsync", "full_page_writes",
    "idle_in_transaction_session_timeout", "idle_session_timeout", "lock_timeout", "max_connections",
    "max_prepared_transactions", "reserved_connections", "statement_timeout",
    "superuser_reserved_connections", "synchronous_commit", "synchronous_standby_names", "track_counts",
    "transaction_timeout",
]  # fmt: skip
RUNNER_FUNCTIONS = [
    "acquire", "base_of_spec", "begin_batch", "clock", "cluster", "commit_batch", "end_run", "register", "renew",
    "supersede",
]  # fmt: skip
RUNNER_TABLES = ["job_runs", "job_spec", "migration", "operator_action"]
_LOOKS, _BETWEEN = 5, 0.4


def server(connection: db.Connection) -> Server:
    row = connection.execute(
        """
        select pg_catalog.format('%I', r.rolname), pg_catalog.format('%I', d.datname), r.rolsuper,
               coalesce(pg_catalog.pg_has_role((select nspowner from pg_catalog.pg_namespace where nspname = 'gaffer'),
                                               'usage'), false),
               pg_catalog.current_schemas(false)::text[], pg_catalog.pg_is_in_recovery(),
               pg_catalog.pg_encoding_to_char(d.encoding), r.rolconnlimit, d.datconnlimit,
               (select pg_catalog.array_agg(array[a.usesysid, a.datid]::oid[]) from pg_catalog.pg_stat_activity a
                 where a.datid is not null)::text[],
               r.oid::text, d.oid::text, (select count(*) from pg_catalog.pg_stat_replication),
               case when pg_catalog.pg_has_role('pg_read_all_stats', 'usage')
                    then (select count(*) from pg_catalog.pg_stat_replication
                           where sync_state in ('sync', 'quorum')) end,
               pg_catalog.age(d.datfrozenxid),
               exists (select from pg_catalog.pg_class c
                        where c.relnamespace = (select n.oid from pg_catalog.pg_namespace n where n.nspname = 'gaffer')
                          and c.relkind = 'r'
                          and pg_catalog.has_table_privilege(c.oid, 'insert,update,delete,truncate,trigger'))
          from pg_catalog.pg_roles r, pg_catalog.pg_database d
         where r.rolname = current_user and d.datname = pg_catalog.current_database()
        """
    ).fetchone()
    assert row is not None  # noqa: S101 — one row by construction
    (
        role, database, is_superuser, owns, schemas, is_standby, encoding, role_limit, database_limit, sessions,
        role_oid, database_oid, standbys, synchronous, age, may_write,
    ) = row  # fmt: skip
    dead = connection.execute(
        """
        select pg_catalog.format('gaffer.%I', relname), n_dead_tup, n_live_tup from pg_catalog.pg_stat_all_tables
         where schemaname = 'gaffer' order by n_dead_tup desc limit 1
        """
    ).fetchone()
    settings = connection.execute(
        "select name, setting, source from pg_catalog.pg_settings where name = any(%s)", [_SETTINGS]
    ).fetchall()
    return Server(
        version=connection.info.server_version,
        role=role,
        database=database,
        encoding=encoding,
        is_superuser=is_superuser,
        owns_schema=owns,
        may_write_tables=may_write,
        schemas=schemas,
        settings={name: Setting(value, source) for name, value, source in settings},
        is_standby=is_standby,
        connections=len(sessions),
        of_role=sum(user == role_oid for user, _ in sessions),
        of_database=sum(where == database_oid for _, where in sessions),
        role_limit=role_limit,
        database_limit=database_limit,
        standbys=standbys,
        synchronous=synchronous,
        vacuum=Vacuum(age, None if dead is None else (dead[0], dead[1], dead[2])),
    )


# What people do, and no runner.
OPERATOR_FUNCTIONS = [
    "ack_alert", "adopt", "allow_writes", "begin_prune", "change_items", "mute", "pause", "prunable_alerts",
    "prunable_runs", "prune_alerts", "prune_runs", "release", "rename", "resume", "retire", "set_watermark",
]  # fmt: skip


def looks_only(connection: db.Connection) -> str | None:
    """The group of people that this role is a member of, where it is a member of no runners: `gaffer_operator` or
    `gaffer_reader`."""
    row = connection.execute(
        """
        select r.rolname from pg_catalog.pg_roles r
         where r.rolname in ('gaffer_operator', 'gaffer_reader') and pg_catalog.pg_has_role(r.oid, 'usage')
           and not coalesce(pg_catalog.pg_has_role(pg_catalog.to_regrole('gaffer_runner'), 'usage'), false)
         order by 1 limit 1
        """
    ).fetchone()
    return None if row is None else row[0]


def more_than_a_runner(connection: db.Connection) -> tuple[list[str], str | None] | None:
    """What people do that this role may do, too, and the statement that takes it back, unless it is a member of
    `gaffer_operator`. None: nothing, or it owns the schema and may do anything."""
    row = connection.execute(
        """
        select pg_catalog.array_agg(p.proname::text order by p.proname),
               case when pg_catalog.pg_has_role(pg_catalog.to_regrole('gaffer_operator'), 'usage') is not true
                    then pg_catalog.format('revoke execute on function %%s from %%I;',
                                           pg_catalog.string_agg(pg_catalog.format('gaffer.%%I', p.proname), ', '
                                                                 order by p.proname), current_user) end
          from pg_catalog.pg_proc p join pg_catalog.pg_namespace n on n.oid = p.pronamespace
         where n.nspname = 'gaffer' and p.proname = any(%s) and pg_catalog.has_function_privilege(p.oid, 'execute')
           and not pg_catalog.pg_has_role(n.nspowner, 'usage')
        having count(*) > 0
        """,
        [OPERATOR_FUNCTIONS],
    ).fetchone()
    return None if row is None else (row[0], row[1])


def missing_rights(connection: db.Connection) -> list[str]:
    """What gives this role what a runner needs, and it lacks: statements, or the command that sets rights of roles."""
    group = connection.execute(
        """
        select case when pg_catalog.pg_has_role(r.oid, 'usage') then 'gaffer migrate --roles'
                    else pg_catalog.format('grant gaffer_runner to %I;', current_user) end
          from pg_catalog.pg_roles r
         where r.rolname = 'gaffer_runner' and pg_catalog.has_schema_privilege(r.oid, 'gaffer', 'usage')
        """
    ).fetchall()
    found = connection.execute(
        """
        select pg_catalog.format('grant usage on schema gaffer to %%I;', current_user)
         where not pg_catalog.has_schema_privilege('gaffer', 'usage')
        union all
        select pg_catalog.format('grant execute on function %%s to %%I;',
                                 pg_catalog.string_agg(pg_catalog.format('gaffer.%%I', p.proname), ', '
                                                       order by p.proname),
                                 current_user)
          from pg_catalog.pg_proc p
         where p.pronamespace = 'gaffer'::pg_catalog.regnamespace::oid and p.proname = any(%s)
           and not pg_catalog.has_function_privilege(p.oid, 'execute')
        having count(*) > 0
        union all
        select pg_catalog.format('grant select on %%s to %%I;',
                                 pg_catalog.string_agg(pg_catalog.format('gaffer.%%I', c.relname), ', '
                                                       order by c.relname),
                                 current_user)
          from pg_catalog.pg_class c
         where c.relnamespace = 'gaffer'::pg_catalog.regnamespace::oid and c.relname = any(%s)
           and not pg_catalog.has_table_privilege(c.oid, 'select')
        having count(*) > 0
        """,
        [RUNNER_FUNCTIONS, RUNNER_TABLES],
    ).fetchall()
    return [statement for (statement,) in (group if group and found else found)]


def right_to_look(connection: db.Connection) -> str:
    """What lets this role read the tables of gaffer_dagster: a statement, or the command that sets rights of roles."""
    row = connection.execute(
        """
        select case when count(*) = 0
                    then pg_catalog.format('grant select on all tables in schema gaffer to %I;', current_user)
                    when pg_catalog.bool_or(pg_catalog.pg_has_role(r.oid, 'usage')) then 'gaffer migrate --roles'
                    else pg_catalog.format('grant gaffer_reader to %I;', current_user) end
          from pg_catalog.pg_roles r join pg_catalog.pg_namespace n on n.nspname = 'gaffer'
         where r.rolname in ('gaffer_operator', 'gaffer_reader', 'gaffer_runner')
           and pg_catalog.has_schema_privilege(r.oid, n.oid, 'usage')
        """
    ).fetchone()
    assert row is not None  # noqa: S101 — one row by construction
    return str(row[0])


def missing_on(connection: db.Connection, table: str, rights: Sequence[str]) -> list[str]:
    """The statements that give this role these rights on a table, and on its schema, as far as it lacks them."""
    found = connection.execute(
        """
        with wanted as (
            select c.oid, n.oid as schema, n.nspname, c.relname
              from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace,
                   pg_catalog.parse_ident(%s) as part
             where c.relname = part[pg_catalog.cardinality(part)]
               and coalesce(n.nspname = part[pg_catalog.cardinality(part) - 1], pg_catalog.pg_table_is_visible(c.oid))
        )
        select pg_catalog.format('grant usage on schema %%I to %%I;', nspname, current_user)
          from wanted where not pg_catalog.has_schema_privilege(schema, 'usage')
        union all
        select pg_catalog.format('grant %%s on %%I.%%I to %%I;', pg_catalog.string_agg(lacking, ', '), nspname, relname,
                                 current_user)
          from wanted, pg_catalog.unnest(%s::text[]) as lacking
         where not pg_catalog.has_table_privilege(oid, lacking)
         group by nspname, relname
        """,
        [table, list(rights)],
    )
    return [statement for (statement,) in found]


def path_to(connection: db.Connection, table: str) -> str | None:
    """Where a table is not found under a name without its schema, but is in another schema: the statement that puts
    this into the search path, and the schema gaffer out of it."""
    row = connection.execute(
        """
        select pg_catalog.format(
                   'alter role %%I in database %%I set search_path = %%s;', current_user, pg_catalog.current_database(),
                   (select pg_catalog.string_agg(pg_catalog.quote_ident(schema), ', ' order by place)
                      from pg_catalog.unnest(pg_catalog.array_append(
                               pg_catalog.array_remove(pg_catalog.current_schemas(false), 'gaffer'), n.nspname))
                           with ordinality as path (schema, place)))
          from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace
         where pg_catalog.quote_ident(c.relname) in (%s, pg_catalog.lower(%s)) and c.relkind in ('r', 'p')
           and n.nspname <> 'gaffer' and n.nspname !~ '^pg_' and pg_catalog.has_schema_privilege(n.oid, 'usage')
           and not exists (select from pg_catalog.pg_class as seen
                            where seen.relname = c.relname and pg_catalog.pg_table_is_visible(seen.oid))
         order by n.nspname <> 'public', n.nspname limit 1
        """,
        [table, table],
    ).fetchone()
    return None if row is None else row[0]


# ── what is in between ───────────────────────────────────────────────────────────────────────────────────────────────


def link(connection: db.Connection, url: str) -> Link:
    """How this connection to `url` goes."""
    given = {option.keyword.decode(): (option.val or b"").decode() for option in connection.pgconn.info}
    host = connection.info.host
    return Link(
        host=host,
        is_local=host.startswith("/") or _is_loopback(connection.info.hostaddr),
        encrypted=connection.pgconn.ssl_in_use,
        sslmode=given["sslmode"],
        pooler=None if connection.info.backend_pid == _backend(connection) else _mode(connection, url),
    )


def _is_loopback(address: str) -> bool:
    return bool(address) and ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _backend(connection: db.Connection) -> int:
    row = connection.execute("select pg_catalog.pg_backend_pid()").fetchone()
    assert row is not None  # noqa: S101 — one row by construction
    return row[0]


def _mode(connection: db.Connection, url: str) -> str:
    """Of the pooler that is in between: in transaction mode two connections can be one of the server's in turn."""
    with db.connect(url, application_name="gaffer:doctor") as other:
        try:
            other.execute("begin")
            other.execute("rollback")
        except psycopg.Error:
            return "statement"
        one, two = ({_backend(each) for _ in range(_LOOKS)} for each in (connection, other))
    return "transaction" if one & two or len(one) > 1 or len(two) > 1 else "session"


# ── who holds the horizon ────────────────────────────────────────────────────────────────────────────────────────────


def open_transaction(connection: db.Connection) -> OpenTransaction | None:
    """The oldest transaction of the whole server that has a number, where one stays; what only reads has none."""
    first: str | None = None
    for number in range(_LOOKS):
        # When we asked is known by the clock that says when the other one began.
        row = connection.execute(
            """
            select pg_catalog.pg_snapshot_xmin(s)::text,
                   coalesce(mine.query_start - a.xact_start, mine.query_start - p.prepared)
              from pg_catalog.pg_current_snapshot() as s
              join pg_catalog.pg_stat_activity mine on mine.pid = pg_catalog.pg_backend_pid()
              left join pg_catalog.pg_stat_activity a on a.backend_xid = pg_catalog.pg_snapshot_xmin(s)::xid
              left join pg_catalog.pg_prepared_xacts p on p.transaction = pg_catalog.pg_snapshot_xmin(s)::xid
             where pg_catalog.pg_snapshot_xmin(s) < pg_catalog.pg_snapshot_xmax(s)
                or a.pid is not null or p.gid is not null
            """
        ).fetchone()
        if row is None or row[0] != (first or row[0]):
            return None
        first = row[0]
        if row[1] is not None:
            held = horizon.holder(connection, row[0])
            return OpenTransaction(held.who, row[1], held.cure)
        if number + 1 < _LOOKS:
            time.sleep(_BETWEEN)
    return None if first is None else OpenTransaction(horizon.holder(connection, first).who, None, _may_see(connection))


def prepared(connection: db.Connection) -> list[OpenTransaction]:
    """Each prepared transaction of the server, the oldest first."""
    with connection.cursor(row_factory=class_row(OpenTransaction)) as cursor:
        return cursor.execute(
            """
            select pg_catalog.format('%L (user %s, database %s)', p.gid, p.owner, p.database) as who,
                   mine.query_start - p.prepared as age,
                   pg_catalog.format('rollback prepared %L;', p.gid)
                       || case when p.database = pg_catalog.current_database() then ''
                               else pg_catalog.format('   -- in database %I', p.database) end as cure
              from pg_catalog.pg_prepared_xacts p
              join pg_catalog.pg_stat_activity mine on mine.pid = pg_catalog.pg_backend_pid()
             order by p.prepared
            """
        ).fetchall()


def _may_see(connection: db.Connection) -> str:
    row = connection.execute("select pg_catalog.format('grant pg_read_all_stats to %I;', current_user)").fetchone()
    assert row is not None  # noqa: S101 — one row by construction
    return row[0]


# ── who holds a job's advisory lock ──────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Squatter:
    """Somebody who holds a job's advisory lock, and is no batch of the job as far as can be seen."""

    job: str
    who: str
    cure: str


def squatters(connection: db.Connection) -> list[Squatter]:
    """Of each job whose batches take an advisory lock. A batch holds it in a transaction, while the job has a lease."""
    names = connection.execute(
        "select name from gaffer.job where spec ->> 'exclusion' = 'advisory' and retired_at is null"
    ).fetchall()
    if not names:  # its key then is not asked for, nor the right to
        return []
    with connection.cursor(row_factory=class_row(Squatter)) as cursor:
        return cursor.execute(
            """
            select j.name as job,
                   pg_catalog.format('backend %%s (user %%s, database %%s, application %%s)', l.pid, a.usename,
                                     a.datname, nullif(a.application_name, '')) as who,
                   pg_catalog.format('select pg_terminate_backend(%%s);', l.pid) as cure
              from (select name, gaffer.advisory_key(name) as key from pg_catalog.unnest(%s::text[]) as name) j
              join pg_catalog.pg_locks l
                on l.locktype = 'advisory' and l.granted and l.objsubid = 1
               and l.classid = ((j.key >> 32) & 4294967295)::oid and l.objid = (j.key & 4294967295)::oid
              join pg_catalog.pg_stat_activity a on a.pid = l.pid and a.datname = pg_catalog.current_database()
             where a.application_name <> pg_catalog.left('gaffer:' || j.name, 63) or a.state = 'idle'
                or not exists (select from gaffer.job_lease h where h.job = j.name and h.lease_until > gaffer.clock())
             order by j.name, l.pid
            """,
            [[name for (name,) in names]],
        ).fetchall()


# ── tables ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def unguarded(connection: db.Connection) -> list[tuple[str, list[str]]]:
    """The protected tables that can be written past their guard: by way of which of their family."""
    return connection.execute(
        """
        with recursive family (root, relation) as (
            select p.relation, p.relation::oid from gaffer.protected_table p
              join pg_catalog.pg_class c on c.oid = p.relation::oid
            union
            select f.root, i.inhrelid from pg_catalog.pg_inherits i join family f on i.inhparent = f.relation
        )
        select root::text, pg_catalog.array_agg(relation::regclass::text order by relation::regclass::text)
          from family
         where 3 <> (select count(*) from pg_catalog.pg_trigger t
                      where t.tgrelid = relation and t.tgenabled in ('O', 'A')
                        and t.tgname in ('gaffer_guard', 'gaffer_guard_truncate', 'gaffer_seal'))
         group by root order by 1
        """
    ).fetchall()
