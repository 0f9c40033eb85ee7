"""The views of 0007_metrics.sql, as `gaffer metrics` reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from psycopg.rows import class_row

from gaffer_dagster.store import db


@dataclass(frozen=True)
class JobStatus:
    """A row of `gaffer.job_status`; its comments tell what each column is."""

    name: str
    paused: bool
    muted: bool
    retired: bool
    first_seen_at: datetime
    last_success_at: datetime | None
    due_since: datetime | None
    grace_seconds: float
    backlog: int | None
    backlog_since: datetime | None
    consecutive_failures: int
    consecutive_capped: int
    parked: int
    fence: int
    leases_lost: int
    runs_ended: int
    run_seconds: float


@dataclass(frozen=True)
class OpenAlert:
    """A row of `gaffer.open_alert`."""

    job: str | None
    watch: str | None
    kind: str
    severity: str
    since: datetime
    acked: bool


@dataclass(frozen=True)
class WatchStatus:
    """A row of `gaffer.watch_status`."""

    name: str
    last_pass_at: datetime
    interval_seconds: float | None
    passes: int


@dataclass(frozen=True)
class DeliveryStatus:
    """A row of `gaffer.delivery_status`."""

    name: str
    last_seen_at: datetime
    waiting: int
    failing_since: datetime | None


@dataclass(frozen=True)
class Metrics:
    """All that the views say. `database`: its name."""

    database: str
    jobs: Sequence[JobStatus]
    alerts: Sequence[OpenAlert]
    watches: Sequence[WatchStatus]
    receivers: Sequence[DeliveryStatus]


def read(connection: db.Connection) -> Metrics:
    """One query for each view, however many jobs there are."""
    with db.impatient(connection):
        name = connection.execute("select pg_catalog.current_database()").fetchone()
        assert name is not None  # noqa: S101 — one row by construction
        with connection.cursor(row_factory=class_row(JobStatus)) as cursor:
            jobs = cursor.execute(
                """
                select name, paused, muted, retired, first_seen_at, last_success_at, due_since, grace_seconds, backlog,
                       backlog_since, consecutive_failures, consecutive_capped, parked, fence, leases_lost, runs_ended,
                       run_seconds
                  from gaffer.job_status order by name
                """
            ).fetchall()
        with connection.cursor(row_factory=class_row(OpenAlert)) as cursor:
            alerts = cursor.execute(
                "select job, watch, kind, severity, since, acked from gaffer.open_alert order by job, watch, kind"
            ).fetchall()
        with connection.cursor(row_factory=class_row(WatchStatus)) as cursor:
            watches = cursor.execute(
                "select name, last_pass_at, interval_seconds, passes from gaffer.watch_status order by name"
            ).fetchall()
        with connection.cursor(row_factory=class_row(DeliveryStatus)) as cursor:
            receivers = cursor.execute(
                "select name, last_seen_at, waiting, failing_since from gaffer.delivery_status order by name"
            ).fetchall()
    return Metrics(name[0], jobs, alerts, watches, receivers)
