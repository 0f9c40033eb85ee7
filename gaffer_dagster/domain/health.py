"""What `gaffer doctor` finds, and the rules by which it judges what a server says of itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum

from gaffer_dagster.domain.amount import counted
from gaffer_dagster.domain.duration import in_words
from gaffer_dagster.domain.lease import LARGEST_SKEW

OLDEST, NEWEST = 15, 18
"""The majors of PostgreSQL that are tried."""
_SKEW = timedelta(seconds=2)
_SHORT = timedelta(seconds=5)
_IDLE = timedelta(minutes=1)
_MINUTES, _HOUR = timedelta(minutes=5), timedelta(hours=1)
_OF_A_RUN = 2  # connections: one works, the other renews the lease
_OLD, _VERY_OLD = 1_000_000_000, 1_600_000_000
_DEAD_ROWS = 100_000


class Mark(str, Enum):
    """How it stands with what was looked at."""

    OK = "ok"
    WARNING = "warning"
    WRONG = "wrong"
    UNKNOWN = "cannot tell"
    SKIPPED = "not looked at"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Check:
    """One line of the page. `found`: the value, or why it was not looked at; `cure`: to be pasted, or what to do."""

    part: str
    name: str
    mark: Mark
    found: str
    cure: str | None = None


def told(error: Exception) -> tuple[str, str | None]:
    """What is so, and its cure, which our errors say last, behind a semicolon."""
    found, _, cure = str(error).rpartition("; ")
    return (found, cure) if found else (cure, None)


def worst(checks: Iterable[Check]) -> Mark:
    """What the page as a whole says: wrong, cannot tell, or ok (with or without warnings)."""
    marks = {check.mark for check in checks}
    return next((mark for mark in (Mark.WRONG, Mark.UNKNOWN) if mark in marks), Mark.OK)


# ── the server ───────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Setting:
    """A setting of the session as it began. `source`: what set it (`default`, `configuration file`, `database`,
    `user`, …)."""

    value: str
    source: str


@dataclass(frozen=True)
class Vacuum:
    """`age`: of the oldest row's transaction, in transactions; `dead`: our table with most dead rows, and how many."""

    age: int
    dead: tuple[str, int, int] | None
    """The table, its dead rows and its live ones."""


@dataclass(frozen=True)
class Server:
    """What a server says of itself, and of the role that asks. `role` and `database` are quoted as in SQL."""

    version: int
    role: str
    database: str
    encoding: str
    is_superuser: bool
    owns_schema: bool
    may_write_tables: bool
    """Those of the schema gaffer, past its functions."""
    schemas: Sequence[str]
    """The search path, as far as it exists."""
    settings: Mapping[str, Setting]
    is_standby: bool
    connections: int
    of_role: int
    of_database: int
    role_limit: int
    database_limit: int
    standbys: int
    synchronous: int | None
    """None: the role may not see which standbys are synchronous."""
    vacuum: Vacuum

    def is_on(self, name: str) -> bool:
        return self.settings[name].value == "on"

    def cure(self, name: str, value: str) -> str:
        """SQL that makes a setting so where it was made otherwise."""
        whose = {
            "user": f"role {self.role}",
            "database": f"database {self.database}",
            "database user": f"role {self.role} in database {self.database}",
        }.get(self.settings[name].source)
        then = "" if whose else "; select pg_reload_conf()"
        return f"alter {whose or 'system'} set {name} = {value}{then};"


def of_server(server: Server) -> Iterator[Check]:
    """The rules of what matters of a server."""
    yield _version(server)
    yield _role(server)
    yield _names(server)
    yield from _durability(server)
    yield _timeouts(server)
    yield _connections(server)
    yield _writable(server)
    yield _replication(server)
    yield _vacuum(server)
    yield _encoding(server)


def _check(name: str, mark: Mark, found: str, cure: str | None = None) -> Check:
    return Check("database", name, mark, found, cure)


def _version(server: Server) -> Check:
    major = server.version // 10_000
    shown = f"PostgreSQL {major}.{server.version % 10_000}"
    if major < OLDEST:
        cure = f"move to PostgreSQL {OLDEST} or later"
        return _check("version", Mark.WRONG, f"{shown}; {OLDEST} is the oldest that is supported", cure)
    if major > NEWEST:
        found = f"{shown}; this version of gaffer_dagster was tried with {OLDEST} to {NEWEST}"
        return _check("version", Mark.WARNING, found, "pip install --upgrade gaffer_dagster")
    return _check("version", Mark.OK, shown)


def _role(server: Server) -> Check:
    more = {
        "is a superuser": server.is_superuser,
        "owns the schema gaffer": server.owns_schema,
        "may write gaffer's tables past its functions": server.may_write_tables and not server.owns_schema,
    }
    if not any(more.values()):
        return _check("role", Mark.OK, server.role)
    found = f"{server.role} {' and '.join(what for what, so in more.items() if so)}: more than a runner needs"
    # Who operates or migrates has to be more; that a runner is, only its administrator can tell.
    return _check(
        "role", Mark.OK, f"{found}; for that, let jobs run as a member of gaffer_runner (gaffer migrate --roles)"
    )


