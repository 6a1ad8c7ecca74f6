"""The time to transfer a learner's weights to an actor in another process.

Beside Jurybox's channel: TorchRL's weight synchronisation (shared memory, and queues) and a plain torch.multiprocessing
queue of state_dicts. One learner, one actor a system, CPU tensors. `returns` is when the learner may go on, `applied`
when the actor's own module holds the weights and the learner knows. Systems take turns within every round; medians, and
ratios to one memcpy of the same size measured in the same rounds.

    python -m benchmarks.weights.weight_sync --megabytes 1 10 100 --rounds 31 --out benchmarks/weights/results

TorchRL is left out, with a message, if it is not installed.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import multiprocessing
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
import torch.multiprocessing as torch_multiprocessing

from jurybox.protocol.segment import segment_name
from jurybox.protocol.weights import WeightsChannel, WeightsLayout
from jurybox.protocol.weights.publisher import Publisher
from jurybox.protocol.weights.reader import WeightsReader
from jurybox.training.roles.local_policy import TorchWeights

WAIT = 60.0
Turn = Callable[[], tuple[float, float]]


def network(megabytes: int) -> torch.nn.Module:
    """Layers of 1 MiB of weights each."""
    return torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(megabytes)))


def jurybox_actor(name: str, megabytes: int, acknowledged: Any) -> None:
    torch.set_num_threads(1)
    reader = WeightsReader(WeightsChannel.attach(name))
    weights = TorchWeights(reader, network(megabytes))
    acknowledged.put(0)
    while reader.wait_newer_than(weights.version, timeout=WAIT):
        weights.refresh()
        acknowledged.put(weights.version)
        if weights.extra.get("last"):
            return


def queue_actor(queue: Any, megabytes: int, acknowledged: Any) -> None:
    torch.set_num_threads(1)
    module = network(megabytes)
    acknowledged.put(0)
    while (state := queue.get(timeout=WAIT)) is not None:
        module.load_state_dict(state)
        acknowledged.put(1)


def torchrl_actor(scheme: Any, megabytes: int, ready: Any, stop: Any) -> None:
    torch.set_num_threads(1)
    module = network(megabytes)
    scheme.init_on_receiver(model_id="policy", worker_idx=0, model=module)
    ready.put(0)
    scheme.connect(worker_idx=0)
    stop.wait()


class Systems:
    """The systems under test, each with its actor; `turns` are their publications, `close` ends them."""

    def __init__(self, megabytes: int) -> None:
        self.turns: dict[str, Turn] = {}
        self._megabytes = megabytes
        self._module = network(megabytes)
        self._spawn = torch_multiprocessing.get_context("spawn")
        self._ends: list[Callable[[], object]] = []
        self._jurybox()
        self._queue()
        if importlib.util.find_spec("torchrl"):
            from torchrl.weight_update import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme

            self._torchrl("torchrl shared memory", SharedMemWeightSyncScheme())
            self._torchrl("torchrl queues", MultiProcessWeightSyncScheme())

    def _start(self, target: Callable[..., None], *args: Any) -> Any:
        process = self._spawn.Process(target=target, args=args, daemon=True)
        process.start()
        return process

    def _jurybox(self) -> None:
        layout = WeightsLayout.of(self._module.state_dict())
        channel = WeightsChannel.create(segment_name(f"bench{os.getpid()}", "weights", self._megabytes), layout)
        publisher, acknowledged = Publisher(channel), self._spawn.Queue()
        actor = self._start(jurybox_actor, channel.name, self._megabytes, acknowledged)
        acknowledged.get(timeout=WAIT)

        def turn(check: bool = False, last: bool = False) -> tuple[float, float]:
            begin = time.perf_counter()
            publisher.publish(self._module, {"last": last}, check_finite=check)
            returned = time.perf_counter()
            acknowledged.get(timeout=WAIT)
            return returned - begin, time.perf_counter() - begin

        def end() -> None:
            turn(last=True)
            actor.join(WAIT)
            publisher.close()
            channel.close()

        self.turns["jurybox"] = turn
        self.turns["jurybox, check_finite"] = lambda: turn(check=True)
        self._ends.append(end)

    def _queue(self) -> None:
        queue, acknowledged = self._spawn.Queue(), self._spawn.Queue()
        actor = self._start(queue_actor, queue, self._megabytes, acknowledged)
        acknowledged.get(timeout=WAIT)

        def turn() -> tuple[float, float]:
            begin = time.perf_counter()
            # Without the clone the queue hands out the learner's own tensors, which its next step would change.
            queue.put({name: tensor.clone() for name, tensor in self._module.state_dict().items()})
            returned = time.perf_counter()
            acknowledged.get(timeout=WAIT)
            return returned - begin, time.perf_counter() - begin

        def end() -> None:
            queue.put(None)
            actor.join(WAIT)

        self.turns["torch.multiprocessing queue"] = turn
        self._ends.append(end)

    def _torchrl(self, name: str, scheme: Any) -> None:
        from tensordict import TensorDict

        weights = TensorDict.from_module(self._module).data
        # It moves its argument to shared memory and sends from there. With the learner's module itself, source and
        # target would be the same memory: nothing to copy, and every optimiser step half-visible to the actor.
        initial = weights.clone()
        scheme.init_on_sender(
            model_id="policy", weights=initial, devices=[torch.device("cpu")], num_workers=1, ctx=self._spawn
        )
        stop, ready = self._spawn.Event(), self._spawn.Queue()
        actor = self._start(torchrl_actor, scheme, self._megabytes, ready, stop)
        ready.get(timeout=WAIT)
        scheme.connect()
        # Its synchronous send() consists of these two steps; separately, they show when the learner could continue.
        scheme.sync = False

        def turn() -> tuple[float, float]:
            begin = time.perf_counter()
            scheme.send(weights)
            returned = time.perf_counter()
            scheme._wait_for_ack(worker_ids=None)
            return returned - begin, time.perf_counter() - begin

        def end() -> None:
            scheme.shutdown()
            stop.set()
            actor.join(WAIT)

        self.turns[name] = turn
        self._ends.append(end)

    def step(self) -> None:
        """The learner's step: every weight changes, so that no system can skip a transfer."""
        with torch.no_grad():
            for parameter in self._module.parameters():
                parameter.add_(0.001)

    def close(self) -> None:
        for end in self._ends:
            end()


