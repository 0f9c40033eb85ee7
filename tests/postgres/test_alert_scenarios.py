"""Alerts, scenario by scenario: what is said, when, and what is not."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from gaffer_dagster.domain.alert import Alerts
from gaffer_dagster.domain.bounds import Bounds
from gaffer_dagster.domain.due import EachInterval, NewRows
from gaffer_dagster.domain.run import Outcome
from gaffer_dagster.domain.schedule import Schedule
from gaffer_dagster.domain.spec import JobSpec
from gaffer_dagster.engine import watch as engine_watch
from gaffer_dagster.engine.watch import Report, Watcher, examine, look
from gaffer_dagster.store import db, operations
from gaffer_dagster.store import jobs as job_table
from gaffer_dagster.store.jobs import Registration
from tests.support import jobs, protocol, variants
from tests.support.histories import ANN, KilledError, end, stand_still
from tests.support.protocol import Attempt

SECOND, MINUTE, HOUR, DAY = timedelta(seconds=1), timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
FAILED, SUCCEEDED, CAPPED = Outcome.FAILED, Outcome.SUCCEEDED, Outcome.CAPPED


def at(text: str) -> datetime:
    """UTC; without a date, of 1 March 2027."""
    return datetime.fromisoformat(text if "T" in text else f"2027-03-01T{text}").replace(tzinfo=timezone.utc)


def spec(cron: str = "0 * * * *", zone: str = "UTC", *, name: str = "job", due: Any = None, **given: Any) -> JobSpec:
    timeout, max_late = given.pop("timeout", "5m"), given.pop("max_late", None)
    alerts = Alerts(**({"grace": "30m"} | given))
    due = due or NewRows("source", "id")
    return JobSpec(name, due, Schedule(cron, zone), Bounds(timeout=timeout), alerts, max_late=max_late)


class Scene:
    """A database whose clock says what the test says. What passes change is told as text."""

    def __init__(self, url: str) -> None:
        self.url, self.now = url, at("00:00")
        stand_still(url)
        self.connection = db.connect(url, application_name="test")
        self._clock = jobs.connect(url)

    def at(self, when: str | datetime) -> datetime:
        self.now = at(when) if isinstance(when, str) else when
        self._clock.execute("update gaffer.testing_now set at = %s", [self.now])
        return self.now

    def close(self) -> None:
        self.connection.close()
        self._clock.close()

    def register(self, when: str | datetime, *given: JobSpec, zone_data: str | None = None) -> None:
        self.at(when)
        for each in given:
            registration = Registration(None, [one.name for one in given], zone_data)
            job_table.register(self.connection, each, registration)

    def start(self, job: JobSpec, when: str | datetime, **given: Any) -> Attempt:
        now = self.at(when)
        assert job.schedule is not None
        ticks = {"tick": job.schedule.latest(now), "next_tick": job.schedule.next(now), "max_late": job.tolerance}
        return protocol.acquire(self.connection, job, timeout=300, **(ticks | given))

    def keep(self, job: JobSpec) -> None:
        """The holder lives, and renews its lease."""
        jobs.execute(
            self.url, "update gaffer.job_lease set lease_until = gaffer.clock() + '60s' where job = %s", job.name
        )

    def end(self, attempt: Attempt, when: str | datetime, outcome: Outcome = SUCCEEDED, **given: Any) -> None:
        end(self.connection, attempt, outcome, self.at(when), **given)

    def run(self, job: JobSpec, when: str | datetime, outcome: Outcome = SUCCEEDED, **given: Any) -> None:
        attempt = self.start(job, when)
        assert attempt.grant.outcome == "granted"
        self.end(attempt, self.now, outcome, **given)

    def pause(self, job: JobSpec, when: str, until: str | None = None) -> None:
        self.at(when)
        record = job_table.get(self.connection, job.name)
        after = record.tick_after_pause
        operations.pause(self.connection, job.name, None if until is None else at(until), after, ANN)

    def resume(self, job: JobSpec, when: str) -> None:
        self.at(when)
        operations.resume(self.connection, job.name, job_table.get(self.connection, job.name).tick_after_pause, ANN)

    def pass_by(self, when: str | datetime, watch: str = "cron", every: timedelta | None = None) -> Report:
        self.at(when)
        report = look(self.connection, Watcher(watch, every))
        assert report is not None
        return report

    def look(self, when: str | datetime, watch: str = "cron", every: timedelta | None = None) -> list[str]:
        """What a pass changes."""
        report = self.pass_by(when, watch, every)
        return sorted(f"{_verb(each, report.at)} {each.kind} of {each.job or each.watch}" for each in report.changed)

    def watch(self, since: datetime, until: datetime, step: timedelta = MINUTE) -> list[tuple[datetime, str]]:
        """What passes change from `since` to `until`."""
        told: list[tuple[datetime, str]] = []
        now = since
        while now <= until:
            told += [(now, each) for each in self.look(now)]
            now += step
        return told

    def since(self, kind: str, job: str = "job") -> list[datetime]:
        """When each incident of it became true."""
        found = jobs.query(
            self.url, "select since_at from gaffer.alert where job = %s and kind = %s order by id", job, kind
        )
        return [row[0] for row in found]


def _verb(alert: Any, now: datetime) -> str:
    if alert.resolved_at is not None:
        return "resolved"
    return "reminded of" if alert.reminded_at == now else "opened"


@pytest.fixture
def scene(url: str) -> Iterator[Scene]:
    made = Scene(url)
    yield made
    made.close()


# ── absence: by the job's own schedule ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("succeeds", [False, True])
def test_b09_expected_on_the_day_of_the_gap(scene: Scene, succeeds: bool) -> None:
    job = spec("0 5 * * *", "America/New_York", grace="5m")
    scene.register("2024-03-09T09:00", job)
    scene.run(job, "2024-03-09T10:00:05")
    told = scene.watch(at("2024-03-10T08:01"), at("2024-03-10T09:00"))
    if succeeds:
        scene.run(job, "2024-03-10T09:00:05")
    told += scene.watch(at("2024-03-10T09:01"), at("2024-03-10T09:30"))
    assert told == ([] if succeeds else [(at("2024-03-10T09:05"), "opened absence of job")])


def test_b20_the_watch_has_no_schedule_of_its_own(scene: Scene) -> None:
    """08:00 in Berlin is 06:00Z once summer time has begun, on 28 March."""
    job = spec("0 8 * * *", "Europe/Berlin")
    scene.register("2027-03-27T06:00", job)
    scene.run(job, "2027-03-27T07:00:05")
    assert scene.watch(at("2027-03-28T05:00"), at("2027-03-28T07:30")) == [
        (at("2027-03-28T06:30"), "opened absence of job")
    ]
    given = {*inspect.signature(look).parameters, *inspect.signature(Watcher).parameters}
    assert given == {"connection", "watcher", "name", "every", "jobs"}


@pytest.mark.parametrize("fails", [False, True])
def test_b95_a_job_that_never_succeeded(scene: Scene, fails: bool) -> None:
    job = spec("0 2 * * *", grace="1h", failures=5)
    scene.register("10:00", job)
    told = scene.watch(at("10:00"), at("23:50"), 10 * MINUTE)
    told += scene.watch(at("2027-03-02T00:00"), at("2027-03-02T02:00"))
    if fails:
        scene.run(job, "2027-03-02T02:00:10", FAILED)
    told += scene.watch(at("2027-03-02T02:01"), at("2027-03-02T04:00"))
    assert told == [(at("2027-03-02T03:00"), "opened absence of job")]


@pytest.mark.parametrize(
    ("cron", "zone", "succeeds_at", "tick"),
    [
        ("0 2 * * 2-6", "UTC", "2027-03-06T02:00:30", "2027-03-09T02:00"),  # Saturday, then Tuesday
        ("0 9 31 * *", "UTC", "2027-01-31T09:00:30", "2027-03-31T09:00"),  # February has none
        ("30 2 * * *", "America/New_York", "2027-11-06T06:30:00", "2027-11-07T07:30"),  # 25 hours later
        ("30 2 * * *", "America/New_York", "2027-03-13T07:30:00", "2027-03-14T07:00"),  # leapt over: at its end
        ("0 9 29 2 *", "UTC", "2024-02-29T09:00:30", "2028-02-29T09:00"),
    ],
)
def test_b96_weekends_months_and_25_hour_days(scene: Scene, cron: str, zone: str, succeeds_at: str, tick: str) -> None:
    job = spec(cron, zone)
    scene.register(at(succeeds_at) - 10 * SECOND, job)
    scene.run(job, succeeds_at)
    quiet = at(tick) - at(succeeds_at)
    told = scene.watch(at(succeeds_at), at(tick), max(HOUR / 2, quiet / 100))
    told += scene.watch(at(tick), at(tick) + HOUR)
    assert told == [(at(tick) + 30 * MINUTE, "opened absence of job")]
    scene.run(job, at(tick) + 2 * HOUR)
    assert scene.look(at(tick) + 2 * HOUR) == ["resolved absence of job"]


def test_a_success_before_the_tick_is_none_of_it(scene: Scene) -> None:
    job = spec()
    scene.register("00:30", job)
    scene.run(job, at("01:00") - timedelta(microseconds=1))
    assert scene.watch(at("01:00"), at("01:45")) == [(at("01:30"), "opened absence of job")]
    scene.run(job, "01:45")
    assert scene.look("01:46") == ["resolved absence of job"]
    scene.run(job, "02:00")  # at the very tick
    assert scene.watch(at("02:00"), at("03:29")) == []


def test_a_late_success_is_heard_and_closes_it(scene: Scene) -> None:
    job = spec()
    scene.register("00:30", job)
    attempt = scene.start(job, "01:31")  # its grace is over
    assert scene.look("01:32") == ["opened absence of job"]
    scene.keep(job)
    scene.end(attempt, "01:33")
    assert scene.look("01:34") == ["resolved absence of job"]
    assert scene.since("absence") == [at("01:30")]


def test_a_long_run_that_is_alive_is_given_its_timeout(scene: Scene) -> None:
    job = spec(timeout="20m")
    scene.register("00:30", job)
    attempt = scene.start(job, "01:10")
    told: list[tuple[datetime, str]] = []
    for minute in range(11, 50):
        scene.at(at("01:00") + minute * MINUTE)
        scene.keep(job)
        told += [(scene.now, each) for each in scene.look(scene.now)]
    scene.end(attempt, "01:49:30")
    assert told == []
    assert scene.watch(at("01:50"), at("02:29")) == []
    hangs = scene.start(job, "02:29:59")
    told = []
    for minute in range(30, 60):
        scene.at(at("02:00") + minute * MINUTE)
        scene.keep(job)
        told += [(scene.now, each) for each in scene.look(scene.now)]
    assert told == [(at("02:50"), "opened absence of job")]
    scene.end(hangs, "03:05")
    assert scene.look("03:06") == ["resolved absence of job"]


@pytest.mark.parametrize("outcome", [FAILED, CAPPED])
def test_a_run_that_covers_nothing_delays_it_until_its_end(scene: Scene, outcome: Outcome) -> None:
    job = spec(timeout="20m")
    scene.register("00:30", job)
    attempt = scene.start(job, "01:29")
    scene.at("01:33")
    scene.keep(job)
    assert scene.look("01:33") == []
    scene.end(attempt, "01:34", outcome)
    assert scene.look("01:40") == ["opened absence of job"]
    assert scene.since("absence") == [at("01:34")]


def test_a_dead_run_is_at_work_until_its_lease_runs_out(scene: Scene) -> None:
    job = spec(timeout="20m")
    scene.register("00:30", job)
    scene.start(job, "01:29:30")
    assert scene.look("01:30:10") == []
    assert scene.look("01:30:40") == ["opened absence of job"]
    scene.start(job, "01:50")
    scene.look("01:51")
    assert scene.since("absence") == [at("01:30:30")]


def test_skipped_ticks(scene: Scene) -> None:
    """One that a pause skipped is not waited for, one that was skipped as late is; busy and paused runs say nothing."""
    paused, late = spec(name="paused"), spec(name="late", max_late="10m")
    scene.register("00:30", paused, late)
    scene.pause(paused, "00:50", "03:00")
    assert scene.start(paused, "01:00:05").grant.outcome == "paused"
    assert scene.start(late, "01:20").grant.outcome == "late"
    assert scene.watch(at("01:20"), at("02:00")) == [(at("01:30"), "opened absence of late")]
    scene.run(late, "02:00:05")
    assert scene.watch(at("02:01"), at("02:29")) == [(at("02:01"), "resolved absence of late")]
    scene.run(late, "03:00:05")
    assert scene.watch(at("03:01"), at("03:59")) == [(at("03:30"), "opened absence of paused")]


def test_paused_time_does_not_count(scene: Scene) -> None:
    job = spec()
    scene.register("00:30", job)
    scene.pause(job, "01:10")
    assert scene.watch(at("01:11"), at("05:00"), 7 * MINUTE) == []
    scene.resume(job, "05:05")  # twenty minutes are left
    assert scene.watch(at("05:05"), at("05:40")) == [(at("05:25"), "opened absence of job")]


def test_an_edit_is_not_heard_as_an_absence(scene: Scene) -> None:
    job, shorter = spec(grace="2h"), spec(grace="10m")
    scene.register("00:30", job)
    assert scene.watch(at("01:00"), at("01:20")) == []
    scene.register("01:20:30", shorter)
    assert scene.look("01:21") == ["opened absence of job"]
    assert scene.since("absence") == [at("01:20:30")]
    scene.register("01:30", spec("0 6 * * *"))
    assert scene.look("01:31") == []  # 01:00 stays due: still the same incident
    scene.run(spec("0 6 * * *"), "01:40")
    assert scene.watch(at("01:41"), at("06:40"), 9 * MINUTE) == [
        (at("01:41"), "resolved absence of job"),
        (at("06:38"), "opened absence of job"),
    ]
    assert scene.since("absence")[-1] == at("06:30")


# ── who looks ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_b98_the_watch_freezes_with_the_scheduler(scene: Scene) -> None:
    """Stopped for two hours: who looks from elsewhere hears it, and when each looked last."""
    job = spec()
    scene.register("00:30", job)
    assert scene.look("00:45", "dagster", MINUTE) == []
    assert scene.look("00:47") == []
    assert scene.look("00:50", "cron") == ["opened watch of dagster"]
    report = examine(scene.connection)
    assert {each.name: each.last_pass_at for each in report.watches} == {"dagster": at("00:45"), "cron": at("00:50")}
    assert scene.watch(at("00:55"), at("02:40"), 5 * MINUTE) == [(at("01:30"), "opened absence of job")]
    scene.run(job, "02:44")
    assert scene.look("02:45", "dagster", MINUTE) == ["resolved absence of job", "resolved watch of dagster"]


def test_one_schedule_that_never_fires_is_heard_alone(scene: Scene) -> None:
    fine, raises = spec(name="fine"), spec(name="raises")
    scene.register("00:30", fine, raises)
    told: list[tuple[datetime, str]] = []
    for hour in (1, 2, 3):
        scene.run(fine, at("00:00") + hour * HOUR + 5 * SECOND)
        told += scene.watch(scene.now, scene.now + 50 * MINUTE)
    assert told == [(at("01:30:05"), "opened absence of raises")]


def test_who_looks_once_an_hour_hears_it_at_once(scene: Scene) -> None:
    """It does not say how often it looks, so that an hour in which nobody did is none of silence."""
    job = spec(grace="10m")
    scene.register("00:30", job)
    assert scene.watch(at("00:50"), at("03:50"), HOUR) == [(at("01:50"), "opened absence of job")]
    assert scene.since("absence") == [at("01:10")]


@pytest.mark.parametrize("dies", [False, True])
def test_a_watch_that_is_restarted_says_nothing_twice(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    """Also one that dies in the middle, with all of its work done but for the COMMIT."""
    job = spec()
    scene.register("00:30", job)
    if dies:
        real = engine_watch.alerts.note
        with monkeypatch.context() as patched, suppress(KilledError):
            patched.setattr(engine_watch.alerts, "note", _then_dies(real))
            scene.look("01:31")
        assert jobs.query(scene.url, "select * from gaffer.alert") == []
    assert scene.watch(at("01:40"), at("02:40"), 10 * MINUTE) == [(at("01:40"), "opened absence of job")]
    assert scene.since("absence") == [at("01:30")]


def _then_dies(real: Callable[..., Any]) -> Callable[..., Any]:
    def note(*given: Any) -> None:
        real(*given)
        raise KilledError

    return note


def test_two_at_once_are_one(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    job = spec()
    scene.register("00:30", job)
    real, others = engine_watch.alerts.opened, []

    def opened(connection: db.Connection) -> Any:
        with protocol.session(scene.url) as another:
            others.append(look(another, Watcher("other")))
        return real(connection)

    assert scene.look("01:31") == ["opened absence of job"]
    monkeypatch.setattr(engine_watch.alerts, "opened", opened)
    assert scene.look("01:31:30") == []
    assert others == [None]


# ── failures ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("sequence", "told"),
    [
        ("F F S F F", []),
        ("F F b F", ["3 opened failures of job"]),
        ("FFF", []),  # three retries within a tick
        ("FFF FFF FFF", ["2 opened failures of job"]),
        (" ".join("F" * 20), ["2 opened failures of job"]),
        ("F F F S F F F", ["2 opened failures of job", "3 resolved failures of job", "6 opened failures of job"]),
        ("F F c F F F", ["5 opened failures of job"]),
        ("F i F i F", ["4 opened failures of job"]),
    ],
)
def test_b99_what_is_consecutive(scene: Scene, sequence: str, told: list[str]) -> None:
    """F failed, S succeeded, b busy, c capped, i interrupted, each group at a tick of its own. B100: down, up, down."""
    job = spec(grace="6d", remind="30d")
    scene.register("00:30", job)
    outcomes = {"F": FAILED, "S": SUCCEEDED, "c": CAPPED, "i": Outcome.INTERRUPTED}
    heard: list[str] = []
    for number, group in enumerate(sequence.split()):
        tick = at("01:00") + number * HOUR
        for second, word in enumerate(group):
            if word == "b":
                holder = scene.start(job, tick)
                assert scene.start(job, tick + SECOND, wait=1).grant.outcome == "busy"
                scene.end(holder, tick + 2 * SECOND, Outcome.INTERRUPTED)
            else:
                scene.run(job, tick + second * SECOND, outcomes[word])
        heard += [f"{number} {each}" for each in scene.look(tick + MINUTE)]
    assert heard == told
    assert len({row[0] for row in jobs.query(scene.url, "select key from gaffer.alert")}) == sum(
        "opened" in x for x in told
    )


def test_a_reminder_has_the_true_number(scene: Scene) -> None:
    job = spec(grace="6d", remind="5h")
    scene.register("00:30", job)
    for hour in range(1, 21):
        scene.run(job, at("00:00") + hour * HOUR, FAILED)
        report = scene.pass_by(scene.now + MINUTE)
        for each in report.changed:
            assert each.details["failures"] == hour
    assert jobs.query(scene.url, "select reminders, since_at, reminded_at from gaffer.alert") == [
        (3, at("03:00"), at("18:01"))
    ]


def test_nobody_is_reminded_of_what_he_knows_or_paused(scene: Scene) -> None:
    known, paused = (spec("0 1 9 * *", name=name, failures=1, remind="1h", pause="2h") for name in ("known", "paused"))
    scene.register("00:30", known, paused)
    for job in (known, paused):
        scene.run(job, "00:40", FAILED)
    assert scene.look("00:41") == ["opened failures of known", "opened failures of paused"]
    jobs.execute(scene.url, "select gaffer.ack_alert(id, 'ann', null) from gaffer.alert where job = 'known'")
    scene.pause(paused, "00:50")
    assert scene.watch(at("00:51"), at("04:51"), 20 * MINUTE) == [
        (at("02:51"), "opened pause of paused"),
        (at("03:51"), "reminded of pause of paused"),
        (at("04:51"), "reminded of pause of paused"),
    ]
    scene.resume(paused, "04:55")
    assert scene.look("05:00") == ["reminded of failures of paused", "resolved pause of paused"]


# ── many at once ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("in_time", [50, 30, 0])
def test_b103_fifty_jobs_after_an_outage(scene: Scene, in_time: int) -> None:
    """The database is away for three hours: who catches up within the grace is not spoken of; the others, once."""
    fifty = [spec(name=f"job{number:02}") for number in range(50)]
    scene.register("00:30", *fifty)
    for job in fifty:
        scene.run(job, "01:00:05")
    assert scene.look("01:10", "dagster", MINUTE) == []
    told = [(at("04:10"), each) for each in scene.look("04:10", "dagster", MINUTE)]
    for number, job in enumerate(fifty[:in_time]):
        scene.run(job, at("04:12") + number * 20 * SECOND)
    for minute in range(30, 60):
        told += [(scene.now, each) for each in scene.look(at("04:00") + minute * MINUTE, "dagster", MINUTE)]
    assert told == [(at("04:40"), f"opened absence of {job.name}") for job in fifty[in_time:]]
    for job in fifty:
        scene.run(job, "05:00:05")
    assert scene.look("05:01", "dagster", MINUTE) == [f"resolved absence of {job.name}" for job in fifty[in_time:]]
    assert jobs.query(scene.url, "select count(*) from gaffer.alert") == [(50 - in_time,)]


# ── what happens while somebody looks ────────────────────────────────────────────────────────────────────────────────


def _meanwhile(scene: Scene, monkeypatch: pytest.MonkeyPatch, what: Callable[[db.Connection], None]) -> None:
    """`what` happens between the reading and the noting of the next pass."""
    real = engine_watch.alerts.opened

    def opened(connection: db.Connection) -> Any:
        found = real(connection)
        with protocol.session(scene.url) as another:
            what(another)
        monkeypatch.setattr(engine_watch.alerts, "opened", real)
        return found

    monkeypatch.setattr(engine_watch.alerts, "opened", opened)


def test_a_run_that_ends_while_somebody_looks_is_not_absent(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    job = spec()
    scene.register("00:30", job)
    attempt = scene.start(job, "01:29", lease=600)
    scene.at("01:36")
    _meanwhile(scene, monkeypatch, lambda another: _ends(another, attempt, scene.now, SUCCEEDED))
    assert scene.look("01:36") == []
    assert scene.look("01:37") == []


def test_what_breaks_while_somebody_looks_is_not_resolved(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass has read a success, and a run fails before it is noted; the next pass judges anew."""
    job = spec(failures=1, grace="6h")
    scene.register("00:30", job)
    scene.run(job, "01:00", FAILED)
    assert scene.look("01:01") == ["opened failures of job"]
    scene.run(job, "01:02")
    attempt = scene.start(job, "02:00")
    _meanwhile(scene, monkeypatch, lambda another: _ends(another, attempt, scene.now, FAILED))
    assert scene.look("02:00:30") == []
    assert scene.look("02:01") == []


