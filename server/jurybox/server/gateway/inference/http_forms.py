"""A fast path for HTTP requests with binary tensors whose head was seen before.

What known_paths.py does for any body, in a shorter way for tensors: the head is the same to the last byte, so the body
is as long as the one before, and is read as a form (forms.py). Any request with special features takes the ordinary
path.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jurybox.protocol.errors import Code, Error, Refused
from jurybox.server.gateway.inference import http_json
from jurybox.server.gateway.inference.forms import FormRequest, Forms
from jurybox.server.gateway.inference.http_inference import Tensors
from jurybox.server.gateway.inference.inference import OpenInference
from jurybox.server.gateway.inference.requests import InferRequest, Output
from jurybox.server.gateway.inference.tensors import Parameters
from jurybox.server.gateway.known_paths import (
    FIELDS,
    MOST_BODY,
    MOST_HEAD,
    MOST_HEADS,
    KnownPathConnection,
    KnownPaths,
    plain_length,
    refused,
)
from jurybox.server.security.access import ClientConnection
from jurybox.server.security.doors import Doors
from jurybox.server.security.http import Refusal
from jurybox.server.security.limits import ANSWERS, Charge, refusal
from jurybox.server.security.pace import HEAVY

_BEGINS = b"POST /v2/models/"


class _Head(NamedTuple):
    """The contents of a head: the model, its version, and the lengths of body and JSON in bytes."""

    model: str
    version: str
    length: int
    json: int


class KnownHeads:
    """The cached request heads of all connections of a port, and the forms of their bodies."""

    def __init__(self, oip: OpenInference) -> None:
        self.forms = Forms(oip, _read_form, _written_heads)
        self.heads: dict[bytes, _Head] = {}

    def learn(self, head: bytes, scope: Any, answered: Tensors) -> None:
        """Cache the head of a request that was answered with binary tensors, if it can be cached."""
        length, (model, version, json_length) = plain_length(scope), answered
        if length is None or len(head) > MOST_HEAD or length > MOST_BODY or json_length >= HEAVY:
            return  # `Turns.decoded` reads large JSON, which may be another one behind the same head
        if len(self.heads) >= MOST_HEADS:
            self.heads.clear()
        self.heads[head] = _Head(model, version, length, json_length)


def _read_form(key: bytes) -> InferRequest | None:
    model, version, size, body = key.split(b"\0", 3)
    try:
        request, names, all_binary = http_json.request_of(
            model.decode(), version.decode(), body + bytes(int(size)), str(len(body))
        )
    except Exception:  # noqa: BLE001  the ordinary path reports what is wrong
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
        f"content-type: application/octet-stream\r\n"
    )
    return [head.encode() + FIELDS + text.encode(), *[b""] * (len(sizes) - 1)]


class InferConnection(KnownPathConnection):
    """A connection that answers requests with tensors behind a cached head. It is their `Responder` for forms.py."""

    known: KnownHeads  # set in a subclass by `connection_of`

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._head: _Head | None = None  # of the request that is being received or answered
        self._came = bytearray()  # the bytes received of that request: head and body
        self._begins = 0  # offset of the body in it
        self._taken: Charge | None = None  # what that request holds
        self._put: FormRequest | None = None  # that request, while it is being answered

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol.data_received`."""
        if self._head is not None and not self._asking:
            self._heard = time.monotonic()
            self._more(self._head, data)
        else:
            super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.BaseProtocol.connection_lost`."""
        self._gone = True
        put, self._put = self._put, None
        if put is not None:
            put.drop()
        super().connection_lost(exc)

    @property
    def _begun(self) -> bool:
        return self._head is not None or super()._begun

    def _begin(self, data: bytes, head: bytes) -> None:
        if not data.startswith(_BEGINS) or (found := self.known.heads.get(head)) is None:
            super()._begin(data, head)
            return
        self._unset_keepalive_if_required()
        self._head, self._came, self._begins = found, bytearray(head), len(head)
        self._taken = Charge(self.budget, self.account)
        self._more(found, data[len(head) :])

    def _learn(self, head: bytes, scope: Any, answered: Any) -> None:
        if isinstance(answered, Tensors):
            self.known.learn(head, scope, answered)
        else:
            super()._learn(head, scope, answered)

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
        if error.code == Code.STALE_LEASE:  # the ordinary path uses another lane, perhaps with another spec
            self._as_usual()
            return
        reply = refused(error)
        fields = "".join([f"{name}: {value}\r\n" for name, value in reply.fields()]).encode("latin-1")
        self._answer(reply.status, [fields, FIELDS, reply.body])

    # ---- inside

    def _as_usual(self) -> None:
        data = bytes(self._came) + self._ahead
        self._give()
        self._ahead = b""
        self._accepted(data)

    def _give(self) -> None:
        taken, self._taken = self._taken, None
        self._head, self._came, self._put = None, bytearray(), None
        if taken is not None:
            taken.give()
        super()._give()


def connection_of(
    oip: OpenInference, most: int, refusals: Mapping[str, Refusal] | None = None, doors: Doors | None = None
) -> type[InferConnection]:
    """Return the class of a port's connections.

    Args:
        most: largest body, bytes.
        refusals: see `KnownPaths`.
        doors: of the process.
    """
    shared = {"known": KnownHeads(oip), "paths": KnownPaths(most, refusals), "doors": doors or Doors()}
    return type("PortConnection", (InferConnection,), shared)
