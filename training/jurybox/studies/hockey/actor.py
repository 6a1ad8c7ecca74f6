"""The actor and the evaluator of a hockey training. They do not import torch, so their processes start quickly."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from jurybox.studies.hockey.bots import Opponent, make_opponent
from jurybox.studies.hockey.curriculum import Opponents
from jurybox.studies.hockey.game import GOAL_REWARD, Game, GameStep
from jurybox.studies.hockey.matches import Games, Match, MatchResult, Policy, play
from jurybox.studies.hockey.opponents import LocalPolicies, Pool, PublishedActor
from jurybox.studies.hockey.original import make_game
from jurybox.studies.hockey.served import ServedPolicies, Serving
from jurybox.studies.hockey.settings import CHANNEL, LEAVING, POOL, RESULTS, ROWS, HockeyTraining, Shaping
from jurybox.training.algorithms.acting import coloured_noise
from jurybox.training.replay import Field, Replay, Streams
from jurybox.training.runtime.role_context import Actor, Evaluator, RoleContext
from jurybox.training.runtime.scoreboard import Word
from jurybox.training.spaces import number

_SEED = 1_000_003  # makes the games of evaluations different from those of the training


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
    def of(cls, results: Sequence[MatchResult]) -> Standing:
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
        """The share of wins minus the share of losses, from -1 (lost all) to 1 (won all)."""
        return self.wins - self.losses


def evaluate(games: Sequence[Game], policy: Policy, opponent: str, n: int, *, seed: int = 0) -> Standing:
    """Play `n` games against a built-in opponent ("weak", "strong", "random")."""
    return standing(games, policy, lambda: make_opponent(opponent, action_size=games[0].action_size), n, (_SEED, seed))


def standing(
    games: Sequence[Game], policy: Policy, make: Callable[[], Opponent], n: int, seed: tuple[int, ...]
) -> Standing:
    """Play `n` games, each against an opponent that `make` returns. The puck starts on the two sides in turn."""
    chances = [int(np.random.default_rng((*seed, number)).integers(2**31)) for number in range(n)]
    matches = [Match(chance, number % 2, make()) for number, chance in enumerate(chances)]
    return Standing.of(play(games, matches, policy))


LONGEST = 252  # maximum number of steps of a game, including the additional one of the original environment
Rows = npt.NDArray[np.float32]


class Policies(Protocol):
    """The policies of a collector: the learner's newest policy, and the opponents by their names in the league."""

    def request(self, half: int, seen: Rows, opponents: Sequence[Opponent], opponent_rows: Rows) -> None:
        """Begin to compute actions for one half: observations (n, o), opponents and their observations (n, o)."""

    def actions(self, half: int) -> Rows:
        """Return the learner's actions (n, a) for the last `request`. The opponents' actions are then ready, too."""

    def player(self, name: str) -> Opponent:
        """Create a player for one match. Raises KeyError for an unknown name."""

    def curriculum(self) -> Mapping[str, Any]:
        """Return the published curriculum, which the next matches are drawn from."""


def fields(observation_size: int, action_size: int) -> dict[str, Field]:
    """Return the fields of the replay. Rows are linked by episode, so next observations are not stored."""
    return {
        "observation": Field((observation_size,)),
        "action": Field((action_size,)),
        "reward": Field(),
        "terminated": Field((), "bool"),
    }


def shaped(turn: GameStep, player: int, shaping: Shaping) -> float:
    """Return the shaped reward of `player` for a step."""
    info = turn.infos[player]
    return number(
        GOAL_REWARD * info["winner"]
        + shaping.closeness * info["reward_closeness_to_puck"]
        + shaping.touch * info["reward_touch_puck"]
        + shaping.direction * info["reward_puck_direction"],
        "the reward",
    )


