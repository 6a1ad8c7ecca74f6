"""gRPC over HTTP/2 on the event loop: connections, their calls, and the methods that answer them.

A call in grpc.aio costs several times as much as a small inference, because its threads pass every event to each other.
Here the event loop reads the socket, `native.GrpcConnection` (over the system's libnghttp2) parses it into events, and
answers are sent with one write. Methods are implemented and registered as for grpc.aio, with grpcio's generated code; a
direct method (security.grpc) is a plain function that needs no task.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import ssl
import time
import zlib
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import grpc

from jurybox import native
from jurybox.protocol.errors import Code, Error, Refused
from jurybox.server.gateway.http_server import bound_name
from jurybox.server.security.access import Access, ClientConnection, Token
from jurybox.server.security.doors import Doors
from jurybox.server.security.doors import refusal as draining
from jurybox.server.security.grpc import (
    MOST_METADATA,
    UNAUTHENTICATED,
    Direct,
    admitted,
    failure,
    status_of,
    works,
)
from jurybox.server.security.limits import (
    ANSWERS,
    CALLS,
    GRPC,
    GRPC_CONNECTIONS,
    MOST_CALLS,
    OF_REQUEST,
    RECEIVED,
    SILENCE,
    Charge,
    refusal,
)
from jurybox.server.security.pace import HEAP, Turns

_MOST_QUEUED = 1 << 20  # bytes of a stream's answers that are queued for the peer
_READ = 1 << 18  # bytes read at once
_QUIET = 20.0  # seconds without a byte after which the peer is pinged; it has as long to answer
_TURN, _TIMED = 0.002, 8  # seconds after which other connections come first, and events between two looks at the clock
_LONE = 3  # events of a single unary call that arrives at once: call, message, end
_CALL, _MESSAGE, _COMPRESSED, _END, _GONE, _TOO_LARGE, _REFUSED, _WAKE = range(8)  # native.GrpcConnection's events
_LOOKED_AT, _LULL = 64, 1.0  # connections, and seconds without a byte, to find one to end where there are too many
_PIECE = 1 << 20  # bytes that are decompressed at a time
_WINDOW_BITS = {b"gzip": 31, b"deflate": 15}
_STATUS = grpc.StatusCode


class _Details(NamedTuple):
    """The call details that grpcio's generic handlers look a method up by, as grpc.HandlerCallDetails."""

    method: str
    invocation_metadata: Sequence[tuple[str, Any]] = ()


