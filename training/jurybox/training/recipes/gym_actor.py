"""The actors and the evaluator of a gym training. Actors do not import torch if a server computes the actions."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from jurybox.training.contract import ContractBroken, begun, stepped
from jurybox.training.environments.gymnasium_env import (
    Actions,
    Environment,
    Observations,
    make_environment,
    own_defaults,
)
from jurybox.training.recipes.gym import CHANNEL, ON_POLICY, ROWS, GymTraining
from jurybox.training.run_folder import audited
from jurybox.training.runtime.role_context import Actor, Evaluator, RoleContext
from jurybox.training.runtime.serving import LeasedModel, UpdatesByVersion

Array = npt.NDArray[Any]
Outputs = Mapping[str, Array]

_SEED = 1_000_003  # makes the episodes of evaluations different from those of the training
_STEP_BITS = 40  # low bits of a moment; the bits above are its incarnation
_ADOPTED = 30.0  # seconds to wait for newer weights: an engine that restarts imports torch before it adopts them
_ENDLESS = 100_000  # steps after which an evaluation's episode counts as endless, if nothing bounds it
_SIDE_BY_SIDE = 10  # maximum number of parallel environments of the evaluator


class ActingNetwork(Protocol):
    """An actor's network, in its own process or on a server."""

    @property
    def updates(self) -> int:
        """Number of learner updates before the weights of the last outputs were published."""

    def outputs(self, rows: Array, inputs: Mapping[str, Array]) -> Outputs:
        """Return the network's outputs, by name, for observations: as rows (n, ...), and as the environments' own."""


class LocalNetwork:
    """The network in this process, with the newest published weights."""

    def __init__(self, context: RoleContext, network: Mapping[str, Any]) -> None:
        import torch

        from jurybox.training.algorithms.networks import acting_network, outputs_of
        from jurybox.training.algorithms.torch_states import TorchWeights

        torch.set_num_threads(context.spec.threads)
        self._torch = torch
        self._network = acting_network(**network).requires_grad_(False)
        self._names = outputs_of(network["algorithm"], network["discrete"])
        self._weights = TorchWeights(context.reader(CHANNEL), self._network)
        context.follow(CHANNEL, self._weights)

    @property
    def updates(self) -> int:
        return int(self._weights.extra.get("updates", 0))

    def outputs(self, rows: Array, inputs: Mapping[str, Array]) -> Outputs:
        with self._torch.inference_mode():
            found = self._network(self._torch.from_numpy(rows))
        each = found if isinstance(found, tuple) else (found,)
        return {name: tensor.numpy() for name, tensor in zip(self._names, each, strict=True)}


class _VersionFollower:
    """A follower of the channel that records the number of updates of each publication, but not the weights."""

    def __init__(self, context: RoleContext) -> None:
        self.version = 0
        self.updates = UpdatesByVersion()
        self._reader = context.reader(CHANNEL)
        self._buffers = self._reader.buffers()
        context.follow(CHANNEL, self)

    def refresh(self, timeout: float = 1.0) -> bool:
        if not self._reader.newer_than(self.version):
            return False
        _, self.version, extra = self._reader.read(out=self._buffers, timeout=timeout)
        self.updates.note(self.version, int(extra["updates"]))
        return True


class ServedNetwork:
    """The network on the plan's server, with the newest weights or slightly older ones.

    Args:
        rows: number of rows of a request.
        max_lag: publications by which an answer may be behind the newest one that the worker knows; older answers are
            requested again.
    """

    def __init__(self, context: RoleContext, *, rows: int, max_lag: int) -> None:
        self._model, self._max_lag = LeasedModel(context, CHANNEL, rows), max_lag
        self._versions = _VersionFollower(context)
        self._version = 0

    @property
    def updates(self) -> int:
        return self._versions.updates.at(self._version)

    def outputs(self, rows: Array, inputs: Mapping[str, Array]) -> Outputs:
        """Return the network's outputs; see `ActingNetwork`.

        Raises:
            ServerGone, Timeout, ModelNotFound: the error lasted longer than the time-out.
            StaleAnswers: the server did not use new enough weights in time.
        """
        until = time.monotonic() + max(_ADOPTED, self._model.timeout)

        def fresh(version: int) -> bool:
            if self._versions.version - version <= self._max_lag:
                return True
            if time.monotonic() > until:
                raise StaleAnswers(
                    f"the server answers with version {version} of the policy's weights, long after version "
                    f"{self._versions.version} was published: the server's log says why"
                )
            return False

        reply = self._model.infer(inputs, fresh)
        self._version = reply.version
        found: Any = reply.outputs
        return found if isinstance(found, Mapping) else {self._model.outputs[0]: np.asarray(found)}

    def close(self) -> None:
        """Release the lane."""
        self._model.close()


class StaleAnswers(RuntimeError):
    """The server does not use the published weights."""


