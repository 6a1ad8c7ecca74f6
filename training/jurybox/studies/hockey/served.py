"""Served policies of a hockey training: the newest one, and past selves as pinned versions of a second model."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jurybox.client import Refused, connect
from jurybox.cluster.endpoints import REGISTRY, EngineSpec, Feeds, find, reach
from jurybox.studies.hockey.algorithm import FACTORY, network_of
from jurybox.studies.hockey.opponents import Pool
from jurybox.studies.hockey.settings import CHANNEL, POOL, HockeyTraining
from jurybox.training.algorithms.base import Algorithm, Arrays
from jurybox.training.roles.policy_client import NEWEST, PAST
from jurybox.training.roles.served_policy import ServedPolicy, named
from jurybox.training.runtime.role_context import RoleContext
from jurybox.training.runtime.serving import LeasedModel, ServedModels, served_models
from jurybox.training.spaces import ALONE

# Two models, because a server keeps the last versions of each. The first gets several new versions a second, and the
# versions of the second have to stay.
MODEL, POOL_MODEL, ENGINE = "policy/hockey", "policy/hockey-pool", "hockey"
_ANSWER = 10.0  # time-out of a request, seconds
_FOUND = 90.0  # seconds to wait for an engine that moves to another machine: its server has to import torch
_POLL_SECONDS = 0.005  # seconds between two requests for a newer version
_ADOPTED = 5.0  # seconds to wait until the engines serve a new version


def models(settings: HockeyTraining, sizes: tuple[int, int]) -> dict[str, dict[str, Any]]:
    """Return both models, as under [models.NAME] in a server's configuration.

    Args:
        sizes: sizes of an observation and of an action.
    """
    made = {
        "factory": FACTORY,
        "args": network_of(settings, sizes),
        "publish": "double_buffer",
        "max_batch": settings.workers * settings.envs_per_worker,
    }
    return {MODEL: made, POOL_MODEL: {**made, "keep_versions": max(1, settings.league.pool)}}


def policy_server(settings: HockeyTraining, sizes: tuple[int, int], log: Path) -> AbstractContextManager[ServedModels]:
    """Serve both models on the server that the settings name, or on a private one; see `served_models`."""
    return served_models(
        models(settings, sizes), settings.server, log, http=settings.server_http, group=settings.server_group
    )


def engine_of(settings: HockeyTraining, sizes: tuple[int, int]) -> EngineSpec:
    """Return the specification of a cluster's engine with both models, whose weights come from the run."""
    feeds = Feeds({CHANNEL: MODEL}, {POOL: POOL_MODEL}, most=max(1, settings.league.pool))
    return EngineSpec(ENGINE, models(settings, sizes), feeds, gpus=settings.engine_gpus)


class PastSelves:
    """The learner's connection to the model whose versions are the past selves. Close it, or use it in a ``with``.

    Args:
        address: address of the server.
        model: name of the model on that server.
        observation: size of an observation, for requests that check which version is served.
    """

    def __init__(self, address: str, model: str, observation: int) -> None:
        with ExitStack() as undo:
            connection = undo.enter_context(connect(address))
            self._publisher = connection.publisher(model)  # closed with the connection
            self._model = undo.enter_context(connection.model(model, rows=1))
            self._row = np.zeros((1, observation), np.float32)
            self._resources = undo.pop_all()

    def keep(self, name: str, state: Mapping[str, Any]) -> None:
        """Publish weights under `name` ("pool:17"). A version that the server already had is skipped."""
        version = int(name.removeprefix(PAST))
        if version <= self._publisher.version:
            return
        self._publisher.publish(dict(state), version=version)
        # Engines load only the newest version. Without this wait, a version could be replaced before it is loaded.
        until = time.monotonic() + _ADOPTED
        while time.monotonic() < until and self._model.infer_reply(self._row, timeout=_ANSWER).version < version:
            time.sleep(_POLL_SECONDS)

    def close(self) -> None:
        """Close the connection."""
        self._resources.close()

    def __enter__(self) -> PastSelves:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ServedPolicies(ServedPolicy):
    """Policies that a server computes for an actor: the plan's server, or an engine in the cluster.

    Both get the published weights. A past self that the server does not have plays from its file.

    Args:
        algorithm, rows, splits, max_lag: see `players.policy_client`.
        pool: members of the league.
        past: name of the model of past selves on the plan's server.
        engine: name of the cluster's engine; None: the plan's server.
    """

    def __init__(
        self,
        context: RoleContext,
        channel: str,
        algorithm: Algorithm,
        *,
        rows: int,
        splits: int,
        max_lag: int | None,
        pool: int,
        past: str | None = None,
        engine: str | None = None,
    ) -> None:
        def leased(name: str | None) -> LeasedModel:
            if engine is None:
                return LeasedModel(context.plan.server, channel, rows, context.alive, name=name)
            registry = context.folder(REGISTRY)
            reaching = partial(reach, engine, lambda: find(registry, engine), _FOUND, context.alive)
            return LeasedModel(None, channel, rows, context.alive, name=name, reach=reaching, timeout=_FOUND)

        name = None if engine is None else MODEL
        past = past if engine is None else POOL_MODEL
        super().__init__(context, channel, rows=rows, max_lag=max_lag, models=[leased(name) for _ in range(splits)])
        # A lane for each split: in a shared lane, requests of different sizes would leave gaps.
        self._past = [leased(past) for _ in range(splits)]
        self._pool = Pool.of(context, pool, rows * splits)

    def submit(self, observation: Arrays, who: str = NEWEST, split: int = 0) -> Callable[[], Arrays]:
        if who == NEWEST:
            return super().submit(observation, who, split)
        model = self._past[split]
        waiting = model.submit(observation, version=int(who.removeprefix(PAST)))

        def outputs() -> Arrays:
            try:
                return named(waiting(), model)
            except Refused:  # a different server, which does not have this version
                return {"action": self._pool.actor(who)(observation[ALONE])}

        return outputs

    def close(self) -> None:
        super().close()
        for model in self._past:
            model.close()
