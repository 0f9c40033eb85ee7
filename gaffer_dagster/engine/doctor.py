"""What `gaffer doctor` looks at beside Dagster. Each question is asked by itself: what fails is said, and the others
are asked all the same."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import Any, TypeVar

from gaffer_dagster.domain import health, notice, zones
from gaffer_dagster.domain.alert import Kind, Severity
from gaffer_dagster.domain.amount import few
from gaffer_dagster.domain.due import NewRows, PendingRows, due_from_json
from gaffer_dagster.domain.health import Check, Mark
from gaffer_dagster.domain.incident import Finding
from gaffer_dagster.domain.job import JobRecord
from gaffer_dagster.domain.spec import JobSpec
from gaffer_dagster.engine import web
from gaffer_dagster.engine.log import wrap
from gaffer_dagster.engine.receivers import LOG, Apprise, Receiver, Unusable, Webhook, receivers_from
from gaffer_dagster.engine.registry import Definition, registration_of
from gaffer_dagster.engine.sources import source_of
from gaffer_dagster.engine.watch import HEARTBEAT, examine
from gaffer_dagster.errors import (
    BadInputError,
    BadSpecError,
    DatabaseUnavailableError,
    GafferError,
    MissingRightsError,
    NotDeliveredError,
    SchemaAheadError,
    SchemaBehindError,
)
from gaffer_dagster.store import alerts, db, deliveries, doctor, horizon, jobs, migrate, protect
from gaffer_dagster.store import zones as zone_store

T = TypeVar("T")
UNREACHABLE = "reachable"
"""The name of the check that is wrong where there is no database to be had."""
_YEARS = timedelta(days=3 * 365)
_LONG = timedelta(days=7)
_LIMIT = timedelta(seconds=5)


def of_database(url: str, definitions: Sequence[Definition] = ()) -> Iterator[Check]:
    """The server, the jobs that it knows, and their tables. `definitions`: those that the code at hand has."""
    found = list(_of_database(url, definitions))
    paths = [each.cure for each in found if each.part == "tables" and " set search_path = " in (each.cure or "")]
    for each in found:
        if paths and (each.part, each.name) == ("database", "search path"):
            told = f"{each.found}; and tables of jobs are not found by it"
            yield replace(each, mark=Mark.WRONG, found=told, cure=paths[0])
        else:
            yield each


def _of_database(url: str, definitions: Sequence[Definition]) -> Iterator[Check]:
    try:
        with db.connect(url, application_name="gaffer:doctor"):
            pass
    except GafferError as error:
        is_away = isinstance(error, DatabaseUnavailableError)
        yield Check("database", UNREACHABLE if is_away else "address", Mark.WRONG, *health.told(error))
        for part in ("jobs", "tables"):
            yield Check(part, "all", Mark.SKIPPED, "there is no database to ask")
        return
    yield Check("database", UNREACHABLE, Mark.OK, db.describe(url))
    yield from _ask(url, "database", "server", lambda connection: health.of_server(doctor.server(connection)))
    yield from _ask(url, "database", "connection", lambda connection: health.of_link(doctor.link(connection, url)))
    yield from _ask(url, "database", "open transactions", _transactions)
    schema = list(_ask(url, "database", "schema", _schema))
    yield from schema
    if health.worst(schema) is not Mark.OK:
        for part in ("jobs", "tables"):
            yield Check(part, "all", Mark.SKIPPED, "not before the tables of gaffer_dagster can be read")
        return
    yield from _ask(url, "database", "rights", _rights)
    yield from _ask(url, "database", "clock", _clock)
    yield from _ask(url, "database", "tz data", _zones)
    yield from _ask(url, "jobs", "known", lambda connection: _known(connection, definitions))
    yield from _ask(url, "jobs", "incidents", _incidents)
    yield from _ask(url, "tables", "sources", _sources)
    yield from _ask(url, "tables", "guards", _guards)
    yield from _ask(url, "tables", "advisory locks", _advisory_locks)


def _ask(url: str, part: str, name: str, question: Callable[[db.Connection], Iterable[Check]]) -> Iterator[Check]:
    """On a connection of its own, since a question that fails may leave it in any state."""
    try:
        with db.connect(url, application_name="gaffer:doctor") as connection:
            try:
                yield from question(connection)
            except Exception as error:
                yield _failed(connection, part, name, error)
    except GafferError as error:
        yield Check(part, name, Mark.UNKNOWN, *health.told(error))


def _failed(connection: db.Connection, part: str, name: str, error: Exception) -> Check:
    if db.sqlstate(error) == "42501":
        db.roll_back(connection)
        found = f"this role may not look: {db.primary_message(error)}"
        return Check(part, name, Mark.UNKNOWN, found, doctor.right_to_look(connection))
    if db.was_cut(error):
        return Check(part, name, Mark.UNKNOWN, "no answer within 10 s: somebody has locked what is to be looked at")
    return Check(part, name, Mark.UNKNOWN, str(error) if isinstance(error, GafferError) else db.primary_message(error))


def _refused(part: str, name: str, error: GafferError) -> Check:
    """What a run would be refused with, too."""
    found, _, cure = str(error).rpartition("run: ")
    if not cure.startswith("gaffer "):
        return Check(part, name, Mark.WRONG, *health.told(error))
    return Check(part, name, Mark.WRONG, re.sub(r"[;,.]?\s*$", "", found), cure)


# ── the database ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _transactions(connection: db.Connection) -> Iterator[Check]:
    most = int(doctor.server(connection).settings["max_prepared_transactions"].value)
    yield health.of_open_transaction(doctor.open_transaction(connection))
    yield health.of_prepared(most, doctor.prepared(connection))


def _schema(connection: db.Connection) -> Iterator[Check]:
    try:
        migrate.verify(connection)
        migrate.pending(connection)
    except SchemaBehindError as error:
        yield Check("database", "schema", Mark.WRONG, str(error).rpartition("; ")[0], "gaffer migrate")
    except SchemaAheadError as error:
        cure = "pip install --upgrade gaffer_dagster"
        yield Check("database", "schema", Mark.WRONG, str(error).rpartition("; ")[0], cure)
    except MissingRightsError as error:
        cure = " ".join(doctor.missing_rights(connection))
        yield Check("database", "schema", Mark.WRONG, str(error).partition("; ")[0], cure)
    except GafferError as error:
        found, cure = health.told(error)
        yield Check("database", "schema", Mark.WRONG, found, cure and cure.removeprefix("run: "))
    else:
        newest = migrate.migrations()[-1]
        yield Check("database", "schema", Mark.OK, f"at migration {newest.number} ({newest.name}), as needed")


def _rights(connection: db.Connection) -> Iterator[Check]:
    missing = doctor.missing_rights(connection)
    more = doctor.more_than_a_runner(connection)
    if missing and (group := doctor.looks_only(connection)) is not None:
        yield Check("database", "rights", Mark.OK, f"this role is a member of {group}, and runs no job")
    elif missing:
        found = "this role may not do what a runner must"
        yield Check("database", "rights", Mark.WRONG, found, " ".join(missing))
    elif more is not None:
        functions, cure = more
        found = f"this role may do what a runner must, and what people do ({few(functions)}): more than a runner needs"
        if cure is None:  # which may be meant: the Launchpad, too, can pause jobs
            yield Check("database", "rights", Mark.OK, f"{found}, as a member of gaffer_operator")
        else:
            yield Check("database", "rights", Mark.WARNING, found, cure)
    else:
        yield Check("database", "rights", Mark.OK, "this role may do what a runner must")


def _clock(connection: db.Connection) -> Iterator[Check]:
    began = datetime.now(timezone.utc)
    there = horizon.now(connection)
    half = (datetime.now(timezone.utc) - began) / 2
    yield health.of_clock(began + half - there, half)


def _zones(connection: db.Connection) -> Iterator[Check]:
    now = horizon.now(connection)
    found = Counter(record.timezone for record in jobs.status(connection) if record.retired_at is None)
    cure = "install one version of the tz database wherever jobs run, and where Postgres runs"
    is_well = True
    for zone in sorted(found):
        differing = (
            [] if zone == "UTC" else zone_store.differing(connection, zone, zones.probes(zone, now, now + _YEARS))
        )
        if differing is None:
            is_well = False
            yield Check("database", "tz data", Mark.WARNING, f"Postgres does not know the zone {zone}", cure)
        elif differing:
            is_well = False
            told = f"Postgres has another clock for {zone} than this machine from {differing[0].isoformat()} on"
            yield Check("database", "tz data", Mark.WARNING, told, cure)
    if is_well:
        yield Check("database", "tz data", Mark.OK, f"as here, for {', '.join(sorted(found)) or 'no job'}")


# ── jobs ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _known(connection: db.Connection, definitions: Sequence[Definition]) -> Iterator[Check]:
    records = [record for record in jobs.status(connection) if record.retired_at is None]
    if not records:
        found = "no job that is meant to run is known to this database: it may be the wrong one"
        yield Check("jobs", "known", Mark.UNKNOWN, found, "gaffer register MODULE")
    else:
        yield Check("jobs", "known", Mark.OK, f"{len(records):,}")
    for record in records:
        if record.cure_of_watermark is not None:
            found = f"the watermark of job {record.name} is gone, and with it how far it has got, so that its runs fail"
            yield Check("jobs", "watermarks", Mark.WRONG, found, record.cure_of_watermark)
    names = [definition.spec.name for definition in definitions]
    before = jobs.hashes(connection, names)
    other = [
        definition.spec.name
        for definition in definitions
        if before.get(definition.spec.name)
        != (definition.spec.hash, definition.work_hash, registration_of(definition, names).zone_data)
    ]
    if other:
        found = f"as they are defined here the database does not know {few(other)}"
        yield Check("jobs", "registered", Mark.WARNING, found, "gaffer register MODULE   # or: gaffer register -f FILE")
    elif definitions:
        yield Check("jobs", "registered", Mark.OK, f"{len(names):,}, as they are defined here")
    idle = [
        record.name
        for record in records
        if record.spec["schedule"] is None
        and record.last_started_at is None
        and record.seen_at - record.first_seen_at > _LONG
    ]
    if idle:
        found = f"no schedule, and never run: {few(idle)}"
        yield Check("jobs", "never run", Mark.WARNING, found, f"gaffer retire {idle[0]}   # or run it")
    for each in deliveries.failing(connection) + deliveries.unserved(connection):
        yield Check("jobs", "receivers", Mark.WARNING, *each.rpartition("; ")[::2])


def _incidents(connection: db.Connection) -> Iterator[Check]:
    report = examine(connection)
    shown = {
        Kind.VANISHED: "vanished", Kind.VERSIONS: "versions", Kind.PAUSE: "pauses", Kind.WATCH: "watch",
    }  # fmt: skip
    for kind, name in shown.items():
        found = [each for each in report.findings if each.kind is kind]
        if found:
            yield _of_findings(name, found)
        elif kind is Kind.WATCH:
            yield _watched(bool([watch for watch in report.watches if watch.every is not None]))
        else:
            yield Check("jobs", name, Mark.OK, "none")
    for problem in report.problems:
        yield Check("jobs", "readable", Mark.UNKNOWN, problem)
    others = [each for each in report.findings if each.kind not in shown]
    errors = [each for each in others if each.severity is Severity.ERROR]
    said = ", ".join(f"{count} {kind}" for kind, count in Counter(str(each.kind) for each in others).items())
    count = len(alerts.opened(connection))
    opened = f"{count} open" if count or not others else "so it is now; no watch has opened an incident for it yet"
    if others:
        mark = Mark.WRONG if errors else Mark.WARNING
        yield Check("jobs", "incidents", mark, f"{said} ({opened})", "gaffer check")
    else:
        yield Check("jobs", "incidents", Mark.OK, f"nothing is overdue or failing ({opened})")


def _watched(is_so: bool) -> Check:
    if is_so:
        return Check("jobs", "watch", Mark.OK, "somebody looks, as often as he means to")
    found = "nobody watches this database all the time, so that silence goes unnoticed"
    return Check("jobs", "watch", Mark.WARNING, found, "gaffer watch   # or turn on Dagster's sensor gaffer_watch")


def _of_findings(name: str, found: Sequence[Finding]) -> Check:
    first = found[0]
    of = few([each.job or each.watch or "" for each in found])
    mark = Mark.WRONG if first.severity is Severity.ERROR else Mark.WARNING
    told = f"{of}: {notice.explained(first.kind, first.details)}"
    return Check("jobs", name, mark, told, notice.what_to_do(first.kind, first.job, first.details))


# ── tables ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _sources(connection: db.Connection) -> Iterator[Check]:
    for record in jobs.status(connection):
        if record.retired_at is None:
            yield from _of_job(connection, record)


def _of_job(connection: db.Connection, record: JobRecord) -> Iterator[Check]:
    try:
        due = _due(record.spec["due"])
        cluster = jobs.cluster(connection, record.name)
        with db.impatient(connection):
            found = list[Mapping[str, str]]()
            if due is not None:
                source = source_of(JobSpec(record.name, due), record.first_seen_at)
                source.look(connection, record.seen_at, record.watermark, cluster)
                if isinstance(due, NewRows):
                    source.page(connection, record.watermark, 0)  # reads nothing: whether it can be read, with where=
                found += source.warnings(connection)
            protect.require(connection, record.spec.get("protect", ()), record.name)
    except (BadSpecError, TypeError) as error:
        found = f"a newer version wrote its spec: {error}"
        yield Check("tables", record.name, Mark.UNKNOWN, found, "pip install --upgrade gaffer_dagster")
    except Exception as error:
        yield _unread(connection, record, error)
    else:
        for warning in found:
            said = ": ".join(warning[name] for name in ("event", "why", "table") if name in warning)
            yield Check("tables", record.name, Mark.WARNING, said, warning.get("cure"))
        if due is not None and not found:
            yield Check("tables", record.name, Mark.OK, f"{due.table} has what it needs")


def _unread(connection: db.Connection, record: JobRecord, error: Exception) -> Check:
    """A job whose table cannot be read."""
    table = str(record.spec["due"].get("table", ""))
    if "42501" in [db.sqlstate(each) for each in (error, error.__context__) if each is not None]:
        pending = record.spec["due"]["kind"] == "pending_rows"
        missing = doctor.missing_on(connection, table, ["select", "update"] if pending else ["select"])
        if missing:
            found = f"this role may not do what the job does: {db.primary_message(error.__context__ or error)}"
            return Check("tables", record.name, Mark.UNKNOWN, found, " ".join(missing))
    if not isinstance(error, GafferError):
        return _failed(connection, "tables", record.name, error)
    refused = _refused("tables", record.name, error)
    if isinstance(error, BadInputError):
        return replace(refused, cure=doctor.path_to(connection, table) or refused.cure)
    return refused


def _due(stored: Mapping[str, Any]) -> Any:
    """What the job reads rows by. None: it reads none."""
    if stored["kind"] == "pending_rows":
        return PendingRows(**{name: value for name, value in stored.items() if name != "kind"})
    return due_from_json(stored) if stored["kind"] == "new_rows" else None


def _guards(connection: db.Connection) -> Iterator[Check]:
    open_ones = doctor.unguarded(connection)
    for table, ways in open_ones:
        found = f"{table} is protected, and can be written by way of {few(ways)}: triggers are missing or disabled"
        yield Check("tables", "guards", Mark.WRONG, found, f"gaffer protect {table}")
    if not open_ones:
        yield Check("tables", "guards", Mark.OK, "no protected table is open")


def _advisory_locks(connection: db.Connection) -> Iterator[Check]:
    found = doctor.squatters(connection)
    for each in found:
        told = f"the lock of job {each.job} is held by {each.who}, so that no batch begins"
        yield Check("tables", "advisory locks", Mark.WARNING, told, each.cure)
    migrating = migrate.lockers(connection)
    for who, cure in migrating:
        told = f"the lock of migrations is held by {who}, so that nobody else migrates"
        yield Check("tables", "advisory locks", Mark.WARNING, told, cure)
    if not found and not migrating:
        yield Check("tables", "advisory locks", Mark.OK, "neither a job nor a migration is kept waiting for one")


# ── receivers ────────────────────────────────────────────────────────────────────────────────────────────────────────


def heartbeats(url: str) -> list[str]:
    """The variables that the jobs' heartbeats are in; empty where the database cannot say."""
    named = _perhaps(url, lambda connection: [each.spec["alerts"].get("heartbeat") for each in jobs.status(connection)])
    return sorted({name for name in named or () if name})


