"""What `gaffer watermark adopt` does to a database that was restored.

A dump that is restored into another cluster brings rows and watermarks that count in the old one's transaction numbers,
which mean nothing where numbers are given anew: what is written from now on could get numbers that were passed already.
So the old numbers are moved, those of rows and of watermarks alike, to the lowest ones that a cluster has, which are in
the past of any; whatever this cluster writes comes after them. All that must stay is on which side of each watermark a
row is. Rows between two watermarks' numbers can therefore share one, and a watermark keeps its key: for the watermarks
x < y on a table the rows before x get 3, those of x 4, those between 5, those of y 6, and those after it 7. (Giving all
of them one number, as `gaffer prepare` does, would lose which of them are done.) What is due among them then comes in
the order of the key.

Which rows are old is told by `xmin`, the transaction of this cluster that wrote a row's present version. A restore
makes triggers after it has loaded the rows, so what is not younger than the trigger that keeps `gaffer.job_lease` was
loaded, and not written here. Of what is younger, a number from before that trigger, or higher than `xmin`, was not
given here either; one that equals `xmin` was. What lies in between is an old row that was changed here, or a new one
that was: it is refused where a watermark tells the two apart. So is a watermark that is younger than the triggers: the
data was then loaded into tables that were there already, whose rows were numbered anew.

Where every old number is lower than any that this cluster can have given since (after pg_upgrade, which keeps the
numbers, or where this cluster has counted further than the old one), all of them stay as they are.

A backup of the same cluster that was recovered to an earlier time is consistent in itself: its rows, watermarks and
numbers belong together. Only fences can have been given since then that it does not know.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, cast

from psycopg import errors as pg
from psycopg import sql
from psycopg.rows import class_row
from psycopg.types.json import Jsonb

from gaffer_dagster.domain.due import NewRows, due_from_json, prepare_command
from gaffer_dagster.domain.watermark import Position, RowPosition
from gaffer_dagster.errors import DatabaseUnavailableError, ForeignWatermarkError, NotPreparedError, UnknownJobError
from gaffer_dagster.store import db, prepare
from gaffer_dagster.store.operations import Operator
from gaffer_dagster.store.prepare import XID_COLUMN, Source
from gaffer_dagster.store.tables import Table

FENCE_GAP = 1_000_000
_KINDS = ("new_rows", "pending_rows", "each_interval", "elapsed", "external")
# The lowest number that a transaction can have; initdb alone uses up hundreds.
_FIRST = 3


@dataclass(frozen=True)
class Move:
    """Of a watermark that another cluster counted: from where to where, and how many rows are due after it."""

    since: Position
    to: Position
    due: int


@dataclass(frozen=True)
class Adoption:
    """Of one job. `fences`: of its slots, as they are; `move` None: its watermark means the same here."""

    job: str
    fences: Sequence[int]
    move: Move | None


@dataclass(frozen=True)
class Plan:
    """`rewritten`: how many rows of which table get another number."""

    jobs: Sequence[Adoption]
    rewritten: Sequence[tuple[str, int]]


@dataclass(frozen=True)
class _Job:
    """`written`: the number of the transaction of this cluster that wrote its watermark's present version."""

    name: str
    due: dict[str, Any]
    stored: object
    cluster: str | None
    written: int
    fences: Sequence[int]

    @property
    def position(self) -> Position:
        """Empty: there is none, or one that nothing but other code can read."""
        return cast(Position, self.stored) if isinstance(self.stored, dict) else {}

    @property
    def counts(self) -> bool:
        """Its watermark is one in the numbers of a cluster."""
        return self.cluster is not None or "xid" in self.position


@dataclass(frozen=True)
class _Here:
    """This cluster, and the number of its transaction that made the triggers of gaffer's own tables."""

    cluster: str
    triggers: int


@dataclass(frozen=True)
class _Reader:
    """A job whose watermark another cluster counted."""

    job: _Job
    due: NewRows
    source: Source

    @property
    def position(self) -> RowPosition:
        return RowPosition(self.job.position["xid"], self.job.position["key"])


@dataclass(frozen=True)
class _Read:
    """A table that such jobs read. `own`: the jobs that read it and have a watermark that this cluster counted."""

    table: Table
    readers: list[_Reader]
    own: list[str]

    @property
    def edges(self) -> list[int]:
        return sorted({int(reader.position.xid) for reader in self.readers})

    def number(self, xid: str) -> str:
        """What the number of a watermark is changed to; see `_renumber`."""
        return str(_FIRST + sum((edge < int(xid)) + (edge <= int(xid)) for edge in self.edges))


