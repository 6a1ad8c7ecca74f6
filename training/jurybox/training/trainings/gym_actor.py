"""The actors and the evaluator of a gym training. Actors do not import torch if a server computes the actions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np
import numpy.typing as npt

from jurybox.training.algorithms.base import Arrays, Progress
from jurybox.training.algorithms.registry import make
from jurybox.training.contract import ContractBroken, begun, stepped
from jurybox.training.environments.gymnasium_env import (
    Actions,
    Environment,
    Observations,
    make_environment,
    own_defaults,
)
from jurybox.training.roles.policy_client import policy_client
from jurybox.training.run_folder import audited
from jurybox.training.runtime.role_context import Actor, Evaluator, RoleContext
from jurybox.training.trainings.gym import CHANNEL, ROWS, GymTraining

Array = npt.NDArray[Any]

_SEED = 1_000_003  # makes the episodes of evaluations different from those of the training
_STEP_BITS = 40  # low bits of a step's number; the bits above are its incarnation
_ENDLESS = 100_000  # steps after which an evaluation's episode counts as endless, if nothing bounds it
_SIDE_BY_SIDE = 10  # maximum number of parallel environments of the evaluator


def _foreign(method: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Call a method of an environment, in its own defaults of torch.

    Raises:
        ContractBroken: an import failed in it; it is no package of ours that is missing.
    """
    try:
        if own_defaults.differ or method.__name__ != "step":  # it may change them when it is made or reset
            with own_defaults:
                return method(*given, **named)
        return method(*given, **named)
    except ImportError as error:
        what = f"the environment's {method.__name__} raised {type(error).__name__}: {error}"
        raise ContractBroken(what) from error


class Envs:
    """Several environments. The caller begins each episode.

    Args:
        n: how many.
        clips: whether numbers are actions in the environment's own unit, cut off at their bounds; else they are in
            [-1, 1], and scaled.

    Attributes:
        rows: (n, ...) the observations as a replay's rows, which the caller keeps at the newest.
        inputs: the newest observations as the environments gave them, by name, (n, ...) each.
    """

    def __init__(self, settings: GymTraining, n: int, *, clips: bool) -> None:
        self._clips = clips
        with ExitStack() as undo:
            self.envs: list[Environment] = []
            for _ in range(n):
                self.envs.append(make_environment(settings.env, settings.env_args, settings.max_episode_steps))
                undo.callback(self.envs[-1].close)
            self.observations = Observations(self.envs[0].observation_space)
            self.actions = Actions(self.envs[0].action_space)
            self._resources = undo.pop_all()
        seen = self.observations.seen
        self.rows = np.zeros((n, seen.size), seen.dtype)
        self.inputs = {leaf.name: np.zeros((n, *leaf.shape), leaf.dtype) for leaf in seen.inputs}
        self.infos: list[Mapping[str, Any]] = [{}] * n  # from each environment's last step

    def begin(self, number: int, seed: int) -> None:
        """Begin an episode, and write its first observation to `rows`."""
        self.rows[number] = self._row(number, begun(_foreign(self.envs[number].reset, seed=seed))[0])

    def step(self, number: int, action: Any) -> tuple[Array, float, bool, bool]:
        """Make one step; return the observation's row, the reward, terminated and truncated."""
        given = (self.actions.clipped if self._clips else self.actions.chosen)(action)
        observation, reward, terminated, truncated, self.infos[number] = stepped(
            _foreign(self.envs[number].step, given)
        )
        return self._row(number, observation), reward, terminated, truncated

    def _row(self, number: int, observation: Any) -> Array:
        found = self.observations.inputs(observation)
        for name, value in found.items():
            self.inputs[name][number] = value
        return self.observations.packed(found)

    def random(self, rng: np.random.Generator) -> Array:
        """Return random actions, one for each environment, in the format of a policy's actions."""
        n, spec = len(self.envs), self.actions.spec
        if spec.discrete:
            return rng.integers(spec.size, size=n)
        return rng.uniform(-1, 1, (n, spec.size)).astype(np.float32)

    def close(self) -> None:
        self._resources.close()


