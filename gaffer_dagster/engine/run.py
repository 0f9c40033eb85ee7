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

import math
import random
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any
from uuid import UUID, uuid4

from gaffer_dagster.domain.due import PendingRows
from gaffer_dagster.domain.duration import in_words, show_duration
from gaffer_dagster.domain.held import HeldBy
from gaffer_dagster.domain.item import Failed, Settled
from gaffer_dagster.domain.lease import LEASE, Lease
from gaffer_dagster.domain.progress import Progress
from gaffer_dagster.domain.run import Outcome, RunRecord
from gaffer_dagster.domain.spec import JobSpec
from gaffer_dagster.domain.watermark import Position, TimePosition
from gaffer_dagster.engine import items
from gaffer_dagster.engine.batch import Batch
from gaffer_dagster.engine.holding import Holding, Wish
from gaffer_dagster.engine.keeper import Stop
from gaffer_dagster.engine.log import Log
from gaffer_dagster.engine.redo import RedoSource
from gaffer_dagster.engine.registry import Definition, registration_of
from gaffer_dagster.engine.sources import Page, PendingSource, Source, Wait, source_of
from gaffer_dagster.engine.sql_work import SqlWork
from gaffer_dagster.engine.steps import Observer, Station
from gaffer_dagster.errors import (
    BadInputError,
    BatchEndedError,
    ClockSkewError,
    DatabaseUnavailableError,
    DeadlinePassedError,
    GafferError,
    LeaseLostError,
)
from gaffer_dagster.store import batches, db, history, horizon, pending_rows, protect, runs

Work = Callable[[Batch], Mapping[str, Any] | None]


class _BadWorkError(BadInputError):
    """The function does not say what a function may say: that is no row's fault."""


@dataclass
class _Opened:
    """A batch with its transaction open. `result`: what came of its rows, where they carry their own state."""

    page: Page
    batch: Batch
    batch_id: UUID
    began: float
    result: items.Result | None = None


@dataclass
class _Charged:
    """A row that is worked on alone: an attempt at it is committed, of which the database was told nothing since.
    `before`: what it knew of the row. `alone`: of how many rows it was the first. `error`: how the work on it went."""

    key: str
    before: pending_rows.Item | None
    alone: int
    error: Exception | None = None


_ATTEMPTS = 5
# The keeper cuts a batch at the deadline; the server's own limit is for a client that is stopped, and comes later.
_SLACK = timedelta(seconds=5)
_COUNTING = timedelta(seconds=30)
# The same in the middle of a run, which has better things to do.
_GLANCE = timedelta(seconds=1)
_FOLLOW_UP = timedelta(minutes=1)
# A run that found nothing due, for somebody's open transaction: the next tick may be a day away.
_HELD = timedelta(minutes=5)


