"""Inference requests and answers as HTTP bodies: JSON, and JSON with binary tensors after it.

After the protocol's "binary tensor data" extension: where the header Inference-Header-Content-Length is there, so many
bytes of JSON come first, then the binary tensors one after another in the order in which the JSON names them.
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

from jurybox.protocol.errors import Code, Refused, plain
from jurybox.server.gateway.inference.request import Input, Output, Request, Response, Wanted
from jurybox.server.gateway.inference.tensors import MOST_TENSORS, malformed, shown

LENGTH = "Inference-Header-Content-Length"
# What JSON of so many bytes becomes in memory: numbers eight times as much, lists and objects thirty times.
_MOST_PARTS = {b"{": 8 * MOST_TENSORS, b"[": 1 << 20, b'"': 64 * MOST_TENSORS}
_SIZE, _BINARY, _ALL_BINARY = "binary_data_size", "binary_data", "binary_data_output"


def request_of(model: str, version: str, body: bytes, json_length: str | None) -> tuple[Request, set[str], bool]:
    """The request in a body.

    Args:
        json_length: the header's value, where it is there.

    Returns:
        The request, the names of the outputs asked for in binary, and whether all others are.

    Raises:
        ProtocolMismatch (code MALFORMED): says what is wrong where.
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
        raise malformed(f"{len(binary)} bytes came after the tensors that {_SIZE} tells of: expected none")
    parameters = _parameters(given, "request")
    all_binary = _flag(parameters.pop(_ALL_BINARY, False), _ALL_BINARY)
    names: set[str] = set()
    outputs: list[Wanted] = []
    for part in _objects(given, "outputs") if "outputs" in given else []:
        _fields(part, "output", ("name", "parameters"))
        told = _parameters(part, "output")
        name = _text(part, "name", "output")
        if _flag(told.pop(_BINARY, all_binary), _BINARY):
            names.add(name)
        outputs.append(Wanted(name, told))
    identity = _text(given, "id", "request") if "id" in given else ""
    return Request(model, version, identity, inputs, outputs, parameters), names, all_binary and not outputs


def body_of(response: Response, binary: set[str], *, all_binary: bool) -> tuple[bytes, int | None]:
    """The body of an answer, and the length of its JSON where binary tensors follow."""
    raw: list[bytes] = []
    outputs = [_output(output, raw, binary=all_binary or output.name in binary) for output in response.outputs]
    told: dict[str, Any] = {"model_name": response.model, "model_version": response.version}
    if response.id:
        told["id"] = response.id
    if response.parameters:
        told["parameters"] = response.parameters
    head = json.dumps({**told, "outputs": outputs}, separators=(",", ":"), allow_nan=False).encode()
    return b"".join((head, *raw)), len(head) if raw else None


def whole(text: str, most: int) -> int:
    """A whole number from 0 to `most` in ASCII digits; -1 where the text is none."""
    if not (text.isascii() and text.isdigit()) or len(text) > 20:
        return -1
    number = int(text)
    return number if number <= most else -1


def read_json(body: bytes) -> dict[str, Any]:
    """An object. Raises ProtocolMismatch: it is none, or has more parts than a request has."""
    for mark, most in _MOST_PARTS.items():
        if (there := body.count(mark)) > most:
            raise malformed(
                f"the JSON has {there} {mark.decode()}, expected at most {most}: send tensors as binary data"
            )
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise malformed(f"the body is no JSON: {plain(error, 200)}") from error
    if not isinstance(given, dict):
        raise malformed(f"the body is a JSON {type(given).__name__}: expected an object")
    return given


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


def _output(output: Output, raw: list[bytes], *, binary: bool) -> dict[str, Any]:
    told: dict[str, Any] = {"name": output.name, "datatype": output.datatype, "shape": list(output.shape)}
    parameters = dict(output.parameters)
    if output.array is not None and binary:
        raw.append(output.array.tobytes())
        parameters[_SIZE] = len(raw[-1])
    elif output.array is not None:
        if output.array.dtype.kind == "f" and not math.isfinite(float(np.sum(output.array, dtype=np.float64))):
            raise Refused(
                f"output {output.name!r} holds NaN or infinity, which JSON cannot say: ask for it with binary_data",
                Code.UNSUPPORTED,
            )
        told["data"] = output.array.ravel().tolist()
    if parameters:
        told["parameters"] = parameters
    return told


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


def _flag(value: object, name: str) -> bool:
    if type(value) is not bool:
        raise malformed(f"parameter {name}={shown(value)}: expected true or false")
    return value
