import json
import random
import re
import shutil
from dataclasses import replace

import cloudpickle
import numpy as np
import pytest
import torch
from stable_baselines3 import PPO

from jurybox.studies.photo import recorder
from jurybox.studies.photo.environment import PhotoConfig, PhotoLibrary
from jurybox.studies.photo.learning import METRICS, PhotoTraining, _new_model, make_environments, train
from jurybox.studies.photo.train import run
from jurybox.training.checkpoints import CheckpointError, Checkpoints
from jurybox.training.run_folder import RunLog, read_metrics
from jurybox.training.trainings.progress import Watcher

SMALL = PhotoTraining(
    environment=PhotoConfig(scorer="local", juror="tests.unit.studies.photo.cheap_juror:middle_grey"),
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


@pytest.fixture(autouse=True, scope="module")
def few_photos():
    """Of fourteen held-out photos two are edited by an evaluation, which is nearly all of a small run."""
    shipped = PhotoLibrary.shipped()
    few = replace(shipped, held_out=shipped.held_out[:2])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PhotoLibrary, "shipped", lambda: few)
        yield


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
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [
        "step-000000000016",
        "step-000000000032",
    ]


def test_each_rollout_has_a_checkpoint_even_if_it_was_rounded_down(tmp_path, monkeypatch):
    made = []
    complete = Checkpoints.complete
    monkeypatch.setattr(Checkpoints, "complete", lambda self, *given: made.append(given[1]) or complete(self, *given))
    trained(tmp_path, SMALL.changed(envs=3, checkpoint_every=None))
    assert made == [15, 30, 45], "three environments cannot share 16 steps"


def test_a_resumed_run_counts_on(first, tmp_path):
    folder, earlier = shutil.copytree(first[0], tmp_path / "run"), first[1]
    checkpoint = Checkpoints(folder / "checkpoints").existing()
    trained(folder, SMALL.changed(steps=64), checkpoint)
    found = summary(folder)
    assert (found["env_steps"], found["episodes"], found["learner_steps"]) == (64, 16, 16)
    assert found["seconds"] > checkpoint.document["counted"]["seconds"] > 0
    assert [row["env_steps"] for row in read_metrics(folder / "metrics.csv")] == [16, 32, 48, 64]
    assert earlier.num_timesteps == 32


def test_a_checkpoint_restores_weights_optimiser_and_random_states(first):
    folder, model = first
    checkpoint = Checkpoints(folder / "checkpoints").existing()
    environments = make_environments(SMALL, serial=True)
    loaded = _new_model(SMALL, environments)
    recorder.restore(loaded, checkpoint, fresh_seed=0)
    assert (loaded.num_timesteps, loaded._n_updates) == (32, model._n_updates)
    for name, value in model.policy.state_dict().items():
        torch.testing.assert_close(loaded.policy.state_dict()[name], value, rtol=0, atol=0)
    ours, theirs = model.policy.optimizer.state_dict()["state"], loaded.policy.optimizer.state_dict()["state"]
    torch.testing.assert_close(theirs[0]["exp_avg"], ours[0]["exp_avg"], rtol=0, atol=0)

    def draws():
        recorder.restore(loaded, checkpoint, fresh_seed=0)
        there = [generator.random() for generator in environments.get_attr("np_random")]
        return [random.random(), float(np.random.rand()), float(torch.rand(())), *there]

    once = draws()
    random.seed(99), np.random.seed(99), torch.manual_seed(99)
    assert draws() == once
    left = np.random.default_rng()
    for index, state in enumerate(checkpoint.document["random"]["environments"]):
        left.bit_generator.state = state
        assert once[-2 + index] == left.random()
    environments.close()


def test_a_checkpoint_of_another_network_is_refused_in_plain_words(tmp_path):
    environments = make_environments(SMALL, serial=True)
    model = _new_model(SMALL, environments)
    earlier = PPO("MlpPolicy", environments, n_steps=8, batch_size=8, device="cpu")
    checkpoints = Checkpoints(tmp_path)
    recorder.save(checkpoints, earlier, {})
    with pytest.raises(CheckpointError, match="another network than this build trains.*the build that began it"):
        recorder.restore(model, checkpoints.existing(), fresh_seed=0)
    environments.close()


def test_the_same_seed_trains_the_same_policy(first, tmp_path):
    _, model = first
    again = trained(tmp_path / "again")
    other = trained(tmp_path / "other", SMALL.changed(seed=4))
    name = "mlp_extractor.policy_net.others.0.weight"
    ours = model.policy.state_dict()[name]
    torch.testing.assert_close(again.policy.state_dict()[name], ours, rtol=0, atol=0)
    assert not torch.equal(other.policy.state_dict()[name], ours)


