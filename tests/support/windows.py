"""What jobs that are due by time were handed, and when: the window of each batch, kept by its own transaction."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

from gaffer_dagster.domain.run import RunRecord
from gaffer_dagster.domain.spec import JobSpec
from gaffer_dagster.engine.batch import Batch
from gaffer_dagster.testing import Clock
from tests.support import jobs


class Windows:
    """The windows that runs of a job are handed, in order, kept in the database as they commit."""

    def __init__(self, url: str, clock: Clock | None = None) -> None:
        self.url, self.clock = url, clock
        jobs.execute(
            url, "create table windows (n int generated always as identity, since timestamptz, until timestamptz)"
        )

    def take(self, batch: Batch) -> None:
        batch.insert("windows", [{"since": batch.window.since, "until": batch.window.until}])

    def fails_at_the_second(self) -> tuple[list[str], Callable[[Batch], None]]:
        """The keys of the batches so far, and work that fails at the second of them."""
        keys: list[str] = []

        def work(batch: Batch) -> None:
            keys.append(batch.key)
            self.take(batch)
            if len(keys) == 2:
                raise ValueError("no")

        return keys, work

    def run(self, job: JobSpec, *, at: datetime | None = None, work: Any = None, **told: Any) -> RunRecord:
        if self.clock is None:
            return jobs.run(job, self.url, work or self.take, **told)
        if at is not None:
            self.clock.set(at)
        return jobs.run(job, self.url, work or self.take, worker_clock=self.clock.now, **told)

    def taken(self) -> list[tuple[datetime, datetime]]:
        return jobs.query(self.url, "select since, until from windows order by n")

    def begins(self) -> list[datetime]:
        return [since for since, _ in self.taken()]

    def lengths(self) -> list[timedelta]:
        return [until - since for since, until in self.taken()]

    def are_all_of(self, since: datetime, until: datetime) -> bool:
        """Whether they are the whole of `[since, until)`, in order: no hole, nothing twice."""
        taken = self.taken()
        begins, ends = [begin for begin, _ in taken], [end for _, end in taken]
        return begins == sorted(begins) and [*begins, until] == [since, *ends]
