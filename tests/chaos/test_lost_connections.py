"""A connection that is lost where another error was expected is called what it is, so that the batch is done again and
nobody is told to mend what is right."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

import gaffer_dagster as gd
from gaffer_dagster.engine.batch import Batch
from gaffer_dagster.store import db, pending_rows
from tests.support import faults, jobs
from tests.support.pgbouncer import pooled
from tests.support.protocol import Actor

DUE = gd.PendingRows("item", "id", pending="done_at is null", done="done_at = now()")


def _terminate_once_it_waits(url: str) -> None:
    faults.wait_until(
        lambda: bool(
            jobs.query(
                url,
                "select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database()"
                " and application_name = 'gaffer:it' and wait_event_type in ('Lock', 'Timeout')",
            )
        ),
        "it waits, and is terminated",
    )


def _lost_while_it_waits(url: str, ask: Callable[[db.Connection], Any]) -> BaseException | None:
    """What `ask` raises whose connection is lost while it waits for a lock, or sleeps."""

    def asked() -> BaseException | None:
        connection = db.connect(url, application_name="gaffer:it")
        try:
            ask(connection)
        except Exception as error:
            return error
        return None

    asking = Actor(asked)
    _terminate_once_it_waits(url)
    return asking.result()


def test_a_condition_is_not_blamed_for_a_lost_connection(url: str) -> None:
    jobs.execute(url, "create table item (id bigint primary key, done_at timestamptz)")
    with jobs.connect(url) as other:
        other.execute("begin; lock table item in access exclusive mode")
        error = _lost_while_it_waits(url, lambda connection: pending_rows.source(connection, DUE))
    assert error is not None
    assert db.lost_connection(error), error


@pytest.mark.parametrize("place", ["start", "end"])
@pytest.mark.parametrize("way", ["direct", "pooler"])
def test_a_batch_whose_connection_is_lost_in_copy_is_done_again(way: str, place: str, url: str) -> None:
    """A pooler adds an error of its own to the server's, and psycopg expects one."""
    jobs.make_source(url, 3)
    jobs.execute(
        url,
        """
        create table copied (id int);
        create function dawdle() returns trigger language plpgsql as
            'begin if new.id = 0 then perform pg_catalog.pg_sleep(60); end if; return new; end';
        create trigger dawdle before insert on copied for each row execute function dawdle();
        """,
    )
    attempts: list[int] = []

    def work(batch: Batch) -> None:
        attempts.append(batch.number)
        # The first attempt sleeps at its first row.
        batch.copy("copied", [{"id": number} for number in range(len(attempts) - 1, len(attempts) + 9)])

    with pooled(url) if way == "pooler" else nullcontext(url) as through:
        with jobs.connect(url) as other:
            if place == "start":
                other.execute("begin; lock table copied in access exclusive mode")
            running = Actor(lambda: jobs.run(jobs.spec("it"), through, work))
            _terminate_once_it_waits(url)
        assert running.result().outcome == "succeeded"
    assert attempts == [1, 1]
    assert jobs.query(url, "select count(*) from copied") == [(10,)]
