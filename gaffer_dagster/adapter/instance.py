"""What `gaffer doctor` asks a Dagster instance: the one that DAGSTER_HOME names."""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import dagster as dg
import yaml
from sqlalchemy.engine import make_url

from gaffer_dagster.adapter.assets import JOB_TAG
from gaffer_dagster.adapter.definitions import dagster_name
from gaffer_dagster.adapter.pools import SETTINGS, granularity, limits, pool_of
from gaffer_dagster.adapter.sensors import NAME
from gaffer_dagster.domain.amount import few
from gaffer_dagster.domain.duration import in_words
from gaffer_dagster.domain.health import Check, Mark
from gaffer_dagster.engine.limit import within
from gaffer_dagster.errors import BadInputError
from gaffer_dagster.store import db

T = TypeVar("T")
_LIMIT = timedelta(seconds=30)
_LATE, _GONE = timedelta(minutes=2), timedelta(minutes=5)
_QUEUED = timedelta(minutes=15)
_BACKSTOP = timedelta(minutes=5)
_LOOKED = timedelta(hours=2)  # the scheduler notes it each hour, and up to ten minutes late
_NEWEST = 500
_SAID = 300  # characters of an error
_AT_WORK = [dg.DagsterRunStatus.STARTING, dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.CANCELING]
_WAITING = [dg.DagsterRunStatus.NOT_STARTED, dg.DagsterRunStatus.QUEUED]
_OVER = [dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED]
_MONITORING = "run_monitoring:\n  enabled: true\n  poll_interval_seconds: 30"


def _check(name: str, mark: Mark, found: str, cure: str | None = None) -> Check:
    return Check("dagster", name, mark, found, cure)


def open_instance() -> dg.DagsterInstance:
    """The instance of DAGSTER_HOME. Raises `BadInputError`."""
    home = os.environ.get("DAGSTER_HOME", "")
    if not home:
        raise BadInputError("DAGSTER_HOME is not set; set it to the folder of the instance's dagster.yaml")
    try:
        traps = list(_trap(home))
        if not traps:
            return _within_limit(dg.DagsterInstance.get)
    except Exception as error:
        raise BadInputError(f"the Dagster instance in {home} cannot be opened: {_said(error)}; mend it") from None
    raise BadInputError(f"{traps[0].found}; {traps[0].cure}")


def examine(slots: Mapping[str, int]) -> list[Check]:
    """`slots`: of each job, how many of its runs may be at work side by side."""
    home = os.environ.get("DAGSTER_HOME", "")
    found = [_home(home)]
    if found[0].mark in (Mark.WRONG, Mark.UNKNOWN):
        return found
    found += _answers("storage driver", lambda: _trap(home))
    if found[-1].mark is Mark.WRONG:  # to go on would only show what it leads to
        return found
    try:
        instance = _within_limit(dg.DagsterInstance.get)
    except Exception as error:
        cure = "mend its dagster.yaml, or start its storage; dagster instance info shows the same error"
        return [*found, _check("instance", Mark.WRONG, f"it cannot be opened: {_said(error)}", cure)]
    asked = _Examined(instance, slots, datetime.now(timezone.utc))
    questions: list[tuple[str, Callable[[_Examined], Iterable[Check]]]] = [
        ("storage", _storage),
        ("run monitoring", _monitoring),
        ("run queue", _queue),
        ("granularity", _granularity),
        ("pools", _pools),
        ("places", _leaked),
        ("daemon", _daemons),
        ("two daemons", _two_daemons),
        ("switches", _switches),
        ("runs", _runs),
        ("scheduler", _scheduler),
        ("logs", _logs),
    ]
    for name, question in questions:
        found += _answers(name, partial(question, asked))
    return found


def _answers(name: str, question: Callable[[], Iterable[Check]]) -> list[Check]:
    try:
        return _within_limit(lambda: list(question()))
    except Exception as error:
        return [_check(name, Mark.UNKNOWN, f"the instance does not answer: {_said(error)}")]


