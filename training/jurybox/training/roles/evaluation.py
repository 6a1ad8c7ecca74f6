"""Evaluations: whole episodes of fixed seeds. One loop plays them, for evaluators and for `jurybox policy`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from jurybox.training.algorithms.base import Array, Progress
from jurybox.training.environments.adapter import Adapter, Lent, Moved, Waiting, made_adapter
from jurybox.training.roles.env_actor import Cast
from jurybox.training.roles.players import players
from jurybox.training.roles.policy_client import NEWEST
from jurybox.training.runtime.plan import load
from jurybox.training.runtime.role_context import Evaluator, RoleContext
from jurybox.training.spaces import MASK, ContractBroken, short

Chooses = Callable[[Waiting], Array]

_SEED = 1_000_003  # makes the episodes of evaluations different from those of the training
_ENDLESS = 100_000  # steps after which an evaluation's episode counts as endless, if nothing bounds it
_SIDE_BY_SIDE = 10  # maximum number of parallel environments of the evaluator


@dataclass(frozen=True, slots=True)
class Episode:
    """A finished episode.

    Attributes:
        total: its return; of several agents the mean, or that of those that were asked for.
        length: its number of steps.
        totals: the return of each agent.
        numbers: beside them, see `adapter.Moved`.
    """

    total: float
    length: int
    totals: Mapping[str, float] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)


def play_episodes(
    adapter: Adapter,
    seeds: Sequence[int],
    choose: Chooses,
    *,
    begins: Callable[[int], None] = lambda episode: None,
    ended: Callable[[Episode], None] = lambda episode: None,
    alive: Callable[[], None] = lambda: None,
    resetting: Callable[[], AbstractContextManager[None]] = nullcontext,
    most: int | None = None,
    of: Sequence[str] | None = None,
) -> list[Episode]:
    """Play an episode of each seed, side by side as far as the adapter has environments; return them in this order.

    Which episodes an environment plays is fixed beforehand, so that short ones are not played more often.

    Args:
        choose: actions (n, ...) for the agent that waits.
        begins: called with an episode's number before it begins. ended: called with each that ended.
        alive: called after every step. resetting: what resets are within.
        most: steps after which an episode counts as endless; None: it may take as many as it likes.
        of: agents whose mean return is an episode's; None: all.

    Raises:
        ContractBroken: an episode has not ended.
    """
    n, count = adapter.n, len(seeds)
    totals = {agent: np.zeros(count) for agent in adapter.agents}
    lengths = np.zeros(count, np.int64)
    playing = dict(enumerate(range(min(n, count))))  # by environment, the number of its episode
    found: dict[int, Episode] = {}
    for number, episode in playing.items():
        begins(episode)
        with resetting():
            adapter.begin(number, seeds[episode])
    while playing:
        moved = adapter.step(choose(adapter.waiting()))
        numbers, episodes = list(playing), list(playing.values())
        for result in moved.results:
            scores = result.reward if result.score is None else result.score
            totals[result.agent][episodes] += scores[numbers]
        if moved.steps:
            acted = moved.results[0].acted if moved.results else None
            lengths[episodes] += 1 if acted is None else acted[numbers]
        for number in moved.over:
            episode = playing.pop(number)
            each = {agent: float(total[episode]) for agent, total in totals.items()}
            total, extra = float(np.mean([each[agent] for agent in of or each])), moved.numbers.get(number, {})
            found[episode] = Episode(total, int(lengths[episode]), each, extra)
            ended(found[episode])
            if episode + n < count:
                playing[number] = episode + n
                begins(episode + n)
                with resetting():
                    adapter.begin(number, seeds[episode + n])
        if most is not None and playing and (taken := int(lengths[list(playing.values())].max())) >= most:
            raise ContractBroken(f"an episode of {adapter.name} has not ended after {taken:,} steps: {adapter.bound}")
        alive()
    return [found[episode] for episode in range(count)]


class Suite(NamedTuple):
    """Episodes of the same kind.

    Attributes:
        name: at the end of its numbers' names: "wins_weak".
        players: who plays agents that the newest policy does not play, see `env_actor.Cast`.
    """

    name: str = ""
    players: Mapping[str, str] = MappingProxyType({})


class Filmed:
    """An adapter whose first episode in its first environment is filmed; use it in a ``with`` statement.

    Args:
        adapter: with `render`.
        path: of the film, NAME.webm.
    """

    def __init__(self, adapter: Any, path: Path) -> None:
        self._adapter, self._path = adapter, path
        self._resources = ExitStack()
        self._film: Any = None
        self._over = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._adapter, name)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *raised: Any) -> None:
        self._resources.__exit__(*raised)

    def begin(self, environment: int, seed: int) -> None:
        """Begin an episode."""
        self._adapter.begin(environment, seed)
        if environment == 0:
            self._add()

    def step(self, actions: Array) -> Moved:
        """Let the agent act."""
        moved: Moved = self._adapter.step(actions)
        self._add()
        self._over = self._over or 0 in moved.over
        return moved

    def _add(self) -> None:
        if self._over:
            return
        frame, fps = self._adapter.render(0)
        if not (isinstance(frame, np.ndarray) and frame.dtype == np.uint8 and frame.ndim == 3 and frame.shape[2] == 3):
            raise ContractBroken(
                f"render returned {short(frame)}: expected uint8 (height, width, 3), which film = true needs; let the "
                "environment take render_mode = 'rgb_array'"
            )
        if self._film is None:
            from jurybox.training.film import Film  # its packages take a while to import

            self._film = self._resources.enter_context(Film(self._path, fps))
        self._film.add(frame)


class EnvEvaluator(Evaluator):
    """The evaluator role: plays the same whole episodes each time. The mean return selects the best weights.

    Its numbers are return, return_std and length, those of the environment's own (see `adapter.Moved`), and all of
    them for each suite.

    Args:
        adapter: "package.module:callable" that makes an `Adapter`, called with `n` and the `arguments`.
        policies: by agent, the channel of its policy.
        algorithms: by channel, arguments of `algorithms.make`.
        episodes: of an evaluation.
        side_by_side: environments at most.
        bound: steps that an episode has at most, if the settings say so.
        explore: whether actions are explored as at the end of the training; else without exploration.
        against_random: whether the same episodes are once played at random: numbers random_AGENT.
        suites: by name, the `players` of a `Suite`; each has these episodes. None: the newest policy plays all agents.
        clients: see `players.players`.
        film: name of the run's folder for films of each evaluation's first episode; None: none are made.
        worker: whose environments they are, where these are shared; None: the evaluator's own.
    """

    def __init__(
        self,
        context: RoleContext,
        *,
        adapter: str,
        arguments: Mapping[str, Any],
        policies: Mapping[str, str],
        algorithms: Mapping[str, Mapping[str, Any]],
        episodes: int,
        side_by_side: int = _SIDE_BY_SIDE,
        bound: int | None = None,
        explore: bool = False,
        against_random: bool = False,
        suites: Mapping[str, Mapping[str, str]] | None = None,
        clients: Mapping[str, Any] | None = None,
        film: str | None = None,
        worker: int | None = None,
    ) -> None:
        super().__init__(context)
        n = min(side_by_side, episodes)
        self._adapter: Adapter = made_adapter(load(adapter), arguments, worker or context.worker_index, range(n))
        self._players = players(context, policies, algorithms, rows=n, clients=clients)
        self._cast = Cast(self._adapter, self._players)
        self._suites = [Suite(*each) for each in suites.items()] if suites else [Suite()]
        self._explores, self._against_random, self._bound = explore, against_random, bound
        self._seeds = np.random.default_rng((_SEED, context.plan.seed)).integers(2**31, size=episodes).tolist()
        self._rng = np.random.default_rng(0)
        self._random_play: list[Episode] = []
        self._films = None if film is None else context.folder(film)

    def evaluate(self) -> Mapping[str, float]:
        if not (isinstance(self._adapter, Lent) and self._adapter.shared):
            return self._evaluate()
        self._adapter.hold(self.context.alive)
        try:
            return self._evaluate()
        finally:
            self._adapter.release()

    def _evaluate(self) -> Mapping[str, float]:
        if self._against_random and not self._random_play:
            self._random_play = self._play(self._random, self._suites[0])
        if self._films is None:
            suites = {suite.name: self._play(self._chosen, suite) for suite in self._suites}
        else:
            self._films.mkdir(parents=True, exist_ok=True)
            with Filmed(self._adapter, self._films / f"{self.context.env_steps:010d}.webm") as filmed:
                suites = {suite.name: self._play(self._chosen, suite, filmed) for suite in self._suites}
        played = [episode for episodes in suites.values() for episode in episodes]
        numbers = _summary(played)
        for name, episodes in suites.items():
            if name:
                numbers |= {f"{what}_{name}": value for what, value in _summary(episodes).items()}
        for name, episodes in (("return", played), ("random", self._random_play)):
            for agent in self._adapter.agents:
                if agent and episodes:
                    numbers[f"{name}_{agent}"] = float(np.mean([each.totals[agent] for each in episodes]))
        return numbers

    def close(self) -> None:
        self._adapter.close()

    def _play(self, choose: Chooses, suite: Suite, adapter: Adapter | None = None) -> list[Episode]:
        def begins(episode: int) -> None:
            # Actions are drawn anew in each episode, so that the same is drawn in it whatever happened in earlier ones.
            self._rng = np.random.default_rng(self._seeds[episode])
            self._cast.begin(episode % self._adapter.n, self._seeds[episode], suite.players)

        most = max(_ENDLESS, self._bound or 0)
        of = [agent for agent in self._adapter.agents if suite.players.get(agent, NEWEST) == NEWEST]
        told: dict[str, Any] = {"begins": begins, "alive": self.context.alive, "resetting": self.context.resetting}
        return play_episodes(adapter or self._adapter, self._seeds, choose, most=most, of=of, **told)

    def _chosen(self, waiting: Waiting) -> Array:
        algorithm, asked = self._players[waiting.agent].algorithm, self._cast.ask(waiting)
        if asked.newest is None:
            return self._cast.actions(asked, None)
        outputs = asked.newest()
        method = "explore" if self._explores else "greedy"
        found = (
            algorithm.explore(outputs, self._rng, Progress(1, 1))[0] if self._explores else algorithm.greedy(outputs)
        )
        mask = waiting.observation.get(MASK) if algorithm.spec.masked else None
        chosen = algorithm.checked(f"{type(algorithm).__name__}.{method}", found, self._adapter.n, mask)
        return self._cast.actions(asked, chosen)

    def _random(self, waiting: Waiting) -> Array:
        spec = self._players[waiting.agent].algorithm.spec
        mask = waiting.observation.get(MASK) if spec.masked else None
        return spec.action.sample(self._rng, self._adapter.n, mask)


def _summary(episodes: Sequence[Episode]) -> dict[str, float]:
    returns = np.array([each.total for each in episodes])
    numbers = {name: float(np.mean([each.numbers[name] for each in episodes])) for name in episodes[0].numbers}
    length = float(np.mean([each.length for each in episodes]))
    return {**numbers, "return": float(returns.mean()), "return_std": float(returns.std()), "length": length}
