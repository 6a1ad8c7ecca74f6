"""Publishing while the engine serves: every answer is of one whole version, and names it."""

import asyncio
import gc
import os
import signal
import threading
import time

import httpx
import numpy as np
import pytest
from tests.descriptors import open_files
from tests.forking import in_a_child
from tests.serving import serving, wait_until

from jurybox.client import ModelNotFound, Refused, ServerGone, SpecMismatch
from jurybox.protocol.weights.reader import WeightsReader

X = np.ones((3, 4), np.float32)


def affine(version):
    """Return weights with which version v answers v * x + 1000 * v, so that mixed versions would be detected."""
    return {"scale": np.array(version, np.float32), "offset": np.array(1000 * version, np.float32)}


@pytest.fixture(scope="module", params=["double_buffer", "snapshot"])
def server(request, tmp_path_factory):
    models = {
        "policy": {"factory": "tests.models:affine", "publish": request.param, "keep_versions": 3, "max_lag": 2},
        "half": {"factory": "tests.models:affine", "publish": request.param, "dtype": "bfloat16"},
        "fixed": {"factory": "tests.models:affine"},
        "short": {"factory": "tests.models:affine", "publish": request.param, "rows": 16},
    }
    with serving(tmp_path_factory.mktemp("server"), models, http="127.0.0.1:0") as running:
        yield running


@pytest.fixture
def client(server):
    with server.connect() as connection:
        yield connection


def weights_status(client, name="policy"):
    return next(model for model in client.status()["models"] if model["name"] == name)["weights"]


def test_a_publication_answers_the_next_requests_under_its_version(client):
    model, publisher = client.model("policy"), client.publisher("policy")
    for _ in range(5):
        version = publisher.publish(affine(publisher.version + 1))
        wait_until(lambda: model.infer_reply(X).version == version, 30, "adoption")  # noqa: B023
        reply = model.infer_reply(X)
        assert (reply.outputs == version * X + 1000 * version).all()


def test_every_answer_is_of_one_whole_version_with_a_fast_learner(server, client):
    publisher, stop, wrong, seen = client.publisher("policy"), threading.Event(), [], set()

    def ask():
        with server.connect() as connection:
            model = connection.model("policy", rows=4)
            while not stop.is_set():
                reply = model.infer_reply(X)
                seen.add(reply.version)
                if not (reply.outputs == np.float32(reply.version) * X + np.float32(1000 * reply.version)).all():
                    wrong.append((reply.version, reply.outputs))

    publisher.publish(affine(publisher.version + 1))
    wait_until(lambda: client.model("policy").infer_reply(X).version == publisher.version)
    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 20
    while len(seen) < 30 and time.monotonic() < deadline:
        publisher.publish(affine(publisher.version + 1))
    wait_until(lambda: publisher.version in seen, 20, "the last version in use")
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(seen) >= 30


def check_rows_of_one_version(request, publisher):
    """Send requests during publications until many versions were seen; each reply is (outputs, version) for X."""
    stop = threading.Event()

    def learn():
        while not stop.wait(0.003):
            publisher.publish(affine(publisher.version + 1))

    publisher.publish(affine(publisher.version + 1))
    wait_until(lambda: request()[1] == publisher.version, 30, "adoption")  # the weights it starts with are no affine(0)
    learner = threading.Thread(target=learn)
    learner.start()
    seen, deadline = set(), time.monotonic() + 30
    try:
        while len(seen) < 30 and time.monotonic() < deadline:
            outputs, version = request()
            assert (outputs == np.float32(version) * X + np.float32(1000 * version)).all(), (outputs, version)
            seen.add(version)
    finally:
        stop.set()
        learner.join()
    assert len(seen) >= 30


def test_rows_that_fit_in_a_batch_are_of_one_version_even_in_a_smaller_lane(client):
    model, publisher = client.model("short", rows=1), client.publisher("short")

    def request():
        reply = model.infer_reply(X)
        return reply.outputs, reply.version

    def request_in_a_loop():
        reply = asyncio.run(model.infer_reply_async(X))
        return reply.outputs, reply.version

    check_rows_of_one_version(request, publisher)
    check_rows_of_one_version(request_in_a_loop, publisher)


