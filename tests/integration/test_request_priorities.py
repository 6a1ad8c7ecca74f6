"""Priorities: of requests that wait for an engine, those of a higher one are computed first, over every transport."""

import base64
import json
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tests.serving import serving

from jurybox.client import Refused, connect

MODELS = {"counting": {"factory": "tests.models:counting", "max_batch": 1, "rows": 64}}
ROW = np.zeros((1, 4), np.float32)
TRIES = 8  # a request may be late on a loaded machine; without priorities none of them succeeds


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    everywhere = dict.fromkeys(("tcp", "grpc", "http"), "127.0.0.1:0")
    with serving(tmp_path_factory.mktemp("priorities"), MODELS, **everywhere) as running:
        yield running


def come_first(server, before, after):
    """Send what `before` and then `after` send while the engine pauses; return whether all of `after` came first.

    Each returns functions that wait for the numbers of the batches that computed its requests.
    """
    with server.connect() as pausing:
        for attempt in range(TRIES):
            with pausing.pause():
                earlier = before()
                time.sleep(0.05 * (attempt + 1))
                later = after()
                time.sleep(0.05 * (attempt + 1))
            if max(wait() for wait in later) < min(wait() for wait in earlier):
                return True
    return False


def sends(model, n):
    def send():
        return [(lambda ticket=ticket: float(ticket.result(timeout=60.0).outputs[0])) for ticket in tickets(n)]

    def tickets(n):
        return [model.submit(ROW, timeout=60.0) for _ in range(n)]

    return send


@pytest.mark.parametrize("transport", ["shm", "zmq", "tcp", "grpc"])
def test_a_request_of_a_higher_priority_is_computed_before_those_that_came_earlier(server, transport):
    if transport == "grpc":
        pytest.importorskip("grpc")
    with server.connect_over(transport) as connection:
        normal = connection.model("counting", rows=4)
        first, last = (connection.model("counting", rows=4, priority=priority) for priority in (1, 3))
        assert come_first(server, sends(normal, 3), sends(first, 1))
        assert come_first(server, sends(last, 3), sends(normal, 1))


def infer_over_http(server, **parameters):
    tensor = {"name": "observation", "datatype": "FP32", "shape": [1, 4], "data": [0.0] * 4}
    body = json.dumps({"inputs": [tensor], "parameters": parameters}).encode()
    url = f"http://{server.listening('http')}/v2/models/counting/infer"
    with urllib.request.urlopen(urllib.request.Request(url, body), timeout=60.0) as answer:
        return json.load(answer)["outputs"][0]["data"][0]


def test_a_parameter_of_the_open_inference_protocol_sets_a_requests_priority(server):
    with ThreadPoolExecutor(8) as threads:

        def send(n, **parameters):
            asked = [threads.submit(infer_over_http, server, **parameters) for _ in range(n)]
            return [one.result for one in asked]

        assert come_first(server, lambda: send(3), lambda: send(1, priority=1))
        assert come_first(server, lambda: send(3, priority=3), lambda: send(1, priority=0))


def test_a_doors_requests_have_the_priority_of_its_settings(tmp_path):
    models = {"text": {"factory": "tests.reward_models:text_length"}, "arm": {"factory": "tests.robot_models:vla"}}
    doors = {"openrlhf": {"model": "text", "output": "score", "priority": 3}}
    robots = '[robots.arm]\nmodel = "arm"\nspeaks = "act"\nlisten = "127.0.0.1:0"\npriority = 1\n'
    with (
        serving(tmp_path, models, dialects=doors, http="127.0.0.1:0", more=robots) as running,
        running.connect() as client,
    ):
        lanes = client._link.scoreboard.lanes
        url = f"http://{running.listening('http')}/dialects/openrlhf"
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps({"query": ["abc"]}).encode())) as answer:
            assert json.load(answer)["rewards"] == [3.0]
        assert 3 in lanes["priority"] and 1 not in lanes["priority"]
        picture = {"__numpy__": base64.b64encode(bytes([9]) * 144).decode(), "dtype": "|u1", "shape": [8, 6, 3]}
        observed = json.dumps({"image": picture, "instruction": "go"}).encode()
        url = f"http://{client.status()['server']['robots']['arm']}/act"
        with urllib.request.urlopen(urllib.request.Request(url, observed), timeout=60.0) as answer:
            assert json.load(answer)
        assert 1 in lanes["priority"]


def test_a_connections_priority_is_that_of_its_models_and_is_kept_when_a_lane_grows(server):
    with server.connect(priority=3) as connection:
        lanes = connection._link.scoreboard.lanes
        model, urgent = connection.model("counting"), connection.model("counting", priority=1)
        assert lanes["priority"][model.requests.lane.leased[0]] == 3
        assert lanes["priority"][urgent.requests.lane.leased[0]] == 1
        before = model.requests.lane
        with model.rows(len(before.runs.lent) + before.rows + 1):
            assert model.requests.lane is not before
            assert lanes["priority"][model.requests.lane.leased[0]] == 3


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_server_that_knows_no_priorities_is_told_from_one_that_does(server, transport, monkeypatch):
    with server.connect_over(transport) as connection:
        call = connection._link._call

        def as_older_ones_answer(*args, **request):
            reply = call(*args, **request)
            reply.lease.priority = 0
            return reply

        monkeypatch.setattr(connection._link, "_call", as_older_ones_answer)
        with pytest.raises(Refused, match=r"priority=3: this server knows no priorities.*update its jurybox"):
            connection.model("counting", priority=3)
        assert connection.model("counting")(ROW[0]) > 0


@pytest.mark.parametrize("priority", [0, 4, -1, 1.5, None, "first"])
def test_other_numbers_are_no_priority(server, priority):
    with pytest.raises(ValueError, match=r"priority=.*: expected a whole number from 1 to 3"):
        connect(server.address, priority=priority)
