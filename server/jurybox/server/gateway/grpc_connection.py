"""A connection of gRPC over HTTP/2: bytes to events of its calls and back, by `native.GrpcConnection`."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import grpc

from jurybox import native
from jurybox.protocol.errors import Code, Refused
from jurybox.server.gateway.grpc_call import Call
from jurybox.server.security.access import ClientConnection, Token
from jurybox.server.security.doors import refusal as draining
from jurybox.server.security.grpc import MOST_METADATA, UNAUTHENTICATED, admitted, failure, status_of, works
from jurybox.server.security.limits import ANSWERS, CALLS, GRPC, MOST_CALLS, RECEIVED, SILENCE, refusal
from jurybox.server.security.pace import HEAP
from jurybox.server.settings.endpoints import bound_name

if TYPE_CHECKING:
    from jurybox.server.gateway.grpc_calls import Calls

_MOST_QUEUED = 1 << 20  # bytes of a stream's answers that are queued for the peer
_QUIET = 20.0  # seconds without a byte after which the peer is pinged; it has as long to answer
_TURN, _TIMED = 0.002, 8  # seconds after which other connections come first, and events between two looks at the clock
_CALL, _MESSAGE, _COMPRESSED, _END, _GONE, _TOO_LARGE, _REFUSED, _WAKE = range(8)  # native.GrpcConnection's events
_PIECE = 1 << 20  # bytes that are decompressed at a time
_WINDOW_BITS = {b"gzip": 31, b"deflate": 15}
_STATUS = grpc.StatusCode


class RpcConnection(asyncio.BufferedProtocol):
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
        self._paused = self._reading = self._behind = False
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
        if not self._server.admits(self):
            transport.abort()
            return
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
                elif event[0] == _CALL:  # it has not even begun, such as for want of memory
                    code, details, trailing = status_of(failed)
                    self.native.finish(event[1], code.value[0], details, list(trailing))
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
