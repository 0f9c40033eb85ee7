"""What everybody reads of a history of any length: counted in buffers and rows, never in time.

Two databases are filled as years of runs would fill them, one with five times the history of the other. Whoever works,
looks or prunes must read as much of the one as of the other.

    ./dev history --rows 10000000
"""

from __future__ import annotations

import argparse
import logging
import random
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import dagster as dg
from click.testing import CliRunner
from psycopg import errors as pg

from gaffer_dagster.adapter import checks, metadata
from gaffer_dagster.adapter.resource import GafferResource
from gaffer_dagster.cli import main as gaffer
from gaffer_dagster.domain.bounds import Bounds
from gaffer_dagster.domain.due import EachInterval, NewRows, PendingRows
from gaffer_dagster.domain.schedule import Schedule
from gaffer_dagster.domain.spec import JobSpec
from gaffer_dagster.engine.batch import Batch
from gaffer_dagster.engine.registry import Definition, register_all
from gaffer_dagster.engine.watch import Watcher, attend
from gaffer_dagster.store import db, horizon, learnt, prune, runs
from gaffer_dagster.store import jobs as job_table
from gaffer_dagster.store.operations import Operator
from gaffer_dagster.testing import scratch_database
from gaffer_dagster.testing.database import server
from gaffer_dagster.testing.waits import backends, wait_until
from tests.support import jobs

_HOURLY = Schedule("0 * * * *")
_BOUNDS = Bounds(batch_rows=10, timeout="5m")
STEADY = JobSpec("steady", NewRows("source", "id"), _HOURLY, _BOUNDS)
"""Works all the time."""
RESTING = JobSpec("resting", NewRows("source", "id"), _HOURLY, _BOUNDS)
"""Has been paused for nearly all the time, and is woken all the same."""
QUEUE = JobSpec(
    "queue",
    PendingRows("queue", "id", pending="done_at is null", done="done_at = now()", parallel=4),
    _HOURLY,
    _BOUNDS,
)
"""Has a slot that is hardly ever needed."""
REDONE = JobSpec("redone", EachInterval("@hourly"), _HOURLY, _BOUNDS)
"""Somebody did its intervals once more, again and again, and it has not run since."""
STOPPED = JobSpec("stopped", NewRows("source", "id"), None, _BOUNDS)
"""Worked long ago."""
JOBS = (STEADY, RESTING, QUEUE, REDONE, STOPPED)

ANN = Operator("ann", None)
_FEW = 2_000
"""So many runs of old history, whatever its length."""

