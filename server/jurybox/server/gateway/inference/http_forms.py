"""A fast path for HTTP requests with binary tensors whose head was seen before.

A client's requests begin with the same bytes every time. The first one goes through uvicorn, all middlewares
(security.http) and the application. If it is answered with success, its head is cached: middlewares and routing depend
on those bytes alone, so they would accept the next request that begins with them. The body of that request is read as
a form (forms.py), without uvicorn and the application. The limit on the bytes of all bodies holds here too. Any
request with special features takes the normal path.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any, NamedTuple

from jurybox.protocol.errors import TABLE, Code, Error, Refused, said
from jurybox.server.gateway.http_connection import TURN
from jurybox.server.gateway.http_parsers import Connection
from jurybox.server.gateway.inference import http_inference, http_json
from jurybox.server.gateway.inference.forms import FormRequest, Forms
from jurybox.server.gateway.inference.inference import OpenInference
from jurybox.server.gateway.inference.requests import InferRequest, Output
from jurybox.server.gateway.inference.tensors import Parameters
from jurybox.server.security.access import OF_CONNECTION, ClientConnection
from jurybox.server.security.doors import RETRY_AFTER, Doors
from jurybox.server.security.http import ACCEPTED, SECURITY_HEADERS
from jurybox.server.security.limits import ANSWERS, Charge, refusal
from jurybox.server.security.pace import HEAVY

MOST_HEADS = 1024
MOST_HEAD = 8 << 10  # bytes of one
MOST_BODY = 4 << 20  # bytes; larger ones take the normal path
_BEGINS = b"POST /v2/models/"
ENDS = re.compile(rb"\n\r?\n")  # the end of a head, as h11 and httptools find it
_SPECIAL = frozenset({b"transfer-encoding", b"content-encoding", b"expect", b"upgrade", b"trailer"})
_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
_HEADERS = "".join(f"{name.lower()}: {value}\r\n" for name, value in SECURITY_HEADERS.items())
_HEADERS = f"cache-control: no-store\r\n{_HEADERS}\r\n"


class _Head(NamedTuple):
    """The contents of a head: the model, its version, and the lengths of body and JSON in bytes."""

    model: str
    version: str
    length: int
    json: int


class KnownHeads:
    """The cached request heads of all connections of a port, and the forms of their bodies.

    Args:
        doors: after they have closed, no request takes this path.
    """

    def __init__(self, oip: OpenInference, doors: Doors | None = None) -> None:
        self.forms = Forms(oip, _read_form, _written_heads)
        self.doors = doors or Doors()
        self.heads: dict[bytes, _Head] = {}

    def learn(self, head: bytes, scope: Any, model: str, version: str, json_length: int) -> None:
        """Cache the head of a request that was answered with binary tensors, if it can be cached."""
        length = plain_length(scope)
        if length is None or len(head) > MOST_HEAD or length > MOST_BODY or json_length >= HEAVY:
            return  # `Turns.decoded` reads large JSON, which may be another one behind the same head
        if len(self.heads) >= MOST_HEADS:
            self.heads.clear()
        self.heads[head] = _Head(model, version, length, json_length)


def plain_length(scope: Any) -> int | None:
    """Return the length of a request's body; None if its head has special features."""
    fields = scope["headers"]
    lengths = [value for name, value in fields if name == b"content-length"]
    stays = all(value.lower() == b"keep-alive" for name, value in fields if name == b"connection")
    special = any(name in _SPECIAL for name, _ in fields) or scope["http_version"] != "1.1" or not stays
    return None if special or len(lengths) != 1 else int(lengths[0])


def _read_form(key: bytes) -> InferRequest | None:
    model, version, size, body = key.split(b"\0", 3)
    try:
        request, names, all_binary = http_json.request_of(
            model.decode(), version.decode(), body + bytes(int(size)), str(len(body))
        )
    except Exception:  # noqa: BLE001  the normal path reports what is wrong
        return None
    binary = all_binary or (bool(request.outputs) and names == {one.name for one in request.outputs})
    return request if binary and not request.id and all(one.raw for one in request.inputs) else None


def _written_heads(
    model: str, version: str, outputs: Sequence[Output], sizes: Sequence[int], parameters: Parameters
) -> list[bytes]:
    described = [
        {"name": one.name, "datatype": one.datatype, "shape": list(one.shape), "parameters": {"binary_data_size": size}}
        for one, size in zip(outputs, sizes, strict=True)
    ]
    named = {"model_name": model, "model_version": version, **({"parameters": parameters} if parameters else {})}
    text = json.dumps({**named, "outputs": described}, separators=(",", ":"))
    head = (
        f"{http_json.LENGTH.lower()}: {len(text)}\r\ncontent-length: {len(text) + sum(sizes)}\r\n"
        f"content-type: application/octet-stream\r\n{_HEADERS}{text}"
    )
    return [head.encode(), *[b""] * (len(sizes) - 1)]