def _ends(another: db.Connection, attempt: Attempt, now: datetime, outcome: Outcome) -> None:
    end(another, attempt, outcome, now)


@pytest.mark.parametrize(
    "test",
    [
        test_a_run_that_ends_while_somebody_looks_is_not_absent,
        test_what_breaks_while_somebody_looks_is_not_resolved,
    ],
)
def test_a_pass_that_notes_what_it_read_before_would_be_caught(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, test: Callable[..., None]
) -> None:
    variants.replace(scene.url, "note_incidents", {" and j.xmin::text = i.row": ""})
    with pytest.raises(AssertionError):
        test(scene, monkeypatch)


# ── what random histories found ──────────────────────────────────────────────────────────────────────────────────────


def test_a_lease_that_was_taken_away_by_hand(scene: Scene) -> None:
    job = spec()
    scene.register("00:30", job)
    scene.start(job, "01:10")
    protocol.expire(scene.url, "job")
    scene.start(job, "01:20")
    assert scene.watch(at("01:20"), at("01:40")) == [(at("01:30"), "opened absence of job")]


def test_a_tick_that_a_pause_skipped_stays_skipped_when_zone_data_changes(scene: Scene) -> None:
    job = spec()
    scene.register("00:30", job, zone_data="2026a")
    scene.run(job, "01:00")
    scene.pause(job, "01:30")
    scene.resume(job, "03:30")
    scene.register("03:40", job, zone_data="2026b")
    assert scene.watch(at("03:41"), at("04:40")) == [(at("04:30"), "opened absence of job")]