@dataclass(frozen=True)
class _Weighed:
    """`old`: how many rows have to get another number. `due`: how many rows each reader has left."""

    read: _Read
    old: int
    due: Sequence[int]

    def move(self, reader: _Reader, due: int) -> Move:
        position = reader.job.position
        return Move(position, {**position, "xid": self.read.number(position["xid"])} if self.old else position, due)


def plan(connection: db.Connection, names: Collection[str]) -> Plan:
    """What `adopt` would do to these jobs; none: to all. Changes nothing.

    Raises `ForeignWatermarkError` for what cannot be known, and `UnknownJobError`.
    """
    return _plan(connection, _here(connection), names)[0]


def adopt(connection: db.Connection, names: Collection[str], operator: Operator) -> Plan:
    """Takes these jobs over (none: all) into this cluster, in one transaction: fences, watermarks, and the numbers of
    the rows that those are in. Nobody can write these tables meanwhile.

    Raises `JobHeldError` while a run is at work, `DatabaseUnavailableError` where a table is not to be had in five
    seconds, and what `plan` raises.
    """
    try:
        with connection.transaction(), db.refusals():
            connection.execute("set transaction isolation level read committed")  # to see what came before the locks
            connection.execute("set local lock_timeout = '5s'")
            here = _here(connection)
            for read in _choose(connection, here, names)[1]:
                connection.execute(sql.SQL("lock table {} in share row exclusive mode").format(read.table.identifier))
            planned, weighed = _plan(connection, here, names)
            for job in planned.jobs:
                since, to = (None, None) if job.move is None else (Jsonb(job.move.since), Jsonb(job.move.to))
                connection.execute(
                    "select gaffer.adopt(%s, %s, %s, %s, %s)", [job.job, since, to, operator.by, operator.reason]
                )
            for each in weighed:
                if each.old:
                    _renumber(connection, here, each.read)
            return planned
    except pg.LockNotAvailable:
        raise DatabaseUnavailableError(
            "nothing was changed: a table or a lease was not to be had in 5 s, for somebody writes it; stop the "
            "writers and the runs, and try again"
        ) from None


def _plan(connection: db.Connection, here: _Here, names: Collection[str]) -> tuple[Plan, list[_Weighed]]:
    chosen, reads = _choose(connection, here, names)
    weighed = [_weigh(connection, here, read) for read in reads]
    moves = {
        reader.job.name: each.move(reader, due)
        for each in weighed
        for reader, due in zip(each.read.readers, each.due, strict=True)
    }
    adoptions = [Adoption(job.name, job.fences, moves.get(job.name)) for job in chosen]
    return Plan(adoptions, [(str(each.read.table), each.old) for each in weighed if each.old]), weighed


def _here(connection: db.Connection) -> _Here:
    row = connection.execute(
        """
        select gaffer.cluster(), s.next - ((s.next - t.xmin::text::bigint) & 4294967295)
          from pg_catalog.pg_trigger t,
               (select pg_catalog.pg_snapshot_xmax(pg_catalog.pg_current_snapshot())::text::bigint as next) as s
         where t.tgrelid = 'gaffer.job_lease'::pg_catalog.regclass::oid and t.tgname = 'keep_lease'
        """
    ).fetchone()
    assert row is not None  # noqa: S101 — a migration made it
    return _Here(*row)


def _jobs(connection: db.Connection) -> list[_Job]:
    with connection.cursor(row_factory=class_row(_Job)) as cursor:
        return cursor.execute(
            """
            select j.name, j.spec -> 'due' as due, w.position as stored, w.cluster,
                   coalesce(s.next - ((s.next - w.xmin::text::bigint) & 4294967295), s.next) as written,
                   array(select fence from gaffer.job_lease l where l.job = j.name order by slot) as fences
              from gaffer.job j left join gaffer.job_watermark w on w.job = j.name,
                   (select pg_catalog.pg_snapshot_xmax(pg_catalog.pg_current_snapshot())::text::bigint as next) as s
             order by j.name
            """
        ).fetchall()


