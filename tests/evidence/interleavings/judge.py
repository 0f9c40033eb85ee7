"""What must hold after a schedule, whatever happened in it: promises, each with how it was broken."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from datetime import timedelta

from gaffer_dagster.engine.keeper import Keeper
from gaffer_dagster.errors import GafferError, LeaseLostError
from gaffer_dagster.store import jobs as job_table
from tests.evidence.interleavings.cases import Case, Fault
from tests.evidence.interleavings.database import JOB, Database
from tests.evidence.interleavings.gate import Gate, Runner

KEEPS = "nobody loses a lease for nothing"


def judged(case: Case, gate: Gate) -> dict[str, str]:
    """Of what those did who are through. One more run, without a fault, must finish the work."""
    database, runners = gate.database, gate.runners
    for thread in threading.enumerate():
        if isinstance(thread, Keeper):  # of one who was killed
            thread.end()
    broken: dict[str, str] = {}
    for each in runners:
        allowed = GafferError if case.fault is Fault.RESTORE else LeaseLostError
        if each.error is not None and not isinstance(each.error, allowed):
            broken["nobody fails"] = f"{each.name}: {each.error!r}"
        if each.is_refused_its_own:
            broken[KEEPS] = f"{each.name}: its renewal was refused"
    broken |= dict.fromkeys(database.violations(at_rest=False), "before the next run")
    database.advance(timedelta(minutes=6))
    left = database.monitor.execute("select id from source except select id from target").fetchall()
    began = database.monitor.execute(  # who was killed before he said anything left nothing to ask for
        "select from gaffer.job_runs union all select from gaffer.job where wanted_at is not null"
    ).rowcount
    if left and began and case.fault is not Fault.RESTORE and not job_table.wanted(database.ask, [JOB.name]):
        broken["what is left is asked for"] = f"{left}"
    if case.is_peaceful:
        broken |= _lost_for_nothing(database, runners)
    try:
        gate.opens_for(case.after)
    except BaseException as error:
        broken["one more run finishes the work"] = repr(error)
    broken |= dict.fromkeys(database.violations(at_rest=True), "after the next run")
    if (
        case.counts
        and database.monitor.execute("select n from total").fetchall()
        != database.monitor.execute("select count(*) from target").fetchall()
    ):
        broken["what was counted is what is there"] = ""
    rows = Counter(database.monitor.execute("select id, fence from target order by id").fetchall())
    done = {row for row, _ in rows}
    if database.monitor.execute("select id from source except select id from target").fetchall():
        broken["one more run finishes the work"] = f"done: {done}"
    for each in runners:
        for acked in each.acked:
            if acked not in rows:
                broken["what was acknowledged is there"] = f"{each.name}: {acked}"
        for row, fence, is_committed in each.verdicts:
            if ((row, fence) in rows) != is_committed:
                broken["an unknown COMMIT is found out"] = f"{each.name}: {row} under {fence}"
    return broken


def _lost_for_nothing(database: Database, runners: Iterable[Runner]) -> dict[str, str]:
    """Of leases that nobody could take away."""
    ended = database.monitor.execute(
        "select fence, outcome, error from gaffer.job_runs where outcome not in ('succeeded', 'capped', 'busy')"
        " or batches = 0 and fence is not null and exists (select id from source except select id from target)"
    ).fetchall()
    acked = sorted(row for each in runners for row in each.acked)
    there = database.monitor.execute("select id, fence from target order by id, fence").fetchall()
    broken: dict[str, str] = {}
    for each in runners:
        if each.error is not None or each.ending in ("lost_lease", "not recorded"):
            broken[KEEPS] = f"{each.name}: {each.error or each.ending}"
    if ended:
        broken[KEEPS] = f"{ended}"
    elif acked != there:
        broken[KEEPS] = f"acknowledged: {acked}, there: {there}"
    return broken
