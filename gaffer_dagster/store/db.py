"""Connections to Postgres.

Every connection is autocommit at rest (transactions are explicit in the SQL that is sent), prepares nothing and
sets nothing for the session, so that PgBouncer in transaction mode works by construction. Both keep-alives and
`tcp_user_timeout` are set, since each alone misses half of the ways in which a peer can vanish.
"""

from __future__ import annotations

import os
import re
import select
import socket
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import psycopg
from psycopg import conninfo, sql
from psycopg.rows import TupleRow
from typing_extensions import LiteralString

from gaffer_dagster.errors import (
    BadInputError,
    BadSpecError,
    BatchEndedError,
    DatabaseUnavailableError,
    DeadlinePassedError,
    GafferError,
    JobHeldError,
    LeaseLostError,
    OutOfRoomError,
    ProtectedTableError,
    RenamedJobError,
    TableInUseError,
    UnknownJobError,
    WatchHeldError,
)

Connection = psycopg.Connection[TupleRow]
Query = sql.Composed
# Whatever a role or database prefers: under a snapshot that is older than its locks, a renewal in the middle of a
# batch would be a concurrent update that the batch could never commit after.
BEGIN: LiteralString = "begin isolation level read committed; "
Row = TypeVar("Row")

_LIVENESS: dict[str, Any] = {
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 15_000,
}
# What libpq itself would not show, by the name of its variable if it has one; and where a password may be found.
_SECRETS: Mapping[str, str | None] = {
    option.keyword.decode(): None if option.envvar is None else option.envvar.decode()
    for option in psycopg.pq.Conninfo.get_defaults()
    if option.dispchar == b"*" or option.keyword == b"passfile" or option.keyword.startswith(b"scram_")
}
_UNREADABLE = (
    "the database URL cannot be read (not shown, it may hold a password); the form is "
    "postgresql://user:password@host:5432/name, with %-escapes for special characters"
)


def parse_url(url: str) -> dict[str, Any]:
    """The parts of a libpq or SQLAlchemy style URL (or a libpq keyword string).

    Raises `BadInputError` without repeating the text: a malformed URL may hold a password anywhere.
    """
    text = url.strip()
    for scheme in ("postgresql+psycopg2://", "postgresql+psycopg://", "postgres+psycopg://"):
        if text.startswith(scheme):
            text = "postgresql://" + text.removeprefix(scheme)
    if not text:
        raise BadInputError("the database URL is empty; give one such as postgresql://user@host:5432/name")
    if "\0" in text:  # where libpq stops reading
        raise BadInputError(_UNREADABLE)
    try:
        parts = conninfo.conninfo_to_dict(text)
    except (psycopg.Error, UnicodeError):
        raise BadInputError(_UNREADABLE) from None
    # A password with an @ or / of its own ends up in the host, the port or the name, which errors show.
    before_query = text.partition("://")[2].partition("?")[0]
    astray = before_query.count("@") > 1 or "@" in before_query.partition("/")[2]
    # A whole URL, or a part of one, under a keyword. A host that begins with / or @ is a socket.
    user, host, name = (str(parts.get(keyword, "")) for keyword in ("user", "host", "dbname"))
    odd_host = any(re.search(r"[;=]|^[^/@].*[@/]", each) for each in host.split(","))
    astray = astray or odd_host or re.search(r"[;=]|//|:.*[@/]|@.*[:/]", name, re.DOTALL)
    if astray or re.search(r"[^0-9,]", str(parts.get("port") or "")):
        raise BadInputError(_UNREADABLE)
    if ":" in user:
        raise BadInputError(f"{_UNREADABLE}; a : in the user's name is not taken, which may be a password gone astray")
    if "options" in parts:
        raise BadInputError(
            "the database URL sets 'options', which poolers drop or refuse; set them with ALTER ROLE instead"
        )
    return dict(parts)


def describe(url: str) -> str:
    """Where a URL leads, for messages: user, host, port and database, never a secret."""
    parts = {k: v for k, v in parse_url(url).items() if k not in _SECRETS}
    host = parts.get("host") or parts.get("hostaddr") or "localhost"
    return f"{parts.get('user', '')}@{host}:{parts.get('port', 5432)}/{parts.get('dbname', '')}"


def for_psql(url: str) -> tuple[str, dict[str, str]]:
    """The same database for a program of libpq's: the words for its command line, which others can read, and what goes
    into its environment."""
    parts = parse_url(url)
    secrets = {variable: parts.pop(name) for name, variable in _SECRETS.items() if name in parts}
    # What has no variable psql asks for.
    given = {variable: str(value) for variable, value in secrets.items() if variable is not None}
    return conninfo.make_conninfo("", **parts), given


