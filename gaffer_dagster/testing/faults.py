"""What happens to runs in production, done on purpose to a job of yours: to real processes, on a real Postgres.

    from gaffer_dagster.testing import faults

    def test_my_job(gaffer_survives):
        gaffer_survives(carrier_delay, more=add_flights, holds=lambda: rows("flights") == rows("carrier_delay_part"))

A fault is a callable that is given a `Bench`; `all()` are those of this module, and yours can stand beside them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from gaffer_dagster.engine.run import Work
from gaffer_dagster.engine.steps import Station
from gaffer_dagster.errors import BadInputError
from gaffer_dagster.testing.bench import Bench, Fault, station_of, why
from gaffer_dagster.testing.invariants import assert_invariants, is_watched, watch
from gaffer_dagster.testing.processes import Engines
from gaffer_dagster.testing.proxy import Cut, cutting, refuse_unreadable
from gaffer_dagster.testing.waits import settle

if TYPE_CHECKING:
    from gaffer_dagster.testing.jobs import Job

_OVER = (Station.ENDED, Station.REPORTED)


@dataclass(frozen=True)
class _AtStation:
    at: Station | str

    def __post_init__(self) -> None:
        object.__setattr__(self, "at", self.station)

    @property
    def station(self) -> Station:
        return station_of(self.at)


@dataclass(frozen=True)
class Kill(_AtStation):
    """kill -9 of a run that stands at this station (or its value, such as `"applied"`; another raises `BadInputError`).
    The next one comes when its lease is over."""

    def __str__(self) -> str:
        return f"kill at {self.at}"

    def __call__(self, bench: Bench) -> None:
        bench.start_and_reach(self.station).kill()
        bench.pass_the_lease()


@dataclass(frozen=True)
class Pause(_AtStation):
    """A run that is stopped (SIGSTOP) at this station past its lease, until another has taken over; then it goes on,
    and must commit nothing."""

    def __str__(self) -> str:
        return f"pause at {self.at}"

    def __call__(self, bench: Bench) -> None:
        first = bench.start_and_reach(self.station)
        first.pause()
        bench.pass_the_lease()
        second = bench.start_and_reach(Station.LEASED)
        first.resume()
        first.go()
        ending = first.ends()
        if ending.error is None and self.station not in _OVER:
            raise AssertionError(f"the run that was paused heard nothing of the one that took over: {ending}")
        second.go()
        second.ends()


@dataclass(frozen=True)
class CutCommit:
    """The connection is cut at the first COMMIT of a batch: before it is sent, once it is, or before its answer
    arrives. The run itself finds out whether it took effect, and goes on. The server has to take connections
    without TLS."""

    when: Cut

    def __str__(self) -> str:
        return f"cut at COMMIT, {self.when}"

    def __call__(self, bench: Bench) -> None:
        refuse_unreadable(bench.url)
        with cutting(bench.url, ("commit_batch", self.when)) as proxy:
            ending = bench.start(url=proxy.url).ends()
            if not proxy.is_through:
                raise AssertionError(f"no batch was committed, so nothing was cut: {why(ending)}")
        if ending.error is not None:
            raise AssertionError(f"the run did not go on after the cut:\n{ending.trace}")


@dataclass(frozen=True)
class DoubleTick:
    """A second run comes while the first is in the middle of a batch."""

    def __str__(self) -> str:
        return "double tick"

    def __call__(self, bench: Bench) -> None:
        first = bench.start_and_reach(Station.DUE)
        second = bench.start().ends()
        first.go()
        for ending in (first.ends(), second):
            if ending.error is not None:
                raise AssertionError(f"one of the two runs failed:\n{ending.trace}")


@dataclass(frozen=True)
class MissedTicks:
    """Nobody wakes the job for this many ticks. A job without a schedule misses none."""

    ticks: int = 3

    def __str__(self) -> str:
        return f"{self.ticks} missed ticks"

    def __call__(self, bench: Bench) -> None:
        bench.pass_ticks(self.ticks)


def all() -> list[Fault]:  # noqa: A001 — read as faults.all()
    """One of each kind: a kill and a pause at each station of the line, a cut at each side of a COMMIT, a second run
    beside the first, ticks that never came."""
    cuts = [when for when in Cut if when is not Cut.NONE]
    return [*map(Kill, Station), *map(Pause, Station), *map(CutCommit, cuts), DoubleTick(), MissedTicks()]


def survives(
    job: Job,
    url: str,
    *,
    holds: Callable[[], object],
    more: Callable[[], object] | None = None,
    faults: Iterable[Fault] | None = None,
    work: Work | None = None,
    resources: Mapping[str, object] | None = None,
    patience: float = 60.0,
) -> None:
    """Does each fault to the job, then lets healthy runs do what is due, and looks whether all is as it must be: the
    invariants of this package (`assert_invariants`), and yours. Raises `AssertionError`, which names the fault.

    `job` is an asset, or a `JobSpec` with its function as `work`; either is loaded anew in processes of its own, so it
    must be defined at the top of a module, or come from `job_in`. `url` is a scratch database, to which the job's own
    `GafferResource` gives way, and which is GAFFER_DATABASE_URL in those processes.
    `holds` is your invariant of what is done when nothing is left to do, such as that the target equals the source: it
    raises, or returns False, where it does not hold. `more` adds what will be due, before each fault; after it, the
    clock passes a tick. `faults`: those of `all()`, or some, or your own. `resources`: others that the asset needs,
    which must go to another process. `patience`: how many seconds a run may take, or say nothing.
    """
    for name, given in (("holds", holds), ("more", more)):
        if not (callable(given) or (name == "more" and given is None)):
            raise BadInputError(f"{name}={given!r} is no function; write one that takes nothing, such as a lambda")
    if not is_watched(url):
        watch(url)
    with Engines(patience) as made, tempfile.TemporaryDirectory(prefix="gaffer-faults-") as folder:
        bench = Bench(job, url, made, Path(folder), work=work, resources=resources)
        bench.do_what_is_due()  # makes the job known: what begins at its next tick will be due
        bench.pass_ticks()
        bench.do_what_is_due()
        for fault in [_nothing, *(all() if faults is None else faults)]:
            try:
                if more is not None:
                    more()
                bench.pass_ticks()
                settle(url)
                fault(bench)
                bench.do_what_is_due()
                assert_invariants(url, at_rest=True)
                _ask(holds, fault)
            except Exception as error:
                raise AssertionError(f"after {'no fault at all' if fault is _nothing else fault}: {error}") from error
            finally:
                made.destroy()


class Survives(Protocol):
    """The fixture `gaffer_survives`: `survives` in its database."""

    def __call__(
        self,
        job: Job,
        *,
        holds: Callable[[], object],
        more: Callable[[], object] | None = None,
        faults: Iterable[Fault] | None = None,
        work: Work | None = None,
        resources: Mapping[str, object] | None = None,
        patience: float = 60.0,
    ) -> None: ...


def _nothing(_bench: Bench) -> None:
    pass


def _ask(holds: Callable[[], object], fault: Fault) -> None:
    # What does not hold without a fault, either, has nothing to do with where it is written.
    cure = " (is something written outside of the batch's own connection, or kept outside of the database?)"
    begins = f"your own invariant does not hold{'' if fault is _nothing else cure}"
    try:
        told = holds()
    except Exception as error:
        raise AssertionError(f"{begins}: {str(error) or type(error).__name__}") from error
    if told is not None and not told:
        raise AssertionError(f"{begins}: it returned {told!r}")
