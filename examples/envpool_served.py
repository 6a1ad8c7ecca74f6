"""EnvPool's environments against a served policy: 64 CartPoles in each request, taught by A2C.  pip install envpool"""

import argparse
import time

import envpool
import numpy as np
import torch
from torch import nn

from jurybox.client import connect
from jurybox.protocol import TensorSpec
from jurybox.server.models import ServedModel
from jurybox.training.runtime import served_models

ENVS, STEPS, GAMMA = 64, 16, 0.98


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
        self.critic = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.actor(observation), self.critic(observation).squeeze(-1)


def policy() -> ServedModel:
    outputs = {"logits": TensorSpec("float32", (2,)), "value": TensorSpec("float32")}
    return ServedModel(ActorCritic(), {"observation": TensorSpec("float32", (4,))}, outputs)


def main(updates: int, address: str | None) -> None:
    torch.manual_seed(0)
    env = envpool.make("CartPole-v1", env_type="gymnasium", num_envs=ENVS, seed=0)
    observation, over, rng, running, returns = env.reset()[0], np.zeros(ENVS, bool), np.random.default_rng(0), 0.0, []
    net = policy().module
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    models = {"policy": {"factory": "envpool_served:policy", "publish": "double_buffer", "max_batch": ENVS}}
    with served_models(models, address) as served, connect(served.address) as server:
        name, began = served.names["policy"], time.monotonic()
        model, publisher = server.model(name, rows=ENVS), server.publisher(name)
        for _ in range(updates):
            publisher.publish(net)
            rollout = []
            for _ in range(STEPS):
                answer = model.infer(observation)
                action = (answer["logits"] + rng.gumbel(size=(ENVS, 2))).argmax(1)  # drawn from their softmax
                came, reward, terminated, truncated, _ = env.step(action)
                # In the step after an episode's last one EnvPool begins the next one: not learned from.
                rollout.append((observation, action, reward, terminated, over, answer["value"]))
                running = np.where(over, 0.0, running + reward)
                observation, over = came, terminated | truncated
                returns += running[over].tolist()
            seen, action, reward, terminated, begins, value = map(np.array, zip(*rollout, strict=True))
            ahead, targets = model.infer(observation)["value"], np.zeros_like(value)
            for t in reversed(range(STEPS)):
                ahead = np.where(begins[t], value[t], reward[t] + GAMMA * ~terminated[t] * ahead)
                targets[t] = ahead
            kept, targets = torch.from_numpy(~begins), torch.from_numpy(targets)
            logits, value = net(torch.from_numpy(seen))
            chosen = torch.distributions.Categorical(logits=logits)
            loss = -(chosen.log_prob(torch.from_numpy(action)) * (targets - value.detach()))[kept].mean()
            loss += 0.005 * (targets - value)[kept].square().mean() - 0.01 * chosen.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"{updates * STEPS * ENVS / (time.monotonic() - began):.0f} env steps a second")
    print(f"mean return: first 100 episodes {np.mean(returns[:100]):.1f}, last 100 {np.mean(returns[-100:]):.1f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=800)
    parser.add_argument("--server", help="address of one that runs; without it a private one is started")
    arguments = parser.parse_args()
    main(arguments.updates, arguments.server)
