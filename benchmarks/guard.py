"""What the guard of a protected table costs: python -m benchmarks.guard

One batch (begin_batch, one INSERT of N rows, commit_batch and COMMIT in one message) into a table of its own, with and
without protection; and what it would cost to check every batch at COMMIT, whatever it writes: a row that begin_batch
puts into a table of ours, whose deferred trigger takes it away again.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from uuid import UUID, uuid4

import click

from benchmarks.paired import compare
from gaffer_dagster import local
from gaffer_dagster.domain.due import NewRows
from gaffer_dagster.domain.lease import Lease
from gaffer_dagster.domain.spec import JobSpec
from gaffer_dagster.domain.watermark import Position, RowPosition
from gaffer_dagster.store import batches, db, leases, protect, tables
from gaffer_dagster.store import jobs as job_table
from gaffer_dagster.store.operations import Operator
from gaffer_dagster.testing import scratch_database

_EVERYWHERE = """
    create schema everywhere;
    create table everywhere.open_batch (id bigint generated always as identity primary key);
    create function everywhere.check_seal() returns trigger language plpgsql security definer
    set search_path = pg_catalog, pg_temp as $$
    begin
        delete from everywhere.open_batch where id = new.id;
        if split_part(current_setting('gaffer.seal', true), ':', 1) is distinct from pg_current_xact_id()::text then
            raise exception 'committed without gaffer.commit_batch';
        end if;
        return null;
    end $$;
    create constraint trigger check_seal after insert on everywhere.open_batch deferrable initially deferred
        for each row execute function everywhere.check_seal();
"""
_STANDS = RowPosition("1", "1").as_json()
_TIMEOUT, _LEASE = timedelta(minutes=5), timedelta(minutes=10)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        server = local.start(Path(folder), fsync=True)
        try:
            with scratch_database(server) as url, db.connect(url, application_name="benchmark") as connection:
                for rows in (1, 100, 1_000):
                    click.echo(f"batches of {rows} rows")
                    for result in compare(_variants(connection, rows)):
                        click.echo(f"  {result}")
                click.echo(_left(connection))
        finally:
            local.stop(Path(folder))


def _variants(connection: db.Connection, rows: int) -> dict[str, Callable[[], None]]:
    lease = _lease(connection, f"rows_{rows}")
    connection.execute(_EVERYWHERE if rows == 1 else "select")

    def batch(table: str, *, everywhere: bool = False) -> Callable[[], None]:
        connection.execute(f"create table {table}_{rows} (id bigint, fence bigint, batch integer)")

        def work() -> None:
            token = uuid4()
            batches.begin(connection, token, _TIMEOUT)
            if everywhere:  # as if begin_batch did it: no message of its own
                connection.execute(
                    f"with open as (insert into everywhere.open_batch default values) insert into {table}_{rows}"
                    " select unnest(%s::bigint[]), 1, 1",
                    [list(range(rows))],
                )
            else:
                connection.execute(
                    f"insert into {table}_{rows} select unnest(%s::bigint[]), 1, 1",
                    [list(range(rows))],
                )
            _commit(connection, lease, token, _STANDS, rows)

        return work

    token = uuid4()
    batches.begin(connection, token, _TIMEOUT)
    _commit(connection, lease, token, None, 0)
    variants = {
        "not protected": batch("plain"),
        "not protected, its twin": batch("twin"),
        "protected": batch("guarded"),
        "every batch checked at COMMIT": batch("everywhere", everywhere=True),
    }
    table = tables.find(connection, f"guarded_{rows}")
    protect.protect(connection, table, [lease.job], Operator("benchmark", None))
    return variants


def _commit(connection: db.Connection, lease: Lease, token: UUID, since: Position | None, items: int) -> None:
    batches.commit(connection, lease, token, since=since, until=_STANDS, cluster=None, items=items, duration=_LEASE)


def _lease(connection: db.Connection, job: str) -> Lease:
    job_table.register(connection, JobSpec(job, NewRows("source", "id")), job_table.Registration())
    lease_id = uuid4()
    grant = leases.acquire(
        connection,
        job=job,
        slot=0,
        lease_id=lease_id,
        owner="benchmark",
        lease=_LEASE,
        timeout=timedelta(hours=1),
        trigger="command",
        tick=None,
        next_tick=None,
        dagster_run_id=None,
        spec_hash="none",
        zone_data=None,
        wait=timedelta(),
        max_late=None,
        redo=None,
        despite_pause=False,
        refusal=None,
    )
    assert grant.run_id is not None  # noqa: S101
    assert grant.fence is not None  # noqa: S101
    return Lease(job, 0, grant.run_id, grant.fence, lease_id)


def _left(connection: db.Connection) -> str:
    """How large the tables are in which a check could leave something behind."""
    rows = connection.execute(
        "select t.name, pg_catalog.pg_total_relation_size(t.name::regclass)"
        "  from unnest(array['gaffer.protected_table', 'gaffer.truncated_table', 'everywhere.open_batch']) as t (name)"
    ).fetchall()
    return "left behind: " + ", ".join(f"{name} {size} bytes" for name, size in rows)


if __name__ == "__main__":
    main()
