"""One HTTP/2 connection: frames in, settings, pings and windows; what streams mean is its subclasses' affair."""

from __future__ import annotations

import asyncio
from typing import cast

from hpack import Decoder, HPACKError

from jurybox.server.gateway.http2 import frames
from jurybox.server.gateway.http2.frames import Broken, frame
from jurybox.server.gateway.http2.outflow import Outflow

WINDOW = 1 << 20  # bytes a peer may send on a stream before it is granted more
_CONNECTION_WINDOW = 16 << 20
_MAX_FRAME = 1 << 18
_MOST_HEADERS = 1 << 16  # bytes of a header block, compressed or not
_KEPT_BLOCKS = 64
_MOST_UNREAD = 1000
_ON_STREAMS = frozenset((frames.DATA, frames.HEADERS, frames.RST_STREAM, frames.CONTINUATION))
_ON_CONNECTION = frozenset((frames.SETTINGS, frames.PING, frames.GOAWAY))

Headers = tuple[tuple[bytes, bytes], ...]


class Connection(asyncio.Protocol):
    """Reads frames and keeps the connection's state. Either end of a connection.

    Args:
        expects_preface: whether the peer is the client, whose first bytes are fixed.
        settings: ours, beside windows and frame size.
    """

    def __init__(self, *, expects_preface: bool, settings: tuple[tuple[int, int], ...]) -> None:
        self._settings = (*settings, (frames.INITIAL_WINDOW, WINDOW), (frames.MAX_FRAME, _MAX_FRAME))
        self._expects_preface = expects_preface
        self._rest = b""
        self._decoder = Decoder(max_header_list_size=_MOST_HEADERS)
        self._blocks: dict[bytes, Headers] = {}  # header blocks that always mean the same, and what
        self._block: tuple[int, int, bytes] | None = None  # stream, flags and beginning of one that is continued
        self._unread = 0  # replies to pings and settings that wait until the peer reads
        self._taken = 0  # bytes of data since the connection's window was last granted
        self._transport: asyncio.Transport | None = None
        self.out = Outflow(self.write)

    # ---- for subclasses

    def on_headers(self, stream: int, headers: Headers, *, ends: bool) -> None:
        """Headers or trailers came."""
        raise NotImplementedError

    def on_data(self, stream: int, data: bytes, flow: int, *, ends: bool) -> None:
        """Data came; `flow` bytes of the stream's window are used up by it, to be granted with `grant`."""
        raise NotImplementedError

    def on_reset(self, stream: int, code: int) -> None:
        """The peer gave a stream up."""
        raise NotImplementedError

    def on_closed(self) -> None:
        """The connection is gone."""
        raise NotImplementedError

    def write(self, data: bytes) -> None:
        """Send frames."""
        if self._transport is not None:
            self._transport.write(data)

    def grant(self, stream: int, size: int) -> None:
        """Let the peer send so many more bytes on a stream."""
        if size:
            self.write(frames.window_update(stream, size))

    def end(self, code: int = frames.NO_ERROR, why: str = "", last: int = 0) -> None:
        """Say why, and close."""
        if self._transport is not None and not self._transport.is_closing():
            self.write(frame(frames.GOAWAY, 0, 0, frames.WORD.pack(last) + frames.WORD.pack(code) + why.encode()))
            self._transport.close()

    # ---- asyncio's

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        hello = b"" if self._expects_preface else frames.PREFACE
        more = frames.window_update(0, _CONNECTION_WINDOW - frames.DEFAULT_WINDOW)
        self.write(hello + frames.settings(self._settings) + more)

    def connection_lost(self, _error: Exception | None) -> None:
        self._transport = None
        self.on_closed()

    def pause_writing(self) -> None:
        self.out.paused = True

    def resume_writing(self) -> None:
        self.out.paused = False
        self.out.flush()

    def data_received(self, data: bytes) -> None:
        if self._rest:
            data = self._rest + data
        try:
            self._rest = data[self._read(data) :]
        except Broken as broken:
            self._rest = b""
            self.end(broken.code, str(broken))

    # ---- inside

    def _read(self, data: bytes) -> int:
        """Take in whole frames; gives how many bytes they were."""
        at, end = 0, len(data)
        if self._expects_preface:
            if not frames.PREFACE.startswith(data[: len(frames.PREFACE)]):
                raise Broken(frames.PROTOCOL_ERROR, "expected HTTP/2, as gRPC clients speak it")
            if end < len(frames.PREFACE):
                return 0
            self._expects_preface, at = False, len(frames.PREFACE)
        while end - at >= 9:
            length = int.from_bytes(data[at : at + 3], "big")
            if length > _MAX_FRAME:
                raise Broken(frames.FRAME_SIZE_ERROR, f"a frame of {length} bytes: expected at most {_MAX_FRAME}")
            if end - at - 9 < length:
                break
            stream = int.from_bytes(data[at + 5 : at + 9], "big") & 0x7FFFFFFF
            self._frame(data[at + 3], data[at + 4], stream, data[at + 9 : at + 9 + length])
            at += 9 + length
            if self._transport is None or self._transport.is_closing():
                return end
        return at

    def _frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if self._block is not None and kind != frames.CONTINUATION:
            raise Broken(frames.PROTOCOL_ERROR, "a header block was not finished")
        if (kind in _ON_STREAMS and not stream) or (kind in _ON_CONNECTION and stream):
            raise Broken(frames.PROTOCOL_ERROR, f"a frame of type {kind} on stream {stream}")
        if kind == frames.DATA:
            self._data(flags, stream, payload)
        elif kind == frames.HEADERS:
            block = frames.without_padding(flags, payload)
            self._headers(stream, flags, block[5:] if flags & frames.WITH_PRIORITY else block)
        elif kind == frames.WINDOW_UPDATE:
            size = frames.WORD.unpack(_of(payload, 4))[0] & frames.LARGEST_WINDOW
            if not size:
                raise Broken(frames.PROTOCOL_ERROR, "a window grown by nothing")
            self.out.grant(stream, size)
        elif kind == frames.PING:
            if not flags & frames.ACK:
                self._reply(frame(frames.PING, frames.ACK, 0, _of(payload, 8)))
        elif kind == frames.SETTINGS:
            if not flags & frames.ACK:
                self._adopt(payload)
        elif kind == frames.RST_STREAM:
            self.out.close(stream)
            self.on_reset(stream, frames.WORD.unpack(_of(payload, 4))[0])
        elif kind == frames.CONTINUATION:
            if self._block is None or self._block[0] != stream:
                raise Broken(frames.PROTOCOL_ERROR, "a continuation of nothing")
            _, first, begun = self._block
            self._headers(stream, first | flags & frames.END_HEADERS, begun + payload)
        elif kind == frames.PUSH_PROMISE:
            raise Broken(frames.PROTOCOL_ERROR, "nothing is to be pushed")

    def _data(self, flags: int, stream: int, payload: bytes) -> None:
        self._taken += len(payload)
        if self._taken > _CONNECTION_WINDOW // 2:
            self.grant(0, self._taken)
            self._taken = 0
        data = frames.without_padding(flags, payload)
        self.on_data(stream, data, len(payload), ends=bool(flags & frames.END_STREAM))

    def _headers(self, stream: int, flags: int, block: bytes) -> None:
        if len(block) > _MOST_HEADERS:
            raise Broken(frames.ENHANCE_YOUR_CALM, f"more than {_MOST_HEADERS} bytes of headers")
        if not flags & frames.END_HEADERS:
            self._block = (stream, flags, block)
            return
        self._block = None
        headers = self._blocks.get(block)
        if headers is None:
            headers = self._decoded(block)
        self.on_headers(stream, headers, ends=bool(flags & frames.END_STREAM))

    def _decoded(self, block: bytes) -> Headers:
        try:
            headers = tuple((bytes(name), bytes(value)) for name, value in self._decoder.decode(block, raw=True))
        except HPACKError as error:
            raise Broken(frames.COMPRESSION_ERROR, f"headers that cannot be read: {error}") from error
        # A block of indices alone leaves the table as it is, and means the same until another block changes it.
        if min(block, default=0) & 0x80:
            if len(self._blocks) < _KEPT_BLOCKS:
                self._blocks[block] = headers
        else:
            self._blocks.clear()
        return headers

    def _adopt(self, payload: bytes) -> None:
        for setting, value in frames.read_settings(payload):
            if setting == frames.INITIAL_WINDOW:
                self.out.initial(value)
            elif setting == frames.MAX_FRAME:
                if not frames.SMALLEST_MAX_FRAME <= value <= frames.LARGEST_MAX_FRAME:
                    raise Broken(frames.PROTOCOL_ERROR, f"a largest frame of {value} bytes")
                self.out.max_frame = value
        self._reply(frame(frames.SETTINGS, frames.ACK, 0, b""))

    def _reply(self, data: bytes) -> None:
        """Send what every peer can ask for without end: not to one that reads nothing of it."""
        self._unread = self._unread + 1 if self.out.paused else 0
        if self._unread > _MOST_UNREAD:
            raise Broken(frames.ENHANCE_YOUR_CALM, "questions without an ear for the answers")
        self.write(data)


def _of(payload: bytes, length: int) -> bytes:
    if len(payload) != length:
        raise Broken(frames.FRAME_SIZE_ERROR, f"{len(payload)} bytes: expected {length}")
    return payload
