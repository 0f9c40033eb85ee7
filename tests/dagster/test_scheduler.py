"""Dagster's real scheduler over nights on which the clock is set, and over ticks at which the daemon is down: our
schedules lose no tick, and run for none that is not there.

What is right is written out here, tick by tick. The D numbers are those of Dagster's faults.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

import dagster as dg
import pytest
import time_machine
from dagster._core.definitions.run_request import InstigatorType
from dagster._core.scheduler.instigation import TickStatus

import gaffer_dagster as gd
from gaffer_dagster.adapter.assets import job_of
from gaffer_dagster.domain.ledger import Disposition, Tick, ledger
from gaffer_dagster.engine.registry import register_all
from gaffer_dagster.store import db, history
from gaffer_dagster.testing import Clock, scratch_database
from tests.dagster.moved import AWAKE, MINUTE, Location, at, instance_in, location, stock
from tests.support import jobs, protocol

HOUR = timedelta(hours=1)


class Deployment:
    """An instance and a database, in which each test has jobs of its own."""

    def __init__(self, url: str, clock: Clock, instance: dg.DagsterInstance) -> None:
        self.url, self.clock, self.instance = url, clock, instance
        self._count = 0
        jobs.execute(
            url,
            "create table windows (n int generated always as identity, job text, since timestamptz, until timestamptz)",
        )

    @contextmanager
    def running(
        self, case: Case, *, ours: bool = True, known: bool = True, behind: timedelta = timedelta(), **bounds: Any
    ) -> Iterator[Running]:
        """The job of a case in a code location, from its start on, when the sensor has made it known. It begins with
        the interval of its first tick, or `behind` that."""
        self._count += 1
        name = f"job_{self._count}"

        def take(batch: gd.Batch) -> None:
            window = {"since": batch.window.since, "until": batch.window.until}
            batch.insert("windows", [{"job": name, **window}])

        with time_machine.travel(case.start):
            before = case.schedule.latest(case.start)
            assert before is not None
            due = gd.EachInterval(settle="1ms", start=before - behind)
            limits = gd.Bounds(timeout="40s", **bounds)
            asset = gd.gaffer_asset(name=name, schedule=case.schedule, due=due, bounds=limits)(take)
            definitions = gd.build_definitions(asset, resource=gd.GafferResource(dsn=self.url))
        if not ours:
            definitions = stock(definitions, case.schedule)
        with location(self.instance, self.clock, definitions) as loaded:
            if known:  # as the sensor does, half a minute after it was deployed
                with loaded.it_is(case.start), protocol.session(self.url) as connection:
                    register_all(connection, [job_of(asset).definition])
            yield Running(self, name, case, loaded)


@dataclass(frozen=True)
class Case:
    fault: str
    cron: str | list[str]
    zone: str
    start: datetime
    """When the schedule is switched on."""
    ticks: list[datetime]
    """Those that there are from then to the end of the stretch, a quarter of an hour after the last one."""
    every: timedelta = MINUTE
    """How often the daemon looks."""

    @property
    def schedule(self) -> gd.Schedule:
        return gd.Schedule(self.cron, self.zone)

    @property
    def end(self) -> datetime:
        return self.ticks[-1] + HOUR / 4


@dataclass
class Running:
    deployment: Deployment
    job: str
    case: Case
    location: Location

    def goes_on(self, until: datetime | None = None) -> None:
        """The daemon looks when the schedule is switched on, and around each tick. What it does then depends on when
        it looked last, so the minute of the hour at which that begins is the one of the start."""
        looked = self.case.start
        self.location.evaluate(looked)
        for tick in self.case.ticks:
            since = max(looked, (tick - 2 * HOUR).replace(minute=looked.minute))
            looked = min(tick + HOUR / 4, until or self.case.end)
            self.location.go(since, looked, self.case.every)

    def ledger(self) -> list[Tick]:
        """What became of the ticks of the stretch; on time is when the daemon looks next."""
        with protocol.session(self.deployment.url) as connection:
            past = history.of_job(connection, self.job, self.case.start)
        now = max(self.case.end, self.deployment.clock.now())
        return list(ledger(past, self.case.start, self.case.end, now=now, grace=self.case.every))

    def faults(self, *, late: int = 0) -> list[str]:
        """What is wrong if each tick is to be covered by a run at the tick, save the first few, by one run, later."""
        found, case = self.ledger(), self.case
        faults = [f"a tick at {tick.at}" for tick in found if tick.at not in case.ticks]
        faults += [f"no tick at {tick}" for tick in case.ticks if tick not in [each.at for each in found]]
        for number, tick in enumerate(found):
            right = Disposition.COVERED_LATE if number < late else Disposition.COVERED
            if tick.disposition is not right:
                faults.append(f"{tick.at} is {tick.disposition}")
        covering = {tick.run_id for tick in found}
        if len(covering) != len(found) - max(0, late - 1):
            faults.append(f"{len(found)} ticks are covered by {len(covering)} runs")
        runs = jobs.query(self.deployment.url, "select id, outcome from gaffer.job_runs where job = %s", self.job)
        faults += [f"run {run} covers nothing: {outcome}" for run, outcome in runs if run not in covering]
        asked = self.location.runs(self.job)
        if len(asked) != len(covering):
            faults.append(f"Dagster has {len(asked)} runs")
        if self.windows() != list(pairwise([case.schedule.latest(case.start), *case.ticks])):
            faults.append(f"windows: {self.windows()}")
        return faults + self.location.errors

    def windows(self) -> list[tuple[datetime, datetime]]:
        """What the runs were handed, in the order in which they committed it."""
        return jobs.query(self.deployment.url, "select since, until from windows where job = %s order by n", self.job)


@pytest.fixture(scope="module")
def deployment(server_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with scratch_database(server_url) as url, instance_in(tmp_path_factory.mktemp("home")) as instance:
        yield Deployment(url, Clock(url), instance)


def case(fault: str, cron: str | list[str], zone: str, start: str, *ticks: str, every: int = 1) -> Any:
    name = f"{fault} {cron} {zone} {start}" + (f" each {every} min" if every > 1 else "")
    return pytest.param(
        Case(fault, cron, zone, at(start), [at(tick) for tick in ticks], every * MINUTE), id=name.replace("/", "_")
    )


CASES = [
    # An overlap at midnight; the fault depends on the minute at which the daemon began.
    case("D01", "30 23 * * *", "Africa/Cairo", "2027-10-28T06:00Z", "2027-10-28T21:30Z", "2027-10-29T21:30Z"),
    case("D01", "30 23 * * *", "Africa/Cairo", "2027-10-28T06:17Z", "2027-10-28T21:30Z"),
    case("D01", "30 23 * * *", "Africa/Cairo", "2027-10-28T21:05Z", "2027-10-28T21:30Z"),
    case("D01", "30 23 * * *", "Asia/Beirut", "2027-10-30T12:00Z", "2027-10-30T21:30Z"),
    case("D01", "30 23 * * *", "America/Santiago", "2027-04-03T12:00Z", "2027-04-04T03:30Z", "2027-04-05T03:30Z"),
    case("D02", "30 1 * * *", "Europe/Dublin", "2027-03-27T12:00Z", "2027-03-28T01:00Z", "2027-03-29T00:30Z"),
    case("D02", "30 2 * * *", "Africa/Casablanca", "2026-03-21T12:00Z", "2026-03-22T02:00Z"),
    case("D03", "30 1 * * *", "Antarctica/Troll", "2027-03-27T12:00Z", "2027-03-28T01:00Z"),
    case("D03", "30 2 * * *", "Antarctica/Troll", "2027-03-27T12:00Z", "2027-03-28T01:00Z"),
    case("D04", "50 2 * * *", "Pacific/Chatham", "2027-09-25T06:00Z", "2027-09-25T14:00Z"),
    case("D04", "15 3 * * *", "Pacific/Chatham", "2027-09-25T06:00Z", "2027-09-25T14:00Z"),
    case("D05", "30 0 * * *", "Asia/Beirut", "2027-03-27T12:00Z", "2027-03-27T22:00Z"),
    case("D05", "30 0 * * *", "Africa/Cairo", "2027-04-29T12:00Z", "2027-04-29T22:00Z"),
    case("D05", "30 0 * * *", "America/Sao_Paulo", "2018-11-03T12:00Z", "2018-11-04T03:00Z"),
    case("D05", "30 0 * * *", "America/Santiago", "2027-09-04T12:00Z", "2027-09-05T04:00Z"),
    case(
        "D06", "0 * * * *", "Australia/Lord_Howe", "2027-04-03T13:30Z",
        "2027-04-03T14:00Z", "2027-04-03T15:30Z", "2027-04-03T16:30Z",
    ),
    case(
        "D06", "0 * * * *", "Australia/Lord_Howe", "2027-10-02T14:00Z",
        "2027-10-02T14:30Z", "2027-10-02T16:00Z",
    ),
    case("D07", "0 0 29 2 *", "UTC", "2028-02-26T12:00Z", "2028-02-29T00:00Z", every=7),
    case("D07", "0 0 29 2 *", "UTC", "2028-02-26T12:00Z", "2028-02-29T00:00Z", every=60),
    case("D08", "0 12 * * *", "Pacific/Apia", "2011-12-29T12:00Z", "2011-12-29T22:00Z", "2011-12-30T22:00Z"),
    case("D08", "30 2 * * *", "Pacific/Apia", "2011-12-29T12:00Z", "2011-12-29T12:30Z"),
    case(
        "D09", ["45 * * * *", "15 * * * *"], "America/New_York", "2027-11-07T04:50Z",
        "2027-11-07T05:15Z", "2027-11-07T05:45Z", "2027-11-07T06:15Z", "2027-11-07T06:45Z",
    ),
    # Here Dagster is right, and drives the schedule itself.
    case("-", "30 2 * * *", "America/New_York", "2027-03-13T12:00Z", "2027-03-14T07:00Z"),
    case("-", "30 1 * * *", "America/New_York", "2027-11-06T12:00Z", "2027-11-07T06:30Z"),
    case("-", "30 2 * * *", "Europe/Berlin", "2027-03-27T12:00Z", "2027-03-28T01:00Z"),
    case("-", "30 2 * * *", "Europe/Berlin", "2027-10-30T12:00Z", "2027-10-31T01:30Z"),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_each_tick_is_covered_at_the_tick_by_one_run(deployment: Deployment, case: Case) -> None:
    with deployment.running(case) as running:
        running.goes_on()
        assert running.faults() == []


# The last case of each fault.
ONE_OF_EACH = list({str(row.id).split()[0]: row for row in CASES}.values())


@pytest.mark.parametrize("case", ONE_OF_EACH)
def test_ticks_at_which_the_daemon_is_down_are_covered_once_when_it_is_back(deployment: Deployment, case: Case) -> None:
    back = case.ticks[0] + 35 * MINUTE  # after a wake-up or two that are at no tick, here and there
    case = replace(case, ticks=[tick for tick in case.ticks if tick < back], every=MINUTE)
    with deployment.running(case) as running:
        running.goes_on(until=case.ticks[0] - HOUR / 4)
        running.location.restarted()
        running.location.go(back, back + 5 * MINUTE)
        assert running.faults(late=len(case.ticks)) == []


@pytest.mark.parametrize(
    ("wanted", "fault"),
    [
        ("Africa_Cairo 2027-10-28T06:00Z", "2027-10-29 21:30:00+00:00 is missed"),  # it has ended for ever
        ("Europe_Dublin", "2027-03-28 01:00:00+00:00 is covered_late"),  # it came an hour early, and found nothing
        ("Lord_Howe 2027-04-03", "2027-04-03 15:30:00+00:00 is covered_late"),
        ("29 2 * UTC 2028-02-26T12:00Z each 7 min", "2028-02-29 00:00:00+00:00 is missed"),
        ("America_New_York 2027-11-07T04:50Z", "2027-11-07 05:45:00+00:00 is covered_late"),
    ],
)
def test_a_schedule_of_dagsters_own_is_caught(deployment: Deployment, wanted: str, fault: str) -> None:
    (case,) = [row.values[0] for row in CASES if wanted in str(row.id)]
    assert isinstance(case, Case)
    with deployment.running(case, ours=False) as running:
        running.goes_on()
        assert fault in running.faults()


# ── a daemon that is down ────────────────────────────────────────────────────────────────────────────────────────

NOON = at("2027-05-05T12:00Z")
LINES = [("*/5 * * * *", "America/New_York"), ("*/5 * * * *", "Europe/Dublin")]
"""Driven by Dagster's own ticks, and by wake-ups."""


