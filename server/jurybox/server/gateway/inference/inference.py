"""Inference requests and responses, independent of HTTP and gRPC, and the model that answers them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jurybox.client.juror import score_output
from jurybox.protocol.errors import Code, Error, ModelNotFound, Refused, RowFailed, SessionLost, SpecMismatch
from jurybox.protocol.parameters import Parameter, parameter_rows
from jurybox.protocol.row_frames import extents_text, joined_strings
from jurybox.protocol.scoreboard import NORMAL
from jurybox.protocol.spec import BYTES, ModelSpec, TensorSpec
from jurybox.protocol.wire import build_version
from jurybox.server.frontend.lanes import DEFAULT_TIMEOUT, MOMENT, SOON, Lanes, ModelLane
from jurybox.server.frontend.sequences import IDLE, NoSession, Sequences, SequenceTurn
from jurybox.server.gateway.app import SelfTest
from jurybox.server.gateway.inference import models
from jurybox.server.gateway.inference.cuda_memory import CudaRegions
from jurybox.server.gateway.inference.models import Repository
from jurybox.server.gateway.inference.shared_memory import RegionData, Regions
from jurybox.server.gateway.inference.tensors import (
    GET,
    NO_PARAMETERS,
    REGION,
    ROW_ERRORS,
    SET,
    InputData,
    Parameters,
    Place,
    RawData,
    RequestParameters,
    Rows,
    TypedData,
    checked_shape,
    datatype_of,
    malformed,
    of_tensor,
    request_parameters,
    rows_of,
    weights_version,
)
from jurybox.server.gateway.live import StatusSource
from jurybox.server.security.limits import room_for_answer

Panels = Mapping[str, Mapping[str, Any]]


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


_TRIES = 3  # lanes on which a request is tried if they are revoked one after another
_GONE = (Code.STALE_LEASE, Code.SERVER_GONE)
_FINAL = {"triton_final_response": True}


class OpenInference:
    """The implementation of the protocol, independent of transports; requests run on the gateway's lanes.

    Args:
        address: the server's address.
        shared_memory: the prefix of the names of clients' shared memory; empty: they may register none.
        cuda_shared_memory: whether clients may register device memory.
        idle: seconds without a request after which a sequence ends.
        panels: the members of each panel by name, as in the status document.
    """

    def __init__(
        self,
        address: str,
        source: StatusSource,
        *,
        shared_memory: str,
        cuda_shared_memory: bool = False,
        idle: float = IDLE,
        panels: Panels | None = None,
    ) -> None:
        self.idle = idle
        self._source = source
        self._panels = panels or {}
        self.lanes = Lanes(address)
        self.self_test = SelfTest(source, self.lanes)
        self.record_outcome = self.self_test.record  # (model, answered): whether a request to it was answered
        self.reasons = self.self_test.reasons
        self.regions = Regions(shared_memory)
        self.cuda_regions = CudaRegions(allowed=cuda_shared_memory, lanes=self.lanes)
        self.sequences = Sequences(idle)
        self.repository = Repository(self.lanes)

    async def infer(self, request: InferRequest) -> InferResponse:
        """Run one request.

        Raises:
            Error: its code of jurybox.protocol.errors determines the transport's status code.
        """
        if request.model in self._panels:
            return await self._panel(request, self._panels[request.model])
        options = request_parameters(request.parameters) if request.parameters else NO_PARAMETERS
        if options.over or any(self._is_on_device(tensor) for tensor in request.inputs):
            options.require_known()
        if options.over:
            self.sequences.over(request.model, options.over)
            return InferResponse(request.model, "", request.id, [])
        if any(self._is_on_device(tensor) for tensor in request.inputs):
            return await self._infer_on_device(request, options)
        if options.steps is None:
            return await self._infer(request, options, None)
        with SequenceTurn(self.sequences, request.model, options.steps) as turn:  # before anything is waited for
            try:
                return await self._infer(request, options, turn)
            except SessionLost as error:
                if not turn.reports_loss:
                    raise
                lost = {"session_lost": ",".join(map(str, error.sessions))}
                return InferResponse(request.model, "", request.id, [], lost)

    def plain(self, held: ModelLane, request: InferRequest) -> tuple[int, list[str]] | None:
        """Return the number of rows of a request and the names of its outputs, which do not depend on its contents.

        Return None if the request has special features and must be parsed each time. Raises Error if it is invalid.
        """
        spec = held.spec
        if request.model in self._panels or spec.open or held.sessions is not None:
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
        return n, [name for name, _ in self._wanted(spec.outputs, request.outputs, n)]

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
        seconds = min(value for value in (options.seconds, request.seconds, DEFAULT_TIMEOUT) if value is not None)
        until = time.monotonic() + min(seconds - SOON, MOMENT)
        spec = (await self.lanes.hold_soon(request.model, until)).spec
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
        rows, used = await self.cuda_regions.infer(spec, inputs, outputs, seconds, version)
        _require_version(request, version, used)
        self.record_outcome(request.model, True)
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
        return InferResponse(request.model, str(used), request.id, made, dict(_FINAL) if options.final else {})

    async def _infer(
        self, request: InferRequest, options: RequestParameters, turn: SequenceTurn | None
    ) -> InferResponse:
        version = weights_version(request.version)
        seconds = min(value for value in (options.seconds, request.seconds, DEFAULT_TIMEOUT) if value is not None)
        until = time.monotonic() + seconds
        exchanged = min(until - SOON, time.monotonic() + MOMENT)
        tries = _TRIES
        failed: Mapping[int, str] = {}
        while True:
            held = await self.lanes.hold_soon(request.model, exchanged, options.priority)
            _require_sequence(held, turn)
            takes, gives = _specs(held.spec, options)
            own = {} if options.state else held.spec.parameters
            options.require_known(own)
            inputs, n = self._inputs(held, takes, request.inputs, own, options.free)
            if turn is not None and options.state == GET:
                n = len(turn.keys)
            places = self._wanted(gives, request.outputs, n)
            size = n * sum(gives[name].row_bytes for name, place in places if place is None)
            with room_for_answer(size):
                try:
                    if turn is None:
                        arrays, used = await self.lanes.ask(held, inputs, n, until - time.monotonic(), version)
                    else:
                        arrays, used = await turn.infer(self.lanes, held, inputs, n, until, version, options.state)
                    break
                except RowFailed as error:
                    self.record_outcome(request.model, True)
                    if not options.row_errors or not error.errors:
                        raise
                    outputs = (
                        error.outputs if len(held.spec.outputs) > 1 else {next(iter(held.spec.outputs)): error.outputs}
                    )
                    arrays, used, failed = outputs, error.version, error.errors
                    break
                except NoSession:
                    # A lane with few rows, leased while others held the rest, is soon exchanged for a larger one.
                    if not held.makeshift or time.monotonic() > exchanged:
                        self.record_outcome(request.model, False)
                        raise
                    await asyncio.sleep(SOON)
                except Error as error:
                    tries -= 1
                    if turn is not None and error.code in _GONE:
                        self.lanes.retire(held)
                        if error.code == Code.STALE_LEASE and not turn.begins:
                            raise turn.lost() from None
                    if error.code == Code.STALE_LEASE and tries:
                        continue  # the next lane may have another spec, so all checks run again
                    self.record_outcome(request.model, False)
                    raise
        _require_version(request, version, used)
        self.record_outcome(request.model, True)
        parameters: dict[str, Any] = dict(_FINAL) if options.final else {}
        if failed:
            parameters |= row_errors(failed)
        made = [self._output(gives[name], name, arrays[name], place, failed, options) for name, place in places]
        return InferResponse(request.model, str(used), request.id, made, parameters)

    async def _panel(self, request: InferRequest, members: Mapping[str, Any]) -> InferResponse:
        """Run all members of a panel concurrently; a row without a score from one of them has no total.

        Raises:
            RowFailed: rows failed and the request does not set row_errors. Any error of a member's request.
        """
        options = request_parameters(request.parameters) if request.parameters else NO_PARAMETERS
        if options.steps is not None or options.over or request.version:
            raise Refused(f"{request.model!r} is a panel: it has neither sequences nor a version", Code.UNSUPPORTED)
        if any(of_tensor(one.name, one.parameters)[0] is not None for one in request.outputs):
            raise Refused(f"{request.model!r} is a panel: its outputs do not go to shared memory", Code.UNSUPPORTED)
        known = {models.TOTAL: None, **members}
        names = [wanted.name for wanted in request.outputs] or list(known)
        if unlisted := [name for name in names if name not in known]:
            raise SpecMismatch(f"output {unlisted[0]!r} is not the panel's; there are {', '.join(known)}")
        seconds = min(value for value in (options.seconds, request.seconds, DEFAULT_TIMEOUT) if value is not None)
        until = time.monotonic() + min(seconds - SOON, MOMENT)
        specs = [(await self.lanes.hold_soon(member["model"], until)).spec for member in members.values()]
        takes = {name for spec in specs for name in spec.inputs}
        if unknown := [tensor.name for tensor in request.inputs if tensor.name not in takes]:
            raise SpecMismatch(f"input {unknown[0]!r} is not the panel's; it takes {', '.join(sorted(takes))}")
        requests = [
            InferRequest(
                member["model"],
                "",
                "",
                [tensor for tensor in request.inputs if tensor.name in spec.inputs],
                [RequestedOutput(score_output(member["model"], member["output"], spec.outputs))],
                {**request.parameters, ROW_ERRORS: True},
                request.seconds,
            )
            for member, spec in zip(members.values(), specs, strict=True)
        ]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_kept(self.infer(one))) for one in requests]
        answers = [task.result() for task in tasks]
        for answer in answers:
            if isinstance(answer, Error):
                raise answer
        return self._voted(request, members, [a for a in answers if isinstance(a, InferResponse)], names, options)

    def _voted(
        self,
        request: InferRequest,
        members: Mapping[str, Any],
        answers: Sequence[InferResponse],
        names: Sequence[str],
        options: RequestParameters,
    ) -> InferResponse:
        arrays: dict[str, NDArray[Any]] = {}
        failed: dict[int, str] = {}
        for name, answer in zip(members, answers, strict=True):
            # A copy: failed rows are overwritten, since they hold no score (0 if the output has an integer dtype).
            scores = arrays[name] = np.array(answer.outputs[0].array, np.float32).reshape(-1)
            wrong = {int(row): why for row, why in json.loads(answer.parameters.get(ROW_ERRORS, "{}")).items()}
            for row in np.flatnonzero(~np.isfinite(scores)).tolist():
                wrong.setdefault(row, f"the score is {scores[row]}")
            for row, why in wrong.items():
                scores[row] = np.nan
                failed[row] = f"{failed[row]}; {name}: {why}" if row in failed else f"{name}: {why}"
        if len({len(scores) for scores in arrays.values()}) > 1:
            raise SpecMismatch("the members' inputs have different numbers of rows: expected as many of each")
        weighted = [np.float64(member["weight"]) * arrays[name] for name, member in members.items()]
        with np.errstate(over="ignore"):  # checked below
            total = arrays[models.TOTAL] = np.sum(weighted, axis=0).astype(np.float32)
        for row in np.flatnonzero(~np.isfinite(total)).tolist():
            failed.setdefault(row, f"the total is {total[row]}")
            total[row] = np.nan
        version = min((int(answer.version or 0) for answer in answers), default=0)
        if failed and not options.row_errors:
            raise RowFailed(
                f"{len(failed)} of {len(total)} rows have no total; the first: {failed[min(failed)]}",
                errors=failed,
                outputs=arrays,
                version=version,
            )
        parameters: dict[str, Any] = dict(_FINAL) if options.final else {}
        if failed:
            parameters |= row_errors(dict(sorted(failed.items())))
        given = [
            Output(name, "FP32", arrays[name].shape, arrays[name], {}, tuple(np.flatnonzero(np.isnan(arrays[name]))))
            for name in names
        ]
        return InferResponse(request.model, str(version), request.id, given, parameters)

    def _inputs(
        self,
        held: ModelLane,
        specs: Mapping[str, TensorSpec],
        given: list[Input],
        parameters: Mapping[str, Parameter],
        free: Parameters,
    ) -> tuple[dict[str, Rows], int]:
        """Return the rows of each input by name, and their number n.

        Args:
            parameters: those of the model.
            free: their values in the request.
        """
        arrays: dict[str, Rows] = {}
        n = 0
        for tensor in given:
            spec = specs.get(tensor.name)
            if spec is None or tensor.name in arrays:
                what = "came twice" if spec else "is not the model's"
                raise SpecMismatch(
                    f"input {tensor.name!r} {what}; model {held.spec.name!r} takes {', '.join(specs) or 'none'}"
                )
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
            raise SpecMismatch(f"model {held.spec.name!r} takes {', '.join(specs)}; came {', '.join(arrays) or 'none'}")
        return arrays, n

    def _input(self, tensor: Input, spec: TensorSpec) -> Rows:
        place, extents = of_tensor(tensor.name, tensor.parameters) if tensor.parameters else (None, None)
        source: InputData
        if place is not None:
            if tensor.data is not None:
                raise malformed(f"input {tensor.name!r} came with data and in shared memory: expected one of the two")
            source = RegionData(self.regions, place, tensor.name)
        elif tensor.data is None:
            source = InputData(tensor.name)
        else:
            source = RawData(tensor.name, tensor.data) if tensor.raw else TypedData(tensor.name, tensor.data)
        return rows_of(tensor.name, tensor.datatype, tensor.shape, spec, extents, source)

    def _wanted(
        self, specs: Mapping[str, TensorSpec], wanted: list[RequestedOutput], n: int
    ) -> list[tuple[str, Place | None]]:
        """Return the requested outputs, each with its place in shared memory or None; check them before computing."""
        if not wanted:
            return [(name, None) for name in specs]
        places: dict[str, Place | None] = {}
        for output in wanted:
            if output.name not in specs:
                raise SpecMismatch(f"output {output.name!r} is not the model's; there are {', '.join(specs) or 'none'}")
            if output.name in places:
                raise SpecMismatch(f"output {output.name!r} was asked for twice: name each once")
            place, extents = of_tensor(output.name, output.parameters) if output.parameters else (None, None)
            if extents is not None:
                raise malformed(f"output {output.name!r}: extents are the answer's to say; ask with extents: true")
            if place is not None:
                spec = specs[output.name]  # if its rows differ in size, the size of the output is not known yet
                self.regions.check(place, 0 if spec.variable else n * spec.row_bytes, output.name)
            places[output.name] = place
        return list(places.items())

    def _output(
        self,
        spec: TensorSpec,
        name: str,
        rows: Rows,
        place: Place | None,
        failed: Mapping[int, str],
        options: RequestParameters,
    ) -> Output:
        output = output_of(name, spec, rows, failed, extents=options.extents)
        if place is None:
            return output
        array = output.array
        written = np.frombuffer(output.raw(), np.uint8) if isinstance(array, list) else array
        assert written is not None
        self.regions.write(place, written, name)
        return Output(name, output.datatype, output.shape, None, {**output.parameters, **place.parameters()})

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
            return await self.self_test.ask(name, wanted)
        if version and model["weights"]["version"]:  # version "0": the weights with which it was loaded
            return f"version 0 of {name!r} is not held, {model['weights']['version']} is the newest"
        return await self.self_test.silent(name)

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

    def give_up(self, error: Error) -> None:
        """Fail all requests that wait or are in flight."""
        self.lanes.give_up(error)

    def close(self) -> None:
        """Release all lanes and regions."""
        self.lanes.close()
        self.regions.close()


async def _kept(answer: Coroutine[Any, Any, InferResponse]) -> InferResponse | Error:
    """Return the answer or its error, so that an error does not cancel the other members' requests."""
    try:
        return await answer
    except Error as error:
        return error


