"""A clock for a scratch database, moved together with the engine's.

The product's `gaffer.clock()` has no way to be set; this replaces its body in one database, for every session of it.
"""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

from gaffer_dagster.domain.duration import as_duration
from gaffer_dagster.errors import BadInputError
from gaffer_dagster.store import db
from gaffer_dagster.testing.database import refuse_unless_scratch


class Clock:
    """The time of one scratch database, and of the runs that `run_due` and the faults start there.

    It starts as the real time, or as it was left; it moves on by itself, and by `advance` or `set`. What a job reads
    elsewhere (`datetime.now()`, SQL's `now()`) is the real time still: a job that is right asks its batch. Raises
    `BadInputError` for a database that is no scratch database.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        with db.connect(url, application_name="gaffer:testing") as connection:
            refuse_unless_scratch(connection, url)
            connection.execute("create table if not exists gaffer.testing_clock (ahead interval not null)")
            connection.execute(
                """
                create or replace function gaffer.clock() returns timestamptz
                language sql volatile set search_path = pg_catalog, pg_temp
                as 'select pg_catalog.clock_timestamp() + coalesce((select ahead from gaffer.testing_clock), ''0'')'
                """
            )
        self._offset = ahead(url)

    def advance(self, by: timedelta | str) -> None:
        """Moves the time on, by a `timedelta` (a negative one moves it back) or text such as `"1d"`. Raises
        `BadSpecError`."""
        self._offset += by if isinstance(by, timedelta) else as_duration(by, "by")
        with db.connect(self._url, application_name="gaffer:testing") as connection:
            connection.execute("begin")
            connection.execute("delete from gaffer.testing_clock")
            connection.execute("insert into gaffer.testing_clock values (%s)", [self._offset])
            connection.execute("commit")

    def set(self, at: datetime) -> None:
        """Makes it `at` now, an aware datetime. Raises `BadInputError` for anything else."""
        if not isinstance(at, datetime) or at.utcoffset() is None:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise BadInputError(
                f"at={at!r} is no aware datetime; write one such as datetime(2027, 3, 1, 6, tzinfo=timezone.utc)"
            )
        self.advance(at - self.now())

    def now(self) -> datetime:
        """The time now, in UTC; hand it to the engine as its worker's clock."""
        return datetime.now(timezone.utc) + self._offset


def ahead(url: str) -> timedelta:
    """How far the clock of this database was moved; nothing where it was not."""
    with db.connect(url, application_name="gaffer:testing") as connection:
        found = None
        if connection.execute("select to_regclass('gaffer.testing_clock')").fetchone() != (None,):
            found = connection.execute("select ahead from gaffer.testing_clock").fetchone()
    return timedelta() if found is None else found[0]
