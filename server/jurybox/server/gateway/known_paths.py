"""Requests whose head was seen before, answered without uvicorn, the middlewares and the application.

A client's requests begin with the same bytes every time, except for the length of the body. The first one goes through
uvicorn, all middlewares (security.http) and the application. If that answered it, its head is kept, without the length:
access control and routing depend only on these bytes and on the length, which has the same limit here. A later request
with that head is answered by the function that would have got its body. All other requests take the ordinary path.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from http import HTTPStatus
from typing import Any, NamedTuple

from jurybox.protocol.errors import TABLE, Code, Error, Refused, said
from jurybox.server.gateway.http_connection import TURN
from jurybox.server.gateway.http_parsers import Connection
from jurybox.server.security.access import OF_CONNECTION, ClientConnection
from jurybox.server.security.doors import RETRY_AFTER, Doors
from jurybox.server.security.http import ACCEPTED, DATA_HEADERS, DATA_ONLY, SECURITY_HEADERS, Refusal
from jurybox.server.security.limits import ANSWERS, OF_REQUEST, Charge, refusal
from jurybox.server.security.pace import joined

ANSWERED = "jurybox.answered"  # in a request's scope: called with what answers the bodies behind its head
VERSION_HEADER = "x-jurybox-weights-version"
MOST_HEADS = 1024
MOST_HEAD = 8 << 10  # bytes of one
MOST_BODY = 4 << 20  # bytes; larger ones take the ordinary path
NEVER_CACHED = (b"cache-control", b"no-store")
_BEGIN = b"POST /"
_ENDS = re.compile(rb"\n\r?\n")  # the end of a head, as h11 and httptools find it
_LENGTH = re.compile(rb"\r\n[Cc]ontent-[Ll]ength: ([0-9]{1,8})\r\n")
_SPECIAL = frozenset({b"transfer-encoding", b"content-encoding", b"expect", b"upgrade", b"trailer"})
_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}


def _ending(headers: list[tuple[bytes, bytes]]) -> bytes:
    return b"".join(b"%b: %b\r\n" % pair for pair in (NEVER_CACHED, *headers)) + b"\r\n"


# The last fields of an answer's head, and of one that is data only.
FIELDS = _ending([(name.lower().encode(), value.encode()) for name, value in SECURITY_HEADERS.items()])
_DATA_FIELDS = _ending(DATA_HEADERS)


class HttpReply(NamedTuple):
    """An HTTP response. Starlette's Response would take 0.03 ms to create.

    Attributes:
        media: media type of the body.
        version: weights version, sent in a header; None: no such header.
        headers: further headers, with names in lower case.
    """

    body: bytes
    media: str
    status: int = 200
    version: int | None = None
    headers: tuple[tuple[str, str], ...] = ()

    def fields(self) -> list[tuple[str, str]]:
        """Return all headers, including those of the body."""
        headers = [("content-length", str(len(self.body))), ("content-type", self.media)]
        if self.version is not None:
            headers.append((VERSION_HEADER, str(self.version)))
        return [*headers, *self.headers]


Endpoint = Callable[[bytes], Awaitable[HttpReply]]  # answers a body
Answer = Callable[[bytes], Awaitable[HttpReply | None]]  # likewise; None: the ordinary path is to answer this one


def refused(error: Error) -> HttpReply:
    """Return the answer to a request that failed, as the application writes it."""
    row = TABLE.get(error.code)
    text = {"error": said(error), "code": error.code.name}
    again = (("retry-after", RETRY_AFTER),) if error.code in (Code.BUSY, Code.DRAINING) else ()
    return HttpReply(to_json(text), "application/json", row.http if row else 500, None, again)


def to_json(document: Any) -> bytes:
    """Return JSON in UTF-8; half a surrogate pair, which UTF-8 cannot carry, is escaped. Raises ValueError for NaN."""
    text = json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")


def plain_length(scope: Any) -> int | None:
    """Return the length of a request's body; None if its head has special features."""
    fields = scope["headers"]
    lengths = [value for name, value in fields if name == b"content-length"]
    stays = all(value.lower() == b"keep-alive" for name, value in fields if name == b"connection")
    special = any(name in _SPECIAL for name, _ in fields) or scope["http_version"] != "1.1" or not stays
    return None if special or len(lengths) != 1 else int(lengths[0])


