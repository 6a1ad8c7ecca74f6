"""Environments of many workers as one Gymnasium VectorEnv: one call for each worker and step. Does not import Ray."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
from gymnasium.vector import VectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array

from jurybox.training.vector.worker import execute

__all__ = ["SpreadVectorEnv"]


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

    def __len__(self) -> int: ...

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
    """The object of a worker: numbered vector environments, each for another `SpreadVectorEnv`."""

    def __init__(self, makers: Sequence[Callable[[], VectorEnv[Any, Any, Any]]]) -> None:
        self._groups = [make() for make in makers]

    def spaces(self, group: int) -> tuple[Any, Any, dict[str, Any]]:
        env = self._groups[group]
        return env.single_observation_space, env.single_action_space, env.metadata

    def reset(self, group: int, seed: int | None, options: dict[str, Any] | None) -> tuple[Any, dict[str, Any]]:
        return self._groups[group].reset(seed=seed, options=options)

    def step(self, group: int, actions: Any) -> Step:
        observations, rewards, *ends, infos = self._groups[group].step(actions)
        return observations, rewards, ends[0], ends[1], infos

    def call(self, group: int, name: str, arguments: tuple[Any, ...]) -> Any:
        found = getattr(self._groups[group], name)
        return found(*arguments) if callable(found) else found

    def close(self) -> None:
        for env in self._groups:
            env.close()


class SpreadVectorEnv(VectorEnv[Any, Any, Any]):
    """The rows of group `group` of all workers. It does not own the workers.

    `step_async` and `step_wait` are the halves of `step`: with two such environments, a caller acts for one while the
    other steps. A replaced worker has new environments, and the episodes of its rows are truncated: they return
    truncated=True, their last observation, reward 0 and ``info["restarted"]``, and the step after that is
    the reset of the new ones, as after any end of an episode (gymnasium.vector.AutoresetMode.NEXT_STEP).

    Args:
        workers: each holds `WorkerGroups`.
        group: number of the group in each `WorkerGroups`.
        counts: rows of each worker.
    """

    def __init__(self, workers: Workers, group: int, counts: Sequence[int]) -> None:
        if len(counts) != len(workers) or min(counts) < 1:
            raise ValueError(f"expected rows for each of {len(workers)} workers, got {list(counts)}")
        self._workers, self._group = workers, group
        bounds = [0, *itertools.accumulate(counts)]
        self._rows = [slice(a, b) for a, b in itertools.pairwise(bounds)]
        self.num_envs = bounds[-1]
        self._seed: int | None = None
        self._lives = [workers.life(worker) for worker in range(len(workers))]
        self._pending: list[Any] = []
        # Resets of new environments that were not returned yet.
        self._new_resets: dict[int, tuple[Any, dict[str, Any]]] = {}
        observation, action, self.metadata = self._call_until_done(0, "spaces")
        self.single_observation_space, self.single_action_space = observation, action
        self.observation_space = batch_space(observation, self.num_envs)
        self.action_space = batch_space(action, self.num_envs)
        self._last: list[tuple[Any, dict[str, Any]]] = []  # each worker's last step

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all; row i gets `seed` + i, as in Gymnasium.

        Raises:
            ValueError: other seeds than one number.
        """
        if seed is not None and not isinstance(seed, int):
            raise ValueError(f"expected one seed for all rows, got {seed!r}")
        for worker, pending in enumerate(self._pending):
            if pending is not None and self._workers.answer(pending) is LOST:
                self._lives[worker] = -1
        self._seed = self._seed if seed is None else seed
        self._pending = []
        self._new_resets.clear()
        calls = [self._start_reset(worker, seed, options) for worker in range(len(self._rows))]
        self._last = [self._reset(worker, pending, seed, options) for worker, pending in enumerate(calls)]
        return self._joined([each[0] for each in self._last]), joined([each[1] for each in self._last], self._rows)

    def step(self, actions: Any) -> Step:
        """As `gymnasium.vector.VectorEnv.step`."""
        self.step_async(actions)
        return self.step_wait()

    def step_async(self, actions: Any) -> None:
        """Send every worker its rows' actions."""
        if self._pending:
            raise RuntimeError("a step is under way already: receive its results first")
        self._pending = [
            self._workers.ask(worker, "step", self._group, actions[rows])
            if worker not in self._new_resets and self._workers.life(worker) == self._lives[worker]
            else None
            for worker, rows in enumerate(self._rows)
        ]

    def step_wait(self) -> Step:
        """Return the results of `step_async`."""
        if not self._pending:
            raise RuntimeError("expected actions sent before: call step_async first")
        calls, self._pending = self._pending, []
        steps = [self._result(worker, pending) for worker, pending in enumerate(calls)]
        self._last = [(each[0], each[4]) for each in steps]
        rewards, terminated, truncated = (np.concatenate([each[i] for each in steps]) for i in (1, 2, 3))
        observations = self._joined([each[0] for each in steps])
        return observations, rewards, terminated, truncated, joined([each[4] for each in steps], self._rows)

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of every worker's group, or get an attribute; one value for each worker."""
        return tuple(self._call_until_done(worker, "call", name, args) for worker in range(len(self._rows)))

    def close_extras(self, **kwargs: Any) -> None:
        """Does nothing: the workers belong to their owner."""

    def _result(self, worker: int, pending: Any) -> Step:
        """One worker's step."""
        n = self._rows[worker].stop - self._rows[worker].start
        never = np.zeros(n, np.bool_)
        if worker in self._new_resets:
            observations, infos = self._new_resets.pop(worker)
            return observations, np.zeros(n), never, never.copy(), infos
        answer = LOST if pending is None else self._workers.answer(pending)
        if answer is not LOST:
            step: Step = answer
            return step
        self._new_resets[worker] = self._reset(worker, self._start_reset(worker, None, None), None, None)
        observations, infos = self._last[worker]
        restarted = {"restarted": ~never, "_restarted": ~never}
        return observations, np.zeros(n), never, ~never, {**_zeros_like(infos), **restarted}

    def _start_reset(self, worker: int, seed: int | None, options: dict[str, Any] | None) -> Any:
        if seed is None and self._workers.life(worker) != self._lives[worker]:
            seed = self._fresh_seed(worker)
        self._lives[worker] = self._workers.life(worker)
        own = None if seed is None else seed + self._rows[worker].start
        return self._workers.ask(worker, "reset", self._group, own, options)

    def _reset(
        self, worker: int, pending: Any, seed: int | None, options: dict[str, Any] | None
    ) -> tuple[Any, dict[str, Any]]:
        while (answer := self._workers.answer(pending)) is LOST:
            pending = self._start_reset(worker, seed, options)
        found: tuple[Any, dict[str, Any]] = answer
        return found

    def _call_until_done(self, worker: int, method: str, *arguments: Any) -> Any:
        """Repeat a call until there is an answer; the next step truncates the rows of a new worker."""
        while (answer := self._workers.answer(self._workers.ask(worker, method, self._group, *arguments))) is LOST:
            pass
        return answer

    def _fresh_seed(self, worker: int) -> int | None:
        """Return a seed for the new environments of a replaced worker, if the run has one.

        It does not depend on other workers, so that a run with the same events is reproducible.
        """
        if self._seed is None:
            return None
        numbers = (self._seed, self._group, worker, self._workers.life(worker))
        return int(np.random.SeedSequence(numbers).generate_state(1)[0])

    def _joined(self, batches: list[Any]) -> Any:
        if all(isinstance(batch, np.ndarray) for batch in batches):
            return np.concatenate(batches)
        rows = [row for batch, part in zip(batches, self._rows, strict=True) for row in _rows_of(batch, part)]
        out: Any = create_empty_array(self.single_observation_space, self.num_envs)
        return concatenate(self.single_observation_space, rows, out)


