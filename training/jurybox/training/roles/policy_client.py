"""What acts asks of a policy: the outputs of its network, computed in this process or by the plan's server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from jurybox.training.algorithms.base import Algorithm, Arrays
from jurybox.training.algorithms.registry import make
from jurybox.training.runtime.plan import Kind
from jurybox.training.runtime.role_context import RoleContext


class PolicyClient(Protocol):
    """A policy with the newest published weights, or slightly older ones."""

    @property
    def version(self) -> int:
        """Version of the weights of the last outputs."""

    @property
    def updates(self) -> int:
        """Learner updates that had been made before those weights were published."""

    def outputs(self, observation: Arrays) -> Arrays:
        """Return the network's outputs (n, ...) for n observations as the environments gave them, (n, ...) by input."""

    def close(self) -> None:
        """Free resources."""


def policy_client(
    context: RoleContext, channel: str, algorithm: Algorithm, *, rows: int, max_lag: int | None = None
) -> PolicyClient:
    """Return a role's policy: for an actor on the plan's server, if that has it, else in this process.

    Args:
        channel: that its weights are published on.
        rows: observations at once.
        max_lag: see `ServedPolicy`.
    """
    server = context.plan.server
    if context.spec.kind is Kind.ACTOR and server is not None and channel in server.models:
        from jurybox.training.roles.served_policy import ServedPolicy

        return ServedPolicy(context, channel, rows=rows, max_lag=max_lag)
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
    max_lag: int | None = None,
) -> dict[str, Player]:
    """Return what chooses each agent's actions; agents with the same policy share it.

    Args:
        policies: by agent, the name of its policy, which is also its channel.
        algorithms: by policy, arguments of `algorithms.make`.
        rows, max_lag: see `policy_client`.
    """
    made = {}
    for name in dict.fromkeys(policies.values()):
        algorithm = make(**algorithms[name])
        made[name] = Player(algorithm, policy_client(context, name, algorithm, rows=rows, max_lag=max_lag))
    return {agent: made[name] for agent, name in policies.items()}
