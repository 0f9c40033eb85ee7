"""`gaffer.receiver` and `gaffer.alert_delivery`: notices on their way, one series of attempts for each receiver; and
which success a job's heartbeat was last sent for."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timezone
from uuid import UUID

from psycopg.rows import class_row, dict_row

from gaffer_dagster.domain.alert import Severity
from gaffer_dagster.domain.incident import Alert
from gaffer_dagster.domain.notice import Notice
from gaffer_dagster.store import db


def claim(connection: db.Connection, receiver: str, least: Severity) -> UUID | None:
    """The next message for a receiver, which takes incidents from this severity on. Nobody else gets it for a minute.
    None: nothing is due, or another process is just asking."""
    with connection.cursor() as cursor:
        # One message to the server: a process that is stopped in the middle holds no lock.
        cursor.execute(
            db.BEGIN + "set local statement_timeout = '10s'; select gaffer.claim_notices(%s, %s); commit",
            [receiver, str(least)],
        )
        return db.committed(cursor)[0]


def notices(connection: db.Connection, receiver: str, message: UUID) -> list[Notice]:
    """What a message that was claimed is to say. None at all: somebody else has delivered it meanwhile."""
    with connection.cursor(row_factory=dict_row) as cursor:
        rows = cursor.execute(
            """
            select d.notice, d.number,
                   (select n.id from gaffer.alert n
                     where n.job = a.job and n.kind = a.kind and n.resolved_at is null and n.id > a.id) as newer,
                   a.id, a.key, a.job, a.watch, a.kind, a.severity, a.since_at, a.opened_at,
                   a.details, a.reminders, a.reminded_at, a.acked_at, a.acked_by, a.ack_reason, a.resolved_at
              from gaffer.alert_delivery d
              join gaffer.alert a on a.id = d.alert
             where d.receiver = %s and d.message = %s and d.delivered_at is null and d.dropped_at is null
             order by d.id
            """,
            [receiver, message],
        ).fetchall()
    return [
        Notice(row.pop("notice"), number=row.pop("number"), newer=row.pop("newer"), alert=Alert(**row)) for row in rows
    ]


def note(connection: db.Connection, receiver: str, message: UUID, error: str | None) -> None:
    """How the attempt to send it went: it was delivered (None), or what happened."""
    connection.execute("select gaffer.note_delivery(%s, %s, %s)", [receiver, message, error])


@dataclass(frozen=True)
class Receiver:
    """A row of `gaffer.receiver`. `waiting`: the notices that are not delivered yet, with those that a mute holds
    back."""

    name: str
    last_seen_at: datetime
    failing_since: datetime | None
    error: str | None
    waiting: int


def receivers(connection: db.Connection) -> list[Receiver]:
    """All that were ever served, by name."""
    with connection.cursor(row_factory=class_row(Receiver)) as cursor:
        return cursor.execute(
            """
            select r.name, r.last_seen_at, r.failing_since, r.error, pg_catalog.count(d.id) as waiting
              from gaffer.receiver r
              left join gaffer.alert_delivery d
                on d.receiver = r.name and d.delivered_at is null and d.dropped_at is null
             group by r.name
             order by r.name
            """
        ).fetchall()


def unserved(connection: db.Connection) -> list[str]:
    """The receivers that jobs name and that nobody has served for a day, as instructions."""
    rows = connection.execute(
        """
        select named, min(j.name), count(*)
          from gaffer.job j
         cross join lateral pg_catalog.jsonb_array_elements_text(
               coalesce(nullif(j.spec #> '{alerts,receivers}', 'null'), '[]')) named
         where j.retired_at is null and named <> 'log'
           and not exists (select from gaffer.receiver r
                            where r.name = named and r.last_seen_at > gaffer.clock() - interval '1 day')
         group by named
         order by named
        """
    )
    return [
        f"job {job!r}{f' and {count - 1} more' if count > 1 else ''} names the receiver {name!r}, which no process "
        f"that sends notices knows (the log is told); set GAFFER_RECEIVER_{name.upper()} where one runs"
        for name, job, count in rows
    ]


def failing(connection: db.Connection) -> list[str]:
    """The receivers that do not take what waits for them, as instructions; without those that nobody has served for a
    day."""
    rows = connection.execute(
        """
        select r.name, r.failing_since
          from gaffer.receiver r
         where r.failing_since is not null and r.last_seen_at > gaffer.clock() - interval '1 day'
           and exists (select from gaffer.alert_delivery d
                        where d.receiver = r.name and d.delivered_at is null and d.dropped_at is null)
         order by r.name
        """
    )
    return [
        f"receiver {name} has taken no message since {since.astimezone(timezone.utc):%Y-%m-%d %H:%M}Z; see: gaffer "
        "alerts list"
        for name, since in rows
    ]


def unpinged(connection: db.Connection, variables: Collection[str]) -> list[tuple[str, str, datetime]]:
    """The jobs that have succeeded since their heartbeat was last sent: name, the variable that names its URL (one of
    these), and the success. In any order, so that none is always the last."""
    return connection.execute(
        """
        select name, spec #>> '{alerts,heartbeat}', last_success_at
          from gaffer.job
         where spec #>> '{alerts,heartbeat}' = any (%s) and last_success_at > coalesce(pinged_at, rules_at)
         order by pg_catalog.random()
        """,
        [list(variables)],
    ).fetchall()  # type: ignore[return-value]


def note_ping(connection: db.Connection, job: str, success: datetime) -> None:
    connection.execute("select gaffer.note_ping(%s, %s)", [job, success])
