"""One call of gRPC: its messages, its deadline, its task and its answer. See `grpc_connection` for what carries it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import grpc

from jurybox import native
from jurybox.protocol.errors import Error, Refused
from jurybox.server.security.access import ClientConnection
from jurybox.server.security.grpc import Direct, failure, status_of
from jurybox.server.security.limits import ANSWERS, OF_REQUEST, Charge

if TYPE_CHECKING:
    from jurybox.server.gateway.grpc_connection import RpcConnection

_STATUS = grpc.StatusCode


class Call:
    """A call in progress, passed to its method as a grpc.aio.ServicerContext, or to a direct method as a DirectCall."""

    __slots__ = (
        "_connection", "_direct", "_done", "_handler", "_late", "_message", "_number", "_requests", "_task",
        "_trailing", "_until", "_waiting", "on_gone", "works",
    )  # fmt: skip

    def __init__(
        self,
        connection: RpcConnection,
        number: int,
        handler: Any,
        direct: Direct | None,
        until: float | None,
        works: bool = True,
    ) -> None:
        self.works = works  # whether the call does more than read
        self._connection = connection
        self._number = number
        self._handler = handler
        self._direct = direct
        self._until = until  # its deadline, s of the monotonic clock
        self._done = False
        self._message: bytes | None = None
        self.on_gone: Callable[[], None] | None = None  # called if the peer is gone before the answer
        self._requests: deque[bytes | None] | None = None  # messages of a request stream, None after the last
        self._waiting: asyncio.Future[None] | None = None  # for the next of these messages
        self._task: asyncio.Task[None] | None = None
        self._late: asyncio.TimerHandle | None = None
        self._trailing: Sequence[tuple[str, str]] = ()

    # ---- for methods

    @property
    def connection(self) -> ClientConnection | None:
        """The connection, if it has no other call now; see `security.grpc.DirectCall.connection`."""
        return self._connection.alone

    @property
    def account(self) -> native.Account:
        """What its connection holds of the server's budget."""
        return self._connection.account

    def room(self) -> Charge:
        """Return what its answer will hold."""
        return Charge(self._connection.budget, self._connection.account, ANSWERS)

    def done(self) -> bool:
        """Return whether the call was answered or its peer is gone; a further answer is discarded."""
        return self._done

    @property
    def farewells(self) -> dict[str, Callable[[], None]]:
        """Functions to call when the call's connection has ended, by a name of the method's choice."""
        return self._connection.farewells

    def peer(self) -> str:
        """Return the peer's address, as grpcio writes it; no two connections have the same at a time."""
        return self._connection.peer

    def time_remaining(self) -> float | None:
        """Return the seconds until the deadline; None if there is none."""
        return None if self._until is None else max(0.0, self._until - time.monotonic())

    def set_trailing_metadata(self, trailing: Sequence[tuple[str, str]]) -> None:
        """Set the metadata that is sent with the status."""
        self._trailing = trailing

    async def abort(self, code: Any, details: str = "") -> NoReturn:
        """End the call with a status of grpc.StatusCode. Always raises grpc.aio.AbortError."""
        self._finish(code, details)
        raise grpc.aio.AbortError()

    def reply(self, message: bytes) -> None:
        """Answer the call."""
        if not self._done:
            self._end()
            self._connection.native.answer(self._number, message)
            self._connection.flush()

    def fail(self, error: Error) -> None:
        """End the call with the status of an error."""
        code, details, self._trailing = status_of(error)
        self._finish(code, details)

    def as_usual(self) -> None:
        """Let the ordinary method answer the message."""
        if self._done:
            return
        handler, request = self._handler, self._handler.request_deserializer(self._message)
        self._message = None
        if handler.response_streaming:
            self._run(self._answers(handler.unary_stream(request, self)))
        else:
            self._run(self._unary(request))

    # ---- for the connection

    def begin(self) -> None:
        """Start the call; its messages follow."""
        if self._handler.request_streaming:
            self._requests = deque()
            self._run(self._answers(self._handler.stream_stream(self._iterated(), self)))
        elif self._direct is None:
            self._watch()

    def came(self, message: bytes) -> None:
        """Accept a message of the peer."""
        if self._requests is not None:
            self._requests.append(message)
            self._wake()
        elif self._message is None:
            self._message = message
        else:
            self._finish(_STATUS.INTERNAL, "expected one request message, got more than one")

    def ended(self) -> None:
        """Handle the end of the peer's messages."""
        message = self._message
        if self._requests is not None:
            self._requests.append(None)
            self._wake()
        elif message is None:
            self._finish(_STATUS.INTERNAL, "expected one request message, got none")
        elif self._direct is None or self._connection.closed:
            self.as_usual()  # which refuses it if the doors have closed
        elif not self._direct(message, self):
            self._watch()
            self.as_usual()

    def gone(self) -> None:
        """Handle the peer's cancellation of the call, or the end of the connection."""
        self._end()
        self._cancel()

    def refuse(self, code: Any, details: str) -> None:
        """End the call with a status, and cancel its method."""
        self._finish(code, details)
        self._cancel()

    def no_room(self, error: Refused) -> None:
        """End the call because the budget has no room, and cancel its method."""
        self.fail(error)
        self._cancel()

    # ---- inside

    def _cancel(self) -> None:
        self._message = None
        if self._requests is not None:
            self._requests.clear()
        self._wake()
        if self._task is not None:
            self._task.cancel()
        if self.on_gone is not None:
            self.on_gone()

    def _watch(self) -> None:
        if (left := self.time_remaining()) is not None and self._late is None and not self._done:
            loop = self._connection.loop
            self._late = loop.call_later(min(left, 1e8), self.refuse, _STATUS.DEADLINE_EXCEEDED, "Deadline Exceeded")

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        OF_REQUEST.set(Charge(self._connection.budget, self._connection.account))
        self._task = task = self._connection.loop.create_task(work)
        self._watch()
        task.add_done_callback(self._ran)

    def _ran(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if task.cancelled():
            self._finish(_STATUS.CANCELLED, "the call was cancelled")
        elif (error := task.exception()) is not None and not isinstance(error, grpc.aio.AbortError):
            self.fail(failure(error))

    async def _unary(self, request: Any) -> None:
        self.reply(self._handler.response_serializer(await self._handler.unary_unary(request, self)))

    async def _answers(self, answers: AsyncGenerator[Any, None]) -> None:
        connection, number = self._connection, self._number
        async with contextlib.aclosing(answers):  # what it holds ends with the call, whoever keeps a reference to it
            async for answer in answers:
                if self._done:
                    return
                if not connection.native.send(number, self._handler.response_serializer(answer)):
                    self._end()
                connection.flush()
                while not self._done and connection.full(number):
                    await connection.taken_some()
        self._finish(_STATUS.OK, "")

    async def _iterated(self) -> AsyncIterator[Any]:
        requests = self._requests
        assert requests is not None
        while True:
            while not requests:
                if self._done:
                    return
                self._waiting = self._connection.loop.create_future()
                await self._waiting
            message = requests.popleft()
            if message is None:
                return
            self._connection.native.taken(self._number, len(message))
            self._connection.flush()
            yield self._handler.request_deserializer(message)

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def _end(self) -> None:
        self._done = True
        if self._late is not None:
            self._late.cancel()
        self._connection.calls.pop(self._number, None)

    def _finish(self, code: Any, details: str) -> None:
        if not self._done:
            self._end()
            trailing = [(name.lower(), str(value)) for name, value in self._trailing]
            message = details.encode("utf-8", "replace").decode()
            self._connection.native.finish(self._number, code.value[0], message, trailing)
            self._connection.flush()
