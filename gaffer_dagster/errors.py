"""Every error that the package raises on purpose, and the one kind of warning.

Each message says what happened, names the job, field or value, and ends with the cure. Expected outcomes
(busy, paused, nothing due) are values, not errors; see `gaffer_dagster.domain.run.Outcome`.
"""

from __future__ import annotations

import sys
import traceback


class GafferError(Exception):
    """Whatever the package refuses, or cannot do."""


class GafferWarning(UserWarning):
    """A definition that can be meant as written, and perhaps is not. Raised as an error if `warnings` is told to."""


class BadSpecError(GafferError, ValueError):
    """A job, schedule or bound that cannot be meant as written. Raised where it is defined, and says where that is."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.place = _place()
        """The user's line that called us, such as `jobs.py:12`; empty where that is a library's."""

    def __str__(self) -> str:
        message = super().__str__()
        return f"{message} ({self.place})" if self.place else message


class BadInputError(GafferError, ValueError):
    """A value from outside (a database URL, a table's name, a row) that cannot be used."""


class DatabaseUnavailableError(GafferError):
    """Postgres cannot be reached, or went away. Nothing was committed that is not recorded; try again."""


class OutOfRoomError(GafferError):
    """The server is short of disk, memory or connections. What was being done was undone; it can be done again once
    somebody has made room."""

    def __init__(self, message: str, sqlstate: str) -> None:
        super().__init__(message)
        self.sqlstate = sqlstate


class MissingRightsError(GafferError):
    """The role may not do what is asked. The message says what to grant."""


class SchemaBehindError(GafferError):
    """The tables are older than this package; `gaffer migrate` brings them up to date."""


class SchemaAheadError(GafferError):
    """The tables are newer than this package; upgrade it where this process runs."""


class MigrationEditedError(GafferError):
    """A migration that was applied has another text now."""


class LeaseLostError(GafferError):
    """Another run took over, or an operator released the lease. Nothing of this batch was committed."""


class DeadlinePassedError(GafferError):
    """The run is past its deadline. Nothing of this batch was committed."""


class BatchEndedError(GafferError):
    """The batch cannot be used any more: an error, or its own transaction control, ended its transaction."""


class ProtectedTableError(GafferError):
    """A protected table was written outside a fenced batch, or is not protected as the job demands; says what to do."""


class UnknownJobError(GafferError):
    """No job of this name is registered or defined."""


class RenamedJobError(GafferError):
    """A new job does the work of a known one: renamed, it would begin anew. `gaffer rename` keeps its watermark."""


class JobHeldError(GafferError):
    """A run of the job is at work, and what was asked for must not happen meanwhile."""


class TableInUseError(GafferError):
    """Somebody uses a table that nobody may use for the moment that a change takes; try again."""


class WatchHeldError(GafferError):
    """Nobody can look for what is wrong: somebody holds the turn to do so for longer than a pass takes. Says who."""


class ClockSkewError(GafferError):
    """The worker's clock and the database's are more than five minutes apart."""


class NotPreparedError(GafferError):
    """A source table lacks what `NewRows` needs; `gaffer prepare` adds it."""


class ForeignWatermarkError(GafferError):
    """The stored position belongs to another Postgres cluster, or lies in its future (a restored copy)."""


class NotDeliveredError(GafferError):
    """A message, or a heartbeat, was not taken. Says how that went, and never where it was meant to go."""


class MissingPackageError(GafferError):
    """What is asked for needs a package that is not installed; the message says what to install."""


class LocalPostgresError(GafferError):
    """The private Postgres for development cannot be started or used."""


def _place() -> str:
    ours = __name__.partition(".")[0]
    for frame, line in traceback.walk_stack(None):
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if package in ("dagster", "click"):  # which call us: there is no line of a user's
            return ""
        if package != ours and package not in sys.stdlib_module_names:
            return f"{frame.f_code.co_filename}:{line}"
    return ""
