"""The HTTP server: uvicorn on a socket that is bound before the application starts.

Requests are parsed by httptools (llhttp, in C), which saves 0.15 ms per single request compared with h11, or by h11
where httptools is not installed. Of the two only h11 limits what it buffers, so this module adds limits to httptools.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from jurybox import native
from jurybox.protocol.address import is_loopback
from jurybox.server.security.access import Access
from jurybox.server.security.doors import RETRY_AFTER, Doors
from jurybox.server.security.http import ACCOUNT, READING, Refusal, guarded
from jurybox.server.security.limits import ANSWERS, HTTP, HTTP_CONNECTIONS, SILENCE, Limited
from jurybox.server.security.pace import HEAP, Turns
from jurybox.server.settings.endpoints import bound_name, listen, split_host

try:
    import httptools
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
except ImportError:  # there is no wheel for this Python
    HttpToolsProtocol = None  # type: ignore[assignment, misc]

_KEEP_ALIVE = 75  # seconds that a connection may be idle between requests: longer than clients' pools keep theirs, so
# that no client sends a request just when its connection is closed (httpx: 5, aiohttp: 15; uvicorn's default: 5)
_MOST_HEADERS = 32 << 10  # bytes of a request line and headers
GRACE = 0.5  # seconds that answers get to be sent when the gateway stops
_LOOK = 0.005  # seconds between two looks whether they are


TURN = 0.002  # seconds, most that a request counts as work after which others come first
_MOST_PIPELINED = 64  # requests of one connection that wait behind the one being answered


_LULL = 1.0  # seconds without a byte after which an idle connection may be ended to make room for others
LINGER = 30.0  # seconds for which the rest of a request is read after its answer
PAUSE = 5.0  # seconds without a byte that end this
_MOST_DROPPED = 8 << 20  # bytes that are read after an answer to what cannot be parsed
_INVALID = b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-type: text/plain; charset=utf-8\r\n"
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: %b\r\n"
    b"content-type: text/plain; charset=utf-8\r\n"
) % RETRY_AFTER.encode()
_WHY_FULL = b"%d connections are open and in use, as many as there may be: ask again later" % HTTP_CONNECTIONS
_LATE = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


def _works(cycle: Any) -> bool:
    return not cycle.response_complete and cycle.scope["method"] not in READING


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


class _Counted:
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
        elif not self._asked and quiet > _KEEP_ALIVE:
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


class _Paced:
    """What a connection adds to all of its layers: others come first after each large read of it."""

    turns: Turns  # of the process, set in a subclass by `HttpServer`
    transport: Any

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        began = time.monotonic()
        self.turns.heard(self)
        super().data_received(data)  # type: ignore[misc]
        if len(data) >= HEAP and not self.transport._transport.is_closing():
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


class _OneASecond(logging.Filter):
    """Lets one record of each text pass in a second: a stranger can cause any number of them."""

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """See `logging.Filter`."""
        now, text = time.monotonic(), str(record.msg)
        if record.levelno > logging.WARNING or now - self._last.get(text, -1.0) >= 1.0:
            self._last[text] = now
            return True
        return False


logging.getLogger("uvicorn.error").addFilter(_OneASecond())


class _Unfit(ValueError):
    """A request exceeds a limit, or its Host header is not valid; httptools rejects it, and it is answered 400."""


if HttpToolsProtocol is None:
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Connection(_Counted, H11Protocol):
        """uvicorn's h11 connection."""

        @property
        def between(self) -> bool:
            """Whether all requests were answered and no byte of the next was received."""
            conn = self.conn
            return conn.our_state is h11.IDLE and conn.their_state is h11.IDLE and not conn.trailing_data[0]

        @property
        def receiving(self) -> bool:
            """Whether a request has begun that is not complete."""
            state = self.conn.their_state
            return state is h11.SEND_BODY or (state is h11.IDLE and bool(self.conn.trailing_data[0]))

        @property
        def _works(self) -> bool:
            return self.cycle is not None and _works(self.cycle)

        def _drop(self, data: bytes) -> bool:
            try:
                self.conn.receive_data(data)
                while isinstance(self.conn.next_event(), h11.Data):
                    pass
            except h11.RemoteProtocolError:
                self._broken = True
                return False
            return self.conn.their_state is not h11.SEND_BODY