def slots(url: str) -> dict[str, int]:
    """How many runs of each job may be at work side by side; empty where the database cannot say."""
    found = _perhaps(url, jobs.slots)
    return {} if found is None else found[0]


def _perhaps(url: str, question: Callable[[db.Connection], T]) -> T | None:
    try:
        with db.connect(url, application_name="gaffer:doctor") as connection:
            return question(connection)
    except Exception:  # why, is told where the database is looked at
        return None


def of_receivers(environment: Mapping[str, str], of_jobs: Sequence[str] = ()) -> Iterator[Check]:
    """The receivers and heartbeats of this environment: whether they can be reached. Nothing is sent."""
    receivers = [each for each in receivers_from(environment, wrap(logging.getLogger("gaffer"))) if each.name != LOG]
    if not receivers:
        found = "none is set in this environment: only the log is told"
        yield Check("receivers", "all", Mark.WARNING, found, "export GAFFER_RECEIVER_ONCALL=https://…")
    with ThreadPoolExecutor(8) as threads:
        names = [HEARTBEAT, *of_jobs] if environment.get(HEARTBEAT) else of_jobs
        asked = [
            *((each.name, partial(_of_receiver, each)) for each in receivers),
            *((each, partial(_of_heartbeat, environment, each)) for each in names),
        ]
        yield from threads.map(_answer, asked)


