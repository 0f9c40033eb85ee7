"""How many of something, in words."""

from __future__ import annotations

from collections.abc import Sequence

_FEW = 3
_LONG = 200


def counted(number: int, thing: str, things: str | None = None) -> str:
    """Such as "1 row" or "2,000 rows". `things`: the plural, where it is not made with an s."""
    return f"{number:,} {thing if number == 1 else things or f'{thing}s'}"


def shown(value: object) -> str:
    """A value as Python writes it, and of a long one its beginning: what was pasted by mistake fills no log."""
    text = repr(value)
    return text if len(text) <= _LONG else f"{text[:_LONG]}… ({len(text):,} characters)"


def few(names: Sequence[str]) -> str:
    """The first three, and how many more there are, such as "a, b, c and 2 more"."""
    more = len(names) - _FEW
    return ", ".join(names[:_FEW]) + (f" and {more:,} more" if more > 0 else "")