_RUNS = """
    insert into gaffer.job_runs (job, slot, fence, lease_id, owner, dagster_run_id, trigger, redo, tick, spec_hash,
                                 started_at, deadline_at, ended_at, outcome, batches, items, covered_until,
                                 ticks_covered, backlog, watermark_to)
    select job, case when job = 'queue' and n > %(old)s then n %% 3 when job = 'queue' then n %% 4 else 0 end,
           case when worked then n end, case when worked then gen_random_uuid() end, 'host:1:x',
           gen_random_uuid()::text, case when redone then 'redo' else 'schedule' end,
           case when redone then tstzrange(at, at + interval '1 hour') end,
           date_trunc('hour', at), 'x', at, at + interval '5 minutes', at + interval '3 seconds',
           case when worked then (array['succeeded', 'succeeded', 'capped', 'failed'])[1 + n %% 4]
                when n > %(old)s and job = 'resting' then 'paused' else 'busy' end,
           1, 10, case when worked and not redone and n %% 4 < 2 then at end, 1, 0,
           case when job = 'redone' and worked then jsonb_build_object('until', date_trunc('hour', at)) end
      from generate_series(1, %(rows)s) n,
           lateral (select %(now)s::timestamptz - (%(rows)s - n) * interval '1 minute' as at,
                           case when n <= %(old)s then (array['stopped', 'resting', 'queue', 'redone'])[1 + n / 4 %% 4]
                                else (array['steady', 'steady', 'steady', 'steady', 'steady', 'steady', 'resting',
                                            'queue', 'queue', 'redone'])[1 + n %% 10] end as job) a,
           lateral (select case job when 'resting' then n <= %(old)s when 'steady' then n %% 50 <> 1 else true end
                               as worked,
                           job = 'redone' and n > %(old)s as redone) b
"""
_OTHERS = (
    """
    insert into gaffer.operator_action (job, action, at, by, details)
    select case when n %% 2 = 0 then 'steady' end,
           case when n <= %(old)s / 10 then (array['pause', 'resume'])[1 + n / 2 %% 2] else 'ack' end,
           %(now)s::timestamptz - (%(rows)s / 10 - n) * interval '10 minutes', 'ann',
           case when n %% 2 = 0 then '{}' else jsonb_build_object('table', 'public.t' || n %% 100) end
      from generate_series(1, %(rows)s / 10) n
    """,
    """
    insert into gaffer.job_spec (job, spec_hash, spec, first_seen_at, registered_at, since_at)
    select name, 'old' || n, spec, at, at, at
      from gaffer.job, generate_series(1, %(rows)s / 50) n,
           lateral (select %(now)s::timestamptz - (%(rows)s / 50 + 1 - n) * interval '50 minutes' as at) a
     where name = 'steady'
    """,
    """
    insert into gaffer.alert (job, kind, severity, since_at, opened_at, resolved_at, details)
    select (array['steady', 'resting'])[1 + n %% 2], 'failures', 'error', at, at, at, '{}'
      from generate_series(1, %(rows)s / 20) n,
           lateral (select %(now)s::timestamptz - (%(rows)s / 20 + 200 - n) * interval '20 minutes' as at) a
    """,
    """
    insert into gaffer.receiver values ('log', 'epoch', %(now)s::timestamptz), ('hook', 'epoch', %(now)s::timestamptz)
    """,
    """
    insert into gaffer.alert_delivery (alert, notice, number, receiver, created_at, next_attempt_at, delivered_at)
    select a.id, notice, 0, r.name, a.opened_at, a.opened_at, a.resolved_at
      from gaffer.alert a, gaffer.receiver r, unnest(array['opened', 'resolved']) notice
    """,
    """
    insert into gaffer.watch_gap (since_at, until_at, watch)
    select at, at + interval '1 hour', 'check:host'
      from generate_series(1, %(rows)s / 100) n,
           lateral (select %(now)s::timestamptz - (%(rows)s / 100 + 100 - n) * interval '100 minutes' as at) a
    """,
)


def fill(url: str, rows: int) -> float:
    """A history of so many runs, one a minute, which ends now; and of what else there is in its proportion. How long
    that took, in seconds."""
    began = time.monotonic()
    jobs.make_source(url)
    jobs.execute(url, "create table queue (id bigint primary key, done_at timestamptz)")
    jobs.execute(url, "create index on queue (id) where done_at is null")
    with db.connect(url, application_name="test") as connection:
        register_all(connection, [Definition(each, None) for each in JOBS])
        given = {"rows": rows, "old": _FEW, "now": horizon.now(connection)}
        connection.execute("set session_replication_role = replica")  # each of them is of a job that there is
        for text in (_RUNS, *_OTHERS):
            connection.execute(text, given)
        connection.execute(
            """
            update gaffer.job
               set first_seen_at = %(now)s::timestamptz - %(rows)s * interval '1 minute', rules_at = 'epoch',
                   covered_until = %(now)s::timestamptz - interval '1 minute',
                   paused_at = case name when 'resting'
                                    then %(now)s::timestamptz - (%(rows)s - %(old)s) * interval '1 minute' end,
                   paused_by = case name when 'resting' then 'ann' end
            """,
            given,
        )
        connection.execute("vacuum analyze")
    return time.monotonic() - began


@dataclass(frozen=True)
class Read:
    """What was read of the schema gaffer: buffers of tables and indexes, and rows."""

    buffers: int
    rows: int

    def __sub__(self, other: Read) -> Read:
        return Read(self.buffers - other.buffers, self.rows - other.rows)


