"""Models are put to sleep and woken in a running server: by the client, HTTP, gRPC and the command line."""

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from tests.serving import serving, wait_until

from jurybox.client import Busy, ModelFailed, ModelNotFound, Refused, connect
from jurybox.protocol.errors import Code
from tests import preloaded

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
        running.orders = folder
        yield running


@pytest.fixture
def client(server):
    with server.connect() as connection:
        yield connection
        connection.wake("sleeper")


def http(server, path, post=None):
    """Return the status and the body of a request to the gateway."""
    request = urllib.request.Request(f"http://{server.listening('http')}{path}", data=post)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read() or b"null")
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read() or b"null")


def test_a_sleeping_model_refuses_requests_and_others_are_served(server, client):
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
    assert sleeper.infer(X)[0, 0] == 3  # with the same rows


def test_a_publication_to_a_sleeping_model_is_used_when_it_wakes(client):
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


def test_after_a_killed_engine_the_model_sleeps_and_wakes_with_the_newest_weights(server, client):
    sleeper = client.model("sleeper", rows=4)
    before = sleeper.infer(X)
    client.sleep("sleeper")
    pid = client.status()["engines"][0]["pid"]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: client.model("awake", rows=4).infer(X)[0, 0] == 7, 60, "the next engine")
    assert client.status()["engines"][0]["pid"] != pid
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
    status, reply = http(server, "/v2/models/sleeper/infer", body)
    assert status == 503 and "sleeps" in reply["error"]
    status, reply = http(server, "/v2/models/sleeper/ready")
    assert status == 503 and "sleeping" in json.dumps(reply)
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
        return preloaded.run("jurybox.server.cli", [*words, "--address", server.address])

    done = run("sleep", "sleeper")
    assert done.returncode == 0 and "sleeps" in done.stdout, done.stderr
    assert client.describe("sleeper").state == "sleeping"
    done = run("wake", "sleeper")
    assert done.returncode == 0 and "awake" in done.stdout, done.stderr
    assert client.describe("sleeper").state == "ready"
    done = run("sleep", "nobody")
    assert done.returncode == 1 and "no model 'nobody'" in done.stderr


def test_a_member_of_a_group_cannot_sleep_and_a_sleeping_model_cannot_be_reloaded(client):
    with pytest.raises(Refused, match="group 'g'"):
        client.sleep("a")
    client.sleep("sleeper")
    with pytest.raises(Refused, match="wake it, then load it"):
        client.load("sleeper")


def test_a_model_that_cannot_be_moved_stays_and_the_error_says_why(server, client):
    model = client.model("reluctant", rows=4)
    (server.orders / "no sleep").touch()
    with pytest.raises(ModelFailed, match="no room on the host"):
        client.sleep("reluctant")
    assert model.infer(X)[0, 0] == 3  # it still serves
    (server.orders / "no sleep").unlink()
    client.sleep("reluctant")
    (server.orders / "no wake").touch()
    with pytest.raises(ModelFailed, match="no room on the device"):
        client.wake("reluctant")
    with pytest.raises(Refused, match="sleeps"):
        model.infer(X)
    assert client.describe("reluctant").state == "sleeping"
    (server.orders / "no wake").unlink()
    client.wake("reluctant")
    assert model.infer(X)[0, 0] == 3
    client.unload("reluctant")
    client.load("reluctant")
    client.sleep("reluctant")
    client.unload("reluctant")  # it can also be unloaded while it sleeps
    client.load("reluctant")
    assert client.model("reluctant", rows=4).infer(X)[0, 0] == 3


def test_a_model_that_can_be_moved_in_neither_direction_sleeps_until_it_can(server, client):
    model = client.model("reluctant", rows=4)
    for name in ("no sleep", "no wake"):
        (server.orders / name).touch()
    try:
        client.sleep("reluctant")
        description = client.describe("reluctant")
        assert (description.state, description.settled) == ("sleeping", True)
        assert "no room on the host" in description.reason and "no room on the device" in description.reason
    finally:
        for name in ("no sleep", "no wake"):
            (server.orders / name).unlink()
    client.wake("reluctant")
    assert model.infer(X)[0, 0] == 3


# ---- paused engines, for a trainer that needs the device


def start_pausing_process(server):
    """Start a process that pauses the engines until it is killed; return it."""
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


@pytest.mark.parametrize("first_to_end", [0, 1])
def test_engines_resume_at_the_end_of_the_last_pause_of_a_connection(client, first_to_end):
    model = client.model("awake", rows=8)
    with ThreadPoolExecutor(1) as another_thread, ExitStack() as here, ExitStack() as there:
        here.enter_context(client.pause())
        another_thread.submit(there.enter_context, client.pause()).result(timeout=60)
        another_thread.submit((here, there)[first_to_end].close).result(timeout=60)
        with pytest.raises(TimeoutError):
            model.infer(X, timeout=0.5)
    assert model.infer(X, timeout=30)[0, 0] == 7


def test_a_pause_that_fails_within_another_one_does_not_end_it(client, monkeypatch):
    model = client.model("awake", rows=8)
    with client.pause():
        with monkeypatch.context() as patched:
            patched.setattr("jurybox.client.local_link.LocalLink._call", refuse)
            with pytest.raises(Refused, match="this test"), client.pause():
                pass
        with pytest.raises(TimeoutError):
            model.infer(X, timeout=0.5)
    assert model.infer(X, timeout=30)[0, 0] == 7


def refuse(*_, **__):
    raise Refused("this test refuses every call")


def test_models_are_loaded_and_put_to_sleep_while_engines_are_paused(client):
    with client.pause():
        client.sleep("sleeper")
        assert client.describe("sleeper").state == "sleeping"
        client.wake("sleeper")
    assert client.model("sleeper", rows=4).infer(X).shape == X.shape


def test_engines_resume_when_the_process_that_paused_them_is_killed(server, client):
    model = client.model("awake", rows=8)
    process = start_pausing_process(server)
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


def test_an_engine_that_starts_during_a_pause_waits(server, client):
    model = client.model("awake", rows=8)
    with client.pause():
        pid = client.status()["engines"][0]["pid"]
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: client.status()["engines"][0]["pid"] not in (0, pid), 60, "the next engine")
        wait_until(lambda: client.status()["engines"][0]["state"] == "serving", 60, "the engine to serve")
        with pytest.raises(TimeoutError):
            model.infer(X, timeout=0.5)
    assert model.infer(X, timeout=30)[0, 0] == 7


def test_only_processes_of_the_host_pause_its_engines(server):
    for scheme in ("grpc", "tcp"):
        with connect(f"{scheme}://{server.listening(scheme)}", timeout=60) as far:
            with pytest.raises(Refused, match="own host"), far.pause():
                pass


def test_a_paused_server_can_be_stopped(server):
    """This test is last because it ends the shared server."""
    process = start_pausing_process(server)
    try:
        assert server.stop(timeout=30) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
