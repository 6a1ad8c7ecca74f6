"""Requests and answers whose rows all have fixed sizes: from rows to the bytes of a message, and back.

The messages for equally many rows differ only in the tensors' data. So a request's other bytes are made once, and its
rows are joined to them with one copy. An answer is parsed once; the data of a later one with the same other bytes, each
of which is compared, is copied from where it lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jurybox.protocol import open_inference_pb2 as pb
from jurybox.protocol.arena import Columns
from jurybox.protocol.row_frames import PlainFrames, field_head
from jurybox.protocol.spec import OIP_NAMES, ModelSpec

_RAW_IN, _RAW_OUT = 0x3A, 0x32  # tags: field number and wire type LEN
_MOST = 64  # forms that are kept


class ResponseForm(NamedTuple):
    """What answers have in common: their weights version and length, and the bytes before each output, with offsets."""

    version: int
    length: int
    heads: Sequence[tuple[bytes, int]]
    data: Sequence[slice]


class PlainMessages:
    """The messages of a lane whose rows all have fixed sizes; see `plain_messages`.

    Attributes:
        model: its name.
    """

    def __init__(self, base: pb.ModelInferRequest, spec: ModelSpec, inputs: PlainFrames, outputs: PlainFrames) -> None:
        self.model = spec.name
        self._base = base
        self._spec = spec
        self._inputs, self._outputs = inputs, outputs
        self._requests: dict[tuple[int, int], list[bytes]] = {}  # by rows and version
        self._answers: dict[int, ResponseForm] = {}  # by rows

    def request(self, first: int, rows: int, version: int) -> bytes:
        """Return the request for n rows, with a weights version or 0."""
        heads = self._requests.get((rows, version)) or self._heads(rows, version)
        pieces: list[bytes | memoryview] = []
        for head, data in zip(heads, self._inputs.views(first, rows), strict=True):
            pieces += (head, data)
        return b"".join(pieces)

    def request_of(self, row: NDArray[Any]) -> bytes:
        """Return the request for one row of a model's only input, C-contiguous and of the spec's dtype and shape."""
        (head,) = self._requests.get((1, 0)) or self._heads(1, 0)
        return b"".join((head, row.reshape(-1).view(np.uint8).data))  # NumPy exports no bfloat16

    def form_of(self, rows: int, answer: bytes) -> ResponseForm | None:
        """Return the form of an answer for n rows. None: it is unknown. Parse the answer, and tell `learn`."""
        form = self._answers.get(rows)
        if form is None or len(answer) != form.length:
            return None
        for head, at in form.heads:
            if not answer.startswith(head, at):
                return None
        return form

    def take(self, first: int, rows: int, answer: bytes) -> int | None:
        """Write an answer's outputs to n rows; return its weights version, or None as `form_of`."""
        if (form := self.form_of(rows, answer)) is None:
            return None
        whole = memoryview(answer)
        self._outputs.write(first, rows, [whole[data] for data in form.data])
        return form.version

    def learn(self, rows: int, answer: bytes, response: pb.ModelInferResponse, version: int) -> None:
        """Keep the form of an answer whose outputs have fitted, unless it has something that others may lack."""
        names = [tensor.name for tensor in response.outputs]
        if response.parameters or response.id or names != list(self._spec.outputs):
            return
        common = pb.ModelInferResponse()
        common.CopyFrom(response)
        common.ClearField("raw_output_contents")
        head, heads, data, at = common.SerializeToString(), [], [], 0
        for raw in response.raw_output_contents:
            head += field_head(_RAW_OUT, len(raw))
            heads.append((head, at))
            at += len(head)
            data.append(slice(at, at + len(raw)))
            at += len(raw)
            head = b""
        if at == len(answer) and all(answer.startswith(head, at) for head, at in heads):
            if len(self._answers) >= _MOST:
                self._answers.clear()
            self._answers[rows] = ResponseForm(version, at, heads, data)

    def _heads(self, rows: int, version: int) -> list[bytes]:
        """Return the bytes before each input of such requests."""
        request = pb.ModelInferRequest()
        request.CopyFrom(self._base)
        if version:
            request.model_version = str(version)
        for name, spec in self._spec.inputs.items():
            request.inputs.add(name=name, datatype=OIP_NAMES[spec.dtype], shape=(rows, *spec.shape))
        heads = [field_head(_RAW_IN, rows * spec.row_bytes) for spec in self._spec.inputs.values()]
        heads[0] = request.SerializeToString() + heads[0]
        if len(self._requests) >= _MOST:
            self._requests.clear()
        self._requests[rows, version] = heads
        return heads


def plain_messages(base: pb.ModelInferRequest, columns: Columns) -> PlainMessages | None:
    """Return the messages of a lane; None if they are not of fixed sizes, or have sessions.

    Args:
        base: what all requests begin with.
        columns: the lane's rows.
    """
    inputs, outputs = PlainFrames(columns, "inputs"), PlainFrames(columns, "outputs")
    return PlainMessages(base, columns.spec, inputs, outputs) if inputs and outputs else None
