"""What Dagster recorded of runs that could not tell the database themselves.

A launch that failed, a worker that the kernel killed before its first word, a code location that did not load: Dagster
has a record of the run, and `gaffer.job_runs` has nothing. The same with a run that stays NOT_STARTED, STARTING or
STARTED for longer than its job may take. Both are learnt as failures, here and not through Dagster's run-status
sensors, which try once only. The other way round, a run that ended well and died before it could report is reported.

Not one query for each job: the records that changed since the last look are read, page by page, and looked up together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any

import dagster as dg

from gaffer_dagster.adapter import metadata
from gaffer_dagster.adapter.assets import JOB_TAG, GafferJob
from gaffer_dagster.adapter.resource import TICK_TAG, trigger_of
from gaffer_dagster.domain.run import RunRecord
from gaffer_dagster.store import db, learnt, runs
from gaffer_dagster.store.learnt import Dead

# Records carry the clocks of those who write them, and arrive late.
_OVERLAP = timedelta(minutes=10)
# A run that says nothing for so much longer than its job may take will say nothing any more.
_BACKSTOP = timedelta(minutes=5)
_PAGE, _PAGES = 100, 10
_MOST_TEXT = 300
_UNFINISHED = (dg.DagsterRunStatus.NOT_STARTED, dg.DagsterRunStatus.STARTING, dg.DagsterRunStatus.STARTED)
_TELLING = {dg.DagsterEventType.ENGINE_EVENT, dg.DagsterEventType.STEP_FAILURE, dg.DagsterEventType.RUN_FAILURE}


@dataclass(frozen=True)
class Learnt:
    """`dead`: the runs that were not known, by job; `reports`: what is now to be told to Dagster, by job; `failed`: why
    some could not be learnt, which are tried again."""

    dead: Sequence[Dead] = ()
    reports: dict[str, list[dg.AssetMaterialization]] = field(default_factory=dict[str, list[dg.AssetMaterialization]])
    failed: Sequence[Exception] = ()


@dataclass(frozen=True)
class _Over:
    """A run that is over, or as good as, and did this job, or was to. `ended_at`: when that became true."""

    job: GafferJob
    record: dg.RunRecord
    ended_at: datetime


def learn(
    instance: dg.DagsterInstance,
    connection: db.Connection,
    found: Sequence[GafferJob],
    watch: str,
    location: str | None,
) -> Learnt:
    """Learns of the runs of these jobs in this code location that changed since the last time, a thousand at most."""
    with db.impatient(connection):
        mark = learnt.mark(connection, watch)
    if mark is None:
        return Learnt()
    since = mark.learnt_until or mark.first_seen_at
    if since > mark.now:  # the clock ran ahead for a while
        since = mark.now - _OVERLAP
    by_key = {job.key: job for job in found}
    ended, until = _page_through(instance, since, None, [dg.DagsterRunStatus.FAILURE])
    timeouts = [job.spec.limits.timeout for job in found]
    unfinished, _ = _page_through(
        instance, since - max(timeouts) - _BACKSTOP, mark.now - min(timeouts) - _BACKSTOP, _UNFINISHED
    )
    over = [
        each
        for record in (*ended, *unfinished)
        if _is_here(record.dagster_run, location)
        for each in _over(instance, record, by_key, mark.now)
    ]
    result = _tell(instance, connection, over)
    if result.failed:
        return result
    with db.impatient(connection):
        learnt.note(connection, watch, until or max(mark.first_seen_at, mark.now - _OVERLAP))
    return result


def _page_through(
    instance: dg.DagsterInstance, since: datetime, until: datetime | None, statuses: Sequence[dg.DagsterRunStatus]
) -> tuple[list[dg.RunRecord], datetime | None]:
    """The records that changed after `since`, the oldest first; and up to when, if there are more."""
    records: dict[str, dg.RunRecord] = {}
    for _ in range(_PAGES):
        page = instance.get_run_records(
            dg.RunsFilter(statuses=statuses, updated_after=since, updated_before=until),
            limit=_PAGE,
            order_by="update_timestamp",
            ascending=True,
        )
        records.update((record.dagster_run.run_id, record) for record in page)
        if len(page) < _PAGE:
            return list(records.values()), None
        since = page[-1].update_timestamp - timedelta(microseconds=1)  # others may have changed at that very instant
    return list(records.values()), since


def _is_here(run: dg.DagsterRun, location: str | None) -> bool:
    """Whether it is of this code location, or of none: another one may have a job of the same name."""
    origin = run.remote_job_origin
    return origin is None or location is None or origin.repository_origin.code_location_origin.location_name == location


def _over(
    instance: dg.DagsterInstance, record: dg.RunRecord, by_key: dict[dg.AssetKey, GafferJob], now: datetime
) -> Iterator[_Over]:
    run = record.dagster_run
    keys = _keys(instance, run)
    if run.status is dg.DagsterRunStatus.FAILURE:
        ended_at = record.update_timestamp if record.end_time is None else _at(record.end_time)
        yield from (_Over(by_key[key], record, ended_at) for key in keys if key in by_key)
    elif run.status is not dg.DagsterRunStatus.STARTED or len(keys) == 1:  # among others its turn may not have come
        since = record.update_timestamp if record.start_time is None else _at(record.start_time)
        for job in (by_key[key] for key in keys if key in by_key):
            ended_at = since + job.spec.limits.timeout + _BACKSTOP
            if ended_at <= now:
                yield _Over(job, record, ended_at)


def _keys(instance: dg.DagsterInstance, run: dg.DagsterRun) -> set[dg.AssetKey]:
    """The assets that it was to do. It has no tag of ours where "Materialize", or a job of somebody's own, began it."""
    if JOB_TAG in run.tags:
        return {dg.AssetKey(run.tags[JOB_TAG].split("/"))}
    if run.asset_selection is not None:
        return set(run.asset_selection)
    return _assets_of(instance, run.run_id, dg.DagsterEventType.ASSET_MATERIALIZATION_PLANNED)


