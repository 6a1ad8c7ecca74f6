"""Access control of the gRPC services: token, TLS and size limits; handling of unexpected exceptions."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing
from typing import Any, NamedTuple, NoReturn, Protocol, TypeAlias

import grpc
from google.protobuf.descriptor import Descriptor

from jurybox import native
from jurybox.protocol.errors import TABLE, Code, Error, error_for, said
from jurybox.server.security.access import Access, ClientConnection, Token
from jurybox.server.security.doors import Doors, refusal
from jurybox.server.security.limits import GRPC, MOST_CALLS, Charge
from jurybox.server.security.message_parts import FEW_BYTES, MOST_PARTS, has_many_parts

# As in http.py: probes send no token; these methods reveal only yes or no.
OPEN_METHODS = frozenset(
    {
        "/grpc.health.v1.Health/Check",
        "/inference.GRPCInferenceService/ServerLive",
        "/inference.GRPCInferenceService/ServerReady",
    }
)
# Methods that do more than read, by the last part of their paths: closed doors refuse them, and wait for their answers.
_WORK = frozenset(
    {
        *("ModelInfer", "ModelStreamInfer", "RepositoryModelLoad", "Publish", "Read"),
        *("Ready", "SendPolicyInstructions", "SendObservations", "GetActions", "StreamActions"),  # LeRobot's
    }
)
UNAUTHENTICATED = "expected metadata 'authorization: Bearer TOKEN' with the server's token (server.token_file)"
CODE = "jurybox-code"  # trailing metadata: several codes of errors.Code map to the same gRPC status
# These do not pass by themselves, so trailing metadata tell gRPC's clients not to retry a call despite UNAVAILABLE.
_LASTING = (Code.SLEEPING, Code.DRAINING)
_NO_RETRY = ("grpc-retry-pushback-ms", "-1")
MOST_METADATA = 16 << 10  # bytes
_MOST_DETAILS = 1000  # characters of an error: they are sent as metadata, in up to twelve bytes each
_STATUS = {status.value[0]: status for status in grpc.StatusCode}
_log = logging.getLogger("jurybox.gateway.grpc")


class TokenGuard(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Accepts only calls with the token as ``authorization: Bearer TOKEN`` in their metadata."""

    def __init__(self, token: Token) -> None:
        self._token = token

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> grpc.RpcMethodHandler:
        """See `grpc.aio.ServerInterceptor.intercept_service`."""
        metadata = handler_call_details.invocation_metadata or ()
        if admitted(self._token, handler_call_details.method, metadata):
            return await continuation(handler_call_details)
        return _REFUSAL


def works(path: str) -> bool:
    """Return whether a method does more than read."""
    return path.rpartition("/")[2] in _WORK


def admitted(token: Token, method: str, metadata: Iterable[tuple[str, Any]]) -> bool:
    """Return whether a call is admitted: its method is open, or its metadata has ``authorization: Bearer TOKEN``."""
    if method in OPEN_METHODS:
        return True
    shown = [value for name, value in metadata if name == "authorization"]
    return len(shown) == 1 and isinstance(shown[0], str) and token.is_shown_by(shown[0])


async def _refuse(_requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, UNAUTHENTICATED)
    yield b""


# A stream-stream handler for any method: the call is refused before a message is read.
_REFUSAL = grpc.stream_stream_rpc_method_handler(_refuse)


async def abort(context: Any, error: Error) -> NoReturn:
    """Abort a call with the status of an error."""
    code, details, trailing = status_of(error)
    context.set_trailing_metadata(trailing)
    await context.abort(code, details)
    raise AssertionError("abort raises")


def status_of(error: Error) -> tuple[Any, str, tuple[tuple[str, str], ...]]:
    """Return the status code of an error, its details, and the trailing metadata of the call."""
    row = TABLE.get(error.code)
    code = _STATUS[row.grpc] if row else grpc.StatusCode.UNKNOWN
    trailing = ((CODE, str(int(error.code))),)
    return code, said(error, _MOST_DETAILS), (*trailing, _NO_RETRY) if error.code in _LASTING else trailing


def failure(error: BaseException) -> Error:
    """Return the error to report for an exception: an `Error` itself; anything else is logged and replaced by one."""
    if isinstance(error, Error):
        return error
    _log.error("a call failed: %s", said(error), exc_info=error)
    return Error(f"the gateway failed at this call ({said(error, 200)}); its log says more", Code.MODEL_FAILED)


class _Received(NamedTuple):
    """A received message, or the error with which it is refused."""

    message: Any
    size: int
    error: Error | None = None


