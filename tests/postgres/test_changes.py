"""A job whose definition changes: nothing is replayed, nothing is lost, and a renamed one is told."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gaffer_dagster.domain import notice
from gaffer_dagster.domain.alert import Kind
from gaffer_dagster.domain.due import EachInterval
from gaffer_dagster.domain.run import Outcome
from gaffer_dagster.domain.spec import work_hash
from gaffer_dagster.engine.registry import Definition, register_all
from gaffer_dagster.errors import BadInputError, JobHeldError, LeaseLostError, RenamedJobError
from gaffer_dagster.store import db, operations
from gaffer_dagster.store.operations import Operator
from gaffer_dagster.testing import Clock
from tests.support import jobs, protocol, ticking, variants
from tests.support.ticking import ROWS, Ticking, at, invoke
from tests.support.warm import gaffer

ANN = Operator("ann", None)
FULL, HALF, DAILY = ticking.spec(), ticking.spec("30 * * * *"), ticking.spec("0 6 * * *")


@pytest.fixture
def job(url: str, clock: Clock) -> Ticking:
    made = Ticking(url, clock, FULL)
    assert made.run(0.01, 1).outcome is Outcome.SUCCEEDED
    return made


# ── cron and zone ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_change_while_nothing_is_open_goes_by_the_new_schedule_from_then_on(job: Ticking) -> None:
    job.register(0.75, HALF)
    assert job.due == 1.5
    record = job.run(2.51)
    assert record.ticks_covered == 2
    assert [hour for hour, *_ in job.ledger(until=3)] == [0, 1.5, 2.5]


def test_a_change_while_a_tick_is_open_leaves_it_due(job: Ticking) -> None:
    job.register(2.2, HALF)
    assert job.due == 1
    assert job.ledger(until=3) == [(0, "covered", 1), (1, "missed", None), (2, "missed", None), (2.5, "future", None)]
    assert job.run(2.51).ticks_covered == 3
    assert job.due == 3.5


def pause(job: Ticking, since: float, until: float) -> None:
    job.clock.set(at(since))
    with db.connect(job.url, application_name="test") as connection:
        operations.pause(connection, job.spec.name, at(until), None, ANN)


def test_a_change_after_a_pause_has_run_out_leaves_the_ticks_in_it_skipped(job: Ticking) -> None:
    """Of the new schedule's ticks since the pause none was ever in force; of the old one's, those that came are due."""
    pause(job, 0.5, 1.5)
    job.register(1.75, ticking.spec("45 * * * *"))
    assert job.due == 2.75
    pause(job, 2.2, 3.2)
    job.register(4.8, ticking.spec("10 * * * *"))
    assert job.due == 3.75


def test_a_finer_schedule_does_not_replay_the_past(job: Ticking) -> None:
    job.register(0.99, ticking.spec("* * * * *"))
    assert job.run(1.01).ticks_covered == 1


def test_another_zone_neither_replays_nor_loses(url: str, clock: Clock) -> None:
    job = Ticking(url, clock, DAILY)
    job.run(6.01)
    job.register(8, ticking.spec("0 6 * * *", zone="America/New_York"))
    assert job.due == 11
    assert job.run(11.01).ticks_covered == 1
    job.register(12, DAILY)
    assert job.due == 30
    assert [hour for hour, *_ in job.ledger(until=60)] == [6, 11, 30, 54]


def test_there_and_back_again(job: Ticking) -> None:
    """A, B, A, B, A: each of the schedules counts for its own time, in the ledger too."""
    for when, spec in ((1.2, HALF), (2.3, FULL), (3.4, HALF), (4.45, FULL)):
        job.register(when, spec)
        job.run(when + 0.01)
    assert [hour for hour, *_ in job.ledger(until=6)] == [0, 1, 1.5, 3, 3.5, 5, 6]
    assert {kind[:7] for kind in job.dispositions(until=4.45)} == {"covered"}
    assert job.due == 5
    assert job.run(5.01).ticks_covered == 1
    assert job.counted() == 6


def test_without_a_schedule_and_with_one_again(job: Ticking) -> None:
    job.register(0.2, ticking.JobSpec("job", ROWS))
    assert job.due is None
    job.register(3.2, FULL)
    assert job.due == 4
    assert [hour for hour, *_ in job.ledger(until=4)] == [0, 4]


@pytest.mark.parametrize("phase", [0, 1])
def test_versions_that_alternate_do_not_push_a_tick_away(job: Ticking, phase: int) -> None:
    """A tick of either leaves the job due, whichever is registered just then, and whatever is registered after that."""
    for minute in range(60):
        job.register(0.26 + minute / 60, [HALF, FULL][(minute + phase) % 2])
    assert [hour for hour, kind, _ in job.ledger(until=1.25) if kind == "missed"] == [0.5, 1]
    assert job.due == 0.5
    assert job.run(1.3).ticks_covered == 2
    assert jobs.query(job.url, "select count(*)::int from gaffer.job_spec") == [(61 - phase,)]


def test_versions_with_one_schedule_that_alternate_leave_no_trace_of_each_time(job: Ticking) -> None:
    smaller = ticking.spec(batch_rows=7)
    for minute in range(20):
        job.register(0.9 + minute / 60, [FULL, smaller][minute % 2])
    assert job.due == 1
    assert jobs.query(job.url, "select count(*)::int from gaffer.job_spec") == [(2,)]


@pytest.mark.parametrize("start", [at(0), None])
def test_intervals_of_another_grid_neither_repeat_nor_skip_time(url: str, clock: Clock, start: Any) -> None:
    due = EachInterval(settle="1s", start=start)
    job = Ticking(url, clock, ticking.spec(due=due))
    job.run(2.01)
    job.register(2.2, ticking.spec("15,45 * * * *", due=EachInterval(settle="1s")))
    job.run(3.3)
    job.register(4.2, ticking.spec("0 */3 * * *", due=EachInterval(settle="1s")))
    job.run(6.01)
    assert job.windows() == [0, 1, 2, 2.25, 2.75, 3.25]
    assert jobs.query(url, "select position from gaffer.job_watermark") == [({"until": at(6).isoformat()},)]


CHANGES: dict[str, tuple[str, dict[str, str], Callable[[Ticking], None]]] = {
    "each change of hash re-bases": (
        "register",
        {"when p_still_due_at <= v_now then": "when false then"},
        lambda job: test_versions_that_alternate_do_not_push_a_tick_away(job, 0),
    ),
    "a change leaves the old tick": (
        "register",
        {"                              else p_next_due_at end": "                              else next_due_at end"},
        test_a_change_while_nothing_is_open_goes_by_the_new_schedule_from_then_on,
    ),
    "a schedule that comes back is not kept": (
        "register",
        {"or v_job.spec -> 'schedule' is distinct from p_spec -> 'schedule'": ""},
        test_there_and_back_again,
    ),
    "every registration is kept": (
        "register",
        {"before.first_seen_at is null or v_job.spec -> 'schedule' is distinct from p_spec -> 'schedule'": "true"},
        test_versions_with_one_schedule_that_alternate_leave_no_trace_of_each_time,
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_broken_registration_would_be_caught(job: Ticking, name: str) -> None:
    function, replaced, test = CHANGES[name]
    variants.replace(job.url, function, replaced)
    with pytest.raises(AssertionError):
        test(job)


# ── names ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def define(name: str, work: Any = jobs.copy_rows) -> Definition:
    return Definition(ticking.spec(name=name), work_hash(ROWS, work))


def register(url: str, *names: str, **given: Any) -> list[str]:
    with db.connect(url, application_name="test") as connection:
        return register_all(connection, [define(name) for name in names], **given)


def rename(url: str, old: str, new: str) -> None:
    with db.connect(url, application_name="test") as connection:
        operations.rename(connection, old, new, ANN)


def run(url: str, name: str, **given: Any) -> Any:
    definition = define(name)
    return jobs.run(definition.spec, url, work_hash=definition.work_hash, known={name}, **given)


def names(url: str) -> list[str]:
    return [name for (name,) in jobs.query(url, "select name from gaffer.job order by name")]


@pytest.fixture
def old(url: str) -> str:
    jobs.make_source(url, 5)
    assert run(url, "old").items == 5
    return url


def test_a_renamed_job_is_refused_with_the_cure(old: str) -> None:
    for refused in (lambda: run(old, "new"), lambda: register(old, "new")):
        with pytest.raises(RenamedJobError, match=r'job "new" does the work of job "old".* gaffer rename old new'):
            refused()
    assert names(old) == ["old"]
    assert jobs.query(old, "select count(*)::int from gaffer.job_runs") == [(1,)]
    assert jobs.query(old, "select count(*)::int from target") == [(5,)]


def test_the_others_are_made_known_all_the_same(old: str) -> None:
    with pytest.raises(RenamedJobError, match='job "new" does'), db.connect(old, application_name="test") as connection:
        register_all(connection, [define("new"), define("zz", jobs.opened)])
    assert names(old) == ["old", "zz"]


def test_what_is_said_to_be_new_is_another_job(old: str) -> None:
    assert register(old, "new", new=["new"]) == ["new"]
    assert run(old, "new").items == 5
    assert run(old, "old").items == 0


def test_two_jobs_that_are_defined_together_may_do_the_same_work(old: str) -> None:
    assert register(old, "old", "twin") == ["twin"]
    assert register(old, "old", "twin") == []


def test_a_rename_keeps_watermark_fence_history_and_runs(old: str) -> None:
    state = """
        select l.fence, w.position, j.covered_until, j.first_seen_at, j.consecutive_failures,
               (select count(*) from gaffer.job_runs r where r.job = j.name),
               (select count(*) from gaffer.job_spec s where s.job = j.name)
          from gaffer.job j join gaffer.job_lease l on l.job = j.name join gaffer.job_watermark w on w.job = j.name
        """
    before = jobs.query(old, state)
    done = invoke(old, "rename", "old", "teams/new", "--by", "ann", "--reason", "a better name", "--yes")
    assert (done.exit_code, done.stdout) == (0, "old is called teams/new from now on\n"), done.stderr
    assert (names(old), jobs.query(old, state)) == (["teams/new"], before)
    assert jobs.query(old, "select job, action, by, reason, details from gaffer.operator_action") == [
        ("teams/new", "rename", "ann", "a better name", {"from": "old"})
    ]
    jobs.add_rows(old, 2)
    record = run(old, "teams/new")
    assert (record.items, record.fence) == (2, 2)


def test_old_code_is_refused_afterwards(old: str) -> None:
    rename(old, "old", "new")
    with pytest.raises(RenamedJobError, match=r'job "old" was renamed to "new": deploy'):
        run(old, "old")
    assert names(old) == ["new"]


def test_a_job_that_is_at_work_is_not_renamed(old: str) -> None:
    with protocol.session(old) as connection:
        attempt = protocol.acquire(connection, define("old").spec, owner="host:7:x")
        with pytest.raises(JobHeldError, match=r'job "old" is at work \(host:7:x\): wait'):
            rename(old, "old", "new")
        assert names(old) == ["old"]
        protocol.expire(old, "old")  # a dead one keeps nobody waiting, and can commit nothing
        rename(old, "old", "new")
        with pytest.raises(LeaseLostError):
            protocol.commit(connection, attempt.lease, protocol.begin(connection), since=None, until={"until": "x"})
        protocol.db.roll_back(connection)
        assert protocol.end(connection, attempt.lease).result == "lost_lease"
        assert jobs.query(old, "select lease_id from gaffer.job_lease") == [(None,)]


@pytest.mark.parametrize(
    ("new", "said"),
    [
        ("taken", "job 'taken' is known to this database already"),
        ("old", "job 'old' is called so already"),
        ("Upper", "job name 'Upper': use a-z"),
        ("", "job name '': use a-z"),
        ("-x", "job name '-x': use a-z"),
        ("a b", "job name 'a b'"),
        ("a\nb", "job name"),
        ("n" * 129, "at most 128"),
    ],
)
def test_a_name_that_cannot_be_is_refused(old: str, new: str, said: str) -> None:
    register(old, "old", "taken")
    with pytest.raises(BadInputError, match=said):
        rename(old, "old", new)
    assert names(old) == ["old", "taken"]


def test_a_rename_asks_first(old: str) -> None:
    done = invoke(old, "rename", "old", "new")
    assert done.exit_code == 1
    assert "Rename job old to new?" in done.stdout
    assert names(old) == ["old"]


def test_a_rename_that_would_not_be_told_is_caught(old: str) -> None:
    """The broken variant: no look at the work."""
    variants.replace(old, "register", {"where work_hash = p_work_hash and": "where false and"})
    assert run(old, "new").items == 5
    assert jobs.query(old, "select count(*)::int, count(distinct id)::int from target") == [(10, 5)]


MODULE = """
import gaffer_dagster as gd

