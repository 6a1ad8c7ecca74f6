"""Storage and sampler inside TorchRL's replay buffer, collector and loss; skipped if TorchRL is not installed."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("torchrl")

from tensordict import TensorDict
from tensordict.nn import TensorDictSequential
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import ReplayBuffer, TensorDictReplayBuffer
from torchrl.envs import GymEnv
from torchrl.modules import EGreedyModule, QValueActor
from torchrl.objectives import DQNLoss

from jurybox.protocol.errors import Refused
from jurybox.training.replay import Field, Replay
from jurybox.training.replay.torchrl import SharedSampler, SharedStorage, as_drawn


def test_rows_are_sampled_intact_and_priorities_count() -> None:
    fields = {"x": Field((3,)), "n": Field((), "int64")}
    with Replay.create(f"torchrl-{os.getpid()}", 100, fields, prioritized=True, alpha=1.0, seed=1) as replay:
        buffer = TensorDictReplayBuffer(
            storage=SharedStorage(replay), sampler=SharedSampler(), batch_size=32, collate_fn=as_drawn
        )
        buffer.extend(TensorDict({"x": torch.arange(50.0)[:, None].expand(50, 3), "n": torch.arange(50)}, [50]))
        buffer.add(TensorDict({"x": torch.full((3,), 50.0), "n": torch.tensor(50)}, []))
        sample = buffer.sample()
        assert len(buffer) == 51
        assert (sample["x"] == sample["n"][:, None]).all()
        buffer.update_priority(torch.arange(51), torch.where(torch.arange(51) == 7, 1e4, 1e-4))
        assert (buffer.sample()["n"] == 7).all()
        with pytest.raises(Refused, match="use sample"):
            buffer[0]


def test_dqn_learns_through_a_shared_replay() -> None:
    torch.manual_seed(0)
    env = GymEnv("CartPole-v1", categorical_action_encoding=True)
    net = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
    actor = QValueActor(net, in_keys=["observation"], spec=env.action_spec, action_space="categorical")
    explore = EGreedyModule(env.action_spec, eps_init=0.5)
    collector = Collector(env, TensorDictSequential(actor, explore), frames_per_batch=50, total_frames=300)
    fields = {
        "observation": Field((4,)), "action": Field((), "int64"), "next_observation": Field((4,)),
        "reward": Field(()), "done": Field((), "bool"), "terminated": Field((), "bool"),
    }  # fmt: skip
    with Replay.create(f"torchrl-dqn-{os.getpid()}", 1000, fields, seed=1) as replay:
        buffer = ReplayBuffer(
            storage=SharedStorage(replay), sampler=SharedSampler(), batch_size=64, collate_fn=as_drawn
        )
        loss = DQNLoss(actor, action_space="categorical", delay_value=False)
        loss.make_value_estimator(gamma=0.99)
        optimizer = torch.optim.Adam(loss.parameters(), 1e-3)
        before = [p.detach().clone() for p in net.parameters()]
        for data in collector:
            following = data["next"]
            columns = {name: following[name] for name in ("reward", "done", "terminated")}
            columns |= {"observation": data["observation"], "action": data["action"]}
            columns |= {"next_observation": following["observation"]}
            buffer.extend(TensorDict(columns, data.batch_size))
            rows = buffer.sample()
            ahead = {name: rows[name][:, None] for name in ("reward", "done", "terminated")}
            ahead["observation"] = rows["next_observation"]
            row = {"observation": rows["observation"], "action": rows["action"], "next": TensorDict(ahead, [64])}
            value = loss(TensorDict(row, [64]))["loss"]
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
        collector.shutdown()
        assert replay.added == 300
        assert any((a != b).any() for a, b in zip(before, net.parameters(), strict=True))
