"""The model of the lease, in its small sizes; `./dev model --long` for the larger ones."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.evidence import model

pytestmark = pytest.mark.skipif(model.missing() is not None, reason=str(model.missing()))


WRONG = [*model.FENCES, *model.DAMAGE, *model.OTHERS]
CASES = [*model.SHORT, *WRONG]


@pytest.fixture(scope="module")
def searches() -> list[model.Search]:
    """Of all cases, side by side: each is a compiler and then a search, one processor each."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(model.search, CASES))


@pytest.mark.parametrize("case", model.SHORT, ids=lambda case: case.size)
def test_the_products_rule_has_no_counterexample(case: model.Case, searches: list[model.Search]) -> None:
    found = searches[CASES.index(case)]
    print(f"{found.states:,} states: {case.size}")
    assert (found.errors, found.incomplete, found.story) == (0, None, [])
    assert found.states > 300_000


@pytest.mark.parametrize("case", WRONG, ids=lambda case: case.name)
def test_what_is_broken_has_a_counterexample_that_can_be_read(case: model.Case, searches: list[model.Search]) -> None:
    found = searches[CASES.index(case)]
    assert found.is_as_it_must_be(case)
    assert len(found.story) > 4
    assert any("wakes up" in line for line in found.story)


@pytest.mark.parametrize(
    ("limits", "why"), [({"depth": 40}, "a story was longer than the depth"), ({"memory": 135}, "out of memory")]
)
def test_a_search_that_was_cut_short_is_not_taken_for_no_counterexample(limits: dict[str, int], why: str) -> None:
    case = model.Case("the product", model.FENCES[0].sizes, is_sound=True)
    found = model.search(case, **limits)
    assert (found.errors, found.incomplete) == (0, why)
    assert not found.is_as_it_must_be(case)


@pytest.mark.parametrize(
    "said",
    [
        "",
        "Bit statespace search for:\nState-vector 184 byte, depth reached 128, errors: 0\n    15137 states, stored\n",
        "Full statespace search for:\n    15137 states, stored\n",
        "Warning: Search not completed\nFull statespace search for:\nerrors: 0\n    15137 states, stored\n",
    ],
)
def test_words_that_do_not_say_that_everything_was_searched_count_as_incomplete(said: str) -> None:
    assert model.read(said)[2] is not None


def test_a_story_that_breaks_no_claim_is_not_taken_for_a_caught_variant() -> None:
    found = model.Search(10, 0.1, 1, "the search was not completed", ["process 0: wakes up, with lease_id 1"])
    assert not found.is_as_it_must_be(model.FENCES[0])


def test_a_reader_can_see_a_broken_rule_caught(capsys: pytest.CaptureFixture[str]) -> None:
    model.main(["--variant", "time-only"])
    said = capsys.readouterr().out
    assert "a counterexample" in said
    assert "BROKEN: a commit by one who is not the holder" in said
    assert "BROKEN: that row is applied twice" in said  # the damage, where only damage counts
    with pytest.raises(SystemExit):
        model.main(["--variant", "no such"])
    assert "there are: FOR KEY SHARE, " in capsys.readouterr().err
