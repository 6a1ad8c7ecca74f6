"""One connection holds no more of a model's sessions than its share, over every door, and leaves the rest to others."""

from __future__ import annotations

import contextlib
import json
from http.client import HTTPConnection

import grpc
import numpy as np
import pytest
from tests.serving import serving

from jurybox.client import Busy, connect
from jurybox.protocol import open_inference_pb2 as pb
from jurybox.protocol.open_inference_pb2_grpc import GRPCInferenceServiceStub

ROWS = 26  # the gateway leases 13, of which health checks keep one
SHARE = {"http": 6, "unary": 6, "stream": 6, "grpc": 6, "tcp": 13}  # sessions
LOCAL = "127.0.0.1:0"
MODELS = {"sum": {"factory": "tests.open_models:running_sum", "max_batch": 8, "rows": ROWS, "lane_rows": 1}}


@pytest.fixture(scope="module")
def told(request, tmp_path_factory):
    ports = {
        "nghttp2": {"http": LOCAL, "grpc": LOCAL},
        "grpcio": {"grpc": LOCAL, "grpc_http2": "grpcio"},
        "tcp": {"tcp": LOCAL},
    }
    with (
        serving(tmp_path_factory.mktemp("share"), MODELS, sessions_share=0.5, **ports[request.param]) as server,
        server.connect() as client,
    ):
        yield client.status()["server"]


class Refused(Exception):
    pass


def request(name, *, end):
    made = pb.ModelInferRequest(model_name="sum", raw_input_contents=[np.ones(1, np.float32).tobytes()])
    made.inputs.add(name="x", datatype="FP32", shape=[1, 1])
    made.parameters["sequence_id"].string_param = name
    made.parameters["sequence_end" if end else "sequence_start"].bool_param = True
    return made


@contextlib.contextmanager
def http(told):
    """A function that takes a step of the sequence of a name, over a connection of its own."""
    with contextlib.closing(HTTPConnection(*told["http"].rsplit(":", 1), timeout=60)) as connection:

        def step(name, *, end=False):
            tensor = {"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [1.0]}
            parameters = {"sequence_id": name, "sequence_end" if end else "sequence_start": True}
            connection.request(
                "POST", "/v2/models/sum/infer", json.dumps({"inputs": [tensor], "parameters": parameters})
            )
            answer = connection.getresponse()
            content = answer.read().decode()
            if answer.status != 200:
                assert answer.status == 429
                raise Refused(content)

        yield step


@contextlib.contextmanager
def unary(told):
    # A pool of its own: channels of one process to the same address share a connection otherwise.
    with grpc.insecure_channel(told["grpc"], options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        stub = GRPCInferenceServiceStub(channel)

        def step(name, *, end=False):
            try:
                stub.ModelInfer(request(name, end=end), timeout=60)
            except grpc.RpcError as error:
                assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
                raise Refused(error.details()) from None

        yield step


@contextlib.contextmanager
def stream(told):
    with grpc.insecure_channel(told["grpc"], options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        stub = GRPCInferenceServiceStub(channel)

        def step(name, *, end=False):
            (answer,) = stub.ModelStreamInfer(iter([request(name, end=end)]), timeout=60)
            if answer.error_message:
                raise Refused(answer.error_message)

        yield step


@pytest.mark.parametrize(
    ("told", "door"),
    [("nghttp2", http), ("nghttp2", unary), ("nghttp2", stream), ("grpcio", unary), ("grpcio", stream)],
    indirect=["told"],
)
def test_a_connection_holds_its_share_of_a_models_sequences_and_another_one_as_many(told, door):
    name, most = door.__name__, SHARE[door.__name__]
    with door(told) as one, door(told) as other:
        for n in range(most):
            one(f"{name} {n}")
        with pytest.raises(Refused, match=f"holds {most} sequences of model 'sum', .*expected at most {most} at once"):
            one("more")
        for n in range(most):
            other(f"{name} other {n}")
        one(f"{name} 0")  # begins again
        one(f"{name} 0", end=True)
        one("another")
        one("another", end=True)
        for n in range(1, most):
            other(f"{name} {n}", end=True)  # over any connection: it counts for the one that began it
        for n in range(most):
            one(f"{name} {n}")
            one(f"{name} {n}", end=True)
            other(f"{name} other {n}", end=True)


@pytest.mark.parametrize(("told", "door"), [("nghttp2", "grpc"), ("grpcio", "grpc"), ("tcp", "tcp")], indirect=["told"])
def test_a_client_opens_its_share_of_a_models_sessions_and_another_one_as_many(told, door):
    # The model itself has leased a row, which counts over tcp.
    address, most = f"{door}://{told[door]}", SHARE[door] - (door == "tcp")
    with connect(address, timeout=60) as one, another(told, door, most) as other:
        model = one.model("sum")
        # Over tcp it asks again until its time is up: some could be released meanwhile.
        with connect(address, timeout=5) as more:
            with pytest.raises(Busy, match=r"this connection (holds|has leased) .* model 'sum'.*expected at most"):
                with more.model("sum").sessions(most + 1) as sessions:
                    sessions.infer(np.ones((most + 1, 1), np.float32))
        with model.sessions(most) as mine:
            ones = np.ones((min(8, most), 1), np.float32)
            np.testing.assert_array_equal(mine.infer(ones, session=range(len(ones))), [1] * len(ones))
            other()


@contextlib.contextmanager
def another(told, door, most):
    """A function that opens as many sessions over another connection."""
    if door == "grpc":  # clients of one process would share a connection
        with unary(told) as step:

            def opens():
                for n in range(most):
                    step(f"another {n}")
                for n in range(most):
                    step(f"another {n}", end=True)

            yield opens
    else:
        with connect(f"{door}://{told[door]}", timeout=60) as client:
            yield lambda: client.model("sum").sessions(most).close()
