"""Adapts any Gymnasium environment: its observations as named inputs of a policy, and as rows of one shape for a
replay; actions from a policy's outputs.

Networks compute in float32. A replay's row is flat:

- numbers (Box of any dtype and bounds, Discrete and MultiDiscrete as one-hot, MultiBinary; the parts of Dict and Tuple
  one after another) as float32, or as uint8 where all of them are 0 or 1; the network divides bytes by 255;
- where there are pictures (Box of uint8, three dimensions, 0 to 255, sides of 36 and more) the row is bytes: the
  float32 of the numbers first, then the pictures as (channels, height, width). A replay keeps a pixel in a byte.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.envs.registration import load_env_creator
from gymnasium.vector.utils import batch_space
from gymnasium.wrappers import FrameStackObservation, GrayscaleObservation, ResizeObservation, TimeLimit

from jurybox.training.environments import making
from jurybox.training.environments.adapter import Moved, Result, Waiting, can_be_saved
from jurybox.training.environments.making import NOWHERE, EnvironmentPlace, EnvironmentUnusable, places_of, wanted
from jurybox.training.environments.stock import Kept, kept
from jurybox.training.spaces import (
    MASK,
    ActionPart,
    ActionSpec,
    ContractBroken,
    Leaf,
    StrangeObservation,
    action_mask,
    begun,
    composed,
    name_of,
    stepped,
)

__all__ = [
    "Actions",
    "EnvironmentUnusable",
    "Observations",
    "StrangeObservation",
    "make_environment",
    "played_environment",
    "stacked_space",
]

Array = npt.NDArray[Any]
Environment = gymnasium.Env[Any, Any]

_LONGEST_NAME = 200  # of an input, as in the protocol
_LEAST_SIDE = 36  # of a picture: the least that the convolutions of Mnih et al. (2015) accept


class _TorchDefaults:
    """Lets environments have their own defaults of torch (dtype, device): in a serial run a learner has others.

    Use it as a context manager around calls of environments. It does nothing where nobody has imported torch.

    Attributes:
        differ: whether theirs differ from ours, as far as it is known.
    """

    def __init__(self) -> None:
        self.differ = False
        self._ours: Any = None
        self._theirs: Any = None

    def __enter__(self) -> None:
        self._ours = self._now()
        if self._theirs is not None and self._theirs != self._ours:
            self._set(self._theirs)

    def __exit__(self, *_: object) -> None:
        self._theirs = self._now()
        if self._theirs is None:
            return
        torch: Any = sys.modules["torch"]  # which the environment may have imported: then ours are torch's own
        ours = (torch.float32, torch.device("cpu")) if self._ours is None else self._ours
        self.differ = self._theirs != ours
        if self.differ:
            self._set(ours)

    def _now(self) -> Any:
        torch: Any = sys.modules.get("torch")
        return None if torch is None else (torch.get_default_dtype(), torch.get_default_device())

    def _set(self, defaults: Any) -> None:
        torch: Any = sys.modules["torch"]
        torch.set_default_dtype(defaults[0])
        torch.set_default_device(None if defaults[1].type == "cpu" else defaults[1])


own_defaults = _TorchDefaults()


def make_environment(
    name: str,
    arguments: Mapping[str, Any] | None = None,
    max_episode_steps: int | None = None,
    *,
    grayscale: bool = False,
    resize: Sequence[int] | None = None,
    n_stack: int = 1,
    place: EnvironmentPlace = NOWHERE,
) -> Environment:
    """Make the environment of that name.

    Args:
        name: registered with Gymnasium ("CartPole-v1"), of a module that registers it ("ale_py:ALE/Pong-v5"), or
            "package.module:factory", a callable that returns an environment.
        arguments: keyword arguments of the factory, or of ``gymnasium.make``.
        max_episode_steps: truncate an episode after this number of steps; None: as the environment is registered.
        grayscale, resize, n_stack: see `_preprocessed`.
        place: which of a run's environments it is; a factory whose signature names ``worker_index`` or
            ``vector_index`` gets them, a registered environment's constructor, too.

    Raises:
        EnvironmentUnusable: it cannot be made.
    """
    with own_defaults:
        made = _made(name, dict(arguments or {}), max_episode_steps, place)
        try:
            return _preprocessed(made, grayscale, resize, n_stack)
        except BaseException:
            made.close()
            raise


def kept_environment(
    name: str,
    arguments: Mapping[str, Any],
    max_episode_steps: int | None = None,
    *,
    place: EnvironmentPlace,
    shared: bool,
    **preprocessing: Any,
) -> Kept:
    """Make an environment as `make_environment` does, or take it from the process's stock, see `stock.kept`."""

    def make() -> Environment:
        return make_environment(name, arguments, max_episode_steps, place=place, **preprocessing)

    return kept([name, arguments, max_episode_steps, place, preprocessing], make, shared=shared)


