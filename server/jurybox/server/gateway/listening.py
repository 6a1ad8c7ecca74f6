"""The sockets the gateway listens on, and why one cannot be had."""

from __future__ import annotations

import errno
import socket

from jurybox.server.endpoints import split_host

_BACKLOG = 512


class CannotListen(OSError):
    """The address cannot be had; the message says why and which setting to change."""


def listen(address: str, setting: str = "http") -> socket.socket:
    """A listening socket for "host:port"; port 0 takes a free one.

    Args:
        setting: whose address it is, "http" or "grpc", for messages.

    Raises:
        CannotListen: the port is taken, or the host is not this one.
    """
    host, port = split_host(address)
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # back at once after a kill
            listener.bind(where)
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        why = f"port {port} is in use by another program" if taken else error.strerror or str(error)
        name = {"http": "HTTP", "grpc": "gRPC"}[setting]
        raise CannotListen(
            f"cannot listen on {setting}://{address}: {why}; set server.{setting} to another host:port, or to '' for "
            f"no {name}"
        ) from error
    return listener


def bound_name(host: str, port: int) -> str:
    """ "host:port", with the brackets that IPv6 wants."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
