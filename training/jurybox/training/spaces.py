"""What environments and policies exchange: observations, actions, results; and the checks of what comes from outside.

Needs neither gymnasium nor torch.

A policy takes an observation as the environment gives it: a Box, Discrete, MultiDiscrete or MultiBinary as the input
"observation", the parts of a Dict by their keys, those of a Tuple as "0", "1", nested ones as "arm.camera". One-hot
encoding and the division of bytes by 255 are layers of the network, so workers, servers, exported programs and curl
send the same arrays.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = [
    "ActionPart", "ActionSpec", "AgentSpec", "ContractBroken", "Leaf", "Stepped", "StrangeObservation", "action_mask",
    "as_action", "begun", "check_finite", "composed", "converted", "grouped", "named", "number", "places", "stepped",
]  # fmt: skip

Array = npt.NDArray[Any]
_MOST = float(np.finfo(np.float32).max)
_OLD = "an environment of Gym's old interface needs a wrapper, such as those of the package shimmy"
CLIP = 10.0  # deviations; bound of normalised numbers
ALONE = "observation"  # name of the input where the observation is no Dict and no Tuple
DISCOUNTED = "discounted_return"  # column of a replay: of the episode until that step
MASK = "action_mask"  # name of the last input of a policy that gets masks
MEMORY = "memory"  # name of what a recurrent policy keeps from step to step: a column, a session's state, an input
REMEMBERED = "remembered"  # output of its served model: the memory after the step, which its session keeps, too


class ContractBroken(ValueError):
    """An environment returned what its interface does not allow; the message names the part and what was expected."""


class StrangeObservation(ContractBroken):
    """An observation is not contained in its space."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """One named input of a policy: one part of the environment's observation.

    Attributes:
        name: of the input.
        shape, dtype: as the environment gives it.
        kind: numbers; a picture, which convolutions see; or categories, which are one-hot in the network.
        scale: what the network multiplies numbers by: 1/255 of bytes.
        binary: whether all numbers are 0 or 1.
        counts, start: of every category, flat: the number of its values, and the first one.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: Literal["numbers", "picture", "categories"] = "numbers"
    scale: float = 1.0
    binary: bool = False
    counts: tuple[int, ...] = ()
    start: tuple[int, ...] = ()

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Leaf:
        """Create from the result of `as_dict`, also if it went through JSON."""
        sequences = {name: tuple(document[name]) for name in ("shape", "counts", "start")}
        return cls(**{**document, **sequences})

    def as_dict(self) -> dict[str, Any]:
        """Return the leaf as JSON values."""
        return asdict(self)

    @property
    def channels_last(self) -> bool:
        """Of a picture: whether the channels are its last dimension."""
        return not self.shape[0] < min(self.shape[1:])

    @property
    def picture(self) -> tuple[int, int, int]:
        """Of a picture: (channels, height, width)."""
        a, b, c = self.shape
        return (c, a, b) if self.channels_last else (a, b, c)

    @property
    def size(self) -> int:
        """Numbers that the network sees; 0 for a picture."""
        if self.kind == "picture":
            return 0
        return sum(self.counts) if self.kind == "categories" else math.prod(self.shape)

    def read(self, value: Any, what: str) -> Array:
        """Return the part of an observation as an array of `shape` and `dtype`.

        Args:
            what: names the part in messages.

        Raises:
            StrangeObservation: it has another shape, or holds what the space does not contain or what is not finite.
        """
        found = converted(value, self.dtype, self.shape, what)
        if self.kind == "categories":
            places = found.ravel().astype(np.int64) - np.asarray(self.start)
            wrong = (places < 0) | (places >= np.asarray(self.counts))
            if wrong.any():
                number = int(np.flatnonzero(wrong)[0])
                first, count = self.start[number], self.counts[number]
                raise StrangeObservation(
                    f"{what} holds {found.ravel()[number]}, expected {first} to {first + count - 1}"
                )
        elif self.binary and found.size and (found.min() < 0 or found.max() > 1):
            raise StrangeObservation(f"{what} holds other numbers than 0 and 1")
        return found

    def write(self, found: Array, out: Array) -> None:
        """Write what `read` returned to `out`, the numbers (size,) that the network sees, not scaled."""
        if self.kind != "categories":
            out[:] = found.ravel()
            return
        first = np.cumsum((0, *self.counts[:-1])) - np.asarray(self.start)
        out[first + found.ravel().astype(np.int64)] = 1


