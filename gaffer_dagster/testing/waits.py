"""How a test waits for what is going to be so."""

from __future__ import annotations

import time
from collections.abc import Callable

from gaffer_dagster.store import db

PATIENCE = 40.0
"""Seconds until a test gives up; nothing is expected to take as long."""


def wait_until(holds: Callable[[], bool], what: str, *, timeout: float = PATIENCE) -> float:
    """Polls until it holds; how long that took, in seconds. Raises `AssertionError` naming `what` after `timeout`."""
    began = time.monotonic()
    while not holds():
        if time.monotonic() - began > timeout:
            raise AssertionError(f"not within {timeout:g} s: {what}")
        time.sleep(0.01)
    return time.monotonic() - began


def settle(url: str, *, timeout: float = PATIENCE) -> None:
    """Waits until every row that was committed before is due for `NewRows`: until each transaction of the server that
    could still have written one before it is over."""
    with db.connect(url, application_name="gaffer:testing") as connection:
        mark = connection.execute("select pg_snapshot_xmax(pg_current_snapshot())::text").fetchone()

        def is_over() -> bool:
            (over,) = connection.execute(
                "select pg_snapshot_xmin(pg_current_snapshot()) >= %s::xid8", mark
            ).fetchone() or (False,)
            return bool(over)

        wait_until(is_over, "no transaction is open that is older than the newest row", timeout=timeout)


def backends(url: str, job: str | None = None) -> list[int]:
    """The server's processes that work for runs of this job, or of any, in this database; keepers included."""
    with db.connect(url, application_name="gaffer:testing") as connection:
        found = connection.execute(
            """
            select pid from pg_stat_activity
             where datname = current_database() and application_name like 'gaffer:%%'
               and case when %(job)s::text is null then application_name <> 'gaffer:testing'
                        else split_part(application_name, ':', 2) = %(job)s end
            """,
            {"job": job},
        ).fetchall()
    return [pid for (pid,) in found]


def terminate_backends(url: str, job: str | None = None) -> int:
    """Ends every connection of the runs, as an administrator would, and waits for it; how many there were."""
    found = backends(url, job)
    with db.connect(url, application_name="gaffer:testing") as connection:
        connection.execute("select pg_terminate_backend(pid) from unnest(%s::int[]) as pid", [found])
    wait_until(lambda: not set(found) & set(backends(url)), "the terminated backends are gone")
    return len(found)
