"""Turns of an engine with one model: batches that are held back, and tickets that a cache answers without one."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from tests.models import VECTOR

from jurybox.protocol import TensorSpec
from jurybox.server.engine.response_cache import ResponseCache
from jurybox.server.inproc import InprocServer
from jurybox.server.models import ServedModel


class Noted(torch.nn.Module):
    """x + 1; notes the first number of each row that it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[list[float]] = []

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        self.batches.append(observation[:, 0].tolist())
        return observation + 1


def noted() -> tuple[Noted, ServedModel]:
    module = Noted()
    return module, ServedModel(module, VECTOR, {"action": TensorSpec("float32", (4,))})


def with_cache(server: InprocServer) -> Any:
    """Install the model again, with a cache; return its slot."""
    served: Any = server.engine.slots[0].served
    served.cache = ResponseCache(served, server._arenas["m"].columns, 1 << 20)
    server.engine.install(0, served)
    return server.engine.slots[0]


def rows(*firsts: float) -> np.ndarray:
    return np.repeat(np.array(firsts, np.float32)[:, None], 4, axis=1)


@pytest.mark.parametrize("how", ["the time is over", "enough rows have come"])
def test_the_only_model_holds_a_small_batch_back_until_enough_rows_or_its_time_have_come(how: str) -> None:
    now = time.monotonic_ns()
    module, model = noted()
    with InprocServer({"m": model}) as server:
        engine, client = server.engine, server.model("m")
        engine._clock = engine._batches._clock = lambda: now
        queue = engine.slots[0].queue
        queue.min_batch, queue.max_wait_ns = 3, 1000
        tickets = [client.submit(rows(1, 2))]
        engine._take_in(now)
        queue.waiting["submitted"] = now
        for _ in range(3):
            assert not server._turn() and module.batches == []
        now += 999
        assert not server._turn() and module.batches == []
        if how == "the time is over":
            now += 1
        else:
            tickets.append(client.submit(rows(3)))
        assert server._turn() and module.batches == [[1, 2] if len(tickets) == 1 else [1, 2, 3]]
        assert [ticket.result().outputs[0, 0] for ticket in tickets] == [2, 4][: len(tickets)]


def test_tickets_whose_rows_a_cache_has_are_answered_and_counted_without_a_batch_and_the_others_get_one() -> None:
    module, model = noted()
    with InprocServer({"m": model}) as server:
        engine, client = server.engine, server.model("m")
        slot = with_cache(server)
        tickets = [client.submit(rows(1, 2)), client.submit(rows(3))]
        assert [ticket.result().outputs[:, 0].tolist() for ticket in tickets] == [[2, 3], [4]]
        assert module.batches == [[1, 2, 3]]
        tickets = [client.submit(rows(2, 3)), client.submit(rows(7)), client.submit(rows(1))]
        engine._take_in(engine._clock())
        assert slot.queue.rows == 1
        assert [ticket.result().outputs[:, 0].tolist() for ticket in tickets] == [[3, 4], [8], [2]]
        assert module.batches == [[1, 2, 3], [7]]
        counted = engine.scoreboard.counters[0, 0]
        assert (counted["cache_hits"], counted["cache_misses"]) == (3, 4)
        assert (counted["requests"], counted["rows"], counted["batches"]) == (5, 7, 2)
        assert [ticket.result().version for ticket in tickets] == [0, 0, 0]


def test_a_cache_that_knows_nothing_of_what_came_leaves_all_of_it_to_a_batch() -> None:
    module, model = noted()
    with InprocServer({"m": model}) as server:
        client = server.model("m")
        with_cache(server)
        client.infer(rows(1))
        tickets = [client.submit(rows(5, 1)), client.submit(rows(6))]
        assert [ticket.result().outputs[:, 0].tolist() for ticket in tickets] == [[6, 2], [7]]
        assert module.batches == [[1], [5, 6]], "the row that is known is not computed again"
