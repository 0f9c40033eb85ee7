"""The rules of `gaffer doctor`, for what no server of the tests is."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from gaffer_dagster.domain import health
from gaffer_dagster.domain.health import Check, Link, Mark, OpenTransaction, Server, Setting, Vacuum

OFF = ("default_transaction_read_only",)
ON = ("autovacuum", "data_checksums", "fsync", "full_page_writes", "synchronous_commit", "track_counts")
NONE = ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout", "max_prepared_transactions")
SETTINGS = {
    **{name: Setting("off", "default") for name in OFF},
    **{name: Setting("on", "default") for name in ON},
    **{name: Setting("0", "default") for name in NONE},
    "max_connections": Setting("100", "default"),
    "superuser_reserved_connections": Setting("3", "default"),
    "synchronous_standby_names": Setting("", "default"),
}
WELL = Server(
    version=160004, role="app", database="shop", encoding="UTF8", is_superuser=False, owns_schema=False,
    may_write_tables=False,
    schemas=["public"], settings=SETTINGS, is_standby=False, connections=10, of_role=2, of_database=5, role_limit=-1,
    database_limit=-1, standbys=0, synchronous=0, vacuum=Vacuum(1000, None),
)  # fmt: skip


def wrong(server: Server) -> list[Check]:
    return [check for check in health.of_server(server) if check.mark is not Mark.OK]


def given(**settings: str) -> Server:
    return replace(WELL, settings={**SETTINGS, **{name: Setting(value, "user") for name, value in settings.items()}})


def test_a_server_that_is_well_is_called_so() -> None:
    assert wrong(WELL) == []
    assert len(list(health.of_server(WELL))) > 8


@pytest.mark.parametrize(
    ("server", "name", "mark", "said", "cure"),
    [
        (replace(WELL, version=140015), "version", Mark.WRONG, "14.15", "15 or later"),
        (replace(WELL, version=190001), "version", Mark.WARNING, "19.1", "pip install"),
        (replace(WELL, is_standby=True), "writable", Mark.WRONG, "standby", "primary"),
        (replace(WELL, schemas=["gaffer", "public"]), "search path", Mark.WARNING, "our tables", "search_path"),
        (replace(WELL, encoding="LATIN1"), "encoding", Mark.WARNING, "LATIN1", "UTF8"),
        (replace(WELL, connections=96), "connections", Mark.WRONG, "96 of 97", "max_connections"),
        (replace(WELL, connections=94), "connections", Mark.WARNING, "94 of 97", "max_connections"),
        (replace(WELL, role_limit=3), "connections", Mark.WRONG, "2 of 3", "alter role app connection limit -1;"),
        (replace(WELL, database_limit=8), "connections", Mark.WARNING, "5 of 8", "alter database shop"),
        (replace(WELL, vacuum=Vacuum(1_100_000_000, None)), "vacuum", Mark.WARNING, "1,100,000,000", "freeze"),
        (replace(WELL, vacuum=Vacuum(1_900_000_000, None)), "vacuum", Mark.WRONG, "stops writing", "freeze"),
        (
            replace(WELL, vacuum=Vacuum(1, ("gaffer.job_lease", 200_000, 10))),
            "vacuum", Mark.WARNING, "200,000 dead", "vacuum (verbose) gaffer.job_lease;",
        ),
        (given(synchronous_commit="off"), "synchronous commit", Mark.WARNING, "is off", "alter role app set"),
        (given(statement_timeout="4999"), "timeouts", Mark.WARNING, "statement_timeout 4.999 s", "alter role app"),
        (given(idle_session_timeout="30000"), "timeouts", Mark.WARNING, "idle_session_timeout 30 s", "alter role"),
        (given(synchronous_standby_names="a"), "replication", Mark.WRONG, "every COMMIT waits", "alter"),
        (
            replace(given(synchronous_standby_names="a"), standbys=2, synchronous=None),
            "replication", Mark.UNKNOWN, "2 standbys", "grant pg_read_all_stats to app;",
        ),
    ],
)  # fmt: skip
def test_a_server_that_is_not_well_is_told_how_to_be(
    server: Server, name: str, mark: Mark, said: str, cure: str
) -> None:
    (found,) = wrong(server)
    assert (found.name, found.mark) == (name, mark), found
    assert said in found.found
    assert cure in (found.cure or "")


@pytest.mark.parametrize(
    "server",
    [
        given(statement_timeout="5000", idle_session_timeout="60000"),
        replace(given(synchronous_standby_names="a"), standbys=1, synchronous=1),
        replace(WELL, standbys=1),
        replace(WELL, connections=92),
        replace(WELL, is_superuser=True, owns_schema=True),
        replace(WELL, vacuum=Vacuum(1_000_000_000, ("gaffer.job_lease", 100_000, 10))),
    ],
)
def test_what_is_within_bounds_is_only_shown(server: Server) -> None:
    assert wrong(server) == []


@pytest.mark.parametrize(
    ("link", "marks"),
    [
        (Link("/run", True, False, "prefer", None), {}),
        (Link("db", False, True, "verify-full", "session"), {}),
        (Link("db", False, True, "verify-full", "transaction"), {}),
        (Link("db", False, False, "disable", None), {"encryption": Mark.WARNING}),
        (Link("db", False, True, "require", None), {"encryption": Mark.WARNING}),
        (Link("/run", True, False, "prefer", "statement"), {"pooler": Mark.WRONG}),
    ],
)
def test_what_is_between(link: Link, marks: dict[str, Mark]) -> None:
    assert {check.name: check.mark for check in health.of_link(link) if check.mark is not Mark.OK} == marks


@pytest.mark.parametrize(
    ("seconds", "mark"),
    [(0, Mark.OK), (2, Mark.OK), (-2, Mark.OK), (2.2, Mark.WARNING), (-2.2, Mark.WARNING), (300, Mark.WARNING),
     (300.2, Mark.WRONG), (-300.2, Mark.WRONG)],
)  # fmt: skip
def test_clocks_that_differ(seconds: float, mark: Mark) -> None:
    assert health.of_clock(timedelta(seconds=seconds), timedelta(seconds=0.1)).mark is mark


@pytest.mark.parametrize(
    ("age", "mark"),
    [(0, Mark.OK), (299, Mark.OK), (300, Mark.WARNING), (3599, Mark.WARNING), (3600, Mark.WRONG), (None, Mark.UNKNOWN)],
)
def test_a_transaction_that_stays_open(age: int | None, mark: Mark) -> None:
    held = OpenTransaction("backend 7", None if age is None else timedelta(seconds=age), "end it")
    found = health.of_open_transaction(held)
    assert (found.mark, found.cure) == (mark, None if mark is Mark.OK else "end it")
    if age is not None:
        assert health.of_prepared(5, [held]).mark is mark
    assert "backend 7" in found.found


def test_the_page_is_as_bad_as_the_worst_on_it() -> None:
    def page(*marks: Mark) -> Any:
        return health.worst([Check("part", "name", mark, "found") for mark in marks])

    assert page() is page(Mark.OK, Mark.WARNING, Mark.SKIPPED) is Mark.OK
    assert page(Mark.OK, Mark.UNKNOWN, Mark.WARNING) is Mark.UNKNOWN
    assert page(Mark.UNKNOWN, Mark.WRONG) is Mark.WRONG
