"""A served policy beside the same policy in the loop, with environments that step as one: EnvPool's, or Gymnasium's.

    python -m benchmarks.pools [--envs 16 64 256] [--kinds envpool gymnasium] [--seconds 0.5] [--rounds 20]

CartPole, a network of two hidden layers of 64 units, and one request for all environments in each step; nothing is
learned. Sides take turns, and what is told is env steps a second of the wall, and the median of the rounds' ratios:
what a policy for others costs a loop that could compute it itself. EnvPool (`pip install envpool`) steps in C++ threads
of its own; Gymnasium's CartPole of NumPy arrays is as cheap a step. EnvPool has a second row, in halves: it steps one
half of the environments while the policy is asked for the other, in the loop as from the server. Windows are short,
since other programs disturb two processes more than one: how many cores they used is told, too.
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

from benchmarks.serving.machine import between, read
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


def made(kind: str, envs: int, *, halves: bool = False) -> Any:
    """CartPoles that step together, or in halves, with Gymnasium's interface of vector environments."""
    if kind == "envpool":
        import envpool

        batch = envs // 2 if halves else envs
        return envpool.make("CartPole-v1", env_type="gymnasium", num_envs=envs, batch_size=batch, seed=0)
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


def rate_of_halves(env: Any, logits: Chooses, envs: int, seconds: float) -> float:
    """The same of an EnvPool that steps one half while the other half's actions are computed."""
    rng, steps = np.random.default_rng(0), 0
    env.async_reset()
    began = time.monotonic()
    while (spent := time.monotonic() - began) < seconds:
        observation, _, _, _, info = env.recv()
        action = (logits(observation) + rng.gumbel(size=(envs // 2, 2))).argmax(1)
        env.send(action, info["env_id"])
        steps += envs // 2
    for _ in range(2):  # the next reset is of environments that do not step
        env.recv()
    return steps / spent


def measured(kind: str, envs: int, seconds: float, rounds: int, *, halves: bool = False) -> str:
    """A row of the table."""
    env, network, batch = made(kind, envs, halves=halves), policy().module, envs // 2 if halves else envs
    of = rate_of_halves if halves else rate

    def in_the_loop(observation: Any) -> Any:
        with torch.inference_mode():
            return network(torch.from_numpy(observation)).numpy()

    models = {"policy": {"factory": "benchmarks.pools:policy", "max_batch": envs}}
    with (
        tempfile.TemporaryDirectory() as folder,
        served_models(models, log=Path(folder) / "server.log") as served,
        connect(served.address) as server,
    ):
        model = server.model(served.names["policy"], rows=batch)
        sides: dict[str, Chooses] = {
            "none": lambda observation: np.zeros((batch, 2)),
            "in the loop": in_the_loop,
            "served": model.infer,
        }
        found: dict[str, list[float]] = {side: [] for side in sides}
        for logits in sides.values():
            of(env, logits, envs, seconds / 5)  # warms up
        first = read()
        for _ in range(rounds):
            for side, logits in sides.items():
                found[side].append(of(env, logits, envs, seconds))
        others = between(first, read(), set()).others
    env.close()
    ratios = sorted(b / a for a, b in zip(found["in the loop"], found["served"], strict=True))
    cells = [f"{kind}, in halves" if halves else kind, str(envs)]
    cells += [f"{statistics.median(each):,.0f}" for each in found.values()]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return "| " + " | ".join([*cells, f"{middle:.2f} ({low:.2f} to {high:.2f})", f"{others:.1f}"]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", nargs="+", type=int, default=[16, 64, 256])
    parser.add_argument("--kinds", nargs="+", choices=["envpool", "gymnasium"], default=["envpool", "gymnasium"])
    parser.add_argument("--seconds", type=float, default=0.5, help="of a window")
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(
        "| environments | of them | no policy, env steps / s | in the loop | served | served / in the loop "
        "(middle half) | cores of others |"
    )
    print("|---" * 7 + "|")
    for kind in given.kinds:
        if importlib.util.find_spec(kind) is None:
            print(f"{kind} is not installed")
            continue
        for envs in given.envs:
            for halves in (False, True)[: 1 + (kind == "envpool")]:
                print(measured(kind, envs, given.seconds, given.rounds, halves=halves), flush=True)


if __name__ == "__main__":
    main()
