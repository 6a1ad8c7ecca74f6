"""One inference: from a request as it came to arrays, through a lane, and back to an answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

from jurybox.protocol.errors import Code, Error, ModelNotFound, SpecMismatch
from jurybox.protocol.spec import TensorSpec
from jurybox.server.gateway.inference import parameters
from jurybox.server.gateway.inference.lanes import PATIENCE, Held, Lanes
from jurybox.server.gateway.inference.parameters import NOTHING, Place
from jurybox.server.gateway.inference.request import Input, Output, Request, Response, Wanted
from jurybox.server.gateway.inference.shared_memory import Regions
from jurybox.server.gateway.inference.tensors import checked_shape, datatype_of, from_raw, from_values, malformed

_TRIES = 3  # lanes that a request is asked on where one after another is taken back
_FINAL = {"triton_final_response": True}


class Inference:
    """Answers requests on the gateway's lanes.

    Args:
        regions: shared memory that requests may name.
        told: the name of a model, and whether a request to it was answered.
    """

    def __init__(self, lanes: Lanes, regions: Regions, told: Callable[[str, bool], None]) -> None:
        self._lanes = lanes
        self._regions = regions
        self._told = told

    async def infer(self, request: Request) -> Response:
        """Answer one request.

        Raises:
            Error: with a code of jurybox.protocol.errors that says what the transport should answer.
        """
        asked = parameters.of_request(request.parameters) if request.parameters else NOTHING
        version = parameters.weights_version(request.version)
        seconds = min(value for value in (asked.seconds, request.seconds, PATIENCE) if value is not None)
        until = time.monotonic() + seconds
        tries = _TRIES
        while True:
            held = await self._lanes.hold(request.model)
            inputs, n = self._inputs(held, request.inputs)
            places = self._wanted(held, request.outputs, n)
            try:
                arrays, used = await self._lanes.ask(held, inputs, n, until - time.monotonic(), version)
                break
            except Error as error:
                tries -= 1
                if error.code == Code.STALE_LEASE and tries:
                    continue  # with another spec perhaps, so everything is checked anew
                self._told(request.model, False)
                raise
        if request.version and used != version:
            raise ModelNotFound(
                f"version {version} of {request.model!r} is not held, {used} is the newest: name one that is, or none"
            )
        self._told(request.model, True)
        outputs = [self._output(held, name, arrays[name], place) for name, place in places]
        return Response(request.model, str(used), request.id, outputs, _FINAL if asked.final else {})

    def _inputs(self, held: Held, given: list[Input]) -> tuple[dict[str, NDArray[Any]], int]:
        """Arrays by name, n rows each."""
        specs = held.spec.inputs
        arrays: dict[str, NDArray[Any]] = {}
        n = 0
        for tensor in given:
            spec = specs.get(tensor.name)
            if spec is None or tensor.name in arrays:
                what = "came twice" if spec else "is not the model's"
                raise SpecMismatch(f"input {tensor.name!r} {what}; model {held.spec.name!r} takes {', '.join(specs)}")
            arrays[tensor.name] = array = self._input(tensor, spec)
            if n and len(array) != n:
                raise SpecMismatch(f"input {tensor.name!r} has {len(array)} rows, an earlier one {n}: expected as many")
            n = len(array)
        if len(arrays) < len(specs):
            raise SpecMismatch(f"model {held.spec.name!r} takes {', '.join(specs)}; came {', '.join(arrays) or 'none'}")
        return arrays, n

    def _input(self, tensor: Input, spec: TensorSpec) -> NDArray[Any]:
        shape = checked_shape(tensor.name, tensor.datatype, tensor.shape, spec)
        place = parameters.of_tensor(tensor.name, tensor.parameters) if tensor.parameters else None
        if place is not None:
            if tensor.data is not None:
                raise malformed(f"input {tensor.name!r} came with data and in shared memory: expected one of the two")
            return self._regions.read(place, shape, spec.numpy_dtype, tensor.name)
        if tensor.raw:
            return from_raw(tensor.name, tensor.data, shape, spec)
        if tensor.data is None:
            raise malformed(f"input {tensor.name!r} came without data")
        return from_values(tensor.name, tensor.data, shape, spec)

    def _wanted(self, held: Held, wanted: list[Wanted], n: int) -> list[tuple[str, Place | None]]:
        """The outputs to give, each with the shared memory it goes to; refused before anything is computed."""
        specs = held.spec.outputs
        if not wanted:
            return [(name, None) for name in specs]
        places: dict[str, Place | None] = {}
        for output in wanted:
            if output.name not in specs:
                raise SpecMismatch(f"output {output.name!r} is not the model's; there are {', '.join(specs)}")
            if output.name in places:
                raise SpecMismatch(f"output {output.name!r} was asked for twice: name each once")
            place = parameters.of_tensor(output.name, output.parameters) if output.parameters else None
            if place is not None:
                self._regions.check(place, n * specs[output.name].row_bytes, output.name)
            places[output.name] = place
        return list(places.items())

    def _output(self, held: Held, name: str, array: NDArray[Any], place: Place | None) -> Output:
        datatype = datatype_of(held.spec.outputs[name])
        if place is None:
            return Output(name, datatype, array.shape, array)
        self._regions.write(place, array, name)
        told = {"shared_memory_region": place.region, "shared_memory_byte_size": place.size}
        if place.offset:
            told["shared_memory_offset"] = place.offset
        return Output(name, datatype, array.shape, None, told)