class DirectCall(Protocol):
    """A call as passed to a direct method. It is answered once.

    Attributes:
        on_gone: called if the caller is gone before the answer, to drop what was kept for it.
    """

    on_gone: Callable[[], None] | None

    def room(self) -> Charge | None:
        """Return what its answer will hold of the connection's account; None: nothing counts it."""
        ...

    @property
    def connection(self) -> ClientConnection | None:
        """The connection of the call, if it has no other call in progress; None: unknown."""
        ...

    def done(self) -> bool:
        """Return whether the caller no longer waits for the answer."""
        ...

    def time_remaining(self) -> float | None:
        """Return the seconds until its deadline; None: it has none."""
        ...

    def reply(self, message: bytes) -> None:
        """End the call with an answer."""
        ...

    def fail(self, error: Error) -> None:
        """End the call with the status of an error."""
        ...

    def as_usual(self) -> None:
        """Pass the call to the regular method."""
        ...


# Gets the bytes of a message and answers the call now or later, without a task. Returns False to leave the call to the
# regular method.
Direct: TypeAlias = Callable[[bytes, DirectCall], bool]


_Entered: TypeAlias = Callable[[], AbstractContextManager[None]]


class _AwaitedCall:
    """A call of grpc.aio, whose coroutine awaits `answer`: bytes, or None for the regular method."""

    connection = None
    on_gone: Callable[[], None] | None = None

    def room(self) -> None:
        return None

    def __init__(self, context: Any) -> None:
        self.answer: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()
        self.done = self.answer.done
        self.reply = self.answer.set_result
        self.fail = self.answer.set_exception
        self.time_remaining = context.time_remaining

    def as_usual(self) -> None:
        self.answer.set_result(None)


class Guarding:
    """A server proxy that wraps each method of added services.

    It refuses a message that cannot be parsed, has too many parts, or does not fit into `budget` at present. An `Error`
    from a method ends the call with its status of errors.TABLE. Any other exception is logged and ends it as INTERNAL.

    Args:
        server: the server to which the wrapped methods are added.
        budget: limits the bytes of all messages together; None: the server counts them itself.
        direct: functions to try before unary-unary methods, by the methods' paths.
        doors: after they have closed, calls that do more than read are refused.

    Attributes:
        in_progress: the number of calls in progress that do more than read.
    """

    def __init__(
        self, server: Any, budget: native.Budget | None, direct: Mapping[str, Direct], doors: Doors | None = None
    ) -> None:
        self._server = server
        self._budget = budget
        self._direct = direct
        self._doors = doors or Doors()
        self.in_progress = 0

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        """See `grpc.aio.Server.add_generic_rpc_handlers`."""
        self._server.add_generic_rpc_handlers(tuple(_Generic(handler, self._guarded) for handler in handlers))

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """See `grpc.aio.Server.add_registered_method_handlers`."""
        guarded = {name: self._guarded(f"/{service}/{name}", handler) for name, handler in handlers.items()}
        self._server.add_registered_method_handlers(service, guarded)

    def _guarded(self, path: str, handler: Any) -> Any:
        read = _reader(handler.request_deserializer)
        write = handler.response_serializer
        entered = self._working if works(path) else contextlib.nullcontext
        if (direct := self._direct.get(path)) is not None:
            directly = self._directly(direct, read, handler.unary_unary, write, entered)
            return grpc.unary_unary_rpc_method_handler(directly)
        if handler.request_streaming:
            many = handler.stream_stream if handler.response_streaming else _one_answer(handler.stream_unary)
            streaming = _streaming(many, _messages, entered)
            return grpc.stream_stream_rpc_method_handler(streaming, read, write)
        if handler.response_streaming:
            answering = _streaming(handler.unary_stream, _message_of, entered)
            return grpc.unary_stream_rpc_method_handler(answering, read, write)
        return grpc.unary_unary_rpc_method_handler(self._unary_unary(handler.unary_unary, entered), read, write)

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        """Count a call. Raises Error if the doors have closed."""
        if self._doors.closed:
            raise refusal()
        self.in_progress += 1
        try:
            yield
        finally:
            self.in_progress -= 1

    def _unary_unary(
        self, method: Callable[[Any, Any], Awaitable[Any]], entered: _Entered
    ) -> Callable[[_Received, Any], Awaitable[Any]]:
        budget = self._budget

        async def behave(received: _Received, context: Any) -> Any:
            try:
                with entered():
                    message = _message_of(received)
                    if budget is None:
                        return await method(message, context)
                    charge = Charge(budget, native.Account(budget, GRPC))
                    charge.take(received.size)
                    try:
                        return await method(message, context)
                    finally:
                        charge.give()
            except Exception as error:  # noqa: BLE001
                await _end(context, error)

        return behave

    def _directly(
        self,
        direct: Direct,
        read: Callable[[bytes], _Received],
        method: Callable[[Any, Any], Awaitable[Any]],
        write: Callable[[Any], bytes],
        entered: _Entered,
    ) -> Callable[[bytes, Any], Awaitable[bytes]]:
        budget = self._budget

        async def behave(data: bytes, context: Any) -> bytes:
            call = _AwaitedCall(context)
            try:
                with entered():
                    charge = None if budget is None else Charge(budget, native.Account(budget, GRPC))
                    if charge is not None:
                        charge.take(len(data))
                    try:
                        if direct(data, call) and (answer := await call.answer) is not None:
                            return answer
                        return write(await method(_message_of(read(data)), context))
                    finally:
                        if charge is not None:
                            charge.give()
            except asyncio.CancelledError:
                if call.on_gone is not None:
                    call.on_gone()
                raise
            except Exception as error:  # noqa: BLE001
                await _end(context, error)

        return behave