@pytest.mark.parametrize(("cron", "zone"), LINES)
def test_one_run_covers_all_the_ticks_of_an_outage(deployment: Deployment, cron: str, zone: str) -> None:
    """D11: Dagster itself runs the newest of them only."""
    ticks = [NOON + number * 5 * MINUTE for number in range(38)]
    case = Case("D11", cron, zone, NOON - 2 * MINUTE, ticks)
    with deployment.running(case) as running:
        running.location.go(case.start, NOON + MINUTE)
        running.location.restarted()
        running.location.go(NOON + 3 * HOUR, ticks[-1] + MINUTE)
        found = running.ledger()
        assert [tick.run_id for tick in found[1:37]] == [found[1].run_id] * 36
        assert [tick.disposition for tick in found[1:36]] == [Disposition.COVERED_LATE] * 35
        assert [found[number].disposition for number in (0, 36, 37)] == [Disposition.COVERED] * 3
        assert len(running.location.runs(running.job)) == 3
        counts = jobs.query(
            deployment.url, "select ticks_covered from gaffer.job_runs where job = %s order by id", running.job
        )
        assert counts == [(1,), (36,), (1,)]
        assert running.windows() == list(pairwise([ticks[0] - 5 * MINUTE, *ticks]))


# An hour is driven by Dagster's own ticks in the one zone, in the other by wake-ups each half hour.
HOURLY = [("America/New_York", NOON), ("Australia/Lord_Howe", NOON + HOUR / 2)]