def log_softmax(logits: Array) -> npt.NDArray[np.float64]:
    """Return the log-probabilities for logits, both (n, actions)."""
    shifted = logits.astype(np.float64) - logits.max(1, keepdims=True)
    found: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    return found


class Choice:
    """Chooses actions from a network's outputs, with or without exploration.

    Args:
        random: generator for the exploration.
        epsilon: returns DQN's current epsilon.
        noise: standard deviation of TD3's exploration noise.
    """

    def __init__(
        self,
        algorithm: str,
        discrete: bool,
        random: np.random.Generator,
        *,
        epsilon: Callable[[], float] = lambda: 0.0,
        noise: float = 0.0,
    ) -> None:
        self._algorithm, self._discrete, self.random = algorithm, discrete, random
        self._epsilon, self._noise = epsilon, noise

    def explore(self, outputs: Outputs) -> tuple[Array, Array | None]:
        """Return actions (n,) or (n, actions), and for PPO their log-probabilities or log-densities (n,)."""
        random = self.random
        if self._algorithm == "dqn":
            best = outputs["values"].argmax(1)
            n, actions = outputs["values"].shape
            # All numbers are drawn every time, so that epsilon does not affect which numbers are drawn later.
            anything, explores = random.integers(actions, size=n), random.random(n) < self._epsilon()
            return np.where(explores, anything, best), None
        if self._algorithm == "td3":
            action = outputs["action"]
            return np.clip(action + random.normal(0.0, self._noise, action.shape), -1.0, 1.0).astype(np.float32), None
        if self._algorithm == "ppo" and self._discrete:
            log_probs = log_softmax(outputs["logits"])
            # The argmax of log-probabilities plus Gumbel noise is a sample from the distribution.
            action = (log_probs + random.gumbel(size=log_probs.shape)).argmax(1)
            return action, log_probs[np.arange(len(action)), action].astype(np.float32)
        mean, log_std = outputs["mean"], outputs["log_std"]
        noise = random.standard_normal(mean.shape)
        drawn = (mean + np.exp(log_std) * noise).astype(np.float32)
        if self._algorithm == "sac":
            return np.tanh(drawn), None
        density = -0.5 * ((drawn - mean) / np.exp(log_std)) ** 2 - log_std - 0.5 * np.log(2 * np.pi)
        return drawn, density.sum(1).astype(np.float32)

    def best(self, outputs: Outputs) -> Array:
        """Return the actions without exploration, (n,) or (n, actions)."""
        if self._discrete:
            best: Array = outputs["values" if self._algorithm == "dqn" else "logits"].argmax(1)
            return best
        if self._algorithm == "td3":
            return outputs["action"]
        mean: Array = outputs["mean"]
        return np.tanh(mean) if self._algorithm == "sac" else mean


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

    Attributes:
        rows: (n, ...) the observations as a replay's rows, which the caller keeps at the newest.
        inputs: the newest observations as the environments gave them, by name, (n, ...) each.
    """

    def __init__(self, settings: GymTraining, n: int) -> None:
        self.scaled = settings.algorithm != ON_POLICY
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
        given = self.actions.chosen(action) if self.scaled else self.actions.clipped(action)
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
        n, does = len(self.envs), self.actions.does
        if does.discrete:
            return rng.integers(does.size, size=n)
        return rng.uniform(-1, 1, (n, does.size)).astype(np.float32)

    def close(self) -> None:
        self._resources.close()


class GymActor(Actor):
    """The actor role. One step is one step of each of this worker's environments.

    Args:
        settings: arguments of `GymTraining`.
        network: arguments of `acting_network`.
    """

    def __init__(self, context: RoleContext, *, settings: Mapping[str, Any], network: Mapping[str, Any]) -> None:
        super().__init__(context)
        self._settings = s = GymTraining(**settings)
        n = s.envs_per_worker
        self._random = np.random.default_rng(context.seed)
        self._on_policy = s.algorithm == ON_POLICY
        with ExitStack() as undo:
            self._envs = Envs(s, n)
            undo.callback(self._envs.close)
            self._policy: ActingNetwork
            if context.plan.server is None:
                self._policy = LocalNetwork(context, network)
            else:
                served = ServedNetwork(context, rows=n, max_lag=0 if self._on_policy else s.max_lag)
                undo.callback(served.close)
                self._policy = served
            self._resources = undo.pop_all()
        noise = s.of("action_noise") if s.algorithm == "td3" else 0.0
        self._choice = Choice(s.algorithm, network["discrete"], self._random, epsilon=self._epsilon, noise=noise)
        self._streams = context.replay(ROWS).streams(n)
        self._first = context.number * n  # environments are numbered over all workers
        self._totals, self._lengths = np.zeros(n), np.zeros(n, np.int64)
        self._moments = np.full(n, context.incarnation << _STEP_BITS, np.int64)
        self._playing = False

    def _epsilon(self) -> float:
        s = self._settings
        done = self.context.env_steps / (s.of("exploration_fraction") * s.steps)
        first, last = s.of("exploration_initial_eps"), s.of("exploration_final_eps")
        return float(last if done >= 1 else first + (last - first) * done)

    def step(self) -> int:
        s, envs = self._settings, self._envs
        n = len(envs.envs)
        if not self._playing:
            for number in range(n):
                self._begin(number)
            self._playing = True
        log_probs: Array | None = None
        if s.algorithm == "dqn":
            self.context.metrics(epsilon=self._epsilon())
        if not self._on_policy and self.context.env_steps < s.of("learning_starts"):
            chosen = envs.random(self._random)
        else:
            chosen, log_probs = self._choice.explore(self._policy.outputs(envs.rows, envs.inputs))
        before = envs.rows.copy()
        after, rewards = np.empty_like(before), np.zeros(n, np.float32)
        terminated, over = np.zeros(n, np.bool_), np.zeros(n, np.bool_)
        for number in range(n):
            row, reward, ended, cut = envs.step(number, chosen[number])
            after[number], rewards[number], terminated[number], over[number] = row, reward, ended, ended or cut
            self._totals[number] += reward
            self._lengths[number] += 1
        written = {"observation": before, "action": chosen, "reward": rewards, "terminated": terminated}
        if log_probs is not None:
            written |= {
                "next_observation": after,
                "log_prob": log_probs,
                "over": over,
                "environment": self._first + np.arange(n),
                "moment": self._moments,
                "updates": np.full(n, self._policy.updates),
            }
        self._streams.add(**written)
        self._moments += 1
        envs.rows[:] = after
        for number in np.flatnonzero(over).tolist():
            if not self._on_policy and not terminated[number]:
                self._streams.end(number, observation=after[number])
            numbers = audited(envs.infos[number])
            self.context.episode(total=self._totals[number], length=int(self._lengths[number]), **numbers)
            self._begin(number)
        return n

    def save(self) -> dict[str, Any]:
        # In general an environment's state cannot be saved: a resumed run begins new episodes, and this one goes on.
        return {"random": self._random.bit_generator.state, "moments": self._moments.tolist()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._random.bit_generator.state = state["random"]
        self._moments[:] = state["moments"]

    def close(self) -> None:
        self._resources.close()

    def _begin(self, number: int) -> None:
        self._envs.begin(number, int(self._random.integers(2**31)))
        self._totals[number], self._lengths[number] = 0.0, 0
        self._moments[number] += 1  # so that the episode's rows do not follow those of the previous one


class GymEvaluator(Evaluator):
    """The evaluator role: plays the same whole episodes each time, without exploration.

    The mean return selects the best weights.
    """

    def __init__(self, context: RoleContext, *, settings: Mapping[str, Any], network: Mapping[str, Any]) -> None:
        super().__init__(context)
        self._settings = s = GymTraining(**settings)
        self._policy = LocalNetwork(context, network)
        self._choice = Choice(s.algorithm, network["discrete"], np.random.default_rng(0))
        self._envs = Envs(s, min(_SIDE_BY_SIDE, s.evaluation_episodes))

    def evaluate(self) -> Mapping[str, float]:
        s, envs = self._settings, self._envs
        seeds = np.random.default_rng((_SEED, s.seed)).integers(2**31, size=s.evaluation_episodes).tolist()
        returns, lengths = np.zeros(len(seeds)), np.zeros(len(seeds))
        # The episodes of each environment are fixed beforehand, so that short ones are not played more often.
        playing = list(range(len(envs.envs)))
        for number, episode in enumerate(playing):
            envs.begin(number, seeds[episode])
        while playing_now := [number for number, episode in enumerate(playing) if episode < len(seeds)]:
            chosen = self._choice.best(self._policy.outputs(envs.rows, envs.inputs))
            for number in playing_now:
                row, reward, terminated, truncated = envs.step(number, chosen[number])
                envs.rows[number] = row
                returns[playing[number]] += reward
                lengths[playing[number]] += 1
                over, taken = terminated or truncated, int(lengths[playing[number]])
                if taken >= max(_ENDLESS, s.max_episode_steps or 0) and not over:
                    raise ContractBroken(
                        f"an episode of {s.env} has not ended after {taken:,} steps: set max_episode_steps, which "
                        "bounds them (as high as you like)"
                    )
                if over:
                    playing[number] += len(envs.envs)
                    if playing[number] < len(seeds):
                        envs.begin(number, seeds[playing[number]])
            self.context.alive()
        return {"return": float(returns.mean()), "return_std": float(returns.std()), "length": float(lengths.mean())}

    def close(self) -> None:
        self._envs.close()
