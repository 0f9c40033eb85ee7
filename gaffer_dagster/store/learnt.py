"""Runs that could not write, as whoever started them recorded them; and runs that could not report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from psycopg.rows import class_row

from gaffer_dagster.store import db


@dataclass(frozen=True)
class Mark:
    """What a watch has learnt: everything up to `learnt_until` (None: nothing yet). `now`: the database's time."""

    first_seen_at: datetime
    learnt_until: datetime | None
    now: datetime


@dataclass(frozen=True)
class Dead:
    """A run that ended, or never began, without a word to this database."""

    job: str
    dagster_run_id: str
    trigger: str
    tick: datetime | None
    started_at: datetime
    ended_at: datetime
    spec_hash: str
    error: str


def mark(connection: db.Connection, watch: str) -> Mark | None:
    """None: this watch has never looked."""
    with connection.cursor(row_factory=class_row(Mark)) as cursor:
        return cursor.execute(
            "select first_seen_at, learnt_until, gaffer.clock() as now from gaffer.watch where name = %s", [watch]
        ).fetchone()


def note(connection: db.Connection, watch: str, until: datetime) -> None:
    connection.execute("select gaffer.note_learnt(%s, %s)", [watch, until])


def known(connection: db.Connection, dagster_run_ids: Sequence[str]) -> set[tuple[str, str]]:
    """The pairs of job and Dagster run that have a row."""
    rows = connection.execute(
        "select distinct job, dagster_run_id from gaffer.job_runs where dagster_run_id = any(%s)",
        [list(dagster_run_ids)],
    ).fetchall()
    return {(job, run) for job, run in rows}


def learn(connection: db.Connection, dead: Dead) -> str | None:
    """`counted`, or only `recorded` (see `gaffer.learn_run`). None: it was known, or the job is not."""
    row = connection.execute(
        "select gaffer.learn_run(%s, %s, %s, %s, %s, %s, %s, %s)",
        [
            dead.job, dead.dagster_run_id, dead.trigger, dead.tick, dead.started_at, dead.ended_at, dead.spec_hash,
            dead.error,
        ],
    ).fetchone()  # fmt: skip
    return None if row is None else row[0]


def claim_reports(connection: db.Connection, runs: Sequence[int]) -> set[int]:
    """Of these runs the ones that nobody has reported, and the caller now does."""
    rows = connection.execute("select * from gaffer.note_reports(%s)", [list(runs)]).fetchall()
    return {row[0] for row in rows}
