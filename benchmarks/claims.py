"""What claiming rows costs: python -m benchmarks.claims [--finished N]

The drain of a table by `PendingRows`, its run and all, against the loop that one writes by hand (claim a page with FOR
UPDATE SKIP LOCKED, mark it done, COMMIT), with work that does nothing. And the claim of a page out of 10,000 pending
rows: where nothing else is in the table; among N finished rows that were vacuumed; and among as many that were finished
while another session has kept a snapshot open all along, for which neither VACUUM nor the index can let go of them.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable
from pathlib import Path

import click

from benchmarks.paired import compare
from gaffer_dagster import local
from gaffer_dagster.domain.bounds import Bounds
from gaffer_dagster.domain.due import PendingRows
from gaffer_dagster.domain.spec import JobSpec
from gaffer_dagster.engine.log import wrap
from gaffer_dagster.engine.run import open_run
from gaffer_dagster.store import db, pending_rows, prepare
from gaffer_dagster.testing import scratch_database

_PENDING, _PAGE, _PAGES, _BACKLOG = "done_at is null", 100, 40, 10_000


@click.command()
@click.option("--finished", default=300_000, show_default=True, help="Finished rows among the pending ones.")
def main(finished: int) -> None:
    logging.getLogger("gaffer").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        server = local.start(Path(folder), fsync=True)
        try:
            with scratch_database(server) as url, db.connect(url, application_name="benchmark") as connection:
                _drains(url, connection)
                _claims(url, connection, finished)
        finally:
            local.stop(Path(folder))


def _drains(url: str, connection: db.Connection) -> None:
    for page in (_PAGE, 1_000):
        drains = {f"by hand {page}": _by_hand, f"by hand, its twin {page}": _by_hand, f"PendingRows {page}": _by_run}
        tables = {name: f"drain_{page}_{number}" for number, name in enumerate(drains)}
        for table in tables.values():
            _make(connection, table)

        def fill(name: str, tables: dict[str, str] = tables, page: int = page) -> None:
            connection.execute(f"truncate {tables[name]}")
            connection.execute(f"insert into {tables[name]} select generate_series(1, {_PAGES * page})")

        variants = {
            name: lambda drain=drain, table=tables[name], page=page: drain(url, connection, table, page)
            for name, drain in drains.items()
        }
        click.echo(f"drain of {_PAGES * page:,} rows in pages of {page:,}")
        for result in compare(variants, before=fill, blocks=6, iterations=2):
            click.echo(f"  {result}   {1 / result.ratio:.3f} × the speed")


def _by_hand(url: str, _: db.Connection, table: str, page: int) -> None:
    with db.connect(url, application_name="benchmark") as connection:
        while True:
            with connection.transaction():
                rows = connection.execute(
                    f"with due as materialized (select * from {table} where {_PENDING} order by id limit {page}"  # noqa: S608
                    " for update skip locked) select * from due"
                ).fetchall()
                if not rows:
                    return
                connection.execute(
                    f"update {table} set done_at = now() where id = any(%s)",  # noqa: S608
                    [[row[0] for row in rows]],
                )


def _by_run(url: str, _: db.Connection, table: str, page: int) -> None:
    due = PendingRows(table, "id", pending=_PENDING, done="done_at = now()")
    job = JobSpec(table, due, bounds=Bounds(batch_rows=page, batches=1_000, timeout="5m"))
    with open_run(job, url, log=wrap(logging.getLogger("gaffer"))) as run:
        run.apply(lambda batch: None)
    assert run.items == _PAGES * page  # noqa: S101


def _claims(url: str, connection: db.Connection, finished: int) -> None:
    for table in ("alone", "vacuumed", "twin"):
        _make(connection, table)
    connection.execute(f"insert into vacuumed select n, now() from generate_series(1, {finished}) n")  # noqa: S608
    for table in ("alone", "vacuumed", "twin"):
        connection.execute(f"insert into {table} select {finished} + generate_series(1, {_BACKLOG})")
        connection.execute(f"vacuum analyze {table}")
    click.echo(f"claim of {_PAGE} of {_BACKLOG:,} rows, {finished:,} finished")
    variants = {
        "nothing else": _claim(connection, "alone", None),
        "nothing else, its twin": _claim(connection, "twin", None),
        "among finished rows": _claim(connection, "vacuumed", None),
    }
    for result in compare(variants, blocks=12):
        click.echo(f"  {result}")
    with db.connect(url, application_name="benchmark") as other:
        _make(connection, "held")
        connection.execute(f"insert into held select generate_series(1, {finished + _BACKLOG})")
        connection.execute("vacuum analyze held")
        other.execute("begin isolation level repeatable read; select pg_current_snapshot()")
        connection.execute(f"update held set done_at = now() where id <= {finished}")  # noqa: S608
        connection.execute("vacuum analyze held")
        variants = {
            "nothing else": _claim(connection, "alone", None),
            "nothing else, its twin": _claim(connection, "twin", None),
            "under a snapshot, a run's first": _claim(connection, "held", None),
            "under a snapshot, the following ones": _claim(connection, "held", str(finished)),
        }
        for result in compare(variants, blocks=6, iterations=5):
            click.echo(f"  {result}")
        other.execute("rollback")
        connection.execute("vacuum analyze held")
        variants = {
            "nothing else": _claim(connection, "alone", None),
            "after the snapshot and a VACUUM": _claim(connection, "held", None),
        }
        for result in compare(variants, blocks=6):
            click.echo(f"  {result}")


def _claim(connection: db.Connection, table: str, after: str | None) -> Callable[[], None]:
    due = PendingRows(table, "id", pending=_PENDING, done="done_at = now()")
    source = pending_rows.source(connection, due)

    def work() -> None:
        connection.execute("begin")
        found = pending_rows.claim_new(connection, source, "benchmark", after, _PAGE)
        connection.execute("rollback")
        assert len(found) == _PAGE  # noqa: S101

    return work


def _make(connection: db.Connection, table: str) -> None:
    connection.execute(f"create table {table} (id bigint primary key, done_at timestamptz)")
    prepare.apply(connection, prepare.pending_statements(connection, table, "id", _PENDING))


if __name__ == "__main__":
    main()
