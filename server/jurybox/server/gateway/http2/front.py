"""Where gRPC clients connect: inference is answered here, every other call goes on to grpc.aio."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Mapping

from jurybox.protocol.errors import TABLE, Error
from jurybox.server.gateway.http2 import frames, unary
from jurybox.server.gateway.http2.connection import WINDOW, Connection, Headers
from jurybox.server.gateway.http2.frames import Broken
from jurybox.server.gateway.http2.relay import Relay

# Answers the message of a call, given the seconds until its deadline; raises Error.
Handler = Callable[[bytes, float | None], Awaitable[bytes]]
Way = Callable[[Relay], Awaitable[object]]

_MOST_STREAMS = 1024
_UNKNOWN, _CANCELLED, _DEADLINE, _EXHAUSTED, _INTERNAL = 2, 1, 4, 8, 13


class _Call:
    """A unary call that is answered here."""

    __slots__ = ("body", "granted", "handler", "seconds", "size", "task")

    def __init__(self, handler: Handler, seconds: float | None) -> None:
        self.handler = handler
        self.seconds = seconds
        self.body: list[bytes] = []
        self.size = 0
        self.granted = 0
        self.task: asyncio.Task[None] | None = None


class Front(Connection):
    """A client's connection.

    Args:
        handlers: by path, for the calls that are answered here.
        way: connects a relay to the server that answers all others.
        most: bytes of a message.
        all_of_them: the connections there are; this one is in it while it lives.
    """

    def __init__(self, handlers: Mapping[bytes, Handler], way: Way, most: int, all_of_them: set[Front]) -> None:
        super().__init__(expects_preface=True, settings=((frames.MAX_STREAMS, _MOST_STREAMS),))
        self._handlers = handlers
        self._way = way
        self._most = most
        self._fronts = all_of_them
        self._calls: dict[int, _Call] = {}
        self._relayed: dict[int, bool] = {}  # stream -> whether the client has ended its side
        self._relay: Relay | None = None
        self._connecting: asyncio.Task[object] | None = None
        self._last = 0
        self._leaving = False

    @property
    def busy(self) -> bool:
        """Whether calls are in progress."""
        return bool(self._calls or self._relayed)

    def leave(self) -> None:
        """Take no new calls; `close` follows when those in progress are done, or the grace is over."""
        self._leaving = True
        self.write(frames.frame(frames.GOAWAY, 0, 0, frames.WORD.pack(self._last) + frames.WORD.pack(0)))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        connection: socket.socket = transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._fronts.add(self)

    def on_headers(self, stream: int, headers: Headers, *, ends: bool) -> None:
        if stream <= self._last:
            self._trailers(stream, headers, ends=ends)
            return
        if not stream % 2:
            raise Broken(frames.PROTOCOL_ERROR, f"stream {stream}: clients open odd ones")
        self._last = stream
        if self._leaving or len(self._calls) + len(self._relayed) >= _MOST_STREAMS:
            self.write(frames.reset(stream, frames.REFUSED_STREAM))
            return
        self.out.open(stream)
        handler = self._handler(headers)
        if handler is None or ends:
            self._hand_on(stream, headers, ends=ends)
        else:
            self._calls[stream] = _Call(handler, unary.seconds_of(headers))

    def on_data(self, stream: int, data: bytes, flow: int, *, ends: bool) -> None:
        call = self._calls.get(stream)
        if call is not None:
            self._collect(stream, call, data, flow, ends=ends)
        elif stream in self._relayed and self._relay is not None:
            self._relayed[stream] = ends
            self._relay.data(stream, data, flow, ends=ends)
        elif stream > self._last:
            raise Broken(frames.PROTOCOL_ERROR, f"data on stream {stream}, which was never opened")

    def on_reset(self, stream: int, code: int) -> None:
        if (call := self._calls.pop(stream, None)) is not None:
            if call.task is not None:
                call.task.cancel()
        elif self._relayed.pop(stream, None) is not None and self._relay is not None:
            self._relay.give_up(stream, code)

    def on_closed(self) -> None:
        self._fronts.discard(self)
        for call in self._calls.values():
            if call.task is not None:
                call.task.cancel()
        self._calls.clear()
        if self._connecting is not None:
            self._connecting.cancel()
        if self._relay is not None:
            self._relay.end()

    # ---- calls that are answered here

    def _handler(self, headers: Headers) -> Handler | None:
        """Who answers this call here; None where it is not one of those, or not in its plainest form."""
        handler = None
        for name, value in headers:
            if name == b":path":
                handler = self._handlers.get(value)
                if handler is None:
                    return None
            elif (
                (name == b":method" and value != b"POST")
                or (name == b"grpc-encoding" and value != b"identity")
                or (name == b"content-type" and value not in (b"application/grpc", b"application/grpc+proto"))
            ):
                return None
        return handler

    def _collect(self, stream: int, call: _Call, data: bytes, flow: int, *, ends: bool) -> None:
        if call.task is not None:
            raise Broken(frames.PROTOCOL_ERROR, f"data on stream {stream} after its end")
        call.body.append(data)
        call.size += len(data)
        if call.size > self._most + 5:
            why = f"the message has more than {self._most} bytes: send fewer rows in a request"
            self._refuse(stream, _EXHAUSTED, why)
            return
        if ends:
            call.task = asyncio.ensure_future(self._answer(stream, call))
            return
        call.granted += flow
        if call.granted > WINDOW // 2:
            self.grant(stream, call.granted)
            call.granted = 0

    async def _answer(self, stream: int, call: _Call) -> None:
        message = unary.message_in(call.body[0] if len(call.body) == 1 else b"".join(call.body))
        call.body.clear()
        if message is None:
            self._fail(stream, _INTERNAL, "expected one uncompressed message of the length it says")
            return
        try:
            if call.seconds is not None and call.seconds <= 0:
                raise TimeoutError
            answer = await call.handler(message, call.seconds)
        except Error as error:
            row = TABLE.get(error.code)
            self._fail(stream, row.grpc if row else _UNKNOWN, str(error))
        except TimeoutError:
            self._fail(stream, _DEADLINE, "the deadline had passed when the call came")
        except Exception as error:  # noqa: BLE001  a client must hear of it, as it would from grpc.aio
            self._fail(stream, _UNKNOWN, f"{type(error).__name__}: {error}")
        else:
            if self._calls.pop(stream, None) is not None:
                self.out.whole(stream, *unary.answered(stream, answer))

    def _fail(self, stream: int, status: int, why: str) -> None:
        if self._calls.pop(stream, None) is not None:
            self.out.close(stream)
            self.write(unary.failed(stream, status, why))

    def _refuse(self, stream: int, status: int, why: str) -> None:
        """Answer before the client has said all, and hear no more of it."""
        self._fail(stream, status, why)
        self.write(frames.reset(stream, frames.NO_ERROR))

    # ---- calls that are handed on

    def _hand_on(self, stream: int, headers: Headers, *, ends: bool) -> None:
        if self._relay is None:
            self._relay = Relay(self.out, self._over, self._took)
            self._connecting = asyncio.ensure_future(self._connect(self._relay))
        self._relayed[stream] = ends
        self._relay.begin(stream, headers, ends=ends)

    async def _connect(self, relay: Relay) -> None:
        try:
            await self._way(relay)
        except OSError:
            self.end(frames.REFUSED_STREAM, "the gateway is stopping")

    def _trailers(self, stream: int, headers: Headers, *, ends: bool) -> None:
        """gRPC clients send none; where one does, the stream's data is at its end."""
        if not ends:
            raise Broken(frames.PROTOCOL_ERROR, f"headers on stream {stream}, which is open already")
        self.on_data(stream, b"", 0, ends=True)

    def _over(self, stream: int) -> None:
        if stream == 0:
            self._relay = None
            if self._relayed:
                self.end(frames.NO_ERROR, "the gateway is stopping")
            self._relayed.clear()
            return
        if self._relayed.pop(stream, True) is False:
            # Answered before the client has ended its side: it need not say more.
            self.out.then(stream, frames.reset(stream, frames.NO_ERROR))

    def _took(self, stream: int, size: int) -> None:
        if self._relayed.get(stream) is False:
            self.grant(stream, size)
