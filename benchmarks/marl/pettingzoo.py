"""Does `train marl` learn in PettingZoo's own worlds as Stable-Baselines3 does? Same settings, same turns, both sides.

    pip install mpe2
    python -m benchmarks.marl.pettingzoo                                # two worlds, three seeds, both sides
    python -m benchmarks.marl.pettingzoo --worlds spread --seeds 1      # existing results are not run again
    python -m benchmarks.marl.pettingzoo --table                        # the table of existing results

One network acts for all agents of a world. Stable-Baselines3's PPO gets them as so many environments of a vector
environment, ours as a group that shares a learner. The policy is exported (ours) or kept (theirs), and plays 200
episodes in the bare environment with the same loop and seeds; its actions are sampled, as in the training. Runs go to
results/pettingzoo.csv, the table to results/pettingzoo.md.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.kept_runs import keep, known

_RESULTS = Path(__file__).parent / "results"
_RUNS = _RESULTS / "pettingzoo.csv"
_CYCLES, _EPISODES = 25, 200
WORLDS = {"spread": "mpe2.simple_spread_v3", "reference": "mpe2.simple_reference_v3"}
PPO = {"n_steps": 500, "n_epochs": 10, "gae_lambda": 0.95, "clip_range": 0.2, "ent_coef": 0.01}
BATCH, RATE, GAMMA, HIDDEN = 256, 1e-3, 0.95, [128, 128]
SIDES = ("random", "jurybox", "sb3")


def world(name: str) -> Any:
    """PettingZoo's parallel environment."""
    return importlib.import_module(WORLDS[name]).parallel_env(max_cycles=_CYCLES)


def played(name: str, act: Callable[[np.ndarray], np.ndarray]) -> list[float]:
    """Returns of the episodes, the mean of the agents; `act` takes float32 (agents, n) and gives a number for each."""
    env, returns = world(name), []
    for episode in range(_EPISODES):
        seen, _ = env.reset(seed=1_000_000 + episode)
        agents, total = list(env.agents), 0.0
        while env.agents:
            actions = act(np.stack([seen[agent] for agent in agents]).astype(np.float32))
            seen, rewards, *_ = env.step({agent: int(each) for agent, each in zip(agents, actions, strict=True)})
            total += sum(rewards.values()) / len(agents)
        returns.append(total)
    return returns


def random(name: str, seed: int, _: int) -> list[float]:
    rng, count = np.random.default_rng(seed), world(name).action_space("agent_0").n
    return played(name, lambda seen: rng.integers(count, size=len(seen)))


def ours(name: str, seed: int, turns: int) -> list[float]:
    import torch

    command = [str(Path(sys.executable).parent / "jurybox")]
    with tempfile.TemporaryDirectory() as folder:
        run, exported = f"{folder}/run", f"{folder}/policy.pt2"
        told = {
            "env": f"{WORLDS[name]}:parallel_env",
            "env_args": {"max_cycles": _CYCLES},
            "share": world(name).possible_agents,
            "ppo": PPO,
            "batch_size": BATCH,
            "learning_rate": RATE,
            "gamma": GAMMA,
            "hidden": HIDDEN,
            "n_stack": 1,
            "max_ahead": 0,
            "evaluate_every": 0,
            "evaluation_episodes": 1,
            "log_every": 500,
        }
        options = [part for key, value in told.items() for part in ("--set", f"{key} = {_toml(value)}")]
        train = ["train", "marl", "--serial", "--out", run, "--steps", str(turns), "--seed", str(seed)]
        for line in ([*train, *options], ["policy", "export", run, "--which", "latest", "--to", exported]):
            done = subprocess.run([*command, *line], capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"jurybox {' '.join(line[:2])}: {done.stderr[-2000:]}")
        act = torch.export.load(exported).module()
        torch.manual_seed(seed)
        return played(name, lambda seen: act(torch.from_numpy(seen[:, None])).numpy())


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(each)}" for key, each in value.items()) + "}"
    return json.dumps(value)


