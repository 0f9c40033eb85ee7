"""The orders in which the statements of runners can reach the server, tried one after the other on a real Postgres.

A runner is a thread that goes through the product's own code (`store`, or the whole engine). Its connection stops
before each message and asks; the explorer says who goes next, and goes through all answers depth-first: for each, the
few rows are set back, the same beginning is played again, and another end. A message that waits for a row makes its
runner *blocked* until the server lets it go. Where `inside` is asked for, the functions of the protocol stop as well,
at the places of `STOPS`: behind the lock of the lease's row, and before COMMIT with everything written; so that what
others meet in the middle of a message is tried too. Where there are too many schedules (`walks`; a row of the report
says "of about"), they are taken at random. The functions are the product's (or a broken variant of
tests/support/variants.py, to show that the explorer can see), with nothing but these stops added to their text.

The clock is the database's, moved by the explorer: `expired` means that every acquire finds the lease of the other
run over, so that a paused holder is the normal case.

One fault may come at any point of a schedule, to anybody who is not through:

    kill        the client is gone, as by kill -9; what the server has begun for it goes on to its end
    terminate   pg_terminate_backend
    lose        the answer does not arrive: the connection is cut while the message is on its way, or behind it
    restore     everything that was committed since the beginning is lost, and every connection (a backup, a fail-over)

After each schedule, one more run without a fault must finish the work, and then must hold: what was acknowledged is
there; nothing is there twice; no batch was committed under a fence after a later one was granted (in the order of the
notes that the committing transactions made under the lease's row lock); what was found out about an unknown COMMIT is
so; what is left is asked for again; nobody was refused who holds the lease, and, where there is no fault, no lease
ends and nobody releases it, each run that was granted it did its work; and all that tests/support/invariants.py knows.

What is not stopped at (`shared`): messages that read or write only what nobody else writes or reads: the begin of a
batch, its page (of rows that are there from the start), its writes to `target`, a rollback. They commute with every
message of the others, so that an order that differs only by them is the same. The schedules that are counted are those
that were run. In the same way a connection at rest is terminated only right before its next message.
"""

from __future__ import annotations

import argparse
import logging
import math
import multiprocessing
import os
import queue
import random
import re
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from enum import Enum
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, TypeVar
from uuid import uuid4

import psycopg
import pytest
from psycopg import sql

from gaffer_dagster.domain.bounds import Bounds
from gaffer_dagster.domain.lease import Lease
from gaffer_dagster.domain.run import Outcome
from gaffer_dagster.domain.watermark import Position, RowPosition
from gaffer_dagster.engine import holding
from gaffer_dagster.engine import run as engine_run
from gaffer_dagster.engine.batch import Batch
from gaffer_dagster.engine.keeper import Keeper
from gaffer_dagster.engine.registry import Definition, registration_of
from gaffer_dagster.engine.run import open_run
from gaffer_dagster.engine.steps import Station
from gaffer_dagster.errors import GafferError, LeaseLostError
from gaffer_dagster.store import batches, db, leases, new_rows, operations, prepare
from gaffer_dagster.store import jobs as job_table
from gaffer_dagster.testing import Clock
from gaffer_dagster.testing import invariants as any_job
from gaffer_dagster.testing.database import Databases, server
from tests.support import faults, invariants, jobs, protocol, variants

Answer = TypeVar("Answer")

ROWS = 2
JOB = replace(jobs.spec(batch_rows=1), bounds=Bounds(batch_rows=1, timeout="50m"))

# In which function the server stops, before which text. It stands there holding what is locked by then.
STOPS = {
    "acquire": (
        "    select * into v_job from gaffer.job where name = p_job;",  # has locked the lease's row, or passed it over
        "            update gaffer.job\n               set wanted_at",
        "    v_grant.run_id := v_run.id;",
    ),
    "commit_batch": ("    v_now := gaffer.clock();", "    perform set_config('gaffer.seal'"),
    "end_run": (
        "    select * into v_job from gaffer.job where name = p_job for no key update;",
        "        v_ending.result := 'wanted';",
        "    v_ending.result := 'ended';",
    ),
    "supersede": ("    select * into v_run from gaffer.job_runs", "    return v_grant;"),
    "renew": (
        "    update gaffer.job_lease\n       set lease_until = gaffer.clock() + p_ttl, gone_at = null,",
        "    return found;",
    ),
    "release": ("        insert into gaffer.operator_action", "        return next v_lease;"),
}

_MACHINERY = """
create function gaffer_testing.stop() returns void language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    v_runner constant text := nullif(current_setting('gaffer_testing.runner', true), '');
begin
    if v_runner is not null then  -- whoever runs the schedule has locked each number once
        perform pg_advisory_xact_lock_shared(
            v_runner::integer, nextval(('gaffer_testing.stops_' || v_runner)::regclass)::integer);
    end if;
end $$;
create sequence gaffer_testing.stops_1;
create sequence gaffer_testing.stops_2;
create sequence gaffer_testing.stops_3;
create table total (n bigint not null);
insert into total values (0);
create table gaffer_testing.job as select * from gaffer.job;
create table gaffer_testing.lease as select * from gaffer.job_lease;
"""
_MOST_STOPS = 60  # of one runner in one schedule


