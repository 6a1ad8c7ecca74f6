"""The looking-glass: left and right of the rink swapped, which the game does not notice."""

from __future__ import annotations

import numpy as np

# y, angle, velocity in y and angular velocity of both players; y and velocity in y of the puck.
MIRROR_OBSERVATION = np.array([1, -1, -1, 1, -1, -1] * 2 + [1, -1, 1, -1, 1, 1], np.float32)
# Force in y and torque.
MIRROR_ACTION = np.array([1, -1, -1, 1], np.float32)


def mirrors(observation_size: int, action_size: int) -> tuple[np.ndarray, np.ndarray]:
    """What observations and actions are multiplied by; of the sizes without the puck's hold too."""
    return MIRROR_OBSERVATION[:observation_size], MIRROR_ACTION[:action_size]
