"""ZeroMQ without libzmq: a DEALER's connection to a ROUTER over a socket that the caller's thread reads and writes.

libzmq passes each message to its own I/O thread, and receives each answer through it. For a request of less than a
tenth of a millisecond, these two wake-ups are most of the client's cost. So if the native core is available and CURVE
is not used, the caller's thread reads and writes the socket itself (native/serving/zmtp.hpp). The peer sees no
difference.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from typing import TYPE_CHECKING

from jurybox.protocol.descriptors import exhausted, remedy
from jurybox.protocol.errors import TooManyFiles

try:
    from jurybox import native
except ImportError:  # without the native core, libzmq is used
    native = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from jurybox.native import Zmtp

_PATIENCE = 0.02  # seconds that a send waits for buffer space if no event loop watches the socket
_CONNECT = 0.1  # seconds to wait for space in an engine's listen queue


def can_dial(address: str) -> bool:
    """Return whether `dial` can connect: the native core is available, and the address is ipc:// or tcp://."""
    return native is not None and address.startswith(("ipc://", "tcp://"))


def dial(address: str, identity: bytes, most: int, attempt: int = 0) -> Zmtp | None:
    """Connect to a ROUTER; return None if nothing is listening there. The first calls complete the handshake.

    Args:
        address: ipc://path or tcp://host:port.
        identity: the routing id; empty: the peer assigns one.
        most: maximum length of a received frame in bytes.
        attempt: number of the attempt; successive attempts try a host's addresses in turn.

    Raises:
        TooManyFiles: this process may open no more files.
    """
    made = None
    try:
        made = _local(address.removeprefix("ipc://")) if address.startswith("ipc://") else _remote(address, attempt)
        # From here on only the link owns the descriptor: closing it twice could close another file.
        descriptor = made.detach()
        try:
            return native.Zmtp(descriptor, identity, most, _PATIENCE)
        except (RuntimeError, MemoryError):  # the link has not taken ownership
            os.close(descriptor)
            raise
    except OSError as error:
        if exhausted(error):
            raise TooManyFiles(f"no socket to {address}: {remedy()}") from error
        return None
    except RuntimeError as error:  # the native core could not create its epoll descriptor
        raise TooManyFiles(f"no socket to {address}: {remedy()}") from error
    finally:
        if made is not None:
            made.close()


def _local(path: str) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # If many clients connect at once, wait for space in the listen queue.
        made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", 0, int(_CONNECT * 1e6)))
        made.connect("\0" + path[1:] if path.startswith("@") else path)
    except BaseException:
        made.close()
        raise
    return made


def _remote(address: str, attempt: int) -> socket.socket:
    """Return a socket that is connecting, without waiting for the peer."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    family, kind, protocol, _, where = found[attempt % len(found)]
    made = socket.socket(family, kind, protocol)
    try:
        made.setblocking(False)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if (why := made.connect_ex(where)) not in (0, errno.EINPROGRESS):
            raise OSError(why, os.strerror(why))
    except BaseException:
        made.close()
        raise
    return made
