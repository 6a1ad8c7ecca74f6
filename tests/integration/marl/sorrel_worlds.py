"""Sorrel's own example worlds, small, with models whose first weights are always the same."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
from sorrel.examples.treasurehunt.agents import TreasurehuntAgent
from sorrel.examples.treasurehunt.entities import EmptyEntity
from sorrel.examples.treasurehunt.env import TreasurehuntEnv
from sorrel.examples.treasurehunt.world import TreasurehuntWorld
from sorrel.examples.treasurehunt_threadsafe.entities import EmptyEntity as SafeEmptyEntity
from sorrel.examples.treasurehunt_threadsafe.env import TreasurehuntEnv as SafeTreasurehuntEnv
from sorrel.examples.treasurehunt_threadsafe.world import TreasurehuntWorld as SafeTreasurehuntWorld
from sorrel.models.base_model import RandomModel
from sorrel.models.pytorch import PyTorchIQN
from sorrel.models.pytorch.iqn_threadsafe import ThreadsafePyTorchIQN
from sorrel.models.pytorch.ppo import PyTorchPPO

SIZES = {"layer_size": 16, "n_frames": 2, "batch_size": 8, "memory_size": 64, "n_quantiles": 4}


def configuration(multiprocessing, epochs=5, turns=12, epsilon_decay=0.0):
    return {
        "experiment": {"epochs": epochs, "max_turns": turns, "record_period": 1000},
        "model": {"agent_vision_radius": 2, "epsilon_decay": epsilon_decay, "observation_spec": "onehot"},
        "world": {
            "height": 7,
            "width": 7,
            "gem_value": 10,
            "food_value": 5,
            "bone_value": -10,
            "spawn_prob": 0.05,
        },
        "multiprocessing": multiprocessing,
    }


def iqn(agent, kind=PyTorchIQN, seed=0):
    return kind(
        input_size=agent.observation_spec.input_size,
        action_space=agent.action_spec.n_actions,
        epsilon=0.4,
        device="cpu",
        seed=seed,
        **SIZES,
    )


class Hunt(TreasurehuntEnv):
    """Two agents with a model each."""

    def setup_agents(self):
        super().setup_agents()
        for number, agent in enumerate(self.agents):
            agent.model = iqn(agent, seed=number)
            agent.model.memory.extra_data["positions"] = np.zeros((64, 2), np.int64)


class OnPolicyAgent(TreasurehuntAgent):
    def get_action(self, state):
        action, log_probability = self.model.take_action(state.reshape(-1))
        return int(action), float(log_probability)

    def act(self, world, action):
        return super().act(world, action[0])


class OnPolicyHunt(TreasurehuntEnv):
    """One agent with PPO, and one that acts at random."""

    def setup_agents(self):
        super().setup_agents()
        first, second = self.agents
        model = PyTorchPPO(
            input_size=first.observation_spec.input_size,
            action_space=4,
            layer_size=16,
            epsilon=0.0,
            device="cpu",
            entropy_coef=0.01,
            eps_clip=0.2,
            gamma=0.9,
            k_epochs=2,
            lr_actor=0.001,
            lr_critic=0.001,
            max_turns=int(self.config.experiment.max_turns),
            seed=1,
        )
        second.model = RandomModel(second.observation_spec.input_size, 4, memory_size=64)
        second.model.memory.n_frames = 2
        learner = OnPolicyAgent(first.observation_spec, first.action_spec, model)
        learner.kind = first.kind  # the others observe it as this kind
        self.agents = [learner, second]


class SafeHunt(SafeTreasurehuntEnv):
    """Two agents with one threadsafe model."""

    def setup_agents(self):
        super().setup_agents()
        shared = iqn(self.agents[0], ThreadsafePyTorchIQN)
        for agent in self.agents:
            agent.model = shared


def hunt(**options):
    config = configuration(**options)
    return Hunt(TreasurehuntWorld(config=config, default_entity=EmptyEntity()), config)


def on_policy_hunt(**options):
    config = configuration(**options)
    return OnPolicyHunt(TreasurehuntWorld(config=config, default_entity=EmptyEntity()), config)


def safe_hunt(**options):
    config = configuration(**options)
    return SafeHunt(SafeTreasurehuntWorld(config=config, default_entity=SafeEmptyEntity()), config)


def dying(make, mark, at, **options):
    """The world of `make`; the first process that takes `at` turns in it dies, before the file `mark` is there."""
    env = globals()[make](**options)
    turns, take_turn = [0], env.take_turn

    def once(epoch):
        if turns[0] == at and not Path(mark).exists():
            Path(mark).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        turns[0] += 1
        take_turn(epoch)

    env.take_turn = once
    return env