class _Generic(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
    """A handler of several methods, each of which is wrapped once."""

    def __init__(self, handler: Any, guard: Callable[[str, Any], Any]) -> None:
        self._handler = handler
        self._guard = guard
        self._guarded: dict[str, Any] = {}

    def service(self, handler_call_details: Any) -> Any:
        """See `grpc.GenericRpcHandler.service`."""
        method = handler_call_details.method
        if (guarded := self._guarded.get(method)) is None and (found := self._handler.service(handler_call_details)):
            guarded = self._guarded[method] = self._guard(method, found)
        return guarded


def _one_answer(
    method: Callable[[AsyncIterator[Any], Any], Awaitable[Any]],
) -> Callable[[AsyncIterator[Any], Any], AsyncIterator[Any]]:
    """Return a method with one answer as one with many, which looks the same to a client."""

    async def answers(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        yield await method(requests, context)

    return answers


def _streaming(
    method: Callable[[Any, Any], AsyncIterator[Any]], given: Callable[[Any], Any], entered: _Entered
) -> Callable[[Any, Any], AsyncIterator[Any]]:
    """Wrap a method with many answers; `given` returns what it gets of what was received."""

    async def behave(received: Any, context: Any) -> AsyncIterator[Any]:
        try:
            with entered():
                async with aclosing(method(given(received), context)) as answers:  # type: ignore[type-var]
                    async for answer in answers:
                        yield answer
        except Exception as error:  # noqa: BLE001
            await _end(context, error)

    return behave


def _message_of(received: _Received) -> Any:
    """Return the message. Raises Error if it is refused."""
    if received.error is not None:
        raise received.error
    return received.message


async def _messages(requests: AsyncIterator[_Received]) -> AsyncIterator[Any]:
    async for received in requests:
        yield _message_of(received)


async def _end(context: Any, error: Exception) -> NoReturn:
    """Abort a call after an exception: with the status of the error, or INTERNAL."""
    if isinstance(error, grpc.aio.AbortError):
        raise error
    await abort(context, failure(error))


def _reader(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], _Received]:
    kind: Descriptor | None = getattr(getattr(deserialize, "__self__", None), "DESCRIPTOR", None)

    def read(data: bytes) -> _Received:
        if len(data) > FEW_BYTES and kind is not None and has_many_parts(data, kind):
            why = f"the message has more than {MOST_PARTS} parts: send tensors in raw_input_contents"
            return _Received(None, 0, error_for(Code.TOO_LARGE, why))
        try:
            return _Received(deserialize(data), len(data))
        except Exception as error:  # noqa: BLE001  untrusted bytes: any exception of the parser means no valid message
            return _Received(None, 0, error_for(Code.MALFORMED, f"no message came: {said(error, 200)}"))

    return read


def interceptors(access: Access) -> list[grpc.aio.ServerInterceptor]:
    """Return the interceptors for grpc.aio.server(interceptors=...)."""
    return [] if (token := access.token) is None else [TokenGuard(token)]


def limits(access: Access) -> list[tuple[str, int]]:
    """Return the limits for grpc.aio.server(options=...)."""
    return [
        ("grpc.max_receive_message_length", access.max_message),
        ("grpc.max_send_message_length", access.max_message),
        ("grpc.max_metadata_size", MOST_METADATA),
        ("grpc.max_concurrent_streams", MOST_CALLS),
    ]


def open_port(server: grpc.aio.Server, where: str, access: Access) -> int:
    """Listen on "host:port", with TLS if configured; return the port."""
    tls = access.tls()
    if tls is None:
        return int(server.add_insecure_port(where))
    return int(server.add_secure_port(where, grpc.ssl_server_credentials([tls])))