def test_ticks_from_before_an_edit_do_not_come_up_when_zone_data_changes(scene: Scene) -> None:
    scene.register("00:30", spec("0 0 * * *"), zone_data="2026a")
    scene.register("05:30", spec(), zone_data="2026a")
    scene.register("05:40", spec(), zone_data="2026b")
    assert scene.watch(at("05:41"), at("06:40")) == [(at("06:30"), "opened absence of job")]


@pytest.mark.parametrize("resumed", [False, True])
def test_who_is_late_for_a_tick_that_a_pause_skipped_misses_none(scene: Scene, resumed: bool) -> None:
    job = spec(max_late="10m")
    scene.register("00:30", job)
    scene.pause(job, "00:50", "01:05")
    assert scene.start(job, "01:20").grant.outcome == "late"
    assert scene.start(job, "01:25").grant.outcome == "late"
    if resumed:
        scene.resume(job, "01:27")
    assert scene.watch(at("01:28"), at("02:40")) == [(at("02:30"), "opened absence of job")]


def test_who_is_late_for_nothing_misses_nothing(scene: Scene) -> None:
    """Woken for an old tick, before the job had its schedule; which is then changed."""
    daily, edited = spec("0 20 * * *", max_late="10m"), spec("0 6,14 * * *", max_late="10m")
    scene.register("2027-02-28T10:00", daily)
    scene.run(daily, "2027-02-28T20:00")
    scene.register("10:10", edited)
    assert scene.start(edited, "10:20").grant.outcome == "late"
    scene.register("10:30", spec("0 12 * * *", max_late="10m"))
    assert scene.watch(at("11:00"), at("15:00"), 10 * MINUTE) == [(at("12:30"), "opened absence of job")]


