"""Updates alone: ours as they are and compiled beside Stable-Baselines3's, what they spend, and how exact they are.

python -m benchmarks.learning.updates [--algorithms sac td3 dqn ppo] [--hidden 64 256] [--rounds 7]
python -m benchmarks.learning.updates --errors

All sides are in one process of one thread and take turns; times are the processor's, of the median round, with drawing
the batch from a replay. `products` is the share of matrix products in our update as it is: no compiler makes less of
these. With --errors the same updates are made in float64, too, and what is told is how far the learned parameters of
both float32 sides are from those: compiled updates are as exact as those that are not, or they are not the same.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from jurybox.training.algorithms.base import Algorithm, Progress, Rollout
from jurybox.training.algorithms.networks import Features
from jurybox.training.algorithms.registry import make
from jurybox.training.replay import Episodes, Field, Replay, Windows
from jurybox.training.spaces import ActionSpec, AgentSpec, Leaf

_ROWS, _NUMBERS, _ACTIONS = 10_000, 17, 6  # HalfCheetah's numbers
_START = Progress(0, 1)
_REPLAYS = itertools.count()
_BATCH = {"sac": 256, "td3": 256, "dqn": 32, "ppo": 64}  # Stable-Baselines3's own
_T, _ENVS = 128, 4  # of a rollout


def learner(name: str, hidden: int, *, compiles: bool) -> Algorithm:
    """An algorithm with two hidden layers of so many units, ready to learn."""
    discrete = name in ("dqn", "ppo")
    bounds = ((), ()) if discrete else ((-1.0,) * _ACTIONS, (1.0,) * _ACTIONS)
    spec = AgentSpec((Leaf("", (_NUMBERS,), "float32"),), ActionSpec(discrete, _ACTIONS, 0, *bounds))
    made = make(name, {"hidden": (hidden, hidden), "batch_size": _BATCH[name]}, spec.as_dict())
    made.compiles = compiles
    made.setup(0, "cpu")
    return made


def rollout(rng: np.random.Generator) -> Rollout:
    """A rollout of anything."""

    def numbers(*shape: int) -> Any:
        return rng.normal(size=shape).astype(np.float32)

    ended = rng.random((_T, _ENVS)) < 0.02
    return Rollout(
        observation=numbers(_T, _ENVS, _NUMBERS),
        action=rng.integers(_ACTIONS, size=(_T, _ENVS)),
        log_prob=np.full((_T, _ENVS), -np.log(_ACTIONS), np.float32),
        value=numbers(_T, _ENVS),
        reward=numbers(_T, _ENVS),
        terminated=ended,
        ended=ended,
        next_value=np.zeros((_T, _ENVS), np.float32),
        last_value=numbers(_ENVS),
    )


def filled(discrete: bool, rng: np.random.Generator) -> Replay:
    """A replay of anything."""
    action = Field((), "int64") if discrete else Field((_ACTIONS,))
    fields = {"observation": Field((_NUMBERS,)), "action": action, "reward": Field(), "terminated": Field((), "bool")}
    name = f"updates-{os.getpid()}-{next(_REPLAYS)}"
    replay = Replay.create(name, _ROWS, fields, episodes=Episodes(), seed=0, threads=1)
    actions = rng.integers(_ACTIONS, size=_ROWS) if discrete else rng.uniform(-1, 1, (_ROWS, _ACTIONS))
    replay.extend(
        observation=rng.normal(size=(_ROWS, _NUMBERS)).astype(np.float32),
        action=actions.astype("int64" if discrete else "float32"),
        reward=rng.normal(size=_ROWS).astype(np.float32),
        terminated=rng.random(_ROWS) < 0.01,
    )
    return replay


def own_updates(made: Algorithm, name: str, rng: np.random.Generator) -> Callable[[int], None]:
    """Return what makes so many optimiser steps."""
    if made.on_policy:
        given = rollout(rng)
        each = made.steps_of(_T * _ENVS)
        return lambda n: [made.update(given, _START) for _ in range(max(1, n // each))] and None  # type: ignore[return-value]
    replay = filled(name == "dqn", rng)
    batch = replay.batch(_BATCH[name], Windows(n_step=1, gamma=0.99, next=("observation",)))
    tensors = dict(batch.torch())

    def go(n: int) -> None:
        for _ in range(n):
            replay.sample(batch.n, batch)
            made.update(tensors, _START)

    return go


def their_updates(name: str, hidden: int, rng: np.random.Generator) -> Callable[[int], None]:
    """The same of Stable-Baselines3."""
    import gymnasium
    import stable_baselines3
    from gymnasium import spaces
    from stable_baselines3.common.logger import configure

    discrete = name in ("dqn", "ppo")

    class Nothing(gymnasium.Env[Any, Any]):
        observation_space = spaces.Box(-np.inf, np.inf, (_NUMBERS,))
        action_space = spaces.Discrete(_ACTIONS) if discrete else spaces.Box(-1.0, 1.0, (_ACTIONS,))

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            super().reset(seed=seed)
            return rng.normal(size=_NUMBERS).astype(np.float32), {}

        def step(self, action: Any) -> Any:
            return (
                rng.normal(size=_NUMBERS).astype(np.float32),
                float(rng.normal()),
                bool(rng.random() < 0.01),
                False,
                {},
            )

    policy: dict[str, Any] = {"policy_kwargs": {"net_arch": [hidden, hidden]}, "device": "cpu", "seed": 0}
    kind: Any = getattr(stable_baselines3, name.upper())
    if name == "ppo":
        model = kind("MlpPolicy", Nothing(), n_steps=_T * _ENVS, batch_size=_BATCH[name], **policy)
        model.learn(_T * _ENVS)  # fills a rollout
        each = model.n_epochs * (_T * _ENVS // _BATCH[name])
        return lambda n: [model.train() for _ in range(max(1, n // each))] and None  # type: ignore[return-value]
    model = kind("MlpPolicy", Nothing(), batch_size=_BATCH[name], learning_starts=2000, buffer_size=_ROWS, **policy)
    model.learn(2000)  # random actions fill the buffer
    model.set_logger(configure(None, []))
    return lambda n: model.train(gradient_steps=n, batch_size=_BATCH[name])


def shares(go: Callable[[int], None], n: int) -> dict[str, float]:
    """Return the seconds of an update in groups of operations, and all of them."""
    from torch.profiler import ProfilerActivity, profile

    groups = {
        "products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"),
        "Adam": ("aten::_fused_adam_",),
        "Polyak": ("aten::_foreach_lerp_",),
    }
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        go(n)
    found = {
        name: sum(e.self_cpu_time_total for e in seen.key_averages() if e.key in of) for name, of in groups.items()
    }
    return {name: value / n / 1e6 for name, value in found.items()}


def measured(name: str, hidden: int, rounds: int, n: int) -> str:
    """A row of the table."""
    rng = np.random.default_rng(0)
    plain = own_updates(learner(name, hidden, compiles=False), name, rng)
    sides = {
        "ours": plain,
        "compiled": own_updates(learner(name, hidden, compiles=True), name, rng),
        "sb3": their_updates(name, hidden, rng),
    }
    if name == "ppo":
        n = 80 * max(1, n // 80)
    times: dict[str, list[float]] = {side: [] for side in sides}
    for go in sides.values():
        go(min(n, 80))  # compiles
    for _ in range(rounds):
        for side, go in sides.items():
            began = time.process_time()
            go(n)
            times[side].append((time.process_time() - began) / n)
    ours, compiled, theirs = (statistics.median(times[side]) for side in ("ours", "compiled", "sb3"))
    parts = shares(plain, min(n, 80))
    cells = [name, f"{hidden} x {hidden}", str(_BATCH[name]), f"{theirs * 1e3:.2f}"]
    cells += [f"{each * 1e3:.2f} ({theirs / each:.2f})" for each in (ours, compiled)]
    cells += [f"{each * 1e3:.2f}" for each in parts.values()]
    return "| " + " | ".join([*cells, f"{theirs / parts['products']:.1f}"]) + " |"


class _Double:
    """While it is entered, new networks compute in float64."""

    def __enter__(self) -> None:
        self._before = Features.raw_numbers
        Features.raw_numbers = lambda features, rows: rows.double()  # type: ignore[method-assign]
        torch.set_default_dtype(torch.float64)

    def __exit__(self, *_: object) -> None:
        Features.raw_numbers = self._before  # type: ignore[method-assign]
        torch.set_default_dtype(torch.float32)


def errors(name: str, hidden: int, updates: tuple[int, ...]) -> str:
    """How far parameters are from those of the same updates in float64, over how far these have moved."""
    sides = {kind: learner(name, hidden, compiles=kind == "compiled") for kind in ("ours", "compiled")}
    with _Double():
        exact = learner(name, hidden, compiles=False)
        exact.acting.load_state_dict(sides["ours"].acting.state_dict())
        for part, module in exact.parts().items():
            if isinstance(module, torch.nn.Module):
                module.load_state_dict(sides["ours"].parts()[part].state_dict())  # type: ignore[union-attr]
    first = [each.detach().clone() for each in exact.acting.parameters()]
    rng, cells = np.random.default_rng(1), []
    for number in range(1, updates[-1] + 1):
        given: Any = rollout(rng) if exact.on_policy else _batch(name, rng)
        for made in sides.values():
            _update(made, name, given, number)
        with _Double():
            doubled = given if exact.on_policy else {key: _doubled(value) for key, value in given.items()}
            _update(exact, name, doubled, number)
        if number in updates:
            cells += [f"{_distance(made, exact, first):.1e}" for made in sides.values()]
    return f"| {name} | {hidden} x {hidden} | " + " | ".join(cells) + " |"


def _update(made: Any, name: str, given: Any, number: int) -> None:
    """Make an update whose random numbers, which differ with the dtype if an algorithm draws them, are given."""
    if name == "ppo":
        made.generator.manual_seed(number)
        made.update(given, _START)
    elif name == "td3":
        noise = (0.2 * given["noise"]).clamp(-0.5, 0.5)
        made.run(made._learn if number % 2 else made._learn_all, {**given, "noise": noise})
    else:
        made.run(made._learn_and_follow if name == "sac" else made._learn, given)


def _doubled(value: torch.Tensor) -> torch.Tensor:
    return value.double() if value.is_floating_point() else value


def _batch(name: str, rng: np.random.Generator) -> dict[str, torch.Tensor]:
    n = _BATCH[name]
    action = rng.integers(_ACTIONS, size=n) if name == "dqn" else rng.uniform(-1, 1, (n, _ACTIONS)).astype(np.float32)
    made = {key: rng.normal(size=(n, _NUMBERS)).astype(np.float32) for key in ("observation", "next_observation")}
    made |= {"action": action, "reward": rng.normal(size=n).astype(np.float32)}
    if name != "dqn":
        made |= {key: rng.normal(size=(n, _ACTIONS)).astype(np.float32) for key in ("noise", "next_noise")}
    made["discount"] = (0.99 * (rng.random(n) < 0.9)).astype(np.float32)
    return {key: torch.from_numpy(column) for key, column in made.items()}


def _distance(made: Algorithm, exact: Algorithm, first: list[torch.Tensor]) -> float:
    off = moved = 0.0
    for a, b, c in zip(made.acting.parameters(), exact.acting.parameters(), first, strict=True):
        off += float((a.detach().double() - b.detach()).square().sum())
        moved += float((b.detach() - c).square().sum())
    return (off / moved) ** 0.5 if moved else 0.0  # TD3's policy waits for its second update


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", nargs="+", choices=list(_BATCH), default=list(_BATCH))
    parser.add_argument("--hidden", nargs="+", type=int, default=[64, 256], help="units of both layers")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--updates", type=int, default=100, help="in a round")
    parser.add_argument("--errors", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    if given.errors:
        after = (1, 10, 100)
        print("| | hidden | " + " | ".join(f"{n}: ours | compiled" for n in after) + " |\n" + "|---" * 8 + "|")
    else:
        print(
            "| | hidden | batch | SB3, ms | ours (times SB3's rate) | compiled | products | Adam | Polyak "
            "| SB3's over products |\n" + "|---" * 10 + "|"
        )
    for name in given.algorithms:
        for hidden in given.hidden:
            if given.errors:
                print(errors(name, hidden, after), flush=True)
            else:
                print(measured(name, hidden, given.rounds, given.updates), flush=True)


if __name__ == "__main__":
    main()
