"""Sessions of a model that gives no initial state begin with zeros, in the dtype and shape of the state's spec."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from jurybox.protocol import TensorSpec
from jurybox.server.inproc import InprocServer
from jurybox.server.models import ServedModel


class Counts(torch.nn.Module):
    """Counts the steps of a session by twos and threes; answers what it had counted before, and notes its dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor, steps: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.seen.append(steps.dtype)
        by = torch.tensor([2, 3])
        return x + steps.to(torch.float32), (steps.to(torch.int64) + by).to(steps.dtype)


@pytest.mark.parametrize("dtype", ["int64", "uint8", "uint16", "float16", "float32"])
@pytest.mark.parametrize("together", [False, True])
def test_a_session_begins_with_zeros_of_its_spec_and_begins_anew_with_them(dtype: str, together: bool) -> None:
    two = TensorSpec("float32", (2,))
    module = Counts()
    model = ServedModel(module, {"x": two}, {"y": two}, state={"steps": TensorSpec(dtype, (2,))})
    with InprocServer({"m": model}) as server, server.model("m", rows=8).sessions(3) as sessions:
        zeros = np.zeros((3, 2), np.float32)
        for before in ([0, 0], [2, 3], [4, 6]):
            if together:
                assert sessions.infer(zeros).tolist() == [before] * 3
            else:
                tickets = [sessions.submit(zeros[:1], session=[row]) for row in range(3)]
                assert [ticket.result().outputs.tolist() for ticket in tickets] == [[before]] * 3
        assert sessions.infer(zeros, reset=np.array([True, False, True])).tolist() == [[0, 0], [6, 9], [0, 0]]
        assert set(module.seen) == {getattr(torch, dtype)}
        assert sessions.get_state()["steps"].tolist() == [[2, 3], [8, 12], [2, 3]]