def so_far(url: str) -> Read:
    """By all sessions, which must be over."""
    wait_until(lambda: not backends(url), "nobody is connected any more")
    (row,) = jobs.query(
        url,
        """
        select sum(heap_blks_read + heap_blks_hit + coalesce(idx_blks_read + idx_blks_hit, 0)
                   + coalesce(toast_blks_read + toast_blks_hit + tidx_blks_read + tidx_blks_hit, 0))::bigint,
               sum(coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0))::bigint
          from pg_statio_all_tables join pg_stat_all_tables using (relid, schemaname, relname)
         where schemaname = 'gaffer'
        """,
    )
    return Read(*row)


def count(url: str, act: Callable[[str], Any]) -> Read:
    """What `act` reads."""
    before = so_far(url)
    act(url)
    return so_far(url) - before


# ── who reads ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _command(*words: str) -> Callable[[str], None]:
    def act(url: str) -> None:
        done = CliRunner().invoke(gaffer, list(words), env={"GAFFER_DATABASE_URL": url})
        assert done.exit_code in (0, 1), (words, done.output)
        assert "Traceback" not in done.output, done.output
        assert not done.stderr.startswith("gaffer: "), done.stderr

    return act


def _copy(batch: Batch) -> None:
    batch.execute("select")


def _steady(url: str) -> None:
    jobs.add_rows(url, 5)
    assert jobs.run(STEADY, url, trigger="schedule").items == 5


def _failing(url: str) -> None:
    jobs.add_rows(url, 5)
    with suppress(pg.DivisionByZero):
        jobs.run(STEADY, url, lambda batch: batch.execute("select 1/0"), trigger="schedule")


def _resting(url: str) -> None:
    with jobs.opened(RESTING, url, trigger="schedule") as run:
        assert str(run.outcome) == "paused"


def _despite(url: str) -> None:
    jobs.run(RESTING, url, despite_pause=True)


def _redone(url: str) -> None:
    jobs.run(REDONE, url, _copy)


def _queue(url: str) -> None:
    """In each of its slots."""
    jobs.execute(url, "insert into queue select coalesce(max(id), 0) + 1 from queue")
    with (
        jobs.opened(QUEUE, url) as one,
        jobs.opened(QUEUE, url) as two,
        jobs.opened(QUEUE, url) as three,
        jobs.opened(QUEUE, url) as four,
    ):
        for run in (one, two, three, four):
            run.apply(_copy)


def _pass(url: str) -> None:
    with db.connect(url, application_name="test") as connection:
        register_all(connection, [Definition(each, None) for each in JOBS])
        attend(connection, Watcher("check:test"), {}, jobs.LOG)
        job_table.wanted(connection, [each.name for each in JOBS])
        learnt.known(connection, ["nobody"])
        runs.unreported(connection, ["nobody"])


def _changed(url: str) -> None:
    """A spec comes that nobody has seen."""
    minute = random.randrange(1, 60)
    spec = JobSpec(STEADY.name, STEADY.due, Schedule(f"{minute} * * * *"), _BOUNDS)
    with db.connect(url, application_name="test") as connection:
        register_all(connection, [Definition(each, None) for each in (spec, *JOBS[1:])])
        register_all(connection, [Definition(each, None) for each in JOBS])


def _new(url: str) -> None:
    spec = JobSpec(f"new{random.randrange(10**9)}", STEADY.due, _HOURLY, _BOUNDS)
    with db.connect(url, application_name="test") as connection:
        register_all(connection, [Definition(spec, None)])
        connection.execute("update gaffer.job set retired_at = gaffer.clock() where name = %s", [spec.name])


def _page(url: str) -> None:
    """The page of an asset in Dagster."""
    resource = GafferResource(dsn=url)
    with db.connect(url, application_name="test") as connection:
        found = [runs.history(connection, each.name, 1)[0] for each in JOBS]
    for record in found:
        metadata.look(resource, record, logging.getLogger("gaffer"))
        checks.look(resource, record.job, dg.AssetKey(record.job))


