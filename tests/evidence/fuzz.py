"""Bad inputs of every kind (`bad_inputs.py`): each ends in a clear error or in correct work, soon, and shows no secret.

    ./dev fuzz --seed S --inputs N

A fault is: an error that is none of ours, an error that says no cure, work that is not right, more than two seconds of
this process or thirty on the wall, or the canary in anything that was said: errors with what they were made of, log
lines, fields of events, what a command printed, pages, messages that were delivered, tables. `judge` is what decides;
its broken variants are in `test_bad_inputs.py`.
"""

from __future__ import annotations

import argparse
import base64
import io
import logging
import random
import re
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

from gaffer_dagster.testing import scratch_database
from gaffer_dagster.testing.database import server
from tests.evidence import bad_inputs_at_work as at_work
from tests.evidence.bad_inputs import CANARY, LOGGER, Kind, Told, WrongError, pure

LIMIT = 2.0
"""Seconds of processor time that an input may take."""
WAIT = 30.0
"""Seconds that it may take with all that it waits for, such as a lock, an answer or a sleep."""

MOST = 4
_QUOTED = re.compile(r"(['\"]).*|\d+")
LEAK = "the secret is told"


class TooSlowError(BaseException):
    """Not an Exception, which a product may catch."""


@dataclass
class Report:
    """`outcomes`: of each kind, how often what came of its inputs. `faults`: kind, what is wrong, and the input."""

    outcomes: dict[str, Counter[str]] = field(default_factory=dict)
    faults: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def inputs(self) -> int:
        return sum(sum(each.values()) for each in self.outcomes.values())

    def __str__(self) -> str:
        lines = [f"{self.inputs:,} inputs, {len(self.faults):,} faults"]
        for kind, counts in self.outcomes.items():
            lines.append(f"{kind}: {sum(counts.values()):,}")
            lines += [f"    {count:>7,}  {outcome}" for outcome, count in counts.most_common()]
        for (kind, what), found in _grouped(self.faults).items():
            lines.append(f"FAULT ({len(found):,} times) {kind}: {what}")
            lines += [f"    {each}" for each in sorted(found, key=len)[:MOST]]
        return "\n".join(lines)


def _grouped(faults: Iterable[tuple[str, str, str]]) -> dict[tuple[str, str], list[str]]:
    found: dict[tuple[str, str], list[str]] = {}
    for kind, what, given in faults:
        if what.startswith(LEAK):
            what, given = LEAK, f"{given}\n        {what}"
        found.setdefault((kind, _QUOTED.sub("…", what)), []).append(given)
    return found


def judge(kind: Kind, given: Any) -> tuple[str, str | None]:
    """What came of an input, and what is wrong with that, if anything."""
    told = Told()
    with _heard(told):
        try:
            with _limited():
                came = kind.take(given, told) or "worked"
            wrong = None
        except TooSlowError as error:
            frames = traceback.extract_tb(error.__traceback__)
            came, wrong = "hung", f"more than {error} in {frames[-2].name}"
        except WrongError as error:
            came, wrong = "wrong", str(error)[:300]
        except Exception as error:
            came, wrong = type(error).__name__, None
            told("".join(traceback.format_exception(error)))
            told(*chain(error))
            try:
                if not kind.refused(error):
                    at = traceback.extract_tb(error.__traceback__)[-1]
                    wrong = f"{came} in {at.name}: {str(error)[:60]}"
            except WrongError as unclear:
                wrong = str(unclear)
    leak = leaked(told.texts)
    return came, f"{LEAK}: {leak}" if leak is not None else wrong


def chain(error: BaseException) -> Iterator[str]:
    """An error and what it says that it came of, as whoever shows it gets them."""
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    yield str(error)
    yield repr(error)
    if cause is not None:
        yield from chain(cause)


_FORMS = {CANARY.lower()} | {
    # In base64, wherever it begins within three bytes.
    base64.b64encode(b"\0" * before + CANARY.encode())[4 if before else 0 : -4].decode().lower()
    for before in range(3)
}


