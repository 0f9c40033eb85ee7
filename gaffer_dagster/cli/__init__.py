"""The `gaffer` command. It works when Dagster is what is broken, and starts without importing it.

Exit codes: 0 done; 1 it failed (`check`: something is wrong); 2 the command was not understood (`check`: it cannot
tell); 75 the database cannot be reached (try again);
128 + n it was interrupted by signal n.
"""

from __future__ import annotations

import atexit
import os
import sys
from typing import Any

import click

from gaffer_dagster import __version__
from gaffer_dagster.cli import (
    alerts,
    dagster,
    database,
    doctor,
    items,
    metrics,
    operate,
    preview,
    protect,
    run,
    show,
    simulate,
    ticks,
    watch,
    watermark,
)
from gaffer_dagster.errors import DatabaseUnavailableError, GafferError
from gaffer_dagster.store import db

FAILED = 1
TRY_AGAIN = 75


def _open_streams() -> None:
    """A job is done whether or not anybody listens: a closed or broken stream is as good as /dev/null."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 — for the rest of the process
    atexit.register(_close_streams)


def _close_streams() -> None:
    for name in ("stdout", "stderr"):
        try:
            getattr(sys, name).flush()
        except (OSError, ValueError):
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 — Python's own flush would change the exit code


class _Group(click.Group):
    """Says what went wrong in one line, as an instruction, and exits with the code for it."""

    def invoke(self, ctx: click.Context) -> Any:
        _open_streams()
        try:
            return super().invoke(ctx)
        except DatabaseUnavailableError as error:
            click.echo(f"gaffer: {show.printable(str(error))}", err=True)
            sys.exit(TRY_AGAIN)
        except GafferError as error:
            click.echo(f"gaffer: {show.printable(str(error))}", err=True)
            sys.exit(FAILED)
        except UnicodeEncodeError as error:  # bytes of the command line that are no text
            click.echo(f"gaffer: {error.object!r} is no text for a database ({error}); write it in UTF-8", err=True)
            sys.exit(FAILED)
        except Exception as error:
            if not db.is_database_error(error):
                raise
            said = show.printable(db.primary_message(error))
            click.echo(f"gaffer: the database refused: {said} ({db.sqlstate(error)})", err=True)
            sys.exit(TRY_AGAIN if db.lost_connection(error) else FAILED)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="gaffer")
def main() -> None:
    """Scheduled jobs that must not fail quietly.

    The database is the one that GAFFER_DATABASE_URL names ('local': a private server in ./.gaffer, which is also
    taken without the variable where that folder is).
    """


main.add_command(run.run)
main.add_command(show.status)
main.add_command(show.runs)
main.add_command(preview.preview)
main.add_command(ticks.ticks)
main.add_command(watch.check)
main.add_command(watch.watch)
main.add_command(alerts.alerts)
main.add_command(metrics.metrics)
main.add_command(simulate.command)
main.add_command(operate.register)
main.add_command(operate.pause)
main.add_command(operate.resume)
main.add_command(operate.rename)
main.add_command(operate.release)
main.add_command(operate.retire)
main.add_command(items.items)
main.add_command(protect.protect)
main.add_command(protect.unprotect)
main.add_command(watermark.watermark)
main.add_command(database.migrate)
main.add_command(database.prepare)
main.add_command(database.db)
main.add_command(doctor.doctor)
main.add_command(dagster.dagster)
