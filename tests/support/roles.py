"""Logins of the four roles, on a database that has them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from uuid import uuid4

from psycopg import errors as pg

from gaffer_dagster.store import db, roles
from gaffer_dagster.store.operations import Operator
from tests.support import jobs, protocol

GROUPS = ("owner", "runner", "reader", "operator")


def apply(url: str) -> None:
    with protocol.session(url) as connection:
        roles.apply(connection, Operator("test", None))


def user_of(url: str) -> str:
    return str(db.parse_url(url)["user"])


@contextmanager
def login(url: str, member_of: str | None = None) -> Iterator[str]:
    """The URL of a role of its own, that is a member of `member_of` or was granted nothing."""
    name = f"{(member_of or 'stranger').removeprefix('gaffer_')}_{uuid4().hex[:12]}"
    jobs.execute(url, f"create role {name} login password 'secret'")
    try:
        if member_of is not None:
            jobs.execute(url, f"grant {member_of} to {name}")
        yield db.with_parts(url, user=name, password="secret")
    finally:
        jobs.execute(url, f"drop owned by {name} cascade")
        jobs.execute(url, f"drop role {name}")


@contextmanager
def groups(url: str) -> Iterator[None]:
    """At the end the four groups go, with gaffer's tables in this database; but where another database of the server
    has them, too, only those tables."""
    names = ", ".join(f"gaffer_{group}" for group in GROUPS)
    try:
        yield
    finally:
        jobs.execute(url, f"drop owned by {names} cascade")
        with suppress(pg.DependentObjectsStillExist):
            jobs.execute(url, f"drop role {names}")


@contextmanager
def logins(url: str) -> Iterator[dict[str, str]]:
    """The URL of a login for each of the four."""
    apply(url)
    with groups(url), ExitStack() as stack:
        yield {group: stack.enter_context(login(url, f"gaffer_{group}")) for group in GROUPS}