class Fault(str, Enum):
    NONE = "none"
    KILL = "kill"
    TERMINATE = "terminate"
    LOSE = "lose"
    RESTORE = "restore"

    def __str__(self) -> str:
        return self.value


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

    def __init__(self, lane: Lane, number: int, work: Callable[[Runner], object]) -> None:
        super().__init__(number)
        self.lane = lane
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
            self.lane.events.put((self, State.OVER))

    # ── in its own thread ────────────────────────────────────────────────────────────────────────────────────────

    def say(self, connection: Stepped, message: str, send: Callable[[], Answer]) -> Answer:
        """Sends it when it is told to."""
        if self.dead:
            self._die(connection)
        self.on, self.pid, self.message = connection, connection.info.backend_pid, message
        if self.lane.stops_at(message):
            self.lane.events.put((self, State.STANDING))
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
            self._held = self.lane.take(self)
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
            runner.lane.leaves(runner, self.info.backend_pid)
            super().close()
        else:
            self.runner, self.is_given_back = None, True
            if status is not psycopg.pq.TransactionStatus.IDLE:
                self.execute("rollback")
            runner.lane.give_back(runner, self)


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


_SHARED = frozenset(
    {"acquire", "commit_batch", "check_batch", "end_run", "supersede", "renew", "release"}
    | {"select n from", "update total set"}
)
_ENGINES = _SHARED | {"look", "insert into source"}


