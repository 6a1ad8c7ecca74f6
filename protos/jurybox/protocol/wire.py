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
MAX_CONTROL = 1 << 20  # bytes of a control request's body: libzmq drops the connection of a peer that sends more
MAX_NAME = 128  # characters of a model's name
BEREFT = 4.0  # seconds that a server still keeps a model whose client's connection has ended


def require_name(name: str) -> None:
    """Check a model name. Every transport uses this check.

    Raises:
        ModelNotFound: the name is longer than MAX_NAME, or cannot be encoded as UTF-8.
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
    """Return the version of the installed distribution."""
    from importlib.metadata import PackageNotFoundError, version  # here: it takes half of the client's import time

    try:
        return version("jurybox")
    except PackageNotFoundError:  # running from a source tree that is not installed
        return "0+source"


def prefix_error(frame: bytes) -> str | None:
    """Return the problem with a message's prefix; None if it is valid."""
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
        ("version", "<u8"),  # the requested weights version; 0: the newest
        # In a ticket to an engine these eight bytes are the engine's incarnation.
        ("transport", "<u2"),
        ("priority", "<u2"),  # of its lane, one of scoreboard.PRIORITIES
        ("code", "<u4"),  # 0, or the reason for which it was refused on arrival
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
    """Return the ZeroMQ routing id with which the holder of a lease connects to engines."""
    return IDENTITY.pack(b"L", lane, lease)