class _KnownPath(NamedTuple):
    """What is known of a head: who answers, the last fields of an answer, and who writes a refusal for want of room."""

    answer: Answer
    fields: bytes
    refuse: Refusal | None


class _PendingRequest(NamedTuple):
    """A request whose body is being received, or that is being answered."""

    head: bytes
    length: int
    path: _KnownPath
    taken: Charge
    parts: list[bytes]  # of the body, as received


class KnownPaths:
    """The known heads of a port, which all its connections share.

    Args:
        most: largest body, bytes.
        refusals: write the refusals of bodies in the form that a path's clients expect, by path; default: JSON.
    """

    def __init__(self, most: int, refusals: Mapping[str, Refusal] | None = None) -> None:
        self.most = min(most, MOST_BODY)
        self.heads: dict[tuple[bytes, bytes], _KnownPath] = {}  # by the parts before and after the length's digits
        self._refusals = refusals or {}

    def learn(self, head: bytes, scope: Any, answer: Answer) -> None:
        """Record that `answer` answered a request with this head."""
        length, found = plain_length(scope), _LENGTH.search(head)
        if length is None or found is None or int(found[1]) != length or len(head) > MOST_HEAD:
            return
        if len(self.heads) >= MOST_HEADS:
            self.heads.clear()
        fields = _DATA_FIELDS if DATA_ONLY in scope else FIELDS
        path = _KnownPath(answer, fields, self._refusals.get(scope["path"]))
        self.heads[head[: found.start(1)], head[found.end(1) :]] = path

    def of(self, head: bytes, taken: Charge) -> _PendingRequest | None:
        """Return a new request with this head, whose bytes `taken` counts; None if it must take the ordinary path."""
        if (found := _LENGTH.search(head)) is None:
            return None
        path = self.heads.get((head[: found.start(1)], head[found.end(1) :]))
        length = int(found[1])
        if path is None or length > self.most:
            return None
        return _PendingRequest(head, length, path, taken, [])