def _names(server: Server) -> Check:
    """The default search path begins with "$user"."""
    if "gaffer" in server.schemas:
        found = (
            f"the search path of {server.role} leads into the schema gaffer: names such as job or alert in the jobs' "
            "own SQL mean our tables"
        )
        cure = f"alter role {server.role} in database {server.database} set search_path = public;"
        return _check("search path", Mark.WARNING, found, cure)
    return _check("search path", Mark.OK, ", ".join(server.schemas) or "empty: every table's name must be qualified")


def _durability(server: Server) -> Iterator[Check]:
    for name in ("fsync", "full_page_writes"):
        if not server.is_on(name):
            found = f"{name} is off: a crash of the host can break the database, and lose what was committed"
            yield _check("durability", Mark.WRONG, found, server.cure(name, "on"))
    said = server.settings["synchronous_commit"].value
    checksums = "" if server.is_on("data_checksums") else "; data_checksums is off: a disk's errors go unseen"
    if said in ("off", "local"):
        found = (
            f"synchronous_commit is {said}: what others commit can be lost in a crash or fail-over (batches and leases "
            f"raise it to on for themselves){checksums}"
        )
        yield _check("synchronous commit", Mark.WARNING, found, server.cure("synchronous_commit", "on"))
    else:
        yield _check("synchronous commit", Mark.OK, f"{said}{checksums}")


def _timeouts(server: Server) -> Check:
    """A batch sets its own, whatever the role's are; what is done outside of batches does not always."""
    names = ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout", "transaction_timeout")
    limits = {name: timedelta(milliseconds=int(server.settings[name].value))
              for name in (*names, "idle_session_timeout") if name in server.settings}  # fmt: skip
    given = {name: limit for name, limit in limits.items() if limit}
    shown = ", ".join(f"{name} {limit.total_seconds():g} s" for name, limit in given.items())
    short = [name for name, limit in given.items() if limit < (_SHORT if name in names else _IDLE)]
    if short:
        found = f"{shown}: a batch sets its own, but looking for what is due, preparing and waiting are cut"
        return _check("timeouts", Mark.WARNING, found, " ".join(server.cure(name, "'1min'") for name in short))
    return _check("timeouts", Mark.OK, f"{shown}; a batch sets its own" if given else "none but those of a batch")


