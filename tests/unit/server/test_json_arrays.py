"""JSON with arrays, as robots send it over POST /act: how many values it may have, and how chunks are written."""

import json

import numpy as np
import pytest

from jurybox.server.gateway.robots.json_arrays import dumps, dumps_rows, loads
from jurybox.server.gateway.robots.msgpack_arrays import MOST_ITEMS, Malformed

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