class Lane:
    """One database, and whoever is at work there. `expiry`: `expired`, `live`, or `once` (at any one moment)."""

    def __init__(self, url: str, *, variant: str = "the product", inside: bool = False) -> None:
        self.url = url
        self.variant = variants.VARIANTS[variant]
        self.inside = inside
        self.events: queue.SimpleQueue[tuple[Runner, State]] = queue.SimpleQueue()
        self.actors: list[Actor] = []
        self.trace: list[str] = []
        self.blocked = 0
        self._pace = 0.001  # how long a step takes
        self._pool: dict[int, list[Stepped]] = {}
        self._stops: frozenset[str] | None = None
        self.ahead = timedelta()
        self.schedules = 0
        self._set_up(variant)

    def _set_up(self, variant: str) -> None:
        jobs.make_source(self.url, ROWS)
        invariants.watch(self.url)
        Clock(self.url)
        variants.install(self.url, variant)
        faults.settle(self.url)
        self.monitor = jobs.connect(self.url)
        self.monitor.execute("set synchronous_commit = off")
        self._ask = db.connect(self.url, application_name="explorer")
        job_table.register(self._ask, JOB, registration_of(Definition(JOB, None), ()))
        self.table = prepare.source(self._ask, "source", "id")
        self.horizon, self.cluster = new_rows.horizon(self._ask, JOB.name, None, None)
        self._ask.execute("insert into gaffer.testing_clock values ('0')")
        self._ask.execute(_MACHINERY)
        if self.inside:
            for function, places in STOPS.items():
                self._stop_in(function, places)
        self._columns = {
            of: sql.SQL(", ").join(
                sql.Identifier(name)
                for (name,) in self.monitor.execute(
                    "select attname from pg_attribute where attrelid = %s::regclass and attnum > 0"
                    " and attname not in ('name', 'job', 'slot', 'fence')",
                    [of],
                )
            )
            for of in ("gaffer.job", "gaffer.job_lease")
        }
        self._reset = sql.SQL(
            """
            begin;
            delete from target; delete from gaffer.job_runs; delete from gaffer.operator_action;
            delete from source where id > {rows}; update total set n = 0;
            update gaffer.job as j set ({job}) = (select {job} from gaffer_testing.job as k where k.name = j.name);
            update gaffer.job_lease as l set ({lease}) = (select {lease} from gaffer_testing.lease as kept
                                                           where (kept.job, kept.slot) = (l.job, l.slot));
            update gaffer.job_watermark set position = null, cluster = null;
            update gaffer.testing_clock set ahead = '0';
            delete from gaffer_testing.event;
            select setval('gaffer_testing.stops_1', 1, false), setval('gaffer_testing.stops_2', 1, false),
                   setval('gaffer_testing.stops_3', 1, false);
            select pg_advisory_unlock_all();
            select count(pg_advisory_lock(runner, stop)) from generate_series(1, {runners}) as runner,
                   generate_series(1, {stops}) as stop;
            commit
            """
        )
        self._judge = {
            at_rest: " union all ".join(
                f"select '{name.replace(chr(39), chr(39) * 2)}' where exists ({query})"
                for name, query in {**invariants.INVARIANTS, **(any_job.AT_REST if at_rest else {})}.items()
            )
            for at_rest in (False, True)
        }

    def _stop_in(self, function: str, places: Iterable[str]) -> None:
        row = self.monitor.execute(
            "select pg_get_functiondef(oid) from pg_proc where pronamespace = 'gaffer'::regnamespace and proname = %s",
            [function],
        ).fetchone()
        assert row is not None
        text = row[0]
        for place in places:
            assert text.count(place) == 1, f"gaffer.{function} does not have this text once any more: {place}"
            text = text.replace(place, f"    if gaffer_testing.stop() is null then end if;\n{place}")  # sets no FOUND
        self.monitor.execute(text)

    def close(self) -> None:
        for connection in [self.monitor, self._ask, *(each for pool in self._pool.values() for each in pool)]:
            connection.close()

    # ── what the runners ask ─────────────────────────────────────────────────────────────────────────────────────

    def take(self, runner: Runner) -> Stepped:
        if runner.dead:
            raise _Killed
        pool = self._pool.setdefault(runner.number, [])
        if pool:
            connection = pool.pop()
            connection.is_given_back = False
        else:
            connection = _CONNECT(self.url, application_name=f"gaffer:{runner.number}")
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
        return self._stops is None or message in self._stops

    def starts(self, number: int, work: Callable[[Runner], object]) -> Runner:
        """One more; also asked for by another runner in the middle of its work."""
        runner = Runner(self, number, work)
        self.actors.append(runner)
        runner.thread.start()
        return runner

    # ── one schedule ─────────────────────────────────────────────────────────────────────────────────────────────

    def run(self, case: Case, choose: Callable[[int], int]) -> dict[str, str]:
        """Plays it; which promises it broke, each with how. `choose` is asked which of so many goes on."""
        self._stops = None if case.every_message else case.stops
        self._begin(case)
        left = case.fault
        clock_may_move = case.expiry == "once"
        self.settle()
        while True:
            ready = [each for each in self.actors if each.state in (State.STANDING, State.INSIDE)]
            if not ready:
                if all(each.state is State.OVER for each in self.actors):
                    break
                self._wait_for_the_blocked()
                continue
            options: list[Callable[[], None]] = [lambda each=each: self._go(each, case) for each in ready]
            if clock_may_move:
                options.append(self._move_clock)
            if left is Fault.RESTORE:
                options.append(self._restore)
            elif left is not Fault.NONE:
                options += [
                    lambda each=each: self._strike(each, case)
                    for each in self.actors
                    if isinstance(each, Runner) and each.state is not State.OVER and each.on is not None
                ]
            chosen = choose(len(options)) if len(options) > 1 else 0
            if chosen >= len(ready):
                if clock_may_move and chosen == len(ready):
                    clock_may_move = False
                else:
                    left = Fault.NONE
            options[chosen]()
            self.settle()
        return self._judged(case)

    def _begin(self, case: Case) -> None:
        self.schedules += 1
        self.trace, self.actors, self.ahead = [], [], timedelta()
        self.monitor.execute(
            self._reset.format(
                rows=sql.Literal(ROWS),
                job=self._columns["gaffer.job"],
                lease=self._columns["gaffer.job_lease"],
                runners=sql.Literal(3 if self.inside else 0),
                stops=sql.Literal(_MOST_STOPS),
            )
        )
        if self.schedules % 500 == 0:
            self.monitor.execute("vacuum gaffer.job, gaffer.job_runs, gaffer.job_lease, gaffer.job_watermark")
            self.monitor.execute("vacuum target, gaffer_testing.event, gaffer.testing_clock, source")
        if case.fault is Fault.RESTORE:
            self._kept = self.monitor.execute(
                "select fence, (select last_value from gaffer.job_runs_id_seq),"
                " (select is_called from gaffer.job_runs_id_seq) from gaffer.job_lease"
            ).fetchone()
        for number, work in enumerate(case.runners, 1):
            self.starts(number, work)

    def settle(self) -> None:
        """Until everybody stands, is blocked, or is through."""
        patience = time.monotonic() + 60
        began, soon = time.monotonic(), 4 * self._pace
        while True:
            moving = [each for each in self.actors if each.state is State.MOVING]
            if not moving:
                return
            assert time.monotonic() < patience, f"nobody knows what {moving} does: {self.trace}"
            try:
                runner, state = self.events.get(timeout=soon)
                self._halts(runner, state)
                self._pace += 0.1 * (min(0.01, time.monotonic() - began) - self._pace)
            except queue.Empty:
                self._look_at(moving)

    def _halts(self, actor: Actor, state: State) -> None:
        """It was seen to be blocked while this one still moved, and may be free since."""
        actor.state = state
        self._wake_the_blocked()

    def _wake_the_blocked(self) -> None:
        for each in self.actors:
            if each.state is State.BLOCKED:
                each.state = State.MOVING

    def _look_at(self, moving: list[Actor]) -> None:
        pids = [each.pid for each in self.actors if each.pid is not None and each.state is not State.OVER]
        seen = {
            pid: (is_there, stop, is_blocked)
            for pid, is_there, stop, is_blocked in self.monitor.execute(
                """
                select pid, exists (select from pg_stat_activity as a where a.pid = p.pid),
                       (select objid::integer from pg_locks as l
                         where l.pid = p.pid and not granted and locktype = 'advisory'),
                       pg_blocking_pids(pid) && %s::integer[]
                  from unnest(%s::integer[]) as p (pid)
                """,
                [pids, [each.pid for each in moving if each.pid is not None]],
            )
        }
        for each in moving:
            is_there, stop, is_blocked = seen.get(each.pid, (True, None, False))
            if not self.events.empty():
                return  # what was seen may be old
            if not is_there and not isinstance(each, Runner):
                self._halts(each, State.OVER)
            elif stop is not None:
                each.stop = stop
                self._halts(each, State.INSIDE)
            elif is_blocked:
                each.state = State.BLOCKED
                if not each.was_blocked:
                    each.was_blocked = True
                    self.blocked += 1
                    self.trace.append(f"({each.name} blocked)")

    def _moves(self, actor: Actor) -> None:
        actor.state, actor.was_blocked = State.MOVING, False
        self._wake_the_blocked()  # this may be what they wait for

    def _go(self, actor: Actor, case: Case) -> None:
        if actor.state is State.INSIDE:
            self.trace.append(f"{actor.name} goes on")
            self._moves(actor)
            self.monitor.execute("select pg_advisory_unlock(%s, %s)", [actor.number, actor.stop])
            return
        assert isinstance(actor, Runner)
        self.trace.append(f"{actor.name} {actor.message}")
        if case.expiry == "expired" and actor.message == "acquire":
            self.advance(timedelta(seconds=61))
        self._moves(actor)
        actor.go()

    def _move_clock(self) -> None:
        self.trace.append("the clock moves on")
        self.advance(timedelta(seconds=61))

    def advance(self, by: timedelta) -> None:
        self.ahead += by
        self.monitor.execute("update gaffer.testing_clock set ahead = %s", [self.ahead])

    def now(self) -> datetime:
        return datetime.now(timezone.utc) + self.ahead

    def _strike(self, runner: Runner, case: Case) -> None:
        fault = case.fault
        self.trace.append(f"{fault} {runner.number}" + (f" at {runner.message}" if self.inside else ""))
        was, stop = runner.state, runner.stop
        is_idle = runner.on is not None and runner.on.info.transaction_status is psycopg.pq.TransactionStatus.IDLE
        ghost = Actor(runner.number, runner.pid)
        if fault is Fault.TERMINATE:
            self.monitor.execute("select pg_terminate_backend(%s)", [runner.pid])
            self.actors.append(ghost)
            runner.pid = None
            self._moves(ghost)
            if was is not State.STANDING:
                runner.state = State.MOVING
            elif is_idle:  # it holds nothing: when it is struck before it goes on is the same to everybody
                self.settle()
                self._go(runner, case)
        elif fault is Fault.LOSE and was is State.STANDING:
            runner.loses = True
            self._moves(runner)
            runner.go()
        else:
            runner.dead = fault is Fault.KILL
            self.actors.append(ghost)
            ghost.state, ghost.stop = (State.MOVING, 0) if was is State.STANDING else (was, stop)
            runner.pid = None
            self._moves(runner)
            runner.cut()
            if was is State.STANDING:
                runner.go()

    def _restore(self) -> None:
        """All that the schedule has committed is lost, and all who are connected lose their connection."""
        self.trace.append("restore")
        pids = [each.pid for each in self.actors if each.state is not State.OVER and each.pid is not None]
        self.monitor.execute("select pg_terminate_backend(pid) from unnest(%s::integer[]) as pid", [pids])
        for each in list(self.actors):
            if isinstance(each, Runner):
                each.acked.clear()
                if each.pid is not None and each.state is not State.OVER:
                    self.actors.append(Actor(each.number, each.pid))
                    each.pid = None
            if each.state in (State.INSIDE, State.BLOCKED):
                each.state = State.MOVING
        self.settle()
        assert self._kept is not None
        self.monitor.execute(
            sql.SQL(
                """
                begin;
                delete from target; delete from gaffer.job_runs; delete from gaffer.operator_action;
                update total set n = 0;
                update gaffer.job as j set ({job}) = (select {job} from gaffer_testing.job as k where k.name = j.name);
                alter table gaffer.job_lease disable trigger grow_fence;
                update gaffer.job_lease as l set ({lease}) = (select {lease} from gaffer_testing.lease as kept
                                                               where (kept.job, kept.slot) = (l.job, l.slot)),
                       fence = {fence};
                alter table gaffer.job_lease enable trigger grow_fence;
                update gaffer.job_watermark set position = null, cluster = null;
                delete from gaffer_testing.event;
                select setval('gaffer.job_runs_id_seq', {run}, {called});
                commit
                """
            ).format(
                job=self._columns["gaffer.job"],
                lease=self._columns["gaffer.job_lease"],
                fence=sql.Literal(self._kept[0]),
                run=sql.Literal(self._kept[1]),
                called=sql.Literal(self._kept[2]),
            )
        )

    def _wait_for_the_blocked(self) -> None:
        """They wait for each other: the server will say to whom that is too long."""
        self._wake_the_blocked()
        time.sleep(0.05)
        self.settle()

    # ── what must hold ───────────────────────────────────────────────────────────────────────────────────────────

    def _judged(self, case: Case) -> dict[str, str]:
        for thread in threading.enumerate():
            if isinstance(thread, Keeper):  # of one who was killed
                thread.end()
        runners = [each for each in self.actors if isinstance(each, Runner)]
        broken: dict[str, str] = {}
        for each in runners:
            allowed = GafferError if case.fault is Fault.RESTORE else LeaseLostError
            if each.error is not None and not isinstance(each.error, allowed):
                broken["nobody fails"] = f"{each.name}: {each.error!r}"
            if each.is_refused_its_own:
                broken[_KEEPS] = f"{each.name}: its renewal was refused"
        broken |= dict.fromkeys(self._violations(at_rest=False), "before the next run")
        self.advance(timedelta(minutes=6))
        left = self.monitor.execute("select id from source except select id from target").fetchall()
        began = self.monitor.execute(  # who was killed before he said anything left nothing to ask for
            "select from gaffer.job_runs union all select from gaffer.job where wanted_at is not null"
        ).rowcount
        if left and began and case.fault is not Fault.RESTORE and not job_table.wanted(self._ask, [JOB.name]):
            broken["what is left is asked for"] = f"{left}"
        if case.is_peaceful:
            broken |= self._lost_for_nothing(runners)
        self._stops = frozenset()
        after = Runner(self, 0, case.after)
        _HERE.runner = after
        try:
            case.after(after)
        except BaseException as error:
            broken["one more run finishes the work"] = repr(error)
        finally:
            after.drop()
            _HERE.runner = None
        broken |= dict.fromkeys(self._violations(at_rest=True), "after the next run")
        if (
            case.counts
            and self.monitor.execute("select n from total").fetchall()
            != self.monitor.execute("select count(*) from target").fetchall()
        ):
            broken["what was counted is what is there"] = ""
        rows = Counter(self.monitor.execute("select id, fence from target order by id").fetchall())
        done = {row for row, _ in rows}
        if self.monitor.execute("select id from source except select id from target").fetchall():
            broken["one more run finishes the work"] = f"done: {done}"
        for each in runners:
            for acked in each.acked:
                if acked not in rows:
                    broken["what was acknowledged is there"] = f"{each.name}: {acked}"
            for row, fence, is_committed in each.verdicts:
                if ((row, fence) in rows) != is_committed:
                    broken["an unknown COMMIT is found out"] = f"{each.name}: {row} under {fence}"
        return broken

    def _lost_for_nothing(self, runners: Iterable[Runner]) -> dict[str, str]:
        """Of leases that nobody could take away."""
        ended = self.monitor.execute(
            "select fence, outcome, error from gaffer.job_runs where outcome not in ('succeeded', 'capped', 'busy')"
            " or batches = 0 and fence is not null and exists (select id from source except select id from target)"
        ).fetchall()
        acked = sorted(row for each in runners for row in each.acked)
        there = self.monitor.execute("select id, fence from target order by id, fence").fetchall()
        broken: dict[str, str] = {}
        for each in runners:
            if each.error is not None or each.ending in ("lost_lease", "not recorded"):
                broken[_KEEPS] = f"{each.name}: {each.error or each.ending}"
        if ended:
            broken[_KEEPS] = f"{ended}"
        elif acked != there:
            broken[_KEEPS] = f"acknowledged: {acked}, there: {there}"
        return broken

    def _violations(self, *, at_rest: bool) -> list[str]:
        return [name for (name,) in self.monitor.execute(self._judge[at_rest].encode(), prepare=True)]


