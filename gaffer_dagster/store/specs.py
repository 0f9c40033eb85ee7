"""What `gaffer.job` holds of a job's spec, read back."""

from __future__ import annotations

from datetime import timedelta

from gaffer_dagster.domain.duration import as_duration
from gaffer_dagster.domain.schedule import Schedule
from gaffer_dagster.domain.spec import schedule_from_json
from gaffer_dagster.errors import UnknownJobError
from gaffer_dagster.store import db


def schedule_of(connection: db.Connection, job: str) -> tuple[Schedule | None, timedelta]:
    """When a job wakes (None: only when asked to), and the timeout of its runs. Raises `UnknownJobError`."""
    row = connection.execute(
        "select spec -> 'schedule', spec #>> '{bounds,timeout}' from gaffer.job where name = %s", [job]
    ).fetchone()
    if row is None:
        raise UnknownJobError(f"no job {job!r} is known to this database; see: gaffer status")
    return schedule_from_json(row[0]), as_duration(row[1], f"job {job!r}: timeout")
