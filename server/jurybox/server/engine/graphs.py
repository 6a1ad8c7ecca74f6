"""CUDA graphs for a ladder of batch sizes: a forward of many small kernels is launched as one.

A graph has fixed shapes and addresses, so a batch is computed by the graph of the next larger rung, on static inputs
whose rows beyond the batch hold whatever was there. Models answer row by row, so those rows change nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping

import torch

Tensors = Mapping[str, torch.Tensor]
_WARM_UPS = 3  # forwards before a capture: libraries choose their kernels and allocate in the first ones


def ladder(max_batch: int) -> list[int]:
    """Batch sizes that get a graph: powers of two, and the largest batch."""
    rungs = [1 << i for i in range(max_batch.bit_length()) if 1 << i < max_batch]
    return [*rungs, max_batch]


def rung(rungs: list[int], rows: int) -> int:
    """The smallest rung that holds so many rows."""
    return rungs[bisect_left(rungs, rows)]


class Graphs:
    """The captured forwards of one set of static inputs.

    Args:
        inputs: static inputs of max_batch rows by name; they stay where they are.
        forward: computes the outputs by name of some rows of them.
        stream: where they will run, which is where they are captured.
    """

    def __init__(
        self, inputs: Tensors, forward: Callable[[Tensors], Tensors], stream: torch.cuda.Stream, max_batch: int
    ) -> None:
        self._rungs = ladder(max_batch)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensors]] = {}
        pool = None
        for rows in reversed(self._rungs):  # the largest first: the others find room in its memory
            part = {name: tensor[:rows] for name, tensor in inputs.items()}
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UPS):
                    forward(part)
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                outputs = forward(part)
            pool = pool or graph.pool()
            self._graphs[rows] = (graph, outputs)

    def run(self, rows: int) -> Tensors:
        """Compute the static inputs' first rows; gives the outputs, of which the first rows are meant."""
        graph, outputs = self._graphs[rung(self._rungs, rows)]
        graph.replay()
        return {name: tensor[:rows] for name, tensor in outputs.items()}