def hourly(zone: str, first: datetime, ticks: int = 1) -> Case:
    """Switched on forty minutes before its first tick."""
    return Case("-", "0 * * * *", zone, first - 40 * MINUTE, [first + number * HOUR for number in range(ticks)])


@pytest.mark.parametrize(("zone", "first"), HOURLY)
def test_a_job_that_is_not_known_yet_runs_at_its_first_tick_and_not_before(
    deployment: Deployment, zone: str, first: datetime
) -> None:
    case = hourly(zone, first, ticks=2)
    with deployment.running(case, known=False) as running:
        running.location.go(case.start, first - MINUTE)
        assert running.location.runs(running.job) == []
        running.location.go(first, case.end)
        assert len(running.location.runs(running.job)) == 2
        assert running.windows() == list(pairwise([first - HOUR, *case.ticks]))
        assert [tick.disposition for tick in running.ledger()] == [Disposition.COVERED]  # of those since it is known
        assert running.location.errors == []


@pytest.mark.parametrize(("zone", "first"), HOURLY)
@pytest.mark.parametrize("away", ["the database", "the tables", "Dagster's runs"])
def test_what_cannot_be_read_asks_for_a_run(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch, zone: str, first: datetime, away: str
) -> None:
    case = hourly(zone, first)
    with deployment.running(case) as running:
        running.location.go(case.start, first - MINUTE)
        with monkeypatch.context() as patch:
            if away == "Dagster's runs":
                patch.setattr(dg.DagsterInstance, "get_run_records", fails)
            else:
                gone = "postgresql://nobody@127.0.0.1:1/gone"
                elsewhere = gone if away == "the database" else db.with_database(deployment.url, "postgres")
                patch.setattr(gd.GafferResource, "url", lambda _: elsewhere)
            running.location.go(first, first + MINUTE)
        assert running.location.errors == []  # no tick failed
        (asked,) = running.location.runs(running.job)
        assert asked.tags["gaffer/tick"] == first.isoformat()
        # The run was no luckier, save where only Dagster's storage was away; the next tick covers both.
        assert asked.is_success is (away == "Dagster's runs")


