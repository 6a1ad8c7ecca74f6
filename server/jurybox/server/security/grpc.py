"""The walls before the gRPC services: token, TLS, size of a message."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from jurybox.server.security.access import Access
from jurybox.server.security.token import Token

# As in http.py: probes carry no token, and these answer yes or no.
OPEN_METHODS = frozenset(
    {
        "/grpc.health.v1.Health/Check",
        "/inference.GRPCInferenceService/ServerLive",
        "/inference.GRPCInferenceService/ServerReady",
    }
)
_MOST_METADATA = 16 << 10  # bytes
_MOST_STREAMS = 1024  # calls in progress on one connection


class TokenAsked(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Takes only calls that show the token as ``authorization: Bearer TOKEN`` in their metadata."""

    def __init__(self, token: Token) -> None:
        self._token = token

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> grpc.RpcMethodHandler:
        """As gRPC asks."""
        if handler_call_details.method in OPEN_METHODS:
            return await continuation(handler_call_details)
        shown = [value for name, value in handler_call_details.invocation_metadata or () if name == "authorization"]
        if len(shown) == 1 and isinstance(shown[0], str) and self._token.is_shown_by(shown[0]):
            return await continuation(handler_call_details)
        return _REFUSAL


async def _refuse(_requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    await context.abort(
        grpc.StatusCode.UNAUTHENTICATED,
        "expected metadata 'authorization: Bearer TOKEN' with the server's token (server.token_file)",
    )
    yield b""


# Of streams, whatever the method: no message is read before the call is refused.
_REFUSAL = grpc.stream_stream_rpc_method_handler(_refuse)


def interceptors(access: Access) -> list[grpc.aio.ServerInterceptor]:
    """For grpc.aio.server(interceptors=...)."""
    return [] if (token := access.token) is None else [TokenAsked(token)]


def limits(access: Access) -> list[tuple[str, int]]:
    """For grpc.aio.server(options=...)."""
    return [
        ("grpc.max_receive_message_length", access.max_message),
        ("grpc.max_send_message_length", access.max_message),
        ("grpc.max_metadata_size", _MOST_METADATA),
        ("grpc.max_concurrent_streams", _MOST_STREAMS),
    ]


def open_port(server: grpc.aio.Server, where: str, access: Access) -> int:
    """Listen at "host:port", with TLS where the settings have it; gives the port."""
    tls = access.tls()
    if tls is None:
        return int(server.add_insecure_port(where))
    return int(server.add_secure_port(where, grpc.ssl_server_credentials([tls])))
