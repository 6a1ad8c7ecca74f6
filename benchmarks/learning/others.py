"""Other libraries at the same tasks; it is run by the Python that has them: ``python -m benchmarks.learning.others``.

It needs no package of ours. Libraries with Stable-Baselines3's interface are here: itself, and SBX (the same algorithms
in JAX). A new one is a module that has their classes, in `LIBRARIES`. A recurrent task needs sb3-contrib besides.
CleanRL's scripts are in `cleanrl`, Sample Factory is in `sample_factory`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module, metadata
from typing import Any

from benchmarks.learning import cleanrl, sample_factory
from benchmarks.learning.tasks import TASKS, Clock, Task, evaluation_seeds

# Their modules, by side.
LIBRARIES = {"sb3": "stable_baselines3", "sbx": "sbx", "cleanrl": "cleanrl", "samplefactory": "sample_factory"}
_PACKAGES = {"sb3": ("stable_baselines3", "torch"), "sbx": ("sbx-rl", "jax")}


def run(side: str, task: Task, seed: int, episodes: int) -> dict[str, Any]:
    """Train; returns what `Clock.told` does."""
    import gymnasium
    import numpy as np
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.noise import NormalActionNoise

    library = import_module(LIBRARIES[side])
    if side == "sb3":
        import torch

        torch.set_num_threads(1)
    given = {name: value for name, value in task.settings.items() if name != "recurrent"}  # which the class says
    told = {name: _falling(value) if isinstance(value, str) else value for name, value in given.items()}
    if "hidden" in told:
        told["policy_kwargs"] = {"net_arch": told.pop("hidden")}
    kind, policy = getattr(library, task.algorithm.upper()), "CnnPolicy" if task.pictures else "MlpPolicy"
    if task.recurrent:
        kind, policy = import_module("sb3_contrib").RecurrentPPO, "MlpLstmPolicy"
        told["policy_kwargs"]["lstm_hidden_size"] = told.pop("hidden_size")
    module, colon, world = task.env.partition(":")
    made = getattr(import_module(module), world) if colon else partial(gymnasium.make, task.env)
    if task.action_noise is not None:
        actions = made().action_space.shape[0]
        told["action_noise"] = NormalActionNoise(np.zeros(actions), np.full(actions, task.action_noise))
    seeds, env = evaluation_seeds(seed, episodes), made()

    class Evaluations(BaseCallback):
        def _on_step(self) -> bool:
            if task.algorithm != "ppo":
                self.play_if_due()
            return True

        def _on_rollout_start(self) -> None:
            if task.algorithm == "ppo":  # which learned from the rollout before it
                self.play_if_due()

        def play_if_due(self) -> None:
            if len(clock.evaluations) < self.num_timesteps // (task.steps // task.evaluations):
                self.play()

        def play(self) -> None:
            with clock.evaluation():
                total = 0.0
                for each in seeds if task.score is not None else ():
                    seen, over, state, begins = env.reset(seed=each)[0], False, None, np.ones(1, bool)
                    while not over:
                        action, state = self.model.predict(seen, state, begins, deterministic=True)
                        seen, reward, terminated, truncated, _ = env.step(action)
                        total += float(reward)
                        over, begins = terminated or truncated, np.zeros(1, bool)
            clock.evaluations.append(total / len(seeds))

    if side == "sb3":
        told["device"] = "cpu"
    clock = Clock()
    model = kind(policy, make_vec_env(made, task.envs, seed=seed), seed=seed, **told)
    callback = Evaluations()
    model.learn(task.steps, callback)
    callback.play_if_due()
    return {**clock.told(task), "versions": {name: metadata.version(name) for name in _PACKAGES[side]}}


def _falling(schedule: str) -> Callable[[float], float]:
    """Stable-Baselines3's form of a linear schedule, `lin_VALUE`: a function of what remains of the run."""
    kind, _, value = schedule.partition("_")
    if kind != "lin":
        raise ValueError(f"expected lin_VALUE, got {schedule!r}")
    return lambda remaining: float(value) * remaining


if __name__ == "__main__":
    side, name, *numbers = sys.argv[1:]
    seed, core, episodes, steps = map(int, numbers)
    os.sched_setaffinity(0, {core})  # JAX has as many threads as there are cores
    train = {"cleanrl": cleanrl.run, "samplefactory": sample_factory.run}.get(side, partial(run, side))
    print(json.dumps(train(TASKS[name].short(steps), seed, episodes)))