_CONNECT: Callable[..., Any] = db.connect
_KEEPS = "nobody loses a lease for nothing"


# ── who goes ─────────────────────────────────────────────────────────────────────────────────────────────────────


def one_run(
    runner: Runner, *, most: int = 1, limit: int = 1, keeper: int | None = None, counts: bool = False
) -> object:
    """A run as the engine does it, by the functions of `store` alone: `most` batches of `limit` rows. `keeper`: the
    number of one more runner, which renews its lease once. `counts`: what is written into `total` follows from what was
    read there, and no lock is taken in between."""
    lane, lease_id = runner.lane, uuid4()

    def acquire(wait: float) -> protocol.Attempt:
        return runner.ask(
            lambda connection: protocol.acquire(connection, JOB, lease_id=lease_id, timeout=3000, wait=wait)
        )

    attempt = acquire(0)
    if attempt.grant.outcome == "busy":
        attempt = acquire(1)
    if attempt.grant.outcome != "granted":
        return attempt.grant.outcome
    lease, position, number = attempt.lease, attempt.grant.position, 0
    outcome, error = Outcome.CAPPED, None
    if keeper is not None:
        lane.starts(keeper, partial(_renew, lease=lease))
    try:
        while number < most:
            try:
                done = _one_batch(runner, lease, position, number, limit, counts)
            except Exception as failed:
                if not db.worth_repeating(failed):
                    raise
                runner.drop()
                continue
            if done is None:
                outcome = Outcome.SUCCEEDED
                break
            lease, position, number = done
    except LeaseLostError as lost:
        outcome, error = Outcome.LOST_LEASE, str(lost)
        runner.drop()
    try:
        return runner.ask(
            lambda connection: protocol.end(
                connection,
                lease,
                outcome,
                wanted_at=attempt.grant.wanted_at,
                follow_up_at=attempt.grant.granted_at if outcome is Outcome.CAPPED else None,
                error=error,
            )
        ).result
    except GafferError:
        if error is None:
            raise
        return "not recorded"


