"""A ROUTER socket without CURVE that manages its own connections, without libzmq's I/O thread, for relay and doors."""

from __future__ import annotations

import contextlib
import errno
import itertools
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from jurybox import native
from jurybox.protocol.descriptors import exhausted
from jurybox.protocol.errors import Refused
from jurybox.protocol.wire import PREFIX
from jurybox.server.security.limits import REASONS, RECEIVED, RELAY_CONNECTIONS, TCP, budget_of, no_room

_BACKLOG = 128
_BEAT, _SILENCE, _HANDSHAKE = 2.0, 10.0, 5.0  # seconds, as in Front
_CLIENTS = 8  # the limit on all clients' unread bytes, in limits of one; above it, each may have one unread message
_TURN = 64  # messages of one connection before others get a turn
_ANY = 1 << 40  # bytes of a frame, of which the budget lets only some be kept
_PROBE = (PREFIX, bytes(8), b"")  # a control reply to call number 0, which no client has made


class _FrontConnection:
    """A client's connection; `name` is set after the handshake."""

    def __init__(self, made: socket.socket, most: int, account: native.Account) -> None:
        self.descriptor = made.fileno()
        self.account = account
        self.link = native.Zmtp(self.descriptor, b"", most, 0.0, router=True, account=account)
        made.detach()
        self.link.watched(on=True)  # a send never blocks: unsent bytes follow when the descriptor is writable
        self.since = time.monotonic()
        self.name: bytes | None = None
        self.take_in: Callable[[], object] | None = None  # called before messages are delivered; may take some


