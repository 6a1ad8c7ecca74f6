"""PettingZoo environments (AEC and parallel): their agents act in turns, and their observations are rows.

Networks compute in float32. A row stores an observation in its own dtype if that is not wider and torch supports it,
otherwise as float32. So a row contains everything that the network would see.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from pettingzoo import AECEnv, ParallelEnv
from pettingzoo.utils import BaseParallelWrapper
from pettingzoo.utils.conversions import parallel_to_aec

from jurybox.protocol.errors import missing_name
from jurybox.training.environments.adapter import Moved, Result, Waiting
from jurybox.training.environments.gymnasium_env import EnvironmentUnusable
from jurybox.training.foreign import imported
from jurybox.training.spaces import (
    ALONE,
    ActionSpec,
    AgentSpec,
    ContractBroken,
    Leaf,
    StrangeObservation,
    converted,
    flag,
    number,
    short,
)

Observation = npt.NDArray[Any]

_LONGEST_NAME, _FORBIDDEN = 60, frozenset("/+*\0\n")
_KEPT_DTYPES = ("uint8", "int8", "int16", "float16", "float32")


class WorldError(ValueError):
    """An environment returned an observation outside its observation space."""


def make_world(name: str, arguments: Mapping[str, Any]) -> AECEnv[Any, Any, Any]:
    """Create an environment whose agents take turns. In a parallel one, all act together after the last has chosen.

    Args:
        name: "package.module:callable" that returns a PettingZoo environment (AEC or parallel).
        arguments: its keyword arguments.

    Raises:
        EnvironmentUnusable: the environment cannot be created, or is neither.
    """
    module, _, attribute = name.partition(":")
    try:
        found: Any = imported(module)
        factory = getattr(found, attribute, None)
        if factory is None:
            raise EnvironmentUnusable(f"{name!r} cannot be made: {missing_name(found, attribute)}")
        made = factory(**arguments)
    except EnvironmentUnusable:
        raise
    except (Exception, SystemExit) as error:
        raise EnvironmentUnusable(
            f"{name} cannot be made with {dict(arguments)}: {type(error).__name__}: {error}; expected "
            "package.module:callable; `world` holds its keyword arguments"
        ) from error
    if isinstance(made, ParallelEnv):
        return parallel_to_aec(_TruncateMissing(made))
    if not isinstance(made, AECEnv):
        raise EnvironmentUnusable(
            f"{name} made a {type(made).__name__}: expected a PettingZoo environment, AECEnv or ParallelEnv (of a "
            "module of PettingZoo's own: module:env or module:parallel_env)"
        )
    return made


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


@dataclass(frozen=True, slots=True)
class AgentSpaces:
    """The observation and action space of one agent.

    Attributes:
        shape, dtype: shape and dtype of its observations as rows; Discrete and MultiDiscrete ones are one-hot.
        binary: whether they contain only 0 and 1.
        scale: factor by which networks multiply them, so that uint8 pictures become numbers up to 1.
        actions: number of actions.
        first: number of the first action in the environment.
    """

    shape: tuple[int, ...]
    dtype: str
    binary: bool
    scale: float
    actions: int
    first: int

    @classmethod
    def of(cls, seen: spaces.Space[Any], does: spaces.Space[Any], agent: str) -> AgentSpaces:
        """Check and convert the spaces of `agent`.

        Raises:
            EnvironmentUnusable: a space is of an unsupported kind.
        """
        if not isinstance(does, spaces.Discrete):
            raise EnvironmentUnusable(
                f"{agent} acts in {does}: expected Discrete actions, which is what all algorithms choose"
            )
        dtype, binary, scale = "uint8", True, 1.0
        if isinstance(seen, spaces.Discrete):
            shape: tuple[int, ...] = (int(seen.n),)
        elif isinstance(seen, spaces.MultiDiscrete):
            shape = (int(seen.nvec.sum()),)
        elif isinstance(seen, spaces.MultiBinary):
            shape = tuple(seen.shape)
        elif isinstance(seen, spaces.Box):
            shape = tuple(seen.shape)
            kind = np.dtype(seen.dtype)
            binary = kind == np.bool_ or (kind.kind in "iu" and bool((seen.low >= 0).all() and (seen.high <= 1).all()))
            if not binary:
                dtype = kind.name if kind.name in _KEPT_DTYPES else "float32"
                scale = 1.0 / 255.0 if kind == np.uint8 else 1.0
        else:
            raise EnvironmentUnusable(
                f"{agent} observes {seen}: expected Box, Discrete, MultiDiscrete or MultiBinary; flatten it in a "
                "wrapper of the environment"
            )
        return cls(shape, dtype, binary, scale, int(does.n), int(does.start))

    def spec(self, stack: int) -> AgentSpec:
        """What a policy gets and chooses that sees so many rows at once, (stack, ...)."""
        leaf = Leaf(ALONE, (stack, *self.shape), self.dtype, scale=self.scale)
        return AgentSpec((leaf,), ActionSpec(True, self.actions, self.first))


class ObservationEncoder:
    """Converts one agent's observations to rows.

    Args:
        seen: the agent's observation space.
    """

    def __init__(self, agent: str, seen: spaces.Space[Any], agent_space: AgentSpaces) -> None:
        self._agent, self._seen, self._spaces = agent, seen, agent_space
        self._dtype = np.dtype(agent_space.dtype)
        self._declared = np.dtype(seen.dtype)

    def row(self, observation: Any) -> Observation:
        """Convert an observation to a row.

        Raises:
            WorldError: the observation is outside the space.
        """
        shape = tuple(self._seen.shape or ())
        try:
            given = converted(observation, self._declared.name, shape, f"an observation of {self._agent}")
        except StrangeObservation as error:
            raise WorldError(f"{error}; its observation space is {self._seen}") from error
        if isinstance(self._seen, spaces.Discrete):
            return self._one_hot([int(given) - int(self._seen.start)], [int(self._seen.n)])
        if isinstance(self._seen, spaces.MultiDiscrete):
            start = np.asarray(self._seen.start).ravel()
            return self._one_hot((given.ravel() - start).tolist(), self._seen.nvec.ravel().tolist())
        return given.astype(self._dtype)  # a copy: the environment may reuse its array

    def _one_hot(self, numbers: Sequence[int], counts: Sequence[int]) -> Observation:
        out = np.zeros(self._spaces.shape, np.uint8)
        first = 0
        for value, count in zip(numbers, counts, strict=True):
            if not 0 <= value < count:
                raise self._mismatch(f"holds {value} of {count}")
            out[first + value] = 1
            first += count
        return out

    def _mismatch(self, what: str) -> WorldError:
        return WorldError(f"an observation of {self._agent} {what}, its observation space is {self._seen}")


def agent_spaces(world: AECEnv[Any, Any, Any]) -> dict[str, AgentSpaces]:
    """Return the spaces of all agents."""
    return {
        agent: AgentSpaces.of(world.observation_space(agent), world.action_space(agent), agent)
        for agent in world.possible_agents
    }


def encoders(world: AECEnv[Any, Any, Any]) -> dict[str, ObservationEncoder]:
    """Return the converters of all agents' observations to rows."""
    return {
        agent: ObservationEncoder(agent, world.observation_space(agent), agent_space)
        for agent, agent_space in agent_spaces(world).items()
    }


