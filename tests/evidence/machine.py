"""The public API in any order of calls, beside a small pure model of what must come of it.

One job at a time, with several runs of it open at once in this process: batches are left open in the middle, holders
stand still while others take over, crash, are cut off at their COMMIT, are released by hand; ticks come late, early,
twice or never; the database is put back to an older copy; writers leave transactions open. Time stands still but for
what a step moves, and a run's own waiting moves it too, so that every answer is exact.

The model (machine_model.py) knows the promises and none of the SQL. Each step is done to both; then what they answered
is compared, and after it the tables.

What it leaves out, since other tests drive it: rows that are pending (`PendingRows`), so jobs of several slots;
`exclusion="advisory"`; protected tables; incidents and what is told of them.

    python -m tests.evidence.machine --seed 1 --examples 5000 --steps 40
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import psycopg
from click.testing import CliRunner
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from psycopg.types.json import Jsonb

from gaffer_dagster.adapter.resource import GafferResource
from gaffer_dagster.cli import main as command
from gaffer_dagster.domain.bounds import Bounds
from gaffer_dagster.domain.due import EachInterval, Elapsed, NewRows
from gaffer_dagster.domain.run import Outcome
from gaffer_dagster.domain.schedule import Schedule
from gaffer_dagster.domain.spec import JobSpec
from gaffer_dagster.engine import holding as engine_holding
from gaffer_dagster.engine import run as engine_run
from gaffer_dagster.engine.batch import Batch
from gaffer_dagster.engine.keeper import Keeper, Stop
from gaffer_dagster.engine.registry import Definition, registration_of
from gaffer_dagster.engine.run import Run
from gaffer_dagster.store import batches, db, migrate
from gaffer_dagster.store import jobs as job_table
from gaffer_dagster.testing import Databases
from gaffer_dagster.testing.database import server
from tests.evidence.machine_model import (
    GAP,
    HOUR,
    MIDNIGHT,
    MINUTE,
    SECOND,
    TIMEOUT,
    Answer,
    Holder,
    Kind,
    Model,
    Tables,
    said,
    versions,
)
from tests.support import histories, jobs, protocol

# ── where it happens ───────────────────────────────────────────────────────────────────────────────────────────


class BrokenError(Exception):
    """What the work of a run raises to fail."""


class Moved:
    """Stands in for the module `time` in the engine: what a run waits for comes at once, and moves the clock."""

    def __init__(self, passed: Callable[[], timedelta], sleep: Callable[[timedelta], None]) -> None:
        self._passed, self._sleep = passed, sleep
        self._began = time.monotonic()

    def monotonic(self) -> float:
        return self._began + self._passed().total_seconds()

    def sleep(self, seconds: float) -> None:
        assert seconds != 0.05, "a run waits for an open transaction, which no step of this machine ends"
        self._sleep(timedelta(seconds=seconds))


class AtOnce:
    """Stands in for `random` where it spreads a load."""

    @staticmethod
    def uniform(_least: float, _most: float) -> float:
        return 0.0


class World:
    """A database for all examples. Each has a job of its own; its rows are removed after it."""

    def __init__(self, url: str) -> None:
        self.url, self.resource = url, GafferResource(dsn=url)
        self._files = mock.patch.object(migrate, "migrations", lru_cache(migrate.migrations))
        self._files.start()  # each connection compares all of them
        if not jobs.query(url, "select from pg_class where relname = 'source'"):
            self._make(url)
        self.control = jobs.connect(url)
        self.examples = 0
        self.answers: Counter[str] = Counter()

    @staticmethod
    def _make(url: str) -> None:
        histories.stand_still(url)
        jobs.execute(url, "create table source (id bigint generated always as identity primary key, job text)")
        jobs.prepare(url, "source", "id")
        jobs.execute(url, "create table target (job text, key text, fence bigint)")
        jobs.execute(url, "create index on target (job)")
        for table in _OWN:
            # Whoever analyzes has a transaction open, which would hold back what is new.
            jobs.execute(url, f"alter table {table} set (autovacuum_enabled = false)")

    def set(self, at: datetime) -> None:
        self.control.execute("update gaffer.testing_now set at = %s", [at])

    def next_run(self) -> int:
        found = self.control.execute("select coalesce(pg_sequence_last_value('gaffer.job_runs_id_seq'), 0)").fetchone()
        assert found is not None
        return found[0] + 1

    def terminate(self, pid: int) -> None:
        self.control.execute("select pg_terminate_backend(%s, 10000)", [pid])

    def use_up_a_number(self) -> None:
        """Whoever begins to write from now on is younger than what was looked at before."""
        self.control.execute("select pg_current_xact_id()")

    def clean(self) -> None:
        self.control.execute("delete from source")
        self.control.execute("delete from target")
        if self.examples % 200 == 0:
            for table in _OWN:
                self.control.execute(f"vacuum {table}")

    def close(self) -> None:
        self._files.stop()
        self.control.close()

    # ── an older copy ──

    def copy(self, job: str, label: str) -> dict[str, Any]:
        """All that is stored of a job, and how many rows of `target` are."""
        kept: dict[str, Any] = {"runs": self.next_run() - 1}
        for table, column in _TABLES.items():
            found = self.control.execute(
                f"select coalesce(jsonb_agg(to_jsonb(t)), '[]') from gaffer.{table} t where {column} = %s", [job]
            ).fetchone()
            assert found is not None
            kept[table] = found[0]
        kept["target"] = self.control.execute("select job, key, fence from target where job = %s", [label]).fetchall()
        return kept

    def put_back(self, job: str, label: str, kept: dict[str, Any]) -> None:
        with self.control.transaction():
            # As a restore has it: the triggers come after the rows.
            for table in _KEPT:
                self.control.execute(f"alter table gaffer.{table} disable trigger user")
            for table, column in reversed(_TABLES.items()):
                self.control.execute(f"delete from gaffer.{table} where {column} = %s", [job])
            for table in _TABLES:
                self.control.execute(
                    f"insert into gaffer.{table} overriding system value"
                    f" select * from jsonb_populate_recordset(null::gaffer.{table}, %s)",
                    [Jsonb(kept[table])],
                )
            for table in _KEPT:
                self.control.execute(f"alter table gaffer.{table} enable trigger user")
            self.control.execute("delete from target where job = %s", [label])
            for row in kept["target"]:
                self.control.execute("insert into target values (%s, %s, %s)", row)
            self.control.execute(
                "select setval('gaffer.job_runs_id_seq', %s, %s)", [max(1, kept["runs"]), kept["runs"] > 0]
            )


_TABLES = {
    "job": "name",
    "job_spec": "job",
    "job_lease": "job",
    "job_watermark": "job",
    "job_runs": "job",
    "operator_action": "job",
}
_KEPT = ("job_lease", "job_watermark")
"""Whose rows are never removed."""
_OWN = ("source", "target", "gaffer.testing_now", *(f"gaffer.{table}" for table in _TABLES))
_STATE = """
    select name, consecutive_failures, covered_until, skipped_until, last_success_at, consecutive_capped, leases_lost,
           follow_up_at, paused_at is not null, fence, lease_id is not null, nullif(lease_until, 'epoch'), position
      from gaffer.job join gaffer.job_lease l on l.job = name join gaffer.job_watermark w on w.job = name
     where name = %(job)s;
    select id, trigger, tick, outcome, fence, batches, items, backlog, covered_until, ticks_covered, deadline_at
      from gaffer.job_runs where job = %(job)s order by id;
    select key, fence from target where job = %(label)s order by key, fence
