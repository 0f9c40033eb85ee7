"""One run, a straight line.

    ▼ LEASED      acquire, or BUSY / PAUSED
    ┌ BEGIN
    ▼ DUE         what is due, read in the batch's transaction
    ▼ APPLIED     the user's function
    └ COMMITTED   verify the fence, advance the watermark, count, renew, COMMIT: one message
    ▼ ENDED       or look again, if a wake-up came meanwhile
    ▼ REPORTED    by whoever asked for the run

The fence decides who may commit; nothing in this module does. What this module decides is when to stop, when to do a
batch again, and what to call the end.
"""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any
from uuid import uuid4

from gaffer_dagster.domain.lease import LARGEST_SKEW, LEASE, Grant, Lease
from gaffer_dagster.domain.run import Outcome, RunRecord
from gaffer_dagster.domain.spec import JobSpec
from gaffer_dagster.domain.watermark import Position
from gaffer_dagster.engine.batch import Batch
from gaffer_dagster.engine.keeper import Keeper, Stop
from gaffer_dagster.engine.log import Log
from gaffer_dagster.engine.sources import Page, Source, source_of
from gaffer_dagster.engine.steps import Observer, Station
from gaffer_dagster.errors import (
    BatchEndedError,
    ClockSkewError,
    DatabaseUnavailableError,
    DeadlinePassedError,
    GafferError,
    LeaseLostError,
)
from gaffer_dagster.store import batches, db, horizon, jobs, leases, migrate, runs

Work = Callable[[Batch], Mapping[str, Any] | None]

_ATTEMPTS = 5
# A holder that is just ending frees the lease within this; a holder at work is seen at once.
_BUSY_WAIT = timedelta(seconds=1)
# The keeper cuts a batch at the deadline; the server's own limit is for a client that is stopped, and comes later.
_SLACK = timedelta(seconds=5)
_COUNTING = timedelta(seconds=30)


