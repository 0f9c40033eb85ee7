"""Which schedules are played: all of a case, depth-first, or so many at random."""

from __future__ import annotations

import logging
import math
import random
import tempfile
import time
from pathlib import Path

from gaffer_dagster.testing.database import Databases, server
from tests.evidence.interleavings.cases import Case
from tests.evidence.interleavings.gate import stepped_engines
from tests.evidence.interleavings.player import Player
from tests.evidence.interleavings.report import Found


def explore(case: Case, url: str, *, seed: int = 0, until_broken: bool = False) -> Found:
    """All schedules of a case, or as many at random as it says, in a new database. `until_broken`: no more than it
    takes to see that something is."""
    found, began = Found(case), time.monotonic()
    with stepped_engines():
        player = Player(url, case)
        try:
            if case.walks:
                _walk(player, found, random.Random(f"{seed}/{case.name}/{case.fault}"), until_broken)
            else:
                _go_through(player, found, until_broken)
        finally:
            player.close()
    found.blocked, found.seconds = player.blocked, time.monotonic() - began
    return found


def _go_through(player: Player, found: Found, until_broken: bool) -> None:
    """Depth-first. `path`: which choice of how many, at each point where there was one."""
    path: list[tuple[int, int]] = []
    depth = 0

    def choose(options: int) -> int:
        nonlocal depth
        if depth == len(path):
            path.append((0, options))
        chosen, before = path[depth]
        assert options == before, f"the same beginning had {before} ways to go on, and now {options}: {player.trace}"
        depth += 1
        return chosen

    while True:
        depth = 0
        found.note(player.play(choose), player.trace)
        if until_broken and found.is_caught:
            return
        while path and path[-1][0] == path[-1][1] - 1:
            path.pop()
        if not path:
            break
        path[-1] = (path[-1][0] + 1, path[-1][1])
    found.of = found.schedules


def _walk(player: Player, found: Found, chance: random.Random, until_broken: bool) -> None:
    """At random; one that came before is not counted."""
    seen: set[tuple[int, ...]] = set()
    sizes = 0.0
    for _ in range(player.case.walks):
        path: list[tuple[int, int]] = []

        def choose(options: int, path: list[tuple[int, int]] = path) -> int:
            path.append((chance.randrange(options), options))
            return path[-1][0]

        broken = player.play(choose)
        sizes += math.prod(options for _, options in path)
        chosen = tuple(each for each, _ in path)
        if chosen not in seen:
            seen.add(chosen)
            found.note(broken, player.trace)
        if until_broken and found.is_caught:
            return
    found.of = max(found.schedules, sizes / player.case.walks)


def explore_alone(case: Case, seed: int, until_broken: bool = False) -> Found:
    """On a server of its own: what is due depends on who has a transaction open anywhere on a server."""
    logging.getLogger("gaffer").addHandler(logging.NullHandler())
    with (
        tempfile.TemporaryDirectory() as folder,
        server(Path(folder)) as server_url,
        Databases(server_url) as databases,
        databases.scratch() as url,
    ):
        return explore(case, url, seed=seed, until_broken=until_broken)
