"""What is done to the engines and their connections, and how a test waits for it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from tests.support import jobs

PATIENCE = 40.0
"""Seconds until a test gives up; nothing is expected to take as long."""


def wait_until(holds: Callable[[], bool], what: str, *, timeout: float = PATIENCE) -> float:
    """Polls until it holds; how long that took, in seconds."""
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < timeout, f"not within {timeout} s: {what}"
        time.sleep(0.01)
    return time.monotonic() - began


def backends(url: str, job: str = "copy_rows") -> list[int]:
    """The server's processes that work for runs of this job, keepers included."""
    return [
        pid
        for (pid,) in jobs.query(
            url,
            "select pid from pg_stat_activity"
            " where datname = current_database() and split_part(application_name, ':', 1) = 'gaffer'"
            " and split_part(application_name, ':', 2) = %s",
            job,
        )
    ]


def terminate_backends(url: str) -> int:
    """Ends every connection of the job's runs, as an administrator would; how many there were."""
    found = backends(url)
    jobs.query(url, "select pg_terminate_backend(pid) from unnest(%s::int[]) as pid", found)
    wait_until(lambda: not set(found) & set(backends(url)), "the terminated backends are gone")
    return len(found)


def settle(url: str, table: str = "source") -> None:
    """Waits until every row of the table is due: whoever could still have written one before it is done."""
    wait_until(
        lambda: jobs.query(
            url, f"select coalesce(max(gaffer_xid) < pg_snapshot_xmin(pg_current_snapshot()), true) from {table}"
        )[0][0],
        "no transaction is open that is older than the newest row",
    )


def statement_runs(url: str, text: str) -> bool:
    """A run's backend is in the middle of a statement that contains this text."""
    return bool(
        jobs.query(
            url,
            "select 1 from pg_stat_activity where datname = current_database() and state = 'active'"
            " and application_name like 'gaffer:%%' and position(%s in query) > 0",
            text,
        )
    )


def say(text: str) -> None:
    """A figure for whoever reads the output of a test."""
    sys.stdout.write(text + "\n")
