"""Every training goes on in a folder that was moved, with another number of workers."""

from __future__ import annotations

import numpy as np
import pytest
from tests.integration.marl.test_marl_training import SMALL as WORLDS
from tests.unit.gym_training.gym_worlds import Mixed
from tests.unit.gym_training.test_gym_training import settings as gym_settings
from tests.unit.runtime.toys import Rows
from tests.unit.runtime.toys import plan as toy_plan
from tests.unit.studies.hockey.hockey_runs import settings as hockey_settings
from tests.unit.studies.photo.test_photo_resume import SMALL as PHOTO
from tests.unit.studies.photo.test_photo_resume import few_photos, summary  # noqa: F401
from tests.unit.studies.photo.test_photo_resume import trained as train_photo

from jurybox.studies.hockey.train import train as train_hockey
from jurybox.training.checkpoints import CheckpointError, Checkpoints
from jurybox.training.environments.adapter import SAVES
from jurybox.training.roles import env_actor
from jurybox.training.roles.learner import OnPolicyLearner
from jurybox.training.runtime.run import run
from jurybox.training.runtime.scoreboard import ControlWord, Word
from jurybox.training.runtime.shared_resources import SharedResources
from jurybox.training.trainings.gym import train
from jurybox.training.trainings.marl import MarlTraining
from jurybox.training.trainings.marl_run import train as train_marl


def moved(folder):
    """The folder's new place: nothing is left at the old one."""
    (elsewhere := folder.parent / "other machine" / folder.name).parent.mkdir(exist_ok=True)
    return folder.rename(elsewhere)


def actors(folder):
    """The environment steps of each actor, from a run's newest checkpoint."""
    roles = Checkpoints(folder / "checkpoints").existing().document["roles"]
    return [counts[0] for name, (_, counts) in roles.items() if name.startswith("actor")]


@pytest.mark.parametrize(("before", "after"), [(1, 4), pytest.param(4, 2, marks=pytest.mark.runs)])
@pytest.mark.parametrize("algorithm", ["ppo", "dqn"])
def test_gym(tmp_path, algorithm, before, after) -> None:
    small = gym_settings(algorithm, envs=4, evaluate_every=0)
    train(small.changed(workers=before), tmp_path / "run", serial=True)
    folder = moved(tmp_path / "run")
    outcome = train(small.changed(workers=after, steps=192), folder, serial=True, resume=True)
    assert outcome.env_steps == 192 and outcome.learner_steps > 0 and not (tmp_path / "run").exists()
    assert actors(folder) == [192 // after] * after, "the actors shared what those before had done"
    with pytest.raises(CheckpointError, match="envs was 4, is 8"):
        train(small.changed(envs=8, steps=192), folder, serial=True, resume=True)


def test_marl(tmp_path) -> None:
    small = {**WORLDS, "steps": 60, "algorithm": "ppo", "ppo": {"n_steps": 20, "n_epochs": 1}}
    small = {name: value for name, value in small.items() if not name.startswith(("expl", "learning_s"))}
    train_marl(MarlTraining(**small, workers=3, log_dir=tmp_path / "run"), serial=True)
    folder = moved(tmp_path / "run")
    more = MarlTraining(**{**small, "steps": 120}, workers=2, log_dir=folder)
    outcome = train_marl(more, serial=True, resume=True)
    assert outcome.env_steps == 120 and actors(folder) == [60, 60] and outcome.learner_steps == 2 * 6


@pytest.mark.runs
@pytest.mark.parametrize(("before", "after"), [(1, 4), (2, 1)])
def test_hockey(tmp_path, before, after) -> None:
    few = {"envs": 8, "steps": 640, "evaluation_games": 1, "matrix_games": 0, "film_games": 0}
    train_hockey(hockey_settings(**few, workers=before), tmp_path / "run", serial=True)
    folder = moved(tmp_path / "run")
    more = hockey_settings(**{**few, "steps": 1280}, workers=after)
    outcome = train_hockey(more, folder, serial=True, resume=True)
    assert outcome.env_steps >= 1280 and len(actors(folder)) == after
    assert max(actors(folder)) - min(actors(folder)) <= 8


@pytest.mark.runs
@pytest.mark.parametrize("envs", [1, 3])
def test_photo(tmp_path, envs) -> None:
    train_photo(tmp_path / "run")
    folder = moved(tmp_path / "run")
    train_photo(folder, PHOTO.changed(steps=64, envs=envs), resume=True)
    assert summary(folder)["env_steps"] >= 64


class Keeps(Mixed):
    """Its episodes can be saved: with as many environments as before they go on."""

    def episode_state(self):
        return {"steps": self._steps, "bit": self._bit, "random": self.np_random.bit_generator.state}

    def restore_episode(self, state):
        self._steps, self._bit = state["steps"], state["bit"]
        self.np_random.bit_generator.state = state["random"]


def test_no_row_follows_one_of_an_environment_that_was_another_workers(tmp_path, monkeypatch) -> None:
    assert all(hasattr(Keeps, name) for name in SAVES)
    taken, take = [], OnPolicyLearner._take_rows

    def kept(self):
        take(self)
        taken.append({name: self._held[name].copy() for name in ("environment", "t", "observation")})

    small = gym_settings("ppo", env=f"{__name__}:Keeps", envs=4, evaluate_every=0, steps=64 + 40, n_steps=16)
    train(small, tmp_path, serial=True)
    monkeypatch.setattr(OnPolicyLearner, "_take_rows", kept)
    train(small.changed(workers=2, steps=192), tmp_path, serial=True, resume=True)
    rows = taken[0]
    assert len(rows["t"]) == 64, "a rollout, of which the checkpoint held the first part"
    marks = rows["t"] >> env_actor._STEP_BITS
    for environment in range(4):
        now = rows["t"][(rows["environment"] == environment) & (marks > 0)]
        assert len(now) == 6 and now.min() > rows["t"][marks == 0].max() + 1
    assert len(set(marks.tolist())) == 3, "those of the checkpoint, and of each worker"


def test_other_actors_share_the_counts_and_new_ones_draw_numbers_of_their_own(tmp_path) -> None:
    run(toy_plan(steps=100, actors=2), tmp_path, Rows(), serial=True)
    for names, shares in (("ab", [50, 50]), ("abc", [34, 34, 32]), ("a", [100])):
        planned = toy_plan(steps=200, actors=len(names))
        with SharedResources.create(planned) as shared:
            shared.restore(planned, Checkpoints(tmp_path / "checkpoints").existing())
            words, orders = shared.scoreboard.words, shared.scoreboard.orders
            of_actors = [number for number, role in enumerate(planned.roles) if role.name.startswith("actor")]
            assert [words[number][Word.ENV_STEPS] for number in of_actors] == shares
            lives = [orders[number][ControlWord.LIFE] for number in of_actors]
            assert lives == [0, 0, 1][: len(names)], "a new one begins as the successor of one that died"
            assert np.sum([words[number][Word.LEARNER_STEPS] for number in range(len(planned.roles))]) > 0
