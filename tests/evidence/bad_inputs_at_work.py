"""Bad inputs of the kinds that take a database, or Dagster, to be judged; see `bad_inputs.py`."""

from __future__ import annotations

import json
import math
import random
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any, cast
from unittest import mock
from uuid import UUID, uuid4

import click
import dagster as dg
import psycopg
from click.testing import CliRunner
from dagster._check import CheckError  # what Dagster raises for its own options
from dagster.components.resolved.errors import ResolutionException
from dagster_shared.serdes import deserialize_value, serialize_value
from psycopg import sql
from pydantic import ValidationError

import gaffer_dagster as gd
from gaffer_dagster.adapter import checks, metadata
from gaffer_dagster.adapter.assets import job_of
from gaffer_dagster.adapter.component import GafferComponent
from gaffer_dagster.cli import main
from gaffer_dagster.domain.page import verbatim
from gaffer_dagster.engine.log import wrap
from gaffer_dagster.engine.watch import Watcher, attend
from gaffer_dagster.engine.watermark import due_after, plan_move, said
from gaffer_dagster.store import db, jobs, migrate, runs, watermarks
from gaffer_dagster.store.jobs import Registration
from gaffer_dagster.store.operations import Operator
from tests.evidence import bad_inputs as bad
from tests.evidence.bad_inputs import CANARY, LOGGER, NASTY, Kind, Told, WrongError, mutated, odd
from tests.support import jobs as support
from tests.support.receivers import HttpReceiver

_DAGSTERS = (dg.DagsterError, CheckError, ValidationError, ResolutionException)


# ── assets and components ────────────────────────────────────────────────────────────────────────────────────────────


def _asset(chance: random.Random) -> bad.Given:
    """What is given to `gaffer_asset`."""
    options: dict[str, Any] = {"due": gd.NewRows("source", "id"), "name": "made"}
    good: Mapping[str, Sequence[Any]] = {
        "name": ["made", "a1"], "key_prefix": ["raw", ["a", "b"]], "sql": ["insert into t select id from due",
        "/* x */ with a as (select 1) select * from due"],
        "group_name": ["reports"], "owners": [["team:data"]], "tags": [{"a": "b"}], "metadata": [{"a": 1}],
        "kinds": [{"postgres"}],
        "code_version": ["1"], "description": ["What it is."], "deps": [["raw"]], "database": ["gaffer"],
        "op_tags": [{"a": "b"}],
        "required_resource_keys": [{"x"}], "exclusion": ["advisory"], "max_late": ["1h"], "protect": [["t"]],
        "schedule": [gd.Schedule("0 6 * * *")],
        "bounds": [gd.Bounds()], "alerts": [gd.Alerts()], "partitions_def": [None], "retry_policy": [None],
        "key": ["x"], "hooks": [set()],
        "automation_condition": [None], "due": [gd.NewRows("t", "id")],
    }  # fmt: skip
    for _ in range(chance.choice((1, 1, 2, 3))):
        name = chance.choice(list(good))
        value = chance.choice(good[name])
        options[name] = (
            value if chance.random() < 0.2 else mutated(value, chance) if isinstance(value, str) else odd(chance)
        )
    if chance.random() < 0.05:
        options[mutated(chance.choice(list(good)), chance, 1)] = 1
    return bad.Given(gd.gaffer_asset, options)


def _take_asset(given: bad.Given, told: Told) -> None:
    def work(batch: gd.Batch) -> None: ...

    try:
        made = cast("Any", gd.gaffer_asset)(**given.options)
        asset = made if isinstance(made, dg.AssetsDefinition) else made(work)
    except TypeError as error:
        if "/dagster/" not in traceback.extract_tb(error.__traceback__)[-1].filename:
            raise
        raise dg.DagsterError(str(error)) from None  # Dagster's own word on an option of its own
    job = job_of(asset)
    if job.key != asset.key or job.spec.name != "/".join(asset.key.path):
        raise WrongError(f"job {job.spec.name!r} of asset {asset.key}")
    told(job.description, asset.metadata_by_key, job.definition.work_hash)
    bad.storable(job.spec.as_json())


