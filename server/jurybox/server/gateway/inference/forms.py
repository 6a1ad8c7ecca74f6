"""A cache of parsed requests: a request of a known *form* is answered without parsing it again.

A client's requests differ only in their tensor data: model name, shapes, datatypes and requested outputs are the same
bytes every time. So a request is parsed and checked in full once, and the result is cached as its *form*, with those
bytes as the key. Of a later request of the same form only the raw data is read. It goes to the model's coalescer
without a task, and the head of its answer is already serialized. Requests with special features (a parameter other than
row_errors, rows that differ in size, sequences, panels) have no form and take the normal path, as does a form whose
model was reloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from jurybox.protocol.errors import Code, Error, ModelNotFound, Refused, RowFailed
from jurybox.server.frontend.lanes import DEFAULT_TIMEOUT, SharedLane
from jurybox.server.frontend.waiting_rows import Arrays, Put
from jurybox.server.gateway.inference.inference import OpenInference
from jurybox.server.gateway.inference.parameters import request_parameters, weights_version
from jurybox.server.gateway.inference.requests import InferRequest, Output, output_of, row_errors
from jurybox.server.gateway.inference.tensors import Parameters, datatype_of
from jurybox.server.security.access import ClientConnection
from jurybox.server.security.limits import Charge

_MOST_FORMS = 1024
_MOST_HEADS = 8  # weights versions for which the head of an answer is cached

# (model, version, outputs without their data, bytes of each, parameters of the answer) -> the bytes that precede the
# data of each output.
Heads: TypeAlias = Callable[[str, str, Sequence[Output], Sequence[int], Parameters], list[bytes]]
_NONE: Mapping[int, str] = {}


class Responder(Protocol):
    """The transport's side of one request."""

    @property
    def connection(self) -> ClientConnection | None:
        """The connection of the request, if it has no other request in flight; None: unknown."""
        ...

    def done(self) -> bool:
        """Return whether the caller no longer waits for the answer."""
        ...

    def reply(self, pieces: list[bytes]) -> None:
        """Answer with the concatenation of `pieces`."""
        ...

    def fail(self, error: Error) -> None:
        """Answer with an error; if its code is STALE_LEASE, repeat the request on the normal path instead."""
        ...


class Form:
    """The common parts of all requests of one form.

    Attributes:
        held: the lane for which they were parsed.
        n: the number of rows.
        inputs, outputs: their names, in the order of the request.
        sizes: the size of each input in bytes.
        pinned: whether the request names a weights version.
        used: the number of requests that `ask` has computed.
    """

    def __init__(
        self,
        oip: OpenInference,
        held: SharedLane,
        request: InferRequest,
        n: int,
        outputs: Sequence[str],
        heads: Heads,
    ) -> None:
        spec = held.spec
        self.held = held
        self._record_outcome = oip.frontend.record_outcome
        self._model, self.n = request.model, n
        self._version, self.pinned = weights_version(request.version), bool(request.version)
        self._row_errors = request_parameters(request.parameters).row_errors
        self.inputs, self.outputs = [one.name for one in request.inputs], list(outputs)
        self.used = 0
        self._arrays = [
            (one.name, spec.inputs[one.name].numpy_dtype, (n, *spec.inputs[one.name].shape)) for one in request.inputs
        ]
        self.sizes = [n * spec.inputs[one.name].row_bytes for one in request.inputs]
        self._outputs = [
            Output(name, datatype_of(spec.outputs[name]), (n, *spec.outputs[name].shape), None) for name in outputs
        ]
        self._answer_bytes = sum(n * spec.outputs[name].row_bytes for name in outputs)
        self._bytes = [n * spec.outputs[name].row_bytes for name in outputs]
        self._write_heads = heads
        self._written: dict[int, list[bytes]] = {}

    def rows(self, data: Any, places: Sequence[tuple[int, int]]) -> Arrays | None:
        """Return the inputs in `data`, each at its (offset, size); None if a size differs from the form's."""
        if [size for _, size in places] != self.sizes:
            return None
        return {
            name: np.ndarray(shape, dtype, data, at)
            for (name, dtype, shape), (at, _) in zip(self._arrays, places, strict=True)
        }

    def ask(
        self, inputs: Arrays, seconds: float | None, responder: Responder, room: Charge | None = None
    ) -> FormRequest:
        """Compute these rows and answer `responder`.

        Args:
            seconds: the responder's time-out; None: it has none.
            room: what the answer will hold while it is computed; None: nothing counts it.
        """
        left = DEFAULT_TIMEOUT if seconds is None else min(seconds, DEFAULT_TIMEOUT)
        answer = FormRequest(self, responder, room)
        if room is not None:
            try:
                room.take(self._answer_bytes)
            except Refused as error:
                answer.given = True
                responder.fail(error)
                return answer
        self.used += 1
        put = self.held.coalescer.put(inputs, self.n, left, self._version, answer, None, responder.connection)
        if answer.given:
            put.over()
        else:
            answer.put = put
        return answer

    def answered(self, outputs: Arrays, version: int, responder: Responder, failed: Mapping[int, str] = _NONE) -> None:
        """Send the outputs to the responder; those of failed rows without a value, and with the reasons."""
        if self.pinned and version != self._version:
            why = f"version {self._version} of {self._model!r} is not held, {version} is the newest"
            responder.fail(ModelNotFound(f"{why}: name one that is, or none"))
            return
        self._record_outcome(self._model, True)
        pieces: list[bytes] = []
        heads = self._heads(version, row_errors(failed)) if failed else self.heads(version)
        for head, output in zip(heads, self._outputs, strict=True):
            array: NDArray[Any] = outputs[output.name]
            if failed:
                output_of(output.name, self.held.spec.outputs[output.name], array, failed)  # overwrites those rows
            pieces += (head, array.tobytes())
        responder.reply(pieces)

    def heads(self, version: int) -> list[bytes]:
        """Return the bytes that precede each output in an answer with this weights version."""
        if (heads := self._written.get(version)) is None:
            if len(self._written) >= _MOST_HEADS:
                self._written.clear()
            heads = self._written[version] = self._heads(version, {})
        return heads

    def _heads(self, version: int, parameters: Parameters) -> list[bytes]:
        return self._write_heads(self._model, str(version), self._outputs, self._bytes, parameters)

    def failed(self, error: Error, responder: Responder) -> None:
        """Send the error to the responder; if it is that of single rows, and wanted so, with the others' outputs."""
        if self._row_errors and isinstance(error, RowFailed) and error.errors:
            names = self.held.spec.outputs
            outputs = error.outputs if len(names) > 1 else {next(iter(names)): error.outputs}
            self.answered(outputs, error.version, responder, error.errors)
            return
        if error.code != Code.STALE_LEASE:
            self._record_outcome(self._model, error.code == Code.ROW_FAILED)
        responder.fail(error)


