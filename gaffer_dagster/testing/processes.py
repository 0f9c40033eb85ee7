"""Runs in processes of their own, which stop at a place where a test wants them to and wait for what it does to them.

The processes are forked from a server that has imported everything, which is ten times as fast as starting each anew.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection as Pipe
from typing import Any

from typing_extensions import Self

from gaffer_dagster.testing.waits import PATIENCE


class BoomError(Exception):
    """What a process raises where it stands, when it is told to."""


@dataclass(frozen=True)
class Ending:
    """How a process ended: the name and text of what it raised, if it did, and where; else what became of its run."""

    error: str | None = None
    text: str = ""
    outcome: str | None = None
    items: int = 0
    batches: int = 0
    fence: int | None = None
    trace: str = ""


CONTEXT = multiprocessing.get_context("forkserver")
_PRELOADED = [__name__, "gaffer_dagster.testing.bench", "gaffer_dagster.testing.warm"]


class Engine:
    """A running process, as the test holds it. Whatever it waits for raises `AssertionError` when `patience` (in
    seconds) is over."""

    def __init__(
        self,
        target: Callable[..., Ending],
        arguments: Sequence[Any],
        *,
        stops: Sequence[str] = (),
        nth: int = 1,
        patience: float = PATIENCE,
    ) -> None:
        self._patience = patience
        self._pipe, theirs = CONTEXT.Pipe()
        life = pickle.dumps((target, arguments))  # read there once its environment is this one
        self._process = CONTEXT.Process(target=_live, args=(theirs, dict(os.environ), stops, nth, life), daemon=True)
        self._process.start()
        theirs.close()

    def reaches(self, place: str) -> None:
        """Waits until it stands there."""
        ended = self.reaches_or_ends(place)
        if ended is not None:
            raise AssertionError(f"the run ended before it got to {place!r}: {ended}")

    def reaches_or_ends(self, place: str) -> Ending | None:
        """Waits until it stands there (None), or has ended before."""
        told = self._receive()
        if isinstance(told, Ending):
            return told
        if told != place:
            raise AssertionError(f"the run stands at {told!r}, not at {place!r}")
        return None

    def go(self) -> None:
        """Lets it go on from where it stands."""
        self._pipe.send("go")

    def fail(self) -> None:
        """Lets it raise `BoomError` where it stands."""
        self._pipe.send("fail")

    def ends(self) -> Ending:
        """Waits for its end; what it said of it."""
        ending = self._receive()
        if not isinstance(ending, Ending):
            raise AssertionError(f"the run stands at {ending!r} and has not ended")
        self._process.join(self._patience)
        return ending

    def died_or_ended(self) -> Ending | None:
        """Waits for its end; None if it was killed."""
        try:
            return self.ends()
        except EOFError:
            self.dies()
            return None

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """kill -9, and waits until it is gone."""
        self._process.kill()
        self.dies()

    def dies(self) -> None:
        """Waits until it is gone without having said a word."""
        self._process.join(self._patience)
        if self._process.exitcode != -signal.SIGKILL:
            raise AssertionError(f"the process was not killed: it ended with {self._process.exitcode}")

    def pause(self) -> None:
        self.signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.signal(signal.SIGCONT)

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    @property
    def pid(self) -> int:
        if self._process.pid is None:
            raise AssertionError("the process was not started")
        return self._process.pid

    def destroy(self) -> None:
        self._process.kill()
        self._process.join(self._patience)
        self._pipe.close()

    def _receive(self) -> Any:
        if not self._pipe.poll(self._patience):
            raise AssertionError(f"nothing was heard of the run for {self._patience:g} s")
        return self._pipe.recv()


class Engines:
    """Starts processes, and leaves none behind when it is exited."""

    def __init__(self, patience: float = PATIENCE) -> None:
        self._patience = patience
        self._all: list[Engine] = []

    def __enter__(self) -> Self:
        # The server is one for the whole process, and what is to be loaded there can only be said as a whole: ours goes
        # beside what the test suite has asked for.
        wanted: list[str] = getattr(getattr(forkserver, "_forkserver", None), "_preload_modules", [])
        CONTEXT.set_forkserver_preload(list(dict.fromkeys([*wanted, *_PRELOADED])))
        return self

    def __exit__(self, *_: object) -> None:
        self.destroy()

    def add(self, target: Callable[..., Ending], *arguments: Any, stops: Sequence[str] = (), nth: int = 1) -> Engine:
        """One that does `target(way, *arguments)`, which is importable, and says how that ended. It stops when it gets
        to the first of `stops` for the `nth` time, and at each other one when it gets there after that."""
        self._all.append(Engine(target, arguments, stops=stops, nth=nth, patience=self._patience))
        return self._all[-1]

    def destroy(self) -> None:
        while self._all:
            self._all.pop().destroy()


# ── the process's own side ───────────────────────────────────────────────────────────────────────────────────────


class Way:
    """The way of one process past all places."""

    def __init__(self, pipe: Pipe, stops: Sequence[str], nth: int) -> None:
        self._pipe = pipe
        self._stops = list(stops)
        self._left = nth

    def at(self, place: str) -> None:
        """It is there: stands still, if it is to, until it is told to go on."""
        if self._stops and place == self._stops[0]:
            self._left -= 1
            if self._left <= 0:
                del self._stops[0]
                self._stand(place)

    def _stand(self, place: str) -> None:
        self._pipe.send(place)
        try:
            told = self._pipe.recv()
        except EOFError:
            os._exit(70)  # the test is gone
        if told == "fail":
            raise BoomError("told to fail")


def _live(pipe: Pipe, environment: dict[str, str], stops: Sequence[str], nth: int, life: bytes) -> None:
    os.environ.clear()  # that of the server is of the first test
    os.environ.update(environment)
    # Whatever the test was started with: in the background of a shell, interrupts are ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    target, arguments = pickle.loads(life)  # noqa: S301 — from the test itself
    pipe.send(target(Way(pipe, stops, nth), *arguments))
