"""Adapts any Gymnasium environment: observations as rows of one shape, actions from a policy's outputs.

Networks compute in float32. An observation becomes one flat row:

- numbers (Box of any dtype and bounds, Discrete and MultiDiscrete as one-hot, MultiBinary; the parts of Dict and Tuple
  one after another) as float32, or as uint8 where all of them are 0 or 1;
- where there are pictures (Box of uint8, three dimensions, 0 to 255, sides of 36 and more) the row is bytes: the
  float32 of the numbers first, then the pictures as (channels, height, width). A replay keeps a pixel in a byte.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.wrappers import TimeLimit

__all__ = [
    "Actions",
    "EnvironmentUnusable",
    "Observations",
    "RowsEnv",
    "StrangeObservation",
    "make_environment",
    "rows_environment",
]

Array = npt.NDArray[Any]
Environment = gymnasium.Env[Any, Any]

_LEAST_SIDE = 36  # of a picture: the least that the convolutions of Mnih et al. (2015) accept


class EnvironmentUnusable(ValueError):
    """An environment cannot be made, or has unsupported spaces; the message says which."""


class StrangeObservation(ValueError):
    """An observation is not contained in its space."""


def make_environment(
    name: str, arguments: Mapping[str, Any] | None = None, max_episode_steps: int | None = None
) -> Environment:
    """Make the environment of that name.

    Args:
        name: registered with Gymnasium ("CartPole-v1"), of a module that registers it ("ale_py:ALE/Pong-v5"), or
            "package.module:factory", a callable that returns an environment.
        arguments: keyword arguments of the factory, or of ``gymnasium.make``.
        max_episode_steps: truncate an episode after this number of steps; None: as the environment is registered.

    Raises:
        EnvironmentUnusable: it cannot be made.
    """
    given = dict(arguments or {})
    module, colon, attribute = name.partition(":")
    try:
        factory = getattr(_imported(module), attribute, None) if colon else None
        if callable(factory):
            made = factory(**given)
            if max_episode_steps is not None and isinstance(made, gymnasium.Env):
                made = TimeLimit(made, max_episode_steps)
        else:
            if max_episode_steps is not None:  # a further wrapper could only shorten the registered limit
                given["max_episode_steps"] = max_episode_steps
            made = gymnasium.make(name, **given)
    except ModuleNotFoundError as error:
        hint = ", neither in this folder nor on PYTHONPATH" if error.name == module else ""
        raise EnvironmentUnusable(f"{name!r} cannot be made: {error}{hint}") from error
    except Exception as error:
        raise EnvironmentUnusable(
            f"{name!r} cannot be made with {given}: {type(error).__name__}: {error}; expected a name that Gymnasium "
            "knows, or module:factory; `env_args` are its keyword arguments"
        ) from error
    if not isinstance(made, gymnasium.Env):
        raise EnvironmentUnusable(
            f"{name!r} gave a {type(made).__module__}.{type(made).__qualname__}: expected a gymnasium.Env of one "
            "environment (`envs` says how many there are to be)"
        )
    return made


def _imported(module: str) -> ModuleType:
    """Import a module; also find those in the current folder, as ``python -m`` does."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        folder = str(Path.cwd())
        if error.name != module.partition(".")[0] or folder in sys.path:
            raise
        sys.path.append(folder)  # also for processes that this one starts
        return importlib.import_module(module)


def reset_mask(options: Mapping[str, Any] | None, n: int) -> npt.NDArray[np.bool_]:
    """Return which of `n` environments ``options["reset_mask"]`` selects, as in Gymnasium; all without it.

    Raises:
        ValueError: the mask is not a bool array (n,) with at least one True.
    """
    mask = (options or {}).get("reset_mask")
    if mask is None:
        return np.ones(n, np.bool_)
    if not isinstance(mask, np.ndarray) or mask.shape != (n,) or mask.dtype != np.bool_ or not mask.any():
        raise ValueError(
            f"expected options['reset_mask'] as a bool array of shape ({n},) with a True in it, got {mask!r}"
        )
    return mask


@dataclass(frozen=True, slots=True)
class Seen:
    """The format of observation rows.

    Attributes:
        numbers: number of numeric elements.
        pictures: (channels, height, width) of every picture.
        binary: whether all numbers are 0 or 1, and there are no pictures.
    """

    numbers: int
    pictures: tuple[tuple[int, int, int], ...] = ()
    binary: bool = False

    @property
    def dtype(self) -> str:
        """Return the dtype of a row."""
        return "uint8" if self.pictures or self.binary else "float32"

    @property
    def size(self) -> int:
        """Return the number of elements of a row."""
        if not self.pictures:
            return self.numbers
        return 4 * self.numbers + sum(math.prod(shape) for shape in self.pictures)