def fails(*_: object, **__: object) -> Any:
    raise OSError("the storage is away")


@pytest.mark.parametrize(("zone", "first"), HOURLY)
def test_two_daemons_that_find_one_tick_have_one_effect(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch, zone: str, first: datetime
) -> None:
    """Both look for a run of the tick before either has made one; Dagster has no lock there."""
    case = hourly(zone, first)
    with deployment.running(case) as running:
        running.location.go(case.start, first - MINUTE)
        other = Location(deployment.instance, running.location.workspace, deployment.clock)
        monkeypatch.setattr("dagster._scheduler.scheduler._get_existing_run_for_request", lambda *_: None)
        with running.location.it_is(first + AWAKE):
            one = running.location.iteration()
            next(one)  # evaluated, and about to make its run
            list(other.iteration())
            list(one)
        assert len(running.location.runs(running.job)) == 2
        assert running.windows() == [(first - HOUR, first)]
        ran = jobs.query(
            deployment.url,
            "select outcome, items, ticks_covered from gaffer.job_runs where job = %s order by id",
            running.job,
        )
        assert ran == [("succeeded", 1, 1), ("succeeded", 0, 0)]


def test_a_tick_asks_for_a_run_for_each_slot_once(deployment: Deployment) -> None:
    jobs.execute(deployment.url, "create table todo (id int primary key, done_at timestamptz, run_id bigint)")
    jobs.execute(deployment.url, "insert into todo select generate_series(1, 4)")
    tick = at("2026-07-01T12:00Z")

    def take(batch: gd.Batch) -> None:
        ids = [row["id"] for row in batch.rows]
        batch.execute("update todo set run_id = %s where id = any(%s)", [batch.run_id, ids])

    with time_machine.travel(tick - HOUR):
        asset = gd.gaffer_asset(
            name="todo",
            schedule=gd.Schedule("0 * * * *"),
            due=gd.PendingRows("todo", "id", pending="done_at is null", done="done_at = now()", parallel=2),
            bounds=gd.Bounds(batch_rows=2, batches=1),
        )(take)
        definitions = gd.build_definitions(asset, resource=gd.GafferResource(dsn=deployment.url))
    with location(deployment.instance, deployment.clock, definitions) as loaded:
        loaded.go(tick - MINUTE, tick)
        loaded.restarted()  # the tick is looked at once more
        loaded.evaluate(tick + AWAKE)
        assert len(loaded.runs("todo")) == 2
    assert jobs.query(
        deployment.url,
        "select items, outcome, count(*) from gaffer.job_runs where job = 'todo' group by 1, 2 order by 2",
    ) == [(2, "capped", 1), (2, "succeeded", 1)]
    assert jobs.query(deployment.url, "select count(distinct run_id), count(done_at) from todo") == [(2, 4)]


