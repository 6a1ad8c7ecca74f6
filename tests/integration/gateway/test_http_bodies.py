"""HTTP as curl sends it: handwritten JSON, and bodies that are wrong."""

from __future__ import annotations

import http.client
import json
import time

import numpy as np
import pytest

from jurybox.client import Refused
from jurybox.server.gateway.inference.http_json import body_of
from jurybox.server.gateway.inference.requests import InferResponse, Output

ROW = {"name": "observation", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}
ANSWER = [3.0, 5.0, 7.0, 9.0]
INFER = "/v2/models/affine/infer"


def ask(curl, tensor=None, path=INFER, **fields):
    return curl.post(path, json={"inputs": [{**ROW, **(tensor or {})}], **fields})


def test_json_in_and_json_out(curl):
    answer = ask(curl, id="a")
    assert answer.status_code == 200
    assert answer.json() == {
        "model_name": "affine", "model_version": "0", "id": "a",
        "outputs": [{"name": "action", "datatype": "FP32", "shape": [1, 4], "data": ANSWER}],
    }  # fmt: skip


def test_all_elements_of_failed_rows_are_null_and_of_no_others():
    rows = np.arange(8, dtype=np.float32).reshape(4, 2)
    rows[1] = np.nan
    for failed, data in (((1,), [0, 1, None, None, 4, 5, 6, 7]), ((1, 3), [0, 1, None, None, 4, 5, None, None])):
        answer = InferResponse("m", "1", "", [Output("y", "FP32", (4, 2), rows, failed=failed)])
        assert json.loads(body_of(answer, set(), all_binary=False)[0])["outputs"][0]["data"] == data


def test_data_may_be_nested_as_the_shape_says(curl):
    assert ask(curl, {"data": [[1, 2, 3, 4]]}).json()["outputs"][0]["data"] == ANSWER
    assert ask(curl, {"data": [[1, 2], [3, 4]]}).status_code == 422


def test_a_version_in_the_path(curl):
    assert ask(curl, path="/v2/models/affine/versions/0/infer").status_code == 200
    answer = ask(curl, path="/v2/models/affine/versions/9/infer")
    assert (answer.status_code, answer.json()["code"]) == (409, "VERSION_NOT_HELD")


def test_a_models_name_may_have_slashes(curl):
    assert ask(curl, path="/v2/models/team/moody/infer").json()["outputs"][0]["data"] == [2, 3, 4, 5]
    assert curl.get("/v2/models/team/moody").json()["name"] == "team/moody"
    assert curl.get("/v2/models/team/moody/versions/0/ready").status_code == 200


def test_binary_tensors_follow_the_json(curl):
    row = np.array([[1, 2, 3, 4]], "<f4").tobytes()
    tensor = {"name": "observation", "shape": [1, 4], "datatype": "FP32", "parameters": {"binary_data_size": 16}}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    answer = curl.post(INFER, content=head + row, headers={"Inference-Header-Content-Length": str(len(head))})
    length = int(answer.headers["inference-header-content-length"])
    assert json.loads(answer.content[:length])["outputs"][0]["parameters"] == {"binary_data_size": 16}
    assert np.frombuffer(answer.content[length:], "<f4").tolist() == ANSWER


@pytest.mark.parametrize(
    ("tensor", "status", "reason"),
    [
        ({"datatype": "FP64"}, 422, "expected datatype FP32, came 'FP64'"),
        ({"datatype": "BYTES", "data": ["a"]}, 422, "this input takes numbers, not strings"),
        ({"shape": [4]}, 422, "expected shape [n, 4], came [4]: the rows come first"),
        ({"shape": [1, 5]}, 422, "expected shape [n, 4]"),
        ({"shape": [0, 4], "data": []}, 422, "expected shape [n, 4]"),
        ({"shape": [-1, 4]}, 422, "expected shape [n, 4]"),
        ({"shape": [1.0, 4]}, 422, "expected shape [n, 4]"),
        ({"shape": [1, 4.0]}, 422, "expected shape [n, 4]"),
        ({"shape": [10**9, 4]}, 422, "expected 4000000000 values"),
        ({"shape": [[1], 4]}, 422, "expected shape [n, 4]"),
        ({"shape": "1,4"}, 400, "expected a list of whole numbers"),
        ({"data": [1, 2, 3]}, 422, "expected 4 values for shape [1, 4], 3 came"),
        ({"data": [1, 2, 3, "4"]}, 422, "expected values of FP32, came '4'"),
        ({"data": [1, 2, 3, True]}, 422, "expected values of FP32, came 'True'"),
        ({"data": [1, 2, 3, None]}, 422, "expected values of FP32"),
        ({"data": [1, 2, 3, {"a": 1}]}, 422, "expected values of FP32"),
        ({"data": [1, 2, 3, 1e39]}, 422, "the value 1e+39 does not fit FP32"),
        ({"data": 1}, 400, "expected a list of numbers"),
        ({"name": "picture"}, 422, "input 'picture' is not the model's; model 'affine' takes observation"),
        ({"name": 7}, 400, "name is int, expected a string"),
        ({"parameters": {"binary_data_size": 16}}, 400, "no data beside it"),
        ({"parameters": {"shared_memory_region": "x"}}, 400, "shared_memory_byte_size"),
        ({"parameters": {"quantized": True}}, 501, "parameter 'quantized' is not known here"),
        ({"parameters": []}, 400, "parameters is list, expected an object"),
        ({"colour": "red"}, 400, "field 'colour' is not known here"),
    ],
)
def test_the_error_of_a_wrong_tensor_says_what_was_expected(curl, tensor, status, reason):
    answer = ask(curl, tensor)
    assert (answer.status_code, reason in answer.json()["error"]) == (status, True), answer.json()


