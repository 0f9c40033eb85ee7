"""What is done to those at work. How often each is drawn stands in `TABLE`, and nowhere else."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

from gaffer_dagster.engine.steps import Station
from gaffer_dagster.errors import JobHeldError
from gaffer_dagster.store import operations
from gaffer_dagster.testing.proxy import Cut
from tests.evidence.chaos import dagster_faults
from tests.evidence.chaos.actors import Worker
from tests.evidence.chaos.jobs import CHAOS, LEASE
from tests.evidence.chaos.scene import Scene
from tests.support import variants
from tests.support.processes import WORKING

_PAST = LEASE.total_seconds()
CUTS = [f"cut {when}" for when in Cut if when is not Cut.NONE]
"""What is counted of `cut`."""
_AT_WORK = 2
"""So many engines are never stopped."""


@dataclass(frozen=True)
class Fault:
    """`weight`: of the long form; `needs`: a way of the scene without which it cannot be."""

    strike: Callable[[Scene], None]
    weight: float
    needs: str | None = None


def draw(scene: Scene, weights: Mapping[str, float]) -> Fault:
    names = list(weights)
    return TABLE[scene.chance.choices(names, [weights[name] for name in names])[0]]


def possible(ways: Mapping[str, str]) -> dict[str, float]:
    """The weights of the faults that can be on a scene with these ways."""
    return {name: fault.weight for name, fault in TABLE.items() if fault.needs is None or fault.needs in ways}


def missed(expected: Mapping[str, float], struck: Mapping[str, int]) -> list[str]:
    """What was expected to strike ten times or more, and never did."""
    return [
        name
        for name, count in expected.items()
        if count >= 10 and not any(kind == name or (name == "cut" and kind in CUTS) for kind in struck)
    ]


# ── to a process ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _victim(scene: Scene) -> Worker | None:
    """Mostly one that has a lease."""
    there = [
        worker
        for worker in scene.engines.workers
        if worker.is_alive and not worker.is_stopped and not worker.is_ordered
    ]
    holders = [worker for worker in there if scene.board.job(worker.part.seat) is not None]
    if not there:
        return None
    return scene.chance.choice(holders if holders and scene.chance.random() < 0.8 else there)


def _to_stop(scene: Scene) -> Worker | None:
    stopped = sum(worker.is_stopped or worker.is_ordered for worker in scene.engines.workers)
    return _victim(scene) if stopped < len(scene.engines.workers) - _AT_WORK else None


def _job_of(scene: Scene, worker: Worker) -> str:
    number = scene.board.job(worker.part.seat)
    return "" if number is None else scene.specs[number].name


def _resume_later(scene: Scene, worker: Worker) -> None:
    def resume() -> None:
        if worker.is_alive:
            worker.engine.resume()
        if worker in scene.engines.workers:
            scene.board.take_back(worker.part.seat)
        worker.is_stopped = False

    worker.is_stopped = True
    scene.later(_PAST * scene.chance.uniform(1.05, 1.6), resume)


def _stop(scene: Scene) -> None:
    worker = _to_stop(scene)
    if worker is not None:
        job = _job_of(scene, worker)
        worker.engine.pause()
        scene.struck("stop", worker.part.who, job)
        _resume_later(scene, worker)


def _kill(scene: Scene) -> None:
    worker = _victim(scene)
    if worker is not None:
        job = _job_of(scene, worker)
        worker.may_die = True
        worker.engine.kill()
        scene.struck("kill", worker.part.who, job)


def _at_place(scene: Scene, name: str, place: str, *, kill: bool) -> None:
    worker = _to_stop(scene)
    if worker is None:
        return
    board, seat, looks = scene.board, worker.part.seat, iter(range(20))

    def look() -> None:
        if not worker.is_alive:  # nobody else kills one that is under orders
            scene.struck(name, f"{place} {worker.part.who}")
        elif not kill and board.stands(seat):
            worker.is_ordered = False
            scene.struck(name, f"{place} {worker.part.who}", _job_of(scene, worker))
            _resume_later(scene, worker)
        elif next(looks, None) is not None:
            scene.later(0.05, look)
        else:
            board.take_back(seat)
            worker.is_ordered = False

    board.order(seat, place, kill=kill)
    worker.is_ordered, worker.may_die = True, worker.may_die or kill
    scene.later(0.02, look)


def _stop_at_a_place(scene: Scene) -> None:
    _at_place(scene, "stop at a station", scene.chance.choice([*map(str, Station), WORKING]), kill=False)


def _stop_before_commit(scene: Scene) -> None:
    """Where a variant has its gap: between a check and what it is to protect, or before a late renewal is in time."""
    variant = variants.VARIANTS[scene.variant or "the product"]
    place = variants.CHECKED if variant.check_at else str(Station.DUE if "renew" in variant.others else Station.APPLIED)
    _at_place(scene, "stop before COMMIT", place, kill=False)


def _kill_at_a_place(scene: Scene) -> None:
    _at_place(scene, "kill at a station", scene.chance.choice([*map(str, Station), WORKING]), kill=True)


def _double_tick(scene: Scene) -> None:
    """Two engines are woken by the same tick."""
    spec = scene.chance.choice(scene.specs)
    assert spec.schedule is not None
    tick = spec.schedule.latest(scene.board.now())
    for _ in range(2):
        scene.engines.invite(spec.name, tick)
    scene.struck("double tick", str(tick), spec.name)


# ── to a connection ──────────────────────────────────────────────────────────────────────────────────────────────────


def _terminate(scene: Scene) -> None:
    found = (
        scene.connection()
        .execute(
            "select pid, split_part(application_name, ':', 2) from pg_stat_activity"
            " where datname = current_database() and application_name like 'gaffer:%'"
        )
        .fetchall()
    )
    if found:
        pid, job = scene.chance.choice(sorted(found))
        if scene.connection().execute("select pg_terminate_backend(%s)", [pid]).fetchone() == (True,):
            scene.struck("terminate", f"backend {pid}", job)


def _cut(scene: Scene) -> None:
    """The connection dies with a message of the line under way."""
    proxies = {"proxy": scene.gear.proxy, "network": scene.gear.far_proxy}
    proxy = proxies[scene.chance.choice(sorted({worker.way for worker in scene.engines.workers} & proxies.keys()))]
    assert proxy is not None
    if not proxy.is_through:
        return  # the one before has not found its message yet
    function = scene.chance.choice(["commit_batch"] * 6 + ["acquire", "end_run"])
    when = scene.chance.choice([Cut.BEFORE, Cut.DURING, Cut.AFTER, Cut.AFTER])
    looks = iter(range(40))

    def look() -> None:
        if not proxy.is_through and next(looks, None) is not None:
            scene.later(0.05, look)
        elif not proxy.take_back():
            scene.struck(f"cut {when}", function)

    proxy.cut(function, when)
    scene.later(0.02, look)


def _pooler_restart(scene: Scene) -> None:
    pooler = scene.gear.pooler
    assert pooler is not None
    pooler.kill()
    scene.struck("pooler restart")
    pooler.start()


def _network_drop(scene: Scene) -> None:
    network = scene.gear.network
    assert network is not None
    if network.is_cut:
        return
    network.cut()
    scene.struck("network drop")
    scene.later(_PAST * scene.chance.uniform(1.2, 3), network.heal)


# ── to the server, and to the clocks ─────────────────────────────────────────────────────────────────────────────────


def _crash(scene: Scene) -> None:
    scene.impairs(60)
    scene.struck("server crash")
    scene.gear.crash()
    scene.disconnect()
    scene.clock.advance(timedelta())  # what was set last may be lost
    scene.impaired[-1] = (scene.impaired[-1][0], time.monotonic())


def _clock_forth(scene: Scene) -> None:
    by = timedelta(seconds=scene.chance.uniform(1, 240))
    scene.move_on(by)
    scene.struck("clock forth", str(by))


def _clock_back(scene: Scene) -> None:
    """And forth again by as much: a lease that is held lasts for that much longer."""
    by, lasts = timedelta(seconds=scene.chance.uniform(1, 120)), 1.5
    scene.move_on(-by)
    scene.struck("clock back", str(by))
    scene.impairs(lasts)
    scene.later(lasts, lambda: scene.move_on(by))


def _other_clocks(scene: Scene) -> None:
    """The database's clock alone is wrong for a while, by more than is allowed, and by more than any lease lasts; then
    it is right again, and some time later that time has really come, so that nothing stays done ahead of its time."""
    by, lasts = timedelta(minutes=scene.chance.uniform(10.5, 20)), 1.0
    scene.clock.advance(by)
    scene.struck("database's clock", str(by))
    scene.impairs(lasts + 0.5)

    def undo() -> None:
        scene.clock.advance(-by)
        scene.later(0.5, lambda: scene.move_on(by))

    scene.later(lasts, undo)


def _release(scene: Scene) -> None:
    held = (
        scene.connection()
        .execute("select job, slot, fence from gaffer.job_lease where lease_id is not null")
        .fetchall()
    )
    if held:
        job, slot, fence = scene.chance.choice(sorted(held))
        with suppress(JobHeldError):  # it is just committing
            if operations.release(scene.connection(), job, slot, CHAOS, fence):
                scene.struck("release", f"fence {fence}", job)


TABLE: dict[str, Fault] = {
    "stop": Fault(_stop, 12),
    "stop at a station": Fault(_stop_at_a_place, 8),
    "stop before COMMIT": Fault(_stop_before_commit, 4),
    "kill": Fault(_kill, 6),
    "kill at a station": Fault(_kill_at_a_place, 5),
    "terminate": Fault(_terminate, 30),
    "cut": Fault(_cut, 18),
    "release": Fault(_release, 14),
    "double tick": Fault(_double_tick, 2),
    "pooler restart": Fault(_pooler_restart, 1, "pooler"),
    "network drop": Fault(_network_drop, 0.5, "network"),
    "server crash": Fault(_crash, 0.3),
    "clock forth": Fault(_clock_forth, 2),
    "clock back": Fault(_clock_back, 1.5),
    "database's clock": Fault(_other_clocks, 0.7),
    # Drawn far more often than it strikes: a run takes seconds to be there, and a few at once are launched.
    "kill a run of Dagster's": Fault(dagster_faults.kill_run, 144, "dagster"),
    "kill a step of Dagster's": Fault(dagster_faults.kill_step, 96, "dagster"),
    "kill the run of a step": Fault(dagster_faults.orphan_step, 144, "dagster"),
    "kill the run of a step, stop the step": Fault(dagster_faults.stop_orphaned_step, 144, "dagster"),
    "stop a run of Dagster's": Fault(dagster_faults.stop_run, 144, "dagster"),
    "terminate a run of Dagster's": Fault(dagster_faults.terminate_run, 144, "dagster"),
    "kill a daemon": Fault(dagster_faults.kill_daemon, 24, "dagster"),
    "stop a daemon": Fault(dagster_faults.stop_daemon, 24, "dagster"),
}
KINDS = [kind for name in TABLE for kind in (CUTS if name == "cut" else [name])]
"""All that is ever counted."""
