"""What users need to test their own jobs, and what the tests of this package use themselves.

    def test_my_job(gaffer_survives):
        gaffer_survives(carrier_delay, more=add_flights, holds=lambda: rows("flights") == rows("carrier_delay_part"))

The fixtures come with the package, as a pytest plugin (see `gaffer_dagster.testing.plugin`); the names below are for
whoever writes fixtures, or faults, of his own. They load when they are first used, so that a test run that uses none
of them loads neither Dagster nor psycopg.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gaffer_dagster.testing import faults
    from gaffer_dagster.testing.bench import Bench
    from gaffer_dagster.testing.clock import Clock
    from gaffer_dagster.testing.database import Databases, prepare, scratch_database
    from gaffer_dagster.testing.faults import Survives, survives
    from gaffer_dagster.testing.invariants import assert_invariants, watch
    from gaffer_dagster.testing.jobs import RunDue, job_in, run_due
    from gaffer_dagster.testing.waits import settle, wait_until

__all__ = [
    "Bench",
    "Clock",
    "Databases",
    "RunDue",
    "Survives",
    "assert_invariants",
    "faults",
    "job_in",
    "prepare",
    "run_due",
    "scratch_database",
    "settle",
    "survives",
    "wait_until",
    "watch",
]

_HOMES = {
    "Bench": "bench",
    "Clock": "clock",
    "Databases": "database",
    "RunDue": "jobs",
    "Survives": "faults",
    "assert_invariants": "invariants",
    "job_in": "jobs",
    "prepare": "database",
    "run_due": "jobs",
    "scratch_database": "database",
    "settle": "waits",
    "survives": "faults",
    "wait_until": "waits",
    "watch": "invariants",
}


def __getattr__(name: str) -> Any:
    if name == "faults":
        return import_module(f"{__name__}.faults")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
