"""Stable-Baselines3's SAC with our replay: other processes see its rows while it learns, and a file keeps them."""

import argparse
from pathlib import Path

import gymnasium as gym
from stable_baselines3 import SAC
from stable_baselines3.common.evaluation import evaluate_policy

from jurybox.training.replay import Replay
from jurybox.training.replay.sb3 import SharedReplayBuffer


def main(steps: int, file: Path) -> None:
    model = SAC(
        "MlpPolicy",
        "Pendulum-v1",
        replay_buffer_class=SharedReplayBuffer,
        replay_buffer_kwargs={"name": "sb3-sac", "stored_observations": "float16"},  # half the memory
        buffer_size=20_000,
        learning_rate=1e-3,
        policy_kwargs={"net_arch": [64, 64]},
        seed=0,
        device="cpu",
    )
    env = gym.make("Pendulum-v1")
    before, _ = evaluate_policy(model, env, n_eval_episodes=10, warn=False)
    model.learn(steps)
    after, _ = evaluate_policy(model, env, n_eval_episodes=10, warn=False)
    print(f"mean return of 10 episodes: untrained {before:.0f}, after {steps} steps {after:.0f}")

    with Replay.attach("sb3-sac") as rows:  # as any other process of this user may
        batch = rows.sample(1000)
        print(f"a thousand of its {len(rows)} rows: mean reward {batch['reward'].mean():.2f}")
        rows.save(file)
    with Replay.load(file, "sb3-sac-again") as rows:  # and tomorrow, or on another machine
        print(f"{file} holds {len(rows)} rows in {file.stat().st_size / 1024:.0f} KB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--file", type=Path, default=Path("pendulum.jbr"))
    arguments = parser.parse_args()
    main(arguments.steps, arguments.file)
