"""The Open Inference Protocol over HTTP: requests and answers as JSON, or as JSON followed by binary tensors.

As in the protocol's "binary tensor data" extension: the header Inference-Header-Content-Length gives the length of the
JSON in bytes; the binary tensors follow it in the order in which the JSON names them.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jurybox.protocol.dtypes import BITS
from jurybox.protocol.errors import Code, Refused
from jurybox.server.gateway.inference.parameters import truth
from jurybox.server.gateway.inference.requests import InferRequest, InferResponse, Input, Output, RequestedOutput
from jurybox.server.gateway.inference.tensors import MOST_TENSORS, malformed, read_json, shown

LENGTH = "Inference-Header-Content-Length"
_SIZE, _BINARY, _ALL_BINARY = "binary_data_size", "binary_data", "binary_data_output"


def request_of(model: str, version: str, body: bytes, json_length: str | None) -> tuple[InferRequest, set[str], bool]:
    """Parse a body as a request.

    Args:
        json_length: the value of the header Inference-Header-Content-Length; None: it is absent.

    Returns:
        The request, the names of the outputs requested in binary, and whether all outputs are binary because the
        request names none.

    Raises:
        ProtocolMismatch (code MALFORMED): the body is invalid; the message names the field.
    """
    length = len(body)
    if json_length is not None:
        length = whole(json_length, len(body))
        if length < 0:
            raise malformed(f"{LENGTH}: {json_length[:20]!r}: expected 0 to {len(body)}, the body's length")
    given = read_json(body[:length])
    binary = memoryview(body)[length:]
    _fields(given, "request", ("id", "parameters", "inputs", "outputs"))
    inputs = []
    for part in _objects(given, "inputs"):
        tensor, taken = _input(part, binary)
        inputs.append(tensor)
        binary = binary[taken:]
    if len(binary):
        raise malformed(f"{len(binary)} bytes came after the tensors that {_SIZE} declares: expected none")
    parameters = _parameters(given, "request")
    all_binary = truth(_ALL_BINARY, parameters.pop(_ALL_BINARY, False))
    names: set[str] = set()
    outputs: list[RequestedOutput] = []
    for part in _objects(given, "outputs") if "outputs" in given else []:
        _fields(part, "output", ("name", "parameters"))
        wanted = _parameters(part, "output")
        name = _text(part, "name", "output")
        if truth(_BINARY, wanted.pop(_BINARY, all_binary)):
            names.add(name)
        outputs.append(RequestedOutput(name, wanted))
    identity = _text(given, "id", "request") if "id" in given else ""
    return InferRequest(model, version, identity, inputs, outputs, parameters), names, all_binary and not outputs


def body_of(response: InferResponse, binary: set[str], *, all_binary: bool) -> tuple[bytes, int | None]:
    """Return the body of an answer, and the length of its JSON if binary tensors follow, else None."""
    raw: list[bytes | memoryview] = []
    outputs = [_output(output, raw, binary=all_binary or output.name in binary) for output in response.outputs]
    document: dict[str, Any] = {"model_name": response.model, "model_version": response.version}
    if response.id:
        document["id"] = response.id
    if response.parameters:
        document["parameters"] = response.parameters
    head = json.dumps({**document, "outputs": outputs}, separators=(",", ":"), allow_nan=False).encode()
    return b"".join((head, *raw)), len(head) if raw else None


def whole(text: str, most: int) -> int:
    """Parse a whole number from 0 to `most` in ASCII digits; return -1 for any other text."""
    if not (text.isascii() and text.isdigit()) or len(text) > 20:
        return -1
    number = int(text)
    return number if number <= most else -1


def _input(part: dict[str, Any], binary: memoryview) -> tuple[Input, int]:
    _fields(part, "input", ("name", "shape", "datatype", "parameters", "data"))
    name = _text(part, "name", "input")
    shape = part.get("shape")
    if not isinstance(shape, list):
        raise malformed(f"input {name!r}: shape is {type(shape).__name__}, expected a list of whole numbers")
    parameters = _parameters(part, f"input {name!r}")
    tensor = Input(name, _text(part, "datatype", f"input {name!r}"), tuple(shape), None, False, parameters)
    if _SIZE in parameters:
        size = parameters.pop(_SIZE)
        if type(size) is not int or not 0 <= size <= len(binary) or "data" in part:
            raise malformed(
                f"input {name!r}: {_SIZE}={shown(size)}: expected 0 to {len(binary)}, the bytes left after the "
                f"JSON ({LENGTH} says where that ends), and no data beside it"
            )
        tensor.data, tensor.raw = binary[:size], True
        return tensor, size
    if "data" in part:
        if not isinstance(part["data"], list):
            raise malformed(f"input {name!r}: data is {type(part['data']).__name__}, expected a list of numbers")
        tensor.data = part["data"]
    return tensor, 0


def _output(output: Output, raw: list[bytes | memoryview], *, binary: bool) -> dict[str, Any]:
    document: dict[str, Any] = {"name": output.name, "datatype": output.datatype, "shape": list(output.shape)}
    parameters = dict(output.parameters)
    if output.array is not None and binary:
        raw.append(output.raw())
        parameters[_SIZE] = len(raw[-1])
    elif isinstance(output.array, list):
        document["data"] = _text_of(output.name, output.array)
    elif output.array is not None:
        document["data"] = _numbers(output, output.array)
    if parameters:
        document["parameters"] = parameters
    return document


def _numbers(output: Output, array: NDArray[Any]) -> list[Any]:
    """Return the elements as JSON values; null in failed rows."""
    if array.dtype.name in BITS:  # whose elements JSON does not know; float32 keeps all of them
        array = array.astype(np.float32)
    data: list[Any] = array.ravel().tolist()
    if array.dtype.kind != "f":
        return data
    if output.failed and len(array):
        size = len(data) // len(array)
        for row in output.failed:
            data[row * size : (row + 1) * size] = [None] * size
        array = array[[row for row in range(len(array)) if row not in output.failed]]
    if not np.isfinite(array).all():
        raise Refused(
            f"output {output.name!r} holds NaN or infinity, which JSON cannot represent: ask for it with binary_data",
            Code.UNSUPPORTED,
        )
    return data


def _text_of(name: str, rows: list[bytes]) -> list[str]:
    try:
        return [row.decode() for row in rows]
    except UnicodeDecodeError:
        raise Refused(
            f"output {name!r} holds bytes that are no UTF-8, which JSON cannot represent: ask for it with binary_data",
            Code.UNSUPPORTED,
        ) from None


def _fields(given: dict[str, Any], where: str, known: tuple[str, ...]) -> None:
    for name in given:
        if name not in known:
            raise malformed(f"{where}: field {name[:40]!r} is not known here; there are: {', '.join(known)}")


def _objects(given: dict[str, Any], name: str) -> list[dict[str, Any]]:
    parts = given.get(name)
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise malformed(f"{name}: expected a list of objects, came {type(parts).__name__}")
    if len(parts) > MOST_TENSORS:
        raise malformed(f"{name}: {len(parts)} came, expected at most {MOST_TENSORS}")
    return parts


def _text(given: dict[str, Any], name: str, where: str) -> str:
    value = given.get(name)
    if not isinstance(value, str):
        raise malformed(f"{where}: {name} is {type(value).__name__}, expected a string")
    return value


def _parameters(given: dict[str, Any], where: str) -> dict[str, Any]:
    value = given.get("parameters", {})
    if not isinstance(value, dict):
        raise malformed(f"{where}: parameters is {type(value).__name__}, expected an object")
    if len(value) > MOST_TENSORS:
        raise malformed(f"{where}: {len(value)} parameters came, expected at most {MOST_TENSORS}")
    return dict(value)
