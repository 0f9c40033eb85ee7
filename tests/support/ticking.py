"""A job whose ticks a test lives through: it sets the clock of both sides, wakes the job, and asks `gaffer`."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from typing import Any

from click.testing import CliRunner, Result

from gaffer_dagster.cli import main
from gaffer_dagster.domain.bounds import Bounds
from gaffer_dagster.domain.due import Due, EachInterval, NewRows
from gaffer_dagster.domain.job import JobRecord
from gaffer_dagster.domain.run import RunRecord
from gaffer_dagster.domain.schedule import Schedule
from gaffer_dagster.domain.spec import JobSpec
from gaffer_dagster.engine.batch import Batch
from gaffer_dagster.engine.registry import Definition, register_all
from gaffer_dagster.store import db, runs
from gaffer_dagster.store import jobs as job_table
from gaffer_dagster.testing import Clock
from tests.support import jobs

MIDNIGHT = datetime(2027, 3, 1, tzinfo=timezone.utc)
DAY, HOUR, MINUTE, SECOND = timedelta(days=1), timedelta(hours=1), timedelta(minutes=1), timedelta(seconds=1)
ROWS, HOURS = NewRows("source", "id"), EachInterval(settle="1s")


class BrokenError(Exception):
    """What the work of a test raises to fail."""


def at(hours: float) -> datetime:
    return MIDNIGHT + hours * HOUR


def hours(time: datetime | None) -> float | None:
    """Since midnight."""
    return None if time is None else round((time - MIDNIGHT) / HOUR, 4)


def spec(cron: str = "0 * * * *", due: Due = ROWS, name: str = "job", zone: str = "UTC", **given: Any) -> JobSpec:
    bounds = {key: given.pop(key) for key in ("batches", "batch_rows", "timeout") if key in given}
    return JobSpec(name, due, Schedule(cron, zone), Bounds(**bounds), **given)


def invoke(url: str, *words: str) -> Result:
    return CliRunner().invoke(main, list(words), env={"GAFFER_DATABASE_URL": url})


class Ticking:
    """Made known half an hour before midnight. Times are hours since midnight, UTC."""

    def __init__(self, url: str, clock: Clock, job: JobSpec) -> None:
        self.url, self.clock, self.spec = url, clock, job
        jobs.make_source(url)
        jobs.execute(url, "create table windows (n int generated always as identity, since timestamptz)")
        self.register(-0.5)

    def register(self, when: float, *specs: JobSpec) -> None:
        """By whoever registers, such as the sensor; the newest of `specs` is the one that runs from now on."""
        self.clock.set(at(when))
        for each in specs or (self.spec,):
            with db.connect(self.url, application_name="test") as connection:
                register_all(connection, [Definition(each, None)], worker_clock=self.clock.now)
            self.spec = each

    def run(
        self, when: float, rows: int = 0, *, work: Callable[[Any], Any] | None = None, fails: bool = False, **told: Any
    ) -> RunRecord:
        """The run that the newest tick wakes; it finds this many new rows. What the work raises is only recorded."""
        self.clock.set(at(when))
        jobs.add_rows(self.url, rows)
        if work is None:
            work = jobs.copy_rows if isinstance(self.spec.due, NewRows) else self._take
        if fails:
            work = _break
        with suppress(BrokenError):
            jobs.run(self.spec, self.url, work, **{"trigger": "schedule", "worker_clock": self.clock.now} | told)
        with db.connect(self.url, application_name="test") as connection:
            return runs.history(connection, self.spec.name, 1)[0]

    def gaffer(self, *words: str) -> str:
        done = invoke(self.url, *words)
        assert done.exit_code == 0, done.output
        return done.stdout

    def ledger(self, since: float = -0.5, until: float = 12) -> list[tuple[float, str, int | None]]:
        """Hour, disposition and run of each tick."""
        answer = self.gaffer("ticks", self.spec.name, "--json", f"--since={at(since)}", f"--until={at(until)}")
        told = [json.loads(line) for line in answer.splitlines()]
        return [(hours(datetime.fromisoformat(each["tick"])) or 0, each["disposition"], each["run"]) for each in told]

    def dispositions(self, until: float = 12) -> list[str]:
        return [disposition for _, disposition, _ in self.ledger(until=until)]

    def counted(self) -> int:
        """The ticks that the runs say that they covered."""
        return jobs.query(self.url, "select coalesce(sum(ticks_covered), 0)::int from gaffer.job_runs")[0][0]

    @property
    def record(self) -> JobRecord:
        with db.connect(self.url, application_name="test") as connection:
            return job_table.get(connection, self.spec.name)

    @property
    def due(self) -> float | None:
        """The hour of the earliest tick that is neither covered nor skipped."""
        return hours(self.record.open_tick)

    def wanted(self) -> list[str]:
        """Why a run is wanted without waiting for a tick."""
        with db.connect(self.url, application_name="test") as connection:
            return [each.why for each in job_table.wanted(connection, [self.spec.name])]

    def windows(self) -> list[float | None]:
        """When the intervals that were done began."""
        return [hours(since) for (since,) in jobs.query(self.url, "select since from windows order by n")]

    def _take(self, batch: Batch) -> None:
        batch.insert("windows", [{"since": batch.window.since}])


def _break(batch: Batch) -> None:
    raise BrokenError
