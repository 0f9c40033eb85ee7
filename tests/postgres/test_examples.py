"""The examples that are programs of their own, run as their reader runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_a_job_killed_in_mid_batch_loses_nothing(url: str, tmp_path: Path) -> None:
    told = subprocess.run(
        [sys.executable, str(EXAMPLES / "kill_in_mid_batch.py")],
        cwd=tmp_path,
        env={**os.environ, "GAFFER_DATABASE_URL": url, "PYTHONPATH": str(EXAMPLES.parent)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout.splitlines()
    print(told)
    assert told[0] == "the victim ended with SIGKILL"
    assert told[1] == "invoices, orders that have one: (200, 200)"
    assert "nothing more of that run is committed" in told[2]
    assert told[3] == "invoices, orders that have one: (1000, 1000)"
