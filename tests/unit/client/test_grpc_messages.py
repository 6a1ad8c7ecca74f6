"""Requests and answers over gRPC whose rows all have fixed sizes: their bytes are those of the protocol."""

from __future__ import annotations

import numpy as np
import pytest

from jurybox.client.remote import grpc_messages
from jurybox.client.remote.grpc_messages import plain_messages
from jurybox.protocol import ModelSpec, TensorSpec
from jurybox.protocol import open_inference_pb2 as pb
from jurybox.protocol.arena import Columns

SPEC = ModelSpec(
    "m",
    {"x": TensorSpec("float32", (2,)), "k": TensorSpec("uint8", ())},
    {"y": TensorSpec("float32", (2,)), "z": TensorSpec("int64", ())},
)
BASE = pb.ModelInferRequest(model_name="m", id="base")


@pytest.fixture
def columns():
    made = Columns.here(SPEC, 5)
    made.inputs["x"][:], made.inputs["k"][:] = np.arange(10).reshape(5, 2), np.arange(5)
    return made


@pytest.fixture
def messages(columns):
    return plain_messages(BASE, columns)


@pytest.mark.parametrize("version", [0, 7])
def test_a_request_is_that_of_the_protocol_also_when_its_form_is_known(messages, columns, version):
    for first, rows in ((1, 2), (3, 2), (0, 5), (1, 2)):
        asked = pb.ModelInferRequest.FromString(messages.request(first, rows, version))
        assert (asked.model_name, asked.id, asked.model_version) == ("m", "base", str(version) if version else "")
        assert [(one.name, one.datatype, list(one.shape)) for one in asked.inputs] == [
            ("x", "FP32", [rows, 2]), ("k", "UINT8", [rows])]  # fmt: skip
        x, k = asked.raw_input_contents
        assert np.frombuffer(x, np.float32).tolist() == columns.inputs["x"][first : first + rows].reshape(-1).tolist()
        assert list(k) == list(range(first, first + rows))


def test_a_request_of_one_row_has_the_bytes_of_that_row():
    spec = ModelSpec("m", {"x": TensorSpec("float32", (2,))}, {"y": TensorSpec("float32", (2,))})
    columns = Columns.here(spec, 2)
    columns.inputs["x"][1] = row = np.array([3, 4], np.float32)
    messages = plain_messages(BASE, columns)
    assert messages.request_of(row) == messages.request(1, 1, 0)


def response(rows=2, version="6", **more):
    made = pb.ModelInferResponse(model_name="m", model_version=version, **more)
    made.outputs.add(name="y", datatype="FP32", shape=(rows, 2))
    made.outputs.add(name="z", datatype="INT64", shape=(rows,))
    made.raw_output_contents.append(np.arange(2 * rows, dtype=np.float32).tobytes())
    made.raw_output_contents.append(np.arange(rows).astype(np.int64).tobytes())
    return made


def learned(messages, made, rows=2, version=6):
    messages.learn(rows, made.SerializeToString(), made, version)
    return messages.form_of(rows, made.SerializeToString())


def test_an_answer_like_one_that_was_read_is_written_to_its_rows(messages, columns):
    known, other = response(), response()
    assert messages.take(1, 2, known.SerializeToString()) is None, "it is read first"
    assert learned(messages, known).version == 6
    other.raw_output_contents[0] = np.full(4, 9, np.float32).tobytes()
    assert messages.take(1, 2, other.SerializeToString()) == 6
    assert columns.outputs["y"].tolist() == [[0, 0], [9, 9], [9, 9], [0, 0], [0, 0]]
    assert columns.outputs["z"].tolist() == [0, 0, 1, 0, 0]


@pytest.mark.parametrize("unlike", ["of more rows", "of another version", "longer", "with its outputs turned round"])
def test_an_answer_unlike_those_that_were_read_is_not_known(messages, columns, unlike):
    assert learned(messages, response())
    answer = {
        "of more rows": response(3).SerializeToString(),
        "of another version": response(version="7").SerializeToString(),
        "longer": response().SerializeToString() + response(id="x").SerializeToString(),
        "with its outputs turned round": b"".join(
            pb.ModelInferResponse(model_name="m", model_version="6", outputs=[one]).SerializeToString()
            for one in reversed(response().outputs)
        ).ljust(len(response().SerializeToString()), b"\0"),
    }[unlike]
    assert messages.take(1, 2, answer) is None and messages.take(1, 3, answer) is None
    assert not columns.outputs["y"].any()


def test_what_an_answer_says_beside_its_outputs_is_never_passed_over(messages):
    told = response()
    told.parameters["row_errors"].string_param = "{}"
    turned = response()
    turned.outputs[0].name, turned.outputs[1].name = "z", "y"
    for made in (told, response(id="mine"), turned):
        assert learned(messages, made) is None


def test_only_so_many_forms_are_kept(messages, monkeypatch):
    monkeypatch.setattr(grpc_messages, "_MOST", 2)
    for rows in (1, 2, 3):
        assert learned(messages, response(rows), rows)
        messages.request(0, rows, 0)
    assert messages.form_of(1, response(1).SerializeToString()) is None
    assert messages.form_of(3, response(3).SerializeToString())
    assert len(messages._answers) <= 2 and len(messages._requests) <= 2


def test_rows_of_other_sizes_have_messages_of_another_kind():
    ragged = ModelSpec("m", {"x": TensorSpec("uint8", (-1,), capacity=8)}, {"y": TensorSpec("float32", ())})
    ragged_output = ModelSpec("m", {"y": TensorSpec("float32", ())}, {"x": TensorSpec("uint8", (-1,), capacity=8)})
    for spec in (ragged, ragged_output):
        assert plain_messages(BASE, Columns.here(spec, 2)) is None
