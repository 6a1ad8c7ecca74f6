"""Served policies of a hockey training: the newest one, and past selves as pinned versions of a second model."""

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
from jurybox.cluster.endpoints import REGISTRY, EngineSpec, Feeds, find, reach
from jurybox.studies.hockey.algorithm import FACTORY, network_of
from jurybox.studies.hockey.bots import Opponent
from jurybox.studies.hockey.opponents import LocalPolicies, Pool
from jurybox.studies.hockey.settings import CHANNEL, POOL, HockeyTraining
from jurybox.training.runtime.role_context import RoleContext
from jurybox.training.runtime.serving import ServedModels, served_models

_log = logging.getLogger("jurybox.hockey")
# Two models, because a server keeps the last versions of each. The first gets several new versions a second, and the
# versions of the second have to stay.
MODEL, POOL_MODEL, ENGINE = "policy/hockey", "policy/hockey-pool", "hockey"
_ANSWER = 10.0  # time-out of a request, seconds
_FOUND = 90.0  # seconds to wait for an engine that moves to another machine: its server has to import torch
_POLL_SECONDS = 0.005  # seconds between two requests for a newer version
_PAUSE = 0.1  # seconds between two attempts to reconnect
_ADOPTED = 5.0  # seconds to wait until the engines serve a new version

Rows = npt.NDArray[np.float32]


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
    return served_models(models(settings, sizes), settings.server, log, http=settings.server_http)


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
        version = int(name.removeprefix("pool:"))
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


class ServedPast:
    """A past self whose actions the server computes, in one batch for all matches against the same past self.

    Attributes:
        version: version of its weights.
        action: its next action; set by `ServedPolicies`.
    """

    def __init__(self, version: int) -> None:
        self.version = version
        self.action: Rows = np.zeros(0, np.float32)

    def reset(self, seed: int) -> None:
        """Do nothing: the policy has no state."""

    def act(self, observation: Rows) -> Rows:
        return self.action


class Serving:
    """The server of a collector's policies: the plan's server or an engine in the cluster.

    Both get the published weights.

    Args:
        past: name of the model of past selves on the plan's server.
        engine: name of the cluster's engine; None for the plan's server.
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
        """Return the newest published version."""
        return self._weights.newest


@dataclass(slots=True)
class _HalfRequest:
    """The requests of one half: for the learner's actions, and by version for those of past selves."""

    seen: Rows
    past: list[tuple[list[ServedPast], Rows]]
    ticket: Ticket | None = None
    past_tickets: list[Ticket] = field(default_factory=list)


class ServedPolicies:
    """`Policies` that a server computes for a collector.

    One half's actions are computed and sent while the other half steps. If the server is lost, this reconnects and
    sends the requests again.

    Args:
        where: the server.
        rows: number of the collector's games.
        local: provides the anchors and the published curriculum.
        pool: provides past selves that the server does not have.
        max_lag: maximum number of publications that answers may be behind; older answers are requested again. None:
            no limit.

    Attributes:
        held_back: how often an answer was too old.
    """

    def __init__(self, where: Serving, rows: int, local: LocalPolicies, pool: Pool, max_lag: int | None) -> None:
        self._where, self._local, self._pool, self._max_lag = where, local, pool, max_lag
        self._half = -(-rows // 2)
        self._requests: dict[int, _HalfRequest] = {}
        self._resources = ExitStack()
        self.held_back = 0
        self._open()

    def request(self, half: int, seen: Rows, opponents: Sequence[Opponent], opponent_rows: Rows) -> None:
        by_version: dict[int, list[int]] = {}
        for row, opponent in enumerate(opponents):
            if isinstance(opponent, ServedPast):
                by_version.setdefault(opponent.version, []).append(row)
        past = []
        for rows in by_version.values():
            players = [opponent for opponent in (opponents[row] for row in rows) if isinstance(opponent, ServedPast)]
            past.append((players, opponent_rows[rows]))
        self._requests[half] = _HalfRequest(seen, past)
        try:
            self._send(half)
        except (ServerGone, Timeout, ModelNotFound) as error:
            self._reconnect(error)

    def actions(self, half: int) -> Rows:
        while True:
            try:
                chosen = self._collect(half)
                del self._requests[half]
                return chosen
            except (ServerGone, Timeout, ModelNotFound) as error:
                self._reconnect(error)

    def player(self, name: str) -> Opponent:
        kind, _, version = name.partition(":")
        return ServedPast(int(version)) if kind == "pool" else self._local.player(name)

    def curriculum(self) -> Mapping[str, Any]:
        return self._local.curriculum()

    def __enter__(self) -> ServedPolicies:
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    def _open(self) -> None:
        with ExitStack() as undo:
            connection = undo.enter_context(self._where.connect())
            newest, past = self._where.models
            self._model = undo.enter_context(connection.model(newest, rows=2 * self._half))
            # A lane for each half: in a shared lane, requests of different sizes would leave gaps.
            self._past = [undo.enter_context(connection.model(past, rows=self._half)) for _ in (0, 1)]
            self._resources = undo.pop_all()

    def _reconnect(self, error: Error) -> None:
        """Reconnect, and send all unanswered requests again. Raises the last error when the time-out has passed."""
        _log.warning("the policy server is looked for again: %s", error)
        until = time.monotonic() + self._where.timeout
        while True:
            with suppress(Error):
                self._resources.close()
            try:
                self._open()
                for half in self._requests:
                    self._send(half)
                return
            except (ServerGone, Timeout, ModelNotFound, Refused):
                if time.monotonic() > until:
                    raise
                self._where.alive()
                time.sleep(_PAUSE)

    def _send(self, half: int) -> None:
        request = self._requests[half]
        request.past_tickets = [
            self._past[half].submit(shown, timeout=_ANSWER, version=players[0].version)
            for players, shown in request.past
        ]
        request.ticket = self._model.submit(request.seen, timeout=_ANSWER)

    def _collect(self, half: int) -> Rows:
        request = self._requests[half]
        for (players, shown), ticket in zip(request.past, request.past_tickets, strict=True):
            try:
                found: Rows = ticket.result(_ANSWER).outputs
            except Refused:  # a different server, which does not have this version
                found = self._pool.actor(f"pool:{players[0].version}")(shown)
            for player, action in zip(players, found, strict=True):
                player.action = action
        assert request.ticket is not None
        reply = request.ticket.result(_ANSWER)
        if self._late(reply):
            self.held_back += 1
            until = time.monotonic() + _ADOPTED
            while self._late(reply) and time.monotonic() < until:
                time.sleep(_POLL_SECONDS)
                reply = self._model.infer_reply(request.seen, timeout=_ANSWER)
        chosen: Rows = reply.outputs
        return chosen

    def _late(self, reply: Reply) -> bool:
        behind = self._where.newest() - reply.version
        return reply.version == 0 or (self._max_lag is not None and behind > self._max_lag)
