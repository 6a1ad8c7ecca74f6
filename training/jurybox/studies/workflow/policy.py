"""A search's policy: its algorithm, and the clients that compute its network, in this process or on a server."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from jurybox.client import Server, connect
from jurybox.studies.workflow.cage.tables import N_ACTIONS
from jurybox.studies.workflow.networks import INPUTS
from jurybox.studies.workflow.settings import WorkflowTraining
from jurybox.training.algorithms.base import Arrays, Progress
from jurybox.training.algorithms.ppo import PPO, PPOSettings, RefinedPPO
from jurybox.training.roles.policy_client import NEWEST, PolicyClient
from jurybox.training.roles.served_policy import named
from jurybox.training.runtime.plan import PolicyServer, RunError
from jurybox.training.runtime.serving import LeasedModel, ServedChannel, served_models
from jurybox.training.spaces import ALONE, MASK, ActionSpec, AgentSpec, Leaf

MODEL = "policy/workflow"
FACTORY = "jurybox.training.algorithms.served_networks:gym_policy"
SPEC = AgentSpec((Leaf(ALONE, (INPUTS,), "float32"),), ActionSpec(True, N_ACTIONS), masked=True)

_ADOPTED = 30.0  # seconds to wait for published weights: an engine that restarts meanwhile has to import torch
_CONNECT = 30.0  # time-out of the connection, seconds
_ANY = Progress(0, 1)  # PPO draws from its own distribution, at any time

Floats = npt.NDArray[np.float32]


def learner_of(rules: PPOSettings) -> RefinedPPO:
    """Return the algorithm of a search."""
    return RefinedPPO.of(rules, INPUTS, N_ACTIONS, masked=True)


def network_of(hidden: Sequence[int]) -> dict[str, Any]:
    """Return the arguments of `FACTORY` for its network, as values of JSON and TOML."""
    return {"algorithm": "ppo", "settings": {"hidden": list(hidden)}, "spec": SPEC.as_dict()}


class Defender:
    """A learner's policy in rollouts: actions under masks, their log-probabilities, and values in units of rewards.

    Args:
        learner: of actions that are chosen, with masks.
        policy: computes its network; None: this process.
        rng: draws actions.
    """

    def __init__(
        self, learner: PPO, policy: PolicyClient | None = None, rng: np.random.Generator | None = None
    ) -> None:
        self._learner, self._policy = learner, policy or OwnNetwork(learner)
        self._rng = rng or np.random.default_rng(0)

    def act(
        self, observations: Floats, masks: npt.NDArray[np.bool_] | None = None, *, greedy: bool = False
    ) -> tuple[npt.NDArray[np.int64], Floats, Floats]:
        """Return actions int64 (n,), their log-probabilities and the values, float32 (n,).

        Args:
            observations: (n, INPUTS).
            masks: bool (n, actions), of those that may be chosen; None: all.
            greedy: take the most probable actions, each with the probability 1.
        """
        learner = self._learner
        allowed = np.ones((len(observations), learner.spec.action.size), np.bool_) if masks is None else masks
        outputs = self._policy.outputs({ALONE: observations, MASK: allowed})
        values = learner.in_rewards(outputs["value"])
        if greedy:
            return learner.greedy(outputs), np.zeros_like(values), values
        actions, columns = learner.explore(outputs, self._rng, _ANY)
        return actions, columns["log_prob"], values


class OwnNetwork(PolicyClient):
    """The network that a learner learns, as it is, in the learner's process and on its device."""

    def __init__(self, learner: PPO) -> None:
        self._learner = learner

    @property
    def version(self) -> int:
        return self.updates

    @property
    def updates(self) -> int:
        return self._learner.gradient_steps

    @property
    def extra(self) -> Mapping[str, Any]:
        return {}

    def submit(self, observation: Arrays, who: str = NEWEST, split: int = 0) -> Callable[[], Arrays]:
        def outputs() -> Arrays:
            learner = self._learner
            given = (torch.from_numpy(observation[name]).to(learner.device) for name in learner.spec.arguments)
            with torch.inference_mode():
                found = learner.acting(*given)
            return {name: each.cpu().numpy() for name, each in zip(learner.outputs, found, strict=True)}

        return outputs