# ── runs that wait ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def queueing(server_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Runs wait in a queue until a test lets them out."""
    with scratch_database(server_url) as url, instance_in(tmp_path_factory.mktemp("home"), queued=True) as instance:
        yield Deployment(url, Clock(url), instance)


@pytest.mark.parametrize(
    ("zone", "minutes", "skipped"),
    [("America/New_York", 3, True), ("Europe/Dublin", 3, True), ("Europe/Dublin", 15, False)],
)
def test_a_tick_is_skipped_for_a_young_run_in_the_queue_and_not_for_an_old_one(
    queueing: Deployment, zone: str, minutes: int, skipped: bool
) -> None:
    """The run in the queue goes on where one that was capped has stopped."""
    case = hourly(zone, NOON, ticks=2)
    with queueing.running(case, behind=HOUR, batches=1) as running:
        daemons = running.location
        daemons.go(case.start, NOON)
        daemons.dequeue(NOON + MINUTE)
        daemons.watch(case.ticks[1] - minutes * MINUTE)
        daemons.go(case.ticks[1] - MINUTE, case.ticks[1])
        (done, waiting, *more) = daemons.runs(running.job)
        assert (done.status, waiting.status) == (dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.QUEUED)
        ticks = daemons.ticks(InstigatorType.SCHEDULE)
        said = [tick.skip_reason for tick in ticks if tick.status is TickStatus.SKIPPED]
        if skipped:
            assert more == []
            # Of the 180 seconds one may not be quite over: the clocks are set one after the other.
            assert len(said) == 1
            waited = rf"run {waiting.run_id} has been in the queue for (179|180) s and will cover this tick"
            assert re.fullmatch(waited, said[0])
        else:
            assert said == []
            assert [run.tags["gaffer/tick"] for run in more] == [case.ticks[1].isoformat()]
        daemons.dequeue(case.ticks[1] + MINUTE)
        daemons.watch(case.ticks[1] + 2 * MINUTE)
        daemons.dequeue(case.ticks[1] + 3 * MINUTE)
        assert running.windows() == list(pairwise([NOON - 2 * HOUR, NOON - HOUR, *case.ticks]))
        assert daemons.errors == []


@pytest.mark.parametrize(
    ("zone", "submitted"), [("America/New_York", False), ("Europe/Dublin", False), ("Europe/Dublin", True)]
)
def test_a_run_that_a_killed_daemon_has_made_is_submitted_once(
    queueing: Deployment, monkeypatch: pytest.MonkeyPatch, zone: str, submitted: bool
) -> None:
    case, submit = hourly(zone, NOON), dg.DagsterInstance.submit_run

    def die(*args: Any) -> None:
        if submitted:
            submit(*args)
        raise KeyboardInterrupt

    with queueing.running(case) as running:
        daemons = running.location
        daemons.go(case.start, NOON - MINUTE)
        with monkeypatch.context() as patch:
            patch.setattr(dg.DagsterInstance, "submit_run", die)
            with pytest.raises(KeyboardInterrupt):
                daemons.evaluate(NOON + AWAKE)
        (made,) = daemons.runs(running.job)
        assert made.status is (dg.DagsterRunStatus.QUEUED if submitted else dg.DagsterRunStatus.NOT_STARTED)
        daemons.restarted()
        daemons.go(NOON + MINUTE / 2, NOON + MINUTE)
        assert [run.status for run in daemons.runs(running.job)] == [dg.DagsterRunStatus.QUEUED]
        daemons.dequeue(NOON + MINUTE)
        assert running.windows() == [(NOON - HOUR, NOON)]
