"""Rows that fail, die, change and come while runs go on: whatever happens, the promises of `PendingRows` hold.

GAFFER_PENDING_HISTORIES sets how many histories, GAFFER_PENDING_SEED repeats one.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest

import gaffer_dagster as gd
from gaffer_dagster.domain.spec import JobSpec
from gaffer_dagster.engine.batch import Batch
from gaffer_dagster.store import db, operations, prepare
from gaffer_dagster.testing import Clock
from tests.support import claims_oracle as oracle
from tests.support import faults, jobs

HISTORIES = int(os.environ.get("GAFFER_PENDING_HISTORIES", 6))
SEED = int(os.environ.get("GAFFER_PENDING_SEED", 0)) or random.SystemRandom().randrange(1, 1_000_000)
ANN = operations.Operator("ann", None)
PENDING = "done_at is null"
DONE = "done_at = gaffer.clock(), done = done + 1"
BACKOFF = timedelta(minutes=10)
HOWS = [
    *["good"] * 12, "always", "thrice", "once", "beside", "violates", "late", "late", "self", "slow", "kills", "kills",
]  # fmt: skip
pytestmark = pytest.mark.timeout(60 + 60 * HISTORIES)


class BadRowError(Exception):
    pass


class History:
    """A table, a job over it, and what happened to both. `how` a row goes is a column of the row itself."""

    def __init__(self, url: str, clock: Clock, seed: int) -> None:
        self.url, self.clock, self.rng = url, clock, random.Random(seed)
        self.type = self.rng.choice(["bigint", "text", "uuid"])
        self.count = 0
        self.wrong: list[str] = []
        self.interrupt = ""
        self.killed = False
        jobs.execute(url, f"create table item (id {self.type} primary key, how text, done int not null default 0,"
                          " done_at timestamptz, value int not null default 0)")  # fmt: skip
        jobs.execute(url, "create table allowed (id text primary key)")
        jobs.execute(url, "create table effect (id text, how text check (how <> 'violates'), run bigint)")
        jobs.execute(url, "alter table effect add foreign key (id) references allowed deferrable initially deferred")
        jobs.execute(url, "create table call (n bigint generated always as identity, run bigint, batch int, keys text,"
                          " failed boolean)")  # fmt: skip
        if self.rng.random() < 0.7:
            with db.connect(url, application_name="test") as connection:
                prepare.apply(connection, prepare.pending_statements(connection, "item", "id", PENDING))
        bounds = gd.Bounds(
            batch_rows=self.rng.choice([1, 2, 5, 10]),
            batches=self.rng.choice([1, 2, 5, 20]),
            timeout="1m",
            batch_timeout="1s",
        )
        due = gd.PendingRows("item", "id", pending=PENDING, done=DONE, attempts=self.rng.randint(1, 4),
                             parallel=self.rng.choice([1, 1, 2, 3]), backoff=BACKOFF)  # fmt: skip
        self.job = JobSpec("items", due, bounds=bounds)
        self.story = oracle.Story(due.attempts, BACKOFF, set())
        self.add(self.rng.randint(5, 30))

    # ── the world ────────────────────────────────────────────────────────────────────────────────────────────────

    def add(self, rows: int) -> None:
        for _ in range(rows):
            self.count += 1
            number = self.rng.randint(-(2**40), 2**40)
            key = {
                "bigint": str(number),
                "text": f"{self.rng.choice(['a', 'B', 'é', '%s', chr(39), '{}', ' ', ','])}{number}",
                "uuid": str(UUID(int=self.rng.getrandbits(128))),
            }[self.type]
            how = self.rng.choice(HOWS)
            if how == "slow" and self.rng.random() < 0.7:
                how = "good"
            self.story.cut = self.story.cut or how == "slow"
            if how in ("good", "beside", "self"):
                self.story.innocent.add(key)
            jobs.execute(self.url, f"insert into item (id, how) values (%s::{self.type}, %s)", key, how)
            if how != "late":
                jobs.execute(self.url, "insert into allowed values (%s)", key)

    def some(self, where: str) -> str | None:
        found = [key for (key,) in jobs.query(self.url, f"select id::text from item where {where} order by id::text")]
        return self.rng.choice(found) if found else None

    def anew(self, key: str) -> None:
        self.story.touched.add(key)
        self.story.asked[key] = len(self.calls())

    def by_hand(self) -> None:
        """Somebody changes the table, between runs or within one."""
        deed = self.rng.choice(["new", "new", "delete", "done", "reopen", "change", "mend"])
        self.log(f"by hand: {deed}")
        text = f"where id = %s::{self.type}"
        free = f"(select 1 from item where id = %s::{self.type} for update skip locked)"
        if deed == "new":
            self.add(self.rng.randint(1, 4))
            return
        key = self.some({"reopen": "done_at is not null", "mend": "how <> 'good'"}.get(deed, PENDING))
        if key is None or not jobs.query(self.url, free, key):
            return  # a run is at work on it: this hand would wait for it, and it for this hand
        if deed == "delete":
            jobs.execute(self.url, f"delete from item {text}", key)
        elif deed == "done":
            jobs.execute(self.url, f"update item set done_at = now() {text}", key)
        elif deed == "reopen":
            self.story.reopened[key] += 1
            jobs.execute(self.url, f"update item set done_at = null {text}", key)
        elif deed == "change":
            jobs.execute(self.url, f"update item set value = value + 1 {text}", key)
        else:
            jobs.execute(self.url, "insert into allowed values (%s) on conflict do nothing", key)
            jobs.execute(self.url, f"update item set how = 'good' {text}", key)
            return
        if deed != "change":
            self.anew(key)

    def operate(self) -> None:
        verb = self.rng.choice(["retry", "drop"])
        keys = [key for (key,) in jobs.query(self.url, "select key from gaffer.job_item order by key")]
        chosen = None if self.rng.random() < 0.4 else self.rng.sample(keys, min(len(keys), 2))
        if not keys or chosen == []:
            return
        with db.connect(self.url, application_name="test") as connection:
            told = operations.change_items(connection, "items", verb, chosen, ANN)
        self.log(f"{verb} {told}")
        for key in told:
            self.story.touched.add(key)
            if verb == "retry":  # a dropped row keeps its attempts
                self.anew(key)
            (self.story.dropped.add if verb == "drop" else self.story.dropped.discard)(key)

    # ── what there is to see ─────────────────────────────────────────────────────────────────────────────────────

    def log(self, text: str) -> None:
        sys.stdout.write(f"  {text}\n")

    def calls(self) -> list[oracle.Call]:
        found = jobs.query(self.url, "select run, batch, keys, failed from call order by n")
        return [oracle.Call(run, batch, tuple(json.loads(keys)), failed) for run, batch, keys, failed in found]

    def rows(self) -> list[oracle.Row]:
        return [
            oracle.Row(*row)
            for row in jobs.query(
                self.url,
                "select id::text, done_at is null, done, (select count(*) from effect where effect.id = item.id::text)"
                " from item order by id",
            )
        ]

    def items(self) -> list[oracle.Item]:
        return [
            oracle.Item(*row)
            for row in jobs.query(
                self.url,
                "select key, attempts, failed_at, next_attempt_at, parked_at is not null, dropped_at is not null,"
                " error is null"
                " from gaffer.job_item order by key",
            )
        ]

    # ── the work ─────────────────────────────────────────────────────────────────────────────────────────────────

    def work(self, batch: Batch) -> None:
        keys = [str(row["id"]) for row in batch.rows]
        now, items = self.clock.now(), {item.key: item for item in self.items()}
        n = jobs.query(
            self.url,
            "insert into call (run, batch, keys, failed) values (%s, %s, %s, null) returning n",
            batch.run_id, batch.number, json.dumps(keys),
        )[0][0]  # fmt: skip
        told = list(oracle.of_call(oracle.Call(batch.run_id, batch.number, tuple(keys), None), items, now))
        if told:
            jobs.execute(self.url, "update call set keys = %s where n = %s", json.dumps(["wrong", *told]), n)
            raise AssertionError(told)
        try:
            late = self.work_on(batch, keys)
        except Exception:
            jobs.execute(self.url, "update call set failed = true where n = %s", n)
            raise
        jobs.execute(self.url, "update call set failed = %s where n = %s", late, n)

    def work_on(self, batch: Batch, keys: list[str]) -> bool:
        """Whether what it wrote cannot be committed."""
        if self.interrupt == "hand":
            self.interrupt = ""
            self.by_hand()
        if self.interrupt == "cut":
            self.interrupt = ""
            pid = batch.execute("select pg_backend_pid()").fetchone()[0]
            jobs.query(self.url, "select pg_terminate_backend(%s)", pid)
        late = False
        for row, key in zip(batch.rows, keys, strict=True):
            how = row["how"]
            failed = len({(c.run, c.batch) for c in self.calls() if c.failed and c.keys == (key,)})
            if how == "always" or (how == "thrice" and failed < 3) or (how == "once" and failed < 1):
                raise BadRowError(key)
            if how == "beside" and len(keys) > 1:
                raise BadRowError(key)
            if how == "slow":
                batch.execute("select pg_sleep(30)")
            if how == "kills":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "self":
                batch.execute(f"update item set done_at = 'epoch', done = done + 1 where id = %s::{self.type}", [key])
            batch.insert("effect", [{"id": key, "how": how, "run": batch.run_id}])
            late = late or not jobs.query(self.url, "select 1 from allowed where id = %s", key)
        return late

    # ── a history ────────────────────────────────────────────────────────────────────────────────────────────────

    def one_run(self) -> None:
        before, first = self.items(), len(self.calls())
        runs = jobs.query(self.url, "select coalesce(max(id), 0) from gaffer.job_runs")[0][0]
        began, killed = time.monotonic(), False
        if jobs.query(self.url, "select 1 from item where how = 'kills' and done_at is null limit 1"):
            killed = self.in_a_child()
        else:
            jobs.run(self.job, self.url, self.work, worker_clock=self.clock.now)
        assert time.monotonic() - began < 30, "a run stays on"
        self.killed = killed
        if killed:
            self.story.cut = True  # what it had noted of failed rows went with it
            self.log("killed")
            self.clock.advance(timedelta(minutes=30))
            faults.wait_until(lambda: not faults.backends(self.url, "items"), "the killed process's backends are gone")
        self.story.calls = self.calls()
        mine = self.story.calls[first:]
        assert len(mine) <= 3 * self.job.limits.batches * self.job.limits.batch_rows + 40, "a run stays on"
        if not killed:
            [(outcome, backlog, parked)] = jobs.query(
                self.url, "select outcome, backlog, parked from gaffer.job_runs where id > %s", runs
            )
            [(follow_up_at,)] = jobs.query(self.url, "select follow_up_at from gaffer.job")
            self.log(f"{outcome}, backlog {backlog}, parked {parked}, {len(mine)} calls")
            ended = oracle.Ended(outcome, backlog, parked, follow_up_at)
            seen = {key for call in mine for key in call.keys}
            self.wrong += oracle.of_run(ended, self.rows(), before, self.items(), seen, self.clock.now())

    def in_a_child(self) -> bool:
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                jobs.run(self.job, self.url, self.work, worker_clock=self.clock.now)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert code in (0, -signal.SIGKILL), "the run raised"
        return code != 0

    def two_runs(self) -> None:
        """Runs side by side: one within a batch of the other, or each in a thread."""
        if jobs.query(self.url, "select 1 from item where how in ('kills') and done_at is null limit 1"):
            return
        self.log("two runs")
        if self.rng.random() < 0.5:
            with ThreadPoolExecutor(2) as pool:
                for future in [
                    pool.submit(jobs.run, self.job, self.url, self.work, worker_clock=self.clock.now) for _ in range(2)
                ]:
                    future.result()
            return
        with (
            jobs.opened(self.job, self.url, worker_clock=self.clock.now) as first,
            jobs.opened(self.job, self.url, worker_clock=self.clock.now) as second,
        ):
            todo = [second]

            def work(batch: Batch) -> None:
                if todo:
                    todo.pop().apply(self.work)
                self.work(batch)

            first.apply(work)

    def check(self) -> None:
        self.story.calls = self.calls()
        self.wrong += [text for call in self.story.calls if call.keys[:1] == ("wrong",) for text in call.keys[1:]]
        parked = (jobs.query(self.url, "select parked from gaffer.job") or [(0,)])[0][0]
        self.wrong += oracle.of_rows(self.story, self.rows(), self.items(), None if self.killed else parked)
        assert not self.wrong, "\n".join(self.wrong)

    def live(self, steps: int) -> None:
        for _ in range(steps):
            deed = self.rng.choice(["run"] * 6 + ["two", "two", "hand", "operate", "time", "time", "cut", "within"])
            if deed == "hand":
                self.by_hand()
            elif deed == "operate":
                self.operate()
            elif deed == "time":
                self.clock.advance(timedelta(minutes=self.rng.choice([1, 9, 40, 150])))
            elif deed == "two":
                self.two_runs()
                self.check()
            else:
                self.interrupt = {"cut": "cut", "within": "hand"}.get(deed, "")
                self.story.cut = self.story.cut or deed == "cut"
                self.one_run()
                self.interrupt = ""
                self.check()
        for _ in range(200):
            self.clock.advance(timedelta(hours=2))
            self.one_run()
            self.check()
            if not list(oracle.of_the_end(self.rows(), self.items())):
                break
        self.wrong += oracle.of_the_end(self.rows(), self.items())
        self.check()


@pytest.mark.parametrize("seed", [SEED + n for n in range(HISTORIES)])
def test_the_promises_hold_in_any_history(url: str, clock: Clock, seed: int) -> None:
    history = History(url, clock, seed)
    due = history.job.due
    assert isinstance(due, gd.PendingRows)
    print(f"seed {seed}: {history.count} rows, keys {history.type}, {history.job.limits}, attempts {due.attempts}")
    history.live(12)
