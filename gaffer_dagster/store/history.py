"""What the ledger of ticks is made of: the schedules that a job went by, its pauses, and what its runs covered."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from psycopg.rows import class_row, dict_row

from gaffer_dagster.domain.ledger import History, Pause, Period, Reach
from gaffer_dagster.domain.run import Outcome
from gaffer_dagster.domain.spec import schedule_from_json
from gaffer_dagster.store import db


@dataclass(frozen=True)
class _Action:
    at: datetime
    action: str
    until: datetime | None


def of_job(connection: db.Connection, job: str, *, runs_since: datetime | None = None) -> History:
    """With what runs covered since `runs_since`; without that, only schedules and pauses."""
    return History(
        periods=list(_periods(connection, job)),
        pauses=list(_pauses(connection, job)),
        reaches=[] if runs_since is None else _reaches(connection, job, runs_since),
    )


def _periods(connection: db.Connection, job: str) -> Iterator[Period]:
    with connection.cursor(row_factory=dict_row) as cursor:
        rows = cursor.execute(
            """
            select since_at, spec -> 'schedule' as schedule from gaffer.job_spec where job = %s order by since_at, id
            """,
            [job],
        ).fetchall()
    for row in rows:
        yield Period(row["since_at"], schedule_from_json(row["schedule"]))


def _pauses(connection: db.Connection, job: str) -> Iterator[Pause]:
    with connection.cursor(row_factory=class_row(_Action)) as cursor:
        actions = cursor.execute(
            """
            select at, action, (details ->> 'until')::timestamptz as until
              from gaffer.operator_action
             where job = %s and action in ('pause', 'resume')
             order by id
            """,
            [job],
        ).fetchall()
    for number, action in enumerate(actions):
        if action.action == "pause":
            ends = [action.until, *(later.at for later in actions[number + 1 : number + 2])]
            yield Pause(action.at, min((end for end in ends if end is not None), default=None))


def _reaches(connection: db.Connection, job: str, since: datetime) -> list[Reach]:
    # A run that ended badly covers the intervals that it committed, which its watermark tells.
    with connection.cursor(row_factory=dict_row) as cursor:
        rows = cursor.execute(
            """
            select id, outcome, started_at, reach
              from (select id, outcome, started_at,
                           case when outcome = 'late' then tick
                                else greatest(covered_until, (watermark_to ->> 'until')::timestamptz) end as reach
                      from gaffer.job_runs
                     where job = %s and trigger <> 'redo') run
             where reach >= %s
             order by id
            """,
            [job, since],
        ).fetchall()
    return [Reach(row["id"], Outcome(row["outcome"]), row["started_at"], row["reach"]) for row in rows]