class _Stack:
    """The last observations of an agent, (stack, ...), the newest last; zeros before the first."""

    def __init__(self, n: int, space: AgentSpaces) -> None:
        self.frames: Observation = np.zeros((n, *space.shape), space.dtype)

    def add(self, frame: Observation) -> None:
        self.frames[:-1] = self.frames[1:]
        self.frames[-1] = frame


class World:
    """A PettingZoo environment as an `Adapter`: its agents act in turns, and see their last observations at once.

    Args:
        n: 1; a process has one world.
        env, env_args: see `make_world`.
        stacks: by agent, how many observations it sees.
        whole: the agents whose rows are whole stacks, the newest observation last; those of the others are single
            observations, which a replay's sampler stacks.

    Attributes:
        env: the environment, as one in turns.
        spaces: of each agent.

    Raises:
        EnvironmentUnusable: it cannot be made, or has unsupported spaces.
    """

    bound = "bound its episodes, by an argument of it or in a wrapper"

    def __init__(
        self, n: int, env: str, env_args: Mapping[str, Any], stacks: Mapping[str, int], whole: Sequence[str] = ()
    ) -> None:
        if n != 1:
            raise EnvironmentUnusable(f"{n} worlds in one process: expected 1; `envs` counts processes")
        self.n, self.name = n, env
        self.env = make_world(env, env_args)
        self.agents: Sequence[str] = tuple(self.env.possible_agents)
        self.spaces, self._encoders = agent_spaces(self.env), encoders(self.env)
        self._stacks = {agent: _Stack(stacks[agent], self.spaces[agent]) for agent in self.agents}
        self._whole = frozenset(whole)
        self._untold: set[str] = set()  # agents that have acted, and whose result is not known yet
        self._taken = self._members = 0  # of the turn of all agents: how many have had theirs, and how many they are

    def begin(self, environment: int, seed: int | None, options: dict[str, Any] | None = None) -> None:
        """Begin an episode. Raises ContractBroken, WorldError: what it returned is not what it has to be."""
        self.env.reset(seed=seed, options=options)
        for stack in self._stacks.values():
            stack.frames[:] = 0
        self._untold.clear()
        self._taken, self._members = 0, len(self.env.agents)
        self._look()
        if not self.env.agents:
            raise ContractBroken(f"{self.name} began an episode in which no agent may act")

    def waiting(self) -> Waiting:
        """The agent whose turn it is."""
        agent = self.env.agent_selection
        return Waiting(agent, {ALONE: self._stacks[agent].frames[None]}, self._row(agent))

    def step(self, actions: npt.NDArray[Any]) -> Moved:
        """Let the agent act whose turn it is. Raises ContractBroken, WorldError, see `begin`."""
        agent = self.env.agent_selection
        self.env.step(int(actions[0]) + self.spaces[agent].first)
        self._untold.add(agent)
        self._taken += 1
        results, over, steps = self._look(), not self.env.agents, 0
        if over or self._taken >= self._members:
            steps, self._taken, self._members = 1, 0, len(self.env.agents)
        return Moved(results, steps, [0] if over else [])

    def close(self) -> None:
        """Close the environment."""
        self.env.close()

    def _look(self) -> list[Result]:
        """Read what agents observe until one may act."""
        results = []
        while self.env.agents:
            agent = self.env.agent_selection
            observed, reward, *ends, info = self.env.last()
            stack = self._stacks[agent]
            stack.add(self._encoders[agent].row(observed))
            paid = number(reward, f"the reward of {agent}")
            terminated, truncated = (
                flag(end, f"{name} of {agent}") for end, name in zip(ends, ("terminated", "truncated"), strict=True)
            )
            results.append(self._told(agent, paid, terminated, truncated, info))
            if not terminated and not truncated:
                break
            stack.frames[:] = 0  # if the agent returns in this episode, it has no earlier observations
            self.env.step(None)
            self._taken += 1
        for agent in [each for each in self.agents if each in self._untold and each not in self.env.agents]:
            # It left without a word: as if it was truncated there, and had observed nothing since.
            paid, terminated = self.env._cumulative_rewards.get(agent, 0.0), bool(self.env.terminations.get(agent))
            results.append(self._told(agent, number(paid, f"the reward of {agent}"), terminated, not terminated, {}))
            self._stacks[agent].frames[:] = 0
        return results

    def _told(self, agent: str, reward: float, terminated: bool, truncated: bool, info: Any) -> Result:
        self._untold.discard(agent)
        infos = [info if isinstance(info, Mapping) else {}]
        flags = np.array([terminated]), np.array([truncated])
        return Result(agent, np.array([reward], np.float64), *flags, self._row(agent), infos)

    def _row(self, agent: str) -> Observation:
        frames = self._stacks[agent].frames
        return frames[None].copy() if agent in self._whole else frames[-1:].copy()