def test_a_gateway_short_of_rows_answers_a_request_by_one_version(client):
    publisher, http_address = client.publisher("short"), client.status()["server"]["http"]
    with (
        client.model("short", rows=12),
        httpx.Client(base_url=f"http://{http_address}", timeout=30) as web,
    ):  # of 16: the gateway gets two

        def request():
            row = {"name": "observation", "shape": [3, 4], "datatype": "FP32", "data": X.ravel().tolist()}
            answer = web.post("/v2/models/short/infer", json={"inputs": [row]}).raise_for_status().json()
            return np.array(answer["outputs"][0]["data"], np.float32).reshape(3, 4), int(answer["model_version"])

        check_rows_of_one_version(request, publisher)


def test_a_client_is_answered_by_the_version_it_names_while_that_is_held(client):
    model, publisher = client.model("policy"), client.publisher("policy")
    versions = []
    for _ in range(6):
        versions.append(publisher.publish(affine(publisher.version + 1)))
        wait_until(lambda: model.infer_reply(X).version == versions[-1], 30, "adoption")
    for version in (versions[-1], versions[-3], versions[-4], 0, versions[-2]):
        reply = model.infer_reply(X, version=version)
        assert reply.version == (version or versions[-1])
        assert (reply.outputs == reply.version * X + 1000 * reply.version).all()
    with pytest.raises(Refused, match=f"version {versions[0]} is not held.*keep_versions"):
        model.infer(X, version=versions[0])


def test_a_request_for_a_replaced_version_is_not_answered_by_its_successor(client):
    """Without requests in between, the module still points to the copy that was filled with a later version."""
    model, publisher = client.model("short"), client.publisher("short")  # keeps no earlier version
    used = publisher.publish(affine(publisher.version + 1))
    wait_until(lambda: model.infer_reply(X).version == used, 30, "adoption")
    for _ in range(2):
        later = publisher.publish(affine(publisher.version + 1))
        wait_until(lambda: weights_status(client, "short")["version"] == later, 30, "adoption")  # noqa: B023
    with pytest.raises(Refused, match=f"version {used} is not held"):
        model.infer(X, version=used)
    reply = model.infer_reply(X, version=later)
    assert (reply.outputs == later * X + 1000 * later).all()


def test_a_model_that_computes_in_another_dtype_accepts_the_learners_weights(client):
    model, publisher = client.model("half"), client.publisher("half")
    version = publisher.publish({"scale": np.array(2.0, np.float32), "offset": np.array(0.5, np.float32)})
    wait_until(lambda: model.infer_reply(X).version == version, 30, "adoption")
    assert (model.infer(X) == 2.5).all()


def test_status_shows_how_far_the_engine_is_behind(server, client):
    publisher = client.publisher("policy")
    publisher.publish(affine(publisher.version + 1))
    wait_until(lambda: weights_status(client)["lag"] == 0, 30, "adoption")
    engine = server.pids()["engine-0"]
    os.kill(engine, signal.SIGSTOP)
    try:
        for _ in range(3):
            publisher.publish(affine(publisher.version + 1))
        assert weights_status(client)["lag"] == 3
        wait_until(lambda: weights_status(client)["published_per_second"] > 0, 30, "a rate")
    finally:
        os.kill(engine, signal.SIGCONT)
    wait_until(lambda: weights_status(client)["lag"] == 0, 30, "catching up")
    status = next(model for model in client.status()["models"] if model["name"] == "policy")
    assert status["updates"] and status["latency"]["adopt"]["p50"] > 0


def test_collectors_are_held_back_while_answers_are_further_behind_than_the_model_allows(server, client):
    publisher, weights = client.publisher("policy"), client.weights("policy")
    publisher.publish(affine(publisher.version + 1))
    assert weights.max_lag == weights_status(client)["max_lag"] == 2
    assert weights.wait_until_fresh(max_lag=0)
    held_back = weights.held_back
    engine = server.pids()["engine-0"]
    os.kill(engine, signal.SIGSTOP)
    try:
        for lag in (1, 2, 3):
            assert weights.wait_until_fresh(timeout=0), f"{lag - 1} behind, and 2 are allowed"
            publisher.publish(affine(publisher.version + 1))
            assert weights.lag() == lag and weights.lag(publisher.version) == 0
        assert not weights.wait_until_fresh(timeout=0.1)
    finally:
        os.kill(engine, signal.SIGCONT)
    assert weights.wait_until_fresh(max_lag=0)
    assert weights.held_back - held_back in (1, 2) and weights.held_back_seconds >= 0.1
    with pytest.raises(Refused, match="opened without a server"):
        WeightsReader(weights.channel).wait_until_fresh(max_lag=0)


