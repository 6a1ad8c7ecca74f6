"""CAGE Challenge 2 as Gymnasium environments, many networks at once or one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, SupportsFloat, SupportsInt

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium.spaces import Discrete, MultiBinary
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from jurybox.studies.workflow.cage import tables as t
from jurybox.studies.workflow.cage.network import Networks, RedName
from jurybox.training.environments.gymnasium_env import reset_mask

Observations = npt.NDArray[np.int8]
Step = tuple[Observations, npt.NDArray[np.float64], npt.NDArray[np.bool_], npt.NDArray[np.bool_], dict[str, Any]]

OBSERVATION_SPACE = MultiBinary(4 * t.N_HOSTS)
ACTION_SPACE = Discrete(t.N_ACTIONS)


class CageVectorEnv(VectorEnv[Observations, npt.NDArray[Any], Any]):
    """Defend `num_envs` networks. Observations int8 (num_envs, 52), actions (num_envs,) in 0..144.

    Every info holds ``true_state``, int8 (num_envs, 13): per host 0 clean, 1 a user's session of red's, 2 a privileged
    one. It is the truth after the step, which the defender does not see. Episodes end by their length only, so they
    are truncated and never terminated.

    Args:
        num_envs: networks.
        red: "B_line" or "Meander".
        episode_length: steps; the challenge uses 30, 50 and 100.
        quirk: see `Networks`.
        autoreset_mode: as Gymnasium defines them.
    """

    def __init__(
        self,
        num_envs: int,
        red: RedName = "B_line",
        *,
        episode_length: int = 100,
        quirk: bool = False,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
    ) -> None:
        if num_envs < 1 or episode_length < 1:
            raise ValueError(f"expected num_envs and episode_length of at least 1, got {num_envs}, {episode_length}")
        self.num_envs = num_envs
        self.episode_length = episode_length
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        self.metadata = {"render_modes": [], "autoreset_mode": self.autoreset_mode}
        self.single_observation_space, self.single_action_space = OBSERVATION_SPACE, ACTION_SPACE
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.networks = Networks(num_envs, red, quirk=quirk)
        self._elapsed = np.zeros(num_envs, np.int64)
        self._over = np.zeros(num_envs, np.bool_)

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observations, dict[str, Any]]:
        """Begin new episodes in all networks, or in those of ``options["reset_mask"]``, bool (num_envs,).

        Args:
            seed: of the generator that all networks share; None: continue with its state.
        """
        if seed is not None:
            numbers = [seed] if isinstance(seed, int) else [number for number in seed if number is not None]
            self.networks.random = np.random.default_rng(numbers or None)
        which = reset_mask(options, self.num_envs)
        self._begin(which)
        return self._observations(), self._info()

    def step(self, actions: npt.NDArray[Any]) -> Step:
        """Step every network; handle ended episodes as `autoreset_mode` says."""
        actions = np.asarray(actions)
        if actions.shape != (self.num_envs,) or actions.min() < 0 or actions.max() >= t.N_ACTIONS:
            raise ValueError(
                f"expected actions of shape ({self.num_envs},) from 0 to {t.N_ACTIONS - 1}, got {actions.shape} "
                f"from {actions.min()} to {actions.max()}"
            )
        before = self._over
        if self.autoreset_mode is AutoresetMode.DISABLED and before.any():
            raise RuntimeError(
                f"episodes of networks {np.flatnonzero(before)} are over: reset them first (reset_mask) or choose "
                "another autoreset_mode"
            )
        rewards = self.networks.step(actions)
        self._elapsed += 1
        if self.autoreset_mode is AutoresetMode.NEXT_STEP and before.any():
            self._begin(before)
            rewards[before] = 0.0
        truncated = self._elapsed >= self.episode_length
        self._over = truncated
        terminated = np.zeros(self.num_envs, np.bool_)
        if self.autoreset_mode is not AutoresetMode.SAME_STEP or not truncated.any():
            return self._observations(), rewards, terminated, truncated, self._info()
        final = self._final(truncated)
        self._begin(truncated)
        return self._observations(), rewards, terminated, truncated, {**final, **self._info()}

    def action_masks(self) -> npt.NDArray[np.bool_]:
        """Return masks without actions that are certain to fail, bool (num_envs, 145); blue knows its decoys."""
        return self.networks.possible()

    def _begin(self, which: npt.NDArray[np.bool_]) -> None:
        self.networks.reset(which)
        self._elapsed[which] = 0
        self._over = self._over & ~which

    def _observations(self) -> Observations:
        return self.networks.belief.reshape(self.num_envs, -1).copy()

    def _info(self) -> dict[str, Any]:
        return {"true_state": self.networks.true_state(), "_true_state": np.ones(self.num_envs, np.bool_)}

    def _final(self, ended: npt.NDArray[np.bool_]) -> dict[str, Any]:
        observations = np.full(self.num_envs, None, dtype=object)
        for index, row in zip(np.flatnonzero(ended), self._observations()[ended], strict=True):
            observations[index] = row
        truth = np.where(ended[:, None], self.networks.true_state(), np.int8(0))
        return {
            "final_obs": observations,
            "_final_obs": ended.copy(),
            "final_info": {"true_state": truth, "_true_state": ended.copy()},
            "_final_info": ended.copy(),
        }


class CageRows(CageVectorEnv):
    """Some rows of a `CageVectorEnv`, which behave as in the whole one.

    The generator draws for all networks, and only these rows' numbers are used. This is cheap: a step draws four
    numbers for each network. That holds as long as all parts are reset and stepped equally often, and no row is reset
    alone.

    Args:
        first: the first of these rows. of: number of all networks. masks: infos also hold ``action_masks``.
    """

    def __init__(
        self,
        num_envs: int,
        red: RedName = "B_line",
        *,
        first: int,
        of: int,
        masks: bool = False,
        episode_length: int = 100,
        quirk: bool = False,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
    ) -> None:
        if not 0 <= first <= of - num_envs:
            raise ValueError(f"expected {num_envs} rows among {of}, got them from row {first} on")
        super().__init__(num_envs, red, episode_length=episode_length, quirk=quirk, autoreset_mode=autoreset_mode)
        self._first, self._of, self._masks = first, of, masks

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observations, dict[str, Any]]:
        """Reset as `CageVectorEnv` does; `seed` is the first row's: the seed of all plus its number, as in Gymnasium.

        Raises:
            ValueError: other seeds than one number.
        """
        if seed is not None:
            if not isinstance(seed, int):
                raise ValueError(f"expected one seed, that of the first row, got {seed!r}")
            generator = np.random.default_rng([max(0, seed - self._first)])
            self.networks.random = _GeneratorRows(generator, self._first, self.num_envs, self._of)
        return super().reset(options=options)

    def random_state(self) -> dict[str, Any]:
        """Return the state of the generator, which is the same in all parts."""
        return dict(self.networks.random.bit_generator.state)

    def restore_random_state(self, state: dict[str, Any]) -> None:
        """Restore what `random_state` returned, in any part."""
        self.networks.random.bit_generator.state = state

    def _info(self) -> dict[str, Any]:
        info = super()._info()
        if self._masks:
            info |= {"action_masks": self.action_masks(), "_action_masks": np.ones(self.num_envs, np.bool_)}
        return info


class _GeneratorRows(np.random.Generator):
    """Draws for all networks, and returns the values of some."""

    def __init__(self, generator: np.random.Generator, first: int, count: int, of: int) -> None:
        super().__init__(generator.bit_generator)
        self._rows, self._of = slice(first, first + count), of

    def random(self, size: Any = None, dtype: Any = np.float64, out: Any = None) -> Any:
        *lead, _ = (size,) if isinstance(size, int) else size
        return super().random((*lead, self._of), dtype, out)[..., self._rows]


class CageEnv(gymnasium.Env[Observations, Any]):
    """Defend one network. Observation int8 (52,), action in 0..144; see `CageVectorEnv` for the rest.

    If possible, step many networks with `CageVectorEnv`: a hundred take hardly longer than one.
    """

    metadata = {"render_modes": []}  # noqa: RUF012 (Gymnasium declares it so)

    def __init__(self, red: RedName = "B_line", *, episode_length: int = 100, quirk: bool = False) -> None:
        self.observation_space, self.action_space = OBSERVATION_SPACE, ACTION_SPACE
        self._vector = CageVectorEnv(1, red, episode_length=episode_length, quirk=quirk, autoreset_mode="Disabled")

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observations, dict[str, Any]]:
        """As `gymnasium.Env.reset`; info has the true state, "true_state"."""
        super().reset(seed=seed)
        self._vector.networks.random = self.np_random
        observations, info = self._vector.reset()
        return observations[0], {"true_state": info["true_state"][0]}

    def step(self, action: SupportsInt) -> tuple[Observations, SupportsFloat, bool, bool, dict[str, Any]]:
        """As `gymnasium.Env.step`."""
        observations, rewards, _, truncated, info = self._vector.step(np.array([int(action)]))
        return observations[0], float(rewards[0]), False, bool(truncated[0]), {"true_state": info["true_state"][0]}

    def action_masks(self) -> npt.NDArray[np.bool_]:
        """Return a mask without actions that are certain to fail, bool (145,)."""
        mask: npt.NDArray[np.bool_] = self._vector.action_masks()[0]
        return mask
