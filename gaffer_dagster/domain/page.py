"""What a page says of a job and of a run, as Markdown.

What people or databases wrote (an error, a reason, a name) stands in a code span, in which nothing is markup: see
`verbatim`. Only a job's own description is Markdown of its author's.
"""

from __future__ import annotations

import inspect
import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from zoneinfo import ZoneInfo

from gaffer_dagster.domain.amount import counted
from gaffer_dagster.domain.due import EachInterval, Elapsed, NewRows, PendingRows
from gaffer_dagster.domain.duration import in_words
from gaffer_dagster.domain.job import JobRecord
from gaffer_dagster.domain.progress import BACKLOG_CEILING, Progress
from gaffer_dagster.domain.run import Outcome, RunRecord
from gaffer_dagster.domain.spec import JobSpec
from gaffer_dagster.domain.watermark import TimePosition
from gaffer_dagster.domain.words import words

MOST = 999
"""Characters of a summary, as JavaScript counts them: Dagster's page shows it at once, and a longer one on a click."""

_BESIDE = 160
_WOKEN = {
    "schedule": "Woken by its schedule",
    "sensor": "Asked for by the sensor",
    "manual": "Started by hand",
    "command": "Started by the command",
    "redo": "Started by hand",
}


@dataclass(frozen=True)
class Beside:
    """What else is known when a run has ended. `job`: as it is now; `running`: the runs that are at work on it;
    `dead`: those that this run found dead when it took their lease."""

    job: JobRecord | None = None
    running: Sequence[RunRecord] = ()
    dead: Sequence[RunRecord] = ()


def verbatim(text: str, most: int = _BESIDE) -> str:
    """`text` as a code span on one line: no link, HTML or table comes of it, and it cannot end the span."""
    seen = "".join("" if unicodedata.category(char) in ("Cf", "Cn", "Cs") else char for char in text)
    seen = " ".join("".join(char if char.isprintable() else " " for char in seen).split())
    seen = seen if len(seen) <= most else seen[: most - 1] + "…"
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", seen)), default=0))
    blank = " " if not seen or seen[0] == "`" or seen[-1] == "`" else ""
    return f"{fence}{blank}{seen}{blank}{fence}"


def both_clocks(at: datetime, zone: str) -> str:
    """On the clock of the job's zone, and in UTC."""
    utc, local = at.astimezone(timezone.utc), at.astimezone(ZoneInfo(zone))
    shown = _minute(utc) + "Z"
    if zone == "UTC":
        return shown
    date = f"{local:%Y-%m-%d} " if utc.date() != local.date() else ""
    return f"{_minute(local)} {zone} ({date and f'{utc:%Y-%m-%d} '}{_clock(utc)}Z)"


def _minute(at: datetime) -> str:
    return f"{at:%Y-%m-%d} {_clock(at)}"


def _clock(at: datetime) -> str:
    return f"{at:%H:%M:%S}" if at.second else f"{at:%H:%M}"


# ── a job ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def description(spec: JobSpec, told: str | None) -> str:
    """What its author wrote, then what its spec means."""
    lines = [] if not told else [inspect.cleandoc(told), ""]
    schedule = spec.schedule
    when = "only when asked to" if schedule is None else f"{words(schedule)} ({verbatim(_cron(spec))})"
    lines.append(f"- **Wakes:** {when}")
    if spec.tolerance is not None:
        lines[-1] += f"; a tick found more than {in_words(spec.tolerance)} late is skipped"
    lines += [
        f"- **Due:** {_due(spec)}",
        f"- **Writes:** {_writers(spec)}",
        f"- **A run does:** at most {_bounds(spec)}; what is left is reported and taken up next",
        f"- **Alerts:** {_alerts(spec)}",
        "- **By hand:** the jobs `gaffer_…` of this code location, or the command `gaffer`",
    ]
    return "\n".join(lines)


def commands(spec: JobSpec) -> list[str]:
    """What shows more of it, in a shell."""
    found = [f"gaffer status {spec.name}", f"gaffer runs {spec.name}"]
    if spec.schedule is not None:
        found.append(f"gaffer ticks {spec.name}")
    found.append(
        f"gaffer items list {spec.name}" if isinstance(spec.due, PendingRows) else f"gaffer watermark show {spec.name}"
    )
    return found


def _cron(spec: JobSpec) -> str:
    assert spec.schedule is not None  # noqa: S101 — asked for where there is one
    cron = spec.schedule.cron
    return cron if isinstance(cron, str) else " | ".join(cron)


