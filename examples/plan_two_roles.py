"""A plan with two roles, DQN on CartPole: a player and a learner, each in a process of its own.

jurybox train plan --plan plan_two_roles:plan --out runs/dqn && jurybox policy evaluate runs/dqn
"""

import gymnasium as gym
import numpy as np
import torch
from torch import nn

from jurybox.protocol import TensorSpec
from jurybox.protocol.weights import WeightsLayout
from jurybox.server.models import ServedModel
from jurybox.training.policies import Acts, Description
from jurybox.training.roles.local_policy import TorchWeights
from jurybox.training.runtime import Actor, Budget, ChannelSpec, Field, Kind, Learner, Pace, Plan, ReplaySpec, RoleSpec

FIELDS = {"seen": Field((4,)), "action": Field((), "int64"), "reward": Field(), "came": Field((4,)), "over": Field()}


def served() -> ServedModel:
    net = nn.Sequential(nn.Linear(4, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 2))
    return ServedModel(net, {"observation": TensorSpec("float32", (4,))}, {"values": TensorSpec("float32", (2,))})


class Player(Actor):
    def __init__(self, context):
        super().__init__(context)
        self.env = gym.wrappers.RecordEpisodeStatistics(gym.make("CartPole-v1"))
        self.net, self.rows = served().module, context.replay()
        self.weights, self.random = TorchWeights(context.reader(), self.net), np.random.default_rng(context.seed)
        context.follow("policy", self.weights)  # the runtime keeps it new
        self.seen, _ = self.env.reset(seed=context.seed)

    def step(self):
        action = int(self.net(torch.from_numpy(self.seen)).argmax())
        if self.random.random() < self.weights.extra["epsilon"]:
            action = int(self.random.integers(2))
        came, reward, terminated, truncated, info = self.env.step(action)
        self.rows.add(seen=self.seen, action=action, reward=reward, came=came, over=terminated)
        if terminated or truncated:
            self.context.episode(total=float(info["episode"]["r"]), length=int(info["episode"]["l"]))
        self.seen = self.env.reset()[0] if terminated or truncated else came
        return 1  # env steps made


class Teacher(Learner):
    def __init__(self, context):
        super().__init__(context)
        self.net, self.target, self.rows, self.steps = served().module, served().module, context.replay(), 0
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=1e-3)

    def step(self):
        if self.steps % 100 == 0:
            self.target.load_state_dict(self.net.state_dict())
        rows = self.rows.sample(128).torch()
        with torch.no_grad():
            wanted = rows["reward"] + 0.99 * self.target(rows["came"]).max(1).values * (1 - rows["over"])
        value = self.net(rows["seen"]).gather(1, rows["action"][:, None]).squeeze(1)
        loss = nn.functional.smooth_l1_loss(value, wanted)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.steps += 1
        self.context.metrics(loss=loss.item())

    def publication(self):
        return self.net, {"epsilon": max(0.05, 1 - self.steps / 2500)}


def plan(steps=20_000):
    acts = Acts(f"{__name__}:served", {}, "weights-policy.state", output="values", choose="best")
    policy = Description("plan", {"policy": acts}, "gymnasium:make", {"id": "CartPole-v1"}).as_dict()
    player = RoleSpec("player", Kind.ACTOR, f"{__name__}:Player", writes=("rows",), reads=("policy",))
    teacher = RoleSpec("teacher", Kind.LEARNER, f"{__name__}:Teacher", samples=("rows",), publishes="policy")
    weights = ChannelSpec("policy", WeightsLayout.of(served().module.state_dict()))
    rows, pace = ReplaySpec("rows", 50_000, FIELDS), Pace(train_freq=2, gradient_steps=1, learning_starts=1000)
    return Plan((player, teacher), (rows,), (weights,), pace, Budget(steps), columns=("loss",), policy=policy)
