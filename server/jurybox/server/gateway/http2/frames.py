"""Frames and header blocks of HTTP/2 (RFC 9113 section 4 and 6, RFC 7541)."""

from __future__ import annotations

import struct
from collections.abc import Iterable

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
ACK = END_STREAM = 0x1
END_HEADERS, PADDED, WITH_PRIORITY = 0x4, 0x8, 0x20

# Settings (6.5.2) and errors (7) by number.
HEADER_TABLE_SIZE, ENABLE_PUSH, MAX_STREAMS, INITIAL_WINDOW, MAX_FRAME = 1, 2, 3, 4, 5
NO_ERROR, PROTOCOL_ERROR, FLOW_CONTROL_ERROR, FRAME_SIZE_ERROR = 0x0, 0x1, 0x3, 0x6
REFUSED_STREAM, CANCEL, COMPRESSION_ERROR, ENHANCE_YOUR_CALM = 0x7, 0x8, 0x9, 0xB

LARGEST_WINDOW = 2**31 - 1
DEFAULT_WINDOW = 65535
SMALLEST_MAX_FRAME, LARGEST_MAX_FRAME = 1 << 14, (1 << 24) - 1

_HEAD = struct.Struct(">HBBBI")  # length in 16 + 8 bits, type, flags, stream
_SETTING = struct.Struct(">HI")
WORD = struct.Struct(">I")


class Broken(Exception):
    """The peer broke the protocol; the connection ends with this error code."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """One frame."""
    length = len(payload)
    return _HEAD.pack(length >> 8, length & 0xFF, kind, flags, stream) + payload


def settings(values: Iterable[tuple[int, int]]) -> bytes:
    """A SETTINGS frame."""
    return frame(SETTINGS, 0, 0, b"".join(_SETTING.pack(*value) for value in values))


def read_settings(payload: bytes) -> list[tuple[int, int]]:
    """What a SETTINGS frame says. Raises Broken."""
    if len(payload) % _SETTING.size:
        raise Broken(FRAME_SIZE_ERROR, "a SETTINGS frame of odd length")
    return list(_SETTING.iter_unpack(payload))


def window_update(stream: int, size: int) -> bytes:
    """A WINDOW_UPDATE frame; stream 0 is the connection."""
    return frame(WINDOW_UPDATE, 0, stream, WORD.pack(size))


def reset(stream: int, code: int) -> bytes:
    """A RST_STREAM frame."""
    return frame(RST_STREAM, 0, stream, WORD.pack(code))


def without_padding(flags: int, payload: bytes) -> bytes:
    """The payload of a DATA or HEADERS frame without its padding. Raises Broken."""
    if not flags & PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise Broken(PROTOCOL_ERROR, "more padding than frame")
    return payload[1 : len(payload) - payload[0]]


def header_block(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Headers as literals that change no table (RFC 7541 section 6.2.2): whoever decodes them needs no history."""
    parts: list[bytes] = []
    for name, value in headers:
        parts += (b"\x00", _length(len(name)), name, _length(len(value)), value)
    return b"".join(parts)


def _length(size: int) -> bytes:
    """An integer with a prefix of seven bits (RFC 7541 section 5.1), its first bit 0: no Huffman code."""
    if size < 127:
        return bytes((size,))
    parts, size = [127], size - 127
    while size >= 128:
        parts.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes((*parts, size))