def theirs(name: str, seed: int, turns: int) -> list[float]:
    import torch
    from stable_baselines3 import PPO as SB3
    from stable_baselines3.common.vec_env import VecEnv

    torch.set_num_threads(1)

    class Agents(VecEnv):
        """The agents of one world as environments."""

        def __init__(self) -> None:
            self.world = world(name)
            self.all = self.world.possible_agents
            first = self.all[0]
            super().__init__(len(self.all), self.world.observation_space(first), self.world.action_space(first))
            self.episodes = 0

        def reset(self) -> np.ndarray:
            self.episodes += 1
            seen, _ = self.world.reset(seed=seed * 100_000 + self.episodes)
            return np.stack([seen[agent] for agent in self.all]).astype(np.float32)

        def step_async(self, actions: np.ndarray) -> None:
            self.actions = actions

        def step_wait(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[dict[str, Any]]]:
            chosen = {agent: int(each) for agent, each in zip(self.all, self.actions, strict=True)}
            seen, rewards, *_ = self.world.step(chosen)
            stacked = np.stack([seen[agent] for agent in self.all]).astype(np.float32)
            over = not self.world.agents
            infos: list[dict[str, Any]] = [{} for _ in self.all]
            if over:  # always by the number of cycles
                infos = [{"terminal_observation": last, "TimeLimit.truncated": True} for last in stacked]
                stacked = self.reset()
            return (
                stacked,
                np.float32([rewards[agent] for agent in self.all]),
                np.full(len(self.all), over),
                infos,
            )

        def close(self) -> None:
            self.world.close()

        def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
            return [getattr(self.world, attr_name, None)] * self.num_envs

        def set_attr(self, *_: Any) -> None:
            raise NotImplementedError

        def env_method(self, *_: Any, **__: Any) -> list[Any]:
            raise NotImplementedError

        def env_is_wrapped(self, *_: Any) -> list[bool]:
            return [False] * self.num_envs

    agents = Agents()
    how = {"batch_size": BATCH, "learning_rate": RATE, "gamma": GAMMA, "policy_kwargs": {"net_arch": HIDDEN}}
    model = SB3("MlpPolicy", agents, seed=seed, device="cpu", **PPO, **how)
    model.learn(turns * agents.num_envs)
    return played(name, lambda seen: model.predict(seen, deterministic=False)[0])


def one(name: str, side: str, seed: int, turns: int) -> None:
    """A run, in this process; prints its mean return and how long it took."""
    began = time.monotonic()
    returns = {"random": random, "jurybox": ours, "sb3": theirs}[side](name, seed, turns)
    print(json.dumps({"mean": float(np.mean(returns)), "seconds": time.monotonic() - began}))


def run(names: list[str], seeds: int, turns: int) -> None:
    """Every run that is not there yet."""
    done = {(row["world"], row["side"], int(row["seed"]), int(row["turns"])) for row in known(_RUNS)}
    for seed in range(seeds):
        for name in names:
            for side in SIDES:
                if (name, side, seed, turns) in done:
                    continue
                command = [sys.executable, "-m", "benchmarks.marl.pettingzoo", "--one", name, side, str(seed)]
                ended = subprocess.run(
                    [*command, "--turns", str(turns)],
                    capture_output=True,
                    text=True,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                    check=False,
                )
                if ended.returncode:
                    raise SystemExit(f"{name}, {side}, seed {seed}: {ended.stderr[-3000:]}")
                said = json.loads(ended.stdout.splitlines()[-1])
                row = {"world": name, "side": side, "seed": seed, "turns": turns, "return": f"{said['mean']:.3f}"}
                keep(_RUNS, row)
                print({**row, "seconds": round(said["seconds"])}, flush=True)


def table() -> str:
    """Means over the seeds with Student's 95 % interval."""
    from scipy import stats

    lines = [
        "# Our PPO beside Stable-Baselines3's, in worlds of PettingZoo",
        "",
        f"{date.today()}, mpe2 {metadata.version('mpe2')}, Stable-Baselines3 {metadata.version('stable-baselines3')}. "
        f"The mean return of an agent in {_EPISODES} episodes of {_CYCLES} turns in the bare environment, seeds and "
        "their mean with a 95 % interval; same settings and turns (`python -m benchmarks.marl.pettingzoo`).",
        "",
        "| world | turns | who | seeds | mean |",
        "| --- | ---: | --- | --- | ---: |",
    ]  # fmt: skip
    rows = known(_RUNS)
    for name, turns in dict.fromkeys((row["world"], row["turns"]) for row in rows):
        for side in SIDES:
            found = [
                float(row["return"]) for row in rows if (row["world"], row["turns"], row["side"]) == (name, turns, side)
            ]
            if not found:
                continue
            half = stats.t.ppf(0.975, len(found) - 1) * stats.sem(found) if len(found) > 1 else float("nan")
            each = "; ".join(f"{value:.1f}" for value in found)
            lines.append(f"| {WORLDS[name]} | {int(turns):,} | {side} | {each} | {np.mean(found):.1f} ± {half:.1f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", nargs="+", choices=list(WORLDS), default=list(WORLDS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--turns", type=int, default=60_000)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--one", nargs=3, metavar=("WORLD", "SIDE", "SEED"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        one(args.one[0], args.one[1], int(args.one[2]), args.turns)
        return
    if not args.table:
        run(args.worlds, args.seeds, args.turns)
    (_RESULTS / "pettingzoo.md").write_text(table())
    print(table())


if __name__ == "__main__":
    main()