def test_late_ticks_that_a_run_did_not_reach_are_still_missed(scene: Scene) -> None:
    """Of intervals: 01:00 to 03:00 are skipped as late, and the next run does the first of them."""
    job = spec(due=EachInterval(settle="1s"), max_late="10m")
    scene.register("00:30", job)
    assert scene.start(job, "03:20").grant.outcome == "late"
    assert scene.look("03:25") == ["opened absence of job"]
    scene.run(job, "04:00:05", CAPPED, reached=at("01:00"))
    assert scene.look("04:10") == []
    scene.run(job, "04:08", CAPPED, reached=at("03:00"))
    assert scene.watch(at("04:11"), at("04:40")) == [
        (at("04:11"), "resolved absence of job"),
        (at("04:30"), "opened absence of job"),
    ]


def test_what_delayed_one_tick_may_have_delayed_the_next(scene: Scene) -> None:
    """Of intervals: 01:00 and 02:00 are due when the job is paused; 01:00 is done, and 02:00 has its grace left."""
    job = spec(due=EachInterval(settle="1s"), grace="70m")
    scene.register("00:30", job)
    scene.pause(job, "02:09")  # a minute before the grace of 01:00 is over, and 61 before that of 02:00 is
    scene.resume(job, "05:09")
    scene.run(job, "05:09:30", CAPPED, reached=at("01:00"))
    assert scene.watch(at("05:09:30"), at("06:20:30")) == [(at("06:10:30"), "opened absence of job")]
    assert scene.since("absence") == [at("06:10")]


