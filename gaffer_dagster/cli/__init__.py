"""The `gaffer` command. It works when Dagster is what is broken, and starts without importing it.

Exit codes: 0 done; 1 it failed (`check`: something is wrong); 2 the command was not understood (`check`: it cannot
tell); 75 the database cannot be reached (try again);
128 + n it was interrupted by signal n.
"""

from __future__ import annotations

import atexit
import errno
import io
import os
import re
import sys
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import click

from gaffer_dagster import __version__
from gaffer_dagster.domain.close import meant
from gaffer_dagster.errors import DatabaseUnavailableError, GafferError

FAILED = 1
TRY_AGAIN = 75

# In the order in which they are shown. A module is loaded when its command is: `name: (module, what it does)`.
COMMANDS = {
    "Look": {
        "status": ("show", "Each job: how it went, what is left, when it is due next."),
        "runs": ("show", "The newest runs first, of a job or of all."),
        "ticks": ("ticks", "What became of each tick."),
        "check": ("watch", "What is overdue or failing, and who looks; for probes."),
        "doctor": ("doctor", "What is set up well and what is not, with cures."),
        "alerts": ("alerts", "Incidents: what is open, who knows of it, who is told."),
        "audit": ("audit", "Who did what, when, and why."),
        "metrics": ("metrics", "Everything as Prometheus text."),
        "preview": ("preview", "What a schedule means, and when it fires next."),
        "simulate": ("simulate", "A year of a schedule, with outages and failures."),
    },
    "Work": {
        "run": ("run", "Run a job until nothing due is left."),
        "watch": ("watch", "Look again and again, like Dagster's sensor."),
    },
    "Change": {
        "pause": ("operate", "Let a job rest."),
        "resume": ("operate", "End the pause of a job."),
        "release": ("operate", "Take the lease of a job from a run that hangs."),
        "watermark": ("watermark", "How far a job has got, and where it is to go on."),
        "items": ("items", "Rows that failed: list them, try them again, drop them."),
        "rename": ("operate", "Let a job go on under another name."),
        "retire": ("operate", "Miss nothing of a job, or a watch, any more."),
        "protect": ("protect", "Let the database refuse writes outside batches."),
        "unprotect": ("protect", "Let anybody write a table again."),
        "prune": ("prune", "Remove old history."),
    },
    "Set up": {
        "migrate": ("database", "Bring the tables of gaffer_dagster up to date."),
        "register": ("operate", "Make jobs known before the new code runs."),
        "prepare": ("database", "Give a table what jobs need to read it."),
        "dagster": ("dagster", "What Dagster's instance has to do with the jobs."),
        "db": ("database", "The private Postgres for development; psql."),
        "completion": ("completion", "Let the shell complete commands and names of jobs."),
    },
}


def _open_streams() -> None:
    """A job is done whether or not anybody listens: a closed or broken stream is as good as /dev/null."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 — for the rest of the process
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal that cannot show a letter shows its number
    atexit.register(_close_streams)


def _close_streams() -> None:
    for name in ("stdout", "stderr"):
        try:
            getattr(sys, name).flush()
        except (OSError, ValueError):
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 — Python's own flush would change the exit code


class Commands(click.Group):
    """Loads a command when it is called, and says what went wrong in one line, with the exit code for it."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for section in COMMANDS.values() for name in section] + super().list_commands(ctx)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        for section in COMMANDS.values():
            if cmd_name in section:
                return getattr(import_module(f"gaffer_dagster.cli.{section[cmd_name][0]}"), cmd_name)
        return super().get_command(ctx, cmd_name)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            ctx.fail(f"No such command {args[0]!r}{meant(args[0], self.list_commands(ctx))}.")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(len(name) for section in COMMANDS.values() for name in section)
        for title, section in COMMANDS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), help_) for name, (_, help_) in section.items()])

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with _harmless_usage_errors():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        _open_streams()
        try:
            with _harmless_usage_errors():
                return super().invoke(ctx)
        except DatabaseUnavailableError as error:
            _fail(str(error), TRY_AGAIN)
        except GafferError as error:
            _fail(str(error), FAILED)
        except UnicodeEncodeError as error:  # bytes of the command line that are no text
            _fail(f"{error.object!r} is no text for a database ({error}); write it in UTF-8", FAILED)
        except OSError as error:
            if error.errno == errno.EPIPE:  # nobody listens any more, which click knows how to end
                raise
            _fail(f"{error}; make room, or name a place that this user may use", FAILED)
        except Exception as error:
            from gaffer_dagster.store import db  # loads the driver

            if not db.is_database_error(error):
                raise
            cure = ""
            if db.sqlstate(error) == "42501":
                cure = (
                    "; what is gaffer's may who is a member of gaffer_operator (what people do), gaffer_runner (work) "
                    "or gaffer_reader (look); a table of yours its owner grants"
                )
            _fail(
                f"the database refused: {db.primary_message(error)} ({db.sqlstate(error)}){cure}",
                TRY_AGAIN if db.lost_connection(error) else FAILED,
            )


def _fail(said: str, code: int) -> None:
    from gaffer_dagster.cli.command import printable

    click.echo("\n".join(map(printable, f"gaffer: {_shortened(said)}".split("\n"))), err=True)
    sys.exit(code)


def _shortened(said: str) -> str:
    """Of what was pasted by mistake, for a name or a path, the beginning."""
    return re.sub(r"\S{400,}", lambda found: f"{found[0][:100]}… ({len(found[0]):,} characters)", said)


@contextmanager
def _harmless_usage_errors() -> Generator[None]:
    """They repeat what was typed, or pasted."""
    try:
        yield
    except click.UsageError as error:
        said = _shortened(error.format_message())
        if said == error.format_message() and said.replace("\n", "").isprintable():
            raise
        from gaffer_dagster.cli.command import printable

        raise click.UsageError(printable(said), error.ctx) from None


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="gaffer")
def main() -> None:
    """Scheduled jobs that must not fail quietly.

    The database is the one that GAFFER_DATABASE_URL names ('local': a private server in ./.gaffer, which is also
    taken without the variable where that folder is).

    What only shows something has --json: one object a line. What changes something takes --by and --reason, which
    `gaffer audit` shows, and --yes: what no other command takes back asks first.
    """
