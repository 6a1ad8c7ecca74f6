"""The relay's process: it reads its settings from the control pipe and runs an event loop until it is stopped."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import threading
from pathlib import Path
from typing import Any

import zmq

from jurybox.client.local_link import LocalLink
from jurybox.processes import ControlPipe, configuration, keep_freed_memory, signs_of_life, stop_event
from jurybox.protocol.errors import ServerGone
from jurybox.server.logs import Log, configure
from jurybox.server.memory import FreedMemory
from jurybox.server.relay.relay import Relay
from jurybox.server.relay.zmq_listener import ZmqListener
from jurybox.server.relay.zmtp_listener import ZmtpListener
from jurybox.server.security.limits import most_held

_CONNECT = 10.0  # seconds for the server's own transport
_MOST_REPLY = 64 << 20  # bytes of a supervisor's reply, independent of max_message: a status document may be large
_LOOK_AFTER = 0.1  # seconds between two checks of the engines
_RECLAIM = 1.0  # seconds between two checks whether clients are connected
_KEPT = 8 << 20  # bytes of freed memory that the process keeps, for the buffers of large messages
_OWN = 64 << 20  # bytes that the process may take besides what it holds for clients
_STACK = 256 << 10  # bytes of the stack of a thread that waits for engines' answers: those count, and 8 MiB are usual
_SPARE = 16 << 20  # bytes that it must be able to take still, for threads and whatever else needs a mapping
_FULL = 3  # checks in a row that find less: what was freed stays the allocator's, and no more will come
_FIRST_TO_DIE = 500  # of -1000..1000: when memory runs out, the kernel kills this process before an engine
STOPPED, FAILED, COULD_NOT_START = 0, 1, 3


async def serve(control_pipe: ControlPipe, orders: dict[str, Any], log: Log) -> int:
    """Serve until the control pipe orders a stop or is closed, or the server is gone; return the exit status."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    # Lanes are not released: the supervisor, which waits for this process, answers nobody. Their locks end with it.
    with contextlib.ExitStack() as ends:
        ends.callback(context.destroy, linger=0)
        try:
            front = _front(context, orders)
        except (zmq.ZMQError, OSError, ValueError) as error:
            control_pipe.send("failed", reason=f"cannot listen on tcp://{orders['tcp']}: {error}; see server.tcp")
            return COULD_NOT_START
        ends.callback(front.close)
        link = await asyncio.to_thread(LocalLink, orders["address"], "shm", _CONNECT)
        back = context.socket(zmq.DEALER)
        ends.callback(back.close)
        back.setsockopt(zmq.LINGER, 0)
        back.setsockopt(zmq.MAXMSGSIZE, _MOST_REPLY)
        back.connect(orders["address"])
        relay = Relay(front, back, link, log.warning, orders["sessions_share"])
        ends.callback(relay.end)
        most = _limit_memory(most_held(orders["max_message"]) + _OWN) if isinstance(front, ZmqListener) else None

        def obey(kind: str) -> None:
            if kind == "drain":
                relay.drain(lambda: control_pipe.send("drained"))
            else:
                log.warning("unknown order", order=kind)

        stop = stop_event(control_pipe, obey)
        control_pipe.send("ready", tcp=front.bound)
        log.debug("listening", tcp=front.bound)
        with contextlib.suppress(ServerGone):
            async with signs_of_life(control_pipe, lambda: {"relay": front.held()}):
                if not await _until(stop, relay, front, most):
                    log.warning("no memory left, it is restarted", limit_mib=(most or 0) >> 20)
                    return FAILED
        return STOPPED


def _front(context: zmq.Context[zmq.Socket[bytes]], orders: dict[str, Any]) -> ZmqListener | ZmtpListener:
    """Create the network socket. libzmq is used only for CURVE and for names of network interfaces."""
    if orders["curve_key"] is None:
        with contextlib.suppress(socket.gaierror):
            return ZmtpListener(orders["tcp"], orders["max_message"])
    return ZmqListener(context, orders["tcp"], orders["curve_key"], orders["curve_clients"], orders["max_message"])


def _limit_memory(more: int) -> int | None:
    """Let the process take at most so many bytes more: libzmq counts nothing of what arrives.

    Beyond that libzmq ends the connection whose message has no room, or the process, which is restarted.

    Returns:
        How many bytes it may have; None if there is no limit.
    """
    if (used := _taken()) is None:
        return None
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_DATA, (used + more, resource.getrlimit(resource.RLIMIT_DATA)[1]))
        threading.stack_size(_STACK)
        return used + more
    return None


def _taken() -> int | None:
    """Return how many bytes the kernel counts against the limit; None if it does not tell."""
    try:
        return int(Path("/proc/self/status").read_text().split("VmData:")[1].split()[0]) << 10
    except (OSError, ValueError, IndexError):
        return None


async def _until(stop: asyncio.Event, relay: Relay, front: ZmqListener | ZmtpListener, most: int | None) -> bool:
    """Look after the relay until it is to stop.

    Args:
        most: how many bytes the process may have; None: any number.

    Returns:
        False if it has taken them for good and could not even start a thread: then it must be started again.
    """
    loop, freed, full = asyncio.get_running_loop(), FreedMemory(), 0
    reclaim_at = loop.time() + _RECLAIM
    while not stop.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), _LOOK_AFTER)
        relay.look_after()
        if loop.time() >= reclaim_at:
            relay.reclaim()
            held = front.held()
            requests, answers = held.get("received", {}), held["answers"]
            freed.look(requests.get("bytes", 0) + answers["bytes"], held.get("connections", 0))
            full = full + 1 if most is not None and (_taken() or 0) > most - _SPARE else 0
            if full == _FULL:
                return False
            reclaim_at = loop.time() + _RECLAIM
    return True


def run(control_pipe: ControlPipe) -> int:
    """Run the relay until it is stopped; return the exit status. The first message on the pipe configures it."""
    orders = configuration(control_pipe)
    if orders is None:
        return STOPPED
    keep_freed_memory(_KEPT)
    log = configure("relay", orders["log_level"], orders["log_format"])
    with contextlib.suppress(OSError):  # some containers forbid it; then the kernel's default order applies
        Path("/proc/self/oom_score_adj").write_text(str(_FIRST_TO_DIE))
    try:
        return asyncio.run(serve(control_pipe, orders, log))
    except BrokenPipeError:  # the supervisor ended while a message was being sent to it
        return STOPPED
