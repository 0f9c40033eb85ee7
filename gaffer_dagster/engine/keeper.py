"""Keeps the lease while the work goes on, and stops the work when it must not go on.

A thread with a connection of its own. It renews at a third of the lease; when the fence is gone, the deadline is past,
or the process that started the run is no longer there, it says so in `stopped` and cancels whatever the run's own
connection is doing, again and again until the run has noticed. What takes no notice (a COPY that waits for its
client, which no time limit of the server's reaches) loses its connection ten seconds later: an open transaction holds
up others. It never decides that a batch may commit: only the database does.

When the next run may take the lease (of 60 s, renewed every 20 s) from a holder that says no more; what that one still
does is never committed afterwards:

    the holder                                   its lease is taken by a run that comes
    ──────────────────────────────────────────   ──────────────────────────────────────────────────────────────────
    ended, failed, or was told to stop           at once
    lost the process that started it             within a second or so, once it has ended by itself
    died (kill -9, out of memory)                4 s after a run first saw that the keeper's connection is gone, where
                                                 that is direct and was made (20 s after the start); else when the
                                                 lease is over, as of the next line
    is stopped, or its network drops packets     when the lease is over: 60 s after the last renewal
    has locked the lease itself (its own SQL)    when that transaction is over: batch_timeout; the record of a run that
                                                 finds it so says who has locked it
    is to be replaced, whatever it does          at once: gaffer release

What a holder that is stopped, or cut off, has locked besides is free when its batch_timeout is over (of TCP after 15 s
at least; through a Unix socket, of one that was stopped while it read a large answer, once it goes on: no limit of the
server's reaches it while it waits to send). One that is cut off hears of nothing: its statement fails after 15 s
(sending) to 25 s (waiting), and it gives up trying to connect about a minute later.

A wake-up has to come: a tick, the alert sensor's (which looks for dead holders), or `gaffer run`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from enum import Enum

from gaffer_dagster.domain.lease import Lease
from gaffer_dagster.engine.log import Log
from gaffer_dagster.errors import DatabaseUnavailableError
from gaffer_dagster.store import db, leases


class Stop(str, Enum):
    """Why the work must not go on."""

    LOST = "lost"
    DEADLINE = "deadline"
    ORPHANED = "orphaned"


_LOOK_EVERY = 0.5
_CANCEL_EVERY = 0.2
_CUT_AFTER = 10.0
# A wait that took so much longer than it was to, while the process did nothing, was no wait.
_STANDSTILL = 5.0


class Keeper(threading.Thread):
    """`deadline` is a time of `time.monotonic()`; `parent` is the process whose end ends the run, if any. `lost`:
    what to say of a lease that is."""

    def __init__(
        self,
        connect: Callable[[], db.Connection],
        lease: Lease,
        duration: timedelta,
        *,
        deadline: float,
        parent: int | None,
        cancel: Callable[[], None],
        cut: Callable[[Callable[[], db.Connection]], None],
        log: Log,
    ) -> None:
        super().__init__(name=f"gaffer-keeper-{lease.job}", daemon=True)
        self.stopped: Stop | None = None
        self.lost: str | None = None
        self._connect = connect
        self._lease: Lease | None = lease
        self._duration = duration
        self._every = duration.total_seconds() / 3
        self._deadline = deadline
        self._parent = parent
        self._worker = threading.current_thread()
        self._cancel = cancel
        self._cut = cut
        self._log = log
        self._ended = threading.Event()
        self._renewing = threading.Lock()
        self._connection: db.Connection | None = None
        self._stood_still = 0.0
        self._waits: tuple[float, float] | None = None  # until when, and the time that the process had worked by then

    def run(self) -> None:
        renew_at = time.monotonic() + self._every
        try:
            while self._wait(min(_LOOK_EVERY, max(0.0, renew_at - time.monotonic()))):
                stop = self._must_stop()
                if stop is None and (self._is_cut() or time.monotonic() >= renew_at):
                    stop, renew_at = self._renew()
                if stop is not None:
                    self.stopped = stop
                    self._insist()
        finally:
            if self._connection is not None:
                self._connection.close()

    def hold_still(self) -> None:
        """No renewal from here to `go_on`: the lease is about to change its id."""
        with self._renewing:
            self._lease = None

    def go_on(self, lease: Lease) -> None:
        with self._renewing:
            self._lease = lease

    def end(self) -> None:
        """The work is over. Not waited for long: a renewal that hangs in the network must not hold up the end."""
        self._ended.set()
        self.join(timeout=0.5)

    @property
    def stood_still(self) -> timedelta:
        """For how long, in all, this process was stopped (SIGSTOP, a machine that was paused), or kept from running."""
        return timedelta(seconds=self._stood_still + self._standstill(self._waits))

    def _standstill(self, waits: tuple[float, float] | None) -> float:
        if waits is None:
            return 0.0
        until, worked = waits
        late = time.monotonic() - until
        return late if late > _STANDSTILL and time.process_time() - worked < late / 2 else 0.0

    def _wait(self, seconds: float) -> bool:
        # Whoever wakes first, this thread or the run's, finds how late it is.
        self._waits = time.monotonic() + seconds, time.process_time()
        is_over = self._ended.wait(seconds)
        late, self._waits = self._standstill(self._waits), None
        self._stood_still += late
        return not is_over

    def _must_stop(self) -> Stop | None:
        if not self._worker.is_alive() or (self._parent is not None and os.getppid() != self._parent):
            return Stop.ORPHANED
        return Stop.DEADLINE if time.monotonic() >= self._deadline else None

    def _is_cut(self) -> bool:
        """The connection that says that this process lives is gone: another one is to say so, at once."""
        if self._connection is None or not db.is_cut(self._connection):
            return False
        self._connection.close()
        self._connection = None
        return True

    def _renew(self) -> tuple[Stop | None, float]:
        with self._renewing:  # so that hold_still() waits for a renewal that is under way
            if self._lease is None:
                return None, time.monotonic() + 0.1
            try:
                connection = self._own()
                if leases.renew(connection, self._lease, self._duration):
                    self._log.debug("renewed", fence=self._lease.fence)
                    return None, time.monotonic() + self._every
                self.lost = leases.lost(connection, self._lease)
                return Stop.LOST, 0.0
            except Exception as error:  # a lock timeout or a broken connection is no lost lease: the batch decides
                if not (db.is_database_error(error) or isinstance(error, DatabaseUnavailableError)):
                    raise
                self._log.warning("not renewed", error=db.primary_message(error), sqlstate=db.sqlstate(error))
                if self._connection is not None and db.lost_connection(error):
                    self._connection.close()
                    self._connection = None
                return None, time.monotonic() + 1.0

    def _insist(self) -> None:
        cut_at = time.monotonic() + _CUT_AFTER
        while self._wait(_CANCEL_EVERY):
            self._cancel()
            if time.monotonic() >= cut_at:
                self._cut(self._own)
                cut_at = time.monotonic() + _CUT_AFTER

    def _own(self) -> db.Connection:
        if self._connection is None or self._connection.closed:
            self._connection = self._connect()
        return self._connection
