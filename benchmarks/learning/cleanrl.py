"""CleanRL's scripts at our tasks, as they are; run by a Python that has a checkout of CleanRL on its path.

What a script computes is its own; its settings are given as its flags, its writer for TensorBoard is replaced by one
that evaluates, and its own metrics are dropped. Its networks are fixed: PPO's have 64 x 64 units, SAC's 256 x 256, and
that for Atari has the convolutions of the DQN paper and 512 units, as ours. Its Pong is its own: lives are episodes,
and pictures are made small before they are made gray. Needed besides are ale-py, for Pong, and MuJoCo.
"""

from __future__ import annotations

import io
import runpy
import sys
from contextlib import redirect_stdout
from importlib import metadata
from importlib.util import find_spec
from typing import Any
from unittest import mock

from benchmarks.learning.tasks import Clock, Task, evaluation_seeds, register_atari

_UNITS = {"ppo": [64, 64], "sac": [256, 256]}
_SCRIPTS = {"ppo": "cleanrl.ppo", "sac": "cleanrl.sac_continuous_action"}
_ATARI = "cleanrl.ppo_atari"


def flags(task: Task, seed: int) -> list[str]:
    """Return a script's flags for a task.

    Raises:
        ValueError: no script has its algorithm or such an environment, or the script's networks are others.
    """
    told = dict(task.settings)
    units = told.pop("hidden", [64, 64] if task.algorithm == "ppo" else [256, 256])
    if task.algorithm not in _UNITS or units != _UNITS[task.algorithm]:
        raise ValueError(f"{task.algorithm} of {units} units: expected one of {_UNITS}, which CleanRL's scripts have")
    if ":" in task.env and not (task.pictures and task.algorithm == "ppo"):
        raise ValueError(f"{task.algorithm} of {task.env}: expected a registered environment, or Pong with PPO")
    found = ["--no-cuda", f"--seed={seed}", f"--env-id={_named(task)}", f"--total-timesteps={task.steps}"]
    found += [f"--num-envs={task.envs}", f"--gamma={told.pop('gamma', 0.99)}"]
    rate, batch = told.pop("learning_rate", 3e-4), told.pop("batch_size", 64 if task.algorithm == "ppo" else 256)
    if task.algorithm == "ppo":
        steps = told.pop("n_steps")
        found += [
            "--no-anneal-lr",
            "--no-clip-vloss",
            f"--ent-coef={told.pop('ent_coef', 0.0)}",
            f"--clip-coef={told.pop('clip_range', 0.2)}",
            f"--learning-rate={rate}",
            f"--num-steps={steps}",
        ]
        found += [f"--num-minibatches={steps * task.envs // batch}", f"--update-epochs={told.pop('n_epochs', 10)}"]
        found += [f"--gae-lambda={told.pop('gae_lambda', 0.95)}"]
    else:
        found += [f"--policy-lr={rate}", f"--q-lr={rate}", f"--batch-size={batch}", "--policy-frequency=1"]
        found += ["--learning-starts=100"]
    if told:
        raise ValueError(f"settings {sorted(told)}: expected none that CleanRL's {task.algorithm} has no flag for")
    return found


def _named(task: Task) -> str:
    """The task's environment in the Gymnasium that CleanRL's scripts need: 0.29 has no v5 of MuJoCo's."""
    return "PongNoFrameskip-v4" if task.pictures else task.env.replace("Cheetah-v5", "Cheetah-v4")


def run(task: Task, seed: int, episodes: int) -> dict[str, Any]:
    """Train; returns what `Clock.told` does."""
    import gymnasium
    import torch
    import torch.utils.tensorboard

    given, named = flags(task, seed), _ATARI if task.pictures else _SCRIPTS[task.algorithm]
    torch.set_num_threads(1)
    if task.pictures:
        register_atari()
    seeds, env, every = evaluation_seeds(seed, episodes), gymnasium.make(_named(task)), task.steps // task.evaluations
    script = find_spec(named)
    if script is None or script.origin is None:
        raise ModuleNotFoundError(f"no {named}: put a checkout of CleanRL on this Python's path")
    names: dict[str, Any] = {}

    def chosen(seen: Any) -> Any:
        rows = torch.Tensor(seen)[None]
        with torch.no_grad():
            if task.algorithm == "ppo":
                return int(names["agent"].actor(rows).argmax())
            return names["actor"].get_action(rows)[2][0].numpy()

    def play() -> None:
        with clock.evaluation():
            total = 0.0
            for each in seeds if task.score is not None else ():
                seen, over = env.reset(seed=each)[0], False
                while not over:
                    seen, reward, terminated, truncated, _ = env.step(chosen(seen))
                    total += float(reward)
                    over = terminated or truncated
        clock.evaluations.append(total / len(seeds))

    class Writer:
        def __init__(self, folder: str) -> None: ...

        def add_text(self, name: str, text: str) -> None: ...

        def add_scalar(self, name: str, value: Any, step: int) -> None:
            if name == "charts/SPS" and len(clock.evaluations) < min(step // every, task.evaluations - 1):
                names.update(sys._getframe(1).f_globals)
                play()

        def close(self) -> None:
            names.update(sys._getframe(1).f_globals)

    torch.utils.tensorboard.SummaryWriter = Writer  # type: ignore[assignment, misc]
    clock = Clock()
    with mock.patch.object(sys, "argv", [script.origin, *given]), redirect_stdout(io.StringIO()):
        runpy.run_path(script.origin, run_name="__main__")
        play()
    versions = {name: metadata.version(name) for name in ("torch", "gymnasium")}
    return {**clock.told(task), "versions": {"CleanRL's": "scripts", **versions}}
