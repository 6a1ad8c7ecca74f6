"""Messages of an engine's ZeroMQ transport: a prefix, and the records after it.

The prefix is two bytes: "J" and the protocol's version. A peer of another version gets an error that names both
versions. It is followed by one record, little-endian and without padding: TICKET to an engine, and from
it PACK_REPLY with the message, UTF-8, of a failure. docs/protocol.md has both as tables.
"""

from __future__ import annotations

import functools
import struct

import numpy as np

from jurybox.protocol.errors import Code, ModelNotFound, Refused, plain

PROTOCOL_VERSION = 2
PREFIX = b"J" + bytes([PROTOCOL_VERSION])
MAX_CONTROL = 1 << 20  # bytes of a control request's body: libzmq drops the whole connection of who sends more
MAX_NAME = 128  # characters of a model's name


def require_name(name: str) -> None:
    """Raise for an invalid model name. Every transport checks names with it.

    Raises:
        ModelNotFound: it is longer than MAX_NAME, or holds what UTF-8 cannot carry.
    """
    if len(name) > MAX_NAME:
        raise ModelNotFound(
            f"a model's name has at most {MAX_NAME} characters, one of {len(name)} came: {plain(name[:40])!r}..."
        )
    if plain(name) != name:
        raise ModelNotFound(f"no model is named {plain(name)!r}: that is no text which UTF-8 can carry")


def require_control_size(body: bytes) -> None:
    """Refuse a control request that is too large to be passed on. Raises Refused (code TOO_LARGE)."""
    if len(body) > MAX_CONTROL:
        raise Refused(f"a control request has at most {MAX_CONTROL} bytes, {len(body)} came", Code.TOO_LARGE)


@functools.cache
def build_version() -> str:
    """The installed distribution's version."""
    from importlib.metadata import PackageNotFoundError, version  # half of what importing the client would cost

    try:
        return version("jurybox")
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "0+source"


def prefix_error(frame: bytes) -> str | None:
    """The problem with a message's prefix; None if it is valid."""
    if frame[:2] == PREFIX:
        return None
    if frame[:1] == b"J" and len(frame) > 1:
        return (
            f"protocol version {frame[1]} came, {PROTOCOL_VERSION} is spoken here "
            f"(jurybox {build_version()}): install the same jurybox on both sides"
        )
    return f"{len(frame)} bytes came that begin with {frame[:8]!r}: expected a Jurybox message ({PREFIX!r} first)"


# A ticket, 64 bytes, the same record in native/serving/tickets.hpp.
TICKET = np.dtype(
    [
        ("sequence", "<u8"),
        ("lease", "<u8"),
        ("deadline", "<i8"),  # ns of CLOCK_MONOTONIC, 0: none
        ("submitted", "<i8"),  # ns of CLOCK_MONOTONIC
        ("lane", "<u4"),
        ("first", "<u4"),
        ("rows", "<u4"),
        ("model", "<u4"),
        ("version", "<u8"),  # asked for; 0: the newest
        # On the way to an engine these eight bytes are its incarnation, the life of it that is meant.
        ("transport", "<u4"),
        ("code", "<u4"),  # 0, or why it was refused on arrival
    ]
)
PACK_TICKET = struct.Struct("<QQqqIIIIQQ")  # the last: incarnation
assert TICKET.itemsize == PACK_TICKET.size == 64
TICKET_FRAME = len(PREFIX) + PACK_TICKET.size

# sequence, weights version, the engine's incarnation, code of errors.py; sequence 0: the message was no ticket.
PACK_REPLY = struct.Struct("<QQQI")

# ZeroMQ identity of a lane's client: the reply's address follows from the ticket itself.
IDENTITY = struct.Struct("<cIQ")


def lane_identity(lane: int, lease: int) -> bytes:
    """The ZeroMQ routing id under which the holder of a lease connects to engines."""
    return IDENTITY.pack(b"L", lane, lease)