_ATTRIBUTES: Mapping[str, Any] = {
    "name": "copied",
    "due": {"new_rows": {"table": "source", "key": "id"}},
    "sql": "insert into target (id) select id from due",
    "schedule": {"cron": "0 6 * * *", "timezone": "Europe/Berlin"},
    "bounds": {"timeout": "20m", "batch_rows": 10},
    "alerts": {"grace": "1h", "receivers": ["oncall"], "heartbeat": "PING_URL"},
    "database_url_variable": "GAFFER_DATABASE_URL",
    "tags": {"a": "b"},
    "key_prefix": ["raw"],
    "metadata": {"a": 1},
}
_ASTRAY = [f"postgresql://me:{CANARY}@db/x", f"host=db password={CANARY}", f"https://hc-ping.com/{CANARY}",
{"password": CANARY},
           [f"postgresql://me:{CANARY}@db/x"], f"hc-ping.com/{CANARY}", f"jdbc:postgresql://me:{CANARY}@db/x",
           {"url": f"https://x/{CANARY}"},
           f"mailto://me:{CANARY}@x", [{"a": f"slack://{CANARY}/b"}]]  # fmt: skip
_PLACES = (
    "database_url_variable",
    "alerts.receivers",
    "alerts.heartbeat",
    "alerts",
    "dsn",
    "alerts.dsn",
    "due.new_rows.dsn",
    "resource",
)


def _yaml(chance: random.Random) -> dict[str, Any]:
    given = json.loads(
        json.dumps(
            {
                name: value
                for name, value in _ATTRIBUTES.items()
                if name in ("name", "due", "sql") or chance.random() < 0.3
            }
        )
    )
    for _ in range(chance.choice((1, 1, 2))):
        place, value = given, None
        if chance.random() < 0.4:
            path, value = chance.choice(_PLACES).split("."), chance.choice(_ASTRAY)
        else:
            path = chance.choice([[name] for name in _ATTRIBUTES] + [["due", "new_rows", "key"], ["schedule", "cron"],
            ["schedule", "zone"],
                                 ["bounds", "timeout"], ["due", "elapsed"], ["due", "x"], ["alerts", "grace"],
                                 ["metadata", "a"], ["tags", "a"]])  # fmt: skip
        for part in path[:-1]:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                return given
        old = place.get(path[-1])
        if value is None:
            plain = [
                None,
                True,
                0,
                -1,
                1.5,
                10**30,
                "",
                "x" * 5000,
                [],
                {},
                [[]],
                "{{ env.PING }}",
                "{{ 1/0 }}",
                "{{",
                "{% x %}",
                {"a": {"b": [1]}},
                math.nan,
            ]
            value = mutated(old, chance) if isinstance(old, str) and chance.random() < 0.7 else chance.choice(plain)
        place[path[-1]] = value
        if chance.random() < 0.1:
            given.pop(chance.choice(list(given)), None)
    return given


def _take_yaml(given: dict[str, Any], told: Told) -> None:
    made = GafferComponent.from_attributes_dict(attributes=given)
    told(made.asset.key, job_of(made.asset).description, repr(made.resource))
    bad.storable(job_of(made.asset).spec.as_json())


def _resource(chance: random.Random) -> Any:
    url = bad._dsn(chance)
    return chance.choice(
        ([url], {"dsn": url}, (url,), {url}, url.encode(errors="replace"), bytearray(url.encode(errors="replace")), url)
    )


def _take_resource(given: Any, told: Told) -> None:
    if isinstance(given, str) and bad._is_meant(given):
        return
    resource = gd.GafferResource(dsn=given)
    told(repr(resource), resource)
    with bad.guarded_network(), resource.run(gd.JobSpec("a", gd.NewRows("t", "id"))):
        raise WrongError("it ran")


# ── metadata ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class _Unspeakable:
    def __repr__(self) -> str:
        raise RuntimeError("cannot say")


class _Unlike:
    def __eq__(self, other: object) -> bool:
        raise RuntimeError("cannot compare")

    __hash__ = None  # type: ignore[assignment]


def _deep(depth: int, of: Callable[[Any], Any]) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = of(value)
    return value


def _value(chance: random.Random, depth: int = 0) -> Any:
    if depth < 3 and chance.random() < 0.25:
        inner = [_value(chance, depth + 1) for _ in range(chance.randint(0, 3))]
        return chance.choice(
            (
                inner,
                tuple(inner),
                {f"k{n}": value for n, value in enumerate(inner)},
                dict.fromkeys([chance.choice((1, None, "\ud800", (), 1.5, b"a"))], 1),
            )
        )
    # Made only where it is chosen: some take long.
    return chance.choice(_VALUES)(chance)


def _cyclic() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


