"""A server's protection against other users of its host, and against code that is not configured."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.serving import launch, serving, wait_until

from jurybox.client import ModelFailed, Refused

STRANGER = 12345
MODELS = {"affine": {"factory": "tests.models:affine", "max_batch": 16, "rows": 64}}
X = np.ones((2, 4), np.float32)

# Send a control request as raw frames as the given user, without the client library's own checks.
ASK = """
import os, sys, zmq
from jurybox.protocol import wire
from jurybox.protocol.control_pb2 import ControlRequest, Hello, ControlReply
context = zmq.Context()
os.setgroups([]); os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))
socket = context.socket(zmq.DEALER)
socket.setsockopt(zmq.LINGER, 0)
socket.connect(sys.argv[1])
socket.send_multipart((wire.PREFIX, b"12345678", ControlRequest(hello=Hello()).SerializeToString()))
print("answered" if socket.poll(float(sys.argv[3]) * 1000) else "silence")
os._exit(0)
"""


def ask(address, user, seconds):
    done = subprocess.run(
        [sys.executable, "-c", ASK, address, str(user), str(seconds)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    before = os.umask(0)  # as a start script may leave it
    try:
        with serving(tmp_path_factory.mktemp("server"), MODELS, factories=["tests.open_models:*"]) as running:
            yield running
    finally:
        os.umask(before)


def test_sockets_are_private_to_their_user_under_any_umask(server):
    folder = Path(server.address.removeprefix("ipc://")).parent
    modes = {path.name: stat.S_IMODE(path.lstat().st_mode) for path in folder.iterdir() if path.is_socket()}
    assert modes == {"engine": 0o600, "engine-0": 0o600}


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_another_user_gets_no_answer_even_if_modes_let_him_connect(server):
    folder = Path(server.address.removeprefix("ipc://")).parent
    above = [path for path in (folder, *folder.parents) if not path.stat().st_mode & 0o001]
    changed = [*above, folder / "engine"]
    before = {path: stat.S_IMODE(path.stat().st_mode) for path in changed}
    try:
        for path in changed:
            path.chmod(0o777 if path.is_socket() else before[path] | 0o011)
        assert ask(server.address, STRANGER, 1.0) == "silence"
        assert ask(server.address, os.geteuid(), 20.0) == "answered"
    finally:
        for path, mode in before.items():
            path.chmod(mode)


def test_a_server_refuses_to_start_in_a_folder_that_others_may_enter(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    folder.chmod(0o755)
    running = launch(folder, MODELS)
    wait_until(lambda: running.process.poll() is not None, 60.0, "the end of the server")
    assert running.process.returncode == 3
    assert f"others may enter {folder} (mode 0755): chmod 700 {folder}" in running.text()


@pytest.mark.parametrize(
    "factory",
    [
        "subprocess:getoutput",
        "os:system",
        "jurybox.processes:spawn",  # Jurybox's own, and runs any module
        "jurybox.server.jurors.panels:panel",
        "tests.models:moody",  # in the module of a configured one
    ],
)
def test_a_client_may_not_name_code_to_run(server, factory):
    with server.connect() as client:
        with pytest.raises(Refused, match=rf'server\.factories = \["{factory}"\]'):
            client.load("mine", {"factory": factory, "args": {"cmd": "true"}})
        assert client.models() == ["affine"]


def test_a_client_may_not_name_a_program_to_run(server, tmp_path):
    with server.connect() as client, pytest.raises(Refused, match=rf'server\.exported = \["{tmp_path}"\]'):
        client.load("mine", {"exported": f"{tmp_path}/sub/../mine.pt2"})


def test_configured_factories_and_those_of_jurybox_may_be_loaded(server):
    with server.connect() as client:
        client.load("other", {"factory": "tests.models:affine", "args": {"scale": 3.0}})
        np.testing.assert_array_equal(client.model("other").infer(X), 3 * X + 1)
        client.load("light", {"factory": "jurybox.server.jurors:exposure", "args": {"size": 32}, "max_batch": 4})
        assert client.model("light").infer(np.zeros((1, 32, 32, 3), np.uint8)).shape == (1,)
        client.unload("other")
        client.unload("light")


def test_only_what_an_allowed_module_defines_may_be_loaded_not_what_it_imports(server):
    with server.connect() as client:
        client.load("tile", {"factory": "tests.open_models:shout"})
        client.model("tile")
        with pytest.raises(ModelFailed, match="does not define"):
            client.load("mine", {"factory": "tests.open_models:ServedModel"})
        client.unload("tile")
        client.unload("mine")
