"""`weights_changed` of a module: called once for each version that is used, before its first batch, on every way."""

import os
import signal

import numpy as np
import pytest
from tests.serving import serving, wait_until

from jurybox.client import ModelFailed

MODELS = {
    name: {"factory": "tests.odd_models:derived", "publish": kind, "keep_versions": 1}
    for name, kind in (("double", "double_buffer"), ("snap", "snapshot"), ("killed", "double_buffer"))
}
MODELS["in-place"] = {**MODELS["double"], "args": {"view": True}}
ROW = np.zeros((1, 4), np.float32)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    everywhere = dict.fromkeys(("tcp", "grpc", "http"), "127.0.0.1:0")
    with serving(tmp_path_factory.mktemp("server"), MODELS, **everywhere) as running:
        yield running


def weights(scale, offset=0.0):
    return {"scale": np.array(scale, np.float32), "offset": np.array(offset, np.float32)}


def asked(model, version=0):
    """Return the version that answered, and how often it was computed by then; what was computed must be of it."""
    reply = model.infer_reply(ROW, version=version) if version else model.infer_reply(ROW)
    computed, right, calls = reply.outputs[0]
    assert computed == right
    return reply.version, float(right), int(calls)


def until(model, version):
    """Wait for answers of a version, whose predecessors may still answer; return the first of them."""
    found = []
    wait_until(lambda: found.append(asked(model)) or found[-1][0] == version, 30, f"version {version}")
    return found[-1]


@pytest.mark.parametrize("name", ["double", "snap", "in-place"])
@pytest.mark.parametrize("way", ["shm", "zmq", "grpc"])
def test_it_is_called_once_for_each_version_before_its_first_batch(server, name, way):
    """Also of a part of the tensors. tcp:// takes no publications, and asks here."""
    with server.connect_over(way) as learner, server.connect_over("tcp") as far, server.connect() as near:
        model, other = near.model(name, rows=4), far.model(name, rows=4)
        publisher = learner.publisher(name)
        _, _, before = asked(model)
        for count, scale in enumerate((2.0, 3.0, 4.0), 1):
            version = publisher.publish(weights(scale, 0.5))
            assert until(model, version) == (version, scale + 0.5, before + count)
            assert {asked(one) for one in (model, other) * 2} == {(version, scale + 0.5, before + count)}
        version = publisher.publish({"offset": np.array(8.0, np.float32)}, partial=True)
        assert until(other, version) == (version, 12.0, before + 4)
        publisher.close()


@pytest.mark.parametrize("name", ["double", "in-place"])
def test_it_is_called_when_a_request_names_an_earlier_version_and_again_for_the_newest(server, name):
    with server.connect() as client, client.publisher(name) as publisher:
        model = client.model(name)
        first = publisher.publish(weights(2.0))
        until(model, first)
        second = publisher.publish(weights(3.0))
        _, _, before = until(model, second)
        assert asked(model, first) == asked(model, first) == (first, 2.0, before + 1)
        assert asked(model) == asked(model, second) == (second, 3.0, before + 2)


@pytest.mark.parametrize("name", ["double", "in-place"])
def test_no_answer_is_of_other_weights_than_it_says_when_it_fails(server, name):
    with server.connect() as client, client.publisher(name) as publisher:
        model = client.model(name)
        first = publisher.publish(weights(2.0))
        until(model, first)
        second = publisher.publish(weights(13.0))

        def refused():
            try:
                return asked(model)[0] != first
            except ModelFailed:
                return True

        wait_until(refused, 30, "the version of thirteen")
        assert asked(model, first)[:2] == (first, 2.0)
        for version in (0, second):
            with pytest.raises(ModelFailed, match="thirteen"):
                asked(model, version)
        assert asked(model, first)[:2] == (first, 2.0)
        third = publisher.publish(weights(5.0))
        wait_until(lambda: not refused_now(model), 30, "the next version")
        assert asked(model)[:2] == (third, 5.0)


def refused_now(model):
    try:
        model.infer(ROW)
    except ModelFailed:
        return True
    return False


def test_it_is_called_once_in_an_engine_that_starts_anew(server):
    with server.connect() as client, client.publisher("killed") as publisher:
        model = client.model("killed")
        _, _, fresh = asked(model)
        versions = [publisher.publish(weights(scale)) for scale in (2.0, 3.0)]
        until(model, versions[-1])
        old = server.pids()["engine-0"]
        os.kill(old, signal.SIGKILL)
        wait_until(lambda: server.pids().get("engine-0") not in (None, old), 60, "another engine")
        assert asked(client.model("killed", timeout=60.0)) == (versions[-1], 3.0, fresh + 1)