def _choose(connection: db.Connection, here: _Here, names: Collection[str]) -> tuple[list[_Job], list[_Read]]:
    """The jobs, and by name the tables that their watermarks of another cluster are in."""
    known = _jobs(connection)
    unknown = sorted(set(names) - {job.name for job in known})
    if unknown:
        raise UnknownJobError(f"no job {unknown[0]!r} is known to this database; see: gaffer status")
    chosen = [job for job in known if not names or job.name in names]
    strange = [job.name for job in chosen if job.due.get("kind") not in _KINDS]
    if strange:
        raise ForeignWatermarkError(
            f"what jobs are due for is not known to this version of gaffer_dagster: {', '.join(strange)}; upgrade it, "
            "or name the jobs that are to be adopted"
        )
    found: dict[str, _Read] = {}
    for job in chosen:
        if job.counts and job.cluster != here.cluster:
            reader = _reader(connection, here, job)
            table = reader.source.table
            own = [each.name for each in known if each.counts and each.cluster == here.cluster and _is_in(each, table)]
            found.setdefault(str(table), _Read(table, [], own)).readers.append(reader)
    for name, read in found.items():
        others = set(prepare.foreign_jobs(connection, read.table)) - {reader.job.name for reader in read.readers}
        if others:
            raise ForeignWatermarkError(
                f"jobs have watermarks in table {name} as well, and can only be adopted together: "
                f"{', '.join(sorted(others))}; name them too"
            )
        clusters = sorted({str(reader.job.cluster) for reader in read.readers})
        if len(clusters) > 1:
            raise ForeignWatermarkError(
                f"watermarks in table {name} were counted by more than one other cluster ({', '.join(clusters)}), and "
                f"which rows they are behind cannot be known; {_anew(read)}"
            )
    return chosen, [found[name] for name in sorted(found)]


def _reader(connection: db.Connection, here: _Here, job: _Job) -> _Reader:
    due = due_from_json(job.due)
    if not isinstance(due, NewRows) or due.cursor is not None:
        raise _strange_position(job)
    table, key_type = prepare.checked(connection, due.table, due.key)
    source = Source(table, due.key, key_type, "new")
    if job.position.get("of") != source.of:
        raise _strange_position(job)
    if XID_COLUMN not in table.columns:
        raise NotPreparedError(
            f"job {job.name!r} has read table {table} by its column {XID_COLUMN}, which is not there: restore the "
            f"table with it, or say where the job goes on: gaffer watermark set {job.name} beginning"
        )
    made = connection.execute(
        """
        select s.next - ((s.next - t.xmin::text::bigint) & 4294967295)
          from pg_catalog.pg_trigger t,
               (select pg_catalog.pg_snapshot_xmax(pg_catalog.pg_current_snapshot())::text::bigint as next) as s
         where t.tgrelid = %s and t.tgname = 'gaffer_stamp_xid'
        """,
        [table.oid],
    ).fetchone()
    if job.written > here.triggers or (made is not None and job.written > made[0]):
        raise ForeignWatermarkError(
            f"the watermark of job {job.name!r} is younger here than the triggers: it was changed since the restore, "
            f"or data was loaded into tables that were there already, whose trigger has numbered the rows of {table} "
            "anew. What is done cannot be known; restore the whole database at once, schema and data, or let the job "
            f"begin anew: gaffer watermark set {job.name} beginning, then: "
            + prepare_command(due.table, due.key, "--apply")
        )
    return _Reader(job, due, source)


def _strange_position(job: _Job) -> ForeignWatermarkError:
    return ForeignWatermarkError(
        f"the watermark of job {job.name!r} ({job.stored}) counts in transactions of cluster {job.cluster}, and only "
        "the code that wrote it knows of which rows; say where it goes on (gaffer watermark set, or that code), or "
        "leave it out: name the jobs that are to be adopted"
    )


def _is_in(job: _Job, table: Table) -> bool:
    return job.position.get("of", "").startswith(f"{table}(")


def _anew(read: _Read) -> str:
    names = ", ".join(reader.job.name for reader in read.readers)
    return (
        f"restore anew, and adopt before anybody writes; or let jobs begin anew: {names} (gaffer watermark set JOB "
        f"beginning, then: {prepare_command(read.readers[0].due.table, read.readers[0].due.key, '--apply')})"
    )


