"""Many games in one process, with one call of the policy for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from jurybox.studies.hockey.bots import Opponent
from jurybox.studies.hockey.game import Game, GameStep
from jurybox.training.roles.curriculum import Task
from jurybox.training.spaces import check_finite

Policy = Callable[[npt.NDArray[np.float32]], npt.NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class Match:
    """A game for the learner, who is player 0.

    Attributes:
        seed: of the game and of the opponent's random numbers.
        first: the player on whose side the puck begins.
        player: the opponent.
        task: how its result is marked.
        noise: (steps, action) added to the learner's actions, or None.
    """

    seed: int
    first: int
    player: Opponent
    task: Task = field(default_factory=Task)
    noise: npt.NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True)
class MatchResult:
    """The result of a match, from the learner's side.

    Attributes:
        label: the task's.
        winner: 1 won, 0 tied, -1 lost.
        steps: of the game.
        score: sum of the environment's own rewards.
        touches: how often the learner caught the puck.
    """

    label: int
    winner: int
    steps: int
    score: float
    touches: int


Watch = Callable[[int, npt.NDArray[np.float32], npt.NDArray[np.float32], GameStep], None]


class Games:
    """Parallel games, each with its current match.

    Attributes:
        games: their owner closes them.
        seen: (games, 2, o), the current observations of both players.
        matches: the current match by number of the game.
    """

    def __init__(self, games: Sequence[Game]) -> None:
        self.games = games
        self.seen = np.zeros((len(games), 2, games[0].observation_size), np.float32)
        self.matches: dict[int, Match] = {}
        self._actions = np.zeros((len(games), 2, games[0].action_size), np.float32)
        self._steps, self._touches, self._scores = [0] * len(games), [0] * len(games), [0.0] * len(games)

    def begin(self, slot: int, match: Match) -> None:
        """Begin `match` in game `slot`."""
        self.seen[slot] = self.games[slot].reset(match.seed, first=match.first)
        match.player.reset(match.seed)
        self._steps[slot], self._touches[slot], self._scores[slot] = 0, 0, 0.0
        self.matches[slot] = match

    def step(
        self, slots: Sequence[int], chosen: npt.NDArray[np.float32], watch: Watch | None = None
    ) -> list[tuple[int, MatchResult]]:
        """Step some games.

        Args:
            slots: numbers of the games, each with a current match.
            chosen: (len(slots), a), the learner's actions without noise.
            watch: called at every step: number of the game, observations before it (2, o), actions (2, a), result.

        Returns:
            (number of the game, result) of the matches that are over now.
        """
        over = []
        seen, actions = self.seen, self._actions
        for row, slot in enumerate(slots):
            match = self.matches[slot]
            action = chosen[row] if match.noise is None else chosen[row] + match.noise[self._steps[slot]]
            np.minimum(np.maximum(action, -1.0), 1.0, out=actions[slot, 0])
            actions[slot, 1] = match.player.act(seen[slot, 1])
            turn = self.games[slot].step(actions[slot])
            if watch is not None:
                watch(slot, seen[slot], actions[slot], turn)
            check_finite(turn.observations, "an observation")
            seen[slot] = turn.observations
            self._steps[slot] += 1
            self._scores[slot] += turn.rewards[0]
            info = turn.infos[0]
            self._touches[slot] += info["reward_touch_puck"] > 0
            if turn.terminated or turn.truncated:
                del self.matches[slot]
                steps, score, touches = self._steps[slot], self._scores[slot], self._touches[slot]
                over.append((slot, MatchResult(match.task.label, info["winner"], steps, score, touches)))
        return over


def play(
    games: Sequence[Game], matches: Iterable[Match], policy: Policy, watch: Watch | None = None
) -> list[MatchResult]:
    """Play all matches, as many at a time as there are games; a game that ends takes the next match.

    Args:
        policy: actions (n, action) for observations (n, observation).
        watch: see `Games.step`.

    Returns:
        Results in the order of the matches.
    """
    table, waiting = Games(games), enumerate(matches)
    numbers: dict[int, int] = {}
    results: dict[int, MatchResult] = {}

    def begin(slot: int) -> None:
        number, match = next(waiting, (0, None))
        if match is not None:
            numbers[slot] = number
            table.begin(slot, match)

    for slot in range(len(games)):
        begin(slot)
    while slots := list(table.matches):
        for slot, result in table.step(slots, policy(table.seen[slots, 0]), watch):
            results[numbers[slot]] = result
            begin(slot)
    return [results[number] for number in sorted(results)]
