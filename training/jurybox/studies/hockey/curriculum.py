"""Opponents as a curriculum: the league, and the past selves that join it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from jurybox.studies.hockey.league import League, LeagueSettings, draw
from jurybox.studies.hockey.opponents import Pool
from jurybox.studies.hockey.settings import LEAVING, POOL
from jurybox.training.replay import Field
from jurybox.training.roles.curriculum import Arrays, Curriculum, LearnerHandle, Task
from jurybox.training.runtime.role_context import RoleContext


class Opponents(Curriculum):
    """Whom the learner plays against. A task's label is the number of the opponent: see `number_of`.

    Args:
        league: arguments of `LeagueSettings`.
        snapshot_every: episodes between two snapshots for the pool.
        past: name of the model for past selves on the plan's server; None without a server.
        observation: size of an observation.
    """

    results: ClassVar = {"points": Field((), "int32")}

    def __init__(
        self,
        context: RoleContext,
        *,
        league: Mapping[str, Any],
        snapshot_every: int,
        past: str | None = None,
        observation: int = 0,
    ) -> None:
        super().__init__(context)
        self.league = League(LeagueSettings(**{**league, "anchors": tuple(league["anchors"])}))
        self.pool = Pool(context.folder(POOL), most=self.league.settings.pool + LEAVING)
        self.served: Any = None
        self._snapshot_every, self._snapshot_at = snapshot_every, 0
        self._left: list[str] = []  # the past selves that left the league last
        if past is not None and context.plan.server is not None:
            from jurybox.studies.hockey.served import PastSelves

            self.served = PastSelves(context.plan.server.address, past, observation)

    def published(self) -> dict[str, Any]:
        return {"odds": self.league.odds(), "row": self.league.row(), "snapshot_at": self._snapshot_at}

    @staticmethod
    def draw(published: Mapping[str, Any], rng: np.random.Generator) -> Task:
        odds = published["odds"]
        name = draw(odds, rng)
        anchors = tuple(each for each in odds if each.startswith("anchor:"))
        return Task({"opponent": name}, number_of(name, anchors), name in anchors)

    def record(self, episodes: Arrays) -> None:
        for label, points in zip(episodes["label"].tolist(), episodes["points"].tolist(), strict=True):
            self.league.record(name_of(label, self.league.anchors), points)

    def between_updates(self, learner: LearnerHandle) -> Mapping[str, float]:
        """Let a snapshot of the policy join the pool, where one is due."""
        version, episodes = self.context.own_steps, self.context.scoreboard.episodes
        if self.league.settings.pool and version and episodes - self._snapshot_at >= self._snapshot_every:
            self._snapshot_at = episodes
            name, left = self.league.add(version)
            state = learner.weights()
            self.pool.keep(name, state)
            if left is not None:
                self._left = [*self._left, left][-LEAVING:]
            self.pool.retain((*self._left, *self.league.pool))
            if self.served is not None:
                self.served.keep(name, state)
        return {"pool": len(self.league.pool)}

    def state_dict(self) -> dict[str, Any]:
        past = {name: dict(self.pool.actor(name).state) for name in self.league.pool}
        return {"league": self.league.state_dict(), "snapshot_at": self._snapshot_at, "past": past}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.league = League.from_state_dict(state["league"])
        self._snapshot_at = int(state["snapshot_at"])
        if self.context.life == 1:  # the run was resumed: the folder may have past selves from after the checkpoint
            self.pool.retain(())
        # The files of past selves that have left the league since the checkpoint are gone.
        there = set(self.pool.names())
        for name, past in state["past"].items():
            if name not in there:
                self.pool.keep(name, past)
            if self.served is not None:
                self.served.keep(name, past)

    def load_published(self, published: Mapping[str, Any]) -> None:
        self.league.take_over(published["row"])
        self._snapshot_at = int(published["snapshot_at"])

    def close(self) -> None:
        if self.served is not None:
            self.served.close()


def number_of(opponent: str, anchors: tuple[str, ...]) -> int:
    """Return the number that encodes an opponent's name in a row: -1, -2, ... for anchors, the version for the pool."""
    return -1 - anchors.index(opponent) if opponent in anchors else int(opponent.removeprefix("pool:"))


def name_of(number: int, anchors: tuple[str, ...]) -> str:
    """Return the name for a number; the inverse of `number_of`."""
    return anchors[-1 - number] if number < 0 else f"pool:{number}"
