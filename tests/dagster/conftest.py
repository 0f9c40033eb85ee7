"""An instance for the tests in moved time."""

from __future__ import annotations

from collections.abc import Iterator

import dagster as dg
import pytest

from tests.dagster.launchers import OVERRIDE, SteeredLauncher
from tests.dagster.moved import instance_in


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dg.DagsterInstance]:
    """It executes runs in this process, at once, unless a test tells its launcher otherwise."""
    with instance_in(tmp_path_factory.mktemp("home"), launcher=OVERRIDE) as made:
        yield made


@pytest.fixture(autouse=True)
def _runs_again() -> Iterator[None]:
    yield
    SteeredLauncher.does = "run"
