"""The README is a map, and tells the truth."""

from __future__ import annotations

import re
from pathlib import Path

import dagster as dg
import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()


def test_it_is_short() -> None:
    assert len(TEXT.splitlines()) < 250


def test_the_example_loads_and_is_twelve_lines() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 12
    space: dict[str, object] = {}
    exec(code, space)
    assert isinstance(space["defs"], dg.Definitions)
    dg.Definitions.validate_loadable(space["defs"])


@pytest.mark.parametrize("link", re.findall(r"\]\((?!http)([^)]+)\)", TEXT))
def test_what_it_links_to_is_there(link: str) -> None:
    assert (ROOT / link).exists()


def test_the_layout_is_the_tree() -> None:
    blocks = TEXT.split("```\n")
    block = next(found for found in blocks if found.startswith("gaffer_dagster/"))
    named = {name.rstrip("/") for name in re.findall(r"── (\S+)", block)}
    there = {
        path.name
        for path in (ROOT / "gaffer_dagster").iterdir()
        if path.name not in ("__init__.py", "__pycache__", "py.typed")
    }
    assert named == there