def _require_version(request: InferRequest, version: int, used: int) -> None:
    """Raise ModelNotFound if a request names a version that did not answer it: 0, when newer weights are in use."""
    if request.version and used != version:
        raise ModelNotFound(
            f"version {version} of {request.model!r} is not held, {used} is the newest: name one that is, or none"
        )


def _specs(model: ModelSpec, options: RequestParameters) -> tuple[Mapping[str, TensorSpec], Mapping[str, TensorSpec]]:
    """Return the specs of a request's inputs and outputs; for a state exchange, those of the state and none."""
    if options.state == GET:
        return {}, model.state
    return (model.state, {}) if options.state == SET else (model.inputs, model.outputs)


def _require_sequence(held: ModelLane, turn: SequenceTurn | None) -> None:
    """Check that a request belongs to a sequence exactly if the model is stateful.

    Raises:
        SpecMismatch: a stateful model without a sequence. Refused (code UNSUPPORTED): a stateless one with a sequence.
    """
    if held.spec.state and turn is None:
        raise SpecMismatch(
            f"model {held.spec.name!r} keeps state ({', '.join(held.spec.state)}): expected the parameter sequence_id, "
            "and sequence_start with the first request of a sequence"
        )
    if turn is not None and not held.spec.state:
        raise Refused(
            f"sequence_id: model {held.spec.name!r} keeps no state between requests, expected none", Code.UNSUPPORTED
        )


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
