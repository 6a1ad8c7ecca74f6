"""The relay's process: settings from the control pipe, then an event loop until told to stop, or the server is gone."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path
from typing import Any

import zmq

from jurybox.client.local_link import LocalLink
from jurybox.processes import ControlPipe, configuration, keep_freed_memory, signs_of_life, stop_event
from jurybox.protocol.errors import ServerGone
from jurybox.server.logs import Log, configure
from jurybox.server.relay.open_front import OpenFront
from jurybox.server.relay.relay import Relay
from jurybox.server.relay.remote_clients import Front

_CONNECT = 10.0  # seconds for the server's own transport
_MOST_REPLY = 64 << 20  # bytes of what the supervisor says, whatever clients may send: a status document grows
_LOOK_AFTER = 0.1  # seconds between two looks at engines
_RECLAIM = 1.0  # seconds between two looks whether clients are there
_KEPT = 8 << 20  # bytes that stay with the process: what the largest messages pass through
_FIRST_TO_DIE = 500  # of -1000..1000: where memory runs out, the kernel ends this process before an engine
STOPPED, FAILED, COULD_NOT_START = 0, 1, 3


async def serve(control_pipe: ControlPipe, orders: dict[str, Any], log: Log) -> int:
    """Serve until the control pipe says stop, or ends; returns the exit status."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        front = _front(context, orders)
    except (zmq.ZMQError, OSError, ValueError) as error:
        control_pipe.send("failed", reason=f"cannot listen on tcp://{orders['tcp']}: {error}; see server.tcp")
        return COULD_NOT_START
    link = await asyncio.to_thread(LocalLink, orders["address"], "auto", _CONNECT)
    back = context.socket(zmq.DEALER)
    back.setsockopt(zmq.LINGER, 0)
    back.setsockopt(zmq.MAXMSGSIZE, _MOST_REPLY)
    back.connect(orders["address"])
    relay = Relay(front, back, link, log.warning)
    stop = stop_event(control_pipe, lambda kind: log.warning("unknown order", order=kind))
    control_pipe.send("ready", tcp=front.bound)
    log.debug("listening", tcp=front.bound)
    try:
        async with signs_of_life(control_pipe):
            await _until(stop, relay)
    except ServerGone:
        return STOPPED
    finally:
        relay.close()
        link.close()
        back.close()
        front.close()
        context.destroy(linger=0)
    return STOPPED


def _front(context: zmq.Context[zmq.Socket[bytes]], orders: dict[str, Any]) -> Front | OpenFront:
    """libzmq speaks CURVE, and knows network interfaces by name; all else goes without its thread."""
    if orders["curve_key"] is None:
        with contextlib.suppress(socket.gaierror):
            return OpenFront(orders["tcp"], orders["max_message"])
    return Front(context, orders["tcp"], orders["curve_key"], orders["curve_clients"], orders["max_message"])


async def _until(stop: asyncio.Event, relay: Relay) -> None:
    loop = asyncio.get_running_loop()
    reclaim_at = loop.time() + _RECLAIM
    while not stop.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), _LOOK_AFTER)
        relay.look_after()
        if loop.time() >= reclaim_at:
            relay.reclaim()
            reclaim_at = loop.time() + _RECLAIM


def run(control_pipe: ControlPipe) -> int:
    """The relay's main: the first message configures it."""
    orders = configuration(control_pipe)
    if orders is None:
        return STOPPED
    keep_freed_memory(_KEPT)
    log = configure("relay", orders["log_level"], orders["log_format"])
    with contextlib.suppress(OSError):  # some containers forbid it; then the kernel chooses as it likes
        Path("/proc/self/oom_score_adj").write_text(str(_FIRST_TO_DIE))
    try:
        return asyncio.run(serve(control_pipe, orders, log))
    except BrokenPipeError:  # the supervisor went while it was being told something
        return STOPPED
