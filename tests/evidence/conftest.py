"""What the rounds of chaos of one file are played on."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from gaffer_dagster.testing import Databases
from tests.conftest import MAY_SKIP
from tests.evidence.chaos.scene import Gear, gear


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gear]:
    with gear(tmp_path_factory.mktemp("chaos")) as made:
        if "GAFFER_TEST_WHOLE" in os.environ:
            assert all(MAY_SKIP.search(why) for why in made.missing.values()), made.missing
        yield made


@pytest.fixture(scope="module")
def databases(made: Gear) -> Iterator[Databases]:
    with Databases(made.url) as databases:
        yield databases
