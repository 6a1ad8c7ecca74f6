"""Bodies of the Open Inference Protocol over HTTP: JSON, or JSON with binary tensors behind it."""

from __future__ import annotations

import json

import numpy as np
import pytest

from jurybox.protocol.errors import Code, Error, Refused
from jurybox.server.gateway.inference.http_json import body_of, request_of, whole
from jurybox.server.gateway.inference.requests import InferResponse, Output
from jurybox.server.gateway.inference.tensors import read_json

X = {"name": "x", "shape": [2], "datatype": "FP32"}


def asked(request, binary=b"", length=None):
    """What a body asks for; its JSON has the length that is told unless another is given."""
    head = json.dumps(request).encode()
    told = str(len(head)) if length is None and binary else length
    return request_of("m", "7", head + binary, told)


def test_a_request_has_its_inputs_outputs_and_parameters():
    request = {
        "id": "r",
        "parameters": {"timeout": 5},
        "inputs": [{**X, "data": [1, 2], "parameters": {"extents": "2"}}],
    }
    found, binary, all_binary = asked({**request, "outputs": [{"name": "y"}]})
    assert (found.model, found.version, found.id, found.parameters) == ("m", "7", "r", {"timeout": 5})
    (x,) = found.inputs
    assert (x.name, x.datatype, x.shape, x.data, x.raw, x.parameters) == (
        "x",
        "FP32",
        (2,),
        [1, 2],
        False,
        {"extents": "2"},
    )
    assert ([(one.name, one.parameters) for one in found.outputs], binary, all_binary) == ([("y", {})], set(), False)


def test_binary_tensors_follow_in_the_order_of_their_names():
    inputs = [
        {**X, "name": name, "parameters": {"binary_data_size": size}} for name, size in (("a", 3), ("b", 0), ("c", 2))
    ]
    found, _, _ = asked({"inputs": [inputs[0], {**X, "data": [1, 2]}, *inputs[1:]]}, b"aaacc")
    came = [(one.name, one.raw, one.data if not one.raw else bytes(one.data)) for one in found.inputs]
    assert came == [("a", True, b"aaa"), ("x", False, [1, 2]), ("b", True, b""), ("c", True, b"cc")]
    assert all("binary_data_size" not in one.parameters for one in found.inputs)


@pytest.mark.parametrize(
    ("all_of_them", "outputs", "expected"),
    [
        (True, None, (set(), True)),
        (False, None, (set(), False)),
        (None, None, (set(), False)),
        (True, [{"name": "y"}, {"name": "z", "parameters": {"binary_data": False}}], ({"y"}, False)),
        (None, [{"name": "y"}, {"name": "z", "parameters": {"binary_data": True}}], ({"z"}, False)),
    ],
)
def test_outputs_come_binary_if_they_or_all_are_asked_for_so(all_of_them, outputs, expected):
    request = {"inputs": []} | ({} if outputs is None else {"outputs": outputs})
    if all_of_them is not None:
        request["parameters"] = {"binary_data_output": all_of_them}
    found, *binary = asked(request)
    assert tuple(binary) == expected
    assert found.parameters == {} and all(one.parameters == {} for one in found.outputs)


BINARY = {**X, "parameters": {"binary_data_size": 2}}


@pytest.mark.parametrize(
    ("request_", "binary", "length", "why"),
    [
        ({"inputs": [BINARY]}, b"a", None, "binary_data_size='2': expected 0 to 1, the bytes left"),
        ({"inputs": [BINARY]}, b"aaa", None, "1 bytes came after the tensors"),
        ({"inputs": [BINARY, BINARY]}, b"aaa", None, "expected 0 to 1, the bytes left"),
        ({"inputs": [{**BINARY, "data": [1, 2]}]}, b"aa", None, "no data beside it"),
        ({"inputs": [{**X, "parameters": {"binary_data_size": -1}}]}, b"", None, "binary_data_size='-1'"),
        ({"inputs": [{**X, "parameters": {"binary_data_size": True}}]}, b"a", None, "binary_data_size='True'"),
        ({"inputs": []}, b"", "15", "'15': expected 0 to 14, the body's length"),
        ({"inputs": []}, b"", "-1", "'-1': expected 0 to 14, the body's length"),
        ({"inputs": []}, b"", "\uff11", "expected 0 to 14"),
        ({"inputs": [X], "more": 1}, b"", None, "request: field 'more' is not known here; there are: id, parameters"),
        ({"inputs": [{**X, "more": 1}]}, b"", None, "input: field 'more' is not known"),
        ({"inputs": [], "outputs": [{"name": "y", "more": 1}]}, b"", None, "output: field 'more' is not known"),
        ({"inputs": X}, b"", None, "inputs: expected a list of objects, came dict"),
        ({"inputs": [1]}, b"", None, "inputs: expected a list of objects"),
        ({}, b"", None, "inputs: expected a list of objects, came NoneType"),
        ({"inputs": [], "outputs": None}, b"", None, "outputs: expected a list of objects, came NoneType"),
        ({"inputs": [X] * 1025}, b"", None, "inputs: 1025 came, expected at most 1024"),
        ({"inputs": [{**X, "name": 1}]}, b"", None, "input: name is int, expected a string"),
        ({"inputs": [{**X, "datatype": None}]}, b"", None, "input 'x': datatype is NoneType, expected a string"),
        ({"inputs": [{**X, "shape": 2}]}, b"", None, "input 'x': shape is int, expected a list of whole numbers"),
        ({"inputs": [{**X, "data": "12"}]}, b"", None, "input 'x': data is str, expected a list of numbers"),
        ({"inputs": [{**X, "parameters": []}]}, b"", None, "input 'x': parameters is list, expected an object"),
        ({"inputs": [], "parameters": {str(i): 1 for i in range(1025)}}, b"", None, "request: 1025 parameters came"),
        ({"inputs": [], "id": 5}, b"", None, "request: id is int, expected a string"),
        ({"inputs": [], "parameters": {"binary_data_output": 1}}, b"", None, "binary_data_output='1': expected true"),
    ],
)
def test_a_body_of_another_form_is_refused_by_the_field(request_, binary, length, why):
    with pytest.raises(Error, match=why) as caught:
        asked(request_, binary, length)
    assert caught.value.code == Code.MALFORMED


