"""The roles of a hockey training that play: collectors and the evaluator. No torch: their processes start quickly."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np

from jurybox.training.algorithms.league import League
from jurybox.training.environments.hockey.factory import make_game
from jurybox.training.recipes.hockey_collector import Collector, Policies
from jurybox.training.recipes.hockey_evaluation import Standing, evaluate
from jurybox.training.recipes.hockey_opponents import LocalPolicies, Pool, PublishedActor
from jurybox.training.recipes.hockey_settings import HockeyTraining
from jurybox.training.runtime.role_context import Actor, Evaluator, RoleContext
from jurybox.training.runtime.scoreboard import Word

ROWS, RESULTS, CHANNEL, POOL = "rows", "results", "policy", "pool"
LEAVING = 8  # past selves that stay for a while when they have left: somebody may just have drawn them
_CARRIED = 10.0  # seconds that a past self may be on its way from the learner's machine


def number_of(opponent: str, anchors: tuple[str, ...]) -> int:
    """A league's name as a number for a row: -1, -2, ... for anchors, the version for the pool."""
    return -1 - anchors.index(opponent) if opponent in anchors else int(opponent.removeprefix("pool:"))


def name_of(number: int, anchors: tuple[str, ...]) -> str:
    """The name that `number_of` made a number of."""
    return anchors[-1 - number] if number < 0 else f"pool:{number}"


class HockeyActor(Actor):
    """One step is one step of half the games.

    Args:
        settings: of `HockeyTraining`.
        address: of the policy server, where there is one on this machine.
        engine: name of the engine that serves the policy, where there is one in the cluster.
    """

    def __init__(
        self,
        context: RoleContext,
        *,
        settings: Mapping[str, Any],
        address: str | None = None,
        engine: str | None = None,
    ) -> None:
        super().__init__(context)
        self._settings = s = HockeyTraining(**settings)
        self._anchors = League(s.league).anchors
        self._results = context.replay(RESULTS)
        with ExitStack() as undo:
            games = [make_game(s.environment, s.mode) for _ in range(s.envs_per_worker)]
            for game in games:
                undo.callback(game.close)
            published = PublishedActor(context.reader(CHANNEL))
            context.follow(CHANNEL, published)
            past = Pool(context.folder(POOL), _CARRIED, s.league.pool + LEAVING)
            local = LocalPolicies(published, past, games[0].action_size)
            policies: Policies = local
            self._held_back: Callable[[], int] = lambda: 0
            if address is not None or engine is not None:
                from jurybox.training.recipes.hockey_served import Beside, InCluster, ServedPolicies

                where = Beside(address) if address is not None else InCluster(str(engine), context)
                policies = served = undo.enter_context(ServedPolicies(where, len(games), local, past, s.max_lag))
                self._held_back = lambda: served.held_back
            self.collector = Collector(
                games,
                context.replay(ROWS),
                s,
                policies,
                number=context.number,
                workers=s.workers,
                # A life leaves at most one match unfinished in each of its games.
                begun=context.words[Word.EPISODES] + (context.life - 1) * len(games),
            )
            self._resources = undo.pop_all()

    def step(self) -> int:
        held_back = self._held_back()
        made, results = self.collector.step(warm=self.context.env_steps < self._settings.warmup)
        self.context.words[Word.FORCED] += self._held_back() - held_back
        for result in results:
            self._results.add(opponent=number_of(result.opponent, self._anchors), winner=result.winner)
            self.context.episode(
                total=result.score,
                length=result.steps,
                wins=result.winner > 0,
                losses=result.winner < 0,
                touches=result.touches,
            )
        return made

    def save(self) -> dict[str, Any]:
        self.collector.abandon()
        return {"begun": self.collector.begun}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.collector.begun = int(state["begun"])

    def close(self) -> None:
        self._resources.close()


class HockeyEvaluator(Evaluator):
    """Games without noise against the anchors, the same ones each time; what it calls points marks the best weights."""

    def __init__(self, context: RoleContext, *, settings: Mapping[str, Any]) -> None:
        super().__init__(context)
        self._settings = s = HockeyTraining(**settings)
        self._published = PublishedActor(context.reader(CHANNEL))
        context.follow(CHANNEL, self._published)
        self._games = [make_game(s.environment, s.mode) for _ in range(8)]

    def evaluate(self) -> Mapping[str, float]:
        s = self._settings
        standings = {}
        for who in s.league.anchors:
            standings[who] = evaluate(self._games, self._published, who, s.evaluation_games, seed=s.seed)
            self.context.alive()
        return {"points": float(np.mean([each.points for each in standings.values()])), **numbers_of(standings)}

    def close(self) -> None:
        for game in self._games:
            game.close()


def numbers_of(standings: Mapping[str, Standing]) -> dict[str, float]:
    """Flat: wins_weak, ties_weak, ..."""
    return {
        f"{what}_{who}": getattr(standing, what)
        for who, standing in standings.items()
        for what in ("wins", "ties", "losses", "score")
    }
