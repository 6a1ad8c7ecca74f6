"""The gRPC server, its health service and the status service.

Health is grpc.health.v1, which load balancers and orchestrators use
(github.com/grpc/grpc/blob/master/doc/health-checking.md). Readiness is determined for each check, and while a client
watches.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

from jurybox import native
from jurybox.protocol.control_pb2 import StatusMessage, StatusRequest
from jurybox.server.frontend.source import StatusSource
from jurybox.server.gateway.grpc_calls import Calls
from jurybox.server.security.access import Access
from jurybox.server.security.doors import Doors
from jurybox.server.security.grpc import Direct, Guarding, interceptors, limits, open_port
from jurybox.server.security.limits import Limited
from jurybox.server.security.pace import Turns
from jurybox.server.settings.endpoints import CannotListen, bound_name, listen, split_host

Readiness = Callable[[], Awaitable[list[str]]]

_log = logging.getLogger("jurybox.gateway.grpc")
_EVERY = 0.5  # seconds between two readiness checks for a watching client


class HealthService(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # grpcio-health-checking has no types
    """Health of the server ("") and of each of its services, which all become ready together.

    Args:
        services: full names of the services.
        readiness: returns why the server is not ready; empty if it is.
    """

    def __init__(self, services: Sequence[str], readiness: Readiness) -> None:
        self._known = frozenset(("", *services))
        self._readiness = readiness
        self._stopped = asyncio.Event()

    async def Check(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        """Return the health once; NOT_FOUND for an unknown service, as the protocol requires."""
        if request.service not in self._known:
            await context.abort(grpc.StatusCode.NOT_FOUND, self._unknown(request.service))
        return health_pb2.HealthCheckResponse(status=await self._status())

    async def Watch(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        """Stream the health now and at every change."""
        said = None
        while not self._stopped.is_set():
            if request.service in self._known:
                status = await self._status()
            else:
                status = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
            if status != said:
                said = status
                yield health_pb2.HealthCheckResponse(status=status)
            try:
                await asyncio.wait_for(self._stopped.wait(), _EVERY)
            except TimeoutError:
                continue
        yield health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.NOT_SERVING)

    def stop(self) -> None:
        """Tell watching clients that the server stops."""
        self._stopped.set()

    async def _status(self) -> Any:
        ready = not await self._readiness()
        return health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING

    def _unknown(self, service: str) -> str:
        return f"unknown service {service!r}; available: {', '.join(sorted(self._known - {''})) or 'none'}"


class Status:
    """The service that returns the status document, as ``jurybox status --json`` and HTTP's /status do."""

    def __init__(self, source: StatusSource) -> None:
        self._source = source

    async def Get(self, _request: StatusRequest, _context: grpc.aio.ServicerContext[Any, Any]) -> StatusMessage:
        """Return the document; UNAVAILABLE or DEADLINE_EXCEEDED if the supervisor does not answer."""
        return StatusMessage(json=json.dumps(await self._source.status()))


GRACE = 0.5  # seconds that answers get to be sent when the gateway stops
_CONNECTION_MS = 20_000  # idle time after which a peer is pinged


_INSTALL = "install it (apt install libnghttp2-14, dnf install libnghttp2)"


class _Adder(Protocol):
    def __call__(self, servicer: Any, server: grpc.aio.Server) -> None: ...


@dataclass(frozen=True, slots=True)
class Service:
    """One gRPC service.

    Attributes:
        name: full name, "package.Service".
        file: descriptor of the .proto that defines it, for reflection; None: it is not reflected.
        servicer: implements its methods.
        add: the generated add_..._to_server, or another function that registers the servicer on a server.
        direct: direct methods, which are tried before the servicer's, by path.
        forms: the forms of requests that native code answers, if any.
    """

    name: str
    file: FileDescriptor | None
    servicer: Any
    add: _Adder
    direct: Mapping[str, Direct] = field(default_factory=dict)
    forms: native.InferForms | None = None