def _preprocessed(env: Environment, grayscale: bool, resize: Sequence[int] | None, n_stack: int) -> Environment:
    """Return an environment in Gymnasium's wrappers, in this order.

    Args:
        grayscale: whether pictures (height, width, 3) become (height, width).
        resize: height and width of pictures; None: as they are.
        n_stack: how many of the newest observations are seen together, the oldest first; at the beginning of an episode
            the first one so many times.
    """
    space = env.observation_space
    try:
        if grayscale:
            env = GrayscaleObservation(env)
        if resize is not None:
            env = ResizeObservation(env, (int(resize[0]), int(resize[1])))
    except (AssertionError, ImportError, TypeError, ValueError) as error:
        raise EnvironmentUnusable(
            f"grayscale and resize are for pictures of uint8 (height, width, 3), and observations are {space}: {error}"
        ) from error
    if n_stack > 1:
        one = env.observation_space
        env = FrameStackObservation(env, n_stack)
        env.observation_space = stacked_space(one, n_stack)
        if any(len(leaf.shape) > 3 for _, leaf in _leaves(env.observation_space)):
            raise EnvironmentUnusable(
                f"n_stack = {n_stack} makes four dimensions of the pictures of {space}, and three are expected: set "
                "grayscale = true, or stack them in a wrapper of the environment"
            )
    return env


def stacked_space(space: spaces.Space[Any], n: int) -> spaces.Space[Any]:
    """Return the space of n observations at once, (n, ...); what is a category in one observation is one in all."""
    if isinstance(space, spaces.Dict):
        return spaces.Dict({name: stacked_space(part, n) for name, part in space.spaces.items()})
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple([stacked_space(part, n) for part in space.spaces])
    if isinstance(space, spaces.MultiDiscrete):  # of which Gymnasium makes numbers
        nvec, start = (np.stack([each] * n) for each in (space.nvec, space.start))
        return spaces.MultiDiscrete(nvec, dtype=space.dtype, start=start)
    return batch_space(space, n)


