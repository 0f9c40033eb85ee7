"""`gaffer metrics` and its views: what Prometheus reads of jobs in each state, and that deploy/ reads nothing else."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import click
import psycopg
import pytest
from click.testing import Result
from prometheus_client.parser import text_string_to_metric_families

from gaffer_dagster import __version__
from gaffer_dagster.cli import alerts as cli_alerts
from gaffer_dagster.cli import main
from gaffer_dagster.cli import metrics as command
from gaffer_dagster.domain.alert import Alerts, Kind
from gaffer_dagster.domain.ledger import Pause, open_tick
from gaffer_dagster.domain.schedule import Schedule
from gaffer_dagster.domain.spec import JobSpec
from gaffer_dagster.engine.registry import Definition, register_all
from gaffer_dagster.engine.watch import Watcher, look
from gaffer_dagster.store import alerts, db, migrate, operations
from gaffer_dagster.store.operations import Operator
from gaffer_dagster.testing import Clock
from tests.support import deployed, jobs, protocol, roles, ticking
from tests.support.ticking import HOUR, MINUTE, ROWS, at, spec

LONGEST = "a" * 128
ODD = "0/odd.name-of_a/job"
WATCH = 'a "watch"\\ of\nmine'
SPECS = {
    "never_run": spec("0 0 * * *", name="never_run"),
    "succeeded": spec(name="succeeded"),
    "failing": spec(name="failing"),
    "capped": spec(name="capped", batches=1, batch_rows=1, alerts=Alerts(backlog="1h")),
    "paused": spec(name="paused"),
    "overdue": spec(name="overdue", alerts=Alerts("10m")),
    "taken_over": spec(name="taken_over"),
    "at_work": spec(name="at_work"),
    "muted": spec(name="muted"),
    "retired": spec(name="retired"),
    "no_schedule": JobSpec("no_schedule", ROWS),
    ODD: spec(name=ODD),
    LONGEST: spec("0 0 29 2 *", name=LONGEST),
}


@dataclass
class Printed:
    """What `gaffer metrics` printed. Refuses a text that a strict reader would not take."""

    text: str
    values: dict[str, dict[frozenset[tuple[str, str]], float]] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for family in text_string_to_metric_families(self.text):
            assert family.name not in self.types, f"two families {family.name}"
            assert family.documentation
            self.types[family.name] = family.type
            for sample in family.samples:
                assert re.fullmatch(r"gaffer_[a-z_]+", sample.name)
                assert sample.name.endswith("_total") == (family.type == "counter")
                assert sample.timestamp is None
                # Prometheus has labels of these names of its own, and renames ours.
                assert not deployed.ADDED & set(sample.labels)
                series = self.values.setdefault(sample.name, {})
                key = frozenset(sample.labels.items())
                assert key not in series, f"twice: {sample}"
                series[key] = sample.value

    def of(self, name: str, **labels: str) -> float | None:
        """The value of the one series with these labels; None: there is none."""
        found = [value for key, value in self.values.get(name, {}).items() if labels.items() <= set(key)]
        assert len(found) <= 1, f"{name} {labels}: {found}"
        return found[0] if found else None

    def of_job(self, name: str, job: str) -> float | None:
        return self.of(f"gaffer_job_{name}", job_name=job)

    def labels(self) -> Mapping[str, set[str]]:
        return {name: {label for key in series for label, _ in key} for name, series in self.values.items()}


def printed(url: str) -> Printed:
    done = ticking.invoke(url, "metrics")
    assert done.exit_code == 0, done.output
    return Printed(done.stdout)


def make_known(url: str, clock: Clock, *specs: JobSpec) -> None:
    with db.connect(url, application_name="test") as connection:
        register_all(connection, [Definition(each, None) for each in specs], worker_clock=clock.now)


def pass_over(url: str, watch: str = "dagster", every: timedelta | None = 2 * HOUR) -> None:
    with db.connect(url, application_name="test") as connection:
        assert look(connection, Watcher(watch, every, sorted(SPECS))) is not None


@pytest.fixture
def states(url: str, clock: Clock) -> Printed:
    """At 03:20, with ticks at every hour since 00:00."""
    jobs.make_source(url, 5)
    clock.set(at(-0.5))
    make_known(url, clock, *SPECS.values())
    operator = Operator("me", None)
    with db.connect(url, application_name="test") as connection:
        operations.pause(connection, "paused", None, None, operator)
    jobs.execute(url, "select gaffer.mute('muted', %s, 'me', null)", at(48))
    jobs.execute(url, "select gaffer.retire('retired', 'me', null)")
    pass_over(url)
    for hour in (0, 1, 2, 3):
        clock.set(at(hour) + MINUTE)
        pass_over(url)
        for name in ("succeeded", "failing", "capped", ODD):
            with suppress(ticking.BrokenError):
                work = _break if name == "failing" else jobs.copy_rows
                jobs.run(SPECS[name], url, work, trigger="schedule", worker_clock=clock.now)
    with protocol.session(url) as connection:
        for name in ("taken_over", "at_work"):
            dead = protocol.acquire(connection, SPECS[name], tick=at(3))
        protocol.expire(url, "taken_over")
        clock.set(at(3) + 11 * MINUTE)
        taken = protocol.acquire(connection, SPECS["taken_over"], tick=at(3), owner="host:2:owner")
        assert dead.grant.fence == 1
        clock.set(at(3) + 20 * MINUTE)
        protocol.end(connection, taken.lease)
    jobs.execute(
        url,
        "insert into gaffer.receiver (name, first_seen_at, last_seen_at, failing_since)"
        " select name, gaffer.clock(), gaffer.clock(), case when name = 'oncall' then gaffer.clock() end"
        "   from unnest(array['log', 'oncall']) as name",
    )
    pass_over(url)
    pass_over(url, WATCH, None)
    jobs.execute(
        url,
        "insert into gaffer.alert_delivery (alert, notice, number, receiver, created_at, next_attempt_at, delivered_at)"
        " select id, 'opened', 0, receiver, gaffer.clock(), gaffer.clock(),"
        "        case when receiver = 'log' then gaffer.clock() end"
        "   from gaffer.alert, unnest(array['log', 'oncall']) as receiver",
    )
    with db.connect(url, application_name="test") as connection:
        acked = next(each for each in alerts.opened(connection) if each.job == "failing")
    jobs.execute(url, "select gaffer.ack_alert(%s, 'me', null)", acked.id)
    return printed(url)


def _break(batch: Any) -> None:
    raise ticking.BrokenError


def is_about(found: float | None, time: datetime, seconds: float = 60) -> bool:
    """Within what the test itself took."""
    return found is not None and abs(found - time.timestamp()) < seconds


def test_each_state_has_its_numbers(states: Printed) -> None:
    of = states.of_job
    for name in SPECS:
        assert is_about(of("first_seen_timestamp_seconds", name), at(-0.5))
        assert of("retired", name) == (name == "retired")
        assert of("muted", name) == (name == "muted")
        assert of("paused", name) == (name == "paused")
        assert of("parked_rows", name) == 0

    assert of("last_success_timestamp_seconds", "never_run") is None
    assert of("due_since_timestamp_seconds", "never_run") == at(0).timestamp()
    assert of("grace_seconds", "never_run") == 3600
    assert of("lease_fence", "never_run") == 0
    assert of("backlog", "never_run") is None
    assert states.of("gaffer_run_duration_seconds_count", job_name="never_run") == 0

    assert is_about(of("last_success_timestamp_seconds", "succeeded"), at(3) + MINUTE)
    assert of("due_since_timestamp_seconds", "succeeded") is None
    assert of("overdue_seconds", "succeeded") == 0
    assert of("backlog", "succeeded") == 0
    assert of("backlog_since_timestamp_seconds", "succeeded") is None
    assert of("lease_fence", "succeeded") == 4
    assert states.of("gaffer_run_duration_seconds_count", job_name="succeeded") == 4
    assert 0 < (states.of("gaffer_run_duration_seconds_sum", job_name="succeeded") or 0) < 60

    assert of("last_success_timestamp_seconds", "failing") is None
    assert of("consecutive_failures", "failing") == 4
    assert of("due_since_timestamp_seconds", "failing") == at(0).timestamp()

    assert of("consecutive_capped", "capped") == 4
    assert of("backlog", "capped") == 1
    assert is_about(of("backlog_since_timestamp_seconds", "capped"), at(0) + MINUTE)
    assert of("consecutive_failures", "capped") == 0

    assert of("due_since_timestamp_seconds", "paused") is None
    assert of("overdue_seconds", "paused") == 0

    assert of("due_since_timestamp_seconds", "overdue") == at(0).timestamp()
    assert of("overdue_seconds", "overdue") == pytest.approx((3 * HOUR + 10 * MINUTE).total_seconds(), abs=60)

    assert of("leases_lost_total", "taken_over") == 1
    assert of("lease_fence", "taken_over") == 2
    assert of("consecutive_failures", "taken_over") == 0
    assert of("due_since_timestamp_seconds", "retired") is None
    assert of("due_since_timestamp_seconds", "no_schedule") is None
    assert of("due_since_timestamp_seconds", LONGEST) is None
    assert is_about(of("last_success_timestamp_seconds", ODD), at(3) + MINUTE)


def test_what_is_wrong_is_there_by_the_rules_of_alerts(states: Printed) -> None:
    found = {
        (labels["job_name"], labels["kind"], labels["severity"])
        for labels in map(dict, states.values["gaffer_finding_since_timestamp_seconds"])
    }
    absent = {"never_run", "failing", "capped", "overdue", "taken_over", "at_work", "muted"}
    assert found == {(name, "absence", "error") for name in absent} | {
        ("failing", "failures", "error"),
        ("capped", "backlog", "error"),
    }
    since = states.of("gaffer_finding_since_timestamp_seconds", job_name="overdue", kind="absence")
    assert since == (at(0) + 10 * MINUTE).timestamp()


def test_what_a_watch_has_opened_is_there(states: Printed) -> None:
    opened = {
        (labels["job_name"], labels["kind"]): labels["acked"]
        for labels in map(dict, states.values["gaffer_alert_since_timestamp_seconds"])
    }
    assert opened[("overdue", "absence")] == "false"
    assert sum(acked == "true" for acked in opened.values()) == 1
    counted = states.values["gaffer_alerts_open"]
    assert {dict(labels)["kind"] for labels in counted} == set(map(str, Kind))
    assert sum(counted.values()) == len(opened)
    assert states.of("gaffer_alerts_open", kind="parked", severity="warning") == 0


def test_watches_and_receivers_are_there_whatever_their_names(states: Printed) -> None:
    assert states.of("gaffer_watch_passes_total", watch="dagster") == 6
    assert states.of("gaffer_watch_interval_seconds", watch="dagster") == 7200
    assert states.of("gaffer_watch_passes_total", watch=WATCH) == 1
    assert states.of("gaffer_watch_interval_seconds", watch=WATCH) is None
    assert is_about(states.of("gaffer_watch_last_pass_timestamp_seconds", watch=WATCH), at(3) + 20 * MINUTE)
    assert states.of("gaffer_receiver_failing", receiver="log") == 0
    assert states.of("gaffer_receiver_failing", receiver="oncall") == 1
    assert is_about(states.of("gaffer_receiver_last_seen_timestamp_seconds", receiver="log"), at(3) + 20 * MINUTE)
    assert states.of("gaffer_receiver_waiting_notices", receiver="log") == 0
    assert states.of("gaffer_receiver_waiting_notices", receiver="oncall") == len(
        states.values["gaffer_alert_since_timestamp_seconds"]
    )
    assert states.of("gaffer_build_info", version=__version__) == 1
    assert is_about(states.of("gaffer_metrics_written_timestamp_seconds"), at(3) + 20 * MINUTE)


def test_types_are_right(states: Printed) -> None:
    counters = {"gaffer_job_leases_lost", "gaffer_watch_passes"}
    for name, kind in states.types.items():
        expected = "counter" if name in counters else "summary" if name == "gaffer_run_duration_seconds" else "gauge"
        assert kind == expected, name


def test_rules_and_panels_read_what_is_printed(states: Printed) -> None:
    labels = states.labels()
    for where, expression in deployed.expressions().items():
        assert list(deployed.unknown(expression, labels)) == [], where
    for rule in deployed.rules():
        named = set(re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())))
        assert named <= labels[deployed.selectors(rule["expr"])[0].name or ""] | deployed.ADDED, rule["alert"]


@pytest.mark.parametrize(
    "expression",
    [
        "gaffer_jobs_muted == 1",
        'gaffer_job_muted{name="a"}',
        "sum by (nothing) (gaffer_job_muted)",
        "increase(gaffer_job_losses_total[1h])",
        "gaffer_job_muted unless on (name) gaffer_job_paused",
    ],
)
def test_an_expression_that_reads_something_else_is_seen(url: str, expression: str) -> None:
    jobs.make_source(url, 1)
    jobs.run(jobs.spec(), url)
    assert list(deployed.unknown(expression, printed(url).labels()))


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (of Prometheus) is not on this machine")
def test_prometheus_takes_the_text(states: Printed) -> None:
    done = subprocess.run(["promtool", "check", "metrics"], input=states.text, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_an_empty_database_prints_no_job(url: str) -> None:
    found = printed(url)
    assert found.of("gaffer_build_info") == 1
    assert "gaffer_job_first_seen_timestamp_seconds" not in found.values


# ── due_since ────────────────────────────────────────────────────────────────────────────────────────────────────────


def wrong_dues(url: str, clock: Clock) -> list[str]:
    """The jobs whose due_since is not the tick of the rules, whatever their tick, pause, late tick and retirement;
    except the tick after a pause, which only the schedule knows."""
    seed, count = 4711, 400  # the broken variants differ in few of them
    print(f"seed {seed}, {count} jobs")
    choose = random.Random(seed)
    schedule, now = Schedule("0 * * * *"), at(24)
    clock.set(now)
    make_known(url, clock, *(spec(name=f"job{number}") for number in range(count)))
    expected: dict[str, datetime | None] = {}
    with jobs.connect(url) as connection:
        for name in (f"job{number}" for number in range(count)):
            next_due, late = at(choose.randrange(20, 28)), choose.choice([None, None, at(choose.randrange(15, 20))])
            paused = choose.choice([None, at(choose.uniform(18, 23))])
            until = choose.choice([None, at(choose.uniform(23, 30))]) if paused is not None else None
            retired = choose.choice([None, None, None, now])
            connection.execute(
                "update gaffer.job set next_due_at = %s, late_tick = %s, paused_at = %s, paused_until = %s,"
                " retired_at = %s where name = %s",
                [next_due, late, paused, until, retired, name],
            )
            pause = None if paused is None else Pause(paused, until)
            held = pause is not None and pause.holds(next_due)
            tick = late or (None if held else open_tick(next_due, schedule, pause))
            expected[name] = tick if retired is None and tick is not None and tick <= now else None
    assert len(set(expected.values())) > 5
    clock.set(now)
    found = dict(jobs.query(url, "select name, due_since from gaffer.job_status"))
    return [name for name, due in expected.items() if found[name] != due]


def test_due_since_is_the_tick_of_the_rules(url: str, clock: Clock) -> None:
    assert wrong_dues(url, clock) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("when j.retired_at is not null then null", "when false then null"),
        ("when j.late_tick is not null", "when j.late_tick > j.next_due_at"),
        ("when j.paused_at <= j.next_due_at", "when j.paused_at is not null"),
        ("j.next_due_at < j.paused_until)", "clock.now < j.paused_until)"),
        ("case when tick.at <= clock.now then tick.at end", "tick.at"),
    ],
)
def test_another_due_since_is_caught(url: str, clock: Clock, old: str, new: str) -> None:
    text = next(each.text for each in migrate.migrations() if each.name == "metrics")
    view = text[text.index("create view gaffer.job_status") : text.index("comment on view gaffer.job_status")]
    assert view.count(old) == 1
    jobs.execute(url, view.replace("create view", "create or replace view").replace(old, new))
    assert wrong_dues(url, clock)


# ── the file ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def output(url: str, file: Path) -> Result:
    return ticking.invoke(url, "metrics", "--output", str(file))


def test_a_file_is_replaced_and_everybody_may_read_it(url: str, tmp_path: Path) -> None:
    file = tmp_path / "gaffer.prom"
    file.write_text("old")
    file.chmod(0o600)
    done = output(url, file)
    assert (done.exit_code, done.stdout) == (0, ""), done.output
    assert Printed(file.read_text()).of("gaffer_build_info") == 1
    assert file.stat().st_mode & 0o777 == 0o644
    assert os.listdir(tmp_path) == ["gaffer.prom"]


def test_a_name_that_node_exporter_would_not_read_is_refused(url: str, tmp_path: Path) -> None:
    done = output(url, tmp_path / "gaffer.txt")
    assert done.exit_code == 1
    assert str(tmp_path / "gaffer.prom") in done.stderr
    assert os.listdir(tmp_path) == []


def test_a_folder_that_is_not_there_is_named(url: str, tmp_path: Path) -> None:
    done = output(url, tmp_path / "nowhere" / "gaffer.prom")
    assert done.exit_code == 1
    assert "nowhere/gaffer.prom' cannot be written: No such file or directory" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_database_that_is_away_leaves_the_file_as_it_was(url: str, tmp_path: Path) -> None:
    file = tmp_path / "gaffer.prom"
    assert output(url, file).exit_code == 0
    before = (file.read_bytes(), file.stat().st_mtime_ns)
    done = output("postgresql://nobody@127.0.0.1:1/away", file)
    assert done.exit_code == 75
    assert "cannot be reached" in done.stderr
    assert (file.read_bytes(), file.stat().st_mtime_ns) == before
    assert os.listdir(tmp_path) == ["gaffer.prom"]


def test_nothing_is_left_of_a_write_that_fails(tmp_path: Path) -> None:
    (tmp_path / "gaffer.prom").mkdir()
    with pytest.raises(command.BadInputError, match="cannot be written"):
        command._replace(tmp_path / "gaffer.prom", b"text")
    assert os.listdir(tmp_path) == ["gaffer.prom"]


def parts_seen(write: Callable[[Path, bytes], Any], folder: Path, writes: int) -> int:
    """How often a reader had neither the one text nor the other, which take turns; it stops at the first."""
    file = folder / "gaffer.prom"
    texts = [letter * 1_000_000 for letter in (b"a", b"b")]
    write(file, texts[0])
    seen, over = 0, threading.Event()

    def read() -> None:
        nonlocal seen
        while not over.is_set() and not seen:
            for name in os.listdir(folder):
                if name.endswith(".prom"):
                    with suppress(FileNotFoundError):  # renamed meanwhile
                        seen += (folder / name).read_bytes() not in texts

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(writes):
        if not seen:
            write(file, texts[number % 2])
    over.set()
    reader.join()
    return seen


def test_a_reader_never_has_a_part(tmp_path: Path) -> None:
    assert parts_seen(command._replace, tmp_path, 100) == 0


def test_a_write_in_place_is_caught(tmp_path: Path) -> None:
    assert parts_seen(Path.write_bytes, tmp_path, 20_000) > 0


def _beside(file: Path, text: bytes) -> None:
    beside = file.with_name(f"new-{file.name}")
    beside.write_bytes(text)
    beside.replace(file)


def test_a_file_beside_it_that_is_read_too_is_caught(tmp_path: Path) -> None:
    assert parts_seen(_beside, tmp_path, 20_000) > 0


# ── without the package ──────────────────────────────────────────────────────────────────────────────────────────────


def test_without_the_package_it_says_what_to_install(url: str) -> None:
    code = "import sys; sys.modules['prometheus_client'] = None; from gaffer_dagster.cli import main; main(['metrics'])"
    environment = {**os.environ, "GAFFER_DATABASE_URL": url}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 1
    assert "pip install 'gaffer_dagster[metrics]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_command_starts_without_the_package() -> None:
    code = "import sys, gaffer_dagster.cli; print('prometheus_client' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n", done.stderr


def test_commands_that_alerts_name_are_there() -> None:
    text = deployed.RULES.read_text() + (deployed.DEPLOY / "README.md").read_text()
    named = set(re.findall(r"\bgaffer ([a-z]+)", " ".join(re.findall(r"`(gaffer [^`]*)`", text))))
    assert named >= {"status", "runs", "ticks", "metrics"}
    assert named <= set(main.list_commands(click.Context(main)))
    assert set(re.findall(r"`gaffer alerts ([a-z]+)", text)) <= set(cli_alerts.alerts.commands)


# ── the views ────────────────────────────────────────────────────────────────────────────────────────────────────────

VIEWS = ("job_status", "open_alert", "watch_status", "delivery_status")


def test_a_reader_needs_the_views_and_the_clock_and_public_has_nothing(
    url: str, states: Printed, stranger: str
) -> None:
    role = psycopg.conninfo.conninfo_to_dict(stranger)["user"]
    for view in VIEWS:
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            jobs.query(stranger, f"select * from gaffer.{view}")
    jobs.execute(url, f"grant usage on schema gaffer to {role}")
    jobs.execute(url, f"grant execute on function gaffer.clock() to {role}")
    jobs.execute(url, f"grant select on gaffer.testing_clock to {role}")
    for view in VIEWS:
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            jobs.query(stranger, f"select * from gaffer.{view}")
        jobs.execute(url, f"grant select on gaffer.{view} to {role}")
        assert jobs.query(stranger, f"select * from gaffer.{view}"), view
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        jobs.query(stranger, "select * from gaffer.job")


def test_the_role_of_the_manual_may_print_metrics(url: str) -> None:
    assert "in role gaffer_reader;" in (deployed.DEPLOY / "README.md").read_text()
    roles.apply(url)
    with roles.groups(url), roles.login(url, "gaffer_reader") as reader:
        assert printed(reader).of("gaffer_build_info") == 1


def test_ages_are_by_the_one_clock(url: str, states: Printed) -> None:
    clock = at(10)
    protocol.freeze(url, clock)
    ages = jobs.query(url, "select last_success_at, last_success_age_seconds from gaffer.job_status")
    ages += jobs.query(url, "select last_pass_at, last_pass_age_seconds from gaffer.watch_status")
    ages += jobs.query(url, "select since, age_seconds from gaffer.open_alert")
    ages += jobs.query(url, "select failing_since, failing_seconds from gaffer.delivery_status")
    assert sum(time is not None for time, _ in ages) > 10
    assert all(age == (None if time is None else pytest.approx((clock - time).total_seconds())) for time, age in ages)


def test_the_holder_is_there_while_it_is_at_work(url: str) -> None:
    with protocol.session(url) as connection:
        job = jobs.spec()
        protocol.register(connection, job)
        question = "select holder, lease_until is not null, fence from gaffer.job_status"
        assert jobs.query(url, question) == [(None, False, 0)]
        taken = protocol.acquire(connection, job)
        assert jobs.query(url, question) == [("host:1:owner", True, 1)]
        protocol.expire(url)
        assert jobs.query(url, question) == [(None, False, 1)]
        protocol.end(connection, taken.lease)
        assert jobs.query(url, question) == [(None, False, 1)]


def test_a_pause_and_a_mute_without_end_are_there(url: str) -> None:
    with protocol.session(url) as connection:
        protocol.register(connection, jobs.spec())
    jobs.execute(url, "update gaffer.job set paused_at = gaffer.clock(), muted_until = '9000-01-01'")
    assert jobs.query(url, "select paused, muted from gaffer.job_status") == [(True, True)]
    jobs.execute(url, "update gaffer.job set paused_until = paused_at, muted_until = gaffer.clock()")
    assert jobs.query(url, "select paused, muted from gaffer.job_status") == [(False, False)]


def test_every_view_has_its_comments(url: str) -> None:
    found = jobs.query(
        url,
        "select c.relname, obj_description(c.oid, 'pg_class') from pg_class c"
        " where c.relnamespace = 'gaffer'::regnamespace and c.relkind = 'v'",
    )
    assert {name for name, _ in found} == set(VIEWS)
    assert all(comment for _, comment in found)


@pytest.fixture
def long_history(url: str) -> str:
    """Of each table that keeps what is over: 20,000 rows, and next to none of what is not."""
    with protocol.session(url) as connection:
        for number in range(20):
            protocol.register(connection, spec(name=f"job{number}"))
    for text in (
        """
        insert into gaffer.job_runs (job, slot, owner, trigger, spec_hash, started_at, ended_at, outcome, backlog)
        select 'job' || n %% 20, 0, 'o', 'schedule', 'h', gaffer.clock(), gaffer.clock(), 'failed', n
          from generate_series(1, %s) n
        """,
        """
        insert into gaffer.alert (job, kind, severity, since_at, opened_at, details, resolved_at)
        select 'job' || n %% 20, 'absence', 'error', gaffer.clock(), gaffer.clock(), '{}',
               case when n > 20 then gaffer.clock() end
          from generate_series(1, %s) n
        """,
        """
        with receivers as (insert into gaffer.receiver select 'log', gaffer.clock(), gaffer.clock() returning name)
        insert into gaffer.alert_delivery (alert, notice, number, receiver, created_at, next_attempt_at, delivered_at)
        select a.id, 'opened', 0, name, gaffer.clock(), gaffer.clock(),
               case when a.resolved_at is not null then gaffer.clock() end
          from gaffer.alert a, receivers limit %s
        """,
    ):
        jobs.execute(url, text, 20_000)
    jobs.execute(url, "analyze")
    return url


def scanned(url: str, query: str) -> set[str]:
    """The tables that are read from end to end."""
    plan = "\n".join(row[0] for row in jobs.query(url, f"explain {query}"))
    return set(re.findall(r"Seq Scan on (\w+)", plan))


HISTORY = {"job_runs", "alert", "alert_delivery"}


@pytest.mark.parametrize("view", VIEWS)
def test_no_view_scans_a_history(long_history: str, view: str) -> None:
    assert not scanned(long_history, f"select * from gaffer.{view}") & HISTORY


@pytest.mark.parametrize(
    "query",
    [
        "select job, max(id) from gaffer.job_runs where backlog is not null group by job",
        "select * from gaffer.alert where acked_at is not null",
        "select receiver, count(*) filter (where delivered_at is null) from gaffer.alert_delivery group by receiver",
    ],
)
def test_a_scan_is_seen(long_history: str, query: str) -> None:
    assert scanned(long_history, query) & HISTORY


def test_the_backlog_is_what_the_newest_run_said(long_history: str) -> None:
    assert jobs.query(long_history, "select backlog from gaffer.job_status where name = 'job7'") == [(19_987,)]
    jobs.execute(
        long_history,
        "insert into gaffer.job_runs (job, slot, owner, trigger, spec_hash, started_at, ended_at, outcome)"
        " select 'job7', 0, 'o', 'schedule', 'h', gaffer.clock(), gaffer.clock(), 'paused' from generate_series(1, %s)",
        99,
    )
    question = "select backlog from gaffer.job_status where name = 'job7'"
    assert jobs.query(long_history, question) == [(19_987,)]
    jobs.execute(
        long_history,
        "insert into gaffer.job_runs (job, slot, owner, trigger, spec_hash, started_at, ended_at, outcome)"
        " values ('job7', 0, 'o', 'schedule', 'h', gaffer.clock(), gaffer.clock(), 'paused')",
    )
    assert jobs.query(long_history, question) == [(None,)]


def test_ten_thousand_jobs_are_no_matter(url: str) -> None:
    with protocol.session(url) as connection:
        protocol.register(connection, spec(name="job0"))
    for table, key in (("job", "name"), ("job_lease", "job")):
        jobs.execute(
            url,
            f"insert into gaffer.{table} select (jsonb_populate_record(t, jsonb_build_object('{key}', 'job' || n))).*"
            f"  from gaffer.{table} t, generate_series(1, %s) n",
            9_999,
        )
    assert len(printed(url).values["gaffer_job_first_seen_timestamp_seconds"]) == 10_000
