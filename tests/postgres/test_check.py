"""`gaffer check`, `watch`, `alerts`, `retire`: from outside, whatever has become of Dagster."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest
from click.testing import CliRunner, Result

from gaffer_dagster.cli import main
from gaffer_dagster.domain.alert import Alerts
from gaffer_dagster.domain.due import EachInterval
from gaffer_dagster.domain.spec import JobSpec
from gaffer_dagster.engine import watch
from gaffer_dagster.store import db
from gaffer_dagster.testing import Clock
from tests.support import jobs, protocol, ticking, warm
from tests.support.receivers import HttpReceiver
from tests.support.ticking import HOUR, Ticking, at

Make = Callable[..., Ticking]
SECRET = "hunter2"


@pytest.fixture
def hourly(url: str, clock: Clock) -> Make:
    """An hourly job whose grace is half an hour; known since half past eleven the day before."""
    return lambda **given: Ticking(url, clock, ticking.spec(**given))


def gaffer(url: str, *words: str, **environment: str) -> Result:
    return CliRunner().invoke(main, list(words), env={"GAFFER_DATABASE_URL": url, **environment})


def told(url: str, *words: str, **environment: str) -> dict[str, Any]:
    done = gaffer(url, *words, "--json", **environment)
    assert done.exit_code in (0, 1), done.output
    return json.loads(done.stdout.splitlines()[-1])


def kinds(found: dict[str, Any]) -> list[tuple[str, str]]:
    return [(each["kind"], each["since"]) for each in found["findings"]]


# ── check ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_all_is_well_until_the_grace_is_over(hourly: Make) -> None:
    job = hourly()
    job.run(0.01, 3)
    job.clock.set(at(1.49))
    assert (gaffer(job.url, "check").exit_code, told(job.url, "check")["findings"]) == (0, [])
    job.clock.set(at(1.5))
    done = gaffer(job.url, "check")
    assert done.exit_code == 1
    assert "absence" in done.stdout
    assert "Nobody watches this database all the time" in done.stdout
    assert kinds(told(job.url, "check")) == [("absence", at(1.5).isoformat())]


def test_a_plain_check_leaves_no_trace(hourly: Make) -> None:
    job = hourly()
    job.clock.set(at(1.5))
    assert gaffer(job.url, "check").exit_code == 1
    assert jobs.query(job.url, "select from gaffer.watch union all select from gaffer.alert") == []


def test_warnings_are_said_and_are_no_failure(hourly: Make) -> None:
    job = hourly(alerts=Alerts(pause="1h"))
    job.gaffer("pause", "job", "--reason", "moving house")
    job.clock.advance(2 * HOUR)
    done = gaffer(job.url, "check")
    assert done.exit_code == 0
    assert "moving house" in done.stdout


@pytest.mark.parametrize("broken", ["away", "empty", "no job", "no rights", "unreadable"])
def test_it_says_so_when_it_cannot_tell(broken: str, url: str, empty_url: str, stranger: str) -> None:
    given = {
        "away": f"postgresql://somebody:{SECRET}@127.0.0.1:1/nothing",
        "empty": empty_url,
        "no job": url,
        "no rights": stranger,
        "unreadable": f"postgresql://somebody:{SECRET}@host:port/@@",
    }[broken]
    for words in (["check"], ["check", "--notify"], ["check", "--json"]):
        done = gaffer(given, *words)
        assert done.exit_code == 2, done.output
        assert "cannot tell" in done.stderr
        assert words[1:] != ["--json"] or json.loads(done.stdout)["error"]
        assert SECRET not in done.output
    assert "Traceback" not in done.output


def test_the_options_of_a_watch_need_a_pass(url: str) -> None:
    assert "add --notify" in gaffer(url, "check", "--every", "5m").output
    for words in (["--every", "often"], ["--every", "0s"], ["--every", "99999999d"], ["--name", "a\nb"]):
        assert gaffer(url, "check", "--notify", *words).exit_code == 2


def test_b98_each_watch_says_when_it_looked_last(hourly: Make) -> None:
    job = hourly()
    gaffer(job.url, "check", "--notify", "--every", "5m", "--name", "cron")
    with db.connect(job.url, application_name="test") as connection:
        watch.look(connection, watch.Watcher("dagster:location", timedelta(seconds=30), ["job"]))
    job.clock.advance(2 * HOUR)  # Dagster's daemon stands still, and nothing runs
    gaffer(job.url, "check", "--notify", "--every", "5m", "--name", "cron")
    job.clock.advance(timedelta(minutes=30))
    done = gaffer(job.url, "check", "--notify", "--every", "5m", "--name", "cron")
    assert done.exit_code == 1
    assert "dagster:location looked 2 hours 30 minutes ago" in done.stdout
    assert "absence" in done.stdout
    assert [kind for kind, _ in kinds(told(job.url, "check"))] == ["absence", "watch"]


# ── a pass ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_pass_tells_a_receiver_once_and_again_when_it_is_over(hourly: Make) -> None:
    job = hourly(alerts=Alerts(receivers=["oncall"]))
    with HttpReceiver() as receiver:
        given = {"GAFFER_RECEIVER_ONCALL": receiver.url, "GAFFER_RECEIVER_ONCALL_PRIVATE": "1"}
        job.clock.set(at(0.4))
        assert told(job.url, "check", "--notify", **given)["sent"] == 0
        job.clock.set(at(0.6))
        for _ in range(3):
            assert gaffer(job.url, "check", "--notify", **given).exit_code == 1
        job.run(0.7, 2)
        for _ in range(3):
            assert gaffer(job.url, "check", "--notify", **given).exit_code == 0
        assert [each["event"] for each in receiver.messages] == ["opened", "resolved"]
        assert [each["since_at"] for each in receiver.messages] == 2 * [at(0.5).isoformat()]


def receivers_told(url: str) -> list[str]:
    delivered = "select receiver from gaffer.alert_delivery where delivered_at is not null"
    return [name for (name,) in jobs.query(url, delivered)]


def test_a_receiver_that_nobody_knows_is_named_and_the_log_told(hourly: Make) -> None:
    job = hourly(alerts=Alerts(receivers=["oncall"]))
    job.clock.set(at(1.6))
    done = gaffer(job.url, "check", "--notify")
    assert done.exit_code == 1
    assert "GAFFER_RECEIVER_ONCALL" in done.stderr
    assert told(job.url, "check", "--notify")["problems"] != []
    assert receivers_told(job.url) == ["log"]


def test_a_receiver_that_is_misspelt_keeps_nobody_else_from_being_told(hourly: Make) -> None:
    job = hourly()
    job.clock.set(at(1.6))
    done = gaffer(job.url, "check", "--notify", GAFFER_RECEIVER_ONCALL=f"htps//x:{SECRET}@nowhere")
    assert done.exit_code == 1
    assert "GAFFER_RECEIVER_ONCALL" in done.stderr
    assert SECRET not in done.output
    assert receivers_told(job.url) == ["log"]


def test_heartbeats_follow_a_pass_and_each_success(hourly: Make) -> None:
    job = hourly(alerts=Alerts(heartbeat="NIGHTLY_PING"))
    with HttpReceiver() as outside:
        given = {
            "GAFFER_HEARTBEAT_URL": f"{outside.url}/watch",
            "GAFFER_HEARTBEAT_URL_PRIVATE": "1",
            "NIGHTLY_PING": f"{outside.url}/nightly",
            "NIGHTLY_PING_PRIVATE": "1",
        }
        gaffer(job.url, "check", "--notify", **given)
        assert outside.paths == ["/watch"]
        job.run(0.1, 1)
        for _ in range(2):
            gaffer(job.url, "check", "--notify", **given)
        assert outside.paths == ["/watch", "/nightly", "/watch", "/watch"]
        assert gaffer("postgresql://nobody@127.0.0.1:1/x", "check", "--notify", **given).exit_code == 2
        assert outside.paths == ["/watch", "/nightly", "/watch", "/watch"]


def test_a_job_that_a_newer_version_wrote_silences_no_other(hourly: Make) -> None:
    job = hourly()
    job.register(-0.4, ticking.spec(name="other"))
    jobs.execute(job.url, "update gaffer.job set spec = jsonb_set(spec, '{alerts,telepathy}', '1') where name = 'job'")
    job.clock.set(at(1.6))
    done = gaffer(job.url, "check", "--notify")
    assert done.exit_code == 1
    assert "job 'job' cannot be judged here" in done.stderr
    assert jobs.query(job.url, "select job from gaffer.alert") == [("other",)]


# ── the loop ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_loop_looks_again_and_again_until_a_signal(hourly: Make, number: signal.Signals) -> None:
    job = hourly()
    job.clock.set(at(1.6))
    process = subprocess.Popen(
        warm.command("watch", "--every", "1s", "--name", "here", "--json"),
        env={**os.environ, "GAFFER_DATABASE_URL": job.url},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        thrice = "select from gaffer.watch where name = 'watch:here' and passes >= 3"
        protocol.until(lambda: jobs.query(job.url, thrice))
    finally:
        process.send_signal(number)
    lines = process.communicate(timeout=30)[1].splitlines()
    assert process.returncode == 128 + number
    said = [json.loads(line) for line in lines if line.startswith("{")]
    assert sum(each["event"] == "looked" for each in said) >= 2
    assert jobs.query(job.url, "select kind from gaffer.alert") == [("absence",)]


def test_the_loop_outlives_the_database(url: str, hourly: Make) -> None:
    job = hourly()
    process = subprocess.Popen(
        warm.command("watch", "--every", "1s", "--name", "here"),
        env={**os.environ, "GAFFER_DATABASE_URL": job.url},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        protocol.until(lambda: jobs.query(url, "select 1 from gaffer.watch"))
        jobs.execute(url, "alter schema gaffer rename to elsewhere")
        time.sleep(2.5)
        jobs.execute(url, "alter schema elsewhere rename to gaffer")
        before = jobs.query(url, "select passes from gaffer.watch")[0][0]
        protocol.until(lambda: jobs.query(url, "select 1 from gaffer.watch where passes > %s", before))
        assert process.poll() is None
    finally:
        process.terminate()
    assert "cannot tell" in process.communicate(timeout=30)[1]


# ── incidents ────────────────────────────────────────────────────────────────────────────────────────────────────────


def overdue(job: Ticking, hours: float = 1.6) -> int:
    """The number of the incident that is open then."""
    job.clock.set(at(hours))
    gaffer(job.url, "check", "--notify")
    return jobs.query(job.url, "select id from gaffer.alert where resolved_at is null")[0][0]


def listed(url: str, *words: str) -> list[dict[str, Any]]:
    done = gaffer(url, "alerts", "list", "--json", *words)
    assert done.exit_code == 0, done.output
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_incidents_are_listed_and_remembered(hourly: Make) -> None:
    job = hourly()
    assert "No incident is open" in gaffer(job.url, "alerts", "list").stdout
    number = overdue(job)
    assert [(each["id"], each["job"], each["kind"]) for each in listed(job.url)] == [(number, "job", "absence")]
    assert "open" in gaffer(job.url, "alerts", "list").stdout
    job.run(1.7, 1)
    gaffer(job.url, "check", "--notify")
    assert listed(job.url) == []
    assert [each["id"] for each in listed(job.url, "--all")] == [number]
    assert "resolved" in gaffer(job.url, "alerts", "list", "--all").stdout


def test_who_knows_of_an_incident_is_not_reminded(hourly: Make) -> None:
    job = hourly(alerts=Alerts(remind="2h"))
    number = overdue(job)
    done = gaffer(job.url, "alerts", "ack", str(number), "--by", "ada", "--reason", "the source is late")
    assert done.exit_code == 0, done.output
    assert "known to ada: the source is late" in gaffer(job.url, "alerts", "list").stdout
    overdue(job, 4.5)
    assert listed(job.url)[0]["reminders"] == 0
    assert "no incident 4711 is open" in gaffer(job.url, "alerts", "ack", "4711").stderr
    assert jobs.query(job.url, "select by, reason from gaffer.operator_action where action = 'ack'") == [
        ("ada", "the source is late")
    ]


def test_nobody_knows_and_it_is_said_again_with_true_numbers(hourly: Make, caplog: pytest.LogCaptureFixture) -> None:
    job = hourly(alerts=Alerts(remind="90m", failures=2))
    for hour in range(2):
        job.run(hour + 0.01, 1, fails=True)
    gaffer(job.url, "check", "--notify")
    for hour in range(2, 5):
        job.run(hour + 0.01, fails=True)
        gaffer(job.url, "check", "--notify")
    assert "job (reminder 1): 4 ticks in a row failed" in caplog.text
    (failures,) = (each for each in listed(job.url) if each["kind"] == "failures")
    assert (failures["reminders"], failures["details"]["failures"]) == (1, 5)
    job.run(5.01)
    gaffer(job.url, "check", "--notify")
    (over,) = (each for each in listed(job.url, "--all") if each["kind"] == "failures")
    assert (over["details"]["failures"], over["details"]["over"]) == (5, "recovered")


def test_a_muted_job_is_told_of_when_the_mute_is_over(hourly: Make) -> None:
    job = hourly()
    assert gaffer(job.url, "alerts", "mute", "job", "--until", "3h", "--by", "ada").exit_code == 0
    with HttpReceiver() as receiver:
        given = {"GAFFER_RECEIVER_X": receiver.url, "GAFFER_RECEIVER_X_PRIVATE": "1"}
        job.clock.set(at(1.6))
        assert gaffer(job.url, "check", "--notify", **given).exit_code == 1
        assert receiver.messages == []
        assert len(listed(job.url)) == 1
        assert "open, muted until" in gaffer(job.url, "alerts", "list").stdout
        assert "muted until" in gaffer(job.url, "status").stdout
        assert gaffer(job.url, "alerts", "unmute", "job").exit_code == 0
        gaffer(job.url, "check", "--notify", **given)
        assert [each["event"] for each in receiver.messages] == ["opened"]
    for words in (["--until", "yesterday"], ["--until", "-5m"], ["--until", "2001-01-01"], ["--until", "32d"], []):
        assert gaffer(job.url, "alerts", "mute", "job", *words).exit_code in (1, 2)
    assert "no job 'nobody'" in gaffer(job.url, "alerts", "mute", "nobody", "--until", "1h").stderr


def test_a_test_message_goes_to_whom_it_is_asked_for(url: str) -> None:
    with HttpReceiver() as receiver:
        given = {"GAFFER_RECEIVER_ONCALL": receiver.url, "GAFFER_RECEIVER_ONCALL_PRIVATE": "1"}
        done = gaffer(url, "alerts", "test", "oncall", **given)
        assert (done.exit_code, len(receiver.messages)) == (0, 1), done.output
        receiver.answers = [500]
        done = gaffer(url, "alerts", "test", **given)
        assert done.exit_code == 1
        assert "log: sent" in done.stdout
        assert "oncall" in done.stderr
        assert "500" in done.stderr
    assert "GAFFER_RECEIVER_NOBODY" in gaffer(url, "alerts", "test", "nobody").stderr


def test_a_retired_job_is_missed_no_more_and_comes_back_with_its_code(hourly: Make) -> None:
    job = hourly()
    overdue(job)
    done = gaffer(job.url, "retire", "job", "--yes", "--reason", "done with it")
    assert done.exit_code == 0, done.output
    assert gaffer(job.url, "check").exit_code == 2  # no job is left that it could tell anything of
    assert "retired" in gaffer(job.url, "status").stdout
    with db.connect(job.url, application_name="test") as connection:
        watch.look(connection, watch.Watcher("dagster:other"))
    (alert,) = listed(job.url, "--all")
    assert (alert["resolved_at"] is not None, alert["details"]["over"]) == (True, "retired")
    job.register(3.0, job.spec)
    assert gaffer(job.url, "check").exit_code == 0, "it was not missed while it was retired"
    assert told(job.url, "audit", "job", "--limit", "1")["action"] == "unretire"
    overdue(job, 4.5)
    assert [each["kind"] for each in told(job.url, "check")["findings"]] == ["absence"]


def test_a_job_that_is_still_defined_is_not_retired(hourly: Make) -> None:
    job = hourly()
    with db.connect(job.url, application_name="test") as connection:
        watch.look(connection, watch.Watcher("dagster:here", timedelta(seconds=30), ["job"]))
    done = gaffer(job.url, "retire", "job", "--yes")
    assert done.exit_code == 1
    assert "dagster:here" in done.stderr
    assert "no job and no watch" in gaffer(job.url, "retire", "nobody", "--yes").stderr


def test_a_watch_that_is_switched_off_for_good_is_retired(hourly: Make) -> None:
    job = hourly()
    with db.connect(job.url, application_name="test") as connection:
        watch.look(connection, watch.Watcher("dagster:old", timedelta(seconds=30)))
    job.clock.advance(timedelta(minutes=10))
    overdue(job, 0.2)
    assert [each["watch"] for each in listed(job.url)] == ["dagster:old"]
    assert gaffer(job.url, "retire", "dagster:old", "--yes").exit_code == 0
    gaffer(job.url, "check", "--notify")
    assert listed(job.url) == []


def test_green_but_idle_speaks(url: str, clock: Clock) -> None:
    """Runs succeed and do nothing, since a transaction that stays open elsewhere holds every new row back."""
    job = Ticking(url, clock, ticking.spec(alerts=Alerts(stalled="90m")))
    job.run(0.01, 1)
    with jobs.connect(url) as forgotten:
        forgotten.execute("begin; create table never_finished ()")
        assert [str(job.run(hour + 0.01, 1).outcome) for hour in (1, 2, 3)] == 3 * ["succeeded"]
        (found,) = told(url, "check")["findings"]
        assert found["kind"] == "stalled"
        started = jobs.query(url, "select started_at from gaffer.job_runs order by id offset 1 limit 1")[0][0]
        assert datetime.fromisoformat(found["since"]) == started + timedelta(minutes=90)
        assert f"backend {forgotten.info.backend_pid}" in found["details"]["held_by"]
        forgotten.execute("rollback")
    job.run(4.01)
    assert told(url, "check")["findings"] == []


def test_intervals_left_for_too_long_are_dated_by_the_oldest(url: str, clock: Clock) -> None:
    due = EachInterval(settle="1s", start=at(0))
    spec: JobSpec = ticking.spec(due=due, batches=1, alerts=Alerts("5h", backlog="2h"))
    job = Ticking(url, clock, spec)
    job.run(5.01)  # five hours are due, and one of them is done
    (found,) = told(url, "check")["findings"]
    assert (found["kind"], found["since"]) == ("backlog", (at(2) + 2 * HOUR + timedelta(seconds=1)).isoformat())
