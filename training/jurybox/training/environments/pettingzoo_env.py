"""PettingZoo environments (AEC and parallel): their agents act in turns. What an agent observes and does is read by the
same `Observations` and `Actions` as in Gymnasium's environments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from pettingzoo import AECEnv, ParallelEnv
from pettingzoo.utils import BaseParallelWrapper
from pettingzoo.utils.conversions import parallel_to_aec

from jurybox.training.environments import making
from jurybox.training.environments.adapter import Moved, Result, Waiting, can_be_saved
from jurybox.training.environments.gymnasium_env import Actions, Observations, stacked_space
from jurybox.training.environments.making import NOWHERE, EnvironmentPlace, EnvironmentUnusable
from jurybox.training.environments.stock import Kept, kept
from jurybox.training.spaces import MASK, AgentSpec, ContractBroken, action_mask, flag, number, short

Array = npt.NDArray[Any]

_LONGEST_NAME, _FORBIDDEN = 60, frozenset("/+*\0\n")


def make_world(name: str, arguments: Mapping[str, Any], place: EnvironmentPlace = NOWHERE) -> AECEnv[Any, Any, Any]:
    """Create an environment whose agents take turns. In a parallel one, all act together after the last has chosen.

    Args:
        name: "package.module:callable" that returns a PettingZoo environment (AEC or parallel).
        arguments: its keyword arguments.
        place: which of a run's environments it is; passed as in `gymnasium_env.make_environment`.

    Raises:
        EnvironmentUnusable: the environment cannot be created, or is neither.
    """
    made = making.make(name, arguments, place, "package.module:callable")
    if isinstance(made, ParallelEnv):
        return parallel_to_aec(_TruncateMissing(made))
    if not isinstance(made, AECEnv):
        raise EnvironmentUnusable(
            f"{name} made a {type(made).__name__}: expected a PettingZoo environment, AECEnv or ParallelEnv (of a "
            "module of PettingZoo's own: module:env or module:parallel_env); Gymnasium's are for `jurybox train gym`"
        )
    return made


def kept_world(name: str, arguments: Mapping[str, Any], *, place: EnvironmentPlace, shared: bool) -> Kept:
    """Make an environment as `make_world` does, or take it from the process's stock, see `stock.kept`."""
    return kept([name, arguments, place], lambda: make_world(name, arguments, place), shared=shared)


def check_names(environment: str, agents: Sequence[Any]) -> None:
    """Raise EnvironmentUnusable if an agent's name cannot name a replay, a weights channel and files."""
    for agent in agents:
        if not isinstance(agent, str) or not 0 < len(agent) <= _LONGEST_NAME or not _FORBIDDEN.isdisjoint(agent):
            raise EnvironmentUnusable(
                f"{environment} calls an agent {short(agent)}: expected text of 1 to {_LONGEST_NAME} characters "
                "without /, + and *, since it names files; rename it in a wrapper of the environment"
            )


class _TruncateMissing(BaseParallelWrapper[Any, Any, Any]):  # type: ignore[misc]
    """A parallel environment in which an agent that disappears from `agents` without a flag is marked as truncated.

    Otherwise the end of its episode would not be reported, and it would be asked for actions while it is away.
    """

    _last: dict[Any, Any]  # observations, by agent

    def step(self, actions: dict[Any, Any]) -> tuple[Any, Any, Any, Any, Any]:
        before = list(self.env.agents)
        observations, rewards, terminations, truncations, infos = map(dict, self.env.step(actions))
        present = set(self.env.agents)
        for agent in before:
            if agent not in present and not (terminations.get(agent) or truncations.get(agent)):
                observations.setdefault(agent, self._last[agent])
                rewards.setdefault(agent, 0.0)
                terminations[agent], truncations[agent] = False, True
                infos.setdefault(agent, {})
        self._last = {**self._last, **observations}
        return observations, rewards, terminations, truncations, infos

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        observations, infos = self.env.reset(seed=seed, options=options)
        self._last = dict(observations)
        return observations, infos


