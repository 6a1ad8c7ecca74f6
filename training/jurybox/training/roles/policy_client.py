"""What acts asks of a policy: the outputs of its network, computed in this process or by the plan's server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import numpy as np

from jurybox.training.algorithms.base import Algorithm, Array, Arrays
from jurybox.training.algorithms.registry import make
from jurybox.training.environments.adapter import Adapter, Waiting, WithBots
from jurybox.training.runtime.plan import Kind, load
from jurybox.training.runtime.role_context import RoleContext

NEWEST, PAST = "newest", "pool:"  # who plays an agent: the newest policy, a past one ("pool:17"), else a bot


class PolicyClient(ABC):
    """A policy with the newest published weights, or slightly older ones."""

    @property
    @abstractmethod
    def version(self) -> int:
        """Version of the weights of the last outputs."""

    @property
    @abstractmethod
    def updates(self) -> int:
        """Learner updates that had been made before those weights were published."""

    @property
    @abstractmethod
    def extra(self) -> Mapping[str, Any]:
        """What was published beside the newest weights that this process knows."""

    @abstractmethod
    def submit(self, observation: Arrays, who: str = NEWEST, split: int = 0) -> Callable[[], Arrays]:
        """Ask for the network's outputs; the function that is returned waits for them, and gives them.

        Args:
            observation: n observations as the environments gave them, (n, ...) by input.
            who: the newest policy, or a past one.
            split: of requests for the newest policy that overlap, each has a number of its own.

        Returns:
            Gives outputs (n, ...) by name.

        Raises:
            KeyError: there is no such policy.
        """

    def outputs(self, observation: Arrays) -> Arrays:
        """Return the newest network's outputs, see `submit`."""
        return self.submit(observation)()

    def close(self) -> None:  # noqa: B027 (some have nothing)
        """Free resources."""


def policy_client(
    context: RoleContext,
    channel: str,
    algorithm: Algorithm,
    *,
    rows: int,
    splits: int = 1,
    max_lag: int | None = None,
) -> PolicyClient:
    """Return a role's policy: for an actor on the plan's server, if that has it, else in this process.

    Args:
        channel: that its weights are published on.
        rows: observations at once.
        splits: requests at once.
        max_lag: see `ServedPolicy`.
    """
    server = context.plan.server
    if context.spec.kind is Kind.ACTOR and server is not None and channel in server.models:
        from jurybox.training.roles.served_policy import ServedPolicy

        return ServedPolicy(context, channel, rows=rows, splits=splits, max_lag=max_lag)
    from jurybox.training.roles.local_policy import LocalPolicy

    return LocalPolicy(context, channel, algorithm)


class Player(NamedTuple):
    """What chooses an agent's actions."""

    algorithm: Algorithm
    policy: PolicyClient


def players(
    context: RoleContext,
    policies: Mapping[str, str],
    algorithms: Mapping[str, Mapping[str, Any]],
    *,
    rows: int,
    splits: int = 1,
    max_lag: int | None = None,
    clients: Mapping[str, Any] | None = None,
) -> dict[str, Player]:
    """Return what chooses each agent's actions; agents with the same policy share it.

    Args:
        policies: by agent, the name of its policy, which is also its channel.
        algorithms: by policy, arguments of `algorithms.make`.
        rows, splits, max_lag: see `policy_client`.
        clients: "make", the "module:callable" that is called as `policy_client` is, and its further arguments; None:
            `policy_client` itself, which knows no past policies.
    """
    arguments = dict(clients or {})
    connected: Callable[..., PolicyClient] = load(arguments.pop("make")) if clients else policy_client
    made = {}
    for name in dict.fromkeys(policies.values()):
        algorithm = make(**algorithms[name])
        client = connected(context, name, algorithm, rows=rows, splits=splits, max_lag=max_lag, **arguments)
        made[name] = Player(algorithm, client)
    return {agent: made[name] for agent, name in policies.items()}


class Asked(NamedTuple):
    """Actions that are being computed.

    Attributes:
        waiting: who acts.
        newest: gives the newest policy's outputs for all environments; None: it plays in none of them.
        past: environments and the outputs of the policy that plays there.
    """

    waiting: Waiting
    newest: Callable[[], Arrays] | None
    past: list[tuple[list[int], Callable[[], Arrays]]]


class Cast:
    """Who plays which agent in an adapter's environments: the newest policy, a past one, or one of its bots.

    Args:
        split: number of the adapter, where a role has several.
    """

    def __init__(self, adapter: Adapter, players: Mapping[str, Player], split: int = 0) -> None:
        self._adapter, self._players, self._split = adapter, players, split
        self._past: dict[str, dict[int, str]] = {agent: {} for agent in adapter.agents}
        self._bots: dict[str, dict[int, Callable[[Array], Array]]] = {agent: {} for agent in adapter.agents}

    def begin(self, environment: int, seed: int, named: Mapping[str, str]) -> None:
        """An episode begins in which agents are played by those that are named, all others by the newest policy.

        Raises:
            KeyError: nobody has such a name.
        """
        for agent in self._adapter.agents:
            past, bots, name = self._past[agent], self._bots[agent], named.get(agent, NEWEST)
            past.pop(environment, None)
            bots.pop(environment, None)
            if name.startswith(PAST):
                past[environment] = name
            elif name != NEWEST:
                bots[environment] = cast("WithBots", self._adapter).scripted(name, seed)

    def newest(self, environment: int) -> list[str]:
        """Return the agents that the newest policy plays there."""
        return [
            agent
            for agent in self._adapter.agents
            if environment not in self._past[agent] and environment not in self._bots[agent]
        ]

    def ask(self, waiting: Waiting) -> Asked:
        """Let an agent's actions be computed."""
        policy = self._players[waiting.agent].policy
        past, bots = self._past[waiting.agent], self._bots[waiting.agent]
        groups: dict[str, list[int]] = {}
        for environment, name in past.items():
            groups.setdefault(name, []).append(environment)
        asked = [
            (rows, policy.submit({name: each[rows] for name, each in waiting.observation.items()}, who, self._split))
            for who, rows in groups.items()
        ]
        alone = len(past) + len(bots) < self._adapter.n
        newest = policy.submit(waiting.observation, split=self._split) if alone else None
        return Asked(waiting, newest, asked)

    def actions(self, asked: Asked, chosen: Array | None) -> Array:
        """Return the actions of all environments.

        Args:
            chosen: those of the newest policy, (n, ...); None where it plays in none.
        """
        agent, observation = asked.waiting.agent, asked.waiting.observation
        algorithm, bots = self._players[agent].algorithm, self._bots[agent]
        found = {
            row: action
            for rows, outputs in asked.past
            for row, action in zip(rows, algorithm.greedy(outputs()), strict=True)
        }
        if bots:
            (seen,) = observation.values()
            found |= {row: bot(seen[row]) for row, bot in bots.items()}
        if chosen is None:
            return np.stack([found[row] for row in range(self._adapter.n)])
        for row, action in found.items():
            chosen[row] = action
        return chosen
