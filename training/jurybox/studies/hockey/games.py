"""Many games side by side: what actor and evaluator play in, how its actor explores, and matches of one policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from jurybox.studies.hockey.bots import Opponent, make_opponent
from jurybox.studies.hockey.game import GOAL_REWARD, Game, GameStep
from jurybox.studies.hockey.original import make_game
from jurybox.studies.hockey.settings import Shaping
from jurybox.training.algorithms.acting import coloured_noise
from jurybox.training.environments.adapter import Moved, Result, Waiting
from jurybox.training.environments.making import EnvironmentPlace, places_of
from jurybox.training.environments.stock import Kept, kept
from jurybox.training.replay import Field
from jurybox.training.roles.evaluation import Episode, play_episodes
from jurybox.training.runtime.plan import Kind
from jurybox.training.runtime.role_context import RoleContext
from jurybox.training.spaces import ALONE, check_finite, number

PLAYER, OPPONENT = AGENTS = ("player", "opponent")
LONGEST = 252  # maximum number of steps of a game, including the additional one of the original environment
_SEED = 1_000_003  # makes the games of matches different from those of the training

Rows = npt.NDArray[np.float32]
Policy = Callable[[Rows], Rows]


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


class HockeyGames:
    """`n` games as an adapter, see `environments.adapter.WithBots`: two agents, who act at the same time.

    Rewards are shaped; returns are of the environment's own. A game's numbers are the player's: points (1 won, 0 tied,
    -1 lost), wins, ties, losses, and touches, how often it caught the puck.

    Args:
        n: number of games.
        env, mode: see `make_game`.
        shaping: arguments of `Shaping`.
        games: these instead of new ones; closed with this.
        places: of each game in the run.
        shared: whether they are those of the process's stock, see `environments.stock`.

    Attributes:
        games: as above.
    """

    agents: Sequence[str] = AGENTS
    bound = "a game ends by itself after 250 steps"

    def __init__(
        self,
        n: int = 1,
        env: str | None = None,
        mode: int = 0,
        shaping: Mapping[str, float] | None = None,
        *,
        games: Sequence[Game] = (),
        places: Sequence[EnvironmentPlace] = (),
        shared: bool = False,
    ) -> None:
        self.shared = shared
        made = partial(make_game, env, mode)
        self._kept = [Kept(game) for game in games] or [
            kept(["hockey", env, mode, *place], made, shared=shared) for place in places or places_of(0, range(n))
        ]
        self.games: list[Game] = [each.env for each in self._kept]
        self.n, self.name = len(self.games), env or "hockey"
        self._shaping = Shaping(**(shaping or {}))
        self.action_size = self.games[0].action_size
        self._seen = np.zeros((2, self.n, self.games[0].observation_size), np.float32)
        self._actions = np.zeros((2, self.n, self.action_size), np.float32)
        self._playing, self._touches = [False] * self.n, [0] * self.n
        self._turn = 0  # the agent whose turn it is

    def begin(self, environment: int, seed: int) -> None:
        """Begin a game. The puck starts on the side of agent ``seed % 2``."""
        self._kept[environment].user = self
        self._seen[:, environment] = self.games[environment].reset(seed, first=seed % 2)
        self._playing[environment], self._touches[environment] = True, 0

    def waiting(self) -> Waiting:
        """The agent whose turn it is; beside the player, the opponent."""
        others = () if self._turn else (self._waiting(1),)
        return self._waiting(self._turn)._replace(others=others)

    def step(self, actions: npt.NDArray[Any]) -> Moved:
        """Let that agent act, in [-1, 1]; after the opponent, the games move."""
        self._actions[self._turn] = actions
        self._turn = 1 - self._turn
        if self._turn:
            return Moved((), 0, ())
        self._seen = self._seen.copy()  # what was waiting stays as it was
        # Lists, since single elements of arrays take several times as long.
        rewards, scores, ends = ([[0.0] * self.n, [0.0] * self.n] for _ in range(3))
        numbers = {}
        playing = [slot for slot in range(self.n) if self._playing[slot]]
        for slot in playing:
            turn = self.games[slot].step(self._actions[:, slot])
            self._seen[:, slot] = turn.observations
            ends[0][slot], ends[1][slot] = turn.terminated, turn.truncated
            for player in (0, 1):
                scores[player][slot] = turn.rewards[player]
                rewards[player][slot] = shaped(turn, player, self._shaping)
            self._touches[slot] += turn.infos[0]["reward_touch_puck"] > 0
            if turn.terminated or turn.truncated:
                self._playing[slot] = False
                numbers[slot] = self._numbers(slot, turn.infos[0]["winner"])
        check_finite(self._seen, "an observation")
        infos: list[Mapping[str, Any]] = [{}] * self.n
        paid, own, (terminated, truncated) = np.array(rewards), np.array(scores), np.array(ends, np.bool_)
        results = [
            Result(agent, paid[player], terminated, truncated, self._seen[player], infos, None, own[player])
            for player, agent in enumerate(AGENTS)
        ]
        return Moved(results, len(playing), list(numbers), numbers)

    def scripted(self, name: str, seed: int) -> Policy:
        """Return the bot of that name, "anchor:weak", for a game. Raises KeyError: there is none."""
        try:
            bot = make_opponent(name.removeprefix("anchor:"), seed, self.action_size)
        except ValueError as error:
            raise KeyError(f"nobody plays as {name!r}: {error}") from error
        return bot.act

    def hold(self, alive: Callable[[], None]) -> list[int]:
        """Return the games that another has begun anew since, see `adapter.Lent`."""
        return [slot for slot in range(self.n) if self._playing[slot] and self._kept[slot].user is not self]

    def release(self) -> None:
        """Others may have the games."""

    def close(self) -> None:
        """Close the games, if they are not shared."""
        for game in () if self.shared else self.games:
            game.close()

    def _waiting(self, agent: int) -> Waiting:
        seen = self._seen[agent]
        return Waiting(AGENTS[agent], {ALONE: seen}, seen)

    def _numbers(self, slot: int, winner: int) -> dict[str, float]:
        won, tied, lost = winner > 0, winner == 0, winner < 0
        return {"points": winner, "wins": won, "ties": tied, "losses": lost, "touches": self._touches[slot]}


class EpisodeNoise:
    """How the actor explores: coloured noise, drawn for a whole game, of another scale in each of a training's games.

    Games that begin while nothing is learned yet are played by the noise alone.

    Args:
        n: games of this actor.
        scales: the first and the last of the scales, which are spread over the games of all actors.
        colour: exponent of the noise's spectrum.
        action_size: of an action.

    Attributes:
        scales: of each game, (n,).
    """

    def __init__(
        self, context: RoleContext, n: int, *, scales: tuple[float, float], colour: float, action_size: int
    ) -> None:
        self._context, self._colour = context, colour
        workers = sum(role.kind is Kind.ACTOR for role in context.plan.roles)
        self.scales = np.geomspace(*scales, n * workers)[context.number :: workers]
        self._noise = np.zeros((n, LONGEST, action_size), np.float32)
        self._taken = np.zeros(n, np.int64)
        self._random = np.zeros(n, np.bool_)

    def begin(self, environment: int, rng: np.random.Generator) -> None:
        """Draw the noise of a game."""
        self._taken[environment] = 0
        random = self._context.env_steps < self._context.plan.pace.learning_starts
        self._random[environment] = random
        drawn = coloured_noise(rng, LONGEST, self._noise.shape[-1], self._colour)
        self._noise[environment] = drawn * (1.0 if random else np.float32(self.scales[environment]))

    def explore(self, actions: Rows, environments: Sequence[int]) -> Rows:
        """Add it to actions, (n, action)."""
        chosen = [*environments]
        moved = np.where(self._random[chosen, None], np.float32(0.0), actions)
        moved += self._noise[chosen, self._taken[chosen]]
        self._taken[chosen] += 1
        return np.minimum(np.maximum(moved, -1.0), 1.0)


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
    def of(cls, episodes: Sequence[Episode]) -> Standing:
        """Summarize games of `HockeyGames`."""
        wins, ties, losses = (
            float(np.mean([each.numbers[name] for each in episodes])) for name in ("wins", "ties", "losses")
        )
        score, steps = (float(np.mean([getattr(each, name) for each in episodes])) for name in ("total", "length"))
        return cls(len(episodes), wins, ties, losses, score, steps)

    @property
    def points(self) -> float:
        """The share of wins minus the share of losses, from -1 (lost all) to 1 (won all)."""
        return self.wins - self.losses


def evaluate(games: HockeyGames, policy: Policy, opponent: str | Policy, n: int, *, seed: int = 0) -> Standing:
    """Play `n` games against a built-in opponent ("weak", "strong", "random"), or another policy."""
    seeds = [int(np.random.default_rng((_SEED, seed, number)).integers(2**30)) for number in range(n)]
    return Standing.of(play(games, [2 * chance + number % 2 for number, chance in enumerate(seeds)], policy, opponent))


def play(
    games: HockeyGames,
    seeds: Sequence[int],
    policy: Policy,
    opponent: str | Policy,
    *,
    ended: Callable[[Episode], None] = lambda episode: None,
    alive: Callable[[], None] = lambda: None,
) -> list[Episode]:
    """Play a game of each seed, side by side; return them in this order.

    Args:
        policy: actions (n, action) of the player for observations (n, observation).
        opponent: the name of a bot, or another policy.
        ended: called with each game that ended. alive: called after each step.
    """
    bots: dict[int, Opponent] = {}

    def begins(episode: int) -> None:
        if isinstance(opponent, str):
            bots[episode % games.n] = make_opponent(opponent, seeds[episode], games.action_size)

    def choose(waiting: Waiting) -> Rows:
        seen: Rows = waiting.observation[ALONE]
        if waiting.agent == PLAYER:
            return policy(seen)
        if not isinstance(opponent, str):
            return opponent(seen)
        actions = np.zeros((games.n, games.action_size), np.float32)
        for slot, bot in bots.items():
            actions[slot] = bot.act(seen[slot])
        return actions

    return play_episodes(games, seeds, choose, begins=begins, ended=ended, alive=alive, of=[PLAYER])
