"""`jurybox check env`: play an environment at random, and say what a training would stumble over."""

from __future__ import annotations

import re
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from gymnasium.utils.env_checker import check_env

from jurybox.processes.surroundings import kept
from jurybox.protocol.weights.channel import decode_extra, encode_extra
from jurybox.training.algorithms.base import AlgorithmUnusable
from jurybox.training.algorithms.registry import ALGORITHMS, make
from jurybox.training.environments.adapter import can_be_saved
from jurybox.training.environments.gymnasium_env import (
    Actions,
    Environment,
    EnvironmentUnusable,
    Observations,
    make_environment,
)
from jurybox.training.roles.checking import place_of
from jurybox.training.spaces import AgentSpec, ContractBroken, Stepped, StrangeObservation, begun, stepped

_AGAIN = 20  # steps that are made twice with one seed
_SLOW = 5.0  # seconds of a reset that are worth a word
_SLOW_RESET = "one of more than reset_timeout (600 s) counts as hanging in a training"
_COLOURS = re.compile("\x1b\\[[0-9;]*m")

Kind = Literal["wrong", "note"]


@dataclass(slots=True)
class Checked:
    """What was found.

    Attributes:
        facts: what the environment is, by name.
        remarks: (kind, sentence) each; "wrong" is what no training can work with, "note" what may surprise.
    """

    facts: dict[str, str] = field(default_factory=dict)
    remarks: list[tuple[Kind, str]] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return all(kind != "wrong" for kind, _ in self.remarks)

    def note(self, sentence: str) -> None:
        """Add what may surprise."""
        self.remarks.append(("note", sentence))

    def __str__(self) -> str:
        lines = [f"{name:12} {fact}" for name, fact in self.facts.items()]
        lines += [f"{kind:12} {sentence}" for kind, sentence in self.remarks]
        return "\n".join([*lines, f"{'result':12} {'a training can use it' if self.passed else 'it cannot be used'}"])


def check(
    name: str,
    arguments: Mapping[str, Any] | None = None,
    *,
    steps: int = 1000,
    seed: int = 0,
    max_episode_steps: int | None = None,
) -> Checked:
    """Check an environment as `train gym` makes and plays it; its own exceptions are findings, too.

    Args:
        name: a Gymnasium id, or "module:factory".
        arguments: keyword arguments of the environment.
        steps: how many random steps it is played for.
        seed: of its first episode and of the actions.
        max_episode_steps: as the setting of `train gym`.

    Example:
        assert check("CartPole-v1").passed
    """
    found, changed, threads, children = Checked(), list[str](), set(threading.enumerate()), _children()
    try:
        with kept(changed.extend):
            env = make_environment(name, arguments, max_episode_steps)
            try:
                _look(env, found)
                _play(env, found, steps, seed)
                if _repeat(env, found, seed) and can_be_saved(env):
                    _restore(env, found, seed)
                _ask_gymnasium(env, found)
            finally:
                env.close()
    except (EnvironmentUnusable, ContractBroken, StrangeObservation) as error:
        found.remarks.append(("wrong", str(error)))
    except (Exception, SystemExit) as error:  # noqa: BLE001  of the environment: what it raises is the finding
        found.remarks.append(("wrong", f"it raised {type(error).__name__}: {error} ({place_of(error)})"))
    _look_around(found, changed, threads, children)
    return found


def _look(env: Environment, found: Checked) -> None:
    """Read the spaces, and try each algorithm on them."""
    seen, action = Observations(env.observation_space).seen, Actions(env.action_space).spec
    inputs = [f"{leaf.name} {leaf.dtype} {list(leaf.shape)} ({leaf.kind})" for leaf in seen.inputs]
    found.facts["observation"] = ", ".join(inputs)
    found.facts["action"] = str(env.action_space)
    can, cannot, spec = [], [], AgentSpec(seen.inputs, action).as_dict()
    for algorithm in ALGORITHMS:
        try:
            make(algorithm, {}, spec)
        except AlgorithmUnusable as error:
            cannot.append(f"{algorithm}: {error}")
        else:
            can.append(algorithm)
    found.facts["algorithms"] = ", ".join(can)
    if not can:
        raise EnvironmentUnusable("; ".join(cannot))


