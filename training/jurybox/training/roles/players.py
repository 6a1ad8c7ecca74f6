"""What chooses each agent's actions: an algorithm, and a policy that is computed here or served."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jurybox.training.algorithms.base import Algorithm
from jurybox.training.algorithms.registry import make
from jurybox.training.roles.policy_client import PolicyClient
from jurybox.training.runtime.plan import ConfigError, Kind, load
from jurybox.training.runtime.role_context import RoleContext


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

        return ServedPolicy(context, channel, rows=rows, splits=splits, max_lag=max_lag, remembers=algorithm.remembers)
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
        if algorithm.remembers and len(policies) > 1:
            raise ConfigError(
                f"the policy {name!r} is recurrent, which plays in environments of one agent, and these have "
                f"{len(policies)}: set recurrent = none"
            )
        client = connected(context, name, algorithm, rows=rows, splits=splits, max_lag=max_lag, **arguments)
        made[name] = Player(algorithm, client)
    return {agent: made[name] for agent, name in policies.items()}
