"""Random histories against an oracle: no alert is missed, none is false, each is dated and opened at the right instant.

GAFFER_ALERT_HISTORIES sets how many jobs live one (40), GAFFER_CHAOS_SEED adds worlds of that seed.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest

from gaffer_dagster.domain import incident
from gaffer_dagster.domain.incident import Finding, Watched
from gaffer_dagster.engine import watch
from gaffer_dagster.testing import scratch_database
from tests.support import variants
from tests.support.histories import DAYS, MONTHS, Life, Tempo

SEED = int(os.environ.get("GAFFER_CHAOS_SEED", 0)) or random.SystemRandom().randrange(1, 1_000_000)
HISTORIES = int(os.environ.get("GAFFER_ALERT_HISTORIES", 40))
WORLD = 10
"""Jobs in a database; two of them are run by the engine."""
WORLDS = max(2, HISTORIES // WORLD)


@contextmanager
def lived(url: str, seed: object, tempo: Tempo, *, size: int = WORLD, engines: int = 2, **given: Any) -> Any:
    life = Life(url, seed, replace(tempo, days=tempo.days * 0.3), size, engines=engines, **given)
    try:
        life.live()
        yield life
    finally:
        life.close()


@pytest.mark.parametrize("number", range(WORLDS))
def test_no_alert_is_missed_and_none_is_false(url: str, number: int) -> None:
    """Every second world has a fixed seed, in every second one runs that ended are forgotten."""
    seed = number if number % 2 == 0 else f"{SEED}/{number}"
    print(f"GAFFER_CHAOS_SEED={SEED} GAFFER_ALERT_HISTORIES={HISTORIES} world {number}: seed {seed}, {WORLD} jobs")
    with lived(url, seed, (DAYS, MONTHS)[number // 2 % 2], forgets=number // 4 % 2 == 0) as life:
        print(life.tally)
        assert life.tally.passes > 0
        if number % 2 == 0:  # what comes of another seed is left to chance
            assert life.tally.passes > 50
            assert sum(life.tally.incidents.values()) > 5


def test_what_is_forgotten_changes_no_verdict(url: str, server_url: str) -> None:
    """The rules read rows of gaffer.job; whoever deletes every run that ended, at any time, is told the same."""
    told: list[list[tuple[Any, ...]]] = []
    for forgets in (False, True):
        with scratch_database(server_url) as fresh, lived(fresh, "forgets", DAYS, engines=0, forgets=forgets) as life:
            told.append(life.noted())
    assert told[0] == told[1]
    assert len(told[0]) > 5


# ── what would be caught ─────────────────────────────────────────────────────────────────────────────────────────────

Patch = Callable[[pytest.MonkeyPatch, str], None]
_findings = incident.findings


def _judging(change: Callable[[Watched], Watched]) -> Patch:
    """The rules, told something else of each job."""

    def patch(monkeypatch: pytest.MonkeyPatch, _url: str) -> None:
        monkeypatch.setattr(watch, "findings", lambda watched, now, gaps: _findings(change(watched), now, gaps))

    return patch


def _since_the_last_success(monkeypatch: pytest.MonkeyPatch, _url: str) -> None:
    def absence(watched: Watched, *_: object) -> datetime | None:
        if watched.schedule is None:
            return None
        since = watched.last_success_at or watched.first_seen_at
        return since + watched.schedule.shortest_interval() + watched.grace

    monkeypatch.setattr(incident, "_absence", absence)


def _when_it_was_seen(monkeypatch: pytest.MonkeyPatch, _url: str) -> None:
    def seen(watched: Watched, now: datetime, gaps: Any) -> Iterator[Finding]:
        return (replace(finding, since=now) for finding in _findings(watched, now, gaps))

    monkeypatch.setattr(watch, "findings", seen)


def _paused_time_counts(monkeypatch: pytest.MonkeyPatch, _url: str) -> None:
    real = incident._deadline
    monkeypatch.setattr(
        incident, "_deadline", lambda watched, *given: real(replace(watched, paused=[], paused_at=None), *given)
    )


def _without_gaps(monkeypatch: pytest.MonkeyPatch, _url: str) -> None:
    monkeypatch.setattr(watch, "findings", lambda watched, now, _gaps: _findings(watched, now, []))


def _protocol(function: str, replaced: dict[str, str]) -> Patch:
    return lambda _monkeypatch, url: variants.replace(url, function, replaced)


# With a word that the difference has, and in which mood jobs must be for it to matter soon.
BROKEN: dict[str, tuple[Patch, str, str]] = {
    "a constant time since the last success": (_since_the_last_success, "absence", "wild"),
    "dated by when it was seen": (_when_it_was_seen, "found", "wild"),
    "a run that is at work does not matter": (
        _judging(lambda watched: replace(watched, at_work_since=None, worked=[])),
        "absence",
        "slow",
    ),
    "paused time counts": (
        _paused_time_counts,
        "absence",
        "late",
    ),
    "the time in which nobody looked counts": (_without_gaps, "absence", "late"),
    "an edit does not matter": (
        _judging(lambda watched: replace(watched, rules_at=watched.first_seen_at)),
        "absence",
        "silent",
    ),
    "failures are counted per run": (
        _protocol("count_failure", {" and (p_tick is null or p_tick <> all (failed_ticks))": ""}),
        "failures",
        "failing",
    ),
    "a capped run is a success": (
        _protocol("end_run", {"v_done boolean := p_outcome in (": "v_done boolean := p_outcome in ('capped', "}),
        "capped",
        "capping",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_rules_would_be_caught(server_url: str, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    patch, word, mood = BROKEN[name]
    for number in range(8):
        with scratch_database(server_url) as fresh:
            patch(monkeypatch, fresh)
            found = _told(fresh, f"{name}/{number}", mood)
            if found is not None:  # else nothing that it does differently came up in this world
                assert re.search(word, found)
                return
    pytest.fail("it was not caught in any world")


def _told(url: str, seed: str, mood: str) -> str | None:
    """What the oracle has against a world."""
    try:
        with lived(url, seed, DAYS, size=20, engines=0, moods=(mood,)):
            return None
    except AssertionError as caught:
        return str(caught)