def _connections(server: Server) -> Check:
    most = int(server.settings["max_connections"].value)
    kept = sum(int(server.settings[name].value) for name in ("superuser_reserved_connections", "reserved_connections")
               if name in server.settings)  # fmt: skip
    limits = [
        ("the server", most - kept, server.connections, "max_connections"),
        ("the database", server.database_limit, server.of_database, "its connection limit"),
        ("the role", server.role_limit, server.of_role, "its connection limit"),
    ]
    left = {of: limit - used for of, limit, used, _ in limits if limit >= 0}
    shown = f"{server.connections} of {most - kept} in use" + "".join(
        f"; {used} of {limit} that {of} may have" for of, limit, used, _ in limits[1:] if limit >= 0
    )
    scarce = next((row for row in limits if left.get(row[0], most) < max(2 * _OF_A_RUN, row[1] // 20)), None)
    if scarce is None:
        return _check("connections", Mark.OK, shown)
    of, _, _, setting = scarce
    found = f"{shown}: little is left of what {of} may have, and each run takes {_OF_A_RUN}"
    target = {"the database": f"alter database {server.database} connection limit -1;",
              "the role": f"alter role {server.role} connection limit -1;"}.get(of)  # fmt: skip
    return _check(
        "connections",
        Mark.WRONG if left[of] < _OF_A_RUN else Mark.WARNING,
        found,
        target or f"raise {setting} (and restart), or put a PgBouncer in transaction mode before the server",
    )


def _writable(server: Server) -> Check:
    if server.is_standby:
        found = "it is a standby, which can be read only"
        return _check("writable", Mark.WRONG, found, "let the URL name the primary (target_session_attrs=read-write)")
    if server.is_on("default_transaction_read_only"):
        found = "default_transaction_read_only is on: nothing can be written"
        cure = server.cure("default_transaction_read_only", "off")
        return _check("writable", Mark.WRONG, found, f"set default_transaction_read_only = off; {cure}")
    return _check("writable", Mark.OK, "it is a primary, and transactions may write")


def _replication(server: Server) -> Check:
    names = server.settings["synchronous_standby_names"].value
    count = counted(server.standbys, "standby")
    if not names:
        lost = "; what was committed last can be lost in a fail-over, and fences stay right" if server.standbys else ""
        return _check("replication", Mark.OK, f"no synchronous standby, {count}{lost}")
    if not server.standbys or server.synchronous == 0:
        found = f"synchronous_standby_names is {names!r}, and none is there: every COMMIT waits until one is"
        return _check("replication", Mark.WRONG, found, server.cure("synchronous_standby_names", "''"))
    if server.synchronous is None:
        found = f"synchronous_standby_names is {names!r}, {count}; whether they are synchronous is not for this role"
        return _check("replication", Mark.UNKNOWN, found, f"grant pg_read_all_stats to {server.role};")
    return _check("replication", Mark.OK, f"{count}, {server.synchronous} synchronous")


def _vacuum(server: Server) -> Check:
    vacuum = server.vacuum
    if not (server.is_on("autovacuum") and server.is_on("track_counts")):
        name = "track_counts" if server.is_on("autovacuum") else "autovacuum"
        return _check("vacuum", Mark.WARNING, f"{name} is off: dead rows stay", server.cure(name, "on"))
    if vacuum.age > _OLD:
        found = f"the oldest rows are {vacuum.age:,} transactions old; at some 2,000,000,000 the server stops writing"
        mark = Mark.WRONG if vacuum.age > _VERY_OLD else Mark.WARNING
        return _check("vacuum", mark, found, "vacuum (freeze, verbose);")
    if vacuum.dead is not None and vacuum.dead[1] > max(_DEAD_ROWS, vacuum.dead[2]):
        table, dead, live = vacuum.dead
        found = f"{table} has {dead:,} dead rows beside {live:,}: it is not vacuumed, or an old transaction is open"
        return _check("vacuum", Mark.WARNING, found, f"vacuum (verbose) {table};")
    return _check("vacuum", Mark.OK, "autovacuum is on")


def _encoding(server: Server) -> Check:
    if server.encoding == "UTF8":
        return _check("encoding", Mark.OK, "UTF8")
    found = f"{server.encoding}: text that it does not have, in an error or a key, cannot be stored"
    return _check("encoding", Mark.WARNING, found, "move to a database with encoding 'UTF8'")


# ── the connection ───────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Link:
    """How a connection goes. `host`: None for a socket of this machine. `pooler`: what is in between: None, `session`,
    `transaction`, `statement`."""

    host: str | None
    is_local: bool
    encrypted: bool
    sslmode: str
    pooler: str | None


def of_link(link: Link) -> Iterator[Check]:
    if link.is_local:
        yield _check("encryption", Mark.OK, "the server is on this machine")
    elif not link.encrypted:
        found = f"the connection to {link.host} is in clear"
        yield _check("encryption", Mark.WARNING, found, "add sslmode=verify-full to the URL")
    elif link.sslmode != "verify-full":
        found = f"TLS, but sslmode={link.sslmode} does not verify that it is {link.host} who answers"
        yield _check("encryption", Mark.WARNING, found, "add sslmode=verify-full&sslrootcert=system to the URL")
    else:
        yield _check("encryption", Mark.OK, "TLS, and the server's name is verified")
    if link.pooler == "statement":
        found = "a pooler in statement mode, which refuses transactions"
        yield _check("pooler", Mark.WRONG, found, "pool_mode = transaction")
    elif link.pooler is None:
        yield _check("pooler", Mark.OK, "none: the connection is the server's own")
    else:
        yield _check("pooler", Mark.OK, f"one in {link.pooler} mode")


def of_clock(ahead: timedelta, within: timedelta) -> Check:
    """`ahead`: of this machine before the database's clock; `within`: how far that can be wrong."""
    apart = abs(ahead) - within
    found = f"this machine is {abs(ahead).total_seconds():.1f} s {'ahead of' if ahead > timedelta() else 'behind'} it"
    cure = "timedatectl set-ntp true   # or chrony, wherever the clock is wrong"
    if apart > LARGEST_SKEW:
        return _check("clock", Mark.WRONG, f"{found}: runs refuse to work beyond {in_words(LARGEST_SKEW)}", cure)
    if apart > _SKEW:
        return _check("clock", Mark.WARNING, f"{found}: ticks are found late, or waited for", cure)
    return _check("clock", Mark.OK, "the same as this machine's, within 2 s")


@dataclass(frozen=True)
class OpenTransaction:
    """One that keeps new rows from being due. `age` is None where the role may not see it."""

    who: str
    age: timedelta | None
    cure: str | None


def of_open_transaction(found: OpenTransaction | None) -> Check:
    if found is None:
        return _check("open transactions", Mark.OK, "none that stays")
    if found.age is None:
        return _check("open transactions", Mark.UNKNOWN, found.who, found.cure)
    mark = Mark.WRONG if found.age >= _HOUR else Mark.WARNING if found.age >= _MINUTES else Mark.OK
    held = ": until it ends, no row that is written after it began is due for NewRows" if mark is not Mark.OK else ""
    return _check("open transactions", mark, f"the oldest is {found.who}{held}", found.cure if held else None)


def of_prepared(most: int, held: Sequence[OpenTransaction]) -> Check:
    """`most`: max_prepared_transactions."""
    name = "prepared transactions"
    old = [each for each in held if each.age is not None and each.age >= _MINUTES]
    if not old:
        return _check(name, Mark.OK, f"{len(held)} of {most} that there may be" if most else "switched off")
    mark = Mark.WRONG if any(each.age is not None and each.age >= _HOUR for each in old) else Mark.WARNING
    found = f"{', '.join(each.who for each in old)}: forgotten, it seems; it holds its locks, and rows back, for ever"
    return _check(name, mark, found, "; ".join(each.cure for each in old if each.cure))