_VALUES: Sequence[Callable[[random.Random], Any]] = (
    *(
        odd,
        odd,
        odd,
        lambda chance: mutated("some text", chance),
        lambda _: _Unspeakable(),
        lambda _: _Unlike(),
        lambda _: _cyclic(),
    ),
    *(
        lambda _: _deep(100_000, lambda x: [x]),
        lambda _: _deep(900, lambda x: {"a": x}),
        lambda _: "x" * 100_000,
        lambda _: [0] * 5_000,
    ),
    *(
        lambda _: dg.MetadataValue.md("\ud800"),
        lambda _: dg.MetadataValue.json({"a": math.nan}),
        lambda _: dg.MetadataValue.float(math.nan),
    ),
    *(
        lambda _: dg.MetadataValue.int(10**40),
        lambda _: dg.MetadataValue.text("\0"),
        lambda _: dg.MetadataValue.url("javascript:1"),
    ),
    *(
        lambda _: dg.MetadataValue.path("/x"),
        lambda _: dg.AssetKey("a"),
        lambda _: dg.TableRecord({"a": 1}),
        lambda _: 2**63 - 1,
    ),
    *(lambda _: -(2**63), lambda _: 2**53 + 1, lambda _: dg.MetadataValue.timestamp(1e30)),
)


def _metadata(chance: random.Random) -> Any:
    keys = ["a", "", " ", "gaffer/items", "\0", "\ud800", "x" * 10_000, "é", "dagster/x", "a/b", "<b>", "a\nb", "{{x}}"]
    if chance.random() < 0.05:
        return odd(chance)
    return {
        chance.choice(keys) if chance.random() < 0.9 else chance.choice((1, None, b"a", ("a",))): _value(chance)
        for _ in range(chance.randint(0, 4))
    }


def _take_metadata(given: Any, told: Told) -> str | None:
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        return "refused by the run"
    shown = metadata.of_function(given)
    event = dg.AssetMaterialization("a", metadata={**shown, "gaffer/items": 1})
    text = serialize_value(event)
    if (
        set(shown) != {db.presentable(key) for key in given}
        or deserialize_value(text, dg.AssetMaterialization).metadata.keys() != event.metadata.keys()
    ):
        raise WrongError("not all of it is kept")
    json.dumps(json.loads(text), ensure_ascii=False).encode()  # as GraphQL answers
    return None


# ── what is in a database ────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class World:
    """A database in which each input has something to work on. `url` has the canary as its password; `heard` takes
    each message that goes to a receiver."""

    owner: str
    url: str
    heard: HttpReceiver = field(repr=False)
    connection_: db.Connection | None = field(default=None, repr=False)

    @property
    def listens(self) -> Mapping[str, str]:
        """The environment of who sends to `heard`."""
        return {"GAFFER_RECEIVER_HEARD": self.heard.url, "GAFFER_RECEIVER_HEARD_PRIVATE": "1"}

    @property
    def connection(self) -> db.Connection:
        if self.connection_ is None or self.connection_.closed:
            self.connection_ = db.connect(self.url, application_name="fuzz")
        db.roll_back(self.connection_)
        return self.connection_

    def leaks(self) -> Iterator[str]:
        """Whatever our tables hold."""
        tables = support.query(self.owner, "select tablename from pg_tables where schemaname = 'gaffer' order by 1")
        with support.connect(self.owner) as connection:
            for (name,) in tables:
                for (row,) in connection.execute(
                    sql.SQL("select t::text from gaffer.{} t").format(sql.Identifier(name))
                ):
                    yield row


@contextmanager
def world(owner: str) -> Generator[World]:
    role = f"fuzz_{uuid4().hex[:8]}"
    support.execute(owner, f"create role {role} login superuser password '{CANARY}'")
    with HttpReceiver() as heard:
        made = World(owner, db.with_parts(owner, user=role, password=CANARY), heard)
        try:
            _settle(made)
            _attend(made, {}, Told())  # from now on `heard` is known
            yield made
        finally:
            if made.connection_ is not None:
                made.connection_.close()
            support.execute(owner, f"reassign owned by {role} to current_user")
            support.execute(owner, f"drop owned by {role}")
            support.execute(owner, f"drop role {role}")


