"""Evaluations are filmed: the first episode of each, whole, whether environments are built once or not."""

from __future__ import annotations

import os
import sys

import cv2
import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from jurybox.training import film
from jurybox.training.film import save_film
from jurybox.training.spaces import ContractBroken
from jurybox.training.trainings.gym import GymTraining, train

HERE = f"{__name__}:"


class Lamp(gymnasium.Env):
    """Five steps; a frame is as bright as the step."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}
    observation_space, action_space = spaces.Box(0, 5, (1,)), spaces.Discrete(2)

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.steps += 1
        return np.full(1, self.steps, np.float32), 1.0, self.steps == 5, False, {}

    def render(self):
        return np.full((48, 64, 3), 40 * self.steps, np.uint8) if self.render_mode else None


SMALL = {
    "env": HERE + "Lamp", "steps": 64, "n_steps": 16, "batch_size": 16, "hidden": (4,), "evaluate_every": 32,
    "evaluation_episodes": 3, "film": True,
}  # fmt: skip


@pytest.mark.parametrize("once", [False, True])
def test_the_first_episode_of_each_evaluation_is_filmed(tmp_path, once) -> None:
    more = {"build_once": True, "env_args": {"render_mode": "rgb_array"}} if once else {}
    train(GymTraining(**SMALL, **more), tmp_path, serial=True)
    films = sorted(path.name for path in (tmp_path / "films").iterdir())
    assert films == ["0000000032.webm", "0000000064.webm"]
    reader = cv2.VideoCapture(str(tmp_path / "films" / films[0]))
    assert reader.get(cv2.CAP_PROP_FPS) == 10
    seen = []
    while (found := reader.read())[0]:
        seen.append(round(float(found[1].mean()) / 40))
    assert seen == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("kind", ["webm", "mp4"])
def test_nothing_is_said_while_a_film_is_made_but_what_others_say(tmp_path, monkeypatch, capfd, kind) -> None:
    def writer(*given, made=cv2.VideoWriter):
        os.write(2, b"of another thread\n")
        return made(*given)

    writer.fourcc = cv2.VideoWriter.fourcc
    frames = [np.zeros((48, 64, 3), np.uint8)] * 3
    save_film(frames, tmp_path / f"first.{kind}", 10)
    assert capfd.readouterr() == ("", "")
    monkeypatch.setattr(film.cv2, "VideoWriter", writer)
    save_film(frames, tmp_path / f"second.{kind}", 10)
    print("and later", file=sys.stderr)
    assert capfd.readouterr() == ("", "of another thread\nand later\n")


def test_an_environment_that_renders_nothing_is_a_sentence(tmp_path) -> None:
    with pytest.raises(ContractBroken, match=r"render returned a NoneType, None: expected uint8 \(height, width, 3\)"):
        train(GymTraining(**SMALL, build_once=True), tmp_path, serial=True)
    assert not list((tmp_path / "films").iterdir())
