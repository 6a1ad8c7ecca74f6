"""What gRPC tells of the server: its health, and its status document.

Health is grpc.health.v1, what load balancers and orchestrators ask
(github.com/grpc/grpc/blob/master/doc/health-checking.md). Readiness is asked for when somebody asks here, and while
somebody watches; nobody asking, nothing runs.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jurybox.protocol.control_pb2 import StatusMessage, StatusRequest
from jurybox.server.gateway.source import StatusSource

Readiness = Callable[[], Awaitable[list[str]]]

_EVERY = 0.5  # seconds between two looks for somebody who watches


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # grpcio-health-checking has no types
    """Answers for the server ("") and for each of its services; they are ready together.

    Args:
        services: their full names.
        readiness: why the server is not ready; empty when it is.
    """

    def __init__(self, services: Sequence[str], readiness: Readiness) -> None:
        self._known = frozenset(("", *services))
        self._readiness = readiness
        self._stopped = asyncio.Event()

    async def Check(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        """One answer; NOT_FOUND for a service that is not offered here, as the protocol wants."""
        if request.service not in self._known:
            await context.abort(grpc.StatusCode.NOT_FOUND, self._unknown(request.service))
        return health_pb2.HealthCheckResponse(status=await self._status())

    async def Watch(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        """An answer now, and one at every change."""
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
        """Tell those who watch that it ends."""
        self._stopped.set()

    async def _status(self) -> Any:
        ready = not await self._readiness()
        return health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING

    def _unknown(self, service: str) -> str:
        return f"no service {service!r} is offered here; there are: {', '.join(sorted(self._known - {''})) or 'none'}"


class Status:
    """Answers with the document that ``jurybox status --json`` prints and HTTP's /status gives."""

    def __init__(self, source: StatusSource) -> None:
        self._source = source

    async def Get(self, _request: StatusRequest, _context: grpc.aio.ServicerContext[Any, Any]) -> StatusMessage:
        """The document; UNAVAILABLE or DEADLINE_EXCEEDED where the supervisor does not answer."""
        return StatusMessage(json=json.dumps(await self._source.status()))