@pytest.mark.parametrize(
    ("fields", "status", "reason"),
    [
        ({"inputs": []}, 422, "takes observation; came none"),
        ({"inputs": [ROW, ROW]}, 422, "came twice"),
        ({"inputs": {}}, 400, "inputs: expected a list of objects"),
        ({"inputs": [1]}, 400, "inputs: expected a list of objects"),
        ({"outputs": [{"name": "score"}]}, 422, "output 'score' is not the model's; there are action"),
        ({"outputs": [{}]}, 400, "name is NoneType"),
        ({"id": 5}, 400, "id is int, expected a string"),
        ({"parameters": {"timeout": -1}}, 400, "timeout='-1': expected a whole number"),
        ({"parameters": {"timeout": 1.5}}, 400, "timeout='1.5': expected a whole number"),
        ({"parameters": {"priority": 4}}, 501, "priority=4: expected 1 (first)"),
        ({"model": "x"}, 400, "field 'model' is not known here"),
    ],
)
def test_the_error_of_a_wrong_request_says_what_was_expected(curl, fields, status, reason):
    answer = ask(curl, **fields)
    assert (answer.status_code, reason in answer.json()["error"]) == (status, True), answer.json()


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b"", {}, 400),
        (b"{", {}, 400),
        (b"[]", {}, 400),
        (b"\xff\xfe", {}, 400),
        (b"[" * 100_000, {}, 400),
        (b"{}", {"Inference-Header-Content-Length": "3"}, 400),
        (b"{}", {"Inference-Header-Content-Length": "-1"}, 400),
        (b"{}", {"Inference-Header-Content-Length": "two"}, 400),
        (b'{"inputs": []}extra', {"Inference-Header-Content-Length": "14"}, 400),
        (b"nonsense", {"Content-Encoding": "gzip"}, 400),
        (b"nonsense", {"Content-Encoding": "br"}, 400),
    ],
)
def test_an_invalid_body_is_an_error_and_ends_nothing(curl, body, headers, status):
    assert curl.post(INFER, content=body, headers=headers).status_code == status
    assert ask(curl).status_code == 200


def test_a_body_beyond_the_bound_is_refused(curl):
    import gzip

    bomb = gzip.compress(b" " * (65 << 20))
    answer = curl.post(INFER, content=bomb, headers={"Content-Encoding": "gzip"})
    assert (answer.status_code, "has more than" in answer.json()["error"]) == (413, True)


def test_a_failing_model_is_named_and_infinity_is_refused_in_json(curl):
    broken = ask(curl, {"data": [666, 0, 0, 0]}, path="/v2/models/team/moody/infer")
    assert (broken.status_code, "this row breaks the model" in broken.json()["error"]) == (500, True)
    huge = ask(curl, {"data": [3e38, 3e38, 3e38, 3e38]})
    assert (huge.status_code, "ask for it with binary_data" in huge.json()["error"]) == (501, True)


def test_large_numbers_are_no_infinity_in_json():
    numbers = np.array([1.7e308, 1.7e308])  # their sum is too large for a float64
    response = InferResponse("m", "1", "", [Output("y", "FP64", (2,), numbers)])
    body, _ = body_of(response, set(), all_binary=False)
    assert json.loads(body)["outputs"][0]["data"] == [1.7e308, 1.7e308]
    for wrong in (np.inf, -np.inf, np.nan):
        numbers[0] = wrong
        with pytest.raises(Refused, match="NaN or infinity"):
            body_of(response, set(), all_binary=False)


def test_version_names_build_torch_devices_and_weights(curl):
    reply = curl.get("/version").json()
    assert reply["torch"] and reply["devices"] == ["cpu"] and reply["protocol"] and "revision" in reply
    assert set(reply["models"]["affine"]) >= {"version", "digest", "age"}


def test_health_means_that_every_model_answers(curl):
    answer = curl.get("/health/ready")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok", "reasons": []})
    assert curl.get("/v2/health/ready").json() == {"ready": True, "reasons": []}


@pytest.mark.slow
def test_an_idle_connection_stays_open_for_longer_than_clients_keep_theirs(gateway):
    connection = http.client.HTTPConnection(gateway.http, timeout=20)
    connection.connect()
    used = connection.sock
    for rest in (0, 20):
        time.sleep(rest)
        connection.request("POST", INFER, json.dumps({"inputs": [ROW]}))
        assert json.load(connection.getresponse())["outputs"][0]["data"] == ANSWER
        assert connection.sock is used
    connection.close()
