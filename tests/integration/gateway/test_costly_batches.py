"""Where a batch's fixed cost is large, all clients share one batch: two halves in turn would pay it twice as often."""

from __future__ import annotations

import http.client
import json
import threading
import time

import grpc
import numpy as np
import pytest
from tests.serving import serving

from jurybox.protocol import open_inference_pb2 as pb
from jurybox.protocol.open_inference_pb2_grpc import GRPCInferenceServiceStub

ROW = np.ones((1, 4), np.float32)
CLIENTS, SECONDS, WINDOWS = 6, 2.0, 10


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    folder = tmp_path_factory.mktemp("costly")
    paced = {"seconds": 0.012, "slow": str(folder / "first")}  # the first engine takes ten times as long
    models = {"slow": {"factory": "tests.models:paced", "args": paced, "max_batch": 16, "rows": 256}}
    with serving(folder / "server", models, http="127.0.0.1:0", grpc="127.0.0.1:0") as server:
        yield server


def over_http(address, binary):
    connection = http.client.HTTPConnection(address, timeout=60)
    tensor = {"name": "observation", "shape": [1, 4], "datatype": "FP32"}
    headers, body = {"Content-Type": "application/json"}, b""
    if binary:
        body = ROW.tobytes()
        text = json.dumps(
            {
                "inputs": [tensor | {"parameters": {"binary_data_size": len(body)}}],
                "parameters": {"binary_data_output": True},
            }
        )
        headers["Inference-Header-Content-Length"] = str(len(text))
    else:
        text = json.dumps({"inputs": [tensor | {"data": ROW.ravel().tolist()}]})

    def ask():
        connection.request("POST", "/v2/models/slow/infer", text.encode() + body, headers)
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        answer.read()

    return ask, connection.close


def over_grpc(address):
    channel = grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
    request = pb.ModelInferRequest(model_name="slow", raw_input_contents=[ROW.tobytes()])
    request.inputs.add(name="observation", datatype="FP32", shape=[1, 4])
    stub = GRPCInferenceServiceStub(channel)
    return lambda: stub.ModelInfer(request, timeout=60), channel.close


WAYS = {
    "shm": None,
    "json": lambda at: over_http(at["http"], binary=False),
    "binary": lambda at: over_http(at["http"], binary=True),
    "grpc": lambda at: over_grpc(at["grpc"]),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_clients_of_a_costly_model_share_one_batch(running, way):
    with running.connect() as watched:
        at = watched.status()["server"]

        def counted():
            (model,) = watched.status()["models"]
            return model["rows"], model["batches"]

        over = threading.Event()

        def client():
            if way == "shm":
                connection = running.connect()
                model = connection.model("slow", rows=1)
                ask, close = lambda: model(ROW[0]), connection.close
            else:
                ask, close = WAYS[way](at)
            while not over.is_set():
                ask()
            close()

        threads = [threading.Thread(target=client) for _ in range(CLIENTS)]
        for thread in threads:
            thread.start()
        try:
            shares = []
            for _ in range(WINDOWS):  # the machine does other things, too: then some return late
                before = counted()
                time.sleep(SECONDS)
                rows, batches = (now - then for now, then in zip(counted(), before, strict=True))
                shares.append(rows / max(1, batches))
                if shares[-1] > 0.75 * CLIENTS:
                    break
        finally:
            over.set()
            for thread in threads:
                thread.join(60)
        assert shares[-1] > 0.75 * CLIENTS, f"rows a batch in windows: {shares}"
