"""Rows that a model reports as failed: each request with one is refused, with the first of its rows and the reason."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.records import records
from tests.unit.engine.test_served import NUMBER, asked

from jurybox.protocol import TensorSpec
from jurybox.protocol.arena import Columns
from jurybox.protocol.errors import Code
from jurybox.server.engine.served import Served
from jurybox.server.models import RowErrors, ServedModel

ROW = {"x": TensorSpec("float32", (2,))}


class Refuses(torch.nn.Module):
    """Refuses negative rows, and some that the batch does not have."""

    def __init__(self, *others: int) -> None:
        super().__init__()
        self.others = others

    def forward(self, x: torch.Tensor) -> object:
        failed = dict.fromkeys(np.flatnonzero((x[:, 0] < 0).numpy()).tolist(), "negative")
        return RowErrors(dict.fromkeys(self.others, "not here") | failed, x[:, 0])


def rows(*values: float) -> np.ndarray:
    return np.repeat(np.array(values, np.float32)[:, None], 2, axis=1)


@pytest.mark.parametrize("finite", [False, True])
@pytest.mark.parametrize("failed", [0, 1, 2])
def test_a_request_with_a_row_that_the_model_reports_is_refused_whether_or_not_outputs_are_checked(
    failed: int, finite: bool
) -> None:
    outputs = {"y": TensorSpec("float32", (), finite=finite)}
    _, ask = asked(ServedModel(Refuses(), ROW, outputs))
    values = [3.0, 4.0, 5.0]
    values[failed] = -1.0
    outcome, _ = ask(rows(*values))
    assert outcome.refused == {0: (Code.ROW_FAILED, f"1 of 3 rows failed; row {failed}: negative")}
    outcome, answered = ask(rows(3, 4, 5))
    assert outcome is None and answered["y"].tolist() == [3, 4, 5]


def test_a_row_that_the_batch_does_not_have_refuses_nothing() -> None:
    _, ask = asked(ServedModel(Refuses(-1, 3, 100), ROW, {"y": NUMBER}))
    outcome, answered = ask(rows(3, 4, 5))
    assert outcome is None and answered["y"].tolist() == [3, 4, 5]


def test_each_request_of_a_batch_is_refused_for_its_own_rows_and_the_others_are_answered() -> None:
    model = ServedModel(Refuses(), ROW, {"y": NUMBER})
    columns = Columns.here(model.spec("m"), 32)
    served = Served("m", model, columns.inputs, columns.outputs, 16, columns=columns)
    tickets = records(("first", "rows"), (10, 2), (4, 3), (0, 1), (20, 2))
    columns.inputs["x"][:] = 7
    columns.inputs["x"][[5, 6, 21]] = -1
    with torch.inference_mode():
        outcome = served.run(tickets, 8)
    assert outcome is not None and outcome.errors == [] and outcome.again == set()
    assert outcome.refused == {
        1: (Code.ROW_FAILED, "2 of 3 rows failed; row 1: negative"),
        3: (Code.ROW_FAILED, "1 of 2 rows failed; row 1: negative"),
    }
    assert columns.outputs["y"][[10, 11, 0]].tolist() == [7, 7, 7]
