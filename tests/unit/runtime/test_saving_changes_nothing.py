"""A checkpoint is pure: a serial run with any interval equals the run without one, bit for bit, in every training."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tests.integration.marl.test_marl_training import SMALL as MARL
from tests.unit.runtime import toys
from tests.unit.studies.hockey.hockey_runs import settings as hockey_settings
from tests.unit.studies.hockey.test_hockey_training import same
from tests.unit.studies.photo.test_photo_resume import SMALL as PHOTO
from tests.unit.studies.photo.test_photo_resume import few_photos  # noqa: F401
from tests.unit.studies.workflow.test_trainer import SETTINGS as WORKFLOW

from jurybox.studies.hockey import train as hockey
from jurybox.studies.photo import learning as photo
from jurybox.studies.sorrel.roles import SorrelActor
from jurybox.studies.workflow import train as workflow_run
from jurybox.training.algorithms.registry import ALGORITHMS
from jurybox.training.checkpoints import Checkpoints
from jurybox.training.replay import Replay
from jurybox.training.runtime.run import run
from jurybox.training.trainings import gym, marl

FINISHED: list[int] = []


class Long(gymnasium.Env):
    """Episodes of 20 steps, twice the interval of the checkpoints; half of all steps are rewarded."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self, numbers=False):
        self.action_space = spaces.Box(-1, 1, (1,)) if numbers else spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.see(), {}

    def see(self):
        return self.np_random.uniform(-1, 1, 2).astype(np.float32)

    def step(self, action):
        self.t += 1
        if self.t == 20:
            FINISHED.append(self.t)
        return self.see(), float(np.ravel(action)[0] > 0), False, self.t == 20, {}


def _plan(plan):
    return lambda folder: run(plan, folder, toys.Rows(), serial=True)


def _gym(algorithm, every):
    small = {"batch_size": 8, "hidden": (8,), "steps": 100, "envs": 2, "evaluation_episodes": 1, "evaluate_every": 0}
    own = {"n_steps": 16, "n_epochs": 1} if algorithm == "ppo" else {"buffer_size": 200, "learning_starts": 10}
    numbers = {"env_args": {"numbers": True}} if algorithm in ("td3", "sac") else {}
    given = {"env": f"{__name__}:Long", "algorithm": algorithm, "checkpoint_every": every}
    return _plan(gym.plan(gym.GymTraining.checked({**small, **own, **numbers, **given})))


def _marl(algorithm, every):
    on_policy = algorithm == "ppo"
    small = {name: value for name, value in MARL.items() if not on_policy or not name.startswith(("expl", "learning_"))}
    own = {"ppo": {"n_steps": 20, "n_epochs": 1}} if on_policy else {}
    given = {"algorithm": algorithm, "checkpoint_every": every}
    return _plan(marl.plan(marl.MarlTraining(**{**small, **own, **given})))


def _hockey(every):
    s = hockey_settings(steps=400, checkpoint_every=every, prioritized=True, publish_interval=1)
    return lambda folder: run(hockey.plan(s, folder), folder, toys.Rows(), serial=True)


def _photo(every):
    return _plan(photo.plan(PHOTO.changed(checkpoint_every=every or 32), serial=True))


def _workflow(every):
    def trained(folder):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(workflow_run, "_CHECKPOINT_EVERY", every or 10**6)
            workflow_run.run(WORKFLOW.changed(total_episodes=40), folder)

    return trained


TRAININGS = {
    **{f"gym {algorithm}": (lambda every, a=algorithm: _gym(a, every), 10) for algorithm in ALGORITHMS},
    "marl ppo": (lambda every: _marl("ppo", every), 7),
    "marl iqn": (lambda every: _marl("iqn", every), 7),
    "hockey": (_hockey, 50),
    "a plan of one's own": (lambda every: _plan(toys.plan(actors=2, save_every=every, sync_every=3)), 10),
    "photo": (_photo, 16),
    "workflow": (_workflow, 3),
}


def _left(folder):
    """What a run left: the states of all roles, and the rows of its replays."""
    newest = Checkpoints(folder / "checkpoints").existing()
    found = {path.stem: newest.state(path.stem) for path in sorted(newest.folder.glob("*.state"))}
    for path in sorted(newest.folder.glob("*.jbr")):
        with Replay.load(path, f"pure-{folder.parent.name}") as replay:
            replay.unlink()
            found[path.stem] = [part.slots.copy() for part in replay.parts]
    return newest, found


# Whose roles keep what others' keep, or whose own tests resume them in the default suite.
MORE = {"gym iqn", "gym td3", "gym sac", "marl iqn", "photo", "workflow"}


@pytest.mark.parametrize(
    "training", [pytest.param(name, marks=[pytest.mark.runs] * (name in MORE)) for name in TRAININGS]
)
def test_a_run_with_any_interval_of_checkpoints_equals_the_run_without(tmp_path, training):
    make, every = TRAININGS[training]
    left, finished = [], []
    for name, interval in (("without", 0), ("with", every)):
        FINISHED.clear()
        make(interval)(tmp_path / name)
        left.append(_left(tmp_path / name))
        finished.append(len(FINISHED))
    (one, without), (two, saved) = left
    assert one.env_steps == two.env_steps and len(without) > 0
    same(without, saved, training)
    if training.startswith("gym"):
        assert finished == [5, 5], "two in each of the two environments, longer than the interval, and an evaluation"


def test_a_checkpoint_leaves_a_sorrel_world_as_it_is():
    class World:
        def __init__(self):
            self.agents, self.turn, self.stop_if_done, self.resets = [], 0, False, 0
            self.config = SimpleNamespace(experiment=SimpleNamespace(max_turns=5))
            self.world = SimpleNamespace(is_done=False, total_reward=0.0)

        def reset(self):
            self.turn, self.resets = 0, self.resets + 1

        def take_turn(self, epoch):
            self.turn += 1

    globals()["World"] = World
    spec = SimpleNamespace(threads=torch.get_num_threads())
    context = SimpleNamespace(seed=5, spec=spec, own_episodes=0, episode=lambda **_: None, resetting=nullcontext)
    actor = SorrelActor(context, make=(f"{__name__}:World", {}), groups={})
    for _ in range(10):
        actor.step()
        actor.save()
    assert actor.env.resets == 2