def memcpy_seconds(source: np.ndarray, target: np.ndarray) -> float:
    begin = time.perf_counter()
    ctypes.memmove(target.ctypes.data, source.ctypes.data, source.nbytes)
    return time.perf_counter() - begin


def measure(megabytes: int, rounds: int) -> dict[str, Any]:
    """Medians in milliseconds, and their ratios to one memcpy, of every system at this size."""
    systems = Systems(megabytes)
    source, target = np.ones(megabytes * 2**20, np.uint8), np.zeros(megabytes * 2**20, np.uint8)
    copies: list[float] = []
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in systems.turns}
    try:
        for number in range(-3, rounds):  # three rounds to warm up
            copied = memcpy_seconds(source, target)
            taken = {}
            order = list(systems.turns)
            shift = number % len(order)  # the order varies, because the previous system may still be cleaning up
            for name in order[shift:] + order[:shift]:
                systems.step()
                taken[name] = systems.turns[name]()
            if number >= 0:
                copies.append(copied)
                for name, pair in taken.items():
                    times[name].append(pair)
    finally:
        systems.close()
    copy = statistics.median(copies)
    table = {}
    for name, pairs in times.items():
        returns, applied = (statistics.median(column) for column in zip(*pairs, strict=True))
        table[name] = {
            "returns_ms": round(returns * 1e3, 3),
            "applied_ms": round(applied * 1e3, 3),
            "returns_in_memcpys": round(returns / copy, 2),
            "applied_in_memcpys": round(applied / copy, 2),
        }
    return {"megabytes": megabytes, "rounds": rounds, "memcpy_ms": round(copy * 1e3, 3), "systems": table}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[1, 10, 100])
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--machine", default=f"{os.cpu_count()}-core {platform.machine()}")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    versions = {"torch": torch.__version__}
    if importlib.util.find_spec("torchrl"):
        import torchrl

        versions["torchrl"] = torchrl.__version__
    else:
        print("torchrl is not installed: left out")
    report = {
        "date": date.today().isoformat(),
        "machine": options.machine,
        "versions": versions,
        "sizes": [measure(size, options.rounds) for size in options.megabytes],
        "load_average_after": round(os.getloadavg()[0], 2),
    }
    print(json.dumps(report, indent=1))
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / f"weight_sync-{report['date']}.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    multiprocessing.freeze_support()
    main()
