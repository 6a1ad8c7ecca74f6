"""The device without a server: its limits, a plain torch loop, copies beside forwards, replays.

On a CPU the same code runs: there are no events, so clocks are read instead, and "copies" are copies in memory.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from tests.gpu import models

from benchmarks.gpu.measure import Found, Setup
from jurybox.protocol.wire import TICKET
from jurybox.server.engine.device import DeviceServed
from jurybox.server.engine.graphs import Graphs
from jurybox.training.replay import Field, Replay

_MIB = 1 << 20


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _median_us(work: Callable[[], object], seconds: float, least: int = 5) -> float:
    """Microseconds of one call, the median of as many as fit; three to warm up."""
    for _ in range(3):
        work()
    taken, until = [], time.perf_counter() + seconds
    while len(taken) < least or time.perf_counter() < until:
        begin = time.perf_counter()
        work()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken) * 1e6


class _Stopwatch:
    """Milliseconds of work that was queued on the current stream, by events; on a CPU by the clock."""

    def __init__(self, device: torch.device) -> None:
        self._events = (
            [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device.type == "cuda" else []  # type: ignore[no-untyped-call]
        )
        self._clock = [0.0, 0.0]

    def mark(self, end: int) -> None:
        if self._events:
            self._events[end].record()
        self._clock[end] = time.perf_counter()

    def ms(self) -> float:
        if self._events:
            self._events[1].synchronize()
            return float(self._events[0].elapsed_time(self._events[1]))
        return (self._clock[1] - self._clock[0]) * 1e3


def _by_events(work: Callable[[], object], device: torch.device, times: int) -> float:
    """Milliseconds of one call on the device, the median of so many."""
    found = []
    for number in range(-2, times):
        watch = _Stopwatch(device)
        watch.mark(0)
        work()
        watch.mark(1)
        if number >= 0:
            found.append(watch.ms())
        _wait(device)
    return statistics.median(found)


# ---- the floor


def floor(at: Setup, found: Found) -> None:
    """Launches, PCIe in both directions, device memory, arithmetic: the limits for all other figures."""
    device, figures = torch.device(at.device), found.figures
    times, size = (5, 8 * _MIB) if at.quick else (30, 256 * _MIB)
    seconds = at.window / 4
    tiny = torch.zeros(8, device=device)
    calls = 20 if at.quick else 500

    def launches() -> None:
        for _ in range(calls):
            tiny.add_(1)
        _wait(device)

    def one() -> None:
        tiny.add_(1)
        _wait(device)

    figures["launch_us"] = _median_us(launches, seconds) / calls
    figures["launch_and_wait_us"] = _median_us(one, seconds)
    if at.gpu:
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        graphs = Graphs({"x": tiny}, lambda x: {"y": x["x"] + 1}, stream, 8)

        def replayed() -> None:
            graphs.run(8)
            _wait(device)

        figures["graph_and_wait_us"] = _median_us(replayed, seconds)
    pinned, plain = torch.ones(size, dtype=torch.uint8, pin_memory=at.gpu), torch.ones(size, dtype=torch.uint8)
    there, other = torch.empty_like(plain, device=device), torch.empty_like(plain, device=device)
    gigabytes = size / 1e9
    into = _by_events(lambda: there.copy_(pinned, non_blocking=True), device, times)
    figures["pcie_in_gbs"] = gigabytes / into * 1e3
    back = _by_events(lambda: pinned.copy_(there, non_blocking=True), device, times)
    figures["pcie_out_gbs"] = gigabytes / back * 1e3
    figures["unpinned_in_gbs"] = gigabytes / _median_us(lambda: (there.copy_(plain), _wait(device)), seconds) * 1e6
    figures["memory_gbs"] = 2 * gigabytes / _by_events(lambda: other.copy_(there), device, times) * 1e3
    side = 128 if at.quick or not at.gpu else 4096
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        ms = _by_events(lambda a=a, b=b: a @ b, device, times)  # type: ignore[misc]
        figures[f"matmul_{name}_tflops"] = 2 * side**3 / ms / 1e9
    figures["vector_rows_per_s_by_pcie"] = figures["pcie_in_gbs"] * 1e9 / (52 * 4)
    figures["image_rows_per_s_by_pcie"] = figures["pcie_in_gbs"] * 1e9 / (384 * 384 * 3)
    found.notes.append("PCIe: page-locked memory, by events; device memory counts bytes read and written")


# ---- a plain torch loop: the same models in this process, ready rows, no server


def loop(at: Setup, found: Found) -> None:
    """Copy in, forward, copy out, wait; with graphs and without, for a ladder of batch sizes. The in-process limit."""
    device = torch.device(at.device)
    for name, make, sizes in (
        ("vector", models.vector, (1, 4) if at.quick else (1, 4, 16, 64)),
        ("image", models.image, (1, 2) if at.quick else (1, 4, 16)),
    ):
        served = make()
        module = served.module.eval().to(device)
        ((key, spec),) = served.inputs.items()
        host = torch.zeros((max(sizes), *spec.shape), dtype=getattr(torch, spec.dtype), pin_memory=at.gpu)
        host.copy_((torch.rand(host.shape) * 255).to(host.dtype))
        inputs = {key: torch.zeros_like(host, device=device)}

        def forward(part: Any, module: torch.nn.Module = module, key: str = key) -> dict[str, torch.Tensor]:
            outputs = module(part[key])
            return dict(enumerate(outputs if isinstance(outputs, tuple) else (outputs,)))  # type: ignore[arg-type]

        with torch.inference_mode():
            kinds: dict[str, Callable[[int], Any]] = {
                "eager": lambda rows: forward({key: inputs[key][:rows]})  # noqa: B023  used within this turn
            }
            if at.gpu:
                stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                kinds["graphs"] = Graphs(inputs, forward, stream, max(sizes)).run
            for kind, run in kinds.items():
                curve = found.curves.setdefault(f"{name}: plain torch loop, rows a second", {}).setdefault(kind, [])
                for rows in sizes:
                    computed = _median_us(lambda run=run, rows=rows: (run(rows), _wait(device)), at.window / 8)  # type: ignore[misc]
                    out = {k: torch.empty_like(v, device="cpu", pin_memory=at.gpu) for k, v in run(rows).items()}

                    def turn(run: Any = run, rows: int = rows, out: Any = out) -> None:
                        inputs[key][:rows].copy_(host[:rows], non_blocking=True)  # noqa: B023
                        for k, tensor in run(rows).items():
                            out[k].copy_(tensor, non_blocking=True)
                        _wait(device)

                    whole = _median_us(turn, at.window / 8)
                    found.figures[f"{name}_{kind}_forward_us_{rows}"] = computed
                    found.figures[f"{name}_{kind}_loop_us_{rows}"] = whole
                    curve.append((rows, rows / whole * 1e6))
    for name in ("vector", "image"):
        mine = {k: v for k, v in found.figures.items() if k.startswith(f"{name}_") and "_forward_us_" in k}
        found.figures[f"{name}_forward_us"] = min(v for k, v in mine.items() if k.endswith("_us_1"))
        rows_per_s = [int(k.rpartition("_")[2]) / v * 1e6 for k, v in mine.items()]
        found.figures[f"{name}_model_rows_per_s"] = max(rows_per_s)


# ---- copies beside forwards


@contextlib.contextmanager
def _images(at: Setup, rows: int) -> Iterator[tuple[DeviceServed, list[Any]]]:
    """The juror as an engine holds it, on an arena of two batches; and those batches' tickets."""
    model = models.image()
    pixels = rows * 2 * 384 * 384 * 3
    memory = np.zeros(pixels + rows * 2 * 4, np.uint8)
    memory[:pixels] = np.random.default_rng(0).integers(0, 256, pixels, np.uint8)
    inputs = {"image": memory[:pixels].reshape(rows * 2, 384, 384, 3)}
    outputs = {"score": memory[pixels:].view(np.float32)}
    served = DeviceServed("image", model, inputs, outputs, memory, rows, at.device)
    batches = []
    for first in (0, rows):
        tickets = np.zeros(1, TICKET)
        tickets["first"], tickets["rows"] = first, rows
        batches.append(tickets)
    try:
        yield served, batches
    finally:
        served.close()