@dataclass(frozen=True, slots=True)
class ActionPart:
    """One part of an action that is a Dict or a Tuple.

    Attributes:
        name: of its path of keys and numbers, as of an observation's parts.
        shape, dtype: as the environment takes it.
        choices, numbers: how many choices or numbers it has; one of them is 0.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    choices: int = 0
    numbers: int = 0


@dataclass(frozen=True, slots=True)
class ActionSpec:
    """What a policy chooses: one of some actions, several such choices at once (`counts`), numbers, or both at once.

    An action of both (`mixed`) is float32: the choices, as whole numbers, then the numbers.

    Attributes:
        discrete: one of `size` actions.
        size: number of actions, of the actions of all choices together, or else of numbers.
        start: the environment's number of the first action.
        low, high: bounds of the numbers, flat, in the environment's unit; infinite where there is none.
        counts: of several choices: how many actions each has; a bit has two. A network has an output for each, those of
            the choices side by side.
        starts: the environment's number of the first action of each choice.
        parts: of an environment's action that is a Dict or a Tuple, in its order.
    """

    discrete: bool
    size: int
    start: int = 0
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()
    parts: tuple[ActionPart, ...] = ()

    @classmethod
    def choices(cls, counts: Sequence[int], starts: Sequence[int]) -> ActionSpec:
        """Create one of several choices."""
        return cls(False, sum(counts), counts=tuple(counts), starts=tuple(starts))

    @property
    def chosen(self) -> bool:
        """Whether it is one of some actions, or several such choices: whole numbers."""
        return self.discrete or (bool(self.counts) and not self.low)

    @property
    def mixed(self) -> bool:
        """Whether it is choices and numbers at once."""
        return bool(self.counts) and bool(self.low)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of an action: (), (choices,) or (numbers,)."""
        if self.mixed:
            return (len(self.counts) + len(self.low),)
        return () if self.discrete else (len(self.counts) or self.size,)

    @property
    def dtype(self) -> str:
        """Dtype of an action: int64, or float32 of numbers."""
        return "int64" if self.chosen else "float32"

    def best(self, values: Array) -> Array:
        """Return the action with the largest value (n, size) in each row; of several choices, or both, (n, choices)."""
        found: Array = (grouped(values, self.counts) if self.counts else values).argmax(-1)
        return found

    def sample(self, rng: np.random.Generator, n: int, mask: Array | None = None) -> Array:
        """Draw actions evenly, (n, *shape), of those that a mask (n, size) allows; numbers in [-1, 1]."""
        if self.mixed:
            choices = replace(self, low=(), high=()).sample(rng, n, mask)
            numbers = rng.uniform(-1, 1, (n, len(self.low)))
            return np.concatenate((choices, numbers), 1).astype(np.float32)
        if mask is not None:
            return self.best(np.where(mask, rng.random(mask.shape), -1.0))
        if self.counts:
            return rng.integers(self.counts, size=(n, len(self.counts)))
        if self.discrete:
            return rng.integers(self.size, size=n)
        return rng.uniform(-1, 1, (n, self.size)).astype(np.float32)

    @property
    def bounded(self) -> bool:
        """Whether all bounds are finite."""
        return all(map(math.isfinite, (*self.low, *self.high)))