def _due(spec: JobSpec) -> str:
    due = spec.due
    if isinstance(due, NewRows):
        order = "commit order" if due.cursor is None else f"the order of {verbatim(due.cursor)}"
        late = "" if due.settle is None else f", {in_words(due.settle)} after it"
        where = "" if due.where is None else f" where {verbatim(due.where)}"
        return f"rows of {verbatim(due.table)}{where} that are new, each once, in {order}{late}"
    if isinstance(due, PendingRows):
        return (
            f"rows of {verbatim(due.table)} where {verbatim(due.pending)}; one that fails is tried "
            f"{counted(due.attempts, 'time')} in all, then parked"
        )
    if isinstance(due, EachInterval):
        grid = spec.intervals.grid
        what = "each interval between two ticks" if due.cron is None else f"each interval of {verbatim(str(grid.cron))}"
        return f"{what} in {spec.timezone}, in order, {in_words(due.settle)} after its end"
    what = "the time since the watermark" if due.slice is None else f"each {in_words(due.slice)} since the watermark"
    return f"{what}, up to the newest tick, {in_words(due.settle)} after its end"


def _writers(spec: JobSpec) -> str:
    one = "one run at a time" if spec.slots == 1 else f"up to {spec.slots} runs side by side"
    lock = ", with an advisory lock for each batch" if spec.exclusion == "advisory" else ""
    tables = ", ".join(verbatim(table) for table in spec.protect)
    protected = f"; nobody else may write to {tables}" if tables else ""
    return f"{one}, under a lease whose fence is verified at each COMMIT{lock}{protected}"


def _bounds(spec: JobSpec) -> str:
    limits = spec.limits
    if isinstance(spec.due, (NewRows, PendingRows)):
        amount = f"{counted(limits.batches, 'batch', 'batches')} of {counted(limits.batch_rows, 'row')}"
    else:
        amount = counted(limits.batches, "interval")
    return f"{amount}, within {in_words(limits.timeout)}"


def _alerts(spec: JobSpec) -> str:
    alerts = spec.alerts
    said = [] if spec.schedule is None else [f"a tick {in_words(alerts.grace_for(spec.schedule))} late"]
    said.append(f"{counted(alerts.failures, 'failed tick')} in a row")
    if alerts.backlog is not None:
        said.append(f"something due left for {in_words(alerts.backlog)}")
    to = "" if alerts.receivers is None else f"; tells {', '.join(alerts.receivers)}"
    return ", ".join(said) + to


# ── a run ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def headline(record: RunRecord, spec: JobSpec) -> str:
    """How it went, as one plain sentence without what anybody else wrote."""
    return _headline(record, spec).replace("**", "")


def at_work(progress: Progress, spec: JobSpec) -> str:
    """How far a run that has not ended has got."""
    did = f"{_things(progress.items, spec)} in {counted(progress.batches, 'batch', 'batches')}"
    said = [f"**At work:** {did} so far, {progress.items_per_second:,.1f} a second"]
    if progress.left is not None:
        at_least = "at least " if progress.left >= BACKLOG_CEILING else ""
        said.append(f"{at_least}{_things(progress.left, spec)} left")
    if progress.caught_up_at is not None:
        said.append(f"at this pace done by {both_clocks(progress.caught_up_at, spec.timezone)}")
    return "; ".join(said)


def summary(record: RunRecord, spec: JobSpec, beside: Beside) -> str:
    """How it went, what is left and when that is taken up, who held the lease, and what to do."""
    lines = [_headline(record, spec)]
    lines += [f"- {line}" for line in _details(record, spec, beside)]
    while len(lines) > 1 and _length(lines) > MOST:
        lines.pop()
    return "\n".join(lines)


def _length(lines: Sequence[str]) -> int:
    return len("\n".join(lines).encode("utf-16-le")) // 2


def _headline(record: RunRecord, spec: JobSpec) -> str:
    did = f"{_things(record.items, spec)} in {counted(record.batches, 'batch', 'batches')}"
    outcome = record.outcome
    if record.redo_since is not None and record.redo_until is not None:
        span = f"{both_clocks(record.redo_since, spec.timezone)} to {both_clocks(record.redo_until, spec.timezone)}"
        return f"**Redo {outcome}:** the interval from {span}, once more; the watermark stays"
    if outcome is Outcome.SUCCEEDED:
        return f"**Succeeded:** {did}; nothing due is left" if record.items else "**Succeeded:** nothing was due"
    if outcome is Outcome.PARTIAL:
        return f"**Partial:** {did}; nothing else due is left, but rows failed"
    if outcome is Outcome.CAPPED:
        left = "something" if record.backlog is None else _things(record.backlog, spec)
        # A run that did nothing waited for something.
        return f"**Capped:** {did} done, then a bound was reached; {left} left"
    if outcome is Outcome.BUSY:
        return "**Busy:** another run holds the lease, and will see to what this one was asked for. Nothing was done"
    if outcome is Outcome.PAUSED:
        return "**Paused:** nothing was done, and this tick is skipped; what is due is done after the pause"
    if outcome is Outcome.LATE:
        return "**Late:** nothing was done; what was due waits for the next tick"
    if outcome is Outcome.RUNNING:
        return f"**Running:** {did} so far"
    if outcome is Outcome.INTERRUPTED:
        return f"**Interrupted:** told to stop after {did}, which stay"
    why = {
        Outcome.TIMED_OUT: "Timed out",
        Outcome.LOST_LEASE: "Lost its lease",
        Outcome.ABANDONED: "Found dead",
    }.get(outcome, "Failed")
    kept = f"{did} had been committed and stay" if record.batches else "nothing was committed"
    return f"**{why}:** {kept}; the next run goes on from there"


