"""Do our PPO, DQN, TD3 and SAC learn as Stable-Baselines3's, and recurrent PPO as sb3-contrib's?

Same settings, same number of env steps, both sides.

python -m benchmarks.learning                                  # every task, three seeds, both sides; hours on one core
python -m benchmarks.learning --tasks pendulum-sac --seeds 5   # one task; existing results are not run again
python -m benchmarks.learning --table                          # the table of existing results

A recurrent task needs sb3-contrib besides (pip install sb3-contrib).

Each run is a process of its own with one thread. It is evaluated ten times, by the same 20 episodes without
exploration; the results are the last evaluation, and the mean of all ten (how soon it learned). Results go to
results/learning.csv, the table to results/learning.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.kept_runs import keep, known

_RESULTS = Path(__file__).parent / "results"
_RUNS = _RESULTS / "learning.csv"
_EVALUATIONS, _EPISODES = 10, 20
_OURS, _THEIRS = "jurybox", "sb3"


@dataclass(frozen=True)
class Task:
    """The settings of both sides: they have the same names, except `hidden` (net_arch)."""

    env: str
    algorithm: str
    steps: int
    settings: dict[str, Any]
    envs: int = 1
    action_noise: float | None = None

    @property
    def recurrent(self) -> bool:
        return "recurrent" in self.settings


# CartPole's settings are those of the RL Baselines3 Zoo, without its schedules. Pendulum's too, with smaller networks
# and batches, so that three seeds of both sides are done in half an hour of one core.
_SMALL: dict[str, Any] = {"learning_rate": 1e-3, "batch_size": 128, "hidden": [64, 64]}
TASKS = {
    "cartpole-ppo": Task(
        "CartPole-v1",
        "ppo",
        196 * 256,
        {"n_steps": 32, "batch_size": 256, "gae_lambda": 0.8, "gamma": 0.98, "n_epochs": 20, "learning_rate": 1e-3},
        envs=8,
    ),
    "cartpole-dqn": Task(
        "CartPole-v1",
        "dqn",
        50_000,
        {
            "learning_rate": 2.3e-3,
            "batch_size": 64,
            "buffer_size": 100_000,
            "learning_starts": 1000,
            "gamma": 0.99,
            "target_update_interval": 10,
            "train_freq": 256,
            "gradient_steps": 128,
            "exploration_fraction": 0.16,
            "exploration_final_eps": 0.04,
            "hidden": [256, 256],
        },
    ),
    "pendulum-sac": Task("Pendulum-v1", "sac", 10_000, _SMALL),
    "pendulum-td3": Task("Pendulum-v1", "td3", 10_000, {**_SMALL, "gamma": 0.98}, action_noise=0.1),
    "pendulum-ppo": Task(
        "Pendulum-v1",
        "ppo",
        24 * 4096,
        {"n_steps": 1024, "gamma": 0.9, "learning_rate": 1e-3, "gae_lambda": 0.95},
        envs=4,
    ),
    # Those of the Zoo for CartPole without velocities, with half the epochs and steps, tanh and orthogonal weights.
    "cartpole-positions-lstm": Task(
        "benchmarks.learning.worlds:positions",
        "ppo",
        160 * 256,
        {
            "recurrent": "lstm",
            "hidden_size": 64,
            "hidden": [64],
            "n_steps": 32,
            "batch_size": 256,
            "gae_lambda": 0.8,
            "gamma": 0.98,
            "n_epochs": 10,
            "learning_rate": "lin_1e-3",
            "clip_range": "lin_0.2",
        },
        envs=8,
    ),
}


def ours(task: Task, seed: int) -> list[float]:
    """Mean returns of the evaluations."""
    from jurybox.training.run_folder import read_metrics
    from jurybox.training.trainings.gym import GymTraining, train

    noise = {} if task.action_noise is None else {"action_noise": task.action_noise}
    settings = GymTraining.checked(
        {
            "env": task.env,
            "algorithm": task.algorithm,
            "steps": task.steps,
            "envs": task.envs,
            "seed": seed,
            "evaluate_every": task.steps // _EVALUATIONS,
            "evaluation_episodes": _EPISODES,
            **task.settings,
            **noise,
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        train(settings, Path(folder) / "run", serial=True)
        rows = read_metrics(Path(folder) / "run" / "metrics.csv")
    return [row["eval_return"] for row in rows if "eval_return" in row][:_EVALUATIONS]


def theirs(task: Task, seed: int) -> list[float]:
    """The same of Stable-Baselines3, or of sb3-contrib."""
    import gymnasium
    import stable_baselines3
    import torch
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.noise import NormalActionNoise

    from benchmarks.learning import worlds

    torch.set_num_threads(1)
    told = {name: _falling(value) if isinstance(value, str) else value for name, value in task.settings.items()}
    if "hidden" in told:
        told["policy_kwargs"] = {"net_arch": told.pop("hidden")}
    kind, policy = getattr(stable_baselines3, task.algorithm.upper()), "MlpPolicy"
    if task.recurrent:
        from sb3_contrib import RecurrentPPO

        del told["recurrent"]
        told["policy_kwargs"]["lstm_hidden_size"] = told.pop("hidden_size")
        kind, policy = RecurrentPPO, "MlpLstmPolicy"
    made = getattr(worlds, task.env.rpartition(":")[2]) if ":" in task.env else partial(gymnasium.make, task.env)
    if task.action_noise is not None:
        actions = made().action_space.shape[0]
        told["action_noise"] = NormalActionNoise(np.zeros(actions), np.full(actions, task.action_noise))
    found: list[float] = []
    seeds = np.random.default_rng((1_000_003, seed)).integers(2**31, size=_EPISODES).tolist()
    env = made()

    class Evaluations(BaseCallback):
        def _on_step(self) -> bool:
            every = task.steps // _EVALUATIONS
            if self.num_timesteps // every > (self.num_timesteps - task.envs) // every:
                found.append(self._play())
            return True

        def _play(self) -> float:
            total = 0.0
            for each in seeds:
                seen, over, state, begins = env.reset(seed=each)[0], False, None, np.ones(1, bool)
                while not over:
                    action, state = self.model.predict(seen, state, begins, deterministic=True)
                    seen, reward, terminated, truncated, _ = env.step(action)
                    total += float(reward)
                    over, begins = terminated or truncated, np.zeros(1, bool)
            return total / len(seeds)

    model = kind(policy, make_vec_env(made, task.envs, seed=seed), seed=seed, device="cpu", **told)
    callback = Evaluations()
    model.learn(task.steps, callback)
    if task.algorithm == "ppo":  # it learns once more after its last step
        found[-1] = callback._play()
    return found[:_EVALUATIONS]


def _falling(schedule: str) -> Callable[[float], float]:
    """A schedule as a function of what remains of the run, as Stable-Baselines3 wants it."""
    from jurybox.training.algorithms.schedules import at

    return lambda remaining: at(schedule, remaining)


def one(name: str, side: str, seed: int) -> None:
    """A run, in this process; prints its evaluations and how long it took."""
    began, used = time.monotonic(), time.process_time()
    found = (ours if side == _OURS else theirs)(TASKS[name], seed)
    took = {"seconds": time.monotonic() - began, "cpu_seconds": time.process_time() - used}
    print(json.dumps({"evaluations": found, **took}))


def run(names: list[str], seeds: int, jobs: int) -> None:
    """Every run that is not there yet."""
    done = {(row["task"], row["side"], int(row["seed"])) for row in known(_RUNS)}
    wanted = [(name, side, seed) for seed in range(seeds) for name in names for side in (_OURS, _THEIRS)]

    def carry_out(what: tuple[str, str, int]) -> None:
        name, side, seed = what
        command = [sys.executable, "-m", "benchmarks.learning", "--one", name, side, str(seed)]
        limits = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        ended = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **limits}, check=False)
        if ended.returncode:
            print(f"{what}: {ended.stderr[-2000:]}", flush=True)
            return
        said = json.loads(ended.stdout.splitlines()[-1])
        row = {
            "task": name,
            "side": side,
            "seed": seed,
            "cpu_seconds": f"{said['cpu_seconds']:.1f}",
            **{f"evaluation_{number}": f"{value:.3f}" for number, value in enumerate(said["evaluations"], 1)},
        }
        keep(_RUNS, row)
        print(f"{name} {side} seed {seed}: {said['evaluations'][-1]:.1f}, {said['cpu_seconds']:.0f} s", flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(carry_out, [each for each in wanted if each not in done]))


def table() -> str:
    """Means over the seeds and of the differences by seed, with 95 % intervals (Student's t)."""
    from scipy import stats

    lines = [
        "| task | env steps | seeds | last: ours | SB3's | ours - SB3's | all: ours | SB3's | ours - SB3's "
        "| CPU s a run: ours | SB3's |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    rows = known(_RUNS)

    def told(values: np.ndarray[Any, Any]) -> str:
        half = stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / len(values) ** 0.5
        return f"{values.mean():.1f} ± {half:.1f}"

    def difference(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> str:
        # With the same seed both sides are evaluated by the same episodes, whose possible returns differ.
        pairs = a - b
        half = stats.t.ppf(0.975, len(pairs) - 1) * pairs.std(ddof=1) / len(pairs) ** 0.5
        return f"{pairs.mean():+.1f} ± {half:.1f}"

    for name, task in TASKS.items():
        sides = []
        for side in (_OURS, _THEIRS):
            of = [row for row in rows if row["task"] == name and row["side"] == side]
            of.sort(key=lambda row: int(row["seed"]))
            curves = np.array([[float(row[f"evaluation_{n}"]) for n in range(1, _EVALUATIONS + 1)] for row in of])
            sides.append((curves, np.array([float(row["cpu_seconds"]) for row in of])))
        (own, own_cpu), (other, other_cpu) = sides
        if len(own) != len(other) or len(own) < 2:
            continue
        cells = [name, f"{task.steps:,}", str(len(own))]
        for a, b in ((own[:, -1], other[:, -1]), (own.mean(1), other.mean(1))):
            cells += [told(a), told(b), difference(a, b)]
        lines.append("| " + " | ".join([*cells, f"{own_cpu.mean():.0f}", f"{other_cpu.mean():.0f}"]) + " |")
    versions = ", ".join(f"{each} {metadata.version(each)}" for each in ("stable_baselines3", "torch", "gymnasium"))
    lines += ["", f"{date.today()}, {versions}; ±: 95 %."]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--table", action="store_true", help="of what is there; run nothing")
    parser.add_argument("--one", nargs=3, metavar=("TASK", "SIDE", "SEED"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        one(given.one[0], given.one[1], int(given.one[2]))
        return
    _RESULTS.mkdir(exist_ok=True)
    if not given.table:
        run(given.tasks, given.seeds, given.jobs)
    text = table()
    (_RESULTS / "learning.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