else:

    class Connection(_Counted, HttpToolsProtocol):  # type: ignore[no-redef]
        """uvicorn's httptools connection, with limits on the request head, chunk framing and pipelined requests.

        Like h11, it requires exactly one Host header in an HTTP/1.1 request.
        """

        _cycles: tuple[Any, ...] = ()  # requests that are not answered yet
        _reading = False  # whether a request has begun and is not complete yet
        _headed = False  # whether its head is complete
        _invalid: str | None = None  # why what was received last is no request; answered after those before it
        _loose = 0  # bytes received since the last part of a body or the last complete request
        _headers_bytes = 0  # of the request line, headers and trailers

        @property
        def pipelined(self) -> bool:
            """Whether requests were received that are answered after this one."""
            return bool(self.pipeline)

        @property
        def receiving(self) -> bool:
            """Whether a request has begun that is not complete."""
            return self._reading

        @property
        def between(self) -> bool:
            """Whether all requests were answered and no byte of the next was received."""
            return not self._reading and all(cycle.response_complete for cycle in self._cycles)

        @property
        def _works(self) -> bool:
            return any(_works(cycle) for cycle in self._cycles)

        def _drop(self, data: bytes) -> bool:
            try:
                self.parser.feed_data(data)
            except (httptools.HttpParserError, httptools.HttpParserUpgrade):
                self._broken = self._reading  # else another request begins
            return not self._reading

        def data_received(self, data: bytes) -> None:
            """Parse the data; see `asyncio.Protocol`.

            httptools calls `on_header` only for a complete header, so a header without end is counted here.
            """
            if self._invalid is not None:  # what follows is no request
                self._drop_invalid(data)
                return
            self._loose += len(data)
            super().data_received(data)
            if self._loose > _MOST_HEADERS and not self.transport.is_closing():
                self.send_400_response("Headers too large.")

        def on_message_begin(self) -> None:
            """Limit the pipelined requests; a callback of httptools."""
            if len(self.pipeline) >= _MOST_PIPELINED or self._since is not None:
                raise _Unfit
            self._headers_bytes, self._reading, self._headed = 0, True, False
            super().on_message_begin()

        def on_url(self, url: bytes) -> None:
            """Count the bytes of the URL; a callback of httptools."""
            self._count(len(url))
            super().on_url(url)

        def on_header(self, name: bytes, value: bytes) -> None:
            """Count the bytes of a header; a callback of httptools."""
            self._count(len(name) + len(value) + 4)  # 4: the colon, a space and CRLF
            super().on_header(name, value)

        def on_headers_complete(self) -> None:
            """Check the Host header; a callback of httptools."""
            hosts = [value for name, value in self.headers if name == b"host"]
            if len(hosts) > 1 or (not hosts and self.parser.get_http_version() == "1.1"):
                raise _Unfit
            super().on_headers_complete()
            self._headed = True
            self._cycles = (*(cycle for cycle in self._cycles if not cycle.response_complete), self.cycle)

        def send_400_response(self, msg: str) -> None:
            """Answer an invalid request, after the requests before it."""
            if self._reading and self._headed:  # its body will not be complete
                self._cycles = tuple(cycle for cycle in self._cycles if cycle is not self.cycle)
                self.pipeline = deque(waiting for waiting in self.pipeline if waiting[0] is not self.cycle)
                self._forget((self.cycle,))
            self._invalid, self._reading = msg, False
            self._refuse()

        def on_response_complete(self) -> None:
            """Answer an invalid request behind the one that was answered now; uvicorn calls this after each answer."""
            super().on_response_complete()
            if self._invalid is not None and not self.transport.is_closing():
                self._refuse()

        def _refuse(self) -> None:
            if self._invalid is not None and all(cycle.response_complete for cycle in self._cycles):
                super().send_400_response(self._invalid)

        def connection_lost(self, exc: Exception | None) -> None:
            """Mark all unanswered requests as disconnected; see `asyncio.Protocol`.

            uvicorn marks only the last request. With pipelining the one being answered is another.
            """
            self._forget(self._cycles)
            self._cycles = ()
            self.pipeline.clear()
            super().connection_lost(exc)

        def _forget(self, cycles: tuple[Any, ...]) -> None:
            for cycle in cycles:
                if not cycle.response_complete:
                    cycle.disconnected = True
                    cycle.message_event.set()

        def on_body(self, body: bytes) -> None:
            """Reset the count of framing bytes; a callback of httptools."""
            self._loose = 0
            super().on_body(body)

        def on_message_complete(self) -> None:
            """Record that the request is complete; a callback of httptools."""
            self._loose, self._reading = 0, False
            super().on_message_complete()

        def _count(self, size: int) -> None:
            self._headers_bytes += size
            if self._headers_bytes > _MOST_HEADERS:
                raise _Unfit