def test_actors_read_publications_without_a_request_to_the_server(client):
    publisher, weights = client.publisher("policy"), client.weights("policy")
    seen = publisher.publish(affine(publisher.version + 1), extra={"epsilon": 0.25})
    state, version, extra = weights.read()
    assert version == seen
    assert float(state["offset"]) == 1000 * seen
    assert extra == {"epsilon": 0.25}
    assert not weights.newer_than(seen)


def test_another_layout_is_refused_and_the_difference_named(client):
    with pytest.raises(SpecMismatch, match="'scale'.*expected float32"):
        client.publisher("policy").publish({"scale": np.zeros(2, np.float32), "offset": np.zeros((), np.float32)})


def test_a_model_without_publish_refuses_publications(client):
    with pytest.raises(Refused, match="set publish"):
        client.publisher("fixed")
    with pytest.raises(ModelNotFound):
        client.publisher("nothing")
    with pytest.raises(Refused, match="takes no publications"):
        client.model("fixed").infer(X, version=3)


def test_a_second_learner_is_refused_while_the_first_lives(server, client):
    first = client.publisher("policy")
    with server.connect() as other, pytest.raises(Refused, match="one at a time"):
        other.publisher("policy")
    first.close()
    with server.connect() as other:
        other.publisher("policy").publish(affine(other.weights("policy").newest + 1))


def test_a_restarted_engine_answers_with_the_newest_version(server, client):
    model, publisher = client.model("policy"), client.publisher("policy")
    version = publisher.publish(affine(publisher.version + 1))
    wait_until(lambda: model.infer_reply(X).version == version, 30, "adoption")
    os.kill(server.pids()["engine-0"], signal.SIGKILL)
    reply = model.infer_reply(X, timeout=30)
    assert reply.version == version
    assert (reply.outputs == version * X + 1000 * version).all()


def test_unreferenced_or_closed_publishers_and_readers_leave_no_descriptor(client):
    def descriptors():
        gc.collect()
        return open_files()

    client.weights("policy")
    before, closed = descriptors(), []
    for _ in range(30):
        client.weights("policy")
        client.publisher("policy")  # it frees its slot when it is dropped
        for end in (client.publisher, client.weights):
            with end("policy") as made:
                closed.append(made)
    assert descriptors() == before and len(closed) == 60


def test_publishers_and_readers_closed_with_their_connection_refuse(server):
    with server.connect() as connection:
        weights, publisher = connection.weights("policy"), connection.publisher("policy")
        publisher.publish(affine(publisher.version + 1))
    for ask in (weights.read, lambda: weights.wait_newer_than(2**40, 60), lambda: publisher.publish(affine(1))):
        with pytest.raises(Refused, match="was closed"):
            ask()


def test_a_forked_actor_reads_and_a_forked_learner_is_refused(client):
    weights, publisher = client.weights("policy"), client.publisher("policy")
    version = publisher.publish(affine(publisher.version + 1))
    assert in_a_child(lambda: weights.read().version) == version
    with pytest.raises(Refused, match="fork"):
        in_a_child(lambda: publisher.publish(affine(1)))
    assert publisher.publish(affine(version + 1)) == version + 1


def test_an_actor_and_a_learner_whose_server_ended_get_an_error(server):
    """This test is the last, because it ends the shared server."""
    with server.connect() as client:
        weights, publisher = client.weights("policy"), client.publisher("policy")
        version = publisher.publish(affine(publisher.version + 1))
        assert weights.read().version == version
        server.process.kill()
        server.process.wait()
        for ask in (weights.read, lambda: weights.wait_newer_than(version, 60)):
            with pytest.raises(ServerGone, match="take a new reader"):
                ask()
        with pytest.raises(ServerGone, match="nobody would read this"):
            publisher.publish(affine(version + 1))

        def noticed():
            try:
                return weights.newer_than(version)
            except ServerGone:
                return True

        wait_until(noticed, what="the check of the owner")
