"""The Open Inference Protocol over gRPC: the service, and the forms of its requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, TypeAlias

from google.protobuf.json_format import ParseDict

from jurybox import native
from jurybox.protocol import open_inference_pb2 as pb
from jurybox.protocol import open_inference_pb2_grpc
from jurybox.protocol.errors import Code, Error, Refused, said
from jurybox.protocol.row_frames import field_head
from jurybox.protocol.wire import require_name
from jurybox.server.gateway.grpc_server import Service
from jurybox.server.gateway.inference import models
from jurybox.server.gateway.inference.fast_path import FastPaths
from jurybox.server.gateway.inference.forms import Forms
from jurybox.server.gateway.inference.infer_messages import answer_of, message_of, plain_value, request_of
from jurybox.server.gateway.inference.inference import OpenInference
from jurybox.server.gateway.inference.requests import InferRequest, InferResponse, Output
from jurybox.server.security.doors import Doors, refusal
from jurybox.server.security.grpc import DirectCall
from jurybox.server.security.limits import CALLER, GRPC, Charge

Context: TypeAlias = Any  # grpc.aio.ServicerContext; grpcio has no types

_SEQUENCE_IDS = ("string_param", "int64_param", "uint64_param")  # of a parameter that may name a sequence
_AFTER_ERROR = 0.002  # seconds before the next request of a stream whose last answer was an error
_PIPELINED = 64  # requests of one stream in flight
_MOST_SAID = 1000  # characters of an error message
_METHODS = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
_MODEL_INFER = f"/{_METHODS.full_name}/ModelInfer"


def service(oip: OpenInference, budget: native.Budget, doors: Doors | None = None) -> Service:
    """Return the service for a GrpcServer; `budget` is that of the process.

    Streams end when `doors` have closed.
    """
    known = KnownForms(oip)
    return Service(
        _METHODS.full_name,
        pb.DESCRIPTOR,
        InferenceServicer(oip, budget, doors or Doors()),
        open_inference_pb2_grpc.add_GRPCInferenceServiceServicer_to_server,
        {_MODEL_INFER: known},
        known.lanes.forms,
    )


_ID, _RAW_OUT = 0x1A, 0x32  # tags: field number and wire type LEN


class KnownForms:
    """A direct method that answers ModelInfer if the form of the request is cached.

    Attributes:
        lanes: those of the forms that are requested often, which native code answers.
    """

    def __init__(self, oip: OpenInference) -> None:
        self._forms = Forms(oip, _read_form, _written_heads)
        self.lanes = FastPaths(_MODEL_INFER, oip.frontend.lanes, oip.frontend.record_outcome)

    def __call__(self, message: bytes, call: DirectCall) -> bool:
        """Answer the call, or return False; a `Direct` method of security.grpc."""
        parts = native.cut_infer_request(message)
        if parts is None:
            return False
        head, ident, raw = parts
        form = self._forms.get(head)
        if form is None or (inputs := form.rows(message, raw)) is None:
            return False
        call.on_gone = form.ask(inputs, call.time_remaining(), _GrpcResponder(call, ident), call.room()).drop
        self.lanes.consider(head, form)
        return True


class _GrpcResponder:
    """A gRPC call as a `Responder` of forms.py."""

    __slots__ = ("_call", "_ident", "connection", "done")

    def __init__(self, call: DirectCall, ident: bytes) -> None:
        self._call = call
        self._ident = ident
        self.done = call.done
        self.connection = call.connection

    def reply(self, pieces: list[bytes]) -> None:
        if self._ident:
            pieces += (field_head(_ID, len(self._ident)), self._ident)
        self._call.reply(b"".join(pieces))

    def fail(self, error: Error) -> None:
        if error.code == Code.STALE_LEASE:  # the normal path uses another lane, perhaps with another spec
            self._call.as_usual()
        else:
            self._call.fail(error)


def _read_form(head: bytes) -> InferRequest | None:
    try:
        request = request_of(pb.ModelInferRequest.FromString(head), None)
    except Exception:  # noqa: BLE001  the normal path reports what is wrong
        return None
    return None if any(one.data is not None for one in request.inputs) else request


def _written_heads(
    model: str, version: str, outputs: Sequence[Output], sizes: Sequence[int], parameters: Mapping[str, Any]
) -> list[bytes]:
    message = answer_of(InferResponse(model, version, "", list(outputs), dict(parameters)))
    heads = [field_head(_RAW_OUT, size) for size in sizes]
    heads[0] = message.SerializeToString() + heads[0]
    return heads


class InferenceServicer:
    """The inference service. Errors get the status codes of the table in jurybox.protocol.errors."""

    def __init__(self, oip: OpenInference, budget: native.Budget, doors: Doors) -> None:
        self._doors = doors
        self._oip = oip
        self._budget = budget

    async def ServerLive(self, request: pb.ServerLiveRequest, context: Context) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=await self._oip.live())

    async def ServerReady(self, request: pb.ServerReadyRequest, context: Context) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=not await self._oip.reasons())

    async def ModelReady(self, request: pb.ModelReadyRequest, context: Context) -> pb.ModelReadyResponse:
        require_name(request.name)
        try:
            why = await self._oip.model_reason(request.name, request.version)
        except Error as error:
            if error.code != Code.MODEL_NOT_FOUND:
                raise
            why = str(error)  # a model that is not here is not ready, as in Triton
        return pb.ModelReadyResponse(ready=not why)

    async def ServerMetadata(self, request: pb.ServerMetadataRequest, context: Context) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(**self._oip.metadata())

    async def ModelMetadata(self, request: pb.ModelMetadataRequest, context: Context) -> pb.ModelMetadataResponse:
        model = await self._oip.described(request.name, request.version)
        return ParseDict(models.metadata(model), pb.ModelMetadataResponse())

    async def ModelConfig(self, request: pb.ModelConfigRequest, context: Context) -> pb.ModelConfigResponse:
        model = await self._oip.described(request.name, request.version)
        return ParseDict({"config": models.config(model, self._oip.idle)}, pb.ModelConfigResponse())

    async def ModelStatistics(self, request: pb.ModelStatisticsRequest, context: Context) -> pb.ModelStatisticsResponse:
        found = await self._oip.statistics(request.name, request.version)
        return ParseDict({"model_stats": found}, pb.ModelStatisticsResponse())

    async def ModelInfer(self, request: pb.ModelInferRequest, context: Context) -> pb.ModelInferResponse:
        CALLER.set(context.peer())
        return message_of(await self._oip.infer(request_of(request, context.time_remaining())))

    async def ModelStreamInfer(
        self, requests: AsyncIterator[pb.ModelInferRequest], context: Context
    ) -> AsyncIterator[pb.ModelStreamInferResponse]:
        """Yield one answer or one error for each request, in order; several requests are in flight at once."""
        CALLER.set(context.peer())
        free, account = asyncio.Semaphore(_PIPELINED), getattr(context, "account", None)  # grpcio's context has none
        asked: asyncio.Queue[asyncio.Task[pb.ModelStreamInferResponse] | None] = asyncio.Queue()
        failing = False  # whether the last answer was an error

        async def take_in() -> None:
            try:
                while True:
                    request = await self._doors.message(anext(requests))
                    await free.acquire()
                    if failing:  # a flood of requests that are none, for example: other connections come first
                        await asyncio.sleep(_AFTER_ERROR)
                    asked.put_nowait(asyncio.create_task(self._streamed(request, account)))
            except (StopAsyncIteration, TimeoutError):  # the peer has ended the stream, or the doors have closed
                pass
            finally:
                asked.put_nowait(None)

        taking = asyncio.create_task(take_in())
        try:
            while (task := await asked.get()) is not None:
                answer = await task
                failing = bool(answer.error_message)
                yield answer
                free.release()
            await taking  # raises if the last message was no valid request
            if self._doors.closed:
                raise refusal()
        finally:
            taking.cancel()
            while not asked.empty():
                if (left := asked.get_nowait()) is not None:
                    left.cancel()

    async def _streamed(
        self, request: pb.ModelInferRequest, account: native.Account | None
    ) -> pb.ModelStreamInferResponse:
        charge = Charge(self._budget, account or native.Account(self._budget, GRPC))
        try:
            charge.take(request.ByteSize())
            try:
                answer = message_of(await self._oip.infer(request_of(request, None)))
            finally:
                charge.give()
        except Exception as error:  # noqa: BLE001  one request's error must not end the stream of the others
            # No await before this line: the sequence must be lost before its next request is processed.
            if "sequence_id" in request.parameters:
                sequence = request.parameters["sequence_id"]
                if (kind := sequence.WhichOneof("parameter_choice")) in _SEQUENCE_IDS:
                    self._oip.sequences.lose(request.model_name, getattr(sequence, kind))
            named = pb.ModelInferResponse(model_name=request.model_name, id=request.id)
            return pb.ModelStreamInferResponse(error_message=said(error, _MOST_SAID), infer_response=named)
        return pb.ModelStreamInferResponse(infer_response=answer)

    async def RepositoryIndex(self, request: pb.RepositoryIndexRequest, context: Context) -> pb.RepositoryIndexResponse:
        found = await self._oip.index(request.repository_name, ready=request.ready)
        return ParseDict({"models": found}, pb.RepositoryIndexResponse())

    async def RepositoryModelLoad(
        self, request: pb.RepositoryModelLoadRequest, context: Context
    ) -> pb.RepositoryModelLoadResponse:
        given = {name: plain_value(name, value) for name, value in request.parameters.items()}
        if given.get("keep") and (farewells := getattr(context, "farewells", None)) is not None:
            farewells[f"keep {request.model_name}"] = partial(self._oip.repository.keep_no_longer, request.model_name)
        await self._oip.repository.load(request.repository_name, request.model_name, given)
        return pb.RepositoryModelLoadResponse()

    async def RepositoryModelUnload(
        self, request: pb.RepositoryModelUnloadRequest, context: Context
    ) -> pb.RepositoryModelUnloadResponse:
        given = {name: plain_value(name, value) for name, value in request.parameters.items()}
        await self._oip.repository.unload(request.repository_name, request.model_name, given)
        return pb.RepositoryModelUnloadResponse()

    async def SystemSharedMemoryStatus(
        self, request: pb.SystemSharedMemoryStatusRequest, context: Context
    ) -> pb.SystemSharedMemoryStatusResponse:
        answer = pb.SystemSharedMemoryStatusResponse()
        for region in self._oip.regions.status(request.name):
            status = answer.regions[region.name]
            status.name, status.key = region.name, region.key
            status.offset, status.byte_size = region.offset, region.size
        return answer

    async def SystemSharedMemoryRegister(
        self, request: pb.SystemSharedMemoryRegisterRequest, context: Context
    ) -> pb.SystemSharedMemoryRegisterResponse:
        self._oip.regions.register(request.name, request.key, request.offset, request.byte_size)
        return pb.SystemSharedMemoryRegisterResponse()

    async def SystemSharedMemoryUnregister(
        self, request: pb.SystemSharedMemoryUnregisterRequest, context: Context
    ) -> pb.SystemSharedMemoryUnregisterResponse:
        self._oip.regions.unregister(request.name)
        return pb.SystemSharedMemoryUnregisterResponse()

    async def CudaSharedMemoryStatus(
        self, request: pb.CudaSharedMemoryStatusRequest, context: Context
    ) -> pb.CudaSharedMemoryStatusResponse:
        answer = pb.CudaSharedMemoryStatusResponse()
        for region in self._oip.cuda_regions.status(request.name):
            status = answer.regions[region.name]
            status.name, status.device_id, status.byte_size = region.name, region.device, region.size
        return answer

    async def CudaSharedMemoryRegister(
        self, request: pb.CudaSharedMemoryRegisterRequest, context: Context
    ) -> pb.CudaSharedMemoryRegisterResponse:
        self._oip.cuda_regions.register(request.name, request.raw_handle, request.device_id, request.byte_size)
        return pb.CudaSharedMemoryRegisterResponse()

    async def CudaSharedMemoryUnregister(
        self, request: pb.CudaSharedMemoryUnregisterRequest, context: Context
    ) -> pb.CudaSharedMemoryUnregisterResponse:
        await self._oip.cuda_regions.unregister(request.name)
        return pb.CudaSharedMemoryUnregisterResponse()

    async def TraceSetting(self, request: pb.TraceSettingRequest, context: Context) -> NoReturn:
        raise unsupported("the trace extension")

    async def LogSettings(self, request: pb.LogSettingsRequest, context: Context) -> NoReturn:
        raise unsupported("the logging extension")


def unsupported(what: str) -> Refused:
    """Return the error for an unsupported part of the protocol."""
    return Refused(f"{what} is not served here; there are: {', '.join(models.EXTENSIONS)}", Code.UNSUPPORTED)
