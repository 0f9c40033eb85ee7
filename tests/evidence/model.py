"""The model of the lease (spec/lease.pml), checked by spin: `./dev model`, and `--long` for tens of millions of states.

The product's rule must have no counterexample in a search that was complete; each of the broken ones must have one,
which is told as a story. A search that was cut short (by its depth, its memory, a bit-state table) proves nothing,
and counts as failed.
"""

from __future__ import annotations

import argparse
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

MODEL = Path(__file__).resolve().parents[2] / "spec" / "lease.pml"
PROGRAMS = ("spin", "gcc")
BROKEN = "BROKEN: "
"""How the model begins to say which claim failed."""
CURE = "apt-get install spin gcc libc6-dev"

_ALONE = {"RUN_ROW": 0, "WATERMARK": 0}  # only the check of the fence; see tests/support/variants.py


@dataclass(frozen=True)
class Case:
    """A model to search. `sizes`: how large; `rules`: what differs from the product. `is_sound`: it must have no
    counterexample. `shortest`: the search goes in breadth, for the shortest story."""

    name: str
    sizes: dict[str, int]
    rules: dict[str, int] = field(default_factory=dict[str, int])
    is_sound: bool = False
    shortest: bool = True

    @property
    def defines(self) -> list[str]:
        return [f"-D{name}={value}" for name, value in (self.sizes | self.rules).items()]

    @property
    def size(self) -> str:
        given = {"N": 2, "ROWS": 2, "WAKEUPS": 2, "CUTS": 1, "FAILOVERS": 1, "RELEASES": 0} | self.sizes
        return ", ".join(f"{word} {given[name]}" for name, word in _WORDS.items())


_WORDS = {
    "N": "processes",
    "ROWS": "rows",
    "WAKEUPS": "runs of each",
    "CUTS": "cuts of each",
    "FAILOVERS": "fail-overs",
    "RELEASES": "releases",
}

_CUTS = {"WAKEUPS": 1, "FAILOVERS": 0}
_FAILOVER = {"WAKEUPS": 1, "CUTS": 0}
_BOTH = {"WAKEUPS": 1}
_NEITHER = {"WAKEUPS": 1, "CUTS": 0, "FAILOVERS": 0}
_AGAIN = {"ROWS": 1, "CUTS": 0, "FAILOVERS": 0}  # a process comes back: what it left behind meets its own next run

SHORT = [
    Case("the product", _CUTS, is_sound=True),
    Case("the product", _FAILOVER, is_sound=True),
    Case("the product", _AGAIN, is_sound=True),
]
LONG = [
    Case("the product", _BOTH | {"RELEASES": 1}, is_sound=True),
    Case("the product", _NEITHER | {"N": 3}, is_sound=True),
    Case("the product", _AGAIN | {"CUTS": 1}, is_sound=True),
    Case("the product", _AGAIN | {"ROWS": 2}, is_sound=True),
    Case("only the fence", _CUTS, _ALONE, is_sound=True),
]
FENCES = [
    Case("time-only lease", _NEITHER, {"RULE": 1} | _ALONE),
    Case("plain SELECT", _NEITHER, {"RULE": 2} | _ALONE),
    Case("FOR KEY SHARE", _NEITHER, {"RULE": 3} | _ALONE),
    Case("number-only fence", _FAILOVER, {"RULE": 4} | _ALONE),
]
DAMAGE = [Case(f"{case.name}, damage", case.sizes, {**case.rules, "ONLY_DATA": 1}, shortest=False) for case in FENCES]
OTHERS = [
    Case("looks for the evidence at once", _CUTS, {"UNKNOWN": 1}),
    Case("error means not committed", _CUTS, {"UNKNOWN": 2}),
    Case("error means committed", _CUTS, {"UNKNOWN": 3}),
    Case("the watermark is not compared", _FAILOVER, {"WATERMARK": 0}),
    Case("the end does not read wanted_at", _NEITHER, {"LOOKS_AGAIN": 0}),
    Case("the end leaves the lease_id", _CUTS, {"CLEARS_ID": 0, "RUN_ROW": 0}),
    Case("the end does not count batches", _FAILOVER, {"COUNTS": 0}, shortest=False),
    Case("a dead run is left running", _NEITHER, {"ABANDONS": 0}),
]
FEWEST = 30_000_000
"""States that the product's searches of the long form must have stored in all, each of them complete."""


@dataclass(frozen=True)
class Search:
    """`states`: stored ones. `seconds`: of the processor. `incomplete`: why it says nothing of what it did not reach.
    `story`: what happens in the counterexample, if one was found."""

    states: int
    seconds: float
    errors: int
    incomplete: str | None
    story: list[str]

    @property
    def result(self) -> str:
        if self.errors:
            return "a counterexample"
        return "no counterexample" if self.incomplete is None else f"INCOMPLETE: {self.incomplete}"

    def is_as_it_must_be(self, case: Case) -> bool:
        if case.is_sound:
            return self.errors == 0 and self.incomplete is None
        return self.errors > 0 and self.story[-1].startswith(BROKEN)


