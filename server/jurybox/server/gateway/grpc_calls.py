"""gRPC over HTTP/2 on the event loop: the methods of a port, and its connections.

A call in grpc.aio costs several times as much as a small inference, because its threads pass every event to each other.
Here the event loop reads the socket, `native.GrpcConnection` (over the system's libnghttp2) parses it into events, and
answers are sent with one write. Methods are implemented and registered as for grpc.aio, with grpcio's generated code; a
direct method (security.grpc) is a plain function that needs no task.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import ssl
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jurybox import native
from jurybox.server.gateway.grpc_connection import RpcConnection
from jurybox.server.security.access import Access
from jurybox.server.security.doors import Doors
from jurybox.server.security.grpc import Direct
from jurybox.server.security.limits import CALLS, GRPC_CONNECTIONS
from jurybox.server.security.pace import Turns

_READ = 1 << 18  # bytes read at once
_LOOKED_AT, _LULL = 64, 1.0  # connections, and seconds without a byte, to find one to end where there are too many


class _Details(NamedTuple):
    """The call details that grpcio's generic handlers look a method up by, as grpc.HandlerCallDetails."""

    method: str
    invocation_metadata: Sequence[tuple[str, Any]] = ()


class Calls:
    """The methods of a port and its connections, instead of a grpc.aio.Server. Create it in the loop that serves it.

    Args:
        access: token, TLS and limits.
        budget: what all connections may hold.
        direct: direct methods, by path.
        forms: the forms of requests that native code answers.
        doors: after they have closed, calls that do more than read are refused.
        turns: shared with other doors.

    Raises:
        ValueError, OSError: the certificate or its key cannot be loaded.
    """

    def __init__(
        self,
        access: Access,
        budget: native.Budget,
        direct: Mapping[str, Direct],
        forms: native.InferForms | None = None,
        doors: Doors | None = None,
        turns: Turns | None = None,
    ) -> None:
        self.doors = doors or Doors()
        self.loop = asyncio.get_running_loop()
        self.budget = budget
        self.most_message = access.max_message
        self.token = access.token
        self.direct = {path.encode(): method for path, method in direct.items()}
        self.forms = forms
        self.connections: dict[RpcConnection, None] = {}  # in an order, as a set has none
        self.buffer = bytearray(_READ)
        self.turns = turns or Turns()
        self.stopping = False
        self._methods: dict[bytes, Any] = {}
        self._generic: list[Any] = []
        self._tls = _tls(access)
        self._listening: asyncio.Server | None = None
        self._idle = asyncio.Event()

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        """Add generic handlers, like `grpc.aio.Server`; called by generated code."""
        self._generic += handlers

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Add the methods of a service, like `grpc.aio.Server`; called by generated code."""
        self._methods.update({f"/{service}/{name}".encode(): handler for name, handler in handlers.items()})

    def found(self, path: bytes) -> Any:
        """Return the handler of a method, or None."""
        if (known := self._methods.get(path)) is None:
            details = _Details(path.decode("latin-1"))
            known = next((found for handler in self._generic if (found := handler.service(details))), None)
            if known is not None:
                self._methods[path] = known
        return known

    async def start(self, listener: socket.socket) -> None:
        """Serve a listening socket."""
        self._listening = await self.loop.create_server(lambda: RpcConnection(self), sock=listener, ssl=self._tls)

    @property
    def busy(self) -> bool:
        """Whether a call is in progress that does more than read."""
        return any(connection.busy for connection in self.connections)

    async def stop(self, grace: float) -> None:
        """Refuse all calls, close all connections, and wait up to `grace` seconds until they are sent."""
        self.stopping = True
        if self._listening is not None:
            self._listening.close()
        for connection in list(self.connections):
            connection.drain()
            connection.close()
        self.look()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), grace)

    @property
    def calls_are_full(self) -> bool:
        """Whether no more calls may begin."""
        return self.budget.held(CALLS) >= self.budget.in_all[CALLS]

    def admits(self, connection: RpcConnection) -> bool:
        """Add a connection; return False if there are too many, and all are in use."""
        if len(self.connections) >= GRPC_CONNECTIONS and not self._make_room():
            return False
        self.connections[connection] = None
        return True

    def _make_room(self) -> bool:
        """End a connection without a call, of the oldest ones; return whether there is one."""
        now, idle = self.loop.time(), None
        for one in list(itertools.islice(self.connections, _LOOKED_AT)):
            if one.idle and now - one.heard > _LULL and (idle is None or one.heard < idle.heard):
                idle = one
            elif not one.idle:  # not looked at again before the others
                del self.connections[one]
                self.connections[one] = None
        if idle is None:
            return False
        self.connections.pop(idle, None)
        idle.abort()
        return True

    def look(self) -> None:
        """Let `stop` continue if no connection is open any more."""
        if self.stopping and not self.connections:
            self._idle.set()


def _tls(access: Access) -> ssl.SSLContext | None:
    if access.tls() is None:  # `tls` also checks the permissions of the key file
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])
    context.load_cert_chain(str(access.tls_cert), access.tls_key, password=lambda: "")
    return context
