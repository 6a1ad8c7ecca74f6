"""A policy that the plan's server computes. Needs no torch."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from jurybox.training.algorithms.base import Arrays
from jurybox.training.runtime.role_context import RoleContext
from jurybox.training.runtime.serving import LeasedModel, UpdatesByVersion

_ADOPTED = 30.0  # seconds to wait for newer weights: an engine that restarts imports torch before it adopts them


class StaleAnswers(RuntimeError):
    """The server does not use the published weights."""


class ServedPolicy:
    """A `PolicyClient` on the plan's server.

    Args:
        rows: observations at once.
        max_lag: publications by which an answer may be behind the newest one that the role knows; older answers are
            requested again. None: any number.
    """

    def __init__(self, context: RoleContext, channel: str, *, rows: int, max_lag: int | None) -> None:
        self._model, self._max_lag = LeasedModel(context, channel, rows), max_lag
        self._published = _Publications(context, channel)
        self.version = 0

    @property
    def updates(self) -> int:
        return self._published.updates.at(self.version)

    def outputs(self, observation: Arrays) -> Arrays:
        """Return the network's outputs; see `PolicyClient`.

        Raises:
            ServerGone, Timeout, ModelNotFound: the error lasted longer than the time-out.
            StaleAnswers: the server did not use new enough weights in time.
        """
        until = time.monotonic() + max(_ADOPTED, self._model.timeout)

        def fresh(version: int) -> bool:
            if self._max_lag is None or self._published.version - version <= self._max_lag:
                return True
            if time.monotonic() > until:
                raise StaleAnswers(
                    f"the server answers with version {version} of the policy's weights, long after version "
                    f"{self._published.version} was published: the server's log says why"
                )
            return False

        reply = self._model.infer(observation, fresh)
        self.version = reply.version
        found: Any = reply.outputs
        return found if isinstance(found, Mapping) else {self._model.outputs[0]: np.asarray(found)}

    def close(self) -> None:
        """Release the lane."""
        self._model.close()


class _Publications:
    """A follower of the channel that records the number of updates of each publication, but not the weights."""

    def __init__(self, context: RoleContext, channel: str) -> None:
        self.version = 0
        self.updates = UpdatesByVersion()
        self._reader = context.reader(channel)
        self._buffers = self._reader.buffers()
        context.follow(channel, self)

    def refresh(self, timeout: float = 1.0) -> bool:
        if not self._reader.newer_than(self.version):
            return False
        _, self.version, extra = self._reader.read(out=self._buffers, timeout=timeout)
        self.updates.note(self.version, int(extra["updates"]))
        return True
