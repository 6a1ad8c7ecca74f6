"""A policy that the plan's server computes. Needs no torch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from jurybox.client import Reply
from jurybox.training.algorithms.base import Array, Arrays
from jurybox.training.roles.policy_client import NEWEST, PolicyClient
from jurybox.training.runtime.leased_sessions import LeasedSessions
from jurybox.training.runtime.role_context import RoleContext
from jurybox.training.runtime.scoreboard import Word
from jurybox.training.runtime.serving import LeasedModel, UpdatesByVersion
from jurybox.training.spaces import MEMORY, REMEMBERED

_ADOPTED = 30.0  # seconds to wait for newer weights: an engine that restarts imports torch before it adopts them


class StaleAnswers(RuntimeError):
    """The server does not use the published weights."""


class ServedPolicy(PolicyClient):
    """A `PolicyClient` on the plan's server.

    Args:
        rows: observations at once.
        splits: requests at once.
        max_lag: publications by which an answer may be behind the newest one that the role knows; older answers are
            requested again. None: any number.
        remembers: numbers that it keeps for each row from request to request, on the server; 0: none.
        models: for each split, where that is not the plan's server.
    """

    def __init__(
        self,
        context: RoleContext,
        channel: str,
        *,
        rows: int,
        max_lag: int | None,
        splits: int = 1,
        remembers: int = 0,
        models: Sequence[LeasedModel] | None = None,
    ) -> None:
        given = context.plan.server, channel, rows, context.alive
        if models is None:
            made = partial(LeasedSessions, numbers=remembers) if remembers else LeasedModel
            models = [made(*given) for _ in range(splits)]
        self._models = models
        self._max_lag, self._words = max_lag, context.words
        self._published = _Publications(context, channel)
        self._version = 0

    @property
    def version(self) -> int:
        return self._version

    @property
    def updates(self) -> int:
        return self._published.updates.at(self._version)

    @property
    def extra(self) -> Mapping[str, Any]:
        return self._published.extra

    def submit(self, observation: Arrays, who: str = NEWEST, split: int = 0) -> Callable[[], Arrays]:
        """Ask for the network's outputs; see `PolicyClient`. What it returns may raise:

        Raises:
            ServerGone, Timeout, ModelNotFound: the error lasted longer than the time-out.
            StaleAnswers: the server did not use new enough weights in time.
        """
        if who != NEWEST:
            raise KeyError(f"nobody plays as {who!r}: this process has the newest policy alone")
        model = self._models[split]
        waits, until = max(_ADOPTED, model.timeout), math.inf

        def fresh(version: int) -> bool:
            nonlocal until
            if self._max_lag is None or self._published.version - version <= self._max_lag:
                return True
            if until == math.inf:  # its time begins with the answer
                until = time.monotonic() + waits
                self._words[Word.FORCED] += 1
            if time.monotonic() > until:
                raise StaleAnswers(
                    f"the server answers with version {version} of the policy's weights, long after version "
                    f"{self._published.version} was published: the server's log says why"
                )
            return False

        before = model.memory if isinstance(model, LeasedSessions) else None
        waiting = model.submit(observation, fresh)

        def outputs() -> Arrays:
            reply = waiting()
            self._version = reply.version
            found = named(reply, model)
            if before is None:
                return found
            return {**{name: each for name, each in found.items() if name != REMEMBERED}, MEMORY: before}

        return outputs

    def begin(self, environment: int, split: int = 0) -> None:
        model = self._models[split]
        if isinstance(model, LeasedSessions):
            model.begin(environment)

    def memory(self, split: int = 0) -> Array | None:
        model = self._models[split]
        return model.memory if isinstance(model, LeasedSessions) else None

    def remember(self, memory: Array, split: int = 0) -> None:
        model = self._models[split]
        assert isinstance(model, LeasedSessions), "it remembers nothing"
        model.remember(memory)

    def close(self) -> None:
        """Release the lanes."""
        for model in self._models:
            model.close()


def named(reply: Reply, model: LeasedModel) -> Arrays:
    """Return a reply's outputs by name."""
    found: Any = reply.outputs
    return found if isinstance(found, Mapping) else {model.outputs[0]: np.asarray(found)}


class _Publications:
    """A follower of the channel that records the number of updates of each publication, but not the weights."""

    def __init__(self, context: RoleContext, channel: str) -> None:
        self.version = 0
        self.extra: Mapping[str, Any] = {}
        self.updates = UpdatesByVersion()
        self._reader = context.reader(channel)
        self._buffers = self._reader.buffers()
        context.follow(channel, self)

    def refresh(self, timeout: float = 1.0) -> bool:
        if not self._reader.newer_than(self.version):
            return False
        _, self.version, self.extra = self._reader.read(out=self._buffers, timeout=timeout)
        self.updates.note(self.version, int(self.extra["updates"]))
        return True
