"""Addresses that a server listens on: checks of "host:port" and ZeroMQ addresses, and sockets for its own user."""

from __future__ import annotations

import errno
import os
import re
import socket

import zmq

from jurybox.protocol.address import ipc_path
from jurybox.protocol.scoreboard import MAX_ENGINES

# sun_path has 107 bytes and a null byte (unix(7)); an engine's socket is the server's path with its number appended.
_PATH_BYTES = 107 - len(f"-{MAX_ENGINES - 1}")
_HOST_PORT = re.compile(r"(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<host>[^\s:\[\]/]+)):(?P<port>\d{1,5})", re.ASCII)


def split_host(text: str) -> tuple[str, int]:
    """Return host and port of "host:port" or "[ipv6]:port". Raises ValueError."""
    match = _HOST_PORT.fullmatch(text)
    if match is None or int(match["port"]) > 65535:
        raise ValueError('expected "host:port", such as "127.0.0.1:8000" or "[::1]:8000"')
    return match["six"] or match["host"], int(match["port"])


def bound_name(host: str, port: int) -> str:
    """Return "host:port", with brackets for IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_host_port(text: str) -> str:
    """Validate a "host:port". Raises ValueError."""
    split_host(text)
    return text


def check_listen(text: str) -> str:
    """Validate a "host:port", or "" for off. Raises ValueError."""
    if text:
        try:
            split_host(text)
        except ValueError as error:
            raise ValueError(f'{error}, or "" for off') from error
    return text


def check_address(text: str) -> str:
    """Validate an address that a server can bind. Raises ValueError."""
    if (path := ipc_path(text)) is not None:
        if not path.is_absolute() or path.name in ("", ".."):
            raise ValueError('expected an absolute path, such as "ipc:///run/jurybox/engine"')
        if len(os.fsencode(path)) > _PATH_BYTES:
            raise ValueError(f"expected a path of at most {_PATH_BYTES} bytes, as sockets have: use a shorter folder")
        return text
    if not text.startswith("tcp://"):
        raise ValueError('expected "ipc:///absolute/path" or "tcp://host:port"')
    try:
        _, port = split_host(text.removeprefix("tcp://"))
    except ValueError as error:
        raise ValueError('expected "tcp://host:port", such as "tcp://10.0.0.5:5555"') from error
    if not port:
        raise ValueError("expected a port of 1 to 65535: clients must know where to connect")
    return text


_BACKLOG = 512
# By setting: the scheme of its addresses, and what they are for.
_DOORS = {"server.http": ("http", "HTTP"), "server.grpc": ("grpc", "gRPC"), "server.tcp": ("tcp", "relay")}


class CannotListen(OSError):
    """The address cannot be bound; the message says why and which setting to change."""


def listen(address: str, setting: str) -> socket.socket:
    """Bind and listen on "host:port"; port 0 selects a free port.

    Args:
        setting: the setting that the address comes from, for messages: "server.http", "server.grpc", "server.tcp",
            "robots.NAME.listen" or "dialects.NAME.port".

    Raises:
        CannotListen: the port is in use, or the address is not one of this host; `__cause__` is the error.
    """
    host, port = split_host(address)
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # bind at once after a restart
            listener.bind(where)
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        why = f"port {port} is in use by another program" if taken else error.strerror or str(error)
        if setting in _DOORS:
            scheme, what = _DOORS[setting]
            remedy = f"set {setting} to another host:port, or to '' for no {what}"
        else:
            scheme, remedy = ("" if setting.startswith("robots") else "http"), f"set another {setting}"
        named = f"{scheme}://{address}" if scheme else address
        raise CannotListen(f"cannot listen on {named}: {why}; {remedy}") from error
    return listener


def bind_for_own_user(socket: zmq.Socket[bytes], address: str) -> None:
    """Bind a ZeroMQ socket. An ipc socket has mode 0600 from its creation on and accepts only this user and root.

    Raises:
        zmq.ZMQError: as bind.
    """
    path = ipc_path(address)
    if path is None:
        socket.bind(address)
        return
    for user in {os.getuid(), 0}:
        socket.setsockopt(zmq.IPC_FILTER_UID, user)  # checked by SO_PEERCRED, independent of the file's mode
    before = os.umask(0o177)
    try:
        socket.bind(address)
    finally:
        os.umask(before)
    path.chmod(0o600)  # a default ACL of the folder may have extended it