def _details(record: RunRecord, spec: JobSpec, beside: Beside) -> Iterator[str]:
    """The first ones matter most: what is too much is left out from the end."""
    zone, job = spec.timezone, beside.job
    if record.error:
        state = f" ({record.sqlstate})" if record.sqlstate else ""
        yield f"Error: {verbatim(record.error, 300)}{state}"
    if record.outcome is Outcome.BUSY:
        yield from (
            f"Held by {verbatim(each.owner)} (fence {each.fence}), run {each.id}, at work since "
            f"{both_clocks(each.started_at, zone)}{_dagster(each)}"
            for each in beside.running[:2]
        )
        if not beside.running and job is not None and job.owner is not None and job.lease_until is not None:
            yield f"Held by {verbatim(job.owner)} (fence {job.fence}) until {both_clocks(job.lease_until, zone)}"
    if record.outcome is Outcome.PAUSED and job is not None and job.paused_at is not None:
        until = "somebody resumes it" if job.paused_until is None else both_clocks(job.paused_until, zone)
        why = f": {verbatim(job.pause_reason)}" if job.pause_reason else ""
        yield f"Paused by {verbatim(job.paused_by or '?')} at {both_clocks(job.paused_at, zone)} until {until}{why}"
    if record.outcome is Outcome.LATE and record.tick is not None and spec.tolerance is not None:
        late = in_words(_whole(record.started_at - record.tick))
        yield f"Woken {late} after its tick; more than {in_words(_whole(spec.tolerance))} counts as too late"
    since, until = (TimePosition.until_of(each) for each in (record.watermark_from, record.watermark_to))
    if record.items and until is not None and record.redo_since is None:
        begun = "up to" if since is None else f"{both_clocks(since, zone)} to"
        yield f"Window: {begun} {both_clocks(until, zone)}"
    yield from _next(record, spec, job)
    if record.held_by is not None:
        seen = "" if record.held_by_since is None else f", seen since {both_clocks(record.held_by_since, zone)}"
        cure = "" if record.held_by.cure is None else f"; to end it: {verbatim(record.held_by.cure)}"
        yield f"Waits for {verbatim(record.held_by.who)}{seen}{cure}. Nothing is lost"
    if record.parked:
        command = verbatim(f"gaffer items list {record.job}")
        yield f"{counted(record.parked, 'row')} parked, to be looked at: {command}"
    for dead in beside.dead[:1]:
        yield (
            f"Took over from run {dead.id} (fence {dead.fence}, {verbatim(dead.owner)}), found dead; it began "
            f"{both_clocks(dead.started_at, zone)}{_dagster(dead)}"
        )
    if record.fence is not None:
        slot = f", slot {record.slot}" if spec.slots > 1 else ""
        yield f"Lease: fence {record.fence}{slot}, held by {verbatim(record.owner)}"
    if record.tick is not None and record.outcome is not Outcome.LATE:
        yield f"{_WOKEN[record.trigger]}; newest tick {both_clocks(record.tick, zone)}"


def _next(record: RunRecord, spec: JobSpec, job: JobRecord | None) -> Iterator[str]:
    zone = spec.timezone
    tick = record.next_run_at
    if tick is None and spec.schedule is not None:
        tick = spec.schedule.next(record.ended_at or record.started_at)
    shown = "" if tick is None else f"next tick {both_clocks(tick, zone)}"
    soon = None if job is None or job.follow_up_at is None else job
    if soon is not None and soon.follow_up_at is not None and (tick is None or soon.follow_up_at < tick):
        if soon.follow_up_at <= soon.seen_at:
            asked = "another run is asked for at once"
        else:
            asked = f"another run is asked for at {both_clocks(soon.follow_up_at, zone)}"
        shown = "; ".join(filter(None, [asked, shown]))
    if shown:
        yield shown[0].upper() + shown[1:]


def _dagster(record: RunRecord) -> str:
    """A link to its page, where it has one."""
    run = record.dagster_run_id
    return f" ([Dagster run {run[:8]}](/runs/{run}))" if run and re.fullmatch(r"[0-9a-f-]{36}", run) else ""


def _things(number: int, spec: JobSpec) -> str:
    if isinstance(spec.due, Elapsed) and spec.due.slice is None:
        return counted(number, "stretch of time", "stretches of time")
    return counted(number, "row" if isinstance(spec.due, (NewRows, PendingRows)) else "interval")


def _whole(duration: timedelta) -> timedelta:
    return timedelta(seconds=round(duration.total_seconds()))