class WeightsNotAdopted(RunError):
    """The policy server does not use the published weights."""


class ServedWeights:
    """The model on a server, with the weights that were published last; also where the server was started again.

    Args:
        rows: observations at once.
        alive: called while it waits for the server.
    """

    def __init__(self, server: PolicyServer, rows: int, alive: Callable[[], None] = lambda: None) -> None:
        self.version, self._address, self._weights = 0, server.address, dict[str, torch.Tensor]()
        self._channel = ServedChannel(server, MODEL, alive)
        self.model = LeasedModel(server, MODEL, rows, alive, reach=self._reach)

    def publish(self, weights: dict[str, torch.Tensor]) -> None:
        """Publish other weights."""
        self.version, self._weights = self.version + 1, weights
        self._channel.publish(weights, self.version)

    def close(self) -> None:
        """Close the connections."""
        self.model.close()
        self._channel.close()

    def _reach(self) -> Server:
        if self.version:  # it connects again: perhaps to a server that has them no more
            self._channel.close()
            self._channel.publish(self._weights, self.version)
        return connect(self._address, timeout=_CONNECT)


class ServedNetwork(PolicyClient):
    """The network that a learner learns, computed by a server.

    PPO needs actions of the policy that it updates, and the server adopts weights between two batches. So a request is
    repeated until the answer is of the version that was published last. Every answer is looked at, because a server
    may have several engines, each of which adopts weights at its own time.

    Args:
        adopted: seconds from an answer on within which the server has to adopt a publication.

    Raises:
        WeightsNotAdopted: raised with the outputs if the server has not adopted the weights in this time.
    """

    def __init__(self, learner: PPO, weights: ServedWeights, adopted: float = _ADOPTED) -> None:
        self._learner, self._weights, self._timeout = learner, weights, adopted
        self._steps: int | None = None  # gradient steps of what was published

    @property
    def version(self) -> int:
        return self._weights.version

    @property
    def updates(self) -> int:
        return self._steps or 0

    @property
    def extra(self) -> Mapping[str, Any]:
        return {}

    def submit(self, observation: Arrays, who: str = NEWEST, split: int = 0) -> Callable[[], Arrays]:
        if self._steps != self._learner.gradient_steps:
            self._steps = self._learner.gradient_steps
            self._weights.publish(self._learner.acting.state_dict())
        wanted, until = self._weights.version, math.inf

        def fresh(version: int) -> bool:
            nonlocal until
            if version >= wanted:
                return True
            until = min(until, time.monotonic() + self._timeout)  # its time begins with the answer
            if time.monotonic() > until:
                raise WeightsNotAdopted(
                    f"the policy server has not adopted version {wanted} of {MODEL} within {self._timeout:g} s; "
                    f"its answers are of version {version}. Its log (server.log) says why; go on from the newest "
                    "checkpoint with --resume, or with --policy local"
                )
            return False

        waiting = self._weights.model.submit(observation, fresh)
        return lambda: named(waiting(), self._weights.model)


@contextmanager
def policy_server(settings: WorkflowTraining, log: Path) -> Iterator[PolicyServer | None]:
    """Provide the server that the policy acts on, with a model for it; None: it acts in this process.

    Use it in a ``with`` statement; a served policy is served until the end of the block.
    """
    if settings.policy == "local":
        yield None
        return
    arguments = network_of(settings.ppo.hidden)
    made = {MODEL: {"factory": FACTORY, "args": arguments, "publish": "double_buffer", "max_batch": settings.envs}}
    shares: dict[str, Any] = {"http": settings.server_http, "group": settings.server_group}
    with served_models(made, settings.server, log, **shares) as served:
        yield served.feed({MODEL: MODEL})