def _renew(runner: Runner, *, lease: Lease) -> bool:
    renewed = runner.ask(lambda connection: leases.renew(connection, lease, timedelta(seconds=60)))
    if not renewed:  # nobody else goes on until this was looked at
        held = runner.lane.monitor.execute(
            "select from gaffer.job_lease where fence = %s and lease_id = %s", [lease.fence, lease.lease_id]
        )
        runner.is_refused_its_own = held.rowcount > 0
    return renewed


def _one_batch(
    runner: Runner, lease: Lease, position: Position | None, number: int, limit: int, counts: bool
) -> tuple[Lease, Position | None, int] | None:
    lane, variant, connection = runner.lane, runner.lane.variant, runner.connection()
    batch = protocol.begin(connection)
    page = new_rows.page(connection, lane.table, None, RowPosition.read(position), lane.horizon, limit)
    if page is None:
        db.roll_back(connection)
        return None
    if variant.check_at is Station.DUE:
        variants.check(connection, lease, batch)
    total = connection.execute("select n from total").fetchone() if counts else None
    if variant.autocommits:
        connection.execute("commit")
    for row in page.rows:
        connection.execute("insert into target values (%s, %s, %s)", [row["id"], lease.fence, number + 1])
    if total is not None:
        connection.execute("update total set n = %s", [total[0] + len(page.rows)])
    if variant.autocommits:
        batch = protocol.begin(connection)
    if variant.check_at is Station.APPLIED:
        variants.check(connection, lease, batch)
    until = {**page.position.as_json(), "of": lane.table.of}
    fence, kept = lease.fence, True
    try:
        batches.commit(
            connection,
            lease,
            batch,
            since=position,
            until=until,
            cluster=lane.cluster,
            items=len(page.rows),
            duration=timedelta(seconds=60),
        )
    except Exception as error:
        if not db.lost_connection(error) or variant.believes_errors:
            raise
        runner.drop()
        new_id, old = uuid4(), lease
        grant = runner.ask(lambda again: leases.supersede(again, old, new_id, timedelta(seconds=60)))
        assert grant.fence is not None
        lease = replace(old, fence=grant.fence, lease_id=new_id)
        kept = (grant.batches or 0) > number
        runner.verdicts += [(row["id"], fence, kept) for row in page.rows]
    if not kept:
        return lease, position, number
    runner.acked += [(row["id"], fence) for row in page.rows]
    return lease, until, number + 1