class InferProtocol(Connection):
    """A connection of uvicorn that answers requests with cached heads itself. It is their `Responder` for forms.py."""

    known: KnownHeads  # set in a subclass by `protocol_of`

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._head: _Head | None = None  # of the request that is being received or answered
        self._came = bytearray()  # the bytes received of that request: head and body
        self._begins = 0  # offset of the body in it
        self._taken: Charge | None = None  # what that request holds
        self._put: FormRequest | None = None  # that request, while it is being answered
        self._asking = self._gone = self._leaving = False
        self._ahead = b""  # bytes received after the request

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol.data_received`."""
        self._heard = time.monotonic()
        if self._asking:
            self._ahead += data
            self.flow.pause_reading()
        elif self._head is not None:
            self._more(self._head, data)
        elif data.startswith(_BEGINS) and self._idle() and (end := ENDS.search(data)):
            self._begin(data, data[: end.end()])
        else:
            self._to_uvicorn(data)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See `asyncio.BaseProtocol.connection_made`."""
        self._client = ClientConnection(transport.get_extra_info("peername"))
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.BaseProtocol.connection_lost`."""
        self._gone = True
        put, self._put = self._put, None
        if put is not None:
            put.drop()
        self._give()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Shut down as uvicorn's protocol, once the current request is answered."""
        self._leaving = True
        if self._head is None:
            super().shutdown()

    @property
    def in_progress(self) -> bool:
        """See `Connection.in_progress`."""
        return self._head is not None or super().in_progress

    @property
    def receiving(self) -> bool:
        """See `limits.Limited`."""
        return (self._head is not None and not self._asking) or super().receiving

    def _idle(self) -> bool:
        most = self.limit_concurrency
        closes = self._leaving or self.known.doors.closed
        return self.between and not closes and (most is None or len(self.connections) < most)

    def _begin(self, data: bytes, head: bytes) -> None:
        known = self.known
        if (found := known.heads.get(head)) is not None:
            self._unset_keepalive_if_required()
            self._head, self._came, self._begins = found, bytearray(head), len(head)
            self._taken = Charge(self.budget, self.account)
            self._more(found, data[len(head) :])
            return
        self._by_layers(
            data, head, http_inference.ANSWERED, lambda scope, *answered: known.learn(head, scope, *answered)
        )

    def _by_layers(self, data: bytes, head: bytes, mark: str, learn: Callable[..., None]) -> None:
        """Pass a request to uvicorn. Its handler finds `learn`, bound to the scope, in the scope under `mark`."""
        # Only the head at first: the bytes behind it may hold another request, whose scope would replace this one's.
        earlier, rest = self.scope, data[len(head) :]
        self._to_uvicorn(head)
        if (scope := self.scope) is not earlier:
            state: Any = scope
            state[mark] = partial(learn, scope)
        if rest and not self.transport.is_closing():
            self._to_uvicorn(rest)

    def _to_uvicorn(self, data: bytes) -> None:
        OF_CONNECTION.set(self._client)  # of the task in which uvicorn answers
        super().data_received(data)

    def _more(self, head: _Head, data: bytes) -> None:
        whole = self._begins + head.length
        if len(self._came) + len(data) > whole:
            cut = whole - len(self._came)
            data, self._ahead = data[:cut], data[cut:]
        self._came += data
        assert self._taken is not None
        try:
            self._taken.take(len(data), whole)  # as data arrives: a declared length alone must not reserve anything
        except Refused:
            self._as_usual()  # which reports the error
            return
        if len(self._came) < whole:
            return
        at = self._begins + head.json
        key = (head.model.encode(), head.version.encode(), str(head.length - head.json).encode(),
                bytes(self._came[self._begins : at]))  # fmt: skip
        form, inputs = self.known.forms.get(b"\0".join(key)), None
        if form is not None:
            places = []
            for size in form.sizes:
                places.append((at, size))
                at += size
            inputs = form.rows(self._came, places) if at == whole else None
        if form is None or inputs is None:
            self._as_usual()
            return
        self._asking, self._began = True, time.monotonic()
        self._put = form.ask(inputs, None, self, Charge(self.budget, self.account, ANSWERS))

    # ---- the responder

    @property
    def connection(self) -> ClientConnection | None:
        """See `Responder.connection`."""
        return None if self._ahead else self._client

    def done(self) -> bool:
        """See `Responder.done`."""
        return self._gone

    def reply(self, pieces: list[bytes]) -> None:
        """See `Responder.reply`."""
        size = sum(map(len, pieces))
        if found := self.account.take(ANSWERS, size):
            self.fail(refusal(self.account, self.budget, found, ANSWERS))
            return
        self._answer(200, pieces)
        self.account.give(ANSWERS, size)  # what the kernel has not taken is counted while the transport is paused

    def fail(self, error: Error) -> None:
        """See `Responder.fail`."""
        if error.code == Code.STALE_LEASE:  # the normal path uses another lane, perhaps with another spec
            self._as_usual()
            return
        row = TABLE.get(error.code)
        text = json.dumps({"error": said(error), "code": error.code.name}, ensure_ascii=False, separators=(",", ":"))
        body = text.encode("utf-8", "backslashreplace")
        later = f"retry-after: {RETRY_AFTER}\r\n" if error.code in (Code.BUSY, Code.DRAINING) else ""
        fields = f"content-length: {len(body)}\r\ncontent-type: application/json\r\n{later}{_HEADERS}".encode()
        self._answer(row.http if row else 500, [fields, body])

    # ---- inside

    def _as_usual(self) -> None:
        data = bytes(self._came) + self._ahead
        self._give()
        self._ahead = b""
        earlier = self.scope
        self._to_uvicorn(data)
        if (scope := self.scope) is not earlier:
            marked: Any = scope
            marked[ACCEPTED] = True

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

    def resume_writing(self) -> None:
        """See `asyncio.BaseProtocol.resume_writing`."""
        super().resume_writing()
        self.flow.resume_reading()

    def _give(self) -> None:
        """End the current request and release its bytes."""
        taken, self._taken = self._taken, None
        self._head, self._asking, self._came, self._put = None, False, bytearray(), None
        if taken is not None:
            taken.give()


def protocol_of(oip: OpenInference, doors: Doors | None = None) -> type[InferProtocol]:
    """Return the protocol class for the connections of a port."""
    return type("KnownInferProtocol", (InferProtocol,), {"known": KnownHeads(oip, doors)})
