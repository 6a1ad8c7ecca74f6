"""Learners and actors elsewhere: weights over gRPC end where a local learner's would, whole or not at all."""

import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from tests.serving import serving, wait_until

from jurybox.client import ModelNotFound, Refused, ServerGone, SpecMismatch, Timeout
from jurybox.protocol.errors import Code, Error

grpc = pytest.importorskip("grpc")
from jurybox.client.remote_weights import RemotePublisher, RemoteWeightsReader  # noqa: E402
from jurybox.protocol.remote_weights_pb2 import BeginPublication, PublishRequest  # noqa: E402
from jurybox.protocol.weights.transfer import chunks  # noqa: E402

X = np.ones((2, 4), np.float32)


def affine(version):
    return {"scale": np.array(version, np.float32), "offset": np.array(1000 * version, np.float32)}


@contextmanager
def gateway(address, most_bytes=1 << 30, stall=1.0):
    script = str(Path(__file__).with_name("remote_weights_gateway.py"))
    process = subprocess.Popen(
        [sys.executable, script, address, str(most_bytes), str(stall)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        with grpc.insecure_channel(f"127.0.0.1:{process.stdout.readline().strip()}") as channel:
            yield process, channel
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    big = {"factory": "tests.models:big", "publish": "double_buffer"}
    models = {
        "policy": {"factory": "tests.models:affine", "publish": "double_buffer", "max_lag": 3},
        "big": {**big, "max_batch": 1, "rows": 2, "lane_rows": 1},
    }
    models["fixed"] = {"factory": "tests.models:affine"}
    with serving(tmp_path_factory.mktemp("server"), models) as running:
        yield running


@pytest.fixture(scope="module")
def remote(server):
    with gateway(server.address) as (_, channel):
        yield channel


@pytest.fixture
def client(server):
    with server.connect() as connection:
        yield connection


def test_what_is_published_from_elsewhere_answers_the_next_requests(remote, client):
    model = client.model("policy")
    with RemotePublisher(remote, "policy") as publisher:
        for _ in range(3):
            version = publisher.publish(affine(publisher.version + 1), extra={"epsilon": 0.5, "mean": np.arange(3.0)})
            wait_until(lambda: model.infer_reply(X).version == version)  # noqa: B023
            assert (model.infer(X) == version * X + 1000 * version).all()
    state, version, extra = client.weights("policy").read()
    assert version == publisher.version and extra["epsilon"] == 0.5 and (extra["mean"] == np.arange(3.0)).all()
    with RemoteWeightsReader(remote, "policy") as reader:
        far, seen, extra = reader.read()
        assert (reader.newest, reader.max_lag, seen) == (version, 3, version)
        assert reader.newer_than(version - 1) and not reader.newer_than(version)
        assert all((far[name] == state[name]).all() for name in state) and extra["epsilon"] == 0.5


def test_there_is_one_publisher_wherever_it_is(remote, client):
    with RemotePublisher(remote, "policy"):
        with pytest.raises(Refused, match="one at a time"):
            client.publisher("policy")
        with pytest.raises(Refused, match="one at a time"):
            RemotePublisher(remote, "policy")
    wait_until(lambda: freed(client, "policy"), what="the place")
    with client.publisher("policy"), pytest.raises(Refused, match="one at a time"):
        RemotePublisher(remote, "policy")


def freed(client, name):
    try:
        client.publisher(name).close()
    except Refused:
        return False
    return True


def test_large_weights_travel_exactly_or_halved_or_as_what_changed(remote, client):
    torch = pytest.importorskip("torch")
    layout = client.weights("big").layout
    rng = np.random.default_rng(0)
    state = {name: rng.normal(size=place.shape).astype(np.float32) for name, place in layout.places.items()}
    module = {name: torch.from_numpy(array.copy()) for name, array in state.items()}
    reader = client.weights("big")
    with RemotePublisher(remote, "big", changed_only=True) as publisher:
        publisher.publish(module)
        whole = publisher.sent_bytes
        assert whole == layout.nbytes > 8 << 20
        module["weight"][0, 0] += 1
        publisher.publish(module)
        assert publisher.sent_bytes - whole == 1 << 20
        np.testing.assert_array_equal(reader.read().state["weight"], module["weight"].numpy())
        with pytest.raises(Refused, match="NaN"):
            publisher.publish({**module, "bias": module["bias"] * torch.nan}, check_finite=True)
        publisher.publish(module)
        np.testing.assert_array_equal(reader.read().state["bias"], module["bias"].numpy())
    wait_until(lambda: freed(client, "big"), what="the place")
    with RemotePublisher(remote, "big", bfloat16=True) as publisher:
        publisher.publish(state)
        assert publisher.sent_bytes < 0.51 * layout.nbytes
    read = reader.read().state["weight"]
    np.testing.assert_array_equal(read, torch.from_numpy(state["weight"]).bfloat16().float().numpy())


def test_weights_that_do_not_fit_are_refused_as_a_local_learners_are(remote, client):
    with pytest.raises(ModelNotFound, match="there are"):
        RemotePublisher(remote, "nothing")
    with pytest.raises(Refused, match="takes no publications"):
        RemotePublisher(remote, "fixed")
    with RemotePublisher(remote, "policy") as publisher:
        with pytest.raises(SpecMismatch, match=r"'scale': expected float32\[\], got float32\[2\]"):
            publisher.publish({**affine(1), "scale": np.zeros(2, np.float32)})
        with pytest.raises(SpecMismatch, match="room for"):
            publisher.publish(affine(1), extra={"much": np.zeros(100_000)})
        version = publisher.publish(affine(1))
        with pytest.raises(Refused, match="versions only grow"):
            publisher.publish(affine(1), version=version)
        assert publisher.publish(affine(9), version=publisher.version + 5) == client.weights("policy").newest


@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        (lambda part: setattr(part, "crc", part.crc ^ 1), Code.MALFORMED),
        (lambda part: setattr(part, "offset", 1 << 40), Code.TOO_LARGE),
    ],
)
def test_a_damaged_publication_is_not_published_and_the_next_one_is(remote, client, monkeypatch, spoil, code):
    def spoiled(flat, base=None):
        for part in chunks(flat, base):
            spoil(part)
            yield part

    with RemotePublisher(remote, "policy") as publisher:
        before = client.weights("policy").newest
        monkeypatch.setattr("jurybox.client.remote_weights.chunks", spoiled)
        with pytest.raises(Error) as caught:
            publisher.publish(affine(1))
        assert caught.value.code == code
        assert client.weights("policy").newest == before
        monkeypatch.undo()
        wait_until(lambda: freed(client, "policy"), what="the place")
        assert publisher.publish(affine(2)) == before + 1


