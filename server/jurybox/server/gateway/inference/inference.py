"""The Open Inference Protocol, independent of HTTP and gRPC: its requests as rows for the frontend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jurybox.protocol.errors import Code, Error, Refused, SpecMismatch
from jurybox.protocol.scoreboard import NORMAL
from jurybox.protocol.wire import build_version
from jurybox.server.frontend.frontend import Frontend, deadline, require_version
from jurybox.server.frontend.lanes import SharedLane
from jurybox.server.frontend.panels import TOTAL
from jurybox.server.frontend.source import StatusSource
from jurybox.server.gateway.inference import models
from jurybox.server.gateway.inference.asked_rows import FINAL, AskedRows, wanted
from jurybox.server.gateway.inference.cuda_memory import CudaRegions
from jurybox.server.gateway.inference.models import Repository
from jurybox.server.gateway.inference.parameters import (
    NO_PARAMETERS,
    REGION,
    ROW_ERRORS,
    RequestParameters,
    of_tensor,
    request_parameters,
    weights_version,
)
from jurybox.server.gateway.inference.requests import (
    InferRequest,
    InferResponse,
    Input,
    Output,
    RequestedOutput,
    row_errors,
)
from jurybox.server.gateway.inference.shared_memory import Regions
from jurybox.server.gateway.inference.tensors import checked_shape, datatype_of


class OpenInference:
    """The implementation of the protocol, independent of transports; requests run on the gateway's lanes.

    Args:
        frontend: computes the rows.
        source: of the server's status.
        shared_memory: the prefix of the names of clients' shared memory; empty: they may register none.
        cuda_shared_memory: whether clients may register device memory.
    """

    def __init__(
        self, frontend: Frontend, source: StatusSource, *, shared_memory: str, cuda_shared_memory: bool = False
    ) -> None:
        self.frontend = frontend
        self.idle = frontend.sequences.idle
        self._source = source
        self.reasons = frontend.reasons
        self.sequences = frontend.sequences
        self.regions = Regions(shared_memory)
        self.cuda_regions = CudaRegions(allowed=cuda_shared_memory, frontend=frontend)
        self.repository = Repository(frontend)

    async def infer(self, request: InferRequest) -> InferResponse:
        """Run one request.

        Raises:
            Error: its code of jurybox.protocol.errors determines the transport's status code.
        """
        options = request_parameters(request.parameters) if request.parameters else NO_PARAMETERS
        if (members := self.frontend.panels.get(request.model)) is not None:
            return await self._panel(request, options, members)
        on_device = any(self._is_on_device(tensor) for tensor in request.inputs)
        if options.over or on_device:
            options.require_known()
        if options.over:
            self.sequences.over(request.model, options.over)
            return InferResponse(request.model, "", request.id, [])
        if on_device:
            return await self._infer_on_device(request, options)
        asked = AskedRows(self.regions, request, options)
        reply = await self.frontend.compute(asked.rows_request())
        if reply.lost:
            lost = {"session_lost": ",".join(map(str, reply.lost))}
            return InferResponse(request.model, "", request.id, [], lost)
        if reply.error is not None and not options.row_errors:
            raise reply.error
        return asked.response(reply)

    def plain(self, held: SharedLane, request: InferRequest) -> tuple[int, list[str]] | None:
        """Return the number of rows of a request and the names of its outputs, which do not depend on its contents.

        Return None if the request has special features and must be parsed each time. Raises Error if it is invalid.
        """
        spec = held.spec
        if spec.open or held.sessions is not None:
            return None
        if any(name != ROW_ERRORS for name in request.parameters):
            return None
        tensors: list[Input | RequestedOutput] = [*request.inputs, *request.outputs]
        if any(tensor.parameters for tensor in tensors) or {one.name for one in request.inputs} != set(spec.inputs):
            return None
        rows = {checked_shape(one.name, one.datatype, one.shape, spec.inputs[one.name])[0] for one in request.inputs}
        n = max(rows, default=0)
        if len(rows) != 1 or len(request.inputs) != len(spec.inputs) or n > held.piece:
            return None
        return n, [name for name, _ in wanted(self.regions, spec.outputs, request.outputs, n)]

    async def _infer_on_device(self, request: InferRequest, options: RequestParameters) -> InferResponse:
        """Run a request whose tensors all lie in device memory.

        Raises:
            Refused (code UNSUPPORTED): it belongs to a sequence, has a priority, or a parameter for which the gateway
                would have to write to the tensors. Any error of `CudaRegions.infer`.
        """
        if options.steps is not None or options.row_errors or options.priority != NORMAL:
            name = "a sequence" if options.steps is not None else ROW_ERRORS if options.row_errors else "a priority"
            raise Refused(
                f"{name} came with tensors in CUDA regions: expected none, or the tensors in the request or in system "
                "shared memory",
                Code.UNSUPPORTED,
            )
        until = deadline(options.seconds, request.seconds)
        spec = await self.frontend.spec(request.model, until)
        version = weights_version(request.version)
        inputs, outputs = {}, {}
        tensors: list[Input | RequestedOutput] = [*request.inputs, *request.outputs]
        for tensor in tensors:
            place, extents = of_tensor(tensor.name, tensor.parameters) if tensor.parameters else (None, None)
            if extents is not None:
                raise SpecMismatch(f"tensor {tensor.name!r}: extents are for rows that differ in size: expected none")
            if place is None or place.region not in self.cuda_regions:
                raise Refused(
                    f"tensor {tensor.name!r} lies in no CUDA region, others of this request do: expected all inputs "
                    "and all requested outputs there",
                    Code.UNSUPPORTED,
                )
            if isinstance(tensor, Input):
                inputs[tensor.name] = tensor.datatype, tensor.shape, place
            elif tensor.name in spec.outputs and tensor.name not in outputs:
                outputs[tensor.name] = place
            else:
                raise SpecMismatch(
                    f"output {tensor.name!r} is not the model's, or came twice: {', '.join(spec.outputs)}"
                )
        if not outputs:
            raise SpecMismatch("no output was asked for: name each that is wanted, with its CUDA region")
        rows, used = await self.cuda_regions.infer(spec, inputs, outputs, until, version)
        require_version(request.model, version if request.version else None, used)
        self.frontend.record_outcome(request.model, True)
        made = [
            Output(
                name,
                datatype_of(spec.outputs[name]),
                (rows, *spec.outputs[name].shape),
                None,
                place.parameters(),
            )
            for name, place in outputs.items()
        ]
        return InferResponse(request.model, str(used), request.id, made, dict(FINAL) if options.final else {})

    async def _panel(
        self, request: InferRequest, options: RequestParameters, members: Mapping[str, Any]
    ) -> InferResponse:
        """Run all members of a panel; a row without a score from one of them has no total.

        Raises:
            RowFailed: rows failed and the request does not set row_errors. Any error of a member's request.
        """
        if options.over:
            raise Refused(f"{request.model!r} is a panel: it has neither sequences nor a version", Code.UNSUPPORTED)
        if any(of_tensor(one.name, one.parameters)[0] is not None for one in request.outputs):
            raise Refused(f"{request.model!r} is a panel: its outputs do not go to shared memory", Code.UNSUPPORTED)
        known = {TOTAL: None, **members}
        names = [wanted.name for wanted in request.outputs] or list(known)
        if unlisted := [name for name in names if name not in known]:
            raise SpecMismatch(f"output {unlisted[0]!r} is not the panel's; there are {', '.join(known)}")
        if any(self._is_on_device(tensor) for tensor in request.inputs):
            raise Refused(f"{request.model!r} is a panel: its inputs do not come in device memory", Code.UNSUPPORTED)
        reply = await self.frontend.compute(AskedRows(self.regions, request, options).rows_request(panel=True))
        if reply.error is not None and not options.row_errors:
            raise reply.error
        parameters: dict[str, Any] = dict(FINAL) if options.final else {}
        if reply.failed:
            parameters |= row_errors(reply.failed)
        arrays = {name: np.asarray(reply.outputs[name]) for name in names}
        given = [
            Output(name, "FP32", array.shape, array, {}, tuple(np.flatnonzero(np.isnan(array))))
            for name, array in arrays.items()
        ]
        return InferResponse(request.model, str(reply.version), request.id, given, parameters)

    def metadata(self) -> dict[str, Any]:
        """Return name, version and supported extensions of the server."""
        memory = {"system_shared_memory": self.regions.allowed, "cuda_shared_memory": self.cuda_regions.allowed}
        extensions = [*models.EXTENSIONS, *(name for name, allowed in memory.items() if allowed)]
        return {"name": models.NAME, "version": build_version(), "extensions": extensions}

    async def live(self) -> bool:
        """Return whether the supervisor answers."""
        try:
            await self._source.status()
        except Error:
            return False
        return True

    def _is_on_device(self, tensor: Input) -> bool:
        region = tensor.parameters.get(REGION)
        return isinstance(region, str) and region in self.cuda_regions

    async def model_reason(self, name: str, version: str) -> str:
        """Return the reason why a model is not ready; empty if it is ready. Raises ModelNotFound."""
        document = await self._source.status(fresh=True)
        model = models.find(document, name)
        if name in document.get("panels", {}):
            members = {one["model"] for one in document["panels"][name].values()}
            found = [await self.model_reason(member, version) for member in sorted(members)]
            return "; ".join(why for why in found if why)
        if document["server"]["state"] == "draining" or model["state"] not in ("ready", "loading"):
            return f"the server is {document['server']['state']}, model {name!r} is {model['state']}"
        if wanted := weights_version(version):
            return await self.frontend.readiness.ask(name, wanted)
        if version and model["weights"]["version"]:  # version "0": the weights with which it was loaded
            return f"version 0 of {name!r} is not held, {model['weights']['version']} is the newest"
        return await self.frontend.readiness.silent(name)

    async def described(self, name: str, version: str) -> dict[str, Any]:
        """Return a loaded model's part of the status document. Raises the errors of `models.described`."""
        return models.described(await self._source.status(fresh=True), name, version)

    async def statistics(self, name: str, version: str) -> list[dict[str, Any]]:
        """Return the statistics of a model; without a name, of all. Raises ModelNotFound."""
        document = await self._source.status(fresh=True)
        found = [models.described(document, name, version)] if name else document["models"]
        if name in document.get("panels", {}):
            raise Refused(f"{name!r} is a panel: its members have statistics", Code.UNSUPPORTED)
        return [models.statistics(model) for model in found]

    async def index(self, repository: str, *, ready: bool) -> list[dict[str, Any]]:
        """List the models. Raises ModelNotFound if a repository is named."""
        models.only_ours(repository)
        return models.index(await self._source.status(fresh=True), ready=ready)

    def close(self) -> None:
        """Release all regions."""
        self.regions.close()
