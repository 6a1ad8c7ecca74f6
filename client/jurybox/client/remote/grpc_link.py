"""A connection to a server's gateway over gRPC, in the Open Inference Protocol."""

from __future__ import annotations

import json
import math
import time
from typing import Any

import grpc

from jurybox.client.lane import Lane
from jurybox.client.link import POLL, Link, OneEngine, RowsHere, Transfer, spec_of, traced, wants_traces
from jurybox.client.remote.grpc_channel import Channels, raised, through_proxy, token_metadata
from jurybox.client.remote.grpc_transport import GrpcTransport
from jurybox.client.remote.grpcio_calls import GrpcioCalls
from jurybox.client.remote.http2_calls import Http2Calls, can_dial
from jurybox.client.remote.infer_calls import InferCalls
from jurybox.client.remote.weights import RemotePublisher, RemoteWeightsReader
from jurybox.protocol import open_inference_pb2 as pb
from jurybox.protocol.control_pb2 import ModelMessage, StatusRequest, TensorSpecMessage
from jurybox.protocol.device_memory import Driver
from jurybox.protocol.errors import (
    SLEEPS,
    Code,
    ModelFailed,
    ModelNotFound,
    Refused,
    ServerGone,
    Timeout,
    asleep,
    plain,
)
from jurybox.protocol.parameters import Parameter
from jurybox.protocol.scoreboard import NORMAL
from jurybox.protocol.spec import OIP_NAMES, ModelSpec, specs_from_plain, tell_spec

_DTYPES = {name: dtype for dtype, name in OIP_NAMES.items()}
CONTRACT = "jurybox"  # the parameter of a model's configuration that holds its complete spec
_STATES = {"READY": "ready", "LOADING": "loading", "UNAVAILABLE": "failed"}


