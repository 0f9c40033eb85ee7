"""What many sittings have found, kept in a JSON file, and the report that is made from it."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psycopg

from gaffer_dagster.domain.amount import counted
from tests.evidence.chaos import faults as table
from tests.evidence.chaos.rounds import BOUND, BOUND_WITH_DAGSTER, Judged
from tests.support import jobs

REPORT = Path(__file__).parents[3] / "benchmarks" / "reliability.md"
_SURE = 3.0
"""With nothing found in N trials, the chance of one is below 3/N, 95 times of 100 (the rule of three)."""


@dataclass
class Sitting:
    """What was judged so far. `commit`: of the source, and whether it was changed since; `lost`, `doubled`: findings of
    these kinds; `found`: all, in words; `slowest_of_dagster`: in the rounds with a Dagster at work."""

    seed: int
    began_at: str
    versions: Mapping[str, str]
    commit: str = ""
    missing: Mapping[str, str] = field(default_factory=dict[str, str])
    rounds: int = 0
    rounds_of_dagster: int = 0
    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter[str])
    runs: Counter[str] = field(default_factory=Counter[str])
    acknowledged: int = 0
    failed: int = 0
    unknown: int = 0
    unknown_done: int = 0
    rows: int = 0
    lost: int = 0
    doubled: int = 0
    slowest: float = 0.0
    slowest_of_dagster: float = 0.0
    found: list[str] = field(default_factory=list[str])

    def add(self, judged: Judged) -> None:
        self.rounds += 1
        self.seconds += judged.seconds
        self.faults += judged.faults
        self.runs += judged.outcomes
        self.acknowledged += judged.lines["acknowledged"]
        self.failed += judged.lines["failed"]
        self.unknown += judged.unknown
        self.unknown_done += judged.unknown_done
        self.rows += judged.rows
        self.lost += sum(
            finding.rule in ("writes", "watermark") and "lost" in finding.text for finding in judged.findings
        )
        self.doubled += sum(finding.rule == "twice" for finding in judged.findings)
        if judged.is_of_dagster:
            self.rounds_of_dagster += 1
            self.slowest_of_dagster = max(self.slowest_of_dagster, judged.slowest)
        else:
            self.slowest = max(self.slowest, judged.slowest)
        self.found += [f"round {judged.seed}: {finding}" for finding in judged.findings]


def begin(seed: int, url: str, missing: Mapping[str, str]) -> Sitting:
    versions = {
        "PostgreSQL": jobs.query(url, "show server_version")[0][0],
        "psycopg": psycopg.__version__,
        "Python": platform.python_version(),
    }
    return Sitting(seed, f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M}Z", versions, commit(), dict(missing))


def commit() -> str:
    """Of the source that this is, with "and changes" where it has some; empty where it is no repository's."""
    if (head := _git("rev-parse", "HEAD")) is None:
        return ""
    # What sittings themselves write is no change of what they judge.
    is_changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks")
    return f"{head} and changes" if is_changed else head