@dataclass(frozen=True, slots=True)
class AgentSpec:
    """What a policy gets and what it chooses.

    Attributes:
        inputs: the parts of an observation, in the order of the policy's arguments.
        action: what is chosen.
        normalize: whether the network normalises the numbers of observations, with statistics that it holds.
        clip: bound of normalised numbers, in standard deviations.
        masked: whether the policy has one more, last input, "action_mask", bool (`action.size`,): the actions that may
            be chosen. The network gives the others the lowest float32, so that nothing chooses them.
    """

    inputs: tuple[Leaf, ...]
    action: ActionSpec
    normalize: bool = False
    clip: float = CLIP
    masked: bool = False

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names of the arguments of the policy's network, in order: the inputs, and the mask if there is one."""
        return (*(leaf.name for leaf in self.inputs), *((MASK,) if self.masked else ()))

    @property
    def numbers(self) -> int:
        """Numbers that the network sees, without those of pictures."""
        return sum(leaf.size for leaf in self.inputs)

    @property
    def pictures(self) -> tuple[tuple[int, int, int], ...]:
        """(channels, height, width) of every picture."""
        return tuple(leaf.picture for leaf in self.inputs if leaf.kind == "picture")

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> AgentSpec:
        """Create from the result of `as_dict`, also if it went through JSON."""
        action = dict(document["action"])
        for name in ("low", "high"):
            action[name] = tuple(map(float, action[name]))
        for name in ("counts", "starts"):
            action[name] = tuple(action.get(name, ()))
        parts = ({**part, "shape": tuple(part["shape"])} for part in action.get("parts", ()))
        action["parts"] = tuple(ActionPart(**part) for part in parts)
        inputs = tuple(map(Leaf.of, document["inputs"]))
        return cls(inputs, ActionSpec(**action), document["normalize"], document["clip"], document["masked"])

    def as_dict(self) -> dict[str, Any]:
        """Return the specification as values of JSON and TOML: "inf" and "-inf" are infinite bounds."""
        action = asdict(self.action)
        for name in ("low", "high"):
            action[name] = [bound if math.isfinite(bound) else str(bound) for bound in action[name]]
        inputs = [leaf.as_dict() for leaf in self.inputs]
        more = {"normalize": self.normalize, "clip": self.clip, "masked": self.masked}
        return {"inputs": inputs, "action": action, **more}


