"""The transport of a lane over gRPC: every ticket is a ModelInfer call of the Open Inference Protocol.

Parameters known to a Jurybox gateway carry what the protocol cannot express: `extents` the sizes of rows of variable
size, `row_errors` the rows that failed, `session_client` and `sessions` the sessions of the rows, and `session_state`
whether the call reads or writes their state.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from jurybox.client.in_flight import Answer, Claim, InFlight
from jurybox.client.link import RowsHere
from jurybox.client.remote.grpc_caller import GrpcCaller, passed
from jurybox.client.remote.grpc_channel import failure
from jurybox.client.remote.grpc_messages import plain_messages
from jurybox.client.remote.infer_calls import InferCalls
from jurybox.client.transports.transport import RowPlace, Transport, Watching
from jurybox.protocol import open_inference_pb2 as pb
from jurybox.protocol.arena import LOAD, STORE
from jurybox.protocol.errors import Code, Error, plain
from jurybox.protocol.row_frames import checked_elements, extents_of_text, extents_text, joined_strings, split_strings
from jurybox.protocol.scoreboard import NORMAL
from jurybox.protocol.spec import BYTES, OIP_NAMES, ModelSpec, TensorSpec

if TYPE_CHECKING:
    import asyncio

_ROW_ERRORS = "row_errors"  # the parameter with which an answer tells failed rows apart
_FAREWELL = 0.5  # seconds to wait while the gateway is notified of closed sessions


class _GrpcCall:
    """A call that `send` starts; one that an interrupt kept from starting is made again."""

    __slots__ = ("started",)

    def __init__(self) -> None:
        self.started = False


class GrpcTransport(Transport):
    """Sends every ticket as a call.

    Args:
        calls: makes them.
        spec: the model's spec.
        rows: the lane's rows: inputs are read from them and outputs are written to them.
        priority: of all requests, one of scoreboard.PRIORITIES.
    """

    def __init__(self, calls: InferCalls, spec: ModelSpec, rows: RowsHere, priority: int = NORMAL) -> None:
        self._infer = calls
        self._started = calls.started()
        self._spec = spec
        self._rows = rows
        self._calls: dict[int, _GrpcCall] = {}  # by sequence, the last call; answers of earlier ones are dropped
        self._done: deque[tuple[_GrpcCall, InFlight, Any]] = deque()  # ended calls, until they are settled
        self._answers: dict[int, Answer] = {}  # that are in their rows, and not settled
        self._reading: dict[int, weakref.ref[Claim]] = {}  # the calls that copy an answer to its rows
        self._client = secrets.token_hex(16) if spec.state else ""  # identifies this lane's sessions to the gateway
        self._base = pb.ModelInferRequest(model_name=spec.name)
        self._base.parameters[_ROW_ERRORS].bool_param = True
        if any(tensor.variable for tensor in spec.outputs.values()):
            self._base.parameters["extents"].bool_param = True
        if priority != NORMAL:  # a server that knows none refuses it by name
            self._base.parameters["priority"].int64_param = priority
        self._plain = plain_messages(self._base, rows.columns)

    def send(self, ticket: InFlight) -> None:
        asked = self._calls[ticket.sequence] = _GrpcCall()
        try:
            request = self._request(ticket)
        except Error as error:
            self._done.append((asked, ticket, error))
        else:
            self._started.start(request, _left(ticket), lambda outcome: self._done.append((asked, ticket, outcome)))
        asked.started = True

    def exchange(self, ticket: InFlight, timeout: float) -> Answer | None:
        """See Transport.exchange. The call cannot be left and resumed: it takes up to the ticket's time-out."""
        if ticket.deadline <= time.monotonic_ns():  # gRPC would allow the call a millisecond, which may be enough
            return Answer(ticket.sequence, Code.TIMEOUT, passed(self._spec.name), 0, ticket.incarnation)
        try:
            call: Any = self._infer.ask(self._request(ticket), _left(ticket))
        except (Error, grpc.RpcError) as error:
            call = error
        return self._read(ticket, call)

    def caller(self, place: RowPlace) -> GrpcCaller | None:
        """See Transport.caller. None unless it is one row of an only input, and all rows have fixed sizes."""
        if self._plain is None or place.input is None or place.outputs is None or place.rows != 1:
            return None
        return GrpcCaller(self._infer, self._plain, place, self._read)

    def _request(self, ticket: InFlight) -> bytes:
        """Return a ticket's message. Raises Error (SPEC_MISMATCH) if a row's size is invalid."""
        if (plain := self._plain) is not None:
            return plain.request(ticket.first, ticket.rows, ticket.version)
        request = pb.ModelInferRequest()
        request.CopyFrom(self._base)
        if ticket.version:
            request.model_version = str(ticket.version)
        first, end = ticket.first, ticket.first + ticket.rows
        columns = self._rows.columns
        inputs, arrays = self._spec.inputs, columns.inputs
        if columns.sessions is not None:
            records = columns.sessions[first:end]
            if flags := int(records["flags"][0]):  # the same for all rows of a ticket
                inputs, arrays = (self._spec.state, columns.state_in) if flags & LOAD else ({}, {})
                request.parameters["session_state"].string_param = "set" if flags & LOAD else "get"
            steps = zip(records["slot"].tolist(), records["step"].tolist(), strict=True)
            request.parameters["session_client"].string_param = self._client
            request.parameters["sessions"].string_param = ";".join(f"{slot}:{step}" for slot, step in steps)
        for name, tensor in inputs.items():
            rows = arrays[name][first:end]
            if tensor.variable:
                self._add(request, name, tensor, rows, columns.input_extents[name][first:end].copy())
                continue
            request.inputs.add(name=name, datatype=OIP_NAMES[tensor.dtype], shape=rows.shape)
            request.raw_input_contents.append(rows.tobytes())
        return request.SerializeToString()

    @staticmethod
    def _add(
        request: pb.ModelInferRequest, name: str, spec: TensorSpec, slots: NDArray[Any], extents: NDArray[np.int64]
    ) -> None:
        """Add an input of variable row size. Raises Error (SPEC_MISMATCH) if a size is invalid."""
        counts = checked_elements(f"input {name!r}", spec, extents)
        parts = [slots[i, :count].tobytes() for i, count in enumerate(counts)]
        if spec.dtype == BYTES:
            request.inputs.add(name=name, datatype="BYTES", shape=[len(parts)])
            request.raw_input_contents.append(joined_strings(parts))
            return
        tensor = request.inputs.add(name=name, datatype=OIP_NAMES[spec.dtype])
        if (extents == extents[0]).all():
            tensor.shape.extend((len(parts), *spec.measured(extents[0].tolist())))
        else:
            tensor.shape.append(sum(counts))
            tensor.parameters["extents"].string_param = extents_text(extents.tolist())
        request.raw_input_contents.append(b"".join(parts))

    def end_sessions(self) -> None:
        """Notify the gateway that the sessions have ended. If that fails, they end after an idle time-out."""
        if not self._client:
            return
        request = pb.ModelInferRequest(model_name=self._spec.name)
        request.parameters["session_client"].string_param = self._client
        request.parameters["sessions"].string_param = ""
        with contextlib.suppress(Error, grpc.RpcError):
            self._infer.ask(request.SerializeToString(), _FAREWELL)

    def receive(self, timeout: float) -> Sequence[Answer]:
        until = time.monotonic() + timeout
        left = 0.0 if self._done else timeout
        while True:
            self._started.wait(max(0.0, left))
            for done in list(self._done):
                self._take_in(done)
            left = until - time.monotonic()
            if self._answers or left <= 0:
                return list(self._answers.values())

    def _take_in(self, done: tuple[_GrpcCall, InFlight, Any]) -> None:
        """Read the answer of a finished call, unless that was done or nobody waits for it."""
        asked, ticket, call = done
        sequence = ticket.sequence
        if self._calls.get(sequence) is not asked:
            self._drop(done)
        elif sequence not in self._answers and not self._reads(sequence):
            # A nested call leaves an answer that is being copied to the call that does so: it would settle it, and the
            # rows could be others' before the copy is complete.
            claim = Claim()
            self._reading[sequence] = weakref.ref(claim)
            try:
                answer = self._read(ticket, call)
            finally:
                self._reading.pop(sequence, None)
            self._answers[sequence] = answer

    def settled(self, answer: Answer) -> None:
        self._answers.pop(answer.sequence, None)
        if (asked := self._calls.pop(answer.sequence, None)) is not None:
            for done in list(self._done):
                if done[0] is asked:
                    self._drop(done)

    def _drop(self, done: tuple[_GrpcCall, InFlight, Any]) -> None:
        with contextlib.suppress(ValueError):  # a nested call has dropped it
            self._done.remove(done)

    def is_reading(self, ticket: InFlight) -> bool:
        return self._reads(ticket.sequence)

    def _reads(self, sequence: int) -> bool:
        return (reading := self._reading.get(sequence)) is not None and reading() is not None

    def holds(self, ticket: InFlight) -> bool:
        """See Transport.holds. Not the call of `exchange`: no engine writes to the rows of one that was interrupted."""
        return (asked := self._calls.get(ticket.sequence)) is not None and asked.started

    def watch(self, loop: asyncio.AbstractEventLoop, arrived: Callable[[], None]) -> None:
        self._started.watch(Watching(loop, arrived))

    def close(self) -> None:
        """See Transport.close. The garbage collector may call this at any point."""
        self._started.close()
        self._calls, self._answers = {}, {}

    def forked(self) -> None:
        self._started.forked()
        self._calls, self._answers, self._done = {}, {}, deque()

    def _read(self, ticket: InFlight, call: Any) -> Answer:
        def answer(code: int, message: str, version: int = 0) -> Answer:
            return Answer(ticket.sequence, code, message, version, ticket.incarnation)

        if isinstance(call, Error):  # the call was not sent
            return answer(call.code, str(call))
        if isinstance(call, grpc.RpcError):
            code, message = failure(call)
            late = (
                f"model {self._spec.name!r} did not answer in time ({message}): its server is busy, or the network "
                "to it is broken. Ask again: it is connected to again by itself"
            )
            return answer(code, late if code == Code.TIMEOUT else message)
        messages = self._plain
        try:
            if messages is not None and (seen := messages.take(ticket.first, ticket.rows, call)) is not None:
                return answer(Code.OK, "", seen)
            response = pb.ModelInferResponse.FromString(call)
            lost = self._told(response, "session_lost", ticket)
            if lost is not None:
                return answer(Code.SESSION_LOST, f"sessions of model {self._spec.name!r} have lost their state")
            failed = self._told(response, _ROW_ERRORS, ticket)
            self._take(response, ticket.first, ticket.rows)
        except (Error, ValueError, TypeError, AttributeError, RecursionError, DecodeError) as wrong:
            return answer(Code.PROTOCOL_MISMATCH, f"the server's answer cannot be read: {plain(wrong, 500)}")
        version = response.model_version
        number = int(version) if version.isascii() and version.isdigit() and len(version) < 20 else 0
        if failed:
            return answer(Code.ROW_FAILED, f"{failed} of {ticket.rows} rows failed", number)
        if messages is not None:
            messages.learn(ticket.rows, call, response, number)
        return answer(Code.OK, "", number)

    def _told(self, response: pb.ModelInferResponse, parameter: str, ticket: InFlight) -> int | None:
        """Mark the rows listed in a parameter as failed; return their number, or None if the parameter is absent.

        Raises:
            ValueError, TypeError, AttributeError, RecursionError: the parameter is malformed.
        """
        if parameter not in response.parameters:
            return None
        text = response.parameters[parameter].string_param
        if parameter == _ROW_ERRORS:
            reasons = {int(row): plain(reason) for row, reason in json.loads(text).items()}
        else:
            reasons = {int(row): "lost" for row in text.split(",") if row}
        if any(not 0 <= row < ticket.rows for row in reasons):
            raise ValueError(f"{parameter} has an index outside the {ticket.rows} rows that were sent")
        columns = self._rows.columns
        columns.reasons[ticket.first : ticket.first + ticket.rows] = 0
        for row, reason in reasons.items():
            columns.fail(ticket.first + row, reason)
        return len(reasons)

    def _take(self, response: pb.ModelInferResponse, first: int, rows: int) -> None:
        """Copy the outputs to their rows. Raises Error or ValueError if they do not match the model's spec."""
        pairs = zip(response.outputs, response.raw_output_contents, strict=True)
        came = {tensor.name: (tensor, raw) for tensor, raw in pairs}
        columns = self._rows.columns
        specs, outputs = self._spec.outputs, columns.outputs
        if columns.sessions is not None and (flags := int(columns.sessions["flags"][first])):
            specs, outputs = (self._spec.state, columns.state_out) if flags & STORE else ({}, {})
        for name, spec in specs.items():
            if name not in came:
                raise ValueError(f"output {name!r} is missing")
            tensor, raw = came[name]
            target = outputs[name][first : first + rows]
            if not spec.variable:
                if len(raw) != target.nbytes:
                    raise ValueError(f"output {name!r}: {target.nbytes} raw bytes were expected, came {len(raw)}")
                target[...] = np.frombuffer(raw, target.dtype).reshape(target.shape)
                continue
            self._take_variable(tensor, raw, spec, target, columns.output_extents[name][first : first + rows])

    @staticmethod
    def _take_variable(
        tensor: Any, raw: bytes, spec: TensorSpec, target: NDArray[Any], extents: NDArray[np.int64]
    ) -> None:
        """Copy an output of variable row size. Raises like `_take`."""
        what, rows = f"output {tensor.name!r}", len(target)
        if spec.dtype == BYTES:
            for i, row in enumerate(split_strings(what, raw, rows, spec.capacity)):
                target[i, : len(row)] = np.frombuffer(row, np.uint8)
                extents[i] = len(row)
            return
        if "extents" in tensor.parameters:
            sizes, counts = extents_of_text(what, tensor.parameters["extents"].string_param, spec)
        else:
            shape = tuple(tensor.shape)
            fits = spec.extents_of(shape[1:]) if min(shape, default=-1) >= 0 and shape[0] == rows else None
            if fits is None:
                raise ValueError(f"{what}: {rows} rows of {spec} were expected, came shape {list(shape)}")
            sizes, counts = [fits] * rows, [int(np.prod(shape[1:], dtype=np.int64))] * rows
        flat = np.frombuffer(raw, spec.numpy_dtype)
        if len(sizes) != rows or flat.size != sum(counts):
            raise ValueError(f"{what}: its sizes are of {len(sizes)} rows, {sum(counts)} elements; {flat.size} came")
        at = 0
        for i, (size, count) in enumerate(zip(sizes, counts, strict=True)):
            target[i, :count] = flat[at : at + count]
            extents[i] = size
            at += count


def _left(ticket: InFlight) -> float:
    return max(0.001, (ticket.deadline - ticket.submitted) / 1e9)
