"""What `gaffer simulate` says is what happens: the same events, in moved time, done by the functions of the store.

The replay is slow and plain: it sets the clock to each instant at which anything can happen, in order, among them each
pass of the watch; it asks the store for everything; and of the simulation it knows only the order in which chances are
drawn.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from gaffer_dagster.domain import simulation
from gaffer_dagster.domain.alert import Alerts, Kind
from gaffer_dagster.domain.bounds import Bounds
from gaffer_dagster.domain.due import NewRows
from gaffer_dagster.domain.incident import Alert, Stretch
from gaffer_dagster.domain.lease import LEASE, RENEW_EVERY, Lease
from gaffer_dagster.domain.ledger import Disposition, Pause, ledger
from gaffer_dagster.domain.run import Outcome
from gaffer_dagster.domain.schedule import Schedule
from gaffer_dagster.domain.simulation import Scenario, Simulation, simulate
from gaffer_dagster.domain.spec import JobSpec
from gaffer_dagster.engine.watch import Watcher, look
from gaffer_dagster.store import alerts, db, history, learnt, leases, operations
from gaffer_dagster.store import jobs as job_table
from gaffer_dagster.store.learnt import Dead
from gaffer_dagster.store.operations import Operator
from tests.support import protocol, variants

DAY, HOUR, MINUTE, SECOND = timedelta(days=1), timedelta(hours=1), timedelta(minutes=1), timedelta(seconds=1)
ANN = Operator("ann", None)
STORY = dict[str, list[Any]]
END, OUTAGE, PAUSE, WAKE, PASS = range(5)  # what comes first at one instant


@dataclass
class Holder:
    """A run that was granted. `lives_until`: then it ends, or is killed."""

    lease: Lease
    started_at: datetime
    lives_until: datetime
    ends: Outcome
    before: datetime
    looked_at: datetime
    wanted_at: datetime | None
    renewed_at: datetime


class Replay:
    def __init__(self, url: str, scenario: Scenario, rng: random.Random) -> None:
        self.given, self.rng, self.schedule = scenario, rng, scenario.schedule
        self.holder: Holder | None = None
        self.unwritten: list[datetime] = []
        self.now = scenario.since
        self.events: list[tuple[datetime, int, Any]] = []
        self.connection = db.connect(url, application_name="test")
        self.connection.execute("create table gaffer.testing_now (at timestamptz not null)")
        self.connection.execute("insert into gaffer.testing_now values (%s)", [scenario.since])
        self.connection.execute(
            "create or replace function gaffer.clock() returns timestamptz language sql volatile"
            " set search_path = pg_catalog, pg_temp as 'select at from gaffer.testing_now'"
        )
        protocol.register(self.connection, scenario.spec)

    def live(self) -> STORY:
        given = self.given
        self.events += [(stretch.since, OUTAGE, None) for stretch in given.database_down]
        self.events += [(pause.since, PAUSE, pause) for pause in given.paused]
        self.events += [(at, WAKE, None) for at in set(self.wake_ups())]
        self.events += [(at, PASS, None) for at in self.passes()]
        heapq.heapify(self.events)
        while self.events:
            at, what, about = heapq.heappop(self.events)
            if at > given.until:
                break
            self.renew(at)
            self.set(at)
            if what == END and about is self.holder:
                self.end()
            elif what == OUTAGE and self.holder is not None:
                self.holder.lives_until = min(self.holder.lives_until, at)
                self.holder.ends = Outcome.ABANDONED
            elif what == PAUSE:
                record = job_table.get(self.connection, given.spec.name)
                operations.pause(self.connection, given.spec.name, about.until, record.tick_after_pause, ANN)
            elif what == WAKE and within(given.database_down, at):
                self.unwritten.append(at)
            elif what == WAKE:
                self.acquire("schedule")
            elif what == PASS:
                self.learn()
                assert look(self.connection, Watcher("sensor", given.every, [given.spec.name])) is not None
                if job_table.wanted(self.connection, [given.spec.name]):
                    self.acquire("sensor")
        self.set(given.until)
        story = self.story()
        self.connection.close()
        return story

    def wake_ups(self) -> Iterator[datetime]:
        for tick in self.schedule.ticks(self.given.since, self.given.until):
            at = tick
            while stretch := within(self.given.down, at):
                at = stretch.until
            yield at

    def passes(self) -> Iterator[datetime]:
        at = self.given.since
        while at <= self.given.until:
            if not within(self.given.down, at) and not within(self.given.database_down, at):
                yield at
            at += self.given.every

    def set(self, at: datetime) -> None:
        self.now = at
        self.connection.execute("update gaffer.testing_now set at = %s", [at])

    def renew(self, at: datetime) -> None:
        """As it has by now, as long as it lived."""
        holder = self.holder
        if holder is not None:
            lived = min(at, holder.lives_until) - holder.started_at
            renewed_at = holder.started_at + lived // RENEW_EVERY * RENEW_EVERY
            if renewed_at > holder.renewed_at:
                self.set(renewed_at)
                assert leases.renew(self.connection, holder.lease, LEASE)
                holder.renewed_at = renewed_at

    def acquire(self, trigger: str) -> None:
        given, now = self.given, self.now
        asked: dict[str, Any] = {
            "trigger": trigger,
            "lease": LEASE.total_seconds(),
            "timeout": given.spec.limits.timeout.total_seconds(),
            "tick": self.schedule.latest(now),
            "next_tick": self.schedule.next(now),
            "max_late": given.spec.tolerance if trigger == "schedule" else None,
        }
        attempt = protocol.acquire(self.connection, given.spec, **asked)
        if attempt.grant.outcome == "busy":
            attempt = protocol.acquire(self.connection, given.spec, lease_id=attempt.lease_id, wait=1, **asked)
        grant = attempt.grant
        if grant.outcome != "granted":
            return
        length, failure, death, when = (self.rng.random() for _ in range(4))
        takes = given.takes[0] + (given.takes[1] - given.takes[0]) * length
        lives, ends = min(takes, given.spec.limits.timeout), Outcome.SUCCEEDED
        if death < given.dies:
            lives, ends = lives * when, Outcome.ABANDONED
        elif takes > lives:
            ends = Outcome.TIMED_OUT
        elif failure < given.fails or within(given.failing, now):
            ends = Outcome.FAILED
        before = grant.covered_until or grant.first_seen_at
        assert before is not None
        self.holder = Holder(attempt.lease, now, now + lives, ends, before, now, grant.wanted_at, now)
        if ends is not Outcome.ABANDONED:
            heapq.heappush(self.events, (now + lives, END, self.holder))

    def learn(self) -> None:
        """Of what Dagster recorded while the database was away; the watch was there before, or never hears of it."""
        spec = self.given.spec
        known = learnt.mark(self.connection, "sensor") is not None
        for number, at in enumerate(self.unwritten if known else []):
            name = f"{at.isoformat()}/{number}"
            dead = Dead(spec.name, name, "schedule", self.schedule.latest(at), at, at, spec.hash, "away")
            assert learnt.learn(self.connection, dead) is not None
        self.unwritten.clear()

    def end(self) -> None:
        """As `engine.run` does it."""
        holder = self.holder
        assert holder is not None
        if holder.ends is Outcome.ABANDONED:  # the database went away meanwhile
            return
        while True:
            covered = holder.looked_at if holder.ends is Outcome.SUCCEEDED else None
            since = holder.before if covered is None else min(holder.before, covered)
            past = history.of_job(self.connection, self.given.spec.name, since, runs=False)
            ending = protocol.end(
                self.connection,
                holder.lease,
                holder.ends,
                wanted_at=holder.wanted_at,
                covered_until=covered,
                next_due_at=None if covered is None else past.next(covered, self.now),
            )
            if ending.result == "ended":
                break
            holder.looked_at, holder.wanted_at = self.now, ending.wanted_at
        self.holder = None

    def story(self) -> STORY:
        given = self.given
        rows = self.connection.execute(
            "select id, trigger, tick, started_at, ended_at, outcome from gaffer.job_runs order by started_at, id"
        ).fetchall()
        numbers = {row[0]: number for number, row in enumerate(rows)}
        ticks = ledger(
            history.of_job(self.connection, given.spec.name, given.since),
            given.since,
            given.until,
            now=given.until,
            grace=given.spec.alerts.grace_for(given.schedule),
        )
        return {
            "runs": [row[1:] for row in rows],
            "ticks": [(each.at, each.disposition, numbers.get(each.run_id), each.late_by) for each in ticks],
            "incidents": [incident(alert) for alert in reversed(alerts.newest(self.connection, 1000))],
        }


def within(stretches: Any, at: datetime) -> Stretch | None:
    found = [stretch for stretch in stretches if stretch.since <= at < stretch.until]
    return found[0] if found else None


def incident(alert: Alert) -> tuple[Any, ...]:
    details = {
        name: text for name, text in alert.details.items() if name != "by"
    }  # who paused the job is not simulated
    return alert.kind, alert.since_at, alert.opened_at, alert.resolved_at, alert.reminders, details


def told(found: Simulation) -> STORY:
    recorded = [run for run in found.runs if run.outcome is not None]
    numbers: dict[int | None, int] = {run.number: number for number, run in enumerate(recorded)}
    return {
        "runs": [(run.trigger, run.tick, run.started_at, run.ended_at, str(run.outcome)) for run in recorded],
        "ticks": [(each.at, each.disposition, numbers.get(each.run_id), each.late_by) for each in found.ticks()],
        "incidents": [incident(alert) for alert in found.incidents],
    }


def compare(url: str, scenario: Scenario, seed: int) -> STORY:
    done = Replay(url, scenario, random.Random(seed)).live()
    check(scenario, seed, done)
    return done


def check(scenario: Scenario, seed: int, done: STORY) -> None:
    simulated = told(simulate(scenario, random.Random(seed)))
    for what, entries in done.items():
        assert simulated[what] == entries, what


# ── scenarios ────────────────────────────────────────────────────────────────────────────────────────────────────────

LIVES = [
    # cron, zone, since, how long, every
    ("0 * * * *", "UTC", datetime(2027, 3, 1, 0, 20, tzinfo=timezone.utc), 36 * HOUR, 10 * MINUTE),
    ("*/2 * * * *", "UTC", datetime(2027, 3, 1, tzinfo=timezone.utc), 80 * MINUTE, 30 * SECOND),
    ("30 1,2,3,20 * * *", "America/New_York", datetime(2027, 3, 12, tzinfo=timezone.utc), 72 * HOUR, 20 * MINUTE),
    ("0 2 * * *", "Europe/Berlin", datetime(2027, 3, 24, tzinfo=timezone.utc), 9 * DAY, 90 * MINUTE),
]


def scenario(seed: int) -> Scenario:
    rng = random.Random(seed)
    cron, zone, since, length, every = LIVES[seed % len(LIVES)]
    schedule = Schedule(cron, zone)
    shortest = schedule.shortest_interval()
    until = since + length

    def stretches(count: int) -> list[Stretch]:
        found: list[Stretch] = []
        for begin in sorted(rng.random() for _ in range(count)):
            finish = begin + rng.random() / rng.choice([5, 50])
            bounds = [since + round(share * (length / SECOND)) * SECOND for share in (begin, finish)]
            if rng.random() < 0.3:  # at a tick to the instant
                bounds = [schedule.next(bound) for bound in bounds]
            if bounds[0] < bounds[1] and not (found and bounds[0] < found[-1].until):
                found.append(Stretch(bounds[0], bounds[1]))
        return found

    away = stretches(rng.choice([0, 1, 1]))
    paused = [
        Pause(each.since, each.until) for each in stretches(rng.choice([0, 1, 5])) if not within(away, each.since)
    ]
    if paused and rng.random() < 0.2:
        paused[-1] = replace(paused[-1], until=None)
    return Scenario(
        JobSpec(
            "job",
            NewRows("source", "id"),
            schedule,
            Bounds(timeout=rng.choice([None, shortest * 0.6, shortest * 0.95])),
            Alerts(
                grace=rng.choice([None, shortest / 10, 2 * shortest]),
                failures=rng.choice([1, 2, 3]),
                takeovers=rng.choice([1, 2]),
                pause=length / 10,
                remind=length / rng.choice([3, 20]),
            ),
            max_late=rng.choice([None, every, 3 * every]),
        ),
        since,
        until,
        takes=rng.choice([(SECOND, SECOND), (SECOND, shortest / 2), (shortest / 2, shortest)]),
        fails=rng.choice([0, 0.2, 0.5]),
        dies=rng.choice([0, 0.1, 0.3]),
        failing=stretches(rng.choice([0, 0, 1])),
        down=stretches(rng.choice([0, 2, 8])),
        database_down=away,
        paused=paused,
        every=every,
    )


SEEDS = (3, 9, 13, 16, 22, 36, 73, 88, 131)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_simulated_is_what_the_store_does(url: str, seed: int) -> None:
    given = scenario(seed)
    print(f"seed {seed}: {given}")
    done = compare(url, given, seed)
    print({what: len(entries) for what, entries in done.items()})


def test_much_happens_in_them() -> None:
    found = [simulate(scenario(seed), random.Random(seed)) for seed in SEEDS]
    outcomes = {run.outcome for each in found for run in each.runs}
    assert outcomes >= {
        *(Outcome.RUNNING, Outcome.SUCCEEDED, Outcome.BUSY, Outcome.PAUSED, Outcome.LATE),
        *(Outcome.FAILED, Outcome.TIMED_OUT, Outcome.ABANDONED),
    }
    assert {tick.disposition for each in found for tick in each.ticks()} == set(Disposition) - {Disposition.FUTURE}
    kinds = {alert.kind for each in found for alert in each.incidents}
    assert kinds == {Kind.ABSENCE, Kind.FAILURES, Kind.TAKEOVERS, Kind.PAUSE}
    assert any(alert.reminders for each in found for alert in each.incidents)
    assert any(run.learnt_at for each in found for run in each.runs)
    assert {run.trigger for each in found for run in each.runs} == {"schedule", "sensor"}


# ── broken ones ──────────────────────────────────────────────────────────────────────────────────────────────────────


def covers_to_its_end(real: Any, row: Any, holder: Any, at: datetime) -> Any:
    if holder.ends is Outcome.SUCCEEDED:
        holder.wanted_at = at
    return real(row, holder, at)


def counts_each_failure(real: Any, row: Any, tick: datetime, at: datetime) -> None:
    row.failed_ticks = []
    real(row, tick, at)


def remembers_nothing(real: Any, row: Any, late_tick: datetime | None, next_due_at: datetime | None) -> None:
    real(row, late_tick, next_due_at)
    row.paused_before = row.worked = []


def forgets_outages(real: Any, life: Any, before: datetime) -> None:
    life._looked_at = None
    real(life, before)


def delays_nothing(real: Any, row: Any, until: datetime | None, at: datetime) -> None:
    real(row, until, at)
    row.paused_before = []


# With a seed in which it matters.
BROKEN: dict[str, tuple[int, type, str, Callable[..., Any]]] = {
    "ticks are covered up to the run's end": (88, simulation._Row, "end_run", covers_to_its_end),
    "each failure counts": (13, simulation._Row, "_count_failure", counts_each_failure),
    "what delayed one tick never delays the next": (73, simulation._Row, "_wait_for", remembers_nothing),
    "nobody learns of runs that could not write": (9, simulation._Row, "learn_run", lambda *_: None),
    "a pause that is over delayed nothing": (73, simulation._Row, "pause", delays_nothing),
    "a run at work is not noted": (13, simulation._Row, "_note_work", lambda *_: None),
    "nothing is ever wrong": (13, simulation._Life, "_is_quiet", lambda *_: True),
    "a gap is not noted": (16, simulation._Life, "_look", forgets_outages),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_simulation_is_caught(url: str, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    seed, owner, method, broken = BROKEN[name]
    done, real = compare(url, scenario(seed), seed), getattr(owner, method)
    monkeypatch.setattr(owner, method, lambda *given: broken(real, *given))
    with pytest.raises(AssertionError):
        check(scenario(seed), seed, done)


BROKEN_STORE = {
    "each failure counts": (
        13,
        "count_failure",
        {"(p_tick is null or p_tick <> all (failed_ticks))": "true"},
    ),
    "a late tick is forgotten": (
        13,
        "acquire",
        {"late_tick = coalesce(late_tick, case when next_due_at <= p_tick then next_due_at end)": "late_tick = null"},
    ),
    "a gap is not noted": (
        16,
        "begin_pass",
        {"if v_every is not null and v_last": "if false and v_last"},
    ),
}


@pytest.mark.parametrize("name", BROKEN_STORE)
def test_a_broken_store_is_caught(url: str, name: str) -> None:
    seed, function, replaced = BROKEN_STORE[name]
    variants.replace(url, function, replaced)
    with pytest.raises(AssertionError):
        compare(url, scenario(seed), seed)
