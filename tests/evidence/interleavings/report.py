"""What came of a case, and its row in the report."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tests.evidence.interleavings.cases import Case
from tests.evidence.interleavings.judge import KEEPS


@dataclass
class Found:
    """What came of a case. `of`: how many schedules there are, where not all were run an estimate (Knuth's, 1975: the
    mean of the product of the choices along a random path)."""

    case: Case
    schedules: int = 0
    of: float = 0
    blocked: int = 0
    seconds: float = 0
    broken: Counter[str] = field(default_factory=Counter[str])
    first: dict[str, str] = field(default_factory=dict[str, str])

    def note(self, broken: dict[str, str], trace: list[str]) -> None:
        self.schedules += 1
        for name, how in broken.items():
            self.broken[name] += 1
            self.first.setdefault(name, f"{how}: {', '.join(trace)}")

    @property
    def lost(self) -> int:
        return max(self.broken[name] for name in ("what was acknowledged is there", *_LOST))

    @property
    def twice(self) -> int:
        return self.broken["nothing is applied twice"]

    @property
    def stale(self) -> int:
        return self.broken["nothing is committed under a fence once a later one was granted"]

    @property
    def forgotten(self) -> int:
        return self.broken["what is left is asked for"]

    @property
    def is_caught(self) -> bool:
        return self.lost + self.twice + self.forgotten + self.broken[KEEPS] > 0

    def row(self) -> str:
        case, others = self.case, sum(self.broken.values())
        of = "all" if self.of == self.schedules else f"of about {self.of:,.0f}" if self.of else "until it was caught"
        grain = " ".join(
            word for word, is_so in (("every message", case.every_message), ("inside", case.inside)) if is_so
        )
        return (
            f"| {case.name} | {case.variant} | {case.expiry} | {case.fault} | {grain or 'shared'} | {self.schedules:,}"
            f" ({of}) | {self.blocked:,} | {self.lost:,} | {self.twice:,} | {self.stale:,} | {self.forgotten:,}"
            f" | {others:,} | {self.seconds:,.0f} |"
        )


_LOST = (
    "what was counted is what is there",
    "nothing up to the watermark is missing",
)
HEADER = (
    "| scenario | protocol | lease | fault | stops | schedules | blocked steps | lost | twice | stale commits"
    " | forgotten | broken in all | s |\n|---|---|---|---|---|---|---|---|---|---|---|---|---|"
)
