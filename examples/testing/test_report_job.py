"""The tests of `report_job.py`, with the fixtures that gaffer_dagster brings along."""

from datetime import timedelta

import psycopg
import pytest
from report_job import spent

from gaffer_dagster.testing import Clock, RunDue, Survives, assert_invariants, prepare

SOURCE = "select customer, sum(cents) from orders group by 1 order by 1"
TARGET = "select customer, cents from spent order by 1"


@pytest.fixture
def db(gaffer_database: str):
    """The tables of the project, in a scratch database: `orders` prepared as `gaffer prepare --apply` does."""
    with psycopg.connect(gaffer_database, autocommit=True) as connection:
        connection.execute(
            "create table orders (id int generated always as identity primary key, customer text, cents int)"
        )
        connection.execute("create table spent (customer text primary key, cents bigint not null)")
        prepare(gaffer_database, "orders", key="id")
        yield connection


def add_orders(db: psycopg.Connection) -> None:
    db.execute("insert into orders (customer, cents) select 'c' || n % 7, n from generate_series(1, 25) as n")


def test_what_is_due_is_done_once(
    db: psycopg.Connection, gaffer_database: str, gaffer_clock: Clock, gaffer_run_due: RunDue
) -> None:
    add_orders(db)
    (run,) = gaffer_run_due(spent)
    assert (run.outcome, run.items, run.batches) == ("succeeded", 25, 3)
    gaffer_clock.advance(timedelta(hours=1))
    (run,) = gaffer_run_due(spent)
    assert run.items == 0
    assert_invariants(gaffer_database)


def test_it_survives(db: psycopg.Connection, gaffer_survives: Survives) -> None:
    def adds_up() -> bool:
        return db.execute(SOURCE).fetchall() == db.execute(TARGET).fetchall()

    gaffer_survives(spent, more=lambda: add_orders(db), holds=adds_up)
