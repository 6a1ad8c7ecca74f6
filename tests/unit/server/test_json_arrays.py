"""JSON with arrays, as robots send it over POST /act: how many values it may have, and how chunks are written."""

import base64
import json

import numpy as np
import pytest

from jurybox.server.gateway.robots.json_arrays import dumps, dumps_rows, loads
from jurybox.server.gateway.robots.msgpack_arrays import MOST_DEPTH, MOST_ITEMS, Malformed

MANY = [0] * (MOST_ITEMS + 2)
PICTURE = json.loads(dumps(np.zeros((64, 64, 3), np.uint8)))


@pytest.mark.parametrize(
    "given", [{"state": MANY}, {"image": PICTURE, "state": MANY}, {"state": MANY, "text": "," * 9999}]
)
def test_a_message_of_too_many_values_is_refused_before_it_is_parsed(given, monkeypatch):
    """Long strings are cut out of it before."""
    body = json.dumps(given).encode()
    monkeypatch.setattr(json, "loads", lambda *_, **__: pytest.fail("parsed"))
    with pytest.raises(Malformed, match=f"more than {MOST_ITEMS} values"):
        loads(body)


@pytest.mark.parametrize("end", [b"", b"]", b'"'])
def test_one_that_is_no_json_behind_a_picture_is_counted_too(end):
    body = json.dumps({"image": PICTURE, "state": MANY}).encode()[:-1] + end
    with pytest.raises(Malformed, match=f"more than {MOST_ITEMS} values"):
        loads(body)


def test_commas_within_long_texts_are_no_values():
    text = "," * (MOST_ITEMS + 2)
    assert loads(json.dumps({"instruction": text}).encode()) == {"instruction": text}


@pytest.mark.parametrize(
    "array",
    [
        np.arange(14, dtype=np.float32).reshape(7, 2), np.zeros((0, 3), np.float32), np.zeros((3, 0)),
        np.asfortranarray(np.arange(6).reshape(2, 3)), np.arange(24, dtype="<f8").reshape(6, 4)[::2, 1:],
        np.ones((1, 2, 3), bool),
    ],
)  # fmt: skip
def test_the_rows_of_an_array_are_written_as_a_list_of_arrays(array):
    assert dumps_rows(array) == dumps(list(array))


@pytest.mark.parametrize("marker", ["__numpy__", "__ndarray__"])
@pytest.mark.parametrize("dtype", ["<f4", "float32"])
@pytest.mark.parametrize("deep", [False, True])
def test_arrays_are_read_wherever_they_are_and_by_either_marker(marker, dtype, deep):
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    given = {marker: base64.b64encode(array.tobytes()).decode(), "dtype": dtype, "shape": [2, 3]}
    found = loads(json.dumps({"x": {"y": [given, "text"]} if deep else given}).encode())["x"]
    if deep:
        found, text = found["y"]
        assert text == "text"
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, array)


@pytest.mark.parametrize(
    ("given", "dtype"),
    [([[1, 2], [3, 4]], "int64"), ([[1.5], [2]], "float64"), ([[True, False]], "bool"), ([[[1]], [[2]]], "int64")],
)
def test_lists_of_lists_of_numbers_are_arrays(given, dtype):
    found = loads(json.dumps({"x": given}).encode())["x"]
    assert found.dtype == dtype
    assert found.tolist() == given


@pytest.mark.parametrize("given", [[1, 2.5], ["a"], [["a", "b"]], [[1], [2, 3]], [{"a": 1}], [[1], None], [], None, 7])
def test_other_lists_and_values_are_as_they_were(given):
    found = loads(json.dumps({"x": given}).encode())["x"]
    assert found == given and not isinstance(found, np.ndarray)


@pytest.mark.parametrize(("begin", "end", "most"), [(b'{"x": ', b"}", MOST_DEPTH), (b"[", b"]", MOST_DEPTH + 1)])
def test_objects_and_lists_may_be_as_deep_as_the_limit_and_no_deeper(begin, end, most):
    """The message itself is an object."""

    def nested(depth):
        return b'{"x": ' + begin * (depth - 1) + b"1" + end * (depth - 1) + b"}"

    loads(nested(most))
    with pytest.raises(Malformed, match=f"nested deeper than {MOST_DEPTH}"):
        loads(nested(most + 1))


def test_a_message_may_have_as_many_values_as_the_limit():
    assert len(loads(json.dumps({"state": [0] * (MOST_ITEMS + 1)}).encode())["state"]) == MOST_ITEMS + 1
    with pytest.raises(Malformed, match="send numbers in arrays"):
        loads(json.dumps({"state": MANY}).encode())


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"__numpy__": 7, "dtype": "<f4", "shape": []}, "'__numpy__': expected base64, came int"),
        ({"__numpy__": "AA!A", "dtype": "<f4", "shape": []}, "'__numpy__' is not base64"),
        ({"__ndarray__": "AAA", "dtype": "<f4", "shape": []}, "'__ndarray__' is not base64"),
    ],
)
def test_an_array_that_is_no_base64_is_refused(wrong, why):
    with pytest.raises(Malformed, match=why):
        loads(json.dumps({"x": wrong}).encode())


def test_what_json_cannot_say_is_not_written():
    assert json.loads(dumps({"a": [1, None, True], "b": np.float32(2)}))["a"] == [1, None, True]
    assert loads(dumps({"b": np.float32(2)}))["b"] == np.float32(2)
    with pytest.raises(TypeError, match="a set cannot be sent: expected numbers, text, arrays, lists, dicts"):
        dumps({"a": {1}})
