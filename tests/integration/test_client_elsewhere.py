"""The client as on macOS and Windows: over networks, without the native part and what only Linux has."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.serving import serving

# Run first in the client's process: it removes what those systems lack, so that any use of it fails by name.
NOT_LINUX = """
import importlib.abc, os, socket, sys
import ctypes, grpc, numpy as np, zmq, zmq.utils.monitor  # other packages may use the system on import
import concurrent.futures.thread, importlib.metadata, multiprocessing.util, subprocess, tempfile

ABSENT = {"jurybox.native", "fcntl", "resource", "pwd", "grp", "termios", "posix"}

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
for name in ABSENT:
    sys.modules.pop(name, None)
for name in '''getuid geteuid getgid eventfd EFD_CLOEXEC EFD_NONBLOCK O_TMPFILE O_CLOEXEC O_NOFOLLOW O_DIRECTORY
O_NONBLOCK posix_fallocate sched_getaffinity memfd_create mkfifo register_at_fork fork uname pidfd_open sysconf getpgid
killpg pread pwrite sendfile set_blocking'''.split():
    if hasattr(os, name):
        delattr(os, name)
for name in ("SCM_RIGHTS", "SO_PEERCRED"):  # AF_UNIX is asyncio's own, on Linux
    if hasattr(socket, name):
        delattr(socket, name)
REAL_OPEN = os.open
def no_linux_files(path, *more, **others):
    assert not str(path).startswith(("/dev/shm", "/proc")), path
    return REAL_OPEN(path, *more, **others)
os.open = no_linux_files
sys.platform = sys.argv[1]
"""

CLIENT = """
import asyncio
import jurybox.client as client
from jurybox.client import Publisher, Refused, Timeout, WeightsReader, connect

rows = np.arange(12, dtype=np.float32).reshape(3, 4)
for address in sys.argv[2:]:
    with connect(address, timeout=60.0) as server:
        assert set(server.models()) == {"affine", "learned"}, server.models()
        model = server.model("affine", rows=8)
        assert np.array_equal(model.infer(rows), 2 * rows + 1)
        assert np.array_equal(model(rows[0]), 2 * rows[0] + 1)
        answer = asyncio.run(model.infer_async(rows))
        assert np.array_equal(getattr(answer, "outputs", answer), 2 * rows + 1)
        with model.rows(2) as held:
            held.inputs["observation"][:] = 1.0
            held.infer()
            assert (held.outputs["action"] == 3.0).all()
        if address.startswith("grpc"):
            learned = {"weight": np.full((600_000, 4), 2.0, np.float32), "bias": np.arange(600_000, dtype=np.float32)}
            with server.publisher("learned") as publisher:
                version = publisher.publish(learned)
            read = server.weights("learned").read()
            assert read.version == version and all(np.array_equal(read.state[name], learned[name]) for name in learned)
for address, message in (("ipc:///nowhere/engine", "tcp://"), (None, "JURYBOX_ADDRESS")):
    try:
        connect(address, timeout=1.0)
    except Refused as error:
        assert message in str(error) and "Linux" in str(error), error
    else:
        raise AssertionError("connected without a server")
assert "jurybox.native" not in sys.modules
print("answered")
"""


@pytest.fixture(scope="module")
def addresses(tmp_path_factory) -> list[str]:
    models = {
        "affine": {"factory": "tests.models:affine"},
        "learned": {"factory": "tests.models:big", "publish": "double_buffer"},
    }
    with serving(tmp_path_factory.mktemp("server"), models, tcp="127.0.0.1:0", grpc="127.0.0.1:0") as server:
        yield [f"{transport}://{server.listening(transport)}" for transport in ("tcp", "grpc")]


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_a_client_over_a_network_needs_neither_linux_nor_the_native_part(addresses, system) -> None:
    program = [sys.executable, "-c", NOT_LINUX + CLIENT, system, *addresses]
    done = subprocess.run(program, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "answered\n"
