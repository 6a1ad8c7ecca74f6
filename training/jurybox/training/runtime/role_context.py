"""What a role is written against: the base classes `Actor`, `Learner`, `Evaluator` and `Trainer`, and the
`RoleContext` they are given.

A role is made by the callable that its `RoleSpec.make` names: ``make(context, **settings)``. It takes what it needs
from its `RoleContext`: replays, weights, a seed, a place to report. It never starts a process, opens shared memory or
waits on its own. The driver does that, so that every wait can be counted, shown and ended.
"""

from __future__ import annotations

import json
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from jurybox.protocol.weights.publisher import Publisher
from jurybox.protocol.weights.reader import State as Arrays
from jurybox.protocol.weights.reader import Weights, WeightsReader
from jurybox.training.checkpoints import EVALUATION, Checkpoints, write_atomically, write_state
from jurybox.training.replay import Replay
from jurybox.training.runtime.plan import Kind, Plan, RoleSpec
from jurybox.training.runtime.scoreboard import AT_REST, INTERVALS, ControlWord, Order, State, Subject, Word
from jurybox.training.runtime.shared_resources import SharedResources

Message = dict[str, Any]

INCARNATIONS = 1 << 23  # that can be told apart
_POLL_SECONDS = 0.001
_REST_SECONDS = 0.01  # between two looks while waiting at rest: a thousand looks a second take some percent of a core
_REPORT_SECONDS = 0.5
_LONG_RESET_NS = 1_000_000_000  # after which others may have begun to wait
_SHORT_WAIT_NS = 100_000  # shorter ones are counted and not drawn
_MOST_EPISODES = 512  # in one report


class Abandoned(Exception):
    """The run stops, and a role leaves the step that it is in; `RoleContext.goes_on` raises it for the driver."""


class Diverged(ValueError):
    """A learner's numbers are not finite any more."""


def check_losses(metrics: Mapping[str, Any], who: str = "the learner") -> None:
    """Check that a learner's losses are finite: the metrics whose names have "loss" in them; `who` has them.

    Raises:
        Diverged: one is not.
    """
    for name, value in metrics.items():
        if "loss" in name and not np.isfinite(float(value)):
            raise Diverged(
                f"{name} is {float(value)}: {who} has diverged. Lower its learning_rate, or bound rewards and "
                "observations; checkpoints/best and the checkpoints are from before"
            )


class Refreshable(Protocol):
    """Keeps itself at the newest weights, such as `roles.local_policy.TorchWeights`."""

    version: int

    def refresh(self, timeout: float = 1.0) -> bool:
        """Load the newest publication if it is newer; returns whether it was. Raises Timeout."""


class CachedReader(WeightsReader):
    """A reader that keeps a copy of what it read last: an evaluator's, whose weights may turn out to be the best.

    Attributes:
        kept: None before the first.
    """

    kept: Weights | None = None

    def read(self, *, timeout: float = 1.0, out: Arrays | None = None) -> Weights:
        found = super().read(timeout=timeout, out=out)
        copied = {name: array.copy() for name, array in found.state.items()}
        self.kept = Weights(copied, found.version, found.extra)
        return found

    def read_flat(self, out: npt.NDArray[np.uint8], *, timeout: float = 1.0) -> tuple[int, dict[str, Any]]:
        version, extra = super().read_flat(out, timeout=timeout)
        self.kept = Weights(self.layout.views(out.copy()), version, extra)
        return version, extra


