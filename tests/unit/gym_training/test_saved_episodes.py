"""A resumed run goes on in the midst of episodes whose environments can be saved."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from tests.unit.studies.hockey.test_hockey_training import same

from jurybox.protocol.errors import SpecMismatch
from jurybox.training.checkpoints import Checkpoints
from jurybox.training.environments.adapter import WithState
from jurybox.training.environments.gymnasium_env import GymEnvs
from jurybox.training.roles.env_actor import _Recorder
from jurybox.training.run_folder import read_metrics
from jurybox.training.trainings.gym import GymTraining, train
from jurybox.training.trainings.marl import MarlTraining
from jurybox.training.trainings.marl_run import train as train_marl


class Forgets(gymnasium.Env):
    """Episodes of 20 steps; the reward depends on the step's number and the action."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.see(), {}

    def see(self):
        return np.float32([self.t / 20, self.np_random.uniform(-1, 1)])

    def step(self, action):
        self.t += 1
        return self.see(), float(action == self.t % 2), False, self.t == 20, {}


class Keeps(Forgets):
    def episode_state(self):
        return {"t": self.t, "random": self.np_random.bit_generator.state}

    def restore_episode(self, state):
        self.t = state["t"]
        self.np_random.bit_generator.state = state["random"]


class KeepsTooMuch(Keeps):
    def episode_state(self):
        return {"t": self}


SMALL = {"envs": 2, "batch_size": 8, "hidden": (8,), "evaluation_episodes": 1, "evaluate_every": 0, "steps": 128}
OWN = {
    "ppo": {"n_steps": 8, "n_epochs": 1, "normalize_rewards": True},
    "dqn": {"buffer_size": 500, "learning_starts": 8},
}


def settings(algorithm: str, env: type = Keeps, **changes) -> GymTraining:
    given = {**SMALL, **OWN[algorithm], "env": f"{__name__}:{env.__name__}", "algorithm": algorithm, **changes}
    return GymTraining.checked(given)


def left(folder, *roles):
    newest = Checkpoints(folder / "checkpoints").existing()
    return {role: newest.state(role) for role in roles}


def roles_of(folder):
    newest = Checkpoints(folder / "checkpoints").existing()
    return [path.stem for path in sorted(newest.folder.glob("*.state"))]


@pytest.mark.parametrize(
    ("env", "more"),
    [
        pytest.param(Keeps, {}, id="saved", marks=pytest.mark.runs),
        pytest.param(Forgets, {}, id="begun anew"),
        pytest.param(Keeps, {"recurrent": "lstm", "hidden_size": 6}, id="saved with what is remembered"),
    ],
)
def test_a_resumed_run_equals_one_without_a_stop_where_its_environments_can_be_saved(tmp_path, env, more) -> None:
    s = settings("ppo", env, **more)
    whole = train(s, tmp_path / "whole", serial=True)
    train(s.changed(steps=48), tmp_path / "halves", serial=True)  # after four steps of both second episodes
    resumed = train(s, tmp_path / "halves", serial=True, resume=True)
    roles = roles_of(tmp_path / "whole")
    one, two = left(tmp_path / "whole", *roles), left(tmp_path / "halves", *roles)
    assert any(name.startswith("learner") for name in roles) and any("running" in each for each in one.values()) == (
        env is Keeps
    )
    if env is Keeps:
        same(one, two, "resumed")
        assert whole.return_mean == resumed.return_mean and whole.return_std == resumed.return_std
        rows = read_metrics(tmp_path / "halves" / "metrics.csv")
        assert {row["length_mean"] for row in rows if "length_mean" in row} == {20}
    else:
        with pytest.raises(AssertionError):
            same(one, two, "resumed")


def test_a_resumed_world_of_several_agents_goes_on_as_if_it_had_never_stopped(tmp_path) -> None:
    small = {"algorithm": "ppo", "ppo": {"n_steps": 20, "n_epochs": 1}, "batch_size": 8, "hidden": (8,), "n_stack": 2}
    world = {"env_args": {"turns": 15, "height": 9, "width": 9, "gems": (4, 2, 1)}, "evaluation_episodes": 1}
    for name, parts in (("whole", (80,)), ("parts", (40, 80))):
        for number, steps in enumerate(parts):
            s = MarlTraining(**small, **world, steps=steps, log_dir=tmp_path / name)
            train_marl(s, serial=True, resume=number > 0)
    roles = roles_of(tmp_path / "whole")
    one, two = left(tmp_path / "whole", *roles), left(tmp_path / "parts", *roles)
    assert any("running" in each for each in one.values())
    same(one, two, "resumed")


def test_a_resumed_run_from_a_replay_goes_on_with_its_episodes(tmp_path, monkeypatch) -> None:
    resets, reset = [], Forgets.reset
    monkeypatch.setattr(Forgets, "reset", lambda self, **given: (resets.append(1), reset(self, **given))[1])
    s = settings("dqn")
    train(s.changed(steps=48), tmp_path, serial=True)
    resets.clear()
    outcome = train(s.changed(check_steps=0), tmp_path, serial=True, resume=True)
    assert outcome.episodes == 6 and len(resets) == 4 + 1, "of 64 steps in each of two, and the evaluation's"


def test_a_resumed_run_from_a_replay_remembers_what_it_did(tmp_path, monkeypatch) -> None:
    s = settings("dqn", recurrent="gru", hidden_size=6, sequence_length=4, burn_in=2)
    train(s.changed(steps=48), tmp_path, serial=True)
    (running,) = left(tmp_path, "actor-0")["actor-0"]["running"]
    rows, acted = [], _Recorder.acted
    monkeypatch.setattr(_Recorder, "acted", lambda self, *of: (rows.append(of[2]["memory"].copy()), acted(self, *of)))
    train(s, tmp_path, serial=True, resume=True)
    assert running["memories"][""].any(1).all() and np.array_equal(rows[0], running["memories"][""])


def test_an_environment_in_a_wrapper_that_cannot_be_saved_begins_anew() -> None:
    def envs(limit):
        return GymEnvs(1, f"{__name__}:Keeps", {}, limit, clips=False)

    for limit, can in ((None, True), (30, False)):
        made = envs(limit)
        made.begin(0, 1)
        assert isinstance(made, WithState) and (made.state() is not None) == can
        made.close()


def test_a_state_that_no_checkpoint_takes_is_named(tmp_path) -> None:
    with pytest.raises(SpecMismatch, match="running"):
        train(settings("ppo", KeepsTooMuch, steps=32), tmp_path, serial=True)