class AgentView:
    """What one agent observes, as inputs of a policy and as the row of a replay, and what it does.

    Args:
        agent: names it in messages.
        observed: space of its observations. Of a Dict with the part "action_mask", as PettingZoo's have it, the others
            are observed, and that one is the mask of its actions.
        does: space of its actions.
        n_stack: how many of its newest observations are seen together, the oldest first; at the beginning of an episode
            the first one so many times.

    Attributes:
        seen: the format of the rows.
        spec: what a policy of this agent gets and chooses.
        inputs: (1, ...) by name, of what it observes now, and "action_mask", if it has a mask.
        fresh: whether the next observation is the first of an episode.
        to_env: the environment's action for one that an algorithm chooses.

    Raises:
        EnvironmentUnusable: a space is of an unsupported kind.
    """

    def __init__(self, agent: str, observed: spaces.Space[Any], does: spaces.Space[Any], n_stack: int) -> None:
        masked = isinstance(observed, spaces.Dict) and MASK in observed.spaces
        if masked:
            assert isinstance(observed, spaces.Dict)
            observed = spaces.Dict({name: part for name, part in observed.spaces.items() if name != MASK})
        try:
            actions = Actions(does)
            self._newest = Observations(observed, agent)
            stacked = observed if n_stack == 1 else stacked_space(observed, n_stack)
            self._all = Observations(stacked, agent)
        except EnvironmentUnusable as error:
            raise EnvironmentUnusable(f"{agent}: {error}") from error
        if any(len(leaf.shape) > 3 for leaf in self._all.seen.inputs) and self._newest.seen.pictures:
            raise EnvironmentUnusable(
                f"{agent}: n_stack = {n_stack} makes four dimensions of the pictures of {observed}, and three are "
                "expected: set n_stack = 1, or stack them in a wrapper of the environment"
            )
        self._n_stack, self.fresh = n_stack, True
        self.seen, self.to_env = self._all.seen, actions.clipped
        self.spec = AgentSpec(self.seen.inputs, actions.spec, masked=masked)
        self.inputs = {leaf.name: np.zeros((1, *leaf.shape), leaf.dtype) for leaf in self.seen.inputs}
        if masked:
            self.inputs[MASK] = np.zeros((1, actions.spec.size), np.bool_)

    def add(self, observation: Any, *, ended: bool = False) -> None:
        """Take the newest observation; a copy. Raises StrangeObservation: the space does not contain it."""
        for name, value in self._newest.inputs(observation).items():
            found = self.inputs[name]
            if self._n_stack > 1 and not self.fresh:
                found[0, :-1] = found[0, 1:]
                found[0, -1] = value
            else:
                found[0] = value
        self.fresh = False
        if self.spec.masked:
            action = self.spec.action
            self.inputs[MASK][0] = action_mask(None, observation, action.size, action.counts, ended=ended)

    def forget(self) -> None:
        """The next observation is the first of an episode."""
        self.fresh = True

    def row(self) -> Array:
        """(1, size): what it observes now, as a replay holds it; a copy."""
        return self._all.packed({name: each[0] for name, each in self.inputs.items()})[None]

    def mask(self) -> Array | None:
        """(1, actions): of the actions that it may choose now; a copy. None: it has none."""
        return self.inputs[MASK].copy() if self.spec.masked else None


