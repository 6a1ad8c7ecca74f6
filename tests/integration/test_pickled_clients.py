"""A server's connection and a model can be sent to other processes, which connect again; what holds rows cannot."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import time

import numpy as np
import pytest
from tests.serving import serving

from jurybox.client import ServerGone, SpecMismatch, connect

X = np.arange(8, dtype=np.float32).reshape(2, 4)
ELSEWHERE = """
import pickle, sys
import numpy as np
model, server = pickle.load(sys.stdin.buffer)
print(model.infer(np.ones((3, 4), np.float32)).tolist(), server.timeout, server.models(), model.name)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    models = {"affine": {"factory": "tests.models:affine"}, "two": {"factory": "tests.models:two"}}
    with serving(tmp_path_factory.mktemp("s"), models, tcp="127.0.0.1:0", grpc="127.0.0.1:0") as running:
        yield running


@pytest.fixture(params=["shm", "zmq", "tcp", "grpc"])
def client(server, request):
    kind = request.param
    if kind in ("tcp", "grpc"):
        given = connect(f"{kind}://{server.listening(kind)}", timeout=33.0)
    else:
        given = connect(server.address, transport=kind, timeout=33.0)
    with given:
        yield given


def test_a_model_and_its_connection_work_in_another_process(client):
    with client.model("affine", rows=16) as model:
        done = subprocess.run(
            [sys.executable, "-c", ELSEWHERE], input=pickle.dumps((model, client)), capture_output=True, timeout=60
        )
        assert done.returncode == 0, done.stderr.decode()
        assert done.stdout.decode().strip() == f"{[[3.0] * 4] * 3} 33.0 ['affine', 'two'] affine"
        np.testing.assert_array_equal(model.infer(X), 2 * X + 1)  # it is still here


def test_an_unpickled_model_outlives_the_original(client):
    model = client.model("affine", rows=4)
    again = pickle.loads(pickle.dumps(model))
    model.close()
    np.testing.assert_array_equal(again.infer(X), 2 * X + 1)
    again.close()


def test_what_holds_rows_of_its_process_says_that_it_cannot_be_sent(client):
    with client.model("affine", rows=4) as model, model.rows(1) as rows:
        ticket = model.submit(X)
        for each in (rows, ticket):
            for send in (pickle.dumps, copy.copy):
                with pytest.raises(TypeError, match=f"a {type(each).__name__} .*create it where it is used"):
                    send(each)
        np.testing.assert_array_equal(ticket.result().outputs, 2 * X + 1)


def test_one_output_by_name_is_an_array_however_many_there_are(client):
    image = {"image": np.ones((2, *client.describe("two").spec.inputs["image"].shape), np.uint8)}
    scale = {"scale": np.ones((2, *client.describe("two").spec.inputs["scale"].shape), np.float32)}
    with client.model("two") as model, client.model("affine") as single:
        whole = model.infer({**image, **scale})
        for name in whole:
            np.testing.assert_array_equal(model.infer({**image, **scale}, output=name), whole[name])
        np.testing.assert_array_equal(single.infer(X, output="action"), 2 * X + 1)
        for given, inputs in ((single, X), (model, {**image, **scale})):
            with pytest.raises(SpecMismatch, match="has the outputs .*none is 'score'"):
                given.infer(inputs, output="score")


async def test_one_output_by_name_asynchronously(client):
    with client.model("affine") as model:
        np.testing.assert_array_equal(await model.infer_async(X, output="action"), 2 * X + 1)
        with pytest.raises(SpecMismatch, match="none is 'score'"):
            await model.infer_async(X, output="score")


def test_a_short_wait_for_the_start_is_not_the_time_out_of_later_calls(server, tmp_path):
    began = time.monotonic()
    with pytest.raises(ServerGone):
        connect(f"ipc://{tmp_path}/nobody", timeout=600.0, start_timeout=0.2)
    assert time.monotonic() - began < 300
    with connect(server.address, timeout=600.0, start_timeout=20.0) as client:
        assert client.timeout == 600.0
