import json
import random

import numpy as np
import pytest
import torch

from jurybox.training.environments.photo import PhotoConfig
from jurybox.training.recipes import checkpoints
from jurybox.training.recipes.photo import METRICS, PhotoTraining, make_environments, train
from jurybox.training.recipes.photo_run import run
from jurybox.training.recipes.progress import Silence
from jurybox.training.run_folder import CheckpointError, RunLog, read_metrics

SMALL = PhotoTraining(
    environment=PhotoConfig(scorer="local", juror="tests.unit.recipes.cheap_juror:middle_grey"),
    seed=3,
    steps=32,
    envs=2,
    damages=2,
    rollout=16,
    n_epochs=2,
    batch_size=8,
    hidden=(8,),
    checkpoint_every=16,
)


def trained(folder, settings=SMALL, resume=None):
    with RunLog(folder, METRICS, resume_at=resume.env_steps if resume else None) as log:
        return train(settings, log, resume=resume, serial=True)


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return folder, trained(folder)


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


def test_a_run_counts_its_steps_and_leaves_checkpoints(first):
    folder, _ = first
    found = summary(folder)
    assert (found["env_steps"], found["episodes"], found["learner_steps"], found["seed"]) == (32, 8, 8, 3)
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-000000016", "step-000000032"]


def test_a_resumed_run_counts_on(first, tmp_path):
    folder = tmp_path / "run"
    earlier = trained(folder)
    checkpoint = checkpoints.latest(folder / "checkpoints")
    trained(folder, SMALL.changed(steps=64), checkpoint)
    found = summary(folder)
    assert (found["env_steps"], found["episodes"], found["learner_steps"]) == (64, 16, 16)
    assert found["seconds"] > checkpoint.counted["seconds"] > 0
    assert [row["env_steps"] for row in read_metrics(folder / "metrics.csv")] == [16, 32, 48, 64]
    assert earlier.num_timesteps == 32


def test_a_checkpoint_gives_back_weights_optimiser_and_every_random_state(first):
    folder, model = first
    checkpoint = checkpoints.latest(folder / "checkpoints")
    environments = make_environments(SMALL, serial=True)
    loaded = type(model).load(checkpoint.model, environments)
    for name, value in model.policy.state_dict().items():
        torch.testing.assert_close(loaded.policy.state_dict()[name], value, rtol=0, atol=0)
    ours, theirs = model.policy.optimizer.state_dict()["state"], loaded.policy.optimizer.state_dict()["state"]
    torch.testing.assert_close(theirs[0]["exp_avg"], ours[0]["exp_avg"], rtol=0, atol=0)

    def draws():
        checkpoints.restore_random_states(checkpoint, environments, fresh_seed=0)
        there = [generator.random() for generator in environments.get_attr("np_random")]
        return [random.random(), float(np.random.rand()), float(torch.rand(())), *there]

    once = draws()
    random.seed(99), np.random.seed(99), torch.manual_seed(99)
    assert draws() == once
    left = np.random.default_rng()
    for index, state in enumerate(checkpoint.state["random"]["environments"]):
        left.bit_generator.state = state
        assert once[-2 + index] == left.random()
    environments.close()


def test_the_same_seed_trains_the_same_policy(first, tmp_path):
    _, model = first
    again = trained(tmp_path / "again")
    other = trained(tmp_path / "other", SMALL.changed(seed=4))
    ours = model.policy.state_dict()["action_net.weight"]
    torch.testing.assert_close(again.policy.state_dict()["action_net.weight"], ours, rtol=0, atol=0)
    assert not torch.equal(other.policy.state_dict()["action_net.weight"], ours)


def test_old_checkpoints_go_and_half_written_ones_are_never_found(first, tmp_path, monkeypatch):
    _, model = first
    environments = make_environments(SMALL, serial=True)
    model.env = environments
    for step in (10, 20, 30, 40):
        model.num_timesteps = step
        checkpoints.save(tmp_path, model, {})
    model.num_timesteps = 50
    monkeypatch.setattr(checkpoints, "_random_states", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        checkpoints.save(tmp_path, model, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{step:09d}" for step in (20, 30, 40)]
    assert checkpoints.latest(tmp_path).env_steps == 40
    model.num_timesteps = 32
    environments.close()


def test_there_must_be_something_to_resume(tmp_path):
    with pytest.raises(CheckpointError, match="without --resume"):
        checkpoints.latest(tmp_path)


def test_a_run_is_not_resumed_with_other_settings_but_may_get_more_steps(tmp_path):
    def again(settings, resume):
        return run(settings, tmp_path, Silence(), command="jurybox train photo", resume=resume, serial=True)

    again(SMALL, False)
    with pytest.raises(CheckpointError, match=r"learning_rate was 0\.001, is 0\.5"):
        again(SMALL.changed(learning_rate=0.5), True)
    again(SMALL.changed(steps=48), True)
    assert summary(tmp_path)["env_steps"] == 48
    left = {path.name for path in tmp_path.iterdir()}
    assert left >= {"summary.json", "metrics.csv", "report.html", "checkpoints", "tensorboard", "evaluation.csv"}