def release(runner: Runner) -> object:
    """An operator takes the lease away from whoever has it."""
    return runner.ask(
        lambda connection: operations.release(connection, JOB.name, None, operations.Operator("operator", None))
    )


def whole_run(runner: Runner, *, adds: bool = False) -> object:
    """A run of the engine, from its first message to its last. `adds`: something is due because of it."""
    lane = runner.lane
    if adds:
        runner.ask(lambda connection: connection.execute("insert into source (value) values ('added')"))
        runner.drop()
    written: list[tuple[int, int]] = []

    def work(batch: Batch) -> None:
        written[:] = [(row["id"], batch.fence) for row in batch.rows]
        jobs.copy_rows(batch)

    def observe(station: Station) -> None:
        if station is Station.COMMITTED:
            runner.acked += written

    with open_run(JOB, lane.url, log=jobs.LOG, observe=observe, worker_clock=lane.now) as opened:
        opened.apply(work)
    return opened.outcome


@contextmanager
def stepped_engines() -> Generator[None]:
    """The engine's connections ask before each message, too, and what it waits for takes no time."""

    def connect(url: str, **kwargs: Any) -> db.Connection:
        return _CONNECT(url, **kwargs) if _HERE.runner is None else _HERE.runner.lane.take(_HERE.runner)

    def sleep(_: float) -> None:
        return

    at_once = SimpleNamespace(sleep=sleep, monotonic=time.monotonic)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(db, "connect", connect)
        patch.setattr(holding, "time", at_once)
        patch.setattr(engine_run, "time", at_once)
        yield


# ── what is tried ────────────────────────────────────────────────────────────────────────────────────────────────


_FINISHES = partial(one_run, most=9, limit=9)


@dataclass(frozen=True)
class Case:
    """`walks`: not all schedules, but so many at random. `inside`: with the stops within messages. `every_message`:
    also before those that commute with all others."""

    name: str
    runners: tuple[Callable[[Runner], object], ...]
    fault: Fault = Fault.NONE
    expiry: str = "expired"
    variant: str = "the product"
    inside: bool = False
    every_message: bool = False
    stops: frozenset[str] = _SHARED
    after: Callable[[Runner], object] = _FINISHES
    counts: bool = False
    walks: int = 0

    @property
    def is_peaceful(self) -> bool:
        """Nothing is there by which anybody could lose the lease."""
        return self.expiry == "live" and self.fault is Fault.NONE and release not in self.runners


@dataclass
class Found:
    """What came of a case. `of`: how many schedules there are, where not all were run an estimate (Knuth's, 1975: the
    mean of the product of the choices along a random path)."""

    case: Case
    schedules: int = 0
    of: float = 0
    blocked: int = 0
    seconds: float = 0
    broken: Counter[str] = field(default_factory=Counter[str])
    first: dict[str, str] = field(default_factory=dict[str, str])

    def note(self, broken: dict[str, str], trace: list[str]) -> None:
        self.schedules += 1
        for name, how in broken.items():
            self.broken[name] += 1
            self.first.setdefault(name, f"{how}: {', '.join(trace)}")

    @property
    def lost(self) -> int:
        return max(self.broken[name] for name in ("what was acknowledged is there", *_LOST))

    @property
    def twice(self) -> int:
        return self.broken["nothing is applied twice"]

    @property
    def stale(self) -> int:
        return self.broken["nothing is committed under a fence once a later one was granted"]

    @property
    def forgotten(self) -> int:
        return self.broken["what is left is asked for"]

    @property
    def is_caught(self) -> bool:
        return self.lost + self.twice + self.forgotten + self.broken[_KEEPS] > 0

    def row(self) -> str:
        case, others = self.case, sum(self.broken.values())
        of = "all" if self.of == self.schedules else f"of about {self.of:,.0f}" if self.of else "until it was caught"
        grain = " ".join(
            word for word, is_so in (("every message", case.every_message), ("inside", case.inside)) if is_so
        )
        return (
            f"| {case.name} | {case.variant} | {case.expiry} | {case.fault} | {grain or 'shared'} | {self.schedules:,}"
            f" ({of}) | {self.blocked:,} | {self.lost:,} | {self.twice:,} | {self.stale:,} | {self.forgotten:,}"
            f" | {others:,} | {self.seconds:,.0f} |"
        )


