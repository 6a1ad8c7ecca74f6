"""How well a policy plays: games without noise against fixed opponents, the same ones each time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jurybox.training.environments.hockey.bots import Opponent, make_opponent
from jurybox.training.environments.hockey.game import Game
from jurybox.training.environments.hockey.matches import Match, Policy, Result, play

_SEED = 1_000_003  # games of evaluations are none of those that were trained on


@dataclass(frozen=True, slots=True)
class Standing:
    """Shares of wins, ties and losses in `games` games, and the mean of the environment's return and length."""

    games: int
    wins: float
    ties: float
    losses: float
    score: float
    steps: float

    @classmethod
    def of(cls, results: Sequence[Result]) -> Standing:
        winners = np.array([result.winner for result in results])
        return cls(
            len(results),
            float((winners > 0).mean()),
            float((winners == 0).mean()),
            float((winners < 0).mean()),
            float(np.mean([result.score for result in results])),
            float(np.mean([result.steps for result in results])),
        )

    @property
    def points(self) -> float:
        """From -1 (lost all) to 1 (won all)."""
        return self.wins - self.losses


def evaluate(games: Sequence[Game], policy: Policy, opponent: str, n: int, *, seed: int = 0) -> Standing:
    """`n` games against a built-in opponent ("weak", "strong", "random"); the puck begins on either side in turn."""
    matches = []
    for number in range(n):
        chance = int(np.random.default_rng((_SEED, seed, number)).integers(2**31))
        player: Opponent = make_opponent(opponent, action_size=games[0].action_size)
        matches.append(Match(chance, number % 2, opponent, player))
    return Standing.of(play(games, matches, policy))
