"""A libzmq socket that is not closed while calls are within it."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator

import zmq


class HeldSocket:
    """Closes a socket when no call is within it any more.

    pyzmq runs signal handlers, and the garbage collector destructors, also when it has looked whether a socket is open
    and before it uses it. A socket that a nested call closes there is freed memory, or already the next socket, which
    would get the rest of a message or lose one. So as long as calls are within it, the last of them closes it.

    Args:
        socket: it, and what belongs to it and is closed first.

    Attributes:
        broken: whether it was closed, or will be.
    """

    def __init__(self, *sockets: zmq.Socket[bytes]) -> None:
        self.broken = False
        self._pid = os.getpid()
        self._calls = itertools.count(1)
        self._inside: dict[int, None] = {}  # the numbers of the calls that are within a call of pyzmq
        self._open = [sockets]
        # What closes all sockets of a link (control.Wires) must ask here: a call may be within these.
        getattr(sockets[0].context, "held", {}).update((id(socket), self) for socket in sockets)

    def close(self, _: int | None = None) -> None:
        """Close the socket; what was not sent yet is dropped. In a forked child nothing is: the parent uses it."""
        self.broken = True
        self._close_if_left()

    @contextlib.contextmanager
    def within(self) -> Iterator[bool]:
        """Within the ``with`` block the socket stays open. False: it is closed."""
        number = next(self._calls)
        try:
            self._inside[number] = None  # before it looks whether it is broken: another thread may close it
            yield not self.broken
        finally:
            self._left(number)

    def _left(self, number: int) -> None:
        """Note that a call has left."""
        self._inside.pop(number, None)
        self._close_if_left()

    def _close_if_left(self) -> None:
        """Close the socket if it is broken and no call is within it."""
        if not self.broken or self._inside or self._pid != os.getpid():
            return
        with contextlib.suppress(IndexError):  # another call closes it
            socket, *others = self._open.pop()
            if others:
                with contextlib.suppress(zmq.ZMQError):  # the context has ended, or has closed it
                    socket.disable_monitor()
            for one in (*others, socket):
                one.close()
