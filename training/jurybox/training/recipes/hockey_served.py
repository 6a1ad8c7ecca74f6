"""A hockey training's policies from a server: the newest one, and past selves as pinned versions of a second model."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from jurybox.client import Error, ModelNotFound, Refused, Reply, Server, ServerGone, Ticket, Timeout, connect
from jurybox.training.cluster.endpoints import REGISTRY, EngineSpec, Feeds, find, reach
from jurybox.training.environments.hockey.bots import Opponent
from jurybox.training.recipes.hockey_opponents import LocalPolicies, Pool
from jurybox.training.recipes.hockey_settings import CHANNEL, POOL, HockeyTraining
from jurybox.training.runtime.role_context import RoleContext
from jurybox.training.runtime.serving import ServedModels, served_models

_log = logging.getLogger("jurybox.hockey")
# Versions of the first come several times a second and those of the second stay: the server keeps a model's last ones.
MODEL, POOL_MODEL, ENGINE = "policy/hockey", "policy/hockey-pool", "hockey"
_FACTORY = "jurybox.training.recipes.served_networks:hockey_policy"
_ANSWER = 10.0  # seconds
_FOUND = 90.0  # seconds in which an engine that moves is expected back: its server imports torch
_LOOK = 0.005
_PAUSE = 0.1
_ADOPTED = 5.0  # seconds that a snapshot gets to be taken over by the engines

Rows = npt.NDArray[np.float32]


def models(settings: HockeyTraining, sizes: tuple[int, int]) -> dict[str, dict[str, Any]]:
    """Both models, as under [models.NAME] of a server's configuration; `sizes` of an observation and of an action."""
    made = {
        "factory": _FACTORY,
        "args": {"observation": sizes[0], "action": sizes[1], "hidden": list(settings.learner.hidden_actor)},
        "publish": "double_buffer",
        "max_batch": settings.workers * settings.envs_per_worker,
    }
    return {MODEL: made, POOL_MODEL: {**made, "keep_versions": max(1, settings.league.pool)}}


def policy_server(settings: HockeyTraining, sizes: tuple[int, int], log: Path) -> AbstractContextManager[ServedModels]:
    """Both models on the server that the settings name, or on a private one; see `served_models`."""
    return served_models(models(settings, sizes), settings.server, log, http=settings.server_http)


def engine_of(settings: HockeyTraining, sizes: tuple[int, int]) -> EngineSpec:
    """The same as an engine in a cluster, which has the weights from what the run publishes."""
    feeds = Feeds({CHANNEL: MODEL}, {POOL: POOL_MODEL}, most=max(1, settings.league.pool))
    return EngineSpec(ENGINE, models(settings, sizes), feeds, gpus=settings.engine_gpus)


class PastSelves:
    """The learner's end of the model that holds past selves as versions. Use it in a ``with``.

    Args:
        model: its name on that server.
        observation: size of one, for asking whether a version is there.
    """

    def __init__(self, address: str, model: str, observation: int) -> None:
        with ExitStack() as undo:
            connection = undo.enter_context(connect(address))
            self._publisher = connection.publisher(model)  # closed with it
            self._model = undo.enter_context(connection.model(model, rows=1))
            self._row = np.zeros((1, observation), np.float32)
            self._resources = undo.pop_all()

    def keep(self, name: str, state: Mapping[str, Any]) -> None:
        """These weights play under `name` ("pool:17") from now on; a version that the server has had is passed over."""
        version = int(name.removeprefix("pool:"))
        if version <= self._publisher.version:
            return
        self._publisher.publish(dict(state), version=version)
        # Engines take over the newest: one that is overtaken before that would be missing.
        until = time.monotonic() + _ADOPTED
        while time.monotonic() < until and self._model.infer_reply(self._row, timeout=_ANSWER).version < version:
            time.sleep(_LOOK)

    def __enter__(self) -> PastSelves:
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()


class ServedPast:
    """A past self whose actions the server computes, for all matches against the same one in one batch.

    Attributes:
        version: of its weights.
        action: what it does next; set by `ServedPolicies`.
    """

    def __init__(self, version: int) -> None:
        self.version = version
        self.action: Rows = np.zeros(0, np.float32)

    def reset(self, seed: int) -> None:
        """Nothing to forget: the policy has no memory."""

    def act(self, observation: Rows) -> Rows:
        return self.action


class Serving:
    """Who computes a collector's policies: the plan's server, or an engine in the cluster. Both have what is published.

    Args:
        past: name of the model of past selves on the plan's server.
        engine: name of the engine, if it is one.
    """

    def __init__(self, context: RoleContext, past: str | None, engine: str | None = None) -> None:
        self._context, self._engine = context, engine
        self._weights, self.alive = context.reader(CHANNEL), context.alive
        self.models, self.timeout = (MODEL, POOL_MODEL), _FOUND
        if engine is None:
            assert context.plan.server is not None and past is not None
            self._address = context.plan.server.address
            self.models, self.timeout = (context.plan.server.models[CHANNEL], past), context.plan.server.timeout

    def connect(self) -> Server:
        if self._engine is None:
            return connect(self._address)
        name, registry = self._engine, self._context.folder(REGISTRY)
        return reach(name, lambda: find(registry, name), _FOUND, self.alive)

    def newest(self) -> int:
        """The newest version."""
        return self._weights.newest


