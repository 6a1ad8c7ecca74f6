"""The task: swing a pendulum up and hold it there. Gymnasium's Pendulum-v1, and a scripted expert.

The motor is too weak to lift the pendulum at once: it has to be swung back and forth, and caught.
"""

import gymnasium as gym
import numpy as np

STEPS = 200


class SwingUp(gym.ObservationWrapper):
    """Pendulum-v1 with observations of {"state": float32 (3,)} (cosine, sine, speed) and actions in [-1, 1]."""

    def __init__(self):
        super().__init__(gym.make("Pendulum-v1"))
        self.observation_space = gym.spaces.Dict(state=gym.spaces.Box(-1.0, 1.0, (3,), np.float32))
        self.held = 0  # steps, the last ones, for which it has been up

    def observation(self, observation):
        return {"state": np.float32(observation / [1, 1, 8])}

    def reset(self, *, seed=None, options=None):
        self.held = 0
        return super().reset(seed=seed, options=options)

    def step(self, action):
        result = super().step(2 * np.clip(action, -1, 1))
        self.held = self.held + 1 if abs(self.angle) < 0.2 else 0
        return result

    @property
    def angle(self):
        """From upright, in radians."""
        return (self.unwrapped.state[0] + np.pi) % (2 * np.pi) - np.pi

    @property
    def success(self):
        """Whether it has been up for the last two and a half seconds, at an episode's end."""
        return self.held >= 50


def expert(env):
    """The expert's action: it adds energy until there is enough, and then balances."""
    angle, speed = env.angle, env.unwrapped.state[1]
    energy = speed**2 / 6 + 5 * np.cos(angle)  # 5 if it is upright and still
    if abs(angle) < 0.5 and abs(speed) < 3:
        torque = -(10 * angle + 2 * speed)
    else:
        torque = 2 * (5.2 - energy) * np.tanh(4 * speed + 0.01)
    return np.clip(np.array([torque / 2], np.float32), -1, 1)
