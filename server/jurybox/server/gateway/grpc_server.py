"""The gRPC server, its health service and the status service.

Health is grpc.health.v1, which load balancers and orchestrators use
(github.com/grpc/grpc/blob/master/doc/health-checking.md). Readiness is determined for each check, and while a client
watches.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

from jurybox.protocol.control_pb2 import StatusMessage, StatusRequest
from jurybox.server.gateway.http_server import CannotListen, bound_name, listen
from jurybox.server.gateway.live import StatusSource
from jurybox.server.security.access import Access
from jurybox.server.security.grpc import Direct, Guarding, interceptors, limits, open_port
from jurybox.server.settings.endpoints import split_host

Readiness = Callable[[], Awaitable[list[str]]]

_EVERY = 0.5  # seconds between two looks for somebody who watches


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # grpcio-health-checking has no types
    """Health of the server ("") and of each of its services, which are ready at the same time.

    Args:
        services: their full names.
        readiness: why the server is not ready; empty when it is.
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
        return f"no service {service!r} is offered here; there are: {', '.join(sorted(self._known - {''})) or 'none'}"


class Status:
    """Returns the status document, as ``jurybox status --json`` and HTTP's /status do."""

    def __init__(self, source: StatusSource) -> None:
        self._source = source

    async def Get(self, _request: StatusRequest, _context: grpc.aio.ServicerContext[Any, Any]) -> StatusMessage:
        """Return the document; UNAVAILABLE or DEADLINE_EXCEEDED if the supervisor does not answer."""
        return StatusMessage(json=json.dumps(await self._source.status()))


GRACE = 2.0  # seconds that calls in progress get when the gateway stops
_CONNECTION_MS = 20_000  # idle time after which a peer is asked whether it is still there


class _Adder(Protocol):
    def __call__(self, servicer: Any, server: grpc.aio.Server) -> None: ...


@dataclass(frozen=True, slots=True)
class Service:
    """One gRPC service.

    Attributes:
        name: in full, "package.Service".
        file: descriptor of the .proto that defines it, for reflection.
        servicer: answers its calls.
        add: the generated add_..._to_server, or whatever registers the servicer on a server.
        direct: functions that are asked before its methods, by the methods' paths.
    """

    name: str
    file: FileDescriptor
    servicer: Any
    add: _Adder
    direct: Mapping[str, Direct] = field(default_factory=dict)


class GrpcServer:
    """A grpc.aio server over some services. Make it in the event loop that serves it.

    Args:
        address: "host:port"; port 0 takes a free one.
        services: what is offered besides health and reflection.
        readiness: why the server is not ready, for grpc.health.v1; an empty list when it is.
        access: the walls before every call; without it the limits alone.

    Attributes:
        bound: where it really listens.

    Raises:
        CannotListen, ValueError: the address cannot be had.
    """

    def __init__(
        self,
        address: str,
        services: Sequence[Service],
        readiness: Readiness,
        access: Access | None = None,
    ) -> None:
        access = access or Access()
        self._server = grpc.aio.server(
            interceptors=interceptors(access),
            options=(
                *limits(access),
                ("grpc.so_reuseport", 0),  # two servers must not share a port unnoticed
                ("grpc.keepalive_time_ms", _CONNECTION_MS),
                ("grpc.http2.min_recv_ping_interval_without_data_ms", _CONNECTION_MS // 4),
            ),
        )
        names = [service.name for service in services]
        self._health = Health(names, readiness)
        health = Service(
            "grpc.health.v1.Health", health_pb2.DESCRIPTOR, self._health, health_pb2_grpc.add_HealthServicer_to_server
        )
        direct = {path: function for service in services for path, function in service.direct.items()}
        guarding: Any = Guarding(self._server, access.room(), direct)
        for service in (*services, health):
            service.add(service.servicer, guarding)
        files = [*(service.file for service in services), health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR]
        reflecting = reflection.aio.ReflectionServicer(
            (*names, health.name, reflection.SERVICE_NAME), pool=_pool_of(files)
        )
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(reflecting, guarding)
        self.bound = self._bind(address, access)

    async def start(self) -> None:
        """Start serving."""
        await self._server.start()

    async def stop(self) -> None:
        """Refuse new calls, and wait for those in progress for the grace period."""
        self._health.stop()
        await self._server.stop(GRACE)

    def _bind(self, address: str, access: Access) -> str:
        host, _ = split_host(address)
        listen(address, "grpc").close()  # gRPC's own message names neither the port's state nor a remedy
        try:
            return bound_name(host, open_port(self._server, address, access))
        except RuntimeError as error:
            raise CannotListen(
                f"cannot listen on grpc://{address}: {error}; set server.grpc to another host:port, or to '' for no "
                "gRPC"
            ) from error


def _pool_of(files: Sequence[FileDescriptor]) -> DescriptorPool:
    """A descriptor pool with these files and their imports; not all of them are in the default pool."""
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
