"""`gaffer simulate`, by hand: what would happen is plain enough to be written down."""

from __future__ import annotations

import json
import random
from collections import Counter
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from gaffer_dagster.cli import main
from gaffer_dagster.domain import simulation
from gaffer_dagster.domain.alert import Alerts
from gaffer_dagster.domain.bounds import Bounds
from gaffer_dagster.domain.due import NewRows
from gaffer_dagster.domain.incident import Stretch
from gaffer_dagster.domain.ledger import Pause
from gaffer_dagster.domain.moment import as_moment
from gaffer_dagster.domain.schedule import Schedule
from gaffer_dagster.domain.simulation import Scenario, Simulation, simulate
from gaffer_dagster.domain.spec import JobSpec

DAY, HOUR, MINUTE, SECOND = timedelta(days=1), timedelta(hours=1), timedelta(minutes=1), timedelta(seconds=1)
START = datetime(2027, 3, 1, tzinfo=timezone.utc)


def at(time: str) -> datetime:
    """Of the first day, or of one that is named; UTC."""
    return as_moment(time if "T" in time else f"2027-03-01T{time}", "time")


def away(since: str, until: str) -> list[Stretch]:
    return [Stretch(at(since), at(until))]


def lived(
    cron: str = "0 * * * *",
    zone: str = "UTC",
    *,
    since: datetime = START,
    until: datetime | None = None,
    takes: str = "10s",
    seed: int = 1,
    spec: dict[str, Any] | None = None,
    **given: Any,
) -> Simulation:
    """Six hours and a half of an hourly job, unless something else is said."""
    job = JobSpec("job", NewRows("source", "id"), Schedule(cron, zone), **(spec or {}))
    lengths = simulation.as_lengths(takes, "takes")
    return simulate(Scenario(job, since, until or since + 6.5 * HOUR, lengths, **given), random.Random(seed))


def runs(found: Simulation) -> list[tuple[str, str | None, str, str]]:
    """When each began and ended, who woke it, and how it ended."""
    return [
        (
            clock(run.started_at),
            clock(run.ended_at),
            run.trigger,
            "nothing" if run.outcome is None else str(run.outcome),
        )
        for run in found.runs
    ]


def clock(time: datetime | None) -> str:
    return "-" if time is None else f"{time:%H:%M:%S}".removesuffix(":00")


def ticks(found: Simulation) -> list[tuple[str, str, int | None]]:
    return [(clock(tick.at), str(tick.disposition), tick.run_id) for tick in found.ticks()]


def incidents(found: Simulation) -> list[tuple[str, str, str, str]]:
    """Kind, since when, when it was opened and resolved."""
    return [
        (str(each.kind), clock(each.since_at), clock(each.opened_at), clock(each.resolved_at))
        for each in found.incidents
    ]


def test_a_year_of_a_healthy_job_has_nothing_to_tell() -> None:
    found = lived("0 2 * * *", "Europe/Berlin", since=at("2027-01-01T00:00"), until=at("2028-01-01T00:00"), takes="40m")
    assert Counter(str(tick.disposition) for tick in found.ticks()) == {"covered": 365}
    assert [run.tick for run in found.runs] == [run.started_at for run in found.runs] == [t.at for t in found.ticks()]
    assert {str(run.outcome) for run in found.runs} == {"succeeded"}
    assert found.incidents == []


def test_after_an_outage_one_run_makes_up_for_its_ticks() -> None:
    found = lived(down=away("02:30", "05:20"))
    assert [start for start, *_ in runs(found)] == ["01:00", "02:00", "05:20", "06:00"]
    assert ticks(found) == [
        ("01:00", "covered", 1),
        ("02:00", "covered", 2),
        ("03:00", "covered_late", 3),
        ("04:00", "covered_late", 3),
        ("05:00", "covered", 3),  # within half an hour
        ("06:00", "covered", 4),
    ]
    assert incidents(found) == []  # nobody looked, and the job was in time once somebody did


def test_a_tick_at_the_end_of_an_outage_is_the_one_that_fires() -> None:
    assert [start for start, *_ in runs(lived(down=away("01:30", "04:00")))] == ["01:00", "04:00", "05:00", "06:00"]


