"""The head of an answer over HTTP says whether it is JSON alone or has binary tensors behind it."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tests.unit.server.test_http_routes import gateway, http  # noqa: F401  fixtures


@pytest.mark.parametrize("binary", [True, False])
async def test_an_answer_is_json_or_json_with_binary_tensors_behind_it(http, binary):  # noqa: F811
    asked = {
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1.0]}],
        "parameters": {"binary_data_output": binary},
    }
    reply = await http.post("/v2/models/m/infer", json=asked)
    assert reply.status_code == 200
    if not binary:
        assert reply.headers["content-type"] == "application/json" and reply.json()["outputs"][0]["data"] == [2.0]
        assert "inference-header-content-length" not in reply.headers
        return
    assert reply.headers["content-type"] == "application/octet-stream"
    size = int(reply.headers["inference-header-content-length"])
    (output,) = json.loads(reply.content[:size])["outputs"]
    assert output["parameters"] == {"binary_data_size": 4}
    assert reply.content[size:] == np.float32([2]).tobytes()
