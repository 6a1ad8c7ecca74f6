"""Any Gymnasium environments in worker processes, as one VectorEnv; in lock-step, or in the order of completion.

Observations, actions, rewards, ends and the infos that are declared lie in one shared memory; a message to or from a
worker contains only environment numbers. The asynchronous half follows EnvPool's send and recv
(https://envpool.readthedocs.io): the learner asks for the first k results and does not wait for the slowest.
"""

from __future__ import annotations

import copy
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cloudpickle
import numpy as np
import numpy.typing as npt
from gymnasium import Env
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from jurybox.protocol.locks import seconds
from jurybox.protocol.segment import Segment, segment_name
from jurybox.training.environments.gymnasium_env import reset_mask
from jurybox.training.spaces import take
from jurybox.training.vector.layout import InfoFields, Shared, add, arrange, put, shared_infos
from jurybox.training.vector.worker import RESET, STEP, STEP_EACH
from jurybox.training.vector.worker_pool import WorkerPool

Step = tuple[Any, npt.NDArray[np.float64], npt.NDArray[np.bool_], npt.NDArray[np.bool_], dict[str, Any]]
_Options = dict[str, Any]


class ProcessVectorEnv(VectorEnv[Any, Any, Any]):
    """Environments in worker processes. Close it, or use it in a ``with``.

    A worker that dies, or sends nothing for `timeout` seconds, is replaced, and new environments take the places of
    those it held. Their episodes are truncated: they return truncated=True, their last observation, reward 0 and
    ``info["restarted"]``, and go on as after any end of an episode. (Those idle meanwhile say so to their next action.)
    Each new environment begins with a seed of its own, derived from the seed of the last `reset` that had one, its
    number, and how often it was replaced since.

    Args:
        env_fns: one function for each environment, called in its worker; lambdas will do (cloudpickle).
        workers: processes; by default as many as there are cores, or environments where these are fewer.
        autoreset_mode: as Gymnasium defines them.
        info_fields: infos that have a fixed shape, by name: (dtype, shape of one value). They travel through shared
            memory; others are pickled.
        batch_size: environments that `recv` returns; all by default.
        timeout: seconds that a worker may be silent while it has work.
        start_timeout: seconds in which not one more worker has made its environments; however many there are.

    Raises:
        WorkerFailed: an environment could not be made or raised; the message holds the worker's traceback.
        Timeout: the environments were not made in time.
        ValueError: they have different spaces.
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], Env[Any, Any]]],
        *,
        workers: int | None = None,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        info_fields: Mapping[str, tuple[npt.DTypeLike, tuple[int, ...]]] | None = None,
        batch_size: int | None = None,
        timeout: float = 60.0,
        start_timeout: float = 60.0,
    ) -> None:
        n = len(env_fns)
        workers = min(n, workers or len(os.sched_getaffinity(0)))
        if n < 1 or workers < 1 or not 1 <= (batch_size or n) <= n:
            raise ValueError(
                f"expected environments, workers and a batch_size between 1 and them, got {n}, {workers}, {batch_size}"
            )
        self.num_envs, self.batch_size = n, batch_size or n
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        self._fields: InfoFields = {
            name: (np.dtype(dtype).str, tuple(shape)) for name, (dtype, shape) in (info_fields or {}).items()
        }
        self._ready: deque[int] = deque()
        self._extras: dict[int, Any] = {}
        self._restarted = np.zeros(n, np.bool_)
        self._in_flight = np.zeros(n, np.bool_)
        # The life of its worker (`WorkerPool.lives`) in which each environment was last reset, reset with a seed, and
        # reported as truncated. An environment in a later life than that of its reset is new.
        self._reset_life = np.zeros(n, np.int64)
        self._seed_life = np.zeros(n, np.int64)
        self._cut_life = np.zeros(n, np.int64)
        self._seeds: list[int | None] = [None] * n  # of the run
        self._pool = WorkerPool(env_fns, workers, self.autoreset_mode, seconds(timeout), seconds(start_timeout))
        try:
            self._shared = self._start_workers()
        except BaseException:
            self._pool.close()
            self.closed = True
            raise

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return self._pool.pids

    @property
    def restarts(self) -> int:
        """Workers replaced so far."""
        return self._pool.restarts

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: _Options | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all environments, or those of ``options["reset_mask"]``; seeds as Gymnasium spreads them: seed + i."""
        self._discard_pending()
        which = np.flatnonzero(reset_mask(options, self.num_envs)).tolist()
        options = {name: value for name, value in (options or {}).items() if name != "reset_mask"}
        if isinstance(seed, int):
            seeds: list[int | None] = [seed + number for number in range(self.num_envs)]
        else:
            seeds = [None] * self.num_envs if seed is None else list(seed)
        if len(seeds) != self.num_envs:
            raise ValueError(f"expected {self.num_envs} seeds, one for each environment, got {len(seeds)}")
        for number in which:
            if seeds[number] is not None:
                self._seeds[number] = seed if isinstance(seed, int) else seeds[number]
                self._seed_life[number] = self._life(number)
        waiting = set(which)
        lost = self._send_reset(which, seeds, options or None)
        while waiting:
            if lost:
                # The whole of a worker is new, so all its environments that this call resets are reset again.
                again = [number for number in lost if number in which]
                waiting.update(again)
                lost = self._send_reset(again, seeds, options or None)
                continue
            for numbers, extras, replaced in self._pool.wait(None):
                if replaced:
                    lost += numbers
                else:
                    waiting.difference_update(numbers)
                    self._extras.update(extras)
        rows = np.arange(self.num_envs)
        infos = self._infos(rows, only=np.isin(rows, which))
        return take(self._shared.observations, rows), infos

    def step(self, actions: Any) -> Step:
        """Step all environments and wait for all."""
        self.step_async(actions)
        return self.step_wait()

    def step_async(self, actions: Any) -> None:
        """Send every environment its action; `step_wait` has the results."""
        self._send(actions, list(range(self.num_envs)), STEP)

    def step_wait(self, timeout: float | None = None) -> Step:
        """Return the results of `step_async`, in the order of the environments."""
        self._collect(self.num_envs, timeout)
        self._ready.clear()
        return self._results(np.arange(self.num_envs))

    def send(self, actions: Any, env_ids: Sequence[int] | npt.NDArray[Any] | None = None) -> None:
        """Send some environments, all by default, their actions: a batch with one row for each of `env_ids`.

        Raises:
            RuntimeError: one of them has not answered for its last action.
        """
        numbers = list(range(self.num_envs)) if env_ids is None else [int(number) for number in env_ids]
        self._send(actions, numbers, STEP_EACH)

    def recv(self, count: int | None = None, *, timeout: float | None = None) -> Step:
        """Return results of the first `count` environments to be ready, `batch_size` by default, in that order.

        Their numbers are ``infos["env_id"]``, int64 (count,); every array has `count` rows.

        Raises:
            Timeout: they are not ready within `timeout` seconds; nothing is lost, ask again.
            RuntimeError: fewer environments have an action.
        """
        count = count or self.batch_size
        self._collect(count, timeout)
        rows = np.array([self._ready.popleft() for _ in range(count)])
        *step, infos = self._results(rows)
        return (*step, {**infos, "env_id": rows})

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of every environment, or get an attribute."""
        return tuple(self._pool.call(("call", name, args, kwargs), range(self.num_envs)))

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """As `gymnasium.vector.VectorEnv.get_attr`: the attribute of every environment."""
        return tuple(self._pool.call(("get", name), range(self.num_envs)))

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of every environment: from a list or tuple one value each, else the same for all."""
        each = list(values) if isinstance(values, list | tuple) else [values] * self.num_envs
        if len(each) != self.num_envs:
            raise ValueError(f"expected {self.num_envs} values, one for each environment, got {len(each)}")
        self._pool.call(("set", name, each), range(self.num_envs))

    def render(self) -> tuple[Any, ...]:
        """As `gymnasium.vector.VectorEnv.render`: what every environment shows."""
        return self.call("render")

    def close_extras(self, **kwargs: Any) -> None:
        """End the workers and free the shared memory."""
        self._pool.close()
        self._segment.close()
        self._shared = copy.deepcopy(self._shared)  # arrays over the segment would keep it

    def __enter__(self) -> ProcessVectorEnv:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start_workers(self) -> Shared:
        found = self._pool.start()
        observation, action, metadata = found[0]
        for number, (other_observation, other_action, _) in enumerate(found):
            if other_observation != observation or other_action != action:
                raise ValueError(
                    f"expected the same spaces everywhere, got {observation}, {action} in environment 0 and "
                    f"{other_observation}, {other_action} in environment {number}"
                )
        self.single_observation_space, self.single_action_space = observation, action
        self.observation_space = batch_space(observation, self.num_envs)
        self.action_space = batch_space(action, self.num_envs)
        self.metadata = {**metadata, "autoreset_mode": self.autoreset_mode}
        finals = self.autoreset_mode is AutoresetMode.SAME_STEP
        _, size = arrange(self.num_envs, observation, action, self._fields, finals=finals, segment=None)
        segment = Segment.create(segment_name(f"vector{os.getpid()}.{secrets.token_hex(4)}", "envs"), size)
        segment.unlink()  # workers get its descriptor, so the kernel frees it with the last process
        self._segment = segment
        self._pool.share(self.num_envs, self._fields, segment)
        return arrange(self.num_envs, observation, action, self._fields, finals=finals, segment=segment)[0]

    def _send(self, actions: Any, numbers: list[int], kind: bytes) -> None:
        busy = [number for number in numbers if self._in_flight[number]]
        if busy:
            raise RuntimeError(f"environments {busy} have an action already: receive their results first")
        put(self._shared.actions, numbers, actions, "the batch of actions")
        self._in_flight[numbers] = True
        if self._pool.restarts:
            numbers = self._send_to_new(numbers)
        self._handle_loss(self._pool.dispatch(kind, numbers, lambda part: np.array(part, np.int32).tobytes()))

    def _send_to_new(self, numbers: list[int]) -> list[int]:
        """Handle actions for replaced environments without an episode; returns the other environments."""
        before = self._cut_life.copy()
        for number in numbers:
            if self._is_new(number) and self._cut_life[number] < self._life(number):
                self._truncate([number])
        left = [number for number in numbers if self._cut_life[number] == before[number]]
        if self.autoreset_mode is AutoresetMode.NEXT_STEP:
            begin = [number for number in left if self._is_new(number)]
            self._handle_loss(self._send_reset(begin, [None] * self.num_envs, None))
            left = [number for number in left if number not in begin]
        # A worker may just have been found dead: then these have answered that they were cut.
        return [number for number in left if self._cut_life[number] == before[number]]

    def _collect(self, count: int, timeout: float | None) -> None:
        under_way = len(self._ready) + sum(map(len, self._pool.pending))
        if under_way < count:
            raise RuntimeError(f"expected actions sent to {count} environments, got {under_way}: send them first")
        until = None if timeout is None else time.monotonic() + seconds(timeout)
        while len(self._ready) < count:
            for numbers, extras, replaced in self._pool.wait(until):
                if replaced:
                    self._handle_loss(numbers)
                else:
                    self._extras.update(extras)
                    self._ready.extend(numbers)

    def _handle_loss(self, numbers: list[int]) -> None:
        """Cut the episodes of replaced environments: of those with an action now, of others at their next action."""
        done = set(self._ready)
        if active := [number for number in numbers if self._in_flight[number] and number not in done]:
            self._truncate(active)

    def _truncate(self, numbers: list[int]) -> None:
        shared = self._shared
        self._cut_life[numbers] = [self._life(number) for number in numbers]
        shared.rewards[numbers] = 0.0
        shared.terminated[numbers], shared.truncated[numbers] = False, True
        self._restarted[numbers] = True
        for mask in shared.info_masks.values():
            mask[numbers] = False
        if self.autoreset_mode is not AutoresetMode.SAME_STEP:
            shared.over[numbers] = True
            self._ready.extend(numbers)
            return
        for number in numbers:
            put(shared.final_observations, number, take(shared.observations, number), "an observation")
            for mask in shared.final_info_masks.values():
                mask[number] = False
        self._handle_loss(self._send_reset(numbers, [None] * self.num_envs, None))

    def _send_reset(self, numbers: list[int], seeds: list[int | None], options: _Options | None) -> list[int]:
        """Reset these; new ones that are given no seed get one of their own. Returns those whose worker was dead."""
        seeds = [self._fresh_seed(number) if each is None else each for number, each in enumerate(seeds)]
        self._reset_life[numbers] = [self._life(number) for number in numbers]
        return self._pool.dispatch(
            RESET, numbers, lambda part: cloudpickle.dumps(({number: seeds[number] for number in part}, options))
        )

    def _life(self, number: int) -> int:
        """Return how often an environment was replaced."""
        return self._pool.lives[self._pool.owner[number]]

    def _is_new(self, number: int) -> bool:
        """Whether it was replaced and has not been reset since."""
        return bool(self._reset_life[number] < self._life(number))

    def _fresh_seed(self, number: int) -> int | None:
        """A seed for an environment that is new, where the run has one; None for another."""
        seed = self._seeds[number]
        if seed is None or not self._is_new(number):
            return None
        replaced = self._life(number) - int(self._seed_life[number])
        return int(np.random.SeedSequence((seed, number, replaced)).generate_state(1)[0])

    def _discard_pending(self) -> None:
        """Wait for steps in flight and drop their results."""
        while any(self._pool.pending):
            for _ in self._pool.wait(None):
                pass
        self._ready.clear()
        self._in_flight[:] = False
        self._restarted[:] = False
        self._extras.clear()

    def _results(self, rows: npt.NDArray[np.int64]) -> Step:
        shared = self._shared
        self._in_flight[rows] = False
        terminated, truncated = shared.terminated[rows], shared.truncated[rows]
        infos = self._infos(rows)
        if self._restarted[rows].any():
            infos["restarted"] = infos["_restarted"] = self._restarted[rows]
            truncated |= self._restarted[rows]
            self._restarted[rows] = False
        return take(shared.observations, rows), shared.rewards[rows], terminated, truncated, infos

    def _infos(self, rows: npt.NDArray[np.int64], only: npt.NDArray[np.bool_] | None = None) -> dict[str, Any]:
        shared, n = self._shared, len(rows)
        infos = shared_infos(shared.infos, shared.info_masks, rows) if only is None or only.all() else {}
        if only is not None and not only.all():
            masks = {name: mask & only for name, mask in shared.info_masks.items()}
            infos = shared_infos(shared.infos, masks, rows)
        ended = (shared.terminated[rows] | shared.truncated[rows] | self._restarted[rows]) & (only is None)
        if self.autoreset_mode is AutoresetMode.SAME_STEP and ended.any():
            infos["final_obs"] = np.full(n, None, dtype=object)
            for row in np.flatnonzero(ended).tolist():
                infos["final_obs"][row] = take(shared.final_observations, int(rows[row]))
            infos["_final_obs"] = ended
            masks = {name: mask[rows] & ended for name, mask in shared.final_info_masks.items()}
            finals = {name: field[rows] for name, field in shared.final_infos.items()}
            infos["final_info"] = shared_infos(finals, masks, slice(None))
            infos["_final_info"] = ended.copy()
        if self._extras:
            for row, number in enumerate(rows.tolist()):
                if (found := self._extras.pop(number, None)) is not None:
                    add(infos, found[0], row, n)
                    if found[1]:
                        add(infos.setdefault("final_info", {}), found[1], row, n)
        return infos
