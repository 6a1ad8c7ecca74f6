"""Rows that wait are shown as waiting no longer, however their model was taken away."""

from __future__ import annotations

import numpy as np
import pytest
from tests.models import affine

from jurybox.protocol.errors import Code
from jurybox.server.inproc import InprocServer


@pytest.mark.parametrize("how", ["another arena", "rest", "refuse", "remove"])
def test_rows_that_were_left_by_a_batch_and_then_refused_are_not_shown_as_waiting(how: str) -> None:
    with InprocServer({"a": affine()}, max_batch=4) as server:
        model, engine = server.model("a"), server.engine
        tickets = [model.submit(np.ones((2, 4), np.float32)) for _ in range(6)]
        server._turn()
        record = engine.scoreboard.counters[0, 0]
        assert record["waiting"] == 8
        if how == "another arena":
            engine.install(0, engine.slots[0].served, arena=1)
        elif how == "rest":
            engine.rest(0, "it sleeps")
        elif how == "refuse":
            engine.refuse(0, Code.MODEL_FAILED, "it crashed")
        else:
            engine.remove(0)
        assert record["waiting"] == 0
        assert np.all(tickets[0].result().outputs == 3) and not server._turn()


def test_rows_that_follow_a_model_to_its_successor_go_on_to_be_shown_until_they_are_computed() -> None:
    with InprocServer({"a": affine()}, max_batch=4) as server:
        model, engine = server.model("a"), server.engine
        tickets = [model.submit(np.ones((2, 4), np.float32)) for _ in range(4)]
        server._turn()
        record = engine.scoreboard.counters[0, 0]
        engine.install(0, engine.slots[0].served)
        assert record["waiting"] == 4
        server._turn()
        assert record["waiting"] == 0 and np.all(tickets[-1].result().outputs == 3)
