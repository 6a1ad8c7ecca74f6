"""Environments that exist side by side alone: one of Gymnasium's vector environments as an `Adapter`.

Its autoreset mode may be any. With DISABLED each episode begins with its own seed. With SAME_STEP and NEXT_STEP the
environment begins the next episode itself, so seeds count only where all episodes begin at once; with NEXT_STEP the
action of that step does nothing, and is not told as one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array

from jurybox.training.environments import making
from jurybox.training.environments.adapter import Moved, Waiting
from jurybox.training.environments.gymnasium_env import OneAgentEnvs, foreign, own_defaults
from jurybox.training.environments.making import NOWHERE, EnvironmentPlace, EnvironmentUnusable
from jurybox.training.spaces import ContractBroken, begun, flag, number, short, take

Array = npt.NDArray[Any]


def make_vector(
    name: str, arguments: Mapping[str, Any], n: int, place: EnvironmentPlace = NOWHERE
) -> VectorEnv[Any, Any, Any]:
    """Make a vector environment of that name, with at least n environments.

    Args:
        name: registered with Gymnasium, or "package.module:factory". A factory that names ``num_envs`` gets it, and its
            place in the run as in `gymnasium_env.make_environment`.
        arguments: keyword arguments of the factory, or of ``gymnasium.make_vec``.

    Raises:
        EnvironmentUnusable: it cannot be made, has fewer environments, or does not say its autoreset mode.
    """

    def registered() -> Any:
        return gymnasium.make_vec(name, num_envs=n, **arguments)

    expected = "a name that Gymnasium knows, or module:factory"
    with own_defaults:
        made = making.make(name, arguments, place, expected, registered, gymnasium.registry, {"num_envs": n})
    try:
        if not isinstance(made, VectorEnv):
            raise EnvironmentUnusable(
                f"{name!r} gave {short(made)}: expected a gymnasium.vector.VectorEnv, which vector = true announces"
            )
        if made.num_envs < n:
            raise EnvironmentUnusable(
                f"{name!r} gave {made.num_envs} environments: expected {n}, the number of `envs` for each worker; let "
                "the factory have a parameter num_envs, or set envs"
            )
        _mode(name, made)
    except EnvironmentUnusable:
        getattr(made, "close", lambda: None)()
        raise
    return made


def _mode(name: str, env: VectorEnv[Any, Any, Any]) -> AutoresetMode:
    mode = env.metadata.get("autoreset_mode")
    try:
        return AutoresetMode(mode)
    except ValueError as error:
        raise EnvironmentUnusable(
            f"{name!r} has metadata['autoreset_mode'] = {mode!r}: expected one of gymnasium.vector.AutoresetMode, "
            "which says what follows the end of an episode"
        ) from error


class VectorEnvs(OneAgentEnvs):
    """The first environments of a vector environment, as an `Adapter` with one agent.

    Args:
        n: how many of them.
        env, env_args: see `make_vector`.
        clips, masked: see `gymnasium_env.GymEnvs`.
        places: of each environment in the run.

    Raises:
        EnvironmentUnusable: it cannot be made, or has unsupported spaces.
    """

    bound = "let the factory bound them, by a wrapper"

    def __init__(
        self,
        n: int,
        env: str,
        env_args: Mapping[str, Any],
        *,
        clips: bool,
        masked: bool = False,
        places: Sequence[EnvironmentPlace] = (NOWHERE,),
    ) -> None:
        self.name = env
        self.env = make_vector(env, env_args, n, places[0])
        self._mode = _mode(env, self.env)
        self.leaves_out = self._mode is AutoresetMode.NEXT_STEP  # some environments, in some steps
        try:
            does = self.env.single_action_space
            super().__init__(n, self.env.single_observation_space, does, clips=clips, masked=masked)
        except EnvironmentUnusable:
            self.env.close()
            raise
        self._seeds: dict[int, int] = {}  # of episodes that begin, by environment
        self._ended = np.zeros(self.env.num_envs, np.bool_)  # in the last step
        self._newest: tuple[Any, Mapping[str, Any]] = (None, {})  # what the last step or reset returned

    def begin(self, environment: int, seed: int) -> None:
        """Begin an episode; where all begin at once, with the last of them. Raises ContractBroken."""
        if self._mode is AutoresetMode.DISABLED and self._newest[0] is not None:
            self._reset({environment: seed})
            return
        self._seeds[environment] = seed
        if len(self._seeds) == self.n and not self._running.any():
            self._reset(self._seeds)
            self._seeds = {}
        elif self._running.any() and self._ended[environment]:
            self._goes_on(environment)

    def waiting(self) -> Waiting:
        """What all environments observe."""
        for environment in list(self._seeds):
            if not self._ended[environment]:
                raise ContractBroken(
                    f"{self.name} cannot begin an episode in one environment before another has ended there: expected "
                    "autoreset_mode DISABLED, and a reset that heeds options['reset_mask']"
                )
            self._goes_on(environment)
        return super().waiting()

    def step(self, actions: Array) -> Moved:
        """Make a step in all environments. Raises ContractBroken, see `begin`."""
        acts = self._running.copy()
        if self._mode is AutoresetMode.NEXT_STEP:
            acts &= ~self._ended[: self.n]
        elif self._mode is AutoresetMode.DISABLED and (rests := np.flatnonzero(self._ended)).size:
            self._reset(dict.fromkeys(rests.tolist(), 0), rests=True)
        found = foreign(self.env.step, self._chosen(actions))
        if not isinstance(found, tuple) or len(found) != 5:
            raise ContractBroken(f"step returned {short(found)}: expected (observations, rewards, terminations, "
                                 "truncations, infos)")  # fmt: skip
        observation, *told, info = found
        paid, terminations, truncations = (
            self._column(each, what)
            for each, what in zip(told, ("rewards", "terminations", "truncations"), strict=True)
        )
        reward, terminated, truncated = np.zeros(self.n), np.zeros(self.n, np.bool_), np.zeros(self.n, np.bool_)
        self._ended[:] = terminations.astype(np.bool_) | truncations.astype(np.bool_)
        infos: list[Mapping[str, Any]] = [{}] * self.n
        for place in np.flatnonzero(acts).tolist():
            reward[place] = number(paid[place], f"the reward of environment {place}")
            terminated[place] = flag(terminations[place], f"terminated of environment {place}")
            truncated[place] = flag(truncations[place], f"truncated of environment {place}")
            infos[place] = _info_of(info, place)
        over = terminated | truncated
        for place in np.flatnonzero(self._running).tolist():
            now: Any = take(observation, place)
            said: Mapping[str, Any] = _info_of(info, place)
            if over[place] and self._mode is AutoresetMode.SAME_STEP:
                now, said, infos[place] = self._final(said)
            self._see(place, now, said, ended=bool(over[place]))
        self._newest = observation, info
        return self._moved(reward, (terminated, truncated), infos, int(acts.sum()), acts)

    def close(self) -> None:
        """Close the environments."""
        self.env.close()

    def _chosen(self, actions: Array) -> Any:
        """Return the actions of all environments; those beyond the first n do what the first does."""
        each = [self.to_env(action) for action in actions]
        return _side_by_side(self.env, [*each, *[each[0]] * (self.env.num_envs - self.n)])

    def _reset(self, seeds: Mapping[int, int], *, rests: bool = False) -> None:
        # One number, as the interface says: environment i begins with the seed + i.
        options, seed = None, next(iter(seeds.values()))
        if self._mode is AutoresetMode.DISABLED and self._newest[0] is not None:
            options = {"reset_mask": np.isin(np.arange(self.env.num_envs), list(seeds))}
        else:
            self._ended[:] = False
        self._newest = observation, info = begun(foreign(self.env.reset, seed=seed, options=options))
        for environment in seeds:
            self._ended[environment] = False
            if not rests:
                self._see(environment, take(observation, environment), _info_of(info, environment))
                self._running[environment] = True

    def _goes_on(self, environment: int) -> None:
        """The environment begins the episode itself: it has with SAME_STEP, and will with NEXT_STEP."""
        del self._seeds[environment]
        self._running[environment] = True
        if self._mode is AutoresetMode.SAME_STEP:
            observation, info = self._newest
            self._see(environment, take(observation, environment), _info_of(info, environment))

    def _final(self, said: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any], Mapping[str, Any]]:
        """Return the last observation and info of an episode, the latter twice, with SAME_STEP."""
        if "final_obs" not in said:
            raise ContractBroken(
                f"infos of {self.name} hold no 'final_obs' where an episode ended: expected it with autoreset_mode "
                "SAME_STEP, since the observation is that of the next episode"
            )
        info = said.get("final_info", {})
        return said["final_obs"], info, info

    def _column(self, value: Any, what: str) -> Array:
        found = np.asarray(value)
        if found.shape != (self.env.num_envs,) or found.dtype.kind not in "biuf":
            raise ContractBroken(
                f"step returned {what} of shape {found.shape} and {found.dtype}: expected a number for each of "
                f"{self.env.num_envs} environments"
            )
        return found


class OneOfVector(gymnasium.Env[Any, Any]):
    """One environment of a vector environment, in which `jurybox policy` plays.

    Args:
        name, arguments: see `make_vector`.
    """

    def __init__(self, name: str, arguments: Mapping[str, Any], render_mode: str | None = None) -> None:
        given = dict(arguments) if render_mode is None else {**arguments, "render_mode": render_mode}
        self._env = make_vector(name, given, 1)
        self.observation_space, self.action_space = self._env.single_observation_space, self._env.single_action_space
        self.render_mode, self.metadata = render_mode, dict(self._env.metadata)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        observation, info = begun(self._env.reset(seed=seed, options=options))
        return take(observation, 0), _info_of(info, 0)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        actions = [action] * self._env.num_envs
        observation, reward, terminated, truncated, info = self._env.step(_side_by_side(self._env, actions))
        now, said = take(observation, 0), _info_of(info, 0)
        if "final_obs" in said and (terminated[0] or truncated[0]):
            now, said = said["final_obs"], said.get("final_info", {})
        return now, float(reward[0]), bool(terminated[0]), bool(truncated[0]), said

    def render(self) -> Any:
        found = self._env.render()
        return found[0] if isinstance(found, (tuple, list)) else found

    def close(self) -> None:
        self._env.close()


def _side_by_side(env: VectorEnv[Any, Any, Any], actions: Sequence[Any]) -> Any:
    """Return the actions of all environments as `step` takes them: an array, or those of a Dict or Tuple."""
    space = env.single_action_space
    room: Any = create_empty_array(space, len(actions))
    return concatenate(space, actions, room)


def _info_of(infos: Mapping[str, Any], place: int) -> dict[str, Any]:
    """Return one environment's info of those side by side, where ``_NAME`` says who has NAME."""
    found: dict[str, Any] = {}
    for name, value in infos.items():
        has = infos.get(f"_{name}")
        if name.startswith("_") or (has is not None and not has[place]):
            continue
        nested = isinstance(value, Mapping) and name != "final_obs"
        found[name] = _info_of(value, place) if nested else take(value, place)
    return found
