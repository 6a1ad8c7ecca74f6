"""Resumed sorrel roles do what they would have done. A stand-in takes the place of sorrel."""

from __future__ import annotations

import os
import random
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from jurybox.studies.sorrel.experiment import SorrelError, check
from jurybox.studies.sorrel.models import EPOCH_BEGINS, EPOCH_ENDS, MemoryRecorder, fields_of
from jurybox.studies.sorrel.roles import SorrelActor, SorrelLearner
from jurybox.training.checkpoints import read_state, write_state
from jurybox.training.replay import Replay

DRAWN = []


class World:
    """Draws from all global generators, as sorrel's worlds, agents and models do."""

    def __init__(self):
        self.agents, self.turn, self.stop_if_done = [], 0, False
        self.config = SimpleNamespace(experiment=SimpleNamespace(max_turns=2))
        self.world = SimpleNamespace(is_done=False, total_reward=0.0)

    def reset(self):
        self.turn = 0

    def take_turn(self, epoch):
        self.turn += 1
        DRAWN.append((epoch, random.random(), float(np.random.standard_normal()), float(torch.rand(()))))


def actor(ended=0):
    spec = SimpleNamespace(threads=torch.get_num_threads())
    context = SimpleNamespace(seed=5, spec=spec, own_episodes=ended, episode=lambda **_: None, resetting=nullcontext)
    return SorrelActor(context, make=(f"{__name__}:World", {}), groups={})


def test_a_resumed_actor_draws_what_it_would_have_drawn(tmp_path):
    DRAWN.clear()
    first = actor()
    for _ in range(4):
        first.step()
    write_state(tmp_path / "actor.state", first.save())
    for _ in range(4):
        first.step()
    resumed = actor(ended=2)
    resumed.restore(read_state(tmp_path / "actor.state"))
    for _ in range(4):
        resumed.step()
    assert DRAWN[8:] == DRAWN[4:8] and DRAWN[:4] != DRAWN[4:8]


class Fails(World):
    def take_turn(self, epoch):
        super().take_turn(epoch)
        if len(DRAWN) == 3:
            raise KeyError("no such entity")


class Unpaid(World):
    def take_turn(self, epoch):
        super().take_turn(epoch)
        self.world.total_reward = float("nan")


def test_an_environment_is_played_before_the_training_and_changes_nothing_here():
    DRAWN.clear()
    state = random.getstate(), torch.get_rng_state().tolist()
    check(f"{__name__}:World", {}, 5, 0)
    assert len(DRAWN) == 5 and (random.getstate(), torch.get_rng_state().tolist()) == state
    check(f"{__name__}:Fails", {}, 0, 0)
    DRAWN.clear()
    with pytest.raises(
        SorrelError, match=r"Fails cannot be trained in: it raised KeyError: .*test_sorrel_random.py:\d+"
    ):
        check(f"{__name__}:Fails", {}, 5, 0)
    with pytest.raises(SorrelError, match=r"total_reward.*check_steps"):
        check(f"{__name__}:Unpaid", {}, 5, 0)


class Memory:
    """Of whole epochs, as sorrel's RolloutBuffer."""

    obs_shape = (1,)
    extra_data: dict = {}
    log_probs = ()

    def __init__(self):
        self.rewards = []

    def add(self, obs, action, reward, done):
        self.rewards.append(reward)


class Learned(torch.nn.Linear):
    def __init__(self):
        super().__init__(1, 1)
        self.memory, self.epsilon, self.decayed = Memory(), 1.0, 0

    def epsilon_decay(self, rate):
        self.decayed += 1


class TwoStepEpochs(World):
    """Its model learns from the rewards of each epoch, which it then forgets."""

    def __init__(self):
        super().__init__()
        self.agents, self.config.model = [SimpleNamespace(model=Learned())], {"epsilon_decay": 0.1}
        self.trained = []

    def _model_start_epoch_action(self, agent, epoch):
        agent.model.memory.rewards.clear()

    def _model_end_epoch_action(self, agent, epoch):
        pass

    def _model_train_step(self, agent):
        self.trained.append(list(agent.model.memory.rewards))
        return np.array(0.0)


def test_a_resumed_on_policy_learner_takes_every_epoch_that_it_has_not_trained_on(tmp_path):
    def replay():
        return Replay.create(f"sorrel-{os.getpid()}-{tmp_path.name[-8:]}", 30, fields_of(Memory()))

    def play(rows, *epochs):
        recorder = MemoryRecorder(rows.add, Learned())
        for epoch in epochs:
            recorder.mark(EPOCH_BEGINS, epoch)
            for _ in range(2):
                recorder._model.memory.add(np.zeros(1), (0, 0.0), float(epoch), False)
            recorder.mark(EPOCH_ENDS, epoch)

    def learner(rows):
        context = SimpleNamespace(
            number=1, life=1, spec=SimpleNamespace(threads=torch.get_num_threads()), plan=SimpleNamespace(seed=5),
            replay=lambda group: rows, metrics=lambda **_: None,
        )  # fmt: skip
        return SorrelLearner(context, make=(f"{__name__}:TwoStepEpochs", {}), group="agent_0", members=[0])

    def train(role):
        while role.ready():
            role.step()
        return role._env.trained

    with replay() as rows:
        first = learner(rows)
        play(rows, *range(10))
        assert train(first) == [[epoch] * 2 for epoch in range(3, 10)], "the ring holds no more"
        play(rows, 10, 11)
        assert first.ready()
        first.step()
        assert first._env.trained[-1] == [10, 10] and first._queue, "epoch 11 waits"
        play(rows, 12)  # and is not read yet
        write_state(tmp_path / "learner.state", first.save())
        rows.save(tmp_path / "rows")
    with replay() as rows:
        rows.restore(tmp_path / "rows")
        play(rows, 13)  # the actor was ready first
        resumed = learner(rows)
        resumed.restore(read_state(tmp_path / "learner.state"))
        write_state(tmp_path / "again.state", resumed.save())  # before its first step
        assert train(resumed) == [[11, 11], [12, 12], [13, 13]] and resumed.model.decayed == 3
        rows.save(tmp_path / "rows")
    with replay() as rows:
        rows.restore(tmp_path / "rows")
        resumed = learner(rows)
        resumed.restore(read_state(tmp_path / "again.state"))
        assert train(resumed) == [[11, 11], [12, 12], [13, 13]]