_QUEUE = gd.PendingRows("queue", "id", pending="done_at is null", done="done_at = now()", attempts=1)
_HOURLY = gd.Schedule("0 * * * *", "America/New_York")
SPECS = {
    "copied": support.spec("copied"),
    "texts": support.spec("texts", table="texts"),
    "stamped": gd.JobSpec("stamped", gd.NewRows("stamped", "id", cursor="at", settle="1m"), _HOURLY),
    "dated": gd.JobSpec("dated", gd.NewRows("dated", "id", cursor="at", settle="1m"), _HOURLY),
    "daily": support.daily("daily"),
    "slices": gd.JobSpec("slices", gd.Elapsed("1h"), _HOURLY),
    "elapsed": gd.JobSpec("elapsed", gd.Elapsed(), _HOURLY),
    "queue": gd.JobSpec("queue", _QUEUE, _HOURLY),
    "failing": gd.JobSpec("failing", gd.NewRows("source", "id"), _HOURLY, alerts=gd.Alerts(failures=1)),
}
_TYPES = {
    "i": "int", "b": "bigint", "t": "text", "n": "numeric(10, 2)", "f": "float8", "j": "jsonb", "js": "json",
    "a": "int[]", "ts": "timestamptz",
    "d": "date", "u": "uuid", "by": "bytea", "bo": "bool", "v": "varchar(5)", "tt": "text[]", "iv": "interval",
    "m": "mood", '"odd ""%s"': "text",
}  # fmt: skip


def _settle(made: World) -> None:
    url = made.url
    support.make_source(url, 20)
    statements = (
        "create table texts (id text primary key, v text)",
        "create table stamped (id uuid primary key default gen_random_uuid(),"
        " at timestamptz not null default now() - interval '1 day')",
        "create table dated (id int primary key, at date not null)",
        "insert into stamped select from generate_series(1, 5)",
        "insert into dated select n, date '2024-01-01' + n from generate_series(1, 5) n",
        "create table queue (id text primary key, v text, n numeric, at timestamptz, done_at timestamptz)",
        "create type mood as enum ('good', 'bad')",
        f"create table kept ({', '.join(f'{name} {kind}' for name, kind in _TYPES.items())})",
    )
    for statement in statements:
        support.execute(url, statement)
    gd_testing_prepare(url)
    support.execute(url, "insert into texts values ('a', 'x'), ('Ä', 'x'), ('%', 'x'), ('a''b', 'x'), ('5', 'x')")
    with db.connect(url, application_name="fuzz") as connection:
        migrate.verify(connection)
        for spec in SPECS.values():
            jobs.register(connection, spec, Registration())
    support.execute(
        url,
        "insert into gaffer.alert (job, kind, severity, since_at, opened_at, details)"
        " values ('copied', 'failures', 'error', now(), now(), '{}')",
    )


def gd_testing_prepare(url: str) -> None:
    from gaffer_dagster.testing import prepare

    prepare(url, "texts", "id")


# ── watermarks ───────────────────────────────────────────────────────────────────────────────────────────────────────

_POSITIONS = ["beginning", "end", "after:1", "after:5", "after:a", "after:Ä", "after:%", "after:a'b", "after:",
"2024-03-01", "2024-03-10T02:30",
              "2024-03-01T06:00+01:00", "2024-11-03T01:30", "2024-03-01T05:00Z", "0001-01-01",
              "9999-12-31T23:59:59.999999", "now", "infinity",
              "-infinity", "2h", "after:00000000-0000-0000-0000-000000000000", "after:1e3", "after:NaN", "after:1.0",
              "2024-02-30", "yesterday"]  # fmt: skip


def _position(chance: random.Random) -> tuple[str, str]:
    text = chance.choice(_POSITIONS)
    return chance.choice(list(SPECS)), text if chance.random() < 0.3 else mutated(text, chance)


def _take_position(made: World, given: tuple[str, str], told: Told) -> None:
    name, text = given
    connection = made.connection
    record = jobs.get(connection, name)
    move = plan_move(connection, record, text)
    told(move.means, said(record.watermark, record.timezone), verbatim(said(move.to, record.timezone)))
    watermarks.set_position(connection, name, record.watermark, move.to, move.cluster, Operator("fuzz", None))
    after = jobs.get(connection, name)
    if after.watermark != move.to:
        raise WrongError(f"it is at {after.watermark} and was to be at {move.to}")
    told(due_after(connection, after))


# ── names and configuration that are stored ──────────────────────────────────────────────────────────────────────────


def _stored(chance: random.Random) -> Any:
    if chance.random() < 0.5:
        return mutated(chance.choice(bad._NAMES), chance)
    return bad._config(chance)