@gd.gaffer_asset(due=gd.NewRows("source", "id"), schedule=gd.Schedule("0 6 * * *"), name="{name}")
def {function}(batch, limits=(1, "a")):
    "Copies."
    kept = [row["id"] for row in batch.rows if row["value"] in {{"a", "b", "c", "d", "v1"}}]
    batch.insert("target", [{{"id": each, "fence": batch.fence, "batch": 1}} for each in kept])
"""


def module(folder: Path, name: str) -> None:
    (folder / "defined.py").write_text(MODULE.format(name=name, function=name.replace("/", "_")))


def test_gaffer_register_makes_known_refuses_and_goes_on(url: str, tmp_path: Path) -> None:
    module(tmp_path, "first")
    done = gaffer(url, tmp_path, "register", "defined")
    assert (done.returncode, done.stdout) == (0, "first: made known\n"), done.stderr
    done = gaffer(url, tmp_path, "register", "-f", "defined.py")
    assert (done.returncode, done.stdout) == (0, "first: as it was\n"), done.stderr
    module(tmp_path, "second")
    done = gaffer(url, tmp_path, "register", "defined")
    assert (done.returncode, done.stdout) == (1, "")
    assert "gaffer rename first second" in done.stderr
    assert "gaffer register MODULE --new second" in done.stderr
    assert invoke(url, "rename", "first", "second", "--yes").exit_code == 0
    done = gaffer(url, tmp_path, "register", "defined")
    assert done.returncode == 0, done.stderr
    module(tmp_path, "third")
    done = gaffer(url, tmp_path, "register", "defined", "--new", "third")
    assert (done.returncode, done.stdout) == (0, "third: made known\n"), done.stderr
    assert names(url) == ["second", "third"]
    done = gaffer(url, tmp_path, "register", "defined", "--new", "fourth")
    assert (done.returncode, "--new 'fourth' is not defined there; there is third" in done.stderr) == (1, True)


HASH = """
from gaffer_dagster.domain.due import NewRows
from gaffer_dagster.domain.spec import work_hash