def _said(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {_LIMIT.total_seconds():g} s"
    texts = [str(each) for each in (error, error.__cause__) if each is not None]
    lines = [line.strip() for text in texts for line in text.splitlines()[:2] if line.strip()]
    # Dagster also says all that there may be.
    lines = [re.sub(r" (Expected: |for \{).*", "", line) for line in lines]
    said = db.redact("; ".join(lines) or type(error).__name__)
    return said if len(said) <= _SAID else f"{said[:_SAID]}…"


def _within_limit(ask: Callable[[], T]) -> T:
    """Dagster asks a storage that is away again and again, and waits for one that is silent."""
    logging.disable(logging.WARNING)  # of each attempt
    try:
        return within(_LIMIT, ask, "gaffer doctor")
    finally:
        logging.disable(logging.NOTSET)


# ── how it is set up ─────────────────────────────────────────────────────────────────────────────────────────────────


def _home(home: str) -> Check:
    if not home:
        cure = "export DAGSTER_HOME=…   # the folder of its dagster.yaml"
        return _check("home", Mark.UNKNOWN, "DAGSTER_HOME is not set, so that it is not known which instance", cure)
    folder = Path(home).expanduser()
    if not folder.is_absolute() or not folder.is_dir():
        found = f"DAGSTER_HOME is {home}, which is no folder" + ("" if folder.is_absolute() else ", or not absolute")
        return _check("home", Mark.WRONG, found, "export DAGSTER_HOME=/the/folder/of/its/dagster.yaml")
    if not (folder / "dagster.yaml").is_file():
        found = f"{home} has no dagster.yaml: storage is SQLite, and nothing watches runs"
        cure = f"cat > {home}/dagster.yaml <<END\n{_MONITORING}\n{SETTINGS}\n    default_limit: 1\nEND"
        return _check("home", Mark.WARNING, found, cure)
    return _check("home", Mark.OK, home)


def _trap(home: str) -> Iterator[Check]:
    """With SQLAlchemy 2.1 a URL of `postgresql://` means psycopg 3, by which Dagster cannot store an event: runs stay
    NOT_STARTED, and ticks say SUCCESS."""
    version = tuple(int(part) for part in re.findall(r"\d+", metadata.version("sqlalchemy"))[:2])
    if version < (2, 1):
        return
    from dagster._core.instance.ref import InstanceRef  # private: where it is gone, this cannot be told

    try:
        ref = InstanceRef.from_dir(home)
    except Exception:  # it cannot be opened either, which says why
        return
    for data in (ref.storage_data, ref.run_storage_data, ref.event_storage_data, ref.schedule_storage_data):
        if data is not None and data.module_name.startswith("dagster_postgres"):
            scheme = _scheme(yaml.safe_load(data.config_yaml) or {})
            if scheme in ("postgresql", "postgres", "postgresql+psycopg"):
                found = (
                    f"its storage is at {scheme}://…, for which SQLAlchemy {metadata.version('sqlalchemy')} takes "
                    "psycopg 3, and dagster-postgres fails with it: no event of a run can be stored"
                )
                cure = "write postgresql+psycopg2://… in its URL (with postgres_db: scheme: postgresql+psycopg2)"
                yield _check("storage driver", Mark.WRONG, found, cure)
                return


def _scheme(config: Mapping[str, Any]) -> str:
    parts = config.get("postgres_db")
    if parts is not None:
        return str(parts.get("scheme", "postgresql"))
    url = config.get("postgres_url", "")
    if isinstance(url, dict):
        url = os.environ.get(str(url.get("env")), "")  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
    return str(url).partition("://")[0]  # pyright: ignore[reportUnknownArgumentType]


@dataclass(frozen=True)
class _Examined:
    instance: dg.DagsterInstance
    slots: Mapping[str, int]
    now: datetime

    def runs(self, statuses: Sequence[dg.DagsterRunStatus]) -> Sequence[dg.RunRecord]:
        """The newest runs of our jobs that are so."""
        if not self.slots:
            return []
        wanted = dg.RunsFilter(tags={JOB_TAG: list(self.slots)}, statuses=statuses)
        return self.instance.get_run_records(wanted, limit=_NEWEST)

    def age(self, at: float | datetime) -> timedelta:
        since = at if isinstance(at, datetime) else datetime.fromtimestamp(at, timezone.utc)
        return self.now - (since if since.tzinfo is not None else since.replace(tzinfo=timezone.utc))


def _storage(asked: _Examined) -> Iterator[Check]:
    name = type(asked.instance.run_storage).__name__
    asked.instance.run_storage.get_runs_count()
    url = getattr(asked.instance.run_storage, "postgres_url", None)
    if url is not None:
        where = make_url(url)
        host = where.host or where.query.get("host", "localhost")
        yield _check("storage", Mark.OK, f"Postgres at {host}, database {where.database}, by {where.drivername}")
    else:
        lone = "; SQLite is for development: one machine, and no second process for long" if "Sqlite" in name else ""
        yield _check("storage", Mark.OK, f"{name}{lone}")


def _monitoring(asked: _Examined) -> Iterator[Check]:
    instance = asked.instance
    if not instance.run_monitoring_enabled:
        found = "off: a run whose process is gone can stay STARTED for ever, and no max_runtime is kept"
        yield _check("run monitoring", Mark.WARNING, found, _MONITORING)
        return
    every = instance.run_monitoring_poll_interval_seconds
    most = instance.run_monitoring_max_runtime_seconds
    bound = f", max_runtime {most} s" if most else ", max_runtime of each job's own tag"
    yield _check("run monitoring", Mark.OK, f"on, every {every} s{bound}")


def _queue(asked: _Examined) -> Iterator[Check]:
    config = asked.instance.get_concurrency_config().run_queue_config
    if not isinstance(asked.instance.run_coordinator, dg.QueuedRunCoordinator) or config is None:
        name = type(asked.instance.run_coordinator).__name__
        yield _check("run queue", Mark.OK, f"none ({name}): a second run of a job does not wait, and ends busy")
    elif config.max_concurrent_runs == 0:
        found = "max_concurrent_runs is 0: no run ever begins"
        yield _check("run queue", Mark.WRONG, found, "concurrency:\n  runs:\n    max_concurrent_runs: 10")
    else:
        most = config.max_concurrent_runs
        yield _check("run queue", Mark.OK, f"{'any number of' if most < 0 else most} runs at once")


def _granularity(asked: _Examined) -> Iterator[Check]:
    said = granularity(asked.instance)
    if said == "run":
        yield _check("granularity", Mark.OK, "run")
    else:
        found = f"{said or 'op (the default)'}: a run that is killed never gives its place back, and its job waits"
        yield _check("granularity", Mark.WARNING, found, SETTINGS)


def _pools(asked: _Examined) -> Iterator[Check]:
    if not asked.slots:
        yield _check("pools", Mark.SKIPPED, "no job is known, from the database or by -f or -m")
        return
    now = limits(asked.instance)
    other = {job: now.of(pool_of(job)) for job, count in asked.slots.items() if now.of(pool_of(job)) != count}
    stopped = sorted(job for job, limit in other.items() if limit == 0)
    if stopped:
        found = f"no run of {few(stopped)} can begin: the limit of the pool {pool_of(stopped[0])} is 0"
        yield _check("pools", Mark.WRONG, found, "gaffer dagster sync")
    elif other:
        said = [
            f"{pool_of(job)} lets {'any number' if limit is None else limit} of {asked.slots[job]} work"
            for job, limit in sorted(other.items())
        ]
        yield _check("pools", Mark.WARNING, few(said), "gaffer dagster sync")
    else:
        yield _check("pools", Mark.OK, f"as many as there are slots, for {len(asked.slots)}")


def _leaked(asked: _Examined) -> Iterator[Check]:
    storage = asked.instance.event_log_storage
    claimed = {
        place.run_id: pool_of(job)
        for job in asked.slots
        for place in storage.get_concurrency_info(pool_of(job)).claimed_slots
    }
    over: Sequence[dg.RunRecord] = []
    if claimed:
        over = asked.instance.get_run_records(dg.RunsFilter(run_ids=list(claimed), statuses=_OVER))
    if not over:
        yield _check("places", Mark.OK, f"{len(claimed)} taken in pools, none by a run that is over")
        return
    run = over[0].dagster_run.run_id
    found = f"{claimed[run]}: the place of run {run}, which is over, was not given back; later runs wait for it"
    free = "import dagster as dg; dg.DagsterInstance.get().event_log_storage.free_concurrency_slots_for_run"
    yield _check("places", Mark.WRONG, found, f"python -c \"{free}('{run}')\"")


# ── who runs it ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _daemons(asked: _Examined) -> Iterator[Check]:
    instance = asked.instance
    beats = instance.get_daemon_heartbeats()
    wanted = sorted(instance.get_required_daemon_types())
    ages = {name: asked.age(beats[name].timestamp) for name in wanted if name in beats}
    cure = "dagster-daemon run   # with the same DAGSTER_HOME, and one of it only"
    if not ages:
        yield _check("daemon", Mark.WRONG, "none has ever run here: no schedule ticks, and no sensor looks", cure)
        return
    missing = [name for name in wanted if name not in ages]
    late = {name: age for name, age in ages.items() if age > _LATE}
    if missing or late:
        said = [f"{name} last {in_words(age)} ago" for name, age in late.items()] + [
            f"{name} never" for name in missing
        ]
        mark = Mark.WRONG if missing or max(late.values()) > _GONE else Mark.WARNING
        yield _check("daemon", mark, f"no sign of life: {', '.join(said)}", cure)
    else:
        oldest = max(0.0, max(ages.values()).total_seconds())
        yield _check("daemon", Mark.OK, f"{', '.join(wanted)}: the oldest sign of life is {oldest:.0f} s old")
    for name in wanted:
        errors = list(beats[name].errors or []) if name in beats else []
        if errors:
            said = db.redact(errors[0].message.strip().splitlines()[0])
            yield _check("daemon errors", Mark.WARNING, f"{name}: {said}", "see the log of dagster-daemon")


def _two_daemons(asked: _Examined) -> Iterator[Check]:
    """Each kind's row has the last one that wrote it, so two that are alive mostly share them."""
    beats = asked.instance.get_daemon_heartbeats()
    wanted = asked.instance.get_required_daemon_types()
    alive = {beats[name].daemon_id for name in wanted if name in beats and asked.age(beats[name].timestamp) <= _LATE}
    twice = sorted(each for each, count in Counter(map(_requested, asked.runs([]))).items() if each and count > 1)
    cure = "stop all but one dagster-daemon (and dagster dev) with this storage; in Kubernetes: strategy Recreate"
    if len(alive) > 1:
        found = f"{len(alive)} are alive ({', '.join(sorted(str(each)[:8] for each in alive))}): ticks come twice"
        yield _check("two daemons", Mark.WARNING, found, cure)
    elif twice:
        at, name, *_ = twice[-1]
        found = f"there are two runs for one tick, such as {name} at {at}: there were two, at least then"
        yield _check("two daemons", Mark.WARNING, found, cure)
    else:
        yield _check("two daemons", Mark.OK, "none is seen")


def _requested(record: dg.RunRecord) -> tuple[str, ...] | None:
    """By which tick of which schedule, and for which of its slots. Its `dagster/tick` is the row in which a daemon
    noted the tick: two daemons have two. What was run again has the tags of the first."""
    tags = record.dagster_run.tags
    at, name = tags.get(".dagster/scheduled_execution_time"), tags.get("dagster/schedule_name")
    if at is None or name is None or record.dagster_run.parent_run_id is not None:
        return None
    return at, name, tags.get("dagster/run_key", ""), tags.get(".dagster/repository", "")


def _switches(asked: _Examined) -> Iterator[Check]:
    ours = {f"{dagster_name(job)}_schedule" for job in asked.slots} | {NAME}
    every = asked.instance.all_instigator_state()
    states = [state for state in every if state.name in ours]
    alive = {_location(state) for state in every if asked.age(_looked_at(state)) <= _LOOKED}
    off = [state for state in states if state.status.value == "STOPPED"]
    for state in off:
        kind = "sensor" if state.name == NAME else "schedule"
        where = _location(state)
        lost = "nothing is watched there" if kind == "sensor" else "its job runs only when asked to"
        found = f"the {kind} {state.name} of {where} is switched off in Dagster: {lost}"
        if alive and where not in alive:
            found += f"; the code location {where} is perhaps gone, or has another name"
            forget = f"delete_instigator_state('{state.instigator_origin_id}', '{state.selector_id}')"
            cure = f'python -c "import dagster as dg; dg.DagsterInstance.get().{forget}"   # if it is gone'
            yield _check("switches", Mark.WARNING, found, cure)
        else:
            cure = f"dagster {kind} start {state.name} -l {where} -w workspace.yaml"
            yield _check("switches", Mark.WRONG, found, cure)
    if not any(state.name == NAME for state in states):
        found = f"no daemon has seen the sensor {NAME} yet: no code location with build_definitions is loaded"
        yield _check("switches", Mark.WARNING, found, "dagster definitions validate -w workspace.yaml")
    elif not off:
        yield _check("switches", Mark.OK, f"none of {len(states)} is off")


def _location(state: Any) -> str:
    return state.origin.repository_origin.code_location_origin.location_name


def _looked_at(state: Any) -> float:
    """When a daemon last noted that it has this sensor or schedule: it does for schedules that are off, too."""
    noted = ("last_tick_start_timestamp", "last_iteration_timestamp")
    return max(getattr(state.instigator_data, name, None) or 0.0 for name in noted)


def _runs(asked: _Examined) -> Iterator[Check]:
    stuck: list[tuple[dg.RunRecord, timedelta]] = []
    for record in asked.runs(_AT_WORK):
        age = asked.age(record.start_time or record.create_timestamp)
        most = record.dagster_run.tags.get(dg.MAX_RUNTIME_SECONDS_TAG, "")
        if most.isdecimal() and age > timedelta(seconds=int(most)) + _BACKSTOP:
            stuck.append((record, age))
    if stuck:
        record, age = stuck[-1]
        run = record.dagster_run
        found = (
            f"{len(stuck)} at work for longer than they may, such as {run.run_id} of {run.tags[JOB_TAG]}, "
            f"{run.status.value} for {in_words(age)}: its process is gone, or no longer answers, and later runs wait"
        )
        force = f"instance.report_run_canceled(instance.get_run_by_id('{run.run_id}'))"
        cure = f'python -c "import dagster as dg; instance = dg.DagsterInstance.get(); {force}"'
        yield _check("runs", Mark.WRONG, found, cure)
    late = [record for record in asked.runs(_WAITING) if asked.age(record.create_timestamp) > _QUEUED]
    if late:
        run = late[-1].dagster_run
        since = in_words(asked.age(late[-1].create_timestamp))
        found = (
            f"{len(late)} have not begun, such as {run.run_id} of {run.tags[JOB_TAG]}, {run.status.value} for {since}"
        )
        yield _check("runs", Mark.WARNING, found, "see whether the daemon runs, its limits, and what is at work")
    if not stuck and not late:
        yield _check("runs", Mark.OK, "none is at work or waits for too long")


def _scheduler(asked: _Examined) -> Iterator[Check]:
    retries = getattr(asked.instance.scheduler, "max_tick_retries", 0)
    threads = {
        name: bool((settings or {}).get("use_threads"))
        for name, settings in (
            ("schedules", asked.instance.get_scheduler_settings()),
            ("sensors", asked.instance.get_sensor_settings()),
        )
    }
    slow = [name for name, has in threads.items() if not has]
    one_by_one = f"; {' and '.join(slow)} are evaluated one after the other (use_threads)" if slow else ""
    yield _check("scheduler", Mark.OK, f"a tick that fails is tried again {retries} times{one_by_one}")


def _logs(asked: _Examined) -> Iterator[Check]:
    level = asked.instance.python_log_level
    if (level or "").upper() in ("WARNING", "ERROR", "CRITICAL"):
        found = f"python_log_level is {level}: what runs say of their batches is not kept"
        yield _check("logs", Mark.WARNING, found, "python_logs:\n  python_log_level: INFO")
    else:
        yield _check("logs", Mark.OK, f"python_log_level is {level or 'left as it is'}")
