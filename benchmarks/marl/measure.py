"""Measure a multi-agent training while it runs, or its actor alone."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from jurybox.training.algorithms.registry import make
from jurybox.training.algorithms.served import raw_network
from jurybox.training.interrupts import Signals
from jurybox.training.runtime.plan import Kind
from jurybox.training.runtime.role_context import RoleContext
from jurybox.training.runtime.run import run
from jurybox.training.runtime.scoreboard import Word
from jurybox.training.runtime.shared_resources import SharedResources
from jurybox.training.runtime.turns import Rules, make_turn
from jurybox.training.trainings.marl import MarlTraining, plan

_NEVER = 10**9


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurements of a window.

    Attributes:
        turns: of the actor, a second. learner_steps: of every learner, a second.
        processes_mb: memory of all the run's processes, shared pages counted once (Pss).
        shared_mb: of it, the size of replays and weights channels.
        lag: publications that the actor was behind at the end.
    """

    turns: float
    learner_steps: tuple[float, ...] = ()
    processes_mb: float = 0.0
    shared_mb: float = 0.0
    lag: int = 0


class _Nothing:
    def scalars(self, step: int, values: Mapping[str, float]) -> None: ...


def settings(agents: int, **changes: Any) -> MarlTraining:
    """A training whose actor always uses the network, and never ends by itself."""
    world: dict[str, Any] = {"turns": 100}
    if agents > 8:
        world |= {"height": 41, "width": 41}
    values: dict[str, Any] = {
        "algorithm": "dqn",
        "agents": agents,
        "steps": _NEVER,
        "exploration_initial_eps": 0.05,
        "env_args": world,
    }
    return MarlTraining(**(values | changes))


def alone(agents: int, seconds: float) -> Measured:
    """The actor in this process, with published weights and no learner anywhere."""
    asked = settings(agents)
    planned = plan(asked)
    with SharedResources.create(planned) as shared:
        (actor,) = planned.of_kind(Kind.ACTOR)
        for number, (group, made) in enumerate(planned.roles[actor].settings["algorithms"].items()):
            with shared.publisher(group) as publisher:
                publisher.publish(raw_network(make(**made), number), {"updates": 10**9})
        turn = make_turn(
            RoleContext(planned, actor, shared, lambda message: None), Rules(planned, shared.scoreboard, None), None
        )
        try:
            _for(turn, seconds / 4)
            return Measured(_for(turn, seconds))
        finally:
            turn.close()


def _for(turn: Any, seconds: float) -> float:
    """Turns a second, taken as a process of a run takes them."""
    began, count = time.monotonic(), 0
    while time.monotonic() - began < seconds:
        if turn.may():
            turn.take()
            turn.context.alive()
            turn.context.report()
            count += 1
    return count / (time.monotonic() - began)


def training(asked: MarlTraining, seconds: float) -> Measured:
    """The whole run in its processes: `seconds` long, from a while after every learner's first step."""
    planned, signals = plan(asked), Signals()
    learners = planned.of_kind(Kind.LEARNER)
    seen: list[tuple[float, int, list[int]]] = []
    found: list[Measured] = []
    settle = 3.0
    learning_since: list[float] = []

    def watch(shared: SharedResources) -> None:
        scoreboard, now = shared.scoreboard, time.monotonic()
        steps = [scoreboard.words[number][Word.LEARNER_STEPS] for number in learners]
        if not learning_since:
            if min(steps) > 0:
                learning_since.append(now)
            return
        if now - learning_since[0] < settle or found:
            return
        if not seen:
            seen.append((now, scoreboard.env_steps, steps))
            return
        began, turns, before = seen[0]
        if now - began < seconds:
            return
        span = now - began
        (actor,) = planned.of_kind(Kind.ACTOR)
        pids = [scoreboard.words[number][Word.PID] for number in range(len(planned.roles))]
        own = [psutil.Process(), *(psutil.Process(pid) for pid in pids)]
        nbytes = sum(shared.replay(each.name).nbytes for each in planned.replays)
        nbytes += sum(len(shared.channel(each.name).segment.buffer) for each in planned.channels)
        found.append(
            Measured(
                (scoreboard.env_steps - turns) / span,
                tuple((after - step) / span for after, step in zip(steps, before, strict=True)),
                sum(process.memory_full_info().pss for process in own) / 2**20,
                nbytes / 2**20,
                scoreboard.words[actor][Word.LAG],
            )
        )
        signals.ask()

    with tempfile.TemporaryDirectory(prefix="marl-bench-") as folder:
        outcome = run(planned, Path(folder), _Nothing(), signals=signals, watch=watch)
    if not found:
        raise RuntimeError(f"the run ended before it was measured: {outcome.text}")
    return found[0]