@cache
def places(counts: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Return where the values of several choices are that lie side by side, (choices, most).

    Choices have different numbers of actions: what is missing is the place after the last value.
    """
    found = np.full((len(counts), max(counts)), sum(counts), np.int64)
    first = 0
    for row, count in zip(found, counts, strict=True):
        row[:count] = np.arange(first, first + count)
        first += count
    return found


def grouped(values: Array, counts: tuple[int, ...]) -> Array:
    """Return values (n, sum of counts) as (n, choices, most), -inf where a choice has fewer actions."""
    none = np.full((len(values), 1), -np.inf, values.dtype)
    return np.concatenate((values, none), 1)[:, places(counts)]


def converted(value: Any, dtype: npt.DTypeLike, shape: Sequence[int], what: str, *, finite: bool = True) -> Array:
    """Return a value as an array of this dtype and shape, if it is one: no number changes but by a float's rounding.

    Args:
        finite: refuse what is not finite as float32.

    Raises:
        StrangeObservation: it is no such array; the message names the part, what it is, and what was expected.
    """
    wanted = np.dtype(dtype)
    try:
        given = np.asarray(value)
    except ValueError:  # nested lists of different lengths
        given = np.empty((), object)

    def expected() -> str:  # for an error alone: this runs at every step
        return f"expected {wanted} of shape {tuple(shape)}"

    if given.dtype.kind not in "biuf":
        raise StrangeObservation(f"{what} is {short(value)}: {expected()}")
    if given.shape != tuple(shape):
        raise StrangeObservation(f"{what} has the shape {given.shape}: {expected()}")
    if given.dtype == wanted:
        found = given
    else:
        with np.errstate(over="ignore", invalid="ignore"):
            found = given.astype(wanted)
        if wanted.kind != "f" and not np.array_equal(found, given):
            changed = given[found != given].ravel()[0] if given.shape else given[()]
            raise StrangeObservation(f"{what} holds {changed}: {expected()}")
        if wanted.kind != "f" and given.dtype.kind == "f":
            raise StrangeObservation(f"{what} has the dtype {given.dtype}: {expected()}")
    if wanted.kind == "f" and not finite:
        if found is not given and not np.array_equal(np.isinf(found), np.isinf(given)):
            raise StrangeObservation(f"{what} holds a number beyond {wanted}: {expected()}")
    elif wanted.kind == "f":
        fine = np.isfinite(found) if wanted == np.float32 else np.abs(found) <= _MOST
        if not fine.all():
            wrong = given[~fine].ravel()[0] if found.shape else given[()]
            raise StrangeObservation(
                f"{what} holds {wrong}, which is not finite as float32 and which nothing can be learned from: bound it "
                "in a wrapper of the environment"
            )
    return found


def take(tree: Any, rows: Any) -> Any:
    """Return a copy of one row, or of several, of values side by side in a Dict, a Tuple or an array."""
    if isinstance(tree, Mapping):
        return {name: take(part, rows) for name, part in tree.items()}
    if isinstance(tree, tuple):
        return tuple(take(part, rows) for part in tree)
    found = tree[rows]
    return found.copy() if isinstance(found, np.ndarray) else found


def named(observation: Any) -> dict[str, Any]:
    """Return the parts of an environment's observation by the names of the inputs."""
    found: dict[str, Any] = {}
    _name(observation, "", found)
    return found


def name_of(path: Sequence[Any]) -> str:
    """Return the name of the input at a path of keys and numbers."""
    return ".".join(map(str, path)) if path else ALONE


def _name(value: Any, name: str, found: dict[str, Any]) -> None:
    if isinstance(value, Mapping):
        parts = list(value.items())
    elif isinstance(value, tuple):
        parts = list(enumerate(value))
    else:
        found[name or ALONE] = value
        return
    for key, part in parts:
        _name(part, f"{name}.{key}" if name else str(key), found)


def short(value: Any) -> str:
    """Describe a value in a few words, for a message."""
    text = repr(value)
    return f"a {type(value).__name__}, {text if len(text) < 60 else text[:57] + '...'}"


class Stepped(NamedTuple):
    """The result of one step, checked; the observation as the environment gave it."""

    observation: Any
    reward: float
    terminated: bool
    truncated: bool
    info: Mapping[str, Any]


def begun(found: Any) -> tuple[Any, Mapping[str, Any]]:
    """Check the result of an environment's `reset`.

    Raises:
        ContractBroken: it is not an observation and an info.
    """
    if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[1], Mapping):
        raise ContractBroken(f"reset returned {short(found)}: expected (observation, info), info being a dict; {_OLD}")
    return found


def stepped(found: Any, *, finite: bool = True) -> Stepped:
    """Check the result of an environment's `step`.

    Args:
        finite: refuse a reward that is not finite as float32.

    Raises:
        ContractBroken: a part is missing, or not what it has to be.
    """
    if not isinstance(found, tuple) or len(found) != 5:
        what = f"{len(found)} values" if isinstance(found, tuple) else short(found)
        raise ContractBroken(
            f"step returned {what}: expected (observation, reward, terminated, truncated, info); {_OLD}"
        )
    observation, reward, terminated, truncated, info = found
    if not isinstance(info, Mapping):
        raise ContractBroken(f"the info of a step is {short(info)}: expected a dict")
    flags = (flag(terminated, "terminated"), flag(truncated, "truncated"))
    return Stepped(observation, number(reward, "the reward", finite=finite), *flags, info)