def test_a_late_tick_is_skipped_and_absence_waits_for_the_next_success() -> None:
    given: dict[str, Any] = {"spec": {"max_late": "10m"}, "takes": "2m", "until": at("07:30")}
    found = lived(down=away("02:30", "05:20"), failing=away("06:00", "06:01"), **given)
    assert [(start, outcome) for start, _, _, outcome in runs(found)][2:] == [
        *(("05:20", "late"), ("06:00", "failed"), ("07:00", "succeeded"))
    ]
    assert [disposition for _, disposition, _ in ticks(found)][2:5] == ["late"] * 3
    # The grace began anew at 05:20 and ended at 05:50, with no run at work.
    assert incidents(found) == [("absence", "05:50", "05:50", "07:02")]


def test_a_run_at_work_is_waited_for_as_long_as_it_may_take() -> None:
    found = lived(
        failing=away("02:00", "02:01"), takes="40m", until=at("05:00"), spec={"bounds": Bounds(timeout="45m")}
    )
    assert runs(found)[1] == ("02:00", "02:40", "schedule", "failed")
    # The grace of 02:00 ended at 02:30, while the run was at work that then failed.
    assert incidents(found) == [("absence", "02:40", "02:40", "03:40")]


def test_a_run_that_takes_too_long_is_cut_at_its_deadline() -> None:
    found = lived(takes="49m", until=at("02:50"))
    assert runs(found) == [
        ("01:00", "01:48", "schedule", "timed_out"),
        ("02:00", "02:48", "schedule", "timed_out"),
    ]


def test_an_overlap_is_busy_and_the_holder_looks_again() -> None:
    """In New York the clock goes from 02:00 to 03:00: the ticks of 02:30 and 03:30 are half an hour apart."""
    night = {"since": at("2027-03-14T06:00"), "until": at("2027-03-14T08:30"), "takes": "40m"}
    found = lived("30 1,2,3 * * *", "America/New_York", **night)
    assert runs(found) == [
        ("06:30", "07:10", "schedule", "succeeded"),
        ("07:00", "07:00", "schedule", "busy"),
        ("07:30", "08:10", "schedule", "succeeded"),
    ]
    assert found.runs[1].met == 1
    assert ticks(found) == [("06:30", "covered", 1), ("07:00", "covered", 1), ("07:30", "covered", 3)]


def test_a_run_covers_ticks_up_to_its_start() -> None:
    """One that no wake-up met, since the daemon was down again."""
    found = lived(down=[*away("00:30", "02:40"), *away("02:50", "03:20")], takes="30m", until=at("04:00"))
    assert runs(found)[:2] == [("02:40", "03:10", "schedule", "succeeded"), ("03:20", "03:50", "schedule", "succeeded")]
    assert ticks(found)[2] == ("03:00", "covered", 2)


def test_a_wake_up_that_met_a_failing_run_is_followed_up() -> None:
    night = {"since": at("2027-03-14T06:00"), "until": at("2027-03-14T07:30"), "takes": "40m"}
    found = lived("30 1,2 * * *", "America/New_York", failing=away("2027-03-14T06:30", "2027-03-14T06:31"), **night)
    assert runs(found) == [
        ("06:30", "07:10", "schedule", "failed"),
        ("07:00", "07:00", "schedule", "busy"),
        ("07:10", "-", "sensor", "running"),
    ]


def test_a_dead_run_is_found_by_the_sensor_once_its_lease_is_over() -> None:
    """It dies within ten seconds, before it renewed its lease of a minute; so does each that follows it."""
    found = lived(dies=1.0, until=at("01:05"))
    assert runs(found)[:3] == [
        ("01:00", "01:01", "schedule", "abandoned"),
        ("01:01", "01:02", "sensor", "abandoned"),
        ("01:02", "01:03", "sensor", "abandoned"),
    ]
    # The third was found at 01:03, after that pass; one tick that fails three times has failed once.
    assert incidents(found) == [("takeovers", "01:03", "01:03:30", "-")]


def test_a_tick_meets_a_dead_run_whose_lease_is_not_over() -> None:
    found = lived("* * * * *", dies=1.0, takes="30s", until=at("00:02"), seed=5, every=HOUR)
    assert runs(found) == [("00:01", "-", "schedule", "running"), ("00:02", "00:02", "schedule", "busy")]
    assert found.runs[1].met == 1


def test_the_ticks_of_a_pause_are_skipped() -> None:
    found = lived(paused=[Pause(at("02:00"), at("04:00"))])
    assert [outcome for *_, outcome in runs(found)] == ["succeeded", "paused", "paused", *["succeeded"] * 3]
    assert [disposition for _, disposition, _ in ticks(found)] == ["covered", "paused", "paused", *["covered"] * 3]
    assert incidents(found) == []


