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


def of_job(connection: db.Connection, job: str, after: datetime, *, runs: bool = True) -> History:
    """What is needed for the ticks later than `after`; without `runs`, only schedules and pauses."""
    return History(
        periods=_periods(connection, job, after),
        pauses=pauses(connection, job, after),
        reaches=_reaches(connection, job, after) if runs else [],
    )


def _periods(connection: db.Connection, job: str, after: datetime) -> list[Period]:
    with connection.cursor(row_factory=dict_row) as cursor:
        rows = cursor.execute(
            """
            select since_at, pg_catalog.lead(registered_at) over (order by id) as until, spec -> 'schedule' as schedule
              from gaffer.job_spec
             where job = %(job)s
               and id >= coalesce((select max(id) from gaffer.job_spec
                                    where job = %(job)s and registered_at <= %(after)s), 0)
             order by id
            """,
            {"job": job, "after": after},
        ).fetchall()
    return [Period(row["since_at"], schedule_from_json(row["schedule"]), row["until"]) for row in rows]


def pauses(connection: db.Connection, job: str, after: datetime) -> list[Pause]:
    """The pauses of the job that were not over at that time, in order."""
    return list(_pauses(connection, job, after))


def _pauses(connection: db.Connection, job: str, after: datetime) -> Iterator[Pause]:
    with connection.cursor(row_factory=class_row(_Action)) as cursor:
        actions = cursor.execute(
            """
            select at, action, (details ->> 'until')::timestamptz as until
              from gaffer.operator_action
             where job = %(job)s and action in ('pause', 'resume')
               and id >= coalesce((select id from gaffer.operator_action
                                    where job = %(job)s and action in ('pause', 'resume') and at <= %(after)s
                                    order by id desc limit 1), 0)
             order by id
            """,
            {"job": job, "after": after},
        ).fetchall()
    for number, action in enumerate(actions):
        if action.action == "pause":
            ends = [action.until, *(later.at for later in actions[number + 1 : number + 2])]
            yield Pause(action.at, min((end for end in ends if end is not None), default=None))


def _reaches(connection: db.Connection, job: str, since: datetime) -> list[Reach]:
    # A run that ended badly covers the intervals that it committed, which its watermark tells. None reaches further
    # than to its end, but for what a clock was set back meanwhile.
    with connection.cursor(row_factory=dict_row) as cursor:
        rows = cursor.execute(
            """
            select id, outcome, started_at, reach
              from (select id, outcome, started_at,
                           case when outcome = 'late' then tick
                                else greatest(covered_until, gaffer.until_of(watermark_to)) end as reach
                      from gaffer.job_runs
                     where job = %(job)s and trigger <> 'redo'
                       and (ended_at is null or ended_at >= %(since)s - interval '1 day')) run
             where reach >= %(since)s
             order by id
            """,
            {"job": job, "since": since},
        ).fetchall()
    return [Reach(row["id"], Outcome(row["outcome"]), row["started_at"], row["reach"]) for row in rows]