class World:
    """A PettingZoo environment as an `Adapter`: its agents act in turns, and see their last observations at once.

    Args:
        n: 1; a process has one world.
        env, env_args: see `make_world`.
        stacks: by agent, how many observations it sees.
        places: its place in the run, alone.
        shared: whether it is that of the process's stock, see `stock`.

    Attributes:
        env: the environment, as one in turns.
        views: of each agent.

    Raises:
        EnvironmentUnusable: it cannot be made, or has unsupported spaces.
    """

    bound = "bound its episodes, by an argument of it or in a wrapper"

    def __init__(
        self,
        n: int,
        env: str,
        env_args: Mapping[str, Any],
        stacks: Mapping[str, int],
        *,
        places: Sequence[EnvironmentPlace] = (NOWHERE,),
        shared: bool = False,
    ) -> None:
        if n != 1:
            raise EnvironmentUnusable(f"{n} worlds in one process: expected 1; `envs` counts processes")
        self.n, self.name, self.shared = n, env, shared
        self._kept = kept_world(env, env_args, place=places[0], shared=shared)
        self.env: AECEnv[Any, Any, Any] = self._kept.env
        self._running = False
        self.agents: Sequence[str] = tuple(self.env.possible_agents)
        self.views = views_of(self.env, stacks)
        self._untold: set[str] = set()  # agents that have acted, and whose result is not known yet
        self._taken = self._members = 0  # of the turn of all agents: how many have had theirs, and how many they are

    def begin(self, environment: int, seed: int | None, options: dict[str, Any] | None = None) -> None:
        """Begin an episode. Raises ContractBroken: what it returned is not what it has to be."""
        self._kept.user, self._running = self, True
        self.env.reset(seed=seed, options=options)
        for view in self.views.values():
            view.forget()
        self._untold.clear()
        self._taken, self._members = 0, len(self.env.agents)
        self._look()
        if not self.env.agents:
            raise ContractBroken(f"{self.name} began an episode in which no agent may act")

    def waiting(self) -> Waiting:
        """The agent whose turn it is."""
        view = self.views[self.env.agent_selection]
        return Waiting(self.env.agent_selection, view.inputs, view.row())

    def step(self, actions: Array) -> Moved:
        """Let the agent act whose turn it is. Raises ContractBroken, see `begin`."""
        return self.play(self.views[self.env.agent_selection].to_env(actions[0]))

    def play(self, action: Any) -> Moved:
        """The same with an action as the environment takes it."""
        self._untold.add(self.env.agent_selection)
        self.env.step(action)
        self._taken += 1
        results, over, steps = self._look(), not self.env.agents, 0
        if over or self._taken >= self._members:
            steps, self._taken, self._members = 1, 0, len(self.env.agents)
        self._running = not over
        return Moved(results, steps, [0] if over else [])

    def hold(self, alive: Callable[[], None]) -> list[int]:
        """Return [0] if another has begun an episode since, see `adapter.Lent`."""
        return [0] if self._running and self._kept.user is not self else []

    def release(self) -> None:
        """Others may have the environment."""

    def state(self) -> dict[str, Any] | None:
        """Return the state of the environment and what its agents saw; None: it cannot be saved, see `can_be_saved`."""
        if not can_be_saved(self.env) or self.hold(lambda: None):
            return None
        views = {agent: {"inputs": view.inputs, "fresh": view.fresh} for agent, view in self.views.items()}
        turn = {"untold": sorted(self._untold), "taken": self._taken, "members": self._members}
        return {"env": self.env.episode_state(), "views": views, **turn}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self._kept.user, self._running = self, True
        self.env.restore_episode(state["env"])
        for agent, saved in state["views"].items():
            view = self.views[agent]
            view.fresh = saved["fresh"]
            for name, array in view.inputs.items():
                array[...] = saved["inputs"][name]
        self._untold = set(state["untold"])
        self._taken, self._members = state["taken"], state["members"]

    def close(self) -> None:
        """Close the environment, if it is not shared."""
        if not self.shared:
            self.env.close()

    def _look(self) -> list[Result]:
        """Read what agents observe until one may act."""
        results = []
        while self.env.agents:
            agent = self.env.agent_selection
            observed, reward, *ends, info = self.env.last()
            terminated, truncated = (
                flag(end, f"{name} of {agent}") for end, name in zip(ends, ("terminated", "truncated"), strict=True)
            )
            self.views[agent].add(observed, ended=terminated or truncated)
            paid = number(reward, f"the reward of {agent}")
            results.append(self._told(agent, paid, terminated, truncated, info))
            if not terminated and not truncated:
                break
            self.views[agent].forget()  # if the agent returns in this episode, it has no earlier observations
            self.env.step(None)
            self._taken += 1
        for agent in [each for each in self.agents if each in self._untold and each not in self.env.agents]:
            # It left without a word: as if it was truncated there, and had observed nothing since.
            paid, terminated = self.env._cumulative_rewards.get(agent, 0.0), bool(self.env.terminations.get(agent))
            results.append(self._told(agent, number(paid, f"the reward of {agent}"), terminated, not terminated, {}))
            self.views[agent].forget()
        return results

    def _told(self, agent: str, reward: float, terminated: bool, truncated: bool, info: Any) -> Result:
        self._untold.discard(agent)
        infos = [info if isinstance(info, Mapping) else {}]
        flags, view = (np.array([terminated]), np.array([truncated])), self.views[agent]
        return Result(agent, np.array([reward], np.float64), *flags, view.row(), infos, view.mask())


def views_of(world: AECEnv[Any, Any, Any], stacks: Mapping[str, int]) -> dict[str, AgentView]:
    """Return what each agent observes and does.

    Args:
        stacks: by agent, how many observations it sees.
    """
    return {
        agent: AgentView(agent, world.observation_space(agent), world.action_space(agent), stacks[agent])
        for agent in world.possible_agents
    }
