"""Names that are close to one that nobody knows."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def meant(given: str, names: Iterable[str]) -> str:
    """Such as "; perhaps 'flights' is meant", to be appended; nothing where no name is like it."""
    found = get_close_matches(given, list(names), n=3, cutoff=0.65)
    return f"; perhaps {' or '.join(map(repr, found))} is meant" if found else ""
