"""TD3 in one file, as CleanRL has it, on `SharedReplayBuffer`: transitions in shared memory."""

import argparse

import gymnasium as gym
import numpy as np
import torch
from torch import nn
from torch.nn.functional import mse_loss

from jurybox.training.replay.sb3 import SharedReplayBuffer

GAMMA, TAU, BATCH, START, POLICY_DELAY = 0.99, 0.005, 256, 1000, 2


def network(inputs: int, outputs: int, *last: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, outputs), *last)


def main(steps: int, seed: int = 1) -> None:
    torch.manual_seed(seed)
    rng, env = np.random.default_rng(seed), gym.make("Pendulum-v1")
    seen, acts, limit = env.observation_space.shape[0], env.action_space.shape[0], float(env.action_space.high[0])
    actor, actor_target = network(seen, acts, nn.Tanh()), network(seen, acts, nn.Tanh())
    critics, critic_targets = ([network(seen + acts, 1) for _ in range(2)] for _ in range(2))
    pairs = list(zip([actor, *critics], [actor_target, *critic_targets], strict=True))
    for net, target in pairs:
        target.load_state_dict(net.state_dict())
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=1e-3)
    critic_optimizer = torch.optim.Adam([p for critic in critics for p in critic.parameters()], lr=1e-3)
    replay = SharedReplayBuffer(100_000, env.observation_space, env.action_space, device="cpu", seed=seed)

    returns, total = [], 0.0
    observation, _ = env.reset(seed=seed)
    for step in range(steps):
        if step < START:
            action = rng.uniform(-limit, limit, acts)
        else:
            with torch.no_grad():
                action = actor(torch.as_tensor(observation)).numpy() * limit
            action = np.clip(action + rng.normal(0, 0.1 * limit, acts), -limit, limit)
        following, reward, terminated, truncated, _ = env.step(action.astype(np.float32))
        replay.add(observation, following, action, np.array([reward]), np.array([terminated]), [{}])
        observation, total = following, total + float(reward)
        if terminated or truncated:
            returns.append(total)
            observation, total = env.reset()[0], 0.0
        if step < START:
            continue
        rows = replay.sample(BATCH)
        with torch.no_grad():
            noise = (torch.randn_like(rows.actions) * 0.2).clamp(-0.5, 0.5)
            best = (actor_target(rows.next_observations) + noise).clamp(-1, 1) * limit
            value = torch.min(*(target(torch.cat([rows.next_observations, best], 1)) for target in critic_targets))
            wanted = rows.rewards + (1 - rows.dones) * GAMMA * value
        loss = sum(mse_loss(critic(torch.cat([rows.observations, rows.actions], 1)), wanted) for critic in critics)
        critic_optimizer.zero_grad()
        loss.backward()
        critic_optimizer.step()
        if step % POLICY_DELAY == 0:
            actor_loss = -critics[0](torch.cat([rows.observations, actor(rows.observations) * limit], 1)).mean()
            actor_optimizer.zero_grad()
            actor_loss.backward()
            actor_optimizer.step()
            with torch.no_grad():
                for net, target in pairs:
                    for mine, theirs in zip(net.parameters(), target.parameters(), strict=True):
                        theirs.lerp_(mine, TAU)
    print(f"{len(replay.replay)} transitions in the replay {replay.name}")
    print(f"mean return: first 5 episodes {np.mean(returns[:5]):.0f}, last 5 {np.mean(returns[-5:]):.0f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=8000)
    main(parser.parse_args().steps)
