"""Child processes of a supervisor or an orchestrator, which end with it, and their control pipes of JSON messages.

A child is started with one end of a socket pair. It reads its settings and orders from it, sends reports to it, and
stops at the end of file. Because a loop cannot read a pipe during a long computation, the kernel is also asked to kill
the child when its parent dies.
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
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio

_PR_SET_PDEATHSIG = 1
_PR_SET_TIMERSLACK = 29
_MESSAGE_SECONDS = 5
_PARENT = "_JURYBOX_PARENT"

if _PARENT in os.environ:
    # A starting child imports this module first. Imports create a million permanent objects, and the garbage collector
    # would scan them again and again, in a seventh of the time of importing torch. `attach` enables it.
    gc.disable()

# Every numerical library reads one of these variables when it is loaded and starts its threads.
_THREADS = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)


def thread_limits(threads: int) -> dict[str, str]:
    """Return environment variables that limit the threads of numerical libraries in a child."""
    return dict.fromkeys(_THREADS, str(threads))


_LENGTH = struct.Struct("!i")  # of the JSON text that follows


def encode_message(kind: str, **fields: Any) -> bytes:
    """Return the bytes of a message on a control pipe, for `ControlPipe.send_part`."""
    text = json.dumps({"kind": kind, **fields}).encode()
    return _LENGTH.pack(len(text)) + text


class ControlPipe:
    """One end of the pipe between a parent and its child. Not thread-safe for receiving.

    Args:
        fd: the descriptor of a connected stream socket; the pipe closes it.
    """

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket.settimeout(None)  # whatever socket.setdefaulttimeout says

    def fileno(self) -> int:
        """Return the descriptor. Raises OSError if this end is closed."""
        if (fd := self._socket.fileno()) < 0:
            raise OSError("this end of the control pipe is closed")
        return fd

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message, and wait until it fits. Raises OSError if the other end is closed."""
        self._socket.sendall(encode_message(kind, **fields))

    def send_part(self, message: memoryview) -> memoryview:
        """Send the beginning of an encoded message, as much as fits without waiting, and return the rest.

        Nothing else may be sent before the rest. Raises OSError if the other end is closed.
        """
        try:
            return message[self._socket.send(message, socket.MSG_DONTWAIT) :]
        except BlockingIOError:
            return message

    def receive(self, timeout: float) -> dict[str, Any] | None:
        """Return the next message, or None after `timeout` seconds. Raises EOFError if the other end is closed."""
        try:
            # A selector takes ten times as long to create; engines poll between two requests.
            poll = select.poll()
            poll.register(self.fileno(), select.POLLIN)
            if not poll.poll(max(0, math.ceil(timeout * 1000))):
                return None
            (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
            text = self._read(length)
        except OSError as error:  # also if it was cut within a message
            raise EOFError("the other end of the control pipe is gone") from error
        message: dict[str, Any] = json.loads(text)
        return message

    def _read(self, size: int) -> bytearray:
        data = bytearray()
        while len(data) < size:
            if not (part := self._socket.recv(size - len(data))):
                raise OSError("the control pipe ended")
            data += part
        return data

    def writable(self) -> bool:
        """Return whether a small message can be sent without blocking."""
        poll = select.poll()  # not select(2), which supports only descriptors below 1024
        poll.register(self.fileno(), select.POLLOUT)
        return bool(poll.poll(0))

    def close(self) -> None:
        self._socket.close()


def spawn(
    module: str,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str | None] | None = None,
    *,
    python: str = sys.executable,
    output: int | None = None,
) -> tuple[subprocess.Popen[bytes], ControlPipe]:
    """Start ``python -m module FD arguments...`` with a control pipe on descriptor FD.

    The child is a new interpreter and not a fork, which CUDA and threads do not survive. Call it from a thread that
    lives as long as the child should: the kernel sends the parent-death signal when the thread ends.

    Args:
        environment: environment variables of the child; None removes one.
        python: the interpreter that runs it.
        output: the descriptor of a file for the child's output and errors. The child then also has its own process
            group, so that a terminal's Ctrl-C reaches only its parent. None: the parent's output.
    """
    ours, theirs = socket.socketpair()
    set_timeouts(ours, _MESSAGE_SECONDS)  # a child that was stopped within a message must not block its parent forever
    variables = {**os.environ, **(environment or {}), _PARENT: str(os.getpid())}
    with theirs, _interrupts_blocked():
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


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Block SIGINT, for a child that inherits this: it must not be interrupted in its imports, before it ignores it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def set_timeouts(end: socket.socket, seconds: float) -> None:
    """Set the time-out of a socket's sends and receives, after which they raise BlockingIOError."""
    for direction in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        whole, part = divmod(seconds, 1.0)
        end.setsockopt(socket.SOL_SOCKET, direction, struct.pack("@ll", int(whole), int(part * 1e6)))


def end_with(parent: int) -> None:
    """Let the kernel kill this process when process `parent` ends, or at once if it has ended already."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the call took effect
        os.kill(os.getpid(), signal.SIGKILL)


def exact_sleeps() -> None:
    """Make this thread's sleeps accurate to a microsecond; by default the kernel adds up to fifty."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_TIMERSLACK, 1000, 0, 0, 0)


# From malloc.h of the GNU C library; other C libraries have no mallopt, or use other numbers and refuse these.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
# The largest value that every glibc accepts.
_LARGEST_KEPT_BLOCK = 32 * 2**20


def keep_freed_memory(most: int = 256 * 2**20) -> bool:
    """Let the process keep freed memory instead of returning it to the system after every batch or picture.

    By default glibc maps every block of a few megabytes separately and unmaps it when it is freed, so that every
    intermediate result of every batch causes page faults. The setting applies to the whole process; further calls have
    no effect.

    Args:
        most: the maximum number of bytes to keep; blocks of more than 32 MiB are never kept.

    Returns:
        Whether the C library accepted the settings; without them the process is only slower.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = ((_MMAP_THRESHOLD, _LARGEST_KEPT_BLOCK), (_TRIM_THRESHOLD, most))
    return all(mallopt(parameter, value) == 1 for parameter, value in settings)


def attach(fd: int) -> ControlPipe:
    """Open the control pipe in the child, and make the child end with its parent.

    The child ignores terminal signals: the parent handles them, decides about draining, and sends orders through the
    pipe. Objects that exist now are excluded from later garbage collections.
    """
    os.set_inheritable(fd, False)  # else a program that a model starts would keep it open after this process's end
    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # for its own children; `spawn` has blocked it
    # Passed by `spawn`: after the parent's death getppid would return another process.
    end_with(int(os.environ.pop(_PARENT, os.getppid())))
    return ControlPipe(fd)


def configuration(control_pipe: ControlPipe) -> dict[str, Any] | None:
    """Wait for the first message, which a standby process may get late; return None if the parent ended.

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
    """Return an event that is set by a stop message or the end of the pipe; call it in a running event loop.

    Args:
        unknown: called with the kind of any other message.
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
async def signs_of_life(control_pipe: ControlPipe, told: Callable[[], dict[str, Any]] = dict) -> AsyncIterator[None]:
    """Send the parent a heartbeat every second inside the ``with`` block, with the fields that `told` returns."""
    import asyncio  # engines have no event loop

    async def tell() -> None:
        # A parent that was stopped (SIGSTOP) reads nothing: waiting for it would block this process, too.
        while True:
            if control_pipe.writable():
                control_pipe.send("alive", **told())
            await asyncio.sleep(_EVERY)

    telling = asyncio.create_task(tell())
    try:
        yield
    finally:
        telling.cancel()
        with contextlib.suppress(asyncio.CancelledError, OSError):  # the pipe's end reports it, too
            await telling
