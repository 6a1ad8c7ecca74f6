"""Requests and answers of the Open Inference Protocol as messages of open_inference.proto."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from jurybox.protocol import open_inference_pb2 as pb
from jurybox.server.gateway.inference.requests import InferRequest, InferResponse, Input, RequestedOutput
from jurybox.server.gateway.inference.tensors import MOST_DIMENSIONS, MOST_TENSORS, malformed

_FIELDS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
_REGION = "shared_memory_region"


def request_of(message: pb.ModelInferRequest, seconds: float | None) -> InferRequest:
    """Parse a message as a request.

    Args:
        seconds: the time until the call's deadline; None: it has none.

    Raises:
        ProtocolMismatch (code MALFORMED): raw contents and inputs do not match.
    """
    for what, there in (("inputs", len(message.inputs)), ("outputs", len(message.outputs))):
        if there > MOST_TENSORS:
            raise malformed(f"{what}: {there} came, expected at most {MOST_TENSORS}")
    raw = message.raw_input_contents
    inputs = [_input(tensor, raw=bool(raw)) for tensor in message.inputs]
    if raw:
        waiting = [tensor for tensor in inputs if _REGION not in tensor.parameters]
        if len(waiting) != len(raw):
            raise malformed(
                f"{len(raw)} raw_input_contents came for {len(waiting)} inputs: expected one for each that is not in "
                "shared memory"
            )
        for tensor, data in zip(waiting, raw, strict=True):
            tensor.data, tensor.raw = data, True
    return InferRequest(
        message.model_name,
        message.model_version,
        message.id,
        inputs,
        [RequestedOutput(output.name, _plain(output.parameters)) for output in message.outputs],
        _plain(message.parameters),
        seconds,
    )


def message_of(response: InferResponse) -> pb.ModelInferResponse:
    """Return the message of an answer. Outputs in shared memory have empty raw contents, which keeps the positions."""
    message = answer_of(response)
    message.raw_output_contents.extend([bytes(output.raw()) for output in response.outputs])
    return message


def answer_of(response: InferResponse) -> pb.ModelInferResponse:
    """Return the message of an answer without the data of its outputs."""
    message = pb.ModelInferResponse()
    message.CopyFrom(
        _head(response.model, response.version, tuple((o.name, o.datatype, o.shape) for o in response.outputs))
    )
    if response.id:
        message.id = response.id
    if response.parameters:
        _set_parameters(message.parameters, response.parameters)
    for place, output in enumerate(response.outputs):
        if output.parameters:
            _set_parameters(message.outputs[place].parameters, output.parameters)
    return message


@lru_cache(maxsize=1024)
def _head(model: str, version: str, outputs: tuple[tuple[str, str, tuple[int, ...]], ...]) -> pb.ModelInferResponse:
    """Return the common part of the answers to requests of the same form."""
    message = pb.ModelInferResponse(model_name=model, model_version=version)
    for name, datatype, shape in outputs:
        message.outputs.add(name=name, datatype=datatype, shape=shape)
    return message


def _input(tensor: pb.ModelInferRequest.InferInputTensor, *, raw: bool) -> Input:
    data: Any = None
    if tensor.HasField("contents"):
        if raw:
            raise malformed(f"input {tensor.name!r} has contents beside raw_input_contents: expected one of the two")
        field = _FIELDS.get(tensor.datatype)
        if field is None:
            raise malformed(f"input {tensor.name!r}: {tensor.datatype!r} has no typed contents: send it raw")
        data = getattr(tensor.contents, field)  # converted to a list only after its length was checked
    if len(tensor.shape) > MOST_DIMENSIONS:
        raise malformed(f"input {tensor.name!r} has {len(tensor.shape)} dimensions, expected at most {MOST_DIMENSIONS}")
    return Input(tensor.name, tensor.datatype, tuple(tensor.shape), data, False, _plain(tensor.parameters))


def _plain(parameters: Mapping[str, pb.InferParameter]) -> dict[str, Any]:
    if not parameters:
        return {}
    if len(parameters) > MOST_TENSORS:
        raise malformed(f"{len(parameters)} parameters came, expected at most {MOST_TENSORS}")
    return {name: plain_value(name, value) for name, value in parameters.items()}


def plain_value(name: str, value: pb.InferParameter | pb.ModelRepositoryParameter) -> Any:
    """Return the value of a parameter. Raises ProtocolMismatch if it is empty."""
    chosen = value.WhichOneof("parameter_choice")
    if chosen is None:
        raise malformed(f"parameter {name!r} holds no value")
    return getattr(value, chosen)


def _set_parameters(mapping: Any, parameters: Mapping[str, Any]) -> None:
    for name, value in parameters.items():
        field = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}[type(value)]
        setattr(mapping[name], field, value)