def test_a_pause_without_an_end_is_forgotten_after_a_week() -> None:
    found = lived("0 2 * * *", until=START + 9 * DAY, paused=[Pause(at("12:00"), None)])
    assert [(each.since_at - START, each.opened_at - START) for each in found.incidents] == [(7.5 * DAY, 7.5 * DAY)]


def test_the_database_goes_away_and_takes_a_run_with_it() -> None:
    found = lived(takes="20m", database_down=[*away("01:10", "01:25"), *away("02:50", "03:10")], until=at("04:30"))
    assert runs(found) == [
        ("01:00", "01:25", "schedule", "abandoned"),
        ("01:25", "01:45", "sensor", "succeeded"),
        ("02:00", "02:20", "schedule", "succeeded"),
        ("03:00", "03:00", "schedule", "failed"),
        ("03:10", "03:30", "sensor", "succeeded"),  # what the outage cost does not wait for the next tick
        ("04:00", "04:20", "schedule", "succeeded"),
    ]
    assert [tick for tick in ticks(found) if tick[1] != "covered"] == []
    assert incidents(found) == []
    assert found.runs[3].learnt_at == at("03:10")


def test_a_run_that_could_not_write_counts_unless_nobody_could_look_for_long() -> None:
    given: dict[str, Any] = {"spec": {"alerts": Alerts(failures=1)}, "until": at("03:30")}
    found = lived(database_down=away("01:59", "02:02"), **given)
    assert incidents(found)[0] == ("failures", "02:00", "02:02", "03:00:30")
    found = lived(database_down=away("01:50", "02:10"), **given)
    assert incidents(found) == []
    assert runs(found)[2][2:] == ("sensor", "succeeded")
    found = lived(database_down=away("02:50", "03:40"), **given)
    assert runs(found)[-1] == ("03:00", "03:00", "schedule", "nothing")


def test_a_day_of_25_hours_is_not_called_absent_early() -> None:
    """02:30 in New York, on Saturday at 06:30 UTC, and at 07:30 on Sunday, when the clock is set back."""
    night = {"since": at("2027-11-05T12:00"), "until": at("2027-11-08T12:00")}
    found = lived("30 2 * * *", "America/New_York", failing=away("2027-11-07T00:00", "2027-11-08T00:00"), **night)
    assert [(each.since_at, each.resolved_at) for each in found.incidents] == [
        (at("2027-11-07T08:30"), at("2027-11-08T07:30:30"))
    ]


def test_what_is_wrong_is_seen_at_the_next_pass_and_said_again_each_day() -> None:
    found = lived("7 2 * * *", until=START + 4 * DAY, fails=1.0, every=10 * MINUTE)
    absence, failures = found.incidents
    assert (absence.since_at, absence.opened_at) == (at("03:07"), at("03:10"))
    assert (failures.since_at, failures.opened_at) == (at("2027-03-03T02:07:10"), at("2027-03-03T02:10"))
    assert (absence.reminders, failures.reminders) == (3, 1)
    assert absence.resolved_at is None


def test_the_rules_are_the_jobs_own() -> None:
    spec = {"alerts": Alerts(grace="5m", failures=2)}
    assert incidents(lived(fails=1.0, spec=spec, until=at("02:10"))) == [
        ("absence", "01:05", "01:05", "-"),
        ("failures", "02:00:10", "02:00:30", "-"),
    ]


def test_a_seed_gives_the_same_again_and_chances_are_independent() -> None:
    given: dict[str, Any] = {"takes": "5m..40m", "until": START + 4 * DAY}
    first, again = lived(**given, fails=0.1, dies=0.1), lived(**given, fails=0.1, dies=0.1)
    assert (first.runs, first.incidents) == (again.runs, again.incidents)
    assert first.runs != lived(**given, fails=0.1, dies=0.1, seed=2).runs
    lengths = [run.ended_at - run.started_at for run in lived(**given).runs if run.ended_at]
    assert min(lengths) < 10 * MINUTE
    assert max(lengths) > 35 * MINUTE
    failing = lived(**given, fails=0.2)
    assert 10 < sum(str(run.outcome) == "failed" for run in failing.runs) < 30
    assert [run.ended_at for run in failing.runs] == [run.ended_at for run in lived(**given).runs]


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────────


def gaffer(*words: str) -> Result:
    return CliRunner().invoke(main, ["simulate", *words])