def _answer(asked: tuple[str, Callable[[], Check]]) -> Check:
    name, question = asked
    try:
        return question()
    except Exception as error:  # what it says may hold the URL
        return Check("receivers", name, Mark.UNKNOWN, f"it cannot be looked at ({type(error).__name__})")


def _of_receiver(receiver: Receiver) -> Check:
    if isinstance(receiver, Unusable):
        return Check("receivers", receiver.name, Mark.WRONG, *health.told(BadInputError(receiver.reason)))
    if isinstance(receiver, Webhook):
        return _reached(receiver.name, receiver.target)
    assert isinstance(receiver, Apprise)  # noqa: S101 — there is no other
    try:
        receiver.read()
    except NotDeliveredError as error:
        return Check("receivers", receiver.name, Mark.WRONG, *health.told(error))
    found = "a URL of Apprise's, which cannot be asked without sending"
    return Check("receivers", receiver.name, Mark.SKIPPED, found, "gaffer alerts test")


def _of_heartbeat(environment: Mapping[str, str], variable: str) -> Check:
    if not environment.get(variable):
        found = "it is not set in this environment, and sent only where a watch has it"
        return Check("receivers", variable, Mark.SKIPPED, found, f"export {variable}=https://…")
    try:
        return _reached(variable, web.target(variable, environment))
    except GafferError as error:
        return Check("receivers", variable, Mark.WRONG, *health.told(error))


def _reached(name: str, target: web.Target) -> Check:
    try:
        web.reach(target, limit=_LIMIT)
    except NotDeliveredError as error:
        cure = f"mend {target.variable}, or what is in between; then: gaffer alerts test"
        return Check("receivers", name, Mark.WRONG, str(error), cure)
    return Check("receivers", name, Mark.OK, f"answers{' with TLS' if target.secure else ''} (nothing was sent)")
