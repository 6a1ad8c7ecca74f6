"""PPO with an LSTM in an environment that needs a memory; then its policy on a server, a session for each episode.

Only the first observation shows the colour of the door that is at the end of the corridor.
"""

import argparse
import tempfile
from pathlib import Path

import gymnasium
import numpy as np
from gymnasium import spaces

from jurybox.client import connect
from jurybox.server.models import ServedModel
from jurybox.training.policies import Policy, choose
from jurybox.training.runtime import served_models
from jurybox.training.trainings.gym import GymTraining, train

LENGTH, DOORS = 8, 3
EPISODES = 300


class Corridor(gymnasium.Env):
    """The colour, one-hot, in the first step, and how far it is; the last action has to name the colour."""

    observation_space, action_space = spaces.Box(0, 1, (DOORS + 1,)), spaces.Discrete(DOORS)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.colour, self.place = int(self.np_random.integers(DOORS)), 0
        return self.see(), {}

    def see(self):
        colour = np.arange(DOORS) == self.colour if self.place == 0 else np.zeros(DOORS)
        return np.float32([*colour, self.place / LENGTH])

    def step(self, action):
        self.place += 1
        over = self.place == LENGTH
        return self.see(), float(over and action == self.colour), over, False, {}


def policy(run: str) -> ServedModel:
    """What the server loads: the best policy of the run's folder."""
    return Policy(choose(Path(run))).served


def right_doors(sessions, forgets: bool) -> float:
    """The share of episodes that end at the right door; all are played side by side, each in a session."""
    envs = [Corridor() for _ in range(EPISODES)]
    seen = np.stack([env.reset(seed=number)[0] for number, env in enumerate(envs)])
    for t in range(LENGTH):
        outputs = sessions.infer(seen, reset=np.full(EPISODES, t == 0 or forgets))
        steps = [env.step(int(logits.argmax())) for env, logits in zip(envs, outputs["logits"], strict=True)]
        seen = np.stack([step[0] for step in steps])
    return float(np.mean([step[1] for step in steps]))


def main(steps: int, address: str | None) -> None:
    network = {"recurrent": "lstm", "hidden_size": 32, "hidden": (32,), "learning_rate": 3e-3, "n_epochs": 8}
    rollouts = {"envs": 8, "n_steps": 64, "batch_size": 256, "evaluate_every": 4096, "evaluation_episodes": 30}
    settings = GymTraining(env="recurrent_policy:Corridor", steps=steps, **network, **rollouts)
    with tempfile.TemporaryDirectory() as run:
        train(settings, Path(run), serial=True)
        models = {"recurrent": {"factory": "recurrent_policy:policy", "args": {"run": run}, "rows": 2 * EPISODES}}
        with served_models(models, address) as served, connect(served.address) as server:
            model = server.model(served.names["recurrent"])
            with model.sessions(EPISODES) as sessions:
                forgetful, remembering = right_doors(sessions, forgets=True), right_doors(sessions, forgets=False)
    print(f"right doors: made to forget at every step {forgetful:.0%}, with its memory {remembering:.0%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=24_000)
    parser.add_argument("--server", help="address of one that runs; without it a private one is started")
    arguments = parser.parse_args()
    main(arguments.steps, arguments.server)
