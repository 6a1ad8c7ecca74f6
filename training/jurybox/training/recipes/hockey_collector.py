"""Collecting hockey: rounds of episodes against opponents, rows into the replay.

An episode's chance (its start, its opponent's, the noise) comes from the training's seed and the episode's number
alone, so a run that goes on from a checkpoint plays what it would have played.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from jurybox.training.algorithms.exploration import coloured_noise
from jurybox.training.algorithms.league import League
from jurybox.training.environments.hockey.game import GOAL_REWARD, Game, Turn
from jurybox.training.environments.hockey.matches import Match, Policy, Result, play
from jurybox.training.recipes.hockey_opponents import Opponents
from jurybox.training.recipes.hockey_settings import HockeyTraining, Shaping
from jurybox.training.replay import Episodes, Field, Replay

LONGEST = 252  # steps of a game, the original's one more counted in


def make_replay(name: str, settings: HockeyTraining, observation_size: int, action_size: int) -> Replay:
    """The replay of a hockey training: rows linked by episode, so that next observations are not stored twice."""
    return Replay.create(
        name,
        settings.capacity,
        {
            "observation": Field((observation_size,)),
            "action": Field((action_size,)),
            "reward": Field(),
            "terminated": Field((), "bool"),
        },
        prioritized=settings.prioritized,
        alpha=settings.alpha,
        episodes=Episodes(),
        threads=1,
        seed=settings.seed,
    )


def shaped(turn: Turn, player: int, shaping: Shaping) -> float:
    """The reward that the learner is given for a step of `player`."""
    info = turn.infos[player]
    return float(
        GOAL_REWARD * info["winner"]
        + shaping.closeness * info["reward_closeness_to_puck"]
        + shaping.touch * info["reward_touch_puck"]
        + shaping.direction * info["reward_puck_direction"]
    )


class Collector:
    """Plays rounds, one episode in each game, and writes what was seen.

    Args:
        games: side by side; they are closed by their owner.
        replay: that rows go into.
        settings: of the training.
        see: is given all observations of a round (n, o), for the normaliser.
    """

    def __init__(
        self,
        games: Sequence[Game],
        replay: Replay,
        settings: HockeyTraining,
        see: Callable[[npt.NDArray[np.float32]], None],
    ) -> None:
        self._games = games
        self._settings = settings
        self._see = see
        sides = 2 if settings.both_sides else 1
        self._streams = [[replay.stream() for _ in range(sides)] for _ in games]
        self._seen: list[npt.NDArray[np.float32]] = []

    def round(self, first_episode: int, policy: Policy | None, league: League, opponents: Opponents) -> list[Result]:
        """One episode in each game.

        Args:
            first_episode: number of the first of them in the whole training.
            policy: None acts at random.
        """
        if policy is None:
            actions = self._games[0].action_size

            def policy(rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
                return np.zeros((len(rows), actions), np.float32)

            noise = np.ones(len(self._games))
        else:
            noise = np.geomspace(*self._settings.noise, len(self._games))
        numbers = range(first_episode, first_episode + len(self._games))
        matches = [
            self._match(number, float(deviation), league, opponents)
            for number, deviation in zip(numbers, noise, strict=True)
        ]
        results = play(self._games, matches, policy, self._write)
        self._see(np.concatenate(self._seen))
        self._seen.clear()
        return results

    def _match(self, number: int, noise: float, league: League, opponents: Opponents) -> Match:
        rng = np.random.default_rng((self._settings.seed, number))
        name = league.choose(rng)
        drawn = noise * coloured_noise(rng, LONGEST, self._games[0].action_size, self._settings.noise_colour)
        # In turn from round to round as well: each game, with its own noise, begins on either side.
        first = (number + number // len(self._games)) % 2
        return Match(int(rng.integers(2**31)), first, name, opponents.player(name), drawn)

    def _write(self, slot: int, before: npt.NDArray[np.float32], actions: npt.NDArray[np.float32], turn: Turn) -> None:
        for player, stream in enumerate(self._streams[slot]):
            stream.add(
                observation=before[player],
                action=actions[player],
                reward=shaped(turn, player, self._settings.shaping),
                terminated=turn.terminated,
            )
            if turn.truncated:
                stream.end(observation=turn.observations[player])
        self._seen.append(before.copy())
