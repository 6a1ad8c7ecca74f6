"""The cost of many policies of one architecture as a group, in forwards of one of them.

Beside the group: the same policies one after the other; the two limits of a group, arithmetic (as many rows through one
set of weights, one large product per layer) and memory (every weight read once); and the engine's own cost per batch.
All take turns in the same rounds; figures are medians, and ratios are of medians. On a CPU they are CPU time, so that
other load affects only the caches.

    python -m benchmarks.weights.grouped --agents 32 --rows 16 --threads 1 --out benchmarks/weights/results
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch

from jurybox.protocol import TensorSpec
from jurybox.protocol.wire import TICKET
from jurybox.server.groups.group import Member, Stack, Stacks, stacked_forward
from jurybox.server.groups.groups import Groups
from jurybox.server.inproc import InprocServer
from jurybox.server.models import ServedModel

INPUTS = {"observation": TensorSpec("float32", (52,))}
OUTPUTS = {"logits": TensorSpec("float32", (145,)), "value": TensorSpec("float32")}


class Policy(torch.nn.Module):
    """52-256-256-(145 + 1)."""

    def __init__(self) -> None:
        super().__init__()
        linear, relu = torch.nn.Linear, torch.nn.ReLU
        self.body = torch.nn.Sequential(linear(52, 256), relu(), linear(256, 256), relu(), linear(256, 146))

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.body(observation)
        return x[..., :145], x[..., 145]


def stacked(modules: list[Policy], dtype: torch.dtype) -> Stack:
    stack = Stack(Policy().to(modules[0].body[0].weight.device, dtype), len(modules))
    for member, module in enumerate(modules):
        stack.fill(member, module.state_dict(), 0)
    return stack


def forwards(agents: int, rows: int, device: str) -> dict[str, Callable[[], object]]:
    modules = [Policy().to(device).eval() for _ in range(agents)]
    x = torch.randn(agents, rows, 52, device=device)
    call = stacked_forward(modules[0], ["observation"])
    stack, half = stacked(modules, torch.float32), stacked(modules, torch.bfloat16)
    half_module = Policy().to(device, torch.bfloat16).eval()
    plain = {name: tensor.contiguous() for name, tensor in stack.tensors.items()}
    flat = torch.cat([tensor.reshape(-1) for tensor in plain.values()])
    many, half_x = x.reshape(-1, 52), x.bfloat16()
    turn = iter(range(1 << 62))
    return {
        "one agent": lambda: modules[0](x[0]),
        "one agent, not in the cache": lambda: modules[next(turn) % agents](x[0]),
        "one after the other": lambda: [module(rows) for module, rows in zip(modules, x, strict=True)],
        "group, weights as torch keeps them": lambda: call(plain, {"observation": x}),
        "group": lambda: call(stack.tensors, {"observation": x}),
        "one agent, bfloat16": lambda: half_module(half_x[0]),
        "group, bfloat16": lambda: call(half.tensors, {"observation": half_x}),
        "wall: as many rows through one agent": lambda: modules[0](many),
        "wall: every weight read once": flat.sum,
    }


class InEngine:
    """The same models in an engine, by themselves or as a group; `run` answers one ticket of each."""

    def __init__(self, agents: int, rows: int) -> None:
        self.server = InprocServer(
            {f"agent{i}": ServedModel(Policy(), INPUTS, OUTPUTS) for i in range(agents)}, rows=64
        )
        self.served = [self.server.engine.slots[i].served for i in range(agents)]
        self.tickets = np.zeros(agents, TICKET)
        self.tickets["model"], self.tickets["rows"] = np.arange(agents), rows

    def alone(self) -> None:
        for i, served in enumerate(self.served):
            served.run(self.tickets[i : i + 1], int(self.tickets["rows"][i]))

    def grouped(self) -> None:
        engine = self.server.engine
        groups = Groups(engine, torch.device("cpu"), lambda action: action())
        for i, served in enumerate(self.served):
            arena = self.server._arenas[f"agent{i}"]
            groups.join(
                "g", Member(i, served, arena.inputs, arena.outputs, None, engine.counters(i)), None, lambda: None
            )
        self.slot = engine.slots[0]

    def together(self) -> None:
        tickets = self.tickets.copy()
        self.slot.served.run(tickets, int(tickets["rows"].sum()))
        for _ in self.slot.answers(tickets, 0):
            pass
        self.slot.counters.batch(tickets, int(tickets["rows"].sum()), 0, 1000)


def switching(agents: int) -> Callable[[], object]:
    stacks = Stacks(Policy(), agents)
    return stacks.switch


def measure(agents: int, rows: int, rounds: int, device: str) -> dict[str, float]:
    """Medians in microseconds."""
    work = forwards(agents, rows, device)
    alone, together = InEngine(agents, rows), InEngine(agents, rows)
    together.grouped()
    if device == "cpu":
        work |= {
            "engine: one agent's batch": lambda: alone.served[0].run(alone.tickets[:1], rows),
            "engine: one batch after the other": alone.alone,
            "engine: the group's batch": together.together,
        }
    work["switch to newly published weights"] = switching(agents)
    taken: dict[str, list[float]] = {key: [] for key in work}
    clock = time.thread_time if device == "cpu" else time.perf_counter
    with torch.inference_mode():
        for number in range(-5, rounds):
            for key, call in work.items():
                repeat = 5  # the first finds the caches as the contender before it left them
                for again in range(repeat):
                    begin = clock()
                    call()
                    if device != "cpu":
                        torch.cuda.synchronize()
                    if number >= 0 and again:
                        taken[key].append(clock() - begin)
    alone.server.close()
    together.server.engine.stop_updaters()
    together.server.close()
    return {key: round(statistics.median(values) * 1e6, 1) for key, values in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, nargs="+", default=[4, 32])
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--machine", default=f"{os.cpu_count()}-core {platform.machine()}")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results: list[dict[str, Any]] = []
    for agents in options.agents:
        us = measure(agents, options.rows, options.rounds, options.device)
        one = us["one agent"]
        results.append(
            {"agents": agents, "us": us, "forwards": {key: round(value / one, 2) for key, value in us.items()}}
        )
    report = {
        "date": date.today().isoformat(),
        "machine": options.machine,
        "torch": torch.__version__,
        "device": options.device,
        "threads": options.threads,
        "rows": options.rows,
        "results": results,
        "load_average_after": round(os.getloadavg()[0], 2),
    }
    print(json.dumps(report, indent=1))
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / f"grouped-{options.device}-{report['date']}.json").write_text(
            json.dumps(report, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