class Call:
    """A call in progress, passed to its method as a grpc.aio.ServicerContext, or to a direct method as a DirectCall."""

    __slots__ = (
        "_connection", "_direct", "_done", "_handler", "_late", "_message", "_number", "_requests", "_task",
        "_trailing", "_until", "_waiting", "on_gone", "works",
    )  # fmt: skip

    def __init__(
        self,
        connection: _GrpcConnection,
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
        return self._connection.client if self._connection.lone else None

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


class _GrpcConnection(asyncio.BufferedProtocol):
    """One connection of a peer."""

    def __init__(self, server: Calls) -> None:
        self._server = server
        self.loop = server.loop
        self.budget = server.budget
        self.account = native.Account(server.budget, GRPC)
        self.native = native.GrpcConnection(server.most_message, MOST_METADATA, MOST_CALLS, self.account)
        self.calls: dict[int, Call] = {}
        self.farewells: dict[str, Callable[[], None]] = {}  # called when the connection has ended
        self._transport: Any = None
        self.peer = ""
        self.client: ClientConnection | None = None
        self._unsent = 0  # bytes in the transport's buffer, counted while it is paused
        self._paused = self._reading = self.lone = self._behind = False
        self._events: deque[Any] = deque()  # of native code, that are not handled yet
        self._trusted = server.token is None  # whether native code may answer calls: all, or those that show the token
        self._waiters: list[asyncio.Future[None]] = []  # of calls, until the peer may have received something
        self._heard = 0.0
        self._asked = False  # whether a ping is unanswered
        self._timer: asyncio.TimerHandle | None = None

    # ---- called by asyncio

    def connection_made(self, transport: Any) -> None:
        """Register the connection; see `asyncio.BaseProtocol`."""
        self._transport = transport
        peer = transport.get_extra_info("peername")
        if peer:  # else it has gone already
            self.peer = f"{'ipv6' if ':' in peer[0] else 'ipv4'}:{bound_name(*peer[:2])}"
        self.client = ClientConnection(peer)
        if len(self._server.connections) >= GRPC_CONNECTIONS and not self._server.make_room():
            transport.abort()
            return
        self._server.connections[self] = None
        self._heard = self.loop.time()
        self._timer = self.loop.call_later(_QUIET, self._look)
        self.flush()

    def get_buffer(self, _hint: int) -> bytearray:
        """Return the buffer, which all connections share: it is parsed before the loop serves another one."""
        return self._server.buffer

    def buffer_updated(self, size: int) -> None:
        """Parse the bytes in the buffer and handle the events; see `asyncio.BufferedProtocol`."""
        self._heard = self.loop.time()
        self._asked = False
        self._server.turns.heard(self)
        self._feed(self._server.buffer, size)

    def _feed(self, data: bytes | bytearray, size: int) -> None:
        began = time.monotonic()
        self._reading = True  # answers made meanwhile are sent with one write
        over = False
        try:
            if size or not self._events:
                forms = self._server.forms if self._trusted and not self.closed else None
                self._events += self.native.feed(data, size, forms, self)
                self.lone = len(self._events) <= _LONE and len(self.calls) <= 1
            while self._events and not over:
                over = self._handle([self._events.popleft() for _ in range(min(_TIMED, len(self._events)))])
                if time.monotonic() - began > _TURN:
                    break
        finally:
            self._reading = False
            self.flush()
            self._wake()
        if self._transport is None:
            return
        if over:
            self._transport.close()
            return
        seconds = self._server.turns.spent(began, size)
        more = self._events or self.native.more
        if more or (size >= HEAP and self._server.turns.rest(self, seconds) > 0):  # other connections come first
            if not self._behind:
                self._behind = True
                self._transport.pause_reading()
            self._server.turns.later(self, seconds)
        elif self._behind:
            self._behind = False
            self._transport.resume_reading()

    def go_on(self) -> None:
        """Handle the next of the received events."""
        if self._transport is not None and not self._transport.is_closing():
            self._feed(b"", 0)

    def _handle(self, events: Sequence[Any]) -> bool:
        """Handle events; return whether the connection is over."""
        for event in events:
            if event is None:
                return True
            try:
                self._take_in(*event)
            except Exception as error:  # noqa: BLE001  a method's error must not end the connection's other calls
                failed = failure(error)
                if (call := self.calls.get(event[1])) is not None:
                    call.fail(failed)
        return False

    def _take_in(self, kind: int, number: int, value: Any) -> None:
        if kind == _CALL:
            self._begin(number, *value)
        elif kind == _WAKE:
            value(self)
        elif (call := self.calls.get(number)) is None:
            return
        elif kind == _MESSAGE:
            call.came(value)
        elif kind == _END:
            call.ended()
        elif kind == _COMPRESSED:
            self._inflate(call, number, value)
        elif kind == _GONE:
            call.gone()
        elif kind == _TOO_LARGE:
            self._too_large(call, f"{value} vs. {self._server.most_message}")
        elif kind == _REFUSED:
            call.no_room(self._refusal(value))

    @property
    def idle(self) -> bool:
        """Whether it has no call."""
        return not self.native.calls

    @property
    def heard(self) -> float:
        """When the peer was heard last, s of the loop's clock."""
        return self._heard

    @property
    def closed(self) -> bool:
        """Whether new calls are refused."""
        return self._server.doors.closed

    @property
    def busy(self) -> bool:
        """Whether a call is in progress that does more than read. Those that native code answers all do."""
        return self.native.calls > len(self.calls) or any(call.works for call in self.calls.values())

    @property
    def alone(self) -> ClientConnection | None:
        """The connection as that of a client in a closed loop; None if it has several calls in progress."""
        return self.client if self.native.calls <= 1 else None

    def take_back(self, number: int, timeout: int, message: bytes) -> None:
        """Answer a unary call that native code did not answer; `timeout` is the time until its deadline in ns."""
        assert self._server.forms is not None
        if self._transport is None:
            return
        if timeout <= 0:
            self.native.finish(number, _STATUS.DEADLINE_EXCEEDED.value[0], "Deadline Exceeded", [])
        else:
            self._handle(
                [(_CALL, number, (self._server.forms.path, timeout)), (_MESSAGE, number, message), (_END, number, 0)]
            )
        self.flush()

    def eof_received(self) -> None:
        """Let the transport close; see `asyncio.BufferedProtocol`."""

    def connection_lost(self, error: Exception | None) -> None:
        """Cancel all calls; see `asyncio.BaseProtocol`."""
        self._server.connections.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
        self._transport = None
        self._events.clear()
        for call in list(self.calls.values()):
            call.gone()
        for farewell in self.farewells.values():
            farewell()
        self.native.gone(self._server.forms)
        self._count_unsent(0)
        self._wake()
        self._server.look()

    def pause_writing(self) -> None:
        """Stop writing; see `asyncio.BaseProtocol`."""
        self._paused = True
        self._count_unsent(self._transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        """Write again; see `asyncio.BaseProtocol`."""
        self._paused = False
        self._count_unsent(0)
        self.flush()
        self._wake()

    # ---- called by calls and the server

    def flush(self) -> None:
        """Write the pending bytes to the transport, unless it is paused or a read is being handled."""
        if self._reading or self._transport is None:
            return
        while not self._paused and (data := self.native.outgoing()):
            self._transport.write(data)
        if self.native.over:
            self._transport.close()

    def full(self, number: int) -> bool:
        """Return whether a stream must wait until the peer has received more of its answers."""
        return self._paused or self.native.queued(number) > _MOST_QUEUED

    async def taken_some(self) -> None:
        """Wait until the peer may have received something, or is gone."""
        future: asyncio.Future[None] = self.loop.create_future()
        self._waiters.append(future)
        await future

    def drain(self) -> None:
        """Accept no new calls."""
        self.native.drain()
        self.flush()

    def close(self) -> None:
        """Refuse all calls, and close the connection."""
        for call in list(self.calls.values()):
            call.fail(draining())
            call.gone()
        if self._transport is not None:
            self._transport.close()

    # ---- called by `limits.Watch`

    def end_silent(self, now: float) -> None:
        """End the calls with a message that does not go on."""
        for number in self.native.silent(int((now - SILENCE) * 1e9)):
            why = f"no byte of the message has come for {SILENCE:.0f} s"
            if (call := self.calls.get(number)) is not None:
                call.refuse(_STATUS.DEADLINE_EXCEEDED, why)
            else:
                self.native.finish(number, _STATUS.DEADLINE_EXCEEDED.value[0], why, [])
                self.flush()

    def abort(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    # ---- inside

    def _count_unsent(self, size: int) -> None:
        before, self._unsent = self._unsent, size
        self.account.give(ANSWERS, before)
        self.account.owe(ANSWERS, size)

    def _refusal(self, found: int) -> Refused:
        share = self._server.budget.each[CALLS]
        full = self.account.held(CALLS) >= share or (found == 2 and self._server.calls_are_full)
        return refusal(self.account, self._server.budget, found, CALLS if full else RECEIVED)

    def _begin(self, number: int, path: bytes, timeout: int) -> None:
        server = self._server
        if server.token is not None and not self._admitted(server.token, number, path):
            self.native.finish(number, _STATUS.UNAUTHENTICATED.value[0], UNAUTHENTICATED, [])
        elif (handler := server.found(path)) is None:
            self.native.finish(number, _STATUS.UNIMPLEMENTED.value[0], "Method not found!", [])
        else:
            until = None if timeout < 0 else time.monotonic() + timeout * 1e-9
            work = works(path.decode("latin-1"))
            call = self.calls[number] = Call(self, number, handler, server.direct.get(path), until, work)
            call.begin()

    def _admitted(self, token: Token, number: int, path: bytes) -> bool:
        metadata = self.native.metadata(number)
        shown = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in metadata]
        if not admitted(token, path.decode("latin-1"), shown):
            return False
        if (
            not self._trusted
            and (authorization := dict(metadata).get(b"authorization"))
            and token.is_shown_by(authorization.decode("latin-1"))
        ):
            self.native.trust(authorization)
            self._trusted = True
        return True

    def _too_large(self, call: Call, sizes: str) -> None:
        call.refuse(_STATUS.RESOURCE_EXHAUSTED, f"Received message larger than max ({sizes})")

    def _inflate(self, call: Call, number: int, data: bytes) -> None:
        named = dict(self.native.metadata(number)).get(b"grpc-encoding", b"")
        encoding = named.decode("latin-1")
        if (bits := _WINDOW_BITS.get(named)) is None:
            call.set_trailing_metadata((("grpc-accept-encoding", "identity, deflate, gzip"),))
            call.refuse(_STATUS.UNIMPLEMENTED, f"unsupported message encoding {encoding!r}: expected gzip or deflate")
            return
        try:
            message = self._inflated(number, data, bits)
        except Refused as error:
            if error.code == Code.TOO_LARGE:
                self._too_large(call, str(error))
            else:
                call.no_room(error)
        except (zlib.error, EOFError) as error:
            call.refuse(_STATUS.INTERNAL, f"a message with encoding {encoding!r} cannot be decompressed: {error}")
        else:
            self.native.taken(number, len(data), messages=0)
            call.came(message)

    def _inflated(self, number: int, data: bytes, bits: int) -> bytes:
        """Decompress a message of a call, to which every piece is counted. Raises Refused, zlib.error, EOFError."""
        most, size = self._server.most_message, 0
        pieces: list[bytes] = []
        inflating = zlib.decompressobj(bits)
        while not inflating.eof:
            piece = inflating.decompress(inflating.unconsumed_tail if pieces else data, _PIECE)
            size += len(piece)
            if size > most:
                raise Refused(f"more than {most} after decompression", Code.TOO_LARGE)
            if found := self.native.hold(number, len(piece), size):
                raise self._refusal(found)
            if not piece and not inflating.unconsumed_tail and not inflating.eof:
                raise EOFError("it is truncated")
            pieces.append(piece)
        if behind := len(inflating.unused_data):
            raise EOFError(f"{behind} bytes came after its end: expected none")
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _look(self) -> None:
        """Ping a quiet peer; abort the connection if the last ping was not answered."""
        quiet = self.loop.time() - self._heard
        if quiet < _QUIET:
            self._timer = self.loop.call_later(_QUIET - quiet, self._look)
        elif self._asked:
            self._transport.abort()
        else:
            self._asked = True
            self.native.ping()
            self.flush()
            self._timer = self.loop.call_later(_QUIET, self._look)

    def _wake(self) -> None:
        if self._waiters:
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)


class Calls:
    """The methods of a port and its connections, instead of a grpc.aio.Server. Create it in the loop that serves it.

    Args:
        access: token, TLS and limits.
        budget: what all connections may hold.
        direct: direct methods, by path.
        forms: the forms of requests that native code answers.
        doors: after they have closed, calls that do more than read are refused.
        turns: shared with other doors.

    Raises:
        ValueError, OSError: the certificate or its key cannot be loaded.
    """

    def __init__(
        self,
        access: Access,
        budget: native.Budget,
        direct: Mapping[str, Direct],
        forms: native.InferForms | None = None,
        doors: Doors | None = None,
        turns: Turns | None = None,
    ) -> None:
        self.doors = doors or Doors()
        self.loop = asyncio.get_running_loop()
        self.budget = budget
        self.most_message = access.max_message
        self.token = access.token
        self.direct = {path.encode(): method for path, method in direct.items()}
        self.forms = forms
        self.connections: dict[_GrpcConnection, None] = {}  # in an order, as a set has none
        self.buffer = bytearray(_READ)
        self.turns = turns or Turns()
        self.stopping = False
        self._methods: dict[bytes, Any] = {}
        self._generic: list[Any] = []
        self._tls = _tls(access)
        self._listening: asyncio.Server | None = None
        self._idle = asyncio.Event()

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        """Add generic handlers, like `grpc.aio.Server`; called by generated code."""
        self._generic += handlers

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Add the methods of a service, like `grpc.aio.Server`; called by generated code."""
        self._methods.update({f"/{service}/{name}".encode(): handler for name, handler in handlers.items()})

    def found(self, path: bytes) -> Any:
        """Return the handler of a method, or None."""
        if (known := self._methods.get(path)) is None:
            details = _Details(path.decode("latin-1"))
            known = next((found for handler in self._generic if (found := handler.service(details))), None)
            if known is not None:
                self._methods[path] = known
        return known

    async def start(self, listener: socket.socket) -> None:
        """Serve a listening socket."""
        self._listening = await self.loop.create_server(lambda: _GrpcConnection(self), sock=listener, ssl=self._tls)

    @property
    def busy(self) -> bool:
        """Whether a call is in progress that does more than read."""
        return any(connection.busy for connection in self.connections)

    async def stop(self, grace: float) -> None:
        """Refuse all calls, close all connections, and wait up to `grace` seconds until they are sent."""
        self.stopping = True
        if self._listening is not None:
            self._listening.close()
        for connection in list(self.connections):
            connection.drain()
            connection.close()
        self.look()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), grace)

    @property
    def calls_are_full(self) -> bool:
        """Whether no more calls may begin."""
        return self.budget.held(CALLS) >= self.budget.in_all[CALLS]

    def make_room(self) -> bool:
        """End a connection without a call, of the oldest ones; return whether there is one."""
        now, idle = self.loop.time(), None
        for one in list(itertools.islice(self.connections, _LOOKED_AT)):
            if one.idle and now - one.heard > _LULL and (idle is None or one.heard < idle.heard):
                idle = one
            elif not one.idle:  # not looked at again before the others
                del self.connections[one]
                self.connections[one] = None
        if idle is None:
            return False
        self.connections.pop(idle, None)
        idle.abort()
        return True

    def look(self) -> None:
        """Let `stop` continue if no connection is open any more."""
        if self.stopping and not self.connections:
            self._idle.set()


def _tls(access: Access) -> ssl.SSLContext | None:
    if access.tls() is None:  # `tls` also checks the permissions of the key file
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])
    context.load_cert_chain(str(access.tls_cert), access.tls_key, password=lambda: "")
    return context
