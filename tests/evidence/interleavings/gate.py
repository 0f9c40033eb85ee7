"""The gate: a runner's connection stops here before each message, until it is told to go on."""

from __future__ import annotations

import os
import queue
import re
import socket
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any, NoReturn, TypeVar

import psycopg
import pytest

from gaffer_dagster.engine import holding
from gaffer_dagster.engine import run as engine_run
from gaffer_dagster.store import db
from tests.evidence.interleavings.database import Database

Answer = TypeVar("Answer")

_CONNECT: Callable[..., Any] = db.connect


class State(Enum):
    MOVING = "moving"
    STANDING = "standing"  # before a message
    INSIDE = "inside"  # at a stop within one
    BLOCKED = "blocked"
    OVER = "over"


class _Killed(BaseException):
    """What a killed process does is nothing."""


@dataclass(eq=False)
class Actor:
    """Whoever takes steps: a runner, or what the server still does for one that is gone."""

    number: int
    pid: int | None = None
    state: State = State.MOVING
    stop: int = 0
    was_blocked: bool = False  # within this step

    @property
    def name(self) -> str:
        return f"the server for {self.number}"


class Runner(Actor):
    """One run, or whatever else speaks to the server, in a thread of its own."""

    def __init__(self, gate: Gate, number: int, work: Callable[[Runner], object]) -> None:
        super().__init__(number)
        self.gate = gate
        self.database = gate.database
        self.message = ""
        self.dead = False
        self.loses = False  # the answer of the message that is under way
        self.acked: list[tuple[int, int]] = []  # rows, and the fence under which each was written
        self.verdicts: list[tuple[int, int, bool]] = []  # rows whose COMMIT was unknown, and what was found out
        self.is_refused_its_own = False  # a renewal of the lease that is its
        self.ending: object = None
        self.error: BaseException | None = None
        self.on: Stepped | None = None
        self._orders: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._held: Stepped | None = None
        self.thread = threading.Thread(target=self._run, args=(work,), daemon=True)

    @property
    def name(self) -> str:
        return str(self.number)

    def _run(self, work: Callable[[Runner], object]) -> None:
        _HERE.runner = self
        try:
            self.ending = work(self)
        except _Killed:
            self.ending = "killed"
        except BaseException as error:
            self.error = error
        finally:
            if not self.dead:
                self.drop()
            self.gate.events.put((self, State.OVER))

    # ── in its own thread ────────────────────────────────────────────────────────────────────────────────────────

    def say(self, connection: Stepped, message: str, send: Callable[[], Answer]) -> Answer:
        """Sends it when it is told to."""
        if self.dead:
            self._die(connection)
        self.on, self.pid, self.message = connection, connection.info.backend_pid, message
        if self.gate.stops_at(message):
            self.gate.events.put((self, State.STANDING))
            self._orders.get()
        if self.dead:
            self._die(connection)
        try:
            return send()
        finally:
            if self.dead:
                self._die(connection)
            if self.loses:  # whatever it was
                connection.close()
                self.loses = False
                raise psycopg.OperationalError("the connection is lost")

    def _die(self, connection: Stepped) -> NoReturn:
        connection.pgconn.finish()  # nothing is cancelled, nothing rolled back: the server will notice
        raise _Killed

    def connection(self) -> db.Connection:
        if self._held is None or self._held.is_given_back:
            self._held = self.gate.take(self)
        return self._held

    def drop(self) -> None:
        if self._held is not None:
            self._held.close()
            self._held = None

    def ask(self, what: Callable[[db.Connection], Answer]) -> Answer:
        """As the engine asks for what may be asked again."""
        while True:
            try:
                return what(self.connection())
            except Exception as error:
                if not db.worth_repeating(error):
                    raise
                self.drop()

    # ── in the explorer's ────────────────────────────────────────────────────────────────────────────────────────

    def go(self) -> None:
        self._orders.put(None)

    def cut(self) -> None:
        """The client's end of the connection, as far as it has one."""
        if self.on is not None and not self.on.closed:
            with socket.socket(fileno=os.dup(self.on.fileno())) as end:
                end.shutdown(socket.SHUT_RDWR)