def leaked(texts: Iterable[str]) -> str | None:
    """Where the canary is, in whatever form."""
    for text in texts:
        low = text.lower()
        for form in _FORMS:
            at = low.find(form)
            if at >= 0:
                return ascii(text[max(0, at - 60) : at + 20])
    return None


@contextmanager
def _heard(told: Told) -> Generator[None]:
    """Log lines, with the fields of their events, and whatever is printed."""

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told(self.format(record), getattr(record, "gaffer", ""))

    handler, printed = Heard(), io.StringIO()
    LOGGER.addHandler(handler)
    was, propagated = LOGGER.level, LOGGER.propagate
    LOGGER.setLevel(logging.DEBUG)
    LOGGER.propagate = False
    stdout, stderr, sys.stdout, sys.stderr = sys.stdout, sys.stderr, printed, printed
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        sys.stdout, sys.stderr = stdout, stderr
        LOGGER.removeHandler(handler)
        LOGGER.setLevel(was)
        LOGGER.propagate = propagated
        told(printed.getvalue())


@contextmanager
def _limited() -> Generator[None]:
    """By the processor's time, which other programs on this machine take nothing of; and, for what waits, by the clock
    on the wall."""

    def stop(number: int, _frame: FrameType | None) -> None:
        raise TooSlowError(f"{LIMIT:g} s of the processor" if number == signal.SIGPROF else f"{WAIT:g} s")

    handlers = {number: signal.signal(number, stop) for number in (signal.SIGPROF, signal.SIGALRM)}
    began = time.monotonic()
    outer, _ = signal.setitimer(signal.ITIMER_REAL, WAIT)  # the time limit of a test that this is within
    signal.setitimer(signal.ITIMER_PROF, LIMIT)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if outer:
            signal.setitimer(signal.ITIMER_REAL, max(0.001, outer - (time.monotonic() - began)))


def _shown(given: Any) -> str:
    """Before it is used, for that may change it."""
    try:
        return ascii(given)
    except Exception as error:
        return f"(a {type(given).__name__} that cannot be shown: {type(error).__name__})"


def fuzz(kinds: Iterable[Kind], seed: int, inputs: int, report: Report | None = None) -> Report:
    """So many inputs, each kind its share. A kind's inputs are the same for a seed, whatever the other kinds are."""
    report = report or Report()
    chosen = list(kinds)
    whole = sum(kind.share for kind in chosen)
    for kind in chosen:
        chance = random.Random(f"{seed}/{kind.name}")
        counts = report.outcomes.setdefault(kind.name, Counter())
        for number in range(max(1, round(inputs * kind.share / whole))):
            given = kind.make(chance)
            shown = f"number {number}: {_shown(given)}"
            came, wrong = judge(kind, given)
            if came == "hung" and number == 0:  # the first of a kind loads what it needs
                came, wrong = judge(kind, given)
            counts[came] += 1
            if wrong is not None:
                report.faults.append((kind.name, wrong, shown[:400]))
    return report


def whole(owner: str, seed: int, inputs: int, only: str = "") -> Report:
    """All kinds, with a database of this URL."""
    with at_work.world(owner) as made:
        kinds = [*pure(), *at_work.with_dagster(), *at_work.with_database(made)]
        report = fuzz([kind for kind in kinds if only in kind.name], seed, inputs)
        leak = leaked(made.leaks())
    if leak is not None:
        report.faults.append(("tables", f"{LEAK}: {leak}", ""))
    return report


def main() -> None:
    parser = argparse.ArgumentParser(prog="./dev fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1, 1_000_000))
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--only", default="", help="only the kinds whose name has this in it")
    given = parser.parse_args()
    print(f"seed {given.seed}, {given.inputs:,} inputs", flush=True)
    began, used = time.monotonic(), time.process_time()
    with TemporaryDirectory() as folder, server(Path(folder)) as url, scratch_database(url) as owner:
        report = whole(owner, given.seed, given.inputs, given.only)
    print(report)
    print(f"{time.monotonic() - began:.0f} s, of the processor {time.process_time() - used:.0f} s; seed {given.seed}")
    sys.exit(bool(report.faults))


if __name__ == "__main__":
    main()