def _take_stored(made: World, given: Any, told: Told) -> None:
    spec = (
        gd.JobSpec(given, gd.NewRows("t", "id"), gd.Schedule("H * * * *"))
        if isinstance(given, str)
        else bad._make_all(given)
    )
    connection = made.connection
    jobs.register(connection, spec, Registration())
    record = jobs.get(connection, spec.name)
    if (
        record.spec != json.loads(json.dumps(spec.as_json()))
        or record.spec_hash != spec.hash
        or record.schedule != spec.schedule
    ):
        raise WrongError("it is stored as another job")
    told(record.timeout, record.grace, record.open_tick, record.after_release)


# ── rows ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _rows(chance: random.Random) -> tuple[str, str, list[dict[Any, Any]]]:
    good: dict[str, Any] = {"i": 1, "b": 2**40, "t": "x", "n": Decimal("1.5"), "f": 1.5, "j": {"a": 1}, "js": [1],
    "a": [1, 2], "ts": datetime(2024, 1, 1, tzinfo=timezone.utc),
            "d": date(2024, 1, 1), "u": UUID(int=1), "by": b"a", "bo": True, "v": "abc", "tt": ["a"],
            "iv": timedelta(1), "m": "good", 'odd "%s': "x"}  # fmt: skip
    names = chance.sample(list(good), chance.randint(1, 4))
    rows: list[dict[Any, Any]] = [{name: good[name] for name in names} for _ in range(chance.choice((1, 2, 3)))]
    for _ in range(chance.choice((1, 1, 2))):
        row = chance.choice(rows)
        name = chance.choice(names)
        match chance.randrange(8):
            case 0:
                row[mutated(name, chance, 1)] = 1
            case 1:
                del row[name]
                names = [each for each in names if each in row] or ["i"]
            case 2:
                row[chance.choice((None, 1, "\0", "\ud800", "", "%s", "gaffer"))] = 1
            case 3 | 4:
                row[name] = mutated("text", chance)
            case _:
                row[name] = _value(chance)
    table = "kept" if chance.random() < 0.9 else mutated("kept", chance)
    return chance.choice(("insert", "copy")), table, rows


def _take_rows(made: World, given: tuple[str, str, list[dict[Any, Any]]], told: Told) -> str | None:
    how, table, rows = given
    before = support.query(made.url, "select count(*) from kept")[0][0]
    support.add_rows(made.url, 1)
    position = support.query(made.url, "select position from gaffer.job_watermark where job = 'copied'")

    def work(batch: gd.Batch) -> None:
        getattr(batch, how)(table, rows)

    try:
        record = support.run(SPECS["copied"], made.url, work)
    except Exception as error:
        outcome, said_, kept = support.query(
            made.url,
            "select outcome, error, (select count(*) from kept) from gaffer.job_runs"
            " where job = 'copied' order by id desc limit 1",
        )[0]  # fmt: skip
        told(said_)
        after = support.query(made.url, "select position from gaffer.job_watermark where job = 'copied'")
        if outcome != "failed" or not said_ or kept != before or after != position:
            raise WrongError(f"the run is {outcome}, {kept - before} rows are there: {said_}") from error
        # Later inputs are not to meet these rows.
        support.run(SPECS["copied"], made.url, lambda batch: None)
        raise
    kept = support.query(made.url, "select count(*) from kept")[0][0] - before
    if kept != len(rows) or record.outcome != "succeeded":
        raise WrongError(f"{kept} of {len(rows)} rows are there")
    return None


def _source_rows(chance: random.Random) -> tuple[str, Any, Any, Any]:
    key = mutated(chance.choice(("a", "1", "key", "")), chance) or uuid4().hex
    numbers = ("1", "NaN", "1e100", "0.000", "-0", "Infinity")
    times = ("2024-01-01", "infinity", "-infinity", "294276-12-31", "4713-01-01 BC", "epoch")
    return chance.choice(("texts", "queue")), key, chance.choice(numbers), chance.choice(times)


def _take_source_rows(made: World, given: tuple[str, Any, Any, Any], told: Told) -> str | None:
    name, key, number, at = given
    try:
        if name == "texts":
            support.execute(made.url, "insert into texts (id, v) values (%s, %s) on conflict do nothing", key, number)
        else:
            support.execute(
                made.url,
                "insert into queue (id, v, n, at) values (%s, %s, %s, %s) on conflict do nothing",
                key,
                key,
                number,
                at,
            )
    except (psycopg.Error, UnicodeEncodeError):
        return "no row"
    seen: list[str] = []

    def work(batch: gd.Batch) -> None:
        seen.extend(batch.key_for(row) for row in batch.rows)
        if any("'" in row["id"] for row in batch.rows):
            raise ValueError(f"no {key}")

    try:
        record = support.run(SPECS[name], made.url, work)
        told(record.error)
        if record.outcome not in ("succeeded", "partial"):
            raise WrongError(f"the run is {record.outcome}")
    except ValueError as error:
        if "no " not in str(error):
            raise
        support.run(SPECS[name], made.url, lambda batch: None)
    return None


