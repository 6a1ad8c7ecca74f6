"""A robot's WebSocket connection, which is counted and takes turns; see docs/security.md.

`websockets` limits the bytes of one message. It does not limit what all connections together hold of messages that are
not complete, what waits for a peer that does not read, the number of connections, or the time for thousands of tiny
frames in one read.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Generator
from typing import Any

from websockets.asyncio.server import ServerConnection
from websockets.frames import DATA_OPCODES
from websockets.protocol import State
from websockets.streams import StreamReader

from jurybox import native
from jurybox.protocol.errors import plain
from jurybox.server.gateway.http_connection import ConnectionTransport
from jurybox.server.security.limits import RECEIVED, ROBOTS, SILENCE, refusal
from jurybox.server.security.pace import HEAP, Turns

TRY_AGAIN_LATER = 1013  # of a close (IANA's registry)
_GOING_AWAY, _TOO_BIG = 1001, 1009  # rfc-editor.org/rfc/rfc6455, section 7.4.1
_MOST_WAITING = 64  # connections of a port that have no place
_HELLO = 2.0  # seconds after which one that has not said hello is no robot among many that came at once
_MOST_PARTS = 1024  # frames of a message
_PART = 256  # bytes that a frame takes in memory beside its contents
_PIECE = 1 << 10  # bytes that are parsed at once: of the smallest frames 2 ms; more only within a frame
_TURN = 0.001  # seconds of parsing after which others come first
_CLOSE = 1.0  # seconds until a connection that was told to close is ended


class _Reading(ConnectionTransport):
    """The transport, which tells when its protocol wants to read again."""

    def __init__(self, transport: Any, resumed: Callable[[], object]) -> None:
        super().__init__(transport, transport.close)
        self._resumed = resumed

    def resume_reading(self) -> None:
        """See `asyncio.ReadTransport`."""
        super().resume_reading()
        self._resumed()


class RobotConnection(ServerConnection):
    """A connection of `websockets`' server. See `limits.Limited`.

    `RobotServer` sets the class attributes in a subclass for its port.

    Attributes:
        account: what the connection holds.
        placed: whether it has a place.
    """

    budget: native.Budget  # of the process
    turns: Turns  # of the process
    open: set[RobotConnection]  # of the port
    clients: int  # places of the port

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.account = native.Account(self.budget, ROBOTS)
        self.placed = False
        self._heard = time.monotonic()
        self._rest = bytearray()  # what was read and not parsed yet
        self._part = self._parts = 0  # bytes and frames of the message that is not complete
        self._messages: deque[int] = deque()  # bytes of each message that is complete and not taken
        self._counted = 0
        self._awaited = 0  # bytes that the parser waits for: of a frame's head, or of its contents
        self._gathered = 0  # bytes of the contents that it has already
        self._failed = False  # whether the peer was told why its connection ends
        self._waits = False  # whether it has its turn later
        self._full = False  # whether the peer does not read what it is sent

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.BaseProtocol`."""
        self.open.add(self)
        # Who comes while places are free is about to get one: only more than can wait beside all of them are too many.
        if len(self.open) > self.clients + _MOST_WAITING:
            self._make_room()
        self._reading = _Reading(transport, self._resumed)
        wrapped: Any = self._reading
        reader: Any = self.protocol.reader
        reader.read_exact = self._read_exact
        super().connection_made(wrapped)

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.BaseProtocol`."""
        self.open.discard(self)
        self._rest.clear()
        super().connection_lost(exc)
        frames = self.recv_messages.frames
        if frames.get_waiter is None:  # nobody is about to take one
            frames.queue.clear()  # the connection refers to itself, and is freed late
        self._part = 0
        self._messages.clear()
        self._count()

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self._heard = time.monotonic()
        self.turns.heard(self)
        if self._rest or self._stopped:
            self._rest += data
        else:
            if not self._failed:
                self._parse(data)
            seconds = self.turns.spent(self._heard, len(data))
            if len(data) >= HEAP and not self._stopped and self.turns.rest(self, seconds) > 0:
                self._later(seconds)
        self._count()

    def process_event(self, event: Any) -> None:
        """See `websockets.asyncio.connection.Connection`."""
        if self.request is not None and event.opcode in DATA_OPCODES:
            self._part += len(event.data) + _PART
            self._parts += 1
            if event.fin:
                self._messages.append(self._part)
                self._part = self._parts = 0
            elif self._parts >= _MOST_PARTS:
                self._fail(_TOO_BIG, f"a message may have {_MOST_PARTS} frames: send fewer and larger ones")
                return
        super().process_event(event)

    async def recv(self, decode: bool | None = None) -> Any:
        """See `websockets.asyncio.connection.Connection`."""
        message = await super().recv(decode)
        if self._messages:
            self._messages.popleft()
        self._count()
        return message

    def pause_writing(self) -> None:
        """See `asyncio.BaseProtocol`: a peer that does not read is not read, or its pings would pile up as pongs."""
        super().pause_writing()
        self._full = True
        self._reading.rest()

    def resume_writing(self) -> None:
        """See `asyncio.BaseProtocol`."""
        super().resume_writing()
        self._full = False
        self._read_on()

    @property
    def is_ahead(self) -> bool:
        """Whether another message is here already."""
        return bool(self._messages)

    def go_on(self) -> None:
        """See `pace.HasTurns`."""
        self._waits = False
        self._read_on()

    def end_silent(self, now: float) -> None:
        """End a connection whose message does not go on, or one of too many that have not said hello for a while.

        Args:
            now: a time of the monotonic clock in s.
        """
        if now - self._heard >= _HELLO and self.silent and sum(not one.placed for one in self.open) > _MOST_WAITING:
            self.open.discard(self)
            self.abort()
            return
        if self._stopped or now - self._heard < SILENCE:
            return
        if self.protocol.state is State.OPEN and (self._part or self._unparsed):
            self._fail(_GOING_AWAY, f"a message was not complete, and nothing came for {SILENCE:.0f} s")

    def abort(self) -> None:
        """Close the connection at once."""
        self.transport.abort()

    @property
    def silent(self) -> bool:
        """Whether it has not said hello."""
        return not self.placed and self.request is None

    @property
    def _unparsed(self) -> int:
        """The bytes of a frame that is not complete."""
        return len(self.protocol.reader.buffer) + self._gathered

    @property
    def _stopped(self) -> bool:
        """Whether nothing is parsed now: others have their turn, or the peer or the reader of messages is behind."""
        return self._waits or self._full or self.recv_messages.paused

    def _parse(self, data: bytes | bytearray) -> None:
        """Parse as much as one turn allows, and keep the rest."""
        began, at = time.monotonic(), 0
        while at < len(data):
            if (seconds := time.monotonic() - began) > _TURN:
                self._later(seconds)
            if self._stopped:
                self._rest = bytearray(memoryview(data)[at:])
                self._reading.rest()  # nothing more, until this is parsed
                return
            end = at + max(_PIECE, self._awaited - len(self.protocol.reader.buffer))
            piece: Any = data if not at and end >= len(data) else bytes(memoryview(data)[at:end])  # no copy of all
            super().data_received(piece)
            at = end

    def _read_exact(self, size: int) -> Generator[None, None, bytes | bytearray]:
        """See `StreamReader.read_exact`.

        It notes what it waits for, and gathers the parts of a large frame: a buffer that grows is copied many times.
        """
        reader, parts = self.protocol.reader, list[bytearray]()
        self._awaited = size
        try:
            while len(reader.buffer) < self._awaited and not reader.eof:
                if len(reader.buffer) >= HEAP:
                    parts.append(reader.buffer)
                    self._gathered += len(reader.buffer)
                    self._awaited -= len(reader.buffer)
                    reader.buffer = bytearray()
                yield
            last = yield from StreamReader.read_exact(reader, self._awaited)
            return b"".join((*parts, last)) if parts else last
        finally:
            parts.clear()  # an error of a frame that ended early keeps these variables
            self._awaited = self._gathered = 0

    def _resumed(self) -> None:
        self.loop.call_soon(self._read_on)  # not within the call that takes a message

    def _read_on(self) -> None:
        if self._stopped or self.transport.is_closing():
            return
        if self._rest:
            data, self._rest = self._rest, bytearray()
            self._parse(data)
            self._count()
        if not (self._rest or self._waits or self._full):
            self._reading.go_on()

    def _later(self, seconds: float) -> None:
        if not self._waits:
            self._waits = True
            self._reading.rest()
            self.turns.later(self, seconds)

    def _count(self) -> None:
        """Count what is held of messages that nobody has taken. Without room the connection is ended."""
        held = len(self._rest) + self._unparsed + self._part + sum(self._messages)
        before, self._counted = self._counted, held
        if held <= before:
            self.account.give(RECEIVED, before - held)
        elif found := self.account.take(RECEIVED, held - before, held):
            self._counted = before
            self._fail(TRY_AGAIN_LATER, plain(refusal(self.account, self.budget, found), 100))

    def _fail(self, code: int, why: str) -> None:
        """Tell the peer why its connection ends; what it still sends is dropped."""
        if self.protocol.state is not State.OPEN:
            if self.protocol.state is State.CONNECTING:
                self.abort()
            return
        self._failed = True
        self._rest.clear()
        self.protocol.fail(code, why)
        self.protocol.reader.discard()
        self.send_data()
        asyncio.get_running_loop().call_later(_CLOSE, self.abort)

    def _make_room(self) -> None:
        """End the connection that has waited for a place for longest, first of those that have not said hello."""
        waiting = [one for one in self.open if not one.placed and one is not self]
        silent = [one for one in waiting if one.silent]
        min(silent or waiting, key=lambda one: one._heard).abort()