class RoleContext:
    """The interface of a driver to its role.

    Args:
        number: index of the role in the plan.
        shared: of the run, as this process sees it. It stays the driver's to close.
        send: takes reports: episodes, metrics, warnings. Must not block for long.
        certainly: takes what must not be dropped, however long that takes; `send` without it.
        life: 1 for the first process of this role, one more for each restart.
        folders: the run's on this machine; None: the plan's own.
        evaluated: folder for weights that an evaluation likes best; None: they are not kept.
        beat: what a driver in the same process does in between, within a long step.
        report_every: seconds between two reports, at least; 0: each is sent at once, so that no clock decides what is
            reported together.

    Attributes:
        spec: the role's part of the plan.
        name: of the role.
        life: as above.
        seed: derived from the plan's seed, the role and its life; who comes after a killed one does not repeat it, also
            in a resumed run.
        incarnation: 0 in the first life, then 23 bits of the seed, to mark rows that do not follow another life's.
    """

    def __init__(
        self,
        plan: Plan,
        number: int,
        shared: SharedResources,
        send: Callable[[Message], None],
        *,
        life: int = 1,
        folders: Mapping[str, str] | None = None,
        evaluated: Path | None = None,
        certainly: Callable[[Message], None] | None = None,
        beat: Callable[[], None] = lambda: None,
        report_every: float = _REPORT_SECONDS,
    ) -> None:
        self.plan = plan
        self.number = number
        self.spec: RoleSpec = plan.roles[number]
        self.name = self.spec.name
        self.life = life
        self.shared = shared
        self._folders = {**plan.folders, **(folders or {})}
        self.scoreboard = shared.scoreboard
        self.words = self.scoreboard.words[number]
        # Lives are counted anew when a run is resumed, the steps are not.
        lived = [] if life == 1 else [int(self.words[Word.ENV_STEPS])]
        self.seed = int(np.random.SeedSequence([plan.seed, number, life, *lived]).generate_state(1, np.uint64)[0] >> 1)
        self.incarnation = 0 if life == 1 else self.seed % INCARNATIONS
        self.uncounted = 0  # steps of a learner that the scoreboard does not show yet
        self.followed: list[tuple[str, WeightsReader, Refreshable]] = []
        self._orders = self.scoreboard.orders[number]
        self._send, self._send_reliably = send, certainly or send
        self._beat, self._report_every = beat, report_every
        evaluates = self.spec.kind in (Kind.EVALUATOR, Kind.TRAINER) and plan.best is not None
        self._evaluated = evaluated if evaluates else None
        self._cached: dict[str, CachedReader] = {}
        self._timeline = self.scoreboard.timeline[number]
        self._mark = self._busy_from = time.monotonic_ns()
        self._episodes: list[dict[str, float]] = []
        self._sums: dict[str, tuple[float, int]] = {}
        self._reported = time.monotonic()

    def replay(self, name: str | None = None) -> Replay:
        """Return the replay of that name; by default the only one in the role's spec."""
        return self.shared.replay(name or _single((*self.spec.writes, *self.spec.samples), "replay", self.name))

    def reader(self, name: str | None = None) -> WeightsReader:
        """Return a reader of the weights channel of that name; by default of the only one that the role reads."""
        name = name or _single(self.spec.reads, "weights channel", self.name)
        if self._evaluated is None:
            return self.shared.reader(name)
        return self._cached.setdefault(name, CachedReader(self.shared.channel(name)))

    def folder(self, name: str) -> Path:
        """The run's folder of that name on this machine; files of roles on other machines arrive later."""
        return Path(self._folders[name])

    def publisher(self) -> Publisher:
        """The publisher of the role's channel, for the driver."""
        assert self.spec.publishes is not None
        return self.shared.publisher(self.spec.publishes)

    def follow(self, name: str, weights: Refreshable) -> None:
        """Make the driver refresh `weights` before an actor's steps and an evaluator's evaluations.

        In between, every `sync_every` steps; at once when the role is more than `max_lag` publications behind.
        """
        self.followed.append((name, self.shared.reader(name), weights))

    @property
    def worker_index(self) -> int:
        """Number of this role among those that have environments: actors from 1 on, trainers, evaluators."""
        players = [n for kind in (Kind.ACTOR, Kind.TRAINER, Kind.EVALUATOR) for n in self.plan.of_kind(kind)]
        return 1 + players.index(self.number)

    @property
    def env_steps(self) -> int:
        """Environment steps of the whole run."""
        return self.scoreboard.env_steps

    @property
    def own_steps(self) -> int:
        """Steps of this role, over all restarts: learner steps of a learner, environment steps of others."""
        return self.words[Word.ENV_STEPS] or self.words[Word.LEARNER_STEPS] + self.uncounted

    @property
    def own_episodes(self) -> int:
        """Episodes that this role has reported, over all restarts."""
        return int(self.words[Word.EPISODES])

    def episode(self, *, total: float, length: int, **numbers: float) -> None:
        """Report an episode with its return; further numbers get columns of their own."""
        self.words[Word.EPISODES] += 1
        if len(self._episodes) < _MOST_EPISODES:
            self._episodes.append({"return": float(total), "length": float(length), **numbers})

    def metrics(self, **numbers: float) -> None:
        """Report numbers; a row of metrics has their mean since the last one.

        Raises:
            Diverged: a learner or trainer reports a loss ("loss" is in its name) that is not finite.
        """
        if self.spec.kind.learns:
            check_losses(numbers, self.spec.name)
        for name, value in numbers.items():
            total, count = self._sums.get(name, (0.0, 0))
            self._sums[name] = (total + float(value), count + 1)

    def say(self, text: str) -> None:
        """Print a line to the console and the log of the run."""
        self._send({"kind": "said", "text": text})

    def report(self, *, now: bool = False) -> None:
        """Send collected reports, at most every `report_every` seconds unless `now`; called after every step."""
        moment = time.monotonic()
        if not now and moment - self._reported < self._report_every:
            return
        self._reported = moment
        if self._episodes or self._sums:
            self._send({"kind": "report", "episodes": self._episodes, "metrics": self._sums})
            self._episodes, self._sums = [], {}

    def evaluated(
        self,
        env_steps: int,
        numbers: dict[str, float],
        own: tuple[Mapping[str, Any], dict[str, Any] | None] | None = None,
    ) -> None:
        """Report an evaluation; if it is the best so far, its weights are saved.

        Args:
            own: of a trainer that evaluated itself: state_dict and extra, as of `Publishes.publication`; None: what
                the role's readers read last.
        """
        message: Message = {"kind": "evaluation", "env_steps": env_steps, "numbers": numbers}
        if self._evaluated is not None and numbers.get(str(self.plan.best), math.nan) > self.scoreboard.best:
            kept = {name: reader.kept for name, reader in self._cached.items() if reader.kept is not None}
            if own is not None and self.spec.publishes is not None:
                kept[self.spec.publishes] = Weights(dict(own[0]), int(self.words[Word.VERSION]), own[1] or {})
            message |= self._write_weights(self._evaluated, env_steps, numbers, kept)
        self._send_reliably(message)

    def forget_best(self) -> None:
        """Let the next evaluation of this run be its best one, whatever it finds."""
        self.scoreboard.set_best(-math.inf)

    def _write_weights(
        self, parent: Path, env_steps: int, numbers: dict[str, float], kept: Mapping[str, Weights]
    ) -> Message:
        if not kept:
            return {"unkept": f"{self.name} took no weights from a reader of its context (context.reader())"}
        checkpoints = Checkpoints(parent)
        folder: Path | None = None
        try:
            folder = checkpoints.begin()
            for name, weights in kept.items():
                whole = {"state": weights.state, "version": weights.version, "extra": weights.extra}
                write_state(folder / f"weights-{name}.state", whole)
            self.plan.write_policy(folder, (weights.extra for weights in kept.values()))
            versions = {name: weights.version for name, weights in kept.items()}
            document = {"env_steps": env_steps, "numbers": numbers, "versions": versions}
            write_atomically(folder / EVALUATION, json.dumps(document, indent=1))
        except OSError as error:
            if folder is not None:
                checkpoints.abandon(folder)
            return {"unkept": f"{self.name} could not write them: {error}"}
        return {"kept": str(folder)}

    @property
    def order(self) -> Order:
        """The current order; one load from shared memory."""
        return Order(self._orders[ControlWord.ORDER])

    def begin(self) -> None:
        """Mark the role as running; the start is not counted as work."""
        self._mark = self._busy_from = time.monotonic_ns()
        self.words[Word.READY_AT] = self._mark
        self.words[Word.WAITS_FOR] = Subject.NOTHING
        self.words[Word.DONE] = self.words[Word.UNREADY] = self.words[Word.RESETS_SINCE] = 0
        self.enter(State.RUNNING)

    def enter(self, state: State) -> None:
        """Set the state."""
        self.alive()
        self.words[Word.STATE] = state

    def alive(self) -> None:
        """Send a heartbeat and update the accounted time; drivers call it after every step."""
        now = time.monotonic_ns()
        self.words[Word.BUSY] += now - self._mark
        self.words[Word.HEARTBEAT] = now
        self._mark = now

    def goes_on(self, env_steps: int = 0) -> bool:
        """Whether a long step may go on; a trainer asks after everything that it does in one.

        It is a sign of life, and in a serial run the moment in which everything else happens. Where the time is up, the
        step should end with what it has made.

        Args:
            env_steps: those of this step so far, to be shown.

        Raises:
            Abandoned: the run stops: nothing of this step counts. Let it pass.
        """
        self.words[Word.UNDER_WAY] = env_steps
        self.alive()
        self.report()
        self._beat()
        if self.order is Order.STOP:
            raise Abandoned
        return not self._orders[ControlWord.CLOSING]

    def stops(self) -> bool:
        """Whether the run waits for the end of this step, to pause or to end. Any thread may ask, within a step."""
        self._beat()
        return self.order is not Order.RUN or bool(self._orders[ControlWord.CLOSING])

    @contextmanager
    def resetting(self) -> Iterator[None]:
        """Within this ``with`` block an environment is reset: nobody counts the time as silence, or as waiting for it.

        It has a time-out of its own, `Timeouts.reset`.
        """
        self.words[Word.RESETS_SINCE] = began = time.monotonic_ns()
        try:
            yield
        finally:
            self.words[Word.RESETS_SINCE] = 0
            if time.monotonic_ns() - began > _LONG_RESET_NS:
                self.rests()

    def rests(self) -> None:
        """Send a heartbeat while somebody else does what this role would; nobody counts as waiting for it."""
        self.alive()
        self.words[Word.MOVED_AT] = self._mark

    def wait_until(self, holds: Callable[[], bool], subject: Subject, which: int = 0, timeout: float = 1.0) -> bool:
        """Wait until `holds()`, an order, or the timeout; returns whether it holds.

        Meanwhile the scoreboard shows what the role waits for, and heartbeats continue.
        """
        if holds():
            return True
        self.alive()
        began, words = self._mark, self.words
        code = subject << 32 | which
        if words[Word.WAITS_FOR] != code:  # else it is the same wait that goes on
            words[Word.WAITS_SINCE] = began
            words[Word.WAITS_FOR] = code
        end = time.monotonic() + timeout
        order, pause = self.order, _REST_SECONDS if subject in AT_REST else _POLL_SECONDS
        while not (held := holds()) and self.order == order and time.monotonic() < end:
            time.sleep(pause)
            words[Word.HEARTBEAT] = time.monotonic_ns()
            self.report()
        self._record_wait(began, time.monotonic_ns(), subject, keeps_waiting=not held and self.order == order)
        return held

    def _record_wait(self, began: int, now: int, subject: Subject, *, keeps_waiting: bool) -> None:
        words = self.words
        words[Word.WAITED] += now - began
        words[Word.HEARTBEAT] = self._mark = now
        if not keeps_waiting:
            words[Word.WAITS_FOR] = Subject.NOTHING
        if now - began < _SHORT_WAIT_NS:
            return
        if began - self._busy_from > _SHORT_WAIT_NS:
            self._add_interval(self._busy_from, began, Subject.NOTHING)
        self._add_interval(began, now, subject)
        self._busy_from = now

    def _add_interval(self, start: int, end: int, subject: Subject) -> None:
        count = self.words[Word.INTERVALS]
        self._timeline[count % INTERVALS] = (start, end, subject)
        self.words[Word.INTERVALS] = count + 1

    def finish_timeline(self) -> None:
        """Complete the current interval of the timeline."""
        self.alive()
        if self._mark - self._busy_from > _SHORT_WAIT_NS:
            self._add_interval(self._busy_from, self._mark, Subject.NOTHING)
        self._busy_from = self._mark