def action_mask(
    env: Any, info: Mapping[str, Any], size: int, counts: tuple[int, ...] = (), *, ended: bool = False
) -> npt.NDArray[np.bool_]:
    """Return the actions that may be chosen, bool (size,): ``info["action_mask"]``, else ``env.action_masks()``.

    Args:
        env: the environment; None: it has no method.
        info: of the last reset or step, or the observation that the mask is a part of.
        size: number of actions; of several choices, of all of them, side by side.
        counts: of several choices: how many actions each has.
        ended: whether the episode is over, so that nothing has to be allowed.

    Raises:
        ContractBroken: there is none, it has another shape, or it allows nothing.
    """
    what, given = f"info[{MASK!r}]", info.get(MASK)
    if given is None:
        what = "action_masks()"
        try:
            method = env.get_wrapper_attr("action_masks")
        except AttributeError:
            if ended:
                return np.zeros(size, np.bool_)
            raise ContractBroken(
                f"there is no mask of actions: action_masks = true expects info[{MASK!r}] of reset and step, or a "
                "method action_masks() of the environment"
            ) from None
        given = method()
    found: npt.NDArray[np.bool_] = converted(given, np.bool_, (size,), what)
    allowed = grouped(found[None].astype(np.float32), counts)[0].max(-1) if counts else found.max(keepdims=True)
    if not ended and not (allowed > 0).all():
        raise ContractBroken(f"{what} allows no action{' of one of the choices' * bool(counts)}: expected one or more")
    return found


def number(value: Any, what: str, *, finite: bool = True) -> float:
    """Return one number that can be learned from.

    Args:
        what: names it in messages.
        finite: refuse what is not finite as float32.

    Raises:
        ContractBroken: it is no number, or not finite as float32.
    """
    if not isinstance(value, float):  # which most are, and asking NumPy takes a microsecond
        given = np.asarray(value)
        if given.dtype.kind not in "biuf" or given.shape != ():
            raise ContractBroken(f"{what} is {short(value)}: expected one number")
    found = float(value)
    if finite and not -_MOST <= found <= _MOST:
        raise ContractBroken(f"{what} is {found}, which is not finite as float32: nothing can be learned from it")
    return found


def check_finite(values: npt.ArrayLike, what: str) -> None:
    """Check that numbers are finite as float32.

    Raises:
        ContractBroken: one is not.
    """
    found = np.asarray(values)
    fine = (found >= -_MOST) & (found <= _MOST)
    if not fine.all():
        number(found[~fine].flat[0], what)


def audits(info: Mapping[str, Any]) -> dict[str, float]:
    """Return ``info["audit"]``, numbers by name; empty if there is none.

    Raises:
        ContractBroken: it is something else.
    """
    found = info.get("audit", {})
    if not isinstance(found, Mapping):
        raise ContractBroken(f'info["audit"] is {short(found)}: expected numbers by name, {{"other": 0.5}}')
    return {str(name): number(value, f'info["audit"][{name!r}]') for name, value in found.items()}


def flag(value: Any, what: str) -> bool:
    """Return whether an episode is over. Raises ContractBroken: it is neither True nor False."""
    if isinstance(value, bool):
        return value
    given = np.asarray(value)
    if given.shape != () or given.dtype.kind not in "biuf" or given not in (0, 1):
        raise ContractBroken(f"{what} is {short(value)}: expected True or False")
    return bool(given)


def composed(space: Any, parts: Mapping[str, Any], path: tuple[Any, ...] = ()) -> Any:
    """Return the parts of an action, by the names of their paths, as the Dict or Tuple that the space is."""
    inner = getattr(space, "spaces", None)
    if isinstance(inner, Mapping):
        return {key: composed(each, parts, (*path, key)) for key, each in inner.items()}
    if inner is not None:
        return tuple(composed(each, parts, (*path, number)) for number, each in enumerate(inner))
    return parts[name_of(path)]


def as_action(action: Array | Mapping[str, Array], space: Any) -> Any:
    """Convert an action to the environment's shape and dtype; of a Dict or Tuple from its parts by name."""
    if isinstance(action, Mapping):
        return composed(space, action)
    if not action.ndim:
        return int(action)
    shape, dtype = getattr(space, "shape", action.shape), np.dtype(getattr(space, "dtype", action.dtype))
    whole = np.rint(action) if dtype.kind in "iu" else action
    return whole.astype(dtype).reshape(shape)