def _take_told_of_run(made: World, given: Any, told: Told) -> str | None:
    """What a function says, by a run of Dagster's: whatever it is, what the batch wrote is there, or was refused."""
    support.add_rows(made.url, 2)
    before = support.query(made.url, "select count(*) from target")[0][0]

    @gd.gaffer_asset(
        due=gd.NewRows("source", "id"),
        name="copied",
        schedule=support.spec("copied").schedule,
        bounds=gd.Bounds(timeout="5m"),
    )
    def copied(batch: gd.Batch) -> Any:
        support.copy_rows(batch)
        return given

    with mock.patch.dict("os.environ", {"GAFFER_DATABASE_URL": made.url}):
        resource = gd.GafferResource(dsn=dg.EnvVar("GAFFER_DATABASE_URL"))
        done = dg.materialize([copied], resources={"gaffer": resource}, raise_on_error=False)
    for event in done.all_events:
        told(serialize_value(event))
    kept = support.query(made.url, "select count(*) from target")[0][0] - before
    is_said = given is None or (isinstance(given, Mapping) and all(isinstance(key, str) for key in given))
    if is_said != done.success or (kept >= 2) != is_said:
        why = [event.step_failure_data.error_display_string[-200:] for event in done.get_step_failure_events()]
        raise WrongError(f"it {'succeeded' if done.success else 'failed'} and {kept} rows are there: {why}")
    if not done.success:
        support.run(SPECS["copied"], made.url, lambda batch: None)
    return None if is_said else "refused by the run"


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────────

# Those that go on until a signal, or that are of the private server and of Dagster's own instance.
_APART = {"watch", "db url", "db psql", "db stop", "db reset", "dagster sync", "dagster check", "completion"}
_ARGUMENTS = [*_POSITIONS, *NASTY, *SPECS, "5m", "2h", "1d", "0", "-5", "1", "99999999999999999999", "a/b",
"0 6 * * *", "H * * * *", "@daily", "Europe/Berlin",
              "10%", "101%", "2024-01-01/2024-01-02", "5m..50m", "nowhere.py", "no.module", "os", "log", "ann",
              "source", "public.source", "kept", "--", "-",
              "--json", "--yes", "--help", "-h", "\udcff\udcfe", "queue", "id", "v is null", "/none/x.prom",
              "x.prom"]  # fmt: skip