def _single(names: tuple[str, ...], what: str, role: str) -> str:
    if len(set(names)) != 1:
        raise ValueError(f"{role} has {len(set(names))} {what}s in its spec: say which ({', '.join(names) or 'none'})")
    return names[0]


class Role:
    """The base class of all roles."""

    def __init__(self, context: RoleContext) -> None:
        self.context = context

    def save(self) -> dict[str, Any]:
        """Everything that `restore` needs, random states included: JSON-able values, arrays, CPU tensors; nested.

        Called between two steps. It must change nothing: the run that goes on is the same as one without checkpoints.
        What cannot be kept (a physics engine in the midst of an episode) is begun anew after `restore`; a restored
        replay ends the episodes that were going on.
        """
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `save` returned, before the first step. Tensors come back as NumPy arrays, tuples as lists."""

    def close(self) -> None:
        """Free resources."""


class Actor(Role, ABC):
    """Acts in environments, and writes transitions to replays."""

    @abstractmethod
    def step(self) -> int:
        """One step (of all its environments, if it has several); returns the number of environment steps.

        They count when this returns; a role that is killed inside has made none. Report episodes that ended with
        ``context.episode(...)``.
        """


class Publishes(Role):
    """What learners and trainers have in common: they publish weights."""

    def publication(self) -> tuple[Any, dict[str, Any] | None]:
        """What to publish: a module, state_dict or dict of arrays of the channel's layout, and the extra with it."""
        raise NotImplementedError(f"{type(self).__name__} publishes nothing: leave RoleSpec.publishes empty")

    def adopt(self, published: WeightsReader) -> None:
        """Load the newest publication of a predecessor that died; the optimiser may start afresh.

        Called after `restore`, and only in a life after the first.
        """


