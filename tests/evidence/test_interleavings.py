"""The short form of `interleavings/`: schedules of two runners, all of them but where a case says how many `walks`;
and protocols that are known to be wrong.

GAFFER_INTERLEAVINGS_SEED: of those that are taken at random.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace

import pytest

from tests.evidence.interleavings.__main__ import main
from tests.evidence.interleavings.cases import BROKEN, COUNTING, SHORT, SHORT_SOUND, Case
from tests.evidence.interleavings.walks import explore
from tests.support import faults, variants

pytestmark = pytest.mark.timeout(600)  # a case may take minutes where much else runs


def _name(case: Case) -> str:
    return "-".join([case.name, case.variant, case.expiry, case.fault, *(["inside"] if case.inside else [])])


@pytest.mark.parametrize("case", [*(each for each in SHORT if each is not COUNTING), *SHORT_SOUND], ids=_name)
def test_no_order_of_statements_breaks_a_promise(case: Case, url: str) -> None:
    seed = int(os.environ.get("GAFFER_INTERLEAVINGS_SEED", "0")) or random.SystemRandom().randrange(1, 1_000_000)
    found = explore(case, url, seed=seed)
    faults.say(f"GAFFER_INTERLEAVINGS_SEED={seed}\n{found.row()}")
    assert found.schedules > 10  # that it went through anything at all
    assert found.first == {}
    if case in SHORT_SOUND:  # else nothing that waits for another would be tried
        assert found.blocked


@pytest.mark.parametrize("case", BROKEN, ids=_name)
def test_a_broken_protocol_is_caught(case: Case, url: str) -> None:
    found = explore(case, url, until_broken=True)
    faults.say(found.row())
    assert found.is_caught, found.first


def test_no_schedule_is_left_out_where_a_step_is_slow(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of two runs that count; who waited for a step that took longer than the explorer waits can then go on."""
    slow = "perform pg_sleep(case when random() < 0.5 then 0.02 else 0 end); v_now := gaffer.clock();"
    monkeypatch.setitem(variants.VARIANTS, "slow", variants.Variant({"v_now := gaffer.clock();": slow}))
    found = explore(replace(COUNTING, variant="slow"), url)
    faults.say(found.row())
    assert (found.schedules, found.first) == (192, {})
    assert found.blocked


def test_a_reader_can_see_a_broken_protocol_caught(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--variant", "time-only lease"])
    assert not ended.value.code
    assert "| two runs that count | time-only lease |" in (said := capsys.readouterr().out)
    assert "BROKEN: nothing is applied twice\n" in said
    assert "\n        1 commit_batch\n" in said
