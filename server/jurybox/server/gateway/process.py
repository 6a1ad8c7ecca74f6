"""The gateway's process: settings from the lifeline, HTTP until told to stop, or until the supervisor is gone."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import Generator
from typing import Any

import uvicorn

from jurybox.server.endpoints import split_host
from jurybox.server.gateway.app import create_app
from jurybox.server.gateway.source import ClientSource
from jurybox.server.lifeline import Lifeline
from jurybox.server.logs import Log, configure

_CONFIGURED = 30.0  # seconds to wait for the first message
_GRACE = 2  # seconds that requests in progress get when the gateway stops
_BACKLOG = 512
STOPPED, FAILED, COULD_NOT_START = 0, 1, 3


class CannotListen(OSError):
    """The HTTP address cannot be had; the message says why and what to change."""


def listen(http: str) -> socket.socket:
    """A listening socket for "host:port"; port 0 takes a free one."""
    host, port = split_host(http)
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
        raise CannotListen(
            f"cannot listen on http://{http}: {why}; set server.http to another host:port, or to '' for no HTTP"
        ) from error
    return listener


class _Http(uvicorn.Server):
    """uvicorn without a say over signals: what a terminal's Ctrl-C means is the supervisor's to decide."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


async def serve(lifeline: Lifeline, orders: dict[str, Any], log: Log) -> int:
    """Serve until the lifeline says stop, or ends; gives the exit status."""
    try:
        listener = listen(orders["http"])
    except (CannotListen, ValueError) as error:
        lifeline.send("failed", reason=str(error))
        return COULD_NOT_START
    source = ClientSource(orders["address"])
    app = create_app(source)
    http = _Http(
        uvicorn.Config(
            app,
            log_config=None,  # its records go where ours go
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=_GRACE,
        )
    )

    def stop() -> None:
        http.should_exit = True
        app.state.watching.close()

    def heard() -> None:
        try:
            while (message := lifeline.receive(0)) is not None:
                if message["kind"] == "stop":
                    stop()
                else:
                    log.warning("unknown order", order=message["kind"])
        except (EOFError, OSError):
            asyncio.get_running_loop().remove_reader(lifeline.fileno())
            stop()

    asyncio.get_running_loop().add_reader(lifeline.fileno(), heard)
    host, port = listener.getsockname()[:2]
    bound = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    # The socket listens already: whoever connects from now on is answered.
    lifeline.send("ready", http=bound, port=port)
    log.debug("listening", http=bound)
    try:
        await http.serve(sockets=[listener])
    finally:
        await source.close()
    return STOPPED if http.started else FAILED


def run(lifeline: Lifeline) -> int:
    """The gateway's main: the first message configures it."""
    try:
        orders = lifeline.receive(_CONFIGURED)
    except EOFError:
        return STOPPED
    if orders is None or orders["kind"] != "configure":
        return COULD_NOT_START
    log = configure("gateway", orders["log_level"], orders["log_format"])
    try:
        return asyncio.run(serve(lifeline, orders, log))
    except BrokenPipeError:  # the supervisor went while it was being told something
        return STOPPED


def leave(status: int) -> None:
    """End now: a thread that still waits for a server's answer must not hold the process back."""
    os._exit(status)