"""


@dataclass
class Opened:
    """A run of the product's that is open, beside what the model knows of it."""

    context: Any
    run: Run
    batches: Iterator[Batch]
    batch: Batch | None = None
    told: Holder = field(init=False)

    @property
    def keeper(self) -> Keeper:
        keeper = self.run._holding._keeper
        assert keeper is not None
        return keeper

    def close_keeper(self) -> int | None:
        """Closes the connection that renews were sent on, as the keeper does at its end; which it was."""
        connection = self.keeper._connection
        if connection is None or connection.closed:
            return None
        pid = connection.info.backend_pid
        connection.close()
        return pid


class Machine(RuleBasedStateMachine):
    """`world` is set by `machine_on`."""

    world: ClassVar[World]

    def __init__(self) -> None:
        super().__init__()
        self.holders: list[Opened] = []
        self.writers: list[tuple[int, psycopg.Connection[tuple[Any, ...]]]] = []
        self.kept: tuple[Tables, dict[str, Any]] | None = None
        self.world.examples += 1
        self.label = self.name = f"job{self.world.next_run()}.{self.world.examples}"
        self.renamed = 0
        self.model: Model
        self.patches: list[Any] = []

    # ── what the steps are made of ──

    @initialize(
        due=st.sampled_from(["rows", "rows", "hours", "elapsed"]),
        batches=st.sampled_from([1, 2, 3]),
        max_late=st.sampled_from([None, None, 10 * MINUTE]),
        rows=st.integers(0, 7),
    )
    def define(self, due: str = "rows", batches: int = 3, max_late: timedelta | None = None, rows: int = 0) -> None:
        now = MIDNIGHT + 5 * HOUR + 30 * SECOND
        self.versions = versions(due, batches, max_late)
        self.version = 0
        self.model = Model(self.versions[0], self.name, now)
        self.world.set(now)
        self.waited = timedelta()
        moved = Moved(lambda: self.model.mono + self.waited, self._wait)
        for module in (engine_run, engine_holding):
            self.patches += [mock.patch.object(module, "time", moved), mock.patch.object(module, "random", AtOnce)]
        for patch in self.patches:
            patch.start()
        job_table.register(self.world.control, self._spec(), self._registration())
        if due == "rows" and rows:
            self._add(self.world.control, rows, commits=True)

    def _spec(self) -> JobSpec:
        kind = self.versions[self.version]
        due = {
            "rows": NewRows("source", "id", where=f"job = '{self.label}'"),  # type: ignore[arg-type]
            "hours": EachInterval("0 * * * *", settle=SECOND, start=MIDNIGHT),
            "elapsed": Elapsed(settle=SECOND, start=MIDNIGHT),
        }[kind.due]
        bounds = Bounds(batch_rows=2, batches=kind.batches, timeout=TIMEOUT, batch_timeout=TIMEOUT)
        return JobSpec(self.name, due, Schedule(kind.cron), bounds, max_late=kind.max_late)

    def _registration(self) -> job_table.Registration:
        return registration_of(Definition(self._spec(), None), ())

    def _now(self) -> datetime:
        return self.model.now + self.waited

    def _wait(self, by: timedelta) -> None:
        """A run waits, in the middle of a step: the model has yet to hear of it."""
        self.waited += by
        self.world.set(self._now())

    def _same(self, told: Any, answer: Any) -> None:
        """What the product said is what the model says, which has moved its own clock by what the product waited."""
        assert answer == told, f"the product says {answer}, the model {told}"

    def _step(self, product: Callable[[], Answer], model: Callable[[], Answer]) -> Answer:
        """One step of both."""
        answer = product()
        after, self.waited = self._now(), timedelta()
        told = model()
        self._same(told, answer)
        self._same(self.model.now, after)
        self.world.answers[" ".join(answer[1]) if answer[0] == "raised" else answer[answer[0] == "outcome"]] += 1
        return answer

    @property
    def kind(self) -> Kind:
        return self.versions[self.version]

    def _may_look(self, own: int | None = None) -> bool:
        """Of time that is due, what is open elsewhere would be waited for."""
        return self.kind.due == "rows" or not (set(self.model.open) - {own})

    # ── runs ──

    @precondition(lambda self: len(self.holders) < 3 and self._may_look())
    @rule(
        trigger=st.sampled_from(["schedule", "schedule", "manual", "sensor"]),
        ahead=st.sampled_from([None] * 8 + [3 * SECOND, 6 * MINUTE]),
        despite_pause=st.booleans(),
        redo=st.sampled_from([None] * 6 + list(range(6))),
        finishes=st.sampled_from([False, False, True]),
    )
    def wake(
        self,
        trigger: str = "schedule",
        ahead: timedelta | None = None,
        despite_pause: bool = False,
        redo: int | None = None,
        finishes: bool = False,
    ) -> None:
        """A tick, or somebody, asks for a run. `ahead`: the tick is so far ahead of the database's clock. `redo`: this
        hour once more, of a job that is due by the hour. `finishes`: all that a healthy run does, at once."""
        if redo is not None and self.kind.due == "hours":
            opened = self._wake("redo", despite_pause=despite_pause, redo=MIDNIGHT + redo * HOUR)
        else:
            opened = self._wake(trigger, ahead=ahead, despite_pause=despite_pause)
        if finishes and opened is not None:
            self._finish(opened)

    def _wake(
        self,
        trigger: str,
        *,
        ahead: timedelta | None = None,
        despite_pause: bool = False,
        redo: datetime | None = None,
    ) -> Opened | None:
        number = self.world.next_run()
        # What Dagster's context would say.
        given = {"trigger": trigger, "worker_clock": self._now}
        given |= {} if ahead is None else {"tick": self._now() + ahead}
        context = self.world.resource.run(
            self._spec(),
            despite_pause=despite_pause,
            redo=redo,
            **given,
        )
        made: list[Run] = []

        def begin() -> Answer:
            try:
                run = context.__enter__()
            except Exception as error:
                return "raised", (type(error).__name__, str(Outcome.FAILED))
            if run.outcome is not Outcome.RUNNING:
                return self._leave(context, run, None)
            made.append(run)
            return "granted", run._holding.lease.fence

        def told() -> Answer:
            return self.model.wake(
                self.kind, trigger, ahead=ahead, despite_pause=despite_pause, redo=redo, next_id=number
            )

        opened = None
        try:
            self._step(begin, told)
        finally:
            if made:
                opened = Opened(context, made[0], iter(made[0]))
                opened.keeper.end()  # this machine is the keeper
                self.holders.append(opened)
        if opened is not None:
            opened.told = self.model.holders[-1]
        return opened

    def _leave(self, context: Any, run: Run, error: BaseException | None) -> Answer:
        """Leaves the block of the run; how it ended, and what was raised."""
        raised = error
        try:
            context.__exit__(None if error is None else type(error), error, error and error.__traceback__)
        except BaseException as other:
            raised = other
        if raised is None:
            return "outcome", str(run.outcome)
        # Whether the server's last word was heard, or nothing, is all the same.
        kind = psycopg.OperationalError if isinstance(raised, psycopg.OperationalError) else type(raised)
        return "raised", (kind.__name__, str(run.outcome))

    def _close(self, opened: Opened, error: BaseException | None) -> Answer:
        answer = self._leave(opened.context, opened.run, error)
        opened.close_keeper()
        self.holders.remove(opened)
        return answer

    @precondition(lambda self: self.holders)
    @rule(
        who=st.integers(0, 2),
        cut=st.sampled_from([None] * 6 + ["before", "after"]),
        writes=st.sampled_from([True, True, True, False]),
    )
    def go_on(self, who: int = 0, cut: str | None = None, writes: bool = True) -> None:
        """Commits the batch that is open, and takes the next one. `cut`: its connection is, just before or after the
        COMMIT. `writes`: into the next one, at once."""
        opened = self.holders[who % len(self.holders)]
        if self._may_look(opened.told.serial):
            self._go_on(opened, cut, writes)

    def _go_on(self, opened: Opened, cut: str | None, writes: bool) -> bool:
        if opened.batch is None or opened.told.cut:
            cut = None

        def take() -> Answer:
            try:
                with self._cutting(cut):
                    opened.batch = next(opened.batches, None)
            except Exception as error:
                return self._close(opened, error)
            if opened.batch is None:
                return self._close(opened, None)
            if opened.batch.rows:
                return "batch", [str(row["id"]) for row in opened.batch.rows]
            return "batch", [said(opened.batch.window.since)]

        answer, _ = self._step(take, lambda: self.model.go_on(opened.told, cut))
        if answer == "batch" and writes:
            self._write(opened)
        return answer == "batch"

    @contextmanager
    def _cutting(self, cut: str | None) -> Generator[None]:
        real = batches.commit

        def commit(connection: db.Connection, *given: Any, **named: Any) -> datetime:
            if cut == "before":
                self.world.terminate(connection.info.backend_pid)
                return real(connection, *given, **named)
            done = real(connection, *given, **named)
            self.world.terminate(connection.info.backend_pid)
            connection.execute("select")  # raises: the answer does not arrive
            return done

        if cut is None:
            yield
        else:
            with mock.patch.object(batches, "commit", commit):
                yield

    @precondition(lambda self: self.holders)
    @rule(
        what=st.sampled_from(["finish", "finish", "renew", "renew", "write", "undo a part"]),
        who=st.integers(0, 2),
    )
    def one(self, what: str, who: int = 0) -> None:
        """One of the runs that are open does this."""
        opened = self.holders[who % len(self.holders)]
        {
            "finish": self._finish,
            "renew": self._renew,
            "write": self._write,
            "undo a part": self._undo_a_part,
        }[what](opened)

    @precondition(lambda self: self.holders)
    @rule(
        what=st.sampled_from(["fail", "fail", "interrupt", "leave", "crash", "crash", "swallow", "cut off", "cut off"]),
        who=st.integers(0, 2),
    )
    def harm(self, what: str, who: int = 0) -> None:
        """This comes over one of them."""
        opened = self.holders[who % len(self.holders)]
        {
            "fail": lambda: self._end(opened, "user", BrokenError()),
            "interrupt": lambda: self._end(opened, what, KeyboardInterrupt()),
            "leave": lambda: self._end(opened, what, None),
            "crash": lambda: self._crash(opened),
            "swallow": lambda: self._swallow_an_error(opened),
            "cut off": lambda: self._cut_off(opened),
        }[what]()

    def _may_write(self, opened: Opened) -> bool:
        holder = opened.told
        stopped = holder.is_lost or self.model.left(holder) <= timedelta()
        return holder.page is not None and not (holder.cut or holder.spoilt or stopped)

    def _write(self, opened: Opened) -> None:
        """The work writes what it was handed, if it has not yet."""
        holder, batch = opened.told, opened.batch
        if self._may_write(opened) and not holder.wrote:
            assert batch is not None
            assert holder.page is not None
            self._begin_to_write(holder)
            holder.wrote = list(holder.page.keys)
            batch.insert("target", [{"job": self.label, "key": key, "fence": batch.fence} for key in holder.wrote])

    def _begin_to_write(self, holder: Holder) -> None:
        if holder.serial is None:
            self.world.use_up_a_number()
            holder.serial = self.model.open_one([])

    def _undo_a_part(self, opened: Opened) -> None:
        """A part of the work fails in a savepoint, and the work goes on."""
        if self._may_write(opened):
            assert opened.batch is not None
            self._begin_to_write(opened.told)
            with suppress(psycopg.errors.DivisionByZero), opened.batch.savepoint():
                opened.batch.insert("target", [{"job": self.label, "key": "undone", "fence": 0}])
                opened.batch.execute("select 1 / 0")

    def _swallow_an_error(self, opened: Opened) -> None:
        """A statement of the work fails, and the work does not say so."""
        if self._may_write(opened):
            assert opened.batch is not None
            with suppress(psycopg.errors.DivisionByZero):
                opened.batch.execute("select 1 / 0")
            self.model.spoil(opened.told)

    def _finish(self, opened: Opened) -> None:
        """The rest of a run, in one go."""
        if self._may_look(opened.told.serial):
            self._write(opened)
            while self._go_on(opened, None, True):
                pass

    def _end(self, opened: Opened, how: str, error: BaseException | None) -> None:
        """The block is left: early, or by an exception."""
        self._step(lambda: self._close(opened, error), lambda: self.model.leave(opened.told, how))

    def _crash(self, opened: Opened) -> None:
        """The process is gone: its connections end, and nothing is said."""
        self._kill(opened)
        self.model.crash(opened.told)

    def _kill(self, opened: Opened) -> None:
        holding = opened.run._holding
        pid = opened.close_keeper()
        holding.drop()
        holding._held = None
        opened.context.gen.close()
        self.holders.remove(opened)
        if pid is not None:
            gone = "select not exists (select from pg_stat_activity where pid = %s)"
            protocol.until(lambda: self.world.control.execute(gone, [pid]).fetchone() == (True,), pause=0.001)

    def _cut_off(self, opened: Opened) -> None:
        """The server ends the connection of a run, which does not know it yet."""
        if not opened.told.cut and not opened.told.spoilt:
            self.world.terminate(opened.run._holding.connection().info.backend_pid)
            self.model.cut_off(opened.told)

    def _renew(self, opened: Opened) -> None:
        """The keeper renews the lease; one that is lost stops the work."""
        stop, _ = opened.keeper._renew()
        if stop is not None:
            opened.keeper.stopped = stop
        self.model.renew(opened.told)
        self._same(opened.told.is_lost, opened.keeper.stopped is Stop.LOST)

    # ── time, rows, people ──

    @rule(
        by=st.sampled_from([20 * SECOND, 61 * SECOND, 61 * SECOND, 4 * MINUTE, 16 * MINUTE, HOUR, 3 * HOUR]),
        suspended=st.sampled_from([False, False, True]),
    )
    def advance(self, by: timedelta, suspended: bool = False) -> None:
        """Time passes. `suspended`: the machine of all that are at work stands still, its clocks too."""
        self.model.move(by, suspended=suspended)
        self.world.set(self.model.now)

    @precondition(lambda self: self.kind.due == "rows")
    @rule(count=st.integers(1, 5), how=st.sampled_from(["at once", "at once", "slowly", "commit", "roll back"]))
    def add_rows(self, count: int, how: str = "at once") -> None:
        """A writer adds some; or leaves his transaction open; or one who has done so ends it."""
        if how in ("commit", "roll back"):
            if self.writers:
                serial, connection = self.writers.pop(count % len(self.writers))
                connection.execute("rollback" if how == "roll back" else how)
                connection.close()
                self.model.end_one(serial, commits=how == "commit")
            return
        if how == "at once":
            self._add(self.world.control, count, commits=True)
        else:
            connection = jobs.connect(self.world.url)
            connection.execute("begin")
            self.writers.append((self._add(connection, count, commits=False), connection))

    def _add(self, connection: psycopg.Connection[tuple[Any, ...]], count: int, *, commits: bool) -> int:
        self.world.use_up_a_number()
        found = connection.execute(
            "insert into source (job) select %s from generate_series(1, %s) returning id", [self.label, count]
        ).fetchall()
        serial = self.model.open_one([key for (key,) in found])
        if commits:
            self.model.end_one(serial, commits=True)
        return serial

    @rule(
        what=st.sampled_from(
            ["release", "release", "pause", "pause 10m", "resume", "resume", "adopt", "rename", "deploy", "keep a copy",
             "keep a copy", "put the copy back", "put the copy back", "status", "set the watermark"]
        ),
        where=st.integers(0, 9),
    )  # fmt: skip
    def operate(self, what: str, where: int = 0) -> None:
        """Somebody does this to the job."""
        {
            "release": self._release,
            "pause": lambda: self._pause(None),
            "pause 10m": lambda: self._pause("10m"),
            "resume": self._resume,
            "adopt": self._adopt,
            "rename": self._rename,
            "deploy": self._deploy,
            "keep a copy": self._keep_a_copy,
            "put the copy back": self._put_the_copy_back,
            "status": self._status_agrees,
            "set the watermark": lambda: self._set_the_watermark(where),
        }[what]()

    def _set_the_watermark(self, where: int) -> None:
        """An operator moves the watermark, forward or back."""
        model, position = self.model, None
        if self.kind.due == "rows":
            settled = model.places(None, model.horizon())
            if where % 3 == 0 or not settled:
                text = "beginning"
            elif where % 3 == 1:
                text, position = "end", settled[-1]
            else:
                position = settled[where % len(settled)]
                text = f"after:{position[1]}"
        else:
            position = MIDNIGHT + where % 5 * HOUR
            if self.kind.due == "elapsed":
                position += 7 * MINUTE
            text = position.isoformat()
        self._same(model.set_aside(1), self._gaffer("watermark", "set", self.name, text, "--yes"))
        if model.tables.lease is None:
            model.tables.position = position

    def _gaffer(self, *words: str) -> bool:
        """The command. False: it was refused."""
        done = CliRunner().invoke(command, list(words), env={"GAFFER_DATABASE_URL": self.world.url})
        assert done.exit_code in (0, 1), done.output
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        return done.exit_code == 0

    def _pause(self, until: str | None) -> None:
        assert self._gaffer("pause", self.name, *(() if until is None else ("--until", until)))
        self.model.stop(None if until is None else self.model.now + 10 * MINUTE)

    def _resume(self) -> None:
        assert self._gaffer("resume", self.name)
        self.model.resume()

    def _release(self) -> None:
        assert self._gaffer("release", self.name, "--yes")
        self.model.release()

    def _adopt(self) -> None:
        self._same(self.model.set_aside(GAP), self._gaffer("watermark", "adopt", self.name, "--yes"))

    def _rename(self) -> None:
        self.renamed += 1
        name = f"{self.label}.{self.renamed}"
        told = self.model.rename(name)
        self._same(told, self._gaffer("rename", self.name, name, "--yes"))
        if told:
            self.name = name

    def _deploy(self) -> None:
        """The job's code is changed; its next run makes that known."""
        self.version = min(self.version + 1, len(self.versions) - 1)

    def _keep_a_copy(self) -> None:
        self.kept = copy.deepcopy(self.model.tables), self.world.copy(self.name, self.label)

    def _put_the_copy_back(self) -> None:
        """The database is restored to what it was, while runs are at work that do not know it."""
        if self.kept is not None:
            tables, rows = self.kept
            self.world.put_back(self.name, self.label, rows)
            self.model.tables = copy.deepcopy(tables)
            self.name = tables.name

    # ── what must be so after each step ──

    @invariant()
    def the_tables_say_what_the_model_says(self) -> None:
        if not self.patches:
            return
        tables = self.model.tables
        cursor = psycopg.ClientCursor(self.world.control)
        cursor.execute(_STATE, {"job": self.name, "label": self.label})
        [state] = cursor.fetchall()
        cursor.nextset()
        runs = cursor.fetchall()
        cursor.nextset()
        applied = cursor.fetchall()
        self._same(sorted(tables.applied), applied)
        told = (
            tables.name,
            len(tables.failed_ticks),
            tables.covered_until,
            tables.skipped_until,
            tables.last_success_at,
            tables.capped,
            tables.leases_lost,
            tables.follow_up_at,
            tables.is_paused,
            tables.fence,
            tables.lease is not None,
            tables.lease_until if tables.lease is not None else None,
            _stored(tables.position),
        )
        self._same(told, (*state[:-1], _read(state[-1])))
        expected = [
            (
                row.id, row.trigger, row.tick, str(row.outcome), row.fence, row.batches, row.items, row.backlog,
                row.covered_until, row.ticks_covered, row.deadline_at,
            )
            for _, row in sorted(tables.runs.items())
        ]  # fmt: skip
        self._same(expected, runs)

    def teardown(self) -> None:
        for opened in list(self.holders):
            self._kill(opened)
        for _, connection in self.writers:
            connection.close()
        for patch in self.patches:
            patch.stop()
        self.world.clean()

    def _status_agrees(self) -> None:
        """`gaffer status --json` says the same."""
        done = CliRunner().invoke(command, ["status", self.name, "--json"], env={"GAFFER_DATABASE_URL": self.world.url})
        said, tables = json.loads(done.stdout), self.model.tables
        worked = [row for row in tables.runs.values() if not row.outcome.did_not_work and row.trigger != "redo"]
        last = max(worked, key=lambda row: row.id, default=None)
        told = {
            "consecutive_failures": len(tables.failed_ticks),
            "fence": tables.fence,
            "last_outcome": None if last is None else str(last.outcome),
            "backlog": None if last is None else last.backlog,
            "covered_until": None if tables.covered_until is None else tables.covered_until.isoformat(),
            "lease_until": tables.lease_until.isoformat() if tables.lease is not None else None,
        }
        self._same(told, {name: said[name] for name in told})


