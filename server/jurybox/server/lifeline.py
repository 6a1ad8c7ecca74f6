"""What ties a child process to the supervisor: a pipe of small JSON messages, and death together.

A child is started with one end of a socket pair. It reads its settings from there, reports there, and takes the
end of file as the order to stop. Because a loop inside a long kernel cannot read a pipe, the kernel is also asked
to kill the child when its parent dies.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

_PR_SET_PDEATHSIG = 1
_PR_SET_TIMERSLACK = 29


class Lifeline:
    """One end of the pipe between the supervisor and a child. Not thread-safe for receiving."""

    def __init__(self, fd: int) -> None:
        self._connection = Connection(fd)

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message; raises OSError when the other end is gone."""
        self._connection.send_bytes(json.dumps({"kind": kind, **fields}).encode())

    def receive(self, timeout: float) -> dict[str, Any] | None:
        """The next message, or None after `timeout` seconds; raises EOFError when the other end is gone."""
        try:
            if not self._connection.poll(timeout):
                return None
            message: dict[str, Any] = json.loads(self._connection.recv_bytes())
        except ConnectionError as error:
            raise EOFError("the other end of the lifeline is gone") from error
        return message

    def close(self) -> None:
        self._connection.close()


def spawn(
    module: str, arguments: Sequence[str] = (), environment: dict[str, str] | None = None
) -> tuple[subprocess.Popen[bytes], Lifeline]:
    """Start ``python -m module FD arguments...`` with a lifeline on descriptor FD.

    A fresh interpreter, never a fork: CUDA and threads do not survive one.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(theirs.fileno()), *arguments],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env={**os.environ, **(environment or {})},
        )
    return process, Lifeline(ours.detach())


def exact_sleeps() -> None:
    """Let this thread's sleeps end within a microsecond of their time; by default the kernel adds fifty."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_TIMERSLACK, 1000, 0, 0, 0)


def attach(fd: int) -> Lifeline:
    """In the child: take up the lifeline, and die when the parent does.

    Terminal signals are the parent's to handle: it decides about draining and tells through the pipe.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before the order stood
            os.kill(os.getpid(), signal.SIGKILL)
    return Lifeline(fd)