_LOST = (
    "what was counted is what is there",
    "nothing up to the watermark is missing",
)
HEADER = (
    "| scenario | protocol | lease | fault | stops | schedules | blocked steps | lost | twice | stale commits"
    " | forgotten | broken in all | s |\n|---|---|---|---|---|---|---|---|---|---|---|---|---|"
)


def explore(case: Case, url: str, *, seed: int = 0, until_broken: bool = False) -> Found:
    """All schedules of a case, or as many at random as it says, in a new database. `until_broken`: no more than it
    takes to see that something is."""
    found, began = Found(case), time.monotonic()
    with stepped_engines():
        lane = Lane(url, variant=case.variant, inside=case.inside)
        try:
            if case.walks:
                _walk(lane, case, found, random.Random(f"{seed}/{case.name}/{case.fault}"), until_broken)
            else:
                _go_through(lane, case, found, until_broken)
        finally:
            lane.close()
    found.blocked, found.seconds = lane.blocked, time.monotonic() - began
    return found


def _go_through(lane: Lane, case: Case, found: Found, until_broken: bool) -> None:
    """Depth-first. `path`: which choice of how many, at each point where there was one."""
    path: list[tuple[int, int]] = []
    depth = 0

    def choose(options: int) -> int:
        nonlocal depth
        if depth == len(path):
            path.append((0, options))
        chosen, before = path[depth]
        assert options == before, f"the same beginning had {before} ways to go on, and now {options}: {lane.trace}"
        depth += 1
        return chosen

    while True:
        depth = 0
        found.note(lane.run(case, choose), lane.trace)
        if until_broken and found.is_caught:
            return
        while path and path[-1][0] == path[-1][1] - 1:
            path.pop()
        if not path:
            break
        path[-1] = (path[-1][0] + 1, path[-1][1])
    found.of = found.schedules


def _walk(lane: Lane, case: Case, found: Found, chance: random.Random, until_broken: bool) -> None:
    """At random; one that came before is not counted."""
    seen: set[tuple[int, ...]] = set()
    sizes = 0.0
    for _ in range(case.walks):
        path: list[tuple[int, int]] = []

        def choose(options: int, path: list[tuple[int, int]] = path) -> int:
            path.append((chance.randrange(options), options))
            return path[-1][0]

        broken = lane.run(case, choose)
        sizes += math.prod(options for _, options in path)
        chosen = tuple(each for each, _ in path)
        if chosen not in seen:
            seen.add(chosen)
            found.note(broken, lane.trace)
        if until_broken and found.is_caught:
            return
    found.of = max(found.schedules, sizes / case.walks)


_PRODUCT = "the product"
_COUNTING = partial(one_run, counts=True)
_COUNTS: dict[str, Any] = {"counts": True, "after": partial(one_run, most=9, limit=9, counts=True)}
_ENGINE: dict[str, Any] = {"stops": _ENGINES, "after": whole_run, "expiry": "live"}
_WAKES_UP = partial(whole_run, adds=True)
HITS = (Fault.KILL, Fault.TERMINATE, Fault.LOSE)

TWO = Case("two runs", (one_run, one_run))
COUNTING = Case("two runs that count", (_COUNTING, _COUNTING), **_COUNTS)
KEPT = Case("a run, its keeper, and a run", (partial(one_run, keeper=3), one_run))
RELEASED = Case("a run, and gaffer release", (one_run, release), expiry="live")
WOKEN = Case("an engine, and one that wakes up for a new row", (whole_run, _WAKES_UP), **_ENGINE)
# A run that has begun no batch does not know that it was overtaken, and goes on under its number.
RESTORED = replace(TWO, fault=Fault.RESTORE, stops=_SHARED | {"begin_batch"})
THREE = Case("three runs", (one_run, one_run, one_run))

BROKEN = [
    *(
        replace(COUNTING, variant=variant)
        for variant in (
            "no check",
            "time-only lease",
            "plain SELECT, then the writes",
            "plain SELECT, then COMMIT",
            "key share, then the writes",
            "locking check, then autocommit",
        )
    ),
    replace(TWO, variant="error means not committed", fault=Fault.LOSE),
    replace(RESTORED, variant="number-only fence", walks=300),
    replace(WOKEN, variant="a busy wake-up notes nothing"),
    replace(WOKEN, variant="the end looks at no wish"),
    replace(KEPT, variant="renewal that takes the lease back"),
    replace(KEPT, variant="renewal that matches nothing"),
    replace(TWO, variant="a busy wake-up moves the fence", expiry="live"),
]
"""Protocols that are known to be wrong, each where it shows."""
SOUND = [
    replace(COUNTING, variant="bare"),
    replace(COUNTING, variant="locking check, then the writes"),
    replace(COUNTING, variant="locking check, then COMMIT"),
]
"""Their nearest relatives that are not."""
SHORT = [
    TWO,
    replace(TWO, expiry="live"),
    COUNTING,
    KEPT,
    replace(KEPT, expiry="live"),
    replace(RELEASED, inside=True),
    replace(TWO, inside=True, walks=40),
    replace(TWO, fault=Fault.KILL),
    replace(TWO, fault=Fault.LOSE),
    replace(TWO, fault=Fault.TERMINATE, walks=50),
    replace(RESTORED, walks=30),
    replace(WOKEN, walks=30),
]
"""All schedules of two, but where there are too many for seconds: there `walks` says how many."""
SHORT_SOUND = [replace(case, walks=40) for case in SOUND]
FEWEST_OF_THREE = 50_000
"""Schedules of three runners that the long form must have run."""


