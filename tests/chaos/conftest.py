"""Engines that no test leaves behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support import processes


@pytest.fixture
def engines(url: str) -> Iterator[processes.Engines]:
    """Asks for the database first, so that it is dropped last."""
    with processes.Engines() as made:
        yield made