class _Here(threading.local):
    runner: Runner | None = None


_HERE = _Here()


class Stepped(psycopg.Connection[tuple[Any, ...]]):
    """A connection of the product's, which asks before each message. Where it is closed it is rolled back, as by the
    server, and goes back to the pool."""

    runner: Runner | None = None
    is_given_back = False

    def wait(self, gen: Any, *args: Any, **kwargs: Any) -> Any:
        def send() -> Any:
            return super(Stepped, self).wait(gen, *args, **kwargs)

        return send() if self.runner is None else self.runner.say(self, _named(gen), send)

    def close(self) -> None:
        runner, status = self.runner, self.info.transaction_status
        if runner is None or runner.dead or self.closed:
            super().close()
        elif runner.loses or status is psycopg.pq.TransactionStatus.ACTIVE:
            runner.gate.leaves(runner, self.info.backend_pid)
            super().close()
        else:
            self.runner, self.is_given_back = None, True
            if status is not psycopg.pq.TransactionStatus.IDLE:
                self.execute("rollback")
            runner.gate.give_back(runner, self)


def _named(gen: Any) -> str:
    """What the message is about to do."""
    query = gen.gi_frame.f_locals.get("query", gen.__name__)
    text = query if isinstance(query, str) else query.as_string(None)
    called = re.search(r"gaffer\.(?!clock|cluster|base_of)(\w+)\(", text)
    if called:
        return called[1]
    if "pg_current_snapshot" in text:
        return "look"
    return " ".join(text.split()[:3])


class Gate:
    """Who is at work in a database, and their connections, which last longer than a schedule. `stops`: the messages
    before which it stops them; None: before each."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.stops: frozenset[str] | None = None
        self.events: queue.SimpleQueue[tuple[Runner, State]] = queue.SimpleQueue()
        self.actors: list[Actor] = []
        self._pool: dict[int, list[Stepped]] = {}

    @property
    def runners(self) -> list[Runner]:
        return [each for each in self.actors if isinstance(each, Runner)]

    def take(self, runner: Runner) -> Stepped:
        if runner.dead:
            raise _Killed
        pool = self._pool.setdefault(runner.number, [])
        if pool:
            connection = pool.pop()
            connection.is_given_back = False
        else:
            connection = _CONNECT(self.database.url, application_name=f"gaffer:{runner.number}")
            connection.__class__ = Stepped
            connection.execute("select set_config('gaffer_testing.runner', %s, false)", [str(runner.number or "")])
        connection.runner = runner
        return connection

    def give_back(self, runner: Runner, connection: Stepped) -> None:
        self._pool[runner.number].append(connection)

    def leaves(self, runner: Runner, pid: int) -> None:
        """The server will notice that the client has gone; until then nobody is to go on."""
        runner.pid = None
        self.actors.append(Actor(runner.number, pid))

    def stops_at(self, message: str) -> bool:
        return self.stops is None or message in self.stops

    def starts(self, number: int, work: Callable[[Runner], object]) -> None:
        """One more; also asked for by another runner in the middle of its work."""
        runner = Runner(self, number, work)
        self.actors.append(runner)
        runner.thread.start()

    def opens_for(self, work: Callable[[Runner], object]) -> None:
        """Here and now, stopped nowhere."""
        self.stops = frozenset()
        _HERE.runner = runner = Runner(self, 0, work)
        try:
            work(runner)
        finally:
            runner.drop()
            _HERE.runner = None

    def close(self) -> None:
        for pool in self._pool.values():
            for connection in pool:
                connection.close()


@contextmanager
def stepped_engines() -> Generator[None]:
    """The engine's connections ask before each message, too, and what it waits for takes no time."""

    def connect(url: str, **kwargs: Any) -> db.Connection:
        return _CONNECT(url, **kwargs) if _HERE.runner is None else _HERE.runner.gate.take(_HERE.runner)

    def sleep(_: float) -> None:
        return

    at_once = SimpleNamespace(sleep=sleep, monotonic=time.monotonic)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(db, "connect", connect)
        patch.setattr(holding, "time", at_once)
        patch.setattr(engine_run, "time", at_once)
        yield