class GymActor(Actor):
    """The actor role. One step is one step of each of this worker's environments.

    Args:
        settings: arguments of `GymTraining`.
        algorithm: arguments of `algorithms.make`.
    """

    def __init__(self, context: RoleContext, *, settings: Mapping[str, Any], algorithm: Mapping[str, Any]) -> None:
        super().__init__(context)
        self._settings = s = GymTraining(**settings)
        n = s.envs_per_worker
        self._random = np.random.default_rng(context.seed)
        self._algorithm = made = make(**algorithm)
        self._random_until = context.plan.pace.warmup  # env steps
        with ExitStack() as undo:
            self._envs = Envs(s, n, clips=made.chooses[1] == "clip")
            undo.callback(self._envs.close)
            self._policy = policy_client(context, CHANNEL, made, rows=n, max_lag=0 if made.on_policy else s.max_lag)
            undo.callback(self._policy.close)
            self._resources = undo.pop_all()
        self._streams = context.replay(ROWS).streams(n)
        self._first = context.number * n  # environments are numbered over all workers
        self._totals, self._lengths = np.zeros(n), np.zeros(n, np.int64)
        self._t = np.full(n, context.incarnation << _STEP_BITS, np.int64)
        self._playing = False

    def step(self) -> int:
        envs, algorithm = self._envs, self._algorithm
        n = len(envs.envs)
        if not self._playing:
            for number in range(n):
                self._begin(number)
            self._playing = True
        progress = Progress(self.context.env_steps, self._settings.steps)
        if explores := algorithm.exploration(progress):
            self.context.metrics(**explores)
        columns: Arrays = {}
        if progress.env_steps < self._random_until:
            chosen = envs.random(self._random)
        else:
            chosen, columns = algorithm.explore(self._policy.outputs(envs.inputs), self._random, progress)
        before = envs.rows.copy()
        after, rewards = np.empty_like(before), np.zeros(n, np.float32)
        terminated, ended = np.zeros(n, np.bool_), np.zeros(n, np.bool_)
        for number in range(n):
            after[number], reward, terminated[number], truncated = envs.step(number, chosen[number])
            rewards[number], ended[number] = reward, terminated[number] or truncated
            self._totals[number] += reward
            self._lengths[number] += 1
        written = {"observation": before, "action": chosen, "reward": rewards, "terminated": terminated, **columns}
        if algorithm.on_policy:
            written |= {
                "next_observation": after,
                "ended": ended,
                "environment": self._first + np.arange(n),
                "t": self._t,
                "updates": np.full(n, self._policy.updates),
            }
        self._streams.add(**written)
        self._t += 1
        envs.rows[:] = after
        for number in np.flatnonzero(ended).tolist():
            if not algorithm.on_policy and not terminated[number]:
                self._streams.end(number, observation=after[number])
            numbers = audited(envs.infos[number])
            self.context.episode(total=self._totals[number], length=int(self._lengths[number]), **numbers)
            self._begin(number)
        return n

    def save(self) -> dict[str, Any]:
        # In general an environment's state cannot be saved: a resumed run begins new episodes, and this one goes on.
        return {"random": self._random.bit_generator.state, "t": self._t.tolist()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._random.bit_generator.state = state["random"]
        self._t[:] = state["t"]

    def close(self) -> None:
        self._resources.close()

    def _begin(self, number: int) -> None:
        self._envs.begin(number, int(self._random.integers(2**31)))
        self._totals[number], self._lengths[number] = 0.0, 0
        self._t[number] += 1  # so that the episode's rows do not follow those of the previous one


class GymEvaluator(Evaluator):
    """The evaluator role: plays the same whole episodes each time, without exploration.

    The mean return selects the best weights.
    """

    def __init__(self, context: RoleContext, *, settings: Mapping[str, Any], algorithm: Mapping[str, Any]) -> None:
        super().__init__(context)
        self._settings = s = GymTraining(**settings)
        self._algorithm = made = make(**algorithm)
        self._envs = Envs(s, min(_SIDE_BY_SIDE, s.evaluation_episodes), clips=made.chooses[1] == "clip")
        self._policy = policy_client(context, CHANNEL, made, rows=len(self._envs.envs))

    def evaluate(self) -> Mapping[str, float]:
        s, envs = self._settings, self._envs
        seeds = np.random.default_rng((_SEED, s.seed)).integers(2**31, size=s.evaluation_episodes).tolist()
        returns, lengths = np.zeros(len(seeds)), np.zeros(len(seeds))
        # The episodes of each environment are fixed beforehand, so that short ones are not played more often.
        playing = list(range(len(envs.envs)))
        for number, episode in enumerate(playing):
            envs.begin(number, seeds[episode])
        while playing_now := [number for number, episode in enumerate(playing) if episode < len(seeds)]:
            chosen = self._algorithm.greedy(self._policy.outputs(envs.inputs))
            for number in playing_now:
                row, reward, terminated, truncated = envs.step(number, chosen[number])
                envs.rows[number] = row
                returns[playing[number]] += reward
                lengths[playing[number]] += 1
                ended, taken = terminated or truncated, int(lengths[playing[number]])
                if taken >= max(_ENDLESS, s.max_episode_steps or 0) and not ended:
                    raise ContractBroken(
                        f"an episode of {s.env} has not ended after {taken:,} steps: set max_episode_steps, which "
                        "bounds them (as high as you like)"
                    )
                if ended:
                    playing[number] += len(envs.envs)
                    if playing[number] < len(seeds):
                        envs.begin(number, seeds[playing[number]])
            self.context.alive()
        return {"return": float(returns.mean()), "return_std": float(returns.std()), "length": float(lengths.mean())}

    def close(self) -> None:
        self._envs.close()
