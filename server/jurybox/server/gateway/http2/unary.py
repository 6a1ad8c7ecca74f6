"""gRPC's unary calls on HTTP/2 (github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md): what bytes mean."""

from __future__ import annotations

from functools import lru_cache
from urllib.parse import quote

from jurybox.server.gateway.http2 import frames
from jurybox.server.gateway.http2.connection import Headers

_UNITS = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_PLAIN = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")
_OPENING = frames.header_block(((b":status", b"200"), (b"content-type", b"application/grpc")))
_CLOSING = frames.header_block(((b"grpc-status", b"0"),))
_HEADERS_ONLY = frames.END_HEADERS | frames.END_STREAM


def seconds_of(headers: Headers) -> float | None:
    """The time-out a call brings; None without one. One that cannot be read counts as passed."""
    for name, value in headers:
        if name == b"grpc-timeout":
            amount = value[:-1]
            unit = _UNITS.get(value[-1:])
            return int(amount) * unit if unit and amount.isdigit() and len(amount) <= 8 else 0.0
    return None


def message_in(body: bytes) -> bytes | None:
    """The one uncompressed message that a body is; None where it is something else."""
    if len(body) < 5 or body[0] or int.from_bytes(body[1:5], "big") != len(body) - 5:
        return None
    return body[5:]


def answered(stream: int, message: bytes) -> tuple[bytes, bytes, bytes]:
    """Headers, data and trailers of an answer: the first and the last as frames."""
    before, after = _around(stream)
    return before, b"\0" + len(message).to_bytes(4, "big") + message, after


def failed(stream: int, status: int, why: str) -> bytes:
    """An answer that is only a status, as a frame."""
    told = quote(why[:4096], safe=_PLAIN).encode()
    block = frames.header_block(((b"grpc-status", str(status).encode()), (b"grpc-message", told)))
    return frames.frame(frames.HEADERS, _HEADERS_ONLY, stream, _OPENING + block)


@lru_cache(maxsize=256)
def _around(stream: int) -> tuple[bytes, bytes]:
    return (
        frames.frame(frames.HEADERS, frames.END_HEADERS, stream, _OPENING),
        frames.frame(frames.HEADERS, _HEADERS_ONLY, stream, _CLOSING),
    )