def _prune_few(url: str) -> None:
    """What is so old that only a few runs are."""
    (total,) = jobs.query(
        url, "select extract(epoch from gaffer.clock() - started_at) from gaffer.job_runs order by id limit 1"
    )[0]
    with db.connect(url, application_name="test") as connection:
        before = prune.before(connection, timedelta(seconds=float(total)) - timedelta(minutes=_FEW))
        counted = prune.runs(connection, before)
        action = prune.begin(connection, before, ANN)
        for job in counted:
            assert sum(prune.remove_runs(connection, action, job, before)) == counted[job]
        assert sum(alerts for alerts, _ in prune.remove_alerts(connection, action, before))


READERS: Mapping[str, Callable[[str], Any]] = {
    "a run": _steady,
    "a run that fails": _failing,
    "a run in a pause": _resting,
    "a run despite a pause": _despite,
    "a run of intervals": _redone,
    "runs of all slots": _queue,
    "a pass of the watch": _pass,
    "a spec that changes": _changed,
    "a job that is new": _new,
    "the page in Dagster": _page,
    **{
        f"gaffer {words}": _command(*words.split())
        for words in (
            "status",
            "status --json",
            "runs",
            "runs steady",
            "runs stopped",
            "check",
            "check --notify",
            "doctor",
            "metrics",
            "alerts list",
            "audit",
            "audit steady",
            "audit resting",
            "ticks steady",
            "ticks stopped",
            "items list queue",
            "watermark show steady",
            "prune --dry-run --older-than 36500d",
            "prune --yes --older-than 36500d",
        )
    },
    "gaffer prune of a few": _prune_few,
}


FEWEST = 1_000_000
"""Runs of the longer history, below which the planner reads small tables as a whole."""


def grows(small: Read, large: Read) -> bool:
    """An index may be a page or two higher where there is five times as much, and a walk down it so much longer."""
    return large.buffers > 1.25 * small.buffers + 40 or large.rows > 1.25 * small.rows + 40


def measured(url: str, readers: Mapping[str, Callable[[str], Any]] = READERS) -> dict[str, Read]:
    """What each reads. What it writes is there for those after it."""
    return {name: count(url, act) for name, act in readers.items()}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="./dev history", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=10_000_000, help=f"of the long one, {FEWEST:,} or more (10000000)")
    parser.add_argument("--url", help="of a server to make the two databases on; without it, a private one is started")
    given = parser.parse_args()
    if given.rows < FEWEST:
        parser.error(f"--rows {given.rows}: so few are read as a whole, since that is cheaper; {FEWEST:,} or more tell")
    print("the jobs of these histories fail, and are told of: what is printed of them is meant", flush=True)
    sizes = (given.rows // 5, given.rows)
    found: list[dict[str, Read]] = []
    with ExitStack() as stack:
        at = given.url or stack.enter_context(server(Path(stack.enter_context(TemporaryDirectory()))))
        for rows in sizes:
            with scratch_database(at) as url:
                took = fill(url, rows)
                size = jobs.query(url, "select pg_size_pretty(pg_database_size(current_database()))")[0][0]
                print(f"{rows:,} runs: {size}, filled in {took:.0f} s", flush=True)
                found.append(measured(url))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    print(f"\n{datetime.now(timezone.utc):%Y-%m-%d}, commit {commit.strip() or 'unknown'}\n")
    print(table(sizes, *found))
    return int(any(grows(small, found[1][name]) for name, small in found[0].items()))


def table(sizes: Sequence[int], small: Mapping[str, Read], large: Mapping[str, Read]) -> str:
    """In Markdown: what each read of the short history, and of the long one."""
    heads = ["who reads", *(f"{what} of {rows:,}" for what in ("buffers", "rows") for rows in sizes), "grows"]
    lines = [heads, ["---", *["--:"] * 4, "---"]]
    for name, one in small.items():
        other = large[name]
        figures = [f"{each:,}" for each in (one.buffers, other.buffers, one.rows, other.rows)]
        lines.append([name, *figures, "**yes**" if grows(one, other) else "no"])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