def joined(infos: Sequence[dict[str, Any]], rows: Sequence[slice]) -> dict[str, Any]:
    """Join the infos of groups by Gymnasium's rules: rows without a key get zeros (or None).

    Args:
        infos: of each group, arrays of its rows.
        rows: the rows of each group.
    """
    n = rows[-1].stop
    found: dict[str, Any] = {}
    for name in dict.fromkeys(itertools.chain.from_iterable(infos)):
        having = [(info[name], where) for info, where in zip(infos, rows, strict=True) if name in info]
        if isinstance(having[0][0], dict):
            found[name] = joined([info.get(name, {}) for info in infos], rows)
            continue
        like = having[0][0]
        empty = None if like.dtype == object else 0
        found[name] = np.full((n, *like.shape[1:]), empty, like.dtype)
        for values, where in having:
            found[name][where] = values
    return found


def _zeros_like(infos: dict[str, Any]) -> dict[str, Any]:
    """Return the same keys with zeros."""
    return {
        name: _zeros_like(value) if isinstance(value, dict) else np.zeros_like(value) for name, value in infos.items()
    }


def _rows_of(batch: Any, rows: slice) -> list[Any]:
    if isinstance(batch, dict):
        parts = {name: _rows_of(part, rows) for name, part in batch.items()}
        return [{name: part[i] for name, part in parts.items()} for i in range(rows.stop - rows.start)]
    if isinstance(batch, tuple):
        return list(zip(*(_rows_of(part, rows) for part in batch), strict=True))
    return list(batch)