class Observations:
    """Converts observations of one space to rows.

    Args:
        space: of Box, Discrete, MultiDiscrete, MultiBinary, Dict and Tuple, nested at any depth.

    Attributes:
        seen: what the rows hold.

    Raises:
        EnvironmentUnusable: the space has a part of another kind, or none at all.
    """

    def __init__(self, space: spaces.Space[Any]) -> None:
        self._space = space
        self._leaves: list[_Leaf] = []
        _collect(space, (), self._leaves)
        numbers = sum(leaf.size for leaf in self._leaves if leaf.picture is None)
        pictures = tuple(leaf.picture for leaf in self._leaves if leaf.picture is not None)
        if not numbers and not pictures:
            raise EnvironmentUnusable(f"the observation space {space} is empty: there is nothing to learn from")
        binary = not pictures and all(leaf.binary for leaf in self._leaves)
        self.seen = Seen(numbers, pictures, binary)

    def row(self, observation: Any) -> Array:
        """Convert an observation to a row of `seen.dtype` and `seen.size` elements; a copy.

        Raises:
            StrangeObservation: the space does not contain it, or it holds numbers that are not finite.
        """
        seen = self.seen
        row = np.zeros(seen.size, seen.dtype)
        numbers = np.zeros(seen.numbers, np.float32) if seen.pictures else row
        number, byte = 0, 4 * seen.numbers
        for leaf in self._leaves:
            value = observation
            for key in leaf.path:
                value = value[key]
            if leaf.picture is not None:
                size = math.prod(leaf.picture)
                row[byte : byte + size] = leaf.pixels(value)
                byte += size
            else:
                leaf.write(value, numbers[number : number + leaf.size])
                number += leaf.size
        if numbers.dtype == np.float32 and not np.isfinite(numbers).all():
            raise StrangeObservation(
                f"an observation holds {numbers[~np.isfinite(numbers)][0]} as float32, which nothing can be learned "
                f"from; its space is {self._space}. Bound it in a wrapper of the environment"
            )
        if seen.pictures and seen.numbers:
            row[: 4 * seen.numbers] = numbers.view(np.uint8)
        return row


class _Leaf:
    """One part of an observation: its path, and its conversion."""

    def __init__(self, path: tuple[Any, ...], space: spaces.Space[Any]) -> None:
        self.path, self._space = path, space
        self.picture: tuple[int, int, int] | None = None
        self.binary = True
        self._starts: list[int] = []
        self._counts: list[int] = []
        self._scale = np.float32(1.0)
        if isinstance(space, spaces.Discrete):
            self._starts, self._counts = [int(space.start)], [int(space.n)]
        elif isinstance(space, spaces.MultiDiscrete):
            self._starts = np.asarray(space.start).ravel().tolist()
            self._counts = space.nvec.ravel().tolist()
        elif isinstance(space, spaces.Box):
            self._box(space)
        elif not isinstance(space, spaces.MultiBinary):
            where = "".join(f"[{key!r}]" for key in path)
            raise EnvironmentUnusable(
                f"the observation{where} is a {type(space).__name__}: expected Box, Discrete, MultiDiscrete, "
                "MultiBinary, or Dict and Tuple of them; flatten it in a wrapper of the environment"
            )
        self.size = sum(self._counts) if self._counts else math.prod(space.shape or ())

    def _box(self, space: spaces.Box) -> None:
        kind, shape = np.dtype(space.dtype), space.shape
        self.binary = kind.kind in "biu" and bool((space.low >= 0).all() and (space.high <= 1).all())
        if kind != np.uint8 or self.binary:
            return
        if (space.high > 1).any():
            self._scale = np.float32(1.0 / 255.0)  # bytes, whatever their bounds: numbers up to 1
        if len(shape) == 3 and bool((space.low == 0).all() and (space.high == 255).all()):
            channels = 0 if shape[0] < min(shape[1:]) else 2
            sides = shape[1:] if channels == 0 else shape[:2]
            if min(sides) >= _LEAST_SIDE:
                self._last = channels == 2
                self.picture = (shape[channels], *sides)

    def pixels(self, value: Any) -> Array:
        pixels = np.asarray(value)
        if pixels.shape != self._space.shape or pixels.dtype != np.uint8:
            raise self._mismatch(f"has the shape {pixels.shape} and dtype {pixels.dtype}")
        return (pixels.transpose(2, 0, 1) if self._last else pixels).ravel()

    def write(self, value: Any, out: Array) -> None:
        if self._counts:
            numbers = np.ravel(value)
            if numbers.shape != (len(self._counts),):
                raise self._mismatch(f"has the shape {np.shape(value)}")
            first = 0
            for number, start, count in zip(numbers.tolist(), self._starts, self._counts, strict=True):
                if not 0 <= number - start < count or number != int(number):
                    raise self._mismatch(f"holds {number}")
                out[first + int(number) - start] = 1
                first += count
            return
        given = np.asarray(value)
        if given.shape != self._space.shape:
            raise self._mismatch(f"has the shape {given.shape}")
        with np.errstate(over="ignore", invalid="ignore"):
            out[:] = given.ravel()
            if out.dtype == np.uint8:
                if not np.array_equal(out, given.ravel()) or (out > 1).any():
                    raise self._mismatch("holds other numbers than 0 and 1")
            elif self._scale != 1:
                out *= self._scale

    def _mismatch(self, what: str) -> StrangeObservation:
        where = "".join(f"[{key!r}]" for key in self.path)
        return StrangeObservation(f"an observation{where} {what}; its space is {self._space}")


