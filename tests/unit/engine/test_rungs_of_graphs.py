"""Which captured graph computes a batch, and which rows of its outputs are the batch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from jurybox.server.engine.graphs import Graphs, ladder


class Replayed:
    """A graph that adds one to its outputs when it is replayed."""

    def __init__(self, rows: int) -> None:
        self.outputs = {"y": torch.arange(rows), "z": torch.arange(10 * rows).reshape(rows, 10)}

    def replay(self) -> None:
        for output in self.outputs.values():
            output.add_(1)


@pytest.mark.parametrize(("rows", "rung"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 6), (6, 6)])
def test_a_batch_is_computed_once_by_the_smallest_graph_that_has_room_for_it(rows: int, rung: int) -> None:
    graphs: Any = object.__new__(Graphs)
    made = {each: Replayed(each) for each in ladder(6)}
    graphs._rungs, graphs._graphs = ladder(6), {each: (graph, graph.outputs) for each, graph in made.items()}
    found = graphs.run(rows)
    assert {name: tuple(value.shape) for name, value in found.items()} == {"y": (rows,), "z": (rows, 10)}
    assert found["y"].tolist() == list(range(1, rows + 1))
    assert [each for each, graph in made.items() if graph.outputs["y"][0] == 1] == [rung]