class GrpcServer:
    """A gRPC server for some services. Create it in the event loop that serves it.

    Args:
        address: "host:port"; port 0 selects a free one.
        services: the services besides health and reflection.
        readiness: returns why the server is not ready, for grpc.health.v1; an empty list if it is.
        access: access control of every call; by default only the limits apply.
        doors: after they have closed, calls that do more than read are refused.
        http2: the HTTP/2 implementation: "nghttp2", the system's library, which is much faster; "grpcio", which is
            always available; or "auto", the first of them that is available.
        budget: what the process may hold; None: a budget of the server's own.
        turns: shared with other doors.
        setting: the setting that the address comes from; see `listen`.

    Attributes:
        http2: the HTTP/2 implementation in use, with its version, and for grpcio why it was chosen.
        ended: set when grpcio's server ended by itself; a method path that is not UTF-8 is enough. A second server in
            the same process would not be reliable, so the process should exit.
        bound: the address that it really listens on.

    Raises:
        CannotListen, ValueError: the address cannot be bound, or the HTTP/2 implementation is not available.
    """

    def __init__(
        self,
        address: str,
        services: Sequence[Service],
        readiness: Readiness,
        access: Access | None = None,
        http2: str = "auto",
        doors: Doors | None = None,
        budget: native.Budget | None = None,
        turns: Turns | None = None,
        setting: str = "server.grpc",
    ) -> None:
        self._doors = doors or Doors()
        self._access = access = access or Access()
        self._budget = budget or access.budget()
        self._services = services
        self._readiness = readiness
        self._stopping = False
        self.ended = asyncio.Event()
        self._health = HealthService([service.name for service in services], readiness)
        self.http2, found = choose_http2(http2)
        self._setting = setting
        self._listener = listen(address, setting)
        host, port = split_host(address)[0], self._listener.getsockname()[1]
        self.bound = bound_name(host, port)
        self._calls: Calls | None = None
        if found:
            direct = {path: function for service in services for path, function in service.direct.items()}
            forms = next((service.forms for service in services if service.forms is not None), None)
            self._calls = Calls(access, self._budget, direct, forms, self._doors, turns)
            self._offer(self._calls, {})
        else:
            # grpcio binds the address itself. `listen` came first because gRPC's error message gives neither the cause
            # nor a remedy.
            self._listener.close()
            self._aio = self._new_aio()

    def connections(self) -> Iterable[Limited]:
        """Return the connections, for `limits.Watch`; grpcio's are its own."""
        return () if self._calls is None else tuple(self._calls.connections)

    async def start(self) -> None:
        """Start serving."""
        if self._calls is not None:
            await self._calls.start(self._listener)
        else:
            await self._aio.start()
            self._watching = asyncio.create_task(self._watch())

    def drain(self) -> None:
        """End the streams of clients that watch the health: they may stay open for ever."""
        self._health.stop()

    @property
    def busy(self) -> bool:
        """Whether a call is in progress that does more than read."""
        return self._calls.busy if self._calls is not None else self._guarding.in_progress > 0

    async def stop(self) -> None:
        """Refuse all calls, and close all connections."""
        self._stopping = True
        self._health.stop()
        if self._calls is not None:
            await self._calls.stop(GRACE)
        else:
            await self._aio.stop(GRACE)

    def _offer(self, server: Any, direct: Mapping[str, Direct]) -> None:
        """Add all services to a server."""
        health = Service(
            "grpc.health.v1.Health", health_pb2.DESCRIPTOR, self._health, health_pb2_grpc.add_HealthServicer_to_server
        )
        self._guarding = Guarding(server, None if self._calls is not None else self._budget, direct, self._doors)
        guarding: Any = self._guarding
        for service in (*self._services, health):
            service.add(service.servicer, guarding)
        described = [(one.name, one.file) for one in (*self._services, health) if one.file is not None]
        described.append((reflection.SERVICE_NAME, reflection_pb2.DESCRIPTOR))
        reflecting = reflection.aio.ReflectionServicer(
            [name for name, _ in described], pool=_pool_of([file for _, file in described])
        )
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(reflecting, guarding)

    def _new_aio(self) -> grpc.aio.Server:
        server = grpc.aio.server(
            interceptors=interceptors(self._access),
            options=(
                *limits(self._access),
                ("grpc.so_reuseport", 0),  # a second server on the port must fail instead of sharing it
                ("grpc.keepalive_time_ms", _CONNECTION_MS),
                ("grpc.http2.min_recv_ping_interval_without_data_ms", _CONNECTION_MS // 4),
            ),
        )
        self._offer(server, {path: function for service in self._services for path, function in service.direct.items()})
        try:
            open_port(server, self.bound, self._access)
        except RuntimeError as error:
            raise CannotListen(
                f"cannot listen on grpc://{self.bound}: {error}; set {self._setting} to another host:port"
            ) from error
        return server

    async def _watch(self) -> None:
        why: object = "it stopped"
        try:
            await self._aio.wait_for_termination()
        except Exception as error:  # noqa: BLE001  any error means that the server has ended
            why = error
        if not self._stopping:
            _log.error("grpcio's server ended (%s)", why)
            self.ended.set()


def choose_http2(wanted: str) -> tuple[str, bool]:
    """Choose the HTTP/2 implementation.

    Returns:
        Its description for logs and status, and whether it is libnghttp2.

    Raises:
        ValueError: the wanted one is not available.
    """
    version, missing = native.nghttp2()
    if wanted == "nghttp2" and missing:
        raise ValueError(f"server.grpc_http2 = 'nghttp2': {missing}; {_INSTALL}, or set it to 'auto' or 'grpcio'")
    if wanted != "grpcio" and version:
        return f"libnghttp2 {version}", True
    return f"grpcio {grpc.__version__} ({missing if wanted == 'auto' else 'set by server.grpc_http2'})", False


def _pool_of(files: Sequence[FileDescriptor]) -> DescriptorPool:
    """Return a descriptor pool with these files and their imports; the default pool lacks some of them."""
    pool = DescriptorPool()
    added: set[str] = set()

    def add(file: FileDescriptor) -> None:
        if file.name not in added:
            added.add(file.name)
            for needed in file.dependencies:
                add(needed)
            pool.AddSerializedFile(file.serialized_pb)

    for file in files:
        add(file)
    return pool