class Learner(Publishes, ABC):
    """Learns from samples, and publishes weights."""

    def ready(self) -> bool:
        """Return whether a step is possible apart from the pace, such as enough rows. Called before every step."""
        return True

    @abstractmethod
    def step(self) -> None:
        """One optimiser step; it counts when this returns. Report numbers with ``context.metrics(...)``."""


class Made(NamedTuple):
    """What a step of a trainer has made."""

    env_steps: int
    gradient_steps: int


class Trainer(Publishes, ABC):
    """Collects and learns by itself, and publishes weights: another library's loop inside a run.

    Example: `jurybox.training.roles.sb3.SB3Trainer`, which runs any model of Stable-Baselines3.
    """

    @abstractmethod
    def step(self) -> Made:
        """Collect, and learn from it: one rollout and its update, say; it counts when this returns.

        Call ``context.goes_on(...)`` in between, and end early if it says so. Report episodes and numbers as actors and
        learners do. A checkpoint waits for the end of the step, for at most ``Timeouts.save`` seconds.
        """


class Evaluator(Role, ABC):
    """Evaluates the newest weights. It has no state: `save` is not called; randomness comes from ``context.seed``."""

    @abstractmethod
    def evaluate(self) -> Mapping[str, float]:
        """Evaluate the current weights; returns numbers by name. Call ``context.alive()`` in a long evaluation."""
