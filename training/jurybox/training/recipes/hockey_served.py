"""A hockey training's policies from a server: the newest one, and past selves as pinned versions of a second model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from jurybox.client import Refused, Server, Ticket, connect
from jurybox.client.weights_reader import WeightsReader
from jurybox.training.algorithms.acting import NumpyActor
from jurybox.training.environments.hockey.bots import Opponent
from jurybox.training.recipes.hockey_opponents import LocalPolicies, Pool
from jurybox.training.recipes.hockey_settings import HockeyTraining
from jurybox.training.recipes.local_server import LocalServer

# Versions of the first come several times a second and those of the second stay: the server keeps a model's last ones.
MODEL, POOL = "policy/hockey", "policy/hockey-pool"
_FACTORY = "jurybox.training.recipes.hockey_network:policy"
_ANSWER = 10.0  # seconds
_ADOPTED = 5.0  # seconds that a snapshot gets to be taken over by the engines

Rows = npt.NDArray[np.float32]


@contextmanager
def policy_server(settings: HockeyTraining, sizes: tuple[int, int], log: Path) -> Iterator[str]:
    """A server with both models, as long as the block; gives its address.

    Raises:
        ServerNotStarted: it did not come up.
    """
    made = {
        "factory": _FACTORY,
        "args": {"observation": sizes[0], "action": sizes[1], "hidden": list(settings.learner.hidden_actor)},
        "publish": "double_buffer",
        "max_batch": settings.workers * settings.envs_per_worker,
    }
    server = LocalServer({MODEL: made, POOL: {**made, "keep_versions": max(1, settings.league.pool)}}, log, http=False)
    try:
        server.start()
        server.wait()
        yield server.address
    finally:
        server.stop()


def _here(connection: Server, name: str) -> WeightsReader:
    reader = connection.weights(name)
    if not isinstance(reader, WeightsReader):
        raise Refused(f"{name} is served on another host: a training that publishes to it runs beside its server")
    return reader


class ServedPublications:
    """The learner's end: what it publishes goes to the server as well. Use it in a ``with``."""

    def __init__(self, address: str) -> None:
        with ExitStack() as undo:
            connection = undo.enter_context(connect(address))
            self._newest, self._kept = connection.publisher(MODEL), connection.publisher(POOL)  # closed with it
            self._engines = _here(connection, POOL)
            self._resources = undo.pop_all()

    def publish(self, policy: Any) -> None:
        """The policy as it is now."""
        self._newest.publish(policy)

    def keep(self, name: str, state: Mapping[str, Any]) -> None:
        """These weights play under `name` ("pool:17") from now on; a version that the server has had is passed over."""
        version = int(name.removeprefix("pool:"))
        if version > self._engines.newest:
            self._kept.publish(dict(state), version=version)
            # Engines take over the newest: one that is overtaken before that would be missing.
            self._engines.wait_until_fresh(_ADOPTED, max_lag=0)

    def __enter__(self) -> ServedPublications:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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


class ServedPolicies:
    """`Policies` for a collector, asked of the server: one half's actions are computed while the other half steps.

    Args:
        rows: games of the collector.
        local: for anchors and the league's odds.
        pool: for past selves that the server does not hold.
        max_lag: publications that answers may be behind; the collector is held back meanwhile. None: any number.
    """

    def __init__(
        self,
        address: str,
        rows: int,
        local: LocalPolicies,
        pool: Pool,
        max_lag: int | None,
    ) -> None:
        self._local, self._pool, self._max_lag = local, pool, max_lag
        self._asked: dict[int, tuple[Ticket, list[tuple[list[ServedPast], Rows, Ticket]]]] = {}
        with ExitStack() as undo:
            connection = undo.enter_context(connect(address))
            half = -(-rows // 2)
            self._model = undo.enter_context(connection.model(MODEL, rows=2 * half))
            # A lane for each half: requests of changing sizes would leave gaps in a common one.
            self._past = [undo.enter_context(connection.model(POOL, rows=half)) for _ in (0, 1)]
            self._weights = _here(connection, MODEL)
            self._resources = undo.pop_all()

    @property
    def held_back(self) -> int:
        """How often the collector had to wait for the server to take over newer weights."""
        return self._weights.held_back

    def ask(self, half: int, seen: Rows, opponents: Sequence[Opponent], theirs: Rows) -> None:
        if self._max_lag is not None:
            self._weights.wait_until_fresh(1.0, max_lag=self._max_lag)
        by_version: dict[int, list[int]] = {}
        for row, opponent in enumerate(opponents):
            if isinstance(opponent, ServedPast):
                by_version.setdefault(opponent.version, []).append(row)
        past = []
        for version, rows in by_version.items():
            players = [opponent for opponent in (opponents[row] for row in rows) if isinstance(opponent, ServedPast)]
            shown = theirs[rows]
            past.append((players, shown, self._past[half].submit(shown, timeout=_ANSWER, version=version)))
        self._asked[half] = self._model.submit(seen, timeout=_ANSWER), past

    def actions(self, half: int) -> Rows:
        ticket, past = self._asked.pop(half)
        for players, shown, theirs in past:
            try:
                found: Rows = self._past[half].result(theirs, _ANSWER).outputs
            except Refused:  # not held: the server is another than the one that had it
                found = self._actor(players[0].version)(shown)
            for player, action in zip(players, found, strict=True):
                player.action = action
        chosen: Rows = self._model.result(ticket, _ANSWER).outputs
        return chosen

    def player(self, name: str) -> Opponent:
        kind, _, version = name.partition(":")
        return ServedPast(int(version)) if kind == "pool" else self._local.player(name)

    def odds(self) -> Mapping[str, float]:
        return self._local.odds()

    def _actor(self, version: int) -> NumpyActor:
        return self._pool.actor(f"pool:{version}")

    def __enter__(self) -> ServedPolicies:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._resources.close()
