"""The tensors of a request as rows: of models with parameters, of panels' members, and of a sequence's state."""

from __future__ import annotations

import numpy as np
import pytest

from jurybox.protocol.errors import RowFailed, SpecMismatch
from jurybox.protocol.parameters import Parameter
from jurybox.protocol.spec import ModelSpec, TensorSpec
from jurybox.server.frontend.requests import RowsReply
from jurybox.server.gateway.inference.asked_rows import AskedRows
from jurybox.server.gateway.inference.parameters import request_parameters
from jurybox.server.gateway.inference.requests import InferRequest, Input, RequestedOutput
from jurybox.server.gateway.inference.shared_memory import Regions

ONE, PAIR = TensorSpec("float32"), TensorSpec("float32", (2,))
X = np.array([[1, 2], [3, 4], [5, 6]], np.float32)
SESSIONS = {"session_client": "a" * 32, "sessions": "0:1;1:2"}
STATEFUL = ModelSpec("m", {"x": PAIR}, {"score": ONE}, {"total": PAIR, "steps": ONE})
TUNED = ModelSpec(
    "m", {"a": ONE, "b": ONE, "c": ONE}, {"score": ONE},
    parameters={"first": Parameter("a", 1.0), "second": Parameter("b", 2.0), "third": Parameter("c", 3.0)},
)  # fmt: skip


def given(name, rows):
    return Input(name, "FP32", rows.shape, rows.tobytes(), raw=True)


def asked(*inputs, outputs=(), **parameters):
    wanted = [RequestedOutput(name) for name in outputs]
    request = InferRequest("m", "", "an id", list(inputs), wanted, parameters)
    return AskedRows(Regions(""), request, request_parameters(parameters))


def test_the_state_of_sequences_is_got_without_inputs_in_a_row_for_each():
    request = asked(**SESSIONS, session_state="get")
    read = request.read(STATEFUL, False)
    assert (dict(read.inputs), read.n, read.answer) == ({}, 2, 2 * (8 + 4))
    answer = request.response(RowsReply({"total": X[:2], "steps": X[:2, 0]}, 7, STATEFUL))
    assert [output.name for output in answer.outputs] == ["total", "steps"]
    np.testing.assert_array_equal(answer.outputs[0].array, X[:2])
    read = asked(outputs=["steps"], **SESSIONS, session_state="get").read(STATEFUL, False)
    assert read.answer == 2 * 4
    with pytest.raises(SpecMismatch, match="input 'x' is not the model's; model 'm' takes none"):
        asked(given("x", X), **SESSIONS, session_state="get").read(STATEFUL, False)
    with pytest.raises(SpecMismatch, match="output 'score' is not the model's; there are total, steps"):
        asked(outputs=["score"], **SESSIONS, session_state="get").read(STATEFUL, False)


def test_a_state_is_set_by_inputs_of_its_names_and_answered_by_nothing():
    request = asked(given("total", X[:2]), given("steps", X[:2, 0]), **SESSIONS, session_state="set")
    read = request.read(STATEFUL, False)
    assert (set(read.inputs), read.n, read.answer) == ({"total", "steps"}, 2, 0)
    assert not request.response(RowsReply({}, 7, STATEFUL)).outputs
    with pytest.raises(SpecMismatch, match="model 'm' takes total, steps; came total"):
        asked(given("total", X[:2]), **SESSIONS, session_state="set").read(STATEFUL, False)
    with pytest.raises(SpecMismatch, match="output 'total' is not the model's; there are none"):
        asked(given("total", X), given("steps", X[:, 0]), outputs=["total"], **SESSIONS, session_state="set").read(
            STATEFUL, False
        )


def test_a_step_has_the_rows_of_its_inputs():
    """Whether they are as many as its sequences is looked at in the sequences' turn."""
    read = asked(given("x", X), **SESSIONS).read(STATEFUL, False)
    assert read.n == 3 and list(read.inputs) == ["x"] and read.answer == 3 * 4


def test_a_member_of_a_panel_gets_the_inputs_that_it_has_and_answers_with_a_score():
    request = asked(given("x", X), given("other", X))
    read = request.read(STATEFUL, True)
    assert (list(read.inputs), read.n, read.answer) == (["x"], 3, 3 * 4)
    with pytest.raises(SpecMismatch, match="input 'other' is not the model's"):
        request.read(STATEFUL, False)


@pytest.mark.parametrize(
    ("inputs", "parameters", "found"),
    [
        ([], {}, {"a": [1], "b": [2], "c": [3]}),
        ([], {"second": 5.0}, {"a": [1], "b": [5], "c": [3]}),
        (["a"], {"third": 7.0}, {"a": [1, 3, 5], "b": [2, 2, 2], "c": [7, 7, 7]}),
        (["a", "b", "c"], {}, {"a": [1, 3, 5], "b": [1, 3, 5], "c": [1, 3, 5]}),
    ],
)
def test_parameters_that_are_not_given_have_their_defaults_in_every_row_or_in_one(inputs, parameters, found):
    read = asked(*(given(name, X[:, 0]) for name in inputs), **parameters).read(TUNED, False)
    assert {name: list(rows) for name, rows in read.inputs.items()} == found
    assert read.n == len(found["a"]) and read.answer == 4 * read.n


def test_outputs_whose_rows_differ_in_size_are_flat_if_the_request_says_so():
    spec = ModelSpec("m", {"x": PAIR}, {"y": TensorSpec("float32", (-1,), capacity=4)})
    rows = [X[0], X[0, :1], X[1]]
    request = asked(given("x", X), extents=True)
    request.read(spec, False)
    (output,) = request.response(RowsReply({"y": rows}, 7, spec)).outputs
    assert output.array.tolist() == [1, 2, 1, 3, 4] and output.parameters == {"extents": "2;1;2"}
    request = asked(given("x", X))
    request.read(spec, False)
    with pytest.raises(Exception, match="rows of output 'y' differ in size"):
        request.response(RowsReply({"y": rows}, 7, spec))


def test_an_answer_has_the_names_of_its_request_and_the_reasons_of_failed_rows():
    request = asked(given("x", X))
    request.read(STATEFUL, False)
    failed = RowFailed("row 1 failed", errors={1: "too dark"})
    answer = request.response(RowsReply({"score": np.array([1, 2, 3], np.float32)}, 7, STATEFUL, failed))
    assert (answer.model, answer.version, answer.id) == ("m", "7", "an id")
    assert answer.parameters == {"row_errors": '{"1": "too dark"}'}
    np.testing.assert_array_equal(answer.outputs[0].array, np.array([1, np.nan, 3], np.float32))