@pytest.mark.parametrize("outcome", [FAILED, Outcome.INTERRUPTED, SUCCEEDED, None])
def test_rows_that_were_given_up_are_heard_however_the_run_ended(scene: Scene, outcome: Outcome | None) -> None:
    job = spec(grace="6h")
    scene.register("00:30", job)
    attempt = scene.start(job, "01:00")
    jobs.execute(scene.url, protocol.PARK, 2, None)
    if outcome is None:  # its process died
        scene.run(job, "01:05")
    else:
        scene.end(attempt, "01:05", outcome)
    assert scene.look("01:06") == ["opened parked of job"]
    assert scene.since("parked") == [at("01:05")]


def test_a_tick_counts_once_though_another_failed_in_between(scene: Scene) -> None:
    """A run of 01:00 fails, its retry dies, a run of 02:00 is refused, and the one of 03:00 finds the retry dead."""
    job = spec(grace="6h")
    scene.register("00:30", job)
    scene.run(job, "01:00", FAILED)
    scene.start(job, "01:05")
    assert scene.start(job, "02:00", refusal="the clocks are apart").grant.outcome == "failed"
    assert scene.look("02:01") == []
    scene.start(job, "03:00")
    assert scene.look("03:01") == []


def test_fewer_take_overs_are_allowed_from_the_edit_on(scene: Scene) -> None:
    job = spec(grace="6h", failures=9)
    scene.register("00:30", job)
    for minute in (0, 10, 20):
        scene.start(job, at("01:00") + minute * MINUTE)
    assert scene.look("01:30") == []
    scene.register("01:40", spec(grace="6h", failures=9, takeovers=2))
    assert scene.look("01:50") == ["opened takeovers of job"]
    assert scene.since("takeovers") == [at("01:40")]


