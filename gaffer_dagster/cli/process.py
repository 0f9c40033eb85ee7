"""What a command that is at work for a while needs: its log on stderr, and heed of signals."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import TextIO

import click

from gaffer_dagster.cli.command import printable
from gaffer_dagster.engine.log import BriefFormatter, JsonFormatter


class _Told(KeyboardInterrupt):
    """A signal, as an exception that psycopg heeds within a statement and nobody's `except Exception` catches."""


@contextmanager
def signals() -> Generator[None]:
    """Ends the process with 128 + n when signal n comes, once what is under way is tidied up."""
    told: list[int] = []

    def stop(number: int, _frame: FrameType | None) -> None:
        if not told:  # a second one must not break into the tidying up
            told.append(number)
            raise _Told(f"told to stop by {signal.Signals(number).name}")

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup and the background of a script want it
            signal.signal(number, stop)
    try:
        yield
    except KeyboardInterrupt:
        click.echo("gaffer: interrupted; what was committed stays", err=True)
        sys.exit(128 + (told[0] if told else signal.SIGINT))


class _Stderr(logging.StreamHandler[TextIO]):
    """Writes to what stderr is now: while a progress bar is drawn, its lines come out above it."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


class _Formatter(BriefFormatter):
    """What a user's function raised may hold anything; its traceback keeps its lines."""

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(map(printable, super().format(record).splitlines()))


def log_to_stderr(*, as_json: bool, level: int) -> None:
    handler = _Stderr()
    handler.setFormatter(JsonFormatter() if as_json else _Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger("gaffer")
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False
