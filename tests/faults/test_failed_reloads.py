"""A reload with other weights that fails: the earlier load serves on, and its learner publishes to it as before."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
from tests.faults.conftest import leaving_nothing
from tests.serving import serving, wait_until

from jurybox.client import ModelFailed, ServerGone

X = np.ones((2, 4), np.float32)
FACTORIES = ["tests.faults.reloaded_models:*"]


def affine(version):
    return {"scale": np.array(version, np.float32), "offset": np.array(0, np.float32)}


def wider(version):
    return {**affine(version), "more": np.zeros(3, np.float32)}


@pytest.fixture(scope="module")
def lasting(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    plain = {"factory": "tests.models:affine", "publish": "double_buffer"}
    models = {"policy": plain, "saved": {**plain, "save_dir": str(folder / "kept")}}
    with leaving_nothing(), serving(folder, models, factories=FACTORIES) as running:
        yield running


@pytest.fixture
def orders(tmp_path):
    return tmp_path / "orders"


def other(orders, **settings):
    """The settings of a model with the same inputs and outputs, and one more tensor."""
    factory = "tests.faults.reloaded_models:wider"
    return {"factory": factory, "args": {"orders": str(orders)}, "publish": "double_buffer", **settings}


def status(client, name):
    return next(model for model in client.status()["models"] if model["name"] == name)


def has_ended(publisher):
    try:
        publisher.publish(affine(5))
    except ServerGone:
        return True
    return False


@pytest.mark.parametrize("publish", ["double_buffer", None])
def test_after_a_failed_reload_publications_reach_the_earlier_load(lasting, orders, publish):
    orders.write_text("fail")
    with lasting.connect() as client, client.publisher("policy") as publisher:
        model, digest = client.model("policy", rows=2), status(client, "policy")["weights"]["digest"]
        first = publisher.publish(affine(3))
        wait_until(lambda: model.infer_reply(X).version == first, what="the publication before the reload")
        with pytest.raises(ModelFailed, match="this file is in the way"):
            client.load("policy", other(orders, publish=publish))
        second = publisher.publish(affine(5))
        assert second == first + 1
        wait_until(lambda: model.infer_reply(X).version == second, what="the publication after the failed reload")
        assert model.infer(X)[0, 0] == 5
        assert status(client, "policy")["weights"]["digest"] == digest
        assert client.weights("policy").read().version == second
        assert sum("-weights-" in name for name in client.status()["memory"]["segments"]) == 2  # one for each model


def test_after_a_failed_reload_publications_are_saved_where_they_were(lasting, orders, tmp_path):
    orders.write_text("fail")
    kept = str(lasting.log.parent / "kept")
    with lasting.connect() as client, client.publisher("saved") as publisher:
        for folder in (kept, str(tmp_path / "elsewhere")):
            with pytest.raises(ModelFailed, match="this file is in the way"):
                client.load("saved", other(orders, save_dir=folder))
        publisher.publish(affine(3))
        wait_until(lambda: status(client, "saved")["weights"]["saved"] == 1, what="the save")
        orders.unlink()
        client.load("saved", other(orders, save_dir=str(tmp_path / "elsewhere")))  # its folder is free again
        wait_until(lambda: has_ended(publisher), what="the end of the earlier channel, after its last save")
        with client.publisher("saved") as successor:
            assert successor.publish(wider(1)) == 1
            wait_until(lambda: client.model("saved", rows=2).infer_reply(X).version == 1, what="the new channel")
            wait_until(lambda: status(client, "saved")["weights"]["saved"] == 1, what="the save elsewhere")
    assert [path.name for path in (tmp_path / "elsewhere" / "saved").glob("weights-*")] == [
        "weights-000000000001.safetensors"
    ]


def test_an_engine_that_dies_during_a_reload_finishes_it_later(tmp_path, orders, nothing_left):
    models = {"policy": {"factory": "tests.models:affine", "publish": "double_buffer"}}
    with serving(tmp_path, models, factories=FACTORIES, max_restarts=2) as server, server.connect() as client:
        publisher = client.publisher("policy")
        publisher.publish(affine(3))
        orders.write_text("once die")
        client.load("policy", other(orders), timeout=100)
        assert server.text().count("child died") == 1
        assert has_ended(publisher)
        with client.publisher("policy") as successor:
            assert successor.publish(wider(7)) == 1
            wait_until(lambda: client.model("policy", rows=2).infer_reply(X).version == 1, what="the new channel")


@pytest.mark.timeout(200)
def test_after_a_reload_that_ends_every_engine_the_earlier_model_comes_back_with_its_publications(
    tmp_path, orders, nothing_left
):
    models = {"policy": {"factory": "tests.models:affine", "publish": "double_buffer"}}
    with serving(tmp_path, models, factories=FACTORIES, max_restarts=0) as server, server.connect() as client:
        with client.publisher("policy") as publisher:
            publisher.publish(affine(3))
            orders.write_text("die")
            with pytest.raises(ModelFailed, match="in quarantine"):
                client.load("policy", other(orders), timeout=100)
            client.load("policy", timeout=100)
            reply = client.model("policy", rows=2).infer_reply(X)
            assert (reply.version, reply.outputs[0, 0]) == (1, 3)
            assert publisher.publish(affine(5)) == 2
            wait_until(lambda: client.model("policy", rows=2).infer_reply(X).version == 2, what="a publication")


def test_a_replica_that_cannot_load_other_weights_does_not_pass_for_ready(tmp_path, orders, nothing_left):
    models = {"policy": {"factory": "tests.models:affine", "publish": "double_buffer"}}
    with serving(tmp_path, models, factories=FACTORIES, replicas=2) as server, server.connect() as client:
        wait_until(lambda: {e["state"] for e in client.status()["engines"]} == {"serving"}, 60, "both engines")
        with client.publisher("policy") as publisher:
            publisher.publish(affine(3))
        orders.write_text("once fail")
        with pytest.raises(ModelFailed, match="this file is in the way"):
            client.load("policy", other(orders))
        engines = status(client, "policy")["engines"]
        assert sorted(engines.values()) == ["failed", "ready"]
        with client.publisher("policy") as publisher:
            assert publisher.publish(wider(7)) == 1
            failed = next(int(index) for index, state in engines.items() if state == "failed")
            os.kill(client.status()["engines"][failed]["pid"], signal.SIGKILL)  # its successor loads what is in service
            wait_until(lambda: set(status(client, "policy")["engines"].values()) == {"ready"}, 60, "both replicas")
            wait_until(lambda: status(client, "policy")["weights"]["version"] == 1, 30, "the version in both")