def _made(name: str, given: dict[str, Any], max_episode_steps: int | None, place: EnvironmentPlace) -> Environment:
    is_registered = False

    def registered() -> Any:
        nonlocal is_registered
        is_registered, own = True, {}
        with suppress(gymnasium.error.Error):  # which `make` says better
            spec = gymnasium.spec(name)
            entry = load_env_creator(spec.entry_point) if isinstance(spec.entry_point, str) else spec.entry_point
            if entry is not None:
                own = {each: index for each, index in wanted(entry, place.keywords).items() if each not in spec.kwargs}
        if max_episode_steps is not None:  # a further wrapper could only shorten the registered limit
            given["max_episode_steps"] = max_episode_steps
        return gymnasium.make(name, **{**own, **given})

    expected = "a name that Gymnasium knows, or module:factory"
    made = making.make(name, given, place, expected, registered, gymnasium.registry)
    if max_episode_steps is not None and not is_registered and isinstance(made, gymnasium.Env):
        made = TimeLimit(made, max_episode_steps)
    if not isinstance(made, gymnasium.Env):
        better = "`envs` says how many there are to be"
        if isinstance(made, gymnasium.vector.VectorEnv):
            better = "vector environments are for `jurybox train gym --vector`"
        elif making.is_pettingzoo(made):
            better = "PettingZoo's worlds are for `jurybox train marl`, which checks them before it starts"
        raise EnvironmentUnusable(
            f"{name!r} gave a {type(made).__module__}.{type(made).__qualname__}: expected a gymnasium.Env of one "
            f"environment ({better})"
        )
    for space in ("observation_space", "action_space"):
        if not isinstance(getattr(made, space, None), gymnasium.Space):
            raise EnvironmentUnusable(
                f"{name!r} has no {space}: expected one of gymnasium.spaces, as an attribute of the class or set in "
                "__init__; it says what the environment shows or takes"
            )
    return made


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
        inputs: the named inputs of a policy, in the order of the rows.
    """

    numbers: int
    pictures: tuple[tuple[int, int, int], ...] = ()
    binary: bool = False
    inputs: tuple[Leaf, ...] = field(default=(), compare=False)

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
    """Converts observations of one space to rows, and to the named inputs of a policy.

    Args:
        space: of Box, Discrete, MultiDiscrete, MultiBinary, Dict and Tuple, nested at any depth.
        agent: whose observations these are, for messages.

    Attributes:
        seen: what the rows hold, and the inputs.

    Raises:
        EnvironmentUnusable: the space has a part of another kind, or none at all.
    """

    def __init__(self, space: spaces.Space[Any], agent: str = "") -> None:
        self._space, self._of = space, f" of {agent}" if agent else ""
        self._leaves = _leaves(space)
        leaves = tuple(leaf for _, leaf in self._leaves)
        numbers = sum(leaf.size for leaf in leaves)
        pictures = tuple(leaf.picture for leaf in leaves if leaf.kind == "picture")
        if not numbers and not pictures:
            raise EnvironmentUnusable(f"the observation space {space} is empty: there is nothing to learn from")
        if len({leaf.name for leaf in leaves}) < len(leaves):
            raise EnvironmentUnusable(
                f"two parts of the observation space {space} would be inputs of the same name: rename one in a wrapper"
            )
        if unnameable := [leaf.name for leaf in leaves if not 0 < len(leaf.name) <= _LONGEST_NAME]:
            raise EnvironmentUnusable(
                f"the observation space has the key {unnameable[0][:80]!r}: expected 1 to {_LONGEST_NAME} characters, "
                "which name an input of the policy"
            )
        binary = not pictures and all(leaf.binary for leaf in leaves)
        self.seen = Seen(numbers, pictures, binary, leaves)

    def inputs(self, observation: Any) -> dict[str, Array]:
        """Return the named inputs of an observation, each of its leaf's shape and dtype; they may share its memory.

        Raises:
            StrangeObservation: the space does not contain it, or it holds numbers that are not finite.
        """
        return {
            leaf.name: leaf.read(self._part(observation, path), _named(path, self._of)) for path, leaf in self._leaves
        }

    def strays(self, observation: Any) -> dict[str, str]:
        """Say for each Box what is not in it of an observation that can be used all the same."""
        found = {}
        for path, box in _innermost(self._space):
            if isinstance(box, spaces.Box):
                what, given = _named(path, self._of), np.asarray(self._part(observation, path))
                beyond = (given < box.low) | (given > box.high)
                if beyond.any():
                    found[what] = f"{what} holds {given[beyond][0]}, which is not in {box}"
                elif given.dtype != box.dtype:
                    found[what] = f"{what} is {given.dtype}, the space says {box.dtype}"
        return found

    def row(self, observation: Any) -> Array:
        """Convert an observation to a row of `seen.dtype` and `seen.size` elements; a copy. Raises as `inputs`."""
        return self.packed(self.inputs(observation))

    def packed(self, inputs: Mapping[str, Array]) -> Array:
        """Return the row of named inputs."""
        seen = self.seen
        row = np.zeros(seen.size, seen.dtype)
        numbers = np.zeros(seen.numbers, np.float32) if seen.pictures else row
        number, byte = 0, 4 * seen.numbers
        for leaf in seen.inputs:
            value = inputs[leaf.name]
            if leaf.kind == "picture":
                row[byte : byte + value.size] = (value.transpose(2, 0, 1) if leaf.channels_last else value).ravel()
                byte += value.size
            else:
                leaf.write(value, numbers[number : number + leaf.size])
                number += leaf.size
        if seen.pictures and seen.numbers:
            row[: 4 * seen.numbers] = numbers.view(np.uint8)
        return row

    def _part(self, observation: Any, path: tuple[Any, ...]) -> Any:
        value = observation
        for depth, key in enumerate(path):
            try:
                value = value[key]
            except (LookupError, TypeError) as error:
                has = list(value) if isinstance(value, Mapping) else f"a {type(value).__name__}"
                raise StrangeObservation(
                    f"{_named(path[:depth], self._of)} has no {key!r}: got {has}, expected the parts of {self._space}"
                ) from error
        return value


def _named(path: tuple[Any, ...], of: str = "") -> str:
    return f"an observation{of}" + "".join(f"[{key!r}]" for key in path)


def _leaf(path: tuple[Any, ...], space: spaces.Space[Any]) -> Leaf:
    name, shape, kind = name_of(path), tuple(space.shape or ()), np.dtype(space.dtype)
    if isinstance(space, spaces.Discrete):
        return Leaf(name, (), kind.name, "categories", binary=True, counts=(int(space.n),), start=(int(space.start),))
    if isinstance(space, spaces.MultiDiscrete):
        counts, start = (tuple(np.ravel(each).tolist()) for each in (space.nvec, space.start))
        return Leaf(name, shape, kind.name, "categories", binary=True, counts=counts, start=start)
    if isinstance(space, spaces.MultiBinary):
        return Leaf(name, shape, kind.name, binary=True)
    if not isinstance(space, spaces.Box) or kind.kind not in "biuf" or kind.itemsize > 8:
        what = type(space).__name__ if not isinstance(space, spaces.Box) else f"Box of {kind}"
        raise EnvironmentUnusable(
            f"{_named(path).removeprefix('an ')} is a {what}: expected Box, Discrete, MultiDiscrete, MultiBinary, or "
            "Dict and Tuple of them; flatten it in a wrapper of the environment"
        )
    if kind.kind in "biu" and bool((space.low >= 0).all() and (space.high <= 1).all()):
        return Leaf(name, shape, kind.name, binary=True)
    if kind != np.uint8:
        return Leaf(name, shape, kind.name)
    scale = 1.0 / 255.0  # bytes, whatever their bounds: numbers up to 1
    leaf = Leaf(name, shape, kind.name, "picture", scale)
    every_byte = bool((space.low == 0).all() and (space.high == 255).all())
    if len(shape) == 3 and every_byte and min(leaf.picture[1:]) >= _LEAST_SIDE:
        return leaf
    return Leaf(name, shape, kind.name, scale=scale)


def _innermost(space: spaces.Space[Any], path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The spaces in a Dict or Tuple that are neither, with their paths; of another space that itself."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        inner: Any = space.spaces
        for key, part in inner.items() if isinstance(space, spaces.Dict) else enumerate(inner):
            yield from _innermost(part, (*path, key))
    else:
        yield path, space


def _leaves(space: spaces.Space[Any]) -> list[tuple[tuple[Any, ...], Leaf]]:
    leaves = [(path, _leaf(path, part)) for path, part in _innermost(space)]
    return [(path, leaf) for path, leaf in leaves if math.prod(leaf.shape)]  # a part without a number is no input


def _joined(space: spaces.Space[Any], leaves: Sequence[tuple[str, Actions]]) -> ActionSpec:
    """What is chosen for all parts of a Dict or Tuple at once."""
    counts: list[int] = []
    starts: list[int] = []
    bounds: tuple[list[float], list[float]] = ([], [])
    parts = []
    for name, leaf in leaves:
        spec, own = leaf.spec, leaf.space
        counts += spec.counts or ((spec.size,) if spec.discrete else ())
        starts += spec.starts or ((spec.start,) if spec.discrete else ())
        bounds[0].extend(spec.low)
        bounds[1].extend(spec.high)
        choices = len(spec.counts) + spec.discrete
        parts.append(ActionPart(name, tuple(own.shape or ()), np.dtype(own.dtype).name, choices, len(spec.low)))
    if not counts and not bounds[0]:
        raise EnvironmentUnusable(f"the action space {space} is empty: there is nothing to choose")
    if len({part.name for part in parts}) < len(parts):
        raise EnvironmentUnusable(
            f"two parts of the action space {space} would have the same name: rename one in a wrapper"
        )
    low, high = map(tuple, bounds)
    size = sum(counts) if counts else len(low)
    return ActionSpec(False, size, 0, low, high, tuple(counts), tuple(starts), tuple(parts))


class Actions:
    """Converts a policy's actions to an environment's.

    Args:
        space: Box, Discrete, MultiDiscrete, MultiBinary, or Dict and Tuple of them at any depth.

    Raises:
        EnvironmentUnusable: it is another kind of space.
    """

    def __init__(self, space: spaces.Space[Any]) -> None:
        self._space = space
        self._leaves: list[tuple[str, Actions]] = []
        if isinstance(space, spaces.Dict | spaces.Tuple):
            self._leaves = [(name_of(path), Actions(part)) for path, part in _innermost(space)]
            self.spec = _joined(space, self._leaves)
        elif isinstance(space, spaces.Discrete):
            self.spec = ActionSpec(True, int(space.n), int(space.start))
        elif isinstance(space, spaces.Box):
            self._low = space.low.astype(np.float64).ravel()
            self._high = space.high.astype(np.float64).ravel()
            self.spec = ActionSpec(
                False, math.prod(space.shape), low=tuple(self._low.tolist()), high=tuple(self._high.tolist())
            )
            self._whole = np.dtype(space.dtype).kind in "iu"
        elif isinstance(space, spaces.MultiDiscrete) and space.nvec.size:
            self.spec = ActionSpec.choices(*(np.ravel(each).astype(int).tolist() for each in (space.nvec, space.start)))
        elif isinstance(space, spaces.MultiBinary):
            bits = int(np.prod(space.shape))
            self.spec = ActionSpec.choices([2] * bits, [0] * bits)
        else:
            raise EnvironmentUnusable(
                f"the action space is {space}: expected Box, Discrete, MultiDiscrete or MultiBinary, or Dict and Tuple "
                "of them, which is what the algorithms choose; make it one in a wrapper of the environment"
            )

    @property
    def space(self) -> spaces.Space[Any]:
        """The space."""
        return self._space

    def chosen(self, action: Any) -> Any:
        """The environment's action for whole numbers from 0 on, or for numbers in [-1, 1] (Box): scaled."""
        if self._leaves:
            return self._composed(action, Actions.chosen)
        if self.spec.chosen:
            return self._numbered(action)
        half = 0.5 * (self._high - self._low)
        return self._box(self._low + half * (np.asarray(action, np.float64) + 1.0))

    def clipped(self, action: Any) -> Any:
        """Return the action for numbers in the environment's own unit, clipped to the bounds."""
        if self._leaves:
            return self._composed(action, Actions.clipped)
        return self._numbered(action) if self.spec.chosen else self._box(np.asarray(action, np.float64))

    def _composed(self, action: Any, convert: Callable[[Actions, Any], Any]) -> Any:
        """The Dict or Tuple of an action: all choices come before all numbers."""
        action, choice, number = np.asarray(action), 0, len(self.spec.counts)
        parts = {}
        for (name, leaf), part in zip(self._leaves, self.spec.parts, strict=True):
            if part.choices:
                found = action[choice : choice + part.choices].astype(np.int64)
                found = found[0] if leaf.spec.discrete else found
            else:
                found = action[number : number + part.numbers]
            choice, number = choice + part.choices, number + part.numbers
            parts[name] = convert(leaf, found)
        return composed(self._space, parts)

    def _numbered(self, action: Any) -> Any:
        if self.spec.discrete:
            return self.spec.start + int(action)
        return (np.array(self.spec.starts) + action).astype(self._space.dtype).reshape(self._space.shape)

    def _box(self, numbers: npt.NDArray[np.float64]) -> Array:
        assert isinstance(self._space, spaces.Box)
        numbers = np.clip(numbers, self._low, self._high)
        if self._whole:
            numbers = np.rint(numbers)
        return numbers.astype(self._space.dtype).reshape(self._space.shape)