class ZmtpListener:
    """A `ZmqListener` (zmq_listener.py) without CURVE: the relay's thread reads and writes each connection itself.

    Args:
        where: "host:port"; with port 0, a free port is chosen; or a listening socket.
        max_message: the maximum size of a frame in bytes, and the maximum of bytes that one client may leave unread.
        budget: that of the process; None: one of its own. It is given with `door`, one of the doors of `limits`; then
            a larger frame ends no connection: it is refused, as one without room.

    Attributes:
        bound: the actual "host:port".
        budget: what all clients together may make the relay hold.
        refused: called with a client, the first frame of a message for which the budget had no room, and the error that
            says so; the frame is empty if it was not kept.
        gone: called with a client whose connection has ended.

    Raises:
        OSError: it cannot be bound; socket.gaierror: the host cannot be resolved.
    """

    def __init__(
        self, where: str | socket.socket, max_message: int, budget: native.Budget | None = None, door: int = TCP
    ) -> None:
        self._most = max_message
        self._longest = max_message if budget is None else _ANY
        self.budget = budget or budget_of(max_message)
        self._door = door
        self.refused: Callable[[bytes, bytes, Refused], None] = lambda _client, _first, _error: None
        self.gone: Callable[[bytes], None] = lambda _client: None
        self._listener = where if isinstance(where, socket.socket) else _bound(where)
        self._epoll = select.epoll()
        self._connections: dict[int, _FrontConnection] = {}  # by the descriptor in the epoll
        self._named: dict[bytes, _FrontConnection] = {}
        self._parked: dict[int, _FrontConnection] = {}  # by socket: they wait until another with their name is closed
        self._messages: deque[list[Any]] = deque()
        self._more: dict[bytes, _FrontConnection] = {}  # connections with messages left over from their last turn
        self._numbers = itertools.count(1)
        try:
            self._listener.setblocking(False)
            self._epoll.register(self._listener.fileno(), select.EPOLLIN)
        except BaseException:
            self.close()
            raise
        name = self._listener.getsockname()
        self.bound = f"[{name[0]}]:{name[1]}" if ":" in name[0] else f"{name[0]}:{name[1]}"

    def fileno(self) -> int:
        """Return a descriptor that is readable when messages may have arrived."""
        return self._epoll.fileno()

    def has_news(self) -> bool:
        """Return whether messages are waiting that `fileno` does not signal."""
        return bool(self._messages or self._more)

    def receive(self, sizes: Callable[[bytes], int]) -> list[Any] | None:
        """Return a client's message: its routing id, then frames, as bytes or large ones as uint8 arrays; or None."""
        if not self._messages:
            self._look()
        return self._messages.popleft() if self._messages else None

    def has_room(self, client: bytes, size: int) -> bool:
        """Return whether a message of `size` bytes can be sent to a client now. One message is always allowed."""
        connection = self._named.get(client)
        if connection is None or not (unsent := connection.link.pending):
            return True
        if unsent + size > self._most:
            return False
        return sum(other.link.pending for other in self._named.values()) + size <= _CLIENTS * self._most

    def send(self, frames: Sequence[Any]) -> bool:
        """Send to the client that the first frame names; return False if it is gone.

        The message is dropped if the client has left too many bytes unread.
        """
        connection = self._named.get(frames[0])
        if connection is None:
            return False
        body = frames[1:]
        if connection.link.pending and not self.has_room(frames[0], sum(map(len, body))):
            return True
        if connection.link.post(body):
            return True
        self._end(connection)
        return False

    def link(self, client: bytes) -> native.Zmtp | None:
        """Return a client's connection; None if it is gone."""
        connection = self._named.get(client)
        return None if connection is None else connection.link

    def account(self, client: bytes) -> native.Account | None:
        """Return what a client's connection holds of the budget; None if it is gone."""
        connection = self._named.get(client)
        return None if connection is None else connection.account

    def end(self, client: bytes) -> None:
        """Close a client's connection at once."""
        if (connection := self._named.get(client)) is not None:
            self._end(connection)

    def give_first(self, client: bytes, take_in: Callable[[], object]) -> None:
        """Set a function to call before a client's messages are delivered; it may take the first ones from the link."""
        if (connection := self._named.get(client)) is not None:
            connection.take_in = take_in

    def look_again(self, client: bytes) -> None:
        """Note that messages remain in a client's link, for which `fileno` gives no further signal."""
        if (connection := self._named.get(client)) is not None:
            self._more[client] = connection

    def forget_sent(self) -> None:
        """Ping silent clients, and close the connections of those that do not answer."""
        now = time.monotonic()
        for connection in list(self._connections.values()):
            link = connection.link
            if connection.descriptor in self._parked:
                continue
            if connection.name is not None and link.silence > _BEAT and link.look():
                # It was not silent: while a large frame arrives slowly, the kernel signals only once there is enough.
                self._more[connection.name] = connection
            if link.broken or link.silence > _SILENCE or (not link.ready and now - connection.since > _HANDSHAKE):
                self._end(connection)
            elif link.ready and link.silence > _BEAT:
                link.ping()
        self._listen()

    def is_there(self, client: bytes) -> bool:
        """Return whether a client is connected."""
        return self.send((client, *_PROBE))

    def held(self) -> dict[str, Any]:
        """Return what the relay holds for its clients, as the status document has it."""
        budget = self.budget
        return {
            "connections": len(self._connections),
            "received": {"bytes": budget.held(RECEIVED), "limit": budget.in_all[RECEIVED]},
            "answers": {"bytes": sum(one.link.pending for one in self._named.values()), "limit": _CLIENTS * self._most},
            "refused": {why: budget.refused(RECEIVED, reason, TCP) for reason, why in enumerate(REASONS, 1)},
        }

    @property
    def unsent(self) -> bool:
        """Whether answers have not been sent yet."""
        return any(connection.link.pending for connection in self._named.values())

    def close(self) -> None:
        """Close all connections."""
        for connection in self._connections.values():
            connection.link.close()
        self._connections.clear()
        self._named.clear()
        self._more.clear()
        self._epoll.close()
        self._listener.close()

    def _look(self) -> None:
        """Read the data that has arrived, and accept new connections."""
        more, self._more = self._more, {}
        for sender, flooding in more.items():
            if self._named.get(sender) is flooding:
                self._take(sender, flooding)
                if flooding.link.broken and sender not in self._more:
                    self._end(flooding)
        for descriptor, _ in self._epoll.poll(0, 64):
            if descriptor in self._parked:
                self._end(self._parked[descriptor])
                continue
            connection = self._connections.get(descriptor)
            if connection is None:
                if descriptor == self._listener.fileno():
                    self._accept()
                continue
            link = connection.link
            link.look()
            if connection.name is None and link.ready and not self._name(connection):
                continue
            name = connection.name
            if name is not None and name not in more:
                self._take(name, connection)
            if link.broken and name not in self._more:
                self._end(connection)

    def _take(self, name: bytes, connection: _FrontConnection) -> None:
        """Deliver a limited number of a connection's messages, so that a flood of them does not starve the others."""
        if connection.take_in is not None:
            connection.take_in()
        messages = connection.link.receive(0, _TURN)
        for first in connection.link.refused():
            self.refused(name, first, no_room(self._most))
        self._messages.extend([name, *frames] for frames in messages)
        if len(messages) == _TURN:
            self._more[name] = connection

    def _name(self, connection: _FrontConnection) -> bool:
        """Register a connection by its name; return False if the name is invalid or still in use by another one."""
        name = connection.link.peer or b"\0" + next(self._numbers).to_bytes(8, "little")
        if connection.link.peer[:1] == b"\0":  # reserved for generated names
            self._end(connection)
            return False
        connection.name = name
        if name in self._named:
            self._parked[connection.descriptor] = connection
            self._epoll.unregister(connection.link.descriptor)
            self._epoll.register(connection.descriptor, select.EPOLLRDHUP)
            return False
        self._named[name] = connection
        return True

    def _accept(self) -> None:
        for _ in range(_BACKLOG):
            try:
                made, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if exhausted(error) or error.errno in (errno.ENOBUFS, errno.ENOMEM):
                    with contextlib.suppress(OSError):  # until resources are free: `forget_sent` listens again
                        self._epoll.unregister(self._listener.fileno())
                    return
                continue  # the client is gone already
            if len(self._connections) >= RELAY_CONNECTIONS and not self._make_room():
                made.close()
                continue
            try:
                made.setblocking(False)
                made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection = _FrontConnection(made, self._longest, native.Account(self.budget, self._door))
            except (OSError, RuntimeError):  # the client is gone, or no descriptor is free
                made.close()
                continue
            self._connections[connection.link.descriptor] = connection
            self._epoll.register(connection.link.descriptor, select.EPOLLIN)

    def _make_room(self) -> bool:
        """End the connection that has waited for its name or its handshake for longest; return whether there is one."""
        waiting = next(iter(self._parked.values()), None)
        if waiting is None:
            waiting = next((one for one in self._connections.values() if one.name is None), None)
        if waiting is not None:
            self._end(waiting)
        return waiting is not None

    def _listen(self) -> None:
        with contextlib.suppress(FileExistsError):
            self._epoll.register(self._listener.fileno(), select.EPOLLIN)

    def _end(self, connection: _FrontConnection) -> None:
        """Close a connection; a parked connection with the same name takes over."""
        descriptor = connection.link.descriptor
        if self._connections.pop(descriptor, None) is None:
            return
        parked = self._parked.pop(connection.descriptor, None) is not None
        with contextlib.suppress(OSError):
            self._epoll.unregister(connection.descriptor if parked else descriptor)
        connection.link.close()
        name = connection.name
        if name is None or self._named.get(name) is not connection:
            return
        del self._named[name]
        for other in self._parked.values():
            if other.name == name:
                del self._parked[other.descriptor]
                self._named[name] = other
                self._epoll.unregister(other.descriptor)
                self._epoll.register(other.link.descriptor, select.EPOLLIN)
                self._take(name, other)
                return
        self.gone(name)


def _bound(where: str) -> socket.socket:
    """Bind and listen on "host:port"."""
    host, _, port = where.rpartition(":")
    found = socket.getaddrinfo(
        None if host == "*" else host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener
