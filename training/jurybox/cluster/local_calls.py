"""Calls an env worker on the learner's machine over a Unix socket, ten times as fast as a call through Ray.

The socket is abstract, so it leaves no file behind. Both ends accept processes of their own user only, as
the kernel reports it: pickle is as safe between them as between a process and its child. A process that cannot connect
(another user, another network namespace) calls through Ray.
"""

from __future__ import annotations

import os
import pickle
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from jurybox.training.vector.worker import pickled, worker_error

Answer = tuple[int, Any]  # one of the kinds below, and the value
VALUE, RAISED, NEW = range(3)  # NEW: the worker has no object yet
_PEER = struct.Struct("3i")  # process, user, group
_TIMEOUT = 5.0


class CallServer:
    """The worker's end: a server thread, for one caller at a time.

    Args:
        do: answers a method's name and its arguments.
    """

    def __init__(self, do: Callable[[str, tuple[Any, ...]], Answer]) -> None:
        self._do = do
        self.name = ""
        if sys.platform != "linux":
            return
        self.name = f"jurybox-env-{os.getuid()}-{secrets.token_hex(8)}"
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(f"\0{self.name}")
        listening.listen(1)
        threading.Thread(target=self._listen, args=(listening,), name="near", daemon=True).start()

    def _listen(self, listening: socket.socket) -> None:
        while True:
            caller, _ = listening.accept()
            if _own_user(caller):
                with Connection(caller.detach()) as connection:
                    self._serve(connection)
            else:
                caller.close()

    def _serve(self, connection: Connection) -> None:
        try:
            while True:
                connection.send_bytes(self._answer(connection.recv_bytes()))
        except (EOFError, OSError):
            return  # the caller is gone

    def _answer(self, message: bytes) -> bytes:
        try:
            return pickled(self._do(*pickle.loads(message)))
        except Exception as error:  # noqa: BLE001 (such as a value that cannot be pickled; the learner raises it)
            return pickled((RAISED, str(worker_error(error))))


class CallConnection:
    """The learner's end. Calls are answered in order.

    Raises:
        OSError: no such socket exists on this machine, or it belongs to another user.
    """

    def __init__(self, name: str) -> None:
        if not name:
            raise OSError("this worker has no connection")
        caller = socket.socket(socket.AF_UNIX)
        try:
            caller.settimeout(_TIMEOUT)
            caller.connect(f"\0{name}")
            if not _own_user(caller):
                raise OSError(f"{name} belongs to another user")
            caller.settimeout(None)
        except BaseException:
            caller.close()
            raise
        self._connection = Connection(caller.detach())
        self._sent = self._received = 0
        self._early: dict[int, Answer] = {}

    def ask(self, method: str, arguments: tuple[Any, ...]) -> int:
        """Send a call; returns its number. If the worker is gone, `answer` raises EOFError."""
        message = pickled((method, arguments))
        self._sent += 1
        with suppress(OSError):  # which `answer` raises
            self._connection.send_bytes(message)
        return self._sent

    def answer(self, number: int, until: float) -> Answer | None:
        """Wait for an answer until `until` on the monotonic clock; return None if there is none.

        Raises:
            EOFError, OSError: the worker is gone.
        """
        while number not in self._early:
            if not self._connection.poll(max(0.0, until - time.monotonic())):
                return None
            self._received += 1
            self._early[self._received] = pickle.loads(self._connection.recv_bytes())
        return self._early.pop(number)

    def close(self) -> None:
        self._connection.close()


def _own_user(peer: socket.socket) -> bool:
    _, user, _ = _PEER.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return bool(user == os.getuid())
