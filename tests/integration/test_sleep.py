"""Models that are put to sleep in a running server, and woken: over the client, HTTP, gRPC and the command line."""

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request

import numpy as np
import pytest
import torch
from tests.serving import serving, wait_until

from jurybox.client import Busy, ModelFailed, ModelNotFound, Refused, connect
from jurybox.protocol.errors import Code

X = np.ones((2, 4), np.float32)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    models = {
        "sleeper": {"factory": "tests.models:affine", "publish": "double_buffer", "rows": 64},
        "awake": {"factory": "tests.models:affine", "args": {"offset": 5.0}, "rows": 64},
        "a": {"factory": "tests.models:affine", "group": "g", "rows": 64},
        "b": {"factory": "tests.models:affine", "group": "g", "rows": 64},
    }
    (folder := tmp_path_factory.mktemp("says")).mkdir(exist_ok=True)
    models["reluctant"] = {"factory": "tests.models:reluctant", "args": {"folder": str(folder)}, "rows": 64}
    ports = {"http": "127.0.0.1:0", "grpc": "127.0.0.1:0", "tcp": "127.0.0.1:0"}
    with serving(tmp_path_factory.mktemp("server"), models, **ports) as running:
        running.says = folder
        yield running


@pytest.fixture
def client(server):
    with server.connect() as connection:
        yield connection
        connection.wake("sleeper")


def http(server, path, post=None):
    """Status and body of a request to the gateway."""
    request = urllib.request.Request(f"http://{server.listening('http')}{path}", data=post)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read() or b"null")
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read() or b"null")


def test_a_sleeping_model_says_so_and_others_are_served(server, client):
    sleeper, awake = client.model("sleeper", rows=4), client.model("awake", rows=4)
    assert sleeper.infer(X)[0, 0] == 3
    client.sleep("sleeper")
    client.sleep("sleeper")  # harmless
    for ask in (lambda: sleeper.infer(X), lambda: client.model("sleeper")):
        with pytest.raises(Refused, match="'sleeper' sleeps.*jurybox wake sleeper") as caught:
            ask()
        assert caught.value.code == Code.SLEEPING
    assert awake.infer(X)[0, 0] == 7
    assert client.describe("sleeper").state == "sleeping"
    client.wake("sleeper")
    client.wake("sleeper")
    assert sleeper.infer(X)[0, 0] == 3  # over the rows that it had


def test_what_is_published_to_a_sleeping_model_is_used_when_it_wakes(client):
    sleeper = client.model("sleeper", rows=4)
    with client.publisher("sleeper") as publisher:
        first = publisher.publish({"scale": torch.tensor(3.0), "offset": torch.tensor(0.0)})
        wait_until(lambda: sleeper.infer(X)[0, 0] == 3, 20, "the first publication")
        client.sleep("sleeper")
        publisher.publish({"scale": torch.tensor(4.0), "offset": torch.tensor(0.0)})
        last = publisher.publish({"scale": torch.tensor(6.0), "offset": torch.tensor(0.0)})
        client.wake("sleeper")
        reply = sleeper.submit(X).result(timeout=20)
        assert reply.version == last == first + 2
        assert np.asarray(reply.outputs)[0, 0] == 6
        publisher.publish({"scale": torch.tensor(2.0), "offset": torch.tensor(1.0)})
        wait_until(lambda: sleeper.infer(X)[0, 0] == 3, 20, "a publication after waking")


def test_an_engine_that_dies_meanwhile_leaves_the_model_asleep_and_wakes_it_with_the_newest_weights(server, client):
    sleeper = client.model("sleeper", rows=4)
    before = sleeper.infer(X)
    client.sleep("sleeper")
    life = client.status()["engines"][0]["pid"]
    os.kill(life, signal.SIGKILL)
    wait_until(lambda: client.model("awake", rows=4).infer(X)[0, 0] == 7, 60, "the next engine")
    assert client.status()["engines"][0]["pid"] != life
    assert client.describe("sleeper").state == "sleeping"
    with pytest.raises(Refused, match="sleeps"):
        sleeper.infer(X)
    client.wake("sleeper")
    np.testing.assert_array_equal(sleeper.infer(X), before)


def test_the_gateway_is_healthy_while_a_model_sleeps_which_is_not_ready(server, client):
    assert http(server, "/v2/repository/models/sleeper/sleep", b"")[0] == 200
    body = json.dumps(
        {"inputs": [{"name": "observation", "shape": [1, 4], "datatype": "FP32", "data": [1, 1, 1, 1]}]}
    ).encode()
    status, said = http(server, "/v2/models/sleeper/infer", body)
    assert status == 503 and "sleeps" in said["error"]
    status, said = http(server, "/v2/models/sleeper/ready")
    assert status == 503 and "sleeping" in json.dumps(said)
    assert http(server, "/health")[0] == 200
    assert http(server, "/v2/health/ready")[0] == 200
    assert http(server, "/v2/models/sleeper")[0] == 200  # its metadata
    assert http(server, "/v2/repository/models/sleeper/wake", b"")[0] == 200
    assert http(server, "/v2/models/sleeper/ready")[0] == 200
    assert http(server, "/v2/models/sleeper/infer", body)[0] == 200
    assert http(server, "/v2/repository/models/nobody/sleep", b"")[0] == 404