class GrpcLink(Link):
    """A link to a gateway. Its lanes exist only in this client; the gateway shares its own lanes among all clients.

    Args:
        address: grpc://host:port, or grpcs://host:port for TLS.
        token: the server's token; None: JURYBOX_TOKEN.
        timeout: seconds to wait for a server that is still starting.
        tls_ca: for grpcs://, the authority's certificate; None: JURYBOX_TLS_CA.
    """

    waits = True

    def __init__(self, address: str, token: str | None, timeout: float, tls_ca: str | bytes | None = None) -> None:
        self._address = address
        self._traces = wants_traces()
        self._channels = Channels(address, token_metadata(address, token), tls_ca)
        self._infer: InferCalls = GrpcioCalls(self._channels)
        try:
            try:
                self._channels.call("ServerLive", pb.ServerLiveRequest(), timeout, wait_for_ready=True)
            except grpc.RpcError as error:
                raise ServerGone(
                    f"no answer from {address} within {timeout:.1f} s ({error.details()}): is a server's gateway "
                    f"running there, and is it grpcs:// if it has a certificate?{through_proxy(address)}"
                ) from error
            self._told("ServerMetadata", pb.ServerMetadataRequest(), timeout)  # this call checks the token
            if can_dial(address, tls_ca):
                self._infer = Http2Calls(address, self._channels.metadata, tls_ca)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._closed = True
        self._infer.close()
        self._channels.close()

    def models(self, timeout: float) -> list[str]:
        return [model.name for model in self._index(timeout)]

    def describe(self, name: str, timeout: float) -> ModelMessage:
        """See Link.describe. The protocol reports neither the arena's rows nor the digest."""
        index = {model.name: model for model in self._index(timeout)}
        if name not in index:
            there = ", ".join(sorted(index)) or "none"
            raise ModelNotFound(f"no model {name!r} is served here; there are: {there}")
        state, reason = _STATES.get(index[name].state, "loading"), index[name].reason
        if state == "failed" and reason.startswith(SLEEPS):
            state, reason = "sleeping", reason.removeprefix(SLEEPS).removeprefix(": ")
        message = ModelMessage(name=name, state=state, reason=reason, settled=state != "loading")
        if state == "ready":
            metadata = self._told("ModelMetadata", pb.ModelMetadataRequest(name=name), timeout)
            config = self._told("ModelConfig", pb.ModelConfigRequest(name=name), timeout).config
            message.max_batch = max(1, config.max_batch_size)
            if CONTRACT in config.parameters:  # it includes what the metadata cannot express
                _tell(message, config.parameters[CONTRACT].string_value)
                return message
            for target, tensors in ((message.inputs, metadata.inputs), (message.outputs, metadata.outputs)):
                target.extend(
                    TensorSpecMessage(name=tensor.name, dtype=_dtype(tensor), shape=tensor.shape[1:])
                    for tensor in tensors
                )
        return message

    def status(self, timeout: float) -> str:
        """See Link.status. The gateway provides this call in addition to the Open Inference Protocol."""
        return str(self._told("Get", StatusRequest(), timeout).json)

    def load(self, name: str, settings_json: str, timeout: float, *, keep: float, remote: bool) -> None:
        """Load a model and wait until it has loaded. The gateway marks the settings as remote itself."""
        request = pb.RepositoryModelLoadRequest(model_name=name)
        if settings_json:
            request.parameters["settings"].string_param = settings_json
            request.parameters["keep"].int64_param = math.ceil(keep)
        elif keep:  # of its own, because a request whose only parameter is keep loads nothing
            self.keep(name, keep, timeout)  # first: if it is refused, nothing is loaded
        self._carried_out("RepositoryModelLoad", name, request, timeout)

    def keep(self, name: str, seconds: float, timeout: float) -> None:
        request = pb.RepositoryModelLoadRequest(model_name=name)
        request.parameters["keep"].int64_param = math.ceil(seconds)
        self._call("RepositoryModelLoad", request, timeout)

    def unload(self, name: str, timeout: float) -> None:
        self._call("RepositoryModelUnload", pb.RepositoryModelUnloadRequest(model_name=name), timeout)

    def sleep(self, name: str, timeout: float) -> None:
        """Move a model's weights to host memory and wait until that is done."""
        request = pb.RepositoryModelUnloadRequest(model_name=name)
        request.parameters["sleep"].bool_param = True
        self._carried_out("RepositoryModelUnload", name, request, timeout)

    def wake(self, name: str, timeout: float) -> None:
        """Move a sleeping model's weights back to the device and wait until that is done."""
        request = pb.RepositoryModelLoadRequest(model_name=name)
        request.parameters["wake"].bool_param = True
        self._carried_out("RepositoryModelLoad", name, request, timeout)

    def publisher(self, name: str, transfer: Transfer, timeout: float, driver: Driver | None = None) -> RemotePublisher:
        if driver is not None:
            raise Refused("device memory can be shared only on one host: connect over ipc:// or publish without device")
        return RemotePublisher(
            self._channels.lasting(),
            name,
            bfloat16=transfer == "bfloat16",
            changed_only=transfer == "changed",
            metadata=self._channels.metadata,
            timeout=timeout,
        )

    def weights(self, name: str, timeout: float) -> RemoteWeightsReader:
        return RemoteWeightsReader(self._channels.lasting(), name, metadata=self._channels.metadata, timeout=timeout)

    def lease(
        self, name: str, rows: int, timeout: float, *, wait: bool = True, priority: int = NORMAL
    ) -> tuple[Lane, ModelSpec, int]:
        """See Link.lease. If `rows` is 0, the lane has as many rows as the server's largest batch."""
        deadline = time.monotonic() + timeout
        while (message := self.describe(name, max(0.1, deadline - time.monotonic()))).state != "ready":
            if message.state == "sleeping":
                raise asleep(name)
            if message.state == "failed":
                raise ModelFailed(f"model {name!r} could not be loaded: {message.reason}")
            if not wait or time.monotonic() > deadline:
                raise Timeout(f"model {name!r} is still loading" + (f" after {timeout:.1f} s" if wait else ""))
            time.sleep(POLL)
        spec = spec_of(message)
        memory = RowsHere(spec, rows or message.max_batch)
        transport = GrpcTransport(self._infer, spec, memory, priority)
        carrier = traced(transport, name) if self._traces else transport
        lane = Lane(name, OneEngine(), memory, carrier, 0, 0, memory.rows, transport.end_sessions, far=True)
        return lane, spec, message.max_batch

    def _index(self, timeout: float) -> Any:
        return self._told("RepositoryIndex", pb.RepositoryIndexRequest(), timeout).models

    def _carried_out(self, method: str, name: str, request: Any, timeout: float) -> None:
        """Call a method that the gateway answers when every engine has carried it out."""
        try:
            self._call(method, request, timeout)
        except ServerGone as error:
            if not _late(error):
                raise
            raise Timeout(f"model {name!r} is still not ready after {timeout:.1f} s; it goes on") from error

    def _call(self, method: str, request: Any, timeout: float) -> Any:
        try:
            return self._channels.call(method, request, timeout)
        except grpc.RpcError as error:
            failed = raised(error, self._address)
            if failed.code == Code.TIMEOUT:
                raise ServerGone(self._silent(timeout)) from error
            raise failed from error

    def _told(self, method: str, request: Any, timeout: float) -> Any:
        """Call a method that changes nothing: again, while there is time, if the gateway got no answer itself."""
        until = time.monotonic() + timeout
        while True:
            try:
                return self._call(method, request, max(0.0, until - time.monotonic()))
            except ServerGone as error:
                if not _late(error):
                    raise
                if time.monotonic() + POLL > until:
                    raise ServerGone(self._silent(timeout)) from error.__cause__
            time.sleep(POLL)

    def _silent(self, timeout: float) -> str:
        return f"no answer from {self._address} within {timeout:.1f} s{through_proxy(self._address)}"


def _late(error: ServerGone) -> bool:
    """Whether a call's time, or that which the gateway gives its own, was over."""
    return bool(getattr(error.__cause__, "code", lambda: None)() == grpc.StatusCode.DEADLINE_EXCEEDED)


def _tell(message: ModelMessage, contract: str) -> None:
    """Fill in a model's inputs, outputs and state from the contract. Raises Refused if it cannot be parsed."""
    try:
        parsed = json.loads(contract)
        specs = (specs_from_plain(parsed[kind]) for kind in ("inputs", "outputs", "state"))
        given = parsed.get("parameters", {})  # which an older server does not tell
        parameters = {name: Parameter(*one) for name, one in given.items()}
        tell_spec(message, ModelSpec(message.name, *specs, parameters=parameters))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise Refused(f"the server's description of model {message.name!r} is malformed: {plain(error, 200)}") from None


def _dtype(tensor: Any) -> str:
    if tensor.datatype not in _DTYPES or not len(tensor.shape):
        raise Refused(f"tensor {tensor.name!r} is {tensor.datatype}{list(tensor.shape)}, which this client cannot send")
    return _DTYPES[tensor.datatype]
