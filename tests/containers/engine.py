"""A container engine for tests: its command line, and compose projects that are removed at the end."""

from __future__ import annotations

import functools
import http.server
import json
import os
import secrets
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.containers import client_program

ROOT = Path(__file__).resolve().parents[2]
BUILD, COMMAND = 1500.0, 120.0  # seconds
USER = "10001:10001"
ADDRESS = {"JURYBOX_ADDRESS": "ipc:///run/jurybox/engine"}
SHARED = {**ADDRESS, "JURYBOX_SHM_DIR": "/run/jurybox"}


def docker(*arguments: str, timeout: float = COMMAND, check: bool = True, env: dict[str, str] | None = None) -> str:
    """What the command printed, both streams; AssertionError with all of it where it failed."""
    done = subprocess.run(
        ["docker", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        env={**os.environ, **(env or {})},
        cwd=ROOT,
    )
    if check and done.returncode:
        raise AssertionError(f"docker {' '.join(arguments)[:300]} ended with {done.returncode}:\n{done.stdout[-4000:]}")
    return done.stdout


def why_none() -> str:
    """Why no container can be run here; empty where one can."""
    try:
        for command in (["version", "--format", "{{.Server.Version}}"], ["compose", "version"], ["buildx", "version"]):
            docker(*command, timeout=20)
    except (AssertionError, OSError, subprocess.TimeoutExpired) as error:
        return f"no container engine with compose and buildx answers here: {error}"
    return ""


@cache
def bridges() -> bool:
    """Whether containers can have a bridge network; an engine may come without its own and make others all the same."""
    name = f"jurybox-test-{secrets.token_hex(3)}"
    made = docker("network", "create", "--driver", "bridge", name, check=False)
    docker("network", "rm", "--force", name, check=False)
    return "rror" not in made


def build(target: str, tag: str) -> str:
    """Build one target of the Dockerfile. JURYBOX_TEST_WHEELS names a folder of wheels that come before PyPI's.

    A torch among them is given by an index of this process's own, so that TORCH_INDEX is tried where PyTorch's is not
    to be reached.
    """
    wheels = os.environ.get("JURYBOX_TEST_WHEELS")
    with ExitStack() as stack:
        given = []
        if wheels:
            others, index = (Path(stack.enter_context(TemporaryDirectory())) for _ in range(2))
            (index / "torch").mkdir()
            for wheel in Path(wheels).glob("*.whl"):
                of_torch = wheel.name.startswith("torch-")
                shutil.copy(wheel, index / "torch" if of_torch else others)
            given += ["--build-context", f"wheels={others}"]
            if any((index / "torch").iterdir()):
                given += ["--build-arg", f"TORCH_INDEX={stack.enter_context(_served(index))}"]
        docker("build", "--network", "host", "-f", "docker/Dockerfile", "--target", target, *given, "-t", tag, ".",
               timeout=BUILD)  # fmt: skip
    return tag


@contextmanager
def _served(folder: Path) -> Iterator[str]:
    """The URL of a folder, which is how a package index may look."""
    handler = functools.partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/"
        finally:
            server.shutdown()
            thread.join()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Print nothing: pytest's output is for the tests."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Project:
    """compose.yaml under a name, ports and volumes of its own."""

    def __init__(self, image: str, tag: str) -> None:
        self.name = f"jurybox-test-{secrets.token_hex(3)}"
        self.http, self.grpc, tcp = free_port(), free_port(), free_port()
        self.server = f"{self.name}-server-1"
        self.volume = f"{self.name}_shared"
        self._env = {"IMAGE": image, "TAG": tag, "HTTP_PORT": str(self.http), "GRPC_PORT": str(self.grpc),
                     "TCP_PORT": str(tcp)}  # fmt: skip
        self._files = ["-f", "compose.yaml"]
        if not bridges():
            self._files += ["-f", "tests/containers/host.yaml"]
        self._started: list[Container] = []

    def compose(self, *arguments: str, timeout: float = COMMAND, check: bool = True, **env: str) -> str:
        return docker("compose", "-p", self.name, *self._files, *arguments, timeout=timeout, check=check,
                      env={**self._env, **env})  # fmt: skip

    def in_server(self, *command: str) -> str:
        return docker("exec", self.server, *command)

    def status(self) -> dict:
        return json.loads(self.in_server("jurybox", "status", "--json"))

    def inspect(self, part: str) -> object:
        return json.loads(docker("inspect", "--format", "{{json " + part + "}}", self.server))

    def client(self, image: str, seconds: float = 300.0, **options: object) -> Container:
        """The client program in a container of this project's shared folder."""
        container = Container(image, [f"{self.volume}:/run/jurybox"], seconds, **options)
        self._started.append(container)
        return container

    def down(self) -> None:
        for container in self._started:
            container.remove()
        docker("rm", "--force", f"{self.name}-train", check=False)
        self.compose("--profile", "train", "down", "--volumes", "--timeout", "5", check=False)


class Container:
    """Run the client program: by default without a network, privileges and writable files."""

    def __init__(
        self,
        image: str,
        volumes: list[str],
        seconds: float,
        *,
        user: str = USER,
        env: dict[str, str] | None = None,
        ipc: str = "private",
        network: str = "none",
        rights: bool = False,
    ) -> None:
        self.name = f"jurybox-test-client-{secrets.token_hex(3)}"
        program = Path(client_program.__file__).read_text()
        docker(
            "run", "--detach", "--name", self.name, "--network", network, "--read-only", "--init", "--ipc", ipc,
            "--user", user, "--security-opt", "no-new-privileges", *([] if rights else ["--cap-drop", "ALL"]),
            *(part for volume in volumes for part in ("--volume", volume)),
            *(part for key, value in (SHARED if env is None else env).items() for part in ("--env", f"{key}={value}")),
            image, "python", "-c", program, str(seconds),
        )  # fmt: skip

    def lines(self) -> list[dict]:
        """Return what the program has printed so far."""
        return [json.loads(line) for line in docker("logs", self.name).splitlines() if line.startswith("{")]

    def wait_for(self, wanted, timeout: float, after: int = 0) -> dict:
        """The first line from number `after` on for which `wanted` holds."""
        until = time.monotonic() + timeout
        while True:
            for line in (lines := self.lines())[after:]:
                if wanted(line):
                    return line
            if time.monotonic() > until:
                raise AssertionError(f"not said within {timeout} s; the last of {len(lines)} lines: {lines[-3:]}")
            time.sleep(0.2)

    def remove(self) -> None:
        docker("rm", "--force", self.name, check=False)
