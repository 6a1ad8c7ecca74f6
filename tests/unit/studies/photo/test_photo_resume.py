import json
import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import cloudpickle
import numpy as np
import pytest

from jurybox.studies.photo import learning
from jurybox.studies.photo.environment import PhotoConfig, PhotoLibrary
from jurybox.studies.photo.learning import PhotoTraining, columns, plan
from jurybox.studies.photo.train import run
from jurybox.training.algorithms.compiling import PlainAdam
from jurybox.training.checkpoints import CheckpointError, Checkpoints
from jurybox.training.run_folder import read_metrics
from jurybox.training.trainings.progress import Watcher
from jurybox.training.trainings.recorded_run import recorded_run

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
    """Of fourteen held-out photos one is edited by an evaluation, which is nearly all of a small run."""
    shipped = PhotoLibrary.shipped()
    few = replace(shipped, held_out=shipped.held_out[:1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PhotoLibrary, "shipped", lambda: few)
        yield


def trained(folder, settings=SMALL, *, resume=False, watch=None):
    """Train without an evaluation; returns the weights of the policy."""
    recorded_run(
        plan(settings, serial=True),
        folder,
        columns(settings.environment),
        settings,
        lambda outcome, rows, log: None,
        serial=True,
        resume=resume,
        watch=watch,
    )
    return weights(folder)


def weights(folder):
    return Checkpoints(folder / "checkpoints").existing().state("weights-policy")["state"]


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    trained(folder)
    return folder


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


def test_a_run_counts_its_steps_and_leaves_checkpoints(first):
    found = summary(first)
    assert (found["env_steps"], found["episodes"], found["learner_steps"], found["seed"]) == (32, 8, 8, 3)
    assert sorted(path.name for path in (first / "checkpoints").iterdir()) == [
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
    folder = shutil.copytree(first, tmp_path / "run")
    before = summary(folder)["seconds"]
    trained(folder, SMALL.changed(steps=64), resume=True)
    found = summary(folder)
    assert (found["env_steps"], found["episodes"], found["learner_steps"]) == (64, 16, 16)
    assert found["seconds"] > before > 0
    assert [row["env_steps"] for row in read_metrics(folder / "metrics.csv")] == [16, 32, 48, 64]


@pytest.mark.runs
def test_the_same_seed_trains_the_same_policy(first, tmp_path):
    ours, again = weights(first), trained(tmp_path / "again")
    other = trained(tmp_path / "other", SMALL.changed(seed=4))
    assert all(np.array_equal(again[name], value) for name, value in ours.items())
    assert not np.array_equal(other["others.0.weight"], ours["others.0.weight"])


def test_nothing_that_a_checkpoint_pickled_is_ever_read(first, tmp_path, monkeypatch):
    folder = shutil.copytree(first, tmp_path / "run")

    def refused(*_, **__):
        raise AssertionError("unpickled")

    monkeypatch.setattr(cloudpickle, "loads", refused)
    trained(folder, SMALL.changed(steps=48), resume=True)
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


class Shown(Watcher):
    """What is shown of a run, which ends where its evaluation begins."""

    def __init__(self):
        self.phases, self.told = [], []

    def begin(self, what, total, done=0):
        self.phases.append((what, total, done))
        if what == "evaluating":
            raise KeyboardInterrupt

    def advance(self, done, numbers=None):
        self.told.append((done, dict(numbers or {})))


class InterruptsEvaluation(Watcher):
    def begin(self, what, total, done=0):
        if what == "evaluating":
            raise KeyboardInterrupt


@pytest.mark.runs
def test_a_finished_run_keeps_its_results_until_it_is_evaluated_again(finished, tmp_path):
    folder = shutil.copytree(finished, tmp_path / "run")
    before = summary(folder)
    with pytest.raises(KeyboardInterrupt):
        whole_run(SMALL, folder, InterruptsEvaluation(), resume=True)
    assert summary(folder) == before and "verdict" in before
    with pytest.raises(KeyboardInterrupt):
        whole_run(SMALL.changed(steps=48), folder, InterruptsEvaluation(), resume=True)
    assert summary(folder)["env_steps"] == 48 and "verdict" not in summary(folder), "those were of another policy"


@pytest.mark.runs
def test_a_finished_run_that_is_evaluated_again_has_the_same_results(finished, tmp_path):
    folder = shutil.copytree(finished, tmp_path / "run")
    before = summary(folder)
    whole_run(SMALL, folder, resume=True)
    assert summary(folder) == before, "the same photos and the same policy"


def test_the_report_has_the_steps_that_were_made_and_the_time_of_all_parts(finished, tmp_path):
    folder = shutil.copytree(finished, tmp_path / "run")
    document = folder / "checkpoints" / "step-000000000032" / "run.json"
    found = json.loads(document.read_text())
    document.write_text(json.dumps({**found, "gathered": {**found["gathered"], "seconds": 5000.0}}))
    whole_run(SMALL.changed(steps=10_000, seconds=1e-6), folder, resume=True)
    report = (folder / "report.html").read_text()
    assert "32 edit steps, 16 between two updates" in report
    assert 5000 <= int(re.search(r"training (\d+) s, evaluation", report)[1]) < 5100


def test_a_run_is_not_resumed_with_other_settings_but_may_get_more_steps(finished, tmp_path):
    tmp_path = shutil.copytree(finished, tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"learning_rate was 0\.001, is 0\.5"):
        whole_run(SMALL.changed(learning_rate=0.5), tmp_path, resume=True)
    shown = Shown()
    with pytest.raises(KeyboardInterrupt):
        whole_run(SMALL.changed(steps=48), tmp_path, shown, resume=True)
    assert summary(tmp_path)["env_steps"] == 48
    assert shown.phases[0] == ("training", 48, 32)
    assert [done for done, _ in shown.told[:8]] == [34, 36, 38, 40, 42, 44, 46, 48], "also within a rollout"
    assert shown.told[8][1].keys() == {"return"}
    left = {path.name for path in tmp_path.iterdir()}
    assert left >= {"summary.json", "metrics.csv", "report.html", "checkpoints", "tensorboard", "evaluation.csv"}


def test_its_optimiser_is_stable_baselines_adam_without_torchs_compiler(monkeypatch) -> None:
    monkeypatch.setattr(learning, "PPO", lambda *of, policy_kwargs, **options: policy_kwargs)
    given = learning._new_model(learning.PhotoTraining(), SimpleNamespace())
    assert given["optimizer_class"] is PlainAdam and given["optimizer_kwargs"] == {"eps": 1e-5}