def _assets_of(instance: dg.DagsterInstance, run_id: str, kind: dg.DagsterEventType) -> set[dg.AssetKey]:
    events = (entry.dagster_event for entry in instance.all_logs(run_id, of_type=kind))
    return {event.asset_key for event in events if event is not None and event.asset_key is not None}


def _tell(instance: dg.DagsterInstance, connection: db.Connection, over: Sequence[_Over]) -> Learnt:
    if not over:
        return Learnt()
    run_ids = sorted({each.record.dagster_run.run_id for each in over})
    with db.impatient(connection):
        known = learnt.known(connection, run_ids)
        unreported = runs.unreported(connection, run_ids)
    dead: list[Dead] = []
    failed: list[Exception] = []
    for each in sorted(over, key=lambda one: one.ended_at):  # the streak counts in the order of time
        if (each.job.spec.name, each.record.dagster_run.run_id) not in known:
            try:
                told = _dead(instance, each)
                with db.impatient(connection):
                    if learnt.learn(connection, told) is not None:
                        dead.append(told)
            except Exception as error:  # of one run: the others are learnt all the same
                failed.append(error)
    return Learnt(dead, _reports(instance, connection, over, unreported), failed)


def _dead(instance: dg.DagsterInstance, over: _Over) -> Dead:
    spec, run = over.job.spec, over.record.dagster_run
    began = None if over.record.start_time is None else _at(over.record.start_time)
    started_at = began or over.ended_at
    ticks = [datetime.fromisoformat(run.tags[TICK_TAG])] if TICK_TAG in run.tags else []
    newest = None if spec.schedule is None else spec.schedule.latest(started_at)
    return Dead(
        job=spec.name,
        dagster_run_id=run.run_id,
        trigger=trigger_of(run.tags),
        tick=max([*ticks, *([] if newest is None else [newest])], default=None),
        started_at=started_at,
        ended_at=over.ended_at,
        spec_hash=spec.hash,
        error=_why(instance, run),
    )


def _why(instance: dg.DagsterInstance, run: dg.DagsterRun) -> str:
    """What Dagster recorded, in one line: its own words, and of errors only their kind, since they may say anything."""
    said: list[str] = []
    kind = ""
    for entry in instance.all_logs(run.run_id, of_type=_TELLING):
        data: Any = None if entry.dagster_event is None else entry.dagster_event.event_specific_data
        error = getattr(data, "error", None)
        while error is not None:
            kind, error = error.cls_name or kind, error.cause
        if entry.dagster_event is not None and getattr(data, "error", None) is None and entry.dagster_event.message:
            said.append(entry.dagster_event.message.splitlines()[0])
    words = [
        f"Dagster recorded {run.status.value} of a run that wrote nothing here",
        *([kind] if kind else []),
        *said[-2:],
    ]
    return db.redact(": ".join(words))[:_MOST_TEXT]


def _reports(
    instance: dg.DagsterInstance, connection: db.Connection, over: Sequence[_Over], unreported: Sequence[RunRecord]
) -> dict[str, list[dg.AssetMaterialization]]:
    """What these runs did, and died before they could say."""
    mine = {(each.job.spec.name, each.record.dagster_run.run_id): each.job for each in over}
    rows = [row for row in unreported if (row.job, row.dagster_run_id) in mine]
    if not rows:
        return {}
    with db.impatient(connection):
        claimed = learnt.claim_reports(connection, [row.id for row in rows])
    reports: dict[str, list[dg.AssetMaterialization]] = {}
    for row in rows:
        job = mine[row.job, row.dagster_run_id or ""]
        key = job.key
        kind = dg.DagsterEventType.ASSET_MATERIALIZATION
        if row.id in claimed and key not in _assets_of(instance, row.dagster_run_id or "", kind):
            event = dg.AssetMaterialization(key, metadata=metadata.of_run(row, job.spec))
            reports.setdefault(row.job, []).append(event)
    return reports


def _at(timestamp: float) -> datetime:
    return datetime.fromtimestamp(timestamp, timezone.utc)
