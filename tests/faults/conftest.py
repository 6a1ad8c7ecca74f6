import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.serving import segments, serving, until_last_tests, wait_until

from jurybox.client import connect

MODELS = {
    "affine": {"factory": "tests.models:affine", "max_batch": 16, "rows": 64},
    "moody": {"factory": "tests.models:moody", "max_batch": 8, "rows": 64},
}


@contextmanager
def leaving_nothing() -> Iterator[None]:
    """The block must leave shared memory as it found it, at the latest when its last process has ended."""
    before = segments()
    yield
    wait_until(lambda: segments() <= before, 30, "shared memory as it was before")


@pytest.fixture
def nothing_left():
    """The test must leave shared memory as it found it."""
    with leaving_nothing():
        yield


@pytest.fixture
def started_anew():
    """Servers of these tests are new interpreters, as a user's: none is forked with its imports done."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.preloaded.wanted", False)
        yield


@pytest.fixture
def server(tmp_path, nothing_left):
    """A server of the test's own, to be mistreated."""
    with serving(tmp_path, MODELS) as running:
        yield running


@contextmanager
def serving_and_leaving_nothing(folder: Path, models: dict[str, dict[str, object]], **options: str):
    """A server for the whole session, beside which servers of single tests come and go, and restart their engines."""
    before = segments()
    with serving(folder, models, **options) as running:
        own = {server_of(name) for name in segments() - before}
        yield running
    wait_until(lambda: not own & set(map(server_of, segments())), 30, "the end of the server's shared memory")


def server_of(segment: str) -> str:
    """The id of the server that a segment or a socket belongs to."""
    return segment.split("-")[2].partition(".")[0]


@pytest.fixture(scope="session")
def enduring(tmp_path_factory):
    """One server for files whose clients mistreat it, but kill nothing of it: it must outlive whatever they do."""
    enduring = serving_and_leaving_nothing(tmp_path_factory.mktemp("enduring"), MODELS, tcp="127.0.0.1:0")
    with until_last_tests(enduring) as running:
        yield running


REACHABLE = {
    "affine": {"factory": "tests.models:affine", "max_batch": 16, "rows": 256},
    "moody": {"factory": "tests.models:moody", "max_batch": 8, "rows": 64},
    "learnt": {"factory": "tests.models:affine", "max_batch": 16, "rows": 64, "publish": "double_buffer"},
    "sum": {"factory": "tests.open_models:running_sum", "max_batch": 16, "rows": 128},
    "length": {"factory": "tests.reward_models:text_length", "max_batch": 16, "rows": 64},
}


@pytest.fixture(scope="session")
def reachable(tmp_path_factory):
    """One server on every transport, for files whose clients are interrupted: it must not notice."""
    ports = {"tcp": "127.0.0.1:0", "grpc": "127.0.0.1:0"}
    with until_last_tests(
        serving_and_leaving_nothing(tmp_path_factory.mktemp("reachable"), REACHABLE, **ports)
    ) as running:
        yield running


@pytest.fixture(
    params=[
        *("shm", "zmq", "tcp", "grpc"),
        *(pytest.param(lib, marks=pytest.mark.runs) for lib in ("libzmq", "libtcp", "libgrpc")),
    ]
)
def client(request, reachable, monkeypatch):
    """A connection over each transport; "lib": as where the native core is missing, or with CURVE or a proxy."""
    way = request.param.removeprefix("lib")
    if way != request.param:
        for module in ("transports.engine_link", "remote.tcp_link", "remote.grpc_link"):
            monkeypatch.setattr(f"jurybox.client.{module}.can_dial", lambda *_: False)
    local = way in ("shm", "zmq")
    where = reachable.address if local else f"{way}://{reachable.listening(way)}"
    with connect(where, transport=way if local else "auto", timeout=60) as connection:
        yield connection


@pytest.fixture(params=["shm", "zmq"])
def transport(request):
    return request.param


class Memory:
    """What a server that is started `under` it takes for the machine's memory."""

    def __init__(self, file) -> None:
        self._file = file
        self.under = ["unshare", "-m", "sh", "-c", 'mount --bind "$0" /proc/meminfo && exec "$@"', file]
        self.left(1 << 40)

    def left(self, size: int) -> None:
        """Leave so many bytes available."""
        self._file.write_text(f"MemTotal: {1 << 30} kB\nMemAvailable: {size >> 10} kB\n")


@pytest.fixture
def memory(tmp_path):
    memory = Memory(tmp_path / "meminfo")
    if os.geteuid() != 0 or subprocess.run([*map(str, memory.under), "true"], stderr=subprocess.DEVNULL).returncode:
        pytest.skip("another /proc/meminfo for a server needs root")
    return memory
