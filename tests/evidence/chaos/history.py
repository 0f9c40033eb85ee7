"""What a worker is sure of, a JSON line for each thing that it tries.

    invoked        the work on these keys begins; nothing of it was sent yet
    acknowledged   the run was told that it is committed
    failed         the run was told that it is not: the work raised, or the run does it again
    unknown        the run ended without having heard
    charged        an attempt at a row that may end its process is about to be committed
    ended          how the run ended: `note` is its outcome, `error` what it raised, if it did
    fault          something was done to the workers, or their time moves on (`MOVED`); `note` says what

A worker that dies writes nothing more: what it had invoked is unknown as well. Each line is one write to a file that
was opened before, so that it is in the kernel's hands, and outlives a kill -9.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MOVED = "time moves on"


@dataclass(frozen=True)
class Line:
    """`at`: of the monotonic clock, which the processes of one machine share. `attempt` names one call of the work."""

    at: float
    what: str
    who: str = ""
    job: str = ""
    run: int | None = None
    slot: int | None = None
    fence: int | None = None
    lease_id: str | None = None
    batch: int | None = None
    attempt: str | None = None
    keys: tuple[str, ...] = ()
    note: str = ""
    error: str | None = None

    def __str__(self) -> str:
        told = {name: value for name, value in asdict(self).items() if name not in ("at", "what") and value}
        return f"{self.at:.3f} {self.what} " + " ".join(f"{name}={value}" for name, value in told.items())


class Recorder:
    """Writes the lines of one worker."""

    def __init__(self, folder: Path, who: str) -> None:
        self.who = who
        self._file = os.open(folder / f"{who}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(self, what: str, **told: Any) -> None:
        line = {"at": time.monotonic(), "what": what, "who": self.who, **told}
        os.write(self._file, json.dumps(line).encode() + b"\n")


def read(folder: Path) -> list[Line]:
    """All lines of all workers, in the order of their times."""
    return sorted((line for file in sorted(folder.glob("*.jsonl")) for line in _lines(file)), key=lambda line: line.at)


def _lines(file: Path) -> Iterator[Line]:
    for text in file.read_text().splitlines():
        told: dict[str, Any] = json.loads(text)
        told["keys"] = tuple(told.get("keys", ()))
        yield Line(**told)
