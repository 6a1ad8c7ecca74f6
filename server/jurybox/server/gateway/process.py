"""The gateway process: it reads its settings from the control pipe, and serves until a stop or the pipe's end."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from jurybox import native
from jurybox.processes import ControlPipe, configuration, keep_freed_memory, signs_of_life, stop_event
from jurybox.protocol.address import is_loopback
from jurybox.protocol.errors import said
from jurybox.server.frontend.frontend import Frontend
from jurybox.server.frontend.sequences import IDLE, SESSIONS_SHARE
from jurybox.server.frontend.source import ClientSource, StatusSource
from jurybox.server.gateway.app import create_app
from jurybox.server.gateway.http_server import HttpServer
from jurybox.server.gateway.inference import http_inference
from jurybox.server.gateway.inference.http_forms import connection_of
from jurybox.server.gateway.inference.inference import OpenInference
from jurybox.server.logs import Log, LogLimiter, configure
from jurybox.server.security.access import Access
from jurybox.server.security.doors import Doors, refusal
from jurybox.server.security.handshakes import WithHandshakes
from jurybox.server.security.limits import Watch
from jurybox.server.security.pace import Turns
from jurybox.server.settings.endpoints import split_host

if TYPE_CHECKING:
    from jurybox.server.gateway.dialects.router import DialectRoutes
    from jurybox.server.gateway.grpc_server import GrpcServer
    from jurybox.server.gateway.robots.door import RobotDoor

_SWITCH = 0.0005  # switch interval, s: a busy loop delays the thread that receives answers by it (Python's: 5 ms)
_KEPT = 64 << 20  # bytes of freed memory kept for messages and images: mapping it anew costs as much as decoding one
_REPORTED = 1.0  # seconds between two lines of one kind that clients cause
_LOOK = 0.005  # seconds between two looks whether everything is answered
STOPPED, FAILED, COULD_NOT_START = 0, 1, 3


async def serve(control_pipe: ControlPipe, orders: dict[str, Any], log: Log) -> int:
    """Serve until the control pipe brings the order to stop, or ends; return the exit status.

    The order to drain comes before: from then on new requests are refused, and "drained" is reported as soon as all
    others are answered.
    """
    doors = Doors()
    source = ClientSource(orders["address"])
    routes: DialectRoutes | None = None
    endpoints = [orders[name] for name in ("http", "grpc") if orders[name]]
    local = all(is_loopback(split_host(endpoint)[0]) for endpoint in endpoints)
    access = Access(**orders.get("access", {}))
    budget = access.budget()
    frontend = Frontend(
        orders["address"],
        source,
        idle=orders.get("sequence_idle", IDLE),
        sessions_share=orders.get("sessions_share", SESSIONS_SHARE),
        panels=orders.get("panels", {}),
    )
    turns = Turns(frontend.lanes.pace.debt)
    # Shared memory is off if clients on other hosts can connect, whatever the settings: they could name regions of this
    # host.
    oip = OpenInference(
        frontend,
        source,
        shared_memory=access.shared_memory_prefix if local else "",
        cuda_shared_memory=access.cuda_shared_memory and local,
    )
    try:
        routers = [http_inference.router(oip, most=access.max_message, turns=turns, doors=doors)]
        keep_freed_memory(_KEPT)
        if orders.get("dialects"):
            # Imported here because it imports Pillow.
            from jurybox.server.gateway.dialects.router import DialectPaths, applications

            routes = applications(orders["dialects"], frontend, log, doors, turns)
            routers.append(routes.paths)
        robots = _robot_doors(orders, frontend, access, doors, budget, turns)
        counters = {name: robot.counters for name, robot in robots.items()}
        runs = Path(orders["runs"]) if orders.get("runs") else None
        app = create_app(source, frontend.reasons, routers, counters, frontend.lanes.timeouts, budget, turns, runs)
        http = None
        if orders["http"]:
            whole = app if routes is None else DialectPaths(app, routes.endpoints)
            refusals = None if routes is None else routes.refusals
            protocol = connection_of(oip, access.max_message, refusals, doors)
            http = HttpServer(orders["http"], whole, access, "server.http", protocol, budget, refusals, doors, turns)
        dialects = {}
        for name, (its_app, refusals) in (routes.ports if routes else {}).items():
            listen = orders["dialects"][name]["listen"]
            protocol = connection_of(oip, access.max_message, refusals, doors)
            dialects[name] = HttpServer(
                listen, its_app, access, f"dialects.{name}.port", protocol, budget, refusals, doors, turns
            )
        rpc = _grpc_server(orders, oip, source, access, doors, budget, turns) if orders["grpc"] else None
        for robot in robots.values():
            await robot.start()
    except (OSError, ValueError, ImportError) as error:
        control_pipe.send("failed", reason=str(error))
        return COULD_NOT_START
    stop = stop_event(
        control_pipe, lambda kind: doors.close() if kind == "drain" else log.warning("unknown order", order=kind)
    )
    asyncio.get_running_loop().set_exception_handler(lambda _, context: _broke(context, frontend, log))
    if rpc is not None:
        await rpc.start()
    # The HTTP socket is listening already: clients that connect from now on are answered.
    bound: dict[str, Any] = {
        "http": http.bound if http else "",
        "grpc": rpc.bound if rpc else "",
        "grpc_http2": rpc.http2 if rpc else "",
    }
    if robots:
        bound["robots"] = {name: robot.bound for name, robot in robots.items()}
    if dialects:
        bound["dialects"] = {name: server.bound for name, server in dialects.items()}
    control_pipe.send("ready", port=http.port if http else 0, **bound)
    log.debug("listening", **bound)
    watched = [door.connections for door in (http, *dialects.values(), rpc, *robots.values()) if door is not None]
    watching = asyncio.create_task(Watch(budget, watched).run())
    leasing = [asyncio.create_task(intake.lease()) for intake in (routes.intakes if routes else ())]
    reporting = asyncio.create_task(_flushed(routes.reports)) if routes else None
    serving = [server for server in (http, *dialects.values()) if server is not None]

    ends = [door.ended for door in (rpc, *robots.values()) if door is not None]

    def end_streams() -> None:
        app.state.watching.close()
        if rpc is not None:
            rpc.drain()

    def close() -> None:
        doors.close()
        end_streams()
        frontend.give_up(refusal())  # nothing is left after a drain that was in time

    doorways: list[_Doorway] = [*serving, *robots.values(), *([rpc] if rpc is not None else [])]
    draining = asyncio.create_task(_drained(doors, doorways, end_streams, control_pipe))
    try:
        async with signs_of_life(control_pipe):
            served = await _until(stop, serving, close, ends)
    finally:
        draining.cancel()
        for task in (watching, reporting, *leasing):
            if task is not None:
                task.cancel()
        if rpc is not None:
            await rpc.stop()
        await asyncio.gather(*(robot.stop() for robot in robots.values()))
        frontend.close()
        oip.close()
        await source.close()
    return STOPPED if served else FAILED


def _grpc_server(
    orders: dict[str, Any],
    oip: OpenInference,
    source: StatusSource,
    access: Access,
    doors: Doors,
    budget: native.Budget,
    turns: Turns,
) -> GrpcServer:
    # Imported here: without gRPC the import would waste memory and start-up time.
    from jurybox.protocol import control_pb2, control_pb2_grpc
    from jurybox.server.gateway import remote_weights
    from jurybox.server.gateway.grpc_server import GrpcServer, Service, Status
    from jurybox.server.gateway.inference import grpc_inference

    add: Any = control_pb2_grpc.add_ServerStatusServicer_to_server
    status = Service("jurybox.protocol.ServerStatus", control_pb2.DESCRIPTOR, Status(source), add)
    services = [
        grpc_inference.service(oip, budget, doors),
        remote_weights.service(orders["address"], doors),
        status,
    ]
    http2 = orders.get("grpc_http2", "auto")
    return GrpcServer(orders["grpc"], services, oip.reasons, access, http2, doors, budget, turns)


def _robot_doors(
    orders: dict[str, Any], frontend: Frontend, access: Access, doors: Doors, budget: native.Budget, turns: Turns
) -> dict[str, RobotDoor]:
    if not (robots := orders.get("robots")):
        return {}
    from jurybox.server.gateway.robots.door import door

    http2 = orders.get("grpc_http2", "auto")
    return {
        name: door(name, {**settings, "grpc_http2": http2}, frontend, access, doors, budget, turns)
        for name, settings in robots.items()
    }


async def _flushed(reports: LogLimiter) -> None:
    """Log every second what has come since the last line of its kind."""
    while True:
        await asyncio.sleep(_REPORTED)
        reports.flush()


class _Doorway(Protocol):
    @property
    def busy(self) -> bool: ...


async def _drained(
    doors: Doors, doorways: Sequence[_Doorway], end_streams: Callable[[], None], control_pipe: ControlPipe
) -> None:
    """Wait until the doors close, and report when all that was accepted is answered."""
    await doors.closing.wait()
    end_streams()
    while any(doorway.busy for doorway in doorways):  # noqa: ASYNC110  many things end it
        await asyncio.sleep(_LOOK)
    control_pipe.send("drained")


async def _until(
    stop: asyncio.Event, servers: Sequence[HttpServer], close: Callable[[], None], ended: Sequence[asyncio.Event]
) -> bool:
    """Serve until `stop` is set or one of the servers ends by itself; return whether all of them served without fault.

    Args:
        close: called then; it ends streams, and refuses what is not answered.
        ended: are set when other doors have ended by themselves.
    """
    running = [asyncio.create_task(server.run()) for server in servers]
    stopping = asyncio.create_task(stop.wait())
    ends = [asyncio.create_task(one.wait()) for one in ended]
    await asyncio.wait((*running, *ends, stopping), return_when=asyncio.FIRST_COMPLETED)
    for task in (*ends, stopping):
        task.cancel()
    broken = any(one.is_set() for one in ended)
    close()
    for server in servers:
        server.stop()
    return all(await asyncio.gather(*running)) and not broken


def _broke(context: dict[str, Any], frontend: Frontend, log: Log) -> None:
    """Handle an uncaught exception in the event loop: log it, and check for lost answers."""
    error = context.get("exception")
    if isinstance(error, (ConnectionError, BlockingIOError)):  # a disconnected client; a spurious wake-up in gRPC
        return
    log.error("unexpected", what=context.get("message", ""), error=said(error) if error else "", exc_info=error)
    if "handle" in context:
        frontend.doubt()  # an answer may be lost


def _loop() -> asyncio.AbstractEventLoop:
    """Return a uvloop event loop, which makes a gRPC call a tenth cheaper, or asyncio's where uvloop is missing."""
    try:
        from uvloop import Loop
    except ImportError:
        from asyncio import SelectorEventLoop as Loop  # type: ignore[assignment]
    loop: asyncio.AbstractEventLoop = type("Loop", (WithHandshakes, Loop), {})()
    return loop


def run(control_pipe: ControlPipe, ahead: Sequence[str] = ()) -> int:
    """Run the gateway, configured by the first message of the control pipe; return the exit status.

    Args:
        ahead: names of modules to import before waiting for that message.
    """
    for module in ahead:
        import_module(module)
    orders = configuration(control_pipe)
    if orders is None:
        return STOPPED
    sys.setswitchinterval(_SWITCH)
    os.environ.setdefault("JURYBOX_SPIN_US", "0")  # a thread that spins for answers would take CPU time from the calls
    log = configure("gateway", orders["log_level"], orders["log_format"])
    try:
        with asyncio.Runner(loop_factory=_loop) as runner:
            return runner.run(serve(control_pipe, orders, log))
    except BrokenPipeError:  # the supervisor exited during a `send`
        return STOPPED


def leave(status: int) -> None:
    """Exit at once, without joining threads that may be waiting for a server."""
    os._exit(status)
