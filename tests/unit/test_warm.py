"""What a warm process does is what a cold one does."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.faults import wait_until

pytestmark = pytest.mark.skipif(warm.folder() == warm.REAL, reason="there are none here")

SLEEPS = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"


def both(*words: str, folder: Path, how: str = "", **more: str) -> list[tuple[int, str, str]]:
    """How each ends and what it says, where a shell starts it with `how` after the words."""
    found: list[tuple[int, str, str]] = []
    for python in (sys.executable, str(warm.folder() / "python")):
        done = subprocess.run(
            ["sh", "-c", f'exec "$@" {how}', "sh", python, *words], cwd=folder, env=warm.environment(**more),
            capture_output=True, text=True, timeout=60, errors="replace",
        )  # fmt: skip
        found.append((done.returncode, done.stdout, done.stderr.splitlines()[-1] if done.stderr else ""))
    return found


@pytest.mark.parametrize(
    ("code", "how"),
    [
        ("print(1); import sys; sys.exit()", ""),
        ("import sys; sys.exit(3)", ""),
        ("import sys; sys.exit(257)", ""),
        ("import sys; sys.exit('told')", ""),
        ("raise ValueError('as it was')", ""),
        ("raise KeyboardInterrupt", ""),
        ("import os; os.kill(os.getpid(), 9)", ""),
        ("import os; os.kill(os.getpid(), 15)", ""),
        ("import os; os._exit(4)", ""),
        ("import os; os.abort()", ""),
        ("import atexit; atexit.register(print, 'late'); print('soon')", ""),
        ("import threading, time; threading.Thread(target=lambda: time.sleep(0.1) or print('late')).start()", ""),
        ("import sys; print(sys.argv, sys.executable, __name__, __spec__)", "a 'b c'"),
        ("import sys; sys.stdout.write('no newline'); sys.stderr.write('said')", ""),
        ("import sys; print(sys.stdin.read())", "<where"),
        ("import sys; print(sys.stdout.encoding, sys.stdout.errors, sys.stderr.errors, sys.stdout.line_buffering)", ""),
        ("import sys; print(sys.stdin)", "<&-"),
        ("import sys; sys.exit(0 if sys.stdout is sys.stderr is None else 1)", ">&- 2>&-"),
        ("print(1)", ">/dev/full"),
        ("print(open(7).read())", "7<where"),
        ("import os; print(os.getcwd(), open('where').read())", ""),
        ("import os, time; print(os.environ, time.tzname)", ""),
        ("import sys; print(sys.path[:2], len(sys.path), len(set(sys.path)))", ""),
        ("import random, uuid; print(len({random.random(), random.random()}))", ""),
        ("import subprocess; print(subprocess.run(['sh', '-c', 'trap']).returncode)", ""),
    ],
)
def test_it_ends_and_says_the_same(code: str, how: str, tmp_path: Path) -> None:
    (tmp_path / "where").write_text("here")
    cold, heated = both("-c", code, folder=tmp_path, how=how, TZ="Europe/Vienna", PYTHONPATH="/a")
    assert heated == cold


def test_scripts_modules_options_and_locales_are_as_they_are(tmp_path: Path) -> None:
    shows = "import sys, beside\nprint(sys.argv, sys.path[:1], __name__, __file__, sys.modules['__main__'].beside)\n"
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "script.py").write_text(shows)
    (tmp_path / "inner" / "beside.py").write_text("")
    (tmp_path / "inner" / "__init__.py").write_text("")
    (tmp_path / "beside.py").write_text("")
    for words in (["inner/script.py", "a"], ["-m", "inner.script", "a"], ["-m", "nothing"], ["nothing.py"]):
        cold, heated = both(*words, folder=tmp_path)
        assert heated[:2] == cold[:2], words
    encoding = "import sys; print(sys.flags.utf8_mode, sys.stdout.encoding, sys.stdout.errors)"
    poor = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    cold, heated = both("-c", encoding, folder=tmp_path, **poor)
    assert heated == cold
    cold, heated = both("-X", "utf8", "-c", encoding, folder=tmp_path)
    assert heated == cold


def test_dagster_is_there_already_which_is_what_it_is_for(tmp_path: Path) -> None:
    cold, heated = both("-c", "import sys; print('dagster' in sys.modules)", folder=tmp_path)
    assert (cold[1], heated[1]) == ("False\n", "True\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL])
def test_a_signal_to_the_caller_is_one_to_the_process(number: signal.Signals) -> None:
    command = [warm.folder() / "python", "-c", SLEEPS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.send_signal(number)
        assert process.wait(30) == -number
        wait_until(lambda: not Path(f"/proc/{pid}").exists(), "it is gone")


def test_an_ignored_signal_is_ignored_by_both(tmp_path: Path) -> None:
    heard = "import os, signal; os.kill(os.getpid(), signal.SIGHUP); print('on')"
    for python in (sys.executable, warm.folder() / "python"):
        done = subprocess.run(["nohup", python, "-c", heard], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout) == (0, "on\n")