class Run:
    """A run that has the lease, or the word why it has not (`outcome` is then `busy` or `paused`, and it is over).

    Iterate over it for the batches, each of which commits when the next one is asked for; or hand `apply` a function,
    which also does a batch again after a deadlock, a serialization failure or a lost connection.
    """

    def __init__(
        self,
        spec: JobSpec,
        url: str,
        *,
        trigger: str,
        tick: datetime | None,
        dagster_run_id: str | None,
        parent: int | None,
        despite_pause: bool,
        context: Any,
        log: Log,
        observe: Observer,
        lease: timedelta,
        worker_clock: Callable[[], datetime],
    ) -> None:
        self.spec = spec
        self.outcome = Outcome.RUNNING
        self.record: RunRecord | None = None
        self.metadata: dict[str, Any] = {}
        self.items = 0
        self._url = url
        self._trigger = trigger
        self._tick = tick
        self._dagster_run_id = dagster_run_id
        self._parent = parent
        self._despite_pause = despite_pause
        self._context = context
        self._log = log.bind(job=spec.name)
        self._observe = observe
        self._duration = lease
        self._worker_clock = worker_clock
        self._limits = spec.limits
        self._owner = f"{socket.gethostname()}:{os.getpid()}:{uuid4().hex[:8]}"
        self._batches = 0
        self._attempts = 0
        self._exhausted = False  # the last look found nothing due any more
        self._in_batch = False  # what runs on the connection may be cancelled
        self._longest = timedelta()
        self._connection: db.Connection | None = None
        self._granted: Lease | None = None
        # Asks again what we asked, as long as its answer has not been taken note of.
        self._unanswered: Callable[[], object] | None = None
        self._keeper: Keeper | None = None
        # Set once the lease is held:
        self._source: Source
        self._deadline: float
        self._position: Position | None
        self._wanted_at: datetime | None
        self._wanted_now: datetime | None
        self._uncovered_from: datetime
        self._looked_at: datetime

    # ── the line ─────────────────────────────────────────────────────────────────────────────────────────────────

    def __iter__(self) -> Iterator[Batch]:
        while (opened := self._next()) is not None:
            page, batch, began = opened
            yield batch
            try:
                self._commit(page, batch, began)
            except Exception as error:
                self._again_or_raise(error)

    def apply(self, work: Work) -> None:
        """Hands every batch to `work`, whose returned metadata is kept for the report."""
        while (opened := self._next()) is not None:
            page, batch, began = opened
            try:
                told = work(batch)
                self._commit(page, batch, began)
            except Exception as error:
                self._again_or_raise(error)
            else:
                self.metadata.update(told or {})

    def begin(self) -> None:
        """LEASED, or the outcome says why not."""
        started = time.monotonic()
        grant, database_now = self._acquire()
        if grant.outcome != "granted":
            self.outcome = Outcome(grant.outcome)
            if grant.run_id is not None:
                self.record = runs.get(self._work(), grant.run_id)
            self._log.info(grant.outcome, holder=grant.holder)
            self._work().close()
            return
        assert grant.first_seen_at is not None  # noqa: S101 — granted
        self._deadline = started + self._limits.timeout.total_seconds()
        self._keeper = Keeper(
            lambda: db.connect(self._url, application_name=f"gaffer:{self.spec.name}:keeper"),
            self._lease,
            self._duration,
            deadline=self._deadline,
            parent=self._parent,
            cancel=self._cancel,
            log=self._log,
        )
        self._keeper.start()
        self._log = self._log.bind(run_id=self._lease.run_id)
        self._log.info(
            "leased",
            fence=self._lease.fence,
            owner=self._owner,
            tick=self._tick,
            deadline_at=grant.deadline_at,
        )
        self._observe(Station.LEASED)
        apart = self._worker_clock() - database_now
        if abs(apart) > LARGEST_SKEW:
            raise ClockSkewError(
                f"the clock of this worker ({(database_now + apart).isoformat()}) and the database's "
                f"({database_now.isoformat()}) are {abs(apart)} apart, more than {LARGEST_SKEW}; set them right (NTP)"
            )
        self._source = source_of(self.spec, grant.first_seen_at)
        while True:
            try:
                self._source.look(self._work(), self._looked_at, self._position, grant.cluster)
                break
            except Exception as error:
                self._again_or_raise(error)
        self._attempts = 0

    def fail(self, error: BaseException) -> BaseException:
        """Ends the run after an error; returns what to raise."""
        if self.outcome is Outcome.RUNNING and not isinstance(error, Exception):
            self._hear_answer()
        if self.outcome is not Outcome.RUNNING or self._granted is None:
            self._drop_connection()
            return error
        stop = self._stopped
        cut = db.was_cut(error) or db.lost_connection(error) or isinstance(error, BatchEndedError)
        if isinstance(error, LeaseLostError) or (stop is Stop.LOST and cut):
            outcome = Outcome.LOST_LEASE
            error = _instead(error, LeaseLostError(f"another run of job {self.spec.name!r} took over"))
        elif isinstance(error, DeadlinePassedError) or (stop is Stop.DEADLINE and cut):
            outcome = Outcome.TIMED_OUT
            error = _instead(error, DeadlinePassedError(self._too_slow()))
        elif stop is Stop.ORPHANED or not isinstance(error, Exception):
            outcome = Outcome.INTERRUPTED
        else:
            outcome = Outcome.FAILED
        self._release_keeper()
        self._drop_connection()
        # An error that was swallowed, and came back when the batch was used again, is the one to record.
        first = error.__cause__ if isinstance(error, BatchEndedError) else None
        try:
            self._end(outcome, error=first or error)
        except LeaseLostError:
            pass  # recorded as such; the first error is the one to hear
        except Exception as second:  # the first error is the one to hear; the lease runs out by itself
            self._log.error("not recorded", outcome=str(outcome), error=db.primary_message(second))
            self.outcome = outcome
        return error

    def close(self) -> None:
        """The caller is done. A loop that was left early leaves its batch undone."""
        if self.outcome is Outcome.RUNNING:
            db.roll_back(self._work())
            if self._ends():
                return
            self._end(Outcome.CAPPED, backlog=self.backlog())

    def reported(self) -> None:
        """REPORTED: whoever asked for the run was told."""
        self._observe(Station.REPORTED)

    # ── a batch ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _next(self) -> tuple[Page, Batch, float] | None:
        while self.outcome is Outcome.RUNNING:
            try:
                opened = self._open()
                if opened is not None:
                    return opened
                self._ends()
            except Exception as error:
                self._again_or_raise(error)
        return None

    def _open(self) -> tuple[Page, Batch, float] | None:
        """DUE: the next batch with its transaction open; None: nothing is due, or a bound is reached."""
        while True:
            if self._stopped is not Stop.DEADLINE:  # past it no batch begins, so that none is cut either
                self._check()
            left = self._left()
            if self._batches >= self._limits.batches or left <= self._longest:
                return None
            began = time.monotonic()
            self._batch_id = uuid4()
            connection = self._work()
            self._in_batch = True
            batches.begin(connection, self._batch_id, min(self._limits.batch_timeout, left + _SLACK))
            page = self._source.page(connection, self._position, self._limits.batch_rows)
            if isinstance(page, Page):
                break
            db.roll_back(connection)
            if page is None:
                self._exhausted = True
                return None
            if page.at_least >= left - self._longest or left < timedelta(seconds=1):
                self._log.info("not settled in time", why=page.why)
                return None
            self._log.debug("waits", why=page.why)
            time.sleep(min(0.5, max(0.05, page.at_least.total_seconds())))
        batch = Batch(
            connection,
            page,
            self._source,
            number=self._batches + 1,
            fence=self._lease.fence,
            run_id=self._lease.run_id,
            check=self._check,
            log=self._log,
            context=self._context,
        )
        self._log.debug("due", batch=batch.number, items=page.items)
        self._observe(Station.DUE)
        return page, batch, began

    def _commit(self, page: Page, batch: Batch, began: float) -> None:
        """APPLIED, then COMMITTED."""
        swallowed = batch.close()
        if swallowed is not None:
            raise swallowed
        self._check()
        self._observe(Station.APPLIED)
        try:
            batches.commit(
                self._work(),
                self._lease,
                self._batch_id,
                since=self._position,
                until=page.position,
                cluster=self._source.cluster,
                items=page.items,
                duration=self._duration,
            )
        except Exception as error:
            if not db.lost_connection(error) or not self._was_committed(batch.number):
                raise
        self._position = page.position
        self._batches = batch.number
        self.items += page.items
        self._attempts = 0
        self._longest = max(self._longest, timedelta(seconds=time.monotonic() - began))
        self._log.info("committed", batch=batch.number, items=page.items, fence=self._lease.fence)
        self._observe(Station.COMMITTED)

    def _was_committed(self, number: int) -> bool:
        """What became of a COMMIT whose answer was lost: take the next fence, then look for the evidence."""
        assert self._keeper is not None  # noqa: S101 — it lives as long as the lease
        self._keeper.hold_still()
        old, new_id = self._lease, uuid4()

        def ask() -> Grant:
            self._unanswered = ask
            grant = leases.supersede(self._work(), old, new_id, self._duration)
            assert grant.fence is not None  # noqa: S101
            self._granted = replace(old, fence=grant.fence, lease_id=new_id)
            self._unanswered = None
            return grant

        while True:
            try:
                self._reconnect()
                grant = ask()
                break
            except Exception as error:
                again = db.lost_connection(error) or db.was_cut(error) or isinstance(error, DatabaseUnavailableError)
                if not again or self._left() <= timedelta():
                    raise
                self._log.warning("commit is unknown", batch=number, error=db.primary_message(error))
                time.sleep(random.uniform(0.1, 0.5))  # noqa: S311 — spreads the load, nothing secret
        assert grant.batches is not None  # noqa: S101
        self._keeper.go_on(self._lease)
        self._log.info("superseded", batch=number, fence=grant.fence, committed=grant.batches >= number)
        return grant.batches >= number

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _ends(self) -> bool:
        """ENDED, or False: a wake-up came since the last look, so look again."""
        self._in_batch = False
        backlog = 0 if self._exhausted else self.backlog()
        if backlog:
            self._end(Outcome.CAPPED, backlog=backlog)
            return True
        if self._end(Outcome.SUCCEEDED, backlog=0):
            return True
        looks_at = horizon.now(self._work())
        self._source.look(self._work(), looks_at, self._position, self._source.cluster)
        # Only now: where the look fails and is done again, the end must be told again to look.
        self._looked_at, self._wanted_at, self._exhausted = looks_at, self._wanted_now, False
        self._log.info("looks again", wanted_at=self._wanted_at)
        return False

    def _end(self, outcome: Outcome, *, backlog: int | None = None, error: BaseException | None = None) -> bool:
        """ENDED. False: wanted. Repeated where its answer is lost, or a late cancel hits it."""
        self._in_batch = False
        schedule = self.spec.schedule
        done = outcome is Outcome.SUCCEEDED
        covered = None
        if schedule is not None and done and self._uncovered_from < self._looked_at:
            covered = schedule.count(self._uncovered_from, self._looked_at)
        attempt = 0
        while True:
            try:
                ending = runs.end(
                    self._work(),
                    self._lease,
                    outcome,
                    wanted_at=self._wanted_at,
                    covered_until=self._looked_at,
                    success_tick=None if schedule is None else schedule.latest(self._looked_at),
                    ticks_covered=covered,
                    backlog=backlog,
                    next_run_at=None if schedule is None else schedule.next(self._looked_at),
                    next_due_at=None if schedule is None else schedule.next(self._looked_at),
                    sqlstate=None if error is None else db.sqlstate(error),
                    error=None if error is None else db.primary_message(error)[:2000],
                )
                if ending.result == "wanted":
                    self._wanted_now = ending.wanted_at
                    return False
                record = runs.get(self._work(), self._lease.run_id)
                break
            except Exception as problem:
                attempt += 1
                passing = db.worth_repeating(problem) or db.was_cut(problem)
                if attempt == _ATTEMPTS or not (passing or isinstance(problem, DatabaseUnavailableError)):
                    raise
                time.sleep(random.uniform(0.05, 0.2) * 2**attempt)  # noqa: S311
                self._drop_connection()
        self._release_keeper()
        self.record = record
        self.outcome = Outcome.LOST_LEASE if ending.result == "lost_lease" else outcome
        self._log_end(record)
        self._work().close()
        if self.outcome is Outcome.LOST_LEASE and outcome is not Outcome.LOST_LEASE:
            raise LeaseLostError(
                f"another run of job {self.spec.name!r} took over before this one ended; what it had committed stays"
            )
        self._observe(Station.ENDED)
        return True

    def backlog(self) -> int:
        """What is due and left, up to this run's bound."""
        connection = self._work()
        db.roll_back(connection)
        batches.begin(connection, uuid4(), min(self._limits.batch_timeout, _COUNTING))
        try:
            return self._source.backlog(connection, self._position)
        finally:
            db.roll_back(connection)

    def _log_end(self, record: RunRecord) -> None:
        tell = self._log.error if record.outcome.is_failure else self._log.info
        tell(
            "ended",
            outcome=str(record.outcome),
            started_at=record.started_at,
            ended_at=record.ended_at,
            items=record.items,
            batches=record.batches,
            backlog=record.backlog,
            fence=record.fence,
            owner=record.owner,
            next_run_at=record.next_run_at,
            **({"error": record.error, "sqlstate": record.sqlstate} if record.error else {}),
        )

    # ── stopping, and trying again ───────────────────────────────────────────────────────────────────────────────

    def _check(self) -> None:
        """Raises where nothing more may be written."""
        stop = self._stopped
        if stop is Stop.LOST:
            raise LeaseLostError(f"another run of job {self.spec.name!r} took over; nothing more is written")
        if stop is Stop.DEADLINE:
            raise DeadlinePassedError(self._too_slow())
        if stop is Stop.ORPHANED:
            raise GafferError(
                f"the process that started this run of job {self.spec.name!r} is gone; nothing more is written"
            )

    def _too_slow(self) -> str:
        return (
            f"batch {self._batches + 1} of job {self.spec.name!r} was cut at the run's deadline of "
            f"{self._limits.timeout}; {self._batches} were committed. Let a batch be smaller "
            "(bounds: batch_rows) or the timeout longer"
        )

    def _again_or_raise(self, error: Exception) -> None:
        """Makes ready to do the batch again under the same fence, if that may help; else raises the error."""
        self._attempts += 1
        stopped = self._stopped is not None or self._left() <= timedelta()
        passing = db.worth_repeating(error) or isinstance(error, DatabaseUnavailableError)
        if stopped or self._attempts >= _ATTEMPTS or not passing:
            raise error
        pause = random.uniform(0.05, 0.2) * 2**self._attempts  # noqa: S311
        self._log.warning(
            "does the batch again",
            batch=self._batches + 1,
            error=db.primary_message(error),
            sqlstate=db.sqlstate(error),
        )
        time.sleep(pause)
        if db.lost_connection(error):
            self._drop_connection()
        elif self._connection is not None:
            db.roll_back(self._connection)

    def _left(self) -> timedelta:
        return timedelta(seconds=self._deadline - time.monotonic())

    @property
    def _lease(self) -> Lease:
        assert self._granted is not None  # noqa: S101 — asked for only while it is held
        return self._granted

    @property
    def _stopped(self) -> Stop | None:
        if self._keeper is None:
            return None
        # The keeper looks only now and then; what the server cuts at its own limit meanwhile is cut at the deadline.
        past = Stop.DEADLINE if self._left() <= timedelta() else None
        return self._keeper.stopped or past

    def _release_keeper(self) -> None:
        if self._keeper is not None:
            self._keeper.end()

    # ── connections ──────────────────────────────────────────────────────────────────────────────────────────────

    def _work(self) -> db.Connection:
        if self._connection is None:
            self._connection = db.connect(self._url, application_name=f"gaffer:{self.spec.name}")
        return self._connection

    def _reconnect(self) -> None:
        self._drop_connection()
        self._work()

    def _drop_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            db.give_up(connection)

    def _cancel(self) -> None:
        connection = self._connection
        if connection is not None and self._in_batch:
            db.cancel_running(connection)

    def _acquire(self) -> tuple[Grant, datetime]:
        """The grant, and the database's time before it."""
        lease_id = uuid4()

        def ask(wait: timedelta = _BUSY_WAIT) -> Grant:
            self._unanswered = ask
            grant = leases.acquire(
                self._work(),
                job=self.spec.name,
                slot=0,
                lease_id=lease_id,
                owner=self._owner,
                lease=self._duration,
                timeout=self._limits.timeout,
                trigger=self._trigger,
                tick=self._tick,
                dagster_run_id=self._dagster_run_id,
                spec_hash=self.spec.hash,
                wait=wait,
                despite_pause=self._despite_pause,
            )
            if grant.run_id is not None and grant.fence is not None and grant.first_seen_at is not None:
                self._position = grant.position
                self._wanted_at = grant.wanted_at
                self._uncovered_from = grant.covered_until or grant.first_seen_at
                self._looked_at = grant.granted_at
                self._granted = Lease(self.spec.name, 0, grant.run_id, grant.fence, lease_id)
            self._unanswered = None
            return grant

        attempt = 0
        while True:
            try:
                connection = self._work()
                now = migrate.verify(connection)
                schedule = self.spec.schedule
                if self._tick is None and schedule is not None:
                    self._tick = schedule.latest(now)
                jobs.register(connection, self.spec, next_due_at=None if schedule is None else schedule.next(now))
                grant = ask(timedelta())
                return (ask() if grant.outcome == "busy" else grant), now
            except Exception as error:
                attempt += 1
                if attempt >= 3 or not db.worth_repeating(error):
                    raise
                self._drop_connection()
                time.sleep(random.uniform(0.1, 0.3))  # noqa: S311

    def _hear_answer(self) -> None:
        """Told to stop while the answer of acquire or supersede was on its way: asked again, the database says
        what we hold, so that it can be given back."""
        if self._unanswered is None:
            return
        self._drop_connection()
        try:
            self._unanswered()
        except Exception as error:  # what we may hold runs out by itself
            self._log.warning("not known what is held", error=db.primary_message(error))


