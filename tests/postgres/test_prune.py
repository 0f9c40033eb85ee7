"""`gaffer prune`: old history goes, and nobody who reads what is left can tell."""

from __future__ import annotations

import json
import random
from datetime import timedelta
from typing import Any

import pytest

from gaffer_dagster.store import db, learnt, prune, runs
from gaffer_dagster.store.operations import Operator
from gaffer_dagster.testing import Clock
from tests.support import jobs, ticking, variants
from tests.support.ticking import Ticking, at

ANN = Operator("ann", None)


def said(url: str) -> list[Any]:
    """What the commands say of jobs and of incidents that are open, but for when they were asked."""
    told: list[Any] = []
    for words in (["status"], ["check"], ["metrics"], ["alerts", "list"]):
        done = ticking.invoke(url, *words, "--json")
        assert done.exit_code in (0, 1), done.output
        for line in map(json.loads, done.stdout.splitlines()):
            for part in ("pruned_until", "seen_at", "at"):
                line.pop(part, None)
            if "written_timestamp" not in line.get("name", ""):
                told.append(line)
    return told


def pruned(url: str, *words: str) -> str:
    done = ticking.invoke(url, "prune", "--yes", "--by", "ann", *words)
    assert done.exit_code == 0, done.output
    return done.stdout


def count(url: str, table: str = "job_runs") -> int:
    return jobs.query(url, f"select count(*) from gaffer.{table}")[0][0]


def add_idle(url: str, number: int, days_ago: float, *, job: str = "job", outcome: str = "busy") -> None:
    """Runs that did nothing, that long before the database's time."""
    jobs.execute(
        url,
        "insert into gaffer.job_runs (job, slot, owner, trigger, spec_hash, started_at, ended_at, outcome)"
        " select %s, 0, 'x', 'command', 'x', t, t, %s from generate_series(1, %s),"
        " (select gaffer.clock() - %s * interval '1 day') as at (t)",
        job, outcome, number, days_ago,
    )  # fmt: skip


@pytest.fixture
def job(url: str, clock: Clock) -> Ticking:
    return Ticking(url, clock, ticking.spec())


# ── what stays ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("seed", range(3))
def test_within_what_is_kept_everybody_is_told_the_same(url: str, clock: Clock, seed: int) -> None:
    """Four days of an hourly job, with failures, pauses, gaps and runs by hand; a day and a half is kept."""
    rng = random.Random(seed)
    job = Ticking(url, clock, ticking.spec())
    for hour in range(96):
        what = rng.choice(["run"] * 8 + ["fail", "pause", "nothing", "manual"])
        if what == "pause":
            clock.set(at(hour + 0.01))
            job.gaffer("pause", "job", "--until", "3h")
        elif what != "nothing":
            given = {"trigger": "manual"} if what == "manual" else {}
            job.run(hour + 0.01, rng.choice([0, 1]), fails=what == "fail", **given)
    clock.set(at(96.2))
    add_idle(url, 101, 0)  # else the newest hundred would be all there is
    before, total, ledger = said(url), count(url), job.ledger(60.3, 99)
    print(f"seed {seed}: {total} runs, {len(ledger)} ticks")
    pruned(url, "--older-than", "36h")
    print(f"{count(url)} are left")
    assert 101 + 20 < count(url) < total - 20
    assert said(url) == before
    assert job.ledger(60.3, 99) == ledger
    # What is not known any more is not told, and not called missed.
    (until,) = jobs.query(url, "select pruned_until from gaffer.job")[0]
    done = ticking.invoke(url, "ticks", "job", "--json", f"--since={at(-0.5)}", f"--until={at(99)}")
    assert f"{until:%Y-%m-%d %H:%M}" in done.stderr
    assert json.loads(done.stdout.splitlines()[0])["tick"] > until.isoformat()
    assert pruned(url, "--older-than", "36h").endswith("0 runs and 0 incidents can be removed\n")


