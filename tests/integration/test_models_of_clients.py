"""Models that a client loads and keeps: over every transport, as far as configured, unloaded without their client."""

import os
import re
import signal
import subprocess
import sys

import numpy as np
import pytest
from tests.serving import serving, wait_until

from jurybox.client import ModelNotFound, Refused, connect

LOADED = {"factory": "tests.models:affine", "args": {"scale": 3.0}, "publish": "double_buffer"}
X = np.ones((2, 4), np.float32)
TRANSPORTS = ["ipc", "grpc", "tcp"]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    models = {"own": {"factory": "tests.models:affine"}}
    allowed = {"remote_factories": ["tests.models:*"]}
    with serving(
        tmp_path_factory.mktemp("server"), models, grpc="127.0.0.1:0", tcp="127.0.0.1:0", **allowed
    ) as running:
        yield running


@pytest.fixture(params=TRANSPORTS)
def client(server, request):
    kind = request.param
    address = server.address if kind == "ipc" else f"{kind}://{server.listening(kind)}"
    with connect(address, timeout=30.0) as connection:
        yield connection


def ready(client, name):
    """Return how often the model was loaded, by the server's last log lines."""
    events = client.status()["events"]
    return sum(event["event"] == "model ready" and event["fields"].get("model") == name for event in events)


def test_a_client_anywhere_loads_uses_keeps_and_unloads_what_the_configuration_allows(client):
    client.load("mine", LOADED, keep=30.0)
    assert (client.model("mine", rows=2).infer(X) == 4.0).all()
    client.keep("mine", 60.0)
    client.load("mine", keep=30.0)  # again, as it is
    client.unload("mine")
    with pytest.raises(ModelNotFound):
        client.describe("mine")


def test_a_load_without_settings_says_how_long_the_model_is_kept_from_then_on(server):
    with server.connect() as client:
        client.load("mine", LOADED)
        with pytest.raises(Refused, match="loaded without keep"):
            client.keep("mine", 60.0)
        client.load("mine", keep=30.0)
        client.keep("mine", 60.0)
        client.load("mine")  # as it is: also as long
        client.keep("mine", 60.0)
        client.unload("mine")


def test_a_model_that_is_no_longer_kept_is_unloaded_and_one_that_is_kept_is_not(client):
    client.load("kept", LOADED, keep=600.0)
    client.load("silent", LOADED, keep=600.0)
    assert {"kept", "own", "silent"} <= set(client.models())
    client.keep("silent", 1.0)  # from now on, instead of what was said before
    client.keep("kept", 600.0)
    wait_until(lambda: "silent" not in client.models(), 60, "the unloading of the model that is not kept")
    assert {"kept", "own"} <= set(client.models())
    client.unload("kept")


@pytest.mark.parametrize("kind", ["grpc", "tcp"])
def test_a_client_elsewhere_brings_no_more_than_that_and_touches_nothing_of_the_servers(server, kind, tmp_path):
    with connect(f"{kind}://{server.listening(kind)}", timeout=30.0) as client, server.connect() as here:
        here.load("local", {"factory": "tests.models:affine"})
        for name in ("own", "local"):
            with pytest.raises(Refused, match="is this server's own"):
                client.load(name, LOADED, keep=5.0)
        with pytest.raises(Refused, match=r'add this line .* remote_factories = \["os:\*"\]'):
            client.load("mine", {"factory": "os:getcwd"}, keep=5.0)
        with pytest.raises(Refused, match="over HTTP that names a version of another model"):
            client.load("local/versions/1", LOADED, keep=5.0)
        with pytest.raises(Refused, match="is held for 1 to 3600 s"):
            client.load("mine", LOADED)
        for more in ({"save_dir": str(tmp_path)}, {"weights": "/etc/passwd"}, {"compile": True}):
            with pytest.raises(Refused, match=f"{next(iter(more))} of model 'mine' is not taken from a network"):
                client.load("mine", {**LOADED, **more}, keep=5.0)
        with pytest.raises(Refused, match="of the server's configuration"):
            client.keep("own", 5.0)
        with pytest.raises(Refused, match="stays until it is unloaded"):
            client.keep("local", 5.0)
        loads = ready(here, "local")
        with pytest.raises(Refused, match="is this server's own|stays until it is unloaded"):
            client.load("local", keep=5.0)
        assert ready(here, "local") == loads  # it was refused before anything was loaded
        here.unload("local")
        assert client.models() == ["own"]


