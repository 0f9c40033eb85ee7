"""`gaffer preview`: what a schedule means, and when it fires next."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import click

from gaffer_dagster.cli.command import Read, Table, complete_jobs, job_option, opened, tell
from gaffer_dagster.cli.show import ago
from gaffer_dagster.domain.lint import Lint, lint
from gaffer_dagster.domain.moment import as_moment
from gaffer_dagster.domain.schedule import Preview, Schedule
from gaffer_dagster.errors import BadInputError
from gaffer_dagster.store import jobs


@click.command(cls=Read)
@click.argument("what", metavar="JOB|CRON", shell_complete=complete_jobs)
@click.argument("zone", required=False)
@job_option("--job", "name", metavar="JOB", help="The job whose name an H in CRON is made from.")
@click.option("--missing-hour", type=click.Choice(["end", "skip"]), help="Of CRON: a time that the clock leaps over.")
@click.option("--repeated-hour", type=click.Choice(["second", "first"]), help="Of CRON: a time that comes twice.")
@click.option("--count", default=10, show_default=True, type=click.IntRange(1, 10_000), help="How many ticks.")
@click.option("--after", metavar="TIME", help="From then on, such as 2027-03-14T00:00Z; left out: now.")
def preview(
    what: str,
    zone: str | None,
    name: str | None,
    missing_hour: str | None,
    repeated_hour: str | None,
    count: int,
    after: str | None,
    as_json: bool,
) -> None:
    """What a schedule means, and its next ticks.

    Of JOB, as the database knows it, or of CRON in ZONE (UTC): `gaffer preview '0 6 * * 1-5' America/New_York`.
    """
    policies = {"missing_hour": missing_hour, "repeated_hour": repeated_hour}
    chosen: dict[str, Any] = {policy: choice for policy, choice in policies.items() if choice is not None}
    timeout = None
    if " " in what.strip() or what.startswith("@"):
        schedule = Schedule(what, zone or "UTC", **chosen)
        if schedule.uses_hash and not name:
            raise BadInputError(f"cron {what!r}: H stands for a number made from a job's name; give it with --job NAME")
    else:
        if chosen or name or zone:
            raise BadInputError(
                f"job {what!r} has a zone and a schedule of its own; leave out all but --count, --after and --json, or "
                "give a cron in quotes in its place"
            )
        name = what
        schedule, timeout = _of_job(what)
    if schedule is None:
        click.echo(f"job {what!r} has no schedule; it runs only when asked to", err=True)
        return
    start = datetime.now(timezone.utc) if after is None else as_moment(after, "--after", schedule.timezone)
    said = lint(schedule, start, job=name, timeout=timeout)
    ticks = (schedule.resolved(name) if name else schedule).preview(start, count)
    if as_json:
        tell({"utc": tick.utc, "local": tick.local.isoformat(), "note": tick.note} for tick in ticks)
    else:
        _print(said, ticks)


def _of_job(job: str) -> tuple[Schedule | None, timedelta]:
    with opened() as connection:
        found = jobs.get(connection, job)
    return found.schedule, found.timeout


def _print(said: Lint, ticks: list[Preview]) -> None:
    click.echo(said.words)
    click.echo(f"Fires {said.fires_a_day}.")
    for kind, texts in (("warning", said.warnings), ("note", said.notes), ("clock", said.clock)):
        for text in texts:
            click.echo(f"{kind}: {text}")
    table = Table("local", "UTC", "in", "note")
    for tick in ticks:
        table.add_row(
            f"{tick.local:%a %Y-%m-%d %H:%M %z}",
            f"{tick.utc:%Y-%m-%d %H:%MZ}",
            ago(tick.utc),
            tick.note,
        )
    table.print()