def _stored(position: Any) -> Any:
    return str(position[1]) if isinstance(position, tuple) else position


def _read(position: Any) -> Any:
    if position is None:
        return None
    return position["key"] if "key" in position else datetime.fromisoformat(position["until"])


# ── how it is run ────────────────────────────────────────────────────────────────────────────────────────────────────


def told(url: str, steps: Sequence[Callable[[Machine], Any]], **job: Any) -> None:
    """One example whose steps are given. Raises where the product does not do what the model says."""
    world = World(url)

    class Told(Machine):
        pass

    Told.world = world
    machine = Told()
    try:
        machine.define(**job)
        for step in steps:
            step(machine)
            machine.the_tables_say_what_the_model_says()
    finally:
        machine.teardown()
        world.close()


def live(url: str, number: int, examples: int, steps: int, *, shrinks: bool = True) -> int:
    """So many examples of at most so many steps; how many there were. Raises what the first one that fails raises,
    which Hypothesis has made as short as it can, and prints as steps."""
    world = World(url)

    @seed(number)
    class Seeded(Machine):
        pass

    Seeded.world = world
    phases = [Phase.generate, Phase.shrink] if shrinks else [Phase.generate]
    try:
        run_state_machine_as_test(
            Seeded,
            settings=settings(
                max_examples=examples,
                stateful_step_count=steps,
                phases=phases,
                deadline=None,
                database=None,
                print_blob=False,
                report_multiple_bugs=False,
                suppress_health_check=list(HealthCheck),
            ),
        )
    finally:
        world.close()
        print(f"{world.examples} examples, in which runs answered: {dict(world.answers.most_common())}")
    return world.examples


def main() -> None:
    parser = argparse.ArgumentParser(prog="./dev machine", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1, 1_000_000))
    parser.add_argument("--examples", type=int, default=5_000)
    parser.add_argument("--steps", type=int, default=40)
    given = parser.parse_args()
    logging.disable()
    print(f"seed {given.seed}, {given.examples} examples of at most {given.steps} steps", flush=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        server(Path(folder)) as at,
        Databases(at) as made,
        made.scratch() as url,
    ):
        live(url, given.seed, given.examples, given.steps)


if __name__ == "__main__":
    main()