# By what is said of a connection that is refused, for which there is no SQLSTATE; in English, as most servers speak.
_UNREACHED = {
    "too many (clients|connections)|connection slots are reserved|no more connections allowed": (
        "no connection is left: end idle ones, raise the limit (of the server, a pooler, the role or the database), or "
        "put a PgBouncer in between"
    ),
    "session is read-only|is in hot standby": (
        "no server that the URL names can be written: let it name the primary, too, or promote a standby"
    ),
    "system is (starting|shutting|not yet|not accepting|in recovery)": (
        "it starts, or ends; if it stays so, its own log says why (a full disk?)"
    ),
    "": "check that it runs, the URL, and the network in between",
}


def connect(url: str, *, application_name: str, patience: int = 5) -> Connection:
    """A new connection of its own, never pooled. Raises `DatabaseUnavailableError` when there is none to be had, after
    that many seconds unless the URL says another number."""
    parts: dict[str, Any] = _LIVENESS | {"connect_timeout": patience} | parse_url(url)
    parts["client_encoding"] = "utf8"
    parts["application_name"] = application_name[:63]
    try:
        # ClientCursor binds on the client, so that one message can carry several statements and their parameters.
        return psycopg.connect(**parts, autocommit=True, prepare_threshold=None, cursor_factory=psycopg.ClientCursor)
    except psycopg.OperationalError as error:
        lines = [line for line in str(error).splitlines() if line.strip() and not line[0].isspace()]
        said = lines[-1] if lines else type(error).__name__
        cure = next((cure for words, cure in _UNREACHED.items() if re.search(words, said)), _UNREACHED[""])
        raise DatabaseUnavailableError(f"Postgres cannot be reached at {describe(url)}: {said}; {cure}") from None
    except (psycopg.ProgrammingError, UnicodeError) as error:  # a setting, or a host, that cannot be one
        raise BadInputError(
            f"the database URL ({describe(url)}) cannot be used: {str(error).strip()}; mend it"
        ) from None


_CONNECTION_LOST = frozenset({"08000", "08003", "08006", "57P01", "57P02", "57P03"})
_TRY_AGAIN = frozenset({"40001", "40P01"})


def sqlstate(error: BaseException) -> str | None:
    return error.sqlstate if isinstance(error, (psycopg.Error, OutOfRoomError)) else None


def is_database_error(error: BaseException) -> bool:
    return isinstance(error, psycopg.Error)


def lost_connection(error: BaseException) -> bool:
    """The connection died of something that may pass: the network, a restart, an administrator's command."""
    if not isinstance(error, psycopg.OperationalError):
        return False
    if error.sqlstate == "08P01":  # so PgBouncer says that the server has gone; as an ERROR it is bad SQL
        return error.diag.severity == "FATAL"
    return error.sqlstate is None or error.sqlstate in _CONNECTION_LOST


def worth_repeating(error: BaseException) -> bool:
    """The same transaction may succeed when it is done again: deadlock, serialization failure, lost connection."""
    return lost_connection(error) or sqlstate(error) in _TRY_AGAIN


def is_exhausted(error: BaseException) -> bool:
    """The server is short of something (disk, memory, connections), until somebody makes room."""
    return (sqlstate(error) or "").startswith("53")


def is_out_of_room(error: BaseException) -> bool:
    """Whatever is asked for, the server has no disk or connection left for it; of memory, or of a limit that is set,
    one statement may want too much."""
    return sqlstate(error) in ("53000", "53100", "53300")


def was_cut(error: BaseException) -> bool:
    """The server ended a statement or transaction because it was told to, or because a time limit was over."""
    return sqlstate(error) in ("57014", "25P03", "25P04")


_READ_ONLY = (
    "the database is read-only: a standby, or default_transaction_read_only is on; name the primary "
    "(target_session_attrs=read-write), or let the role write"
)
# What a server in trouble says is of its own files and settings.
_CURES = {
    "53100": "the disk of the database is full: make room there; nothing of this was done, what was committed before "
    "stays, and the next run goes on",
    "53200": "the database is out of memory: let the batch be smaller (bounds: batch_rows), or give the server more",
    "53300": "the database has no connection left: end idle ones, or raise the limit",
    "25006": _READ_ONLY,
}


MOST_SAID = 2000