def _weigh(connection: db.Connection, here: _Here, read: _Read) -> _Weighed:
    """Raises `ForeignWatermarkError` where it cannot be known of a row on which side of a watermark it is."""
    is_old, number = _is_old(here, read.table), _number(read.table)
    furthest = read.edges[-1]
    unclear = sql.SQL("not {} and {number} < {written} and {number} <= {furthest}").format(
        is_old, number=number, written=_written(read.table), furthest=sql.Literal(furthest)
    )
    counted = [
        is_old,
        sql.SQL("{} and {} > {}").format(is_old, number, sql.Literal(here.triggers)),
        unclear,
        *(_is_due(reader, is_old) for reader in read.readers),
    ]
    row = connection.execute(
        sql.SQL(
            "select (pg_catalog.array_agg({key}::text order by {key}) filter (where {}))[:100], {} from {}, {}"
        ).format(
            unclear,
            sql.SQL(", ").join(sql.SQL("pg_catalog.count(*) filter (where {})").format(each) for each in counted),
            read.table.identifier,
            _NEXT,
            key=sql.Identifier(read.table.schema, read.table.name, read.readers[0].due.key),
        )
    ).fetchone()
    assert row is not None  # noqa: S101 — one row by construction
    examples, old, ahead, unclear_rows, *due = row
    if not ahead and furthest <= here.triggers:
        return _Weighed(read, 0, due)
    if unclear_rows:
        number_anew = sql.SQL(
            "alter table {table} disable trigger gaffer_stamp_xid; update {table} set {} ="
            " pg_catalog.pg_current_xact_id() where {} in ({});"
            " alter table {table} enable always trigger gaffer_stamp_xid"
        ).format(
            sql.Identifier(XID_COLUMN),
            sql.Identifier(read.readers[0].due.key),
            sql.SQL(", ").join(map(sql.Literal, examples)),
            table=read.table.identifier,
        )
        raise ForeignWatermarkError(
            f"{unclear_rows:,} rows of table {read.table} were changed here since the restore, and it cannot be known "
            "of them whether they were restored. If all of them are new, number them so, in one transaction: "
            f"{number_anew.as_string(connection)} (with all their keys; these are the first {len(examples)}). "
            f"Else {_anew(read)}"
        )
    if read.own:
        raise ForeignWatermarkError(
            f"jobs have worked on table {read.table} since the restore: {', '.join(read.own)}; {_anew(read)}"
        )
    return _Weighed(read, old, due)


def _renumber(connection: db.Connection, here: _Here, read: _Read) -> None:
    """Moves the old numbers to the lowest that there are, so that what was before, at or after the number of each
    watermark stays so. No trigger runs: these are no changes of the rows."""
    name = read.table.identifier
    triggers = connection.execute(
        "select tgname, tgenabled from pg_catalog.pg_trigger"
        " where tgrelid = %s and not tgisinternal and tgenabled in ('O', 'A')",
        [read.table.oid],
    ).fetchall()
    for trigger, _ in triggers:
        connection.execute(sql.SQL("alter table {} disable trigger {}").format(name, sql.Identifier(trigger)))
    connection.execute(
        sql.SQL(
            "update {} set {} = ({} + (select count(*) filter (where edge < {number})"
            " + count(*) filter (where edge <= {number}) from pg_catalog.unnest({}) as edge))::text::xid8"
            " from {} where {}"
        ).format(
            name,
            sql.Identifier(XID_COLUMN),
            sql.Literal(_FIRST),
            sql.Literal(read.edges),
            _NEXT,
            _is_old(here, read.table),
            number=_number(read.table),
        )
    )
    for trigger, enabled in triggers:
        always = sql.SQL("always" if enabled == "A" else "")
        connection.execute(sql.SQL("alter table {} enable {} trigger {}").format(name, always, sql.Identifier(trigger)))


def _is_due(reader: _Reader, is_old: sql.Composable) -> sql.Composed:
    table, position = reader.source.table, reader.position
    where = reader.due.where
    return sql.SQL("(not {} or ({}, {}) > ({}, {}::{})) {}").format(
        is_old,
        _number(table),
        sql.Identifier(table.schema, table.name, reader.source.key),
        sql.Literal(int(position.xid)),
        sql.Literal(position.key),
        reader.source.key_type,
        sql.SQL("") if where is None else sql.SQL("and (\n{}\n)").format(sql.SQL(where)),
    )


def _is_old(here: _Here, table: Table) -> sql.Composed:
    """The number of a row was surely not given by this cluster."""
    return sql.SQL("({written} <= {triggers} or {number} <= {triggers} or {number} > {written})").format(
        written=_written(table), number=_number(table), triggers=sql.Literal(here.triggers)
    )


_NEXT = sql.SQL(
    "(select pg_catalog.pg_snapshot_xmax(pg_catalog.pg_current_snapshot())::text::bigint as gaffer_next) as gaffer_s"
)


def _written(table: Table) -> sql.Composed:
    """The number of the transaction that wrote a row's present version. The row keeps 32 bits of it."""
    return sql.SQL("(gaffer_s.gaffer_next - ((gaffer_s.gaffer_next - {}::text::bigint) & 4294967295))").format(
        sql.Identifier(table.schema, table.name, "xmin")
    )


def _number(table: Table) -> sql.Composed:
    return sql.SQL("{}::text::bigint").format(sql.Identifier(table.schema, table.name, XID_COLUMN))