@dataclass(slots=True)
class _Asked:
    """What one half asks: for the learner's actions, and by version for those of past selves."""

    seen: Rows
    past: list[tuple[list[ServedPast], Rows]]
    ticket: Ticket | None = None
    theirs: list[Ticket] = field(default_factory=list)


class ServedPolicies:
    """`Policies` for a collector, asked of a server: one half's actions are computed, and travel, while the other half
    steps. One that is lost is looked for again, and asked again.

    Args:
        where: the server is.
        rows: games of the collector.
        local: for anchors and the league's odds.
        pool: for past selves that the server does not hold.
        max_lag: publications that answers may be behind; older ones are asked for again. None: any number.

    Attributes:
        held_back: how often answers were too old.
    """

    def __init__(self, where: Serving, rows: int, local: LocalPolicies, pool: Pool, max_lag: int | None) -> None:
        self._where, self._local, self._pool, self._max_lag = where, local, pool, max_lag
        self._half = -(-rows // 2)
        self._asked: dict[int, _Asked] = {}
        self._resources = ExitStack()
        self.held_back = 0
        self._open()

    def ask(self, half: int, seen: Rows, opponents: Sequence[Opponent], theirs: Rows) -> None:
        by_version: dict[int, list[int]] = {}
        for row, opponent in enumerate(opponents):
            if isinstance(opponent, ServedPast):
                by_version.setdefault(opponent.version, []).append(row)
        past = []
        for rows in by_version.values():
            players = [opponent for opponent in (opponents[row] for row in rows) if isinstance(opponent, ServedPast)]
            past.append((players, theirs[rows]))
        self._asked[half] = _Asked(seen, past)
        try:
            self._send(half)
        except (ServerGone, Timeout, ModelNotFound) as error:
            self._again(error)

    def actions(self, half: int) -> Rows:
        while True:
            try:
                chosen = self._collect(half)
                del self._asked[half]
                return chosen
            except (ServerGone, Timeout, ModelNotFound) as error:
                self._again(error)

    def player(self, name: str) -> Opponent:
        kind, _, version = name.partition(":")
        return ServedPast(int(version)) if kind == "pool" else self._local.player(name)

    def odds(self) -> Mapping[str, float]:
        return self._local.odds()

    def __enter__(self) -> ServedPolicies:
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    def _open(self) -> None:
        with ExitStack() as undo:
            connection = undo.enter_context(self._where.connect())
            newest, past = self._where.models
            self._model = undo.enter_context(connection.model(newest, rows=2 * self._half))
            # A lane for each half: requests of changing sizes would leave gaps in a common one.
            self._past = [undo.enter_context(connection.model(past, rows=self._half)) for _ in (0, 1)]
            self._resources = undo.pop_all()

    def _again(self, error: Error) -> None:
        """Connect anew, and ask again for all that is not answered, as long as the server is waited for."""
        _log.warning("the policy server is looked for again: %s", error)
        until = time.monotonic() + self._where.timeout
        while True:
            with suppress(Error):
                self._resources.close()
            try:
                self._open()
                for half in self._asked:
                    self._send(half)
                return
            except (ServerGone, Timeout, ModelNotFound, Refused):
                if time.monotonic() > until:
                    raise
                self._where.alive()
                time.sleep(_PAUSE)

    def _send(self, half: int) -> None:
        asked = self._asked[half]
        asked.theirs = [
            self._past[half].submit(shown, timeout=_ANSWER, version=players[0].version) for players, shown in asked.past
        ]
        asked.ticket = self._model.submit(asked.seen, timeout=_ANSWER)

    def _collect(self, half: int) -> Rows:
        asked = self._asked[half]
        for (players, shown), ticket in zip(asked.past, asked.theirs, strict=True):
            try:
                found: Rows = ticket.result(_ANSWER).outputs
            except Refused:  # not held: the server is another than the one that had it
                found = self._pool.actor(f"pool:{players[0].version}")(shown)
            for player, action in zip(players, found, strict=True):
                player.action = action
        assert asked.ticket is not None
        reply = asked.ticket.result(_ANSWER)
        if self._late(reply):
            self.held_back += 1
            until = time.monotonic() + _ADOPTED
            while self._late(reply) and time.monotonic() < until:
                time.sleep(_LOOK)
                reply = self._model.infer_reply(asked.seen, timeout=_ANSWER)
        chosen: Rows = reply.outputs
        return chosen

    def _late(self, reply: Reply) -> bool:
        behind = self._where.newest() - reply.version
        return reply.version == 0 or (self._max_lag is not None and behind > self._max_lag)