def _git(*words: str) -> str | None:
    try:
        done = subprocess.run(["git", *words], cwd=REPORT.parents[1], check=True, capture_output=True, text=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def load(file: Path | None) -> list[Sitting]:
    if file is None or not file.exists():
        return []
    told: list[dict[str, Any]] = json.loads(file.read_text())["sittings"]
    for each in told:
        each["faults"], each["runs"] = Counter(each["faults"]), Counter(each["runs"])
    return [Sitting(**each) for each in told]


def save(file: Path | None, sittings: Sequence[Sitting]) -> None:
    """At once or not at all, so that a sitting that is killed keeps what it had judged."""
    if file is not None:
        new = file.with_suffix(".new")
        new.write_text(json.dumps({"sittings": [vars(each) for each in sittings]}, indent=1) + "\n")
        os.replace(new, file)


def report(sittings: Sequence[Sitting]) -> str:
    """The page, from what was really run."""
    faults, runs = Counter[str](), Counter[str]()
    for each in sittings:
        faults += each.faults
        runs += each.runs
    total, findings = faults.total(), [line for each in sittings for line in each.found]
    lost, doubled = sum(each.lost for each in sittings), sum(each.doubled for each in sittings)
    acknowledged = sum(each.acknowledged for each in sittings)
    unknown = sum(each.unknown for each in sittings)
    unknown_done = sum(each.unknown_done for each in sittings)
    rows, rounds = sum(each.rows for each in sittings), sum(each.rounds for each in sittings)
    seconds = sum(each.seconds for each in sittings)
    slowest = max((each.slowest for each in sittings), default=0.0)
    slowest_of_dagster = max((each.slowest_of_dagster for each in sittings), default=0.0)
    of_dagster = sum(each.rounds_of_dagster for each in sittings)
    what = [
        ("faults", f"{total:,}"),
        ("rounds, each judged on a database of its own", f"{rounds:,}, of which {of_dagster:,} had a Dagster at work"),
        ("hours", f"{seconds / 3600:.1f}"),
        ("batches acknowledged", f"{acknowledged:,}"),
        ("batches that failed, and were told so", f"{sum(each.failed for each in sittings):,}"),
        ("batches of which nothing was heard", f"{unknown:,}, of which {unknown_done:,} were done"),
        ("rows written by batches", f"{rows:,}"),
        ("runs", f"{runs.total():,}"),
        ("**acknowledged writes lost**", f"**{lost:,}**"),
        ("**done twice**", f"**{doubled:,}**"),
        ("findings of any rule", f"{len(findings):,}"),
        (f"longest time in which a job did not get on though it could (allowed: {BOUND:g} s)", f"{slowest:.1f} s"),
        (f"the same with a Dagster at work (allowed: {BOUND_WITH_DAGSTER:g} s)", f"{slowest_of_dagster:.1f} s"),
    ]
    missing = {f"- seed {each.seed}, {what}: {why}" for each in sittings for what, why in _missing(each).items()}
    of_kinds = [*faults.most_common(), *((name, 0) for name in table.KINDS if name not in faults)]
    return _PAGE.format(
        what=_table(counted(len(sittings), "sitting"), what),
        bound=_bound(total, acknowledged, len(findings)),
        faults=_table("how many", [(name, f"{count:,}") for name, count in of_kinds]),
        runs=_table("how many", [(f"`{name}`", f"{count:,}") for name, count in runs.most_common()]),
        sittings="\n".join(map(_row, sittings)),
        missing="\n".join(sorted(missing or {"- nothing."})),
        found="\n".join(["", "## Findings", "", "```", *findings, "```", ""]) if findings else "",
    )


def _table(head: str, rows: Sequence[tuple[str, str]]) -> str:
    return "\n".join([f"| | {head} |", "|---|---:|", *(f"| {name} | {value} |" for name, value in rows)])


def _missing(each: Sitting) -> dict[str, str]:
    """Also what was left out without a word."""
    without = {} if each.rounds_of_dagster else {"dagster": "nothing was done to its processes; no round had one"}
    return {**without, **each.missing}


def _row(each: Sitting) -> str:
    versions = ", ".join(f"{name} {value}" for name, value in each.versions.items())
    counts = f"{each.faults.total():,} | {each.acknowledged:,} | {len(each.found):,}"
    head, _, changes = each.commit.partition(" ")
    of = f"`{head[:12]}` {changes}".strip() if head else "not recorded"
    return f"| {each.seed} | {each.began_at} | {of} | {versions} | {counts} |"


def _bound(faults: int, acknowledged: int, findings: int) -> str:
    if findings:
        return "Something was found (below), so no bound is given."
    if not faults or not acknowledged:
        return "Nothing was judged yet."
    return (
        "Nothing was found. So, with 95 % confidence (3/N) and under these faults and loads, the chance that one fault "
        f"breaks\na promise is below {_SURE / faults:.1e}, and that an acknowledged batch is lost or done twice below "
        f"{_SURE / acknowledged:.1e}."
    )


_PAGE = """\
# Reliability under faults

Jobs at work in several processes on a real Postgres, with faults at random; a history of what each worker was told, and
a checker that compares it with what the database says in the end. Written by `./dev chaos --state FILE --report` from
the sittings below; nothing here is estimated.

{what}

{bound}

## Faults

{faults}

## How the runs ended

{runs}

## Sittings

| seed | began | commit | versions | faults | acknowledged | findings |
|---:|---|---|---|---:|---:|---:|
{sittings}

A seed repeats the choices, not the timing. What a machine lacked, or was left out by an option:

{missing}

## What is judged, and what is not

No acknowledged write is lost, none that failed is there, none is there in part or twice; commits follow the fences,
which are handed out once; every run ended once and counts what it wrote; the watermark agrees with what is there;
intervals follow one another without gap or overlap; each row of the queue is done once, or parked for cause; every job
gets on; no run raises what no fault explains. The broken protocols in `tests/evidence/test_chaos.py` are found by the
same harness, and by hand: `./dev chaos --variant "time-only lease"`.

Not covered: a power cut (the server is crashed, its machine is not), fail-over and restored backups (see `spec/`),
disks that are full or lie, several machines with clocks and networks of their own, and runs longer than a minute.
{found}"""
