"""The one database in which the schedules of a case are played: made once, and set back before each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta, timezone

from psycopg import sql

from gaffer_dagster.domain.bounds import Bounds
from gaffer_dagster.engine.registry import Definition, registration_of
from gaffer_dagster.store import db, new_rows, prepare
from gaffer_dagster.store import jobs as job_table
from gaffer_dagster.testing import Clock
from gaffer_dagster.testing import invariants as any_job
from tests.support import faults, invariants, jobs, variants

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
_MOST_STOPS = 60  # of one runner in one schedule

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


class Database:
    """`variant`: the protocol that it has. `inside`: with the stops of `STOPS`. What `monitor` sends is nobody's step,
    and `ask` is a connection of the product's for questions of the same kind."""

    def __init__(self, url: str, *, variant: str, inside: bool) -> None:
        self.url = url
        self.variant = variants.VARIANTS[variant]
        self.inside = inside
        self._ahead = timedelta()
        self._resets = 0
        jobs.make_source(url, ROWS)
        invariants.watch(url)
        Clock(url)
        variants.install(url, variant)
        faults.settle(url)
        self.monitor = jobs.connect(url)
        self.monitor.execute("set synchronous_commit = off")
        self.ask = db.connect(url, application_name="explorer")
        job_table.register(self.ask, JOB, registration_of(Definition(JOB, None), ()))
        self.table = prepare.source(self.ask, "source", "id")
        self.horizon, self.cluster = new_rows.horizon(self.ask, JOB.name, None, None)
        self.ask.execute("insert into gaffer.testing_clock values ('0')")
        self.ask.execute(_MACHINERY)
        if inside:
            for function, places in STOPS.items():
                self._stop_in(function, places)
        columns = {of: self._columns(of) for of in ("gaffer.job", "gaffer.job_lease")}
        self._job, self._lease = columns["gaffer.job"], columns["gaffer.job_lease"]
        self._violations = {
            at_rest: " union all ".join(
                f"select '{name.replace(chr(39), chr(39) * 2)}' where exists ({query})"
                for name, query in {**invariants.INVARIANTS, **(any_job.AT_REST if at_rest else {})}.items()
            )
            for at_rest in (False, True)
        }

    def _columns(self, table: str) -> sql.Composed:
        """All that a schedule may change."""
        found = self.monitor.execute(
            "select attname from pg_attribute where attrelid = %s::regclass and attnum > 0"
            " and attname not in ('name', 'job', 'slot', 'fence')",
            [table],
        )
        return sql.SQL(", ").join(sql.Identifier(name) for (name,) in found)

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
        self.monitor.close()
        self.ask.close()

    # ── back to the beginning ────────────────────────────────────────────────────────────────────────────────────

    def reset(self) -> None:
        """Nothing has happened yet. With stops inside, each of them is locked."""
        self._ahead = timedelta()
        self._resets += 1
        self.monitor.execute(
            sql.SQL(
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
            ).format(
                rows=sql.Literal(ROWS),
                job=self._job,
                lease=self._lease,
                runners=sql.Literal(3 if self.inside else 0),
                stops=sql.Literal(_MOST_STOPS),
            )
        )
        if self._resets % 500 == 0:
            self.monitor.execute("vacuum gaffer.job, gaffer.job_runs, gaffer.job_lease, gaffer.job_watermark")
            self.monitor.execute("vacuum target, gaffer_testing.event, gaffer.testing_clock, source")

    def back_up(self) -> None:
        """What `restore` needs beside what `reset` does."""
        self._kept = self.monitor.execute(
            "select fence, (select last_value from gaffer.job_runs_id_seq),"
            " (select is_called from gaffer.job_runs_id_seq) from gaffer.job_lease"
        ).fetchone()

    def restore(self) -> None:
        """All that was committed since `back_up` is lost; nobody may be at work."""
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
                job=self._job,
                lease=self._lease,
                fence=sql.Literal(self._kept[0]),
                run=sql.Literal(self._kept[1]),
                called=sql.Literal(self._kept[2]),
            )
        )

    # ── in the middle of a schedule ──────────────────────────────────────────────────────────────────────────────

    def advance(self, by: timedelta) -> None:
        """Its clock."""
        self._ahead += by
        self.monitor.execute("update gaffer.testing_clock set ahead = %s", [self._ahead])

    def now(self) -> datetime:
        return datetime.now(timezone.utc) + self._ahead

    def look_at(self, pids: Sequence[int], others: Sequence[int]) -> dict[int | None, tuple[bool, int | None, bool]]:
        """Of each backend: whether it is there, at which stop it waits, and whether it waits for one of `others`."""
        return {
            pid: (is_there, stop, is_blocked)
            for pid, is_there, stop, is_blocked in self.monitor.execute(
                """
                select pid, exists (select from pg_stat_activity as a where a.pid = p.pid),
                       (select objid::integer from pg_locks as l
                         where l.pid = p.pid and not granted and locktype = 'advisory'),
                       pg_blocking_pids(pid) && %s::integer[]
                  from unnest(%s::integer[]) as p (pid)
                """,
                [others, pids],
            )
        }

    def lets_go(self, runner: int, stop: int) -> None:
        """Who waits at this stop goes on."""
        self.monitor.execute("select pg_advisory_unlock(%s, %s)", [runner, stop])

    def terminate(self, pids: Sequence[int | None]) -> None:
        self.monitor.execute("select pg_terminate_backend(pid) from unnest(%s::integer[]) as pid", [pids])

    def violations(self, *, at_rest: bool) -> list[str]:
        """What of tests/support/invariants.py does not hold; at rest also what need not while somebody works."""
        return [name for (name,) in self.monitor.execute(self._violations[at_rest].encode(), prepare=True)]
