"""Collecting hockey: games in two halves, one of which steps while the other's actions are being computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from jurybox.training.algorithms.exploration import coloured_noise
from jurybox.training.algorithms.league import draw
from jurybox.training.environments.hockey.bots import Opponent
from jurybox.training.environments.hockey.game import GOAL_REWARD, Game, Turn
from jurybox.training.environments.hockey.matches import Match, Result, Table
from jurybox.training.recipes.hockey_settings import HockeyTraining, Shaping
from jurybox.training.replay import Field, Replay

LONGEST = 252  # steps of a game, the original's one more counted in
Rows = npt.NDArray[np.float32]


class Policies(Protocol):
    """Who acts for the collector: the learner's newest policy, and its opponents under the league's names."""

    def ask(self, half: int, seen: Rows, opponents: Sequence[Opponent], theirs: Rows) -> None:
        """Begin to compute actions for one half: its observations (n, o), its opponents and what those see (n, o)."""

    def actions(self, half: int) -> Rows:
        """The learner's actions (n, a) for what was asked last; opponents have theirs then, too."""

    def player(self, name: str) -> Opponent:
        """A player of its own for one match at a time; KeyError when nobody plays under that name."""

    def odds(self) -> Mapping[str, float]:
        """How likely each opponent is to be the next one."""


def fields(observation_size: int, action_size: int) -> dict[str, Field]:
    """What a row of the replay holds; rows are linked by episode, so next observations are not stored twice."""
    return {
        "observation": Field((observation_size,)),
        "action": Field((action_size,)),
        "reward": Field(),
        "terminated": Field((), "bool"),
    }


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
    """Plays match after match in each game, and writes what was seen.

    A match's chance (opponent, start, noise) comes from the training's seed, the collector and the match's number
    alone.

    Args:
        games: side by side, at least two; they are closed by their owner.
        replay: that rows go into.
        policies: who acts.
        number, workers: which of how many collectors it is; the noise ladder spans them all.
        begun: matches begun before.

    Attributes:
        begun: matches begun so far.
        noise: (games,) deviation of the exploration in each.
    """

    def __init__(
        self,
        games: Sequence[Game],
        replay: Replay,
        settings: HockeyTraining,
        policies: Policies,
        *,
        number: int = 0,
        workers: int = 1,
        begun: int = 0,
    ) -> None:
        self.begun = begun
        self._table = Table(games)
        self._settings = settings
        self._policies = policies
        self._number = number
        sides = 2 if settings.both_sides else 1
        self._streams = [[replay.stream() for _ in range(sides)] for _ in games]
        slots = range(len(games))
        self._halves = (list(slots[::2]), list(slots[1::2]))
        self.noise = np.geomspace(*settings.noise, len(games) * workers)[number::workers]
        self._warm = np.zeros(len(games), bool)
        self._asked = [False, False]
        self._turn = 0

    def step(self, *, warm: bool) -> tuple[int, list[Result]]:
        """One step of the games of one half, the other half's turn next; (steps made, matches that ended).

        Args:
            warm: matches that begin now are played at random.
        """
        half = self._turn
        if not self._asked[half]:
            self._ask(half, warm=warm)
        # The other half is under way while this one steps.
        if not self._asked[1 - half]:
            self._ask(1 - half, warm=warm)
        slots = self._halves[half]
        chosen = self._policies.actions(half)
        chosen[self._warm[slots]] = 0.0
        over = self._table.step(slots, chosen, self._write)
        self._ask(half, warm=warm)
        self._turn = 1 - half
        return len(slots), [result for _, result in over]

    def abandon(self) -> None:
        """Leave all matches where they are, uncounted: a physics engine in the midst of a game cannot be kept."""
        for half in (0, 1):
            if self._asked[half]:
                self._policies.actions(half)
        for slot in list(self._table.matches):
            del self._table.matches[slot]
            for stream in self._streams[slot]:
                stream.end()
        self._asked = [False, False]
        self._turn = 0

    def _ask(self, half: int, *, warm: bool) -> None:
        slots, table = self._halves[half], self._table
        for slot in slots:
            if slot not in table.matches:
                table.begin(slot, self.match(slot, warm=warm))
                self._warm[slot] = warm
        players = [table.matches[slot].player for slot in slots]
        self._policies.ask(half, table.seen[slots, 0], players, table.seen[slots, 1])
        self._asked[half] = True

    def match(self, slot: int, *, warm: bool) -> Match:
        """The next match, to be played in game `slot`."""
        rng = np.random.default_rng((self._settings.seed, self._number, self.begun))
        self.begun += 1
        name = draw(self._policies.odds(), rng)
        actions = self._table.games[slot].action_size
        drawn = coloured_noise(rng, LONGEST, actions, self._settings.noise_colour)
        drawn *= 1.0 if warm else np.float32(self.noise[slot])
        return Match(int(rng.integers(2**31)), int(rng.integers(2)), name, self._policies.player(name), drawn)

    def _write(self, slot: int, before: Rows, actions: Rows, turn: Turn) -> None:
        for player, stream in enumerate(self._streams[slot]):
            stream.add(
                observation=before[player],
                action=actions[player],
                reward=shaped(turn, player, self._settings.shaping),
                terminated=turn.terminated,
            )
            if turn.truncated:
                stream.end(observation=turn.observations[player])