def overlap(at: Setup, found: Found) -> None:
    """Of the shorter of copy and forward, how much is hidden behind the other when two batches are on their way."""
    device, figures = torch.device(at.device), found.figures
    rows, times = (2, 4) if at.quick else (64, 40)
    with _images(at, rows) as (served, batches), torch.inference_mode():
        served.warm_up()
        buffer = served._buffers[0]
        copy = _by_events(lambda: buffer.copy_in(batches[0], rows, direct=served._lock.held), device, times // 2)
        forward = _by_events(lambda: buffer.forward(rows), device, times // 2)
        for tickets in batches:
            served.run(tickets, rows)

        def after_each_other() -> None:
            for number in range(times):
                served.run(batches[number % 2], rows)

        def overlapped() -> None:
            ahead = served.begin(batches[0], rows)
            for number in range(1, times):
                after = served.begin(batches[number % 2], rows)
                ahead.finish()
                ahead = after
            ahead.finish()

        apart = _by_events(after_each_other, device, 3) / times
        together = _by_events(overlapped, device, 3) / times
        figures |= {"copy_ms": copy, "forward_ms": forward, "one_after_another_ms": apart, "overlapped_ms": together}
        figures["page_locked"] = float(served._lock.held)
        # Both over the same bus and cores: more than all cannot be hidden, and noise is no overlap.
        figures["hidden_share"] = max(0.0, min(1.0, (copy + forward - together) / min(copy, forward)))
        figures["image_rows_per_s"] = rows / together * 1e3
    found.notes.append(f"batches of {rows} images; copy and forward alone by events, the rest a batch of {times}")


# ---- replay in device memory against the host's


def replay(at: Setup, found: Found) -> None:
    """Batches of 256 transitions with images, ready on the device: drawn on the host and copied, or drawn there."""
    device = torch.device(at.device)
    capacity, batch = (512, 32) if at.quick else (20_000, 256)
    fields = {"image": Field((84, 84), "uint8"), "action": Field((), "int64"), "reward": Field()}
    rng = np.random.default_rng(0)
    with Replay.create(f"gpu-bench-{os.getpid()}", capacity, fields, seed=1) as stored:
        for first in range(0, capacity, 500):
            n = min(500, capacity - first)
            image = rng.integers(0, 256, (n, 84, 84), np.uint8)
            image[:, 0, 0] = np.arange(n) % 256  # so that a row can be checked against itself
            stored.extend(image=image, action=np.arange(n) % 256, reward=np.ones(n, np.float32))

        def check(tensors: dict[str, torch.Tensor]) -> None:
            if not bool((tensors["image"][:, 0, 0].long() == tensors["action"]).all()):
                raise AssertionError("a row came with another row's image")

        ways: dict[str, Callable[[], dict[str, torch.Tensor]]] = {}
        with stored.prefetch(batch, device=at.device) as batches:
            ways["host, prefetched"] = lambda: next(batches)
            began = time.perf_counter()
            resident = stored.resident(at.device, seed=2)
            came = resident.refresh()
            _wait(device)
            found.figures["resident_fill_gbs"] = came * 84 * 84 / (time.perf_counter() - began) / 1e9
            ways["device"] = lambda: resident.sample(batch)
            ways["host, one at a time"] = lambda: {
                name: tensor.to(device) for name, tensor in stored.sample(batch).torch().items()
            }
            for name, draw in ways.items():
                check(draw())
                us = _median_us(lambda draw=draw: (draw(), _wait(device)), at.window / 2)  # type: ignore[misc]
                key = name.replace(", ", "_").replace(" ", "_")
                found.figures[f"{key}_rows_per_s"] = batch / us * 1e6
        found.figures["device_over_host"] = (
            found.figures["device_rows_per_s"] / found.figures["host_prefetched_rows_per_s"]
        )
        found.figures["resident_mib"] = resident.nbytes / _MIB