def _leaves(group: click.Group = main, before: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from _leaves(command, (*before, name))
        elif " ".join((*before, name)) not in _APART:
            yield (*before, name), command


LEAVES = dict(_leaves())


def _words(chance: random.Random) -> tuple[str, ...]:
    name, command = chance.choice(list(LEAVES.items()))
    words: list[str] = []
    for param in command.params:
        if isinstance(param, click.Argument):
            count = 1 if param.nargs == 1 else chance.randint(0, 3)
            words += [_argument(chance, param.name or "") for _ in range(count if chance.random() < 0.97 else 0)]
        elif chance.random() < 0.25 and not {"--help", "--version"} & set(param.opts):
            words.append(mutated(param.opts[0], chance, 1) if chance.random() < 0.04 else param.opts[0])
            if not getattr(param, "is_flag", False):
                words.append(_argument(chance, param.name or ""))
    if chance.random() < 0.05:
        words.insert(chance.randint(0, len(words)), chance.choice(_ARGUMENTS))
    if chance.random() < 0.3:
        words.append("--yes")
    return (*(name if chance.random() < 0.98 else (mutated(name[0], chance, 1), *name[1:])), *words)


def _argument(chance: random.Random, name: str) -> str:
    if name in ("job", "names", "old", "of") and chance.random() < 0.7:
        return chance.choice(list(SPECS))
    text = chance.choice(_ARGUMENTS)
    return text if chance.random() < 0.6 else mutated(text, chance)


def _take_words(made: World, given: tuple[str, ...], told: Told, url: str | None = None) -> str:
    words = [word.replace("\0", "") for word in given]  # no system passes one on
    environment = {"GAFFER_DATABASE_URL": made.url if url is None else url, "PAGER": "cat"}
    with CliRunner().isolated_filesystem(), bad.guarded_network():
        done = CliRunner().invoke(main, words, env=environment, prog_name="gaffer")
    LOGGER.handlers = [each for each in LOGGER.handlers if type(each).__name__ == "Heard"]
    told(done.output, done.stderr, *map(str, done.return_value or ()) if isinstance(done.return_value, tuple) else ())
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    if done.exit_code not in ((0, 1, 2, 75) if url is None else (1, 2, 75)):
        raise WrongError(f"exit code {done.exit_code}: {done.output[-200:]}")
    if "Traceback" in done.output:
        raise WrongError(f"a traceback: {done.output[-200:]}")
    if done.exit_code in (1, 75) and words[:1] not in (["check"], ["doctor"]):
        said_, told_ = done.stderr.partition("gaffer: ")[1:]
        if not said_ and "Aborted!" not in done.stderr:
            raise WrongError(f"exit code {done.exit_code} and nothing is said: {done.output[-200:]}")
        if said_:
            bad.clear(told_)
    return f"exit {done.exit_code}"


def _with_bad_url(chance: random.Random) -> tuple[str, tuple[str, ...]]:
    words = chance.choice([("status",), ("check",), ("runs", "a"), ("migrate",), ("audit",), ("run", "a", "-m",
    "tests.support.jobs"), ("check", "--json"),
                           ("pause", "a"), ("metrics",), ("preview", "a"), ("db", "reset", "--yes"), ("alerts",
                           "list")])  # fmt: skip
    # An environment holds no such text.
    return bad._dsn(chance).replace("\0", "").encode(errors="replace").decode(), words


def _take_with_bad_url(made: World, given: tuple[str, tuple[str, ...]], told: Told) -> str:
    url, words = given
    if bad._is_meant(url) or url.strip() in ("", "local"):
        return "names the secret as something else"
    return _take_words(made, words, told, url)


# ── receivers that are told, and jobs of the Launchpad ───────────────────────────────────────────────────────────────


def _take_pass(made: World, environment: dict[str, str], told: Told) -> None:
    _attend(made, environment, told)


def _attend(made: World, environment: Mapping[str, str], told: Told) -> None:
    """A pass of the watch, with everything to be told once more."""
    support.execute(made.owner, "delete from gaffer.alert_delivery")
    made.heard.messages.clear()
    with bad.guarded_network(), mock.patch("subprocess.run", bad._in_this_process):
        told(attend(made.connection, Watcher("check:fuzz"), environment | made.listens, wrap(LOGGER)))
    told(*made.heard.messages)


# ── what a run that failed leaves behind ─────────────────────────────────────────────────────────────────────────────


def _failure(chance: random.Random) -> tuple[str, str]:
    return chance.choice(("RuntimeError", "KeyError", "a cause", "by the database")), bad._said(chance)


def _take_failure(made: World, given: tuple[str, str], told: Told) -> None:
    """A real run of a job whose work fails with a URL in its error; then whatever shows that run to anybody."""
    how, text = given
    spec = SPECS["failing"]
    support.add_rows(made.url, 1)
    support.execute(made.owner, "delete from gaffer.alert_delivery; delete from gaffer.alert where job = 'failing'")

    def work(batch: gd.Batch) -> None:
        match how:
            case "RuntimeError":
                raise RuntimeError(text)
            case "KeyError":
                raise KeyError(text)
            case "a cause":
                raise RuntimeError(f"it failed: {text}") from ValueError(text)
            case _:
                batch.execute("select %s::int", [text.encode(errors="replace").decode()])

    with suppress(RuntimeError, KeyError, psycopg.errors.InvalidTextRepresentation):  # what it says is the user's
        support.run(spec, made.url, work)
        raise WrongError("it did not fail")
    (record,) = runs.history(made.connection, "failing", 1)
    told(support.query(made.owner, "select r::text from gaffer.job_runs r where id = %s", record.id))
    if record.outcome != "failed" or not record.error:
        raise WrongError(f"it is {record.outcome} and says {record.error!r}")
    resource = gd.GafferResource(dsn=made.url)
    shown = metadata.of_run(record, spec, metadata.look(resource, record, LOGGER))
    told(shown, checks.look(resource, "failing", dg.AssetKey("failing")))
    if "***" in record.error and "***" not in shown["gaffer/summary"].md_str:
        raise WrongError("the page says nothing of it")
    _attend(made, {}, told)
    told(support.query(made.owner, "select a::text from gaffer.alert a where job = 'failing'"))
    if not any("failing" in json.dumps(each) for each in made.heard.messages):
        raise WrongError("nobody was told of it")
    for words in ("status", "status failing", "runs failing", "alerts list --all"):
        _take_words(made, tuple(words.split()), told)


@gd.gaffer_asset(
    due=gd.NewRows("source", "id"), schedule=support.spec("copied").schedule, bounds=gd.Bounds(timeout="5m")
)
def copied(batch: gd.Batch) -> None:
    support.copy_rows(batch)


@gd.gaffer_asset(due=gd.EachInterval("@daily"), schedule=support.daily().schedule, bounds=gd.Bounds(timeout="5m"))
def daily(batch: gd.Batch) -> None: ...


@gd.gaffer_asset(due=_QUEUE, schedule=_HOURLY)
def queue(batch: gd.Batch) -> None: ...


_DEFS = gd.build_definitions(copied, daily, queue, resource=gd.GafferResource(dsn=dg.EnvVar("GAFFER_DATABASE_URL")))
_ACTIONS: Mapping[str, Sequence[str]] = {
    "gaffer_pause": ("until",), "gaffer_resume": (), "gaffer_release": ("slot",), "gaffer_set_watermark": ("position",
    "dry_run"),
    "gaffer_redo_interval": ("interval", "despite_pause"), "gaffer_retry_rows": ("keys", "all_parked"),
    "gaffer_drop_rows": ("keys", "all_parked"),
}  # fmt: skip


def _launched(chance: random.Random) -> tuple[str, dict[str, Any]]:
    action = chance.choice(list(_ACTIONS))
    config: dict[str, Any] = {"job": chance.choice(("copied", "daily", "queue", "none")), "reason": "why"}
    for name in (*_ACTIONS[action], "by", "reason", "x")[: None if chance.random() < 0.1 else -1]:
        if chance.random() < 0.8:
            plain = [True, False, None, 0, -1, 10**30, [], ["a"], {}, 1.5]
            config[name] = _argument(chance, name) if chance.random() < 0.7 else chance.choice(plain)
    if "keys" in config and isinstance(config["keys"], str):
        config["keys"] = [config["keys"]]
    return action, config


def _take_launched(made: World, given: tuple[str, dict[str, Any]], told: Told) -> str:
    action, config = given
    with mock.patch.dict("os.environ", {"GAFFER_DATABASE_URL": made.url}):
        done = _DEFS.resolve_job_def(action).execute_in_process(run_config=config, raise_on_error=False)
    for event in done.all_events:
        told(serialize_value(event))
    if done.success:
        return "done"
    (failure,) = [event for event in done.all_events if event.event_type_value == "STEP_FAILURE"]
    data = failure.step_failure_data
    said_ = data.user_failure_data.description if data.user_failure_data else None
    if said_ is None:
        raise WrongError(f"no words of ours: {data.error_display_string[:300]}")
    bad.clear(said_)
    return "refused by the job"


def with_dagster() -> Iterator[Kind]:
    """The kinds that take Dagster, and no database."""
    yield Kind("options of an asset", 8, _asset, _take_asset, _DAGSTERS)
    yield Kind("YAML of a component", 12, _yaml, _take_yaml, _DAGSTERS)
    yield Kind("resource", 8, _resource, _take_resource, (ValidationError,))
    yield Kind("metadata", 12, _metadata, _take_metadata)


def with_database(made: World) -> Iterator[Kind]:
    """The kinds that take a database."""

    def of(take: Callable[..., Any]) -> Callable[[Any, Told], Any]:
        return lambda given, told: take(made, given, told)

    yield Kind("job that is stored", 12, _stored, of(_take_stored), (bad.MisspeltError,))
    yield Kind("watermark", 20, _position, of(_take_position))
    yield Kind("rows that are written", 4, _rows, of(_take_rows), (psycopg.Error,))
    yield Kind("rows that are read", 4, _source_rows, of(_take_source_rows))
    yield Kind("metadata of a run", 3, _metadata, of(_take_told_of_run))
    yield Kind("run that fails", 4, _failure, of(_take_failure))
    yield Kind("words of a command", 20, _words, of(_take_words))
    yield Kind("command with a bad URL", 8, _with_bad_url, of(_take_with_bad_url))
    yield Kind("receivers that are told", 3, bad._receivers, of(_take_pass))
    yield Kind("config of an operator's job", 3, _launched, of(_take_launched), _DAGSTERS)
