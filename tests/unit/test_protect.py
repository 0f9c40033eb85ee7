"""`protect=`: part of what a job is, and nothing to those that do without."""

from __future__ import annotations

from typing import Any

import pytest

import gaffer_dagster as gd
from gaffer_dagster.adapter.assets import job_of
from gaffer_dagster.errors import BadSpecError

DUE = gd.NewRows("flights", "id")


def test_it_is_stored_and_hashed_only_where_it_is_used() -> None:
    without, with_it = gd.JobSpec("a", DUE), gd.JobSpec("a", DUE, protect=["t", "s"])
    assert "protect" not in without.as_json()
    assert gd.JobSpec("a", DUE, protect=[]).hash == without.hash
    assert with_it.as_json()["protect"] == ["s", "t"]
    assert with_it.hash == gd.JobSpec("a", DUE, protect=("s", "t")).hash != without.hash


@pytest.mark.parametrize("given", ["target", [""], [1], 7, None])
def test_what_is_no_list_of_names_is_refused(given: Any) -> None:
    with pytest.raises(BadSpecError, match=r"job 'a': protect=.*list of tables' names"):
        gd.JobSpec("a", DUE, protect=given)


def test_an_asset_takes_it() -> None:
    @gd.gaffer_asset(due=DUE, protect=["target"])
    def copied(batch: gd.Batch) -> None: ...

    assert job_of(copied).spec.protect == ("target",)
