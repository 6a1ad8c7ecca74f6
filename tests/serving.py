"""Starting real servers in tests: each in its own process with its own address, ended after the test."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
import unittest.mock
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TypeAlias

from jurybox import native
from jurybox.client import Server, connect
from jurybox.protocol.segment import directory
from tests import preloaded

# Runs a server that is stopped when the process of the tests has ended in any way.
BOUND = """
import ctypes, runpy, signal
ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)
runpy.run_module("jurybox.server.cli", run_name="__main__", alter_sys=True)
"""
_PIDFD_GETFD = 438  # the number of the system call, the same on all processors
START = 100.0  # seconds; on a busy machine importing torch alone may take a minute


before_last_tests = ExitStack()  # what is closed before the last tests of a run, see tests/conftest.py


@contextmanager
def until_last_tests(of_many_files: AbstractContextManager[RunningServer]) -> Iterator[RunningServer]:
    """For a fixture of a whole run: the server ends before the last tests, which need none, or with the run."""
    with ExitStack() as open_until:
        before_last_tests.push(open_until)
        yield open_until.enter_context(of_many_files)


ServerProcess: TypeAlias = "subprocess.Popen[str] | preloaded.Process"


class ServerElsewhere:
    """A server that another process starts and ends."""

    def __init__(self, address: str) -> None:
        self.address = address

    def connect(self, **options: object) -> Server:
        return connect(self.address, **{"timeout": 60.0, **options})

    def connect_over(self, transport: str) -> Server:
        """Connect over "shm" or "zmq" on this host, or to the port of "tcp" or "grpc"."""
        if transport in ("shm", "zmq"):
            return self.connect(transport=transport)
        return connect(f"{transport}://{self.listening(transport)}", timeout=60.0)

    def listening(self, transport: str) -> str:
        """Where "http", "grpc" or "tcp" really listens, "host:port"."""
        with self.connect() as client:
            return client.status()["server"][transport]


class RunningServer(ServerElsewhere):
    """A ``jurybox serve`` in a process group of its own."""

    def __init__(self, process: ServerProcess, address: str, log: Path) -> None:
        super().__init__(address)
        self.process = process
        self.log = log

    def pids(self) -> dict[str, int]:
        """Process ids by role, of the oldest of each: a standby process started after the one that serves."""
        found = {"supervisor": self.process.pid}
        for child in children_of(self.process.pid):
            line = line_of(child).split(b"\0")
            if b"jurybox.server.gateway" in line:
                found.setdefault("gateway", child)
            elif b"jurybox.server.relay" in line:
                found.setdefault("relay", child)
            elif b"jurybox.server.engine" in line:
                found[f"engine-{sum(role.startswith('engine') for role in found)}"] = child
        return found

    def stop(self, number: int = signal.SIGTERM, timeout: float = 20.0) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout)

    def text(self) -> str:
        return self.log.read_text()


def connection_of_h11() -> type[asyncio.Protocol]:
    """The connections of the gateway's HTTP server as they are where httptools is missing."""
    from jurybox.server.gateway import http_parsers

    spec = importlib.util.spec_from_file_location("http_parsers_of_h11", http_parsers.__file__)
    module = importlib.util.module_from_spec(spec)
    with unittest.mock.patch.dict(sys.modules, {"uvicorn.protocols.http.httptools_impl": None}):
        spec.loader.exec_module(module)
    assert module.HttpToolsProtocol is None
    return module.Connection


def children_of(pid: int) -> list[int]:
    """The children of a process; those of a preloaded server's nursery are in its place."""
    found = []
    for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
        found += children_of(child) if name_of(child) == preloaded.NAME else [child]
    return found


def name_of(pid: int) -> str:
    """The name of a process, "" if it is dead."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def line_of(pid: int) -> bytes:
    """The command line of a process, of one that was forked preloaded its name; b"" if it is dead."""
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""
    name = name_of(pid)
    return f"jurybox.server.{name[8:]}".encode() if name.startswith("jurybox-") else line


def config(models: dict[str, dict[str, object]], **server: object) -> str:
    """TOML of a configuration."""

    def value(item: object) -> str:
        if isinstance(item, bool):
            return str(item).lower()
        if isinstance(item, dict):
            return "{" + ", ".join(f"{key} = {value(part)}" for key, part in item.items()) + "}"
        if isinstance(item, list):
            return "[" + ", ".join(map(value, item)) + "]"
        return repr(item) if isinstance(item, (int, float)) else f'"{item}"'

    dialects: dict[str, dict[str, object]] = server.pop("dialects", {})  # type: ignore[assignment]
    lines = ["[server]", *(f"{key} = {value(item)}" for key, item in server.items())]
    for name, settings in dialects.items():
        lines += [f"[dialects.{name}]", *(f"{key} = {value(item)}" for key, item in settings.items())]
    for name, settings in models.items():
        lines += [f'[models."{name}"]', *(f"{key} = {value(item)}" for key, item in settings.items())]
    return "\n".join(lines) + "\n"


def launch(
    folder: Path,
    models: dict[str, dict[str, object]],
    env: dict[str, str] | None = None,
    python: str = sys.executable,
    under: Sequence[object] = (),
    flags: Sequence[str] = (),
    more: str = "",
    **server: object,
) -> RunningServer:
    """Start a server and don't wait for it.

    `under` is a command that ends by executing the rest of its arguments; `flags`: more of the command line;
    `more`: of the configuration.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    address = f"ipc://{folder}/engine"
    file = folder / "server.toml"
    file.write_text(config(models, **{"address": address, "http": "", "grpc": "", "devices": ["cpu"], **server}) + more)
    log = folder / f"server-{len(list(folder.glob('*.log')))}.log"
    environment = {**os.environ, **(env or {})}
    with log.open("a") as sink:
        if preloaded.may_start(python, environment, under):
            process: ServerProcess = preloaded.serve([str(file), *flags], environment, sink.fileno())
        else:
            process = subprocess.Popen(
                [*map(str, under), python, "-c", BOUND, "serve", str(file), *flags],
                stdout=sink,
                stderr=sink,
                text=True,
                env=environment,
                start_new_session=True,
            )
    return RunningServer(process, address, log)


