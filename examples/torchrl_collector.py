"""TorchRL: its collector acts with the policy on the server, its DQN learns from our replay.  pip install torchrl"""

import argparse

import numpy as np
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import ReplayBuffer
from torchrl.envs import GymEnv, RewardSum, TransformedEnv
from torchrl.modules import EGreedyModule, QValueActor
from torchrl.objectives import DQNLoss, SoftUpdate

from jurybox.client import connect
from jurybox.protocol import TensorSpec
from jurybox.server.models import ServedModel
from jurybox.training.replay import Field, Replay
from jurybox.training.replay.torchrl import SharedSampler, SharedStorage, as_drawn
from jurybox.training.runtime import served_models

NEXT = ("reward", "done", "terminated")
FIELDS = {"observation": Field((4,)), "action": Field((), "int64"), "came": Field((4,))}
FIELDS |= {"reward": Field((1,)), "done": Field((1,), "bool"), "terminated": Field((1,), "bool")}


def policy() -> ServedModel:
    net = nn.Sequential(nn.Linear(4, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 2))
    return ServedModel(net, {"observation": TensorSpec("float32", (4,))}, {"action_value": TensorSpec("float32", (2,))})


def main(frames: int, address: str | None) -> None:
    torch.manual_seed(0)
    env = TransformedEnv(GymEnv("CartPole-v1", categorical_action_encoding=True), RewardSum())
    env.set_seed(0)
    net, returns = policy().module, []
    actor = QValueActor(net, in_keys=["observation"], action_space="categorical")
    loss = DQNLoss(actor, action_space="categorical", delay_value=True)
    loss.make_value_estimator(gamma=0.99)
    target, optimizer = SoftUpdate(loss, tau=0.01), torch.optim.Adam(net.parameters(), 1e-3)
    models = {"policy": {"factory": "torchrl_collector:policy", "publish": "double_buffer"}}
    shared = Replay.create("torchrl-cartpole", 50_000, FIELDS)
    with served_models(models, address) as served, connect(served.address) as server, shared as replay:
        model, publisher = server.model(served.names["policy"]), server.publisher(served.names["policy"])
        greedy = TensorDictModule(lambda seen: torch.tensor(model(seen.numpy()).argmax()), ["observation"], ["action"])
        explore = EGreedyModule(env.action_spec, eps_init=1.0, eps_end=0.05, annealing_num_steps=frames // 2)
        collector = Collector(env, TensorDictSequential(greedy, explore), frames_per_batch=32, total_frames=frames)
        rows = ReplayBuffer(storage=SharedStorage(replay), sampler=SharedSampler(), collate_fn=as_drawn, batch_size=128)
        for data in collector:
            came = data["next"]
            columns = {"observation": data["observation"], "action": data["action"], "came": came["observation"]}
            rows.extend(TensorDict(columns | {name: came[name] for name in NEXT}, data.batch_size))
            returns += came["episode_reward"][came["done"]].tolist()
            explore.step(data.numel())
            for _ in range(8 if len(replay) > 1000 else 0):
                drawn = rows.sample()
                ahead = TensorDict({"observation": drawn["came"]} | {name: drawn[name] for name in NEXT}, [128])
                optimizer.zero_grad()
                loss(drawn.select("observation", "action").set("next", ahead))["loss"].backward()
                optimizer.step()
                target.step()
            publisher.publish(net)
        collector.shutdown()
        print(f"{publisher.version} publications, {len(replay)} rows in the replay")
    print(f"mean return: first 20 episodes {np.mean(returns[:20]):.1f}, last 20 {np.mean(returns[-20:]):.1f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", type=int, default=15_000)
    parser.add_argument("--server", help="address of one that runs; without it a private one is started")
    arguments = parser.parse_args()
    main(arguments.frames, arguments.server)
