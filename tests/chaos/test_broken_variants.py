"""Protocols that are known to be wrong, put through what the product is put through: the checks must notice.

Each scenario is run with variants that must be caught, and with the product, which must pass; and with the variant's
nearest sound relative, so that it is the broken part that is caught and not something else.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from uuid import uuid4

import psycopg
import pytest
from psycopg import sql

from gaffer_dagster.engine.steps import Station
from gaffer_dagster.store import db
from gaffer_dagster.testing import Clock, proxy
from tests.support import faults, invariants, jobs, variants
from tests.support.processes import Engines, Plan
from tests.support.variants import CHECKED

_PAST_THE_LEASE = timedelta(seconds=61)
_TWICE = "nothing is applied twice"
_MISSING = "nothing up to the watermark is missing"
_STALE = "nothing is committed under a fence once a later one was granted"


def _prepare(url: str, variant: str, rows: int = 30) -> None:
    jobs.make_source(url, rows)
    invariants.watch(url)
    variants.install(url, variant)
    faults.settle(url)


def _judge(url: str, *caught: str) -> None:
    """The checks found these (and whatever follows from them), or nothing if none is given."""
    found = invariants.violations(url)
    assert set(caught) <= set(found), f"the checks do not see that this is broken; they found {found}"
    assert bool(found) == bool(caught), f"not sound: {found}"


def _two_runs_in_each_others_way(engines: Engines, url: str, clock: Clock, variant: str, place: str) -> None:
    """The first is stopped at the place past its lease, the second takes over; then both go on to their ends."""
    first = engines.start(Plan(url, stop_at=place, variant=variant))
    first.reaches(place)
    first.pause()
    clock.advance(_PAST_THE_LEASE)
    second = engines.start(Plan(url, stop_at=str(Station.APPLIED), variant=variant))
    taken_over = second.reaches_or_ends(str(Station.APPLIED)) is None
    first.resume()
    first.go()
    first.ends()
    if taken_over:
        second.go()
        second.ends()


@pytest.mark.parametrize(
    ("variant", "caught"),
    [("the product", ()), ("bare", ()), ("time-only lease", (_TWICE, _STALE))],
)
def test_a_lease_that_is_only_a_time_is_caught(
    variant: str, caught: tuple[str, ...], engines: Engines, url: str, clock: Clock
) -> None:
    _prepare(url, variant)
    _two_runs_in_each_others_way(engines, url, clock, variant, str(Station.APPLIED))
    _judge(url, *caught)


@pytest.mark.parametrize(
    ("variant", "caught"),
    [
        ("locking check, then COMMIT", ()),
        ("locking check, then the writes", ()),
        ("plain SELECT, then COMMIT", (_TWICE, _STALE)),
        ("plain SELECT, then the writes", (_TWICE, _STALE)),
        ("key share, then the writes", (_TWICE, _STALE)),
    ],
)
def test_a_check_that_does_not_lock_is_caught(
    variant: str, caught: tuple[str, ...], engines: Engines, url: str, clock: Clock
) -> None:
    """B56. The pause falls between the check and what it was to protect. Where the check locks, the second run is
    `busy`; the product, which sends both in one message, has no such place (it is stopped around it in the matrix)."""
    _prepare(url, variant)
    _two_runs_in_each_others_way(engines, url, clock, variant, CHECKED)
    _judge(url, *caught)


@pytest.mark.parametrize(
    ("variant", "caught"),
    [("the product", ()), ("bare", ()), ("number-only fence", (_TWICE,))],
)
def test_a_fence_that_is_only_a_number_is_caught_when_commits_were_lost(
    variant: str, caught: tuple[str, ...], engines: Engines, url: str, clock: Clock, server_url: str
) -> None:
    """The newest commits are lost (a fail-over, a restored backup), the acquire of a run that still lives among them:
    its number is handed out again."""
    _prepare(url, variant, rows=10)
    engines.finish(url)
    jobs.add_rows(url, 30)
    faults.settle(url)
    with _backup(server_url, url) as restore:
        stale = engines.start(Plan(url, stop_at=str(Station.LEASED)))
        stale.reaches(str(Station.LEASED))
        number = jobs.query(url, "select fence from gaffer.job_lease")
        restore()
    other = engines.start(Plan(url, stop_at=str(Station.APPLIED)))
    other.reaches(str(Station.APPLIED))
    assert jobs.query(url, "select fence from gaffer.job_lease") == number
    stale.go()
    stale.ends()
    other.go()
    other.ends()
    _judge(url, *caught)


@pytest.mark.parametrize(
    ("variant", "caught"),
    [("the product", ()), ("id > watermark", (_MISSING,))],
)
def test_a_cursor_that_passes_open_transactions_is_caught(
    variant: str, caught: tuple[str, ...], engines: Engines, url: str
) -> None:
    """B66: who took a smaller id commits after who took a larger one."""
    _prepare(url, variant, rows=5)
    with jobs.connect(url) as late:
        late.execute("begin")
        late.execute("insert into source (value) values ('late')")
        jobs.add_rows(url, 5)
        assert engines.start(Plan(url, variant=variant)).ends().outcome == "succeeded"
        late.execute("commit")
    faults.settle(url)
    assert engines.start(Plan(url, variant=variant)).ends().outcome == "succeeded"
    _judge(url, *caught)
    assert len(_left(url)) == (1 if caught else 0)


@pytest.mark.parametrize(
    ("variant", "caught"),
    [
        ("the product", ()),
        ("id > watermark", (_MISSING,)),
        ("id > watermark, below the horizon", (_MISSING,)),
    ],
)
def test_a_cursor_that_is_only_an_id_is_caught(
    variant: str, caught: tuple[str, ...], engines: Engines, url: str
) -> None:
    """B67: a smaller id was taken, and is only written once a larger one has been read."""
    _prepare(url, variant, rows=5)
    taken = jobs.query(url, "select nextval(pg_get_serial_sequence('source', 'id'))")[0][0]
    jobs.add_rows(url, 5)
    faults.settle(url)
    assert engines.start(Plan(url, variant=variant)).ends().items == 10
    jobs.execute(url, "insert into source (id, value) values (%s, 'late')", taken)
    faults.settle(url)
    assert engines.start(Plan(url, variant=variant)).ends().outcome == "succeeded"
    assert _left(url) == ([taken] if caught else [])
    jobs.add_rows(url, 1)  # moves the watermark past it
    faults.settle(url)
    assert engines.start(Plan(url, variant=variant)).ends().items == 1
    _judge(url, *caught)


def _left(url: str) -> list[int]:
    return [row for (row,) in jobs.query(url, "select id from source except select id from target")]


@pytest.mark.parametrize(
    ("variant", "caught"),
    [("the product", ()), ("bare", ()), ("error means not committed", (_TWICE,))],
)
def test_taking_a_lost_answer_for_a_failure_is_caught(
    variant: str, caught: tuple[str, ...], engines: Engines, url: str
) -> None:
    """B78."""
    _prepare(url, variant)
    with proxy.cutting(url, ("commit_batch", proxy.Cut.AFTER)) as cutting:
        engines.start(Plan(cutting.url, variant=variant)).ends()
    _judge(url, *caught)


@contextmanager
def _backup(server_url: str, url: str) -> Generator[Callable[[], None]]:
    """A copy of the database as it is now; what is given puts it in the place of the database."""
    name = sql.Identifier(str(db.parse_url(url)["dbname"]))
    copy = sql.Identifier(f"gaffer_test_{uuid4().hex[:12]}")

    with jobs.connect(server_url) as connection:

        def could_copy() -> bool:
            try:
                connection.execute(sql.SQL("create database {} template {}").format(copy, name))
            except psycopg.errors.ObjectInUse:
                return False
            return True

        def restore() -> None:
            connection.execute(sql.SQL("drop database {} with (force)").format(name))
            connection.execute(sql.SQL("alter database {} rename to {}").format(copy, name))

        faults.wait_until(could_copy, "nobody is connected, so that the database can be copied")
        try:
            yield restore
        finally:
            connection.execute(sql.SQL("drop database if exists {}").format(copy))
