"""Broken protocols, made from the product's own text, to show that the checks of the chaos tests can see.

`commit_batch` refuses a stale batch three times over: by the fence, by the watermark that must be where the batch
found it, and by the run's row that must be running under the lease. A variant that breaks one of them would be saved
by the others; so each variant here is made from "bare", which has nothing but the fence, and which must itself pass.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from psycopg import sql

from gaffer_dagster.domain.lease import Lease
from gaffer_dagster.domain.watermark import RowPosition
from gaffer_dagster.engine.holding import Holding
from gaffer_dagster.engine.run import Run
from gaffer_dagster.engine.steps import Station
from gaffer_dagster.store import db, migrate, new_rows
from tests.support import jobs

CHECKED = "checked"
"""The place between a variant's check and what follows it, where the two are messages of their own."""

_CHECK = "where job = p_job and slot = p_slot and fence = p_fence and lease_id = p_lease_id for no key update;"
_BARE = {
    "where job = p_job and position is not distinct from p_from;": "where job = p_job;",
    "where id = p_run_id and lease_id = p_lease_id and outcome = 'running'": "where id = p_run_id",
}
_TO_THE_CHECK = "    perform 1 from gaffer.job_lease"
_AFTER_THE_CHECK = "    v_now := gaffer.clock();"


@dataclass(frozen=True)
class Variant:
    """`replaced`: in the text of commit_batch; `others`: in those of other functions. `check_at`: where the check is
    done as a message of its own, and `check`: what replaces it there. `page`: how the rows are read."""

    replaced: Mapping[str, str] = field(default_factory=dict[str, str])
    others: Mapping[str, Mapping[str, str]] = field(default_factory=dict[str, Mapping[str, str]])
    check_at: Station | None = None
    check: str = _CHECK
    page: Callable[..., Any] | None = None
    believes_errors: bool = False
    autocommits: bool = False


def _page_by_id(
    connection: db.Connection,
    source: Any,
    _where: Any,
    position: RowPosition | None,
    _horizon: str | None,
    limit: int,
    *,
    below: str | None = None,
) -> new_rows.Rows | None:
    """The cursor that everybody writes first."""
    after = 0 if position is None else int(position.key)
    found = connection.execute(
        sql.SQL(
            "select id, gaffer_xid::text from {} where id > %s and (%s::xid8 is null or gaffer_xid < %s::xid8)"
            " order by id limit %s"
        ).format(source.table.identifier),
        [after, below, below, limit],
    ).fetchall()
    return (
        new_rows.Rows([{"id": row[0]} for row in found], RowPosition(found[-1][1], str(found[-1][0])), len(found))
        if found
        else None
    )


def _page_by_id_below_the_horizon(*args: Any) -> new_rows.Rows | None:
    return _page_by_id(*args, below=args[4])


VARIANTS: dict[str, Variant] = {
    "the product": Variant(),
    # Nothing but the fence; passes.
    "bare": Variant(_BARE),
    "time-only lease": Variant(
        {**_BARE, _CHECK: "where job = p_job and slot = p_slot and lease_until > gaffer.clock() for no key update;"}
    ),
    "number-only fence": Variant(
        {**_BARE, _CHECK: "where job = p_job and slot = p_slot and fence = p_fence for no key update;"}
    ),
    # The check as a message of its own, with a lock; passes, since the row stays locked until the end.
    "locking check, then COMMIT": Variant(_BARE, check_at=Station.APPLIED),
    "locking check, then the writes": Variant(_BARE, check_at=Station.DUE),
    "plain SELECT, then COMMIT": Variant(
        _BARE, check_at=Station.APPLIED, check=_CHECK.replace(" for no key update", "")
    ),
    "plain SELECT, then the writes": Variant(
        _BARE, check_at=Station.DUE, check=_CHECK.replace(" for no key update", "")
    ),
    "key share, then the writes": Variant(
        _BARE, check_at=Station.DUE, check=_CHECK.replace("no key update", "key share")
    ),
    # The lock is gone when the transaction of the check is; each write is one of its own. Only without an engine.
    "locking check, then autocommit": Variant(_BARE, check_at=Station.DUE, autocommits=True),
    "no check": Variant({**_BARE, _CHECK: "where job = p_job and slot = p_slot for no key update;"}),
    # A COMMIT whose answer is lost is taken for one that failed.
    "error means not committed": Variant(_BARE, believes_errors=True),
    "a busy wake-up notes nothing": Variant(
        others={
            "acquire": {
                "set wanted_at = greatest(gaffer.clock(), wanted_at + interval '1 microsecond')": "set slots = slots"
            }
        }
    ),
    "the end looks at no wish": Variant(
        others={
            "end_run": {
                "and v_job.wanted_at is distinct from p_wanted_at then": "and false then",
                "case when wanted_at is distinct from p_wanted_at then v_now": "case when false then v_now",
            }
        }
    ),
    "id > watermark": Variant(page=_page_by_id),
    "id > watermark, below the horizon": Variant(page=_page_by_id_below_the_horizon),
    # A late renewal makes whoever sends it the holder again.
    "renewal that takes the lease back": Variant(
        _BARE,
        others={
            "renew": {
                "set lease_until": "set fence = p_fence, lease_id = p_lease_id, lease_until",
                "where job = p_job and slot = p_slot and fence = p_fence and lease_id = p_lease_id;\n": (
                    "where job = p_job and slot = p_slot;\n"
                ),
            },
            "refuse_smaller_fence": {"if new.fence < old.fence\n": "if false and new.fence < old.fence\n"},
        },
    ),
    # It tells each holder that he has lost the lease.
    "renewal that matches nothing": Variant(
        others={
            "renew": {
                "fence = p_fence and lease_id = p_lease_id;\n    return": (
                    "fence = p_fence and lease_id = p_lease_id and false;\n    return"
                ),
            },
        },
    ),
    # Whoever finds the job busy takes the lease away from the holder, and does not have it.
    "a busy wake-up moves the fence": Variant(
        others={
            "acquire": {
                "            update gaffer.job\n               set wanted_at": (
                    "            update gaffer.job_lease set fence = fence + 1 where job = p_job and slot = p_slot;\n"
                    "            update gaffer.job\n               set wanted_at"
                ),
            },
        },
    ),
    # Where the database does not wait for its disk, a batch does not, either.
    "durability is not raised": Variant(
        others={"raise_durability": {"in ('off', 'local')": "in ('none of these')"}},
    ),
}


