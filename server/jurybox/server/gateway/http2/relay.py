"""The way on to grpc.aio: one connection inside this host for each connection from outside, with the same streams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from jurybox.server.gateway.http2 import frames
from jurybox.server.gateway.http2.connection import Connection, Headers
from jurybox.server.gateway.http2.outflow import Outflow


class Relay(Connection):
    """The inner end of a relayed connection.

    Args:
        outside: sends to the client.
        over: told of a stream that both sides have ended, or of 0: all are, the connection is gone.
        took: told of bytes of a stream that went in, so that the client may send as many more.
    """

    def __init__(self, outside: Outflow, over: Callable[[int], None], took: Callable[[int, int], None]) -> None:
        super().__init__(expects_preface=False, settings=((frames.HEADER_TABLE_SIZE, 0), (frames.ENABLE_PUSH, 0)))
        self._outside = outside
        self._over = over
        self._took = took
        self._early: list[bytes] = []  # written before there was a connection

    def begin(self, stream: int, headers: Headers, *, ends: bool) -> None:
        """Hand a call on."""
        self.out.open(stream)
        self.write(_headers(stream, headers, ends=ends))

    def data(self, stream: int, data: bytes, flow: int, *, ends: bool) -> None:
        """Hand data on; what was padding counts as gone at once."""
        self._took(stream, flow - len(data))
        self.out.data(stream, data, ends=ends, sent=lambda size: self._took(stream, size))

    def give_up(self, stream: int, code: int) -> None:
        """The client gave a stream up."""
        self.out.close(stream)
        self.write(frames.reset(stream, code))

    def write(self, data: bytes) -> None:
        if self._transport is None:
            self._early.append(data)
        else:
            super().write(data)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        early, self._early = self._early, []
        super().connection_made(transport)
        self.write(b"".join(early))

    def on_headers(self, stream: int, headers: Headers, *, ends: bool) -> None:
        self._outside.then(stream, _headers(stream, headers, ends=ends))
        if ends:
            self._over(stream)

    def on_data(self, stream: int, data: bytes, flow: int, *, ends: bool) -> None:
        self.grant(stream, flow - len(data))
        self._outside.data(stream, data, ends=ends, sent=lambda size: self.grant(stream, size))
        if ends:
            self._over(stream)

    def on_reset(self, stream: int, code: int) -> None:
        self._outside.then(stream, frames.reset(stream, code))
        self._over(stream)

    def on_closed(self) -> None:
        self._over(0)


def _headers(stream: int, headers: Headers, *, ends: bool) -> bytes:
    flags = frames.END_HEADERS | (frames.END_STREAM if ends else 0)
    block = frames.header_block(headers)
    most = frames.SMALLEST_MAX_FRAME
    if len(block) <= most:
        return frames.frame(frames.HEADERS, flags, stream, block)
    parts = [frames.frame(frames.HEADERS, flags & ~frames.END_HEADERS, stream, block[:most])]
    for at in range(most, len(block), most):
        last = at + most >= len(block)
        parts.append(
            frames.frame(frames.CONTINUATION, frames.END_HEADERS if last else 0, stream, block[at : at + most])
        )
    return b"".join(parts)