def long(walks: int) -> list[Case]:
    """All that two can do in `shared` steps, and all that three can, each with every fault; and what is too much for
    that, `walks` at random of each: two runs that a fault meets within a statement, and three runners with stops before
    every message or within them."""
    either = (Fault.NONE, *HITS)
    batches_of_two = replace(TWO, name="two runs of two batches", runners=(partial(one_run, most=2),) * 2)
    released_and_followed = replace(
        RELEASED, name="a run, gaffer release, and a run", runners=(one_run, release, one_run)
    )
    return [
        *SHORT,
        replace(TWO, every_message=True),
        *(replace(batches_of_two, fault=fault) for fault in either),
        *(replace(case, fault=fault) for case in (COUNTING, KEPT, RELEASED) for fault in HITS),
        *(replace(case, expiry="once") for case in (COUNTING, KEPT, RELEASED)),
        *(replace(TWO, expiry="once", fault=fault) for fault in either),
        RELEASED,
        replace(TWO, inside=True),
        RESTORED,
        replace(TWO, fault=Fault.TERMINATE),
        *(replace(case, inside=True, walks=walks) for case in (COUNTING, KEPT)),
        *(replace(RELEASED, inside=True, fault=fault) for fault in (Fault.KILL, Fault.TERMINATE)),
        replace(RELEASED, inside=True, fault=Fault.LOSE, walks=walks),
        *(replace(TWO, inside=True, fault=fault, walks=walks) for fault in HITS),
        *(replace(WOKEN, fault=fault) for fault in either),
        replace(WOKEN, expiry="expired"),
        *(replace(released_and_followed, fault=fault) for fault in either),
        *(replace(THREE, fault=fault) for fault in either),
        replace(THREE, expiry="live"),
        *(replace(THREE, every_message=True, fault=fault, walks=walks) for fault in either),
        *(replace(THREE, inside=True, fault=fault, walks=walks) for fault in either),
        *SOUND,
        *BROKEN,
    ]


def _alone(case: Case, seed: int, until_broken: bool = False) -> Found:
    """On a server of its own: what is due depends on who has a transaction open anywhere on a server."""
    logging.getLogger("gaffer").addHandler(logging.NullHandler())
    with (
        tempfile.TemporaryDirectory() as folder,
        server(Path(folder)) as server_url,
        Databases(server_url) as databases,
        databases.scratch() as url,
    ):
        return explore(case, url, seed=seed, until_broken=until_broken)


def _show(variant: str, seed: int) -> bool:
    """A protocol that is known to be wrong is caught, and how is told."""
    as_they_must_be = True
    for case in (case for case in [*SOUND, *BROKEN] if case.variant == variant):
        found = _alone(case, seed, until_broken=True)
        faults.say(f"{HEADER}\n{found.row()}")
        for name, how in found.first.items():
            faults.say(f"BROKEN: {name}\n        " + "\n        ".join(how.split(", ")))
        as_they_must_be &= found.is_caught == (case in BROKEN)
    return as_they_must_be


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="interleavings", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--long", action="store_true", help="all schedules of two and three runners, some with walks")
    parser.add_argument("--seed", type=int, default=0, help="of the walks at random")
    parser.add_argument("--walks", type=int, default=8_000, help="of each case of three that has too many schedules")
    parser.add_argument("--lanes", type=int, default=2, help="how many servers side by side")
    parser.add_argument("--only", default="", help="cases whose row begins with these words")
    known = sorted({case.variant for case in [*SOUND, *BROKEN]})
    parser.add_argument("--variant", choices=known, help="only this protocol, until it is caught; and how")
    given = parser.parse_args(words)
    seed = given.seed or random.SystemRandom().randrange(1, 1_000_000)
    if given.variant is not None:
        faults.say(f"--seed {seed}")
        sys.exit(0 if _show(given.variant, seed) else "not as it should be")
    cases = long(given.walks) if given.long else [*SHORT, *SOUND, *BROKEN]
    cases = [case for case in cases if case.name.startswith(given.only)]
    faults.say(f"--seed {seed} --walks {given.walks}, {len(cases)} cases\n{HEADER}")
    wrong: list[str] = []
    of_three = 0
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(given.lanes, mp_context=context) as lanes:
        for case, found in zip(cases, lanes.map(_alone, cases, [seed] * len(cases)), strict=True):
            faults.say(found.row())
            of_three += found.schedules * (len(case.runners) == 3)
            if bool(found.broken) != (case in BROKEN) or found.is_caught != (case in BROKEN):
                wrong += [
                    found.row(),
                    *(f"  {found.broken[name]} × {name}: {how}" for name, how in found.first.items()),
                ]
    faults.say(f"of three: {of_three:,} schedules")
    if wrong:
        faults.say("not as it should be:\n" + "\n".join(wrong))
        sys.exit(1)
    if given.long and not given.only and of_three < FEWEST_OF_THREE:
        sys.exit(f"fewer than {FEWEST_OF_THREE:,} schedules of three were run")


if __name__ == "__main__":
    main()
