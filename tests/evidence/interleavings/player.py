"""Plays schedules: says who goes next, moves the clock, strikes with the fault, and waits until all stand again."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from datetime import timedelta

import psycopg

from tests.evidence.interleavings.cases import Case, Fault
from tests.evidence.interleavings.database import Database
from tests.evidence.interleavings.gate import Actor, Gate, Runner, State
from tests.evidence.interleavings.judge import judged


class Player:
    """Of one case, one schedule after the other. `trace`: the newest one's steps."""

    def __init__(self, url: str, case: Case) -> None:
        self.case = case
        self.trace: list[str] = []
        self.blocked = 0
        self._database = Database(url, variant=case.variant, inside=case.inside)
        self._gate = Gate(self._database)
        self._pace = 0.001  # how long a step takes

    def close(self) -> None:
        self._gate.close()
        self._database.close()

    def play(self, choose: Callable[[int], int]) -> dict[str, str]:
        """One schedule; which promises it broke, each with how. `choose` is asked which of so many goes on."""
        self._begin()
        left = self.case.fault
        clock_may_move = self.case.expiry == "once"
        self._settle()
        while True:
            ready = [each for each in self._gate.actors if each.state in (State.STANDING, State.INSIDE)]
            if not ready:
                if all(each.state is State.OVER for each in self._gate.actors):
                    break
                self._wait_for_the_blocked()
                continue
            options: list[Callable[[], None]] = [lambda each=each: self._go(each) for each in ready]
            if clock_may_move:
                options.append(self._move_clock)
            if left is Fault.RESTORE:
                options.append(self._restore)
            elif left is not Fault.NONE:
                options += [
                    lambda each=each: self._strike(each)
                    for each in self._gate.runners
                    if each.state is not State.OVER and each.on is not None
                ]
            chosen = choose(len(options)) if len(options) > 1 else 0
            if chosen >= len(ready):
                if clock_may_move and chosen == len(ready):
                    clock_may_move = False
                else:
                    left = Fault.NONE
            options[chosen]()
            self._settle()
        return judged(self.case, self._gate)

    def _begin(self) -> None:
        self.trace, self._gate.actors = [], []
        self._gate.stops = None if self.case.every_message else self.case.stops
        self._database.reset()
        if self.case.fault is Fault.RESTORE:
            self._database.back_up()
        for number, work in enumerate(self.case.runners, 1):
            self._gate.starts(number, work)

    # ── until all stand ──────────────────────────────────────────────────────────────────────────────────────────

    def _settle(self) -> None:
        """Until everybody stands, is blocked, or is through."""
        patience = time.monotonic() + 60
        began, soon = time.monotonic(), (1 if self.case.inside else 4) * self._pace
        while True:
            moving = [each for each in self._gate.actors if each.state is State.MOVING]
            if not moving:
                return
            assert time.monotonic() < patience, f"nobody knows what {moving} does: {self.trace}"
            try:
                runner, state = self._gate.events.get(timeout=soon)
                self._halts(runner, state)
                self._pace += 0.1 * (min(0.01, time.monotonic() - began) - self._pace)
            except queue.Empty:
                self._look_at(moving)

    def _halts(self, actor: Actor, state: State) -> None:
        """It was seen to be blocked while this one still moved, and may be free since."""
        actor.state = state
        self._wake_the_blocked()

    def _wake_the_blocked(self) -> None:
        for each in self._gate.actors:
            if each.state is State.BLOCKED:
                each.state = State.MOVING

    def _look_at(self, moving: list[Actor]) -> None:
        seen = self._database.look_at(
            [each.pid for each in moving if each.pid is not None],
            [each.pid for each in self._gate.actors if each.pid is not None and each.state is not State.OVER],
        )
        for each in moving:
            is_there, stop, is_blocked = seen.get(each.pid, (True, None, False))
            if not self._gate.events.empty():
                return  # what was seen may be old
            if not is_there and not isinstance(each, Runner):
                self._halts(each, State.OVER)
            elif stop is not None:
                each.stop = stop
                self._halts(each, State.INSIDE)
            elif is_blocked:
                each.state = State.BLOCKED
                if not each.was_blocked:
                    each.was_blocked = True
                    self.blocked += 1
                    self.trace.append(f"({each.name} blocked)")

    def _wait_for_the_blocked(self) -> None:
        """They wait for each other: the server will say to whom that is too long."""
        self._wake_the_blocked()
        time.sleep(0.05)
        self._settle()

    # ── one step ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _moves(self, actor: Actor) -> None:
        actor.state, actor.was_blocked = State.MOVING, False
        self._wake_the_blocked()  # this may be what they wait for

    def _go(self, actor: Actor) -> None:
        if actor.state is State.INSIDE:
            self.trace.append(f"{actor.name} goes on")
            self._moves(actor)
            self._database.lets_go(actor.number, actor.stop)
            return
        assert isinstance(actor, Runner)
        self.trace.append(f"{actor.name} {actor.message}")
        if self.case.expiry == "expired" and actor.message == "acquire":
            self._database.advance(timedelta(seconds=61))
        self._moves(actor)
        actor.go()

    def _move_clock(self) -> None:
        self.trace.append("the clock moves on")
        self._database.advance(timedelta(seconds=61))

    def _strike(self, runner: Runner) -> None:
        fault = self.case.fault
        self.trace.append(f"{fault} {runner.number}" + (f" at {runner.message}" if self.case.inside else ""))
        was, stop = runner.state, runner.stop
        is_idle = runner.on is not None and runner.on.info.transaction_status is psycopg.pq.TransactionStatus.IDLE
        ghost = Actor(runner.number, runner.pid)
        if fault is Fault.TERMINATE:
            self._database.terminate([runner.pid])
            self._gate.actors.append(ghost)
            runner.pid = None
            self._moves(ghost)
            if was is not State.STANDING:
                runner.state = State.MOVING
            elif is_idle:  # it holds nothing: when it is struck before it goes on is the same to everybody
                self._settle()
                self._go(runner)
        elif fault is Fault.LOSE and was is State.STANDING:
            runner.loses = True
            self._moves(runner)
            runner.go()
        else:
            runner.dead = fault is Fault.KILL
            self._gate.actors.append(ghost)
            ghost.state, ghost.stop = (State.MOVING, 0) if was is State.STANDING else (was, stop)
            runner.pid = None
            self._moves(runner)
            runner.cut()
            if was is State.STANDING:
                runner.go()

    def _restore(self) -> None:
        """All that the schedule has committed is lost, and all who are connected lose their connection."""
        self.trace.append("restore")
        self._database.terminate(
            [each.pid for each in self._gate.actors if each.state is not State.OVER and each.pid is not None]
        )
        for each in list(self._gate.actors):
            if isinstance(each, Runner):
                each.acked.clear()
                if each.pid is not None and each.state is not State.OVER:
                    self._gate.actors.append(Actor(each.number, each.pid))
                    each.pid = None
            if each.state in (State.INSIDE, State.BLOCKED):
                each.state = State.MOVING
        self._settle()
        self._database.restore()
