"""A server that a training starts and stops."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jurybox.client import Server, ServerGone, connect
from jurybox.training import interrupts

__all__ = ["LocalServer", "ServerNotStarted"]

_START_TIMEOUT = 90.0  # seconds to be ready: importing torch on a busy machine takes most of them
_STOP_TIMEOUT = 10.0  # seconds it gets to stop in order; what it holds is freed by then or never
_CONNECT_TIMEOUT = 0.5

# Runs `jurybox serve` bound to the life of the process that started it, which works only from inside the child:
# SIGTERM, so that even then it takes its shared memory along.
_LAUNCH = """\
import ctypes, os, runpy, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)
if os.getppid() != int(sys.argv.pop(1)):
    sys.exit(1)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
runpy.run_module("jurybox.server.cli", run_name="__main__", alter_sys=True)
"""


class ServerNotStarted(RuntimeError):
    """The server ended, or was not ready in time; the message holds the end of its log."""


_MAX_FOLDER_LENGTH = 80  # a socket's path has at most 107 characters (man 7 unix), and its name comes behind


def _short_folder() -> Path:
    """A new folder for sockets, in TMPDIR unless that is too deep for them."""
    folder = Path(tempfile.mkdtemp(prefix="jurybox-demo-"))
    if len(str(folder)) <= _MAX_FOLDER_LENGTH:
        return folder
    folder.rmdir()
    return Path(tempfile.mkdtemp(prefix="jurybox-demo-", dir="/tmp"))


class LocalServer:
    """A `jurybox serve` on this machine's CPU, with addresses of its own.

    It runs in a session of its own, so that Ctrl-C in the terminal reaches it when its owner says so and not before.

    Args:
        models: what goes under [models.NAME] of its configuration: strings, numbers, lists and dicts of them.
        log: file that its log goes to.
        http: whether it also serves HTTP, on a free port of this host.
        threads: that torch may use in the engine.
        server: further settings of its [server], which win: another device, a transport to other hosts with its locks.
    """

    def __init__(
        self,
        models: Mapping[str, Mapping[str, Any]],
        log: Path,
        *,
        http: bool = True,
        threads: int = 1,
        server: Mapping[str, Any] | None = None,
    ) -> None:
        self._models = models
        self._log = log
        self._wants_http = http
        self._server = {"grpc": "", "devices": ["cpu"], "threads": threads, "drain_timeout": 2.0, **(server or {})}
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self.address = ""
        self.http = ""

    def start(self) -> None:
        """Start it; then call `wait`. Always call `stop`, also after an interrupt."""
        with interrupts.held():
            self._folder = _short_folder()
            self.address = f"ipc://{self._folder / 'engine'}"
            config = self._folder / "server.toml"
            config.write_text(self._config(), encoding="utf-8")
            # The user's JURYBOX_ settings are for the user's server and would win over the file.
            kept = {key: value for key, value in os.environ.items() if not key.startswith("JURYBOX_")}
            kept |= {key: os.environ[key] for key in ("JURYBOX_SHM_DIR",) if key in os.environ}
            with self._log.open("wb") as sink, interrupts.blocked_for_children():
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _LAUNCH, str(os.getpid()), "serve", str(config)],
                    stdin=subprocess.DEVNULL,
                    stdout=sink,
                    stderr=sink,
                    env=kept,
                    start_new_session=True,
                )

    def wait(self, timeout: float = _START_TIMEOUT) -> None:
        """Wait until every model is ready.

        Raises:
            ServerNotStarted: it ended, a model failed, or `timeout` seconds are over.
        """
        until = time.monotonic() + timeout
        while True:
            interrupts.check()
            assert self._process is not None
            if (status := self._process.poll()) is not None:
                raise ServerNotStarted(
                    f"the server ended with exit status {status}; the end of its log:\n{self.tail()}"
                )
            try:
                with self.connect(timeout=_CONNECT_TIMEOUT) as server:
                    messages = {name: server.describe(name) for name in self._models}
                    states = {name: message.state for name, message in messages.items()}
                    info = server.status()["server"]
                    listens = not info["http"].endswith(":0")  # its gateway may come last
                    if set(states.values()) <= {"ready"} and info["state"] == "serving" and listens:
                        self.http = info["http"]
                        return
                    failed = [f"{name}: {message.reason}" for name, message in messages.items() if message.reason]
            except ServerGone:
                states, failed = {}, []
            if failed or time.monotonic() > until:
                late = f"not ready within {timeout:.0f} s (models: {states or 'unknown'})"
                raise ServerNotStarted(f"{'; '.join(failed) or late}; the end of the server's log:\n{self.tail()}")
            time.sleep(0.05)

    def connect(self, timeout: float = 30.0) -> Server:
        """Connect to it, as `jurybox.client.connect` does."""
        return connect(self.address, timeout=timeout)

    @property
    def alive(self) -> bool:
        """Whether its process is there."""
        return self._process is not None and self._process.poll() is None

    def stop(self) -> None:
        """Stop it, if needed by force, and remove its folder. May be called before `start` and again."""
        with interrupts.held():
            process, self._process = self._process, None
            if process is not None:
                _end(process)
            folder, self._folder = self._folder, None
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)

    def tail(self, lines: int = 12) -> str:
        """The last lines of its log."""
        text = self._log.read_text(encoding="utf-8", errors="replace") if self._log.exists() else ""
        return "\n".join(text.splitlines()[-lines:]) or "(empty)"

    def _config(self) -> str:
        http = "127.0.0.1:0" if self._wants_http else ""  # any port that is free when it comes to be taken
        server = {"address": self.address, "http": http, **self._server}
        lines = ["[server]", *(f"{key} = {_as_toml(value)}" for key, value in server.items())]
        for name, settings in self._models.items():
            lines += [f'[models."{name}"]', *(f"{key} = {_as_toml(value)}" for key, value in settings.items())]
        return "\n".join(lines) + "\n"


def _as_toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(name)} = {_as_toml(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_as_toml, value))}]"
    return json.dumps(value)  # for strings and numbers TOML has it the same way


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_STOP_TIMEOUT)
        return
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)  # the second one stops it at once
    try:
        process.wait(_STOP_TIMEOUT)
    except subprocess.TimeoutExpired:
        # Its children die with it; what it left in shared memory the next server sweeps.
        process.kill()
        process.wait()
