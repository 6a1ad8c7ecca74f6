"""The task: swing a pendulum up and hold it there, seen by a camera. Gymnasium's Pendulum-v1, and a scripted expert.

The motor is too weak to lift the pendulum at once: it has to be swung back and forth. The policy sees a picture of 32 x
32 pixels and how fast the joint turns; where the pendulum is, it must read from the picture.
"""

import gymnasium as gym
import numpy as np

SIDE, STEPS = 32, 200
_ROWS, _COLUMNS = np.mgrid[:SIDE, :SIDE].astype(np.float32) - (SIDE - 1) / 2


class SwingUp(gym.ObservationWrapper):
    """Pendulum-v1 with observations of {"image": uint8 (32, 32, 3), "state": float32 (1,)}; actions in [-1, 1]."""

    def __init__(self):
        super().__init__(gym.make("Pendulum-v1"))
        self.observation_space = gym.spaces.Dict(
            image=gym.spaces.Box(0, 255, (SIDE, SIDE, 3), np.uint8),
            state=gym.spaces.Box(-1.0, 1.0, (1,), np.float32),
        )
        self.held = 0  # steps, the last ones, for which it has been up

    def observation(self, observation):
        cosine, sine, speed = observation
        along = np.clip(-_ROWS * cosine - _COLUMNS * sine, 0, 12)  # of the rod, whose end is 12 pixels from the joint
        away = np.hypot(_ROWS + along * cosine, _COLUMNS + along * sine)
        rod = 255 * np.clip(1.6 - away, 0, 1)
        image = np.stack([rod, rod, 255 - rod], axis=-1).astype(np.uint8)
        return {"image": image, "state": np.array([speed / 8], np.float32)}

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
    """The action of someone who knows the angle: pump energy until it is enough, then balance."""
    angle, speed = env.angle, env.unwrapped.state[1]
    energy = speed**2 / 6 + 5 * np.cos(angle)  # 5 where it stands upright and still
    if abs(angle) < 0.5 and abs(speed) < 3:
        torque = -(10 * angle + 2 * speed)
    else:
        torque = 2 * (5.2 - energy) * np.tanh(4 * speed + 0.01)
    return np.clip(np.array([torque / 2], np.float32), -1, 1)
