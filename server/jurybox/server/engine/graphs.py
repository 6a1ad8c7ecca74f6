"""CUDA graphs for a ladder of batch sizes: a forward of many small kernels becomes a single launch.

A graph has fixed shapes and addresses, so a batch is computed by the graph of the next larger rung, on static inputs
whose rows beyond the batch hold stale values. Models compute each row independently, so those rows have no effect.

Graphs are captured in the model loader's thread while the loop serves other models. The warm-ups run beside it; for
the capture itself, about as long as one forward, the loop is held between two turns. Calls of other threads cannot
break the capture ("thread_local"), but torch refuses random numbers to other models meanwhile.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

Tensors = Mapping[str, torch.Tensor]
_WARM_UPS = 3  # forwards before a capture: libraries choose their kernels and allocate memory in the first ones


def ladder(max_batch: int) -> list[int]:
    """Return the batch sizes that get a graph, or that the forward of a deterministic model is called with."""
    rungs = [1 << i for i in range(max_batch.bit_length()) if 1 << i < max_batch]
    return [*rungs, max_batch]


def rung(rungs: list[int], rows: int) -> int:
    """Return the smallest rung of at least `rows` rows."""
    return rungs[bisect_left(rungs, rows)]


class Graphs:
    """The captured forwards of one set of static inputs.

    Args:
        inputs: static inputs of max_batch rows, by name; their addresses must not change.
        forward: computes the outputs, by name, of the inputs' first rows.
        stream: the stream to capture on.
        alone: returns a context manager in which no other thread computes.
        beside: graphs that never run at the same time as these, which share their memory; None: there are none.
    """

    def __init__(
        self,
        inputs: Tensors,
        forward: Callable[[Tensors], Tensors],
        stream: torch.cuda.Stream,
        max_batch: int,
        alone: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
        beside: Graphs | None = None,
    ) -> None:
        self._rungs = ladder(max_batch)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensors]] = {}
        stream.wait_stream(torch.cuda.current_stream(stream.device))  # there weights and inputs were written
        self._pool: Any = torch.cuda.graph_pool_handle() if beside is None else beside._pool
        # torch.cuda.graph leaves the thread on the stream if a capture fails; this block does not.
        with torch.cuda.stream(stream):
            for rows in reversed(self._rungs):  # the largest first: the others reuse its memory pool
                part = {name: tensor[:rows] for name, tensor in inputs.items()}
                for _ in range(_WARM_UPS):
                    forward(part)
                stream.synchronize()
                with alone():
                    self._graphs[rows] = _captured(forward, part, stream, self._pool)

    def run(self, rows: int) -> Tensors:
        """Compute the first `rows` rows of the static inputs; return their outputs, by name."""
        graph, outputs = self._graphs[rung(self._rungs, rows)]
        graph.replay()
        return {name: tensor[:rows] for name, tensor in outputs.items()}


_failed: list[torch.cuda.CUDAGraph] = []  # kept: torch's allocator of host memory may refer to them


def _captured(
    forward: Callable[[Tensors], Tensors], part: Tensors, stream: torch.cuda.Stream, pool: Any
) -> tuple[torch.cuda.CUDAGraph, Tensors]:
    """Capture one forward; return the graph and its static outputs."""
    graph = torch.cuda.CUDAGraph()
    try:
        # Other threads use the device: by default whatever they call during a capture would fail, or break it.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            outputs = forward(part)
    except BaseException:
        _release(graph, stream, pool)
        with contextlib.suppress(Exception):  # the capture's own error says more
            mend_random_numbers(stream.device)
        raise
    return graph, outputs


def _release(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: Any) -> None:
    """Let torch's allocator end a failed capture. Otherwise it keeps the pool, and delays the reuse of other memory."""
    try:
        graph.pool()
    except RuntimeError:  # the capture has not ended, so the graph would not release its share of the pool
        _failed.append(graph)
        private = getattr(torch, "_C", None)  # torch has no public name for it; without these the pool is kept
        end, release = (getattr(private, f"_cuda_{name}", None) for name in ("endAllocateToPool", "releasePool"))
        if end is not None and release is not None:
            with contextlib.suppress(RuntimeError):  # it had not begun: there is nothing to release
                end(stream.device.index, pool)
                release(stream.device.index, pool)


def mend_random_numbers(device: torch.device) -> None:
    """Let models draw random numbers on a device again after a failed capture.

    torch's generator still counts for that capture, and refuses numbers to everyone, also to graphs that were captured
    before. The end of a capture that succeeds sets it right.
    """
    one = torch.zeros(1, device=device)
    stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]  # see `_StagingBuffer.capture`
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"):
        one.add_(0)
