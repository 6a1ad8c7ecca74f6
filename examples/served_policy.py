"""A policy on a server in a bare Gymnasium loop: REINFORCE on CartPole.

The server computes the actions; after every eight episodes new weights are published to it.
"""

import argparse

import gymnasium as gym
import numpy as np
import torch
from torch import nn

from jurybox.client import connect
from jurybox.protocol import TensorSpec
from jurybox.server.models import ServedModel
from jurybox.training.runtime import served_models


def policy() -> ServedModel:
    net = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
    return ServedModel(net, {"observation": TensorSpec("float32", (4,))}, {"logits": TensorSpec("float32", (2,))})


def main(episodes: int, address: str | None) -> None:
    torch.manual_seed(0)
    env, rng, returns = gym.make("CartPole-v1"), np.random.default_rng(0), []
    net = policy().module
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    models = {"policy": {"factory": "served_policy:policy", "publish": "double_buffer"}}
    with served_models(models, address) as served, connect(served.address) as server:
        name = served.names["policy"]  # on a shared server, choose a name that is not in use
        model, publisher = server.model(name), server.publisher(name)
        while len(returns) < episodes:
            publisher.publish(net)
            observations, actions, ahead = [], [], []
            for _ in range(8):
                observation, over, rewards = env.reset(seed=len(returns))[0], False, []
                while not over:
                    action = int(np.argmax(model(observation) + rng.gumbel(size=2)))  # drawn from their softmax
                    observations.append(observation)
                    actions.append(action)
                    observation, reward, terminated, truncated, _ = env.step(action)
                    rewards.append(float(reward))
                    over = terminated or truncated
                returns.append(sum(rewards))
                ahead += [sum(rewards[t:]) for t in range(len(rewards))]
            gain = torch.tensor(ahead)
            gain = (gain - gain.mean()) / gain.std()
            chosen = net(torch.tensor(np.array(observations))).log_softmax(1)[range(len(actions)), actions]
            optimizer.zero_grad()
            (-chosen * gain).mean().backward()
            optimizer.step()
    print(f"mean return: first 20 episodes {np.mean(returns[:20]):.1f}, last 20 {np.mean(returns[-20:]):.1f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=400)
    parser.add_argument("--server", help="address of one that runs; without it a private one is started")
    arguments = parser.parse_args()
    main(arguments.episodes, arguments.server)
