"""Base64 of arrays in JSON: characters that are none of its alphabet are refused, not left out."""

from __future__ import annotations

import json

import pytest

from jurybox.server.gateway.robots.json_arrays import loads
from jurybox.server.gateway.robots.msgpack_arrays import Malformed


@pytest.mark.parametrize("marker", ["__numpy__", "__ndarray__"])
@pytest.mark.parametrize("text", ["AAAA!", "AA AA", "AA\nAA", "AAAA\u00e9", "AA-_AA"])
def test_a_character_that_is_not_base64_is_not_left_out(marker, text):
    array = {marker: text, "dtype": "|u1", "shape": [3]}
    assert loads(json.dumps({"x": {**array, marker: "AAAA"}}).encode())["x"].tolist() == [0, 0, 0]
    with pytest.raises(Malformed, match=f"'{marker}' is not base64"):
        loads(json.dumps({"x": array}).encode())
