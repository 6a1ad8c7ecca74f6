"""A request of the Open Inference Protocol: its tensors as rows for the frontend, and the rows of its answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jurybox.protocol.errors import SpecMismatch
from jurybox.protocol.parameters import Parameter, parameter_rows
from jurybox.protocol.spec import ModelSpec, TensorSpec
from jurybox.server.frontend.frontend import deadline
from jurybox.server.frontend.requests import GET, SET, ReadRows, Rows, RowsReply, RowsRequest
from jurybox.server.gateway.inference.parameters import Place, RequestParameters, of_tensor, weights_version
from jurybox.server.gateway.inference.requests import (
    InferRequest,
    InferResponse,
    Input,
    Output,
    RequestedOutput,
    output_of,
    row_errors,
)
from jurybox.server.gateway.inference.shared_memory import RegionData, Regions
from jurybox.server.gateway.inference.tensors import InputData, Parameters, RawData, TypedData, malformed, rows_of
from jurybox.server.security.access import OF_CONNECTION

FINAL = {"triton_final_response": True}


class AskedRows:
    """The rows of one request.

    Args:
        regions: the shared memory in which its tensors may lie.
        options: its parameters.
    """

    def __init__(self, regions: Regions, request: InferRequest, options: RequestParameters) -> None:
        self._regions = regions
        self._request = request
        self._options = options
        self._places: list[tuple[str, Place | None]] = []

    def rows_request(self, *, panel: bool = False) -> RowsRequest:
        """Return the request to the frontend. Raises Refused (code MODEL_NOT_FOUND) if its version is no number."""
        request, options = self._request, self._options
        version = None
        if request.version:
            version = 0 if panel else weights_version(request.version)  # a panel refuses every one
        return RowsRequest(
            request.model,
            self.read,
            deadline(options.seconds, request.seconds),
            version,
            options.priority,
            options.steps,
            options.state,
            [tensor.name for tensor in request.inputs],
            OF_CONNECTION.get(),
        )

    def read(self, spec: ModelSpec, partial: bool) -> ReadRows:
        """Return the rows for a spec; see `RowsRequest.read`."""
        options, given = self._options, self._request.inputs
        takes, gives = _specs(spec, options)
        own = {} if options.state else spec.parameters
        options.require_known(own)
        if partial:
            given = [tensor for tensor in given if tensor.name in takes]
        inputs, n = self._inputs(spec.name, takes, given, own, options.free)
        if options.state == GET and options.steps is not None:
            n = len(options.steps.sequences)
        if partial:  # the panel's outputs are scores, and are never written to shared memory
            return ReadRows(inputs, n, n * np.dtype(np.float32).itemsize)
        self._places = wanted(self._regions, gives, self._request.outputs, n)
        return ReadRows(inputs, n, n * sum(gives[name].row_bytes for name, place in self._places if place is None))

    def response(self, reply: RowsReply) -> InferResponse:
        """Return the response, after what is wanted in shared memory was written there."""
        assert reply.spec is not None
        gives, options = _specs(reply.spec, self._options)[1], self._options
        parameters: dict[str, Any] = dict(FINAL) if options.final else {}
        if reply.failed:
            parameters |= row_errors(reply.failed)
        made = [
            self._output(gives[name], name, reply.outputs[name], place, reply.failed) for name, place in self._places
        ]
        return InferResponse(self._request.model, str(reply.version), self._request.id, made, parameters)

    def _inputs(
        self,
        model: str,
        specs: Mapping[str, TensorSpec],
        given: list[Input],
        parameters: Mapping[str, Parameter],
        free: Parameters,
    ) -> tuple[dict[str, Rows], int]:
        """Return the rows of each input by name, and their number n.

        Args:
            model: its name.
            parameters: those of the model.
            free: their values in the request.
        """
        arrays: dict[str, Rows] = {}
        n = 0
        for tensor in given:
            spec = specs.get(tensor.name)
            if spec is None or tensor.name in arrays:
                what = "came twice" if spec else "is not the model's"
                raise SpecMismatch(f"input {tensor.name!r} {what}; model {model!r} takes {', '.join(specs) or 'none'}")
            arrays[tensor.name] = array = self._input(tensor, spec)
            if n and len(array) != n:
                raise SpecMismatch(f"input {tensor.name!r} has {len(array)} rows, an earlier one {n}: expected as many")
            n = len(array)
        for name, parameter in parameters.items():
            if parameter.input in arrays:
                if name in free:
                    raise SpecMismatch(f"parameter {name!r} is the input {parameter.input!r}, which came, too")
                continue
            n = n or 1  # all inputs may be parameters
            value = free.get(name, parameter.default)
            arrays[parameter.input] = parameter_rows(name, specs[parameter.input], value, n)
        if len(arrays) < len(specs):
            raise SpecMismatch(f"model {model!r} takes {', '.join(specs)}; came {', '.join(arrays) or 'none'}")
        return arrays, n

    def _input(self, tensor: Input, spec: TensorSpec) -> Rows:
        place, extents = of_tensor(tensor.name, tensor.parameters) if tensor.parameters else (None, None)
        source: InputData
        if place is not None:
            if tensor.data is not None:
                raise malformed(f"input {tensor.name!r} came with data and in shared memory: expected one of the two")
            source = RegionData(self._regions, place, tensor.name)
        elif tensor.data is None:
            source = InputData(tensor.name)
        else:
            source = RawData(tensor.name, tensor.data) if tensor.raw else TypedData(tensor.name, tensor.data)
        return rows_of(tensor.name, tensor.datatype, tensor.shape, spec, extents, source)

    def _output(
        self,
        spec: TensorSpec,
        name: str,
        rows: Rows,
        place: Place | None,
        failed: Mapping[int, str],
    ) -> Output:
        output = output_of(name, spec, rows, failed, extents=self._options.extents)
        if place is None:
            return output
        array = output.array
        written = np.frombuffer(output.raw(), np.uint8) if isinstance(array, list) else array
        assert written is not None
        self._regions.write(place, written, name)
        return Output(name, output.datatype, output.shape, None, {**output.parameters, **place.parameters()})


def wanted(
    regions: Regions, specs: Mapping[str, TensorSpec], asked: list[RequestedOutput], n: int
) -> list[tuple[str, Place | None]]:
    """Return the requested outputs, each with its place in shared memory or None; check them before computing."""
    if not asked:
        return [(name, None) for name in specs]
    places: dict[str, Place | None] = {}
    for output in asked:
        if output.name not in specs:
            raise SpecMismatch(f"output {output.name!r} is not the model's; there are {', '.join(specs) or 'none'}")
        if output.name in places:
            raise SpecMismatch(f"output {output.name!r} was asked for twice: name each once")
        place, extents = of_tensor(output.name, output.parameters) if output.parameters else (None, None)
        if extents is not None:
            raise malformed(f"output {output.name!r}: extents are the answer's to say; ask with extents: true")
        if place is not None:
            spec = specs[output.name]  # if its rows differ in size, the size of the output is not known yet
            regions.check(place, 0 if spec.variable else n * spec.row_bytes, output.name)
        places[output.name] = place
    return list(places.items())


def _specs(model: ModelSpec, options: RequestParameters) -> tuple[Mapping[str, TensorSpec], Mapping[str, TensorSpec]]:
    """Return the specs of a request's inputs and outputs; for a state exchange, those of the state and none."""
    if options.state == GET:
        return {}, model.state
    return (model.state, {}) if options.state == SET else (model.inputs, model.outputs)
