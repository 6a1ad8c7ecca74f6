"""A connection of HTTP, whatever parses it: its budget, its turns, its end, and what follows its last answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from jurybox import native
from jurybox.server.security.doors import RETRY_AFTER
from jurybox.server.security.http import ACCOUNT
from jurybox.server.security.limits import ANSWERS, HTTP, HTTP_CONNECTIONS, SILENCE
from jurybox.server.security.pace import HEAP, Turns

KEEP_ALIVE = 75  # seconds that a connection may be idle between requests: longer than clients' pools keep theirs, so
# that no client sends a request just when its connection is closed (httpx: 5, aiohttp: 15; uvicorn's default: 5)
TURN = 0.002  # seconds, most that a request counts as work after which others come first
LINGER = 30.0  # seconds for which the rest of a request is read after its answer
PAUSE = 5.0  # seconds without a byte that end this
_LULL = 1.0  # seconds without a byte after which an idle connection may be ended to make room for others
_MOST_DROPPED = 8 << 20  # bytes that are read after an answer to what cannot be parsed
_INVALID = b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-type: text/plain; charset=utf-8\r\n"
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: %b\r\n"
    b"content-type: text/plain; charset=utf-8\r\n"
) % RETRY_AFTER.encode()
_WHY_FULL = b"%d connections are open and in use, as many as there may be: ask again later" % HTTP_CONNECTIONS
_LATE = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class ConnectionTransport:
    """The transport of a connection as uvicorn sees it: `close` is the connection's.

    Args:
        close: closes the connection; uvicorn calls it after an answer that ends the connection.
    """

    def __init__(self, transport: Any, close: Callable[[], None]) -> None:
        self._transport = transport
        self.close = close
        self.closing = False
        self._paused = self._resting = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """See `asyncio.WriteTransport`; nothing follows the answer that ends the connection."""
        if not self.closing:
            self._transport.write(data)

    def is_closing(self) -> bool:
        """See `asyncio.BaseTransport`."""
        return self.closing or self._transport.is_closing()

    def pause_reading(self) -> None:
        """See `asyncio.ReadTransport`."""
        self._paused = True
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """See `asyncio.ReadTransport`; after a rest."""
        self._paused = False
        if not self._resting:
            self._transport.resume_reading()

    def rest(self) -> None:
        """Read nothing until `go_on`, whatever the protocol wants."""
        self._resting = True
        self._transport.pause_reading()

    def go_on(self) -> None:
        """End a rest."""
        self._resting = False
        if not self._paused and not self._transport.is_closing():
            self._transport.resume_reading()


class Counted:
    """What a connection adds to uvicorn's: it is counted, and does not wait for ever. See `limits.Limited`.

    An answer may end the connection before its request is complete: a refusal of a large body, for example. If it were
    closed at once, the bytes that arrive afterwards would make the kernel reset it, and the client, which is still
    sending, would see that instead of the answer. So the rest of the request is read and dropped (RFC 9112, 9.6).

    Attributes:
        account: what the connection holds.
    """

    budget: native.Budget  # of the process, set in a subclass by `HttpServer`
    turns: Turns  # of the process, set likewise
    account: native.Account
    app: Any  # the application, as uvicorn calls it
    cycle: Any  # the request that was received last
    connections: set[Any]
    transport: Any
    _unsent = 0  # bytes in the transport's buffer, counted while it is paused
    _heard = 0.0
    _asked = False  # whether a byte was received
    _began = 0.0  # when the request that is being answered got its turn
    _follows = False  # whether the next request was received before the one before it was answered
    _since: float | None = None  # when the answer that ends the connection was written, while its request goes on
    _broken = False  # whether what comes now cannot be parsed
    _dropped = 0  # bytes of that

    def connection_made(self, transport: Any) -> None:
        """See `asyncio.BaseProtocol`."""
        self.account = native.Account(self.budget, HTTP)
        self._heard = time.monotonic()
        super().connection_made(ConnectionTransport(transport, self._close))  # type: ignore[misc]
        self._app, self.app = self.app, self._in_turn
        if len(self.connections) > HTTP_CONNECTIONS and not self._make_room():
            self._broken = True
            self.transport.write(_FULL + b"content-length: %d\r\n\r\n%b" % (len(_WHY_FULL), _WHY_FULL))
            if len(self.connections) > 2 * HTTP_CONNECTIONS:
                self.transport._transport.close()  # its client may see a reset instead
            else:
                self.transport.close()

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self._heard = time.monotonic()
        self._asked = True
        if self._since is None:
            super().data_received(data)  # type: ignore[misc]
            return
        if self._broken:
            self._drop_invalid(data)
        elif self._drop(data):
            self.transport._transport.close()

    def _drop_invalid(self, data: bytes) -> None:
        """Drop bytes that are no request, up to a bound."""
        self._heard = time.monotonic()
        self._dropped += len(data)
        if self._dropped > _MOST_DROPPED:
            self.transport._transport.close()

    async def _in_turn(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request; one that was sent before the answer to the one before it lets others go first."""
        scope[ACCOUNT] = self.account
        if self._follows:
            self._follows = False
            await self.turns.wait(self, min(time.monotonic() - self._began, TURN))
        self._began = time.monotonic()
        await self._app(scope, receive, send)

    def on_response_complete(self) -> None:
        """Note whether the next request is here already; uvicorn calls this after each answer."""
        earlier, waiting = self.cycle, self.pipelined
        super().on_response_complete()  # type: ignore[misc]
        self._follows = waiting or self.cycle is not earlier

    def send_400_response(self, msg: str) -> None:
        """Answer an invalid request; what follows it is no request."""
        self._broken = True
        body = msg.encode()
        self.transport.write(_INVALID + b"content-length: %d\r\n\r\n%b" % (len(body), body))
        self.transport.close()

    def pause_writing(self) -> None:
        """See `asyncio.BaseProtocol`."""
        self._count_unsent(self.transport.get_write_buffer_size())
        super().pause_writing()  # type: ignore[misc]

    def resume_writing(self) -> None:
        """See `asyncio.BaseProtocol`."""
        self._count_unsent(0)
        super().resume_writing()  # type: ignore[misc]

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.BaseProtocol`.

        A connection and its requests refer to each other. Without an end to that they would stay, all that waited among
        them, until the collector looks at its oldest objects, and a flood of them would take its memory for good.
        """
        self._count_unsent(0)
        super().connection_lost(exc)  # type: ignore[misc]
        self.cycle, self.app = None, self._app
        self.transport.close = self.transport._transport.close

    @property
    def between(self) -> bool:
        """Whether all requests were answered and no byte of the next was received."""
        raise NotImplementedError

    @property
    def pipelined(self) -> bool:
        """Whether requests were received that are answered after this one."""
        return False  # h11 leaves them in its buffer

    @property
    def sends_ahead(self) -> bool:
        """Whether what came last was sent before the answer to what came before it, or is no request."""
        return self.pipelined or self._broken

    @property
    def receiving(self) -> bool:
        """Whether a request has begun that is not complete."""
        raise NotImplementedError

    def end_silent(self, now: float) -> None:
        """End a request that does not go on, and a connection that has never sent one."""
        quiet = now - self._heard
        if self._since is not None:
            if quiet >= PAUSE or now - self._since >= LINGER:
                self.transport.abort()
            return
        if quiet < SILENCE or self.transport.is_closing():
            return
        if self.receiving:
            self.transport.write(_LATE)
            self.transport.close()
        elif not self._asked and quiet > KEEP_ALIVE:
            self.transport.close()

    def abort(self) -> None:
        """Close the connection at once."""
        self.transport.abort()

    @property
    def in_progress(self) -> bool:
        """Whether a request that does more than read is not answered yet, or its client may not have the answer."""
        return self._since is not None or bool(self.transport.get_write_buffer_size()) or self._works

    @property
    def _works(self) -> bool:
        """Whether a request that does more than read is not answered yet."""
        raise NotImplementedError

    def _drop(self, data: bytes) -> bool:
        """Parse the rest of a request that has its answer; return whether it is complete."""
        raise NotImplementedError

    def _close(self) -> None:
        """Close the connection; if a request is not complete, when it is."""
        transport, beneath = self.transport, self.transport._transport
        if transport.is_closing():
            return
        if not self.receiving and not self._broken:
            beneath.close()
            return
        transport.closing, self._since = True, time.monotonic()
        if beneath.can_write_eof():  # not with TLS, where the answer's length must do
            beneath.write_eof()
        transport.resume_reading()

    def _make_room(self) -> bool:
        """Return whether there is room, after ending one that has been idle for longest, or has not said a word."""
        before = time.monotonic() - _LULL
        used = [one for one in self.connections if one._since is None]  # the others have their last answer
        if len(used) <= HTTP_CONNECTIONS:
            return True
        idle = [one for one in used if one.between and not one._unsent and one is not self]
        found = [one for one in idle if one._heard < before] or [one for one in idle if not one._asked]
        if found:
            longest = min(found, key=lambda one: one._heard)
            self.connections.discard(longest)
            longest.abort()
        return bool(found)

    def _count_unsent(self, size: int) -> None:
        before, self._unsent = self._unsent, size
        self.account.give(ANSWERS, before)
        self.account.owe(ANSWERS, size)


class Paced:
    """What a connection adds to all of its layers: others come first after each large read, and each sent ahead."""

    turns: Turns  # of the process, set in a subclass by `HttpServer`
    transport: Any

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        began = time.monotonic()
        self.turns.heard(self)
        super().data_received(data)  # type: ignore[misc]
        ahead = getattr(self, "sends_ahead", False)  # a robot's connection has no requests
        if (len(data) >= HEAP or ahead) and not self.transport._transport.is_closing():
            self.transport.rest()
            asyncio.get_running_loop().call_soon(self._had_turn, began, len(data))  # behind what the read has set going

    def _had_turn(self, began: float, size: int) -> None:
        seconds = self.turns.spent(began, size)
        if self.turns.rest(self, seconds) > 0:
            self.turns.later(self, seconds)
        else:
            self.go_on()

    def go_on(self) -> None:
        """Read again."""
        self.transport.go_on()
