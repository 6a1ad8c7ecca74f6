"""The places of roles, as Ray actors. Also follows the log of a process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jurybox.processes import ControlPipe
from jurybox.training.runtime.launching import start_process, status_of
from jurybox.training.runtime.plan import Plan


class LogTail:
    """Return what is appended to a log file.

    Args:
        path: the file; it need not exist yet.
        most: maximum number of bytes for one call; of more new bytes, only the last are returned.
    """

    def __init__(self, path: Path, most: int) -> None:
        self.path = path
        self._most = most
        self._position = 0

    def rewind(self) -> None:
        """Start again at the beginning of the file."""
        self._position = 0

    def new(self) -> bytes:
        """Return what was written since the last call."""
        if not self.path.exists():
            return b""
        with self.path.open("rb") as log:
            size = os.fstat(log.fileno()).st_size
            log.seek(max(self._position, size - self._most))
            text = log.read()
        self._position = size
        return text


_LOG_TAIL = 256 << 10  # bytes of a dead process's log that go to the orchestrator's machine


@dataclass(frozen=True, slots=True)
class ProcessOutput:
    """Messages and log lines of a role's process.

    Attributes:
        messages: the messages it sent.
        log: its output since the last call.
        status: its exit status; None while it lives.
    """

    messages: tuple[dict[str, Any], ...]
    log: bytes
    status: int | None


class RolePlace:
    """Holds the resources of a role, and the role's process. It outlives the process, not the machine.

    Methods are called from several threads. One permanent thread starts the process, because a child dies with the
    thread that started it.
    """

    def __init__(self, plan: Plan, number: int) -> None:
        self._plan, self._number = plan, number
        self._parent = ThreadPoolExecutor(1, thread_name_prefix="role-parent")
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control_pipe: ControlPipe | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="jurybox-role-")
        self._log = LogTail(Path(self._folder.name) / "log", _LOG_TAIL)
        self._files: dict[str, str] = {}

    def where(self) -> str:
        """Return the node of this actor."""
        import ray

        node: str = ray.get_runtime_context().get_node_id()
        return node

    def start(self, configured: dict[str, Any], state: bytes | None) -> int:
        """Start the process; `state` is the role's saved state. Returns the process id."""
        self.kill()
        if state is not None:
            path = Path(self._folder.name) / "restored.state"
            path.write_bytes(state)
            configured = {**configured, "state": str(path)}
        known = [*sys.path, *(path for path in configured["path"] if path not in sys.path and Path(path).exists())]
        return self._parent.submit(self._start, {**configured, "path": known, "evaluated": self._folder.name}).result()

    def _start(self, configured: dict[str, Any]) -> int:
        self._log.rewind()
        with self._log.path.open("wb") as log:
            self._process, self._control_pipe = start_process(self._plan, self._number, configured, log.fileno())
        return self._process.pid

    def listen(self, timeout: float) -> ProcessOutput:
        """Wait up to `timeout` seconds for messages of the process."""
        process, control_pipe = self._process, self._control_pipe
        if process is None or control_pipe is None:
            return ProcessOutput((), b"", -1)
        # Asked first, so that nothing that it said before its end is missed. The pipe may be open still, in a process
        # that it forked.
        ended = process.poll() is not None
        messages: list[dict[str, Any]] = []
        try:
            while (message := control_pipe.receive(0 if messages or ended else timeout)) is not None:
                messages.append(self._attach_state(message))
        except EOFError:
            ended = True
        return ProcessOutput(tuple(messages), self._log.new(), status_of(process, 2.0) if ended else None)

    def send(self, kind: str, fields: dict[str, Any]) -> None:
        """Send the process a message; files are first written on this machine."""
        if kind == "save":
            path = str(Path(self._folder.name) / f"{time.monotonic_ns()}.state")
            self._files[path] = fields["file"]
            fields = {"file": path}
        if self._control_pipe is not None:
            self._control_pipe.send(kind, **fields)

    def kill(self) -> None:
        """Kill the process, if there is one."""
        with self._lock:
            if self._process is not None:
                self._process.kill()
                self._process.wait()
                assert self._control_pipe is not None
                self._control_pipe.close()
                self._process = self._control_pipe = None

    def close(self) -> None:
        """Remove everything; the last call."""
        self.kill()
        self._folder.cleanup()

    def _attach_state(self, message: dict[str, Any]) -> dict[str, Any]:
        if "kept" in message:
            folder = Path(message["kept"])
            files = {path.name: path.read_bytes() for path in folder.iterdir()}
            shutil.rmtree(folder)
            return {**message, "kept": files}
        if message["kind"] == "unsaved":
            self._files.pop(message["file"], None)
        if message["kind"] != "saved":
            return message
        file = Path(message["file"])
        state = file.read_bytes()
        file.unlink()
        return {"kind": "saved", "file": self._files.pop(str(file)), "state": state}