def missing() -> str | None:
    """What is to be installed before anything can be checked."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"{' and '.join(absent)} not installed (Debian: {CURE})" if absent else None


def search(case: Case, *, memory: int = 2_000, depth: int = 100_000) -> Search:
    """`memory`: megabytes at most. `depth`: steps at most in one story."""
    with tempfile.TemporaryDirectory(prefix="gaffer-model-") as name:
        folder = Path(name)
        shutil.copy(MODEL, folder)
        _run(folder, "spin", "-a", *case.defines, MODEL.name)
        breadth = ["-DBFS"] if case.shortest and not case.is_sound else []
        options = ["-Og" if case.is_sound else "-O0", "-DSAFETY", "-DVECTORSZ=512", f"-DMEMLIM={memory}"]
        options += ["-DCOLLAPSE"] if case in LONG else []  # slower, in a fifth of the memory
        _run(folder, "gcc", "-w", *options, *breadth, "-o", "pan", "pan.c")
        before = _processor_seconds()
        said = _run(folder, "./pan", f"-m{depth}", fails=True)
        seconds = _processor_seconds() - before
        states, errors, incomplete = read(said)
        story = _story(_run(folder, "spin", "-t", *case.defines, MODEL.name, fails=True)) if errors else []
        return Search(states, seconds, errors, incomplete, story)


def read(said: str) -> tuple[int, int, str | None]:
    """Of what pan said: stored states, errors, and why the search was not complete (None: it was)."""
    states = re.search(r"^\s*([0-9.e+]+) states, stored", said, re.MULTILINE)
    errors = re.search(r"errors: (\d+)", said)
    found = 0 if errors is None else int(errors[1])
    cuts = {
        "max search depth too small": "a story was longer than the depth",
        "reached -DMEMLIM bound": "out of memory",
        "out of memory": "out of memory",
        "Bit statespace": "bit-state hashing leaves out states",
        "Hash-Compact": "hash-compact leaves out states",
        "Search not completed": "the search was not completed",
    }
    incomplete = next((why for word, why in cuts.items() if word in said), None)
    if incomplete is None and (states is None or errors is None or "Full statespace search for:" not in said):
        incomplete = "pan did not say that it has searched everything"
    return (0 if states is None else round(float(states[1]))), found, incomplete


def _run(folder: Path, *command: str, fails: bool = False) -> str:
    done = subprocess.run(command, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    if done.returncode and not fails:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}")
    return done.stdout


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _story(said: str) -> list[str]:
    """The lines that the model prints, up to the broken claim."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    told: list[str] = []
    for line in lines:
        if line.startswith(("spin: ", "#processes")) and told and told[-1].startswith(BROKEN):
            break
        if not line.startswith("spin: "):
            told.append(line)
    return told


def _check(cases: Sequence[Case], memory: int, depth: int) -> tuple[bool, int]:
    """Whether all is as it must be, and the states of the product's complete searches."""
    all_right, states = True, 0
    print(f"{'variant':<32} {'states':>13} {'seconds':>8}  {'result':<20} configuration", flush=True)
    for case in cases:
        found = search(case, memory=memory, depth=depth)
        right = found.is_as_it_must_be(case)
        all_right &= right
        states += found.states if right and case.is_sound and not case.rules else 0
        mark = "" if right else "   ← must not be"
        print(f"{case.name:<32} {found.states:>13,} {found.seconds:>8.1f}  {found.result:<20} {case.size}{mark}")
        print("".join(f"        {line}\n" for line in found.story), end="", flush=True)
    return all_right, states


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="./dev model", description="The model of the lease, checked by spin.")
    parser.add_argument("--long", action="store_true", help="larger sizes: tens of millions of states, up to an hour")
    parser.add_argument("--memory", type=int, default=16_000, metavar="MB", help="for one search (16000)")
    parser.add_argument("--depth", type=int, default=1_000_000, help="steps in one story (1000000)")
    parser.add_argument("--variant", metavar="WORDS", help="only the cases whose name begins so, such as time-only")
    given = parser.parse_args(words)
    if (why := missing()) is not None:
        sys.exit(why)
    print("every state is stored whole; seconds are of the processor")
    cases = [*SHORT, *(LONG if given.long else []), *FENCES, *DAMAGE, *OTHERS]
    if given.variant is not None:
        cases = [case for case in cases if case.name.startswith(given.variant)]
        if not cases:
            names = sorted({case.name for case in [*SHORT, *LONG, *FENCES, *DAMAGE, *OTHERS]})
            parser.error(f"--variant {given.variant}: no case begins so; there are: {', '.join(names)}")
    all_right, states = _check(cases, given.memory, given.depth)
    if not all_right:
        sys.exit("not as it must be")
    if given.variant is not None:
        print("as it must be")
        return
    print(f"the product's complete searches: {states:,} states")
    if given.long and states < FEWEST:
        sys.exit(f"fewer than {FEWEST:,} states of the product were searched")


if __name__ == "__main__":
    main()
