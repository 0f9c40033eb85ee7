"""A holder that is dead is found so at once, where it renewed its lease on a direct connection; a living one is not
taken for dead because its connections were cut."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest

from gaffer_dagster.engine.steps import Station
from gaffer_dagster.store import jobs as job_table
from gaffer_dagster.store import leases
from tests.support import faults, invariants, jobs, protocol, variants
from tests.support.processes import Engine, Engines, Plan

APPLIED = str(Station.APPLIED)
# Far below what is left of a lease of a minute. The promise is four seconds from the first look.
AT_ONCE = 20.0


def _recorded(url: str) -> list[tuple[int, bool]]:
    """The keeper's backend, as far as the lease says, and whether it is still there."""
    return jobs.query(
        url,
        "select holder_pid, exists (select from pg_stat_activity where pid = holder_pid and backend_start ="
        " holder_began_at) from gaffer.job_lease where holder_pid is not null",
    )


def _at_work(engines: Engines, url: str, *, lease: float = 4.0) -> Engine:
    """An engine in the middle of a batch, whose keeper has renewed; its lease then lasts for a minute more."""
    jobs.make_source(url, 20)
    invariants.watch(url)
    faults.settle(url)
    engine = engines.start(Plan(url, stop_at=APPLIED, lease=lease))
    engine.reaches(APPLIED)
    faults.wait_until(lambda: bool(_recorded(url)), "the keeper's backend is recorded")
    assert _recorded(url)[0][1]
    return engine


def _last_for_long(url: str) -> None:
    jobs.execute(url, "update gaffer.job_lease set lease_until = gaffer.clock() + '5m' where lease_id is not null")


def test_a_killed_holder_is_followed_long_before_its_lease_is_over(engines: Engines, url: str) -> None:
    engine = _at_work(engines, url)
    engine.kill()
    _last_for_long(url)
    faults.wait_until(lambda: not faults.backends(url), "the server has heard of it")
    with protocol.session(url) as connection:  # so that the alert sensor asks for a run
        wanted = [job_table.wanted(connection, ["copy_rows"]) for _ in range(2)]
    assert [each.why for each in wanted[0]] == ["the run before is dead"]
    assert wanted[0][0].key == wanted[1][0].key
    began = time.monotonic()
    ending = engines.start(Plan(url)).ends()
    took = time.monotonic() - began
    faults.say(f"killed: followed after {took:.1f} s")
    assert (ending.outcome, ending.items, ending.fence) == ("succeeded", 20, 2)
    assert 3 < took < AT_ONCE
    assert protocol.outcomes(url) == ["abandoned", "succeeded"]
    invariants.check(url, complete=True)


def test_a_holder_whose_connections_are_cut_is_not_taken_for_dead(engines: Engines, url: str) -> None:
    engine = _at_work(engines, url, lease=60 / 7)  # it renews by itself every three seconds, and is not waited for
    old = _recorded(url)
    assert faults.terminate_backends(url) >= 2
    other = engines.start(Plan(url))
    took = faults.wait_until(
        lambda: _recorded(url)[:1] not in ([(old[0][0], False)], old, []), "the next connection is recorded"
    )
    faults.say(f"cut: connected again after {took:.1f} s")
    assert other.ends().outcome == "busy"
    engine.go()
    ending = engine.ends()
    assert (ending.outcome, ending.items) == ("succeeded", 20)
    assert protocol.outcomes(url) == ["succeeded", "busy"]
    invariants.check(url, complete=True)


def test_a_stopped_holder_is_not_taken_for_dead(engines: Engines, url: str) -> None:
    engine = _at_work(engines, url)
    engine.pause()
    _last_for_long(url)
    with protocol.session(url) as connection:
        assert job_table.wanted(connection, ["copy_rows"]) == []
    assert engines.start(Plan(url)).ends().outcome == "busy"
    engine.resume()
    engine.go()
    assert engine.ends().fence == 1
    invariants.check(url, complete=True)


@pytest.mark.parametrize(
    ("seen", "is_gone"),
    [
        ("select pid, backend_start from pg_stat_activity where pid = pg_backend_pid()", False),
        ("select pid, null from pg_stat_activity where pid = pg_backend_pid()", False),
        ("select pid, backend_start - '1s'::interval from pg_stat_activity where pid = pg_backend_pid()", True),
        ("select 2147483647, now()", True),
        ("select null, null", False),
    ],
)
def test_a_number_that_came_again_is_another_process(url: str, seen: str, is_gone: bool) -> None:
    assert jobs.query(url, f"select gaffer.is_gone(pid::int, at::timestamptz) from ({seen}) as of (pid, at)") == [
        (is_gone,)
    ]


def test_one_that_comes_back_in_time_keeps_its_lease(url: str) -> None:
    spec = jobs.spec()
    with protocol.session(url) as connection:
        protocol.register(connection, spec)
        held = protocol.acquire(connection, spec).lease
        with protocol.session(url) as keeper:
            assert leases.renew(keeper, held, timedelta(minutes=1))
        protocol.until(lambda: not _recorded(url)[0][1])
        first = protocol.acquire(connection, spec).grant
        assert first.outcome == "busy"
        assert first.free_at is not None
        assert 3 < (first.free_at - first.granted_at).total_seconds() <= 4
        assert leases.renew(connection, held, timedelta(minutes=1))
        jobs.execute(url, "update gaffer.job_lease set lease_until = gaffer.clock() + '5m'")
        assert protocol.acquire(connection, spec).grant.free_at is None


def test_without_the_wait_a_living_holder_would_be_robbed(engines: Engines, url: str) -> None:
    variants.replace(url, "acquire", {"c_gone constant interval := '4 seconds'": "c_gone constant interval := '0'"})
    engine = _at_work(engines, url)
    engine.pause()  # as if the second in which it would connect again were long
    faults.terminate_backends(url)
    assert engines.start(Plan(url)).ends().fence == 2
    engine.resume()
    engine.go()
    assert engine.ends().error == "LeaseLostError"
    invariants.check(url, complete=True)
