"""A very small training: actors add numbered rows, a learner adds up its samples.

The weights are one float; each learner step moves it by the mean of a batch. Every attempt of an actor's step is a line
in its own file before anything else happens, so that the counts can be compared with the work done.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from pathlib import Path

import numpy as np

from jurybox.protocol.weights import WeightsLayout
from jurybox.training.replay import Field
from jurybox.training.runtime.plan import Budget, ChannelSpec, Kind, Pace, Plan, ReplaySpec, RoleSpec
from jurybox.training.runtime.role_context import Actor, Evaluator, Learner
from jurybox.training.runtime.scoreboard import Subject

HERE = "tests.unit.runtime.toys"


class ArrayWeights:
    """What a policy without torch follows."""

    def __init__(self, reader):
        self.reader, self.version, self.state, self.extra = reader, 0, reader.buffers(), {}

    def refresh(self, timeout=1.0):
        if not self.reader.newer_than(self.version):
            return False
        self.state, self.version, self.extra = self.reader.read(out=self.state, timeout=timeout)
        return True


class Walker(Actor):
    """Adds one row a step: a random number plus the policy's; an episode is ten steps."""

    def __init__(self, context, trail=None, pause=0.0, fail_at=None, hang_at=None, hangs=1, fork_at=None, child=None):
        super().__init__(context)
        self.random = np.random.default_rng(context.seed)
        self.weights = ArrayWeights(context.reader())
        context.follow("policy", self.weights)
        self.rows = context.replay()
        self.trail = None if trail is None else os.open(trail, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.pause, self.fail_at, self.hang_at, self.hangs = pause, fail_at, hang_at, hangs
        self.fork_at, self.child = fork_at, child
        self.made, self.total = 0, 0.0

    def step(self):
        if self.trail is not None:
            os.write(self.trail, f"{self.context.life} {self.made}\n".encode())
        if self.fail_at is not None and self.made >= self.fail_at:
            raise RuntimeError("told to fail")
        if self.hang_at is not None and self.made >= self.hang_at and self.context.life <= self.hangs:
            time.sleep(3600)
        if self.fork_at is not None and self.made >= self.fork_at and self.context.life == 1:
            self.die_and_leave_a_child()
        if self.pause:
            time.sleep(self.pause)
        value = self.random.standard_normal() + float(self.weights.state["w"][0])
        self.rows.add(value=value, version=self.weights.version)
        self.made += 1
        self.total += value
        if self.made % 10 == 0:
            self.context.episode(total=self.total, length=10)
            self.total = 0.0
        return 1

    def die_and_leave_a_child(self):
        """Like a killed role whose environments run in processes that it forked, which hold its files open."""
        if pid := os.fork():
            Path(self.child).write_text(str(pid))
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(3600)

    def save(self):
        return {"random": self.random.bit_generator.state, "made": self.made, "total": self.total}

    def restore(self, state):
        self.random.bit_generator.state = state["random"]
        self.made, self.total = state["made"], state["total"]


class Summer(Learner):
    """w += 0.01 mean(batch); the draws depend on the seed and the step alone."""

    def __init__(self, context, trail=None, pause=0.0, fail=False, longest_file=None):
        super().__init__(context)
        if longest_file is not None:  # like a disk that is full
            resource.setrlimit(resource.RLIMIT_FSIZE, (longest_file, longest_file))
        self.longest_file = longest_file
        self.replay = context.replay()
        self.w = np.zeros(3)
        self.adopted = 0
        self.trail, self.pause = trail, pause
        if fail:
            raise RuntimeError("told to fail at once")

    def ready(self):
        return len(self.replay) >= 8

    def step(self):
        if self.trail is not None:
            with Path(self.trail).open("a") as file:
                file.write(f"{self.context.life}\n")
        if self.pause:
            time.sleep(self.pause)
        self.replay.seed(self.context.plan.seed + self.context.own_steps)
        self.w += 0.01 * self.replay.sample(8)["value"].mean()
        self.context.metrics(loss=abs(self.w[0]))

    def publication(self):
        return {"w": self.w}, {"steps": self.context.own_steps}

    def adopt(self, published):
        state, self.adopted, _ = published.read()
        self.w = state["w"].copy()

    def save(self):
        return {"w": self.w, "long": np.zeros(self.longest_file or 0, np.uint8)}

    def restore(self, state):
        self.w = state["w"].copy()


class Waiter(Learner):
    """Is never ready."""

    def ready(self):
        return False

    def step(self):
        raise AssertionError("it is never ready")


class Judge(Evaluator):
    """Reports its weights; its score is best for version 12. It is slow: the learner continues meanwhile."""

    def __init__(self, context, pause=0.0, nan_until=0):
        super().__init__(context)
        self.weights = ArrayWeights(context.reader())
        context.follow("policy", self.weights)
        self.pause, self.nan_until = pause, nan_until

    def evaluate(self):
        w, version = float(self.weights.state["w"][0]), self.weights.version
        if self.pause:
            time.sleep(self.pause)
        liking = float("nan") if version < self.nan_until else -abs(version - 12)
        return {"w": w, "version": version, "liking": liking}


class Alone(Actor):
    """Needs only the run's count; waits for an external event if configured."""

    def __init__(self, context, wait=0.0):
        super().__init__(context)
        self.wait = wait

    def step(self):
        if self.wait:
            end = time.monotonic() + self.wait
            self.context.wait_until(lambda: time.monotonic() > end, Subject.OUTSIDE, timeout=self.wait + 1)
        return 1


class Rows(list):
    """A sink that keeps what comes."""

    def scalars(self, step, values):
        self.append((step, dict(values)))


def plan(
    steps=300,
    actors=1,
    actor=None,
    learner=None,
    collect=2,
    learn=1,
    warmup=20,
    slack=100,
    evaluate=0,
    judge=None,
    **more,
):
    """A run of the toys; `actor`, `learner` and `judge` are their settings."""
    roles = [
        RoleSpec(f"actor-{i}", Kind.ACTOR, f"{HERE}:Walker", actor or {}, writes=("rows",), reads=("policy",))
        for i in range(actors)
    ]
    roles.append(
        RoleSpec(
            "learner",
            Kind.LEARNER,
            f"{HERE}:Summer",
            learner or {},
            samples=("rows",),
            publishes="policy",
            publish_every=5,
        )
    )
    if evaluate:
        make = f"{HERE}:Judge"
        roles.append(RoleSpec("judge", Kind.EVALUATOR, make, judge or {}, reads=("policy",), evaluate_every=evaluate))
    budget = more.pop("budget", Budget(steps=steps))
    pace = Pace(
        train_freq=collect, gradient_steps=learn, learning_starts=warmup, max_ahead=slack, free=more.pop("free", False)
    )
    return Plan(
        roles=tuple(roles),
        replays=(ReplaySpec("rows", 100_000, {"value": Field((), "float64"), "version": Field((), "int64")}),),
        channels=(ChannelSpec("policy", WeightsLayout.of({"w": np.zeros(3)})),),
        pace=pace,
        budget=budget,
        **more,
    )