@contextmanager
def serving(
    folder: Path,
    models: dict[str, dict[str, object]],
    env: dict[str, str] | None = None,
    python: str = sys.executable,
    start: float = START,
    **options: object,
) -> Iterator[RunningServer]:
    """A server that serves after at most `start` seconds; stopped at the end, whatever the test did to it."""
    running = launch(folder, models, env, python, **options)
    try:
        wait_until(lambda: "serving" in running.text() or running.process.poll() is not None, start)
        if running.process.poll() is not None:
            raise AssertionError(f"the server ended with {running.process.returncode}:\n{running.text()}")
        yield running
    finally:
        if running.process.poll() is None:
            running.process.send_signal(signal.SIGTERM)
            try:
                running.process.wait(30)
            except subprocess.TimeoutExpired:
                running.process.kill()
                running.process.wait()


def walls(folder: Path, token: str) -> dict[str, str]:
    """Server settings with a token and a certificate for localhost, their files in a folder; needs openssl."""
    files = {"token_file": "token", "tls_cert": "cert.pem", "tls_key": "key.pem"}
    (folder / "token").write_text(token + "\n")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-keyout", "key.pem", "-out", "cert.pem", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"],
        cwd=folder, check=True, capture_output=True,
    )  # fmt: skip
    for private in ("token", "key.pem"):
        (folder / private).chmod(0o600)
    return {setting: str(folder / file) for setting, file in files.items()}


def wait_until(condition, timeout: float = 30.0, what: str = "the condition") -> None:
    """Wait for something to become true; an AssertionError when it does not, even on a machine that is busy."""
    until = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > until:
            raise AssertionError(f"{what} did not come true within {timeout} s")
        time.sleep(0.01)


def wait_until_computing(client: Server, name: str, timeout: float = 30.0) -> None:
    """Wait until an engine runs a batch of the model, as the scoreboard shows it; `client` is one on the same host."""
    number = next(model["index"] for model in client.status()["models"] if model["name"] == name)
    engines = client._link.scoreboard.engines
    wait_until(lambda: number + 1 in engines["computing"], timeout, f"a batch of {name!r}")


def wait_until_read(http: str, timeout: float = 60.0) -> None:
    """Wait until a gateway has read what clients have sent, and holds it.

    What it holds is the same in ten looks; each look is a request, too, which comes in behind those.
    """
    looks: list[list[str]] = []

    def stands_still() -> bool:
        page = urllib.request.urlopen(f"http://{http}/metrics", timeout=timeout).read().decode()
        held = ("jurybox_client_bytes", "jurybox_client_calls")
        looks.append([line for line in page.splitlines() if line.startswith(held)])
        assert looks[-1]
        return len(looks) >= 10 and all(look == looks[-1] for look in looks[-10:])

    wait_until(stands_still, timeout, "what the gateway holds, always the same,")


def unread(pid: int) -> bytes:
    """What the sockets of a (stopped) process hold and it has not read; it must be a child of this one."""
    found, owner = b"", os.pidfd_open(pid)
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:  # a process stops some time after it was told to, and may close descriptors meanwhile
            if not str(entry.readlink()).startswith("socket:"):
                continue
        except FileNotFoundError:
            continue
        own = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, owner, int(entry.name), 0)
        if own < 0:
            if (error := ctypes.get_errno()) == errno.EBADF:
                continue
            raise OSError(error, f"no copy of descriptor {entry.name} of process {pid}")
        with socket.socket(fileno=own) as copy, suppress(OSError):  # nothing there; or it listens
            found += copy.recv(1 << 16, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    os.close(owner)
    return found


def not_ended(peers: Sequence[socket.socket]) -> int:
    """The number of connections that the server has not ended."""
    left = 0
    for peer in peers:
        peer.setblocking(False)
        try:
            left += peer.recv(1) != b""
        except BlockingIOError:
            left += 1
        except OSError:
            pass
    return left


def serves_grpc_itself() -> bool:
    """Whether servers here serve gRPC over libnghttp2; grpcio's connections, and their ends, are its own."""
    return bool(native.nghttp2()[0]) and os.environ.get("JURYBOX_GRPC_HTTP2", "auto") != "grpcio"


def segments() -> set[str]:
    """This user's segments and pipes in shared memory."""
    return {path.name for path in directory().glob(f"jurybox-{os.getuid()}-*")}
