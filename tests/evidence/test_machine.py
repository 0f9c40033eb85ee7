"""The public API in any order of calls against a pure model (machine.py), in its short form; and what it would catch.

GAFFER_MACHINE_SEED and GAFFER_MACHINE_SIZE set another seed, and how many examples. Broken products are caught in an
example that is told here, as short as Hypothesis makes the one that it finds; the product passes the same example. Some
are searched for.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import psycopg
import pytest

from gaffer_dagster.domain.run import Outcome
from gaffer_dagster.engine.run import Run
from gaffer_dagster.store import new_rows
from tests.evidence import machine
from tests.evidence.machine import HOUR, MINUTE, SECOND, Machine
from tests.support import variants

SEED = int(os.environ.get("GAFFER_MACHINE_SEED", 0)) or random.SystemRandom().randrange(1, 1_000_000)
SIZE = int(os.environ.get("GAFFER_MACHINE_SIZE", 50))
STEPS = 25

Step = Callable[[Machine], Any]


def wake(trigger: str = "schedule") -> Step:
    return lambda m: m.wake(trigger)


def rows(count: int, how: str = "at once") -> Step:
    return lambda m: m.add_rows(count, how)


def one(what: str, who: int = 0) -> Step:
    return lambda m: m.one(what, who)


def harm(what: str, who: int = 0) -> Step:
    return lambda m: m.harm(what, who)


def go_on(who: int = 0, cut: str | None = None) -> Step:
    return lambda m: m.go_on(who, cut)


def passes(by: Any, *, suspended: bool = False) -> Step:
    return lambda m: m.advance(by, suspended)


def operate(what: str) -> Step:
    return lambda m: m.operate(what)


@pytest.mark.timeout(900)
def test_whatever_is_called_in_whichever_order_the_tables_say_what_the_model_says(url: str) -> None:
    print(f"seed {SEED}, {SIZE} examples of at most {STEPS} steps")
    assert machine.live(url, SEED, SIZE, STEPS) >= SIZE


_PAST = 61 * SECOND
_TAKEN_OVER = [rows(3), wake(), go_on(), passes(_PAST), wake(), go_on(1)]
"""The first run stands in the middle of its batch, the second has the lease."""
_RESTORED = [rows(3), operate("keep a copy"), wake(), go_on(), operate("put the copy back"), wake(), go_on(1)]
"""The first run has the lease that was lost with the newest commits, the second one of the same number."""
_MET = [wake(), wake(), one("finish")]
_FAILS = [wake(), harm("fail")]

STORIES: dict[str, tuple[Sequence[Step], Mapping[str, Any]]] = {
    "taken over": ([*_TAKEN_OVER, go_on(), go_on()], {}),
    "restored": ([*_RESTORED, go_on(), go_on()], {}),
    "met": (_MET, {}),
    "fails, then not": ([*_FAILS, wake(), one("finish")], {}),
    "fails twice": ([*_FAILS, *_FAILS], {}),
    "released": ([wake(), operate("release"), wake(), one("finish", 1)], {}),
    "suspended": ([rows(1), wake(), go_on(), passes(16 * MINUTE, suspended=True), go_on()], {}),
    "set over a stale holder": (
        [rows(1), wake(), go_on(), passes(_PAST), operate("set the watermark"), go_on()],
        {},
    ),
    "renamed over a stale holder": ([rows(1), wake(), go_on(), passes(_PAST), operate("rename"), go_on()], {}),
    "renewed": ([wake(), passes(40 * SECOND), one("renew"), passes(40 * SECOND), wake()], {}),
    "capped": ([rows(5), wake(), one("finish"), wake(), one("finish")], {"batches": 1}),
    "cut after its COMMIT": ([rows(3), wake(), go_on(), go_on(cut="after"), one("finish")], {}),
    "cut off": ([rows(3), wake(), harm("cut off"), harm("leave"), wake(), go_on(), harm("cut off"), one("finish")], {}),
    "a slow writer": (
        [rows(1, "slowly"), rows(1), wake(), one("finish"), rows(1, "commit"), wake(), one("finish")],
        {},
    ),
    "dead": ([rows(1), wake(), go_on(), one("renew"), harm("crash"), wake(), one("finish")], {}),
    "late": ([passes(HOUR), passes(16 * MINUTE), wake(), wake("manual"), one("finish")], {"max_late": 10 * MINUTE}),
    "paused": ([operate("pause"), passes(HOUR), wake(), operate("resume"), wake(), one("finish")], {}),
}  # fmt: skip


# ── broken products ──────────────────────────────────────────────────────────────────────────────────────────────────


def _covers_whatever_it_did(_run: Run, _outcome: Outcome, looked_at: datetime) -> datetime:
    return looked_at


# Which function of the protocol, and what is replaced there; and the story in which it shows.
BROKEN_SQL: dict[str, tuple[str, Mapping[str, str], str]] = {
    "a release gives the next holder the same fence": (
        "release",
        {"set fence = fence + 1, lease_id = null": "set fence = fence, lease_id = null"},
        "released",
    ),
    "a success does not end the streak": (
        "end_run",
        {"set consecutive_failures = 0, failed_ticks = '{}', failed_at = '{}'": "set failed_at = '{}'"},
        "fails, then not",
    ),
    "a wake-up that met a run that was ending is forgotten": (
        "end_run",
        {"v_done and v_run.trigger <> 'redo' and v_job.wanted_at is distinct from p_wanted_at then": "false then"},
        "met",
    ),
    "a tick that fails twice counts twice": (
        "count_failure",
        {" and (p_tick is null or p_tick <> all (failed_ticks))": ""},
        "fails twice",
    ),
    "a batch commits past the deadline": (
        "commit_batch",
        {"if v_now > v_deadline then": "if false then"},
        "suspended",
    ),
    "a watermark is set, and who was at work may go on": (
        "set_watermark",
        {"set fence = fence + 1, lease_id = null, lease_until = 'epoch'": "set owner = owner"},
        "set over a stale holder",
    ),
    "a renewal does not hold": (
        "renew",
        {"set lease_until = gaffer.clock() + p_ttl, gone_at = null,": "set gone_at = null,"},
        "renewed",
    ),
    "a renamed job forgets the run that it lost": (
        "end_run",
        {"gaffer.count_failure(v_run.job,": "gaffer.count_failure(p_job,"},
        "renamed over a stale holder",
    ),
    "the dead are not counted": ("abandon", {"perform gaffer.count_failure": "-- "}, "taken over"),
    "a late tick is due again": ("acquire", {"set skipped_until = greatest(skipped_until, p_tick),": "set"}, "late"),
    "a pause is over before it is": ("acquire", {"v_job.paused_until is null or": ""}, "paused"),
    "who is gone is waited for": ("acquire", {"or v_grant.free_at <= gaffer.clock()": ""}, "dead"),
}
BROKEN_CODE: dict[str, tuple[Any, str, Callable[..., Any], str]] = {
    "a capped run covers ticks": (Run, "_covered_until", _covers_whatever_it_did, "capped"),
    "an error means not committed": (
        machine.engine_holding.Holding,
        "supersede",
        variants._believe_the_error,
        "cut after its COMMIT",
    ),
    "id > watermark": (new_rows, "page", variants._page_by_id, "a slow writer"),
}


@pytest.mark.parametrize("name", BROKEN_SQL)
def test_a_broken_protocol_is_caught(url: str, name: str) -> None:
    function, replaced, story = BROKEN_SQL[name]
    variants.replace(url, function, replaced)
    _is_caught(url, story)


@pytest.mark.parametrize("name", BROKEN_CODE)
def test_a_broken_engine_is_caught(url: str, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    owner, attribute, broken, story = BROKEN_CODE[name]
    monkeypatch.setattr(owner, attribute, broken)
    _is_caught(url, story)


@pytest.mark.parametrize(("name", "story"), [("time-only lease", "restored"), ("number-only fence", "restored")])
def test_a_broken_fence_is_caught(url: str, name: str, story: str) -> None:
    variants.install(url, name)
    _is_caught(url, story)


def _is_caught(url: str, story: str) -> None:
    steps, job = STORIES[story]
    with pytest.raises(AssertionError, match="the product says") as caught:
        machine.told(url, steps, **job)
    _is_wrong_in_what_it_does(str(caught.value))


def _is_wrong_in_what_it_does(mismatch: str) -> None:
    """A variant that only dies, of bad SQL, would be caught by anything."""
    said = re.search(r"the product says \('raised', \('(\w+)'", mismatch)
    assert said is None or not hasattr(psycopg.errors, said[1]), mismatch


@pytest.mark.parametrize("variant", ["the product", "bare"])
def test_in_these_stories_the_product_does_what_the_model_says(url: str, variant: str) -> None:
    """So does what the broken fences are made from."""
    variants.install(url, variant)
    for steps, job in STORIES.values():
        machine.told(url, steps, **job)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name",
    [
        "a success does not end the streak",
    ],
)
def test_it_is_found_without_being_told_where(url: str, name: str) -> None:
    """Within ten times the examples: those that are common enough come in far fewer."""
    print(f"seed {SEED}")
    function, replaced, _ = BROKEN_SQL[name]
    variants.replace(url, function, replaced)
    with pytest.raises(AssertionError, match="the product says") as caught:
        machine.live(url, SEED, 10 * SIZE, STEPS, shrinks=False)
    _is_wrong_in_what_it_does(str(caught.value))