def install(url: str, name: str) -> None:
    """Replaces the protocol of this database by the variant's."""
    variant = VARIANTS[name]
    text = _function("commit_batch")
    if variant.check_at is not None:
        start, rest = _split(text, _TO_THE_CHECK)
        check, rest = _split(rest, _AFTER_THE_CHECK)
        alone = _replace(start + check, {_CHECK: variant.check, ".commit_batch(": ".check_batch("})
        _define(url, alone + "    return null;\nend $$;")
        text = start + rest
    _define(url, _replace(text, variant.replaced))
    for function, replaced in variant.others.items():
        replace(url, function, replaced)


def replace(url: str, function: str, replaced: Mapping[str, str]) -> None:
    """Replaces texts, each of which is there once, in one function of the protocol of this database."""
    _define(url, _replace(_function(function), replaced))


def patch(name: str) -> None:
    """Replaces what the variant does differently in this process."""
    variant = VARIANTS[name]
    if variant.page is not None:
        new_rows.page = variant.page
    if variant.believes_errors:
        Holding.supersede = _believe_the_error  # type: ignore[method-assign]


def observe(name: str, run: Run, station: Station, at: Callable[[str], None]) -> None:
    """Does the variant's check where it is a message of its own."""
    if station is VARIANTS[name].check_at:
        connection = run._holding.connection()
        batch = connection.execute("select current_setting('gaffer.batch')").fetchone()
        check(connection, run._holding.lease, batch[0] if batch else None)
        at(CHECKED)


def check(connection: db.Connection, lease: Lease, batch: UUID | str | None) -> None:
    """What a variant asks before its writes, or behind them, in the transaction of this batch."""
    with db.refusals():
        connection.execute(
            "select gaffer.check_batch(%s, %s, %s, %s, %s, %s, null, null, null, 0, '60 seconds')",
            [lease.job, lease.slot, lease.fence, lease.lease_id, lease.run_id, batch],
        )


def _define(url: str, text: str) -> None:
    with jobs.connect(url) as connection:
        connection.execute(text.encode())  # without parameters: it has % of its own


def _function(name: str) -> str:
    """The newest definition of a function of the protocol, to replace it by."""
    found = [
        match[0]
        for migration in migrate.migrations()
        for match in re.finditer(
            rf"create (or replace )?function gaffer\.{name}\(.*?\n(end )?\$\$;", migration.text, re.DOTALL
        )
    ]
    return found[-1].replace("create function", "create or replace function", 1)


def _replace(text: str, replaced: Mapping[str, str]) -> str:
    for old, new in replaced.items():
        assert text.count(old) == 1, f"the migrations do not have this text once any more: {old}"
        text = text.replace(old, new)
    return text


def _split(text: str, at: str) -> tuple[str, str]:
    assert text.count(at) == 1, f"the migrations do not have this text once any more: {at}"
    where = text.index(at)
    return text[:where], text[where:]


def _believe_the_error(holding: Holding) -> int:
    holding.drop()
    return 0