def test_as_many_tensors_and_parameters_as_the_limit_are_taken():
    found, _, _ = asked({"inputs": [X] * 1024, "parameters": {str(i): 1 for i in range(1024)}})
    assert len(found.inputs) == len(found.parameters) == 1024


@pytest.mark.parametrize(
    ("text", "number"),
    [("0", 0), ("10", 10), ("11", -1), ("", -1), ("+1", -1), ("1.", -1), ("\u0661", -1), ("0" * 21, -1)],
)
def test_a_length_is_ascii_digits_up_to_the_most(text, number):
    assert whole(text, 10) == number


def test_an_answer_is_json_with_its_binary_outputs_behind():
    outputs = [
        Output("a", "FP32", (1, 2), np.array([[1, 2]], np.float32)),
        Output("b", "INT32", (1,), np.array([3], np.int32), {"extents": "1"}),
        Output("c", "BYTES", (1,), [b"text"]),
        Output("d", "FP32", (1,), None, {"shared_memory_region": "r"}),
    ]
    response = InferResponse("m", "4", "r", outputs, {"k": 1})
    body, length = body_of(response, {"b", "c", "d"}, all_binary=False)
    document = json.loads(body[:length])
    assert {key: value for key, value in document.items() if key != "outputs"} == {
        "model_name": "m", "model_version": "4", "id": "r", "parameters": {"k": 1},
    }  # fmt: skip
    assert document["outputs"] == [
        {"name": "a", "datatype": "FP32", "shape": [1, 2], "data": [1.0, 2.0]},
        {"name": "b", "datatype": "INT32", "shape": [1], "parameters": {"extents": "1", "binary_data_size": 4}},
        {"name": "c", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 8}},
        {"name": "d", "datatype": "FP32", "shape": [1], "parameters": {"shared_memory_region": "r"}},
    ]
    assert body[length:] == b"\3\0\0\0" + b"\4\0\0\0text"
    assert outputs[1].parameters == {"extents": "1"}, "the answer's own"
    body, length = body_of(InferResponse("m", "4", "", outputs[:1]), set(), all_binary=True)
    assert body[length:] == np.array([1, 2], np.float32).tobytes()


def test_an_answer_without_binary_outputs_says_no_length_and_nothing_that_is_empty():
    body, length = body_of(
        InferResponse("m", "4", "", [Output("c", "BYTES", (1,), [b"\xc3\xa9"])]), set(), all_binary=False
    )
    assert length is None
    assert json.loads(body) == {
        "model_name": "m", "model_version": "4",
        "outputs": [{"name": "c", "datatype": "BYTES", "shape": [1], "data": ["\u00e9"]}],
    }  # fmt: skip


def test_bytes_that_are_no_text_are_not_sent_as_json():
    with pytest.raises(
        Refused, match="output 'c' holds bytes that are no UTF-8.*ask for it with binary_data"
    ) as caught:
        body_of(InferResponse("m", "4", "", [Output("c", "BYTES", (1,), [b"\xff"])]), set(), all_binary=False)
    assert caught.value.code == Code.UNSUPPORTED


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "the body is no JSON"),
        (b"[1]", "the body is a JSON list: expected an object"),
        (b'{"a": 1', "the body is no JSON"),
        (b"\xff", "the body is no JSON"),
        (b"[" * 100_000, "the body is no JSON"),
        (b"{" * 8193, "the JSON has 8193 {, expected at most 8192: send tensors as binary data"),
        (b"[" * (2**20 + 1), "expected at most 1048576: send tensors as binary data"),
        (b'"' * 65537, 'the JSON has 65537 ", expected at most 65536'),
    ],
)
def test_json_that_is_no_object_or_has_too_many_parts_is_refused(body, why):
    with pytest.raises(Error, match=why) as caught:
        read_json(body)
    assert caught.value.code == Code.MALFORMED


def test_json_may_have_as_many_parts_as_the_limit_and_the_names_of_what_is_no_number():
    assert len(read_json(b'{"a": [' + b"{}," * 8190 + b"{}]}")["a"]) == 8191
    assert len(read_json(b'{"a": [' + b'"",' * 32766 + b'""]}')["a"]) == 32767
    given = read_json(b'{"a": [NaN, Infinity, -Infinity, 1e999]}')["a"]
    assert str(given) == "[nan, inf, -inf, inf]"
