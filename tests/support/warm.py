"""Programs, `python`, `gaffer` and `dagster`, that do what those of the environment do without the second and a half
that each start spends on importing Dagster: a server that has imported it forks (warm_server.py).

It still is a process, with the descriptors, environment, folder and signals that the caller gives it, and it ends as
any does. What differs: it is in a session of its own, its pid is not the one that the caller sees, it does not outlive
a caller that is killed, and what it imports may be imported already. Whatever an interpreter decides as it starts
(options, the locale, Python's variables) is left to a cold one.
"""

from __future__ import annotations

import atexit
import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_SAID = re.compile("GAFFER_(?!PG_BIN)|DAGSTER_|PG")
REAL = Path(sys.executable).parent
PROGRAMS: dict[str, list[Any]] = {
    "python": [],
    "gaffer": ["-m", "gaffer_dagster.cli"],
    "dagster": [REAL / "dagster"],
}


@functools.cache
def folder() -> Path:
    """Where they are, as long as this process lives."""
    if not hasattr(os, "pidfd_open"):  # the cold ones, where there is no Linux
        return REAL
    made, here = Path(tempfile.mkdtemp(prefix="gaffer-warm-")), Path(__file__).parent
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    for name, words in PROGRAMS.items():
        command = [sys.executable, "-IS", here / "warm_client.py", made / "socket", *words]
        (made / name).write_text(f'#!/bin/sh\nexec {shlex.join(map(str, command))} "$@"\n')
        (made / name).chmod(0o755)
    server = subprocess.Popen(
        [sys.executable, here / "warm_server.py", made / "socket"],
        env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    assert server.stdout is not None
    assert server.stdout.readline() == b"warm\n", "the server did not start"
    return made


def environment(url: str | None = None, **more: str) -> dict[str, str]:
    """This process's, but for what it says to gaffer, Dagster and libpq."""
    kept = {name: value for name, value in os.environ.items() if not _SAID.match(name)}
    return kept | ({} if url is None else {"GAFFER_DATABASE_URL": url}) | more


def command(*words: str) -> list[str]:
    return [str(folder() / "gaffer"), *words]


def gaffer(
    url: str | None, folder: Path, *words: str, given: str = "", **more: str
) -> subprocess.CompletedProcess[str]:
    """The command in this folder, on this database. `given`: on its stdin; `more`: variables."""
    return subprocess.run(
        command(*words), cwd=folder, env=environment(url, **more), input=given, capture_output=True, text=True,
        errors="replace", timeout=90,
    )  # fmt: skip
