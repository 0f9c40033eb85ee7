"""`gaffer simulate`: what a schedule comes to, with outages and failures, and which alerts it would raise."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta, timezone
from itertools import groupby
from pathlib import Path
from typing import Any

import click

from gaffer_dagster.cli.command import Read, Table, file_option, show_time, tell
from gaffer_dagster.cli.definitions import jobs_in
from gaffer_dagster.domain.amount import counted
from gaffer_dagster.domain.due import NewRows
from gaffer_dagster.domain.duration import as_duration, in_words, show_duration
from gaffer_dagster.domain.incident import Alert, Stretch
from gaffer_dagster.domain.ledger import Disposition, Tick
from gaffer_dagster.domain.moment import as_moment
from gaffer_dagster.domain.run import Outcome
from gaffer_dagster.domain.schedule import Schedule
from gaffer_dagster.domain.simulation import (
    MOST_LOOKS,
    Scenario,
    SimulatedRun,
    Simulation,
    as_chance,
    as_lengths,
    as_pauses,
    as_stretches,
)
from gaffer_dagster.domain.simulation import (
    simulate as simulated,
)
from gaffer_dagster.domain.spec import JobSpec
from gaffer_dagster.domain.words import words
from gaffer_dagster.errors import BadInputError, BadSpecError, UnknownJobError

_YEAR = timedelta(days=365)
_MOST = 30
_WORDS = {
    Disposition.COVERED: "covered on time",
    Disposition.COVERED_LATE: "covered late",
    Disposition.MISSED: "missed",
    Disposition.PAUSED: "skipped: paused",
    Disposition.LATE: "skipped: late",
}


@dataclass(frozen=True)
class _Ticks:
    """Ticks in a row of which the same became."""

    first: datetime
    last: datetime
    count: int
    disposition: Disposition
    run: int | None
    late_by: timedelta | None
    """Of the first."""


@click.command("simulate", cls=Read)
@click.argument("what", metavar="CRON|JOB")
@click.argument("zone", required=False)
@file_option(help="Where JOB is defined.")
@click.option("-m", "--module", help="The same, as a Python module.")
@click.option("--since", metavar="TIME", help="When it begins; left out: now.")
@click.option("--until", metavar="TIME", help="When it ends: a time, or how long; left out: a year later.")
@click.option("--takes", default="10s", show_default=True, help="How long a run takes: 20m, or 5m..50m at random.")
@click.option("--fails", default="0%", show_default=True, help="The chance of a run to fail.")
@click.option("--dies", default="0%", show_default=True, help="The chance of a run to be killed; its lease runs out.")
@click.option("--failing", metavar="SINCE/UNTIL", multiple=True, help="Each run that begins in it fails.")
@click.option("--down", metavar="SINCE/UNTIL", multiple=True, help="Dagster's daemon is down: no ticks, no sensor.")
@click.option("--database-down", metavar="SINCE/UNTIL", multiple=True, help="The database is down.")
@click.option("--paused", metavar="SINCE/UNTIL", multiple=True, help="The job is paused; without UNTIL: for ever.")
@click.option("--timeout", help="How long a run may take.  [default: the job's]")
@click.option("--grace", help="How late a success may come.  [default: the job's]")
@click.option("--failures", type=int, help="How many ticks in a row may fail.  [default: the job's]")
@click.option("--max-late", help="A tick that is found later is skipped.  [default: the job's]")
@click.option("--every", default="30s", show_default=True, help="How often the watch looks.")
@click.option("--seed", default=1, show_default=True, help="Of what is random; the same gives the same again.")
@click.option("--all", "show_all", is_flag=True, help="Show every run, and tables in full.")
def simulate(
    what: str,
    zone: str | None,
    file: Path | None,
    module: str | None,
    since: str | None,
    until: str | None,
    takes: str,
    fails: str,
    dies: str,
    failing: tuple[str, ...],
    down: tuple[str, ...],
    database_down: tuple[str, ...],
    paused: tuple[str, ...],
    timeout: str | None,
    grace: str | None,
    failures: int | None,
    max_late: str | None,
    every: str,
    seed: int,
    show_all: bool,
    as_json: bool,
) -> None:
    """Live through a year of CRON in ZONE (UTC), or of JOB as -f FILE or -m MODULE defines it, in seconds.

    Which ticks, runs, overlaps and alerts there would be, by the rules that hold in earnest. SINCE/UNTIL are times, of
    the schedule's zone where they have no offset; UNTIL may be how long instead:

    gaffer simulate '0 2 * * *' Europe/Berlin --takes 5m..50m --fails 5% --down 2027-03-28/25h
    """
    spec = _of_cron(what, zone) if file is None and module is None else _of_job(what, zone, file, module)
    alerts = {"grace": grace, "failures": failures}
    spec = replace(
        spec,
        bounds=spec.bounds if timeout is None else replace(spec.bounds, timeout=timeout, batch_timeout=None),
        alerts=replace(spec.alerts, **{name: given for name, given in alerts.items() if given is not None}),
        max_late=spec.max_late if max_late is None else as_duration(max_late, "--max-late"),
    )
    begin = datetime.now(timezone.utc).replace(second=0, microsecond=0)
    begin = begin if since is None else as_moment(since, "--since", spec.timezone)
    try:
        end = begin + (_YEAR if until is None else as_duration(until, "--until"))
    except BadSpecError:
        end = as_moment(until or "", "--until", spec.timezone)
    if end <= begin:
        raise BadInputError(f"--until {until!r} is not after the start, {begin.isoformat()}; give a later time")
    within = Stretch(begin, end)
    scenario = Scenario(
        spec,
        begin,
        end,
        takes=as_lengths(takes, "--takes"),
        fails=as_chance(fails, "--fails"),
        dies=as_chance(dies, "--dies"),
        failing=as_stretches(failing, "--failing", spec.timezone, within),
        down=as_stretches(down, "--down", spec.timezone, within),
        database_down=as_stretches(database_down, "--database-down", spec.timezone, within),
        paused=as_pauses(paused, "--paused", spec.timezone, within),
        every=as_duration(every, "--every"),
    )
    found = simulated(scenario, random.Random(seed))  # noqa: S311 — to be repeated, nothing secret
    if found.scenario.until < end:
        click.echo(
            f"gaffer: something was wrong at {MOST_LOOKS:,} looks of the watch, so the simulation ends at "
            f"{show_time(found.scenario.until)} and not at {show_time(end)}; to see a later time, give --since",
            err=True,
        )
    ticks = [_in_a_row(key, list(group)) for key, group in groupby(found.ticks(), _what_became)]
    if as_json:
        _print_json(found, ticks, seed)
    else:
        _print(found, ticks, seed, show_all=show_all)


def _of_cron(what: str, zone: str | None) -> JobSpec:
    if " " not in what.strip() and not what.startswith("@"):
        raise BadInputError(
            f"{what!r} is no cron; write one in quotes, such as '0 6 * * *', or say where the job is defined: "
            "-f FILE or -m MODULE"
        )
    schedule = Schedule(what, zone or "UTC")
    if schedule.uses_hash:
        raise BadInputError(
            f"cron {what!r}: H stands for a number made from a job's name; write a number, or simulate the job: "
            "-f FILE JOB"
        )
    # What is due is not simulated; a job has to say something.
    return JobSpec("simulated", NewRows("source", "id"), schedule)


def _of_job(job: str, zone: str | None, file: Path | None, module: str | None) -> JobSpec:
    if zone is not None:
        raise BadInputError(f"zone {zone!r}: job {job!r} has a schedule of its own; leave the zone out")
    jobs = jobs_in(file, module)
    if job not in jobs:
        raise UnknownJobError(f"no job {job!r} is defined there; there is {', '.join(sorted(jobs))}")
    return jobs[job].job.spec


def _what_became(tick: Tick) -> tuple[Disposition, int | None]:
    return tick.disposition, None if tick.disposition is Disposition.COVERED else tick.run_id


def _in_a_row(became: tuple[Disposition, int | None], ticks: Sequence[Tick]) -> _Ticks:
    return _Ticks(ticks[0].at, ticks[-1].at, len(ticks), *became, ticks[0].late_by)


def _is_plain(run: SimulatedRun) -> bool:
    return run.outcome in (Outcome.SUCCEEDED, Outcome.PAUSED)


def _outcome(run: SimulatedRun) -> str:
    return "not recorded" if run.outcome is None else str(run.outcome)


def _counts(found: Simulation, ticks: Sequence[_Ticks]) -> dict[str, dict[str, int]]:
    dispositions: Counter[str] = Counter()
    for each in ticks:
        dispositions[str(each.disposition)] += each.count
    return {
        "ticks": dict(dispositions),
        "runs": dict(Counter(_outcome(run) for run in found.runs)),
        "incidents": dict(Counter(str(alert.kind) for alert in found.incidents)),
    }


def _summary(found: Simulation, ticks: Sequence[_Ticks], seed: int) -> str:
    counts = _counts(found, ticks)
    of_ticks = {_WORDS[Disposition(kind)]: count for kind, count in counts["ticks"].items()}
    parts = [
        _listed("tick", of_ticks),
        _listed("run", counts["runs"]),
        counted(_overlaps(found), "overlap"),
        _listed("incident", counts["incidents"]),
        f"seed {seed}",
    ]
    return "; ".join(parts)


def _overlaps(found: Simulation) -> int:
    return sum(run.outcome is Outcome.BUSY for run in found.runs)


def _listed(noun: str, counts: Mapping[str, int]) -> str:
    told = ", ".join(f"{count:,} {name}" for name, count in counts.items())
    return counted(sum(counts.values()), noun) + (f" ({told})" if told else "")


def _rules(given: Scenario) -> str:
    spec, schedule = given.spec, given.schedule
    tolerance = "" if spec.tolerance is None else f", a tick is skipped after {show_duration(spec.tolerance)}"
    return (
        f"{words(schedule)}, from {show_time(given.since)} to {show_time(given.until)}; timeout "
        f"{show_duration(spec.limits.timeout)}, grace {show_duration(spec.alerts.grace_for(schedule))}{tolerance}, an "
        f"incident after {counted(spec.alerts.failures, 'failure')}"
    )


def _print(found: Simulation, ticks: Sequence[_Ticks], seed: int, *, show_all: bool) -> None:
    click.echo(_summary(found, ticks, seed))
    click.echo(_rules(found.scenario))
    for warning in found.scenario.schedule.warnings:
        click.echo(f"warning: {warning}")
    for effect in found.scenario.schedule.clock_effects(found.scenario.since, found.scenario.until):
        click.echo(f"clock: {effect}")
    late = [each for each in ticks if each.disposition is not Disposition.COVERED]
    runs = found.runs if show_all else [run for run in found.runs if not _is_plain(run)]
    tables: list[tuple[tuple[str, ...], Sequence[Any], Callable[[Any], Iterable[str]]]] = [
        (("incident", "since", "opened", "resolved", "reminders"), found.incidents, _of_incident),
        (("tick", "to", "ticks", "what became of it", "run", "found after"), late, _of_ticks),
        (("run", "woken by", "tick", "started", "took", "outcome"), runs, _of_run),
    ]
    for names, rows, cells in tables:
        shown = rows if show_all else rows[:_MOST]
        if shown:
            table = Table(*names)
            for row in shown:
                table.add_row(*cells(row))
            table.print()
        if len(shown) < len(rows):
            click.echo(f"… and {len(rows) - len(shown):,} more like these: --all or --json shows them")


def _of_incident(alert: Alert) -> Iterable[str]:
    times = (show_time(time) for time in (alert.since_at, alert.opened_at, alert.resolved_at))
    return str(alert.kind), *times, str(alert.reminders)


def _of_ticks(each: _Ticks) -> Iterable[str]:
    return (
        show_time(each.first),
        "" if each.count == 1 else show_time(each.last),
        f"{each.count:,}",
        _WORDS[each.disposition],
        "-" if each.run is None else str(each.run),
        "-" if each.late_by is None else in_words(each.late_by),
    )


def _of_run(run: SimulatedRun) -> Iterable[str]:
    took = "-" if run.ended_at in (None, run.started_at) else in_words(run.ended_at - run.started_at)
    why = "" if run.met is None else f": met run {run.met}"
    if run.learnt_at is not None:
        why = ": the database was away"
    return str(run.number), run.trigger, show_time(run.tick), show_time(run.started_at), took, f"{_outcome(run)}{why}"


def _print_json(found: Simulation, ticks: Sequence[_Ticks], seed: int) -> None:
    """What each line is about is its first word."""
    given = found.scenario
    _tell(
        "summary", **_counts(found, ticks), overlaps=_overlaps(found), seed=seed, since=given.since, until=given.until
    )
    for effect in given.schedule.clock_effects(given.since, given.until):
        _tell("clock", note=effect)
    for alert in found.incidents:
        _tell(
            "incident",
            kind=alert.kind,
            severity=alert.severity,
            since=alert.since_at,
            opened=alert.opened_at,
            resolved=alert.resolved_at,
            reminders=alert.reminders,
            details=alert.details,
        )
    for each in ticks:
        _tell("ticks", **asdict(each))
    for run in found.runs:
        _tell("run", **asdict(run))


def _tell(what: str, **fields: object) -> None:
    tell([{"what": what, **fields}])
