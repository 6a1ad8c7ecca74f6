"""Stable-Baselines3's PPO with a reward from a juror: it learns to correct photographs.

The environment has no reward of its own. A juror on the server scores each corrected photograph, for all environments
in one request.
"""

import argparse

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from skimage import data
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env

from jurybox.client.rewards import Juror, sb3_reward
from jurybox.training.runtime import served_models

SIDE = 36
PHOTOS = [data.astronaut(), data.coffee(), data.rocket(), data.chelsea()]


class Retouch(gym.Env):
    """One step: a badly exposed crop of a photograph comes in, the action is gain, offset and saturation."""

    observation_space = spaces.Box(0, 255, (SIDE, SIDE, 3), np.uint8)
    action_space = spaces.Box(-1, 1, (3,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        photo = PHOTOS[self.np_random.integers(len(PHOTOS))]
        top, left = (self.np_random.integers(side - 7 * SIDE) for side in photo.shape[:2])
        crop = photo[top : top + 7 * SIDE, left : left + 7 * SIDE] / 255
        crop = crop.reshape(SIDE, 7, SIDE, 7, 3).mean((1, 3))
        self.photo = crop * self.np_random.uniform(0.2, 0.6) + self.np_random.uniform(0.0, 0.2)
        return self.seen(self.photo), {}

    def step(self, action):
        gain, offset, saturation = 2.0 ** (2 * action[0]), action[1] / 2, 2.0 ** action[2]
        grey = self.photo.mean(2, keepdims=True)
        return self.seen((grey + saturation * (self.photo - grey)) * gain + offset), 0.0, True, False, {}

    def seen(self, photo):
        return np.rint(np.clip(photo, 0, 1) * 255).astype(np.uint8)


def mean_score(juror: Juror, act, photos: int = 64) -> float:
    env, edited = Retouch(), []
    for seed in range(photos):
        photo, _ = env.reset(seed=10_000 + seed)
        edited.append(env.step(act(photo))[0])
    return float(np.mean(juror.scores({"observation": edited}, photos)))


def main(steps: int, address: str | None) -> None:
    models = {"photo": {"factory": "jurybox.server.jurors:panel", "args": {"size": SIDE}}}
    with served_models(models, address) as served:
        asks = {"address": served.address, "inputs": {"image": "observation"}, "output": "score"}
        env = sb3_reward(make_vec_env(Retouch, n_envs=16, seed=0), served.names["photo"], **asks)
        model = PPO("CnnPolicy", env, n_steps=16, batch_size=64, n_epochs=4, learning_rate=1e-3, seed=0, device="cpu")
        model.learn(steps)
        juror = Juror(served.names["photo"], **asks)
        before = mean_score(juror, lambda photo: np.zeros(3))
        after = mean_score(juror, lambda photo: model.predict(photo, deterministic=True)[0])
        print(f"mean score of 64 photographs as they came {before:.3f}, as the policy corrected them {after:.3f}")
        juror.close()
        env.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=4096)
    parser.add_argument("--server", help="address of one that runs; without it a private one is started")
    arguments = parser.parse_args()
    main(arguments.steps, arguments.server)
