"""The straight line of one run."""

from __future__ import annotations

from gaffer_dagster.domain.run import Outcome
from tests.support import jobs


def test_a_run_does_everything_due_and_says_so(url: str) -> None:
    jobs.make_source(url, 250)
    record = jobs.run(jobs.spec(batch_rows=100), url)
    assert (record.outcome, record.items, record.batches, record.fence) == (Outcome.SUCCEEDED, 250, 3, 1)
    assert jobs.query(url, "select count(*), count(distinct id) from target") == [(250, 250)]
    again = jobs.run(jobs.spec(batch_rows=100), url)
    assert (again.outcome, again.items, again.batches, again.fence) == (Outcome.SUCCEEDED, 0, 0, 2)


def test_intervals_in_order(url: str) -> None:
    jobs.execute(url, "create table days (since timestamptz primary key, until timestamptz)")
    record = jobs.run(
        jobs.daily(start="2013-01-01", until="2014-01-01"),
        url,
        lambda batch: batch.insert("days", [{"since": batch.window.since, "until": batch.window.until}]) and None,
    )
    assert (record.outcome, record.items, record.backlog) == (Outcome.CAPPED, 100, 265)
