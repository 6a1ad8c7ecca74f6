"""What environments have to return, and learners to report: one checker of both, in the words of their authors.

Every message names the part, what it is, and what was expected.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jurybox.training.spaces import MASK, ContractBroken, converted, grouped, short

__all__ = [
    "ContractBroken", "Diverged", "Stepped", "action_mask", "begun", "check_finite", "check_losses", "number",
    "stepped",
]  # fmt: skip

_MOST = float(np.finfo(np.float32).max)
_OLD = "an environment of Gym's old interface needs a wrapper, such as those of the package shimmy"


class Diverged(ValueError):
    """A learner's numbers are not finite any more."""


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
        info: of the last reset or step.
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
        raise ContractBroken(
            f"{what} is {np.ravel(found)[~np.ravel(fine)][0]}, which is not finite as float32: nothing can be learned "
            "from it"
        )


def check_losses(metrics: Mapping[str, Any]) -> None:
    """Check that a learner's losses are finite: the metrics whose names have "loss" in them.

    Raises:
        Diverged: one is not.
    """
    for name, value in metrics.items():
        if "loss" in name and not np.isfinite(float(value)):
            raise Diverged(
                f"{name} is {float(value)}: the learner has diverged. Lower its learning_rate, or bound rewards and "
                "observations; checkpoints/best and the checkpoints are from before"
            )


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
