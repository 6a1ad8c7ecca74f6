"""Environments of many workers as one VecEnv of Stable-Baselines3: SubprocVecEnv over calls instead of pipes.

A worker holds several environments (`EnvGroup`); their requests are sent in one call.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from stable_baselines3.common.vec_env import SubprocVecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnv

from jurybox.cluster.vector_env import LOST, Request, Workers
from jurybox.training.vector.worker import WorkerFailed

__all__ = ["SpreadVecEnv"]


class SpreadVecEnv(SubprocVecEnv):
    """As `WorkerVecEnv`, but the training goes on after a worker is replaced: its episodes are truncated.

    The step that detects it returns the first observation of new environments, reward 0, the last
    observation as ``terminal_observation``, ``TimeLimit.truncated`` and ``info["restarted"]``.

    Args:
        workers: each holds `EnvGroup`; closed with this.
        counts: number of environments of each.
        seed: of the run; seeds of new environments are derived from it.

    Raises:
        WorkerFailed: an environment raised; the message holds the worker's traceback.
    """

    def __init__(self, workers: Workers, counts: Sequence[int], seed: int) -> None:
        self.waiting = self.closed = False
        self._workers, self._seed = workers, seed
        self._lives = [workers.life(worker) for worker in range(len(counts))]
        self._unsent: dict[int, dict[int, Request]] = {}
        self._under_way: dict[int, tuple[dict[int, Request], Any]] = {}
        self._answers: dict[tuple[int, int], Any] = {}
        self._seen: dict[tuple[int, int], Any] = {}  # every environment's last observation
        places = [(worker, index) for worker, count in enumerate(counts) for index in range(count)]
        self._number = {place: number for number, place in enumerate(places)}
        self.remotes = [_RemotePipe(self, place) for place in places]
        for remote in self.remotes:
            remote.send(("get_spaces", None))
        spaces = [remote.recv() for remote in self.remotes]
        VecEnv.__init__(self, len(spaces), *spaces[0])

    @property
    def restarts(self) -> int:
        """The number of replaced workers."""
        return self._workers.restarts

    def close(self) -> None:
        """End the actors."""
        if not self.closed:
            self.closed = True
            self._workers.close()

    def send(self, place: tuple[int, int], request: Request) -> None:
        """Queue a request; `receive` sends all of them, in one call for each worker."""
        self._unsent.setdefault(place[0], {})[place[1]] = request

    def receive(self, place: tuple[int, int]) -> Any:
        """Return the answer of one environment."""
        for worker, requests in self._unsent.items():
            self._under_way[worker] = (requests, self._start_call(worker, requests))
        self._unsent = {}
        if (arrived := self._under_way.pop(place[0], None)) is not None:
            self._settle(place[0], *arrived)
        answer = self._answers.pop(place)
        if isinstance(answer, WorkerFailed):
            raise WorkerFailed(f"environment {self._number[place]}: {answer}")
        return answer

    def _start_call(self, worker: int, requests: dict[int, Request]) -> Any:
        """Send the requests; return None if the environments are new and must be reset before a step."""
        steps = any(command == "step" for command, _ in requests.values())
        if steps and self._workers.life(worker) != self._lives[worker]:
            return None
        return self._workers.ask(worker, "answer", requests)

    def _settle(self, worker: int, requests: dict[int, Request], pending: Any) -> None:
        answers = LOST if pending is None else self._workers.answer(pending)
        while answers is LOST:
            if any(command == "step" for command, _ in requests.values()):
                answers = self._replace_step(worker, requests)
            else:
                # No episode was affected: repeat the request; the next step truncates its rows.
                answers = self._workers.answer(self._workers.ask(worker, "answer", requests))
        for index, answer in answers.items():
            command = requests[index][0]
            if command == "reset":
                self._lives[worker] = self._workers.life(worker)
            if command in ("reset", "step") and not isinstance(answer, WorkerFailed):
                self._seen[worker, index] = answer[0]
            self._answers[worker, index] = answer

    def _replace_step(self, worker: int, requests: dict[int, Request]) -> Any:
        """Reset the new environments; returns the answers that replace the step, or `LOST` again."""
        self._lives[worker] = self._workers.life(worker)
        resets = {index: ("reset", (self._fresh_seed(worker, index), None)) for index in requests}
        begun = self._workers.answer(self._workers.ask(worker, "answer", resets))
        if begun is LOST:
            return LOST
        return {
            index: answer if isinstance(answer, WorkerFailed) else self._truncated_step((worker, index), *answer)
            for index, answer in begun.items()
        }

    def _truncated_step(self, place: tuple[int, int], observation: Any, info: dict[str, Any]) -> Any:
        last = self._seen.get(place, observation)
        cut_info = {"TimeLimit.truncated": True, "terminal_observation": last, "restarted": True}
        return observation, 0.0, True, cut_info, info

    def _fresh_seed(self, worker: int, index: int) -> int:
        numbers = (self._seed, self._number[worker, index], self._workers.life(worker))
        return int(np.random.SeedSequence(numbers).generate_state(1)[0])


class _RemotePipe:
    """Stands for SubprocVecEnv's end of a pipe."""

    def __init__(self, env: SpreadVecEnv, place: tuple[int, int]) -> None:
        self._env, self._place = env, place

    def send(self, request: Request) -> None:
        self._env.send(self._place, request)

    def recv(self) -> Any:
        return self._env.receive(self._place)


def dealt(count: int, each: int) -> list[range]:
    """Distribute environment numbers over workers, `each` for every worker and the remainder for the last."""
    if count < 1 or each < 1:
        raise ValueError(f"expected at least one environment, and one for each worker, got {count} and {each}")
    edges = [*range(0, count, each), count]
    return [range(first, end) for first, end in itertools.pairwise(edges)]
