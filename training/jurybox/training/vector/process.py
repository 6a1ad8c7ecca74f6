"""The learner's end of one worker process: start it, talk to it, see that it is gone, start it again."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

from jurybox.protocol.errors import Timeout
from jurybox.protocol.segment import Segment
from jurybox.training import interrupts
from jurybox.training.recipes.worker_process import THREAD_LIMITS, WorkerFailed, bound
from jurybox.training.vector.layout import InfoFields
from jurybox.training.vector.worker import Orders

# Not -m: what a module run as __main__ defines cannot be unpickled here.
_RUN = "from jurybox.training.vector.worker import main; main()"

_STUCK = 60.0  # seconds that one message may take, once it has begun; a worker that was stopped in its midst is gone


class WorkerProcess:
    """One worker; `start`, `greet` and `share` bring it up, in this order.

    Attributes:
        numbers: of the environments that it holds.
        busy_since: when it was last heard of or given work while it has some; None while it has none.
    """

    def __init__(self, index: int, numbers: range, orders: Orders) -> None:
        self.index = index
        self.numbers = numbers
        self.busy_since: float | None = None
        self._orders = orders
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None

    def start(self) -> None:
        ours, theirs = socket.socketpair()
        bound(ours, _STUCK)
        with theirs, interrupts.blocked_for_children():
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _RUN, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **THREAD_LIMITS},
            )
            self._pipe = Connection(ours.detach())
        self._pipe.send(self._orders)

    def greet(self, timeout: float) -> list[tuple[Any, Any, Any]]:
        """Spaces and metadata of its environments.

        Raises:
            WorkerFailed: an environment could not be made, or the process ended.
            Timeout: they are not made within `timeout` seconds.
        """
        if not self.pipe.poll(timeout):
            raise Timeout(
                f"worker {self.index} has not made its environments within {timeout:g} s; raise `start_timeout` if "
                "they take that long"
            )
        try:
            answer = self.pipe.recv()
        except (EOFError, OSError) as error:
            raise WorkerFailed(f"{self.described()} ended while it made its environments") from error
        if isinstance(answer, WorkerFailed):
            raise WorkerFailed(f"worker {self.index}: {answer}")
        found: list[tuple[Any, Any, Any]] = answer
        return found

    def share(self, n: int, fields: InfoFields, segment: Segment) -> None:
        """Hand it the memory, as a descriptor: so the segment needs no name, and none is left whatever dies."""
        self.pipe.send((n, fields, segment.size))
        with socket.socket(fileno=os.dup(self.pipe.fileno())) as channel:
            socket.send_fds(channel, [b"m"], [segment.fd])

    @property
    def pipe(self) -> Connection:
        assert self._pipe is not None
        return self._pipe

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def send(self, message: bytes) -> bool:
        """False when it is gone."""
        try:
            self.pipe.send_bytes(message)
        except OSError:
            return False
        self.busy_since = self.busy_since or time.monotonic()
        return True

    def receive(self) -> bytes | None:
        """Its next message; None when it is gone."""
        try:
            message = self.pipe.recv_bytes()
        except (EOFError, OSError):
            return None
        self.busy_since = time.monotonic()
        return message

    def described(self) -> str:
        status = "still running" if self._process is None else self._process.poll()
        return f"worker {self.index} (process {self.pid}, exit status {status})"

    def hang_up(self) -> None:
        """Close the channel, which a worker takes for the order to stop."""
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None

    def end(self, until: float) -> None:
        """Wait for its end until that moment of the monotonic clock, then kill it."""
        self.hang_up()
        process, self._process = self._process, None
        if process is None:
            return
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