class Run:
    """A run that has the lease, or the word why it has not (`outcome` is then `busy` or `paused`, and it is over).

    Iterate over it for the batches, each of which commits when the next one is asked for; or hand `apply` a function,
    which also does a batch again after a deadlock, a serialization failure or a lost connection. `record` is its row,
    once it has ended; `metadata` what the function said; `items` what was committed so far.
    """

    def __init__(
        self,
        spec: JobSpec,
        holding: Holding,
        *,
        context: Any,
        log: Log,
        observe: Observer,
        on_progress: Callable[[Progress], None],
        progress_every: timedelta,
    ) -> None:
        self.spec = spec
        self.outcome = Outcome.RUNNING
        self.record: RunRecord | None = None
        self.metadata: dict[str, Any] = {}
        self.items = 0
        self._holding = holding
        self._context = context
        self._log = log
        self._observe = observe
        self._on_progress = on_progress
        self._progress_every = progress_every.total_seconds()
        self._began = self._told_at = time.monotonic()  # that, and when progress was last told
        self._is_countable = True  # what is left, in a moment
        self._limits = spec.limits
        self._batches = 0
        self._attempts = 0
        self._longest = timedelta()
        self._alone = 0  # batches of one row that is worked on alone: a page of them counts as one
        self._charged: _Charged | None = None
        self._failed: list[Failed] = []
        self._exhausted = False  # the last look found nothing due any more
        self._held_by: HeldBy | None = None  # who keeps something from being due
        self._batch: Batch | None = None
        self._batch_until = math.inf  # a time of time.monotonic()
        self._looked_at: datetime | None = None
        self._wanted_at: datetime | None = None  # as it was before the last look
        self._wanted_now: datetime | None = None
        self._is_redo = False
        self._stays = False  # the work reads its rows where they are
        # Set once the lease is held:
        self._source: Source
        self._position: Position | None

    # ── the line ─────────────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, wish: Wish, parent: int | None, worker_clock: Callable[[], datetime]) -> None:
        """LEASED, or the outcome says why not."""
        started = time.monotonic()
        grant = self._holding.acquire(wish, worker_clock)
        if grant.outcome != "granted":
            self.outcome = Outcome(grant.outcome)
            if grant.run_id is not None:
                self.record = runs.get(self._holding.connection(), grant.run_id)
            self._log.info(grant.outcome, holder=grant.holder)
            self._holding.drop()
            if self.outcome is Outcome.FAILED:
                raise ClockSkewError("" if self.record is None else self.record.error)
            return
        self._position, self._wanted_at, self._looked_at = grant.position, grant.wanted_at, grant.granted_at
        self._log = self._log.bind(run_id=grant.run_id)
        self._holding.keep(started + self._limits.timeout.total_seconds(), parent, self._log)
        self._log.info(
            "leased", fence=grant.fence, owner=self._holding.owner, tick=wish.tick, deadline_at=grant.deadline_at
        )
        self._observe(Station.LEASED)
        assert grant.first_seen_at is not None  # noqa: S101 — granted
        if wish.redo is None:
            self._source = source_of(self.spec, grant.first_seen_at)
            if isinstance(self._source, PendingSource):
                self._position = None
        else:
            self._is_redo, self._source = True, RedoSource(self.spec, wish.redo, grant.first_seen_at)
        while True:
            try:
                protect.require(self._holding.connection(), self.spec.protect, self.spec.name)
                self._source.look(self._holding.connection(), grant.granted_at, self._position, grant.cluster)
                self._look_out()
                break
            except Exception as error:
                self._again_or_raise(error)
        self._attempts = 0

    def _look_out(self) -> None:
        source, connection = self._source, self._holding.connection()
        if isinstance(source, PendingSource) and runs.ended_badly(connection, self._holding.lease):
            self._log.warning("works on rows alone", why="the run before was cut off in the middle of a batch")
            # What it had claimed comes behind what the other slots have, in one of the two turns.
            source.alone = 2 * self._limits.batch_rows * self.spec.slots
        for warning in source.warnings(connection):
            self._log.warning(**warning)

    def __iter__(self) -> Iterator[Batch]:
        if isinstance(self.spec.due, PendingRows):
            raise BadInputError(
                f"the rows of job {self.spec.name!r} may have to be worked on one by one, which a loop cannot; hand "
                "the work to run.apply(function)"
            )
        while (opened := self._next()) is not None:
            yield opened.batch
            try:
                self._commit(opened)
            except Exception as error:
                self._again_or_raise(error)

    def _call(self, work: Work, batch: Batch) -> Mapping[str, Any]:
        """What the function says, once it is sure that it has done its work: a generator, say, has not."""
        try:
            told = work(batch)
        except (SystemExit, GeneratorExit) as error:  # nobody told this process to stop: that is no interrupt
            raise BadInputError(
                f"the function of job {self.spec.name!r} raised {type(error).__name__} ({error}); let it return to "
                "commit a batch, and raise an ordinary exception to fail"
            ) from error
        if told is None:
            return {}
        if not isinstance(told, Mapping) or not all(isinstance(key, str) for key in told):
            raise _BadWorkError(
                f"the function of job {self.spec.name!r} returned a {type(told).__name__}; let it return nothing, or a "
                "dict of metadata. Nothing of this batch was committed"
            )
        return told

    def apply(self, work: Work) -> None:
        """Hands every batch to `work`, whose returned metadata is kept for the report."""
        self._stays = isinstance(work, SqlWork)
        while (opened := self._next()) is not None:
            try:
                if opened.page.claimed is None:
                    told = self._call(work, opened.batch)
                else:
                    told = self._work_on_rows(work, opened)
                self._commit(opened)
            except Exception as error:
                if self._charged is not None:
                    self._charged.error = error
                try:
                    is_set_aside = self._set_aside(opened, error)
                except Exception as second:
                    self._again_or_raise(second)
                else:
                    if not is_set_aside:
                        self._again_or_raise(error)
            else:
                self.metadata.update(told)

    def close(self) -> None:
        """The caller is done. A loop that was left early leaves its batch undone."""
        if self.outcome is Outcome.RUNNING:
            self._abandon_batch()
            self._take_back()
            if not self._ends():
                self._end(Outcome.CAPPED, backlog=self._left())

    def fail(self, error: BaseException) -> BaseException:
        """Ends the run after an error; returns what to raise."""
        if self.outcome is Outcome.RUNNING and not isinstance(error, Exception):
            self._holding.hear_answer()
        if self.outcome is not Outcome.RUNNING or not self._holding.is_held:
            self._holding.drop()
            return error
        stop = self._holding.stopped
        cut = db.was_cut(error) or db.lost_connection(error) or isinstance(error, BatchEndedError)
        if isinstance(error, LeaseLostError) or (stop is Stop.LOST and cut):
            outcome = Outcome.LOST_LEASE
            error = _instead(error, self._holding.lost())
        elif isinstance(error, DeadlinePassedError) or (stop is Stop.DEADLINE and cut):
            outcome = Outcome.TIMED_OUT
            error = _instead(error, DeadlinePassedError(self._too_slow()))
        elif stop is Stop.ORPHANED or not isinstance(error, Exception):
            outcome = Outcome.INTERRUPTED
            if stop is Stop.ORPHANED and cut:
                error = GafferError(self._orphaned())
        else:
            outcome = Outcome.FAILED
        self._holding.let_go()
        self._holding.drop()
        if outcome is not Outcome.LOST_LEASE:
            self._answer(error, is_late=outcome is Outcome.TIMED_OUT)
        try:
            self._end(outcome, error=_first(error))
        except LeaseLostError:
            pass  # recorded as such; the first error is the one to hear
        except Exception as second:  # the first error is the one to hear; the lease runs out by itself
            self._log.error("not recorded", outcome=str(outcome), error=db.primary_message(second))
            self.outcome = outcome
        return error

    def reported(self) -> None:
        """REPORTED: whoever asked for the run was told."""
        self._observe(Station.REPORTED)

    def backlog(self) -> int:
        """What is due and left, up to this run's bound."""
        return self._count(lambda connection: self._source.backlog(connection, self._position))

    def glance(self) -> int | None:
        """The same, if it can be counted in a moment: for what is only told, and must not stop the run."""
        if not self._is_countable:
            return None
        try:
            connection = self._holding.connection()
            with db.impatient(connection, _GLANCE):
                return self._source.backlog(connection, self._position)
        except Exception as error:  # whatever is wrong, the next batch will hear
            self._is_countable = not db.was_cut(error)
            return None

    def _left(self) -> int | None:
        """What is left at the end. None: it takes too long to count."""
        try:
            return self.backlog()
        except Exception as error:
            if not db.was_cut(error):
                raise
            self._holding.drop()
            return None

    def _count(self, count: Callable[[db.Connection], int]) -> int:
        connection = self._holding.connection()
        db.roll_back(connection)
        batches.begin(connection, uuid4(), min(self._limits.batch_timeout, _COUNTING))
        try:
            return count(connection)
        finally:
            db.roll_back(connection)

    # ── rows that carry their own state ──────────────────────────────────────────────────────────────────────────

    def _work_on_rows(self, work: Work, opened: _Opened) -> Mapping[str, Any]:
        def on_page(page: Page) -> Mapping[str, Any]:
            batch = self._batch = self._batch_of(page)
            told = self._call(work, batch)
            swallowed = batch.close()
            if swallowed is not None:
                raise swallowed
            self._check()
            return told

        def is_of_rows(error: Exception) -> bool:
            return self._is_of_rows(error) and not self._is_slow(error)

        opened.result = items.work_on(opened.page, self._holding.connection(), on_page, is_of_rows)
        return opened.result.told

    def _locked_elsewhere(self) -> int:
        """What is due and was not seen, since somebody else has it locked."""
        if not isinstance(self._source, PendingSource):
            return 0
        found = self._count(self._source.locked_elsewhere)
        if found:
            self._held_by = HeldBy(f"a transaction that has locked {found:,} of the rows")
        return found

    def _is_slow(self, error: Exception) -> bool:
        """A time limit struck, which would also strike what is done again in the same transaction."""
        return db.was_cut(error) or time.monotonic() > self._batch_until

    def _is_of_rows(self, error: Exception) -> bool:
        """One of the rows may be what is wrong; else it is the run that fails, or the batch is done again."""
        if self._holding.stopped is not None or isinstance(error, (_BadWorkError, DatabaseUnavailableError)):
            return False
        if db.is_out_of_room(_first(error)):
            return False
        if isinstance(error, GafferError) and not isinstance(error, (BadInputError, BatchEndedError)):
            return self._is_slow(error)
        return not db.worth_repeating(error) or self._attempts + 1 >= _ATTEMPTS

    def _set_aside(self, opened: _Opened, error: Exception) -> bool:
        """After a batch that failed as a whole: its rows are worked on alone from now on, or the one row that was is
        recorded as failed. False: the rows are not what is wrong."""
        claimed = opened.page.claimed
        if claimed is None or not claimed.keys or not isinstance(self._source, PendingSource):
            return False
        if not self._is_of_rows(error):
            return False
        if db.lost_connection(error) or db.was_cut(error):
            self._holding.drop()
        else:
            self._holding.roll_back()
        self._attempts = 0
        if not claimed.alone:
            self._log.warning("works on rows alone", why=db.primary_message(error), sqlstate=db.sqlstate(error))
            self._source.alone = max(self._source.alone, 2 * len(claimed.keys))
            return True
        failed = items.failure(claimed.keys[0], error, charged=True)
        batch_id, began = self._begin()
        batch = self._batch = self._batch_of(opened.page)
        self._commit(_Opened(opened.page, batch, batch_id, began, items.Result(opened.page, {}, (), [failed])))
        return True

    def _take_back(self) -> None:
        """The attempt that was charged to a row which was worked on alone: it is not known that the row is wrong, and
        while it counts as failed, no claim sees it."""
        charged = self._charged
        if charged is not None and isinstance(self._source, PendingSource):
            pending_rows.take_back(self._holding.aside(), self._holding.lease, charged.key, charged.before)
            self._source.alone = max(self._source.alone, charged.alone)
            self._charged = None

    def _answer(self, error: BaseException, *, is_late: bool) -> None:
        """What becomes of that attempt, where the run ends with it. It counts where the row took too long, or where the
        work on it failed and the database has stayed away since: it may be the row that ends the server."""
        charged = self._charged
        if charged is None:
            return
        went = charged.error
        if went is not None and is_late:
            went = error
        elif not isinstance(error, DatabaseUnavailableError):
            went = None
        try:
            if went is None:
                self._take_back()
            else:
                failed = items.failure(charged.key, went)
                pending_rows.let_count(self._holding.aside(), self._holding.lease, charged.key, charged.before, failed)
        except Exception as second:  # no room for that either; the first error is the one to hear
            self._log.warning("an attempt stays charged", key=charged.key, error=db.primary_message(second))

    # ── a batch ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _next(self) -> _Opened | None:
        while self.outcome is Outcome.RUNNING:
            try:
                opened = self._open()
                if opened is not None:
                    return opened
                self._ends()
            except Exception as error:
                self._again_or_raise(error)
        return None

    def _open(self) -> _Opened | None:
        """DUE: the next batch with its transaction open; None: nothing is due, or a bound is reached."""
        self._take_back()
        while True:
            self._batch_until = math.inf
            if self._holding.stopped is not Stop.DEADLINE:  # past it no batch begins, so that none is cut either
                self._check()
            left = self._holding.left
            if self._is_bounded or left <= self._longest:
                return None
            self._abandon_batch()
            batch_id, began = self._begin()
            connection = self._holding.connection()
            page = self._locked(connection) or self._source.page(
                connection, self._position, self._limits.batch_rows, stays=self._stays
            )
            if isinstance(page, Page):
                break
            db.roll_back(connection)
            if page is None:
                self._exhausted = True
                if not self.items:  # idle is not always nothing to do
                    self._held_by = self._source.held_back_by(connection)
                return None
            self._held_by = page.held_by
            if page.at_least >= left - self._longest or left < timedelta(seconds=1):
                self._log.info("not settled in time", why=page.why)
                return None
            self._log.debug("waits", why=page.why)
            time.sleep(min(0.5, max(0.05, page.at_least.total_seconds())))
        self._held_by = None
        self._charge(page)
        self._batch_until = began + self._limits.batch_timeout.total_seconds()
        self._batch = self._batch_of(page)
        self._log.debug("due", batch=self._batches + 1, items=page.items)
        self._observe(Station.DUE)
        return _Opened(page, self._batch, batch_id, began)

    def _charge(self, page: Page) -> None:
        """Commits an attempt at a row that may end this process, while it is claimed."""
        if page.claimed is None or not page.claimed.alone or not isinstance(self._source, PendingSource):
            return
        for key in page.claimed.keys:
            # Before it is asked for: where the answer is lost, nobody knows.
            self._charged = _Charged(key, page.claimed.item, self._source.alone)
            pending_rows.charge(self._holding.aside(), self._holding.lease, key, self._source.due.backoff)
            self._source.alone = max(0, self._source.alone - 1)

    @property
    def _is_bounded(self) -> bool:
        """It has done as many batches as it may."""
        alone = math.ceil(self._alone / self._limits.batch_rows)
        return self._batches - self._alone + alone >= (1 if self._is_redo else self._limits.batches)

    def _begin(self) -> tuple[UUID, float]:
        """BEGIN: the batch's name, and when it began."""
        began, batch_id = time.monotonic(), uuid4()
        self._batch_until = math.inf
        connection = self._holding.connection()
        self._holding.may_cancel = True
        batches.begin(connection, batch_id, min(self._limits.batch_timeout, self._holding.left + _SLACK))
        return batch_id, began

    def _locked(self, connection: db.Connection) -> Wait | None:
        """Who has the job's advisory lock, where it goes by one."""
        if self.spec.exclusion != "advisory":
            return None
        held_by = batches.lock(connection, self._holding.lease)
        if held_by is None:
            return None
        return Wait(timedelta(), f"the job's advisory lock is held: {held_by}", HeldBy(held_by))

    def _batch_of(self, page: Page) -> Batch:
        return Batch(
            self._holding.connection(),
            page,
            self._source,
            number=self._batches + 1,
            fence=self._holding.lease.fence,
            run_id=self._holding.lease.run_id,
            check=self._check,
            log=self._log,
            context=self._context,
        )

    def _commit(self, opened: _Opened) -> None:
        """APPLIED, then COMMITTED."""
        page, batch, result = opened.page, opened.batch, opened.result
        if result is None and batch is not self._batch:
            raise BatchEndedError(
                f"batch {batch.number} was left undone, and a later loop went on; use one loop for a run"
            )
        swallowed = batch.close() if result is None else None
        if swallowed is not None:
            raise swallowed
        self._check()
        self._observe(Station.APPLIED)
        done, settled, table = page.items, None, None
        if result is not None and isinstance(self._source, PendingSource):
            page, done, table = result.page, len(result.done), self._source.table
            due, forget = self._source.due, () if page.claimed is None else page.claimed.forget
            settled = Settled(due.attempts, due.backoff, result.done, result.failed, forget)
        try:
            batches.commit(
                self._holding.connection(),
                self._holding.lease,
                opened.batch_id,
                since=self._position if settled is None else None,
                until=page.position if settled is None else None,
                cluster=self._source.cluster,
                items=done,
                duration=self._holding.duration,
                settled=settled,
                table=table,
            )
        except Exception as error:
            # Only a connection that died leaves it unknown whether the server has done it.
            if not db.lost_connection(error) or self._holding.supersede() < batch.number:
                raise
        self._charged = None
        self._position = page.position
        self._batches = batch.number
        self.items += done
        self._attempts = 0
        self._longest = max(self._longest, timedelta(seconds=time.monotonic() - opened.began))
        self._log.info("committed", batch=batch.number, items=done, fence=self._holding.lease.fence)
        if settled is not None:
            self._alone += page.claimed is not None and page.claimed.alone
            self._failed += settled.failed
            for each in settled.failed:
                self._log.warning("row failed", key=each.key, error=each.error, sqlstate=each.sqlstate)
        self._observe(Station.COMMITTED)
        if time.monotonic() - self._told_at >= self._progress_every:
            self._tell_progress()

    def _tell_progress(self) -> None:
        left = self.glance()
        took = timedelta(seconds=time.monotonic() - self._began)
        progress = Progress(self._batches, self.items, datetime.now(timezone.utc), took, left)
        self._log.info(
            "progress",
            batches=progress.batches,
            items=progress.items,
            items_per_second=round(progress.items_per_second, 1),
            left=progress.left,
            caught_up_at=progress.caught_up_at,
        )
        self._on_progress(progress)
        self._told_at = time.monotonic()

    def _check(self) -> None:
        """Raises where nothing more may be written."""
        stop, job = self._holding.stopped, self.spec.name
        if stop is Stop.LOST:
            raise self._holding.lost()
        if stop is Stop.DEADLINE:
            raise DeadlinePassedError(self._too_slow())
        if stop is Stop.ORPHANED:
            raise GafferError(self._orphaned())
        if time.monotonic() > self._batch_until:
            # Where the server has ended it already, its own word is the one to hear.
            db.probe(self._holding.connection())
            raise BatchEndedError(
                f"batch {self._batches + 1} of job {job!r} took longer than its batch_timeout of "
                f"{show_duration(self._limits.batch_timeout)}; let it be smaller (bounds: batch_rows), or give it more "
                "time"
            )

    def _orphaned(self) -> str:
        return f"the process that started this run of job {self.spec.name!r} is gone; nothing more is written"

    def _too_slow(self) -> str:
        still = timedelta(seconds=round(self._holding.stood_still.total_seconds()))
        cure = (
            f"This process stood still for {in_words(still)} of that (it was stopped, or its machine paused): no bound "
            "needs to be changed for it"
            if still
            else "Let a batch be smaller (bounds: batch_rows) or the timeout longer"
        )
        return (
            f"batch {self._batches + 1} of job {self.spec.name!r} was cut at the run's deadline of "
            f"{show_duration(self._limits.timeout)}; {self._batches} were committed. {cure}"
        )

    def _again_or_raise(self, error: Exception) -> None:
        """Makes ready to do the batch again under the same fence, if that may help; else raises the error."""
        self._attempts += 1
        passing = db.worth_repeating(error) or isinstance(error, DatabaseUnavailableError)
        if self._holding.stopped is not None or self._attempts >= _ATTEMPTS or not passing:
            raise error
        self._log.warning(
            "does the batch again",
            batch=self._batches + 1,
            error=db.primary_message(error),
            sqlstate=db.sqlstate(error),
        )
        time.sleep(random.uniform(0.05, 0.2) * 2**self._attempts)  # noqa: S311 — spreads the load, nothing secret
        if db.lost_connection(error):
            self._holding.drop()
        else:
            self._holding.roll_back()

    def _abandon_batch(self) -> None:
        """A batch that a loop has left open is undone, lest the next one commits it."""
        if self._batch is not None:
            self._batch.close()
            self._batch = None
            self._holding.roll_back()

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _ends(self) -> bool:
        """ENDED, or False: a wake-up came since the last look, so look again."""
        self._holding.may_cancel = False
        backlog = self._locked_elsewhere() if self._exhausted else self._left()
        if backlog != 0:
            self._end(Outcome.CAPPED, backlog=backlog)
            return True
        if self._end(Outcome.PARTIAL if self._failed else Outcome.SUCCEEDED, backlog=0):
            return True
        connection = self._holding.connection()
        looks_at = horizon.now(connection)
        self._source.look(connection, looks_at, self._position, self._source.cluster)
        if isinstance(self._source, PendingSource):
            self._position = None
        # Only now: where the look fails and is done again, the end must be told again to look.
        self._looked_at, self._wanted_at, self._exhausted = looks_at, self._wanted_now, False
        self._log.info("looks again", wanted_at=self._wanted_at)
        return False

    def _end(self, outcome: Outcome, *, backlog: int | None = None, error: BaseException | None = None) -> bool:
        """ENDED. False: wanted."""
        grant, schedule = self._holding.grant, self.spec.schedule
        assert grant is not None  # noqa: S101 — only what is held is ended
        looked_at = self._looked_at or grant.granted_at
        next_tick = None if schedule is None else schedule.next(looked_at)
        before = grant.covered_until or grant.first_seen_at or looked_at
        covered_until = self._covered_until(outcome, looked_at)
        follow_up = None if self._is_redo else self._follow_up(outcome, error)

        def ask(connection: db.Connection, lease: Lease) -> tuple[runs.Ending, RunRecord]:
            now = horizon.now(connection)
            next_due_at = covered = again_at = None
            follow_up_at = None if follow_up is None else now + follow_up
            if isinstance(self.spec.due, PendingRows):  # whatever became of the run, also of its source
                again_at = pending_rows.again_at(connection, self.spec.name)
            if covered_until is not None and schedule is not None:
                past = history.of_job(connection, self.spec.name, min(before, covered_until), runs=False)
                next_due_at = past.next(covered_until, now)
                covered = past.count(before, covered_until, started_at=grant.granted_at)
            ending = runs.end(
                connection,
                lease,
                outcome,
                wanted_at=self._wanted_at,
                covered_until=covered_until,
                success_tick=None if schedule is None else schedule.latest(looked_at),
                ticks_covered=covered,
                backlog=backlog,
                next_run_at=next_tick,
                next_due_at=next_due_at,
                follow_up_at=min((at for at in (again_at, follow_up_at) if at is not None), default=None),
                oldest_due_at=self._source.due_since(connection, self._position) if outcome is Outcome.CAPPED else None,
                held_by=self._held_by,
                sqlstate=None if error is None else db.sqlstate(error),
                error=self._row_errors() if error is None else db.primary_message(error),
                batches=self._batches,
            )
            return ending, runs.get(connection, lease.run_id)

        ending, record = self._holding.end(ask)
        if ending.result == "wanted":
            self._wanted_now = ending.wanted_at
            return False
        self._holding.let_go()
        self._holding.drop()
        self.record = record
        self.outcome = Outcome.LOST_LEASE if ending.result == "lost_lease" else outcome
        self._log_end(record)
        if self.outcome is Outcome.LOST_LEASE and outcome is not Outcome.LOST_LEASE:
            raise LeaseLostError(
                f"the lease of job {self.spec.name!r} was lost before this run ended; what it had committed stays, the "
                f"next one does what is left. This one was {record.error or 'followed by another'}"
            )
        self._observe(Station.ENDED)
        return True

    def _row_errors(self) -> str | None:
        if not self._failed:
            return None
        rows = "1 row" if len(self._failed) == 1 else f"{len(self._failed):,} rows"
        return f"{rows} failed; {self._failed[-1].key}: {self._failed[-1].error}"[:2000]

    def _covered_until(self, outcome: Outcome, looked_at: datetime) -> datetime | None:
        """Ticks up to here are covered: everything that was due then is done. None: none that was not before."""
        if self._is_redo:
            return None
        if outcome in (Outcome.SUCCEEDED, Outcome.PARTIAL):
            return looked_at
        # Of time that was done in part it is known how far; rows do not tell.
        done = TimePosition.until_of(self._position) if self.items else None
        return None if done is None else min(done, looked_at)

    def _follow_up(self, outcome: Outcome, error: BaseException | None) -> timedelta | None:
        """How soon the next run is wanted, though no tick may be near."""
        if outcome is Outcome.CAPPED and self._batches and self._held_by is None:
            return timedelta()
        # Idle because somebody else is not finished, or stopped by what may pass; a fail-over lost what it had done.
        passing = error is not None and (
            db.worth_repeating(error)
            or db.is_exhausted(error)
            or isinstance(error, (DatabaseUnavailableError, LeaseLostError))
        )
        if outcome is Outcome.CAPPED or passing:
            return _FOLLOW_UP
        return None if self._held_by is None else _HELD

    def _log_end(self, record: RunRecord) -> None:
        if record.held_by is not None:
            self._log.warning(
                "held back", by=record.held_by.who, seen_since=record.held_by_since, cure=record.held_by.cure
            )
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
    redo: datetime | None = None,
    work_hash: str | None = None,
    known: Collection[str] = (),
    context: Any = None,
    observe: Observer = lambda station: None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    progress_every: timedelta = timedelta(seconds=10),
    lease: timedelta = LEASE,
    worker_clock: Callable[[], datetime] = lambda: datetime.now(timezone.utc),
) -> Generator[Run]:
    """A run of the job: leased at the start, ended and recorded whatever happens in the block.

    `tick`: the tick that woke it, if one did; where the database's clock has not reached it, the run waits for that.
    `work_hash` and `known`: what the job does and what it is defined beside, by which a renamed one is told.
    `parent`: the process whose end ends the run. `redo`: do the interval that this time is in once more, and leave the
    watermark where it is. `on_progress`: is told after a batch how far the run has got, not more often than
    `progress_every`. Raises what the block raised; `LeaseLostError` or `DeadlinePassedError` where that was only
    the consequence.
    """
    log = log.bind(job=spec.name)
    run = Run(
        spec,
        Holding(spec, url, lease, log),
        context=context,
        log=log,
        observe=observe,
        on_progress=on_progress,
        progress_every=progress_every,
    )
    wish = Wish(
        trigger="redo" if redo is not None else trigger,
        tick=tick,
        dagster_run_id=dagster_run_id,
        despite_pause=despite_pause,
        redo=None if redo is None else spec.interval_of(redo),
        registration=registration_of(Definition(spec, work_hash), known),
    )
    try:
        run.begin(wish, parent, worker_clock)
        yield run
        run.close()
    except BaseException as error:
        heard = run.fail(error)
        if heard is error:
            raise
        raise heard from error


def _first(error: BaseException) -> BaseException:
    """An error that was swallowed, and came back when the batch was used again, is the one that counts."""
    return (error.__cause__ if isinstance(error, BatchEndedError) else None) or error


def _instead(error: BaseException, told: GafferError) -> BaseException:
    return error if isinstance(error, type(told)) else told
