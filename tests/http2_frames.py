"""Frames of HTTP/2 (RFC 9113) by hand, and calls of gRPC in them."""

from __future__ import annotations

import struct

DATA, HEAD, RESET, SETTINGS, PING, GOAWAY, WINDOW = 0, 1, 3, 4, 6, 7, 8  # kinds of frames


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HELLO = PREFACE + frame(SETTINGS, 0, 0)  # with which a client begins


def head(stream: int, path: bytes, *more: tuple[bytes, bytes]) -> bytes:
    """The beginning of a call, with more fields."""
    fields = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", path), (b":authority", b"here"),
              (b"content-type", b"application/grpc"), (b"te", b"trailers"), *more]  # fmt: skip
    literals = (b"\0" + bytes((len(name),)) + name + bytes((len(value),)) + value for name, value in fields)
    return frame(HEAD, 4, stream, b"".join(literals))


def data_frame(stream: int, content: bytes, *, compressed: bool = False, ends: bool = True) -> bytes:
    """A message of a call; `ends`: it is the last one."""
    return frame(DATA, int(ends), stream, bytes((compressed,)) + struct.pack(">I", len(content)) + content)
