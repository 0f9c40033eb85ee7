"""Rows that fail, kill, change and come while runs go on: whatever happens, the promises of `PendingRows` hold.

GAFFER_PENDING_HISTORIES sets how many random histories there are beside the fixed ones, GAFFER_PENDING_SEED where they
begin, GAFFER_PENDING_ROWS and GAFFER_PENDING_STEPS how large they are. A history is repeated by its seed and size:
nothing in it depends on timing.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import datetime, timedelta
from typing import Any

import pytest

import gaffer_dagster as gd
from gaffer_dagster.domain.spec import JobSpec
from gaffer_dagster.engine import items as engine_items
from gaffer_dagster.engine.batch import Batch
from gaffer_dagster.engine.run import Run
from gaffer_dagster.store import db, operations, pending_rows
from gaffer_dagster.testing import Clock
from tests.support import claims_oracle as oracle
from tests.support import faults, jobs, variants

SEEDS = [1, 5, 6, 10]
HISTORIES = int(os.environ.get("GAFFER_PENDING_HISTORIES", 0))
SEED = int(os.environ.get("GAFFER_PENDING_SEED", 0)) or random.SystemRandom().randrange(1_000, 1_000_000)
ROWS = int(os.environ.get("GAFFER_PENDING_ROWS", 6))
STEPS = int(os.environ.get("GAFFER_PENDING_STEPS", 8))
MOST_RUNS = 12 * ROWS
BACKOFF = timedelta(minutes=10)
PENDING, DONE = "done_at is null", "done_at = gaffer.clock(), done = done + 1"
GOOD = ("good", "beside", "self", "passes")
DEEDS = ["run", "run", "run", "cut", "deadlock", "hand", "second run", "by hand", "operate", "time"]
HOWS = [*["good"] * 10, "beside", "self", "passes", "always", "later", "violates", "late", "kills"]
DEADLOCK = "do $$ begin raise exception 'deadlock detected' using errcode = '40P01'; end $$"
# `known`: what the oracle must know of a row, in a table of its own, for a run may hold the row.
TABLES = """
    create table item (id {0} primary key, how text, ok_at timestamptz, done int default 0, done_at timestamptz);
    create table known (id {0}, innocent bool, dropped bool default false, reopened int default 0, asked int default 0);
    create table allowed (id text primary key);
    create table effect (id text references allowed deferrable initially deferred, how text check (how <> 'violates'));
    create table call (n int generated always as identity, run bigint, keys text[], well bool, untimely text[]);