def test_without_the_mark_ticks_that_were_covered_would_be_called_missed(job: Ticking) -> None:
    for hour in range(30):
        job.run(hour + 0.01)
    add_idle(job.url, 100, 0)
    job.clock.set(at(24 * 5))
    ledger = [each for each in job.ledger(-0.5, 20) if each[1] == "covered"]
    pruned(job.url, "--older-than", "2d")
    assert not any(each[1] == "missed" for each in job.ledger(-0.5, 20))
    jobs.execute(job.url, "update gaffer.job set pruned_until = null")
    assert [each[0] for each in job.ledger(-0.5, 20) if each[1] != "covered"] != []
    assert len(ledger) == 21


_AT_WORK = "select count(*) from gaffer.job_runs where outcome = 'running'"
_BLIND = {
    "r.outcome <> 'running' and r.id <> all (v_kept)": "true",
    "r.ended_at < v_before": "true",
    "(r.ended_at, r.id) >": "(coalesce(r.ended_at, r.started_at), r.id) >",
}


def test_a_run_at_work_is_never_touched(job: Ticking) -> None:
    jobs.execute(job.url, "select gaffer.acquire('job', 0, gen_random_uuid())")
    add_idle(job.url, 150, 0)
    job.clock.set(at(24 * 400))
    assert "50 runs" in pruned(job.url, "--older-than", "1d")
    assert jobs.query(job.url, _AT_WORK) == [(1,)]
    variants.replace(job.url, "prunable_runs", _BLIND)
    variants.replace(job.url, "prune_runs", {" and outcome <> 'running' for update": " for update"})
    pruned(job.url, "--older-than", "1d")
    assert jobs.query(job.url, _AT_WORK) == [(0,)]  # so it would have been seen


def test_how_the_run_before_ended_is_known_however_long_ago_it_was(job: Ticking) -> None:
    job.run(0.01, 3)
    jobs.execute(job.url, "update gaffer.job_runs set outcome = 'abandoned'")
    job.clock.set(at(24 * 400))
    add_idle(job.url, 150, 399)
    pruned(job.url)
    assert count(job.url) == 101
    before = json.loads(ticking.invoke(job.url, "status", "--json").stdout)
    assert before["last_outcome"] == "abandoned"
    with (
        db.connect(job.url, application_name="test") as connection,
        jobs.opened(job.spec, job.url, worker_clock=job.clock.now) as opened,
    ):
        assert runs.ended_badly(connection, opened._holding.lease)
    variants.replace(job.url, "prunable_runs", {"r.id <> all (v_kept)": "true"})
    add_idle(job.url, 101, 0)
    pruned(job.url)
    assert jobs.query(job.url, "select count(*) from gaffer.job_runs where outcome = 'abandoned'") == [(0,)]


def test_everything_since_the_oldest_open_incident_stays(job: Ticking) -> None:
    add_idle(job.url, 10, 300)
    add_idle(job.url, 10, 200)
    add_idle(job.url, 100, 0)
    jobs.execute(
        job.url,
        "insert into gaffer.alert (job, kind, severity, since_at, opened_at, details)"
        " select 'job', 'failures', 'error', t, t, '{}' from (select gaffer.clock() - interval '250 days') at (t)",
    )
    assert "removed: 10 runs" in pruned(job.url)
    jobs.execute(job.url, "update gaffer.alert set resolved_at = gaffer.clock()")
    assert "removed: 10 runs" in pruned(job.url)
    assert count(job.url) == 100


