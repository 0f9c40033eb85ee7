"""What is done to Dagster's processes. A run to be struck is launched for that, and waits until its job is free."""

from __future__ import annotations

import signal
from collections.abc import Callable

from gaffer_dagster.engine.steps import Station
from tests.evidence.chaos.dagsters import Dagster
from tests.evidence.chaos.orders import Order
from tests.evidence.chaos.scene import Scene
from tests.support.processes import WORKING

_PLACES = [WORKING] * 4 + [str(Station.LEASED), str(Station.DUE), str(Station.APPLIED), str(Station.COMMITTED)]


def _launched(
    name: str, *, by_button: bool | None = None, kills: str | None = None, stops: bool = False, waits: bool = False
) -> Callable[[Scene], None]:
    """`by_button`: whether the work is done by a step's process; None: by chance."""

    def strike(scene: Scene) -> None:
        chance = scene.chance
        order = Order(WORKING if waits else chance.choice(_PLACES), kills, stops, waits)
        _of(scene).launch(name, order, by_button=chance.random() < 0.5 if by_button is None else by_button)

    return strike


kill_run = _launched("kill a run of Dagster's", by_button=False, kills="self")
kill_step = _launched("kill a step of Dagster's", by_button=True, kills="self")
orphan_step = _launched("kill the run of a step", by_button=True, kills="parent")
stop_orphaned_step = _launched("kill the run of a step, stop the step", by_button=True, kills="parent", stops=True)
stop_run = _launched("stop a run of Dagster's", stops=True)
terminate_run = _launched("terminate a run of Dagster's", waits=True)


def _of(scene: Scene) -> Dagster:
    assert scene.dagster is not None
    return scene.dagster


def kill_daemon(scene: Scene) -> None:
    if daemon := _of(scene).a_daemon():
        _of(scene).kill_daemon(daemon, scene.chance.uniform(0.5, 5))
        scene.struck("kill a daemon")


def stop_daemon(scene: Scene) -> None:
    if daemon := _of(scene).a_daemon():
        daemon.send_signal(signal.SIGSTOP)
        scene.struck("stop a daemon")
        scene.later(scene.chance.uniform(2, 10), lambda: daemon.send_signal(signal.SIGCONT))
