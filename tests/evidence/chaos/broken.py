"""Protocols that are known to be wrong, which the judge must find, each with the faults that find it soonest."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gaffer_dagster.testing import Databases
from tests.evidence.chaos import history, rounds
from tests.evidence.chaos.checker import Finding
from tests.evidence.chaos.rounds import Judged
from tests.evidence.chaos.scene import Gear, Scene
from tests.support import jobs

UNDURABLE = "durability is not raised"
BROKEN: Mapping[str, Mapping[str, float]] = {
    "time-only lease": {"stop before COMMIT": 1},
    "plain SELECT, then COMMIT": {"stop before COMMIT": 1},
    "plain SELECT, then the writes": {"stop before COMMIT": 1},
    "key share, then the writes": {"stop before COMMIT": 1},
    "renewal that takes the lease back": {"stop before COMMIT": 1},
    "error means not committed": {"cut": 1},
    UNDURABLE: {"server crash": 1, "release": 4},
}
FAULTS = 300
"""At most, until one is caught."""


def play(gear: Gear, databases: Databases, folder: Path, seed: str, variant: str) -> Judged:
    """A round of one job under the broken protocol, until what is wrong is there to be found."""
    return rounds.play(
        gear, databases, folder, f"{seed}/{variant}", FAULTS,
        weights=BROKEN[variant], only="copy", variant=variant, enough=_is_lost if variant == UNDURABLE else is_twice,
    )  # fmt: skip


def caught(variant: str, judged: Judged) -> list[Finding]:
    """The findings that are of what this one breaks."""
    if variant == UNDURABLE:
        return [finding for finding in judged.findings if "lost are" in finding.text]
    return [finding for finding in judged.findings if finding.rule == "twice"]


def is_twice(scene: Scene) -> bool:
    return bool(jobs.query(scene.url, "select from t_copy group by key having count(*) > 1 limit 1"))


def _is_lost(scene: Scene) -> bool:
    # The history first: what was acknowledged before is there afterwards.
    acknowledged = {line.attempt for line in history.read(scene.folder) if line.what == "acknowledged"}
    return bool(acknowledged - {attempt for (attempt,) in jobs.query(scene.url, "select attempt from t_copy")})
