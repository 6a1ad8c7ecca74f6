"""Grouped policies in a real server: with learners at full speed, every answer is of one whole version of its model."""

import threading
import time

import numpy as np
import pytest
from tests.serving import serving, wait_until

from jurybox.client import ModelFailed

AGENTS = 4
X = np.ones((3, 4), np.float32)


def affine(version, agent):
    """Return weights with which version v of agent a answers v * x + 1000 * v + a."""
    return {"scale": np.array(version, np.float32), "offset": np.array(1000 * version + agent, np.float32)}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    settings = {"factory": "tests.models:affine", "publish": "double_buffer", "group": "agents"}
    with serving(
        tmp_path_factory.mktemp("server"),
        {"policy/agent*": {**settings, "count": AGENTS}},
        factories=["tests.models:*"],
    ) as running:
        yield running


def test_every_answer_is_of_one_whole_version_of_its_own_model(server):
    stop, wrong, seen = threading.Event(), [], [set() for _ in range(AGENTS)]
    failures = []

    def learn(agent):
        with server.connect() as client:
            publisher = client.publisher(f"policy/agent{agent}")
            while not stop.is_set():
                publisher.publish(affine(publisher.version + 1, agent))
                time.sleep(0.001 * (agent + 1))

    def act(agent):
        try:
            with server.connect() as client:
                model = client.model(f"policy/agent{agent}", rows=4)
                wait_until(lambda: model.infer_reply(X).version > 0)
                while not stop.is_set():
                    reply = model.infer_reply(X)
                    seen[agent].add(reply.version)
                    if not (
                        reply.outputs == np.float32(reply.version) * X + np.float32(1000 * reply.version + agent)
                    ).all():
                        wrong.append((agent, reply.version, reply.outputs))
        except Exception as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=role, args=(agent,)) for agent in range(AGENTS) for role in (learn, act)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not failures and min(map(len, seen)) < 20:
        time.sleep(0.1)
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures and not wrong
    assert min(map(len, seen)) >= 20


def test_models_are_loaded_and_unloaded_while_the_group_serves(server):
    with server.connect() as client:
        client.load("policy/new", {"factory": "tests.models:affine", "args": {"scale": 3.0}, "group": "agents"})
        np.testing.assert_array_equal(client.model("policy/new").infer(X), 3 * X + 1)
        client.unload("policy/new")
        assert client.model("policy/agent1").infer(X).shape == X.shape
        with pytest.raises(ModelFailed, match="'policy/other' cannot be in group 'agents': it is built otherwise"):
            client.load("policy/other", {"factory": "tests.models:moody", "group": "agents"})
        with pytest.raises(ModelFailed, match="cannot be in group 'moods'.*branches on values"):
            client.load("policy/other", {"factory": "tests.models:moody", "group": "moods"})
        client.load(
            "policy/agent2", {"factory": "tests.models:affine", "args": {"scale": 5.0}, "publish": None}
        )  # outside the group from now on
        np.testing.assert_array_equal(client.model("policy/agent2").infer(X), 5 * X + 1)
        assert client.model("policy/agent3").infer(X).shape == X.shape
    assert "\nTraceback" not in server.text() and "terminate" not in server.text()  # of uncaught errors
