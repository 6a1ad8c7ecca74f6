"""The worlds of a multi-agent training: PettingZoo environments (AEC and parallel), and their observations as rows.

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

from jurybox.training.replay import Field
from jurybox.training.runtime.plan import ConfigError, load
from jurybox.training.spaces import ALONE, ActionSpec, AgentSpec, Leaf, StrangeObservation, converted, short

Observation = npt.NDArray[Any]
Environment = tuple[str, Mapping[str, Any]]

_LONGEST_NAME, _FORBIDDEN = 60, frozenset("/+*\0\n")
_KEPT_DTYPES = ("uint8", "int8", "int16", "float16", "float32")


class WorldError(ValueError):
    """An environment returned an observation outside its observation space."""


def make_world(environment: Environment) -> AECEnv[Any, Any, Any]:
    """Create an environment whose agents take turns. In a parallel one, all act together after the last has chosen.

    Args:
        environment: "package.module:callable" that returns a PettingZoo environment (AEC or parallel), and its keyword
            arguments.

    Raises:
        ConfigError: the environment cannot be created, or is neither.
    """
    name, settings = environment
    try:
        made = load(name)(**settings)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{name} cannot be made with {dict(settings)}: {type(error).__name__}: {error}; `world` holds its keyword "
            "arguments"
        ) from error
    if isinstance(made, ParallelEnv):
        return parallel_to_aec(_TruncateMissing(made))
    if not isinstance(made, AECEnv):
        raise ConfigError(
            f"{name} made a {type(made).__name__}: expected a PettingZoo environment, AECEnv or ParallelEnv (of a "
            "module of PettingZoo's own: module:env or module:parallel_env)"
        )
    return made


def check_names(environment: str, agents: Sequence[Any]) -> None:
    """Raise ConfigError if an agent's name cannot name a replay, a weights channel and files."""
    for agent in agents:
        if not isinstance(agent, str) or not 0 < len(agent) <= _LONGEST_NAME or not _FORBIDDEN.isdisjoint(agent):
            raise ConfigError(
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
            ConfigError: a space is of an unsupported kind.
        """
        if not isinstance(does, spaces.Discrete):
            raise ConfigError(f"{agent} acts in {does}: expected Discrete actions, which is what all algorithms choose")
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
            raise ConfigError(
                f"{agent} observes {seen}: expected Box, Discrete, MultiDiscrete or MultiBinary; flatten it in a "
                "wrapper of the environment"
            )
        return cls(shape, dtype, binary, scale, int(does.n), int(does.start))

    def spec(self, stack: int) -> AgentSpec:
        """What a policy gets and chooses that sees so many rows at once, (stack, ...)."""
        leaf = Leaf(ALONE, (stack, *self.shape), self.dtype, scale=self.scale)
        return AgentSpec((leaf,), ActionSpec(True, self.actions, self.first))

    @property
    def field(self) -> Field:
        """The replay's field."""
        return Field(self.shape, self.dtype, stored="bits" if self.binary else None)


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
        for number, count in zip(numbers, counts, strict=True):
            if not 0 <= number < count:
                raise self._mismatch(f"holds {number} of {count}")
            out[first + number] = 1
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
