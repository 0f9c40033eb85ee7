"""A job on the test bench: its scratch database, its clock, and runs of it in real processes."""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from gaffer_dagster.database import VARIABLE
from gaffer_dagster.domain.due import EachInterval
from gaffer_dagster.domain.lease import LEASE
from gaffer_dagster.domain.run import Outcome
from gaffer_dagster.engine.run import Work
from gaffer_dagster.engine.steps import Station
from gaffer_dagster.errors import BadInputError
from gaffer_dagster.testing.clock import Clock
from gaffer_dagster.testing.jobs import Place, place_of, run_once, spec_of
from gaffer_dagster.testing.processes import Ending, Engine, Engines, Way
from gaffer_dagster.testing.waits import backends, settle, wait_until

if TYPE_CHECKING:
    from gaffer_dagster.testing.jobs import Job

_AGAIN = 100


class Bench:
    """What a fault is given. `url`: the scratch database; `clock`: its time, which the processes' engines share."""

    def __init__(
        self,
        job: Job,
        url: str,
        engines: Engines,
        folder: Path,
        *,
        work: Work | None = None,
        resources: Mapping[str, object] | None = None,
    ) -> None:
        self.url, self.clock = url, Clock(url)
        self._spec, self._place = spec_of(job), place_of(job, work)
        self._engines, self._folder, self._resources = engines, folder, resources or {}

    def start(self, stop_at: Station | None = None, *, url: str | None = None) -> Engine:
        """One run in a process of its own, which stops when it first gets to this station. `url`: how it gets to the
        database, if not straight."""
        stops = [] if stop_at is None else [str(station_of(stop_at))]
        return self._engines.add(_run, self._place, url or self.url, self._folder, self._resources, stops=stops)

    def start_and_reach(self, station: Station) -> Engine:
        """The same, once it stands there. Raises `AssertionError` where it ended before."""
        engine = self.start(station)
        ended = engine.reaches_or_ends(str(station))
        if ended is None:
            return engine
        raise AssertionError(f"the run did not get to {station}: {why(ended)}")

    def pass_the_lease(self) -> None:
        """Moves the clock on until no lease that is held now protects its holder."""
        self.clock.advance(LEASE + timedelta(seconds=1))

    def pass_ticks(self, count: int = 1) -> None:
        """Moves the clock on past this many ticks, and until what is due by them may be handed out."""
        self.clock.set(self._after(count))

    def do_what_is_due(self) -> None:
        """Healthy runs until nothing is left. Raises `AssertionError` where one fails, or something stays left."""
        wait_until(lambda: not backends(self.url), "the server has noticed that the processes are gone")
        settle(self.url)
        for _ in range(_AGAIN):
            ending = self.start().ends()
            if ending.error is not None:
                raise AssertionError(f"the next run failed:\n{ending.trace}")
            if ending.outcome in (Outcome.SUCCEEDED, Outcome.PARTIAL):
                return
            if ending.outcome != Outcome.CAPPED or not ending.items:
                raise AssertionError(f"the next run ended {ending.outcome}, and did not do what was due")
        raise AssertionError(f"after {_AGAIN} runs something is still due; let more= add less, or give larger bounds")

    def _after(self, count: int) -> datetime:
        at, spec = self.clock.now(), self._spec
        settles = getattr(spec.due, "settle", None)
        grids = [] if spec.schedule is None else [spec.schedule]
        if isinstance(spec.due, EachInterval):
            grids.append(spec.intervals.grid)
        for _ in range(count):
            at = max((grid.next(at) for grid in grids), default=at)
        return at + timedelta(seconds=1) + (settles if isinstance(settles, timedelta) else timedelta())


def why(ended: Ending) -> str:
    """Why a run that ended gave a fault no hold, and what to do where nothing was due."""
    if ended.error is not None:
        return f"it failed\n{ended.trace}"
    if ended.outcome == Outcome.SUCCEEDED and not ended.batches:
        return "nothing was due. Let more= add what is due (rows, or time)"
    return f"it ended {ended.outcome}, with {ended.items} items in {ended.batches} batches"


def station_of(at: Station | str) -> Station:
    """Raises `BadInputError`, with those that there are."""
    try:
        return Station(at)
    except ValueError:
        there_are = ", ".join(f"Station.{each.name} ({each.value!r})" for each in Station)
        raise BadInputError(f"at={at!r} is no station of a run; write one of {there_are}") from None


def _run(way: Way, place: Place, url: str, folder: Path, resources: Mapping[str, object]) -> Ending:
    os.environ[VARIABLE] = url
    tempfile.tempdir = str(folder)  # what a killed process leaves there goes with the folder
    try:
        job, work = place.load()
        run = run_once(job, url, work=work, resources=resources, observe=lambda station: way.at(str(station)))
    except BaseException as error:
        return Ending(type(error).__name__, str(error), trace=traceback.format_exc())
    record = run.record
    return Ending(
        outcome=str(run.outcome),
        items=0 if record is None else record.items,
        batches=0 if record is None else record.batches,
        fence=None if record is None else record.fence,
    )


Fault = Callable[[Bench], None]
"""Something that happens to a run. Raises `AssertionError` where it could not, or the run did what it must not."""
