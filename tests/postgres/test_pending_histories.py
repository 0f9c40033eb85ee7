"""Rows that fail, kill, change and come while runs go on: whatever happens, the promises of `PendingRows` hold.

GAFFER_PENDING_HISTORIES sets how many random histories there are beside the fixed ones, GAFFER_PENDING_SEED where they
begin. A history is repeated by its seed: nothing in it depends on timing.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import traceback
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest

import gaffer_dagster as gd
from gaffer_dagster.domain.spec import JobSpec
from gaffer_dagster.engine import items as engine_items
from gaffer_dagster.engine.batch import Batch
from gaffer_dagster.store import db, operations, pending_rows
from gaffer_dagster.testing import Clock
from tests.support import claims_oracle as oracle
from tests.support import faults, jobs, variants

SEEDS = [1, 2, 3, 4, 5, 6]
HISTORIES = int(os.environ.get("GAFFER_PENDING_HISTORIES", 0))
SEED = int(os.environ.get("GAFFER_PENDING_SEED", 0)) or random.SystemRandom().randrange(1_000, 1_000_000)
MOST_RUNS = 150
BACKOFF = timedelta(minutes=10)
PENDING, DONE = "done_at is null", "done_at = gaffer.clock(), done = done + 1"
GOOD = ("good", "beside", "self")
HOWS = [*["good"] * 10, "beside", "self", "always", "later", "violates", "late", "kills"]
# `known`: what the oracle must know of a row, in a table of its own, for a run may hold the row.
TABLES = """
    create table item (id {0} primary key, how text, done int not null default 0, done_at timestamptz, ok_at timestamptz);
    create table known (id {0}, innocent bool, dropped bool default false, reopened int default 0, asked int default 0);
    create table allowed (id text primary key);
    create table effect (id text references allowed deferrable initially deferred, how text check (how <> 'violates'));
    create table call (n int generated always as identity, run bigint, keys text[], well bool, untimely text[]);