def made():
    def {name}(batch, size=3):
        "{doc}"
        inner = lambda row: row["kind"] in {{"a", "b", "c", "d", "e"}}
        return {constant} if inner(batch) else [each for each in (1, 2.5, None, "x")]
    return {name}

def outer(work):
    def wrapper(batch):
        return work(batch)
    return wrapper

print(work_hash(NewRows("source", "id"), made()), work_hash(NewRows("source", "id"), outer(made())))
"""


def hashes(seed: str, name: str = "work", doc: str = "Does it.", constant: int = 7) -> list[str]:
    program = HASH.format(name=name, doc=doc, constant=constant)
    environment = {"PYTHONHASHSEED": seed}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_work_is_known_by_what_it_does_in_every_process() -> None:
    first = hashes("1")
    assert len(set(first)) == 2
    assert all(len(each) == 16 for each in first)
    assert hashes("2") == hashes("3", name="renamed", doc="Says something else.") == first
    other = hashes("1", constant=8)
    assert not set(other) & set(first)  # also behind a decorator


def by_table(table: str) -> Any:
    def work(batch: Any, *, table: str = table, options: Any = {"to": table}) -> None:  # noqa: B006
        batch.execute(f"insert into {table} select 1", options)

    return work


def test_work_differs_by_what_it_was_made_with() -> None:
    hashes = [work_hash(ROWS, by_table(table)) for table in ("t1", "t2", "t1")]
    assert hashes[0] == hashes[2] != hashes[1]


def test_where_several_could_have_been_renamed_all_are_named(old: str) -> None:
    with db.connect(old, application_name="test") as connection:
        register_all(connection, [define("also"), define("old")])
        with pytest.raises(RenamedJobError, match=r'the work of job "also" and of job "old",.*gaffer rename OLD new'):
            register_all(connection, [define("new")])


def test_work_that_calls_itself_is_known_too() -> None:
    def recursive(batch: Any, depth: int = 0) -> Any:
        return other(batch, depth + 1)

    def other(batch: Any, depth: int) -> Any:
        return recursive(batch, depth) if depth < 3 else other

    assert work_hash(ROWS, recursive) != work_hash(ROWS, other)


def test_of_two_versions_that_take_turns_status_shows_who_ran_each(url: str) -> None:
    jobs.make_source(url, 3)
    one, other = jobs.spec(batch_rows=5), jobs.spec(batch_rows=7)
    assert "take" not in invoke(url, "status", "copy_rows").stdout
    jobs.run(one, url)
    jobs.run(other, url)
    assert "turns" not in invoke(url, "status", "copy_rows").stdout  # a deployment
    jobs.run(one, url)
    jobs.run(other, url)
    said = invoke(url, "status", "copy_rows").stdout
    assert "Two versions of it have taken turns within the last day; what is due is shared out between them." in said
    runs = dict(jobs.query(url, "select spec_hash, 'run ' || max(id) || ' at' from gaffer.job_runs group by 1"))
    assert sorted(runs) == sorted([one.hash, other.hash])
    for version, run in runs.items():
        (line,) = [each for each in said.splitlines() if f"version {version} (schedule 0 * * * *): {run}" in each]
        assert f"by {socket.gethostname()}:{os.getpid()}:" in line
    found = invoke(url, "check").stdout
    assert "take turns, and what is due is shared out between them" in found
    assert "give one of the two jobs another name" in notice.what_to_do(Kind.VERSIONS, "copy_rows", {})


def test_who_holds_a_lease_is_said_with_until_when(url: str, clock: Clock) -> None:
    with protocol.session(url) as connection:
        protocol.register(connection, jobs.spec())
        protocol.acquire(connection, jobs.spec())
    assert " (lease until 20" in invoke(url, "status", "copy_rows").stdout
    clock.advance("5m")
    assert " (lease over since 20" in invoke(url, "status", "copy_rows").stdout
