import os

import grpc
import numpy as np
import psutil
import pytest
from tests.fuzz.leaks import Watched, assert_nothing_leaked, holdings
from tests.serving import serving

from jurybox.client import connect
from jurybox.protocol import open_inference_pb2 as pb
from jurybox.protocol.open_inference_pb2_grpc import GRPCInferenceServiceStub

MODELS = {
    "affine": {"factory": "tests.models:affine", "max_batch": 16, "rows": 512},
    "two": {"factory": "tests.models:two", "max_batch": 8, "rows": 64},
    "text": {"factory": "tests.open_models:shout", "max_batch": 8, "rows": 64},
    "image": {"factory": "tests.open_models:brightness", "args": {"collate": "pad"}, "max_batch": 8, "rows": 64},
    "mask": {"factory": "tests.open_models:threshold", "max_batch": 8, "rows": 64},
    "picky": {"factory": "tests.open_models:picky", "max_batch": 8, "rows": 64},
    "sum": {"factory": "tests.open_models:running_sum", "max_batch": 8, "rows": 64},
}
LOCAL = "127.0.0.1:0"
X = np.ones((3, 4), np.float32)


@pytest.fixture(scope="package")
def server(tmp_path_factory):
    """One server with every transport open; it must outlive all that comes in."""
    with serving(tmp_path_factory.mktemp("fuzz"), MODELS, http=LOCAL, grpc=LOCAL, tcp=LOCAL) as running:
        with running.connect() as client:
            running.told = client.status()["server"]
        yield running


def still_serves(server):
    """Over every transport."""
    told = server.told
    for address in (server.address, f"tcp://{told['tcp']}", f"grpc://{told['grpc']}"):
        with connect(address, timeout=30) as client:
            np.testing.assert_array_equal(client.model("affine").infer(X), 2 * X + 1)
            assert client.model("text").infer(["a", "bc"]) == [b"A", b"BC"]
            with client.model("sum").sessions(2) as sessions:
                for total in (1, 2):
                    np.testing.assert_array_equal(sessions.infer(X[:2, :1]), [total, total])


def warm_up(server):
    """Have the server make what it makes once: lanes of the gateway, pools of threads."""
    still_serves(server)
    with grpc.insecure_channel(server.told["grpc"]) as channel:
        stub = GRPCInferenceServiceStub(channel)
        calls = [
            stub.RepositoryModelLoad.future(pb.RepositoryModelLoadRequest(model_name="nobody"), timeout=30)
            for _ in range(40)
        ]
        for call in calls:
            assert call.code() == grpc.StatusCode.NOT_FOUND
    with connect(f"grpc://{server.told['grpc']}", timeout=30) as client:
        client.model("two").infer({"image": np.zeros((3, 64, 64, 3), np.uint8), "scale": np.zeros(3, np.float32)})


@pytest.fixture
def nothing_leaks(server, capsys):
    """After the test, the processes hold no more memory than before; with FUZZ_FIGURES=1 it prints the difference.

    Yield a `Watched` that counts the inputs.
    """
    warm_up(server)
    before = holdings(server)
    watched = Watched({role: psutil.Process(pid) for role, pid in server.pids().items()})
    yield watched
    still_serves(server)
    told = f"{assert_nothing_leaked(server, before)}; {watched.told()}"
    watched.require_flat()
    if os.environ.get("FUZZ_FIGURES"):
        with capsys.disabled():
            print(f"\n  {told}")