@pytest.mark.parametrize("scheme", ["grpc", "tcp"])
def test_clients_elsewhere_put_to_sleep_and_wake(server, client, scheme):
    with connect(f"{scheme}://{server.listening(scheme)}", timeout=60) as far:
        model = far.model("sleeper", rows=4)
        assert model.infer(X).shape == X.shape
        far.sleep("sleeper")
        assert far.describe("sleeper").state == client.describe("sleeper").state == "sleeping"
        for ask in (lambda: model.infer(X), lambda: far.model("sleeper").infer(X)):
            with pytest.raises(Refused, match="sleeps") as caught:
                ask()
            assert caught.value.code == Code.SLEEPING
        far.wake("sleeper")
        assert model.infer(X).shape == X.shape
        with pytest.raises(ModelNotFound):
            far.sleep("nobody")


def test_the_command_line_puts_to_sleep_and_wakes(server, client):
    def run(*words):
        return subprocess.run(
            [sys.executable, "-m", "jurybox.server.cli", *words, "--address", server.address],
            capture_output=True,
            text=True,
            timeout=60,
        )

    done = run("sleep", "sleeper")
    assert done.returncode == 0 and "sleeps" in done.stdout, done.stderr
    assert client.describe("sleeper").state == "sleeping"
    done = run("wake", "sleeper")
    assert done.returncode == 0 and "awake" in done.stdout, done.stderr
    assert client.describe("sleeper").state == "ready"
    done = run("sleep", "nobody")
    assert done.returncode == 1 and "no model 'nobody'" in done.stderr


def test_one_of_a_group_does_not_sleep_and_a_sleeping_model_is_not_loaded_anew(client):
    with pytest.raises(Refused, match="group 'g'"):
        client.sleep("a")
    client.sleep("sleeper")
    with pytest.raises(Refused, match="wake it, then load it"):
        client.load("sleeper")


def test_a_model_that_cannot_be_moved_is_where_it_was_and_says_why(server, client):
    model = client.model("reluctant", rows=4)
    (server.says / "no sleep").touch()
    with pytest.raises(ModelFailed, match="no room on the host"):
        client.sleep("reluctant")
    assert model.infer(X)[0, 0] == 3  # it serves on
    (server.says / "no sleep").unlink()
    client.sleep("reluctant")
    (server.says / "no wake").touch()
    with pytest.raises(ModelFailed, match="no room on the device"):
        client.wake("reluctant")
    with pytest.raises(Refused, match="sleeps"):
        model.infer(X)
    assert client.describe("reluctant").state == "sleeping"
    (server.says / "no wake").unlink()
    client.wake("reluctant")
    assert model.infer(X)[0, 0] == 3
    client.unload("reluctant")
    client.load("reluctant")
    client.sleep("reluctant")
    client.unload("reluctant")  # asleep, it can be let go of as well
    client.load("reluctant")
    assert client.model("reluctant", rows=4).infer(X)[0, 0] == 3


# ---- the device for a trainer alone


def held(server):
    """What a process sees that has the engines paused, and is killed."""
    code = (
        "import sys, time\nfrom jurybox.client import connect\n"
        f"with connect({server.address!r}, timeout=60) as server, server.pause():\n"
        "    print('paused', flush=True)\n    time.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "paused\n"
    return process


def test_engines_compute_nothing_while_they_are_paused_and_answer_afterwards(client):
    model = client.model("awake", rows=8)
    assert model.infer(X)[0, 0] == 7
    with client.pause():
        (before,) = [m["batches"] for m in client.status()["models"] if m["name"] == "awake"]
        ticket = model.submit(X)
        with pytest.raises(TimeoutError):
            model.infer(X, timeout=0.5)
        assert [m["batches"] for m in client.status()["models"] if m["name"] == "awake"] == [before]
    assert np.asarray(ticket.result(timeout=20).outputs)[0, 0] == 7
    assert model.infer(X)[0, 0] == 7


def test_models_are_loaded_and_put_to_sleep_while_engines_are_paused(client):
    with client.pause():
        client.sleep("sleeper")
        assert client.describe("sleeper").state == "sleeping"
        client.wake("sleeper")
    assert client.model("sleeper", rows=4).infer(X).shape == X.shape


def test_who_is_killed_with_the_engines_paused_lets_them_go_on(server, client):
    model = client.model("awake", rows=8)
    process = held(server)
    try:
        with pytest.raises(TimeoutError):
            model.infer(X, timeout=0.3)
        with pytest.raises(Busy, match="another process"), client.pause(timeout=0.2):
            pass
        process.kill()
        assert model.infer(X, timeout=30)[0, 0] == 7
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_an_engine_that_starts_while_the_others_pause_waits_with_them(server, client):
    model = client.model("awake", rows=8)
    with client.pause():
        life = client.status()["engines"][0]["pid"]
        os.kill(life, signal.SIGKILL)
        wait_until(lambda: client.status()["engines"][0]["pid"] not in (0, life), 60, "the next engine")
        wait_until(lambda: client.status()["engines"][0]["state"] == "serving", 60, "that it serves")
        with pytest.raises(TimeoutError):
            model.infer(X, timeout=0.5)
    assert model.infer(X, timeout=30)[0, 0] == 7


def test_only_processes_of_the_host_pause_its_engines(server):
    for scheme in ("grpc", "tcp"):
        with connect(f"{scheme}://{server.listening(scheme)}", timeout=60) as far:
            with pytest.raises(Refused, match="own host"), far.pause():
                pass


def test_a_paused_server_stops_when_it_is_told_to(server):
    """The last, since it ends the server of all."""
    process = held(server)
    try:
        assert server.stop(timeout=30) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