def test_another_layouts_publication_is_refused_by_the_server_too(remote, client):
    with RemotePublisher(remote, "policy") as publisher:
        publisher._stream.send(PublishRequest(begin=BeginPublication(layout_hash=bytes(32))))
        with pytest.raises(Error, match="is not the channel's"):
            publisher._stream.receive()


def test_a_stream_that_breaks_off_in_the_middle_publishes_nothing_and_frees_the_place(remote, client):
    reader = client.weights("big")
    before = reader.newest
    for close in (True, False):
        publisher = RemotePublisher(remote, "big")
        begin = BeginPublication(layout_hash=bytes.fromhex(publisher.layout.hash))
        publisher._stream.send(PublishRequest(begin=begin))
        parts = chunks(np.zeros(publisher.layout.nbytes, np.uint8))
        for _ in range(3):
            publisher._stream.send(PublishRequest(chunk=next(parts)))
        if close:
            publisher.close()  # else it stalls, and the gateway gives it up
        wait_until(lambda: freed(client, "big"), 30, "the place")
        assert reader.newest == before
        publisher.close()


def test_a_killed_gateway_or_server_is_told_and_the_publisher_goes_on_with_the_next(tmp_path):
    models = {"policy": {"factory": "tests.models:affine", "publish": "double_buffer"}}
    with serving(tmp_path, models) as server, server.connect() as client, gateway(server.address) as (process, channel):
        publisher = RemotePublisher(channel, "policy", timeout=10.0)
        assert publisher.publish(affine(1)) == 1
        reader = RemoteWeightsReader(channel, "policy")
        process.kill()
        process.wait()
        with pytest.raises((ServerGone, Timeout)):
            publisher.publish(affine(2))
        with pytest.raises((ServerGone, Timeout)):
            reader.read()
        assert client.weights("policy").newest == 1
        publisher.close()
        reader.close()
        with gateway(server.address) as (_, second), RemotePublisher(second, "policy") as successor:
            assert successor.publish(affine(2)) == 2


def test_more_than_a_gateway_takes_is_refused_at_once(server):
    with gateway(server.address, most_bytes=1 << 20) as (_, channel), pytest.raises(Refused, match="at most 1048576"):
        RemotePublisher(channel, "big")