def told(*words: str) -> list[dict[str, Any]]:
    done = gaffer(*words, "--json")
    assert done.exit_code == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_people_read_a_summary_then_what_was_not_plain() -> None:
    words = ("0 2 * * *", "Europe/Berlin", "--takes", "40m", "--since", "2027-03-20", "--until", "2027-04-20")
    done = gaffer(*words, "--down", "2027-03-27T12:00/25h", "--failing", "2027-04-02/2027-04-03")
    assert done.exit_code == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == (
        "31 ticks (29 covered on time, 2 covered late); 31 runs (30 succeeded, 1 failed); 0 overlaps; "
        "1 incident (1 absence); seed 1"
    )
    assert lines[1].startswith(
        "At 02:00 every day, in Europe/Berlin, from 2027-03-19 23:00:00Z to 2027-04-19 22:00:00Z; "
    )
    assert "timeout 1h, grace 1h, an incident after 3 failures" in lines[1]
    assert [line for line in lines if line.startswith("clock: ")] == [
        "clock: 2027-03-28 02:00 does not exist: moved to 03:00; the clock goes from 02:00 to 03:00"
    ]
    assert any(all(part in line for part in ("2027-03-28 01:00:00Z", "covered late", "11 hours")) for line in lines)
    assert any(all(part in line for part in ("absence", "2027-04-02 01:00:00Z")) for line in lines)
    assert sum("failed" in line for line in lines[2:]) == 1
    assert not any("succeeded" in line for line in lines[2:])
    assert sum("succeeded" in line for line in gaffer(*words, "--all").stdout.splitlines()[2:]) == 31


def test_long_tables_are_cut_and_say_so() -> None:
    words = ("* * * * *", "--since", "2027-03-01", "--until", "2027-03-02", "--fails", "50%")
    done = gaffer(*words)
    assert "more like these: --all or --json shows them" in done.stdout
    assert len(done.stdout.splitlines()) < 120
    assert len(gaffer(*words, "--all").stdout.splitlines()) > 1440


def test_machines_read_an_object_a_line() -> None:
    found = told("0 * * * *", "--since", "2027-03-01", "--until", "2027-03-01T06:30", "--down", "2027-03-01T02:30/170m")
    assert found[0] == {
        "what": "summary",
        "ticks": {"covered": 4, "covered_late": 2},
        "runs": {"succeeded": 4},
        "incidents": {},
        "overlaps": 0,
        "seed": 1,
        "since": "2027-03-01T00:00:00+00:00",
        "until": "2027-03-01T06:30:00+00:00",
    }
    late = next(each for each in found if each["what"] == "ticks" and each["disposition"] == "covered_late")
    assert (late["first"], late["last"]) == ("2027-03-01T03:00:00+00:00", "2027-03-01T04:00:00+00:00")
    assert (late["count"], late["run"], late["late_by"]) == (2, 3, 8400)
    assert [each["started_at"] for each in found if each["what"] == "run"][2] == "2027-03-01T05:20:00+00:00"


JOB = """
import gaffer_dagster as gd

@gd.gaffer_asset(
    schedule=gd.Schedule("H 2 * * *", timezone="America/New_York"), due=gd.EachInterval(),
    bounds=gd.Bounds(timeout="20m"), alerts=gd.Alerts(grace="45m", failures=2), max_late="2h",
)
def nightly(batch): ...
"""


def test_a_job_brings_its_own_rules(tmp_path: Path) -> None:
    file = tmp_path / "jobs.py"
    file.write_text(JOB)
    words = ("-f", str(file), "nightly", "--since", "2027-03-01", "--until", "2027-03-05", "--takes", "25m")
    done = gaffer(*words)
    assert done.exit_code == 0, done.stderr
    assert "4 timed_out" in done.stdout.splitlines()[0]
    assert "(1 absence, 1 failures)" in done.stdout.splitlines()[0]
    rules = "timeout 20m, grace 45m, a tick is skipped after 2h, an incident after 2 failures"
    assert done.stdout.splitlines()[1].endswith(rules)
    asked = gaffer(*words, "--timeout", "30m", "--grace", "5m", "--failures", "1", "--max-late", "1h")
    assert "4 succeeded" in asked.stdout.splitlines()[0]
    rules = "timeout 30m, grace 5m, a tick is skipped after 1h, an incident after 1 failure"
    assert asked.stdout.splitlines()[1].endswith(rules)
    refused = gaffer("-f", str(file), "hourly")
    assert (refused.exit_code, refused.stderr) == (1, "gaffer: no job 'hourly' is defined there; there is nightly\n")
    refused = gaffer("-f", str(file), "nightly", "UTC")
    assert "leave the zone out" in refused.stderr