def _play(env: Environment, found: Checked, steps: int, seed: int) -> None:
    """Play random episodes; every result is checked."""
    observations = Observations(env.observation_space)
    env.action_space.seed(seed)
    lengths: list[int] = []
    returns: list[float] = []
    rewards: list[float] = []
    slowest, stepping, length, total = _Slowest(), 0.0, 0, 0.0
    shared = False
    before = slowest.timed(lambda: begun(env.reset(seed=seed))[0])
    observations.inputs(before)
    strays = observations.strays(before)
    for _ in range(steps):
        action = env.action_space.sample()
        began = time.perf_counter()
        result = stepped(env.step(action))
        stepping += time.perf_counter() - began
        observations.inputs(result.observation)
        strays = {**observations.strays(result.observation), **strays}  # the first of each part
        shared = shared or _shares(before, result.observation)
        before, length, total = result.observation, length + 1, total + result.reward
        rewards.append(result.reward)
        if result.terminated or result.truncated:
            lengths.append(length)
            returns.append(total)
            length, total = 0, 0.0
            before = slowest.timed(lambda: begun(env.reset())[0])
            observations.inputs(before)
    ended = "no episode ended"
    if lengths:
        ended = f"{len(lengths)} episodes of {_range(lengths)} steps, return {_range(returns)}"
    rate = f"{steps / max(stepping, 1e-9):,.0f} steps/s"
    found.facts["played"] = f"{steps} random steps: {ended}, reward {_range(rewards)}, {rate}"
    if not lengths:
        found.note(f"no episode ended within {steps} steps: if none ever does, set max_episode_steps")
    for stray in strays.values():
        found.note(f"{stray}; trainings take it as that number")
    if shared:
        found.note("it returns the same memory at every step: trainings here copy it, code of your own may not")
    if slowest.seconds > _SLOW:
        found.note(f"a reset took {slowest.seconds:.0f} s: {_SLOW_RESET}")


def _repeat(env: Environment, found: Checked, seed: int) -> bool:
    """Begin two episodes with one seed; return whether they are the same."""
    observations = Observations(env.observation_space)

    def episode() -> list[Any]:
        env.action_space.seed(seed)
        return [observations.row(begun(env.reset(seed=seed))[0]), *_go_on(env, observations)]

    differ = _differ(episode(), episode())
    if differ:
        found.note("two episodes with one seed and the same actions differ: runs of it cannot be repeated exactly")
    return not differ


def _restore(env: Any, found: Checked, seed: int) -> None:
    """Save an episode and go on; restore it within another one, go on with the same actions, and compare."""
    observations = Observations(env.observation_space)
    begun(env.reset(seed=seed))
    result = stepped(env.step(env.action_space.sample()))
    if result.terminated or result.truncated:
        return
    saved = decode_extra(encode_extra({"state": env.episode_state()}))["state"]

    def went_on() -> list[Any]:
        env.action_space.seed(seed)
        return _go_on(env, observations)

    first = went_on()
    begun(env.reset(seed=seed + 1))
    env.restore_episode(saved)
    if _differ(first, went_on()):
        what = "an episode goes on otherwise after restore_episode(episode_state())"
        found.remarks.append(("wrong", f"{what}: does the state hold all that a step depends on, also np_random's?"))


def _go_on(env: Environment, observations: Observations) -> list[Any]:
    """Make some steps at random; return what came of each."""
    seen: list[Any] = []
    for _ in range(_AGAIN):
        result: Stepped = stepped(env.step(env.action_space.sample()))
        seen.append(np.append(observations.row(result.observation), result.reward))
        if result.terminated or result.truncated:
            break
    return seen


def _differ(first: Sequence[Any], second: Sequence[Any]) -> bool:
    return len(first) != len(second) or any(map(np.any, map(np.not_equal, first, second)))


def _ask_gymnasium(env: Environment, found: Checked) -> None:
    """Pass on what Gymnasium's own checker says of it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            check_env(env.unwrapped, skip_render_check=True, skip_close_check=True)
        except Exception as error:  # noqa: BLE001  it asserts
            found.note(f"Gymnasium's checker refuses it: {error}")
    said = dict.fromkeys(_COLOURS.sub("", str(each.message)).removeprefix("WARN: ").strip() for each in caught)
    for sentence in said:
        found.note(f"Gymnasium's checker: {sentence}")


def _look_around(found: Checked, changed: list[str], threads: set[threading.Thread], children: set[int]) -> None:
    """Say what the environment has left behind."""
    if changed:
        found.note(f"it changes {', '.join(changed)} of its process: a training sets that back")
    if left := [each.name for each in threading.enumerate() if each not in threads and each.is_alive()]:
        found.note(f"after close it leaves threads running: {', '.join(left)}; a run ends without waiting for them")
    if new := _children() - children:
        found.note(f"after close it leaves processes running ({', '.join(map(str, sorted(new)))}): end them in close()")


class _Slowest:
    """The longest of some calls, in seconds."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, call: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = call()
        self.seconds = max(self.seconds, time.perf_counter() - began)
        return result


def _children() -> set[int]:
    """Return the process ids of this process's children."""
    found: set[int] = set()
    for each in Path("/proc/self/task").glob("*/children"):
        with suppress(FileNotFoundError):  # its thread has ended meanwhile
            found |= {int(pid) for pid in each.read_text().split()}
    return found


def _range(numbers: Sequence[float]) -> str:
    least, most = min(numbers), max(numbers)
    return f"{least:.4g}" if least == most else f"{least:.4g} to {most:.4g}"


def _shares(first: Any, second: Any) -> bool:
    """Whether two observations lie in the same memory, also in part."""
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
        return bool(np.may_share_memory(first, second))
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return any(_shares(first[name], second[name]) for name in first.keys() & second.keys())
    if isinstance(first, tuple) and isinstance(second, tuple):
        return any(map(_shares, first, second))
    return False