def primary_message(error: BaseException) -> str:
    """What happened, and the cure where the server itself is in trouble; without the values of rows (which a database
    error carries in its DETAIL), as text that the database can store, of `MOST_SAID` characters at most."""
    if isinstance(error, psycopg.Error):
        text = error.diag.message_primary or (str(error).strip().splitlines() or [type(error).__name__])[0]
        if (cure := _CURES.get(error.sqlstate or "")) is not None:
            text = f"{text}; {cure}"
    else:
        # A private kind is called by what it is a kind of: its name says nothing to others.
        name = next(kind.__name__ for kind in type(error).__mro__ if not kind.__name__.startswith("_"))
        try:
            text = f"{name}: {error}"
        except Exception:  # its own __str__ fails; what it is called is still worth recording
            text = f"{name} (which cannot say more)"
    return brief(text)


def brief(text: str) -> str:
    """What `presentable` makes of it, cut where it has more than `MOST_SAID` characters."""
    said = presentable(text[: 10 * MOST_SAID])  # a password that is cut there is far behind what is kept
    if len(said) <= MOST_SAID and len(text) <= 10 * MOST_SAID:
        return said
    cut = f"… (cut; it has {len(text):,} characters)"
    return said[: MOST_SAID - len(cut)] + cut


def presentable(text: str) -> str:
    """`text` as a database, a log and a page can have it: without what is no character, and without passwords."""
    return redact(text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace").decode())


def probe(connection: Connection) -> None:
    """Raises what the server has to say about an open transaction, if it has ended it meanwhile."""
    if in_transaction(connection):
        connection.execute("select")


_PASSWORD = re.compile(
    r"""(?<=://)([^:/@\s]*):\S+@"""  # to the last @, which the password may have too
    r"""|(password(?:\s*=\s*|["']\s*:\s*))(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|\S+)""",
    re.IGNORECASE,
)


def redact(text: str) -> str:
    """`text` without the passwords of the database URLs in it."""
    return _PASSWORD.sub(lambda found: f"{found[1]}:***@" if found[1] is not None else f"{found[2]}***", text)


def in_transaction(connection: Connection) -> bool:
    """A transaction is open and no error has spoilt it."""
    return connection.info.transaction_status == psycopg.pq.TransactionStatus.INTRANS


def is_busy(connection: Connection) -> bool:
    """A statement is under way, or its answer has not been read to the end."""
    return connection.info.transaction_status == psycopg.pq.TransactionStatus.ACTIVE


def was_closed(connection: Connection) -> bool:
    """By this process, and not by the server or the network."""
    return connection.closed and not connection.broken


def is_cut(connection: Connection) -> bool:
    """The server, or the network, has ended this idle connection, as far as this machine has heard."""
    waiting = select.poll()
    waiting.register(connection.pgconn.socket, select.POLLIN)
    try:
        while waiting.poll(0):
            connection.pgconn.consume_input()
    except psycopg.OperationalError:
        return True
    return False


def cancel_running(connection: Connection) -> None:
    """Cancels the statement that runs on this connection, if one does. May be called from another thread."""
    if is_busy(connection):
        try:
            connection.cancel_safe(timeout=2)
        except psycopg.Error:
            return  # the connection is gone, and its statement with it


def cut(connection: Connection, other: Callable[[], Connection]) -> None:
    """Ends the session of a connection that another thread uses, whatever it does; closing it stays with that thread.
    `other` is who may ask the server for it."""
    with suppress(OSError), socket.socket(fileno=os.dup(connection.pgconn.socket)) as line:
        line.shutdown(socket.SHUT_RDWR)  # a server that reads, or a pooler, takes notice
    # One that writes need not; and behind a pooler the number is none of the server's, hence the name.
    other().execute(
        """
        select pg_catalog.pg_terminate_backend(pid) from pg_catalog.pg_stat_activity
         where pid = %s and usename = current_user and application_name = %s
        """,
        [connection.info.backend_pid, connection.info.parameter_status("application_name")],
    )


@contextmanager
def impatient_of_locks(connection: Connection) -> Generator[None]:
    """One transaction that waits five seconds at most for whoever uses a table: all who come later wait behind it.
    Raises `TableInUseError`."""
    try:
        with connection.transaction():
            connection.execute("set local lock_timeout = '5s'")
            yield
    except psycopg.errors.LockNotAvailable:
        raise TableInUseError(
            "somebody uses the table, and did not let go of it within 5 seconds; nothing was changed. Try again when "
            "that transaction is over; to see whose it is: select a.* from pg_stat_activity a join pg_locks l on "
            "l.pid = a.pid where l.granted and l.relation = 'TABLE'::regclass"
        ) from None


@contextmanager
def impatient(connection: Connection, patience: timedelta = timedelta(seconds=10)) -> Generator[None]:
    """One transaction whose statements take this long at most: a locked table must not hold up Dagster's daemon."""
    milliseconds = str(round(patience.total_seconds() * 1000))
    connection.execute(BEGIN + "select pg_catalog.set_config('statement_timeout', %s, true)", [milliseconds])
    try:
        yield
    except BaseException:
        roll_back(connection)
        raise
    connection.execute("commit")


def roll_back(connection: Connection) -> None:
    """Ends whatever transaction is open. Closes the connection where that cannot be done at once."""
    status = connection.info.transaction_status
    if status in (psycopg.pq.TransactionStatus.INTRANS, psycopg.pq.TransactionStatus.INERROR):
        try:
            connection.execute("rollback")
        except psycopg.Error:
            connection.close()
    elif status != psycopg.pq.TransactionStatus.IDLE:
        give_up(connection)


def give_up(connection: Connection) -> None:
    """Cancels what runs and closes: closing alone would leave the server working, and its rows locked."""
    cancel_running(connection)
    connection.close()


def committed(cursor: psycopg.Cursor[Row]) -> Row:
    """The one row that the statements of a message returned, once the server's command tag says COMMIT.

    A transaction that an error has spoilt answers COMMIT with a silent ROLLBACK; drivers say nothing. Any other answer
    is one to something else: somebody shares the connection. Whether it was committed is then as unknown as where the
    connection is lost, and is raised as that.
    """
    answer: Row | None = None
    while True:
        if cursor.description is not None:
            answer = cursor.fetchone()
        tag = cursor.statusmessage
        if not cursor.nextset():
            break
    if tag == "ROLLBACK":
        raise BatchEndedError("the server answered ROLLBACK to COMMIT: nothing of this transaction was kept")
    if tag != "COMMIT" or answer is None:
        raise psycopg.OperationalError(
            f"the server answered {tag} to COMMIT: another process or thread uses this connection (a fork?), and took "
            "the answer; let each have its own"
        )
    return answer


# The SQLSTATEs that the functions of the protocol raise (migrations/0002_protocol.sql).
_REFUSALS: dict[str, type[GafferError]] = {
    "GF001": LeaseLostError,
    "GF002": ProtectedTableError,
    "GF003": DeadlinePassedError,
    "GF004": BatchEndedError,
    "GF005": LeaseLostError,
    "GF006": UnknownJobError,
    "GF007": RenamedJobError,
    "GF008": JobHeldError,
    "GF009": BadSpecError,
    "GF010": WatchHeldError,
}


@contextmanager
def refusals() -> Generator[None]:
    """What the database refuses, as an error of ours."""
    try:
        yield
    except psycopg.Error as error:
        if error.sqlstate == "25006":
            raise BadInputError(_READ_ONLY) from None
        if error.sqlstate is not None and is_exhausted(error):
            raise OutOfRoomError(primary_message(error), error.sqlstate) from None
        refusal = _REFUSALS.get(error.sqlstate or "")
        if refusal is None:
            raise
        raise refusal(primary_message(error)) from None


def with_parts(url: str, **parts: str | int) -> str:
    """The URL with other parts, as libpq calls them, such as `host` and `port`."""
    changed: dict[str, Any] = parse_url(url) | parts
    return conninfo.make_conninfo(**changed)


def with_database(url: str, name: str) -> str:
    """The same server and role, another database."""
    return with_parts(url, dbname=name)


def create_database(name: str) -> sql.Composed:
    return sql.SQL("create database {}").format(sql.Identifier(name))


def copy_database(name: str, template: str, *, version: int) -> sql.Composed:
    """A database `name` that is a copy of `template`, to which nobody may be connected. `version`: the server's, as
    `connection.info.server_version` has it."""
    copy = create_database(name) + sql.SQL(" template {}").format(sql.Identifier(template))
    # For half of the work of the other strategy, as long as the template is small; older servers have no other.
    return copy + sql.SQL(" strategy file_copy") if version >= 150000 else copy


def comment_on_database(name: str, text: str) -> sql.Composed:
    return sql.SQL("comment on database {} is {}").format(sql.Identifier(name), sql.Literal(text))


def drop_database(name: str) -> sql.Composed:
    return sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(name))


def set_password(role: str, password: str) -> sql.Composed:
    return sql.SQL("alter role {} password {}").format(sql.Identifier(role), sql.Literal(password))