def test_old_checkpoints_go_and_half_written_ones_are_never_found(first, tmp_path, monkeypatch):
    _, model = first
    checkpoints = Checkpoints(tmp_path)
    environments = make_environments(SMALL, serial=True)
    model.env = environments
    for step in (10, 20, 30, 40):
        model.num_timesteps = step
        recorder.save(checkpoints, model, {})
    model.num_timesteps = 50
    monkeypatch.setattr(type(model), "save", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        recorder.save(checkpoints, model, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{step:012d}" for step in (30, 40)]
    assert checkpoints.existing().env_steps == 40
    model.num_timesteps = 32
    environments.close()


def test_nothing_that_a_checkpoint_pickled_is_ever_read(first, tmp_path, monkeypatch):
    folder = shutil.copytree(first[0], tmp_path / "run")

    def refused(*_, **__):
        raise AssertionError("unpickled")

    monkeypatch.setattr(cloudpickle, "loads", refused)
    trained(folder, SMALL.changed(steps=48), Checkpoints(folder / "checkpoints").existing())
    assert summary(folder)["env_steps"] == 48


def test_there_must_be_something_to_resume(tmp_path):
    with pytest.raises(CheckpointError, match="without --resume"):
        Checkpoints(tmp_path).existing()


def whole_run(settings, folder, watcher=None, resume=False):
    return run(settings, folder, watcher or Watcher(), command="jurybox train photo", resume=resume, serial=True)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    whole_run(SMALL, folder)
    return folder


class InterruptsEvaluation(Watcher):
    def begin(self, what, total, done=0):
        if what == "evaluating":
            raise KeyboardInterrupt


def test_a_finished_run_keeps_its_results_until_it_is_evaluated_again(finished, tmp_path):
    folder = shutil.copytree(finished, tmp_path / "run")
    before = summary(folder)
    with pytest.raises(KeyboardInterrupt):
        whole_run(SMALL, folder, InterruptsEvaluation(), resume=True)
    assert summary(folder) == before and "verdict" in before
    whole_run(SMALL, folder, resume=True)
    assert summary(folder) == before, "the same photos and the same policy"
    with pytest.raises(KeyboardInterrupt):
        whole_run(SMALL.changed(steps=48), folder, InterruptsEvaluation(), resume=True)
    assert summary(folder)["env_steps"] == 48 and "verdict" not in summary(folder), "those were of another policy"


def test_a_failed_evaluation_is_no_longer_reported_after_a_complete_one(finished, tmp_path, monkeypatch):
    folder = shutil.copytree(finished, tmp_path / "run")
    before = summary(folder)
    with monkeypatch.context() as patched, pytest.raises(ZeroDivisionError):
        patched.setattr("jurybox.studies.photo.train.evaluate_policy", lambda *_, **__: 1 / 0)
        whole_run(SMALL, folder, resume=True)
    assert "evaluation_failed" in summary(folder)
    whole_run(SMALL, folder, resume=True)
    assert summary(folder).keys() == before.keys()


def test_the_report_has_the_steps_that_were_made_and_the_time_of_all_parts(finished, tmp_path):
    folder = shutil.copytree(finished, tmp_path / "run")
    document = folder / "checkpoints" / "step-000000000032" / "run.json"
    found = json.loads(document.read_text())
    document.write_text(json.dumps({**found, "counted": {**found["counted"], "seconds": 5000.0}}))
    whole_run(SMALL.changed(steps=10_000, seconds=1e-6), folder, resume=True)
    report = (folder / "report.html").read_text()
    assert "34 edit steps, 16 between two updates" in report
    assert 5000 <= int(re.search(r"training (\d+) s, evaluation", report)[1]) < 5100


def test_a_run_is_not_resumed_with_other_settings_but_may_get_more_steps(finished, tmp_path):
    tmp_path = shutil.copytree(finished, tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"learning_rate was 0\.001, is 0\.5"):
        whole_run(SMALL.changed(learning_rate=0.5), tmp_path, resume=True)
    whole_run(SMALL.changed(steps=48), tmp_path, resume=True)
    assert summary(tmp_path)["env_steps"] == 48
    left = {path.name for path in tmp_path.iterdir()}
    assert left >= {"summary.json", "metrics.csv", "report.html", "checkpoints", "tensorboard", "evaluation.csv"}