def played_environment(
    name: str,
    arguments: Mapping[str, Any],
    max_episode_steps: int | None = None,
    render_mode: str | None = None,
    **preprocessing: Any,
) -> Environment:
    """Make the environment in which a trained policy plays. A factory gets `render_mode` if one is set."""
    given = dict(arguments) if render_mode is None else {**arguments, "render_mode": render_mode}
    return make_environment(name, given, max_episode_steps, **preprocessing)


def foreign(method: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Call a method of an environment, in its own defaults of torch.

    Raises:
        ContractBroken: an import failed in it; it is no package of ours that is missing.
    """
    try:
        if own_defaults.differ or method.__name__ != "step":  # it may change them when it is made or reset
            with own_defaults:
                return method(*given, **named)
        return method(*given, **named)
    except ImportError as error:
        what = f"the environment's {method.__name__} raised {type(error).__name__}: {error}"
        raise ContractBroken(what) from error


class OneAgentEnvs:
    """What environments of one agent observe, side by side: the common part of the adapters of Gymnasium's.

    Args:
        n: how many.
        observed, does: their spaces.
        clips, masked: see `GymEnvs`.

    Raises:
        EnvironmentUnusable: the spaces are not supported.
    """

    agents = ("",)

    def __init__(
        self, n: int, observed: spaces.Space[Any], does: spaces.Space[Any], *, clips: bool, masked: bool
    ) -> None:
        self._observations, actions = Observations(observed), Actions(does)
        self.to_env, self._spec = actions.clipped if clips else actions.chosen, actions.spec
        self.n, seen = n, self._observations.seen
        self._rows = np.zeros((n, seen.size), seen.dtype)
        self._inputs = {leaf.name: np.zeros((n, *leaf.shape), leaf.dtype) for leaf in seen.inputs}
        self._masks = np.zeros((n, actions.spec.size), np.bool_) if masked else None
        if self._masks is not None:
            self._inputs[MASK] = self._masks
        self._running = np.zeros(n, np.bool_)

    def waiting(self) -> Waiting:
        """What all environments observe."""
        return Waiting("", self._inputs, self._rows.copy())

    def _see(
        self, number: int, observation: Any, info: Mapping[str, Any], env: Any = None, *, ended: bool = False
    ) -> None:
        found = self._observations.inputs(observation)
        for name, value in found.items():
            self._inputs[name][number] = value
        self._rows[number] = self._observations.packed(found)
        if self._masks is not None:
            self._masks[number] = foreign(action_mask, env, info, self._spec.size, self._spec.counts, ended=ended)

    def _moved(
        self, reward: Array, ends: tuple[Array, Array], infos: list[Any], steps: int, acted: Array | None = None
    ) -> Moved:
        over = ends[0] | ends[1]
        self._running &= ~over
        mask = None if self._masks is None else self._masks.copy()
        result = Result("", reward, *ends, self._rows.copy(), infos, mask, acted=acted)
        return Moved((result,), steps, np.flatnonzero(over).tolist())


class GymEnvs(OneAgentEnvs):
    """Gymnasium environments of one agent, as an `Adapter`.

    Args:
        n: how many.
        env, env_args, max_episode_steps, preprocessing: see `make_environment`.
        clips: whether numbers are actions in the environment's own unit, cut off at their bounds; else they are in
            [-1, 1], and scaled.
        masked: whether masks of actions are observed, see `spaces.action_mask`.
        places: of each environment in the run.
        shared: whether they are those of the process's stock, see `stock`.

    Attributes:
        to_env: the environment's action for one that an algorithm chooses.

    Raises:
        EnvironmentUnusable: the environment cannot be made, or has unsupported spaces.
    """

    bound = "set max_episode_steps, which bounds them (as high as you like)"

    def __init__(
        self,
        n: int,
        env: str,
        env_args: Mapping[str, Any],
        max_episode_steps: int | None = None,
        *,
        clips: bool,
        masked: bool = False,
        places: Sequence[EnvironmentPlace] = (),
        shared: bool = False,
        **preprocessing: Any,
    ) -> None:
        self.name, self.shared = env, shared
        with ExitStack() as undo:
            self._kept: list[Kept] = []
            for place in places or places_of(0, range(n)):
                one = kept_environment(env, env_args, max_episode_steps, place=place, shared=shared, **preprocessing)
                self._kept.append(one)
                if not shared:
                    undo.callback(one.env.close)
            self.envs: list[Environment] = [each.env for each in self._kept]
            one_of = self.envs[0]
            super().__init__(n, one_of.observation_space, one_of.action_space, clips=clips, masked=masked)
            self._resources = undo.pop_all()

    def begin(self, environment: int, seed: int) -> None:
        """Begin an episode. Raises ContractBroken: what it returned is not what it has to be."""
        self._kept[environment].user = self
        observation, info = begun(foreign(self.envs[environment].reset, seed=seed))
        self._see(environment, observation, info, self.envs[environment])
        self._running[environment] = True

    def step(self, actions: Array) -> Moved:
        """Make a step in each environment whose episode is not over. Raises ContractBroken, see `begin`."""
        reward, terminated, truncated = np.zeros(self.n), np.zeros(self.n, np.bool_), np.zeros(self.n, np.bool_)
        infos: list[Mapping[str, Any]] = [{}] * self.n
        running = np.flatnonzero(self._running).tolist()
        for number in running:
            env, action = self.envs[number], self.to_env(actions[number])
            observation, reward[number], terminated[number], truncated[number], infos[number] = stepped(
                foreign(env.step, action)
            )
            self._see(number, observation, infos[number], env, ended=bool(terminated[number] or truncated[number]))
        return self._moved(reward, (terminated, truncated), infos, len(running))

    def render(self, environment: int) -> tuple[Any, float]:
        """Return what an environment renders now, and its frames per second."""
        env = self.envs[environment]
        return foreign(env.render), float(env.metadata.get("render_fps") or 30.0)

    def hold(self, alive: Callable[[], None]) -> list[int]:
        """Return the environments in which another has begun an episode since, see `adapter.Lent`."""
        return [number for number in np.flatnonzero(self._running).tolist() if self._kept[number].user is not self]

    def release(self) -> None:
        """Others may have the environments."""

    def state(self) -> dict[str, Any] | None:
        """Return the states of the environments; None: one of them cannot be saved, see `can_be_saved`."""
        if not all(map(can_be_saved, self.envs)) or (self.shared and self.hold(lambda: None)):
            return None
        states = [foreign(getattr(env, "episode_state")) for env in self.envs]  # noqa: B009 (Gymnasium's class has none)
        return {"envs": states, "inputs": self._inputs, "rows": self._rows, "running": self._running}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        for one, saved in zip(self._kept, state["envs"], strict=True):
            one.user = self
            foreign(getattr(one.env, "restore_episode"), saved)  # noqa: B009
        for name, array in self._inputs.items():
            array[...] = state["inputs"][name]
        self._rows[...], self._running[...] = state["rows"], state["running"]

    def close(self) -> None:
        """Close the environments, if they are not shared."""
        self._resources.close()