class _Uvicorn(uvicorn.Server):
    """uvicorn without signal handlers, since the supervisor handles signals, and without pauses at its end."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._ends = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    def end(self) -> None:
        self.should_exit = True
        self._ends.set()

    async def main_loop(self) -> None:
        counter = 0
        while not await self.on_tick(counter):
            counter = (counter + 1) % 864_000
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ends.wait(), 0.1)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close all connections. Requests without an answer are cancelled, which `Doorkeeper` reports to their clients.

        The supervisor has had the doors closed before, and what was accepted answered.
        """
        for server in self.servers:
            server.close()
        for listener in sockets or ():
            listener.close()
        state = self.server_state
        for connection in list(state.connections):
            connection.shutdown()
        for task in list(state.tasks):
            task.cancel()
        until = asyncio.get_running_loop().time() + GRACE
        while (state.connections or state.tasks) and asyncio.get_running_loop().time() < until:  # noqa: ASYNC110
            await asyncio.sleep(_LOOK)


class HttpServer:
    """An HTTP server that listens from its construction on; `run` also serves connections made before it.

    Args:
        address: "host:port"; port 0 selects a free one.
        app: the ASGI application.
        access: access control in front of the application.
        setting: the setting that the address comes from; see `listen`.
        protocol: class of the connections, instead of `Connection`.
        budget: that of the process; None: one of the server's own.
        refusals: write the refusals of bodies, by path; see `guarded`.
        doors: what comes after they have closed is refused.
        turns: shared with other doors.

    Attributes:
        bound: the address that it really listens on.

    Raises:
        CannotListen, ValueError: the address cannot be bound.
    """

    def __init__(
        self,
        address: str,
        app: ASGIApp,
        access: Access,
        setting: str = "server.http",
        protocol: type[asyncio.Protocol] | None = None,
        budget: native.Budget | None = None,
        refusals: Mapping[str, Refusal] | None = None,
        doors: Doors | None = None,
        turns: Turns | None = None,
    ) -> None:
        self._listener = listen(address, setting)
        host, self.port = self._listener.getsockname()[:2]
        self.bound = bound_name(host, self.port)
        budget = budget or access.budget()
        kind = protocol or Connection
        self._uvicorn = _Uvicorn(
            uvicorn.Config(
                guarded(
                    app,
                    access,
                    loopback=is_loopback(split_host(address)[0]),
                    budget=budget,
                    refusals=refusals,
                    doors=doors,
                ),
                # Explicit: uvicorn would choose a protocol by what is installed, and that one may have no limits.
                http=type(kind.__name__, (_Paced, kind), {"budget": budget, "turns": turns or Turns()}),
                ws="none",
                log_config=None,  # uvicorn's records go to Jurybox's handlers
                access_log=False,
                lifespan="off",
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE,
                h11_max_incomplete_event_size=_MOST_HEADERS,
                ssl_certfile=access.tls_cert,
                ssl_keyfile=access.tls_key,
            )
        )

    def connections(self) -> Iterable[Limited]:
        """Return the connections, for `limits.Watch`."""
        return tuple(self._uvicorn.server_state.connections)  # type: ignore[arg-type]

    async def run(self) -> bool:
        """Serve until `stop` is called, and return whether the server started."""
        await self._uvicorn.serve(sockets=[self._listener])
        return self._uvicorn.started

    def stop(self) -> None:
        """Make `run` return: requests in progress are refused, and all connections closed."""
        self._uvicorn.end()

    @property
    def busy(self) -> bool:
        """Whether a request is in progress that does more than read."""
        connections: Any = self._uvicorn.server_state.connections
        return any(connection.in_progress for connection in list(connections))
