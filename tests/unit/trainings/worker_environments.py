"""Environments for the workers' tests: importable, so that a worker can make them."""

import os
import signal
import sys
import time

import gymnasium
import numpy as np
from gymnasium import spaces


class Counting(gymnasium.Env):
    """Observes its seed and the number of steps; episodes of three steps."""

    observation_space = spaces.Box(-1e9, 1e9, (2,), np.float64)
    action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, name="", fail_at=None):
        self.name, self.fail_at = name, fail_at
        self.steps = 0
        self.given_seed = -1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        self.given_seed = seed if seed is not None else self.given_seed
        return self.seen(), {}

    def step(self, action):
        self.steps += 1
        if self.steps == self.fail_at:
            raise ValueError("the third wheel came off")
        if action[0] > 0.5:
            time.sleep(60)  # as one that waits for a server
        if action[0] < 0:
            os._exit(7)
        return self.seen(), 1.0, self.steps == 3, False, {"steps": self.steps}

    def seen(self):
        return np.array([self.given_seed, self.steps], dtype=np.float64)

    def about_the_process(self):
        import cv2

        return {
            "torch": "torch" in sys.modules,
            "limits": {name: os.environ[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")},
            "opencv_threads": cv2.getNumThreads(),
            "interrupt_ignored": signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
        }


class WithOpenCV(Counting):
    def __init__(self):
        import cv2

        super().__init__()
        cv2.setNumThreads(4)


def broken():
    raise RuntimeError("no such camera")
