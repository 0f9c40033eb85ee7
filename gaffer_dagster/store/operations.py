"""What people do to a job, each with its row in `gaffer.operator_action`; and those rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from psycopg import errors as pg
from psycopg.rows import class_row
from psycopg.types.json import Jsonb
from typing_extensions import LiteralString

from gaffer_dagster.domain.lease import Held
from gaffer_dagster.errors import BadInputError
from gaffer_dagster.store import db


@dataclass(frozen=True)
class Operator:
    """Who does it, and why."""

    by: str
    reason: str | None


def note(
    connection: db.Connection, job: str | None, action: str, operator: Operator, details: Mapping[str, Any]
) -> None:
    """Keeps what was done by other means than a function of its own. `details` names what it was done to, where that
    is no job."""
    connection.execute(
        "select gaffer.note_operation(%s, %s, %s, %s, %s)",
        [job, action, operator.by, operator.reason, Jsonb(dict(details))],
    )


@dataclass(frozen=True)
class Action:
    """A row of `gaffer.operator_action`. `job` is None where it was done to what `details` names. `by`: as whoever did
    it called himself; `role`: that logged in to the database."""

    id: int
    at: datetime
    by: str
    role: str
    reason: str | None
    action: str
    job: str | None
    details: Mapping[str, Any]


def actions(connection: db.Connection, of: str | None, limit: int) -> list[Action]:
    """The newest first, of all or of one job, table or watch."""
    with connection.cursor(row_factory=class_row(Action)) as cursor:
        if of is None:
            return cursor.execute(
                """
                select id, at, by, role, reason, action, job, details
                  from gaffer.operator_action order by id desc limit %s
                """,
                [limit],
            ).fetchall()
        # Each way has an index, which an OR over all of them would leave aside.
        return cursor.execute(
            """
            select id, at, by, role, reason, action, job, details
              from gaffer.operator_action
             where id = any (array(
                 (select id from gaffer.operator_action
                   where job = %(of)s order by id desc limit %(limit)s)
                 union
                 (select id from gaffer.operator_action
                   where details ->> 'watch' = %(of)s order by id desc limit %(limit)s)
                 union
                 (select id from gaffer.operator_action
                   where details ->> 'table' = %(of)s order by id desc limit %(limit)s)
                 union
                 (select id from gaffer.operator_action
                   where details ->> 'table' = 'public.' || %(of)s order by id desc limit %(limit)s)))
             order by id desc limit %(limit)s
            """,
            {"of": of, "limit": limit},
        ).fetchall()


def pause(
    connection: db.Connection, job: str, until: datetime | None, next_tick: datetime | None, operator: Operator
) -> datetime:
    """From the returned time on, runs end `paused`, until `until` or a resume. `next_tick`: the first tick after the
    pause before, if there was one."""
    return _call(
        connection, "select gaffer.pause(%s, %s, %s, %s, %s)", job, until, next_tick, operator.by, operator.reason
    )


def resume(connection: db.Connection, job: str, next_tick: datetime | None, operator: Operator) -> bool:
    """`next_tick`: the first tick after the pause. False: the job was not paused."""
    return _call(connection, "select gaffer.resume(%s, %s, %s, %s)", job, next_tick, operator.by, operator.reason)


def rename(connection: db.Connection, old: str, new: str, operator: Operator) -> None:
    """Watermark, fence and history go with the job. Raises `JobHeldError` while a run is at work."""
    if new == old:
        raise BadInputError(f"job {old!r} is called so already; give another name")
    try:
        _call(connection, "select gaffer.rename(%s, %s, %s, %s)", old, new, operator.by, operator.reason)
    except pg.UniqueViolation:
        raise BadInputError(
            f"job {new!r} is known to this database already; its watermark and history would be mixed up with those "
            f"of {old!r}: choose another name"
        ) from None
    except pg.CheckViolation:
        raise BadInputError(
            f"job name {new!r}: use a-z, 0-9 and _ . / -, beginning with a letter or digit; at most 128"
        ) from None


def release(
    connection: db.Connection, job: str, slot: int | None, operator: Operator, fence: int | None = None
) -> list[Held]:
    """Takes the lease away from whoever holds it (or only from the one with this fence), in this slot or in all; who
    that was. Raises `JobHeldError` where
    somebody has locked it, and says who."""
    with connection.cursor(row_factory=class_row(Held)) as cursor, db.refusals():
        return cursor.execute(
            "select slot, fence, owner, lease_until from gaffer.release(%s, %s, %s, %s, %s)",
            [job, slot, operator.by, operator.reason, fence],
        ).fetchall()


def ack(connection: db.Connection, alert: int, operator: Operator) -> bool:
    """Somebody knows of the incident: no reminders any more. False: none of this number is open."""
    return _call(connection, "select gaffer.ack_alert(%s, %s, %s)", alert, operator.by, operator.reason)


def mute(connection: db.Connection, job: str, until: datetime | None, operator: Operator) -> None:
    """Nothing is sent of the job's incidents until then. None: speak again."""
    _call(connection, "select gaffer.mute(%s, %s, %s, %s)", job, until, operator.by, operator.reason)


def retire(connection: db.Connection, name: str, operator: Operator) -> None:
    """A job, or a watch, that is not meant to run any more: nothing is missed of it. Raises `JobHeldError` for a job
    that is still defined somewhere."""
    _call(connection, "select gaffer.retire(%s, %s, %s)", name, operator.by, operator.reason)


def change_items(
    connection: db.Connection, job: str, action: str, keys: list[str] | None, operator: Operator
) -> list[str]:
    """Rows that failed are tried again (`retry`), with all their attempts, or given up for good (`drop`); None: all
    that are parked. Returns their keys."""
    with db.refusals():
        found = connection.execute(
            "select gaffer.change_items(%s, %s, %s, %s, %s)", [job, action, keys, operator.by, operator.reason]
        )
        return [key for (key,) in found]


def _call(connection: db.Connection, statement: LiteralString, *parameters: object) -> Any:
    with db.refusals():
        row = connection.execute(statement, parameters).fetchone()
    return None if row is None else row[0]
