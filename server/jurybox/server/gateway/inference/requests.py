"""Inference requests and responses of the Open Inference Protocol, independent of HTTP and gRPC."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jurybox.protocol.errors import Code, Refused
from jurybox.protocol.row_frames import extents_text, joined_strings
from jurybox.protocol.spec import BYTES, TensorSpec
from jurybox.server.frontend.requests import Rows
from jurybox.server.gateway.inference.parameters import ROW_ERRORS
from jurybox.server.gateway.inference.tensors import Parameters, datatype_of


@dataclass(slots=True)
class Input:
    """One input: its declared name, datatype and shape, and its elements.

    Attributes:
        data: bytes (raw), a sequence of plain values, or None if the elements are in shared memory or missing.
        raw: whether `data` is bytes.
    """

    name: str
    datatype: str
    shape: tuple[Any, ...]
    data: Any = None
    raw: bool = False
    parameters: Parameters = field(default_factory=dict)


@dataclass(slots=True)
class RequestedOutput:
    """One requested output."""

    name: str
    parameters: Parameters = field(default_factory=dict)


@dataclass(slots=True)
class InferRequest:
    """A request: rows for a model. If `outputs` is empty, all outputs are returned.

    Attributes:
        version: the weights version in decimal digits; empty: the newest.
        seconds: the time until the transport's own deadline; None: it has none.
    """

    model: str
    version: str
    id: str
    inputs: list[Input]
    outputs: list[RequestedOutput] = field(default_factory=list)
    parameters: Parameters = field(default_factory=dict)
    seconds: float | None = None


@dataclass(slots=True)
class Output:
    """One output.

    Attributes:
        array: an array of shape `shape`, or the byte strings of datatype BYTES; None if written to shared memory.
        failed: the rows without a value.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    array: NDArray[Any] | list[bytes] | None
    parameters: Parameters = field(default_factory=dict)
    failed: Collection[int] = ()

    def raw(self) -> bytes | memoryview:
        """Return the elements as raw bytes, without a copy if possible; empty if they are in shared memory."""
        if self.array is None:
            return b""
        if isinstance(self.array, list):
            return joined_strings(self.array)
        return np.ascontiguousarray(self.array).reshape(-1).view(np.uint8).data


@dataclass(slots=True)
class InferResponse:
    """A response; `version` is the weights version that computed it."""

    model: str
    version: str
    id: str
    outputs: list[Output]
    parameters: Parameters = field(default_factory=dict)


def row_errors(failed: Mapping[int, str]) -> Parameters:
    """Return the parameter of an answer that names the failed rows and their reasons."""
    return {ROW_ERRORS: json.dumps({str(row): reason for row, reason in failed.items()})}


def output_of(name: str, spec: TensorSpec, rows: Rows, failed: Mapping[int, str], *, extents: bool = False) -> Output:
    """Return an output as one tensor. Failed rows are NaN, 0 or empty.

    Raises:
        Refused (code UNSUPPORTED): its rows differ in size, and the request does not set extents.
    """
    nothing = np.nan if spec.floating else 0
    if spec.dtype == BYTES:
        strings = [b"" if row in failed else value for row, value in enumerate(rows)]
        return Output(name, "BYTES", (len(strings),), strings, {}, failed)
    if not spec.variable:
        assert isinstance(rows, np.ndarray)
        if failed:
            rows[list(failed)] = nothing
        return Output(name, datatype_of(spec), rows.shape, rows, {}, failed)
    shapes = {value.shape for row, value in enumerate(rows) if row not in failed}
    if extents and (len(shapes) != 1 or failed):
        empty = np.zeros(spec.measured([0] * spec.extents), spec.numpy_dtype)
        values = [empty if row in failed else value for row, value in enumerate(rows)]
        sizes = [spec.extents_of(value.shape) or () for value in values]
        flat = np.concatenate([value.reshape(-1) for value in values])
        return Output(name, datatype_of(spec), flat.shape, flat, {"extents": extents_text(sizes)})
    if len(shapes) > 1:
        raise Refused(
            f"rows of output {name!r} differ in size ({', '.join(map(str, sorted(shapes)[:3]))}), which one tensor "
            "cannot hold: ask one row at a time, or set the parameter extents to true for a flat tensor with the sizes",
            Code.UNSUPPORTED,
        )
    shape = shapes.pop() if shapes else spec.measured([0] * spec.extents)
    blank = np.full(shape, nothing, spec.numpy_dtype)
    array = np.stack([blank if row in failed else value for row, value in enumerate(rows)])
    return Output(name, datatype_of(spec), array.shape, array, {}, failed)
