"""A photo training may start from a policy's weights: the shipped ones, or those of another run."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from jurybox.studies.photo.environment import PhotoConfig
from jurybox.studies.photo.learning import PhotoTraining, _new_model, make_environments
from jurybox.studies.photo.start import SHIPPED, begin_with, take
from jurybox.training.checkpoints import Checkpoints, write_state
from jurybox.training.runtime.plan import ConfigError

LOCAL = PhotoConfig(scorer="local", juror="tests.unit.studies.photo.cheap_juror:middle_grey")


@pytest.fixture(scope="module")
def environments():
    made = make_environments(PhotoTraining(environment=LOCAL, envs=1, rollout=4, steps=4), serial=True)
    yield made
    made.close()


def model_of(environments, **settings):
    return _new_model(
        PhotoTraining(environment=LOCAL, envs=1, rollout=4, steps=4, batch_size=4, **settings), environments
    )


def test_the_shipped_policy_fits_and_keeps_the_trainings_own_exploration(environments):
    model = model_of(environments, log_std_init=-2.0)
    begin_with(model, "shipped")
    state = model.policy.state_dict()
    for name, tensor in load_file(SHIPPED).items():
        assert torch.equal(state[name], tensor)
    assert state["log_std"].unique().tolist() == [-2.0]


def test_the_weights_of_a_run_are_taken_and_loaded(environments, tmp_path):
    trained = model_of(environments, seed=5)
    with Checkpoints(tmp_path / "run" / "checkpoints").writing(4, {}) as folder:
        write_state(folder / "trainer.state", {"parameters": {"policy": dict(trained.policy.state_dict())}})
    take(tmp_path / "run", tmp_path / "start.safetensors")
    other = model_of(environments, seed=6)
    begin_with(other, str(tmp_path / "start.safetensors"))
    seen = np.zeros((1, *environments.observation_space.shape), np.float32)
    np.testing.assert_array_equal(*(one.predict(seen, deterministic=True)[0] for one in (trained, other)))


def test_what_is_no_start_is_refused(environments, tmp_path):
    with pytest.raises(ConfigError, match="expected 'shipped' or a file of photo.start"):
        begin_with(model_of(environments), str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match="another network: set `hidden`"):
        begin_with(model_of(environments, hidden=(8,)), "shipped")
