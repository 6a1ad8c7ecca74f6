"""The roles of a multi-agent training: one actor with the world, a learner for each group of agents, an evaluator.

An agent's observations are stacked, its transitions go to its group's replay, its policy comes from its group's
channel. Nothing else is shared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from pettingzoo import AECEnv

from jurybox.client.weights_reader import WeightsReader
from jurybox.training.algorithms.dqn import DQN, QNetwork, ValueLearner, ValueNetwork, ValueSettings
from jurybox.training.algorithms.iqn import IQN, QuantileNetwork
from jurybox.training.replay import Windows
from jurybox.training.runtime.plan import load
from jurybox.training.runtime.roles import Actor, Evaluator, Learner
from jurybox.training.runtime.seat import Seat
from jurybox.training.torch_weights import TorchWeights

Observation = npt.NDArray[np.uint8]
NETWORKS: dict[str, type[QNetwork] | type[QuantileNetwork]] = {"dqn": QNetwork, "iqn": QuantileNetwork}
_LEARNERS: dict[str, type[ValueLearner]] = {"dqn": DQN, "iqn": IQN}


def make_network(algorithm: str, shape: Sequence[int], actions: int, hidden: Sequence[int], seed: int) -> ValueNetwork:
    """A network for stacked observations of `shape` (stack, ...); the same one for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return NETWORKS[algorithm](int(np.prod(shape)), actions, tuple(hidden))


class Policy:
    """A group's policy as an actor sees it: published weights, epsilon-greedy."""

    def __init__(self, seat: Seat, channel: str, network: ValueNetwork) -> None:
        self._network = network.requires_grad_(False)
        self._weights = TorchWeights(seat.reader(channel), network)
        seat.follow(channel, self._weights)

    @property
    def epsilon(self) -> float:
        """Published beside the weights."""
        return float(self._weights.extra.get("epsilon", 0.0))

    def greedy(self, stacked: Observation) -> int:
        """The best action for one stack of frames."""
        with torch.inference_mode():
            return int(self._network.values(torch.from_numpy(stacked)[None])[0].argmax())


def _policies(seat: Seat, groups: Mapping[str, str], network: Mapping[str, Any]) -> dict[str, Policy]:
    """A policy for each agent; those of one group have the same."""
    of_group = {group: Policy(seat, group, make_network(**network, seed=0)) for group in dict.fromkeys(groups.values())}
    return {agent: of_group[group] for agent, group in groups.items()}