def test_without_options_a_year_from_now_is_simulated() -> None:
    done = gaffer("0 2 1 * *", "Europe/Berlin")
    assert done.stdout.startswith(
        "12 ticks (12 covered on time); 12 runs (12 succeeded); 0 overlaps; 0 incidents; seed"
    )


DAYS = ("0 2 * * *", "--since", "2027-03-01", "--until", "2027-03-09")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["0 2 * * *", "Mars/Olympus"], "write an IANA name"),
        (["nightly"], "'nightly' is no cron; write one in quotes"),
        (["H 2 * * *"], "write a number, or simulate the job"),
        (
            ["0 2 * * *", "--since", "2027-03-01", "--until", "2027-02-01"],
            "--until '2027-02-01' is not after the start",
        ),
        ([*DAYS, "--fails", "150%"], "--fails '150%' is no chance; write a percentage from 0% to 100%, such as 5%"),
        ([*DAYS, "--fails", "0.05"], "--fails '0.05' is no chance"),
        ([*DAYS, "--dies", "nan%"], "--dies 'nan%' is no chance"),
        ([*DAYS, "--takes", "long"], "--takes='long' is no duration"),
        (
            [*DAYS, "--takes", "50m..5m"],
            "--takes '50m..5m' is the wrong way round; write the shorter one first: 5m..50m",
        ),
        ([*DAYS, "--every", "0s"], "--every='0s' is not longer than nothing"),
        ([*DAYS, "--timeout", "25h"], "bounds: timeout=1d1h is longer than"),
        ([*DAYS, "--timeout", "24h"], "is not shorter than the schedule's smallest interval"),
        ([*DAYS, "--grace", "soon"], "alerts: grace='soon' is no duration"),
        ([*DAYS, "--failures", "0"], "alerts: failures=0 must be a whole number"),
        ([*DAYS, "--max-late", "soon"], "--max-late='soon' is no duration"),
        ([*DAYS, "--down", "2027-03-02"], "--down '2027-03-02' is no stretch; write SINCE/UNTIL"),
        ([*DAYS, "--down", "2027-03-02/"], "--down '2027-03-02/' has no end; write SINCE/UNTIL, such as 2027-03-02/6h"),
        ([*DAYS, "--down", "2027-03-03/2027-03-02"], "--down '2027-03-03/2027-03-02' ends before it begins"),
        ([*DAYS, "--down", "noon/1h"], "--down 'noon' is no time"),
        ([*DAYS, "--down", "2027-03-02/soon"], "--down 'soon' is no time"),
        ([*DAYS, "--failing", "2028-03-02/1h"], "is outside of what is simulated, 2027-03-01T00:00:00+00:00 to"),
        (
            [*DAYS, "--down", "2027-03-04/1d", "--down", "2027-03-02/3d"],
            "--down '2027-03-02/3d' and --down '2027-03-04/1d' overlap; write one stretch for both",
        ),
        ([*DAYS, "--paused", "2027-03-02/", "--paused", "2027-03-04/1d"], "overlap"),
        (
            [*DAYS, "--database-down", "2027-03-02/1d", "--paused", "2027-03-02T06:00/1d"],
            "the database is away then, and nobody can pause a job",
        ),
    ],
)
def test_a_wrong_word_is_an_instruction(words: list[str], said: str) -> None:
    done = gaffer(*words)
    assert done.exit_code == 1, done.output
    assert done.stderr.startswith("gaffer: ")
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_stretches_that_touch_do_not_overlap() -> None:
    found = told(*DAYS, "--down", "2027-03-02/1d", "--down", "2027-03-03/1d")
    assert [each["started_at"][:13] for each in found if each["what"] == "run"][:2] == [
        "2027-03-01T02",
        "2027-03-04T00",
    ]


def test_where_each_run_dies_the_year_ends_early_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "MOST_LOOKS", 300)
    done = gaffer("0 2 * * *", "--since", "2027-03-01", "--dies", "100%")
    assert done.exit_code == 0, done.output
    assert "the simulation ends at 2027-03-01 " in done.stderr
    assert "from 2027-03-01 00:00:00Z to 2027-03-01 " in done.stdout
    # A year in which less goes wrong is lived through.
    assert "the simulation ends" not in gaffer("0 2 * * *", "--since", "2027-03-01", "--fails", "5%").stderr
