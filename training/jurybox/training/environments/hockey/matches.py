"""Playing many games side by side in one process: one call of the policy for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from jurybox.training.environments.hockey.bots import Opponent
from jurybox.training.environments.hockey.game import Game, Turn

Policy = Callable[[npt.NDArray[np.float32]], npt.NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class Match:
    """A game to be played by the learner, as player 0.

    Attributes:
        seed: of the game and of the opponent's own chance.
        first: on whose side the puck begins.
        opponent: name.
        player: who plays under that name.
        noise: (steps, action) added to the learner's actions, or None.
    """

    seed: int
    first: int
    opponent: str
    player: Opponent
    noise: npt.NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """How a match ended, for the learner.

    Attributes:
        opponent: name.
        winner: 1 won, 0 tied, -1 lost.
        steps: of the game.
        score: sum of the environment's own rewards.
        touches: times the learner caught the puck.
    """

    opponent: str
    winner: int
    steps: int
    score: float
    touches: int


Watch = Callable[[int, npt.NDArray[np.float32], npt.NDArray[np.float32], Turn], None]


def play(games: Sequence[Game], matches: Iterable[Match], policy: Policy, watch: Watch | None = None) -> list[Result]:
    """Play all matches, as many at a time as there are games; a game that ends takes the next match.

    Args:
        policy: actions (n, action) for observations (n, observation).
        watch: is told of every step: number of the game, observations before it (2, o), actions (2, a), what came.

    Returns:
        Results in the order of the matches.
    """
    waiting = iter(matches)
    current: dict[int, tuple[int, Match]] = {}
    size = games[0].observation_size
    seen = np.zeros((len(games), 2, size), np.float32)
    actions = np.zeros((len(games), 2, games[0].action_size), np.float32)
    steps, touches, scores = [0] * len(games), [0] * len(games), [0.0] * len(games)
    results: dict[int, Result] = {}
    begun = 0

    def begin(slot: int) -> None:
        nonlocal begun
        match = next(waiting, None)
        if match is None:
            current.pop(slot, None)
            return
        seen[slot] = games[slot].reset(match.seed, first=match.first)
        match.player.reset(match.seed)
        steps[slot], touches[slot], scores[slot] = 0, 0, 0.0
        current[slot] = (begun, match)
        begun += 1

    for slot in range(len(games)):
        begin(slot)
    while current:
        slots = list(current)
        chosen = policy(seen[slots, 0])
        for row, slot in enumerate(slots):
            number, match = current[slot]
            action = chosen[row] if match.noise is None else chosen[row] + match.noise[steps[slot]]
            np.minimum(np.maximum(action, -1.0), 1.0, out=actions[slot, 0])
            actions[slot, 1] = match.player.act(seen[slot, 1])
            turn = games[slot].step(actions[slot])
            if watch is not None:
                watch(slot, seen[slot], actions[slot], turn)
            seen[slot] = turn.observations
            steps[slot] += 1
            scores[slot] += turn.rewards[0]
            info = turn.infos[0]
            touches[slot] += info["reward_touch_puck"] > 0
            if turn.terminated or turn.truncated:
                results[number] = Result(match.opponent, info["winner"], steps[slot], scores[slot], touches[slot])
                begin(slot)
    return [results[number] for number in range(begun)]