class Seen:
    """The last frames of one agent: (stack, ...) uint8, the newest last, zeroes before the first."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.frames: Observation = np.zeros(shape, np.uint8)

    def clear(self) -> None:
        self.frames[:] = 0

    def add(self, frame: Observation) -> Observation:
        """Take in the newest frame; gives all of them."""
        self.frames[:-1] = self.frames[1:]
        self.frames[-1] = frame
        return self.frames


class TurnTaker(Actor):
    """One step is one turn of the world: every agent, in order, observes, acts by its newest policy, and remembers.

    The world itself moves first, before the first agent's observation: that is the environment's affair.

    Args:
        environment: "package.module:Class" of a PettingZoo AEC environment, and its keyword arguments.
        groups: by agent, the name of its replay and channel.
        network: algorithm, shape (stack, ...), actions, hidden.
    """

    def __init__(
        self,
        seat: Seat,
        *,
        environment: tuple[str, Mapping[str, Any]],
        groups: Mapping[str, str],
        network: Mapping[str, Any],
    ) -> None:
        super().__init__(seat)
        torch.set_num_threads(seat.spec.threads)
        make, settings = environment
        self.env: AECEnv = load(make)(**settings)
        self.random = np.random.default_rng(seat.seed)
        policies = {
            group: Policy(seat, group, make_network(**network, seed=0)) for group in dict.fromkeys(groups.values())
        }
        self._policies = {agent: policies[group] for agent, group in groups.items()}
        self._rows = {agent: seat.replay(group).stream() for agent, group in groups.items()}
        self._seen = {agent: Seen(network["shape"]) for agent in groups}
        self._actions = int(network["actions"])
        self._pending: dict[str, tuple[Observation, int]] = {}
        self._totals = dict.fromkeys(groups, 0.0)
        self._turns = 0
        self.env.agents = []

    def step(self) -> int:
        if not self.env.agents:
            self._begin()
        for _ in range(len(self.env.agents)):
            self._one(self.env.agent_selection)
        self._turns += 1
        while self.env.agents and self._is_over(self.env.agent_selection):
            self._one(self.env.agent_selection)
        if not self.env.agents:
            self._end()
        return 1

    def save(self) -> dict[str, Any]:
        # A world cannot be kept in general, so the episode ends here for whoever goes on as for whoever resumes.
        for rows in self._rows.values():
            rows.end()
        self._pending.clear()
        self.env.agents = []
        return {"random": self.random.bit_generator.state}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.random.bit_generator.state = state["random"]

    def close(self) -> None:
        self.env.close()

    def _begin(self) -> None:
        self.env.reset(seed=int(self.random.integers(2**31)))
        self._turns = 0
        for agent, seen in self._seen.items():
            seen.clear()
            self._totals[agent] = 0.0

    def _is_over(self, agent: str) -> bool:
        return bool(self.env.terminations[agent] or self.env.truncations[agent])

    def _one(self, agent: str) -> None:
        observation, reward, terminated, truncated, _ = self.env.last()
        if agent in self._pending:
            # What an action brought is known when the agent's turn comes again.
            before, action = self._pending.pop(agent)
            self._rows[agent].add(observation=before, action=action, reward=reward, terminated=terminated)
            self._totals[agent] += float(reward)
        if terminated or truncated:
            self._rows[agent].end(0, observation=observation)
            self.env.step(None)
            return
        frames = self._seen[agent].add(observation)
        policy = self._policies[agent]
        # Both are drawn every time, so that what epsilon is does not move what is drawn later.
        explores, anything = self.random.random() < policy.epsilon, int(self.random.integers(self._actions))
        action = anything if explores else policy.greedy(frames)
        self._pending[agent] = (observation, action)
        self.env.step(action)

    def _end(self) -> None:
        each = {f"return_{agent}": total for agent, total in self._totals.items()}
        self.seat.episode(total=float(np.mean(list(self._totals.values()))), length=self._turns, **each)


class GroupLearner(Learner):
    """DQN or IQN on its group's replay; publishes the network, and epsilon with it.

    Args:
        group: name of its replay and channel.
        network: as the actor's.
        settings: of `ValueSettings`.
        batch_size: rows of a step. first: rows before the first step.
        epsilon: at first, at last, and the number of learner steps in between, linear.
        device: "cpu", "cuda:0", ...
    """

    def __init__(
        self,
        seat: Seat,
        *,
        group: str,
        network: Mapping[str, Any],
        settings: Mapping[str, Any],
        batch_size: int,
        first: int,
        epsilon: tuple[float, float, int],
        device: str = "cpu",
    ) -> None:
        super().__init__(seat)
        torch.set_num_threads(seat.spec.threads)
        self._group, self._first, self._epsilon = group, first, epsilon
        self._replay = seat.replay(group)
        self._seed = int(np.random.SeedSequence([seat.plan.seed, seat.number]).generate_state(1)[0])
        values = ValueSettings(**{**settings, "hidden": tuple(network["hidden"])})
        self.learner = _LEARNERS[network["algorithm"]](
            make_network(**network, seed=self._seed), values, device, self._seed
        )
        windows = Windows(
            n_step=values.n_step,
            gamma=values.discount,
            next="observation",  # type: ignore[arg-type]
            stack=network["shape"][0],
            stacked="observation",  # type: ignore[arg-type]
        )
        self._batch = self._replay.batch(batch_size, windows)

    @property
    def epsilon(self) -> float:
        """For the steps made so far."""
        high, low, steps = self._epsilon
        return max(low, high - (high - low) * self.seat.own_steps / max(1, steps))

    def ready(self) -> bool:
        return self._replay.added >= self._first

    def step(self) -> None:
        self._replay.seed(self._seed + self.seat.own_steps)
        loss = self.learner.update(self._replay.sample(self._batch.n, self._batch))
        self.seat.metrics(**{f"loss_{self._group}": loss, "epsilon": self.epsilon})

    def publication(self) -> tuple[Any, dict[str, Any] | None]:
        return self.learner.network, {"epsilon": self.epsilon, "learner_steps": self.seat.own_steps}

    def adopt(self, published: WeightsReader) -> None:
        self.learner.adopt(published.read().state)

    def save(self) -> dict[str, Any]:
        return self.learner.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self.learner.restore(state)


class GreedyEvaluator(Evaluator):
    """Plays whole episodes without exploring; the same episodes every time."""

    def __init__(
        self,
        seat: Seat,
        *,
        environment: tuple[str, Mapping[str, Any]],
        groups: Mapping[str, str],
        network: Mapping[str, Any],
        episodes: int,
        epsilon: float,
    ) -> None:
        super().__init__(seat)
        torch.set_num_threads(seat.spec.threads)
        make, settings = environment
        self._env: AECEnv = load(make)(**settings)
        policies = {
            group: Policy(seat, group, make_network(**network, seed=0)) for group in dict.fromkeys(groups.values())
        }
        self._policies = {agent: policies[group] for agent, group in groups.items()}
        self._shape, self._episodes, self._epsilon = network["shape"], episodes, epsilon
        self._random_play: dict[str, float] | None = None

    def evaluate(self) -> Mapping[str, float]:
        if self._random_play is None:
            self._random_play = self._play(1.0)
        learned = self._play(self._epsilon)
        numbers = {f"return_{agent}": total for agent, total in learned.items()}
        numbers |= {f"random_{agent}": total for agent, total in self._random_play.items()}
        return {"return": float(np.mean(list(learned.values()))), **numbers}

    def _play(self, epsilon: float) -> dict[str, float]:
        """Mean returns over the episodes, by agent."""
        random = np.random.default_rng(self.seat.plan.seed)
        totals = dict.fromkeys(self._policies, 0.0)
        for _ in range(self._episodes):
            self._env.reset(seed=int(random.integers(2**31)))
            seen = {agent: Seen(self._shape) for agent in self._policies}
            for agent in self._env.agent_iter():
                observation, reward, terminated, truncated, _ = self._env.last()
                totals[agent] += float(reward) / self._episodes
                if terminated or truncated:
                    self._env.step(None)
                    continue
                frames = seen[agent].add(observation)
                explores = random.random() < epsilon
                count = int(self._env.action_space(agent).n)
                action = int(random.integers(count)) if explores else self._policies[agent].greedy(frames)
                self._env.step(action)
            self.seat.alive()
        return totals

    def close(self) -> None:
        self._env.close()
