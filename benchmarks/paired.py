"""Compares ways to do the same, side by side in one run, so that what else the machine does hits all of them alike.

Each iteration does every variant once, in random order. A block is some iterations; its ratio is that of the medians
within it; what is told is the median of the blocks' ratios, with their quartiles. The first variant is what the others
are compared to; give it a twin under another name to see how far two equal things lie apart.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Result:
    """`microseconds`: the median of one time. `ratio`: to the first variant, with the quartiles `low` and `high`."""

    name: str
    microseconds: float
    ratio: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.name:<40} {self.microseconds:>8.0f} µs   {self.ratio:.3f} ({self.low:.3f}–{self.high:.3f})"


def compare(
    variants: Mapping[str, Callable[[], object]],
    *,
    before: Callable[[str], object] = lambda name: None,
    blocks: int = 30,
    iterations: int = 20,
    seed: int = 0,
) -> list[Result]:
    """Times each variant `blocks` × `iterations` times, after as many iterations to warm up as are in a block.
    `before` makes ready for a variant, which is not timed."""
    chance = random.Random(seed)  # noqa: S311 — an order, nothing secret
    names = list(variants)
    medians: dict[str, list[float]] = {name: [] for name in names}
    gc.disable()
    try:
        for block in range(-1, blocks):
            taken: dict[str, list[float]] = {name: [] for name in names}
            for _ in range(iterations):
                for name in chance.sample(names, len(names)):
                    before(name)
                    began = time.perf_counter()
                    variants[name]()
                    taken[name].append(time.perf_counter() - began)
            gc.collect()
            if block >= 0:
                for name in names:
                    medians[name].append(statistics.median(taken[name]))
    finally:
        gc.enable()
    return [_result(name, medians[name], medians[names[0]]) for name in names]


def _result(name: str, times: list[float], base: list[float]) -> Result:
    ratios = [mine / its for mine, its in zip(times, base, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return Result(name, statistics.median(times) * 1e6, middle, low, high)
