"""Child processes of a supervisor or an orchestrator, which end with it, and their control pipes of JSON messages.

A child is started with one end of a socket pair. It reads its settings from there, reports there, and takes the
end of file as the order to stop. Because a loop inside a long kernel cannot read a pipe, the kernel is also asked
to kill the child when its parent dies.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import math
import os
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio

_PR_SET_PDEATHSIG = 1
_PR_SET_TIMERSLACK = 29
_MESSAGE_SECONDS = 5
_PARENT = "_JURYBOX_PARENT"

if _PARENT in os.environ:
    # A child that starts, which imports this first of all. Imports make a million objects that stay, and the collector
    # would look through them again and again: a seventh of the time that importing torch takes. `attach` enables it.
    gc.disable()

# Every library that starts a pool of threads reads one of these when it is loaded.
_THREADS = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)


def thread_limits(threads: int) -> dict[str, str]:
    """Environment variables that limit the threads of numerical libraries in a child."""
    return dict.fromkeys(_THREADS, str(threads))


class ControlPipe:
    """One end of the pipe between a parent and its child. Not thread-safe for receiving."""

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
            # Connection.poll makes a selector, which takes ten times as long; an engine looks between two requests.
            poll = select.poll()
            poll.register(self._connection.fileno(), select.POLLIN)
            if not poll.poll(max(0, math.ceil(timeout * 1000))):
                return None
            message: dict[str, Any] = json.loads(self._connection.recv_bytes())
        except OSError as error:  # cut in the midst of a message, too
            raise EOFError("the other end of the control pipe is gone") from error
        return message

    def writable(self) -> bool:
        """Whether a small message can be sent without waiting for the other end to read."""
        poll = select.poll()  # not select(2), which knows descriptors below 1024 only
        poll.register(self._connection.fileno(), select.POLLOUT)
        return bool(poll.poll(0))

    def close(self) -> None:
        self._connection.close()


def spawn(
    module: str,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str | None] | None = None,
    *,
    python: str = sys.executable,
    output: int | None = None,
) -> tuple[subprocess.Popen[bytes], ControlPipe]:
    """Start ``python -m module FD arguments...`` with a control pipe on descriptor FD.

    A fresh interpreter, never a fork: CUDA and threads do not survive one. Call it from a thread that lives as long as
    the child shall: the kernel's parent-death signal comes with the end of the thread.

    Args:
        environment: variables to set for it; None: to remove.
        python: the interpreter that runs it.
        output: descriptor of a file for what the child prints, errors included; it then has a process group of its own
            as well, so that a terminal's Ctrl-C reaches its parent alone. None: the parent's own.
    """
    ours, theirs = socket.socketpair()
    for direction in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        # A child that was stopped in the midst of a message must not hold its parent for ever.
        ours.setsockopt(socket.SOL_SOCKET, direction, struct.pack("@ll", _MESSAGE_SECONDS, 0))
    variables = {**os.environ, **(environment or {}), _PARENT: str(os.getpid())}
    with theirs:
        process = subprocess.Popen(
            [python, "-m", module, str(theirs.fileno()), *arguments],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            process_group=None if output is None else 0,
            env={name: value for name, value in variables.items() if value is not None},
        )
    return process, ControlPipe(ours.detach())


def exact_sleeps() -> None:
    """Let this thread's sleeps end within a microsecond of their time; by default the kernel adds fifty."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_TIMERSLACK, 1000, 0, 0, 0)


# From malloc.h of the GNU C library; other C libraries have no mallopt, or know other numbers and refuse these.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
# The most that every glibc takes.
_LARGEST_KEPT_BLOCK = 32 * 2**20


def keep_freed_memory(most: int = 256 * 2**20) -> bool:
    """Let the process keep freed memory instead of handing it back after every batch or picture.

    By default glibc maps every block of a few megabytes anew and unmaps it when freed, so that each intermediate of
    each batch is paid for in page faults. Counts for the whole process, and again costs nothing.

    Args:
        most: bytes that are kept; blocks of more than 32 MiB never are.

    Returns:
        Whether the C library took the settings; without them everything works, slower.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = ((_MMAP_THRESHOLD, _LARGEST_KEPT_BLOCK), (_TRIM_THRESHOLD, most))
    return all(mallopt(parameter, value) == 1 for parameter, value in settings)


def attach(fd: int) -> ControlPipe:
    """In the child: open the control pipe, and end with the parent.

    Terminal signals are the parent's to handle: it decides about draining and tells through the pipe. What the child
    has imported by now stays for its life: no later garbage collection looks at it.
    """
    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # Said by `spawn`: whoever asks for its parent after that died is told of another.
    parent = int(os.environ.pop(_PARENT, os.getppid()))
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before the order stood
            os.kill(os.getpid(), signal.SIGKILL)
    return ControlPipe(fd)


def configuration(control_pipe: ControlPipe) -> dict[str, Any] | None:
    """Wait for the first message, which may be long in coming to a process on standby; None where the parent ended.

    Raises:
        ValueError: the first message is not "configure".
    """
    try:
        while (orders := control_pipe.receive(30.0)) is None:
            continue
    except EOFError:
        return None
    if orders["kind"] != "configure":
        raise ValueError(f"expected the order to configure, got {orders['kind']!r}")
    return orders


def stop_event(control_pipe: ControlPipe, unknown: Callable[[str], None]) -> asyncio.Event:
    """An event that is set when the control pipe says stop, or ends; call it in a running event loop.

    Args:
        unknown: is called with the kind of any other message.
    """
    import asyncio  # engines have no event loop

    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def heard() -> None:
        try:
            while (message := control_pipe.receive(0)) is not None:
                if message["kind"] == "stop":
                    stop.set()
                else:
                    unknown(message["kind"])
        except (EOFError, OSError):
            loop.remove_reader(control_pipe.fileno())
            stop.set()

    loop.add_reader(control_pipe.fileno(), heard)
    return stop


_EVERY = 1.0  # seconds


@contextlib.asynccontextmanager
async def signs_of_life(control_pipe: ControlPipe) -> AsyncIterator[None]:
    """Send the parent a sign of life every second, inside the ``with``."""
    import asyncio  # engines have no event loop

    async def tell() -> None:
        # A parent that was stopped reads nothing: waiting for it would stop this process, too.
        while True:
            if control_pipe.writable():
                control_pipe.send("alive")
            await asyncio.sleep(_EVERY)

    telling = asyncio.create_task(tell())
    try:
        yield
    finally:
        telling.cancel()
        with contextlib.suppress(asyncio.CancelledError, OSError):  # that the parent is gone, the control pipe says too
            await telling
