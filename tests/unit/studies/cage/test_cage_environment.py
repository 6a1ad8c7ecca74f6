"""The environments keep Gymnasium's contracts."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode

from jurybox.studies.workflow.cage import CageEnv, CageVectorEnv

N, LENGTH = 6, 5


def _vector(mode: AutoresetMode) -> CageVectorEnv:
    return CageVectorEnv(N, "Meander", episode_length=LENGTH, autoreset_mode=mode)


def _play(env: CageVectorEnv, steps: int, seed: int = 3) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [env.step(random.integers(0, 145, N))[0] for _ in range(steps)]


def test_a_single_network_passes_gymnasiums_checker() -> None:
    check_env(CageEnv("Meander"), skip_render_check=True)


def test_the_same_seed_gives_the_same_episode() -> None:
    runs = []
    for _ in range(2):
        env = _vector(AutoresetMode.NEXT_STEP)
        env.reset(seed=9)
        runs.append(np.array(_play(env, 12)))
    assert (runs[0] == runs[1]).all()


def test_spaces_dtypes_and_shapes() -> None:
    env = _vector(AutoresetMode.NEXT_STEP)
    observations, info = env.reset(seed=0)
    assert env.observation_space.contains(observations) and env.single_action_space.n == 145
    observations, rewards, terminated, truncated, info = env.step(np.zeros(N, int))
    assert env.observation_space.contains(observations)
    assert rewards.dtype == np.float64 and terminated.dtype == truncated.dtype == np.bool_
    assert info["true_state"].shape == (N, 13) and (info["true_state"][:, 8] == 2).all()
    assert env.action_masks().shape == (N, 145) and env.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP


def test_an_episode_is_truncated_after_its_length_and_never_terminated() -> None:
    env = CageEnv(episode_length=LENGTH)
    env.reset(seed=0)
    ends = [env.step(0)[2:4] for _ in range(LENGTH)]
    assert ends == [(False, False)] * (LENGTH - 1) + [(False, True)]


def test_next_step_mode_ignores_the_action_after_an_end() -> None:
    env = _vector(AutoresetMode.NEXT_STEP)
    env.reset(seed=0)
    _play(env, LENGTH)
    observations, rewards, _, truncated, _ = env.step(np.full(N, 144))
    assert not observations.any() and not rewards.any() and not truncated.any()
    for _ in range(LENGTH):
        truncated = env.step(np.zeros(N, int))[3]
    assert truncated.all(), "the next episode has its full length"


def test_same_step_mode_begins_at_once_and_hands_out_the_last_observation() -> None:
    env = _vector(AutoresetMode.SAME_STEP)
    env.reset(seed=0)
    _play(env, LENGTH - 1)
    observations, rewards, _, truncated, info = env.step(np.full(N, 144))
    assert truncated.all() and (rewards <= -1.0).all() and not observations.any()
    assert info["_final_obs"].all() and info["final_obs"][0].shape == (52,)
    assert any(row.any() for row in info["final_obs"])
    assert info["final_info"]["true_state"].shape == (N, 13)


def test_without_autoreset_some_networks_can_be_reset_alone() -> None:
    env = _vector(AutoresetMode.DISABLED)
    env.reset(seed=0)
    _play(env, LENGTH)
    with pytest.raises(RuntimeError, match="are over"):
        env.step(np.zeros(N, int))
    mask = np.arange(N) < 2
    observations, _ = env.reset(options={"reset_mask": mask})
    assert not observations[:2].any() and observations[2:].any()
    env.reset(options={"reset_mask": ~mask})
    env.step(np.zeros(N, int))


def test_bad_actions_and_settings_are_refused() -> None:
    env = _vector(AutoresetMode.NEXT_STEP)
    env.reset(seed=0)
    with pytest.raises(ValueError, match="from 0 to 144"):
        env.step(np.full(N, 145))
    with pytest.raises(ValueError, match="red agent"):
        CageVectorEnv(1, "Unknown")
    with pytest.raises(ValueError, match="reset_mask"):
        env.reset(options={"reset_mask": np.zeros(N, bool)})


def test_it_runs_under_gymnasiums_own_vector_environments() -> None:
    env = gymnasium.vector.SyncVectorEnv([CageEnv] * 2)
    observations, _ = env.reset(seed=1)
    assert observations.shape == (2, 52)
    env.step(np.array([0, 144]))
    env.close()