def test_incidents_go_with_their_notices_once_each_was_taken(job: Ticking) -> None:
    insert = (
        "insert into gaffer.alert (job, kind, severity, since_at, opened_at, resolved_at, details)"
        " select 'job', 'failures', 'error', t, t, case when %s then t end, '{}'"
        " from (select gaffer.clock() - %s * interval '1 day') at (t) returning id"
    )
    old, untold, recent, is_open = (
        jobs.query(job.url, insert, over, days)[0][0]
        for over, days in ((True, 100), (True, 100), (True, 10), (False, 100))
    )
    jobs.execute(job.url, "insert into gaffer.receiver values ('log', gaffer.clock(), gaffer.clock())")
    for alert, taken in ((old, True), (old, True), (untold, True), (untold, False), (recent, True)):
        jobs.execute(
            job.url,
            "insert into gaffer.alert_delivery (alert, notice, number, receiver, created_at, next_attempt_at,"
            " delivered_at) select %s, 'reminded', count(*), 'log', gaffer.clock(), gaffer.clock(),"
            " case when %s then gaffer.clock() end from gaffer.alert_delivery",
            alert, taken,
        )  # fmt: skip
    assert "0 runs and 1 incident can be removed" in pruned(job.url, "--dry-run")
    assert count(job.url, "alert") == 4
    pruned(job.url)
    assert jobs.query(job.url, "select id from gaffer.alert order by id") == [(untold,), (recent,), (is_open,)]
    assert jobs.query(job.url, "select distinct alert from gaffer.alert_delivery order by 1") == [(untold,), (recent,)]
    (told,) = jobs.query(job.url, "select details from gaffer.operator_action where action = 'prune'")
    assert {**told[0], "before": None} == {"before": None, "runs": 0, "alerts": 1, "deliveries": 2}


def test_a_run_whose_row_is_gone_is_not_learnt_anew(job: Ticking) -> None:
    job.run(0.01, 1, dagster_run_id="it")
    job.run(1.01, 1)
    add_idle(job.url, 100, 0)
    job.clock.set(at(24 * 400))
    pruned(job.url)
    dead = learnt.Dead("job", "it", "schedule", at(0), at(0.01), at(24 * 399), "x", "Dagster found it dead")
    with db.connect(job.url, application_name="test") as connection:
        assert learnt.known(connection, ["it"]) == set()
        assert learnt.learn(connection, dead) is None
        later = learnt.Dead("job", "other", "schedule", at(24 * 399), at(24 * 399), at(24 * 399), "x", "killed")
        assert learnt.learn(connection, later) in ("counted", "recorded")
        variants.replace(job.url, "learn_run", {" or v_started_at <= v_job.pruned_until": ""})
        assert learnt.learn(connection, dead) in ("counted", "recorded")


# ── how it is done ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_dry_run_says_it_and_removes_nothing(job: Ticking) -> None:
    add_idle(job.url, 120, 100)
    add_idle(job.url, 40, 50)
    out = pruned(job.url, "--dry-run", "--older-than", "60d")
    assert "job: 60 runs of before " in out
    assert out.endswith("60 runs and 0 incidents can be removed\n")
    assert count(job.url) == 160
    assert count(job.url, "operator_action") == 0


def test_it_goes_on_where_it_was_killed_and_waits_for_nobody(job: Ticking) -> None:
    add_idle(job.url, 3_200, 100)
    with db.connect(job.url, application_name="test") as connection:
        before = prune.before(connection, timedelta(days=90))
        pages = prune.remove_runs(connection, prune.begin(connection, before, ANN), "job", before)
        assert next(pages) == 1_000
        connection.close()  # it is killed
    assert count(job.url) == 2_200
    with jobs.connect(job.url) as other, other.transaction():
        locked = jobs.query(job.url, "select min(id) from gaffer.job_runs")[0][0]
        other.execute("update gaffer.job_runs set reported_at = now() where id = %s", [locked])
        pruned(job.url)
        assert count(job.url) == 101
    assert "job: 1 run removed" in pruned(job.url)
    told = jobs.query(job.url, "select details -> 'runs' from gaffer.operator_action order by id")
    assert told == [(1_000,), (2_099,), (1,)]


def test_too_short_an_age_is_refused(job: Ticking) -> None:
    for given in ("1h", "-3d", "soon", "40000d"):
        done = ticking.invoke(job.url, "prune", "--older-than", given, "--yes")
        assert (done.exit_code, "--older-than" in done.stderr) == (1, True), done.output