class Collector:
    """Plays matches in parallel games, and writes their transitions to the replay.

    The random choices of a match (opponent, start, noise) depend only on the training's seed, the collector's number
    and the match's number.

    Args:
        games: at least two parallel games; the caller closes them.
        replay: receives the rows.
        policies: compute the actions.
        number, workers: number of this collector and of all collectors; the noise levels are spread over the games of
            all of them.
        begun: number of matches begun before.

    Attributes:
        begun: number of matches begun so far.
        noise: (games,) scale of the exploration noise in each game.
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
        self._table = Games(games)
        self._settings = settings
        self._policies = policies
        self._number = number
        sides = 2 if settings.record_opponents else 1
        self._streams = [[replay.stream() for _ in range(sides)] for _ in games]
        # The second part of the replay is never overwritten; it receives games against anchors until it is full.
        self._kept = replay.parts[1] if len(replay.parts) > 1 else None
        self._kept_streams = [[replay.anchor for _ in range(sides)] for _ in games] if self._kept is not None else []
        self._writes = list(self._streams)
        slots = range(len(games))
        self._halves = (list(slots[::2]), list(slots[1::2]))
        self.noise = np.geomspace(*settings.action_noise, len(games) * workers)[number::workers]
        self._warm = np.zeros(len(games), bool)
        self._requested = [False, False]
        self._turn = 0

    def step(self, *, warm: bool) -> tuple[int, list[MatchResult]]:
        """Step the games of one half; the next call steps the other half.

        Args:
            warm: matches that begin now are played with random actions.

        Returns:
            The number of steps, and the results of the matches that ended.
        """
        half = self._turn
        if not self._requested[half]:
            self._request(half, warm=warm)
        # The other half's actions are computed while this half steps.
        if not self._requested[1 - half]:
            self._request(1 - half, warm=warm)
        slots = self._halves[half]
        chosen = self._policies.actions(half)
        chosen[self._warm[slots]] = 0.0
        over = self._table.step(slots, chosen, self._write)
        self._request(half, warm=warm)
        self._turn = 1 - half
        return len(slots), [result for _, result in over]

    def _request(self, half: int, *, warm: bool) -> None:
        slots, table = self._halves[half], self._table
        for slot in slots:
            if slot not in table.matches:
                table.begin(slot, self.match(slot, warm=warm))
                self._warm[slot] = warm
                self._writes[slot] = self._streams_for(slot, warm=warm)
        players = [table.matches[slot].player for slot in slots]
        self._policies.request(half, table.seen[slots, 0], players, table.seen[slots, 1])
        self._requested[half] = True

    def match(self, slot: int, *, warm: bool) -> Match:
        """Choose the next match of game `slot`."""
        rng = np.random.default_rng((self._settings.seed, self._number, self.begun))
        self.begun += 1
        task = Opponents.draw(self._policies.curriculum(), rng)
        name = task.players["opponent"]
        actions = self._table.games[slot].action_size
        drawn = coloured_noise(rng, LONGEST, actions, self._settings.noise_color)
        drawn *= 1.0 if warm else np.float32(self.noise[slot])
        return Match(int(rng.integers(2**31)), int(rng.integers(2)), self._policies.player(name), task, drawn)

    def _streams_for(self, slot: int, *, warm: bool) -> list[Streams]:
        """Return the streams for the rows of the match that begins in game `slot`."""
        kept = self._kept
        # A game that fills this part is cut off there: its last rows have no successors, so no window goes past them.
        if kept is None or warm or kept.ring.size >= kept.capacity:
            return self._streams[slot]
        return (self._kept_streams if self._table.matches[slot].task.anchor else self._streams)[slot]

    def _write(self, slot: int, before: Rows, actions: Rows, turn: GameStep) -> None:
        for player, stream in enumerate(self._writes[slot]):
            stream.add(
                observation=before[player],
                action=actions[player],
                reward=shaped(turn, player, self._settings.shaping),
                terminated=turn.terminated,
            )
            if turn.truncated:
                stream.end(observation=turn.observations[player])


_CARRIED = 10.0  # seconds to wait for the file of a past self from the learner's machine


class HockeyActor(Actor):
    """The actor role. One step is one step of half the games.

    Args:
        settings: arguments of `HockeyTraining`.
        past: name of the model of past selves on the plan's server; None without a server.
        engine: name of the cluster's engine that serves the policy; None without one.
    """

    def __init__(
        self,
        context: RoleContext,
        *,
        settings: Mapping[str, Any],
        past: str | None = None,
        engine: str | None = None,
    ) -> None:
        super().__init__(context)
        self._settings = s = HockeyTraining(**settings)
        self._results = context.replay(RESULTS)
        with ExitStack() as undo:
            games = [make_game(s.env, s.mode) for _ in range(s.envs_per_worker)]
            for game in games:
                undo.callback(game.close)
            published = PublishedActor(context.reader(CHANNEL))
            context.follow(CHANNEL, published)
            pool = Pool(context.folder(POOL), _CARRIED, s.league.pool + LEAVING)
            local = LocalPolicies(published, pool, games[0].action_size)
            policies: Policies = local
            self._held_back: Callable[[], int] = lambda: 0
            if past is not None or engine is not None:
                where = Serving(context, past, engine)
                policies = served = undo.enter_context(ServedPolicies(where, len(games), local, pool, s.max_lag))
                self._held_back = lambda: served.held_back
            self.collector = Collector(
                games,
                context.replay(ROWS),
                s,
                policies,
                number=context.number,
                workers=s.workers,
                # At least as many as earlier processes of this role have begun, since a match takes a step or more; and
                # each of these processes left at most one in each of its games that took none.
                begun=0 if context.life == 1 else context.words[Word.ENV_STEPS] + context.life * len(games),
            )
            self._resources = undo.pop_all()

    def step(self) -> int:
        held_back = self._held_back()
        made, results = self.collector.step(warm=self.context.env_steps < self._settings.learning_starts)
        self.context.words[Word.FORCED] += self._held_back() - held_back
        for result in results:
            self._results.add(label=result.label, winner=result.winner)
            self.context.episode(
                total=result.score,
                length=result.steps,
                wins=result.winner > 0,
                losses=result.winner < 0,
                touches=result.touches,
            )
        return made

    def save(self) -> dict[str, Any]:
        # The state of the physics engine cannot be saved: a resumed run leaves the matches that go on here, and begins
        # others.
        return {"begun": self.collector.begun}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.collector.begun = int(state["begun"])

    def close(self) -> None:
        self._resources.close()


class HockeyEvaluator(Evaluator):
    """The evaluator role: plays the same games against the anchors each time, without noise.

    Its number `points` selects the best weights.
    """

    def __init__(self, context: RoleContext, *, settings: Mapping[str, Any]) -> None:
        super().__init__(context)
        self._settings = s = HockeyTraining(**settings)
        self._published = PublishedActor(context.reader(CHANNEL))
        context.follow(CHANNEL, self._published)
        self._games = [make_game(s.env, s.mode) for _ in range(8)]

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
    """Return the numbers of all standings by name: wins_weak, ties_weak, ..."""
    return {
        f"{what}_{who}": getattr(standing, what)
        for who, standing in standings.items()
        for what in ("wins", "ties", "losses", "score")
    }
