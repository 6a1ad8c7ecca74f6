"""Connections of HTTP by what parses them: httptools (llhttp, in C), or h11 where it is not installed.

httptools saves 0.15 ms per single request compared with h11. Of the two only h11 limits what it buffers, so this module
adds limits to httptools.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from jurybox.server.gateway.http_connection import Counted
from jurybox.server.security.http import READING

try:
    import httptools
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
except ImportError:  # there is no wheel for this Python
    HttpToolsProtocol = None  # type: ignore[assignment, misc]

MOST_HEADERS = 32 << 10  # bytes of a request line and headers
_MOST_PIPELINED = 64  # requests of one connection that wait behind the one being answered


def _works(cycle: Any) -> bool:
    return not cycle.response_complete and cycle.scope["method"] not in READING


class _Unfit(ValueError):
    """A request exceeds a limit, or its Host header is not valid; httptools rejects it, and it is answered 400."""


if HttpToolsProtocol is None:
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Connection(Counted, H11Protocol):
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

    class Connection(Counted, HttpToolsProtocol):  # type: ignore[no-redef]
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
            if self._loose > MOST_HEADERS and not self.transport.is_closing():
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
            if self._headers_bytes > MOST_HEADERS:
                raise _Unfit
