"""What forks the processes of warm.py: `warm_server.py SOCKET`. Each has a second one beside it, which speaks with the
caller's (warm_client.py) and is what it is gone with."""

from __future__ import annotations

import atexit
import fcntl
import gc
import importlib
import io
import marshal
import os
import runpy
import select
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import TextIO

PRELOADED = ("dagster", "dagster._cli", "gaffer_dagster", "gaffer_dagster.cli.run", "gaffer_dagster.cli.show")
_HIGH = 500
"""Descriptors from here on are out of the way of those that are handed over."""

Asked = tuple[tuple[str, ...], dict[bytes, bytes], bytes, list[int], list[int]]
"""Words, environment, folder, descriptors, ignored signals."""


def serve(path: str) -> Asked:
    """Returns in each process that is asked for; the server itself ends when the tests have."""
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    listening.listen(100)
    print("warm", flush=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while 0 not in select.select([0, listening], [], [])[0]:
        connection, _ = listening.accept()
        if os.fork() == 0:
            listening.detach()
            return _keep(connection)
        connection.close()
    os._exit(0)


def _keep(connection: socket.socket) -> Asked:
    """Returns in a process that it forks; it stays beside that one, for the caller."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, given, _, _ = socket.recv_fds(connection, 4, 250)
    asked: Asked = marshal.loads(connection.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL))
    worker = os.fork()
    if worker == 0:
        connection.detach()
        kept = [fcntl.fcntl(number, fcntl.F_DUPFD, _HIGH) for number in given]
        os.closerange(0, _HIGH)
        for number, wanted in zip(kept, asked[3], strict=True):
            os.dup2(number, wanted)
        os.closerange(_HIGH, _HIGH + len(kept))
        return asked
    for number in given:
        os.close(number)
    ended = os.pidfd_open(worker)
    while ended not in select.select([connection, ended], [], [])[0]:
        numbers = connection.recv(100)
        if not numbers:
            os.killpg(0, signal.SIGKILL)
        for number in numbers:
            os.kill(worker, number)
    connection.sendall(os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]).to_bytes(4, "big", signed=True))
    os._exit(0)


def _decided() -> dict[str, str]:
    """What an interpreter heeds as it starts, and never again."""
    names = ("PYTHON", "LC_", "LANG")
    return {name: os.environ[name] for name in os.environ if name.startswith(names) and name != "PYTHONPATH"}


def _opened(number: int, old: TextIO, files: list[int]) -> io.TextIOWrapper | None:
    if number not in files:
        return None
    assert isinstance(old, io.TextIOWrapper)
    raw = open(number, "wb" if number else "rb", buffering=0 if old.write_through else -1, closefd=False)  # noqa: SIM115
    lines = number == 2 or raw.isatty()
    return io.TextIOWrapper(raw, old.encoding, old.errors, line_buffering=lines, write_through=old.write_through)


def become(
    words: tuple[str, ...], environment: dict[bytes, bytes], where: bytes, files: list[int], ignored: list[int]
) -> None:
    decided, inherited = _decided(), os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.chdir(where)
    os.environb.clear()
    os.environb.update(environment)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in ignored else default)
    if _decided() != decided or not (words and (words[0] in ("-c", "-m") or Path(words[0]).is_file())):
        os.execv(sys.executable, [sys.executable, *words])
    sys.stdin = sys.__stdin__ = _opened(0, sys.stdin, files)
    sys.stdout = sys.__stdout__ = _opened(1, sys.stdout, files)
    sys.stderr = sys.__stderr__ = _opened(2, sys.stderr, files)
    time.tzset()
    importlib.invalidate_caches()
    main = sys.modules["__main__"] = ModuleType("__main__")
    named = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    sys.path[:] = [*named, *(each for each in sys.path[1:] if each not in inherited)]
    if words[0] == "-m":
        sys.argv = list(words[1:])
        sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(words[1])  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.path.insert(0, "")
        exec(compile(words[1], "<string>", "exec"), vars(main))
    else:
        sys.argv, main.__file__ = list(words), os.path.abspath(words[0])
        sys.path.insert(0, os.path.dirname(os.path.realpath(words[0])))
        exec(compile(Path(words[0]).read_bytes(), words[0], "exec"), vars(main))


if __name__ == "__main__":
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()
    code: object = None
    try:
        become(*serve(sys.argv[1]))
    except SystemExit as ended:
        code = ended.code
    # As the interpreter does, but for taking all of Dagster apart.
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
    if code is None or isinstance(code, int):
        with suppress(OSError, ValueError):  # the interpreter says what it thinks of that
            for stream in filter(None, (sys.stdout, sys.stderr)):
                stream.flush()
            os._exit((code or 0) & 0xFF)
    sys.exit(code)