@contextmanager
def open_run(
    spec: JobSpec,
    url: str,
    *,
    log: Log,
    trigger: str = "manual",
    tick: datetime | None = None,
    dagster_run_id: str | None = None,
    parent: int | None = None,
    despite_pause: bool = False,
    context: Any = None,
    observe: Observer = lambda station: None,
    lease: timedelta = LEASE,
    worker_clock: Callable[[], datetime] = lambda: datetime.now(timezone.utc),
) -> Generator[Run]:
    """A run of the job: leased at the start, ended and recorded whatever happens in the block.

    `tick`: the scheduled time that woke it, if one did. `parent`: the process whose end ends the run. Raises what the
    block raised; `LeaseLostError` or `DeadlinePassedError` where that was only the consequence.
    """
    run = Run(
        spec,
        url,
        trigger=trigger,
        tick=tick,
        dagster_run_id=dagster_run_id,
        parent=parent,
        despite_pause=despite_pause,
        context=context,
        log=log,
        observe=observe,
        lease=lease,
        worker_clock=worker_clock,
    )
    try:
        run.begin()
        yield run
        run.close()
    except BaseException as error:
        heard = run.fail(error)
        if heard is error:
            raise
        raise heard from error


def _instead(error: BaseException, told: GafferError) -> BaseException:
    return error if isinstance(error, type(told)) else told
