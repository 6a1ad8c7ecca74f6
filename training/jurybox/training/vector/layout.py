"""Shared arrays of environments and their worker over one segment, and infos by Gymnasium's rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import Space
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple

from jurybox.protocol.segment import Segment
from jurybox.training.spaces import StrangeObservation, converted, short, take

# Arrays that environments and their worker share over one segment, with the same layout on both sides.
#
# A batch of a Gymnasium space is a tree: an array for Box, Discrete, MultiBinary and MultiDiscrete, a dict for Dict,
# a tuple for Tuple. Its row i belongs to environment i.


Array = npt.NDArray[Any]
Tree = Any  # Array | dict[str, Tree] | tuple[Tree, ...]
InfoFields = Mapping[str, tuple[str, tuple[int, ...]]]  # name: dtype, shape of one environment's value

_ALIGNMENT = 64


@dataclass(slots=True)
class Shared:
    """The arrays, n rows each.

    Attributes:
        actions, observations: trees of the two spaces.
        rewards: float64. terminated, truncated, over: bool; `over` says that the episode has ended and the next is due.
        infos: declared info fields by name; `info_masks` marks, by name, the environments that set them in their last
            step.
        final_observations, final_infos, final_info_masks: the same for the ends of episodes; empty unless they begin
            anew in the step in which they end.
    """

    actions: Tree
    observations: Tree
    rewards: npt.NDArray[np.float64]
    terminated: npt.NDArray[np.bool_]
    truncated: npt.NDArray[np.bool_]
    over: npt.NDArray[np.bool_]
    infos: dict[str, Array]
    info_masks: dict[str, npt.NDArray[np.bool_]]
    final_observations: Tree
    final_infos: dict[str, Array]
    final_info_masks: dict[str, npt.NDArray[np.bool_]]


def arrange(
    n: int, observation: Space[Any], action: Space[Any], fields: InfoFields, *, finals: bool, segment: Segment | None
) -> tuple[Shared, int]:
    """Place the arrays over a segment; returns them and their size in bytes. Without a segment only the size counts.

    Raises:
        TypeError: a space that has no rows of fixed shape.
    """
    at = 0

    def place(dtype: npt.DTypeLike, shape: tuple[int, ...]) -> Array:
        nonlocal at
        offset, kind = at, np.dtype(dtype)
        at += -(-kind.itemsize * int(np.prod((n, *shape))) // _ALIGNMENT) * _ALIGNMENT
        return np.empty(0, kind) if segment is None else segment.array(kind, (n, *shape), offset)

    def named() -> dict[str, Array]:
        return {name: place(dtype, shape) for name, (dtype, shape) in fields.items()}

    def marks() -> dict[str, npt.NDArray[np.bool_]]:
        return {name: place(np.bool_, ()) for name in fields}

    shared = Shared(  # in memory order
        actions=_tree(action, place),
        observations=_tree(observation, place),
        rewards=place(np.float64, ()),
        terminated=place(np.bool_, ()),
        truncated=place(np.bool_, ()),
        over=place(np.bool_, ()),
        infos=named(),
        info_masks=marks(),
        final_observations=_tree(observation, place) if finals else None,
        final_infos=named() if finals else {},
        final_info_masks=marks() if finals else {},
    )
    return shared, max(at, _ALIGNMENT)


def put(tree: Tree, rows: Any, value: Any, what: str) -> None:
    """Write one environment's value into row `rows`, or a batch into several.

    Args:
        what: names the value in messages.

    Raises:
        StrangeObservation: it has another shape, lacks a part, or holds what the dtype cannot hold.
    """
    if isinstance(tree, dict | tuple):
        names = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
        kind = Mapping if isinstance(tree, dict) else tuple | list
        if not isinstance(value, kind) or any(name not in value for name in names if isinstance(tree, dict)):
            raise StrangeObservation(f"{what} is {short(value)}: expected the parts {', '.join(map(str, names))}")
        if isinstance(tree, tuple) and len(value) != len(tree):
            raise StrangeObservation(f"{what} has {len(value)} parts: expected {len(tree)}")
        for name in names:
            put(tree[name], rows, value[name], f"{what}[{name!r}]")
    else:
        shape = tree.shape[1:] if isinstance(rows, int) else (len(rows), *tree.shape[1:])
        tree[rows] = converted(value, tree.dtype, shape, what, finite=False)


def _tree(space: Space[Any], place: Callable[[npt.DTypeLike, tuple[int, ...]], Array]) -> Tree:
    if isinstance(space, Dict):
        return {name: _tree(part, place) for name, part in space.spaces.items()}
    if isinstance(space, Tuple):
        return tuple(_tree(part, place) for part in space.spaces)
    if isinstance(space, Discrete):
        return place(space.dtype, ())
    if isinstance(space, Box | MultiBinary | MultiDiscrete):
        assert space.shape is not None
        return place(space.dtype, space.shape)
    raise TypeError(
        f"expected a space of Box, Discrete, MultiBinary, MultiDiscrete, Dict and Tuple, got {space}: its values have "
        "no fixed shape to share; flatten it in a wrapper"
    )


def shared_infos(fields: dict[str, Any], masks: dict[str, Any], rows: Any) -> dict[str, Any]:
    """Return copies of the declared fields that were set."""
    infos: dict[str, Any] = {}
    for name, field in fields.items():
        mask = masks[name][rows]
        if mask.any():
            values = take(field, rows)
            values[~mask] = 0
            infos[name], infos[f"_{name}"] = values, mask.copy()
    return infos


def add(infos: dict[str, Any], info: dict[str, Any], row: int, n: int) -> None:
    """Put one environment's info into row `row` of `n`, as `VectorEnv._add_info` does."""
    for name, value in info.items():
        if isinstance(value, dict):
            add(infos.setdefault(name, {}), value, row, n)
        else:
            if name not in infos:
                infos[name] = _empty(value, n)
            infos[name][row] = value
        infos.setdefault(f"_{name}", np.zeros(n, np.bool_))[row] = True


def _empty(value: Any, n: int) -> np.ndarray[Any, Any]:
    if isinstance(value, bool | int | float | np.number | np.bool_):
        return np.zeros(n, dtype=type(value))
    if isinstance(value, np.ndarray):
        return np.zeros((n, *value.shape), dtype=value.dtype)
    return np.full(n, None, dtype=object)