def test_without_a_line_in_the_configuration_no_remote_client_is_accepted(gateway_server):
    with connect(f"grpc://{gateway_server.listening('grpc')}", timeout=30.0) as client:
        with pytest.raises(Refused, match=r'remote_factories = \["tests.models:\*"\]'):
            client.load("mine", LOADED, keep=5.0)


_KILLED = """
import sys, time
from jurybox.client import connect
with connect(sys.argv[1]) as client:
    client.load("orphan", {"factory": "tests.models:affine"}, keep=600.0)
    with client.model("orphan", rows=2) as model:
        print("loaded", flush=True)
        time.sleep(600)
"""


@pytest.mark.parametrize("kind", ["ipc", *(pytest.param(kind, marks=pytest.mark.runs) for kind in ("grpc", "tcp"))])
def test_a_model_does_not_outlive_its_killed_client_for_long_however_long_it_was_to_be_kept(server, kind):
    address = server.address if kind == "ipc" else f"{kind}://{server.listening(kind)}"
    if kind == "grpc" and not re.search(r"libnghttp2 \d", server.text()):  # or why it is missing
        pytest.skip("grpcio tells nobody that a connection has ended: the model is kept for its time")
    owner = subprocess.Popen([sys.executable, "-c", _KILLED, address], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout.readline() == "loaded\n"
        with server.connect() as client:
            assert "orphan" in client.models()
            owner.kill()
            wait_until(lambda: "orphan" not in client.models(), 30, "the unloading of the model")
    finally:
        owner.kill()
        owner.wait()


KEEP = 6.0  # seconds
_RUN = f"""
KEEP = {KEEP}
"""
_RUN += """
import sys, time
from pathlib import Path
from jurybox.training.runtime import serving
serving.KEEP = KEEP
models = {"policy": {"factory": "tests.models:affine", "publish": "double_buffer"}}
with serving.served_models(models, sys.argv[1], Path("server.log")) as served:
    print(served.names["policy"], flush=True)
    if sys.argv[2] == "raise":
        raise SystemExit(7)
    while True:
        time.sleep(0.1)  # in short sleeps: a signal delivered to another thread does not interrupt a sleep
"""


def begin(address, how):
    process = subprocess.Popen([sys.executable, "-c", _RUN, address, how], stdout=subprocess.PIPE, text=True)
    return process, process.stdout.readline().strip()


@pytest.mark.parametrize("kind", ["ipc", pytest.param("grpc", marks=pytest.mark.runs)])
def test_two_runs_have_their_own_models_which_are_unloaded_however_they_end(server, kind):
    address = server.address if kind == "ipc" else f"{kind}://{server.listening(kind)}"
    runs = [begin(address, how) for how in ("stay", "stay", "raise")]
    try:
        (killed, first), (interrupted, second), (failed, third) = runs
        assert len({first, second, third}) == 3 and all(name.startswith("policy-") for name in (first, second))
        assert failed.wait(30) == 7
        with server.connect() as client:
            assert third not in client.models()
            client.load("silent", LOADED, keep=KEEP + 1.0)
            wait_until(lambda: "silent" not in client.models(), 60, "the end of a time in which a run must say a word")
            assert {first, second} <= set(client.models())
            os.kill(killed.pid, signal.SIGKILL)
            killed.wait(30)
            wait_until(lambda: first not in client.models(), 20, "the unloading of the killed run's model")
            interrupted.send_signal(signal.SIGINT)
            interrupted.wait(30)
            assert client.models() == ["own"]
    finally:
        for process, _ in runs:
            if process.poll() is None:
                process.kill()
            process.wait()
