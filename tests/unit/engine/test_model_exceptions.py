"""Whatever a model raises: its clients get an error, the log has the traceback, and the engine keeps serving."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.models import VECTOR, affine

from jurybox.client import ModelFailed
from jurybox.protocol import TensorSpec
from jurybox.protocol.errors import Code, Error, Refused
from jurybox.server.engine.batches import Batches
from jurybox.server.inproc import InprocServer
from jurybox.server.models import ServedModel

X = np.ones((2, 4), np.float32)


class Speechless(Exception):
    def __str__(self):
        raise SystemExit("an exception whose text ends processes")


class Raising(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.error: BaseException | None = None

    def forward(self, observation):
        if self.error is not None:
            raise self.error
        return observation + 1


@pytest.fixture
def world():
    """A server whose model raises a given exception, and what its engine reported."""
    module, reported = Raising(), []
    served = ServedModel(module, VECTOR, {"action": TensorSpec("float32", (4,))})
    with InprocServer({"m": served, "other": affine()}) as server:
        server.engine._batches._report = lambda event, **fields: reported.append((event, fields))
        yield server, module, reported


@pytest.mark.parametrize(
    "error",
    [
        SystemExit(3),
        GeneratorExit(),
        RecursionError("deep"),
        Speechless(),
        ValueError("half \ud800 a pair"),
        ValueError("long " * 100_000),
        Error("made up", Code.OK),
        Refused("made up"),
    ],
    ids=lambda error: type(error).__name__[:12].encode("ascii", "replace").decode(),
)
def test_every_exception_of_a_model_is_model_failed_and_the_engine_keeps_serving(world, error):
    server, module, reported = world
    model = server.model("m", rows=4)
    module.error = error
    with pytest.raises(ModelFailed, match="model 'm' raised") as caught:
        model.infer(X)
    str(caught.value).encode()
    assert len(str(caught.value)) < 5000
    module.error = None
    np.testing.assert_array_equal(model.infer(X), X + 1)
    np.testing.assert_array_equal(server.model("other").infer(X), 2 * X + 1)
    assert reported[0][0] == "model failed"


def test_the_log_has_the_traceback_once_in_a_while_and_every_failure(world):
    server, module, reported = world
    model = server.model("m", rows=4)
    module.error = ValueError("seventeen")
    for _ in range(5):
        with pytest.raises(ModelFailed):
            model.infer(X)
    assert [event for event, _ in reported] == ["model failed"] * 5
    assert "in forward" in reported[0][1]["exception"] and "seventeen" in reported[0][1]["exception"]
    assert not any("exception" in fields for _, fields in reported[1:])


def test_after_an_interrupt_of_the_process_of_the_engine_it_serves_and_its_rows_are_returned(world):
    server, module, _ = world
    model = server.model("m", rows=2)
    module.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        model.infer(X)
    module.error = None
    np.testing.assert_array_equal(server.model("m", rows=2).infer(X), X + 1)


def test_an_interrupt_that_a_model_raises_in_an_engine_is_an_exception_like_another(world):
    server, module, _ = world
    batches: Batches = server.engine._batches
    batches._mine = ()  # as in an engine's process
    module.error = KeyboardInterrupt()
    with pytest.raises(ModelFailed, match="KeyboardInterrupt"):
        server.model("m", rows=2).infer(X)


def test_a_version_that_is_not_held_is_no_failure_of_the_model(world):
    server, _, reported = world
    with pytest.raises(Refused, match="takes no publications") as caught:
        server.model("m").infer(X, version=3)
    assert caught.value.code == Code.VERSION_NOT_HELD
    assert [event for event, _ in reported] == ["weights version not held"]
    record = server.engine.scoreboard.counters[0, 0]
    assert (record["failed"], record["not_held"]) == (0, 1)