"""


class BadRowError(Exception):
    pass


class History:
    """A table, a job over it, and what happens to both. `how` a row goes is a column of the row itself."""

    def __init__(self, url: str, clock: Clock, seed: int) -> None:
        self.url, self.clock, self.rng = url, clock, random.Random(seed)
        self.type = self.rng.choice(["bigint", "text"])
        self.processes: dict[int, Any] = {}
        for text in TABLES.format(self.type).strip().split("\n"):
            self.execute(text)
        self.due = gd.PendingRows("item", "id", pending=PENDING, done=DONE, attempts=self.rng.randint(1, 3),
                                  parallel=self.rng.choice([1, 2]), backoff=BACKOFF)  # fmt: skip
        bounds = gd.Bounds(
            batch_rows=self.rng.choice([1, 3, 10]), batches=self.rng.choice([1, 3, 20]), timeout="1m", batch_timeout="1s"
        )
        self.job = JobSpec("items", self.due, bounds=bounds)
        self.meanwhile = ""
        for _ in range(self.rng.randint(5, 15)):
            self.add(self.rng.choice(HOWS))
        if self.rng.random() < 0.3:
            self.add("slow")
        faults.say(f"seed {seed}: {self.due}, {self.job.limits}")

    def execute(self, text: Any, *params: Any) -> Any:
        """On a connection that a process keeps, for a history asks much."""
        if os.getpid() not in self.processes:
            self.processes[os.getpid()] = jobs.connect(self.url)
        return self.processes[os.getpid()].execute(text, params)

    def query(self, text: Any, *params: Any) -> list[tuple[Any, ...]]:
        return self.execute(text, *params).fetchall()

    # ── what people do ───────────────────────────────────────────────────────────────────────────────────────────

    def add(self, how: str) -> None:
        key = str(self.rng.randint(-(2**40), 2**40))
        ok_at = self.now() + timedelta(hours=self.rng.choice([1, 6]))
        self.execute(f"insert into item (id, how, ok_at) values (%s::{self.type}, %s, %s)", key, how, ok_at)
        self.execute(f"insert into known (id, innocent) values (%s::{self.type}, %s)", key, how in GOOD)
        if how != "late":
            self.execute("insert into allowed values (%s)", key)

    def by_hand(self) -> None:
        deed = self.rng.choice(["new", "new", "delete", "done", "reopen"])
        where = "done_at is not null" if deed == "reopen" else PENDING
        free = self.query(f"select id::text from item where {where} order by id::text for update skip locked")
        if deed == "new" or not free:
            self.add(self.rng.choice(HOWS))
            return
        key = self.rng.choice(free)[0]
        is_it = f"where id = %s::{self.type}"
        faults.say(f"  by hand: {deed} {key}")
        if deed == "delete":
            self.execute(f"delete from item {is_it}", key)
        elif deed == "done":
            self.execute(f"update item set done_at = now() {is_it}", key)
            self.execute(f"update known set dropped = false {is_it}", key)
        else:
            self.execute(f"update known set reopened = reopened + 1 {is_it}", key)
            self.execute(f"update item set done_at = null {is_it}", key)

    def operate(self) -> None:
        action = self.rng.choice(["retry", "drop"])
        keys = [item.key for item in self.items()]
        chosen = None if self.rng.random() < 0.4 else self.rng.sample(keys, min(len(keys), 2))
        if not keys:
            return
        with db.connect(self.url, application_name="test") as connection:
            told = operations.change_items(connection, "items", action, chosen, operations.Operator("ann", None))
        faults.say(f"  {action} {told}")
        if action == "retry":
            text = "update known set dropped = false, asked = (select coalesce(max(n), 0) from call)"
        else:
            text = "update known set dropped = true"
        self.execute(f"{text} where id::text = any(%s)", told)

    # ── the work ─────────────────────────────────────────────────────────────────────────────────────────────────

    def work(self, batch: Batch) -> None:
        keys = [str(row["id"]) for row in batch.rows]
        [(number,)] = self.query(
            "insert into call (run, keys, well, untimely) select %s, %s, false, array(select key from gaffer.job_item"
            " where key = any(%s) and (parked_at is not null or dropped_at is not null or (next_attempt_at >"
            " gaffer.clock() and failed_at < (select started_at from gaffer.job_runs where id = %s)))) returning n",
            batch.run_id, keys, keys, batch.run_id,
        )  # fmt: skip
        meanwhile, self.meanwhile = self.meanwhile, ""
        if meanwhile == "hand":
            self.by_hand()
        elif meanwhile == "second run":
            jobs.run(self.job, self.url, self.work, worker_clock=self.clock.now)
        elif meanwhile == "cut":
            # That is no fault of a row; but nobody can tell, where it was worked on alone.
            self.execute("update known set innocent = false where array[id::text] = %s", keys)
            self.query("select pg_terminate_backend(%s)", batch.execute("select pg_backend_pid()").fetchone()[0])
        late = False
        for row in batch.rows:
            how, key = row["how"], str(row["id"])
            if how == "always" or (how == "later" and self.now() < row["ok_at"]) or (how == "beside" and len(keys) > 1):
                raise BadRowError(key)
            if how == "slow":
                batch.execute("select pg_sleep(30)")
            if how == "kills":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "self":
                batch.execute(f"update item set done_at = now(), done = done + 1 where id = %s::{self.type}", [key])
            batch.insert("effect", [{"id": key, "how": how}])
            late = late or how == "late"  # strikes at COMMIT
        self.execute("update call set well = %s where n = %s", not late, number)

    # ── what there is to see ─────────────────────────────────────────────────────────────────────────────────────

    def now(self) -> datetime:
        return self.query("select gaffer.clock()")[0][0]

    def rows(self) -> list[oracle.Row]:
        found = self.query(
            "select id::text, done_at is null, done, (select count(*) from effect where effect.id = item.id::text),"
            " reopened, innocent, dropped, asked from item join known using (id)",
        )
        return [oracle.Row(*row) for row in found]

    def items(self) -> list[oracle.Item]:
        found = self.query(
            "select key, attempts, failed_at, next_attempt_at, parked_at is not null, dropped_at is not null,"
            " error is null from gaffer.job_item order by key",
        )
        return [oracle.Item(*row) for row in found]

    def check(self, *more: str) -> None:
        found = self.query("select n, run, keys, well, untimely from call order by n")
        calls = [oracle.Call(*row) for row in found]
        wrong = [*oracle.of_rows(self.rows(), self.items(), calls, self.due.attempts, BACKOFF), *more]
        assert not wrong, "\n".join(wrong)

    # ── a history ────────────────────────────────────────────────────────────────────────────────────────────────

    def run(self, meanwhile: str = "") -> None:
        kills = self.query("select exists (select from item where how = 'kills' and done_at is null)")[0][0]
        before = self.items()
        if kills:
            if self.is_killed():
                faults.wait_until(lambda: not faults.backends(self.url, "items"), "the killed process is gone")
                self.clock.advance(timedelta(minutes=2))  # its lease
                self.check()
                return
        else:
            self.meanwhile = meanwhile
            jobs.run(self.job, self.url, self.work, worker_clock=self.clock.now)
            self.meanwhile = ""
            if meanwhile in ("hand", "second run"):
                self.check()
                return
        [ended] = self.query(
            "select outcome, r.backlog, r.parked, batches, j.follow_up_at from gaffer.job_runs r, gaffer.job j"
            " order by r.id desc limit 1",
        )
        faults.say(f"  {ended[:3]}")
        self.check(*oracle.of_run(oracle.Ended(*ended), self.rows(), before, self.items(), self.now()))

    def is_killed(self) -> bool:
        """A run in a process of its own."""
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

    def live(self, steps: int = 12) -> None:
        for _ in range(steps):
            deed = self.rng.choice(["run", "run", "run", "cut", "hand", "second run", "by hand", "operate", "time"])
            if deed == "by hand":
                self.by_hand()
            elif deed == "operate":
                self.operate()
            elif deed == "time":
                self.clock.advance(timedelta(minutes=self.rng.choice([3, 120])))
            else:
                self.run(deed)
        for _ in range(MOST_RUNS):
            self.clock.advance(timedelta(hours=2))
            self.run()
            if not list(oracle.of_the_end(self.rows(), self.items())):
                return
        self.check(*oracle.of_the_end(self.rows(), self.items()))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", [*SEEDS, *range(SEED, SEED + HISTORIES)])
def test_the_promises_hold_in_any_history(url: str, clock: Clock, seed: int) -> None:
    live(url, clock, seed)


def live(url: str, clock: Clock, seed: int) -> None:
    history = History(url, clock, seed)
    try:
        history.live()
    finally:
        history.processes[os.getpid()].close()
