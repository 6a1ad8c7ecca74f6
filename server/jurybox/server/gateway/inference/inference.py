"""An inference request and its answer, as every transport gives and takes them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from jurybox.protocol.errors import Code, Error, ModelNotFound, SpecMismatch
from jurybox.protocol.spec import TensorSpec
from jurybox.server.gateway.app import SelfTest
from jurybox.server.gateway.inference import models
from jurybox.server.gateway.inference.lanes import PATIENCE, Held, Lanes
from jurybox.server.gateway.inference.models import Repository
from jurybox.server.gateway.inference.shared_memory import Regions
from jurybox.server.gateway.inference.tensors import (
    NOTHING,
    Parameters,
    Place,
    checked_shape,
    datatype_of,
    from_raw,
    from_values,
    malformed,
    of_request,
    of_tensor,
    weights_version,
)
from jurybox.server.gateway.live import StatusSource


@dataclass(slots=True)
class Input:
    """One input: what its sender declares, and where its elements are.

    Attributes:
        data: bytes (raw), or a sequence of plain values, or None where a parameter names shared memory.
        raw: whether `data` is bytes.
    """

    name: str
    datatype: str
    shape: tuple[Any, ...]
    data: Any = None
    raw: bool = False
    parameters: Parameters = field(default_factory=dict)


@dataclass(slots=True)
class Wanted:
    """One output that is asked for."""

    name: str
    parameters: Parameters = field(default_factory=dict)


@dataclass(slots=True)
class InferRequest:
    """What a client asks: rows for a model. Without `outputs` it gets all of them.

    Attributes:
        version: of the weights, in digits; empty: the newest.
        seconds: until the transport's own deadline; None: it has none.
    """

    model: str
    version: str
    id: str
    inputs: list[Input]
    outputs: list[Wanted] = field(default_factory=list)
    parameters: Parameters = field(default_factory=dict)
    seconds: float | None = None


@dataclass(slots=True)
class Output:
    """One output: `array` of shape (n, *row shape), None where it was written to shared memory."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    array: NDArray[Any] | None
    parameters: Parameters = field(default_factory=dict)


@dataclass(slots=True)
class InferResponse:
    """The answer; `version` is that of the weights that computed it."""

    model: str
    version: str
    id: str
    outputs: list[Output]
    parameters: Parameters = field(default_factory=dict)


# ----
# One inference: from a request as it came to arrays, through a lane, and back to an answer.


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

    async def infer(self, request: InferRequest) -> InferResponse:
        """Answer one request.

        Raises:
            Error: with a code of jurybox.protocol.errors that says what the transport should answer.
        """
        asked = of_request(request.parameters) if request.parameters else NOTHING
        version = weights_version(request.version)
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
        return InferResponse(request.model, str(used), request.id, outputs, _FINAL if asked.final else {})

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
        place = of_tensor(tensor.name, tensor.parameters) if tensor.parameters else None
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
            place = of_tensor(output.name, output.parameters) if output.parameters else None
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


# ----
# The Open Inference Protocol in the gateway: what HTTP and gRPC share.


class OpenInference:
    """One server, as the protocol sees it.

    Args:
        address: the server's.
        shared_memory: what the names of clients' shared memory begin with; empty: they may name none.
    """

    def __init__(self, address: str, source: StatusSource, *, shared_memory: str) -> None:
        self._source = source
        self._lanes = Lanes(address)
        self.self_test = SelfTest(source, self._lanes)
        self.regions = Regions(shared_memory)
        self.inference = Inference(self._lanes, self.regions, self.self_test.told)
        self.repository = Repository(self._lanes)

    def metadata(self) -> dict[str, Any]:
        """Name, build, and which extensions of the protocol are served."""
        return models.server_metadata(shared_memory=self.regions.allowed)

    async def live(self) -> bool:
        """Whether the supervisor answers."""
        try:
            await self._source.status()
        except Error:
            return False
        return True

    async def reasons(self) -> list[str]:
        """Why the server is not ready; empty when it is."""
        return await self.self_test.reasons()

    async def model_reason(self, name: str, version: str) -> str:
        """Why a model is not ready; empty when it is. Raises ModelNotFound."""
        document = await self._source.status(fresh=True)
        model = models.find(document, name)
        if document["server"]["state"] == "draining" or model["state"] not in ("ready", "loading"):
            return f"the server is {document['server']['state']}, model {name!r} is {model['state']}"
        if wanted := weights_version(version):
            return await self.self_test.ask(name, wanted)
        if version and model["weights"]["version"]:  # "0": the weights it was loaded with
            return f"version 0 of {name!r} is not held, {model['weights']['version']} is the newest"
        return await self.self_test.silent(name)

    async def described(self, name: str, version: str) -> dict[str, Any]:
        """A model's part of the status document, once it has loaded. Raises as `models.described`."""
        return models.described(await self._source.status(fresh=True), name, version)

    async def statistics(self, name: str, version: str) -> list[dict[str, Any]]:
        """Of one model, or of all without a name. Raises ModelNotFound."""
        document = await self._source.status(fresh=True)
        found = [models.described(document, name, version)] if name else document["models"]
        return [models.statistics(model) for model in found]

    async def index(self, repository: str, *, ready: bool) -> list[dict[str, Any]]:
        """The models there are. Raises ModelNotFound for a repository by name: there is one, without."""
        if repository:
            raise ModelNotFound(f"no repository {repository!r}: a server has one, without a name")
        return models.index(await self._source.status(fresh=True), ready=ready)

    def doubt(self) -> None:
        """Something went wrong in the event loop that nobody awaited: it may have been the coming in of an answer."""
        self._lanes.doubt()

    def close(self) -> None:
        """Give lanes and regions back."""
        self._lanes.close()
        self.regions.close()
