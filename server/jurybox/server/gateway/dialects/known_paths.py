"""Fast path for a dialect's requests whose head was seen before, around HTTP parsing and the application.

It does for dialects what inference/http_forms.py does for tensors. A trainer's requests begin with the same bytes every
time, except for the length of the body. The first request goes through uvicorn, access control (security.http) and the
application. If the application answered it, its head is kept, without the length. Access control and routing depend
only on these bytes and on the length, which has the same limit here. All other requests take the ordinary path.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from jurybox.protocol.errors import Refused
from jurybox.server.gateway.dialects.intake import HttpReply
from jurybox.server.gateway.inference.http_forms import (
    ENDS,
    MOST_BODY,
    MOST_HEAD,
    MOST_HEADS,
    InferProtocol,
    plain_length,
)
from jurybox.server.security.access import OF_CONNECTION
from jurybox.server.security.http import DATA_HEADERS
from jurybox.server.security.limits import OF_REQUEST, Charge
from jurybox.server.security.pace import joined

ANSWERED = "jurybox.dialect"  # in a request's scope: a function to call with the endpoint that answered its body
Endpoint = Callable[[bytes], Awaitable[HttpReply]]
_LENGTH = re.compile(rb"\r\n[Cc]ontent-[Ll]ength: ([0-9]{1,8})\r\n")
_BEGIN = b"POST /"
_INFERENCE = b"POST /v2/"
NEVER_CACHED = (b"cache-control", b"no-store")
_FIELDS = b"".join(b"%b: %b\r\n" % pair for pair in (NEVER_CACHED, *DATA_HEADERS)) + b"\r\n"

_Key = tuple[bytes, bytes]  # the parts of a head before and after the digits of its content-length


class _PendingRequest(NamedTuple):
    """A request whose body is being received, or that is being answered."""

    head: bytes
    length: int
    answer: Endpoint
    taken: Charge
    parts: list[bytes]  # of the body, as received


class KnownPaths:
    """The known heads of a port, which all its connections share.

    Args:
        most: largest body, bytes.
    """

    def __init__(self, most: int) -> None:
        self.most = min(most, MOST_BODY)
        self.heads: dict[_Key, Endpoint] = {}

    def learn(self, head: bytes, scope: Any, endpoint: Endpoint) -> None:
        """Record that `endpoint` answered a request with this head."""
        length, found = plain_length(scope), _LENGTH.search(head)
        if length is None or found is None or int(found[1]) != length or len(head) > MOST_HEAD:
            return
        if len(self.heads) >= MOST_HEADS:
            self.heads.clear()
        self.heads[head[: found.start(1)], head[found.end(1) :]] = endpoint

    def of(self, head: bytes, taken: Charge) -> _PendingRequest | None:
        """Return a new request with this head, whose bytes `taken` counts; None if it must take the ordinary path."""
        if (found := _LENGTH.search(head)) is None:
            return None
        endpoint = self.heads.get((head[: found.start(1)], head[found.end(1) :]))
        length = int(found[1])
        if endpoint is None or length > self.most:
            return None
        return _PendingRequest(head, length, endpoint, taken, [])


class DialectProtocol(InferProtocol):
    """A connection that answers a dialect's requests with known heads directly."""

    paths: KnownPaths  # set in the subclass that `with_dialects` creates
    _pending: _PendingRequest | None = None
    _left = 0  # bytes of its body that are still to be received

    def data_received(self, data: bytes) -> None:
        """Receive bytes of a request; see `asyncio.Protocol`."""
        self._heard = time.monotonic()
        if self._asking:
            super().data_received(data)
        elif self._pending is not None:
            self._part(self._pending, data)
        elif (
            data.startswith(_BEGIN)
            and not data.startswith(_INFERENCE)
            and self._head is None
            and self._idle()
            and (end := ENDS.search(data))
        ):
            self._begin_dialect(data, data[: end.end()])
        else:
            super().data_received(data)

    @property
    def in_progress(self) -> bool:
        """See `Connection.in_progress`."""
        return self._pending is not None or super().in_progress

    @property
    def receiving(self) -> bool:
        """See `limits.Limited`."""
        return (self._pending is not None and not self._asking) or super().receiving

    def shutdown(self) -> None:
        """Close the connection, after a request that has begun is answered; called by uvicorn."""
        self._leaving = True
        if self._pending is None:
            super().shutdown()

    def _begin_dialect(self, data: bytes, head: bytes) -> None:
        if (pending := self.paths.of(head, Charge(self.budget, self.account))) is not None:
            self._unset_keepalive_if_required()
            self._pending, self._left = pending, pending.length
            self._part(pending, data[len(head) :])
            return
        self._by_layers(data, head, ANSWERED, lambda scope, endpoint: self.paths.learn(head, scope, endpoint))

    def _part(self, pending: _PendingRequest, data: bytes) -> None:
        if len(data) > self._left:
            data, self._ahead = data[: self._left], data[self._left :]
        self._left -= len(data)
        if data:
            pending.parts.append(data)
            try:
                pending.taken.take(len(data), pending.length)
            except Refused:  # the ordinary path answers with the error
                data, self._ahead = b"".join((pending.head, *pending.parts, self._ahead)), b""
                self._give()
                super().data_received(data)
                return
        if self._left:
            return
        self._asking, self._began = True, time.monotonic()
        task = self.loop.create_task(self._answered(pending))
        self.tasks.add(task)  # uvicorn waits for these tasks when it stops
        task.add_done_callback(self.tasks.discard)

    async def _answered(self, pending: _PendingRequest) -> None:
        parts = pending.parts
        OF_REQUEST.set(pending.taken)
        OF_CONNECTION.set(self._client)
        try:
            reply = await pending.answer(parts.pop() if len(parts) == 1 else await joined(parts))
        except asyncio.CancelledError:
            self.transport.abort()  # there will be no answer
            raise
        finally:
            parts.clear()
            pending.taken.give()  # not before, even if the client has disconnected: a thread was using the body
        if self._gone:
            return
        closes = ("connection", "close") in reply.headers
        if closes:
            self._ahead = b""
        fields = "".join([f"{name}: {value}\r\n" for name, value in reply.fields()])
        self._answer(reply.status, [fields.encode("latin-1"), _FIELDS, reply.body])
        if closes:
            self.transport.close()

    def _give(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None and not self._asking:
            pending.taken.give()  # the body was not received in full
        super()._give()


def with_dialects(protocol: type[InferProtocol], most: int) -> type[DialectProtocol]:
    """Return the class of a port's connections.

    Args:
        protocol: the class for a port without dialects.
        most: largest body, bytes.
    """
    return type("KnownDialectProtocol", (DialectProtocol, protocol), {"paths": KnownPaths(most)})
