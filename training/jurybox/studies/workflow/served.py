"""A search's served policy: the learner publishes its weights after every update, and the server acts with them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from jurybox.client import Model, Publisher, Timeout, connect
from jurybox.client.remote.weights import RemotePublisher
from jurybox.studies.workflow.cage.tables import N_ACTIONS
from jurybox.studies.workflow.rollouts import INPUTS
from jurybox.studies.workflow.settings import WorkflowTraining
from jurybox.training import interrupts
from jurybox.training.algorithms.ppo import PPO
from jurybox.training.runtime.plan import RunError
from jurybox.training.runtime.serving import served_models

MODEL = "policy/workflow"
_FACTORY = "jurybox.training.algorithms.served_networks:actor_critic"

_ADOPTED = 30.0  # seconds to wait for published weights: an engine that restarts meanwhile has to import torch
_ANSWER = 30.0  # seconds to wait for an answer
_PAUSE = 0.002  # seconds between two requests while the weights are too old
_CONNECT = 30.0  # time-out of the connection, seconds

Floats = npt.NDArray[np.float32]


class WeightsNotAdopted(RunError):
    """The policy server does not use the published weights."""


class ServedDefender:
    """A learner's policy, whose logits and values the server computes.

    PPO needs actions of the policy that it updates, and the server adopts weights between two batches. So `act` repeats
    its request until the answer is of the version that was published last. It looks at every answer, because a server
    may have several engines, each of which adopts weights at its own time.

    Args:
        adopted: seconds within which the server has to adopt a publication.

    Raises:
        WeightsNotAdopted: raised by `act` if the server has not adopted the weights in this time.
    """

    def __init__(
        self, learner: PPO, model: Model, publisher: Publisher | RemotePublisher, adopted: float = _ADOPTED
    ) -> None:
        self._learner, self._model, self._publisher = learner, model, publisher
        self._timeout = adopted
        self._published: tuple[int, int] | None = None  # gradient steps, version

    def act(
        self, observations: Floats, masks: npt.NDArray[np.bool_] | None = None, *, greedy: bool = False
    ) -> tuple[npt.NDArray[np.int64], Floats, Floats]:
        steps = self._learner.gradient_steps
        if self._published is None or self._published[0] != steps:
            version = self._publisher.publish(self._learner.acting.state_dict())
            self._published = steps, version
        outputs = self._infer(observations)
        logits, values = (torch.from_numpy(np.array(outputs[name])) for name in ("logits", "value"))
        return self._learner.choose(logits, values, masks, greedy=greedy)

    def _infer(self, observations: Floats) -> Any:
        assert self._published is not None
        until = time.monotonic() + self._timeout
        while True:
            ticket = self._model.submit(observations)
            try:
                reply = ticket.result(timeout=_ANSWER)
            except Timeout:
                # All processes may have been stopped meanwhile, as by `docker pause`: then the answer comes now.
                reply = ticket.result(timeout=_ANSWER)
            if reply.version >= self._published[1]:
                return reply.outputs
            interrupts.check()
            if time.monotonic() > until:
                raise WeightsNotAdopted(
                    f"the policy server has not adopted version {self._published[1]} of {MODEL} within "
                    f"{self._timeout:g} s; its answers are of version {reply.version}. Its log (server.log) says why; "
                    "go on from the newest checkpoint with --resume, or with --policy local"
                )
            time.sleep(_PAUSE)


@contextmanager
def served_policy(settings: WorkflowTraining, log: Path) -> Iterator[Callable[[PPO], Any] | None]:
    """Provide a function that creates a learner's served policy; None if the policy is local.

    Use it in a ``with`` statement; the policy is served until the end of the block.
    """
    if settings.policy == "local":
        yield None
        return
    network = {"observation": INPUTS, "actions": N_ACTIONS, "hidden": list(settings.ppo.hidden)}
    made = {MODEL: {"factory": _FACTORY, "args": network, "publish": "double_buffer", "max_batch": settings.envs}}
    with (
        served_models(made, settings.server, log, http=settings.server_http) as served,
        connect(served.address, timeout=_CONNECT) as connection,
        connection.publisher(served.names[MODEL]) as publisher,
    ):
        model = connection.model(served.names[MODEL], rows=settings.envs)
        yield lambda learner: ServedDefender(learner, model, publisher)
