"""bfloat16 and float8: rows, sessions and weights come through every transport with their bits, and nothing is cast."""

import json
import subprocess
import sys
import urllib.error
import urllib.request

import ml_dtypes
import numpy as np
import pytest
import torch
from tests.serving import serving, wait_until
from tests.small_floats import DTYPES

from jurybox.client import SpecMismatch, connect

ROWS = np.array([[1.5, -2.0, 0.25], [3.0, np.nan, -0.0]], np.float32)
BITS = {"bfloat16": np.int16, "float8_e4m3fn": np.int8, "float8_e5m2": np.int8}
NAMES = {"bfloat16": "BF16", "float8_e4m3fn": "FP8_E4M3FN", "float8_e5m2": "FP8_E5M2"}
MODELS = {
    **{dtype: {"factory": "tests.small_floats:echo", "args": {"dtype": dtype}} for dtype in DTYPES},
    **{f"ragged-{dtype}": {"factory": "tests.small_floats:ragged", "args": {"dtype": dtype}} for dtype in DTYPES},
    **{f"sum-{dtype}": {"factory": "tests.small_floats:summing", "args": {"dtype": dtype}} for dtype in DTYPES},
    "halves": {"factory": "tests.small_floats:halves", "publish": "double_buffer", "deterministic": True},
    **{
        f"agent{i}": {"factory": "tests.small_floats:halves", "publish": "snapshot", "group": "agents"}
        for i in range(2)
    },
    "plain": {"factory": "tests.models:affine"},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    models = {name: {"max_batch": 4, "rows": 64, **settings} for name, settings in MODELS.items()}
    doors = {"tcp": "127.0.0.1:0", "grpc": "127.0.0.1:0", "http": "127.0.0.1:0"}
    with serving(tmp_path_factory.mktemp("small"), models, **doors) as running:
        yield running


@pytest.fixture(params=["shm", "zmq", "tcp", "grpc"])
def client(server, request):
    with server.connect_over(request.param) as connected:
        yield connected


def small(dtype, values=ROWS):
    return np.asarray(values).astype(getattr(ml_dtypes, dtype))


def check(outputs, rows):
    assert outputs["y"].dtype == rows.dtype
    np.testing.assert_array_equal(outputs["y"].astype(np.float32), rows.astype(np.float32) * 2)
    np.testing.assert_array_equal(outputs["bits"], rows.view(BITS[rows.dtype.name]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_come_through_with_their_bits_whatever_calls(client, dtype):
    model, rows = client.model(dtype), small(dtype)
    check(model.infer(rows), rows)
    check(model.infer({"x": rows}), rows)
    check({key: value[None] for key, value in model(rows[0]).items()}, rows[:1])
    check(model.submit(rows).result(60.0).outputs, rows)
    tensor = torch.from_numpy(rows.view(np.uint8).copy()).view(getattr(torch, dtype)).reshape(rows.shape)
    check(model.infer(tensor), rows)
    with model.rows(2) as own:
        own.inputs["x"] = rows
        own.infer()
        check(own.outputs, rows)
        own.inputs["x"][1] = tensor[0]
        own.infer()
        check(own.outputs, rows[[0, 0]])
        own.inputs["x"][:] = 0.5
        own.infer()
        check(own.outputs, small(dtype, np.full((2, 3), 0.5, np.float32)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_other_dtypes_are_refused_and_never_cast(client, dtype):
    model = client.model(dtype)
    for other in (ROWS, ROWS.astype(np.float16), small(dtype).view(np.uint8), torch.zeros((2, 3))):
        with pytest.raises(SpecMismatch, match=dtype):
            model.infer(other)
    with model.rows(2) as rows:
        for other in (ROWS, ROWS.astype(np.float16), 1e39, np.zeros((2, 3), np.uint8)):
            with pytest.raises(SpecMismatch, match=dtype):
                rows.inputs["x"] = other


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_differ_in_size_and_states_of_sessions_keep_their_bits(client, dtype):
    rows = [small(dtype, ROWS[0, :n]) for n in (1, 3, 2)]
    for given, came in zip(rows, client.model(f"ragged-{dtype}").infer(rows), strict=True):
        assert came.dtype == given.dtype
        np.testing.assert_array_equal(came.astype(np.float32), given.astype(np.float32) * 2)
    with client.model(f"sum-{dtype}").sessions(2) as sessions:
        for step in range(1, 4):
            total = sessions.infer(small(dtype, np.full((2, 3), 0.5, np.float32)))
            np.testing.assert_array_equal(total.astype(np.float32), step / 2)
        saved = sessions.get_state()
        assert saved["total"].dtype == rows[0].dtype
        sessions.set_state(saved)
        total = sessions.infer(small(dtype, np.zeros((2, 3), np.float32)))
        np.testing.assert_array_equal(total.astype(np.float32), 1.5)


def ask(server, model, inputs, **more):
    url = f"http://{server.listening('http')}/v2/models/{model}/infer"
    body = json.dumps({"inputs": inputs, **more}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read(), answer.headers
    except urllib.error.HTTPError as error:
        return error.code, error.read(), error.headers


@pytest.mark.parametrize("dtype", DTYPES)
def test_http_takes_and_gives_raw_bytes_and_floats_as_json(server, dtype):
    rows = small(dtype)
    tensor = {"name": "x", "shape": [1, 3], "datatype": NAMES[dtype]}
    status, body, _ = ask(server, dtype, [{**tensor, "data": ROWS[0].tolist()}])
    assert status == 200, body
    y, bits = json.loads(body)["outputs"]
    assert (y["datatype"], y["data"]) == (NAMES[dtype], (ROWS[0] * 2).tolist())
    assert bits["data"] == rows[0].view(BITS[dtype]).tolist()

    tensor = {**tensor, "shape": [2, 3], "parameters": {"binary_data_size": rows.nbytes}}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    url = f"http://{server.listening('http')}/v2/models/{dtype}/infer"
    headers = {"Inference-Header-Content-Length": str(len(head))}
    with urllib.request.urlopen(urllib.request.Request(url, head + rows.tobytes(), headers), timeout=60) as answer:
        payload = answer.read()[int(answer.headers["Inference-Header-Content-Length"]) :]
    y = np.frombuffer(payload[: rows.nbytes], rows.dtype).reshape(rows.shape)
    np.testing.assert_array_equal(y.astype(np.float32), ROWS.astype(rows.dtype).astype(np.float32) * 2)


@pytest.mark.parametrize(("dtype", "wrong"), [("bfloat16", 1e39), ("float8_e4m3fn", 1000.0), ("float8_e5m2", 1e6)])
def test_a_number_in_json_that_the_dtype_cannot_hold_is_refused(server, dtype, wrong):
    tensor = {"name": "x", "shape": [1, 3], "datatype": NAMES[dtype]}
    status, body, _ = ask(server, dtype, [{**tensor, "data": [1, wrong, 2]}])
    assert status == 422 and b"does not fit " + NAMES[dtype].encode() in body
    status, body, _ = ask(server, dtype, [{**tensor, "datatype": "FP32", "data": [1, 2, 2]}])
    assert status == 422 and b"expected datatype " + NAMES[dtype].encode() in body


@pytest.mark.parametrize("where", ["shm", "grpc"])
def test_weights_in_bfloat16_are_published_and_read_as_bfloat16(server, where):
    url = None if where == "shm" else f"grpc://{server.listening('grpc')}"
    with server.connect() if url is None else connect(url, timeout=60.0) as client:
        weights = client.weights("halves")
        with client.publisher("halves") as publisher:
            for values, of in (
                ([1.5, -2.0, 3.25], lambda given: torch.tensor(given, dtype=torch.bfloat16)),
                ([0.5, 2.0, -4.0], lambda given: np.array(given, ml_dtypes.bfloat16)),
            ):
                version = publisher.publish({"weight": of(values)})
                state, read, _ = weights.read(timeout=30.0)
                assert read == version and state["weight"].dtype == ml_dtypes.bfloat16
                np.testing.assert_array_equal(state["weight"].astype(np.float32), values)
            model = client.model("halves")
            wait_until(lambda: model.submit(small("bfloat16")).result(60.0).version == version)
            np.testing.assert_array_equal(model.infer(small("bfloat16"))[0].astype(np.float32), ROWS[0] * values)
            with pytest.raises(SpecMismatch, match=r"expected bfloat16\[3\], got float32\[3\]"):
                publisher.publish({"weight": np.ones(3, np.float32)})


def test_a_group_computes_in_bfloat16(server):
    with server.connect() as client, client.publisher("agent0") as publisher:
        version = publisher.publish({"weight": torch.tensor([2.0, 3.0, 4.0], dtype=torch.bfloat16)})
        wait_until(lambda: client.model("agent0").submit(small("bfloat16")).result(60.0).version == version)
        for name, expected in (("agent0", [3.0, -6.0, 1.0]), ("agent1", [1.5, -2.0, 0.25])):
            assert client.model(name)(small("bfloat16")[0]).tolist() == expected


WITHOUT = """
import sys
import numpy as np

sys.modules["ml_dtypes"] = None
from jurybox.client import connect
from jurybox.protocol.errors import Error

def refused(ask):
    try:
        ask()
    except Error as error:
        assert "pip install ml_dtypes" in str(error), error
    else:
        raise AssertionError("nothing was refused")

for address in sys.argv[1:]:
    with connect(address, timeout=60.0) as server:
        for _ in range(3):  # each time, the lease is returned
            refused(lambda: server.model("bfloat16", rows=40).infer(np.zeros((1, 3), np.uint16)))
        assert server.model("plain").infer(np.ones((2, 4), np.float32)).shape == (2, 4)
        if not address.startswith("tcp"):
            refused(server.weights("halves").read)
    if address.startswith("ipc"):
        out = {"weight": np.zeros(3, np.uint16)}
        with connect(address) as server:
            server.weights("halves").read(out=out)
        assert out["weight"].any()
print("told")
"""


def test_a_client_without_ml_dtypes_is_told_what_to_install_and_uses_the_other_models(server):
    with server.connect() as client, client.publisher("halves") as publisher:
        publisher.publish({"weight": torch.ones(3, dtype=torch.bfloat16)})
    addresses = [server.address, *(f"{door}://{server.listening(door)}" for door in ("tcp", "grpc"))]
    program = [sys.executable, "-c", WITHOUT, *addresses]
    done = subprocess.run(program, capture_output=True, text=True, timeout=100)
    assert done.stdout == "told\n", done.stderr


@pytest.mark.runs
def test_saved_weights_are_restored_as_bfloat16(tmp_path):
    models = {"halves": {**MODELS["halves"], "save_dir": "kept", "save_every": 1}}
    values = [1.5, -2.0, 3.25]
    with serving(tmp_path, models) as running, running.connect() as client:
        client.publisher("halves").publish({"weight": torch.tensor(values, dtype=torch.bfloat16)})
        wait_until(lambda: client.status()["models"][0]["weights"]["saved"] == 1)
    with serving(tmp_path, models) as running, running.connect() as client:
        state, version, _ = client.weights("halves").read()
        assert version == 1 and state["weight"].dtype == ml_dtypes.bfloat16 and state["weight"].tolist() == values