def _collect(space: spaces.Space[Any], path: tuple[Any, ...], found: list[_Leaf]) -> None:
    if isinstance(space, spaces.Dict):
        for name, part in space.spaces.items():
            _collect(part, (*path, name), found)
    elif isinstance(space, spaces.Tuple):
        for number, part in enumerate(space.spaces):
            _collect(part, (*path, number), found)
    else:
        found.append(_Leaf(path, space))


@dataclass(frozen=True, slots=True)
class Does:
    """The format of a policy's output.

    Attributes:
        discrete: whether it chooses one of `size` actions; else it returns `size` numbers.
        size: number of actions or numbers.
        first: the environment's number of the first action.
        low, high: bounds of the numbers, flat, in the environment's unit.
    """

    discrete: bool
    size: int
    first: int = 0
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()

    @property
    def bounded(self) -> bool:
        """Whether all bounds are finite."""
        return all(map(math.isfinite, (*self.low, *self.high)))


class Actions:
    """Converts a policy's actions to an environment's.

    Args:
        space: Box or Discrete.

    Raises:
        EnvironmentUnusable: it is another kind of space.
    """

    def __init__(self, space: spaces.Space[Any]) -> None:
        self._space = space
        if isinstance(space, spaces.Discrete):
            self.does = Does(True, int(space.n), int(space.start))
        elif isinstance(space, spaces.Box):
            self._low = space.low.astype(np.float64).ravel()
            self._high = space.high.astype(np.float64).ravel()
            self.does = Does(
                False, math.prod(space.shape), low=tuple(self._low.tolist()), high=tuple(self._high.tolist())
            )
            self._whole = np.dtype(space.dtype).kind in "iu"
        else:
            raise EnvironmentUnusable(
                f"the action space is {space}: expected Box or Discrete, which is what the algorithms choose; make it "
                "one in a wrapper of the environment"
            )

    def chosen(self, action: Any) -> Any:
        """The environment's action for the number of one (Discrete), or for numbers in [-1, 1] (Box): scaled."""
        if self.does.discrete:
            return self.does.first + int(action)
        half = 0.5 * (self._high - self._low)
        return self._box(self._low + half * (np.asarray(action, np.float64) + 1.0))

    def clipped(self, action: Any) -> Any:
        """Return the action for numbers in the environment's own unit, clipped to the bounds."""
        return self.does.first + int(action) if self.does.discrete else self._box(np.asarray(action, np.float64))

    def _box(self, numbers: npt.NDArray[np.float64]) -> Array:
        assert isinstance(self._space, spaces.Box)
        numbers = np.clip(numbers, self._low, self._high)
        if self._whole:
            numbers = np.rint(numbers)
        return numbers.astype(self._space.dtype).reshape(self._space.shape)


class RowsEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """An environment with rows as observations, whose actions may be flat and out of bounds."""

    def __init__(self, env: Environment) -> None:
        super().__init__(env)
        self._rows, self._actions = Observations(env.observation_space), Actions(env.action_space)
        seen, does = self._rows.seen, self._actions.does
        low, high = (0, 255) if seen.dtype == "uint8" else (-np.inf, np.inf)
        self.observation_space = spaces.Box(low, high, (seen.size,), np.dtype(seen.dtype).type)
        if not does.discrete:
            self.action_space = spaces.Box(np.array(does.low, np.float32), np.array(does.high, np.float32))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        """As `gymnasium.Env.reset`; the observation is a row."""
        observation, info = self.env.reset(seed=seed, options=options)
        return self._rows.row(observation), info

    def step(self, action: Any) -> tuple[Array, Any, bool, bool, dict[str, Any]]:
        """As `gymnasium.Env.step`; the observation is a row."""
        given = action if self._actions.does.discrete else self._actions.clipped(action)
        observation, reward, terminated, truncated, info = self.env.step(given)
        return self._rows.row(observation), reward, terminated, truncated, info


def rows_environment(
    name: str, arguments: Mapping[str, Any], max_episode_steps: int | None = None, render_mode: str | None = None
) -> RowsEnv:
    """Make an environment with rows as observations. A factory gets `render_mode` if one is set."""
    given = dict(arguments) if render_mode is None else {**arguments, "render_mode": render_mode}
    return RowsEnv(make_environment(name, given, max_episode_steps))
