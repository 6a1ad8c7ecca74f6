"""Which observation of a VecEnv is scored where an environment keeps that of its last episode's end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.unit.client.test_reward_hooks import PlayedJuror, Vector

from jurybox.client import rewards


def test_only_a_step_that_ends_an_episode_is_scored_by_its_terminal_observation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("stable_baselines3")
    monkeypatch.setattr(rewards, "Juror", PlayedJuror)
    monkeypatch.setattr(PlayedJuror, "asked", [])

    class Keeping(Vector):
        def step_wait(self) -> Any:
            observations, own, dones, infos = super().step_wait()
            infos[0]["terminal_observation"] = np.full(2, 8, np.float32)  # of the episode before
            return observations, own, dones, infos

    rewards.sb3_reward(Keeping(False), "m").step_wait()
    ((columns, _),) = PlayedJuror.asked
    assert np.stack(columns["observation"]).tolist() == [[0, 1], [9, 9], [4, 5]]
