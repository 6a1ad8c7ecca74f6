"""What workers of a cluster hold, and the rows of a worker as a Gymnasium VectorEnv. Does not import Ray."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
from gymnasium.vector import VectorEnv

from jurybox.training.vector.worker import execute


class Lost(Enum):
    """Returned instead of an answer: the worker was replaced, and its environments are new."""

    LOST = "lost"


LOST: Final = Lost.LOST


class Workers(Protocol):
    """Numbered workers, each with an object whose methods can be called.

    Attributes:
        restarts: workers replaced so far.
    """

    restarts: int

    def life(self, worker: int) -> int:
        """Return how often the worker was replaced."""

    def ask(self, worker: int, method: str, *arguments: Any) -> Any:
        """Begin a call; several may be in flight; they run in order. Returns the argument for `answer`."""

    def answer(self, pending: Any) -> Any:
        """Wait for the result; `LOST` if the worker was replaced."""

    def close(self) -> None:
        """End them."""


# What an env worker of a cluster holds for Stable-Baselines3: environments that answer SubprocVecEnv's commands.
#
# Each has its own thread, so the others can render while one waits for its juror. Never imports torch.


Request = tuple[str, Any]  # command and its data, as SubprocVecEnv sends them


class EnvGroup:
    """The object of a worker: environments that answer requests."""

    def __init__(self, makers: Sequence[Callable[[], Any]]) -> None:
        self._environments = [make() for make in makers]
        self._threads = ThreadPoolExecutor(len(makers), thread_name_prefix="environment")

    def answer(self, requests: dict[int, Request]) -> dict[int, Any]:
        """Return answers by environment; a `WorkerFailed` where one raised."""
        under_way = {
            index: self._threads.submit(execute, self._environments[index], *request)
            for index, request in requests.items()
        }
        return {index: each.result() for index, each in under_way.items()}

    def close(self) -> None:
        self._threads.shutdown()
        for environment in self._environments:
            environment.close()


Step = tuple[Any, npt.NDArray[np.float64], npt.NDArray[np.bool_], npt.NDArray[np.bool_], dict[str, Any]]


class WorkerGroups:
    """The object of a worker: numbered vector environments, each for another `WorkerRows`."""

    def __init__(self, makers: Sequence[Callable[[], VectorEnv[Any, Any, Any]]]) -> None:
        self._groups = [make() for make in makers]

    def call(self, group: int, name: str, arguments: tuple[Any, ...]) -> Any:
        """Call a method of a group, or get an attribute."""
        found = getattr(self._groups[group], name)
        return found(*arguments) if callable(found) else found

    def reset(self, group: int, seed: int | None) -> tuple[Any, dict[str, Any]]:
        return self._groups[group].reset(seed=seed)

    def close(self) -> None:
        for env in self._groups:
            env.close()


class WorkerRows(VectorEnv[Any, Any, Any]):
    """The rows of a group of one worker, which belongs to its owner.

    `step_async` and `step_wait` are the halves of `step`, those of `reset` are called likewise: with several such
    environments, a caller acts for one while the others step. A replaced worker has new environments, and the episodes
    of its rows are truncated: they return truncated=True, their last observation, reward 0 and ``info["restarted"]``,
    and the step after that is the reset of the new ones, as after any end of an episode
    (gymnasium.vector.AutoresetMode.NEXT_STEP).

    Args:
        workers: each holds `WorkerGroups`.
        worker, group: numbers of the worker, and of the group there.
        rows: number of its rows.
    """

    def __init__(self, workers: Workers, worker: int, group: int, rows: int) -> None:
        self._workers, self._worker, self._group, self.num_envs = workers, worker, group, rows
        self._life = workers.life(worker)
        self._seed: int | None = None  # the last one that was given
        self._resets_with: int | None = None
        self._pending: list[Any] = []  # the call under way; None: nothing was asked of new environments
        self._last: Any = None  # the last observation
        self._new: tuple[Any, dict[str, Any]] | None = None  # what the reset of new environments returned, to be told

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset all; row i gets `seed` + i, as in Gymnasium."""
        self.reset_async(seed)
        return self.reset_wait()

    def reset_async(self, seed: int | None = None) -> None:
        """Begin to reset all; what a step returns that is under way is dropped."""
        if self._pending and self._pending[0] is not None:
            self._workers.answer(self._pending[0])
        self._seed, self._resets_with, self._new = self._seed if seed is None else seed, seed, None
        self._pending = [self._start_reset(seed)]

    def reset_wait(self) -> tuple[Any, dict[str, Any]]:
        """Return the results of `reset_async`."""
        call, self._pending = self._pending[0], []
        found = self._reset(call, self._resets_with)
        self._last = found[0]
        return found

    def step(self, actions: Any) -> Step:
        """As `gymnasium.vector.VectorEnv.step`."""
        self.step_async(actions)
        return self.step_wait()

    def step_async(self, actions: Any) -> None:
        """Send the rows' actions."""
        if self._pending:
            raise RuntimeError("a step is under way already: receive its results first")
        goes_on = self._new is None and self._workers.life(self._worker) == self._life
        self._pending = [self._ask("call", "step", (actions,)) if goes_on else None]

    def step_wait(self) -> Step:
        """Return the results of `step_async`."""
        if not self._pending:
            raise RuntimeError("expected actions sent before: call step_async first")
        call, self._pending = self._pending[0], []
        never = np.zeros(self.num_envs, np.bool_)
        if self._new is not None:
            (self._last, info), self._new = self._new, None
            return self._last, np.zeros(self.num_envs), never, never.copy(), info
        answer = LOST if call is None else self._workers.answer(call)
        if answer is LOST:
            self._new = self._reset(self._start_reset(None), None)
            return self._last, np.zeros(self.num_envs), never, ~never, {"restarted": ~never}
        step: Step = answer
        self._last = step[0]
        return step

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of the group, or get an attribute; the next step truncates the rows of a new worker."""
        while (answer := self._workers.answer(self._ask("call", name, args))) is LOST:
            pass
        return (answer,)

    def close_extras(self, **kwargs: Any) -> None:
        """Does nothing: the workers belong to their owner."""

    def _ask(self, method: str, *arguments: Any) -> Any:
        return self._workers.ask(self._worker, method, self._group, *arguments)

    def _start_reset(self, seed: int | None) -> Any:
        life = self._workers.life(self._worker)
        if seed is None and life != self._life and self._seed is not None:
            # Of this worker alone, so that a run with the same events is reproducible.
            numbers = (self._seed, self._group, self._worker, life)
            seed = int(np.random.SeedSequence(numbers).generate_state(1)[0])
        self._life = life
        return self._ask("reset", seed)

    def _reset(self, call: Any, seed: int | None) -> tuple[Any, dict[str, Any]]:
        while (answer := self._workers.answer(call)) is LOST:
            call = self._start_reset(seed)
        found: tuple[Any, dict[str, Any]] = answer
        return found
