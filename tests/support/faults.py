"""How a test waits for what was done to the engines and their connections, and what it says of it."""

from __future__ import annotations

import sys

from gaffer_dagster.testing.waits import PATIENCE, backends, settle, terminate_backends, wait_until
from tests.support import jobs

__all__ = ["PATIENCE", "backends", "say", "settle", "statement_runs", "terminate_backends", "wait_until"]


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