class KnownPathConnection(Connection):
    """A connection of uvicorn that answers requests with known heads itself."""

    paths: KnownPaths  # of the port; this and the next are set in a subclass
    doors: Doors  # after they have closed, every request takes the ordinary path

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._pending: _PendingRequest | None = None
        self._left = 0  # bytes of its body that are still to be received
        self._asking = self._gone = self._leaving = False
        self._ahead = b""  # bytes received after the request

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See `asyncio.BaseProtocol.connection_made`."""
        self._client = ClientConnection(transport.get_extra_info("peername"))
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Receive bytes of a request; see `asyncio.Protocol`."""
        self._heard = time.monotonic()
        if self._asking:
            self._ahead += data
            self.flow.pause_reading()
        elif self._pending is not None:
            self._part(self._pending, data)
        elif data.startswith(_BEGIN) and self._idle() and (end := _ENDS.search(data)):
            self._begin(data, data[: end.end()])
        else:
            self._to_uvicorn(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.BaseProtocol.connection_lost`."""
        self._gone = True
        self._give()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Shut down as uvicorn's connection, once the current request is answered."""
        self._leaving = True
        if not self._begun:
            super().shutdown()

    def resume_writing(self) -> None:
        """See `asyncio.BaseProtocol.resume_writing`."""
        super().resume_writing()
        self.flow.resume_reading()

    @property
    def in_progress(self) -> bool:
        """See `Connection.in_progress`."""
        return self._begun or super().in_progress

    @property
    def receiving(self) -> bool:
        """See `limits.Limited`."""
        return (self._begun and not self._asking) or super().receiving

    @property
    def _begun(self) -> bool:
        """Whether a request with a known head is being received or answered."""
        return self._pending is not None

    def _idle(self) -> bool:
        most = self.limit_concurrency
        closes = self._leaving or self.doors.closed
        return self.between and not closes and (most is None or len(self.connections) < most)

    def _begin(self, data: bytes, head: bytes) -> None:
        if (pending := self.paths.of(head, Charge(self.budget, self.account))) is None:
            self._by_layers(data, head)
            return
        self._unset_keepalive_if_required()
        self._pending, self._left = pending, pending.length
        self._part(pending, data[len(head) :])

    def _learn(self, head: bytes, scope: Any, answered: Any) -> None:
        """Keep a head whose request was answered by `answered`."""
        self.paths.learn(head, scope, answered)

    def _by_layers(self, data: bytes, head: bytes) -> None:
        """Pass a request to uvicorn. Who answers it finds `_learn`, bound to head and scope, in the scope."""
        # Only the head at first: the bytes behind it may hold another request, whose scope would replace this one's.
        earlier, rest = self.scope, data[len(head) :]
        self._to_uvicorn(head)
        if (scope := self.scope) is not earlier:
            state: Any = scope
            state[ANSWERED] = partial(self._learn, head, scope)
        if rest and not self.transport.is_closing():
            self._to_uvicorn(rest)

    def _to_uvicorn(self, data: bytes) -> None:
        OF_CONNECTION.set(self._client)  # of the task in which uvicorn answers
        super().data_received(data)

    def _accepted(self, data: bytes) -> None:
        """Pass a request that has been accepted to uvicorn, also after the doors have closed."""
        earlier = self.scope
        self._to_uvicorn(data)
        if (scope := self.scope) is not earlier:
            marked: Any = scope
            marked[ACCEPTED] = True

    def _part(self, pending: _PendingRequest, data: bytes) -> None:
        if len(data) > self._left:
            data, self._ahead = data[: self._left], data[self._left :]
        self._left -= len(data)
        if data:
            pending.parts.append(data)
            try:
                pending.taken.take(len(data), pending.length)  # as it arrives: a length alone must not reserve anything
            except Refused:  # the ordinary path answers with the error
                data, self._ahead = b"".join((pending.head, *pending.parts, self._ahead)), b""
                self._give()
                self._accepted(data)
                return
        if self._left:
            return
        self._asking, self._began = True, time.monotonic()
        task = self.loop.create_task(self._answered(pending))
        self.tasks.add(task)  # uvicorn waits for these tasks when it stops
        task.add_done_callback(self.tasks.discard)

    async def _answered(self, pending: _PendingRequest) -> None:
        parts = pending.parts
        OF_REQUEST.set(pending.taken)
        OF_CONNECTION.set(self._client)
        try:
            body = parts[0] if len(parts) == 1 else await joined(parts)
            parts.clear()
            reply = await pending.path.answer(body)
        except asyncio.CancelledError:
            self.transport.abort()  # there will be no answer
            raise
        finally:
            parts.clear()
            pending.taken.give()  # not before, even if the client has disconnected: a thread was using the body
        if self._gone:
            return
        if reply is None:
            ahead, self._ahead = self._ahead, b""
            self._give()
            self._accepted(pending.head + body + ahead)
            return
        size = len(reply.body)
        if found := self.account.take(ANSWERS, size):
            size, reply = 0, self._full(pending.path, refusal(self.account, self.budget, found, ANSWERS))
        if closes := ("connection", "close") in reply.headers:
            self._ahead = b""
        fields = "".join([f"{name}: {value}\r\n" for name, value in reply.fields()])
        self._answer(reply.status, [fields.encode("latin-1"), pending.path.fields, reply.body])
        self.account.give(ANSWERS, size)  # what the kernel has not taken is counted while the transport is paused
        if closes:
            self.transport.close()

    def _full(self, path: _KnownPath, error: Error) -> HttpReply:
        """Return the answer instead of one for which there is no room."""
        if path.refuse is None:
            return refused(error)
        status, headers, body = path.refuse(error)
        fields = {name.lower(): value for name, value in headers}
        return HttpReply(body, fields.pop("content-type"), status, None, (*fields.items(), ("connection", "close")))

    def _answer(self, status: int, pieces: list[bytes]) -> None:
        line = _LINES[status]
        default = [b"%b: %b\r\n" % pair for pair in self.server_state.default_headers]
        self._give()
        self.transport.write(b"".join((line, *default, *pieces)))
        self.on_response_complete()  # resumes reading and starts the keep-alive time-out
        if self._leaving:
            super().shutdown()
        elif self.flow.write_paused:
            self.flow.pause_reading()
        if self._ahead and not self.transport.is_closing():
            self._asking = True  # until its turn
            self.turns.after(self, min(time.monotonic() - self._began, TURN), self._next)

    def _next(self) -> None:
        self._asking = False
        if not (self._gone or self.transport.is_closing()):
            data, self._ahead = self._ahead, b""
            self.data_received(data)

    def _give(self) -> None:
        """End the current request and release its bytes."""
        pending, self._pending = self._pending, None
        if pending is not None and not self._asking:
            pending.taken.give()  # the body was not received in full
        self._asking = False
