"""A served policy beside the same policy in the loop, with environments that step as one: EnvPool's, or Gymnasium's.

    python -m benchmarks.pools [--envs 16 64 256] [--kinds envpool gymnasium] [--seconds 3] [--rounds 5]

CartPole, a network of two hidden layers of 64 units, and one request for all environments in each step; nothing is
learned. Sides take turns, and what is told is env steps a second of the wall, and the ratio of the medians: what a
policy for others costs a loop that could compute it itself. EnvPool (`pip install envpool`) steps in C++ threads of its
own; Gymnasium's CartPole of NumPy arrays is as cheap a step.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from jurybox.client import connect
from jurybox.protocol import TensorSpec
from jurybox.server.models import ServedModel
from jurybox.training.runtime import served_models

_WIDTH = 64
Chooses = Callable[[Any], Any]


def policy() -> ServedModel:
    """Logits of CartPole's two actions."""
    torch.manual_seed(0)
    layers = nn.Linear(4, _WIDTH), nn.Tanh(), nn.Linear(_WIDTH, _WIDTH), nn.Tanh(), nn.Linear(_WIDTH, 2)
    spec = {"observation": TensorSpec("float32", (4,))}, {"logits": TensorSpec("float32", (2,))}
    return ServedModel(nn.Sequential(*layers), *spec)


def made(kind: str, envs: int) -> Any:
    """CartPoles that step together, with Gymnasium's interface of vector environments."""
    if kind == "envpool":
        import envpool

        return envpool.make("CartPole-v1", env_type="gymnasium", num_envs=envs, seed=0)
    import gymnasium

    return gymnasium.make_vec("CartPole-v1", num_envs=envs, vectorization_mode="vector_entry_point")


def rate(env: Any, logits: Chooses, envs: int, seconds: float) -> float:
    """Env steps a second of all environments, with actions drawn from the policy."""
    rng, observation, steps, began = np.random.default_rng(0), env.reset()[0], 0, time.monotonic()
    while (spent := time.monotonic() - began) < seconds:
        action = (logits(observation) + rng.gumbel(size=(envs, 2))).argmax(1)
        observation = env.step(action)[0]
        steps += envs
    return steps / spent


def measured(kind: str, envs: int, seconds: float, rounds: int) -> str:
    """A row of the table."""
    env, network = made(kind, envs), policy().module

    def in_the_loop(observation: Any) -> Any:
        with torch.inference_mode():
            return network(torch.from_numpy(observation)).numpy()

    models = {"policy": {"factory": "benchmarks.pools:policy", "max_batch": envs}}
    with (
        tempfile.TemporaryDirectory() as folder,
        served_models(models, log=Path(folder) / "server.log") as served,
        connect(served.address) as server,
    ):
        model = server.model(served.names["policy"], rows=envs)
        sides: dict[str, Chooses] = {
            "none": lambda observation: np.zeros((envs, 2)),
            "in the loop": in_the_loop,
            "served": model.infer,
        }
        found: dict[str, list[float]] = {side: [] for side in sides}
        for logits in sides.values():
            rate(env, logits, envs, seconds / 5)  # warms up
        for _ in range(rounds):
            for side, logits in sides.items():
                found[side].append(rate(env, logits, envs, seconds))
    env.close()
    none, own, theirs = (statistics.median(each) for each in found.values())
    ratios = sorted(b / a for a, b in zip(found["in the loop"], found["served"], strict=True))
    cells = [kind, str(envs), *(f"{each:,.0f}" for each in (none, own, theirs))]
    return "| " + " | ".join([*cells, f"{theirs / own:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", nargs="+", type=int, default=[16, 64, 256])
    parser.add_argument("--kinds", nargs="+", choices=["envpool", "gymnasium"], default=["envpool", "gymnasium"])
    parser.add_argument("--seconds", type=float, default=3.0, help="of a window")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print("| environments | of them | no policy, env steps / s | in the loop | served | served / in the loop |")
    print("|---" * 6 + "|")
    for kind in given.kinds:
        if importlib.util.find_spec(kind) is None:
            print(f"{kind} is not installed")
            continue
        for envs in given.envs:
            print(measured(kind, envs, given.seconds, given.rounds), flush=True)


if __name__ == "__main__":
    main()