BROKEN = {
    "anybody notes a gap": (
        "begin_pass",
        {"v_every is not null and v_last <": "v_last <"},
        test_who_looks_once_an_hour_hears_it_at_once,
    ),
    "a schedule edit is forgotten": (
        "base_of_spec",
        {"base_at := greatest(v_settled, v_newest.since_at);": "base_at := v_settled;"},
        test_ticks_from_before_an_edit_do_not_come_up_when_zone_data_changes,
    ),
    "a late wake-up always misses a tick": (
        "acquire",
        {"case when next_due_at <= p_tick then next_due_at end)": "next_due_at)"},
        test_who_is_late_for_nothing_misses_nothing,
    ),
    "a resume keeps a late tick": (
        "resume",
        {"late_tick >= v_job.paused_at": "false"},
        lambda scene: test_who_is_late_for_a_tick_that_a_pause_skipped_misses_none(scene, resumed=True),
    ),
    "late ticks are over with the first": (
        "end_run",
        {"late_tick = case when p_next_due_at <= skipped_until then p_next_due_at end": "late_tick = null"},
        test_late_ticks_that_a_run_did_not_reach_are_still_missed,
    ),
    "a delay is forgotten with its tick": (
        "forget_delay",
        {"from unnest(new.paused) as each where upper(each) > v_tick": "from unnest(new.paused) as each where false"},
        test_what_delayed_one_tick_may_have_delayed_the_next,
    ),
    "a dead run gives up nothing": (
        "abandon",
        {"perform gaffer.note_parked(p_job, v_dead.parked, v_dead.ended_at);": ""},
        lambda scene: test_rows_that_were_given_up_are_heard_however_the_run_ended(scene, None),
    ),
    "only the last tick counts once": (
        "count_failure",
        {"p_tick <> all (failed_ticks)": "p_tick is distinct from failed_ticks[cardinality(failed_ticks)]"},
        test_a_tick_counts_once_though_another_failed_in_between,
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_protocol_would_be_caught(scene: Scene, name: str) -> None:
    function, replaced, test = BROKEN[name]
    variants.replace(scene.url, function, replaced)
    with pytest.raises(AssertionError):
        test(scene)
