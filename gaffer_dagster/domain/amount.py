"""How many of something, in words."""

from __future__ import annotations


def counted(number: int, thing: str, things: str | None = None) -> str:
    """Such as "1 row" or "2,000 rows". `things`: the plural, where it is not made with an s."""
    return f"{number:,} {thing if number == 1 else things or f'{thing}s'}"