"""


class BadRowError(Exception):
    pass


class History:
    """A table, a job over it, and what happens to both. `how` a row goes is a column of the row itself."""

    def __init__(self, url: str, clock: Clock, seed: int, hows: Sequence[str] = ()) -> None:
        self.url, self.clock, self.rng = url, clock, random.Random(seed)
        self.type = self.rng.choice(["bigint", "text"])
        self.processes: dict[int, Any] = {}
        for text in TABLES.format(self.type).strip().split("\n"):
            self.execute(text)
        self.due = gd.PendingRows("item", "id", pending=PENDING, done=DONE, attempts=self.rng.randint(1, 3),
                                  parallel=self.rng.choice([1, 2]), backoff=BACKOFF)  # fmt: skip
        bounds = gd.Bounds(
            batch_rows=self.rng.choice([1, 3, 10]), batches=self.rng.choice([2, 20]), timeout="1m", batch_timeout="30s"
        )
        self.job = JobSpec("items", self.due, bounds=bounds)
        self.meanwhile = ""
        drawn = [self.rng.choice(HOWS) for _ in range(self.rng.randint(3, ROWS))]
        for how in hows or [*drawn, *["slow"] * (self.rng.random() < 0.3)]:
            self.add(how)
        faults.say(f"seed {seed}: {self.due}, {self.job.limits}")

    def execute(self, text: Any, *params: Any) -> Any:
        """On a connection that a process keeps, for a history asks much."""
        if os.getpid() not in self.processes:
            self.processes[os.getpid()] = jobs.connect(self.url)
        return self.processes[os.getpid()].execute(text, params)

    def query(self, text: Any, *params: Any) -> list[tuple[Any, ...]]:
        return self.execute(text, *params).fetchall()

    def close(self) -> None:
        self.processes[os.getpid()].close()

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
            self.query("select pg_terminate_backend(%s)", batch.execute("select pg_backend_pid()").fetchone()[0])
        elif meanwhile == "deadlock":
            batch.execute(DEADLOCK)
        late = False
        for row in batch.rows:
            how, key = row["how"], str(row["id"])
            if how == "always" or (how == "later" and self.now() < row["ok_at"]) or (how == "beside" and len(keys) > 1):
                raise BadRowError(key)
            if how == "passes" and len(keys) == 1 and self.is_first(batch.run_id, keys):
                if self.rng.random() < 0.5:
                    batch.execute("select pg_terminate_backend(pg_backend_pid())")
                batch.execute(DEADLOCK)
            if how == "slow":  # for the batch's time limit, which a loaded machine must not reach by itself
                batch.execute("set local statement_timeout = '0.2s'")
                batch.execute("select pg_sleep(30)")
            if how == "kills":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "self":
                batch.execute(f"update item set done_at = now(), done = done + 1 where id = %s::{self.type}", [key])
            batch.insert("effect", [{"id": key, "how": how}])
            late = late or how == "late"  # strikes at COMMIT
        self.execute("update call set well = %s where n = %s", not late, number)

    def is_first(self, run: int, keys: Sequence[str]) -> bool:
        """This is the first call of the run with these rows."""
        return self.query("select count(*) from call where run = %s and keys = %s", run, list(keys)) == [(1,)]

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

    def live(self, deeds: Sequence[str] = (), most_runs: int = MOST_RUNS) -> None:
        for deed in deeds or self.rng.choices(DEEDS, k=STEPS):
            if deed == "by hand":
                self.by_hand()
            elif deed == "operate":
                self.operate()
            elif deed == "time":
                self.clock.advance(timedelta(minutes=self.rng.choice([3, 120])))
            else:
                self.run(deed)
        for _ in range(most_runs):
            self.clock.advance(timedelta(hours=2))
            self.run()
            if not list(oracle.of_the_end(self.rows(), self.items())):
                return
        self.check(*oracle.of_the_end(self.rows(), self.items()))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", [*SEEDS, *range(SEED, SEED + HISTORIES)])
def test_the_promises_hold_in_any_history(url: str, clock: Clock, seed: int) -> None:
    with closing(History(url, clock, seed)) as history:
        history.live()


# ── broken ways to do it, each of which a history shows ──────────────────────────────────────────────────────────


def _parks_too_late(url: str, _: pytest.MonkeyPatch) -> None:
    late = "case when i.attempts + excluded.attempts {} c_attempts"
    variants.replace(url, "settle_items", {late.format(">="): late.format(">")})


def _charges_nothing_beforehand(_: str, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pending_rows, "charge", lambda *_: None)  # pyright: ignore[reportUnknownLambdaType]


def _fails_the_whole_page(_: str, patch: pytest.MonkeyPatch) -> None:
    def work_on(page: Any, connection: db.Connection, work: Any, is_of_rows: Any) -> Any:
        try:
            return engine_items.Result(page, work(page), page.claimed.keys, page.claimed.failed)
        except BadRowError as error:
            return engine_items.Result(page, {}, (), [engine_items.failure(key, error) for key in page.claimed.keys])

    patch.setattr(engine_items, "work_on", work_on)


def _claims_on_another_connection(url: str, patch: pytest.MonkeyPatch) -> None:
    claim = pending_rows._claim  # pyright: ignore[reportPrivateUsage]

    def elsewhere(_: db.Connection, *of: Any) -> Any:
        with db.connect(url, application_name="test") as connection:
            return claim(connection, *of)

    patch.setattr(pending_rows, "_claim", elsewhere)


def _does_not_wait(_: str, patch: pytest.MonkeyPatch) -> None:
    to_retry = pending_rows.to_retry

    def at_once(connection: db.Connection, job: str, due_until: datetime, limit: int) -> Any:
        return to_retry(connection, job, due_until + timedelta(days=1), limit)

    patch.setattr(pending_rows, "to_retry", at_once)


def _leaves_it_charged(_: str, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Run, "_take_back", lambda _: None)  # pyright: ignore[reportUnknownLambdaType]


# Histories in which it shows: the seed (of the job's bounds), how the rows go, what is done, and what is said of it.
BROKEN: list[tuple[Callable[[str, pytest.MonkeyPatch], None], int, list[str], list[str], str]] = [
    (_parks_too_late, 5, ["good", "always"], ["run"], "parked is False"),
    (_charges_nothing_beforehand, 7, ["good", "kills"], ["run"], "neither done nor"),
    (_fails_the_whole_page, 2, ["good", "always"], ["run"], "never failed alone"),
    (_claims_on_another_connection, 10, ["good", "good"], ["second run"], "its work is there 2 times"),
    (_leaves_it_charged, 1, ["passes", "slow"], ["run"], "never failed alone, and is charged"),
    (_does_not_wait, 1, ["good", "always"], ["run"], "failed alone in 1 runs"),
]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("broken", "seed", "hows", "deeds", "says"), BROKEN)
def test_a_broken_way_is_seen(
    url: str, clock: Clock, monkeypatch: pytest.MonkeyPatch, broken: Any, seed: int, hows: Any, deeds: Any, says: str
) -> None:
    with closing(History(url, clock, seed, hows)) as history:
        broken(url, monkeypatch)
        with pytest.raises(AssertionError, match=says):
            history.live(deeds, most_runs=8)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("_broken", "seed", "hows", "deeds", "_says"), BROKEN)
def test_the_product_passes_the_same(
    url: str, clock: Clock, _broken: Any, seed: int, hows: Any, deeds: Any, _says: str
) -> None:
    with closing(History(url, clock, seed, hows)) as history:
        history.live(deeds, most_runs=8)