class FormRequest:
    """A request: the receiver of its answer, in place of a future."""

    __slots__ = ("_form", "_responder", "_room", "given", "put")

    def __init__(self, form: Form, responder: Responder, room: Charge | None) -> None:
        self._form = form
        self._responder = responder
        self._room = room
        self.given = False
        self.put: Put | None = None

    def done(self) -> bool:
        # After an answer, a late result must not be sent as the answer to the connection's next request.
        return self.given or self._responder.done()

    def set_result(self, result: tuple[Arrays, int]) -> None:
        self._given()
        self._form.answered(*result, self._responder)

    def set_exception(self, error: Error) -> None:
        self._given()
        self._form.failed(error, self._responder)

    def drop(self) -> None:
        """Forget the request: nobody waits for its answer any more."""
        self._given()

    def _given(self) -> None:
        self.given = True
        put, self.put = self.put, None
        room, self._room = self._room, None
        if put is not None:
            put.over()
        if room is not None:
            room.give()


class Forms:
    """The cached forms of one transport.

    Args:
        read: parses the bytes of a form as a request whose contents are zeros or empty; returns None if the request
            cannot have a form.
        heads: serializes the head of an answer.
    """

    def __init__(self, oip: OpenInference, read: Callable[[bytes], InferRequest | None], heads: Heads) -> None:
        self._oip = oip
        self._read = read
        self._heads = heads
        self._forms: dict[bytes, Form | None] = {}

    def get(self, parts: bytes) -> Form | None:
        """Return the form of a request, or None if there is none."""
        form = self._forms.get(parts)
        if form is None and parts in self._forms:
            return None
        return self._made(parts) if form is None or form.held.retired else form

    def _made(self, parts: bytes) -> Form | None:
        if len(self._forms) >= _MOST_FORMS:
            self._forms.clear()
        request = self._read(parts)
        if request is None:
            self._forms[parts] = None
            return None
        held = self._oip.frontend.lanes.held(request.model)
        try:
            found = None if held is None else self._oip.plain(held, request)
            if held is None or found is None:
                return None
            form = Form(self._oip, held, request, *found, self._heads)
        except Error:
            return None  # the normal path reports what is wrong
        if any(one.raw and len(one.data) != size for one, size in zip(request.inputs, form.sizes, strict=True)):
            return None
        self._forms[parts] = form
        return form
