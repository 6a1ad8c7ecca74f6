"""Rows that were computed before are answered from the cache, whatever the transport, and never with other weights."""

import json
import threading
import urllib.request

import numpy as np
import pytest
from tests.serving import serving, wait_until

from jurybox.client import ModelFailed, RowFailed

CACHED = {"deterministic": True, "cache_mib": 1, "max_batch": 8, "rows": 256}
MODELS = {
    "numbered": {"factory": "tests.cached_models:numbered", "publish": "double_buffer", **CACHED},
    "shouting": {"factory": "tests.cached_models:shouting", **CACHED},
    "uncached": {"factory": "tests.cached_models:numbered", "deterministic": True},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    doors = {"tcp": "127.0.0.1:0", "grpc": "127.0.0.1:0", "http": "127.0.0.1:0", "factories": ["tests.open_models:*"]}
    with serving(tmp_path_factory.mktemp("cache"), MODELS, **doors) as running:
        yield running


@pytest.fixture(params=["shm", "zmq", "tcp", "grpc"])
def client(server, request):
    with server.connect_over(request.param) as connected:
        yield connected


FRESH = iter(range(100, 1_000_000, 100))


def fresh(rows):
    """Rows that nobody has asked before."""
    return np.stack([np.full(2, next(FRESH), np.float32) for _ in range(rows)])


def counted(server, name):
    with server.connect() as client:
        model = next(model for model in client.status()["models"] if model["name"] == name)
    return model["cache_hits"], model["cache_misses"]


def test_known_rows_are_not_computed_again(server, client):
    model, rows = client.model("numbered"), fresh(3)
    hits, misses = counted(server, "numbered")
    first = model.infer(rows)
    again = model.infer(rows[::-1].copy())
    assert again["number"].tolist() == first["number"][::-1].tolist() and (again["y"] == first["y"][::-1]).all()
    assert model(rows[1])["number"] == first["number"][1]
    mixed = np.concatenate([rows[:1], fresh(1), rows[1:], fresh(1)])
    came = model.infer(mixed)
    assert (came["y"] == first["y"][0, 0] / rows[0, 0] * mixed).all()
    assert came["number"][[0, 2, 3]].tolist() == first["number"].tolist()
    assert min(came["number"][[1, 4]]) > max(first["number"])
    wait_until(lambda: counted(server, "numbered") == (hits + 7, misses + 5))
    plain = client.model("uncached")
    assert plain.infer(rows)["number"].tolist() != plain.infer(rows)["number"].tolist()


def test_texts_of_any_length_are_known_by_all_their_bytes(client):
    model = client.model("shouting")
    texts = [f"text {next(FRESH)} {'x' * n}" for n in (0, 1, 9)]
    first = model.infer(texts)
    again = model.infer([texts[2], texts[0] + " ", texts[0]])
    assert again["y"] == [texts[2].upper().encode(), (texts[0] + " ").upper().encode(), first["y"][0]]
    assert again["number"].tolist()[::2] == [first["number"][2], first["number"][0]]
    assert again["number"][1] > max(first["number"])


def test_rows_that_fail_are_computed_each_time_and_named_by_their_place(client):
    model, rows = client.model("numbered"), fresh(2)
    first = model.infer(rows)
    for _ in range(2):
        with pytest.raises(RowFailed, match="row 1: thirteen"):
            model.infer(np.stack([rows[0], np.full(2, 13, np.float32), rows[1]]))
    assert model.infer(rows)["number"].tolist() == first["number"].tolist()


def test_requests_over_http_share_the_cache(server):
    rows = fresh(1)

    def ask():
        tensor = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": rows.ravel().tolist()}
        body = json.dumps({"inputs": [tensor]}).encode()
        url = f"http://{server.listening('http')}/v2/models/numbered/infer"
        with urllib.request.urlopen(urllib.request.Request(url, body), timeout=60) as answer:
            return {one["name"]: one["data"] for one in json.loads(answer.read())["outputs"]}

    first = ask()
    assert ask() == first
    with server.connect() as client:
        assert client.model("numbered").infer(rows)["number"].tolist() == first["number"]
    with urllib.request.urlopen(f"http://{server.listening('http')}/metrics", timeout=60) as answer:
        metrics = answer.read().decode()
    assert 'jurybox_cache_hits_total{model="numbered"} ' in metrics
    assert 'jurybox_cache_misses_total{model="uncached"} 0.0' in metrics
    url = f"http://{server.listening('http')}/v2/models/numbered/stats"
    with urllib.request.urlopen(url, timeout=60) as answer:
        assert json.loads(answer.read())["model_stats"][0]["inference_stats"]["cache_hit"]["count"] > 0


def test_no_answer_is_of_another_version_while_a_learner_publishes(server):
    row, wrong, done = fresh(1), [], threading.Event()

    def ask():
        with server.connect() as client:
            model = client.model("numbered")
            while not done.is_set():
                reply = model.infer_reply(row)
                if reply.version and not (reply.outputs["y"] == row * reply.version).all():
                    wrong.append(reply)

    with server.connect() as client, client.publisher("numbered") as publisher:
        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        model = client.model("numbered")
        for _ in range(30):
            version = publisher.version + 1
            publisher.publish({"scale": np.array(version, np.float32)})
            wait_until(lambda: model.infer_reply(row).version == version)  # noqa: B023
        done.set()
        for thread in threads:
            thread.join(30.0)
    assert not wrong


def test_models_with_state_are_refused(server):
    settings = {"factory": "tests.open_models:running_sum", "deterministic": True, "cache_mib": 1}
    with server.connect() as client, pytest.raises(ModelFailed, match="cache_mib is for models without state"):
        client.load("sum", settings)
